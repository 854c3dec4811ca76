"""Train the parser of chapter 17, or go on training it, and write its record.

    python book/_tools/parsing.py RUN [--seconds 3000] [--every 10] [--beam 4]

RUN is the folder of the run. The record goes to transformer_lib/evidence, the
weights in 16 bits to transformer_lib/pretrained/craft-parsing. A second call with more
seconds goes on where the first one stopped. With --every 10, each tenth sentence of the
test split is scored; all of them with --every 1. Of the best weights and the mean of
the last ones, those are taken that do better on a few development sentences. What the
record said of the same run when it was shorter, stays in it as "earlier".
"""

import argparse
import dataclasses
import json
import math
import time
from pathlib import Path

from transformer_lib.parsing import (
    evaluate_parser,
    load_trees,
    train_parser,
)
from transformer_lib.training import (
    Recipe,
    load_run,
    save_pretrained,
    write_json,
)

ROOT = Path(__file__).resolve().parents[2]


def timed(model, tokenizer, trees, max_length, **search) -> dict:
    """Scores of some trees, with the seconds that they took."""
    start = time.perf_counter()
    scores = evaluate_parser(model, tokenizer, trees, max_length, **search)
    return scores | {"seconds": time.perf_counter() - start}


def earlier(path: Path, run) -> list[dict]:
    """What a record says of the same run with fewer updates: updates, F1, mended."""
    if not path.exists():
        return []
    old = json.loads(path.read_text("utf-8"))
    if old["environment"] != run.environment or old["updates"] >= run.progress.step:
        return []  # another run, or the same state of it
    scores = old["scores"]["all"]
    mended = sum(scores["faults"].values()) / scores["sentences"]
    now = {"updates": old["updates"], "f1": scores["f1"], "mended": mended}
    return [*old.get("earlier", []), now]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--recipe", default="craft-parsing")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--beams", type=int, nargs="*", default=[1, 4, 21])
    parser.add_argument("--sample", type=int, default=100, help="sentences for --beams")
    given = parser.parse_args()
    recipe = Recipe.load(given.recipe)
    if given.seconds:
        train_parser(recipe, given.run, device="cpu", max_seconds=given.seconds)
    name = recipe.corpus.partition("+")[0]
    search = {"alpha": 0.3, "max_extra": 300}
    few = [t for t in load_trees(name, "valid").trees if len(t.words) <= 40]
    few = few[: given.sample]
    chosen = {}  # F1 on a few sentences that are not of the test split
    for weights in ("best", "average"):
        run = load_run(given.run, weights=weights)
        scores = evaluate_parser(run.model, run.tokenizer, few, beam_size=1, **search)
        chosen[weights] = scores["all"]["f1"]
    run = load_run(given.run, weights=max(chosen, key=chosen.get))
    run = dataclasses.replace(run, data=run.data | {"corpus": recipe.corpus})
    model, tokenizer, longest = run.model, run.tokenizer, recipe.max_length
    beams = {}
    for width in given.beams:
        scores = timed(model, tokenizer, few, None, beam_size=width, **search)
        beams[str(width)] = scores["all"] | {"seconds": scores["seconds"]}
    bank = load_trees(name, "test")
    scores = timed(model, tokenizer, bank.trees[:: given.every], longest,
                   beam_size=given.beam, show=True, **search)  # fmt: skip
    seconds = scores.pop("seconds")
    path = ROOT / "transformer_lib" / "evidence" / f"{recipe.name}.json"
    record = {
        "earlier": earlier(path, run),
        "command": "python book/_tools/parsing.py RUN", "chosen_by_f1": chosen,
        "recipe": dataclasses.asdict(run.recipe),
        "parameters": model.config.num_parameters(),
        "data": run.data, "environment": run.environment,
        "history": run.progress.history, "weights": run.record,
        "updates": run.progress.step, "seconds": run.progress.history[-1]["seconds"],
        "search": {"beam_size": given.beam, **search, "seconds": seconds},
        "test": {"sha256": bank.sha256, "trees": len(bank), "every": given.every},
        "scores": scores, "beams": beams,
    }  # fmt: skip
    write_json(path, record)
    folder = ROOT / "transformer_lib" / "pretrained" / recipe.name
    short = {"updates": run.progress.step, "test_f1": scores["all"]["f1"]}
    save_pretrained(run, folder, record=run.record | short)


if __name__ == "__main__":
    main()
