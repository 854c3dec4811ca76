"""Chapter 21: chunks and switches against the plain path; memory."""

import dataclasses
import json
import math
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transformer_lib import machine, speed
from transformer_lib.batches import TokenPairs, make_batch
from transformer_lib.batches.plan import flatten
from transformer_lib.exercises.speed import (
    check_int8_product,
    check_overall,
    check_packed_mask,
)
from transformer_lib.machine import fast_precisions
from transformer_lib.objective import label_smoothed_cross_entropy
from transformer_lib.speed import (
    LADDER,
    LiveMemory,
    Steps,
    adam,
    attention_as,
    climb,
    feed,
    first_losses,
    ladder,
    ladder_on,
    laps,
    matmul_ceiling,
    mean_loss,
    quantize_rows,
    quantized,
    race,
    ratio_interval,
    trainer,
    training_flops,
)
from transformer_lib.tokenizer import EOS, PAD
from transformer_lib.transformer import Transformer, TransformerConfig

SMALL = {"d_model": 16, "num_heads": 2, "num_layers": 2, "d_ff": 32}
CONFIG = TransformerConfig(50, **SMALL)


def token_pairs(count, longest=9, seed=0):
    rng = random.Random(seed)

    def side():
        lengths = [rng.randint(1, longest) for _ in range(count)]
        return [[rng.randrange(4, 50) for _ in range(n)] for n in lengths]

    sides = side(), side()
    return TokenPairs(*flatten(sides[0], 50), *flatten(sides[1], 50))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Transformer(CONFIG).eval()


# --- what a batch holds ---


@pytest.mark.parametrize("how", ["random", "length", "packed"])
def test_an_epoch_feeds_each_pair_once(how):
    pairs = token_pairs(60)
    seen = [[]]
    for batch in feed(pairs, how, max_tokens=60, width=20):
        for token in batch.tgt_out[batch.tgt_out != PAD].tolist():
            if token == EOS:
                seen.append([])
            else:
                seen[-1].append(token)
    assert sorted(seen[:-1]) == sorted(pairs[i][1].tolist() for i in range(60))


# --- every step computes the same training ---


def test_losses_agree_step_by_step():
    """Plain path against every switch; only 16 bits round."""
    pairs = token_pairs(40)
    batches = list(feed(pairs, "length", 60))[:4]
    plain = first_losses(CONFIG, Steps(), batches)
    for change in (
        {"attention": "fused"},
        {"loss": "real"},
        {"loss": "chunked"},
        {"optimizer": "foreach"},
        {"optimizer": "fused"},
    ):
        losses = first_losses(CONFIG, Steps(**change), batches)
        assert losses == pytest.approx(plain, abs=1e-5), change
    for precision in ("bfloat16", "float16"):
        low = first_losses(CONFIG, Steps(precision=precision), batches)
        assert low == pytest.approx(plain, abs=0.03) and low != plain


def test_adam_takes_the_same_steps():
    """All forms against torch's default, over several updates."""
    finals = []
    for form in ("loop", "foreach", "fused"):
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3)
        optimizer = adam(model, form)
        optimizer.param_groups[0]["lr"] = 0.1
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(2, 5)).square().sum().backward()
            optimizer.step()
        finals.append(model.weight.detach())
    assert optimizer.defaults["betas"] == (0.9, 0.98)
    for other in finals[1:]:
        torch.testing.assert_close(other, finals[0], atol=1e-6, rtol=1e-5)


def test_attention_is_put_back(model):
    attention = model.decoder.layers[0].cross_attention
    x = torch.randn(1, 3, attention.d_model)
    with pytest.raises(RuntimeError), attention_as(model, "explicit"):
        assert attention(x, x, x)[1] is not None  # the formula's weights
        raise RuntimeError
    assert attention(x, x, x)[1] is None
    with attention_as(model, "fused"):
        assert attention(x, x, x)[1] is None


def test_the_ladder_adds_up():
    steps = ladder()
    assert list(steps) == list(LADDER)
    first, *_, last = steps.values()
    assert first == Steps()
    assert (last.feed, last.attention) == ("length", "fused")
    assert last.precision == "bfloat16"


@pytest.mark.parametrize(
    ("capability", "bits"),
    [
        ((7, 5), "float16"),
        ((8, 0), "bfloat16"),
        ((6, 1), "bfloat16"),
        (None, "bfloat16"),
    ],
)
def test_the_last_step_of_a_gpu_is_in_the_bits_that_it_is_fast_in(
    monkeypatch, capability, bits
):
    """A T4's is float16; on a CPU not slow in it bfloat16, as in the records."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    rates = {"float32": 157e9, "bfloat16": 85e9}
    monkeypatch.setattr(machine, "product_rates", lambda threads: rates)
    monkeypatch.setattr(machine, "default_device", lambda device: device)
    changes = ladder_on("cuda" if capability else "cpu")
    same = list(LADDER)[:-1]
    assert list(changes) == [*same, bits]
    assert {name: changes[name] for name in same} == {n: LADDER[n] for n in same}
    assert ladder(changes)[bits].precision == bits
    assert capability == (7, 5) or changes == LADDER


def test_a_cpu_that_emulates_16_bits_is_not_raced_in_them(monkeypatch):
    rates = {"float32": 42e9, "bfloat16": 5e8}
    monkeypatch.setattr(machine, "product_rates", lambda threads: rates)
    assert fast_precisions("cpu") == ["float32"]
    assert list(ladder_on("cpu")) == list(LADDER)[:-1]


def test_float16_scales_the_loss_and_skips_what_overflows(monkeypatch):
    """Gradients too small for float16 arrive; an update that overflows is not made."""
    batch = make_batch(token_pairs(8), range(8))
    scaled, real = [], torch.amp.GradScaler.scale
    monkeypatch.setattr(
        torch.amp.GradScaler,
        "scale",
        lambda self, loss: (
            scaled.append(self.is_enabled() and self.get_scale()) or real(self, loss)
        ),
    )
    gradients = []
    for precision in ("float32", "float16"):
        torch.manual_seed(0)
        model = Transformer(dataclasses.replace(CONFIG, dropout=0.0))
        steps = Steps(loss="real", optimizer="loop", precision=precision)
        trainer(model, steps, lr=0.0)(batch)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert scaled == [False, 2**10]
    torch.testing.assert_close(*gradients, atol=1e-3, rtol=0.1)  # unscaled again
    update, before = trainer(model, steps), model.output.weight.clone()
    model.output.weight.register_hook(lambda grad: grad * math.inf)
    for _ in range(2):
        update(batch)
    assert torch.equal(model.output.weight, before) and scaled[-1] == 2**9


def test_climb_measures_every_step():
    changes = {"a": {}, "b": {"feed": "length"}, "c": {"loss": "chunked"}}
    lines = climb(CONFIG, token_pairs(60), 60, updates=1, rounds=1, changes=changes)
    assert [line["step"] for line in lines] == list(changes)
    assert lines[0]["times_first"] == 1 and all(x["seconds"] > 0 for x in lines)
    assert lines[2]["steps"]["feed"] == "length"
    assert lines[0]["times_previous"] == 1 and lines[1]["times_previous_interval"]


def test_climb_divides_by_the_updates_that_an_epoch_has():
    pairs, changes = token_pairs(20), {"a": {"feed": "length"}}
    count = len(list(feed(pairs, "length", 60)))
    (whole,) = climb(CONFIG, pairs, 60, updates=count, rounds=1, changes=changes)
    (more,) = climb(CONFIG, pairs, 60, updates=9 * count, rounds=1, changes=changes)
    assert more["flops"] == whole["flops"]


def test_training_lowers_the_loss():
    torch.manual_seed(0)
    batch = next(feed(token_pairs(40), "packed", 60, width=20))
    update = trainer(Transformer(CONFIG), Steps(loss="chunked"), lr=1e-2)
    losses = [update(batch).item() for _ in range(40)]
    assert losses[-1] < losses[0] / 2


# --- meters ---


def test_flops_against_torchs_counter(model):
    """Six for each weight and token; torch's counter has the attention matrices too."""
    from torch.utils.flop_counter import FlopCounterMode

    wide = TransformerConfig(300, d_model=128, num_heads=2, num_layers=2, d_ff=512)
    model, batch = Transformer(wide).eval(), make_batch(token_pairs(1), [0])
    with FlopCounterMode(display=False) as counter:
        mean_loss(model, batch, "real").backward()
    theirs = counter.get_total_flops()
    assert training_flops(model, batch) == pytest.approx(theirs, rel=0.05)


def test_live_memory_by_hand():
    x = torch.zeros(100)
    with LiveMemory() as memory:
        a = x + 1  # 400 bytes
        b = a.view(10, 10)  # a view: nothing new
        c = b * 2  # 800
        del a, b
        d = c + 1  # 800 again
        assert memory.now == 800
    assert memory.peak == 800 and d.shape == (10, 10)


def test_race_calls_in_turns():
    calls = []
    seconds = race({name: lambda n=name: calls.append(n) for name in "ab"}, rounds=2)
    assert calls == list("ababab") and set(seconds) == {"a", "b"}
    with pytest.raises(ValueError, match="one of each"):
        race({})
    seconds = laps({"a": lambda: None}, rounds=3)
    assert len(seconds["a"]) == 3 and all(second > 0 for second in seconds["a"])


def test_the_ceiling_counts_the_models_products(monkeypatch):
    """The operations that training_flops counts forward, of a layer of each kind."""
    config = TransformerConfig(50, d_model=16, num_heads=2, num_layers=1, d_ff=32)
    monkeypatch.setattr(
        speed,
        "laps",
        lambda runs, *rest: {
            name: [run() is None or 1.0] for name, run in runs.items()
        },
    )
    counts = 12 * 2 * 7 * 16 * 16 + 2 * 2 * 2 * 7 * 16 * 32 + 2 * 7 * 16 * 50
    assert matmul_ceiling(config, 7) == pytest.approx(counts / (12 + 2 + 2 + 1))
    weights = sum(
        p.numel() for name, p in Transformer(config).named_parameters() if p.dim() == 2
    )
    assert counts == 2 * 7 * weights


def test_an_interval_of_ratios_by_scipys_t():
    from scipy.stats import t

    rng = random.Random(0)
    for count in (2, 5, 11):
        these, those = ([rng.uniform(1, 2) for _ in range(count)] for _ in "ab")
        logs = np.log(np.array(these) / np.array(those))
        half = t.ppf(0.975, count - 1) * logs.std(ddof=1) / count**0.5
        wanted = np.exp([logs.mean(), logs.mean() - half, logs.mean() + half])
        assert ratio_interval(these, those) == pytest.approx(wanted, rel=2e-2)
    assert ratio_interval([3.0], [2.0]) == [pytest.approx(1.5), 0.0, math.inf]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: next(feed(token_pairs(3), "sorted", 60)), "how='sorted'"),
        (lambda: adam(torch.nn.Linear(1, 1), "quick"), "form='quick'"),
        (lambda: mean_loss(None, None, "some"), "loss='some'"),
        (lambda: attention_as(None, "flash"), "attention='flash'"),
        (lambda: quantize_rows(torch.tensor([[math.nan]])), "not finite"),
        (lambda: trainer(torch.nn.Linear(1, 1), Steps(precision="bf16")), "='bf16'"),
        (lambda: climb(CONFIG, token_pairs(3), 60, updates=0), "updates=0"),
    ],
)
def test_refusals(call, said):
    with pytest.raises(ValueError, match=said):
        call()


# --- int8 ---


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 99))
def test_rounding_is_within_half_a_scale(out, width, seed):
    weight = torch.randn(out, width, generator=torch.Generator().manual_seed(seed))
    weight[0] = 0
    q, scale = quantize_rows(weight)
    assert q.dtype == torch.int8 and q.abs().max() <= 127
    assert ((q * scale - weight).abs() <= scale / 2 + 1e-7).all()
    own = np.abs(weight.numpy()).max(1) / 127
    assert np.allclose(scale[:, 0].numpy()[own > 0], own[own > 0])


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64])
def test_rounding_of_other_numbers(kind):
    """In bfloat16 itself the largest number of a row may come out as 128: as -128."""
    weight = torch.randn(300, 40, generator=torch.Generator().manual_seed(0)).to(kind)
    q, scale = quantize_rows(weight)
    assert q.min() >= -127
    assert ((q * scale - weight).abs() <= scale / 2 + 1e-7).all()


def test_every_matrix_is_rounded_as_numpy_rounds(model):
    whole = quantized(model)
    assert len(whole) == sum(p.dim() == 2 for p in model.parameters())
    for name, (q, scale) in whole.items():
        weight = model.get_parameter(name).detach().numpy()
        assert np.array_equal(q.numpy(), np.rint(weight / scale.numpy()))


# --- the exercises name the mistakes ---


def causal(part):
    return torch.ones(len(part), len(part), dtype=torch.bool).tril()


WRONG = [
    (check_overall, lambda share, times: 1 - share + share * times, "averaged"),
    (check_overall, lambda share, times: 1 - share + share / times, "inverse"),
    (check_overall, lambda share, times: times, "1.33"),
    (check_overall, lambda share, times: 4 / 3, "A fifth"),
    (check_packed_mask, lambda part: part[:, None] == part, "comes later"),
    (check_packed_mask, lambda part: causal(part) & (part > 0), "second sentence sees"),
    (
        check_packed_mask,
        lambda part: causal(part) & (part[:, None] == part),
        "Padding sees",
    ),
    (check_packed_mask, lambda part: torch.ones(2, 2), "boolean tensor"),
    (check_packed_mask, lambda part: torch.zeros(6, 6, dtype=torch.bool), "token 0"),
    (check_int8_product, lambda w, x: w @ x, "exact product"),
    (
        check_int8_product,
        lambda w, x: (w / (s := w.abs().max() / 127)).round() @ x * s,
        "whole matrix",
    ),
    (
        check_int8_product,
        lambda w, x: (w / (w.abs().amax(1) / 127)[:, None]).round() @ x,
        "at the end",
    ),
    (check_int8_product, lambda w, x: (w @ x)[:, None], "shape"),
    (
        check_int8_product,
        lambda w, x: (w / (s := w.amax(1) / 127)[:, None]).round() @ x * s,
        "absolute",
    ),
    (check_int8_product, lambda w, x: 2 * (w @ x), "It is"),
]


@pytest.mark.parametrize(("check", "wrong", "telling"), WRONG)
def test_mistakes_are_named(check, wrong, telling):
    verdict = check(wrong)
    assert not verdict.passed and telling in verdict.message


def test_the_plain_loss_is_chapter_tens(model):
    batch = make_batch(token_pairs(8), range(8))
    logits = model(batch.src_ids, batch.tgt_in)
    wanted = label_smoothed_cross_entropy(logits, batch.tgt_out)
    for form in ("all", "real", "chunked"):
        torch.testing.assert_close(mean_loss(model, batch, form), wanted)


def test_benchmark_runs(tmp_path):
    """`python benchmarks/speed.py --quick` writes a line for every step."""
    path = Path(__file__).parents[1] / "benchmarks" / "speed.py"
    out, command = tmp_path / "a.json", [sys.executable, str(path), "--quick", "--out"]
    subprocess.run([*command, str(out)], check=True, capture_output=True, timeout=1800)
    record = json.loads(out.read_text("utf-8"))
    assert [line["step"] for line in record["ladder"]] == list(ladder_on("cpu"))
    assert list(record["ceiling"]) == fast_precisions("cpu")
