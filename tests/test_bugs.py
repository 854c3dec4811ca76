"""Chapter 31: each check catches its bug and others like it, and passes the right."""

import contextlib
import functools
import io
import json
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from transformer_lib import bugs
from transformer_lib.batches import pad
from transformer_lib.bugs import EXHIBITS, Caught, Exhibit, exhibit
from transformer_lib.decoding import CachedSteps, FullSteps, search
from transformer_lib.exercises import bugs as exercises
from transformer_lib.objective import label_smoothed_cross_entropy
from transformer_lib.tokenizer import BOS, EOS, PAD

ROOT = Path(__file__).resolve().parents[1]
PLACES = [
    ROOT / "notebooks" / p for p in ("31_bugs.ipynb", "under_the_hood/31_bugs.ipynb")
]
CELLS = [
    cell for path in PLACES for cell in json.loads(path.read_text("utf-8"))["cells"]
]
PROSE = "\n\n".join("".join(c["source"]) for c in CELLS if c["cell_type"] == "markdown")
CODE = ["".join(c["source"]) for c in CELLS if c["cell_type"] == "code"]

each_exhibit = pytest.mark.parametrize("name", EXHIBITS)


# --- the museum -----------------------------------------------------------------------


@each_exhibit
def test_the_check_catches_the_bug_and_passes_ours(name):
    item = EXHIBITS[name]
    assert len(item.verdict(item.bug)) > 20
    assert item.verdict(item.right) == ""
    with pytest.raises(Caught):
        item.check(item.bug)


@each_exhibit
def test_a_check_leaves_torchs_generator_alone(name):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    EXHIBITS[name].verdict(EXHIBITS[name].right)
    assert torch.equal(torch.get_rng_state(), before)


@each_exhibit
def test_each_thread_is_linked_in_the_chapter(name):
    item = EXHIBITS[name]
    assert item.reported, "an exhibit needs a public thread"
    assert (ROOT / "notebooks" / f"{item.chapter}.ipynb").exists()
    for thread in item.reported:
        repository, number = re.fullmatch(r"([\w.-]+/[\w.-]+)#(\d+)", thread).groups()
        link = (
            rf"\(https://github\.com/{re.escape(repository)}/(issues|pull)/{number}\)"
        )
        assert re.search(link, PROSE), f"{thread} is not linked"


def test_no_link_to_a_thread_without_an_exhibit():
    linked = re.findall(r"github\.com/([\w.-]+/[\w.-]+)/(?:issues|pull)/(\d+)\)", PROSE)
    shown = {thread for item in EXHIBITS.values() for thread in item.reported}
    others = {f"{repository}#{number}" for repository, number in linked} - shown
    assert others == {"huggingface/blog#2414"}  # an explanation, no report


def test_there_is_a_room_full_and_each_has_its_own_check():
    assert len(EXHIBITS) >= 15
    assert len({item.check for item in EXHIBITS.values()}) == len(EXHIBITS)
    assert all(f'ask("{name}")' in CODE for name in EXHIBITS)


def test_the_chapter_lists_them_all():
    """Each row of its table leads to a section that exists, and each has a row."""
    rows = re.findall(
        r"^\| \[.*\]\((.*?)\) \| .* \| \[\d\d\]\((.*)\.ipynb\) \|$", PROSE, re.M
    )
    assert len(rows) == len(EXHIBITS) == len({place for place, _ in rows})
    built = sorted(chapter for _, chapter in rows)
    assert built == sorted(item.chapter for item in EXHIBITS.values())


def test_exhibit_registers_and_other_errors_are_not_swallowed(monkeypatch):
    monkeypatch.setattr(bugs, "EXHIBITS", {})

    @exhibit("odd", "a/b#1 c/d#2", "01_hello", abs, int)
    def check(function):
        raise ZeroDivisionError

    item = bugs.EXHIBITS["odd"]
    assert item == Exhibit(("a/b#1", "c/d#2"), "01_hello", abs, int, check)
    with pytest.raises(ZeroDivisionError):
        item.verdict(abs)


# --- what is not ours passes ----------------------------------------------------------


def positions_by_the_formula(length, d_model):
    rows = [
        [
            (math.sin, math.cos)[d % 2](pos / 10000 ** ((d - d % 2) / d_model))
            for d in range(d_model)
        ]
        for pos in range(length)
    ]
    return torch.tensor(rows)


def sacrebleu_itself(hypotheses, references):
    import sacrebleu

    return sacrebleu.corpus_bleu(hypotheses, [references]).score


def python_lines(path):
    with open(path, encoding="utf-8", newline="\n") as file:
        return [line.removesuffix("\n") for line in file]


class TorchAttention(nn.MultiheadAttention):
    def __init__(self, d_model, num_heads, dropout):
        super().__init__(d_model, num_heads, dropout=dropout, batch_first=True)


def torch_weights(query, key, mask):
    """Weights of torch's own attention: it attends to a one in each place."""
    ones = torch.eye(key.shape[-2]).expand(*key.shape[:2], -1, -1)
    allowed = mask[:, None, None]
    return F.scaled_dot_product_attention(query, key, ones, attn_mask=allowed)


@functools.cache
def rates_of_torch(d_model, warmup, count=8001):
    """The rates of an optimizer, a line and then a root, by torch's schedulers."""
    peak = (d_model * warmup) ** -0.5
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak)
    line = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warmup, 1.0, warmup - 1)
    rates = []
    for update in range(1, count + 1):
        rate = optimizer.param_groups[0]["lr"]
        rates.append(rate if update <= warmup else peak * (warmup / update) ** 0.5)
        optimizer.step()
        line.step()
    return rates


def noam_of_torch(update, d_model, warmup):
    return rates_of_torch(d_model, warmup)[update - 1]


def averaged_by_numpy(states):
    names = states[0]
    return {
        n: torch.tensor(sum(s[n].numpy() for s in states) / len(states)) for n in names
    }


def ignoring(logits, target, epsilon):
    return F.cross_entropy(logits, target, ignore_index=PAD, label_smoothing=epsilon)


OTHERS = {
    "doubled exponent": positions_by_the_formula,
    "lines that are none": python_lines,
    "wrong width": F.scaled_dot_product_attention,
    "wrong axis": lambda q, k: torch_weights(
        *(x[None, None] for x in (q, k)), torch.ones(1, len(k)).bool()
    )[0, 0],
    "mask upside down": lambda x: F.scaled_dot_product_attention(
        x, x, x, is_causal=True
    ),
    "half precision": F.scaled_dot_product_attention,
    "mixed heads": lambda x: torch.cat(list(x.unbind(dim=1)), dim=-1),
    "somebody else's mask": torch_weights,
    "dropout that stays": TorchAttention,
    "sample deviation": lambda x: F.layer_norm(x, x.shape[-1:]),
    "smoothed padding": ignoring,
    "first update": noam_of_torch,
    "averaged twice": averaged_by_numpy,
    "always position 0": FullSteps,
    "stale cache": FullSteps,
    "references turned": sacrebleu_itself,
    "two kinds of text": sacrebleu_itself,
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_ours_passes(name):
    assert EXHIBITS[name].verdict(OTHERS[name]) == ""


# --- other bugs of the same kind are caught -------------------------------------------


def smaller_base(length, d_model):
    return positions_by_the_formula(length, d_model) * 0 + torch.stack(
        [
            f(
                torch.arange(length)[:, None]
                / 1000 ** (2 * torch.arange(d_model // 2) / d_model)
            )
            for f in (torch.sin, torch.cos)
        ],
        -1,
    ).flatten(-2)


class LateSteps(CachedSteps):
    def step(self, tokens, parents):
        self.length += self.length == 0  # one position too late, from the start on
        return super().step(tokens, parents)


def every_end_missing(sentences):
    target = pad(sentences)
    return target, target != PAD


def without_end(sentences):
    return pad([[BOS, *ids[:-1]] for ids in sentences]), pad(sentences)


def zeros_afterwards(query, key, value, mask):
    """The output is repaired, the gradient is lost."""
    return EXHIBITS["nothing allowed"].bug(query, key, value, mask).nan_to_num(0.0)


def shorter(steps, limits, beam_size, alpha):
    found = search(steps, limits, beam_size, alpha, n_best=beam_size)[0]
    return min(found, key=lambda hypothesis: len(hypothesis.ids)).ids


def batch_sum(model, group):
    for batch in group:
        logits = model(batch.src_ids, batch.tgt_in)
        label_smoothed_cross_entropy(logits, batch.tgt_out).backward()


def first_only(hypotheses, references):
    return sacrebleu_itself(hypotheses[:1], references[:1])


def cosine_of_the_next(length, d_model):
    i, pos = torch.arange(0, d_model, 2), torch.arange(length)[:, None]
    table = torch.stack(
        [
            (pos / 10000 ** (i / d_model)).sin(),
            (pos / 10000 ** ((i + 1) / d_model)).cos(),
        ],
        -1,
    )
    return table.flatten(-2)


def read_as_said(sentences):
    rows = pad([[*ids, EOS] for ids in sentences])
    return rows, rows


def first_rate_zero(update, d_model, warmup):
    return noam_of_torch(update, d_model, warmup) * (update > 1)


RELATIVES = [
    ("doubled exponent", smaller_base, "exponent is wrong"),
    (
        "doubled exponent",
        lambda n, d: positions_by_the_formula(n + 1, d)[1:],
        "position 1",
    ),
    ("doubled exponent", cosine_of_the_next, "different angles"),
    ("mask of vectors", lambda ids, x: (ids != EOS)[:, None, None], "is hidden"),
    ("mask of vectors", lambda ids, x: (ids != 7)[:, None, None], "2 of 2"),
    ("end as padding", every_end_missing, "no end symbol"),
    ("target not shifted", without_end, "must be said"),
    ("target not shifted", read_as_said, "already read"),
    ("lines that are none", lambda p: p.read_text("utf-8").split("\n"), "is read as"),
    (
        "lines that are none",
        lambda p: [line.replace("\r", " ") for line in python_lines(p)],
        "the lines are",
    ),
    ("wrong width", lambda q, k, v: (q @ k.transpose(-2, -1)).softmax(-1) @ v, "0.900"),
    (
        "wrong axis",
        lambda q, k: (q @ k.T).flatten().softmax(0).unflatten(0, (3, 5)),
        "spend",
    ),
    ("wrong axis", lambda q, k: (q @ k.T).sigmoid(), "spend"),
    ("mask upside down", lambda x: F.scaled_dot_product_attention(x, x, x), "5 of 5"),
    ("mask upside down", lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1], "its own token"),
    ("nothing allowed", zeros_afterwards, "gradient of the values: 20"),
    (
        "half precision",
        lambda q, k, v, m: (
            (q @ k.T).masked_fill(~m, -8.0).softmax(-1) @ v
            if q.dtype == torch.half
            else F.scaled_dot_product_attention(q, k, v, m)
        ),
        "off by",
    ),
    ("mixed heads", lambda x: x.flip(-1).transpose(1, 2).flatten(2), "numbers of a"),
    ("mixed heads", lambda x: x.flip(1).transpose(1, 2).flatten(2), "[2, 2, 1, 1"),
    ("mixed heads", lambda x: x.flip(2).transpose(1, 2).flatten(2), "the places [2]"),
    ("mixed heads", lambda x: x.permute(0, 2, 3, 1).flatten(2), "order"),
    (
        "somebody else's mask",
        lambda q, k, m: (
            (q @ k.transpose(-2, -1)).masked_fill(~m.any(0), -torch.inf).softmax(-1)
        ),
        "company",
    ),
    (
        "dropout that stays",
        lambda d, h, dropout: TorchAttention(d, h, 0.0),
        "nothing is dropped",
    ),
    (
        "sample deviation",
        lambda x: (x - x.mean()) / (x.std(correction=0) + 1e-5),
        "under the root",
    ),
    ("sample deviation", lambda x: (x - x.mean()) / (x.var() + 1e-5).sqrt(), "0.866"),
    ("smoothed padding", lambda x, y, e: ignoring(x, y, 0.0), "torch"),
    (
        "smoothed padding",
        lambda x, y, e: F.cross_entropy(x, y, label_smoothing=e),
        "padding",
    ),
    ("mean of means", batch_sum, "off by"),
    ("first update", lambda n, d, w: noam_of_torch(n + 1, d, w), "the peak is"),
    ("first update", lambda n, d, w: 2 * noam_of_torch(n, d, w), "peak is 1.40e-03"),
    ("first update", first_rate_zero, "is lost"),
    ("averaged twice", lambda states: states[1], "'bias': 3.0"),
    ("stale cache", LateSteps, "Greedy steps are off"),
    ("always position 0", LateSteps, "One cached step"),
    ("first to finish", shorter, "probability 0.36"),
    ("references turned", first_only, "the score is 100.0"),
    ("references turned", lambda h, r: sacrebleu_itself(h, r) / 2, "a perfect"),
    ("references turned", lambda h, r: sacrebleu_itself(h[:2], r[:2]), "another order"),
    ("two kinds of text", lambda h, r: 0.0, "0.0"),
]


@pytest.mark.parametrize("name, wrong, telling", RELATIVES)
def test_relatives_are_caught(name, wrong, telling):
    assert telling.lower() in EXHIBITS[name].verdict(wrong).lower()


def test_average_must_not_touch_what_it_reads():
    def right_but_in_place(states):
        means = averaged_by_numpy(states)
        states[0]["embedding"].fill_(9.0)
        return means

    assert "changed" in EXHIBITS["averaged twice"].verdict(right_but_in_place)


# --- how far a LayerNorm of one's own is from the field's ----------------------------


@pytest.fixture(scope="module")
def printed():
    """What the cell with the claim prints."""
    names = {n: v for n, v in vars(bugs).items() if not n.startswith("__")}
    (source,) = [s for s in CODE if re.search(r"\bown = \(", s)]
    with contextlib.redirect_stdout(io.StringIO()) as text:
        exec(source, names)
    return text.getvalue()


@pytest.mark.parametrize(
    "number", ["512           1.0     0.001", "4           1.0     0.134"]
)
def test_claims_are_wrong_by_these_numbers(printed, number):
    assert number in printed


# --- exercises ------------------------------------------------------------------------


def last_only(attend, x):
    other = x.clone()
    other[:, -1] = torch.randn_like(other[:, -1])
    return bool((attend(other)[:, :-1] - attend(x)[:, :-1]).abs().max() > 1e-6)


def every(change, keep=True):
    def looks_ahead(attend, x):
        before = attend(x)
        for t in range(1, x.shape[1]):
            other = x.clone() if keep else x
            change(other, t)
            if (attend(other)[:, :t] - before[:, :t]).abs().max() > 1e-6:
                return True
        return False

    return looks_ahead


def add_one(x, t):
    x[:, t:] += 1


def shuffle(x, t):
    x[:, t:] = torch.randn_like(x[:, t:])


def whole_output(attend, x):
    other = x.clone()
    other[:, -1] += torch.randn(4)
    return bool((attend(other) - attend(x)).abs().max() > 1e-6)


def differing(test, pick=min):
    def first_difference(ours, theirs, tolerance=1e-5):
        pairs = enumerate(zip(ours, theirs, strict=True))
        found = [i for i, (a, b) in pairs if test(a, b, tolerance)]
        return pick(found) if found else -1

    return first_difference


def in_place(states):
    return EXHIBITS["averaged twice"].bug(states)


def by_name(mean):
    def average(states):
        return {name: mean([state[name] for state in states]) for name in states[0]}

    return average


@pytest.mark.parametrize(
    "check, wrong, telling",
    [
        ("looks_ahead", last_only, "Place 0 sees place 1"),
        ("looks_ahead", every(add_one), "Behind a LayerNorm"),
        ("looks_ahead", every(shuffle, keep=False), "changed x"),
        ("looks_ahead", whole_output, "was accused"),
        ("looks_ahead", lambda attend, x: True, "was accused"),
        ("looks_ahead", lambda attend, x: False, "without any mask"),
        (
            "first_difference",
            differing(lambda a, b, e: (a - b).abs().mean() > e),
            "A mean hides it",
        ),
        (
            "first_difference",
            differing(lambda a, b, e: (a - b).abs().max() > e),
            "a NaN",
        ),
        ("first_difference", differing(lambda a, b, e: (b - a).max() > e), "abs"),
        ("first_difference", differing(lambda a, b, e: (a != b).any()), "below the"),
        (
            "first_difference",
            differing(lambda a, b, e: (a - b).abs().max() > e, max),
            "the last one",
        ),
        (
            "first_difference",
            differing(lambda a, b, e: not torch.allclose(a, b, rtol=0, atol=1e-5)),
            "use it",
        ),
        ("average_states", in_place, "+= works in place"),
        (
            "average_states",
            by_name(lambda ts: torch.stack(ts).mean(0) * 0 + sum(ts) / len(ts)),
            "overflowed",
        ),
        ("average_states", by_name(lambda ts: ts[-1]), "yours are"),
        (
            "average_states",
            by_name(lambda ts: sum(t.double() for t in ts) / len(ts)),
            "go back at the end",
        ),
        ("average_states", lambda states: states, "Give a dictionary"),
    ],
)
def test_mistakes_are_named(check, wrong, telling):
    verdict = getattr(exercises, f"check_{check}")(wrong)
    assert not verdict.passed
    assert telling in verdict.message, verdict.message
