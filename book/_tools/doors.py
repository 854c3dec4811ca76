"""Which module each name of the library is taken from, read from its files."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

LIBRARY = Path(__file__).resolve().parents[2] / "transformer_lib"


@cache
def names_at(door: str) -> dict[str, str]:
    """The names at a package's door, and at that of the library (""): their modules."""
    if not door:
        for node in ast.parse((LIBRARY / "__init__.py").read_text("utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOME":
                return ast.literal_eval(node.value)
    stub = LIBRARY / door / "__init__.pyi"
    body = ast.parse(stub.read_text("utf-8")).body if stub.exists() else []
    return {a.name: f"{door}.{node.module}" for node in body for a in node.names}


def module_of(name: str) -> str:
    """The module that a dotted name below transformer_lib is, or is taken from.

    "" where there is none; `runs.train` and `train` both are in `runs.trainer`.
    """
    if (LIBRARY / name.replace(".", "/")).with_suffix(".py").exists():
        return name
    door, _, last = name.rpartition(".")
    home = names_at(door).get(last, "")
    if home.partition(".")[0] == door:
        return home
    if home:  # at the library's own door: that of a package, or a module
        return module_of(f"{home}.{last}")
    return module_of(door) if door else ""


def taken(source: str, package: str = "transformer_lib") -> Iterator[tuple[str, str]]:
    """What some source imports, anywhere in it: modules, and the names taken from them.

    Modules of the library are without `transformer_lib` before them.

    Args:
        source: The text of a module or a cell.
        package: From where its relative imports are meant.

    Raises:
        SyntaxError: If it is no Python.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: 1 - node.level or None] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            found = [(f"{base}.{alias.name}", alias.name) for alias in node.names]
        else:
            continue
        for name, last in found:
            inside = name.removeprefix("transformer_lib.")
            module = name.removesuffix(f".{last}")
            yield (module_of(inside) if inside != name else module), last
