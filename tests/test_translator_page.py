"""The page that translates: its pieces, translations and controls, in a browser.

What it says in JavaScript is held against SentencePiece and the library in Python.
"""

import gzip
import json
import re
import warnings

import pytest
from built import HTML
from conftest import UNSEEN
from looks import BEYOND, LOOK, OVERFLOW, PREPARE, STANDARD
from test_live_pages import LIGHT_PAGE, Reader

from transformer_lib.export.onnx import rounded_to_8_bits
from transformer_lib.runs import load_pretrained
from transformer_lib.tokenizer import fold_text
from transformer_lib.translator import (
    Translator,
    cut_text,
    one_line,
    put_back,
    split_sentences,
    take_out,
    truecase,
    unknown_characters,
    wrong_numbers,
)

PAGE = "book/translator.html"


@pytest.fixture(scope="module", autouse=True)
def there():
    if not (HTML / "_static/translator-model/manifest.json").exists():
        pytest.skip(
            f"{UNSEEN}: npm brought no ONNX Runtime, so the built page has no model"
        )


TEXTS = """\
Hello!
We have to wait until tomorrow.
Über Straßen mit ä, ö, ü und ẞ
1,234.5 % of $3 is 0.5¢; 7/8 + ½ = 1¼
“Quotes”, ‘quotes’, «quotes», „quotes“ … and—dashes – too
ﬁne ﬂour, ﬀ ﬃ, Ⅷ ㎏ ™ ℃ ①
Ｆｕｌｌ ｗｉｄｔｈ， ｶﾞ and ガ
e\u0301 is é, A\u030a is Å, and Å is Å; ﷺ
😀 👍🏽 👨‍👩‍👧 🇩🇪
naïve café ☕, naïve again
日本語, Русский, ελληνικά, العربية
two  spaces   three\u00a0and\u3000wide
▁ is how ▁a space is written ▁
<s> </s> <unk> <pad> <0x41>
\ufeffmark, zero\u200bwidth, soft\u00adhyphen, \ufffd
don't isn't Tom's I'll
I
x²y₃ H₂O
supercalifragilisticexpialidocious Donaudampfschifffahrt
Dr. Smith met Mr. Jones. Did he? Yes... "No!" (Well.) e.g. this.
""".splitlines()
TEXTS += """\
犬です。猫？はい！ 終 好。A. b. C d.
他说：“好。”“走吧！” 「行く。」と言った。
यह घर है। वह किताब है।अच्छा ٣ كتب؟نعم
می\u200cخواهم x\u200cy, “I’m” ´so´, 👩\u200d👧 ❤\ufe0f 1\ufe0f\u20e3
""".splitlines()
TEXTS += ["", " ", "\u3000", "tab\tand\nline\r\nend\x00", "a" * 90, "\u0338", "▁"]

SENTENCES = """\
Hello!
We have to wait until tomorrow.
The old man who lives next door sold his house.
Why didn't you tell me that you were coming?
Can you help me carry these boxes upstairs?
Tom is reading a book.
I don't know what to say.
She closed the door quietly.
My brother lives in Boston with his wife and two children.
It has been raining since this morning, so we stayed at home.
If I had known that, I would have called you.
He is taller than his father.
The train was late again.
Who is that?
I forgot my keys.
He paid 3.50 euros for 2 coffees.
Zürich is a naïve café ☕.
How are you? I am Dr. Smith. Where is the station?
where is the ﬁre
NOBODY KNOWS WHAT WILL HAPPEN NEXT
The attention mechanism weighs every word of the sentence.
Yes.
Where are you? 🤔 I am waiting.
→ “I’m tired,” she said. 😴😴
That was funny 😂😂 but not true.
It costs £20 [in a shop].
My friend Dvořák lives here. Привет!
HELP! MY CAR WON'T START. 😴
The Old Bridge Was Closed Yesterday
Read https://example.org/page?id=7 before you come.
PLEASE WRITE TO Tom@Example.org, #Hashtag AND {name}.
The file %s is my_report.pdf.
""".splitlines()
LONG = ", and ".join(["my brother who lives in Boston sold the old house"] * 9) + "."


@pytest.fixture(scope="module")
def site(site):
    """The page in the built book, below another folder as on a project's site."""
    return f"{site}/{PAGE}"


class Person(Reader):
    """A person at the page of the translator."""

    @property
    def status(self):
        return self.page.locator(".translator-status")

    @property
    def output(self):
        return self.page.locator(".translator-output")

    def done(self):
        self.page.wait_for_function(
            "() => !document.querySelector('.translator-go').ariaDisabled &&"
            " /[.]$/.test(document.querySelector('.translator-status').textContent)"
        )

    def translate(self, text, beam="4"):
        self.page.get_by_label("English", exact=True).fill(text)
        self.page.get_by_label("Beam").select_option(value=beam)
        self.page.get_by_role("button", name="Translate").click()
        self.done()
        return self.output.text_content()


@pytest.fixture(scope="module")
def person(browser, site):
    someone = Person(browser, site)
    yield someone
    someone.context.close()


@pytest.fixture(autouse=True)
def nothing_goes_wrong(request):
    yield
    if "person" in request.fixturenames:
        person = request.getfixturevalue("person")
        troubles, person.troubles = person.troubles, []
        assert not troubles


@pytest.fixture(scope="module")
def engine(person):
    """The engine's own functions, in the page: code that ends in an expression."""
    person.page.evaluate(
        "async () => { const at = name => new URL(`../_static/${name}`, location.href);"
        " const e = await import(at('translator_engine.js').href);"
        " const model = await e.loadModel("
        "   at('translator-model/'), at('onnxruntime/'), 'test');"
        " window.engine = { ...e, model, tokenizer: model.tokenizer }; }"
    )
    return lambda code, argument=None: person.page.evaluate(code, argument)


@pytest.fixture(scope="module")
def translator():
    """The library, with the weights that the page has: in 8 bits."""
    model, *others = load_pretrained("tatoeba-en-de", "cpu")
    return Translator(rounded_to_8_bits(model), *others)


# --- before the first click -----------------------------------------------------------


def test_nothing_is_loaded_before_the_first_click(browser, site):
    person, answers = Person(browser, "about:blank"), []
    person.page.on("response", lambda response: answers.append(response))
    person.page.goto(site, wait_until="networkidle")
    assert not [u for u in person.asked if re.search("onnx|model|engine", u)]
    # As servers send it: what is text is packed.
    size = sum(len(gzip.compress(got.body())) for got in answers)
    assert 100_000 < size < LIGHT_PAGE
    assert person.page.get_by_label("English", exact=True).is_visible()
    assert not person.troubles
    person.context.close()


def test_only_the_page_loads_the_script(person):
    others = [HTML / "book/how_to_read.html", HTML / "notebooks/22_export.html"]
    assert all("translator.js" not in path.read_text("utf-8") for path in others)
    assert "translator.js" in (HTML / PAGE).read_text("utf-8")


def test_what_is_served_is_whole_and_no_more():
    folder = HTML / "_static/translator-model"
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    served = {path.name for path in folder.iterdir()}
    assert served == {*manifest["files"], "manifest.json"} - {"tokenizer.model"}


# --- text -----------------------------------------------------------------------------


def test_pieces_are_sentencepieces(engine, translator):
    texts = [*TEXTS, *SENTENCES, LONG]
    got = engine("texts => texts.map(text => engine.tokenizer.encode(text))", texts)
    for text, ids in zip(texts, got, strict=True):
        assert ids == translator.tokenizer.encode(text), text


def test_every_character_is_cut_as_by_sentencepiece(engine, translator):
    """All of the basic plane, each between two letters."""
    codes = [*range(0xD800), *range(0xE000, 0x10000)]
    texts = [f"x{chr(code)}y" for code in codes]
    got = engine(
        "codes => codes.map(c => engine.tokenizer.encode("
        "`x${String.fromCharCode(c)}y`).join(' '))",
        codes,
    )
    wanted = [" ".join(map(str, ids)) for ids in translator.tokenizer.encode_all(texts)]
    wrong = [hex(c) for c, a, b in zip(codes, got, wanted, strict=True) if a != b]
    assert not wrong


def test_half_a_character_is_a_question_mark(engine, translator):
    for code in ("'a\\ud83d b'", "'\\ude00'"):
        got = engine(f"() => engine.tokenizer.encode({code})")
        text = json.loads('"' + code.strip("'") + '"')
        assert got == translator.tokenizer.encode(text)


def test_text_from_pieces(engine, translator):
    rows = [translator.tokenizer.encode(text) for text in [*TEXTS, *SENTENCES]]
    rows += [[4 + 0xE2, 4 + 0x98, 300], [4 + 0xFF, 4 + 0xC3, 4 + 0xA4], [1, 300, 1]]
    rows += [[300, 4 + 0x20, 301], [260], [4 + 0xF0, 4 + 0x9F, 4 + 0x98]]
    got = engine("rows => rows.map(ids => engine.tokenizer.decode(ids))", rows)
    for ids, text in zip(rows, got, strict=True):
        assert text == translator.tokenizer.decode(ids), ids


def test_lines_and_sentences(engine, translator):
    texts = [*TEXTS, *SENTENCES, LONG, "a.b. C", "Mr. X. Y z. Ü. ö. 3.5. Foo.", "? ! A"]
    texts.append("I'm late ☹. Where's Tom?")
    assert engine("ts => ts.map(engine.oneLine)", texts) == [*map(one_line, texts)]
    lines = [one_line(text) for text in texts]
    got = engine("ts => ts.map(engine.splitSentences)", lines)
    assert got == [split_sentences(line) for line in lines]

    def pieces(text):
        return len(translator.tokenizer.encode(text))

    count = "t => engine.tokenizer.encode(t).length"
    for limit in (3, 20):
        got = engine(
            f"([ts, n]) => ts.map(t => engine.cutText(t, {count}, n))", [lines, limit]
        )
        assert got == [cut_text(line, pieces, limit) for line in lines]


def test_text_is_folded_as_in_the_library(engine):
    codes = [*range(0xD800), *range(0xE000, 0x10000), *range(0x1F000, 0x1FB00)]
    texts = [*TEXTS, *(f"x{chr(code)}y" for code in codes)]
    got = engine("texts => texts.map(engine.foldText)", texts)
    both = zip(texts, got, strict=True)
    assert not [ascii(text) for text, folded in both if folded != fold_text(text)]


def test_capitals_and_headlines_are_set_as_in_the_library(engine, translator):
    lines = [one_line(fold_text(text)) for text in [*TEXTS, *SENTENCES]]
    lines += [line.upper() for line in lines] + [line.title() for line in lines]
    got = engine("ts => ts.map(t => engine.truecase(t, engine.tokenizer))", lines)
    assert got == [truecase(line, translator.tokenizer) for line in lines]


def test_numbers_are_compared_as_in_the_library(engine):
    lines = ["3 or 33 of 3, 0333", "33 of 3", *TEXTS, *SENTENCES]
    pairs = [[a, b] for a in lines for b in lines]
    got = engine("ps => ps.map(([a, b]) => engine.wrongNumbers(a, b))", pairs)
    assert got == [wrong_numbers(a, b) for a, b in pairs]
    assert max(got) > 2


def test_signs_are_taken_out_and_put_back(engine, translator):
    """At the same places, also in what the model would never write."""
    lines = [one_line(fold_text(text)) for text in [*TEXTS, *SENTENCES]]
    found = [
        take_out(line, unknown_characters([line], translator.tokenizer))
        for line in lines
    ]
    outs = [" ".join(reversed(left.split())) for left, _ in found]
    wanted = [
        [left, put_back(out, left, signs)]
        for (left, signs), out in zip(found, outs, strict=True)
    ]
    got = engine(
        "([lines, outs]) => lines.map((line, i) => {"
        " const { left, signs } = engine.takeOut(line, engine.tokenizer);"
        " return [left, engine.putBack(outs[i], left, signs)]; })",
        [lines, outs],
    )
    assert got == wanted


def test_a_long_row_of_dots_does_not_stop_the_page(engine):
    """Ten times the dots take about ten times as long; if quadratic, a hundred."""
    few, many = engine(
        """sizes => sizes.map(size => {
          const text = ".".repeat(size), times = [];
          for (let i = 0; i < 5; i++) {
            const began = performance.now();
            engine.splitSentences(text);
            times.push(performance.now() - began);
          }
          return Math.min(...times);
        })""",
        [20_000, 200_000],
    )
    assert many < 40 * max(few, 0.2)


# --- translations ---------------------------------------------------------------------

TRANSLATE = """async ([text, beam]) => {
  const { sentences, line } = await engine.translate(engine.model, text, beam);
  return { line, found: sentences.map(s => s.found.map(f => [f.text, f.score])) };
}"""


@pytest.mark.parametrize("beam", [1, 4])
def test_translations_are_the_librarys(engine, translator, beam):
    for text in [*SENTENCES, LONG]:
        answer = engine(TRANSLATE, [text, beam])
        got = answer["found"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the long one is cut, and it is told
            whole = translator([text], beam_size=beam)[0]
            wanted = translator.n_best([text], beam, beam_size=beam)[0]
        assert answer["line"] == whole
        if beam == 1:
            continue
        for candidate, choice in zip(wanted, zip(*got, strict=False), strict=True):
            part, kept = " ".join(text for text, _ in choice), ("😴😴", "😴", "Привет!")
            assert candidate.text in (part, *(f"{part} {sign}" for sign in kept))
            score = sum(score for _, score in choice)
            assert score == pytest.approx(candidate.score, abs=1e-4)


@pytest.mark.parametrize("text", ["", "☕☕☕", "日本語"])
def test_foreign_and_empty_text_is_copied(engine, translator, text):
    got = engine(TRANSLATE, [text, 4])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert got == {"line": translator([text])[0], "found": []}


# --- the page -------------------------------------------------------------------------


def test_a_sentence_is_translated(person, translator):
    for text in (SENTENCES[1], *SENTENCES[-5:], SENTENCES[17]):
        assert person.translate(text) == translator([text])[0]
    spoken = person.page.locator("[aria-live=polite][lang=de]")
    assert spoken.text_content() == translator([SENTENCES[17]])[0]
    person.page.get_by_label("Sentence").select_option(value="1")
    shown = person.page.locator(".translator-map thead th").all_text_contents()
    assert shown == [*translator.tokenizer.pieces("I am Dr. Smith."), "end"]
    person.translate(SENTENCES[1], beam="1")
    assert not person.page.locator(".translator-candidates td").count()


def test_the_table_is_attention(person, translator):
    last = str(translator.model.config.num_layers)
    person.translate(SENTENCES[1])
    page = person.page
    sums = page.evaluate(
        "() => { const all = document.querySelectorAll('.translator-map tbody tr');"
        " const rows = [...all].map(row => [...row.querySelectorAll('td')]"
        "   .map(cell => parseInt(cell.textContent)));"
        " return rows.map(row => row.reduce((sum, share) => sum + share, 0)); }"
    )
    assert len(sums) == 7 and all(abs(total - 100) < 6 for total in sums)
    queries = page.locator(".translator-map tbody th").all_text_contents()
    words = page.locator(".translator-word").all_text_contents()
    assert queries == [*words, "end"]  # queries are rows, as in all of the book
    page.locator(".translator-word").nth(2).click()
    chosen = page.locator(".translator-map tr.translator-chosen th").all_text_contents()
    assert chosen == words[2:3]
    page.locator(".translator-word").nth(2).click()
    before = page.locator(".translator-map").inner_html()
    page.get_by_label("Head").select_option(label="2")
    assert page.locator(".translator-map").inner_html() != before
    page.get_by_label("Layer").select_option(label="1")
    assert page.locator(".translator-map").inner_html() != before
    page.get_by_label("Head").select_option(label="mean of all")
    page.get_by_label("Layer").select_option(label=last)
    assert page.locator(".translator-map").inner_html() == before
    texts = page.locator(".translator-candidates tbody tr").all_text_contents()
    assert len(texts) == 4 and person.output.text_content() in texts[0]


def test_words_by_keyboard(person, translator):
    page, keys = person.page, person.page.keyboard
    area = page.get_by_label("English", exact=True)
    area.fill("Tom is reading a book.")
    area.focus()
    keys.press("Enter")
    person.done()
    last = str(translator.model.config.num_layers)
    page.get_by_label("Layer").select_option(label=last)
    words = page.locator(".translator-word")
    assert words.all_text_contents() == ["Tom", "liest", "ein", "Buch", "."]
    words.nth(3).focus()
    keys.press("Enter")
    assert page.locator(".translator-word[aria-pressed=true]").text_content() == "Buch"
    told = page.locator(".translator-told").text_content()
    assert told.startswith("Writing “Buch”, it looked most at: ") and "▁book" in told
    assert page.evaluate("document.activeElement.textContent") == "Buch"
    keys.press("Space")
    assert not page.locator(".translator-word[aria-pressed=true]").count()
    area.focus()
    seen = []
    for _ in range(12):
        keys.press("Tab")
        seen.append(page.evaluate("document.activeElement.className || 'select'"))
    order = ["translator-go", "select", "select", "translator-word"]
    assert [name for i, name in enumerate(seen) if name not in seen[:i]][:3] == [
        name for i, name in enumerate(order) if name not in order[:i]
    ]
    assert "translator-map" in seen or page.locator(".translator-map").is_visible()


def test_word_by_word_and_stop(person):
    page = person.page
    page.get_by_label("English", exact=True).fill(SENTENCES[8])
    page.get_by_label("Pace").select_option("word by word")
    stop = page.get_by_role("button", name="Stop")
    assert not stop.is_visible()
    page.get_by_role("button", name="Translate").click()
    page.wait_for_function(
        "document.querySelectorAll("
        "'.translator-result:not(.translator-old) .translator-word').length > 2"
    )
    assert page.locator(".translator-map td").count()
    stop.click()
    person.done()
    assert person.status.text_content() == "Stopped."
    assert not stop.is_visible()
    assert 1 < page.locator(".translator-word").count() < 12
    page.get_by_label("Pace").select_option("full speed")
    assert person.translate("Hello!") == "Hallo!"


def test_odd_input_is_told(person):
    page = person.page
    page.get_by_label("English", exact=True).fill("  ")
    page.get_by_role("button", name="Translate").click()
    assert person.status.text_content() == "Type a sentence in English first."
    assert person.translate("☕☕☕") == "☕☕☕"
    assert "not learned these characters" in person.status.text_content()
    person.translate(LONG[:499])
    assert "too long for the model and was cut" in person.status.text_content()
    for example in page.locator(".translator-examples button").all()[:2]:
        example.click()
        person.done()
        assert "Translated in" in person.status.text_content()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_narrow_light_and_dark(person, axe, theme):
    page = person.page
    person.translate(SENTENCES[9])
    page.locator(".translator-word").nth(1).click()
    page.set_viewport_size({"width": 360, "height": 800})
    page.evaluate("theme => document.documentElement.dataset.theme = theme", theme)
    found = page.evaluate(OVERFLOW)
    if axe:
        page.evaluate(PREPARE)
        page.evaluate(f"{axe}; 0")
        for what in ("all", "colors"):
            found += page.evaluate(LOOK, [STANDARD, BEYOND, what, None])
    page.set_viewport_size({"width": 1300, "height": 900})
    page.evaluate("document.documentElement.dataset.theme = 'light'")
    assert not found


def test_by_touch(browser, site):
    phone = Person(
        browser,
        site,
        viewport={"width": 360, "height": 740},
        has_touch=True,
        is_mobile=True,
    )
    go = phone.page.get_by_role("button", name="Translate")
    assert go.bounding_box()["height"] >= 44
    phone.page.locator(".translator-examples button").first.tap()
    phone.done()
    phone.page.locator(".translator-word").first.tap()
    assert "it looked most at" in phone.page.locator(".translator-told").text_content()
    assert not phone.troubles
    phone.context.close()


# --- what can go wrong ----------------------------------------------------------------


@pytest.mark.parametrize(
    "name, how, telling",
    [
        ("weights.bin", {"status": 404, "body": "no"}, "weights.bin is not there"),
        ("step.onnx", {"body": "not a graph"}, "step.onnx came damaged"),
        ("*.wasm", "abort", "the connection broke off"),
    ],
)
def test_a_file_that_does_not_come(browser, site, name, how, telling):
    person = Person(browser, site)
    route = f"**/{name}?*"
    person.context.route(
        route, lambda r: r.abort() if how == "abort" else r.fulfill(**how)
    )
    person.page.get_by_role("button", name="Translate").click()
    person.done()
    assert telling in person.status.text_content()
    person.context.unroute(route)
    assert person.translate("Hello!") == "Hallo!"
    person.context.close()


def test_stopped_while_it_loads(browser, site):
    person = Person(browser, site)
    held = []
    person.context.route("**/weights.bin?*", lambda route: held.append(route))
    person.page.get_by_role("button", name="Translate").click()
    person.page.get_by_text("Loading the model:").wait_for()
    person.page.get_by_role("button", name="Stop").click()
    assert person.status.text_content() == "Stopped: nothing is loaded."
    person.context.unroute("**/weights.bin?*")
    assert person.translate("Hello!") == "Hallo!"
    person.context.close()


def test_opened_as_a_file_it_says_what_is_missing(browser):
    person = Person(browser, (HTML / PAGE).as_uri())
    assert "make serve" in person.page.locator(".translator-about").text_content()
    assert not person.page.get_by_role("button", name="Translate").count()
    assert not person.troubles
    person.context.close()


def test_without_scripts_the_page_says_so(browser, site):
    person = Person(browser, site, java_script_enabled=False)
    assert "With JavaScript" in person.page.locator(".translator-about").text_content()
    person.context.close()
