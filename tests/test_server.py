"""Chapter 22: a server answers many, says what is wrong, and loses no text."""

import asyncio
import contextlib
import functools
import html
import http.client
import json
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from urllib.parse import urlencode

import pytest
import serving
from deep_translator import LibreTranslator
from libretranslatepy import LibreTranslateAPI
from served_text import MANY, ODD, exact_engine, int8_engine, sentences

from transformer_lib import server as server_module
from transformer_lib.translator import Note, Translator


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return int8_engine(tmp_path_factory.mktemp("engine") / "int8")


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    return exact_engine(tmp_path_factory.mktemp("exact") / "it")


@contextlib.contextmanager
def serving_with(translate, **settings):
    """A running server; gives a function that asks it."""
    server = server_module.translation_server(translate, **settings)
    server.start()

    def ask(method="POST", path="/translate", body=b"", headers=None, address=None):
        connection = http.client.HTTPConnection(*address, timeout=1800)
        connection.request(method, path, body, headers or {})
        reply = connection.getresponse()
        content = json.loads(reply.read())
        connection.close()
        return reply.status, content

    yield functools.partial(ask, address=server.server_address)
    server.stop()


@pytest.fixture
def served():
    """A server that says sentences backwards."""

    def translate(lines, tell):
        if "fail" in lines:
            raise RuntimeError("no memory")
        return [line[::-1] for line in lines]

    with serving_with(translate) as ask:
        yield ask


@pytest.mark.parametrize(
    "text, answer",
    [
        ("Grüße", "eßürG"),
        (["ab", "☕ c"], ["ba", "c ☕"]),
        ([], []),
        ("", ""),
        ("ab\n\ncd\n", "ba\n\ndc\n"),
        (["ab\ncd", "", "ef"], ["ba\ndc", "", "fe"]),
    ],
)
def test_a_server_answers(served, text, answer):
    body = json.dumps({"q": text}).encode()
    assert served(body=body) == (200, {"translatedText": answer})


@pytest.mark.parametrize(
    "body, telling",
    [
        (b"", "send JSON"),
        (b"{", "send JSON"),
        (b"[]", "send JSON"),
        (b"3", "send JSON"),
        (b'{"q": 3}', "must be a text"),
        (b'{"q": ["a", 3]}', "must be a"),
        (b"\xff", "send JSON"),
        (b"x" * (2**20 + 1), "at most 1 MiB"),
        (b"x" * 10 * 2**20, "at most 1 MiB"),  # more than lies in the machine's buffers
        (b'{"q": ' + b"[" * 200_000, "send JSON"),
        (b'{"q": "\\ud800"}', "half a"),
    ],
)
def test_a_server_says_what_is_wrong(served, body, telling):
    status, content = served(body=body)
    assert status == 400 and telling in content["error"]
    assert served(body=b'{"q": "ab"}') == (200, {"translatedText": "ba"})


def test_a_server_goes_on(served):
    assert served("GET", "/") == (200, {"status": "ok"})
    assert served("GET", "/health?at=noon") == (200, {"status": "ok"})
    asked = served(path="/translate?from=en", body=b'{"q": "ab"}')
    assert asked == (200, {"translatedText": "ba"})
    assert served("GET", "/x")[0] == served(path="/x")[0] == 404
    status, content = served(body=b'{"q": ["fail"]}')
    assert status == 500 and content == {"error": "RuntimeError: no memory"}
    address = served.keywords["address"]
    for said in (b"-1", b"9" * 5000, b"x"):  # Uvicorn's own answer
        ask = b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
        assert " 400 " in raw(address, ask + said + b"\r\n\r\n")[0]
    assert served(body=b'{"q": "ab"}') == (200, {"translatedText": "ba"})


def test_who_goes_away_or_stops_is_no_trouble(monkeypatch, capsys):
    """One leaves before the answer, one sends less than was said: nothing is said."""
    asked, gone = threading.Event(), threading.Event()

    def translate(lines, tell):
        if lines == ["slow"]:
            asked.set()
            gone.wait(1800)
        return [line * 10**5 for line in lines]

    monkeypatch.setattr(server_module, "PATIENCE", 0.2)
    server = server_module.translation_server(translate)
    server.start()
    with socket.create_connection(server.server_address) as one:
        body = b'{"q": "slow"}'
        one.sendall(HEAD % len(body) + body)
        assert asked.wait(1800)
        linger = struct.pack("ii", 1, 0)  # what is closed so is reset
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    gone.set()
    for sent in (b"", b"POST /tr", HEAD % 100 + b"{"):  # gone before all is said
        with socket.create_connection(server.server_address) as one:
            one.sendall(sent)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    status, _, body = raw(server.server_address, HEAD % 100 + b"{")
    assert " 408 " in status and b"stopped half-way" in body
    server.stop()
    assert capsys.readouterr().err == ""


def test_mistakes_of_ours_are_shown(monkeypatch, caplog):
    """What no handler expects is logged as an error, and is answered with 500."""

    def mistake(*_):
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(server_module, "why_refused", mistake)
    server = server_module.translation_server(list)
    server.start()
    assert " 500 " in raw(server.server_address, HEAD % 0)[0]
    server.stop()
    assert "RuntimeError: a mistake of ours" in caplog.text


HEAD = (
    b"POST /translate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n"
)


def raw(address, request):
    """Status line, headers and body of the answer to some bytes."""
    with socket.create_connection(address, timeout=1800) as one:
        one.sendall(request)
        answer = b"".join(iter(lambda: one.recv(2**16), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *headers = head.decode().split("\r\n")
    return status, dict(line.split(": ", 1) for line in headers), body


def test_other_methods():
    server = server_module.translation_server(list)
    server.start()
    rest = b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    for path in (b"/", b"/x"):
        asked = [method + path + rest for method in (b"GET ", b"HEAD ")]
        got, head = (raw(server.server_address, request) for request in asked)
        assert head[0] == got[0] and head[2] == b""
        lower = {name.lower(): value for name, value in head[1].items()}
        assert lower["server"] == "transformer-lib"  # and no versions
        assert lower["x-content-type-options"] == "nosniff"
        assert int(lower["content-length"]) == len(got[2]) > 0
    for request, allowed in ((b"GET /translate", "POST"), (b"BREW /", "GET, HEAD")):
        status, headers, body = raw(server.server_address, request + rest)
        lower = {name.lower(): value for name, value in headers.items()}
        assert " 405 " in status and "POST /translate" in json.loads(body)["error"]
        assert set(lower["allow"].split(", ")) == set(allowed.split(", "))
    garbage = raw(server.server_address, b"what is this?" + rest)
    assert " 400 " in garbage[0]  # Uvicorn's own answer
    server.stop()


# --- stopping -------------------------------------------------------------------------

ASK = HEAD % 11
BODY = b'{"q": "ab"}'
SLOW = """\
import os, sys, time
from transformer_lib import command_line, server
from transformer_lib.command_line import commands

class Slow:
    def __init__(self, *_):
        pass

    def __call__(self, lines, tell, beam_size):
        os.write(1, b"%d\\n" % len(lines))  # whole, whoever else writes
        time.sleep(1)
        return [line[::-1] for line in lines]

commands.runs.exported_as = lambda path: "ctranslate2"
commands.export.CTranslate2Model = Slow
sys.exit(command_line.main(["serve", "it", "--port", "0"]))
"""


def curl(url: str, *how: str) -> str:
    """What curl is answered with: the translation, or the error."""
    asked = ["curl", "-s", *how, url + "/translate"]
    told = subprocess.run(asked, capture_output=True, check=True, timeout=600)
    return next(iter(json.loads(told.stdout).values()))


@pytest.mark.parametrize(
    "name, status",
    [
        ("SIGINT", 130),
        ("SIGTERM", 143),
        ("SIGHUP", 129),
    ],
)
def test_a_signal_ends_it_when_all_are_answered(name, status):
    """Five have asked, one has only connected; all five get their answer.

    So do three clients that others wrote.
    """
    program = subprocess.Popen(
        [sys.executable, "-c", SLOW],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(getattr(signal, name), signal.SIG_DFL),
    )
    address = program.stdout.readline().decode().split("//")[1].split("/")[0]
    address = "127.0.0.1", int(address.split(":")[1])
    url = "http://{}:{}".format(*address)
    clients = [
        functools.partial(LibreTranslateAPI(url).translate, "ab", "en", "de"),
        functools.partial(
            LibreTranslator("en", "de", "x", custom_url=url + "/").translate, "ab"
        ),
    ]
    if shutil.which("curl"):
        clients.append(functools.partial(curl, url, "-d", "q=ab"))
    with contextlib.ExitStack() as stack:
        people = [
            stack.enter_context(socket.create_connection(address, timeout=600))
            for _ in range(6)
        ]
        for one in people[:5]:
            one.sendall(ASK + BODY)
        pool = stack.enter_context(ThreadPoolExecutor(len(clients)))
        said = [pool.submit(client) for client in clients]
        lines = 0
        while lines < 5 + len(clients):  # in one call or in several
            lines += int(program.stdout.readline())
        program.send_signal(getattr(signal, name))
        answers = [
            b"".join(iter(lambda one=one: one.recv(2**16), b"")) for one in people
        ]
        assert {one.result(600) for one in said} == {"ba"}
    said = program.communicate(timeout=600)[1]
    assert program.returncode == status, said
    assert all(b'"translatedText":"ba"' in answer for answer in answers[:5])
    assert answers[5] == b"" and b"Traceback" not in said


def test_stopping_answers_who_has_asked_and_waits_for_nobody_else(monkeypatch):
    """Half a request, nothing at all."""
    monkeypatch.setattr(server_module, "PATIENCE", 0.5)
    asked = threading.Event()

    def translate(lines, tell):
        asked.set()
        return lines

    server = server_module.translation_server(translate)
    server.start()
    with contextlib.ExitStack() as stack:
        waiting, half, idle = (
            stack.enter_context(
                socket.create_connection(server.server_address, timeout=60)
            )
            for _ in range(3)
        )
        half.sendall(ASK + BODY[:5])
        waiting.sendall(ASK + BODY)
        assert asked.wait(60)
        server.stop()
        assert b'"translatedText":"ab"' in waiting.recv(2**16)
        assert b"stopped half-way" in half.recv(2**16) and idle.recv(100) == b""


def test_the_idle_are_turned_away(monkeypatch):
    monkeypatch.setattr(server_module, "PATIENCE", 0.3)
    with serving_with(lambda lines, tell: lines) as ask:
        with socket.create_connection(ask.keywords["address"], timeout=60) as idle:
            assert idle.recv(100) == b""
        assert ask(body=BODY) == (200, {"translatedText": "ab"})


# --- other sites ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "host, names, foreign",
    [
        (
            "127.0.0.1",
            ["127.0.0.1", "localhost:8000", "LOCALHOST", "[::1]:80"],
            [
                "evil.example",
                "evil.example:80",
                "127.0.0.1.evil.example",
                "",
                "[x",
                "10.0.0",
            ],
        ),
        (
            "192.168.1.5",
            ["192.168.1.5:80", "localhost"],
            ["192.168.1.6", "evil.example"],
        ),
        (
            "0.0.0.0",
            ["10.0.0.1", "[fe80::1]:8", "localhost", socket.gethostname()],
            ["evil.example", "10.0.0.1.evil.example"],
        ),
        (
            "box.example",
            ["BOX.example:80", "box.example."],
            ["evil.example", "10.0.0.1"],
        ),
    ],
)
def test_names_of_a_server(host, names, foreign):
    def refused(name):
        return server_module.why_refused({"Host": name}, host)

    assert not any(map(refused, names))
    assert [refused(name)[0] for name in foreign] == [421] * len(foreign)


def test_pages_of_other_sites_may_not_ask():
    asked = []

    def translate(lines, tell):
        asked.append(lines)
        return lines

    with serving_with(translate) as ask:
        port = ask.keywords["address"][1]
        for origin in ("https://evil.example", "null", f"http://localhost:{port}"):
            status, content = ask(body=BODY, headers={"Origin": origin})
            assert status == 403 and f"--cors {origin}" in content["error"]
        status, content = ask(body=BODY, headers={"Host": "evil.example"})
        assert status == 421 and "evil.example" in content["error"]
        assert not asked
        own = {"Origin": f"http://127.0.0.1:{port}"}
        assert ask(body=BODY, headers=own)[0] == 200


def test_pages_of_named_sites_may_ask():
    server = server_module.translation_server(
        lambda lines, tell: lines, cors=["https://good.example"]
    )
    server.start()
    for method in (b"OPTIONS", b"POST"):
        for origin in (b"https://good.example", b"https://evil.example"):
            more = b"\r\nOrigin: %s\r\nConnection: close\r\n" % origin
            more += b"Access-Control-Request-Method: POST\r\n"
            more += b"Access-Control-Request-Headers: content-type"
            request = ASK.replace(b"\r\nConnection: close", more) + BODY
            request = request.replace(b"POST", method, 1)
            line, headers, _ = raw(server.server_address, request)
            headers = {name.lower(): value for name, value in headers.items()}
            good = origin.endswith(b"good.example")
            assert ("200" if good else "403") in line
            if good:
                assert headers["access-control-allow-origin"] == origin.decode()
                assert "Origin" in headers["vary"]
            if good and method == b"OPTIONS":
                assert "Content-Type" in headers["access-control-allow-headers"]
                assert headers["access-control-allow-methods"] == "GET, POST"
    server.stop()
    anywhere = {"Host": "localhost", "Origin": "https://evil.example"}
    assert not server_module.why_refused(anywhere, "127.0.0.1", ["*"])


def test_a_port_that_is_none():
    with pytest.raises(OSError, match="give another --port"):
        server_module.translation_server(list, port=99999)


def test_a_port_that_is_taken(served):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(OSError, match="give another --port"):
            server_module.translation_server(list, port=other.getsockname()[1])


# --- clients that exist ---------------------------------------------------------------


def address_of(ask):
    return "http://{}:{}".format(*ask.keywords["address"])


def test_libretranslates_own_client(served):
    api = LibreTranslateAPI(address_of(served))
    assert api.translate("Grüße & 1+1=2%", "en", "de") == "Grüße & 1+1=2%"[::-1]
    assert api.translate("ab\ncd", "auto", "de") == "ba\ndc"
    known = api.languages()
    assert [(one["code"], one["targets"]) for one in known] == [
        ("en", ["de"]),
        ("de", []),
    ]
    with pytest.raises(OSError, match="400"):
        api.translate("ab", "en", "fr")


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_curl(served):
    """As serve --help and the README write it, and with JSON."""
    url = address_of(served)
    assert curl(url, "-d", "q=Where is it?") == "?ti si erehW"
    assert curl(url, "--data-urlencode", "q=1+1 & Ü") == "Ü & 1+1"
    asked = json.dumps({"q": ["ab", "cd\nef"], "source": "en", "target": "de"})
    assert curl(url, "--json", asked) == ["ba", "dc\nfe"]
    assert curl(url, "-d", "q=ab", "-d", "target=fr").startswith("target 'fr' is not")
    assert curl(url, "-X", "POST").startswith("send JSON such as")


def test_deep_translator(served):
    client = LibreTranslator(
        "en", "de", api_key="any", custom_url=address_of(served) + "/"
    )
    assert client.translate("Grüße & 1+1=2%") == "Grüße & 1+1=2%"[::-1]
    assert client.translate_batch(["ab", "cd e"]) == ["ba", "e dc"]


@pytest.mark.parametrize(
    "more, telling",
    [
        ({"source": "fr"}, "source 'fr' is not supported: only 'en' is"),
        ({"target": "en"}, "target 'en' is not supported: only 'de' is"),
        ({"format": "pdf"}, "format 'pdf' is not supported: 'text' and 'html' are"),
        ({"format": ["html"]}, "is not supported: 'text' and 'html' are"),
    ],
)
def test_what_it_cannot_do_it_says(served, more, telling):
    status, content = served(body=json.dumps({"q": "ab", **more}).encode())
    assert status == 400 and telling in content["error"]


class Kept(HTMLParser):
    """What Python's own parser finds that is not to change: tags, comments, scripts."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.found, self.text, self.raw = [], "", False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, attrs))
        self.raw = tag in ("script", "style", "pre", "code")

    def handle_endtag(self, tag):
        self.found.append(tag)
        self.raw = False

    def handle_data(self, data):
        if self.raw:
            self.found.append(data)
        else:
            self.text += data

    def handle_comment(self, data):
        self.found.append(("comment", data))


HTML = {
    "a word": "Hello",
    "inside a sentence": "See the <b>old</b> man<br>and <i class='x'>go</i>.",
    "entities": "<p>a &lt; b &amp; c &gt; d &lt;b&gt; &quot;e&quot; &uuml;&nbsp;f</p>",
    "blocks": "<h1>One.</h1>\n\n<ul>\n <li>Two</li>\n <li>Three.</li>\n</ul>\n",
    "a page": "<!doctype html><html lang=en><head><title>A page</title>"
    "<style>p > b { color: red }</style><script>if (a < b && c) go('</b>')</script>"
    "</head><body><!-- not <b>this</b> --><p>Text.</p><pre>a  b\nc</pre></body></html>",
    "attributes": """<a href="/?a=1&amp;b=2" title="a > b's">go</a> <img alt='"x"'>""",
    "broken": "a <b>b<i>c</b> < d </p> <p e & f &amp",
    "lines in tags": "<a\n href='x'\n>go\nthere</a> now",
    "nothing": "<p>&nbsp;</p> \n",
    "code": "Type <code>rm -r x</code> now.",
    "private characters": "a \U000f0000 <b>c</b> \U00100001",
}


@pytest.mark.parametrize("case", HTML)
def test_html_keeps_what_is_no_text(case):
    """By Python's own parser; the translation leaves the text as it is, or shouts."""
    for change in (str, str.upper):
        with serving_with(lambda lines, tell, how=change: [*map(how, lines)]) as ask:
            body = urlencode({"q": HTML[case], "format": "html"})
            kind = {"Content-Type": "application/x-www-form-urlencoded"}
            status, said = ask(body=body, headers=kind)
        asked, got = Kept(HTML[case]), Kept(said["translatedText"])
        assert status == 200 and got.found == asked.found
        assert got.text.split() == change(asked.text).split()


def test_html_in_a_list_and_beside_text():
    heard = []

    def translate(lines, tell):
        heard.extend(lines)
        return [line.upper() for line in lines]

    with serving_with(translate) as ask:
        texts = ["<p>a &amp; b</p>", "c"]
        body = json.dumps({"q": texts, "format": "html"})
        assert ask(body=body)[1]["translatedText"] == ["<p>A &amp; B</p>", "C"]
        body = json.dumps({"q": "<p>a &amp; b</p>", "format": "text"})
        assert ask(body=body)[1]["translatedText"] == "<P>A &AMP; B</P>"
    assert heard == ["a & b", "c", "<p>a &amp; b</p>"]


@pytest.mark.parametrize("start", ["<a '", "<a b=''", "<", "<!--", "<script>", " "])
def test_html_that_never_ends(start):
    """Time that grows with the square of the length would end no test."""
    text = start * (2**19 // len(start))
    lines, join = server_module.split_html(text)
    assert "".join(html.unescape(join(lines)).split()) == "".join(text.split())


@pytest.fixture(scope="module")
def shipped():
    return Translator.from_pretrained("tatoeba-en-de", "cpu")


def test_markup_through_http(shipped):
    """By the model that ships, as text by a client that exists, as HTML by hand."""
    site, mail = "https://example.org/a?b=1&c=2", "help@example.org"
    with serving_with(functools.partial(shipped, beam_size=1)) as ask:
        api = LibreTranslateAPI(address_of(ask))
        said = api.translate(f"Please visit {site} today. I know {{name}}.", "en", "de")
        assert site in said.split("{name}")[0] and "besuch" in said
        said = f"Please write to {mail}. The <b>house</b> is old."
        said = api.translate(said, "en", "de")
        assert mail in said and "<b>Haus</b>" in said
        page = (
            f"<p>The <b>house</b> is old &amp; {{name}} is tired.</p><p>See {mail}.</p>"
        )
        body = json.dumps({"q": page, "format": "html"})
        said = ask(body=body)[1]["translatedText"]
    assert said.startswith("<p>Das <b>Haus</b> ist alt") and "{name}" in said
    assert re.fullmatch(r"<p>.*</p><p>[^<>]*help@example\.org[^<>]*</p>", said)
    assert "&" not in said.replace("&amp;", "")


def test_its_description_is_of_what_it_answers(served):
    """Every path of the OpenAPI description is there, and none is missing."""
    status, told = served("GET", "/openapi.json")
    assert status == 200 and told["openapi"].startswith("3.")
    for path, methods in told["paths"].items():
        for method in methods:
            asked = served(method.upper(), path, b'{"q": "ab"}')
            assert str(asked[0]) in methods[method]["responses"]
    schema = told["paths"]["/translate"]["post"]["responses"]["200"]["content"]
    wanted = schema["application/json"]["schema"]["required"]
    assert set(wanted) <= set(served(body=b'{"q": "ab"}')[1])


def test_a_page_to_try_it(browser):
    with serving_with(lambda lines, tell: [line[::-1] for line in lines]) as ask:
        page = browser.new_page()
        wrong = []
        page.on("pageerror", lambda error: wrong.append(error))
        page.goto(address_of(ask))
        assert page.title() == "Translate English to German"
        page.get_by_label("Text in English").fill("ab\n\ncd <b>")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.get_by_text(">b< dc").wait_for()
        assert page.get_by_role("status").inner_text() == "ba\n\n>b< dc"
        assert not wrong
        page.close()


# --- many at once ---------------------------------------------------------------------


def test_each_gets_its_own_whoever_asks_beside_it():
    calls, first, go = [], threading.Event(), threading.Event()

    def translate(lines, tell):
        calls.append(lines)
        if not first.is_set():
            first.set()
            assert go.wait(600)
        if "odd" in lines:
            tell(Note("is odd", [lines.index("odd") + 1]))
        if "fail" in lines:
            raise RuntimeError("no memory")
        return [line[::-1] for line in lines]

    texts = ["ab", "odd", "fail", ["cd", "ef"]]
    with serving_with(translate) as ask, ThreadPoolExecutor(5) as people:
        slow = people.submit(ask, body=b'{"q": "slow"}')
        assert first.wait(600)
        others = [
            people.submit(ask, body=json.dumps({"q": text}).encode()) for text in texts
        ]
        go.set()
        assert slow.result() == (200, {"translatedText": "wols"})
        answers = [other.result() for other in others]
    assert answers[0] == (200, {"translatedText": "ba"})
    assert answers[1] == (200, {"translatedText": "ddo", "notes": ["line 1 is odd"]})
    assert answers[2] == (500, {"error": "RuntimeError: no memory"})
    assert answers[3] == (200, {"translatedText": ["dc", "fe"]})
    assert calls[0] == ["slow"]


def test_requests_that_come_together_run_together():
    """A note goes to its own; if one fails, each runs by itself; a batch ends."""
    calls = []

    def translate(lines, tell):
        calls.append(len(lines))
        if "odd" in lines:
            tell(Note("is odd", [i for i, s in enumerate(lines, 1) if s == "odd"]))
        if "fail" in lines:
            raise RuntimeError("no memory")
        return [line[::-1] for line in lines]

    async def asked_at_once(requests):
        together = server_module.Together(translate)
        asked = (together(lines) for lines in requests)
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert together.running is None and not together.waiting
        return found

    def ask(requests):  # in a thread: a browser may have its own loop in this one
        with ThreadPoolExecutor(1) as other:
            return other.submit(asyncio.run, asked_at_once(requests)).result()

    assert ask([["ab"], ["cd", "ef"]]) == [
        (["ba"], []),
        (["dc", "fe"], []),
    ]
    assert calls == [3]
    calls.clear()
    found = ask([["odd"], ["cd", "odd", "odd"], ["ab"]])
    odd = ["line 1 is odd"], ["line 2 is odd (and 3)"]
    assert found == [(["ddo"], odd[0]), (["dc", "ddo", "ddo"], odd[1]), (["ba"], [])]
    assert calls == [5]
    calls.clear()
    found = ask([["ab"], ["cd", "odd"], ["fail"]])
    assert found[:2] == [(["ba"], []), (["dc", "ddo"], ["line 2 is odd"])]
    assert isinstance(found[2], RuntimeError) and calls == [4, 1, 2, 1]
    calls.clear()
    ask([["ab"] * 100] * 5)
    assert calls == [200, 200, 100]


@pytest.mark.corpora
def test_many_ask_at_once(engine):
    texts = sentences(24)
    bodies = [json.dumps({"q": text}).encode() for text in texts]
    wanted = [(200, {"translatedText": engine([text])[0]}) for text in texts]
    with serving_with(engine) as ask, ThreadPoolExecutor(8) as people:
        assert list(people.map(lambda body: ask(body=body), bodies)) == wanted


def test_five_hundred_come_before_the_first_is_served(engine):
    """All of them are let in and answered, each with its own."""
    texts = [f"I have {i} brothers." for i in range(500)]
    server = server_module.translation_server(functools.partial(engine, beam_size=1))
    with contextlib.ExitStack() as stack:
        people = []
        for text in texts:
            one = socket.create_connection(server.server_address, timeout=1800)
            people.append(stack.enter_context(one))
            body = json.dumps({"q": text}).encode()
            one.sendall(HEAD % len(body) + body)
            one.settimeout(1800)
        server.start()
        answers = [
            b"".join(iter(lambda one=one: one.recv(2**16), b"")) for one in people
        ]
    server.stop()
    found = [json.loads(answer.partition(b"\r\n\r\n")[2]) for answer in answers]
    wanted = engine(texts, beam_size=1)
    assert [one["translatedText"] for one in found] == wanted


def test_a_server_loses_no_text(exact):
    """A page, a second line, emoji: as the translator says it, and what was copied."""
    engine, translator = exact
    told = []
    wanted = translator(ODD, beam_size=1, tell=told.append)
    with serving_with(functools.partial(engine, beam_size=1)) as ask:
        status, content = ask(body=json.dumps({"q": ODD}).encode())
        assert (status, content) == (200, {"translatedText": wanted, "notes": told})
        text = "\n".join([*MANY, "", "😀 😀"])
        content = ask(body=json.dumps({"q": text}).encode())[1]
    found = content["translatedText"].split("\n")
    assert found == translator([*MANY, "", "😀 😀"], beam_size=1, tell=print)
    assert content["notes"] == [
        "line 17 is mostly characters that the model has not learned: copied"
    ]


def test_the_benchmark_runs(tmp_path):
    """benchmarks/serving.py --quick: a server of CTranslate2 alone says the same."""
    serving.main(["--quick", "--out", str(tmp_path / "record.json")])
    record = json.loads((tmp_path / "record.json").read_text("utf-8"))
    names = {"ours torch", "ours float32", "plain float32"}
    assert record["same_by_greedy_search"] == dict.fromkeys(names, 1.0)
    assert [(one["threads"], one["clients"]) for one in record["cells"]] == [
        (1, 1),
        (1, 8),
    ]
    for one in record["cells"]:
        assert one["servers"].keys() == names
        assert one["servers"]["ours float32"]["same_as_torch"] == 1
        ratio = one["times_peer"]["plain float32"]
        assert 0 < ratio["low"] <= ratio["ratio"] <= ratio["high"]


def test_the_benchmark_says_why_a_server_does_not_answer(tmp_path):
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    server = serving.Server(command, tmp_path / "log", {})
    with pytest.raises(RuntimeError, match="does not answer: no such model"):
        server.ready()


def test_the_benchmark_gives_each_translation_to_its_text(served):
    port, texts = served.keywords["address"][1], [f"text {n}" for n in range(50)]
    found = serving.load(port, texts, clients=7)
    assert found["found"] == [text[::-1] for text in texts]
    assert all(0 < wait <= found["seconds"] for wait in found["waits"])
    with pytest.raises(RuntimeError, match="'fail' is answered by .*no memory"):
        serving.load(port, ["fail"], clients=1)


def test_answers_leave_at_once():
    """Each connection has TCP_NODELAY: none waits for the client's acknowledgment."""
    with server_module.listen_at("127.0.0.1", 0) as listener:
        with socket.create_connection(listener.getsockname()):
            accepted, _ = listener.accept()
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
