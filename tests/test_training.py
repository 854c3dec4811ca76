"""Chapter 11: updates against torch's own, runs that resume, recipes, mistakes."""

import json
import math
from dataclasses import asdict

import pytest
import torch

import transformer_lib.training as training
from transformer_lib.batches import make_batch, tokenize_pairs
from transformer_lib.exercises.training import (
    check_average,
    check_best_step,
    check_mean_loss,
)
from transformer_lib.objective import build_optimizer
from transformer_lib.text import Corpus, Tokenizer, grammar_split
from transformer_lib.training import Progress, Recipe, load_run, train, update
from transformer_lib.transformer import Transformer, TransformerConfig

VOCABULARY = 340
FEW = {"train": grammar_split("valid")[:400], "valid": grammar_split("test")[:40]}
SMALL = {"d_model": 32, "num_heads": 2, "num_layers": 1, "d_ff": 64, "dropout": 0.1}


@pytest.fixture(scope="module")
def pairs():
    text = FEW["train"]
    tokenizer = Tokenizer.train((side for pair in text for side in pair), VOCABULARY)
    return tokenize_pairs(text, tokenizer)


@pytest.fixture(autouse=True)
def little_text(monkeypatch):
    """Runs of these tests read 400 pairs of the embedded grammar, not 20,000."""

    def load_few(name, split):
        return Corpus(name, split, FEW[split], licence="ours", origin="a test")

    monkeypatch.setattr(training, "load_corpus", load_few)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Transformer(TransformerConfig(VOCABULARY, **SMALL | {"dropout": 0.0}))


def tiny(**changes):
    settings = {"max_steps": 6, "validate_every": 2, "max_tokens": 300}
    settings |= {"vocab_size": VOCABULARY, "model": SMALL}
    return Recipe.load("grammar", **settings | changes)


def test_update_is_torchs_step_on_torchs_loss(model, pairs):
    """One update with two batches, against cross_entropy on all tokens at once."""
    twin = Transformer(model.config)
    twin.load_state_dict(model.state_dict())
    group = [make_batch(pairs, range(3)), make_batch(pairs, range(3, 12))]
    total, tokens = update(model, build_optimizer(model), group, 1e-3, 0.1)

    adam = torch.optim.Adam(twin.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9)
    losses = [
        torch.nn.functional.cross_entropy(
            twin(b.src_ids, b.tgt_in).transpose(1, 2), b.tgt_out,
            ignore_index=0, label_smoothing=0.1, reduction="sum",
        )
        for b in group
    ]  # fmt: skip
    assert total == pytest.approx(sum(losses).item(), rel=1e-5)
    assert tokens == sum(int((b.tgt_out != 0).sum()) for b in group)
    (sum(losses) / tokens).backward()
    gradients = zip(model.parameters(), twin.parameters(), strict=True)
    for a, b in gradients:
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-4)
    # Adam divides by the gradient's size: a weight whose gradient is rounding error
    # may step either way, so weights are held equal where the gradient is not tiny.
    adam.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        clear = b.grad.abs() > 1e-5
        torch.testing.assert_close(a[clear], b[clear], atol=1e-5, rtol=0)


def test_update_leaves_weights_alone_when_the_loss_is_not_finite(model, pairs):
    with torch.no_grad():
        model.decoder.layers[0].feed_forward.w_1.bias.fill_(math.nan)
    before = [p.clone() for p in model.parameters()]
    total, _ = update(
        model, build_optimizer(model), [make_batch(pairs, range(3))], 1e-3, 0.1
    )
    assert math.isnan(total)
    for a, b in zip(before, model.parameters(), strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_nan_names_step_and_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "update", lambda *args: (math.nan, 10))
    with pytest.raises(FloatingPointError, match="step 1 .*batch 1"):
        train(tiny(), tmp_path, show=False)


def test_same_recipe_same_losses(tmp_path):
    one = train(tiny(), tmp_path / "one", show=False)
    two = train(tiny(), tmp_path / "two", show=False)
    for a, b in zip(one.history, two.history, strict=True):
        assert a["train_loss"] == b["train_loss"]
        assert a["valid_loss"] == b["valid_loss"]
    assert [h["step"] for h in one.history] == [2, 4, 6]


@pytest.mark.parametrize("stop", [1, 2, 3, 5])
def test_resumed_run_is_bit_equal(tmp_path, monkeypatch, stop):
    """Dropout on, accumulation on, stopped anywhere: the same weights to the bit."""
    recipe = tiny(accumulate=2)
    whole = train(recipe, tmp_path / "whole", show=False)
    real, calls = training.update, []

    def cut(*args):
        calls.append(1)
        if len(calls) > stop:
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(training, "update", cut)
        train(recipe, tmp_path / "cut", show=False)
    resumed = train(recipe, tmp_path / "cut", show=False)
    losses = [[h["train_loss"] for h in run.history] for run in (whole, resumed)]
    assert losses[0] == losses[1]
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_finished_run_is_loaded_not_repeated(tmp_path, monkeypatch):
    first = train(tiny(), tmp_path, show=False)
    monkeypatch.setattr(training, "update", lambda *args: pytest.fail("trained again"))
    again = train(tiny(), tmp_path, show=False)
    assert again.history == first.history
    ids = torch.tensor([[5, 6, 3]])
    assert torch.equal(first.model(ids, ids), load_run(tmp_path).model(ids, ids))
    assert load_run(tmp_path).data["sha256"] == first.data["sha256"]


def test_max_seconds_stops_and_run_goes_on(tmp_path):
    with pytest.raises(ValueError, match="no trained model"):
        train(tiny(), tmp_path, max_seconds=0.0, show=False)
    assert train(tiny(), tmp_path, show=False).progress.step == 6


def test_nothing_half_written(tmp_path):
    train(tiny(), tmp_path, show=False)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "recipe.json", "about.json", "tokenizer.model",
        "best.safetensors", "last.safetensors",
    }  # fmt: skip


def test_shared_matrix_is_stored_once(tmp_path):
    train(tiny(), tmp_path, show=False)
    tensors, _ = training.load_tensors(tmp_path / "best.safetensors")
    rows = [name for name, t in tensors.items() if t.shape == (VOCABULARY, 32)]
    assert rows == ["src_embedding.weight"]


def test_folder_of_another_recipe_is_refused(tmp_path):
    train(tiny(), tmp_path, show=False)
    with pytest.raises(ValueError, match=r"another recipe \(it differs in \['seed'\]"):
        train(tiny(seed=1), tmp_path, show=False)


def test_weights_of_another_model_are_refused(model):
    other = Transformer(TransformerConfig(VOCABULARY, **SMALL | {"num_layers": 2}))
    with pytest.raises(ValueError, match="of another model"):
        training.load_weights(model, dict(other.named_parameters()))
    wide = Transformer(TransformerConfig(VOCABULARY + 1, **SMALL))
    with pytest.raises(ValueError, match=r"\(341, 32\).*\(340, 32\)"):
        training.load_weights(model, dict(wide.named_parameters()))


def test_recipes(tmp_path):
    for name in ("grammar", "tatoeba-en-de", "tatoeba-en-de-short"):
        recipe = Recipe.load(name)
        assert recipe.name == name
        Transformer(TransformerConfig(recipe.vocab_size, **recipe.model))
        assert json.loads(json.dumps(asdict(recipe))) == asdict(recipe)
    with pytest.raises(ValueError, match="no recipe 'grammer'.*'grammar'"):
        Recipe.load("grammer")
    mine = tmp_path / "mine.toml"
    mine.write_text('name = "mine"\ncorpus = "x"\nvocab_size = 9\nstepz = 3\n')
    with pytest.raises(ValueError, match=r"mine.toml has unknown settings \['stepz'\]"):
        Recipe.load(mine)


def test_read_evidence_says_what_is_missing():
    with pytest.raises(ValueError, match="no record 'nothing-of-that-name'"):
        training.read_evidence("nothing-of-that-name")


def test_recorded_outputs_are_matched_by_hash():
    pairs = FEW["valid"]
    outputs = {training.pair_key(pair): str(i) for i, pair in enumerate(pairs)}
    record = {"recipe": {"corpus": "x"}, "outputs": {"gone": "?"} | outputs}
    with pytest.MonkeyPatch.context() as patch:
        found = Corpus("x", "test", pairs[::-1], licence="ours", origin="a test")
        patch.setattr(training, "load_corpus", lambda name, split: found)
        got = training.recorded_outputs(record)
    assert got == [(*pair, str(i)) for i, pair in enumerate(pairs)]


def test_environment_record_is_complete():
    record = training.environment_record()
    assert record["versions"]["torch"] == torch.__version__
    assert {"hardware", "python", "commit", "date"} <= record.keys()
    assert asdict(Progress())["step"] == 0


def mean_of_means(losses, tokens):
    return sum(losses) / len(losses)


def summed(losses, tokens):
    return sum(a * b for a, b in zip(losses, tokens, strict=True))


def last_step(history):
    return history[-1]["step"]


def latest_best(history):
    return min(reversed(history), key=lambda record: record["valid_loss"])["step"]


def total(checkpoints):
    return {k: sum(c[k] for c in checkpoints) for k in checkpoints[0]}


def in_place(checkpoints):
    for name, tensor in checkpoints[0].items():
        for other in checkpoints[1:]:
            tensor += other[name]
        tensor /= len(checkpoints)
    return checkpoints[0]


def in_half(checkpoints):
    return {
        k: sum(c[k] for c in checkpoints) / len(checkpoints) for k in checkpoints[0]
    }


@pytest.mark.parametrize(
    "check, wrong, telling",
    [
        (check_mean_loss, mean_of_means, "mean of the two means"),
        (check_mean_loss, summed, "divide by the number of tokens"),
        (check_best_step, last_step, "lowest training loss"),
        (check_best_step, latest_best, "keep the earlier"),
        (check_average, total, "the sum"),
        (check_average, in_place, "in place"),
        (check_average, in_half, "overflowed"),
    ],
)
def test_mistakes_are_named(check, wrong, telling):
    verdict = check(wrong)
    assert not verdict.passed
    assert telling in verdict.message
