"""What the book says of GPUs, in one command of nine minutes.

    python experiments/gpu.py OUT --data DIR               first call
    python experiments/gpu.py OUT --data DIR --minutes 3   on the same machine: goes on
    python experiments/gpu.py OUT --data DIR --device cpu --quick      a rehearsal

1. Side by side: the tests of devices, and the chapters that choose one, on the device.
2. One by one, while all else is stopped: training and decoding against Hugging Face,
   and the ladder of chapter 21 with its share of the ceiling.
3. Side by side until the minutes are over: four trainings of collapse.py, and the
   groups of the queue that --queue names, with the code in --code, from their
   checkpoints in WORK/runs. (The queue begins at once, and stops only for 2.)

Can be cut off at any moment. What is finished lies in the folder WORK, and a copy of it
in OUT, which stays small: results.tar.gz with logs and records, and weights in parts of
15 MB (join them with cat). DIR holds `valid.tsv` and `data`, which `prepare` wrote. A
further call does what is missing. Torch, sentencepiece, safetensors, sacrebleu, tqdm,
pytest, matplotlib, ipython and transformers are all it needs.

Record: results/gpu/*.json
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHOOSE = (  # a page names the device, or trains on what default_device says
    "12_training 13_runs 21_speed 25_ablations 26_parsing 28_family 30_errata "
    "under_the_hood/12_training under_the_hood/13_runs under_the_hood/14_decoding "
    "under_the_hood/16_diagnosis under_the_hood/17_translator under_the_hood/21_speed "
    "under_the_hood/22_export under_the_hood/25_ablations under_the_hood/28_family "
    "under_the_hood/29_long_text under_the_hood/30_errata"
).split()
TESTS = "tests/test_devices.py"
SHIPPED = ROOT / "transformer_lib/pretrained/tatoeba-en-de/weights.safetensors"


def run_chapter(name: str) -> None:
    """All cells of a notebook, in one IPython shell; the first error ends it."""
    from IPython.core.interactiveshell import InteractiveShell

    path = (ROOT / "notebooks" / name).with_suffix(".ipynb")
    os.chdir(path.parent)
    shell = InteractiveShell.instance()
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            done = shell.run_cell("".join(cell["source"]))
            if error := done.error_in_exec or done.error_before_exec:
                raise SystemExit(f"{name}: {error!r}")


class Part:
    """A process with a log; its group can be stopped and woken."""

    def __init__(self, name: str, command: list, work: Path, code: Path = ROOT, **env):
        self.name, self.log, self.began = name, work / f"{name}.log", time.monotonic()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        found = os.pathsep.join([str(code), os.environ.get("PYTHONPATH", "")])
        env = os.environ | {"PYTHONPATH": found, "MPLBACKEND": "agg"} | env
        env |= {"TRANSFORMER_LIB_RUNS": str(work / "runs")}
        env |= {"TRANSFORMER_LIB_EVIDENCE": str(work / "results")}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *map(str, command)],
                cwd=code,
                env=env,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # lives on when this call is over
            )
        (work / "pids").mkdir(exist_ok=True)
        pid = work / "pids" / name.replace("/", "-")
        pid.write_text(str(self.process.pid), "utf-8")

    @property
    def over(self) -> bool:
        return self.process.poll() is not None

    def wake(self, running: bool) -> None:
        if not self.over:
            kind = signal.SIGCONT if running else signal.SIGSTOP
            os.killpg(self.process.pid, kind)


def lives(name: str, work: Path) -> bool:
    """Whether a part that an earlier call began is still at work."""
    try:
        pid = int((work / "pids" / name.replace("/", "-")).read_text("utf-8"))
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def chapters_and_tests(given, work: Path, until: float) -> None:
    """The tests of devices and the chapters, as many at once as there are cores.

    They get a fifth of the minutes.
    """
    path = work / "results" / "gpu" / "chapters.json"
    found = json.loads(path.read_text("utf-8")) if path.exists() else {}
    ran = {name for name, about in found.items() if about["returncode"] == 0}
    todo = [name for name in (TESTS, *given.chapters) if name not in ran]
    if not (SHIPPED.exists() and SHIPPED.stat().st_size):  # it was too large to travel
        todo = [name for name in todo if "_pretrained" not in text_of(name)]
    at_work: list[Part] = []
    while (todo or at_work) and time.monotonic() < until:
        while todo and len(at_work) < max(1, (os.cpu_count() or 1) - 2):
            command = [__file__, "--chapter", name := todo.pop(0)]
            if name == TESTS:
                command = ["-m", "pytest", "-q", "-W", "ignore", "--tb=short", TESTS]
            env = {"LITERATE_DEVICE": given.device, "OMP_NUM_THREADS": "1"}
            at_work.append(Part(f"chapters/{name}", command, work, **env))
        time.sleep(0.2)
        for part in [p for p in at_work if p.over]:
            at_work.remove(part)
            words = part.log.read_text("utf-8", "replace").strip().splitlines()
            found[part.name.removeprefix("chapters/")] = {
                "returncode": part.process.returncode,
                "seconds": round(time.monotonic() - part.began, 1),
                "last_words": words[-1] if words else "",
            }
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(found, indent=1), "utf-8")
    for part in at_work:
        os.killpg(part.process.pid, signal.SIGKILL)


def text_of(name: str) -> str:
    """The source of a notebook; nothing for the tests."""
    if name == TESTS:
        return ""
    return (ROOT / "notebooks" / name).with_suffix(".ipynb").read_text("utf-8")


def races(given, work: Path) -> dict[str, list]:
    """Name -> command of each benchmark whose record is missing."""
    kept = work / "results" / "benchmarks"
    quick = ["--quick"] if given.quick else []
    data = [] if given.quick else ["--data", given.data / "data"]
    big = [] if given.quick else ["--max-tokens", "12000"]
    device = ["--device", given.device, *quick]
    sizes = [] if given.quick else ["--sizes", "base", "big"]
    found = {
        "training": ["training.py", *device, *data, *big, *sizes],
        "speed": ["speed.py", *device, *data, *big, "--size", "big", "--rounds", "5"],
        "decoding": ["decoding.py", *device, "--batch", "64", "--minutes", "0.6"],
    }
    if not given.quick:
        found["decoding"] += ["--cases", "base, batch 64", "base, batch 1"]

    return {
        name: [ROOT / "benchmarks" / script, *rest, "--out", out]
        for name, (script, *rest) in found.items()
        if not (out := kept / f"{name}-{given.device}.json").exists()
    }


def pack(given, work: Path) -> None:
    """Logs, records and averaged weights, as small files."""
    given.out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(given.out / "results.tar.gz", "w:gz") as packed:
        for path in (*work.rglob("*.log"), *work.glob("results/*/*")):
            packed.add(path, path.relative_to(work))
    for model in (work / "runs").glob("*/*/averaged"):
        whole = given.out / "averaged.tar"
        with tarfile.open(whole, "w") as packed:
            packed.add(model, model.name)
        with whole.open("rb") as file:
            for number in range(9):
                if part := file.read(15 << 20):
                    whole.with_name(f"averaged.tar.{number}").write_bytes(part)
        whole.unlink()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, nargs="?", help="where the results go")
    parser.add_argument("--data", type=Path, help="folder with valid.tsv and data")
    parser.add_argument("--work", type=Path, default=ROOT / "_build" / "gpu")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="all of it tiny")
    parser.add_argument("--queue", nargs="*", default=[], help="groups of the queue")
    parser.add_argument("--code", type=Path, default=ROOT, help="the queue's code")
    parser.add_argument("--chapters", nargs="*", default=CHOOSE, help="only these")
    parser.add_argument("--chapter", help="run this notebook, and nothing else")
    given = parser.parse_args(arguments)
    if given.chapter:
        return run_chapter(given.chapter)
    began, work = time.monotonic(), given.work.absolute()
    until, given.data = began + 60 * given.minutes, given.data.absolute()
    given.out, parts = given.out.absolute(), []
    (work / "results").mkdir(parents=True, exist_ok=True)

    def say(words: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {words}", flush=True)

    def begin(name: str, command: list, code: Path = ROOT) -> None:
        if not lives(name, work):
            parts.append(Part(name, command, work, code))

    if given.queue:
        queue = given.code / "experiments" / "queue_runs.py"
        command = [queue, *given.queue, "--here", "--device", given.device, "-j", "1"]
        begin("queue", command, given.code)
    chapters_and_tests(given, work, began + 12 * given.minutes)
    say("tests and chapters")
    for part in parts:
        part.wake(False)
    for name, command in races(given, work).items():
        race = Part(name, command, work)
        while not race.over and time.monotonic() < until:
            time.sleep(0.1)
        if not race.over:
            os.killpg(race.process.pid, signal.SIGKILL)
        say(name)
    for part in parts:
        part.wake(True)
    for size in ("tiny",) if given.quick else ("base", "big"):
        for start in "chapter", "normal":
            record = work / "results" / "collapse" / f"{size}-{start}.json"
            command = [ROOT / "experiments" / "collapse.py", given.data / "data"]
            command += ["--valid", given.data / "valid.tsv", "--device", given.device]
            command += ["--size", size, "--start", start, "--out", record]
            command += ["--steps", "100"] if given.quick else []
            begin(f"collapse-{size}-{start}", command)
    names = [path.name for path in (work / "pids").iterdir()]
    while time.monotonic() < until and any(lives(name, work) for name in names):
        time.sleep(0.5)
    pack(given, work)
    say("packed")
    for path in sorted(work.rglob("*.log")):
        words = path.read_text("utf-8", "replace").strip().splitlines()[-4:]
        print(f"\n{path.relative_to(work)}", *words, sep="\n  ")


if __name__ == "__main__":
    main()
