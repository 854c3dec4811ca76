"""Print which script writes which record, as README.md beside this has it.

    python experiments/records.py            # the table
    python experiments/records.py --write    # brings README.md up to it

Each script here and in benchmarks/ names its records, below transformer_lib/evidence,
in the last paragraph of its docstring. What a command of the library writes is read
from the queue.

Record: none
"""

import argparse
import ast
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EVIDENCE = ROOT / "transformer_lib" / "evidence"
README = ROOT / "experiments" / "README.md"
# Records that no script writes.
LIBRARY = {
    "attention-heads.json": "transformer_lib.looking_inside.heads.record_heads()",
    "table3-small.json": "transformer-lib ablate table3-small --record FILE",
}


def named_by(script: Path) -> list[str]:
    """The records that a script says it writes, as patterns of file names."""
    words = ast.get_docstring(ast.parse(script.read_text("utf-8"))) or ""
    line = re.search(r"\n\nRecord: ([^\n]+(?:\n[^\n]+)*)\Z", words)
    if not line:
        raise ValueError(f"{script}: the docstring does not end with its record.")
    return [] if line[1].startswith("none") else re.split(r",\s+", line[1])


def scripts() -> list[Path]:
    """The scripts of experiments, and the benchmarks that keep a record."""
    benchmarks = [
        path
        for path in sorted((ROOT / "benchmarks").glob("*.py"))
        if "\n\nRecord: " in path.read_text("utf-8")
    ]
    return [*sorted((ROOT / "experiments").glob("*.py")), *benchmarks]


@cache
def groups() -> dict[str, set[str]]:
    """What each group of the queue calls: a script, or a command of the library."""
    queue = tomllib.loads((EVIDENCE / "queue.toml").read_text("utf-8"))
    found = {}
    for group in queue["group"]:
        first, second, *_ = shlex.split(group["command"])
        called = f"{first} {second}" if first == "transformer-lib" else first
        found.setdefault(group["name"], set()).add(called)
    return found


@cache
def writers() -> list[tuple[str, str]]:
    """Pairs of a pattern of records and what writes them, in the order of the names."""
    pairs = list(LIBRARY.items())
    for script in scripts():
        name = script.relative_to(ROOT).as_posix()
        pairs += [(pattern, name) for pattern in named_by(script)]
    for group, called in groups().items():
        library = sorted(name for name in called if name.startswith("transformer-lib"))
        pairs += [(f"results/{group}/*.json", name) for name in library]
    return sorted(pairs)


def table() -> str:
    """The table, in Markdown."""
    lines = ["| record | written by |", "|---|---|"]
    for pattern, writer in writers():
        place = ROOT / writer
        said = f"[{writer}](../{writer})" if place.is_file() else f"`{writer}`"
        lines.append(f"| `{pattern}` | {said} |")
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """A page with today's table in the place of the one that it has."""
    return re.sub(r"(\| record \|[^\n]*\n(?:\|[^\n]*\n)*)", lambda _: table(), text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="bring README.md up to it")
    if parser.parse_args().write:
        README.write_text(with_table(README.read_text("utf-8")), "utf-8")
    else:
        print(table(), end="")
