"""Chapter 10: token pairs on disk, and the way there from any text."""

import errno
import json
import math
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import time
import warnings
import zipfile
from pathlib import Path

import filelock
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_pairs import V, some_pairs

from transformer_lib import storage
from transformer_lib.batches import (
    PairFilter,
    Prepared,
    TokenPairs,
    batches,
    make_batch,
    plan_batches,
    prepare,
    tokenize_pairs,
)
from transformer_lib.batches import prepared as room
from transformer_lib.batches.plan import flatten
from transformer_lib.batches.prepared import (
    PairWriter,
    load_pairs,
    pieces_of,
    sample_pairs,
    save_pairs,
)
from transformer_lib.corpora import grammar_split
from transformer_lib.decoding import Hypothesis
from transformer_lib.export import CTranslate2Model, OnnxModel, from_marian
from transformer_lib.runs import load_pretrained
from transformer_lib.storage import NotWritten
from transformer_lib.tokenizer import EOS, PAD, Tokenizer
from transformer_lib.translator import Translator, translate_lines

EASY = settings(max_examples=25)


@pytest.fixture(scope="module")
def tokenizer():
    pairs = grammar_split("train", 1000)
    return Tokenizer.train((side for pair in pairs for side in pair), 400)


@pytest.mark.parametrize("mmap", [True, False])
def test_saved_pairs_come_back(mmap, tmp_path):
    pairs = some_pairs()
    save_pairs(pairs, tmp_path / "deep" / "pairs")
    again = load_pairs(tmp_path / "deep" / "pairs", mmap=mmap)
    assert isinstance(again.src, np.memmap) == mmap
    for name in vars(pairs):
        a, b = getattr(pairs, name), getattr(again, name)
        assert a.dtype == b.dtype and np.array_equal(a, b)
    assert plan_batches(again, 300) == plan_batches(pairs, 300)
    first, same = next(batches(pairs, 300)), next(batches(again, 300))
    assert torch.equal(first.src_ids, same.src_ids)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["pairs"]


def test_saving_again_replaces(tmp_path):
    save_pairs(some_pairs(10), tmp_path / "pairs")
    save_pairs(some_pairs(20), tmp_path / "pairs")
    assert len(load_pairs(tmp_path / "pairs")) == 20
    assert [p.name for p in tmp_path.iterdir()] == ["pairs"]


@pytest.mark.parametrize("fails", ["save", "replace"])
def test_a_failed_save_leaves_what_was_there(fails, tmp_path, monkeypatch):
    save_pairs(some_pairs(10), tmp_path / "pairs")
    replace, done = storage.os.replace, []

    def full(*arguments):
        raise OSError(28, "No space left on device")

    def second_fails(a, b):
        done.append(a)
        if len(done) == 2:
            full()
        replace(a, b)

    if fails == "save":
        monkeypatch.setattr(room.np, "save", full)
    else:
        monkeypatch.setattr(storage.os, "replace", second_fails)
    with pytest.raises(OSError, match="No space"):
        save_pairs(some_pairs(20), tmp_path / "pairs")
    assert len(load_pairs(tmp_path / "pairs")) == 10
    assert [p.name for p in tmp_path.iterdir()] == ["pairs"]


@pytest.mark.parametrize(
    "harm",
    [
        lambda p: (p / "src.npy").unlink(),
        lambda p: (p / "tgt.npy").write_bytes((p / "tgt.npy").read_bytes()[:-40]),
        lambda p: (p / "src.npy").write_bytes(b""),
        lambda p: np.save(p / "tgt.npy", np.zeros(3, np.uint8)),
        lambda p: np.save(p / "src_offsets.npy", np.zeros(0, np.int64)),
    ],
    ids=["missing", "cut short", "empty", "other", "no offsets"],
)
def test_a_damaged_folder_is_named(harm, tmp_path):
    save_pairs(some_pairs(), tmp_path / "pairs")
    harm(tmp_path / "pairs")
    with pytest.raises(ValueError, match="pairs.*write it anew"):
        load_pairs(tmp_path / "pairs")


def test_a_link_where_a_part_belongs_is_refused(tmp_path):
    """What it leads to is somebody else's, and stays."""
    name, theirs = ".d.part", tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thesis").write_text("years")
    (tmp_path / name).symlink_to(theirs)
    with pytest.raises(NotWritten, match=f"{name} is a link.*Take the link away"):
        with storage.whole_folder(tmp_path / "d") as part:
            (part / "manifest.json").write_text("{}")
    assert [path.name for path in theirs.iterdir()] == ["thesis"]
    assert not (tmp_path / "d").exists() and (tmp_path / name).is_symlink()


@pytest.mark.parametrize("name", [".d.part/thesis", ".d.part"])
def test_a_part_of_somebody_else_is_refused(name, tmp_path):
    """Also a file; and what has another name is never touched."""
    for path in (tmp_path / name, tmp_path / ".d.old" / "thesis"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("years")
    said = r"\.d\.part (is a file|holds other files).*Move away"
    for _ in range(2):
        with pytest.raises(NotWritten, match=said):
            with storage.whole_folder(tmp_path / "d"):
                pass
    assert (tmp_path / name).read_text() == "years"
    (tmp_path / name).unlink()
    with storage.whole_folder(tmp_path / "d") as part:
        (part / "manifest.json").write_text("{}")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"d", ".d.old"} and (tmp_path / ".d.old" / "thesis").is_file()


def test_a_folder_that_another_process_fills_meanwhile(tmp_path, monkeypatch):
    """Its part is within it no longer; and it may be moved while one looks at it."""
    folder, calls = tmp_path / "d", []
    lock, is_free = filelock.lock_descriptor, storage.is_free
    folder.mkdir()

    def filled(handle, blocking):
        (folder / "manifest.json").write_text("theirs")
        return lock(handle, blocking=blocking)

    def moved(path):
        calls.append(path)
        if len(calls) == 4:
            raise FileNotFoundError(path)
        return is_free(path)

    monkeypatch.setattr(filelock, "lock_descriptor", filled)
    monkeypatch.setattr(storage, "is_free", moved)
    for text in "ours", "ours again":
        with storage.whole_folder(folder) as part:
            assert part.parent.name == ".d.part" and not (folder / ".part").exists()
            (part / "manifest.json").write_text(text)
        assert (folder / "manifest.json").read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["d"] and len(calls) > 4


# A shorter header, which ends within a bracket; ",i8" and "<m8" as the type.
@pytest.mark.parametrize("bit", [70, 172, 178])
def test_a_header_with_one_bit_turned_round_is_named(bit, tmp_path):
    """NumPy runs a header through Python's parser, whose errors are of other kinds."""
    save_pairs(some_pairs(), tmp_path / "pairs")
    path = tmp_path / "pairs" / "src_offsets.npy"
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    with pytest.raises(ValueError, match="pairs.*write it anew"):
        load_pairs(tmp_path / "pairs")


@pytest.mark.parametrize("seed", [-1, 2**32, 0.5])
def test_a_seed_that_is_none_is_refused(seed, tmp_path):
    with pytest.raises(ValueError, match=f"seed={seed}: must be a whole number from 0"):
        prepare("grammar-en-de", tmp_path / "data", seed=seed)
    assert not list(tmp_path.iterdir())


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
    done = Prepared.load(prepared, verify=True)
    corpora = [room.load_corpus(text, split) for split in ("train", "valid")]
    for pairs, corpus in zip((done.train, done.valid), corpora, strict=True):
        wanted = tokenize_pairs(corpus.pairs, done.tokenizer)
        for name in vars(pairs):
            a, b = getattr(pairs, name), getattr(wanted, name)
            assert isinstance(a, np.memmap) and a.dtype == b.dtype
            assert np.array_equal(a, b)
    sides = [side for pair in corpora[0].pairs for side in pair]
    learned = Tokenizer.train(sides, 300, normalize="nfc")
    assert done.tokenizer.model == learned.model
    assert done.data["sha256"] == corpora[0].sha256
    assert done.data["train_pairs"] == len(corpora[0]) and "mine" in done.data["origin"]
    assert done.data["train_pairs"] + done.data["valid_pairs"] == 2000


def test_prepare_takes_a_sample_of_the_pairs(text, tmp_path):
    done = prepare(text, tmp_path / "a", 300, max_pairs=100)
    corpora = [room.load_corpus(text, split) for split in ("train", "valid")]
    some = room.sample_pairs(corpora[0].pairs, 100)
    wanted = tokenize_pairs(some, done.tokenizer)
    assert np.array_equal(done.train.tgt, wanted.tgt) and len(done.train) == 100
    assert len(done.valid) == len(corpora[1])
    sides = [side for pair in some for side in pair]
    learned = Tokenizer.train(sides, 300, normalize="nfc")
    assert done.tokenizer.model == learned.model
    with pytest.raises(ValueError, match="max_pairs is 100, asked for is 99"):
        prepare(text, tmp_path / "a", 300, max_pairs=99)


def test_the_worst_are_dropped_and_what_cannot_be_scored_is_kept(text, tmp_path):
    """By hand: the score is the number of a pair; every second one has none."""
    count = iter(range(10**6))

    def score(piece):
        numbers = [next(count) for _ in piece]
        return [math.nan if n % 2 else n for n in numbers]

    plain = prepare(text, tmp_path / "plain", 300)
    noise = PairFilter("by hand", score, keep=0.9)
    done = prepare(text, tmp_path / "kept", 300, noise=noise)
    told = done.data["train"]["noise"]
    scored = -(-len(plain.train) // 2)
    assert told["scored"] == scored and told["dropped"] == round(0.1 * scored)
    rows = (tmp_path / "kept" / "dropped.tsv").read_text("utf-8").splitlines()
    numbers = [int(row.split("\t")[1]) for row in rows]
    assert numbers == [2 * i + 1 for i in range(told["dropped"])]  # counted from 1
    assert [row[1] for row in told["worst"]] == numbers[:5]
    assert len(done.train) == len(plain.train) - len(rows)
    assert len(done.valid) == len(plain.valid)
    never = PairFilter("by nobody", lambda piece: [math.nan] * len(piece))
    with pytest.raises(ValueError, match="by nobody can score none of the pairs"):
        prepare(text, tmp_path / "none", 300, noise=never)
    assert not (tmp_path / "none").exists()


def test_further_copies_are_cut_anew_and_say_the_same(text, tmp_path):
    """Each copy decodes to the same sentences; the seed repeats the cuts to the bit."""
    plain = prepare(text, tmp_path / "plain", 300)
    drawn = prepare(text, tmp_path / "drawn", 300, subword_sampling=0.3, copies=3)
    again = prepare(text, tmp_path / "again", 300, subword_sampling=0.3, copies=3)
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
    with pytest.raises(ValueError, match="subword_sampling=2: must be from 0 to 1"):
        prepare(text, tmp_path / "no", 300, subword_sampling=2)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_prepare_is_the_same_for_any_threads_and_pieces(
    kind, text, tmp_path, monkeypatch
):
    prepare(text, tmp_path / "one", 280, kind, threads=1, sample_size=700)
    cut = room.pieces_of
    monkeypatch.setattr(room, "pieces_of", lambda pairs: cut(pairs, size=77))
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
    monkeypatch.setattr(room, "PairWriter", None)
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


def test_a_text_that_has_changed_is_prepared_anew(tmp_path):
    """Also one of the same size: its checksum tells."""
    text = write_text(tmp_path / "mine.tsv", 500)
    prepare(text, tmp_path / "data", vocab_size=300)
    content = (tmp_path / "mine.tsv").read_text()
    changed = content.swapcase()
    assert len(changed.encode()) == len(content.encode()) and changed != content
    for now, kept in (changed, 500), (content + content, 1000):
        (tmp_path / "mine.tsv").write_text(now)
        with pytest.warns(UserWarning, match="mine.tsv has changed: .* is made anew"):
            done = prepare(text, tmp_path / "data", vocab_size=300)
        assert done.data["first_pair"][0] == now.split("\t")[0]
        assert done.data["cleaning"].startswith(f"mine.tsv: kept {kept:,} of")
        before = snapshot(tmp_path / "data")
        prepare(text, tmp_path / "data", vocab_size=300)
        assert snapshot(tmp_path / "data") == before
    os.unlink(text)  # without the text, what was made of it can still be used
    assert len(prepare(text, tmp_path / "data", vocab_size=300).train) > 400


def test_a_packed_text_that_has_changed_is_prepared_anew(tmp_path):
    text = write_text(tmp_path / "mine.tsv", 500)
    content = (tmp_path / "mine.tsv").read_text()
    inside = str(tmp_path / "mine.zip" / "a.tsv")
    for now in (content, content.swapcase()):
        with zipfile.ZipFile(tmp_path / "mine.zip", "w") as archive:
            archive.writestr("a.tsv", now)
        with warnings.catch_warnings(record=True):
            done = prepare(inside, tmp_path / "data", vocab_size=300)
        assert done.data["first_pair"][0] == now.split("\t")[0]
    assert text


def test_a_folder_of_other_files_is_left_alone(text, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds other files"):
        prepare(text, tmp_path, vocab_size=300)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(ValueError, match="notes.txt is a file"):
        prepare(text, tmp_path / "notes.txt", vocab_size=300)


def test_a_folder_that_cannot_be_renamed_is_written_inside(text, tmp_path, monkeypatch):
    """An empty one may be where a disk is mounted; what is there stays its own."""
    place, replace = tmp_path / "volume", os.replace
    (place / "lost+found").mkdir(parents=True)
    place.chmod(0o750)

    def busy(path, target):
        if place in (Path(path), Path(target)):
            raise OSError(errno.EBUSY, "Device or resource busy")
        replace(path, target)

    monkeypatch.setattr(storage.os, "replace", busy)
    number = place.stat().st_ino
    prepare(text, place, vocab_size=300)
    assert place.stat().st_ino == number and place.stat().st_mode & 0o777 == 0o750
    names = {"data.json", "lost+found", "tokenizer.model", "train", "valid"}
    assert {path.name for path in place.iterdir()} == names
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == place)
    with storage.whole_folder(place, "new") as part:
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
    monkeypatch.setattr(room, "PairWriter", None)
    with pytest.raises(OSError, match="data could not be written .Not a directory"):
        prepare("grammar-en-de", tmp_path / "file" / "data", vocab_size=300)


def test_a_part_of_a_dead_process_is_swept_and_the_old_folder_brought_back(tmp_path):
    """It died between two renamings; then one between writing and renaming."""
    save_pairs(some_pairs(10), tmp_path / "pairs")
    (tmp_path / ".pairs.part" / "new").mkdir(parents=True)
    (tmp_path / ".pairs.part" / "new" / "half").write_text("x")
    (tmp_path / ".pairs.part" / storage._OWN_MARK).touch()
    os.rename(tmp_path / "pairs", tmp_path / ".pairs.part" / "old")
    with pytest.raises(KeyError), storage.whole_folder(tmp_path / "pairs"):
        raise KeyError
    assert len(load_pairs(tmp_path / "pairs")) == 10
    assert [path.name for path in tmp_path.iterdir()] == ["pairs"]


def test_ctrl_c_between_two_renamings_leaves_the_old_folder(tmp_path, monkeypatch):
    save_pairs(some_pairs(10), tmp_path / "pairs")
    replace = os.replace

    def interrupted(path, target):
        if Path(path).name == "new":
            raise KeyboardInterrupt
        replace(path, target)

    monkeypatch.setattr(storage.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_pairs(some_pairs(7), tmp_path / "pairs")
    assert [path.name for path in tmp_path.iterdir()] == ["pairs"]
    assert len(load_pairs(tmp_path / "pairs")) == 10


OPENED = {  # all that read a folder which another process may be replacing
    "pairs": load_pairs,
    "prepared": Prepared.load,
    "model": load_pretrained,
    "translator": Translator.from_pretrained,
    "onnx": OnnxModel,
    "ctranslate2": CTranslate2Model,
    "marian": from_marian,
}


def replaced_and_killed(folder):
    """A process replaces a folder, and is killed between its two renamings."""
    if not (child := os.fork()):
        replace = os.replace

        def killed(path, target):
            if Path(path).name == "new":
                os.kill(os.getpid(), signal.SIGKILL)
            replace(path, target)

        try:
            storage.os.replace = killed
            with storage.whole_folder(folder) as part:
                (part / "new").write_text("x")
        finally:
            os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("kind", OPENED)
def test_who_reads_finds_the_old_folder_after_a_kill_between_two_renamings(
    kind, tmp_path
):
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in ("manifest.json", "recipe.json"):  # enough to be opened, and refused
        (folder / name).write_text("{}")
    replaced_and_killed(folder)
    assert {path.name for path in tmp_path.iterdir()} == {".mine.part"}
    with pytest.raises(ValueError, match="mine"):
        OPENED[kind](folder)
    assert (folder / "recipe.json").is_file()
    assert not (tmp_path / ".mine.part" / "old").exists()
    save_pairs(some_pairs(7), folder)  # and it can be replaced once more
    assert len(load_pairs(folder)) == 7
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_what_was_killed_is_whole_again(tmp_path):
    """By a link, too; and an old folder without a part is somebody else's."""
    pairs, link = tmp_path / "pairs", tmp_path / "link"
    save_pairs(some_pairs(10), pairs)
    link.symlink_to("pairs")
    replaced_and_killed(pairs)
    assert len(load_pairs(link)) == 10 and pairs.is_dir()
    os.rename(pairs, tmp_path / ".pairs.old")
    shutil.rmtree(tmp_path / ".pairs.part")
    with pytest.raises(ValueError, match="not a complete folder"):
        load_pairs(pairs)
    assert not pairs.exists() and (tmp_path / ".pairs.old").is_dir()


@pytest.mark.parametrize(
    "changes", [{"vocab_size": 0}, {"max_length": 0}, {"threads": 0}, {"max_words": -1}]
)
def test_impossible_settings(changes, text, tmp_path):
    ((name, value),) = changes.items()
    with pytest.raises(ValueError, match=f"{name}={value}: must be at least 1"):
        prepare(text, tmp_path / "data", **changes)
    assert not list(tmp_path.iterdir())


def test_more_threads_than_any_machine_has(text, tmp_path):
    with pytest.raises(ValueError, match="threads=9{12}: .*at most 1,024"):
        prepare(text, tmp_path / "data", threads=999_999_999_999)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("count", [2, 20])
def test_a_small_text_leaves_a_pair_to_validate_on(count, tokenizer, tmp_path):
    lines = "".join(f"a dog {i}\tein Hund {i}\n" for i in range(count))
    (tmp_path / "mine.tsv").write_text(lines, encoding="utf-8")
    said = f"only 1 of {count} pairs are held out .*--valid.*--share"
    with pytest.warns(UserWarning, match=said):
        done = prepare(tmp_path / "mine.tsv", tmp_path / "data", tokenizer=tokenizer)
    assert (len(done.train), len(done.valid)) == (count - 1, 1)


def test_many_lines_that_cannot_be_read(tmp_path):
    good = write_text(tmp_path / "mine.tsv", 300)
    content = (tmp_path / "mine.tsv").read_text()
    (tmp_path / "mine.tsv").write_text(content + "no tab\n" * 10)
    with pytest.warns(UserWarning, match="3% of lines cannot be read"):
        prepare(good, tmp_path / "data", vocab_size=300)
    (tmp_path / "mine.tsv").write_text(content + "no tab\n" * 100)
    with pytest.raises(ValueError, match="(?s)100 of 400 lines cannot be.*columns"):
        prepare(good, tmp_path / "other", vocab_size=300)
    assert not (tmp_path / "other").exists()
    table = {"train": good, "bad": "drop"}
    with pytest.warns(UserWarning, match="25% of lines"):
        assert len(prepare(table, tmp_path / "other", vocab_size=300).train) > 250


SCRIPTS = {
    "Chinese": ("你好，世界？是的！（真的）", "我去，你呢；好：坏。"),
    "Japanese": ("「はい」、そうです。〜", "ｶﾀｶﾅ　と　カタカナ"),
    "Persian": ("کتاب\u200cها را می\u200cخرد؟", "سیب\u200cهای سرخ، خانه"),
    "Hindi": ("क्\u200dष और क्\u200cष।", "यह घर है॥"),
    "French": ("Vraiment\u202f? «\u00a0Oui\u00a0»…", "L’œuvre n° 5½"),
}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("given", [None, "nfc"])
def test_own_text_comes_back_as_it_was_written(script, given, tmp_path):
    one, two = SCRIPTS[script]
    pairs = [(f"A dog {i}.", f"{i} {one} {two}") for i in range(99)]
    lines = "".join("\t".join(pair) + "\n" for pair in pairs)
    (tmp_path / "mine.tsv").write_text(lines, encoding="utf-8")
    spec = {"train": tmp_path / "mine.tsv", "share": 0.1, "max_ratio": 99}
    done = prepare(spec, tmp_path / "data", 340, normalize=given)
    again = Tokenizer.load(tmp_path / "data" / "tokenizer.model")
    assert done.data["settings"]["normalize"] == "nfc"
    for line in SCRIPTS[script]:
        for tokenizer in (done.tokenizer, again):
            assert tokenizer.decode(tokenizer.encode(line)) == line
    with pytest.raises(ValueError, match="normalize is 'nfc', asked for is None"):
        prepare(spec, tmp_path / "data", 340, normalize="nmt_nfkc")


def test_known_corpora_keep_the_rule_of_their_results(tokenizer, tmp_path):
    done = prepare("grammar-en-de", tmp_path / "data", 400)
    assert "normalize" not in done.data["settings"]
    said = done.tokenizer.decode(done.tokenizer.encode("ｗｉｄｅ，"))
    assert said == "wide,"
    with pytest.raises(ValueError, match="normalize='nfc': the tokenizer"):
        prepare("grammar-en-de", tmp_path / "x", tokenizer=tokenizer, normalize="nfc")


def test_sources_are_folded_as_translate_folds_what_it_is_given(tmp_path):
    """Trained and asked alike, whatever wrote the text; targets stay as they are."""
    typed = "It’s a\u00a0“dog”,\u200b he\u00adre {}."
    plain, target = 'It\'s a "dog", here {}.', "C’est un «\u00a0chien\u00a0» {}."
    for name, source in ("typed", typed), ("plain", plain):
        lines = "".join(f"{source.format(i)}\t{target.format(i)}\n" for i in range(200))
        (tmp_path / f"{name}.tsv").write_text(lines, encoding="utf-8")
    done, wanted, kept = (
        prepare(
            {"train": tmp_path / name, "valid": tmp_path / name},
            tmp_path / out,
            320,
            fold=fold,
        )
        for name, out, fold in (
            ("typed.tsv", "a", True),
            ("plain.tsv", "b", True),
            ("typed.tsv", "c", False),
        )
    )
    assert done.tokenizer.model == wanted.tokenizer.model
    for split in ("train", "valid"):
        pairs, others = getattr(done, split), getattr(wanted, split)
        assert np.array_equal(pairs.src, others.src)
        assert np.array_equal(pairs.tgt, others.tgt)
        counts = [ready.data[split]["folded"] for ready in (done, wanted, kept)]
        assert counts == [200, 0, 0]
    assert done.data["sha256"] == wanted.data["sha256"] != kept.data["sha256"]
    read = [done.tokenizer.decode(ids.tolist()) for ids in done.train[7]]
    assert read == [plain.format(7), target.format(7)]
    read = [kept.tokenizer.decode(ids.tolist()) for ids in kept.train[7]]
    assert read == [typed.format(7), target.format(7)]
    asked = []

    def decode(rows):
        asked.extend(rows)
        return [[Hypothesis([5], 0.0, 0.0)]] * len(rows)

    translate_lines([typed.format(7)], done.tokenizer, decode, by_sentence=False)
    assert asked == [done.train[7][0].tolist()]


def test_a_folder_from_before_sources_were_folded_is_refused(text, tmp_path):
    prepare(text, tmp_path / "old", 300, fold=False)
    before = snapshot(tmp_path / "old")
    with pytest.raises(ValueError, match="fold is None, asked for is True.*delete"):
        prepare(text, tmp_path / "old", 300)
    assert snapshot(tmp_path / "old") == before
    assert Prepared.load(tmp_path / "old").data["settings"].get("fold") is None


@pytest.mark.parametrize("name", ["src", "src_offsets"])
@pytest.mark.parametrize("value", [-1, 299_999, 60_000])
def test_numbers_out_of_range_with_right_checksums(name, value, text, tmp_path):
    folder = tmp_path / "data"
    prepare(text, folder, vocab_size=300)
    path = folder / "train" / f"{name}.npy"
    array = np.load(path)
    array[3] = np.array(value).astype(array.dtype)
    np.save(path, array)
    data = json.loads((folder / "data.json").read_text())
    data["files"][f"train/{name}.npy"] = storage.file_record(path)
    data["checksum"] = storage.table_checksum(data)
    (folder / "data.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="ids from|do not fit together"):
        Prepared.load(folder)


def test_all_is_on_the_disk_before_it_gets_its_name(text, tmp_path, monkeypatch):
    """Each file and folder is synced before the renaming, what it is in after it."""
    done, real, move = [], os.fsync, os.replace

    def note(handle):
        done.append(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    def renamed(old, new):
        done.append(("renamed", str(new)))
        move(old, new)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "replace", renamed)
    prepare(text, tmp_path / "data", vocab_size=300)
    at = done.index(("renamed", str(tmp_path / "data")))
    before = {str(path).split("/new/")[-1] for path in done[:at]}
    for path in (tmp_path / "data").rglob("*"):
        assert str(path.relative_to(tmp_path / "data")) in before
    assert str(tmp_path) in done[at:]


def test_what_a_killed_prepare_left_is_swept_by_the_next(text, tmp_path):
    for done in (False, True):
        if done:
            prepare(text, tmp_path / "data", vocab_size=300)
        for name in ("data", "other"):
            part = tmp_path / f".{name}.part"
            part.mkdir()
            (part / storage._OWN_MARK).touch()
            (part / "new").mkdir()
        prepare(text, tmp_path / "data", vocab_size=300)
        assert not (tmp_path / ".data.part").exists()
        assert (tmp_path / ".other.part").exists()  # somebody else's
        shutil.rmtree(tmp_path / ".other.part")
        shutil.rmtree(tmp_path / "data")


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


def names_of(folder):
    return [name for name in snapshot(folder) if name != "data.json"]


def test_any_flipped_byte_is_named(prepared):
    """One bit in each file: verify finds it, and says where."""
    names = names_of(prepared)
    assert len(names) == 9
    for name in names:
        path = prepared / name
        whole = path.read_bytes()
        place = random.Random(name).randrange(len(whole))
        flipped = bytes([whole[place] ^ 4])
        path.write_bytes(whole[:place] + flipped + whole[place + 1 :])
        with pytest.raises(ValueError, match=f"{name} is damaged.*Delete the folder"):
            Prepared.load(prepared, verify=True)
        path.write_bytes(whole)
    Prepared.load(prepared, verify=True)


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
        data = Prepared.load(folder).data
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
            Prepared.load(prepared)
        path.write_bytes(whole)


def test_nothing_there_is_said(tmp_path):
    with pytest.raises(ValueError, match="no prepared text"):
        Prepared.load(tmp_path / "no")


def test_damage_is_noticed_by_prepare(text, prepared):
    path = prepared / "valid" / "tgt.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(ValueError, match="valid/tgt.npy is damaged"):
        prepare(text, prepared, vocab_size=300)


@pytest.mark.parametrize("after", [0, 1, 5, 9, 12, 14, 99])
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
    monkeypatch.setattr(storage.os, "fsync", fsync)
    monkeypatch.setattr(PairWriter, "append", append)
    if after < 99:
        with pytest.raises(OSError, match="data could not be .*No space.*Free"):
            prepare(text, tmp_path / "data", vocab_size=300)
        assert not list(tmp_path.iterdir())
        monkeypatch.undo()
    assert len(prepare(text, tmp_path / "data", vocab_size=300).train) > 1900


@pytest.mark.parametrize("said", ["I/O error: No space left on device (os error 28)"])
def test_a_library_that_finds_the_disk_full_says_so_in_our_words(said, tmp_path):
    with pytest.raises(NotWritten, match="x could not be written .*Free some space"):
        with storage.whole_folder(tmp_path / "x"):
            raise RuntimeError(said)
    with pytest.raises(RuntimeError, match="something else"):
        with storage.whole_folder(tmp_path / "x"):
            raise RuntimeError("something else")
    assert not list(tmp_path.iterdir())


def small_disk(path):
    """A disk of 64 kilobytes, where this may be mounted."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(path)]
    return (
        shutil.which("mount")
        and not subprocess.run(command, capture_output=True).returncode
    )


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
            Prepared.load(tmp_path / "data", verify=True)
        except ValueError as error:
            assert "no prepared text" in str(error)
            assert not (tmp_path / "data").exists()
    prepare(text, tmp_path / "data", **settings)
    assert snapshot(tmp_path / "data") == snapshot(tmp_path / "undisturbed")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "undisturbed"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
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
    Prepared.load(tmp_path / "data", verify=True)
    assert [p.name for p in tmp_path.iterdir()] == ["data"]


MEASURE = """
import sys
from transformer_lib.batches import prepared
from transformer_lib.batches import prepare

cut = prepared.pieces_of
prepared.pieces_of = lambda pairs: cut(pairs, size=500)

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))

for n, text in enumerate(sys.argv[2:]):
    done = prepare(text, f"{sys.argv[1]}/{n}", 300, threads=1, sample_size=1000)
    print(done.data["train_pairs"], peak())
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_memory_does_not_grow_with_the_text(tmp_path):
    """Five times the text: the peak rises by less than half of what that holds."""
    texts = [write_text(tmp_path / f"{n}.tsv", n) for n in (10_000, 50_000)]
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "out"), *texts]
    (tmp_path / "out").mkdir()
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = [list(map(int, line.split())) for line in answer.splitlines()]
    (fewer, small), (pairs, large) = numbers
    held = (pairs - fewer) * 2 * (56 + 7 * 30)  # strings and lists of numbers
    assert large - small < held / 1024 / 2, answer  # kilobytes


@pytest.mark.skipif(os.name != "posix", reason="needs locks on folders")
def test_the_part_of_a_whole_folder_is_swept_where_nobody_works_in_it(tmp_path):
    whole, part = tmp_path / "data", tmp_path / ".data.part"
    for folder in whole, part, part / "old":
        folder.mkdir()
    (whole / "data.json").write_text("{}")
    (part / "notes").write_text("somebody's")
    storage.sweep_part(whole)
    assert (part / "notes").exists()  # not ours
    (part / "notes").rename(part / storage._OWN_MARK)
    with storage.claimed(part, folder=True):
        storage.sweep_part(whole)
        assert (part / "old").exists()  # a process is at work
    storage.sweep_part(whole)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    storage.sweep_part(whole)
