"""The library is what the notebooks export: nothing else, nothing older."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_library_is_what_the_notebooks_export(tmp_path):
    spec = importlib.util.spec_from_file_location(
        "export", ROOT / "book" / "_tools" / "export.py"
    )
    export = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(export)
    wanted = export.exported(tmp_path)
    changes = export.differences(wanted, ROOT / "transformer_lib")
    assert not changes, (
        "The library is not what the notebooks export; `make export` writes it. "
        + ", ".join(f"{name}: {what}" for name, what in sorted(changes.items()))
    )
    rooms = {"hello.py", "exercises/check.py", "figures/attention.py"}
    assert rooms <= set(wanted)


def test_a_chapter_depends_on_what_its_modules_import(monkeypatch):
    """Else a chapter would keep old outputs when a module below it has changed."""
    monkeypatch.syspath_prepend(ROOT / "book" / "_tools")
    import run_notebooks

    def modules(source):
        found = run_notebooks.library_closure(source)
        return {path.relative_to(ROOT / "transformer_lib").as_posix() for path in found}

    decoder = modules("from transformer_lib.decoder import Decoder")
    assert decoder == {"decoder.py", "encoder.py", "multihead.py", "attention.py"}
    checks = modules("from transformer_lib.exercises.objective import check_schedule")
    assert {"exercises/check.py", "objective.py"} <= checks
    drawn = modules("from transformer_lib.figures.decoder import masks_figure")
    assert {"figures/decoder.py", "figures/attention.py", "decoder.py"} <= drawn


def test_the_page_names_what_a_chapter_ran_on(monkeypatch):
    """The welcome page says that it stands under each chapter's title."""
    monkeypatch.syspath_prepend(ROOT / "book" / "_tools")
    import run_notebooks

    monkeypatch.setenv("TRANSFORMER_LIB_SCALE", "small")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    said = run_notebooks.device()
    assert said.startswith("3 CPU threads") and run_notebooks.processor() in said
    monkeypatch.setattr(run_notebooks, "processor", lambda: "")
    assert run_notebooks.device() == "3 CPU threads"
