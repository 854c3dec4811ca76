"""Chapter 05: feed-forward, layer normalization and encoder against torch's own."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import by_formula, shaken
from torch import nn

from transformer_lib.encoder import (
    Encoder,
    EncoderLayer,
    FeedForward,
    Residual,
    layer_norm,
    mean_cosines,
    torch_names,
)
from transformer_lib.exercises.encoder import (
    check_count_parameters,
    check_feed_forward,
    check_layer_norm,
    check_post_norm,
)

FEW = settings(max_examples=25)
D, H, FF = 16, 4, 24
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def assert_same_as_torch(ours, theirs, x, mask, **theirs_mask):
    theirs.load_state_dict(torch_names(ours.state_dict()))  # strict: nothing left over
    a, b = (x.clone().requires_grad_() for _ in range(2))
    out, expected = ours(a, mask), theirs(b, **theirs_mask)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    out.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(out, expected, **CLOSE)
    torch.testing.assert_close(a.grad, b.grad, **CLOSE)
    got = torch_names({n: p.grad for n, p in ours.named_parameters()})
    wanted = {n: p.grad for n, p in theirs.named_parameters()}
    assert got.keys() == wanted.keys()
    for name in wanted:  # sums over all positions: rounding grows with their size
        scale = wanted[name].abs().max().clamp(min=1)
        torch.testing.assert_close(got[name] / scale, wanted[name] / scale, **CLOSE)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("num_layers", [None, 3])
@pytest.mark.parametrize("path", [shaken, lambda module: by_formula(shaken(module))])
def test_equals_torch_in_value_and_gradient(path, num_layers, norm_first, masked):
    options = {"dropout": 0.0, "norm_first": norm_first}
    theirs = nn.TransformerEncoderLayer(D, H, FF, batch_first=True, **options)
    if num_layers is None:
        ours = EncoderLayer(D, H, FF, bias=True, **options)
    else:
        ours = Encoder(num_layers, D, H, FF, bias=True, **options)
        last = nn.LayerNorm(D) if norm_first else None
        theirs = nn.TransformerEncoder(
            theirs, num_layers, last, enable_nested_tensor=False
        )
    keep = torch.arange(7) < torch.tensor([[7], [4], [1]])
    mask = keep[:, None, None, :] if masked else None
    theirs_mask = {"src_key_padding_mask": ~keep} if masked else {}
    x = torch.randn(3, 7, D, generator=torch.Generator().manual_seed(1))
    assert_same_as_torch(path(ours), theirs, x, mask, **theirs_mask)


@FEW
@given(st.integers(1, 4), st.integers(1, 6), st.integers(2, 40), st.integers(-3, 2))
def test_layer_norm_equals_torch_in_value_and_gradient(batch, length, width, scale):
    generator = torch.Generator().manual_seed(width)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    x = 10.0**scale * draw(batch, length, width)  # in float32 small widths cancel
    gain, bias = draw(2, width)
    upstream = draw(x.shape)
    inputs = [t.requires_grad_() for t in (x, gain, bias)]
    out = layer_norm(*inputs)
    expected = F.layer_norm(x, (width,), gain, bias)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    got = torch.autograd.grad(out, inputs, upstream)
    wanted = torch.autograd.grad(expected, inputs, upstream)
    for g, w in zip(got, wanted, strict=True):
        size = w.abs().max().clamp(min=1)
        torch.testing.assert_close(g / size, w / size, atol=1e-5, rtol=1e-4)


def test_layer_norm_passes_the_numerical_gradient_check():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 4, dtype=torch.float64, generator=generator)
    gain, bias = torch.randn(2, 4, dtype=torch.float64, generator=generator)
    inputs = [t.requires_grad_() for t in (x, gain, bias)]
    assert torch.autograd.gradcheck(layer_norm, inputs)


@FEW
@given(st.integers(1, 3), st.integers(1, 7), st.integers(0, 100))
def test_feed_forward_works_on_each_position_alone(batch, length, seed):
    torch.manual_seed(seed)
    feed_forward, x = FeedForward(6, 10), torch.randn(batch, length, 6)
    whole = feed_forward(x)
    alone = torch.stack([feed_forward(x[:, t]) for t in range(length)], 1)
    torch.testing.assert_close(alone, whole, **CLOSE)
    expected = (x @ feed_forward.w_1.weight.T + feed_forward.w_1.bias).clamp(min=0)
    expected = expected @ feed_forward.w_2.weight.T + feed_forward.w_2.bias
    torch.testing.assert_close(whole, expected, **CLOSE)


def test_feed_forward_is_two_convolutions_of_size_one():
    torch.manual_seed(0)
    feed_forward, x = FeedForward(6, 10), torch.randn(2, 5, 6)
    w_1, w_2 = feed_forward.w_1, feed_forward.w_2
    inner = F.conv1d(x.transpose(1, 2), w_1.weight[..., None], w_1.bias).relu()
    out = F.conv1d(inner, w_2.weight[..., None], w_2.bias).transpose(1, 2)
    torch.testing.assert_close(out, feed_forward(x), **CLOSE)


@FEW
@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 5), st.booleans())
def test_padding_reaches_no_real_position(batch, length, padding, norm_first):
    torch.manual_seed(length)
    encoder = Encoder(2, 8, 2, 12, norm_first=norm_first).eval()
    x = torch.randn(batch, length, 8)
    padded = torch.cat([x, torch.randn(batch, padding, 8)], 1)
    keep = torch.arange(length + padding) < length
    got = encoder(padded, keep[None, None, None, :])[:, :length]
    torch.testing.assert_close(got, encoder(x), **CLOSE)


def test_dropout_leaves_the_residual_line_alone():
    torch.manual_seed(0)
    residual = Residual(8, dropout=0.5, norm_first=True)
    x = torch.randn(50, 20, 8)
    same = (residual(x, lambda y: y + 10) == x).float().mean()
    assert 0.47 < same < 0.53  # dropped: x itself comes through
    residual.eval()
    assert (residual(x, lambda y: y + 10) != x).all()


def test_pre_and_post_norm_differ_but_share_their_weights():
    torch.manual_seed(0)
    post, pre = EncoderLayer(D, H, FF).eval(), EncoderLayer(D, H, FF, norm_first=True)
    pre.eval().load_state_dict(post.state_dict())
    x = torch.randn(2, 5, D)
    assert (post(x) - pre(x)).abs().max() > 0.1


def test_the_names_of_the_weights_stay():
    """Checkpoints depend on them."""
    names = {name for name, _ in Encoder(1, D, H, FF).named_parameters()}
    assert names == {
        *(f"layers.0.self_attention.w_{c}.weight" for c in "qkvo"),
        *(f"layers.0.feed_forward.w_{n}.{p}" for n in "12" for p in ("weight", "bias")),
        *(f"layers.0.residual_{n}.norm.{p}" for n in "12" for p in ("weight", "bias")),
    }
    pre = {n for n, _ in Encoder(1, D, H, FF, norm_first=True).named_parameters()}
    assert pre - names == {"norm.weight", "norm.bias"}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: EncoderLayer(10, 3, 8), "d_model=10"),
        (lambda: EncoderLayer(D, H, FF, dropout=1.5), "1.5"),
    ],
)
def test_wrong_arguments_are_refused_in_words(call, words):
    with pytest.raises(ValueError) as caught:
        call()
    assert words in str(caught.value)


# --- the exercises name the typical mistakes ------------------------------------------


def norm_with(x, gain, bias, eps, axis=-1, correction=0, outside=False):
    mean = x.mean(axis, keepdim=True)
    variance = x.var(axis, correction=correction, keepdim=True)
    scale = variance.sqrt() + eps if outside else (variance + eps).sqrt()
    return gain * (x - mean) / scale + bias


NORMS = {
    "sample standard deviation": lambda *a: norm_with(*a, correction=1),
    "outside the root": lambda *a: norm_with(*a, outside=True),
    "Two mistakes": lambda *a: norm_with(*a, correction=1, outside=True),
    "axis 1": lambda *a: norm_with(*a, axis=1),
    "over the batch": lambda *a: norm_with(*a, axis=0),
    "positions and features together": lambda *a: norm_with(*a, axis=(1, 2)),
    "whole tensor": lambda *a: norm_with(*a, axis=(0, 1, 2)),
    "square root is missing": lambda x, g, b, e: (
        g * (x - x.mean(-1, True)) / (x.var(-1, False, keepdim=True) + e) + b
    ),
    "gain and the bias": lambda x, g, b, e: F.layer_norm(x, (8,), eps=e),
    "The bias is missing": lambda x, g, b, e: F.layer_norm(x, (8,), g, eps=e),
    "The gain is missing": lambda x, g, b, e: F.layer_norm(x, (8,), bias=b, eps=e),
    "eps that you are given": lambda x, g, b, e: F.layer_norm(x, (8,), g, b),
    "subtract the mean": lambda x, g, b, e: (
        g * x / (x.var(-1, False, keepdim=True) + e).sqrt() + b
    ),
    "shape (8,)": lambda x, g, b, e: g,
    "off by up to": lambda x, g, b, e: 0 * x,
}


@pytest.mark.parametrize("phrase", NORMS)
def test_check_layer_norm_names_the_mistake(phrase):
    verdict = check_layer_norm(NORMS[phrase])
    assert not verdict.passed and phrase in verdict.message


FEED_FORWARDS = {
    "The ReLU is missing": lambda x, w, b, v, c: (x @ w + b) @ v + c,
    "at the end as well": lambda x, w, b, v, c: ((x @ w + b).relu() @ v + c).relu(),
    "The ReLU is at the end": lambda x, w, b, v, c: ((x @ w + b) @ v + c).relu(),
    "before the bias": lambda x, w, b, v, c: ((x @ w).relu() + b) @ v + c,
    "bias b_1 is missing": lambda x, w, b, v, c: (x @ w).relu() @ v + c,
    "bias b_2 is missing": lambda x, w, b, v, c: (x @ w + b).relu() @ v,
    "Both biases": lambda x, w, b, v, c: (x @ w).relu() @ v,
    "You added x": lambda x, w, b, v, c: x + (x @ w + b).relu() @ v + c,
}


@pytest.mark.parametrize("phrase", FEED_FORWARDS)
def test_check_feed_forward_names_the_mistake(phrase):
    verdict = check_feed_forward(FEED_FORWARDS[phrase])
    assert not verdict.passed and phrase in verdict.message


def adds_in_place(x, f, norm, drop):
    x += drop(f(x))
    return norm(x)


POST_NORMS = {
    "residual is missing": lambda x, f, norm, drop: norm(drop(f(x))),
    "that is pre-norm": lambda x, f, norm, drop: x + drop(f(norm(x))),
    "output alone": lambda x, f, norm, drop: x + norm(drop(f(x))),
    "normalization is missing": lambda x, f, norm, drop: x + drop(f(x)),
    "dropout is missing": lambda x, f, norm, drop: norm(x + f(x)),
    "drops x too": lambda x, f, norm, drop: norm(drop(x + f(x))),
    "dropout comes last": lambda x, f, norm, drop: drop(norm(x + f(x))),
    "sublayer's input": lambda x, f, norm, drop: norm(x + f(drop(x))),
    "normalized twice": lambda x, f, norm, drop: norm(x + drop(f(norm(x)))),
    "changes its input": adds_in_place,
}


@pytest.mark.parametrize("phrase", POST_NORMS)
def test_check_post_norm_names_the_mistake(phrase):
    verdict = check_post_norm(POST_NORMS[phrase])
    assert not verdict.passed and phrase in verdict.message


def parameters(d, f, matrices=4, biases=0, norms=2, inner=1, outer=1, maps=2):
    ffn = maps * d * f + inner * f + outer * d
    return matrices * d * d + biases * d + ffn + 2 * d * norms


COUNTS = {
    "have no biases here": {"biases": 4},
    "four matrices is missing": {"matrices": 3},
    "one LayerNorm": {"norms": 1},
    "LayerNorms are missing": {"norms": 0},
    "three LayerNorms": {"norms": 3},
    "biases of the feed-forward network": {"inner": 0, "outer": 0},
    "first bias": {"inner": 0},
    "second bias": {"outer": 0},
    "two matrices, not one": {"maps": 1},
    "you count": {"matrices": 9},
}


@pytest.mark.parametrize("phrase", COUNTS)
def test_check_count_parameters_names_the_mistake(phrase):
    verdict = check_count_parameters(lambda d, f: parameters(d, f, **COUNTS[phrase]))
    assert not verdict.passed and phrase in verdict.message


def test_mean_cosines_pair_by_pair():
    torch.manual_seed(0)
    x, lengths = torch.randn(4, 5, 8), torch.tensor([5, 3, 1, 0])
    real = torch.arange(5) < lengths[:, None]
    found = mean_cosines(x, real)
    cosine = torch.nn.functional.cosine_similarity
    for row, n in enumerate((5, 3)):
        two = itertools.permutations(x[row, :n], 2)
        by_pair = torch.stack([cosine(a, b, dim=0) for a, b in two])
        assert found[row].item() == pytest.approx(by_pair.mean().item(), abs=1e-6)
    assert found.shape == (2,)  # one place is no two
    same = x[:1, :1].expand(1, 4, 8)
    one = mean_cosines(same, real[:1, :4]).item()
    assert one == pytest.approx(1, abs=1e-6)
