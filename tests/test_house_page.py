"""The page that draws the house: rooms, floors and arrows are those of the code."""

import re
import sys

import pytest
from built import ROOT

sys.path.insert(0, str(ROOT / "book" / "_ext"))
import house
from doors import taken


def test_every_module_that_a_notebook_exports_is_a_room():
    back = {"figures", "exercises"}
    found = set()
    for path in house.LIBRARY.rglob("*.py"):
        name = path.relative_to(house.LIBRARY)
        if name.parts[0] not in back and "# %% " in path.read_text("utf-8"):
            found.add(house.module_of(path))
    assert found == set(house.rooms()) and len(found) > 40
    drawn = re.findall(r'data-room="([\w.]+)"', house.house(set()))
    assert sorted(drawn) == sorted(found)


def test_arrows_are_imports_and_lead_down():
    uses = {name: used for name, (_, used) in house.rooms().items()}
    assert "attention" in uses["multihead"] and "multihead" not in uses["attention"]
    up = house.upward()
    # The command line starts everything, Transformer's methods come later, and a
    # Translator lends its model to another engine.
    doors = {name.partition(".")[0] for name, _ in up}
    assert doors <= {"command_line", "transformer", "translator"}
    arrows = sum(map(len, uses.values()))
    assert f"{len(uses)} rooms, {arrows} arrows." in house.counts()
    assert f"All but {len(up)} of them" in house.counts()


def test_floors_are_the_parts_of_the_book_with_the_first_at_the_bottom():
    page = house.house(set())
    captions = re.findall(r'class="floor">([^<]+)<', page)
    assert captions[-1] == "Attention" and len(captions) > 3
    linked = re.findall(r'href="\.\./notebooks/(\w+)\.html"', page)
    assert all((ROOT / "notebooks" / f"{name}.ipynb").exists() for name in linked)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("from .translator import Translator", "translator"),
        ("from transformer_lib.translator import _Line", "translator"),
        ("from transformer_lib import translator, torch", "translator"),
        ("from transformer_lib import Translator", "translator"),
        ("import transformer_lib.translator as r", "translator"),
        ("from .runs import Run", "runs.folder"),
        ("from transformer_lib import Run", "runs.folder"),
        ("from .runs import trainer", "runs.trainer"),
        ("def f():\n    from .export.onnx import OnnxModel", "export.onnx"),
        ("import torch\nfrom runs import Run", None),
    ],
)
def test_each_way_to_import_is_seen(line, wanted):
    known = house.rooms()
    assert {module for module, _ in taken(line) if module in known} == (
        {wanted} if wanted else set()
    )


def test_imports_inside_a_package():
    text = "from .marian import to_marian\nfrom ..runs import Run"
    found = {module for module, _ in taken(text, "transformer_lib.export")}
    assert found == {"export.marian", "runs.folder"}
