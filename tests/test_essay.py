"""The front page's essay: its record against the model, what its prose supposes.

The page reads its numbers. Where its sentences suppose something of them, it is
asserted here: when another model ships and one of these fails, change the sentence.
"""

import hashlib
import json
import math
import re
import sys

import essay_record as tool
import pytest
from built import ROOT

from transformer_lib.runs import load_pretrained, read_evidence
from transformer_lib.runs.folder import find_pretrained

sys.path.append(str(ROOT / "book" / "_ext"))
import essay_facts
import essay_scenes

WELCOME = (ROOT / "book" / "welcome.md").read_text("utf-8")
AGAIN = "run experiments/essay_record.py again"


@pytest.fixture(scope="module")
def record():
    return read_evidence("essay")


@pytest.fixture(scope="module")
def facts():
    return essay_facts.Facts()


def test_the_record_is_what_the_shipped_model_gives(record):
    weights = find_pretrained(record["model"]) / "weights.safetensors"
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    assert record["weights_sha256"] == digest, f"another model ships: {AGAIN}"
    now = tool.essay_record(*load_pretrained(record["model"], "cpu"))
    assert {name: record[name] for name in now} == now, AGAIN


def test_the_rules_of_what_fails_can_be_met(record):
    assert sum(map(tool.fails, record["tried"])) >= 4, "too few for a row"
    for row in record["tried"]:
        assert not tool.fails({**row, "translation": row["right"]}), row["text"]


# --- what the sentences suppose -------------------------------------------------------


def test_german_changes_his_with_what_is_owned(record):
    words = [essay_facts.owned(row).split() for row in record["owned"]]
    assert len({his for his, _ in words}) == len(words)
    assert all(his.startswith("sein") for his, _ in words)
    assert all(thing[0].isupper() for _, thing in words)


def test_his_finds_house_and_hardly_anything_else(facts):
    row, scores = facts.shares[facts.asks], facts.scores[facts.asks]
    assert facts.words[facts.asks] == "his" and facts.words[facts.looks] == "house"
    assert row[facts.looks] > 0.9, "almost the value of house"
    assert scores[facts.looks] > 2 * sorted(scores)[-2], "far ahead"
    kept = facts.heads[facts.favourite][facts.asks]
    assert row == pytest.approx(kept, abs=0.003), "the weights of the record"


def test_sums_on_the_stage_add_up(facts):
    score = facts.scores[facts.asks][facts.looks]
    assert sum(c for _, _, c in facts.products) == pytest.approx(score)
    assert facts.root == math.sqrt(facts.width)
    assert sum(facts.shares[facts.asks]) == pytest.approx(1)
    part, rest, whole, value = essay_scenes.written_sum(facts)
    weight = facts.shares[facts.asks][facts.looks]
    assert part == pytest.approx(weight * value) and part + rest == pytest.approx(whole)
    assert round(part, 3) + round(rest, 3) == pytest.approx(round(whole, 3))


def test_without_the_root_it_is_all_or_nothing(facts):
    i = facts.undecided
    plain = essay_facts.softmax(facts.scores[i])
    assert max(facts.shares[i]) < 0.8 and max(plain) > 0.95


def test_what_is_said_of_heads(facts):
    back = facts.heads[facts.previous]
    mean = sum(back[i][i - 1] for i in range(1, len(back))) / (len(back) - 1)
    assert mean > 0.5, "looks mostly at the word before"
    reach = {name: facts.reach(name) for name in facts.heads}
    middle = (reach[facts.favourite] + reach[facts.unreadable]) / 2
    assert sum(value > middle for value in reach.values()) > len(reach) / 2
    rise = {name: row["rise"] for name, row in facts.rise.items()}
    most = max(rise, key=rise.get)
    assert most == facts.previous, "the head missed most looks one word back"
    assert rise[facts.favourite] < rise[most] / 5
    assert facts.favourite[0] == max(layer for layer, _ in facts.heads), "the last"
    same = facts.heads[facts.twin]
    assert same[facts.asks][facts.looks] > 0.9, "the twin looks at the same word"


def test_order_makes_another_sentence(record):
    (first, second, swapped) = record["orders"]
    words = [sorted(re.findall(r"\w+", row["text"].lower())) for row in (first, second)]
    assert words[0] == words[1]
    assert first["translation"] != second["translation"]
    assert first["without positions"] != first["translation"]
    assert sorted(swapped["text"]) == sorted(first["text"])  # two words exchanged
    assert swapped["translation"] != first["translation"]
    assert swapped["without positions"] == first["without positions"]


def test_the_decoder_hesitates_between_two_past_tenses(facts):
    (first, _), (second, _) = facts.best[facts.hesitates][:2]
    assert facts.words[facts.across[facts.hesitates].index(
        max(facts.across[facts.hesitates]))] == "sold"  # fmt: skip
    assert second == "hat" and facts.target[facts.hesitates].startswith(first)
    assert len(facts.writing[facts.hesitates]) > 1, "a first token, with a hyphen"


def test_it_learned_to_hesitate_less(facts):
    values = [value for _, value in facts.learning]
    assert values[0] > 20 * values[-1]
    shipped = find_pretrained(facts.record["model"]) / "recipe.json"
    recipe = json.loads(shipped.read_text("utf-8"))
    names = [run["recipe"]["name"] for run in facts.runs]
    assert names[-1] == recipe["name"], "the run of the model that ships"


# --- the pictures ---------------------------------------------------------------------


def test_every_number_of_the_text_has_a_source(facts):
    asked = set(re.findall(r"\{essay\}`([^`]+)`", WELCOME))
    assert asked <= facts.values().keys()
    prose = re.sub(r"```\{raw\}.*?```|https?:\S+|`[^`]*`|\]\([^)]*\)", "", WELCOME,
                   flags=re.DOTALL)  # fmt: skip
    typed = set(re.findall(r"\d+", prose))
    assert typed == {"01", "100"}, "numbers of the model are read, not typed"


@pytest.mark.parametrize("wide", [True, False])
def test_marks_have_one_name_and_stay_on_the_stage(wide):
    stage = essay_scenes.Stage(wide)
    for name, draw in essay_scenes.SCENES.items():
        for frame in (frame for beat in draw(stage) for frame in beat):
            names = [(mark["t"], mark["k"]) for mark in frame]
            assert len(set(names)) == len(names), name
            for mark in frame:
                if mark["t"] == "text":
                    size = 11 if wide else 9
                    assert mark["s"] >= size, (name, mark["txt"])
                    assert 0 <= mark["x"] <= stage.W and 8 <= mark["y"] <= stage.H


def test_every_scene_is_told_in_words():
    for name in essay_scenes.SCENES:
        assert len(essay_scenes.said(name)) > 30
        assert f'aria-label="{essay_scenes.html.escape(essay_scenes.said(name))}"' in (
            essay_scenes.still(name, wide=False)
        )
