"""search.py SETTINGS.toml [--runs FOLDER]: train variations, record what each is worth.

Writes SETTINGS.json beside the settings, after each variation; one that is there is
not run again. The loss is given in nats per character of the reference, since pieces
of different vocabularies cannot be compared. The change "subword_sampling" is not a
recipe's: the cuts of the training text are drawn once for each pair, which is all that
a budget of less than one pass can see of it.

Record: search-en-de.json
"""

import argparse
import json
import math
import time
import tomllib
from pathlib import Path

import torch

from transformer_lib.batches import prepare
from transformer_lib.corpora import load_corpus
from transformer_lib.evaluation import perplexity, sacre_bleu
from transformer_lib.machine import environment_record
from transformer_lib.runs import Recipe, train
from transformer_lib.storage import write_json
from transformer_lib.tokenizer import Tokenizer
from transformer_lib.translator import translate


def varied(base: dict, changes: dict) -> dict:
    """The base's settings with some replaced; "model.dropout" reaches inside."""
    settings = json.loads(json.dumps(base))
    for name, value in changes.items():
        place = settings
        *path, last = name.split(".")
        for part in path:
            place = place[part]
        place[last] = value
    return settings


class Drawing(Tokenizer):
    """A tokenizer that draws each cut at random."""

    subword_sampling = 0.0

    def encode_all(self, texts, threads=1, subword_sampling=0.0):
        """Ids of many sentences, their cuts drawn."""
        return super().encode_all(
            texts, threads, subword_sampling or self.subword_sampling
        )


def measure(
    name: str, recipe: Recipe, runs: Path, sentences: int, subword_sampling: float = 0.0
) -> dict:
    """Train one variation and score it on validation sentences."""
    run_dir = runs / "".join(c if c.isalnum() else "-" for c in name)
    run_dir.mkdir(parents=True, exist_ok=True)
    data_dir = run_dir / "data"
    settings = {
        "model_type": recipe.model_type,
        "max_length": recipe.max_length,
        "max_words": recipe.max_words,
    }
    plain = prepare(recipe.corpus, data_dir, recipe.vocab_size, **settings)
    if subword_sampling:  # the same vocabulary, other cuts
        tokenizer = Drawing.load(data_dir / "tokenizer.model")
        tokenizer.subword_sampling = subword_sampling
        data_dir = run_dir / "data-drawn"
        prepare(recipe.corpus, data_dir, tokenizer=tokenizer, **settings)
    began = time.process_time()
    run = train(recipe, run_dir, data_dir, device="cpu", show=False)
    cpu_seconds = time.process_time() - began
    valid = load_corpus(recipe.corpus, "valid")
    loss = math.log(perplexity(run.model, plain.valid))
    pieces = sum(
        len(run.tokenizer.encode(target)) + 1
        for _, target in valid.pairs
        if len(run.tokenizer.encode(target)) < recipe.max_length
    )
    characters = sum(len(target) for _, target in valid.pairs)
    pairs = valid.pairs[:sentences]
    outputs = translate(run.model, run.tokenizer, [source for source, _ in pairs])
    score = sacre_bleu(outputs, [target for _, target in pairs])
    return {
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "updates": run.progress.step,
        "tokens": run.progress.tokens,
        "valid_loss_per_piece": loss,
        "valid_loss_per_character": loss * pieces / characters,
        "bleu": score.value,
        "signature": score.signature,
        "sentences": len(pairs),
        "cpu_seconds": cpu_seconds,
        "environment": environment_record(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("settings", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--sentences", type=int, default=1000)
    args = parser.parse_args()
    settings = tomllib.loads(args.settings.read_text(encoding="utf-8"))
    out = args.settings.with_suffix(".json")
    record = json.loads(out.read_text("utf-8")) if out.exists() else {"variations": {}}
    if record.setdefault("base", settings["base"]) != settings["base"]:
        parser.error(f"{out} was measured from another base; delete it to start again.")
    torch.set_num_threads(1)
    for name, changes in settings["variations"].items():
        if record["variations"].get(name, {}).get("changes") == changes:
            continue
        own = {"name": "search"} | {
            k: v for k, v in changes.items() if k != "subword_sampling"
        }
        recipe = Recipe(**varied(settings["base"], own))
        figures = measure(
            name,
            recipe,
            args.runs / args.settings.stem,
            args.sentences,
            changes.get("subword_sampling", 0.0),
        )
        record["variations"][name] = {"changes": changes, **figures}
        write_json(out, record)
        print(f"{name:40} {figures['bleu']:5.1f} BLEU", flush=True)


if __name__ == "__main__":
    main()
