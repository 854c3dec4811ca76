"""Chapter 08: text from anywhere, checked, and one's own files."""

import gzip
import hashlib
import io
import lzma
import os
import random
import re
import tarfile
import tracemalloc
import warnings
import zipfile
from dataclasses import replace

import pytest
from fetched import (
    BIG,
    FLIPPED,
    HALF,
    PAIRS,
    PARTS,
    THREE,
    TWO,
    archive,
    everything,
    leftovers,
    places,  # noqa: F401
    serve,
    write,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_lib.corpora import (
    SOURCES,
    CleaningReport,
    Corpus,
    CorpusUnavailable,
    grammar_split,
    held_out,
    load_corpus,
    stream_corpus,
    stream_pairs,
    text_files,
)
from transformer_lib.corpora import known as corpora
from transformer_lib.exercises.corpora import check_lines_of, check_split_pairs

EASY = settings(max_examples=25)


# --- finding files -------------------------------------------------------------------


@pytest.mark.parametrize("content", [TWO, THREE], ids=["two columns", "three"])
def test_mirror_searched_in_depth(
    content,
    tmp_path,
    monkeypatch,
    places,  # noqa: F811
):
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


def test_another_version_is_told(tmp_path, monkeypatch):
    """Not where it holds the same pairs in another form or order."""
    serve(monkeypatch, archive())
    with pytest.warns(UserWarning, match="deu-eng.zip is another version.*2018-05-13"):
        load_corpus("tatoeba-en-de")
    source, pairs = SOURCES["tatoeba-en-de"], load_corpus("tatoeba-en-de").pairs
    pairs += load_corpus("tatoeba-en-de", "valid").pairs
    known = {corpora.hash_pairs(sorted(pairs)): "of these pairs"}
    source = replace(source, known=known)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, said = corpora.fetch(source)
    assert found != sorted(pairs) and said.endswith("deu-eng.zip of these pairs")


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
            corpora.fetch(source)
        assert place != "address" or leftovers(tmp_path) == []
        return
    said = f"{source.filename} is another version.*counts and scores will differ"
    with pytest.warns(UserWarning, match=re.escape(source.filename)) as told:
        pairs, origin = corpora.fetch(source)
    assert re.search(said, str(told[0].message)) and "not a copy known here" in origin
    same = replace(source, known={hashlib.sha256(content).hexdigest(): "as we know it"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert corpora.fetch(same)[0] == pairs


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


def test_what_training_leaves_out_of_tatoeba_is_counted(tmp_path, monkeypatch):
    numbers = range(300)
    out = [f"Number {i}." for i in numbers if held_out(f"Number {i}.")]
    rest = [f"Number {i}." for i in numbers if not held_out(f"Number {i}.")]
    lines = [f"{english}\tZahl.\n" for english in (*out, *rest[:7])]
    lines += [f"{english}\tDie {english}\n" for english in rest[7:]]
    (tmp_path / "deu-eng.zip").write_bytes(archive("".join(lines)))
    monkeypatch.setenv("TRANSFORMER_LIB_MIRROR", str(tmp_path))
    train, valid = (load_corpus("tatoeba-en-de", s) for s in ("train", "valid"))
    assert [english for english, _ in train.pairs] == rest[7:]
    assert [english for english, _ in valid.pairs] == out != []
    assert "; 7 left out of train" in train.origin and "left out" not in valid.origin


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


def test_a_line_separator_inside_a_sentence_shifts_nothing(monkeypatch):
    serve(monkeypatch, archive("A\u2028b.\tC\x0bd.\nHi.\tHallo!\n"))
    with pytest.warns(UserWarning, match="another version"):
        pairs, _ = corpora.fetch(SOURCES["tatoeba-en-de"])
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
    digest = corpora.hashlib.md5(content).hexdigest()
    source = SOURCES[f"newstest{year}-en-{other}"]
    monkeypatch.setitem(source.known, digest, "as published")
    corpus = load_corpus(f"newstest-en-{other}", split)
    assert corpus.pairs == [
        ("AT&T rose.", "AT&T stieg."),
        ("1 < 2 yes", "Ja."),
        ("Three.", "Drei."),
    ]
    assert "WMT" in corpus.licence and len(asked) == 2
    assert load_corpus(f"newstest-en-{other}", split).pairs == corpus.pairs
    assert len(asked) == 2  # kept in the cache


def test_newstest_sides_that_do_not_belong_together(monkeypatch):
    serve(monkeypatch, newstest(2014, "de", right=SIDES[1][:2]))
    with pytest.raises(CorpusUnavailable, match="do not belong together"):
        load_corpus("newstest-en-de", "test")


@pytest.mark.parametrize(
    "content",
    [newstest(2014, "de")[:-80], tgz({"a": "b"})],
    ids=["cut short", "of other files"],  # an archive holds the time of day
)
def test_newstest_damaged(content, monkeypatch):
    serve(monkeypatch, content)
    with pytest.raises(CorpusUnavailable, match="cut short|holds no file like test-f"):
        load_corpus("newstest-en-de", "test")


def test_newstest_has_no_train_split(places):  # noqa: F811
    with pytest.raises(ValueError, match="no train split"):
        load_corpus("newstest-en-fr")
    assert not places


# --- a user's files ------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "n", [text_files.MAX_LINE - 2, text_files.MAX_LINE - 1, text_files.MAX_LINE]
)
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
def test_lines_as_long_as_the_limit(n, start, tmp_path):
    path = write(tmp_path / "x.en", start + b"x" * (n - len(start)) + b"\nb")
    long, last = list(text_files.text_lines(path))
    assert last == b"b"
    assert long == (None if n == text_files.MAX_LINE else b"x" * (n - len(start)))


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
    pairs, report = read(path, columns=(2, 3), bad="drop")
    assert pairs == [("a", "A"), ("b", "B"), ("d", "D")]
    assert report.lines == {"columns": [3, 4]}
    assert read(path, columns=(3, 2), bad="drop")[0][0] == ("A", "a")
    assert read(path, bad="drop")[0] == pairs  # ids are no text
    with pytest.raises(ValueError, match="no line of 9 columns"):
        stream_pairs(path, columns=(9, 2))
    with pytest.raises(ValueError, match="no line with a tab"):
        stream_pairs(write(tmp_path / "y.txt", "no tab\nat all\n"))


def broken(tmp_path, what):
    content = "".join(f"No {random.Random(i).random()}\tN {i}\n" for i in range(9000))
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
        ("x.bz2", "is not a .bz2 file"),
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
        ({"columns": (0, 1)}, "columns="),
        ({"columns": (2, 2)}, "columns="),
        ({"columns": ("", "de")}, "columns="),
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
        pairs, report = read(*files, max_ratio=1e9, bad="drop")
    except CorpusUnavailable as error:
        said = "web page|UTF-16|cut short|not UTF-8 text|not text|read|twice"
        assert re.search(said, str(error))
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


def test_pairs_that_share_a_target_with_a_held_out_one_are_counted(tmp_path):
    """Distinct sources, few targets: all that is not in a split is in the report."""
    lines = "".join(f"Sentence {i}.\tSatz {i % 60}.\n" for i in range(3000))
    path = write(tmp_path / "few.tsv", lines)
    train, valid = load_corpus(path), load_corpus(path, "valid")
    assert not {b for _, b in train} & {b for _, b in valid}
    assert train.report.kept == 3000 == len(train) + len(valid) + train.report.shared
    assert train.report.shared > 1000
    said = f"{train.report.shared:,} left out of train: target held out to validate on"
    assert str(train.report).endswith(f"kept 3,000 of 3,000 lines\nof these, {said}")
    assert train.origin == f"few.tsv; {said}"
    assert (
        valid.report.shared == 0
        and load_corpus({"train": path, "share": 0}).report.shared == 0
    )


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
        load_corpus({"train": path, "bad": "drop"})
    with pytest.raises(ValueError, match="(?s)2 of 2 lines cannot.*one side empty"):
        load_corpus(path)


@pytest.mark.parametrize("split", ["train", "valid"])
def test_stream_corpus_is_load_corpus(split, monkeypatch):
    if split == "valid":
        assert list(stream_corpus("grammar-en-de", split)) == grammar_split(split)
    serve(monkeypatch, BIG)
    assert list(stream_corpus("tatoeba-en-de", split)) == (
        load_corpus("tatoeba-en-de", split).pairs
    )


@pytest.mark.corpora
def test_newstest_sizes():
    for other in ("de", "fr"):
        assert len(load_corpus(f"newstest-en-{other}", "valid")) == 3000
        assert len(load_corpus(f"newstest-en-{other}", "test")) == 3003


# --- the exercises' checks name the mistakes -----------------------------------------

BOM = b"\xef\xbb\xbf"


def rows_of(content, end=b"\r"):
    rows = content.removeprefix(BOM).split(b"\n")
    rows = rows[:-1] if rows[-1] == b"" else rows
    return [row.removesuffix(end).decode() for row in rows]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda c: c.removeprefix(BOM).decode().splitlines(), "splitlines"),
        (lambda c: rows_of(c, b""), "before a"),
        (lambda c: [row for row in rows_of(c) if row], "Empty lines are gone"),
        (lambda c: [row.strip() for row in rows_of(c)], "strip blanks"),
        (lambda c: [row.encode() for row in rows_of(c)], "bytes"),
        (lambda c: rows_of(c) + [""] * c.endswith(b"\n"), "empty line after"),
        (lambda c: rows_of(b"\n" + c)[1:], "byte order mark"),
        (lambda c: 7, "cut wrongly"),
    ],
)
def test_check_lines_of_names(wrong, said):
    verdict = check_lines_of(wrong)
    assert not verdict.passed and said in verdict.message


def halves(pairs, held_back):
    test = [pair for pair in pairs if held_back(pair[0])]
    rest = [pair for pair in pairs if not held_back(pair[0])]
    return rest, test, {target for _, target in test}


def shared_into_test(pairs, held_back):
    rest, _test, targets = halves(pairs, held_back)
    train = [pair for pair in rest if pair[1] not in targets]
    return train, [pair for pair in pairs if pair not in train]


def dropped_from_test(pairs, held_back):
    rest, test, targets = halves(pairs, held_back)
    train = [pair for pair in rest if pair[1] not in targets]
    return train, [pair for pair in test if pair[1] not in {t for _, t in rest}]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda pairs, held: halves(pairs, held)[:2], "target of the test occurs"),
        (lambda pairs, held: halves(pairs, held)[1::-1], "not the two lists"),
        (shared_into_test, "neither list"),
        (dropped_from_test, "leave pairs out of the test"),
        (lambda pairs, held: pairs, "two lists"),
    ],
)
def test_check_split_pairs_names(wrong, said):
    verdict = check_split_pairs(wrong)
    assert not verdict.passed and said in verdict.message
