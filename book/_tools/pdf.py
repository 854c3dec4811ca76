"""Print the built book as one PDF, in a browser: `make pdf`, or some pages of it.

All pages become one long page first, so that Chromium makes bookmarks of all headings,
links from chapter to chapter stay links, and pages are numbered through. What is folded
on the screen is printed open.
"""

import argparse
import posixpath
import re
import sys
import time
from pathlib import Path

import yaml
from browser import HOW, find, served
from bs4 import BeautifulSoup

from transformer_lib.storage import whole_file

ROOT = Path(__file__).parents[2]
HTML = ROOT / "_build" / "html"
LEFT_OUT = {"book/notes"}  # boxes to write in, on the screen
# What links lead to; ids inside of figures are their own.
ADDRESSED = ("section", "dt", "span", "p", "div.math", "div.citation")
STYLE = """
.bd-main .bd-content .bd-article h1, .bd-main .bd-content .bd-article h1:first-of-type {
  display: block; font-size: 22pt; margin: 0 0 6mm; }
.printed-page + .printed-page { break-before: page; padding-top: 1px; }
a.headerlink { display: none; }
"""
FOOTER = """<div style="width: 100%; font-size: 8pt; font-family: sans-serif;
text-align: center"><span class="pageNumber"></span></div>"""


def pages() -> list[str]:
    """What _toc.yml names, in order."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text("utf-8"))
    found = [toc["root"]]

    def walk(entries):
        for entry in entries:
            found.append(entry["file"])
            walk(entry.get("sections", []))

    for part in toc["parts"]:
        walk(part["chapters"])
    return [name for name in found if name not in LEFT_OUT]


def anchor(name: str, fragment: str = "") -> str:
    """Where a place of a page is in the long page."""
    return f"{name.replace('/', '-')}--{fragment}"


def moved(name: str, link: str, known: set[str]) -> str:
    """A page's link or source, as the long page (in the folder book) must write it."""
    if re.match(r"[a-z]+:|//", link):
        return link
    path, _, fragment = link.partition("#")
    folder = posixpath.dirname(name)
    target = f"{name}.html"
    if path:
        target = posixpath.normpath(posixpath.join(folder, path))
    if target.removesuffix(".html") in known:
        return "#" + anchor(target.removesuffix(".html"), fragment)
    return "../" + target + (f"#{fragment}" if fragment else "")


def article(name: str, known: set[str]):
    """A page's text, with addresses that are its own among those of all pages."""
    soup = BeautifulSoup((HTML / f"{name}.html").read_text("utf-8"), "html.parser")
    text = soup.select_one("article.bd-article")
    for tag in text.find_all(["a", "img", "iframe"]):
        for key in ("href", "src"):
            if tag.get(key):
                tag[key] = moved(name, tag[key], known)
    for tag in text.select(", ".join(f"{kind}[id]" for kind in ADDRESSED)):
        tag["id"] = anchor(name, tag["id"])
    for tag in text.select("details"):
        tag["open"] = ""
    if name.startswith("notebooks/"):
        text.h1.insert(0, f"{posixpath.basename(name).split('_')[0]}\u2002")
    inside = text.decode_contents()
    return f'<div class="printed-page" id="{anchor(name)}">{inside}</div>'


def long_page(names: list[str]) -> str:
    """All pages as one."""
    known = set(names)
    model = (HTML / "book/notation.html").read_text("utf-8")
    soup = BeautifulSoup(model, "html.parser")
    for script in soup.head.find_all("script"):
        if "mathjax" not in f"{script.get('src')} {script.string}".lower():
            script.decompose()
    soup.head.append(BeautifulSoup(f"<style>{STYLE}</style>", "html.parser"))
    soup.head.title.string = "The Literate Transformer"
    text = "\n".join(article(name, known) for name in names)
    return (
        f'<!DOCTYPE html><html lang="en" data-theme="light">{soup.head}<body>'
        '<main class="bd-main"><div class="bd-content">'
        '<div class="bd-article-container"><article class="bd-article">'
        f"{text}</article></div></div></main></body></html>"
    )


def write_pdf(names: list[str], target: Path) -> None:
    """Print pages of the built book, in this order, into one file.

    Raises:
        SystemExit: There is no browser; with what to do.
    """
    from playwright.sync_api import sync_playwright

    found = find()
    if found is None:
        sys.exit(f"There is no browser here, which prints the PDF: {HOW}.")
    body = long_page(names)
    with served(HTML) as site, sync_playwright() as playwright:
        address = f"{site}/book/print.html"
        browser = found.launch(playwright)
        page = browser.new_page()
        page.set_default_timeout(600_000)
        page.route(address, lambda r: r.fulfill(content_type="text/html", body=body))
        page.goto(address, wait_until="load")
        page.evaluate("() => window.MathJax?.startup?.promise.then(() => 0)")
        target.parent.mkdir(parents=True, exist_ok=True)
        data = page.pdf(
            prefer_css_page_size=True,
            print_background=True,
            outline=True,
            tagged=True,
            display_header_footer=True,
            header_template="<span></span>",
            footer_template=FOOTER,
        )
        with whole_file(target) as file:
            file.write(data)
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="pages, as _toc.yml names them")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "_build/book.pdf")
    given = parser.parse_args()
    names = given.names or pages()
    for name in names:
        if not (HTML / f"{name}.html").exists():
            sys.exit(f"There is no page {name!r} in the built book; make book first.")
    start = time.perf_counter()
    write_pdf(names, given.output)
    data = given.output.read_bytes()
    sheets = len(re.findall(rb"/Type\s*/Page\b(?!s)", data))
    seconds = time.perf_counter() - start
    print(f"{given.output}: {sheets} pages, {len(data) / 1e6:.1f} MB, {seconds:.0f} s")


if __name__ == "__main__":
    main()
