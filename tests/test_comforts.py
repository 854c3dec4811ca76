"""Numbers of equations and figures, words explained, what the browser remembers."""

import re

import pytest
from built import CHAPTERS, HTML, Page, need_the_book

need_the_book()

MADE = "drawn chart|drawn marked|interactive-figure|attention-view"
TO_TOUCH = rf'<div [^<>]*class="(?:{MADE})"'


@pytest.mark.parametrize("name", CHAPTERS)
def test_equations_and_figures_are_numbered(name):
    page, chapter = Page(name), int(name.split("/")[1].split("_")[0])
    formulas = page.html.count('<div class="math ')
    shown = re.findall(r'class="eqno">\(([\d.]+)\)', page.html)
    assert shown == [f"{chapter}.{i}" for i in range(1, formulas + 1)]
    pictures = len(re.findall(r'<img [^>]*src="\.\./_images/', page.html))
    to_touch = len(re.findall(TO_TOUCH, page.html))
    number = r'class="figure-number" id="[^"]+"><strong>(Figure [\d.]+)</strong>'
    figures = re.findall(number, page.html)
    assert figures == [f"Figure {chapter}.{i}" for i in range(1, len(figures) + 1)]
    assert bool(pictures + to_touch) == bool(figures)
    assert len(figures) >= to_touch
    still = r'<img (?:(?!<img|class="output).)*'
    touched = rf'{TO_TOUCH}(?:(?!class="figure-number").)*'
    above = rf'(?:{still}|{touched})class="figure-number"'
    assert len(re.findall(above, page.html, re.DOTALL)) == len(figures)
    if name.startswith("notebooks/0") and chapter < 8:
        shown = r"<strong>Figure [\d.]+</strong>\s*(\S.*?)</p>"
        captions = re.findall(shown, page.html, re.DOTALL)
        assert len(captions) == len(figures)


@pytest.mark.parametrize("name", CHAPTERS)
def test_folds_say_what_is_inside(name):
    page = Page(name).html
    assert "Show code cell source" not in page
    for words in re.findall(r'class="collapsed admonition-title">([^<]+)<', page):
        assert re.match(r"Show (the|how|a tool) ", words), words


@pytest.mark.parametrize("name", CHAPTERS)
def test_first_mention_of_a_term_is_explained(name):
    html = Page(name).html
    links = re.findall(r'<a class="defined[^>]*href="([^"]+)" title="([^"]*)"', html)
    addresses = [address for address, _ in links]
    if name.startswith(("notebooks/0", "notebooks/1")):
        assert links, "no word of the glossary on this page"
    assert len(set(addresses)) == len(addresses), "a term is explained twice"
    glossary = Page("book/glossary").html
    for address, words in links:
        assert f'id="{address.split("#")[1]}"' in glossary, address
        assert len(words) > 20, address


def explained(page, selector):
    """What is shown when the keyboard reaches an element."""
    page.locator(selector).first.focus()
    tip = page.locator("#explanation")
    assert tip.is_visible()
    return tip.inner_text()


def test_definition_by_keyboard_and_mouse(window, site):
    page, troubles = window
    page.goto(f"{site}/notebooks/02_attention.html", wait_until="load")
    term = 'a.defined[href$="#term-mask"]'
    assert "True where attention is allowed" in explained(page, term)
    page.keyboard.press("Escape")
    assert page.locator("#explanation").is_hidden()
    page.hover(term)
    assert page.locator("#explanation").is_visible()
    page.hover("h1 >> visible=true")
    assert page.locator("#explanation").is_hidden()
    page.hover('.highlight .c1.shape:has-text("T,") >> nth=0')
    said = page.locator("#explanation").inner_text()
    assert re.search(r"^T: target length", said, re.M), said
    assert not troubles


def test_long_docstrings_are_folded(window, site):
    page, troubles = window
    page.goto(f"{site}/notebooks/02_attention.html", wait_until="load")
    code = page.locator(".cell_input pre:has(button.doc-more):visible").first
    whole, button = code.text_content(), code.locator("button.doc-more").first
    written = (HTML / "notebooks" / "02_attention.html").read_text("utf-8")
    assert "Args:" in whole and "doc-more" not in written  # without scripts: all of it
    assert "Args:" not in code.inner_text()
    assert button.get_attribute("aria-expanded") == "false"
    button.focus()
    page.keyboard.press("Enter")
    assert "Args:" in code.inner_text()
    assert button.get_attribute("aria-expanded") == "true"
    assert code.text_content() == whole, "what is copied is the code, folded or not"
    button.click()
    assert "Args:" not in code.inner_text()
    page.goto(f"{site}/notebooks/01_hello.html", wait_until="load")
    assert not page.locator("button.doc-more").count(), "live cells are to be edited"
    assert not troubles


def test_what_was_read_is_remembered(window, site):
    page, troubles = window
    page.goto(f"{site}/book/welcome.html", wait_until="load")
    page.evaluate("localStorage.clear()")
    page.reload()
    assert page.locator("#go-on").is_hidden()
    page.goto(f"{site}/notebooks/02_attention.html", wait_until="load")
    page.evaluate("scrollTo(0, 2000)")
    page.wait_for_function("localStorage.getItem('literate-transformer')")
    page.goto(f"{site}/book/welcome.html", wait_until="load")
    assert "Scaled dot-product attention" in page.locator("#go-on").inner_text()
    assert not page.locator(".was-read").count()
    page.goto(f"{site}/notebooks/02_attention.html", wait_until="load")
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    page.wait_for_selector(".was-read", state="attached")
    page.goto(f"{site}/book/contents.html", wait_until="load")
    marked = page.locator(".chapter-times a:has(.was-read)").all_inner_texts()
    assert len(marked) == 1 and "Scaled dot-product attention" in marked[0]
    page.goto(f"{site}/book/welcome.html", wait_until="load")
    assert page.locator("#go-on").is_hidden(), "it was read to its end"
    page.evaluate("localStorage.clear()")
    assert not troubles


def test_notes_are_kept_and_can_be_taken_along(window, site, tmp_path):
    page, troubles = window
    page.goto(f"{site}/book/notes.html", wait_until="load")
    page.evaluate("localStorage.clear()")
    page.reload()
    assert page.locator("#notes textarea").count() == len(CHAPTERS) + 1
    page.get_by_role("button", name="Save to a file").click()
    assert "nothing to save" in page.locator("#notes-state").inner_text()
    page.get_by_label("Scaled dot-product attention").fill("Why the root?")
    assert "Kept" in page.locator("#notes-state").inner_text()
    page.reload()
    assert page.get_by_label("Scaled dot-product").input_value() == "Why the root?"
    with page.expect_download() as download:
        page.get_by_role("button", name="Save to a file").click()
    download.value.save_as(tmp_path / "notes.md")
    said = (tmp_path / "notes.md").read_text("utf-8")
    assert re.fullmatch(r"## 02.Scaled dot-product attention\n\nWhy the root\?\n", said)
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Remove all notes").click()
    page.reload()
    assert page.get_by_label("Scaled dot-product").input_value() == ""
    assert not troubles
