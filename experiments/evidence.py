"""Train a recipe, score it on its test set, and keep the record.

    python experiments/evidence.py RECIPE [--run-dir DIR] [--max-minutes M]
    python experiments/evidence.py RECIPE --run-dir DIR --score-only
    python experiments/evidence.py RECIPE --score-only --weights average
    python experiments/evidence.py RECIPE --text DIR   on the text of translator_text.py

An interrupted run goes on where it stopped. Writes
transformer_lib/evidence/RECIPE.json: recipe, data hash, hardware, versions, commit,
history, scores with their signatures for the best, the last and the averaged weights
(or for those that --weights names: "merged" is the mean of a run's averaged weights and
those that it started from), by greedy decoding and by beam search, and the
translation of each test sentence beside a hash that says of which. The headline is
the paper's way, averaged weights and beam 4, whichever scores best (or merged ones, if
they are named); losses on the three splits are of the same weights. --max-length says
at how many tokens a sentence is cut, as cut_length.py found it.

Record: tatoeba-en-de.json, tatoeba-en-de-longer.json, tatoeba-en-de-names.json,
tatoeba-en-de-robust-last.json,
results/translator/*.json, results/translator-typed/*.json,
results/translator-robust/*.json
"""

import argparse
import math
import random
from dataclasses import asdict, replace
from pathlib import Path

import translator_text
from respell import respelled

from transformer_lib.batches import tokenize_pairs
from transformer_lib.corpora import load_corpus
from transformer_lib.evaluation import chrf, sacre_bleu
from transformer_lib.export.onnx import rounded_to_8_bits
from transformer_lib.machine import default_device
from transformer_lib.runs import Recipe, Run, load_pretrained, runs_folder, train
from transformer_lib.runs.checkpoints import step_files
from transformer_lib.runs.folder import pair_key
from transformer_lib.storage import ensure_writable, write_json
from transformer_lib.tokenizer import fold_text
from transformer_lib.training import validation_loss
from transformer_lib.translator import Translator

ROOT = Path(__file__).resolve().parents[1]
DECODINGS = {
    1: "greedy, sentence by sentence, at most source + 50 tokens",
    4: "beam 4, alpha 0.6, sentence by sentence, at most source + 50 tokens",
}

SETS = {"tatoeba-en-de": " (Tatoeba Challenge v2021-08-07)"}


def loaded(run_dir: Path, device: str, weights: str) -> Run:
    """A run with these weights, means in half precision, as they are saved.

    Source of "merged": Wortsman et al. 2022, "Robust Fine-Tuning", section 3.
    """
    run = Run.load(run_dir, device, weights.replace("merged", "average"))
    if weights == "merged":
        start, *_ = load_pretrained(runs_folder() / run.recipe.start_from, device)
        for ours, theirs in zip(
            run.model.parameters(), start.parameters(), strict=True
        ):
            ours.data.lerp_(theirs.data, 0.5)
    if weights in ("average", "merged"):
        run.model.half().float()
    return run


def described(run: Run, weights: str) -> str:
    """Which weights these are, in words."""
    steps = run.record.get("averaged")
    if steps:
        first, last = steps[0], steps[-1]
        merged = f" and of {run.recipe.start_from}" * (weights == "merged")
        return (
            f"mean of {len(steps)}, updates {first:,} to {last:,}{merged}, "
            "in half precision"
        )
    return f"{weights}, update {run.record['step']:,}"


def translator(run: Run, max_length: int | None = None) -> Translator:
    """What from_pretrained gives for this run."""
    about = {"recipe": asdict(run.recipe)}
    return Translator(run.model, run.tokenizer, about, max_length=max_length)


def scored(
    run: Run, weights: str, beam_size: int, test, max_length: int | None = None
) -> tuple[dict, list[str]]:
    """BLEU and chrF of one choice of weights and decoding, and its translations."""
    sources, references = (list(side) for side in zip(*test.pairs, strict=True))
    outputs = translator(run, max_length)(sources, beam_size=beam_size)
    row = {"weights": described(run, weights), "decoding": DECODINGS[beam_size]}
    row["sacreBLEU"] = asdict(sacre_bleu(outputs, references))
    row["chrF2"] = asdict(chrf(outputs, references))
    print(f"{row['weights']}; {row['decoding']}: {row['sacreBLEU']['value']:.2f} BLEU")
    return row, outputs


def some_of(pairs: list, count: int = 1000) -> list:
    """The pairs of a split that a loss is taken on, always the same ones."""
    return random.Random(0).sample(pairs, min(count, len(pairs)))


def losses_of(run: Run) -> dict[str, float]:
    """Loss in nats per piece on some pairs of each split: no dropout, no smoothing."""
    found = {}
    for split in ("train", "valid", "test"):
        pairs = load_corpus(run.recipe.corpus, split).pairs
        pairs = [(fold_text(source), target) for source, target in pairs]
        kept = tokenize_pairs(some_of(pairs), run.tokenizer, run.recipe.max_length)
        found[split] = validation_loss(run.model, kept, 4096)
    return found


def choices_of(run: Run, run_dir: Path) -> list[str]:
    """Which weights of a run there are to choose from, the paper's choice last."""
    best_is_last = run.record["step"] == run.history[-1]["step"]
    choices = ["last"] if best_is_last else ["best", "last"]
    return choices + ["average"] * (len(step_files(run_dir)) > 1)


def record_of(
    run_dir: Path,
    device: str,
    choices: list[str] | None = None,
    max_length: int | None = None,
) -> dict:
    """Everything that the book says of a run; of these weights, else of all."""
    run = Run.load(run_dir, device)
    test = load_corpus(run.recipe.corpus, "test")
    if choices:
        choices = [c for c in (*choices_of(run, run_dir), "merged") if c in choices]
    else:
        choices = choices_of(run, run_dir)
    table = []
    for weights in choices:
        chosen = loaded(run_dir, device, weights)
        for beam_size in DECODINGS:
            row, outputs = scored(chosen, weights, beam_size, test, max_length)
            table.append(row)
    small = replace(chosen, model=rounded_to_8_bits(chosen.model))
    in_8_bits, _ = scored(small, weights, 4, test, max_length)
    in_8_bits["weights"] += ", matrices in 8 bits"
    table.insert(-1, in_8_bits)
    about = {key: table[-1][key] for key in ("weights", "decoding")} | {
        "test_set": f"{test.name} test{SETS.get(test.name, '')}",
        "sentences": len(test),
        "test_sha256": test.sha256,
    }
    keys = [pair_key(pair) for pair in test.pairs]
    return {
        "recipe": asdict(run.recipe),
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "data": run.data | {"corpus": run.recipe.corpus},
        "environment": run.environment,
        "finished": run.progress.step >= run.recipe.max_steps,
        "weights": weights,
        "max_length": max_length,
        "losses": {"weights": about["weights"], **losses_of(chosen)},
        "history": run.history,
        "scores": {name: table[-1][name] | about for name in ("sacreBLEU", "chrF2")},
        "choices": table,
        "outputs": dict(zip(keys, outputs, strict=True)),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", help="a recipe of the library, or a TOML file")
    parser.add_argument("--run-dir", type=Path, help="folder of the run")
    parser.add_argument("--max-minutes", type=float, default=math.inf)
    parser.add_argument("--text", type=Path, help="folder of the divided text")
    parser.add_argument("--score-only", action="store_true", help="train no further")
    kinds = ["best", "last", "average", "merged"]
    parser.add_argument("--weights", choices=kinds, nargs="+", help="only these")
    parser.add_argument("--max-length", type=int, help="tokens at which a line is cut")
    parser.add_argument("--device", help="cpu or cuda (what is there)")
    parser.add_argument("--out", type=Path, help="where the record goes")
    asked = parser.parse_args(arguments)
    recipe = Recipe.load(asked.recipe)
    run_dir = asked.run_dir or runs_folder() / recipe.name
    device = default_device(asked.device)
    path = asked.out or ROOT / "transformer_lib" / "evidence" / f"{recipe.name}.json"
    ensure_writable(path.parent, folder=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    ensure_writable(path)
    if not asked.score_only:
        data = translator_text.ready(recipe, asked.text) if asked.text else None
        start = runs_folder() / recipe.start_from
        if start.name == "respelled" and not start.exists():
            respelled(start.parent / "averaged", data).save_pretrained(start)
        if start.name == "merged" and not start.exists():
            loaded(start.parent, "cpu", "merged").save_pretrained(start)
        train(recipe, run_dir, data, device=device, max_seconds=60 * asked.max_minutes)
    write_json(path, record_of(run_dir, device, asked.weights, asked.max_length))
    print(f"The record is in {path}.")
    if len(step_files(run_dir)) > 1:  # what the headline is of, ready to be shipped
        loaded(run_dir, device, "average").save_pretrained(run_dir / "averaged")
    if "merged" in (asked.weights or []):
        loaded(run_dir, device, "merged").save_pretrained(run_dir / "merged")


if __name__ == "__main__":
    main()
