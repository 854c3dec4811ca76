"""Every page in a browser: wide and narrow, light and dark; each is opened once.

Held are: what it loads (from the book alone, and how much), formulas typeset, nothing
wider than the window, and WCAG 2.2, A and AA, by axe-core. axe comes from npm by
book/_web's lock, for this test only: no page serves it.
"""

import gzip
from functools import cache
from pathlib import Path

from built import API, HTML

# What sticks out of the page to the right and lies in no box that scrolls by itself.
OVERFLOW = """() => {
  const width = document.documentElement.clientWidth, out = [];
  if (document.documentElement.scrollWidth <= width + 1) return out;
  const scrolls = e => { for (; e && e !== document.body; e = e.parentElement)
    if (/auto|scroll|hidden|clip/.test(getComputedStyle(e).overflowX)) return true; };
  for (const e of document.body.querySelectorAll('*')) {
    const r = e.getBoundingClientRect();
    if (r.width && r.right > width + 1 && !scrolls(e.parentElement))
      out.push(e.tagName + '.' + e.className + ' ' + Math.round(r.right));
  }
  return out.length ? out.slice(0, 5) : ['wider than the window'];
}"""
# All that moves or fades has come to its end.
AT_REST = """() => document.getAnimations().forEach(animation => {
  const endless = animation.effect.getComputedTiming().endTime === Infinity
  endless ? animation.cancel() : animation.finish() })"""
BROKEN = """() => [...document.images].filter(i => i.complete && !i.naturalWidth
  && i.loading !== 'lazy').map(i => i.src.slice(0, 80))"""


# --- what a page weighs --------------------------------------------------------------

# Bytes over the network with nothing kept from before: the page, and all that it asks
# for until it stands, pictures further down too. Text is counted as gzip packs it, as
# every usual host does; pictures and fonts as they are. What only a click loads (Python
# for live cells) is not counted.
HEAVIEST = 1_500_000
PACKED = {".html", ".js", ".mjs", ".css", ".svg", ".json"}


@cache
def transferred(file: Path) -> int:
    data = file.read_bytes()
    return len(gzip.compress(data, 6)) if file.suffix in PACKED else len(data)


def weight(loaded: set[str], site: str) -> dict[str, int]:
    """Bytes of each file of the book that was asked for."""
    names = {url.split("#")[0].split("?")[0] for url in loaded if url.startswith(site)}
    names = {name.removeprefix(f"{site}/") for name in names}
    files = [HTML / name.removeprefix("literate-transformer/") for name in names]
    return {file.name: transferred(file) for file in files}


# --- formulas ------------------------------------------------------------------------

MATHJAX = HTML / "_static/mathjax/tex-svg.js"
FORMULAS = """async () => {
  await window.MathJax?.startup?.promise;
  const formulas = [...document.querySelectorAll('span.math, div.math')];
  const bad = formulas.filter(f => !f.querySelector('mjx-container svg')
    || f.querySelector('mjx-merror, [data-mml-node="merror"], [fill="red"]'));
  return bad.map(f => f.textContent.trim().slice(0, 80));
}"""


# --- WCAG ----------------------------------------------------------------------------

STANDARD = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
# Not of the standard, and held all the same.
BEYOND = ["heading-order", "page-has-heading-one", "image-redundant-alt", "tabindex"]
# What is not ours to mend: (rule, a part of the selector), with the reason.
EXCEPTED: set[tuple[str, str]] = set()

# Colors of the theme fade: not while they are measured. Of equal pieces of highlighted
# code only the first is looked at: thousands of others would say the same.
PREPARE = """() => {
  const still = document.createElement('style');
  still.textContent = '* { transition: none !important; animation: none !important; }';
  document.head.append(still);
  const seen = new Set();
  for (const piece of document.querySelectorAll('.highlight pre span')) {
    if (piece.children.length || piece.id) continue;
    const kind = `${piece.parentElement.className} ${piece.className}`;
    if (seen.has(kind)) piece.replaceWith(piece.textContent);
    else seen.add(kind);
  }
}"""
# The themes differ in colors only, and these not by the width: so colors are looked at
# once in each theme (and in the narrow page's header), all else at both widths.
LOOKS = {
    ("light", 1300): ("all", None),
    ("dark", 1300): ("colors", None),
    ("dark", 360): ("colors", "article"),
    ("light", 360): ("all but colors", None),
}
# All pages have one header. The library's pages are made from docstrings by one
# template: those of a few modules stand for all, but for the order of their headings
# and the like, which is held in each, and for what sticks out.
HEADER = {"notebooks/02_attention", "book/glossary"}
EXAMPLES = {f"{API}{module}" for module in ("attention", "runs", "transformer")}


def looks_of(name):
    """How a page is looked at: its rows of LOOKS, None where axe is not asked."""
    looks = dict(LOOKS)
    if name not in HEADER:
        del looks["dark", 360]
    if name.startswith(API) and name not in EXAMPLES:
        del looks["dark", 1300]
        looks["light", 1300], looks["light", 360] = looks["light", 360], None
    return looks


LOOK = """async ([standard, beyond, what, without]) => {
  const rules = Object.fromEntries(beyond.map(id => [id, { enabled: true }]));
  rules['color-contrast'] = { enabled: what === 'all' };
  const context = without ? { exclude: [without] } : document;
  const options = what === 'colors' ? { runOnly: ['color-contrast'] }
    : { runOnly: { type: 'tag', values: standard }, rules };
  const found = await axe.run(context,
    { ...options, resultTypes: ['violations'], preload: false });
  return found.violations.flatMap(v => v.nodes.map(n =>
    [v.id, n.target.join(' '), n.failureSummary.split('\\n')[1].trim()]));
}"""
# The theme makes boxes that scroll reachable by the keyboard, 0.3 s after a change.
SETTLED = "() => new Promise(done => setTimeout(done, 350))"


def violations(page, what, without):
    """What axe finds in the open page."""
    for rule, where, why in page.evaluate(LOOK, [STANDARD, BEYOND, what, without]):
        if not any(rule == r and part in where for r, part in EXCEPTED):
            yield f"{rule}: {where}: {why}"


# --- outputs in their column ---------------------------------------------------------

SMALL = """() => [...document.querySelectorAll('div.cell_output > img')]
  .filter(i => i.naturalWidth && i.offsetParent)
  .map(i => [i.naturalWidth, i.getBoundingClientRect().width,
    i.parentElement.clientWidth, i.parentElement.tabIndex,
    i.parentElement.scrollWidth])"""
CUT = """() => [...document.querySelectorAll('div.math')]
  .filter(d => d.offsetParent && d.scrollWidth > d.clientWidth + 1).map(d => d.id)"""
WIDE = """() => [...document.querySelectorAll('div.cell_output pre')]
  .filter(p => p.offsetParent && p.scrollWidth > p.clientWidth + 1)
  .map(p => p.textContent.slice(0, 80))"""


def fits(page):
    """Outputs fit their column, and figures can be read on a phone.

    Letters of 10.5 points, at 110 dots an inch: 10 pixels are left of 16.
    """
    page.set_viewport_size({"width": 390, "height": 844})
    page.evaluate(SETTLED)
    if MATHJAX.exists():
        assert not page.evaluate(CUT)
    for own, width, room, tab, whole in page.evaluate(SMALL):
        assert width >= max(0.62 * own, min(own, room) - 1)
        assert (whole > room + 1) == (tab == 0), "what slides is reached by keys"


# --- a page ---------------------------------------------------------------------------


def problems(window, axe, looks=LOOKS):
    """All that is wrong with the open page, however it is looked at."""
    page, troubles = window
    page.evaluate(PREPARE)
    if axe:
        page.evaluate(f"{axe}; 0")
    found = []
    for (theme, width), how in looks.items():
        page.set_viewport_size({"width": width, "height": 900})
        page.evaluate("t => { document.documentElement.dataset.theme = t }", theme)
        if width == 360:
            page.evaluate(SETTLED)
        where = f"{theme}, {width} px wide"
        found += [f"{where}: sticks out: {what}" for what in page.evaluate(OVERFLOW)]
        if axe and how:
            found += [f"{where}: {what}" for what in violations(page, *how)]
    found += [f"picture does not load: {source}" for source in page.evaluate(BROKEN)]
    return troubles + list(dict.fromkeys(found))


def look_at(window, site, axe, name):
    """Open a page and hold it against all of the above."""
    page, troubles = window
    troubles.clear()
    loaded = set()

    def note(response):
        loaded.add(response.url)

    page.on("response", note)
    page.set_viewport_size({"width": 1300, "height": 900})
    page.goto(f"{site}/{name}.html", wait_until="load")
    bad_formulas = page.evaluate(FORMULAS)
    loaded.update(page.evaluate("[...document.images].map(image => image.src)"))
    page.remove_listener("response", note)
    if MATHJAX.exists():
        assert not bad_formulas, "not typeset"
    too_wide = page.evaluate(WIDE)
    found = problems(window, axe, looks_of(name))
    assert not found, "\n".join(found[:20])
    if name.startswith("notebooks/"):
        assert not too_wide
        fits(page)
    if MATHJAX.exists():  # else it comes from elsewhere, and is not counted here
        weights = weight(loaded, site)
        heavy = sorted(weights.items(), key=lambda item: -item[1])[:5]
        assert sum(weights.values()) < HEAVIEST, heavy
