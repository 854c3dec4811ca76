"""Chapter 27's figures: lines between words, and the figure to click."""

import html
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import looked_inside
import pytest
import torch
from figures import html_of

from transformer_lib.figures.looking_inside import (
    AttentionView,
    plot_links,
)
from transformer_lib.looking_inside import AttentionMaps, look

small = looked_inside.small
trained = looked_inside.trained
pair = looked_inside.pair


def test_plot_links():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    weights = torch.tensor([[0.9, 0.1], [0.01, 0.99]])
    ax = plot_links(weights, ["a", "b"], ["c", "d"])
    assert len(ax.lines) == 3  # 0.01 is not drawn
    assert [text.get_text() for text in ax.texts] == ["a", "b", "c", "d"]
    assert len(plot_links(weights, ["a", "b"], ["c", "d"], rows=[1]).lines) == 1
    plt.close("all")


def data_of(view):
    text = html_of(view)
    packed = text.split('data-attention="')[1].split('"')[0]
    return text, json.loads(html.unescape(packed))


def test_view_holds_the_weights(pair):
    text, data = data_of(AttentionView(pair))
    packed = data["weights"]["cross"][1][2]
    values = [int(packed[i : i + 2], 36) / 1000 for i in range(0, len(packed), 2)]
    wanted = pair.matrix("cross", 1, 2).flatten()
    torch.testing.assert_close(torch.tensor(values), wanted, atol=5.1e-4, rtol=0)
    weights = {"cross": [torch.tensor([[[[1.0, 0.0], [0.5, 0.001]]]])]}
    small = AttentionMaps(["a", "</s>"], ["<s>", "b"], weights)
    packed = data_of(AttentionView(small, "cross", kinds=["cross"]))[1]["weights"]
    assert packed == {"cross": [["rs00dw01"]]}
    assert len(text.encode()) < 60_000
    assert len(text.partition("<script>")[2].partition("</script>")[0]) < 10_000
    assert "http" not in text and "<script" in text and " id=" not in text
    svg = text[text.index("<svg") : text.index("</svg>") + 6]
    picture = ET.fromstring(svg)  # well-formed, and said in words
    assert picture.get("role") == "img" and "Heat map" in picture.get("aria-label")
    assert len(picture.findall("text")) == len(pair.source) + len(pair.target)


def test_a_weight_is_two_digits():
    """Thousandths in base 36, row by row."""
    weights = torch.tensor([[[[1.0, 0.0], [0.5, 0.001]]]])  # (B, H, T, S)
    kinds = "encoder", "decoder", "cross"
    maps = AttentionMaps(["a", "b"], ["c", "d"], {kind: [weights] for kind in kinds})
    assert data_of(AttentionView(maps))[1]["weights"]["cross"] == [["rs00dw01"]]


def test_view_escapes_what_it_is_given():
    odd = ["<b>\"&'</script>", "</s>"]
    weights = {"encoder": [torch.full((1, 1, 2, 2), 0.5)]}
    maps = AttentionMaps(odd, ["<s>"], weights)
    view = AttentionView(maps, "encoder", kinds=["encoder"])
    text, data = data_of(view)
    assert data["source"] == odd and text.count("</script>") == 1


def test_view_refuses(pair, trained):
    with pytest.raises(ValueError, match="kind='self'"):
        AttentionView(pair, "self")
    layers, heads = len(pair.weights["cross"]), pair.weights["cross"][0].shape[-3]
    last = f"layer={layers}: must be from 0 to {layers - 1}"
    with pytest.raises(ValueError, match=last):
        AttentionView(pair, layer=layers)
    with pytest.raises(ValueError, match=f"head={heads}"):
        AttentionView(pair, head=heads)
    long = look(*trained, "word " * 60, "Wort " * 60)
    with pytest.raises(ValueError, match="60 are allowed"):
        AttentionView(long)


OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


DARK = "body { background: #14181e; color: #ced6dd; }"
THEME = "theme=dark"  # as Colab says it


def write_page(path, *views, style=""):
    body = "\n".join(html_of(view) for view in views)
    path.write_text(
        f'<!doctype html><html lang="en" {THEME * (style == DARK)}>'
        '<meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>t</title>'
        f"<style>{style}</style><body>{body}</body></html>",
        encoding="utf-8",
    )
    return path.as_uri()


def test_the_book_counts_it_as_a_figure(pair, monkeypatch):
    """So that it gets a number, and the caption of its cell is shown."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "book" / "_ext")
    from comforts import is_drawn
    from docutils import nodes

    shown = html_of(AttentionView(pair))
    for text, drawn in ((shown, True), ("<p>some text</p>", False)):
        output = nodes.container("", nodes.raw("", text, format="html"))
        assert is_drawn(output) == drawn


def test_click_and_keys(browser, pair, tmp_path):
    """From file://, twice in one page, on a phone: every button does what it says."""
    merged = pair.by_words()
    first = AttentionView(pair, "cross", layer=1, word=1)
    views = (first, AttentionView(merged, "encoder"), first)
    address = write_page(tmp_path / "page.html", *views)
    page = browser.new_page(viewport={"width": 360, "height": 800})
    troubles = []
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("request", lambda got: troubles.append(got.url))
    page.goto(address)
    assert troubles == [address]  # the page itself, and nothing else
    figure = page.locator(".attention-view").nth(0)

    def pressed(number):
        return figure.locator("fieldset").nth(number).locator("[aria-pressed=true]")

    def percents():
        return figure.locator(".share").all_inner_texts()

    def wanted(kind, layer, head, word):
        row = pair.matrix(kind, layer, head)[word]
        return [f"{int(100 * round(w, 3) + 0.5)}%" for w in row.tolist()]

    def close(got, expected):
        pairs = zip(got, expected, strict=True)
        numbers = [(int(a.strip("%–") or 0), int(b[:-1])) for a, b in pairs]
        return all(abs(a - b) <= 1 for a, b in numbers)

    assert figure.locator("svg").is_hidden()
    assert page.locator("svg:visible").count() == 0
    shown = [pressed(i).inner_text() for i in range(4)]
    assert shown == ["cross", "2", "mean", pair.target[1].removeprefix("▁")]
    assert close(percents(), wanted("cross", 1, None, 1))
    figure.get_by_role("button", name="head 3").click()
    assert close(percents(), wanted("cross", 1, 2, 1))
    figure.get_by_role("button", name="layer 1").click()
    assert close(percents(), wanted("cross", 0, 2, 1))
    said = figure.locator("p")
    before = said.inner_text()
    words = figure.locator(".queries button")
    words.nth(3).click()
    assert close(percents(), wanted("cross", 0, 2, 3)) and said.inner_text() != before
    page.keyboard.press("ArrowRight")
    assert close(percents(), wanted("cross", 0, 2, 4))
    page.keyboard.press("Home")
    assert close(percents(), wanted("cross", 0, 2, 0))
    page.keyboard.press("ArrowLeft")  # round to the last word
    assert close(percents(), wanted("cross", 0, 2, len(pair.target) - 1))
    assert page.evaluate("document.activeElement.textContent") == "."
    assert words.evaluate_all("b => b.filter(x => x.tabIndex == 0).length") == 1
    figure.get_by_role("button", name="encoder").click()
    assert words.count() == len(pair.source) and pressed(0).inner_text() == "encoder"
    figure.get_by_role("button", name="decoder").click()
    words.nth(1).click()
    assert percents()[2:] == ["–"] * (len(pair.target) - 2)  # the future
    other = page.locator(".attention-view").nth(1)  # the second did not move
    assert other.locator("[aria-pressed=true]").nth(0).inner_text() == "encoder"
    assert other.locator(".key").all_inner_texts() == merged.source
    assert other.locator("ul").get_attribute("aria-label") and troubles == [address]
    assert page.evaluate(OVERFLOW) <= 0
    small = page.locator("button").evaluate_all(
        "b => b.filter(x => x.getBoundingClientRect().height < 24).length"
    )
    assert small == 0
    page.close()


LIGHT = "body { background: #fff; color: #222832; }"


LUMINANCES = """() => {
  const luminance = css => {
    const numbers = css.match(/[\\d.]+/g).map(Number).slice(0, 3);
    const parts = numbers.map(c => css.startsWith("color") ? c : c / 255);
    const linear = c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
    const [r, g, b] = parts.map(linear);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const of = (selector, name) =>
    luminance(getComputedStyle(document.querySelector(selector))[name]);
  return [of("body", "backgroundColor"), of(".share", "color"), of("button", "color"),
          of(".bar", "backgroundColor")];
}"""


@pytest.mark.parametrize("style", [LIGHT, DARK], ids=["light", "dark"])
def test_touch_and_contrast_in_both_themes(browser, pair, tmp_path, style):
    address = write_page(tmp_path / "touch.html", AttentionView(pair), style=style)
    phone = {"width": 360, "height": 800}
    context = browser.new_context(has_touch=True, viewport=phone)
    page = context.new_page()
    page.goto(address)
    before = page.locator(".share").all_inner_texts()
    page.locator(".queries button").nth(4).tap()
    assert page.locator(".share").all_inner_texts() != before
    page.get_by_role("button", name="encoder").tap()
    assert page.locator(".key").count() == len(pair.source)
    ground, *others = page.evaluate(LUMINANCES)
    ratios = [(max(ground, x) + 0.05) / (min(ground, x) + 0.05) for x in others]
    assert min(ratios[:2]) >= 4.5 and ratios[2] >= 3, ratios  # WCAG: text, graphics
    context.close()


def test_without_scripts_a_picture_stands_there(browser, pair, tmp_path):
    address = write_page(tmp_path / "still.html", AttentionView(pair), style=DARK)
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.set_viewport_size({"width": 360, "height": 800})
    page.goto(address)
    assert page.locator("svg").is_visible() and page.locator("button").count() == 0
    assert page.locator("svg").bounding_box()["width"] <= 360
    context.close()
