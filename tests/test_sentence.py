"""The record of the sentence, against the model and against our own attention."""

import hashlib
import json
import math
import re

import pytest
import sentence as tool
import torch
from built import ROOT
from figures import html_of
from torch.nn.functional import scaled_dot_product_attention

from transformer_lib import hello
from transformer_lib.figures.hello import attention_figure, read_weights
from transformer_lib.runs import load_pretrained, read_evidence
from transformer_lib.runs.folder import find_pretrained

AGAIN = "run experiments/sentence.py again"


@pytest.fixture(scope="module")
def record():
    return read_evidence("sentence")


def numbers(value, way=""):
    """All numbers of a nested record, each with the way to it."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in items:
            yield from numbers(part, f"{way}/{key}")
    else:
        yield way, value


def test_the_record_is_what_the_shipped_model_gives(record):
    weights = find_pretrained(record["model"]) / "weights.safetensors"
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    assert record["weights_sha256"] == digest, f"another model ships: {AGAIN}"
    model, tokenizer, about = load_pretrained(record["model"], "cpu")
    now = dict(numbers(tool.sentence_record(model, tokenizer, about)))
    kept = dict(numbers(record))
    for way, value in now.items():
        if isinstance(value, float):
            assert kept[way] == pytest.approx(value, abs=0.011), f"{way}: {AGAIN}"
        else:
            assert kept[way] == value, f"{way}: {AGAIN}"
    left = set(kept) - set(now)
    assert all(w.startswith(("/weights_sha256", "/environment")) for w in left), left


def test_the_record_is_small_and_names_its_commit(record):
    assert tool.OUT.stat().st_size < 150_000
    assert len(record["environment"]["commit"]) == 40
    assert json.loads(tool.OUT.read_text("utf-8")) == record


def test_rows_of_weights_sum_to_one_and_nobody_looks_ahead(record):
    length = {side: len(record[side]["pieces"]) for side in ("source", "target")}
    sides = {
        "encoder": ("source", "source"),
        "decoder": ("target", "target"),
        "cross": ("target", "source"),
    }
    for kind, layers in record["attention"].items():
        weights = torch.tensor(layers)  # (L, H, T, S)
        sizes = record["sizes"]["num_layers"], record["sizes"]["num_heads"]
        assert weights.shape == (*sizes, *(length[side] for side in sides[kind]))
        torch.testing.assert_close(
            weights.sum(-1), torch.ones(weights.shape[:-1]), atol=0.006, rtol=0
        )
        assert kind != "decoder" or not weights.triu(1).any()


def test_torch_and_chapter_01_get_the_weights_from_queries_and_keys(record):
    head = record["head"]
    wanted = record["attention"]["encoder"][head["layer"] - 1][head["head"] - 1]
    wanted = torch.tensor(wanted)
    q, k = (torch.tensor([head[name]]) for name in ("queries", "keys"))
    eye = torch.eye(k.shape[1])[None]  # as values: what comes out are the weights
    theirs = scaled_dot_product_attention(q, k, eye)[0]
    torch.testing.assert_close(theirs, wanted, atol=0.003, rtol=0)
    scores = hello.matmul(head["queries"], hello.transpose(head["keys"]))
    root = len(head["queries"][0]) ** 0.5
    ours = [hello.softmax([score / root for score in row]) for row in scores]
    torch.testing.assert_close(torch.tensor(ours), theirs, atol=1e-5, rtol=0)


def test_the_head_is_the_clear_one_that_looks_least_at_the_end(record):
    """Found once more, by hand, from the weights in the record."""
    found = record["candidates"][record["source"]["text"]]
    pieces = [piece.removeprefix("▁") for piece in record["source"]["pieces"]]
    places = [(pieces.index(a), pieces.index(b)) for a, b, _ in found["relations"]]
    ends = {
        (i, j): sum(row[-1] for row in weights[:-1])
        for i, heads in enumerate(record["attention"]["encoder"], 1)
        for j, weights in enumerate(heads, 1)
        if all(weights[q][k] > 0.95 for q, k in places)
    }
    assert len(ends) > 1  # else the strongest one, whatever its end
    assert min(ends, key=ends.get) == (found["layer"], found["head"])
    assert min(ends, key=ends.get) == (record["head"]["layer"], record["head"]["head"])


def test_what_the_head_reads_makes_its_queries_keys_and_values(record):
    """By torch's own product, from the file of weights; chapter 02 shows it."""
    head = record["head"]
    tables = read_weights(f"encoder.layers.{head['layer'] - 1}.self_attention.")
    inputs = torch.tensor(head["inputs"])
    assert inputs.shape == (len(record["source"]["ids"]), record["sizes"]["d_model"])
    for name in ("queries", "keys", "values"):
        made = torch.nn.functional.linear(inputs, tables[f"w_{name[0]}.weight"])
        made = made.chunk(record["sizes"]["num_heads"], dim=-1)[head["head"] - 1]
        torch.testing.assert_close(made, torch.tensor(head[name]), atol=0.01, rtol=0)


def test_torch_gets_the_weights_across_and_the_head_is_the_widest(record):
    across, layers = record["across"], record["attention"]["cross"]
    wanted = torch.tensor(layers[across["layer"] - 1][across["head"] - 1])
    q, k = (torch.tensor([across[name]]) for name in ("queries", "keys"))
    theirs = scaled_dot_product_attention(q, k, torch.eye(k.shape[1])[None])[0]
    torch.testing.assert_close(theirs, wanted, atol=0.004, rtol=0)
    spreads = [
        len({row.index(max(row)) for row in weights})
        for heads in layers
        for weights in heads
    ]
    ours = {row.index(max(row)) for row in wanted.tolist()}
    assert len(ours) == max(spreads)


def test_words_and_positions_are_what_the_first_layer_reads(record):
    """Sines and cosines by math, not by chapter 04."""
    words = read_weights("src_embedding.")["weight"][record["source"]["ids"]]
    D = words.shape[1]
    for place, (word, kept) in enumerate(zip(words, record["vectors"], strict=True)):
        angles = [place / 10_000 ** (2 * (i // 2) / D) for i in range(D)]
        added = [(math.cos if i % 2 else math.sin)(a) for i, a in enumerate(angles)]
        made = word * D**0.5 + torch.tensor(added)
        torch.testing.assert_close(made, torch.tensor(kept), atol=0.006, rtol=0)


def test_the_weights_that_chapters_read_are_those_of_the_model(record):
    model, _, _ = load_pretrained(record["model"], "cpu")
    for name, table in model.encoder.state_dict().items():
        torch.testing.assert_close(read_weights("encoder.")[name], table)
    assert read_weights().keys() <= model.state_dict().keys()


def test_the_first_screens_say_what_the_model_wrote(record):
    """The source is in their text; what came of it is read from the record."""
    welcome = (ROOT / "book" / "welcome.md").read_text("utf-8")
    hello = json.loads((ROOT / "notebooks" / "01_hello.ipynb").read_text("utf-8"))
    for text in (welcome, "".join(hello["cells"][0]["source"])):
        assert f"*{record['source']['text']}*" in " ".join(text.split())
    assert "{record}`sentence target.text`" in welcome
    shown = html_of(attention_figure(record))  # the figure of chapter 01
    words = re.findall(r"\w+", record["target"]["text"])
    assert ",".join(f'"{word}"' for word in words) in shown


def test_the_translation_is_made_of_likely_pieces(record):
    """Each piece that the beam took is among the most probable ones of its step."""
    written = [*record["target"]["pieces"][1:], "</s>"]
    for piece, best in zip(written, record["next"], strict=True):
        assert piece in [name for name, _ in best]
        assert sum(p for _, p in best) <= 1.0001
        assert [p for _, p in best] == sorted((p for _, p in best), reverse=True)
