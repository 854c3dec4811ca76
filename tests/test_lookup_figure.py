"""The query that is dragged: its numbers against torch, and what a pointer does."""

import pytest
import torch
from figures import check_figure, contents, said, shown
from torch.nn.functional import scaled_dot_product_attention

from transformer_lib.figures.hello import lookup_figure

MARKS = [(".dot", "fill"), (".output", "fill"), (".field + text", "fill")]


@pytest.fixture(scope="module")
def figure():
    return lookup_figure()


def by_torch(data, hour, length, scaled):
    """Weights and output of torch's own attention for a query of the figure."""

    def directions(hours, size):
        angle = 2 * torch.pi * torch.tensor(hours, dtype=torch.float64) / 24
        return size * torch.stack([angle.cos(), angle.sin()], dim=-1)

    query = directions([hour], length)[None]
    keys = directions([r[0] for r in data["readings"]], 2)[None]
    values = torch.tensor([r[1:] for r in data["readings"]], dtype=torch.float64)[None]
    scale = 2**-0.5 if scaled else 1.0
    eye = torch.eye(3, dtype=torch.float64)[None]
    return [
        scaled_dot_product_attention(query, keys, v, scale=scale)[0, 0].tolist()
        for v in (eye, values)
    ]


def weights_in(page):
    texts = page.locator(".reading b:last-child").all_inner_texts()
    return [float(text) for text in texts]


def check_numbers(page, data, hour, length, scaled=False):
    weights, (degrees, percent) = by_torch(data, hour, length, scaled)
    assert weights_in(page) == pytest.approx(weights, abs=0.0051)
    assert f"Query: {hour:g} h, length {length:g}." in said(page)
    assert f"{degrees:.1f} °C, {percent:.0f} % humidity" in said(page)


def test_it_answers(browser, figure, tmp_path):
    check_figure(browser, tmp_path, figure, MARKS)


def test_sliders_give_torch_s_numbers(browser, figure, tmp_path):
    data = contents(figure)["data"]
    with shown(browser, tmp_path, figure) as page:
        check_numbers(page, data, 11, 1)
        sliders = page.locator("input[type=range]")
        for hour, length in ((5, 4), (17.5, 0.7), (0, 0)):
            sliders.nth(0).fill(str(data["hours"].index(hour)))
            sliders.nth(1).fill(str(data["lengths"].index(length)))
            check_numbers(page, data, hour, length)
        sliders.nth(1).fill("20")
        page.get_by_role("button", name="divide by √2").click()
        check_numbers(page, data, 0, 2, scaled=True)


@pytest.mark.parametrize("width", [360, 900])
def test_the_query_follows_the_pointer(browser, figure, tmp_path, width):
    """Pulled to the right (6 h), then down (12 h), and past the edge."""
    data = contents(figure)["data"]
    with shown(browser, tmp_path, figure, width=width) as page:
        box = page.locator("[data-drag]").bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        unit = box["width"] / 8.6
        page.mouse.move(x + unit, y)
        page.mouse.down()
        check_numbers(page, data, 6, 1)
        page.mouse.move(x, y + 3 * unit)
        check_numbers(page, data, 12, 3)
        page.mouse.move(x, y + 9 * unit)
        check_numbers(page, data, 12, 4)
        page.mouse.up()
        page.mouse.move(x + unit, y)
        assert "Query: 12 h, length 4." in said(page)


def test_a_finger_drags_it_too(browser, figure, tmp_path):
    data = contents(figure)["data"]
    with shown(browser, tmp_path, figure, has_touch=True) as page:
        box = page.locator("[data-drag]").bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        unit = box["width"] / 8.6
        touch = page.context.new_cdp_session(page)
        for kind, u, v in (("Start", 0, -1), ("Move", 0, -2), ("Move", -2, 0)):
            at = {"touchPoints": [{"x": x + u * unit, "y": y + v * unit}]}
            touch.send("Input.dispatchTouchEvent", {"type": f"touch{kind}", **at})
        page.get_by_text("Query: 18 h").wait_for()
        end = {"type": "touchEnd", "touchPoints": []}
        touch.send("Input.dispatchTouchEvent", end)
        check_numbers(page, data, 18, 2)


def test_the_output_stays_in_the_triangle_and_nears_its_corners():
    data = contents(lookup_figure())["data"]
    corners = torch.tensor([r[1:] for r in data["readings"]], dtype=torch.float64)
    for hour in data["hours"]:
        weights, output = by_torch(data, hour, 4, False)
        assert min(weights) >= 0 and sum(weights) == pytest.approx(1)
        torch.testing.assert_close(
            torch.tensor(weights, dtype=torch.float64) @ corners,
            torch.tensor(output, dtype=torch.float64),
        )
    weights, _ = by_torch(data, data["readings"][0][0], 4, False)
    assert weights[0] > 0.99
