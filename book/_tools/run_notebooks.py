"""Run the chapters and keep their outputs for the book.

    python book/_tools/run_notebooks.py                 every chapter that needs it
    python book/_tools/run_notebooks.py 02_attention    this one, if it needs it
    python book/_tools/run_notebooks.py -f 02_attention this one, in any case
    python book/_tools/run_notebooks.py under_the_hood/02_attention

Each runs as a reader runs it: the library comes by pip from a wheel, there is no
checkout near, and the notebook has a folder of its own. A library that is found
elsewhere fails the chapter.

The outputs go into Jupyter Book's own cache, so that one run serves the tests and
the pages. A chapter is run again when something that it depends on has changed: its
code cells, the library modules that it imports (and what those import), the recipes
and evidence files that it names, the locked versions, TRANSFORMER_LIB_SCALE, or, where
it could read them, the corpora in the mirror and the cache. The seconds that each
chapter took are written to _build/timings.json and shown in the book.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path

# Before any import of a kernel or of torch: one thread a chapter, so that two chapters
# side by side keep two cores busy and the numbers do not depend on the machine's size.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")
os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
os.environ.setdefault("JUPYTER_PLATFORM_DIRS", "1")

import forked
import installed
import nbformat
from chapters import all_notebooks, name_of
from doors import taken

from transformer_lib.storage import claimed, write_json

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "transformer_lib"
RUNS = ROOT / "_build" / "runs"  # models that one chapter trains and others load
CACHE = ROOT / "_build" / ".jupyter_cache"
TIMINGS = ROOT / "_build" / "timings.json"
TIMEOUT = 3600  # seconds a cell may take: on a busy machine, too

# Chapters that load, at scale full, what another chapter's run leaves behind.
AFTER = {"15_evaluation": ["13_runs"]}

# These take longest, in this order. They begin first where no times are known yet, so
# that none of them is left to one core in the end.
LONGEST = (
    "21_speed",
    "under_the_hood/14_decoding",
    "under_the_hood/28_family",
    "22_export",
    "05_encoder",
    "under_the_hood/21_speed",
    "12_training",
    "under_the_hood/22_export",
    "under_the_hood/11_objective",
    "under_the_hood/27_looking_inside",
    "under_the_hood/00_why",
    "31_bugs",
    "13_runs",
    "16_diagnosis",
    "28_family",
    "18_command_line",
    "under_the_hood/07_transformer",
    "under_the_hood/12_training",
    "26_parsing",
    "00_why",
)

_lock = threading.Lock()


# --- what a chapter depends on ------------------------------------------------------


def code_cells(notebook) -> str:
    """All code of a notebook, without IPython's % and ! lines."""
    cells = (c.source for c in notebook.cells if c.cell_type == "code")
    return "\n\n".join(re.sub(r"(?m)^(\s*)[%!](?!=).*$", r"\1pass", c) for c in cells)


@cache
def imports(source: str, package: str) -> set[str]:
    """The library's modules that a source imports; none where it is no Python."""
    try:
        return {module for module, _ in taken(source, package)}
    except SyntaxError:  # the run will say so, with its place
        return set()


@cache
def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def library_closure(source: str) -> dict[Path, str]:
    """The modules that a source imports, and those that they import: file to text."""
    found: dict[Path, str] = {}
    todo = [(source, "transformer_lib")]
    while todo:
        for module in imports(*todo.pop()):
            path = LIBRARY / f"{module.replace('.', '/')}.py"
            if path not in found and path.exists():
                found[path] = path.read_text("utf-8")
                package = ".".join(path.parent.relative_to(ROOT).parts)
                todo.append((found[path], package))
    return found


def named_files(text: str) -> list[Path]:
    """The recipes and evidence files that some text speaks of."""
    files = []
    if "recipe" in text:
        files += sorted((LIBRARY / "recipes").glob("*.toml"))
    if "evidence" in text:
        evidence = [p for p in sorted((LIBRARY / "evidence").rglob("*")) if p.is_file()]
        named = [
            p
            for p in evidence
            if p.stem in text or (p.parent.name in text and p.parent.name != "evidence")
        ]
        files += named or evidence
    if "mplstyle" in text or "style.use" in text:
        files += sorted(LIBRARY.glob("*.mplstyle"))
    return files


def scale() -> str:
    return os.environ.get("TRANSFORMER_LIB_SCALE", "small")


def needs_of(name: str) -> list[str]:
    """The chapters that have to run before this one."""
    return AFTER.get(name, []) if scale() == "full" else []


def corpora_of(notebook) -> str:
    """A hash of what a chapter's corpora could come from: mirror and cache, by name.

    Empty where it imports nothing that reads corpora.
    """
    if LIBRARY / "corpora/downloads.py" not in library_closure(code_cells(notebook)):
        return ""
    mirror = os.environ.get("TRANSFORMER_LIB_MIRROR", "")
    cache = os.environ.get("TRANSFORMER_LIB_CACHE", "")
    files = [*Path(mirror).rglob("*")] if mirror else []
    files += Path(cache or Path.home() / ".cache" / "transformer_lib").glob("*")
    found = {f"{p.name} {p.stat().st_size}" for p in files if p.is_file()}
    return hashlib.sha256("\0".join([cache, *sorted(found)]).encode()).hexdigest()


def key_of(name: str, notebook, keys: dict[str, str]) -> str:
    """A hash of everything that the outputs of a chapter depend on but corpora."""
    code = code_cells(notebook)
    modules = library_closure(code)
    said = [code, scale(), sys.version.split()[0]]
    # nbdev writes cell ids into comments: they change nothing.
    said += [re.sub(r"(?m)^# %% .*$", "", modules[path]) for path in sorted(modules)]
    said += map(digest, named_files("\n".join([code, *modules.values()])))
    if re.search(r'pretrained\("', code):  # a shipped model is loaded by its name
        files = sorted((LIBRARY / "pretrained").rglob("*"))
        said += [digest(path) for path in files if path.is_file()]
    lock = ROOT / "requirements.lock"
    said.append(lock.read_text("utf-8") if lock.exists() else "")
    said += [keys.get(other, "") for other in needs_of(name)]
    return hashlib.sha256("\0".join(said).encode()).hexdigest()


# --- the record of earlier runs -------------------------------------------------------


def read_timings() -> dict:
    try:
        return json.loads(TIMINGS.read_text("utf-8"))
    except (OSError, ValueError):
        return {}


@contextlib.contextmanager
def timings_for_update():
    """The record, written back whole; safe against a second run at the same time."""
    TIMINGS.parent.mkdir(parents=True, exist_ok=True)
    with _lock, claimed(TIMINGS.with_suffix(".lock"), wait=True):
        timings = read_timings()
        yield timings
        write_json(TIMINGS, dict(sorted(timings.items())))


def store(path: Path, notebook, seconds: float) -> None:
    """Put an executed notebook into Jupyter Book's cache."""
    from jupyter_cache import get_cache
    from jupyter_cache.base import CacheBundleIn

    with _lock:
        get_cache(str(CACHE)).cache_notebook_bundle(
            CacheBundleIn(notebook, str(path), data={"execution_seconds": seconds}),
            check_validity=False,
            overwrite=True,
        )


def is_stored(path: Path) -> bool:
    """Whether the book will find outputs for this notebook."""
    from jupyter_cache import get_cache

    with _lock, contextlib.suppress(Exception):
        get_cache(str(CACHE)).match_cache_notebook(nbformat.read(path, 4))
        return True
    return False


def device() -> str:
    """Where the chapters ran, in words for the reader."""
    if scale() != "small" and shutil.which("nvidia-smi"):
        ask = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(ask, capture_output=True, text=True).stdout.split("\n")
        if names[0].strip():
            return names[0].strip()
    threads = int(os.environ["OMP_NUM_THREADS"])
    words = "one CPU thread" if threads == 1 else f"{threads} CPU threads"
    return f"{words} ({name})" if (name := processor()) else words


def processor() -> str:
    """What the processor calls itself; nothing where it does not say."""
    with contextlib.suppress(OSError):
        told = Path("/proc/cpuinfo").read_text("utf-8")
        if found := re.search(r"(?m)^model name\s*:\s*(\S.*)$", told):
            name = re.sub(r"\((R|TM)\)|\bCPU\b|@.*", " ", found[1])
            return " ".join(name.split())
    return platform.processor()


# --- running ---------------------------------------------------------------


# The last cell of every run, which the book does not keep: where the library is.
ASK = "import importlib.util\nprint(importlib.util.find_spec('transformer_lib').origin)"


def kernel_of(python: Path, command: Sequence[str] = ()):
    """A kernel that is not running yet, of another environment's Python.

    Args:
        python: That of the environment.
        command: What starts such a kernel faster, with its arguments behind it.
    """
    from jupyter_client import AsyncKernelManager

    # With another manager, nbclient would not see that a kernel died or takes too long.
    manager = AsyncKernelManager(kernel_name="python3")
    spec = manager.kernel_spec
    spec.argv[0] = str(python)
    if command:
        spec.argv = [*command, "-f", "{connection_file}"]
    return manager


def faster_kernels(python: Path, chapters: int):
    """What starts a kernel of that Python faster, where it is worth it.

    With a GPU it is not: a process that has asked for one cannot be forked.
    """
    if chapters < 2 or scale() != "small" or not sys.platform.startswith("linux"):
        return contextlib.nullcontext(())
    return forked.kernels(python, variables(python))


def variables(python: Path) -> dict[str, str]:
    """Those of a chapter: folders that are named are found from anywhere."""
    found = installed.variables(python)
    for name in ("TRANSFORMER_LIB_MIRROR", "TRANSFORMER_LIB_RUNS"):
        if found.get(name):
            found[name] = str(Path(found[name]).resolve())
    return found


def execute(path: Path, timeout: int, python: Path, command: Sequence[str] = ()):
    """Run one notebook from top to bottom; returns it, the seconds and the error.

    Args:
        path: The notebook; it runs in a folder that is new and has nothing in it but
            `runs`, which stays from one run to the next.
        timeout: Seconds that a cell may take.
        python: That of the environment which the library is installed in.
        command: As of kernel_of.
    """
    from nbclient import NotebookClient
    from nbclient.exceptions import (
        CellExecutionError,
        CellTimeoutError,
        DeadKernelError,
    )

    notebook = nbformat.read(path, 4)
    notebook.cells.append(nbformat.v4.new_code_cell(ASK))
    folder = Path(tempfile.mkdtemp(prefix=f"{path.stem}-", dir=python.parents[2]))
    RUNS.mkdir(parents=True, exist_ok=True)
    (folder / "runs").symlink_to(RUNS, target_is_directory=True)
    client = NotebookClient(
        notebook,
        km=kernel_of(python, command),
        timeout=timeout,
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        # ipykernel warns about plain TCP on the local host at each start: not news.
        extra_arguments=["--IPKernelApp.log_level=40"],
    )
    start, error = time.perf_counter(), None
    try:
        client.execute(env=variables(python), cleanup_kc=True)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as caught:
        error = caught
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    join_streams(notebook)
    asked = notebook.cells.pop()
    if error is None:
        where = asked.outputs[-1].text.strip()
        if not Path(where).is_relative_to(python.parents[1]):
            error = RuntimeError(f"The library is not the installed one: {where}")
    return notebook, time.perf_counter() - start, error


def join_streams(notebook) -> None:
    """Join the pieces in which a cell's print-outs came, where nothing lies between."""
    for cell in notebook.cells:
        joined = []
        for output in cell.get("outputs", []):
            last = joined[-1] if joined else {}
            kind = output.output_type, output.get("name")
            if kind[0] == "stream" and kind == (
                last.get("output_type"),
                last.get("name"),
            ):
                last["text"] += output.text
            else:
                joined.append(output)
        if "outputs" in cell:
            cell["outputs"] = joined


def describe_failure(name: str, notebook, error: Exception) -> str:
    """The failing cell's source and the end of its traceback."""
    lines = [f"{name} failed."]
    for number, cell in enumerate(notebook.cells):
        tracebacks = [
            output.traceback
            for output in cell.get("outputs", [])
            if output.output_type == "error"
        ]
        if tracebacks:
            text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(tracebacks[0]))
            source = "\n".join("    " + line for line in cell.source.split("\n"))
            tail = "\n".join("    " + line for line in text.split("\n")[-12:])
            lines += [f"Cell {number} (id {cell.get('id')}):", source, "It said:", tail]
            break
    else:
        lines.append("    " + str(error).strip()[-1500:].replace("\n", "\n    "))
    return "\n".join(lines)


def stderr_of(notebook) -> list[str]:
    """What the cells wrote to stderr (the pages do not show it), without bars."""
    lines = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "stream" and output.name == "stderr":
                lines += [line for line in output.text.split("\n") if line.strip()]
    return [line for line in lines if "it/s" not in line and "\r" not in line]


def urgency(name: str, timings: dict) -> float:
    """Seconds until the last chapter that waits for this one could be done."""
    guess = 10.0 + 5 * len(LONGEST[LONGEST.index(name) :]) if name in LONGEST else 10.0
    own = timings.get(name, {}).get("seconds", guess)
    waiting = [other for other in AFTER if name in needs_of(other)]
    return own + max((urgency(other, timings) for other in waiting), default=0.0)


def run_all(paths: list[Path], jobs: int, force: bool, timeout: int) -> int:
    """Run what needs running; returns the number of failures."""
    timings = read_timings()
    notebooks = {name_of(p): nbformat.read(p, 4) for p in paths}
    every = all_notebooks()
    keys: dict[str, str] = {}
    for name in sorted(every, key=lambda n: (n in AFTER, n)):
        notebook = notebooks.get(name) or nbformat.read(every[name], 4)
        keys[name] = key_of(name, notebook, keys)

    def is_fresh(path: Path) -> bool:
        name = name_of(path)
        record = timings.get(name, {})
        same = record.get("key") == keys[name]
        same = same and record.get("corpora") == corpora_of(notebooks[name])
        return same and is_stored(path)

    todo = {name_of(p): p for p in paths if force or not is_fresh(p)}
    kept = len(paths) - len(todo)
    where, start, failures, running = device(), time.perf_counter(), {}, {}
    ran: list[str] = []

    def ready(name: str) -> bool:
        names = needs_of(name)
        return not any(n in todo or n in running.values() for n in names)

    with (
        tempfile.TemporaryDirectory(prefix="chapters-") as place,
        contextlib.ExitStack() as until_all_ran,
        ThreadPoolExecutor(jobs) as pool,
    ):
        if todo:
            wheel = installed.build(Path(place))
            python = installed.install(wheel, Path(place) / "env")
            fast = until_all_ran.enter_context(faster_kernels(python, len(todo)))
        while todo or running:
            for name in sorted(todo, key=lambda n: (-urgency(n, timings), n)):
                if len(running) < jobs and ready(name):
                    future = pool.submit(execute, todo.pop(name), timeout, python, fast)
                    running[future] = name
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                name = running.pop(future)
                notebook, seconds, error = future.result()
                if error is not None:
                    failures[name] = describe_failure(name, notebook, error)
                    print(f"  {name:<18} FAILED after {seconds:.1f} s", flush=True)
                    continue
                store(every[name], notebook, round(seconds, 2))
                ran.append(name)
                with timings_for_update() as record:
                    record[name] = {
                        "key": keys[name],
                        "corpora": corpora_of(notebooks[name]),
                        "seconds": round(seconds, 2),
                        "device": where,
                        "scale": scale(),
                        "ran": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                    }
                print(f"  {name:<18} {seconds:6.1f} s", flush=True)
                stray = stderr_of(notebook)
                if stray:
                    first = stray[0].replace(str(ROOT) + os.sep, "")[:150]
                    print(f"    {len(stray)} lines on stderr, the first: {first}")

    if ran:
        with timings_for_update() as record:  # some may have been fetched meanwhile
            for name in ran:
                record[name]["corpora"] = corpora_of(notebooks[name])
    total = time.perf_counter() - start
    print(
        f"  {len(ran)} chapters ran, {kept} unchanged, {len(failures)} failed"
        f" ({total:.1f} s)",
        flush=True,
    )
    for text in failures.values():
        print("\n" + text, file=sys.stderr)
    return len(failures)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="chapters such as 02_attention")
    parser.add_argument("-j", "--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("-f", "--force", action="store_true", help="run in any case")
    parser.add_argument("--timeout", type=int, default=TIMEOUT, help="seconds a cell")
    args = parser.parse_args()
    known = all_notebooks()
    wanted = [name_of(Path(n)) for n in args.names] or list(known)
    unknown = [n for n in wanted if n not in known]
    if unknown:
        have = ", ".join(known)
        print(f"No chapter is called {', '.join(unknown)}. There are: {have}.")
        return 2
    paths = [known[n] for n in wanted]
    return 1 if run_all(paths, max(1, args.jobs), args.force, args.timeout) else 0


if __name__ == "__main__":
    raise SystemExit(main())
