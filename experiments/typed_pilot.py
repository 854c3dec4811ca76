"""The first updates of the translator for text as people type it, at some rate.

    python experiments/typed_pilot.py FACTOR --text DIR --run-dir DIR --out FILE

Trains the recipe tatoeba-en-de-typed with another factor of the learning rate, for so
many updates. Batches and rate do not depend on where a run ends, so the better of the
runs is the beginning of the whole one, which goes on in its folder. Validation pairs
alone are looked at.

Record: results/translator-typed-pilot/*.json
"""

import argparse
from dataclasses import asdict
from pathlib import Path

import translator_text

from transformer_lib.machine import default_device
from transformer_lib.runs import Recipe, train
from transformer_lib.storage import write_json


def run(asked: argparse.Namespace) -> dict:
    """Train up to an update, and say how the loss fell."""
    recipe = Recipe.load(asked.recipe, lr_factor=asked.factor)
    data = translator_text.ready(recipe, asked.text)

    def enough(history: list[dict]) -> bool:
        return history[-1]["step"] >= asked.steps

    done = train(recipe, asked.run_dir, data, device=asked.device, callbacks=[enough])
    history = [row for row in done.history if row["step"] <= asked.steps]
    return {
        "recipe": asdict(recipe),
        "data": done.data | {"corpus": recipe.corpus},
        "environment": done.environment,
        "valid_loss": history[-1]["valid_loss"],
        "history": history,
    }


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("factor", type=float)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--recipe", default="tatoeba-en-de-typed")
    parser.add_argument("--device", help="cpu or cuda (what is there)")
    asked = parser.parse_args(given)
    asked.device = default_device(asked.device)
    return asked


if __name__ == "__main__":
    asked = arguments()
    write_json(asked.out, run(asked))
