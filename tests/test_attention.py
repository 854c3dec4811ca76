"""Chapter 02: our attention against torch's kernel, NumPy, and plain Python."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_lib import hello
from transformer_lib.attention import (
    attention_numpy,
    fused_attention,
    scaled_dot_product_attention,
    softmax_numpy,
)
from transformer_lib.exercises.attention import (
    check_attend,
    check_masked_softmax,
    check_previous_word,
    check_softmax_backward,
)

FEW = settings(max_examples=25)
SIZES = st.integers(1, 6)


def draw(*sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*size, generator=generator) for size in sizes]


def explicit(query, key, value, mask=None):
    return scaled_dot_product_attention(query, key, value, mask)[0]


def torchs(query, key, value, mask=None):
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def value_and_gradients(attend, inputs, *more):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attend(*leaves, *more)
    out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
    return [out.detach(), *(x.grad for x in leaves)]


def random_mask(*size, seed=1):
    """A mask that leaves each query the first key at least."""
    mask = torch.rand(*size, generator=torch.Generator().manual_seed(seed)) < 0.5
    mask[..., 0] = True
    return mask


def assert_all_close(got, wanted, atol=1e-5):
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=1e-5)


# --- against torch --------------------------------------------------------------------

MASKS = {
    "no mask": None,
    "all different": random_mask(2, 3, 5, 7),
    "same for all heads": random_mask(2, 1, 5, 7),
    "keys only": random_mask(2, 1, 1, 7),
    "causal": torch.ones(5, 7).tril().bool(),
}


@pytest.mark.parametrize("attend", [explicit, fused_attention])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_value_and_gradients_are_torchs(attend, mask):
    inputs = draw((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6))
    ours = value_and_gradients(attend, inputs, mask)
    assert_all_close(ours, value_and_gradients(torchs, inputs, mask))


@FEW
@given(SIZES, SIZES, SIZES, SIZES, st.booleans(), st.integers(0, 99))
def test_explicit_fused_and_numpy_agree(T, S, d_k, d_v, masked, seed):
    inputs = draw((2, T, d_k), (2, S, d_k), (2, S, d_v), seed=seed)
    mask = None
    if masked:  # empty rows included
        mask = torch.rand(2, T, S, generator=torch.Generator().manual_seed(seed)) < 0.4
    ours = value_and_gradients(explicit, inputs, mask)
    assert_all_close(ours, value_and_gradients(fused_attention, inputs, mask))
    if not masked:
        arrays = [x.double().numpy() for x in inputs]
        assert np.allclose(attention_numpy(*arrays)[0], ours[0], atol=1e-5)


def softmax_slope(scores):
    """Norm of the softmax's Jacobian in each row, by its formula: (N, S) -> (N,)."""
    p = scores.softmax(dim=-1)
    return (torch.diag_embed(p) - p[:, :, None] * p[:, None]).norm(dim=(1, 2))


@pytest.mark.parametrize("d_k", [64, 256, 1024])
def test_the_root_of_d_k_keeps_the_gradient(d_k):
    """Section 3.2.1: a dot product has variance d_k, and a large one no slope left."""
    numbers = torch.Generator().manual_seed(d_k)
    query = torch.randn(500, 1, d_k, generator=numbers)
    key = torch.randn(500, 10, d_k, generator=numbers)
    scores = (query * key).sum(dim=-1)  # (N, S)
    assert scores.var().item() == pytest.approx(d_k, rel=0.1)
    slope = softmax_slope(scores).median()
    assert softmax_slope(scores / d_k**0.5).median() > 0.3 > 3 * slope
    assert d_k < 256 or slope < 0.01
    eye = torch.eye(10).expand(500, 10, 10)  # our attention's weights have that slope
    weights = scaled_dot_product_attention(query, key, eye)[1]
    torch.testing.assert_close(weights[:, 0], (scores / d_k**0.5).softmax(dim=-1))


def test_large_scores_stay_finite():
    query, key, value = draw((4, 8), (4, 8), (4, 8))
    for attend in (explicit, fused_attention):
        assert attend(1e4 * query, 1e4 * key, value).isfinite().all()
    big = np.array([[1e4, 0.0, -1e4], [800.0, 801.0, 802.0]])
    wanted = torch.tensor(big).softmax(-1).numpy()
    assert np.allclose(softmax_numpy(big), wanted, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_precisions(dtype):
    inputs = [x.to(dtype) for x in draw((2, 5, 8), (2, 7, 8), (2, 7, 8))]
    mask = random_mask(2, 5, 7)
    mask[0, 0] = False
    for attend in (explicit, fused_attention):
        out = attend(*inputs, mask)
        assert out.dtype == dtype and out.isfinite().all() and (out[0, 0] == 0).all()


# --- against chapter 01 ---------------------------------------------------------------


def test_the_ladder():
    X = [[1.0, 0, 1, 0], [0, 1, 0, 1]]
    Wq = [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9], [0.1, 0.2, 0.3]]
    Wk = [[0.2, 0.3, 0.4], [0.5, 0.6, 0.7], [0.8, 0.9, 0.1], [0.2, 0.3, 0.4]]
    Wv = [[0.3, 0.4, 0.5], [0.6, 0.7, 0.8], [0.9, 0.1, 0.2], [0.3, 0.4, 0.5]]
    python = hello.attention(X, Wq, Wk, Wv)
    arrays = [np.array(X) @ np.array(W) for W in (Wq, Wk, Wv)]
    Z, weights = attention_numpy(*arrays)
    tensors = [torch.tensor(a) for a in arrays]
    z, w = scaled_dot_product_attention(*tensors)
    assert np.allclose(Z, python.Z, atol=1e-12)
    assert np.allclose(weights, python.weights, atol=1e-12)
    assert np.allclose(z, Z, atol=1e-12) and np.allclose(w, weights, atol=1e-12)
    assert np.allclose(fused_attention(*tensors), Z, atol=1e-12)
    assert np.allclose(Z, [[1.042, 0.816, 1.016]] * 2, atol=5e-4)


# --- masks ----------------------------------------------------------------------------


@pytest.mark.parametrize("attend", [explicit, fused_attention])
def test_empty_row_gives_zeros_and_clean_gradients(attend):
    inputs = draw((2, 4, 8), (2, 4, 8), (2, 4, 8))
    mask = torch.ones(2, 4, 4).tril().bool()
    mask[0, :, 0] = False  # row 0 of the first sentence has nothing left
    out, d_query, d_key, d_value = value_and_gradients(attend, inputs, mask)
    assert (out[0, 0] == 0).all() and (d_query[0, 0] == 0).all()
    assert all(x.isfinite().all() for x in (out, d_query, d_key, d_value))
    nothing = torch.zeros(2, 4, 4, dtype=torch.bool)
    assert all((x == 0).all() for x in value_and_gradients(attend, inputs, nothing))


@FEW
@given(SIZES, SIZES, st.integers(0, 99))
def test_rows_sum_to_one_or_nothing(T, S, seed):
    query, key, value = draw((T, 4), (S, 4), (S, 3), seed=seed)
    mask = torch.rand(T, S, generator=torch.Generator().manual_seed(seed)) < 0.4
    weights = scaled_dot_product_attention(query, key, value, mask)[1]
    assert (weights[~mask] == 0).all() and (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), mask.any(-1).float())


@FEW
@given(st.integers(2, 6), st.integers(0, 99))
def test_hidden_keys_do_not_matter(S, seed):
    query, key, value = draw((S, 4), (S, 4), (S, 3), seed=seed)
    mask = random_mask(S, S, seed=seed)
    hidden = ~mask[0]
    other_key, other_value = key.clone(), value.clone()
    other_key[hidden] += 5
    other_value[hidden] -= 7
    for attend in (explicit, fused_attention):
        before = attend(query, key, value, mask)[0]
        after = attend(query, other_key, other_value, mask)[0]
        torch.testing.assert_close(after, before)


# --- what attention is ----------------------------------------------------------------


@FEW
@given(st.integers(2, 8), st.integers(0, 99))
def test_permutation_equivariance(S, seed):
    (x,) = draw((S, 6), seed=seed)
    shuffle = torch.randperm(S, generator=torch.Generator().manual_seed(seed))
    before, after = explicit(x, x, x), explicit(*[x[shuffle]] * 3)
    torch.testing.assert_close(after, before[shuffle])
    torch.testing.assert_close(explicit(x, x[shuffle], x[shuffle]), before)


def test_output_lies_between_the_values():
    query, key, value = draw((9, 4), (5, 4), (5, 3))
    out = explicit(query, key, value)
    assert (out <= value.amax(0) + 1e-6).all() and (out >= value.amin(0) - 1e-6).all()


def test_dropout():
    query, key, value = draw((4, 8), (64, 8), (64, 8))
    torch.manual_seed(0)
    outs = [
        scaled_dot_product_attention(query, key, value, None, 0.5) for _ in range(2000)
    ]
    wanted, weights = scaled_dot_product_attention(query, key, value)
    assert not torch.allclose(outs[0][0], outs[1][0])
    torch.testing.assert_close(outs[0][1], weights)  # given back undropped
    mean = torch.stack([out for out, _ in outs]).mean(0)
    assert (mean - wanted).abs().max() < 0.05
    torch.manual_seed(0)
    fused = [fused_attention(query, key, value, None, 0.5) for _ in range(2000)]
    assert (torch.stack(fused).mean(0) - wanted).abs().max() < 0.05


# --- errors ---------------------------------------------------------------------------

GOOD = draw((2, 5, 8), (2, 7, 8), (2, 7, 6))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keys", [7, 600])
def test_sixteen_bits_are_near_float32_and_empty_rows_are_zero(kind, keys):
    """By the formula and, for many keys, by torch's kernel; values and gradients."""
    torch.manual_seed(0)
    full = [torch.randn(2, 3, n, 8, requires_grad=True) for n in (5, keys, keys)]
    low = [x.detach().to(kind).requires_grad_() for x in full]
    mask = torch.rand(2, 1, 5, keys) < 0.7
    mask[1, 0, 2] = False
    for inputs in (full, low):
        with torch.autocast("cpu", kind, enabled=inputs is low):
            fused_attention(*inputs, mask).float().square().sum().backward()
    with torch.autocast("cpu", kind):
        out = fused_attention(*low, mask)
    assert out.dtype == kind and not out[1, :, 2].any()
    exact = scaled_dot_product_attention(*full, mask)[0]
    torch.testing.assert_close(out.float(), exact, atol=0.03, rtol=0)
    for a, b in zip(low, full, strict=True):
        size = b.grad.abs().max().item()
        torch.testing.assert_close(a.grad.float(), b.grad, atol=0.04 * size, rtol=0)


def test_import_leaves_matplotlib_alone():
    code = (
        "import sys, transformer_lib.attention; assert 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the exercises name the mistake ---------------------------------------------------


def scores_of(query, key):
    return query @ key.transpose(-2, -1)


def root(query):
    return math.sqrt(query.shape[-1])


WRONG_ATTEND = {
    "not scaled": lambda q, k, v: scores_of(q, k).softmax(-1) @ v,
    "divided by d_k": lambda q, k, v: (scores_of(q, k) / q.shape[-1]).softmax(-1) @ v,
    "multiplied by": lambda q, k, v: (scores_of(q, k) * root(q)).softmax(-1) @ v,
    "number of keys": lambda q, k, v: (
        (scores_of(q, k) / math.sqrt(len(k))).softmax(-1) @ v
    ),
    "wrong axis": lambda q, k, v: (scores_of(q, k) / root(q)).softmax(-2) @ v,
    "softmax is missing": lambda q, k, v: scores_of(q, k) / root(q) @ v,
    "comes after": lambda q, k, v: scores_of(q, k).softmax(-1) / root(q) @ v,
    "average the keys": lambda q, k, v: (scores_of(q, k) / root(q)).softmax(-1) @ k,
    "without the weights": lambda q, k, v: scaled_dot_product_attention(q, k, v),
    "count the axes from the back": lambda q, k, v: (
        (q @ k.permute(*reversed(range(k.ndim))) / root(q)).softmax(-1) @ v
    ),
    "not those of equation 1": lambda q, k, v: explicit(q, k, v) + 1,
    "a list": lambda q, k, v: explicit(q, k, v).tolist(),
}


@pytest.mark.parametrize("said", WRONG_ATTEND)
def test_check_attend_names_the_mistake(said):
    verdict = check_attend(WRONG_ATTEND[said])
    assert not verdict.passed and said in verdict.message


def filled(scores, mask, number=float("-inf")):
    return scores.masked_fill(~mask, number)


WRONG_MASKED = {
    "NaN in a row": lambda s, m: filled(s, m).softmax(-1),
    "inverted": lambda s, m: (
        filled(s, ~m, -1e9).softmax(-1).masked_fill(m, 0)  # the solution, mask turned
    ),
    "after the softmax": lambda s, m: s.softmax(-1) * m,
    "exp(0) is 1": lambda s, m: filled(s, m, 0.0).softmax(-1),
    "does nothing": lambda s, m: s.softmax(-1),
    "wrong axis": lambda s, m: filled(s, m, -1e9).softmax(-2) * m,
    "shares its attention equally": lambda s, m: filled(s, m, -1e9).softmax(-1),
    "gradient is NaN": lambda s, m: (
        (s + torch.zeros_like(s).masked_fill(~m, float("-inf")))
        .softmax(-1)
        .nan_to_num(0)
    ),
    "cut off": lambda s, m: (filled(s, m, -1e9).softmax(-1) * m).detach(),
}


@pytest.mark.parametrize("said", WRONG_MASKED)
def test_check_masked_softmax_names_the_mistake(said):
    verdict = check_masked_softmax(WRONG_MASKED[said])
    assert not verdict.passed and said in verdict.message


def test_check_masked_softmax_takes_other_right_answers():
    def infinite_but_clean(scores, mask):
        return filled(scores, mask).softmax(-1).masked_fill(~mask, 0.0)

    assert check_masked_softmax(infinite_but_clean).passed


WRONG_BACKWARD = {
    "only the diagonal": lambda w, g: w * (1 - w) * g,
    "weighted mean is missing": lambda w, g: w * g,
    "plain mean": lambda w, g: w * (g - g.mean(-1, keepdim=True)),
    "plain sum": lambda w, g: w * (g - g.sum(-1, keepdim=True)),
    "wrong axis": lambda w, g: w * (g - (w * g).sum(-2, keepdim=True)),
    "sign": lambda w, g: w * ((w * g).sum(-1, keepdim=True) - g),
}


@pytest.mark.parametrize("said", WRONG_BACKWARD)
def test_check_softmax_backward_names_the_mistake(said):
    verdict = check_softmax_backward(WRONG_BACKWARD[said])
    assert not verdict.passed and said in verdict.message


def look(shift, length):
    def words(n, d_k):
        key = torch.eye(n, d_k)
        return length(d_k) * key.roll(shift, dims=0), key

    return words


WRONG_WORDS = {
    "next one": look(-1, lambda d_k: 20 * d_k**0.5),
    "itself": look(0, lambda d_k: 20 * d_k**0.5),
    "elsewhere": look(2, lambda d_k: 20 * d_k**0.5),
    "longer": look(1, lambda d_k: 5.0),
    "two tensors": lambda n, d_k: torch.eye(n, d_k),
    "shape (5, 8)": lambda n, d_k: (torch.eye(n), torch.eye(n)),
}


@pytest.mark.parametrize("said", WRONG_WORDS)
def test_check_previous_word_names_the_mistake(said):
    verdict = check_previous_word(WRONG_WORDS[said])
    assert not verdict.passed and said in verdict.message
