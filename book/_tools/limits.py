"""How long each chapter's page is: screens, words, folds, figures before the exercises.

    python book/_tools/limits.py                      # all chapters, after make book
    python book/_tools/limits.py 02_attention         # these

A screen is 800 pixels of a window 1,300 wide. Words are those of sentences, lists,
tables and captions; code and what it prints are not counted. A fold is anything that
opens, but for hints and solutions. What is behind the text ends at the map that shows
where one is. `tests/test_limits.py` holds the pages to LIMITS.
"""

import argparse
import sys

from browser import HOW, find, served
from chapters import all_notebooks
from look import FORMULAS, HTML

# Up to which chapter they hold: screens, words, folds; behind the text, screens more.
LIMITS = {7: (10, 1500, 4), 32: (15, 2000, 4)}
LATER: set[int] = set()  # these are not cut yet
BEHIND = 4
COLUMNS = ("screens", "words", "folds", "figures", "behind")

MEASURE = """() => {
  const article = document.querySelector('article.bd-article');
  const all = what => [...article.querySelectorAll(what)];
  const text = e => e?.textContent?.trim() ?? '';
  const end = all('section').find(s =>
    /^(exercises|questions)/i.test(text(s.querySelector(':scope > h2'))));
  const top = e => e.getBoundingClientRect().top, from = top(article);
  const map = article.querySelector('.you-are-here');
  const last = map ? top(map) : from + article.offsetHeight;
  const until = end ? top(end) : last;
  const before = e => !end || !!(end.compareDocumentPosition(e) & 2);
  const folds = all('details, .toggle').filter(e =>
    !/^(hint|solution|answer)/i.test(text(e.querySelector('summary'))));
  const aside = 'details, .interactive-figure, .cell_output:not(figure)';
  const told = all('p, li, td, th, dd, dt, figcaption, h2, h3').filter(e =>
    before(e) && !e.closest(aside) && !e.querySelector('p, li, td'));
  const words = e => {
    const copy = e.cloneNode(true), left = 'mjx-container, .math, script, style';
    copy.querySelectorAll(left).forEach(m => m.replaceWith(' x '));
    return copy.textContent.split(/\\s+/).filter(w => /[\\p{L}\\p{N}]/u.test(w)).length;
  };
  const shown = 'figure, .interactive-figure, .drawn, .attention-view, .output img';
  const drawn = all(shown).filter(before);
  return {screens: (until - from) / 800, words: told.reduce((n, e) => n + words(e), 0),
    folds: folds.length, behind: (last - until) / 800,
    figures: drawn.filter(e => !drawn.some(o => o !== e && o.contains(e))).length};
}"""


def measure(page, address: str) -> dict:
    """What an open window of 1,300 by 800 pixels shows of a built page, counted."""
    page.goto(address, wait_until="load")
    page.evaluate(FORMULAS)
    page.evaluate("() => [...document.images].forEach(i => i.loading = 'eager')")
    page.wait_for_function("() => [...document.images].every(i => i.complete)")
    found, before = page.evaluate(MEASURE), None
    while found != before:  # until nothing moves any more
        page.wait_for_timeout(250)
        found, before = page.evaluate(MEASURE), found
    return found


def too_much(number: int, found: dict) -> list[str]:
    """What of a chapter's page is beyond its limits, a line each."""
    if number in LATER:
        return []
    limits = next(most for last, most in LIMITS.items() if number <= last)
    most = dict(zip(COLUMNS, limits, strict=False)) | {"behind": BEHIND}
    return [
        f"{name}: {found[name]:.4g}, and {top} are allowed"
        for name, top in most.items()
        if found[name] > top
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="chapters; all without")
    given = parser.parse_args()
    from playwright.sync_api import sync_playwright

    if (found := find()) is None:
        sys.exit(f"There is no browser here to look with: {HOW}.")
    names = given.names or [name for name in all_notebooks() if "/" not in name]
    print(f"{'':22}" + "".join(f"{name:>9}" for name in COLUMNS))
    with served(HTML) as site, sync_playwright() as playwright:
        browser = found.launch(playwright)
        page = browser.new_page(viewport={"width": 1300, "height": 800})
        for name in names:
            counted = measure(page, f"{site}/notebooks/{name}.html")
            line = "".join(
                f"{n:9.0f}" if isinstance(n := counted[column], int) else f"{n:9.1f}"
                for column in COLUMNS
            )
            over = too_much(int(name[:2]), counted)
            print(f"{name:22}{line}{'  too much' if over else ''}")
        browser.close()


if __name__ == "__main__":
    main()
