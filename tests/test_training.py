"""Chapter 12: updates against torch's own, runs that resume, recipes, mistakes."""

import gc
import importlib.util
import json
import math
import os
import random
import shutil
import subprocess
import sys
import threading
import tracemalloc
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import transformer_lib.training as training
from transformer_lib import text as text_module
from transformer_lib.batches import (
    TokenPairs,
    flatten,
    make_batch,
    pack,
    prepare,
    tokenize_pairs,
)
from transformer_lib.corpora import Corpus
from transformer_lib.exercises.training import (
    check_average,
    check_best_step,
    check_mean_loss,
)
from transformer_lib.grammar import grammar_split
from transformer_lib.objective import build_optimizer
from transformer_lib.tokenizer import EOS, Tokenizer
from transformer_lib.training import (
    Progress,
    Recipe,
    Update,
    average_checkpoints,
    load_run,
    packed_hidden,
    same_part,
    update,
)
from transformer_lib.transformer import Transformer, TransformerConfig

VOCABULARY = 340
FEW = {"train": grammar_split("valid")[:400], "valid": grammar_split("test")[:40]}
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
    """training.train on the prepared pairs, silently."""
    return partial(training.train, data_dir=data_dir, show=False)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Transformer(TransformerConfig(VOCABULARY, **SMALL | {"dropout": 0.0}))


def tiny(**changes):
    settings = {"max_steps": 6, "validate_every": 2, "max_tokens": 300}
    settings |= {"vocab_size": VOCABULARY, "model": SMALL}
    return Recipe.load("grammar", **settings | changes)


def test_update_is_torchs_step_on_torchs_loss(model, pairs):
    """One update with two batches, against cross_entropy on all tokens at once."""
    twin = Transformer(model.config)
    twin.load_state_dict(model.state_dict())
    group = [make_batch(pairs, range(3)), make_batch(pairs, range(3, 12))]
    total, tokens, norm, bad = update(model, build_optimizer(model), group, 1e-3, 0.1)

    adam = torch.optim.Adam(twin.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9)
    losses = [
        torch.nn.functional.cross_entropy(
            twin(b.src_ids, b.tgt_in).transpose(1, 2), b.tgt_out,
            ignore_index=0, label_smoothing=0.1, reduction="sum",
        )
        for b in group
    ]  # fmt: skip
    assert total == pytest.approx(sum(losses).item(), rel=1e-5)
    assert tokens == sum(int((b.tgt_out != 0).sum()) for b in group)
    (sum(losses) / tokens).backward()
    gradients = zip(model.parameters(), twin.parameters(), strict=True)
    for a, b in gradients:
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-4)
    # Adam divides by the gradient's size: a weight whose gradient is rounding error
    # may step either way, so weights are held equal where the gradient is not tiny.
    adam.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        clear = b.grad.abs() > 1e-5
        torch.testing.assert_close(a[clear], b[clear], atol=1e-5, rtol=0)


def test_update_leaves_weights_alone_when_the_loss_is_not_finite(model, pairs):
    with torch.no_grad():
        model.decoder.layers[0].feed_forward.w_1.bias.fill_(math.nan)
    before = [p.clone() for p in model.parameters()]
    done = update(
        model, build_optimizer(model), [make_batch(pairs, range(3))], 1e-3, 0.1
    )
    assert math.isnan(done.loss) and done.bad == 0 and not done.finite
    for a, b in zip(before, model.parameters(), strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_nan_names_step_and_batch(train, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "update", lambda *args: Update(math.nan, 9, 1.0, 0))
    with pytest.raises(FloatingPointError, match=r"update 1 \(epoch 0, batch 1, pairs"):
        train(tiny(), tmp_path)


def test_same_recipe_same_losses(train, tmp_path):
    one = train(tiny(), tmp_path / "one")
    two = train(tiny(), tmp_path / "two")
    for a, b in zip(one.history, two.history, strict=True):
        assert a["train_loss"] == b["train_loss"]
        assert a["valid_loss"] == b["valid_loss"]
    assert [h["step"] for h in one.history] == [2, 4, 6]


@pytest.mark.parametrize("stop", [1, 2, 3, 5])
def test_resumed_run_is_bit_equal(train, tmp_path, monkeypatch, stop):
    """Dropout on, accumulation on, stopped anywhere: the same weights to the bit."""
    recipe = tiny(accumulate=2)
    whole = train(recipe, tmp_path / "whole")
    real, calls = training.update, []

    def cut(*args):
        calls.append(1)
        if len(calls) > stop:
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(training, "update", cut)
        train(recipe, tmp_path / "cut")
    resumed = train(recipe, tmp_path / "cut")
    losses = [[h["train_loss"] for h in run.history] for run in (whole, resumed)]
    assert losses[0] == losses[1]
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_finished_run_is_loaded_not_repeated(train, tmp_path, monkeypatch):
    first = train(tiny(), tmp_path)
    monkeypatch.setattr(training, "update", lambda *args: pytest.fail("trained again"))
    again = train(tiny(), tmp_path)
    assert again.history == first.history
    ids = torch.tensor([[5, 6, 3]])
    assert torch.equal(first.model(ids, ids), load_run(tmp_path).model(ids, ids))
    assert load_run(tmp_path).data["sha256"] == first.data["sha256"]


def test_max_seconds_stops_and_run_goes_on(train, tmp_path):
    assert train(tiny(), tmp_path, max_seconds=0.0).progress.step == 1
    assert train(tiny(), tmp_path).progress.step == 6


def test_nothing_half_written(train, tmp_path):
    train(tiny(), tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "recipe.json", "about.json", "tokenizer.model", "manifest.json",
        "best.safetensors", "last.safetensors", "last.previous.safetensors",
        "step-000002.safetensors", "step-000004.safetensors", "step-000006.safetensors",
    }  # fmt: skip


def test_shared_matrix_is_stored_once(train, tmp_path):
    train(tiny(), tmp_path)
    tensors, _ = training.load_tensors(tmp_path / "best.safetensors")
    rows = [name for name, t in tensors.items() if t.shape == (VOCABULARY, 32)]
    assert rows == ["src_embedding.weight"]


def test_folder_of_another_recipe_is_refused(train, tmp_path):
    train(tiny(), tmp_path)
    with pytest.raises(ValueError, match=r"another recipe \(it differs in \['seed'\]"):
        train(tiny(seed=1), tmp_path)


def test_weights_of_another_model_are_refused(model):
    other = Transformer(TransformerConfig(VOCABULARY, **SMALL | {"num_layers": 2}))
    with pytest.raises(ValueError, match="of another model"):
        training.load_weights(model, dict(other.named_parameters()))
    wide = Transformer(TransformerConfig(VOCABULARY + 1, **SMALL))
    with pytest.raises(ValueError, match=r"\(341, 32\).*\(340, 32\)"):
        training.load_weights(model, dict(wide.named_parameters()))


def test_recipes(tmp_path):
    for name in ("grammar", "tatoeba-en-de", "tatoeba-en-de-short"):
        recipe = Recipe.load(name)
        assert recipe.name == name
        Transformer(TransformerConfig(recipe.vocab_size, **recipe.model))
        assert json.loads(json.dumps(asdict(recipe))) == asdict(recipe)
    with pytest.raises(ValueError, match="no recipe 'grammer'.*'grammar'"):
        Recipe.load("grammer")
    mine = tmp_path / "mine.toml"
    mine.write_text('name = "mine"\ncorpus = "x"\nvocab_size = 9\nstepz = 3\n')
    with pytest.raises(ValueError, match=r"mine.toml has unknown settings \['stepz'\]"):
        Recipe.load(mine)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"vocab_size": "many"}, "vocab_size='many': must be a whole number"),
        ({"vocab_size": 10**30}, "vocab_size="),
        ({"max_steps": 0}, "max_steps=0: must be a whole number, at least 1"),
        ({"max_steps": True}, "max_steps=True"),
        ({"factor": math.nan}, "factor=nan: must be a number above 0"),
        ({"epsilon": 1.0}, "epsilon=1.0: .*below 1"),
        ({"clip": -1}, "clip=-1"),
        ({"kind": "word"}, "kind='word': must be 'bpe' or 'unigram'"),
        ({"precision": ["float16"]}, "precision=.*'float32' or 'bfloat16'"),
        ({"max_tokens": 128}, "max_tokens=128: a batch must hold the longest pair"),
        ({"model": {"width": 3}}, r"\[model\] has unknown settings \['width'\]"),
        ({"model": {"dropout": "0.1"}}, r"\[model\] dropout='0.1': must be a number"),
        ({"model": {"d_model": 100, "num_heads": 8}}, "equal heads"),
        ({"model": {"norm_first": 1}}, "true or false"),
        ({"corpus": {"valid": "a.tsv"}}, "must be the name of a corpus, a file, or"),
        ({"corpus": {"train": ["a", "b", "c"]}}, r"\[corpus\] train=.*one file"),
    ],
)
def test_recipe_refuses_nonsense(changes, said):
    with pytest.raises(ValueError, match=said):
        Recipe.load("grammar", **changes)


NAMES = [setting.name for setting in fields(Recipe)]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(["bpe", "float32", 700, 4096]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["train", "d_model", "dropout"]), inner),
    max_leaves=4,
)  # fmt: skip


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from([*NAMES, "else"]), VALUES, max_size=4))
def test_any_settings_are_a_recipe_or_a_sentence(changes):
    given_settings = {"name": "x", "corpus": "y", "vocab_size": 700} | changes
    try:
        recipe = Recipe.of(given_settings)
    except ValueError as error:
        assert str(error).startswith("the recipe")
    else:
        assert Recipe.of(asdict(recipe)) == recipe


@settings(max_examples=200)
@given(content=st.binary(max_size=60) | st.text(max_size=60).map(str.encode)
       | st.just(b"a = " + b"[" * 5000))  # fmt: skip
def test_any_file_is_a_recipe_or_a_sentence(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("toml", numbered=True) / "mine.toml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="mine.toml"):
        Recipe.load(path)


def test_table_of_files_counts_from_the_recipes_folder(tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text(
        'name = "mine"\nvocab_size = 340\n[corpus]\ntrain = ["a.en", "a.de"]\n'
        'valid = "b.tsv"\nbad = "refuse"\n'
    )
    corpus = Recipe.load(mine).corpus
    assert corpus["train"] == [str(tmp_path / "a.en"), str(tmp_path / "a.de")]
    assert corpus["valid"] == str(tmp_path / "b.tsv")
    assert corpus["bad"] == "refuse"


def test_run_prepares_its_own_data_from_a_users_files(data_dir, tmp_path):
    """Without data_dir: into the run's folder, with the run's own vocabulary."""
    corpus = json.loads((data_dir / "data.json").read_text())["corpus"]
    run = training.train(tiny(corpus=corpus, max_steps=2), tmp_path, show=False)
    assert (tmp_path / "data" / "data.json").exists()
    assert run.data["train_pairs"] == len(FEW["train"])
    again = training.train(tiny(corpus=corpus, max_steps=4), tmp_path, show=False)
    assert again.progress.step == 4


def test_data_of_other_settings_are_refused(train, tmp_path):
    with pytest.raises(ValueError, match="prepared with vocab_size=340; recipe"):
        train(tiny(vocab_size=350), tmp_path)


def test_clip_shortens_the_gradient_and_reports_its_length(model, pairs):
    group, length = [make_batch(pairs, range(9))], {}
    for clip in 0.0, 0.01:
        twin = Transformer(model.config)
        twin.load_state_dict(model.state_dict())
        done = update(twin, build_optimizer(twin), group, 1e-3, 0.1, clip)
        gradient = torch.cat([p.grad.flatten() for p in twin.parameters()])
        length[clip] = done.norm, gradient.norm().item()
    assert length[0.0][0] == pytest.approx(length[0.0][1], rel=1e-5)
    assert length[0.01][0] == pytest.approx(length[0.0][0], rel=1e-6)
    assert length[0.01][1] == pytest.approx(0.01, rel=1e-3)


def test_a_gradient_that_is_not_finite_makes_no_step(model, pairs):
    """A finite loss whose gradient overflows: weights and moments stay."""
    optimizer, batch = build_optimizer(model), make_batch(pairs, range(3))
    update(model, optimizer, [batch], 1e-3, 0.1)
    before = [p.clone() for p in model.parameters()]
    hook = model.src_embedding.weight.register_hook(lambda g: g * math.inf)
    done = update(model, optimizer, [batch], 1e-3, 0.1)
    hook.remove()
    assert math.isfinite(done.loss) and not done.finite and done.bad is None
    for a, b in zip(before, model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_bfloat16_is_close_and_leaves_weights_in_float32(model, pairs):
    batch = make_batch(pairs, range(20))
    losses = []
    for precision in "float32", "bfloat16":
        twin = Transformer(model.config)
        twin.load_state_dict(model.state_dict())
        done = update(twin, build_optimizer(twin), [batch], 0.0, 0.1, 0.0, precision)
        losses.append(done.loss / done.tokens)
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in twin.parameters())
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.02)


@pytest.mark.parametrize("rate", [math.nan, -1.0, math.inf])
def test_a_rate_that_is_none_is_refused(model, pairs, rate):
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=f"rate={rate}: a learning rate is a number"):
        update(model, build_optimizer(model), [make_batch(pairs, range(3))], rate, 0.1)
    for a, b in zip(before, model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_an_unknown_precision_is_refused(model, pairs):
    group = [make_batch(pairs, range(3))]
    with pytest.raises(ValueError, match="precision='float64': must be 'float32' or"):
        update(model, build_optimizer(model), group, 1e-3, 0.1, 0.0, "float64")


# --- packed rows ---


def drawn_pairs(count, seed):
    """Pairs of random ids, of 1 to 9 tokens."""
    rng = random.Random(seed)
    sides = [[[rng.randrange(4, 50) for _ in range(rng.randint(1, 9))]
              for _ in range(count)] for _ in "st"]  # fmt: skip
    return TokenPairs(*flatten(sides[0], 50), *flatten(sides[1], 50))


def one_by_one(model, pairs, indices):
    """Source, target and hidden states of each pair alone: the plain path."""
    for i in indices:
        batch = make_batch(pairs, [i])
        hidden = model.decode(batch.tgt_in, model.encode(batch.src_ids), batch.src_ids)
        yield batch.src_ids[0], batch.tgt_out[0], hidden[0]


def ids_of(*sides):
    """Tensors of ids as something to look up by: two pairs may share one side."""
    return tuple(tuple(side.tolist()) for side in sides)


@given(st.integers(0, 1000), st.integers(10, 40))
@settings(max_examples=15)
def test_packed_rows_give_what_the_pairs_give_alone(seed, width):
    """Hidden states of every token, in whatever row and place it came to lie."""
    torch.manual_seed(seed)
    config = TransformerConfig(50, **SMALL | {"d_model": 16})
    model, pairs = Transformer(config).eval(), drawn_pairs(9, seed)
    packed = pack(pairs, range(9), width)
    with torch.no_grad():
        hidden = packed_hidden(model, packed)
        alone = {ids_of(s, t): h for s, t, h in one_by_one(model, pairs, range(9))}
    found = 0
    for row in range(len(packed.src_ids)):
        for part in range(1, int(packed.tgt_part[row].max()) + 1):
            here = packed.tgt_part[row] == part
            source = packed.src_ids[row][packed.src_part[row] == part]
            target = packed.tgt_out[row][here]
            assert packed.tgt_place[row][here].tolist() == list(range(len(target)))
            assert target[-1] == EOS
            torch.testing.assert_close(hidden[row][here], alone[ids_of(source, target)],
                                       atol=1e-5, rtol=1e-5)  # fmt: skip
            found += len(target)
    assert found == packed.num_tokens == int(pairs.tgt_lengths.sum())


def test_gradients_of_packed_rows(model, pairs):
    update(model, build_optimizer(model), [pack(pairs, range(12), 40)], 0.0, 0.1)
    got = {name: p.grad.clone() for name, p in model.named_parameters()}
    update(model, build_optimizer(model), [make_batch(pairs, range(12))], 0.0, 0.1)
    for name, p in model.named_parameters():
        torch.testing.assert_close(got[name], p.grad, atol=1e-6, rtol=1e-4)


def test_same_part_by_a_plain_loop():
    query, key = torch.tensor([[1, 1, 2, 0]]), torch.tensor([[1, 2, 2, 0, 0]])
    looks, seen = query[0].tolist(), key[0].tolist()
    wanted = [[q == k and k > 0 for k in seen] for q in looks]
    assert same_part(query, key).tolist() == [[wanted]]


# --- the switches of a recipe ---


def losses_of(model, pairs, precision="float32", chunk=256, fused=True, scale=1.0,
              packed=0, compiled=False, sparse=False):  # fmt: skip
    """Losses of five updates from the same weights on the same pairs."""
    twin = Transformer(model.config)
    twin.load_state_dict(model.state_dict())
    shared, adam = training.BatchLoss(twin, chunk), build_optimizer(twin, fused)
    found = []
    twin.src_embedding.sparse = twin.tgt_embedding.sparse = sparse
    if compiled:
        training.compile_layers(twin)
        assert twin.encoder._compiled_call_impl and twin.decoder._compiled_call_impl
    for i in range(5):
        some = range(9 * i, 9 * i + 9)
        group = [pack(pairs, some, packed) if packed else make_batch(pairs, some)]
        done = update(shared, adam, group, 3e-3, 0.1, 0.0, precision, scale)
        assert done.finite
        found.append(done.loss / done.tokens)
    return found


@pytest.mark.parametrize(("switch", "within"), [
    ({"chunk": 0}, 1e-5), ({"chunk": 7}, 1e-5), ({"fused": False}, 1e-5),
    ({"scale": 2.0**20}, 1e-6), ({"precision": "bfloat16"}, 0.03),
    ({"precision": "float16", "scale": 2.0**10}, 0.01), ({"packed": 40}, 1e-5),
    ({"sparse": True}, 1e-5), ({"sparse": True, "chunk": 0}, 1e-5),
    ({"packed": 40, "chunk": 7, "precision": "bfloat16"}, 0.03),
    ({"compiled": True}, 1e-5), ({"compiled": True, "packed": 40}, 1e-5),
])  # fmt: skip
def test_each_switch_trains_as_the_plain_path(
    model, pairs, switch, within, monkeypatch
):
    """What the compiler's front ends trace is run; no C++ compiler is needed for it."""
    traced = partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", traced)
    torch.compiler.reset()
    plain = losses_of(model, pairs, chunk=0, fused=False)
    assert losses_of(model, pairs, **switch) == pytest.approx(plain, abs=within)


def test_float16_halves_the_scale_until_the_gradient_fits(train, tmp_path, monkeypatch):
    """A scale that overflows: no step is made by it, and it is counted."""
    real, calls = training.update, []

    def watched(model, *rest):
        before = [p.clone() for p in model.parameters()]
        done = real(model, *rest)
        same = all(map(torch.equal, before, model.parameters()))
        calls.append((rest[-1], done.finite, same))
        return done

    monkeypatch.setattr(training, "update", watched)
    start = {"scale": 2.0**40}
    monkeypatch.setattr(training, "Progress", lambda **at: Progress(**start | at))
    run = train(tiny(precision="float16"), tmp_path)
    tried = [finite for _, finite, _ in calls]
    skipped = tried.count(False)
    assert skipped > 3 and tried == [False] * skipped + [True] * 6
    assert all(finite != same for _, finite, same in calls)
    assert [scale for scale, *_ in calls[: skipped + 1]] == [
        2.0 ** (40 - i) for i in range(skipped + 1)
    ]
    assert run.progress.skipped == skipped and run.progress.steady == 6
    assert run.progress.scale == calls[-1][0]


def test_the_scale_doubles_after_2000_good_updates():
    at = Progress(scale=8.0)
    for _ in range(1999):
        training.adjust_scale(at, True)
    assert (at.scale, at.steady) == (8.0, 1999)
    training.adjust_scale(at, True)
    assert (at.scale, at.steady) == (16.0, 0)
    training.adjust_scale(at, False)
    assert (at.scale, at.steady, at.skipped) == (8.0, 0, 1)


def test_float16_that_never_fits_names_the_batch(train, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "update", lambda *args: Update(1.0, 9, math.inf))
    with pytest.raises(FloatingPointError, match="the gradient is not a finite number"):
        train(tiny(precision="float16"), tmp_path)


def test_batches_made_ahead_are_the_same_in_the_same_order(train, tmp_path):
    recipes = (tiny(prefetch=n, max_steps=12) for n in (0, 3))
    one, two = (train(recipe, tmp_path / str(recipe.prefetch)) for recipe in recipes)
    for a, b in zip(one.history, two.history, strict=True):
        for name in "train_loss", "valid_loss", "epoch", "tokens":
            assert a[name] == b[name]
    assert (one.progress.epoch, one.progress.batch) == (
        two.progress.epoch, two.progress.batch)  # fmt: skip


def test_what_makes_batches_ahead_hands_on_its_errors_and_ends():
    def items():
        yield from (1, 2)
        raise OSError("the disk is gone")

    before = threading.active_count()
    with training.made_ahead(items(), 4) as ready:
        assert [next(ready), next(ready)] == [1, 2]
        with pytest.raises(OSError, match="the disk is gone"):
            next(ready)
    with training.made_ahead(iter(range(10**9)), 2) as ready:
        assert next(ready) == 0
    assert threading.active_count() == before


@pytest.mark.parametrize(("major", "wanted"), [
    (6, "float32"), (7, "float16"), (8, "bfloat16"), (9, "bfloat16"),
])  # fmt: skip
def test_precision_by_compute_capability(monkeypatch, major, wanted):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 5))
    precision, why = training.native_precision("cuda")
    assert precision == wanted and f"{major}.5" in why


def test_accumulation_equals_one_big_batch(model, pairs):
    """Eight batches of an update and the same pairs in one: 1e-6."""
    gradients = []
    for cut in 8, 64:
        twin = Transformer(model.config)
        twin.load_state_dict(model.state_dict())
        group = [make_batch(pairs, range(i, i + cut)) for i in range(0, 64, cut)]
        done = update(twin, build_optimizer(twin), group, 0.0, 0.1)
        gradients.append(torch.cat([p.grad.flatten() for p in twin.parameters()]))
        assert done.tokens == sum(batch.num_tokens for batch in group)
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-4)


def test_dropout_begins_late(train, tmp_path):
    """Equal to a run without dropout up to there, and another one from there on."""
    without = train(tiny(model=SMALL | {"dropout": 0.0}), tmp_path / "without")
    late = train(tiny(dropout_after=4), tmp_path / "late")
    losses = [[h["train_loss"] for h in run.history] for run in (without, late)]
    assert losses[0][:2] == losses[1][:2]
    assert losses[0][2] != losses[1][2]


def test_only_the_last_steps_are_kept(train, tmp_path):
    train(tiny(keep_last=2), tmp_path)
    names = [path.name for path in training.step_files(tmp_path)]
    assert names == ["step-000004.safetensors", "step-000006.safetensors"]
    steps = load_run(tmp_path, weights="average").record["averaged"]
    assert steps == [4, 6]


def test_average_of_copies_is_the_copy(train, tmp_path):
    """To the bit, for any number of copies; tied matrices stay one."""
    train(tiny(), tmp_path)
    best = load_run(tmp_path).model
    for copies in 1, 2, 3, 5, 7:
        mean = average_checkpoints([tmp_path / "best.safetensors"] * copies)
        for name, parameter in best.named_parameters():
            assert torch.equal(mean[name], parameter), (copies, name)
    tied = load_run(tmp_path, weights="average").model
    assert tied.output.weight is tied.src_embedding.weight
    assert tied.tgt_embedding.weight is tied.src_embedding.weight


def test_average_is_torchs_mean(train, tmp_path):
    train(tiny(), tmp_path)
    files = training.step_files(tmp_path)
    assert [training.step_of(path) for path in files] == [2, 4, 6]
    asked = (None, None, files), (2, None, files[1:]), (5, 4, files[2:])
    for last, after, chosen in asked:
        mean = average_checkpoints(tmp_path, last=last, after=after)
        parts = [training.load_tensors(path)[0] for path in chosen]
        for name, tensor in mean.items():
            wanted = torch.stack([part[name] for part in parts]).mean(dim=0)
            torch.testing.assert_close(tensor, wanted, atol=1e-7, rtol=1e-6)
    with pytest.raises(ValueError, match="no files step-.*after update 6"):
        average_checkpoints(tmp_path, after=6)


def test_average_of_halves_is_summed_wider(tmp_path):
    for i in range(4):
        training.save_tensors(
            tmp_path / f"step-{i:06d}.safetensors",
            {"w": torch.full((3,), 40000.0, dtype=torch.float16)}, {},
        )  # fmt: skip
    mean = average_checkpoints(tmp_path)["w"]
    assert mean.dtype == torch.float16 and mean.tolist() == [40000.0] * 3


def test_checkpoints_of_two_models_are_not_averaged(tmp_path):
    for name, width in ("a", 3), ("b", 4):
        path = tmp_path / f"{name}.safetensors"
        training.save_tensors(path, {"w": torch.zeros(width)}, {})
    with pytest.raises(ValueError, match=r"different models: 'w' has shape \(3,\)"):
        average_checkpoints([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])


def test_last_checkpoint_can_be_averaged_and_loaded(train, tmp_path):
    train(tiny(), tmp_path)
    last = average_checkpoints([tmp_path / "last.safetensors"])
    step = average_checkpoints(tmp_path, last=1)
    assert all(torch.equal(last[name], tensor) for name, tensor in step.items())
    assert load_run(tmp_path, weights="last").record["step"] == 6


@pytest.mark.parametrize("half", [False, True])
def test_pretrained_folder(train, tmp_path, half):
    run = train(tiny(), tmp_path / "run")
    folder = training.save_pretrained(run, tmp_path / "given", half=half)
    names = {"weights.safetensors", "tokenizer.model", "recipe.json", "about.json"}
    assert {path.name for path in folder.iterdir()} == names | {"manifest.json"}
    model, tokenizer, about = training.load_pretrained(folder)
    assert about["weights"] == run.record and about["recipe"]["name"] == "grammar"
    for p, q in zip(model.parameters(), run.model.parameters(), strict=True):
        wanted = q.half().float() if half else q
        assert p.dtype == torch.float32 and torch.equal(p, wanted)
    assert tokenizer.encode("the dog") == run.tokenizer.encode("the dog")
    assert training.load_pretrained(tmp_path / "run")[2]["weights"] == run.record


def test_shipped_model_loads():
    model, tokenizer, about = training.load_pretrained("tatoeba-en-de")
    assert not model.training and tokenizer.vocab_size == model.config.vocab_size
    assert about["recipe"]["corpus"] == "tatoeba-en-de"
    with pytest.raises(ValueError, match="no model 'klingon'.*tatoeba-en-de"):
        training.load_pretrained("klingon")


@pytest.mark.parametrize("dtype", training.DTYPES)
def test_the_files_are_those_of_the_safetensors_library(tmp_path, dtype):
    """Read by its own reader: names, shapes, types and numbers; odd sizes between."""
    tensors = {"odd": torch.arange(5).to(torch.uint8), "a": torch.rand(3, 4) * 9}
    tensors |= {"none": torch.zeros(0, 3), "one": torch.tensor(2.5)}
    tensors = {f"{n} {dtype}": t.to(dtype) for n, t in tensors.items()} | tensors
    tensors["turned"] = torch.rand(3, 4).T
    path = tmp_path / "x.safetensors"
    training.save_tensors(path, tensors, {"step": 3, "who": "Jürgen"})
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    assert training.load_tensors(path)[1] == {"step": 3, "who": "Jürgen"}


def test_every_bit_of_a_file_of_tensors_counts(tmp_path):
    """The record, too: there a bit made update 600 into 700."""
    path = tmp_path / "x.safetensors"
    record = {"step": 600, "seconds": 1.5, "history": [{"valid_loss": 2.0}]}
    tensors = {"w": torch.arange(4.0), "rng": torch.arange(3, dtype=torch.uint8)}
    training.save_tensors(path, tensors, record)
    whole = path.read_bytes()
    for i in range(len(whole) * 8):
        harmed = bytearray(whole)
        harmed[i // 8] ^= 1 << i % 8
        path.write_bytes(harmed)
        try:
            got, said = training.load_tensors(path)
        except training.DamagedFile:
            continue
        assert said == record and got.keys() == tensors.keys(), i
        assert all(torch.equal(got[name], tensors[name]) for name in tensors), i


def test_files_of_a_run_have_the_mode_that_others_have(train, tmp_path):
    before = os.umask(0o022)
    try:
        train(tiny(), tmp_path / "run")
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "run").iterdir() if path.is_file()]
    assert len(files) > 7
    assert {path.stat().st_mode & 0o777 for path in files} == {0o644}


def content(folder):
    """Name and bytes of each file below a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_train_leaves_a_folder_of_others_alone(train, tmp_path, data_dir):
    """Also one that looks a little like a run: a model, prepared text."""
    mine, model, text = (tmp_path / name for name in ("mine", "model", "text"))
    mine.mkdir()
    for name in "notes.txt.part", "x.new", "step-000001.safetensors":
        (mine / name).write_text("mine")
    training.save_pretrained(train(tiny(max_steps=1), tmp_path / "run"), model)
    shutil.copytree(data_dir, text)
    for folder in mine, model, text:
        before = content(folder)
        with pytest.raises(ValueError, match="is not empty and holds no run"):
            train(tiny(), folder)
        assert content(folder) == before
    with pytest.raises(ValueError, match="is a file: give a folder"):
        train(tiny(), mine / "x.new")
    with pytest.raises(ValueError, match="run_dir is empty"):
        train(tiny(), "")


def test_train_clears_away_its_own_leftovers_only(train, tmp_path):
    train(tiny(max_steps=2), tmp_path)
    own = "last.safetensors.0123abcd.part", "recipe.json.00000000.part"
    others = "last.safetensors.part", "notes.part", "step-000001.safetensors"
    for name in own + others:
        (tmp_path / name).write_text("half")
    train(tiny(max_steps=6, keep_last=1), tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert not names & set(own) and names >= set(others)
    assert {path.name for path in training.step_files(tmp_path)} == {
        "step-000001.safetensors", "step-000006.safetensors"}  # fmt: skip


@pytest.mark.parametrize(
    "changes, said",
    [({"vocab_size": 100}, "vocab_size=100"), ({"corpus": "no.tsv"}, "no.tsv"),
     ({"max_length": 1}, "no pair is left"), ({"start_from": "klingon"}, "klingon")],
)  # fmt: skip
def test_a_try_that_is_refused_claims_no_folder(data_dir, tmp_path, changes, said):
    corpus = json.loads((data_dir / "data.json").read_text("utf-8"))["corpus"]
    with pytest.raises((ValueError, RuntimeError), match=said):
        training.train(tiny(**{"corpus": corpus} | changes), tmp_path / "run")
    assert not list(tmp_path.iterdir())
    fine = tiny(corpus=corpus, max_steps=1)
    assert training.train(fine, tmp_path / "run", show=False).progress.step == 1


def test_what_diverged_says_what_works(train, tmp_path, monkeypatch):
    """A corrected recipe is taken where no checkpoint is; else another folder is."""
    real = training.update
    monkeypatch.setattr(training, "update", lambda *_: Update(math.nan, 9, 1.0, 0))
    with pytest.raises(FloatingPointError, match="another folder, with a lower factor"):
        train(tiny(), tmp_path / "run")
    monkeypatch.setattr(training, "update", real)
    train(tiny(factor=0.5, max_steps=2), tmp_path / "run")
    with pytest.raises(ValueError, match="another recipe.*factor.*another folder"):
        train(tiny(factor=0.4), tmp_path / "run")


@pytest.mark.skipif(os.name != "posix", reason="needs locks on folders")
def test_two_trains_in_one_folder(train, tmp_path):
    (tmp_path / "run").mkdir()
    code = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), 2); input()"
    ask = [sys.executable, "-c", code + "; print()", tmp_path / "run"]
    with subprocess.Popen(ask, stdin=subprocess.PIPE) as other:
        said = ""
        while not said:  # until the other process holds it
            (tmp_path / "run" / "notes").write_text("mine")  # without it: not empty
            with pytest.raises(ValueError) as error:
                train(tiny(max_steps=1), tmp_path / "run")
            said = str(error.value) * ("another process trains in" in str(error.value))
        other.communicate(b"\n")
    (tmp_path / "run" / "notes").unlink()
    assert train(tiny(max_steps=1), tmp_path / "run").progress.step == 1


@pytest.fixture(scope="module")
def given(data_dir, tmp_path_factory):
    """A model of few bytes, and the run that it is from."""
    folder = tmp_path_factory.mktemp("given")
    run = training.train(tiny(), folder / "run", data_dir, show=False)
    training.save_pretrained(run, folder / "model")
    return folder


@pytest.mark.parametrize("place", ["model", "run"])
@pytest.mark.parametrize("name", [*training.RUN_FILES, "manifest.json"])
def test_a_bit_of_any_file_of_a_model_or_run_is_noticed(given, place, name):
    path = given / place / name
    whole = path.read_bytes()
    rng = random.Random(name)
    try:
        for _ in range(20):
            harmed, bit = bytearray(whole), rng.randrange(len(whole) * 8)
            harmed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(harmed)
            with pytest.raises(training.DamagedFile, match=str(given / place)):
                training.load_pretrained(given / place, "cpu")
            if place == "run":
                with pytest.raises(training.DamagedFile):
                    training.train(tiny(max_steps=8), given / "run", show=False)
        path.unlink()
        if (place, name) != ("run", "manifest.json"):
            with pytest.raises(ValueError, match=f"{name}|no model"):
                training.load_pretrained(given / place, "cpu")
    finally:
        path.write_bytes(whole)
    training.load_pretrained(given / place, "cpu")


@pytest.mark.parametrize("moment", range(5))
def test_a_model_is_replaced_whole_or_not_at_all(given, tmp_path, monkeypatch, moment):
    """The disk is full at one of its five files."""
    shutil.copytree(given / "model", tmp_path / "model")
    before, calls = content(tmp_path / "model"), []

    def full(file, *rest):
        calls.append(file)
        if len(calls) > moment:
            raise OSError(28, "No space left on device")

    run = load_run(given / "run", weights="last")
    monkeypatch.setattr(text_module, "finish_file", full)
    monkeypatch.setattr(training, "finish_file", lambda file: None)
    with pytest.raises(OSError, match="model could not be written .No space left"):
        training.save_pretrained(run, tmp_path / "model")
    assert content(tmp_path) == {f"model/{name}": b for name, b in before.items()}
    monkeypatch.undo()
    training.save_pretrained(run, tmp_path / "model")
    assert training.load_pretrained(tmp_path / "model")[2]["weights"]["step"] == 6


def test_a_model_is_not_written_over_something_else(given, tmp_path):
    run = load_run(given / "run")
    (tmp_path / "notes.txt").write_text("mine")
    for folder, said in (tmp_path, "notes.txt"), (given / "run", "best.safetensors"):
        before = content(folder)
        with pytest.raises(ValueError, match=f"else than a model .{said}"):
            training.save_pretrained(run, folder)
        assert content(folder) == before
    with torch.no_grad():
        run.model.decoder.layers[0].feed_forward.w_1.bias[0] = 1e6
    with pytest.raises(ValueError, match="too large for 16 bits; with half=False"):
        training.save_pretrained(run, tmp_path / "large")
    training.save_pretrained(run, tmp_path / "large", half=False)


@pytest.mark.parametrize(
    "content", ["", "[]", "3", '"x"', "null", "{", "[" * 9999, '{"data": 3}', "{}"]
)
def test_json_of_another_shape_is_named(given, tmp_path, content):
    for name in "recipe.json", "about.json":
        shutil.copytree(given / "run", tmp_path / name)
        (tmp_path / name / "manifest.json").unlink()
        (tmp_path / name / name).write_text(content)
        with pytest.raises(ValueError, match=f"{name}/{name}"):
            load_run(tmp_path / name)


def test_weights_that_are_no_numbers_are_refused(given, tmp_path):
    tensors, record = training.load_tensors(given / "run" / "best.safetensors")
    name = next(iter(tensors))
    tensors[name][0] = math.nan
    training.save_tensors(tmp_path / "nan.safetensors", tensors, record)
    with pytest.raises(ValueError, match=f"{name} holds weights that are not finite"):
        load_run(given / "run", weights=tmp_path / "nan.safetensors")


def test_every_shipped_model_names_its_own_hashes():
    folders = (Path(training.__file__).parent / "pretrained").iterdir()
    for folder in folders:
        training.check_manifest(folder, training.MODEL_FILES)


@pytest.mark.parametrize(
    "model",
    [{"num_layers": 10**6, "d_model": 8}, {"d_model": 2**20}, {"d_ff": 10**9},
     {"d_k": 10**8}, {"max_length": 10**9}],
)  # fmt: skip
def test_models_beyond_reason_are_refused_at_once(model):
    with pytest.raises(ValueError, match="parameters; at most.*mistyped"):
        Recipe.load("grammar", model=model)
    Recipe.load("grammar", model={"num_layers": 48, "d_model": 2048, "d_ff": 8192})


def test_no_pickle_is_read(tmp_path):
    path = tmp_path / "best.safetensors"
    torch.save({"w": torch.zeros(3)}, path)
    with pytest.raises(training.DamagedFile, match="best.safetensors is damaged"):
        training.load_tensors(path)


def test_read_evidence_says_what_is_missing():
    known = "there are attention-heads, benchmarks/decoding, .*tatoeba-en-de-start"
    with pytest.raises(ValueError, match=f"no record 'nothing-of-that-name': {known}"):
        training.read_evidence("nothing-of-that-name")


def test_recorded_outputs_are_matched_by_hash():
    pairs = FEW["valid"]
    outputs = {training.pair_key(pair): str(i) for i, pair in enumerate(pairs)}
    record = {"recipe": {"corpus": "x"}, "outputs": {"gone": "?"} | outputs}
    with pytest.MonkeyPatch.context() as patch:
        found = Corpus("x", "test", pairs[::-1], licence="ours", origin="a test")
        patch.setattr(training, "load_corpus", lambda name, split: found)
        got = training.recorded_outputs(record)
    assert got == [(*pair, str(i)) for i, pair in enumerate(pairs)]


def test_benchmark_runs(tmp_path):
    """benchmarks/training.py --quick: all four combinations give figures."""
    pytest.importorskip("transformers")
    path = Path(__file__).parents[1] / "benchmarks" / "training.py"
    spec = importlib.util.spec_from_file_location("benchmark_training", path)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    threads = torch.get_num_threads()
    try:
        asked = ["--quick", "--threads", "1", "--out", str(tmp_path / "figures.json")]
        record = benchmark.main(asked)
    finally:
        torch.set_num_threads(threads)
    (table,) = record["results"].values()
    ours, theirs = table["parameters"]
    assert len(table) == 5 and abs(ours / theirs - 1) < 0.02
    assert json.loads((tmp_path / "figures.json").read_text()) == record


def test_environment_record_is_complete():
    record = training.environment_record()
    assert record["versions"]["torch"] == torch.__version__
    assert {"hardware", "python", "commit", "date"} <= record.keys()
    assert asdict(Progress())["step"] == 0


def mean_of_means(losses, tokens):
    return sum(losses) / len(losses)


def summed(losses, tokens):
    return sum(a * b for a, b in zip(losses, tokens, strict=True))


def last_step(history):
    return history[-1]["step"]


def latest_best(history):
    return min(reversed(history), key=lambda record: record["valid_loss"])["step"]


def total(checkpoints):
    return {k: sum(c[k] for c in checkpoints) for k in checkpoints[0]}


def in_place(checkpoints):
    for name, tensor in checkpoints[0].items():
        for other in checkpoints[1:]:
            tensor += other[name]
        tensor /= len(checkpoints)
    return checkpoints[0]


def in_half(checkpoints):
    return {
        k: sum(c[k] for c in checkpoints) / len(checkpoints) for k in checkpoints[0]
    }


@pytest.mark.parametrize(
    "check, wrong, telling",
    [
        (check_mean_loss, mean_of_means, "mean of the two means"),
        (check_mean_loss, summed, "divide by the number of tokens"),
        (check_best_step, last_step, "lowest training loss"),
        (check_best_step, latest_best, "keep the earlier"),
        (check_average, total, "the sum"),
        (check_average, in_place, "in place"),
        (check_average, in_half, "overflowed"),
    ],
)
def test_mistakes_are_named(check, wrong, telling):
    verdict = check(wrong)
    assert not verdict.passed
    assert telling in verdict.message


def test_a_run_can_start_from_a_trained_one(train, data_dir, tmp_path):
    first = train(tiny(), tmp_path / "first")
    training.save_pretrained(first, tmp_path / "given", half=False)
    recipe = tiny(start_from=str(tmp_path / "given"), max_steps=1, factor=1e-9)
    second = train(recipe, tmp_path / "second")
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    assert second.history[0]["valid_loss"] == pytest.approx(
        min(row["valid_loss"] for row in first.history), abs=1e-4
    )
    with pytest.raises(ValueError, match="another vocabulary"):
        train(tiny(start_from="tatoeba-en-de"), tmp_path / "third")
    spec = json.loads((data_dir / "data.json").read_text("utf-8"))["corpus"]
    alone = tiny(start_from=str(tmp_path / "given"), max_steps=2, corpus=spec)
    run = training.train(alone, tmp_path / "fourth", show=False)
    assert run.tokenizer.model == first.tokenizer.model


def test_joined_lines_are_read_in_training_and_not_in_validation(train, tmp_path):
    plain, joined = (
        train(tiny(joined=share, max_steps=2), tmp_path / str(share))
        for share in (0.0, 2.0)
    )
    assert plain.history[0]["valid_loss"] == pytest.approx(
        joined.history[0]["valid_loss"], abs=0.5
    )
    assert plain.history[0]["train_loss"] != joined.history[0]["train_loss"]


def test_the_shipped_model_is_that_of_the_record():
    shipped = Path(training.__file__).parent / "pretrained" / "tatoeba-en-de"
    assert sum(path.stat().st_size for path in shipped.iterdir()) < 20e6
    record = training.read_evidence("tatoeba-en-de")
    recipe = json.loads((shipped / "recipe.json").read_text("utf-8"))
    wanted = Recipe.load("tatoeba-en-de")
    assert Recipe.of(recipe) == Recipe.of(record["recipe"]) == wanted
    start = Recipe.load("tatoeba-en-de-start")
    began = training.read_evidence("tatoeba-en-de-start")["recipe"]
    assert Recipe.of(began) == start
    assert record["scores"]["sacreBLEU"]["value"] > 23


# --- memory ---


def test_a_run_holds_a_few_bytes_of_each_pair():
    """The order of an epoch, while it is made and after: whatever the text's size."""
    count, held = 200_000, {}
    rng, sides = np.random.default_rng(0), []
    for _ in "st":
        offsets = np.concatenate([[0], np.cumsum(rng.integers(3, 30, count))])
        sides += [np.zeros(offsets[-1], np.uint16), offsets]
    pairs = TokenPairs(*sides)
    for packed in (0, 64):
        recipe = tiny(packed=packed, max_tokens=1000)
        tracemalloc.start()
        found = training.places(pairs, recipe, Progress())
        first = next(found)
        held[packed] = [size / count for size in tracemalloc.get_traced_memory()]
        tracemalloc.stop()
        assert len(first.indices) > 10
    for now, most in held.values():
        assert now < 24 and most < 100, held


def test_memory_does_not_grow_with_the_length_of_a_run(train, tmp_path, monkeypatch):
    """Live tensors, and what Python holds, at one validation and 60 updates later."""
    real, seen = training.validate_and_save, []

    def counted(*given):
        real(*given)
        gc.collect()
        live = sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())
        seen.append((live, tracemalloc.get_traced_memory()[0]))

    monkeypatch.setattr(training, "validate_and_save", counted)
    tracemalloc.start()
    train(tiny(max_steps=180, validate_every=15), tmp_path)
    tracemalloc.stop()
    (tensors, before), *_, (later, after) = seen[-5:]
    assert later <= tensors and after - before < 60 * 500, seen
