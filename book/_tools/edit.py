"""Turn a chapter into text that any editor takes, and back, with cell ids kept.

    python book/_tools/edit.py 02_attention

writes _build/edit/02_attention.md from the notebook. Once that text has been edited,
the same command brings it back: it updates the notebook, makes the exercises' stubs
from their solutions, takes out whatever does not belong in a commit, and exports the
library. Where $EDITOR is set and a person sits at the terminal, the text is opened in
it in between.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from chapters import NOTEBOOKS, all_notebooks

ROOT = Path(__file__).resolve().parents[2]
EDIT = ROOT / "_build" / "edit"
TOOLS = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent


def run(*command: str | Path) -> None:
    """Run a tool of the environment; its words are shown only where it fails."""
    done = subprocess.run(
        [str(part) for part in command], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(
            f"{Path(command[0]).name} failed, and nothing more was done:\n"
            f"{done.stdout}{done.stderr}".rstrip()
        )


def find_chapter(name: str) -> Path:
    """The notebook of a chapter, by its name or its number."""
    names = list(all_notebooks())
    wanted = name.removeprefix("notebooks/").removesuffix(".ipynb")
    found = [n for n in names if n == wanted or n.split("_")[0] == wanted]
    if len(found) != 1:
        said = f"no chapter is called {name!r}" if name else "no chapter was named"
        raise SystemExit(
            f"Usage: make edit CHAPTER=02_attention; {said}.\n"
            f"There are: {', '.join(names)}."
        )
    return NOTEBOOKS / f"{found[0]}.ipynb"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def to_text(notebook: Path, text: Path) -> None:
    """Write the text, and beside it what both were, to see later which was edited."""
    text.parent.mkdir(parents=True, exist_ok=True)
    run(BIN / "jupytext", "--quiet", "--to", "md:myst", notebook, "-o", text)
    remember(notebook, text)


def remember(notebook: Path, text: Path) -> None:
    state = {"notebook": digest(notebook), "text": digest(text)}
    text.with_suffix(".json").write_text(json.dumps(state), encoding="utf-8")


def edited(notebook: Path, text: Path) -> tuple[bool, bool]:
    """Whether the notebook, and whether the text, changed since both were equal."""
    try:
        state = json.loads(text.with_suffix(".json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a text that somebody put there: its time decides
        newer = text.stat().st_mtime > notebook.stat().st_mtime
        return not newer, newer
    return digest(notebook) != state["notebook"], digest(text) != state["text"]


def to_notebook(text: Path, notebook: Path) -> None:
    """Bring an edited text back; the notebook changes at the end, in one step."""
    draft = text.with_suffix(".ipynb")
    shutil.copy(notebook, draft)
    try:
        run(BIN / "jupytext", "--quiet", "--to", "ipynb", "--update", text, "-o", draft)
        run(sys.executable, TOOLS / "exercises.py", draft)
        run(sys.executable, TOOLS / "fold.py", draft)
        run(BIN / "nbdev-clean", "--fname", draft)
        run(BIN / "nbstripout", "--keep-id", draft)
        draft.replace(notebook)
    finally:
        draft.unlink(missing_ok=True)
    run(sys.executable, TOOLS / "export.py")


def open_editor(text: Path) -> bool:
    """Open the text in $EDITOR, if there is one and somebody to use it."""
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR")
    if not editor or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    subprocess.run([*shlex.split(editor), str(text)], check=True)
    return True


def main() -> None:
    notebook = find_chapter(" ".join(sys.argv[1:]).strip())
    text = EDIT / notebook.relative_to(NOTEBOOKS).with_suffix(".md")
    shown = text.relative_to(ROOT)
    notebook_changed, text_changed = True, False
    if text.exists():
        notebook_changed, text_changed = edited(notebook, text)
    if notebook_changed and text_changed:
        raise SystemExit(
            f"Both {shown} and the notebook have changed since they were equal.\n"
            f"Remove {shown} to start again from the notebook, or take the notebook "
            "back to what it was."
        )
    if notebook_changed:
        to_text(notebook, text)
    if not text_changed and open_editor(text):
        text_changed = edited(notebook, text)[1]
    if not text_changed:
        print(
            f"The text of {notebook.stem} is in {shown}. Edit it, and the same command "
            "brings it back."
        )
        return
    to_notebook(text, notebook)
    to_text(notebook, text)
    print(f"{shown} is back in {notebook.relative_to(ROOT)}; the library is exported.")


if __name__ == "__main__":
    main()
