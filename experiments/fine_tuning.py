"""Fine-tune the shipped model on one origin of the mixed text, and score old and new.

    python experiments/fine_tuning.py --factor 0.05 --pairs 10000 --share 0.5
        --run-dir DIR --out FILE

The new text is multi30k (captions of photographs) of the mixed text in the folder that
TRANSFORMER_LIB_MIRROR names; the old one is what the model was trained on. Of the new
text, pairs to test and to validate with are drawn first, the same ones for each run;
of the rest, so many are trained on, with old pairs as a share among them. All else is
the recipe fine-tune. Losses and scores are those of the last weights, on both test
sets, beside those of the model before. A run stopped goes on from its last checkpoint,
to the same result. Writes one JSON.

With --back the English side of the new pairs is not read: the model first goes on with
the old text turned round, German into English, and translates the German side back
(back-translation, Sennrich et al. 2016b).

Record: results/fine-tuning/*.json, results/back-translation/*.json
"""

import argparse
import lzma
import os
import random
from dataclasses import asdict
from pathlib import Path

from transformer_lib.batches import tokenize_pairs
from transformer_lib.corpora import load_corpus
from transformer_lib.corpora.known import hash_pairs
from transformer_lib.evaluation import chrf, sacre_bleu
from transformer_lib.fine_tuning import fine_tuning_recipe, mix_pairs
from transformer_lib.runs import Run, load_pretrained, train
from transformer_lib.runs.checkpoints import checkpoint_files, step_of
from transformer_lib.storage import whole_file, write_json
from transformer_lib.training import validation_loss
from transformer_lib.translator import Translator

START, OLD, ORIGIN = "tatoeba-en-de", "tatoeba-en-de", "multi30k"
HELD = 500  # new pairs to validate with; they choose nothing
SAID = (  # translated before and after, for the page to show: old kind and new
    "The old man sold his house.",
    "What are you looking for?",
    "My sister has lost her keys.",
    "A man in a blue shirt is standing on a ladder.",
    "Two dogs are running across a snowy field.",
    "A young girl in a pink dress is jumping into a pool.",
)


def pairs_of(origin: str) -> list[tuple[str, str]]:
    """All pairs of one origin of the mixed text, in its order."""
    mirror = os.environ.get("TRANSFORMER_LIB_MIRROR", "")
    path = Path(mirror) / "mixed" / "train.en-de.tsv.xz"
    if not mirror or not path.is_file():
        raise SystemExit(
            "there is no mixed text: TRANSFORMER_LIB_MIRROR must name a folder with "
            "mixed/train.en-de.tsv.xz in it."
        )
    with lzma.open(path, "rt", encoding="utf-8") as file:
        rows = (line.rstrip("\n").split("\t") for line in file)
        return [(row[1], row[2]) for row in rows if row[0] == origin]


def divided(pairs: list, sentences: int) -> tuple[list, list, list]:
    """Test, validation and training pairs; no side of the first two is in the third."""
    pairs = random.Random(0).sample(pairs, len(pairs))
    test, valid = pairs[:sentences], pairs[sentences : sentences + HELD]
    held = {side for pair in test + valid for side in pair}
    rest = [p for p in pairs[sentences + HELD :] if not held & set(p)]
    return test, valid, rest


def write_text(folder: Path, splits: dict) -> dict:
    """Files of a user's, as training reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    corpus = {"name": ORIGIN}
    for split, pairs in splits.items():
        path = folder / f"{split}.tsv"
        with whole_file(path) as file:
            file.write("".join(f"{s}\t{t}\n" for s, t in pairs).encode())
        corpus[split] = str(path)
    return corpus


def scores_of(model, tokenizer, about: dict, pairs: list, **decoding) -> dict:
    """Loss, BLEU and chrF of a model on some pairs; greedy if decoding is empty."""
    sources, references = (list(side) for side in zip(*pairs, strict=True))
    outputs = Translator(model, tokenizer, about)(sources, **decoding)
    return {
        "nats": loss_of(model, tokenizer, pairs),
        "sacreBLEU": asdict(sacre_bleu(outputs, references)),
        "chrF2": asdict(chrf(outputs, references)),
    }


def scored(model, tokenizer, about: dict, tests: dict) -> dict:
    """Loss, BLEU and chrF of a model on each test set, greedy."""
    return {
        name: scores_of(model, tokenizer, about, pairs)
        | {"sentences": len(pairs), "sha256": hash_pairs(pairs)}
        for name, pairs in tests.items()
    }


def loss_of(model, tokenizer, pairs: list) -> float:
    return round(validation_loss(model, tokenize_pairs(pairs, tokenizer), 4000), 5)


def turned(pairs: list) -> list[tuple[str, str]]:
    """Pairs of the other direction."""
    return [(target, source) for source, target in pairs]


def translated_back(asked: argparse.Namespace, new: list, old: list) -> tuple:
    """The new targets with sources by a model of the other direction; its record."""
    tests = {
        "new": turned(divided(pairs_of(ORIGIN), asked.sentences)[0]),
        "old": turned(some_of(OLD, "test", asked.sentences)),
    }
    splits = {"train": turned(old), "valid": turned(some_of(OLD, "valid", HELD))}
    folder = asked.run_dir / "reverse"
    recipe = fine_tuning_recipe(
        asked.start,
        corpus=write_text(folder / "text", splits),
        lr_factor=0.3,
        warmup=100,
        seed=asked.seed,
        fast_dropout=False,  # as in the stored runs
        max_steps=asked.back,
        validate_every=asked.every,
        keep_last=1,
    )
    done = train(recipe, folder / "run", device=asked.device, show=False)
    last = Run.load(folder / "run", asked.device, "last")
    about = load_pretrained(asked.start, "cpu")[2]
    targets = [target for _, target in new]
    sources = Translator(last.model, last.tokenizer, about)(targets)
    start = Path(asked.start).name
    return list(zip(sources, targets, strict=True)), {
        "recipe": asdict(recipe) | {"corpus": f"{OLD}, turned", "start_from": start},
        "updates": done.progress.step,
        "seconds": round(done.progress.seconds),
        "scores": scored(last.model, last.tokenizer, about, tests),
        "examples": list(zip(sources[:3], *zip(*new[:3], strict=True), strict=True)),
    }


def some_of(name: str, split: str, number: int) -> list[tuple[str, str]]:
    """So many pairs of a split, always the same ones."""
    pairs = list(load_corpus(name, split).pairs)
    return random.Random(0).sample(pairs, min(number, len(pairs)))


def run(asked: argparse.Namespace) -> dict:
    """Train from the last checkpoint on, and score."""
    test, valid, rest = divided(pairs_of(ORIGIN), asked.sentences)
    new = rest[: asked.pairs]
    old = list(load_corpus(OLD).pairs)
    extra, words = {}, ""
    if asked.back:
        new, extra["reverse"] = translated_back(asked, new, old)
        words = f"--back {asked.back} "
    text = mix_pairs(new, old, asked.share, asked.seed)
    tests = {"new": test, "old": some_of(OLD, "test", asked.sentences)}
    corpus = write_text(asked.run_dir / "text", {"train": text, "valid": valid})
    recipe = fine_tuning_recipe(
        asked.start,
        corpus=corpus,
        lr_factor=asked.factor,
        seed=asked.seed,
        fast_dropout=False,  # as in the stored runs
        max_steps=asked.steps,
        validate_every=asked.every,
        keep_last=-(-asked.steps // asked.every),
    )
    done = train(recipe, asked.run_dir / "run", device=asked.device, show=False)
    model, tokenizer, about = load_pretrained(asked.start, asked.device)
    before = scored(model, tokenizer, about, tests)
    said = {"sources": SAID, "before": Translator(model, tokenizer, about)(list(SAID))}
    curve = []
    for path in checkpoint_files(asked.run_dir / "run"):
        part = Run.load(asked.run_dir / "run", asked.device, path)
        losses = {n: loss_of(part.model, tokenizer, p) for n, p in tests.items()}
        curve.append({"step": step_of(path), **losses})
    last = Run.load(asked.run_dir / "run", asked.device, "last")
    after = scored(last.model, tokenizer, about, tests)
    said["after"] = Translator(last.model, tokenizer, about)(list(SAID))
    start = Path(asked.start).name
    return {
        "start": start,
        "factor": asked.factor,
        "pairs": len(new),
        "old_pairs": len(text) - len(new),
        "share": asked.share,
        "seed": asked.seed,
        "command": "python experiments/fine_tuning.py "
        f"--factor {asked.factor} --pairs {asked.pairs} "
        f"--share {asked.share} --seed {asked.seed} {words}"
        "--run-dir FOLDER --out FILE",
        "recipe": asdict(recipe) | {"corpus": ORIGIN, "start_from": start},
        "data": {
            "corpus": f"{ORIGIN} of the mixed text",
            "old": OLD,
            "train_pairs": done.data["train_pairs"],
            "sha256": hash_pairs(text),
        },
        "environment": done.environment,
        "updates": done.progress.step,
        "tokens": done.progress.tokens,
        "seconds": round(done.progress.seconds),
        "decoding": "greedy, sentence by sentence, at most source + 50 tokens",
        "curve": curve,
        "before": before,
        "after": after,
        "said": said,
        "bleu": after["new"]["sacreBLEU"]["value"],
        "test_loss": after["new"]["nats"],
        **extra,
    }


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--factor",
        type=float,
        default=0.05,
        help="what the paper's learning rate is multiplied by (0.05)",
    )
    parser.add_argument("--pairs", type=int, default=10_000, help="new pairs (10000)")
    parser.add_argument(
        "--share", type=float, default=0.0, help="old pairs as a share of the text (0)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--back",
        type=int,
        default=0,
        help="updates of the model that translates the new targets back (0: none)",
    )
    parser.add_argument("--steps", type=int, default=400, help="updates (400)")
    parser.add_argument(
        "--every",
        type=int,
        default=100,
        help="updates between points of the curve (100)",
    )
    parser.add_argument("--sentences", type=int, default=1000, help="of a test set")
    parser.add_argument("--start", default=START, help="the trained model")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(words)


def main() -> None:
    asked = arguments()
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(asked.out, run(asked))


if __name__ == "__main__":
    main()
