"""A trained model that reads another vocabulary.

So a model goes on learning with the pieces of a folder that `prepare` wrote, instead of
starting from nothing. A piece that the model knows keeps its embedding; one that it
knows in lower case takes that one ("▁WHERE" that of "▁where"); any other takes the mean
of those that the model would have cut it into.

Record: none; evidence.py trains on from what it writes
"""

from pathlib import Path

import torch

from transformer_lib.batches import Prepared
from transformer_lib.export.common import piece_names
from transformer_lib.runs import Recipe, Run, load_pretrained
from transformer_lib.tokenizer import UNK, Tokenizer


def rows_for(new: Tokenizer, old: Tokenizer) -> list[list[int]]:
    """For each piece of the new vocabulary, the old ones whose mean it begins as."""
    known = {piece: i for i, piece in enumerate(piece_names(old))}
    rows = []
    for piece in piece_names(new):
        lower = piece.casefold()
        if (same := known.get(piece, known.get(lower))) is not None:
            rows.append([same])
        else:
            rows.append(old.encode(lower.replace("▁", " ").strip()) or [UNK])
    return rows


@torch.no_grad()
def respelled(model: str | Path, data: Path) -> Run:
    """A model with tied embeddings, with the pieces of a folder that prepare wrote."""
    tokenizer = Prepared.load(data).tokenizer
    trained, old, about = load_pretrained(model, "cpu")
    rows = rows_for(tokenizer, old)
    table = trained.src_embedding.weight
    table.data = torch.stack([table[row].mean(0) for row in rows])
    recipe = Recipe.of(about["recipe"] | {"vocab_size": tokenizer.vocab_size})
    known = about["data"], about["environment"], about["weights"]
    return Run(recipe, trained, tokenizer, None, *known)
