"""Number the chapters in the order in which _toc.yml names them.

    python book/_tools/renumber.py            # says what would change
    python book/_tools/renumber.py --write    # changes it

Whoever moves a chapter, adds one or takes one out changes _toc.yml and calls this: the
notebooks get their new names, and every mention of a chapter follows, in notebooks,
pages, tools and tests: file names, "chapter 12", "chapters 05 and 06", "Exercise 12.3",
"Figure 12.1", and the numbers of the map on the first page. A number that stands alone
("as in 12") cannot be told from other numbers: the text says "chapter 12".
Then: make export.
"""

import argparse
import json
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = {".ipynb", ".md", ".py", ".yml", ".toml", ".js", ".svg", ".sh", ".txt", ""}
MADE = re.compile(r"transformer_lib/([\w/]+\.py|evidence/.*json)$")
AND = r"(?:,\s|\s(?:and|or|to)\s|,\s(?:and|or)\s|[-–])"
BETWEEN = r"(?:\s|\\n|[#>/*\"]\s)+"  # a line may end between "chapter" and its number
LISTED = re.compile(
    rf"(?<!\w)(chapters?\b{BETWEEN}|CHAPTERS?=[\"']?|:only:\s|\{{questions\}}\s)(\d\d(?:(?:{AND}|\s)\d\d)*)\b",
    re.IGNORECASE,
)
PARTS = re.compile(
    r"\b((?:exercise|figure|equation|question)s?[ -])(\d{1,2})([.-]\d)", re.IGNORECASE
)

LINK = re.compile(
    r"\[\d\d\](\((?:\.\./)*(?:notebooks/)?)(\d\d)(?=_\w+\.(?:ipynb|html))"
)
ANCHOR = re.compile(
    r"(#exercise-)(\d{1,2})(\d-)"
)  # of the heading "Exercise 12.3: ..."

KEY = re.compile(r"^(    \")(\d{1,2})(\.\d\": )", re.MULTILINE)  # of a test's table


def in_order() -> list[str]:
    """The chapters, as _toc.yml names them."""
    toc = (ROOT / "_toc.yml").read_text("utf-8")
    return re.findall(r"file: notebooks/(\w+)$", toc, re.M)


def changed(text: str, names: dict[str, str]) -> str:
    """A text with all mentions of chapters as the new names have them."""
    numbers = {old[:2]: new[:2] for old, new in names.items()}
    stems = "|".join(names)
    text = re.sub(rf"(?<![0-9a-z])({stems})(?![a-z0-9_])", lambda m: names[m[1]], text)
    text = LISTED.sub(
        lambda m: m[1] + re.sub(r"\d\d", lambda n: numbers.get(n[0], n[0]), m[2]), text
    )

    def part(m):
        new = numbers.get(f"{int(m[2]):02}")
        return m[1] + (str(int(new)) if new else m[2]) + m[3]

    text = KEY.sub(part, PARTS.sub(part, text))
    text = LINK.sub(lambda m: f"[{m[2]}]{m[1]}{m[2]}", text)
    return ANCHOR.sub(part, text)


def in_map(svg: str, names: dict[str, str]) -> str:
    """The map: numbers in circles, and those of its description."""
    numbers = {old[:2]: new[:2] for old, new in names.items()}
    return re.sub(
        r"(?<=class=\"n\">)\d\d(?=</text>)|(?<=[( ])\d\d(?=[),. ])",
        lambda m: numbers.get(m[0], m[0]),
        svg,
    )


def notebook_changed(path: Path, names: dict[str, str]) -> str:
    """A notebook with every cell, and every text in its metadata, changed."""
    notebook = json.loads(path.read_text("utf-8"))

    def through(value):
        if isinstance(value, dict):
            return {key: through(v) for key, v in value.items()}
        if isinstance(value, list) and all(isinstance(v, str) for v in value):
            return changed("".join(value), names).splitlines(keepends=True)
        if isinstance(value, list):
            return [through(v) for v in value]
        return changed(value, names) if isinstance(value, str) else value

    for cell in notebook["cells"]:
        cell["source"] = through(cell["source"])
        cell["metadata"] = {
            key: value if key == "tags" else through(value)
            for key, value in cell["metadata"].items()
        }
    notebook["metadata"] = through(notebook["metadata"])
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="change the files")
    write = parser.parse_args().write
    names = {old: f"{i:02}{old[2:]}" for i, old in enumerate(in_order())}
    there = {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    if odd := sorted(there ^ set(names)):
        raise SystemExit(f"_toc.yml and notebooks/ do not have the same: {odd}.")
    moved = {old: new for old, new in names.items() if old != new}
    print(
        "\n".join(f"{old:20} -> {new}" for old, new in moved.items())
        or "The numbers are those of _toc.yml."
    )
    if not moved or not write:
        return
    listing = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, text=True, capture_output=True
    ).stdout.split("\n")
    for name in filter(None, listing):
        path = ROOT / name
        if path.suffix not in TEXT or MADE.search(name) or "renumber" in path.stem:
            continue
        old = path.read_text("utf-8")
        if path.suffix == ".ipynb":
            new = notebook_changed(path, names)
        else:
            new = changed(old, names)
        if path.name == "map.svg":
            new = in_map(new, names)
        if new != old:
            path.write_text(new, "utf-8")
    for old, new in moved.items():  # two steps: a new name may be an old one
        for path in (ROOT / "notebooks").rglob(f"{old}.ipynb"):
            path.rename(path.with_name(f"{new}.ipynb.moving"))
    for path in (ROOT / "notebooks").rglob("*.moving"):
        path.rename(path.with_suffix(""))


if __name__ == "__main__":
    main()
