"""Text to token files, side by side with the usual ways, and memory as the text grows.

    python benchmarks/prepare.py           # Tatoeba and mixed text: some ten minutes
    python benchmarks/prepare.py --quick   # some made-up lines: seconds

Each job starts from a file of tab-separated lines, learns a vocabulary and ends with
the ids of all pairs on the disk:

- ours: `prepare`, which holds a piece of the text at a time, and checks what it wrote;
- SentencePiece as it is usually called: learns from the file, cuts line by line, keeps
  lists, pickles them;
- Hugging Face tokenizers: byte-level BPE, learns and encodes in batches of 1,000 on all
  its threads, keeps arrays, saves them.

Each job runs in a process of its own, of which the peak memory is read; rounds are
interleaved. Then ours again with the same text ten times over. Mixed text is read where
TRANSFORMER_LIB_MIRROR names a folder that has it. Writes
transformer_lib/evidence/benchmarks/prepare.json.

Record: benchmarks/prepare.json
"""

import argparse
import hashlib
import io
import lzma
import os
import pickle
import random
import statistics
import tempfile
from importlib.metadata import version
from itertools import islice
from pathlib import Path

import numpy as np
import sentencepiece
import tokenizers
from apart import apart
from kept import keep, out_file

from transformer_lib.batches import prepare
from transformer_lib.corpora import CorpusUnavailable, load_corpus
from transformer_lib.machine import environment_record

# --- the jobs -------------------------------------------------------------------------


def ours(text: Path, out: Path, vocab_size: int, threads: int) -> int:
    done = prepare(str(text), out / "data", vocab_size, threads=threads)
    return done.data["train_pairs"] + done.data["valid_pairs"]


def lines_of(text: Path):
    with open(text, encoding="utf-8") as file:
        for line in file:
            yield line.rstrip("\n").split("\t")


def line_by_line(text: Path, out: Path, vocab_size: int, threads: int) -> int:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(side for pair in lines_of(text) for side in pair),
        model_writer=model,
        vocab_size=vocab_size,
        model_type="bpe",
        character_coverage=1.0,
        byte_fallback=True,
        num_threads=threads,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pairs = [tuple(processor.encode(side) for side in pair) for pair in lines_of(text)]
    with open(out / "pairs.pickle", "wb") as file:
        pickle.dump(pairs, file)
    return len(pairs)


def hugging_face(text: Path, out: Path, vocab_size: int, threads: int) -> int:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    sides = (side for pair in lines_of(text) for side in pair)
    tokenizer.train_from_iterator(sides, trainer)
    stream, ids = lines_of(text), ([], [])
    while batch := list(islice(stream, 1000)):
        for side, kept in enumerate(ids):
            found = tokenizer.encode_batch([pair[side] for pair in batch])
            kept += [np.array(one.ids, dtype=np.uint16) for one in found]
    for name, kept in zip(("source", "target"), ids, strict=True):
        np.save(out / f"{name}.npy", np.concatenate(kept))
        np.save(out / f"{name}_lengths.npy", np.array([len(row) for row in kept]))
    return len(ids[0])


JOBS = {
    "transformer_lib prepare": ours,
    "SentencePiece, line by line": line_by_line,
    "Hugging Face tokenizers": hugging_face,
}


# --- measuring ------------------------------------------------------------------------


def job(function, text: Path, vocab_size: int, threads: int) -> dict:
    """One job in an empty folder."""
    with tempfile.TemporaryDirectory(dir=text.parent) as out:
        figures = apart(function, text, Path(out), vocab_size, threads)
    pairs, seconds = figures["answer"], figures["seconds"]
    return {
        "seconds": seconds,
        "peak_mb": figures["peak_mb"],
        "pairs": pairs,
        "pairs_a_minute": 60 * pairs / seconds,
    }


def report(rounds: list[dict]) -> dict:
    """Per-round figures with their best and median, for one job."""
    speeds = [r["pairs_a_minute"] for r in rounds]
    return {
        "pairs": rounds[0]["pairs"],
        "pairs_a_minute_best": max(speeds),
        "pairs_a_minute_median": statistics.median(speeds),
        "peak_mb": max(r["peak_mb"] for r in rounds),
        "rounds": rounds,
    }


# --- the texts ------------------------------------------------------------------------


def write_tatoeba(path: Path) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for split in ("train", "valid"):
            for pair in load_corpus("tatoeba-en-de", split).pairs:
                file.write("\t".join(pair) + "\n")


def write_mixed(path: Path) -> None:
    """Lines of origin, English and German, without the origin."""
    folder = os.environ.get("TRANSFORMER_LIB_MIRROR", "")
    source = Path(folder, "mixed", "train.en-de.tsv.xz")
    if not folder or not source.is_file():
        raise CorpusUnavailable("no mixed text in TRANSFORMER_LIB_MIRROR")
    how = {"encoding": "utf-8", "newline": "\n"}
    with lzma.open(source, "rt", **how) as lines, open(path, "w", **how) as file:
        for line in lines:
            file.write(line.split("\t", 1)[1])


def write_made_up(path: Path) -> None:
    rng = random.Random(0)
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(3000):
            words = ["".join(rng.choices(syllables, k=2)) for _ in range(8)]
            file.write(" ".join(words) + "\t" + " ".join(reversed(words)) + "\n")


def repeat(text: Path, times: int) -> Path:
    """The same text so many times over, in a file beside it."""
    path = text.with_name(f"{text.stem}_{times}.tsv")
    with open(path, "wb") as out:
        for _ in range(times):
            with open(text, "rb") as file:
                while block := file.read(1 << 20):
                    out.write(block)
    return path


# --- all of it ------------------------------------------------------------------------


def compare(name, write, folder, vocab_size, threads, rounds, times) -> dict | None:
    """All jobs on one text, then ours on the same text several times over."""
    text = Path(folder, f"{name}.tsv")
    try:
        apart(write, text)
    except RuntimeError:
        print(f"{name}: this text is unavailable here; left out.\n")
        return None
    figures = {job_name: [] for job_name in JOBS}
    for _ in range(rounds):
        for job_name, function in JOBS.items():
            figures[job_name].append(job(function, text, vocab_size, threads))
    reports = {job_name: report(some) for job_name, some in figures.items()}
    longer = repeat(text, times)
    repeated = job(ours, longer, vocab_size, threads)
    longer.unlink()
    with open(text, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    text.unlink()
    show(name, reports, repeated, times)
    one = reports["transformer_lib prepare"]
    return {
        "sha256": digest,
        "vocab_size": vocab_size,
        "jobs": reports,
        "repeated": {"times": times, **repeated},
        "memory_ratio": repeated["peak_mb"] / one["peak_mb"],
        "speed_ratio": {
            n: one["pairs_a_minute_median"] / r["pairs_a_minute_median"]
            for n, r in reports.items()
        },
    }


def show(name: str, reports: dict, repeated: dict, times: int) -> None:
    """The table of one text."""
    ours_median = reports["transformer_lib prepare"]["pairs_a_minute_median"]
    print(f"{name:30}     pairs   pairs/min best     median  ours is  peak MB")
    for job_name, r in reports.items():
        print(
            f"{job_name:30} {r['pairs']:9,} {r['pairs_a_minute_best']:16,.0f} "
            f"{r['pairs_a_minute_median']:10,.0f} "
            f"{ours_median / r['pairs_a_minute_median']:7.2f}x {r['peak_mb']:8,.0f}"
        )
    print(
        f"{f'ours, the text {times} times':30} {repeated['pairs']:9,} "
        f"{repeated['pairs_a_minute']:16,.0f} {'':10} {'':8} "
        f"{repeated['peak_mb']:8,.0f}\n"
    )


def main(arguments=None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="made-up lines; seconds")
    parser.add_argument("--only", metavar="TEXT", help="tatoeba-en-de or mixed-en-de")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=out_file, help="where the figures are written")
    asked = parser.parse_args(arguments)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    os.environ["RAYON_NUM_THREADS"] = str(asked.threads)
    texts = {"tatoeba-en-de": write_tatoeba, "mixed-en-de": write_mixed}
    vocab_size, rounds, times = 8000, asked.rounds, 10
    if asked.only:
        texts = {asked.only: texts[asked.only]}
    if asked.quick:
        texts, vocab_size, rounds, times = {"made up": write_made_up}, 500, 1, 3
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, write in texts.items():
            settings = folder, vocab_size, asked.threads, rounds, times
            if figures := compare(name, write, *settings):
                found[name] = figures
    record = {
        "what": "text to token files: pairs a minute and peak memory",
        "quick": asked.quick,
        "threads": asked.threads,
        "rounds": rounds,
        "texts": found,
        "environment": environment_record(),
        "peers": {n: version(n) for n in ("sentencepiece", "tokenizers")},
    }
    keep(record, "benchmarks/prepare", asked.out, asked.quick)
    return record


if __name__ == "__main__":
    main()
