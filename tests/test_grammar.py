"""Chapter 08: the embedded grammar."""

import random
import re

import pytest

from transformer_lib.corpora import grammar_pair, grammar_split


def test_one_english_sentence_has_one_german_one():
    rng, seen = random.Random(1), {}
    for english, german in (grammar_pair(rng) for _ in range(20_000)):
        assert seen.setdefault(english, german) == german
    assert len(seen) > 18_000


def test_grammar_splits_are_disjoint_and_always_the_same():
    splits = {s: grammar_split(s, 800) for s in ("train", "valid", "test")}
    english = [{pair[0] for pair in pairs} for pairs in splits.values()]
    assert not (english[0] & english[1] or english[0] & english[2])
    assert not english[1] & english[2]
    assert splits["train"] == grammar_split("train", 800)
    assert len(grammar_split("valid")) == 500


def test_a_larger_split_starts_with_the_smaller_one():
    assert grammar_split("train", 900)[:300] == grammar_split("train", 300)


NEVER = {  # wrong German, as a pattern that must not occur
    "a masculine object in the nominative": r"^Ich \w+ (?:der|ein) (?:Mann|Hund)\b",
    "nicht before an indefinite object": r"\bnicht ein",
    "a dative plural without n": r"\bden \w+en (?:Männer|Kinder|Hunde|Vögel|Pferde)\b",
    "a verb second after weil": r"weil (?:ich|du|er) (?:sehe|siehst|sieht) \w",
    "a prefix before weil's end": r"weil [^.]* an\.",
    "an adjective without ending": r"(?:der|die|das|den|dem|ein\w*|kein\w*) "
    r"(?:alt|klein|groß|schön|gut|jung|neu|rot) [A-ZÄÖÜ]",
    "two spaces": r"  ",
}


@pytest.mark.parametrize("name", NEVER)
def test_german_never(name):
    rng = random.Random(2)
    german = [grammar_pair(rng)[1] for _ in range(4000)]
    assert not [s for s in german if re.search(NEVER[name], s)][:3]


def found(cache=[]):  # noqa: B006
    if not cache:
        rng = random.Random(3)
        cache += [grammar_pair(rng) for _ in range(40_000)]
    return cache


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        # English pattern, German pattern: each English match must match in German
        (r"^Today (he|she|it) ", r"^Heute \w+ (er|sie) "),
        (r"saw the dog\b", r"\bden Hund (\w+ )?gesehen"),
        (r"^Yesterday I ", r"^Gestern habe ich "),
        (r"can help the dogs\b", r"\bden Hunden (\w+ )?helfen"),
        (r"^(He|She) helps a woman\b", r"^(Er|Sie) hilft (\w+ )?einer Frau\b"),
        (r"^You call [^.]* \w+\.$", r"^Du rufst .* an(, weil .*)?\.$"),
        (r"because you call ", r", weil du .* anrufst\.$"),
        (r"not (see|find|buy|draw|look for) a house\b", r"\bkein Haus\b"),
        (r"not \w+ (old|small|big) (dogs|cats)\b", r"\bkeinen? \w+en (Hund|Katz)en?\b"),
        (r"^We did not see the ", r"^Wir haben .* nicht gesehen(,.*)?\.$"),
        (r"that he cannot see ", r", dass er .* sehen kann\.$"),
        (r"^Do they have to ", r"^Müssen sie .*\?$"),
        (r"^Why does she want to ", r"^Warum will sie .*\?$"),
        (r"^The house is not red\.$", r"^Das Haus ist nicht rot\.$"),
        (r"^He does not have to carry the ", r"^Er muss .* nicht tragen(,.*)?\.$"),
    ],
)
def test_german_word_order_and_agreement(pattern, wanted):
    both = [pair for pair in found() if re.search(pattern, pair[0])]
    assert both, "the grammar makes no such sentence any more"
    wrong = [pair for pair in both if not re.search(wanted, pair[1])]
    assert not wrong, wrong[:3]
