"""Chapter 13: runs that resume, their batches, their memory."""

import gc
import io
import itertools
import json
import math
import re
import shutil
import sys
import threading
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sacrebleu
import small_runs
import torch
from small_runs import FEW, SMALL, tiny

from transformer_lib import machine, training
from transformer_lib.batches import Prepared, TokenPairs, batches, tokenize_pairs
from transformer_lib.corpora import grammar_split
from transformer_lib.machine import Team, default_device
from transformer_lib.objective import noam_lr
from transformer_lib.runs import Progress, setup, trainer
from transformer_lib.tokenizer import Tokenizer
from transformer_lib.training import Update, fit
from transformer_lib.transformer import Transformer, TransformerConfig

ROOT = Path(__file__).resolve().parents[1]

# Fixtures that more than one file uses.
data_dir = small_runs.data_dir
pairs = small_runs.pairs
model = small_runs.model
train = small_runs.train


def test_nan_names_step_and_batch(train, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "update", lambda *args: Update(math.nan, 9, 1.0, 0))
    with pytest.raises(FloatingPointError, match=r"update 1 \(epoch 0, batch 1, pairs"):
        train(tiny(), tmp_path)


def test_an_interrupt_closes_the_bar(train, tmp_path, monkeypatch):
    """Else the next bar takes the line below it, and a new one at each refresh."""

    def interrupted(history):
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "shows_bars", lambda: True)
    # The error is kept, as a notebook keeps the last one, with all that it refers to.
    with pytest.raises(KeyboardInterrupt) as kept:
        train(tiny(), tmp_path, show=True, callbacks=[interrupted])
    assert kept and trainer.tqdm(disable=False, file=io.StringIO()).pos == 0


def test_same_recipe_same_losses(train, tmp_path):
    one = train(tiny(), tmp_path / "one")
    two = train(tiny(), tmp_path / "two")
    for a, b in zip(one.history, two.history, strict=True):
        assert a["train_loss"] == b["train_loss"]
        assert a["valid_loss"] == b["valid_loss"]
    assert [h["step"] for h in one.history] == [2, 4, 6]


def test_fit_is_train_without_its_machinery(train, data_dir, tmp_path):
    """The same losses, dropout and all: the plain loop and a run of the recipe."""
    recipe, ready = tiny(validate_every=1), Prepared.load(data_dir)
    history = train(recipe, tmp_path).history
    torch.manual_seed(recipe.seed)
    model = Transformer(TransformerConfig(recipe.vocab_size, **recipe.model))
    model.to(default_device())
    losses = fit(
        model,
        ready.train,
        recipe.max_steps,
        recipe.max_tokens,
        recipe.warmup,
        recipe.lr_factor,
        recipe.label_smoothing,
        recipe.seed,
    )
    assert [row["train_loss"] for row in history] == pytest.approx(losses, abs=1e-5)


@pytest.mark.parametrize(
    ("capability", "precision", "fast"),
    [
        ((7, 5), "bfloat16", "float16"),
        ((6, 0), "float16", "float32"),
        ((6, 1), "bfloat16", "float32"),
        ((7, 5), "float16", None),
        ((7, 5), "float32", None),
        ((8, 0), "bfloat16", None),
        ((8, 9), "float16", None),
    ],
)
def test_bits_that_are_slow_on_the_gpu_are_told(
    monkeypatch, recwarn, capability, precision, fast
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    machine.warn_of_slow_bits(precision, "cuda:0")
    said = [str(one.message) for one in recwarn]
    if fast is None:
        assert not said
    else:
        (text,) = said
        assert text.startswith(f"{precision} is slow on this GPU (compute capability ")
        assert text.endswith(f"is faster in {fast} (--set precision={fast}).")


@pytest.mark.parametrize(
    ("bfloat16", "precision", "fast"),
    [
        (1e9, "bfloat16", "float32"),
        (200e9, "bfloat16", None),
        (1e9, "float32", None),
        (200e9, "float16", "bfloat16"),
    ],
)
def test_bits_that_are_slow_on_the_cpu_are_told(
    monkeypatch, recwarn, bfloat16, precision, fast
):
    rates = {"float32": 50e9, "bfloat16": bfloat16}
    monkeypatch.setattr(machine, "product_rates", lambda threads: rates)
    machine.warn_of_slow_bits(precision, "cpu")
    said = [str(one.message) for one in recwarn]
    assert len(said) == (fast is not None)
    for text in said:
        assert text.startswith(f"{precision} is slow on this CPU (50 GFLOP/s in float3")
        assert text.endswith(f"is faster in {fast} (--set precision={fast}).")


def test_a_run_asks_whether_its_bits_are_slow_while_it_trains(
    train, tmp_path, monkeypatch
):
    asked = []

    def note(*given):
        asked.append(given)

    monkeypatch.setattr(trainer, "warn_of_slow_bits", note)
    for _ in range(2):  # the second one is finished, and only loaded
        train(tiny(precision="bfloat16"), tmp_path, device="cpu")
    assert asked == [("bfloat16", "cpu")]


@pytest.mark.parametrize(
    ("stop", "fast"), [(1, False), (2, False), (3, False), (3, True), (5, False)]
)
def test_resumed_run_is_bit_equal(train, tmp_path, monkeypatch, stop, fast):
    """Dropout on, accumulation on, stopped anywhere: the same weights to the bit."""
    recipe = tiny(accumulate=2, fast_dropout=fast)
    whole = train(recipe, tmp_path / "whole")
    real, calls = trainer.update, []

    def cut(*args):
        calls.append(1)
        if len(calls) > stop:
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(trainer, "update", cut)
        train(recipe, tmp_path / "cut")
    resumed = train(recipe, tmp_path / "cut")
    losses = [[h["train_loss"] for h in run.history] for run in (whole, resumed)]
    assert losses[0] == losses[1]
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_max_seconds_stops_and_run_goes_on(train, tmp_path):
    assert train(tiny(), tmp_path, max_seconds=0.0).progress.step == 1
    assert train(tiny(), tmp_path).progress.step == 6
    for wrong in (math.nan, -1):
        telling = f"max_seconds={wrong}: must be a number, 0 or"
        with pytest.raises(ValueError, match=telling):
            train(tiny(), tmp_path / "none", max_seconds=wrong)
    assert not (tmp_path / "none").exists()


def test_run_prepares_its_own_data_from_a_users_files(data_dir, tmp_path):
    """Without data_dir: into the run's folder, with the run's own vocabulary."""
    corpus = json.loads((data_dir / "data.json").read_text())["corpus"]
    run = trainer.train(tiny(corpus=corpus, max_steps=2), tmp_path, show=False)
    assert (tmp_path / "data" / "data.json").exists()
    assert run.data["train_pairs"] == len(FEW["train"])
    again = trainer.train(tiny(corpus=corpus, max_steps=4), tmp_path, show=False)
    assert again.progress.step == 4


def test_data_of_other_settings_are_refused(train, tmp_path):
    with pytest.raises(ValueError, match="prepared with vocab_size=340; recipe"):
        train(tiny(vocab_size=350), tmp_path)


def test_float16_halves_the_scale_until_the_gradient_fits(train, tmp_path, monkeypatch):
    """A scale that overflows: no step is made by it, and it is counted."""
    real, calls = trainer.update, []

    def watched(model, *rest):
        before = [p.clone() for p in model.parameters()]
        done = real(model, *rest)
        same = all(map(torch.equal, before, model.parameters()))
        calls.append((rest[-1], done.finite, same))
        return done

    monkeypatch.setattr(trainer, "update", watched)
    start = {"scale": 2.0**40}
    monkeypatch.setattr(setup, "Progress", lambda **at: Progress(**start | at))
    run = train(tiny(precision="float16"), tmp_path)
    tried = [finite for _, finite, _ in calls]
    skipped = tried.count(False)
    assert skipped > 3 and tried == [False] * skipped + [True] * 6
    assert all(finite != same for _, finite, same in calls)
    assert [scale for scale, *_ in calls[: skipped + 1]] == [
        2.0 ** (40 - i) for i in range(skipped + 1)
    ]
    assert run.progress.skipped == skipped and run.progress.steady == 6
    assert run.progress.scale == calls[-1][0]


def test_the_scale_doubles_after_2000_good_updates():
    at = Progress(scale=8.0)
    for _ in range(1999):
        trainer.adjust_scale(at, True)
    assert (at.scale, at.steady) == (8.0, 1999)
    trainer.adjust_scale(at, True)
    assert (at.scale, at.steady) == (16.0, 0)
    trainer.adjust_scale(at, False)
    assert (at.scale, at.steady, at.skipped) == (8.0, 0, 1)


def test_float16_that_never_fits_names_the_batch(train, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "update", lambda *args: Update(1.0, 9, math.inf))
    with pytest.raises(FloatingPointError, match="the gradient is not a finite number"):
        train(tiny(precision="float16"), tmp_path)


def test_batches_made_ahead_are_the_same_in_the_same_order(train, tmp_path):
    recipes = (tiny(prefetch=n, max_steps=12) for n in (0, 3))
    one, two = (train(recipe, tmp_path / str(recipe.prefetch)) for recipe in recipes)
    for a, b in zip(one.history, two.history, strict=True):
        for name in "train_loss", "valid_loss", "epoch", "tokens":
            assert a[name] == b[name]
    assert (one.progress.epoch, one.progress.batch) == (
        two.progress.epoch,
        two.progress.batch,
    )


def test_dropout_begins_late(train, tmp_path):
    """Equal to a run without dropout up to there, and another one from there on."""
    without = train(tiny(model=SMALL | {"dropout": 0.0}), tmp_path / "without")
    late = train(tiny(dropout_after=4), tmp_path / "late")
    losses = [[h["train_loss"] for h in run.history] for run in (without, late)]
    assert losses[0][:2] == losses[1][:2]
    assert losses[0][2] != losses[1][2]


def test_first_weights_of_another_size(train, monkeypatch, tmp_path):
    """Only where a recipe asks for it; a run that goes on keeps what it learned."""
    began = []
    normal = setup.normal_weights

    def noted(model, std):
        began.append(std)
        normal(model, std)

    monkeypatch.setattr(setup, "normal_weights", noted)
    usual = train(tiny(max_steps=2), tmp_path / "usual")
    assert not began
    small = train(tiny(max_steps=2, initial_std=0.02), tmp_path / "small")
    assert began == [0.02]
    assert small.history[-1]["train_loss"] != usual.history[-1]["train_loss"]
    table = small.model.src_embedding.weight
    assert table.std().item() == pytest.approx(0.02, rel=0.1)
    longer = train(tiny(max_steps=4, initial_std=0.02), tmp_path / "longer")
    small = train(tiny(max_steps=4, initial_std=0.02), tmp_path / "small")
    assert small.history[-1]["train_loss"] == longer.history[-1]["train_loss"]


def test_checkpointing_changes_no_number(train, tmp_path):
    plain, again = (
        train(
            tiny(checkpointing=on, model=SMALL | {"dropout": 0.1}), tmp_path / str(on)
        )
        for on in (False, True)
    )
    for a, b in zip(plain.history, again.history, strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-6)
        assert a["valid_loss"] == pytest.approx(b["valid_loss"], rel=1e-6)


def test_bleu_decides_which_weights_are_the_best(train, tmp_path, monkeypatch):
    scores = iter([3.0, 9.0, 9.0])
    monkeypatch.setattr(trainer, "validation_bleu", lambda *_: next(scores))
    run = train(tiny(best_by="BLEU"), tmp_path)
    assert [record["valid_BLEU"] for record in run.history] == [3.0, 9.0, 9.0]
    losses = [record["valid_loss"] for record in run.history]
    assert losses[2] < losses[1] and run.record["step"] == run.history[1]["step"]
    path = tmp_path / "best.safetensors"
    path.write_bytes(path.read_bytes()[:-1])  # it is mended from the same update
    monkeypatch.setattr(trainer, "validation_bleu", lambda *_: 1.0)
    with pytest.warns(UserWarning, match="written again"):
        longer = train(tiny(best_by="BLEU", max_steps=8), tmp_path)
    assert longer.record["step"] == run.history[1]["step"]


def test_validation_bleu_is_sacrebleus(train, tmp_path):
    run = train(tiny(max_steps=60, validate_every=60), tmp_path)
    corpus = grammar_split("valid")[:30]
    pairs = tokenize_pairs(corpus, run.tokenizer)
    model = run.model.train()
    found = trainer.validation_bleu(model, run.tokenizer, pairs, 40, most=20)
    outputs = training.quick_translate(
        model, run.tokenizer, [s for s, _ in corpus[:20]]
    )
    theirs = sacrebleu.corpus_bleu(outputs, [[t for _, t in corpus[:20]]])
    assert found == theirs.score
    assert trainer.validation_bleu(model.train(), run.tokenizer, pairs, 40) >= 0
    assert model.training


def test_patience_ends_a_run_and_keeps_it_ended(train, tmp_path, monkeypatch):
    losses = iter([5.0, 4.0, 4.1, 4.2, 1.0])
    monkeypatch.setattr(trainer, "validation_loss", lambda *_: next(losses))
    recipe = tiny(max_steps=20, patience=2)
    assert len(train(recipe, tmp_path).history) == 4
    assert len(train(recipe, tmp_path).history) == 4  # it is over


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.2, 0.5, 0.9])
def test_fast_dropout_is_dropout(p, dtype):
    """Held against nn.Dropout: how many are zero, what the others are, the gradient."""
    torch.manual_seed(0)
    x = torch.randn(401, 997, dtype=dtype).requires_grad_()
    ours, theirs = setup.FastDropout(p)(x), torch.nn.Dropout(p)(x)
    share = (ours == 0).double().mean().item()
    assert share == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / x.numel()))
    both = (ours != 0) & (theirs != 0)
    assert both.sum() > 0
    rounded = 2**-17 / (1 - p)  # p is a multiple of 2^-16 there
    rtol = rounded if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(ours[both], theirs[both], rtol=rtol, atol=0)
    ours.sum().backward()
    dropped = ours == 0
    assert (x.grad[dropped] == 0).all()
    torch.testing.assert_close(ours[~dropped], (x * x.grad)[~dropped])
    rows = (ours == 0).float()  # neighbors share 64 random bits, and are independent
    for shift in 1, 2, 3, 4:
        pairs_dropped = (rows[:, shift:] * rows[:, :-shift]).mean().item()
        assert pairs_dropped == pytest.approx(p * p, abs=0.005)


@pytest.mark.parametrize("shape", [(0,), (1,), (3,), (5, 7), (2, 3, 9)])
def test_fast_dropout_takes_any_shape_and_is_off_where_it_should_be(shape):
    drop, x = setup.FastDropout(0.25), torch.ones(shape)
    assert drop(x).shape == x.shape
    kept = drop(x).flatten()
    torch.testing.assert_close(kept[kept != 0], x.flatten()[kept != 0] / 0.75)
    torch.manual_seed(1)
    one = drop(x)
    torch.manual_seed(1)
    assert torch.equal(drop(x), one)
    assert torch.equal(drop.eval()(x), x)
    assert torch.equal(setup.FastDropout(0.0)(x), x)
    assert torch.equal(setup.FastDropout(1.0)(x), torch.zeros(shape))


def test_a_run_with_fast_dropout_learns_otherwise_and_only_through_dropout(
    train, tmp_path
):
    plain, fast = (
        train(tiny(fast_dropout=on), tmp_path / str(on)) for on in (False, True)
    )
    assert plain.history[-1]["train_loss"] != fast.history[-1]["train_loss"]
    off = SMALL | {"dropout": 0.0}
    plain, fast = (
        train(tiny(fast_dropout=on, model=off), tmp_path / f"{on} off")
        for on in (False, True)
    )
    for a, b in zip(plain.history, fast.history, strict=True):
        assert a["train_loss"] == b["train_loss"]


def test_what_diverged_says_what_works(train, tmp_path, monkeypatch):
    """A corrected recipe is taken where no checkpoint is; else another folder is."""
    real = training.update
    monkeypatch.setattr(trainer, "update", lambda *_: Update(math.nan, 9, 1.0, 0))
    with pytest.raises(
        FloatingPointError, match="another folder, with a lower lr_factor"
    ):
        train(tiny(), tmp_path / "run")
    monkeypatch.setattr(trainer, "update", real)
    train(tiny(lr_factor=0.5, max_steps=2), tmp_path / "run")
    with pytest.raises(ValueError, match="another recipe.*lr_factor.*another folder"):
        train(tiny(lr_factor=0.4), tmp_path / "run")


def test_a_run_can_start_from_a_trained_one(train, data_dir, tmp_path):
    first = train(tiny(), tmp_path / "first")
    first.save_pretrained(tmp_path / "given", half=False)
    recipe = tiny(start_from=str(tmp_path / "given"), max_steps=1, lr_factor=1e-9)
    second = train(recipe, tmp_path / "second")
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    assert second.history[0]["valid_loss"] == pytest.approx(
        min(row["valid_loss"] for row in first.history), abs=1e-4
    )
    with pytest.raises(ValueError, match="another vocabulary"):
        train(tiny(start_from="tatoeba-en-de"), tmp_path / "third")
    spec = json.loads((data_dir / "data.json").read_text("utf-8"))["corpus"]
    alone = tiny(start_from=str(tmp_path / "given"), max_steps=2, corpus=spec)
    run = trainer.train(alone, tmp_path / "fourth", show=False)
    assert run.tokenizer.model == first.tokenizer.model
    recipe = tiny(start_from=str(tmp_path / "given"), validate_every=1)
    begun = train(recipe, tmp_path / "fifth", max_seconds=0)
    assert begun.progress.step < recipe.max_steps
    shutil.rmtree(tmp_path / "given")  # what a run began with it needs no more
    assert train(recipe, tmp_path / "fifth").progress.step == recipe.max_steps


def test_joined_lines_are_read_in_training_and_not_in_validation(train, tmp_path):
    plain, joined = (
        train(tiny(joined=share, max_steps=2), tmp_path / str(share))
        for share in (0.0, 2.0)
    )
    assert plain.history[0]["valid_loss"] == pytest.approx(
        joined.history[0]["valid_loss"], abs=0.5
    )
    assert plain.history[0]["train_loss"] != joined.history[0]["train_loss"]


def test_the_rate_is_brought_down_at_the_end(train, tmp_path):
    plain, cooled = tiny(warmup=2), tiny(warmup=2, cooldown=4)
    rates = [
        [trainer.lr_at(recipe, 32, step) for step in range(1, 7)]
        for recipe in (plain, cooled)
    ]
    assert rates[0] == [noam_lr(step, 32, 2, plain.lr_factor) for step in range(1, 7)]
    shares = [b / a for a, b in zip(*rates, strict=True)]
    assert shares == pytest.approx([1, 1, 0.8, 0.6, 0.4, 0.2])
    run = train(cooled, tmp_path / "run")
    got = [row["lr"] for row in run.history]
    assert got == [rates[1][row["step"] - 1] for row in run.history]


def test_copies_with_made_up_names_are_read_in_training():
    text = [("Tom sees Boston.", "Tom sieht Boston."), ("He is here.", "Er ist da.")]
    tokenizer = Tokenizer.train([side for pair in text * 2 for side in pair], 300)
    ready = SimpleNamespace(train=tokenize_pairs(text, tokenizer), tokenizer=tokenizer)
    count = {
        share: len(setup.all_pairs(tiny(renamed=share, joined=1.0), ready))
        for share in (0.0, 2.0)
    }
    assert count == {0.0: 4, 2.0: 12}  # copies first; they are joined like the others


def test_a_run_holds_a_few_bytes_of_each_pair(model):
    """The order of an epoch, while it is made and after: whatever the text's size."""
    count, held = 200_000, {}
    rng, sides = np.random.default_rng(0), []
    for _ in "st":
        offsets = np.concatenate([[0], np.cumsum(rng.integers(3, 30, count))])
        sides += [np.zeros(offsets[-1], np.uint16), offsets]
    pairs = TokenPairs(*sides)
    for packed in (0, 64):
        recipe = tiny(packed=packed, max_tokens=1000)
        tracemalloc.start()
        state = SimpleNamespace(at=Progress(), team=Team())
        found = trainer.batch_groups(recipe, setup.Data(pairs, pairs), model, state)
        (first,), _ = next(found)
        held[packed] = [size / count for size in tracemalloc.get_traced_memory()]
        tracemalloc.stop()
        assert len(first.indices) > 10
    for now, most in held.values():
        assert now < 24 and most < 100, held


def test_memory_does_not_grow_with_the_length_of_a_run(train, tmp_path, monkeypatch):
    """Live tensors, and what Python holds, at one validation and 40 updates later.

    The first 80 updates are not counted: what torch keeps from call to call fills up.
    """
    real, seen, count = trainer.validate_and_save, [], itertools.count(1)

    def counted(*given):
        real(*given)
        if (number := next(count)) == 4:
            tracemalloc.start()
        if number in (8, 12):
            gc.collect()
            live = sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())
            seen.append((live, tracemalloc.get_traced_memory()[0]))

    monkeypatch.setattr(trainer, "validate_and_save", counted)
    train(tiny(max_steps=120, validate_every=10), tmp_path)
    tracemalloc.stop()
    (tensors, before), (later, after) = seen
    # Each of the four validations adds its record to the history.
    assert later <= tensors and after - before < 40 * 750, seen


def test_what_makes_batches_ahead_hands_on_its_errors_and_ends():
    def items():
        yield from (1, 2)
        raise OSError("the disk is gone")

    before = threading.active_count()
    with trainer.made_ahead(items(), 4) as ready:
        assert [next(ready), next(ready)] == [1, 2]
        with pytest.raises(OSError, match="the disk is gone"):
            next(ready)
    with trainer.made_ahead(iter(range(10**9)), 2) as ready:
        assert next(ready) == 0
    assert threading.active_count() == before


# --- what a reader brings ---


def brought(pairs, cut=None):
    """Batches, optimizer and schedule of one's own; the batches break off at one."""

    def batches_of(epoch):
        for number, batch in enumerate(batches(pairs, 300, seed=5, epoch=epoch)):
            if (epoch, number) == cut:
                raise OSError("no more")
            if number < 3:
                yield batch

    return {
        "batches": batches_of,
        "schedule": lambda step: 1e-3 / step,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), momentum=0.9),
    }


def test_a_run_with_ones_own_loop_resumes_bit_equal(train, pairs, tmp_path):
    """Own batches, optimizer and schedule, cut off in the second epoch."""
    recipe = tiny(max_steps=8, prefetch=0)
    whole = train(recipe, tmp_path / "whole", **brought(pairs))
    with pytest.raises(OSError, match="no more"):
        train(recipe, tmp_path / "cut", **brought(pairs, cut=(1, 2)))
    with pytest.raises(ValueError, match="state of SGD, and this run has Adam: give"):
        train(recipe, tmp_path / "cut")
    resumed = train(recipe, tmp_path / "cut", **brought(pairs))
    for a, b in zip(whole.history, resumed.history, strict=True):
        for name in "train_loss", "valid_loss", "lr", "epoch":
            assert a[name] == b[name]
    assert [row["epoch"] for row in whole.history] == [0, 1, 1, 2]
    assert whole.history[1]["lr"] == 1e-3 / 4
    for p, q in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_ones_own_loop_is_plain_torch(train, pairs, tmp_path):
    """Three updates of SGD on three batches, against the same in five lines."""
    recipe = tiny(max_steps=3, validate_every=3, model=SMALL | {"dropout": 0.0})
    run = train(recipe, tmp_path, **brought(pairs))
    torch.manual_seed(recipe.seed)
    model = Transformer(TransformerConfig(recipe.vocab_size, **recipe.model))
    model.to(default_device())
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for step, batch in enumerate(batches(pairs, 300, seed=5, epoch=0), start=1):
        if step > 3:
            break
        batch = batch.to(model.device)
        logits = model(batch.src_ids, batch.tgt_in).transpose(1, 2)  # (B, V, T)
        loss = torch.nn.functional.cross_entropy(
            logits,
            batch.tgt_out,
            ignore_index=0,
            label_smoothing=recipe.label_smoothing,
        )
        optimizer.param_groups[0]["lr"] = 1e-3 / step
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for p, q in zip(run.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-5)


def test_batches_that_are_none_are_told(train, tmp_path):
    with pytest.raises(ValueError, match=r"batches\(0\) gave no batch"):
        train(tiny(), tmp_path, batches=lambda epoch: [])


def test_early_stopping_and_what_it_left(train, tmp_path):
    """It stops at the same update when asked again, and resumes without it."""
    stop = trainer.EarlyStopping(patience=2, min_delta=9.0)
    asked = []
    both = {"callbacks": [asked.append, stop]}
    run = train(tiny(max_steps=20), tmp_path, **both)
    assert [row["step"] for row in run.history] == [2, 4, 6]
    assert asked == [run.history] * 3  # one list, which grows
    assert train(tiny(max_steps=20), tmp_path, **both).progress.step == 6
    assert train(tiny(max_steps=8), tmp_path).progress.step == 8


def test_early_stopping_by_hand():
    def stops(losses, **settings):
        stop = trainer.EarlyStopping(**settings)
        return stop([{"valid_loss": loss} for loss in losses])

    assert not stops([3.0, 4.0], patience=2) and stops([3.0, 4.0, 5.0], patience=2)
    assert not stops([3.0, 4.0, 2.9], patience=2) and stops([3.0, 3.0], patience=1)
    assert stops([3.0, 2.9], patience=1, min_delta=0.2)
    with pytest.raises(ValueError, match="patience=0: wait for 1 validation or more"):
        trainer.EarlyStopping(0)


def test_curves_go_where_they_are_asked_for(train, tmp_path, monkeypatch):
    """The page's own lines; stand-ins for both packages note what they are told."""
    told, logged = [], []

    class Writer:
        def __init__(self, folder):
            assert folder == "curves"

        def add_scalar(self, name, value, step):
            told.append((name, value, step))

        def flush(self):
            told.append("flushed")

    def init(project):
        assert project == "mine"
        return SimpleNamespace(log=lambda row, step: logged.append((step, row)))

    fake = SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    path = ROOT / "notebooks" / "under_the_hood" / "13_runs.ipynb"
    page = json.loads(path.read_text("utf-8"))
    texts = ["".join(cell["source"]) for cell in page["cells"]]
    (text,) = (text for text in texts if "import wandb" in text)
    names: dict = {}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], names)
    callbacks = [names["curves"], names["logged"]]
    run = train(tiny(max_steps=4), tmp_path / "run", callbacks=callbacks)
    assert [step for step, _ in logged] == [2, 4] and told.count("flushed") == 2
    for row, (_, log) in zip(run.history, logged, strict=True):
        assert row == log
        assert ("valid_loss", row["valid_loss"], row["step"]) in told
