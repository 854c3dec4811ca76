"""The ladder of chapter 21 at the paper's sizes: what each step of speed is worth.

    python benchmarks/speed.py                               # the base model on a CPU
    python benchmarks/speed.py --device cuda --size big --max-tokens 25000
    python benchmarks/speed.py --quick            # the embedded grammar: seconds

Each step trains a fresh model of the same size on real text; the steps take turns, so
that a slow moment of the machine hits all alike. Counted are real target tokens, and
the operations that real tokens need as a share of what the machine makes in one large
matrix product of the same precision.
Writes transformer_lib/evidence/benchmarks/speed-DEVICE.json.

Record: benchmarks/speed-*.json
"""

import argparse
import tempfile
from pathlib import Path

import torch
from kept import keep, out_file
from training import SIZES, pairs_of, prepared

from transformer_lib.batches import Prepared
from transformer_lib.machine import PRECISIONS, environment_record, fast_precisions
from transformer_lib.speed import climb, ladder_on, matmul_ceiling
from transformer_lib.transformer import TransformerConfig

MORE = {
    "chunked loss": {"loss": "chunked"},
    "compiled": {"compiled": True},
    "packed rows": {"compiled": False, "feed": "packed"},
}


def main(arguments=None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--size", default="base", choices=SIZES)
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--max-tokens", type=int, default=1280)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--updates", type=int, default=2, help="of each, each round")
    parser.add_argument("--compiled", action="store_true", help="and that step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--data", type=Path, help="a folder that prepare wrote")
    parser.add_argument("--quick", action="store_true", help="a tiny model, one round")
    parser.add_argument("--out", type=out_file, help="where the figures are written")
    asked = parser.parse_args(arguments)
    if asked.quick:
        asked.size, asked.max_tokens = "tiny", 400
        asked.rounds = asked.updates = 1
    torch.set_num_threads(asked.threads)
    pairs = None
    if not (asked.quick or asked.data):
        pairs = pairs_of("tatoeba-en-de", 60_000)
    name = "tatoeba-en-de"
    if pairs is None and not asked.data:  # the grammar has few words
        name, asked.vocab_size = "grammar-en-de", 340
        print("on the embedded grammar")
    changes = ladder_on(asked.device) | ({} if asked.quick else MORE)
    if asked.device == "cpu" or not asked.compiled:
        changes.pop("compiled", None)  # chapter 21 compiles one layer on a CPU
    with tempfile.TemporaryDirectory() as folder:
        if asked.data:
            ready, name = Prepared.load(asked.data), "given"
        else:
            ready = prepared(pairs or pairs_of(name, 1000), folder, asked.vocab_size)
        vocab_size = ready.tokenizer.vocab_size
        if asked.size == "big":
            config = TransformerConfig.big(vocab_size)
        else:
            config = TransformerConfig(vocab_size, **SIZES[asked.size])
        lines = climb(
            config,
            ready.train,
            asked.max_tokens,
            asked.updates,
            asked.rounds,
            changes,
            asked.device,
        )
        data = {"corpus": name, "sha256": ready.data["train"]["sha256"]}
    kinds = {name: PRECISIONS[name] for name in fast_precisions(asked.device)}
    ceiling = {
        name: matmul_ceiling(config, asked.max_tokens, kind, asked.device)
        for name, kind in kinds.items()
    }
    for line in lines:
        share = line["flops"] / line["seconds"] / ceiling[line["steps"]["precision"]]
        low, high = line["times_previous_interval"]
        print(
            f"{line['step']:28} {line['tokens_per_second']:10,.0f} tokens/s "
            f"{line['times_first']:6.2f}x   line before {line['times_previous']:.2f} "
            f"({low:.2f} to {high:.2f})   {share:5.0%} of the ceiling"
        )
    record = {
        "benchmark": "one update, step by step faster: real target tokens a second",
        "command": "python benchmarks/speed.py",
        "settings": {k: v for k, v in vars(asked).items() if k not in ("out", "data")},
        "parameters": config.num_parameters(),
        "data": data,
        "environment": environment_record(asked.device),
        "ceiling": ceiling,
        "ladder": lines,
    }
    keep(record, f"benchmarks/speed-{asked.device}", asked.out, asked.quick)
    return record


if __name__ == "__main__":
    main()
