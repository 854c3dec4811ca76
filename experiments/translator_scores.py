"""translator_scores.py [RECORD ...]: what the translator's test scores consist of.

Reads the recorded translations of some runs of one recipe (those behind the model that
ships, if none are named) and their text, and writes evidence/translator-test.json:
scores with intervals of all test sentences, of those with and without a near copy in
the training text, of those with and without a name that was never read; by length, and
by whether all words were read; and the runs against each other by paired bootstrap.
What is counted how is shown under the hood of chapter 19. Minutes; it needs the
corpora.

Record: translator-test.json
"""

import argparse
from pathlib import Path

from transformer_lib.corpora import load_corpus
from transformer_lib.evaluation import (
    bootstrap_interval,
    chrf,
    paired_bootstrap,
)
from transformer_lib.figures.shipped_model import (
    FIRST_RUNS,
    by_length,
    came_through,
    gaps_of,
    near_copies,
    news_beyond,
    shipped_run,
    unread_copies,
    words_in,
    words_of,
)
from transformer_lib.machine import environment_record
from transformer_lib.runs import read_evidence, recorded_outputs
from transformer_lib.storage import write_json

ROOT = Path(__file__).resolve().parents[1]


def scores_of(rows: list[tuple[str, str, str]]) -> dict:
    """BLEU and chrF2 with the bounds of 95% of bootstrap samples, and chrF++."""
    _, references, outputs = (list(side) for side in zip(*rows, strict=True))
    found = {"sentences": len(rows), "chrF++": chrf(outputs, references, 2).value}
    for metric in ("BLEU", "chrF2"):
        interval = bootstrap_interval(outputs, references, metric)
        found[metric] = [interval.value, interval.low, interval.high]
    return found


def compared(first: list[tuple], second: list[tuple]) -> dict:
    """Second minus first, with bounds, p, and the standard deviation of the samples."""
    references = [row[1] for row in first]
    sides = [[row[2] for row in rows] for rows in (first, second)]
    found = {}
    for metric in ("BLEU", "chrF2"):
        both = paired_bootstrap(*sides, references, metric)
        found[metric] = {
            "gain": both.second - both.first,
            "low": both.low,
            "high": both.high,
            "p": both.p_value,
            "sd": float(both.differences.std()),
        }
    return found


def record_of(names: list[str]) -> dict:
    """All that the docstring of this file names."""
    runs = [read_evidence(name) for name in names]
    corpus = runs[-1]["recipe"]["corpus"]
    text, news = load_corpus(corpus), load_corpus("newstest-en-de", "test")
    valid = load_corpus(corpus, "valid")
    outputs = [recorded_outputs(run) for run in runs]
    sources = [[row[:2] for row in rows] for rows in outputs]
    if any(side != sources[-1] for side in sources):
        raise SystemExit("The runs were scored on different test sentences.")
    gaps = gaps_of(german for _, german in text.pairs)
    near = {
        "valid": near_copies(gaps, valid.pairs),
        "test": near_copies(gaps, sources[-1]),
    }
    known = words_in(text.pairs)
    named = [bool(unread_copies([row], known)) for row in outputs[-1]]
    english = {word for source, _ in text.pairs for word in words_of(source)}
    read = [english.issuperset(words_of(row[0])) for row in outputs[-1]]
    groups = {
        "all": [True] * len(named),
        "a near copy in training": near["test"],
        "no near copy": [not one for one in near["test"]],
        "a name never read": named,
        "no such name": [not one for one in named],
    }
    parts = [
        {
            group: [row for row, one in zip(rows, some, strict=True) if one]
            for group, some in groups.items()
        }
        for rows in outputs
    ]
    pairs = {"valid": valid.pairs, "test": sources[-1]}
    copies = [unread_copies(rows, known) for rows in outputs]
    parted = {"all words read": read, "a word never read": [not one for one in read]}
    return {
        "command": "python experiments/translator_scores.py",
        "runs": names,
        "test_sha256": runs[-1]["scores"]["sacreBLEU"]["test_sha256"],
        "training_sha256": text.sha256,
        "near": {
            part: {
                "pairs": len(some),
                "near": sum(some),
                "words": sum(len(german.split()) for _, german in pairs[part]),
            }
            for part, some in near.items()
        },
        "scores": {
            name: {group: scores_of(rows) for group, rows in part.items()}
            for name, part in zip(names, parts, strict=True)
        },
        "compared": [
            {"first": names[i], "second": names[i + 1], "group": group}
            | compared(parts[i][group], parts[i + 1][group])
            for i in range(len(names) - 1)
            for group in groups
        ],
        "copied": {
            name: [sum(came_through(*one) for one in some), len(some)]
            for name, some in zip(names, copies, strict=True)
        },
        "by_length": by_length(outputs[-1]),
        "parted": {
            name: [
                by_length(
                    [row for row, one in zip(outputs[-1], some, strict=True) if one],
                    edges,
                )
                for edges in ((1, 9, 13, 1000), (1, 1000))
            ]
            for name, some in parted.items()
        },
        "newstest": news_beyond(text.pairs, news.pairs),
        "environment": environment_record("cpu"),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", help="names of records")
    asked = parser.parse_args(arguments)
    path = ROOT / "transformer_lib/evidence/translator-test.json"
    names = asked.runs or list(dict.fromkeys([*FIRST_RUNS, shipped_run()]))
    write_json(path, record_of(names))
    print(f"The record is in {path}.")


if __name__ == "__main__":
    main()
