"""essay_record.py: what the model that ships makes of the front page's other sentences.

The front page follows one sentence, whose numbers are in sentence.json. This adds three
things, all translated with beam 4, as the library does:

- "owned": the sentence with another thing owned, for which German changes *his*;
- "orders": the same words in three orders, as the model reads them and with the
  positions of the English words set to zero;
- "tried": sentences that are hard in different ways, picked from about thirty because
  the model of that day failed at them. Each has a rule, a regular expression that a
  right translation matches; the page shows those that fail it. "right" passes. What a
  wrong translation means is ours, and said of that very translation alone ("means").

Run it again when another model ships; a test compares the record with the model.

Record: essay.json
"""

import argparse
import hashlib
import json
import re
from pathlib import Path

import torch

from transformer_lib.machine import environment_record
from transformer_lib.runs import load_pretrained
from transformer_lib.runs.folder import find_pretrained
from transformer_lib.translator import Translator

OUT = Path(__file__).resolve().parents[1] / "transformer_lib/evidence/essay.json"
MODEL = "tatoeba-en-de"
OWNED = ["house", "cat", "ring"]
ORDERS = [
    "The old man sold his house.",
    "His house sold the old man.",
    "The old house sold his man.",  # two words exchanged, letter by letter: chapter 04
]
# English, why it is hard, what a right translation has, a right translation.
TRIED = [
    (
        "The old man the boats.",
        "*Man* is the verb: old people crew the boats.",
        r"bemann|alten\b.*(boote|schiffe)",
        "Die Alten bemannen die Boote.",
    ),
    (
        "The bat flew out of the cave.",
        "*Bat* is the animal here.",
        r"fledermaus",
        "Die Fledermaus flog aus der Höhle.",
    ),
    (
        "It's raining cats and dogs.",
        "An idiom.",
        r"\bin strömen|gieß|schütt|bindfäden",
        "Es regnet in Strömen.",
    ),
    (
        "The animal didn't cross the street because it was too tired.",
        "*It* is the animal, in German *es*; *sie* is the street.",
        r"weil es|es war",
        "Das Tier überquerte die Straße nicht, weil es zu müde war.",
    ),
    (
        "We sat on the bank of the river.",
        "*Bank* has two meanings.",
        r"\bufer|fluss\b.*\brand|am fluss",
        "Wir saßen am Ufer des Flusses.",
    ),
    (
        "The old man sold his smartphone.",
        "A modern word.",
        r"smartphone|handy",
        "Der alte Mann verkaufte sein Smartphone.",
    ),
    (
        "The transformer replaced recurrent networks.",
        "The words of our own field.",
        r"netz",
        "Der Transformer ersetzte rekurrente Netze.",
    ),
]

# What the model wrote -> what that means, said by us.
MEANS = {
    "Der alte Mann hat die Boote gekocht.": "The old man cooked the boats.",
    "Die Badewanne flog aus der Höhle.": "The bathtub flew out of the cave.",
    "Es regnet wie Hunde.": "It is raining like dogs.",
    "Wir saßen auf der Bank des Flusses.": "We sat on the river’s bench.",
    "Der alte Mann verkaufte sein Smoking.": "The old man sold his dinner jacket.",
    "Der Überfluss erholte sich mit Berufskräfte.": (
        "The abundance recovered with professional forces."
    ),
    "Der alte Mann hat das alte Haus verkauft": "the old man sold the old house",
}
BEGINNING = 8  # words of a translation that goes on and on


def fails(row: dict) -> bool:
    """Whether a translation breaks its rule."""
    return not re.search(row["rule"], row["translation"], re.IGNORECASE)


def essay_record(model, tokenizer, about: dict) -> dict:
    """All of it, for a model in evaluation mode on the CPU."""
    translate = Translator(model, tokenizer, about)
    owned = [f"The old man sold his {thing}." for thing in OWNED]
    found = {
        "owned": [
            {"thing": thing, "text": text, "translation": translate(text)}
            for thing, text in zip(OWNED, owned, strict=True)
        ],
        "tried": [
            dict(
                text=text, why=why, rule=rule, right=right, translation=translate(text)
            )
            for text, why, rule, right in TRIED
        ],
    }
    for row in found["tried"]:
        row["means"] = MEANS.get(row["translation"], "")
    read = [translate(text) for text in ORDERS]
    off = model.src_positions.register_forward_hook(lambda *call: 0 * call[-1])
    blind = [translate(text) for text in ORDERS]
    off.remove()
    found["orders"] = [
        {"text": text, "translation": a, "without positions": b, "begins": begins(b)}
        for text, a, b in zip(ORDERS, read, blind, strict=True)
    ]
    found["orders"][0]["means"] = MEANS.get(found["orders"][0]["begins"], "")
    return found


def begins(text: str) -> str:
    return " ".join(text.split()[:BEGINNING]).rstrip(",.")


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    weights = find_pretrained(MODEL) / "weights.safetensors"
    record = {
        "command": "python experiments/essay_record.py",
        "model": MODEL,
        **essay_record(*load_pretrained(MODEL, "cpu")),
        "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "environment": environment_record(),
    }
    text = json.dumps(record, ensure_ascii=False, indent=1)
    OUT.write_text(text + "\n", encoding="utf-8")
    for row in record["owned"] + record["orders"]:
        print(*row.values(), sep=" | ")
    for row in record["tried"]:
        print("fails" if fails(row) else "right", row["text"], "->", row["translation"])


if __name__ == "__main__":
    main()
