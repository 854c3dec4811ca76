"""Chapter 07: the whole model, against torch.nn.Transformer and the paper's Table 3."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_lib.batches import Batch
from transformer_lib.decoder import causal_mask, padding_mask
from transformer_lib.encoder import torch_names
from transformer_lib.exercises import transformer as exercises
from transformer_lib.training import BatchLoss
from transformer_lib.transformer import (
    Transformer,
    TransformerConfig,
    require_ids,
    torch_twin,
)

SMALL = TransformerConfig(
    50, d_model=32, num_heads=4, num_layers=2, d_ff=48, dropout=0.0
)


def make(config=SMALL, seed=0, **changes):
    """A model whose biases and gains are random too, so that no swap goes unseen."""
    torch.manual_seed(seed)
    model = Transformer(replace(config, **changes))
    for p in model.parameters():
        if p.dim() == 1:
            torch.nn.init.normal_(p, mean=0.5, std=0.3)
    return model


def ids(batch, length, seed=0, vocab_size=50):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocab_size, (batch, length), generator=generator)


def stacks(named):
    """Of tensors by name, those of the encoder and the decoder."""
    inside = ("encoder.", "decoder.")
    return {name: x for name, x in named.items() if name.startswith(inside)}


# --- what it is built of ---


@pytest.mark.parametrize("norm_first", [False, True])
def test_every_dropout_is_the_one_handed_in(norm_first):
    """With torch's own alpha dropout: everywhere, of this probability, no other one."""
    config = replace(SMALL, dropout=0.3, norm_first=norm_first)
    model = Transformer(config, dropout_layer=torch.nn.AlphaDropout)
    kinds = [m for m in model.modules() if "Dropout" in type(m).__name__]
    assert len(kinds) == 1 + 2 * (2 + 3)  # embeddings; two layers of each stack
    assert {(type(m), m.p) for m in kinds} == {(torch.nn.AlphaDropout, 0.3)}
    torch.manual_seed(3)
    plain = Transformer(config).state_dict()
    torch.manual_seed(3)
    other = Transformer(config, dropout_layer=torch.nn.AlphaDropout).state_dict()
    assert plain.keys() == other.keys()
    assert all(torch.equal(x, other[name]) for name, x in plain.items())


# --- equal to torch's ---


def hidden_states(model, twin, src, tgt, masks):
    """Ours and torch's hidden states for the same ids."""
    x = model.embed_source(src)
    y = model.embed_target(tgt)
    if not masks:
        return model.decoder(y, model.encoder(x)), twin(x, y)
    pad = src == 0
    later = ~causal_mask(tgt.shape[1])
    ours = model.decode(tgt, model.encode(src), src)
    theirs = twin(
        x, y, tgt_mask=later, src_key_padding_mask=pad, memory_key_padding_mask=pad
    )
    return ours, theirs


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_equals_torch_in_value_and_gradient(masks, norm_first, bias, positions):
    model = make(
        norm_first=norm_first, attention_bias=bias, positions=positions, num_layers=3
    )
    twin = torch_twin(model)
    src, tgt = ids(3, 9), ids(3, 6, seed=1)
    src[0, 5:] = src[1, 8:] = 0
    ours, theirs = hidden_states(model, twin, src, tgt, masks)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)

    weight = torch.randn(ours.shape) / ours.numel() ** 0.5
    table = model.src_embedding.weight
    (ours * weight).sum().backward(retain_graph=True)
    named = {name: p.grad for name, p in model.named_parameters()}
    grads, at_table = torch_names(stacks(named)), table.grad.clone()
    model.zero_grad()
    (theirs * weight).sum().backward()
    assert set(grads) <= {name for name, _ in twin.named_parameters()}
    for name, p in twin.named_parameters():
        if name in grads:
            torch.testing.assert_close(grads[name], p.grad, atol=1e-5, rtol=0)
    torch.testing.assert_close(at_table, table.grad, atol=1e-5, rtol=0)


def test_every_weight_of_torch_comes_from_ours():
    model = make(attention_bias=True)
    layout, twin = torch_names(stacks(model.state_dict())), torch_twin(model)
    assert set(layout) == set(twin.state_dict())
    outside = 50 * 32  # the shared table
    assert sum(p.numel() for p in twin.parameters()) + outside == sum(
        p.numel() for p in model.parameters()
    )


def test_base_sized_stacks_equal_torch():
    model = make(TransformerConfig.base(100, dropout=0.0)).eval()
    src, tgt = ids(2, 11), ids(2, 7, seed=1)
    src[1, 6:] = 0
    ours, theirs = hidden_states(model, torch_twin(model), src, tgt, masks=True)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("activation", ["relu", "gelu", "swish"])
def test_activations_and_a_bias_of_the_logits(activation):
    """Hidden states as torch's, parameters counted; in chunks or not the same loss."""
    model = make(activation=activation, output_bias=True).eval()
    assert not Transformer(model.config).output.bias.any()  # it begins with zeros
    assert model.config.count_parts()["embeddings"] == model.config.vocab_size * (
        model.config.d_model * (1 if model.config.tie_embeddings else 3) + 1
    )
    src, tgt = torch.randint(4, model.config.vocab_size, (2, 3, 6))
    ours, theirs = hidden_states(model, torch_twin(model), src, tgt, masks=True)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    batch, real = Batch(src, tgt[:, :-1], tgt[:, 1:]), torch.arange(15)
    losses, gradients = [], []
    for chunk in (0, 4):
        model.zero_grad()
        losses.append(BatchLoss(model, chunk)(batch, real, 0.1))
        losses[-1].backward()
        gradients.append(model.output.bias.grad.clone())
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*gradients)
    assert gradients[0].any()


def test_an_unknown_activation_is_named():
    with pytest.raises(ValueError, match="activation='tanh': must be one of"):
        make(activation="tanh")


def test_twin_refuses_heads_that_torch_does_not_have():
    with pytest.raises(ValueError, match="width d_model / num_heads = 8"):
        torch_twin(make(d_k=4, d_v=8))


# --- parameters ---

TABLE_3 = [
    ({}, 65),
    ({"d_k": 16}, 58),
    ({"d_k": 32}, 60),
    ({"num_layers": 2}, 36),
    ({"num_layers": 4}, 50),
    ({"num_layers": 8}, 80),
    ({"d_model": 256, "d_k": 32, "d_v": 32}, 28),
    ({"d_model": 1024, "d_k": 128, "d_v": 128}, 168),
    ({"d_ff": 1024}, 53),
    ({"d_ff": 4096}, 90),
]


def numel(config):
    with torch.device("meta"):
        return sum(p.numel() for p in Transformer(config).parameters())


@pytest.mark.parametrize("vocab_size", [41_004, 41_208])
@pytest.mark.parametrize("changes, printed", TABLE_3)
def test_parameters_of_table_3(vocab_size, changes, printed):
    config = TransformerConfig.base(vocab_size, **changes)
    assert numel(config) == config.num_parameters()
    assert round(config.num_parameters() / 1e6) == printed


def test_no_other_vocabulary_gives_table_3():
    def hits(vocab_size):
        return sum(
            round(TransformerConfig.base(vocab_size, **c).num_parameters() / 1e6) == p
            for c, p in TABLE_3
        )

    assert hits(41_003) == hits(41_209) == 9
    assert hits(37_000) == 0


@pytest.mark.parametrize("vocab_size, printed", [(35_368, 213), (36_344, 213)])
def test_parameters_of_the_big_model(vocab_size, printed):
    config = TransformerConfig.big(vocab_size)
    assert numel(config) == config.num_parameters()
    assert round(config.num_parameters() / 1e6) == printed
    assert (config.d_model, config.num_heads, config.d_ff) == (1024, 16, 4096)
    assert config.dropout == 0.3


@settings(max_examples=25)
@given(
    st.builds(
        TransformerConfig,
        vocab_size=st.integers(1, 50),
        d_model=st.sampled_from([8, 24]),
        num_heads=st.sampled_from([1, 2, 4]),
        num_layers=st.integers(1, 3),
        d_ff=st.integers(1, 40),
        d_k=st.none() | st.integers(1, 9),
        d_v=st.none() | st.integers(1, 9),
        positions=st.sampled_from(["sinusoidal", "learned"]),
        max_length=st.integers(1, 20),
        norm_first=st.booleans(),
        attention_bias=st.booleans(),
        tie_embeddings=st.booleans(),
    )
)
def test_arithmetic_counts_what_is_built(config):
    model = Transformer(config)
    assert config.num_parameters() == sum(p.numel() for p in model.parameters())
    encoder = sum(p.numel() for p in model.encoder.parameters())
    assert config.count_parts()["encoder"] == encoder


# --- tying and the start ---


def test_one_matrix_whose_gradient_comes_from_all_three_ends():
    model = make()
    assert model.src_embedding.weight is model.tgt_embedding.weight
    assert model.output.weight is model.src_embedding.weight
    untied = Transformer(replace(SMALL, tie_embeddings=False))
    untied.load_state_dict(model.state_dict())
    src, tgt, following = ids(2, 7), ids(2, 5, seed=1), ids(2, 5, seed=2)
    for m in (model, untied):
        F.cross_entropy(m(src, tgt).flatten(0, 1), following.flatten()).backward()
    ends = [untied.src_embedding, untied.tgt_embedding, untied.output]
    assert len({id(end.weight) for end in ends}) == 3
    assert all(end.weight.grad.abs().max() > 0 for end in ends)
    total = sum(end.weight.grad for end in ends)
    torch.testing.assert_close(model.output.weight.grad, total, atol=1e-5, rtol=0)


def test_state_dict_survives_a_round_trip():
    model, other = make(), make(seed=1)
    other.load_state_dict(model.state_dict())
    assert other.src_embedding.weight is other.output.weight
    src, tgt = ids(2, 7), ids(2, 5)
    assert torch.equal(model(src, tgt), other(src, tgt))


def test_training_starts_undecided():
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(5000, d_model=128, num_layers=2, dropout=0.0))
    src, tgt, following = (ids(8, 20, seed, 5000) for seed in range(3))
    with torch.no_grad():
        logits = model(src, tgt)
    assert 0.9 < logits.std() < 1.1
    loss = F.cross_entropy(logits.flatten(0, 1), following.flatten())
    assert abs(loss - math.log(5000) - 0.5) < 0.2
    words = model.src_embedding(src) * math.sqrt(128)
    assert 0.9 < words.std() < 1.1


# --- masks ---


@settings(max_examples=25)
@given(st.integers(1, 3), st.integers(1, 7), st.integers(1, 9), st.data())
def test_no_position_sees_a_later_one(batch, source, target, data):
    model = make(norm_first=data.draw(st.booleans()))
    src, tgt = ids(batch, source), ids(batch, target, seed=1)
    t = data.draw(st.integers(0, target - 1))
    changed = tgt.clone()
    changed[:, t] = tgt[:, t] % 49 + 1
    with torch.no_grad():
        before, after = model(src, tgt), model(src, changed)
    assert torch.equal(before[:, :t], after[:, :t])
    assert not torch.equal(before[:, t], after[:, t])


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 8), min_size=2, max_size=4), st.integers(0, 5), st.data()
)
def test_padding_changes_nothing(lengths, extra, data):
    model = make(positions=data.draw(st.sampled_from(["sinusoidal", "learned"])))
    longest = max(lengths) + extra
    src, tgt = torch.zeros(2, len(lengths), longest, dtype=torch.int64)
    for i, length in enumerate(lengths):
        src[i, :length] = ids(1, length, seed=i)
        tgt[i, :length] = ids(1, length, seed=i + 9)
    with torch.no_grad():
        together = model(src, tgt)
        for i, length in enumerate(lengths):
            alone = model(src[i : i + 1, :length], tgt[i : i + 1, :length])
            torch.testing.assert_close(
                together[i, :length], alone[0], atol=1e-5, rtol=0
            )


def test_a_source_of_padding_alone_gives_numbers():
    src = torch.zeros(1, 4, dtype=torch.int64)
    assert make()(src, ids(1, 3)).isfinite().all()


# --- errors ---


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"d_model": 30}, "d_model=30 cannot be split into num_heads=4"),
        ({"d_model": 30, "d_k": 8}, "cannot be split"),
        ({"num_heads": 0}, "num_heads=0: must be a whole number, at least 1"),
        ({"d_ff": 2.5}, "d_ff=2.5: must be a whole number"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"d_k": 0}, "d_k=0"),
        ({"max_length": 0}, "max_length=0"),
        ({"dropout": 1.0}, "dropout=1.0: .*below 1"),
        ({"attention_dropout": -0.1}, "attention_dropout=-0.1"),
        ({"positions": "rotary"}, "must be 'sinusoidal' or 'learned'"),
        ({"d_model": 33, "num_heads": 3}, "d_model=33: sinusoidal"),
    ],
)
def test_config_says_what_is_wrong(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **changes)


def test_odd_widths_are_fine_with_learned_positions():
    config = replace(SMALL, d_model=33, num_heads=3, positions="learned")
    assert make(config)(ids(1, 4), ids(1, 3)).shape == (1, 3, 50)


@pytest.mark.parametrize(
    "src, tgt, message",
    [
        (
            ids(1, 4).float(),
            ids(1, 3),
            "src_ids have shape .* torch.float32; give int64",
        ),
        (ids(1, 4).int(), ids(1, 3), "torch.int32; give int64"),
        (ids(1, 4)[0], ids(1, 3), r"src_ids have shape \(4,\)"),
        (ids(1, 4), ids(1, 3)[0], r"tgt_ids have shape \(3,\)"),
        (ids(1, 4) + 49, ids(1, 3), "src_ids run from .* vocabulary has ids 0 to 49"),
        (ids(1, 4), ids(1, 3) - 50, "tgt_ids run from -"),
        (ids(2, 4), ids(1, 3), "src_ids hold 2 sentences and tgt_ids 1"),
    ],
)
def test_model_says_what_is_wrong_with_ids(src, tgt, message):
    with pytest.raises(ValueError, match=message):
        make()(src, tgt)


def test_memory_of_another_source_is_refused():
    model = make()
    with pytest.raises(ValueError, match="of the same src_ids"):
        model.decode(ids(1, 3), model.encode(ids(1, 4)), ids(1, 5))


def test_longer_than_learned_positions():
    model = make(positions="learned", max_length=6)
    model(ids(1, 6), ids(1, 6))
    for source, target in [(7, 3), (3, 7)]:
        with pytest.raises(ValueError, match="7 positions, but max_length is 6"):
            model(ids(1, source), ids(1, target))


def checks_of(model, *inputs):
    """How many guards of the library run in a forward pass."""
    ran = []

    def watch(frame, event, _):
        code = frame.f_code
        guard = code.co_name.startswith(("_check", "require_"))
        if event == "call" and guard and "transformer_lib" in code.co_filename:
            ran.append(code.co_name)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        model(*inputs)
    finally:
        sys.setprofile(before)
    return len(ran)


def test_guards_stand_at_the_door_and_not_in_each_layer():
    counts = [checks_of(make(num_layers=n), ids(2, 4), ids(2, 3)) for n in (1, 5)]
    assert 0 < counts[0] == counts[1] <= 6


@pytest.mark.parametrize(
    "mask", [torch.ones(4, 4), torch.ones(2, 4, 4).bool(), [[True]]]
)
def test_a_mask_that_is_none_is_refused_at_the_door(mask):
    model, src = make(), ids(2, 4)
    memory = model.encode(src)
    for call in (
        lambda: model.encode(src, mask),
        lambda: model.decode(src, memory, src, self_mask=mask),
        lambda: model.decode(src, memory, src, memory_mask=mask),
    ):
        with pytest.raises(ValueError, match="a mask of type .* boolean tensor"):
            call()


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_an_exported_program_takes_other_batches_and_lengths(positions):
    model = make(positions=positions, max_length=40).eval()
    names = ("batch", "source", "target")
    batch, *lengths = (torch.export.Dim(name, max=40) for name in names)
    shapes = [{0: batch, 1: length} for length in lengths]
    with torch.no_grad():
        program = torch.export.export(
            model, (ids(3, 7), ids(3, 5)), dynamic_shapes=shapes
        ).module()
        for size, source, target in ((2, 4, 9), (5, 9, 4), (4, 30, 31)):
            src, tgt = ids(size, source), ids(size, target)
            src[0, 2:] = 0
            found, wanted = program(src, tgt), model(src, tgt)
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_masks_and_places_that_are_given_are_those_of_the_default(positions):
    model = make(positions=positions).eval()
    src, tgt = torch.randint(1, 50, (2, 5)), torch.randint(1, 50, (2, 4))
    src[0, 3:] = 0
    real = padding_mask(src, 0)
    memory = model.encode(src, real, torch.arange(5).expand(2, -1))
    assert torch.equal(memory, model.encode(src))
    given = causal_mask(4), real, torch.arange(4).expand(2, -1)
    assert torch.equal(
        model.decode(tgt, memory, src, *given), model.decode(tgt, memory, src)
    )
    other = model.decode(
        tgt, memory, src, position_ids=torch.arange(3, 7).expand(2, -1)
    )
    assert torch.equal(other, model.decode(tgt, memory, src, position_ids=3))
    assert not torch.allclose(other, model.decode(tgt, memory, src))


def test_check_ids_lets_an_empty_batch_pass():
    require_ids(torch.zeros(0, 4, dtype=torch.int64), 5)


# --- importing ---


def python(code):
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return run.stdout


def test_import_is_lazy():
    """The library itself loads nothing but itself, and its model torch alone."""
    loaded = python(
        "import sys; before = set(sys.modules); "
        "import transformer_lib; print(*set(sys.modules) - before)"
    ).split()
    foreign = {name.split(".")[0] for name in loaded} - sys.stdlib_module_names
    assert foreign == {"transformer_lib"}
    loaded = python(
        "import sys, torch; before = set(sys.modules); "
        "import transformer_lib.transformer; print(*set(sys.modules) - before)"
    ).split()
    foreign = {name.split(".")[0] for name in loaded} - sys.stdlib_module_names
    assert foreign <= {"transformer_lib", "numpy"}  # nothing heavy beyond torch


def test_names_are_found_on_first_use():
    import transformer_lib

    assert transformer_lib.Transformer is Transformer
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        transformer_lib.nonsense  # noqa: B018


# --- the exercises name the mistakes ---


def right_count(V, d, N, f):
    return TransformerConfig(V, d_model=d, num_layers=N, d_ff=f).num_parameters()


@pytest.mark.parametrize(
    "wrong, phrase",
    [
        (lambda V, d, N, f: right_count(V, d, N, f) - 2 * N * (f + d), "biases of the"),
        (lambda V, d, N, f: right_count(V, d, N, f) - 10 * N * d, "LayerNorms are"),
        (lambda V, d, N, f: right_count(V, d, N, f) + 2 * V * d, "three times"),
        (lambda V, d, N, f: right_count(V, d, N, f) + 12 * N * d, "has no biases"),
        (lambda V, d, N, f: right_count(V, d, N, f) - 4 * N * d * d, "to the memory"),
        (
            lambda V, d, N, f: right_count(V, d, N, f) - 2 * N * (f + d) + 2 * V * d,
            "networks are missing; the embedding is counted three times",
        ),
        (lambda V, d, N, f: right_count(V, d, N, f) + 1, "1 too high"),
        (lambda V, d, N, f: None, "returned None"),
    ],
)
def test_check_count(wrong, phrase):
    verdict = exercises.check_count(wrong)
    assert not verdict.passed
    assert phrase in verdict.message


def root(table):
    return math.sqrt(table.shape[1])


@pytest.mark.parametrize(
    "wrong, phrase",
    [
        (lambda i, t, p: t[i] + p[: i.shape[1]], "factor sqrt(d_model) is missing"),
        (lambda i, t, p: t[i] * root(t), "positions are forgotten"),
        (lambda i, t, p: t[i], "both forgotten"),
        (lambda i, t, p: (t[i] + p[: i.shape[1]]) * root(t), "got the factor too"),
        (lambda i, t, p: t[i] / root(t) + p[: i.shape[1]], "divided"),
        (lambda i, t, p: t[i] * root(t) + p[: len(i), None], "along the batch"),
        (lambda i, t, p: t[i] * t.shape[1] + p[: i.shape[1]], "its square root"),
        (lambda i, t, p: t[i] * len(t) ** 0.5 + p[: i.shape[1]], "of the vocabulary"),
        (lambda i, t, p: t[i][0], "has shape (5, 16)"),
    ],
)
def test_check_embed(wrong, phrase):
    verdict = exercises.check_embed(wrong)
    assert not verdict.passed
    assert phrase in verdict.message


def right_masks(src, tgt, pad):
    source = (src != pad)[:, None, None, :]
    return source, causal_mask(tgt.shape[1]), source


def with_mask(place, make_mask):
    def wrong(src, tgt, pad):
        three = list(right_masks(src, tgt, pad))
        three[place] = make_mask(src, tgt, pad)
        return tuple(three)

    return wrong


@pytest.mark.parametrize(
    "place, make_mask, phrase",
    [
        (0, lambda s, t, p: torch.ones(4, 4, dtype=bool), "padding is not masked"),
        (0, lambda s, t, p: (s == p)[:, None, None], "upside down"),
        (0, lambda s, t, p: (s != p)[:, None, None].float(), "boolean"),
        (0, lambda s, t, p: (s != p)[:, :, None, None, None], "does not broadcast"),
        (1, lambda s, t, p: torch.ones(4, 4, dtype=bool), "causal mask is missing"),
        (
            1,
            lambda s, t, p: (t != p)[:, None, None],
            "hides padding but not the future",
        ),
        (1, lambda s, t, p: torch.ones(4, 4, dtype=bool).tril(-1), "keep the diagonal"),
        (1, lambda s, t, p: torch.ones(4, 4, dtype=bool).triu(), "turned round"),
        (2, lambda s, t, p: torch.ones(4, 4, dtype=bool), "padding is not masked"),
        (2, lambda s, t, p: (t != p)[:, None, None], "of the target's padding"),
        (2, lambda s, t, p: causal_mask(4), "got the causal mask"),
    ],
)
def test_check_masks(place, make_mask, phrase):
    verdict = exercises.check_masks(with_mask(place, make_mask))
    assert not verdict.passed
    assert phrase in verdict.message


def test_check_masks_accepts_a_target_mask_that_hides_padding_too():
    both = with_mask(1, lambda s, t, p: (t != p)[:, None, None] & causal_mask(4))
    assert exercises.check_masks(both).passed


def copies(model):
    model.tgt_embedding.weight.data.copy_(model.src_embedding.weight.data)
    model.output.weight.data.copy_(model.src_embedding.weight.data)
    return model


def ties_output_only(model):
    model.output.weight = model.src_embedding.weight
    return model


def ties_the_other_way(model):
    model.src_embedding.weight = model.tgt_embedding.weight = model.output.weight
    return model


@pytest.mark.parametrize(
    "wrong, phrase",
    [
        (copies, "another matrix"),
        (ties_output_only, "tgt_embedding.weight is still untied"),
        (ties_the_other_way, "was replaced"),
        (lambda model: 5, "Return the model"),
    ],
)
def test_check_tie(wrong, phrase):
    verdict = exercises.check_tie(wrong)
    assert not verdict.passed
    assert phrase in verdict.message
