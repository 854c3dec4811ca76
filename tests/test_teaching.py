"""The page for teachers: exercises that exist, slides, and the table of answers."""

import csv
import re
import subprocess
import sys

import nbformat
import pytest
from browser import served
from bs4 import BeautifulSoup
from built import CHAPTERS, ROOT
from collect import verdicts
from slides import deck

PAGE = (ROOT / "book" / "teaching.md").read_text("utf-8")
TOOL = ROOT / "book" / "_tools" / "collect.py"


def exercises() -> dict[str, int]:
    """Each exercise of the book, and its dots."""
    found = {}
    for name in CHAPTERS:
        cells = nbformat.read(ROOT / f"{name}.ipynb", as_version=4).cells
        text = "\n".join(cell.source for cell in cells)
        pattern = r"(?s)### Exercise ([\d.]+\d):.*?\*\*Difficulty\*\* (\S+) "
        found |= {n: dots.count("●") for n, dots in re.findall(pattern, text)}
    return found


def test_sessions_name_exercises_of_their_chapters():
    known = exercises()
    rows = re.findall(r"(?m)^\| (\d+) [A-Z].*$", PAGE)
    assert rows == [*map(str, range(1, 11)), "1", "2", "3"]
    for row in re.findall(r"(?m)^\| \d+ [A-Z].*$", PAGE):
        chapters = [int(n) for n in re.findall(r"\[(\d\d)\]", row)]
        if "to [" in row:
            chapters = range(chapters[0], chapters[-1] + 1)
        asked = re.findall(r"\b\d+\.\d\b", row.split("|")[4])
        assert asked and set(asked) <= known.keys()
        assert {int(n.split(".")[0]) for n in asked} <= set(chapters)


def test_homework_is_the_hard_exercises():
    known = exercises()
    homework = re.search(r"three dots \(([^)]*)\)", PAGE)[1].split(", ")
    assert all(known[n] == 3 for n in homework)


def handed_in(solution: str, output: str):
    """Exercise 12.1 as a student saves it."""
    v4 = nbformat.v4
    check = "from transformer_lib.exercises.training import check_mean_loss\n\n"
    outputs = []
    if output:
        outputs.append(
            v4.new_output("execute_result", {"text/plain": output}, execution_count=2)
        )
    return v4.new_notebook(
        cells=[
            v4.new_markdown_cell("### Exercise 12.1: Count by tokens"),
            v4.new_code_cell(solution),
            v4.new_code_cell(f"{check}check_mean_loss(mean_loss)", outputs=outputs),
        ]
    )


RIGHT = """def mean_loss(losses, tokens):
    return sum(a * b for a, b in zip(losses, tokens)) / sum(tokens)"""
WRONG = "def mean_loss(losses, tokens):\n    return sum(losses) / len(losses)"


def test_stored_outputs_are_read_line_by_line():
    assert list(verdicts(handed_in(RIGHT, ""))) == [("12.1", "not tried", "")]
    told = "Not yet: You took the mean\nof two means."
    assert list(verdicts(handed_in(WRONG, told))) == [
        ("12.1", "not yet", "You took the mean of two means.")
    ]


def test_the_table_believes_no_typed_output(tmp_path):
    nbformat.write(handed_in(RIGHT, "Passed: yes."), tmp_path / "ann.ipynb")
    nbformat.write(handed_in(WRONG, "Passed: yes."), tmp_path / "bob.ipynb")
    (tmp_path / "eve.ipynb").write_text("{", "utf-8")
    for run, bobs in ([], "passed"), (["--run"], "not yet"):
        done = subprocess.run(
            [sys.executable, TOOL, tmp_path, *run], capture_output=True, text=True
        )
        assert done.returncode == 1 and "eve.ipynb: not a notebook" in done.stderr
        rows = list(csv.DictReader(done.stdout.splitlines()))
        told = {row["notebook"]: row["verdict"] for row in rows}
        assert told == {"ann.ipynb": "passed", "bob.ipynb": bobs}


def test_no_notebooks_is_said(tmp_path):
    done = subprocess.run([sys.executable, TOOL, tmp_path], capture_output=True)
    assert done.returncode == 1 and b"no notebooks" in done.stderr


def test_checks_of_all_chapters_are_found():
    for name in CHAPTERS:
        notebook = nbformat.read(ROOT / f"{name}.ipynb", as_version=4)
        numbers = [n for n, _, _ in verdicts(notebook)]
        text = "\n".join(cell.source for cell in notebook.cells)
        headings = re.findall(r"### Exercise ([\d.]+\d):", text)
        assert numbers == headings, name


HTML_OF_A_CHAPTER = """<html><head></head><body><article><section><h1>Heads</h1>
<p>First. See <a href="01_hello.html">one</a>. Look at it:</p><div class="cell">x</div>
<section><h2>Why</h2><p>Because. Really.</p><p>So. There.</p></section>
</section></article></body></html>"""


def test_a_slide_for_what_is_shown_and_notes_for_what_is_said():
    first, why = BeautifulSoup(deck(HTML_OF_A_CHAPTER), "lxml").select(
        ".slides > section"
    )
    (slide,) = first.find_all("section", recursive=False)
    assert slide.find("p", class_="tex2jax_process").text == "Look at it:"
    assert slide.select_one("div.cell") and "First." in slide.select_one(".notes").text
    assert slide.find("a")["href"] == "../html/notebooks/01_hello.html"
    shown = [p.text for p in why.select("p.tex2jax_process")]
    assert shown == ["Because.", "So."]


@pytest.mark.pages
def test_the_deck_of_a_chapter_opens(window):
    if not (ROOT / "_build/web/node_modules/reveal.js").exists():
        pytest.skip("not looked at in a browser")
    tool = ROOT / "book" / "_tools" / "slides.py"
    subprocess.run([sys.executable, tool, "02_attention"], check=True)
    page, errors = window
    with served(ROOT / "_build") as site:
        page.goto(f"{site}/slides/02_attention.html")
        page.wait_for_function("() => window.Reveal?.isReady()")
        assert page.evaluate("() => Reveal.getTotalSlides()") > 20
        page.keyboard.press("ArrowRight")
        assert "NumPy" in page.inner_text(".slides > .present > .present > h2")
    assert not errors
