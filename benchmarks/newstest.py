r"""Score a trained model on newstest2014, both ways: sacreBLEU, and as the paper did.

    python benchmarks/newstest.py             # the model that ships: some minutes
    python benchmarks/newstest.py --quick     # 50 sentences, nothing is written
    python benchmarks/newstest.py --model runs/wmt14-en-de-base --averaged \
        --out transformer_lib/evidence/wmt14-en-de-base.json  # of chapter 24

Reads newstest2014 from the cache, the mirror or its public address (`load_corpus`), and
writes a record without the test's sentences; for the model that ships it is
transformer_lib/evidence/newstest2014-tatoeba-model.json.

Record: newstest2014-*.json
"""

import argparse
import hashlib
from dataclasses import asdict
from pathlib import Path

import torch
from kept import keep, out_file

from transformer_lib.corpora import Corpus, load_corpus
from transformer_lib.evaluation import evaluate, tokenized_bleu
from transformer_lib.machine import environment_record
from transformer_lib.translator import Translator


def score(translator: Translator, corpus: Corpus, language: str) -> dict:
    """The scores of a model on one test set; no sentence of the test is kept."""
    record = evaluate(translator, corpus)
    outputs = record.pop("outputs")
    references = [target for _, target in corpus.pairs]
    split = language == "de"  # the paper splits compounds in German alone
    record["tokenized_BLEU"] = asdict(
        tokenized_bleu(outputs, references, language, split_compounds=split)
    )
    text = "\n".join(outputs).encode()
    return record | {"outputs_sha256": hashlib.sha256(text).hexdigest()}


def main(arguments=None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="tatoeba-en-de", help="a name or a folder")
    parser.add_argument("--averaged", action="store_true", help="a run's averaged one")
    parser.add_argument("--pair", choices=("en-de", "en-fr"), default="en-de")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="50 sentences, no record")
    parser.add_argument("--out", type=out_file, help="where the record is written")
    asked = parser.parse_args(arguments)
    model = f"{asked.model}/averaged" if asked.averaged else asked.model
    translator = Translator.from_pretrained(model, asked.device)
    corpus = load_corpus(f"newstest-{asked.pair}", "test")
    if asked.quick:
        few = corpus.pairs[:50]
        corpus = Corpus(corpus.name, "test, 50", few, corpus.licence, corpus.origin)
    about = translator.about
    record = {
        "what": "newstest2014, the paper's test set, translated and scored",
        "model": Path(asked.model).name,
        "parameters": translator.model.config.num_parameters(),
        "trained_on": about.get("data", {}).get("corpus", "unknown"),
        "data": about.get("data", {}),
        "test_licence": corpus.licence,
        **score(translator, corpus, asked.pair[-2:]),
        "threads": torch.get_num_threads(),
        "environment": environment_record(asked.device),
    }
    for name in ("BLEU", "tokenized_BLEU"):
        print(f"{record[name]['value']:6.2f}  {record[name]['signature']}")
    keep(record, "newstest2014-tatoeba-model", asked.out, asked.quick)
    return record


if __name__ == "__main__":
    main()
