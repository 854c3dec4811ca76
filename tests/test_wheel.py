"""The library as pip installs it: what is in the wheel, and notebooks beside it.

The environment is fresh and lies outside of the project, the notebooks in a third
folder. Its torch and the like are those that are there already; the library is the
wheel's. All chapters run that way before the tests begin, and here the way itself is
tested (book/_tools/run_notebooks.py); `make colab` runs them with Colab's versions.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import installed
import nbformat
import pytest
import run_notebooks
from chapters import all_notebooks
from nbclient.exceptions import (
    CellExecutionError,
    CellTimeoutError,
    DeadKernelError,
)

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "transformer_lib"
LARGEST = 40_000_000  # bytes
WHERE = """\
import importlib.metadata, importlib.util, json, transformer_lib
version = importlib.metadata.version("transformer-lib")
torch = importlib.util.find_spec("torch").origin
print(json.dumps([transformer_lib.__file__, version, torch]))
"""


def files_of_the_library():
    """What the package's folder holds, as its code knows it."""
    found = (p.relative_to(ROOT).as_posix() for p in LIBRARY.rglob("*") if p.is_file())
    return {name for name in found if "__pycache__" not in name}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A wheel and a source archive."""
    place = tmp_path_factory.mktemp("built")
    wheel = installed.build(place, "both")
    (archive,) = place.glob("*.tar.gz")
    return wheel, archive


def test_the_wheel_holds_the_library_whole_and_nothing_else(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
    wanted = files_of_the_library()
    assert {n for n in names if ".dist-info/" not in n} == wanted
    for name in (
        "evidence/tatoeba-en-de.json",
        "evidence/benchmarks/peers.json",
        "recipes/small.toml",
        "book.mplstyle",
        "py.typed",
        "pretrained/tatoeba-en-de/weights.safetensors",
    ):
        assert f"transformer_lib/{name}" in wanted, name
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_source_archive_holds_the_library_whole(built):
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert files_of_the_library() <= names


def test_what_is_downloaded_stays_small(built):
    for path in built:
        assert path.stat().st_size < LARGEST, path.name


# --- installed -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def python(built, tmp_path_factory):
    """That of an environment with the wheel in it."""
    return installed.install(built[0], tmp_path_factory.mktemp("installed") / "env")


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A folder with nothing in it, and nothing of the project above it."""
    folder = tmp_path_factory.mktemp("elsewhere")
    assert not any((parent / "transformer_lib").exists() for parent in folder.parents)
    return folder


def test_the_library_is_the_wheels(python, elsewhere):
    done = subprocess.run(
        [python, "-c", WHERE],
        cwd=elsewhere,
        env=installed.variables(python),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    library, version, torch = json.loads(done.stdout)
    assert Path(library).is_relative_to(python.parents[1])
    assert not Path(torch).is_relative_to(python.parents[1])
    assert version == "0.1.0"


def test_its_command_runs(python, elsewhere):
    done = subprocess.run(
        [python.parent / "transformer-lib", "translate", "tatoeba-en-de"],
        input="Hello!\n",
        cwd=elsewhere,
        env=installed.variables(python),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Hallo")


# --- notebooks beside it -------------------------------------------------------------


def written(folder, *sources):
    """A notebook with these code cells: its path."""
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    path = folder / "chapter.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


LOOKS_AROUND = """\
import os
import sys
from pathlib import Path

from transformer_lib.runs import read_evidence

print(len(read_evidence("tatoeba-en-de")["scores"]) > 0)
print(os.listdir("."))
print([p for p in [".", *sys.path] if Path(p or ".", "transformer_lib").exists()])"""


def test_a_chapter_runs_beside_the_wheel(python, tmp_path, monkeypatch):
    """In a folder with nothing in it, and the library is found in one place."""
    runs_beside_the_wheel(python, tmp_path, monkeypatch)


def runs_beside_the_wheel(python, tmp_path, monkeypatch, command=()):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TRANSFORMER_LIB_MIRROR", "notebooks")
    show = "import os; print(os.environ['TRANSFORMER_LIB_MIRROR'])"
    path = written(tmp_path, LOOKS_AROUND, show)
    notebook, _, error = run_notebooks.execute(path, 1800, python, command)
    assert error is None
    first, second = (cell.outputs[0].text for cell in notebook.cells)
    record, files, found = first.splitlines()
    assert record == "True" and files == "['runs']"
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    assert found == str([str(packages)])
    assert second == f"{ROOT / 'notebooks'}\n", "named by its way from the project"
    assert not list(python.parents[2].glob("chapter-*")), "its folder is gone"


def test_a_chapter_beside_the_checkout_fails(python, tmp_path):
    path = written(tmp_path, f"import sys\nsys.path.insert(0, {str(ROOT)!r})")
    _, _, error = run_notebooks.execute(path, 1800, python)
    assert "The library is not the installed one" in str(error)
    assert str(LIBRARY) in str(error)


def test_no_notebook_looks_for_the_project():
    """What a chapter reads is the library's: no path leads out of it."""
    out = re.compile(r"\.parents\[|cwd\(\)\.parent|\.\./|_build")
    for path in all_notebooks().values():
        for cell in nbformat.read(path, 4).cells:
            if cell.cell_type == "code":
                found = out.search(cell.source)
                assert not found, f"{path.name}, cell {cell.id}: {found[0]}"


# --- from kernels that are forked -----------------------------------------------------

on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no pidfd")


@pytest.fixture(scope="module")
def command(python):
    """What starts a kernel that has torch in its memory."""
    with run_notebooks.faster_kernels(python, 2) as command:
        assert command, "as `make test` runs them"
        yield command


@on_linux
def test_a_chapter_runs_in_a_forked_kernel(python, tmp_path, monkeypatch, command):
    runs_beside_the_wheel(python, tmp_path, monkeypatch, command)


@on_linux
def test_a_forked_kernel_has_modules_and_nothing_else(python, tmp_path, command):
    """What one kernel does, the next does not see; pictures and threads are usual."""
    asks = """\
import sys
torch_is_there = "torch" in sys.modules
print(torch_is_there, [m for m in sys.modules if m.startswith("transformer_lib")])
import os, random, numpy, torch, matplotlib, matplotlib.pyplot as plt
print("left" in os.environ, torch.get_num_threads(), matplotlib.get_backend())
os.environ["left"] = "behind"
import transformer_lib.attention
plt.plot([1, 2]); plt.show()
print(random.random(), numpy.random.random(), os.getpid())"""
    said = []
    for _ in range(2):
        path = written(tmp_path, asks)
        notebook, _, error = run_notebooks.execute(path, 1800, python, command)
        assert error is None
        outputs = notebook.cells[0].outputs
        text = "".join(o.text for o in outputs if o.output_type == "stream")
        assert any("image/png" in o.get("data", {}) for o in outputs)
        said.append(text.splitlines())
    threads = os.environ["OMP_NUM_THREADS"]
    for first, second, _ in said:
        assert first == "True []"
        assert second.split()[:2] == ["False", threads] and "inline" in second
    for one, other in zip(*(third.split() for *_, third in said), strict=True):
        assert one != other, "two processes, and no common seed"


@on_linux
def test_a_forked_kernel_ends_as_others_do(python, tmp_path, command):
    """Where it dies, where a cell takes too long, and after the last cell."""
    show = "import os; print(os.getpid(), flush=True)"
    for last, caught, seconds in (
        ("os._exit(3)", DeadKernelError, 1800),
        ("import time; time.sleep(9999)", CellTimeoutError, 20),
        ("1 / 0", CellExecutionError, 1800),
        ("pass", type(None), 1800),
    ):
        path = written(tmp_path, show, last)
        notebook, _, error = run_notebooks.execute(path, seconds, python, command)
        assert type(error) is caught, last
        kernel = int(notebook.cells[0].outputs[0].text)
        assert ended(kernel), f"{last}: its process is still there"


def ended(process, seconds=1800):
    """Whether a process is gone, at once or soon."""
    until = time.monotonic() + seconds
    while Path(f"/proc/{process}").exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True
