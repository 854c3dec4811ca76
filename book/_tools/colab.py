"""Run chapters as Colab would: the library by pip, what Colab has installed before it.

    make colab                                  all chapters
    make colab CHAPTERS="12 28_family"          these
    make colab FRESH=1                          all over again
    make colab TORCH=torch==2.9.0               another torch than Colab's

An environment outside of the project gets torch and the packages of colab.txt; where
Colab's torch cannot be installed, the one that the project has, which is said. Each
notebook then lies alone in a folder of its own, and its first cell installs what it
needs with pip, from a git repository that holds the project's files as they are here
and stands in for the public address. Torch and the like must still be there
afterwards, in the same version. A chapter that ran is not run again as long as it, the
library and the environment are the same; the names of those that failed come last, with
their logs. Colab has Python 3.12: it is taken where there is one.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from chapters import all_notebooks, name_of
from release import ADDRESS, tag

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = Path(__file__).with_name("colab.txt")
TORCH = "torch==2.10.0"  # Colab's
# A first cell must not replace these: they are in use, or much depends on them.
KEPT = {"torch", "numpy", "matplotlib", "ipython", "ipykernel", "scikit-learn", "scipy"}
TIMEOUT = 1800  # seconds a cell may take
# Runs a notebook in the folder where it lies; what went wrong comes last.
RUN = """\
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], 4)
if sys.argv[2] == "first":
    notebook.cells = [c for c in notebook.cells if "%pip" in c.source]
client = NotebookClient(notebook, timeout=int(sys.argv[3]), kernel_name="python3",
                        extra_arguments=["--IPKernelApp.log_level=40"])
try:
    client.execute()
finally:
    nbformat.write(notebook, sys.argv[1])
"""
INSTALLED = """\
import importlib.metadata as m, json, re
names = {d.metadata["Name"]: d.version for d in m.distributions()}
print(json.dumps({re.sub("[-_.]+", "-", n).lower(): v for n, v in names.items()}))
"""


def run(command: list, log: Path | None = None, **how) -> subprocess.CompletedProcess:
    """A command that must succeed; what it says goes to the log, if there is one."""
    done = subprocess.run(
        [str(part) for part in command],
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if log else None,
        **how,
    )
    if log:
        log.write_text(done.stdout, encoding="utf-8")
    if done.returncode:
        said = f" It said:\n{done.stdout[-2000:]}" if log else ""
        raise subprocess.CalledProcessError(done.returncode, str(command[:4]) + said)
    return done


def snapshot(place: Path) -> str:
    """A git repository with the project's files as they are; its content's name."""
    names = run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT).stdout
    folder = place / "repository"
    shutil.rmtree(folder, ignore_errors=True)
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():  # not one that was deleted and not yet committed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    git = ["git", "-c", "user.name=colab", "-c", "user.email=colab@localhost"]
    run([*git, "init", "--quiet", "."], cwd=folder)
    run([*git, "add", "--all", "--force"], cwd=folder)
    run([*git, "commit", "--quiet", "--message", "As it is here"], cwd=folder)
    run([*git, "tag", tag()], cwd=folder)  # which the first cells install
    run([*git, "config", "uploadpack.allowFilter", "true"], cwd=folder)
    return run([*git, "rev-parse", "HEAD^{tree}"], cwd=folder).stdout.strip()


def variables(place: Path) -> dict[str, str]:
    """Those of a notebook there: nothing of the project's, and its address is here."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    kept.pop("VIRTUAL_ENV", None)
    path = kept["PATH"].split(os.pathsep)
    path = [folder for folder in path if not Path(folder).is_relative_to(ROOT)]
    return kept | {
        "PATH": os.pathsep.join([str(place / "env" / "bin"), *path]),
        "PYTHONUTF8": "1",
        "OMP_NUM_THREADS": "1",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{(place / 'repository').as_uri()}.insteadOf",
        "GIT_CONFIG_VALUE_0": ADDRESS,
        "TRANSFORMER_LIB_CACHE": str(place / "cache"),
    }


def nearest_python() -> str:
    """Colab's version, if it is here and runs; a version manager's stand-in may not."""
    found = shutil.which("python3.12")
    if found and not subprocess.run([found, "-c", ""], capture_output=True).returncode:
        return found
    return sys.executable


def torch_here() -> str:
    """The torch of the project's own environment; any, if there is no such thing."""
    ask = "import importlib.metadata as m; print(m.version('torch'))"
    try:
        version = run([ROOT / ".venv" / "bin" / "python", "-c", ask]).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "torch"
    return f"torch=={version.partition('+')[0]}"


def environment(place: Path, python: str, torch: str) -> str:
    """What Colab has before the first cell; made once. Returns what it depends on."""
    version = run([python, "-c", "import sys; print(sys.version)"]).stdout
    key = "\n".join([version, torch, VERSIONS.read_text("utf-8")])
    stamp = place / "env" / "made"
    if stamp.exists() and stamp.read_text("utf-8") == key:
        return key
    shutil.rmtree(place / "env", ignore_errors=True)
    run([python, "-m", "venv", place / "env"])
    uv = shutil.which("uv", path=f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.defpath}")
    inside = place / "env" / "bin" / "python"
    install = [uv, "pip", "install", "--python", inside] if uv else None
    install = install or [inside, "-m", "pip", "install", "--quiet"]
    unset = {k: v for k, v in os.environ.items() if k != "UV_FIND_LINKS" or v}
    names = re.findall(r"(?m)^[\w-]+(?===)", VERSIONS.read_text("utf-8"))
    torches = [torch, torch_here()] if torch == TORCH else [torch]
    # Other versions where Python is an older one, say, for which some are not there.
    tries = [(one, rest) for rest in (["-r", VERSIONS], names) for one in torches]
    for number, (one, rest) in enumerate(tries, start=1):
        try:
            log = place / "logs" / f"environment-{number}.log"
            run([*install, one, *rest], log, env=unset)
            break
        except subprocess.CalledProcessError:
            if number == len(tries):
                raise
    other = [f"{one}, since {torch} cannot be installed here"] if one != torch else []
    other += ["other versions of the rest"] if rest is names else []
    if other:
        print(f"NOT as on Colab: {', and '.join(other)}; see {place / 'logs'}")
    stamp.write_text(key, "utf-8")
    return key


def installed(place: Path) -> dict[str, str]:
    """Every package of the environment and its version."""
    done = run([place / "env" / "bin" / "python", "-c", INSTALLED])
    return json.loads(done.stdout)


def label(notebook: Path) -> str:
    """A notebook's name without a folder, for files."""
    return name_of(notebook).replace("/", "-")


def execute(place: Path, notebook: Path, what: str) -> tuple[bool, float]:
    """Whether a notebook ran in a folder where nothing else is, and the seconds."""
    folder = place / "content" / f"{label(notebook)}-{what}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(notebook, folder)
    start = time.perf_counter()
    log = place / "logs" / f"{label(notebook)}.log"
    inside = place / "env" / "bin" / "python"
    try:
        run(
            [inside, "-c", RUN, notebook.name, what, TIMEOUT],
            log,
            cwd=folder,
            env=variables(place),
        )
    except subprocess.CalledProcessError:
        return False, time.perf_counter() - start
    return True, time.perf_counter() - start


def chosen(names: list[str], root: Path = ROOT) -> list[Path]:
    """The notebooks that were asked for, all if none was; by number or name.

    Raises:
        SystemExit: If there is no such chapter.
    """
    every = all_notebooks(root / "notebooks")
    named = {n.partition("_")[0]: n for n in every if "/" not in n}
    named |= {name: name for name in every}
    for name in set(names) - set(named):
        sys.exit(f"There is no chapter {name!r}. There are: {', '.join(every)}")
    wanted = {named[name] for name in names} or set(every)
    return [path for name, path in every.items() if name in wanted]


def first_cells(place: Path, notebooks: list[Path]) -> None:
    """Let the first cell of each kind install what it says.

    Raises:
        SystemExit: If it cannot, or replaced what the running kernel or torch use.
    """
    before, seen = installed(place), set()
    for notebook in notebooks:
        cells = json.loads(notebook.read_text("utf-8"))["cells"]
        sources = ("".join(cell["source"]) for cell in cells)
        (cell,) = (source for source in sources if "%pip" in source)
        if cell in seen:
            continue
        seen.add(cell)
        if not execute(place, notebook, "first")[0]:
            sys.exit(
                f"The first cell of {label(notebook)} failed: "
                f"{place / 'logs' / label(notebook)}.log"
            )
    after = installed(place)
    changed = {
        n: f"{n} {v} -> {after.get(n)}"
        for n, v in before.items()
        if after.get(n) != v and n != "transformer-lib"
    }
    if changed:
        print("  replaced by the first cells:", *changed.values())
    if KEPT & set(changed):
        sys.exit("These must stay as they are: " + ", ".join(KEPT & set(changed)))
    where = [
        place / "env" / "bin" / "python",
        "-c",
        "import transformer_lib; print(transformer_lib.__file__)",
    ]
    library = run(where, cwd=place, env=variables(place)).stdout.strip()
    if not Path(library).is_relative_to(place / "env"):
        sys.exit(f"The library is not the installed one: {library}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="CHAPTER", help="by number or name")
    parser.add_argument("--python", default=nearest_python())
    parser.add_argument("--torch", default=TORCH)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--fresh", action="store_true", help="run what ran before")
    asked = parser.parse_args()
    chosen(asked.names)  # a wrong name is told before anything is done
    mark = hashlib.sha256(str(ROOT).encode()).hexdigest()[:8]
    place = Path(tempfile.gettempdir()) / f"literate-transformer-colab-{mark}"
    (place / "logs").mkdir(parents=True, exist_ok=True)
    lock = (place / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"Another run of this works in {place}: wait for it, or end it.")
    about = environment(place, asked.python, asked.torch)
    tree = snapshot(place)
    # From there, too: whoever works on the project meanwhile does not disturb.
    notebooks = chosen(asked.names, place / "repository")
    inside = place / "env" / "bin" / "python"
    state = place / "ran.json"
    ran = json.loads(state.read_text("utf-8")) if state.exists() else {}
    ask = ["git", "rev-parse", "HEAD:transformer_lib"]
    about += run(ask, cwd=place / "repository").stdout
    if (place / "tree").exists() and (place / "tree").read_text("utf-8") != tree:
        run([inside, "-m", "pip", "uninstall", "--quiet", "--yes", "transformer-lib"])
    (place / "tree").write_text(tree, "utf-8")

    def key(notebook: Path) -> str:
        return hashlib.sha256(about.encode() + notebook.read_bytes()).hexdigest()

    todo = [p for p in notebooks if asked.fresh or ran.get(label(p)) != key(p)]
    if todo:
        first_cells(place, todo)

    def one(notebook: Path) -> str | None:
        good, seconds = execute(place, notebook, "all")
        word = "" if good else f"  FAILED: {place / 'logs' / label(notebook)}.log"
        print(f"  {label(notebook):20} {seconds:6.1f} s{word}", flush=True)
        if not good:
            return label(notebook)
        ran[label(notebook)] = key(notebook)
        state.write_text(json.dumps(ran, indent=1), "utf-8")
        return None

    with ThreadPoolExecutor(max_workers=asked.jobs) as pool:
        failed = [name for name in pool.map(one, todo) if name]
    versions = installed(place)
    print(
        f"  {len(todo) - len(failed)} chapters ran, {len(notebooks) - len(todo)} had "
        f"run before, {len(failed)} failed; torch {versions['torch']}, "
        f"numpy {versions['numpy']}"
    )
    if failed:
        sys.exit("Failed: " + " ".join(failed))


if __name__ == "__main__":
    main()
