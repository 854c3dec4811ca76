"""Cells that run in the page: the runner, and what the extension writes.

The runner is plain Python and is tested here without a browser; the browser's part is
in test_live_pages.py.
"""

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from exercises import read_exercises

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "book/_ext"))
import live_runner  # noqa: E402

NOTEBOOK = ROOT / "notebooks/01_hello.ipynb"
CONFIG = yaml.safe_load((ROOT / "_config.yml").read_text("utf-8"))["sphinx"]["config"]
PAGES = {name: ROOT / f"{name}.ipynb" for name in CONFIG["live_pages"]}
NOT_RUN = {"not-live", "remove-cell"}


def live_cells(notebook=NOTEBOOK):
    """The code cells of a chapter that run in the page, as the page shows them."""
    cells = []
    for cell in json.loads(notebook.read_text("utf-8"))["cells"]:
        lines = "".join(cell["source"]).splitlines()
        kept = [line for line in lines if not line.startswith(("#|", "# @title"))]
        text = "\n".join(kept).strip()
        tags = set(cell["metadata"].get("tags", []))
        if cell["cell_type"] == "code" and text and not tags & NOT_RUN:
            cells.append(text)
    return cells


def exercises(notebook=NOTEBOOK):
    """The exercises of a chapter whose checks run in the page: they need no torch."""
    live = live_cells(notebook)
    every = read_exercises(json.loads(notebook.read_text("utf-8"))["cells"])
    return [one for one in every if one.check in live]


each_page = pytest.mark.parametrize("notebook", PAGES.values(), ids=list(PAGES))
each_exercise = pytest.mark.parametrize(
    ("notebook", "exercise"),
    [(notebook, one) for notebook in PAGES.values() for one in exercises(notebook)],
    ids=lambda value: getattr(value, "number", ""),
)


def plain_outputs(cells):
    """What Python prints for each cell when all are run in one go."""
    space, outputs = {"__name__": "__main__"}, []
    for text in cells:
        screen = io.StringIO()
        with contextlib.redirect_stdout(screen):
            live_runner.run_and_show(text, 0, space)
        outputs.append(screen.getvalue())
    return outputs


def run(cells, at=None):
    """Run a cell, the last one unless told; give the result and what it printed."""
    printed = []
    at = len(cells) - 1 if at is None else at
    result = live_runner.run(cells, at, printed.append)
    return result, "".join(printed)


@pytest.fixture(autouse=True)
def same_modules():
    """The runner imports the library anew; other tests keep the one they have."""
    kept = {n: m for n, m in sys.modules.items() if n.startswith("transformer_lib")}
    yield
    for name in [n for n in sys.modules if n.startswith("transformer_lib")]:
        del sys.modules[name]
    sys.modules.update(kept)


# --- the chapters ---------------------------------------------------------------------


def test_which_chapters_run_in_the_page():
    assert set(PAGES) >= {"notebooks/01_hello", "notebooks/09_tokenizer"}
    assert len(live_cells(PAGES["notebooks/15_evaluation"])) > 15
    assert len(live_cells()) > 15
    assert len(live_cells(PAGES["notebooks/09_tokenizer"])) > 12
    objective = "\n".join(live_cells(PAGES["notebooks/11_objective"]))
    assert "def noam_lr" in objective and "def smoothed_truth" in objective


@pytest.mark.parametrize(
    ("page", "numbers"),
    [
        ("01_hello", ["1.1", "1.2", "1.3", "1.4"]),
        ("09_tokenizer", ["9.1", "9.2", "9.3", "9.4"]),
        ("11_objective", ["11.4"]),
        ("15_evaluation", ["15.1", "15.2", "15.3", "15.4", "15.5"]),
    ],
)
def test_which_exercises_are_checked_in_the_page(page, numbers):
    found = exercises(PAGES[f"notebooks/{page}"])
    assert [one.number for one in found] == numbers


@pytest.mark.parametrize("page", PAGES)
def test_served_modules_are_imported_without_torch(page):
    """As in the page, where there is no torch and nothing else to install."""
    names = [f"transformer_lib.{name}" for name in CONFIG["live_pages"][page]]
    program = f"""
import importlib, sys
sys.path.insert(0, {str(ROOT)!r})
for name in {names!r}:
    importlib.import_module(name)
outside = {{name.partition(".")[0] for name in sys.modules}}
outside -= sys.stdlib_module_names | {{"transformer_lib", "__main__"}}
assert not outside, outside
"""
    command = [sys.executable, "-S", "-I", "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_no_live_cell_needs_torch():
    for page in PAGES.values():
        for text in live_cells(page):
            assert not re.search(r"\b(torch|plt|numpy|np|F)\b[.\s]", text), text


@each_page
def test_each_cell_alone_prints_what_it_prints_in_the_whole_chapter(notebook):
    cells = live_cells(notebook)
    for at, wanted in enumerate(plain_outputs(cells)):
        result, printed = run(cells, at)
        assert result["error"] is None, (at + 1, result["error"])
        assert printed == wanted, f"cell {at + 1}"
        assert not result["broken"]


def test_a_cell_runs_what_it_needs_and_no_more():
    cells = live_cells()
    words, tools, tables, shown = (
        next(i for i, text in enumerate(cells) if start in text)
        for start in ("Wq = [[", "def print_table", "def matmul", "Q = matmul(X, Wq)")
    )
    assert live_runner.needed(cells, shown) == [words, tools, tables]
    assert live_runner.needed(cells, words) == []


@each_exercise
def test_an_exercise_needs_its_answer_alone(notebook, exercise):
    cells = live_cells(notebook)
    at = cells.index(exercise.check)
    assert live_runner.needed(cells, at) == [at - 1]


def test_changed_embeddings_reach_the_output_and_pass_the_asserts():
    cells = live_cells()
    first = next(i for i, text in enumerate(cells) if "Wq = [[" in text)
    at = next(i for i, text in enumerate(cells) if text.startswith("Z = matmul"))
    cells[first] = cells[first].replace("[1, 0, 1, 0]", "[1, 1, 1, 0]")
    cells[at] = cells[at].splitlines()[0] + "\nZ"
    result, printed = run(cells, at)
    space = {}
    exec(cells[first], space)
    from transformer_lib.hello import attention

    Z = attention(*(space[name] for name in ("X", "Wq", "Wk", "Wv"))).Z
    assert printed == f"{Z}\n" and result["error"] is None
    assert result["broken"] and set(result["broken"]) < set(result["before"])


@each_exercise
def test_exercises_get_their_verdict(notebook, exercise):
    cells = live_cells(notebook)
    at = cells.index(exercise.check)
    result, printed = run(cells, at)
    assert result["verdict"] is False and printed.startswith("Not yet: ")
    cells[at - 1] = exercise.solution
    result, printed = run(cells, at)
    assert result["verdict"] is True and printed.startswith("Passed: ")
    cells[at - 1] = exercise.stub.replace("...", "x = 1\n    return x / 0")
    result, printed = run(cells, at)
    assert result["verdict"] is False and "`return x / 0`" in printed.replace("\n", " ")


# --- which cells are needed -----------------------------------------------------------


@pytest.mark.parametrize(
    ("cells", "wanted"),
    [
        (["x = 1", "y = 2", "x"], [0]),
        (["x = 1", "x = x + 1", "x"], [0, 1]),
        (["x = []", "x.append(1)", "y = []", "x"], [0, 1]),
        (["x = {}", "x['a'] = 1", "del x['a']", "x"], [0, 1, 2]),
        (["import math", "def f(x): return math.exp(x)", "x = 1", "f(0)"], [0, 1]),
        (["x = 1", "def f(x): return x", "f(2)"], [1]),
        (["x = 1", "[x for x in range(3)]"], []),
        (["x = 1", "for x in range(3): print(x)"], []),
        (
            ["def g(): return 1", "def f(): return g()", "def g(): return 2", "f()"],
            None,
        ),
        (["class A:\n    n: int = 1", "n = 2", "A.n"], [0]),
        (["x = 1", "def f():\n    def g(): return x\n    return g()", "f()"], [0, 1]),
        (["x = (", "y = 1", "y"], [1]),
        (["x = 1", "global x\nx = 2", "x"], [0, 1]),
    ],
)
def test_needed(cells, wanted):
    everything = list(range(len(cells) - 1))
    last = len(cells) - 1
    assert live_runner.needed(cells, last) == (everything if wanted is None else wanted)


def test_every_run_starts_from_nothing():
    cells = ["x = [0]", "x.append(1)\nx"]
    assert run(cells)[1] == run(cells)[1] == "[0, 1]\n"
    spoil = "import transformer_lib.hello as h\nh.softmax = None\nh.softmax"
    run([spoil])
    assert "function softmax" in run([spoil.replace("h.softmax = None\n", "")])[1]


# --- errors ---------------------------------------------------------------------------


def test_traceback_is_pythons_and_begins_in_the_cell():
    result, printed = run(["def f(x):\n    return 1 / x", "print('so far')\nf(0)"])
    assert printed == "so far\n" and result["stopped"] == 1
    lines = result["error"].splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == '  File "<cell 2>", line 2, in <module>'
    assert "    return 1 / x" in lines and lines[-1].startswith("ZeroDivisionError: ")
    assert "live_runner" not in result["error"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = (", "SyntaxError: '(' was never closed"),
        ("def f(): return f()\nf()", "RecursionError"),
        ("exit()", "SystemExit"),
        (
            "try: 1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError from e",
            "direct cause",
        ),
        ("while True: print('x' * 100)", "20,000 characters"),
        ("try:\n    while True: print(1)\nexcept Exception: pass", "20,000 characters"),
    ],
)
def test_errors_are_told_in_short(text, said):
    result, printed = run([text])
    assert said in result["error"] and result["stopped"] == 0
    assert len(result["error"]) <= 4_000 and len(result["error"].splitlines()) < 45
    assert len(printed) <= live_runner.LONGEST


def test_an_error_in_a_needed_cell_names_that_cell():
    result, printed = run(["x = 1 / 0", "y = 1", "x"])
    assert result["stopped"] == 0 and '"<cell 1>"' in result["error"] and not printed


def test_what_needed_cells_print_is_not_shown():
    assert run(["x = 1\nprint('before')", "print(x)"])[1] == "1\n"


# --- what the extension writes --------------------------------------------------------


def build(folder, pyodide):
    """A book of one notebook: a live cell and one that is not."""
    from sphinx.application import Sphinx

    cell = {"cell_type": "code", "execution_count": None, "outputs": []}
    cells = [
        {"cell_type": "markdown", "id": "t", "metadata": {}, "source": "# Title"},
        cell | {"id": "a", "metadata": {}, "source": "x = 1"},
        cell | {"id": "b", "metadata": {"tags": ["not-live"]}, "source": "y = 2"},
    ]
    notebook = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    source = folder / "source"
    (source / "book").mkdir(parents=True)
    (source / "transformer_lib").mkdir()
    (source / "transformer_lib/__init__.py").write_text("")
    (source / "index.ipynb").write_text(json.dumps(notebook))
    (source / "book/how_to_read.md").write_text("# How\n")
    if pyodide:
        place = source / "_build/web/static/pyodide"
        place.mkdir(parents=True)
        (place / "pyodide.asm.wasm").write_bytes(b"")
    settings = {
        "extensions": ["myst_nb", "live"],
        "nb_execution_mode": "off",
        "live_pages": {"index": []},
        "exclude_patterns": ["_build"],
    }
    with contextlib.redirect_stderr(io.StringIO()):
        app = Sphinx(
            source, None, folder / "html", folder / "trees", "html", settings, None
        )
        app.build()
    return (folder / "html/index.html").read_text("utf-8")


def test_with_pyodide_cells_are_live(tmp_path):
    page = build(tmp_path, pyodide=True)
    assert page.count('class="cell live ') == 1 and "live.js" in page
    assert (tmp_path / "html/_static/pyodide/pyodide.asm.wasm").exists()
    served = json.loads((tmp_path / "html/_static/live.json").read_text("utf-8"))
    assert set(served) == {"live_runner.py", "transformer_lib/__init__.py"}
    assert "live.js" not in (tmp_path / "html/book/how_to_read.html").read_text()


def test_without_pyodide_a_note_tells_the_other_ways(tmp_path):
    page = build(tmp_path, pyodide=False)
    assert 'class="cell live ' not in page and "live.js" not in page
    assert 'href="book/how_to_read.html"' in page and "without Pyodide" in page
    assert not (tmp_path / "html/_static/live.json").exists()


@pytest.mark.parametrize("page", PAGES)
def test_served_modules_are_all_that_the_chapter_imports(page):
    from run_notebooks import library_closure

    needed = {
        path.relative_to(ROOT / "transformer_lib").with_suffix("").as_posix()
        for path in library_closure("\n\n".join(live_cells(PAGES[page])))
    }
    served = {name.replace(".", "/") for name in CONFIG["live_pages"][page]}
    assert needed - {"__init__"} == served


def test_pyodide_is_locked_and_not_committed():
    web = ROOT / "book/_web"
    wanted = json.loads((web / "package.json").read_text())["dependencies"]
    locked = json.loads((web / "package-lock.json").read_text())["packages"]
    for name, version in wanted.items():
        entry = locked[f"node_modules/{name}"]
        assert entry["version"] == version and entry["integrity"].startswith("sha512-")
    assert not list((ROOT / "book").rglob("pyodide*"))
