"""The form that every chapter keeps, checked on the notebooks as they are committed."""

import ast
import itertools
import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from chapters import all_notebooks, name_of
from doors import taken
from release import tag
from test_house import METHODS

ROOT = Path(__file__).parents[1]
PATHS = [*all_notebooks().values()]
TAGS = {
    "remove-cell",
    "remove-input",
    "hide-input",
    "not-live",
    "hide-output",
    "hide-cell",
    "exercise",
    "remove-stderr",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = {
    extra: {re.match(r"[\w-]+", line)[0] for line in lines}
    for extra, lines in PROJECT["optional-dependencies"].items()
}
GUARD = """\
# @title Install the library, where it is not there yet
import importlib.util

if importlib.util.find_spec("transformer_lib") is None:
    %pip install -q git+https://github.com/literate-transformer/literate-transformer@{}"""
# Chapters that need more than the library: what they import, and the extra that has it.
GUARD_OF_MORE = """\
# @title Install the library, where it is not there yet
import importlib.util

needed = {}
if any(importlib.util.find_spec(name) is None for name in needed):
    %pip install -q "transformer-lib[{}] @ git+https://github.com/literate-transformer/literate-transformer@{}"
"""
MORE = {"28_family": "family", "22_export": "export", "18_command_line": "export"}
NAMES = {"sklearn": "scikit-learn"}
MYST = re.compile(
    r"^\s*(`{3,}\{[\w-]+\}|:{3,}\{?[\w-]+|\$\$.*\$\$\s*\(\w+\))|\{\w+\}`", re.M
)

each_chapter = pytest.mark.parametrize("path", PATHS, ids=name_of)


@cache
def cells(path, kind=None):
    found = json.loads(path.read_text("utf-8"))["cells"]
    for cell in found:
        cell["source"] = "".join(cell["source"])
    return [c for c in found if kind in (None, c["cell_type"])]


def without_fences(markdown):
    return re.sub(r"^(```+|~~~+).*?^\1\s*$", "", markdown, flags=re.M | re.S)


def number(path):
    return int(path.stem.split("_")[0])


def test_there_are_chapters():
    chapters = [path for path in PATHS if "/" not in name_of(path)]
    assert chapters, "notebooks/ holds no chapter"
    assert all(re.fullmatch(r"\d\d_[a-z_]+", path.stem) for path in PATHS)
    assert len({number(path) for path in chapters}) == len(chapters)
    hoods = {path.name for path in PATHS} - {path.name for path in chapters}
    assert hoods == {
        "00_figures.ipynb",
        "00_house.ipynb",
    }  # of all chapters; each other hood is of one


@each_chapter
def test_no_outputs(path):
    for cell in cells(path, "code"):
        assert cell["outputs"] == [], f"cell {cell['id']} has outputs"
        assert cell["execution_count"] is None, f"cell {cell['id']} has a count"


@each_chapter
def test_cell_ids(path):
    ids = [cell.get("id") for cell in cells(path)]
    assert all(ids) and len(set(ids)) == len(ids), "every cell needs an id of its own"


@each_chapter
def test_cells_are_not_empty(path):
    assert all(cell["source"].strip() for cell in cells(path))


@each_chapter
def test_colab_guard(path):
    guards = [c for c in cells(path, "code") if "%pip" in c["source"]]
    assert len(guards) == 1, "one cell installs the library on Colab"
    if path.stem in MORE:
        needed = re.search(r"needed = (\[.*?\])", guards[0]["source"], re.S)[1]
        wanted = GUARD_OF_MORE.format(needed, MORE[path.stem], tag())
        assert guards[0]["source"] == wanted.rstrip("\n")
        first, *names = ast.literal_eval(needed)
        extra = EXTRAS[MORE[path.stem]]
        assert first == "transformer_lib"
        assert {NAMES.get(name, name) for name in names} <= extra
    else:
        assert guards[0]["source"] == GUARD.format(tag())
    assert guards[0]["metadata"].get("tags") == ["remove-cell"]
    assert guards[0] in cells(path, "code")[:2], (
        "before anything that needs the library"
    )


@each_chapter
def test_headings(path):
    assert cells(path)[0]["cell_type"] == "markdown"
    text = "\n\n".join(without_fences(c["source"]) for c in cells(path, "markdown"))
    levels = [len(marks) for marks in re.findall(r"^(#{1,6}) +\S", text, re.M)]
    assert levels[:1] == [1] and levels.count(1) == 1, "one H1, and it comes first"
    for above, below in itertools.pairwise(levels):
        assert below <= above + 1, f"a heading of level {below} right under {above}"


@each_chapter
def test_exercises_stand_below_their_heading(path):
    """A heading that is lost moves all that follows into the section before it."""
    text = "\n\n".join(without_fences(c["source"]) for c in cells(path, "markdown"))
    section = ""
    for marks, title in re.findall(r"^(#{2,3}) +(\S.*)$", text, re.M):
        section = title if marks == "##" else section
        if re.match(r"Exercise \d+\.\d+", title):
            assert marks == "###" and section in ("Exercises", "Exercise"), title


@each_chapter
def test_tags_and_metadata(path):
    for cell in cells(path):
        assert set(cell["metadata"]) <= {"cellView", "tags", "mystnb"}, cell["id"]
        tags = set(cell["metadata"].get("tags", []))
        assert tags <= TAGS, cell["id"]
        folded = tags & {"hide-input", "hide-cell", "remove-cell", "remove-input"}
        view = cell["metadata"].get("cellView")
        assert view == ("form" if folded else None), (
            f"cell {cell['id']}: Colab folds what the book folds: book/_tools/fold.py"
        )


@cache
def to_touch():
    """What a line begins with that shows a drawing or an interactive figure."""
    makers = {r"\w+_figure"}
    for path in sorted((ROOT / "transformer_lib/figures").glob("*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and "_repr_html_" in ast.unparse(node):
                makers.add(node.name)
            if isinstance(node, ast.FunctionDef) and re.match("show(_|$)", node.name):
                makers.add(node.name)
    return re.compile(rf"^(?:{'|'.join(sorted(makers))})\(", re.M)


def test_interactive_figures_are_known_by_their_names():
    lines = [
        "cost_figure()",
        "AttentionView(shown)",
        "InteractiveFigure(\n    1)",
        "show(draw, 1)",
    ]
    assert all(to_touch().search(f"x = 1\n{line}") for line in lines)
    assert not to_touch().search("def cost_figure():\n    cost_figure()")
    assert not to_touch().search("print_scores(1)")  # prints: not one of figures'


@each_chapter
def test_figures_are_not_folded(path):
    """A figure has a number: a folded one would leave a gap between its neighbors."""
    for cell in cells(path, "code"):
        if "plt.show(" in cell["source"] or to_touch().search(cell["source"]):
            tags = set(cell["metadata"].get("tags", []))
            assert not tags & {"hide-cell", "hide-output"}, cell["id"]


@each_chapter
def test_figures_have_words(path):
    """Pictures have alt text and a caption, interactive figures a caption."""
    shown = cells(path, "code")
    own_show = any("\ndef show(" in f"\n{cell['source']}" for cell in shown)  # prints
    for cell in shown:
        if "#| export" in cell["source"]:
            continue
        draws = "plt.show(" in cell["source"]
        about = cell["metadata"].get("mystnb", {})
        if draws:
            alt = about.get("image", {}).get("alt", "")
            assert len(alt) >= 20, f"cell {cell['id']} draws a figure without alt text"
        drawn = to_touch().search(cell["source"])
        if draws or (drawn and not (own_show and drawn[0] == "show(")):
            caption = about.get("caption", "")
            assert 20 <= len(caption) <= 160, f"{cell['id']}: {caption!r} as a caption"
            assert caption.endswith("."), caption


FIRST_SEEN = [
    "hello",
    "attention",
    "multihead",
    "positions",
    "encoder",
    "decoder",
    "transformer",
    "objective",
]


@pytest.mark.parametrize("name", FIRST_SEEN)
def test_the_books_sentence_is_seen_before_anything_is_built(name):
    """A figure of trained numbers comes before the first code of the library."""
    (path,) = (path for path in PATHS if name_of(path)[3:] == name)
    every = cells(path, "code")
    built = next(i for i, c in enumerate(every) if "#| export" in c["source"])
    seen = every[:built]
    assert any(re.search("read_sentence|show_moved", c["source"]) for c in seen)
    assert any(c["metadata"].get("mystnb", {}).get("caption") for c in seen)


FIGURE_FIRST = [
    "why",
    "tokenizer",
    "batches",
    "runs",
    "decoding",
    "evaluation",
    "diagnosis",
    "speed",
    "export",
    "complexity",
    "wmt",
    "ablations",
    "parsing",
    "looking_inside",
    "family",
    "long_text",
    "bugs",
]
PRINTED_FIRST = ["corpora", "training", "translator"]


@pytest.mark.parametrize("name", FIGURE_FIRST + PRINTED_FIRST)
def test_something_is_seen_before_the_list_of_what_is_needed(name):
    """A figure, or what the thing at work prints."""
    (path,) = (path for path in PATHS if name_of(path)[3:] == name)
    every = cells(path)
    begins = re.compile(r"^(> \*\*You will build\*\*|## )", re.M)
    wants = next(i for i, c in enumerate(every) if begins.search(c["source"]))
    seen = [c for c in every[:wants] if c["cell_type"] == "code"]
    if name in FIGURE_FIRST:
        assert any(c["metadata"].get("mystnb", {}).get("caption") for c in seen)
    else:
        assert any("print(" in c["source"] for c in seen)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import os\nfrom math import pi", "the imports"),
        ('#| export x\n"""What a module is about."""\n\nimport os', "the imports"),
        ("#| export\ndef one(): ...\nclass Two: ...", "the code of one and more"),
        ("STYLE = 1", "the code of STYLE"),
        ("fig, ax = plt.subplots()\nplt.show()", "how the figure is drawn"),
        ("#| export exercises.x\ndef same(): ...", "a tool of the checks: same"),
        (
            "#| export exercises.x\nno = 1\n@exercise_check('')\ndef look(): ...",
            "the code of look",
        ),
        ("#| exporti figures.x\ndef _box(): ...", "a tool of the figures: _box"),
        ("#| exporti\ndef _check_size(): ...", "the guard _check_size"),
        (
            "#| export figures.x\nA = 1\ndef a(): ...\ndef b_figure(): ...",
            "a tool of the figures: b_figure and more",
        ),
        ("from x import map_figure\n\nmap_figure()", "how the figure is drawn"),
        ("# @title How it was chosen\nx = 1", "how it was chosen"),
        ("%matplotlib inline\nx = 1", "the code"),
        ("not python", "the code"),
    ],
)
def test_a_fold_says_what_is_inside(source, words, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "book" / "_ext")
    from literate import inside

    assert inside(source) == words


def test_no_line_begins_with_what_ends_a_formula(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "book" / "_ext")
    from literate import keep_together

    formula = r'<span class="math notranslate nohighlight">\(V\)</span>'
    context = {"body": f"<p>{formula}. Of {formula} and {formula}), too.</p>"}
    keep_together(None, "page", "page.html", context, None)
    kept = '<span class="unbroken">' + formula + "{}</span>"
    first, last = kept.format("."), kept.format("),")
    assert context["body"] == f"<p>{first} Of {formula} and {last} too.</p>"


def test_long_names_in_tables_break_between_their_parts(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "book" / "_ext")
    from literate import let_names_break

    name = '<code><span class="pre">nn.key_mask_2</span></code>'
    context = {"body": f"<p>{name}</p><table>{name}, a_b 0.5</table><p>{name}</p>"}
    let_names_break(None, "page", "page.html", context, None)
    broken = name.replace("nn.key_mask", "nn.<wbr>key_<wbr>mask")
    wanted = f"<p>{name}</p><table>{broken}, a_b 0.5</table><p>{name}</p>"
    assert context["body"] == wanted


@each_chapter
def test_markdown_is_plain(path):
    for cell in cells(path, "markdown"):
        found = MYST.search(cell["source"])
        assert not found, f"Colab shows {found[0]!r} raw, in cell {cell['id']}"


# Inversions and short riddles that readers stumbled over, as the pages once had them.
RIDDLES = re.compile(
    r"\bbe had\b|\bwhoever\b|\bgone on with\b|\bwhat is there\b|\bis not reading\b"
    r"|\blast digit that matters\b|\btrained so\b|\bcheat, and cannot\b"
    r"|\bcould one still go\b|\bsays the share\b|\b(its|their) say\b"
    r"|\bgood as undecided\b|\bthird part are\b|\bbelow it has looked\b",
    re.IGNORECASE,
)


def words(text):
    """A text as one line: no line breaks, quotes or marks of comments inside of it."""
    return re.sub(r"[\s\"#>*]+", " ", text)


@each_chapter
def test_a_chapter_speaks_plainly(path):
    """In its prose, captions, docstrings, comments and what it prints."""
    for cell in cells(path):
        image = cell["metadata"].get("mystnb", {})
        said = [cell["source"], image.get("caption", "")]
        said.append(image.get("image", {}).get("alt", ""))
        for text in said:
            found = RIDDLES.search(words(text))
            assert not found, f"say it plainly: {found[0]!r} in cell {cell['id']}"


PAGES = [(ROOT / "book").glob(names) for names in ("*.md", "api/*.md")]
PROSE = [ROOT / "README.md", *sorted(itertools.chain(*PAGES))]


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.stem)
def test_a_page_speaks_plainly(path):
    found = RIDDLES.search(words(path.read_text("utf-8")))
    assert not found, f"say it plainly: {found[0]!r}"


def test_riddles_are_found_across_lines():
    for text in (
        "it cannot be\nhad",
        '# nowhere to be\n# had"',
        "Whoever asks",
        '"What is "\n    "there"',
        "> trained\n> so can cheat",
    ):
        assert RIDDLES.search(words(text)), text
    assert not RIDDLES.search(words("What is therefore true. We had been told so."))


@each_chapter
def test_links_lead_somewhere(path):
    for cell in cells(path, "markdown"):
        for target in re.findall(r"\]\(([^)\s]+)\)", without_fences(cell["source"])):
            if re.match(r"[a-z]+:|#", target):
                continue
            file = (path.parent / target.split("#")[0]).resolve()
            assert file.exists(), f"{target} in cell {cell['id']} leads nowhere"


@cache
def exported_modules():
    """Each module that a notebook exports, and the number of its chapter."""
    home = {}
    for path in PATHS:
        for cell in cells(path, "code"):
            pattern = r"^#\|\s*default_exp[ \t]+(\S+)"
            for name in re.findall(pattern, cell["source"], re.M):
                door = name.partition(".")[0]
                assert door == path.stem[3:], f"{path.name} exports {name}"
                home[name] = number(path)
            pattern = r"^#\|\s*exporti?[ \t]+(\S+)"
            for name in re.findall(pattern, cell["source"], re.M):
                assert home.setdefault(name, number(path)) == number(path), name
    return home


@each_chapter
def test_import_arrows_run_downward(path):
    if path.stem.endswith("command_line"):
        return  # thin over all of the library; tests/test_house.py knows it too
    home = exported_modules()
    for cell in cells(path, "code"):
        code = re.sub(r"^(\s*)[%!](?!=).*$", r"\1pass", cell["source"], flags=re.M)
        found = {module for module, _ in taken(code)} & set(home)
        for module in found - METHODS.get(path.stem[3:], set()):
            assert home[module] <= number(path), (
                f"{path.stem} imports {module}, which a later chapter builds"
            )


def test_every_chapter_is_in_the_book():
    toc = (ROOT / "_toc.yml").read_text("utf-8")
    missing = [n for n in map(name_of, PATHS) if f"notebooks/{n}\n" not in toc]
    assert not missing, f"not in _toc.yml: {missing}"


def test_what_the_book_folds_colab_folds(tmp_path):
    code = {"cell_type": "code", "id": "a", "source": "1"}
    cells = [
        {**code, "metadata": {"tags": ["hide-input", "not-live"]}},
        {**code, "metadata": {"cellView": "form", "mystnb": {}}},
        {**code, "metadata": {"tags": ["exercise"]}},
        {"cell_type": "markdown", "id": "b", "metadata": {}, "source": "text"},
    ]
    path = tmp_path / "some.ipynb"
    path.write_text(json.dumps({"cells": cells}), "utf-8")
    tool = [sys.executable, str(ROOT / "book/_tools/fold.py")]
    check = subprocess.run([*tool, "--check", path], capture_output=True, text=True)
    assert check.returncode and "some.ipynb: a, some.ipynb: a" in check.stderr
    subprocess.run([*tool, path], check=True)
    metadata = [cell["metadata"] for cell in json.loads(path.read_text())["cells"]]
    folded = {"cellView": "form", "tags": ["hide-input", "not-live"]}
    assert metadata == [folded, {"mystnb": {}}, {"tags": ["exercise"]}, {}]
    subprocess.run([*tool, "--check", path], check=True)
