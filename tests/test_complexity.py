"""Chapter 23: the counts of Table 1 against torch's counter, and the checks."""

import math

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from transformer_lib.attention import scaled_dot_product_attention
from transformer_lib.complexity import (
    convolutions,
    counted,
    crossing,
    fused_self_attention,
    gradient,
    layers,
    longest_chain,
    multiply_adds,
    peak_of,
    restricted_attention,
    self_attention,
)
from transformer_lib.exercises import complexity as exercises
from transformer_lib.speed import LiveMemory
from transformer_lib.transformer import Transformer, TransformerConfig


@pytest.mark.parametrize("n, d", [(40, 8), (33, 16), (64, 64)])
def test_formulas_are_what_torch_counts(n, d):
    formulas = multiply_adds(n, d, k=5, r=6)
    for kind, layer in layers(d, k=5, r=6).items():
        assert counted(layer, torch.randn(1, n, d)) == formulas[kind], kind


def test_self_attention_and_recurrence_meet_at_n_equal_d():
    for size in (1, 7, 512):
        counts = multiply_adds(size, size)
        assert counts["self-attention"] == counts["recurrent"]


# --- memory ---


def test_memory_of_a_known_program():
    """Alive at once: three of four results; a view and an input add nothing."""

    def program(x):
        first = x + 1
        second = (first.view(-1) * 2).view_as(x)
        del first
        return second.exp() + x.T.T

    x = torch.randn(10, 10)
    assert peak_of(program, x) == 3 * 400
    with LiveMemory() as memory:
        kept = x + 1
    assert (memory.now, memory.peak) == (400, 400)
    del kept
    assert memory.now == 0


@pytest.mark.parametrize("n, d, r", [(40, 8, 4), (33, 16, 6), (48, 128, 8)])
def test_memory_is_what_the_formulas_say(n, d, r):
    """Counted by hand in the code of the two attentions, in bytes."""
    x = torch.randn(1, n, d)
    assert peak_of(self_attention, x) == 4 * max(3 * n * n, 2 * n * n + n * d)
    wide = n + r - 1  # positions of the padded tensor; the mask has one byte each
    expected = 4 * (wide * d + 2 * r * n + max(2 * r * n, n * d)) + wide
    assert peak_of(lambda x: restricted_attention(x, r), x) == expected


def allocator_s_peak(layer, x):
    """The same from torch's own log of its allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        with torch.no_grad():
            layer(x)
    events = watched.profiler.kineto_results.events()
    events = sorted((e for e in events if e.name() == "[memory]"), key=started)
    now, most = 0, 0
    for event in events:
        now += event.nbytes()
        most = max(most, now)
    return most


def started(event):
    return event.start_ns()


def test_memory_equals_the_allocator_s_log():
    found = {}
    for n in (128, 256, 512):
        kinds = layers(64) | {"fused": fused_self_attention}
        x = torch.randn(1, n, 64)
        for kind, layer in kinds.items():
            both = peak_of(layer, x), allocator_s_peak(layer, x)
            found.setdefault(kind, []).append(both)
    for kind in ("self-attention", "recurrent", "restricted"):
        assert all(ours == theirs > 0 for ours, theirs in found[kind]), kind
    for kind, pairs in found.items():
        for i in range(2):  # what we see, and what the allocator sees
            growth = math.log(pairs[-1][i] / pairs[0][i]) / math.log(4)
            wanted = 2 if kind == "self-attention" else 1
            assert growth == pytest.approx(wanted, abs=0.3), (kind, growth)
        assert all(ours <= theirs for ours, theirs in pairs), kind


def test_training_keeps_more():
    x, kinds = torch.randn(1, 64, 16), layers(16)
    for kind, layer in kinds.items():
        assert peak_of(layer, x, True) > peak_of(layer, x), kind
    windows = peak_of(kinds["restricted"], x, True)
    assert 32 * 64 * 16 * 4 < windows < 4 * 32 * 64 * 16 * 4


@pytest.mark.parametrize("r", [1, 4, 9])
def test_restricted_attention_is_attention_with_a_band(r):
    x = torch.randn(2, 20, 8, requires_grad=True)
    offset = torch.arange(20) - torch.arange(20)[:, None]
    band = (offset >= -(r // 2)) & (offset < r - r // 2)
    ours = restricted_attention(x, r)
    theirs = torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=band)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    weight = torch.randn(ours.shape)
    (got,) = torch.autograd.grad((ours * weight).sum(), x, retain_graph=True)
    (wanted,) = torch.autograd.grad((theirs * weight).sum(), x)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)


def test_self_attention_is_attention():
    x = torch.randn(2, 20, 8)
    wanted, _ = scaled_dot_product_attention(x, x, x)
    torch.testing.assert_close(self_attention(x), wanted, atol=1e-5, rtol=0)


def test_only_the_recurrent_chain_grows():
    chains = {}
    for kind, layer in layers(8).items():
        inputs = [torch.randn(1, n, 8, requires_grad=True) for n in (10, 20, 30)]
        chains[kind] = [longest_chain(layer(x)) for x in inputs]
    first, second, third = chains.pop("recurrent")
    assert second - first == third - second >= 10
    assert all(len(set(chain)) == 1 for chain in chains.values())


def test_longest_chain_of_a_known_graph():
    x = torch.ones(3, requires_grad=True)
    long = x.exp().sin().exp()  # three operations, and the one that collects at x
    assert longest_chain(long) == 4
    assert longest_chain(long + x) == 5


@pytest.mark.parametrize("depth, reach", [(1, 1), (2, 4), (3, 13)])
def test_reach_of_dilated_convolutions(depth, reach):
    stack = convolutions(depth, dilated=True)
    seen = (gradient(stack, 41, at=20) > 0).nonzero().flatten()
    assert (seen.min(), seen.max()) == (20 - reach, 20 + reach)


def test_crossing_of_known_curves():
    sizes = [32, 64, 128, 256]
    assert crossing(sizes, [n / 100 for n in sizes]) == pytest.approx(100)
    assert crossing(sizes, [0.1, 0.2, 0.3, 0.4]) is None


def test_encoder_layer_of_the_model_has_the_counted_parts():
    """2 n² d + 4 n d² + 2 n d d_ff, counted in the layer that chapter 05 builds."""
    n, d, d_ff = 24, 16, 40
    config = TransformerConfig(9, d_model=d, num_heads=2, num_layers=1, d_ff=d_ff)
    layer = Transformer(config).encoder.layers[0]
    rest = counted(layer, torch.randn(1, n, d)) - (4 * n * d * d + 2 * n * d * d_ff)
    assert rest in (0, 2 * n * n * d)  # torch does not count its fused CPU kernel
    x = torch.randn(1, n, d)
    explicit = counted(lambda x: layer.self_attention(x, x, x, need_weights=True), x)
    assert explicit == 4 * n * d * d + 2 * n * n * d


# --- the exercises name the mistakes ---


@pytest.mark.parametrize(
    "wrong, phrase",
    [
        (lambda n, d: 2 * n * n * d, "four projections are missing"),
        (lambda n, d: 4 * n * d * d, "two products with the sequence are missing"),
        (lambda n, d: 3 * n * d * d + 2 * n * n * d, "W_O is the last"),
        (lambda n, d: 4 * n * d * d + n * n * d, "two products with n²"),
        (lambda n, d: 8 * n * d * d + 4 * n * n * d, "floating-point operations"),
        (lambda n, d: 2 * n * d * d + 4 * n * n * d, "exchanged"),
        (lambda n, d: n * n * d, "formula of Table 1"),
        (lambda n, d: n, "torch counts"),
    ],
)
def test_check_attention_layer(wrong, phrase):
    verdict = exercises.check_attention_layer(wrong)
    assert not verdict.passed
    assert phrase in verdict.message


def logs(values):
    return [math.log(value) for value in values]


def ends(sizes, times):
    return math.log(times[-1] / times[0]) / math.log(sizes[-1] / sizes[0])


def height(sizes, times):
    s, t = logs(sizes), logs(times)
    return sum(t) / len(t) - exercises.slope(s, t) * sum(s) / len(s)


@pytest.mark.parametrize(
    "wrong, phrase",
    [
        (exercises.slope, "logarithms of both"),
        (lambda s, t: exercises.slope(logs(s), t), "times need logarithms"),
        (lambda s, t: exercises.slope(s, logs(t)), "sizes need logarithms"),
        (lambda s, t: exercises.slope(logs(t), logs(s)), "axes are exchanged"),
        (
            lambda s, t: exercises.slope(range(len(s)), [math.log2(x) for x in t]),
            "right for doublings only",
        ),
        (height, "height of the line"),
        (ends, "first and the last point"),
        (lambda s, t: 2.0, "the best fit is"),
    ],
)
def test_check_exponent(wrong, phrase):
    verdict = exercises.check_exponent(wrong)
    assert not verdict.passed
    assert phrase in verdict.message


@pytest.mark.parametrize(
    "wrong, phrase",
    [
        (lambda n, k: math.ceil((n - 1) / (k - 1)), "not k - 1"),
        (lambda n, k: math.ceil(n / k), "not by k"),
        (lambda n, k: (n - 1) // ((k - 1) // 2), "Round up"),
        (lambda n, k: math.ceil(n / ((k - 1) // 2)), "n - 1 places"),
        (lambda n, k: math.ceil(math.log(n, k)), "Logarithms are for dilated"),
        (lambda n, k: math.ceil(math.log(2 * n - 1, k)), "dilated convolutions"),
        (lambda n, k: 1, "it takes"),
    ],
)
def test_check_conv_layers(wrong, phrase):
    verdict = exercises.check_conv_layers(wrong)
    assert not verdict.passed
    assert phrase in verdict.message


@pytest.mark.parametrize(
    "wrong, phrase",
    [
        (lambda d, f: d, "bare attention"),
        (lambda d, f: 2 * d, "feed-forward network is missing"),
        (lambda d, f: f, "projections are missing"),
        (lambda d, f: 4 * d + 2 * f, "two products with n²"),
        (lambda d, f: 2 * d + f / 2, "two matrices, you took one"),
        (lambda d, f: 1.5 * d + f, "you took three"),
        (lambda d, f: 7, "it is 220"),
    ],
)
def test_check_takes_over(wrong, phrase):
    verdict = exercises.check_takes_over(wrong)
    assert not verdict.passed
    assert phrase in verdict.message
