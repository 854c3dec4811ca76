"""Chapter 01 in a browser: its cells are changed, run, stopped, checked and reset."""

import contextlib
import io
import json
import re

import pytest
from built import HTML
from conftest import UNSEEN
from looks import AT_REST, LOOK, OVERFLOW, STANDARD
from test_live import exercises, live_cells, live_runner, plain_outputs

PAGE = "notebooks/01_hello.html"


@pytest.fixture(scope="module", autouse=True)
def there():
    if not (HTML / "_static/pyodide").exists():
        pytest.skip(
            f"{UNSEEN}: npm brought no Pyodide, so no code runs in the built pages"
        )


FIRST = "Wq = [["  # the cell that the six steps begin with
SHOWN = "Q = matmul(X, Wq)"  # one that prints what comes of it
PATIENCE = 300_000  # milliseconds until Python is loaded, on a busy machine
LIGHT_PAGE = 1_500_000  # bytes, without what the first Run loads


@pytest.fixture(scope="module")
def site(site):
    """Chapter 01 in the built book."""
    return f"{site}/{PAGE}"


class Reader:
    """A person at the page: what they see, and what goes wrong meanwhile."""

    def __init__(self, browser, address, **how):
        how = {"viewport": {"width": 1300, "height": 900}} | how
        self.context = browser.new_context(**how)
        self.troubles, self.asked = [], []
        self.context.route(re.compile(r"^https?://(?!127\.0\.0\.1)"), self.outside)
        self.context.on("request", lambda request: self.asked.append(request.url))
        self.context.on("response", self.answered)
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.page.on("console", self.console)
        self.page.on("pageerror", lambda e: self.troubles.append(f"script: {e}"))
        self.page.goto(address)

    def outside(self, route):
        self.troubles.append(f"asks for {route.request.url}")
        route.abort()

    def answered(self, response):
        if response.status >= 400:
            self.troubles.append(f"{response.status}: {response.url}")

    def console(self, message):
        if message.type == "error":
            self.troubles.append(f"console: {message.text}")

    def cell(self, number):
        """All of a cell: editor, buttons and output."""
        return self.page.get_by_role("group", name=f"Live cell {number}", exact=True)

    def editor(self, number):
        return self.page.get_by_label(f"Code of cell {number}", exact=True)

    def button(self, what, number):
        return self.page.get_by_role("button", name=f"{what} cell {number}", exact=True)

    def change(self, number, old, new):
        text = self.editor(number).input_value()
        assert old in text
        self.editor(number).fill(text.replace(old, new))

    def wait(self, number):
        self.page.wait_for_function(
            "n => { const cell = document.querySelector(`#live-${n}`).closest('.cell');"
            " return cell.querySelector('.live-notes p') &&"
            " !cell.querySelector('[aria-disabled]') }",
            arg=number,
        )

    def run(self, number):
        self.button("Run", number).click()
        return self.seen(number)

    def seen(self, number):
        """What a cell printed, its error, and the notes under it."""
        self.wait(number)
        out = self.cell(number).locator(".live-output")
        text, error = out.locator("pre").all()
        notes = out.locator(".live-notes").inner_text()
        return text.text_content(), error.text_content(), notes


@pytest.fixture(scope="module")
def reader(browser, site):
    person = Reader(browser, site)
    yield person
    person.context.close()


@pytest.fixture(autouse=True)
def nothing_goes_wrong(request):
    yield
    if "reader" in request.fixturenames:
        reader = request.getfixturevalue("reader")
        troubles, reader.troubles = reader.troubles, []
        reader.page.evaluate("localStorage.clear()")
        assert not troubles


def cell_with(text):
    """The number of the first cell that holds some text."""
    return next(i for i, cell in enumerate(live_cells(), 1) if text in cell)


def test_python_is_not_loaded_before_the_first_run(reader):
    assert reader.cell(1).is_visible()
    loaded = [url for url in reader.asked if "pyodide" in url or "live.json" in url]
    assert not loaded
    static = [HTML / "_static" / name for name in ("make.js", "live.js", "live.css")]
    assert sum(path.stat().st_size for path in [HTML / PAGE, *static]) < LIGHT_PAGE


def in_short(text):
    """Numbers to twelve digits: the browser's exp differs from ours in the last."""
    return re.sub(r"\d+\.\d{10,}", lambda m: f"{float(m[0]):.12g}", text)


def test_every_cell_prints_what_python_prints(reader):
    cells = live_cells()
    assert reader.page.locator(".live-bar").count() == len(cells)
    shown = [reader.editor(n).input_value() for n in range(1, len(cells) + 1)]
    assert shown == cells
    reader.page.evaluate(
        "document.querySelectorAll('.live-bar button:first-child')"
        ".forEach(button => button.click())"
    )
    for number, wanted in enumerate(plain_outputs(cells), 1):
        text, error, notes = reader.seen(number)
        assert in_short(text) == in_short(wanted) and not error, f"cell {number}"
        assert notes


@pytest.mark.parametrize("width", [1300, 360])
def test_the_texts_lie_over_each_other(reader, width):
    """The colored text and the one to write in have the same size, and none is cut."""
    reader.page.set_viewport_size({"width": width, "height": 900})
    apart = reader.page.evaluate(
        "[...document.querySelectorAll('.live-code')].map(code => {"
        " const [pre, area] = ['pre', 'textarea'].map(t => code.querySelector(t));"
        " return [area.scrollHeight - pre.offsetHeight,"
        "         area.scrollWidth - pre.offsetWidth,"
        "         pre.scrollWidth - pre.offsetWidth,"
        "         code.clientWidth - code.parentElement.clientWidth]; })"
        ".filter(sizes => sizes.some(size => Math.abs(size) > 1))"
    )
    hidden = "article .live [aria-hidden=true]"
    in_the_way = reader.page.locator(f"{hidden}[tabindex='0'], {hidden} button").count()
    reader.page.set_viewport_size({"width": 1300, "height": 900})
    assert not apart and not in_the_way


def test_changed_embeddings_change_the_output(reader):
    first, number, last = map(cell_with, (FIRST, SHOWN, "Z = matmul"))
    before = reader.run(number)[0]
    reader.change(first, "X = [[1, 0, 1, 0]", "X = [[1, 1, 1, 0]")
    assert f"From before your last change in cell {first}" in reader.seen(number)[2]
    cells = live_cells()
    at = first - 1
    cells[at] = cells[at].replace("X = [[1, 0, 1, 0]", "X = [[1, 1, 1, 0]")
    text, error, notes = reader.run(number)
    assert text == plain_outputs(cells[:number])[-1] != before
    assert f"Run first: cells 1–3 (changed by you: cell {first})" in notes
    assert not error
    text, error, notes = reader.run(last)
    assert "AssertionError" in error and "with your change" in notes
    assert "Passed over: asserts" in notes
    reader.button("Reset", first).click()
    reader.button("Reset", number).click()
    assert reader.editor(first).input_value() == live_cells()[at]


def test_reset_brings_text_and_output_back(reader):
    first, number = cell_with(FIRST), cell_with(SHOWN)
    colors = reader.cell(number).locator(".live-code pre").inner_html()
    printed = reader.cell(number).locator(".cell_output")
    reader.change(number, "digits=1", "digits=4")
    assert "0.8000" in reader.run(number)[0] and not printed.is_visible()
    reader.button("Reset", number).click()
    assert printed.is_visible() and "0.8  1.0  1.2" in printed.inner_text()
    assert reader.editor(number).input_value() == live_cells()[number - 1]
    assert reader.cell(number).locator(".live-code pre").inner_html() == colors
    assert not reader.button("Reset", number).is_visible()
    assert reader.page.evaluate("document.activeElement.textContent") == "Run"
    reader.change(first, "Hello", "Bye")
    reader.change(number, "digits=1", "digits=4")
    reader.page.get_by_role("button", name="Reset all cells").click()
    assert reader.editor(first).input_value() == live_cells()[first - 1]
    assert reader.editor(number).input_value() == live_cells()[number - 1]


def test_a_folded_cell_keeps_its_buttons_in_the_fold(reader):
    number = cell_with("def print_table(name")
    fold = reader.cell(number).locator("summary")
    assert not reader.button("Run", number).is_visible()
    fold.click()
    assert "Done" in reader.run(number)[2]
    fold.click()
    assert not reader.button("Run", number).is_visible()
    assert reader.cell(number).locator(".live-notes").is_visible()
    reader.page.get_by_role("button", name="Reset all cells").click()


@pytest.mark.parametrize("exercise", exercises(), ids=lambda e: e.number)
def test_exercise_checked_wrong_and_right(reader, exercise):
    cells = live_cells()
    check = cells.index(exercise.check) + 1
    stub = check - 1
    mark = reader.page.locator(
        f"section[id^='exercise-{exercise.number.replace('.', '-')}-'] .live-mark"
    )
    reader.editor(stub).fill(exercise.stub.replace("...", "return 0"))
    text = reader.run(check)[0]
    assert text.startswith("Not yet: ") and mark.text_content() == "not solved yet"
    assert text == said_by_python(exercise, "return 0")
    reader.editor(stub).fill(exercise.solution)
    reader.button("Run", stub).click()  # runs the check too
    reader.page.wait_for_function(
        "n => document.querySelector(`#live-${n} + .live-output pre`)"
        ".textContent.startsWith('Passed: ')",
        arg=check,
    )
    assert mark.text_content() == "✓ solved"
    assert reader.run(1)[0] == ""  # nothing of the check comes late
    kept = json.loads(reader.page.evaluate("localStorage['literate-exercises']"))
    assert kept[exercise.number] is True


def said_by_python(exercise, body):
    space, screen = {"__name__": "__main__"}, io.StringIO()
    with contextlib.redirect_stdout(screen):
        for text in (exercise.stub.replace("...", body), exercise.check):
            live_runner.run_and_show(text, 0, space)
    return screen.getvalue()


def test_errors_and_missing_modules(reader):
    number = cell_with("scores = matmul(Q")
    reader.editor(number).fill("print('so far')\n1 / 0")
    text, error, notes = reader.run(number)
    assert text == "so far\n"
    assert error.startswith("Traceback (most recent call last):\n")
    assert f'File "<cell {number}>", line 2' in error
    assert error.endswith("ZeroDivisionError: division by zero")
    reader.editor(number).fill("import torch")
    text, error, notes = reader.run(number)
    assert error.endswith("No module named 'torch'") and "Colab" in notes
    reader.editor(cell_with(FIRST)).fill("X = [")
    text, error, notes = reader.run(cell_with(SHOWN))
    assert "NameError" in error
    reader.page.get_by_role("button", name="Reset all cells").click()


def test_a_run_without_end_is_stopped(reader):
    number = cell_with("scores = matmul(Q")
    reader.editor(number).fill("print('on and on')\nwhile True: pass")
    stop = reader.button("Stop", number)
    assert not stop.is_visible()
    reader.button("Run", number).click()
    out = reader.page.locator(f"#live-{number} + .live-output pre").first
    out.get_by_text("on and on").wait_for()
    reader.button("Run", 1).click()  # waits for the other, and is stopped with it
    assert "Waiting" in reader.cell(1).locator(".live-status").text_content()
    stop.click()
    assert "Stopped" in reader.seen(number)[2] and "Stopped" in reader.seen(1)[2]
    assert not stop.is_visible()
    reader.editor(number).fill("while True: print('again')")
    text, error, _notes = reader.run(number)  # in a Python started afresh
    assert error == "Stopped: a cell may print 20,000 characters here, not more."
    assert len(text) == live_runner.LONGEST
    reader.page.get_by_role("button", name="Reset all cells").click()


def test_an_answer_without_end_gets_a_verdict(reader):
    exercise = exercises()[0]
    check = live_cells().index(exercise.check) + 1
    endless = "while True:\n        query = query"
    reader.editor(check - 1).fill(exercise.stub.replace("...", endless))
    text = " ".join(reader.run(check)[0].split())
    assert text.startswith("Not yet: attend does not come to an end")
    assert "`while True:`" in text or "`query = query`" in text
    reader.page.get_by_role("button", name="Reset all cells").click()


def test_keyboard(reader):
    number = cell_with("scores = matmul(Q")
    keys, editor = reader.page.keyboard, reader.editor(number)

    def focused():
        return reader.page.evaluate("document.activeElement.ariaLabel")

    editor.evaluate("area => area.focus()")
    keys.press("Tab")  # nothing was written: Tab goes on, and leaves the text alone
    assert focused() != f"Code of cell {number}"
    assert editor.input_value() == live_cells()[number - 1]
    for _ in range(3):
        if focused() == f"Run cell {number}":
            break
        keys.press("Tab")
    assert focused() == f"Run cell {number}"
    editor.evaluate("area => { area.focus(); area.select(); }")
    keys.type("if True:")
    keys.press("Enter")
    keys.type("print(6 * 7)  # ")
    keys.press("Tab")
    keys.type("here")
    assert editor.input_value() == "if True:\n    print(6 * 7)  #     here"
    spans = reader.cell(number).locator(".live-code pre span").all()
    colors = [(span.get_attribute("class"), span.text_content()) for span in spans]
    assert colors == [
        ("k", "if"),
        ("k", "True"),
        ("mf", "6"),
        ("mf", "7"),
        ("c1", "#     here"),
    ]
    keys.press("Control+Enter")
    assert reader.seen(number)[0] == "42\n"
    assert focused() == f"Code of cell {number}"
    keys.press("Escape")
    assert focused() == f"Run cell {number}"
    keys.press("Enter")
    assert reader.seen(number)[0] == "42\n"
    keys.press("Tab")
    assert focused() == f"Reset cell {number}"
    keys.press("Enter")
    assert editor.input_value() == live_cells()[number - 1]
    editor.evaluate("area => area.focus()")
    keys.press("Shift+Enter")
    assert reader.seen(number)[0] == plain_outputs(live_cells()[:number])[-1]
    keys.press("End")
    keys.type("  ")
    keys.press("Control+z")
    keys.press("Control+z")
    assert editor.input_value() == live_cells()[number - 1]
    reader.button("Reset", number).click()


def test_labels(reader):
    assert reader.run(1)[2]
    out = reader.page.get_by_role("region", name="Output of cell 1", exact=True)
    assert out.get_attribute("aria-live") == "polite"
    hint = reader.editor(1).get_attribute("aria-describedby")
    assert "Escape" in reader.page.locator(f"#{hint}").text_content()
    unnamed = reader.page.evaluate(
        "[...document.querySelectorAll('article .live :is(button, textarea)')]"
        ".filter(e => !e.ariaLabel && !e.textContent).length"
    )
    assert not unnamed


def test_shapes_are_explained_under_the_pointer(reader):
    shape = reader.page.locator("article .live .shape").first
    words = reader.page.locator("#explanation")
    shape.scroll_into_view_if_needed()
    box = shape.bounding_box()
    reader.page.mouse.move(box["x"] + 5, box["y"] + 5)
    words.wait_for(state="visible")
    assert "S: " in words.text_content()
    reader.page.mouse.move(box["x"] + 5, box["y"] - 25)
    words.wait_for(state="hidden")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_narrow_light_and_dark(reader, axe, theme):
    """After runs of each kind: nothing sticks out, everything can be read."""
    page, number = reader.page, cell_with("scores = matmul(Q")
    reader.editor(number).fill("print('wide ' * 60)\n1 / 0")
    reader.run(number)
    reader.run(cell_with(SHOWN))
    check = live_cells().index(exercises()[0].check) + 1
    reader.run(check)
    page.set_viewport_size({"width": 360, "height": 800})
    page.evaluate("theme => document.documentElement.dataset.theme = theme", theme)
    found = page.evaluate(OVERFLOW)
    if axe:
        page.evaluate(f"{axe}; 0")
        page.evaluate(AT_REST)  # colors fade from one theme to the other
        found += page.evaluate(LOOK, [STANDARD, [], "colors", None])
    page.set_viewport_size({"width": 1300, "height": 900})
    page.evaluate("document.documentElement.dataset.theme = 'light'")
    page.get_by_role("button", name="Reset all cells").click()
    assert not found


# --- other readers --------------------------------------------------------------------


def test_remembered_after_reload_and_by_touch(browser, site):
    phone = Reader(
        browser,
        site,
        viewport={"width": 360, "height": 740},
        has_touch=True,
        is_mobile=True,
    )
    exercise = exercises()[2]
    stub = live_cells().index(exercise.check)
    phone.editor(stub).tap()
    phone.editor(stub).fill(exercise.solution)
    run = phone.button("Run", stub + 1)
    assert run.bounding_box()["height"] >= 44
    run.tap()
    assert phone.seen(stub + 1)[0].startswith("Passed: ")
    phone.page.reload()
    assert phone.editor(stub).input_value() == exercise.solution
    status = phone.cell(stub).locator(".live-status")
    assert status.text_content() == "changed by you"
    marks = phone.page.locator(".live-mark")
    assert marks.all_text_contents() == ["✓ solved"]
    assert exercise.title in marks.locator("xpath=..").text_content()
    phone.button("Reset", stub).tap()
    phone.page.reload()
    assert phone.editor(stub).input_value() == exercise.stub
    assert marks.all_text_contents() == ["✓ solved"]
    assert not phone.troubles
    phone.context.close()


def test_without_storage_it_works_as_long_as_the_page_is_open(browser, site):
    private = Reader(browser, "about:blank")
    private.page.add_init_script(
        "Storage.prototype.getItem = Storage.prototype.setItem ="
        " () => { throw new DOMException('denied', 'SecurityError'); };"
    )
    private.page.goto(site)
    first = cell_with(FIRST)
    private.change(first, "Hello", "Bye")
    assert "Bye" in private.cell(first).locator(".live-code pre").text_content()
    assert not [trouble for trouble in private.troubles if "live.js" in trouble]
    private.context.close()


def test_opened_as_a_file_it_says_what_is_missing(browser):
    reader = Reader(browser, (HTML / PAGE).as_uri())
    assert "make serve" in reader.page.locator(".live-about").text_content()
    assert not reader.page.locator(".live-bar").count()
    assert not reader.troubles
    reader.context.close()


def test_without_scripts_the_page_says_so(browser, site):
    reader = Reader(browser, site, java_script_enabled=False)
    assert "With JavaScript" in reader.page.locator(".live-about").text_content()
    assert not reader.page.get_by_role("button", name="Run cell 1").count()
    reader.context.close()
