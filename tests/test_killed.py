"""Chapter 13: killed at any change of the disk, and what the next command finds."""

import os
import sys
from contextlib import contextmanager

import small_runs
import torch
from small_runs import tiny

from transformer_lib import trainer
from transformer_lib.runs import Run

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
