"""Chapter 10: each pair once, never over the budget, the same again, and on disk."""

import errno
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from transformer_lib import batches as module
from transformer_lib.batches import (
    Batch,
    PairWriter,
    TokenPairs,
    batches,
    fill,
    fill_rows,
    flatten,
    id_type,
    join_pairs,
    load_prepared,
    make_batch,
    pack,
    pad,
    pieces_of,
    plan_batches,
    plan_packed,
    prepare,
    sample_pairs,
    tokenize_pairs,
)
from transformer_lib.exercises.batches import (
    check_my_plan,
    check_padding,
    check_shift,
    check_where,
)
from transformer_lib.grammar import grammar_split
from transformer_lib.tokenizer import BOS, EOS, PAD, Tokenizer

EASY = settings(max_examples=25)
V = 50
ROW = st.lists(st.integers(4, V - 1), min_size=1, max_size=15)
ROWS = st.lists(st.tuples(ROW, ROW), min_size=1, max_size=30)


def token_pairs(rows):
    source, target = zip(*rows, strict=True)
    return TokenPairs(*flatten(source, V), *flatten(target, V))


def some_pairs(n=200, seed=0, longest=30):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest, (n, 2))
    rows = [tuple(rng.integers(4, V, k).tolist() for k in pair) for pair in lengths]
    return token_pairs(rows)


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
    [(256, "uint8"), (257, "uint16"), (8000, "uint16"), (65_536, "uint16"),
     (65_537, "uint32")],
)  # fmt: skip
def test_the_smallest_type_that_holds_the_vocabulary(size, wanted):
    assert id_type(size) == np.dtype(wanted)
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


# --- on disk -------------------------------------------------------------------------


@pytest.mark.parametrize("mmap", [True, False])
def test_saved_pairs_come_back(mmap, tmp_path):
    pairs = some_pairs()
    pairs.save(tmp_path / "deep" / "pairs")
    again = TokenPairs.load(tmp_path / "deep" / "pairs", mmap=mmap)
    assert isinstance(again.src, np.memmap) == mmap
    for name in module.ARRAYS:
        a, b = getattr(pairs, name), getattr(again, name)
        assert a.dtype == b.dtype and np.array_equal(a, b)
    assert plan_batches(again, 300) == plan_batches(pairs, 300)
    first, same = next(batches(pairs, 300)), next(batches(again, 300))
    assert torch.equal(first.src_ids, same.src_ids)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["pairs"]


def test_saving_again_replaces(tmp_path):
    some_pairs(10).save(tmp_path / "pairs")
    some_pairs(20).save(tmp_path / "pairs")
    assert len(TokenPairs.load(tmp_path / "pairs")) == 20
    assert [p.name for p in tmp_path.iterdir()] == ["pairs"]


@pytest.mark.parametrize("fails", ["save", "replace"])
def test_a_failed_save_leaves_what_was_there(fails, tmp_path, monkeypatch):
    some_pairs(10).save(tmp_path / "pairs")
    replace, done = module.os.replace, []

    def full(*arguments):
        raise OSError(28, "No space left on device")

    def second_fails(a, b):
        done.append(a)
        if len(done) == 2:
            full()
        replace(a, b)

    if fails == "save":
        monkeypatch.setattr(module.np, "save", full)
    else:
        monkeypatch.setattr(module.os, "replace", second_fails)
    with pytest.raises(OSError, match="No space"):
        some_pairs(20).save(tmp_path / "pairs")
    assert len(TokenPairs.load(tmp_path / "pairs")) == 10
    assert [p.name for p in tmp_path.iterdir()] == ["pairs"]


@pytest.mark.parametrize(
    "harm",
    [
        lambda p: (p / "src.npy").unlink(),
        lambda p: (p / "tgt.npy").write_bytes((p / "tgt.npy").read_bytes()[:-40]),
        lambda p: (p / "meta.json").write_text('{"pairs"'),
        lambda p: (p / "src.npy").write_bytes(b""),
        lambda p: np.save(p / "tgt.npy", np.zeros(3, np.uint8)),
        lambda p: np.save(p / "src_offsets.npy", np.zeros(0, np.int64)),
    ],
    ids=["missing", "cut short", "meta", "empty", "other", "no offsets"],
)
def test_a_damaged_folder_is_named(harm, tmp_path):
    some_pairs().save(tmp_path / "pairs")
    harm(tmp_path / "pairs")
    with pytest.raises(ValueError, match="pairs.*write it anew"):
        TokenPairs.load(tmp_path / "pairs")


def test_no_batch_of_nothing():
    with pytest.raises(ValueError, match="no rows"):
        make_batch(some_pairs(3), [])


@given(ROWS, st.integers(16, 60), st.integers(0, 3))
@EASY
def test_filling_is_greedy(rows, budget, seed):
    """The same batches as by trying each pair in turn."""
    pairs = token_pairs(rows)
    widths = np.maximum(pairs.src_lengths, pairs.tgt_lengths)
    order = np.argsort(widths, kind="stable")
    slow, now = [], []
    for i in order.tolist():
        if now and (len(now) + 1) * widths[i] > budget:
            slow, now = [*slow, now], []
        now.append(i)
    assert [b.tolist() for b in fill(order, widths[order], budget)] == [*slow, now]


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


# --- more than four billion tokens ---------------------------------------------------


def test_offsets_beyond_32_bits_while_writing(tmp_path):
    writer, many = PairWriter(tmp_path / "pairs", V), 2**32 - 3
    writer.add([[4, 5]], [[6]])
    writer.sizes["src"] += many  # as if so many had been written
    writer.add([[7, 8, 9], [10]], [[4], [5]])
    writer.sizes["src"] -= many
    writer.finish()
    offsets = np.load(tmp_path / "pairs" / "src_offsets.npy")
    assert offsets.dtype == np.int64
    assert offsets.tolist() == [0, 2, many + 5, many + 6] and offsets[-1] > 2**32


def test_reading_beyond_32_bits(tmp_path):
    """A file with a hole of eight billion bytes takes no room on the disk."""
    many, path = 2**32 + 5, tmp_path / "src.bin"
    with open(path, "wb") as file:
        file.truncate(2 * many)
        file.seek(2 * (many - 3))
        file.write(np.array([11, 12, 13], np.uint16).tobytes())
    assert path.stat().st_blocks * 512 < 1 << 20
    flat = np.memmap(path, np.uint16, "r")
    source = np.array([0, 2, 5, many - 3, many - 1, many], dtype=np.int64)
    pairs = TokenPairs(flat, source, *flatten([[4, 5]] * 5, V))
    assert pairs[3][0].tolist() == [11, 12] and pairs[-1][0].tolist() == [13]
    batch = make_batch(pairs, [4, 3])
    assert batch.src_ids.tolist() == [[13, EOS, PAD], [11, 12, EOS]]
    assert pairs.src_lengths.max() == many - 7
    with pytest.raises(ValueError, match=f"pair 2 has {many - 7} tokens"):
        plan_batches(pairs, 2**31 - 1)


# --- from text to disk ---------------------------------------------------------------


@given(st.lists(st.text(max_size=9), max_size=40), st.integers(1, 9))
@EASY
def test_pieces_are_the_stream(texts, size):
    pairs = [(text, text) for text in texts]
    pieces = list(pieces_of(iter(pairs), size, characters=30))
    assert [pair for piece in pieces for pair in piece] == pairs
    for piece in pieces:
        assert 0 < len(piece) <= size
        assert sum(2 * len(a) for a, _ in piece[:-1]) <= 30


def test_a_sample_is_bounded_whole_if_short_and_the_same_again():
    assert sample_pairs(iter(range(5)), 9) == [0, 1, 2, 3, 4]
    sample = sample_pairs(iter(range(1000)), 50, seed=3)
    assert len(set(sample)) == 50 and sample == sample_pairs(range(1000), 50, seed=3)
    assert sample != sample_pairs(range(1000), 50, seed=4)
    drawn = [x for seed in range(400) for x in sample_pairs(range(40), 10, seed)]
    times = np.bincount(drawn, minlength=40)
    assert times.min() > 60 and times.max() < 140  # 100 each; sqrt(75) to either side


def write_text(path, n, seed=0):
    """n lines of made-up sentences and their words in reverse order."""
    rng = random.Random(seed)
    words = "am ba co du el fi go ha in ja ko lu mo na or pu".split()
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(n):
            line = rng.choices(words, k=rng.randint(1, 9))
            file.write(" ".join(line) + "\t" + " ".join(reversed(line)) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "mine.tsv", 2000)


@pytest.fixture
def prepared(text, tmp_path):
    prepare(text, tmp_path / "data", vocab_size=300)
    return tmp_path / "data"


def snapshot(folder):
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def test_prepare_writes_what_tokenize_pairs_gives(text, prepared):
    done = load_prepared(prepared, verify=True)
    corpora = [module.load_corpus(text, split) for split in ("train", "valid")]
    for pairs, corpus in zip((done.train, done.valid), corpora, strict=True):
        wanted = tokenize_pairs(corpus.pairs, done.tokenizer)
        for name in module.ARRAYS:
            a, b = getattr(pairs, name), getattr(wanted, name)
            assert isinstance(a, np.memmap) and a.dtype == b.dtype
            assert np.array_equal(a, b)
    sides = [side for pair in corpora[0].pairs for side in pair]
    assert done.tokenizer.model == Tokenizer.train(sides, 300).model
    assert done.data["sha256"] == corpora[0].sha256
    assert done.data["train_pairs"] == len(corpora[0]) and "mine" in done.data["origin"]
    assert done.data["train_pairs"] + done.data["valid_pairs"] == 2000


def test_prepare_takes_a_sample_of_the_pairs(text, tmp_path):
    done = prepare(text, tmp_path / "a", 300, max_pairs=100)
    corpora = [module.load_corpus(text, split) for split in ("train", "valid")]
    some = module.sample_pairs(corpora[0].pairs, 100)
    wanted = tokenize_pairs(some, done.tokenizer)
    assert np.array_equal(done.train.tgt, wanted.tgt) and len(done.train) == 100
    assert len(done.valid) == len(corpora[1])
    sides = [side for pair in some for side in pair]
    assert done.tokenizer.model == Tokenizer.train(sides, 300).model
    with pytest.raises(ValueError, match="max_pairs is 100, asked for is 99"):
        prepare(text, tmp_path / "a", 300, max_pairs=99)


def test_further_copies_are_cut_anew_and_say_the_same(text, tmp_path):
    """Each copy decodes to the same sentences; the seed repeats the cuts to the bit."""
    plain = prepare(text, tmp_path / "plain", 300)
    drawn = prepare(text, tmp_path / "drawn", 300, sample=0.3, copies=3)
    again = prepare(text, tmp_path / "again", 300, sample=0.3, copies=3)
    assert drawn.tokenizer.model == plain.tokenizer.model
    assert np.array_equal(drawn.train.tgt, again.train.tgt)
    assert np.array_equal(drawn.valid.tgt, plain.valid.tgt)
    n = len(plain.train)
    assert len(drawn.train) == 3 * n and drawn.data["train_pairs"] == n
    assert drawn.data["sha256"] == plain.data["sha256"]
    copies = [[drawn.train[k * n + i] for i in range(n)] for k in range(3)]
    assert all(np.array_equal(a[0], plain.train[i][0]) for i, a in enumerate(copies[0]))
    differ = 0
    for i in range(n):
        said = {tuple(map(drawn.tokenizer.decode, map(list, c[i]))) for c in copies}
        assert len(said) == 1
        differ += len({tuple(c[i][1]) for c in copies}) > 1
    assert differ > n / 2
    with pytest.raises(ValueError, match="sample=2: must be from 0 to 1"):
        prepare(text, tmp_path / "no", 300, sample=2)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_prepare_is_the_same_for_any_threads_and_pieces(
    kind, text, tmp_path, monkeypatch
):
    prepare(text, tmp_path / "one", 280, kind, threads=1, sample_size=700)
    cut = module.pieces_of
    monkeypatch.setattr(module, "pieces_of", lambda pairs: cut(pairs, size=77))
    prepare(text, tmp_path / "two", 280, kind, threads=3, sample_size=700)
    assert snapshot(tmp_path / "one") == snapshot(tmp_path / "two")


def test_prepare_of_a_known_corpus_with_a_given_tokenizer(tokenizer, tmp_path):
    done = prepare("grammar-en-de", tmp_path / "a", tokenizer=tokenizer)
    assert (len(done.train), len(done.valid)) == (20_000, 500)
    assert done.tokenizer.model == tokenizer.model
    assert done.data["settings"]["vocab_size"] == tokenizer.vocab_size
    assert done.data["licence"].startswith("Apache")
    other = Tokenizer.train([s for p in grammar_split("train", 500) for s in p], 380)
    with pytest.raises(ValueError, match="tokenizer is"):
        prepare("grammar-en-de", tmp_path / "a", tokenizer=other)


def test_what_is_left_out_is_counted_and_numbered(tokenizer, tmp_path):
    lines = [("A dog.", "Ein Hund.")] * 300
    lines[3] = ("The dog sees the house. " * 9, "Der Hund sieht das Haus. " * 9)
    lines[7] = ("one two three four five six seven", "eins zwei drei")
    path = tmp_path / "mine.tsv"
    path.write_text("".join(f"{a}\t{b}\n" for a, b in lines), encoding="utf-8")
    corpus = {"train": str(path), "valid": str(path)}
    folder = tmp_path / "data"
    done = prepare(corpus, folder, tokenizer=tokenizer, max_length=40, max_words=6)
    data, first = done.data, {"over 40 tokens": [4], "over 6 words": [8]}
    assert data["train"]["left_out"] == {"over 40 tokens": 1, "over 6 words": 1}
    assert data["train"]["first_left_out"] == first
    assert data["train"]["read"] == 300 and data["train_pairs"] == 298
    assert "kept 300 of 300" in data["cleaning"]


def test_prepare_again_finds_it_done(text, prepared, monkeypatch):
    before = snapshot(prepared)
    monkeypatch.setattr(module, "write_prepared", None)
    prepare(text, prepared, vocab_size=300, threads=1)
    assert snapshot(prepared) == before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 290}, "vocab_size is 300, asked for is 290"),
        ({"max_length": 20}, "max_length is 128, asked for is 20"),
        ({"max_words": 5}, "max_words is None, asked for is 5"),
        ({"corpus": "grammar-en-de"}, "corpus is .*mine.tsv', asked for is 'grammar"),
    ],
)
def test_other_settings_are_refused(changes, said, text, prepared):
    before = snapshot(prepared)
    with pytest.raises(ValueError, match=said):
        prepare(**{"corpus": text, "folder": prepared, "vocab_size": 300} | changes)
    assert snapshot(prepared) == before


def test_a_text_that_has_changed_is_noticed(tmp_path):
    text = write_text(tmp_path / "mine.tsv", 500)
    prepare(text, tmp_path / "data", vocab_size=300)
    write_text(tmp_path / "mine.tsv", 501)
    with pytest.raises(ValueError, match="mine.tsv had .* bytes and has .* now"):
        prepare(text, tmp_path / "data", vocab_size=300)
    os.unlink(text)  # without the text, what was made of it can still be used
    assert len(prepare(text, tmp_path / "data", vocab_size=300).train) > 400


def test_a_folder_of_other_files_is_left_alone(text, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds other files"):
        prepare(text, tmp_path, vocab_size=300)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(ValueError, match="notes.txt is a file"):
        prepare(text, tmp_path / "notes.txt", vocab_size=300)


def test_a_folder_that_cannot_be_renamed_is_written_inside(
    text, tmp_path, monkeypatch
):
    """An empty one may be where a disk is mounted; what is there stays its own."""
    place, replace = tmp_path / "volume", os.replace
    (place / "lost+found").mkdir(parents=True)
    place.chmod(0o750)

    def busy(path, target):
        if place in (Path(path), Path(target)):
            raise OSError(errno.EBUSY, "Device or resource busy")
        replace(path, target)

    monkeypatch.setattr(module.os, "replace", busy)
    number = place.stat().st_ino
    prepare(text, place, vocab_size=300)
    assert place.stat().st_ino == number and place.stat().st_mode & 0o777 == 0o750
    names = {"data.json", "lost+found", "tokenizer.model", "train", "valid"}
    assert {path.name for path in place.iterdir()} == names
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == place)
    with module.whole_folder(place, "new") as part:
        (part / "new").write_text("x")
    assert {path.name for path in place.iterdir()} == {"lost+found", "new"}


def test_a_link_to_a_folder_stays_a_link(text, tmp_path):
    (tmp_path / "disk").mkdir()
    for name in "there", "not yet":
        (tmp_path / name).symlink_to(f"disk/{name}")
    (tmp_path / "disk" / "there").mkdir()
    for name in "there", "not yet":
        prepare(text, tmp_path / name, vocab_size=300)
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / "disk" / name / "data.json").is_file()


def test_a_place_that_cannot_be_written_is_said_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(module, "write_prepared", None)
    with pytest.raises(OSError, match="data could not be written .Not a directory"):
        prepare("grammar-en-de", tmp_path / "file" / "data", vocab_size=300)


def test_a_part_of_a_dead_process_is_swept_and_the_old_folder_brought_back(tmp_path):
    """It died between two renamings; then one between writing and renaming."""
    some_pairs(10).save(tmp_path / "pairs")
    os.rename(tmp_path / "pairs", tmp_path / ".pairs.old")
    (tmp_path / ".pairs.part").mkdir()
    (tmp_path / ".pairs.part" / "half").write_text("x")
    with pytest.raises(KeyError), module.whole_folder(tmp_path / "pairs"):
        raise KeyError
    assert len(TokenPairs.load(tmp_path / "pairs")) == 10
    assert [path.name for path in tmp_path.iterdir()] == ["pairs"]


@pytest.mark.parametrize(
    "changes", [{"vocab_size": 0}, {"max_length": 0}, {"threads": 0}, {"max_words": -1}]
)
def test_impossible_settings(changes, text, tmp_path):
    (name, value), = changes.items()
    with pytest.raises(ValueError, match=f"{name}={value}: must be at least 1"):
        prepare(text, tmp_path / "data", **changes)
    assert not list(tmp_path.iterdir())


def test_nothing_left_for_a_split_is_said(tokenizer, tmp_path):
    (tmp_path / "mine.tsv").write_text("a dog\tein Hund\n" * 9, encoding="utf-8")
    with pytest.raises(ValueError, match="no pair is left for the"):
        prepare(str(tmp_path / "mine.tsv"), tmp_path / "data", tokenizer=tokenizer)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.tsv"]


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_the_benchmark_runs(capsys):
    """benchmarks/prepare.py --quick gives figures for all three, and for more text."""
    pytest.importorskip("tokenizers")
    path = Path(__file__).parents[1] / "benchmarks" / "prepare.py"
    record = runpy.run_path(str(path))["main"](["--quick"])
    figures = record["texts"]["made up"]
    assert len(figures["jobs"]) == 3 and figures["repeated"]["pairs"] == 9000
    assert all(job["pairs_a_minute_median"] > 0 for job in figures["jobs"].values())
    assert "transformer_lib prepare" in capsys.readouterr().out


# --- damage, full disks, sudden death -------------------------------------------------


def names_of(folder):
    return [name for name in snapshot(folder) if name != "data.json"]


def test_any_flipped_byte_is_named(prepared):
    """One bit in each file: verify finds it, and says where."""
    names = names_of(prepared)
    assert len(names) == 11
    for name in names:
        path = prepared / name
        whole = path.read_bytes()
        place = random.Random(name).randrange(len(whole))
        flipped = bytes([whole[place] ^ 4])
        path.write_bytes(whole[:place] + flipped + whole[place + 1 :])
        with pytest.raises(ValueError, match=f"{name} is damaged.*Delete the folder"):
            load_prepared(prepared, verify=True)
        path.write_bytes(whole)
    load_prepared(prepared, verify=True)


@given(share=st.floats(0, 1), bit=st.integers(0, 7))
@EASY
def test_a_flipped_bit_in_data_json_is_noticed(share, bit, tmp_path_factory):
    folder = FLIPPED.get("folder")
    if folder is None:
        folder = FLIPPED["folder"] = tmp_path_factory.mktemp("flip") / "data"
        text = write_text(folder.parent / "mine.tsv", 500)
        prepare(text, folder, vocab_size=300)
        FLIPPED["whole"] = (folder / "data.json").read_bytes()
    whole = FLIPPED["whole"]
    place = int(share * (len(whole) - 1))
    changed = bytes([whole[place] ^ (1 << bit)])
    (folder / "data.json").write_bytes(whole[:place] + changed + whole[place + 1 :])
    try:
        data = load_prepared(folder).data
    except ValueError as error:
        assert "data.json is damaged" in str(error)
    else:  # white space between the values
        assert data == json.loads(whole)


FLIPPED = {}


@pytest.mark.parametrize("harm", ["cut", "longer", "missing", "empty"])
def test_a_cut_file_is_named_without_verify(harm, prepared):
    for name in names_of(prepared):
        path = prepared / name
        whole = path.read_bytes()
        path.write_bytes({"cut": whole[:-1], "longer": whole + b"x"}.get(harm, b""))
        if harm == "missing":
            path.unlink()
        said = "is missing" if harm == "missing" else "bytes instead of"
        with pytest.raises(ValueError, match=f"{name} .*{said}.*Delete the folder"):
            load_prepared(prepared)
        path.write_bytes(whole)


def test_nothing_there_is_said(tmp_path):
    with pytest.raises(ValueError, match="no prepared text"):
        load_prepared(tmp_path / "no")


def test_damage_is_noticed_by_prepare(text, prepared):
    path = prepared / "valid" / "tgt.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(ValueError, match="valid/tgt.npy is damaged"):
        prepare(text, prepared, vocab_size=300)


@pytest.mark.parametrize("after", [0, 1, 5, 9, 10, 12])
def test_a_disk_that_fills_up_is_said_and_leaves_nothing(
    after, text, tmp_path, monkeypatch
):
    done = []

    def fsync(handle):
        done.append(handle)
        if len(done) > after:
            raise OSError(errno.ENOSPC, "No space left on device")

    def append(self, name, array):
        if after == 0:
            fsync(0)
        write(self, name, array)

    write = PairWriter.append
    monkeypatch.setattr(module.os, "fsync", fsync)
    monkeypatch.setattr(PairWriter, "append", append)
    if after < 10:
        with pytest.raises(OSError, match="data could not be .*No space.*Free"):
            prepare(text, tmp_path / "data", vocab_size=300)
        assert not list(tmp_path.iterdir())
        monkeypatch.undo()
    assert len(prepare(text, tmp_path / "data", vocab_size=300).train) > 1900


def small_disk(path):
    """A disk of 64 kilobytes, where this may be mounted."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(path)]
    return shutil.which("mount") and not subprocess.run(
        command, capture_output=True
    ).returncode


def test_a_disk_that_is_really_full(text, tmp_path):
    disk = tmp_path / "disk"
    if not small_disk(disk):
        pytest.skip("no small disk can be mounted here")
    try:
        with pytest.raises(OSError, match="disk/data could not be .*No space"):
            prepare(text, disk / "data", vocab_size=300)
        assert not list(disk.iterdir())
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_any_moment_nothing_or_all_is_there(text, tmp_path, tokenizer):
    """SIGKILL ten times, at moments spread over a whole run; then it is finished."""
    settings = {"vocab_size": 300, "threads": 1}
    start = time.perf_counter()
    prepare(text, tmp_path / "undisturbed", **settings)
    whole = time.perf_counter() - start
    for k in range(10):
        process = os.fork()
        if process == 0:
            prepare(text, tmp_path / "data", **settings)
            os._exit(0)
        time.sleep(whole * (k + 1) / 10)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        try:
            load_prepared(tmp_path / "data", verify=True)
        except ValueError as error:
            assert "no prepared text" in str(error)
            assert not (tmp_path / "data").exists()
    prepare(text, tmp_path / "data", **settings)
    assert snapshot(tmp_path / "data") == snapshot(tmp_path / "undisturbed")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "undisturbed"]


@pytest.mark.skipif(not module.fcntl, reason="needs file locks")
def test_two_processes_that_prepare_the_same_folder(text, tmp_path):
    children = []
    for _ in range(3):
        children.append(os.fork())
        if children[-1] == 0:
            status = 1
            try:
                prepare(text, tmp_path / "data", vocab_size=300)
                status = 0
            finally:
                os._exit(status)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    load_prepared(tmp_path / "data", verify=True)
    assert [p.name for p in tmp_path.iterdir()] == ["data"]


MEASURE = """
import sys
from transformer_lib import batches
from transformer_lib.batches import prepare

cut = batches.pieces_of
batches.pieces_of = lambda pairs: cut(pairs, size=500)

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))

for n, text in enumerate(sys.argv[2:]):
    done = prepare(text, f"{sys.argv[1]}/{n}", 300, threads=1, sample_size=1000)
    print(done.data["train_pairs"], peak())
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_memory_does_not_grow_with_the_text(tmp_path):
    """Ten times the text: at most four megabytes more at the peak."""
    texts = [write_text(tmp_path / f"{n}.tsv", n) for n in (2000, 20_000)]
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "out"), *texts]
    (tmp_path / "out").mkdir()
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = [list(map(int, line.split())) for line in answer.splitlines()]
    (_, small), (pairs, large) = numbers
    held = pairs * 2 * (56 + 7 * 30)  # strings and lists of numbers
    assert large - small < 4_000 < held / 1024 / 2, answer  # kilobytes


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


# --- packed rows ---


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1),
       st.integers(9, 30))  # fmt: skip
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
    plan = [part.tolist() for part in plan_packed(pairs, budget, 3, epoch)]
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
    for planned in (plan_batches, plan_packed):
        with pytest.raises(ValueError, match="pair 1 has 13 tokens, more than max_tok"):
            planned(pairs, 12)
