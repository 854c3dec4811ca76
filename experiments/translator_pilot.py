"""Train the shipped model a little longer, in one of several ways, and compare.

    python experiments/translator_pilot.py WAY --run-dir DIR --out FILE

The model learned much of its text by heart, so which way of training on makes it better
at sentences that it has not seen? Each way gets equally many updates of equally many
tokens. The test set is not looked at: a pilot is for choosing. Nor is the validation
part as a whole: much of it differs by one word from a training sentence, which rewards
learning by heart. The scores are of those validation pairs alone whose German side has
no such neighbor. A run stopped goes on from its last checkpoint.

Record: results/translator-pilot/*.json
"""

import argparse
from dataclasses import asdict
from pathlib import Path

from fine_tuning import scores_of

from transformer_lib.corpora import load_corpus
from transformer_lib.corpora.known import hash_pairs
from transformer_lib.machine import default_device
from transformer_lib.runs import Recipe, Run, load_pretrained, train
from transformer_lib.storage import write_json

START, RECIPE = "tatoeba-en-de", "tatoeba-en-de-longer"
WAYS = {
    "as-before": {},
    "bpe-dropout": {
        "subword_sampling": 0.1,
        "copies": 4,
    },  # three of four copies cut at random
    "dropout0.3": {"dropout": 0.3},
}


def with_gaps(sentence: str) -> set[str]:
    """The sentence with a gap, once for each of its words."""
    words = sentence.split()
    return {" ".join([*words[:i], "_", *words[i + 1 :]]) for i in range(len(words))}


def without_neighbors(pairs: list, known: list) -> list:
    """The pairs whose target differs from each known one in more than one word."""
    gaps = set().union(*(with_gaps(target) for _, target in known))
    return [pair for pair in pairs if gaps.isdisjoint(with_gaps(pair[1]))]


def run(asked: argparse.Namespace) -> dict:
    """Train from the last checkpoint on, and score the mean of the last weights."""
    changes = dict(WAYS[asked.way])
    base = Recipe.load(RECIPE)
    model = base.model | {"dropout": changes.pop("dropout", base.model["dropout"])}
    recipe = Recipe.load(
        RECIPE,
        name=f"translator-pilot-{asked.way}",
        model=model,
        start_from=str(asked.start),
        max_steps=asked.steps,
        warmup=asked.steps // 5,
        lr_factor=0.2,
        validate_every=asked.steps // 15,
        keep_last=5,
        seed=asked.seed,
        precision=asked.precision,
        **changes,
    )
    done = train(recipe, asked.run_dir, device=asked.device, show=False)
    train_pairs, valid_pairs = (
        list(load_corpus(recipe.corpus, name).pairs) for name in ("train", "valid")
    )
    pairs = without_neighbors(valid_pairs, train_pairs)
    chosen = Run.load(asked.run_dir, asked.device, "average")
    before, after = (
        scores_of(
            model, tokenizer, {"recipe": asdict(recipe)}, pairs, beam_size=4, alpha=0.6
        )
        for model, tokenizer in (
            load_pretrained(asked.start, asked.device)[:2],
            (chosen.model, chosen.tokenizer),
        )
    )
    return {
        "way": asked.way,
        "seed": asked.seed,
        "recipe": asdict(recipe) | {"start_from": Path(recipe.start_from).name},
        "data": done.data,
        "environment": done.environment,
        "updates": done.progress.step,
        "tokens": done.progress.tokens,
        "seconds": round(done.progress.seconds),
        "averaged": chosen.record["averaged"],
        "valid": {
            "pairs": len(valid_pairs),
            "without_neighbors": len(pairs),
            "sha256": hash_pairs(pairs),
        },
        "decoding": "beam 4, alpha 0.6, sentence by sentence, at most source + 50 "
        "tokens",
        "history": done.history,
        "before": before,
        "after": after,
    }


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", default=START, help="the model that goes on")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--device", help="cpu or cuda (what is there)")
    asked = parser.parse_args(given)
    asked.device = default_device(asked.device)
    return asked


if __name__ == "__main__":
    asked = arguments()
    write_json(asked.out, run(asked))
