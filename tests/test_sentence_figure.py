"""The figure of trained attention: its numbers, and what it does in a browser."""

import pytest
import torch
from figures import OVERFLOW, check_figure, contents, said, shown
from looks import AT_REST

from transformer_lib.figures.hello import (
    attention_figure,
    between_words,
    read_head,
    read_sentence,
    sides_of,
    steps_figure,
)
from transformer_lib.hello import attention
from transformer_lib.looking_inside import AttentionMaps
from transformer_lib.runs import read_evidence

MARKS = [(".line", "stroke")]
THICKEST = """svg => [...svg.querySelectorAll(".line")].map(line => [
  parseFloat(getComputedStyle(line).strokeWidth), +getComputedStyle(line).opacity,
  line.getAttribute("class")]).sort((a, b) => b[0] * b[1] - a[0] * a[1])[0][2]"""


@pytest.fixture(scope="module")
def record():
    return read_sentence()


@pytest.fixture(scope="module")
def figure(record):
    return attention_figure(record)


def test_the_record_is_the_one_that_ships(record):
    assert record == read_evidence("sentence")


def test_words_are_put_together_as_chapter_27_does(record):
    weights = {
        kind: [torch.tensor(layer)[None] for layer in layers]
        for kind, layers in record["attention"].items()
    }
    sides = (record[side]["pieces"] for side in ("source", "target"))
    wanted = AttentionMaps(*sides, weights).by_words().weights
    for kind in ("encoder", "decoder"):
        _, rows, _, columns = sides_of(record, kind)
        for layer, heads in enumerate(record["attention"][kind]):
            ours = [between_words(head, rows, columns) for head in heads]
            torch.testing.assert_close(torch.tensor([ours]), wanted[kind][layer])


def test_a_query_of_the_cross_attention_is_named_by_what_it_writes():
    """Four places that read (start), a, b1, b2, and write a, b1, b2, (end)."""
    record = {
        "source": {"pieces": ["▁x", "</s>"], "words": [[0], [1]]},
        "target": {"pieces": ["<s>", "▁a", "▁b", "c"], "words": [[0], [1], [2, 3]]},
    }
    queries, rows, keys, columns = sides_of(record, "cross")
    assert queries == ["a", "bc", "(end)"] and keys == ["x", "(end)"]
    assert rows == [[0], [1, 2], [3]]
    weights = [[1.0, 0.0], [0.5, 0.5], [0.3, 0.7], [0.0, 1.0]]
    assert between_words(weights, rows, columns) == [[1, 0], [0.4, 0.6], [0, 1]]


def test_it_begins_with_the_head_that_was_chosen(record, figure):
    state = contents(figure)["state"]
    head = record["head"]
    assert state == {"kind": 0, "layer": head["layer"] - 1, "head": head["head"] - 1}
    layers, heads = (record["sizes"][name] for name in ("num_layers", "num_heads"))
    for part in contents(figure)["data"]:
        assert len(part["weights"]) == layers
        assert all(len(layer) == heads for layer in part["weights"])
        rows = [row for layer in part["weights"] for head in layer for row in head]
        assert rows and all(abs(sum(row) - 1000) <= 8 for row in rows)


def test_it_answers(browser, figure, tmp_path):
    check_figure(browser, tmp_path, figure, MARKS)


@pytest.mark.parametrize("way", ["hover", "focus", "tap"])
def test_the_thickest_line_of_a_word_leads_where_it_looks_most(
    browser, record, figure, tmp_path, way
):
    queries, rows, keys, columns = sides_of(record, "encoder")
    head = record["head"]
    weights = record["attention"]["encoder"][head["layer"] - 1][head["head"] - 1]
    table = between_words(weights, rows, columns)
    with shown(browser, tmp_path, figure, has_touch=True) as page:
        for i, row in enumerate(table):
            word = page.locator(f".asks-{i}")
            getattr(word, way)()
            page.evaluate(AT_REST)
            most = row.index(max(row))
            line = page.locator("svg.sentence").evaluate(THICKEST)
            assert line.split()[1:] == [f"from-{i}", f"to-{most}"]
            assert said(page).startswith(f"{queries[i]} looks at: {keys[most]} ")
            share = page.locator(f".share.from-{i}:visible").all_text_contents()
            percent = int(round(1000 * row[most]) / 10 + 0.5)  # as JavaScript rounds
            assert f"{percent} %" in share


def test_pointing_wins_over_the_focus(browser, figure, tmp_path):
    with shown(browser, tmp_path, figure, width=800) as page:
        page.locator(".asks-0").focus()
        page.locator(".asked-5").hover()
        page.evaluate(AT_REST)
        lines = page.locator("svg.sentence").evaluate(THICKEST).split()
        assert lines[-1] == "to-5"
        assert page.locator(".share.from-0:visible").count() == 0
        assert "is looked at by" in said(page)


def test_other_heads_and_kinds_show_their_numbers(browser, record, figure, tmp_path):
    with shown(browser, tmp_path, figure) as page:
        before = page.locator("svg.sentence").inner_html()
        page.get_by_role("button", name="across").click()
        assert page.locator("svg.sentence").inner_html() != before
        queries, rows, keys, columns = sides_of(record, "cross")
        layers = record["attention"]["cross"]
        for layer, heads in enumerate(layers, 1):
            for head, weights in enumerate(heads, 1):
                page.get_by_role("button", name=f"layer {layer}", exact=True).click()
                page.get_by_role("button", name=f"head {head}", exact=True).click()
                row = between_words(weights, rows, columns)[0]
                best = keys[row.index(max(row))]
                say = page.locator(".asks-0").get_attribute("data-say")
                assert say.startswith(f"{queries[0]} looks at: {best} ")
                assert f"Layer {layer}, head {head}" in said(page)


# --- the six steps --------------------------------------------------------------------

STEPS = ("x", "v", "score", "scaled", "weight", "z")  # what each step adds, by class


@pytest.fixture(scope="module")
def six():
    return steps_figure()


def test_six_steps_answer(browser, six, tmp_path):
    check_figure(browser, tmp_path, six, [(".weight u", "color")])


def numbers(page, kind):
    """What the parts of a kind show, in their rows."""
    rows = page.locator(f".figures .part-{kind}").evaluate_all(
        "all => all.map(e => e.querySelector('i') ? [...e.querySelectorAll('i')].map("
        "x => x.textContent) : [e.textContent])"
    )
    return [[float(text.replace("\u2212", "-")) for text in row] for row in rows]


@pytest.mark.parametrize("width", [360, 900])
def test_six_steps_show_what_the_function_of_the_chapter_gives(
    browser, record, six, tmp_path, width
):
    steps = attention(*read_head())  # from the model's file, not from the stored rows
    data = contents(six)["data"]
    assert contents(six)["state"] == {"word": data["words"].index("his"), "step": 5}
    with shown(browser, tmp_path, six, width=width) as page:
        slider = page.locator("input[type=range]")
        for word in ("his", "The"):
            page.get_by_role("button", name=word, exact=True).click()
            i = data["words"].index(word)
            wanted = {
                "x": [row[:4] for row in record["head"]["inputs"]],
                "v": [row[:4] for row in steps.V],
                "score": [[score] for score in steps.scores[i]],
                "scaled": [[score] for score in steps.scaled[i]],
                "weight": [[weight] for weight in steps.weights[i]],
                "z": [steps.Z[i][:4]],
            }
            for step, kind in enumerate(STEPS):
                slider.fill(str(step))
                assert said(page).startswith(f"Step {step + 1}, ")
                assert page.evaluate(OVERFLOW) <= 0
                found = numbers(page, kind)
                assert len(found) == len(wanted[kind])
                for ours, row in zip(found, wanted[kind], strict=True):
                    near = 0.08 if kind == "score" else 0.02
                    assert ours == pytest.approx(row[: len(ours)], abs=near)


def test_products_of_the_best_key_add_up_to_its_score(browser, six, tmp_path):
    with shown(browser, tmp_path, six, width=900) as page:
        page.locator("input[type=range]").fill("2")
        products = numbers(page, "product")[0]
        rest, whole = page.locator(".figures .sum").inner_text().strip("+ ").split("=")
        assert sum(products) + float(rest) == pytest.approx(float(whole), abs=0.03)
        assert whole.strip() in page.locator(".figures .score").all_inner_texts()


@pytest.mark.parametrize("way", ["hover", "focus", "tap"])
def test_code_and_numbers_show_what_belongs_together(browser, six, tmp_path, way):
    light = "e => getComputedStyle(e).backgroundColor"
    with shown(browser, tmp_path, six, has_touch=True) as page:
        code, number = page.locator("code.part-v"), page.locator(".figures .v").first
        before = number.evaluate(light)
        getattr(code, way)()
        assert number.evaluate(light) != before
        assert said(page) == code.get_attribute("data-say")
        getattr(number, way)()
        assert code.evaluate(light) != before


def test_six_steps_play_to_the_end(browser, six, tmp_path):
    with shown(browser, tmp_path, six, reduced_motion="reduce") as page:
        page.clock.install()
        page.get_by_role("button", name="play").click()
        assert said(page).startswith("Step 1, ")
        for step in range(2, 7):
            page.clock.run_for(3300)
            assert said(page).startswith(f"Step {step}, ")
        assert page.get_by_role("button", name="play").is_visible()
        page.get_by_role("button", name="back").click()
        assert said(page).startswith("Step 5, ")
