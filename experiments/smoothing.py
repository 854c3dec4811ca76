"""Does label smoothing help BLEU? A small run of Table 3, scored on fresh pairs.

    python experiments/smoothing.py ROW SEED --run-dir DIR --out FILE
    python experiments/smoothing.py --compare

The rows are base and D-ls0.0. Each is scored on the test set, as all rows of the table,
and on 3,000 pairs without a near copy in the training text (fresh_split.py). --compare
says what came out, and refuses to before all runs of the queue are there.

Record: results/smoothing/*.json
"""

import argparse
import json
import statistics
from dataclasses import asdict
from pathlib import Path

from fresh_split import fresh_pairs

from transformer_lib.ablations import ablate, pooled_spread, t_quantile
from transformer_lib.batches import tokenize_pairs
from transformer_lib.batches.prepared import sample_pairs
from transformer_lib.corpora import load_corpus
from transformer_lib.corpora.known import hash_pairs
from transformer_lib.evaluation import chrf, sacre_bleu
from transformer_lib.machine import default_device
from transformer_lib.runs import Recipe, Run
from transformer_lib.storage import write_json
from transformer_lib.tokenizer import fold_text
from transformer_lib.training import validation_loss
from transformer_lib.translator import Translator

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "transformer_lib" / "evidence" / "results" / "smoothing"
RECIPE, ROWS, SEEDS = "table3-replica", ("base", "D-ls0.0"), range(8)


def fresh_for(run: Run) -> list[tuple]:
    """The fresh pairs for a run, whose training text is drawn again and compared.

    Raises:
        ValueError: If it is not what the run has read.
    """
    pairs = [(fold_text(en), de) for en, de in load_corpus(run.recipe.corpus).pairs]
    read = sample_pairs(pairs, run.recipe.max_pairs)
    if hash_pairs(read) != run.data["sha256"]:
        raise ValueError(f"run {run.recipe.name} has read another text than this one.")
    return fresh_pairs(pairs, read)


def scores_of(run: Run, pairs: list[tuple]) -> dict:
    """Loss, BLEU and chrF++ (beam 4, alpha 0.6) on some pairs."""
    sources, references = (list(side) for side in zip(*pairs, strict=True))
    translate = Translator(run.model, run.tokenizer, by_sentence=False)
    outputs = translate(sources, beam_size=4, alpha=0.6)
    tokens = tokenize_pairs(pairs, run.tokenizer)
    return {
        "pairs": len(pairs),
        "sha256": hash_pairs(pairs),
        "loss": validation_loss(run.model, tokens, run.recipe.max_tokens),
        "sacreBLEU": asdict(sacre_bleu(outputs, references)),
        "chrF++": asdict(chrf(outputs, references, word_order=2)),
    }


def run(asked: argparse.Namespace) -> dict:
    """Train a row from its last checkpoint on, and score it."""
    base = Recipe.load(asked.recipe)
    results = ablate(
        base,
        asked.run_dir,
        [asked.row],
        [asked.seed],
        split="test",
        device=asked.device,
        sentences=5000,
        show=False,
    )
    row = next(r for r in results if (r["row"], r["seed"]) == (asked.row, asked.seed))
    done = Run.load(asked.run_dir / f"{asked.row}-{asked.seed}", asked.device, "last")
    return row | {"fresh": scores_of(done, fresh_for(done))}


def compare(records: list[dict], level: float = 0.95) -> dict:
    """Mean difference of BLEU and of loss on the fresh pairs, base less D-ls0.0.

    Returns:
        For "bleu", "chrf" and "loss" the difference, and half of its interval by
        Student's t for two groups of equal spread.

    Raises:
        ValueError: If a run is missing.
    """
    by_row = {
        row: {r["seed"]: r["fresh"] for r in records if r["row"] == row} for row in ROWS
    }
    if any(set(seeds) != set(SEEDS) for seeds in by_row.values()):
        raise ValueError(f"{len(records)} runs of {len(ROWS) * len(SEEDS)} are there.")
    measures = {
        "bleu": lambda fresh: fresh["sacreBLEU"]["value"],
        "chrf": lambda fresh: fresh["chrF++"]["value"],
        "loss": lambda fresh: fresh["loss"],
    }
    found = {}
    for name, measure in measures.items():
        values = {row: [measure(by_row[row][s]) for s in SEEDS] for row in ROWS}
        ours, others = map(statistics.fmean, values.values())
        spread, freedom = pooled_spread(values)
        error = spread * (2 / len(SEEDS)) ** 0.5
        found[name] = {
            "difference": ours - others,
            "error": t_quantile(freedom, level) * error,
        }
    return found


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("row", choices=ROWS, nargs="?")
    parser.add_argument("seed", type=int, nargs="?")
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--recipe", default=RECIPE)
    parser.add_argument("--device", help="cpu or cuda (what is there)")
    parser.add_argument("--compare", action="store_true", help="say what came out")
    asked = parser.parse_args(given)
    if not asked.compare and None in (asked.seed, asked.run_dir, asked.out):
        parser.error("give ROW, SEED, --run-dir and --out, or --compare")
    asked.device = default_device(asked.device)
    return asked


if __name__ == "__main__":
    asked = arguments()
    if asked.compare:
        kept = [json.loads(p.read_text("utf-8")) for p in KEPT.glob("*.json")]
        for name, found in compare(kept).items():
            print(f"{name}: {found['difference']:+.3f} +- {found['error']:.3f}")
    else:
        write_json(asked.out, run(asked))
