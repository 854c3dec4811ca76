"""beams.py: what larger beams find, and what a search's own score says of quality.

The model that ships translates some of Tatoeba's test sentences with beams of 1 to 64,
under two length penalties. From the four best of one search: whether a translation to
which the model gives more probability a token has more chrF, too.

Record: beams.json
"""

import argparse
from pathlib import Path

import numpy as np
import torch

from transformer_lib.ablations import rank_agreement
from transformer_lib.corpora import load_corpus
from transformer_lib.decoding import decode_rows
from transformer_lib.evaluation import (
    chrf,
    chrf_counts,
    chrf_from_counts,
    sacre_bleu,
)
from transformer_lib.machine import environment_record
from transformer_lib.runs import load_pretrained
from transformer_lib.storage import write_json

OUT = Path(__file__).resolve().parents[1] / "transformer_lib/evidence/beams.json"
BEAMS, ALPHAS, LISTED = (1, 2, 4, 8, 16, 32, 64), (0.0, 0.6), 4


def confidence(found: list, tokenizer, references: list[str]) -> dict:
    """What scores of n-best lists say about chrF.

    Args:
        found: For each sentence its hypotheses, best first.
        tokenizer: To read them.
        references: One for each sentence.
    """

    def per_token(hypothesis) -> float:
        return hypothesis.log_prob / (len(hypothesis.ids) + 1)

    letters = [  # for each sentence the chrF of each hypothesis
        [chrf_from_counts(chrf_counts(tokenizer.decode(h.ids), wanted)) for h in listed]
        for listed, wanted in zip(found, references, strict=True)
    ]
    sure = [per_token(listed[0]) for listed in found]
    gap = [x[0].score - x[1].score if len(x) > 1 else 0.0 for x in found]
    first = [row[0] for row in letters]
    quarters = np.array_split(np.argsort(-np.array(sure), kind="stable"), 4)
    full = [i for i, listed in enumerate(found) if len(listed) == LISTED]
    return {
        "sentences": len(found),
        "rank_correlation": {
            "log-probability a token": rank_agreement(sure, first),
            "score": rank_agreement([x[0].score for x in found], first),
            "lead over the second": rank_agreement(gap, first),
        },
        "chrf_by_quarter": [float(np.mean([first[i] for i in q])) for q in quarters],
        "probability_a_token": [float(np.exp(sure[q[-1]])) for q in quarters[:-1]],
        "chrf_by_rank": [
            float(np.mean([letters[i][k] for i in full])) for k in range(LISTED)
        ],
        "chrf_of_the_best_of_four": float(np.mean([max(letters[i]) for i in full])),
        "first_is_best": float(
            np.mean([letters[i][0] == max(letters[i]) for i in full])
        ),
    }


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sentences", type=int, default=200, help="for the beams")
    parser.add_argument("--listed", type=int, default=500, help="for n-best lists")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer, _ = load_pretrained("tatoeba-en-de")
    whole = load_corpus("tatoeba-en-de", "test").pairs

    def take(count: int) -> tuple[list[list[int]], list[str]]:
        """Ids of so many sources, evenly spaced, and their references."""
        pairs = whole[:: len(whole) // count][:count]
        return [tokenizer.encode(source) for source, _ in pairs], [x for _, x in pairs]

    rows, references = take(asked.listed)
    found = decode_rows(model, rows, 4, 0.6, n_best=LISTED)
    record: dict = {
        "model": "tatoeba-en-de",
        "command": "python experiments/beams.py",
        "n_best": confidence(found, tokenizer, references),
        "beams": list(BEAMS),
        "sentences": asked.sentences,
        "alphas": {str(alpha): [] for alpha in ALPHAS},
        "environment": environment_record(),
    }
    print(record["n_best"], flush=True)
    rows, references = take(asked.sentences)
    wanted = sum(len(tokenizer.encode(text)) for text in references)
    for beam_size in BEAMS:
        for alpha in ALPHAS:
            best = [x[0] for x in decode_rows(model, rows, beam_size, alpha)]
            outputs = [tokenizer.decode(one.ids) for one in best]
            score = sacre_bleu(outputs, references)
            line = {
                "bleu": score.value,
                "chrf": chrf(outputs, references).value,
                "log_prob": float(np.mean([one.log_prob for one in best])),
                "length": sum(len(one.ids) for one in best) / wanted,
            }
            record["signature"] = score.signature
            record["alphas"][str(alpha)].append(line)
            print(alpha, beam_size, line, flush=True)
    write_json(OUT, record)


if __name__ == "__main__":
    main()
