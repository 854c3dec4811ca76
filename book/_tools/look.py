"""Pictures of built pages, wide and narrow, light and dark: to look at what one wrote.

    python book/_tools/look.py notebooks/02_attention              # after make book
    python book/_tools/look.py book/claims --theme dark --width 360
    python book/_tools/look.py notebooks/02_attention#masks   # a window from there

Each page is written whole, in sheets of at most 4,000 pixels, or one window from the
place that was named: `_build/look/02_attention-1300-light-1.png` and so on. A page that
grows with its window, as the welcome page does, is scrolled through: a picture for each
window. What goes wrong in a page (errors of scripts, missing files) is printed.
"""

import argparse
import sys
from pathlib import Path

from browser import HOW, find, served

ROOT = Path(__file__).parents[2]
HTML = ROOT / "_build" / "html"
SHEET = 4000  # pixels: taller pictures cannot be read
WINDOW = 900  # pixels: height of the window
FORMULAS = "() => window.MathJax?.startup?.promise?.then(() => 0)"
HEIGHT = "() => document.documentElement.scrollHeight"


def pictures(page, address: str, target: Path, whole: bool) -> list[Path]:
    """Write what an open window shows of a page; the names of the files."""
    page.goto(address, wait_until="load")
    page.evaluate(FORMULAS)
    page.wait_for_timeout(400)  # the theme's own changes
    if not whole:
        page.screenshot(path=f"{target}.png")
        return [Path(f"{target}.png")]
    height, width = page.evaluate(HEIGHT), page.viewport_size["width"]
    # A window as tall as the page: what loads when it is scrolled to is there too.
    page.set_viewport_size({"width": width, "height": min(height, 30_000)})
    page.wait_for_timeout(400)
    before, height, written = height, page.evaluate(HEIGHT), []
    if height > 1.2 * before:  # parts of it are as tall as the window
        page.set_viewport_size({"width": width, "height": WINDOW})
        page.wait_for_timeout(400)
        for i, top in enumerate(range(0, page.evaluate(HEIGHT), WINDOW), start=1):
            page.evaluate("top => scrollTo({ top, behavior: 'instant' })", top)
            page.wait_for_timeout(800)  # what moves comes to rest
            written.append(Path(f"{target}-{i}.png"))
            page.screenshot(path=written[-1])
        return written
    for i, top in enumerate(range(0, height, SHEET), start=1):
        part = {"x": 0, "y": top, "width": width, "height": min(SHEET, height - top)}
        written.append(Path(f"{target}-{i}.png"))
        page.screenshot(path=written[-1], clip=part, full_page=True)
    return written


def look(names: list[str], widths: list[int], themes: list[str], folder: Path) -> list:
    """Pictures of pages of the built book; the names of the files.

    Raises:
        SystemExit: There is no browser, or no such page.
    """
    from playwright.sync_api import sync_playwright

    found = find()
    if found is None:
        sys.exit(f"There is no browser here to look with: {HOW}.")
    for name in names:
        file = HTML / f"{name.partition('#')[0]}.html"
        if not file.exists():
            sys.exit(f"There is no page {name!r} in the built book; make book first.")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with served(HTML) as site, sync_playwright() as playwright:
        browser = found.launch(playwright)
        for theme in themes:
            for width in widths:
                context = browser.new_context(
                    viewport={"width": width, "height": WINDOW}, color_scheme=theme
                )
                page = context.new_page()
                page.on("pageerror", lambda error: print(f"script: {error}"))
                page.on("requestfailed", lambda r: print(f"not loaded: {r.url}"))
                page.add_init_script(f"localStorage.setItem('mode', '{theme}')")
                for name in names:
                    path, _, place = name.partition("#")
                    address = f"{site}/{path}.html" + (f"#{place}" if place else "")
                    stem = "-".join(filter(None, [Path(path).name, place]))
                    target = folder / f"{stem}-{width}-{theme}"
                    written += pictures(page, address, target, whole=not place)
                    page.set_viewport_size({"width": width, "height": WINDOW})
                context.close()
        browser.close()
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="+", help="pages, as _toc.yml names them")
    parser.add_argument("--width", type=int, nargs="+", default=[1300, 360])
    parser.add_argument(
        "--theme", nargs="+", default=["light", "dark"], choices=["light", "dark"]
    )
    parser.add_argument("--out", type=Path, default=ROOT / "_build" / "look")
    given = parser.parse_args()
    for path in look(given.names, given.width, given.theme, given.out):
        print(path)


if __name__ == "__main__":
    main()
