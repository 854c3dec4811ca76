"""The built pages: all there, clean, and at home on any machine."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
from built import CHAPTERS, HTML, NOTEBOOKS, ROOT, Page, documents, need_the_book
from real_text import MIRROR, REAL

import transformer_lib

need_the_book()

DOCUMENTS = documents()
MATHJAX = "https://cdn.jsdelivr.net/npm/mathjax@"

each_page = pytest.mark.parametrize("name", DOCUMENTS)
each_chapter = pytest.mark.parametrize("name", NOTEBOOKS)


@cache
def page(name):
    return Page(name)


def test_no_warnings():
    log = (ROOT / "_build" / "logs" / "pages.log").read_text("utf-8")
    assert not re.findall(r".*(?:WARNING|ERROR).*", log)
    assert not list((ROOT / "_build").rglob("reports/*.log")), "a chapter failed"


def test_front_door():
    assert (HTML / "index.html").exists()
    assert all((HTML / f"{name}.html").exists() for name in DOCUMENTS)


@each_page
def test_one_title(name):
    titles = [a for tag, a in page(name).tags if tag == "h1"]
    # The theme prints a second one, hidden, for the print view.
    assert len([a for a in titles if "tocsection" not in a.get("class", "")]) >= 1


def test_the_reference_marks_what_is_stable():
    """The names at the top of the library, no others, each on its module's page."""
    marked = {
        name: path.rpartition("/")[2]
        for path in DOCUMENTS
        if path.startswith("book/api/")
        for name in re.findall(
            r"Stable: from transformer_lib import (\w+)", page(path).text
        )
    }
    assert marked == transformer_lib._HOME


@each_page
def test_no_directive_lines(name):
    found = re.findall(r"^\s*#\s*(?:\||@title).*$", page(name).text, re.M)
    assert not found


@each_page
def test_pictures_have_words(name):
    for tag, attributes in page(name).tags:
        if tag == "img":
            alt = attributes.get("alt", "")
            source = attributes.get("src", "")[:80]
            assert alt and not alt.startswith(("../", "_images")), source


@each_page
def test_no_path_of_this_machine(name):
    private = {str(ROOT), str(Path.home()), "/tmp/", "site-packages"}
    private |= {MIRROR, REAL.get("TRANSFORMER_LIB_CACHE", "")}
    for path in private - {"/", ""}:
        at = page(name).html.find(path)
        assert at < 0, f"...{page(name).html[max(0, at - 100) : at + 100]}..."


@each_page
def test_nothing_is_fetched_from_elsewhere(name):
    for tag, attributes in page(name).tags:
        links = [attributes.get("src")]
        if tag == "link" and attributes.get("rel") != "canonical":
            links.append(attributes.get("href"))
        for link in filter(None, links):
            outside = re.match(r"(https?:)?//", link)
            assert not outside or link.startswith(MATHJAX), link


@each_chapter
def test_chapter_ran(name):
    timings = json.loads((ROOT / "_build" / "timings.json").read_text("utf-8"))
    record = timings[name.removeprefix("notebooks/")]
    assert record["seconds"] > 0
    assert "This chapter ran in" in page(name).text
    assert "Traceback (most recent call last)" not in page(name).text


@each_chapter
def test_launch_buttons(name):
    links = [a.get("href", "") for tag, a in page(name).tags if tag == "a"]
    notebook = f"blob/main/{name}.ipynb"
    assert any("colab.research.google.com" in a and notebook in a for a in links)
    assert any(a.startswith("https://mybinder.org/") for a in links)


def test_contents_list_the_chapters():
    """The page after the first one leads to every chapter."""
    assert DOCUMENTS[1] == "book/contents"
    contents = page(DOCUMENTS[1])
    links = [a.get("href", "") for tag, a in contents.tags if tag == "a"]
    assert "not run" not in re.findall(r"^\s*(not run)\s*$", contents.text, re.M)
    for name in CHAPTERS:
        assert f"../{name}.html" in links, f"no way from the contents to {name}"
