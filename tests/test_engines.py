"""Chapter 22: a Translator says the same whatever decodes, and says what decodes."""

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from served_text import ODD, sentences
from test_export import small_model

from transformer_lib.command_line import main
from transformer_lib.decoding import Hypothesis, decode_rows
from transformer_lib.evaluation import evaluate
from transformer_lib.export import engines
from transformer_lib.runs import load_pretrained
from transformer_lib.translator import Translator


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """One cache for all tests of this file."""
    place = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("TRANSFORMER_LIB_CACHE", str(place))
    return place / "engines"


@pytest.fixture
def any_engine(monkeypatch):
    monkeypatch.delenv("TRANSFORMER_LIB_ENGINE")


def both(**settings):
    """The model that ships, decoded by torch and by CTranslate2."""
    shipped = load_pretrained("tatoeba-en-de", "cpu")
    how = {"engine": "ctranslate2"} | settings
    return Translator(*shipped), Translator(*shipped, **how)


@pytest.fixture(scope="module")
def exact():
    return both(compute_type="float32")


@pytest.mark.parametrize("beam_size", [1, 4])
def test_the_same_texts(exact, beam_size):
    texts = sentences(60)
    ours, theirs = (one(texts, beam_size=beam_size) for one in exact)
    assert ours == theirs


def test_the_same_candidates_and_scores(exact):
    ours, theirs = (one.n_best(sentences(8), 3) for one in exact)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine[0].text == other[0].text
        assert mine[0].score == pytest.approx(other[0].score, abs=1e-3)
        assert mine[0].log_prob == pytest.approx(other[0].log_prob, abs=1e-3)
        assert 1 <= len(other) <= 3
        assert [c.score for c in other] == sorted(
            (c.score for c in other), reverse=True
        )


def test_odd_lines_and_what_is_told_are_the_same(exact):
    told = [], []
    found = [
        one(ODD, beam_size=1, tell=said.append)
        for one, said in zip(exact, told, strict=True)
    ]
    assert found[0] == found[1] and told[0] == told[1] != []


@pytest.mark.parametrize(
    "changes", [{}, {"norm_first": True}, {"positions": "learned"}]
)
def test_a_small_model_and_where_outputs_are_cut_off(changes):
    """It never ends: at the limit torch decodes, so that scores are the same, too."""
    size = {"max_length": 24} if "positions" in changes else {}
    model, tokenizer = small_model(**changes, **size)
    engine = engines.Engine(model, tokenizer, "ctranslate2", "float32")
    rows = [[9, 8, 7], [300 % tokenizer.vocab_size], list(range(5, 15))]
    settings = {"beam_size": 3, "max_extra": 6}
    wanted = decode_rows(model, rows, **settings)
    for ours, theirs in zip(wanted, engine(rows, **settings), strict=True):
        assert ours[0].ids == theirs[0].ids
        assert ours[0].score == pytest.approx(theirs[0].score, abs=1e-3)


def test_what_ctranslate2_has_no_like_of_is_left_to_torch(exact, monkeypatch):
    def refuse(*args, **settings):
        raise AssertionError("CTranslate2 was asked")

    engine = exact[1].engine
    monkeypatch.setattr(engine.exported, "decode", refuse)
    row = [exact[1].tokenizer.encode("I am here.")]
    with pytest.raises(AssertionError, match="was asked"):
        engine(row)
    assert isinstance(engine(row, no_repeat_ngram_size=3)[0][0], Hypothesis)


def test_eight_bits_cost_little(exact):
    """On the whole test set it is measured in benchmarks/engines.py."""
    texts = sentences(100)
    pairs = [*zip(texts, exact[0](texts), strict=True)]  # torch's as references
    record = evaluate(both()[1], pairs, samples=10)
    assert record["BLEU"]["value"] > 85
    assert record["decoding"]["engine"] == "ctranslate2"
    assert record["decoding"]["compute_type"] == "int8"


def test_the_fastest_is_taken_and_told(any_engine, monkeypatch):
    model, tokenizer, _ = load_pretrained("tatoeba-en-de", "cpu")
    with pytest.warns(UserWarning, match="^engine ctranslate2, int8$"):
        assert Translator(model, tokenizer, engine=None).engine.name == "ctranslate2"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Translator(model, tokenizer).engine is None
        Translator(model, tokenizer, engine="ctranslate2")
        monkeypatch.setenv("TRANSFORMER_LIB_ENGINE", "torch")
        assert Translator(model, tokenizer, engine=None).engine.name == "torch"


def test_torch_where_the_model_does_not_fit(any_engine):
    model, tokenizer = small_model(activation="gelu")
    with pytest.warns(
        UserWarning, match=r"^engine torch, float32 \(CTranslate2 has no"
    ):
        chosen = engines.Engine(model, tokenizer)
    assert chosen.name == "torch" and chosen([[7, 8]], max_extra=1)
    with pytest.raises(ValueError, match="no place for activation"):
        engines.Engine(model, tokenizer, "ctranslate2")


def test_without_the_package(any_engine, monkeypatch):
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: None if n == "ctranslate2" else there(n)
    )
    model, tokenizer = small_model()
    with pytest.warns(
        UserWarning, match="^engine torch, float32; ctranslate2 would be"
    ):
        engines.Engine(model, tokenizer)
    for asked in (("ctranslate2", None), (None, "int8")):
        with pytest.raises(ValueError, match="pip install ctranslate2"):
            Translator(model, tokenizer, engine=asked[0], compute_type=asked[1])


@pytest.mark.parametrize(
    "engine, compute_type, telling",
    [
        ("marian", None, "must be one of torch, ctranslate2"),
        ("torch", "int8", "torch computes in float32"),
        ("ctranslate2", "int4", "ctranslate2 computes in int8"),
        (3, None, "engine is of type int"),
        ("torch", [], "compute_type is of type list"),
    ],
)
def test_what_is_not_there_is_told(engine, compute_type, telling):
    with pytest.raises(ValueError, match=telling):
        Translator(*small_model(), engine=engine, compute_type=compute_type)


def test_it_is_exported_once_and_a_damaged_one_is_mended(cache, monkeypatch):
    torch.manual_seed(5)
    model, tokenizer = small_model()
    with torch.no_grad():
        model.output.weight += 0.1 * torch.randn_like(model.output.weight)
    before = {*cache.glob("*")}
    first = engines.proved_export(model, tokenizer, "float32")
    (folder,) = {*cache.glob("*")} - before
    proof = folder / "proved-cpu.json"
    assert json.loads(proof.read_text("utf-8"))["nats"] < 1e-4
    written = (folder / "model.bin").stat().st_mtime_ns
    engines.proved_export(model, tokenizer, "float32")
    assert (folder / "model.bin").stat().st_mtime_ns == written
    whole = (folder / "model.bin").read_bytes()
    (folder / "model.bin").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    mended = engines.proved_export(model, tokenizer, "float32")
    assert (folder / "model.bin").read_bytes() == whole and proof.is_file()
    assert mended.decode([[7, 8]]) == first.decode([[7, 8]])
    with torch.no_grad():  # another model has another folder
        model.output.weight[9] += 1
    engines.proved_export(model, tokenizer, "float32")
    assert len({*cache.glob("*")} - before) == 2


@pytest.mark.parametrize("compute_type", ["float32", "int8"])
def test_an_export_that_says_something_else_is_refused(compute_type, monkeypatch):
    torch.manual_seed(6)
    model, tokenizer = small_model()
    with torch.no_grad():
        model.output.weight += torch.randn_like(model.output.weight)
    write = engines.export_ctranslate2

    def wrong(model, *rest):
        layer = model.decoder.layers[1].feed_forward.w_2.weight
        kept = layer.detach().clone()
        with torch.no_grad():
            layer.mul_(-3)
        write(model, *rest)
        with torch.no_grad():
            layer.copy_(kept)

    monkeypatch.setattr(engines, "export_ctranslate2", wrong)
    with pytest.raises(RuntimeError, match=f"in {compute_type} is off by"):
        engines.Engine(model, tokenizer, "ctranslate2", compute_type)
    with pytest.raises(RuntimeError, match="is off by"):  # nor later
        engines.Engine(model, tokenizer, "ctranslate2", compute_type)


def test_the_core_works_without_it(tmp_path):
    """No import of it where torch decodes."""
    code = (
        "import sys; from transformer_lib import Translator\n"
        "print(Translator.from_pretrained('tatoeba-en-de', 'cpu')('Hello.'))\n"
        "print('ctranslate2' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.endswith("\nFalse\n"), done.stderr


def test_the_command_line_says_what_decodes(any_engine, tmp_path, capsys):
    (tmp_path / "a").write_text("Where is the station?\n")
    ask = ["translate", "tatoeba-en-de", str(tmp_path / "a"), "--device", "cpu"]
    assert main(ask) == 0
    said = capsys.readouterr()
    assert said.out == "Wo ist der Bahnhof?\n"
    assert said.err == "transformer-lib: engine ctranslate2, int8\n"
    for more in (["--engine", "torch"], ["--compute-type", "float32"]):
        assert main([*ask, *more]) == 0
        assert capsys.readouterr() == ("Wo ist der Bahnhof?\n", "")
    assert main([*ask, "--engine", "torch", "--compute-type", "int8"]) == 2
    assert "torch computes in float32" in capsys.readouterr().err


def test_the_benchmark_runs(tmp_path):
    """benchmarks/engines.py --quick: all lines, and what each says."""
    place = Path(__file__).parents[1] / "benchmarks" / "engines.py"
    # Where all cores are busy, a thread that waits for another one should not compute.
    passive = os.environ | {"OMP_WAIT_POLICY": "passive"}
    words = [sys.executable, place, "--quick", "--out", tmp_path / "record.json"]
    subprocess.run(words, env=passive, check=True)
    record = json.loads((tmp_path / "record.json").read_text("utf-8"))
    assert [(one["threads"], one["batch"]) for one in record["speeds"]] == [
        (1, 1),
        (1, 32),
        (2, 1),
        (2, 32),
    ]
    table = record["quality"]["engines"]
    assert table["Translator float32"]["different"] == 0
    assert set(table) == set(record["speeds"][0]["sentences_per_second"])
