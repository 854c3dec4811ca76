"""Sphinx extension: the front page, an essay whose pictures are drawn from the records.

The directive `{scene}` holds the text of one scene, a paragraph for each of its beats,
and draws it. Each beat has frames: lists of marks (texts, bars, lines), each with
a name. Here they become still pictures in SVG, wide and narrow, which need no script;
book/_static/essay.js moves marks of the same name from frame to frame. The role
`{essay}` writes a number that the scenes show. `{essay-fails}` lists sentences that the
model gets wrong, `{essay-live}` is the place of the translator.

All numbers are read from transformer_lib/evidence: when another model ships, the page
says what the new records say. What its prose takes for granted about them is asserted
in tests/test_welcome.py.
"""

from __future__ import annotations

import html
import json
import re

import essay_facts
import essay_scenes
from docutils import nodes
from essay_facts import EVIDENCE, RECORDS, facts
from essay_scenes import SCENES, Stage, all_frames, still
from sphinx.util.docutils import SphinxDirective, SphinxRole


def depend(env):
    for name in (*RECORDS, *(run["recipe"]["name"] for run in facts().runs)):
        for path in EVIDENCE.rglob(f"{name}.json"):
            env.note_dependency(str(path))
    for module in (essay_facts, essay_scenes):
        env.note_dependency(module.__file__)
    env.note_dependency(__file__)
    env.essay_pages = getattr(env, "essay_pages", set()) | {env.docname}


class Scene(SphinxDirective):
    """The text of a scene, a paragraph for each beat, and its picture."""

    required_arguments = 1
    has_content = True

    def run(self):
        depend(self.env)
        name = self.arguments[0]
        holder = nodes.container()
        self.state.nested_parse(self.content, self.content_offset, holder)
        beats = len(SCENES[name](Stage(True)))
        if len(holder) != beats:
            raise self.error(f"scene {name}: {len(holder)} paragraphs, {beats} beats.")
        for part in holder:
            part["classes"] += ["beat"]
        pictures = still(name, wide=True) + still(name, wide=False)
        begin = (
            f'<div class="scene" data-scene="{name}">'
            f'<div class="essay-still">{pictures}</div>'
        )
        return [
            nodes.raw("", begin, format="html"),
            *holder.children,
            nodes.raw("", "</div>", format="html"),
        ]


class Begin(SphinxDirective):
    """The frames, and what hides the still pictures where scripts run."""

    def run(self):
        depend(self.env)
        data = json.dumps(all_frames(), ensure_ascii=False, separators=(",", ":"))
        html = (
            "<script>document.documentElement.classList.add('essay-moves')</script>"
            f'<script type="application/json" id="essay-frames">{data}</script>'
        )
        return [nodes.raw("", html.replace("</s>", "<\\/s>"), format="html")]


class Live(SphinxDirective):
    """The place of the translator that draws its attention."""

    def run(self):
        depend(self.env)
        state = self.config.translator_page
        self.env.essay_live = {**getattr(self.env, "essay_live", {})}
        self.env.essay_live[self.env.docname] = state
        where = facts().record["across"]
        data = {**state, "layer": where["layer"] - 1, "head": where["head"] - 1}
        data["text"] = facts().record["source"]["text"]
        f = facts()
        start = {
            "source": f.words,
            "words": f.target[:-1],
            "shares": [[round(w, 2) for w in row] for row in f.across[:-1]],
        }
        data["start"] = json.dumps(start, ensure_ascii=False)
        written = "".join(
            f' data-{key}="{html.escape(str(value))}"' for key, value in data.items()
        )
        words = (
            "With JavaScript, you can translate here."
            if state
            else "The translator would be here: this copy of the book was built "
            "without ONNX Runtime, which npm fetches, or without what writes the model."
        )
        box = f'<div class="essay-live"{written}><p>{words}</p></div>'
        return [nodes.raw("", box, format="html")]


class Fails(SphinxDirective):
    """What the model gets wrong, of what the record tried."""

    def run(self):
        depend(self.env)
        rows, most = [], 6
        for row in facts().other["tried"]:
            right = re.search(row["rule"], row["translation"], re.IGNORECASE)
            if right or len(rows) == most:
                continue
            why = re.sub(r"\*(.+?)\*", r"<em>\1</em>", html.escape(row["why"]))
            text, wrote, means = (
                html.escape(row[name]) for name in ("text", "translation", "means")
            )
            means = means and f'<span class="means">{means}</span>'
            rows.append(
                f'<li><span lang="en">{text}</span>'
                f'<span class="stored wrote" lang="de">{wrote}</span>{means}'
                f'<span class="why">{why}</span></li>'
            )
        return [
            nodes.raw(
                "", f'<ul class="essay-fails">{"".join(rows)}</ul>', format="html"
            )
        ]


class Value(SphinxRole):
    """A number of the scenes, or a word of the model."""

    def run(self):
        depend(self.env)
        return [nodes.inline("", facts().values()[self.text], classes=["stored"])], []


def outdated(app, env, added, changed, removed):
    """Pages that were built with another model in the translator."""
    pages, now = getattr(env, "essay_live", {}), app.config.translator_page
    return [
        name for name, state in pages.items() if name in env.found_docs and state != now
    ]


def add_script(app, pagename, templatename, context, doctree):
    if pagename in getattr(app.env, "essay_pages", ()):
        app.add_css_file("essay.css")
        for name in ("make.js", "essay.js"):
            app.add_js_file(name, loading_method="defer")
        # Three quarters of what the page would load typesets formulas: it has none.
        if doctree and not list(doctree.findall(nodes.math)):
            files = context["script_files"]
            files[:] = [file for file in files if "mathjax" not in str(file).lower()]


def setup(app):
    app.add_directive("scene", Scene)
    app.add_directive("essay-begin", Begin)
    app.add_directive("essay-live", Live)
    app.add_directive("essay-fails", Fails)
    app.add_role("essay", Value())
    app.connect("env-get-outdated", outdated)
    app.connect("html-page-context", add_script)
    return {"version": "1", "parallel_read_safe": False, "parallel_write_safe": True}
