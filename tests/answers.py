"""Run an answer to an exercise, and its check, as a reader's notebook would."""

import ast
import functools
import importlib
import json
import re
from pathlib import Path

import pytest
from exercises import ExerciseError, read_exercises

ROOT = Path(__file__).parents[1]

NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
SHELL = re.compile(r"\s*[%!](?!=)")
IMPORT = ast.Import | ast.ImportFrom
DEFAULT_EXP = re.compile(r"^#\|\s*default_exp\s+(\S+)")


def cells_of(path):
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def text_of(cell):
    return "".join(cell["source"])


def imports_of(cells):
    """The import statements of a notebook's code cells, as one program."""
    lines = []
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        text = "\n".join(
            "" if SHELL.match(line) else line for line in text_of(cell).splitlines()
        )
        try:
            body = ast.parse(text).body
        except SyntaxError:  # what is left of a cell with a %magic in a block
            continue
        lines += [ast.unparse(node) for node in body if isinstance(node, IMPORT)]
    return "\n".join(dict.fromkeys(lines))


@functools.cache
def names_of(path):
    """What an exercise may use: the chapter's imports and its module."""
    cells = cells_of(path)
    names = {"__name__": "exercise"}
    exec(imports_of(cells), names)
    for cell in cells:
        if cell["cell_type"] == "code" and (match := DEFAULT_EXP.match(text_of(cell))):
            module = importlib.import_module(f"transformer_lib.{match[1]}")
            names |= {k: v for k, v in vars(module).items() if not k.startswith("__")}
    return names


def run_check(exercise, path, answer):
    """Run an answer and then the check; give what the check displays."""
    names = dict(names_of(path))
    exec(compile(answer, f"{exercise.name}, answer", "exec"), names)
    body = ast.parse(exercise.check).body
    assert isinstance(body[-1], ast.Expr), "the check must end with an expression"
    assert all(isinstance(node, IMPORT) for node in body[:-1])
    exec(compile(ast.Module(body[:-1], []), "check", "exec"), names)
    return eval(compile(ast.Expression(body[-1].value), "check", "eval"), names)


def all_exercises():
    """Each chapter's file with each of its exercises, as parameters of a test."""
    for path in NOTEBOOKS:
        try:
            exercises = read_exercises(cells_of(path))
        except ExerciseError:
            continue  # test_exercises.py says so
        for exercise in exercises:
            yield pytest.param(path, exercise, id=f"{path.stem}-{exercise.number}")
