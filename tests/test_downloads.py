"""Chapter 08: public files, fetched and checked."""

import gzip
import http.client
import io
import lzma
import tarfile
import tempfile
import tracemalloc
import urllib.error
from concurrent.futures import ThreadPoolExecutor

import pytest
from fetched import (
    BIG,
    LONG,
    PAIRS,
    PARTS,
    REAL_OPEN_URL,
    Answer,
    Server,
    archive,
    everything,
    leftovers,
    places,  # noqa: F401
    serve,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_lib import storage
from transformer_lib.corpora import (
    SOURCES,
    CorpusUnavailable,
    downloads,
    load_corpus,
    unpack,
)
from transformer_lib.corpora import known as corpora

EASY = settings(max_examples=25)


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

    monkeypatch.setattr(downloads, "open_url", urlopen)
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
        downloads, "open_url", lambda request, timeout: Broken(archive())
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
            raise storage.NotWritten(part.path, OSError(28, "No space left on device"))
        whole(part, piece, mode)

    whole = downloads.PartialFile.write
    serve(monkeypatch, archive())
    monkeypatch.setattr(downloads.PartialFile, "write", full)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.warns(UserWarning, match="not kept: .*No space"):
        assert everything() == sorted(PAIRS)
    assert leftovers(tmp_path) == []


def test_a_redirect_stays_encrypted():
    handler, secure = (
        downloads.SafeRedirects(),
        downloads.urllib.request.Request("https://a/x"),
    )
    open_one = downloads.urllib.request.Request("http://a/x")
    for request, to in (secure, "https://b/x"), (open_one, "http://b/x"):
        asked = handler.redirect_request(request, None, 302, "Found", {}, to)
        assert asked.full_url == to
    for to in "http://b/x", "ftp://b/x":
        with pytest.raises(urllib.error.URLError, match=f"redirects to {to}, which is"):
            handler.redirect_request(secure, None, 302, "Found", {}, to)


@given(st.binary(max_size=300))
@EASY
def test_unpack_of_anything_is_text_or_a_sentence(content):
    for start in (b"", b"PK\x03\x04", b"\x1f\x8b\x08", b"\xfd7zXZ\x00"):
        try:
            assert isinstance(unpack(start + content, "file"), str)
        except CorpusUnavailable as error:
            assert str(error).startswith("file ")


def tarred(kind):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        info = tarfile.TarInfo("a.txt")
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    return out.getvalue()


@pytest.mark.parametrize(
    "kind", [tarfile.DIRTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.SYMTYPE]
)
def test_a_member_that_is_no_file_is_said(kind):
    with pytest.raises(CorpusUnavailable, match="x.tgz is .*a.txt in it is no file"):
        unpack(tarred(kind), "x.tgz", "a.txt")


@pytest.mark.parametrize("form", ["zip", "gz", "xz"])
def test_what_unpacks_without_an_end_is_stopped(form, monkeypatch):
    """An archive that was made to fill the memory: a thousand times its size."""
    monkeypatch.setattr(downloads, "MAX_UNPACKED", 1 << 22)
    zeros = bytes(1 << 26)
    packed = {"gz": gzip.compress, "xz": lzma.compress}.get(form, archive)(zeros)
    assert len(packed) < len(zeros) / 500
    tracemalloc.start()
    with pytest.raises(CorpusUnavailable, match="unpacks to more than 4 MiB"):
        unpack(packed, "x")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 26


# --- a real server that misbehaves ---------------------------------------------------


@pytest.fixture
def server(monkeypatch):
    server = Server(BIG)
    source = downloads.Source("deu-eng.zip", server.url, "CC-BY")
    monkeypatch.setitem(SOURCES, "tatoeba-en-de", source)
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(downloads, "open_url", REAL_OPEN_URL)
    yield server
    server.shutdown()
    server.server_close()


def test_a_broken_download_goes_on_where_it_broke_off(
    server, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(downloads, "shows_bars", lambda: True)
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


def test_a_link_where_a_part_belongs_is_not_followed(server, tmp_path):
    """The text comes, and what the link leads to is as it was."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "cache" / PARTS[0]).symlink_to(tmp_path / "victim")
    (tmp_path / "cache" / "deu-eng.zip.lock").write_text("mine")
    with pytest.warns(UserWarning, match="it is a link"):
        assert len(everything()) == 9000
    assert (tmp_path / "victim").read_text() == "mine"
    assert leftovers(tmp_path) == ["deu-eng.zip.lock", PARTS[0], "victim"]


def test_a_link_where_the_lock_belongs_is_not_followed(server, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "deu-eng.zip.lock").symlink_to(tmp_path / "somebody's")
    with pytest.warns(UserWarning, match="deu-eng.zip.lock could not be .*link"):
        assert everything()
    assert not (tmp_path / "somebody's").exists()
    assert (tmp_path / "cache" / "deu-eng.zip.lock").is_symlink()


def test_what_a_killed_download_left_is_swept_by_the_next(server, tmp_path):
    (tmp_path / "cache").mkdir()
    mine = [f"deu-eng.zip{name}.0123abcd.part" for name in ("", ".part.json")]
    others = ["fra-eng.zip.0123abcd.part", "deu-eng.zip.mine.part"]
    for name in (*mine, *others):
        (tmp_path / "cache" / name).write_text("half")
    everything()
    assert leftovers(tmp_path) == sorted(["deu-eng.zip", *others])


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
def test_a_part_of_somebody_else_is_left_alone(junk, server, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / PARTS[0]).write_bytes(b"abc")
    if junk is not None:
        (tmp_path / "cache" / PARTS[1]).write_bytes(junk)
    with pytest.warns(UserWarning, match="it is no download's.*Move away"):
        assert len(everything()) == 9000
    assert (tmp_path / "cache" / PARTS[0]).read_bytes() == b"abc"
    assert leftovers(tmp_path) == PARTS[: 1 if junk is None else 2]


def test_a_part_that_is_whole_is_not_asked_for_again(server, tmp_path):
    """As a process leaves it that died between the last byte and the renaming."""
    part = downloads.PartialFile.find(tmp_path / "cache" / PARTS[0], server.url)
    part.path.parent.mkdir()
    part.start(server.url, '"v1"', len(BIG))
    part.add(BIG)
    assert len(everything()) == 9000 and server.asked == []
    assert leftovers(tmp_path) == ["deu-eng.zip"]


def test_two_at_once_fetch_once(server, tmp_path):
    server.cut = [70_000, 30_000]
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(corpora.fetch, SOURCES["tatoeba-en-de"]) for _ in range(2)]
    assert [len(job.result()[0]) for job in jobs] == [9000, 9000]
    assert len(server.asked) == 3 and leftovers(tmp_path) == ["deu-eng.zip"]
