"""One sentence through the model: every number is the sum that it opens."""

import json
import re
import shutil
import sys

import pytest
import torch
from browser import served
from built import HTML, ROOT
from looks import BEYOND, LOOK, OVERFLOW, PREPARE, STANDARD
from test_live_pages import Reader

from transformer_lib.transformer import Transformer, TransformerConfig

sys.path.append(str(ROOT / "book" / "_ext"))
import through as made

STATIC = ROOT / "book" / "_static"
PAGE = """<!doctype html><html lang="en" data-theme="light"><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><title>Through the model</title>
<link rel="stylesheet" href="_static/through.css"><style>
:root { --pst-color-border: #d1d5da; --pst-color-text-muted: #48566b; --card: #f8f9fb;
  --pst-color-text-base: #222832; --blue: #0067a3; --orange: #b34e00; --ground: #fff; }
:root[data-theme=dark] { --pst-color-border: #48566b; --pst-color-text-muted: #9ca4af;
  --card: #20262d; --pst-color-text-base: #ced6dd; --blue: #6cb8ec; --orange: #f0a062;
  --ground: #14181e; }
body { background: var(--ground); color: var(--pst-color-text-base); margin: 8px;
  font: 16px sans-serif; } h1 { font-size: 1.2rem; }
</style><body><main class="bd-article"><h1>Page</h1><h2>Part</h2><h3>Figure</h3>
<div class="through" data-version="x" data-megabytes="9"><p>still</p></div></main>
<script type="module" src="_static/through.js"></script></body></html>"""
KINDS = {"embed", "linear", "score", "softmax", "blend", "add", "norm"}


@pytest.fixture(scope="module")
def trace():
    return made.sentence_trace()


@pytest.fixture(scope="module")
def folder(trace, tmp_path_factory):
    """A page with the figure, and all that it loads."""
    top = tmp_path_factory.mktemp("through")
    static = top / "_static"
    static.mkdir()
    for name in made.PARTS:
        shutil.copy(STATIC / name, static)
    made.write_trace(*trace, static / "through-the-model")
    (top / "page.html").write_text(PAGE, encoding="utf-8")
    return top


@pytest.fixture(scope="module")
def address(folder):
    with served(folder) as site:
        yield f"{site}/page.html"


class Person(Reader):
    """A person at the figure."""

    def open(self):
        self.page.get_by_role("button", name="Open every number").click()
        self.page.locator(".through-strip").wait_for()

    def go(self, part, step):
        self.page.get_by_label("Part", exact=True).select_option(part)
        self.page.get_by_role("button", name=step, exact=True).click()

    @property
    def strip(self):
        return self.page.locator(".through-strip button")

    @property
    def title(self):
        return self.page.locator(".through-sum h4").text_content()

    def total(self):
        """The number that is open, and what its terms come to."""
        line = self.page.locator(".through-total")
        names = "data-value", "data-total"
        return [float(line.get_attribute(name)) for name in names]


@pytest.fixture(scope="module")
def person(browser, address):
    someone = Person(browser, address)
    someone.open()
    yield someone
    assert not someone.troubles
    someone.context.close()


@pytest.fixture(scope="module")
def model(person):
    """The numbers in the page: code in which `m` is the Model."""
    person.page.evaluate(
        "async () => { const { Model } = await import('./_static/through.js');"
        " const at = name => new URL(`_static/${name}/`, location.href).href;"
        " window.m = await Model.load(at('through-the-model'), 'x'); }"
    )
    return lambda code, argument=None: person.page.evaluate(code, argument)


# --- the numbers ----------------------------------------------------------------------


def test_the_numbers_are_those_of_the_model(trace):
    """Logits of a plain call, attention as chapter 27 sees it, keys of each step."""
    from transformer_lib.looking_inside import attention_weights

    numbers, about = trace[0].numbers, trace[1]
    model = trace[0].model
    ids = [torch.tensor([about["ids"][side]]) for side in ("source", "target")]
    with torch.inference_mode():
        torch.testing.assert_close(numbers["logits"], model(*ids)[0])
    for kind, layers in attention_weights(model, *ids).items():
        side = "encoder" if kind == "encoder" else "decoder"
        name = "cross_attention" if kind == "cross" else "self_attention"
        for i, wanted in enumerate(layers):
            found = numbers[f"{side}.layers.{i}.{name}.weights"]
            torch.testing.assert_close(found, wanted[0], atol=1e-5, rtol=1e-4)
    assert {step["kind"] for step in trace[0].steps} == KINDS


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"norm_first": True}, "post-norm alone"),
        ({"activation": "gelu"}, "activation='gelu'"),
        ({"output_bias": True}, "output_bias=True"),
    ],
)
def test_a_model_whose_sums_are_others_is_refused(changes, why):
    sizes = {"d_model": 16, "num_heads": 2, "num_layers": 1, "d_ff": 32}
    other = Transformer(TransformerConfig(20, **sizes, **changes)).eval()
    with pytest.raises(ValueError, match=why):
        made.Trace(other, torch.tensor([[5, 3]]), torch.tensor([[2, 6]]))


def test_each_learned_table_is_stored_once_and_in_16_bits(folder, trace):
    told = folder / "_static" / "through-the-model" / "through.json"
    tables = json.loads(told.read_text("utf-8"))["tables"]
    assert {table["type"] for table in tables.values()} == {"f2"}
    state = trace[0].model.state_dict()
    kept = {table["at"]: state[name].numel() for name, table in tables.items()}
    assert sum(kept.values()) == sum(p.numel() for p in trace[0].model.parameters())


def test_a_table_that_16_bits_cannot_hold_is_stored_whole(tmp_path):
    sizes = {"d_model": 16, "num_heads": 2, "num_layers": 1, "d_ff": 32}
    model = Transformer(TransformerConfig(20, **sizes)).eval()
    small = made.Trace(model, torch.tensor([[5, 3]]), torch.tensor([[2, 6]]))
    made.write_trace(small, {}, tmp_path)
    told = json.loads((tmp_path / "through.json").read_text("utf-8"))
    place = told["tables"]["output.weight"]
    assert place["type"] == "f4"
    found = torch.frombuffer(
        bytearray((tmp_path / "through.bin").read_bytes()),
        dtype=torch.float32,
        count=model.output.weight.numel(),
        offset=place["at"],
    )
    assert found.view(place["shape"]).equal(model.output.weight)


def test_learned_numbers_come_over_whole(model, trace):
    state = trace[0].model.state_dict()
    for name in (
        "src_embedding.weight",
        "encoder.layers.0.self_attention.w_k.weight",
        "decoder.layers.1.feed_forward.w_1.weight",
        "encoder.layers.1.residual_2.norm.bias",
    ):
        table = state[name]
        for row in (0, 3, len(table) - 1):
            got = model(
                "([name, row, n]) => n ? Array.from({ length: n },"
                " (_, d) => m.number(name, row, d)) : [m.number(name, row)]",
                [name, row, table.shape[1] if table.dim() > 1 else 0],
            )
            assert got == table[row].reshape(-1).tolist()


def test_every_sum_adds_up_to_its_number(model):
    """Of each step, and of each mean and spread, numbers in all rows."""
    found = model(
        """() => {
          let seed = 7;
          const next = n => (seed = (seed * 48271) % 2147483647) % n;
          const extra = m.steps.flatMap(s => s.mean ? [s.mean, s.spread] : []);
          return [...m.steps.map(s => s.name), ...extra].flatMap(name => {
            const { causal } = m.step.get(name) ?? {}, shape = m.shape(name);
            return Array.from({ length: 12 }, (_, i) => {
              const at = shape.map(next);
              at[shape.length - 2] = i % shape.at(-2);
              if (causal && shape.length === 3) at[2] = next(at[1] + 1);
              const sum = m.sum(name, at);
              return [name, at, m.number(name, ...at), m.total(sum), sum.terms.length];
            });
          });
        }"""
    )
    assert len(found) > 900
    for name, at, value, total, terms in found:
        assert terms >= 1
        assert total == pytest.approx(value, rel=1e-4, abs=3e-5), (name, at)


def test_a_sum_with_a_term_left_out_does_not_add_up(model):
    """The test above can fail."""
    value, short = model(
        "() => { const name = 'encoder.layers.0.self_attention.w_q';"
        " const { how, terms } = m.sum(name, [1, 5]);"
        " terms.sort((a, b) => Math.abs(b.value) - Math.abs(a.value));"
        " return [m.number(name, 1, 5), m.total({ how, terms: terms.slice(1) })]; }"
    )
    assert abs(value - short) > 1e-3


# --- at the figure --------------------------------------------------------------------


def test_nothing_is_loaded_before_the_click(browser, address):
    someone = Person(browser, address)
    someone.page.get_by_role("button", name="Open every number").wait_for()
    assert not someone.page.get_by_text("still", exact=True).count()  # nor said twice
    assert not [url for url in someone.asked if re.search(r"\.bin|\.json", url)]
    someone.context.close()


def test_from_a_probability_down_to_an_embedding(person, trace):
    """Press the first number of each sum until there is none: that is the bottom."""
    page = person.page
    person.go("German out", "next token")
    person.strip.first.click()
    piece = trace[1]["vocabulary"][int(trace[0].logits[0].argmax())]
    assert f"→ “{piece.removeprefix('▁')}”" in person.title
    seen = [person.title]
    for _ in range(200):
        value, total = person.total()
        assert total == pytest.approx(value, rel=1e-4, abs=3e-5)
        below = page.locator(".through-factors button")
        if not below.count():
            break
        below.first.click()
        seen.append(person.title)
    assert "word + position" in seen[-1] and len(seen) > 10
    terms = page.locator(".through-sum ol small").all_text_contents()
    assert sum("embedding" in term for term in terms) == 1
    page.locator(".through-way button").nth(1).click()
    assert person.title == seen[1]


def test_what_is_left_of_a_long_sum_is_said_and_shown(person, trace):
    page = person.page
    person.go("Encoder layer 1", "queries")
    person.strip.nth(3).click()
    rows, width = page.locator(".through-sum li"), trace[0].model.config.d_model
    assert rows.count() < width
    page.get_by_role("button", name="show all").click()
    assert rows.count() == width
    terms = [float(row.get_attribute("data-term")) for row in rows.all()]
    assert terms == sorted(terms, key=abs, reverse=True)
    assert sum(terms) == pytest.approx(person.total()[0], abs=1e-4)


def test_by_keyboard(person):
    page, keys = person.page, person.page.keyboard
    page.get_by_label("Part", exact=True).select_option("Encoder layer 1")
    person.strip.first.focus()
    keys.press("ArrowRight")
    keys.press("ArrowDown")
    focused = page.evaluate("document.activeElement.getAttribute('aria-label')")
    number = int(re.match(r"number (\d+): ", focused)[1])
    assert number > 2
    assert page.locator(".through-now").text_content() == focused
    keys.press("Enter")
    assert f"number {number} = " in person.title
    page.locator(".through-factors button").first.focus()
    keys.press("Enter")
    deeper = person.title
    assert page.evaluate("document.activeElement.textContent") == deeper
    keys.press("Escape")
    assert person.title != deeper and f"number {number} = " in person.title
    before = page.locator(".through-count").text_content()
    page.get_by_role("button", name="next ›").focus()
    keys.press("Enter")
    assert page.locator(".through-count").text_content() != before
    assert page.evaluate("document.activeElement.textContent") == "next ›"


def test_heads_and_pieces(person, trace):
    page, layer = person.page, trace[0].numbers
    person.go("Decoder layer 1", "weights")
    for row, piece in ((0, "token 1: "), (2, "token 3: ")):
        page.get_by_role("button", name=re.compile(f"^{piece}")).click()
        for head in (0, 1):
            page.get_by_role("button", name=f"head {head + 1}", exact=True).click()
            assert person.strip.count() == row + 1  # none is looked at that comes later
            person.strip.first.click()
            wanted = layer["decoder.layers.0.self_attention.weights"][head, row, 0]
            assert person.total()[0] == pytest.approx(float(wanted))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_narrow_light_and_dark(person, axe, theme):
    page, found = person.page, []
    page.set_viewport_size({"width": 360, "height": 800})
    page.evaluate("theme => document.documentElement.dataset.theme = theme", theme)
    if axe:
        page.evaluate(PREPARE)
        page.evaluate(f"{axe}; 0")
    for part, step in (
        ("English in", "word + position"),
        ("Decoder layer 2", "source weights"),
        ("German out", "next token"),
    ):
        person.go(part, step)
        person.strip.first.click()
        page.locator(".through-factors").first.wait_for()
        found += page.evaluate(OVERFLOW)
        if axe:
            for what in ("all", "colors"):
                found += page.evaluate(LOOK, [STANDARD, BEYOND, what, None])
    page.set_viewport_size({"width": 1300, "height": 900})
    page.evaluate("document.documentElement.dataset.theme = 'light'")
    assert not found


def test_by_touch(browser, address):
    phone = Person(
        browser,
        address,
        viewport={"width": 360, "height": 740},
        has_touch=True,
        is_mobile=True,
    )
    phone.page.get_by_role("button", name="Open every number").tap()
    phone.page.locator(".through-strip").wait_for()
    assert phone.page.get_by_label("Part", exact=True).bounding_box()["height"] >= 44
    assert phone.strip.first.bounding_box()["height"] >= 24
    phone.strip.nth(2).tap()
    assert phone.page.locator(".through-total").count() == 1
    assert not phone.troubles
    phone.context.close()


# The size of each text of the poster as it is on the screen, in pixels.
LETTERS = """() => [...document.querySelectorAll('.through svg')]
  .filter(svg => svg.getBoundingClientRect().width)
  .flatMap(svg => [...svg.querySelectorAll('text')].map(text =>
    parseFloat(getComputedStyle(text).fontSize) * svg.getScreenCTM().a))"""


def test_the_poster_can_be_read_on_a_phone(browser, folder):
    page = PAGE.replace("<p>still</p>", made.poster())
    (folder / "poster.html").write_text(page, encoding="utf-8")
    with served(folder) as site:
        phone = {"width": 390, "height": 844}
        someone = Person(browser, f"{site}/poster.html", viewport=phone, is_mobile=True)
        letters = someone.page.evaluate(LETTERS)
        assert len(letters) > 9 and min(letters) >= 9
        assert not someone.page.evaluate(OVERFLOW)
        someone.context.close()


def test_a_file_that_does_not_come_is_told(browser, address):
    someone = Person(browser, address)
    way = "**/through.bin?*"
    someone.context.route(way, lambda route: route.fulfill(status=404, body="no"))
    someone.page.get_by_role("button", name="Open every number").click()
    someone.page.get_by_text("through.bin is not there").wait_for()
    someone.context.unroute(way)
    someone.open()
    someone.context.close()


def test_without_scripts_the_still_picture_stands(browser, address):
    someone = Person(browser, address, java_script_enabled=False)
    assert someone.page.locator(".through").text_content() == "still"
    someone.context.close()


def test_the_built_page_has_a_picture_and_its_numbers():
    if not (HTML / "book/through_the_model.html").exists():
        pytest.skip("the book is not built")
    page = (HTML / "book/through_the_model.html").read_text("utf-8")
    assert re.search(r'class="through"[^>]*><div class="drawn still"', page)
    for name in ("through.json", "through.bin"):
        assert (HTML / "_static/through-the-model" / name).exists()
