"""Which browser is used, how one is had, and what is said where there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import browser as module
import pytest
from built import ROOT

WEB = ROOT / "book" / "_web"
# One test that wants a browser, in a run that has none.
WITHOUT = """\
import sys
sys.path.append("book/_tools")
import browser
browser.find = lambda: None
import pytest
sys.exit(pytest.main(["tests/test_browser.py", "-k", "are_pictured", "-q"]))
"""


def program(path, words):
    """An executable that prints something."""
    path.write_text(f"#!/bin/sh\n{words}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def sources(monkeypatch):
    """The three places a browser comes from: none has one, none can get one."""
    there = dict.fromkeys(("installed", "from_npm", "from_playwright"))
    for name in there:
        monkeypatch.setattr(module, name, lambda name=name: there[name])
    monkeypatch.setattr(module, "run", lambda command: False)
    return there


def test_what_is_there_is_taken_before_npm_before_playwright(sources):
    assert module.find() is None
    for name in ("from_playwright", "from_npm", "installed"):
        sources[name] = module.Browser(name, name)
        assert module.find().path == name


def test_npm_is_asked_before_playwright(sources, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "WEB", tmp_path / "web")
    monkeypatch.setattr(module, "PACKAGE", tmp_path / "web" / "nothing")
    monkeypatch.setattr(module.shutil, "which", lambda name: name)
    asked = []
    monkeypatch.setattr(module, "run", lambda command: asked.append(command))
    assert module.fetch() is None
    assert [command[:2] for command in asked] == [
        ["npm", "ci"],
        [sys.executable, "-m"],
    ]
    assert "playwright" in asked[1] and "chromium" in asked[1]
    lock = json.loads((tmp_path / "web" / "package-lock.json").read_text("utf-8"))
    assert "node_modules/@sparticuz/chromium" in lock["packages"]


def test_a_program_that_only_tells_how_to_install_one_is_no_browser(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    program(tmp_path / "chromium-browser", "echo snap install chromium; exit 1")
    assert module.installed() is None
    path = program(tmp_path / "google-chrome", "echo Google Chrome 140.0")
    assert module.installed() == module.Browser(path, "of this machine")


def test_nowhere_a_browser_is_an_error_with_advice(sources, monkeypatch):
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="Install Chromium or Chrome"):
        module.main()


def test_a_command_that_fails_is_told_in_its_last_words(capsys):
    bad = [sys.executable, "-c", "print('no such place'); raise SystemExit(3)"]
    assert not module.run(bad)
    assert "no such place" in capsys.readouterr().err
    assert not module.run(["/no/such/program"])
    assert module.run([sys.executable, "-c", ""])


@pytest.mark.parametrize(("needed", "status"), [("", 0), ("needed", 1)])
def test_a_run_without_a_browser_says_so_and_fails_where_one_is_needed(needed, status):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "LITERATE_BROWSER": needed},
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()
    assert any(
        line.startswith("1 TEST(S) DID NOT RUN") and "browser.py" in line
        for line in last[-3:]
    ), done.stdout


def test_the_lock_names_no_place():
    lock = (WEB / "package-lock.json").read_text("utf-8")
    assert "resolved" not in lock and "http" not in lock
    wanted = json.loads((WEB / "package.json").read_text("utf-8"))
    packages = json.loads(lock)["packages"]
    wanted = {**wanted["dependencies"], **wanted["devDependencies"]}
    for name, version in wanted.items():
        assert packages[f"node_modules/{name}"]["version"] == version
        assert packages[f"node_modules/{name}"]["integrity"].startswith("sha512-")


def test_only_one_place_knows_browsers_by_name():
    own = {Path(module.__file__), Path(__file__)}
    for folder in ("tests", "benchmarks", "book/_tools", "experiments"):
        for path in set((ROOT / folder).glob("*.py")) - own:
            text = path.read_text("utf-8")
            assert "google-chrome" not in text and "executable_path" not in text, path


def test_pages_are_pictured(found_browser, monkeypatch, tmp_path):
    import look

    html = tmp_path / "html" / "book"
    html.mkdir(parents=True)
    (html / "tall.html").write_text(
        "<!DOCTYPE html><body style='margin:0'><p id=end style='position:absolute;"
        " top:5000px; height:2000px; width:100%'>x"
    )
    monkeypatch.setattr(look, "HTML", tmp_path / "html")
    out = tmp_path / "out"
    made = look.look(["book/tall", "book/tall#end"], [360], ["dark"], out)
    names = ["tall-360-dark-1.png", "tall-360-dark-2.png", "tall-end-360-dark.png"]
    assert [path.name for path in made] == names
    sizes = [image_size(path) for path in made]
    assert sizes == [(360, 4000), (360, 3016), (360, 900)]
    with pytest.raises(SystemExit, match="no page 'book/none'"):
        look.look(["book/none"], [360], ["dark"], out)
    # What grows with the window is not made as tall as the page.
    (html / "grows.html").write_text(
        "<!DOCTYPE html><body style='margin:0'><p style='margin:0; height:250vh'>x"
    )
    made = look.look(["book/grows"], [360], ["light"], out)
    names = [f"grows-360-light-{i}.png" for i in (1, 2, 3)]
    assert [path.name for path in made] == names
    assert {image_size(path) for path in made} == {(360, 900)}


def image_size(path):
    """Width and height of a PNG, from its head."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    return tuple(int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
