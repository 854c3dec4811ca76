"""Interactive figures in Chromium, each in a page of its own, from a file."""

import html
import json
import re
from contextlib import contextmanager

STYLES = {
    "light": "body { background: #fff; color: #222832; font: 16px sans-serif; }",
    "dark": "body { background: #14181e; color: #ced6dd; font: 16px sans-serif; }",
}
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
# The least contrast of text with what lies behind it, and of some other marks.
CONTRAST = """(marks) => {
  const canvas = Object.assign(document.createElement("canvas"), {width: 1, height: 1});
  const pen = canvas.getContext("2d", {willReadFrequently: true});
  const luminance = colors => {
    for (const color of colors) { pen.fillStyle = color; pen.fillRect(0, 0, 1, 1); }
    const [r, g, b] = [...pen.getImageData(0, 0, 1, 1).data].map(c => c / 255).map(
      c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const grounds = e => e ? [...grounds(e.parentElement),
                            getComputedStyle(e).backgroundColor] : ["#fff"];
  const ratio = (behind, color) => {
    const [a, b] = [luminance(behind), luminance([...behind, color])];
    return (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
  };
  const texts = [...document.querySelectorAll(".interactive-figure *")].filter(e =>
    !e.disabled && e.checkVisibility() && !e.closest("style, script")
    && [...e.childNodes].some(n => n.nodeType == 3 && n.textContent.trim()));
  const found = texts.map(e => [
    ratio(grounds(e), getComputedStyle(e)[e.closest("svg") ? "fill" : "color"]) / 4.5,
    e.textContent]);
  for (const [selector, property] of marks) {
    const all = [...document.querySelectorAll(".interactive-figure " + selector)];
    if (!all.length) found.push([0, selector]);
    for (const e of all)
      found.push([ratio(grounds(e.parentElement), getComputedStyle(e)[property]) / 3,
                  selector]);
  }
  return found.sort((a, b) => a[0] - b[0])[0];
}"""
# For each part, where the four arrow keys lead.
ARROWS = """figure => {
  const parts = [...figure.querySelectorAll("[data-say]")];
  return parts.map(part => ["Right", "Left", "Up", "Down"].map(way => {
    part.focus();
    const key = {key: "Arrow" + way, bubbles: true, cancelable: true};
    part.dispatchEvent(new KeyboardEvent("keydown", key));
    return parts.indexOf(document.activeElement);
  }));
}"""


def html_of(figure) -> str:
    """What a notebook shows of it."""
    return figure._repr_html_()


def contents(figure):
    """What a figure gives its script: data, controls, state."""
    packed = re.search(r"data-figure='([^']*)'", html_of(figure))[1]
    return json.loads(html.unescape(packed))


@contextmanager
def shown(browser, folder, *figures, theme="light", width=360, **context):
    """A page with these figures; at the end nothing may have gone wrong in it."""
    body = "".join(html_of(figure) for figure in figures)
    path = folder / f"{theme}-{width}.html"
    path.write_text(
        f'<!doctype html><html lang="en" theme="{theme}"><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>t</title>'
        f"<style>{STYLES[theme]}</style><body>{body}</body></html>",
        encoding="utf-8",
    )
    opened = browser.new_context(viewport={"width": width, "height": 800}, **context)
    page, seen = opened.new_page(), []
    page.on("console", lambda message: seen.append(message.text))
    page.on("pageerror", lambda error: seen.append(str(error)))
    page.on("request", lambda request: seen.append(request.url))
    page.goto(path.as_uri())
    yield page
    assert seen == [path.as_uri()]  # the page itself, and no word of trouble
    opened.close()


def said(page):
    """The words below the first figure."""
    return page.locator(".interactive-figure > p").first.inner_text()


def check_figure(browser, folder, figure, marks=()):
    """What every figure must do, whatever it shows.

    Args:
        browser: Chromium.
        folder: For its pages.
        figure: The figure.
        marks: (selector, CSS property) of what must stand out from its ground.
    """
    text = html_of(figure)
    assert len(text.encode()) < 90_000 and "<image" not in text
    told = re.sub("data-figure='[^']*'", "", text)  # data may tell of addresses
    assert "://" not in told and " id=" not in told
    with shown(browser, folder, figure, figure) as page:
        assert page.evaluate(OVERFLOW) <= 0
        assert page.locator(".still:visible").count() == 0
        first, second = page.locator(".interactive-figure").all()
        before = second.inner_html()
        low = page.locator("button, input").evaluate_all(
            "all => all.filter(x => x.getBoundingClientRect().height < 24).length"
        )
        assert low == 0
        parts = first.locator("[data-say]")
        assert parts.evaluate_all("p => p.filter(x => x.tabIndex == 0).length") == 1
        assert parts.evaluate_all("p => p.every(x => x.getAttribute('role') == 'img')")
        assert not first.locator("li[data-say]").count()  # a list holds no images
        rest = said(page)
        parts.first.focus()
        assert said(page) == parts.first.get_attribute("data-say") != rest
        page.keyboard.press("End")
        last = page.evaluate("document.activeElement.dataset.say")
        assert said(page) == last == parts.last.get_attribute("data-say")
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        walked = page.evaluate("document.activeElement.dataset.say")
        assert said(page) == walked != parts.first.get_attribute("data-say")
        reached, todo, arrows = {0}, [0], first.evaluate(ARROWS)
        while todo:
            new = set(arrows[todo.pop()]) - reached
            reached |= new
            todo += new
        assert len(reached) == parts.count()  # the arrows lead everywhere
        parts.first.focus()
        page.keyboard.press("Escape")
        assert said(page) == rest
        parts.first.hover()
        assert said(page) == parts.first.get_attribute("data-say")
        first.locator("button").first.focus()
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement != document.body")
        assert second.inner_html() == before  # the second figure did not move
    for theme in STYLES:
        with shown(browser, folder, figure, theme=theme, has_touch=True) as page:
            worst, where = page.evaluate(CONTRAST, list(marks))
            assert worst >= 1, (theme, worst, where)
            part = page.locator("[data-say]").first
            part.tap()
            assert said(page) == part.get_attribute("data-say")
            choice = page.locator("button[aria-pressed=false], .none").first
            if choice.count():
                name = choice.inner_text()
                choice.tap()
                chosen = page.get_by_role("button", name=name, pressed=True)
                assert name == "off" or chosen.count()
    with shown(browser, folder, figure, java_script_enabled=False) as page:
        still = page.locator(".still")
        assert still.locator("svg:visible").count() == 1
        assert still.is_visible() and page.locator("button").count() == 0
        assert still.bounding_box()["width"] <= 360
        assert len(still.get_attribute("aria-label")) > 40
