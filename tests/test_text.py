"""Chapter 08: text from anywhere, checked; BPE equal to SentencePiece's."""

import gzip
import hashlib
import http.client
import io
import lzma
import os
import random
import re
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import tracemalloc
import urllib.error
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import sentencepiece as spm
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_lib import text
from transformer_lib.exercises.text import (
    check_count_pairs,
    check_cut,
    check_spell,
    check_unknown_share,
)
from transformer_lib.text import (
    BOS,
    EOS,
    PAD,
    SOURCES,
    UNK,
    CleaningReport,
    Corpus,
    CorpusUnavailable,
    Tokenizer,
    apply_bpe,
    grammar_pair,
    grammar_split,
    held_out,
    load_corpus,
    stream_corpus,
    stream_pairs,
    train_bpe,
    unpack,
    whole_file,
)

EASY = settings(max_examples=25)
MIRROR = os.environ.get("TRANSFORMER_LIB_MIRROR", "")


# --- the grammar ---------------------------------------------------------------------


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


# --- finding files -------------------------------------------------------------------

TWO = "Go.\tGeh.\nHi.\tHallo!\nHi.\tGrüß Gott!\n"
THREE = "Go.\tGeh.\tCC-BY 2.0\r\nHi.\tHallo!\tCC-BY 2.0\r\nHi.\tGrüß Gott!\tCC\r\n"
PAIRS = [("Go.", "Geh."), ("Hi.", "Hallo!"), ("Hi.", "Grüß Gott!")]


def archive(content=TWO, name="deu.txt"):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("_about.txt", "About.\tNot a pair.")
        file.writestr(name, content)
    return out.getvalue()


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """An empty cache, no mirror, no network; counts the calls to the network."""
    monkeypatch.setenv("TRANSFORMER_LIB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TRANSFORMER_LIB_MIRROR", raising=False)
    calls = []

    def refuse(request, timeout=None):
        assert timeout and timeout <= 30, "a call without a short timeout"
        calls.append(request.full_url)
        raise urllib.error.URLError(socket.gaierror(-2, "Name or service not known"))

    monkeypatch.setattr(text, "open_url", refuse)
    return calls


class Answer(io.BytesIO):
    """What urlopen gives."""

    def __init__(self, content, size=None):
        super().__init__(content)
        self.headers = {"Content-Length": str(len(content) if size is None else size)}


def serve(monkeypatch, content, size=None):
    asked = []

    def urlopen(request, timeout=None):
        asked.append(request)
        return Answer(content, size)

    monkeypatch.setattr(text, "open_url", urlopen)
    return asked


def everything(name="tatoeba-en-de"):
    pairs = load_corpus(name).pairs + load_corpus(name, "valid").pairs
    return sorted(pairs)


def leftovers(tmp_path):
    return sorted(p.name for p in tmp_path.rglob("*") if p.is_file())


PARTS = ["deu-eng.zip.part", "deu-eng.zip.part.json"]


@pytest.mark.parametrize("content", [TWO, THREE], ids=["two columns", "three"])
def test_mirror_searched_in_depth(content, tmp_path, monkeypatch, places):
    (tmp_path / "mirror" / "deep").mkdir(parents=True)
    (tmp_path / "mirror" / "deep" / "deu-eng.zip").write_bytes(archive(content))
    monkeypatch.setenv("TRANSFORMER_LIB_MIRROR", str(tmp_path / "mirror"))
    assert everything() == sorted(PAIRS)
    corpus = load_corpus("tatoeba-en-de")
    assert "offline mirror" in repr(corpus) and "CC-BY 2.0 FR" in repr(corpus)
    assert "Tatoeba" in corpus.licence and not places
    assert str(tmp_path) not in corpus.origin


def test_cache_comes_before_the_mirror(tmp_path, monkeypatch):
    for folder, content in (("cache", TWO), ("mirror", "No.\tNein.\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "deu-eng.zip").write_bytes(archive(content))
    monkeypatch.setenv("TRANSFORMER_LIB_MIRROR", str(tmp_path / "mirror"))
    assert everything() == sorted(PAIRS)


def test_download_is_kept(tmp_path, monkeypatch, capsys):
    asked = serve(monkeypatch, archive())
    assert everything() == sorted(PAIRS)
    assert len(asked) == 1 and asked[0].full_url == SOURCES["tatoeba-en-de"].url
    assert leftovers(tmp_path) == ["deu-eng.zip"]
    assert "CC-BY 2.0 FR" in capsys.readouterr().out


def test_french(monkeypatch):
    serve(monkeypatch, archive("Go.\tVa !\n", "fra.txt"))
    assert everything("tatoeba-en-fr") == [("Go.", "Va !")]


LONG = "".join(f"{random.Random(i).random()}\t{i}\n" for i in range(900))
HALF = archive(LONG)[:-600]
FLIPPED = bytearray(archive(LONG))
FLIPPED[200] ^= 0x55


@pytest.mark.parametrize(
    ("content", "size", "said"),
    [
        (b"<!DOCTYPE html><html><body>Log in</body></html>", None, "web page"),
        (b"  <HTML><head>", None, "web page"),
        (HALF, None, "cut short or damaged"),
        (bytes(FLIPPED), None, "cut short or damaged"),
        (archive()[:100], len(archive()), "broke off after 100 of"),
        (b"", None, "no sentence pairs"),
        (archive(name="readme.md"), None, "holds no file like deu.txt"),
        (archive(b"\xff\xfeG"), None, "not UTF-8"),
        (archive("no tab here\n"), None, "no sentence pairs"),
    ],
    ids="html capitals half flipped broken empty noname latin notab".split(),
)
def test_a_bad_download_is_named_and_leaves_nothing(
    content, size, said, tmp_path, monkeypatch
):
    serve(monkeypatch, content, size)
    with pytest.raises(CorpusUnavailable, match=said):
        load_corpus("tatoeba-en-de")
    assert leftovers(tmp_path) == (PARTS if "broke off" in said else [])


@pytest.mark.parametrize("place", ["cache", "mirror"])
def test_a_damaged_copy_is_named_with_its_path(place, tmp_path, monkeypatch):
    (tmp_path / place).mkdir()
    path = tmp_path / place / "deu-eng.zip"
    path.write_bytes(HALF)
    monkeypatch.setenv("TRANSFORMER_LIB_MIRROR", str(tmp_path / "mirror"))
    with pytest.raises(CorpusUnavailable, match="cut short or damaged") as error:
        load_corpus("tatoeba-en-de")
    assert str(path) in str(error.value) and "Delete it" in str(error.value)


@pytest.mark.parametrize(
    "failure",
    [
        urllib.error.URLError("no route"),
        urllib.error.HTTPError("u", 404, "Not Found", {}, None),
        TimeoutError("timed out"),
        ConnectionResetError("reset"),
        http.client.BadStatusLine("x"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_no_network_says_what_to_do(failure, tmp_path, monkeypatch):
    def urlopen(request, timeout=None):
        raise failure

    monkeypatch.setattr(text, "open_url", urlopen)
    with pytest.raises(CorpusUnavailable) as error:
        load_corpus("tatoeba-en-de")
    for part in ("deu-eng.zip", "TRANSFORMER_LIB_MIRROR", "manythings.org", "put the"):
        assert part in str(error.value)
    assert leftovers(tmp_path) == []


def test_network_that_breaks_off_in_the_middle(tmp_path, monkeypatch):
    class Broken(Answer):
        def read(self, n):
            if self.tell():
                raise ConnectionResetError("reset by peer")
            return super().read(10)

    monkeypatch.setattr(
        text, "open_url", lambda request, timeout: Broken(archive())
    )
    with pytest.raises(CorpusUnavailable, match="reset by peer"):
        load_corpus("tatoeba-en-de")
    assert leftovers(tmp_path) == PARTS


def test_an_unwritable_cache_is_a_warning(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file, and no folder")
    serve(monkeypatch, archive())
    with pytest.warns(UserWarning, match="deu-eng.zip is not kept: .*not be written"):
        assert everything() == sorted(PAIRS)
    assert leftovers(tmp_path) == ["cache"]


def test_a_full_disk_is_a_warning_and_leaves_nothing(tmp_path, monkeypatch):
    def full(part, piece, mode):
        if part.path.is_relative_to(tmp_path / "cache") and piece:
            raise text.NotWritten(part.path, OSError(28, "No space left on device"))
        whole(part, piece, mode)

    whole = text.Part.write
    serve(monkeypatch, archive())
    monkeypatch.setattr(text.Part, "write", full)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.warns(UserWarning, match="not kept: .*No space"):
        assert everything() == sorted(PAIRS)
    assert leftovers(tmp_path) == []


def test_a_redirect_stays_encrypted():
    handler, secure = text.SafeRedirects(), text.urllib.request.Request("https://a/x")
    open_one = text.urllib.request.Request("http://a/x")
    for request, to in (secure, "https://b/x"), (open_one, "http://b/x"):
        asked = handler.redirect_request(request, None, 302, "Found", {}, to)
        assert asked.full_url == to
    for to in "http://b/x", "ftp://b/x":
        with pytest.raises(urllib.error.URLError, match=f"redirects to {to}, which is"):
            handler.redirect_request(secure, None, 302, "Found", {}, to)


def test_another_version_is_told(tmp_path, monkeypatch):
    """Not where it holds the same pairs in another form or order."""
    serve(monkeypatch, archive())
    with pytest.warns(UserWarning, match="deu-eng.zip is another version.*2018-05-13"):
        load_corpus("tatoeba-en-de")
    source, pairs = SOURCES["tatoeba-en-de"], load_corpus("tatoeba-en-de").pairs
    pairs += load_corpus("tatoeba-en-de", "valid").pairs
    known = {text.hash_pairs(sorted(pairs)): "of these pairs"}
    source = replace(source, known=known)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert text.version_of(source, b"x", pairs[::-1]) == "of these pairs"


@pytest.mark.parametrize("place", ["address", "cache", "mirror"])
@pytest.mark.parametrize("name", sorted(SOURCES))
def test_other_content_is_told_or_refused(name, place, tmp_path, monkeypatch):
    """Every source has a known hash; newstest, which never changes, is refused."""
    source = SOURCES[name]
    assert source.known
    assert all(re.fullmatch("[0-9a-f]{32}|[0-9a-f]{64}", h) for h in source.known)
    if source.fixed:
        year, pair = re.match(r"newstest(\d+)-en-(..)", name).groups()
        content = newstest(int(year), pair)
    elif source.filename.endswith(".zip"):
        content = archive(name="deu.txt")
    else:
        content = gzip.compress(b"eng\tdeu\tHi.\tHallo.\n", mtime=0)
    if place == "address":
        serve(monkeypatch, content)
    else:
        put_into = tmp_path / place / source.filename
        put_into.parent.mkdir()
        put_into.write_bytes(content)
        monkeypatch.setenv("TRANSFORMER_LIB_MIRROR", str(tmp_path / "mirror"))
    if source.fixed:
        with pytest.raises(CorpusUnavailable, match="is not what was published"):
            text.fetch(source)
        assert place != "address" or leftovers(tmp_path) == []
        return
    said = f"{source.filename} is another version.*counts and scores will differ"
    with pytest.warns(UserWarning, match=re.escape(source.filename)) as told:
        pairs, origin = text.fetch(source)
    assert re.search(said, str(told[0].message)) and "not a copy known here" in origin
    same = replace(source, known={hashlib.sha256(content).hexdigest(): "as we know it"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert text.fetch(same)[0] == pairs


def put(path, content, mode="wb"):
    with whole_file(path, mode) as file:
        file.write(content)


def test_a_file_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "x"
    put(path, b"old")

    def fail(*names):
        raise OSError("no")

    with pytest.raises(KeyError), whole_file(path) as file:
        file.write(b"half")
        raise KeyError
    monkeypatch.setattr(text.os, "replace", fail)
    with pytest.raises(OSError, match="x could not be written .no.; what was there"):
        put(path, b"new")
    assert path.read_bytes() == b"old" and leftovers(tmp_path) == ["x"]


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o077, 0o600), (0, 0o666)])
def test_a_new_file_has_the_mode_that_open_gives(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        put(tmp_path / "ours", b"x")
        (tmp_path / "pythons").write_bytes(b"x")
    finally:
        os.umask(before)
    modes = [(tmp_path / n).stat().st_mode & 0o777 for n in ("ours", "pythons")]
    assert modes == [mode, mode]


@pytest.mark.parametrize("mode", [0o640, 0o600, 0o444, 0o755])
def test_a_file_that_is_replaced_keeps_its_mode(tmp_path, mode):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    path.chmod(mode)
    put(path, "new\n", "w")
    assert path.read_bytes() == b"new\n" and path.stat().st_mode & 0o777 == mode


def test_links_are_followed_and_stay(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "x").write_bytes(b"old")
    (tmp_path / "a").symlink_to("deep/x")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (tmp_path / "c").symlink_to("deep/not yet there")
    for name in "b", "c":
        put(tmp_path / name, b"new")
        assert (tmp_path / name).is_symlink()
    assert (tmp_path / "deep" / "x").read_bytes() == b"new"
    assert sorted(leftovers(tmp_path)) == ["a", "b", "c", "not yet there", "x"]
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="loop could not be written"):
        put(tmp_path / "loop", b"new")
    assert (tmp_path / "loop").is_symlink()


def test_no_file_or_link_of_another_is_touched(tmp_path, monkeypatch):
    """The old fixed name, and the random one if somebody guesses it."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (tmp_path / "x.part").symlink_to(victim)
    put(tmp_path / "x", b"new")
    monkeypatch.setattr(text.os, "urandom", bytes)
    (tmp_path / "x.00000000.part").symlink_to(victim)
    with pytest.raises(OSError, match="File exists"):
        put(tmp_path / "x", b"newer")
    assert victim.read_bytes() == b"mine" and (tmp_path / "x").read_bytes() == b"new"
    assert (tmp_path / "x.part").is_symlink()
    assert (tmp_path / "x.00000000.part").is_symlink()


def test_devices_and_pipes_are_written_to(tmp_path):
    put("/dev/null", b"x")
    assert Path("/dev/null").is_char_device()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for name in "pipe", "link":
        put(tmp_path / name, name, "w")
    assert os.read(reader, 99) == b"pipelink"
    os.close(reader)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "pipe"]


def test_standard_output_is_appended_to(tmp_path):
    """Also where it is a file: what was printed before and after stays."""
    program = (
        "from transformer_lib.text import whole_file\n"
        "print('before')\n"
        "for name in '/dev/stdout', '/dev/fd/1':\n"
        "    with whole_file(name, 'w') as file:\n"
        "        file.write(name + '\\n')\n"
        "print('after')\n"
    )
    with open(tmp_path / "out", "wb") as out:
        subprocess.run([sys.executable, "-c", program], stdout=out, check=True)
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines == ["before", "/dev/stdout", "/dev/fd/1", "after"]


@pytest.mark.parametrize(
    "name, said",
    [("no/such/x", "No such file.*Make its folder first"), ("", "it is a folder"),
     ("x" * 300, "too long")],
)  # fmt: skip
def test_what_cannot_be_written_is_said_before_anything_is_done(tmp_path, name, said):
    with pytest.raises(OSError, match=f"could not be written.*{said}"):
        with whole_file(tmp_path / name):
            raise AssertionError("too late")
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "folder", "said"),
    [("no/x", False, "Make its folder"), ("folder", False, "it is a folder"),
     ("file/x", False, "choose another place"), ("file", True, "choose another place"),
     ("file/x", True, "choose another place"), ("x" * 300, False, "too long")],
)  # fmt: skip
def test_a_place_that_cannot_be_written_is_told(tmp_path, name, folder, said):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    with pytest.raises(text.NotWritten, match=f"could not be written.*{said}"):
        text.check_place(tmp_path / name, folder)
    assert leftovers(tmp_path) == ["file"]


def test_a_place_that_can_be_written_is_left_as_it_is(tmp_path):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    names = sorted(path.name for path in tmp_path.iterdir())
    for name in "file", "link", "pipe", "new":
        text.check_place(tmp_path / name)
    for name in "", "new", "new/er":
        text.check_place(tmp_path / name, folder=True)
    text.check_place("/dev/null")
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert (tmp_path / "file").read_text() == "kept"


def test_public_test_set_without_what_training_has_seen(tmp_path, monkeypatch):
    rows = ["deu\teng\tGeh.\tLeave.", "deu\teng\tAch!\tHi.", "deu\teng\tKomm!\tCome!"]
    (tmp_path / "mirror").mkdir()
    (tmp_path / "mirror" / "deu-eng.zip").write_bytes(archive())
    name = SOURCES["tatoeba-test-en-de"].filename
    content = gzip.compress("\n".join(rows).encode())
    (tmp_path / "mirror" / name).write_bytes(content)
    monkeypatch.setenv("TRANSFORMER_LIB_MIRROR", str(tmp_path / "mirror"))
    corpus = load_corpus("tatoeba-en-de", "test")
    assert corpus.pairs == [("Come!", "Komm!")]
    assert "2 pairs seen in training were dropped" in corpus.origin


def test_prepared_test_set_and_the_other_order_of_languages(tmp_path, monkeypatch):
    (tmp_path / "mirror").mkdir()
    (tmp_path / "mirror" / "fra-eng.zip").write_bytes(archive("Go.\tVa !\n", "fra.txt"))
    prepared = lzma.compress(b"Come!\tViens !\n")
    (tmp_path / "mirror" / "test.en-fr.tsv.xz").write_bytes(prepared)
    monkeypatch.setenv("TRANSFORMER_LIB_MIRROR", str(tmp_path / "mirror"))
    assert load_corpus("tatoeba-en-fr", "test").pairs == [("Come!", "Viens !")]
    name = SOURCES["tatoeba-test-en-fr"].filename
    (tmp_path / "mirror" / name).write_bytes(gzip.compress(b"eng\tfra\tStop!\tArr\n"))
    assert load_corpus("tatoeba-en-fr", "test").pairs == [("Stop!", "Arr")]


def test_a_line_separator_inside_a_sentence_shifts_nothing():
    content = "A\u2028b.\tC\x0bd.\nHi.\tHallo!\n"
    pairs = text.read_pairs(content, "x")
    assert pairs == [("A\u2028b.", "C\x0bd."), ("Hi.", "Hallo!")]


@pytest.mark.parametrize(
    ("name", "split", "said"),
    [("tatoeba", "train", "'tatoeba' is unknown"), ("grammar-en-de", "dev", "'dev'")],
)
def test_wrong_names(name, split, said):
    with pytest.raises(ValueError, match=said):
        load_corpus(name, split)


def test_all_translations_of_a_sentence_are_held_out_together():
    pairs = [(f"Sentence {i}.", str(k)) for i in range(3000) for k in range(2)]
    valid = {english for english, _ in pairs if held_out(english)}
    assert 10 < len(valid) < 60  # about 1%
    assert held_out("Hi.") is False


def shared_targets(spec):
    train, valid = (load_corpus(spec, split).pairs for split in ("train", "valid"))
    assert train and valid
    return [{p[i] for p in train} & {p[i] for p in valid} for i in (0, 1)]


def test_no_validation_sentence_of_either_side_is_trained_on(tmp_path, monkeypatch):
    # Many sources, few targets: every target would be on both sides.
    lines = [f"Sentence {i}.\tSatz {i % 500}.\n" for i in range(3000)]
    path = write(tmp_path / "mine.tsv", "".join(lines))
    assert shared_targets({"train": str(path), "share": 0.05}) == [set(), set()]
    monkeypatch.setenv("TRANSFORMER_LIB_MIRROR", str(tmp_path / "mirror"))
    (tmp_path / "mirror").mkdir()
    (tmp_path / "mirror" / "deu-eng.zip").write_bytes(archive("".join(lines)))
    assert shared_targets("tatoeba-en-de") == [set(), set()]


def test_the_hash_is_of_the_text():
    a = Corpus("a", "train", [("Hi.", "Hallo!")], "mine", "here")
    b = Corpus("b", "valid", [("Hi.", "Hallo!")], "yours", "there")
    c = Corpus("a", "train", [("Hi.", "Hallo.")], "mine", "here")
    assert a.sha256 == b.sha256 != c.sha256


@given(st.binary(max_size=300))
@EASY
def test_unpack_of_anything_is_text_or_a_sentence(content):
    for start in (b"", b"PK\x03\x04", b"\x1f\x8b\x08", b"\xfd7zXZ\x00"):
        try:
            assert isinstance(unpack(start + content, "file"), str)
        except CorpusUnavailable as error:
            assert str(error).startswith("file ")


# --- a real server that misbehaves ---------------------------------------------------

REAL_OPEN_URL = text.open_url
BIG = archive("".join(f"A{random.Random(i).random()}.\tB{i}.\n" for i in range(9000)))


class Server(ThreadingHTTPServer):
    """Serves `content` on 127.0.0.1; how it misbehaves, its settings say."""

    daemon_threads = True

    def __init__(self, content):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.etag = content, '"v1"'
        self.cut = []  # after how many bytes the next answers break off
        self.ranges = True  # whether it knows Range
        self.shift = 0  # how wrong the range is that it sends
        self.length = True  # whether it says Content-Length
        self.asked = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/deu-eng.zip"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        server, body, start = self.server, self.server.content, 0
        wanted = self.headers.get("Range")
        server.asked.append(wanted)
        same = self.headers.get("If-Range") in (None, server.etag)
        if wanted and server.ranges and same:
            start = int(wanted[6:-1]) + server.shift
            if start >= len(body):
                self.send_error(416)
                return
            self.send_response(206)
            size = f"{start}-{len(body) - 1}/{len(body)}"
            self.send_header("Content-Range", f"bytes {size}")
        else:
            self.send_response(200)
        if server.etag:
            self.send_header("ETag", server.etag)
        if server.length:
            self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        end = start + server.cut.pop(0) if server.cut else len(body)
        self.wfile.write(body[start:end])


@pytest.fixture
def server(monkeypatch):
    server = Server(BIG)
    source = text.Source("deu-eng.zip", server.url, "CC-BY")
    monkeypatch.setitem(SOURCES, "tatoeba-en-de", source)
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(text, "open_url", REAL_OPEN_URL)
    yield server
    server.shutdown()
    server.server_close()


def test_a_broken_download_goes_on_where_it_broke_off(server, tmp_path, capsys):
    server.cut = [70_000, 30_000]
    assert len(everything()) == 9000
    assert server.asked == [None, "bytes=70000-", "bytes=100000-"]
    assert leftovers(tmp_path) == ["deu-eng.zip"]
    assert (tmp_path / "cache" / "deu-eng.zip").read_bytes() == BIG
    assert "deu-eng.zip" in capsys.readouterr().err  # the progress bar


def test_the_next_call_goes_on_too(server, tmp_path):
    server.cut = [70_000, 0]
    with pytest.raises(CorpusUnavailable, match="after 70,000 of .* Try again"):
        load_corpus("tatoeba-en-de")
    assert leftovers(tmp_path) == PARTS
    assert len(everything()) == 9000
    assert server.asked[-1] == "bytes=70000-"
    assert leftovers(tmp_path) == ["deu-eng.zip"]


@pytest.mark.parametrize("how", ["no ranges", "new edition", "wrong range", "416"])
def test_where_the_rest_is_not_to_be_had_all_is_fetched(how, server, tmp_path):
    server.cut = [70_000, 0]
    with pytest.raises(CorpusUnavailable):
        load_corpus("tatoeba-en-de")
    if how == "no ranges":
        server.ranges = False
    elif how == "new edition":
        server.etag, server.content = '"v2"', archive(LONG)
    elif how == "wrong range":
        server.shift = 5
    else:
        server.shift = 10**9
    rows = 900 if how == "new edition" else 9000
    assert len(everything()) == rows
    assert leftovers(tmp_path) == ["deu-eng.zip"]


def test_another_edition_without_validator_is_found_out(server, tmp_path):
    server.etag, server.cut = "", [70_000, 0]
    with pytest.raises(CorpusUnavailable):
        load_corpus("tatoeba-en-de")
    other = bytearray(BIG)
    other[100] ^= 1  # the first part is of a file that was damaged then
    path = tmp_path / "cache" / "deu-eng.zip.part"
    path.write_bytes(bytes(other[: path.stat().st_size]))
    assert len(everything()) == 9000
    assert server.asked[-2:] == ["bytes=70000-", None]


def test_without_a_length_the_checksum_tells(server, tmp_path):
    server.length, server.cut = False, [70_000]
    with pytest.raises(CorpusUnavailable, match="cut short or damaged"):
        load_corpus("tatoeba-en-de")
    assert leftovers(tmp_path) == []


def test_a_server_that_gives_little_each_time_is_given_up(server):
    server.cut = [10] * 500
    with pytest.raises(CorpusUnavailable, match="after 990 of"):
        load_corpus("tatoeba-en-de")
    assert len(server.asked) == 99


@pytest.mark.parametrize("junk", [None, b"", b"\n", b"{}", b"[1]", b"\xff", b"0"])
def test_a_part_file_that_is_none(junk, server, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / PARTS[0]).write_bytes(b"abc")
    if junk is not None:
        (tmp_path / "cache" / PARTS[1]).write_bytes(junk)
    assert len(everything()) == 9000
    assert leftovers(tmp_path) == ["deu-eng.zip"]


def test_a_part_that_is_whole_is_not_asked_for_again(server, tmp_path):
    """As a process leaves it that died between the last byte and the renaming."""
    part = text.Part.find(tmp_path / "cache" / PARTS[0], server.url)
    part.path.parent.mkdir()
    part.start({"url": server.url, "validator": '"v1"', "size": len(BIG)})
    part.add(BIG)
    assert len(everything()) == 9000 and server.asked == []
    assert leftovers(tmp_path) == ["deu-eng.zip"]


def test_two_at_once_fetch_once(server, tmp_path):
    server.cut = [70_000, 30_000]
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(text.fetch, SOURCES["tatoeba-en-de"]) for _ in range(2)]
    assert [len(job.result()[0]) for job in jobs] == [9000, 9000]
    assert len(server.asked) == 3 and leftovers(tmp_path) == ["deu-eng.zip"]


@pytest.mark.skipif(sys.platform == "win32", reason="no such locks")
@pytest.mark.parametrize("removed", [False, True])
def test_one_at_a_time_holds_a_claim(removed, tmp_path):
    """Also where its holder removes the file while another waits for it."""
    path = tmp_path / "a"
    path.write_text("kept")
    with text.claimed(path) as first, text.claimed(path) as second:
        assert first and not second

    def claim():
        with text.claimed(path, wait=True) as mine:
            got.append(mine and path.exists())

    got, other = [], threading.Thread(target=claim)
    with text.claimed(path) as again:
        other.start()
        other.join(0.2)
        assert again and not got and path.read_text() == "kept"
        if removed:
            path.unlink()
    other.join(10)
    assert got == [True]


# --- newstest ------------------------------------------------------------------------


def sgm(lines, tag="srcset", docs=2):
    out = [f'<{tag} setid="newstest" srclang="any">']
    size = -(-len(lines) // docs)
    for d in range(docs):
        out.append(f'<doc sysid="ref" docid="d{d}" genre="news">\n<p>')
        for i, line in enumerate(lines[d * size : (d + 1) * size], 1):
            line = line.replace("&", "&amp;").replace("<", "&lt;")
            out.append(f'<seg id="{i}">{line}</seg>')
        out.append("</p>\n</doc>")
    return "\n".join([*out, f"</{tag}>\n"])


def tgz(files):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as file:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content.encode())
            file.addfile(info, io.BytesIO(content.encode()))
    return out.getvalue()


SIDES = ["AT&T rose.", "1 < 2\u2028yes", "Three."], ["AT&T stieg.", "Ja.", "Drei."]


def newstest(year, other, right=SIDES[1]):
    names = SOURCES[f"newstest{year}-en-{other}"].members
    return tgz({names[0]: sgm(SIDES[0]), names[1]: sgm(right, "refset"), "x": "x"})


def test_newstest_members_are_those_that_sacrebleu_names():
    sets = pytest.importorskip("sacrebleu").DATASETS
    for year, name in ((2013, "wmt13"), (2014, "wmt14/full")):
        for pair in ("en-de", "en-fr"):
            source = SOURCES[f"newstest{year}-{pair}"]
            assert list(source.members) == sets[name].langpairs[pair]
            assert source.url == sets[name].data[0]
            assert sets[name].md5[0] in source.known


@pytest.mark.parametrize("other", ["de", "fr"])
@pytest.mark.parametrize(("year", "split"), [(2013, "valid"), (2014, "test")])
def test_newstest_from_an_archive(year, split, other, monkeypatch):
    content = newstest(year, other)
    asked = serve(monkeypatch, content)
    with pytest.raises(CorpusUnavailable, match="not what was published"):
        load_corpus(f"newstest-en-{other}", split)
    digest = text.hashlib.md5(content).hexdigest()
    source = SOURCES[f"newstest{year}-en-{other}"]
    monkeypatch.setitem(source.known, digest, "as published")
    corpus = load_corpus(f"newstest-en-{other}", split)
    assert corpus.pairs == [
        ("AT&T rose.", "AT&T stieg."), ("1 < 2 yes", "Ja."), ("Three.", "Drei."),
    ]  # fmt: skip
    assert "WMT" in corpus.licence and len(asked) == 2
    assert load_corpus(f"newstest-en-{other}", split).pairs == corpus.pairs
    assert len(asked) == 2  # kept in the cache


def test_newstest_sides_that_do_not_belong_together(monkeypatch):
    serve(monkeypatch, newstest(2014, "de", right=SIDES[1][:2]))
    with pytest.raises(CorpusUnavailable, match="do not belong together"):
        load_corpus("newstest-en-de", "test")


@pytest.mark.parametrize("content", [newstest(2014, "de")[:-80], tgz({"a": "b"})])
def test_newstest_damaged(content, monkeypatch):
    serve(monkeypatch, content)
    with pytest.raises(CorpusUnavailable, match="cut short|holds no file like test-f"):
        load_corpus("newstest-en-de", "test")


def test_newstest_has_no_train_split(places):
    with pytest.raises(ValueError, match="no train split"):
        load_corpus("newstest-en-fr")
    assert not places


# --- a user's files ------------------------------------------------------------------


def write(path, content):
    content = content if isinstance(content, bytes) else content.encode()
    suffix = path.suffix
    if suffix == ".zip":
        content = archive(content, "corpus.tsv")
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(suffix, bytes)
    path.write_bytes(pack(content))
    return path


def read(*files, **settings):
    report = CleaningReport()
    pairs = list(stream_pairs(*files, report=report, **settings))
    assert report.kept == len(pairs)
    assert report.total == report.kept + sum(report.dropped.values())
    return pairs, report


@pytest.mark.parametrize("suffix", [".tsv", ".txt", ".tsv.gz", ".tsv.xz", ".zip"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_one_file_of_each_kind(suffix, end, start, tmp_path):
    content = start + "A b.\tC d." + end + "E\tF" + end
    path = write(tmp_path / f"mine{suffix}", content)
    assert read(path)[0] == [("A b.", "C d."), ("E", "F")]
    assert read(str(path))[0] == [("A b.", "C d."), ("E", "F")]


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zip"])
def test_two_files_of_each_kind(suffix, tmp_path):
    files = [write(tmp_path / f"m.{x}{suffix}", f"{x} 1\n{x} 2") for x in ("en", "de")]
    assert read(*files)[0] == [("en 1", "de 1"), ("en 2", "de 2")]


ODD = ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\r", "\0"]


@pytest.mark.parametrize("odd", ODD, ids=ascii)
def test_only_a_newline_ends_a_line(odd, tmp_path):
    en = write(tmp_path / "a.en", f"one{odd}two\nthree\n")
    de = write(tmp_path / "a.de", "eins zwei\ndrei\n")
    assert read(en, de)[0] == [(f"one{odd}two", "eins zwei"), ("three", "drei")]
    tsv = write(tmp_path / "a.tsv", f"one{odd}two\teins zwei\nthree\tdrei\n")
    assert read(tsv)[0] == [(f"one{odd}two", "eins zwei"), ("three", "drei")]


BAD = {
    "not UTF-8": (b"caf\xe9 here", b"Kaffee hier"),
    "one side empty": (b" \t".strip(), b"Leer."),
    "length ratio": (b"Yes.", b"Ja, " * 30),
    "too long": (b"word " * 300, b"Wort " * 300),
}


@pytest.mark.parametrize("reason", BAD)
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("form", ["two", "tabs"])
def test_bad_lines_are_counted_and_shift_nothing(reason, flip, form, tmp_path):
    rows = [(b"a%d" % i, b"b%d" % i) for i in range(1, 21)]
    for line in (3, 7, 20):
        rows[line - 1] = BAD[reason][::-1] if flip else BAD[reason]
    if form == "two":
        files = [
            write(tmp_path / name, b"\n".join(row[side] for row in rows) + b"\n")
            for side, name in enumerate(("x.en", "x.de"))
        ]
    else:
        files = [write(tmp_path / "x.tsv", b"\n".join(map(b"\t".join, rows)))]
    pairs, report = read(*files)
    good = [i for i in range(1, 21) if i not in (3, 7, 20)]
    assert pairs == [(f"a{i}", f"b{i}") for i in good]
    assert report.dropped == {reason: 3} and report.lines == {reason: [3, 7, 20]}
    assert "kept 17 of 20" in str(report) and "line 3, 7, 20" in str(report)
    with pytest.raises(ValueError, match=f"line 3: {reason}"):
        read(*files, bad="refuse")
    with pytest.warns(UserWarning, match=f"(?s)kept 17 of 20.*{reason}"):
        list(stream_pairs(*files))


def test_a_line_without_end_costs_no_memory(tmp_path):
    path = tmp_path / "x.tsv.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b"a\tb\n")
        for _ in range(64):
            file.write(b"x" * 2**20)
        file.write(b"\nc\td\n")
    tracemalloc.start()
    pairs, report = read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert pairs == [("a", "b"), ("c", "d")] and report.lines == {"too long": [2]}
    assert peak < 8 * 2**20


@pytest.mark.parametrize("n", [text.MAX_LINE - 2, text.MAX_LINE - 1, text.MAX_LINE])
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
def test_lines_as_long_as_the_limit(n, start, tmp_path):
    path = write(tmp_path / "x.en", start + b"x" * (n - len(start)) + b"\nb")
    long, last = list(text.read_lines(path))
    assert last == b"b"
    assert long == (None if n == text.MAX_LINE else b"x" * (n - len(start)))


def test_memory_does_not_grow_with_the_file(tmp_path):
    peaks = []
    for copies in (1, 10):
        path = write(tmp_path / "x.tsv", "A sentence.\tEin Satz.\n" * 3000 * copies)
        tracemalloc.start()
        assert sum(1 for _ in stream_corpus(path)) == 3000 * copies
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0] + 50_000


def test_different_numbers_of_lines(tmp_path):
    en = write(tmp_path / "x.en", "a\nb\nc\n")
    de = write(tmp_path / "x.de", "A\nB\n")
    for files in ((en, de), (de, en)):
        with pytest.raises(ValueError) as error:
            stream_pairs(*files)
        for part in ("x.en has 3", "x.de has 2", "nothing was read"):
            assert part in str(error.value).replace(" lines", "").replace("and ", "")
    pairs, report = read(en, de, uneven="drop")
    assert pairs == [("a", "A"), ("b", "B")]
    assert report.lines == {"line without a partner": [3]}


def test_what_can_be_read_once_only_is_refused(tmp_path):
    """A pipe, as a shell makes for <(...): text is read more than once."""
    os.mkfifo(tmp_path / "x.en")
    target = write(tmp_path / "x.de", "A\n")
    with pytest.raises(CorpusUnavailable, match="x.en is a pipe or a device"):
        stream_pairs(tmp_path / "x.en", target)
    with pytest.raises(CorpusUnavailable, match="null is a pipe or a device"):
        stream_pairs(target, "/dev/null")


def test_columns(tmp_path):
    rows = "o1\ta\tA\no2\tb\tB\nbroken\no3\tc\tC\textra\no4\td\tD\n"
    path = write(tmp_path / "x.tsv", rows)
    pairs, report = read(path, columns=(1, 2))
    assert pairs == [("a", "A"), ("b", "B"), ("d", "D")]
    assert report.lines == {"columns": [3, 4]}
    assert read(path, columns=(2, 1))[0][0] == ("A", "a")
    with pytest.raises(ValueError, match="no line of 9 columns"):
        stream_pairs(path, columns=(8, 1))
    with pytest.raises(ValueError, match="no line with a tab"):
        stream_pairs(write(tmp_path / "y.txt", "no tab\nat all\n"))


def broken(tmp_path, what):
    content = "".join(f"{random.Random(i).random()}\t{i}\n" for i in range(9000))
    path = tmp_path / {"zip member": "x.zip/no.tsv", "page": "x.tsv"}.get(what, what)
    packed = {
        "half.gz": lambda: gzip.compress(content.encode())[:-3000],
        "half.xz": lambda: lzma.compress(content.encode())[:-3000],
        "half.zip": lambda: archive(content)[:-3000],
        "plain.gz": lambda: content.encode(),
        "empty.gz": lambda: b"",
        "x.tgz": lambda: tgz({"a": content}),
        "x.bz2": lambda: b"BZh91AY",
        "utf16.tsv": lambda: content.encode("utf-16"),
        "page": lambda: b"<!DOCTYPE html><html>",
        "two.zip": lambda: zipped({"a.tsv": "a\tb", "b.tsv": "c\td"}),
        "none.zip": lambda: zipped({}),
        "zip member": lambda: zipped({"a.tsv": "a\tb"}),
    }
    if what == "folder":
        path.mkdir()
    elif what in packed:
        place = path.parent if what == "zip member" else path
        place.write_bytes(packed[what]())
    return path


def zipped(files):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for name, content in files.items():
            file.writestr(name, content)
    return out.getvalue()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("half.gz", "cut short or damaged, after line"),
        ("half.xz", "cut short or damaged, after line"),
        ("half.zip", "cannot be read"),
        ("plain.gz", "is not a .gz file"),
        ("empty.gz", "is not a .gz file"),
        ("x.tgz", "tar archive"),
        ("x.bz2", "is bzip2"),
        ("utf16.tsv", "is UTF-16"),
        ("page", "web page"),
        ("two.zip", "2 files of text. Say which .* a.tsv, b.tsv"),
        ("none.zip", "0 files of text"),
        ("zip member", "no file 'no.tsv'"),
        ("missing.tsv", "No such file"),
        ("folder", "directory"),
    ],
)
def test_files_that_cannot_be_read(what, said, tmp_path):
    path = broken(tmp_path, what)
    for files in ((path,), (path, path)):
        with pytest.raises(CorpusUnavailable, match=said):
            list(stream_pairs(*files))


def test_a_member_of_a_zip_with_several(tmp_path):
    path = tmp_path / "opus.zip"
    path.write_bytes(zipped({"README": "x", "d/c.en": "a\nb", "d/c.de": "A\nB"}))
    files = [path / "d/c.en", f"{path}/d/c.de"]
    assert read(*files)[0] == [("a", "A"), ("b", "B")]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"bad": "ignore"}, "bad='ignore'"),
        ({"uneven": "cut"}, "uneven='cut'"),
        ({"max_ratio": 0.5}, "max_ratio=0.5"),
        ({"max_words": 0}, "max_words=0"),
        ({"max_ratio": float("nan")}, "max_ratio=nan"),
        ({"columns": (1,)}, "columns="),
        ({"columns": 1}, "columns="),
        ({"max_ratio": "3"}, "max_ratio='3'"),
        ({"columns": (0, -1)}, "columns="),
    ],
)
def test_wrong_settings(settings, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        stream_pairs(write(tmp_path / "x.tsv", "a\tb"), **settings)


LINE = st.one_of(
    st.binary(max_size=20).map(lambda b: b.replace(b"\n", b"")),
    st.text(max_size=12)
    .map(lambda t: t.encode("utf-8", "replace"))
    .map(lambda b: b.replace(b"\n", b"")),
    st.sampled_from([b"", b"\t", b"a\tb", b"\xef\xbb\xbf", b"a\xe2\x80\xa8b\tc"]),
)


@given(st.lists(st.tuples(LINE, LINE), min_size=1, max_size=12), st.booleans())
@settings(max_examples=60)
def test_any_two_files_give_pairs_of_the_same_line(tmp_path_factory, rows, packed):
    folder = tmp_path_factory.mktemp("fuzz")
    files = []
    for side in (0, 1):
        content = b"".join(row[side] + b"\n" for row in rows)
        files.append(folder / f"x.{side}")
        files[-1].write_bytes(gzip.compress(content) if packed else content)
    try:
        pairs, report = read(*files, max_ratio=1e9)
    except CorpusUnavailable as error:
        assert re.search("web page|UTF-16|cut short|only UTF-8|read", str(error))
        return
    assert report.total == len(rows)
    kept = iter(pairs)
    dropped = 0
    for n, row in enumerate(rows):
        try:
            bare = [side.removesuffix(b"\r") for side in row]
            if n == 0:
                bare = [
                    s.removeprefix(b"\xef\xbb\xbf").removesuffix(b"\r") for s in row
                ]
            wanted = tuple(side.decode() for side in bare)
        except UnicodeDecodeError:
            dropped += 1
            continue
        if wanted[0].strip() and wanted[1].strip():
            assert next(kept) == wanted
        else:
            dropped += 1
    assert dropped == report.total - report.kept


@given(st.binary(max_size=200), st.sampled_from(["", ".gz", ".xz", ".zip", ".tsv"]))
@settings(max_examples=60)
def test_any_file_is_read_or_refused_with_a_sentence(tmp_path_factory, content, end):
    path = tmp_path_factory.mktemp("fuzz") / f"x{end}"
    for start in (b"", b"a\tb\n", b"PK\x03\x04", b"\x1f\x8b\x08", b"\xfd7zXZ\x00"):
        path.write_bytes(start + content)
        for files in ((path,), (path, path)):
            try:
                read(*files)
            except (ValueError, CorpusUnavailable) as error:
                assert "x" in str(error)


# --- load_corpus on a user's files ---------------------------------------------------


def test_load_corpus_from_a_path_holds_out_by_hash(tmp_path):
    lines = "".join(f"Sentence {i}.\tSatz {i}.\n" for i in range(3000)) + "bad\n"
    path = write(tmp_path / "my.own.tsv.gz", lines)
    train, valid = load_corpus(path), load_corpus(str(path), "valid")
    assert train.name == "my" and len(train) + len(valid) == 3000
    assert {held_out(a) for a, _ in train} == {False}
    assert {held_out(a) for a, _ in valid} == {True}
    assert train.report.lines == {"columns": [3001]}
    assert train.origin == "my.own.tsv.gz; dropped 1 columns"
    with pytest.warns(UserWarning, match="columns"):
        assert list(stream_corpus(path)) == train.pairs
    assert list(stream_corpus(path, "valid", CleaningReport())) == valid.pairs
    with pytest.raises(ValueError, match="names no files for 'test'"):
        load_corpus(path, "test")


def test_load_corpus_from_a_table(tmp_path):
    en = write(tmp_path / "a.en", "a\n\nYes.\n")
    de = write(tmp_path / "a.de", "A\nB\n" + "Ja, " * 30 + "\n")
    both = write(tmp_path / "t.tsv", "Yes.\t" + "Ja, " * 30 + "\n")
    table = {"train": [str(en), de], "valid": str(both), "test": both}
    table |= {"licence": "CC0", "name": "mine", "bad": "drop", "max_words": 99}
    corpus = load_corpus(table)
    assert corpus.pairs == [("a", "A")] and corpus.licence == "CC0"
    assert corpus.report.dropped == {"one side empty": 1, "length ratio": 1}
    # nothing is dropped for its length from what is validated or tested on
    assert len(load_corpus(table, "valid")) == len(load_corpus(table, "test")) == 1
    with pytest.raises(ValueError, match="a.en and a.de, line 2: one side empty"):
        load_corpus(table | {"bad": "refuse"})


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"training": "a.tsv"}, "must name the files"),
        ({"train": "a.tsv", "tset": "b.tsv"}, r"\['tset'\] is unknown"),
        ({"train": ["a", "b", "c"]}, "one or two files"),
        ({"train": 7}, "one or two files"),
        ({"train": None}, "one or two files"),
        ({"train": "a.tsv", "share": 2}, "share=2"),
        (7, "must name the files"),
        (None, "must name the files"),
    ],
)
def test_specs_that_are_none(spec, said):
    for load in (load_corpus, stream_corpus):
        with pytest.raises(ValueError, match=said):
            load(spec)


def test_no_pair_left(tmp_path):
    path = write(tmp_path / "x.tsv", "a\t\n\tb\n")
    with pytest.raises(ValueError, match="(?s)no pair is left.*one side empty"):
        load_corpus(path)


@pytest.mark.parametrize("split", ["train", "valid"])
def test_stream_corpus_is_load_corpus(split, monkeypatch):
    if split == "valid":
        assert list(stream_corpus("grammar-en-de", split)) == grammar_split(split)
    serve(monkeypatch, BIG)
    assert list(stream_corpus("tatoeba-en-de", split)) == (
        load_corpus("tatoeba-en-de", split).pairs
    )


@pytest.mark.skipif(not os.environ.get("TRANSFORMER_LIB_MIRROR"), reason="no mirror")
def test_newstest_sizes(monkeypatch):
    monkeypatch.setenv("TRANSFORMER_LIB_MIRROR", MIRROR)
    for other in ("de", "fr"):
        assert len(load_corpus(f"newstest-en-{other}", "valid")) == 3000
        assert len(load_corpus(f"newstest-en-{other}", "test")) == 3003


# --- byte pair encoding --------------------------------------------------------------


def sentencepiece_bpe(sentences, num_merges):
    letters = {letter for word in text.count_words(sentences) for letter in word}
    out = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=out,
        model_type="bpe",
        vocab_size=3 + num_merges + len(letters),
        character_coverage=1.0,
        normalization_rule_name="identity",
        split_by_unicode_script=False,
        split_by_number=False,
        max_sentencepiece_length=64,
        minloglevel=2,
    )
    return spm.SentencePieceProcessor(model_proto=out.getvalue())


@pytest.mark.parametrize("language", [0, 1])
def test_bpe_learns_and_cuts_as_sentencepiece(language):
    sentences = [pair[language] for pair in grammar_split("train", 2000)]
    merges = train_bpe(sentences, 300)
    model = sentencepiece_bpe(sentences, 300)
    pieces = [model.id_to_piece(i) for i in range(3, 303)]
    assert ["".join(pair) for pair in merges] == pieces
    for sentence in (pair[language] for pair in grammar_split("test", 200)):
        assert apply_bpe(sentence, merges) == model.encode(sentence, out_type=str)


THRICE = re.compile(r"(\S+)\1\1")  # SentencePiece counts "aa" twice in "aaa"


@given(st.integers(0, 10**9))
@EASY
def test_bpe_learns_and_cuts_as_sentencepiece_on_anything(seed):
    rng = random.Random(seed)

    def sentence():
        sizes = [rng.randint(1, 7) for _ in range(rng.randint(1, 9))]
        return " ".join("".join(rng.choice("abcdé") for _ in range(n)) for n in sizes)

    sentences = [sentence() for _ in range(rng.randint(1, 30))]
    sentences = [s for s in sentences if not THRICE.search(s)] or ["ab"]
    merges = train_bpe(sentences, 15)
    model = sentencepiece_bpe(sentences, len(merges))
    pieces = [model.id_to_piece(i) for i in range(3, 3 + len(merges))]
    assert ["".join(pair) for pair in merges] == pieces
    letters = set("".join(sentences)) | {" "}
    for other in (s for s in (sentence() for _ in range(9)) if set(s) <= letters):
        assert apply_bpe(other, merges) == model.encode(other, out_type=str)


@pytest.mark.skipif(not MIRROR, reason="no mirror")
def test_bpe_learns_and_cuts_as_sentencepiece_on_real_text(monkeypatch):
    monkeypatch.setenv("TRANSFORMER_LIB_MIRROR", MIRROR)
    pairs = load_corpus("tatoeba-en-de").pairs[::150]
    sentences = [re.sub("[\u00a0\u202f]", " ", s) for pair in pairs for s in pair]
    sentences = [s for s in sentences if not THRICE.search(s)]
    merges = train_bpe(sentences, 500)
    model = sentencepiece_bpe(sentences, 500)
    pieces = [model.id_to_piece(i) for i in range(3, 503)]
    assert ["".join(pair) for pair in merges] == pieces
    letters = set("".join(sentences))
    unseen = [s for pair in load_corpus("tatoeba-en-de", "test").pairs for s in pair]
    for sentence in (s for s in unseen[:600] if set(s) <= letters):
        assert apply_bpe(sentence, merges) == model.encode(sentence, out_type=str)


def recount(sentences, num_merges):
    """BPE as in the paper's listing: everything counted anew for each merge."""
    words = {tuple(w): n for w, n in text.count_words(sentences).items()}
    merges = []
    for _ in range(num_merges):
        counts = {}
        for symbols, n in words.items():
            for pair, times in text.pairs_in(symbols).items():
                counts[pair] = counts.get(pair, 0) + n * times
        if not counts:
            break
        keys = {p: (-n, len("".join(p)), "".join(p), p) for p, n in counts.items()}
        merges.append(min(keys, key=keys.get))
        words = {tuple(text.merge_pair(w, merges[-1])): n for w, n in words.items()}
    return merges


WORDS = st.lists(st.text("aab ", max_size=12), min_size=1, max_size=6)


@given(WORDS)
@EASY
def test_fast_bpe_equals_recounting(sentences):
    assert train_bpe(sentences, 12) == recount(sentences, 12)


@given(WORDS, st.text("abc ", max_size=15))
@EASY
def test_pieces_join_to_the_sentence(sentences, sentence):
    pieces = apply_bpe(sentence, train_bpe(sentences, 9))
    assert "".join(pieces).replace("▁", " ").split() == sentence.split()


def test_overlapping_pairs_count_once():
    assert text.pairs_in("aaa") == {("a", "a"): 1}
    assert text.pairs_in("aaaa") == {("a", "a"): 2}
    assert text.pairs_in("aaab") == {("a", "a"): 1, ("a", "b"): 1}


@pytest.mark.parametrize("bad", [("one string", 3), (["a"], -1)])
def test_train_bpe_refuses(bad):
    with pytest.raises(ValueError):
        train_bpe(*bad)


# --- the tokenizer -------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    pairs = grammar_split("train", 3000)
    return Tokenizer.train((side for pair in pairs for side in pair), 500)


def test_special_ids(tokenizer):
    model = tokenizer.processor
    assert [model.pad_id(), model.unk_id(), model.bos_id()] == [0, 1, 2]
    assert model.eos_id() == 3
    assert (PAD, UNK, BOS, EOS) == (0, 1, 2, 3)
    assert [model.id_to_piece(i) for i in (4, 259)] == ["<0x00>", "<0xFF>"]
    assert tokenizer.vocab_size == 500


def test_special_ids_vanish_in_decoding(tokenizer):
    ids = tokenizer.encode("Das Haus ist alt.")
    assert tokenizer.decode([BOS, *ids, EOS, PAD, PAD]) == "Das Haus ist alt."


LETTERS = st.characters(codec="utf-8", categories=["L", "N", "P", "S"])


@given(st.text(LETTERS, max_size=30))
@EASY
def test_no_text_is_lost_but_by_normalization(tokenizer, sentence):
    ids = tokenizer.encode(sentence)
    assert not {PAD, UNK, BOS, EOS} & set(ids)
    normal = spm.SentencePieceNormalizer(rule_name="nmt_nfkc").normalize(sentence)
    assert tokenizer.decode(ids) == " ".join(normal.replace("▁", " ").split())


@pytest.mark.parametrize("sentence", ["📖👍🏽", "Ωμέγα", "東京へ", "</s><pad> <0x41>"])
def test_round_trip(tokenizer, sentence):
    assert tokenizer.decode(tokenizer.encode(sentence)) == sentence


def test_encode_all_is_encode(tokenizer):
    sentences = [pair[1] for pair in grammar_split("test", 50)] + ["", "📖"]
    assert tokenizer.encode_all(sentences) == [tokenizer.encode(s) for s in sentences]


@given(st.text(max_size=40), st.sampled_from([0.0, 0.1, 1.0]))
@settings(max_examples=80)
def test_any_text_is_cut_and_comes_back(tokenizer, sentence, sample):
    ids = tokenizer.encode(sentence, sample=sample)
    assert not {PAD, UNK, BOS, EOS} & set(ids)
    once = tokenizer.decode(tokenizer.encode(sentence))
    assert tokenizer.decode(ids) == once
    assert tokenizer.decode(tokenizer.encode(once)) == once


@pytest.mark.parametrize("odd", ["a\ud800b", "\udcff", "a\0b", "", " ", "a" * 10**5])
def test_odd_text_is_cut(tokenizer, odd):
    ids = tokenizer.encode_all([odd, "Das Haus."])
    assert ids[1] == tokenizer.encode("Das Haus.")
    tokenizer.decode(ids[0])


@given(st.lists(st.integers(0, 499), max_size=20))
@EASY
def test_any_ids_are_decoded(tokenizer, ids):
    assert isinstance(tokenizer.decode(ids), str)


def test_threads_change_nothing(tokenizer):
    sentences = [pair[0] for pair in grammar_split("test", 200)]
    once = tokenizer.encode_all(sentences)
    assert tokenizer.encode_all(sentences, threads=2) == once


def test_sampled_cuts_vary_and_a_seed_repeats_them(tokenizer):
    def draw():
        return [tokenizer.encode("Der alte Mann.", sample=0.3) for _ in range(20)]

    spm.set_random_generator_seed(5)
    first, second = draw(), draw()
    assert len(set(map(tuple, first))) > 5 and first != second
    spm.set_random_generator_seed(5)
    assert draw() == first
    assert {tokenizer.decode(ids) for ids in first} == {"Der alte Mann."}


def test_encode_refuses(tokenizer):
    with pytest.raises(ValueError, match="one string"):
        tokenizer.encode_all("abc")
    with pytest.raises(ValueError, match="sample=2"):
        tokenizer.encode("abc", sample=2)


def test_damaged_or_foreign_models_are_refused(tokenizer):
    foreign = sentencepiece_bpe(["a b c"], 0).serialized_model_proto()
    half = tokenizer.model[: len(tokenizer.model) // 2]
    for model in (b"", b"garbage", half, foreign):
        with pytest.raises(ValueError, match="no SentencePiece model of this library"):
            Tokenizer(model)


def test_training_on_odd_text():
    odd = [
        "a\0b",
        "\u2028",
        "<s> </s> <pad>",
        "",
        "▁",
        "\ufeffx",
        "x" * 9000,
        "📖\t\x85",
    ]
    pairs = grammar_split("train", 300)
    one = Tokenizer.train(odd + [s for pair in pairs for s in pair], 400)
    assert one.decode(one.encode("Das Haus 📖")) == "Das Haus 📖"


def test_save_and_load(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "t.model")
    again = Tokenizer.load(tmp_path / "t.model")
    assert again.encode("Der Hund.") == tokenizer.encode("Der Hund.")
    assert leftovers(tmp_path) == ["t.model"]


@pytest.mark.parametrize("ids", [[500], [-1, 5], [5, 10**9]])
def test_decode_refuses_ids_out_of_range(tokenizer, ids):
    with pytest.raises(ValueError, match="the vocabulary has 0 to 499"):
        tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("sentences", "size", "kind", "said"),
    [
        (["a b"], 500, "word", "kind='word'"),
        ("one string", 500, "bpe", "one string"),
        (["a b"] * 20, 5000, "bpe", r"vocab_size=5000: .* no more than \d+ pieces"),
        (["a b"] * 20, 100, "bpe", r"vocab_size=100: the characters .* need \d+"),
        ([], 300, "bpe", "no line has a word in it"),
        (["", " "], 300, "unigram", "no line has a word in it"),
    ],
)
def test_train_refuses(sentences, size, kind, said):
    with pytest.raises(ValueError, match=said):
        Tokenizer.train(sentences, size, kind)


def test_unigram_too():
    sentences = [pair[1] for pair in grammar_split("train", 1000)]
    model = Tokenizer.train(sentences, 400, "unigram")
    assert model.decode(model.encode("Ein Hund 📖")) == "Ein Hund 📖"


# --- the exercises' checks name the mistakes -----------------------------------------


def counts(words, times=True, overlap=True):
    out = {}
    for symbols, n in words.items():
        for pair in zip(symbols, symbols[1:], strict=False):
            out[pair] = out.get(pair, 0) + (n if times else 1)
    return out


def counts_across(words):
    row = [s for symbols, n in words.items() for _ in range(n) for s in symbols]
    return counts({tuple(row): 1})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda words: counts(words), "overlapping"),
        (lambda words: counts(words, times=False), "each word once"),
        (counts_across, "across a word boundary"),
        (lambda words: {"".join(p): n for p, n in counts(words).items()}, "tuples"),
        (lambda words: 7, "dict"),
    ],
)
def test_check_count_pairs_names(wrong, said):
    verdict = check_count_pairs(wrong)
    assert not verdict.passed and said in verdict.message


def cut_with(word, merges, most=99):
    pieces = list(word)
    for pair in merges:
        i, left = 0, most
        while i < len(pieces) - 1:
            if (pieces[i], pieces[i + 1]) == pair and left:
                pieces[i : i + 2] = ["".join(pair)]
                left -= 1
            i += 1
    return pieces


def cut_leftmost(word, merges):
    pieces, i = list(word), 0
    while i < len(pieces) - 1:
        if (pieces[i], pieces[i + 1]) in set(merges):
            pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
            i = -1
        i += 1
    return pieces


def cut_longest(word, merges):
    known, pieces = {"".join(pair) for pair in merges}, []
    while word:
        n = max(n for n in range(1, len(word) + 1) if n == 1 or word[:n] in known)
        pieces.append(word[:n])
        word = word[n:]
    return pieces


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (cut_leftmost, "order of the merges is ignored"),
        (cut_longest, "longest"),
        (lambda word, merges: cut_with(word, merges[::-1]), "backwards"),
        (lambda word, merges: cut_with(word, merges, most=1), "only the first place"),
        (lambda word, merges: list(word), "cut wrongly"),
    ],
)
def test_check_cut_names(wrong, said):
    verdict = check_cut(wrong)
    assert not verdict.passed and said in verdict.message


def speller(write):
    return lambda text, known: [
        p for c in text for p in ([c] if c in known else write(c))
    ]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (speller(lambda c: [f"<0x{ord(c):02X}>"]), "code point"),
        (speller(lambda c: [f"<0x{b:02x}>" for b in c.encode()]), "capitals"),
        (speller(lambda c: [f"<0x{b}>" for b in c.encode()]), "decimal"),
        (speller(lambda c: []), "are gone"),
        (speller(lambda c: [f"<0x{b:X}>" for b in c.encode()]), "leading zero"),
        (lambda text, known: [f"<0x{b:02X}>" for b in text.encode()], "all characters"),
    ],
)
def test_check_spell_names(wrong, said):
    verdict = check_spell(wrong)
    assert not verdict.passed and said in verdict.message


def share(train, test, entries=False):
    known = {word for sentence in train for word in sentence.split()}
    words = [word for sentence in test for word in sentence.split()]
    words = set(words) if entries else words
    return sum(word not in known for word in words) / len(words)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda train, test: share(train + test, test), "test set in it"),
        (lambda train, test: share(train, test, entries=True), "running words"),
        (lambda train, test: 1 - share(train, test), "is known"),
        (lambda train, test: share(test, train), "wrong way round"),
        (lambda train, test: 100 * share(train, test), "percent"),
    ],
)
def test_check_unknown_share_names(wrong, said):
    verdict = check_unknown_share(wrong)
    assert not verdict.passed and said in verdict.message
