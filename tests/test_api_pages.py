"""The library's pages in a browser, as tests/looks.py looks, and those without text.

In a file of their own, so that two processes share the pages.
"""

import pytest
from built import API, documents, need_the_book
from looks import EXAMPLES, HEADER, look_at

need_the_book()

NAMES = [name for name in documents() if name.startswith(API)]


def test_the_pages_that_stand_for_all_are_here():
    assert set(NAMES) >= EXAMPLES and set(documents()) >= HEADER


@pytest.mark.parametrize("name", [*NAMES, "search", "genindex", "404"])
def test_page(window, site, axe, name):
    look_at(window, site, axe, name)
