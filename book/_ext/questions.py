"""The questions at the ends of the chapters, gathered on one page.

Each question of a chapter's section "Questions" (a paragraph that begins with a bold
number) gets an address, `question-1` and so on. The directive `questions` lists those
of some chapters with links to them; what is listed is the chapters' own text, so the
page cannot fall behind it.
"""

from __future__ import annotations

import re

from docutils import nodes
from literate import is_chapter, number_of
from sphinx.util.docutils import SphinxDirective

NUMBER = re.compile(r"(\d+)\.")


class Gathered(nodes.General, nodes.Element):
    """Where the questions of some chapters will stand."""


def asked(doctree) -> list[tuple[str, nodes.paragraph]]:
    """The numbers and paragraphs of a chapter's questions."""
    found = []
    for section in doctree.findall(nodes.section):
        if section[0].astext() not in ("Questions", "Question"):
            continue
        for paragraph in section.findall(nodes.paragraph):
            bold = next(iter(paragraph.findall(nodes.strong)), nodes.strong())
            match = NUMBER.fullmatch(bold.astext())
            if match and paragraph.astext().startswith(match[0]):
                found.append((match[1], paragraph))
    return found


def give_addresses(app, doctree):
    """Each question can be linked to."""
    if is_chapter(app.env.docname):
        for number, paragraph in asked(doctree):
            paragraph["ids"].append(f"question-{number}")


class Questions(SphinxDirective):
    """The questions of the chapters whose numbers are named."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self):
        return [Gathered("", numbers=self.arguments[0].split())]


def fill_in(app, doctree, docname):
    """Put the questions where the directive stands, each with its link."""
    for place in list(doctree.findall(Gathered)):
        listed = nodes.bullet_list()
        for name in sorted(app.env.found_docs):
            if not is_chapter(name) or number_of(name) not in place["numbers"]:
                continue
            for number, paragraph in asked(app.env.get_doctree(name)):
                item = nodes.paragraph()
                item += [part.deepcopy() for part in paragraph.children]
                item.remove(next(iter(item.findall(nodes.strong))))
                address = app.builder.get_relative_uri(docname, name)
                chapter = number_of(name)
                item += [
                    nodes.Text(" "),
                    nodes.reference(
                        "",
                        f"Answer in chapter {chapter}",
                        internal=True,
                        refuri=f"{address}#question-{number}",
                    ),
                ]
                listed += nodes.list_item("", item)
        place.replace_self([listed] if len(listed) else [])
        if list(listed.findall(nodes.math)):  # or Sphinx leaves MathJax out
            app.env.get_domain("math").data["has_equations"][docname] = True


def setup(app):
    app.add_node(Gathered)
    app.add_directive("questions", Questions)
    app.connect("doctree-read", give_addresses)
    app.connect("doctree-resolved", fill_in)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
