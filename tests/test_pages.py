"""Every page in a browser: wide and narrow, light and dark.

The theme changes colors only, so the wide page is measured in the light one.
"""

from pathlib import Path

import pytest
from built import HTML, documents, need_the_book

need_the_book()

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
# The contrast of running text against what lies behind it (WCAG's formula).
CONTRAST = """() => {
  const rgb = c => { const m = c.match(/[\\d.]+/g).map(Number); return m; };
  const lum = c => { const f = c.slice(0, 3).map(v => { v /= 255;
    return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; });
    return .2126 * f[0] + .7152 * f[1] + .0722 * f[2]; };
  const behind = e => { for (; e; e = e.parentElement) {
    const c = rgb(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > .5) return c; } return [255, 255, 255]; };
  const bad = [], seen = new Set();
  for (const e of document.querySelectorAll('article p, article li, article summary, ' +
      'article td, article th, article h1, article h2, article h3, article pre, ' +
      'article pre span')) {
    const kind = [e.parentElement.className, e.tagName, e.className].join(' ');
    if (seen.has(kind) || !e.textContent.trim()) continue;
    seen.add(kind);
    const style = getComputedStyle(e);
    if (style.visibility === 'hidden' || !e.getClientRects().length) continue;
    const a = lum(rgb(style.color)), b = lum(behind(e));
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < 4.2) bad.push(e.tagName + '.' + e.className + ' ' +
      ratio.toFixed(1) + ' ' + e.textContent.trim().slice(0, 30));
  }
  return bad.slice(0, 5);
}"""


def problems(window, address):
    page, troubles = window
    troubles.clear()
    found = []
    page.set_viewport_size({"width": 1300, "height": 900})
    page.goto(address, wait_until="load")
    for theme, width in (("light", 1300), ("light", 360), ("dark", 360)):
        page.set_viewport_size({"width": width, "height": 900})
        page.evaluate("theme => document.documentElement.dataset.theme = theme", theme)
        where = f"{theme}, {width} px wide"
        found += [f"{where}: sticks out: {what}" for what in page.evaluate(OVERFLOW)]
        if width == 360:
            found += [f"{where}: pale: {what}" for what in page.evaluate(CONTRAST)]
    bare = page.evaluate("[...document.images].filter(i => !i.alt).map(i => i.src)")
    found += [f"no alt text: {source[:80]}" for source in bare]
    broken = page.evaluate(
        "[...document.images].filter(i => i.complete && !i.naturalWidth"
        " && i.loading !== 'lazy').map(i => i.src)"
    )
    found += [f"picture does not load: {source[:80]}" for source in broken]
    return troubles + found


@pytest.mark.parametrize("name", [*documents(), "search", "genindex"])
def test_page(window, site, name):
    assert (Path(HTML) / f"{name}.html").exists()
    assert not problems(window, f"{site}/{name}.html")


def test_search_finds(window, site):
    page, _ = window
    page.goto(f"{site}/search.html?q=attention")
    page.wait_for_selector("#search-results li", timeout=10_000)
