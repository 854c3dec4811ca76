"""The book as one PDF: pages in order, bookmarks, links between chapters."""

import os
import re
import subprocess
import sys
from collections import Counter

import pytest
from built import ROOT, documents, need_the_book

need_the_book()

TOOLS = ROOT / "book" / "_tools"
PRINT = [sys.executable, str(TOOLS / "pdf.py")]
SHEET = re.compile(rb"/Type\s*/Page\b(?!s)")
FEW = ["notebooks/03_multihead", "book/picture"]


@pytest.fixture(scope="module")
def pdf():
    """The module that prints, without its folder on the path of other tests."""
    sys.path.insert(0, str(TOOLS))
    try:
        import pdf
    finally:
        sys.path.remove(str(TOOLS))
    return pdf


def test_all_pages_but_the_notes_in_order(pdf):
    assert pdf.pages() == [name for name in documents() if name != "book/notes"]


def test_places_of_all_pages_are_one_of_a_kind_and_linked(pdf):
    page = pdf.long_page(FEW)
    ids = Counter(re.findall(r'<(?:section|dt|span|p|div) [^>]*?id="([^"]+)"', page))
    assert not [name for name, count in ids.items() if count > 1]
    inside = set(re.findall(r'href="#([^"]+)"', page))
    assert inside and not {i for i in inside if i not in ids and "--id" not in i}
    assert "#notebooks-03_multihead--" in page, "the picture leads to the chapter"
    folds = re.findall(r"<details[^>]*>", page)
    assert folds and all('open=""' in fold for fold in folds), "nobody can unfold paper"


@pytest.mark.usefixtures("found_browser")
def test_prints(tmp_path):
    target = tmp_path / "few.pdf"
    done = subprocess.run(
        [*PRINT, *FEW, "-o", target], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    data = target.read_bytes()
    sheets = len(SHEET.findall(data))
    assert 5 < sheets < 60 and f"{sheets} pages" in done.stdout
    assert b"/Outlines" in data and b"Multi-head" in data.replace(b"\\", b"")
    assert os.listdir(tmp_path) == ["few.pdf"]


def test_says_what_is_missing(pdf, tmp_path, monkeypatch):
    monkeypatch.setattr(pdf, "find", lambda: None)
    with pytest.raises(SystemExit, match="no browser here, which prints the PDF"):
        pdf.write_pdf(FEW, tmp_path / "no.pdf")
    assert not list(tmp_path.iterdir())
    done = subprocess.run(
        [*PRINT, "book/nowhere"], capture_output=True, text=True, check=False
    )
    assert done.returncode and "no page 'book/nowhere'" in done.stderr
