"""What makes a page comfortable to read.

Equations and figures of the chapters get numbers, which can be linked to. The first
mention of a glossary term on a page shows its definition. A page says when there is
nothing under an address, and a site map and previews are made for those who link here.
"""

from __future__ import annotations

import json
import re
from functools import cache

from docutils import nodes
from literate import is_chapter, number_of
from sphinx import addnodes

GLOSSARY, NOTATION = "book/glossary", "book/notation"
UNMARKED = (GLOSSARY, "book/references", "book/api/")
# A term is not looked for in these: names, formulas, code, links.
LEAVE = (
    nodes.title,
    nodes.reference,
    nodes.literal,
    nodes.literal_block,
    nodes.math,
    nodes.math_block,
    nodes.raw,
    nodes.term,
)
# Words of every day: they have the glossary's meaning in the chapters it names.
EVERYDAY = {"key", "memory", "query", "temperature", "value"}


# --- numbers -------------------------------------------------------------------------


def number_equations(app, doctree):
    """Displayed formulas of chapter 02 are (2.1), (2.2), ...; each has an address."""
    if not is_chapter(app.env.docname):
        return
    chapter = int(number_of(app.env.docname))
    for i, block in enumerate(doctree.findall(nodes.math_block), 1):
        if not block.get("number"):
            block["number"] = f"{chapter}.{i}"
            block["ids"] = [f"equation-{chapter}-{i}"]


def number_figures(app, doctree):
    """What cells drew is Figure 2.1, 2.2, ...; each has an address.

    Pictures, drawings and interactive figures are counted together.

    What to see in it is said by the cell's metadata: `mystnb: {caption: ...}`.
    """
    if not is_chapter(app.env.docname):
        return
    chapter, i = int(number_of(app.env.docname)), 0
    for output in doctree.findall(nodes.container):
        if output.get("nb_element") != "cell_code_output":
            continue
        drawn = [part for part in output if is_drawn(part)]
        if drawn:
            i += 1
            number = nodes.strong("", f"Figure {chapter}.{i}")
            words = nodes.paragraph("", "", number, classes=["figure-number"])
            words["ids"] = [f"figure-{chapter}-{i}"]
            about = output.parent.get("cell_metadata", {}).get("mystnb", {})
            if caption := about.get("caption"):
                words += nodes.Text(f"\u2002{caption}")
            output.insert(output.index(drawn[-1]) + 1, words)  # before printed text


def is_drawn(part) -> bool:
    """Whether a part of a cell's output is a picture or an interactive figure."""
    if list(part.findall(nodes.image)):
        return True
    begins = re.compile('class="(drawn |interactive-figure|attention-view)')
    return any(begins.search(raw.astext()[:400]) for raw in part.findall(nodes.raw))


# --- definitions ---------------------------------------------------------------------


@cache  # pages are written after all of them are read
def definitions(env) -> dict[str, tuple[str, str, list[str]]]:
    """Term in lower case -> (address in the glossary, definition, its chapters)."""
    found = {}
    for item in env.get_doctree(GLOSSARY).findall(nodes.definition_list_item):
        said = next(item.findall(nodes.definition)).deepcopy()
        for cited in list(said.findall(addnodes.pending_xref)):
            if cited.get("refdomain") == "cite":  # (author year), or Author in the text
                author = re.match("[a-z]*", cited["reftarget"])[0].capitalize()
                in_text = cited["reftype"] == "t"
                cited.parent.replace(cited, nodes.Text(author if in_text else ""))
        said = re.sub(r"\s+([.,;])", r"\1", said.astext())
        said, where = " ".join(said.split()), r"\s*Chapters? ([\d, and]+)\.\s*$"
        chapters = re.findall(r"\d+", "".join(re.findall(where, said)))
        said = re.sub(where, "", said)
        for term in item.findall(nodes.term):
            found[term.astext().strip().lower()] = (term["ids"][0], said, chapters)
    return found


def mark_terms(app, doctree, docname):
    """The first mention of each glossary term on a page is a link that explains."""
    if docname.startswith(UNMARKED):
        return
    known = definitions(app.env)
    names = sorted(known, key=len, reverse=True)
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, names))})(s?)\b", re.IGNORECASE)
    seen = set()
    for paragraph in list(doctree.findall(nodes.paragraph)):
        for text in list(paragraph.findall(nodes.Text)):
            title = isinstance(text.parent, nodes.emphasis) and text.count(" ") > 2
            if not title and not within(text, LEAVE, paragraph):
                mark_text(app, docname, text, pattern, known, seen)


def within(node, kinds, top) -> bool:
    """Whether a node lies inside one of these kinds, up to and with the top."""
    while node is not None:
        if isinstance(node, kinds):
            return True
        node = None if node is top else node.parent
    return False


def mark_text(app, docname, text, pattern, known, seen):
    """Split one piece of text at the terms in it that were not seen before."""
    plain, start, parts = text.astext(), 0, []
    number = number_of(docname) if is_chapter(docname) else ""
    for match in pattern.finditer(plain):
        term = match.group(1).lower()
        address, said, chapters = known[term]
        if term in seen or (term in EVERYDAY and number not in chapters):
            continue
        seen.add(term)
        link = nodes.reference("", match.group(0), internal=True, classes=["defined"])
        link["refuri"] = app.builder.get_relative_uri(docname, GLOSSARY) + f"#{address}"
        link["reftitle"] = said  # comforts.js shows it, to the keyboard too
        parts += [nodes.Text(plain[start : match.start()]), link]
        start = match.end()
    if parts:
        text.parent.replace(text, [*parts, nodes.Text(plain[start:])])


@cache
def letters(env) -> dict[str, str]:
    """The letters of shapes and what they mean, from the page on notation."""
    doctree = env.get_doctree(NOTATION)
    rows = next(doctree.findall(nodes.tbody)).findall(nodes.row)
    cells = [[cell.astext() for cell in row.findall(nodes.entry)] for row in rows]
    return {letter: meaning for letter, meaning, *_ in cells}


def hand_over(app, pagename, templatename, context, doctree):
    """Give the scripts what they need to explain shapes and to know the page."""
    known = {"page": pagename, "letters": letters(app.env)} if doctree else {}
    app.add_js_file(None, body=f"window.literate = {json.dumps(known)};", priority=100)


def setup(app):
    app.connect("doctree-read", number_equations)
    app.connect("doctree-read", number_figures)
    app.connect("doctree-resolved", mark_terms)
    app.connect("html-page-context", hand_over)
    app.add_js_file("comforts.js", loading_method="defer")
    return {"version": "1", "parallel_read_safe": False, "parallel_write_safe": True}
