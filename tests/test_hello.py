"""Chapter 01: attention in plain Python, against torch and pencil."""

import subprocess
import sys
from array import array
from functools import partial
from itertools import count
from math import exp, inf, log, sqrt
from pathlib import Path
from time import sleep

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_lib.exercises import check
from transformer_lib.exercises import hello as checks
from transformer_lib.exercises.check import Verdict, exercise_check, expect
from transformer_lib.hello import attention, dot, matmul, shape, softmax, transpose

ROOT = Path(__file__).parents[1]
X = [[1, 0, 1, 0], [0, 1, 0, 1]]
WQ = [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9], [0.1, 0.2, 0.3]]
WK = [[0.2, 0.3, 0.4], [0.5, 0.6, 0.7], [0.8, 0.9, 0.1], [0.2, 0.3, 0.4]]
WV = [[0.3, 0.4, 0.5], [0.6, 0.7, 0.8], [0.9, 0.1, 0.2], [0.3, 0.4, 0.5]]

SOME = settings(max_examples=25)
number = st.floats(-50, 50)


def rounded(matrix, digits):
    return [[round(x, digits) for x in row] for row in matrix]


def test_hello_world_numbers():
    steps = attention(X, WQ, WK, WV)
    assert rounded(steps.scores, 2) == [[2.60, 2.78], [1.79, 1.97]]
    assert rounded(steps.weights, 3) == [[0.474, 0.526]] * 2
    assert rounded(steps.Z, 3) == [[1.042, 0.816, 1.016]] * 2


def test_i_love_cats_numbers():
    Q = [[1, 0, 1, 0], [0, 1, 1, 0], [1, 1, 0, 1]]
    K = [[1, 1, 0, 0], [0, 1, 1, 1], [1, 0, 1, 0]]
    scores = matmul(Q, transpose(K))
    assert scores[2] == [2, 2, 1]
    weights = [softmax([score / 2 for score in row]) for row in scores]
    assert rounded(weights, 3)[0] == [0.274, 0.274, 0.452]
    assert rounded(weights, 3)[2] == [0.384, 0.384, 0.233]


def test_circulating_softmaxes():
    assert rounded([softmax([2, 0, -2])], 3) == [[0.867, 0.117, 0.016]]
    assert rounded([softmax([10, 2, 1])], 4) == [[0.9995, 0.0003, 0.0001]]


def test_standard_library_alone():
    """No site-packages, no environment: the module and its checks still run."""
    program = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from transformer_lib.hello import attention
import transformer_lib.exercises.hello
Z = attention({X}, {WQ}, {WK}, {WV}).Z
assert [round(x, 3) for x in Z[0]] == [1.042, 0.816, 1.016]
foreign = {{"torch", "numpy", "matplotlib", "fastcore", "nbdev"}} & set(sys.modules)
assert not foreign, foreign
outside = [
    name for name in (module.partition(".")[0] for module in sys.modules)
    if name not in sys.stdlib_module_names | {{"transformer_lib", "__main__"}}
]
assert not outside, outside
"""
    command = [sys.executable, "-S", "-I", "-c", program]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def torch_attention(X, Wq, Wk, Wv):
    Q, K, V = X @ Wq, X @ Wk, X @ Wv
    together = torch.nn.functional.scaled_dot_product_attention
    return together(Q[None], K[None], V[None])[0]


@SOME
@given(*[st.integers(1, 6)] * 4, st.integers(0, 2**31))
def test_equals_torch(S, D, K, V, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(S, D), (D, K), (D, K), (D, V)]
    made = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    ours = attention(*[matrix.tolist() for matrix in made]).Z
    torch.testing.assert_close(
        torch.tensor(ours, dtype=torch.float64), torch_attention(*made)
    )


@SOME
@given(st.lists(number, min_size=1, max_size=8))
def test_softmax_sums_to_one_as_torch(scores):
    weights = softmax(scores)
    assert sum(weights) == pytest.approx(1)
    theirs = torch.tensor(scores, dtype=torch.float64).softmax(0).tolist()
    assert weights == pytest.approx(theirs, abs=1e-12)


@SOME
@given(st.lists(number, min_size=1, max_size=8), st.floats(-1e6, 1e6))
def test_softmax_ignores_a_shift(scores, shift):
    moved = softmax([score + shift for score in scores])
    assert moved == pytest.approx(softmax(scores), abs=1e-8)


def test_softmax_survives_large_scores():
    assert softmax([1e308, -1e308]) == [1, 0]
    assert softmax([1000, 1000]) == [0.5, 0.5]


@SOME
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.integers(0, 999))
def test_matmul_and_transpose_equal_torch(n, m, p, seed):
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(n, m, generator=generator, dtype=torch.float64)
    B = torch.randn(m, p, generator=generator, dtype=torch.float64)
    ours = torch.tensor(matmul(A.tolist(), B.tolist()), dtype=torch.float64)
    torch.testing.assert_close(ours, A @ B)
    assert transpose(A.tolist()) == A.T.tolist()
    assert shape(A.tolist()) == (n, m)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: shape([]), "the matrix is empty"),
        (lambda: transpose([[1, 2], [3]]), "row 0 has 2 numbers and row 1 has 1"),
        (lambda: matmul([[1, 2]], [[1, 2]]), "A has 2 columns, so B must have 2 rows"),
        (lambda: dot([1], [1, 2]), "cannot pair 1 numbers with 2"),
        (lambda: softmax([]), "at least one number"),
        (lambda: attention(X, WQ[:3], WK, WV), "Wq has 3 rows, .* must have 4 rows"),
        (lambda: attention(X, WQ, [[1]] * 4, WV), "3 columns and Wk has 1"),
        (lambda: attention([[1], [1, 2]], WQ, WK, WV), "X is ragged"),
    ],
)
def test_errors_say_what_was_given_and_what_is_allowed(call, said):
    with pytest.raises(ValueError, match=said):
        call()


# --- exercises: typical mistakes are named -------------------------------------------


def attend_with(weigh):
    def attend(query, keys, values):
        weights = weigh([dot(query, key) for key in keys], len(query))
        return [dot(weights, column) for column in zip(*values, strict=True)]

    return attend


def over(scores, by):
    return [score / by for score in scores]


@pytest.mark.parametrize(
    ("weigh", "said"),
    [
        (lambda s, d: softmax(s), "not scaled"),
        (lambda s, d: softmax(over(s, d)), "its square root"),
        (lambda s, d: softmax(over(s, sqrt(len(s)))), "number of keys"),
        (lambda s, d: over(s, sqrt(d)), "no softmax"),
        (lambda s, d: [1] * len(s), "sum of the values"),
        (lambda s, d: [1 / len(s)] * len(s), "plain mean"),
    ],
)
def test_attend_mistakes(weigh, said):
    verdict = checks.check_attend(attend_with(weigh))
    assert verdict.passed is False and said in verdict.message


def steer_with(gap, row=0, at_once=False):
    def steer(Wq, target):
        changed = Wq if at_once else [line[:] for line in Wq]
        changed[row][2] += gap(target) / 0.6
        return changed

    return steer


def odds(t):
    return log(t / (1 - t))


@pytest.mark.parametrize(
    ("steer", "said"),
    [
        (steer_with(lambda t: odds(t) - 0.18), "forgot the scaling"),
        (steer_with(lambda t: odds(t) * 3 - 0.18), "its square root"),
        (steer_with(lambda t: log(t) * sqrt(3) - 0.18), "log(target)"),
        (steer_with(lambda t: odds(t) * sqrt(3)), "already 0.18 apart"),
        (steer_with(odds), "Two slips. You forgot the scaling"),
        (steer_with(lambda t: odds(t) * 3), "Two slips. You scaled by d_k"),
        (steer_with(odds), "And the scores are already 0.18 apart"),
        (steer_with(lambda t: odds(1 - t) * sqrt(3) - 0.18), "mixed up"),
        (steer_with(lambda t: odds(t) * sqrt(3) - 0.18, row=1), "rows 0 and 2"),
        (steer_with(lambda t: 0.1, at_once=True), "copy it first"),
        (lambda Wq, t: [[0.5] * 3 for _ in Wq], "exactly one may change"),
        (lambda Wq, t: Wq[:2], "4 rows of 3 numbers"),
        (steer_with(lambda t: 0.1), "it should be 0.8"),
        (steer_with(lambda t: odds(t) * sqrt(3) - 0.18), "with another it is not"),
    ],
)
def test_steer_mistakes(steer, said):
    verdict = checks.check_steer(steer)
    assert verdict.passed is False and said in verdict.message


def masked(scaled, allowed, fill):
    out = []
    for i, row in enumerate(scaled):
        out.append(softmax([s if allowed(i, j) else fill for j, s in enumerate(row)]))
    return out


def zero_after(scaled):
    out = [softmax(row) for row in scaled]
    return [[w if j <= i else 0.0 for j, w in enumerate(r)] for i, r in enumerate(out)]


FAR = -1e9


@pytest.mark.parametrize(
    ("causal", "said"),
    [
        (lambda s: [softmax(row) for row in s], "sees the future"),
        (lambda s: masked(s, lambda i, j: j <= i, 0.0), "exp(0) = 1"),
        (zero_after, "after the softmax"),
        (lambda s: masked(s, lambda i, j: j <= i + 1, FAR), "sees the future"),
        (lambda s: masked(s, lambda i, j: j < max(i, 1), FAR), "not see itself"),
        (lambda s: masked(s, lambda i, j: j >= i, FAR), "the future"),
        (lambda s: masked(s, lambda i, j: j < i, -inf), "the diagonal belongs"),
        (
            lambda s: [
                [w if j <= i else 0 for j, w in enumerate(row)]
                for i, row in enumerate(transpose([softmax(c) for c in transpose(s)]))
            ],
            "over the columns",
        ),
        (lambda s: [softmax(row[: i + 1]) for i, row in enumerate(s)], "as large as"),
    ],
)
def test_causal_mistakes(causal, said):
    verdict = checks.check_causal(causal)
    assert verdict.passed is False and said in verdict.message


def no_correction(scores):
    top, total = -1e9, 0.0
    for score in scores:
        top = max(top, score)
        total += exp(score - top)
    return top, total


def unshifted(scores):
    numbers = list(scores)
    return max(numbers), sum(map(exp, numbers))


def stores(scores):
    numbers = list(scores)
    top = max(numbers)
    return top, sum(exp(number - top) for number in numbers)


def overflowing(scores):
    numbers = list(scores)
    return max(numbers), sum(map(exp, numbers)) / exp(max(numbers))


@pytest.mark.parametrize(
    ("running", "said"),
    [
        (no_correction, "must be multiplied"),
        (unshifted, "not of exp(score)"),
        (overflowing, "overflow"),
        (lambda s: (max(s), sum(exp(x) for x in s)), "used up"),
        (lambda s: (sum(exp(x) for x in s), max(s)), "iterator"),
        (lambda s: (s[0], 1), "iterator"),
        (lambda s: max(s), "two numbers"),
        (lambda s: (0.0, 1.0), "largest of"),
        (stores, "stores them"),
        (lambda s: stores(array("d", s)), "stores them"),
    ],
)
def test_running_mistakes(running, said):
    verdict = checks.check_running(running)
    assert verdict.passed is False and said in verdict.message


# --- the frame of the checks ---------------------------------------------------------


@exercise_check("Good.")
def check_two(double):
    expect(double(2) == 4, "It is not doubled.")


def test_verdicts():
    good, bad = check_two(lambda x: 2 * x), check_two(lambda x: x)
    assert good and good == Verdict(True, "Good.") and repr(good) == "Passed: Good."
    assert not bad and repr(bad) == "Not yet: It is not doubled."


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda x: None, "returned None"),
        (lambda x: ..., "where the ... stands"),
        (lambda x: x.upper(), "AttributeError"),
        (lambda: 4, "TypeError"),
        (None, "NoneType"),
        (..., "still a ..."),
    ],
)
def test_verdict_never_raises(answer, said):
    verdict = check_two(answer)
    assert verdict.passed is False and said in verdict.message


def runs_for_ever(x):
    while True:
        x += 1


def waits_for_ever(x):
    while True:
        sleep(0.01)


def waits_on_one_line(x):
    while True: pass  # fmt: skip # noqa: E701


def asks_itself_for_ever(x):
    return asks_itself_for_ever(x)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (runs_for_ever, "does not come to an end: it has run 200,001 lines"),
        (waits_for_ever, "does not come to an end"),
        (waits_on_one_line, "is still in the line `while True: pass"),
        (partial(runs_for_ever), "is still in the line `"),
        (lambda x: sum(1 for _ in count()), "does not come to an end"),
        (asks_itself_for_ever, "RecursionError"),
    ],
)
def test_an_answer_without_end_is_stopped(answer, said, monkeypatch):
    if answer is waits_for_ever:
        monkeypatch.setattr(check, "MOST_SECONDS", 0.5)
    verdict = check_two(answer)
    assert verdict.passed is False and said in verdict.message
    assert sys.gettrace() is None


def test_a_debugger_keeps_its_own_trace():
    def debugger(frame, event, value):
        return None

    seen = []
    sys.settrace(debugger)
    try:
        assert check_two(lambda x: seen.append(sys.gettrace()) or 2 * x)
    finally:
        sys.settrace(None)
    assert seen == [debugger]
