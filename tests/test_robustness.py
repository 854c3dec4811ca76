"""The lines as people type them: each rule can be met, and refuses what is wrong."""

import json
import re

import pytest
import robustness
from robustness import SUITE as FILE
from robustness import lines_of, why_not

from transformer_lib.corpora import load_corpus

SUITE = lines_of()
ALL = [(kind, line) for kind, lines in SUITE.items() for line in lines]
FRESH_FILE = FILE.with_name("robustness-fresh.toml")
FRESH = lines_of(FRESH_FILE)
UNSEEN = [(kind, line) for kind, lines in FRESH.items() for line in lines]


@pytest.mark.parametrize(("suite", "each"), [(SUITE, 20), (FRESH, 10)])
def test_there_are_as_many_different_lines_of_each_of_ten_kinds(suite, each):
    assert suite.keys() == SUITE.keys() and len(suite) == 10
    assert all(len(lines) == each for lines in suite.values())
    lines = [line for some in suite.values() for line in some]
    assert len({line["en"].casefold() for line in lines}) == 10 * each
    allowed = {"en", "has", "keeps", "de"}
    assert all({"en", "has", "de"} <= line.keys() <= allowed for line in lines)


def test_no_fresh_line_is_an_old_one_and_none_is_as_it_should_be_in_english():
    """Else English with one sign changed would count as a translation."""
    old = {line["en"].casefold() for _, line in ALL}
    for _, line in UNSEEN:
        assert line["en"].casefold() not in old
        found = [re.search(rule, line["en"], re.IGNORECASE) for rule in line["has"]]
        assert not all(found), line["en"]


@pytest.mark.parametrize("kind", SUITE)
@pytest.mark.parametrize("suite", [SUITE, FRESH], ids=["old", "fresh"])
def test_each_rule_passes_a_translation_and_nothing_else(suite, kind):
    """The written translation passes; the source, half of it and another's do not."""
    lines = suite[kind]
    for line, other in zip(lines, lines[1:] + lines[:1], strict=True):
        long = kind == "long"
        assert why_not(line, line["de"], long) == "", line["en"]
        assert why_not(line, line["en"], long) and why_not(line, "  ", long)
        assert why_not(line, other["de"], long), line["en"]
        assert why_not(line, "Hm " * len(line["en"].split()), long)
        if long:
            words = line["de"].split()
            assert why_not(line, " ".join(words[: len(words) // 2]), long)
            assert why_not(line, " ".join(words[len(words) // 2 :]), long)


def test_what_must_be_kept_must_be_kept_letter_for_letter():
    line = {"en": "Write to a@b.example.", "has": ["schreib"], "keeps": ["a@b.example"]}
    assert why_not(line, "SCHREIB an a@b.example.") == ""
    assert "a@b.example" in why_not(line, "Schreib an A@b.example.")
    assert "schreib" in why_not(line, "Ruf a@b.example an.")


def test_the_shares_are_counted_and_the_reasons_kept(tmp_path, monkeypatch, capsys):
    right = {line["en"]: line["de"] for kind, line in ALL if kind != "typos"}

    class Fake:
        @classmethod
        def from_pretrained(cls, name):
            return lambda lines, beam_size: [right.get(line, "") for line in lines]

    monkeypatch.setattr(robustness, "Translator", Fake)
    robustness.main(["some/model", "--out", str(tmp_path / "out.json"), "--show"])
    record = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert record["good"] == 0.9 and record["kinds"]["typos"] == 0
    assert record["kinds"]["long"] == 1 and record["model"] == "model"
    assert {row["why_not"] for row in record["lines"]} == {"", "empty"}
    assert "90%" in capsys.readouterr().out


def test_another_file_of_lines_can_be_scored(tmp_path, monkeypatch):
    right = {line["en"]: line["de"] for _, line in UNSEEN}

    class Fake:
        @classmethod
        def from_pretrained(cls, name):
            return lambda lines, beam_size: [right[line] for line in lines]

    monkeypatch.setattr(robustness, "Translator", Fake)
    out = tmp_path / "out.json"
    robustness.main(["some/model", "--lines", str(FRESH_FILE), "--out", str(out)])
    record = json.loads(out.read_text("utf-8"))
    assert record["good"] == 1 and len(record["lines"]) == 100


@pytest.mark.corpora
def test_no_line_is_in_the_text_that_models_are_trained_on():
    splits = [load_corpus("tatoeba-en-de", name) for name in ("train", "valid")]
    text = {source for split in splits for source, _ in split.pairs}
    assert not [line["en"] for _, line in ALL + UNSEEN if line["en"] in text]
