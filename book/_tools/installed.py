"""The library as a reader has it: by pip from a wheel, with no checkout near.

The environment is fresh and lies where it is told to. Of packages it has the wheel
alone; torch and the like are those that the project's environment has. Chapters are run
there, and the tests of the wheel look into it.

    python book/_tools/installed.py FOLDER    # the wheel and the source archive
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "transformer_lib"
BUILD = """\
import sys
from setuptools import build_meta
folder, what = sys.argv[1:]
build_meta.build_wheel(folder)
if what == "both":
    build_meta.build_sdist(folder)
"""


def quietly(command: list, **how) -> None:
    """Run a command; what it says is shown only if it fails."""
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, **how
    )
    if done.returncode:
        said = f"{done.stdout}\n{done.stderr}".strip()[-2000:]
        raise RuntimeError(f"{' '.join(map(str, command[:4]))} failed:\n{said}")


def build(place: Path, what: str = "wheel") -> Path:
    """The wheel, in place; with what="both" the source archive beside it.

    Both are built from a copy: nothing is left in the project.
    """
    source = place / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(LIBRARY, source / LIBRARY.name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    quietly([sys.executable, "-c", BUILD, place, what], cwd=source)
    shutil.rmtree(source)
    (wheel,) = place.glob("*.whl")
    return wheel


def install(wheel: Path, place: Path) -> Path:
    """An environment in place with the wheel in it: its Python."""
    quietly([sys.executable, "-m", "venv", "--without-pip", place])
    python = place / "bin" / "python"
    quietly(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            python,
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            wheel,
        ]
    )
    (packages,) = place.glob("lib/python*/site-packages")
    # Paths that a .pth file adds have no .pth files of their own: the project's, which
    # is installed there to be edited, is not found by it.
    ours = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    (packages / "those_that_are_there.pth").write_text("\n".join(sorted(ours)) + "\n")
    return python


def variables(python: Path) -> dict[str, str]:
    """Those of a shell in which the environment is the one that is used."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    kept.pop("VIRTUAL_ENV", None)
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    kept.setdefault("OMP_NUM_THREADS", "1")
    return kept | {"PATH": path, "PYTHONUTF8": "1"}


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.mkdir(parents=True, exist_ok=True)
    build(place.resolve(), "both")
    print(*sorted(path.name for path in place.iterdir()), sep="\n")
