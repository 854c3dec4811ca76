"""Read the exercises of a chapter, and write each stub from its solution.

An exercise is five cells, one after the other: the task, the stub (a code cell with the
tag `exercise`), the check, a folded hint, a folded solution. The fenced Python in the
solution is the source: the stub is the solution with its heart replaced by `...`, so
the two cannot drift apart. What goes:

- in a function with a docstring: all that follows the docstring;
- after a comment line that starts with `# your turn`: the lines that follow it, as far
  as they are indented as deep as the comment; such a function keeps what stands before.

All else (imports, given code, functions without docstring) stays.

    python book/_tools/exercises.py [--check] NOTEBOOK...
"""

import argparse
import ast
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

HEADING = re.compile(r"^### Exercise (\d+\.\d+): (\S.*)$", re.M)
FACTS = re.compile(
    r"^\*\*Goal\*\* (?P<goal>\S.*?) · \*\*Difficulty\*\* (?P<difficulty>[●○]{3})"
    r" · \*\*Minutes\*\* (?P<minutes>\d+)$",
    re.M,
)
FENCE = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
MARKER = re.compile(r"^\s*# your turn", re.I)


class ExerciseError(Exception):
    """An exercise does not have the form that is described above."""


@dataclass
class Exercise:
    """One exercise; the numbers are indices of cells in the notebook."""

    number: str
    title: str
    goal: str
    difficulty: str
    minutes: int
    stub_cell: int
    check_cell: int
    stub: str
    check: str
    solution: str

    @property
    def name(self) -> str:
        return f"exercise {self.number} ({self.title})"


def source(cell: dict) -> str:
    """The text of a cell, however the file splits it."""
    return "".join(cell["source"])


def tagged(cell: dict) -> bool:
    """Whether a cell has the tag `exercise`."""
    return "exercise" in cell["metadata"].get("tags", [])


def stub_of(solution: str) -> str:
    """The solution with its heart replaced by `...`."""
    lines = solution.strip("\n").splitlines()
    cuts = marked(lines) or []
    taken = {line for first, last, _ in cuts for line in range(first, last + 1)}
    for node in ast.walk(ast.parse("\n".join(lines))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        whole = set(range(node.lineno - 1, node.end_lineno))
        if ast.get_docstring(node) is None or whole & taken:
            continue
        if len(node.body) > 1:
            cuts.append((node.body[0].end_lineno, node.end_lineno - 1, indent(node)))
            taken |= whole
    if not cuts:
        raise ExerciseError(
            "nothing in the solution to leave out: give a function a docstring, or "
            "put a comment line `# your turn` before the part to write"
        )
    for first, last, column in sorted(cuts, reverse=True):
        lines[first : last + 1] = [" " * column + "..."]
    return "\n".join(lines)


def indent(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The column in which the body of a function starts."""
    return node.body[0].col_offset


def marked(lines: list[str]) -> list[tuple[int, int, int]]:
    """For each `# your turn`: first and last line to leave out, and the column."""
    cuts = []
    for i, line in enumerate(lines):
        if not MARKER.match(line):
            continue
        column = len(line) - len(line.lstrip())
        last = i
        for j in range(i + 1, len(lines)):
            text = lines[j]
            if text.strip() and len(text) - len(text.lstrip()) < column:
                break
            if text.strip():
                last = j
        if last == i:
            raise ExerciseError("nothing follows the comment `# your turn`")
        cuts.append((i + 1, last, column))
    return cuts


def read_exercises(cells: list[dict]) -> list[Exercise]:
    """All exercises among a notebook's cells.

    Raises:
        ExerciseError: if a part is missing or out of order, naming the exercise.
    """
    found = []
    for at, cell in enumerate(cells):
        text = source(cell)
        if cell["cell_type"] != "markdown" or "### Exercise" not in text:
            continue
        heading = HEADING.search(text)
        if not heading:
            first = text.strip().splitlines()[0]
            raise ExerciseError(f"`{first}` is not `### Exercise N.M: Title`")
        try:
            found.append(read_one(cells, at, heading))
        except ExerciseError as error:
            name = f"exercise {heading[1]} ({heading[2]})"
            raise ExerciseError(f"{name}: {error}") from None
    known = {exercise.stub_cell for exercise in found}
    if stray := [i for i, cell in enumerate(cells) if tagged(cell) and i not in known]:
        raise ExerciseError(f"no heading above the cells {stray}, tagged `exercise`")
    return found


def read_one(cells: list[dict], at: int, heading: re.Match) -> Exercise:
    """The exercise whose task stands in the cell `at`."""
    if not (facts := FACTS.search(source(cells[at]))):
        raise ExerciseError(
            "a line `**Goal** ... · **Difficulty** ●●○ · **Minutes** 10` is missing"
        )
    if len(cells) < at + 5:
        raise ExerciseError("it needs stub, check, hint and solution after the task")
    stub, check, hint, solution = cells[at + 1 : at + 5]
    if stub["cell_type"] != "code" or not tagged(stub):
        raise ExerciseError("a stub, a code cell tagged `exercise`, must come next")
    if check["cell_type"] != "code" or tagged(check):
        raise ExerciseError("the check, a code cell without tag, must follow the stub")
    for cell, part in ((hint, "Hint"), (solution, "Solution")):
        folded = f"<details><summary>{part}</summary>\n\n"
        text = source(cell).strip()
        if not (text.startswith(folded) and text.endswith("\n\n</details>")):
            raise ExerciseError(
                f"the {part.lower()} must start with "
                f"`<details><summary>{part}</summary>` and an empty line, "
                "and end with an empty line and `</details>`"
            )
    if not (code := FENCE.search(source(solution))):
        raise ExerciseError("the solution has no fenced ```python block")
    return Exercise(
        number=heading[1],
        title=heading[2],
        goal=facts["goal"],
        difficulty=facts["difficulty"],
        minutes=int(facts["minutes"]),
        stub_cell=at + 1,
        check_cell=at + 2,
        stub=source(stub),
        check=source(check),
        solution=code[1].rstrip("\n"),
    )


def renew(path: Path, check: bool = False) -> list[str]:
    """Write the stubs of one notebook anew; give the exercises that were stale.

    Args:
        path: the notebook.
        check: only look, change nothing.

    Raises:
        ExerciseError: if an exercise does not have the right form.
    """
    text = path.read_text(encoding="utf-8")
    notebook = json.loads(text)
    stale = []
    for exercise in read_exercises(notebook["cells"]):
        try:
            wanted = stub_of(exercise.solution)
        except (ExerciseError, SyntaxError) as error:
            raise ExerciseError(f"{exercise.name}: {error}") from None
        if exercise.stub != wanted:
            stale.append(exercise.name)
            cell = notebook["cells"][exercise.stub_cell]
            cell["source"] = wanted.splitlines(keepends=True)
    if stale and not check:
        text = json.dumps(notebook, ensure_ascii=False, indent=1) + "\n"
        path.write_text(text, encoding="utf-8")
    return stale


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="+", type=Path, metavar="NOTEBOOK")
    parser.add_argument("--check", action="store_true", help="change nothing")
    given = parser.parse_args(arguments)
    failed = False
    for path in given.notebooks:
        try:
            stale = renew(path, given.check)
        except ExerciseError as error:
            print(f"{path}: {error}", file=sys.stderr)
            failed = True
            continue
        for name in stale:
            what = "is not what the solution gives" if given.check else "written anew"
            print(f"{path}: the stub of {name} {what}")
        failed = failed or (given.check and bool(stale))
    if failed and given.check:
        print("Run `python book/_tools/exercises.py` on them.", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
