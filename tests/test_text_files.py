"""One function opens text: packed or not, from a file or a pipe, or says what it is."""

import bz2
import gzip
import io
import lzma
import os
import subprocess
import sys
import threading
import zipfile

import pytest

from transformer_lib.corpora import (
    CorpusUnavailable,
    open_text,
    read_lines,
    text_lines,
)

TEXT = "Guten Morgen.\nそうですか。\nکتاب‌های\n"
LINES = [line.encode() for line in TEXT.splitlines()]
PACK = {
    "": lambda c: c,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def zipped(**files):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in files.items():
            archive.writestr(name if "[C" in name else name.replace("_", "."), content)
    return out.getvalue()


@pytest.mark.parametrize("end", PACK)
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_packed_and_plain_files_give_the_same_lines(end, start, tmp_path):
    path = tmp_path / f"x.txt{end}"
    path.write_bytes(PACK[end]((start + TEXT).encode()))
    assert list(text_lines(path)) == LINES
    path = path.rename(tmp_path / "without_a_suffix")
    assert list(text_lines(str(path))) == LINES
    with open(path, "rb") as file:
        assert list(text_lines(file, "standard input")) == LINES


@pytest.mark.parametrize("end", PACK)
def test_a_pipe_is_read_as_a_file_is(end, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    content = PACK[end](TEXT.encode())
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=[content])
    writer.start()
    assert list(text_lines(tmp_path / "pipe")) == LINES
    writer.join()


def test_a_zip_needs_no_name_if_it_holds_one_text(tmp_path):
    path = tmp_path / "x.zip"
    path.write_bytes(zipped(README="?", a_txt=TEXT))
    assert list(text_lines(path)) == list(text_lines(path / "a.txt")) == LINES
    with open(path, "rb") as file:
        assert list(text_lines(file, "standard input")) == LINES
    code = (
        "import sys; from transformer_lib.corpora.text_files import text_lines; "
        "print(list(text_lines(sys.stdin.buffer, 'stdin')))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input=path.read_bytes(), capture_output=True)
    assert b"stdin is a .zip archive, which cannot be read from a pipe" in done.stderr


OLD_OFFICE = bytes.fromhex("d0cf11e0a1b11ae1")
NOT_TEXT = {
    "UTF-16": "Guten Tag".encode("utf-16"),
    "UTF-16 ": "Guten Tag".encode("utf-16-be") + "\ufeff".encode("utf-16-be"),
    "UTF-16 without a byte order mark": "Guten Tag, Welt".encode("utf-16-le"),
    "UTF-32": "Guten Tag".encode("utf-32"),
    "Parquet": b"PAR1\x15\x04",
    "a PDF": b"%PDF-1.7\n%\xe2\xe3",
    "Word, Excel": zipped(**{"[Content_Types].xml": "<a/>", "word/document.xml": "b"}),
    "OpenDocument": zipped(mimetype="application/vnd.oasis", content_xml="<a/>"),
    "old Word": OLD_OFFICE + bytes(99),
    "SQLite": b"SQLite format 3\x00",
    "PNG": b"\x89PNG\r\n\x1a\n",
    "JPEG": b"\xff\xd8\xff\xe0",
    "zstd": b"\x28\xb5\x2f\xfd\x00",
    "7z": b"7z\xbc\xaf\x27\x1c",
    "tar archive": b"a.txt".ljust(257, b"\0") + b"ustar\x0000" + bytes(99),
    "web page": b"\n<!DOCTYPE html>\n<html>",
    "packed twice": gzip.compress(gzip.compress(TEXT.encode())),
    "not text": bytes(range(256)) * 4,
}


@pytest.mark.parametrize("what", NOT_TEXT)
@pytest.mark.parametrize("end", ["", ".gz"])
def test_what_is_no_text_is_refused_by_its_name(what, end, tmp_path):
    path = tmp_path / f"x{end}"
    path.write_bytes(PACK[end](NOT_TEXT[what]))
    if not (end and what in ("Word, Excel", "OpenDocument", "tar archive")):
        with pytest.raises(CorpusUnavailable, match=f"x{end} .*{what.strip()}"):
            list(text_lines(path))
    with open(path, "rb") as file, pytest.raises(CorpusUnavailable, match="input "):
        list(text_lines(file, "standard input"))


@pytest.mark.parametrize("text", ["", "\n", "a", "\0", "one\0two\n", "\x1b[1m!", "BZh"])
def test_odd_text_is_text(text, tmp_path):
    (tmp_path / "x").write_text(text)
    with open_text(tmp_path / "x") as file:
        assert file.read() == text.encode()


def test_a_cut_file_says_after_which_line(tmp_path):
    lines = os.urandom(60_000).hex(" ", 8).replace(" ", "\n").encode()
    (tmp_path / "x.gz").write_bytes(gzip.compress(lines)[:-9_000])
    with pytest.raises(CorpusUnavailable, match="x.gz is cut short .* line [1-9]"):
        list(text_lines(tmp_path / "x.gz"))


def test_the_commands_read_packed_text(tmp_path, monkeypatch, capsys):
    """`translate` and `parse` take their lines from here, standard input's too."""
    from transformer_lib import command_line

    for end, pack in PACK.items():
        (tmp_path / f"x{end}").write_bytes(pack(b"\xef\xbb\xbf" + TEXT.encode()))
    files = [tmp_path / f"x{end}" for end in PACK]
    assert list(read_lines(files)) == TEXT.splitlines() * 4
    for content in (TEXT.encode(), gzip.compress(TEXT.encode())):
        standard_input = io.TextIOWrapper(io.BytesIO(content))
        monkeypatch.setattr(sys, "stdin", standard_input)
        assert list(read_lines([])) == TEXT.splitlines()
    (tmp_path / "x.en").write_bytes("Hello".encode("utf-16"))
    words = ["translate", "tatoeba-en-de", str(tmp_path / "x.en")]
    assert command_line.main(words) == 2
    said = capsys.readouterr()
    assert "x.en is UTF-16" in said.err and not said.out
