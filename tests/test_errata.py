"""Chapter 30: claims are wrong by the numbers that its cells print."""

import contextlib
import io
import json
import math
import re
from itertools import combinations
from pathlib import Path

import pytest

from transformer_lib.exercises import errata as exercises
from transformer_lib.parsing.parser import TABLE_4

ROOT = Path(__file__).resolve().parents[1]
CHAPTER = ROOT / "notebooks" / "30_errata.ipynb"
HOOD = ROOT / "notebooks" / "under_the_hood" / "30_errata.ipynb"
CELLS = json.loads(CHAPTER.read_text("utf-8"))["cells"]


@pytest.fixture(scope="module")
def printed():
    """What the cells print, those under the hood too: all but clock and exercises."""
    names, out = {"__name__": "page"}, []
    for cell in CELLS + json.loads(HOOD.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        code = cell["cell_type"] == "code" and "%pip" not in source
        if (
            not code
            or "exercises.errata" in source
            or "race(" in source
            or source.startswith("#| export")
        ):
            continue
        with contextlib.redirect_stdout(io.StringIO()) as text:
            exec(source, names)
        out.append(text.getvalue())
    return "".join(out)


def test_nothing_is_said_twice():
    prose = ["".join(c["source"]) for c in CELLS if c["cell_type"] == "markdown"]
    heads = re.findall(r"^#+ (.+)$", "\n".join(prose), re.M)
    assert len(heads) == len(set(heads))


def test_every_claim_has_what_is_right():
    """In each section of errors in circulation: what is said, a cell, what holds."""
    text = "\n".join(
        "\n[cell]" if c["cell_type"] == "code" else "".join(c["source"]) for c in CELLS
    )
    part = text.split("\n## Errors in circulation\n")[1].split("\n## ")[0]
    _, *claims = part.split("\n### ")
    assert len(claims) >= 12
    for claim in claims:
        places = [claim.find(mark) for mark in ("**Claim:**", "[cell]", "**Correct:**")]
        assert 0 < places[0] < places[1] < places[2], claim.split("\n")[0]


def test_table_4_has_two_parsers_above_the_transformer():
    """The text of section 6.3 allows for one."""
    scores = {}
    for name, _, f1 in TABLE_4:
        scores[name] = max(f1, scores.get(name, 0))
    above = {name for name in scores if scores[name] > scores["Transformer, 4 layers"]}
    assert above == {"Luong et al. 2015", "Dyer et al. 2016"}


@pytest.mark.parametrize(
    "number",
    [
        "computed  [[2.6, 2.78], [1.79, 1.97]]",
        "computed  [0.474, 0.526]",
        "computed  [[1.042, 0.816, 1.016], [1.042, 0.816, 1.016]]",
        "computed  [2.0, 2.0, 1.0]",
        "computed  [0.274, 0.274, 0.452]",
        "computed  [0.384, 0.384, 0.233]",
        "computed  [0.867, 0.117, 0.016]",
        "computed  [0.9995, 0.0003, 0.0001]",
        "computed  91.3",
        "computed  3.3",
        "GNMT + RL ensemble BLEU 26.3   1.8e+20 FLOPs, 7.8 times",
        "ConvS2S                            2.9         0.4",
        "MoE                               36.4         5.2",
        "16 heads: perplexity 4.91, BLEU 25.8",
        "computed  16.0",
        "sum 0.987500",
        "V = 37,000: 0.9 and 0.0001 sum to 4.60; ε/(V-1) is 2.7e-06",
        "online      8,388,608   33,554,432  134,217,728",
    ],
)
def test_claims_are_wrong_by_these_numbers(printed, number):
    assert number in printed


# --- exercises ------------------------------------------------------------------------


def gaps(of):
    return lambda weights: [of(w, weights) for w in weights]


def slips(counts, tolerance=0.005, order=None):
    def left_out(query, key, claimed):
        products = [a * b for a, b in zip(query, key, strict=True)]
        n, found = len(products), []
        for count in counts(n):
            for missing in combinations(range(n), count):
                total = sum(products[i] for i in range(n) if i not in missing)
                if abs(total - claimed) < tolerance:
                    found.append(missing)
        return found if order is None else sorted(found, key=order)

    return left_out


@pytest.mark.parametrize(
    "check, wrong, telling",
    [
        ("score_gaps", gaps(lambda w, ws: math.log(w / max(ws))), "below 0"),
        ("score_gaps", gaps(lambda w, ws: math.log(w / min(ws))), "the lowest score"),
        ("score_gaps", gaps(lambda w, ws: math.log2(max(ws) / w)), "base 2"),
        ("score_gaps", gaps(lambda w, ws: math.log10(max(ws) / w)), "base 10"),
        ("score_gaps", gaps(lambda w, ws: max(ws) / w), "take their logarithm"),
        ("score_gaps", gaps(lambda w, ws: -math.log(w)), "have the gaps"),
        ("score_gaps", lambda ws: [math.log(max(ws) / w) for w in ws[1:]], "not 1"),
        ("left_out", slips(lambda n: range(1, n + 1)), "nothing is missing"),
        ("left_out", slips(lambda n: range(n)), "all three are missing"),
        ("left_out", slips(lambda n: range(2)), "all three"),
        ("left_out", slips(lambda n: range(n + 1), 1e-6), "rounded"),
        ("left_out", slips(lambda n: range(n + 1), 0.05), "is rounded to 0.09"),
        ("left_out", slips(lambda n: reversed(range(n + 1))), "come first"),
        ("left_out", slips(lambda n: range(n + 1), order=sum), "come first"),
    ],
)
def test_mistakes_are_named(check, wrong, telling):
    verdict = getattr(exercises, f"check_{check}")(wrong)
    assert not verdict.passed
    assert telling in verdict.message, verdict.message
