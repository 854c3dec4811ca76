"""Where the decoders of chapter 26's parsers look, and what they write with help.

    python experiments/parser_heads.py RUN RUN ...

Each RUN is a folder of a run of slots, named by its recipe. For development trees of
CRAFT, with the right beginning given: the share of slots before words, and behind them,
that are written right; and for each head of cross-attention the mean of its weights on
the two slots of the word that is being written. For one sentence, with what the parser
wrote itself: of the head with the largest such mean, the weights from word to word.
The record goes to transformer_lib/evidence/parser-heads.json.

Record: parser-heads.json
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from transformer_lib.looking_inside import attention_weights
from transformer_lib.machine import environment_record
from transformer_lib.parsing import Tree, load_trees
from transformer_lib.parsing.parser import slot_search
from transformer_lib.parsing.tree_tokens import source_text, split_words, tree_pair
from transformer_lib.runs import Run
from transformer_lib.storage import write_json
from transformer_lib.tokenizer import BOS, EOS

OUT = Path(__file__).resolve().parents[1] / "transformer_lib/evidence/parser-heads.json"
SENTENCE = "We found that the protein is expressed in the brain."
EVERY, LONGEST = 28, 70  # one development tree in so many; words


def by_word(weights: Tensor) -> Tensor:
    """Weights from slots to slots, (H, 2 W, 2 W + 1), as (H, W, W + 1) from words.

    The two slots of a word written are averaged, those of a word read added; the last
    column is the end symbol.
    """
    heads, _, read = weights.shape
    words = weights[:, :, : read - 1].reshape(heads, -1, 2, (read - 1) // 2, 2)
    ended = weights[:, :, read - 1].reshape(heads, -1, 2, 1).mean(2)
    return torch.cat([words.sum(-1).mean(2), ended], dim=-1)


def looked(model, src: list[int], tgt: list[int]) -> Tensor:
    """Of all heads, from which word they look at which: (L, H, W, W + 1)."""
    sides = torch.tensor([[*src, EOS]]), torch.tensor([[BOS, *tgt]])
    layers = attention_weights(model, *sides)["cross"]  # L of (1, H, 2 W + 1, 2 W + 1)
    return torch.stack([by_word(layer[0, :, :-1]) for layer in layers])


@torch.inference_mode()
def measure(run: Run, trees: list[Tree]) -> dict:
    """The shares of right slots, and of the heads' weights on the right word."""
    model, tokenizer = run.model, run.tokenizer
    right, seen, on_word, words = torch.zeros(2), 0, 0.0, 0
    for tree in trees:
        src, tgt = (tokenizer.encode(side) for side in tree_pair(tree, tokenizer))
        if len(tgt) != 2 * len(tree.words):  # brackets that no slot opens
            continue
        sides = torch.tensor([[*src, EOS]]), torch.tensor([[BOS, *tgt]])
        best = model(*sides)[0, :-1].argmax(-1)  # (2 W,)
        right += (best == torch.tensor(tgt)).reshape(-1, 2).sum(0)
        seen += len(tgt) // 2
        if len(tree.words) > 4:  # in a short sentence any head is near the word
            own = looked(model, src, tgt).diagonal(dim1=2, dim2=3)  # (L, H, W)
            on_word, words = on_word + own.sum(-1), words + own.shape[-1]
    heads = on_word / words  # (L, H)
    layer, head = divmod(int(heads.argmax()), heads.shape[1])
    src = tokenizer.encode(source_text(split_words(SENTENCE), tokenizer))
    (found,) = slot_search(
        model, torch.tensor([[*src, EOS]]), tokenizer, [len(src) // 2]
    )
    one = looked(model, src, found[0].ids)[layer, head]
    return {
        "recipe": run.recipe.name,
        "updates": run.progress.step,
        "words": seen,
        "opening": float(right[0]) / seen,
        "closing": float(right[1]) / seen,
        "heads": [[round(x, 4) for x in row] for row in heads.tolist()],
        "layer": layer,
        "head": head,
        "weights": [[round(x, 3) for x in row] for row in one.tolist()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--weights", default="average")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    bank = load_trees("craft", "valid")
    trees = [tree for tree in bank.trees[::EVERY] if len(tree.words) <= LONGEST]
    results = {}
    for folder in given.runs:
        run = Run.load(folder, "cpu", given.weights)
        results[run.recipe.name] = measure(run, trees)
    record = {
        "command": "python experiments/parser_heads.py RUN RUN",
        "sentence": split_words(SENTENCE),
        "weights": given.weights,
        "development": {
            "trees": len(trees),
            "every": EVERY,
            "longest": LONGEST,
            "sha256": bank.sha256,
        },
        "environment": environment_record("cpu"),
        "results": results,
    }
    write_json(given.out, record)
    for name, one in results.items():
        print(
            f"{name}: right {one['opening']:.2f} {one['closing']:.2f}, best head "
            f"{max(map(max, one['heads'])):.2f}"
        )


if __name__ == "__main__":
    main()
