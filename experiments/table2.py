"""A small Table 2: a Transformer, a recurrent and a convolutional translator.

    python experiments/table2.py KIND --seed 1 --run-dir DIR --out FILE
    python experiments/table2.py KIND --pilot --set lr_factor=0.5 ...

All three have the text, the vocabulary, the batches and their order, the loss, Adam and
the schedule of the recipe table3-replica, and about as many parameters. What differs is
the model, and what a pilot chose for it on validation pairs (CHOSEN): lr_factor of the
rate, and dropout. A rival trains until it has had the Transformer's updates, its
counted multiply-adds and its seconds of one core, which it reads from the Transformer's
result; at each of the three it is scored on the test set. A run stopped goes on from
its last checkpoint. Seconds are the processor's, so that others on the machine disturb
little.

Record: results/table2/*.json, results/table2-pilot/*.json, results/table2-rate/*.json
"""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from transformer_lib.batches import Batch, make_batch, pad, plan_batches, tokenize_pairs
from transformer_lib.complexity import Convolutional, Recurrent
from transformer_lib.corpora import load_corpus
from transformer_lib.decoding import FullSteps, output_limits, search
from transformer_lib.evaluation import chrf, sacre_bleu
from transformer_lib.fine_tuning import recipe_for
from transformer_lib.machine import environment_record
from transformer_lib.objective import build_optimizer, noam_lr
from transformer_lib.runs import Progress, Recipe, load_checkpoint, save_checkpoint
from transformer_lib.runs.checkpoints import load_tensors, load_weights, save_tensors
from transformer_lib.runs.setup import data_record, ready_data
from transformer_lib.storage import write_json
from transformer_lib.tokenizer import EOS, PAD, Tokenizer
from transformer_lib.training import BatchLoss, update, validation_loss
from transformer_lib.transformer import Embeddings, Transformer, TransformerConfig

KINDS = ("transformer", "recurrent", "convolutional")
PILOT = 2000  # updates
# What the pilot chose for each kind: settings of the recipe.
CHOSEN: dict[str, dict] = {
    "transformer": {"lr_factor": 1.0},
    "recurrent": {"lr_factor": 2.0},
    "convolutional": {"lr_factor": 2.0},
}
HIDDEN, LAYERS = 117, 6  # of the rivals, for as many parameters as the Transformer has


def max_length(recipe: Recipe) -> int:
    """Places of the longest source or output that a model may meet."""
    return 2 * recipe.max_length + 50


def made(kind: str, recipe: Recipe, vocab_size: int) -> Embeddings:
    """An untrained model of a kind."""
    torch.manual_seed(recipe.seed)
    base = recipe.model | {"max_length": max_length(recipe)}
    if kind == "transformer":
        return Transformer(TransformerConfig(vocab_size, **recipe.model))
    if kind == "recurrent":
        config = TransformerConfig(vocab_size, **base)
        return Recurrent(config, HIDDEN * config.d_model // 64)
    more = {"num_layers": LAYERS, "positions": "learned"}
    return Convolutional(TransformerConfig(vocab_size, **base | more))


def multiply_adds(loss_of: BatchLoss, batch: Batch) -> int:
    """Of one update: the way back costs twice the way there."""
    real = (batch.tgt_out != PAD).flatten().nonzero().squeeze(1)
    with FlopCounterMode(display=False) as counter:
        loss_of(batch, real, 0.0)
    return 3 * counter.get_total_flops() // 2


@torch.inference_mode()
def translated(
    model: Embeddings, tokenizer: Tokenizer, texts: list[str], most: int
) -> list[str]:
    """Beam 4, alpha 0.6, sentences of like length together; `most` places in each."""
    rows = [[*ids, EOS] for ids in tokenizer.encode_all(texts)]
    order, out = sorted(range(len(rows)), key=lambda i: len(rows[i])), {}
    for start in range(0, len(order), 64):
        some = order[start : start + 64]
        ids = pad([rows[i] for i in some])
        limits = output_limits(ids, 50).clamp(max=most - 1)  # without the start symbol
        found = search(FullSteps(model, ids), limits, 4, 0.6)
        for i, hypotheses in zip(some, found, strict=True):
            out[i] = tokenizer.decode(hypotheses[0].ids)
    return [out[i] for i in range(len(texts))]


def scores_of(model: Embeddings, tokenizer: Tokenizer, pairs: list, most: int) -> dict:
    """Loss, BLEU and chrF++ on some pairs."""
    model.eval()
    sources, references = (list(side) for side in zip(*pairs, strict=True))
    outputs = translated(model, tokenizer, sources, most)
    return {
        "loss": validation_loss(model, tokenize_pairs(pairs, tokenizer), 4000),
        "sacreBLEU": asdict(sacre_bleu(outputs, references)),
        "chrF++": asdict(chrf(outputs, references, word_order=2)),
    }


def enough(row: dict, budgets: dict[str, float]) -> bool:
    return all(row[name] >= budget for name, budget in budgets.items())


def trained(kind: str, recipe: Recipe, run_dir: Path, budgets: dict, longest: int):
    """Train until all budgets are spent: the model, its text, and where it stands."""
    run_dir.mkdir(parents=True, exist_ok=True)
    ready = ready_data(recipe, run_dir)
    model = made(kind, recipe, ready.tokenizer.vocab_size).train()
    optimizer, shared = build_optimizer(model), BatchLoss(model, recipe.chunk)
    last, d_model = run_dir / "last.safetensors", recipe.model["d_model"]
    at = load_checkpoint(last, model, optimizer) or Progress()
    before = at.history[-1] if at.history else {"operations": 0, "core_seconds": 0.0}
    plan = plan_batches(ready.train, recipe.max_tokens, recipe.seed, at.epoch)
    while at.step < longest and not (at.history and enough(at.history[-1], budgets)):
        began, counts, loss, tokens = time.process_time(), [], 0.0, 0
        for step in range(at.step + 1, at.step + recipe.validate_every + 1):
            if at.batch == len(plan):
                at.epoch, at.batch = at.epoch + 1, 0
                plan = plan_batches(
                    ready.train, recipe.max_tokens, recipe.seed, at.epoch
                )
            batch = make_batch(ready.train, plan[at.batch])
            if step % 100 == 1 or not counts:
                paused = time.process_time()
                counts.append(multiply_adds(shared, batch))
                began += time.process_time() - paused
            # Not lr_at: a rival may go on after the recipe's last update.
            rate = noam_lr(step, d_model, recipe.warmup, recipe.lr_factor)
            done = update(shared, optimizer, [batch], rate, recipe.label_smoothing)
            at.step, at.batch = step, at.batch + 1
            loss, tokens = loss + done.loss, tokens + done.tokens
        at.tokens += tokens
        seconds = time.process_time() - began
        operations = sum(counts) / len(counts) * recipe.validate_every
        before = {
            "step": at.step,
            "tokens": at.tokens,
            "operations": before["operations"] + operations,
            "core_seconds": before["core_seconds"] + seconds,
            "train_loss": loss / tokens,
            "valid_loss": validation_loss(model, ready.valid, recipe.max_tokens),
        }
        at.history.append(before)
        weights = dict(model.named_parameters())
        save_tensors(run_dir / f"step-{at.step:06d}.safetensors", weights, before)
        save_checkpoint(last, model, optimizer, at)
        print(
            f"{at.step:,} updates, {before['core_seconds']:,.0f} s, validation "
            f"{before['valid_loss']:.3f}",
            flush=True,
        )
    return model, ready, at


def run(kind: str, recipe: Recipe, asked: argparse.Namespace) -> dict:
    """Train and score one model; of a pilot, the loss on validation pairs alone."""
    budgets = {"step": PILOT if asked.pilot else recipe.max_steps}
    if asked.against:
        rows = json.loads(asked.against.read_text("utf-8"))["history"]
        budgets |= {name: rows[-1][name] for name in ("operations", "core_seconds")}
    longest = PILOT if asked.pilot else 20 * recipe.max_steps
    model, ready, at = trained(kind, recipe, asked.run_dir, budgets, longest)
    record = {
        "kind": kind,
        "recipe": asdict(recipe),
        "data": data_record(ready),
        "environment": environment_record("cpu"),
        "parameters": sum(p.numel() for p in model.parameters()),
        "budgets": budgets,
        "history": at.history,
        "valid_loss": at.history[-1]["valid_loss"],
    }
    if asked.pilot:
        return record
    pairs = list(load_corpus(recipe.corpus, "test").pairs)
    at_budget, scored = {}, {}
    for name, budget in budgets.items():
        row = next(row for row in at.history if row[name] >= budget)
        if (step := row["step"]) not in scored:
            file = asked.run_dir / f"step-{step:06d}.safetensors"
            load_weights(model, load_tensors(file)[0])
            scores = scores_of(model, ready.tokenizer, pairs, max_length(recipe))
            scored[step] = row | scores
        at_budget[name] = scored[step]
    return record | {"split": "test", "sentences": len(pairs), "at": at_budget}


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--recipe", default="table3-replica")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="replace a setting of the recipe; can be repeated",
    )
    parser.add_argument("--pilot", action="store_true", help=f"{PILOT:,} updates")
    parser.add_argument("--against", type=Path, help="the Transformer's result")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.set_defaults(data=None)
    asked = parser.parse_args(given)
    if asked.kind == KINDS[0]:
        asked.against = None
    if not asked.pilot:
        if asked.kind not in CHOSEN:
            parser.error(f"no pilot has chosen a rate for {asked.kind} so far.")
        asked.set = [f"{k}={v}" for k, v in CHOSEN[asked.kind].items()] + asked.set
    asked.set += [f"seed={asked.seed}", "validate_every=500"]
    return asked


if __name__ == "__main__":
    asked = arguments()
    recipe = recipe_for(asked.recipe, asked.data, asked.set)
    write_json(asked.out, run(asked.kind, recipe, asked))
