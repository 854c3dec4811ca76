"""The library is what the notebooks export: nothing else, nothing older."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Written by hand: the package's front door. All else comes from the notebooks.
BY_HAND = {"__init__.py"}


def modules(library: Path) -> dict[str, str]:
    return {
        path.relative_to(library).as_posix(): path.read_text("utf-8")
        for path in sorted(library.rglob("*.py"))
    }


def test_library_is_what_the_notebooks_export(tmp_path):
    shutil.copytree(
        ROOT / "notebooks",
        tmp_path / "notebooks",
        ignore=shutil.ignore_patterns(".ipynb_checkpoints"),
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    fresh = tmp_path / "transformer_lib"
    fresh.mkdir()
    for name in BY_HAND:
        shutil.copy(ROOT / "transformer_lib" / name, fresh)
    export = Path(sys.executable).with_name("nbdev-export")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NBDEV")}
    done = subprocess.run(
        [export], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr

    ours, exported = modules(ROOT / "transformer_lib"), modules(fresh)
    stale = sorted(set(ours) - set(exported))
    missing = sorted(set(exported) - set(ours))
    differ = sorted(n for n in set(ours) & set(exported) if ours[n] != exported[n])
    assert not (stale or missing or differ), (
        "The library is not what the notebooks export."
        f" In the library only: {stale}. In the notebooks only: {missing}."
        f" Different: {differ}. `make export` writes the library; a module whose"
        " notebook is gone has to be removed by hand."
    )
