"""Chapter 13: the folder of a run, models to give away, evidence, mistakes."""

import errno
import json
import math
import os
import random
import re
import shutil
import stat
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import small_runs
import torch
from small_runs import FEW, RUN_FILES, tiny

from transformer_lib import machine, storage
from transformer_lib.command_line import main
from transformer_lib.corpora import Corpus
from transformer_lib.exercises.runs import check_average, check_best_step
from transformer_lib.figures.shipped_model import chain_of, shipped_run
from transformer_lib.runs import Progress, Recipe, Run, checkpoints, trainer
from transformer_lib.runs import folder as runs
from transformer_lib.storage import write_manifest
from transformer_lib.transformer import Transformer, TransformerConfig
from transformer_lib.translator import Translator

# Fixtures that more than one file uses.
data_dir = small_runs.data_dir
train = small_runs.train


def test_finished_run_is_loaded_not_repeated(train, tmp_path, monkeypatch):
    first = train(tiny(), tmp_path)
    monkeypatch.setattr(trainer, "update", lambda *args: pytest.fail("trained again"))
    again = train(tiny(), tmp_path)
    assert again.history == first.history
    ids = torch.tensor([[5, 6, 3]])
    assert torch.equal(first.model(ids, ids), Run.load(tmp_path).model(ids, ids))
    assert Run.load(tmp_path).data["sha256"] == first.data["sha256"]


def test_nothing_half_written(train, tmp_path):
    train(tiny(), tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "recipe.json",
        "about.json",
        "tokenizer.model",
        "manifest.json",
        "best.safetensors",
        "last.safetensors",
        "last.previous.safetensors",
        "step-000002.safetensors",
        "step-000004.safetensors",
        "step-000006.safetensors",
    }


def test_folder_of_another_recipe_is_refused(train, tmp_path):
    train(tiny(), tmp_path)
    with pytest.raises(ValueError, match=r"another recipe \(it differs in \['seed'\]"):
        train(tiny(seed=1), tmp_path)


def test_a_model_is_saved_and_loaded_by_its_class(tmp_path):
    """Round trip of a model that no recipe made, to the bit; the tokenizer with it."""
    kept, tokenizer, _ = runs.load_pretrained("tatoeba-en-de", "cpu")
    torch.manual_seed(0)
    config = TransformerConfig(tokenizer.vocab_size, 32, 4, 1, 64, d_k=5)
    model = Transformer(config)
    folder = model.save_pretrained(tmp_path / "mine", tokenizer, half=False)
    again = Transformer.from_pretrained(folder, "cpu")
    assert again.config == config and not again.training
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    _, loaded, _ = runs.load_pretrained(folder, "cpu")
    assert loaded.encode("A dog.") == tokenizer.encode("A dog.")
    shipped = Transformer.from_pretrained(device="cpu").state_dict()
    assert all(torch.equal(shipped[n], v) for n, v in kept.state_dict().items())
    other = Transformer(TransformerConfig(99, 32, 4, 1, 64))
    with pytest.raises(ValueError, match="the model 99: give the model's own"):
        other.save_pretrained(tmp_path / "other", tokenizer)
    with pytest.raises(ValueError, match="no model 'nonsense'"):
        Transformer.from_pretrained("nonsense")


@pytest.mark.parametrize("half", [False, True])
def test_pretrained_folder(train, tmp_path, half):
    run = train(tiny(), tmp_path / "run")
    folder = run.save_pretrained(tmp_path / "given", half=half)
    names = {"weights.safetensors", "tokenizer.model", "recipe.json", "about.json"}
    assert {path.name for path in folder.iterdir()} == names | {"manifest.json"}
    model, tokenizer, about = runs.load_pretrained(folder)
    assert about["weights"] == run.record and about["recipe"]["name"] == "grammar"
    for p, q in zip(model.parameters(), run.model.parameters(), strict=True):
        wanted = q.half().float() if half else q
        assert p.dtype == torch.float32 and torch.equal(p, wanted)
    assert tokenizer.encode("the dog") == run.tokenizer.encode("the dog")
    assert runs.load_pretrained(tmp_path / "run")[2]["weights"] == run.record


def test_a_fingerprint_is_of_all_that_the_answers_depend_on():
    """The same for a second copy; another for one weight, setting or vocabulary."""
    model, tokenizer, _ = runs.load_pretrained("tatoeba-en-de", "cpu")
    again = runs.load_pretrained("tatoeba-en-de", "cpu")
    parser = runs.load_pretrained("craft-pre-norm", "cpu")
    first = runs.fingerprint(model, tokenizer)
    assert runs.fingerprint(*again[:2]) == first and re.fullmatch("[0-9a-f]{64}", first)
    found = {first, runs.fingerprint(model, parser[1])}
    with torch.no_grad():
        next(again[0].parameters())[0, 0] += 1
    found.add(runs.fingerprint(again[0], tokenizer))
    model.config = replace(model.config, num_heads=4)
    found.add(runs.fingerprint(model, tokenizer))
    assert len(found) == 4


def test_shipped_model_loads():
    model, tokenizer, about = runs.load_pretrained("tatoeba-en-de")
    assert not model.training and tokenizer.vocab_size == model.config.vocab_size
    assert about["recipe"]["corpus"] == "tatoeba-en-de"
    with pytest.raises(ValueError, match="no model 'klingon'.*tatoeba-en-de"):
        runs.load_pretrained("klingon")


def test_files_of_a_run_have_the_mode_that_others_have(train, tmp_path):
    before = os.umask(0o022)
    try:
        train(tiny(), tmp_path / "run")
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "run").iterdir() if path.is_file()]
    assert len(files) > 7
    assert {path.stat().st_mode & 0o777 for path in files} == {0o644}


def content(folder):
    """Name and bytes of each file below a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_train_leaves_a_folder_of_others_alone(train, tmp_path, data_dir):
    """Also one that looks a little like a run: a model, prepared text."""
    mine, model, text = (tmp_path / name for name in ("mine", "model", "text"))
    mine.mkdir()
    for name in "notes.txt.part", "x.new", "step-000001.safetensors":
        (mine / name).write_text("mine")
    run = train(tiny(max_steps=1), tmp_path / "run")
    run.save_pretrained(model)
    shutil.copytree(data_dir, text)
    for folder in mine, model, text:
        before = content(folder)
        with pytest.raises(ValueError, match="is not empty and holds no run"):
            train(tiny(), folder)
        assert content(folder) == before
    (tmp_path / "food").mkdir()
    for name in ("recipe.json", "about.json"):  # of another trade
        (tmp_path / "food" / name).write_text('{"cake": 1}')
    with pytest.raises(ValueError, match="food/recipe.json.*cake"):
        train(tiny(), tmp_path / "food")
    assert content(tmp_path / "food").keys() == {"recipe.json", "about.json"}
    kept = tmp_path / "kept"  # a recipe of ours, and files of the same names
    kept.mkdir()
    shutil.copy(model / "recipe.json", kept)
    for name in ("manifest.json", "tokenizer.model", "about.json"):
        (kept / name).write_text('{"cake": 1}')
        before = content(kept)
        with pytest.raises(ValueError, match=f"kept/{name}"):
            train(tiny(), kept)
        assert content(kept) == before
        (kept / name).unlink()
    before = content(kept)
    with pytest.raises(ValueError, match="no prepared text"):  # refused for its data
        trainer.train(tiny(), kept, tmp_path / "no data")
    assert content(kept) == before
    hidden = tmp_path / "hidden"
    (hidden / ".data.part").mkdir(parents=True)
    (hidden / ".data.part" / "notes").write_text("mine")
    with pytest.raises(ValueError, match="holds no run .*data.part"):
        train(tiny(), hidden)
    assert content(hidden) == {".data.part/notes": b"mine"}
    (model / ".part").mkdir()
    (model / ".part" / "notes").write_text("mine")
    with pytest.raises(ValueError, match="holds something else than a model .*part"):
        run.save_pretrained(model)
    with pytest.raises(ValueError, match="is a file: give a folder"):
        train(tiny(), mine / "x.new")
    with pytest.raises(ValueError, match="run_dir is empty"):
        train(tiny(), "")


def test_train_clears_away_its_own_leftovers_only(train, tmp_path):
    train(tiny(max_steps=2), tmp_path)
    own = "last.safetensors.0123abcd.part", "recipe.json.00000000.part"
    others = "last.safetensors.part", "notes.part", "step-000001.safetensors"
    for name in own + others:
        (tmp_path / name).write_text("half")
    train(tiny(max_steps=6, keep_last=1), tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert not names & set(own) and names >= set(others)
    assert {path.name for path in checkpoints.step_files(tmp_path)} == {
        "step-000001.safetensors",
        "step-000006.safetensors",
    }


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"vocab_size": 100}, "vocab_size=100"),
        ({"corpus": "no.tsv"}, "no.tsv"),
        ({"max_length": 1}, "no pair is left"),
        ({"start_from": "klingon"}, "klingon"),
    ],
)
def test_a_try_that_is_refused_claims_no_folder(data_dir, tmp_path, changes, said):
    corpus = json.loads((data_dir / "data.json").read_text("utf-8"))["corpus"]
    with pytest.raises((ValueError, RuntimeError), match=said):
        trainer.train(tiny(**{"corpus": corpus} | changes), tmp_path / "run")
    assert not list(tmp_path.iterdir())
    fine = tiny(corpus=corpus, max_steps=1)
    assert trainer.train(fine, tmp_path / "run", show=False).progress.step == 1


@pytest.mark.skipif(os.name != "posix", reason="needs locks on folders")
def test_two_trains_in_one_folder(train, tmp_path):
    (tmp_path / "run").mkdir()
    code = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), 2); input()"
    ask = [sys.executable, "-c", code + "; print()", tmp_path / "run"]
    with subprocess.Popen(ask, stdin=subprocess.PIPE) as other:
        said = ""
        while not said:  # until the other process holds it
            (tmp_path / "run" / "notes").write_text("mine")  # without it: not empty
            with pytest.raises(ValueError) as error:
                train(tiny(max_steps=1), tmp_path / "run")
            said = str(error.value) * ("another process trains in" in str(error.value))
        other.communicate(b"\n")
    (tmp_path / "run" / "notes").unlink()
    assert train(tiny(max_steps=1), tmp_path / "run").progress.step == 1


def test_what_is_given_away_names_no_folder_of_its_owner(train, tmp_path):
    """Neither of its text nor of the model that it started from; the ones that ship."""
    first = train(tiny(max_steps=2), tmp_path / "first").save_pretrained(tmp_path / "a")
    recipe = tiny(max_steps=2, start_from=str(first))
    files = {"train": ["/home/me/x.en", "/home/me/x.de"], "valid": "/home/me/v.tsv"}
    run = train(replace(recipe, corpus=files), tmp_path / "second")
    run.save_pretrained(tmp_path / "b")
    _, _, about = runs.load_pretrained(tmp_path / "b", "cpu")
    assert about["recipe"]["corpus"] == {"train": ["x.en", "x.de"], "valid": "v.tsv"}
    assert about["recipe"]["start_from"] == f"{tmp_path.name}/a"
    assert about["data"]["corpus"] == {"train": "train.tsv", "valid": "valid.tsv"}
    assert len(about["data"]["train_sha256"]) == 64
    given = [tmp_path / "a", tmp_path / "b"]
    shipped = [*(Path(runs.__file__).parents[1] / "pretrained").iterdir()]
    for path in (path for folder in given + shipped for path in folder.glob("*.json")):
        assert not re.search(r'"[^"\n]*(/home|/tmp|/root|/me/|/work)', path.read_text())
    owned = storage.read_json(tmp_path / "second" / "recipe.json")
    assert owned["corpus"] == files  # to go on, the run itself needs them


def test_a_folder_that_may_not_be_written_is_told(train, tmp_path, monkeypatch, capsys):
    """By train, with what to do; by any command, in a sentence of ours."""

    def denied(path, *args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", denied)
        said = "run could not be .*Choose a place"
        with pytest.raises(storage.NotWritten, match=said):
            train(tiny(), tmp_path / "run")
    monkeypatch.setattr(Path, "is_file", denied)
    assert main(["translate", str(tmp_path / "run")]) == 2
    assert "cannot be used: Permission denied." in capsys.readouterr().err


@pytest.fixture(scope="module")
def given(data_dir, tmp_path_factory):
    """A model of few bytes, and the run that it is from."""
    folder = tmp_path_factory.mktemp("given")
    run = trainer.train(tiny(), folder / "run", data_dir, show=False)
    run.save_pretrained(folder / "model")
    for place, more in ("run", []), ("model", ["weights.safetensors"]):
        named = json.loads((folder / place / "manifest.json").read_text("utf-8"))
        assert sorted(named["files"]) == sorted(RUN_FILES + more)
    return folder


@pytest.mark.parametrize("place", ["model", "run"])
@pytest.mark.parametrize("name", [*RUN_FILES, "manifest.json"])
def test_a_bit_of_any_file_of_a_model_or_run_is_noticed(given, place, name):
    path = given / place / name
    whole = path.read_bytes()
    rng = random.Random(name)
    try:
        for _ in range(20):
            harmed, bit = bytearray(whole), rng.randrange(len(whole) * 8)
            harmed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(harmed)
            with pytest.raises(checkpoints.DamagedFile, match=str(given / place)):
                runs.load_pretrained(given / place, "cpu")
            if place == "run":
                with pytest.raises(checkpoints.DamagedFile):
                    trainer.train(tiny(max_steps=8), given / "run", show=False)
        path.unlink()
        if (place, name) != ("run", "manifest.json"):
            with pytest.raises(ValueError, match=f"{name}|no model"):
                runs.load_pretrained(given / place, "cpu")
        else:  # a run of others, who write none: told, and read
            with pytest.warns(UserWarning, match="no manifest.json: whether its"):
                runs.Run.load(given / place, "cpu")
    finally:
        path.write_bytes(whole)
    runs.load_pretrained(given / place, "cpu")


REPLACE = """
import os, random, signal, sys, time
from transformer_lib.runs import load_pretrained, Run

run, rng = Run.load(sys.argv[1], "cpu"), random.Random(5)
for turn in range(12):
    if not (child := os.fork()):
        while True:
            run.save_pretrained(sys.argv[2])
    time.sleep(rng.uniform(0.005, 0.2))
    os.kill(child, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL  # no error before
    load_pretrained(sys.argv[2], "cpu")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_model_that_is_replaced_survives_a_kill(given, tmp_path):
    """SIGKILL at random moments: one model or the other lies there, whole."""
    shutil.copytree(given / "model", tmp_path / "there")
    asked = [sys.executable, "-c", REPLACE, str(given / "run"), str(tmp_path / "there")]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("moment", range(5))
def test_a_model_is_replaced_whole_or_not_at_all(given, tmp_path, monkeypatch, moment):
    """The disk is full at one of its five files."""
    shutil.copytree(given / "model", tmp_path / "model")
    before, calls = content(tmp_path / "model"), []

    def full(file):
        calls.extend([file] * stat.S_ISREG(os.fstat(file).st_mode))
        if len(calls) > moment:
            raise OSError(28, "No space left on device")

    run = Run.load(given / "run", weights="last")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="model could not be written .No space left"):
        run.save_pretrained(tmp_path / "model")
    assert content(tmp_path) == {f"model/{name}": b for name, b in before.items()}
    monkeypatch.undo()
    run.save_pretrained(tmp_path / "model")
    assert runs.load_pretrained(tmp_path / "model")[2]["weights"]["step"] == 6


def test_a_model_is_not_written_over_something_else(given, tmp_path):
    run = Run.load(given / "run")
    (tmp_path / "notes.txt").write_text("mine")
    for folder, said in (tmp_path, "notes.txt"), (given / "run", "best.safetensors"):
        before = content(folder)
        with pytest.raises(ValueError, match=f"else than a model .{said}"):
            run.save_pretrained(folder)
        assert content(folder) == before
    with torch.no_grad():
        run.model.decoder.layers[0].feed_forward.w_1.bias[0] = 1e6
    with pytest.raises(ValueError, match="too large for 16 bits; with half=False"):
        run.save_pretrained(tmp_path / "large")
    run.save_pretrained(tmp_path / "large", half=False)


@pytest.mark.parametrize(
    "content", ["", "[]", "3", '"x"', "null", "{", "[" * 9999, '{"data": 3}', "{}"]
)
def test_json_of_another_shape_is_named(given, tmp_path, content):
    for name in "recipe.json", "about.json":
        shutil.copytree(given / "run", tmp_path / name)
        (tmp_path / name / "manifest.json").unlink()
        (tmp_path / name / name).write_text(content)
        with pytest.raises(ValueError, match=f"{name}/{name}"):
            Run.load(tmp_path / name)


def test_a_saved_model_says_where_a_sentence_is_cut(given, tmp_path):
    """And a line longer than that still has its words aligned."""
    run = Run.load(given / "run", "cpu")
    folder = run.save_pretrained(tmp_path / "model", max_length=3)
    translator = Translator.from_pretrained(folder, "cpu")
    assert translator.max_length == 3 < run.recipe.max_length
    text = "the dog sees the old man"
    assert len(run.tokenizer.encode(text)) > 3
    assert len(translator.align(text, text)) == 6
    (folder / "manifest.json").unlink()
    about = json.loads((folder / "about.json").read_text("utf-8"))
    (folder / "about.json").write_text(json.dumps(about | {"max_length": "3"}), "utf-8")
    write_manifest(folder)
    with pytest.raises(ValueError, match="max_length, a whole number"):
        Translator.from_pretrained(folder, "cpu")


def test_weights_that_are_no_numbers_are_refused(given, tmp_path):
    tensors, record = checkpoints.load_tensors(given / "run" / "best.safetensors")
    name = next(iter(tensors))
    tensors[name][0] = math.nan
    checkpoints.save_tensors(tmp_path / "nan.safetensors", tensors, record)
    with pytest.raises(ValueError, match=f"{name} holds weights that are not finite"):
        Run.load(given / "run", weights=tmp_path / "nan.safetensors")


def test_every_shipped_model_names_its_own_hashes():
    folders = (Path(runs.__file__).parents[1] / "pretrained").iterdir()
    for folder in folders:
        storage.read_manifest(folder, ["weights.safetensors", *RUN_FILES])


def test_read_evidence_says_what_is_missing():
    with pytest.raises(ValueError, match="no record 'nothing-of-that-name'") as caught:
        runs.read_evidence("nothing-of-that-name")
    named = str(caught.value).split("there are ")[1].rstrip(".").split(", ")
    folder = Path(runs.__file__).parents[1] / "evidence"
    top = sorted(f.stem for f in folder.glob("*.json"))
    assert {*top, "benchmarks/decoding", "base-0"} <= set(named) and top


def test_recorded_outputs_are_matched_by_hash():
    pairs = FEW["valid"]
    outputs = {runs.pair_key(pair): str(i) for i, pair in enumerate(pairs)}
    record = {"recipe": {"corpus": "x"}, "outputs": {"gone": "?"} | outputs}
    with pytest.MonkeyPatch.context() as patch:
        found = Corpus("x", "test", pairs[::-1], licence="ours", origin="a test")
        patch.setattr(runs, "load_corpus", lambda name, split: found)
        got = runs.recorded_outputs(record)
    assert got == [(*pair, str(i)) for i, pair in enumerate(pairs)]


def test_environment_record_is_complete():
    record = machine.environment_record()
    assert record["versions"]["torch"] == torch.__version__
    assert {"hardware", "python", "commit", "date"} <= record.keys()
    assert asdict(Progress())["step"] == 0


def last_step(history):
    return history[-1]["step"]


def latest_best(history):
    return min(reversed(history), key=lambda record: record["valid_loss"])["step"]


def total(checkpoints):
    return {k: sum(c[k] for c in checkpoints) for k in checkpoints[0]}


def in_place(checkpoints):
    for name, tensor in checkpoints[0].items():
        for other in checkpoints[1:]:
            tensor += other[name]
        tensor /= len(checkpoints)
    return checkpoints[0]


def in_half(checkpoints):
    return {
        k: sum(c[k] for c in checkpoints) / len(checkpoints) for k in checkpoints[0]
    }


def test_the_shipped_model_is_that_of_the_record():
    shipped = Path(runs.__file__).parents[1] / "pretrained" / "tatoeba-en-de"
    assert sum(path.stat().st_size for path in shipped.iterdir()) < 20e6
    records = chain_of(shipped_run())
    wanted = [Recipe.load(record["recipe"]["name"]) for record in records]
    for record, recipe in zip(records, wanted, strict=True):
        if record["finished"]:  # one was ended early, by other settings
            assert Recipe.of(record["recipe"]) == recipe
    assert [record["finished"] for record in records].count(False) <= 1
    recipe = json.loads((shipped / "recipe.json").read_text("utf-8"))
    assert Recipe.of(recipe) == wanted[-1] and len(wanted) == 8
    names = [recipe.name for recipe in wanted]
    starts = [recipe.start_from.partition("/")[::2] for recipe in wanted]
    kinds = ["averaged", "averaged", "respelled", "averaged", "averaged", "averaged"]
    kinds.append("merged")
    assert starts == [("", ""), *zip(names[:-1], kinds, strict=True)]
    scores = [record["scores"]["sacreBLEU"]["value"] for record in records]
    assert 30 < scores[0] < scores[1] < scores[2] < scores[-1]


@pytest.mark.parametrize(
    "check, wrong, telling",
    [
        (check_best_step, last_step, "lowest training loss"),
        (check_best_step, latest_best, "keep the earlier"),
        (check_average, total, "the sum"),
        (check_average, in_place, "in place"),
        (check_average, in_half, "overflowed"),
    ],
)
def test_mistakes_are_named(check, wrong, telling):
    verdict = check(wrong)
    assert not verdict.passed
    assert telling in verdict.message
