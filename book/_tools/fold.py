"""Fold in Colab what the book folds: its cells are forms there, their code hidden.

    python book/_tools/fold.py [--check] NOTEBOOK...

Jupyter Book folds by a cell's tags, Colab by its metadata "cellView": this writes the
second from the first. The first cell, which the book leaves out, is folded too. A form
shows a line `# @title ...` of its code as its title; the book leaves such lines out.
"""

import argparse
import json
import sys
from pathlib import Path

FOLDED = {"hide-input", "hide-cell", "remove-cell", "remove-input"}


def fold(notebook: dict) -> list[str]:
    """Make forms of the cells that the book folds, and of no others; what changed."""
    changed = []
    for cell in notebook["cells"]:
        hidden = FOLDED & set(cell["metadata"].get("tags", []))
        view = "form" if hidden and cell["cell_type"] == "code" else None
        if cell["metadata"].get("cellView") != view:
            changed.append(cell["id"])
            # In the order of the alphabet, as nbdev writes them.
            rest = {k: v for k, v in cell["metadata"].items() if k != "cellView"}
            cell["metadata"] = {"cellView": view, **rest} if view else rest
    return changed


def fold_all(paths: list[Path], check: bool = False) -> list[str]:
    """Fold notebooks where they are; the cells that changed, or would."""
    wrong = []
    for path in paths:
        notebook = json.loads(path.read_text("utf-8"))
        changed = fold(notebook)
        if changed and not check:
            text = json.dumps(notebook, indent=1, ensure_ascii=False)
            path.write_text(text + "\n", encoding="utf-8")
        wrong += [f"{path.name}: {cell}" for cell in changed]
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("notebooks", nargs="+", type=Path)
    asked = parser.parse_args()
    wrong = fold_all(asked.notebooks, asked.check)
    if asked.check and wrong:
        sys.exit("Not folded in Colab as in the book: " + ", ".join(wrong))


if __name__ == "__main__":
    main()
