"""Changed copies: both sides change in the same way, and nothing else changes."""

import random
import re
from collections import Counter

import numpy as np
import pytest

from transformer_lib.batches import PairText, tokenize_pairs, vary_pairs
from transformer_lib.batches.augment import COPIES
from transformer_lib.runs import Recipe
from transformer_lib.tokenizer import Tokenizer

PAIRS = [
    ("Tom has 25 books.", "Tom hat 25 Bücher."),
    ("There are three cats.", "Da sind drei Katzen."),
    ("It cost 300 dollars.", "Es kostete 300 Dollar."),
    ("We saw Boston yesterday.", "Wir sahen Boston gestern."),
    ("The shop opens at seven o'clock.", "Der Laden öffnet um sieben Uhr."),
    ("We met on Monday.", "Wir trafen uns am Montag."),
    ("The garden is green.", "Der Garten ist grün."),
    ("Is the garden big?", "Ist der Garten groß?"),
    ("The old garden and the house.", "Der alte Garten und das Haus."),
    ("Don't close the garden!", "Schließt den Garten nicht!"),
    ("Tom likes the garden.", "Tom mag den Garten."),
]
TEXT = PairText(PAIRS)


def copies(kind, number=400, pairs=PAIRS):
    """Changed copies, each with the pair that it was made of."""
    rng, made = random.Random(7), []
    while len(made) < number:
        pair = rng.choice(pairs)
        if new := COPIES[kind](pair, TEXT, rng):
            assert new != pair and len(new) == 2 and all(map(str.strip, new))
            made.append((pair, new))
    return made


def digits(text):
    return re.findall(r"\d+", re.sub(r"(?<=\d)[.,](?=\d)", "", text))


def without_ascii_words(text):
    """The signs of a text: what is neither a letter of its words nor a space."""
    return Counter(c for c in text if not (c.isalnum() or c in " .,?!'„“\"ßöü"))


def test_words_that_always_come_together_are_a_lexicon():
    assert TEXT.lexicon == {"garden": "Garten"}
    assert ("garden", "Garten") in TEXT.aligned(PAIRS[6])
    assert ("Tom", "Tom") in TEXT.aligned(PAIRS[0])
    assert TEXT.aligned(("The garden of the garden.", "Der Garten.")) == []


def test_numbers_are_the_same_on_both_sides():
    signs = set()
    for pair, (source, target) in copies("numbers", pairs=PAIRS[:3]):
        assert digits(source) == digits(target) != digits(pair[0])
        assert not re.search("[a-z]", "".join(digits(source)))
        if found := re.findall("[$€£]", source):
            assert found == re.findall("[$€£]", target) and "dollar" not in source
            signs.update(found)
    assert len(signs) == 3


def test_german_writes_numbers_otherwise():
    both = [new for _, new in copies("numbers", 2000, PAIRS[:2])]
    for english, german in ((r"\d,\d{3}\b", r"\d\.\d{3}\b"), (r"\d\.\d+ ", r"\d,\d+ ")):
        assert any(re.search(english, s) and re.search(german, t) for s, t in both)


def test_times_and_dates_are_the_same_on_both_sides():
    seen = Counter()
    for _, (source, target) in copies("times", pairs=PAIRS[3:6]):
        given = {number.lstrip("0") for number in re.findall(r"\d+", source)}
        for number in re.findall(r"\d+", target):
            after_noon = str(int(number) - 12)  # 15 Uhr is 3 pm
            afternoon = after_noon in given and re.search(r"\d p\.?m", source)
            assert number.lstrip("0") in given or afternoon, (source, target)
        seen.update(re.findall(r"\b(at|on|in|from|between)\b", source))
    assert len(seen) == 5


def test_links_are_copied_letter_for_letter():
    for (source, _), (new, neu) in copies("links"):
        added = [w.strip("().:!?") for w in new.split() if w not in source.split()]
        assert any(len(word) > 1 and word in neu for word in added), (new, neu)


@pytest.mark.parametrize("kind", ["signs", "tags"])
def test_signs_and_tags_are_the_same_on_both_sides(kind):
    for (source, target), (new, neu) in copies(kind):
        more = without_ascii_words(new) - without_ascii_words(source)
        mehr = without_ascii_words(neu) - without_ascii_words(target)
        if kind == "signs" and "&" in more and "und" in neu.split():
            more -= Counter("&")  # the German side says it
        assert more == mehr, (new, neu)
        assert new.count("<") == new.count(">") or kind == "signs"


def test_capitals_change_nothing_but_capitals():
    for (source, target), (new, neu) in copies("capitals"):
        assert new.casefold().rstrip(".") == source.casefold().rstrip(".")
        assert neu.casefold().rstrip(".") == target.casefold().rstrip(".")
    assert any(n.isupper() and m.isupper() for _, (n, m) in copies("capitals"))


def test_quotes_are_those_of_the_language():
    for _, (new, neu) in copies("quotes"):
        assert new.count('"') == 2 and neu.count("„") == neu.count("“") == 1
        assert "„" not in new and '"' not in neu


@pytest.mark.parametrize("kind", ["hurry", "typos"])
def test_what_is_typed_in_a_hurry_means_the_same(kind):
    for (source, target), (new, neu) in copies(kind):
        assert neu == target and new != source
        assert abs(len(new) - len(source)) < 10


def test_long_sentences_have_all_their_parts_on_both_sides():
    plain = [p for p in PAIRS if p[0].endswith(".")]
    longest = 0
    for _, (new, neu) in copies("long", pairs=plain):
        parts = [p for p in plain if p[0][1:-1] in new]
        assert parts and all(part[1][1:-1] in neu for part in parts)
        assert new.count(".") == neu.count(".") == 1
        assert new.count("garden") == neu.count("Garten")
        longest = max(longest, len(new.split()))
    assert 25 < longest <= 120


@pytest.fixture(scope="module")
def tokenized():
    letters = [chr(c) for c in range(33, 127)]
    text = [side for pair in PAIRS for side in pair] + [" ".join(letters)] * 2
    tokenizer = Tokenizer.train(text, 420)
    return tokenize_pairs(PAIRS * 20, tokenizer, 100), tokenizer


def test_copies_come_after_the_pairs_as_many_as_asked_for(tokenized):
    pairs, tokenizer = tokenized
    shares = {"capitals": 0.5, "times": 0.25, "signs": 0.1}
    more = vary_pairs(pairs, tokenizer, shares, 100, seed=3)
    assert 0.7 * len(pairs) < len(more) - len(pairs) <= 0.85 * len(pairs)
    for i in range(len(pairs)):
        assert all(map(np.array_equal, more[i], pairs[i]))
    again = vary_pairs(pairs, tokenizer, shares, 100, seed=3)
    assert all(map(np.array_equal, vars(again).values(), vars(more).values()))
    other = vary_pairs(pairs, tokenizer, shares, 100, seed=4)
    assert not np.array_equal(other.src, more.src)
    assert vary_pairs(pairs, tokenizer, {"signs": 0.0}, 100) is pairs
    short = vary_pairs(pairs, tokenizer, {"long": 1.0}, 1)
    assert len(short) == len(pairs)


def test_an_unknown_kind_is_refused(tokenized):
    with pytest.raises(ValueError, match="emoji=0.1: must be 0 or more, of numbers, "):
        vary_pairs(*tokenized, {"emoji": 0.1}, 100)
    base = {"name": "x", "corpus": "grammar-en-de", "vocab_size": 300}
    for wrong in ({"emoji": 0.1}, {"signs": -1}, {"signs": True}, 0.1):
        with pytest.raises(ValueError, match="varied=.* a table of shares"):
            Recipe.of(base | {"varied": wrong})
    assert Recipe.of(base | {"varied": {"signs": 1}}).varied == {"signs": 1}
