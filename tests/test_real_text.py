"""Tests without real text, and with it: nothing is skipped in both, or in silence."""

import os
import shutil
import subprocess
import sys

import pytest
from built import ROOT
from fetched import archive

SAMPLE = """\
import os
import pytest
from transformer_lib.corpora import load_corpus
from transformer_lib.corpora import CorpusUnavailable

@pytest.mark.corpora
def test_needs_text():
    assert load_corpus("tatoeba-en-de").name == "tatoeba-en-de"

@pytest.fixture(scope="module")
def text():
    return load_corpus("tatoeba-en-de")

@pytest.mark.corpora
def test_has_a_fixture_that_needs_text(text):
    assert text

def test_sees_none():
    assert not os.environ["TRANSFORMER_LIB_MIRROR"]
    assert not os.path.exists(os.environ["TRANSFORMER_LIB_CACHE"])
"""
IN_SILENCE = """
def test_asks_in_silence():
    try:
        load_corpus("tatoeba-en-de")
    except CorpusUnavailable:
        pass
"""


def run(tmp_path, mirror="", needed="", sample=SAMPLE, *words):
    """What pytest says of the sample, and its status, where corpora are in a mirror."""
    (tmp_path / "test_sample.py").write_text(sample)
    env = {k: v for k, v in os.environ.items() if not k.startswith("LITERATE")}
    env |= {
        "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}",
        "LITERATE_CORPORA": needed,
        "TRANSFORMER_LIB_MIRROR": str(mirror),
        "TRANSFORMER_LIB_CACHE": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-c",
            ROOT / "pyproject.toml",
            "-p",
            "conftest",
            "-W",
            "ignore",
            *words,
            tmp_path / "test_sample.py",
        ],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr, done.returncode


@pytest.fixture
def mirror(tmp_path):
    folder = tmp_path / "mirror"
    folder.mkdir()
    lines = (f"A{i}.\tB{i}.\n" for i in range(4000))
    (folder / "deu-eng.zip").write_bytes(archive("".join(lines)))
    return folder


@pytest.mark.parametrize(("needed", "status"), [("", 0), ("needed", 1)])
def test_without_text_it_is_said_and_fails_where_it_is_needed(tmp_path, needed, status):
    said, code = run(tmp_path, needed=needed)
    assert code == status and "1 passed, 2 skipped" in said, said
    assert "2 TEST(S) DID NOT RUN for want of real text" in said
    assert "no real text: deu-eng.zip is not in the cache" in said


@pytest.mark.parametrize("workers", [["-p", "no:xdist"], ["-n", "1"]])
def test_with_a_mirror_none_is_skipped(tmp_path, mirror, workers):
    said, code = run(tmp_path, mirror, "needed", SAMPLE, *workers)
    assert code == 0 and "3 passed" in said and "DID NOT RUN" not in said, said


def test_who_asks_for_text_and_is_not_marked_fails(tmp_path, mirror):
    """With and without a mirror: it would do something else where there is text."""
    for where in ("", mirror):
        said, code = run(tmp_path, where, "", SAMPLE + IN_SILENCE, "-k", "silence")
        assert code == 1 and "mark it `corpora`" in said, said


# --- .ci/run -------------------------------------------------------------------------

# In the place of make: says how it was called, and what it would have found.
TELLS = """\
#!/bin/sh
echo "mirror=$TRANSFORMER_LIB_MIRROR cache=$(ls -A "$TRANSFORMER_LIB_CACHE" | wc -l)" \\
  "browser=$LITERATE_BROWSER corpora=$LITERATE_CORPORA proxy=$https_proxy: $*"
"""


@pytest.mark.parametrize("beside", [True, False])
def test_continuous_integration_has_no_corpora_and_then_all(tmp_path, beside):
    for folder in ("bin", "project/.ci", "full"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", tmp_path / "project/.ci")
    (tmp_path / "bin/make").write_text(TELLS)
    (tmp_path / "bin/make").chmod(0o755)
    (tmp_path / "full/deu-eng.zip").write_text("")
    if beside:
        (tmp_path / "shared/data").mkdir(parents=True)
    env = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "TRANSFORMER_LIB_CACHE": str(tmp_path / "full"),
    }
    done = subprocess.run(
        [tmp_path / "project/.ci/run", "LOCK=none"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    _, _, bare, words, full = done.stdout.splitlines()
    assert bare == (
        "mirror= cache=0 browser=needed corpora= "
        "proxy=http://127.0.0.1:9: test LOCK=none"
    )
    where, needed = (tmp_path / "shared/data", "needed") if beside else ("", "")
    assert full == (
        f"mirror={where} cache=1 browser=needed corpora={needed} proxy=: "
        'test TESTS=-m "corpora or pages" LOCK=none'
    )
    assert ("../shared/data is not there" in words) != beside


def test_only_continuous_integration_looks_beside_the_project():
    """So that a fresh clone is the same everywhere: no default names a mirror."""
    assert "shared/data" not in (ROOT / "Makefile").read_text("utf-8")


def test_no_test_looks_for_the_mirror_itself():
    """What it sees, `corpora` decides: else a test could be skipped everywhere."""
    for path in (ROOT / "tests").glob("*.py"):
        text = path.read_text("utf-8")
        if path.stem not in ("real_text", "test_real_text"):
            assert 'environ.get("TRANSFORMER_LIB_MIRROR' not in text, path.name
