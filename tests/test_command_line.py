"""The command line: what a newcomer types, and what is said when it cannot be done."""

import contextlib
import io
import itertools
import json
import os
import re
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
import tomllib
import urllib.request
from pathlib import Path

import pytest
import sacrebleu
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sacrebleu.significance import PairedTest

from transformer_lib import machine
from transformer_lib.batches import Prepared
from transformer_lib.command_line import doctor, main
from transformer_lib.command_line import program as cli
from transformer_lib.corpora import grammar_split
from transformer_lib.evaluation import Score
from transformer_lib.export import exporter
from transformer_lib.fine_tuning import recipe_for
from transformer_lib.parsing import read_trees
from transformer_lib.runs import Recipe, Run, ready_data, settings_of
from transformer_lib.runs.checkpoints import load_tensors, save_tensors
from transformer_lib.storage import whole_file, write_manifest
from transformer_lib.translator import Translator

ROOT = Path(__file__).resolve().parents[1]
TINY = "model.d_model=32 model.d_ff=64 max_tokens=900 max_steps=6 validate_every=2"
TINY = [word for setting in TINY.split() for word in ("--set", setting)]
TRAIN = ["train", "small", "--data", "data", "--run", "run", *TINY]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two text files for training, two for testing, prepared and trained a little."""
    folder = tmp_path_factory.mktemp("cli")
    for split, size in (("train", 800), ("test", 12)):
        pairs = grammar_split(split, size)
        for side, ending in enumerate(("en", "de")):
            text = "".join(pair[side] + "\n" for pair in pairs)
            (folder / f"{split}.{ending}").write_text(text, encoding="utf-8")
    before = os.getcwd()
    os.chdir(folder)
    prepared = main(
        [
            "prepare",
            "--train",
            "train.en",
            "train.de",
            "--out",
            "data",
            "--vocab-size",
            "500",
            "--threads",
            "1",
        ]
    )
    trained = main(TRAIN)
    os.chdir(before)
    assert (prepared, trained) == (0, 0)
    return folder


@pytest.fixture
def at(place, monkeypatch):
    monkeypatch.chdir(place)
    return place


def piped(monkeypatch, content: bytes):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def pipe():
    """Both ends of one, for text."""
    return [open(end, mode) for end, mode in zip(os.pipe(), "rw", strict=True)]


def test_four_commands_make_a_translator(at, monkeypatch, capsys):
    record = json.loads((at / "data" / "data.json").read_text("utf-8"))
    assert record["train_pairs"] + record["valid_pairs"] == 800
    assert main(["average", "run", "--last", "2", "--out", "mine"]) == 0
    piped(monkeypatch, b"The dog sleeps.\n\nThe old woman sees the dog.\n")
    capsys.readouterr()
    assert main(["translate", "mine"]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert len(lines) == 4 and lines[1] == lines[3] == ""
    test = ["--test", "test.en", "test.de"]
    assert main(["evaluate", "mine", *test, "--json", "scores.json"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"BLEU +\d+\.\d\d +nrefs:1\|case:mixed", said) and "chrF2" in said
    scores = json.loads((at / "scores.json").read_text("utf-8"))
    assert len(scores["outputs"]) == scores["sentences"] == 12
    references = (at / "test.de").read_text("utf-8").splitlines()
    assert main(["evaluate", "mine", *test, "--compare", "scores.json"]) == 0
    assert "the same translations, line by line" in capsys.readouterr().out
    Path("other.json").write_text(json.dumps(scores | {"outputs": references}))
    assert main(["evaluate", "mine", *test, "--compare", "other.json"]) == 0
    beside = capsys.readouterr().out.split("Beside other.json")[1]
    found = re.findall(r"(?m)^(\S+) .* from 100.00 there.* p = ([\d.]+)$", beside)
    assert found == [("chrF++", "0.001"), ("BLEU", "0.001")]


def test_a_second_train_goes_on_and_another_recipe_is_refused(at, capsys):
    assert main(TRAIN) == 0
    assert "6 of 6 updates" in capsys.readouterr().out
    assert main([*TRAIN, "--set", "seed=5"]) == 2
    assert "another recipe" in capsys.readouterr().err


def test_train_draws_its_bar_on_a_terminal_alone(at, capsys, monkeypatch):
    """Both get a line for each validation, the moment that it is done."""
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    for name, ends in ("watched", os.openpty()), ("logged", os.pipe()):
        if name == "watched":
            termios.tcsetwinsize(ends[0], (24, 80))
        asked = [word if word != "run" else name for word in TRAIN]
        with open(ends[1], "w") as screen, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", screen)
            assert main(asked) == 0
        drawn = b""
        with contextlib.suppress(OSError):  # so ends a terminal
            while piece := os.read(ends[0], 1 << 16):
                drawn += piece
        os.close(ends[0])
        assert (b"6/6" in drawn) == (b"\r" in drawn) == (name == "watched"), drawn
        told = re.findall(r"(?m)^update +(\d) .* valid \d", capsys.readouterr().out)
        assert told == ["2", "4", "6"]


def test_minutes_that_are_up_end_a_run_with_a_checkpoint(at, capsys):
    """As on a machine that is lent for a while; the next call goes on from there."""
    asked = [word if word != "run" else "in-parts" for word in TRAIN]
    assert main([*asked, "--max-minutes", "0.0001"]) == 0
    assert "in-parts: 1 of 6 updates" in capsys.readouterr().out
    assert main(asked) == 0
    assert "in-parts: 6 of 6 updates" in capsys.readouterr().out
    whole, parts = (Run.load(at / n, "cpu", "last").model for n in ("run", "in-parts"))
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_run_from_before_fast_dropout_goes_on_as_it_began(at, capsys):
    """It is told how: the recipe small switches it on; a run keeps what it has."""
    assert Recipe.load("small").fast_dropout and Recipe.load("fine-tune").fast_dropout
    assert not Recipe("own", "grammar-en-de", 500).fast_dropout
    dropped = ["--set", "model.dropout=0.3"]
    plain = [*dropped, "--set", "fast_dropout=false"]
    asked = [word if word != "run" else "older" for word in TRAIN]
    assert main([*asked, *plain, "--max-minutes", "0.0001"]) == 0
    assert main([*asked, *dropped]) == 2
    assert "that run has fast_dropout=False" in capsys.readouterr().err
    assert main([*asked, *plain]) == 0
    whole = [word if word != "run" else "at-once" for word in TRAIN]
    assert main([*whole, *plain]) == 0
    runs = (Run.load(at / name, "cpu", "last") for name in ("older", "at-once"))
    weights = [list(run.model.parameters()) for run in runs]
    assert all(map(torch.equal, *weights))


def test_a_recipe_is_made_fit_for_what_was_prepared(at):
    """Also where it has a limit in words and the prepared text has none."""
    assert Recipe.load("table3-small").max_words
    recipe = recipe_for("table3-small", at / "data")
    assert len(ready_data(recipe, at / "never", at / "data").train) > 700
    assert recipe.max_words is None and recipe.vocab_size == 500


def test_translate_writes_one_line_for_each_whatever_it_says(at, capsys):
    odd = ["", " ", "🙂 🙂", "これは何ですか。", "a\u2028b", "\x00"]
    odd += ["x" * 900, "\ufeffHi.", "I am here. " * 700, "a\rb", "\x85", "last"]
    content = "\n".join(odd).encode() + b"\n\xff\xfe broken"
    (at / "odd.en").write_bytes(content)
    asked = ["translate", "run", "odd.en", "--beam-size", "1", "--output", "odd.de"]
    assert main(asked) == 0
    out = (at / "odd.de").read_text("utf-8").split("\n")
    assert out.pop() == "" and len(out) == len(odd) + 1
    assert out[0] == out[1] == out[5] == ""
    assert f"line {len(odd) + 1}: not UTF-8" in capsys.readouterr().err
    assert not list(at.glob("*.part"))


def test_translate_prints_candidates_beginnings_and_least_lengths(at, capsys):
    (at / "three.en").write_text("The dog sleeps.\n\nA cat sees the dog.\n")
    translator = Translator.from_pretrained(at / "run")
    asked = ["translate", "run", "three.en", "--engine", "torch", "--n-best", "2"]
    assert main(asked) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ["1", "1", "2", "3", "3"]
    assert rows[2] == ["2", "0.0000", ""]
    wanted = translator.n_best((at / "three.en").read_text().splitlines(), 2)
    assert rows == [
        [str(i), f"{one.score:.4f}", one.text]
        for i, some in enumerate(wanted, start=1)
        for one in some
    ]
    (at / "three.en").write_text("The dog sleeps.\n")
    asked = ["translate", "run", "three.en", "--prefix", "Die Katze", "--min-length"]
    assert main([*asked, "20"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("Die Katze") and "engine" not in said.err
    how = {"prefix": "Die Katze", "min_length": 20}
    assert said.out == translator("The dog sleeps.", **how) + "\n"
    assert main(["translate", "run", "three.en", "--ensemble", "run", "run"]) == 0
    alone = translator("The dog sleeps.")
    assert capsys.readouterr().out == alone + "\n"
    (at / "three.en").write_text("The <b>dog</b> sleeps.\n\n")
    asked = ["translate", "run", "three.en", "--alignment"]
    assert main([*asked, "--engine", "torch"]) == 0
    text, pairs = capsys.readouterr().out.splitlines()[0].split("\t")
    assert text.count("<b>") == text.count("</b>") == 1
    assert [pair.split("-")[1] for pair in pairs.split()] == [
        str(j) for j in range(len(text.split()))
    ]
    for words, telling in (
        (["--n-best", "5"], "n_best=5: must be from 1 to beam_size, here 4."),
        (["--n-best", "0"], 'Invalid value "0" for --n-best.'),
        (["--min-length", "-1"], 'Invalid value "-1" for --min-length.'),
        (["--ensemble", "tatoeba-en-de"], "another vocabulary than run"),
        (["--ensemble", "run", "--engine", "ctranslate2"], "needs the engine torch"),
    ):
        assert main(["translate", "run", "three.en", *words]) == 2
        said = capsys.readouterr()
        assert telling in said.err and not said.out


def test_translate_refuses_a_table_and_shows_a_line(at, capsys):
    (at / "two.tsv").write_text("A dog.\tEin Hund.\n" * 3)
    asked = ["translate", "run", "two.tsv", "--output", "two.de"]
    assert main(asked) == 2
    said = capsys.readouterr()
    assert "two.tsv has columns" in said.err and "1: 'A dog.'; 2: 'Ein H" in said.err
    assert not said.out and not (at / "two.de").exists()


def test_prepare_finds_columns_and_says_what_it_read(at, capsys):
    """A table with ids, a small text, a rule for punctuation: all by options."""
    rows = [f"{i}\tA dog {i}.\t{i + 9}\t犬，{i}？\n" for i in range(60)]
    (at / "ids.tsv").write_text("".join(rows), "utf-8")
    small = ["--vocab-size", "340"]
    assert main(["prepare", "--train", "ids.tsv", "--out", "found", *small]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("first pair: 'A dog 0.' -> '犬，0？'\n")
    assert "ids.tsv: kept 60 of 60 lines" in said.out and "held out" in said.err
    found = Prepared.load(at / "found").tokenizer
    assert found.decode(found.encode("犬，7？")) == "犬，7？"
    other = ["--columns", "4,2", "--share", "0.3", "--normalize", "nmt_nfkc"]
    asked = ["prepare", "--train", "ids.tsv", "--out", "asked", *small, *other]
    assert main(asked) == 0
    said = capsys.readouterr()
    assert said.out.startswith("first pair: '犬，0？' -> 'A dog 0.'\n")
    prepared = Prepared.load(at / "asked")
    assert len(prepared.valid) > 9
    assert prepared.tokenizer.decode(prepared.tokenizer.encode("犬，7？")) == "犬,7?"
    (at / "two.tsv").write_text("".join(f"{i}\tA dog.\n" for i in range(9)))
    assert main(["prepare", "--train", "two.tsv", "--out", "no", *small]) == 2
    said = capsys.readouterr().err
    assert "column 1 holds numbers" in said and "--columns" in said
    assert not (at / "no").exists()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--columns", "2"),
        ("--columns", "0,1"),
        ("--columns", "a,"),
        ("--share", "0"),
        ("--share", "2"),
        ("--share", "x"),
        ("--normalize", "nfd"),
        ("--from", ""),
        ("--bad", "none"),
        ("--threads", "999999999999"),
    ],
)
def test_options_of_prepare_that_cannot_be(option, value, at, capsys):
    words = ["prepare", "--train", "train.en", "train.de", "--out", "never"]
    assert main([*words, option, value]) == 2
    said = capsys.readouterr().err
    assert option.strip("-") in said and "Traceback" not in said
    assert not (at / "never").exists()


def test_prepare_says_and_refuses_what_it_cannot_read(at, capsys):
    lines = [f"A dog {i}.\tEin Hund {i}.\n" for i in range(300)]
    (at / "bad.tsv").write_text("".join(lines) + "no tab\n" * 100)
    asked = ["prepare", "--train", "bad.tsv", "--out", "bad", "--vocab-size", "300"]
    assert main(asked) == 2
    said = capsys.readouterr().err
    assert "100 of 400 lines cannot be read" in said and "--bad drop" in said
    assert main([*asked, "--bad", "drop"]) == 0
    said = capsys.readouterr()
    assert "25% of lines cannot be read" in said.err
    assert "100 columns" in said.out and "kept 300 of 400" in said.out


def test_evaluate_and_diagnose_say_what_they_leave_out(at, capsys):
    """Lines that are not UTF-8 or have no other side: on the screen, in JSON."""
    for name in ("test.en", "test.de"):
        lines = (at / name).read_bytes().splitlines(keepends=True)
        lines[2] = b"caf\xe9\n" if name.endswith("de") else lines[2]
        lines[5] = b"\n" if name.endswith("en") else lines[5]
        (at / f"bad-{name}").write_bytes(b"".join(lines * 4))
    asked = ["run", "--test", "bad-test.en", "bad-test.de", "--bad", "drop"]
    fast = ["--beam-size", "1", "--json", "bad.json"]
    assert main(["evaluate", *asked, *fast]) == 0
    told = capsys.readouterr().out
    assert "bad-test.en and bad-test.de: kept 40 of 48 lines" in told
    assert re.search(r"4 not UTF-8 +line 3, 15", told)
    record = json.loads((at / "bad.json").read_text("utf-8"))
    assert (record["sentences"], record["lines"]) == (40, 48)
    assert record["left_out"] == {"not UTF-8": 4, "one side empty": 4}
    assert record["first_left_out"]["one side empty"] == [6, 18, 30, 42]
    assert main(["diagnose", *asked, "--data", "data", "--sentences", "4"]) in (0, 1)
    assert "kept 40 of 48 lines" in capsys.readouterr().out


def test_evaluate_scores_what_it_is_given(at, capsys):
    """Files with --valid need no --split; swapped files are noticed."""
    fast = ["--beam-size", "1", "--engine", "torch"]
    given = ["evaluate", "tatoeba-en-de", *fast]
    assert main([*given, "--valid", "test.en", "test.de"]) == 0
    said = capsys.readouterr()
    assert "12 sentences" in said.out and "swapped" not in said.err
    assert main([*given, "--test", "test.de", "test.en"]) == 0
    assert "are source and target swapped?" in capsys.readouterr().err


def test_prepare_notices_swapped_and_equal_files(at, tmp_path, capsys):
    """With the model that ships, to which the direction is known."""
    asked = ["prepare", "--from", "tatoeba-en-de", "--threads", "1", "--train"]
    for files, said in (
        (("test.en", "test.de"), (False, False)),
        (("test.de", "test.en"), (True, False)),
        (("test.en", "test.en"), (False, True)),
    ):
        assert main([*asked, *files, "--out", str(tmp_path / "-".join(files))]) == 0
        told = "".join(capsys.readouterr())
        assert ("target swapped?" in told, "same text" in told) == said


def test_a_folder_of_runs_names_them(at, tmp_path, capsys):
    (tmp_path / "mine").symlink_to(at / "run")
    assert main(["translate", str(tmp_path)]) == 2
    assert "holds no model: give" in (said := capsys.readouterr().err)
    assert f"In it is {tmp_path / 'mine'}." in said


def test_evaluate_takes_several_references(at, capsys):
    """They count as in sacreBLEU, and lines that do not belong together are refused."""
    first, other = ((at / name).read_text("utf-8") for name in ("test.de", "test.en"))
    Path("second.de").write_text(other, "utf-8")
    asked = ["evaluate", "run", "--beam-size", "1", "--test", "test.en", "test.de"]
    assert main([*asked, "second.de", "--json", "two.json"]) == 0
    said = capsys.readouterr().out
    record = json.loads(Path("two.json").read_text())
    lists = [text.splitlines() for text in (first, other)]
    for name, metric in (
        ("chrF++", sacrebleu.CHRF(word_order=2)),
        ("BLEU", sacrebleu.BLEU()),
    ):
        want = metric.corpus_score(record["outputs"], lists).score
        assert record[name]["value"] == want and f"{name:8}{want:7.2f}  nrefs:2" in said
    assert main([*asked, "second.de", "--compare", "two.json"]) == 0
    Path("short.de").write_text("\n".join(lists[0][1:]), "utf-8")
    assert main([*asked, "short.de"]) == 2
    assert "test.en has 12 lines and short.de has 11" in capsys.readouterr().err
    Path("gap.de").write_text(first.replace(lists[0][4], "", 1), "utf-8")
    assert main([*asked, "gap.de"]) == 2
    assert "gap.de lacks other lines than test.de" in capsys.readouterr().err


def test_evaluate_compares_by_all_references(at, capsys, monkeypatch):
    """As sacreBLEU's paired bootstrap does; by the first alone, the other is better."""
    first = (at / "test.de").read_text("utf-8").splitlines()
    here = [" ".join(line.split()[::-1]) for line in first]
    there = [" ".join(line.split()[:-1]) for line in first]
    Path("turned.de").write_text("".join(line + "\n" for line in here), "utf-8")
    here[:2] = ["Nein.", "Nein."]
    monkeypatch.setattr(Translator, "__call__", lambda *_, **__: here)
    asked = ["evaluate", "run", "--engine", "torch", "--test", "test.en", "test.de"]
    assert main([*asked, "--json", "first.json"]) == 0
    record = json.loads(Path("first.json").read_text())
    Path("there.json").write_text(json.dumps(record | {"outputs": there}))
    asked += ["turned.de"]
    signs = {}
    for count in (1, 2):
        capsys.readouterr()
        assert main([*asked[: 6 + count], "--compare", "there.json"]) == 0
        beside = capsys.readouterr().out.split("Beside there.json:")[1]
        lists = [first, Path("turned.de").read_text("utf-8").splitlines()][:count]
        metrics = {"chrF2++": sacrebleu.CHRF(word_order=2), "BLEU": sacrebleu.BLEU()}
        both = [("there", there), ("here", here)]
        theirs = PairedTest(both, metrics, lists, "bs", 1000)()[1]
        for name in ("chrF++", "BLEU"):
            line = re.search(rf"(?m)^{re.escape(name)} .*$", beside)[0]
            gain, score, p = (
                float(re.search(pattern, line)[1])
                for pattern in (r" ([+-]\S+) ", r"from (\S+) there", r"p = (\S+)$")
            )
            base, other = theirs[name.replace("++", "2++")]
            assert score == pytest.approx(base.score, abs=0.006)
            assert gain == pytest.approx(other.score - base.score, abs=0.006)
            assert p == pytest.approx(other.p_value, abs=0.01)
            signs[name, count] = gain > 0
    assert signs["BLEU", 2] and not signs["BLEU", 1]


def test_evaluate_asks_comet_where_it_is_installed(at, capsys, monkeypatch):
    asked = ["evaluate", "run", "--beam-size", "1", "--test", "test.en", "test.de"]
    monkeypatch.setitem(sys.modules, "comet", None)
    assert main([*asked, "--comet"]) == 2
    assert "pip install unbabel-comet" in capsys.readouterr().err
    names = []

    def scorer(name, gpus):
        names.append(name)
        return lambda sources, outputs, references: Score(0.5, "model:it")

    monkeypatch.setattr("transformer_lib.evaluation.comet_scorer", scorer)
    assert main([*asked, "--comet"]) == 0
    assert "COMET    0.5000  model:it" in capsys.readouterr().out
    assert main([*asked, "--comet", "mine.ckpt", "--json", "judged.json"]) == 0
    assert names == ["Unbabel/wmt22-comet-da", "mine.ckpt"]
    assert json.loads(Path("judged.json").read_text())["COMET"]["value"] == 0.5


def test_evaluate_says_which_tokens_it_counts(at, capsys, monkeypatch):
    """A perfect system has 100 in any script."""
    lines = ["今日は雨が降っています。", "駅はどこですか。"]
    (at / "two.ja").write_text("".join(line + "\n" for line in lines), "utf-8")
    monkeypatch.setattr(Translator, "__call__", lambda *_, **__: lines)
    asked = ["evaluate", "run", "--test", "two.ja", "two.ja"]
    assert main(asked) == 0
    said = capsys.readouterr().out
    assert re.search(r"BLEU +100.00 .*tok:char", said)
    assert "tokenize char: the references have no spaces" in said
    assert main([*asked, "--tokenize", "13a", "--json", "j.json"]) == 0
    assert "char suits them" in capsys.readouterr().out
    assert json.loads((at / "j.json").read_text())["BLEU"]["tokenize"] == "13a"
    assert main([*asked, "--tokenize", "klingon"]) == 2
    assert "must be one of none, zh, 13a" in capsys.readouterr().err


def test_prepare_says_what_it_left_out(at, capsys):
    """Cleaning keeps a line that is too long in pieces; what then goes is said."""
    lines = (at / "train.en").read_text("utf-8").splitlines()
    long = " ".join(lines[:9])
    for name in "long.en", "long.de":
        (at / name).write_text("".join(f"{line}\n" for line in [long, *lines]))
    typed = "".join(f"It’s “{line}”\n" for line in lines[:3])
    with open(at / "long.en", "a", encoding="utf-8") as file:
        file.write(typed)
    with open(at / "long.de", "a", encoding="utf-8") as file:
        file.write(typed)
    asked = ["prepare", "--train", "long.en", "long.de", "--vocab-size", "500"]
    valid = ["--valid", "test.en", "test.de", "--threads", "1", "--max-length"]
    assert main([*asked, *valid, "60", "--out", "cut"]) == 0
    said = capsys.readouterr().out
    assert "1 left out of train: over 60 tokens (pair 1)" in said
    assert "\n3 sources of train are written with plain quotes and spaces, " in said
    assert main([*asked, *valid, "1", "--out", "none"]) == 2
    said = capsys.readouterr().err
    assert "no pair is left for the train split" in said and "--valid" in said
    assert not (at / "none").exists()


def test_prepare_accounts_for_every_pair(at, capsys):
    """What is neither trained nor validated on is left out, and that is said."""
    lines = (at / "train.en").read_text("utf-8").splitlines()
    german = (at / "train.de").read_text("utf-8").splitlines()[:20]
    rows = [f"{line} {i}\t{german[i % 20]}\n" for i, line in enumerate(lines)]
    (at / "shared.tsv").write_text("".join(rows), encoding="utf-8")
    asked = ["prepare", "--train", "shared.tsv", "--vocab-size", "500"]
    assert main([*asked, "--threads", "1", "--out", "shared"]) == 0
    said = capsys.readouterr().out
    wanted = (
        r"first pair: .*\nshared.tsv: kept ([\d,]+) of .*\n"
        r"of these, (\d+) left out of train: target "
        r"held out to validate on\n(\d+) pairs to train on and (\d+) to validate on"
    )
    numbers = re.match(wanted, said).groups()
    kept, left, train, valid = (int(n.replace(",", "")) for n in numbers)
    assert kept == len(lines) == left + train + valid and left > 100


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["diagnose", "m", "--sentences", "0"], '"0" for --sentences. Must be >= 1'),
        (["diagnose", "m", "--sentences", "-5"], '"-5" for --sentences. Must be >= 1'),
        (["diagnose", "m", "--sentences", "1.5"], "'1.5' is no whole number"),
        (
            ["ablate", "m", "--out", "o", "--seeds", "1", "1.5"],
            "'1.5' is no whole number",
        ),
        (
            ["train", "small", "--run", "r", "--max-minutes", "nan"],
            '"nan" for --max-minutes. Must be > 0',
        ),
    ],
)
def test_numbers_that_make_no_sense_are_refused(asked, said, capsys):
    assert main(asked) == 2
    assert said in capsys.readouterr().err


def test_an_empty_file_to_validate_on_is_named(at, capsys):
    (at / "nothing").write_text("")
    asked = ["prepare", "--train", "test.en", "test.de", "--vocab-size", "320"]
    assert main([*asked, "--valid", "nothing", "nothing", "--out", "none"]) == 2
    said = capsys.readouterr().err
    assert "for the valid split: 0 were read. Give more text" in said
    assert "nothing and nothing: kept 0 of 0 lines" in said
    assert not (at / "none").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["train", "small", "--run", ""],
        ["prepare", "--out", " ", "--corpus", "x"],
        ["translate", "run", "--output", ""],
        ["average", "run", "--out", ""],
        ["train", "--run", "r", "--from", ""],
    ],
)
def test_an_empty_name_is_not_the_current_folder(at, words, capsys):
    assert main(words) == 2
    option = words[-2] if words[0] != "prepare" else "--out"
    said = capsys.readouterr().err
    assert f"Invalid value for {option}: the name is empty" in said


WRITING = {
    "--output": ["translate", "run", "one.en", "--beam-size", "1"],
    "--json": ["evaluate", "run", "--test", "one.en", "one.en", "--beam-size", "1"],
    "--record": [
        "ablate",
        "small",
        "--rows",
        "base",
        "--data",
        "data",
        *TINY,
        "--out",
        "ablated",
        "--sentences",
        "2",
    ],
}


@pytest.mark.parametrize("option", WRITING)
def test_what_is_written_to_keeps_its_kind_and_its_permissions(at, option, tmp_path):
    """Links, pipes, devices, a mode of 640; and nobody's NAME.part is touched."""
    (at / "one.en").write_text("The dog sleeps.\n")
    kept, pipe = tmp_path / "kept", tmp_path / "pipe"
    kept.write_text("old")
    kept.chmod(0o640)
    (tmp_path / "link").symlink_to("kept")
    (tmp_path / "link.part").symlink_to("kept.part")
    (tmp_path / "kept.part").write_text("mine")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for target in tmp_path / "link", pipe, "/dev/null":
        assert main([*WRITING[option], option, str(target)]) == 0
    content = os.read(reader, 1 << 20).decode()
    os.close(reader)
    assert content.endswith("\n") and kept.read_text() not in ("old", "")
    assert kept.stat().st_mode & 0o777 == 0o640 and pipe.is_fifo()
    assert Path("/dev/null").is_char_device() and (tmp_path / "link").is_symlink()
    assert (tmp_path / "kept.part").read_text() == "mine"
    assert (tmp_path / "link.part").is_symlink()
    names = {"kept", "kept.part", "link", "link.part", "pipe"}
    assert {path.name for path in tmp_path.iterdir()} == names


COMMANDS = [name for name in cli.app if not name.startswith("-")]
ALL_OPTIONS = {  # command, option -> whether it takes a value
    (command, argument.name): argument.hint is not bool
    for command in COMMANDS
    for argument in cli.app[command].assemble_argument_collection()
    if argument.name.startswith("--")
}
OPTIONS = [option for option, takes_value in ALL_OPTIONS.items() if takes_value]

DATA = ["--data", "data"]
EARLY = {  # command, where it writes -> the rest of what is asked, and the work
    ("prepare", "--out"): (["--corpus", "grammar-en-de"], "tokenizer.Tokenizer.train"),
    ("train", "--run"): (["small", *DATA, *TINY], "runs.setup.ready_data"),
    ("average", "--out"): (["run"], "runs.folder.average_checkpoints"),
    ("translate", "--output"): (
        ["run", "one.en"],
        "translator.Translator.stream_n_best",
    ),
    ("evaluate", "--json"): (
        ["run", "--test", "one.en", "one.en"],
        "translator.Translator.from_pretrained",
    ),
    ("ablate", "--out"): (["small", *DATA, *TINY], "ablations.ablate"),
    ("ablate", "--record"): (["small", *DATA, *TINY, "--out", "x"], "ablations.ablate"),
    ("export", "--out"): (["run"], "runs.load_pretrained"),
}


@pytest.mark.parametrize(("command", "option"), EARLY)
def test_an_unwritable_place_is_said_before_the_work(
    at, command, option, monkeypatch, capsys, tmp_path
):
    (at / "one.en").write_text("The dog sleeps.\n")
    (tmp_path / "file").write_text("a file, and no folder")
    asked, work = EARLY[command, option]
    worked = []
    monkeypatch.setattr(f"transformer_lib.{work}", lambda *_, **__: worked.append(1))
    assert main([command, *asked, option, str(tmp_path / "file" / "x")]) == 2
    assert not worked and "Not a directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with contextlib.suppress(Exception):  # where it can be written, the work begins
        main([command, *asked, option, str(tmp_path / "new")])
    assert worked


def test_no_place_that_is_written_to_is_left_out():
    places = {"--out", "--output", "--json", "--record", "--run"}
    assert {(c, option) for c, option in ALL_OPTIONS if option in places} == set(EARLY)


PROGRAMS = [
    path
    for path in sorted(ROOT.glob("benchmarks/*.py"))
    if '"--out"' in path.read_text("utf-8")
]
PROGRAMS.append(ROOT / "experiments" / "evidence.py")


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_programs_say_at_once_that_their_record_cannot_be_written(
    path, monkeypatch, capsys, tmp_path
):
    (tmp_path / "file").write_text("a file, and no folder")
    words = ["table3-small"] if path.stem == "evidence" else []
    words += ["--out", str(tmp_path / "file" / "x.json")]
    monkeypatch.setattr(sys, "argv", [path.name, *words])
    monkeypatch.syspath_prepend(str(path.parent))
    with pytest.raises((SystemExit, OSError)) as said:
        runpy.run_path(str(path), run_name="__main__")
    said = str(said.value) + capsys.readouterr().err
    assert "could not be written (Not a directory)" in said
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(lines=st.lists(st.text(max_size=30).filter(lambda t: "\n" not in t), max_size=4))
def test_any_lines_come_back_as_many(at, lines):
    content = "".join(line + "\n" for line in lines).encode("utf-8", "replace")
    (at / "any.en").write_bytes(content)
    asked = ["translate", "run", "any.en", "--beam-size", "1", "--output", "any.de"]
    odd = len(re.findall(rb"[\x00-\x08\x0e-\x1a\x7f]", content))
    if odd > max(9, len(content) / 25):  # a file of control characters is no text
        assert main(asked) == 2
        return
    assert main(asked) == 0
    assert (at / "any.de").read_bytes().count(b"\n") == len(lines)


def test_parse_writes_one_tree_for_each_line(monkeypatch, capsys):
    piped(monkeypatch, b"The mice were small.\n\nWe found it (Figure 2).\r\n")
    assert main(["parse", "--beam-size", "1"]) == 0
    first, empty, last = capsys.readouterr().out.splitlines()
    assert empty == "" and first.startswith("(TOP ") and last.endswith(")")
    (tree,) = read_trees([first])
    assert tree.words == ["The", "mice", "were", "small", "."]
    (tree,) = read_trees([last])
    assert tree.words == ["We", "found", "it", "-LRB-", "Figure", "2", "-RRB-", "."]


def test_translate_answers_before_the_input_ends(at, monkeypatch):
    """A line typed into a pipe is answered while the pipe is still open."""
    (given, question), (answer, made) = pipe(), pipe()
    monkeypatch.setattr(sys, "stdin", given)
    monkeypatch.setattr(sys, "stdout", made)
    said = []

    def ask():
        print("The dog sleeps.", file=question, flush=True)
        if select.select([answer], [], [], 120)[0]:
            said.append(answer.readline())
        question.close()

    asking = threading.Thread(target=ask)
    asking.start()
    assert main(["translate", "run", "--beam-size", "1"]) == 0
    asking.join()
    made.close()
    with given, answer:
        assert len(said) == 1 and said[0].endswith("\n") and answer.read() == ""


SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


def started(at, *words):
    """The program with a pipe to its input that stays open, where signals are new."""
    return subprocess.Popen(
        [sys.executable, "-m", "transformer_lib", *words],
        cwd=at,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: [signal.signal(kind, signal.SIG_DFL) for kind in SIGNALS],
    )


@pytest.mark.parametrize("kind", SIGNALS)
def test_a_signal_ends_what_waits_for_input(at, kind):
    with started(at, "translate", "run", "-", "--beam-size", "1") as program:
        program.stdin.write("The dog sleeps.\n")
        program.stdin.flush()
        assert program.stdout.readline().endswith("\n")
        program.send_signal(kind)
        assert program.wait(300) == SIGNALS[kind]
        *notes, last = program.stderr.read().splitlines()
    # The run's translations never end, it says.
    assert all("line 1 has a" in note for note in notes)
    wanted = "interrupted." if kind == signal.SIGINT else "line 1 has a"
    assert last.startswith(f"transformer-lib: {wanted}")


def test_an_error_ends_what_waits_for_input(at):
    """Also while a thread still reads: a beam that cannot be, a reader that leaves."""
    with started(at, "translate", "run", "--beam-size", "0") as program:
        program.stdin.write("The dog sleeps.\n")
        program.stdin.flush()
        assert program.wait(300) == 2
        assert program.stderr.read().startswith("transformer-lib: beam_size=0")
    with started(at, "translate", "run", "--beam-size", "1") as program:
        program.stdout.close()
        program.stdin.write("The dog sleeps.\n")
        program.stdin.flush()
        assert program.wait(300) == 0
        assert all("line 1 has a" in note for note in program.stderr)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", SIGNALS)
def test_a_signal_ends_each_command_in_order(command, kind, monkeypatch, tmp_path):
    """Nothing half-written stays, and afterwards the signal does what it did."""
    outside = signal.getsignal(kind)  # what started in the background ignores SIGINT
    usual = signal.default_int_handler if kind == signal.SIGINT else signal.SIG_DFL
    signal.signal(kind, usual)

    def work():
        with whole_file(tmp_path / "result", "w"):
            os.kill(os.getpid(), kind)
            time.sleep(60)

    monkeypatch.setattr(cli.app[command], "default_command", work)
    try:
        status = main([command])
    except SystemExit as ended:
        status = ended.code
    after = signal.signal(kind, outside)
    assert status == SIGNALS[kind] and not [*tmp_path.iterdir()]
    assert after is usual


@pytest.mark.parametrize(
    "line",
    [
        "PYTHONUNBUFFERED= transformer-lib --help",
        "PYTHONUNBUFFERED= transformer-lib --version",
        "PYTHONUNBUFFERED= transformer-lib translate run test.en --beam-size 1",
        "PYTHONUNBUFFERED=1 transformer-lib --help",
        "PYTHONUNBUFFERED=1 transformer-lib translate --help",
        "PYTHONUNBUFFERED=1 transformer-lib --version",
        "PYTHONUNBUFFERED=1 transformer-lib translate run test.en --beam-size 1",
    ],
)
def test_a_full_disk_behind_standard_output_is_said(at, line):
    status, out, errors = shell(f"{line} > /dev/full", at)
    reason = "standard output could not be written (No space left on device)"
    *notes, last = errors.splitlines()  # the run's translations never end, it says
    assert (status, out, last) == (2, "", f"transformer-lib: {reason}.")
    assert all("line 1 has a" in note for note in notes)


def test_a_full_disk_behind_standard_error_hides_no_status(at):
    assert shell("transformer-lib nothing 2> /dev/full", at) == (2, "", "")


COMPLETE = """
source <(transformer-lib completion bash)
complete_line() {  # the words of a line; what bash would offer for the last of them
    COMP_WORDS=("$@") COMP_LINE="$*" COMP_POINT=${#COMP_LINE} COMP_TYPE=9
    COMP_CWORD=$(($# - 1)) COMPREPLY=()
    handler=$(complete -p transformer-lib | sed 's/.*-F \\([^ ]*\\).*/\\1/')
    $handler transformer-lib; echo "${COMPREPLY[@]}"
}
complete_line transformer-lib tr
complete_line transformer-lib translate --be
complete_line transformer-lib prepare --model-type ""
complete_line transformer-lib translate run test.
complete_line transformer-lib prepare --train test.
complete -p transformer-lib
"""


def test_bash_completes_commands_options_choices_and_files(at):
    done = subprocess.run(
        ["bash", "-c", COMPLETE],
        cwd=at,
        text=True,
        capture_output=True,
        timeout=300,
        env=os.environ
        | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    assert done.stderr == ""
    words = [sorted(line.split()) for line in done.stdout.splitlines()]
    assert words[:2] == [["train", "translate"], ["--beam-size"]]
    assert words[2:5] == [["bpe", "unigram"], *[["test.de", "test.en"]] * 2]
    assert {"-o", "default"} < set(words[5])  # else names of files


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_completion_of_each_shell_is_its_language(name, capsys):
    """Where the shell is installed, it reads it without a complaint."""
    assert main(["completion", name]) == 0
    said = capsys.readouterr().out
    wanted = {"bash": "complete -o", "zsh": "compdef", "fish": "complete -c"}
    assert wanted[name] in said and "transformer-lib" in said
    if shutil.which(name):
        subprocess.run([name, "-n"], input=said, text=True, check=True)


def test_the_program_is_a_module_too(at):
    words = [sys.executable, "-m", "transformer_lib", "nowhere"]
    told = subprocess.run(words, text=True, capture_output=True)
    assert told.returncode == 2 and "nowhere" in told.stderr


MAY_BE_ALONE = ("evaluate", "--comet")


@pytest.mark.parametrize(
    ("command", "option"), [one for one in OPTIONS if one != MAY_BE_ALONE]
)
def test_two_dashes_are_no_value_of_an_option(command, option, capsys):
    assert main([command, option, "--"]) == 2
    assert f"parameter {option} requires " in capsys.readouterr().err


ODD = ["nan", "-1", "9" * 25, "1.5", "", "--", "=", "٣", "None"]
BUSY = {
    "prepare": ["--train", "none", "none", "--out", "o"],
    "train": ["small", "--data", "data", "--run", "r", "--set", "seed=-1"],
    "average": ["data"],
    "translate": ["data", "none.en"],
    "parse": ["none.en", "--model", "data"],
    "evaluate": ["data", "--test", "empty"],
    "export": ["data", "--out", "o"],
    "ablate": ["none", "--out", "o"],
    "serve": ["data"],
    "diagnose": ["data"],
    "doctor": [],
    "completion": ["ksh"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_any_odd_word_ends_in_a_sentence(at, command, capsys, monkeypatch):
    """What is asked cannot be done anyhow, so each of them ends soon."""
    monkeypatch.setattr(doctor, "CHECKS", {})
    (at / "empty").touch()
    assert set(COMMANDS) == BUSY.keys()
    options = [option for other, option in OPTIONS if other == command]
    for option, value in itertools.product(options, ODD):
        status = main([command, *BUSY[command], option, value])
        said = capsys.readouterr()
        wanted = (0,) if command == "doctor" else (2,)
        assert status in wanted and said.err, (option, value, said)
    assert not {"o", "r"} & {path.name for path in at.iterdir()}


WRONG = {
    "a row that holds no pair": (
        ["train", "small", "--run", "r", "--set", "packed=1"],
        "packed=1: must be 0, or the width of a row",
    ),
    "an update of all batches": (
        ["train", "small", "--run", "r", "--set", "accumulate=1000000000"],
        "from 1 to 10,000",
    ),
    "a billion threads": (
        [
            "prepare",
            "--train",
            "train.en",
            "train.de",
            "--threads",
            "999999999999",
            "--out",
            "o",
        ],
        "threads=999999999999",
    ),
    "two settings in one": (
        ["train", "small", "--run", "r", "--set", "max_steps=1\nseed=3"],
        "give each a --set",
    ),
    "a seed that is none": (
        ["prepare", "--train", "train.en", "train.de", "--seed", "-1", "--out", "o"],
        "seed=-1: must be a whole number",
    ),
    "no such recipe": (["train", "enormous", "--run", "r"], "no recipe 'enormous'"),
    "no such model": (["translate", "nothing"], "nothing"),
    "no such corpus": (["prepare", "--corpus", "klingon", "--out", "o"], "klingon"),
    "lines differ": (
        ["prepare", "--train", "train.en", "test.de", "--out", "o"],
        "800",
    ),
    "a missing file": (["prepare", "--train", "a.en", "b.de", "--out", "o"], "a.en"),
    "three files": (["prepare", "--train", "a", "b", "c", "--out", "o"], "two files"),
    "a setting without a value": (
        ["train", "small", "--run", "r", "--set", "seed"],
        "name=value",
    ),
    "an unknown setting": (["train", "small", "--run", "r", "--set", "sed=1"], "sed"),
    "data that is none": (["train", "small", "--run", "r", "--data", "o"], "o"),
    "no run to average": (["average", "o"], "o"),
    "a beam of none": (
        ["translate", "run", "test.en", "--beam-size", "0", "--output", "x.de"],
        "beam_size",
    ),
    "a beam too wide": (
        ["translate", "run", "test.en", "--beam-size", "100000", "--output", "x.de"],
        "beam_size=100000: must be from 1",
    ),
    "a beam of none to parse": (
        ["parse", "test.en", "--beam-size", "0"],
        "beam_size=0: must be a whole number, at least 1",
    ),
    "a device that is not here": (
        ["translate", "run", "test.en", "--device", "cuda:9", "--output", "x.de"],
        "no such device here",
    ),
    "a model that is a number": (
        ["train", "small", "--run", "r", "--set", "model=3"],
        "--set model.d_model=256",
    ),
    "a model that is a list": (
        ["train", "small", "--run", "r", "--set", "model=[]"],
        "--set model.d_model=256",
    ),
    "a setting of a number": (
        ["train", "small", "--run", "r", "--set", "a=1", "--set", "a.b=2"],
        "a is 1 by another --set",
    ),
    "no sentences to score": (
        ["ablate", "table3-small", "--out", "o", "--sentences", "0"],
        "sentences=0: must be 1 or more",
    ),
    "fewer than none": (
        ["ablate", "table3-small", "--out", "o", "--sentences", "-1"],
        "sentences=-1: must be 1 or more",
    ),
    "files of no lines": (
        ["prepare", "--train", "empty", "empty", "--out", "o"],
        "no pair is left to train on. empty and empty: kept 0 of 0",
    ),
    "a vocabulary too large": (
        ["prepare", "--train", "test.en", "test.de", "--out", "o"],
        "this text has no more than",
    ),
    "lines without a partner": (
        ["prepare", "--train", "train.en", "test.de", "--out", "o"],
        "--uneven drop",
    ),
    "a missing text": (["translate", "run", "none.en", "--output", "x.de"], "none.en"),
    "no text to evaluate": (["evaluate", "run"], "--corpus"),
    "a corpus beside files": (
        [*"evaluate run --corpus grammar-en-de --test test.en test.de".split()],
        "--corpus grammar-en-de has its own text: leave out --test, which",
    ),
    "a share of a corpus": (
        [*"prepare --corpus grammar-en-de --share 0.1 --out o".split()],
        "leave out --share, which",
    ),
    "a setting that is misspelled": (
        ["train", "small", "--run", "r", "--set", "max_step=1"],
        "did you mean max_steps?",
    ),
    "a size without its table": (
        ["train", "small", "--run", "r", "--set", "d_model=64"],
        "did you mean model.d_model?",
    ),
    "an option that is misspelled": (
        ["prepare", "--trian", "train.en", "--out", "o"],
        "--train? See transformer-lib prepare --help.",
    ),
    "other files than before": (
        [*"prepare --train train.en train.de --valid test.en test.de".split()]
        + [*"--out data --vocab-size 500 --threads 1".split()],
        "(valid is None, asked for is ['test.en', 'test.de'])",
    ),
    "a record that is missing": (
        [*"evaluate run --test test.en test.de --compare none".split()],
        "none cannot be read as JSON: No such file or directory.",
    ),
    "no record to compare with": (
        [*"evaluate run --test test.en test.de --compare data/data.json".split()],
        "no record of this test set",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_done_is_said_in_a_sentence(at, case, capsys, monkeypatch):
    piped(monkeypatch, b"")
    (at / "empty").touch()
    words, telling = WRONG[case]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("transformer-lib: ") and telling in said
    assert "Traceback" not in said
    assert not {"o", "r", "x.de", "x.de.part"} & {path.name for path in at.iterdir()}


ASKED = ["--beam-size", "1"], ["--alpha", "0"]


@pytest.mark.parametrize(
    "words",
    [
        ["run", *ASKED[0], "test.en"],
        [*ASKED[0], "run", "test.en", *ASKED[1]],
        ["run", "test.en", *ASKED[0], *ASKED[1]],
        [*ASKED[0], "run", *ASKED[1], "test.en"],
        [*ASKED[0], *ASKED[1], "run", "test.en"],
        ["run", *ASKED[0], "--", "test.en"],
    ],
)
def test_files_stand_before_between_or_after_options(words):
    asked = cli.app.parse_args(["translate", *words])[1]
    assert asked.args == ("run", Path("test.en"))
    assert asked.kwargs["beam_size"] == 1 and asked.kwargs.get("alpha", 0) == 0


def test_several_files_and_what_is_no_option(capsys):
    asked = cli.app.parse_args(["parse", "a", "--beam-size", "2", "b"])[1]
    assert asked.args == (Path("a"), Path("b"))
    for words, telling in (
        (["--beam-size", "x", "m"], "'x' is no whole number"),
        (["m", "--colour", "f"], "Unknown option: --colour"),
        (["--alpha", "0"], "MODEL requires an argu"),
    ):
        assert main(["translate", *words]) == 2
        said = capsys.readouterr().err
        assert telling in said and "See transformer-lib translate --help." in said


def shell(line, at):
    """A shell's status, output and errors; "transformer-lib" is this library's."""
    code = "from transformer_lib.command_line import main; raise SystemExit(main())"
    line = line.replace("transformer-lib", f"{sys.executable} -c '{code}'")
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=at,
        text=True,
        capture_output=True,
        timeout=1800,
        errors="surrogateescape",
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert "Traceback" not in done.stdout + done.stderr
    return done.returncode, done.stdout, done.stderr


def test_streams_that_are_closed(at):
    few = "head -n 2 test.en > few.en; transformer-lib translate run --beam-size 1"
    status, out, errors = shell(f"{few} <&-", at)
    assert status == 2 and not out and "standard input is closed" in errors
    status, _, errors = shell(f"{few} few.en >&-", at)
    assert status == 2 and "standard output is closed" in errors
    assert shell(f"{few} few.en 2>&-", at)[0] == 0
    assert shell(f"{few} few.en --output few.de <&- >&- 2>&-", at) == (0, "", "")
    assert len((at / "few.de").read_text("utf-8").splitlines()) == 2


def test_names_of_files_need_not_be_utf_8(at, capsys):
    """A byte of Latin-1 is said and recorded, and no work is lost at its end."""
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    for split in ("test", "train"):
        (at / f"{name}.{split}").write_bytes((at / f"{split}.en").read_bytes())
    line = f"prepare --train {name}.train train.de --out d-{name} --vocab-size 500"
    said = io.TextIOWrapper(io.BytesIO(), "utf-8")
    with contextlib.redirect_stdout(said):
        assert main([*line.split(), "--threads", "1"]) == 0
    assert name in said.buffer.getvalue().decode("utf-8", "surrogateescape")
    assert "'utf-8' codec" not in capsys.readouterr().err
    assert Prepared.load(at / f"d-{name}", verify=True).data["train_pairs"] > 700
    line = f"evaluate run --test {name}.test test.de --beam-size 1 --json {name}.json"
    assert shell(f"PYTHONUTF8=0 LC_ALL=C.UTF-8 transformer-lib {line}", at)[0] == 0
    assert name in json.loads((at / f"{name}.json").read_text("utf-8"))["test_set"]


def test_weights_of_integers_are_refused(at, capsys, tmp_path):
    """The right names, shapes and checksum; numbers that are no weights."""
    mine, run = tmp_path / "mine", tmp_path / "run"
    shutil.copytree(at / "run", run)
    assert main(["average", str(run), "--last", "2", "--out", str(mine)]) == 0
    steps = sorted(run.glob("step-*.safetensors"))
    for path in (mine / "weights.safetensors", *steps):
        tensors, record = load_tensors(path)
        whole = {name: (9 * tensor).int() for name, tensor in tensors.items()}
        save_tensors(path, whole, record)
    for folder in {path.parent for path in (mine / "about.json", *steps)}:
        write_manifest(folder)
    capsys.readouterr()
    for words in (["translate", str(mine), "test.en"], ["average", str(run)]):
        assert main(words) == 2
        assert "int32" in capsys.readouterr().err


def test_inputs_of_a_shell(at, monkeypatch, capsys):
    """What is read once may be a pipe; what is read several times may not."""
    piped(monkeypatch, (at / "test.de").read_bytes())
    (few, one, train), names = [pipe() for _ in range(3)], []
    for (end, made), count in ((few, 2), (one, 1), (train, 12)):
        with made, open(at / "test.en", encoding="utf-8") as file:
            made.writelines(itertools.islice(file, count))
        names.append(f"/dev/fd/{end.fileno()}")  # as <(head -n COUNT test.en)
    with few[0], one[0], train[0]:
        lines = [names[0], "-", names[1]]
        assert main(["translate", "run", "--beam-size", "1", *lines]) == 0
        assert len(capsys.readouterr().out.splitlines()) == 2 + 12 + 1
        words = ["prepare", "--out", "piped", "--train", names[2], "test.de"]
        assert main(words) == 2
    assert "is a pipe or a device" in capsys.readouterr().err
    assert not (at / "piped").exists()


def test_settings_are_read_as_toml_and_reach_inside():
    asked = ["warmup=200", "model.dropout=0.1", "name=mine", "corpus = 'a b'"]
    asked += ["model.norm_first=true"]
    assert settings_of(asked) == {
        "warmup": 200,
        "name": "mine",
        "corpus": "a b",
        "model": {"dropout": 0.1, "norm_first": True},
    }


def test_doctor_counts_what_is_to_mend(monkeypatch, capsys):
    monkeypatch.setattr(
        doctor,
        "CHECKS",
        {
            "good": lambda: (True, "fine"),
            "taste": lambda: (None, "none here"),
            "bad": lambda: 1 / 0,
        },
    )
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "NO  bad" in said and "division by zero" in said and "1 to mend" in said


def test_doctor_on_this_machine(capsys):
    assert main(["doctor"]) == 0, capsys.readouterr().out
    assert "I am hungry. -> " in capsys.readouterr().out


def test_doctor_names_every_package_that_the_library_needs():
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    needed = [re.match(r"[\w-]+", line)[0] for line in rules["dependencies"]]
    well, said = doctor.CHECKS["packages"]()
    assert well and [one.split()[0] for one in said.split(", ")] == needed
    assert "filelock" in needed


def test_doctor_says_which_precision_suits_the_cpu(monkeypatch):
    rates = {"float32": 157e9, "bfloat16": 85e9}
    monkeypatch.setattr(machine, "product_rates", lambda threads: rates)
    said = "precision float32 suits this CPU: 157 GFLOP/s in float32, 85 in bfloat16;"
    assert said in doctor.CHECKS["torch"]()[1]


def test_doctor_says_which_precision_suits_the_gpu(monkeypatch):
    """A Tesla T4, as Colab lends it."""
    facts = {
        "is_available": True,
        "device_count": 1,
        "get_device_name": "Tesla T4",
        "get_device_capability": (7, 5),
    }
    for name, fact in facts.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, fact=fact: fact)
    well, said = doctor.CHECKS["GPU"]()
    assert well and said.startswith("1 x Tesla T4; set precision float16: ")
    assert "compute capability 7.5" in said and "bfloat16 only emulated" in said
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    assert "set precision bfloat16: compute capability 8.0" in doctor.CHECKS["GPU"]()[1]


def test_every_command_shows_an_example_in_its_help(capsys):
    for command in COMMANDS:
        assert main([command, "--help"]) == 0
        example = capsys.readouterr().out.split("example:")[1]
        assert f"transformer-lib {command}" in example
    assert main([]) == 2 and "COMMAND" in capsys.readouterr().out


def test_serve_says_what_it_holds(capsys):
    assert main(["serve", "--help"]) == 0
    said = capsys.readouterr().out
    assert "clients work with it" in said and "curl -d q=" in said


def test_help_needs_no_torch():
    """Nor what else takes its time; of the library it reads doors and what is light."""
    code = (
        "import sys; from transformer_lib.command_line import main\n"
        "main(['train', '--help'])\n"
        "for name in sys.modules: print('module', name)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    loaded = set(re.findall(r"^module (\S+)$", told.stdout, re.M))
    slow = {"torch", "numpy", "tqdm", "importlib.metadata", "urllib.request"}
    assert "transformer_lib.storage" in loaded and not slow & loaded
    rooms = {name for name in loaded if re.match(r"transformer_lib\.\w+\.", name)}
    own = ("commands", "doctor", "program", "streams")
    assert rooms == {f"transformer_lib.command_line.{room}" for room in own}


def test_export_says_how_near_it_is(at, capsys):
    kinds = ["--to", "ctranslate2", "ctranslate2-int8"]
    assert main(["export", "run", "--out", "out", *kinds]) == 0
    first, exact, near = capsys.readouterr().out.splitlines()
    assert "40 sentences of grammar-en-de" in first  # its own files have no test split
    apart = [float(re.search(r"within (\S+) of", line)[1]) for line in (exact, near)]
    assert apart[0] < 1e-4 < apart[1]
    assert {path.name for path in (at / "out").iterdir()} == set(kinds[1:])
    again = ["export", "run", "--out", "out", *kinds[:2], "--sentences", "test.en"]
    assert main(again) == 0
    assert "12 sentences of test.en" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, telling",
    [
        (["run", "--to", "tflite"], "tflite: there are onnx"),
        (["nowhere"], "nowhere"),
        (["run", "--to", "marian", "--sentences", "none.en"], "none.en cannot be read"),
        (
            ["run", "--to", "marian", "--sentences", "blank.en"],
            "no sentence with a word",
        ),
    ],
)
def test_export_says_what_is_wrong(at, capsys, words, telling):
    (at / "blank.en").write_text("\n  \n")
    assert main(["export", *words, "--out", "wrong"]) == 2
    assert telling in capsys.readouterr().err
    assert not (at / "wrong").exists()


def test_export_names_the_packages_it_lacks(at, capsys, monkeypatch):
    monkeypatch.setattr(exporter.importlib.util, "find_spec", lambda name: None)
    assert main(["export", "run", "--out", "wrong"]) == 2
    said = capsys.readouterr().err
    assert "pip install onnx onnxscript onnxruntime transformers ctranslate2" in said


def test_serve_says_that_a_port_is_taken_before_it_loads_the_model(at, capsys):
    """No model is of this name, and that is not what is said."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert main(["serve", "no-such-model", "--port", port]) == 2
    said = capsys.readouterr().err
    assert f"127.0.0.1:{port} cannot be listened at" in said
    assert "give another --port" in said and "no-such-model" not in said


def test_serve_answers_with_what_export_wrote(at, capsys, monkeypatch):
    from transformer_lib.server import TranslationServer

    assert main(["export", "run", "--out", "served", "--to", "ctranslate2-int8"]) == 0
    assert main(["serve", "served"]) == 2
    assert "serve` takes served/ctranslate2-int8, too" in capsys.readouterr().err
    found, body = [], b'{"q": ["a dog", ""]}'

    def serve(server):
        server.start()
        host, port = server.server_address
        with urllib.request.urlopen(f"http://{host}:{port}/translate", body) as reply:
            found.extend([f"http://{host}:{port}", json.load(reply)])
        server.stop()

    monkeypatch.setattr(TranslationServer, "serve", serve)
    assert main(["serve", "served/ctranslate2-int8", "--port", "0"]) == 0
    assert f"Ready: {found[0]}" in capsys.readouterr().out
    assert len(found[1]["translatedText"]) == 2
    for wrong in ("--beam-size", "--threads", "--port"):
        number = "99999" if wrong == "--port" else "-1"
        assert main(["serve", "served/ctranslate2-int8", wrong, number]) == 2
        assert number in capsys.readouterr().err
    for model in (["run"], ["run", "--compute-type", "float32"]):
        found.clear()
        how = ["--engine", "ctranslate2"] * (len(model) > 1)
        assert main(["serve", *model, *how, "--port", "0"]) == 0
        assert len(found[1]["translatedText"]) == 2
    assert main(["serve", "served/ctranslate2-int8", "--engine", "torch"]) == 2
    assert "an export for CTranslate2" in capsys.readouterr().err
