"""The record of a trained translator, as experiments/evidence.py makes it."""

import json
from dataclasses import replace

import evidence
import pytest
import sacrebleu
import ship
import small_runs
import torch

from transformer_lib.corpora import load_corpus
from transformer_lib.figures import shipped_model
from transformer_lib.runs import Run, load_pretrained, read_evidence
from transformer_lib.training import validation_loss

data_dir, train = small_runs.data_dir, small_runs.train


def few(name, split="train"):
    """Twelve pairs of each split."""
    corpus = load_corpus(name, split)
    return replace(corpus, pairs=corpus.pairs[:12])


@pytest.fixture
def run_dir(train, tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "load_corpus", few)
    train(small_runs.tiny(keep_last=2), tmp_path / "run")
    return tmp_path / "run"


def test_all_weights_are_scored_and_the_headline_is_the_papers_way(run_dir, capsys):
    record = evidence.record_of(run_dir, "cpu")
    said = [row["weights"].partition(",")[0] for row in record["choices"]]
    assert said[-3:] == ["mean of 2"] * 3 and set(said[:-3]) <= {"best", "last"}
    in_8_bits, headline = record["choices"][-2:]
    assert in_8_bits["weights"].endswith("in 8 bits")
    assert record["scores"]["sacreBLEU"]["value"] == headline["sacreBLEU"]["value"]
    assert headline["decoding"].startswith("beam 4")
    assert record["finished"] and len(record["outputs"]) == len(few("grammar-en-de"))
    assert capsys.readouterr().out.count("BLEU") == len(said)


def test_scores_and_losses_are_those_of_the_weights_named(run_dir):
    record = evidence.record_of(run_dir, "cpu", ["average"])
    assert len(record["choices"]) == 3
    run = Run.load(run_dir, "cpu", "average")
    run.model.half().float()  # as it is shipped
    test = few("grammar-en-de", "test").pairs
    outputs = list(record["outputs"].values())
    theirs = sacrebleu.corpus_bleu(outputs, [[target for _, target in test]]).score
    assert record["scores"]["sacreBLEU"]["value"] == pytest.approx(theirs)
    assert record["losses"]["weights"] == record["choices"][-1]["weights"]
    pairs = evidence.tokenize_pairs(test, run.tokenizer, run.recipe.max_length)
    loss = validation_loss(run.model, pairs, 4096)
    assert record["losses"]["test"] == pytest.approx(loss, abs=1e-5)


def test_merged_weights_are_half_those_that_the_run_started_from(
    run_dir, train, tmp_path, monkeypatch
):
    monkeypatch.setattr(evidence, "runs_folder", lambda: tmp_path)
    evidence.loaded(run_dir, "cpu", "average").save_pretrained(run_dir / "averaged")
    further = small_runs.tiny(keep_last=2, start_from=str(run_dir / "averaged"))
    train(further, tmp_path / "further")
    start, *_ = load_pretrained(run_dir / "averaged", "cpu")
    averaged = Run.load(tmp_path / "further", "cpu", "average").model
    merged = evidence.loaded(tmp_path / "further", "cpu", "merged").model
    assert not torch.equal(averaged.src_embedding.weight, start.src_embedding.weight)
    for one, other, mean in zip(
        start.parameters(), averaged.parameters(), merged.parameters(), strict=True
    ):
        torch.testing.assert_close(mean, ((one + other) / 2).half().float())
    record = evidence.record_of(tmp_path / "further", "cpu", ["merged"])
    assert "run/averaged" in record["losses"]["weights"]


def test_the_command_scores_and_leaves_what_can_be_shipped(run_dir, tmp_path):
    out = tmp_path / "record.json"
    recipe = 'name = "t"\ncorpus = "grammar-en-de"\nvocab_size = 340\n'
    (tmp_path / "recipe.toml").write_text(recipe, "utf-8")
    evidence.main(
        [
            str(tmp_path / "recipe.toml"),
            "--run-dir",
            str(run_dir),
            "--score-only",
            "--weights",
            "average",
            "--device",
            "cpu",
            "--out",
            str(out),
        ]
    )
    assert out.is_file()
    assert (run_dir / "averaged" / "weights.safetensors").is_file()


def test_a_finished_run_becomes_the_model_that_ships(run_dir, tmp_path, monkeypatch):
    library = tmp_path / "library"
    (library / "evidence").mkdir(parents=True)
    with pytest.raises(ValueError, match="no record.json"):
        ship.ship(run_dir, "known", library)
    record = evidence.record_of(run_dir, "cpu", ["average"])
    kept = run_dir / "record.json"
    kept.write_text(json.dumps(record | {"finished": False}), "utf-8")
    with pytest.raises(ValueError, match="not finished"):
        ship.ship(run_dir, "known", library)
    kept.write_text(json.dumps(record), "utf-8")
    with monkeypatch.context() as smaller:
        smaller.setattr(ship, "LARGEST", 1000)
        with pytest.raises(ValueError, match="MB: a shipped model has less"):
            ship.ship(run_dir, "known", library)
    assert not (library / "pretrained").exists()
    model, _, about = load_pretrained(ship.ship(run_dir, "known", library), "cpu")
    name = about["recipe"]["name"]  # that of the record; the model has its own
    ours = json.loads((library / "evidence" / f"{name}.json").read_text("utf-8"))
    assert name == record["recipe"]["name"] and ours["recipe"] == about["recipe"]
    average = Run.load(run_dir, "cpu", "average").model.half().float()
    for name, weights in average.state_dict().items():
        assert torch.equal(weights, model.state_dict()[name]), name


def test_what_the_scores_of_the_translator_are_parted_by():
    """Near copies, names that were never read, length, as chapter 19 counts them."""
    page = vars(shipped_model)
    gaps = page["gaps_of"](["Tom ist hier.", "Das ist gut."])
    pairs = [("", "Maria ist hier."), ("", "Maria war hier."), ("", "Das ist gut.")]
    assert page["near_copies"](gaps, pairs) == [True, False, True]
    known = page["words_in"]([("I see Tom.", "Ich sehe Tom.")])
    assert known == {"I", "see", "Tom", "Ich", "sehe"}
    rows = [
        ("I see Tom.", "Ich sehe Tom.", "Ich sehe Tom."),
        ("I see Zoe.", "Ich sehe Zoe.", "Ich sehe Zo."),
        ("I see rain.", "Ich sehe Regen.", "Ich sehe rain."),
    ]
    found = page["unread_copies"](rows, known)
    assert found == [("Zoe", rows[1])] and not page["came_through"](*found[0])
    (row,) = page["by_length"](rows, (1, 1000))
    wanted = sacrebleu.corpus_bleu([row[2] for row in rows], [[row[1] for row in rows]])
    assert row[:3] == [1, 999, 3] and row[3] == pytest.approx(wanted.score)
    assert page["news_beyond"]([("a b", "")], [("a c", ""), ("a b a", "")]) == {
        "beyond": 0.5,
        "unread": 0.2,
    }


def test_the_parts_of_the_score_are_those_of_the_records():
    kept = read_evidence("translator-test")
    for name, parts in kept["scores"].items():
        record = read_evidence(name)
        assert parts["all"]["sentences"] == len(record["outputs"])
        for ours, metric in (("BLEU", "sacreBLEU"), ("chrF2", "chrF2")):
            then = record["scores"][metric]
            value, low, high = parts["all"][ours]
            assert value == pytest.approx(then["value"]) and low < value < high
            assert then["test_sha256"] == kept["test_sha256"]
        for one, rest in (
            ("a near copy in training", "no near copy"),
            ("a name never read", "no such name"),
        ):
            both = parts[one]["sentences"] + parts[rest]["sentences"]
            assert both == parts["all"]["sentences"]
    for row in kept["compared"]:
        was, now = (
            kept["scores"][row[side]][row["group"]]["BLEU"][0]
            for side in ("first", "second")
        )
        assert row["BLEU"]["gain"] == pytest.approx(now - was)
