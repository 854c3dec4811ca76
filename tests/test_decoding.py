"""Chapter 12: greedy decoding against a plain loop, limits, company, mistakes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_lib.decoding import greedy_decode, output_limits
from transformer_lib.exercises.decoding import (
    check_cut,
    check_log_probability,
    check_temperature,
)
from transformer_lib.text import BOS, EOS, PAD
from transformer_lib.transformer import Transformer, TransformerConfig

VOCABULARY = 30


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    config = TransformerConfig(VOCABULARY, 32, num_heads=4, num_layers=2, d_ff=64)
    model = Transformer(config)
    with torch.no_grad():  # sharper than at the start, so that rows end at all lengths
        model.output.weight.mul_(3)
    return model


def plainly(model, row, max_extra):
    """The definition: one sentence, the whole model at each step."""
    src_ids, out = torch.tensor([row]), []
    model.eval()
    while len(out) < len(row) - 1 + max_extra:
        best = int(model(src_ids, torch.tensor([[BOS, *out]]))[0, -1].argmax())
        if best == EOS:
            break
        out.append(best)
    return [i for i in out if i != PAD]


rows = st.lists(st.integers(4, VOCABULARY - 1), min_size=0, max_size=7)


@settings(max_examples=20, deadline=None)
@given(st.lists(rows, min_size=1, max_size=4), st.integers(0, 8))
def test_batch_equals_plain_loop(model, sentences, max_extra):
    sources = [row + [EOS] for row in sentences]
    width = max(map(len, sources))
    src_ids = torch.tensor([row + [PAD] * (width - len(row)) for row in sources])
    got = greedy_decode(model, src_ids, max_extra)
    assert got == [plainly(model, row, max_extra) for row in sources]
    for row, ids in zip(sources, got, strict=True):
        assert len(ids) <= len(row) - 1 + max_extra
        assert not {EOS, PAD} & set(ids)


def test_model_is_left_as_it_was(model):
    model.train()
    greedy_decode(model, torch.tensor([[5, EOS]]))
    assert model.training


def test_dropout_is_off(model):
    model.train()
    src_ids = torch.tensor([[5, 6, 7, EOS]])
    assert greedy_decode(model, src_ids) == greedy_decode(model, src_ids)


def test_limits():
    ids = torch.tensor([[5, 6, EOS], [5, EOS, PAD]])
    assert output_limits(ids, 50).tolist() == [52, 51]
    with pytest.raises(ValueError, match="max_extra=-1"):
        output_limits(ids, -1)
    with pytest.raises(ValueError, match="source 1 has no tokens"):
        output_limits(torch.tensor([[5, EOS], [PAD, PAD]]), 50)


@pytest.mark.parametrize(
    "check, wrong, telling",
    [
        (check_cut, lambda ids: [i for i in ids if i != 3], "removed the end symbols"),
        (check_cut, lambda ids: ids[: ids.index(3) + 1], "kept the end symbol"),
        (check_cut, lambda ids: ids[: len(ids) - 1], "last end symbol"),
        (
            check_log_probability,
            lambda logits, target: logits.gather(-1, target[:, None]).sum(),
            "added the logits",
        ),
        (
            check_log_probability,
            lambda logits, y: logits.log_softmax(0).gather(-1, y[:, None]).sum(),
            "over the positions",
        ),
        (
            check_log_probability,
            lambda logits, y: logits.log_softmax(-1).gather(-1, y[:, None]).mean(),
            "the mean",
        ),
        (
            check_log_probability,
            lambda logits, y: logits.softmax(-1).gather(-1, y[:, None]).prod(),
            "gave the probability",
        ),
        (check_temperature, lambda x, t: x.softmax(-1) / t, "before the softmax"),
        (check_temperature, lambda x, t: (x * t).softmax(-1), "multiplied"),
        (check_temperature, lambda x, t: x.softmax(-1), "changed nothing"),
    ],
)
def test_mistakes_are_named(check, wrong, telling):
    verdict = check(wrong)
    assert not verdict.passed
    assert telling in verdict.message
