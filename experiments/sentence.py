"""sentence.py: the numbers of one sentence inside the model that ships.

Translates the book's sentence with the shipped model and writes what the chapters take
apart to transformer_lib/evidence/sentence.json: pieces, attention weights of all
layers and heads, of one head what it reads and its queries, keys and values, of one
head between the languages its queries and keys, what the feed-forward networks do to
each word, and the probabilities of the next piece. Run it again when another model
ships; a test compares the record with the model.

Which sentence and which head are shown is a choice, and the record says how it was
made: for each candidate, relations that a reader expects are looked up in every head
of the encoder, and the head is kept whose smallest weight among them is the largest; of
heads where it is above CLEAR, the one whose words look least at the end symbol.
Between the languages it is the head whose queries look most at the most different
pieces; of equal ones, that with the largest mean of their largest weights.

Record: sentence.json
"""

import argparse
import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor

from transformer_lib.decoding import beam_search
from transformer_lib.looking_inside import attention_weights
from transformer_lib.looking_inside.weights import merge_words, word_groups
from transformer_lib.machine import environment_record
from transformer_lib.runs import load_pretrained
from transformer_lib.runs.folder import find_pretrained
from transformer_lib.tokenizer import BOS, EOS

OUT = Path(__file__).resolve().parents[1] / "transformer_lib/evidence/sentence.json"
MODEL = "tatoeba-en-de"
SENTENCE = "The old man sold his house."
# Sentence -> (word, word that it should look at), each the first of its spelling.
CANDIDATES = {
    SENTENCE: [("The", "man"), ("his", "house")],
    "The old man who lives next door sold his house.": [
        ("The", "man"),
        ("his", "house"),
    ],
    "The animal didn't cross the street because it was too tired.": [("it", "animal")],
    "The cat sat on the mat yesterday.": [("sat", "cat"), ("on", "mat")],
    "The little boy lost his ball in the park.": [("his", "ball"), ("in", "park")],
}
CLEAR = 0.95
NEXT = 8  # most probable pieces kept for each step


def rounded(numbers: Tensor, digits: int = 3) -> list:
    """Nested lists of numbers with a few digits; -0.0 is 0.0."""
    if numbers.dim():
        return [rounded(part, digits) for part in numbers]
    return round(numbers.item(), digits) + 0.0


def read(model, tokenizer, text: str) -> dict:
    """A sentence and its translation (beam 4), as pieces, as ids and by words."""
    src = [*tokenizer.encode(text), EOS]
    tgt = [BOS, *beam_search(model, torch.tensor([src]))[0][0].ids]
    sides = {}
    for name, ids in (("source", src), ("target", tgt)):
        pieces = [tokenizer.processor.id_to_piece(i) for i in ids]
        sides[name] = {"ids": ids, "pieces": pieces, "words": word_groups(pieces)}
    sides["source"]["text"] = text
    sides["target"]["text"] = tokenizer.decode(tgt[1:])
    return sides


def tensors(sides: dict) -> tuple[Tensor, Tensor]:
    """What the model reads: shapes (1, S) and (1, T)."""
    source, target = (torch.tensor([sides[key]["ids"]]) for key in ("source", "target"))
    return source, target


def best_head(model, sides: dict, relations: list) -> dict:
    """The encoder's head that shows the relations best, layers and heads from 1."""
    source = sides["source"]
    words = ["".join(source["pieces"][i] for i in g) for g in source["words"]]
    words = [word.removeprefix("▁") for word in words]
    places = [(words.index(a), words.index(b)) for a, b in relations]
    found = []
    for layer, heads in enumerate(attention_weights(model, *tensors(sides))["encoder"]):
        merged = merge_words(heads[0], source["words"], source["words"])  # (H, W, W)
        for head, weights in enumerate(merged):
            seen = [weights[i, j].item() for i, j in places]
            idle = weights[:-1, -1].mean().item()  # on the end symbol
            found.append((min(*seen, CLEAR), -idle, layer + 1, head + 1, seen))
    *_, layer, head, seen = max(found)
    pairs = zip(relations, seen, strict=True)
    shown = [[a, b, round(weight, 3)] for (a, b), weight in pairs]
    return {"relations": shown, "layer": layer, "head": head}


def heads_of(linear, x: Tensor, attention, head: int) -> list:
    """What one head, counted from 1, makes of x (T, D): shape (T, K)."""
    return rounded(linear(x).chunk(attention.num_heads, dim=-1)[head - 1])


@torch.inference_mode()
def one_head(model, ids: Tensor, layer: int, head: int) -> dict:
    """What one head of the encoder reads, (S, D); queries, keys and values, (S, K)."""
    seen = []
    attention = model.encoder.layers[layer - 1].self_attention
    hook = attention.w_q.register_forward_hook(
        lambda module, given, out: seen.append(given[0][0])
    )
    model.encode(ids)
    hook.remove()
    parts = {"inputs": rounded(seen[0])}
    for name, letter in (("queries", "q"), ("keys", "k"), ("values", "v")):
        linear = getattr(attention, f"w_{letter}")
        parts[name] = heads_of(linear, seen[0], attention, head)
    return parts


def widest_head(layers: list[Tensor]) -> tuple[int, int]:
    """The head, (layer, head) from 1, whose rows look most at the most different keys.

    Of equal ones a head of the last layer, then the darkest.

    Args:
        layers: Weights, each of shape (1, H, T, S).
    """
    found = []
    for layer, heads in enumerate(layers, 1):
        for head, weights in enumerate(heads[0], 1):
            most = weights.max(dim=-1)
            spread = len(set(most.indices.tolist()))
            found.append((spread, layer, most.values.mean().item(), head))
    _, layer, _, head = max(found)
    return layer, head


@torch.inference_mode()
def across(model, src_ids: Tensor, tgt_ids: Tensor, layer: int, head: int) -> dict:
    """Queries (T, K) and keys (S, K) of one head of the decoder, into the source."""
    seen = []
    attention = model.decoder.layers[layer - 1].cross_attention
    hook = attention.w_q.register_forward_hook(
        lambda module, given, out: seen.append(given[0][0])
    )
    memory = model.encode(src_ids)
    model.decode(tgt_ids, memory, src_ids)
    hook.remove()
    return {
        "layer": layer,
        "head": head,
        "queries": heads_of(attention.w_q, seen[0], attention, head),
        "keys": heads_of(attention.w_k, memory[0], attention, head),
    }


@torch.inference_mode()
def feed_forward(model, ids: Tensor) -> list[list[dict]]:
    """For each layer of the encoder and each piece, what the network does to it.

    "before" and "added" are the norms of the vector that comes in and of what the
    network adds, "turned" is the cosine between the vectors before and after (with the
    normalization), "active" the share of hidden units that are above zero.
    """
    layers, hooks, seen = model.encoder.layers, [], {}

    def note(key):
        def hook(module, given, out):
            seen[key] = given[0][0].clone(), out[0].clone()

        return hook

    for i, layer in enumerate(layers):
        network = layer.feed_forward
        hidden = [m for m in network.modules() if isinstance(m, torch.nn.Linear)][-1]
        hooks += [
            network.register_forward_hook(note((i, "network"))),
            hidden.register_forward_hook(note((i, "hidden"))),
            layer.register_forward_hook(note((i, "layer"))),
        ]
    model.encode(ids)
    for hook in hooks:
        hook.remove()
    found = []
    for i in range(len(layers)):
        before, added = seen[i, "network"]  # (S, D)
        after, hidden = seen[i, "layer"][1], seen[i, "hidden"][0]  # (S, D), (S, F)
        cosine = torch.nn.functional.cosine_similarity(before, after, dim=-1)
        share = (hidden > 0).float().mean(dim=-1)
        columns = before.norm(dim=-1), added.norm(dim=-1), cosine, share
        names = "before", "added", "turned", "active"
        found.append(
            [
                dict(zip(names, rounded(torch.stack(row)), strict=True))
                for row in zip(*columns, strict=True)
            ]
        )
    return found


@torch.inference_mode()
def next_pieces(model, tokenizer, src_ids: Tensor, tgt_ids: Tensor) -> list[list]:
    """For each step of the decoder the most probable next pieces: [piece, p]."""
    steps = model(src_ids, tgt_ids)[0].softmax(dim=-1)  # (T, V)
    found, piece = [], tokenizer.processor.id_to_piece
    for step in steps:
        best = step.topk(NEXT)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        found.append([[piece(i), round(p, 4)] for i, p in pairs])
    return found


def sentence_record(model, tokenizer, about: dict) -> dict:
    """All of it, for a model in evaluation mode on the CPU."""
    sides = {text: read(model, tokenizer, text) for text in CANDIDATES}
    candidates = {
        text: {
            "translation": sides[text]["target"]["text"],
            **best_head(model, sides[text], relations),
        }
        for text, relations in CANDIDATES.items()
    }
    chosen, (src_ids, tgt_ids) = sides[SENTENCE], tensors(sides[SENTENCE])
    layer, head = (candidates[SENTENCE][key] for key in ("layer", "head"))
    weights = attention_weights(model, src_ids, tgt_ids)
    with torch.inference_mode():
        embedded = model.embed_source(src_ids)[0]
    return {
        "command": "python experiments/sentence.py",
        "model": MODEL,
        "sizes": about["recipe"]["model"],
        **chosen,
        "candidates": candidates,
        "attention": {
            kind: [rounded(w[0]) for w in layers] for kind, layers in weights.items()
        },
        "vectors": rounded(embedded, 2),
        "head": {"layer": layer, "head": head, **one_head(model, src_ids, layer, head)},
        "across": across(model, src_ids, tgt_ids, *widest_head(weights["cross"])),
        "feed_forward": feed_forward(model, src_ids),
        "next": next_pieces(model, tokenizer, src_ids, tgt_ids),
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    record = sentence_record(*load_pretrained(MODEL, "cpu"))
    weights = find_pretrained(MODEL) / "weights.safetensors"
    record["weights_sha256"] = hashlib.sha256(weights.read_bytes()).hexdigest()
    record["environment"] = environment_record()
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    OUT.write_text(text.replace('],"', '],\n"') + "\n", encoding="utf-8")
    for sentence, found in record["candidates"].items():
        print(sentence, "->", found["translation"])
        print(f"  layer {found['layer']}, head {found['head']}:", found["relations"])
    print(f"{OUT.name}: {OUT.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
