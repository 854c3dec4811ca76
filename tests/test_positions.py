"""Chapter 04: the table, its rotation, the two modules, and the exercises' checks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from transformer_lib.exercises import positions as checks
from transformer_lib.multihead import MultiHeadAttention
from transformer_lib.positions import (
    LearnedPositions,
    SinusoidalPositions,
    frequencies,
    position_rotation,
    sinusoidal_positions,
)

widths = st.integers(1, 40).map(lambda half: 2 * half)
few = settings(max_examples=25)


# --- the table ------------------------------------------------------------------------


@few
@given(length=st.integers(0, 40), d_model=widths)
def test_table_equals_the_formula_in_pure_python(length, d_model):
    table = sinusoidal_positions(length, d_model)
    assert table.shape == (length, d_model) and table.dtype == torch.float32
    for pos in range(length):
        for i in range(d_model // 2):
            angle = pos / 10000 ** (2 * i / d_model)
            assert table[pos, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            cosine = table[pos, 2 * i + 1].item()
            assert cosine == pytest.approx(math.cos(angle), abs=1e-6)


@few
@given(d_model=widths)
def test_table_equals_torchs_complex_numbers(d_model):
    angle = torch.arange(100)[:, None] * frequencies(d_model)
    turning = torch.polar(torch.ones_like(angle), angle)
    oracle = torch.view_as_real(turning).flip(-1).flatten(-2).float()
    torch.testing.assert_close(
        sinusoidal_positions(100, d_model), oracle, atol=1e-6, rtol=0
    )


def test_table_is_exact_at_large_positions():
    """Python's math in double precision, where float32 angles would be off by 1e-2."""
    row = sinusoidal_positions(1_000_001, 16)[-1]
    for i in range(8):
        angle = 1_000_000 / 10000 ** (2 * i / 16)
        assert row[2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
        assert row[2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_wavelengths_are_geometric_from_two_pi():
    wavelength = 2 * math.pi / frequencies(512)
    assert wavelength[0] == pytest.approx(2 * math.pi)
    ratio = wavelength[1:] / wavelength[:-1]
    torch.testing.assert_close(ratio, torch.full_like(ratio, 10000 ** (2 / 512)))
    assert 9000 * 2 * math.pi < wavelength[-1] < 10000 * 2 * math.pi


@few
@given(k=st.integers(-60, 60), d_model=widths)
def test_rotation_carries_each_position_on_by_k(k, d_model):
    table = sinusoidal_positions(300, d_model)
    rotation = position_rotation(k, d_model)
    moved = table[60:240].double() @ rotation.T
    torch.testing.assert_close(
        moved.float(), table[60 + k : 240 + k], atol=1e-6, rtol=0
    )
    eye = torch.eye(d_model, dtype=torch.float64)
    torch.testing.assert_close(rotation @ rotation.T, eye)
    assert rotation.logdet().item() == pytest.approx(0, abs=1e-9)


@few
@given(k=st.integers(0, 50), d_model=widths)
def test_dot_product_depends_on_the_distance_alone(k, d_model):
    table = sinusoidal_positions(100, d_model).double()
    products = torch.diagonal(table @ table.T, k)
    assert (products - products[0]).abs().max() < 1e-5


# --- attention without positions ------------------------------------------------------


@few
@given(seed=st.integers(0, 10_000), length=st.integers(1, 12))
def test_attention_alone_cannot_see_order(seed, length):
    torch.manual_seed(seed)
    attention = MultiHeadAttention(8, 2)
    x, shuffle = torch.randn(2, length, 8), torch.randperm(length)
    y = x[:, shuffle]
    torch.testing.assert_close(
        attention(y, y, y)[0], attention(x, x, x)[0][:, shuffle], atol=1e-5, rtol=1e-5
    )


def test_attention_with_positions_sees_order():
    torch.manual_seed(0)
    attention, table = MultiHeadAttention(8, 2), sinusoidal_positions(6, 8)
    x = torch.randn(1, 6, 8)
    y = x.flip(1) + table
    x = x + table
    gap = attention(y, y, y)[0] - attention(x, x, x)[0].flip(1)
    assert gap.abs().max() > 0.01


# --- modules --------------------------------------------------------------------------


def test_sinusoidal_module_grows_and_starts_anywhere():
    module, table = SinusoidalPositions(16), sinusoidal_positions(3000, 16)
    assert torch.equal(module(10), table[:10])
    assert torch.equal(module(2000), table[:2000])
    assert torch.equal(module(7, start=2900), table[2900:2907])
    assert module(0).shape == (0, 16)


def test_sinusoidal_module_has_nothing_to_train_or_save():
    module = SinusoidalPositions(16)
    assert not list(module.parameters()) and not module.state_dict()


def test_sinusoidal_module_keeps_its_type_when_it_grows():
    module = SinusoidalPositions(16).to(torch.bfloat16)
    rows = module(1000)
    assert rows.dtype == torch.bfloat16
    assert torch.equal(rows, sinusoidal_positions(1000, 16).to(torch.bfloat16))
    assert len(rows.unique(dim=0)) > 900  # positions were never in bfloat16 themselves


def test_learned_positions_equal_an_embedding_in_value_and_gradient():
    torch.manual_seed(0)
    learned, oracle = LearnedPositions(12, 8), nn.Embedding(12, 8)
    with torch.no_grad():
        oracle.weight.copy_(learned.table)
    weight = torch.randn(5, 8)
    ours, theirs = learned(5, start=3), oracle(torch.arange(3, 8))
    assert torch.equal(ours, theirs)
    (ours * weight).sum().backward()
    (theirs * weight).sum().backward()
    torch.testing.assert_close(learned.table.grad, oracle.weight.grad)


# --- errors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: sinusoidal_positions(4, 7), "d_model=7"),
        (lambda: sinusoidal_positions(4, 0), "d_model=0"),
        (lambda: sinusoidal_positions(-1, 8), "length=-1"),
        (lambda: position_rotation(1, 5), "d_model=5"),
        (lambda: SinusoidalPositions(9), "d_model=9"),
        (lambda: LearnedPositions(10, 8)(11), "11 positions.*max_length is 10"),
        (
            lambda: LearnedPositions(10, 8)(1, start=10),
            "11 positions.*max_length is 10",
        ),
    ],
)
def test_wrong_arguments_are_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()


# --- the exercises name the mistake ---------------------------------------------------


def table_with(exponent, even_sine=lambda pos, j: j % 2 == 0, first=0):
    def positions(length, d_model):
        return [
            [
                (math.sin if even_sine(pos, j) else math.cos)(
                    pos / 10000 ** exponent(j, d_model)
                )
                for j in range(d_model)
            ]
            for pos in range(first, length + first)
        ]

    return positions


def pair(j, d):
    return (j - j % 2) / d


def in_halves(length, d_model):
    table = sinusoidal_positions(length, d_model)
    return torch.cat([table[:, 0::2], table[:, 1::2]], -1)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (table_with(pair, lambda pos, j: pos % 2 == 0), "sine on even positions"),
        (table_with(lambda j, d: 2 * pair(j, d)), "exponent is doubled"),
        (table_with(lambda j, d: j / d), "angle of their own"),
        (table_with(lambda j, d: 2 * j / d), "And your exponent is doubled"),
        (table_with(lambda j, d: pair(j, d) / 2), "half the size"),
        (table_with(pair, lambda pos, j: j % 2 == 1), "swapped"),
        (table_with(pair, first=1), "start at 1"),
        (in_halves, "stored halves"),
        (lambda n, d: sinusoidal_positions(n, d).T, "shape"),
        (lambda n, d: torch.zeros(n, d), "position 0, dimension 1"),
        (lambda n, d: None, "returned None"),
    ],
)
def test_check_positions_names_the_mistake(wrong, said):
    verdict = checks.check_positions(wrong)
    assert not verdict.passed and said in verdict.message


def same_angle(k, d_model):
    return torch.block_diag(*[position_rotation(k, 2)] * (d_model // 2))


def rotation_in_halves(k, d_model):
    order = [*range(0, d_model, 2), *range(1, d_model, 2)]
    return position_rotation(k, d_model)[order][:, order]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda k, d: position_rotation(k, d).T, "goes back by k"),
        (same_angle, "same angle"),
        (rotation_in_halves, "stored in halves"),
        (lambda k, d: torch.eye(d), "misses"),
        (lambda k, d: torch.eye(d + 1), "shape"),
    ],
)
def test_check_rotation_names_the_mistake(wrong, said):
    verdict = checks.check_rotation(wrong)
    assert not verdict.passed and said in verdict.message


def inverse_order(weight):
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    return weight[:, order.argsort()]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda w: w, "Nothing was reordered"),
        (lambda w: torch.cat([w[0::2], w[1::2]]), "reordered the rows"),
        (inverse_order, "inverse order"),
        (lambda w: w[:, torch.arange(7, -1, -1)], "not [evens | odds]"),
        (lambda w: w.mul_(2), "changed the matrix"),
    ],
)
def test_check_halves_names_the_mistake(wrong, said):
    verdict = checks.check_halves(wrong)
    assert not verdict.passed and said in verdict.message


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda k, d: (40 * torch.eye(d), position_rotation(k, d)), "ahead"),
        (lambda k, d: (40 * torch.eye(d), torch.eye(d)), "looks at itself"),
        (lambda k, d: (torch.eye(d), position_rotation(k, d).T), "sharply enough"),
        (lambda k, d: (40 * torch.eye(d), position_rotation(k + 1, d).T), "instead of"),
    ],
)
def test_check_look_back_names_the_mistake(wrong, said):
    verdict = checks.check_look_back(wrong)
    assert not verdict.passed and said in verdict.message


def test_look_back_may_turn_the_queries_instead():
    def look_back(k, d_model):
        return 40 * position_rotation(-k, d_model).T, torch.eye(d_model)

    assert checks.check_look_back(look_back).passed
