"""How long a chapter's page may be, as book/_tools/limits.py counts it."""

import sys

import pytest
from built import CHAPTERS, ROOT, need_the_book

sys.path.append(str(ROOT / "book" / "_tools"))
import limits

need_the_book()


@pytest.fixture
def small(window):
    page, _ = window
    before = page.viewport_size
    page.set_viewport_size({"width": 1300, "height": 800})
    yield page
    page.set_viewport_size(before)


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_page_is_no_longer_than_one_reads(small, site, name):
    found = limits.measure(small, f"{site}/{name}.html")
    assert found["words"] > 100 and found["screens"] > 1, "it counts something"
    number = int(name.removeprefix("notebooks/")[:2])
    assert not limits.too_much(number, found)


def test_it_counts(small):
    """A page of known length: what is folded, code and hints do not count."""
    small.set_content(
        "<style>* { margin: 0; border: 0; padding: 0 } p { height: 400px }</style>"
        "<article class=bd-article><section><h1>T</h1><p>one two three</p>"
        "<p>four</p><pre>a = 1</pre><details><summary>Show</summary><p>five</p>"
        "</details><section><h2>Exercises</h2><p>six</p><details>"
        "<summary>Hint</summary>seven</details></section></section></article>"
    )
    found = small.evaluate(limits.MEASURE)
    assert found["words"] == 4 and found["folds"] == 1 and found["figures"] == 0
    assert 1 < found["screens"] < 1.3 and 0.5 < found["behind"] < 0.7
    assert limits.too_much(7, {**found, "words": 1501, "folds": 5}) == [
        "words: 1501, and 1500 are allowed",
        "folds: 5, and 4 are allowed",
    ]
    assert not limits.too_much(8, {**found, "words": 1501})
