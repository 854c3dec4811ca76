"""family.py: texts longer than in training, and chapter 20's models trained for longer.

Trains language models with three kinds of positions on pieces of 32 tokens, judged
place by place on pieces of 128, each with three seeds; ViT with five seeds; BERT, T5
and GPT for several times as long as the chapter does, each beside what counting
knows. Writes evidence/family-small.json after each run; a run that is in it is not
done again.
"""

import hashlib
import json
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from torch import Tensor

from transformer_lib.batches import pad
from transformer_lib.family import (
    MEMBERS,
    FamilyConfig,
    ImageClassifier,
    build_model,
    count_pairs,
    cut_batch,
    fit,
    hidden_loss,
    mask_tokens,
    next_token_loss,
    row_batches,
    short_sentences,
    span_loss,
)
from transformer_lib.text import BOS, EOS, Tokenizer
from transformer_lib.training import environment_record, write_json

OUT = Path(__file__).resolve().parents[2] / "evidence" / "family-small.json"
SMALL = {"d_model": 64, "num_heads": 4, "num_layers": 2, "d_ff": 128, "dropout": 0.0}
STEPS = (400, 3600)
CORPUS, TEXTS, HELD = short_sentences()
TOKENIZER = Tokenizer.train(
    TEXTS, 700 if CORPUS.startswith("tatoeba") else 400, kind="unigram"
)
V = TOKENIZER.vocab_size
SENTINELS = list(range(V, V + 9))


def ids_of(texts: list[str]) -> list[list[int]]:
    return [[BOS, *ids, EOS] for ids in TOKENIZER.encode_all(texts)]


ROWS, HELD_ROWS = ids_of(TEXTS), ids_of(HELD)
ONE, TWO = count_pairs(ROWS, V)


def nats(p: Tensor, answer: Tensor) -> float:
    """Mean of -log of the probability, (N, V), of each answer, (N,)."""
    return -p.gather(1, answer[:, None]).log().mean().item()


def train_gpt(steps: int, seed: int) -> dict:
    torch.manual_seed(seed)
    model = build_model(FamilyConfig(V, **SMALL, num_kv_heads=2, **MEMBERS["LLaMA"]))
    batches = row_batches(ROWS, 32, seed)
    fit(model, lambda: next_token_loss(model, next(batches)), steps)
    with torch.inference_mode():
        loss = next_token_loss(model, pad(HELD_ROWS)).item()
    two = torch.tensor([p for r in HELD_ROWS for p in zip(r, r[1:], strict=False)])
    single = -ONE[two[:, 1]].log().mean().item()
    return {"loss": loss, "single": single, "left": nats(TWO[two[:, 0]], two[:, 1])}


def train_bert(steps: int, seed: int) -> dict:
    torch.manual_seed(seed)
    changes = {"positions": "rotary", "norm_first": True}
    model = build_model(FamilyConfig(V + 1, **SMALL, **(MEMBERS["BERT"] | changes)))
    batches = row_batches(ROWS, 32, seed)
    fit(model, lambda: hidden_loss(model, next(batches), V), steps)
    ids = pad(HELD_ROWS)
    chance = torch.Generator().manual_seed(1)
    seen, wanted = mask_tokens(ids, V, V, generator=chance)
    row, place = (wanted != 0).nonzero().T
    answer, left, right = ids[row, place], ids[row, place - 1], ids[row, place + 1]
    both = TWO[left] * TWO[:, right].T
    with torch.inference_mode():
        p = model(seen)[row, place, :V].softmax(-1)
    return {
        "loss": nats(p, answer),
        "right": (p.argmax(1) == answer).float().mean().item(),
        "single": -ONE[answer].log().mean().item(),
        "left": nats(TWO[left], answer),
        "both": nats(both / both.sum(1, keepdim=True), answer),
    }


def train_t5(steps: int, seed: int) -> dict:
    torch.manual_seed(seed)
    changes = {"num_layers": 1, "positions": "rotary"}
    settings = MEMBERS["T5"] | SMALL | changes
    model = build_model(FamilyConfig(V + len(SENTINELS), **settings))
    batches = row_batches([r for r in ROWS if len(r) > 7], 32, seed)
    rng = random.Random(seed)

    def loss() -> Tensor:
        holes = cut_batch(next(batches).tolist(), SENTINELS, rng, 0.5, 3)
        return span_loss(model, *holes)

    fit(model, loss, steps, lr=6e-3)
    held = [r for r in HELD_ROWS if len(r) > 7]
    src_ids, tgt_ids = cut_batch(held, SENTINELS, random.Random(2), 0.5, 3)
    answer = tgt_ids[:, 1:]
    real = (answer > EOS) & (answer < V)
    with torch.inference_mode():
        p = model(src_ids, tgt_ids[:, :-1])[..., :V].softmax(-1)[real]
    left = left_neighbours(src_ids, tgt_ids)
    return {
        "loss": nats(p, answer[real]),
        "single": -ONE[answer[real]].log().mean().item(),
        "left": nats(TWO[left], answer[real]),
    }


def left_neighbours(src_ids: Tensor, tgt_ids: Tensor) -> Tensor:
    """The token that stands in the text before each token of the holes."""
    found = []
    for source, target in zip(src_ids.tolist(), tgt_ids.tolist(), strict=True):
        before = dict(zip(source, [BOS, *source], strict=False))
        last = BOS
        for token in target[1:]:
            if EOS < token < V:
                found.append(last)
            last = before.get(token, BOS) if token >= V else token
    return torch.tensor(found)


def by_place(positions: str, seed: int, short: int = 32, long: int = 128) -> dict:
    """Loss at each place of long pieces, for a model trained on short ones."""
    torch.manual_seed(seed)
    settings = {**SMALL, **MEMBERS["GPT-2"], "positions": positions}
    model = build_model(FamilyConfig(V, **settings, max_length=long))
    text = torch.tensor([i for row in ROWS for i in row[1:]])
    starts = torch.arange(short + 1)

    def loss() -> Tensor:
        at = torch.randint(len(text) - short - 1, (16, 1))
        return next_token_loss(model, text[at + starts])

    fit(model, loss, 400)
    held = torch.tensor([i for row in HELD_ROWS for i in row[1:]])
    pieces = held[: len(held) // (long + 1) * (long + 1)].view(-1, long + 1)
    with torch.inference_mode():
        logits = model(pieces[:, :-1]).transpose(1, 2)  # (N, V, long)
        losses = F.cross_entropy(logits, pieces[:, 1:], reduction="none").mean(0)
    return {"losses": [round(x, 4) for x in losses.tolist()], "pieces": len(pieces)}


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

    fit(model, loss, 500, lr=3e-3)
    with torch.inference_mode():
        wrong = int((model(test).argmax(-1) != truth).sum())
    missed = int((linear.predict(parts[1]) != parts[3]).sum())
    return {"wrong": wrong, "linear": missed, "images": len(truth)}


def main() -> None:
    torch.set_num_threads(1)
    record = json.loads(OUT.read_text("utf-8")) if OUT.exists() else {"results": {}}
    text = "\n".join([*TEXTS, "", *HELD]).encode()
    record |= {
        "command": "python book/_tools/family.py",
        "data": {"corpus": CORPUS, "sentences": len(TEXTS), "held_out": len(HELD),
                 "sha256": hashlib.sha256(text).hexdigest(),
                 "digits": "scikit-learn load_digits"},
        "environment": environment_record(),
    }  # fmt: skip
    jobs = {f"positions {kind}, seed {seed}": (by_place, kind, seed)
            for seed in range(3)
            for kind in ("sinusoidal", "learned", "rotary")}  # fmt: skip
    jobs |= {f"ViT, seed {seed}": (digits, seed) for seed in range(5)}
    for steps in STEPS:
        jobs[f"BERT, {steps} steps"] = (train_bert, steps, 0)
        jobs[f"T5, {steps} steps"] = (train_t5, steps, 0)
        jobs[f"GPT, {steps} steps"] = (train_gpt, steps, 0)
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
