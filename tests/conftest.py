"""What all tests share: hypothesis's settings, a browser, the built book in it."""

import functools
import os
import re
import sys
import warnings

import pytest
import real_text
from browser import HOW, find, served
from built import AXE, HTML, ROOT, wait_for_the_book
from hypothesis import settings

pytest.register_assert_rewrite("looks")

real_text.hide()

# A slow moment of the machine is no failure.
settings.register_profile("book", deadline=None)
settings.load_profile("book")

# What is skipped for want of a browser, or of what npm brings into the pages, says so
# in these words, and is counted at the end.
UNSEEN = "not looked at in a browser"
# With this, such a test is a failure of the whole run (`.ci/run`).
NEEDED = os.environ.get("LITERATE_BROWSER") == "needed"
# Texts are compared with torch's, also where a faster engine is installed.
os.environ["TRANSFORMER_LIB_ENGINE"] = "torch"
# Formulas are typeset by MathJax from its usual place; here it is not waited for.
MATHJAX = "https://cdn.jsdelivr.net/npm/mathjax@"


# The files that take longest begin first, so that none of them is left to one worker in
# the end; those that read the built book after some that do not, while it is built.
LONGEST = (
    "test_queue",
    "test_wheel",
    "test_export",
    "test_readme",
    "test_pages",
    "test_how_do_i",
    "test_speculative",
    "test_api_pages",
    "test_command_line",
    "test_devices",
    "test_server",
    "test_translator",
    "test_live_pages",
    "test_ablations",
    "test_resume",
    "test_parsing",
    "test_engines",
    "test_prepared",
    "test_diagnosis",
    "test_parity",
    "test_prose",
    "test_translator_page",
    "test_killed",
    "test_scale",
    "test_training",
)


# Files and tests that take long, one a line; `make check` leaves them out.
SLOW = (ROOT / "tests" / "slow.txt").read_text("utf-8").split("\n")
SLOW = frozenset(line for line in SLOW if line and not line.startswith("#"))

# What a test of the built book takes from tests/built.py.
OF_THE_BOOK = ("HTML", "Page", "need_the_book")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items):
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))
    for item in items:
        test = f"{item.path.name}::{item.originalname}"
        if {item.path.name, test} & SLOW:
            item.add_marker("slow")
        if any(hasattr(item.module, name) for name in OF_THE_BOOK):
            item.add_marker("pages")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    with real_text.shown(item):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item):
    """Tests that read the built book wait for it."""
    if item.get_closest_marker("pages") and not wait_for_the_book():
        # `make test` fails, and ends with the reason.
        item.add_marker(pytest.mark.skip("the pages could not be built"))
    with real_text.skipped_without_text(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    with real_text.skipped_without_text(item):
        return (yield)


@pytest.fixture(autouse=True)
def no_text(request):
    """What depends on real text is marked so: it runs with it and without."""
    yield
    asked = not real_text.is_marked(request.node) and real_text.was_asked_for()
    assert not asked, "this asks for real text, and may not: mark it `corpora`"


# What is missing, the words of a skipped test that wanted it, whether it is needed.
WANTED = [
    (f"a browser. {HOW}", UNSEEN, NEEDED),
    (
        "real text. Name a mirror: TRANSFORMER_LIB_MIRROR",
        real_text.UNREAD,
        real_text.NEEDED,
    ),
]


def count_skipped(terminalreporter, words: str) -> int:
    """How many tests were skipped in these words."""
    skipped = terminalreporter.stats.get("skipped", [])
    return sum(words in str(report.longrepr) for report in skipped)


def pytest_sessionfinish(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    for _, words, needed in WANTED:
        if needed and reporter and count_skipped(reporter, words):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter):
    for what, words, _ in WANTED:
        if count := count_skipped(terminalreporter, words):
            line = f"{count} TEST(S) DID NOT RUN for want of {what}."
            terminalreporter.write_line(line, red=True, bold=True)


@pytest.fixture(autouse=True)
def gradients():
    """No test leaves gradients switched off for those that come after it."""
    yield
    torch = sys.modules.get("torch")
    assert torch is None or torch.is_grad_enabled()


@pytest.fixture(scope="session")
def found_browser():
    """The browser of this machine, or from npm, or from Playwright: book/_tools."""
    found = find()
    if found is None:
        pytest.skip(f"{UNSEEN}: there is none")
    return found


def patient(opens):
    """What opens a page, or several, which then wait for a busy machine."""

    @functools.wraps(opens)
    def wrapper(**how):
        opened = opens(**how)
        opened.set_default_timeout(300_000)  # milliseconds
        return opened

    return wrapper


@pytest.fixture(scope="module")
def browser(found_browser):
    """The browser, running; where there is none, its tests are skipped and counted."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = found_browser.launch(playwright)
        for name in ("new_context", "new_page"):
            setattr(chromium, name, patient(getattr(chromium, name)))
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def site():
    """The built book, served on this machine."""
    with served(HTML) as address:
        yield address


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
    return page, troubles


@pytest.fixture(scope="module")
def axe():
    """axe-core's script; empty where npm brought none, and it is said."""
    if AXE.exists():
        return AXE.read_text("utf-8")
    words = "No axe-core from npm: pages are NOT held against WCAG."
    if NEEDED:
        pytest.fail(words)
    warnings.warn(words, stacklevel=1)
    return ""
