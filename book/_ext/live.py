"""Sphinx extension: chapters whose code the reader can change and run in the page.

`live_pages` in _config.yml names the pages, and for each the modules of the library
that its cells import. Where `make` has fetched Pyodide (Python for the browser), every
code cell of such a page becomes an editor with a Run button, but for those tagged
`not-live`; book/_static/live.js does that, and live_runner.py beside this file runs the
cells. Else a line before the first of them says how the code can be run.
"""

from __future__ import annotations

import json
from pathlib import Path

from docutils import nodes

HERE = Path(__file__).parent
LIBRARY = "transformer_lib"


def find_pyodide(app, config):
    """Serve Pyodide with the pages where `make` has fetched it."""
    folder = Path(app.srcdir) / "_build" / "web" / "static"
    config.live_python = (folder / "pyodide" / "pyodide.asm.wasm").exists()
    if config.live_python and str(folder) not in config.html_static_path:
        config.html_static_path.append(str(folder))


def outdated(app, env, added, changed, removed):
    """Live pages older than the script or its styles: Sphinx would not copy those."""
    if app.builder.format != "html":
        return []
    static = HERE.parent / "_static"
    parts = ("live.js", "live.css", "make.js")
    newest = max((static / name).stat().st_mtime for name in parts)
    pages = [name for name in app.config.live_pages if name in env.found_docs]
    built = [Path(app.builder.get_outfilename(name)) for name in pages]
    return [
        name
        for name, page in zip(pages, built, strict=True)
        if page.exists() and page.stat().st_mtime < newest
    ]


def is_live(app, docname: str) -> bool:
    return app.builder.format == "html" and docname in app.config.live_pages


def mark_cells(app, doctree, docname):
    """Give live cells a class, and put the line about them before the first."""
    if not is_live(app, docname):
        return
    line = nodes.paragraph(classes=["live-about"])
    cells = [
        cell
        for cell in doctree.findall(nodes.container)
        if cell.get("nb_element") == "cell_code" and has_code(cell)
    ]
    if app.config.live_python:
        line += nodes.Text(
            "With JavaScript, cells of this page can be changed and run here."
        )
        for cell in cells:
            cell["classes"].append("live")
    else:
        ways = app.builder.get_relative_uri(docname, "book/how_to_read")
        line += nodes.Text("To run the code of this page, ")
        line += nodes.reference("", "open it in Colab, Binder or at home", refuri=ways)
        line += nodes.Text(
            ": this copy of the book was built without Pyodide, which runs it here."
        )
    first = cells[0]
    first.parent.insert(first.parent.index(first), line)


def has_code(cell) -> bool:
    """Whether a cell shows its code and is to be run in the page."""
    if "tag_not-live" in cell["classes"]:
        return False
    parts = cell.findall(nodes.container)
    return any(part.get("nb_element") == "cell_code_source" for part in parts)


def add_script(app, pagename, templatename, context, doctree):
    """Live pages alone load the script and its styles; the script loads the rest."""
    if is_live(app, pagename):
        app.add_css_file("live.css")
        if app.config.live_python:
            for name in ("make.js", "live.js"):
                app.add_js_file(name, loading_method="defer")


def write_sources(app, error):
    """What Python has to find in the browser: the runner and the library's modules."""
    if error or app.builder.format != "html" or not app.config.live_python:
        return
    files = {"live_runner.py": (HERE / "live_runner.py").read_text("utf-8")}
    modules = {name for names in app.config.live_pages.values() for name in names}
    for name in sorted({"__init__", *modules}):
        path = f"{LIBRARY}/{name.replace('.', '/')}.py"
        files[path] = (Path(app.srcdir) / path).read_text("utf-8")
    target = Path(app.outdir) / "_static" / "live.json"
    target.write_text(json.dumps(files), encoding="utf-8")


def setup(app):
    app.add_config_value("live_pages", {}, "html")
    app.add_config_value("live_python", False, "html")
    app.connect("config-inited", find_pyodide)
    app.connect("env-get-outdated", outdated)
    app.connect("doctree-resolved", mark_cells)
    app.connect("html-page-context", add_script)
    app.connect("build-finished", write_sources)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
