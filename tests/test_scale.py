"""Small and full: read in one place, told in each chapter's head, and both run."""

import ast
import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import re
import time
import types
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from unittest import mock

import matplotlib
import pytest
import torch
from chapters import all_notebooks

from transformer_lib import ablations, bugs, evaluation
from transformer_lib import translator as translator_module
from transformer_lib.ablations import ablate_side_by_side
from transformer_lib.batches import prepare
from transformer_lib.corpora import grammar_split
from transformer_lib.corpora import known as corpora
from transformer_lib.runs import Recipe, Run, recipes, train
from transformer_lib.runs import folder as runs
from transformer_lib.transformer import by_scale, seconds_allowed
from transformer_lib.translator import Translator

matplotlib.use("Agg")
ROOT = Path(__file__).parents[1]
SCALED = sorted(
    path
    for path in ROOT.glob("notebooks/*.ipynb")
    if path.stem[:2] >= "08" and "by_scale(" in path.read_text("utf-8")
)
# What a cell calls that goes to a GPU by itself, or asks where one is.
TAKES_THE_DEVICE = {
    "default_device",
    "load_pretrained",
    "train",
    "train_parser",
    "ablate_side_by_side",
}
SIZES = {"d_model": 32, "num_heads": 2, "num_layers": 1, "d_ff": 64, "dropout": 0.1}


def cells_of(stem: str) -> list[dict]:
    (path,) = ROOT.glob(f"notebooks/{stem}*.ipynb")
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return [{**cell, "source": "".join(cell["source"])} for cell in cells]


# --- one place ------------------------------------------------------------------------


def test_by_scale(monkeypatch):
    monkeypatch.delenv("TRANSFORMER_LIB_SCALE", raising=False)
    assert by_scale(1, 2) == 1
    monkeypatch.setenv("TRANSFORMER_LIB_SCALE", "small")
    assert by_scale("a", "b") == "a"
    monkeypatch.setenv("TRANSFORMER_LIB_SCALE", "full")
    assert by_scale(1, 2) == 2
    monkeypatch.setenv("TRANSFORMER_LIB_SCALE", "Full")
    with pytest.raises(ValueError, match="'Full': must be 'small' or 'full'"):
        by_scale(1, 2)


def test_seconds_allowed(monkeypatch):
    monkeypatch.delenv("TRANSFORMER_LIB_MINUTES", raising=False)
    assert seconds_allowed(20) == 1200
    monkeypatch.setenv("TRANSFORMER_LIB_MINUTES", "0.5")
    assert seconds_allowed(20) == 30
    for wrong in ("0", "-1", "nan", "soon"):
        monkeypatch.setenv("TRANSFORMER_LIB_MINUTES", wrong)
        with pytest.raises(ValueError, match=f"{wrong}.*must be above 0"):
            seconds_allowed(20)


def test_the_variables_are_read_in_one_place():
    """In all notebooks, one exported cell asks the environment."""
    asks = re.compile(r"environ[^\n]*TRANSFORMER_LIB_(?:SCALE|MINUTES)")
    found = {
        name: asks.findall(cell["source"])
        for name in all_notebooks()
        for cell in cells_of(name)
        if cell["cell_type"] == "code" and asks.search(cell["source"])
    }
    # Chapter 00 comes before anything that it could import.
    hoods = ["under_the_hood/00_why", "under_the_hood/07_transformer"]
    assert sorted(found) == hoods


# --- the heads ------------------------------------------------------------------------


@pytest.mark.parametrize("path", SCALED, ids=lambda path: path.stem)
def test_the_head_names_both_scales_and_the_code_reads_them(path):
    cells = cells_of(path.stem)
    head = takewhile(lambda c: not c["source"].startswith("## "), cells)
    box = next(c["source"] for c in head if "> **Small** (the default)" in c["source"])
    lines = re.sub(r"\n> ", " ", box)
    small = re.search(r"\n?> \*\*Small\*\* \(the default\) .{20,}", lines)
    full = re.search(
        r"\*\*Full\*\* \(`TRANSFORMER_LIB_SCALE=full`[^)]*\) .{20,}", lines
    )
    assert small and full, "the box at the head says what small and full do"
    takes = re.search(r"\b(?:second|minute|hour)s?\b", full[0])
    assert takes, "the box at the head says how long full takes"
    known = re.search(
        r"\((?:[^()]*\b)?(?:measured|estimate[sd]?)\b[^()]*\)|"  # where from
        r"\b[Ww]e estimated?\b|"
        r"\b(?:for|into|in) \d+ minutes\b|`TRANSFORMER_LIB_MINUTES`",  # a limit
        full[0],
    )
    assert known, "a time is measured, an estimate that says so, or a limit"
    code = [c["source"] for c in cells if c["cell_type"] == "code"]
    called = [
        node
        for source in code
        if "by_scale" in source and not source.startswith(("%", "#| export"))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "by_scale"
    ]
    assert called, "no cell of the chapter computes anything else at scale full"
    for call in called:
        assert ast.dump(call.args[0]) != ast.dump(call.args[1]), "both are the same"
    own = [s for s in code if not s.startswith(("%", "#| export")) and "%pip" not in s]
    uses = TAKES_THE_DEVICE & {
        node.func.id
        for source in own
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert uses or "for a GPU" not in full[0], "no cell would use the GPU"


def test_how_to_read_tells_of_the_scale_and_of_colab():
    text = (ROOT / "book" / "how_to_read.md").read_text("utf-8")
    for name in ("SCALE", "MINUTES", "DEVICE", "RUNS"):
        assert f"| `TRANSFORMER_LIB_{name}` |" in text
    for said in ("Change runtime type", "drive.mount", "After a disconnect"):
        assert said in text
    first, last = re.search(
        r"chapters from \[(\d\d)\][^[]+to\s+\[(\d\d)\][^[]+: each whose", text
    ).groups()
    assert [first, last] == [path.stem[:2] for path in (SCALED[0], SCALED[-1])]
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        scaled = any(
            re.search(r"(?<!def )by_scale\(", cell["source"])
            and not cell["source"].startswith("#| export")
            for cell in cells_of(path.stem)
        )
        assert not scaled or path in SCALED
    of_runs = "".join(cell["source"] for cell in cells_of("13_runs"))
    assert "drive.mount" in of_runs and "TRANSFORMER_LIB_RUNS" in of_runs
    # The first chapter that trains says where all of this stands.
    text_of_12 = [cell["source"] for cell in cells_of("12_training")]
    box = next(source for source in text_of_12 if "> **Small** (the default)" in source)
    assert "../book/how_to_read.md#a-gpu-on-colab" in box and "Drive" in box
    assert "(a-gpu-on-colab)=" in text


# --- a run that stops when its time is up, and goes on --------------------------------


LOAD = Recipe.load  # as it is when no test has put another in its place


def tiny(**changes) -> Recipe:
    settings = {"max_steps": 6, "validate_every": 4, "max_tokens": 400, "model": SIZES}
    settings |= {"max_pairs": 600, "vocab_size": 400}
    return LOAD("grammar", **settings | changes)


def test_time_that_is_up_loses_nothing(tmp_path):
    """Stopped after one update, then finished: bit for bit the run in one go."""
    cut = train(tiny(), tmp_path / "cut", max_seconds=0.0, device="cpu", show=False)
    assert cut.progress.step == 1
    data = tmp_path / "cut" / "data"
    whole = train(tiny(), tmp_path / "whole", data, device="cpu", show=False)
    cut = train(tiny(), tmp_path / "cut", device="cpu", show=False)
    last = [Run.load(tmp_path / name, "cpu", "last") for name in ("cut", "whole")]
    for a, b in zip(*(run.model.parameters() for run in last), strict=True):
        assert torch.equal(a, b)
    assert [r["step"] for r in cut.history] == [1, 4, 6]
    assert [r["step"] for r in whole.history] == [4, 6]


# --- full, with the time shrunk -------------------------------------------------------


@pytest.fixture
def full(monkeypatch, tmp_path):
    """Scale full for a moment, with recipes cut down to this machine's size."""
    monkeypatch.setenv("TRANSFORMER_LIB_SCALE", "full")
    monkeypatch.setenv("TRANSFORMER_LIB_MINUTES", "0.005")
    monkeypatch.setenv("TRANSFORMER_LIB_RUNS", str(tmp_path / "runs"))
    asked = []

    def load(name, **changes):
        asked.append(name)
        return tiny(max_steps=100_000, validate_every=50_000, warmup=400, **changes)

    monkeypatch.setattr(Recipe, "load", load)
    return asked


def run_cells(stem: str, names: dict, *marks: str) -> dict:
    """Run the cells of a chapter that hold these marks, in their order."""
    code = [c["source"] for c in cells_of(stem) if c["cell_type"] == "code"]
    for mark in marks:
        (source,) = [c for c in code if mark in c and not c.startswith("#| export")]
        exec(compile(source, mark, "exec"), names)
    return names


def names_of(module, **more) -> dict:
    return (
        dict(vars(module))
        | {"by_scale": by_scale, **more}
        | {"seconds_allowed": seconds_allowed}
    )


def test_chapter_13_at_full_begins_from_nothing_and_goes_on(full, monkeypatch):
    import shutil

    names = names_of(runs, shutil=shutil, math=math, CorpusUnavailable=ValueError)
    names |= {"train": train, "Recipe": Recipe}
    run_cells("13_runs", names, "short_run = train(")
    first = names["short_run"].progress.step
    assert full == ["tatoeba-en-de"] and first >= 1
    precision = names["short_run"].recipe.precision
    assert precision == recipes.native_precision("cpu")[0]
    monkeypatch.setattr(recipes, "native_precision", lambda device: ("float16", ""))
    names["native_precision"] = recipes.native_precision  # another machine
    run_cells("13_runs", names, "short_run = train(")
    assert names["short_run"].progress.step > first
    assert names["short_run"].recipe.precision == precision
    assert full == ["tatoeba-en-de"]
    assert names["short_run"].progress.step < 100_000  # its time was up before


def test_the_recipe_of_full_runs_from_nothing():
    recipe = Recipe.load("tatoeba-en-de")
    assert not recipe.start_from and recipe.max_words is None


def test_chapter_24_at_full_goes_on_with_the_papers_recipe(full, tmp_path, capsys):
    from transformer_lib import wmt

    folder = tmp_path / "runs" / "wmt14-en-de" / "data"
    recipe = tiny()
    prepare(
        "grammar-en-de",
        folder,
        recipe.vocab_size,
        max_length=recipe.max_length,
        max_pairs=recipe.max_pairs,
    )
    names = names_of(wmt, Recipe=Recipe, train=train, math=math)
    names["runs_folder"] = runs.runs_folder
    for _ in range(2):
        run_cells("24_wmt", names, "def an_hour_of_the_paper")
    one, two = re.findall(r"^update (\d+) of 100,000", capsys.readouterr().out, re.M)
    assert full == ["wmt14-en-de-base"] and int(two) > int(one) >= 1


def sixteen_bits(monkeypatch, precision: str) -> None:
    """From now on the device is fast in this precision."""
    monkeypatch.setattr(recipes, "native_precision", lambda device: (precision, ""))


@pytest.fixture
def ready(monkeypatch):
    """Rows' processes begin with torch imported; test_rows_that_are_cut_off spawns."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["transformer_lib.ablations", "torch._dynamo"])
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: context)


def test_chapter_25_at_full_runs_rows_side_by_side(
    full, ready, monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("TRANSFORMER_LIB_MINUTES", "2")
    short = partial(replace, tiny(max_steps=4, validate_every=2, warmup=4))
    monkeypatch.setattr(Recipe, "load", lambda name, **changes: short(**changes))
    sixteen_bits(monkeypatch, "bfloat16")
    rows = ("base", "pre-norm")
    found = names_of(ablations, runs_folder=runs.runs_folder)
    found["ablate_side_by_side"] = lambda base, out, **rest: ablate_side_by_side(
        base, out, 2, rows=rows, sentences=2, device="cpu", **rest
    )
    run_cells("25_ablations", found, "by_scale(lambda: None, rows_of_an_hour)")
    said = capsys.readouterr().out
    assert all(re.search(rf"^{row} +1 ", said, re.M) for row in rows)
    # On another machine the rest of the rows has the precision of the first ones.
    sixteen_bits(monkeypatch, "float16")
    out = tmp_path / "runs" / "table3-replica"
    kept = [Recipe.for_here("", out / f"{row}-0").precision for row in rows]
    found["ablate_side_by_side"] = lambda base, *_, **rest: kept.append(base.precision)
    found["rows_of_an_hour"]()
    assert kept == ["bfloat16"] * 3


def test_rows_that_are_cut_off_go_on(tmp_path, monkeypatch):
    """The time is up as soon as each row can go on: on any machine, at its speed."""
    base = tiny(max_steps=100_000, validate_every=2, warmup=4)
    rows, out, latest = ("base", "D-drop0.0"), tmp_path / "rows", time.monotonic() + 800

    def monotonic():
        written = len(list(out.glob("*/last.safetensors"))) == len(rows)
        return math.inf if written or time.monotonic() > latest else 0.0

    clock = types.SimpleNamespace(monotonic=monotonic, sleep=time.sleep)
    monkeypatch.setattr(ablations, "time", clock)
    found = ablate_side_by_side(
        base, out, 2, max_seconds=25, rows=rows, device="cpu", sentences=2
    )
    assert found == []
    runs = [Run.load(out / f"{row}-0", "cpu") for row in rows]
    assert min(run.progress.step for run in runs) >= 2
    with pytest.raises(ValueError, match="processes=0: must be 1 or more"):
        ablate_side_by_side(base, out, 0)
    with pytest.raises(ValueError, match="num_layers=2 of the paper's 6"):
        ablate_side_by_side(base, out, 2, rows=("C-N2",))


def test_an_error_in_a_row_is_told(ready, tmp_path):
    base = tiny(max_steps=4, validate_every=2, warmup=4)
    out = tmp_path / "rows"
    done = ablate_side_by_side(base, out, 1, rows=("base",), device="cpu", sentences=2)
    assert [line["row"] for line in done] == ["base"]
    other = replace(base, seed=0, max_steps=6)
    with pytest.raises(RuntimeError, match="1 of 1 processes ended with an error"):
        ablate_side_by_side(other, out, 1, rows=("base",), device="cpu", sentences=2)


def test_chapter_26_at_full_trains_the_parser(full, monkeypatch, tmp_path, capsys):
    from transformer_lib.parsing import parser as parsing

    chosen = tiny(corpus="toy+chunks", max_pairs=None, max_length=60, max_steps=9_000)
    chosen = partial(replace, chosen)
    monkeypatch.setattr(Recipe, "load", lambda name, **changes: chosen(**changes))
    names = names_of(parsing, runs_folder=runs.runs_folder)
    names["load_trees"] = lambda name, split: parsing.load_trees("toy", split)
    names["evaluate_parser"] = lambda model, tokenizer, trees, longest: (
        parsing.evaluate_parser(
            model, tokenizer, trees[:2], longest, beam_size=1, max_extra=5
        )
    )
    updates = []
    for precision in ("bfloat16", "float16"):  # of another machine
        sixteen_bits(monkeypatch, precision)
        run_cells("26_parsing", names, "def own_parser")
        updates += re.findall(
            r"trained here, (\d+) of 9,000 updates\n"
            r"all +2 sentences, F1 \d+\.\d\d\nwithin .+\nbeyond .+\n",
            capsys.readouterr().out,
        )
        scores = {"sentences": 2, "f1": 0.0}
        parts = dict.fromkeys(["all", "within", "beyond"], scores)
        names["evaluate_parser"] = lambda *_, parts=parts: parts
    assert int(updates[0]) < int(updates[1])
    own = tmp_path / "runs" / "craft-pre-norm"
    assert Recipe.for_here("", own).precision == "bfloat16"


# --- full of the chapters that train nothing ------------------------------------------


def some_pairs(name="grammar-en-de", split="test", count=40):
    """A corpus of a few of the grammar's pairs, whatever was asked for."""
    return replace(corpora.load_corpus("grammar-en-de", "valid"), pairs=FEW[:count])


FEW = grammar_split("valid", 40)


@pytest.fixture(scope="module")
def shipped():
    return Translator.from_pretrained("tatoeba-en-de", "cpu")


def test_chapter_08_at_full_counts_the_leaks_of_a_second_language(full, capsys):
    names = names_of(corpora) | dict.fromkeys(["train_set", "valid_set"], some_pairs())
    names |= {"load_corpus": some_pairs, "CorpusUnavailable": ValueError}
    names |= {"SOURCES": {"grammar-en-de": ""}, "fetch": lambda _: (FEW * 2, "")}
    run_cells("08_corpora", names, "def count_seen(", '["tatoeba-en-fr"]')
    said = capsys.readouterr().out
    assert re.findall(r"English +(\w+)$", said, re.M) == ["German", "French"]
    assert "shared French left out" in said


def test_chapter_17_at_full_streams_the_whole_text(full, shipped, capsys):
    names = names_of(translator_module, translator=shipped, time=time)
    names["corpus"] = some_pairs(count=5)
    hood = "under_the_hood/17_translator"
    run_cells(hood, names, "translator.stream(lines, max_lines")
    said = capsys.readouterr().out
    assert re.findall(r"([\d,]+) lines together", said) == ["16", "128", "1,024"]
    assert "0 of 5 lines depend on the size of the batch" in said


def test_chapter_18_at_full_types_the_commands_and_goes_on(
    full, monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    steps = []
    for _ in range(2):
        names: dict = {}
        run_cells("18_command_line", names, "from transformer_lib.command_line import")
        names["load_corpus"] = some_pairs
        run_cells("18_command_line", names, "place = tempfile", "def type_in(")
        typed = names["type_in"]
        names["type_in"] = lambda line, typed=typed, **bar: typed(
            line.replace("--vocab-size 4000", "--vocab-size 340"), **bar
        )
        run_cells(
            "18_command_line",
            names,
            "prepare --train train.en train.de {rest}",
            "transformer-lib train small",
            "transformer-lib average",
        )
        os.chdir(tmp_path)
        said = capsys.readouterr().out
        assert "--max-minutes 0.005" in said and "ended with" not in said
        steps.append(Run.load(tmp_path / "runs/command-line/runs/mine").progress.step)
    assert 1 <= steps[0] < steps[1] and full[0] == "small"


def test_chapter_19_at_full_translates_all_that_is_stored(full, shipped, capsys):
    lines, references = zip(*FEW[:3], strict=True)
    rows = list(zip(lines, references, shipped(lines), strict=True))
    score = evaluation.sacre_bleu([row[2] for row in rows], references).value
    names = {
        "translator": shipped,
        "time": time,
        "by_scale": by_scale,
        "record": {},
        "sacre_bleu": evaluation.sacre_bleu,
        "CorpusUnavailable": KeyError,
        "recorded_outputs": lambda record: rows,
        "headline": {"sentences": 3, "value": score},
    }
    marks = "def translate_again(", "then, now = translate_again("
    hood = "under_the_hood/19_shipped_model"
    run_cells(hood, names, *marks)
    assert "3 sentences in" in capsys.readouterr().out
    names["headline"]["value"] += 0.2  # another score than that of the record
    with pytest.raises(AssertionError):
        run_cells(hood, names, marks[1])


def test_chapter_30_at_full_measures_what_is_longer(full, capsys):
    names: dict = {}
    hood = "under_the_hood/30_errata"
    run_cells(hood, names, "from transformer_lib.attention import")

    def shrunk(small, full):  # a sixteenth of all sizes
        return torch.tensor(full).floor_divide(16).tolist()

    names["by_scale"] = shrunk
    run_cells(hood, names, "def products(", "def forward_times(")
    said = capsys.readouterr().out
    assert said.count("each doubling: times") == 4
    assert said.count("the LSTM takes") == 4  # the stored one of a GPU among them


def test_chapter_31_at_full_trains_with_other_seeds(full, monkeypatch, capsys):
    names = names_of(bugs, mock=mock, nullcontext=contextlib.nullcontext)
    names["greedy_decode"] = lambda model, source, max_extra: source.tolist()
    run_cells("31_bugs", names, "def reversals(", "def mixed_heads(")
    asked = []
    names["learn"] = lambda model, steps: asked.append(steps) or [1.0] * 20
    run_cells("31_bugs", names, "def train_one(", "def train_more(")
    assert asked == [200] * (4 + 16) + [1000] * 12
    shares = [line.count("%") for line in capsys.readouterr().out.splitlines()]
    assert shares == [0, *[4] * 4, 0, *[3] * 4]


def test_chapter_32_at_full_scores_all_records_again(
    full, shipped, monkeypatch, capsys
):
    lines, references = zip(*FEW[:3], strict=True)
    outputs = shipped(lines, max_tokens=2048)
    score = evaluation.sacre_bleu(outputs, references).value
    chrf = evaluation.chrf(outputs, references).value
    kept = {"sacreBLEU": score, "chrF2": chrf}
    record = {
        "outputs": outputs,
        "BLEU": {"value": score},
        "model": "tatoeba-en-de",
        "scores": {k: {"value": v, "sentences": 3} for k, v in kept.items()},
        "outputs_sha256": hashlib.sha256("\n".join(outputs).encode()).hexdigest(),
    }
    rows = list(zip(lines, references, outputs, strict=True))
    monkeypatch.setattr("transformer_lib.runs.recorded_outputs", lambda record: rows)
    names = {
        "ENTRIES": ["one", "two", "three", "four"],
        "read_evidence": lambda name: record,
        "load_corpus": lambda *_: some_pairs(count=3),
        "CorpusUnavailable": KeyError,
    }
    run_cells("32_evidence", names, "def score_again(", "def translate_newstest(")
    said = capsys.readouterr().out
    found = re.findall(r"^(\w+) +sacreBLEU", said, re.M)
    assert found == ["one", "two", "three", "four"]
    assert "every line is the recorded one" in said
