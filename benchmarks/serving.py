"""`transformer-lib serve` beside LibreTranslate and a plain server, with one model.

    python -m venv LT && LT/bin/pip install libretranslate spacy
    python benchmarks/serving.py --libretranslate LT    # 15 minutes on a quiet machine
    python benchmarks/serving.py --quick                # tiny, shows that it runs

The model that ships, over HTTP on this machine: 1, 8 and 64 clients that each send a
sentence of Tatoeba's test set and wait for its translation, with one thread of the
engine and with two, beam 4. The servers:

- ours: `serve` with torch, and with CTranslate2 in int8 and in float32;
- LibreTranslate: our export for CTranslate2, packed and installed as a package of Argos
  Translate, with its own settings (its search has another length penalty);
- plain: benchmarks/plain_server.py, CTranslate2 and nothing else.

Where the peers have two threads, one client has both for its translation (on two cores
slower than one; the page shows one thread), and for several clients two translations
run at once.
LibreTranslate wants a model that finds the ends of sentences. The one that it downloads
by default is not asked for; its package brings spaCy's rules, which are faster.

Each round runs every server once, the order turning. A ratio is of two servers in the
same round; over the rounds it has a mean (of its logarithm) and a 95 % interval. That
the model is the same is seen from the translations: of greedy search, where no length
penalty counts, and of those timed.

Record: benchmarks/serving.json
"""

import argparse
import contextlib
import http.client
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from kept import keep, out_file
from peers import interval

from transformer_lib.corpora import load_corpus
from transformer_lib.export import export_ctranslate2
from transformer_lib.machine import environment_record
from transformer_lib.runs import load_pretrained

MODEL, BEAM = "tatoeba-en-de", 4
METADATA = {
    "package_version": "1.0",
    "argos_version": "1.0",
    "from_code": "en",
    "from_name": "English",
    "to_code": "de",
    "to_name": "German",
}
# Run by the Python that has LibreTranslate: rules for the ends of sentences into the
# package, a zip of it, and its installation.
INSTALL = """
import shutil, sys
import spacy
from argostranslate import package
folder = sys.argv[1]
spacy.blank("en").to_disk(f"{folder}/en_de/spacy")
package.install_from_path(shutil.make_archive(folder, "zip", folder))
"""
VERSIONS = """
import json
from importlib.metadata import version
names = "libretranslate", "argos-translate-lt", "ctranslate2", "spacy", "waitress"
print(json.dumps({name: version(name) for name in names}))
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Server:
    """A server in a process of its own; `ready` waits until it answers.

    Args:
        command: Starts it; the port is put behind it.
        log: What it says goes there.
        environment: Variables that it gets beside those of this process.
    """

    def __init__(self, command: list, log: Path, environment: dict):
        self.port, self.log = free_port(), log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [*map(str, command), "--port", str(self.port)],
                env=os.environ | environment,
                stdout=out,
                stderr=out,
            )

    def ready(self, seconds: float = 300) -> None:
        """Wait until it answers.

        Raises:
            RuntimeError: If it ends before that, or takes too long.
        """
        ends = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < ends:
            link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
            with contextlib.closing(link), contextlib.suppress(OSError):
                link.request("GET", "/health")
                if link.getresponse().status == 200:
                    return
            time.sleep(0.2)
        raise RuntimeError(
            f"{self.process.args} does not answer: {self.log.read_text()[-2000:]}"
        )

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def load(port: int, texts: list[str], clients: int) -> dict:
    """So many clients send these texts, one a request, as soon as they may.

    Returns:
        Seconds of all, seconds of each, and the translations.

    Raises:
        RuntimeError: If a request is answered by an error.
    """
    waits, found = [0.0] * len(texts), [""] * len(texts)
    todo, now = iter(range(len(texts))), time.perf_counter  # one for all clients

    def client() -> None:
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        with contextlib.closing(link):
            for i in todo:
                asked = {"q": texts[i], "source": "en", "target": "de"}
                kind, began = {"Content-Type": "application/json"}, now()
                link.request("POST", "/translate", json.dumps(asked), kind)
                said = json.loads(link.getresponse().read())
                waits[i] = now() - began
                if "translatedText" not in said:
                    raise RuntimeError(f"{texts[i]!r} is answered by {said}")
                found[i] = said["translatedText"]

    with ThreadPoolExecutor(clients) as pool:
        began = now()
        for one in [pool.submit(client) for _ in range(clients)]:
            one.result()
    return {"seconds": now() - began, "waits": waits, "found": found}


class Servers:
    """What is compared, by name.

    Args:
        work: A folder for exports and packages.
        kinds: Compute types.
        libretranslate: An environment with LibreTranslate and spaCy, if there is one.
    """

    def __init__(self, work: Path, kinds: tuple, libretranslate: Path | None):
        self.work, self.kinds, self.libretranslate = work, kinds, libretranslate
        for kind in kinds:
            model, tokenizer, about = load_pretrained(MODEL, "cpu")
            folder = work / kind
            export_ctranslate2(model, tokenizer, folder, kind, about)
            if libretranslate:
                self.install(folder)

    def settings(self, kind: str) -> dict:
        """The variables by which Argos Translate finds its files, and these alone."""
        home = self.work / f"argos {kind}"
        cache = home / "cache" / "argos-translate" / "spacy" / "senter" / "model"
        cache.mkdir(parents=True, exist_ok=True)  # else it would download one
        index = home / "data" / "argos-translate" / "index.json"
        index.parent.mkdir(parents=True, exist_ok=True)
        index.write_text("[]")  # no packages are offered: else it would load others
        places = {"DATA": "data", "CONFIG": "config", "CACHE": "cache"}
        return {f"XDG_{x}_HOME": str(home / name) for x, name in places.items()} | {
            "ARGOS_PACKAGE_INDEX": "none:",
            "ARGOS_PACKAGES_DIR": str(home / "packages"),
            "ARGOS_CHUNK_TYPE": "SPACY",
        }

    def install(self, export: Path) -> None:
        """Our export as a package of Argos Translate, installed from its file."""
        package = self.work / f"package {export.name}"
        inside = package / "en_de"
        shutil.copytree(export, inside / "model")
        shutil.copy(export / "tokenizer.model", inside / "sentencepiece.model")
        (inside / "metadata.json").write_text(json.dumps(METADATA))
        python = self.libretranslate / "bin" / "python"
        subprocess.run(
            [python, "-c", INSTALL, package],
            env=os.environ | self.settings(export.name),
            check=True,
        )

    def commands(self, threads: int, at_once: int, beam: int, kinds: tuple) -> dict:
        """Names, and what starts each: a command and its variables."""
        found, serve = {}, [sys.executable, "-m", "transformer_lib", "serve", MODEL]
        serve += ["--threads", threads, "--beam-size", beam]
        plain = [sys.executable, Path(__file__).with_name("plain_server.py")]
        if at_once == 1:
            found["ours torch"] = [*serve, "--engine", "torch"], {}
        for kind in kinds:
            how = ["--engine", "ctranslate2", "--compute-type", kind]
            if at_once == 1:
                found[f"ours {kind}"] = [*serve, *how], {}
            asked = ["--threads", threads, "--at-once", at_once, "--beam-size", beam]
            found[f"plain {kind}"] = [*plain, self.work / kind, *asked], {}
            if self.libretranslate:
                command = [self.libretranslate / "bin" / "libretranslate"]
                command += ["--host", "127.0.0.1", "--load-only", "en,de"]
                found[f"LibreTranslate {kind}"] = (
                    command,
                    self.settings(kind)
                    | {
                        "ARGOS_INTRA_THREADS": str(threads),
                        "ARGOS_INTER_THREADS": str(at_once),
                        "ARGOS_BEAM_SIZE": str(beam),
                    },
                )
        return found

    @contextlib.contextmanager
    def running(
        self, threads: int, at_once: int = 1, beam: int = BEAM, kinds: tuple = ()
    ) -> Iterator[dict[str, Server]]:
        """All of them, or those of some kinds, started together."""
        commands = self.commands(threads, at_once, beam, kinds or self.kinds)
        servers = {}
        with contextlib.ExitStack() as stack:
            for name, (command, more) in commands.items():
                log = self.work / f"{name} {threads} {at_once} {beam}.log"
                more["OMP_NUM_THREADS"] = str(threads)
                servers[name] = Server(command, log, more)
                stack.callback(servers[name].stop)
            for server in servers.values():
                server.ready()
            yield servers


def equal(one: list[str], other: list[str]) -> float:
    """The share of translations that are the same."""
    return statistics.fmean(a == b for a, b in zip(one, other, strict=True))


def rounds_of(servers: dict, texts: list[str], clients: int, seconds) -> list[dict]:
    """What each server did in each round: four rounds, or as many as take so long."""
    names, done, least = [*servers], [], 4 if seconds else 2
    for name in names:
        load(servers[name].port, texts[-clients:], clients)  # warm
    began = time.perf_counter()
    while len(done) < least or time.perf_counter() - began < seconds:
        turn = len(done) % len(names)
        order = names[turn:] + names[:turn]
        done.append({name: load(servers[name].port, texts, clients) for name in order})
    return done


def figures(loads: list[dict]) -> dict:
    """Of one server, over its rounds."""
    paces = [len(one["waits"]) / one["seconds"] for one in loads]
    ms = [[1000 * wait for wait in one["waits"]] for one in loads]
    return {
        "requests_per_second": statistics.median(paces),
        "slowest_round": min(paces),
        "fastest_round": max(paces),
        "median_ms": statistics.median(map(statistics.median, ms)),
        "p95_ms": statistics.median(statistics.quantiles(x, n=20)[-1] for x in ms),
    }


def times(rounds: list[dict], peer: str) -> dict:
    """How many times as many requests ours answers, with its interval."""
    ours = "ours " + peer.split()[-1]
    ratio, half = interval([r[peer]["seconds"] / r[ours]["seconds"] for r in rounds])
    return {"ratio": ratio, "low": ratio / (1 + half), "high": ratio * (1 + half)}


def cell(servers: dict, threads: int, clients: int, texts: list[str], seconds) -> dict:
    """One load, with so many threads and clients."""
    rounds = rounds_of(servers, texts, clients, seconds)
    table = {name: figures([one[name] for one in rounds]) for name in servers}
    peers = [name for name in servers if not name.startswith("ours")]
    ratios = {name: times(rounds, name) for name in peers}
    first = rounds[0]["ours torch"]["found"]
    print(f"{threads} thread(s), {clients} client(s), {len(rounds)} rounds")
    for name, one in table.items():
        one["same_as_torch"] = equal(first, rounds[0][name]["found"])
        print(
            "  {:24}{requests_per_second:7.1f} requests/s,{median_ms:8.1f} ms, 95 %"
            "{p95_ms:8.1f} ms, same {same_as_torch:.0%}".format(name, **one)
        )
    for name, r in ratios.items():
        print(f"  ours / {name:24}{r['ratio']:.2f} ({r['low']:.2f}-{r['high']:.2f})")
    return {
        "threads": threads,
        "clients": clients,
        "rounds": len(rounds),
        "servers": table,
        "times_peer": ratios,
    }


def greedy(servers: Servers, texts: list[str]) -> dict:
    """By server: the share of translations that are torch's, all by greedy search."""
    with servers.running(1, beam=1, kinds=("float32",)) as ready:
        found = {n: load(one.port, texts, 1)["found"] for n, one in ready.items()}
    shares = {name: equal(found["ours torch"], one) for name, one in found.items()}
    for name, share in shares.items():
        print(f"greedy search, {name}: {share:.1%} the same as torch's")
    return shares


def measured(servers: Servers, texts: list[str], given: argparse.Namespace) -> list:
    """All loads."""
    cells = []
    all_threads, all_clients = ((1,), (1, 8)) if given.quick else ((1, 2), (1, 8, 64))
    seconds = given.minutes * 60 / len(all_threads) / len(all_clients)
    for threads in all_threads:
        with contextlib.ExitStack() as stack:
            one = stack.enter_context(servers.running(threads))
            many = one
            if threads > 1:
                many = one | stack.enter_context(servers.running(1, threads))
            for clients in all_clients:
                ready = one if clients == 1 else many
                cells.append(cell(ready, threads, clients, texts, seconds))
    return cells


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny, kept nowhere")
    parser.add_argument(
        "--libretranslate", type=Path, help="an environment that has it, and spaCy"
    )
    parser.add_argument("--minutes", type=float, default=5, help="for all loads")
    parser.add_argument("--requests", type=int, default=96, help="of a round")
    parser.add_argument("--out", type=out_file, help="where the record goes")
    given = parser.parse_args(arguments)
    if not (given.quick or given.libretranslate):
        parser.error("give --libretranslate ENVIRONMENT, or --quick to do without.")
    corpus, count, kinds = MODEL, given.requests, ("int8", "float32")
    if given.quick:
        corpus, count, kinds, given.minutes = "grammar-en-de", 8, ("float32",), 0
    longest = 28 if given.quick else 150  # characters; none is cut
    texts = [source for source, _ in load_corpus(corpus, "test").pairs]
    texts = [*dict.fromkeys(text for text in texts if len(text) < longest)]
    texts = texts[:: len(texts) // count][:count]
    with tempfile.TemporaryDirectory() as work:
        servers = Servers(Path(work), kinds, given.libretranslate)
        same = greedy(servers, texts)
        cells = measured(servers, texts, given)
    versions = {name: version(name) for name in ("ctranslate2", "starlette", "uvicorn")}
    record = {
        "corpus": f"{corpus} test",
        "model": MODEL,
        "beam_size": BEAM,
        "requests": len(texts),
        "same_by_greedy_search": same,
        "cells": cells,
        "versions": {"ours and plain": versions},
        "environment": environment_record("cpu"),
    }
    if given.libretranslate:
        python = given.libretranslate / "bin" / "python"
        said = subprocess.run([python, "-c", VERSIONS], check=True, capture_output=True)
        record["versions"]["LibreTranslate"] = json.loads(said.stdout)
    keep(record, "benchmarks/serving", given.out, given.quick)


if __name__ == "__main__":
    main()
