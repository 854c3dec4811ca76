"""What the type checker is asked, and that it notices."""

import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import transformer_lib

ROOT = Path(__file__).parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
RULES = tomllib.loads(PROJECT)["tool"]["mypy"]["overrides"]


def test_no_module_is_left_out():
    """No rule switches the errors of a module off."""
    assert RULES and not [rule for rule in RULES if "ignore_errors" in rule]
    assert "exclude" not in tomllib.loads(PROJECT)["tool"]["mypy"]


def functions_of(thing):
    """A function, or the methods that a class has of its own, with their names."""
    if not inspect.isclass(thing):
        return [(thing.__name__, thing)]
    found = []
    for name, member in vars(thing).items():
        member = getattr(member, "__func__", member)
        if name == "__init__" or not name.startswith("_"):
            found += [(f"{thing.__name__}.{name}", member)] * inspect.isfunction(member)
    return found


@pytest.mark.parametrize("name", transformer_lib.__all__[1:])  # but the version
def test_each_argument_of_the_stable_api_has_a_type(name):
    for known, function in functions_of(getattr(transformer_lib, name)):
        signature = inspect.signature(inspect.unwrap(function))
        for argument in signature.parameters.values():
            several = argument.kind in (argument.VAR_KEYWORD, argument.VAR_POSITIONAL)
            if not several and argument.name not in ("self", "cls"):
                assert argument.annotation is not argument.empty, (known, argument)
        if not known.endswith("__init__"):
            assert signature.return_annotation is not signature.empty, known


def test_the_checker_notices(tmp_path):
    """A wrong claim about the API, and nothing else."""
    (tmp_path / "claim.py").write_text(
        "from typing import assert_type\n"
        "from transformer_lib import Translator\n"
        "def f(translate: Translator) -> None:\n"
        "    assert_type(translate('a'), str)\n"
        "    assert_type(translate(['a']), str)\n"
    )
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        ROOT / "pyproject.toml",
        "transformer_lib",
        tmp_path / "claim.py",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    errors = re.findall(r"^(\S+\.py):(\d+): error: (.*)$", done.stdout, re.M)
    claims = [(int(line), said) for path, line, said in errors if "claim" in path]
    assert [line for line, _ in claims] == [5], done.stdout + done.stderr
    assert 'of type "list[str]", not "str"' in claims[0][1]
    assert len(errors) == 1, done.stdout
