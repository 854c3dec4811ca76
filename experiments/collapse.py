"""Do wide encoders make all places alike, and do first weights decide it?

    python experiments/collapse.py DATA --valid FILE --size base --start chapter

Chapter 25 found it in small models: a post-norm encoder that begins with chapter 07's
weights makes all places of a sentence nearly the same vector, so that the decoder
cannot tell words apart, and stays so for thousands of updates; from N(0, 0.02) it does
not. Here the paper's base (512 wide, dropout 0.1) and big (1,024, dropout 0.3), 6
layers each, in bfloat16, with the paper's highest rate after a quarter of its warm-up,
and batches of some 8,000 target tokens. DATA is a folder that `prepare` wrote, FILE its
validation text. After some updates, on validation pairs: the mean cosine of two places
behind each layer, the loss, and the loss with the source of another sentence. The
record is written after each look.

Predicted before the first run, for the cosine behind the last layer after 1,000
updates: big from chapter 07's weights above 0.8, with another source less than 0.1 nats
worse; base from them below 0.8; both from N(0, 0.02) below 0.5, and more than 0.5 nats
worse with another source. The loss from N(0, 0.02) is lower at both sizes, by more than
0.2 nats.

Record: results/collapse/*.json
"""

import argparse
import math
import time
from dataclasses import asdict
from pathlib import Path

import torch
from alike_places import SENTENCES, look
from evidence import some_of

from transformer_lib.batches import Prepared, make_batch, plan_batches
from transformer_lib.corpora.known import hash_pairs
from transformer_lib.machine import default_device, environment_record
from transformer_lib.objective import build_optimizer, noam_lr
from transformer_lib.storage import write_json
from transformer_lib.training import update
from transformer_lib.transformer import Transformer, TransformerConfig, normal_weights

SIZES = {
    "tiny": lambda vocab_size: TransformerConfig(
        vocab_size, d_model=32, num_heads=2, num_layers=2, d_ff=64
    ),
    "base": TransformerConfig,
    "big": TransformerConfig.big,
}
LOOKS = (0, 100, 250, 500, 750, 1000, 1500, 2000, 3000, 4000, 6000, 8000)
WARMUP, FACTOR, SMOOTHING = 1000, 0.5, 0.1


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path, help="a folder that prepare wrote")
    parser.add_argument("--valid", type=Path, required=True, help="its validation text")
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--start", choices=("chapter", "normal"), default="chapter")
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--steps", type=int, default=max(LOOKS))
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args(arguments)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    ready = Prepared.load(asked.data)
    lines = asked.valid.read_text("utf-8").splitlines()
    pairs = some_of([tuple(line.split("\t")) for line in lines], SENTENCES)
    config = SIZES[asked.size](ready.tokenizer.vocab_size)
    torch.manual_seed(0)
    model = Transformer(config)
    if asked.start == "normal":
        normal_weights(model, 0.02)
    model.to(asked.device).train()
    optimizer = build_optimizer(model)
    record = {
        "command": f"python experiments/collapse.py --size {asked.size} "
        f"--start {asked.start}",
        "config": asdict(config),
        "parameters": config.num_parameters(),
        "max_tokens": asked.max_tokens,
        "rate": {"warmup": WARMUP, "factor": FACTOR},
        "seed": 0,
        "data": ready.data["train"]["sha256"],
        "pairs": ready.data["train"]["kept"],
        "validation": {"pairs": len(pairs), "sha256": hash_pairs(pairs)},
        "environment": environment_record(asked.device),
        "curve": [],
    }
    step = epoch = tokens = 0
    plan, began = iter(()), time.monotonic()
    while True:
        late = time.monotonic() - began > 60 * asked.minutes
        last = late or step == asked.steps
        if step in LOOKS or last:
            point = {"updates": step, "tokens": tokens}
            point["seconds"] = round(time.monotonic() - began, 1)
            point |= look(model.eval(), ready.tokenizer, pairs)
            model.train()
            record["curve"].append(point)
            write_json(asked.out, record)
            print(asked.size, asked.start, point, flush=True)
        if last:
            return
        rows = next(plan, None)
        if rows is None:
            plan = iter(plan_batches(ready.train, asked.max_tokens, 0, epoch))
            rows, epoch = next(plan), epoch + 1
        step += 1
        rate = noam_lr(step, config.d_model, WARMUP, FACTOR)
        batch = make_batch(ready.train, rows).to(model.device)
        done = update(model, optimizer, [batch], rate, SMOOTHING, 0, "bfloat16")
        tokens += done.tokens


if __name__ == "__main__":
    main()
