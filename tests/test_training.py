"""Chapter 12: the loop, updates against torch's own, packed rows, mistakes."""

import importlib.util
import itertools
import json
import math
import random
import types
from functools import partial
from pathlib import Path

import pytest
import small_runs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import FEW, SMALL, VOCABULARY

from transformer_lib import machine, training
from transformer_lib.batches import TokenPairs, make_batch, pack
from transformer_lib.batches.plan import flatten
from transformer_lib.exercises.training import check_mean_loss
from transformer_lib.objective import build_optimizer
from transformer_lib.tokenizer import EOS, Tokenizer
from transformer_lib.training import (
    fit,
    hidden_states,
    quick_translate,
    segment_mask,
    update,
)
from transformer_lib.transformer import Transformer, TransformerConfig

# Fixtures that more than one file uses.
model = small_runs.model
pairs = small_runs.pairs


def test_update_is_torchs_step_on_torchs_loss(model, pairs):
    """One update with two batches, against cross_entropy on all tokens at once."""
    twin = Transformer(model.config)
    twin.load_state_dict(model.state_dict())
    group = [make_batch(pairs, range(3)), make_batch(pairs, range(3, 12))]
    total, tokens, _norm, _bad = update(model, build_optimizer(model), group, 1e-3, 0.1)

    adam = torch.optim.Adam(twin.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9)
    losses = [
        torch.nn.functional.cross_entropy(
            twin(b.src_ids, b.tgt_in).transpose(1, 2),
            b.tgt_out,
            ignore_index=0,
            label_smoothing=0.1,
            reduction="sum",
        )
        for b in group
    ]
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
    with pytest.raises(ValueError, match=f"lr={rate}: a learning rate is a number"):
        update(model, build_optimizer(model), [make_batch(pairs, range(3))], rate, 0.1)
    for a, b in zip(before, model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("clip", -1.0),
        ("clip", math.nan),
        ("scale", 0.0),
        ("scale", math.nan),
        ("scale", math.inf),
    ],
)
def test_a_limit_or_scale_that_is_none_is_refused(model, pairs, name, value):
    optimizer, group = build_optimizer(model), [make_batch(pairs, range(3))]
    with pytest.raises(ValueError, match=f"{name}={value}: must be a number"):
        update(model, optimizer, group, 1e-3, 0.1, **{name: value})


def test_quick_translate_takes_one_sentence_and_refuses_no_numbers(model, pairs):
    text = FEW["train"][0][0]
    tokenizer = Tokenizer.train((side for pair in FEW["train"] for side in pair), 340)
    alone, (among,) = (quick_translate(model, tokenizer, x) for x in (text, [text]))
    assert isinstance(alone, str) and alone == among
    model.decoder.layers[0].feed_forward.w_1.bias.data.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="NaN or infinite"):
        quick_translate(model, tokenizer, text)


def test_an_unknown_precision_is_refused(model, pairs):
    group = [make_batch(pairs, range(3))]
    with pytest.raises(ValueError, match="precision='float64': must be 'float32' or"):
        update(model, build_optimizer(model), group, 1e-3, 0.1, 0.0, "float64")


def drawn_pairs(count, seed):
    """Pairs of random ids, of 1 to 9 tokens."""
    rng = random.Random(seed)
    sides = [
        [[rng.randrange(4, 50) for _ in range(rng.randint(1, 9))] for _ in range(count)]
        for _ in "st"
    ]
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
        hidden = hidden_states(model, packed)
        alone = {ids_of(s, t): h for s, t, h in one_by_one(model, pairs, range(9))}
    found = 0
    for row in range(len(packed.src_ids)):
        for part in range(1, int(packed.tgt_segments[row].max()) + 1):
            here = packed.tgt_segments[row] == part
            source = packed.src_ids[row][packed.src_segments[row] == part]
            target = packed.tgt_out[row][here]
            assert packed.tgt_position_ids[row][here].tolist() == list(
                range(len(target))
            )
            assert target[-1] == EOS
            torch.testing.assert_close(
                hidden[row][here], alone[ids_of(source, target)], atol=1e-5, rtol=1e-5
            )
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
    assert segment_mask(query, key).tolist() == [[wanted]]


def losses_of(
    model,
    pairs,
    precision="float32",
    chunk=256,
    fused=True,
    scale=1.0,
    packed=0,
    compiled=False,
    sparse=False,
):
    """Losses of five updates (compiled: two) from the same weights."""
    twin = Transformer(model.config)
    twin.load_state_dict(model.state_dict())
    shared, adam = training.BatchLoss(twin, chunk), build_optimizer(twin, fused)
    found = []
    twin.src_embedding.sparse = twin.tgt_embedding.sparse = sparse
    if compiled:
        training.compile_layers(twin)
        assert twin.encoder._compiled_call_impl and twin.decoder._compiled_call_impl
    for i in range(2 if compiled else 5):
        some = range(9 * i, 9 * i + 9)
        group = [pack(pairs, some, packed) if packed else make_batch(pairs, some)]
        done = update(shared, adam, group, 3e-3, 0.1, 0.0, precision, scale)
        assert done.finite
        found.append(done.loss / done.tokens)
    return found


@pytest.mark.parametrize(
    ("switch", "within"),
    [
        ({"chunk": 0}, 1e-5),
        ({"chunk": 7}, 1e-5),
        ({"fused": False}, 1e-5),
        ({"scale": 2.0**20}, 1e-6),
        ({"precision": "bfloat16"}, 0.03),
        ({"precision": "float16", "scale": 2.0**10}, 0.01),
        ({"packed": 40}, 1e-5),
        ({"sparse": True}, 1e-5),
        ({"sparse": True, "chunk": 0}, 1e-5),
        ({"packed": 40, "chunk": 7, "precision": "bfloat16"}, 0.03),
        ({"compiled": True}, 1e-5),
        ({"compiled": True, "packed": 40}, 1e-5),
    ],
)
def test_each_switch_trains_as_the_plain_path(
    model, pairs, switch, within, monkeypatch
):
    """What the compiler's front ends trace is run; no C++ compiler is needed for it."""
    traced = partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", traced)
    torch.compiler.reset()
    plain = losses_of(model, pairs, chunk=0, fused=False)
    # Else all is traced twice: numbers are constants only the second time.
    with torch._dynamo.config.patch(specialize_float=True):
        found = losses_of(model, pairs, **switch)
    assert found == pytest.approx(plain[: len(found)], abs=within)


@pytest.mark.parametrize(
    ("major", "wanted"),
    [
        (6, "float32"),
        (7, "float16"),
        (8, "bfloat16"),
        (9, "bfloat16"),
    ],
)
def test_precision_by_compute_capability(monkeypatch, major, wanted):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 5))
    precision, why = machine.native_precision("cuda")
    assert precision == wanted and f"{major}.5" in why


@pytest.mark.parametrize(
    ("float32", "bfloat16", "wanted"),
    [
        (157e9, 85e9, "float32"),  # a Xeon with AVX512-BF16
        (98e9, 212e9, "bfloat16"),  # an EPYC with AVX512-BF16
        (98e9, 105e9, "float32"),  # no clear gain
    ],
)
def test_precision_of_a_cpu_by_what_it_does_fast(
    monkeypatch, float32, bfloat16, wanted
):
    asked = []

    def measured(threads):
        asked.append(threads)
        return {"float32": float32, "bfloat16": bfloat16}

    monkeypatch.setattr(machine, "product_rates", measured)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    precision, why = machine.native_precision("cpu")
    assert precision == wanted and asked == [3]
    assert why == (
        f"{float32 / 1e9:.0f} GFLOP/s in float32, {bfloat16 / 1e9:.0f} in bfloat16"
    )
    assert machine.native_precision("meta")[0] == "float32" and asked == [3]


def test_a_product_is_timed_once_and_leaves_the_random_numbers(monkeypatch):
    """The clock says 1 s for each product in float32 and half of that in bfloat16."""
    now = itertools.accumulate(itertools.cycle([1.0, 1.0, 1.0, 0.5]))
    clock = types.SimpleNamespace(perf_counter=lambda: next(now))
    monkeypatch.setattr(machine, "time", clock)
    machine.product_rates.cache_clear()
    before = torch.get_rng_state()
    rates = machine.product_rates(1)
    assert rates == {
        "float32": 2 * 1280 * 256 * 1024,
        "bfloat16": 4 * 1280 * 256 * 1024,
    }
    assert torch.equal(before, torch.get_rng_state())
    monkeypatch.setattr(clock, "perf_counter", None)  # it is not asked again
    assert machine.product_rates(1) is rates
    machine.product_rates.cache_clear()


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


def mean_of_means(losses, tokens):
    return sum(losses) / len(losses)


def summed(losses, tokens):
    return sum(a * b for a, b in zip(losses, tokens, strict=True))


@pytest.mark.parametrize(
    "check, wrong, telling",
    [
        (check_mean_loss, mean_of_means, "mean of the two means"),
        (check_mean_loss, summed, "divide by the number of tokens"),
    ],
)
def test_mistakes_are_named(check, wrong, telling):
    verdict = check(wrong)
    assert not verdict.passed
    assert telling in verdict.message


def test_fit_leaves_the_model_in_evaluation_mode(model, pairs):
    assert len(fit(model, pairs, 3, 300)) == 3 and not model.training


@pytest.fixture(scope="module")
def tokenizer():
    text = (side for pair in FEW["valid"] for side in pair)
    return Tokenizer.train(text, VOCABULARY)
