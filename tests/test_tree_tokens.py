"""Chapter 26: trees as the tokens of a parser."""

from hypothesis import given, settings
from made_trees import TREES, tree

from transformer_lib.parsing import clean_tree, linearize
from transformer_lib.parsing.tree_tokens import (
    brackets_of_slots,
    source_text,
    split_words,
    tree_slots,
    word_shape,
    word_slots,
)

SOME = settings(max_examples=60, deadline=None)


SMALL = "(S (NP (DT The) (NN dog)) (VP (VBD saw) (NP (PRP it))) (. .))"


@given(TREES)
@SOME
def test_slots_come_back(made):
    leaves, slots = list(made.leaves()), tree_slots(made)
    assert len(slots) == 2 * len(leaves) and slots[-1].endswith(")TOP")
    assert brackets_of_slots(slots) == linearize(made)
    tags = [slot.rpartition("/")[2] for slot in slots[::2]]
    assert tags == [leaf.label for leaf in leaves]
    bare = tree_slots(made, {slot.partition("/")[0] + "/" for slot in slots})
    assert brackets_of_slots(bare) == linearize(made)


def test_slots_of_words():
    slots = tree_slots(clean_tree(tree(SMALL)))
    assert slots == [
        "(S(NP/DT",
        "0)NP",
        "/NN",
        "1)S",
        "(VP/VBD",
        "0)VP",
        "(NP/PRP",
        "2)S",
        "/.",
        "1)TOP",
    ]
    known = {"the", "p00", "immu~", "~ized", "A~he", "~", "AA9~", "~~"}
    for word, wanted in {
        "The": ("the", "A~he"),
        "immunized": ("immu~", "~ized"),
        "qq": ("~~", "~"),
        "P53": ("p00", "AA9~"),
        "\u0130": ("~~", "~"),
    }.items():
        assert word_slots(word, known) == wanted
    assert word_slots("the", known, whole=False) == ("~~", "~")
    assert brackets_of_slots(["3)TOP", "(S/DT", "9)TOP", "what", "/NN"]) == [
        "(S",
        "XX",
        ")S",
        "XX",
    ]


def test_words_are_single_tokens():
    assert source_text(["-LRB-", "BMP", "-RRB-"]) == "( BMP )"
    shapes = {"Walking": "~Aing", "p53s": "~9s", "Bmp-2": "~A9-", "xqz": "~"}
    assert {word: word_shape(word) for word in shapes} == shapes
    for odd in ("Xpd TTD", "a\u00a0b", "\u00b4", "\u2009"):
        assert len(source_text([odd]).split()) == 1
    assert split_words("Mice (n = 3) don't fly, do they?") == [
        "Mice",
        "(",
        "n",
        "=",
        "3",
        ")",
        "don't",
        "fly",
        ",",
        "do",
        "they",
        "?",
    ]
