"""The page of questions has every question of every chapter, and leads to each."""

import json
import re

from built import HTML, ROOT, need_the_book

need_the_book()


def written():
    """The questions as the notebooks have them: chapter, number."""
    found = []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text("utf-8"))["cells"]
        said = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
        text = "\n\n".join(said)
        section = re.search(r"^## Questions\n(.*?)(?=^## |\Z)", text, re.M | re.S)
        if section:
            numbers = re.findall(r"^\*\*(\d+)\.\*\*", section[1], re.M)
            found += [(path.stem, number) for number in numbers]
    return found


def test_every_question_is_listed_and_leads_to_its_answer():
    page = (HTML / "book" / "questions.html").read_text("utf-8")
    links = re.findall(r'href="\.\./notebooks/(\w+)\.html#question-(\d+)"', page)
    assert len(links) > 90 and sorted(links) == sorted(written())
    for chapter in {chapter for chapter, _ in links}:
        text = (HTML / "notebooks" / f"{chapter}.html").read_text("utf-8")
        for number in (number for c, number in links if c == chapter):
            place = text.index(f'id="question-{number}"')
            assert text[place:].index("<details") < text[place:].index("</details")
            answer = text[place : text.index("</details", place)]
            assert f"<strong>{number}.</strong>" in answer, (chapter, number)


def test_what_is_folded_elsewhere_and_asked_is_found_from_here():
    """A fold outside of "Questions" that asks: its section is linked by the page."""
    page = (ROOT / "book" / "questions.md").read_text("utf-8")
    asked = 0
    for path in sorted((ROOT / "notebooks").rglob("*.ipynb")):
        place = path.relative_to(ROOT)
        heading = ""
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            lines = "".join(cell["source"]).split("\n")
            for line in lines if cell["cell_type"] == "markdown" else ():
                if line.startswith("#"):
                    words = re.sub(r"[^\w\s-]", "", line.lstrip("# ").lower())
                    heading = words.replace(" ", "-")
                if re.search(r"<summary>[^<]*\?</summary>", line):
                    asked += 1
                    assert f"{place}#{heading})" in page, line
    assert asked
