"""Every exercise of every chapter: five parts, one source, a solution that passes."""

import ast
import json
import re

import pytest
from answers import NOTEBOOKS, all_exercises, cells_of, run_check, text_of
from exercises import ExerciseError, main, read_exercises, stub_of

EACH = pytest.mark.parametrize(("path", "exercise"), list(all_exercises()))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_parts(path):
    """All five parts in order, numbered through, and enough of them."""
    exercises = read_exercises(cells_of(path))  # raises where a part is missing
    chapter = int(path.name[:2])
    numbers = [exercise.number for exercise in exercises]
    assert numbers == [f"{chapter}.{i + 1}" for i in range(len(exercises))]
    if 1 <= chapter <= 7:
        assert len(exercises) >= 3, f"{path.name} has {len(exercises)} exercises, not 3"


@EACH
def test_facts(path, exercise):
    assert exercise.goal and exercise.title
    assert "○●" not in exercise.difficulty and exercise.difficulty[0] == "●"
    assert 1 <= exercise.minutes <= 90


@EACH
def test_stub_is_the_solutions(path, exercise):
    assert exercise.stub == stub_of(exercise.solution), (
        f"stale: run python book/_tools/exercises.py notebooks/{path.name}"
    )


@EACH
def test_solution_passes(path, exercise):
    verdict = run_check(exercise, path, exercise.solution)
    assert verdict.passed, verdict.message
    assert repr(verdict).startswith("Passed: ")


@EACH
def test_stub_fails_kindly(path, exercise):
    verdict = run_check(exercise, path, exercise.stub)
    assert not verdict.passed
    assert repr(verdict).startswith("Not yet: ")
    assert len(verdict.message) > 20
    assert "..." in verdict.message or "return" in verdict.message, verdict.message


WITHOUT = {"command_line", "shipped_model", "evidence"}
CHAPTERS = [path for path in NOTEBOOKS if path.stem[3:] not in WITHOUT]
FOLDED = re.compile(r"<details><summary>(.+?)</summary>\n\n(.+?)\n\n</details>", re.S)


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_questions_have_folded_answers(path):
    """Three to five, each with something under the fold."""
    texts = [text_of(c) for c in cells_of(path) if c["cell_type"] == "markdown"]
    _, *after = "\n\n".join(texts).split("\n## Questions\n")
    assert len(after) == 1, f"{path.name} has no section `## Questions`"
    section = re.split(r"^## ", after[0], flags=re.M)[0]
    folds = FOLDED.findall(section)
    assert section.count("<details>") == len(folds)
    assert 3 <= len(folds) <= 5
    asked = [head for head, _ in folds if head != "Answer"]
    asked += re.findall(r"^\*\*\d\.\*\* (.+?)\n\n<details>", section, re.M | re.S)
    assert len(asked) == len(folds) and all("?" in question for question in asked)
    assert all(len(answer.split()) >= 15 for _, answer in folds)


# --- the tool itself -----------------------------------------------------------------


def test_stub_keeps_signature_and_docstring():
    solution = 'import math\n\n\ndef f(x):\n    """Say."""\n    y = x\n\n    return y\n'
    assert stub_of(solution) == 'import math\n\n\ndef f(x):\n    """Say."""\n    ...'


def test_stub_cuts_after_the_marker_only_as_deep_as_it_stands():
    solution = (
        'def f(xs):\n    """Say."""\n    out = []\n    for x in xs:\n'
        "        # your turn: add x\n        y = x\n        out.append(y)\n"
        "    return out"
    )
    wanted = (
        'def f(xs):\n    """Say."""\n    out = []\n    for x in xs:\n'
        "        # your turn: add x\n        ...\n    return out"
    )
    assert stub_of(solution) == wanted


def test_stub_of_a_class_and_a_helper():
    solution = (
        "def given(x):\n    return x\n\n\nclass A:\n    def __init__(self):\n"
        "        self.x = 1\n\n    def go(self):\n"
        '        """Go."""\n        return self.x'
    )
    stub = stub_of(solution)
    assert "return x" in stub and "self.x = 1" in stub and "return self.x" not in stub
    ast.parse(stub)


@pytest.mark.parametrize("solution", ["x = 1", "def f():\n    return 1"])
def test_stub_of_nothing_to_leave_out(solution):
    with pytest.raises(ExerciseError, match="your turn"):
        stub_of(solution)


SOLUTION = "<details><summary>Solution</summary>\n\n"


def notebook(tmp_path, stub="...", **changes):
    parts = {
        "task": "### Exercise 1.1: Double\n\n"
        "**Goal** see it work · **Difficulty** ●○○ · **Minutes** 5\n\nDouble it.",
        "stub": stub,
        "check": "check_double(double)",
        "hint": "<details><summary>Hint</summary>\n\nTwice.\n\n</details>",
        "solution": f"{SOLUTION}```python\ndef double(x):\n"
        '    """Twice x."""\n    return 2 * x\n```\n\nIt is.\n\n</details>',
    } | changes
    cells = []
    for name, text in parts.items():
        kind = "code" if name in ("stub", "check") else "markdown"
        meta = {"tags": ["exercise"]} if name == "stub" else {}
        cell = {"cell_type": kind, "id": name, "metadata": meta, "source": [text]}
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        cells.append(cell)
    path = tmp_path / "01_x.ipynb"
    content = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_tool_writes_once_and_keeps_ids(tmp_path, capsys):
    path = notebook(tmp_path)
    assert main(["--check", str(path)]) == 1
    said = capsys.readouterr().out
    assert "01_x.ipynb" in said and "exercise 1.1 (Double)" in said
    assert main([str(path)]) == 0
    cells = cells_of(path)
    assert text_of(cells[1]) == 'def double(x):\n    """Twice x."""\n    ...'
    ids = [cell["id"] for cell in cells]
    assert ids == ["task", "stub", "check", "hint", "solution"]
    before = path.read_text()
    assert main([str(path)]) == 0 and main(["--check", str(path)]) == 0
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task": "### Exercise 1.1: Double\n\nDouble it."}, "Goal"),
        ({"task": "### Exercise one"}, "is not `### Exercise"),
        ({"hint": "Twice."}, "the hint must start"),
        ({"solution": f"{SOLUTION}2x\n\n</details>"}, "fenced"),
    ],
)
def test_tool_says_what_is_missing(tmp_path, capsys, changes, said):
    assert main(["--check", str(notebook(tmp_path, **changes))]) == 1
    assert said in capsys.readouterr().err
