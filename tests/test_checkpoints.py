"""Chapter 13: tensors on disk, bit by bit, and their averages."""

import pytest
import small_runs
import torch
from safetensors.torch import load_file
from small_runs import SMALL, VOCABULARY, tiny

from transformer_lib.runs import Progress, Run, average_checkpoints, checkpoints
from transformer_lib.transformer import Transformer, TransformerConfig

# Fixtures that more than one file uses.
data_dir = small_runs.data_dir
model = small_runs.model
train = small_runs.train


def test_shared_matrix_is_stored_once(train, tmp_path):
    train(tiny(), tmp_path)
    tensors, _ = checkpoints.load_tensors(tmp_path / "best.safetensors")
    rows = [name for name, t in tensors.items() if t.shape == (VOCABULARY, 32)]
    assert rows == ["src_embedding.weight"]


def test_weights_of_another_model_are_refused(model):
    other = Transformer(TransformerConfig(VOCABULARY, **SMALL | {"num_layers": 2}))
    with pytest.raises(ValueError, match="of another model"):
        checkpoints.load_weights(model, dict(other.named_parameters()))
    wide = Transformer(TransformerConfig(VOCABULARY + 1, **SMALL))
    with pytest.raises(ValueError, match=r"\(341, 32\).*\(340, 32\)"):
        checkpoints.load_weights(model, dict(wide.named_parameters()))


def test_only_the_last_steps_are_kept(train, tmp_path):
    train(tiny(keep_last=2), tmp_path)
    names = [path.name for path in checkpoints.step_files(tmp_path)]
    assert names == ["step-000004.safetensors", "step-000006.safetensors"]
    steps = Run.load(tmp_path, weights="average").record["averaged"]
    assert steps == [4, 6]


def test_average_of_copies_is_the_copy(train, tmp_path):
    """To the bit, for any number of copies; tied matrices stay one."""
    train(tiny(), tmp_path)
    best = Run.load(tmp_path).model
    for copies in 1, 2, 3, 5, 7:
        mean = average_checkpoints([tmp_path / "best.safetensors"] * copies)
        for name, parameter in best.named_parameters():
            assert torch.equal(mean[name], parameter), (copies, name)
    tied = Run.load(tmp_path, weights="average").model
    assert tied.output.weight is tied.src_embedding.weight
    assert tied.tgt_embedding.weight is tied.src_embedding.weight


def test_average_is_torchs_mean(train, tmp_path):
    train(tiny(), tmp_path)
    files = checkpoints.step_files(tmp_path)
    assert [checkpoints.step_of(path) for path in files] == [2, 4, 6]
    asked = (None, None, files), (2, None, files[1:]), (5, 4, files[2:])
    for last, after, chosen in asked:
        mean = average_checkpoints(tmp_path, last=last, after=after)
        parts = [checkpoints.load_tensors(path)[0] for path in chosen]
        for name, tensor in mean.items():
            wanted = torch.stack([part[name] for part in parts]).mean(dim=0)
            torch.testing.assert_close(tensor, wanted, atol=1e-7, rtol=1e-6)
    with pytest.raises(ValueError, match="no files step-.*after update 6"):
        average_checkpoints(tmp_path, after=6)


def test_average_of_halves_is_summed_wider(tmp_path):
    for i in range(4):
        checkpoints.save_tensors(
            tmp_path / f"step-{i:06d}.safetensors",
            {"w": torch.full((3,), 40000.0, dtype=torch.float16)},
            {},
        )
    mean = average_checkpoints(tmp_path)["w"]
    assert mean.dtype == torch.float16 and mean.tolist() == [40000.0] * 3


def test_checkpoints_of_two_models_are_not_averaged(tmp_path):
    for name, width in ("a", 3), ("b", 4):
        path = tmp_path / f"{name}.safetensors"
        checkpoints.save_tensors(path, {"w": torch.zeros(width)}, {})
    with pytest.raises(ValueError, match=r"different models: 'w' has shape \(3,\)"):
        average_checkpoints([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])


def test_last_checkpoint_can_be_averaged_and_loaded(train, tmp_path):
    train(tiny(), tmp_path)
    last = average_checkpoints([tmp_path / "last.safetensors"])
    step = average_checkpoints(tmp_path, last=1)
    assert all(torch.equal(last[name], tensor) for name, tensor in step.items())
    assert Run.load(tmp_path, weights="last").record["step"] == 6


DTYPES = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool".split()


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES])
def test_the_files_are_those_of_the_safetensors_library(tmp_path, dtype):
    """Read by its own reader: names, shapes, types and numbers; odd sizes between."""
    tensors = {"odd": torch.arange(5).to(torch.uint8), "a": torch.rand(3, 4) * 9}
    tensors |= {"none": torch.zeros(0, 3), "one": torch.tensor(2.5)}
    tensors = {f"{n} {dtype}": t.to(dtype) for n, t in tensors.items()} | tensors
    tensors["turned"] = torch.rand(3, 4).T
    path = tmp_path / "x.safetensors"
    checkpoints.save_tensors(path, tensors, {"step": 3, "who": "Jürgen"})
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    assert checkpoints.load_tensors(path)[1] == {"step": 3, "who": "Jürgen"}


def test_every_bit_of_a_file_of_tensors_counts(tmp_path):
    """The record, too: there a bit made update 600 into 700."""
    path = tmp_path / "x.safetensors"
    record = {"step": 600, "seconds": 1.5, "history": [{"valid_loss": 2.0}]}
    tensors = {"w": torch.arange(4.0), "rng": torch.arange(3, dtype=torch.uint8)}
    checkpoints.save_tensors(path, tensors, record)
    whole = path.read_bytes()
    for i in range(len(whole) * 8):
        harmed = bytearray(whole)
        harmed[i // 8] ^= 1 << i % 8
        path.write_bytes(harmed)
        try:
            got, said = checkpoints.load_tensors(path)
        except checkpoints.DamagedFile:
            continue
        assert said == record and got.keys() == tensors.keys(), i
        assert all(torch.equal(got[name], tensors[name]) for name in tensors), i


def test_no_pickle_is_read(tmp_path):
    path = tmp_path / "best.safetensors"
    torch.save({"w": torch.zeros(3)}, path)
    with pytest.raises(checkpoints.DamagedFile, match="best.safetensors is damaged"):
        checkpoints.load_tensors(path)


def test_the_random_state_of_a_gpu_is_that_of_the_models_own(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda d: asked.append(d) or d)
    second = torch.device("cuda:1")
    assert checkpoints.random_states(second)["cuda_rng"] == second == asked[0]
    assert list(checkpoints.random_states(torch.device("cpu"))) == ["rng"]
    assert len(asked) == 1


def test_each_process_gets_its_own_random_state_back(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer, states = torch.optim.Adam(model.parameters()), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        states.append({"rng": torch.get_rng_state()})
    torch.set_rng_state(states[0]["rng"])
    path = tmp_path / "last.safetensors"
    checkpoints.save_checkpoint(path, model, optimizer, Progress(), states[1:])
    for rank, each in enumerate(states):
        torch.manual_seed(7)
        checkpoints.load_checkpoint(path, model, optimizer, rank)
        assert torch.equal(torch.get_rng_state(), each["rng"])
