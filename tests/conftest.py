"""What all tests share: hypothesis's settings, a browser, the built book in it."""

import functools
import http.server
import re
import shutil
import threading
import warnings

import pytest
from built import HTML
from hypothesis import settings

# A slow moment of the machine is no failure.
settings.register_profile("book", deadline=None)
settings.load_profile("book")

CANDIDATES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, CANDIDATES)), None)
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run
--disable-background-networking --disable-component-update --disable-sync""".split()
# Formulas are typeset by MathJax from its usual place; here it is not waited for.
MATHJAX = "https://cdn.jsdelivr.net/npm/mathjax@"


@pytest.fixture(scope="module")
def browser(request):
    """Chromium, where there is one; else its tests are skipped, and it is said."""
    if BROWSER is None:
        name = request.module.__name__
        warnings.warn(f"No Chromium: {name} does NOT look at anything.", stacklevel=1)
        pytest.skip("no Chromium to look at the pages with")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield chromium
        chromium.close()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def translate_path(self, path):
        # The page for addresses that lead nowhere knows where the book will be.
        return super().translate_path(path.removeprefix("/literate-transformer"))

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def site():
    """The built book, served on this machine."""
    handler = functools.partial(Quiet, directory=str(HTML))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def window(browser, site):
    """One page for all tests, and what goes wrong in it."""
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    troubles = []

    def answer(route):
        address = route.request.url
        if address.startswith(MATHJAX):
            route.fulfill(status=200, content_type="text/javascript", body="")
        else:
            troubles.append(f"asks for {address}")
            route.abort()

    def console(message):
        if message.type == "error":
            troubles.append(f"console: {message.text}")

    def response(got):
        if got.status >= 400:
            troubles.append(f"{got.status}: {got.url}")

    # Only what leaves this machine comes by here: the rest is not held up.
    page.route(re.compile(r"^https?://(?!127\.0\.0\.1)"), answer)
    page.on("console", console)
    page.on("pageerror", lambda error: troubles.append(f"script: {error}"))
    page.on("response", response)
    yield page, troubles
