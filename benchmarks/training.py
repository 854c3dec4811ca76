"""Training, side by side with Hugging Face's Marian of the same size.

    python benchmarks/training.py            # two corpora, two sizes: half an hour
    python benchmarks/training.py --device cuda --data DIR --sizes base big \
      --max-tokens 12000                     # text that `prepare` wrote, in bfloat16
    python benchmarks/training.py --quick    # the embedded grammar: seconds

Real tokens a second: target tokens that are not padding. Each model is fed both ways:
ours, pairs of similar length under a token budget, and the usual one, a fixed number of
random pairs padded to the longest. Both ways train on as many real tokens an update.
Same text, subwords, optimizer, dropout, smoothed loss and threads; float32 on a CPU,
bfloat16 by autocast on a GPU. The rounds are interleaved, so that a slow moment of the
machine hits all alike. The mixed corpus is in the offline mirror only and is left out
without it. Writes transformer_lib/evidence/benchmarks/training.json (training-cuda.json
on a GPU).

Record: benchmarks/training*.json
"""

import argparse
import lzma
import os
import random
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from kept import keep, out_file

from transformer_lib.batches import Prepared, make_batch, plan_batches, prepare
from transformer_lib.corpora import CorpusUnavailable, load_corpus
from transformer_lib.export.marian import marian_config
from transformer_lib.machine import environment_record
from transformer_lib.objective import build_optimizer
from transformer_lib.tokenizer import PAD
from transformer_lib.training import update
from transformer_lib.transformer import Transformer, TransformerConfig

SIZES = {
    "tiny": {"d_model": 32, "num_heads": 2, "num_layers": 1, "d_ff": 64},
    "small": {"d_model": 256, "num_heads": 4, "num_layers": 2, "d_ff": 1024},
    "base": {},
    "big": {"d_model": 1024, "num_heads": 16, "d_ff": 4096},
}
BITS = {"cpu": "float32", "cuda": "bfloat16"}
RATE, EPSILON, DROPOUT = 1e-4, 0.1, 0.1


def pairs_of(name: str, count: int) -> list[tuple[str, str]] | None:
    """A random sample of a corpus by a fixed seed; None where it is unavailable."""
    if name == "mixed":
        folder = Path(os.environ.get("TRANSFORMER_LIB_MIRROR") or "nowhere")
        path = folder / "mixed" / "train.en-de.tsv.xz"
        if not path.is_file():
            return None
        with lzma.open(path, "rt", encoding="utf-8") as file:
            rows = (line.rstrip("\n").split("\t") for line in file)
            pairs = [tuple(row[1:]) for row in rows if len(row) == 3]
    else:
        try:
            pairs = load_corpus(name, "train").pairs
        except CorpusUnavailable:
            return None
    return random.Random(0).sample(list(pairs), min(count, len(pairs)))


def prepared(pairs, folder: str, vocab_size: int) -> Prepared:
    """The pairs as token pairs; the last hundred are set aside, unused."""
    files = {}
    for split, part in ("train", pairs[:-100]), ("valid", pairs[-100:]):
        files[split] = f"{folder}/{split}.tsv"
        lines = (f"{source}\t{target}\n" for source, target in part)
        Path(files[split]).write_text("".join(lines), encoding="utf-8")
    return prepare(files, f"{folder}/data", vocab_size, max_length=100)


def our_update(model, optimizer):
    """One update of ours, from a batch of ours."""
    bits = BITS[model.device.type]
    return lambda batch: update(
        model, optimizer, [batch], RATE, EPSILON, precision=bits
    )


def padded_loss(logits: torch.Tensor, batch) -> torch.Tensor:
    """The usual loss: torch's, of all places, padding ignored."""
    return F.cross_entropy(
        logits.flatten(0, 1),
        batch.tgt_out.flatten(),
        ignore_index=PAD,
        label_smoothing=EPSILON,
    )


def their_update(model, optimizer):
    """One update of theirs; torch's fused loss in place of Trainer's slower one."""

    def step(batch):
        optimizer.zero_grad(set_to_none=True)
        batch = batch.to(model.device)
        kind = model.device.type
        with torch.autocast(kind, torch.bfloat16, BITS[kind] == "bfloat16"):
            logits = model(
                input_ids=batch.src_ids,
                attention_mask=batch.src_ids != PAD,
                decoder_input_ids=batch.tgt_in,
            ).logits
        padded_loss(logits.float(), batch).backward()
        optimizer.step()

    for group in optimizer.param_groups:
        group["lr"] = RATE
    return step


def plans(pairs, max_tokens: int) -> dict:
    """Two divisions into batches: by length under a budget, and random of one size."""
    ours = plan_batches(pairs, max_tokens, seed=0, epoch=0)
    size = max(1, round(len(pairs) / len(ours)))
    order = np.random.default_rng(0).permutation(len(pairs)).tolist()
    usual = [order[i : i + size] for i in range(0, len(order) - size + 1, size)]
    return {"by length": ours, f"{size} random pairs": usual}


def measure(runs: dict, pairs, rounds: int, updates: int, device: str) -> dict:
    """Tokens and seconds of each implementation in each round, interleaved.

    On a GPU the rounds have the same batches: memory of each new shape is slow to get.
    """
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    fresh, warm_up = (True, 1) if device == "cpu" else (False, 2)
    figures = {name: [] for name in runs}
    for turn in range(-warm_up, rounds):
        for name, (step, plan) in runs.items():
            wait()
            first = max(0, turn + 1) * updates if fresh else 0
            made = [make_batch(pairs, i) for i in plan[first : first + updates]]
            start = time.perf_counter()
            for batch in made:
                step(batch)
            wait()
            seconds = time.perf_counter() - start
            if turn >= 0:
                real = sum(batch.num_tokens for batch in made)
                places = sum(batch.tgt_out.numel() for batch in made)
                figures[name].append((real, places, seconds))
    return figures


def report(figures: dict, peer: str) -> dict:
    """Print the table; give its figures."""
    print(f"  {'implementation':38} tokens/s  best round  real  x peer")
    speed = {n: [real / s for real, _, s in rows] for n, rows in figures.items()}
    table = {}
    for name, rows in figures.items():
        median, best = statistics.median(speed[name]), max(speed[name])
        share = sum(r[0] for r in rows) / sum(r[1] for r in rows)
        ratio = median / statistics.median(speed[peer])
        table[name] = {
            "rounds": [dict(tokens=n, places=m, seconds=s) for n, m, s in rows],
            "tokens_per_second_median": round(median, 1),
            "tokens_per_second_best": round(best, 1),
            "real_share_of_target_places": round(share, 4),
            "times_peer_median": round(ratio, 3),
            "times_peer_best": round(best / max(speed[peer]), 3),
        }
        print(f"  {name:38} {median:8,.0f} {best:11,.0f} {share:5.0%} {ratio:7.2f}")
    return table


def compare(size: str, ready: Prepared, asked):
    """All four: two models, each fed both ways."""
    from transformers import MarianMTModel

    settings, vocab_size = SIZES[size], ready.tokenizer.vocab_size
    torch.manual_seed(0)
    config = TransformerConfig(vocab_size, **settings, dropout=DROPOUT)
    ours = Transformer(config)
    theirs = MarianMTModel(marian_config(config, use_cache=False))
    makers = {
        "ours": (ours.train().to(asked.device), our_update),
        "Hugging Face": (theirs.train().to(asked.device), their_update),
    }
    runs = {}
    for model_name, (model, make) in makers.items():
        step = make(model, build_optimizer(model))
        for plan_name, plan in plans(ready.train, asked.max_tokens).items():
            runs[f"{model_name}, {plan_name}"] = step, plan
    sizes = [  # Marian has biases in attention, and ours, as the paper, none
        sum(p.numel() for p in model.parameters() if p.requires_grad)
        for model, _ in makers.values()
    ]
    print(f"  {sizes[0]:,} parameters, Hugging Face {sizes[1]:,}")
    of = asked.rounds, asked.updates, asked.device
    figures = measure(runs, ready.train, *of)
    return report(figures, peer=list(runs)[-1]) | {"parameters": sizes}


def main(arguments=None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, one round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=4, help="of each, each round")
    parser.add_argument("--sizes", nargs="+", default=["small", "base"])
    parser.add_argument("--device", default="cpu", choices=tuple(BITS))
    parser.add_argument("--max-tokens", type=int, default=1280)
    parser.add_argument("--data", type=Path, help="a folder that prepare wrote")
    parser.add_argument("--out", type=out_file, help="where the figures are written")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(asked.threads)
    names, sizes = ["tatoeba-en-de", "mixed"], asked.sizes
    count, vocab_size = 60_000, 8000
    if asked.quick:
        names, sizes = ["grammar-en-de"], ["tiny"]
        count, vocab_size = 1000, 340
        asked.max_tokens, asked.rounds, asked.updates = 400, 1, 2
    results, data = {}, {}
    if asked.data:
        ready, names = Prepared.load(asked.data), []
        data["given"] = ready.data["train"]["sha256"]
        count, vocab_size = len(ready.train), ready.tokenizer.vocab_size
        for size in sizes:
            print(size)
            results[f"given, {size}"] = compare(size, ready, asked)
    for name in names:
        pairs = pairs_of(name, count)
        if pairs is None:
            print(f"{name}: unavailable here, left out")
            continue
        with tempfile.TemporaryDirectory() as folder:
            ready = prepared(pairs, folder, vocab_size)
            data[name] = ready.data["train"]["sha256"]
            for size in sizes:
                print(f"{name}, {size}")
                case = compare(size, ready, asked)
                results[f"{name}, {size}"] = case
    record = {
        "benchmark": f"training on {asked.device}: real target tokens a second",
        "settings": {
            "sizes": {size: SIZES[size] for size in sizes},
            "vocab_size": vocab_size,
            "pairs": count,
            "max_length": 100,
            "max_tokens": asked.max_tokens,
            "dropout": DROPOUT,
            "label_smoothing": EPSILON,
            "precision": BITS[asked.device],
            "optimizer": "torch.optim.Adam",
            "threads": asked.threads,
            "rounds": asked.rounds,
            "updates_a_round": asked.updates,
        },
        "data_sha256": data,
        "environment": environment_record(asked.device),
        "peers": {"transformers": version("transformers")},
        "results": results,
    }
    name = "training" if asked.device == "cpu" else f"training-{asked.device}"
    keep(record, f"benchmarks/{name}", asked.out, asked.quick)
    return record


if __name__ == "__main__":
    main()
