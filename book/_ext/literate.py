"""Sphinx extension of this book.

It hides nbdev's ``#|`` lines and Colab's titles, says what is inside folded cells,
writes under each chapter's title how long the chapter took to run, and gives the
directive ``{chapter-times}``, a table of all of them.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx import addnodes
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

import transformer_lib

DIRECTIVE = re.compile(r"^\s*#\s*(\||@title\b).*$")
TITLE = re.compile(r"(?m)^#\s*@title\s+(.+)$")
DRAWS = re.compile(r"plt\.show\(|^(show|InteractiveFigure|\w+_figure)\(", re.MULTILINE)
CHAPTERS = "notebooks"
WORDS_A_MINUTE = 70  # of a text with code and formulas; exercises are not counted


def timings_of(app) -> dict:
    """Chapter name to what run_notebooks.py recorded; empty where nothing ran."""
    try:
        path = Path(app.srcdir) / "_build" / "timings.json"
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}


def in_words(seconds: float) -> str:
    """A length of time as a reader would say it."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"


# --- cells ---------------------------------------------------------------


def hide_directives(app, doctree):
    """Drop ``#|`` lines from code cells, and cells that hold nothing else."""
    for source in list(doctree.findall(nodes.container)):
        if source.get("nb_element") != "cell_code_source":
            continue
        for block in list(source.findall(nodes.literal_block)):
            lines = block.astext().split("\n")
            kept = [line for line in lines if not DIRECTIVE.match(line)]
            if len(kept) == len(lines):
                continue
            text = "\n".join(kept).strip("\n")
            if text.strip():
                clean = nodes.literal_block(text, text)
                clean.attributes.update(block.attributes)
                clean.source, clean.line = block.source, block.line
                block.replace_self(clean)
                continue
            cell = source.parent
            cell.remove(source)
            if not cell.children:
                cell.parent.remove(cell)
            break


def name_folds(app, doctree):
    """A folded cell says what is inside it, not that it is a cell."""
    for cell in doctree.findall(nodes.container):
        mode = cell.get("hide_mode")
        if cell.get("nb_element") == "cell_code" and mode in ("input", "all"):
            source = next(iter(cell.findall(nodes.literal_block)), None)
            if source is not None:
                words = inside(source.astext())
                words += " and its output" if mode == "all" else ""
                cell["prompt_show"] = f"Show {words}"
                cell["prompt_hide"] = f"Hide {words}"


def inside(source: str) -> str:
    """What a cell holds, in a few words: those of Colab's title, or of its names."""
    if title := TITLE.search(source):
        return title[1][0].lower() + title[1][1:]
    try:
        body = ast.parse(re.sub(r"(?m)^\s*[%!](?!=).*$", "", source)).body
    except SyntaxError:
        return "the code"
    defined = [part for part in body if hasattr(part, "name")]
    checks = [
        part.name
        for part in defined
        if "exercise_check" in map(called, part.decorator_list)
    ]
    names = [part.name for part in defined] or [
        node.id
        for part in body
        if isinstance(part, ast.Assign)
        for node in ast.walk(part.targets[0])
        if isinstance(node, ast.Name) and node.id.isupper()
    ]
    text = body[:1] and isinstance(getattr(body[0], "value", None), ast.Constant)
    rest = body[1:] if text and len(body) > 1 else body  # without a docstring
    if all(isinstance(part, ast.Import | ast.ImportFrom) for part in rest):
        return "the imports"
    if DRAWS.search(source) and not names:
        return "how the figure is drawn"
    if checks or not names:
        return "the code" + (f" of {' and '.join(checks)}" if checks else "")
    more = " and more" if names[1:] else ""
    if "#| export exercises" in source:
        return f"a tool of the checks: {names[0]}{more}"
    if re.search(r"#\| exporti? figures", source):
        shown = next((n for n in names if n.endswith("_figure")), names[0])
        return f"a tool of the figures: {shown}{more}"
    if names[0].startswith("_check_"):
        return f"the guard {names[0]}" + (" and another" if names[1:] else "")
    return f"the code of {names[0]}{more}"


def called(decorator: ast.expr) -> str:
    """The name of what a decorator calls."""
    function = getattr(decorator, "func", decorator)
    return getattr(function, "id", getattr(function, "attr", ""))


# --- run times ---------------------------------------------------------------


def is_chapter(docname: str) -> bool:
    return docname.startswith(CHAPTERS + "/")


def number_of(docname: str) -> str:
    """The two digits that a chapter's file name begins with."""
    return docname.split("/")[-1].split("_")[0]


def number_title(app, doctree):
    """In the side bar and in links a chapter's title begins with its number."""
    docname = app.env.docname
    if not is_chapter(docname) or docname not in app.env.titles:
        return
    number = number_of(docname) + "\u2002"
    app.env.titles[docname].insert(0, nodes.Text(number))
    for entry in list(app.env.tocs[docname].findall(nodes.reference))[:1]:
        entry.insert(0, nodes.Text(number))


def add_run_time(app, doctree):
    """Under the title of a chapter: how long it took."""
    docname = app.env.docname
    if not is_chapter(docname):
        return
    record = timings_of(app).get(docname.removeprefix(f"{CHAPTERS}/"))
    if not hasattr(app.env, "literate_runs"):
        app.env.literate_runs = {}
    app.env.literate_runs[docname] = record and record.get("ran")
    title = next(iter(doctree.findall(nodes.title)), None)
    if not record or title is None:
        return
    words = f"This chapter ran in {in_words(record['seconds'])} on {record['device']}."
    line = nodes.paragraph("", words, classes=["chapter-run"])
    title.parent.insert(title.parent.index(title) + 1, line)


def outdated(app, env, added, changed, removed):
    """Pages to read again, since a chapter has been run again."""
    timings = timings_of(app)
    runs = getattr(env, "literate_runs", {})
    stale = {
        docname
        for docname, ran in runs.items()
        if docname in env.found_docs
        and ran != timings.get(docname.removeprefix(f"{CHAPTERS}/"), {}).get("ran")
    }
    tables = getattr(env, "literate_tables", {})
    stale |= {
        docname
        for docname, shown in tables.items()
        if docname in env.found_docs and shown != table_state(app)
    }
    return sorted(stale)


def table_state(app) -> str:
    """What a table of run times depends on."""
    seconds = {name: r.get("seconds") for name, r in timings_of(app).items()}
    rows = [(row, seconds.get(row[0])) for row in chapters(app)]
    return json.dumps(rows)


def chapters(app) -> list[tuple[str, str, str]]:
    """Name, title and reading time of every chapter, in order."""
    found = []
    for path in sorted((Path(app.srcdir) / CHAPTERS).glob("*.ipynb")):
        cells = json.loads(path.read_text("utf-8"))["cells"]
        texts = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
        text = "\n".join(texts)
        title = re.search(r"(?m)^#\s+(.+?)\s*$", text)
        told = re.split(r"(?m)^## (?:Exercises|Questions)", text)[0]
        minutes = max(5, 5 * round(len(told.split()) / WORDS_A_MINUTE / 5))
        found.append(
            (
                path.stem,
                title.group(1) if title else path.stem,
                f"{minutes} min",
            )
        )
    return found


class ChapterTimes(SphinxDirective):
    """A table of the chapters: title, reading time, run time."""

    has_content = False
    option_spec: ClassVar = {"only": directives.unchanged}

    def run(self):
        app = self.env.app
        if not hasattr(self.env, "literate_tables"):
            self.env.literate_tables = {}
        self.env.literate_tables[self.env.docname] = table_state(app)
        timings = timings_of(app)
        only = self.options.get("only", "").split()
        rows = chapters(app)
        if only:  # in that order
            of = {row[0].split("_")[0]: row for row in rows}
            rows = [of[number] for number in only if number in of]
        table = nodes.table(classes=["chapter-times"])
        group = nodes.tgroup(cols=3)
        table += group
        for width in (60, 20, 20):
            group += nodes.colspec(colwidth=width)
        head = nodes.thead()
        group += head
        head += self.row(*(nodes.Text(t) for t in ("Chapter", "To read", "To run")))
        body = nodes.tbody()
        group += body
        total = 0.0
        for name, title, reading in rows:
            seconds = timings.get(name, {}).get("seconds")
            total += seconds or 0.0
            ran = in_words(seconds) if seconds is not None else "not run"
            body += self.row(
                self.link(name, title), nodes.Text(reading), nodes.Text(ran)
            )
        return [table]

    def link(self, name, title):
        docname = f"{CHAPTERS}/{name}"
        if docname not in self.env.found_docs:
            return nodes.Text(title)
        reference = addnodes.pending_xref(
            "",
            refdoc=self.env.docname,
            refdomain="std",
            reftype="doc",
            refexplicit=True,
            refwarn=True,
            reftarget="/" + docname,
        )
        title = f"{number_of(name)}\u2002{title}"
        reference += nodes.inline("", title, classes=["xref", "std", "std-doc"])
        return reference

    @staticmethod
    def row(*cells):
        row = nodes.row()
        for cell in cells:
            row += nodes.entry("", nodes.paragraph("", "", cell))
        return row


# --- names ---------------------------------------------------------------


def find_by_last_name(app, env, node, contnode):
    """A bare name in a docstring means the one library object that ends in it."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or "." in target:
        return None
    objects = env.get_domain("py").objects
    found = [full for full in objects if full.split(".")[-1] == target]
    if len(found) != 1:
        return None
    entry = objects[found[0]]
    return make_refnode(
        app.builder, node["refdoc"], entry.docname, entry.node_id, contnode, found[0]
    )


# --- names of the library -------------------------------------------------------------


PLAIN: dict[str, list[str]] = {}


def keep_property(app, what, name, obj, options, lines):
    """Before napoleon, which takes a colon in a property's first line for a type."""
    if what == "property" and lines and ":" in lines[0]:
        PLAIN[name] = list(lines)


def restore_property(app, what, name, obj, options, lines):
    """After napoleon: that property's text as it was written."""
    lines[:] = PLAIN.pop(name, lines)


def mark_stable(app, what, name, obj, options, lines):
    """The names at the top of the library are stable; the others are for chapters."""
    last = name.rpartition(".")[2]
    offered = last in transformer_lib.__all__ and what in ("class", "function")
    if offered and getattr(transformer_lib, last) is obj:
        lines[:0] = [f"Stable: ``from transformer_lib import {last}``.", ""]


def readable_default(app, what, name, obj, options, signature, returns):
    """A default made by a function prints as `<factory>`, which Sphinx cannot read."""
    if signature and "<factory>" in signature:
        return signature.replace("<factory>", "..."), returns
    return None


# --- lines -----------------------------------------------------------------


def keep_together(app, pagename, templatename, context, doctree):
    """No line begins with the full stop or the comma after a formula."""
    formula = r'(<span class="math[^>]*>[^<]*</span>[.,;:!?)]+)'
    if "body" in context:
        kept = r'<span class="unbroken">\1</span>'
        context["body"] = re.sub(formula, kept, context["body"])


def let_names_break(app, pagename, templatename, context, doctree):
    """Long names in tables break after a dot or an underscore, not in a word."""

    def marked(table: re.Match) -> str:
        return re.sub(
            r'(?<=<span class="pre">)[^<]+',
            lambda name: re.sub(r"(?<=\w[._])(?=[A-Za-z])", "<wbr>", name[0]),
            table[0],
        )

    if "body" in context:
        context["body"] = re.sub(r"(?s)<table.*?</table>", marked, context["body"])


# --- scripts ---------------------------------------------------------------


def drop_doubled_scripts(app, pagename, templatename, context, doctree):
    """sphinx-thebe adds its inline scripts twice; the second throws in the browser."""
    seen, kept = set(), []
    for script in context.get("script_files", []):
        body = (getattr(script, "attributes", None) or {}).get("body")
        if body and body in seen:
            continue
        seen.add(body)
        kept.append(script)
    context["script_files"] = kept


def forget(app, env, docname):
    """Sphinx is about to read a page again, or it is gone."""
    for table in ("literate_runs", "literate_tables"):
        getattr(env, table, {}).pop(docname, None)


def serve_mathjax(app, config):
    """Serve MathJax with the pages where `make` has fetched it."""
    folder = Path(app.srcdir) / "_build" / "web" / "static"
    if (folder / "mathjax" / "tex-svg.js").exists():
        config.html_static_path.append(str(folder))
        config.mathjax_path = "mathjax/tex-svg.js"


def setup(app):
    app.connect("config-inited", serve_mathjax)
    app.add_directive("chapter-times", ChapterTimes)
    app.connect("doctree-read", name_folds, priority=400)  # while `#|` is there
    app.connect("doctree-read", hide_directives)
    app.connect("doctree-read", add_run_time)
    app.connect("doctree-read", number_title, priority=900)
    app.connect("env-get-outdated", outdated)
    app.connect("missing-reference", find_by_last_name)
    app.connect("autodoc-process-docstring", keep_property, priority=400)
    app.connect("autodoc-process-docstring", restore_property, priority=600)
    app.connect("autodoc-process-docstring", mark_stable, priority=700)
    app.connect("autodoc-process-signature", readable_default)
    app.connect("env-purge-doc", forget)
    app.connect("html-page-context", keep_together)
    app.connect("html-page-context", let_names_break)
    app.connect("html-page-context", drop_doubled_scripts, priority=900)
    return {"version": "1", "parallel_read_safe": False, "parallel_write_safe": True}
