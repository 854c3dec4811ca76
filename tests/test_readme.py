"""The README's example runs, and what it points to is there."""

import doctest
import json
import re
import socket
from importlib import metadata
from pathlib import Path

from test_how_do_i import run_lines

import transformer_lib
from transformer_lib.corpora import grammar_split

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")


def test_the_python_examples_run(capsys):
    code, translate = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 6
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    assert tuple(names["logits"].shape) == (2, 5, 37000)
    exec(compile(translate, "README.md", "exec"), names)
    assert capsys.readouterr().out == "Wo ist der Bahnhof?\n"


def test_the_examples_of_the_library_page_run(tmp_path, monkeypatch):
    """One after the other, in one place, as a reader would type them."""
    page = (ROOT / "book" / "api.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) >= 8
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRANSFORMER_LIB_DEVICE", "cpu")
    names = {}
    for code in blocks:
        exec(compile(code, "book/api.md", "exec"), names)
    for name in set(transformer_lib.__all__) - {"__version__"}:
        assert f"`{name}`" in page and name in names, f"{name} is not on the page"


def test_the_page_on_pytorch_prints_what_comes_out():
    page = str(ROOT / "book" / "pytorch.md")
    failed, tried = doctest.testfile(page, module_relative=False)
    assert tried > 25 and not failed


def test_the_four_commands_work_as_they_are_typed(tmp_path, monkeypatch, capsys):
    """The README's commands, word for word, but for a smaller and shorter training."""
    part = README.split("## Four commands")[1]
    block = re.search(r"```sh\n(.*?)```", part, flags=re.DOTALL).group(1)
    monkeypatch.chdir(tmp_path)
    for split, size in (("train", 600), ("test", 5), ("new", 5)):
        pairs = grammar_split("test" if split == "new" else split, size)
        for side, ending in enumerate(("en", "de")):
            text = "".join(pair[side] + "\n" for pair in pairs)
            Path(f"{split}.{ending}").write_text(text, encoding="utf-8")
    Path("new.de").unlink()
    less = " --set max_steps=2 --set validate_every=1 --device cpu"
    less += " --set model.d_model=32 --set model.d_ff=64 --set model.num_layers=1"
    less = {"train": less, "prepare": " --vocab-size 400"}
    run_lines(line + less.get(line.split()[1], "") for line in block.splitlines())
    assert Path("new.de").read_text("utf-8").count("\n") == 5
    into_the_world(README.split("## Out into the world")[1], capsys)


def test_the_four_lines_of_fine_tuning_work_as_they_are_typed(
    tmp_path, monkeypatch, capsys
):
    """Word for word, but for a shorter training; the model that ships gets better."""
    part = README.split("## Four commands")[1]
    block = re.findall(r"```sh\n(.*?)```", part, flags=re.DOTALL)[1]
    monkeypatch.chdir(tmp_path)
    for split, name, size in (("train", "mine", 400), ("test", "test", 5)):
        for side, ending in enumerate(("en", "de")):
            text = "".join(pair[side] + "\n" for pair in grammar_split(split, size))
            Path(f"{name}.{ending}").write_text(text, encoding="utf-8")
    lines = block.splitlines()
    assert len(lines) == 4 and "--corpus tatoeba-en-de" in lines.pop()
    less = " --set max_steps=2 --set validate_every=2 --set warmup=2 --device cpu"
    less = {"train": less + " --set max_tokens=300"}
    run_lines(line + less.get(line.split()[1], "") for line in lines)
    assert "BLEU" in capsys.readouterr().out
    recipe = json.loads(Path("runs/tuned/recipe.json").read_text("utf-8"))
    assert recipe["start_from"] == "tatoeba-en-de" and recipe["name"] == "fine-tune"


def into_the_world(part, capsys):
    """The run that was just made, exported, served and asked, by the README's lines."""
    install, *lines = re.search(r"```sh\n(.*?)```", part, re.DOTALL)[1].splitlines()
    extra = re.search(r"transformer-lib\[(\w+)\]", install)[1]
    assert extra in metadata.metadata("transformer-lib").get_all("Provides-Extra")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    run_lines(line.replace("8000", port) for line in lines)
    out = capsys.readouterr().out
    said = json.loads(out.splitlines()[-1])
    said.pop("notes", None)  # so small a model may never end
    assert list(said) == ["translatedText"] and said["translatedText"]
    kinds = {"onnx", "marian", "ctranslate2", "ctranslate2-int8", "onnx-int8"}
    assert {path.name for path in Path("exported").iterdir()} == kinds
    for kind in kinds:
        assert f"exported/{kind}: within" in out


def test_linked_files_exist():
    links = re.findall(r"\]\((?!https?:|#)([^)]+)\)", README)
    assert links
    missing = [link for link in links if not (ROOT / link).exists()]
    assert not missing, f"README.md links to {missing}"


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in re.findall(r"(?m)(?:`|^)make ([a-z]+)", README):
        assert re.search(rf"(?m)^{target}:", makefile), f"no target {target}"


def test_api_pages_cover_every_door():
    library = ROOT / "transformer_lib"
    doors = {p.parent.name for p in library.glob("*/__init__.pyi")}
    modules = doors | {p.stem for p in library.glob("[a-z]*.py")}
    pages = {p.stem for p in (ROOT / "book" / "api").glob("*.md")}
    toc = (ROOT / "_toc.yml").read_text("utf-8")
    assert modules == pages, "book/api/ needs one page per door of the library"
    assert all(f"book/api/{page}\n" in toc for page in pages)


def test_bibliography_has_each_key_once():
    bib = (ROOT / "book" / "references.bib").read_text("utf-8")
    keys = re.findall(r"(?m)^@\w+\{([^,]+),", bib)
    assert len(keys) == len(set(keys)) > 30


def test_every_citation_is_in_the_bibliography():
    bib = (ROOT / "book" / "references.bib").read_text("utf-8")
    entries = re.findall(r"(?ms)^@\w+\{.*?^\}", bib)
    known = set()
    for entry in entries:
        first = re.search(r"author\s*=\s*\{+\s*([^,{}]+)", entry).group(1)
        first = re.split("[ -]", first)[0]
        known.add((first, re.search(r"year\s*=\s*\{(\d+)", entry).group(1)))
    missing = []
    for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
        cells = json.loads(path.read_text("utf-8"))["cells"]
        texts = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
        for label in re.findall(
            r"\[([^\]]*)\]\(\.\./book/references\.md\)", "\n".join(texts)
        ):
            cited = re.match(r"([^\W\d]+)[^\d]*?\b((?:19|20)\d\d)\b", label)
            if cited and cited.groups() not in known:
                missing.append(f"{path.name}: {label}")
    assert not missing, f"not in book/references.bib: {missing}"
