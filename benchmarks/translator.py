"""How soon the page that translates answers, in a headless browser on this machine.

    make book
    python benchmarks/translator.py            # a minute
    python benchmarks/translator.py --quick    # seconds, shows that it runs

The built book is served from this machine. Five times, in a browser whose cache is
empty: the time from the first click to the finished translation, which loads the model
and ONNX Runtime, and the bytes that this loads. Then, in the last of these browsers,
the time from click to translation for other sentences, beam 4. Writes
transformer_lib/evidence/benchmarks/translator.json.

Record: benchmarks/translator.json
"""

import argparse
import hashlib
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HTML = ROOT / "_build" / "html"
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "book" / "_tools")]
from browser import HOW, find, served  # noqa: E402
from kept import keep, out_file  # noqa: E402

from transformer_lib.machine import environment_record  # noqa: E402

SENTENCES = """\
We have to wait until tomorrow.
The old man who lives next door sold his house.
Why didn't you tell me that you were coming?
Can you help me carry these boxes upstairs?
Tom is reading a book.
I don't know what to say.
My brother lives in Boston with his wife and two children.
It has been raining since this morning, so we stayed at home.
If I had known that, I would have called you.
The train was late again.
""".splitlines()
# From the click until the page says that it is done; in the page, so that nothing of
# what drives the browser is measured.
CLICK = """text => new Promise((resolve, reject) => {
  const status = document.querySelector('.translator-status');
  document.querySelector('.translator textarea').value = text;
  const start = performance.now();
  new MutationObserver((_, observer) => {
    if (!status.textContent.endsWith('.')) return;
    observer.disconnect();
    const words = status.textContent, seconds = (performance.now() - start) / 1000;
    words.startsWith('Translated') ? resolve(seconds) : reject(words);
  }).observe(status, { childList: true });
  document.querySelector('.translator-go').click();
})"""

# What the translator loaded: the worker's requests are not among those of the page.
PARTS = ("translator_engine.js", "onnxruntime/*", "translator-model/*")


def measure(browser, address: str, rounds: int) -> tuple[list, list]:
    """Seconds of first translations, and of later ones."""
    first, later = [], []
    for i in range(rounds):
        context = browser.new_context()
        page = context.new_page()
        page.set_default_timeout(120_000)
        page.goto(address, wait_until="networkidle")
        first.append(page.evaluate(CLICK, SENTENCES[0]))
        if i == rounds - 1:
            later = [page.evaluate(CLICK, text) for text in SENTENCES[1:]]
        context.close()
    return first, later


def summary(seconds: list) -> dict:
    return {
        "seconds": [round(s, 3) for s in seconds],
        "median_seconds": round(statistics.median(seconds), 3),
        "max_seconds": round(max(seconds), 3),
    }


def main(arguments=None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--out", type=out_file, help="where the figures are written")
    given = parser.parse_args(arguments)
    from playwright.sync_api import sync_playwright

    found = find()
    if found is None:
        sys.exit(f"There is no browser here to measure in: {HOW}.")
    rounds = 1 if given.quick else 5
    with served(HTML) as site, sync_playwright() as playwright:
        address = f"{site}/book/translator.html"
        browser = found.launch(playwright)
        version = browser.version
        first, later = measure(browser, address, rounds)
        browser.close()
    static = HTML / "_static"
    size = sum(path.stat().st_size for part in PARTS for path in static.glob(part))
    manifest = static / "translator-model" / "manifest.json"
    record = {
        "benchmark": "the page that translates, from click to translation",
        "settings": {
            "rounds": rounds,
            "beam_size": 4,
            "later_sentences": len(later),
            "browser": f"Chromium {version}, headless",
            "threads": 1,
        },
        "data_sha256": hashlib.sha256(manifest.read_bytes()).hexdigest(),
        "environment": environment_record(),
        "results": {
            "first": summary(first),
            "later": summary(later),
            "loaded_megabytes": round(size / 1e6, 2),
        },
    }
    for name in ("first", "later"):
        times = record["results"][name]
        print(
            f"{name:6} median {times['median_seconds']:.2f} s, "
            f"longest {times['max_seconds']:.2f} s of {len(times['seconds'])}"
        )
    print(f"loaded {record['results']['loaded_megabytes']} MB")
    keep(record, "benchmarks/translator", given.out, given.quick)
    return record


if __name__ == "__main__":
    main()
