"""The rules of the house: rooms, doors, and which way the arrows run."""

import ast
import graphlib
import importlib
import itertools
import json
import re
from functools import cache
from pathlib import Path

import pytest
from built import documents
from conftest import LONGEST
from doors import taken

import transformer_lib

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "transformer_lib"
# Every module by its dotted name; those of figures and exercises stand in the back.
MODULES = {
    ".".join(path.relative_to(LIBRARY).with_suffix("").parts): path
    for path in sorted(LIBRARY.rglob("[a-z]*.py"))
}
BACK = {name for name in MODULES if name.startswith(("figures.", "exercises."))}
FRONT = {name: path for name, path in MODULES.items() if name not in BACK}
EVERY_ROOM = "command_line"  # thin over all of them, and imports one when it is asked
# Methods of a class that ask a later chapter when they are called.
METHODS = {
    "transformer": {"runs.folder", "tokenizer", "decoding.strategies"},
    "translator": {"export.engines"},
}
DRAWING = {"base64", "html", "io", "json", "matplotlib", "IPython", "PIL"}
TEXT = {  # files and requests, no page
    "tokenizer",
    "corpora.downloads",
    "corpora.text_files",
    "corpora.formats",
    "corpora.known",
    "runs.checkpoints",
    "runs.folder",
    "batches.prepared",
    "wmt",
    "parsing.tree_tokens",
    "ablations",
    "storage",
    "server",
}
SPEAKS_JSON = {"export.marian", "export.ctranslate2"}


@cache
def tree(path):
    return ast.parse(path.read_text("utf-8"))


@cache
def chapters():
    """The number of the chapter that exports a module."""
    numbers = {}
    for path in sorted((ROOT / "notebooks").rglob("*.ipynb")):
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            source = "".join(cell["source"])
            pattern = r"^#\|[ \t]*(?:default_exp|exporti?)[ \t]+(\S+)[ \t]*$"
            for name in re.findall(pattern, source, re.M):
                numbers[name] = int(path.stem[:2])
    return numbers


def public(path):
    for node in tree(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


def names_of(path):
    """What a module imports anywhere in it: other modules, and names of theirs."""
    return taken(path.read_text("utf-8"), ".".join(path.relative_to(ROOT).parent.parts))


def imported(path):
    """Modules that a module imports anywhere in it, those of the library without it."""
    return {module for module, _ in names_of(path)}


def defined(path):
    """Functions and classes at the top of a module: name to line."""
    return {node.name: node.lineno for node in tree(path).body if hasattr(node, "name")}


@pytest.mark.parametrize("name", FRONT)
def test_a_front_room_imports_no_back_room(name):
    assert not imported(FRONT[name]) & BACK


def test_arrows_run_downward():
    """Modules use what earlier chapters export, and what their own does."""
    numbers, upward = chapters(), []
    for name, path in MODULES.items():
        assert name in numbers, f"{name} is exported by no chapter"
        for other in imported(path) - METHODS.get(name, set()):
            later = other in numbers and numbers[other] > numbers[name]
            if later and not name.startswith(f"{EVERY_ROOM}."):
                upward.append(f"{name} imports {other}")
    assert not upward


def test_a_class_has_its_methods_in_its_class():
    """No module gives a class a method afterwards."""
    given = [
        f"{name}: {ast.unparse(node)}"
        for name, path in FRONT.items()
        for node in tree(path).body
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Attribute) for target in node.targets)
    ]
    assert not given


def test_the_layer_is_written_once():
    """Its sublayers are put together in chapters 05 and 06, and nowhere else."""
    found = {
        name
        for name, path in FRONT.items()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr.startswith("residual_")
    }
    assert found == {"encoder", "decoder"}


def test_there_is_no_circle():
    """Neither between doors nor inside a package."""
    arrows = {
        name: (imported(path) & set(MODULES)) - METHODS.get(name, set())
        for name, path in MODULES.items()
    }
    graphlib.TopologicalSorter(arrows).prepare()  # CycleError names those of a circle


def test_underscore_names_stay_in_their_chapter():
    """What another chapter uses is public."""
    numbers = chapters()
    assert [
        f"{name} takes {what} of {other}"
        for name, path in MODULES.items()
        for other, what in names_of(path)
        if (what.startswith("_") or "._" in other)
        and numbers.get(other, numbers[name]) != numbers[name]
    ] == []


def stored(nodes):
    """The names that some code gives to functions, classes, variables, attributes."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(getattr(node, "ctx", None), ast.Store):
            yield getattr(node, "attr", getattr(node, "id", ""))


def named(nodes):
    """The names that some code imports, looks up in something, or has in a text."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant):
            yield str(node.value).rpartition(".")[2]


def test_tests_go_through_the_door():
    """Fewer than 40 times a test names something private of the library."""
    ours = set(stored(itertools.chain(*(ast.walk(tree(p)) for p in MODULES.values()))))
    private = {name for name in ours if re.fullmatch(r"_[A-Za-z]\w*(?<!_)", name)}
    found = []
    for path in sorted((ROOT / "tests").glob("*.py")):
        nodes = [*ast.walk(tree(path))]
        own = set(stored(nodes))
        found += [(path.name, n) for n in named(nodes) if n in private - own]
    assert len(found) < 40, found
    assert ("test_prepared.py", "_OWN_MARK") in found  # it sees something


def test_a_door_offers_what_its_rooms_have():
    """And no two rooms the same name, and no name is that of a room."""
    for stub in LIBRARY.glob("*/__init__.pyi"):
        door = importlib.import_module(f"transformer_lib.{stub.parent.name}")
        rooms = {p.stem: p for p in stub.parent.glob("[a-z]*.py")}
        names = [name for path in rooms.values() for name in public(path)]
        assert len(names) == len(set(names)) and not set(names) & set(rooms)
        assert sorted(door.__all__) == sorted(names)
        assert all(hasattr(door, name) for name in names)


def test_a_back_room_stands_behind_a_door():
    """It has its chapter's name; but for what all check or draw.

    Chapter 00 has no door: what is written under its number belongs to no chapter.
    """
    numbers = chapters()
    doors = {(name.partition(".")[0], numbers[name]) for name in FRONT}
    for name in BACK - {"exercises.check", "figures.frame", "figures.why"}:
        stem, number = name.partition(".")[2], numbers[name]
        assert (stem, number) in doors or number not in {n for _, n in doors}, name


def test_every_module_says_what_it_is():
    """In a docstring that ends with the page of the chapter that exports it."""
    numbers, seen = chapters(), {}
    for name, path in MODULES.items():
        said = ast.get_docstring(tree(path)) or ""
        first, page = said.split("\n\n", 1) if "\n\n" in said else (said, "")
        assert len(first.split()) > 3, f"{name} has no docstring"
        assert first.endswith("."), f"{name}: a sentence ends with a full stop"
        place = re.fullmatch(r"Docs: \S+/(notebooks/\S+)\.html", page)
        assert place and f"/{numbers[name]:02d}_" in place[1], f"{name}: {page}"
        assert (ROOT / f"{place[1]}.ipynb").exists()
        assert first not in seen, f"{name} and {seen[first]} say the same"
        seen[first] = name


def test_an_api_page_names_the_chapter_that_exports_its_module():
    numbers = chapters()
    for path in sorted((ROOT / "book" / "api").glob("*.md")):
        text = path.read_text("utf-8")
        where = r"\(\.\./\.\./notebooks/(?:under_the_hood/)?(\d\d)_"
        said = r"Written\s+(?:in|under)\s+\[(?:chapter|the) (\d\d|hood)\]"
        found = re.search(said + where, text)
        (number,) = {
            f"{number:02d}"
            for name, number in numbers.items()
            if name.partition(".")[0] == path.stem
        }
        assert found, f"{path.name} does not say which chapter its module is written in"
        said, place = found.groups()
        assert said in (number, "hood") and place == number, f"{path.name}: {number}"


@pytest.mark.parametrize("name", FRONT)
def test_what_draws_and_what_guards(name):
    """A front room draws nothing, and its guards are nobody else's business."""
    drawing = {module.split(".")[0] for module in imported(FRONT[name])} & DRAWING
    drawing -= {"html", "io", "json"} if name in TEXT else set()
    drawing -= {"json"} if name in SPEAKS_JSON else set()
    assert not drawing, f"{name} imports {', '.join(drawing)}: that is for its figures"
    for known in public(FRONT[name]):
        assert not known.startswith("check_"), f"{known}: exercises are checked so"
        assert not re.match(r"(plot|draw)_|.*_figure$", known), f"{known} draws"
    for known in defined(FRONT[name]):
        wanted = known in public(FRONT[name])
        assert wanted != known.startswith("_"), f"{known}: public or with an underscore"


def test_library_names_are_public():
    for name, module in transformer_lib._HOME.items():
        at_the_door = importlib.import_module(f"transformer_lib.{module}").__all__
        assert name in at_the_door, f"{name} is not in {module}.__all__"


def test_a_type_checker_is_told_where_each_name_is():
    """`if TYPE_CHECKING:` imports the names of _HOME from their modules, no others."""
    (block,) = (
        node.body
        for node in tree(LIBRARY / "__init__.py").body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    told = {}
    for node in block:
        assert isinstance(node, ast.ImportFrom) and node.level == 1
        for alias in node.names:
            assert alias.asname == alias.name, f"{alias.name}: `as` hands a name on"
            told[alias.name] = node.module
    assert told == transformer_lib._HOME


def test_chapters_are_numbered_in_reading_order():
    """As _toc.yml names them, from 00 on without a gap."""
    pages = [Path(page) for page in documents()]
    read = [page.name for page in pages if page.parent.name == "notebooks"]
    assert read == sorted(path.stem for path in ROOT.glob("notebooks/*.ipynb"))
    assert [int(name[:2]) for name in read] == [*range(len(read))]


def test_files_that_begin_first_exist():
    here = {path.stem for path in Path(__file__).parent.glob("test_*.py")}
    assert set(LONGEST) <= here
