"""Chapter 10: each pair once, never over the budget, the same again, and on disk."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_pairs import V, some_pairs, token_pairs
from torch.nn.utils.rnn import pad_sequence

from transformer_lib.batches import (
    Batch,
    TokenPairs,
    batches,
    fill_rows,
    flatten,
    join_pairs,
    make_batch,
    pack,
    pad,
    plan_batches,
    rename_pairs,
    shared_names,
    tokenize_pairs,
)
from transformer_lib.corpora import grammar_split
from transformer_lib.exercises.batches import (
    check_my_plan,
    check_padding,
    check_shift,
    check_where,
)
from transformer_lib.tokenizer import BOS, EOS, PAD, Tokenizer

EASY = settings(max_examples=25)
ROW = st.lists(st.integers(4, V - 1), min_size=1, max_size=15)
ROWS = st.lists(st.tuples(ROW, ROW), min_size=1, max_size=30)


# --- flat arrays ---------------------------------------------------------------------


@given(ROWS)
@EASY
def test_pairs_come_back(rows):
    pairs = token_pairs(rows)
    assert len(pairs) == len(rows)
    for i, (source, target) in enumerate(rows):
        assert pairs[i][0].tolist() == source and pairs[i][1].tolist() == target
    assert pairs.src_lengths.tolist() == [len(s) + 1 for s, _ in rows]
    assert pairs.tgt_lengths.tolist() == [len(t) + 1 for _, t in rows]


def test_index_out_of_range():
    pairs = some_pairs(3)
    assert [a.tolist() for a in pairs[-1]] == [a.tolist() for a in pairs[2]]
    for i in (3, -4):
        with pytest.raises(IndexError, match="there are 3 pairs"):
            pairs[i]


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        (256, "uint8"),
        (257, "uint16"),
        (8000, "uint16"),
        (65_536, "uint16"),
        (65_537, "uint32"),
    ],
)
def test_the_smallest_type_that_holds_the_vocabulary(size, wanted):
    flat, _ = flatten([[size - 1, 0]], size)
    assert flat.tolist() == [size - 1, 0] and flat.dtype == np.dtype(wanted)


@pytest.mark.parametrize("wrong", [-1, 70_000, 2**40])
def test_an_id_outside_the_vocabulary_is_named_not_wrapped(wrong):
    with pytest.raises(ValueError, match=f"row 1 has the id {wrong}: .* 0 to 65535"):
        flatten([[5], [7, wrong], [8]], 65_536)


def test_flatten_of_nothing():
    flat, offsets = flatten([], 10)
    assert len(flat) == 0 and offsets.tolist() == [0]


@pytest.fixture(scope="module")
def tokenizer():
    pairs = grammar_split("train", 1000)
    return Tokenizer.train((side for pair in pairs for side in pair), 400)


def test_tokenize_pairs_keeps_order_and_drops_empty_and_long(tokenizer):
    long = "Der Hund sieht das Haus. " * 9
    text = [("A dog.", "Ein Hund."), ("", "Leer."), ("Long.", long), ("I am.", "Ja.")]
    pairs = tokenize_pairs(text, tokenizer, max_length=30)
    assert len(pairs) == 2 and pairs.src.dtype == np.uint16
    for i, (english, german) in enumerate([text[0], text[3]]):
        assert pairs[i][0].tolist() == tokenizer.encode(english)
        assert pairs[i][1].tolist() == tokenizer.encode(german)
    assert len(tokenize_pairs([], tokenizer)) == 0


# --- batches -------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=6))
@EASY
def test_pad_is_torchs(rows):
    wanted = pad_sequence([torch.tensor(r, dtype=torch.int64) for r in rows], True, 7)
    got = pad(rows, 7)
    assert got.dtype == torch.int64 and torch.equal(got, wanted)


def test_pad_of_nothing():
    with pytest.raises(ValueError, match="no rows"):
        pad([])


@given(ROWS)
@EASY
def test_what_is_read_is_what_was_said_one_step_before(rows):
    batch = make_batch(token_pairs(rows), range(len(rows)))
    assert batch.num_tokens == sum(len(target) + 1 for _, target in rows)
    for i, (source, target) in enumerate(rows):
        said = batch.tgt_out[i][batch.tgt_out[i] != PAD].tolist()
        read = batch.tgt_in[i][batch.tgt_in[i] != PAD].tolist()
        assert said == [*target, EOS] and read == [BOS, *target]
        given = batch.src_ids[i][batch.src_ids[i] != PAD].tolist()
        assert given == [*source, EOS]
    assert batch.tgt_in.shape == batch.tgt_out.shape


def test_to_moves_all_three():
    batch = make_batch(some_pairs(4), [0, 2]).to("meta")
    assert isinstance(batch, Batch)
    kinds = {x.device.type for x in (batch.src_ids, batch.tgt_in, batch.tgt_out)}
    assert kinds == {"meta"}


@given(ROWS, st.integers(16, 120), st.integers(0, 3), st.integers(0, 3))
@EASY
def test_each_pair_once_and_never_over_the_budget(rows, budget, seed, epoch):
    pairs = token_pairs(rows)
    plan = plan_batches(pairs, budget, seed, epoch)
    assert sorted(i for indices in plan for i in indices) == list(range(len(rows)))
    for indices in plan:
        batch = make_batch(pairs, indices)
        assert batch.src_ids.numel() <= budget and batch.tgt_in.numel() <= budget
    assert plan == plan_batches(pairs, budget, seed, epoch)


def test_seed_and_epoch_change_the_plan():
    pairs = some_pairs()
    plans = [plan_batches(pairs, 300, s, e) for s, e in ((0, 0), (0, 1), (1, 0))]
    assert plans[0] != plans[1] != plans[2] != plans[0]
    sets = [{frozenset(indices) for indices in plan} for plan in plans]
    assert sets[0] != sets[1], "equally long pairs should meet others in another epoch"


def test_batches_are_not_in_order_of_length():
    pairs = some_pairs()
    widths = np.maximum(pairs.src_lengths, pairs.tgt_lengths)
    longest = [max(widths[i]) for i in plan_batches(pairs, 300, seed=0)]
    assert longest != sorted(longest) and longest != sorted(longest, reverse=True)


def test_little_padding():
    pairs = some_pairs(2000)
    widths = np.maximum(pairs.src_lengths, pairs.tgt_lengths)
    plan = plan_batches(pairs, 600)
    cells = [len(i) * max(widths[i]) for i in plan]
    assert sum(widths) / sum(cells) > 0.95 and np.mean(cells) > 0.85 * 600


def test_no_pairs_no_batches():
    empty = TokenPairs(*flatten([], V), *flatten([], V))
    assert plan_batches(empty, 10) == []


def test_a_pair_over_the_budget_is_named():
    pairs = token_pairs([([5] * 3, [5] * 3), ([5] * 3, [5] * 20)])
    with pytest.raises(ValueError, match="pair 1 has 21 tokens.*max_tokens=20"):
        plan_batches(pairs, 20)
    assert sum(map(len, plan_batches(pairs, 21))) == 2


@given(st.integers(0, 40))
@EASY
def test_going_on_in_mid_epoch(start):
    pairs = some_pairs(100)
    everything = list(batches(pairs, 200, seed=2, epoch=5))
    rest = list(batches(pairs, 200, seed=2, epoch=5, start=start))
    assert len(rest) == max(0, len(everything) - start)
    for a, b in zip(everything[start:], rest, strict=True):
        assert torch.equal(a.src_ids, b.src_ids) and torch.equal(a.tgt_out, b.tgt_out)


def test_a_negative_start_is_refused():
    with pytest.raises(ValueError, match="start=-1"):
        next(batches(some_pairs(5), 200, start=-1))


def test_no_batch_of_nothing():
    with pytest.raises(ValueError, match="no rows"):
        make_batch(some_pairs(3), [])


@given(ROWS, st.integers(16, 60))
@EASY
def test_filling_is_greedy(rows, budget):
    """The same batches as by trying each pair in turn."""
    pairs = token_pairs(rows)
    widths = np.maximum(pairs.src_lengths, pairs.tgt_lengths)
    plan = plan_batches(pairs, budget)
    order = [i for batch in plan for i in batch]
    assert widths[order].tolist() == sorted(widths)
    slow, now = [], []
    for i in order:
        if now and (len(now) + 1) * widths[i] > budget:
            slow, now = [*slow, now], []
        now.append(i)
    assert plan == [*slow, now]


def test_without_a_seed_from_short_to_long():
    pairs = some_pairs()
    widths = np.maximum(pairs.src_lengths, pairs.tgt_lengths)
    longest = [max(widths[i]) for i in plan_batches(pairs, 300)]
    assert longest == sorted(longest)
    assert sum(b.num_tokens for b in batches(pairs, 300)) == pairs.tgt_lengths.sum()


@given(st.integers(1, 5), st.integers(0, 30), st.integers(0, 3))
@EASY
def test_ranks_share_what_one_process_gets(world_size, start, epoch):
    pairs = some_pairs(100)
    place = {"seed": 4, "epoch": epoch, "start": start}
    one = list(batches(pairs, 200, **place))
    each = [
        list(batches(pairs, 200, **place, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert {len(part) for part in each} == {len(one) // world_size}
    rounds = [batch for group in zip(*each, strict=True) for batch in group]
    for a, b in zip(one, rounds, strict=False):
        assert torch.equal(a.src_ids, b.src_ids) and torch.equal(a.tgt_in, b.tgt_in)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_is_not_there(rank, size):
    with pytest.raises(ValueError, match=f"rank={rank} of world_size={size}"):
        next(batches(some_pairs(5), 200, rank=rank, world_size=size))


# --- the exercises' checks name the mistakes -----------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda rows: (rows, rows), "not shifted"),
        (lambda rows: ([[BOS, *r] for r in rows], rows), "EOS is missing"),
        (
            lambda rows: ([[BOS, *r] for r in rows], [[BOS, *r, EOS] for r in rows]),
            "BOS is in the target",
        ),
        (lambda rows: ([[BOS, *r, EOS] for r in rows],) * 2, "BOS is in the target"),
        (lambda rows: ([r + [EOS] for r in rows],) * 2, "not shifted"),
        (lambda rows: (rows, [r + [EOS] for r in rows]), "BOS is missing"),
        (
            lambda rows: ([[BOS, *r, EOS] for r in rows], [r + [EOS] for r in rows]),
            "The decoder reads EOS",
        ),
        (
            lambda rows: ([[BOS, *r] for r in rows], [r[1:] + [EOS] for r in rows]),
            "more than one position",
        ),
    ],
)
def test_check_shift_names(wrong, said):
    verdict = check_shift(wrong)
    assert not verdict.passed and said in verdict.message


def shares(lengths, plan):
    rows = [np.asarray(lengths)[i] for i in plan]
    return sum(r.sum() for r in rows), sum(len(r) * r.max() for r in rows), rows


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            lambda n, p: np.mean([1 - r.mean() / r.max() for r in shares(n, p)[2]]),
            "mean of the batches",
        ),
        (lambda n, p: shares(n, p)[1] / shares(n, p)[0] - 1, "each real token"),
        (lambda n, p: shares(n, p)[0] / shares(n, p)[1], "share of real tokens"),
        (lambda n, p: 1 - sum(n) / (len(n) * max(n)), "longest sentence of all"),
        (lambda n, p: shares(n, p)[1] - shares(n, p)[0], "number of padded cells"),
    ],
)
def test_check_padding_names(wrong, said):
    verdict = check_padding(wrong)
    assert not verdict.passed and said in verdict.message


def planner(count="padded", order="sorted", shuffle="seed", last=True, full=1.0):
    def my_plan(widths, max_tokens, seed):
        indices = np.argsort(widths, kind="stable")
        if order == "random":
            indices = np.random.default_rng(seed).permutation(len(widths))
        plan, now = [], []
        for i in indices:
            widest = max([widths[j] for j in now] + [widths[i]])
            cells = (len(now) + 1) * widest
            if count == "real":
                cells = sum(widths[j] for j in now) + widths[i]
            if count == "rows" and order == "sorted":
                cells = (len(now) + 1) * np.mean(widths) * 1.0
            if now and cells > full * max_tokens:
                plan.append(now)
                now = []
            now.append(int(i))
        plan += [now] if last else []
        if shuffle:
            fixed = {"seed": seed, "fixed": 0, "clock": None}[shuffle]
            np.random.default_rng(fixed).shuffle(plan)
        return plan

    return my_plan


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (planner(count="real"), "real tokens"),
        (planner(count="rows"), "over the budget"),
        (planner(shuffle=None), "not shuffled"),
        (planner(shuffle="fixed"), "Another seed gives the same"),
        (planner(shuffle="clock"), "The same seed gives another"),
        (planner(last=False), "in no batch"),
        (planner(order="random"), "similar length"),
        (planner(full=0.5), "of the budget"),
        (lambda widths, n, seed: [[i] for i in range(len(widths))], "of the budget"),
        (lambda widths, n, seed: 2 * planner()(widths, n, seed), "more than one"),
    ],
)
def test_check_my_plan_names(wrong, said):
    verdict = check_my_plan(wrong)
    assert not verdict.passed and said in verdict.message


def wheres(pairs, budget, seed, strict=True, first=0):
    def where(done):
        epoch = 0
        while True:
            size = len(plan_batches(pairs, budget, seed, epoch))
            if done < size or (not strict and done == size):
                return epoch + first, done
            done, epoch = done - size, epoch + 1

    return where


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda done, p, n, s: (0, done), "never leave the first epoch"),
        (lambda done, p, n, s: wheres(p, n, s, first=1)(done), "counted from 0"),
        (lambda done, p, n, s: wheres(p, n, s, strict=False)(done), "After exactly"),
        (lambda done, p, n, s: done, "two numbers"),
    ],
)
def test_check_where_names(wrong, said):
    verdict = check_where(wrong)
    assert not verdict.passed and said in verdict.message


def test_joined_pairs_come_after_the_pairs_and_keep_their_sides_together():
    rows = [[10 + i] * (1 + i % 4) for i in range(40)]
    targets = [[60 + i] * (1 + i % 3) for i in range(40)]
    pairs = TokenPairs(*flatten(rows, 200), *flatten(targets, 200))
    joined = join_pairs(pairs, share=0.5, max_length=9, seed=3)
    assert 40 < len(joined) <= 60
    for i in range(40):
        assert [list(side) for side in joined[i]] == [rows[i], targets[i]]
    for i in range(40, len(joined)):
        source, target = (list(side) for side in joined[i])
        parts = list(dict.fromkeys(source))  # in order; one twice in a row looks single
        assert [j + 50 for j in parts] == list(dict.fromkeys(target))
        assert 1 <= len(parts) <= 3 and max(len(source), len(target)) <= 9
    again = join_pairs(pairs, share=0.5, max_length=9, seed=3)
    assert all(map(np.array_equal, vars(again).values(), vars(joined).values()))
    assert join_pairs(pairs, share=0, max_length=9) is pairs
    with pytest.raises(ValueError, match="share=-1"):
        join_pairs(pairs, share=-1, max_length=9)


NAMED = [
    ("Tom sees Boston.", "Tom sieht Boston."),
    ("That is Mary's hat.", "Das ist Marys Hut."),
    ("He has 42 hats.", "Er hat 42 Hüte."),
    ("NASA is here.", "Hier ist die NASA."),
    ("The hat is here.", "Der Hut ist hier."),
    ("Hat sees the hat.", "Hat sieht den Hut."),
]
SHAPES = [  # what may become of each of the first four, {} being made up
    (r"(\w+) sees (\w+)\.", r"(\w+) sieht (\w+)\."),
    (r"That is (\w+)'s hat\.", r"Das ist (\w+)s Hut\."),
    (r"He has ([1-9]\d) hats\.", r"Er hat ([1-9]\d) Hüte\."),
    (r"([A-Z]{2,4}) is here\.", r"Hier ist die ([A-Z]{2,4})\."),
]


@pytest.fixture(scope="module")
def named():
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    text = [side for pair in NAMED for side in pair] + [" ".join(letters), letters]
    tokenizer = Tokenizer.train(text, 340)
    return tokenize_pairs(NAMED, tokenizer), tokenizer


def test_which_names_stand_on_both_sides():
    common = {"hat", "is", "here"}
    found = [shared_names(pair, common) for pair in NAMED]
    assert found == [["Tom", "Boston"], ["Mary"], ["42"], ["NASA"], [], []]
    assert shared_names(("Tom, Tom!", "Tom!")) == []  # not equally often
    assert shared_names(("Al has 7.", "Al hat 7.")) == []  # too short
    assert shared_names(("", "")) == []


@pytest.mark.parametrize("seed", [0, 1])
def test_a_made_up_name_stands_on_both_sides_and_nothing_else_changes(named, seed):
    pairs, tokenizer = named
    more = rename_pairs(pairs, tokenizer, share=20, max_length=60, seed=seed)
    assert len(more) == len(pairs) + 20 * len(pairs)
    for i in range(len(pairs)):
        assert [side.tolist() for side in more[i]] == [s.tolist() for s in pairs[i]]
    seen = set()
    for i in range(len(pairs), len(more)):
        source, target = (tokenizer.decode(side.tolist()) for side in more[i])
        fits = [
            (k, a.groups(), b.groups())
            for k, shapes in enumerate(SHAPES)
            if (a := re.fullmatch(shapes[0], source))
            and (b := re.fullmatch(shapes[1], target))
        ]
        assert len(fits) == 1 and fits[0][1] == fits[0][2], (source, target)
        assert all(w[0].isupper() or w.isdigit() for w in fits[0][1])
        seen.add(fits[0][:2])
    assert {k for k, _ in seen} == {0, 1, 2, 3} and len(seen) > 80
    again = rename_pairs(pairs, tokenizer, share=20, max_length=60, seed=seed)
    assert all(map(np.array_equal, vars(again).values(), vars(more).values()))


def test_where_there_is_nothing_to_rename(named):
    pairs, tokenizer = named
    assert rename_pairs(pairs, tokenizer, share=0, max_length=60) is pairs
    with pytest.raises(ValueError, match="share=-1"):
        rename_pairs(pairs, tokenizer, share=-1, max_length=60)
    short = rename_pairs(pairs, tokenizer, share=1, max_length=1)
    assert all(map(np.array_equal, vars(short).values(), vars(pairs).values()))
    plain = tokenize_pairs(NAMED[4:], tokenizer)
    assert rename_pairs(plain, tokenizer, 1, 60) is plain
    paris = tokenize_pairs([("Paris", "Paris"), ("R2D2 sees", "R2D2 sieht")], tokenizer)
    found = rename_pairs(paris, tokenizer, 10, 60)  # no name that may end a name
    for i in range(2, 22):
        assert re.match(r"[A-Z]{2,4}\b|Tom", tokenizer.decode(found[i][0].tolist()))


# --- packed rows ---


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1),
    st.integers(9, 30),
)
def test_rows_are_filled_and_none_is_over(sizes, width):
    rows = fill_rows(sizes, width)
    assert sorted(i for row in rows for i in row) == list(range(len(sizes)))
    room = [[sum(sizes[i][side] for i in row) for side in (0, 1)] for row in rows]
    assert all(max(used) <= width for used in room)
    for side in range(len(rows) - 1):  # the first pair of a later row fitted nowhere
        first = sizes[rows[side + 1][0]]
        assert max(room[0][0] + first[0], room[0][1] + first[1]) > width


def test_a_pair_that_fits_no_row_is_refused():
    with pytest.raises(ValueError, match="pair 1 has 12 tokens, and a row holds 10"):
        fill_rows([(3, 4), (12, 2)], 10)


def test_a_long_pair_makes_its_rows_wide():
    pairs = token_pairs([([5] * 3, [6] * 2), ([5] * 12, [6] * 4), ([5] * 7, [6] * 7)])
    packed = pack(pairs, [0, 1, 2], width=10)
    assert packed.src_ids.shape == (2, 13) and packed.num_tokens == 3 + 5 + 8
    with pytest.raises(ValueError, match="no rows"):
        pack(pairs, [], 10)


@given(ROWS, st.integers(16, 60), st.integers(0, 9))
@EASY
def test_a_plan_of_packed_rows_takes_each_pair_once(rows, budget, epoch):
    """As a plain loop cuts the same order: a batch ends where one side is over."""
    pairs = token_pairs(rows)
    plan = plan_batches(pairs, budget, 3, epoch, packed=True)
    order = np.random.default_rng([3, epoch]).permutation(len(pairs)).tolist()
    wanted, used = [[]], [0, 0]
    for i in order:
        size = len(pairs[i][0]) + 1, len(pairs[i][1]) + 1
        if max(a + b for a, b in zip(used, size, strict=True)) > budget:
            wanted.append([])
            used = [0, 0]
        wanted[-1].append(i)
        used = [a + b for a, b in zip(used, size, strict=True)]
    assert plan == wanted


def test_a_pair_over_the_budget_is_named_in_any_plan():
    pairs = token_pairs([([5] * 3, [6] * 2), ([5] * 12, [6] * 4)])
    for packed in (False, True):
        with pytest.raises(ValueError, match="pair 1 has 13 tokens, more than max_tok"):
            plan_batches(pairs, 12, packed=packed)
