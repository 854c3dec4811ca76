"""The search: every section, term, question and documented name of the book.

Sphinx ranks whole pages. Here each section is found by itself and opened at its place:
this extension writes what `_static/search.js` looks through with MiniSearch. A term of
the glossary, or a row of "When something goes wrong", that links to a section is one
more name of that section. Code and what it prints are left out. Where the build had no
npm, and thus no MiniSearch, Sphinx's own search stays.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import urljoin

from lxml import html

ROOM = "minisearch/index.js"
LEFT_OUT = (
    "self::script or self::style or self::pre or self::svg or self::math "
    "or @class='headerlink' or contains(@class, 'cell_') "
    "or contains(@class, 'interactive-figure') or contains(@class, 'you-are-here')"
)
# The theme loads these in every page, the index of all words included.
SCRIPTS = re.compile(
    r'\s*<script [^>]*src="[^"]*'
    r'(searchtools|searchindex|language_data|_static/search)\.js[^"]*"></script>'
)
OURS = """
  <script src="_static/language_data.js"></script>
  <script type="module" src="_static/search.js"></script>
</head>"""


def text_of(element, without=()) -> str:
    """The words of an element, without code and without some elements in it."""
    words = []

    def walk(e, top):
        if not top and (
            not isinstance(e.tag, str) or e in without or e.xpath(LEFT_OUT)
        ):
            return
        words.append(e.text or "")
        for child in e:
            walk(child, False)
            words.append(child.tail or "")

    walk(element, True)
    return re.sub(r"\s+", " ", "".join(words).replace("¶", "")).strip()


def name_of(heading) -> str:
    return re.sub(r"^[\d.]+\s+", "", text_of(heading)).strip("# ")


def glossary(article):
    """What is said in a glossary, each with the terms that share it."""
    for dd in article.xpath(".//dl[contains(@class,'glossary')]/dd"):
        terms = [dd.getprevious()]
        while (above := terms[0].getprevious()) is not None and above.tag == "dt":
            terms.insert(0, above)
        yield terms, dd


def records_of(page: str, article) -> list[dict]:
    """What can be found on a page: address, page, title, text."""
    found = []
    heads = article.xpath(".//h1")
    title = name_of(heads[0]) if heads else page

    def add(anchor, name, text, kind):
        address = f"{page}.html" + (f"#{anchor}" if anchor else "")
        row = {"id": address, "page": title, "title": name, "text": text, "kind": kind}
        found.append(row)

    for terms, dd in glossary(article):
        add(terms[0].get("id"), ", ".join(map(text_of, terms)), text_of(dd), "term")
    for dt in article.xpath(".//dt[contains(@class,'sig') and @id]"):
        told = next(e for e in dt.itersiblings() if e.tag == "dd")
        said = text_of(told, told.xpath(".//dl[dt/@id]"))
        add(dt.get("id"), dt.get("id").removeprefix("transformer_lib."), said, "name")
    for section in article.xpath(".//section[@id]"):
        head = section.xpath("./h1|./h2|./h3|./h4")
        if not head:
            continue
        inner = [*section.xpath(".//section"), *section.xpath(".//dl[dt/@id]"), head[0]]
        asked = section.xpath("./*[starts-with(@id,'question-')]")
        for question in asked:
            answer = []
            for e in question.itersiblings():
                if e in asked:
                    break
                answer.append(text_of(e))
            name = re.sub(r"^\d+\.\s*", "", text_of(question))
            add(question.get("id"), name, " ".join(answer), "question")
            inner += [question, *question.itersiblings()]
        anchor = "" if head[0].tag == "h1" else section.get("id")
        add(anchor, name_of(head[0]), text_of(section, inner), kind_of(page))
    return found


def kind_of(page: str) -> str:
    if "under_the_hood" in page:
        return "hood"
    return "chapter" if page.startswith("notebooks/") else "page"


def other_names(page: str, article) -> list[tuple[str, str]]:
    """The address of a section, and another name for it."""
    pairs = [(text_of(dt), dd) for terms, dd in glossary(article) for dt in terms]
    if page.endswith("/questions"):
        for row in article.xpath(".//table//tr[td]"):
            pairs.append((text_of(row[0]), row[1]))
    return [
        (urljoin(f"{page}.html", link), name)
        for name, told in pairs
        for link in told.xpath(".//a[contains(@href,'#')]/@href")
    ]


def gather(folder: Path, pages: list[str]) -> list[dict]:
    """All that can be found in a built book, each with its other names."""
    articles = {}
    for page in pages:
        tree = html.parse(
            str(folder / f"{page}.html"), html.HTMLParser(encoding="utf-8")
        )
        for article in tree.xpath("//article"):
            articles[page] = article
    found = {}
    for page, article in articles.items():
        for record in records_of(page, article):
            if not page.endswith(("/questions", "/contents")):
                found.setdefault(record["id"], record | {"names": ""})
    for page, article in articles.items():
        for address, name in other_names(page, article):
            if record := found.get(address):
                record["names"] = f"{record['names']} · {name}".strip(" ·")
    return list(found.values())


def finish(app, error):
    """Write the list, and let the search page look through it."""
    out = Path(app.outdir)
    if error or app.builder.format != "html" or not (out / "_static" / ROOM).exists():
        return
    records = gather(out, sorted(app.env.found_docs))
    written = json.dumps(records, ensure_ascii=False, separators=(",", ":"))
    (out / "_static/sections.json").write_text(written, "utf-8")
    for path in out.rglob("*.html"):
        page = path.read_text("utf-8")
        mended = SCRIPTS.sub("", page)
        if path == out / "search.html":
            mended = re.sub(r"\s*</head>", OURS, mended, count=1)
        if mended != page:
            path.write_text(mended, encoding="utf-8")


def setup(app):
    app.connect("build-finished", finish, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
