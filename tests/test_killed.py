"""Chapter 13: killed at any change of the disk, and what the next command finds."""

import os
import shutil
import sys
from contextlib import contextmanager

import pytest
import small_runs
import torch
from small_runs import tiny

from transformer_lib.command_line import main
from transformer_lib.runs import Run, load_pretrained, trainer
from transformer_lib.storage import whole_folder

data_dir = small_runs.data_dir

CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod"}
DISK = {"left": None, "below": None}


class Killed(BaseException):
    """The process is gone: what it still tries to do with the disk fails, too."""


def _watch(event, args):
    """Python tells of each change of the disk before it is made."""
    if DISK["left"] is None:
        return
    new = event == "open" and isinstance(args[2], int) and args[2] & os.O_CREAT
    inside = str(args[0]).startswith(DISK["below"]) if args else False
    if inside and (new or event in CHANGES):
        if DISK["left"] == 0:
            raise Killed
        DISK["left"] -= 1


sys.addaudithook(_watch)  # for good; it does nothing outside of killed_at


@contextmanager
def killed_at(number, below):
    """Let this process make so many changes below a folder, and no more."""
    DISK.update(left=number, below=str(below))
    try:
        yield
    except Killed:
        pass
    finally:
        DISK["left"] = None


def changes_of(work, below):
    """How many changes of the disk something makes below a folder."""
    most = 10**6
    with killed_at(most, below):
        work()
        return most - DISK["left"]


def names_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def same(one, two):
    both = zip(one.state_dict().values(), two.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in both)


@pytest.fixture(scope="module")
def run_dir(data_dir, tmp_path_factory):
    """A run of two updates."""
    folder = tmp_path_factory.mktemp("run") / "run"
    recipe = tiny(max_steps=2, validate_every=1)
    trainer.train(recipe, folder, data_dir, device="cpu", show=False)
    return folder


def test_train_killed_at_each_change_of_the_disk(data_dir, tmp_path):
    """The same command goes on to the same weights, and nothing is left over."""
    recipe = tiny(max_steps=2, validate_every=1, keep_last=1)

    def work(folder):
        trainer.train(recipe, folder, data_dir, device="cpu", show=False)

    count = changes_of(lambda: work(tmp_path / "whole"), tmp_path)
    assert count > 40
    wanted = Run.load(tmp_path / "whole", "cpu", weights="last").model
    for number in range(count):
        folder = tmp_path / f"{number:03d}"
        with killed_at(number, tmp_path):
            work(folder)
        work(folder)
        assert names_in(folder) == names_in(tmp_path / "whole"), number
        for weights in "last", "average":
            assert same(Run.load(folder, "cpu", weights=weights).model, wanted), number


def test_text_of_a_run_killed_at_each_change_of_the_disk(data_dir, tmp_path):
    """A run that prepares its text itself: what is left of that goes, too."""
    recipe = tiny(max_steps=1)

    def copied(folder):  # as prepare writes it
        with whole_folder(folder / "data", last="data.json") as part:
            shutil.copytree(data_dir, part, dirs_exist_ok=True)

    for number in range(changes_of(lambda: copied(tmp_path / "x"), tmp_path)):
        folder = tmp_path / f"{number:03d}"
        folder.mkdir()
        with killed_at(number, tmp_path):
            copied(folder)
        if not (folder / "data").exists():
            copied(folder)
        trainer.train(recipe, folder, device="cpu", show=False)
        assert not [name for name in names_in(folder) if ".part" in name], number


@pytest.mark.parametrize("there", ["nothing", "a folder", "a model"])
@pytest.mark.parametrize("command", ["average", "save_pretrained"])
def test_a_model_killed_at_each_change_of_the_disk(command, there, run_dir, tmp_path):
    """The same command writes it whole, and nothing is left over."""
    run = Run.load(run_dir, "cpu", weights="average")
    run.save_pretrained(tmp_path / "whole")

    def work(folder):
        if command == "average":
            assert main(["average", str(run_dir), "--out", str(folder)]) == 0
        else:
            run.save_pretrained(folder)

    def begun(folder):
        if there == "a model":
            shutil.copytree(tmp_path / "whole", folder)
        elif there == "a folder":
            folder.mkdir()
        return folder

    count = changes_of(lambda: work(begun(tmp_path / "x")), tmp_path)
    assert count > 15
    for number in range(count):
        place = tmp_path / f"{number:03d}"
        place.mkdir()
        folder = begun(place / "model")
        with killed_at(number, tmp_path):
            work(folder)
        if there == "a model":  # one or the other
            assert same(load_pretrained(folder, "cpu")[0], run.model.half().float())
        work(folder)
        whole = [f"model/{name}" for name in names_in(tmp_path / "whole")]
        assert names_in(place) == ["model", *whole], number
        assert same(load_pretrained(folder, "cpu")[0], run.model.half().float())
