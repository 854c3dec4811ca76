"""BERT and T5 of chapter 28, trained until they are worth looking at.

    python experiments/pretraining.py BERT --seed 0 --out FILE [--steps N] [--device D]

Trains on all English sentences of Tatoeba of at most 60 characters, and judges on 2,000
held-out ones, beside counting on the same text: single tokens, and pairs of neighbors.
BERT says 15 % of the tokens, hidden as in its paper; T5 writes spans of 3 tokens on
average, half of each sentence, as in the chapter. What is hidden in the held-out
sentences is the same for all seeds.

A run stopped goes on from its checkpoint (FILE with .pt), to the same result: each
update draws its batch, its holes and its dropout from a seed of its own.
Writes one JSON: nats a token and share of tokens right, for the model and for counting.

Record: results/family/*.json
"""

import argparse
import hashlib
import random
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from transformer_lib.batches import pad
from transformer_lib.corpora import load_corpus
from transformer_lib.family import MEMBERS, FamilyConfig, build_model, mask_tokens
from transformer_lib.family.pretraining import (
    count_pairs,
    cut_batch,
    hidden_loss,
    short_sentences,
    span_loss,
)
from transformer_lib.machine import environment_record
from transformer_lib.objective import build_optimizer
from transformer_lib.storage import whole_file, write_json
from transformer_lib.tokenizer import BOS, EOS, PAD, Tokenizer

SIZE = {"d_model": 128, "num_heads": 4, "num_layers": 3, "d_ff": 512, "dropout": 0.1}
CHANGES = {
    "BERT": {"positions": "rotary", "norm_first": True},
    "T5": {"positions": "rotary"},
}
PIECES, LONGEST, HELD = 2000, 60, 2000
ROWS, RATE, SPANS = 64, 2e-3, (0.5, 3)


def rows_of(tokenizer: Tokenizer, texts: list[str], shortest: int) -> list[list[int]]:
    rows = [[BOS, *ids, EOS] for ids in tokenizer.encode_all(texts)]
    return [row for row in rows if len(row) >= shortest]


class Task:
    """What one member of the family learns, and how it is judged."""

    def __init__(self, member: str, vocab_size: int):
        self.member, self.vocab_size = member, vocab_size
        self.sentinels = list(range(vocab_size, vocab_size + 25))
        more = 1 if member == "BERT" else len(self.sentinels)
        settings = MEMBERS[member] | SIZE | CHANGES[member]
        self.config = FamilyConfig(vocab_size + more, **settings)

    def loss(self, model: nn.Module, rows: list[list[int]], seed: int) -> Tensor:
        if self.member == "BERT":
            return hidden_loss(model, pad(rows), self.vocab_size)
        holes = cut_batch(rows, self.sentinels, random.Random(seed), *SPANS)
        return span_loss(model, *holes)

    @torch.inference_mode()
    def judged(self, model: nn.Module, rows: list[list[int]], one, two) -> dict:
        """Nats and share right of each way to guess, on the same hidden tokens."""
        model.eval()
        said, answers, left, right = [], [], [], []
        generator, rng = torch.Generator().manual_seed(1), random.Random(1)
        for start in range(0, len(rows), 100):
            batch = rows[start : start + 100]
            if self.member == "BERT":
                ids = pad(batch)
                seen, wanted = mask_tokens(
                    ids, self.vocab_size, self.vocab_size, generator=generator
                )
                at = (wanted != PAD).nonzero(as_tuple=True)
                logits = model(seen)[at]
                left.append(ids[at[0], at[1] - 1])
                right.append(ids[at[0], at[1] + 1])
                answers.append(ids[at])
            else:
                source, target = cut_batch(batch, self.sentinels, rng, *SPANS)
                answer, before = (
                    target[:, 1:],
                    neighbors(source, target, self.vocab_size),
                )
                real = (answer > EOS) & (answer < self.vocab_size)
                logits = model(source, target[:, :-1])[real.to(model.device)]
                left.append(before[real])
                answers.append(answer[real])
            said.append(logits.cpu().log_softmax(-1)[:, : self.vocab_size])
        answer, left = torch.cat(answers), torch.cat(left)
        guesses = {
            "model": torch.cat(said),
            "single tokens": one.log().expand(len(answer), -1),
            "left neighbor": two[left].log(),
        }
        if right:
            both = two[left] * two[:, torch.cat(right)].T
            both /= both.sum(dim=1, keepdim=True)
            guesses["both neighbors"] = both.log()
        return {
            name: {
                "nats": round(-p.gather(1, answer[:, None]).mean().item(), 4),
                "right": round((p.argmax(1) == answer).float().mean().item(), 4),
                "tokens": len(answer),
            }
            for name, p in guesses.items()
        }


def neighbors(source: Tensor, target: Tensor, vocab_size: int) -> Tensor:
    """For each token to be written, the one before it in the text, whole as it was."""
    found = torch.full_like(target[:, 1:], BOS)
    for row, (holed, said) in enumerate(
        zip(source.tolist(), target.tolist(), strict=True)
    ):
        before, last = dict(zip(holed, [BOS, *holed], strict=False)), BOS
        for place, token in enumerate(said[1:]):
            found[row, place] = last
            last = before.get(token, BOS) if token >= vocab_size else token
    return found


def run(member: str, seed: int, steps: int, out: Path, device: str) -> dict:
    """Train from the last checkpoint on, and judge."""
    name, texts, held = short_sentences(LONGEST, words=None, held=HELD)
    tokenizer = Tokenizer.train(texts, PIECES, model_type="unigram")
    shortest = 3 if member == "BERT" else 8  # 6 tokens, of which 3 are cut out
    rows = sorted(rows_of(tokenizer, texts, shortest), key=len)
    held_rows = rows_of(tokenizer, held, shortest)
    groups = [rows[i : i + ROWS] for i in range(0, len(rows), ROWS)]
    one, two = count_pairs(rows_of(tokenizer, texts, 3), tokenizer.vocab_size)

    torch.manual_seed(seed)
    task = Task(member, tokenizer.vocab_size)
    model = build_model(task.config).to(device)
    optimizer = build_optimizer(model)
    kept = out.with_suffix(".pt")
    done, seconds, curve = 0, 0.0, []
    if kept.exists():
        state = torch.load(kept, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done, seconds, curve = state["step"], state["seconds"], state["curve"]
    warmup, began = max(1, steps // 20), time.monotonic()
    model.train()
    for step in range(done + 1, steps + 1):
        torch.manual_seed(seed * 1_000_000 + step)
        chosen = groups[torch.randint(len(groups), ()).item()]
        rate = RATE * min(step / warmup, (steps + 1 - step) / (steps + 1 - warmup))
        optimizer.param_groups[0]["lr"] = rate
        loss = task.loss(model, chosen, seed * 1_000_000 + step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % max(1, steps // 20) == 0:
            scores = task.judged(model, held_rows, one, two)
            model.train()
            curve.append([step, scores["model"]["nats"]])
            spent = seconds + time.monotonic() - began
            with whole_file(kept) as file:
                torch.save(
                    {
                        "model": model.state_dict(),
                        "step": step,
                        "curve": curve,
                        "optimizer": optimizer.state_dict(),
                        "seconds": spent,
                    },
                    file,
                )
            print(
                f"{step:,} updates, {spent / 60:.1f} min: {scores['model']}", flush=True
            )
    scores = task.judged(model, held_rows, one, two)
    text = "\n".join([*texts, "", *held]).encode()
    return {
        "member": member,
        "seed": seed,
        "command": f"python experiments/pretraining.py {member} --seed {seed} "
        f"--steps {steps} --out FILE",
        "config": asdict(task.config),
        "parameters": task.config.num_parameters(),
        "data": {
            "corpus": name,
            "sentences": len(rows),
            "held_out": len(held_rows),
            "pieces": tokenizer.vocab_size,
            "sha256": hashlib.sha256(text).hexdigest(),
        },
        "updates": steps,
        "passes": round(steps * ROWS / len(rows), 1),
        "tokens": round(steps * sum(map(len, rows)) / len(groups)),
        "seconds": round(seconds + time.monotonic() - began),
        "curve": curve,
        "nats": scores["model"]["nats"],
        "guesses": scores,
        "environment": environment_record(device),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("member", choices=list(CHANGES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40_000)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    load_corpus("tatoeba-en-de")  # or an error: no other text will do
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(asked.out, run(**vars(asked)))
    asked.out.with_suffix(".pt").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
