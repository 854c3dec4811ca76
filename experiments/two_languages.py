"""Teach the shipped model a second language by tags, and score both under each tag.

    python experiments/two_languages.py --run-dir DIR --out FILE

The model translates English into German. Its vocabulary is grown by a tag for each
language and by the pieces that byte pair encoding would learn next from French; then it
goes on with Tatoeba's English-German and English-French pairs, equally many of each, a
tag in front of each source. No side of a test or validation pair is trained on. Scored
are the last weights on both test sets under the right tag and the wrong one, and the
model as it was, without tags. A run stopped goes on from its last checkpoint, to the
same result. Writes one JSON.

Record: results/two-languages/*.json
"""

import argparse
import random
from dataclasses import asdict
from pathlib import Path

from fine_tuning import loss_of, scored, write_text

from transformer_lib.corpora import load_corpus
from transformer_lib.corpora.known import hash_pairs
from transformer_lib.fine_tuning import (
    add_pieces,
    fine_tuning_recipe,
    grow,
    next_pieces,
)
from transformer_lib.runs import Run, load_pretrained, train
from transformer_lib.storage import write_json

START = "tatoeba-en-de"
TAGS = {"de": "<2de>", "fr": "<2fr>"}
CORPUS = "tatoeba-en-{}"


def tag_sources(pairs, tag: str) -> list[tuple[str, str]]:
    """Pairs with a tag in front of each source."""
    return [(f"{tag} {source}", target) for source, target in pairs]


def some(language: str, split: str, number: int) -> list[tuple[str, str]]:
    """So many pairs of English and one language, always the same ones."""
    pairs = list(load_corpus(CORPUS.format(language), split).pairs)
    return random.Random(0).sample(pairs, min(number, len(pairs)))


def texts(asked: argparse.Namespace) -> tuple[dict, dict]:
    """The text to train and to validate with, tagged and mixed, and both test sets."""
    tests = {n: some(n, "test", asked.sentences) for n in TAGS}
    valid = {n: some(n, "valid", asked.sentences // 4) for n in TAGS}
    held = {
        side
        for split in (tests, valid)
        for pairs in split.values()
        for pair in pairs
        for side in pair
    }
    train = {
        n: [p for p in some(n, "train", asked.pairs) if not held & set(p)] for n in TAGS
    }
    splits = {"train": train, "valid": valid}
    mixed = {
        s: [p for n, tag in TAGS.items() for p in tag_sources(by[n], tag)]
        for s, by in splits.items()
    }
    return mixed, tests


def grown(asked: argparse.Namespace, pairs: list) -> Path:
    """The folder of the start: the old model with rows for new pieces and tags."""
    folder = asked.run_dir / "start"
    if not folder.exists():
        model, tokenizer, about = load_pretrained(asked.start, "cpu")
        french = [target for source, target in pairs if source.startswith(TAGS["fr"])]
        new = next_pieces(tokenizer, french, asked.pieces)
        larger = add_pieces(tokenizer, new, symbols=TAGS.values())
        model = grow(model, tokenizer, larger)
        model.save_pretrained(folder, larger, half=False, about=about)
    return folder


def run(asked: argparse.Namespace) -> dict:
    """Train from the last checkpoint on, and score."""
    mixed, tests = texts(asked)
    start = grown(asked, mixed["train"])
    recipe = fine_tuning_recipe(
        start,
        corpus=write_text(asked.run_dir / "text", mixed),
        lr_factor=asked.factor,
        seed=asked.seed,
        warmup=asked.warmup,
        max_steps=asked.steps,
        validate_every=asked.every,
        fast_dropout=True,
        keep_last=1,
    )
    done = train(recipe, asked.run_dir / "run", device=asked.device, show=False)
    last = Run.load(asked.run_dir / "run", asked.device, "last")
    about = load_pretrained(start, "cpu")[2]
    table = {
        language: {
            tag: scored(
                last.model, last.tokenizer, about, {language: tag_sources(test, tag)}
            )[language]
            for tag in TAGS.values()
        }
        | {"none": {"nats": loss_of(last.model, last.tokenizer, test)}}
        for language, test in tests.items()
    }
    before = scored(*load_pretrained(asked.start, asked.device), {"de": tests["de"]})
    old = Path(asked.start).name
    return {
        "start": old,
        "pairs": asked.pairs,
        "pieces": asked.pieces,
        "factor": asked.factor,
        "seed": asked.seed,
        "command": "python experiments/two_languages.py "
        f"--pairs {asked.pairs} --pieces {asked.pieces} "
        f"--factor {asked.factor} --steps {asked.steps} --seed {asked.seed} "
        "--run-dir FOLDER --out FILE",
        "recipe": asdict(recipe) | {"corpus": "tagged", "start_from": f"{old}, grown"},
        "data": {
            "corpus": [CORPUS.format(language) for language in TAGS],
            "train_pairs": done.data["train_pairs"],
            "sha256": hash_pairs(mixed["train"]),
        },
        "environment": done.environment,
        "updates": done.progress.step,
        "tokens": done.progress.tokens,
        "seconds": round(done.progress.seconds),
        "decoding": "greedy, sentence by sentence, at most source + 50 tokens",
        "before": before,
        "by_tag": table,
        "bleu": table["fr"][TAGS["fr"]]["sacreBLEU"]["value"],
        "test_loss": table["fr"][TAGS["fr"]]["nats"],
    }


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pairs", type=int, default=60_000, help="pairs of each language (60000)"
    )
    parser.add_argument(
        "--pieces", type=int, default=1000, help="new pieces for French (1000)"
    )
    parser.add_argument(
        "--factor",
        type=float,
        default=0.3,
        help="what the paper's learning rate is multiplied by (0.3)",
    )
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=700, help="updates (700)")
    parser.add_argument(
        "--every", type=int, default=100, help="updates between checkpoints (100)"
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
