"""Chapters are numbered as _toc.yml orders them, and every mention follows."""

import json
import subprocess

import pytest
import renumber

NAMES = {
    "08_text": "08_text",
    "09_speed": "11_speed",
    "10_late": "09_late",
    "11_last": "10_last",
}


@pytest.mark.parametrize(
    "before, after",
    [
        ("see [chapter 09](09_speed.ipynb#a)", "see [chapter 11](11_speed.ipynb#a)"),
        ("chapters 08, 09 and 10", "chapters 08, 11 and 09"),
        ("Chapters 08 to 11 of\nchapter\n10", "Chapters 08 to 10 of\nchapter\n09"),
        ("# as chapter\n    # 10 says", "# as chapter\n    # 09 says"),
        (":only: 08 09 10 11", ":only: 08 11 09 10"),
        ("```{questions} 09 10", "```{questions} 11 09"),
        ("Exercise 9.3 and Figure 10.2", "Exercise 11.3 and Figure 9.2"),
        ("09_speed.ipynb#exercise-93-fast", "11_speed.ipynb#exercise-113-fast"),
        ("[09](../notebooks/09_speed.ipynb)", "[11](../notebooks/11_speed.ipynb)"),
        ('run("10_late"), 11_last.html', 'run("09_late"), 10_last.html'),
        ('make colab CHAPTERS="11 09"', 'make colab CHAPTERS="10 11"'),
        ('    "9.2": {"a", "9.2"},', '    "11.2": {"a", "9.2"},'),
        # not chapters
        ("10 minutes, 09:30, 11 of 20, section 10.2", None),
        ("Figures 3 to 5, Equation 1, 2009_speed", None),
        ("chapter 99, x = 11_000", None),
    ],
)
def test_mentions_follow(before, after):
    assert renumber.changed(before, NAMES) == (before if after is None else after)


def test_there_and_back_is_the_same():
    text = "chapters 08 to 11, [10](10_late.ipynb), Exercise 11.2, 09_speed"
    there = renumber.changed(text, NAMES)
    assert there != text
    assert renumber.changed(there, {new: old for old, new in NAMES.items()}) == text


def test_a_chapter_is_moved_to_the_front(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(renumber, "ROOT", tmp_path)
    (tmp_path / "notebooks").mkdir()

    def notebook(name, *cells):
        made = [
            {"cell_type": "markdown", "id": f"c{i}", "metadata": {}, "source": [c]}
            for i, c in enumerate(cells)
        ]
        text = json.dumps({"cells": made, "metadata": {}, "nbformat": 4})
        (tmp_path / "notebooks" / f"{name}.ipynb").write_text(text)

    notebook("00_why", "chapter 02 measures it", "chapter 01")
    notebook("01_hello", "Exercise 1.1")
    notebook("02_fast", "before: [chapter 01](01_hello.ipynb)")
    (tmp_path / "page.md").write_text("[02](notebooks/02_fast.html)\n")
    order = ["02_fast", "00_why", "01_hello"]
    lines = [f"      - file: notebooks/{name}\n" for name in order]
    (tmp_path / "_toc.yml").write_text("".join(lines))
    for command in ("init", "add ."):
        subprocess.run(
            ["git", *command.split()], cwd=tmp_path, check=True, capture_output=True
        )
    monkeypatch.setattr("sys.argv", ["renumber.py"])
    renumber.main()
    assert "02_fast              -> 00_fast" in capsys.readouterr().out
    assert (tmp_path / "notebooks/02_fast.ipynb").exists()  # it only says so
    monkeypatch.setattr("sys.argv", ["renumber.py", "--write"])
    renumber.main()
    found = sorted(path.name for path in (tmp_path / "notebooks").iterdir())
    assert found == ["00_fast.ipynb", "01_why.ipynb", "02_hello.ipynb"]
    said = {
        path.stem: [c["source"][0] for c in json.loads(path.read_text())["cells"]]
        for path in (tmp_path / "notebooks").iterdir()
    }
    assert said["01_why"] == ["chapter 00 measures it", "chapter 02"]
    assert said["02_hello"] == ["Exercise 2.1"]
    assert said["00_fast"] == ["before: [chapter 02](02_hello.ipynb)"]
    assert (tmp_path / "page.md").read_text() == "[00](notebooks/00_fast.html)\n"
    renumber.main()
    assert "The numbers are those of _toc.yml." in capsys.readouterr().out


def test_a_chapter_that_the_contents_lack_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(renumber, "ROOT", tmp_path)
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "00_why.ipynb").write_text("{}")
    (tmp_path / "_toc.yml").write_text("      - file: notebooks/01_hello\n")
    monkeypatch.setattr("sys.argv", ["renumber.py"])
    with pytest.raises(SystemExit, match="00_why.*01_hello"):
        renumber.main()
