"""Chapter 16: runs spoiled on purpose are found, and healthy ones are not accused."""

import copy
import inspect
import json
import math
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_claims import slug

import transformer_lib.diagnosis as diagnosis
from transformer_lib.batches import Batch, Prepared, TokenPairs, batches, make_batch
from transformer_lib.command_line import main
from transformer_lib.corpora import CorpusUnavailable, grammar_split, load_corpus
from transformer_lib.diagnosis import (
    Finding,
    batch_dependence,
    diagnose,
    forced_and_free,
    ignored_source,
    leaked_target,
    misread_score,
    not_finite,
    odd_outputs,
    overfitting,
    resumed_worse,
    stuck_loss,
)
from transformer_lib.evaluation import sacre_bleu
from transformer_lib.figures.diagnosis import plot_curves, plot_findings
from transformer_lib.multihead import use_attention
from transformer_lib.objective import noam_lr
from transformer_lib.runs import Recipe, Run, load_pretrained, read_evidence, train
from transformer_lib.runs.checkpoints import load_tensors, save_tensors
from transformer_lib.storage import write_manifest
from transformer_lib.transformer import Transformer, TransformerConfig

ROOT = Path(__file__).parents[1]
LOSS, LEAK, SOURCE = "the loss falls", "no answer is seen", "it reads its source"
WRITES, SHAPE, SCORE = "it writes as", "the shape of text", "the score is"
NUMBERS, BATCH, JUMPS = "numbers are finite", "on its batch", "no jump"
NEW, VOCABULARY = "holds for new text", "one vocabulary"


def short(split):
    """Pairs of the grammar with at most five words on each side."""
    pairs = grammar_split(split)
    return [p for p in pairs if max(len(side.split()) for side in p) <= 5]


TEXT, UNSEEN = short("train"), short("valid")


def recipe(corpus, **changes):
    settings = {"name": "small", "corpus": corpus, "vocab_size": 500, "max_tokens": 500}
    settings |= {"max_length": 60, "max_steps": 300, "warmup": 60, "lr_factor": 0.3}
    settings |= {"label_smoothing": 0.0, "validate_every": 50, "keep_last": 0}
    model = {"d_model": 64, "num_heads": 4, "num_layers": 1, "d_ff": 128}
    model |= {"dropout": 0.0} | changes.pop("model", {})
    return Recipe(**settings | changes, model=model)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("diagnosis")


def written(folder, training=TEXT, unseen=UNSEEN):
    """Two files of tab-separated pairs, as a recipe names them."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, pairs in (("train", training), ("valid", unseen)):
        text = "".join(f"{source}\t{target}\n" for source, target in pairs)
        (folder / f"{split}.tsv").write_text(text, "utf-8")
    return {split: str(folder / f"{split}.tsv") for split in ("train", "valid")}


def made(folder, training=TEXT, unseen=UNSEEN, **changes):
    """The folder of a run that was trained on these pairs."""
    asked = recipe(written(folder / "text", training, unseen), **changes)
    train(asked, folder / "run", device="cpu", show=False)
    return folder / "run"


@pytest.fixture(scope="module")
def healthy(place):
    return made(place / "healthy")


@pytest.fixture(scope="module")
def run(healthy):
    return Run.load(healthy, "cpu")


@pytest.fixture(scope="module")
def sample(healthy):
    return make_batch(Prepared.load(healthy / "data").valid, range(40))


def named(findings, part):
    (found,) = (f for f in findings if part in f.test)
    return found


def wrong(findings):
    return [str(finding) for finding in findings if finding.right is False]


# --- three healthy runs --------------------------------------------------------------


def test_a_healthy_run_is_not_accused(healthy):
    findings = diagnose(healthy, test=UNSEEN)
    assert not wrong(findings)
    assert len(findings) == 11 and all(finding.right for finding in findings)


def test_a_run_in_two_parts_with_other_settings_is_not_accused(place):
    """Pre-norm, dropout, smoothing, another rate; stopped and resumed."""
    settings = {"label_smoothing": 0.1, "model": {"norm_first": True, "dropout": 0.05}}
    settings |= {"lr_factor": 0.5}
    folder = made(place / "parts", max_steps=200, **settings)
    asked = recipe(written(place / "parts" / "text"), max_steps=350, **settings)
    train(asked, folder, device="cpu", show=False)
    assert not wrong(diagnose(folder, test=UNSEEN))


@pytest.mark.corpora
def test_the_model_that_ships_is_not_accused():
    findings = diagnose("tatoeba-en-de", device="cpu")
    assert not wrong(findings)
    record = read_evidence(load_pretrained("tatoeba-en-de", "cpu")[2]["recipe"]["name"])
    last, least = (
        pick([r["valid_loss"] for r in record["history"]])
        for pick in (lambda losses: losses[-1], min)
    )
    assert f"with {least:.2f} nats" in named(findings, NEW).found
    for test in (JUMPS, NEW):
        assert named(findings, test).right
    try:
        load_corpus("tatoeba-en-de", "valid")
    except CorpusUnavailable:  # without text, only its history can be looked at
        assert len(findings) == 3
    else:
        assert len(findings) == 11
        assert f"It ends at {last:.2f} nats" in named(findings, LOSS).found


# --- runs that are spoiled on purpose: how, and the test that finds it ---------------


def rate_near_zero(place, healthy):
    return made(place, lr_factor=1e-6, max_steps=20, validate_every=10)


def rate_too_high(place, healthy):
    return made(place, lr_factor=10.0, max_steps=20, validate_every=20)


def targets_moved_by_a_line(place, healthy):
    sources, targets = zip(*TEXT, strict=True)
    moved = zip(sources, targets[1:] + targets[:1], strict=True)
    return made(place, [*moved], max_steps=100)


def one_file_given_twice(place, healthy):
    twice = [[(target, target) for _, target in part] for part in (TEXT, UNSEEN)]
    return made(place, *twice, max_steps=10, validate_every=5)


def target_beside_the_source(place, healthy):
    both = [[(f"{a} {b}", b) for a, b in part] for part in (TEXT, UNSEEN)]
    return made(place, *both, max_steps=10, validate_every=5)


def validated_on_training_text(place, healthy):
    return made(place, TEXT, TEXT[:60], max_steps=10, validate_every=5)


def sixty_pairs(place, healthy):
    return made(place, TEXT[:60], vocab_size=400, max_steps=150, validate_every=25)


def stopped_early(place, healthy):
    return made(place, max_steps=60, validate_every=20)


def stopped_at_once(place, healthy):
    return made(place, max_steps=20, validate_every=10)


def decoder_reads_what_it_is_to_say(place, healthy):
    """No shift: in training alone, as where a loop of one's own makes the batches."""

    def unshifted(epoch):
        for batch in batches(text.train, 500, 0, epoch):
            yield Batch(batch.src_ids, batch.tgt_out, batch.tgt_out)

    text = Prepared.load(healthy / "data")
    train(
        recipe(written(place / "text"), max_steps=80, validate_every=20),
        place / "run",
        device="cpu",
        show=False,
        batches=unshifted,
    )
    return place / "run"


def targets_cut_in_half(place, healthy):
    cut = [(a, " ".join(b.split()[: len(b.split()) // 2])) for a, b in TEXT]
    return made(place, cut, start_from=str(healthy), max_steps=40, validate_every=20)


def targets_said_twice(place, healthy):
    twice = [(a, f"{b} {b}") for a, b in TEXT]
    return made(place, twice, start_from=str(healthy), max_steps=40, validate_every=20)


def resumed_without_its_decoder(place, healthy):
    folder = place / "run"
    shutil.copytree(healthy, folder)
    tensors, record = load_tensors(folder / "last.safetensors")
    for name, tensor in tensors.items():
        if name.startswith("model.decoder") and tensor.dim() > 1:
            tensor.normal_(std=0.2)
    save_tensors(folder / "last.safetensors", tensors, record)
    old = Run.load(healthy, "cpu").recipe
    train(replace(old, max_steps=350), folder, device="cpu", show=False)
    return folder


def weights_that_are_no_numbers(place, healthy):
    folder = place / "run"
    shutil.copytree(healthy, folder)
    tensors, record = load_tensors(folder / "best.safetensors")
    next(iter(tensors.values()))[0] = torch.nan
    save_tensors(folder / "best.safetensors", tensors, record)
    return folder


def numbers_too_large_for_float16(place, healthy):
    folder = place / "run"
    shutil.copytree(healthy, folder)
    tensors, record = load_tensors(folder / "best.safetensors")
    for name in ("w_1.weight", "w_1.bias"):
        tensors[f"encoder.layers.0.feed_forward.{name}"] *= 2.0**16
    tensors["encoder.layers.0.feed_forward.w_2.weight"] /= 2.0**16
    save_tensors(folder / "best.safetensors", tensors, record)
    settings = json.loads((folder / "recipe.json").read_text("utf-8"))
    text = json.dumps(settings | {"precision": "float16"})
    (folder / "recipe.json").write_text(text, "utf-8")
    write_manifest(folder, ["recipe.json", "tokenizer.model", "about.json"])
    return folder


def text_of_another_vocabulary(place, healthy):
    other = made(place / "other", TEXT[::-1][:900], max_steps=2, validate_every=2)
    folder = place / "run"
    shutil.copytree(healthy, folder)
    shutil.rmtree(folder / "data")
    shutil.copytree(other / "data", folder / "data")
    return folder


def rescaled(place, healthy, **changes):
    """The healthy run with some of its best weights multiplied."""
    folder = place / "run"
    shutil.copytree(healthy, folder)
    tensors, record = load_tensors(folder / "best.safetensors")
    for name, factor in changes.items():
        tensors[name.replace("__", ".")] *= factor
    save_tensors(folder / "best.safetensors", tensors, record)
    return folder


def numbers_too_large_for_float32(place, healthy):
    layer = "encoder__layers__0__feed_forward__"
    changes = {f"{layer}w_1__weight": 1e38, f"{layer}w_1__bias": 1e38}
    return rescaled(place, healthy, **changes)


def a_word_too_large_in_the_training_text(place, healthy):
    """One piece that no validation pair has, in the longest pair to train on."""
    (a, b), *others = TEXT
    text = [(f"{a} {a} {a} xyz", f"{b} {b} {b}"), *others]
    folder = made(place, text, max_steps=10, model={"tie_embeddings": False})
    run = Run.load(folder, "cpu")
    tensors, record = load_tensors(folder / "best.safetensors")
    valid = Prepared.load(folder / "data").valid
    used = {int(i) for row in range(len(valid)) for i in valid[row][0]}
    piece = next(i for i in run.tokenizer.encode("xyz") if i not in used)
    tensors["src_embedding.weight"][piece] = 1e38
    save_tensors(folder / "best.safetensors", tensors, record)
    return folder


def records_that_are_no_numbers(place, healthy):
    """As where training went on after a NaN: its best weights are good."""
    folder = place / "run"
    shutil.copytree(healthy, folder)
    tensors, record = load_tensors(folder / "last.safetensors")
    for row in record["history"][2:]:
        row["train_loss"] = row["valid_loss"] = math.nan
    save_tensors(folder / "last.safetensors", tensors, record)
    return folder


def one_target_for_all(place, healthy):
    same = [(source, TEXT[0][1]) for source, _ in TEXT]
    return made(place, same, start_from=str(healthy), max_steps=40, validate_every=20)


SPOILED = [
    (rate_near_zero, LOSS, "Nothing was learned"),
    (rate_too_high, LOSS, "Little else was learned"),
    (targets_moved_by_a_line, SOURCE, "moved down (1)"),
    (one_file_given_twice, LEAK, "100% of the sources"),
    (target_beside_the_source, LEAK, "100% of the sources"),
    (validated_on_training_text, LEAK, "of the pairs are training pairs"),
    (sixty_pairs, NEW, "The training loss fell on"),
    (stopped_at_once, LOSS, "It still falls"),
    (decoder_reads_what_it_is_to_say, LOSS, "ever helped with new text"),
    (stopped_early, WRITES, "it knows too little"),
    (stopped_early, SHAPE, "loops"),
    (targets_cut_in_half, SHAPE, "too early"),
    (targets_said_twice, SHAPE, "does not stop"),
    (resumed_without_its_decoder, JUMPS, "Between updates 300 and 350"),
    (weights_that_are_no_numbers, NUMBERS, "best.safetensors"),
    (numbers_too_large_for_float16, NUMBERS, "feed_forward.w_1"),
    (numbers_too_large_for_float32, NUMBERS, "feed_forward.w_1"),
    (a_word_too_large_in_the_training_text, NUMBERS, "alone does it"),
    (records_that_are_no_numbers, LOSS, "no number"),
    (decoder_reads_what_it_is_to_say, SHAPE, "is one token"),
    (rate_too_high, SHAPE, "is one token"),
    (stopped_at_once, SHAPE, "are empty"),
    (one_target_for_all, SHAPE, "writes the same"),
    (text_of_another_vocabulary, VOCABULARY, "its ids mean other pieces"),
]


# Here another symptom comes before the one that is looked for.
LATER = {
    targets_cut_in_half: "the loss of whole targets rises",
    one_target_for_all: "the loss of other targets rises",
    a_word_too_large_in_the_training_text: "ten updates, whose loss still falls",
    validated_on_training_text: "ten updates, whose loss still falls",
    one_file_given_twice: "ten updates, whose loss still falls",
    target_beside_the_source: "ten updates, whose loss still falls",
}


@pytest.fixture(scope="module")
def spoiled(place, healthy):
    """Makes a spoiled run, once each."""
    done = {}

    def make(how):
        if how not in done:
            done[how] = how(place / how.__name__, healthy)
        return done[how]

    return make


@pytest.mark.parametrize(
    ("how", "test", "said"), SPOILED, ids=lambda x: getattr(x, "__name__", "")
)
def test_a_spoiled_run_is_found(spoiled, how, test, said):
    findings = diagnose(spoiled(how), device="cpu")
    found = named(findings, test)
    assert found.right is False and said in found.found, str(found)
    if how not in LATER:  # "mend the first that is wrong": it leads to the cause
        first = next(finding for finding in findings if finding.right is False)
        assert any(part in first.test for other, part, _ in SPOILED if other == how)
    assert found.advice in str(found).replace("\n    ", " ")


SIDES = {
    "capitals": lambda lines: [line.upper() for line in lines],
    "moved": lambda lines: ["", *lines[:-1]],
    "sorted": sorted,
    "pieces": lambda lines: [" ".join("▁" + word for word in x.split()) for x in lines],
}


@pytest.mark.parametrize("how", SIDES)
def test_a_spoiled_test_set_is_found(healthy, how):
    sources, references = zip(*UNSEEN, strict=True)
    test = [*zip(sources, SIDES[how](references), strict=True)]
    findings = diagnose(healthy, test=test, device="cpu")
    assert wrong(findings) == [str(named(findings, SCORE))]


# --- what a loop of one's own can spoil, where there is no folder --------------------


def spoil(run, change, history=None, **settings):
    """A copy of a run whose model went through change(model)."""
    model = Transformer(replace(run.model.config, **settings)).eval()
    model.load_state_dict(run.model.state_dict())
    with torch.no_grad():
        change(model)
    progress = replace(run.progress, history=history or run.history)
    return replace(run, model=model, progress=progress)


def test_a_batch_of_the_training_text_is_named_and_its_bad_pair(run, healthy):
    """A piece with a huge embedding, which one training pair has and no other pair."""
    data, piece = Prepared.load(healthy / "data"), run.tokenizer.vocab_size - 1
    some = pairs_of(*([*map(list, data.train[i])] for i in range(160)))
    at = 100
    valid, train = (
        replace(part, src=np.where(part.src == piece, 9, part.src))
        for part in (data.valid, some)
    )
    train.src[train.src_offsets[at]] = piece
    data = replace(data, train=train, valid=valid)

    def enlarge(model):
        model.src_embedding.weight[piece] = 1e25

    bad = spoil(run, enlarge, tie_embeddings=False)
    found = named(diagnose(bad, data, count=len(train)), NUMBERS)
    assert found.right is False and f"Number {at:,} alone does it" in found.found
    where = re.search(r"\d+ training pairs from ([\d,]+) to ([\d,]+)", found.found)
    first, last = (int(number.replace(",", "")) for number in where.groups())
    assert first <= at <= last < first + 16
    assert named(diagnose(run, data, count=len(train)), NUMBERS).right


def test_weights_that_are_nan_say_since_when(run, healthy, spoiled):
    def ruin(model):
        for weight in model.parameters():
            weight.fill_(torch.nan)

    bad = {"step": 350, "train_loss": math.nan, "valid_loss": math.nan}
    findings = diagnose(spoil(run, ruin, [*run.history, bad]), healthy / "data")
    assert "no number after 6 good" in named(findings, LOSS).found
    assert "between updates 300 and 350" in findings[-1].found
    assert NUMBERS in findings[-1].test and "earlier checkpoint" in findings[-1].advice
    (found,) = diagnose(spoiled(weights_that_are_no_numbers), device="cpu")
    assert "records up to update 300 are good" in found.found


def test_a_model_that_still_drops_units_is_found(run, healthy):
    dropping = spoil(run, lambda model: model.train(), dropout=0.1)
    findings = diagnose(dropping, healthy / "data")
    assert wrong(findings) == [str(named(findings, BATCH))]
    assert named(findings, BATCH).advice == diagnosis.REMEDIES["dropout"][0]


def test_a_damaged_text_is_refused(run, healthy, tmp_path):
    """One byte is another one; the size is the same, and so is the file's header."""
    shutil.copytree(healthy / "data", tmp_path / "data")
    path = max((tmp_path / "data").rglob("*.npy"), key=lambda file: file.stat().st_size)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path.name} is damaged"):
        diagnose(run, tmp_path / "data", device="cpu")


def test_a_schedule_that_began_anew_is_found(run, healthy):
    """Its losses do not jump: only the rate tells."""
    rates = [noam_lr(20 * i, 64, 60, 0.3) for i in (1, 2, 3)]
    later = [
        run.history[-1] | {"step": 300 + 20 * i, "lr": rate}
        for i, rate in enumerate(rates, start=1)
    ]
    anew = spoil(run, lambda model: None, [*run.history, *later])
    findings = diagnose(anew, healthy / "data")
    assert wrong(findings) == [str(named(findings, JUMPS))]
    assert "at update 320," in named(findings, JUMPS).found


def no_causal_mask(query, key, value, mask=None, p=0.0):
    mask = None if mask is not None and mask.dim() == 2 else mask
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def no_padding_mask(query, key, value, mask=None, p=0.0):
    mask = mask if mask is not None and mask.dim() == 2 else None
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


@pytest.mark.parametrize(
    ("attention", "test"),
    [(no_causal_mask, LEAK), (no_causal_mask, WRITES), (no_padding_mask, BATCH)],
)
def test_attention_without_its_mask_is_found(run, healthy, attention, test):
    with use_attention(run.model, attention):
        findings = diagnose(run, healthy / "data")
    assert named(findings, test).right is False


# --- the tests one by one ------------------------------------------------------------


def pairs_of(*rows):
    """Token pairs of (source, target) rows."""
    sides = [[row[side] for row in rows] for side in (0, 1)]
    flat = [np.array([i for row in side for i in row], int) for side in sides]
    ends = [np.cumsum([0, *map(len, side)]) for side in sides]
    return TokenPairs(flat[0], ends[0], flat[1], ends[1])


def test_frequencies_are_what_the_best_constant_prediction_costs():
    """Against torch: the loss of the best logits that are the same everywhere."""
    pairs = pairs_of(([5], [7, 7, 8]), ([6], [7]), ([4, 4], [9, 8]))
    counts = torch.zeros(10)
    for token in (7, 7, 8, 3, 7, 3, 9, 8, 3):
        counts[token] += 1
    wanted = torch.distributions.Categorical(counts / counts.sum()).entropy().item()
    assert diagnosis.frequency_entropy(pairs) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("losses", "right", "said"),
    [
        ([], None, "no history"),
        ([6.3], False, "Nothing was learned"),
        ([math.nan], False, "no number after 0 good"),
        ([2.0, math.nan], False, "no number after 1 good"),
        ([6.0, 5.0], False, "still falls"),
        ([1.4, 1.4], False, "Little else"),
        ([1.3, 1.5, 1.3], False, "Little else"),  # up and down, and no lower
        ([2.0, 0.9], True, "ends at 0.90"),
    ],
)
def test_levels_of_the_loss(losses, right, said):
    pairs = pairs_of(([5], [7, 7, 8]), ([6], [7]), ([4, 4], [9, 8]))
    found = stuck_loss(losses, pairs, 500)
    assert found.right is right and said in found.found


@pytest.mark.parametrize(
    ("losses", "train_losses", "right", "said"),
    [
        ([1.4, 1.5], [0.3, 0.1], False, "ever helped"),
        ([0.9, 1.5], [0.3, 0.1], True, "training loss falls to 0.10"),
        ([1.4, 1.5], [1.4, 1.2], False, "Little else"),
    ],
)
def test_what_falls_in_training_alone_is_not_stuck(losses, train_losses, right, said):
    pairs = pairs_of(([5], [7, 7, 8]), ([6], [7]), ([4, 4], [9, 8]))
    found = stuck_loss(losses, pairs, 500, train_losses)
    assert found.right is right and said in found.found


def test_rows_of_padding_alone_name_their_batch(run, sample):
    def plain(query, key, value, mask, p=0.0):
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value

    filled = Batch(*(F.pad(x, (0, 0, 0, 2)) for x in vars(sample).values()))
    assert not_finite(run.model, [filled]).right  # this library gives 0 there
    with use_attention(run.model, plain):
        found = not_finite(run.model, [sample, filled])
    assert found.right is False and "rows of padding" in found.found
    assert "batch 2" in found.found and "look at no key" in found.advice


def test_a_target_that_is_not_shifted(run, sample):
    same = Batch(sample.src_ids, sample.tgt_out, sample.tgt_out)
    found = leaked_target(run.model, same)
    assert found.right is False and "no shift" in found.advice


@pytest.mark.parametrize(
    ("pair", "copied", "known"),
    [
        (([5, 6, 7], [6, 7]), "100%", "0%"),
        (([5, 6, 7], [7, 6]), "0%", "100%"),
        (([9], [9]), "0%", "0%"),  # one token does not count
    ],
)
def test_copies_and_known_pairs_are_counted(run, pair, copied, known):
    batch = make_batch(pairs_of(pair), [0])
    train_pairs = pairs_of(([5, 6, 7], [7, 6]), ([8], [4]))
    found = leaked_target(run.model, batch, train_pairs).found
    assert f"; {copied} of the sources hold their target" in found
    assert f"; {known} of the pairs are training pairs" in found
    assert "; 0% of the pairs are training" in leaked_target(run.model, batch).found


def test_an_empty_target_names_its_batch(run, sample):
    nothing = Batch(sample.src_ids, sample.tgt_in, torch.zeros_like(sample.tgt_out))
    found = not_finite(run.model, [sample, sample, nothing])
    assert found.right is False and "batch 3" in found.found
    assert "empty" in found.found
    assert not any(module._forward_hooks for module in run.model.modules())


def test_a_weight_that_is_no_number(run, sample):
    model = copy.deepcopy(run.model)
    model.decoder.layers[0].feed_forward.w_2.bias.data[0] = torch.inf
    found = not_finite(model, [sample])
    assert found.right is False and "feed_forward.w_2.bias" in found.found


def test_numbers_near_the_end_of_float16_are_told(run, sample):
    model = copy.deepcopy(run.model)
    with torch.no_grad():
        most = max(
            model.encoder.layers[0].feed_forward.w_1(torch.randn(9, 64)).abs().max(), 1
        )
        factor = 30_000 / float(most)
        model.encoder.layers[0].feed_forward.w_1.weight *= factor
        model.encoder.layers[0].feed_forward.w_1.bias *= factor
        model.encoder.layers[0].feed_forward.w_2.weight /= factor
    assert not_finite(model, [sample]).right
    assert not_finite(model, [sample], "float16").right is False


def test_a_forgotten_eval_is_found(run, sample):
    model = Transformer(replace(run.model.config, dropout=0.1))
    model.load_state_dict(run.model.state_dict())
    found = batch_dependence(model.train(), sample)
    assert found.right is False and "eval()" in found.advice
    assert batch_dependence(model.eval(), sample).right


def test_another_start_symbol_is_found(run, sample):
    def from_the_end_symbol(model, src_ids):
        ids = torch.full((len(src_ids), 1), 3)
        for _ in range(20):
            ids = torch.cat([ids, model(src_ids, ids)[:, -1:].argmax(-1)], 1)
        rows = ids[:, 1:].tolist()
        return [row[: row.index(3)] if 3 in row else row for row in rows]

    assert forced_and_free(run.model, sample).right
    found = forced_and_free(run.model, sample, from_the_end_symbol)
    assert found.right is False and "before any mistake" in found.found


def test_free_and_forced_are_one_until_a_mistake_even_untrained(sample):
    """A fact about greedy decoding: it holds for random weights as well."""
    torch.manual_seed(1)
    model = Transformer(TransformerConfig(500, 32, 2, 1, 64)).eval()
    found = forced_and_free(model, sample)
    assert "before any mistake" not in found.found and "too little" in found.found


def test_sources_that_are_zeroed_are_found(run, sample):
    model = copy.deepcopy(run.model)
    for layer in model.decoder.layers:
        torch.nn.init.zeros_(layer.cross_attention.w_v.weight)
    assert ignored_source(model, sample).right is False
    assert ignored_source(run.model, sample).right
    one = Batch(*(x[:1] for x in vars(sample).values()))
    assert ignored_source(run.model, one).right is None


def test_an_encoder_whose_places_are_alike_is_found(run, sample):
    """Its loss still rises with another source, so only the cosine tells."""
    model = copy.deepcopy(run.model)
    model.encoder.layers[-1].register_forward_hook(
        lambda layer, inputs, output: output.mean(1, keepdim=True).expand_as(output)
    )
    found = ignored_source(model, sample)
    assert found.right is False and found.page == "25_ablations"
    assert "cosine of 1.00" in found.found


def test_moved_lines_are_seen_in_their_lengths(run, sample):
    def way(pairs):
        found = ignored_source(run.model, sample, pairs).found
        return re.findall(r"targets moved (up|down) \((\d)\)", found)

    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 30, 400)
    rows = [([5] * n, [6] * max(1, n + rng.integers(-2, 3))) for n in lengths]
    sources, targets = zip(*rows, strict=True)
    assert way(pairs_of(*rows)) == []
    for k in (-3, -1, 2):
        moved = [targets[(i - k) % len(targets)] for i in range(len(targets))]
        wanted = ("up" if k > 0 else "down", str(abs(k)))
        assert way(pairs_of(*zip(sources, moved, strict=True))) == [wanted]
    unrelated = [([5] * n, [6] * m) for n, m in rng.integers(1, 30, (400, 2))]
    assert way(pairs_of(*unrelated)) == []


OUTPUTS = [list(f"a{c}bcd{c}e") for c in "klmnopq"]


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ([[]] * 3 + OUTPUTS[3:], "43% of the outputs are empty"),
        ([["x"] * 9 for _ in OUTPUTS], "100% of the output is one token"),
        ([list("abcdef")] * 7, "it writes the same"),
        ([row + list("xyxyxyxy") for row in OUTPUTS], "loops"),
        ([row[:4] for row in OUTPUTS], "too early"),
        ([row + list("fghijk") for row in OUTPUTS], "does not stop"),
    ],
)
def test_shapes_of_output(outputs, said):
    found = odd_outputs(outputs, OUTPUTS)
    assert found.right is False and said in found.found
    assert odd_outputs(OUTPUTS, OUTPUTS).right


def test_languages_may_repeat_themselves():
    for row, loops in (
        ("very very good", False),
        ("no no no no", True),
        ("no no no", False),
        ("so it is so it is so it", False),
        ("so it is so it is so it is", True),
    ):
        found = odd_outputs([row.split()], [["good"]]).found
        assert f" {100 * loops}% of them repeat themselves" in found, row
    chants = [f"ja ja ja ja {word}".split() for word in "abcdefg"]
    assert odd_outputs(chants, chants).right


def test_a_history_that_jumps_and_one_that_overfits():
    def history(train_losses, valid_losses):
        rows = enumerate(zip(train_losses, valid_losses, strict=True))
        return [
            {"step": 10 * i, "train_loss": t, "valid_loss": v} for i, (t, v) in rows
        ]

    falls = history([3, 2, 1, 0.9], [3, 2.1, 1.2, 1.22])
    assert resumed_worse(falls).right and overfitting(falls).right
    jump = history([3, 2, 1, 2, 1.5], [3, 2.1, 1.2, 2.0, 1.4])
    found = resumed_worse(jump)
    assert found.right is False and "20 and 30" in found.found
    rote = history([3, 2, 1, 0.1], [3, 2.1, 2.4, 2.9])
    assert overfitting(rote).right is False and resumed_worse(rote).right
    for test in (overfitting, resumed_worse):
        assert test(falls[:1]).right is None


def test_a_second_warm_up_is_seen():
    """A rate that had fallen rises again; one that only rises, or falls, does not."""
    rows = [
        {"step": 10 * i, "train_loss": 3 / i, "valid_loss": 3 / i} for i in range(1, 7)
    ]

    def with_rates(rates):
        both = zip(rows, rates, strict=True)
        return resumed_worse([row | {"lr": lr} for row, lr in both])

    assert with_rates([1, 2, 3, 4, 5, 6]).right  # still in its warm-up
    assert with_rates([1, 2, 3, 2.8, 2.5, 2.5]).right and resumed_worse(rows).right
    found = with_rates([1, 3, 2.5, 0.5, 1, 1.5])
    assert found.right is False and "rises again: 5.0e-01 at update 40" in found.found
    assert "the step of the schedule" in found.advice


def test_misread_scores_say_what_helps():
    lines = [" ".join(f"w{i * j % 97}" for j in range(3, 11)) + "." for i in range(12)]
    assert misread_score(lines, lines).right
    for said, other in (
        ("lower case", [line.upper() for line in lines]),
        ("pieces put right", [line.replace("w", "▁w") for line in lines]),
        ("moved by -1 line", ["", *lines[:-1]]),
        ("another order", lines[::-1]),
    ):
        found = misread_score(other, lines)
        assert found.right is False and said in found.found, found
    strangers = [line.replace("w", "v") for line in lines]
    assert misread_score(strangers, lines).right  # the score is low, and is meant
    with pytest.raises(ValueError, match="12 hypotheses and 11"):
        misread_score(lines, lines[1:])
    assert f"{sacre_bleu(lines, lines).value:.1f}" in misread_score(lines, lines).found


def test_a_bleu_of_0_beside_equal_text_is_not_right():
    short = ["Ja.", "Nein.", "Gut."] * 4  # no four tokens
    found = misread_score(short, short)
    assert found.right is False and "chrF2 is 100.0" in found.found
    japanese = ["今日は雨が降っています。", "駅はどこですか。"] * 4
    found = misread_score(japanese, japanese)
    assert found.right and "BLEU is 100.0" in found.found


def test_long_runs_of_spaces_take_no_square_of_time():
    """A square of a million steps would not end."""
    for run in (" ", ".", "\u00a0", " ."):
        assert diagnosis._joined(run * 1_000_000) in ("", "." * 1_000_000)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"run": 3}, "run is of type int"),
        ({"run": None}, "run is of type NoneType"),
        ({"data": 7}, "data is of type int"),
        ({"test": "name"}, "test is of type str"),
        ({"test": [("a",)]}, "does not hold pairs"),
        ({"count": 0}, "count=0"),
        ({"count": math.nan}, "count=nan"),
        ({"count": 1.5}, "count=1.5"),
    ],
)
def test_diagnose_refuses_in_a_sentence(wrong, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        diagnose(**{"run": "tatoeba-en-de"} | wrong)


# --- what is printed, and the command ------------------------------------------------


def test_each_remedy_leads_to_a_page_and_is_used():
    source = Path(diagnosis.__file__).read_text("utf-8")
    for cause, (advice, page) in diagnosis.REMEDIES.items():
        assert (ROOT / "notebooks" / f"{page}.ipynb").is_file(), page
        assert source.count(f'"{cause}"') > 1, f"{cause} is never told"
        assert advice.endswith((".", "?"))


def test_symptoms_lead_to_sections_and_to_tests():
    """The chapter's table, and that of the page of questions."""
    path = ROOT / "notebooks" / "16_diagnosis.ipynb"
    cells = json.loads(path.read_text("utf-8"))["cells"]
    texts = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
    there = {slug(line) for line in re.findall(r"^##+ (.+)$", "\n".join(texts), re.M)}
    table = re.findall(r"^\| .+ \|$", "\n".join(texts), re.M)[1:]
    questions = (ROOT / "book" / "questions.md").read_text("utf-8")
    anchors = re.findall(r"\]\(#(\S+?)\)", "\n".join(table))
    assert len(anchors) == len(table) == 15 and set(anchors) <= there
    asked = re.findall(r"16_diagnosis\.ipynb#(\S+?)\)", questions)
    assert set(asked) == set(anchors)
    glossary = (ROOT / "book" / "glossary.md").read_text("utf-8")
    assert {*re.findall(r"16_diagnosis\.ipynb#(\S+?)\)", glossary)} <= there
    named = {test for row in table for test in re.findall(r"`(\w+)`", row)}
    public = {name: getattr(diagnosis, name) for name in diagnosis.__all__}
    tests = {
        name
        for name, thing in public.items()
        if inspect.isfunction(thing)
        and inspect.signature(thing).return_annotation is Finding
    }
    assert len(tests) == 10 and tests <= named


def test_pictures_of_curves_and_findings():
    rows = [{"step": i, "train_loss": 3 - i, "valid_loss": 3.0} for i in range(3)]
    figure = plot_curves({f"run {i}": rows for i in range(5)}, levels=(6.2, 4.4))
    drawn = [ax for ax in figure.axes if ax.get_title()]
    assert len(figure.axes) == 8 and len(drawn) == 5
    assert [line.get_ydata()[0] for line in drawn[0].lines] == [3, 3, 6.2, 4.4]
    found = {
        "a": [Finding("one", True, ""), Finding("two", False, "", "x.", "y")],
        "b": [Finding("two", None, ""), Finding("three", True, "")],
    }
    ax = plot_findings(found).axes[0]
    marks = {text.get_position(): text.get_text() for text in ax.texts}
    assert marks == {(0, 0): "·", (1, 0): "✗", (1, 1): "", (2, 1): "·"}
    assert [t.get_text() for t in ax.get_xticklabels()] == ["one", "two", "three"]
    plt.close("all")


def test_a_finding_reads_as_a_paragraph():
    said = str(Finding("t", False, "word " * 40, "do this.", "06_decoder"))
    assert (
        said.startswith("WRONG: t\n    word") and max(map(len, said.split("\n"))) < 91
    )
    assert "Try: do this." in said and "/06_decoder.html" in said
    assert str(Finding("t", True, "fine", "never shown")) == "right: t\n    fine"
    assert str(Finding("t", None, "no text")).startswith("not tested: t")


def test_without_text_it_says_so(run, monkeypatch):
    def refuse(*args):
        raise CorpusUnavailable("nowhere")

    monkeypatch.setattr(diagnosis, "load_corpus", refuse)
    findings = diagnose(run)
    assert [f.right for f in findings] == [True, True, None]
    assert "--data" in findings[-1].found


def test_the_command_tells_right_from_wrong(healthy, spoiled, place, capsys):
    for side, lines in enumerate(zip(*UNSEEN, strict=True)):
        text = "".join(line + "\n" for line in lines)
        (place / f"test.{side}").write_text(text, "utf-8")
    test = ["--test", str(place / "test.0"), str(place / "test.1")]
    assert main(["diagnose", str(healthy), *test, "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "11 tests: 0 wrong, 0 not tested." in said and "BLEU is" in said
    assert main(["diagnose", str(spoiled(stopped_early)), "--device", "cpu"]) == 1
    said = capsys.readouterr().out
    assert "WRONG: it writes as it was trained" in said and "Try: training" in said
    assert main(["diagnose", str(place / "nowhere")]) == 2
    assert "no model" in capsys.readouterr().err


def test_a_run_that_is_not_asked_for_text_keeps_its_files(healthy):
    before = {p: p.stat().st_mtime_ns for p in sorted(healthy.rglob("*"))}
    diagnose(healthy, device="cpu")
    assert before == {p: p.stat().st_mtime_ns for p in sorted(healthy.rglob("*"))}
    assert asdict(Run.load(healthy, "cpu").recipe)["name"] == "small"
