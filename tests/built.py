"""The built book, for the tests that read it."""

import functools
import os
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
HTML = ROOT / "_build" / "html"
API = "book/api/"  # the pages of the library
AXE = ROOT / "_build/web/node_modules/axe-core/axe.min.js"


def documents():
    """Every page that _toc.yml names, as in `notebooks/01_hello`."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text("utf-8"))
    found = [toc["root"]]

    def walk(entries):
        for entry in entries:
            found.append(entry["file"])
            walk(entry.get("sections", []))

    for part in toc["parts"]:
        walk(part["chapters"])
    return found


NOTEBOOKS = [name for name in documents() if name.startswith("notebooks/")]
CHAPTERS = [name for name in NOTEBOOKS if "under_the_hood" not in name]


def need_the_book():
    """`make test` builds the book; pytest alone does without it."""
    if not os.environ.get("LITERATE_BOOK"):
        pytest.skip("the built book is checked by `make test`", allow_module_level=True)


@functools.cache
def wait_for_the_book() -> bool:
    """`make test` names a file that comes when the book is built, or could not be."""
    told = os.environ.get("LITERATE_BOOK", "")
    if "/" not in told:
        return True
    while not os.path.exists(told):
        time.sleep(0.5)
    return Path(told).read_text("utf-8").strip() == "built"


class Page(HTMLParser):
    """The tags of a page with their attributes, and its text without scripts."""

    def __init__(self, name):
        super().__init__()
        self.tags, self.texts, self.silent = [], [], 0
        self.html = (HTML / f"{name}.html").read_text("utf-8")
        self.feed(self.html)
        self.text = "".join(self.texts)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.silent += tag in ("script", "style")

    def handle_endtag(self, tag):
        self.silent -= tag in ("script", "style")

    def handle_data(self, data):
        if not self.silent:
            self.texts.append(data)
