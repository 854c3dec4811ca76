"""What people type into the book's search, and the page that must be among the first.

The queries are those of readers who are stuck, as they ask in public.
"""

import os
import sys

import pytest
from built import ROOT, need_the_book
from sphinx.application import Sphinx

sys.path.append(str(ROOT / "book" / "_ext"))
from served import keep_index_entries

need_the_book()

FIRST = 5  # results that a reader looks at
HITS = "#search-results li a"
# Results appear one by one; the line above them says when they are all there.
ENOUGH = f"""() => document.querySelectorAll('{HITS}').length >= {FIRST}
  || /finished|found/i.test(document.querySelector('.search-summary')?.textContent)"""
QUERIES = {
    "loss not decreasing": "book/glossary",
    "loss stuck": "notebooks/16_diagnosis book/questions",
    "loss too low too soon": "notebooks/16_diagnosis book/questions",
    "nan loss": "notebooks/16_diagnosis book/questions",
    "gradient clipping": "book/glossary notebooks/11_objective notebooks/13_runs "
    "notebooks/16_diagnosis",
    "loss scaling": "book/glossary notebooks/21_speed notebooks/16_diagnosis",
    "repetition": "notebooks/16_diagnosis book/glossary",
    "loops": "notebooks/14_decoding notebooks/16_diagnosis",
    "repeats": "notebooks/14_decoding notebooks/16_diagnosis book/glossary",
    "translation too short": "notebooks/16_diagnosis book/glossary",
    "hallucination": "notebooks/16_diagnosis book/questions book/glossary",
    "overfitting": "notebooks/16_diagnosis book/glossary",
    "BLEU near 0": "notebooks/16_diagnosis book/questions",
    "token accuracy": "notebooks/16_diagnosis book/questions book/glossary",
    "worse after resuming": "notebooks/16_diagnosis book/questions",
    "troubleshooting": "book/glossary",
    "CUDA out of memory": "notebooks/20_fine_tuning",
    "gradient accumulation": "book/glossary notebooks/12_training "
    "notebooks/20_fine_tuning",
    "reproducibility": "notebooks/16_diagnosis book/glossary",
    "deterministic": "notebooks/16_diagnosis book/glossary",
    "fine-tuning": "notebooks/20_fine_tuning book/glossary",
    "catastrophic forgetting": "notebooks/20_fine_tuning",
    "add new tokens": "notebooks/20_fine_tuning book/glossary",
    "OPUS-MT": "notebooks/20_fine_tuning notebooks/22_export book/glossary",
    "start symbol": "notebooks/06_decoder notebooks/22_export book/glossary",
    "Marian start symbol": "notebooks/22_export notebooks/20_fine_tuning notebooks/16_diagnosis",  # noqa: E501
    "multilingual": "notebooks/20_fine_tuning",
    "small dataset": "notebooks/20_fine_tuning",
    "colab": "notebooks/13_runs book/how_to_read book/glossary",
    "colab disconnects": "notebooks/13_runs book/how_to_read book/questions",
    "warmup": "notebooks/11_objective book/glossary",
    "larger batch warm-up": "notebooks/11_objective book/questions book/glossary",
    "learning rate decay": "notebooks/11_objective book/glossary",
    "why beta2 0.98": "notebooks/11_objective",
    "prefetch": "notebooks/10_batches book/glossary",
    "residual scale": "notebooks/05_encoder book/glossary",
    "residual scaling": "notebooks/05_encoder book/glossary",
    "KLDivLoss": "notebooks/16_diagnosis book/questions",
    "label smoothing": "notebooks/11_objective book/glossary",
    "padding mask": "notebooks/02_attention notebooks/05_encoder notebooks/06_decoder "
    "book/glossary",
    "teacher forcing": "notebooks/12_training notebooks/16_diagnosis book/glossary",
    "kv cache": "notebooks/14_decoding book/glossary",
    "beam search": "notebooks/14_decoding book/glossary",
    "why divide by sqrt": "notebooks/02_attention book/questions",
    "flash attention": "notebooks/02_attention notebooks/29_long_text book/glossary",
}


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_leads_to_its_page(window, site, query):
    page, _ = window
    page.goto(f"{site}/search.html?q={query}")
    page.wait_for_selector(HITS)
    page.wait_for_function(ENOUGH)
    found = page.eval_on_selector_all(HITS, "all => all.map(a => a.pathname)")
    names = [path.strip("/").removesuffix(".html") for path in found[:FIRST]]
    assert set(names) & set(QUERIES[query].split()), names


def searched(folder) -> str:
    """What the search of a small book knows after a build."""
    app = Sphinx(folder, None, folder / "html", folder / "trees", "html", {}, None)
    app.connect("html-collect-pages", keep_index_entries)
    app.build()
    return (folder / "html/searchindex.js").read_text("utf-8")


def test_a_build_of_one_page_gives_the_same_search(tmp_path):
    (tmp_path / "words.rst").write_text(
        "Words\n=====\n\n.. glossary::\n\n   beam search\n      Keeps several.\n\n"
        ".. index:: single: search; beam\n"
    )
    index = tmp_path / "index.rst"
    index.write_text("A book\n======\n\n.. toctree::\n\n   words\n")
    whole = searched(tmp_path)
    assert '"beam search": [[' in whole
    later = index.stat().st_mtime + 1
    os.utime(index, (later, later))
    assert searched(tmp_path) == whole
