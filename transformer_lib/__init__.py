"""The Literate Transformer's library: what the chapters of the book export.

The names below are found in their chapter's module on first use, so that
``import transformer_lib`` costs nothing and chapter 01 needs no torch.
This file is the only one of the package that is written by hand.
"""

import importlib
import sys

__version__ = "0.1.0"

_HOME = {
    "scaled_dot_product_attention": "attention",
    "MultiHeadAttention": "multihead",
    "LearnedPositions": "positions",
    "sinusoidal_positions": "positions",
    "Encoder": "encoder",
    "EncoderLayer": "encoder",
    "FeedForward": "encoder",
    "Decoder": "decoder",
    "DecoderLayer": "decoder",
    "causal_mask": "decoder",
    "padding_mask": "decoder",
    "Transformer": "transformer",
    "TransformerConfig": "transformer",
    "Tokenizer": "tokenizer",
    "load_corpus": "corpora",
    "prepare": "prepared",
    "label_smoothed_cross_entropy": "objective",
    "noam_lr": "objective",
    "Recipe": "recipes",
    "train": "trainer",
    "average_checkpoints": "checkpoints",
    "load_pretrained": "runs",
    "Run": "runs",
    "greedy_decode": "decoding",
    "beam_search": "decoding",
    "bleu": "evaluation",
    "sacre_bleu": "evaluation",
    "translate": "translator",
    "evaluate": "evaluation",
    "Translator": "translator",
    "export_model": "export",
}

# Chapters after 07 that give its Transformer methods: from_pretrained, save_pretrained;
# generate.
_GROWN = ("runs", "decoding")

__all__ = ["__version__", *_HOME]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'transformer_lib' has no attribute {name!r}")
    module = importlib.import_module(f"transformer_lib.{_HOME[name]}")
    if "transformer_lib.transformer" in sys.modules:
        for later in _GROWN:
            importlib.import_module(f"transformer_lib.{later}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__():
    return sorted(__all__)
