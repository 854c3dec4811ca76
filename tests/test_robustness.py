"""The lines as people type them: each rule can be met, and refuses what is wrong."""

import json

import pytest
import robustness
from robustness import lines_of, why_not

from transformer_lib.corpora import load_corpus

SUITE = lines_of()
ALL = [(kind, line) for kind, lines in SUITE.items() for line in lines]


def test_there_are_twenty_different_lines_of_each_of_ten_kinds():
    assert len(SUITE) == 10 and all(len(lines) == 20 for lines in SUITE.values())
    assert len({line["en"] for _, line in ALL}) == 200
    allowed = {"en", "has", "keeps", "de"}
    assert all({"en", "has", "de"} <= line.keys() <= allowed for _, line in ALL)


@pytest.mark.parametrize("kind", SUITE)
def test_each_rule_passes_a_translation_and_nothing_else(kind):
    """The written translation passes; the source, half of it and another's do not."""
    for line, other in zip(SUITE[kind], SUITE[kind][1:] + SUITE[kind][:1], strict=True):
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


@pytest.mark.corpora
def test_no_line_is_in_the_text_that_models_are_trained_on():
    splits = [load_corpus("tatoeba-en-de", name) for name in ("train", "valid")]
    text = {source for split in splits for source, _ in split.pairs}
    assert not [line["en"] for _, line in ALL if line["en"] in text]
