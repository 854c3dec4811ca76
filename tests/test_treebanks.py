"""Chapter 26: treebanks from archives, files and the little grammar."""

import dataclasses
import io
import lzma
import re
import tarfile
import warnings

import pytest
from made_trees import WSJ_FILE, tree

from transformer_lib.corpora import CorpusUnavailable, Source
from transformer_lib.corpora.downloads import local_copies
from transformer_lib.parsing import (
    BracketScore,
    Tree,
    TreeError,
    clean_tree,
    linearize,
    load_trees,
    read_trees,
    repair,
    treebanks,
)
from transformer_lib.parsing.tree_tokens import chunks_of, tree_pair
from transformer_lib.parsing.trees import fault_of

SMALL = "(S (NP (DT The) (NN dog)) (VP (VBD saw) (NP (PRP it))) (. .))"


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
        treebanks, "CRAFT", dataclasses.replace(treebanks.CRAFT, url=public.as_uri())
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
        treebanks, "CRAFT", dataclasses.replace(treebanks.CRAFT, url=path.as_uri())
    )
    with pytest.warns(UserWarning, match="craft, test is another version.*5.0.2"):
        bank = load_trees("craft", "test")
    monkeypatch.setitem(treebanks.CRAFT_KNOWN, "test", bank.sha256)
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


@pytest.mark.corpora
def test_all_of_craft_comes_back():
    """30,830 trees read and written; every twelfth's sequence gives the tree back."""
    total, same_line, brackets = 0, 0, re.compile(r"[()]|[^ \t\r\n()]+")
    for name in ("train", "dev", "test"):
        file = f"craft_{name}.mrg.xz"
        path = next((path for _, path in local_copies(Source(file, "", ""))), None)
        if path is None:
            raise CorpusUnavailable(file)
        lines = lzma.open(path, "rt", encoding="utf-8").read().rstrip("\n").split("\n")
        for line, one in zip(lines, read_trees(lines, path.name), strict=True):
            total += 1
            same_line += str(one) == line
            assert brackets.findall(str(one)) == brackets.findall(line)
            if total % 12:
                continue
            clean = clean_tree(one)
            leaves, tokens = list(clean.leaves()), linearize(clean)
            assert fault_of(tokens, len(leaves)) == ""
            assert repair(tokens, leaves) == clean
    assert (total, same_line) == (30_830, 30_822)  # eight have a space too many


@pytest.mark.corpora
def test_craft_development_split_and_its_score():
    bank = load_trees("craft", "valid")
    assert len(bank) == 2_780
    for one in bank.trees:
        source, target = tree_pair(one)
        assert len(source.split()) == len(one.words) == len(chunks_of(target.split()))
    total = sum((BracketScore.of(t, t) for t in bank.trees), BracketScore())
    assert total.f1 == 100 and total.exact == total.sentences == 2_780
