"""The files that set the project up agree with each other."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
TORCH = re.search(r"^TORCH\s*\?=\s*(\S+)", MAKEFILE, re.M)[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def wanted():
    """Every requirement of the project, extras included."""
    lines = [*PROJECT["dependencies"], *(r for extra in EXTRAS.values() for r in extra)]
    return [Requirement(line) for line in lines]


def locked():
    """What is installed: the lock, and torch as the Makefile pins it."""
    lines = (ROOT / "requirements.lock").read_text("utf-8").splitlines()
    pins = [line.split(";")[0].strip() for line in lines if re.match(r"[A-Za-z]", line)]
    pairs = (pin.split("==") for pin in [*pins, TORCH])
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def test_lock_covers_the_project():
    pins = locked()
    for requirement in wanted():
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{name} is not in requirements.lock: make lock"
        assert requirement.specifier.contains(pins[name]), (
            f"requirements.lock has {name} {pins[name]}, pyproject.toml asks for"
            f" {requirement.specifier}: make lock"
        )


def test_lock_names_no_place():
    lock = (ROOT / "requirements.lock").read_text("utf-8")
    assert "torch==" not in re.sub(r"#.*", "", lock), "the Makefile pins torch"
    assert not re.search(r"https?://|file:|--(index|find|extra)", lock)


def test_conda_environment_says_the_same():
    conda = yaml.safe_load((ROOT / "environment.yml").read_text("utf-8"))
    plain = [d for d in conda["dependencies"] if isinstance(d, str)]
    (pip,) = (d["pip"] for d in conda["dependencies"] if isinstance(d, dict))
    assert "python" + PROJECT["requires-python"] in plain and "pip" in plain
    assert TORCH in pip and "-r requirements.lock" in pip
    (itself,) = (line for line in pip if line.startswith("-e "))
    extras = re.fullmatch(r"-e \.\[(.*)\]", itself)[1].split(",")
    assert sorted(extras) == sorted(EXTRAS)
    for line in pip:
        if not line.startswith("-"):
            assert Requirement(line).specifier.contains(locked()["torch"])


def test_binder_installs_the_lock():
    script = (ROOT / ".binder" / "postBuild").read_text("utf-8")
    assert TORCH in script and "-r requirements.lock" in script
    assert os.access(ROOT / ".binder" / "postBuild", os.X_OK)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow(path):
    text = path.read_text("utf-8")
    workflow = yaml.safe_load(text)
    assert {"name", "jobs", "permissions"} <= set(workflow)
    assert True in workflow or "on" in workflow  # YAML reads a bare `on` as true
    steps = [s for job in workflow["jobs"].values() for s in job["steps"]]
    commands = [s["run"] for s in steps if "run" in s]
    targets = set(re.findall(r"^([a-z]+):", MAKEFILE, re.M))
    assert commands
    for command in commands:
        settings = r"( [A-Z]+=\S+)*"
        called = re.fullmatch(rf"(?:make ([a-z]+)|\.ci/run){settings}", command.strip())
        assert called, f"{command!r} goes around the Makefile"
        assert called[1] is None or called[1] in targets
        assert called[1] not in ("book", "test"), f"{command!r} may skip"
    assert all(s.get("uses", "@v").rpartition("@")[2] for s in steps)


def test_there_are_four_workflows():
    assert {path.stem for path in WORKFLOWS} == {"test", "publish", "weekly", "release"}


def test_a_version_tag_is_built_and_published():
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8")
    workflow = yaml.safe_load(text)
    assert workflow[True] == {"push": {"tags": ["v*"]}, "workflow_dispatch": None}
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert "make dist TAG=$GITHUB_REF_NAME" in [s.get("run") for s in build["steps"]]
    assert publish["permissions"] == {"id-token": "write"} and "secrets." not in text
    assert publish["needs"] == "build" and publish["environment"]["name"] == "pypi"
    assert publish["steps"][-1]["uses"].startswith("pypa/gh-action-pypi-publish@")


def test_a_new_version_is_tagged_once(tmp_path):
    """`make tag`, which the workflow publish runs before the book goes online."""
    publish = yaml.safe_load((WORKFLOWS[0].parent / "publish.yml").read_text("utf-8"))
    assert publish["jobs"]["tag"]["steps"][-1]["run"] == "make tag"
    assert set(publish["jobs"]["deploy"]["needs"]) == {"build", "tag"}
    here, there = tmp_path / "here", tmp_path / "there"
    for name in ("Makefile", "book/_tools/release.py", "book/_tools/chapters.py"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, here / name)
    version = here / "transformer_lib" / "__init__.py"
    version.parent.mkdir()

    def git(*words, at=here):
        who = "-c", "user.name=A", "-c", "user.email=a@example.org"
        done = subprocess.run(
            ["git", *who, *words], cwd=at, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    git("init", "--bare", str(there), at=tmp_path)
    git("init")
    git("remote", "add", "origin", str(there))
    commits = {}
    for n, name in enumerate(("1.0.0", "1.0.0", "1.1.0")):
        version.write_text(f'__version__ = "{name}"\n', "utf-8")
        git("add", ".")
        git("commit", "--allow-empty", "-m", str(n))
        commits.setdefault(f"v{name}", git("rev-parse", "HEAD"))
        subprocess.run(
            ["make", "tag"], cwd=here, check=True, capture_output=True, text=True
        )
    tags = git("for-each-ref", "--format=%(refname:short) %(objectname)", at=there)
    assert dict(line.split() for line in tags.splitlines()) == commits


def test_what_a_commit_is_held_against_is_there():
    text = (ROOT / ".pre-commit-config.yaml").read_text("utf-8")
    hooks = [h for repo in yaml.safe_load(text)["repos"] for h in repo["hooks"]]
    assert {h["id"] for h in hooks} >= {"ruff", "ruff-format", "notebooks-clean"}
    for hook in hooks:
        first, second, *_ = hook["entry"].split()
        if first == "make":
            assert re.search(rf"^{second}:", MAKEFILE, re.M), second
        else:
            tool = first.removeprefix(".venv/bin/")
            assert first != tool and tool in locked(), first


def test_what_is_listed_as_slow_is_there():
    lines = (ROOT / "tests" / "slow.txt").read_text("utf-8").splitlines()[1:]
    assert lines == sorted(set(lines))
    for line in lines:
        name, _, test = line.partition("::")
        text = (ROOT / "tests" / name).read_text("utf-8")
        assert not test or re.search(rf"^def {test}\(", text, re.M), line


def test_make_check_leaves_out_what_is_slow_alone():
    (rule,) = re.findall(r"^check:.*\n((?:\t.*\n)+)", MAKEFILE, re.M)
    assert '-m "not slow and not pages"' in rule
    assert re.search(r"^check: env check-sync lint ", MAKEFILE, re.M)
    (full,) = re.findall(r"^test:.*\n((?:[\t#].*\n)+)", MAKEFILE, re.M)
    assert "slow" not in full.replace("\\\n", "")


def test_continuous_integration_calls_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text("utf-8")
    assert "set -euo pipefail" in text and '  make test "$@"\n' in text
    assert "\nexport LITERATE_BROWSER=needed\n" in text


def test_help_names_every_command():
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in "book test serve export edit clean help".split():
        assert re.search(rf"make {command}\s+\S", done.stdout), command


def test_licenses_are_both_there():
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert "Apache License" in text and "TERMS AND CONDITIONS" in text
    assert "https://creativecommons.org/licenses/by/4.0/" in text


def test_citation():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["repository-code"] == PROJECT["urls"]["Repository"]
