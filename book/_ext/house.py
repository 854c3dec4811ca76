"""Sphinx extension: the house, drawn from the code.

The directive `{house}` draws the parts of the book as floors and the modules of each
chapter as rooms, the first chapters at the bottom. Which room uses which is read from
the imports; `{house-counts}` says it in numbers. Nothing is written down twice, so the
picture is that of today's code.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from html import escape
from pathlib import Path

import yaml
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "book" / "_tools"))
from doors import taken  # noqa: E402

LIBRARY = ROOT / "transformer_lib"
UNDER = ("figures", "exercises")  # what draws, and what checks exercises
WRITTEN = re.compile(r"# %% \S*notebooks/(?:under_the_hood/)?(\d\d)_\w+\.ipynb")


def module_of(path: Path) -> str:
    """The dotted name inside of the library: a package is its `__init__.py`."""
    name = ".".join(path.relative_to(LIBRARY).with_suffix("").parts)
    return name.removesuffix(".__init__")


@cache
def rooms() -> dict[str, tuple[str, frozenset[str]]]:
    """Each room with the number of its chapter, and the rooms that it uses."""
    paths = {}
    for path in sorted(LIBRARY.rglob("*.py")):
        written = WRITTEN.search(path.read_text("utf-8"))
        if written and path.relative_to(LIBRARY).parts[0] not in UNDER:
            paths[module_of(path)] = (path, written[1])
    found = {}
    for name, (path, chapter) in paths.items():
        package = ".".join(path.relative_to(ROOT).parent.parts)
        uses = {module for module, _ in taken(path.read_text("utf-8"), package)}
        found[name] = (chapter, frozenset(uses & set(paths) - {name}))
    return found


@cache
def floors() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The parts of the book, the first one first, with the names of their chapters."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text("utf-8"))
    found = []
    for part in toc["parts"]:
        pages = [page["file"] for page in part["chapters"]]
        chapters = [p.split("/")[-1] for p in pages if re.match(r"notebooks/\d\d", p)]
        if chapters:
            found.append((part["caption"], tuple(chapters)))
    return tuple(found)


def upward() -> list[tuple[str, str]]:
    """Pairs of rooms of which the first uses one of a later chapter."""
    found = [
        (name, used)
        for name, (chapter, uses) in rooms().items()
        for used in uses
        if rooms()[used][0] > chapter
    ]
    return sorted(found)


def title(chapter: str) -> str:
    """The first heading of a chapter."""
    text = (ROOT / "notebooks" / f"{chapter}.ipynb").read_text("utf-8")
    return re.search(r'"# ([^"\\]+)', text)[1]


def room(name: str, found_docs: set[str]) -> str:
    """One room; what it uses, and what uses it, is lit while it is pointed at."""
    uses = sorted(rooms()[name][1])
    said = f"uses {', '.join(uses)}" if uses else "uses no other room"
    door, _, stem = name.partition(".")
    tag, link = "span", ""
    if f"book/api/{door}" in found_docs:
        anchor = stem and f"#{stem.replace('_', '-')}"
        tag, link = "a", f' href="api/{door}.html{anchor}"'
    return (
        f'<{tag} class="room"{link} data-room="{name}" data-uses="{" ".join(uses)}" '
        f'title="{said}">{name}</{tag}>'
    )


def house(found_docs: set[str]) -> str:
    """The floors, the last one on top."""
    drawn = []
    for caption, chapters in reversed(floors()):
        cards = []
        for chapter in chapters:
            own = [n for n, (number, _) in rooms().items() if number == chapter[:2]]
            if own:
                doors = " ".join(room(name, found_docs) for name in sorted(own))
                cards.append(
                    f'<li><a href="../notebooks/{chapter}.html">{chapter[:2]} '
                    f"{escape(title(chapter))}</a> {doors}</li>"
                )
        if cards:
            drawn.append(
                f'<p class="floor">{escape(caption)}</p><ul>{"".join(cards)}</ul>'
            )
    return f'<div class="house">{"".join(drawn)}</div>{SCRIPT}'


SCRIPT = """<script>
for (const room of document.querySelectorAll('.house .room')) {
  const light = on => {
    const uses = room.dataset.uses.split(' ');
    for (const other of document.querySelectorAll('.house .room')) {
      const above = other.dataset.uses.split(' ').includes(room.dataset.room);
      other.classList.toggle('used', on && uses.includes(other.dataset.room));
      other.classList.toggle('user', on && above);
    }
  };
  for (const begin of ['mouseenter', 'focus'])
    room.addEventListener(begin, () => light(true));
  for (const end of ['mouseleave', 'blur'])
    room.addEventListener(end, () => light(false));
}
</script>"""


def counts() -> str:
    """The house in numbers, as a sentence."""
    arrows = sum(len(uses) for _, uses in rooms().values())
    up = upward()
    names = sorted({name.partition(".")[0] for name, _ in up})
    said = "All of them lead to earlier chapters or stay in their own."
    if up:
        said = (
            f"All but {len(up)} of them lead to earlier chapters or stay in their "
            f"own; those are of {', '.join(names)}."
        )
    return f"{len(rooms())} rooms, {arrows} arrows. {said}"


class House(SphinxDirective):
    """The picture."""

    def run(self):
        for path in (__file__, ROOT / "_toc.yml", *LIBRARY.rglob("*.py")):
            self.env.note_dependency(str(path))
        for drawn in (rooms, floors):
            drawn.cache_clear()
        return [nodes.raw("", house(self.env.found_docs), format="html")]


class Counts(SphinxDirective):
    """Its numbers."""

    def run(self):
        return [nodes.paragraph("", counts(), classes=["stored"])]


def setup(app):
    app.add_directive("house", House)
    app.add_directive("house-counts", Counts)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
