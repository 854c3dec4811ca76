"""Slides of a chapter, from its built page: `make slides CHAPTER=02_attention`.

Every figure, formula, piece of code or output gets a slide with the heading of its
section and the sentence before it; the paragraphs in between are the speaker's notes
(key S). Right goes to the next section, down through one. Exercises and questions
are slides too; answers are behind a click, as in the page. Reveal.js shows them.
"""

import argparse
import copy
import re
import shutil
import sys
from pathlib import Path

from bs4 import BeautifulSoup

ROOT = Path(__file__).parents[2]
HTML = ROOT / "_build" / "html"
SLIDES = ROOT / "_build" / "slides"
REVEAL = ROOT / "_build/web/node_modules/reveal.js/dist"
SHOWN = "div.cell, div.math, div.highlight, table, figure, img, details"
STYLE = """
.reveal { font-size: 26px; font-family: var(--pst-font-family-base); }
.reveal .slides { text-align: left; }
.reveal .slides section { max-height: 100%; overflow-y: auto; }
.reveal pre { font-size: 20px; box-shadow: none; width: 100%; margin: 0 0 0.6em; }
.reveal h1, .reveal h2 { font-size: 1.5em; margin: 0 0 0.6em; }
.reveal .headerlink, .reveal .cell_input > .run-bar { display: none; }
html, body { height: 100%; overflow: hidden; }
"""
START = """
<script src="reveal/reveal.js"></script>
<script src="reveal/plugin/notes.js"></script>
<script>
  Reveal.initialize({ width: 1120, height: 760, margin: 0.04, center: false, hash: true,
    transition: "none", plugins: [RevealNotes] });
</script>
"""


def sentences(block) -> list[str]:
    """The sentences of a paragraph."""
    text = " ".join(block.get_text().split())
    return re.split(r"(?<=[.?!:])\s+(?=[A-Z])", text)


def slides_of(page, section, heading):
    """The slides of one section: what it shows, each with what is said before."""
    slides, said = [], []

    def add(shown=None):
        slide = page.new_tag("section")
        slide.append(copy.copy(heading))
        # To something shown leads one sentence. An exercise is read whole.
        if heading.get_text().startswith("Exercise"):
            leads = [" ".join(sentences(b)) for b in said]
        elif shown is None:
            leads = [sentences(b)[0] for b in said]
        else:
            leads = [sentences(b)[-1] for b in said[-1:]]
        for sentence in leads:
            lead = page.new_tag("p", attrs={"class": "tex2jax_process"})
            lead.string = sentence
            slide.append(lead)
        notes = page.new_tag("aside", attrs={"class": "notes"})
        notes.extend(said)
        slide.extend(part for part in (shown, notes) if part is not None)
        slides.append(slide)
        said.clear()

    for block in [b for b in section.find_all(recursive=False) if b is not heading]:
        if block.name == "section":
            continue
        if block.css.match(SHOWN) or block.css.select_one("img, svg, table"):
            add(block)
        else:
            said.append(block)
    if said or not slides:
        add()
    return slides


def deck(html: str) -> str:
    """A page of the book as slides."""
    page = BeautifulSoup(html.replace('"../', '"../html/'), "lxml")
    for tag in page.find_all(href=re.compile(r"^(\w+\.html|under_the_hood/)")):
        tag["href"] = f"../html/notebooks/{tag['href']}"
    article = page.find("article")
    stacks = page.new_tag("div", attrs={"class": "slides"})
    for section in article.find_all("section"):
        heading = section.find(re.compile("^h[1-3]$"), recursive=False)
        stack = page.new_tag("section")
        stack.extend(slides_of(page, section, heading))
        stacks.append(stack)
    reveal = page.new_tag("div", attrs={"class": "reveal"})
    reveal.append(stacks)
    for script in page.head.find_all("script", src=re.compile("theme|bootstrap")):
        script.decompose()  # they look for a page's side bars
    page.body.clear()
    page.body.append(reveal)
    link = '<link rel="stylesheet" href="reveal/reveal.css">'
    head = BeautifulSoup(f"<head>{link}<style>{STYLE}</style></head>", "lxml").head
    page.head.extend(list(head.children))
    page.body.append(BeautifulSoup(START, "html.parser"))
    return str(page)


def write_deck(chapter: str) -> Path:
    """Write the slides of a chapter beside its page, and say where."""
    source = HTML / "notebooks" / f"{chapter}.html"
    if not source.exists():
        known = sorted(p.stem for p in source.parent.glob("[0-9]*_*.html"))
        sys.exit(
            f"There is no chapter {chapter!r} in the built book. There are: {known}"
        )
    if not REVEAL.exists():
        sys.exit("Reveal.js is not there: it comes from npm, with `make book`.")
    target = SLIDES / f"{chapter}.html"
    shutil.copytree(REVEAL, SLIDES / "reveal", dirs_exist_ok=True)
    target.write_text(deck(source.read_text("utf-8")), "utf-8")
    return target


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("chapter", help="such as 02_attention")
    print(write_deck(parser.parse_args().chapter))
