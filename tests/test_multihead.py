"""Chapter 03: our multi-head attention against torch's module."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from transformer_lib.attention import scaled_dot_product_attention
from transformer_lib.exercises.multihead import (
    check_multi_head,
    check_score_matrices,
    check_split,
    check_without_head,
)
from transformer_lib.multihead import (
    MultiHeadAttention,
    merge_heads,
    split_heads,
    use_attention,
)
from transformer_lib.transformer import Transformer, TransformerConfig

FEW = settings(max_examples=25)


def draw(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def module(*args, seed=0, **kwargs):
    torch.manual_seed(seed)
    attention = MultiHeadAttention(*args, **kwargs)
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.3)  # biases too
    return attention


def as_torch(ours, bias):
    theirs = nn.MultiheadAttention(
        ours.d_model, ours.num_heads, bias=bias, batch_first=True
    )
    layers = ours.w_q, ours.w_k, ours.w_v
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([layer.weight for layer in layers]))
        theirs.out_proj.weight.copy_(ours.w_o.weight)
        if bias:
            theirs.in_proj_bias.copy_(torch.cat([layer.bias for layer in layers]))
            theirs.out_proj.bias.copy_(ours.w_o.bias)
    return theirs


# --- against torch --------------------------------------------------------------------

B, T, S, D, H = 3, 5, 7, 24, 4
LENGTHS = torch.tensor([7, 4, 1])
REAL = torch.arange(S) < LENGTHS[:, None]  # (B, S)
CAUSAL = torch.ones(T, S).tril().bool()  # (T, S)
SOME = torch.rand(B, H, T, S, generator=torch.Generator().manual_seed(1)) < 0.6
SOME[..., 0] = True

MASKS = {  # ours (True is allowed), torch's (True is not allowed)
    "none": (None, {}),
    "padding": (REAL[:, None, None], {"key_padding_mask": ~REAL}),
    "causal": (CAUSAL, {"attn_mask": ~CAUSAL}),
    "both": (
        REAL[:, None, None] & CAUSAL,
        {"key_padding_mask": ~REAL, "attn_mask": ~CAUSAL},
    ),
    "each head its own": (SOME, {"attn_mask": ~SOME.flatten(0, 1)}),
}


def gradients(attention, inputs, **settings_):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out, weights = attention(*leaves, **settings_)
    out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
    return out.detach(), weights, [x.grad for x in leaves]


@pytest.mark.parametrize("need_weights", [True, False], ids=["explicit", "fused"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("name", MASKS)
def test_value_and_gradients_are_torchs(name, bias, need_weights):
    mask, theirs_mask = MASKS[name]
    ours = module(D, H, bias=bias)
    theirs = as_torch(ours, bias)
    inputs = draw(B, T, D), draw(B, S, D, seed=1), draw(B, S, D, seed=2)
    out, weights, grads = gradients(ours, inputs, mask=mask, need_weights=need_weights)
    wanted, their_weights, their_grads = gradients(
        theirs, inputs, need_weights=True, average_attn_weights=False, **theirs_mask
    )
    close = {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(out, wanted, **close)
    torch.testing.assert_close(grads, their_grads, **close)
    if need_weights:
        torch.testing.assert_close(weights, their_weights, **close)
    else:
        assert weights is None
    layers = ours.w_q, ours.w_k, ours.w_v
    in_proj = torch.cat([layer.weight.grad for layer in layers])
    torch.testing.assert_close(in_proj, theirs.in_proj_weight.grad, **close)
    torch.testing.assert_close(
        ours.w_o.weight.grad, theirs.out_proj.weight.grad, **close
    )
    if bias:
        in_bias = torch.cat([layer.bias.grad for layer in layers])
        torch.testing.assert_close(in_bias, theirs.in_proj_bias.grad, **close)
        torch.testing.assert_close(
            ours.w_o.bias.grad, theirs.out_proj.bias.grad, **close
        )


@FEW
@given(
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 99),
)
def test_all_heads_at_once_is_a_loop_over_heads(B, T, S, H, d_k, d_v, seed):
    D = 5
    ours = module(D, H, d_k=d_k, d_v=d_v, seed=seed)
    query, key = draw(B, T, D, seed=seed), draw(B, S, D, seed=seed + 1)
    heads = []
    for i in range(H):
        w_q, w_k = (w.weight[i * d_k : (i + 1) * d_k].T for w in (ours.w_q, ours.w_k))
        w_v = ours.w_v.weight[i * d_v : (i + 1) * d_v].T
        head, _ = scaled_dot_product_attention(query @ w_q, key @ w_k, key @ w_v)
        heads.append(head)
    by_loop = torch.cat(heads, dim=-1) @ ours.w_o.weight.T
    close = {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(ours(query, key, key)[0], by_loop, **close)
    out, weights = ours(query, key, key, need_weights=True)
    torch.testing.assert_close(out, by_loop, **close)
    assert weights.shape == (B, H, T, S)


# --- heads and masks ------------------------------------------------------------------


@FEW
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_split_keeps_positions_and_merge_undoes_it(B, T, H, K):
    x = torch.arange(B * T * H * K).view(B, T, H * K)
    heads = split_heads(x, H)
    assert heads.shape == (B, H, T, K)
    for h in range(H):
        assert torch.equal(heads[:, h], x[:, :, h * K : (h + 1) * K])
    assert torch.equal(merge_heads(heads), x)


@pytest.mark.parametrize("need_weights", [True, False])
def test_no_position_sees_a_later_one(need_weights):
    ours, x = module(12, 3), draw(2, 6, 12)
    causal = torch.ones(6, 6).tril().bool()
    before = ours(x, x, x, causal, need_weights)[0]
    for t in range(1, 6):
        other = x.clone()
        other[:, t:] += 3
        after = ours(other, other, other, causal, need_weights)[0]
        torch.testing.assert_close(after[:, :t], before[:, :t])
        assert not torch.allclose(after[:, t:], before[:, t:])


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_query_with_nothing_allowed(need_weights):
    ours, x = module(12, 3), draw(2, 4, 12)
    mask = torch.ones(2, 1, 4, 4, dtype=torch.bool)
    mask[0, :, 2] = False
    out, _, grads = gradients(ours, (x, x, x), mask=mask, need_weights=need_weights)
    assert (out[0, 2] == 0).all()  # no bias: zeros stay zeros
    assert all(g.isfinite().all() for g in grads)
    assert all(p.grad.isfinite().all() for p in ours.parameters())


def test_dropout_only_in_training():
    ours, x = module(12, 3, dropout=0.5), draw(2, 4, 12)
    assert not torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])
    ours.eval()
    for need_weights in (True, False):
        first, second = (ours(x, x, x, None, need_weights)[0] for _ in range(2))
        assert torch.equal(first, second)
    plain = copy.deepcopy(ours)
    plain.dropout = 0.0
    torch.testing.assert_close(plain.train()(x, x, x)[0], ours(x, x, x)[0])


# --- size -----------------------------------------------------------------------------


def size(*args, **kwargs):
    return sum(p.numel() for p in MultiHeadAttention(*args, **kwargs).parameters())


def test_parameters_do_not_depend_on_the_number_of_heads():
    judge = nn.MultiheadAttention(512, 8, bias=False)
    wanted = sum(p.numel() for p in judge.parameters())
    for num_heads in (1, 4, 8, 16, 32):
        assert size(512, num_heads) == wanted == 4 * 512**2
    judge = nn.MultiheadAttention(512, 8)
    assert size(512, 8, bias=True) == sum(p.numel() for p in judge.parameters())


def test_narrow_keys_save_what_table_3_says():
    for d_k, millions in ((16, 65 - 58), (32, 65 - 60)):
        saved = 18 * (size(512, 8) - size(512, 8, d_k=d_k, d_v=64))
        assert saved == 18 * 2 * 512 * 8 * (64 - d_k)
        assert abs(saved / 1e6 - millions) < 1  # both counts are rounded


# --- errors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"num_heads": 7}, "d_model=512 cannot be split into num_heads=7"),
        ({"num_heads": 0}, "num_heads=0 must be at least 1"),
        ({"num_heads": 7, "d_k": 64}, "give both d_k and d_v"),
        ({"num_heads": 8, "d_k": 0}, "d_k=0 must be"),
        ({"num_heads": 8, "d_v": -1}, "d_v=-1 must be"),
    ],
)
def test_wrong_sizes(sizes, said):
    with pytest.raises(ValueError, match=said):
        MultiHeadAttention(512, **sizes)


def test_any_widths_when_both_are_given():
    x = draw(2, 5, 10)
    assert MultiHeadAttention(10, 3, d_k=4, d_v=7)(x, x, x)[0].shape == (2, 5, 10)


# --- another attention, handed in -----------------------------------------------------


def even(query, key, value, mask, dropout_p):
    """The plain mean of the values: what equal weights give."""
    return value.mean(dim=-2, keepdim=True).expand(*query.shape[:-1], -1)


def test_attention_is_handed_in():
    ours, x = module(12, 3), draw(2, 5, 12)
    assert ours(x, x, x)[1] is None
    wanted, weights = ours(x, x, x, need_weights=True)
    by_formula = module(12, 3, attention=scaled_dot_product_attention)
    got = by_formula(x, x, x)
    torch.testing.assert_close(got[0], wanted)
    torch.testing.assert_close(got[1], weights)
    without = F.linear(ours.w_v(x).mean(dim=1), ours.w_o.weight)  # equal weights
    out, none = module(12, 3, attention=even)(x, x, x)
    torch.testing.assert_close(out, without[:, None].expand_as(out))
    assert none is None


def test_attention_gets_mask_and_dropout():
    given_ = []

    def note(query, key, value, mask, dropout_p):
        given_.append((query.shape, key.shape, value.shape, mask, dropout_p))
        return even(query, key, value, mask, dropout_p)

    ours = module(12, 3, d_v=5, dropout=0.25, attention=note)
    x, memory, mask = draw(2, 4, 12), draw(2, 6, 12), torch.ones(4, 6).bool()
    ours(x, memory, memory, mask)
    ours.eval()(x, memory, memory)
    first, second = given_
    assert first[:3] == ((2, 3, 4, 4), (2, 3, 6, 4), (2, 3, 6, 5))
    assert first[3] is mask and first[4] == 0.25 and second[3:] == (None, 0.0)


def test_use_attention_reaches_all_layers_and_is_put_back():
    config = TransformerConfig(20, d_model=12, num_heads=3, num_layers=2, d_ff=8)
    torch.manual_seed(0)
    model = Transformer(config).eval()
    src_ids, tgt_ids = torch.tensor([[3, 4, 5]]), torch.tensor([[1, 6]])
    before, calls = model(src_ids, tgt_ids), []

    def note(*given_):
        calls.append(given_)
        return scaled_dot_product_attention(*given_)

    with use_attention(model, note):
        torch.testing.assert_close(model(src_ids, tgt_ids), before)
    assert len(calls) == 6  # two layers of one, two of two
    with pytest.raises(RuntimeError), use_attention(model, note):
        raise RuntimeError
    assert torch.equal(model(src_ids, tgt_ids), before) and len(calls) == 6
    torch.manual_seed(0)
    other = Transformer(config, attention=note).eval()
    torch.testing.assert_close(other(src_ids, tgt_ids), before)
    assert len(calls) == 12


def test_a_model_can_still_be_saved_whole(tmp_path):
    ours, x = module(12, 3), draw(2, 5, 12)
    torch.save(ours, tmp_path / "whole.pt")
    again = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert torch.equal(again(x, x, x)[0], ours(x, x, x)[0])


# --- the exercises name the mistake ---------------------------------------------------


def cut(x, H):
    return x.unflatten(-1, (H, -1))  # (B, T, H, K)


WRONG_SPLIT = {
    "Wrong head split": lambda x, H: x.reshape(x.shape[0], H, x.shape[1], -1),
    "not moved forward": cut,
    "every H-th": lambda x, H: x.unflatten(-1, (-1, H)).permute(0, 3, 1, 2),
    "last two axes": lambda x, H: cut(x, H).permute(0, 2, 3, 1),
    "batch comes first": lambda x, H: cut(x, H).permute(2, 0, 1, 3),
    "not where they belong": lambda x, H: split_heads(x, H).flip(1),
    "a tuple": lambda x, H: x.chunk(H, dim=-1),
}


@pytest.mark.parametrize("said", WRONG_SPLIT)
def test_check_split_names_the_mistake(said):
    verdict = check_split(WRONG_SPLIT[said])
    assert not verdict.passed and said in verdict.message


def multi_head(split=split_heads, merge=merge_heads, scale=None, last=None):
    """Multi-head attention with one step changed."""

    def answer(x, w_q, w_k, w_v, w_o, H):
        q, k, v = (split(x @ w, H) for w in (w_q, w_k, w_v))
        divisor = math.sqrt(q.shape[-1]) if scale is None else scale(x.shape[-1])
        heads = (q @ k.mT / divisor).softmax(-1) @ v
        merged = merge(heads)
        return merged @ w_o if last is None else last(merged, w_o)

    return answer


def viewed(x, H):
    return x.reshape(x.shape[0], H, x.shape[1], -1)


def merged_by_view(heads):
    B, H, T, K = heads.shape
    return heads.reshape(B, T, H * K)


WRONG_MULTI_HEAD = {
    "output projection is missing": multi_head(last=lambda heads, w_o: heads),
    "without transposing back": multi_head(merge=merged_by_view),
    "Wrong head split": multi_head(split=viewed),
    "on the way back": multi_head(split=viewed, merge=merged_by_view),
    "not scaled": multi_head(scale=lambda d_model: 1.0),
    "root of d_model": multi_head(scale=math.sqrt),
    "only one head": multi_head(split=lambda x, H: x[:, None]),
    "from the right": multi_head(last=lambda heads, w_o: heads @ w_o.T),
    "should be (2, 6, 12)": multi_head(
        merge=lambda heads: heads.mean(1), last=lambda heads, w_o: heads
    ),
    "alone": lambda *args: (multi_head()(*args), None),
    "not right": multi_head(last=lambda heads, w_o: heads @ w_o + 1),
}


@pytest.mark.parametrize("said", WRONG_MULTI_HEAD)
def test_check_multi_head_names_the_mistake(said):
    assert check_multi_head(multi_head()).passed
    verdict = check_multi_head(WRONG_MULTI_HEAD[said])
    assert not verdict.passed and said in verdict.message


def silenced(act, on_copy=True):
    """A head silenced by what act does to the module."""

    def answer(attention, head):
        silent = copy.deepcopy(attention) if on_copy else attention
        with torch.no_grad():
            act(silent, head)
        return silent

    return answer


def zero(name, part):
    def act(attention, head):
        getattr(attention, name).weight[part(head)] = 0

    return act


def columns(head):
    return slice(None), slice(5 * head, 5 * head + 5)


def keep_only(attention, head):
    rest = [h for h in range(3) if h != head]
    for h in rest:
        attention.w_o.weight[columns(h)] = 0


WRONG_SILENCE = {
    "work on a copy": silenced(zero("w_o", columns), on_copy=False),
    "Nothing has changed": silenced(lambda attention, head: None),
    "torch.no_grad()": lambda attention, head: zero("w_o", columns)(
        copy.deepcopy(attention), head
    ),
    "silenced index 0": silenced(lambda a, h: zero("w_o", columns)(a, h - 1)),
    "silenced index 2": silenced(lambda a, h: zero("w_o", columns)(a, h + 1)),
    "other way round": silenced(keep_only),
    "rows of w_o": silenced(zero("w_o", lambda h: slice(5 * h, 5 * h + 5))),
    "still averages": silenced(zero("w_q", lambda h: slice(2 * h, 2 * h + 2))),
    "d_v wide": silenced(zero("w_o", lambda h: (slice(None), slice(2 * h, 2 * h + 2)))),
    "a copy": lambda attention, head: attention.w_o,
}


@pytest.mark.parametrize("said", WRONG_SILENCE)
def test_check_without_head_names_the_mistake(said):
    assert check_without_head(silenced(zero("w_o", columns))).passed
    by_values = zero("w_v", lambda h: slice(5 * h, 5 * h + 5))
    assert check_without_head(silenced(by_values)).passed
    verdict = check_without_head(WRONG_SILENCE[said])
    assert not verdict.passed and said in verdict.message


def forms(attention, scale=2.0):
    w_q, w_k = (w.weight.view(3, 4, 12) for w in (attention.w_q, attention.w_k))
    return w_q.mT @ w_k / scale


def by_columns(attention):
    w_q, w_k = (w.weight.view(12, 3, 4) for w in (attention.w_q, attention.w_k))
    return w_q.transpose(0, 1) @ w_k.transpose(0, 1).mT / 2


def too_narrow(attention):
    w_q, w_k = (w.weight.view(3, 4, 12) for w in (attention.w_q, attention.w_k))
    return w_q @ w_k.mT / 2


WRONG_FORMS = {
    "is missing": lambda a: forms(a, 1.0),
    "square root": lambda a: forms(a, 4.0),
    "root of d_model": lambda a: forms(a, math.sqrt(12)),
    "exchanged": lambda a: forms(a).mT,
    "by columns": by_columns,
    "one for each": lambda a: forms(a).sum(0),
    "(K, K)": too_narrow,
    "do not give": lambda a: forms(a) + 1,
}


@pytest.mark.parametrize("said", WRONG_FORMS)
def test_check_score_matrices_names_the_mistake(said):
    assert check_score_matrices(forms).passed
    verdict = check_score_matrices(WRONG_FORMS[said])
    assert not verdict.passed and said in verdict.message
