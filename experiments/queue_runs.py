"""Work through the long runs in their order; stopped at any moment, it goes on later.

    python experiments/queue_runs.py                      the whole queue
    python experiments/queue_runs.py table3 parser -j 2   these groups, two at a time
    python experiments/queue_runs.py --list               what is done and what is left

The queue is queue.toml among the records in transformer_lib/evidence. Each group of it
is one command, run with each value for the names in braces. A run is done when its
result is in results/ beside the queue, where it is copied when the command ends well.
`after` names another run of the group: until that one is done, this one waits.
A group runs from one commit, the one checked out when its first run began, in a
clone of its own, with the command that the queue has there: later changes of the
library, of a script or of its place do not reach it. Checkpoints stay
in the folder of runs (TRANSFORMER_LIB_RUNS; else in the user's cache, which outlives a
checkout); queue.log there has one line for each start and end. On a GPU:
--device cuda -j 12.

Record: none of its own; it keeps those that its commands write, in results/
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

from transformer_lib.corpora.downloads import cache_folder
from transformer_lib.storage import claimed, whole_file

ROOT = Path(__file__).resolve().parents[1]
EVIDENCE = ROOT / "transformer_lib" / "evidence"
QUEUE = EVIDENCE / "queue.toml"
KEPT = Path(os.environ.get("TRANSFORMER_LIB_EVIDENCE", EVIDENCE / "results"))
COMMAND = """import sys
from transformer_lib.command_line import main
sys.exit(main())"""
# Kept from update to update: the kernels of each shape of batch, and memory, which
# malloc else gives back and asks for again (Marian of the translator's size makes
# 500 updates in 1.85 minutes, and in 2.25 without).
KEEPING = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16384",
    "THP_MEM_ALLOC_ENABLE": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TOP_PAD_": "268435456",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
}
SHOWN = ("perplexity", "valid_loss", "test_loss", "bleu", "f1", "nats")


@dataclass(frozen=True)
class Job:
    """One run: which group it is of, its command, and where its result comes to lie."""

    group: str
    name: str
    command: tuple[str, ...]
    result: Path
    after: str = ""

    @property
    def kept(self) -> Path:
        return KEPT / self.group / f"{self.name}.json"

    @property
    def waits(self) -> bool:
        """Whether the run that it goes on from is not done."""
        first = self.kept.with_name(f"{self.after}.json")
        return self.after not in ("", self.name) and not first.exists()


def read_jobs(queue: Path, runs: Path, device: str, only: list[str]) -> list[Job]:
    """All runs of the queue, or of some of its groups, in their order."""
    groups = tomllib.loads(queue.read_text("utf-8"))["group"]
    known = list(dict.fromkeys(group["name"] for group in groups))
    if odd := [name for name in only if name not in known]:
        raise SystemExit(f"no group {odd[0]!r} in {queue}; there are {known}.")
    found = []
    for group in groups:
        if only and group["name"] not in only:
            continue
        each = group.get("each", {})
        for values in itertools.product(*each.values()):
            fill = dict(zip(each, values, strict=True))
            fill |= {"runs": runs, "device": device}
            command = tuple(w.format(**fill) for w in shlex.split(group["command"]))
            name = group.get("run", "run").format(**fill)
            result = Path(group["result"].format(**fill))
            after = group.get("after", "").format(**fill)
            found.append(Job(group["name"], name, command, result, after))
    there = {(job.group, job.name) for job in found}
    for job in found:
        if job.after and (job.group, job.after) not in there:
            raise SystemExit(
                f"{queue}: {job.group} {job.name} waits for {job.after!r}, and the "
                "group has no run of that name."
            )
    return found


def code_of(group: str, runs: Path) -> Path:
    """The clone that a group runs from; made of HEAD before its first run."""
    said = runs / f"{group}.commit"
    with claimed(runs / "code.lock", wait=True):
        if not said.exists():
            head = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
            commit = subprocess.run(head, check=True, capture_output=True, text=True)
            said.write_text(commit.stdout.strip() + "\n", "utf-8")
        commit = said.read_text("utf-8").strip()
        code = runs / "code" / commit[:12]
        if not code.exists():
            aside = code.with_name(f"{code.name}.part")  # of one that was killed, too
            shutil.rmtree(aside, ignore_errors=True)
            clone = ["git", "clone", "-q", "--no-checkout", str(ROOT), str(aside)]
            subprocess.run(clone, check=True)
            checkout = ["git", "-C", str(aside), "checkout", "-q", "--detach", commit]
            subprocess.run(checkout, check=True)
            aside.rename(code)
    return code


def as_pinned(job: Job, code: Path, runs: Path, device: str) -> Job:
    """A run with the command that it has in the queue of its group's commit.

    One that came into the group later has no other than today's.
    """
    queue = code / QUEUE.relative_to(ROOT)
    same = [
        j
        for j in read_jobs(queue, runs, device, [])
        if (j.group, j.name) == (job.group, job.name)
    ]
    return same[0] if same else job


class Queue:
    """The runs that are left, and the processes that work on some of them.

    Args:
        todo: All runs, in their order.
        runs: The folder of runs.
        threads: Threads of each process.
        device: What the commands are given as {device}.
        here: Whether the code runs as it stands in this folder.
    """

    def __init__(
        self, todo: list[Job], runs: Path, threads: int, device: str, here: bool
    ):
        self.todo, self.runs, self.threads = todo, runs, threads
        self.device, self.here = device, here
        self.lock, self.taken, self.children = threading.Lock(), set(), set()
        self.failed, self.stopping = [], False

    def say(self, line: str) -> None:
        """One line on the screen and in queue.log."""
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {line}"
        print(line, flush=True)
        with open(self.runs / "queue.log", "a", encoding="utf-8") as file:
            file.write(line + "\n")

    def next(self) -> Job | None:
        """The first run that nobody here has taken, that has no result, nor waits."""
        with self.lock:
            for job in self.todo:
                if not (job in self.taken or job.kept.exists() or job.waits):
                    self.taken.add(job)
                    return job
        return None

    def work(self) -> None:
        """Take runs until none is left."""
        locks = self.runs / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        while not self.stopping and (job := self.next()):
            with claimed(locks / f"{job.group}.{job.name}") as mine:
                if mine and not job.kept.exists():
                    self.run(job)

    def run(self, job: Job) -> None:
        """Run one command to its end, and keep its result."""
        code = ROOT
        if not self.here:
            code = code_of(job.group, self.runs)
            job = as_pinned(job, code, self.runs, self.device)
        began = time.monotonic()
        self.say(f"{job.group:14} {job.name:24} begins or goes on")
        env = (
            KEEPING
            | os.environ
            | {
                "PYTHONPATH": str(code),
                "OMP_NUM_THREADS": str(self.threads),
                "PYTHONUNBUFFERED": "1",
            }
        )
        words = self.runs / "words" / f"{job.group}.{job.name}.log"
        words.parent.mkdir(parents=True, exist_ok=True)
        first, *rest = job.command
        if first == "transformer-lib":
            command = [sys.executable, "-c", COMMAND, *rest]
        else:
            command = [sys.executable, str(code / first), *rest]
        with open(words, "a") as file:
            child = subprocess.Popen(
                command, env=env, cwd=self.runs, stdout=file, stderr=subprocess.STDOUT
            )
            self.children.add(child)
            if self.stopping:  # said between the look at it and the start
                child.terminate()
            status = child.wait()
            self.children.discard(child)
        minutes = (time.monotonic() - began) / 60
        if self.stopping:
            self.say(f"{job.group:14} {job.name:24} stopped after {minutes:6.1f} min")
        elif status or not job.result.exists():
            self.failed.append(job)
            self.say(f"{job.group:14} {job.name:24} FAILED ({status}), see {words}")
        else:
            job.kept.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(job.kept) as file:
                file.write(job.result.read_bytes())
            self.say(
                f"{job.group:14} {job.name:24} done    {minutes:6.1f} min  "
                f"{figures(job.kept)}"
            )

    def stop(self, *_) -> None:
        """End all processes; each goes on from its last checkpoint another time."""
        self.stopping = True
        for child in list(self.children):
            child.terminate()


def figures(path: Path) -> str:
    """The few numbers of a result that tell how it went."""
    record = json.loads(path.read_text("utf-8"))
    scores = {k: v["value"] for k, v in record.get("scores", {}).items()}
    numbers = {k: record[k] for k in SHOWN if isinstance(record.get(k), float)}
    return "  ".join(f"{k} {v:.3f}" for k, v in (numbers | scores).items())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("groups", nargs="*", help="groups of the queue (all)")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--threads", type=int, default=1, help="of each process (1)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--queue", type=Path, default=QUEUE)
    parser.add_argument("--list", action="store_true", help="only say what is left")
    parser.add_argument(
        "--here",
        action="store_true",
        help="run the code as it stands here, not from a commit",
    )
    asked = parser.parse_args()
    default = cache_folder() / "runs"
    runs = Path(os.environ.get("TRANSFORMER_LIB_RUNS", default)).resolve()
    runs.mkdir(parents=True, exist_ok=True)
    todo = read_jobs(asked.queue, runs, asked.device, asked.groups)
    if asked.list:
        for job in todo:
            said = figures(job.kept) if job.kept.exists() else "-"
            print(f"{job.group:14} {job.name:24} {said}")
        return 0
    queue = Queue(todo, runs, asked.threads, asked.device, asked.here)
    signal.signal(signal.SIGTERM, queue.stop)
    signal.signal(signal.SIGINT, queue.stop)
    workers = [threading.Thread(target=queue.work) for _ in range(asked.jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        while worker.is_alive():  # so that signals are seen
            worker.join(1)
    left = sum(not job.kept.exists() for job in todo)
    queue.say(f"{len(todo) - left} of {len(todo)} runs are done")
    return 1 if queue.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
