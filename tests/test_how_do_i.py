"""Every line of "How do I ...?" runs, on small files and with shorter trainings."""

import contextlib
import itertools
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import yaml

import transformer_lib
from transformer_lib.command_line import main
from transformer_lib.corpora import grammar_split

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "book" / "how_do_i.md").read_text("utf-8")
ANSWERS = {
    text.split("\n")[0]: re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL)
    for text in PAGE.split("\n## ")[1:]
}
FIRST = "Train on my own files"
OURS = re.compile(r"transformer-lib ([^<>|&]+)(?:< (\S+) > (\S+))?")
TINY = {"d_model": 32, "d_ff": 64, "num_layers": 1}
LESS = {"max_steps": 2, "validate_every": 1, "warmup": 2}
SHORT = LESS | {"max_tokens": 300}  # updates of a model that cannot be made smaller
JAPANESE = [
    f"{who}は{day}{where}で{what}を{done}ました。"
    for who in ("私", "彼", "彼女", "父", "母", "友達", "先生", "子供")
    for day in ("今日", "昨日", "今朝", "昨夜")
    for where in ("東京", "学校", "図書館", "店", "駅")
    for what in ("本", "新聞", "手紙", "写真")
    for done in ("見", "買い")
]


def shorter(line: str, port: int) -> str:
    """The same command with less to do."""
    settings = (
        SHORT if "--from" in line else LESS | {f"model.{k}": TINY[k] for k in TINY}
    )
    if "transformer-lib train" in line:
        line += "".join(f" --set {k}={v}" for k, v in settings.items())
    if " prepare " in line and "--from" not in line:
        line += " --vocab-size 400"
    if "--corpus tatoeba" in line:  # real text; tests/test_command_line.py scores it
        line += " --help"
    return line.replace("8000", str(port))


def type_in(kind: str, block: str):
    """Run lines where we are."""
    if kind == "python":
        block = block.replace(
            "max_steps=20000", f"vocab_size=400, model={TINY}, **{LESS}"
        )
        exec(compile(block, "book/how_do_i.md", "exec"), {})
    elif kind == "sh":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        lines = block.replace("\\\n", "").splitlines()
        run_lines(shorter(line, port) for line in lines if not line.startswith("pip "))


def run_lines(lines):
    """Our commands in this process, which has torch; all else is typed into a shell."""
    for ours, group in itertools.groupby(lines, OURS.fullmatch):
        if not ours:
            run_in_shell("\n".join(group))
            continue
        words, source, target = ours.groups()
        with contextlib.ExitStack() as files:
            given = files.enter_context(open(source or os.devnull))
            files.enter_context(mock.patch("sys.stdin", given))
            if target:
                made = files.enter_context(open(target, "w"))
                files.enter_context(contextlib.redirect_stdout(made))
            assert main(shlex.split(words)) == 0


def run_in_shell(script):
    script = f"set -e\n{script}" + "\nkill %1" * ("&\n" in script)
    tools = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-m"],
        input=script,
        capture_output=True,
        text=True,
        timeout=1800,
        env=os.environ | tools,
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)


@pytest.fixture(scope="module")
def readers_folder(tmp_path_factory):
    """The files that the page names, and what its first lines make of them."""
    folder = tmp_path_factory.mktemp("reader")
    for split, size in (("train", 600), ("test", 4)):
        english, german = zip(*grammar_split(split, size), strict=True)
        sides = {"en": english, "de": german, "ja": JAPANESE[:size]}
        for ending, side in sides.items():
            text = "".join(f"{line}\n" for line in side)
            (folder / f"{split}.{ending}").write_text(text, "utf-8")
    for name in ("new.en", "letter.txt", "french.en"):
        shutil.copy(folder / "test.en", folder / name)
    for name in ("mono.de", "french.fr"):
        shutil.copy(folder / "test.de", folder / name)
    with pytest.MonkeyPatch.context() as here:
        here.chdir(folder)
        here.setenv("TRANSFORMER_LIB_DEVICE", "cpu")
        type_in(*ANSWERS[FIRST][0])
    assert len((folder / "new.de").read_text("utf-8").splitlines()) == 4
    return folder


@pytest.mark.parametrize("answer", [name for name in ANSWERS if name != FIRST])
def test_the_lines_work_as_they_are_typed(
    answer, readers_folder, tmp_path, monkeypatch
):
    shutil.copytree(readers_folder, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("TRANSFORMER_LIB_DEVICE", "cpu")
    if answer == "Compare two systems":
        shutil.copytree("runs/mine", "runs/tuned")
    assert ANSWERS[answer]
    for kind, block in ANSWERS[answer]:
        own = re.findall(r"(?m)^(?!import|from|\s*#)..*$", block)
        assert kind == "bibtex" or len(own) <= 8
        type_in(kind, block)


def test_tags_and_placeholders_come_out_as_they_went_in(capsys):
    type_in(*ANSWERS["Keep tags, links and placeholders"][0])
    assert "<b>Buch</b> {title}" in capsys.readouterr().out


def test_the_citation_is_that_of_the_release():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    ((_, entry),) = ANSWERS["Cite this book"]
    assert f"{{{transformer_lib.__version__}}}" in entry
    assert f"{{{cited['title']}}}" in entry and f"{{{cited['url']}}}" in entry
