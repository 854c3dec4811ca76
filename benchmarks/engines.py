"""The Translator with CTranslate2 beside CTranslate2 alone, from text to text.

    python benchmarks/engines.py            # 12 minutes on a quiet machine
    python benchmarks/engines.py --quick    # tiny, seconds, shows that it runs
    python benchmarks/engines.py --cpu      # time of this process: on a busy machine

The model that ships, on sentences of Tatoeba's test set, one by one and by 32,
with one thread and two, in float32 and in 8 bits, beam 4. "Alone" is what one writes
who has the export and no library: SentencePiece, `translate_batch`, SentencePiece,
each thread with its part of the batch. The Translator also folds, splits and checks
lines, asks for the whole beam and ranks it by the paper's length penalty; in float32 it
searches on until the texts are torch's.

Each round runs every line once, the order turning. A ratio is of two lines in the same
round; over the rounds it has a mean (of its logarithm) and a 95 % interval. Then the
whole test set is scored with each engine: BLEU, and how many texts differ from torch's.
The record goes to --out.

Record: benchmarks/engines.json
"""

import argparse
import math
import statistics
import time

import torch
from kept import keep, out_file
from peers import interval

from transformer_lib.corpora import load_corpus
from transformer_lib.evaluation import sacre_bleu
from transformer_lib.machine import environment_record
from transformer_lib.runs import load_pretrained
from transformer_lib.translator import Translator, trained_length

BEAM, ALPHA, EXTRA = 4, 0.6, 50
TYPES = ("float32", "int8")


def alone(translator: Translator):
    """CTranslate2 and SentencePiece, with the same export."""
    exported = translator.engine.exported
    processor, engine = exported.tokenizer.processor, exported.engine

    def run(lines: list[str]) -> list[str]:
        pieces = processor.encode(lines, out_type=str)
        longest = max(map(len, pieces))
        found = engine.translate_batch(
            pieces,
            beam_size=BEAM,
            length_penalty=ALPHA,
            max_decoding_length=longest + EXTRA,
            max_batch_size=math.ceil(len(lines) / exported.threads),
        )
        return processor.decode([one.hypotheses[0] for one in found])

    return run


def lines_of(threads: int) -> dict:
    """What is compared, by name: functions from lines to lines."""
    torch.set_num_threads(threads)
    shipped = load_pretrained("tatoeba-en-de", "cpu")
    runs = {"torch float32": Translator(*shipped)}
    for kind in TYPES:
        ours = Translator(*shipped, engine="ctranslate2", compute_type=kind)
        runs[f"Translator {kind}"], runs[f"alone {kind}"] = ours, alone(ours)
    return runs


def timed(run, texts: list[str], batch: int, clock) -> float:
    began = clock()
    for start in range(0, len(texts), batch):
        run(texts[start : start + batch])
    return clock() - began


def rounds_of(runs: dict, texts: list[str], batch: int, seconds, clock) -> list[dict]:
    """Seconds of each line in each round, for so long, and at least two rounds."""
    names, done, began = [*runs], [], time.perf_counter()
    for name in names:
        timed(runs[name], texts[:batch], batch, clock)  # warm
    while len(done) < 2 or time.perf_counter() - began < seconds:
        turn = len(done) % len(names)
        order = names[turn:] + names[:turn]
        done.append({name: timed(runs[name], texts, batch, clock) for name in order})
    return done


def compared(rounds: list[dict], mine: str, theirs: str) -> dict:
    """How many times as long ours takes, with its interval."""
    ratio, half = interval([one[mine] / one[theirs] for one in rounds])
    return {"ratio": ratio, "low": ratio / (1 + half), "high": ratio * (1 + half)}


def speeds(threads: int, batch: int, texts: list[str], seconds, clock) -> dict:
    rounds = rounds_of(lines_of(threads), texts, batch, seconds, clock)
    print(f"{threads} thread(s), batch {batch}, {len(rounds)} rounds")
    row: dict = {"threads": threads, "batch": batch, "rounds": len(rounds)}
    row["sentences_per_second"] = {
        name: len(texts) / statistics.median(one[name] for one in rounds)
        for name in rounds[0]
    }
    row["time_against_alone"] = {
        kind: compared(rounds, f"Translator {kind}", f"alone {kind}") for kind in TYPES
    }
    row["times_faster_than_torch"] = {
        kind: compared(rounds, "torch float32", f"Translator {kind}") for kind in TYPES
    }
    for name, pace in row["sentences_per_second"].items():
        print(f"  {name:20}{pace:8.1f} sentences/s")
    for what in ("time_against_alone", "times_faster_than_torch"):
        for kind, r in row[what].items():
            print(f"  {what} {kind:8}{r['ratio']:.3f} ({r['low']:.3f}-{r['high']:.3f})")
    return row


def quality(pairs: list[tuple[str, str]]) -> dict:
    """BLEU of each engine, and how many of its texts are not torch's."""
    sources, references = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    found, table = {}, {}
    for name, run in lines_of(torch.get_num_threads()).items():
        found[name] = run(sources)
        other = zip(found[name], found["torch float32"], strict=True)
        score = sacre_bleu(found[name], references)
        different = sum(a != b for a, b in other)
        table[name] = {"BLEU": score.value, "different": different}
        print(f"  {name:20}{score.value:7.2f} BLEU, {different} texts not torch's")
    return {"sentences": len(pairs), "signature": score.signature, "engines": table}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny, kept nowhere")
    parser.add_argument(
        "--cpu", action="store_true", help="processor's time, no clock's"
    )
    parser.add_argument("--minutes", type=float, default=8, help="for all speeds")
    parser.add_argument("--sentences", type=int, default=96, help="of a round")
    parser.add_argument("--out", type=out_file, help="where the record goes")
    given = parser.parse_args(arguments)
    clock = time.process_time if given.cpu else time.perf_counter
    corpus = "grammar-en-de" if given.quick else "tatoeba-en-de"
    pairs = load_corpus(corpus, "test").pairs
    count = 2 if given.quick else given.sentences
    _, tokenizer, about = load_pretrained("tatoeba-en-de", "cpu")
    longest = 7 if given.quick else trained_length(about)
    texts = [en for en, _ in pairs if len(tokenizer.encode(en)) < longest]  # uncut
    texts = texts[:: len(texts) // count][:count]
    seconds = 0.0 if given.quick else given.minutes * 60 / 4
    rows = [
        speeds(threads, batch, texts, seconds, clock)
        for threads in (1, 2)
        for batch in (1, 32)
    ]
    torch.set_num_threads(1 if given.quick else 2)
    record = {
        "corpus": f"{corpus} test",
        "beam_size": BEAM,
        "clock": clock.__name__,
        "speeds": rows,
        "quality": quality(pairs[:4] if given.quick else pairs),
        "environment": environment_record("cpu"),
    }
    keep(record, "benchmarks/engines", given.out, quick=True)


if __name__ == "__main__":
    main()
