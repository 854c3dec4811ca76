"""sealed.py RUN --text DIR --out FILE: score a translator on pairs kept for the end.

They have no near copy in its training text (fresh_split.py), and no choice was made on
them. So they are looked at once: a run that is not finished is refused, and so is a
second look. DIR is the folder of translator_text.py. What is scored are the averaged
weights in half precision, or the merged ones of evidence.py, as they ship, by beam
search with beam 4. With --isolated it is the validation pairs that have no near copy in
training, for a run that goes on from one that had read the others.

Record: results/sealed/*.json
"""

import argparse
from dataclasses import asdict
from pathlib import Path

from evidence import loaded, translator
from fresh_split import isolated
from translator_text import pairs_of

from transformer_lib.batches import tokenize_pairs
from transformer_lib.corpora import hash_pairs
from transformer_lib.evaluation import bootstrap_interval, chrf, sacre_bleu
from transformer_lib.machine import default_device, environment_record
from transformer_lib.runs import Run
from transformer_lib.storage import write_json
from transformer_lib.training import validation_loss


def record_of(run: Run, pairs: list[tuple], max_length: int | None = None) -> dict:
    """BLEU with its interval, chrF++ and loss of a run on some pairs."""
    sources, references = (list(side) for side in zip(*pairs, strict=True))
    outputs = translator(run, max_length)(sources, beam_size=4)
    interval = bootstrap_interval(outputs, references)
    tokens = tokenize_pairs(pairs, run.tokenizer, run.recipe.max_length)
    return {
        "recipe": asdict(run.recipe),
        "environment": environment_record(str(run.model.device)),
        "pairs": len(pairs),
        "sha256": hash_pairs(pairs),
        "sacreBLEU": asdict(sacre_bleu(outputs, references)),
        "interval": [interval.low, interval.high],
        "chrF++": asdict(chrf(outputs, references, word_order=2)),
        "loss": validation_loss(run.model, tokens, 4096),
        "outputs": outputs,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of the finished run")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--isolated", action="store_true", help="see above")
    parser.add_argument("--weights", choices=["average", "merged"], default="average")
    parser.add_argument("--max-length", type=int, help="tokens at which a line is cut")
    parser.add_argument("--device", help="cpu or cuda (what is there)")
    asked = parser.parse_args(arguments)
    run = loaded(asked.run, default_device(asked.device), asked.weights)
    if asked.out.exists():
        parser.error(f"{asked.out} is there: these pairs have been looked at")
    if run.progress.step < run.recipe.max_steps:
        parser.error(
            f"{asked.run} is at update {run.progress.step}: it is not finished"
        )
    pairs, kind = pairs_of(asked.text), "sealed pairs"
    if asked.isolated:
        kind = "isolated pairs"
        pairs = isolated(pairs_of(asked.text, "valid"), pairs_of(asked.text, "train"))
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(asked.out, {"kind": kind} | record_of(run, pairs, asked.max_length))


if __name__ == "__main__":
    main()
