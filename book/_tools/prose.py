"""Hold the numbers and quotations in a page's prose against what the page shows.

    python book/_tools/prose.py                       every built page
    python book/_tools/prose.py notebooks/02_attention

A number in prose must be printed by a cell of the same page (after rounding), be
written in its code (a setting, or the bound of an assert), come from a source that its
sentence cites, or have an entry in prose.toml, with a reason. So must a quotation of
three words or more that begins with a capital. Counts in words, such as "six of the
eight" or "two training runs", must occur as they are written: in an output, or beside
the assert that holds them:

    assert sum(share > 0.75) == 6  # six of the eight

Plain whole numbers up to 12, years, and the numbers of chapters, figures, tables and
equations are not looked at. What an exercise or a question supposes is given, and its
answer may use it.
"""

from __future__ import annotations

import bisect
import functools
import html
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import bs4

ROOT = Path(__file__).resolve().parents[2]
HTML = ROOT / "_build" / "html"
# Made at each build from other pages, or of numbers of exercises (test_teaching.py).
GATHERED = ("book/api", "book/questions", "book/teaching")
KNOWN = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))

WORDS = ("one two three four five six seven eight nine ten eleven twelve").split()
MANY = rf"(?<![\w.,-])(?:{'|'.join(WORDS[1:])}|[2-9]|1[0-2])"
COUNTED = "hours days runs records seeds nats points".split()
# "six of the eight", "10 of 12 layers"; "three hours", "two training runs".
PHRASES = (
    re.compile(rf"\b{MANY} of (?:(?:the|its|these|those|our) )?{MANY}\b", re.I),
    re.compile(rf"\b{MANY}(?: \w+)? (?:{'|'.join(COUNTED)})\b", re.I),
    re.compile(r"\bone (?:seed|run|record) each\b", re.I),
)
NUMBER = re.compile(
    r"(?<![\w.,/–-])[-−]?(?P<digits>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?)"
    r"(?P<unit> ?%| percent| (?:thousand|million|billion)\b)?(?![\w/]|[.,:]\d)"
)
SCALES = {"thousand": 1e3, "million": 1e6, "billion": 1e9}
# What a number that follows these names is counted by the book, or is a date.
PLACES = re.compile(
    r"(?:chapters?|sections?|§+|figures?|tables?|equations?|parts?|exercises?|questions?"
    r"|steps?|rows?|layers?|heads?|lines?|pages?|Appendix|version|Python|torch|seeds?"
    r"|places?|positions?|cells?|ids?|bytes?|CUDA|CC BY|Theorem|Algorithm|Minutes"
    r"|reading)\s*$",
    re.I,
)
GOES_ON = re.compile(r"\s*(?:,|and|or|to|–|-|and in|, and)\s*")  # Figures 3 and 4
# A paragraph that names the paper may use the paper's numbers.
PAPER = re.compile(r"\bpaper|\bTable \d|\bsection \d|§\d|\brow \(?[A-E]\b", re.I)
YEAR = re.compile(r"(?:19[4-9]|20[0-3])\d")
ITEM = re.compile(
    r"\d+(?:[,_]\d{3})+(?:\.\d+)?|(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?", re.I
)
SENTENCE = re.compile(r"(?<=[.!?:;])\s+")
CITED = "\N{SYMBOL FOR RECORD SEPARATOR}"  # put where a sentence cites a source
BLOCKS = "p li tr dd dt figcaption summary h1 h2 h3 h4".split()
# Code that is a sentence: a model's words.
SPOKEN = re.compile(r"^[^\W\d_]+,?(?: [^\W\d_]+,?){2,}[.?!]?$")
# What is no prose, or is written by the book's own extensions at each build.
OTHER = (
    ".headerlink, .math, nav, svg, style, [hidden], .chapter-run, .chapter-times, "
    ".bibliography, .citation, .stored, .tour-number"
)


@dataclass(frozen=True)
class Finding:
    """What nothing on the page bears out, and the sentence that says it."""

    page: str
    what: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.page}: {self.what!r} in: {self.sentence}"


# --- what a page says ---------------------------------------------------------------


@functools.cache
def parts_of(source: str) -> tuple[list[list[str]], list[str], str]:
    """A page's paragraphs, in sentences, its quotations, and what bears them out."""
    soup = bs4.BeautifulSoup(source, "html.parser")
    article = soup.find("article") or soup
    shown = []
    for cell in article.select("div.cell, div.tour-sum, script"):
        shown.append(text_of(cell))
        cell.extract()
    for other in article.select(OTHER):
        other.replace_with(" … " if "math" in other.get("class", ()) else " ")
    for link in article.select("a[href]"):
        if link["href"].startswith("http") or "references.html" in link["href"]:
            link.append(CITED)
        else:  # a chapter's name begins with its number, or is its number
            link.string = re.sub(r"^\d\d\b", "", link.get_text())
    quoted = [q.get_text(" ") for q in article.select("em, q") if CITED not in q.text]
    for code in article.select("code, pre"):
        quoted += SPOKEN.findall(code.get_text())
        code.replace_with(" ` ")
    paragraphs = []
    for row in article.select("tr"):  # a row is one paragraph
        row.string = "; ".join(cell.get_text(" ") for cell in row.select("td, th"))
    for block in article.find_all(BLOCKS):
        asked = block.find_parent("section", id=re.compile("^(questions|exercise-)"))
        if asked and not block.find_parent("details"):
            shown.append(own_text(block))
        else:
            paragraphs.append([s for s in SENTENCE.split(own_text(block)) if s])
    return paragraphs, quoted, "\n".join(shown)


def own_text(block: bs4.Tag) -> str:
    """The text of a block without that of the blocks in it, on one line."""
    parts = [
        str(s)
        for s in block.find_all(string=True)
        if type(s) is bs4.NavigableString and s.find_parent(BLOCKS) is block
    ]
    return " ".join("".join(parts).split())


def text_of(cell: bs4.Tag) -> str:
    """What a cell says: output, code, data of its drawing, and the drawing's words."""
    said = [cell.get_text()]
    said += [
        html.unescape(script.decode_contents()) for script in cell.select("script")
    ]
    for name in ("alt", "title", "aria-label"):
        said += [tag[name] for tag in cell.select(f"[{name}]")]
    return "\n".join(said)


def code_of(page: str) -> str:
    """The code of a chapter, that under its hood too; nothing for other pages."""
    path = ROOT / f"{page}.ipynb"
    found = [
        p for p in (path, path.parent / "under_the_hood" / path.name) if p.exists()
    ]
    notebooks = [json.loads(p.read_text("utf-8")) for p in found]
    cells = [cell for notebook in notebooks for cell in notebook["cells"]]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")


# --- what bears it out --------------------------------------------------------------


def numbers_in(text: str) -> list[float]:
    """All numbers of a text, without their signs, in order of size."""
    return sorted({float(re.sub("[,_]", "", n)) for n in ITEM.findall(text)})


def near(numbers: list[float], low: float, high: float) -> bool:
    """Whether one of the numbers lies between two bounds."""
    slack = 1e-9 * max(1.0, abs(high))
    place = bisect.bisect_left(numbers, low - slack)
    return place < len(numbers) and numbers[place] <= high + slack


def borne_out(found: re.Match, numbers: list[float]) -> bool:
    """Whether a number of the page rounds to this one, as it is or as a share."""
    digits, unit = found["digits"].replace(",", ""), (found["unit"] or "").strip()
    decimals = len(digits.partition(".")[2])
    value, step = float(digits), 10.0**-decimals
    if not decimals and len(digits) > 2:  # 1,200 may be 1,213
        step = 10.0 ** min(len(digits) - len(digits.rstrip("0")), len(digits) - 2)
    scales = [1.0]
    if unit in ("%", "percent"):
        scales = [1.0, 0.01]
    elif unit in SCALES:
        scales = [SCALES[unit], 1.0]
    return any(
        near(numbers, (value - step / 2) * scale, (value + step / 2) * scale)
        for scale in scales
    )


def plain(text: str) -> str:
    """A text as quotations are compared: small letters, words only."""
    return " ".join(re.findall(r"[^\W_]+", text.lower()))


@functools.cache
def titles() -> str:
    """The titles of all that the book cites."""
    source = (ROOT / "book" / "references.bib").read_text("utf-8")
    return plain(re.sub(r"[{}]", "", source))


@functools.cache
def paper() -> list[float]:
    """The numbers of the paper."""
    return numbers_in(KNOWN["paper"]["numbers"])


def exempt(page: str, text: str) -> bool:
    """Whether prose.toml has a reason for this text, on this page or on all."""
    text = text.strip().lower().replace("’", "'")
    return text in KNOWN["everywhere"] or text in KNOWN.get(page, {})


def findings(page: str, source: str, code: str = "") -> Iterator[Finding]:
    """What the prose of a built page says and nothing on the page bears out."""
    paragraphs, quotations, shown = parts_of(source)
    said = "\n".join([shown, code])
    numbers, words = numbers_in(said), f" {plain(said)} "
    for paragraph in paragraphs:
        names_paper = any(PAPER.search(sentence) for sentence in paragraph)
        for sentence in paragraph:
            if CITED in sentence:
                continue
            for found in numbers_of(sentence):
                if names_paper and borne_out(found, paper()):
                    continue
                if not borne_out(found, numbers) and not exempt(page, found[0]):
                    yield Finding(page, found[0], sentence)
            for found in (f for p in PHRASES for f in p.finditer(sentence)):
                if f" {plain(found[0])} " not in words and not exempt(page, found[0]):
                    yield Finding(page, found[0], sentence)
    for quotation in quotations:
        text = " ".join(quotation.split())
        if len(text.split()) < 3 or text[0].islower() or exempt(page, text):
            continue
        if plain(text) not in words and plain(text) not in titles():
            yield Finding(page, text, "a quotation")


def numbers_of(sentence: str) -> Iterator[re.Match]:
    """The numbers of a sentence that something has to bear out."""
    place, end = False, 0
    for found in NUMBER.finditer(sentence):
        between, end = sentence[end : found.start()], found.end()
        place = bool(PLACES.search(between) or (place and GOES_ON.fullmatch(between)))
        digits = found["digits"]
        small = digits.isdigit() and int(digits) <= 12 and not found["unit"]
        if not (place or small or YEAR.fullmatch(digits)):
            yield found


def look_at(page: str) -> list[Finding]:
    """The findings of one page of the built book."""
    source = (HTML / f"{page}.html").read_text("utf-8")
    return list(findings(page, source, code_of(page)))


def main(pages: list[str]) -> int:
    """Print what is found in these pages, or in all but those of the library."""
    if not pages:
        files = sorted([*HTML.glob("notebooks/*.html"), *HTML.glob("book/*.html")])
        pages = [str(file.relative_to(HTML).with_suffix("")) for file in files]
        pages = [page for page in pages if page not in GATHERED]
    found = [finding for page in pages for finding in look_at(page)]
    print(*found, f"{len(found)} findings", sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
