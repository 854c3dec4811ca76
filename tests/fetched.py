"""Corpora for the tests: packed, served, and no network unless a test says so."""

import gzip
import io
import lzma
import random
import socket
import threading
import urllib.error
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from transformer_lib.corpora import downloads, load_corpus

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
def places(tmp_path, monkeypatch, request):
    """An empty cache, no mirror, no network; counts the calls to the network."""
    if request.node.get_closest_marker("corpora"):
        return []
    monkeypatch.setenv("TRANSFORMER_LIB_CACHE", str(tmp_path / "cache"))
    calls = []

    def refuse(request, timeout=None):
        assert timeout and timeout <= 30, "a call without a short timeout"
        calls.append(request.full_url)
        raise urllib.error.URLError(socket.gaierror(-2, "Name or service not known"))

    monkeypatch.setattr(downloads, "open_url", refuse)
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

    monkeypatch.setattr(downloads, "open_url", urlopen)
    return asked


def everything(name="tatoeba-en-de"):
    pairs = load_corpus(name).pairs + load_corpus(name, "valid").pairs
    return sorted(pairs)


def leftovers(tmp_path):
    return sorted(p.name for p in tmp_path.rglob("*") if p.is_file())


PARTS = ["deu-eng.zip.part", "deu-eng.zip.part.json"]


def write(path, content):
    content = content if isinstance(content, bytes) else content.encode()
    suffix = path.suffix
    if suffix == ".zip":
        content = archive(content, "corpus.tsv")
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(suffix, bytes)
    path.write_bytes(pack(content))
    return path


LONG = "".join(f"{random.Random(i).random()}\t{i}\n" for i in range(900))
HALF = archive(LONG)[:-600]
FLIPPED = bytearray(archive(LONG))
FLIPPED[200] ^= 0x55


# --- a real server that misbehaves ---------------------------------------------------

REAL_OPEN_URL = downloads.open_url
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
