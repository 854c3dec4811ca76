"""The release that the notebooks install: the tag of transformer_lib.__version__.

    python book/_tools/release.py            # its tag
    python book/_tools/release.py --check v0.2.0

The version stands in transformer_lib/__init__.py alone; export.py writes its tag into
the install cell of each notebook. --check refuses a tag whose version is another one,
or that CHANGELOG.md, CITATION.cff or a notebook does not know.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from chapters import all_notebooks

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "https://github.com/literate-transformer/literate-transformer"
INSTALLS = re.compile(rf"(%pip .*git\+{re.escape(ADDRESS)})(?:@[\w.]+)?")


def tag() -> str:
    """The tag of this version."""
    text = (ROOT / "transformer_lib" / "__init__.py").read_text("utf-8")
    return "v" + re.search(r'^__version__ = "(.+)"$', text, re.M)[1]


def name_release(paths: list[Path], check: bool = False) -> list[str]:
    """Have install cells name this release; the notebooks that did not."""
    wrong = []
    for path in paths:
        notebook = json.loads(path.read_text("utf-8"))
        changed = False
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                named = [INSTALLS.sub(rf"\1@{tag()}", line) for line in cell["source"]]
                changed |= named != cell["source"]
                cell["source"] = named
        if changed and not check:
            text = json.dumps(notebook, indent=1, ensure_ascii=False)
            path.write_text(text + "\n", encoding="utf-8")
        wrong += [path.name] if changed else []
    return wrong


def faults(asked: str) -> list[str]:
    """What speaks against a release of that tag."""
    version = tag().removeprefix("v")
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    notebooks = [*all_notebooks(ROOT / "notebooks").values()]
    found = [
        f"{name} installs another release: make export"
        for name in name_release(notebooks, check=True)
    ]
    if asked != tag():
        found.append(f"transformer_lib.__version__ is {version}, the tag is {asked}")
    if not re.search(rf"^## {re.escape(version)}\b", changes, re.M):
        found.append(f"CHANGELOG.md has no section {version}")
    if f"\nversion: {version}\n" not in citation:
        found.append(f"CITATION.cff is not of version {version}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", metavar="TAG", help="whether it can be released")
    asked = parser.parse_args().check
    print(tag())
    sys.exit("\n".join(faults(asked)) or 0 if asked else 0)
