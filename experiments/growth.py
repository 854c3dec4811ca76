"""growth.py RUN [--sentences N]: how the score of a run grew, on validation sentences.

Scores every kept step-NNNNNN.safetensors of a run, then averages of its last 1, 5
and 10, greedily and with beam 4. Writes
transformer_lib/evidence/RECIPE-growth.json; a checkpoint in it is not scored again.

Record: *-growth.json
"""

import argparse
import json
from pathlib import Path

import torch
from evidence import translator

from transformer_lib.corpora import load_corpus
from transformer_lib.evaluation import sacre_bleu
from transformer_lib.machine import environment_record
from transformer_lib.runs import Run, average_checkpoints
from transformer_lib.runs.checkpoints import load_weights, step_files
from transformer_lib.storage import write_json

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--sentences", type=int, default=500)
    asked = parser.parse_args()
    run = Run.load(asked.run)
    pairs = load_corpus(run.recipe.corpus, "valid").pairs[: asked.sentences]
    sources, references = zip(*pairs, strict=True)
    out = ROOT / "transformer_lib" / "evidence" / f"{run.recipe.name}-growth.json"
    record = json.loads(out.read_text("utf-8")) if out.exists() else {"scores": {}}
    record |= {"sentences": len(pairs), "split": "valid"}
    record["environment"] = environment_record()
    translate = translator(run)

    def score(name: str, beam_size: int, files: list[Path]) -> None:
        name = f"{name}, beam {beam_size}"
        if name in record["scores"]:
            return
        load_weights(run.model, average_checkpoints(files))
        outputs = translate(list(sources), beam_size=beam_size)
        bleu = sacre_bleu(outputs, references)
        record["scores"][name] = {
            "step": int(files[-1].stem.removeprefix("step-")),
            "averaged": len(files),
            "beam_size": beam_size,
            "bleu": bleu.value,
        }
        record["signature"] = bleu.signature
        write_json(out, record)
        print(f"{name:24} {bleu.value:6.2f}", flush=True)

    torch.set_num_threads(1)
    files = step_files(asked.run)
    for file in files:
        score(file.stem, 1, [file])
    for count in (1, 5, 10):
        if count <= len(files):
            for beam_size in (1, 4):
                score(f"last {count}", beam_size, files[-count:])


if __name__ == "__main__":
    main()
