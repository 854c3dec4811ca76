"""What `make colab` chooses, and what it takes for Colab."""

import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib

import pytest
from built import ROOT
from chapters import all_notebooks, name_of
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TOOL = ROOT / "book" / "_tools" / "colab.py"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


@pytest.fixture(scope="module")
def colab():
    """The tool, as a module."""
    spec = importlib.util.spec_from_file_location("colab", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_chapters_or_those_that_are_named(colab):
    every = [*map(name_of, all_notebooks().values())]
    assert [name_of(path) for path in colab.chosen([])] == every
    some = colab.chosen(["32_evidence", "02", "32"])
    assert [path.stem for path in some] == ["02_attention", "32_evidence"]
    with pytest.raises(SystemExit, match="no chapter '3'. There are: 00_why"):
        colab.chosen(["3"])


def test_colabs_versions_are_those_that_the_project_allows(colab):
    lines = colab.VERSIONS.read_text("utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    checked = set()
    more = PROJECT["optional-dependencies"]["export"]
    for line in [*PROJECT["dependencies"], *more]:
        wanted = Requirement(line)
        name = canonicalize_name(wanted.name)
        if name in pins:
            assert wanted.specifier.contains(pins[name]), f"Colab has {pins[name]}"
            checked.add(name)
    assert {"numpy", "matplotlib", "sentencepiece", "transformers"} <= checked


def test_its_torch_is_colabs_everywhere(colab, tmp_path, monkeypatch):
    """The tool's default, the note beside the versions, the weekly run: one."""
    assert colab.TORCH.removeprefix("torch==") in colab.VERSIONS.read_text("utf-8")
    weekly = (ROOT / ".github" / "workflows" / "weekly.yml").read_text("utf-8")
    assert f"make colab TORCH={colab.TORCH}\n" in weekly
    (wanted,) = (
        r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "torch"
    )
    assert wanted.specifier.contains(colab.TORCH.removeprefix("torch=="))

    def torch_of(*settings):
        done = subprocess.run(
            ["make", "--dry-run", "--no-print-directory", "colab", *settings],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
        asked = shlex.split(done.stdout.replace("\\\n", " "))
        assert asked[1] == "book/_tools/colab.py"
        taken, place = [], tmp_path / str(len(settings))
        place.mkdir(exist_ok=True)
        monkeypatch.setattr(colab.tempfile, "gettempdir", lambda: str(place))
        monkeypatch.setattr(colab.sys, "argv", asked[1:])
        monkeypatch.setattr(colab, "chosen", lambda names: [])
        monkeypatch.setattr(colab, "environment", lambda *given: taken.append(given[2]))
        monkeypatch.setattr(colab, "snapshot", None)
        with pytest.raises(TypeError):  # so far and no further
            colab.main()
        return taken[0]

    monkeypatch.delenv("TORCH", raising=False)
    monkeypatch.delenv("MAKEFLAGS", raising=False)  # of the make that runs the tests
    assert torch_of() == colab.TORCH
    assert torch_of("TORCH=torch==2.9.0") == "torch==2.9.0"
    monkeypatch.setenv("TORCH", "torch==2.8.0")
    assert torch_of() == "torch==2.8.0"


@pytest.mark.parametrize(
    ("asked", "there", "taken", "said"),
    [
        ("torch==2.10.0", ["torch==2.10.0", "-r"], "torch==2.10.0", ""),
        (
            "torch==2.10.0",
            ["-r"],
            "torch==2.0.1",
            "torch==2.0.1, since torch==2.10.0 cannot be installed here; see",
        ),
        (
            "torch==2.10.0",
            ["torch==2.10.0"],
            "torch==2.10.0",
            "other versions of the rest",
        ),
        (
            "torch==2.10.0",
            [],
            "torch==2.0.1",
            "here, and other versions of the rest; see",
        ),
        ("torch==2.9.0", ["-r"], None, ""),  # who names one wants no other
    ],
)
def test_where_colabs_versions_cannot_be_installed(
    colab, asked, there, taken, said, tmp_path, monkeypatch, capsys
):
    installed = []

    def run(command, log=None, **how):
        command = [str(part) for part in command]
        if "install" in command:
            (torch,) = (part for part in command if part.startswith("torch=="))
            installed.append(torch)
            for part in {torch, "-r"} & {*command} - {*there, "torch==2.0.1"}:
                raise subprocess.CalledProcessError(1, part)
        if "-m" in command and "venv" in command:
            (tmp_path / "env").mkdir()
        return subprocess.CompletedProcess(command, 0, "2.0.1+cpu\n", "")

    monkeypatch.setattr(colab, "run", run)
    if taken is None:
        with pytest.raises(subprocess.CalledProcessError):
            colab.environment(tmp_path, "python", asked)
        assert set(installed) == {asked}
        return
    colab.environment(tmp_path, "python", asked)
    out = capsys.readouterr().out
    assert installed[-1] == taken and out.count("\n") == bool(said) and said in out


def test_the_notebooks_install_the_release_from_the_address_that_is_put_here(colab):
    for path in colab.chosen([]):
        found = re.findall(r"git\+(https://[\w./@-]+)", path.read_text("utf-8"))
        assert found and set(found) == {f"{colab.ADDRESS}@{colab.tag()}"}, path.name


def test_a_notebook_there_knows_nothing_of_the_project(colab, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{ROOT / '.venv' / 'bin'}:/usr/bin")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("VIRTUAL_ENV", str(ROOT / ".venv"))
    found = colab.variables(tmp_path)
    assert found["PATH"] == f"{tmp_path / 'env' / 'bin'}:/usr/bin"
    assert "PYTHONPATH" not in found and "VIRTUAL_ENV" not in found
    assert found["GIT_CONFIG_VALUE_0"] == colab.ADDRESS


@pytest.mark.parametrize("code", [0, 127, None])
def test_a_python_that_does_not_run_is_not_taken(colab, code, tmp_path, monkeypatch):
    """pyenv puts a python3.12 on the path that only says where there is one."""
    if code is not None:
        (tmp_path / "python3.12").write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / "python3.12").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    wanted = str(tmp_path / "python3.12") if code == 0 else sys.executable
    assert colab.nearest_python() == wanted


def test_two_runs_do_not_disturb_each_other(colab, tmp_path, monkeypatch):
    monkeypatch.setattr(colab.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(colab.sys, "argv", ["colab.py", "01"])

    def second(*_):
        with pytest.raises(SystemExit, match="Another run of this works in"):
            colab.main()
        raise StopIteration

    monkeypatch.setattr(colab, "environment", second)
    with pytest.raises(StopIteration):
        colab.main()


def test_what_the_repository_holds_is_what_is_here(colab, tmp_path):
    colab.snapshot(tmp_path)
    names = colab.run(["git", "ls-files"], cwd=tmp_path / "repository").stdout
    assert {"pyproject.toml", "transformer_lib/evidence/tatoeba-en-de.json"} <= set(
        names.split("\n")
    )
    assert "_build/" not in names and ".venv/" not in names
    tags = colab.run(["git", "tag"], cwd=tmp_path / "repository").stdout.split()
    assert tags == [colab.tag()]
