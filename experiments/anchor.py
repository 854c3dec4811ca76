"""Hugging Face's Marian, trained on the text of one of our recipes: an outside anchor.

    python experiments/anchor.py tatoeba-en-de --run-dir DIR --out FILE

What is shared with our run: the pieces, the division into training, validation and test
pairs, the batches and their order, and the numbers of the recipe (size, dropout and
when it begins, smoothing, schedule, updates, precision, how many of the last weights
are averaged).
What is not ours: the model and, without --begin ours, its first weights (transformers),
the loss and Adam (torch), the beam search (transformers' generate, beam 4), and the
score (sacreBLEU itself).

A run stopped goes on from its last checkpoint, to the same result: each update draws
its dropout from a seed of its own. Writes one JSON.

Record: results/anchor/*.json, results/anchor-*/*.json
"""

import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import sacrebleu
import torch
import torch.nn.functional as F
from evidence import some_of
from torch import nn

from transformer_lib.batches import (
    Batch,
    TokenPairs,
    batches,
    make_batch,
    plan_batches,
    tokenize_pairs,
)
from transformer_lib.corpora import load_corpus
from transformer_lib.export import to_marian
from transformer_lib.export.marian import marian_config
from transformer_lib.fine_tuning import recipe_for
from transformer_lib.machine import environment_record
from transformer_lib.runs import Recipe
from transformer_lib.runs.setup import all_pairs, data_record, ready_data
from transformer_lib.runs.trainer import lr_at
from transformer_lib.storage import whole_file, write_json
from transformer_lib.tokenizer import BOS, EOS, PAD
from transformer_lib.transformer import Transformer, TransformerConfig


def endless(pairs: TokenPairs, recipe: Recipe) -> Iterator[list[int]]:
    """The batches of our run, pass by pass."""
    for epoch in itertools.count():
        yield from plan_batches(pairs, recipe.max_tokens, recipe.seed, epoch)


def set_dropout(model: nn.Module, on: bool) -> None:
    """Switch a Marian's dropout; its layers hold the probability as a number."""
    config = model.config
    for name, module in model.named_modules():
        if hasattr(module, "dropout"):
            p = config.attention_dropout if name.endswith("_attn") else config.dropout
            module.dropout = p if on else 0.0


def summed_loss(model: nn.Module, batch: Batch, label_smoothing: float) -> tuple:
    """Sum of the losses of a batch's target tokens, and how many there are."""
    logits = model(
        input_ids=batch.src_ids,
        attention_mask=batch.src_ids != PAD,
        decoder_input_ids=batch.tgt_in,
        use_cache=False,
    ).logits
    loss = F.cross_entropy(
        logits.float().flatten(0, 1),
        batch.tgt_out.flatten(),
        ignore_index=PAD,
        label_smoothing=label_smoothing,
        reduction="sum",
    )
    return loss, int((batch.tgt_out != PAD).sum())


@torch.inference_mode()
def loss_on(model: nn.Module, pairs: TokenPairs, recipe: Recipe, device) -> float:
    """Nats a target token, without smoothing."""
    model.eval()
    total = count = 0
    for batch in batches(pairs, recipe.max_tokens):
        loss, tokens = summed_loss(model, batch.to(device), 0.0)
        total, count = total + loss.item(), count + tokens
    model.train()
    return total / count


@torch.inference_mode()
def translated(model: nn.Module, tokenizer, texts: list[str], device) -> list[str]:
    """Beam 4 as `generate` does it, sentences of like length together."""
    model.eval()
    rows = [[*ids, EOS] for ids in tokenizer.encode_all(texts)]
    order, out = sorted(range(len(rows)), key=lambda i: len(rows[i])), {}
    for start in range(0, len(order), 32):
        some = order[start : start + 32]
        longest = max(len(rows[i]) for i in some)
        ids = torch.tensor([rows[i] + [PAD] * (longest - len(rows[i])) for i in some])
        ids = ids.to(device)
        said = model.generate(
            input_ids=ids,
            attention_mask=ids != PAD,
            num_beams=4,
            length_penalty=0.6,
            max_new_tokens=longest + 50,
            do_sample=False,
            bad_words_ids=[[PAD], [BOS]],
        )
        for i, row in zip(some, said.tolist(), strict=True):
            out[i] = tokenizer.decode([token for token in row if token > EOS])
    return [out[i] for i in range(len(texts))]


def scores_of(outputs: list[str], references: list[str]) -> dict:
    found = {}
    for name, metric in (
        ("sacreBLEU", sacrebleu.BLEU()),
        ("chrF2", sacrebleu.CHRF()),
    ):
        value = metric.corpus_score(outputs, [references]).score
        found[name] = {"value": value, "signature": str(metric.get_signature())}
    return found


def run(
    recipe: Recipe,
    run_dir: Path,
    device: str,
    split: str = "test",
    data_dir: Path | None = None,
    begin: str = "theirs",
) -> dict:
    """Train from the last checkpoint on, average, and score on a split."""
    from transformers import MarianMTModel

    run_dir.mkdir(parents=True, exist_ok=True)
    ready = ready_data(recipe, run_dir, data_dir)
    torch.manual_seed(recipe.seed)
    config = TransformerConfig(ready.tokenizer.vocab_size, **recipe.model)
    if begin == "ours":
        model = to_marian(Transformer(config))
    else:
        model = MarianMTModel(marian_config(config))
    if device == "cpu" and recipe.precision != "float32":
        # In 16 bits torch's fused attention is slow on its way back on a CPU.
        model.set_attn_implementation("eager")
    model = model.to(device).train()
    adam = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9, fused=True)
    kept, at = run_dir / "last.pt", {"step": 0, "tokens": 0, "seconds": 0.0}
    at["history"] = []
    if kept.exists():
        state = torch.load(kept, weights_only=True, map_location=device)
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])
        at = state["at"]
    began, before = time.monotonic(), at["seconds"]
    pairs = all_pairs(recipe, ready)
    plan = endless(pairs, recipe)
    for _ in range(at["step"]):
        next(plan)
    low = {"float32": torch.float32, "bfloat16": torch.bfloat16}[recipe.precision]
    while at["step"] < recipe.max_steps:
        at["step"] += 1
        step = at["step"]
        torch.manual_seed(recipe.seed * 1_000_000 + step)
        batch = make_batch(pairs, next(plan)).to(device)
        set_dropout(model, step > recipe.dropout_after)
        rate = lr_at(recipe, config.d_model, step)
        adam.param_groups[0]["lr"] = rate
        with torch.autocast(device.split(":")[0], low, low != torch.float32):
            loss, tokens = summed_loss(model, batch, recipe.label_smoothing)
        adam.zero_grad()
        (loss / tokens).backward()
        adam.step()
        at["tokens"] += tokens
        if step % recipe.validate_every == 0 or step == recipe.max_steps:
            found = loss_on(model, ready.valid, recipe, device)
            at["seconds"] = before + time.monotonic() - began
            now = {name: at[name] for name in ("step", "tokens", "seconds")}
            now |= {"train_loss": loss.item() / tokens, "valid_loss": found}
            at["history"].append(now)
            weights = model.state_dict()
            with whole_file(run_dir / f"step-{step:06d}.pt") as file:
                torch.save(weights, file)
            with whole_file(kept) as file:
                state = {"model": weights, "adam": adam.state_dict(), "at": at}
                torch.save(state, file)
            for old in sorted(run_dir.glob("step-*.pt"))[: -max(recipe.keep_last, 1)]:
                old.unlink()
            print(
                f"{step:,} updates, {at['tokens']:,} tokens, validation "
                f"{found:.3f}, {at['seconds'] / 60:.1f} min",
                flush=True,
            )
    files = sorted(run_dir.glob("step-*.pt"))
    states = [torch.load(f, weights_only=True, map_location=device) for f in files]
    mean = {
        name: sum(s[name].float() for s in states) / len(states) for name in states[0]
    }
    model.load_state_dict(mean)
    test = load_corpus(recipe.corpus, split)
    sources, references = (list(side) for side in zip(*test.pairs, strict=True))
    outputs = translated(model, ready.tokenizer, sources, device)
    some = tokenize_pairs(some_of(test.pairs), ready.tokenizer, recipe.max_length)
    import transformers

    return {
        "recipe": asdict(recipe),
        "model": f"transformers {transformers.__version__}, MarianMTModel",
        "begin": begin,
        "attention": model.config._attn_implementation,
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "data": data_record(ready),
        "environment": environment_record(device),
        "tokens": at["tokens"],
        "seconds": round(at["seconds"]),
        "history": at["history"],
        "averaged": [int(f.stem.split("-")[1]) for f in files],
        "test_set": test.name,
        "test_sha256": test.sha256,
        "sentences": len(test),
        f"{split}_loss": loss_on(
            model, tokenize_pairs(test.pairs, ready.tokenizer), recipe, device
        ),
        "losses": {split: loss_on(model, some, recipe, device)},  # as in our records
        "scores": scores_of(outputs, references),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help="a recipe of the library, or a TOML file")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="replace a setting of the recipe; can be repeated",
    )
    parser.add_argument(
        "--split",
        choices=("valid", "test"),
        default="test",
        help="what is scored (test)",
    )
    parser.add_argument(
        "--begin",
        choices=("theirs", "ours"),
        default="theirs",
        help="whose weights it begins with (theirs)",
    )
    parser.add_argument("--data", type=Path, help="what prepare wrote")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    recipe = recipe_for(asked.recipe, asked.data, asked.set)
    record = run(
        recipe, asked.run_dir, asked.device, asked.split, asked.data, asked.begin
    )
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(asked.out, record)


if __name__ == "__main__":
    main()
