"""Which tests see real text: those marked `corpora`, and no others.

The mirror, the cache and the network are hidden from every test, so that it has one
result on all machines. Those marked `corpora` see what there is. Where that is not
enough they let `CorpusUnavailable` out: they are skipped then, and counted at the end.
"""

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import pytest

UNREAD = "no real text"
# With this, such a test is a failure of the whole run (`.ci/run`).
NEEDED = os.environ.get("LITERATE_CORPORA") == "needed"

NOWHERE, HERE = "http://127.0.0.1:9", "127.0.0.1,localhost"
CACHE = Path(tempfile.gettempdir(), f"no-text-{os.getpid()}")  # made if it is asked
HIDDEN = {
    "TRANSFORMER_LIB_MIRROR": "",
    "TRANSFORMER_LIB_CACHE": str(CACHE),
    "http_proxy": NOWHERE,  # refused at once
    "https_proxy": NOWHERE,
    "no_proxy": HERE,
}
HIDDEN |= {name.upper(): value for name, value in HIDDEN.items()}
# Workers of pytest-xdist inherit what was hidden already, and what was there before.
BEFORE = "LITERATE_BEFORE"
REAL = json.loads(os.environ.get(BEFORE) or json.dumps(dict(os.environ)))
MIRROR = REAL.get("TRANSFORMER_LIB_MIRROR", "")
MIRROR = MIRROR and str(Path(MIRROR).resolve())


def hide() -> None:
    """From all that runs from now on."""
    os.environ[BEFORE] = json.dumps({name: REAL.get(name, "") for name in HIDDEN})
    os.environ.update(HIDDEN)


def is_marked(item) -> bool:
    return item.get_closest_marker("corpora") is not None


def shown(item):
    """What is hidden is there while a marked test runs, from its first fixture on."""
    if not is_marked(item):
        return contextlib.nullcontext()
    there = {name: REAL.get(name, "") for name in HIDDEN}
    return mock.patch.dict(os.environ, there | {"TRANSFORMER_LIB_MIRROR": MIRROR})


@contextlib.contextmanager
def skipped_without_text(item):
    try:
        yield
    except Exception as error:
        if type(error).__name__ != "CorpusUnavailable" or not is_marked(item):
            raise
        pytest.skip(f"{UNREAD}: {str(error).partition(' (')[0]}")


def was_asked_for() -> bool:
    """Whether an unmarked test has asked for text: then there is an empty cache."""
    asked = CACHE.is_dir() and not any(CACHE.iterdir())
    shutil.rmtree(CACHE, ignore_errors=True)
    return asked
