"""Sphinx extension: what the theme and others wrote, mended before it is served.

Pages get names for controls that had none, the roles that lists of references need, and
icons from a font of the few that the book uses, in place of all 2,000 and a script.
Figures are packed again, as lossless WebP: the same pixels in less than half the bytes.
"""

from __future__ import annotations

import re
from pathlib import Path

from fontTools import subset
from fontTools.ttLib import TTFont
from PIL import Image

MENDED = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        # The script draws the icons that the font has drawn already.
        (r'<script defer src="[^"]*scripts/fontawesome\.js[^"]*"></script>', ""),
        # A name must contain the words that are seen (WCAG 2.5.3): those alone.
        (r'(<button class="btn search-button-field[^>]*?) aria-label="[^"]*"', r"\1"),
        (r'<summary aria-label="Toggle hidden content">', "<summary>"),
        # Chapters with pages under them.
        (
            r'(<a class="[^"]*" href="[^"]*">([^<]*)</a><details[^>]*>)<summary>',
            r'\1<summary aria-label="Pages under \2">',
        ),
        (r'((?:src|href)="[^"]*_images/[^"]*)\.png"', r'\1.webp"'),
        # ARIA 1.3 has no such role; items of a list are list items.
        (r'role="doc-biblioentry"', 'role="listitem"'),
    )
)

FONTS = {"solid": "fa-solid-900.ttf", "brands": "fa-brands-400.ttf"}


def mend(html: str) -> str:
    """A page as it is served."""
    for pattern, new in MENDED:
        html = pattern.sub(new, html)
    return html


def icons_of(pages: set[str], styles: str) -> list[int]:
    """The code points of the icons that pages name, and that the styles draw."""
    named = {name for html in pages for name in re.findall(r"\b(fa-[a-z-]+)", html)}
    drawn = re.findall(r'((?:\.fa-[\w-]+:before,?)+)\{content:"\\([0-9a-f]+)"', styles)
    points = {0xF107}  # on a folded cell, by the theme's other sheet
    for names, point in drawn:
        if named & set(re.findall(r"fa-[\w-]+", names)):
            points.add(int(point, 16))
    points |= {ord(icon) for icon in re.findall(r'--pst-icon-[\w-]+:"(.)"', styles)}
    return sorted(points)


def write_icons(static: Path, points: list[int]) -> None:
    """A font with these icons only, for each of the theme's two."""
    for name, file in FONTS.items():
        font = TTFont(static / "vendor/fontawesome/webfonts" / file)
        options = subset.Options(name_IDs=[0, 13, 14], hinting=False)
        cutter = subset.Subsetter(options)
        cutter.populate(unicodes=points)
        cutter.subset(font)
        font.flavor = "woff"
        font.save(static / f"icons-{name}.woff")


def pack_figures(images: Path) -> None:
    """Figures as WebP, each pixel as it was."""
    for path in images.glob("*.png"):
        with Image.open(path) as figure:
            figure.save(path.with_suffix(".webp"), lossless=True, quality=30, method=2)
        path.unlink()


def outdated(app, env, added, changed, removed):
    """Pages older than one of these extensions: Sphinx would leave them as they are."""
    newest = max(file.stat().st_mtime for file in Path(__file__).parent.glob("*.py"))
    built = {name: Path(app.builder.get_outfilename(name)) for name in env.found_docs}
    return [n for n, p in built.items() if p.exists() and p.stat().st_mtime < newest]


def finish(app, error):
    """After the last page: mend them all; a page mended before stays as it is."""
    if error or app.builder.format != "html":
        return
    pack_figures(Path(app.outdir) / "_images")
    pages = set()
    for path in Path(app.outdir).rglob("*.html"):
        html = path.read_text("utf-8")
        mended = mend(html)
        pages.add(mended)
        if mended != html:
            path.write_text(mended, encoding="utf-8")
    static = Path(app.outdir) / "_static"
    styles = (static / "styles/pydata-sphinx-theme.css").read_text("utf-8")
    write_icons(static, icons_of(pages, styles))


def setup(app):
    app.connect("env-get-outdated", outdated)
    app.connect("build-finished", finish)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
