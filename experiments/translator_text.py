"""The text and the vocabulary of a translator for sentences as people type them.

Of Tatoeba's training pairs 3,000 are kept for the end: isolated ones
(fresh_split.py), which have no near copy among all others, the validation pairs
included. Chosen at random they would have many, and to take those out of training would
cost the model the very sentences that people need; so the isolated ones are chosen, and
the score on them is that of sentences somewhat longer and less usual than the text.

Sources are folded (`fold_text`), as `translate` folds what it is given; German keeps
its quotation marks. The vocabulary cuts digits one by one. It is not NFKC's: it only
composes accents, makes every space a plain one and drops what nobody sees, by rules
that are part of the vocabulary, so that each program that reads it keeps them.

Record: none; it makes the text that evidence.py and typed_pilot.py train on
"""

import contextlib
import re
import tempfile
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from fresh_split import PAIRS, by_hash, isolated

from transformer_lib.batches import prepare
from transformer_lib.corpora import load_corpus
from transformer_lib.runs import Recipe, text_settings
from transformer_lib.storage import whole_file
from transformer_lib.tokenizer import Tokenizer, fold_text, train_pieces

JOINERS = "\u200d\ufe0e\ufe0f"  # they have a meaning between emoji


def divided(corpus: str) -> dict[str, list[tuple]]:
    """train, valid and fresh pairs; sources folded."""
    train = load_corpus(corpus).pairs
    valid = load_corpus(corpus, "valid").pairs
    candidates = by_hash(train)[: 10 * PAIRS]
    chosen = set(candidates)
    others = [pair for pair in train if pair not in chosen] + list(valid)
    fresh = isolated(candidates, others)[:PAIRS]
    sealed = set(fresh)
    rest = [pair for pair in train if pair not in sealed]
    return {
        name: [(fold_text(source), target) for source, target in pairs]
        for name, pairs in (("train", rest), ("valid", valid), ("fresh", fresh))
    }


def folding_rules() -> Iterable[str]:
    """What fold_text does to accents and single characters, not to quotation marks."""
    for code in (*range(0x80, 0xD800), *range(0xE000, 0x10000)):
        character = chr(code)
        folded = fold_text(character)
        unseen = folded == "" and character not in JOINERS
        if unseen or (folded not in {character, "'", '"', ""} and code < 0xF900):
            yield rule_of(character, folded)
        parts = unicodedata.normalize("NFD", character)
        if len(parts) > 1 and code < 0x2000 and fold_text(parts) == character:
            yield rule_of(parts, character)


def rule_of(old: str, new: str) -> str:
    return "\t".join(" ".join(f"{ord(c):X}" for c in text) for text in (old, new))


def vocabulary(sentences: Iterable[str], size: int) -> Tokenizer:
    """A vocabulary with single digits and folding_rules, in place of NFKC."""
    rules = "rules.tsv"  # its name stands in the model: so without its folder
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path(rules).write_text("\n".join(folding_rules()) + "\n", "utf-8")
        model = train_pieces(
            sentences, size, split_digits=True, normalization_rule_tsv=rules
        )
    return Tokenizer(model)


def ready(recipe: Recipe, folder: Path) -> Path:
    """The folder with the prepared text of a recipe, made where it is not there.

    The vocabulary learns from the training pairs, and from each sixteenth of them once
    more in capitals.
    """
    if (folder / "data" / "data.json").exists():
        return folder / "data"
    splits, files = divided(recipe.corpus), {}
    folder.mkdir(parents=True, exist_ok=True)
    for name, pairs in splits.items():
        files[name] = folder / f"{name}.tsv"
        with whole_file(files[name]) as file:
            lines = (re.sub(r"[\t\n]", " ", side) for pair in pairs for side in pair)
            rows = zip(lines, lines, strict=True)
            file.write("".join("\t".join(row) + "\n" for row in rows).encode())
    train = splits["train"]
    loud = [tuple(side.upper() for side in pair) for pair in train[::16]]
    tokenizer = vocabulary((s for p in train + loud for s in p), recipe.vocab_size)
    corpus = {"name": recipe.corpus, "max_ratio": 1e9}
    corpus |= {name: str(files[name]) for name in ("train", "valid")}
    prepare(corpus, folder / "data", tokenizer=tokenizer, **text_settings(recipe))
    return folder / "data"


def pairs_of(folder: Path, name: str = "fresh") -> list[tuple]:
    """The pairs that were kept for the end, or train or valid."""
    lines = (folder / f"{name}.tsv").read_text("utf-8").splitlines()
    return [tuple(line.split("\t")) for line in lines]
