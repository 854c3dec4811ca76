"""Fresh pairs have no near copy among what was read."""

import json
import random
import re

import pytest
import smoothing
from fresh_split import by_hash, fresh_pairs, isolated, with_gaps

from transformer_lib.corpora import grammar_split, known
from transformer_lib.storage import write_json


def distance(a, b):
    """Edit distance in words, the textbook's table (Wagner and Fischer 1974)."""
    row = list(range(len(b) + 1))
    for i, word in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(b, 1):
            change = before + (word != other)
            before, row[j] = row[j], min(change, row[j] + 1, row[j - 1] + 1)
    return row[-1]


def words(sentence):
    return re.findall(r"\w+", sentence.casefold())


@pytest.fixture
def text():
    """Pairs of sentences over few words: many are near copies of each other."""
    rng = random.Random(5)
    return list(
        {
            tuple(
                " ".join(rng.choices("ABCDEFGHIJKLMNO", k=rng.randint(1, 9)))
                for _ in (0, 1)
            )
            for _ in range(300)
        }
    )


def test_what_is_isolated_is_more_than_two_words_away_from_all_else(text):
    candidates, others = text[:120], text[120:]
    found = isolated(candidates, others)
    assert 5 < len(found) < 100
    for pair in found:
        for other in (p for p in text if p is not pair):
            for side in (0, 1):
                assert distance(words(pair[side]), words(other[side])) > 2


def test_what_is_left_out_has_a_neighbor(text):
    """It is at most four words away: two that are left out of each."""
    candidates, others = text[:120], text[120:]
    for pair in set(candidates) - set(isolated(candidates, others)):
        assert any(
            distance(words(pair[side]), words(other[side])) <= 4
            for other in text
            for side in (0, 1)
            if other is not pair
        )


def test_capitals_and_punctuation_hide_no_near_copy():
    read = [("Tom has never been to Boston before now.", "x")]
    near = ("TOM HAS NEVER BEEN - TO PARIS, before now", "y " * 20)
    far = ("Mary has often gone to see her old friends.", "z " * 20)
    assert isolated([near, far], read) == [far]
    assert with_gaps("No, no!") == {"no no", "no", ""}


def test_fresh_pairs_do_not_depend_on_the_order_of_the_text(text, monkeypatch):
    read, rest = text[:60], text[60:]
    fresh = fresh_pairs(text, read)
    assert fresh and not set(fresh) & set(read)
    assert fresh == fresh_pairs(text[::-1], read[::-1])
    assert fresh == [pair for pair in by_hash(rest) if pair in set(fresh)]
    monkeypatch.setattr("fresh_split.PAIRS", 3)
    assert len(fresh_pairs(text, read)) <= 3


RECIPE = """
name = "tiny"
corpus = "grammar-en-de"
vocab_size = 350
max_pairs = 300
max_length = 40
max_tokens = 300
max_steps = 4
warmup = 10
validate_every = 2
keep_last = 0
[model]
d_model = 16
num_heads = 2
num_layers = 1
d_ff = 16
"""


def test_a_row_is_trained_and_scored_on_pairs_that_it_never_read(tmp_path, monkeypatch):
    (tmp_path / "tiny.toml").write_text(RECIPE)
    read_by_run = []

    def some(pairs, read):  # of the grammar all sentences are near copies
        read_by_run.append(read)
        return [pair for pair in pairs if pair not in set(read)][:8]

    sizes = {"train": 600, "valid": 20, "test": 4}

    def curly(split):  # what a model reads has plain quotes
        return [
            (f"\u201c{en}\u201d", de) for en, de in grammar_split(split, sizes[split])
        ]

    monkeypatch.setattr(known, "grammar_split", curly)
    monkeypatch.setattr(smoothing, "fresh_pairs", some)
    out = tmp_path / "rows" / "base-3.scored"
    asked = smoothing.arguments(
        f"base 3 --recipe {tmp_path / 'tiny.toml'} --run-dir {tmp_path / 'rows'} "
        f"--out {out}".split()
    )
    write_json(asked.out, smoothing.run(asked))
    record = json.loads(out.read_text("utf-8"))
    assert record["row"] == "base" and record["seed"] == 3 and record["test_loss"] > 0
    assert record["fresh"]["pairs"] == 8 and record["fresh"]["loss"] > 0
    assert len(read_by_run[0]) == 300
    assert (tmp_path / "rows" / "base-3" / "last.safetensors").exists()


def made(row, seed, bleu):
    fresh = {"sacreBLEU": {"value": bleu}, "chrF++": {"value": 1.0}, "loss": 2.0}
    return {"row": row, "seed": seed, "fresh": fresh}


def test_smoothing_is_compared_when_all_runs_are_there():
    """Against a t interval by hand: 2.1448 for 14 degrees of freedom."""
    noise = [0.3, -0.3, 0.1, -0.1, 0.2, -0.2, 0.0, 0.0]
    runs = [made("base", s, 15.0 + x) for s, x in enumerate(noise)]
    runs += [made("D-ls0.0", s, 14.8 + x) for s, x in enumerate(noise)]
    found = smoothing.compare(runs)["bleu"]
    assert found["difference"] == pytest.approx(0.2)
    variance = 2 * (0.09 + 0.01 + 0.04) / 7
    assert found["error"] == pytest.approx(2.14479 * (variance / 4) ** 0.5, abs=1e-5)
    with pytest.raises(ValueError, match="15 runs of 16"):
        smoothing.compare(runs[:-1])
