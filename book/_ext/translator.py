"""Sphinx extension: the page that translates in the browser, and numbers of records.

The directive ``{translator}`` stands where the translator is to be. Where `make` has
fetched ONNX Runtime from npm, the model that ships with the library is exported once
(chapter 22 does it; the files are kept in _build/web) and served with the pages;
book/_static/translator.js makes the rest. Else a line says what is missing.

The role ``{record}`` writes a number of a record in transformer_lib/evidence:
``{record}`tatoeba-en-de scores.sacreBLEU.value .1f` ``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from pathlib import Path

from docutils import nodes
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective, SphinxRole

ROOT = Path(__file__).parents[2]
STATIC = ROOT / "book" / "_static"
MODEL = "tatoeba-en-de"
PARTS = ("make.js", "translator.js", "translator_engine.js", "translator.css")
RUNTIME = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")
PACKAGES = ("onnx", "onnxscript")
# What the page never asks for is not served with it.
NOT_SERVED = ("tokenizer.model",)
logger = logging.getLogger(__name__)


def digest(paths) -> str:
    """A hash of the content of files."""
    found = hashlib.sha256()
    for path in paths:
        found.update(path.read_bytes())
    return found.hexdigest()


def export_model(static: Path) -> str:
    """See that the exported model lies in a folder; its version.

    It is exported again when the model has changed or the code that exports.
    """
    library = ROOT / "transformer_lib"
    shipped = sorted((library / "pretrained" / MODEL).iterdir())
    writers = "export/exporter.py", "export/onnx.py", "storage.py"
    version = digest([*shipped, *(library / name for name in writers)])[:12]
    folder, note = static / "translator-model", static.with_name("model-version.txt")
    if note.exists() and note.read_text("utf-8") == version and folder.exists():
        return version
    logger.info("exporting the model for the page that translates")
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from transformer_lib.export.onnx import export_onnx
    from transformer_lib.runs import load_pretrained

    note.unlink(missing_ok=True)
    model, tokenizer, about = load_pretrained(MODEL)
    export_onnx(model, tokenizer, folder, about, int8=True)
    for name in NOT_SERVED:
        (folder / name).unlink()
    note.write_text(version, encoding="utf-8")
    return version


def make_ready(app):
    """Export the model, and have it served, where the page can run it."""
    app.config.translator_page = {}
    if app.builder.format != "html":
        return
    web = Path(app.srcdir) / "_build" / "web"
    runtime = [web / "static" / "onnxruntime" / name for name in RUNTIME]
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing or not all(path.exists() for path in runtime):
        return
    version = export_model(web / "model")
    for folder in (web / "static", web / "model"):
        if str(folder) not in app.config.html_static_path:
            app.config.html_static_path.append(str(folder))
    files = [*runtime, *(web / "model" / "translator-model").iterdir()]
    version = digest([STATIC / name for name in PARTS] + files[:1])[:6] + version[:6]
    size = round(sum(path.stat().st_size for path in files) / 1e6)
    app.config.translator_page = {"version": version, "megabytes": size}


class Translator(SphinxDirective):
    """The place of the translator."""

    def run(self):
        self.env.translator_pages = getattr(self.env, "translator_pages", {})
        state = self.config.translator_page
        self.env.translator_pages[self.env.docname] = state
        data = "".join(f' data-{name}="{value}"' for name, value in state.items())
        words = (
            "With JavaScript, you can translate here."
            if state
            else "The translator would be here: this copy of the book was built "
            "without ONNX Runtime, which npm fetches, or without the Python packages "
            "that write the model for it."
        )
        html = f'<div class="translator"{data}>'
        html += f'<p class="translator-about">{words}</p></div>'
        return [nodes.raw("", html, format="html")]


def outdated(app, env, added, changed, removed):
    """Pages that were built with another model, or with older scripts."""
    pages = getattr(env, "translator_pages", {})
    now = app.config.translator_page
    return [
        name for name, state in pages.items() if name in env.found_docs and state != now
    ]


def add_script(app, pagename, templatename, context, doctree):
    """The page of the translator alone loads its script and its styles."""
    if pagename in getattr(app.env, "translator_pages", {}):
        app.add_css_file("translator.css")
        if app.config.translator_page:
            for name in ("make.js", "translator.js"):
                app.add_js_file(name, loading_method="defer")


class Record(SphinxRole):
    """A number of a record: its name, the way to the number, how it is written."""

    def run(self):
        name, way, *how = self.text.split()
        path = ROOT / "transformer_lib" / "evidence" / f"{name}.json"
        self.env.note_dependency(str(path))
        value = json.loads(path.read_text("utf-8"))
        for key in way.split("."):
            value = value[key]
        return [nodes.inline("", format(value, *how), classes=["stored"])], []


def setup(app):
    app.add_config_value("translator_page", {}, "")
    app.add_directive("translator", Translator)
    app.add_role("record", Record())
    app.connect("builder-inited", make_ready)
    app.connect("env-get-outdated", outdated)
    app.connect("html-page-context", add_script)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
