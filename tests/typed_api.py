"""What the stable API gives, as a type checker sees it: read by mypy, never run.

No expression here may have a part without a type. Three class methods have one, since
their class is made from a dict or settings of any kind: each says so.
"""

from pathlib import Path
from typing import assert_type

import torch
from torch import Tensor

import transformer_lib as lib


def translating(translator: lib.Translator, lines: list[str]) -> None:
    """One text gives one text, several give a list."""
    loaded = lib.Translator.from_pretrained("tatoeba-en-de")  # type: ignore[misc]
    assert_type(loaded, lib.Translator)
    assert_type(translator("text"), str)
    assert_type(translator(["text"]), list[str])
    assert_type(translator(lines, beam_size=1, tell=print), list[str])
    best = translator.n_best("text", 3)
    assert_type(best, list[lib.Translator.Candidate])
    assert_type(translator.n_best(lines, 3), list[list[lib.Translator.Candidate]])
    assert_type(best[0].text, str)
    assert_type(best[0].log_prob, float)


def the_model(ids: Tensor, tokenizer: lib.Tokenizer) -> None:
    """Tensors in, tensors out; a model is loaded, saved and generates."""
    config = lib.TransformerConfig.base(vocab_size=37_000)
    assert_type(config, lib.TransformerConfig)
    model = lib.Transformer(config)
    loaded = lib.Transformer.from_pretrained("tatoeba-en-de")  # type: ignore[misc]
    assert_type(loaded, lib.Transformer)
    assert_type(model.save_pretrained("folder", tokenizer), Path)
    assert_type(model.encode(ids), Tensor)
    assert_type(lib.causal_mask(7), Tensor)
    query = torch.zeros(2, 3)
    attended = lib.scaled_dot_product_attention(query, query, query)
    assert_type(attended, tuple[Tensor, Tensor])
    assert_type(lib.sinusoidal_positions(8, 16), Tensor)


def text_and_tokens(text: str) -> None:
    """A tokenizer cuts a text into ids and joins them again."""
    tokenizer = lib.Tokenizer.train([text], 340)
    assert_type(tokenizer, lib.Tokenizer)
    assert_type(tokenizer.encode(text), list[int])
    assert_type(tokenizer.encode_all([text]), list[list[int]])
    assert_type(tokenizer.decode([5, 6]), str)
    assert_type(tokenizer.vocab_size, int)
    assert_type(lib.load_corpus("grammar-en-de").pairs[0], tuple[str, str])


def training(folder: Path) -> None:
    """A recipe and a folder give a run."""
    recipe = lib.Recipe.load("small", max_steps=10)  # type: ignore[misc]
    assert_type(recipe, lib.Recipe)
    assert_type(recipe.max_steps, int)
    assert_type(lib.train(recipe, folder), lib.Run)
    assert_type(lib.noam_lr(1, 512), float)


def scoring(lines: list[str]) -> None:
    """Scores are numbers, sacreBLEU's come with a signature."""
    assert_type(lib.bleu([["a"]], [["a"]]), float)
    assert_type(lib.sacre_bleu(lines, lines).value, float)
    assert_type(lib.sacre_bleu(lines, lines).signature, str)
