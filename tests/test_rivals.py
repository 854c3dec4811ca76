"""The rivals against their papers' formulas, written out word by word in NumPy."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import table2
import table2_lengths
import torch
from small_runs import without_times
from torch import nn

from transformer_lib.batches import make_batch, prepared, tokenize_pairs
from transformer_lib.complexity import Convolutional, Recurrent
from transformer_lib.corpora import grammar_split, load_corpus
from transformer_lib.decoding import FullSteps, greedy_search, output_limits
from transformer_lib.objective import build_optimizer
from transformer_lib.tokenizer import Tokenizer
from transformer_lib.training import BatchLoss, update, validation_loss
from transformer_lib.transformer import TransformerConfig

RESULTS = Path(table2.__file__).parents[1] / "transformer_lib/evidence/results"
SIZE = {"d_model": 12, "num_heads": 2, "dropout": 0.0, "max_length": 20}
SOURCE = torch.tensor([[5, 6, 7, 8, 3], [9, 4, 3, 0, 0]])
TARGET = torch.tensor([[2, 7, 6, 5], [2, 8, 4, 0]])


def models():
    torch.manual_seed(1)
    config = TransformerConfig(30, **SIZE, num_layers=2)
    learned = TransformerConfig(30, **SIZE, num_layers=2, positions="learned")
    return [
        Recurrent(config, hidden=10).double().eval(),
        Convolutional(learned).double().eval(),
    ]


@pytest.fixture(params=models(), ids=["recurrent", "convolutional"])
def model(request):
    return request.param


def hidden_of(model, source=SOURCE, target=TARGET):
    return model.decode(target, model.encode(source), source)


def numbers(model):
    return {n: p.detach().numpy() for n, p in model.named_parameters()}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gru(x, h, w, u, b, c):
    """torch's documented formulas: reset, update, new."""
    n = len(h)
    gate = [
        (w[i : i + n] @ x + b[i : i + n], u[i : i + n] @ h + c[i : i + n])
        for i in (0, n, 2 * n)
    ]
    r, z = (sigmoid(a + d) for a, d in gate[:2])
    new = np.tanh(gate[2][0] + r * gate[2][1])
    return (1 - z) * new + z * h


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def bahdanau(p, source, target):
    """Appendix A of Bahdanau et al. 2015, for one sentence."""
    table = p["src_embedding.weight"]
    n = p["reader.weight_hh_l0"].shape[1]

    def run(words, end):
        h, states = np.zeros(n), []
        for word in words:
            h = gru(
                table[word],
                h,
                *(
                    p[f"reader.{k}_l0{end}"]
                    for k in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
                ),
            )
            states.append(h)
        return states

    forth, back = run(source, ""), run(source[::-1], "_reverse")[::-1]
    memory = [np.concatenate(both) for both in zip(forth, back, strict=True)]
    s = np.tanh(p["first.weight"] @ back[0] + p["first.bias"])
    out = []
    for word in target:
        scores = np.array(
            [
                p["score.weight"][0]
                @ np.tanh(p["query.weight"] @ s + p["key.weight"] @ h)
                for h in memory
            ]
        )
        context = sum(a * h for a, h in zip(softmax(scores), memory, strict=True))
        x = np.concatenate([table[word], context])
        s = gru(
            x,
            s,
            *(
                p[f"writer.{k}"]
                for k in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            ),
        )
        every = np.concatenate([table[word], context, s])
        out.append(np.tanh(p["readout.weight"] @ every + p["readout.bias"]))
    return np.array(out)


def gehring(p, source, target, layers=2, k=3):
    """Section 3 of Gehring et al. 2017, for one sentence."""
    table, d = p["src_embedding.weight"], p["src_embedding.weight"].shape[1]
    half = math.sqrt(0.5)

    def glu(name, places):  # places: k vectors
        w, b = p[f"{name}.weight"], p[f"{name}.bias"]
        y = sum(w[:, :, j] @ places[j] for j in range(k)) + b
        return y[:d] * sigmoid(y[d:])

    def embedded(words, side):
        places = p[f"{side}_positions.table"]
        return [table[w] + places[i] for i, w in enumerate(words)]

    e = embedded(source, "src")
    z, zero = e, np.zeros(d)
    for i in range(layers):
        row = [zero, *z, zero]
        z = [(z[j] + glu(f"reader.{i}", row[j : j + k])) * half for j in range(len(z))]
    values = [(a + b) * half for a, b in zip(z, e, strict=True)]
    h = g = embedded(target, "tgt")
    for i in range(layers):
        row, new = [zero, zero, *h], []
        for j in range(len(h)):
            y = glu(f"writer.{i}", row[j : j + k])
            asked = (p[f"query.{i}.weight"] @ y + p[f"query.{i}.bias"] + g[j]) * half
            weights = softmax(np.array([asked @ key for key in z]))
            c = sum(a * v for a, v in zip(weights, values, strict=True))
            c = c * len(source) * math.sqrt(1 / len(source))
            c = p[f"answer.{i}.weight"] @ c + p[f"answer.{i}.bias"]
            new.append((h[j] + (y + c) * half) * half)
        h = new
    return np.array(h)


def test_each_model_is_its_papers_formula(model):
    formula = bahdanau if isinstance(model, Recurrent) else gehring
    ours = hidden_of(model).detach().numpy()
    for row, (s, t) in enumerate([(5, 4), (3, 3)]):  # without the padding
        by_hand = formula(
            numbers(model), SOURCE[row, :s].tolist(), TARGET[row, :t].tolist()
        )
        np.testing.assert_allclose(ours[row, :t], by_hand, atol=1e-12)


@pytest.mark.parametrize("kind", table2.KINDS)
def test_each_kind_begins_near_an_even_guess(kind):
    recipe = table2.recipe_for("table3-replica", None, [])
    model = table2.made(kind, recipe, 2000).eval()
    torch.manual_seed(0)
    source, target = torch.randint(4, 2000, (2, 32, 15))
    logits = model.project(model.decode(target, model.encode(source), source))
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    assert loss < math.log(2000) + 0.7


def test_what_comes_later_changes_nothing_before(model):
    other = TARGET.clone()
    other[:, 2:] = 11
    a, b = hidden_of(model), hidden_of(model, target=other)
    torch.testing.assert_close(a[:, :2], b[:, :2], rtol=0, atol=0)
    assert not torch.equal(a[:, 2], b[:, 2])


def test_padding_changes_nothing(model):
    wider = nn.functional.pad(SOURCE, (0, 4))
    torch.testing.assert_close(hidden_of(model), hidden_of(model, wider))


def test_one_table_serves_three_ends(model):
    assert model.tgt_embedding.weight is model.src_embedding.weight
    assert model.output.weight is model.src_embedding.weight
    names = dict(model.named_parameters())
    assert "output.weight" not in names and "tgt_embedding.weight" not in names


@pytest.mark.parametrize("kind", [Recurrent, Convolutional])
def test_it_learns_a_few_sentences_by_heart(kind):
    text = sorted(grammar_split("test")[:200], key=lambda pair: len(pair[1]))[:6]
    more = (side for pair in grammar_split("test")[:200] for side in pair)
    tokenizer = Tokenizer.train(more, 600)  # few pieces for each word
    pairs = tokenize_pairs(text, tokenizer)
    config = TransformerConfig(
        600,
        d_model=48,
        num_layers=2,
        num_heads=2,
        dropout=0.0,
        max_length=128,
        positions="learned",
    )
    torch.manual_seed(0)
    model = kind(config, 48) if kind is Recurrent else kind(config)
    optimizer, shared = build_optimizer(model), BatchLoss(model)
    batch = make_batch(pairs, range(6))
    for _ in range(300):
        done = update(shared, optimizer, [batch], 5e-3, 0.0)
        if done.loss < 0.02 * done.tokens:
            break
    assert validation_loss(model, pairs, 1000) < 0.2
    model.eval()
    found = greedy_search(FullSteps(model, batch.src_ids), torch.full((6,), 90))
    assert [tokenizer.decode(row) for row in found] == [target for _, target in text]


TINY = """
name = "tiny"
corpus = "grammar-en-de"
vocab_size = 340
max_pairs = 300
max_length = 60
max_tokens = 300
max_steps = 4
warmup = 10
validate_every = 2
[model]
d_model = 16
num_heads = 2
num_layers = 1
d_ff = 16
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A tiny recipe, and a record of the Transformer to be set against."""
    (tmp_path / "tiny.toml").write_text(TINY)
    chosen = {kind: {"lr_factor": 0.5} for kind in table2.KINDS}
    monkeypatch.setattr(table2, "CHOSEN", chosen)

    def few(name, split="train"):
        there = load_corpus(name, split)
        return there if split == "train" else replace(there, pairs=there.pairs[:4])

    for module in (table2, prepared):
        monkeypatch.setattr(module, "load_corpus", few)
    # Untrained models go on to the limit.
    monkeypatch.setattr(table2, "output_limits", lambda ids, _: output_limits(ids, 2))
    row = {"step": 4, "operations": 1, "core_seconds": 0.0}
    (tmp_path / "against.json").write_text(json.dumps({"history": [row]}))
    return tmp_path


def asked(place, kind, *more):
    words = [
        kind,
        "--recipe",
        str(place / "tiny.toml"),
        "--run-dir",
        str(place / kind),
        "--out",
        "none",
        *more,
    ]
    found = table2.arguments(words)
    found.set = [word.replace("=500", "=2") for word in found.set]
    return found


def run(given):
    recipe = table2.recipe_for(given.recipe, given.data, given.set)
    return table2.run(given.kind, recipe, given)


@pytest.mark.parametrize("kind", table2.KINDS)
def test_each_kind_is_trained_and_scored_at_its_budgets(place, kind, monkeypatch):
    more = [] if kind == "transformer" else ["--against", str(place / "against.json")]
    whole = run(asked(place, kind, *more))
    assert [row["step"] for row in whole["history"]] == [2, 4]
    budgets = {"step"} | ({"operations", "core_seconds"} if more else set())
    assert whole["at"].keys() == budgets
    assert whole["at"]["step"]["step"] == 4 and whole["recipe"]["lr_factor"] == 0.5
    if more:
        assert whole["at"]["operations"]["step"] == 2
    assert all(at["loss"] > 0 and "sacreBLEU" in at for at in whole["at"].values())
    (place / kind).rename(place / "whole")
    saved = table2.save_checkpoint

    def stopped(*arguments):
        saved(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(table2, "save_checkpoint", stopped)
        run(asked(place, kind, *more))
    parts = run(asked(place, kind, *more))
    for record in (whole, parts):
        for row in (*record["history"], *record["at"].values()):
            row["core_seconds"] = 0
    assert without_times(whole) == without_times(parts)


@pytest.mark.parametrize("kind", table2.KINDS[1:])
def test_a_rival_goes_on_until_the_last_budget_is_spent(place, kind):
    """Past the last update of the recipe, where the rate falls on as before."""
    against = place / "against.json"
    short = run(asked(place, kind, "--against", str(against)))
    row = {name: 1.2 * value for name, value in short["history"][-1].items()}
    against.write_text(json.dumps({"history": [row | {"core_seconds": 0.0}]}))
    longer = run(asked(place, kind, "--against", str(against)))
    assert longer["recipe"]["max_steps"] == 4
    assert [row["step"] for row in longer["history"]] == [2, 4, 6]
    assert longer["at"]["step"]["step"] == 4
    assert longer["at"]["operations"]["step"] == 6


@pytest.mark.parametrize("kind", table2.KINDS)
def test_a_sentence_longer_than_those_of_training_is_translated(kind):
    """Where positions are learned, outputs cannot be longer than their table."""
    recipe = replace(table2.recipe_for("table3-replica", None, []), max_length=4)
    pairs = grammar_split("train", 200)
    tokenizer = Tokenizer.train([text for pair in pairs for text in pair], 350)
    model = table2.made(kind, recipe, tokenizer.vocab_size).eval()
    text = "a" * 30
    most = table2.max_length(recipe)
    assert len(tokenizer.encode(text)) + 50 > most
    (said,) = table2.translated(model, tokenizer, [text], most)
    assert isinstance(said, str)


def test_lengths_are_counted_for_sentences_of_like_length(place, monkeypatch):
    """Half as many words as the reference cost a factor of 1 / e; by hand."""
    sources = ["a b c d e", "a b c d e f g", "a b c d e"]
    references = ["u v w x y z u v", "one two three four five", "u v w x y z u v"]
    outputs = ["u v w x", "one two three four five", "u v w x"]
    found = table2_lengths.by_length(sources, references, outputs)
    assert [found[name]["sentences"] for name in ("all", "5", "8")] == [3, 2, 1]
    assert found["5"]["length"] == 0.5
    assert found["5"]["brevity_penalty"] == pytest.approx(math.exp(-1))
    assert found["8"]["BLEU"] == pytest.approx(100)
    run(asked(place, "transformer"))
    monkeypatch.setattr(table2_lengths, "load_corpus", prepared.load_corpus)
    given = asked(place, "transformer", "--out", str(place / "new" / "lengths.json"))
    monkeypatch.setattr(table2_lengths, "arguments", lambda _: given)
    table2_lengths.main([])
    record = json.loads(given.out.read_text("utf-8"))
    assert record["by_length"]["all"]["sentences"] == 4 and record["step"] == 4


def test_multiply_adds_are_those_of_the_formula():
    """The cell reads 3 H (D + 2 H) + 3 H H numbers a word, and so on."""
    d, h, s, t, v = 12, 10, 5, 4, 30
    model = Recurrent(TransformerConfig(v, **SIZE), hidden=h)
    batch = table2.Batch(*(torch.full((1, n), 5) for n in (s, t, t)))
    reader = 2 * s * 3 * h * (d + h)
    keys, first = s * 2 * h * h, h * h
    step = h * h + s * h + s * 2 * h + 3 * h * (d + 2 * h) + 3 * h * h
    out = (d + 3 * h) * d + d * v
    by_hand = 3 * (reader + keys + first + t * (step + out))
    assert table2.multiply_adds(BatchLoss(model, 0), batch) == by_hand


def test_what_was_chosen_is_the_best_of_the_pilot():
    """Of five runs of each kind; dropout stays what the recipe has."""
    for kind, chosen in table2.CHOSEN.items():
        files = (RESULTS / "table2-pilot").glob(f"{kind}-*.json")
        runs = [json.loads(path.read_text("utf-8")) for path in files]
        assert {len(run["history"]) for run in runs} == {4} and len(runs) == 5
        best = min(runs, key=lambda run: run["valid_loss"])["recipe"]
        assert chosen == {"lr_factor": best["lr_factor"]}
        assert best["model"]["dropout"] == 0.1


def test_all_nine_were_trained_alike():
    """All but the model and its rate is the same; no row comes before its budget."""
    files = (RESULTS / "table2").glob("*.json")
    runs = {path.stem: json.loads(path.read_text("utf-8")) for path in files}
    assert runs.keys() == {
        f"{kind}-{seed}" for kind in table2.KINDS for seed in (0, 1, 2)
    }
    for same in ("data", "sentences", "split"):
        assert all(run[same] == runs["transformer-0"][same] for run in runs.values())
    for name, run in runs.items():
        kind, seed = name.split("-")
        first = runs[f"transformer-{seed}"]
        assert run["recipe"] == first["recipe"] | table2.CHOSEN[kind]
        assert run["recipe"]["seed"] == int(seed) and run["kind"] == kind
        for what in ("hardware", "versions"):
            assert run["environment"][what] == first["environment"][what]
        assert abs(run["parameters"] / first["parameters"] - 1) < 0.05
        last = first["history"][-1]
        for budget, row in run["at"].items():
            assert run["budgets"][budget] == last[budget] <= row[budget]
            earlier = [at for at in run["history"] if at["step"] < row["step"]]
            assert all(at[budget] < last[budget] for at in earlier)


def test_without_a_pilot_nothing_is_trained(place, monkeypatch, capsys):
    monkeypatch.setattr(table2, "CHOSEN", {})
    with pytest.raises(SystemExit):
        asked(place, "recurrent")
    assert "no pilot has chosen" in capsys.readouterr().err
    monkeypatch.setattr(table2, "PILOT", 2)
    record = run(asked(place, "recurrent", "--pilot", "--set", "model.dropout=0.3"))
    assert record["recipe"]["model"]["dropout"] == 0.3 and "at" not in record
    assert record["history"][-1]["step"] == 2
