"""What the way from WMT's archives to token files costs: time, memory and disk.

    python benchmarks/wmt.py           # 150,000 real pairs, then five times as many
    python benchmarks/wmt.py --quick   # 3,000 pairs of the grammar: seconds

Makes archives with the names and the layout of the real ones, and measures each stage
in a process of its own: unpacking and cleaning, learning a vocabulary of 37,000,
cutting into tokens, and how fast one can run past the members that are not wanted. Time
is that of the processor, all threads together, so that other work on the machine does
not count; the time by the clock stands beside it. Real text is read where
TRANSFORMER_LIB_MIRROR names a folder that has it.
Writes transformer_lib/evidence/benchmarks/wmt.json.

Record: benchmarks/wmt.json
"""

import argparse
import hashlib
import lzma
import os
import tempfile
from itertools import islice
from pathlib import Path

from apart import apart
from kept import keep, out_file

from transformer_lib.batches import prepare
from transformer_lib.batches.prepared import sample_pairs
from transformer_lib.corpora import grammar_split, stream_corpus
from transformer_lib.machine import environment_record
from transformer_lib.tokenizer import Tokenizer
from transformer_lib.wmt import clean_wmt, miniature, open_tar_member


def stage(function, *arguments) -> dict:
    """What a function costs in a process of its own."""
    figures = apart(function, *arguments)
    return {
        "seconds": figures["cpu_seconds"],
        "clock_seconds": figures["seconds"],
        "peak_mb": figures["peak_mb"],
    }


def real_pairs(count: int) -> list[tuple[str, str]]:
    """English and German sentences of several origins, evenly from the whole file."""
    source = Path(os.environ["TRANSFORMER_LIB_MIRROR"], "mixed", "train.en-de.tsv.xz")
    with lzma.open(source, "rt", encoding="utf-8", newline="\n") as lines:
        rows = [line.rstrip("\n").split("\t")[1:3] for line in lines]
    step = len(rows) / count
    return [tuple(rows[int(i * step)]) for i in range(count)]


def learn(corpus: dict, vocab_size: int, out: Path) -> None:
    pairs = sample_pairs(stream_corpus(corpus), 200_000)
    sides = (side for pair in pairs for side in pair)
    Tokenizer.train(sides, vocab_size).save(out)


def cut(corpus: dict, tokenizer: Path, folder: Path) -> None:
    prepare(
        corpus, folder, max_length=256, tokenizer=Tokenizer.load(tokenizer), threads=1
    )


def run_past(path: Path, member: str) -> None:
    """As far as a member at the end, all else being thrown away."""
    with open_tar_member(path, member) as file:
        while file.read(1 << 20):
            pass


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def stages(pairs: list, folder: Path, vocab_size: int, tokenizer=None) -> tuple:
    """All stages on some pairs; without a tokenizer, one is learned first."""
    archives, valid = miniature(pairs, folder / "in"), pairs[:500]
    text, found = folder / "text", {}
    found["unpack and clean"] = stage(
        clean_wmt, "en-de", text, archives, folder / "in", valid, False
    )
    corpus = clean_wmt("en-de", text, archives, folder / "in", valid, False)
    if tokenizer is None:
        tokenizer = folder / "tokenizer.model"
        found["learn the vocabulary"] = stage(learn, corpus, vocab_size, tokenizer)
    found["cut into tokens"] = stage(cut, corpus, tokenizer, folder / "data")
    return found, archives, tokenizer


def main(arguments=None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="made-up text; seconds")
    parser.add_argument("--pairs", type=int, default=150_000)
    parser.add_argument("--out", type=out_file, help="where the figures are written")
    asked = parser.parse_args(arguments)
    if asked.quick:
        pairs, vocab_size = list(islice(grammar_split("train"), 3000)), 500
    else:
        pairs, vocab_size = real_pairs(asked.pairs), 37_000
    digest = hashlib.sha256("\n".join("\t".join(p) for p in pairs).encode())
    with tempfile.TemporaryDirectory() as name:
        one, five = Path(name, "one"), Path(name, "five")
        found, archives, tokenizer = stages(pairs, one, vocab_size)
        past = archives["europarl"]
        packed = one / "in" / past.source.filename
        skipped = stage(run_past, packed, past.members["en-de"][1])
        text_bytes = sum(len(side.encode()) for pair in pairs for side in pair)
        cleaned = (one / "text" / "train.tsv.gz").stat().st_size
        tokens = size_of(one / "data" / "train")
        more, _, _ = stages(pairs * 5, five, vocab_size, tokenizer)
    record = {
        "what": "from WMT's archives to token files: time, memory, disk",
        "quick": asked.quick,
        "pairs": len(pairs),
        "vocab_size": vocab_size,
        "sha256": digest.hexdigest(),
        "text_bytes": text_bytes,
        "cleaned_bytes": cleaned,
        "token_bytes": tokens,
        "stages": found,
        "five_times": more,
        "run_past_bytes_per_second": past.size / skipped["seconds"],
        "environment": environment_record(),
    }
    for name, figures in found.items():
        five_times = more.get(name, {"seconds": 0, "peak_mb": 0})
        print(
            f"{name:24} {figures['seconds']:7.1f} s {figures['peak_mb']:6.0f} MB   "
            f"{five_times['seconds']:7.1f} s {five_times['peak_mb']:6.0f} MB"
        )
    keep(record, "benchmarks/wmt", asked.out, asked.quick)
    return record


if __name__ == "__main__":
    main()
