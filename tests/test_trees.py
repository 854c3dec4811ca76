"""Chapter 26: trees read and written, repair, and EVALB's own results."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_trees import LEAVES, TREES, tree

from transformer_lib.parsing import (
    BracketScore,
    Tree,
    TreeError,
    clean_tree,
    linearize,
    read_trees,
    repair,
)
from transformer_lib.parsing.tree_tokens import brackets_of_slots
from transformer_lib.parsing.trees import fault_of, is_bracket, plain_label

SOME = settings(max_examples=60, deadline=None)


def test_labels_and_traces():
    for label, plain in [("NP-SBJ-1", "NP"), ("NP=2", "NP"), ("PP-LOC=3", "PP")]:
        assert plain_label(label) == plain
    assert plain_label("WHNP") == "WHNP"
    text = "( (S (NP-SBJ (-NONE- *)) (VP (-LRB- -LRB-) (PRP$ its))) )"
    assert str(clean_tree(tree(text))) == "(TOP (S (VP (-LRB- -LRB-) (PRP$ its))))"
    assert clean_tree(tree("( (S (-NONE- *)) )")) is None


@pytest.mark.parametrize("text", [" ", "\t", "#", "a", "-", "=", "1", "(a", "1)", "/"])
def test_a_million_equal_characters_take_no_square_of_time(text):
    """A square of a million steps would not end."""
    run = text * 1_000_000
    with contextlib.suppress(TreeError):
        assert list(read_trees([run])) == []
    assert plain_label(run)[:1] == run[:1]
    assert brackets_of_slots([run]) == ["XX"] * (text == "/")
    assert brackets_of_slots(["(S/DT", run + "\n"]) == ["(S", "XX"]


TOKENS = st.lists(
    st.sampled_from(
        ["XX", "(NP", ")NP", "(VP", ")VP", "(S", ")S", "(", ")", "word", "@7", ""]
    ),
    max_size=30,
)


@given(TOKENS, st.lists(LEAVES, min_size=1, max_size=8))
@settings(max_examples=300, deadline=None)
def test_repair_gives_a_tree_over_exactly_the_words(tokens, leaves):
    mended = repair(tokens, leaves)
    assert list(mended.leaves()) == leaves
    assert fault_of(linearize(mended), len(leaves)) == ""
    assert list(read_trees([str(mended)])) == [mended]
    if fault_of(tokens, len(leaves)) == "":  # nothing to mend: nothing is changed
        brackets = [t for t in tokens if is_bracket(t)]
        assert [t for t in linearize(mended) if t != "XX"] == brackets


@pytest.mark.parametrize(
    "tokens, problem, wanted",
    [
        ("(S XX XX )S", "", "(S XX XX )S"),
        ("(S XX", "unbalanced", "(S XX XX )S"),
        ("(S (NP XX )S", "unbalanced", "(S (NP XX )NP XX )S"),
        ("(S XX )NP XX )S", "unbalanced", "(S XX XX )S"),
        ("(S (NP )NP XX XX )S", "empty bracket", "(S XX XX )S"),
        ("(S XX )S", "number of words", "(S XX XX )S"),
        ("(S (NP XX )NP XX XX )S", "number of words", "(S (NP XX )NP XX )S"),
        ("", "number of words", "XX XX"),
    ],
)
def test_faults_and_their_repair(tokens, problem, wanted):
    leaves = [Tree("NN", word="a"), Tree("NN", word="b")]
    assert fault_of(tokens.split(), 2) == problem
    assert " ".join(linearize(repair(tokens.split(), leaves))) == wanted


def test_repair_of_endless_brackets():
    leaves = [Tree("NN", word="a")]
    mended = repair(["(NP"] * 900 + ["XX"], leaves)
    assert list(read_trees([str(mended)])) == [mended]
    assert fault_of(["(NP"] * 900 + ["XX"] + [")NP"] * 900, 1) == "unbalanced"


GOLD = "(S (A (P this)) (B (Q is) (A (R a) (T test))))"


EVALB = [  # sample.gld, .tst and .rsl of EVALB: matched, gold and test brackets
    (GOLD, GOLD, 4, 4, 4),
    (GOLD, "(S (A (P this)) (B (Q is) (C (R a) (T test))))", 3, 4, 4),
    (GOLD, "(S (A (P this)) (B (Q is) (A (R a) (U test))))", 4, 4, 4),
    (GOLD, "(S (C (P this)) (B (Q is) (A (R a) (U test))))", 3, 4, 4),
    (GOLD, "(S (A (P this)) (B (Q is) (R a) (A (T test))))", 3, 4, 4),
    (GOLD, "(S (A (P this) (Q is)) (A (R a) (T test)))", 2, 4, 3),
    (GOLD, "(S (P this) (Q is) (R a) (T test))", 1, 4, 1),
    (GOLD, "(TOP (P this) (Q is) (R a) (T test))", 0, 4, 0),
    (GOLD, "(S (A (P this)) (B (Q is) (A (A (R a) (T test)))))", 4, 4, 5),
    (GOLD, "(S (A (P this)) (B (Q is) (A (A (A (A (A (R a) (T test))))))))", 4, 4, 8),
    (GOLD, f"(TOP {GOLD})", 4, 4, 4),
    (GOLD, "(S (A (P this)) (B (Q is) (A (R a) (TT test))))", 4, 4, 4),
    (GOLD.replace("(A (P", "(A-SBJ-1 (P").replace("(B", "(B-WHATEVER"), GOLD, 4, 4, 4),
    (f"{GOLD[:-1]} (-NONE- *))", f"{GOLD[:-1]} (-NONE- *))", 4, 4, 4),
    (f"{GOLD[:-1]} (: *))", f"{GOLD[:-1]} (: *))", 4, 4, 4),
]


@pytest.mark.parametrize("gold, parsed, matched, in_gold, in_parse", EVALB)
def test_evalb_own_sample(gold, parsed, matched, in_gold, in_parse):
    score = BracketScore.of(tree(gold), tree(parsed))
    assert (score.matched, score.gold, score.parsed) == (matched, in_gold, in_parse)


def test_evalb_totals_add_counts():
    """Row 22 of the sample, of 34 brackets, and the totals under the table."""
    parts = GOLD.removeprefix("(S ").removesuffix(")")
    long = tree(f"(S {' '.join([parts] * 11)})")
    of_22 = BracketScore.of(long, long)
    assert (of_22.matched, of_22.gold, of_22.parsed) == (34, 34, 34)
    scores = [BracketScore.of(tree(row[0]), tree(row[1])) for row in EVALB]
    same = BracketScore.of(tree(GOLD), tree(GOLD))  # row 19 differs in a capital alone
    total = sum([*scores, of_22, same], BracketScore())
    assert (total.matched, total.gold, total.parsed) == (86, 98, 95)
    assert total.recall == pytest.approx(87.76, abs=0.005)
    assert total.precision == pytest.approx(90.53, abs=0.005)
    assert 100 * total.exact / total.sentences == pytest.approx(52.94, abs=0.005)


def test_punctuation_leaves_and_places_move():
    gold = tree("(S (NP (NN a) (, ,) (NN b)) (: :) (VP (VB c)) (. .))")
    moved = tree("(S (NP (NN a) (, ,) (NN b) (: :)) (VP (VB c) (. .)))")
    assert BracketScore.of(gold, moved).f1 == 100
    xx = repair(linearize(clean_tree(moved)), [Tree("XX", word=w) for w in moved.words])
    assert BracketScore.of(gold, xx).f1 == 100  # the tags of the gold tree decide
    alone = tree("(S (NP (NN a)) (PRN (, ,)) (VP (VB c)))")
    without = tree("(S (NP (NN a)) (, ,) (VP (VB c)))")
    assert BracketScore.of(alone, without).f1 == 100


def test_particle_is_adverb_phrase_and_worked_perturbation():
    gold = tree("(S (NP (PRP he)) (VP (VBD gave) (PRT (RP up)) (NP (NN it))))")
    adverb = tree("(S (NP (PRP he)) (VP (VBD gave) (ADVP (RP up)) (NP (NN it))))")
    assert BracketScore.of(gold, adverb) == BracketScore(5, 5, 5, 1, 1)
    flat = tree("(S (NP (PRP he)) (VP (VBD gave) (NP (RP up) (NN it))))")
    score = BracketScore.of(gold, flat)  # S, NP, VP match; PRT and NP against one NP
    assert score == BracketScore(3, 5, 4, 0, 1)
    assert score.f1 == pytest.approx(2 * (3 / 4) * (3 / 5) / (3 / 4 + 3 / 5) * 100)


@given(TREES)
@SOME
def test_gold_against_gold_is_all_right(made):
    score = BracketScore.of(made, made)
    assert score.matched == score.gold == score.parsed and score.exact == 1


def test_what_cannot_be_compared():
    with pytest.raises(ValueError, match="different words: 'a' and 'b'"):
        BracketScore.of(tree("(S (NN a))"), tree("(S (NN b))"))
    with pytest.raises(ValueError, match="no word"):
        BracketScore.of(tree("(S (NN a))"), tree("(S (-NONE- *))"))
    assert BracketScore().f1 == BracketScore().recall == BracketScore().precision == 0
