"""Chapter 28: the family against Hugging Face's, sampling, spans."""

import itertools
import math
import random
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from transformer_lib.attention import scaled_dot_product_attention
from transformer_lib.decoding import (
    CachedSteps,
    FullSteps,
    greedy_search,
    output_limits,
    search,
)
from transformer_lib.encoder import Encoder, FeedForward
from transformer_lib.exercises.family import (
    check_rotate_one,
    check_span_target,
    check_top_p,
)
from transformer_lib.family import (
    MEMBERS,
    FamilyConfig,
    GroupedAttention,
    ImageClassifier,
    MixtureOfExperts,
    StackSteps,
    build_model,
    cut_spans,
    fill_spans,
    mask_tokens,
    rotate,
    sample,
)
from transformer_lib.family.models import (
    NETWORKS,
    ScoreBias,
    alibi,
    blocks_of,
    cut_patches,
    relative_buckets,
)
from transformer_lib.family.pretraining import (
    before_holes,
    count_pairs,
    fit_steps,
    guess_by_counting,
    next_token_loss,
    random_spans,
    row_batches,
    short_sentences,
    small_tokenizer,
)
from transformer_lib.multihead import MultiHeadAttention
from transformer_lib.positions import position_rotation
from transformer_lib.tokenizer import BOS, EOS, PAD
from transformer_lib.transformer import Transformer, TransformerConfig

FEW = settings(max_examples=25, deadline=None)
SIZES = {"d_model": 16, "num_heads": 4, "num_layers": 2, "d_ff": 24, "dropout": 0.0}
V = 30


def model_of(member, **changes):
    torch.manual_seed(1)
    model = build_model(FamilyConfig(V, **(SIZES | MEMBERS[member] | changes)))
    with torch.no_grad():  # biases and gains that are not at 0 and 1
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


def ids_of(rows=2, length=7):
    torch.manual_seed(2)
    return torch.randint(4, V, (rows, length))


# --- the same weights in other people's models ----------------------------------------

LAYER = {  # ours to (GPT-2, BERT, ViT, Llama)
    "self_attention.w_q": (
        None,
        "attention.self.query",
        "attention.q_proj",
        "self_attn.q_proj",
    ),
    "self_attention.w_k": (
        None,
        "attention.self.key",
        "attention.k_proj",
        "self_attn.k_proj",
    ),
    "self_attention.w_v": (
        None,
        "attention.self.value",
        "attention.v_proj",
        "self_attn.v_proj",
    ),
    "self_attention.w_o": (
        "attn.c_proj",
        "attention.output.dense",
        "attention.o_proj",
        "self_attn.o_proj",
    ),
    "residual_1.norm": (
        "ln_1",
        "attention.output.LayerNorm",
        "layernorm_before",
        "input_layernorm",
    ),
    "feed_forward.w_1": ("mlp.c_fc", "intermediate.dense", "mlp.fc1", "mlp.gate_proj"),
    "feed_forward.w_2": ("mlp.c_proj", "output.dense", "mlp.fc2", "mlp.down_proj"),
    "feed_forward.w_3": (None, None, None, "mlp.up_proj"),
    "residual_2.norm": (
        "ln_2",
        "output.LayerNorm",
        "layernorm_after",
        "post_attention_layernorm",
    ),
}
KINDS = {
    "GPT-2": (0, "transformer.h.{}.", "transformer.ln_f"),
    "BERT": (1, "layer.{}.", None),
    "ViT": (2, "vit.layers.{}.", "vit.layernorm"),
    "LLaMA": (3, "model.layers.{}.", "model.norm"),
}


def in_their_words(member, stack, of):
    """The tensors of a stack by the other library's names: weights or gradients."""
    column, prefix, last = KINDS[member]
    out = {}
    if last:
        for name, p in stack.norm.named_parameters():
            out[f"{last}.{name}"] = of(p)
    for i, layer in enumerate(stack.layers):
        modules = dict(layer.named_modules())
        for ours, theirs in LAYER.items():
            name = theirs[column]
            if ours not in modules or name is None:
                continue
            for kind, p in modules[ours].named_parameters(recurse=False):
                x = of(p)
                if member == "LLaMA" and ours[-3:] in ("w_q", "w_k"):
                    x = halves(x, stack)
                if member == "GPT-2" and kind == "weight" and "norm" not in ours:
                    x = x.T  # its linear maps keep their matrices transposed
                out[f"{prefix.format(i)}{name}.{kind}"] = x
        if member == "GPT-2":
            three = [modules[f"self_attention.w_{c}"] for c in "qkv"]
            name = f"{prefix.format(i)}attn.c_attn"
            out[f"{name}.weight"] = torch.cat([of(m.weight) for m in three]).T
            out[f"{name}.bias"] = torch.cat([of(m.bias) for m in three])
    return out


def halves(x, stack):
    """Pairs (2i, 2i + 1) of each head as Llama has them: (i, i + K / 2)."""
    width = stack.layers[0].self_attention.w_q.out_features // SIZES["num_heads"]
    order = [*range(0, width, 2), *range(1, width, 2)]
    return x.unflatten(0, (-1, width))[:, order].flatten(0, 1)


def load(theirs, weights):
    theirs.eval()
    missing, unknown = theirs.load_state_dict(weights, strict=False)
    assert not missing and not unknown, (missing, unknown)


def same_gradients(member, stack, theirs):
    named = dict(theirs.named_parameters())
    got = in_their_words(member, stack, lambda p: p.grad)
    assert len(got) > 20
    for name, grad in got.items():
        torch.testing.assert_close(grad, named[name].grad, atol=1e-4, rtol=1e-4)


def language_model(member, base=10_000.0):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if member == "GPT-2":
            from transformers import GPT2Config, GPT2LMHeadModel

            return GPT2LMHeadModel(
                GPT2Config(
                    vocab_size=V,
                    n_positions=12,
                    n_embd=16,
                    n_layer=2,
                    n_head=4,
                    n_inner=24,
                    activation_function="gelu",
                    tie_word_embeddings=False,
                    bos_token_id=BOS,
                    eos_token_id=EOS,
                )
            )
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=V,
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                intermediate_size=24,
                mlp_bias=True,
                rms_norm_eps=1e-5,
                tie_word_embeddings=False,
                rope_parameters={"rope_type": "default", "rope_theta": base},
                bos_token_id=BOS,
                eos_token_id=EOS,
            )
        )


@pytest.mark.parametrize("member", ["GPT-2", "LLaMA"])
def test_whole_language_models_equal_hugging_face(member):
    model = model_of(member, max_length=12, num_kv_heads=2 if member == "LLaMA" else 4)
    theirs, table = language_model(member), model.src_embedding.weight
    weights = in_their_words(member, model.encoder, lambda p: p.detach())
    read = table.detach() * 4  # our embeddings are scaled by the root of d_model
    name = {"GPT-2": "transformer.wte", "LLaMA": "model.embed_tokens"}[member]
    weights |= {f"{name}.weight": read, "lm_head.weight": table.detach()}
    if member == "GPT-2":
        weights["transformer.wpe.weight"] = model.src_positions.table.detach()
    load(theirs, weights)
    ids = ids_of()
    ours, other = model(ids), theirs(ids).logits
    torch.testing.assert_close(ours, other, atol=1e-4, rtol=1e-4)
    for logits in (ours, other):
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    same_gradients(member, model.encoder, theirs)
    named = dict(theirs.named_parameters())  # one table here, two there
    both = 4 * named[f"{name}.weight"].grad + named["lm_head.weight"].grad
    torch.testing.assert_close(table.grad, both, atol=1e-4, rtol=1e-4)


def test_bert_layers_equal_hugging_face():
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertEncoder

    settings_ = BertConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=24,
        hidden_act="gelu",
        layer_norm_eps=1e-5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    stack, theirs = model_of("BERT").encoder, BertEncoder(settings_)
    load(theirs, in_their_words("BERT", stack, lambda p: p.detach()))
    x = torch.randn(2, 6, 16)
    real = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]).bool()[:, None, None]
    bias = torch.zeros(2, 1, 1, 6).masked_fill(~real, torch.finfo(torch.float32).min)
    ours, other = stack(x, real), theirs(x, attention_mask=bias).last_hidden_state
    keep = real[:, 0, 0]  # what stands at padding is nobody's business
    torch.testing.assert_close(ours[keep], other[keep], atol=1e-4, rtol=1e-4)
    grad = torch.randn_like(ours) * keep[..., None]
    ours.backward(grad)
    other.backward(grad)
    same_gradients("BERT", stack, theirs)


def test_whole_vit_equals_hugging_face():
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(1)
    config = FamilyConfig(10, **SIZES, **MEMBERS["ViT"])
    model = ImageClassifier(config, image_size=8, patch_size=2, channels=3)
    theirs = ViTForImageClassification(
        ViTConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=24,
            image_size=8,
            patch_size=2,
            num_channels=3,
            layer_norm_eps=1e-5,
            num_labels=10,
        )
    )
    weights = in_their_words("ViT", model.stack, lambda p: p.detach())
    matrix = model.embedding.weight.detach()
    weights |= {
        "vit.embeddings.cls_token": model.class_token.detach(),
        "vit.embeddings.position_embeddings": model.positions.table.detach()[None],
        "vit.embeddings.patch_embeddings.projection.weight": matrix.view(16, 3, 2, 2),
        "vit.embeddings.patch_embeddings.projection.bias": model.embedding.bias.data,
        "classifier.weight": model.output.weight.detach(),
        "classifier.bias": model.output.bias.detach(),
    }
    load(theirs, weights)
    images, classes = torch.randn(3, 3, 8, 8), torch.tensor([1, 0, 9])
    ours, other = model(images), theirs(images).logits
    torch.testing.assert_close(ours, other, atol=1e-4, rtol=1e-4)
    for logits in (ours, other):
        F.cross_entropy(logits, classes).backward()
    same_gradients("ViT", model.stack, theirs)
    theirs_grad = theirs.vit.embeddings.patch_embeddings.projection.weight.grad
    grad = model.embedding.weight.grad.view(16, 3, 2, 2)
    torch.testing.assert_close(grad, theirs_grad, atol=1e-4, rtol=1e-4)


def test_papers_settings_give_the_papers_model():
    model = model_of("2017")
    papers = Transformer(TransformerConfig(V, **SIZES))
    papers.load_state_dict(model.state_dict())
    src_ids, tgt_ids = ids_of(2, 6), ids_of(2, 4)
    torch.testing.assert_close(model(src_ids, tgt_ids), papers(src_ids, tgt_ids))


@pytest.mark.parametrize("member", MEMBERS)
def test_parameters_are_counted_without_a_model(member):
    config = FamilyConfig(V, **(SIZES | MEMBERS[member]))
    built = sum(p.numel() for p in build_model(config).parameters())
    assert config.num_parameters() == built
    if member == "2017":
        assert built == TransformerConfig(V, **SIZES).num_parameters()


def test_vit_has_the_parameters_that_are_published():
    """86,567,656 in ViT-B/16 with a thousand classes: torchvision's count."""
    widths = {"d_model": 768, "num_heads": 12, "num_layers": 12, "d_ff": 3072}
    with torch.device("meta"):
        config = FamilyConfig(1000, **widths, **MEMBERS["ViT"])
        model = ImageClassifier(config, 224, 16, channels=3)
    assert sum(p.numel() for p in model.parameters()) == 86_567_656


def test_two_thirds_keep_the_size_of_a_gated_network():
    """Shazeer 2020, section 3."""
    plain = NETWORKS["relu"](512, 2048)
    gated = NETWORKS["swiglu"](512, 2048 * 2 // 3)
    weights = [
        sum(p.numel() for p in m.parameters() if p.dim() > 1) for m in (plain, gated)
    ]
    assert weights[1] == pytest.approx(weights[0], rel=1e-3)


@pytest.mark.parametrize("member", MEMBERS)
def test_a_layer_is_built_of_its_blocks_and_of_nothing_else(member, monkeypatch):
    """No block is made only to be replaced."""
    made = []
    for kind in (MultiHeadAttention, FeedForward, nn.LayerNorm, nn.RMSNorm, nn.Dropout):
        monkeypatch.setattr(kind, "__init__", _noted(kind.__init__, made))
    model = model_of(member)
    blocks = {*model.modules()}
    assert made and all(block in blocks for block in made)


def test_two_stacks_take_what_attends_and_drops_as_chapter_07_does():
    seen = []

    def attends(query, key, value, mask, dropout_p):
        seen.append(query.shape)
        return scaled_dot_product_attention(query, key, value, mask)

    config = FamilyConfig(V, **SIZES | MEMBERS["T5"])
    torch.manual_seed(1)
    plain = build_model(config).eval()
    torch.manual_seed(1)
    model = type(plain)(config, attends, torch.nn.AlphaDropout).eval()
    src, tgt = ids_of(2, 7), ids_of(2, 5)
    torch.testing.assert_close(model(src, tgt), plain(src, tgt))
    assert len(seen) == 2 * 3  # one a layer of the encoder, two of the decoder
    drops = [m for m in model.modules() if isinstance(m, torch.nn.AlphaDropout)]
    assert len(drops) == 1 + 2 * 5
    assert not any(isinstance(m, nn.Dropout) for m in model.modules())


@pytest.mark.parametrize(
    "changes", [{"norm": "rms"}, {"num_kv_heads": 2}, {"activation": "swiglu"}]
)
def test_chapter_07s_model_refuses_settings_of_the_family(changes):
    """Its blocks know LayerNorm and full heads alone, and would say nothing."""
    config = FamilyConfig(V, **SIZES, **changes, cross_attention=True)
    message = "config is a FamilyConfig.*Give a FamilyConfig to .*family.build_model"
    with pytest.raises(ValueError, match=message):
        Transformer(config)
    assert isinstance(build_model(config), Transformer)


def _noted(make, made):
    def init(self, *args, **settings):
        make(self, *args, **settings)
        made.append(self)

    return init


@pytest.mark.parametrize("groups", [8, 4, 1])
def test_shared_heads_make_the_cache_smaller(groups):
    sizes = {"d_model": 64, "num_heads": 8, "num_layers": 3, "d_ff": 32}
    config = FamilyConfig(V, num_kv_heads=groups, cross_attention=True, **sizes)
    steps = CachedSteps(build_model(config).eval(), ids_of(2, 6))
    with torch.inference_mode():
        for _ in range(7):
            steps.step(torch.full((2, 1), 5), torch.zeros(2, 1, dtype=torch.int64))
    held = sum(x[:, :, : c.length].numel() for c in steps.caches for x in (c.k, c.v))
    assert held == 2 * 7 * 2 * 3 * groups * 8  # B, tokens, k and v, layers, heads, d_k


# --- what each member sees ------------------------------------------------------------


def moved(model, ids, place):
    """Which positions' outputs change when one token does."""
    other = ids.clone()
    other[:, place] = (other[:, place] - 4 + 1) % (V - 4) + 4
    model.eval()
    with torch.no_grad():
        gap = (model(ids) - model(other)).abs().amax(dim=(0, 2))
    return (gap > 1e-6).tolist()


@pytest.mark.parametrize("member", ["GPT", "GPT-2", "LLaMA"])
def test_decoder_only_sees_the_past_only(member):
    for place in range(7):
        assert moved(model_of(member), ids_of(), place) == [
            t >= place for t in range(7)
        ]


def test_encoder_only_sees_everything():
    assert moved(model_of("BERT"), ids_of(), 3) == [True] * 7


KINDS_OF_POSITIONS = ["sinusoidal", "learned", "rotary", "relative", "alibi"]


@pytest.mark.parametrize("positions", KINDS_OF_POSITIONS)
def test_order_counts_and_padding_does_not(positions):
    model, ids = model_of("BERT", positions=positions).eval(), ids_of(1, 5)
    alone = model(ids)
    padded = model(torch.cat([ids, torch.full((1, 3), PAD)], dim=1))[:, :5]
    torch.testing.assert_close(alone, padded, atol=1e-5, rtol=1e-5)
    order = torch.tensor([1, 0, 2, 4, 3])  # ALiBi does not tell a text from its mirror
    turned = model(ids[:, order])[:, order]
    assert (alone - turned).abs().max() > 1e-3  # without positions they would be equal


def test_a_bag_of_words_without_positions():
    stack = Encoder(**blocks_of(FamilyConfig(V, **SIZES))).eval()  # nothing is added
    x, order = torch.randn(1, 6, 16), torch.randperm(6)
    torch.testing.assert_close(
        stack(x)[:, order], stack(x[:, order]), atol=1e-5, rtol=0
    )
    rotary = Encoder(**blocks_of(FamilyConfig(V, **SIZES, positions="rotary"))).eval()
    assert (rotary(x)[:, order] - rotary(x[:, order])).abs().max() > 1e-3


def test_rotary_models_do_not_care_where_they_start():
    model = model_of("LLaMA").eval()
    layer, x = model.encoder.layers[0].self_attention, torch.randn(1, 5, 16)
    ahead = torch.cat([torch.randn(1, 9, 16), x], dim=1)
    mask = torch.zeros(14, 14, dtype=torch.bool)
    mask[9:, 9:] = True  # the same five, nine places further on
    later = layer(ahead, ahead, ahead, mask)[0][:, 9:]
    torch.testing.assert_close(layer(x, x, x)[0], later, atol=1e-5, rtol=1e-5)


def test_image_patches_have_places():
    torch.manual_seed(0)
    model = ImageClassifier(FamilyConfig(10, **SIZES, **MEMBERS["ViT"]), 8, 2).eval()
    images = torch.randn(2, 1, 8, 8)
    moved_ = torch.roll(images, 2, dims=3)  # whole patches change places
    assert (model(images) - model(moved_)).abs().max() > 1e-4
    with torch.no_grad():
        model.positions.table[1:] = 0.0
    torch.testing.assert_close(model(images), model(moved_), atol=1e-5, rtol=1e-5)


def test_patches_by_hand():
    image = torch.arange(16.0).view(1, 1, 4, 4)
    got = cut_patches(image, 2)[0].tolist()
    assert got == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    with pytest.raises(ValueError, match="do not divide into patches of 3"):
        cut_patches(image, 3)


# --- rotary positions, groups, gates --------------------------------------------------


def test_rotation_by_hand():
    x = torch.tensor([[1.0, 0.0, 0.0, 2.0]] * 3, dtype=torch.float64)
    for t, row in enumerate(rotate(x).tolist()):
        slow = t / 100  # 10000 ** (-2 / 4)
        wanted = [math.cos(t), math.sin(t), -2 * math.sin(slow), 2 * math.cos(slow)]
        assert row == pytest.approx(wanted, abs=1e-12)
    with pytest.raises(ValueError, match="even"):
        rotate(torch.randn(2, 3))


@FEW
@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 300))
def test_scores_depend_on_the_distance(m, n, further):
    torch.manual_seed(m)
    q, k = torch.randn(2, 1, 8, dtype=torch.float64)

    def score(m, n):
        return (rotate(q, m) @ rotate(k, n).T).item()

    assert score(m, n) == pytest.approx(score(m + further, n + further), abs=1e-8)
    by_matrix = (position_rotation(-m, 8) @ q[0]) @ (position_rotation(-n, 8) @ k[0])
    assert score(m, n) == pytest.approx(by_matrix.item(), abs=1e-8)
    assert rotate(q, m).norm().item() == pytest.approx(q.norm().item())


@pytest.mark.parametrize("shared", [1, 2, 4])
def test_groups_equal_heads_written_out(shared):
    torch.manual_seed(0)
    grouped = GroupedAttention(16, 4, shared, d_k=6, d_v=5, bias=True)
    full, state = MultiHeadAttention(16, 4, 6, 5, bias=True), grouped.state_dict()
    for name in ("w_k", "w_v"):
        for kind in ("weight", "bias"):
            heads = state[f"{name}.{kind}"].unflatten(0, (shared, -1))
            state[f"{name}.{kind}"] = heads.repeat_interleave(4 // shared, 0).flatten(
                0, 1
            )
    full.load_state_dict(state)
    x, y = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    mask = torch.rand(2, 1, 5, 7) > 0.3
    for weights in (False, True):
        ours, attended = grouped(x, y, y, mask, weights)
        theirs, wanted = full(x, y, y, mask, weights)
        torch.testing.assert_close(ours, theirs)
        assert (attended is None) == (not weights)
        if weights:
            torch.testing.assert_close(attended, wanted)
    k, v = grouped.keys_values(y, y)
    assert k.shape == (2, shared, 7, 6) and v.shape == (2, shared, 7, 5)


def test_gates_and_activations_by_formula():
    torch.manual_seed(0)
    x = torch.randn(3, 6)
    for kind, inside in {
        "relu": lambda f: (x @ f.w_1.weight.T + f.w_1.bias).clamp(min=0),
        "gelu": lambda f: (
            F.linear(x, f.w_1.weight, f.w_1.bias)
            * 0.5
            * (1 + torch.erf(F.linear(x, f.w_1.weight, f.w_1.bias) / 2**0.5))
        ),
        "swiglu": lambda f: f.w_1(x) / (1 + (-f.w_1(x)).exp()) * f.w_3(x),
    }.items():
        f = NETWORKS[kind](6, 9)
        wanted = inside(f) @ f.w_2.weight.T + f.w_2.bias
        torch.testing.assert_close(f(x), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "changes, telling",
    [
        ({"positions": "absolute"}, "'sinusoidal', 'learned', 'rotary'"),
        (
            {"positions": "alibi", "cross_attention": True},
            "positions='alibi' and cross",
        ),
        ({"activation": "tanh"}, "must be one of 'relu'"),
        ({"norm": "batch"}, "'layer', 'rms'"),
        ({"num_kv_heads": 3}, "num_kv_heads=3 does not divide num_heads=4"),
        ({"num_kv_heads": 0}, "num_kv_heads=0"),
        ({"positions": "rotary", "d_k": 3}, "d_k=3"),
        ({"d_model": 18}, "d_model=18"),
        ({"dropout": 2.0}, "dropout"),
        ({"positions": "rotary", "rotary_base": 1.0}, "rotary_base=1.0"),
        ({"num_experts": 2, "experts_per_token": 3}, "experts_per_token=3"),
        ({"num_experts": 2, "experts_per_token": 0}, "1 or more"),
    ],
)
def test_settings_are_checked(changes, telling):
    with pytest.raises(ValueError, match=telling):
        FamilyConfig(V, **(SIZES | changes))


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary"])
def test_two_stacks_write_with_a_cache_too(positions):
    model = model_of("T5", positions=positions, num_kv_heads=2).eval()
    src_ids = torch.tensor([[5, 6, 7, EOS], [9, EOS, PAD, PAD]])
    limits = output_limits(src_ids, 6)
    with torch.inference_mode():
        full = greedy_search(FullSteps(model, src_ids), limits)
        assert greedy_search(CachedSteps(model, src_ids), limits) == full


@pytest.mark.parametrize("heads", [4, 2, 1])
def test_rotary_beams_with_a_cache_say_what_reading_again_says(heads):
    """Beams stand at one place, and go on from any: logits and whole searches."""
    model = model_of("2017", positions="rotary", num_kv_heads=heads).eval()
    src_ids = torch.tensor([[5, 6, 7, EOS], [9, EOS, PAD, PAD]])
    cached, full = CachedSteps(model, src_ids), FullSteps(model, src_ids)
    tokens, parents = torch.full((2, 1), BOS), torch.zeros(2, 1, dtype=torch.int64)
    torch.manual_seed(3)
    with torch.inference_mode():
        for beams in (3, 2, 4, 4):
            found = cached.step(tokens, parents)
            wanted = full.step(tokens, parents)
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
            parents = torch.randint(tokens.shape[1], (2, beams))
            tokens = torch.randint(4, V, (2, beams))
        limits = output_limits(src_ids, 8)
        found, wanted = (
            search(kind(model, src_ids), limits, 4, n_best=4)
            for kind in (CachedSteps, FullSteps)
        )
    ids = [[[one.ids for one in row] for row in both] for both in (found, wanted)]
    assert ids[0] == ids[1]


@pytest.mark.parametrize("member", ["GPT", "GPT-2", "LLaMA"])
@pytest.mark.parametrize("pieces", [[9], [1] * 9, [4, 1, 3, 1]])
def test_a_text_in_pieces_is_read_as_in_one(member, pieces):
    model = model_of(member, num_kv_heads=2).eval()
    ids, steps = ids_of(3, 9), StackSteps(model)
    with torch.inference_mode():
        found = torch.cat([steps.read(part) for part in ids.split(pieces, 1)], dim=1)
        torch.testing.assert_close(found, model(ids), atol=1e-4, rtol=1e-4)
        kept = steps.caches[0].k[:, :, : steps.length]
    assert kept.shape == (3, 2, 9, 4)  # two heads of keys, not four


def test_greedy_search_runs_on_the_cache_of_one_stack():
    model = model_of("LLaMA").eval()
    limits = torch.tensor([7, 3, 5])
    with torch.inference_mode():
        found = greedy_search(StackSteps(model), limits)
        for row, limit in zip(found, limits.tolist(), strict=True):
            ids = [BOS]
            while len(ids) <= limit:
                logits = model(torch.tensor([ids]))[0, -1]
                logits[[PAD, BOS]] = -torch.inf
                if (best := int(logits.argmax())) == EOS:
                    break
                ids.append(best)
            assert row == ids[1:]
    steps = StackSteps(model)
    with pytest.raises(ValueError, match="2 beams"):
        steps.step(torch.tensor([[4, 5]]), torch.tensor([[0, 0]]))
    with pytest.raises(ValueError, match="causal=True"):
        StackSteps(model_of("BERT"))


def test_the_cache_of_llama_is_hugging_faces():
    """Keys and values of every layer, after a text in two pieces, and what is said."""
    ours = model_of("LLaMA", num_kv_heads=2).eval()
    theirs = llama_of(ours)
    ids, steps = ids_of(2, 8), StackSteps(ours)
    with torch.inference_mode():
        steps.read(ids[:, :5])
        found = steps.read(ids[:, 5:])
        first = theirs(ids[:, :5], use_cache=True)
        second = theirs(ids[:, 5:], past_key_values=first.past_key_values)
        torch.testing.assert_close(found, second.logits, atol=1e-4, rtol=1e-4)
    past = second.past_key_values
    for cache, layer in zip(steps.caches, past.layers, strict=True):
        for x, wanted in ((cache.v, layer.values), (by_halves(cache.k), layer.keys)):
            torch.testing.assert_close(x[:, :, :8], wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("base", [100.0, 500_000.0])
def test_other_rotary_bases_equal_hugging_face(base):
    ours = model_of("LLaMA", num_kv_heads=2, rotary_base=base)
    theirs = llama_of(ours.eval(), base)
    ids = ids_of(2, 11)
    found, wanted = ours(ids), theirs(ids).logits
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    (found**2).sum().backward()
    (wanted**2).sum().backward()
    same_gradients("LLaMA", ours.encoder, theirs)
    other = model_of("LLaMA", num_kv_heads=2).eval()
    assert (other(ids) - found).abs().max() > 1e-3


def llama_of(ours, base=10_000.0):
    """Hugging Face's Llama with the weights of a model of ours."""
    theirs, table = language_model("LLaMA", base), ours.src_embedding.weight.detach()
    weights = in_their_words("LLaMA", ours.encoder, lambda p: p.detach())
    weights |= {"model.embed_tokens.weight": 4 * table, "lm_head.weight": table}
    load(theirs, weights)
    return theirs


def by_halves(x):
    """Neighboring pairs of the last axis as Llama has them: (i, i + K / 2)."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)


# --- biases by distance ---------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 2, 8, 16])
def test_alibi_is_blooms(heads):
    """Up to a constant in each row, which a softmax does not see."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 9), heads, torch.float32)  # (H, 1, 9)
    gap = theirs - alibi(heads, 9, 9)
    past = torch.ones(9, 9).tril().bool()
    for row in range(9):
        of_row = gap[:, row, past[row]]
        torch.testing.assert_close(of_row, of_row[:, :1].expand_as(of_row))
    torch.testing.assert_close(alibi(heads, 2, 9), alibi(heads, 9, 9)[:, -2:])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("buckets, farthest", [(32, 128), (8, 20)])
def test_ranges_of_distances_are_t5s(causal, buckets, farthest):
    from transformers.models.t5.modeling_t5 import T5Attention

    place = torch.arange(300)
    theirs = T5Attention._relative_position_bucket(
        place - place[:, None], not causal, buckets, farthest
    )
    ours = relative_buckets(300, 300, causal, buckets, farthest)
    assert torch.equal(ours, theirs)
    assert torch.equal(relative_buckets(3, 300, causal, buckets, farthest), ours[-3:])


@pytest.mark.parametrize("kind", ["alibi", "relative"])
def test_biases_are_added_to_the_scores(kind):
    torch.manual_seed(0)
    attend = ScoreBias(kind, 4, causal=False)
    q, k, v = torch.randn(3, 2, 4, 6, 5)
    mask = torch.rand(2, 1, 6, 6) < 0.6
    mask[..., 0] = True
    mask[0, :, 2] = False  # sees nothing
    added = attend.bias(6, 6).masked_fill(~mask, -torch.inf)
    found, weights = attend(q, k, v, mask)
    wanted = F.scaled_dot_product_attention(q, k, v, added)
    rows = mask.any(-1)[:, 0]  # (B, T)
    for ours, theirs in ((found, wanted), (weights @ v, found)):
        ours, theirs = ours.transpose(1, 2), theirs.transpose(1, 2)
        torch.testing.assert_close(ours[rows], theirs[rows])
    assert found[0, :, 2].abs().max() == 0
    model = model_of("GPT", positions=kind)
    layer, x = model.encoder.layers[1].self_attention, torch.randn(2, 5, 16)
    one, other = (layer(x, x, x, need_weights=need) for need in (False, True))
    torch.testing.assert_close(one, other)  # no weights of another formula
    table = layer.attention.table
    if table is not None:  # one for all layers, and trained
        assert table is model.encoder.layers[0].self_attention.attention.table
        model(ids_of()).sum().backward()
        assert table.weight.grad.abs().max() > 0


@pytest.mark.parametrize("kind", KINDS_OF_POSITIONS)
def test_left_padding_changes_nothing_where_distances_count(kind):
    model, ids = model_of("GPT", positions=kind).eval(), ids_of(2, 5)
    padded = torch.cat([torch.full((2, 3), PAD), ids], dim=1)
    gap = (model(ids) - model(padded)[:, 3:]).abs().max().item()
    assert (gap < 1e-4) == (kind in ("rotary", "relative", "alibi"))


@pytest.mark.parametrize("kind", ["relative", "alibi"])
def test_biases_with_a_cache(kind):
    model, ids = model_of("GPT", positions=kind, num_kv_heads=2).eval(), ids_of(3, 9)
    steps = StackSteps(model)
    with torch.inference_mode():
        found = torch.cat([steps.read(part) for part in ids.split([4, 1, 4], 1)], dim=1)
        torch.testing.assert_close(found, model(ids), atol=1e-4, rtol=1e-4)


# --- mixtures of experts --------------------------------------------------------------


@pytest.mark.parametrize("count, few", [(4, 2), (3, 1), (2, 2)])
def test_experts_equal_mixtrals(count, few):
    """In value and in gradient."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    torch.manual_seed(0)
    ours = MixtureOfExperts(6, 10, count, few, "swiglu")
    config = MixtralConfig(
        hidden_size=6,
        intermediate_size=10,
        num_local_experts=count,
        num_experts_per_tok=few,
        hidden_act="silu",
    )
    theirs = MixtralSparseMoeBlock(config)
    with torch.no_grad():
        for expert in ours.experts:
            for linear in (expert.w_1, expert.w_2, expert.w_3):
                linear.bias.zero_()  # Mixtral has none
        theirs.gate.weight.copy_(ours.router.weight)
        for i, expert in enumerate(ours.experts):
            up = torch.cat([expert.w_1.weight, expert.w_3.weight])
            theirs.experts.gate_up_proj[i] = up
            theirs.experts.down_proj[i] = expert.w_2.weight
    x = torch.randn(2, 7, 6, requires_grad=True)
    found, wanted = ours(x), theirs(x)
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    grad = torch.randn_like(found)
    named = [x, ours.router.weight]
    for part in ("w_1", "w_3", "w_2"):
        named += [getattr(expert, part).weight for expert in ours.experts]
    mine = torch.autograd.grad(found, named, grad)
    parts = [torch.stack(mine[i : i + count]) for i in range(2, len(mine), count)]
    projections = [theirs.experts.gate_up_proj, theirs.experts.down_proj]
    of_x, of_router, up, down = torch.autograd.grad(
        wanted, [x, theirs.gate.weight, *projections], grad
    )
    others = [of_x, of_router, up[:, :10], up[:, 10:], down]
    for a, b in zip([*mine[:2], *parts], others, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_tokens_do_not_see_each_others_experts():
    torch.manual_seed(0)
    mixture, x = MixtureOfExperts(6, 10, 5), torch.randn(3, 4, 6)
    alone = torch.stack([mixture(row[None, None])[0, 0] for row in x.flatten(0, 1)])
    torch.testing.assert_close(mixture(x).flatten(0, 1), alone)
    shares = mixture.shares(x)
    assert ((shares > 0).sum(-1) == 2).all()
    torch.testing.assert_close(shares.sum(-1), torch.ones(3, 4))


def test_a_model_with_experts_learns_and_counts_its_parameters():
    model = model_of("LLaMA", num_experts=3, num_kv_heads=2)
    rows = ids_of(4, 6)
    losses = fit_steps(model, lambda: next_token_loss(model, rows), 40, lr=2e-2)
    assert losses[-1] < 0.5 * losses[0]
    routers = [n for n, p in model.named_parameters() if "router" in n]
    assert len(routers) == SIZES["num_layers"]
    assert model.config.num_parameters() == sum(p.numel() for p in model.parameters())


# --- BERT's masks ---------------------------------------------------------------------


def test_masking_follows_its_shares():
    ids = torch.randint(4, 1000, (200, 500))
    ids[:, 0], ids[:, -1], ids[:, -2] = BOS, PAD, EOS
    generator = torch.Generator().manual_seed(0)
    seen, wanted = mask_tokens(ids, 1000, 1000, generator=generator)
    chosen = wanted != PAD
    assert not chosen[:, [0, -1, -2]].any()
    assert torch.equal(wanted[chosen], ids[chosen])
    assert torch.equal(seen[~chosen], ids[~chosen])
    n, total = int(chosen.sum()), 200 * 497
    within(n, total, 0.15)
    within(int((seen[chosen] == 1000).sum()), n, 0.8)
    kept = int((seen[chosen] == ids[chosen]).sum())
    within(kept, n, 0.1 + 0.1 / 996)  # a random token can be the same one
    others = seen[chosen & (seen != 1000) & (seen != ids)]
    assert others.min() >= 4 and others.max() < 1000 and len(others.unique()) > 500
    again = mask_tokens(ids, 1000, 1000, generator=generator.manual_seed(0))
    assert torch.equal(again[0], seen) and torch.equal(again[1], wanted)
    with pytest.raises(ValueError, match="share=1.5"):
        mask_tokens(ids, 1000, 1000, 1.5)


def within(count, total, share):
    """Five standard deviations of a binomial count."""
    assert abs(count - total * share) < 5 * math.sqrt(total * share * (1 - share))


# --- sampling -------------------------------------------------------------------------


def test_sampling_draws_what_the_model_says():
    model = model_of("GPT-2")
    start = torch.tensor([[BOS, 7]]).expand(4000, -1)
    generator = torch.Generator().manual_seed(3)
    drawn = sample(model, start, 1, generator)
    counts = torch.bincount(
        torch.tensor([(row or [EOS])[0] for row in drawn]), minlength=V
    )
    logits = model.eval()(start[:1])[0, -1].detach()
    logits[[PAD, BOS]] = -torch.inf
    p = logits.softmax(-1)
    for token in range(V):
        within_or_rare(int(counts[token]), 4000, p[token].item())
    assert counts[PAD] == counts[BOS] == 0


def within_or_rare(count, total, share):
    assert abs(count - total * share) < 5 * math.sqrt(total * share * (1 - share)) + 3


def test_sampling_ends_rows_and_equals_greedy_when_cold():
    model = model_of("GPT-2", max_length=40).train()
    start = torch.tensor([[BOS, 7, 8], [BOS, 20, 11], [BOS, 5, 5]])
    for row, begin in zip(sample(model, start, 12, top_k=1), start, strict=True):
        ids, out = begin[None], []
        model.eval()
        while len(out) < 12:
            logits = model(ids)[0, -1].clone()
            logits[[PAD, BOS]] = -torch.inf
            token = int(logits.argmax())
            if token == EOS:
                break
            out.append(token)
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
        assert row == out
        model.train()
    sample(model, start, 2)
    assert model.training  # left as it was
    with pytest.raises(ValueError, match="causal=True"):
        sample(model_of("BERT"), start, 3)
    with pytest.raises(ValueError, match="unpadded"):
        sample(model, torch.tensor([[BOS, 5, PAD]]), 3)


# --- spans ----------------------------------------------------------------------------


def test_the_example_of_the_t5_paper():
    words = "Thank you for inviting me to your party last week .".split()
    source, target = cut_spans(words, [(2, 4), (8, 9)], ["<X>", "<Y>", "<Z>"])
    assert " ".join(source) == "Thank you <X> me to your party <Y> week ."
    assert " ".join(target) == "<X> for inviting <Y> last <Z>"
    assert fill_spans(source, target, ["<X>", "<Y>", "<Z>"]) == words
    with pytest.raises(ValueError, match="2 spans and 2 sentinels"):
        cut_spans(words, [(2, 4), (8, 9)], ["<X>", "<Y>"])


@FEW
@given(
    st.integers(2, 60),
    st.sampled_from([0.01, 0.15, 0.5, 0.95]),
    st.sampled_from([1, 1.5, 3, 10]),
    st.integers(0, 10**6),
)
def test_spans_are_cut_and_filled(length, share, mean, seed):
    spans = random_spans(length, share, mean, random.Random(seed))
    out = sum(end - start for start, end in spans)
    assert out == min(max(1, round(share * length)), length - 1)
    assert all(0 <= a < b <= length for a, b in spans)
    assert all(b < c for (_, b), (c, _) in itertools.pairwise(spans))  # apart
    ids, sentinels = list(range(100, 100 + length)), list(range(len(spans) + 1))
    source, target = cut_spans(ids, spans, sentinels)
    assert len(source) == length - out + len(spans)
    assert len(target) == out + len(spans) + 1
    assert fill_spans(source, target, sentinels) == ids


def test_spans_fall_everywhere():
    rng, hits = random.Random(0), torch.zeros(10)
    for _ in range(2000):
        for start, end in random_spans(10, 0.2, 2, rng):
            hits[start:end] += 1
    assert hits.min() > 100  # each place is cut out now and then, both ends too
    for wrong in ((1, 0.15, 3), (9, 0.0, 3), (9, 1.0, 3), (9, 0.15, 0.5)):
        with pytest.raises(ValueError, match="length="):
            random_spans(*wrong, rng)


# --- training small -------------------------------------------------------------------


@pytest.mark.parametrize("shared", [3, 8, 0, -1])
def test_groups_of_one_size(shared):
    with pytest.raises(ValueError, match=f"num_kv_heads={shared} does not divide"):
        GroupedAttention(16, 4, shared)


def test_counting_pairs_by_hand():
    one, two = count_pairs([[2, 4, 5, 3], [2, 4, 4, 3]], 7)
    assert one.sum().item() == pytest.approx(1) and two.shape == (7, 7)
    torch.testing.assert_close(two.sum(-1), torch.ones(7))
    assert one[4] == one.max() and one[6] > 0  # seen most, and never seen
    # after 4 come 5, 3 and 4 once each: three kinds share half of what follows
    assert two[4, 5].item() == pytest.approx((1 + 3 * one[5].item()) / 6)
    torch.testing.assert_close(two[6], one)  # never seen before anything


def test_guesses_by_counting_are_probabilities():
    one, two = count_pairs([[2, 4, 5, 3], [2, 4, 4, 3]], 7)
    left, right = torch.tensor([4, 2]), torch.tensor([3, 5])
    guesses = guess_by_counting(one, two, left, right)
    for p in guesses.values():
        assert p.shape == (2, 7)
        torch.testing.assert_close(p.sum(-1), torch.ones(2))
    wanted = two[4] * two[:, 3]
    torch.testing.assert_close(guesses["both neighbors"][0], wanted / wanted.sum())


def test_the_token_before_each_of_a_hole():
    """The text 5 6 7 8 9 with holes 6 7 and 9; sentinels from 20 on."""
    source = torch.tensor([[5, 20, 8, 21, EOS]])
    target = torch.tensor([[BOS, 20, 6, 7, 21, 9, 22, EOS]])
    assert before_holes(source, target, 20).tolist() == [5, 6, 8]


def test_batches_hold_each_row_once_a_round():
    rows = [[2, i, *([5] * (i % 4)), 3] for i in range(4, 24)]
    batches = row_batches(rows, 5, seed=1)
    seen = [row[1] for _ in range(4) for row in next(batches).tolist()]
    assert sorted(seen) == list(range(4, 24))
    widths = [next(batches).shape[1] for _ in range(4)]
    assert sorted(widths) == [3, 4, 5, 6]  # rows of like length together
    for wrong in (([], 5), (rows, 0)):  # without rows it would look for ever
        with pytest.raises(ValueError, match="one of each or more"):
            next(row_batches(*wrong))


def test_sentences_without_a_mirror(monkeypatch, tmp_path):
    def unreachable(*args):
        from transformer_lib.corpora import CorpusUnavailable

        raise CorpusUnavailable("no network here")

    import transformer_lib.family.pretraining as pretraining
    from transformer_lib.corpora import load_corpus

    def only_grammar(name, split="train"):
        return load_corpus(name, split) if "grammar" in name else unreachable()

    monkeypatch.setattr(pretraining, "load_corpus", only_grammar)
    name, train, held = short_sentences(30, 60, 50)
    assert name == "grammar-en-de" and len(train) > 500 and len(held) == 50
    assert not set(train) & set(held) and max(map(len, train + held)) <= 60
    words = {word for text in train + held for word in re.findall(r"[\w']+", text)}
    assert len(words) <= 60
    _, everything, _ = short_sentences(60, None)
    assert len(everything) > len(train)
    assert small_tokenizer(everything).vocab_size == 400


@pytest.mark.parametrize("member", ["GPT", "BERT", "LLaMA"])
def test_every_member_learns_a_row_by_heart(member):
    torch.manual_seed(0)
    model, ids = build_model(FamilyConfig(V, **(SIZES | MEMBERS[member]))), ids_of(2, 8)
    seen = ids.clone()
    if member == "BERT":
        seen[:, ::3] = V - 1  # hidden

    def loss():
        logits = model(seen)
        if member == "BERT":
            return F.cross_entropy(logits[:, ::3].flatten(0, 1), ids[:, ::3].flatten())
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    losses = fit_steps(model, loss, 60, lr=2e-2)
    assert len(losses) == 60 and losses[0] > 2 and losses[-1] < 0.5
    assert not model.training


def test_a_training_that_runs_out_of_time_ends_with_a_rate_of_zero(monkeypatch):
    """A clock that says one second an update: ten updates fit into ten seconds."""
    import transformer_lib.family.pretraining as pretraining

    clock, rates = iter(range(1000)), []
    monkeypatch.setattr(pretraining.time, "monotonic", lambda: next(clock))
    weight = torch.nn.Linear(1, 1)
    step = torch.optim.Adam.step
    monkeypatch.setattr(
        torch.optim.Adam,
        "step",
        lambda self: (rates.append(self.param_groups[0]["lr"]), step(self))[1],
    )
    square = lambda: weight(torch.ones(1)).square().sum()  # noqa: E731
    losses = fit_steps(weight, square, 200, 1.0, 10.0)
    assert len(losses) == len(rates) == 10  # at 20, 40, ... 200 of 200 steps
    assert rates[0] > 0.9 and rates == sorted(rates, reverse=True) and rates[-1] < 0.01
    assert len(fit_steps(weight, lambda: weight(torch.ones(1)).sum(), 25)) == 25


# --- exercises ------------------------------------------------------------------------


def halves_turned(x, position):
    half = len(x) // 2
    angle = position * 10000 ** (-torch.arange(half) * 2 / len(x))
    a, b = x[:half], x[half:]
    return torch.cat(
        [a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()]
    )


def turned_by(x, angle):
    a, b = x[0::2], x[1::2]
    turned = [a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()]
    return torch.stack(turned, -1).flatten()


def frequency(x):
    return 10000 ** (-torch.arange(0, len(x), 2) / len(x))


def nucleus(p, limit, cut):
    values, order = p.sort(descending=True)
    keep = cut(values.cumsum(0), values, limit)
    return p * torch.zeros_like(p).scatter(0, order, keep.float())


def normalized(p):
    return p / p.sum()


@pytest.mark.parametrize(
    "check, wrong, telling",
    [
        (check_rotate_one, lambda x, t: turned_by(x, -t * frequency(x)), "other way"),
        (check_rotate_one, halves_turned, "halves"),
        (
            check_rotate_one,
            lambda x, t: turned_by(x, (t + 1) * frequency(x)),
            "count from 0",
        ),
        (
            check_rotate_one,
            lambda x, t: turned_by(x, torch.full((len(x) // 2,), float(t))),
            "own frequency",
        ),
        (
            check_top_p,
            lambda p, t: normalized(nucleus(p, t, lambda c, v, t: c <= t)),
            "crosses",
        ),
        (
            check_top_p,
            lambda p, t: nucleus(p, t, lambda c, v, t: c - v < t),
            "sum to 1",
        ),
        (check_top_p, lambda p, t: normalized(p * (p >= t)), "each probability"),
        (
            check_top_p,
            lambda p, t: normalized(
                p.sort(descending=True).values
                * (p.sort(descending=True)[0].cumsum(0) < 0.8)
            ),
            "own place",
        ),
        (
            check_span_target,
            lambda ids, spans, s: [
                i for n, (a, b) in enumerate(spans) for i in [s[n], *ids[a:b]]
            ],
            "closing sentinel",
        ),
        (
            check_span_target,
            lambda ids, spans, s: [
                *(i for n, (a, b) in enumerate(spans) for i in [s[0], *ids[a:b]]),
                s[0],
            ],
            "sentinel of its own",
        ),
        (
            check_span_target,
            lambda ids, spans, s: [
                *(i for n, (a, b) in enumerate(spans) for i in [s[n], *ids[a : b + 1]]),
                s[len(spans)],
            ],
            "one token too many",
        ),
    ],
)
def test_mistakes_are_named(check, wrong, telling):
    verdict = check(wrong)
    assert not verdict.passed
    assert telling in verdict.message
