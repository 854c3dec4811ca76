"""Chapter 11: loss, schedule and optimizer against torch, and the exercises' checks."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from figures import check_figure, said, shown
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from transformer_lib.exercises import objective as checks
from transformer_lib.figures.objective import rates_figure, target_figure
from transformer_lib.objective import (
    build_optimizer,
    chunked_cross_entropy,
    label_smoothed_cross_entropy,
    noam_lr,
)
from transformer_lib.speed import peak_bytes

few = settings(max_examples=25)
shapes = st.tuples(st.integers(1, 4), st.integers(1, 7), st.integers(3, 30))


def batch(shape, seed, pad_id):
    """Logits (B, T, V) and a target (B, T) with padding at the ends."""
    generator = torch.Generator().manual_seed(seed)
    B, T, V = shape
    logits = 3 * torch.randn(B, T, V, generator=generator)
    target = torch.randint(0, V, (B, T), generator=generator)
    length = torch.randint(0, T + 1, (B, 1), generator=generator)
    target[torch.arange(T) >= length] = pad_id
    target[0, 0] = (pad_id + 1) % V  # at least one real token
    return logits, target


# --- the smoothed target, in the page -------------------------------------------------


def asked_for(way, V, epsilon):
    """What the right word, another one and padding get."""
    if way == "a":
        return 1 - epsilon + epsilon / V, epsilon / V, epsilon / V
    share = epsilon / (V - 1 if way == "b" else V - 2)
    return 1 - epsilon, share, share if way == "b" else 0.0


def test_the_smoothed_target_says_what_is_asked_for(browser, tmp_path):
    """Each convention, by buttons and sliders; the floor is torch's lowest loss."""
    figure = target_figure()
    check_figure(browser, tmp_path, figure, [(".right", "fill"), (".other", "fill")])
    with shown(browser, tmp_path, figure, width=1000) as page:
        epsilon, words = (
            page.get_by_role("slider", name=name) for name in ("epsilon", "words")
        )
        for way in "abc":
            page.get_by_role("button", name=f"convention ({way})").click()
            for key, e in (("Home", 0.0), ("ArrowRight", 0.02), ("End", 0.8)):
                for other, V in (("Home", 5), ("End", 40)):
                    epsilon.press(key if other == "Home" else "Shift")
                    words.press(other)
                    text = said(page).split("=")[1]
                    found = [float(x) for x in re.findall(r"\d+\.\d+", text)]
                    right, rest, padding = asked_for(way, V, e)
                    q = torch.tensor([padding, rest, rest, right] + [rest] * (V - 4))
                    floor = torch.special.entr(q.double()).sum().item()
                    wanted = [right, rest, padding, floor]
                    assert found == pytest.approx(wanted, abs=6e-4), (way, e, V)
                    assert page.locator("svg rect").count() == V
                    assert math.isclose(q.sum().item(), 1, abs_tol=1e-6)
                    if way == "a":
                        theirs = F.cross_entropy(
                            q[None].log().clamp(min=-80),
                            torch.tensor([3]),
                            label_smoothing=e,
                        )
                        assert found[3] == pytest.approx(theirs.item(), abs=6e-4)


SPOKEN = re.compile(r"At step (\d+) the rate is (\S+?)(, its peak)?: (\S+) times")
CHOSEN = [  # keys for d_model and warm-up, what they choose, the factor's button
    ((), 512, 4000, "1"),
    (("Home", "Home"), 64, 500, "4"),
    (("End", "End"), 1024, 16_000, "0.5"),
]


def test_the_figure_of_the_rate_says_the_rate(browser, tmp_path):
    """Linear up to the peak, 1 / sqrt(d_model warmup), then as 1 / sqrt(step)."""
    figure = rates_figure()
    check_figure(browser, tmp_path, figure, [(".peak", "fill"), (".mark", "fill")])

    def rate(step, d_model, warmup, factor):
        peak = factor / math.sqrt(d_model * warmup)
        return peak * (step / warmup if step < warmup else math.sqrt(warmup / step))

    with shown(browser, tmp_path, figure, width=900) as page:
        for keys, d_model, warmup, factor in CHOSEN:
            for name, key in zip(("d_model", "warmup"), keys, strict=False):
                page.get_by_role("slider", name=name).press(key)
            page.get_by_role("button", name=f"factor {factor}", exact=True).click()
            spoken = page.locator("svg [data-say]").evaluate_all(
                "all => all.map(e => e.dataset.say)"
            )
            found = [SPOKEN.match(text).groups() for text in spoken]
            assert len(found) >= 5
            assert [int(step) for step, _, peak, _ in found if peak] == [warmup]
            for step, said_rate, _, times in found:
                wanted = rate(int(step), d_model, warmup, float(factor))
                assert float(said_rate) == pytest.approx(wanted, rel=0.005)
                base = rate(int(step), 512, 4000, 1)
                assert float(times) == pytest.approx(wanted / base, abs=0.0051)


# --- the loss -------------------------------------------------------------------------


@few
@given(
    shape=shapes,
    epsilon=st.sampled_from([0.0, 0.1, 0.2, 0.9]),
    seed=st.integers(0, 10_000),
    pad_id=st.sampled_from([0, 2]),
)
def test_loss_equals_torch_in_value_and_gradient(shape, epsilon, seed, pad_id):
    logits, target = batch(shape, seed, pad_id)
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    loss = label_smoothed_cross_entropy(ours, target, epsilon, pad_id)
    oracle = F.cross_entropy(
        theirs.transpose(1, 2), target, ignore_index=pad_id, label_smoothing=epsilon
    )
    loss.backward()
    oracle.backward()
    torch.testing.assert_close(loss, oracle, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-5)
    assert not ours.grad[target == pad_id].any()


@few
@given(shape=shapes, seed=st.integers(0, 10_000), extra=st.integers(1, 5))
def test_more_padding_changes_nothing(shape, seed, extra):
    logits, target = batch(shape, seed, 0)
    noise = 100 * torch.randn(shape[0], extra, shape[2])
    padding = torch.zeros(shape[0], extra, dtype=torch.int64)
    torch.testing.assert_close(
        label_smoothed_cross_entropy(logits, target),
        label_smoothed_cross_entropy(
            torch.cat([logits, noise], 1), torch.cat([target, padding], 1)
        ),
    )


def test_minimum_is_the_entropy_of_the_smoothed_target():
    V, epsilon = 12, 0.1
    q = torch.full((V,), epsilon / V)
    q[5] += 1 - epsilon
    loss = label_smoothed_cross_entropy(q.log()[None], torch.tensor([5]), epsilon)
    assert loss.item() == pytest.approx(torch.special.entr(q).sum().item(), abs=1e-6)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        near = q.log()[None] + 0.1 * torch.randn(1, V, generator=generator)
        assert label_smoothed_cross_entropy(near, torch.tensor([5]), epsilon) >= loss


def test_flat_targets_and_half_precision():
    torch.manual_seed(0)
    logits, target = torch.randn(6, 9), torch.randint(1, 9, (6,))
    flat = label_smoothed_cross_entropy(logits, target, 0.1)
    shaped = label_smoothed_cross_entropy(logits.view(2, 3, 9), target.view(2, 3), 0.1)
    torch.testing.assert_close(flat, shaped)
    low = label_smoothed_cross_entropy(logits.bfloat16(), target, 0.1)
    assert low.dtype == torch.float32 and abs(low - flat) < 0.05


def test_all_padding_gives_zero_and_a_zero_gradient():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = label_smoothed_cross_entropy(logits, torch.zeros(2, 3, dtype=torch.int64))
    loss.backward()
    assert loss.item() == 0 and not logits.grad.any()


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_the_gradient_written_by_hand_is_the_numerical_one(epsilon):
    torch.manual_seed(0)
    logits = torch.randn(2, 4, 6, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([[3, 1, 5, 0], [2, 0, 0, 0]])
    assert torch.autograd.gradcheck(
        lambda x: label_smoothed_cross_entropy(x, target, epsilon), (logits,)
    )


def test_backward_twice_adds_up_and_a_weight_scales():
    torch.manual_seed(0)
    logits, target = torch.randn(3, 7), torch.tensor([1, 2, 3])
    once, twice = (logits.clone().requires_grad_() for _ in range(2))
    (2 * label_smoothed_cross_entropy(once, target)).backward()
    loss = label_smoothed_cross_entropy(twice, target)
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(once.grad, twice.grad)


def test_any_padding_id():
    torch.manual_seed(0)
    logits, target = torch.randn(2, 3, 5), torch.tensor([[1, 2, -100], [4, -100, -100]])
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    label_smoothed_cross_entropy(ours, target, 0.1, pad_id=-100).backward()
    F.cross_entropy(theirs.transpose(1, 2), target, label_smoothing=0.1).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_half_precision_gets_its_gradient_back_in_its_own_type(kind):
    torch.manual_seed(0)
    exact = (10 * torch.randn(4, 50)).to(kind).float().requires_grad_()
    half = exact.detach().to(kind).requires_grad_()
    target = torch.tensor([1, 2, 3, 0])
    for logits in (exact, half):
        label_smoothed_cross_entropy(logits, target).backward()
    assert half.grad.dtype == kind
    torch.testing.assert_close(half.grad.float(), exact.grad, atol=2e-3, rtol=1e-2)


def test_no_more_than_two_tensors_of_the_size_of_the_logits_are_made():
    logits = torch.randn(64, 2000, requires_grad=True)
    target, size = torch.randint(1, 2000, (64,)), 64 * 2000 * 4
    with torch.profiler.profile(profile_memory=True) as record:
        label_smoothed_cross_entropy(logits, target).backward()
    large = [e for e in record.events() if e.cpu_memory_usage >= size]
    makers = {e.name for e in large if not e.cpu_children}
    assert len([e for e in large if not e.cpu_children]) <= 2, makers


@pytest.mark.parametrize(
    ("epsilon", "target_shape", "said"),
    [
        (-0.1, (2, 3), "label_smoothing=-0.1"),
        (1.0, (2, 3), "label_smoothing=1.0"),
        (0.1, (2, 4), r"\(2, 3, 5\).*\(2, 3\), not \(2, 4\)"),
        (0.1, (6,), r"not \(6,\)"),
    ],
)
def test_loss_refuses(epsilon, target_shape, said):
    target = torch.ones(target_shape, dtype=torch.int64)
    with pytest.raises(ValueError, match=said):
        label_smoothed_cross_entropy(torch.zeros(2, 3, 5), target, epsilon)


# --- the chunked loss ---


@given(
    st.integers(1, 40),
    st.integers(1, 50),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.integers(0, 99),
)
@few
def test_chunks_equal_torchs_loss(N, rows, epsilon, seed):
    """Value and both gradients, for every way to cut; torch's own is the oracle."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, 6, generator=g, dtype=torch.float64, requires_grad=True)
    table = torch.randn(11, 6, generator=g, dtype=torch.float64, requires_grad=True)
    target = torch.randint(11, (N,), generator=g)
    wanted = F.cross_entropy(hidden @ table.T, target, label_smoothing=epsilon)
    grads = torch.autograd.grad(3 * wanted, (hidden, table))
    got = chunked_cross_entropy(hidden, table, target, epsilon, rows)
    torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-5)
    ours = torch.autograd.grad(3 * got, (hidden, table))
    for a, b in zip(ours, grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_memory_of_chunks_does_not_grow_with_the_logits():
    hidden = torch.randn(512, 8, requires_grad=True)
    table = torch.randn(4000, 8, requires_grad=True)
    target = torch.randint(4000, (512,))

    def chunks():
        chunked_cross_entropy(hidden, table, target, rows=32).backward()

    def whole():
        F.cross_entropy(hidden @ table.T, target, label_smoothing=0.1).backward()

    logits = 4 * 512 * 4000
    assert peak_bytes(whole) > 2 * logits > 8 * peak_bytes(chunks)


def test_no_tokens_no_loss():
    hidden = torch.zeros(0, 4, requires_grad=True)
    loss = chunked_cross_entropy(hidden, torch.ones(5, 4), torch.zeros(0, dtype=int))
    loss.backward()
    assert loss.item() == 0


@pytest.mark.parametrize(
    "arguments",
    [
        (torch.zeros(2, 3, 4), torch.zeros(5, 4), torch.zeros(2, 3, dtype=int)),
        (torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(2, dtype=int)),
        (torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, dtype=int), 0.1, 0),
    ],
)
def test_chunks_refuse(arguments):
    with pytest.raises(ValueError, match="at least one row"):
        chunked_cross_entropy(*arguments)


@pytest.mark.parametrize(
    ("width", "epsilon", "said"),
    [
        (5, 0.1, r"\(V, 3\)"),
        (3, 1.5, "label_smoothing=1.5"),
        (3, math.nan, "label_smoothing=nan"),
    ],
)
def test_chunks_refuse_a_table_or_epsilon(width, epsilon, said):
    with pytest.raises(ValueError, match=said):
        chunked_cross_entropy(
            torch.ones(2, 3),
            torch.ones(4, width),
            torch.zeros(2, dtype=torch.int64),
            epsilon,
        )


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_chunks_under_autocast_are_near_float32(kind):
    """Products in 16 bits, the rest in 32; float16 loses no small gradient."""
    torch.manual_seed(0)
    states, words = torch.randn(300, 16), torch.randint(1, 900, (300,))
    weight, found = torch.randn(900, 16) / 4, []
    for low in (False, True):
        x, w = states.clone().requires_grad_(), weight.clone().requires_grad_()
        with torch.autocast("cpu", kind, enabled=low):
            loss = chunked_cross_entropy(x, w, words, 0.1, 64)
        loss.backward()
        assert loss.dtype == x.grad.dtype == w.grad.dtype == torch.float32
        found.append((loss.detach(), x.grad, w.grad))
    for exact, near in zip(*found, strict=True):
        assert not torch.equal(exact, near)
        size = exact.abs().max().item()
        torch.testing.assert_close(near, exact, atol=0.02 * size, rtol=0)
    assert (found[1][2] == 0).float().mean() < 1e-3


def test_a_loss_that_needs_no_gradient_is_the_same():
    hidden, table = torch.randn(9, 4, requires_grad=True), torch.randn(6, 4)
    target = torch.randint(1, 6, (9,))
    with torch.no_grad():
        chunked = chunked_cross_entropy(hidden, table, target, 0.1, 4)
        whole = label_smoothed_cross_entropy(hidden @ table.T, target, 0.1, -1)
    assert not chunked.requires_grad
    torch.testing.assert_close(chunked, whole)
    torch.testing.assert_close(chunked, chunked_cross_entropy(hidden, table, target))


def test_the_caller_keeps_its_logits():
    logits = torch.randn(4, 7, requires_grad=True)
    before = logits.detach().clone()
    label_smoothed_cross_entropy(logits, torch.tensor([1, 2, 3, 4])).backward()
    assert torch.equal(logits.detach(), before)


# --- the schedule ---------------------------------------------------------------------


def test_peaks_of_the_paper():
    assert noam_lr(4000, 512) == pytest.approx(6.99e-4, rel=1e-3)
    assert noam_lr(4000, 1024) == pytest.approx(4.94e-4, rel=1e-3)


@few
@given(
    step=st.integers(1, 200_000),
    d_model=st.integers(1, 2048),
    warmup=st.integers(1, 20_000),
    factor=st.floats(0.1, 10),
)
def test_schedule_is_a_line_and_then_a_root(step, d_model, warmup, factor):
    rate = noam_lr(step, d_model, warmup, factor)
    peak = factor / (d_model * warmup) ** 0.5
    if step <= warmup:
        assert rate == pytest.approx(peak * step / warmup)
    else:
        assert rate == pytest.approx(peak * (warmup / step) ** 0.5)


def test_schedule_through_torchs_lambda_lr():
    """The same rates from torch's scheduler, which counts from 0."""
    optimizer = build_optimizer(nn.Linear(2, 2))
    optimizer.param_groups[0]["lr"] = 1.0
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda epoch: noam_lr(epoch + 1, 64, 10), last_epoch=-1
    )
    scheduler.base_lrs = [1.0]
    for step in range(1, 30):
        optimizer.step()
        scheduler.step()
        rate = optimizer.param_groups[0]["lr"]
        assert rate == pytest.approx(noam_lr(step + 1, 64, 10))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [((0, 512), "step=0"), ((1, 512, 0), "warmup=0"), ((1, 0), "d_model=0")],
)
def test_schedule_refuses(arguments, said):
    with pytest.raises(ValueError, match=said):
        noam_lr(*arguments)


# --- the optimizer --------------------------------------------------------------------


def test_optimizer_has_the_papers_constants():
    model = nn.Linear(3, 2)
    optimizer = build_optimizer(model)
    (group,) = optimizer.param_groups
    assert isinstance(optimizer, torch.optim.Adam)
    assert group["betas"] == (0.9, 0.98) and group["eps"] == 1e-9
    assert group["weight_decay"] == 0 and group["lr"] == 0
    assert group["params"] == list(model.parameters())


def test_optimizer_equals_adam_by_hand():
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False)
    optimizer, param = build_optimizer(model), model.weight.detach().double()
    m = v = torch.zeros_like(param)
    for t in range(1, 9):
        lr = noam_lr(t, 64, 4)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        model(torch.randn(5, 4)).pow(2).sum().backward()
        optimizer.step()
        grad = model.weight.grad.double()
        m, v = 0.9 * m + 0.1 * grad, 0.98 * v + 0.02 * grad**2
        root = (v / (1 - 0.98**t)).sqrt() + 1e-9
        param = param - lr * m / (1 - 0.9**t) / root
        torch.testing.assert_close(
            model.weight.detach().double(), param, atol=1e-6, rtol=1e-5
        )


# --- the exercises name the mistake ---------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda ids: (ids[:, 1:], ids[:, :-1]), "wrong way"),
        (lambda ids: (ids, ids), "learn to copy"),
        (lambda ids: (ids[:, 1:], ids[:, 1:]), "learn to copy"),
        (lambda ids: (ids, ids.roll(-1, 1)), "rolled"),
        (lambda ids: (ids[:, 1:-1], ids[:, 2:]), r"must be (2, 4)"),
        (lambda ids: ids[:, 1:], "two tensors"),
    ],
)
def test_check_shift_names_the_mistake(wrong, said):
    verdict = checks.check_shift(wrong)
    assert not verdict.passed and said in verdict.message


def nll(logits, target):
    return -logits.log_softmax(-1).gather(-1, target[..., None]).squeeze(-1)


def by_sentence(logits, target, pad_id):
    return sum(nll(x, t)[t != pad_id].mean() for x, t in zip(logits, target)) / len(  # noqa: B905
        target
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda x, t, p: nll(x, t).mean(), "Padding counts"),
        (lambda x, t, p: (nll(x, t) * (t != p)).mean(), "divide by all places"),
        (lambda x, t, p: nll(x, t)[t != p].sum(), "return the sum"),
        (lambda x, t, p: -nll(x, t)[t != p].mean(), "sign"),
        (lambda x, t, p: nll(x, t)[t != p].mean() / math.log(2), "bits"),
        (lambda x, t, p: (-nll(x, t)).exp()[t != p].mean(), "no logarithm"),
        (lambda x, t, p: nll(x, t), "shape (3, 5)"),
        (lambda x, t, p: nll(x, t)[t != 0].mean(), "another pad_id"),
        (lambda x, t, p: torch.tensor(1.0), "was expected"),
        (by_sentence, "sentences' means"),
        (
            lambda x, t, p: -x.log_softmax(1).gather(-1, t[..., None])[t != p].mean(),
            "wrong axis",
        ),
        (lambda x, t, p: -x.gather(-1, t[..., None])[t != p].mean(), "log_softmax"),
    ],
)
def test_check_cross_entropy_names_the_mistake(wrong, said):
    verdict = checks.check_cross_entropy(wrong)
    assert not verdict.passed and said in verdict.message


def smoothed(make_q, mean=lambda each, real: each[real].mean()):
    """The loss towards a target distribution that make_q makes."""

    def loss(logits, target, epsilon, pad_id):
        V = logits.shape[-1]
        q = make_q(F.one_hot(target, V).float(), epsilon, V)
        each = -(q * logits.log_softmax(-1)).sum(-1)
        return mean(each, target != pad_id)

    return loss


def even(truth, e, V):
    return (1 - e) * truth + e / V


def without_pad(truth, e, V):
    q = (1 - e) * truth + e / (V - 2) * (1 - truth)
    q[..., 0] = 0
    return q


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (smoothed(even, lambda each, real: each.mean()), "Smoothing on padding"),
        (smoothed(even, lambda e, real: (e * real).mean()), "divide by all places"),
        (smoothed(even, lambda e, real: e[real].sum()), "return the sum"),
        (smoothed(lambda t, e, V: (1 - e) * t + e / (V - 1) * (1 - t)), "(V - 1)"),
        (smoothed(without_pad), "(V - 2)"),
        (smoothed(lambda t, e, V: (1 - e) * t + e / V * (1 - t)), "not sum to 1"),
        (smoothed(lambda t, e, V: e * t + (1 - e) / V), "swapped"),
        (smoothed(lambda t, e, V: t), "no smoothing"),
        (smoothed(lambda t, e, V: (1 - e) * t + e), "must be a mean"),
    ],
)
def test_check_smoothing_names_the_mistake(wrong, said):
    verdict = checks.check_smoothing(wrong)
    assert not verdict.passed and said in verdict.message


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda s, d, w: d**-0.5 * max(s**-0.5, s * w**-1.5), "larger of the two"),
        (lambda s, d, w: min(s**-0.5, s * w**-1.5), "missing"),
        (lambda s, d, w: d**0.5 * min(s**-0.5, s * w**-1.5), "d_model ** 0.5"),
        (lambda s, d, w: d**-0.5 * min(s**-0.5, s * w**-0.5), "warmup ** -1.5"),
        (lambda s, d, w: d**-0.5 * min(s**-0.5, w**-1.5), "no step in it"),
        (lambda s, d, w: noam_lr(s + 1, d, w), "shifted by one"),
        (lambda s, d, w: 2 * noam_lr(s, d, w), "2 times the paper's"),
        (lambda s, d, w: noam_lr(s, 512, 4000), "use the arguments"),
        (lambda s, d, w: 1e-3, "was expected"),
    ],
)
def test_check_schedule_names_the_mistake(wrong, said):
    verdict = checks.check_schedule(wrong)
    assert not verdict.passed and said in verdict.message


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"corrected": False}, "bias correction"),
        ({"b1": 0.98, "b2": 0.9}, "swapped"),
        ({"inside": True}, "under the root"),
        ({"root": False}, "root is missing"),
        ({"square": False}, "not of its size"),
        ({"late": True}, "t + 1"),
        ({"b2": 0.999}, "not Adam's"),
    ],
)
def test_check_adam_names_the_mistake(wrong, said):
    verdict = checks.check_adam(checks.adam_variant(**wrong))
    assert not verdict.passed and said in verdict.message
