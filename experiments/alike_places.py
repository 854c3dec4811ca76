"""How alike the places of a sentence are inside an encoder, layer by layer.

    python experiments/alike_places.py RUN RUN ...

Each RUN is a folder of a run of ablate, ROW-SEED in a folder that says which. For
validation sentences: the mean cosine between the vectors of two different places of one
sentence, in the sums of embedding and position, and after each layer of the encoder. At
1 all places have the same direction, and attention cannot tell them apart. Beside it
the loss with the right source, and with that of another sentence, about as long. The
record goes to transformer_lib/evidence/alike-places.json.

Record: alike-places.json
"""

import argparse
from dataclasses import asdict
from pathlib import Path

import torch
from evidence import some_of
from torch import Tensor

from transformer_lib.batches import pad, tokenize_pairs
from transformer_lib.corpora import load_corpus
from transformer_lib.corpora.known import hash_pairs
from transformer_lib.encoder import mean_cosines
from transformer_lib.machine import environment_record
from transformer_lib.runs import Run
from transformer_lib.storage import write_json
from transformer_lib.tokenizer import EOS, PAD
from transformer_lib.training import validation_loss

OUT = Path(__file__).resolve().parents[1] / "transformer_lib/evidence/alike-places.json"
SENTENCES = 500


@torch.inference_mode()
def by_layer(model, sources: list[list[int]]) -> list[float]:
    """The mean cosine before the first layer and after each, over the sentences."""
    seen: list[Tensor] = []  # what came in, and what each layer gave
    layers = model.encoder.layers
    hooks = [layers[0].register_forward_pre_hook(lambda _, x: seen.append(x[0]))]
    hooks += [
        layer.register_forward_hook(lambda _, x, out: seen.append(out))
        for layer in layers
    ]
    totals = [0.0] * (len(layers) + 1)
    try:
        for first in range(0, len(sources), 50):
            seen.clear()
            src_ids = pad(sources[first : first + 50])
            model.encode(src_ids)
            for place, x in enumerate(seen):
                real = (src_ids != PAD).to(x.device)
                totals[place] += mean_cosines(x, real).sum().item()
    finally:
        for hook in hooks:
            hook.remove()
    return [round(total / len(sources), 4) for total in totals]


def with_other_sources(pairs: list) -> list:
    """Each target with the source of another pair of about the same length."""
    order = sorted(pairs, key=lambda pair: len(pair[0].split()))
    others = order[1:] + order[:1]
    return [(other[0], pair[1]) for pair, other in zip(order, others, strict=True)]


def look(model, tokenizer, pairs: list) -> dict:
    """Cosines by layer, and the losses with the right source and with another one."""
    losses = [
        validation_loss(model, tokenize_pairs(some, tokenizer), 4000)
        for some in (pairs, with_other_sources(pairs))
    ]
    return {
        "cosines": by_layer(model, [[*tokenizer.encode(s), EOS] for s, _ in pairs]),
        "loss": round(losses[0], 4),
        "loss_with_another_source": round(losses[1], 4),
    }


def measure(run: Run, pairs: list) -> dict:
    """What `look` sees in one run's best weights."""
    return {
        "recipe": asdict(run.recipe),
        "updates": run.record["step"],
        "data": run.data,
        **look(run.model.eval(), run.tokenizer, pairs),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(arguments)
    runs = {f"{f.parent.name}/{f.name}": Run.load(f, "cpu", "best") for f in given.runs}
    corpus = next(iter(runs.values())).recipe.corpus
    valid = [pair for pair in load_corpus(corpus, "valid").pairs if all(pair)]
    pairs = some_of(valid, SENTENCES)
    record = {
        "command": "python experiments/alike_places.py RUN RUN",
        "validation": {"pairs": len(pairs), "sha256": hash_pairs(pairs)},
        "environment": environment_record("cpu"),
        "results": {name: measure(run, pairs) for name, run in runs.items()},
    }
    write_json(given.out, record)
    for name, one in record["results"].items():
        print(name, one["cosines"], one["loss"], one["loss_with_another_source"])


if __name__ == "__main__":
    main()
