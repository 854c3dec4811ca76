"""Chapter 26: treebanks read and written, EVALB's own results, repair, parsers."""

import dataclasses
import io
import json
import lzma
import os
import subprocess
import sys
import tarfile
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_lib import parsing
from transformer_lib.batches import make_batch
from transformer_lib.downloads import CorpusUnavailable
from transformer_lib.exercises.parsing import check_close, check_f1, check_spans
from transformer_lib.parsing import (
    BRACKETS,
    DEEPEST,
    BracketScore,
    Tree,
    TreeError,
    bracket_score,
    brackets_of_slots,
    chunks,
    clean_tree,
    evaluate_parser,
    fault,
    form_of,
    linearize,
    load_trees,
    parse,
    plain_label,
    prepare_trees,
    read_trees,
    repair,
    source_text,
    source_word,
    split_words,
    train_parser,
    tree_labels,
    tree_of_labels,
    tree_pair,
    tree_slots,
    word_shape,
    word_slots,
)
from transformer_lib.training import Recipe
from transformer_lib.transformer import Transformer, TransformerConfig

MIRROR = os.environ.get("TRANSFORMER_LIB_MIRROR", "")
SOME = settings(max_examples=60, deadline=None)

SMALL = "(S (NP (DT The) (NN dog)) (VP (VBD saw) (NP (PRP it))) (. .))"
WSJ_FILE = """
( (S
    (NP-SBJ (NNP Mr.) (NNP Vinken) )
    (VP (VBZ is)
      (NP-PRD
        (NP (NN chairman) )
        (PP (IN of)
          (NP (NNP Elsevier) (NNP N.V.) ))))
    (. .) ))
( (S (NP-SBJ-1 (PRP It)) (VP (VBZ seems) (SBAR (-NONE- 0) (S (-NONE- *T*-1)))) (. .)) )
"""


def tree(text):
    (one,) = read_trees(text.splitlines())
    return one


LABELS = st.sampled_from(["S", "NP", "VP", "PP", "ADVP", "PRT", "SBAR", "WHNP"])
TAGS = st.sampled_from(["NN", "DT", ",", ".", "VBD", "-LRB-", "PRP$", "``"])
WORDS = st.text(
    st.characters(codec="utf-8", exclude_characters="() \t\r\n"), min_size=1
)
LEAVES = st.builds(lambda label, word: Tree(label, word=word), TAGS, WORDS)
PARTS = st.recursive(
    LEAVES,
    lambda inner: st.builds(
        lambda label, children: Tree(label, tuple(children)),
        LABELS,
        st.lists(inner, min_size=1, max_size=4),
    ),
    max_leaves=12,
)
TREES = st.builds(
    lambda children: Tree("TOP", tuple(children)),
    st.lists(PARTS, min_size=1, max_size=3),
)


# --- reading --------------------------------------------------------------------------


def test_both_forms_are_read():
    with_root, bare = tree(f"( {SMALL} )"), tree(SMALL)
    assert with_root.label == "" and with_root.children == (bare,)
    assert tree(f"(TOP {SMALL})").children == (bare,)
    assert (
        clean_tree(with_root) == clean_tree(bare) == clean_tree(tree(f"(TOP {SMALL})"))
    )
    assert bare.words == ["The", "dog", "saw", "it", "."]
    assert str(with_root) == f"( {SMALL} )"
    assert str(Tree("-LRB-", word="(")) == "(-LRB- -LRB-)"
    assert str(Tree("NN", word="f(x)")) == "(NN f-LRB-x-RRB-)"


def test_trees_over_many_lines_and_comments():
    text = "*x*x*x*\n; a comment (\n# and another\n%% third\n" + WSJ_FILE
    one, two = read_trees(text.splitlines())
    assert one.words == "Mr. Vinken is chairman of Elsevier N.V. .".split()
    assert str(clean_tree(two)) == (
        "(TOP (S (NP (PRP It)) (VP (VBZ seems)) (. .)))"
    )  # SBAR and S held traces alone


@pytest.mark.parametrize(
    "text, telling",
    [
        (
            "(S (NN a))\n(S (NN b)",
            "some.mrg, line 2: the tree that begins here is never",
        ),
        ("(S (NN a)))", "some.mrg, line 1: ')' stands outside"),
        ("(S (NN a))\nstray (S (NN b))", "some.mrg, line 2: 'stray' stands outside"),
        ("(S\n (NP ))", "some.mrg, line 2: the bracket (NP) holds nothing"),
        ("(S ((NN a)))", "some.mrg, line 1: a bracket inside a tree has no label"),
        ("(S\n(NP (NN a) b))", "some.mrg, line 2: 'b' stands beside brackets"),
        ("()", "some.mrg, line 1: the bracket () holds nothing"),
        ("(A " * (DEEPEST + 2), "brackets are open"),
    ],
)
def test_damage_is_named(text, telling):
    with pytest.raises(TreeError) as error:
        list(read_trees(text.split("\n"), "some.mrg"))
    assert telling in str(error.value)


@given(TREES)
@SOME
def test_written_trees_are_read_back(made):
    assert list(read_trees([str(made)])) == [made]
    assert list(read_trees([f"( {part} )" for part in made.children])) == [
        Tree("", (part,)) for part in made.children
    ]


def test_labels_and_traces():
    for label, plain in [("NP-SBJ-1", "NP"), ("NP=2", "NP"), ("PP-LOC=3", "PP")]:
        assert plain_label(label) == plain
    assert plain_label("WHNP") == "WHNP"
    text = "( (S (NP-SBJ (-NONE- *)) (VP (-LRB- -LRB-) (PRP$ its))) )"
    assert str(clean_tree(tree(text))) == "(TOP (S (VP (-LRB- -LRB-) (PRP$ its))))"
    assert clean_tree(tree("( (S (-NONE- *)) )")) is None


# --- sequences ------------------------------------------------------------------------


def test_sequence_of_the_figure():
    """The example of Vinyals et al. 2014, figure 2: "John has a dog ."."""
    text = "(S (NP (NNP John)) (VP (VBZ has) (NP (DT a) (NN dog))) (. .))"
    wanted = "(S (NP XX )NP (VP XX (NP XX XX )NP )VP XX )S"
    assert " ".join(linearize(clean_tree(tree(text)))) == wanted
    assert chunks(wanted.split()) == ["(S_(NP_XX_)NP", "(VP_XX", "(NP_XX", "XX_)NP_)VP",
                                      "XX_)S"]  # fmt: skip


@given(TREES)
@SOME
def test_sequences_come_back(made):
    clean, leaves = clean_tree(made), list(made.leaves())
    tokens = linearize(clean)
    assert clean == made and fault(tokens, len(leaves)) == ""
    assert repair(tokens, leaves) == made
    pieces = chunks(tokens)
    assert len(pieces) == len(leaves)
    assert " ".join(pieces).replace("_", " ").split(" ") == tokens


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
    assert slots == ["(S(NP/DT", "0)NP", "/NN", "1)S", "(VP/VBD", "0)VP", "(NP/PRP",
                     "2)S", "/.", "1)TOP"]  # fmt: skip
    known = {"the", "p00", "immu~", "~ized", "A~he", "~", "AA9~", "~~"}
    for word, wanted in {
        "The": ("the", "A~he"), "immunized": ("immu~", "~ized"), "qq": ("~~", "~"),
        "P53": ("p00", "AA9~"), "\u0130": ("~~", "~"),
    }.items():  # fmt: skip
        assert word_slots(word, known) == wanted
    assert word_slots("the", known, whole=False) == ("~~", "~")
    assert brackets_of_slots(["3)TOP", "(S/DT", "9)TOP", "what", "/NN"]) == [
        "(S", "XX", ")S", "XX",
    ]  # fmt: skip


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
    assert fault(linearize(mended), len(leaves)) == ""
    assert list(read_trees([str(mended)])) == [mended]
    if fault(tokens, len(leaves)) == "":  # nothing to mend: nothing is changed
        brackets = [t for t in tokens if parsing.is_bracket(t)]
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
    assert fault(tokens.split(), 2) == problem
    assert " ".join(linearize(repair(tokens.split(), leaves))) == wanted


def test_repair_of_endless_brackets():
    leaves = [Tree("NN", word="a")]
    mended = repair(["(NP"] * 900 + ["XX"], leaves)
    assert list(read_trees([str(mended)])) == [mended]
    assert fault(["(NP"] * 900 + ["XX"] + [")NP"] * 900, 1) == "unbalanced"


def test_words_are_single_tokens():
    assert source_text(["-LRB-", "BMP", "-RRB-"]) == "( BMP )"
    shapes = {"Walking": "~Aing", "p53s": "~9s", "Bmp-2": "~A9-", "xqz": "~"}
    assert {word: word_shape(word) for word in shapes} == shapes
    for odd in ("Xpd TTD", "a\u00a0b", "\u00b4", "\u2009"):
        assert len(source_word(odd).split()) == 1
    assert split_words("Mice (n = 3) don't fly, do they?") == [
        "Mice", "(", "n", "=", "3", ")", "don't", "fly", ",", "do", "they", "?",
    ]  # fmt: skip


# --- the score ------------------------------------------------------------------------

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
    score = bracket_score(tree(gold), tree(parsed))
    assert (score.matched, score.gold, score.parsed) == (matched, in_gold, in_parse)


def test_evalb_totals_add_counts():
    """Row 22 of the sample, of 34 brackets, and the totals under the table."""
    parts = GOLD.removeprefix("(S ").removesuffix(")")
    long = tree(f"(S {' '.join([parts] * 11)})")
    of_22 = bracket_score(long, long)
    assert (of_22.matched, of_22.gold, of_22.parsed) == (34, 34, 34)
    scores = [bracket_score(tree(row[0]), tree(row[1])) for row in EVALB]
    same = bracket_score(tree(GOLD), tree(GOLD))  # row 19 differs in a capital alone
    total = sum([*scores, of_22, same], BracketScore())
    assert (total.matched, total.gold, total.parsed) == (86, 98, 95)
    assert total.recall == pytest.approx(87.76, abs=0.005)
    assert total.precision == pytest.approx(90.53, abs=0.005)
    assert 100 * total.exact / total.sentences == pytest.approx(52.94, abs=0.005)


def test_punctuation_leaves_and_places_move():
    gold = tree("(S (NP (NN a) (, ,) (NN b)) (: :) (VP (VB c)) (. .))")
    moved = tree("(S (NP (NN a) (, ,) (NN b) (: :)) (VP (VB c) (. .)))")
    assert bracket_score(gold, moved).f1 == 100
    xx = repair(linearize(clean_tree(moved)), [Tree("XX", word=w) for w in moved.words])
    assert bracket_score(gold, xx).f1 == 100  # the tags of the gold tree decide
    alone = tree("(S (NP (NN a)) (PRN (, ,)) (VP (VB c)))")
    without = tree("(S (NP (NN a)) (, ,) (VP (VB c)))")
    assert bracket_score(alone, without).f1 == 100


def test_particle_is_adverb_phrase_and_worked_perturbation():
    gold = tree("(S (NP (PRP he)) (VP (VBD gave) (PRT (RP up)) (NP (NN it))))")
    adverb = tree("(S (NP (PRP he)) (VP (VBD gave) (ADVP (RP up)) (NP (NN it))))")
    assert bracket_score(gold, adverb) == BracketScore(5, 5, 5, 1, 1)
    flat = tree("(S (NP (PRP he)) (VP (VBD gave) (NP (RP up) (NN it))))")
    score = bracket_score(gold, flat)  # S, NP, VP match; PRT and NP against one NP
    assert score == BracketScore(3, 5, 4, 0, 1)
    assert score.f1 == pytest.approx(2 * (3 / 4) * (3 / 5) / (3 / 4 + 3 / 5) * 100)


@given(TREES)
@SOME
def test_gold_against_gold_is_all_right(made):
    score = bracket_score(made, made)
    assert score.matched == score.gold == score.parsed and score.exact == 1


def test_what_cannot_be_compared():
    with pytest.raises(ValueError, match="different words: 'a' and 'b'"):
        bracket_score(tree("(S (NN a))"), tree("(S (NN b))"))
    with pytest.raises(ValueError, match="no word"):
        bracket_score(tree("(S (NN a))"), tree("(S (-NONE- *))"))
    assert BracketScore().f1 == BracketScore().recall == BracketScore().precision == 0


# --- treebanks ------------------------------------------------------------------------


def nowhere(monkeypatch, tmp_path):
    monkeypatch.setenv("TRANSFORMER_LIB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRANSFORMER_LIB_MIRROR", str(tmp_path / "mirror"))
    (tmp_path / "mirror" / "craft").mkdir(parents=True)


def make_archive(leave_out=""):
    files = {
        "articles/ids/craft-ids-train.txt": "11\n12\n",
        "articles/ids/craft-ids-dev.txt": "13\n",
        "articles/ids/craft-ids-test.txt": "14\n",
    }
    for i in (11, 12, 13, 14):
        text = (
            f"( (S (NP-SBJ (NN w{i}) (-NONE- *)) (VP (VB go))) )\n( (S (-NONE- 0)) )\n"
        )
        files[f"structural-annotation/treebank/penn/{i}.tree"] = text
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, text in files.items():
            if name.endswith(leave_out) and leave_out:
                continue
            info = tarfile.TarInfo(f"CRAFT-5.0.2/{name}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return out.getvalue()


def test_craft_from_its_archive(tmp_path, monkeypatch):
    nowhere(monkeypatch, tmp_path)
    path = tmp_path / "mirror" / "CRAFT-5.0.2.tar.gz"
    path.write_bytes(make_archive())
    bank = load_trees("craft", "train")
    assert [t.words for t in bank.trees] == [["w11", "go"], ["w12", "go"]]
    assert "offline mirror, CRAFT-5.0.2.tar.gz; 2 trees without a word" in bank.origin
    assert load_trees("craft", "valid").trees[0].words == ["w13", "go"]
    path.write_bytes(make_archive("14.tree"))
    with pytest.raises(CorpusUnavailable, match=r"penn/14\.tree"):
        load_trees("craft", "test")
    path.write_bytes(make_archive()[:300])
    with pytest.raises(CorpusUnavailable, match="cut short or damaged"):
        load_trees("craft", "test")


def test_craft_from_its_address(tmp_path, monkeypatch):
    nowhere(monkeypatch, tmp_path)
    public = tmp_path / "v5.0.2.tar.gz"
    public.write_bytes(make_archive())
    monkeypatch.setattr(
        parsing, "CRAFT", dataclasses.replace(parsing.CRAFT, url=public.as_uri())
    )
    assert load_trees("craft", "test").trees[0].words == ["w14", "go"]
    public.unlink()  # it was kept
    assert load_trees("craft", "test").origin.startswith("cache")
    (tmp_path / "cache" / "CRAFT-5.0.2.tar.gz").unlink()
    with pytest.raises(CorpusUnavailable, match="TRANSFORMER_LIB_MIRROR"):
        load_trees("craft", "test")


@pytest.mark.parametrize("place", ["address", "cache", "mirror", "files"])
def test_craft_of_another_version_is_told(place, tmp_path, monkeypatch):
    """The trees are compared, from wherever they come; the known ones are silent."""
    nowhere(monkeypatch, tmp_path)
    name = "craft/test.mrg.xz" if place == "files" else "CRAFT-5.0.2.tar.gz"
    path = tmp_path / ("mirror" if place == "files" else place) / name
    path.parent.mkdir(exist_ok=True)
    trees = f"( {SMALL} )\n".encode()
    path.write_bytes(lzma.compress(trees) if place == "files" else make_archive())
    monkeypatch.setattr(
        parsing, "CRAFT", dataclasses.replace(parsing.CRAFT, url=path.as_uri())
    )
    with pytest.warns(UserWarning, match="craft, test is another version.*5.0.2"):
        bank = load_trees("craft", "test")
    monkeypatch.setitem(parsing.CRAFT_KNOWN, "test", bank.sha256)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_trees("craft", "test").trees == bank.trees


def test_craft_from_files_for_each_split(tmp_path, monkeypatch):
    nowhere(monkeypatch, tmp_path)
    folder = tmp_path / "mirror" / "craft"
    (folder / "dev.mrg.xz").write_bytes(lzma.compress(f"( {SMALL} )\n".encode()))
    (folder / "craft_test.mrg.xz").write_bytes(lzma.compress(b"( (S (NN a)\n"))
    assert load_trees("craft", "valid").trees == [clean_tree(tree(SMALL))]
    with pytest.raises(TreeError, match=r"craft_test\.mrg\.xz, line 1"):
        load_trees("craft", "test")


def test_wsj_in_its_own_layout(tmp_path, monkeypatch):
    nowhere(monkeypatch, tmp_path)
    for section in range(25):
        folder = tmp_path / "mirror" / "wsj" / f"{section:02}"
        folder.mkdir(parents=True)
        for n in (1, 2):
            text = WSJ_FILE.replace("Vinken", f"V{section}.{n}")
            (folder / f"wsj_{section:02}{n:02}.mrg").write_text(text)
    banks = {split: load_trees("wsj", split) for split in ("train", "valid", "test")}
    assert [len(bank) for bank in banks.values()] == [80, 4, 4]
    names = [t.words[1] for t in banks["train"].trees[::2]]
    assert names == [f"V{section}.{n}" for section in range(2, 22) for n in (1, 2)]
    assert banks["test"].trees[0].words[1] == "V23.1"
    same = load_trees("wsj", "test", tmp_path / "mirror" / "wsj")
    assert same.sha256 == banks["test"].sha256
    for path in (tmp_path / "mirror" / "wsj" / "22").iterdir():
        path.unlink()
    with pytest.raises(CorpusUnavailable, match="section 22 is missing"):
        load_trees("wsj", "valid")
    with pytest.raises(CorpusUnavailable, match="LDC"):
        load_trees("wsj", "test", tmp_path / "elsewhere")


def test_unknown_treebanks():
    with pytest.raises(ValueError, match="must be one of toy, craft, wsj"):
        load_trees("negra")
    with pytest.raises(ValueError, match="split 'dev'"):
        load_trees("toy", "dev")
    with pytest.raises(ValueError, match="only wsj"):
        load_trees("toy", "train", "somewhere")


def test_toy_splits_share_no_sentence():
    banks = [load_trees("toy", split).trees for split in ("train", "valid", "test")]
    words = [{tuple(t.words) for t in bank} for bank in banks]
    assert not (words[0] & words[1] or words[0] & words[2] or words[1] & words[2])
    assert load_trees("toy", "valid").sha256 == load_trees("toy", "valid").sha256
    assert len(banks[0]) == 4000 and str(banks[0]).count("-NONE-") == 0


@pytest.mark.skipif(not MIRROR, reason="no mirror")
def test_all_of_craft_comes_back():
    """30,830 trees: text, tree and sequence, each from the other."""
    total, same_line = 0, 0
    for name in ("train", "dev", "test"):
        (path,) = Path(MIRROR).rglob(f"craft_{name}.mrg.xz")
        lines = lzma.open(path, "rt", encoding="utf-8").read().rstrip("\n").split("\n")
        for line, one in zip(lines, read_trees(lines, path.name), strict=True):
            total += 1
            same_line += str(one) == line
            assert BRACKETS.findall(str(one)) == BRACKETS.findall(line)
            clean = clean_tree(one)
            leaves, tokens = list(clean.leaves()), linearize(clean)
            assert fault(tokens, len(leaves)) == ""
            assert repair(tokens, leaves) == clean
    assert (total, same_line) == (30_830, 30_822)  # eight have a space too many


@pytest.mark.skipif(not MIRROR, reason="no mirror")
def test_craft_development_split_and_its_score():
    bank = load_trees("craft", "valid")
    assert len(bank) == 2_780
    for one in bank.trees:
        source, target = tree_pair(one)
        assert len(source.split()) == len(one.words) == len(chunks(target.split()))
    total = sum((bracket_score(t, t) for t in bank.trees), BracketScore())
    assert total.f1 == 100 and total.exact == total.sentences == 2_780


# --- parsers --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    return folder, prepare_trees("toy", folder, 400, 60, "chunks", threads=1)


def test_prepared_targets_come_back(prepared):
    folder, ready = prepared
    lines = (folder / "valid.tsv").read_text(encoding="utf-8").splitlines()
    trees = load_trees("toy", "valid").trees
    assert form_of(ready.tokenizer) == "chunks" and len(lines) == len(trees) == 150
    for line, one in zip(lines, trees, strict=True):
        target = line.split("\t")[1]
        ids = ready.tokenizer.encode(target)
        assert len(ids) == len(one.words) == len(line.split("\t")[0].split(" "))
        assert ready.tokenizer.decode(ids) == target
        assert repair(target.replace("_", " ").split(" "), list(one.leaves())) == one
    again = prepare_trees("toy", folder, 400, 60, "chunks", threads=1)
    assert again.data == ready.data


def test_prepared_slots_stand_side_by_side(tmp_path):
    ready = prepare_trees("toy", tmp_path, 600, 60, "slots", copies=3, threads=1)
    tokenizer, trees = ready.tokenizer, load_trees("toy").trees
    assert form_of(tokenizer) == "slots" and len(ready.train) == 3 * len(trees)
    lines = (tmp_path / "train.tsv").read_text(encoding="utf-8").splitlines()
    cut = 0
    for number, line in enumerate(lines):
        source, target = line.split("\t")
        one = trees[number % len(trees)]
        ids = tokenizer.encode_all([source, target])
        assert [len(side) for side in ids] == [2 * len(one.words)] * 2
        assert repair(brackets_of_slots(tokenizer.decode(ids[1]).split()),
                      list(one.leaves())) == one  # fmt: skip
        cut += source != tree_pair(one, tokenizer)[0]
        assert number >= len(trees) or not cut  # the first copy is whole
    assert cut
    for row in range(0, len(ready.train), 997):
        source, target = ready.train[row]
        assert len(source) == len(target) and parsing.UNK not in {*source, *target}
    again = prepare_trees("toy", tmp_path, 600, 60, "slots", copies=3, threads=1)
    assert again.data == ready.data
    with pytest.raises(ValueError, match="vocab_size=300: .* are needed"):
        prepare_trees("toy", tmp_path / "a", 300, 60, "slots")
    with pytest.raises(ValueError, match="only slots"):
        prepare_trees("toy", tmp_path / "b", 400, 60, "chunks", copies=2)


@pytest.mark.parametrize("beam_size", [1, 3])
def test_slots_of_an_untrained_parser_are_trees(beam_size):
    """The search finds a tree for each sentence, and counts probability among trees."""
    trees = load_trees("toy", "test").trees[:12]
    bank = load_trees("toy").trees
    tokenizer = parsing.train_tree_tokenizer(bank, 600, "slots")
    torch.manual_seed(1)
    model = Transformer(TransformerConfig(tokenizer.vocab_size, 16, 2, 1, 32))
    parses = parse(trees, model, tokenizer, beam_size)
    assert {p.fault for p in parses} == {""}
    for one, found in zip(trees, parses, strict=True):
        assert found.tree.words == one.words
        assert found.tokens == linearize(found.tree)
    source = tokenizer.encode(tree_pair(trees[0], tokenizer)[0])
    src_ids = torch.tensor([[*source, 3]])
    (best, *_), = parsing.slot_search(model, src_ids, tokenizer, [len(trees[0].words)],
                                      beam_size)  # fmt: skip
    assert len(best.ids) == len(source) and -1000 < best.log_prob < 0
    assert [parse([t], model, tokenizer, beam_size)[0] for t in trees] == parses


def test_the_tool_that_trains_scores_and_records(tmp_path):
    """A tiny parser in two pieces: choices on development trees, test trees once."""
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(
        'name = "tiny"\ncorpus = "toy+slots"\nvocab_size = 600\ncopies = 2\n'
        "max_length = 40\nmax_tokens = 400\nmax_steps = 8\nwarmup = 4\n"
        "validate_every = 4\nkeep_last = 2\n[model]\nd_model = 16\nnum_heads = 2\n"
        "num_layers = 1\nd_ff = 32\n"
    )
    tool = Path(__file__).resolve().parents[1] / "book" / "_tools" / "parsing.py"
    out = tmp_path / "record.json"
    command = [sys.executable, str(tool), str(tmp_path / "run"), "--recipe",
               str(recipe), "--out", str(out), "--every", "40", "--some", "30",
               "--beams", "1", "2", "--beam", "2", "--device", "cpu"]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=1500)
    record = json.loads(out.read_text("utf-8"))
    assert record["finished"] and record["updates"] == 8
    assert record["recipe"]["copies"] == 2 and record["seed"] == 0
    assert [p["updates"] for p in record["curve"]][-1] == 8
    assert record["tokens"] == record["history"][-1]["tokens"]
    trees = load_trees("toy", "test").trees[::40]
    assert record["test"]["sha256"] == load_trees("toy", "test").sha256
    assert len(record["counts"]) == len(trees) == record["scores"]["all"]["sentences"]
    matched, gold, parsed = map(sum, zip(*record["counts"], strict=True))
    assert record["f1"] == pytest.approx(200 * matched / (gold + parsed))
    words = sum(2 * len(t.words) + 1 for t in load_trees("toy").trees)
    assert record["passes"] == pytest.approx(record["tokens"] / words)
    assert (tmp_path / "averaged" / "weights.safetensors").exists()
    subprocess.run(command, check=True, capture_output=True, timeout=1500)
    again = json.loads(out.read_text("utf-8"))
    for one in (record, again):
        for scores in [one["search"], *one["beams"].values()]:
            del scores["seconds"]
    assert again == record


# --- labels ---------------------------------------------------------------------------


@given(TREES)
@SOME
def test_labels_come_back(made):
    leaves = list(made.leaves())
    labels = tree_labels(made)
    assert len(labels) == len(leaves)
    assert tree_of_labels(labels, leaves) == made


NAMES = st.sampled_from(["", "S", "NP", "S VP"])


@given(st.lists(st.tuples(st.integers(-9, 9), NAMES, NAMES), min_size=1, max_size=40))
@SOME
def test_any_labels_give_a_tree(labels):
    leaves = [Tree("NN", word=f"w{i}") for i in range(len(labels))]
    made = tree_of_labels(labels, leaves)
    assert list(made.leaves()) == leaves
    assert fault(linearize(made), len(leaves)) == ""


def test_labels_of_the_papers_kind():
    """Common ancestors counted from the tree, word by word, not by our walk."""
    one = clean_tree(tree("(S (NP (DT The) (NN dog)) (VP (VBD ate) (NP (NP (DT a) "
                          "(NN bone)) (PP (IN of) (NP (NN it))))) (. .))"))  # fmt: skip

    def above(node, index, path=()):
        """The constituents over a word that have several children, outermost first."""
        for child in node.children:
            size = len(child.words)
            if index < size:
                if child.word is not None:
                    return path
                joined = path if len(child.children) == 1 else (*path, child)
                return above(child, index, joined)
            index -= size

    paths = [above(one, i) for i in range(len(one.words))]
    common = [
        [a for a, b in zip(*pair, strict=False) if a is b]
        for pair in zip(paths, paths[1:], strict=False)
    ]
    counts = [0, *map(len, common)]
    wanted = [after - before for before, after in zip(counts, counts[1:], strict=False)]
    labels = tree_labels(one)
    assert [step for step, _, _ in labels] == [*wanted, 0]
    assert [name for _, name, _ in labels] == [*(c[-1].label for c in common), ""]
    assert [alone for _, _, alone in labels] == ["", "", "", "", "", "", "NP", ""]


def test_the_labeller_reads_every_word(tmp_path):
    trees = load_trees("toy").trees
    tokenizer = parsing.train_tree_tokenizer(trees, 600, "slots")
    task = parsing.LabelTask(trees[:200], tokenizer)
    pairs = task.pairs(0, 60)
    assert len(pairs) == 200 and task.pairs(0, 20).src_lengths.max() <= 21
    torch.manual_seed(0)
    sizes = [len(kind) for kind in task.kinds]
    model = parsing.Labeller(tokenizer.vocab_size, sizes, 16, num_layers=1, num_heads=2,
                             d_ff=32)  # fmt: skip
    batch = make_batch(pairs, [0, 1, 2])
    loss = parsing.label_loss(model.eval(), batch, task.table, 0.0)
    by_hand, words = 0.0, 0
    for row in range(3):  # each sentence alone, each kind from tree_labels itself
        ids, _ = pairs[row]
        logits = model(torch.tensor([[*ids.tolist(), 3]]))
        labels = tree_labels(trees[row])
        words += len(labels)
        for i, one in enumerate(labels):
            for kind, label in enumerate(one):
                log_p = logits[kind][0, i].log_softmax(dim=-1)
                by_hand -= log_p[task.kinds[kind].index(label)].item()
    assert loss.item() == pytest.approx(by_hand / words, rel=1e-5)
    parses = parsing.parse_by_labels(trees[:40], model, task)
    assert [p.tree.words for p in parses] == [t.words for t in trees[:40]]
    few = parsing.parse_by_labels(trees[:40], model, task, max_tokens=1)
    assert few == parses


def test_the_tool_of_the_reference_goes_on(tmp_path):
    """Stopped and gone on with, the same record; the score from its counts."""
    recipe = tmp_path / "tiny.toml"
    text = ('name = "tiny"\ncorpus = "toy+slots"\nvocab_size = 600\nmax_length = 40\n'
            "max_tokens = 400\nmax_steps = {}\nwarmup = 10\nvalidate_every = 3\n"
            "keep_last = 2\n[model]\nd_model = 16\nnum_heads = 2\nnum_layers = 1\n"
            "d_ff = 32\n")  # fmt: skip
    tool = Path(__file__).resolve().parents[1] / "book" / "_tools" / "labelling.py"

    def record(run, steps):
        recipe.write_text(text.format(steps))
        out = tmp_path / f"{run}.json"
        command = [sys.executable, str(tool), str(tmp_path / run), "--recipe",
                   str(recipe), "--out", str(out), "--every", "20", "--some", "30",
                   "--device", "cpu"]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=1500)
        found = json.loads(out.read_text("utf-8"))
        del found["seconds"], found["environment"]["date"]
        for one in (found["scores"]["all"], found["development"], *found["history"]):
            del one["seconds"]
        return found

    record("stopped", 3)
    again, whole = record("stopped", 6), record("whole", 6)
    assert again == whole and whole["updates"] == 6
    matched, gold, parsed = map(sum, zip(*whole["counts"], strict=True))
    assert whole["f1"] == pytest.approx(200 * matched / (gold + parsed))


def test_more_trees(tmp_path):
    path = tmp_path / "more.mrg"
    path.write_text(WSJ_FILE)
    ready = prepare_trees("toy", tmp_path / "a", 390, 60, more=[path], threads=1)
    assert ready.data["train"]["read"] == 4002 and form_of(ready.tokenizer) == ""
    path.write_text("(S")
    with pytest.raises(TreeError, match=r"more\.mrg, line 1"):
        prepare_trees("toy", tmp_path / "b", 430, 60, more=[path])
    with pytest.raises(ValueError, match="vocab_size=9"):
        prepare_trees("toy", tmp_path / "c", 9, 60)


def test_an_untrained_parser_gives_trees(prepared):
    torch.manual_seed(0)
    tokenizer = prepared[1].tokenizer
    model = Transformer(TransformerConfig(tokenizer.vocab_size, 16, 2, 1, 32))
    trees = load_trees("toy", "test").trees[:12]
    parses = parse(trees, model, tokenizer, beam_size=2, max_extra=5)
    assert [p.tree.words for p in parses] == [t.words for t in trees]
    assert [list(p.tree.leaves()) for p in parses] == [list(t.leaves()) for t in trees]
    one_by_one = [parse([t], model, tokenizer, 2, max_extra=5)[0] for t in trees]
    assert parses == one_by_one
    record = evaluate_parser(model, tokenizer, trees, 25, beam_size=2, max_extra=5)
    assert record["within"]["sentences"] + record["beyond"]["sentences"] == 12
    wanted = sum(
        (bracket_score(t, p.tree) for t, p in zip(trees, parses, strict=True)),
        BracketScore(),
    )
    assert record["all"]["f1"] == wanted.f1
    assert sum(record["all"]["faults"].values()) == sum(p.fault != "" for p in parses)
    typed = parse(["She saw it."], model, tokenizer, 1, max_extra=5)[0].tree
    assert typed.words == ["She", "saw", "it", "."]
    with pytest.raises(ValueError, match="sentence 1 has no words"):
        parse(["a", " "], model, tokenizer)
    with pytest.raises(ValueError, match="one string"):
        parse("a b", model, tokenizer)
    for beam_size in (0, 100_000):
        with pytest.raises(ValueError, match=f"beam_size={beam_size}: must be from 1"):
            parse([], model, tokenizer, beam_size)
    with pytest.raises(ValueError, match="no trees"):
        evaluate_parser(model, tokenizer, [])


def test_training_and_going_on(tmp_path):
    model = {"d_model": 16, "num_heads": 2, "num_layers": 1, "d_ff": 32}
    recipe = Recipe("tiny", "toy+chunks", 400, model, max_length=60, max_tokens=400,
                    max_steps=4, warmup=4, validate_every=2)  # fmt: skip
    first = train_parser(recipe, tmp_path / "run", show=False)
    assert form_of(first.tokenizer) == "chunks" and first.progress.step == 4
    longer = dataclasses.replace(recipe, max_steps=6)
    assert train_parser(longer, tmp_path / "run", show=False).progress.step == 6
    other = dataclasses.replace(recipe, corpus="toy+slots", vocab_size=600, copies=2)
    slots = train_parser(other, tmp_path / "slots", show=False)
    assert form_of(slots.tokenizer) == "slots" and slots.recipe.copies == 1
    for corpus in ("tatoeba-en-de", "toy+letters"):
        with pytest.raises(ValueError, match="is no treebank"):
            other = dataclasses.replace(recipe, corpus=corpus)
            train_parser(other, tmp_path / "other", show=False)


def test_recipes_of_section_6_3():
    """Typed from the paper and from Tensor2Tensor; the rest is the base model's."""
    base = Recipe.load("wmt14-en-de-base")
    paper = {"d_model": 1024, "num_layers": 4}
    alone = {"dropout": 0.2, "attention_dropout": 0.2, "tie_embeddings": False}
    for name, vocab_size, warmup, from_t2t in [
        ("wsj-parsing", 16_000, 16_000, alone),
        ("wsj-parsing-semi", 32_000, 4_000, {"dropout": 0.1}),
    ]:
        recipe = Recipe.load(name)
        assert recipe.name == name and recipe.corpus == "wsj"
        assert recipe.vocab_size == vocab_size and recipe.warmup == warmup
        assert recipe.model == base.model | paper | from_t2t
        for setting in ("max_steps", "factor", "epsilon"):
            assert getattr(recipe, setting) == getattr(base, setting)
        assert recipe.max_tokens * recipe.accumulate == 25_000
        Transformer(TransformerConfig(100, **recipe.model | {"num_layers": 1}))
    assert parsing.PAPER_SEARCH == {"beam_size": 21, "alpha": 0.3, "max_extra": 300}
    assert Recipe.load("craft-parsing").corpus == "craft+chunks"


def test_chapter_17_tells_of_the_long_runs_once_they_are_there():
    """Its prose on CRAFT is of the record it reads: a new one asks for new prose."""
    root = Path(__file__).resolve().parents[1]
    kept = root / "transformer_lib" / "evidence" / "results"
    text = (root / "notebooks" / "26_parsing.ipynb").read_text("utf-8")
    for name in ("parser/craft-large", "parser-reference/craft-labels"):
        if (kept / f"{name}.json").exists():
            assert f"results/{name}" in text, f"chapter 26 does not read {name} yet"
            assert "still the small one" not in text


def test_chunks_are_counted_with_the_right_beginning_given():
    """A model that always writes one token, against a count by hand."""
    trees = load_trees("toy", "valid").trees[:6]
    bank = load_trees("toy").trees
    tokenizer = parsing.train_tree_tokenizer(bank, 400, "chunks")
    often = parsing.chunks(parsing.linearize(trees[0]))[1]
    (token,) = tokenizer.encode(often)

    class Always(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, src_ids, tgt_ids):
            assert tgt_ids[0, 0] == 2 and src_ids[0, -1] == 3  # BOS and EOS
            logits = torch.zeros(*tgt_ids.shape, tokenizer.vocab_size)
            logits[..., token] = 1.0
            return logits

    expected, words = 0, 0
    for tree in trees:
        written = parsing.chunks(parsing.linearize(tree))
        expected, words = expected + written.count(often), words + len(written)
    got = parsing.chunk_accuracy(Always(), tokenizer, trees)
    assert got == {"known": (expected / words, words)} and expected > 3
    odd = Tree("TOP", (Tree("S", (Tree("NN", word="Zyxxity"),)),))
    assert parsing.chunk_accuracy(Always(), tokenizer, [odd])["shape"][1] == 1
    subwords = parsing.train_tree_tokenizer(bank, 300)
    with pytest.raises(ValueError, match="one chunk for each"):
        parsing.chunk_accuracy(Always(), subwords, trees)


def test_table_4_is_the_papers():
    """Typed from the paper once more, by what the parsers were trained on."""
    wanted = {
        "WSJ only": [88.3, 90.4, 90.4, 91.7, 91.3],
        "semi-supervised": [91.3, 91.3, 92.1, 92.1, 92.7],
        "multi-task": [93.0],
        "generative": [93.3],
    }
    for kind, scores in wanted.items():
        assert [f1 for _, k, f1 in parsing.TABLE_4 if k == kind] == scores
    ours = [row[1:] for row in parsing.TABLE_4 if row[0] == "Transformer, 4 layers"]
    assert ours == [("WSJ only", 91.3), ("semi-supervised", 92.7)]
    assert len(parsing.TABLE_4) == 12


# --- exercises ------------------------------------------------------------------------


def spans(shift=0, last=0, order=None):
    def answer(tokens):
        stack, words, found = [], 0, []
        for token in tokens:
            if token == "XX":
                words += 1
            elif token[0] == "(":
                stack.append((token[1:], words + shift))
            else:
                found.append((*stack.pop(), words + shift + last))
        return sorted(found, key=order) if order else found

    return answer


def f1_of(count):
    def answer(gold, parsed):
        matched = count(gold, parsed)
        return 200 * matched / (len(gold) + len(parsed))

    return answer


def by_sets(gold, parsed):
    gold, parsed = set(gold), set(parsed)
    return 200 * len(gold & parsed) / (len(gold) + len(parsed))


def shared(gold, parsed):
    return len(set(gold) & set(parsed))


def closing(change, reverse=True):
    def answer(tokens):
        stack = []
        for token in tokens:
            if token[0] == "(":
                stack.append(token[1:])
            elif token[0] == ")":
                stack.pop()
        return tokens + [change(x) for x in (reversed(stack) if reverse else stack)]

    return answer


def never_popped(tokens):
    return tokens + [f"){t[1:]}" for t in reversed(tokens) if t[0] == "("]


@pytest.mark.parametrize(
    "check, wrong, telling",
    [
        (check_spans, spans(last=-1), "last words"),
        (check_spans, spans(shift=1), "count from 0"),
        (check_spans, spans(order=lambda s: (s[1], -s[2])), "closing brackets"),
        (check_spans, lambda tokens: [("S", 0, 0)], "is empty"),
        (check_spans, lambda tokens: [], "it is"),
        (check_f1, lambda g, p: shared(g, p) * 2 / (len(g) + len(p)), "percent"),
        (check_f1, lambda g, p: 50 * shared(g, p) * (1 / len(g) + 1 / len(p)), "plain"),
        (check_f1, lambda g, p: 100 * shared(g, p) / len(p), "precision"),
        (check_f1, lambda g, p: 100 * shared(g, p) / len(g), "recall"),
        (check_f1, by_sets, "Sets forget"),
        (check_f1, f1_of(lambda g, p: shared(g, p) + 1), "partner"),
        (check_close, closing(lambda x: f"){x}", reverse=False), "outermost"),
        (check_close, closing(lambda x: ")"), "no labels"),
        (check_close, never_popped, "pop"),
        (check_close, lambda tokens: tokens, "pop"),
        (check_close, lambda tokens: [*tokens, ")NP"], "It ends with"),
    ],
)
def test_mistakes_are_named(check, wrong, telling):
    verdict = check(wrong)
    assert not verdict.passed
    assert telling in verdict.message
