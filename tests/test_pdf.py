"""The book as one PDF: pages in order, bookmarks, links between chapters."""

import os
import re
import subprocess
import sys
import warnings
from collections import Counter

import pytest
from built import ROOT, documents, need_the_book
from conftest import BROWSER

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


def test_prints(tmp_path):
    if BROWSER is None:
        warnings.warn("No Chromium: the PDF is NOT printed.", stacklevel=1)
        pytest.skip("no Chromium to print with")
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


def test_says_what_is_missing(tmp_path):
    nothing = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(
        [*PRINT, *FEW, "-o", tmp_path / "no.pdf"],
        capture_output=True, text=True, check=False, env=nothing,
    )  # fmt: skip
    assert done.returncode and "There is no Chromium" in done.stderr
    done = subprocess.run(
        [*PRINT, "book/nowhere"], capture_output=True, text=True, check=False
    )
    assert done.returncode and "no page 'book/nowhere'" in done.stderr
