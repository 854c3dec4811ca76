"""Who solved which exercise: a table from notebooks that students hand in.

    python book/_tools/collect.py handed-in > answers.csv
    python book/_tools/collect.py handed-in --run   # run them again first

Each check of a chapter prints "Passed" or "Not yet" and a reason; this reads what is
stored in the notebooks. With --run the students' code runs here: use a machine that
may break.
"""

import argparse
import csv
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
from exercises import HEADING
from nbclient import NotebookClient

CHECK = re.compile(r"(?m)^check_\w+\(")
NOT_TRIED = "not tried"


def said(cell) -> str:
    """What the check in a cell printed last, on one line."""
    texts = [out.get("data", {}).get("text/plain", "") for out in cell.outputs]
    texts += [out.evalue for out in cell.outputs if out.output_type == "error"]
    return " ".join(" ".join(texts).split())


def verdicts(notebook) -> Iterator[tuple[str, str, str]]:
    """Of each exercise its number, passed, not yet or not tried, and the reason."""
    number = None
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for heading in HEADING.finditer(cell.source):
                number = heading[1]
        elif number and CHECK.search(cell.source):
            word, _, reason = said(cell).partition(": ")
            if word not in ("Passed", "Not yet"):
                word, reason = NOT_TRIED, said(cell)
            yield number, word.lower(), reason


def main(folder: Path, run: bool) -> int:
    """Print the table; 1 if a notebook could not be read."""
    table = csv.writer(sys.stdout)
    table.writerow(["notebook", "exercise", "verdict", "reason"])
    paths, unread = sorted(folder.rglob("*.ipynb")), 0
    if not paths:
        sys.exit(f"{folder}: no notebooks (.ipynb) are in this folder.")
    for path in paths:
        try:
            notebook = nbformat.read(path, as_version=4)
        except Exception as error:
            print(f"{path}: not a notebook: {error}", file=sys.stderr)
            unread += 1
            continue
        if run:
            NotebookClient(notebook, allow_errors=True, timeout=900).execute()
        name = path.relative_to(folder)
        for number, word, reason in verdicts(notebook):
            table.writerow([name, number, word, reason])
    return min(unread, 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="where the notebooks are")
    parser.add_argument("--run", action="store_true", help="run each of them first")
    given = parser.parse_args()
    sys.exit(main(given.folder, given.run))
