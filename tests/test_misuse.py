"""What the doors of the library are given by mistake: a sentence each, and no hang."""

import inspect
import math

import pytest
import small_runs
import torch
from small_runs import SMALL, tiny

from transformer_lib import (
    DecoderLayer,
    EncoderLayer,
    MultiHeadAttention,
    Recipe,
    Transformer,
    TransformerConfig,
    average_checkpoints,
    beam_search,
    greedy_decode,
    label_smoothed_cross_entropy,
    noam_lr,
    sinusoidal_positions,
)
from transformer_lib.batches import pack, prepare
from transformer_lib.corpora import CorpusUnavailable, grammar_split, load_corpus
from transformer_lib.evaluation import bleu, evaluate
from transformer_lib.export import export_model
from transformer_lib.machine import default_device
from transformer_lib.runs import load_pretrained, trainer
from transformer_lib.tokenizer import Tokenizer
from transformer_lib.training import fit
from transformer_lib.translator import Translator, translate

data_dir = small_runs.data_dir
pairs = small_runs.pairs

EVERYTHING = {
    "none": None,
    "text": "x",
    "empty": "",
    "list": [],
    "table": {},
    "bytes": b"x",
    "object": object(),
    "tensor": torch.tensor([0.5]),
    "-1": -1,
    "0": 0,
    "1/2": 0.5,
    "3/2": 1.5,
    "2.0": 2.0,
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "true": True,
    "huge": 10**30,
    "nones": [None],
}
MODEL = Transformer(TransformerConfig(40, **SMALL))
IDS = torch.tensor([[5, 6, 3]])
PAIRS = grammar_split("train", 200)
TEXT = [side for pair in PAIRS for side in pair]
TOKENIZER = Tokenizer.train(TEXT, 330)
READER = Transformer(TransformerConfig(TOKENIZER.vocab_size, **SMALL)).eval()
TRANSLATOR = Translator(READER, TOKENIZER)


def stream(lines, max_lines=9, pause=0.2):
    return list(TRANSLATOR.stream(lines, max_lines, pause, max_extra=2))


LOGITS, TARGET = torch.zeros(1, 3, 40), torch.tensor([[5, 6, 3]])

# Each door: what it is called with, and for each argument what it may be given.
WHOLE, FROM_0 = set(), {"0"}
SHARE, REAL, SWITCH = {"0", "1/2"}, {"0", "1/2", "3/2", "2.0"}, {"true"}
OPTIONAL, LINES = {"none"}, {"text", "empty", "list", "table"}
DOORS = {
    TransformerConfig: (
        {"vocab_size": 40} | SMALL,
        {
            "vocab_size": WHOLE,
            "d_model": WHOLE,
            "num_heads": WHOLE,
            "num_layers": WHOLE,
            "d_ff": WHOLE,
            "d_k": OPTIONAL,
            "d_v": OPTIONAL,
            "dropout": SHARE,
            "attention_dropout": SHARE,
            "positions": WHOLE,
            "max_length": WHOLE,
            "norm_first": SWITCH,
            "attention_bias": SWITCH,
            "tie_embeddings": SWITCH,
            "activation": WHOLE,
            "output_bias": SWITCH,
        },
    ),
    Transformer: ({"config": MODEL.config}, {"config": WHOLE}),
    MODEL.forward: (
        {"src_ids": IDS, "tgt_ids": IDS},
        {"src_ids": WHOLE, "tgt_ids": WHOLE},
    ),
    MODEL.generate: (
        {"src_ids": IDS, "beam_size": 1},
        {
            "src_ids": WHOLE,
            "beam_size": WHOLE,
            "alpha": REAL,
            "max_extra": FROM_0,
            "no_repeat_ngram_size": FROM_0,
            "sample": SWITCH,
        },
    ),
    greedy_decode: (
        {"model": MODEL, "src_ids": IDS},
        {
            "model": WHOLE,
            "src_ids": WHOLE,
            "max_extra": FROM_0,
            "no_repeat_ngram_size": FROM_0,
        },
    ),
    beam_search: (
        {"model": MODEL, "src_ids": IDS},
        {
            "model": WHOLE,
            "src_ids": WHOLE,
            "beam_size": WHOLE,
            "alpha": REAL,
            "max_extra": FROM_0,
            "n_best": WHOLE,
            "no_repeat_ngram_size": FROM_0,
        },
    ),
    label_smoothed_cross_entropy: (
        {"logits": LOGITS, "target": TARGET},
        {"logits": WHOLE, "target": WHOLE, "label_smoothing": SHARE},
    ),
    noam_lr: (
        {"step": 3, "d_model": 16, "warmup": 10},
        {"step": WHOLE, "d_model": WHOLE, "warmup": WHOLE, "factor": REAL},
    ),
    Recipe: (
        {"name": "x", "corpus": "y", "vocab_size": 700, "max_tokens": 500},
        {
            "name": {"text"},
            "corpus": {"text"},
            "vocab_size": WHOLE,
            "model": {"table"},
            "max_length": WHOLE,
            "max_words": OPTIONAL,
            "max_pairs": OPTIONAL,
            "subword_sampling": SHARE,
            "copies": WHOLE,
            "max_tokens": WHOLE,
            "accumulate": WHOLE,
            "max_steps": WHOLE,
            "warmup": WHOLE,
            "cooldown": FROM_0,
            "lr_factor": REAL - {"0"},
            "label_smoothing": SHARE,
            "seed": FROM_0,
            "validate_every": WHOLE,
            "best_by": WHOLE,
            "patience": FROM_0,
            "model_type": WHOLE,
            "dropout_after": FROM_0,
            "fast_dropout": SWITCH,
            "clip": REAL,
            "precision": WHOLE,
            "chunk": FROM_0,
            "fused": SWITCH,
            "prefetch": FROM_0,
            "packed": FROM_0,
            "compiled": SWITCH,
            "checkpointing": SWITCH,
            "keep_last": FROM_0,
            "start_from": {"text", "empty"},
            "joined": REAL,
            "renamed": REAL,
            "varied": {"table"},
            "initial_std": REAL,
        },
    ),
    average_checkpoints: (
        {"paths_or_run_dir": "no run"},
        {"last": OPTIONAL, "after": OPTIONAL | FROM_0},
    ),
    default_device: ({}, {"wanted": OPTIONAL}),
    Tokenizer: ({"model": TOKENIZER.model}, {"model": WHOLE}),
    Tokenizer.train: (
        {"sentences": TEXT, "vocab_size": 330},
        {
            "sentences": WHOLE,
            "vocab_size": WHOLE,
            "model_type": WHOLE,
            "threads": WHOLE,
            "normalize": WHOLE,
        },
    ),
    Tokenizer.load: ({"path": "none"}, {"path": {"text"}}),
    TOKENIZER.save: ({"path": "none"}, {"path": {"text"}}),
    TOKENIZER.encode: (
        {"text": "a"},
        {"text": {"text", "empty"}, "subword_sampling": SHARE | {"true"}},
    ),
    TOKENIZER.encode_all: (
        {"texts": ["a"]},
        {
            "texts": {"list", "table"},
            "threads": WHOLE,
            "subword_sampling": SHARE | {"true"},
        },
    ),
    TOKENIZER.decode: (
        {"ids": [7]},
        {"ids": {"empty", "list", "table", "bytes", "tensor"}},
    ),
    TOKENIZER.pieces: ({"text": "a"}, {"text": {"text", "empty"}}),
    Translator: (
        {"model": READER, "tokenizer": TOKENIZER},
        {
            "model": WHOLE,
            "tokenizer": WHOLE,
            "about": {"none", "table"},
            "by_sentence": SWITCH,
            "max_length": OPTIONAL,
            "engine": OPTIONAL,
            "compute_type": OPTIONAL,
        },
    ),
    TRANSLATOR.__call__: (
        {"sentences": ["a"], "max_extra": 2},
        {"sentences": LINES, "beam_size": WHOLE, "alpha": REAL, "max_extra": FROM_0},
    ),
    TRANSLATOR.n_best: ({"sentences": ["a"], "n": 1}, {"sentences": LINES, "n": WHOLE}),
    stream: ({"lines": ["a"]}, {"lines": LINES, "max_lines": WHOLE, "pause": REAL}),
    translate: (
        {"model": READER, "tokenizer": TOKENIZER, "sentences": ["a"]},
        {
            "model": WHOLE,
            "tokenizer": WHOLE,
            "sentences": LINES,
            "batch_size": WHOLE,
            "max_extra": FROM_0,
            "beam_size": WHOLE,
            "alpha": REAL,
        },
    ),
    load_pretrained: ({"folder_or_name": "tatoeba-en-de"}, {"folder_or_name": WHOLE}),
    evaluate: (
        {"translator": TRANSLATOR, "corpus": PAIRS[:2], "samples": 3},
        {
            "translator": WHOLE,
            "corpus": WHOLE,
            "beam_size": WHOLE,
            "alpha": REAL,
            "max_extra": FROM_0,
            "max_tokens": WHOLE,
            "samples": WHOLE,
            "tokenize": OPTIONAL,
        },
    ),
    bleu: (
        {"hypotheses": [["a"]], "references": [["a"]]},
        {"hypotheses": WHOLE, "references": WHOLE, "smooth": WHOLE},
    ),
    load_corpus: ({"spec": "grammar-en-de"}, {"spec": WHOLE, "split": WHOLE}),
}
# The same of those that write a folder.
WRITERS = {
    prepare: (
        {"corpus": "grammar-en-de", "folder": "out", "vocab_size": 400},
        {
            "corpus": WHOLE,
            "folder": {"text"},
            "vocab_size": WHOLE,
            "model_type": WHOLE,
            "max_length": WHOLE,
            "tokenizer": OPTIONAL,
            "threads": OPTIONAL,
            "seed": FROM_0,
            "max_words": OPTIONAL,
            "sample_size": WHOLE,
            "max_pairs": OPTIONAL,
            "subword_sampling": SHARE | {"true"},
            "copies": WHOLE,
            "normalize": OPTIONAL,
        },
    ),
    export_model: (
        {"model": READER, "tokenizer": TOKENIZER, "folder": "out"},
        {
            "model": WHOLE,
            "tokenizer": WHOLE,
            "folder": {"text"},
            "about": {"none", "table"},
            "formats": WHOLE,
        },
    ),
}


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__qualname__)
def test_nonsense_is_refused_in_a_sentence(door):
    usual, arguments = DOORS[door]
    known = inspect.signature(door).parameters
    assert arguments.keys() | usual.keys() <= known.keys()
    for name, allowed in arguments.items():
        for what in EVERYTHING.keys() - allowed:
            with pytest.raises(ValueError, match=r"\w+ \w+") as told:
                door(**usual | {name: EVERYTHING[what]})
                pytest.fail(f"{name}={what} was accepted")
            assert "INVALID_ARGUMENT" not in str(told.value)  # of SentencePiece


@pytest.mark.parametrize("door", WRITERS, ids=lambda door: door.__qualname__)
def test_nonsense_is_refused_before_a_folder_is_written(door, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    usual, arguments = WRITERS[door]
    for name, allowed in arguments.items():
        for what in EVERYTHING.keys() - allowed:
            with pytest.raises(ValueError, match=r"\w+ \w+"):
                door(**usual | {name: EVERYTHING[what]})
                pytest.fail(f"{name}={what} was accepted")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "call, said",
    [
        (
            lambda: Translator(TOKENIZER, READER),
            "Tokenizer; it got Tokenizer and Transf",
        ),
        (
            lambda: translate(TOKENIZER, READER, ["a"]),
            "it got Tokenizer and Transformer",
        ),
        (lambda: translate(READER, ["a"], TOKENIZER), "it got Transformer and list"),
        (
            lambda: export_model(TOKENIZER, READER, "x"),
            "it got Tokenizer and Transformer",
        ),
        (
            lambda: export_model(READER, TOKENIZER, "x", formats="onnx"),
            "formats='onnx': give",
        ),
        (
            lambda: evaluate(PAIRS, TRANSLATOR),
            "translator is of type list: give a Transl",
        ),
        (
            lambda: evaluate(TRANSLATOR, ["A dog."]),
            "list and does not hold pairs: give",
        ),
        (lambda: evaluate(TRANSLATOR, []), "corpus holds no pairs: give some"),
        (
            lambda: evaluate(TRANSLATOR, [(None, "a")]),
            "a NoneType; give untokenized str",
        ),
        (
            lambda: prepare("out", "grammar-en-de"),
            "corpus 'out' is unknown: .*grammar-en",
        ),
        (lambda: prepare(PAIRS, "out"), "corpus is of type list: give a name"),
        (lambda: load_corpus(b"mine.tsv"), "corpus is of type bytes: give a name"),
        (
            lambda: load_corpus("test", "grammar-en-de"),
            "split='grammar-en-de': must be",
        ),
        (lambda: bleu("a b", "a b"), "a side of type str .*give a list of sentences"),
        (
            lambda: bleu(["a b"], ["a b"]),
            "a sentence is a string; give a list of tokens",
        ),
        (lambda: bleu([["a"]], [[["a"]], [["b"]]]), "1 hypotheses and 2 references"),
        (lambda: bleu([b"a"], [["a"]]), "a sentence is a bytes; give a list of tokens"),
        (lambda: Tokenizer.train(330, TEXT), "vocab_size=.*must be a whole number"),
        (
            lambda: Tokenizer.train([None], 330),
            "sentence 0 is of type NoneType: give a",
        ),
        (
            lambda: Tokenizer.train(["a", b"b"], 330),
            "sentence 1 is of type bytes: give a",
        ),
        (lambda: TOKENIZER.encode(["A dog."]), "sentence 0 is of type list: give a s"),
        (
            lambda: TOKENIZER.decode("A dog."),
            "ids='A dog.': give a list of whole numbers",
        ),
        (
            lambda: TRANSLATOR(["A dog.", None]),
            "line 2 is of type NoneType: give strings",
        ),
        (lambda: TRANSLATOR(b"A dog."), "sentences is of type bytes: give a string"),
        (
            lambda: Tokenizer.load(TOKENIZER),
            "path=.*: give the path of a file or folder",
        ),
        (
            lambda: Tokenizer("tokenizer.model"),
            "no SentencePiece model of this library",
        ),
    ],
)
def test_what_users_mix_up(call, said, tmp_path, monkeypatch):
    """A sentence says what was given, and what is to be given."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=said):
        call()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["no/such/file", "."])
def test_a_wrong_path_is_named(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    doors = {
        Tokenizer.load: OSError,
        TOKENIZER.save: OSError,
        load_pretrained: ValueError,
        load_corpus: CorpusUnavailable,
        Translator.from_pretrained: ValueError,
    }
    for door, kind in doors.items():
        with pytest.raises(kind, match=name):
            door(name)


@pytest.mark.parametrize("odd", [-1, math.nan, math.inf, 1.5])
def test_layers_refuse_what_no_error_of_torch_tells(odd):
    """A dropout rate, a function, a length that cannot be; torch reports the rest."""
    for layer in (
        lambda: MultiHeadAttention(16, 2, dropout=odd),
        lambda: EncoderLayer(16, 2, 32, attention_dropout=odd),
        lambda: DecoderLayer(16, 2, 32, attention_dropout=odd),
        lambda: MultiHeadAttention(16, 2, attention=odd),
        lambda: Transformer(MODEL.config, attention=odd),
        lambda: sinusoidal_positions(odd, 16),
    ):
        with pytest.raises(ValueError, match="must be"):
            layer()


def test_what_is_allowed_is_taken():
    for door, (usual, arguments) in DOORS.items():
        if door in (average_checkpoints, Tokenizer.load, TOKENIZER.save):  # no files
            continue
        for name, allowed in arguments.items():
            for what in sorted(allowed):
                door(**usual | {name: EVERYTHING[what]})


@pytest.mark.parametrize("name", ["max_steps", "max_tokens", "warmup", "seed"])
def test_fit_refuses_nonsense_and_does_not_train_for_ever(pairs, name):
    """max_steps=None was no limit."""
    model = Transformer(TransformerConfig(small_runs.VOCABULARY, **SMALL))
    for what in EVERYTHING.keys() - {"0"}:
        with pytest.raises(ValueError, match=f"{name}="):
            fit(model, pairs, **{"max_steps": 1, name: EVERYTHING[what]})
    for odd in ({"model": None}, {"pairs": [([5], [6])]}):
        with pytest.raises(ValueError, match="fit needs a Transformer, and TokenPairs"):
            fit(**{"model": model, "pairs": pairs, "max_steps": 1} | odd)


def test_train_refuses_nonsense_before_it_writes(data_dir, tmp_path):
    usual = {"recipe": tiny(), "run_dir": tmp_path / "run", "data_dir": data_dir}
    taken = {
        "recipe": set(),
        "run_dir": {"text"},
        "device": OPTIONAL,
        "data_dir": {"none", "text", "empty", "list", "table", "0"},
        "max_seconds": REAL | {"inf", "huge"},
        "batches": OPTIONAL,
        "optimizer": OPTIONAL,
        "schedule": OPTIONAL,
    }
    for name, allowed in taken.items():
        for what in EVERYTHING.keys() - allowed:
            with pytest.raises(ValueError):
                trainer.train(**usual | {name: EVERYTHING[what]}, show=False)
                pytest.fail(f"{name}={what} was accepted")
    with pytest.raises(ValueError, match="3 cannot be called: batches, optimizer"):
        trainer.train(**usual, callbacks=[3])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"accumulate": 10**9}, "accumulate=1000000000: .*from 1 to 10,000"),
        ({"prefetch": 10**9}, "prefetch=.*from 0 to 1,000"),
        ({"copies": 10**9}, "copies=.*from 1 to 1,000"),
        ({"joined": 10**9}, "joined=.*from 0 to 100"),
        ({"packed": 1}, "packed=1: .*two pairs"),
    ],
)
def test_what_would_never_end_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        Recipe.load("grammar", **changes)


@pytest.mark.parametrize("width", [0, -1])
def test_a_row_without_room_is_refused(pairs, width):
    with pytest.raises(ValueError, match=f"width={width}: a row must have room"):
        pack(pairs, [0, 1], width)
