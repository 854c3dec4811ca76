"""The version, and all that names it."""

import json

import pytest
import release

import transformer_lib


def test_all_that_names_the_version_names_this_one():
    assert release.tag() == f"v{transformer_lib.__version__}"
    assert release.faults(release.tag()) == []


def test_another_tag_is_refused(monkeypatch, tmp_path):
    found = release.faults("v9.9.9")
    version = transformer_lib.__version__
    assert found == [f"transformer_lib.__version__ is {version}, the tag is v9.9.9"]
    for name in ("CHANGELOG.md", "CITATION.cff"):
        (tmp_path / name).write_text("nothing\n")
    (tmp_path / "transformer_lib").mkdir()
    (tmp_path / "transformer_lib" / "__init__.py").write_text('__version__ = "0.2.0"\n')
    monkeypatch.setattr(release, "ROOT", tmp_path)
    assert release.faults("v0.2.0") == [
        "CHANGELOG.md has no section 0.2.0",
        "CITATION.cff is not of version 0.2.0",
    ]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (f"    %pip install -q git+{release.ADDRESS}", f"{release.ADDRESS}@"),
        (f"    %pip install -q git+{release.ADDRESS}@v0.0.9", f"{release.ADDRESS}@"),
        (f'%pip install "x[y] @ git+{release.ADDRESS}@v1.10.0rc1"\n', '@"\n'),
        (f"# see git+{release.ADDRESS}", None),
    ],
)
def test_install_cells_are_given_the_tag(tmp_path, line, wanted):
    path = tmp_path / "00_x.ipynb"
    cell = {"cell_type": "code", "source": ["import x\n", line]}
    path.write_text(json.dumps({"cells": [cell]}))
    before = path.read_bytes()
    assert release.name_release([path], check=True) == ([path.name] if wanted else [])
    assert path.read_bytes() == before
    release.name_release([path])
    said = json.loads(path.read_text("utf-8"))["cells"][0]["source"][1]
    end = "" if wanted is None else wanted.replace("@", f"@{release.tag()}")
    assert said.endswith(end or line) and said.count("@v") == bool(wanted)
