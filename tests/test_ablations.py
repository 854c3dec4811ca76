"""Chapter 25: the rows of Table 3, from one base, in runs that can be interrupted."""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import sacrebleu
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import without_times

from transformer_lib import ablations
from transformer_lib.ablations import (
    CLAIMS,
    PAPER_BASE,
    ROWS,
    TABLE3,
    Row,
    ablate,
    bootstrap_agreement,
    compare,
    holm,
    measure_run,
    paired_differences,
    paper_difference,
    pooled_spread,
    rank_agreement,
    ranks,
    read_results,
    scaled,
    sign_agreement,
    t_quantile,
    table,
    table_text,
    variation,
    within_t,
)
from transformer_lib.batches import Prepared, prepare
from transformer_lib.command_line import main
from transformer_lib.corpora import grammar_split, load_corpus
from transformer_lib.exercises.ablations import (
    check_clear,
    check_proportion,
    check_ranks,
)
from transformer_lib.runs import Recipe, Run
from transformer_lib.storage import claimed
from transformer_lib.tokenizer import BOS, EOS
from transformer_lib.transformer import Transformer, TransformerConfig

# Table 3 as printed: N, d_model, d_ff, h, d_k, d_v, P_drop, smoothing, steps,
# perplexity, BLEU, millions of parameters. Typed from the paper, not from the module.
PRINTED = """
base      6  512 2048  8  64  64 0.1 0.1 100000 4.92 25.8  65
A1        6  512 2048  1 512 512 0.1 0.1 100000 5.29 24.9   -
A4        6  512 2048  4 128 128 0.1 0.1 100000 5.00 25.5   -
A16       6  512 2048 16  32  32 0.1 0.1 100000 4.91 25.8   -
A32       6  512 2048 32  16  16 0.1 0.1 100000 5.01 25.4   -
B16       6  512 2048  8  16  64 0.1 0.1 100000 5.16 25.1  58
B32       6  512 2048  8  32  64 0.1 0.1 100000 5.01 25.4  60
C-N2      2  512 2048  8  64  64 0.1 0.1 100000 6.11 23.7  36
C-N4      4  512 2048  8  64  64 0.1 0.1 100000 5.19 25.3  50
C-N8      8  512 2048  8  64  64 0.1 0.1 100000 4.88 25.5  80
C-d256    6  256 2048  8  32  32 0.1 0.1 100000 5.75 24.5  28
C-d1024   6 1024 2048  8 128 128 0.1 0.1 100000 4.66 26.0 168
C-ff1024  6  512 1024  8  64  64 0.1 0.1 100000 5.12 25.4  53
C-ff4096  6  512 4096  8  64  64 0.1 0.1 100000 4.75 26.2  90
D-drop0.0 6  512 2048  8  64  64 0.0 0.1 100000 5.77 24.6   -
D-drop0.2 6  512 2048  8  64  64 0.2 0.1 100000 4.95 25.5   -
D-ls0.0   6  512 2048  8  64  64 0.1 0.0 100000 4.67 25.3   -
D-ls0.2   6  512 2048  8  64  64 0.1 0.2 100000 5.47 25.7   -
E         6  512 2048  8  64  64 0.1 0.1 100000 4.92 25.7   -
big       6 1024 4096 16  64  64 0.3 0.1 300000 4.33 26.4 213
"""
PRINTED = [line.split() for line in PRINTED.strip().splitlines()]
SIZES = ("num_layers", "d_model", "d_ff", "num_heads", "d_k", "d_v", "dropout")
TINY = {"d_model": 32, "d_ff": 64, "num_heads": 8, "num_layers": 3, "dropout": 0.1}


def paper_recipe() -> Recipe:
    return Recipe("base", "newstest-en-de", vocab_size=41_100, max_steps=100_000)


def tiny(**changes) -> Recipe:
    settings = {
        "vocab_size": 350,
        "max_tokens": 300,
        "max_steps": 30,
        "warmup": 10,
        "validate_every": 10,
        "max_pairs": 600,
        "corpus": "grammar-en-de",
        "model": TINY,
    }
    return Recipe("tiny", **(settings | changes))


# --- the rows are the paper's ---------------------------------------------------------


@pytest.mark.parametrize("printed", PRINTED, ids=lambda row: row[0])
def test_every_row_is_the_papers(printed):
    key, row = printed[0], TABLE3[printed[0]]
    recipe = variation(paper_recipe(), row, longer=True)
    config = TransformerConfig(recipe.vocab_size, **recipe.model)
    got = [getattr(config, name) for name in SIZES] + [
        recipe.label_smoothing,
        recipe.max_steps,
    ]
    assert got == [float(value) for value in printed[1:10]]
    assert config.positions == ("learned" if key == "E" else "sinusoidal")
    assert not config.norm_first and config.tie_embeddings
    assert [row.perplexity, row.bleu] == [float(value) for value in printed[10:12]]
    millions = None if printed[12] == "-" else float(printed[12])
    assert row.millions == millions
    if millions and key != "big":
        assert round(config.num_parameters() / 1e6) == millions


def test_there_are_twenty_rows_and_pre_norm():
    assert list(TABLE3) == [row[0] for row in PRINTED]
    assert list(ROWS) == [*TABLE3, "pre-norm"]
    assert variation(paper_recipe(), ROWS["pre-norm"]).model["norm_first"] is True


def test_row_a_keeps_the_computation_and_the_parameters():
    base = variation(paper_recipe(), TABLE3["base"])
    count = TransformerConfig(1000, **base.model).num_parameters()
    for key in ("A1", "A4", "A16", "A32"):
        model = variation(paper_recipe(), TABLE3[key]).model
        assert TransformerConfig(1000, **model).num_parameters() == count


@pytest.mark.parametrize("key", ROWS)
def test_rows_keep_their_proportion_in_a_small_base(key):
    small = variation(Recipe.load("table3-small"), ROWS[key]).model
    paper = variation(paper_recipe(), ROWS[key]).model
    config = TransformerConfig(100, **small)
    full = TransformerConfig(100, **paper)
    assert config.num_layers / 3 == full.num_layers / 6
    for name, here, there in (
        ("d_model", 64, 512),
        ("d_ff", 256, 2048),
        ("num_heads", 8, 8),
        ("d_k", 8, 64),
        ("d_v", 8, 64),
    ):
        assert getattr(config, name) / here == getattr(full, name) / there, name
    for name in ("dropout", "positions", "norm_first"):
        assert getattr(config, name) == getattr(full, name)
    Transformer(config)  # can be built


@pytest.mark.parametrize("key", [key for key in ROWS if key != "A1"])
def test_every_row_comes_out_whole_in_the_replica(key):
    base = Recipe.load("table3-replica")
    made = variation(base, ROWS[key]).model
    heads, d_k = made["num_heads"], made["d_k"]
    if key.startswith("A"):  # the computation of all heads together stays the same
        assert heads * d_k == 64 and heads == int(key[1:]) // 2
    Transformer(TransformerConfig(100, **made))


def test_one_head_takes_the_width_of_all():
    made = variation(Recipe.load("table3-replica"), ROWS["A1"]).model
    assert (made["num_heads"], made["d_k"], made["d_v"]) == (1, 64, 64)


def test_equal_budget_unless_longer_is_asked_for():
    assert variation(tiny(), TABLE3["big"]).max_steps == 30
    assert variation(tiny(), TABLE3["big"], longer=True).max_steps == 90


def test_a_base_in_which_a_row_is_not_whole_is_refused():
    with pytest.raises(ValueError, match=r"d_k=16 .* 0\.5 of the base's 2"):
        variation(tiny(model=TINY | {"d_model": 16}), TABLE3["B16"])
    with pytest.raises(ValueError, match="num_layers=2 .* choose a base"):
        variation(tiny(model=TINY | {"num_layers": 2}), TABLE3["C-N2"])


@given(
    st.sampled_from(sorted(set(PAPER_BASE) - {"dropout", "label_smoothing"})),
    st.integers(1, 4096),
    st.integers(1, 4096),
)
def test_scaled_is_the_same_proportion_or_refused(name, value, base_value):
    try:
        got = scaled(name, value, base_value)
    except ValueError as error:
        assert name in str(error)
        assert value * base_value % PAPER_BASE[name]
    else:
        assert got * PAPER_BASE[name] == value * base_value and got >= 1


# --- running them ---------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As the processes below have: sums depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Few pairs of the embedded grammar, as files of a user's."""
    folder, files = tmp_path_factory.mktemp("text"), {}
    for split, count in ("train", 600), ("valid", 40), ("test", 40):
        files[split] = str(folder / f"{split}.tsv")
        lines = [f"{a}\t{b}\n" for a, b in grammar_split(split, count)]
        Path(files[split]).write_text("".join(lines), encoding="utf-8")
    return files


@pytest.fixture(scope="module")
def base(corpus):
    return tiny(corpus=corpus, max_steps=12, validate_every=4)


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    """Two rows, not interrupted."""
    out = tmp_path_factory.mktemp("whole")
    found = ablate(base, out, ["base", "C-N2"], device="cpu", sentences=4, show=False)
    return out, found


def test_results_say_everything(whole):
    _, results = whole
    assert [r["row"] for r in results] == ["base", "C-N2"]
    for result in results:
        model = Recipe.of(result["recipe"]).model
        built = Transformer(TransformerConfig(350, **model))
        assert result["parameters"] == sum(p.numel() for p in built.parameters())
        assert result["updates"] == 12 and result["sentences"] == 4
        losses = [at["valid_loss"] for at in result["history"]]
        assert result["history"][-1]["step"] == 12
        assert losses[-1] == pytest.approx(math.log(result["perplexity"]))
        assert result["perplexity"] > 1 and 0 <= result["bleu"] <= 100
        assert "nrefs:1" in result["signature"]
        assert {"hardware", "commit", "date"} <= result["environment"].keys()
        assert len(result["data"]["sha256"]) == 64


def test_the_loss_is_of_the_split_that_is_scored(whole, base, tmp_path):
    """Against torch's own cross-entropy, on the test pairs and on training pairs."""
    out, results = whole
    (result,) = ablate(
        base,
        tmp_path,
        ["base"],
        device="cpu",
        sentences=4,
        show=False,
        split="test",
        data_dir=out / "data",
    )
    run = Run.load(tmp_path / "base-0", "cpu", weights="last")
    pairs = load_corpus(base.corpus, "test").pairs
    pairs = pairs[:: math.ceil(len(pairs) / 4)]
    total = count = 0
    for source, target in pairs:
        ids = torch.tensor([run.tokenizer.encode(source) + [EOS]])
        tgt = run.tokenizer.encode(target)
        logits = run.model(ids, torch.tensor([[BOS, *tgt]]))[0]
        wanted = torch.tensor([*tgt, EOS])
        total += F.cross_entropy(logits, wanted, reduction="sum").item()
        count += len(wanted)
    assert result["split"] == "test" and result["sentences"] == len(pairs)
    assert result["test_loss"] == pytest.approx(total / count, rel=1e-4)
    assert "test_loss" not in results[0] and results[0]["split"] == "valid"
    assert 0 < result["train_loss"] < 10


def test_bleu_is_sacrebleus_of_what_the_run_says(whole, monkeypatch):
    """So short a run says nothing: others' words are put in its mouth."""
    out, results = whole
    pairs = load_corpus(results[0]["recipe"]["corpus"], "valid").pairs
    references = [target for _, target in pairs]
    said = [" ".join([*target.split()[:-1], "Haus."]) for target in references]
    monkeypatch.setattr(ablations, "Translator", lambda *_, **__: lambda *_, **__: said)
    recipe, places = Recipe.of(results[0]["recipe"]), (out / "base-0", out / "data")
    found = measure_run(recipe, *places, pairs, "valid", "cpu", show=False)
    wanted = sacrebleu.corpus_bleu(said, [references])
    assert found["bleu"] == wanted.score and 20 < wanted.score < 99


def test_what_is_finished_is_not_repeated(whole, base):
    out, results = whole
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.suffix != ".lock"}
    again = ablate(base, out, ["base", "C-N2"], device="cpu", sentences=4, show=False)
    assert again == results
    assert before == {p: p.stat().st_mtime_ns for p in before}


def test_another_base_is_refused(whole, base):
    out, _ = whole
    longer = replace(base, max_steps=40)
    with pytest.raises(ValueError, match=r"base-0\.json .* differs in \['max_steps'\]"):
        ablate(longer, out, ["base"], sentences=4, show=False)


def test_text_is_prepared_as_the_recipe_cuts_it(base, tmp_path):
    """Cuts drawn at random, and several of them: `train` refuses other data."""
    base = replace(base, subword_sampling=0.1, copies=2, max_steps=1, warmup=1)
    (result,) = ablate(base, tmp_path, ["base"], device="cpu", sentences=4, show=False)
    assert (
        result["recipe"]["subword_sampling"] == 0.1 and result["recipe"]["copies"] == 2
    )
    ready = Prepared.load(tmp_path / "data")
    assert len(ready.train) == 2 * ready.data["train_pairs"]


def test_unknown_rows_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"\['Z9'\] are unknown; there are base, A1"):
        ablate(tiny(), tmp_path / "out", ["base", "Z9"])
    for sentences in (0, -1):
        with pytest.raises(ValueError, match=f"sentences={sentences}: must be 1 or"):
            ablate(tiny(), tmp_path / "none", ["base"], sentences=sentences)
    assert not (tmp_path / "none").exists()
    assert not (tmp_path / "out").exists()


def test_a_row_that_another_process_runs_is_left_to_it(whole, base):
    out, results = whole
    with claimed(out / "E-0.lock") as mine:
        assert mine
        with claimed(out / "E-0.lock") as second:
            assert not second
        got = ablate(base, out, ["E"], device="cpu", sentences=4, show=False)
    assert got == results and not (out / "E-0.json").exists()


COMMAND = [
    "ablate",
    "{recipe}",
    "--rows",
    "base",
    "C-N2",
    "--sentences",
    "4",
    "--device",
    "cpu",
]


def test_killed_anywhere_the_table_is_the_same(whole, base, tmp_path, capsys):
    """SIGKILL at several moments; the command again; the same results to the bit."""
    out, recipe = tmp_path / "out", tmp_path / "tiny.toml"
    tables = {"": asdict(base)}
    tables |= {f"[{name}]\n": tables[""].pop(name) for name in ("corpus", "model")}
    lines = [
        head
        + "".join(f"{k} = {json.dumps(v)}\n" for k, v in part.items() if v is not None)
        for head, part in tables.items()
    ]
    recipe.write_text("".join(lines))
    command = [
        sys.executable,
        "-c",
        "import sys; from transformer_lib.command_line import main; sys.exit(main())",
    ]
    words = [word.format(recipe=recipe) for word in COMMAND] + ["--out", str(out)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    began = {"run": out / "base-0" / "recipe.json", "first": out / "base-0.json"}
    for moment in ("run", "first"):
        with subprocess.Popen(
            command + words,
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            limit = time.monotonic() + 1800
            while not began[moment].exists() and process.poll() is None:
                assert time.monotonic() < limit
                time.sleep(0.02)
            assert process.poll() is None, "it was through before it could be killed"
            process.send_signal(signal.SIGKILL)
    first = (out / "base-0.json").stat().st_mtime_ns
    assert main(words) == 0
    assert (out / "base-0.json").stat().st_mtime_ns == first
    got = [without_times(result) for result in read_results(out)]
    assert got == [without_times(result) for result in whole[1]]
    said = capsys.readouterr().out
    assert "C-N2" in said and "6.11" in said  # the paper's, beside ours


def test_the_command_says_what_is_wrong(capsys, tmp_path):
    assert main(["ablate", "table3-small", "--out", str(tmp_path), "--rows", "Q"]) == 2
    assert "rows ['Q'] are unknown" in capsys.readouterr().err


# --- the table ------------------------------------------------------------------------


def result(row: str, perplexity: float, bleu: float, seed: int = 0) -> dict:
    return {
        "row": row,
        "seed": seed,
        "perplexity": perplexity,
        "bleu": bleu,
        "parameters": 2_000_000,
    }


def test_table_over_seeds():
    lines = table(
        [
            result("base", 10.0, 5.0),
            result("base", 12.0, 7.0, 1),
            result("A1", 13.0, 4.0),
        ]
    )
    assert [line["row"] for line in lines] == ["base", "A1"]
    assert lines[0]["perplexity"] == 11.0 and lines[0]["bleu"] == 6.0
    assert lines[0]["perplexity_spread"] == pytest.approx(math.sqrt(2))
    assert math.isnan(lines[1]["perplexity_spread"]) and lines[1]["seeds"] == 1
    text = table_text(lines)
    assert "11.00 ± 1.41" in text and "4.92   25.8" in text
    widths = {len(line) for line in text.splitlines()[2:]}
    assert len(widths) == 1  # the columns are straight


def runs_of(**rows) -> list[dict]:
    """Results from row -> losses by seed, 0, 1 and so on."""
    return [
        result(row.replace("_", "-"), math.exp(loss), 5.0, seed)
        for row, values in rows.items()
        for seed, loss in enumerate(values)
    ]


# t for two-sided 95%, as printed in tables of Student's distribution.
T_TABLE = {
    1: 12.706,
    2: 4.303,
    3: 3.182,
    4: 2.776,
    5: 2.571,
    6: 2.447,
    7: 2.365,
    8: 2.306,
    10: 2.228,
    12: 2.179,
    15: 2.131,
    20: 2.086,
    30: 2.042,
    60: 2.000,
    120: 1.980,
}


@pytest.mark.parametrize("freedom, t", T_TABLE.items())
def test_quantiles_are_the_printed_ones(freedom, t):
    assert t_quantile(freedom) == pytest.approx(t, abs=6e-4)
    assert within_t(t_quantile(freedom, 0.99), freedom) == pytest.approx(0.99)


def test_t_has_closed_forms_for_one_and_two():
    for t in (0.1, 1.0, 3.7):
        assert within_t(t, 1) == pytest.approx(2 / math.pi * math.atan(t))  # Cauchy's
        assert within_t(t, 2) == pytest.approx(t / math.sqrt(2 + t * t))
    assert t_quantile(6, 0.99) == pytest.approx(3.707, abs=6e-4)
    assert t_quantile(10, 0.999) == pytest.approx(4.587, abs=6e-4)


def test_spread_is_pooled_over_paired_differences():
    """As the residual error of one-way analysis of variance on the differences."""
    runs = runs_of(base=[2.0, 2.3, 2.1], A1=[2.4, 2.9], A4=[2.1, 2.2, 2.4], A16=[2.0])
    found = paired_differences(runs)
    assert found["A1"] == pytest.approx([0.4, 0.6]) and next(iter(found)) == "A1"
    assert found["A16"] == pytest.approx([0.0])
    several = [np.array(found[key]) for key in ("A1", "A4")]
    residuals = np.concatenate([v - v.mean() for v in several])
    spread, freedom = pooled_spread(found)
    assert freedom == 3 == len(residuals) - 2
    assert spread == pytest.approx(math.sqrt((residuals**2).sum() / 3))
    assert math.isnan(pooled_spread({"A1": [0.4]})[0])
    error = {row["row"]: row["error"] for row in compare(runs)}
    assert error["A1"] == pytest.approx(3.182 * spread / math.sqrt(2), rel=1e-3)
    assert error["A16"] == pytest.approx(3.182 * spread, rel=1e-3)


def test_runs_are_paired_by_seed():
    base = [result("base", math.exp(x), 5, s) for s, x in ((3, 2.0), (5, 2.5))]
    row = [result("E", math.exp(x), 5, s) for s, x in ((5, 2.6), (3, 2.2), (9, 7.0))]
    assert paired_differences(base + row)["E"] == pytest.approx([0.2, 0.1])
    with pytest.raises(ValueError, match=r"E was run with seeds \[9\], the base with"):
        paired_differences(base + row[2:])


def test_losses_are_of_the_test_set_where_all_have_one():
    runs = runs_of(base=[2.0], E=[2.5])
    assert paired_differences(runs)["E"] == pytest.approx([0.5])
    tested = [run | {"test_loss": 3.0 + i} for i, run in enumerate(runs)]
    assert paired_differences(tested) == {"E": [1.0]}
    with pytest.raises(ValueError, match="1 of 2 runs have a test_loss"):
        paired_differences([tested[0], runs[1]])


def test_claims_are_the_twelve_of_at_least_3_5_percent():
    """Typed from the design of the experiment, not from the rule."""
    assert set(CLAIMS) == set(
        "A1 B16 C-N2 C-N4 C-d256 C-d1024 C-ff1024 C-ff4096 "
        "D-drop0.0 D-ls0.0 D-ls0.2 big".split()
    )
    others = [key for key in TABLE3 if key not in CLAIMS]
    assert all(abs(paper_difference(key)) < 0.02 for key in others)


def test_holm_by_hand():
    """Sorted, times 4, 3, 2, 1; none is smaller than the one before it."""
    got = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert got == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({"a": 0.7, "b": 0.9}) == {"a": 1.0, "b": 1.0}


def test_verdicts_know_the_noise():
    runs = runs_of(
        base=[2.0, 2.1, 2.2],
        A4=[2.001, 2.101, 2.202],
        E=[2.3, 2.4, 2.5],
        C_N2=[2.2, 2.3, 2.4],
        big=[2.5, 2.6, 2.7],
        A1=[2.0, 2.1, 2.2],
        **{"D_drop0.2": [2.006, 2.106, 2.206]},
    )
    found = {row["row"]: row["verdict"] for row in compare(runs)}
    assert found == {
        "A1": "not decided",
        "A4": "equal, as predicted",
        "C-N2": "as in the paper",
        "D-drop0.2": "equal, as predicted",
        "E": "not equal",
        "big": "the reverse",
    }
    alone = compare(runs_of(base=[2.0], A1=[2.5], E=[2.5]))
    assert {row["verdict"] for row in alone} == {"not decided"}  # no noise is known
    assert all(math.isnan(row["error"]) and row["p"] is None for row in alone)


def test_a_factor_of_two_is_not_enough_for_few_degrees_of_freedom():
    """In the short runs these two passed for clear at two standard errors."""
    compared = compare(SHORT_RUNS)
    spread, freedom = pooled_spread(paired_differences(SHORT_RUNS))
    assert freedom == 4
    found = {row["row"]: row for row in compared}
    for key in ("C-d1024", "C-ff1024"):
        assert abs(found[key]["ours"]) > 2 * spread
        assert found[key]["verdict"] == "not decided"
    assert found["D-drop0.2"]["verdict"] == "not equal"  # it never agreed by 0.6%


SHORT_RUNS = [
    result(row, value, 4.0, seed)
    for row, *values in (
        ("base", 75.611, 71.884, 73.635),
        ("A4", 73.753, 70.499),
        ("A16", 80.309, 75.776),
        ("E", 62.621, 59.294),
        ("pre-norm", 42.757, 43.403),
        ("C-d1024", 68.759),
        ("C-ff1024", 80.433),
        ("D-drop0.2", 100.02),
        ("C-N2", 49.493),
        ("B16", 86.108),
        ("A1", 71.56),
        ("C-N4", 52.415),
        ("C-d256", 101.402),
        ("C-ff4096", 77.795),
        ("D-drop0.0", 52.969),
        ("D-ls0.0", 72.477),
        ("D-ls0.2", 84.172),
        ("big", 125.564),
    )
    for seed, value in enumerate(values)
]


@pytest.mark.parametrize("right, ways", [(12, 1), (10, 79), (6, 2510)])
def test_signs_and_their_chance(right, ways):
    claims = []
    for i, key in enumerate(CLAIMS):
        paper = paper_difference(key)
        ours = paper if i < right else -paper
        claims.append({"row": key, "paper": paper, "ours": ours})
    others = [{"row": "E", "ours": 1.0, "paper": 0.0}]
    assert sign_agreement(claims + others) == (right, 12, pytest.approx(ways / 4096))


def test_bootstrap_of_the_rank_correlation():
    rows = {key.replace("-", "_"): [2 + 3 * paper_difference(key)] for key in CLAIMS}
    calm = runs_of(base=[2.0, 2.0], E=[2.5, 2.5001], **rows)
    value, low, high = bootstrap_agreement(calm, samples=200)
    assert value == pytest.approx(1) and low > 0.98
    wild = runs_of(base=[2.0, 2.0], E=[2.0, 4.0], **rows)
    value, low, high = bootstrap_agreement(wild, samples=200)
    assert value == pytest.approx(1) and low < 0.8 and high <= 1
    assert bootstrap_agreement(wild, 200) == bootstrap_agreement(wild, 200)
    value, low, _ = bootstrap_agreement(runs_of(base=[2.0], **rows))
    assert value == pytest.approx(1) and math.isnan(low)


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=2))
@settings(max_examples=50)
def test_ranks_and_their_correlation(pairs):
    ours, theirs = ([float(x) for x in side] for side in zip(*pairs, strict=True))
    got = ranks(ours)
    assert sum(got) == len(ours) * (len(ours) + 1) / 2
    order = np.argsort(got, kind="stable")
    assert np.all(np.diff(np.array(ours)[order]) >= 0)
    if len(set(ours)) > 1 and len(set(theirs)) > 1:
        value = rank_agreement(ours, theirs)
        assert value == pytest.approx(np.corrcoef(got, ranks(theirs))[0, 1], abs=1e-9)
        assert value == pytest.approx(rank_agreement([x**3 for x in ours], theirs))
        assert rank_agreement(ours, [-x for x in ours]) == pytest.approx(-1)


def test_rank_agreement_by_hand():
    # 1 - 6 * sum(d^2) / (n (n^2 - 1)), d = 0, 1, 1, 0, with n = 4
    assert rank_agreement([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    with pytest.raises(ValueError, match="1 and 2 values"):
        rank_agreement([1], [1, 2])


def test_row_is_a_plain_record():
    assert asdict(Row("x", {"d_k": 8})) == {
        "key": "x",
        "changes": {"d_k": 8},
        "perplexity": None,
        "bleu": None,
        "millions": None,
    }
    assert replace(TABLE3["A1"], bleu=0.0).bleu == 0.0


# --- exercises ------------------------------------------------------------------------


def lowest(values):
    return [sum(o < v for o in values) + 1 for v in values]


def clear(variance, divide=True, keep_sign=False):
    def is_clear(a, b):
        error = sum(variance(x) / (len(x) if divide else 1) for x in (a, b)) ** 0.5
        gap = np.mean(a) - np.mean(b)
        return bool((gap if keep_sign else abs(gap)) > 2 * error)

    return is_clear


def sample(x):
    return np.var(x, ddof=1)


@pytest.mark.parametrize(
    "check, wrong, telling",
    [
        (check_proportion, lambda row, base, paper=64: row, "the paper's 16"),
        (check_proportion, lambda row, base, paper=64: base * paper // row, "around"),
        (check_proportion, lambda row, base, paper=64: row * base // 64, "paper_d_k"),
        (check_proportion, lambda row, base, paper=64: row * base / paper, "whole"),
        (check_ranks, lambda v: [sum(o < x for o in v) for x in v], "counted from 0"),
        (check_ranks, lambda v: lowest([-x for x in v]), "goes to the smallest"),
        (check_ranks, lowest, "the lowest"),
        (check_ranks, lambda v: [sum(o <= x for o in v) for x in v], "the highest"),
        (
            check_ranks,
            lambda v: (np.argsort(np.argsort(v, kind="stable")) + 1).tolist(),
            "different ranks",
        ),
        (check_clear, lambda a, b: np.mean(a) != np.mean(b), "not clear"),
        (check_clear, clear(sample, keep_sign=True), "absolute value"),
        (check_clear, clear(sample, divide=False), "number of runs"),
        (check_clear, clear(np.var), "n - 1"),
    ],
)
def test_mistakes_are_named(check, wrong, telling):
    verdict = check(wrong)
    assert not verdict.passed
    assert telling in verdict.message


def test_bleu_is_measured_on_the_text_that_was_prepared(tmp_path, monkeypatch):
    """With --data, not on the recipe's corpus, of which pairs could be in that text."""
    pairs = load_corpus("grammar-en-de", "train").pairs[:900]
    text = tmp_path / "mine.tsv"
    text.write_text("".join(f"{en}\t{de}\n" for en, de in pairs), "utf-8")
    corpus = {"train": str(text), "share": 0.1}
    prepare(corpus, tmp_path / "data", 350)
    seen = []
    monkeypatch.setattr(
        ablations,
        "measure_run",
        lambda recipe, run, data, pairs, *_: (
            seen.append(pairs)
            or {"recipe": asdict(recipe), "perplexity": 1.0, "bleu": 1.0}
        ),
    )
    base = tiny()  # its corpus is the grammar's
    ablate(
        base,
        tmp_path / "out",
        ["base"],
        (0,),
        tmp_path / "data",
        "cpu",
        sentences=25,
        show=False,
    )
    held_out = load_corpus(corpus, "valid").pairs
    assert len(held_out) > 50, "too few to see that they are spread out"
    assert seen == [held_out[:: math.ceil(len(held_out) / 25)]]
    assert 13 <= len(seen[0]) <= 25


def test_alike_places_against_other_ways():
    """The cosines by torch, pair by pair, of what the encoder itself gives."""
    import alike_places

    torch.manual_seed(0)
    tiny = {"d_model": 16, "num_heads": 2, "num_layers": 2, "d_ff": 16}
    model = Transformer(TransformerConfig(30, **tiny)).eval()
    sources = [[5, 6, 7, 3], [8, 9, 3], [5, 3]]
    with torch.inference_mode():
        encoded = [model.encode(torch.tensor([ids])) for ids in sources]
    cosine = torch.nn.functional.cosine_similarity
    last = []
    for memory in encoded:
        two = itertools.permutations(memory[0], 2)
        last.append(float(torch.stack([cosine(a, b, dim=0) for a, b in two]).mean()))
    layers = alike_places.by_layer(model, sources)
    assert len(layers) == 3 and len(set(layers)) == 3
    assert layers[-1] == pytest.approx(sum(last) / 3, abs=1e-4)
    pairs = [("a", "A"), ("b b", "B"), ("c c c", "C"), ("d d", "D")]
    others = alike_places.with_other_sources(pairs)
    assert sorted(t for _, t in others) == list("ABCD") and not set(others) & set(pairs)
