"""Links to sections: each anchor that a page or chapter names is there."""

import json
import re

import pytest
from chapters import all_notebooks
from test_claims import ROOT, headings, slug

CHAPTERS = [*all_notebooks().values()]
PAGES = [ROOT / "README.md", *sorted((ROOT / "book").glob("*.md"))]
# The book's extensions give these to formulas, figures and questions.
NUMBERED = re.compile(r"(equation|figure|question)-\d[\d-]*")


def text_of(path):
    """A page, or the prose of a chapter, without blocks of code."""
    text = path.read_text("utf-8")
    if path in CHAPTERS:
        cells = json.loads(text)["cells"]
        said = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
        text = "\n".join(said)
    return re.sub(r"^(```+)(?!\{glossary).*?^\1\s*$", "", text, flags=re.M | re.S)


def anchors(path):
    """Headings of a chapter; of a page also the names above them."""
    if path in CHAPTERS:
        return headings(path)
    text = path.read_text("utf-8")
    found = {slug(line) for line in re.findall(r"^#+ (.+)$", text, re.M)}
    return found | {*re.findall(r"^\(([\w-]+)\)=$", text, re.M)}


def lost(path):
    """Links of a page to anchors that are not there."""
    found = []
    for target, anchor in re.findall(r"\]\(([^)\s#]*)#([^)\s]+)\)", text_of(path)):
        file = (path.parent / target).resolve() if target else path
        looked_up = not re.match(r"[a-z]+:", target) and not NUMBERED.fullmatch(anchor)
        if looked_up and anchor not in anchors(file):
            found.append(f"{target}#{anchor}")
    return found


@pytest.mark.parametrize("path", [*PAGES, *CHAPTERS], ids=lambda path: path.stem)
def test_anchors_are_there(path):
    assert not lost(path)


def test_a_lost_anchor_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One\n[a](#one) [b](#two) [c](https://x.org/#three)", "utf-8")
    assert lost(page) == ["#two"]


def test_each_symptom_leads_to_one_section():
    """Each row of the page's table: what is seen, and a link with an anchor."""
    page = (ROOT / "book" / "questions.md").read_text("utf-8")
    rows = re.findall(r"^\| (.+) \| (.+) \|$", page, re.M)[1:]
    assert len(rows) > 20
    for seen, answer in rows:
        link = re.fullmatch(r"\[[^]]+\]\((\S+)#(\S+)\)", answer)
        assert link, seen
        assert link[2] in anchors((ROOT / "book" / link[1]).resolve()), seen
