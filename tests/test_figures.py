"""The figures of chapters 02 to 07: what they hold, what they say, how they answer."""

import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
import torch.nn.functional as F
from figures import OVERFLOW, check_figure, contents, html_of, said, shown
from test_scale import run_cells

from transformer_lib.figures import frame
from transformer_lib.figures import multihead as figures_of_heads
from transformer_lib.figures.attention import (
    plot_matrix,
    show_lookup,
    show_weights,
    softmax_figure,
    temperature_figure,
)
from transformer_lib.figures.decoder import masks_figure, writing_figure
from transformer_lib.figures.encoder import show_layer
from transformer_lib.figures.frame import COLORS, DARK, InteractiveFigure, cells, show
from transformer_lib.figures.hello import pieces_of, read_sentence, read_weights
from transformer_lib.figures.multihead import heads_figure, plot_heads
from transformer_lib.figures.positions import (
    clocks_figure,
    positions_figure,
    show_swap,
)
from transformer_lib.figures.transformer import show_next, show_transformer
from transformer_lib.looking_inside import look
from transformer_lib.multihead import MultiHeadAttention
from transformer_lib.positions import sinusoidal_positions
from transformer_lib.runs import load_pretrained

ROOT = Path(__file__).parents[1]
NOTHING = "Nothing is to be seen in it."

# --- the heat map ---------------------------------------------------------------------


def test_plot_matrix(tmp_path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    weights = torch.rand(2, 3, requires_grad=True)
    ax = plot_matrix(weights, ["a", "b"], ["c", "d", "e"], "Weights")
    assert [t.get_text() for t in ax.get_xticklabels()] == ["c", "d", "e"]
    assert [t.get_text() for t in ax.texts] == [
        f"{x:.2f}" for x in weights.detach().flatten().tolist()
    ]
    same = plot_matrix([[True, False]], ax=plt.subplots()[1])
    assert [t.get_text() for t in same.texts] == ["✓", ""]
    big = plot_matrix(np.full((30, 30), np.nan), colorbar_label="nothing")
    assert [text.get_text() for text in big.texts] == ["nothing; the full color is 1"]
    big.figure.savefig(tmp_path / "big.png")
    plt.close("all")
    with pytest.raises(ValueError, match=r"shape \(2, 3, 4\)"):
        plot_matrix(torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match="1 row labels for 2 rows"):
        plot_matrix(weights, ["a"])


def test_weights_and_a_look_up_say_what_they_show():
    """Both drawings, wide and narrow, hold the words and numbers of the head."""
    record = read_sentence()
    head, words = record["head"], pieces_of(record["source"])
    stored = np.array(record["attention"]["encoder"])[head["layer"] - 1]
    weights, at = stored[head["head"] - 1], words.index("his")
    drawn = html_of(show_weights(weights, words))
    assert f"his looks most at house, {weights[at].max():.2f}" in drawn
    largest = f">{weights[at].max():.2f}<".replace("0.", ".")
    assert drawn.count("<svg") == 2 and largest in drawn
    assert "var(--query" in drawn and "var(--key" in drawn
    with pytest.raises(ValueError, match="8 row labels"):
        show_weights(weights[:3], words)
    query, keys = head["queries"][at], head["keys"]
    drawn = html_of(show_lookup(query, keys, weights[at], words, "his"))
    for word, score in zip(words, np.array(keys) @ query, strict=True):
        assert f"{word} {score:.1f}, " in drawn and f">{score:.1f}<" in drawn
    assert drawn.count("× house") == 1  # the narrow one; the wide one shows the key


# --- drawings -------------------------------------------------------------------------

MATH = r"variance of $q \cdot k$ and $d_k$"


def variance(narrow):
    """A chart with what charts have: lines, marks, a band, a legend, a formula."""
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots()
    ax.plot([1, 10, 100], [1, 10, 1000], "o-", color=COLORS["query"], label="q & k")
    ax.fill_between([1, 100], 1, 2, color=COLORS["value"], alpha=0.2)
    ax.axhline(1, color="black")
    ax.set(xscale="log", ylim=(0, 20), title="narrow" if narrow else "wide")
    ax.set_ylabel(MATH)
    ax.legend()
    return fig


def test_colors_are_the_pages():
    style = (ROOT / "book/_static/book.css").read_text("utf-8")
    light, dark = re.findall(
        r"^(?::root|html\[data-theme=\"dark\"\]) \{(.*?)^\}", style, re.M | re.S
    )[:2]
    for page, ours in ((light, COLORS), (dark, DARK)):
        theirs = dict(re.findall(r"--(\w+): (#\w{6});", page))
        assert {name: theirs[name] for name in DARK} == {
            name: ours[name] for name in DARK
        }


def test_colors_of_formulas_are_the_figures_and_follow_the_theme():
    style = (ROOT / "book/_static/book.css").read_text("utf-8")
    names = {"Q": "query", "K": "key", "V": "value"}
    pages = [page.read_text("utf-8") for page in (ROOT / "notebooks").glob("*.ipynb")]
    found = re.findall(r"textcolor\{(.*?)\}\{(.*?)\}", "".join(pages))
    found = {(color, "".join(re.findall("[QKV]", said))) for color, said in found}
    assert found == {(COLORS[name], letter) for letter, name in names.items()}
    for color, letter in found:
        own = f"var(--{names[letter]})"
        assert f'g[fill="{color}"] {{ fill: {own}; stroke: {own}; }}' in style


def test_drawing_is_of_text_and_names_of_colors():
    import matplotlib.pyplot as plt

    page = html_of(
        show(variance, "A line that rises, and a band below it.", narrow=(3.4, 3))
    )
    assert 'aria-label="A line that rises, and a band below it."' in page
    assert page.count("<svg") == 2 and 'viewBox="0 0 680 340"' in page
    assert 'viewBox="0 0 340 300"' in page and " id=" not in page
    assert "url(" not in page and "<image" not in page and "://" not in page
    inside = page.split("</style>")[1]
    assert set(re.findall("#[0-9a-f]{6}", inside)) <= set(COLORS.values())
    assert "var(--query, #b8174f)" in inside and "fill-opacity:0.2" in inside
    assert ">wide<" in inside and ">narrow<" in inside and "q &amp; k<" in inside
    words = re.sub(
        "<[^>]*>", "", re.search(r"<text[^>]*>(variance.*?)</text>", inside)[1]
    )
    assert words.replace("\u200b", "") == "variance of q · k and dk"
    places = [float(x) for x in re.findall(r'd="M([\d.-]+)', inside)]
    assert min(places) >= 0 and max(places) <= 680  # what is beyond the axes is cut off
    assert not plt.get_fignums()


def test_drawing_refuses_what_cannot_follow_the_page(monkeypatch):
    import matplotlib.pyplot as plt

    def image(narrow):
        return plt.subplots()[1].imshow([[1, 2]])

    def fraction(narrow):
        return plt.figure().text(0, 0, r"$\frac{1}{2}$")

    said = "What it would show, in words."
    with pytest.raises(ValueError, match="draw a matrix with `cells`"):
        show(image, said)
    with pytest.raises(ValueError, match="frac"):
        show(fraction, said)
    with pytest.raises(ValueError, match="say what is to be seen"):
        show(variance, "a figure")
    monkeypatch.setattr(frame, "_MOST", 1000)
    with pytest.raises(ValueError, match="1 are allowed"):
        show(variance, said)
    plt.close("all")


def test_cells_are_as_strong_as_their_numbers():
    import matplotlib.pyplot as plt
    from matplotlib.colors import to_hex

    def drawn(matrix, **given):
        _, ax = plt.subplots()
        most = cells(ax, matrix, **given)
        found = {}
        for patch in ax.patches:
            color = patch.get_facecolor()
            for corners in patch.get_path().to_polygons():
                x, y = corners[:-1].mean(0).round().astype(int)
                found[y, x] = to_hex(color[:3]), color[3]
        plt.close("all")
        return most, found

    most, found = drawn([[1, 0, 0.5], [np.nan, 0.25, 0.1]])
    assert most == 1 and set(found) == {(0, 0), (0, 2), (1, 1), (1, 2)}
    assert {color for color, _ in found.values()} == {COLORS["weight"]}
    assert [found[at][1] for at in sorted(found)] == [1, 0.5, 0.25, 0.1]
    most, found = drawn([[-2, 1]], most=4, strength=0.5)
    assert most == 4
    assert found == {
        (0, 0): (COLORS["negative"], 0.25),
        (0, 1): (COLORS["positive"], 0.125),
    }


def test_drawing_follows_the_page(browser, tmp_path):
    figure = show(variance, "A line that rises, and a band below it.")
    for theme, width, wide in (("light", 900, True), ("dark", 390, False)):
        with shown(browser, tmp_path, figure, figure, theme=theme, width=width) as page:
            assert page.evaluate(OVERFLOW) <= 0
            (seen, _) = page.locator("svg:visible").all()
            assert ("wide" in seen.get_attribute("class")) == wide
            size = seen.locator("text").evaluate_all(
                "all => Math.min(...all.map(t => t.ownerSVGElement.getScreenCTM().a"
                " * parseFloat(getComputedStyle(t).fontSize)))"
            )
            assert size >= 13
            color, title = seen.evaluate("""svg => [
                svg.querySelector('path[style*="--query"]'),
                [...svg.querySelectorAll("text")].find(
                    t => /wide|narrow/.test(t.textContent)),
            ].map((e, i) => getComputedStyle(e)[i ? "fill" : "stroke"])""")
            assert color == ("rgb(184, 23, 79)" if wide else "rgb(255, 143, 171)")
            assert title == ("rgb(34, 40, 50)" if wide else "rgb(206, 214, 221)")


def walker(steps=4, **more):
    """A figure to step through: a dot that moves."""
    control = {"label": "step", "values": list(range(steps)), "start": 0, "steps": True}
    picture = """return {html: `<p data-say="Dot." data-move="dot" style="margin-left:`
      + `${20 * state.step}px">${tools.narrow ? "narrow" : "wide"}</p>`
      + "<b data-say='Other.'>x</b>", words: `Step ${state.step}.`};"""
    controls = {"step": control | {"play": True, "pace": 500} | more}
    return InteractiveFigure("A walk", None, controls, picture, variance, NOTHING * 2)


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_figure_plays(browser, tmp_path, motion):
    figure = walker()
    with shown(browser, tmp_path, figure, width=900, reduced_motion=motion) as page:
        play = page.get_by_role("button", name="play")
        play.focus()
        page.keyboard.press("Enter")
        page.wait_for_function("document.querySelector('input').value == '3'")
        assert said(page) == "Step 3." and play.inner_text() == "play"
        play.click()  # from the beginning
        page.wait_for_function("document.querySelector('input').value == '1'")
        running = page.evaluate("document.getAnimations().length")
        assert (running > 0) == (motion == "no-preference")
        page.get_by_role("button", name="next").click()  # stops it
        assert play.inner_text() == "play"
        assert page.locator(".stage p").inner_text() == "wide"
        page.set_viewport_size({"width": 390, "height": 700})
        page.locator(".stage p", has_text="narrow").wait_for()


# --- figures to touch -----------------------------------------------------------------


@pytest.fixture(scope="module")
def softmax_view():
    return softmax_figure()


def test_softmax_figure_holds_torch_s_numbers(softmax_view):
    """Weights, entropy and gradient, by torch's distributions and by differences."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(n, 1024, generator=generator) for n in (5, 10))
    value = torch.randn(10, 1, generator=generator).double()[:, 0]
    data = contents(softmax_view)["data"]
    assert data["widths"] == [2**i for i in range(11)]
    for i, w, j in ((0, 0, 0), (1, 3, 1), (2, 6, 2), (3, 6, 0), (4, 10, 1), (4, 10, 0)):
        d_k = data["widths"][w]
        divisor = (1, math.sqrt(d_k), d_k)[j]
        q, k = query[i, :d_k].double(), key[:, :d_k].double()

        def output(q, k=k, divisor=divisor):
            return F.softmax(k @ q / divisor, dim=0) @ value

        row = data["rows"][i][w]
        assert np.allclose(row["scores"], k @ q, atol=0.051)
        shown_divisor, entropy, gradient, *weights = row["states"][j]
        wanted = F.softmax(k @ q / divisor, dim=0)
        assert np.allclose(weights, wanted, atol=5.1e-4)
        assert shown_divisor == pytest.approx(divisor, rel=5e-3)
        distribution = torch.distributions.Categorical(probs=wanted)
        assert entropy == pytest.approx(float(distribution.entropy()), rel=6e-3)
        steps = 1e-5 * torch.eye(d_k).double()
        slopes = [(output(q + s) - output(q - s)) / 2e-5 for s in steps]
        assert gradient == pytest.approx(float(torch.stack(slopes).norm()), rel=0.01)


def test_softmax_figure_shows_what_the_chapter_says(softmax_view):
    """At 1024, undivided: three queries hear hardly anything, two too much."""
    at_1024 = [row[10]["states"] for row in contents(softmax_view)["data"]["rows"]]
    raw, root = ([states[j][2] for states in at_1024] for j in (0, 1))
    assert all(raw[i] < 0.1 * root[i] for i in range(3))
    assert all(raw[i] > 2 * root[i] for i in (3, 4))
    assert all(max(states[0][3:]) > 0.98 for states in at_1024[:3])
    assert all(max(states[1][3:]) < 0.9 for states in at_1024)


def test_softmax_figure_answers(browser, softmax_view, tmp_path):
    marks = [(".weight", "backgroundColor"), (".rail span", "backgroundColor")]
    check_figure(browser, tmp_path, softmax_view, marks)
    rows = contents(softmax_view)["data"]["rows"]
    with shown(browser, tmp_path, softmax_view, width=800) as page:

        def check(query, width, divisor):
            _, entropy, gradient, *weights = rows[query][width]["states"][divisor]
            bars = page.locator(".keys b").all_inner_texts()
            assert np.allclose([float(bar) for bar in bars], weights, atol=0.0051)
            heights = page.locator(".weight").evaluate_all(
                "bars => bars.map(b => b.getBoundingClientRect().height"
                " / b.parentElement.clientHeight)"
            )
            assert np.allclose(heights, weights, atol=0.02)
            entropy_shown, gradient_shown = page.locator(".meter b").all_inner_texts()
            assert float(entropy_shown.split()[0]) == pytest.approx(entropy, abs=5.1e-3)
            assert float(gradient_shown) == pytest.approx(gradient, rel=0.06, abs=6e-4)

        check(0, 6, 1)
        page.get_by_role("button", name="1", exact=True).click()
        check(0, 6, 0)
        slider = page.get_by_role("slider", name="d_k")
        slider.focus()
        page.keyboard.press("End")
        assert slider.get_attribute("aria-valuetext") == "1024"
        check(0, 10, 0)
        page.keyboard.press("ArrowLeft")
        page.get_by_role("button", name="query 5").click()
        check(4, 9, 0)
        page.get_by_role("button", name="d_k", exact=True).click()
        check(4, 9, 2)
        assert said(page).startswith("d_k = 512, scores divided by d_k = 512")


def test_temperature_figure_turns_the_softmax(browser, tmp_path):
    record = read_sentence()
    q, k, v = (torch.tensor(record["head"][n]) for n in ("queries", "keys", "values"))
    words = pieces_of(record["source"])
    figure = temperature_figure(q, k, v, words, "house")
    marks = [(".weight", "backgroundColor"), (".rail span", "backgroundColor")]
    check_figure(browser, tmp_path, figure, marks)
    rows = contents(figure)["data"]["rows"]
    for at, temperature in enumerate(2 ** (i / 2) for i in range(-4, 17)):
        leaf = q.clone().requires_grad_()
        weights = F.softmax(leaf @ k.T / temperature, dim=-1)
        (weights @ v).sum().backward()
        weights = weights.detach()
        wanted = torch.special.entr(weights).sum(-1), leaf.grad.norm(dim=-1)
        for i, row in enumerate(rows):
            theirs = [temperature, *(float(numbers[i]) for numbers in wanted)]
            assert row[0]["states"][at][:3] == pytest.approx(theirs, rel=0.01, abs=1e-4)
            assert np.allclose(row[0]["states"][at][3:], weights[i], atol=6e-4)
    trained = record["attention"]["encoder"][record["head"]["layer"] - 1]
    for row, wanted in zip(rows, trained[record["head"]["head"] - 1], strict=True):
        at_root = row[0]["states"][9][3:]  # 2 ** 2.5 is the root of 32
        assert np.allclose(at_root, wanted, atol=4e-3)
    with shown(browser, tmp_path, figure, width=800) as page:
        page.get_by_role("button", name="query of The").click()
        slider = page.get_by_role("slider", name="temperature")
        slider.focus()
        page.keyboard.press("Home")
        assert slider.get_attribute("aria-valuetext") == "0.25"
        bars = [float(bar) for bar in page.locator(".keys b").all_inner_texts()]
        assert np.allclose(bars, rows[0][0]["states"][0][3:], atol=6e-3)
        page.get_by_role("button", name="next").click()
        assert "scores divided by 0.354: the largest weight is 1.00" in said(page)
        page.get_by_role("button", name="query of his").click()
        assert page.locator(".keys i").all_inner_texts() == words


def test_figures_run_when_put_in_later(browser, softmax_view, tmp_path):
    """As a notebook does: all of the HTML first, then its scripts, one by one."""
    import matplotlib.pyplot as plt

    picture = "return {html: `<b data-say='Seen.'>x</b>`, words: `Rest ${data}.`}"
    other = InteractiveFigure("other", 7, {}, picture, plt.figure(), NOTHING)
    put = """html => {
      document.body.innerHTML = html;
      for (const old of document.querySelectorAll("script")) {
        const script = document.createElement("script");
        script.textContent = old.textContent;
        old.replaceWith(script);
      }
    }"""
    both = html_of(other) + html_of(softmax_view)
    with shown(browser, tmp_path) as page:
        page.evaluate(put, both)
        assert page.locator(".interactive-figure[data-ready]").count() == 2
        assert page.locator(".interactive-figure > p").count() == 2
        assert said(page) == "Rest 7." and page.locator(".weight").count() == 10
        page.locator("b", has_text="x").hover()
        assert said(page) == "Seen."


def test_figure_escapes_and_refuses():
    import matplotlib.pyplot as plt

    odd = "</script><b>\"&'" * 2
    figure = InteractiveFigure(odd, [odd], {}, "return {}", plt.figure(), odd)
    assert contents(figure)["data"] == [odd]
    assert html_of(figure).count("</script>") == 1
    assert "<b>" not in html_of(figure)
    with pytest.raises(ValueError, match="90 are allowed"):
        InteractiveFigure("x", "x" * 90_000, {}, "", plt.figure(), NOTHING)
    assert not plt.get_fignums()  # none is left open


# --- the figure to switch heads in ----------------------------------------------------


@pytest.fixture(scope="module")
def chapter_heads():
    """What the cells under the chapter's hood compute: words and weights."""
    names = dict(vars(figures_of_heads)) | {"math": math, "torch": torch, "F": F}
    names |= {"MultiHeadAttention": MultiHeadAttention, "record": read_sentence()}
    names |= {"read_weights": read_weights, "sentencepiece": sentencepiece}
    marks = "def trained_attention", "def read_by", 'label="sentence"'
    return run_cells("under_the_hood/03_multihead", names, *marks)["found"]


def test_heads_are_those_of_the_whole_model(chapter_heads):
    """The chapter's few lines give what the model of chapter 07 computes."""
    model, tokenizer, _ = load_pretrained("tatoeba-en-de")
    layer = read_sentence()["head"]["layer"]
    for text, (labels, _, weights) in chapter_heads.items():
        whole = look(model, tokenizer, text, "")
        assert labels == [piece.replace("▁", "") for piece in whole.source]
        wanted = whole.weights["encoder"][layer - 1][0]
        torch.testing.assert_close(weights, wanted)


def test_heads_do_what_the_chapter_says(chapter_heads):
    """The record's head links the words it is to link; shares are as counted here."""
    record = read_sentence()
    text = record["source"]["text"]
    words, _, weights = chapter_heads[text]
    for asks, found, weight in record["candidates"][text]["relations"]:
        row = weights[record["head"]["head"] - 1, words.index(asks)]
        assert words[int(row.argmax())] == found
        assert row.max().item() == pytest.approx(weight, abs=0.001)
    names = {"found": chapter_heads, "record": record, "torch": torch}
    names["chosen"] = record["head"]["layer"]
    run_cells("under_the_hood/03_multihead", names, "labels, _, weights = found[")
    asking = range(len(words) - 1)
    for head, table in enumerate(weights.tolist()):
        counted = {
            "itself": [table[i][i] for i in asking],
            "before": [table[i][i - 1] for i in asking if i > 0],
            "after": [table[i][i + 1] for i in asking if i + 1 < len(words) - 1],
            "end": [table[i][-1] for i in asking],
        }
        for kind, weight in counted.items():
            share = names["shares"][kind][head].item()
            assert share == pytest.approx(sum(weight) / len(asking), abs=1e-5)
        rest = sum(names["shares"][kind][head].item() for kind in names["shares"])
        assert rest == pytest.approx(1)


def test_heads_figure_shows_each_head(browser, chapter_heads, tmp_path):
    notes = [[f"{t}.{h}" for h in range(8)] for t in range(2)]
    figure = heads_figure(chapter_heads, "sentence", (2, 5), notes)
    check_figure(browser, tmp_path, figure)
    sentences = list(chapter_heads)
    with shown(browser, tmp_path, figure, width=390, theme="dark") as page:

        def check(sentence, matrix):
            words, columns, _ = chapter_heads[sentence]
            matrix = matrix.double()
            cells = page.locator(".grid [data-say]")
            texts = [text and float("0" + text) for text in cells.all_inner_texts()]
            for got, wanted in zip(texts, matrix.flatten().tolist(), strict=True):
                assert wanted < 0.0955 if got == "" else abs(got - wanted) < 0.0056
            spoken = cells.evaluate_all("cells => cells.map(c => c.dataset.say)")
            for i, query in enumerate(words):
                for j, key in enumerate(columns):
                    words_here = spoken[i * len(columns) + j]
                    assert f"“{query}” gives the key “{key}”" in words_here
                    value = float(words_here.rstrip(".").split()[-1])
                    assert abs(value - float(matrix[i, j])) < 1.1e-3
            assert page.locator(".column-name").all_inner_texts() == columns

        first, second = (chapter_heads[sentence][2] for sentence in sentences)
        check(sentences[1], second[4])
        assert said(page).endswith("1.4")
        page.get_by_role("button", name="head 3").click()
        check(sentences[1], second[2])
        page.get_by_role("button", name=sentences[0]).click()
        check(sentences[0], first[2])
        assert said(page).endswith("0.2")
        page.get_by_role("button", name="mean of the heads").focus()
        page.keyboard.press("Enter")
        check(sentences[0], first.mean(dim=0))
        assert said(page).startswith(f"{sentences[0]}, mean of the heads: “")


def test_ten_columns_fit_a_phone(browser, tmp_path):
    """Queries of one sentence, keys of another, and nothing slides sideways."""
    record = read_sentence()
    rows, columns = pieces_of(record["target"]), pieces_of(record["source"])
    weights = {kind: torch.tensor(of[-1]) for kind, of in record["attention"].items()}
    tables = {
        "decoder": (rows, rows, weights["decoder"]),
        "cross": (rows, columns, weights["cross"]),
    }
    with shown(browser, tmp_path, heads_figure(tables, "use"), width=360) as page:
        for name, keys in (("decoder", rows), ("cross", columns)):
            page.get_by_role("button", name=name, exact=True).click()
            stage = page.locator(".stage")
            assert stage.evaluate("s => s.scrollWidth <= s.clientWidth")
            assert page.locator(".column-name").all_inner_texts() == keys
            assert page.locator(".row-name").all_inner_texts() == rows


def test_heads_figure_refuses():
    words = ["a", "b", "c"]
    with pytest.raises(ValueError, match="3 queries, 2 keys and weights of shape"):
        heads_figure({"a b c": (words, words[:2], torch.ones(2, 2, 2))}, "sentence")


# --- clocks and the table of positions ------------------------------------------------

TOKENS = "The old man sold his house . (end)".split()
HANDS = """figure => [...figure.querySelectorAll(".hand")].map(hand =>
  ["--from", "--to"].map(name => parseFloat(hand.style.getPropertyValue(name))))"""


@pytest.fixture(scope="module")
def clocks():
    return clocks_figure(TOKENS, d_model=256)


def test_clocks_answer(browser, clocks, tmp_path):
    check_figure(browser, tmp_path, clocks, [(".first", "stroke")])


@pytest.mark.parametrize("width", [360, 900])
def test_clock_hands_point_where_the_table_says(browser, clocks, tmp_path, width):
    """Sine and cosine of each hand are two numbers of the model's table."""
    table = sinusoidal_positions(len(TOKENS), 256)
    with shown(browser, tmp_path, clocks, width=width) as page:
        root = page.locator(".interactive-figure")

        def check(position):
            said = page.locator(".large").all()
            assert len(said) == 5
            for part, pair in zip(said, (0, 16, 32, 48, 64), strict=True):
                sentence = part.get_attribute("data-say").replace("−", "-")
                sentence = re.sub(r" \d on: .*", "", sentence)
                start = f"{TOKENS[position]}, position {position}, hand {pair + 1}: "
                assert sentence.startswith(start)
                numbers = re.search(r"sin (\S+), cos (\S+)\.( |$)", sentence)
                wanted = table[position, 2 * pair : 2 * pair + 2].tolist()
                found = [float(n) for n in numbers.groups()[:2]]
                assert found == pytest.approx(wanted, abs=0.0051)

        check(2)
        slider = page.get_by_role("slider", name="position")
        slider.focus()
        page.keyboard.press("ArrowRight")
        check(3)
        before, after = zip(*root.evaluate(HANDS), strict=True)  # it walks from 2 to 3
        speeds = contents(clocks)["data"]["speeds"]
        assert before == pytest.approx([2 * speed for speed in speeds])
        assert after == pytest.approx([3 * speed for speed in speeds])
        page.get_by_role("button", name="step 2").click()
        turned = re.findall(r"[\d.]+°", said(page))
        page.get_by_role("button", name="next").click()
        assert said(page).startswith("From his to . the hands turn by ")
        assert re.findall(r"[\d.]+°", said(page)) == turned  # wherever it is
        slider.press("End")  # position 5: two on is the last
        check(5)
        place = page.locator("[data-drag]").bounding_box()
        page.mouse.click(place["x"] + place["width"] * 1.5 / 8, place["y"] + 8)
        check(1)


def test_clocks_walk_by_themselves(browser, clocks, tmp_path):
    with shown(browser, tmp_path, clocks, reduced_motion="reduce") as page:
        hand = page.locator(".hand").first
        moves = hand.evaluate("hand => getComputedStyle(hand).animation")
        assert "none" in moves  # the hands jump where motion is unwanted
        page.get_by_role("button", name="play").click()
        page.get_by_text("house, position 5").first.wait_for()
        page.get_by_role("button", name="pause").click()


@pytest.fixture(scope="module")
def table_view():
    return positions_figure(d_model=64, positions=50, p=10, k=5)


def test_table_of_positions_answers(browser, table_view, tmp_path):
    check_figure(browser, tmp_path, table_view, [(".dot", "backgroundColor")])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_table_of_positions_holds_the_table(browser, table_view, tmp_path, theme):
    with shown(browser, tmp_path, table_view, theme=theme, width=900) as page:

        def product(pos, k, d_model):
            table = sinusoidal_positions(pos + k + 1, d_model)
            numbers = re.match(r"Row (\d+) times row (\d+): ([\d.-]+)\. ", said(page))
            assert [int(n) for n in numbers.groups()[:2]] == [pos, pos + k]
            wanted = (table[pos] @ table[pos + k]).item()
            assert float(numbers[3]) == pytest.approx(wanted, abs=2e-3)
            return float(numbers[3])

        before = product(10, 5, 64)
        page.get_by_label("position p").focus()
        page.keyboard.press("ArrowRight")
        assert product(11, 5, 64) == before  # only the distance counts
        page.get_by_role("slider", name="distance").focus()
        page.keyboard.press("Home")
        assert product(11, 0, 64) == 32
        page.get_by_role("button", name="d_model 16").click()
        assert product(11, 0, 16) == 8
        page.get_by_role("button", name="positions 16").click()
        page.get_by_label("position p").press("End")
        product(15, 0, 16)  # no row behind the last
        drawn = page.locator(".cells path").evaluate_all(
            "all => all.flatMap(p => p.getAttribute('d').split('M').slice(1).map(c =>"
            " [...c.split('h')[0].split(' ').map(Number),"
            " (p.style.fill.includes('negative') ? -1 : 1) * p.style.fillOpacity]))"
        )
        seen = torch.zeros(16, 16)
        for column, row, strength in drawn:
            seen[int(row), int(column)] = strength
        torch.testing.assert_close(
            seen, sinusoidal_positions(16, 16), atol=0.051, rtol=0
        )


def test_the_swap_is_drawn_from_what_is_given():
    outputs = torch.randn(4, 20, generator=torch.Generator().manual_seed(0))
    order = [0, 2, 1, 3]
    drawn = html_of(show_swap(["a", "b", "c", "(end)"], outputs, order, outputs[order]))
    assert "b and c are swapped" in drawn and drawn.count("<svg") == 2
    assert "(end)" not in drawn


# --- the figure of the masks ----------------------------------------------------------


@pytest.fixture(scope="module")
def masks_view():
    return masks_figure()


def real_places(count, left):
    return range(8 - count, 8) if left else range(count)


def test_masks_figure_holds_torch_s_numbers(masks_view):
    """Every setting, against torch's softmax over what may be seen."""
    head = read_sentence()["head"]
    held = contents(masks_view)["data"]["weights"]
    for count, left, causal, padding in itertools.product(
        range(1, 9), (0, 1), (0, 1), (0, 1)
    ):
        real = list(real_places(count, left))
        query, key = torch.zeros(2, 8, 32)
        query[real] = torch.tensor(head["queries"])[:count]
        key[real] = torch.tensor(head["keys"])[:count]
        hidden = torch.zeros(8, 8, dtype=torch.bool)
        if causal:
            hidden |= torch.ones(8, 8, dtype=torch.bool).triu(1)
        if padding:
            hidden |= ~torch.tensor([i in real for i in range(8)])
        scores = (query @ key.T / 32**0.5).masked_fill(hidden, -torch.inf)
        got = torch.tensor(held[count - 1][left][causal][padding]).view(8, 8) / 100
        wanted = scores.softmax(-1).nan_to_num(0)
        torch.testing.assert_close(got, wanted, atol=0.0051, rtol=0)


def test_masks_figure_says_why(browser, masks_view, tmp_path):
    """Each cell in each setting: allowed or not, and the reason, in words."""
    check_figure(browser, tmp_path, masks_view)
    held = contents(masks_view)["data"]["weights"]
    with shown(browser, tmp_path, masks_view) as page:
        slider = page.get_by_role("slider", name="words")

        def check(count, left, causal, padding):
            real = real_places(count, left)
            weights = held[count - 1][left][causal][padding]
            cells = page.locator(".grid [data-say]:not(.row-name)").evaluate_all(
                "all => all.map(c => [c.classList[1], c.textContent, c.dataset.say])"
            )
            allowed = 0
            for place, (kind, text, say) in enumerate(cells):
                i, j = divmod(place, 8)
                later, pad = causal and j > i, padding and j not in real
                assert kind == ("no" if later or pad else "yes")
                assert ("it comes later (causal mask)" in say) == bool(later)
                assert ("it is padding (padding mask)" in say) == bool(pad)
                assert ("nobody reads" in say) == (i not in real)
                unhidden = j not in real and kind == "yes"
                assert ("padding that no padding mask hides" in say) == unhidden
                allowed += kind == "yes"
                wanted = f"{weights[place] / 100:.2f}"
                assert text == (wanted.removeprefix("0") if kind == "yes" else "")
                assert (f"Weight {wanted}" in say) == (kind == "yes")
            assert f"{allowed} of 64 cells are visible" in said(page)
            rows = [cells[8 * i : 8 * i + 8] for i in range(8)]
            empty = sum(all(cell[0] == "no" for cell in row) for row in rows)
            assert (f"In {empty} of the rows" in said(page)) == (empty > 0)
            return empty

        assert check(6, 0, 1, 1) == 0
        page.get_by_role("button", name="causal mask: on").click()
        check(6, 0, 0, 1)
        page.get_by_role("button", name="padding mask: on").click()
        check(6, 0, 0, 0)
        page.get_by_role("button", name="padding mask: off").click()
        page.get_by_role("button", name="causal mask: off").click()
        page.get_by_role("button", name="left").click()
        assert check(6, 1, 1, 1) == 2
        slider.focus()
        for count in (5, 4, 3, 2, 1):
            page.keyboard.press("ArrowLeft")
            assert check(count, 1, 1, 1) == 8 - count
        row = page.locator(".row-name").nth(6)
        row.hover()
        count, total = re.search(r"may look at (\d) of (\d)", said(page)).groups()
        assert (count, total) == ("0", "8") or "Most weight is at" in said(page)
        lit = (
            "cells => cells.map(c => getComputedStyle(c).outlineStyle)"
            ".filter(style => style != 'none').length"
        )
        assert page.locator(".grid .r6").evaluate_all(lit) == 8
        assert page.locator(".grid .r5").evaluate_all(lit) == 0


# --- the decoder that writes ----------------------------------------------------------


@pytest.fixture(scope="module")
def writing_view():
    return writing_figure()


def test_writing_figure_holds_the_record_s_numbers(writing_view):
    record, data = read_sentence(), contents(writing_view)["data"]
    across = record["across"]
    table = record["attention"]["cross"][across["layer"] - 1][across["head"] - 1]
    assert data["across"] == [[round(1000 * w) for w in row] for row in table]
    back = np.mean(record["attention"]["decoder"][-1], axis=0)
    assert np.allclose(data["inside"], 1000 * back, atol=0.51)
    for row, wanted in zip(data["next"], record["next"], strict=True):
        assert [p for _, p in row] == [round(1000 * p, 1) for _, p in wanted[:5]]
    for n, row in enumerate(data["next"]):  # the first guess is what is written
        assert row[0][0] == data["target"][n + 1]
        assert sum(p for _, p in row) <= 1000
    words = "".join(f" {w}" if w[0] != "-" else w[1:] for w in data["target"][1:-1])
    assert words.replace(" .", ".").strip() == record["target"]["text"]


def test_writing_figure_writes(browser, writing_view, tmp_path):
    marks = [("path.across", "stroke"), ("path.inside", "stroke"), (".best", "fill")]
    check_figure(browser, tmp_path, writing_view, marks)
    data = contents(writing_view)["data"]
    for width in (390, 900):
        with shown(browser, tmp_path, writing_view, width=width) as page:
            assert page.evaluate(OVERFLOW) <= 0
            slider = page.get_by_role("slider")
            slider.focus()
            page.keyboard.press("Home")
            for t in range(len(data["next"])):
                assert (
                    page.locator(".write:not(.last *)").all_text_contents()
                    == (data["target"][: t + 1])
                )
                guesses = page.locator(".last text[data-say]").all_text_contents()
                assert guesses == [word for word, _ in data["next"][t]]
                assert f"last token is “{data['target'][t]}”" in said(page)
                outside = page.locator("svg.writing text:visible").evaluate_all(
                    "all => { const svg = all[0].ownerSVGElement;"
                    " const box = svg.getBoundingClientRect();"
                    " return all.map(t => t.getBoundingClientRect()).filter(t =>"
                    " t.left < box.left - 1 || t.right > box.right + 1).length; }"
                )
                assert outside == 0
                page.keyboard.press("ArrowRight")
            assert "the translation is finished" in said(page)
            assert page.locator(".write").all_text_contents() == data["target"]
            assert page.get_by_role("button", name="next").is_disabled()


# --- the drawings ---------------------------------------------------------------------


@pytest.mark.parametrize("order", ["post-norm", "pre-norm"])
def test_a_layer_is_drawn_with_every_part(order):
    drawn = show_layer(order)._repr_html_()
    for part in ("LayerNorm", "Dropout", "+"):  # in the narrow drawing
        narrow = drawn[drawn.index('class="narrow"') :]
        assert narrow.count(f">{part}<") == 2, part
    assert order.capitalize() in drawn  # in the words for who does not see it


def test_the_paper_s_figures_name_their_parts():
    """Figures 1 and 2, redrawn: every part of the paper's has its name."""
    import matplotlib.pyplot as plt

    def words(figure):
        texts = [text.get_text() for ax in figure.axes for text in ax.texts]
        plt.close(figure)
        return " ".join(texts)

    two = words(plot_heads())
    for part in ("divide by", "mask", "softmax", "average", "side by side", "$W^O$"):
        assert part in two, part
    _, wide, narrow = show_transformer().page.split("<svg ")
    for one in (wide, narrow):
        for part in "self-attention", "attention to memory", "feed-forward":
            assert f">{part}<" in one, part
        assert one.count("+ positions<") == 2
        assert one.count("mask<") == 3 and one.count(">N ×<") == 2


def test_the_translation_is_read_from_top_to_bottom():
    """Each row of the first figure of chapter 07 reads the first of the row above."""
    record = read_sentence()
    _, wide, narrow = show_next(record).page.split("<svg ")
    for best, _ in (steps[0] for steps in record["next"]):
        name = "(end)" if best == "</s>" else best.removeprefix("▁")
        assert f">{name}</text>" in wide and f">{name}</text>" in narrow
    tokens = [best for (best, _), *_ in record["next"]]
    assert tokens[:-1] == record["target"]["pieces"][1:]
