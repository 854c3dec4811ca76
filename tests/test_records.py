"""Chapter 13: files with the right checksum and something else inside."""

import json
import math
import shutil

import pytest
import small_runs
import torch
from small_runs import RUN_FILES, tiny

from transformer_lib.command_line import main
from transformer_lib.runs import (
    Run,
    average_checkpoints,
    checkpoints,
    load_pretrained,
    trainer,
)
from transformer_lib.runs.checkpoints import load_tensors, save_tensors
from transformer_lib.storage import DamagedFile, write_json, write_manifest

data_dir = small_runs.data_dir
STEPS = [f"step-{n:06d}.safetensors" for n in (2, 4, 6)]


@pytest.fixture(scope="module")
def made(data_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    run = trainer.train(tiny(), folder / "run", data_dir, show=False)
    run.save_pretrained(folder / "model")
    return folder


@pytest.fixture
def run_dir(made, tmp_path):
    shutil.copytree(made / "run", tmp_path / "run")
    return tmp_path / "run"


def go_on(run_dir, data_dir):
    return trainer.train(tiny(max_steps=8), run_dir, data_dir, show=False)


def row(**changes):
    return {"step": 6, "valid_loss": 2.0} | changes


RECORDS = [
    [],
    3,
    "x",
    None,
    {},
    {"cake": 1},
    {"step": "x"},
    {"step": -1},
    {"step": 1.5},
    {"step": True},
    {"step": 10**30},
    {"seconds": math.nan},
    {"seconds": math.inf},
    {"seconds": None},
    {"scale": "x"},
    {"optimizer": 3},
    {"optimizer": "Lion"},
    {"history": None},
    {"history": []},
    {"history": {}},
    {"history": [3]},
    {"history": [{}]},
    {"history": [{"step": 6}]},
    {"history": [row(step="6")]},
    {"history": [row(valid_loss="x")]},
    {"history": [row(valid_loss=None)]},
    {"history": [row(), row(step=2)]},
    {"kept": 3},
    {"kept": ["x"]},
    {"kept": [-1]},
]


@pytest.mark.parametrize("record", RECORDS, ids=str)
def test_a_record_of_another_shape_is_refused(run_dir, data_dir, record, capsys):
    """In both checkpoints: a sentence by each reader, and whole weights still load."""
    for name in "last", "last.previous":
        path = run_dir / f"{name}.safetensors"
        tensors, usual = load_tensors(path)
        odd = usual | record if record and isinstance(record, dict) else record
        save_tensors(path, tensors, odd)
    with pytest.raises(ValueError, match="last.safetensors"):
        go_on(run_dir, data_dir)
    assert Run.load(run_dir, "cpu").record["step"] == 6
    assert main(["average", str(run_dir)]) in (0, 2)
    try:
        Run.load(run_dir, "cpu", weights="last")
    except DamagedFile as error:
        assert "last.safetensors" in str(error)


def test_the_checkpoint_before_an_odd_one_is_taken(run_dir, data_dir):
    path = run_dir / "last.safetensors"
    tensors, record = load_tensors(path)
    save_tensors(path, tensors, record | {"history": [{"cake": 1}]})
    with pytest.warns(UserWarning, match="last.safetensors is damaged.*history="):
        assert go_on(run_dir, data_dir).progress.step == 8


def without(name):
    return lambda tensors: [tensors.pop(key) for key in [*tensors] if name in key]


def changed(name, change):
    def change_all(tensors):
        tensors |= {k: change(t) for k, t in tensors.items() if name in k}

    return change_all


TENSORS = {
    "no rng": without("rng"),
    "rng of numbers": changed("rng", torch.Tensor.float),
    "a short rng": changed("rng", lambda t: t[:9]),
    "no weights": without("model."),
    "no rng of torch": changed("rng", lambda t: t * 0 + 255),
    "a weight less": without("w_1.bias"),
    "no moments": without("exp_avg_sq"),
    "weights of integers": changed("model.", torch.Tensor.int),
    "moments of integers": changed("exp_avg", torch.Tensor.int),
    "weights of another shape": changed("model.", lambda t: t[..., :2]),
    "moments of another shape": changed("exp_avg", lambda t: t[..., :2]),
    "steps of another shape": changed("adam.step", lambda t: t.expand(3).clone()),
    "weights of bool": changed("model.", torch.Tensor.bool),
    "weights that are NaN": changed("model.", lambda t: t * math.nan),
}


@pytest.mark.parametrize("harm", TENSORS)
def test_tensors_of_another_kind_are_refused(run_dir, data_dir, harm):
    for name in "last", "last.previous":
        path = run_dir / f"{name}.safetensors"
        tensors, record = load_tensors(path)
        TENSORS[harm](tensors)
        save_tensors(path, tensors, record)
    with pytest.raises(ValueError, match=r"\w+ \w+ \w+"):
        go_on(run_dir, data_dir)


def test_weights_of_integers_are_neither_loaded_nor_averaged(made, run_dir, tmp_path):
    for path in run_dir.glob("*.safetensors"):
        tensors, record = load_tensors(path)
        whole = {
            n: t.int()
            if n.startswith("model")
            or "step-" in path.name
            or path.name == "best.safetensors"
            else t
            for n, t in tensors.items()
        }
        save_tensors(path, whole, record)
    said = "no weights of a model: .* is of torch.int32"
    for weights in "best", "last", "average":
        with pytest.raises(ValueError, match=said):
            Run.load(run_dir, "cpu", weights=weights)
    with pytest.raises(ValueError, match=f"step-000002.*{said}"):
        average_checkpoints(run_dir)
    shutil.copytree(made / "model", tmp_path / "model")
    path = tmp_path / "model" / "weights.safetensors"
    tensors, record = load_tensors(path)
    save_tensors(path, {n: t.long() for n, t in tensors.items()}, record)
    write_manifest(tmp_path / "model")
    with pytest.raises(ValueError, match="no weights of a model"):
        load_pretrained(tmp_path / "model", "cpu")


ABOUT = [
    [],
    3,
    "x",
    None,
    {},
    {"data": {}},
    {"data": [], "environment": {}},
    {"data": {}, "environment": {}},
    {"data": {"sha256": 3}, "environment": {}},
    {"data": {"train_sha256": None, "valid_sha256": []}, "environment": 1},
    {"data": {"train_sha256": None, "valid_sha256": []}, "environment": {}},
]


@pytest.mark.parametrize("about", ABOUT, ids=str)
def test_about_of_another_shape_is_refused(run_dir, data_dir, about):
    write_json(run_dir / "about.json", about)
    write_manifest(run_dir, RUN_FILES)
    with pytest.raises(ValueError, match="about.json|holds other training"):
        go_on(run_dir, data_dir)


MANIFESTS = [
    [],
    3,
    {},
    {"files": 3},
    {"files": []},
    {"files": {"recipe.json": 3}},
    {"files": {"recipe.json": {"size": "x", "sha256": 3}}},
    {"files": {"\0": {"size": 1}}},
    {"files": {"recipe.json": {}}},
]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=str)
def test_manifest_of_another_shape_is_refused(run_dir, data_dir, manifest):
    (run_dir / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedFile, match=str(run_dir)):
        go_on(run_dir, data_dir)
    with pytest.raises(DamagedFile, match=str(run_dir)):
        Run.load(run_dir, "cpu")


@pytest.mark.parametrize("lost", STEPS)
def test_a_file_of_weights_that_is_missing_is_missed(run_dir, lost, tmp_path, capsys):
    """Also by the command, until fewer are asked for; a copy without it is not."""
    (run_dir / lost).unlink()
    for ask in (
        lambda: average_checkpoints(run_dir),
        lambda: Run.load(run_dir, "cpu", weights="average"),
    ):
        with pytest.raises(ValueError, match=f"{lost} is missing. Copy all.*--last"):
            ask()
    assert main(["average", str(run_dir), "--out", str(tmp_path / "a")]) == 2
    assert f"{lost} is missing" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
    ask = ["average", str(run_dir), "--last", "1", "--out", str(tmp_path / "b")]
    assert main(ask) == (2 if lost == max(STEPS) else 0)


def test_steps_alone_can_be_averaged(run_dir):
    """Copied without the run's checkpoint: those that are there."""
    for name in "last", "last.previous":
        (run_dir / f"{name}.safetensors").unlink()
    (run_dir / min(STEPS)).unlink()
    assert len(checkpoints.checkpoint_files(run_dir)) == 2
