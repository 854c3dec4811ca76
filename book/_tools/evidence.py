"""Train a recipe, score it on its test set, and keep the record.

    python book/_tools/evidence.py tatoeba-en-de [--run-dir DIR] [--max-minutes M]

An interrupted run goes on where it stopped. Writes evidence/RECIPE.json: recipe, data
hash, hardware, versions, commit, history, scores with their signatures, and the
translation of each test sentence beside a hash that says of which.
"""

import argparse
import math
from dataclasses import asdict
from pathlib import Path

import torch

from transformer_lib.evaluation import sacre_bleu, translate
from transformer_lib.text import load_corpus
from transformer_lib.training import (
    Recipe,
    pair_key,
    runs_folder,
    train,
    write_json,
)

ROOT = Path(__file__).resolve().parents[2]


def record_of(run) -> dict:
    """Everything that the book says of a run."""
    test = load_corpus(run.recipe.corpus, "test")
    sources, references = (list(side) for side in zip(*test.pairs, strict=True))
    outputs = translate(run.model, run.tokenizer, sources)
    score = asdict(sacre_bleu(outputs, references))
    score |= {
        "test_set": f"{test.name} test (Tatoeba Challenge v2021-08-07)",
        "sentences": len(test),
        "test_sha256": test.sha256,
        "decoding": "greedy, at most source + 50 tokens",
    }
    keys = [pair_key(pair) for pair in test.pairs]
    return {
        "recipe": asdict(run.recipe),
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "data": run.data,
        "environment": run.environment,
        "finished": run.progress.step >= run.recipe.max_steps,
        "history": run.history,
        "scores": {"sacreBLEU": score},
        "outputs": dict(zip(keys, outputs, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", help="a recipe of the library, or a TOML file")
    parser.add_argument("--run-dir", type=Path, help="folder of the run")
    parser.add_argument("--max-minutes", type=float, default=math.inf)
    asked = parser.parse_args()
    recipe = Recipe.load(asked.recipe)
    run_dir = asked.run_dir or runs_folder() / recipe.name
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run = train(recipe, run_dir, device, max_seconds=60 * asked.max_minutes)
    path = ROOT / "evidence" / f"{recipe.name}.json"
    path.parent.mkdir(exist_ok=True)
    write_json(path, record_of(run))
    print(f"The record is in {path.relative_to(ROOT)}.")


if __name__ == "__main__":
    main()
