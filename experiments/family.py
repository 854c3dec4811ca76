"""family.py: texts longer than in training, and ViT with several seeds (28, 29).

Trains language models with five kinds of positions on pieces of 32 tokens, judged
place by place on pieces of 128, each with three seeds; those with rotary positions also
with a larger base, as they are and after 40 updates on pieces of 128; and ViT beside a
linear model, each with five seeds and five divisions of the images. Writes
family-small.json after each run; a run that is in it is not done again.

Record: family-small.json
"""

import dataclasses
import hashlib
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from torch import Tensor

from transformer_lib.family import MEMBERS, FamilyConfig, ImageClassifier, build_model
from transformer_lib.family.pretraining import (
    fit_steps,
    next_token_loss,
    short_sentences,
    small_tokenizer,
)
from transformer_lib.machine import environment_record
from transformer_lib.storage import write_json
from transformer_lib.tokenizer import BOS, EOS

OUT = Path(__file__).parents[1] / "transformer_lib/evidence/family-small.json"
SMALL = {"d_model": 64, "num_heads": 4, "num_layers": 2, "d_ff": 128, "dropout": 0.0}
CORPUS, TEXTS, HELD = short_sentences()
TOKENIZER = small_tokenizer(TEXTS)
V = TOKENIZER.vocab_size


def ids_of(texts: list[str]) -> list[list[int]]:
    return [[BOS, *ids, EOS] for ids in TOKENIZER.encode_all(texts)]


ROWS, HELD_ROWS = ids_of(TEXTS), ids_of(HELD)


def trained(positions: str, seed: int, short: int = 32, long: int = 128):
    """A model trained on short pieces."""
    torch.manual_seed(seed)
    settings = {**SMALL, **MEMBERS["GPT-2"], "positions": positions}
    model = build_model(FamilyConfig(V, **settings, max_length=long))
    fit_steps(model, lambda: piece_loss(model, short), 400)
    return model


def piece_loss(model, length: int) -> Tensor:
    """On 16 pieces of running text."""
    text = torch.tensor([i for row in ROWS for i in row[1:]])
    at = torch.randint(len(text) - length - 1, (16, 1))
    return next_token_loss(model, text[at + torch.arange(length + 1)])


def judged(model, long: int = 128) -> tuple[list[float], int]:
    """Loss at each place of held-out pieces, and their number."""
    held = torch.tensor([i for row in HELD_ROWS for i in row[1:]])
    pieces = held[: len(held) // (long + 1) * (long + 1)].view(-1, long + 1)
    with torch.inference_mode():
        logits = model(pieces[:, :-1]).transpose(1, 2)  # (N, V, long)
        losses = F.cross_entropy(logits, pieces[:, 1:], reduction="none").mean(0)
    return [round(x, 4) for x in losses.tolist()], len(pieces)


def by_place(positions: str, seed: int) -> dict:
    """Loss at each place of long pieces, for a model trained on short ones."""
    losses, pieces = judged(trained(positions, seed))
    return {"losses": losses, "pieces": pieces}


def by_base(seed: int) -> dict:
    """The same with rotary positions, in the training's base and in a larger one."""
    model, losses = trained("rotary", seed), {}
    width = SMALL["d_model"] // SMALL["num_heads"]
    bases = {"as trained": 10_000.0, "slower": 10_000.0 * 4 ** (width / (width - 2))}
    for name, base in bases.items():
        turned = build_model(dataclasses.replace(model.config, rotary_base=base))
        turned.load_state_dict(model.state_dict())
        losses[name], pieces = judged(turned.eval())
        torch.manual_seed(seed)
        fit_steps(turned, lambda: piece_loss(turned, 128), 40, lr=1e-3)  # noqa: B023
        losses[f"{name}, 40 updates"], _ = judged(turned)
    return {"bases": bases, "losses": losses, "pieces": pieces}


def digits(seed: int) -> dict:
    torch.manual_seed(seed)
    images, classes = load_digits(return_X_y=True)
    parts = train_test_split(
        images / 16, classes, test_size=450, random_state=seed, stratify=classes
    )
    linear = LogisticRegression(max_iter=1000).fit(parts[0], parts[2])
    x, test = (torch.tensor(p).float().view(-1, 1, 8, 8) for p in parts[:2])
    y, truth = map(torch.tensor, parts[2:])
    settings = MEMBERS["ViT"] | SMALL
    model = ImageClassifier(FamilyConfig(10, **settings), 8, 2)

    def loss() -> Tensor:
        chosen = torch.randint(len(x), (64,))
        return F.cross_entropy(model(x[chosen]), y[chosen])

    fit_steps(model, loss, 500, lr=3e-3)
    with torch.inference_mode():
        wrong = int((model(test).argmax(-1) != truth).sum())
    missed = int((linear.predict(parts[1]) != parts[3]).sum())
    return {"wrong": wrong, "linear": missed, "images": len(truth)}


def main() -> None:
    torch.set_num_threads(1)
    record = json.loads(OUT.read_text("utf-8")) if OUT.exists() else {"results": {}}
    text = "\n".join([*TEXTS, "", *HELD]).encode()
    record |= {
        "command": "python experiments/family.py",
        "data": {
            "corpus": CORPUS,
            "sentences": len(TEXTS),
            "held_out": len(HELD),
            "sha256": hashlib.sha256(text).hexdigest(),
            "digits": "scikit-learn load_digits",
        },
        "environment": environment_record(),
    }
    jobs = {
        f"positions {kind}, seed {seed}": (by_place, kind, seed)
        for seed in range(3)
        for kind in ("sinusoidal", "learned", "rotary", "relative", "alibi")
    }
    jobs |= {f"rotary base, seed {seed}": (by_base, seed) for seed in range(3)}
    jobs |= {f"ViT, seed {seed}": (digits, seed) for seed in range(5)}
    for name, (run, *arguments) in jobs.items():
        if name in record["results"]:
            continue
        start = time.thread_time()
        found = run(*arguments)
        found["seconds"] = round(time.thread_time() - start, 1)
        record["results"][name] = found
        write_json(OUT, record)
        shown = {k: v for k, v in found.items() if k != "losses"}
        print(name, json.dumps(shown), flush=True)


if __name__ == "__main__":
    main()
