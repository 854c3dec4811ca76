"""How many of 200 lines as people type them does a model translate as it should?

    python experiments/robustness.py MODEL [--lines FILE] [--out FILE] [--show]

MODEL is what Translator.from_pretrained takes. The lines and the rule for each stand in
transformer_lib/evidence/robustness.toml, and a hundred others, written for one look, in
robustness-fresh.toml beside it. Writes the share of each kind, and each output with the
reason why it failed.

Record: results/robustness/*.json, results/robustness-fresh/*.json
"""

import argparse
import itertools
import re
import tomllib
from pathlib import Path

from transformer_lib.machine import environment_record
from transformer_lib.storage import write_json
from transformer_lib.translator import Translator

ROOT = Path(__file__).resolve().parents[1]
SUITE = ROOT / "transformer_lib" / "evidence" / "robustness.toml"


def lines_of(path: Path = SUITE) -> dict[str, list[dict]]:
    """The lines of each kind."""
    return tomllib.loads(path.read_text("utf-8"))


def why_not(line: dict, output: str, long: bool = False) -> str:
    """Why a translation is not good; an empty text if it is.

    Args:
        line: en, has, and perhaps keeps.
        output: The translation.
        long: Whether the stricter rule of length holds.
    """
    words, given = output.split(), len(line["en"].split())
    low, high = (0.75 * given, 1.5 * given) if long else (given / 2 - 2, 2 * given + 2)
    if not words:
        return "empty"
    if output.strip() == line["en"].strip():
        return "not translated"
    if not low <= len(words) <= high:
        return f"{len(words)} words for {given}"
    for word, group in itertools.groupby(words):
        if sum(1 for _ in group) > 2:
            return f"{word!r} over and over"
    for kept in line.get("keeps", []):
        if kept not in output:
            return f"lacks {kept!r}"
    for pattern in line["has"]:
        if not re.search(pattern, output, re.IGNORECASE):
            return f"nothing like {pattern!r}"
    return ""


def scored(translate, suite: dict[str, list[dict]]) -> dict:
    """Share of good lines, of each kind and of all; and each line's output."""
    lines = [(kind, line) for kind, some in suite.items() for line in some]
    outputs = translate([line["en"] for _, line in lines])
    found = [
        {
            "kind": kind,
            "en": line["en"],
            "output": output,
            "why_not": why_not(line, output, kind == "long"),
        }
        for (kind, line), output in zip(lines, outputs, strict=True)
    ]

    def share(some: list[dict]) -> float:
        return sum(not row["why_not"] for row in some) / len(some)

    kinds = {kind: share([r for r in found if r["kind"] == kind]) for kind in suite}
    return {"good": share(found), "kinds": kinds, "lines": found}


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a model of the library, or a folder")
    parser.add_argument(
        "--lines", type=Path, default=SUITE, help="the lines, if others"
    )
    parser.add_argument("--out", type=Path, help="where the record goes")
    parser.add_argument("--show", action="store_true", help="the lines that failed")
    asked = parser.parse_args(given)
    translate = Translator.from_pretrained(asked.model)
    record = scored(lambda lines: translate(lines, beam_size=4), lines_of(asked.lines))
    for kind, share in record["kinds"].items():
        print(f"{kind:10} {share:4.0%}")
    print(f"{'all':10} {record['good']:4.0%}")
    if asked.show:
        for row in (row for row in record["lines"] if row["why_not"]):
            print(f"{row['why_not']}\n    {row['en']}\n    {row['output']}")
    if asked.out:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        about = {"model": Path(asked.model).name, "decoding": "beam 4, alpha 0.6"}
        about["environment"] = environment_record("cpu")
        write_json(asked.out, about | record)


if __name__ == "__main__":
    main()
