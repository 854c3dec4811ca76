"""Train a parser for its first updates, and look whether its places become alike.

    python experiments/parser_places.py RECIPE --run-dir DIR --out FILE

Each 250 of the first 2,000 updates, on development sentences: the mean cosine between
the vectors of two places of one sentence, before the first layer of the encoder and
after each, and the loss with the right sentence and with another one, about as long.
Stopped, it goes on from the last checkpoint. Writes one JSON.

Record: results/parser-places/*.json
"""

import argparse
from pathlib import Path

from alike_places import SENTENCES, measure
from evidence import some_of

from transformer_lib.batches import Prepared
from transformer_lib.corpora import load_corpus
from transformer_lib.corpora.known import hash_pairs
from transformer_lib.machine import default_device
from transformer_lib.parsing import train_parser
from transformer_lib.runs import Recipe
from transformer_lib.runs.checkpoints import (
    load_weights,
    step_files,
    step_of,
    weights_in,
)
from transformer_lib.storage import write_json


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("recipe", help="a recipe of a parser, such as craft-medium")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--precision", default="float32")
    given = parser.parse_args(arguments)
    recipe = Recipe.load(
        given.recipe,
        max_steps=given.steps,
        keep_last=8,
        validate_every=given.steps // 8,
        precision=given.precision,
    )
    run = train_parser(recipe, given.run_dir, device=given.device, show=False)
    run.model.to("cpu")
    corpus = Prepared.load(given.run_dir / "trees" / "prepared").data["corpus"]
    pairs = some_of(load_corpus(corpus, "valid").pairs, SENTENCES)
    curve = []
    for file in step_files(given.run_dir):
        load_weights(run.model, weights_in(file))
        point = measure(run, pairs) | {"updates": step_of(file)}
        record = {key: point.pop(key) for key in ("recipe", "data")}
        curve.append(point)
        print(point, flush=True)
    record["data"] |= {"corpus": recipe.corpus}  # and not where this run keeps it
    write_json(
        given.out,
        {
            "command": f"python experiments/parser_places.py {given.recipe}",
            **record,
            "environment": run.environment,
            "tokens": run.progress.tokens,
            "seconds": run.history[-1]["seconds"],
            "development": {"pairs": len(pairs), "sha256": hash_pairs(pairs)},
            "curve": curve,
        },
    )


if __name__ == "__main__":
    main()
