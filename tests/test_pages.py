"""The chapters and the pages around them in a browser, as tests/looks.py looks."""

import pytest
from built import API, documents, need_the_book
from looks import FORMULAS, look_at, problems

need_the_book()


@pytest.mark.parametrize("name", [n for n in documents() if not n.startswith(API)])
def test_page(window, site, axe, name):
    look_at(window, site, axe, name)


def test_a_bad_page_is_seen(window, axe):
    """The looks can fail: each of these is found."""
    page, _ = window
    page.set_content(
        "<html lang=en><title>t</title><main><h1>One</h1><h3>Three</h3>"
        "<p style='color:#999;background:#fff'>pale</p><button></button>"
        "<div style='width:2000px'>wide</div><span class=math>x</span>"
    )
    assert page.evaluate(FORMULAS) == ["x"]
    found = problems((page, []), axe)
    assert any("sticks out" in line for line in found)
    rules = {line.split(": ")[1] for line in found} - {"sticks out"}
    assert not axe or rules == {"heading-order", "color-contrast", "button-name"}


def test_search_finds(window, site):
    page, _ = window
    page.goto(f"{site}/search.html?q=attention")
    page.wait_for_selector("#search-results li")
