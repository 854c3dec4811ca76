"""The front page in a browser: its scenes, its translator, its size and its words."""

import re
from itertools import pairwise

import bs4
import pytest
from built import HTML, need_the_book
from conftest import UNSEEN
from looks import AT_REST, HEAVIEST, LOOK, OVERFLOW, PREPARE, STANDARD, weight
from test_live_pages import Reader

from transformer_lib.runs import read_evidence

need_the_book()

PAGE = "book/welcome"
MOST_WORDS = 1500
PHONE = {"width": 390, "height": 844}
STAGE = ".essay-stage svg"
# What is on the stage: the texts that can be seen, in their order.
SHOWN = """() => [...document.querySelectorAll('.essay-stage svg text')]
  .filter(text => +(text.getAttribute('opacity') ?? 1) > .3)
  .map(text => text.textContent)"""
SWIPE = """([from, to]) => {
  const target = document.querySelector('.essay-stage');
  const touch = x => new Touch({ identifier: 1, target, clientX: x, clientY: 200 });
  const tell = (name, touches) =>
    target.dispatchEvent(new TouchEvent(name, { bubbles: true, ...touches }));
  tell('touchstart', { touches: [touch(from)] });
  tell('touchend', { changedTouches: [touch(to)] });
}"""
SETTLED = """() => new Promise(done => {
  let before, same = 0;
  const look = () => {
    const now = document.querySelector('.essay-stage svg').innerHTML + scrollY;
    same = now === before ? same + 1 : 0;
    before = now;
    same > 25 ? done() : setTimeout(look, 100);
  };
  look();
})"""


@pytest.fixture(scope="module")
def soup():
    return bs4.BeautifulSoup((HTML / f"{PAGE}.html").read_text("utf-8"), "html.parser")


@pytest.fixture
def visit(browser, site):
    """Open the page as somebody would; scripts must not fail in it."""
    opened = []

    def opens(still=True, **how):
        motion = "reduce" if still else "no-preference"
        reader = Reader(browser, f"{site}/{PAGE}.html", reduced_motion=motion, **how)
        opened.append(reader)
        return reader

    yield opens
    for reader in opened:
        reader.context.close()
        assert not reader.troubles


def beats(page) -> int:
    return page.locator(".beat").count()


def at(page) -> int:
    """The step that is shown, from 1."""
    return int(page.locator(".essay-where").text_content().split()[0])


# --- what is written ------------------------------------------------------------------


def test_it_is_short(soup):
    """All text but that of pictures, which are told in words of their own."""
    article = bs4.BeautifulSoup(str(soup.find("article")), "html.parser")
    for other in article.select("svg, script, style, .headerlink"):
        other.extract()
    words = re.findall(r"\w[\w’'.,]*", article.get_text(" "))
    assert 600 < len(words) < MOST_WORDS


def test_every_scene_has_a_picture_for_each_width_and_says_it_in_words(soup):
    scenes = soup.select(".scene")
    assert 11 <= len(scenes) <= 14
    for scene in scenes:
        pictures = scene.select(".essay-still svg")
        assert [set(svg["class"]) - {"essay-svg"} for svg in pictures] == [
            {"wide"},
            {"narrow"},
        ]
        assert all(len(svg["aria-label"]) > 30 for svg in pictures)
        assert scene.find_parent("section").h2


def test_the_model_that_ships_is_quoted(soup):
    record, other = read_evidence("sentence"), read_evidence("essay")
    text = " ".join(soup.find("article").get_text(" ").split())
    assert record["target"]["text"] in text
    wrong = [row["translation"] for row in other["tried"]]
    shown = [
        li.select_one(".wrote").get_text() for li in soup.select(".essay-fails li")
    ]
    assert len(shown) >= 4 and set(shown) <= set(wrong)


def test_where_to_go_next(soup):
    links = [a["href"] for a in soup.select("article a[href]")]
    for place in ("notebooks/01_hello.html", "contents.html", "colab.research.google"):
        assert any(place in link for link in links), place
    assert "pip install" in soup.find("article").get_text()


# --- without scripts ------------------------------------------------------------------


@pytest.mark.parametrize("width", [1280, 390])
def test_without_scripts_each_scene_is_a_still_picture(visit, width):
    size = {"width": width, "height": 800}
    page = visit(java_script_enabled=False, viewport=size).page
    assert page.locator(".essay-stage").count() == 0
    for scene in page.locator(".scene").all():
        seen = [svg for svg in scene.locator("svg").all() if svg.is_visible()]
        assert len(seen) == 1
        box = seen[0].bounding_box()
        assert box["width"] > 300 and box["x"] >= 0
        assert box["x"] + box["width"] <= width
    assert page.locator(".beat").first.is_visible()


# --- stepping -------------------------------------------------------------------------


def test_by_keyboard_to_the_end_and_back(visit):
    page = visit().page
    last = beats(page)
    seen = [page.locator(STAGE).inner_html()]
    for step in range(2, last + 1):
        page.keyboard.press("ArrowRight")
        assert at(page) == step
        seen.append(page.locator(STAGE).inner_html())
        now = page.locator(".beat.now")
        assert now.count() == 1
        page.wait_for_timeout(120)
        top = now.evaluate("e => e.getBoundingClientRect().top")
        assert 0 < top < 900, "the text of the step is in the window"
    page.keyboard.press("ArrowRight")
    assert at(page) == last
    assert all(a != b for a, b in pairwise(seen)), "each step shows something"
    page.keyboard.press("ArrowLeft")
    assert at(page) == last - 1


def test_keys_in_a_field_stay_there(visit):
    page = visit().page
    before = at(page)
    page.evaluate(
        "() => document.querySelector('.essay-flow').append("
        "Object.assign(document.createElement('input'), { id: 'other' }))"
    )
    page.locator("#other").evaluate("e => e.focus({ preventScroll: true })")
    page.keyboard.press("ArrowRight")
    assert at(page) == before


def test_buttons_and_what_is_read_aloud(visit):
    page = visit().page
    page.get_by_role("button", name="Next step").click()
    assert at(page) == 2
    text = page.locator(".beat.now").text_content()
    assert page.locator(".essay-stage [aria-live]").text_content() == text
    page.get_by_role("button", name="Previous step").click()
    assert at(page) == 1
    assert page.locator(STAGE).get_attribute("aria-hidden") == "true"
    told = page.locator(".essay-still svg[role=img]")
    assert told.count() == 2 * page.locator(".scene").count()


def test_by_scrolling(visit):
    page = visit().page
    last = beats(page)
    for place in (last // 2, last - 1, 0):
        page.locator(".beat").nth(place).evaluate(
            "e => scrollBy({ top: e.getBoundingClientRect().top - innerHeight * .4,"
            " behavior: 'instant' })"
        )
        page.wait_for_timeout(150)
        assert at(page) == place + 1


def test_by_touch(visit):
    reader = visit(viewport=PHONE, has_touch=True, is_mobile=True)
    page = reader.page
    page.get_by_role("button", name="Next step").tap()
    assert at(page) == 2
    page.wait_for_timeout(300)
    page.evaluate(SWIPE, [300, 120])
    assert at(page) == 3
    page.wait_for_timeout(300)
    page.evaluate(SWIPE, [120, 300])
    assert at(page) == 2
    page.evaluate(SWIPE, [120, 140])
    assert at(page) == 2, "a tap is no swipe"


# --- moving ---------------------------------------------------------------------------


def test_it_moves_and_comes_to_the_still_picture(visit):
    """The number of a score counts up; in the end the last frame is there."""
    moving, still = visit(still=False).page, visit().page
    for page in (moving, still):
        for _ in range(6):  # the query goes from key to key
            page.keyboard.press("ArrowRight")
    first = moving.evaluate(SHOWN)
    assert first != still.evaluate(SHOWN), "it goes there step by step"
    moving.evaluate(SETTLED)
    assert sorted(moving.evaluate(SHOWN)) == sorted(still.evaluate(SHOWN))
    moving.get_by_role("button", name="Play again").click()
    moving.wait_for_timeout(300)
    assert moving.evaluate(SHOWN) != still.evaluate(SHOWN)


def test_with_reduced_motion_nothing_moves(visit):
    page = visit().page
    for _ in range(beats(page) - 1):
        page.keyboard.press("ArrowRight")
        a = page.locator(STAGE).inner_html()
        page.wait_for_timeout(60)
        assert page.locator(STAGE).inner_html() == a


# --- how it looks ---------------------------------------------------------------------


@pytest.mark.parametrize("width", [390, 820, 1280])
def test_nothing_slides_sideways_and_the_stage_stays(visit, width):
    page = visit(viewport={"width": width, "height": 844}).page
    for _ in range(beats(page) - 1):
        page.keyboard.press("ArrowRight")
        page.wait_for_timeout(80)
        assert not page.evaluate(OVERFLOW)
        box = page.locator(STAGE).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width
        assert box["y"] > -1 and box["y"] + box["height"] < 844


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_axe(visit, axe, theme, width):
    page = visit(viewport={"width": width, "height": 844}, color_scheme=theme).page
    page.evaluate("t => { document.documentElement.dataset.theme = t }", theme)
    page.evaluate(PREPARE)
    page.evaluate(AT_REST)
    if axe:
        page.evaluate(f"{axe}; 0")
        assert page.evaluate(LOOK, [STANDARD, [], "all", None]) == []


def test_what_loads_first(visit, site):
    """Under 1.5 MB, and nothing of the model."""
    reader = visit()
    reader.page.wait_for_load_state("networkidle")
    loaded = weight(set(reader.asked), site)
    assert sum(loaded.values()) < HEAVIEST, loaded
    assert not any("onnx" in name or "weights" in name for name in reader.asked)
    assert not any("translator" in name for name in reader.asked)


# --- the translator -------------------------------------------------------------------


@pytest.fixture
def need_the_model():
    if not (HTML / "_static/translator-model/manifest.json").exists():
        pytest.skip(
            f"{UNSEEN}: npm brought no ONNX Runtime, so the built page has no model"
        )


def test_the_translator_loads_on_focus_and_draws_what_it_looks_at(
    visit, need_the_model
):
    reader = visit()
    page = reader.page
    field = page.get_by_label("Your English sentence")
    words = page.locator(".essay-lines [role=button]")
    record, other = read_evidence("sentence"), read_evidence("essay")
    assert re.sub(r"\W", "", record["target"]["text"]) == re.sub(
        r"\W", "", "".join(words.all_text_contents())
    )
    assert not any("weights" in address for address in reader.asked)
    field.focus()
    page.wait_for_function(
        "() => document.querySelector('.essay-status').textContent === 'Ready.'"
    )
    assert any("weights" in address for address in reader.asked)
    wanted = other["owned"][1]  # his cat
    field.fill(wanted["text"])
    page.keyboard.press("Enter")
    page.wait_for_function(
        "text => document.querySelector('.essay-live [aria-live=polite]')"
        ".textContent === text",
        arg=wanted["translation"],
    )
    assert words.count() == len(re.findall(r"\w+|[.]", wanted["translation"]))
    lit = ".essay-lines .across:not(.faint)"
    cat = words.filter(has_text="Katze")
    cat.focus()
    assert "cat" in cat.get_attribute("aria-label").split("looks at ")[1].split()[0]
    katze = page.locator(lit).count()
    assert 1 <= katze < page.locator(".essay-lines .across").count()
    page.keyboard.press("ArrowLeft")
    assert "seine" in page.evaluate("document.activeElement.textContent")
