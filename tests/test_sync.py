"""The library is what the notebooks export: nothing else, nothing older."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def export(monkeypatch):
    """The tool that writes the library."""
    import export

    return export


def test_library_is_what_the_notebooks_export(export, tmp_path):
    wanted = export.exported(tmp_path)
    changes = export.differences(wanted, ROOT / "transformer_lib")
    assert not changes, (
        "The library is not what the notebooks export; `make export` writes it. "
        + ", ".join(f"{name}: {what}" for name, what in sorted(changes.items()))
    )
    rooms = {"hello.py", "exercises/check.py", "figures/attention.py"}
    assert rooms <= set(wanted)


def write_chapter(folder, *sources):
    """A notebook with these code cells, named c0, c1, and so on."""
    folder.mkdir(exist_ok=True)
    cells = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {}, "source": [source]}
        for i, source in enumerate(sources)
    ]
    path = folder / "98_lost.ipynb"
    path.write_text(json.dumps({"cells": cells}), encoding="utf-8")


@pytest.mark.parametrize(
    "above",
    ["# @title The tool\n", "# A comment.\n#| hide\n", "import torch\n\n"],
)
@pytest.mark.parametrize("directive", ["#| export", "#| exporti figures.lost"])
def test_a_cell_that_would_be_lost_is_refused(export, tmp_path, above, directive):
    """nbdev leaves it out of the library and says nothing."""
    notebooks = tmp_path / "notebooks"
    cell = f"{above}{directive}\ndef lost(): ..."
    write_chapter(notebooks, "#| export\ndef found(): ...", cell)
    with pytest.raises(SystemExit) as refused:
        export.exported(tmp_path / "aside", tmp_path)
    said = str(refused.value)
    assert said.startswith(f'notebooks/98_lost.ipynb, cell c1: "{directive}" stands')
    assert f'below "{above.splitlines()[0]}"' in said
    assert "first line" in said and "c0" not in said
    assert not (tmp_path / "aside").exists()


def test_directives_may_stand_above_one_another(export, tmp_path):
    """And words about a directive, inside a line, are none."""
    cells = "\n#| hide\n#| export\nx = 1", '# @title How\nprint("#| export")'
    write_chapter(tmp_path, *cells)
    export.refuse_lost_exports(tmp_path)


def test_a_chapter_depends_on_what_its_modules_import(monkeypatch):
    """Else a chapter would keep old outputs when a module below it has changed."""
    import run_notebooks

    def modules(source):
        found = run_notebooks.library_closure(source)
        return {path.relative_to(ROOT / "transformer_lib").as_posix() for path in found}

    decoder = modules("from transformer_lib.decoder import Decoder")
    assert decoder == {"decoder.py", "encoder.py", "multihead.py", "attention.py"}
    checks = modules("from transformer_lib.exercises.encoder import check_layer_norm")
    assert {"exercises/check.py", "encoder.py"} <= checks
    drawn = modules("from transformer_lib.figures.decoder import masks_figure")
    assert {"figures/decoder.py", "figures/attention.py", "decoder.py"} <= drawn


def test_a_chapter_waits_for_another_only_where_it_loads_its_run(monkeypatch):
    """Chapter 15 scores chapter 13's translator, and that at scale full alone."""
    import run_notebooks

    for scale, needs in ("small", []), ("full", ["13_runs"]):
        monkeypatch.setenv("TRANSFORMER_LIB_SCALE", scale)
        assert run_notebooks.needs_of("15_evaluation") == needs
        assert run_notebooks.needs_of("14_decoding") == []
    for name in run_notebooks.AFTER:
        text = (ROOT / "notebooks" / f"{name}.ipynb").read_text("utf-8")
        assert "of chapter 13, at scale full" in text


def test_the_page_names_what_a_chapter_ran_on(monkeypatch):
    """The contents say that it is under each chapter's title."""
    import run_notebooks

    monkeypatch.setenv("TRANSFORMER_LIB_SCALE", "small")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    said = run_notebooks.device()
    assert said.startswith("3 CPU threads") and run_notebooks.processor() in said
    monkeypatch.setattr(run_notebooks, "processor", lambda: "")
    assert run_notebooks.device() == "3 CPU threads"
