"""The tour: eight numbers of the model that ships, each the sum that it came from."""

import re
import sys

import pytest
from built import HTML, ROOT, Page, need_the_book

sys.path.append(str(ROOT / "book" / "_ext"))
import through
import tour

need_the_book()
NAME = "book/through_the_model"


def test_each_stop_is_the_sum_of_its_terms():
    """Stops 1 and 7 show shares, which sum to one."""
    for number, stop in enumerate(tour.chain(), start=1):
        total = sum(term for _, term in stop["terms"])
        if number == 1:
            assert 0 < total <= 1 and stop["value"] == stop["terms"][0][1]
        else:
            wanted = 1 if number == 7 else stop["value"]
            assert total == pytest.approx(wanted, abs=2e-4), stop["say"]
        assert stop["chosen"] < tour.SHOWN


def test_each_number_of_a_path_is_a_factor_of_the_one_before():
    """As the figure opens them: a step reads the step that follows in the path."""
    trace, _ = through.sentence_trace()
    steps = {step["name"]: step for step in trace.steps}
    for stop in tour.chain():
        for (name, _), (below, at) in zip(stop["path"], stop["path"][1:], strict=False):
            step = steps[name]
            read = {step.get(key) for key in ("x", "y", "weights", "v", "q", "k")}
            assert below in read, (name, below)
            assert len(at) == trace.numbers[below].dim()


def test_what_the_sentences_say_of_the_numbers():
    facts = [stop["facts"] for stop in tour.chain()]
    assert facts[0]["value"] > 0.5, "takes nearly all"
    assert facts[3]["part"] > 0.5 * facts[3]["value"], (
        "its word brings the largest part"
    )
    assert facts[1]["number"] and facts[7]["word"] == facts[3]["word"] == "The"


def test_the_page_says_the_numbers_of_the_model():
    page, said = Page(NAME).html, tour.chain()
    for stop in said:
        assert f"= {tour.written(stop['value'])}</strong>" in page
    for anchor, boxes in tour.STOPS.items():
        assert f'id="{anchor}"' in page
        assert all(f'data-box="{box}"' in page for box in boxes)


@pytest.mark.parametrize("chapter", tour.PLACES)
def test_a_chapter_says_where_it_is(chapter):
    lit, stops = tour.PLACES[chapter]
    page = Page(f"notebooks/{chapter}").html
    found = re.search(r'<aside class="you-are-here".*?</aside>', page, re.DOTALL)[0]
    assert set(re.findall(r'data-box="([\w-]+)" class="lit"', found)) == set(lit)
    links = re.findall(r'through_the_model\.html#(stop-(\d)[\w-]*)"', found)
    assert [int(number) for _, number in links] == stops
    assert all(anchor in tour.STOPS for anchor, _ in links)
    for chapter_file in re.findall(r'data-box="[\w-]+"[^>]* href="([^"]+)"', found):
        assert (HTML / "notebooks" / chapter_file).exists()


def test_a_stop_opens_its_number_and_lights_the_map(window, site):
    page, _ = window
    page.goto(f"{site}/{NAME}.html")
    page.locator("[data-open]:visible").first.wait_for()
    stop = tour.chain()[3]
    page.locator("[data-open]").nth(3).click()
    title = page.locator(".through-sum h4")
    title.wait_for()
    assert tour.written(stop["value"]) in title.text_content()
    lit = page.locator(".tour-map .lit")
    assert [box.get_attribute("data-box") for box in lit.all()] == ["dec-across"]
    assert page.evaluate("document.activeElement.tagName") == "H4"
    ways = page.locator(".through-way button")
    assert ways.count() == len(stop["path"]) - 1


def test_without_scripts_the_tour_is_all_there(browser, site):
    page = browser.new_context(java_script_enabled=False).new_page()
    page.goto(f"{site}/{NAME}.html")
    assert page.locator(".tour-sum").count() == 8
    assert not page.locator("[data-open]:visible").count()
    page.context.close()
