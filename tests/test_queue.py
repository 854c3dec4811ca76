"""The queue of long runs: each run once, stopped and gone on with, the same results."""

import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_runs import without_times

from transformer_lib.ablations import ROWS
from transformer_lib.command_line import main
from transformer_lib.corpora import grammar_split, known, load_corpus
from transformer_lib.runs import Recipe, train, trainer
from transformer_lib.tokenizer import Tokenizer
from transformer_lib.transformer import Transformer, TransformerConfig

ROOT = Path(__file__).resolve().parents[1]
TOOL = ROOT / "experiments" / "queue_runs.py"
EVIDENCE = ROOT / "transformer_lib" / "evidence"
PREDICTED = tomllib.loads((EVIDENCE / "table3-predictions.toml").read_text("utf-8"))

TABLE = """
[[group]]
name = "test-queue"
run = "{row}-{seed}"
each = { seed = [0], row = ["C-N2"] }
command = '''transformer-lib ablate "%s" --rows {row} --seeds {seed}
  --sentences 10 --device {device} --out {runs}/rows'''
result = "{runs}/rows/{row}-{seed}.json"
"""
RECIPE = """
name = "tiny"
corpus = %s
vocab_size = 350
max_pairs = 600
max_length = 40
max_tokens = 300
max_steps = 24
warmup = 10
validate_every = 6
keep_last = 0
[model]
d_model = 64
num_heads = 8
num_layers = 3
d_ff = 64
"""


@pytest.fixture(autouse=True)
def small_grammar(monkeypatch):
    """Its corpus has 2,000 pairs, and 50 to validate and to test on, for all here."""
    sizes = {"train": 2000, "valid": 50, "test": 50}
    monkeypatch.setattr(known, "grammar_split", lambda s: grammar_split(s, sizes[s]))


@pytest.fixture
def place(tmp_path):
    """A queue of one tiny run, and what is needed to start it."""
    files = {split: tmp_path / f"{split}.tsv" for split in ("train", "valid", "test")}
    for split, file in files.items():
        pairs = load_corpus("grammar-en-de", split).pairs[:600]
        file.write_text("".join(f"{a}\t{b}\n" for a, b in pairs), "utf-8")
    table = ", ".join(f'{split} = "{file}"' for split, file in files.items())
    (tmp_path / "tiny.toml").write_text(RECIPE % f"{{{table}}}")
    (tmp_path / "queue.toml").write_text(TABLE % (tmp_path / "tiny.toml"))
    return tmp_path


def surroundings(place, runs):
    return os.environ | {
        "TRANSFORMER_LIB_RUNS": str(place / runs),
        "TRANSFORMER_LIB_EVIDENCE": str(place / f"{runs}-kept"),
        "OMP_NUM_THREADS": "1",
    }


def start(place, runs, *words):
    env = surroundings(place, runs)
    command = [sys.executable, str(TOOL), "--queue", str(place / "queue.toml")]
    return subprocess.Popen(
        [*command, "--here", *words],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def results(place, runs):
    kept = sorted((place / f"{runs}-kept" / "test-queue").glob("*.json"))
    return {
        path.name: without_times(json.loads(path.read_text("utf-8"))) for path in kept
    }


CHAIN = """
[[group]]
name = "test-queue"
run = "second"
after = "first"
command = '"%(script)s" {runs}/first.json {runs}/second.json'
result = "{runs}/second.json"

[[group]]
name = "test-queue"
run = "first"
command = '"%(script)s" "%(script)s" {runs}/first.json'
result = "{runs}/first.json"
"""
STEP = """
import sys, time, pathlib
assert pathlib.Path(sys.argv[1]).exists(), "this run goes on from another"
time.sleep(0.3)
pathlib.Path(sys.argv[2]).write_text('{"seconds": 1, "environment": 0}')
"""


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_both_signals_end_the_runs_and_the_queue(tmp_path, kind):
    """A run that would take hours; the queue says that it was stopped."""
    (tmp_path / "step.py").write_text("import time; time.sleep(9999)")
    (tmp_path / "queue.toml").write_text(CHAIN % {"script": tmp_path / "step.py"})
    queue = start(tmp_path, "runs")
    assert "begins" in queue.stdout.readline()
    queue.send_signal(kind)
    said, _ = queue.communicate(timeout=1800)
    assert "stopped after" in said and "0 of 2 runs are done" in said, said
    assert not results(tmp_path, "runs")


def test_a_run_waits_for_the_one_that_it_goes_on_from(tmp_path):
    """Listed before it, with two processes: it still begins after it."""
    (tmp_path / "step.py").write_text(STEP)
    (tmp_path / "queue.toml").write_text(CHAIN % {"script": tmp_path / "step.py"})
    queue = start(tmp_path, "runs", "-j", "2")
    said, _ = queue.communicate(timeout=1800)
    assert queue.returncode == 0 and "2 of 2 runs are done" in said, said
    assert set(results(tmp_path, "runs")) == {"first.json", "second.json"}
    begun = [line.split()[3] for line in said.splitlines() if "begins" in line]
    assert begun == ["first", "second"]


def test_a_run_that_waits_for_none_of_its_group_is_refused(tmp_path):
    words = CHAIN.replace('after = "first"', 'after = "frist"')
    (tmp_path / "queue.toml").write_text(words % {"script": tmp_path / "step.py"})
    queue = start(tmp_path, "runs")
    said, _ = queue.communicate(timeout=1800)
    assert queue.returncode == 1, said
    assert "second waits for 'frist', and the group has no run of that name" in said


def test_stopped_at_a_random_moment_the_result_is_the_same(place):
    """The command of a run at once, and the run by the queue in pieces."""
    import queue_runs

    (job,) = queue_runs.read_jobs(place / "queue.toml", place / "whole", "cpu", [])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the queue's processes have
    assert main(list(job.command[1:])) == 0
    torch.set_num_threads(threads)
    whole = without_times(json.loads(job.result.read_text("utf-8")))
    checkpoint = place / "stopped" / "rows" / "C-N2-0" / "last.safetensors"
    said = " done "
    while " done " in said:  # it was faster: once more
        for folder in ("stopped", "stopped-kept"):
            shutil.rmtree(place / folder, ignore_errors=True)
        queue = start(place, "stopped")
        while not checkpoint.exists() and queue.poll() is None:
            time.sleep(0.02)
        time.sleep(random.uniform(0, 0.3))
        queue.send_signal(signal.SIGTERM)
        said = queue.communicate(timeout=1800)[0]
    assert checkpoint.exists(), said
    last = start(place, "stopped")
    said = last.communicate(timeout=1800)[0]
    assert last.returncode == 0 and "1 of 1 runs are done" in said, said
    assert results(place, "stopped") == {"C-N2-0.json": whole}
    log = (place / "stopped" / "queue.log").read_text("utf-8").splitlines()
    assert sum(" done " in line for line in log) == 1
    assert all("perplexity" in line for line in log if " done " in line)


def test_a_run_that_fails_is_said_and_keeps_nothing(place):
    queue, script = place / "queue.toml", place / "step.py"
    script.write_text(STEP)
    other = (CHAIN % {"script": script}).split("[[group]]")[2]
    row = TABLE.replace('"C-N2"', '"no-such-row"') % (place / "tiny.toml")
    queue.write_text(f"{row}[[group]]{other}")
    done = start(place, "failed", "-j", "2")
    said = done.communicate(timeout=1800)[0]
    assert done.returncode == 1 and "no-such-row-0" in said and "FAILED" in said
    assert set(results(place, "failed")) == {"first.json"}
    words = place / "failed" / "words" / "test-queue.no-such-row-0.log"
    assert "rows ['no-such-row'] are unknown" in words.read_text("utf-8")


def test_list_says_what_is_left(place):
    said = start(place, "listed", "--list").communicate(timeout=1800)[0].splitlines()
    assert [line.split() for line in said] == [["test-queue", "C-N2-0", "-"]]
    wrong = start(place, "listed", "no-such-group")
    assert "no group 'no-such-group'" in wrong.communicate(timeout=1800)[0]
    assert wrong.returncode == 1


@pytest.mark.parametrize("member", ["BERT", "T5"])
def test_pretraining_gone_on_with_gives_the_same(tmp_path, monkeypatch, member):
    """One run whole, one stopped after a checkpoint; same scores to the last digit."""
    import pretraining

    text = [pair[0] for pair in load_corpus("grammar-en-de").pairs]
    text = sorted(set(text))[:400]
    some = ("grammar", text[50:], text[:50])
    monkeypatch.setattr(pretraining, "short_sentences", lambda *_, **__: some)
    monkeypatch.setattr(pretraining, "PIECES", 340)
    tiny = {"d_model": 16, "num_heads": 2, "num_layers": 1, "d_ff": 16, "dropout": 0.1}
    monkeypatch.setattr(pretraining, "SIZE", tiny)

    def run(name, last=math.inf):
        judged, out = pretraining.Task.judged, tmp_path / f"{name}.json"
        count = itertools.count(1)

        def counted(*arguments):
            if next(count) > last:
                raise KeyboardInterrupt
            return judged(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(pretraining.Task, "judged", counted)
            return pretraining.run(member, 0, 40, out, "cpu")

    whole = run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("parts", last=7)
    parts = run("parts")
    for name in ("seconds", "environment"):
        assert name in whole and name in parts
        del whole[name], parts[name]
    assert whole == parts and len(whole["curve"]) == 20
    guesses = whole["guesses"]
    assert guesses["left neighbor"]["nats"] < guesses["single tokens"]["nats"]
    assert guesses["model"]["tokens"] == guesses["single tokens"]["tokens"] > 50


def test_the_anchor_gone_on_with_gives_the_same(tmp_path, monkeypatch):
    """Marian's run whole, and one stopped at its second validation; then its score."""
    import anchor

    text = (RECIPE % '"grammar-en-de"').replace("keep_last = 0", "keep_last = 2")
    (tmp_path / "tiny.toml").write_text(text)
    changes = {"max_steps": 9, "validate_every": 3, "joined": 0.5, "dropout_after": 4}
    changes |= {"model": {"d_model": 32, "num_heads": 2, "num_layers": 1, "d_ff": 32}}
    recipe = Recipe.load(tmp_path / "tiny.toml", **changes)
    test = load_corpus("grammar-en-de", "test")
    few = replace(test, pairs=test.pairs[:2])
    monkeypatch.setattr(anchor, "load_corpus", lambda *asked: few)
    summed, seen = anchor.summed_loss, []

    def watched(model, *arguments):
        if model.training:
            own = {m.dropout for m in model.modules() if hasattr(m, "dropout")}
            seen.append(max(own))
        return summed(model, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(anchor, "summed_loss", watched)
        whole = anchor.run(recipe, tmp_path / "whole", "cpu")
    assert seen == [0.0] * 4 + [0.1] * 5
    judged, count = anchor.loss_on, itertools.count(1)

    def stopped(*arguments):
        if next(count) == 2:
            raise KeyboardInterrupt
        return judged(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(anchor, "loss_on", stopped)
        anchor.run(recipe, tmp_path / "parts", "cpu")
    parts = anchor.run(recipe, tmp_path / "parts", "cpu")
    for record in (whole, parts):
        record["seconds"] = record["environment"] = None
        for row in record["history"]:
            assert row.pop("seconds") > 0
    assert whole == parts and whole["averaged"] == [6, 9]
    ours = train(recipe, tmp_path / "ours", device="cpu")
    assert ours.history[-1]["tokens"] == whole["tokens"]  # the same batches, joined too
    plain = replace(recipe, joined=0.0)
    other = train(plain, tmp_path / "plain", device="cpu")
    assert other.history[-1]["tokens"] != whole["tokens"]
    assert ours.data == whole["data"]
    first = replace(recipe, max_steps=1, validate_every=1)
    loss = train(first, tmp_path / "first", device="cpu").history[0]["train_loss"]
    begun = {
        begin: anchor.run(first, tmp_path / begin, "cpu", begin=begin)
        for begin in ("ours", "theirs")
    }
    losses = {begin: run["history"][0]["train_loss"] for begin, run in begun.items()}
    assert losses["ours"] == pytest.approx(loss, abs=1e-5)
    assert abs(losses["theirs"] - loss) > 1e-3


def saved_model(folder, pairs):
    """A tiny model that has learned nothing, saved, with pieces of these pairs."""
    tokenizer = Tokenizer.train((side for pair in pairs[:400] for side in pair), 340)
    tiny = {"d_model": 16, "num_heads": 2, "num_layers": 1, "d_ff": 16}
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(340, **tiny))
    return model.save_pretrained(folder, tokenizer, half=False)


def whole_and_parts(run, monkeypatch):
    """What run gives at one go, and when it was stopped after a checkpoint."""
    whole = run("whole")
    saved = trainer.validate_and_save

    def stopped(*arguments):
        saved(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(trainer, "validate_and_save", stopped)
        run("parts")
    return whole, run("parts")


def test_fine_tuning_gone_on_with_gives_the_same(tmp_path, monkeypatch):
    """One run whole, one stopped after a checkpoint; and what the record says."""
    import fine_tuning

    old = list(load_corpus("grammar-en-de").pairs)
    start = saved_model(tmp_path / "start", old)
    new = [(source.upper(), target) for source, target in old[500:900]]
    monkeypatch.setattr(fine_tuning, "pairs_of", lambda origin: new)
    monkeypatch.setattr(fine_tuning, "OLD", "grammar-en-de")
    monkeypatch.setattr(fine_tuning, "HELD", 20)

    def run(name):
        words = "--factor 1 --pairs 90 --share 0.4 --steps 6 --every 2 --sentences 12 "
        words += f"--start {start} --run-dir {tmp_path / name} --out none"
        return fine_tuning.run(fine_tuning.arguments(words.split()))

    whole, parts = whole_and_parts(run, monkeypatch)
    for record in (whole, parts):
        record["seconds"] = record["environment"] = None
    assert whole == parts and str(tmp_path) not in json.dumps(whole)
    assert [point["step"] for point in whole["curve"]] == [2, 4, 6]
    assert len({len(lines) for lines in whole["said"].values()}) == 1
    assert whole["pairs"] == 90 and whole["old_pairs"] == 60
    assert 140 <= whole["data"]["train_pairs"] <= 150  # cleaned
    last, after = whole["curve"][-1], whole["after"]
    assert last["new"] == after["new"]["nats"] == whole["test_loss"]
    assert last["new"] < whole["before"]["new"]["nats"]
    test, valid, rest = fine_tuning.divided(new, 12)
    assert len(test) == 12 and len(valid) == 20
    assert not {s for p in rest for s in p} & {s for p in test + valid for s in p}


def test_back_translation_reads_no_english_of_the_new_pairs(tmp_path, monkeypatch):
    """The German is real, the English is the reverse model's, whatever ours was."""
    import fine_tuning

    old = list(load_corpus("grammar-en-de").pairs)
    start = saved_model(tmp_path / "start", old)
    monkeypatch.setattr(fine_tuning, "OLD", "grammar-en-de")
    monkeypatch.setattr(fine_tuning, "HELD", 20)

    def run(name, new):
        monkeypatch.setattr(fine_tuning, "pairs_of", lambda origin: new)
        words = "--factor 1 --pairs 30 --back 4 --steps 4 --every 2 --sentences 8 "
        words += f"--start {start} --run-dir {tmp_path / name} --out none"
        return fine_tuning.run(fine_tuning.arguments(words.split()))

    true = run("true", new := old[500:700])
    kept = {pair for pair in random.Random(0).sample(new, len(new))[:28]}
    other = run("other", [p if p in kept else (f"x{p[0]}", p[1]) for p in new])
    assert true["data"]["sha256"] == other["data"]["sha256"]
    reverse = true["reverse"]
    assert reverse["updates"] == 4 and set(reverse["scores"]) == {"new", "old"}
    assert [german for _, _, german in reverse["examples"]] == [
        german for _, german in fine_tuning.divided(new, 8)[2][:3]
    ]
    assert "--back 4" in true["command"] and str(tmp_path) not in json.dumps(true)


def test_two_languages_gone_on_with_give_the_same(tmp_path, monkeypatch):
    """One run whole, one stopped after a checkpoint; and what the record says."""
    import two_languages

    grammar = {
        split: list(load_corpus("grammar-en-de", split).pairs)
        for split in ("train", "test")
    }
    start = saved_model(tmp_path / "start", grammar["train"])

    def corpus(name, split):
        """French is German in capitals; test sentences are trained on, unless held."""
        pairs = grammar["test"][:12] if split == "test" else grammar["train"][:300]
        pairs = grammar["train"][300:310] if split == "valid" else pairs
        pairs = pairs + grammar["test"][:12] if split == "train" else pairs
        pairs = [(s, t.upper()) for s, t in pairs] if name.endswith("fr") else pairs
        return replace(load_corpus("grammar-en-de", "test"), pairs=pairs)

    monkeypatch.setattr(two_languages, "load_corpus", corpus)

    def run(name):
        words = "--factor 1 --pairs 500 --pieces 9 --steps 4 --every 2 --sentences 8 "
        words += f"--start {start} --run-dir {tmp_path / name} --out none"
        return two_languages.run(two_languages.arguments(words.split()))

    whole, parts = whole_and_parts(run, monkeypatch)
    for record in (whole, parts):
        record["seconds"] = record["environment"] = None
    assert whole == parts and str(tmp_path) not in json.dumps(whole)
    assert whole["recipe"]["vocab_size"] == 340 + 9 + 2  # pieces, and two tags
    assert set(whole["by_tag"]) == {"de", "fr"}
    assert set(whole["by_tag"]["fr"]) == {"<2de>", "<2fr>", "none"}
    asked = two_languages.arguments(
        ["--pairs", "500", "--sentences", "8", "--run-dir", "none", "--out", "none"]
    )
    mixed, tests = two_languages.texts(asked)
    assert all(source.startswith(("<2de> ", "<2fr> ")) for source, _ in mixed["train"])
    held = {side for pairs in tests.values() for pair in pairs for side in pair}
    bare = {
        side[6:] if side.startswith("<2") else side
        for pair in mixed["train"]
        for side in pair
    }
    assert len(held) > 20 and not held & bare


def test_the_translator_pilot_gone_on_with_gives_the_same(tmp_path, monkeypatch):
    """One run whole, one stopped after a checkpoint; and what the record says."""
    import translator_pilot

    start = saved_model(tmp_path / "start", load_corpus("grammar-en-de").pairs)
    settings = tmp_path / "tiny.toml"
    settings.write_text(
        'name = "tiny"\ncorpus = "grammar-en-de"\nvocab_size = 340\nmax_pairs = 300\n'
        "max_tokens = 300\n[model]\nd_model = 16\nnum_heads = 2\nnum_layers = 1\n"
        "d_ff = 16\ndropout = 0.1\n"
    )
    monkeypatch.setattr(translator_pilot, "RECIPE", str(settings))
    # Of the grammar nearly all have neighbors; a few others have none.
    strangers = [(f"w{i} x{i} y{i}", f"a{i} b{i} c{i}") for i in range(8)]

    def corpus(name, split="train"):
        more = strangers if split == "valid" else []
        there = load_corpus(name, split)
        return replace(there, pairs=[*there.pairs, *more])

    monkeypatch.setattr(translator_pilot, "load_corpus", corpus)

    def run(name, way="bpe-dropout"):
        words = (
            f"{way} --steps 15 --start {start} --run-dir {tmp_path / name} --out none"
        )
        return translator_pilot.run(translator_pilot.arguments(words.split()))

    whole, parts = whole_and_parts(run, monkeypatch)
    assert without_times(whole) == without_times(parts)
    assert str(tmp_path) not in json.dumps(whole)
    assert whole["averaged"] == [11, 12, 13, 14, 15] and whole["updates"] == 15
    assert whole["recipe"]["subword_sampling"] == 0.1 and whole["recipe"]["copies"] == 4
    assert whole["recipe"]["model"]["dropout"] == 0.1
    assert whole["valid"]["without_neighbors"] >= len(strangers)
    assert whole["valid"]["without_neighbors"] < whole["valid"]["pairs"]
    other = run("other", "dropout0.3")
    assert other["recipe"]["model"]["dropout"] == 0.3
    assert other["before"] == whole["before"] != other["after"] != whole["after"]


def test_a_neighbor_differs_in_one_word():
    from translator_pilot import without_neighbors

    known = [("", "Tom mag Tee sehr."), ("", "Ja.")]
    near = ["Tom mag Tee sehr.", "Tom mag Milch sehr.", "Nein."]
    far = ["Tom mag Tee.", "Tom trinkt Milch sehr.", "Ich mag Tee sehr gern."]
    pairs = [("", german) for german in near + far]
    assert without_neighbors(pairs, known) == [("", german) for german in far]


def test_the_runs_of_fine_tuning_are_told_apart(tmp_path):
    """Each command is understood, and differs from the others in what its name says."""
    import fine_tuning
    import queue_runs

    jobs = queue_runs.read_jobs(
        EVIDENCE / "queue.toml", tmp_path, "cpu", ["fine-tuning"]
    )
    asked = [fine_tuning.arguments(list(job.command[1:])) for job in jobs]
    numbers = [(a.factor, a.pairs, a.share, a.seed) for a in asked]
    assert len({job.name for job in jobs}) == len(set(numbers)) == len(jobs) >= 8
    assert [a.out for a in asked] == [job.result for job in jobs]
    rates = {f for f, n, share, seed in numbers if (n, seed) == (10_000, 0)}
    assert len(rates) == 3 and {share for _, _, share, _ in numbers} == {0.0, 0.5}


def test_little_text_runs_as_it_stands_in_the_queue(place):
    """The group itself, with less text and a tiny recipe instead of the real one."""
    import queue_runs

    whole = (EVIDENCE / "queue.toml").read_text("utf-8")
    groups = [part for part in whole.split("[[group]]")[1:] if '"little-text"' in part]
    less = "".join("[[group]]" + part for part in groups)
    for real, tiny in (
        ("ablate small", f"ablate '{place / 'tiny.toml'}'"),
        ("corpus=tatoeba-en-de", "corpus=grammar-en-de"),
        ("--sentences 5000", "--sentences 10 --set model.num_layers=1"),
        ("max_steps=2500", "max_steps=2"),
        ("warmup=500", "warmup=1"),
        ("pairs = [10000, 100000], copies", "pairs = [400], copies"),
        ("pairs = [10000, 100000] }", "pairs = [300] }"),
        ("d_model=128 --set model.d_ff=512", "d_model=32 --set model.d_ff=64"),
        ('"vocab_size=1000"', '"vocab_size=360"'),
        ('"model.d_model=256"', '"model.d_model=16"'),
        ('"model.d_model=64"', '"model.d_model=8"'),
    ):
        assert real in less
        less = less.replace(real, tiny).replace('"vocab_size=8000"', '"lr_factor=0.5"')
    (place / "queue.toml").write_text(less)
    jobs = queue_runs.read_jobs(place / "queue.toml", place, "cpu", [])
    recipes = {}
    for job in jobs:
        assert job.command[0] == "transformer-lib" and main(list(job.command[1:])) == 0
        recipes[job.name] = json.loads(job.result.read_text("utf-8"))["recipe"]
    assert len(recipes) == len(jobs) == 9
    assert recipes["300-model.dropout=0.3"]["model"]["dropout"] == 0.3
    assert recipes["300-vocab_size=360"]["vocab_size"] == 360
    assert recipes["400-copies=4"]["copies"] == 4
    assert recipes["all-model.dropout=0.1"]["max_pairs"] == 600  # the tiny recipe's


def test_the_predictions_are_of_rows_and_signs_of_the_paper():
    """A claim: a row with at least 0.035 in log perplexity, and the paper's sign."""
    base = ROWS["base"].perplexity
    for key, sign in PREDICTED["claims"].items():
        effect = math.log(ROWS[key].perplexity / base)
        assert abs(effect) >= 0.035 and sign == math.copysign(1, effect), key
    for key in PREDICTED["equal"]["rows"]:
        assert abs(math.log(ROWS[key].perplexity / base)) < 0.035, key
    named = {"base", *PREDICTED["claims"], *PREDICTED["equal"]["rows"]}
    assert named | set(PREDICTED["ours"]) == set(ROWS)


def test_every_predicted_row_is_in_the_queue_often_enough():
    groups = tomllib.loads((EVIDENCE / "queue.toml").read_text("utf-8"))["group"]
    seeds = {}
    for group in (g for g in groups if g["name"] == "table3"):
        for row in group["each"]["row"]:
            seeds.setdefault(row, set()).update(group["each"]["seed"])
    assert set(seeds) == set(ROWS)
    assert len(seeds["base"]) >= 4 and len(seeds["D-ls0.0"]) >= 4
    assert all(len(seeds[row]) >= 2 for row in PREDICTED["claims"])
