"""The library as pip installs it: what is in the wheel, and notebooks beside it.

The environment is fresh and lies outside of the project, the notebooks in a third
folder. Its torch and the like are those that are there already; the library is the
wheel's. Two chapters run there whole, and of the others every cell that reads a record,
with the cells that it needs; `make colab` runs all chapters whole that way.
"""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest
from jupyter_client import KernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient
from slices import Cell, needed

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "transformer_lib"
LARGEST = 40_000_000  # bytes
BUILD = """\
import sys
from setuptools import build_meta
folder = sys.argv[1]
build_meta.build_wheel(folder)
build_meta.build_sdist(folder)
"""
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
    """A wheel and a source archive, built from a copy."""
    place = tmp_path_factory.mktemp("built")
    source = place / "source"
    shutil.copytree(
        LIBRARY, source / LIBRARY.name, ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(place)], cwd=source, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,), (archive,) = place.glob("*.whl"), place.glob("*.tar.gz")
    return wheel, archive


def test_the_wheel_holds_the_library_whole_and_nothing_else(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
    wanted = files_of_the_library()
    assert {n for n in names if ".dist-info/" not in n} == wanted
    for name in ("evidence/tatoeba-en-de.json", "evidence/benchmarks/peers.json",
                 "recipes/small.toml", "book.mplstyle", "py.typed",
                 "pretrained/tatoeba-en-de/weights.safetensors"):  # fmt: skip
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
def installed(built, tmp_path_factory):
    """An environment with the wheel in it: its Python."""
    place = tmp_path_factory.mktemp("installed") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    python = place / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--quiet",
         "--no-deps", "--no-index", built[0]],
        check=True,
    )  # fmt: skip
    (packages,) = place.glob("lib/python*/site-packages")
    # Paths that a .pth file adds have no .pth files of their own: the project's, which
    # is installed there to be edited, is not found by it.
    ours = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    (packages / "those_that_are_there.pth").write_text("\n".join(sorted(ours)) + "\n")
    return python


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A folder with nothing in it, and nothing of the project above it."""
    folder = tmp_path_factory.mktemp("elsewhere")
    assert not any((parent / "transformer_lib").exists() for parent in folder.parents)
    return folder


def outside(python, folder):
    """The variables of a shell that knows nothing of the project."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    return kept | {
        "PATH": path, "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1",
        "TRANSFORMER_LIB_RUNS": str(folder / "runs"),
        "TRANSFORMER_LIB_CACHE": str(folder / "cache"),
    }  # fmt: skip


def test_the_library_is_the_wheels(installed, elsewhere):
    done = subprocess.run(
        [installed, "-c", WHERE], cwd=elsewhere, env=outside(installed, elsewhere),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    library, version, torch = json.loads(done.stdout)
    assert Path(library).is_relative_to(installed.parents[1])
    assert not Path(torch).is_relative_to(installed.parents[1])
    assert version == "0.1.0"


def test_its_command_runs(installed, elsewhere):
    done = subprocess.run(
        [installed.parent / "transformer-lib", "translate", "tatoeba-en-de"],
        input="Hello!\n", cwd=elsewhere, env=outside(installed, elsewhere),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Hallo")


# --- notebooks beside it -------------------------------------------------------------

READS = re.compile(r"(?<!def )\b(read_evidence|our_result)\(")


def reading(sources):
    """The cells that read a record, and those that show what was read."""
    found, record = [], set()
    for i, source in enumerate(sources):
        cell = Cell(source)
        if READS.search(source):
            record |= set(re.findall(r"(?m)^(\w+) = .*read_evidence", source))
            found.append(i)
        elif record & cell.reads:
            found.append(i)
            record -= cell.binds
        else:
            record -= cell.binds
    return found


EXPORTED = """\
from transformer_lib import {0}

globals().update({{k: v for k, v in vars({0}).items() if not k.startswith("__")}})"""


WHOLE = "19_shipped_model", "32_evidence"  # they export nothing, and take seconds


def part(path):
    """The notebook, with the cells alone that its records need; None if it has none.

    What the notebook exports comes from the installed module.
    """
    notebook = nbformat.read(path, 4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if path.stem in WHOLE:
        notebook.cells = cells
        return notebook
    every = "\n".join(cell.source for cell in cells)
    if not READS.search(every):
        return None
    cells = [cell for cell in cells if not cell.source.startswith("#|")]
    sources = [cell.source for cell in cells]
    wanted = {sources[i] for i in reading(sources)}
    first, given = [cell for cell in cells if "%pip" in cell.source], set()
    modules = re.findall(r"(?m)^#\| (?:default_exp|exporti?) (\w+)$", every)
    for name in dict.fromkeys(modules):
        given |= {name, *vars(importlib.import_module(f"transformer_lib.{name}"))}
        first.append(nbformat.v4.new_code_cell(EXPORTED.format(name)))
    places = needed(sources, wanted.__contains__, given)
    notebook.cells = first + [cells[i] for i in places]
    return notebook


PARTS = {
    path.stem: notebook
    for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
    if (notebook := part(path))
}


class Installed(KernelSpecManager):
    """The kernel of another environment."""

    python = sys.executable

    def get_kernel_spec(self, kernel_name):
        spec = super().get_kernel_spec("python3")
        spec.argv = [str(self.python), *spec.argv[1:]]
        return spec


@pytest.fixture(scope="module")
def outcomes(installed, elsewhere):
    """What each part says when it runs in the environment: the error, or None.

    Two kernels, each for half of the parts: importing torch takes longer than most of
    them. Between two parts all names are forgotten.
    """
    specs = type("Specs", (Installed,), {"python": installed})
    forget = nbformat.v4.new_code_cell("%reset -f")

    def run(names):
        manager = KernelManager(kernel_spec_manager=specs(), kernel_name="python3")
        said = {}
        for name in names:
            part = PARTS[name].copy()
            part.cells = [forget, *part.cells]
            client = NotebookClient(
                part, km=manager, timeout=300,
                resources={"metadata": {"path": str(elsewhere)}},
            )  # fmt: skip
            try:
                client.execute(env=outside(installed, elsewhere))
                said[name] = None
            except Exception as error:
                said[name] = error
        manager.shutdown_kernel(now=True)
        return said

    halves = [[*PARTS][::2], [*PARTS][1::2]]
    with ThreadPoolExecutor(max_workers=2) as pool:
        return {k: v for said in pool.map(run, halves) for k, v in said.items()}


def test_all_chapters_with_records_are_here():
    every = (ROOT / "notebooks").glob("*.ipynb")
    with_records = {p.stem for p in every if "read_evidence(" in p.read_text("utf-8")}
    assert set(PARTS) == with_records and len(PARTS) >= 12
    assert set(WHOLE) <= with_records


@pytest.mark.parametrize("name", PARTS)
def test_records_are_read_from_the_installed_library(outcomes, name):
    if outcomes[name]:
        raise outcomes[name]


def test_no_notebook_looks_for_the_project():
    """What a chapter reads is the library's: no path leads out of it."""
    out = re.compile(r"\.parents\[|cwd\(\)\.parent|\.\./|_build")
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        for cell in nbformat.read(path, 4).cells:
            if cell.cell_type == "code":
                found = out.search(cell.source)
                assert not found, f"{path.name}, cell {cell.id}: {found[0]}"
