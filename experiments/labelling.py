"""Train the labelling encoder of chapter 26, the parser's reference, and record it.

    python experiments/labelling.py RUN [--recipe craft-labels] [--out record.json]

RUN is the folder of the run; a second call goes on where the first one stopped. Scored
on development trees after each validate_every updates; on the test trees once, with the
mean of the last weights.

Record: results/parser-reference/*.json
"""

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

from transformer_lib.batches import batches
from transformer_lib.machine import PRECISIONS, default_device, environment_record
from transformer_lib.objective import build_optimizer, noam_lr
from transformer_lib.parsing import (
    BracketScore,
    Labeller,
    LabelTask,
    load_trees,
    train_tree_tokenizer,
)
from transformer_lib.parsing.parser import score_parses
from transformer_lib.runs import (
    Progress,
    Recipe,
    average_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from transformer_lib.runs.checkpoints import (
    drop_steps,
    keep_step,
    load_weights,
    step_files,
    step_of,
)
from transformer_lib.storage import write_json

ROOT = Path(__file__).resolve().parents[1]


class Trainer:
    """A run: what is trained, on what, and where it stands."""

    def __init__(self, recipe: Recipe, folder: Path, device: str, some: int):
        self.recipe, self.folder, self.device = recipe, folder, device
        folder.mkdir(parents=True, exist_ok=True)
        name = recipe.corpus.partition("+")[0]
        self.bank, valid = load_trees(name, "train"), load_trees(name, "valid")
        self.few = valid.trees[::some]
        trees = self.bank.trees
        tokenizer = train_tree_tokenizer(trees, recipe.vocab_size, "slots")
        self.task = LabelTask(trees, tokenizer)
        torch.manual_seed(recipe.seed)
        sizes = [len(kind) for kind in self.task.kinds]
        self.model = Labeller(tokenizer.vocab_size, sizes, **recipe.model).to(device)
        self.optimizer = build_optimizer(self.model, recipe.fused)
        last = folder / "last.safetensors"
        self.at = load_checkpoint(last, self.model, self.optimizer) or Progress()
        about = folder / "environment.json"
        if not about.exists():
            write_json(about, environment_record(device))
        self.environment = json.loads(about.read_text("utf-8"))

    def train(self) -> None:
        """Update to the end of the recipe, with a checkpoint now and then."""
        recipe, at, losses = self.recipe, self.at, []
        self.model.train()
        while at.step < recipe.max_steps:
            pairs = self.task.pairs(at.epoch, recipe.max_length)
            began = time.monotonic()
            budget, seed = recipe.max_tokens, recipe.seed
            for batch in batches(pairs, budget, seed, at.epoch, at.batch):
                losses.append(self.update(batch.to(self.device)))
                at.step, at.batch = at.step + 1, at.batch + 1
                at.tokens += batch.num_tokens - len(batch.tgt_out)  # words
                over = at.step == recipe.max_steps
                if over or at.step % recipe.validate_every == 0:
                    at.seconds += time.monotonic() - began
                    self.validate(sum(losses) / len(losses))
                    began, losses = time.monotonic(), []
                if over:
                    return
            at.seconds += time.monotonic() - began
            at.epoch, at.batch = at.epoch + 1, 0

    def update(self, batch) -> float:
        """One update; its loss."""
        recipe = self.recipe
        lr = noam_lr(
            self.at.step + 1, recipe.model["d_model"], recipe.warmup, recipe.lr_factor
        )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        kind = PRECISIONS[recipe.precision]
        self.optimizer.zero_grad()
        low = torch.autocast(
            torch.device(self.device).type, kind, enabled=kind != torch.float32
        )
        with low:
            loss = self.task.loss(self.model, batch, recipe.label_smoothing)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def score(self, trees: list) -> tuple[dict, list]:
        """Scores of some trees, with the seconds that they took; and their parses."""
        start = time.perf_counter()
        parses = self.task.parse(trees, self.model)
        seconds = time.perf_counter() - start
        return score_parses(trees, parses) | {"seconds": seconds}, parses

    def validate(self, loss: float) -> None:
        """Score development trees, and save."""
        at = self.at
        point = {"step": at.step, "epoch": at.epoch, "tokens": at.tokens}
        point |= {"seconds": at.seconds, "train_loss": loss}
        at.history.append(point | {"f1": self.score(self.few)[0]["f1"]})
        print(json.dumps(at.history[-1]), flush=True)
        weights = dict(self.model.named_parameters())
        keep_step(self.folder, weights, at, self.recipe.keep_last)
        save_checkpoint(
            self.folder / "last.safetensors", self.model, self.optimizer, at
        )
        drop_steps(self.folder, at)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--recipe", default="craft-labels")
    parser.add_argument("--device", help="cpu or cuda (what is there)")
    parser.add_argument("--out", type=Path, help="where the record goes")
    parser.add_argument("--every", type=int, default=1, help="one test tree in so many")
    parser.add_argument("--some", type=int, default=4, help="one development tree in")
    given = parser.parse_args(arguments)
    recipe, device = Recipe.load(given.recipe), default_device(given.device)
    run = Trainer(recipe, given.run, device, given.some)
    run.train()
    load_weights(run.model, average_checkpoints(given.run))
    development = run.score(run.few)[0]
    bank = load_trees(recipe.corpus.partition("+")[0], "test")
    trees = bank.trees[:: given.every]
    scores, parses = run.score(trees)
    each = [BracketScore.of(t, p.tree) for t, p in zip(trees, parses, strict=True)]
    size = run.task.tokenizer.vocab_size
    longest = recipe.max_length // 2
    words = [len(tree.words) for tree in run.bank.trees if len(tree.words) <= longest]
    record = {
        "command": f"python experiments/labelling.py RUN --recipe {recipe.name}",
        "recipe": asdict(replace(recipe, vocab_size=size)),
        "seed": recipe.seed,
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "labels": [len(kind) for kind in run.task.kinds],
        "data": {
            "sha256": run.bank.sha256,
            "corpus": recipe.corpus,
            "licence": run.bank.licence,
            "train_pairs": len(words),
        },
        "environment": run.environment,
        "updates": run.at.step,
        "tokens": run.at.tokens,
        "passes": run.at.tokens / sum(words),
        "seconds": run.at.seconds,
        "f1": scores["f1"],
        "weights": {"averaged": [step_of(path) for path in step_files(given.run)]},
        "scores": {"all": {"value": scores["f1"]} | scores},
        "development": {"trees": len(run.few), "every": given.some} | development,
        "test": {"sha256": bank.sha256, "trees": len(bank), "every": given.every},
        "history": run.at.history,
        "counts": [[s.matched, s.gold, s.parsed] for s in each],
    }
    evidence = ROOT / "transformer_lib" / "evidence" / f"{recipe.name}.json"
    write_json(given.out or evidence, record)


if __name__ == "__main__":
    main()
