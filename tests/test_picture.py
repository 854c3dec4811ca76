"""The whole model in one picture: its numbers, its links, its one sheet of paper."""

import re

import torch
from built import CHAPTERS, HTML, Page, need_the_book

from transformer_lib.runs import load_pretrained
from transformer_lib.transformer import Transformer, TransformerConfig

need_the_book()

NAME = "book/picture"
PAGES = re.compile(rb"/Type\s*/Page\b(?!s)")


def words():
    """The texts of the picture, in one line."""
    after = Page(NAME).html.split('class="whole-model-sheet"')[1]
    picture = after.split("own-notes")[0]
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", picture)
    return " | ".join(texts), picture


def test_numbers_are_those_of_the_base_model():
    with torch.device("meta"):
        model = Transformer(TransformerConfig.base(41_100))
    shown, _ = words()
    for part, digits in (
        (model, 1),
        (model.encoder, 1),
        (model.decoder, 1),
        (model.src_embedding, 1),
        (model.encoder.layers[0].self_attention, 2),
        (model.decoder.layers[0].feed_forward, 2),
    ):
        millions = sum(p.numel() for p in part.parameters()) / 1e6
        assert f"{millions:.{digits}f} M" in shown
    assert "rate min(1/√t, t/√4000³) / √512" in shown
    assert "The whole model: 65.1 M" in shown and "the paper says 65 M" in shown


def test_shapes_are_those_that_the_translator_reads():
    """The source ends in a sign of its own, and the target begins with one."""
    _, tokenizer, _ = load_pretrained("tatoeba-en-de")
    shown, _ = words()
    source, said = shown.split(" | ")[0], re.search(r"\| ([^|]+) \| BLEU", shown)[1]
    for text in (source, said):
        length = len(tokenizer.encode(text)) + 1
        assert f"ids: (1, {length})" in shown and f"(1, {length}, 512)" in shown
    pieces = " ".join(tokenizer.pieces(source))
    assert f"{pieces} | with &lt;/s&gt; at the end; ids" in shown


def test_every_sublayer_has_its_residual_and_the_memory_its_line():
    _, picture = words()
    left, right = picture.split("</svg>")[:2]
    assert [half.count('class="l r"') for half in (left, right)] == [2, 3]
    assert [half.count('class="l m"') for half in (left, right)] == [1, 1]
    leaves = re.search(r'd="M[\d.]+ [-\d.]+H[\d.]+V([-\d.]+)h2" class="l m"', left)[1]
    enters = re.search(r'd="M[-\d.]+ ([-\d.]+)H[\d.]+" class="l m"', right)[1]
    assert leaves == enters  # one straight line where the columns touch


def test_path_ends_in_a_translation_with_its_score():
    import sacrebleu

    shown, _ = words()
    said, bleu, reference = re.search(
        r"\| ([^|]+) \| BLEU ([\d.]+) \| 15 \| against [^|]+: \| (.+)$", shown
    ).groups()
    score = sacrebleu.sentence_bleu(said, [reference])
    assert bleu == f"{score.score:.1f}"


def test_every_chapter_up_to_the_score_is_linked():
    shown, picture = words()
    linked = set(re.findall(r'href="\.\./notebooks/([^"]+)\.html"', picture))
    assert all((HTML / f"notebooks/{name}.html").exists() for name in linked)
    told = set(re.findall(r"\b(0\d|1[0-5])\b", shown))
    chapters = {name.split("/")[1][:2] for name in CHAPTERS}
    assert {c for c in chapters if "01" <= c <= "15"} == told


def test_prints_on_one_sheet(window, site):
    page, troubles = window
    page.goto(f"{site}/{NAME}.html", wait_until="load")
    page.evaluate("() => { document.documentElement.dataset.theme = 'dark' }")
    pdf = page.pdf(prefer_css_page_size=True, print_background=True)
    assert len(PAGES.findall(pdf)) == 1
    assert re.search(rb"/MediaBox\s*\[0 0 59[45]\.\d+ 84[12]\.\d+\]", pdf), "not A4"
    page.emulate_media(media="print")
    colors = page.evaluate("""() => [...document.querySelectorAll('.whole-model rect')]
      .map(e => getComputedStyle(e)).map(s => `${s.fill} ${s.stroke}`)""")
    assert set(colors) == {"rgb(255, 255, 255) rgb(0, 0, 0)", "none rgb(0, 0, 0)"}
    assert page.locator(".own-notes").bounding_box()["width"] > 120
    page.emulate_media(media="screen")
    assert page.locator(".own-notes").is_hidden()
    assert not troubles


def test_words_stay_in_their_boxes(window, site):
    page, _ = window
    page.goto(f"{site}/{NAME}.html", wait_until="load")
    outside = page.evaluate("""() => {
      const out = (text, box) => {
        const [a, b] = [text, box].map(e => e.getBoundingClientRect());
        return a.left < b.left || a.right > b.right;
      };
      const all = [...document.querySelectorAll('.whole-model a')];
      return all.flatMap(a => [...a.querySelectorAll('text')]
        .filter(text => out(text, a.querySelector('rect'))))
        .concat([...document.querySelectorAll('.whole-model .s')]
          .filter(text => out(text, text.closest('svg').querySelector('.f'))))
        .map(text => text.textContent);
    }""")
    assert not outside
