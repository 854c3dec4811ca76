"""The page of the paper's claims: every place of the paper, every link, every test."""

import json
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "book" / "claims.md").read_text("utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if re.match(r"\| (Section|Equation|Table|Figure) ", line)
]
# What the paper (v7) has, typed from its table of contents.
SECTIONS = """1 2 3 3.1 3.2 3.2.1 3.2.2 3.2.3 3.3 3.4 3.5 4 5 5.1 5.2 5.3 5.4 6 6.1 6.2
6.3 7""".split()
PLACES = [
    *(f"Section {number}" for number in SECTIONS),
    *(f"Equation {number}" for number in (1, 2, 3)),
    *(f"Table {number}" for number in (1, 2, 3, 4)),
    *(f"Figure {number}" for number in (1, 2, 3, 4, 5)),
]


def test_every_place_of_the_paper_has_one_entry():
    assert [row[0] for row in ROWS] == PLACES


def slug(heading: str) -> str:
    """The anchor of a heading, as the book makes it."""
    plain = re.sub(r"[*`$_]", "", heading.strip().lower())
    return re.sub(r"[^\w\u4e00-\u9fff\- ]", "", plain).replace(" ", "-")


def headings(path: Path) -> set[str]:
    cells = json.loads(path.read_text("utf-8"))["cells"]
    texts = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
    text = "\n".join(texts)
    return {slug(line) for line in re.findall(r"^#+ (.+)$", text, re.M)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_entry_leads_somewhere(row):
    assert len(row) == 5 and all(row)
    links = re.findall(r"\]\((\S+?)(?:#(\S+))?\)", row[2])
    assert links
    for target, anchor in links:
        path = (ROOT / "book" / target).resolve()
        assert path.is_file(), target
        assert not anchor or anchor in headings(path), f"{target}#{anchor}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_entry_names_a_test_that_exists(row):
    names = re.findall(r"`(test_\w+\.py)(?:::(test_\w+))?`", row[4])
    assert names or row[4] == "–"
    for file, function in names:
        source = (ROOT / "tests" / file).read_text("utf-8")
        assert f"def {function or 'test_'}" in source, f"{file}::{function}"


HOW = ("proved", "recomputed", "transcribed", "scaled down", "not reproduced")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_entry_says_how_far_it_goes(row):
    for part in row[3].split("; "):
        assert part.partition(":")[0] in HOW, part
    assert all(f"\n{word}\n: " in PAGE for word in HOW)


def test_nothing_typed_twice_is_called_proved():
    """Where constants are compared with constants, the page says "transcribed"."""
    how = {row[0]: row[3] for row in ROWS}
    for place in ("Table 2", "Table 3", "Table 4"):
        assert "transcribed" in how[place] and "proved" not in how[place]
    assert "not reproduced: that it helps BLEU" in how["Section 5.4"]


def test_every_record_is_on_the_page_of_evidence():
    page = (ROOT / "notebooks" / "32_evidence.ipynb").read_text("utf-8")
    folder = ROOT / "transformer_lib" / "evidence"
    files = {p.relative_to(folder).as_posix()[:-5] for p in folder.rglob("*.json")}
    listed = set(re.findall(r'"    \\"([\w/-]+)\\": \(', page))
    ended = {name for name in files if name.startswith("results/")}
    assert listed == files - ended
    queue = tomllib.loads((folder / "queue.toml").read_text("utf-8"))
    groups = {g["name"] for g in queue["group"]} | {"collapse", "gpu"}  # by gpu.py
    assert {name.split("/")[1] for name in ended} <= groups
    assert "transformer_lib/evidence/results" in page


def test_benchmarks_lead_with_equal_batches():
    """What the page of evidence says of a record comes from like beside like first."""
    cells = json.loads((ROOT / "notebooks" / "32_evidence.ipynb").read_text("utf-8"))
    (source,) = (
        "".join(cell["source"])
        for cell in cells["cells"]
        if "ENTRIES = {" in "".join(cell["source"])
    )
    names: dict = {}
    exec(source, names)
    ours = {"tokens_per_second_median": 90.0, "times_peer_median": 3.0}
    peer = {"tokens_per_second_median": 100.0}
    case = {"ours, by length": ours, "Hugging Face, by length": peer}
    said = names["training_of"]({"results": {"one": case, "two": case}})
    assert said.startswith("0.90 to 0.90 times") and "equal batches" in said
    assert said.index("equal batches") < said.index("random batches")
    assert said.endswith("3.0 to 3.0")
    runs = {
        "ours": {"tokens_per_second": 110.0, "peak_mb": 50.0},
        "Hugging Face, by length": {"tokens_per_second": 100.0, "peak_mb": 100.0},
        "Hugging Face": {"tokens_per_second": 20.0, "peak_mb": 200.0},
    }
    paces = {"ours": 30.0, "Hugging Face, by length": 20.0, "Hugging Face": 5.0}
    engines = {name: {"tokens_per_second": pace} for name, pace in paces.items()}
    said = names["peers_of"]({"training": runs, "decoding": {"engines": engines}})
    assert said.startswith("1.10 times Hugging Face's tokens/s, 0.50 of its memory, on")
    training, decoding = said.split("decoding with the model that shipped then: ")
    assert training.strip().endswith("5.5, 0.25")
    assert decoding.startswith("1.50 times") and "sentences by length" in decoding
