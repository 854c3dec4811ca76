"""What the front page's essay shows: numbers of the model, all read from records."""

from __future__ import annotations

import json
import math
import re
from functools import cache, cached_property
from pathlib import Path

from transformer_lib.figures.shipped_model import chain_of, shipped_run
from transformer_lib.hello import softmax

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "transformer_lib" / "evidence"
RECORDS = ("sentence", "essay", "attention-heads")
LABELS = {"<s>": "start", "</s>": "end"}


def read(name: str) -> dict:
    return json.loads((EVIDENCE / f"{name}.json").read_text("utf-8"))


def signed(value: float, digits: int = 2) -> str:
    """A number with a real minus sign; -0.0 is 0.0."""
    return f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")


def percent(share: float, digits: int = 0) -> str:
    return f"{signed(100 * share, digits)} %"


# --- what is shown --------------------------------------------------------------------


class Facts:
    """The numbers of the essay, all from records."""

    def __init__(self):
        self.record, self.other, self.missed = (read(name) for name in RECORDS)
        self.runs = chain_of(shipped_run())
        self.words = [
            LABELS.get(piece, piece).replace("▁", "")
            for piece in self.record["source"]["pieces"]
        ]
        chosen = self.record["candidates"][self.record["source"]["text"]]
        asks, looks, _ = chosen["relations"][-1]
        self.asks, self.looks = self.words.index(asks), self.words.index(looks)
        self.head = self.record["head"]
        self.width = len(self.head["queries"][0])
        self.root = math.sqrt(self.width)

    @cached_property
    def scores(self) -> list[list[float]]:
        """Before the root, a row for each query."""
        return [
            [sum(a * b for a, b in zip(q, k, strict=True)) for k in self.head["keys"]]
            for q in self.head["queries"]
        ]

    @cached_property
    def shares(self) -> list[list[float]]:
        return [softmax([s / self.root for s in row]) for row in self.scores]

    @cached_property
    def output(self) -> list[float]:
        columns = zip(*self.head["values"], strict=True)
        weights = self.shares[self.asks]
        return [sum(w * v for w, v in zip(weights, c, strict=True)) for c in columns]

    @cached_property
    def products(self) -> list[tuple[float, float, float]]:
        """(query, key, product) of the score of the word found, largest first."""
        q, k = self.head["queries"][self.asks], self.head["keys"][self.looks]
        found = [(a, b, a * b) for a, b in zip(q, k, strict=True)]
        return sorted(found, key=lambda row: -abs(row[2]))

    @cached_property
    def undecided(self) -> int:
        """The word whose weights the root changes most."""
        changed = []
        for i, (row, shares) in enumerate(zip(self.scores, self.shares, strict=True)):
            change = max(softmax(row)) - max(shares)
            changed.append((change if re.search(r"\w", self.words[i]) else -1, i))
        return max(changed)[1]

    # heads, as (layer, head) from 0
    @cached_property
    def heads(self) -> dict[tuple[int, int], list[list[float]]]:
        layers = self.record["attention"]["encoder"]
        return {(i, j): w for i, row in enumerate(layers) for j, w in enumerate(row)}

    @cached_property
    def rise(self) -> dict[tuple[int, int], float]:
        """How much the loss rises when a head is switched off."""
        return {
            (row["layer"], row["head"]): row
            for row in self.missed["rows"]
            if row["kind"] == "encoder"
            and row["change"] == "zeroed"
            and row["head"] is not None
        }

    @cached_property
    def favourite(self) -> tuple[int, int]:
        return self.head["layer"] - 1, self.head["head"] - 1

    @cached_property
    def previous(self) -> tuple[int, int]:
        """The head that looks most at the word before."""

        def back(weights):
            return sum(weights[i][i - 1] for i in range(1, len(weights)))

        return max(self.heads, key=lambda name: back(self.heads[name]))

    def reach(self, name) -> float:
        """Among how many words a head spreads its weight, on average."""
        rows = self.heads[name]
        bits = [-sum(w * math.log(w) for w in row if w > 0) for row in rows]
        return math.exp(sum(bits) / len(bits))

    @cached_property
    def twin(self) -> tuple[int, int]:
        """The other head whose weaker one of the expected relations is strongest."""
        chosen = self.record["candidates"][self.record["source"]["text"]]
        places = [
            (self.words.index(a), self.words.index(b))
            for a, b, _ in chosen["relations"]
        ]
        others = {n: w for n, w in self.heads.items() if n != self.favourite}
        return max(others, key=lambda n: min(others[n][i][j] for i, j in places))

    @cached_property
    def unreadable(self) -> tuple[int, int]:
        return max(self.heads, key=self.reach)

    @cached_property
    def target(self) -> list[str]:
        """Words of the translation, and the end."""
        side = self.record["target"]
        pieces = [LABELS.get(piece, piece) for piece in side["pieces"]]
        words = ["".join(pieces[i] for i in group) for group in side["words"][1:]]
        return [*(word.replace("▁", "") for word in words), "end"]

    @cached_property
    def writing(self) -> list[list[int]]:
        """For each word of the translation the places whose output wrote its pieces."""
        side = self.record["target"]
        groups = [[i - 1 for i in group] for group in side["words"][1:]]
        return [*groups, [len(side["pieces"]) - 1]]

    @cached_property
    def across(self) -> list[list[float]]:
        """A row of weights for each word that is written, of one head."""
        where = self.record["across"]
        layer = self.record["attention"]["cross"][where["layer"] - 1]
        table = layer[where["head"] - 1]
        found = []
        for group in self.writing:
            columns = zip(*(table[i] for i in group), strict=True)
            found.append([sum(column) / len(group) for column in columns])
        return found

    @cached_property
    def best(self) -> list[list[tuple[str, float]]]:
        """For each word the most probable first pieces."""
        steps = [self.record["next"][group[0]] for group in self.writing]
        return [
            [(LABELS.get(p, p).replace("▁", "") or p, share) for p, share in step]
            for step in steps
        ]

    @cached_property
    def hesitates(self) -> int:
        return min(range(len(self.best)), key=lambda i: self.best[i][0][1])

    @cached_property
    def learning(self) -> list[tuple[int, float]]:
        """(update, number of tokens between which it hesitates), on unseen text."""
        found, before = [], 0
        for run in self.runs:
            found += [
                (before + row["step"], math.exp(row["valid_loss"]))
                for row in run["history"]
            ]
            before = found[-1][0]
        return found

    def values(self) -> dict[str, str]:
        """What the role writes."""
        row, run = self.shares[self.asks], self.runs[-1]
        a, b = self.undecided, self.shares[self.undecided]
        order = sorted(range(len(b)), key=lambda i: -b[i])
        plain = softmax(self.scores[a])
        rise = {name: self.rise[name] for name in self.rise}
        most = max(rise, key=lambda name: rise[name]["rise"])
        first, last = self.learning[0], self.learning[-1]
        fired = [w["active"] for layer in self.record["feed_forward"] for w in layer]
        hard = self.best[self.hesitates]
        sizes = self.record["sizes"]

        def name(head):
            return f"layer {head[0] + 1}, head {head[1] + 1}"

        def begins(head):
            return name(head).capitalize()

        found = {
            "text": self.record["source"]["text"],
            "translation": self.record["target"]["text"],
            "d_model": str(sizes["d_model"]),
            "d_k": str(self.width),
            "root": f"{self.root:.2f}",
            "layers": str(sizes["num_layers"]),
            "heads": str(len(self.heads)),
            "parameters": f"{run['parameters'] / 1e6:.1f} million",
            "pairs": f"{self.runs[0]['data']['train_pairs']:,}",
            "vocabulary": f"{run['recipe']['vocab_size']:,}",
            "asks": self.words[self.asks],
            "looks": self.words[self.looks],
            "score": signed(self.scores[self.asks][self.looks], 1),
            "share": percent(row[self.looks], 1),
            "rest": percent(1 - row[self.looks], 1),
            "undecided": self.words[a].capitalize(),
            "undecided first": self.words[order[0]],
            "undecided first share": percent(b[order[0]]),
            "undecided second": self.words[order[1]],
            "undecided second share": percent(b[order[1]]),
            "undecided plain": percent(plain[order[0]], 1),
            "favourite": name(self.favourite),
            "favourite rise": percent(
                rise[self.favourite]["rise"] / self.missed["loss"], 1
            ),
            "twin": f"head {self.twin[1] + 1}"
            + (
                ""
                if self.twin[0] == self.favourite[0]
                else f" of layer {self.twin[0] + 1}"
            ),
            "previous": begins(self.previous),
            "unreadable": begins(self.unreadable),
            "unreadable reach": f"{self.reach(self.unreadable):.1f}",
            "most missed": name(most),
            "most rise": percent(rise[most]["rise"] / self.missed["loss"], 1),
            "sentences": str(self.missed["sentences"]),
            "words": str(len(self.words)),
            "d_ff": f"{sizes['d_ff']:,}",
            "fired": percent(sum(fired) / len(fired)),
            "first word": self.target[0],
            "first share": percent(self.best[0][0][1]),
            "hard word": self.target[self.hesitates],
            "hard first": hard[0][0],
            "hard first share": percent(hard[0][1]),
            "hard second": hard[1][0],
            "hard second share": percent(hard[1][1]),
            "updates": f"{last[0]:,}",
            "first update": f"{first[0]:,}",
            "first perplexity": f"{first[1]:.0f}",
            "perplexity": f"{last[1]:.1f}",
            **{f"owned {r['thing']}": owned(r) for r in self.other["owned"]},
            "order 1": self.other["orders"][0]["translation"],
            "order 2": self.other["orders"][1]["translation"],
            "order 2 text": self.other["orders"][1]["text"],
            "blind": self.other["orders"][0]["begins"],
            "blind means": " ({})".format(self.other["orders"][0]["means"])
            if self.other["orders"][0]["means"]
            else "",
        }
        return {key: value.replace(" %", "\u00a0%") for key, value in found.items()}


def owned(row: dict) -> str:
    """The last two words of a translation: what *his house* became."""
    return " ".join(re.findall(r"\w+", row["translation"])[-2:])


@cache
def facts() -> Facts:
    return Facts()
