"""Runs of seconds, which the tests of training and of runs share.

A test file takes what it needs by assignment: ``train = small_runs.train``.
"""

from functools import partial

import pytest
import torch

from transformer_lib.batches import prepare, tokenize_pairs
from transformer_lib.corpora import grammar_split
from transformer_lib.runs import Recipe, trainer
from transformer_lib.tokenizer import Tokenizer
from transformer_lib.transformer import Transformer, TransformerConfig

VOCABULARY = 340
RUN_FILES = ["recipe.json", "tokenizer.model", "about.json"]  # of a manifest
FEW = {"train": grammar_split("valid", 400), "valid": grammar_split("test", 40)}
SMALL = {"d_model": 32, "num_heads": 2, "num_layers": 1, "d_ff": 64, "dropout": 0.1}


@pytest.fixture(scope="module")
def pairs():
    text = FEW["train"]
    tokenizer = Tokenizer.train((side for pair in text for side in pair), VOCABULARY)
    return tokenize_pairs(text, tokenizer)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """440 pairs of the embedded grammar, as files of a user's, prepared."""
    folder = tmp_path_factory.mktemp("text")
    corpus = {}
    for split, text in FEW.items():
        corpus[split] = str(folder / f"{split}.tsv")
        lines = "".join(f"{source}\t{target}\n" for source, target in text)
        (folder / f"{split}.tsv").write_text(lines, encoding="utf-8")
    prepare(corpus, folder / "data", VOCABULARY, threads=1)
    return folder / "data"


@pytest.fixture
def train(data_dir):
    """trainer.train on the prepared pairs, silently."""
    return partial(trainer.train, data_dir=data_dir, show=False)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Transformer(TransformerConfig(VOCABULARY, **SMALL | {"dropout": 0.0}))


def tiny(**changes):
    settings = {"max_steps": 6, "validate_every": 2, "max_tokens": 300}
    settings |= {"vocab_size": VOCABULARY, "model": SMALL}
    return Recipe.load("grammar", **settings | changes)


def without_times(record):
    """A record without what differs from run to run, in its parts too."""
    if isinstance(record, list):
        return [without_times(part) for part in record]
    if not isinstance(record, dict):
        return record
    timed = ("seconds", "tokens_per_second", "environment")
    return {k: without_times(v) for k, v in record.items() if k not in timed}
