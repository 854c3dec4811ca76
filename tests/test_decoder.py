"""Chapter 06: masks and decoder against torch's own, and nobody looks ahead."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import by_formula, shaken
from torch import nn

from transformer_lib.decoder import (
    Decoder,
    DecoderLayer,
    causal_mask,
    padding_mask,
)
from transformer_lib.encoder import Encoder, torch_names
from transformer_lib.exercises.decoder import (
    WIRING,
    check_causal_mask,
    check_decoder_layer,
    check_padding_mask,
    check_shift_right,
    check_target_mask,
    wired,
)

FEW = settings(max_examples=25)
D, H, FF = 16, 4, 24
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def assert_same_as_torch(ours, theirs, masks, theirs_masks, B=3, T=5, S=7):
    theirs.load_state_dict(torch_names(ours.state_dict()))  # strict: nothing left over
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B, T, D, generator=generator)
    memory = torch.randn(B, S, D, generator=generator)
    upstream = torch.randn(B, T, D, generator=generator)
    a, b = ([z.clone().requires_grad_() for z in (x, memory)] for _ in range(2))
    out, expected = ours(*a, **masks), theirs(*b, **theirs_masks)
    out.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(out, expected, **CLOSE)
    for z, copy in zip(a, b, strict=True):
        torch.testing.assert_close(z.grad, copy.grad, **CLOSE)
    got = torch_names({n: p.grad for n, p in ours.named_parameters()})
    wanted = {n: p.grad for n, p in theirs.named_parameters()}
    assert got.keys() == wanted.keys()
    for name in wanted:  # sums over all positions: rounding grows with their size
        scale = wanted[name].abs().max().clamp(min=1)
        torch.testing.assert_close(got[name] / scale, wanted[name] / scale, **CLOSE)


def masks_of(kind, T=5, S=7):
    """Our masks and torch's, which are True where attention is forbidden."""
    target = torch.arange(T) < torch.tensor([[T], [3], [1]])
    source = torch.arange(S) < torch.tensor([[S], [4], [1]])
    ours, theirs = {}, {}
    if "causal" in kind:
        ours["self_mask"] = causal_mask(T)
        theirs["tgt_mask"] = nn.Transformer.generate_square_subsequent_mask(T) != 0
    if "memory" in kind:
        ours["memory_mask"] = source[:, None, None, :]
        theirs["memory_key_padding_mask"] = ~source
    if "target" in kind:
        ours["self_mask"] = causal_mask(T) & target[:, None, None, :]
        theirs["tgt_key_padding_mask"] = ~target
    return ours, theirs


@pytest.mark.parametrize("kind", ["none", "causal", "causal memory target"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("num_layers", [None, 3])
@pytest.mark.parametrize("path", [shaken, lambda module: by_formula(shaken(module))])
def test_equals_torch_in_value_and_gradient(path, num_layers, norm_first, kind):
    options = {"dropout": 0.0, "norm_first": norm_first}
    theirs = nn.TransformerDecoderLayer(D, H, FF, batch_first=True, **options)
    if num_layers is None:
        ours = DecoderLayer(D, H, FF, bias=True, **options)
    else:
        ours = Decoder(num_layers, D, H, FF, bias=True, **options)
        last = nn.LayerNorm(D) if norm_first else None
        theirs = nn.TransformerDecoder(theirs, num_layers, last)
    assert_same_as_torch(path(ours), theirs, *masks_of(kind))


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_layer_whose_keys_and_values_are_kept_is_the_layer(norm_first):
    """As a cache looks: equal to the last bit, in value and gradient."""
    layer = DecoderLayer(D, H, FF, dropout=0.0, norm_first=norm_first)
    x, memory, upstream = (torch.randn(3, n, D) for n in (5, 7, 5))
    look, across = layer.self_attention, layer.cross_attention
    source = across.keys_values(memory, memory)

    def look_back(y):
        return look.attend(y, *look.keys_values(y, y), causal_mask(5))[0]

    outs = (
        layer(x, memory, causal_mask(5)),
        layer.sublayers(x, look_back, lambda y: across.attend(y, *source)[0]),
    )
    grads = [torch.autograd.grad(out, layer.parameters(), upstream) for out in outs]
    assert torch.equal(*outs)
    assert all(map(torch.equal, *grads))


def test_causal_mask_is_torchs():
    for length in range(1, 9):
        theirs = nn.Transformer.generate_square_subsequent_mask(length)
        assert causal_mask(length).equal(theirs == 0)
    assert causal_mask(0).shape == (0, 0)


def test_padding_mask_is_read_off_the_ids():
    ids = torch.tensor([[3, 1, 1], [3, 0, 4]])
    mask = padding_mask(ids, 1)
    assert mask.shape == (2, 1, 1, 3) and mask.dtype == torch.bool
    assert mask[:, 0, 0].tolist() == [[True, False, False], [True, True, True]]


SHAPES = {
    "batch": st.integers(1, 3),
    "length": st.integers(1, 8),
    "source": st.integers(1, 6),
    "layers": st.integers(1, 3),
    "heads": st.sampled_from([1, 2, 4]),
    "norm_first": st.booleans(),
    "seed": st.integers(0, 1000),
}


def drawn(batch, length, source, layers, heads, norm_first, seed):
    torch.manual_seed(seed)
    decoder = Decoder(layers, 8, heads, 12, norm_first=norm_first).eval()
    return (
        shaken(decoder, seed),
        torch.randn(batch, length, 8),
        torch.randn(batch, source, 8),
    )


@FEW
@given(at=st.integers(0, 7), **SHAPES)
def test_no_position_sees_a_later_one(at, **shapes):
    decoder, x, memory = drawn(**shapes)
    length, mask = x.shape[1], causal_mask(x.shape[1])
    t = at % length
    changed = x.clone()
    changed[:, t:] = torch.randn(x[:, t:].shape)
    before, after = decoder(x, memory, mask), decoder(changed, memory, mask)
    assert before[:, :t].equal(after[:, :t])
    assert not torch.allclose(before[:, t], after[:, t])


@FEW
@given(at=st.integers(0, 7), **SHAPES)
def test_no_gradient_comes_from_a_later_position(at, **shapes):
    decoder, x, memory = drawn(**shapes)
    t = at % x.shape[1]
    x.requires_grad_()
    # Not sum(): after a LayerNorm the sum of a position hardly depends on anything.
    decoder(x, memory, causal_mask(x.shape[1]))[:, t].square().sum().backward()
    assert (x.grad[:, t + 1 :] == 0).all()


@FEW
@given(**SHAPES)
def test_one_parallel_pass_equals_step_by_step(**shapes):
    decoder, x, memory = drawn(**shapes)
    parallel = decoder(x, memory, causal_mask(x.shape[1]))
    for t in range(1, x.shape[1] + 1):
        step = decoder(x[:, :t], memory, causal_mask(t))
        torch.testing.assert_close(step[:, -1], parallel[:, t - 1], **CLOSE)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_reading_the_beginning_again_needs_the_mask(num_layers):
    """Of one layer the newest position is the same without it, of two it is not."""
    decoder = shaken(Decoder(num_layers, D, H, FF).eval())
    x, memory = torch.randn(2, 6, D), torch.randn(2, 4, D)
    with torch.no_grad():
        gap = decoder(x, memory) - decoder(x, memory, causal_mask(6))  # (B, T, D)
    assert (gap[:, -1].abs().max() > 1e-3) == (num_layers == 2)


@FEW
@given(padding=st.integers(1, 4), more=st.integers(0, 3), **SHAPES)
def test_padding_changes_nothing(padding, more, **shapes):
    """Alone, and as the first of a batch with a longer source and target."""
    decoder, *_ = drawn(**shapes)
    length, source = shapes["length"], shapes["source"]
    encoder = shaken(Encoder(2, 8, shapes["heads"], 12)).eval()
    embedding = nn.Embedding(9, 8)

    def run(src, tgt):
        mask = padding_mask(src, 0)
        memory = encoder(embedding(src), mask)
        return decoder(embedding(tgt), memory, causal_mask(tgt.shape[1]), mask)

    src, tgt = torch.randint(1, 9, (1, source)), torch.randint(1, 9, (1, length))
    pad = nn.functional.pad
    src_batch = torch.cat(
        [pad(src, (0, padding)), torch.randint(1, 9, (1, source + padding))]
    )
    tgt_batch = torch.cat(
        [pad(tgt, (0, more)), torch.randint(1, 9, (1, length + more))]
    )
    alone, in_batch = run(src, tgt)[0], run(src_batch, tgt_batch)[0, :length]
    torch.testing.assert_close(in_batch, alone, **CLOSE)


def test_a_mask_off_by_one_leaks_one_place_a_layer():
    torch.manual_seed(0)
    for layers in (1, 2, 3):
        decoder, x = Decoder(layers, 8, 2, 12).eval(), torch.randn(1, 8, 8)
        leak = torch.ones(8, 8, dtype=torch.bool).tril(1)
        changed = x.clone()
        changed[:, 7] += torch.randn(8)
        memory = torch.randn(1, 3, 8)
        moved = (decoder(x, memory, leak) != decoder(changed, memory, leak)).any(-1)[0]
        assert moved.tolist() == [t >= 7 - layers for t in range(8)]


def test_the_order_of_the_memory_does_not_matter():
    torch.manual_seed(0)
    decoder, x, memory = Decoder(2, 8, 2, 12).eval(), *torch.randn(2, 2, 5, 8)
    order = torch.randperm(5)
    torch.testing.assert_close(decoder(x, memory[:, order]), decoder(x, memory))


def test_rows_with_nothing_to_look_at_stay_finite():
    torch.manual_seed(0)
    decoder = Decoder(2, 8, 2, 12)
    ids = torch.tensor([[0, 0, 5, 6]])  # padding on the left
    mask = causal_mask(4) & padding_mask(ids, 0)
    x, memory = torch.randn(1, 4, 8, requires_grad=True), torch.randn(1, 3, 8)
    out = decoder(x, memory, mask)
    out.sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()


def test_the_names_of_the_weights_stay():
    """Checkpoints depend on them."""
    names = {name for name, _ in Decoder(1, D, H, FF).named_parameters()}
    assert names == {
        *(
            f"layers.0.{which}_attention.w_{c}.weight"
            for which in ("self", "cross")
            for c in "qkvo"
        ),
        *(f"layers.0.feed_forward.w_{n}.{p}" for n in "12" for p in ("weight", "bias")),
        *(f"layers.0.residual_{n}.norm.{p}" for n in "123" for p in ("weight", "bias")),
    }


def decode(x=(2, 3, D), memory=(2, 4, D), self_mask=None, memory_mask=None):
    decoder = Decoder(1, D, H, FF)
    return decoder(torch.zeros(x), torch.zeros(memory), self_mask, memory_mask)


def test_a_width_that_heads_cannot_share_is_refused():
    with pytest.raises(ValueError, match="d_model=10"):
        DecoderLayer(10, 3, 8)


@pytest.mark.parametrize(
    "sizes",
    [
        {"x": (2, 3, 5)},
        {"memory": (2, 4, 5)},
        {"memory": (3, 4, D)},
        {"self_mask": causal_mask(4)},
        {"memory_mask": causal_mask(3)},
    ],
)
def test_what_does_not_fit_is_not_computed(sizes):
    """Shapes are torch's business: an error, and no result."""
    with pytest.raises(RuntimeError):
        decode(**sizes)


# --- the exercises name the typical mistakes ------------------------------------------


def ones(length):
    return torch.ones(length, length, dtype=torch.bool)


CAUSAL = {
    "upper triangle": lambda n: ones(n).triu(),
    "inverted": lambda n: ones(n).triu(1),
    "diagonal is excluded": lambda n: ones(n).tril(-1),
    "off by one": lambda n: ones(n).tril(1),
    "allows everything": ones,
    "torch.float32": lambda n: ones(n).tril().float(),
    "shape (1, 5, 5)": lambda n: ones(n).tril()[None],
    "entries are not": lambda n: ~ones(n),
}


@pytest.mark.parametrize("phrase", CAUSAL)
def test_check_causal_mask_names_the_mistake(phrase):
    verdict = check_causal_mask(CAUSAL[phrase])
    assert not verdict.passed and phrase in verdict.message


PADDING = {
    "inverted": lambda ids, pad: (ids == pad)[:, None, None, :],
    "use the pad_id": lambda ids, pad: (ids != 0)[:, None, None, :],
    "B would be taken for the queries": lambda ids, pad: ids != pad,
    "B would be taken for the heads": lambda ids, pad: (ids != pad)[:, None, :],
    "not padded keys": lambda ids, pad: (ids != pad)[:, None, :, None],
    "B must come first": lambda ids, pad: (ids != pad)[None, None],
    "torch.int64": lambda ids, pad: (ids != pad).long()[:, None, None, :],
}


@pytest.mark.parametrize("phrase", PADDING)
def test_check_padding_mask_names_the_mistake(phrase):
    verdict = check_padding_mask(PADDING[phrase])
    assert not verdict.passed and phrase in verdict.message


def causal_of(ids):
    return causal_mask(ids.shape[1])


TARGET = {
    "with or (|)": lambda ids, pad: causal_of(ids) | padding_mask(ids, pad),
    "padding mask is missing": lambda ids, pad: causal_of(ids),
    "causal mask is missing": padding_mask,
    "lies on the queries": lambda ids, pad: (
        causal_of(ids) & padding_mask(ids, pad).transpose(-1, -2)
    ),
    "upside down": lambda ids, pad: causal_of(ids).T & padding_mask(ids, pad),
    "inverted": lambda ids, pad: ~(causal_of(ids) & padding_mask(ids, pad)),
    "axis for the heads": lambda ids, pad: (causal_of(ids) & padding_mask(ids, pad))[
        :, 0
    ],
}


@pytest.mark.parametrize("phrase", TARGET)
def test_check_target_mask_names_the_mistake(phrase):
    verdict = check_target_mask(TARGET[phrase])
    assert not verdict.passed and phrase in verdict.message


def start(ids, bos):
    return torch.full_like(ids[:, :1], bos)


def overwrites(ids, bos):
    ids[:, 1:] = ids[:, :-1].clone()
    ids[:, 0] = bos
    return ids


SHIFTS = {
    "wrapped round": lambda ids, bos: ids.roll(1, 1),
    "shifted left": lambda ids, bos: torch.cat([ids[:, 1:], start(ids, bos)], 1),
    "at the end": lambda ids, bos: torch.cat([ids[:, :-1], start(ids, bos)], 1),
    "overwritten": lambda ids, bos: torch.cat([start(ids, bos), ids[:, 1:]], 1),
    "length stays T": lambda ids, bos: torch.cat([start(ids, bos), ids], 1),
    "word it has to predict": lambda ids, bos: ids.clone(),
    "start symbol is missing": lambda ids, bos: ids[:, :-1],
    "changes its argument": overwrites,
}


@pytest.mark.parametrize("phrase", SHIFTS)
def test_check_shift_right_names_the_mistake(phrase):
    verdict = check_shift_right(SHIFTS[phrase])
    assert not verdict.passed and phrase in verdict.message


@pytest.mark.parametrize("mistake", WIRING)
def test_check_decoder_layer_names_the_mistake(mistake):
    def answer(x, memory, layer, self_mask, memory_mask):
        return wired(layer, x, memory, self_mask, memory_mask, mistake)

    verdict = check_decoder_layer(answer)
    assert not verdict.passed and verdict.message == WIRING[mistake]


LAYERS = {
    "does not use self_mask": lambda x, m, lay, a, b: lay(x, m, None, b),
    "does not use memory_mask": lambda x, m, lay, a, b: lay(x, m, a, None),
    "No mask is used": lambda x, m, lay, a, b: lay(x, m),
    "masks are swapped": lambda x, m, lay, a, b: lay(x, m, b, a),
    "on the cross-attention too": lambda x, m, lay, a, b: lay(x, m, a, a & b),
}


@pytest.mark.parametrize("phrase", LAYERS)
def test_check_decoder_layer_names_the_wrong_mask(phrase):
    verdict = check_decoder_layer(LAYERS[phrase])
    assert not verdict.passed and phrase in verdict.message
