"""Pairs from the forms in which people keep them; what is no text is never a side."""

import csv
import gzip
import io
import json
import re
import xml.etree.ElementTree as ElementTree
import zipfile

import pytest

from transformer_lib.corpora import (
    CleaningReport,
    CorpusUnavailable,
    load_corpus,
    side_lines,
    stream_pairs,
)

PAIRS = [
    ("Good morning.", "Guten Morgen."),
    ("Where are you?", "Wo bist du?"),
    ("It is a book & a pen.", "Es ist ein Buch & ein Stift."),
    ("No.", "Nein."),
    ("Thank you.", "Danke."),
]


def read(path, target=None, **settings):
    report = CleaningReport()
    return list(stream_pairs(path, target, report=report, **settings)), report


def tabs(*rows, first=None):
    return "\n".join("\t".join(row) for row in ([first] if first else []) + list(rows))


IDS = [(str(7 * i + 99), a, str(5 * i + 2001), b) for i, (a, b) in enumerate(PAIRS)]
TABLES = {
    "Tatoeba's export": tabs(*IDS),
    "with a mark at its beginning": "\ufeff" + tabs(*IDS),
    "manythings.org": tabs(
        *(
            (a, b, f"CC-BY 2.0 (France) Attribution: tatoeba.org #{i} (x) & #{i} (y)")
            for i, (a, b) in enumerate(PAIRS)
        )
    ),
    "Tatoeba Challenge": tabs(*(("eng", "deu_Latn", *pair) for pair in PAIRS)),
    "ParaCrawl": tabs(
        *(("http://a.com/x?y=1", "http://a.de/z", *pair, "0.713") for pair in PAIRS)
    ),
    "hosts and scores": tabs(
        *(("www.a.com/x", "a.de", *pair, "0.7", "1e-3") for pair in PAIRS)
    ),
    "ids of letters and figures": tabs(
        *((f"doc{i}#3", f"train_{i:05}", *pair) for i, pair in enumerate(PAIRS))
    ),
    "dates": tabs(*(("2020-01-02 10:00:00", *pair, "2021-02-03") for pair in PAIRS)),
    "a header": tabs(*PAIRS, first=("source", "target")),
    "a header of languages": tabs(*PAIRS, first=("English", "German sentence")),
    "a header over ids": tabs(
        *((str(i), *pair) for i, pair in enumerate(PAIRS)), first=("no", "x", "y")
    ),
}


@pytest.mark.parametrize("what", TABLES)
def test_the_two_columns_of_text_are_found(what, tmp_path):
    (tmp_path / "x.tsv").write_text(TABLES[what], encoding="utf-8")
    pairs, report = read(tmp_path / "x.tsv")
    assert pairs == PAIRS and report.first == PAIRS[0]
    assert report.dropped == ({"header line": 1} if "header" in what else {})
    pairs, _ = read(tmp_path / "x.tsv", bad="refuse")
    assert pairs == PAIRS


NO_TABLES = {
    "ids": (tabs(*(row[:2] for row in IDS)), "column 1 holds numbers"),
    "scores": (tabs(*((a, f"{i / 7}") for i, (a, _) in enumerate(PAIRS))), "column 2"),
    "codes": (tabs(*((a, "deu") for a, _ in PAIRS)), "column 2 holds language codes"),
    "addresses": (
        tabs(*((f"https://a.org/{i}", b) for i, (_, b) in enumerate(PAIRS))),
        "column 1 holds addresses",
    ),
    "three texts": (
        tabs(*((a, b, b.upper()) for a, b in PAIRS)),
        "3 of 3 columns look like sentences",
    ),
    "one text": (tabs(*(("eng", a, "77") for a, _ in PAIRS)), "1 of 3 columns"),
}


@pytest.mark.parametrize("what", NO_TABLES)
def test_else_a_line_is_shown_and_the_columns_asked_for(what, tmp_path):
    content, said = NO_TABLES[what]
    (tmp_path / "x.tsv").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=said) as error:
        stream_pairs(tmp_path / "x.tsv")
    for part in ("x.tsv", "Line 2 is 1: '", "--columns "):
        assert part in str(error.value)
    asked, _ = read(tmp_path / "x.tsv", columns=(1, 2), max_ratio=99)
    assert len(asked) == len(PAIRS)  # who asks for them gets them


def test_columns_are_asked_for_by_number_or_name(tmp_path):
    rows = [("id", "English", "Deutsch", "Latin")]
    rows += [(str(i), a, b, "Lorem ipsum.") for i, (a, b) in enumerate(PAIRS)]
    (tmp_path / "x.tsv").write_text(tabs(*rows), encoding="utf-8")
    for columns in ((2, 3), ("english", "Deutsch"), (2, "deutsch"), ["2", "3"]):
        numbers = [int(c) if str(c).isdigit() else c for c in columns]
        assert read(tmp_path / "x.tsv", columns=numbers)[0] == PAIRS
    back = [(b, a) for a, b in PAIRS]
    assert read(tmp_path / "x.tsv", columns=("deutsch", "english"))[0] == back
    with pytest.raises(ValueError, match="no column 'french'. Its columns: id, Engl"):
        read(tmp_path / "x.tsv", columns=("english", "french"))
    table = {"train": tmp_path / "x.tsv", "columns": [2, 3], "share": 0}
    assert load_corpus(table).pairs == PAIRS


def made_csv(between, quoting):
    out = io.StringIO()
    writer = csv.writer(out, delimiter=between, quoting=quoting)
    writer.writerows([("id", "en", "de"), *((i, *p) for i, p in enumerate(PAIRS))])
    return out.getvalue()


@pytest.mark.parametrize("between", [",", ";", "\t", "|"])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_csv_as_python_writes_it(between, quoting, tmp_path):
    path = tmp_path / "x.csv"
    path.write_text(made_csv(between, quoting), encoding="utf-8-sig")
    pairs, report = read(path)
    assert pairs == PAIRS and report.dropped == {"header line": 1}
    assert read(path, columns=("de", "en"))[0] == [(b, a) for a, b in PAIRS]


def test_csv_cells_with_commas_quotes_and_line_breaks(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text('en,de\n"Yes, ""he""\nsaid.","Ja, sagte er."\nA,B,C\nNo.,Nein.\n')
    pairs, report = read(path, bad="drop")
    assert pairs == [('Yes, "he" said.', "Ja, sagte er."), ("No.", "Nein.")]
    assert report.dropped == {"header line": 1, "columns": 1}
    path.write_text('en,de\n"' + "never closed\n" * 20_000)
    with pytest.raises(CorpusUnavailable, match="x.csv, line .*not closed"):
        read(path)
    path.write_bytes(b"en,de\nYes.,Ja.\nNo.,\xe9\nA b.,C d.\nA b.,C d.\nE f.,G h.\n")
    assert read(path)[1].dropped == {"header line": 1, "not UTF-8": 1}


JSON = {
    "Hugging Face": lambda a, b: {"id": "7", "translation": {"en": a, "de": b}},
    "two keys": lambda a, b: {"source": a, "target": b},
    "with ids and scores": lambda a, b: {"id": "d-12", "en": a, "de": b, "score": 0.7},
    "a list": lambda a, b: [a, b],
}


@pytest.mark.parametrize("what", JSON)
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "list.json", "x.txt"])
def test_json_as_python_writes_it(what, ascii_only, name, tmp_path):
    objects = [JSON[what](*pair) for pair in PAIRS]
    lines = [json.dumps(o, ensure_ascii=ascii_only) for o in objects]
    if name == "list.json":
        lines = [json.dumps(objects, indent=2, ensure_ascii=ascii_only)]
    (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert read(tmp_path / name)[0] == PAIRS


def test_json_that_is_none(tmp_path):
    path = tmp_path / "x.jsonl"
    lines = ['{"en": "a b", "de": "c d"}'] * 9
    path.write_text("\n".join([*lines, "{broken", '{"en": "no German"}', "[" * 9999]))
    pairs, report = read(path, bad="drop")
    assert pairs == [("a b", "c d")] * 9
    assert report.dropped == {"no record": 2, "columns": 1}
    path.write_text('{"text": "one side"}\n')
    with pytest.raises(ValueError, match="JSON without pairs"):
        read(path)
    path.write_text("\n".join('{"en": "a b", "de": "c d", "fr": "e f"}' for _ in "123"))
    with pytest.raises(ValueError, match="3 of 3 columns.*--columns SOURCE,TARGET"):
        read(path)
    assert read(path, columns=("fr", "en"))[0] == [("e f", "a b")] * 3


def tmx(pairs=PAIRS, encoding="utf-8", source="en-US", extra=""):
    root = ElementTree.Element("tmx", version="1.4")
    ElementTree.SubElement(root, "header", srclang=source, segtype="sentence")
    body = ElementTree.SubElement(root, "body")
    for pair in pairs:
        unit = ElementTree.SubElement(body, "tu")
        for code, text in zip(("de-DE", "en-US"), reversed(pair), strict=True):
            lang = {"{http://www.w3.org/XML/1998/namespace}lang": code}
            side = ElementTree.SubElement(unit, "tuv", lang)
            ElementTree.SubElement(side, "seg").text = text
    content = ElementTree.tostring(root, encoding="unicode")
    head = f'<?xml version="1.0" encoding="{encoding}"?>\n{extra}\n'
    return (head + content).encode(encoding)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "iso-8859-1"])
def test_tmx(encoding, tmp_path):
    doctype = '<!DOCTYPE tmx SYSTEM "tmx14.dtd">'
    (tmp_path / "x.tmx").write_bytes(tmx(encoding=encoding, extra=doctype))
    assert read(tmp_path / "x.tmx")[0] == PAIRS  # the header tells which is the source
    back = [(b, a) for a, b in PAIRS]
    assert read(tmp_path / "x.tmx", columns=("de", "en"))[0] == back
    marked = b'A <ph x="1">{1}</ph><hi>b</hi>!'
    (tmp_path / "x.tmx").write_bytes(tmx([("MARKED", "B")]).replace(b"MARKED", marked))
    assert read(tmp_path / "x.tmx")[0] == [("A b!", "B")]


def test_tmx_that_attacks_or_is_broken(tmp_path):
    bomb = "".join(f'<!ENTITY a{i} "{f"&a{i - 1};" * 10}">' for i in range(1, 9))
    bomb = f'<!DOCTYPE tmx [<!ENTITY a0 "ha">{bomb}]>'
    for content in (
        tmx(extra=bomb).replace(b"No.", b"&a8;"),
        tmx(extra='<!DOCTYPE tmx [<!ENTITY f SYSTEM "file:///etc/passwd">]>'),
        tmx()[:-200],
    ):
        (tmp_path / "x.tmx").write_bytes(content)
        with pytest.raises(CorpusUnavailable, match="x.tmx is cut short or no sound"):
            read(tmp_path / "x.tmx")
    (tmp_path / "x.xlf").write_text('<?xml version="1.0"?>\n<xliff version="1.2"/>')
    with pytest.raises(CorpusUnavailable, match="XML whose root is <xliff>"):
        read(tmp_path / "x.xlf")


def sgm(kind, lines, ids=range(1, 99)):
    segments = "".join(
        f'<seg id="{i}"> {s.replace("&", "&amp;")} </seg>\n'
        for i, s in zip(ids, lines, strict=False)
    )
    return f'<{kind} setid="t" srclang="any">\n<doc docid="d">\n<p>{segments}</p></doc>'


def test_two_files_of_wmt(tmp_path):
    en, de = zip(*PAIRS, strict=True)
    (tmp_path / "s.en.sgm").write_text(sgm("srcset", en))
    (tmp_path / "r.de.sgm").write_text(sgm("refset", de))
    files = tmp_path / "s.en.sgm", tmp_path / "r.de.sgm"
    assert read(*files)[0] == PAIRS
    assert list(side_lines(files[0])) == [line.encode() for line in en]
    with pytest.raises(ValueError, match="one side of a test set of WMT"):
        read(files[0])
    (tmp_path / "r.de.sgm").write_text(sgm("refset", de, range(2, 99)))
    with pytest.raises(ValueError, match="do not belong together"):
        read(*files)


def test_wmt_in_one_file(tmp_path):
    def side(name, lines):
        rows = "".join(
            f'<seg id="{i}">{t.replace("&", "&amp;")}</seg>'
            for i, t in enumerate(lines)
        )
        return f"<{name}><p>{rows}</p></{name.split()[0]}>"

    en, de = zip(*PAIRS, strict=True)
    (tmp_path / "x.xml").write_text(
        '<?xml version="1.0"?><!-- made by hand --><dataset id="t"><doc id="d">'
        + side('src lang="en"', en)
        + side('ref lang="de" translator="A"', de)
        + side('ref lang="de" translator="B"', en)
        + side("hyp", en)
        + "</doc></dataset>"
    )
    assert read(tmp_path / "x.xml")[0] == PAIRS


@pytest.mark.parametrize("piece", ["<seg>", "<seg ", "<", "<doc ", "<!--", '<seg id="'])
def test_tags_without_an_end_take_no_time(piece):
    """A line count, not a clock: each character is looked at a few times."""
    for start in ("", "<doc>"):
        text = start + piece * (200_000 // len(piece))
        file = io.BufferedReader(io.BytesIO(text.encode()))
        segments = text.startswith("<doc")  # a test set, else lines of text
        assert list(side_lines(file, "x")) == ([] if segments else [text.encode()])


def test_what_is_not_read_is_refused_by_its_name(tmp_path):
    for name, said in (("x.po", "gettext"), ("x.srt", "subtitles")):
        (tmp_path / name).write_text("1\n")
        with pytest.raises(CorpusUnavailable, match=said):
            read(tmp_path / name)
    (tmp_path / "x.en").write_text("a\n")
    (tmp_path / "x.jsonl").write_text('{"en": "a", "de": "b"}\n')
    with pytest.raises(ValueError, match="x.jsonl is JSON, not a file of lines"):
        read(tmp_path / "x.en", tmp_path / "x.jsonl")
    with pytest.raises(CorpusUnavailable, match="JSON, which may hold both sides"):
        list(side_lines(tmp_path / "x.jsonl"))
    with zipfile.ZipFile(tmp_path / "opus.zip", "w") as archive:
        archive.writestr("c.de-en.en", "a b\n")
        archive.writestr("c.de-en.de", "c d\n")
    with pytest.raises(CorpusUnavailable, match=r"Say which with .*c.de-en.de"):
        read(tmp_path / "opus.zip")
    files = tmp_path / "opus.zip/c.de-en.en", tmp_path / "opus.zip/c.de-en.de"
    assert read(*files)[0] == [("a b", "c d")]


@pytest.mark.parametrize(
    ("name", "text", "row"),
    [
        ("a.tsv", "A dog.\tEin Hund.\n", "1: 'A dog.'; 2: 'Ein Hund.'"),
        ("a.tsv.gz", "A dog.\tEin Hund.\n", "1: 'A dog.'; 2: 'Ein Hund.'"),
        ("a.txt", "1\tA dog.\n2\tA cat.", "1: '1'; 2: 'A dog.'"),
        ("a.csv", 'en,de\n"A dog, a cat.",Ein\n', "1: 'en'; 2: 'de'"),
        ("b", "A dog.\tEin Hund.\n" * 900 + "no tab\n", "1: 'A dog.'; 2: 'Ein"),
    ],
)
def test_columns_are_no_lines(name, text, row, tmp_path):
    """Where one side is needed, such as by translate; a line is shown."""
    content = text.encode()
    packed = gzip.compress(content) if name.endswith(".gz") else content
    (tmp_path / name).write_bytes(packed)
    said = rf"{name} has columns .*the first is {re.escape(row)}.*cut -f 1"
    with pytest.raises(CorpusUnavailable, match=said):
        list(side_lines(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", "A dog.\tEin Hund."),
        ("a.txt", "A dog.\tEin Hund.\nA cat.\n"),
        ("a", f"A dog.\t{'x ' * 9000}\nA cat.\ty\n"),
        ("a.csv", "A dog, a cat.\nA cat.\n"),
        ("a.tsv", "A dog.\n"),
        ("a.tsv", ""),
    ],
)
def test_lines_with_a_tab_or_a_comma_are_lines(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    assert list(side_lines(tmp_path / name)) == text.encode().splitlines()


# --- what cannot be read: a little is told, much is refused --------------------------


def lines(bad, total):
    return "".join(f"A {i}.\t{'' if i < bad else f'B {i}.'}\n" for i in range(total))


def test_how_much_may_be_unreadable(tmp_path, recwarn):
    path = tmp_path / "x.tsv"
    path.write_text(lines(1, 100))
    load_corpus({"train": path, "share": 0})
    assert not recwarn.list  # 1 %
    path.write_text(lines(2, 100))
    with pytest.warns(UserWarning, match="(?s)2% of lines cannot be read.*line 1, 2"):
        load_corpus({"train": path, "share": 0})
    path.write_text(lines(20, 100))
    with pytest.warns(UserWarning, match="20% of lines"):
        assert len(load_corpus({"train": path, "share": 0})) == 80
    path.write_text(lines(21, 100))
    said = "(?s)21 of 100 lines cannot be read.*one side empty.*--bad drop"
    for split in ("train", "test"):
        with pytest.raises(ValueError, match=said):
            load_corpus({"train": path, "test": path, "share": 0}, split)
    with pytest.warns(UserWarning, match="21% of lines"):
        corpus = load_corpus({"train": path, "share": 0, "bad": "drop"})
    assert len(corpus) == 79
    assert corpus.report.dropped == {"one side empty": 21}
    assert corpus.report.lines == {"one side empty": [1, 2, 3, 4, 5]}


def test_what_a_filter_leaves_out_is_counted_and_no_fault(tmp_path, recwarn):
    path = tmp_path / "x.tsv"
    long = "Yes.\t" + "Ja, " * 30 + "\n"
    path.write_text(long + "A b.\tC d.\n" + "w " * 300 + "\tx\n")
    corpus = load_corpus({"train": path, "share": 0})
    assert corpus.report.dropped == {"length ratio": 1, "too long": 1}
    assert corpus.report.unreadable == 0 and not recwarn.list
    assert re.search("1 length ratio +line 1\n.*1 too long +line 3", str(corpus.report))


def test_a_small_text_holds_out_a_pair(tmp_path):
    path = tmp_path / "x.tsv"
    for count in (2, 20):
        path.write_text("".join(f"A {i}.\tB {i}.\nA {i}.\tC.\n" for i in range(count)))
        train, valid = load_corpus(path), load_corpus(path, "valid")
        assert len(valid) == 2 and len({source for source, _ in valid}) == 1
        assert len(train) == count - 1 == 2 * count - 2 - train.report.shared
        assert not {a for a, _ in train} & {a for a, _ in valid}
    path.write_text("A c.\tC d.\n" * 5)
    assert len(load_corpus(path)) == 5
    with pytest.raises(ValueError, match="no pair is left for the valid split"):
        load_corpus(path, "valid")
