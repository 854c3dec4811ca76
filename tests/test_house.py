"""The rules of the house: rooms, doors, and which way the arrows run."""

import ast
import json
import re
from functools import cache
from pathlib import Path

import pytest
from built import documents
from conftest import LONGEST

import transformer_lib

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "transformer_lib"
FRONT = {path.stem: path for path in sorted(LIBRARY.glob("[a-z]*.py"))}
ROOMS = {
    room: {path.stem: path for path in sorted((LIBRARY / room).glob("[a-z]*.py"))}
    for room in ("figures", "exercises")
}
# The lists and numbers below may only shrink: take off what has been put in order.
LONG = set()
ENTER_BACK = set()  # still import a back room
EVERY_ROOM = "command_line"  # thin over all of them, and imports one when it is asked
# Methods of a class that ask a later chapter when they are called.
METHODS = {"transformer": {"runs", "tokenizer", "decoding"}}
PUBLIC = 262  # names in the front rooms, together

# Front rooms, and what each of them is about.
IDEAS = {
    "attention": "attention_numpy",
    "multihead": "MultiHeadAttention",
    "positions": "sinusoidal_positions",
    "encoder": "FeedForward",
    "decoder": "causal_mask",
    "transformer": "Transformer",
    "tokenizer": "train_bpe",
    "files": "whole_file",
    "diagnosis": "Finding",
    "corpora": "load_corpus",
    "downloads": "_find_file",
    "text_files": "open_text",
    "formats": "pair_rows",
    "grammar": "grammar_pair",
    "looking_inside": "watching",
    "heads": "most_attended",
    "trees": "Tree",
    "treebanks": "Treebank",
    "parsing": "train_parser",
    "labelling": "_tree_labels",
    "export": "export_model",
    "onnx_export": "_StepGraph",
    "marian": "_marian_places",
    "ctranslate2_export": "_ctranslate2_spec",
    "int8": "_Int8Linear",
    "server": "translation_server",
    "training": "fit",
    "recipes": "Recipe",
    "checkpoints": "_save_tensors",
    "runs": "Run",
    "trainer": "train",
    "decoding": "greedy_search",
    "speculative": "_verdict",  # which guesses stay; the rest of it is a loop
    "evaluation": "bleu",
    "translator": "Translator",
    "command_line": "main",
    "family": "FamilyConfig",
    "long_text": "attention_reading_once",
    "batches": "TokenPairs",
    "augment": "PairText",
    "complexity": "Recurrent",
    "bugs": "_Exhibit",
    "speed": "race",
    "objective": "label_smoothed_cross_entropy",
    "tree_tokens": "train_tree_tokenizer",
    "wmt": "prepare_wmt",
    "prepared": "prepare",
    "ablations": "variation",
    "fine_tuning": "mix_pairs",
}
# Rooms whose idea comes late, because the chapter needs what stands before it.
LATE = {
    "hello": "attention",  # each of the six steps is built, and then all are one
    "pretraining": "mask_tokens",  # the text and the next token come first
}
DRAWING = {"base64", "html", "io", "json", "matplotlib", "IPython", "PIL"}
TEXT = {  # files, no page
    "tokenizer", "downloads", "text_files", "formats", "corpora", "checkpoints",
    "runs", "prepared", "wmt", "tree_tokens", "ablations",
}  # fmt: skip
SPEAKS_JSON = {"onnx_export", "marian", "ctranslate2_export", "server"}  # to others


@cache
def tree(path):
    return ast.parse(path.read_text("utf-8"))


@cache
def chapters():
    """The number of the chapter that exports a module."""
    numbers = {}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
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


def imported(path):
    """Modules that a module imports anywhere in it, those of the library without it."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            module = ".".join([*above, *filter(None, [node.module])])
            inside = module.removeprefix("transformer_lib").removeprefix(".")
            if module == "transformer_lib":  # its names, or modules, by name
                for alias in node.names:
                    yield transformer_lib._HOME.get(alias.name, alias.name)
            else:
                yield inside


def defined(path):
    """Functions and classes at the top of a module: name to line."""
    return {node.name: node.lineno for node in tree(path).body if hasattr(node, "name")}


@pytest.mark.parametrize("name", FRONT)
def test_a_front_room_imports_no_back_room(name):
    back = [m for m in imported(FRONT[name]) if m.split(".")[0] in ROOMS]
    if name in ENTER_BACK:
        assert back, f"{name} is in order now: take it off ENTER_BACK"
    else:
        assert not back, f"{name} imports {back[0]}"


def test_arrows_run_downward():
    """Rooms use what earlier chapters export, back rooms also their own chapter's."""
    numbers, upward = chapters(), []
    every = {**FRONT}
    for room, paths in ROOMS.items():
        every |= {f"{room}.{stem}": path for stem, path in paths.items()}
    for name, path in every.items():
        assert name in numbers, f"{name} is exported by no chapter"
        for other in set(imported(path)) - METHODS.get(name, set()):
            later = other in numbers and numbers[other] > numbers[name]
            if later and name != EVERY_ROOM:
                upward.append(f"{name} imports {other}")
    assert not upward


def test_the_layer_is_written_once():
    """Its sublayers are put together in chapters 05 and 06, and nowhere else."""
    found = {
        name
        for name, path in FRONT.items()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        and node.func.attr.startswith("residual_")
    }  # fmt: skip
    assert found == {"encoder", "decoder"}


def test_a_back_room_stands_behind_a_front_room():
    """It has the name of its chapter's front room; but for what all check or draw."""
    front = {(name, number) for name, number in chapters().items() if "." not in name}
    numbers = {number for _, number in front}
    for name, number in chapters().items():
        room, _, stem = name.partition(".")
        if stem and name not in ("exercises.check", "figures.frame"):
            assert room in ROOMS, name
            assert (stem, number) in front or number not in numbers, name


def test_no_module_is_too_long():
    modules = [*FRONT.items(), *ROOMS["figures"].items(), *ROOMS["exercises"].items()]
    long = {n for n, path in modules if len(path.read_text("utf-8").split("\n")) > 1001}
    assert long <= LONG, f"above 1,000 lines: {', '.join(sorted(long - LONG))}"
    assert long == LONG, f"short now, take off LONG: {', '.join(sorted(LONG - long))}"


def test_every_module_says_what_it_is():
    """In a docstring that ends with the page of the chapter that exports it."""
    pages = {path.stem[:2]: path.stem for path in ROOT.glob("notebooks/*.ipynb")}
    numbers, seen = chapters(), {}
    modules = {**FRONT}
    for room, paths in ROOMS.items():
        modules |= {f"{room}.{stem}": path for stem, path in paths.items()}
    for name, path in modules.items():
        said = ast.get_docstring(tree(path)) or ""
        first, page = said.split("\n\n", 1) if "\n\n" in said else (said, "")
        assert len(first.split()) > 3, f"{name} has no docstring"
        assert first.endswith("."), f"{name}: a sentence ends with a full stop"
        wanted = f"/notebooks/{pages[f'{numbers[name]:02d}']}.html"
        assert page.startswith("Docs: ") and page.endswith(wanted), f"{name}: {page}"
        assert first not in seen, f"{name} and {seen[first]} say the same"
        seen[first] = name


def test_an_api_page_names_the_chapter_that_exports_its_module():
    numbers = chapters()
    for path in sorted((ROOT / "book" / "api").glob("*.md")):
        text = path.read_text("utf-8")
        found = re.search(
            r"Written\s+in\s+\[chapter (\d\d)\]\(\.\./\.\./notebooks/(\d\d)", text
        )
        number = f"{numbers[path.stem]:02d}"
        assert found, f"{path.name} does not say which chapter its module is written in"
        assert found.groups() == (number, number), f"{path.name}: chapter {number}"


def test_public_names_grow_no_further():
    counts = {name: len(public(path)) for name, path in FRONT.items()}
    total = sum(counts.values())
    assert total <= PUBLIC, f"{total} public names in the front rooms: {counts}"


def test_every_front_room_is_about_something():
    assert IDEAS.keys() | LATE.keys() == FRONT.keys() and not IDEAS.keys() & LATE.keys()
    for name, idea in LATE.items():
        lines = len(FRONT[name].read_text("utf-8").split("\n"))
        at = defined(FRONT[name])[idea]
        assert at > lines / 3, f"{name}: {idea} comes early now, take it to IDEAS"


@pytest.mark.parametrize("name", IDEAS)
def test_a_module_shows_its_idea_first(name):
    lines = len(FRONT[name].read_text("utf-8").split("\n"))
    found = defined(FRONT[name])
    line = found[IDEAS[name]]
    assert line <= lines / 3, f"{IDEAS[name]} stands at line {line} of {lines}"
    before = [n for n, at in found.items() if at < line and n.startswith("_check_")]
    assert not before, f"before the idea: {', '.join(before)}"


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
        assert name in public(FRONT[module]), f"{name} is not in {module}.__all__"


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
    read = [page.name for page in pages if page.parts[0] == "notebooks"]
    assert read == sorted(path.stem for path in ROOT.glob("notebooks/*.ipynb"))
    assert [int(name[:2]) for name in read] == [*range(len(read))]


def test_files_that_begin_first_exist():
    here = {path.stem for path in Path(__file__).parent.glob("test_*.py")}
    assert set(LONGEST) <= here
