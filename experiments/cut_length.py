"""cut_length.py [MODEL]: at how many tokens should a long sentence be cut?

The library cuts a sentence that has more tokens than the model takes, at commas where
it can, and joins the translations. Sentences of newstest2013 with at least 50 tokens,
and those of Tatoeba's validation pairs with at least 20, are translated with several
limits. Minutes. It needs both corpora.

Record: results/cut-length/*.json
"""

import argparse
import warnings
from pathlib import Path

import torch

from transformer_lib.corpora import load_corpus
from transformer_lib.evaluation import chrf, sacre_bleu
from transformer_lib.machine import environment_record
from transformer_lib.storage import write_json
from transformer_lib.translator import Translator, split_sentences

LIMITS = (20, 25, 30, 40, 60, 200)
SETS = {"newstest-en-de": 50, "tatoeba-en-de": 20}  # corpus -> tokens at least
EVIDENCE = Path(__file__).resolve().parents[1] / "transformer_lib/evidence"


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="tatoeba-en-de")
    parser.add_argument(
        "--pairs", type=int, default=300, help="of each corpus, at most"
    )
    parser.add_argument("--out", type=Path, help="where the record goes")
    asked = parser.parse_args(given)
    translator = Translator.from_pretrained(asked.model)
    name = translator.about.get("recipe", {}).get("name", Path(asked.model).name)
    warnings.simplefilter("ignore")  # that sentences are cut is what is measured
    found = {}
    for spec, least in SETS.items():
        corpus = load_corpus(spec, "valid")
        ids = translator.tokenizer.encode_all([source for source, _ in corpus.pairs])
        pairs = [
            pair
            for pair, row in zip(corpus.pairs, ids, strict=True)
            if len(row) >= least and len(split_sentences(pair[0])) == 1
        ]
        sources, targets = map(list, zip(*pairs[: asked.pairs], strict=True))
        words = sum(len(target.split()) for target in targets)
        rows = []
        for limit in LIMITS:
            translator.max_length = limit
            outputs = translator(sources, beam_size=4)
            rows.append(
                {
                    "limit": limit,
                    "chrF": chrf(outputs, targets).value,
                    "BLEU": sacre_bleu(outputs, targets).value,
                    "length": sum(len(text.split()) for text in outputs) / words,
                }
            )
            print(spec, rows[-1], flush=True)
        found[spec] = {"pairs": len(sources), "tokens_at_least": least, "rows": rows}
    record = {"model": name, "decoding": "beam 4, alpha 0.6", "corpora": found}
    record |= {
        "threads": torch.get_num_threads(),
        "environment": environment_record("cpu"),
    }
    write_json(asked.out or EVIDENCE / f"results/cut-length/{name}.json", record)


if __name__ == "__main__":
    main()
