"""Chapter 29: online, window, linear and latent attention against the direct forms."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_lib.attention import scaled_dot_product_attention
from transformer_lib.decoding import CachedSteps, FullSteps, output_limits, search
from transformer_lib.exercises.long_text import (
    check_merge,
    check_remember,
    check_slower_base,
)
from transformer_lib.family import FamilyConfig, StackSteps, build_model
from transformer_lib.hello import attention as attention_on_lists
from transformer_lib.long_text import (
    LatentAttention,
    attention_reading_once,
    linear_attention,
    online_attention,
    window_attention,
)
from transformer_lib.multihead import MultiHeadAttention, use_attention
from transformer_lib.tokenizer import BOS, EOS, PAD
from transformer_lib.transformer import Transformer, TransformerConfig

FEW = settings(max_examples=25, deadline=None)


# --- online softmax -------------------------------------------------------------------


def direct(query, key, value, mask=None, causal=False):
    allowed = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool)
    allowed = allowed.tril() if causal else allowed
    allowed = allowed if mask is None else allowed & mask
    return scaled_dot_product_attention(query, key, value, allowed)[0]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 11),
    st.sampled_from(["none", "mask", "causal", "both", "keys"]),
    st.sampled_from([1.0, 30.0]),
)
def test_online_equals_direct_in_value_and_gradient(seed, t, s, size, kind, scale):
    causal = kind in ("causal", "both")
    s = t if causal else s
    torch.manual_seed(seed)
    shapes = (2, 3, t, 4), (2, 1, s, 4), (3, s, 5)
    qkv = [torch.randn(x, dtype=torch.float64) * scale for x in shapes]
    qkv = [x.requires_grad_() for x in qkv]
    mask = None
    if kind in ("mask", "both"):
        mask = torch.rand(2, 1, t, s) > 0.5
        mask[0, :, 0] = False  # a row with nothing allowed
    if kind == "keys":
        mask = torch.rand(2, 1, 1, s) > 0.4
    ours = online_attention(*qkv, mask, causal, block_size=size)
    wanted = direct(*qkv, mask, causal)
    torch.testing.assert_close(ours, wanted)
    if kind in ("mask", "both"):
        assert ours[0, :, 0].abs().max() == 0
    grad = torch.randn_like(ours)
    got = torch.autograd.grad(ours, qkv, grad)
    for g, w in zip(got, torch.autograd.grad(wanted, qkv, grad), strict=True):
        torch.testing.assert_close(g, w, atol=1e-8, rtol=1e-6)


def test_a_whole_model_attends_online():
    """Handed in to every layer of chapter 07's model, masks and padding included."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "num_heads": 2, "num_layers": 2, "d_ff": 24}
    model = Transformer(TransformerConfig(30, **sizes)).eval()
    src_ids = torch.tensor([[5, 6, 7, 8, EOS], [9, 4, EOS, PAD, PAD]])
    tgt_ids = torch.tensor([[BOS, 11, 12], [BOS, 14, PAD]])
    wanted, calls = model(src_ids, tgt_ids), []

    def online(query, key, value, mask, dropout_p):
        calls.append(mask)
        return online_attention(query, key, value, mask, block_size=2)

    with use_attention(model, online):
        torch.testing.assert_close(model(src_ids, tgt_ids), wanted)
    assert len(calls) == 6


def test_online_gradient_by_differences():
    torch.manual_seed(0)
    qkv = [torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True) for _ in "qkv"]
    mask = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1]]).bool()
    assert torch.autograd.gradcheck(
        lambda *x: online_attention(*x, mask, False, 2), qkv
    )


def test_online_refuses_what_does_not_fit():
    q, k = torch.randn(1, 4, 8), torch.randn(1, 5, 8)
    with pytest.raises(ValueError, match="4 queries to 5 keys"):
        online_attention(q, k, k, causal=True)
    with pytest.raises(ValueError, match="block_size=0"):
        online_attention(q, k, k, block_size=0)


def test_reading_once_equals_chapter_one():
    X = [[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0]]
    Wq = [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9], [0.1, 0.2, 0.3]]
    Wk = [[0.2, 0.3, 0.4], [0.5, 0.6, 0.7], [0.8, 0.9, 0.1], [0.2, 0.3, 0.4]]
    steps = attention_on_lists(X, Wq, Wk, Wk)
    for query, wanted in zip(steps.Q, steps.Z, strict=True):
        pairs = iter(zip(steps.K, steps.V, strict=True))  # once, and no second time
        assert attention_reading_once(query, pairs) == pytest.approx(wanted)
    huge = [([1000.0], [1.0]), ([2000.0], [5.0])]
    assert attention_reading_once([1.0], huge) == pytest.approx([5.0])
    assert attention_reading_once([1.0], []) == []


def test_saved_for_the_backward_pass_is_no_square():
    sizes = []
    x = torch.randn(1, 300, 4, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.append(t.numel()) or t, lambda t: t
    )
    with hooks:
        online_attention(x, x, x, causal=True, block_size=16)
    assert sizes and max(sizes) <= 300 * 4


# --- long sequences -------------------------------------------------------------------


@FEW
@given(st.integers(1, 13), st.integers(1, 15), st.integers(0, 10**6))
def test_window_equals_a_band(length, window, seed):
    torch.manual_seed(seed)
    q, k, v = (torch.randn(2, 2, length, n, dtype=torch.float64) for n in (3, 3, 4))
    back = torch.arange(length)[:, None] - torch.arange(length)
    wanted = direct(q, k, v, (back >= 0) & (back < window))
    torch.testing.assert_close(window_attention(q, k, v, window), wanted)


@pytest.mark.parametrize("causal", [False, True])
def test_linear_equals_its_square_form(causal):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 7, n, dtype=torch.float64) for n in (3, 3, 4))
    scores = (F.elu(q) + 1) @ (F.elu(k) + 1).transpose(-2, -1)  # (B, T, S)
    scores = scores.tril() if causal else scores
    wanted = scores / scores.sum(-1, keepdim=True) @ v
    torch.testing.assert_close(linear_attention(q, k, v, causal), wanted)


def test_gradients_of_gradients_are_refused():
    """The running sum is not part of the graph: they would be wrong."""
    x = torch.randn(3, 4, requires_grad=True)
    loss = online_attention(x, x, x).square().sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()


@pytest.mark.parametrize("keys", [3, 7])
def test_causal_attention_needs_as_many_queries_as_keys(keys):
    x, y = torch.zeros(5, 4), torch.zeros(keys, 4)
    for attend in (linear_attention, online_attention):
        with pytest.raises(ValueError, match=f"5 queries to {keys} keys"):
            attend(x, y, y, causal=True)


# --- latent attention -----------------------------------------------------------------


def written_out(latent):
    """Full attention whose matrices are the products of the latent ones."""
    heads, width = latent.num_heads, latent.d_model
    full = MultiHeadAttention(width, heads).to(latent.w_q.weight.dtype)
    with torch.no_grad():
        for name in ("w_q", "w_o"):
            getattr(full, name).weight.copy_(getattr(latent, name).weight)
        for name in ("w_k", "w_v"):
            product = getattr(latent, name).weight @ latent.w_down.weight
            getattr(full, name).weight.copy_(product)
    return full


def test_latent_attention_is_full_attention_of_low_rank():
    torch.manual_seed(0)
    latent = LatentAttention(12, 3, rank=5).double()
    full = written_out(latent)
    x, y = torch.randn(2, 2, 6, 12, dtype=torch.float64)
    mask = torch.rand(2, 1, 6, 6) < 0.6
    found, wanted = latent(x, y, y, mask)[0], full(x, y, y, mask)[0]
    torch.testing.assert_close(found, wanted)
    grad = torch.randn_like(found)
    found.backward(grad)
    wanted.backward(grad)
    for name in ("w_q", "w_o"):
        a, b = (getattr(part, name).weight.grad for part in (latent, full))
        torch.testing.assert_close(a, b)
    down = 0
    for name in ("w_k", "w_v"):  # the chain rule, through the product
        of_product = getattr(full, name).weight.grad
        up = getattr(latent, name).weight
        torch.testing.assert_close(up.grad, of_product @ latent.w_down.weight.T)
        down = down + up.T @ of_product
    torch.testing.assert_close(latent.w_down.weight.grad, down)


def test_latent_attention_equals_deepseeks():
    """With its turned keys at zero, and without the norm of the short vectors."""
    from transformers import DeepseekV2Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import (
        DeepseekV2Attention,
    )

    torch.manual_seed(0)
    config = DeepseekV2Config(
        hidden_size=12,
        num_attention_heads=3,
        num_key_value_heads=3,
        q_lora_rank=None,
        kv_lora_rank=6,
        qk_nope_head_dim=4,
        qk_rope_head_dim=2,
        v_head_dim=4,
        attention_bias=False,
        attn_implementation="eager",
    )
    theirs, ours = DeepseekV2Attention(config, 0).eval(), LatentAttention(12, 3, 6)
    theirs.kv_a_layernorm = torch.nn.Identity()
    with torch.no_grad():
        query = torch.zeros(3, 6, 12)  # it divides by the root of 6, we by that of 4
        query[:, :4] = ours.w_q.weight.unflatten(0, (3, 4)) * (6 / 4) ** 0.5
        theirs.q_proj.weight.copy_(query.flatten(0, 1))
        down = torch.cat([ours.w_down.weight, torch.zeros(2, 12)])
        theirs.kv_a_proj_with_mqa.weight.copy_(down)
        up = [w.weight.unflatten(0, (3, 4)) for w in (ours.w_k, ours.w_v)]
        theirs.kv_b_proj.weight.copy_(torch.cat(up, dim=1).flatten(0, 1))
        theirs.o_proj.weight.copy_(ours.w_o.weight)
    x = torch.randn(2, 7, 12, requires_grad=True)
    allowed = torch.ones(7, 7, dtype=torch.bool).tril()
    added = torch.zeros(7, 7).masked_fill(~allowed, -torch.inf)[None, None]
    turns = torch.ones(1, 7, 1, dtype=torch.complex64)  # by no angle
    found = ours(x, x, x, allowed)[0]
    wanted = theirs(x, added, position_embeddings=turns)[0]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    grad = torch.randn_like(found)
    a, b = (torch.autograd.grad(out, x, grad)[0] for out in (found, wanted))
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_the_cache_of_latent_attention_holds_the_short_vectors_alone():
    """In a decoder-only model piece by piece, and in a beam search."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "num_heads": 4, "num_layers": 2, "d_ff": 24, "dropout": 0.0}
    model = build_model(FamilyConfig(30, **sizes, causal=True)).eval()
    translator = Transformer(TransformerConfig(30, **sizes)).eval()
    for layer in (*model.encoder.layers, *translator.decoder.layers):
        layer.self_attention = LatentAttention(16, 4, rank=3)
    ids, steps = torch.randint(4, 30, (2, 9)), StackSteps(model)
    src_ids = torch.tensor([[5, 6, 7, 8, EOS], [9, EOS, PAD, PAD, PAD]])
    with torch.inference_mode():
        found = torch.cat([steps.read(part) for part in ids.split([4, 1, 4], 1)], dim=1)
        torch.testing.assert_close(found, model(ids), atol=1e-5, rtol=1e-5)
        kept = [x[:, :, :9].numel() for x in (steps.caches[0].k, steps.caches[0].v)]
        assert kept == [2 * 9 * 3, 0]
        limits = output_limits(src_ids, 9)
        found, wanted = (
            [
                [one.ids for one in row]
                for row in search(kind(translator, src_ids), limits)
            ]
            for kind in (CachedSteps, FullSteps)
        )
    assert found == wanted


# --- exercises ------------------------------------------------------------------------


def remembering(keep=True, phi=lambda x: F.elu(x) + 1, late=False, divide=True):
    """A step of linear attention with one mistake."""

    def step(state, total, query, key, value):
        asked = F.elu(query) + 1
        new = state + torch.outer(phi(key), value), total + F.elu(key) + 1
        seen = (state, total) if late else new
        out = asked @ seen[0] / (asked @ seen[1] if divide else 1)
        return (new[0] if keep else state), new[1], out

    return step


@pytest.mark.parametrize(
    "check, wrong, telling",
    [
        (check_merge, lambda a, la, b, lb: (a + b) / 2, "plain mean"),
        (
            check_merge,
            lambda a, la, b, lb: (la * a + lb * b) / (la + lb),
            "logarithms",
        ),
        (
            check_merge,
            lambda a, la, b, lb: (la.exp() * a + lb.exp() * b) / (la.exp() + lb.exp()),
            "overflow",
        ),
        (check_merge, lambda a, la, b, lb: a + b, "sum of the two"),
        (check_slower_base, lambda b, f, k: b * f, "the slowest pair's exponent"),
        (check_slower_base, lambda b, f, k: b * f ** (-k / (k - 2)), "must grow"),
        (check_slower_base, lambda b, f, k: b * f ** ((k - 2) / k), "reciprocal"),
        (check_slower_base, lambda b, f, k: "b", "Give a number"),
        (check_remember, remembering(keep=False), "must be added to it"),
        (check_remember, remembering(phi=lambda x: x), "phi of it"),
        (check_remember, remembering(late=True), "not this one"),
        (check_remember, remembering(divide=False), "must sum to 1"),
        (check_remember, lambda s, t, q, k, v: s, "Give three tensors"),
    ],
)
def test_mistakes_are_named(check, wrong, telling):
    verdict = check(wrong)
    assert not verdict.passed
    assert telling in verdict.message
