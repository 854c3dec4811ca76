"""Train a parser of chapter 26, or go on training it, and write its record.

    python experiments/parsing.py RUN [--recipe craft-large] [--seconds 3000]

RUN is the folder of the run; a second call goes on where the first one stopped. On the
way, after each of STAGES of the updates, some development trees are parsed greedily:
the curve, in curve.json beside RUN. All choices are made on development trees: the
weights with the lowest loss or the mean of the last ones, by beam search. Then the test
trees are parsed once; each tenth of them with --every 10. The record goes to --out,
else to transformer_lib/evidence; the weights, in 16 bits, beside --out into the folder
averaged, else to transformer_lib/pretrained.

Record: craft-parsing.json, results/parser/*.json
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from transformer_lib.machine import default_device
from transformer_lib.parsing import BracketScore, load_trees, parse, train_parser
from transformer_lib.parsing.parser import score_parses
from transformer_lib.runs import Recipe, Run, train
from transformer_lib.storage import read_json, write_json

ROOT = Path(__file__).resolve().parents[1]
STAGES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)
SEARCH = {"alpha": 0.3, "max_extra": 300}


def scored(run, trees: list, beam_size: int) -> dict:
    """Scores of some trees, with the seconds that they took."""
    start = time.perf_counter()
    parses = parse(trees, run.model, run.tokenizer, beam_size, **SEARCH)
    seconds = time.perf_counter() - start
    return score_parses(trees, parses) | {"seconds": seconds}


def train_in_stages(recipe: Recipe, folder: Path, given, few: list) -> Iterator[dict]:
    """Train, and give a point of the curve after each stage, also those of before."""
    path = folder.parent / "curve.json"
    curve = json.loads(path.read_text("utf-8")) if path.exists() else []
    yield from curve
    until, run = time.monotonic() + given.seconds, None
    for share in STAGES:
        step = max(1, round(share * recipe.max_steps))
        if any(point["updates"] >= step for point in curve):
            continue
        left = until - time.monotonic()
        if left <= 0:
            return
        how = {"device": given.device, "max_seconds": left}
        if run is None:  # the treebank is prepared once
            run = train_parser(replace(recipe, max_steps=step), folder, **how)
        else:
            now, ready = replace(run.recipe, max_steps=step), folder / "trees/prepared"
            run = train(now, folder, ready, **how)
        if run.progress.step < step:
            return
        last = Run.load(folder, given.device, "last")
        point = {"updates": run.progress.step, "tokens": run.progress.tokens}
        point |= {"valid_loss": run.history[-1]["valid_loss"]}
        curve.append(point | scored(last, few, 1))
        write_json(path, curve)
        print(json.dumps(curve[-1]), flush=True)
        yield curve[-1]


def choose_weights(folder: Path, device: str, few: list, beam_size: int) -> tuple:
    """The run with the better of two kinds of weights, and F1 of both."""
    runs = {name: Run.load(folder, device, name) for name in ("best", "average")}
    f1 = {name: scored(run, few, beam_size)["f1"] for name, run in runs.items()}
    return runs[max(f1, key=f1.get)], f1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--recipe", default="craft-large")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--device", help="cpu or cuda (what is there)")
    parser.add_argument("--out", type=Path, help="where the record goes")
    parser.add_argument("--every", type=int, default=1, help="one test tree in so many")
    parser.add_argument("--some", type=int, default=4, help="one development tree in")
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--beams", type=int, nargs="*", default=[1, 4, 10])
    given = parser.parse_args()
    given.device = default_device(given.device)
    recipe = Recipe.load(given.recipe)
    name = recipe.corpus.partition("+")[0]
    few = load_trees(name, "valid").trees[:: given.some]
    curve = list(train_in_stages(recipe, given.run, given, few))
    run, chosen = choose_weights(given.run, given.device, few, given.beam)
    beams = {str(width): scored(run, few, width) for width in given.beams}
    bank = load_trees(name, "test")
    trees = bank.trees[:: given.every]
    start = time.perf_counter()
    parses = parse(trees, run.model, run.tokenizer, given.beam, show=True, **SEARCH)
    seconds = time.perf_counter() - start
    groups = {"all": score_parses(trees, parses)}
    limit = recipe.max_length // (2 if recipe.corpus.endswith("+slots") else 1)
    for part, long in (("within", False), ("beyond", True)):
        those = [i for i, t in enumerate(trees) if (len(t.words) > limit) == long]
        if those:
            some = [trees[i] for i in those], [parses[i] for i in those]
            groups[part] = score_parses(*some)
    each = [BracketScore.of(t, p.tree) for t, p in zip(trees, parses, strict=True)]
    data = read_json(given.run / "trees" / "prepared" / "data.json")
    in_a_pass = (data["train"]["tgt_tokens"] + data["train_pairs"]) / recipe.copies
    record = {
        "command": f"python experiments/parsing.py RUN --recipe {recipe.name}",
        "recipe": asdict(replace(recipe, vocab_size=run.recipe.vocab_size)),
        "seed": recipe.seed,
        "parameters": run.model.config.num_parameters(),
        "data": run.data | {"corpus": recipe.corpus},
        "environment": run.environment,
        "finished": run.progress.step >= recipe.max_steps,
        "updates": run.progress.step,
        "tokens": run.progress.tokens,
        "passes": run.progress.tokens / in_a_pass,
        "seconds": run.progress.history[-1]["seconds"],
        "chosen_by_f1": chosen,
        "weights": run.record,
        "f1": groups["all"]["f1"],
        "scores": {k: {"value": v["f1"]} | v for k, v in groups.items()},
        "search": {"beam_size": given.beam, **SEARCH, "seconds": seconds},
        "test": {
            "sha256": bank.sha256,
            "trees": len(bank),
            "every": given.every,
            "longest_within": limit,
        },
        "development": {"trees": len(few), "every": given.some},
        "beams": beams,
        "curve": curve,
        "history": run.progress.history,
        "counts": [[s.matched, s.gold, s.parsed] for s in each],
    }
    evidence = ROOT / "transformer_lib" / "evidence" / f"{recipe.name}.json"
    write_json(given.out or evidence, record)
    models = ROOT / "transformer_lib" / "pretrained"
    folder = given.out.parent / "averaged" if given.out else models / recipe.name
    short = {"updates": run.progress.step, "test_f1": record["f1"]}
    run = replace(run, data=record["data"])
    run.save_pretrained(folder, record=run.record | short)


if __name__ == "__main__":
    main()
