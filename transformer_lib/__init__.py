"""The Literate Transformer's library: what the chapters of the book export.

The names below are found in their chapter's module on first use, so that
``import transformer_lib`` costs nothing and chapter 01 needs no torch.
This file and ``__main__.py`` are the only ones of the package written by hand.
"""

import importlib
from typing import TYPE_CHECKING

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
    "prepare": "batches",
    "label_smoothed_cross_entropy": "objective",
    "noam_lr": "objective",
    "Recipe": "runs",
    "train": "runs",
    "average_checkpoints": "runs",
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

if TYPE_CHECKING:  # what a type checker reads; `as` says that a name is handed on
    from .attention import scaled_dot_product_attention as scaled_dot_product_attention
    from .runs import average_checkpoints as average_checkpoints
    from .corpora import load_corpus as load_corpus
    from .decoder import Decoder as Decoder
    from .decoder import DecoderLayer as DecoderLayer
    from .decoder import causal_mask as causal_mask
    from .decoder import padding_mask as padding_mask
    from .decoding import beam_search as beam_search
    from .decoding import greedy_decode as greedy_decode
    from .encoder import Encoder as Encoder
    from .encoder import EncoderLayer as EncoderLayer
    from .encoder import FeedForward as FeedForward
    from .evaluation import bleu as bleu
    from .evaluation import evaluate as evaluate
    from .evaluation import sacre_bleu as sacre_bleu
    from .export import export_model as export_model
    from .multihead import MultiHeadAttention as MultiHeadAttention
    from .objective import label_smoothed_cross_entropy as label_smoothed_cross_entropy
    from .objective import noam_lr as noam_lr
    from .positions import LearnedPositions as LearnedPositions
    from .positions import sinusoidal_positions as sinusoidal_positions
    from .batches import prepare as prepare
    from .runs import Recipe as Recipe
    from .runs import Run as Run
    from .runs import load_pretrained as load_pretrained
    from .tokenizer import Tokenizer as Tokenizer
    from .runs import train as train
    from .transformer import Transformer as Transformer
    from .transformer import TransformerConfig as TransformerConfig
    from .translator import Translator as Translator
    from .translator import translate as translate

__all__ = ["__version__", *_HOME]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'transformer_lib' has no attribute {name!r}")
    module = importlib.import_module(f"transformer_lib.{_HOME[name]}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__():
    return sorted(__all__)
