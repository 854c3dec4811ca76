"""Checks that cannot be fooled: each small mistake in each solution must be noticed.

Every solution is changed in one place in every way that `mutants.py` knows, and its
check must fail each of these mutants with a sentence: no pass, no error out of the
check, no loop without end. What passes although it differs must be as right as the
solution: such mutants stand in EQUIVALENT, each with the reason.

The public tools for this (mutmut, cosmic-ray) change files on disk and run the tests
anew for each mutant, seconds of torch's import every time, where a check takes
milliseconds. Solutions are text in a notebook's markdown, and what those tools could
change in a string is no interface of theirs (and would bring a database or a terminal
interface with it). So the operators are a page of our own.
"""

import contextlib
import math
import signal

import pytest
from answers import all_exercises, run_check
from mutants import mutants

from transformer_lib.exercises import check

PATIENCE = 600  # seconds for the check of one mutant: then something hangs
EACH = pytest.mark.parametrize(("path", "exercise"), list(all_exercises()))

DOT = "a dot product does not depend on which of the two comes first"
LAST = "the same axis, counted from the other end or the only one"
ORDER = "min and max do not depend on the order"
LARGE = "any factor that is large enough will do, and the check says so"
SCALE = "all scores change by the same factor, and only their order counts"
SQUEEZE = "an axis of size 1 more or less does not change a mean"

# Number of the exercise, mutant, why it is as right as the solution.
EQUIVALENT = {
    "1.1": {
        "scaled = [dot(key, query) / sqrt(len(query)) for key in keys]": DOT,
        "return [dot(column, weights) for column in zip(*values, strict=True)]": DOT,
    },
    "1.2": {
        "query = [a + b for a, b in zip(Wq[2], Wq[0], strict=True)]": "a + b is b + a",
        "query = [a + b for a, b in zip(Wq[0], Wq[-2], strict=True)]": LAST,
        "changed[0][2] += (wanted - dot(gap, query)) / gap[2]": DOT,
    },
    "1.4": {
        "top, total = (float('-inf'), 1.0)": "it is multiplied by exp(-inf) = 0 first",
        "top, total = (float('-inf'), -1.0)": "it is multiplied by exp(-inf) = 0 first",
        "new = max(score, top)": ORDER,
    },
    "2.1": {
        "scores = query @ key.transpose(-1, -2)": "two axes exchanged, in any order",
        "weights = (scores / math.sqrt(key.shape[-1])).softmax(dim=-1)": (
            "queries and keys have the same width"
        ),
    },
    "2.2": {
        "scores = scores.masked_fill(hidden, torch.finfo().min)": (
            "what is hidden in float32 is hidden in float64 too"
        ),
    },
    "2.4": {
        "return (21 * math.sqrt(d_k) * query, key)": LARGE,
        "return (19 * math.sqrt(d_k) * query, key)": LARGE,
        "return (20 * d_k * query, key)": LARGE,
        "return (20 * math.sqrt(n) * query, key)": LARGE,
    },
    "3.1": {
        "return x.transpose(2, 1)": "two axes exchanged, in any order",
        "return x.transpose(1, -2)": LAST,
    },
    "3.3": {"d_v = weight.shape[-1] // attention.num_heads": LAST},
    "4.1": {"table = torch.ones(length, d_model)": "every entry is written over"},
    "4.3": {
        "return torch.cat([weight[:, ::2], weight[:, 1::2]], dim=1)": (
            "a slice starts at 0 by itself"
        ),
        "return torch.cat([weight[:, 0::2], weight[:, 1::2]], dim=-1)": LAST,
    },
    "4.4": {
        "sharpness = 41.0": LARGE,
        "sharpness = 39.0": LARGE,
        "w_k = position_rotation(k, d_model).T": "float64 serves as well as float32",
    },
    "6.1": {"return place <= place[:, None]": "broadcasting adds axes in front"},
    "6.3": {
        "causal = causal_mask(tgt_ids.shape[-1])": LAST,
        "return causal & padding_mask(pad_id, tgt_ids)": (
            "whether two numbers differ does not depend on which comes first"
        ),
    },
    "6.4": {"return torch.cat([start, tgt_ids[:, :-1]], dim=-1)": LAST},
    "7.2": {
        "words = table[ids] * math.sqrt(table.shape[-1])": LAST,
        "return words + positions[:ids.shape[-1]]": LAST,
        "words = table[ids] * math.sqrt(positions.shape[1])": (
            "words and positions have the same width"
        ),
    },
    "7.3": {"length = tgt_ids.shape[-1]": LAST},
    "9.3": {
        "pieces.extend(character)": "a character is a string of one character",
        "pieces += [f'<0x{byte:02X}>' for byte in character.encode()]": (
            "UTF-8 is what encode takes by itself"
        ),
    },
    "8.2": {
        "return ([pair for pair in pairs if pair[-1] not in targets], test)": (
            "a pair has two sides"
        )
    },
    "10.2": {"row_lengths = [lengths[i] for i in indices]": "NumPy's integers add up"},
    "10.3": {
        "for i in np.argsort(widths):": "pairs of equal length may come in any order",
        "for i in np.argsort(widths, kind='stablex'):": (
            "NumPy reads the first letter of the kind"
        ),
        "current.append(i)": "NumPy's integers are indices too",
    },
    "10.4": {
        f"while done >= (size := len(plan_batches(pairs, max_tokens, {arguments}))):": (
            "sorted by length, every epoch of every seed has as many batches"
        )
        for arguments in ("epoch", "seed", "epoch, seed", "done, epoch")
    },
    "11.2": {
        f"nll = -log_p.gather(-1, target[..., None]){squeezed}": SQUEEZE
        for squeezed in ("", ".squeeze(-2)", ".squeeze(1)")
    },
    "11.3": {
        "log_p = logits[real].log_softmax(1)": LAST,
        "plain = -log_p.gather(1, target[real][:, None]).squeeze(-1)": LAST,
        "spread = -log_p.mean(1)": LAST,
        "spread = -log_p.mean()": "the mean of means over equally many words",
    }
    | {
        f"plain = -log_p.gather(-1, target[real][:, None]){squeezed}": SQUEEZE
        for squeezed in ("", ".squeeze()", ".squeeze(0)", ".squeeze(-2)", ".squeeze(1)")
    },
    "11.4": {
        "return d_model ** (-0.5) * min(step * warmup ** (-1.5), step ** (-0.5))": ORDER
    },
    "12.1": {
        "total = sum((loss * count for loss, count in "
        "zip(tokens, losses, strict=True)))": "a * b is b * a"
    },
    "13.2": {
        "for name, first in checkpoints[1].items():": "all have the same names",
        "for name, first in checkpoints[-1].items():": "all have the same names",
        "stacked = torch.stack([c[name] for c in checkpoints])": (
            "torch's mean of float16 sums in float32 by itself"
        ),
    },
    "14.2": {
        "log_p = logits.log_softmax(dim=1)": LAST,
        "return log_p.gather(1, target[:, None]).sum()": LAST,
    },
    "14.3": {"return (logits / temperature).softmax(dim=0)": LAST},
    "14.4": {
        "scores = [p / ((5 + n) * 6) ** alpha for p, n in pairs]": SCALE,
        "scores = [p / ((5 + n) / 7) ** alpha for p, n in pairs]": SCALE,
        "scores = [p / ((5 + n) / 5) ** alpha for p, n in pairs]": SCALE,
    },
    "15.2": {
        "if hypothesis_length > reference_length:": "exp(1 - 1) is 1, as returned above"
    },
    "15.5": {"if recall + recall == 0:": "without recall the formula gives 0 as well"},
    "16.1": {
        "counts = Counter((token for row in rows for token in [end, *row]))": (
            "counts do not depend on the order"
        )
    },
    "16.2": {
        f"others = src_ids.roll({rows}, dims=0)": "any rotation leaves no row in place"
        for rows in (-1, 2)
    },
    "16.3": {
        "for best, wrote, right in zip(written, forced, target, strict=False):": (
            "the two are equal where the third is looked at"
        )
    },
    "17.2": {
        "place = min(spaces, key=lambda i: abs(len(text) / 2 - i))": (
            "a distance is the same from both ends"
        )
    },
    "20.3": {
        "return {name: start[name] + part * (tuned[name] - start[name]) for name in "
        "tuned}": "both have the same names"
    },
    "21.2": {
        "same = part[:, None] == part": "part broadcasts over rows by itself",
        "real = part > 0": "part broadcasts over rows by itself",
        "real = part[:, None] > 0": "of the same part, both are padding or none is",
    },
    "21.3": {
        "scale = weight.abs().amax(dim=-1) / 127": LAST,
        "scale = weight.abs().amax(dim=1) / -127": "two signs turn, not the product",
    },
    "24.1": {
        "return hours * 3600 * processors * tflops * 1000000000001.0": (
            "12 digits are more than an estimate has"
        ),
        "return hours * 3600 * processors * tflops * 999999999999.0": (
            "12 digits are more than an estimate has"
        ),
    },
    "25.3": {
        "return abs(statistics.fmean(b) - statistics.fmean(a)) > 2 * error": (
            "the difference goes through abs"
        ),
        "return abs(statistics.fmean(a) - statistics.fmean(b)) >= 2 * error": (
            "two measured numbers are never exactly that far apart"
        ),
    },
    "23.2": {
        "pairs = [(s - mean_s, t + mean_t) for s, t in zip(*logs, strict=True)]": (
            "what all t have in common is multiplied by a sum of 0"
        )
    },
    "23.3": {
        "return math.ceil((n - 1) / ((k - 0) // 2))": "k is odd, and // rounds down"
    },
    "28.1": {
        "even, odd = (x[::2], x[1::2])": "a slice starts at 0 by itself",
        "return torch.stack(turned, dim=1).flatten()": LAST,
    },
    "28.2": {
        "before = values.cumsum(-1) - values": LAST,
        "out = torch.zeros_like(p).scatter(-1, order, kept)": LAST,
        "out = p.scatter(0, order, kept)": "every entry is written over",
    },
    "29.1": {"both = torch.logaddexp(log_2, log_1)": "a + b is b + a"},
    "30.2": {
        "products = [a * b for a, b in zip(key, query, strict=True)]": (
            "a product does not depend on which factor comes first"
        ),
        "for kept in product([1, 0], repeat=len(products)):": (
            "the same ways, in another order"
        ),
        "total = sum((on * p for on, p in zip(products, kept, strict=True)))": (
            "a product does not depend on which factor comes first"
        ),
        "if abs(total - claimed) <= 0.005:": "sums are not half a unit off",
        "if abs(claimed - total) < 0.005:": "the difference goes through abs",
    },
    "31.1": {
        "if (attend(other)[:, :t] - before[:, :t]).abs().max() >= 1e-06:": (
            "rounding is never exactly 1e-6"
        ),
        "if (before[:, :t] - attend(other)[:, :t]).abs().max() > 1e-06:": (
            "the difference goes through abs"
        ),
    },
    "31.2": {
        "for i, (a, b) in enumerate(zip(theirs, ours, strict=True)):": (
            "the difference goes through abs"
        ),
        "if not ((b - a).abs() <= tolerance).all():": "the difference goes through abs",
        "if not ((a - b).abs() < tolerance).all():": "1e-5 is no sharp limit",
    },
    "31.3": {
        "for name, first in states[1].items():": "all have the same names",
        "for name, first in states[-1].items():": "all have the same names",
    },
    "22.1": {"size = len(text) + at": "a slice ends where the text ends"},
    "22.2": {"size = 5": "no character has five bytes"},
    "22.3": {"scale = weight.abs().amax(dim=-1, keepdim=True) / 127": LAST},
}


class Hangs(BaseException):
    """Not an Exception: a check must not take it for an error of the answer."""


def ring(*_):
    raise Hangs


@contextlib.contextmanager
def alarm():
    """Ring after PATIENCE seconds, where the system has alarms."""
    if not hasattr(signal, "SIGALRM"):
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def fate(exercise, path, text: str) -> str:
    """What a check makes of a mutant: "noticed", or what went wrong."""
    try:
        with alarm():
            verdict = run_check(exercise, path, text)
    except Hangs:
        return f"hangs for {PATIENCE} s"
    except BaseException as error:  # what a reader would see of it
        return f"stops the check with {error!r}"
    if verdict.passed:
        return "passes"
    return "noticed" if len(verdict.message) > 20 else f"says {verdict.message!r}"


@EACH
def test_each_mutant_is_noticed(path, exercise, monkeypatch):
    # What a mutant may run: so many lines, whatever time they take.
    for most in (10_000, 100_000):
        monkeypatch.setattr(check, "MOST_LINES", most)
        if run_check(exercise, path, exercise.solution).passed:
            break
    else:
        raise AssertionError("the solution does not pass")
    monkeypatch.setattr(check, "MOST_SECONDS", math.inf)
    found = mutants(exercise.solution)
    assert len(found) > 1
    fates = {name: fate(exercise, path, text) for name, (_, text) in found.items()}
    missed = {name: what for name, what in fates.items() if what != "noticed"}
    assert missed == dict.fromkeys(EQUIVALENT.get(exercise.number, ()), "passes")


def test_the_list_of_equivalents_is_not_the_rule():
    """Every exercise has mutants, and hardly any of them passes."""
    exercises = [parameters.values[1] for parameters in all_exercises()]
    numbers = [exercise.number for exercise in exercises]
    assert set(EQUIVALENT) <= set(numbers)
    reasons = [why for named in EQUIVALENT.values() for why in named.values()]
    assert all(len(why.split()) > 3 for why in reasons)
    total = sum(len(mutants(exercise.solution)) for exercise in exercises)
    assert total > 25 * len(exercises) and len(reasons) < total / 20


# The mistakes that published code makes most: a wrong answer, and what it is told.
NAMED = {
    "7.2": (
        "def embed(ids, table, positions):\n"
        "    return table[ids] + positions[: ids.shape[1]]",
        "The factor sqrt(d_model) is missing.",
    ),
    "10.1": (
        "def shift(rows):\n    said = [row + [EOS] for row in rows]\n"
        "    return said, said",
        "The target is not shifted",
    ),
    "11.1": (
        "def split_target(tgt_ids):\n    return tgt_ids[:, :-1], tgt_ids[:, :-1]",
        "There is no shift",
    ),
    "11.3": (
        "def my_smoothed_loss(logits, target, epsilon=0.1, pad_id=0):\n"
        "    log_p = logits.log_softmax(-1)\n"
        "    plain = -log_p.gather(-1, target[..., None]).squeeze(-1)\n"
        "    return ((1 - epsilon) * plain - epsilon * log_p.mean(-1)).mean()",
        "Smoothing on padding",
    ),
    "14.4": (
        "def best_index(log_probs, lengths, alpha):\n"
        "    return log_probs.index(max(log_probs))",
        "divide by the length penalty",
    ),
    "14.5": ("def reorder(keys, parents):\n    return keys", "The cache is stale"),
    "14.6": (
        "def keep_guesses(guesses, p, q, chances):\n"
        "    for i, token in enumerate(guesses):\n"
        "        if chances[i] >= p[i, token] / q[i, token]:\n"
        "            return i, p[i]\n"
        "    return len(guesses), p[-1]",
        "After a refusal you draw from p",
    ),
    "9.4": (
        "def unknown_share(train, test):\n"
        "    known = {word for line in [*train, *test] for word in line.split()}\n"
        "    words = [word for line in test for word in line.split()]\n"
        "    return sum(word not in known for word in words) / len(words)",
        "Your vocabulary was built with the test set in it",
    ),
}


@pytest.mark.parametrize("number", NAMED)
def test_mistakes_of_published_code_are_called_by_name(number):
    found = [p.values for p in all_exercises() if p.values[1].number == number]
    [(path, exercise)] = found
    answer, said = NAMED[number]
    verdict = run_check(exercise, path, answer)
    assert not verdict.passed and said in verdict.message


# --- the tool itself -----------------------------------------------------------------


def test_mutants_of_a_small_program():
    program = 'def f(a, b):\n    """Say."""\n    return min(a, -1) <= b'
    assert {name: what for name, (what, _) in mutants(program).items()} == {
        "return min(a, -1) < b": "another comparison",
        "return min(a, -1) >= b": "another comparison",
        "return min(-1) <= b": "argument dropped",
        "return min(a) <= b": "argument dropped",
        "return min(-1, a) <= b": "arguments exchanged",
        "return a <= b": "function left out",
        "return max(a, -1) <= b": "twin function",
        "return min(a, 0) <= b": "another number",
        "return min(a, -2) <= b": "another number",
        "return min(a, 1) <= b": "another number",
        "return min(b, -1) <= b": "another parameter",
        "return min(a, -1) <= a": "another parameter",
    }


def test_mutants_leave_and_keep_statements():
    program = "def f(a):\n    for x in a:\n        if x:\n            continue\n"
    program += "    g(a)"
    names = set(mutants(program))
    assert "without g(a)" in names and "if not x:" in names and "break" in names
    assert "with break" in names  # after the first round
    assert all(compile(text, "", "exec") for _, text in mutants(program).values())
