"""Every public function brings its inputs to its model's device."""

import ast
import importlib
import inspect
import json
import re
import textwrap
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest
import small_runs
import torch
from elsewhere import Elsewhere, second_device

from transformer_lib import (
    attention,
    decoder,
    diagnosis,
    encoder,
    evaluation,
    long_text,
    multihead,
    objective,
    speed,
    training,
    transformer,
    translator,
)
from transformer_lib.batches import Batch, make_batch, pack, pad, tokenize_pairs
from transformer_lib.corpora import load_corpus
from transformer_lib.decoding import speculative
from transformer_lib.decoding import strategies as decoding
from transformer_lib.export import common, marian
from transformer_lib.export import ctranslate2 as ctranslate2_export
from transformer_lib.family import models as family
from transformer_lib.family import pretraining
from transformer_lib.figures import decoding as decoding_figures
from transformer_lib.figures.diagnosis import Trials
from transformer_lib.fine_tuning import sides_swapped, source_gains
from transformer_lib.looking_inside import heads
from transformer_lib.looking_inside import weights as looking_inside
from transformer_lib.machine import default_device
from transformer_lib.parsing import labelling, load_trees, train_tree_tokenizer
from transformer_lib.parsing import parser as parsing
from transformer_lib.runs import Progress, Recipe, Run, load_pretrained, train
from transformer_lib.tokenizer import BOS, EOS, PAD, Tokenizer
from transformer_lib.transformer import Transformer, TransformerConfig
from transformer_lib.translator import Translator

NOTEBOOKS = sorted(Path(__file__).parents[1].glob("notebooks/*.ipynb"))
SIZES = {"d_model": 32, "num_heads": 2, "num_layers": 1, "d_ff": 64, "dropout": 0.0}
data_dir = small_runs.data_dir


def ids(rows: int = 3, length: int = 7, seed: int = 0) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(seed)
    found = torch.randint(EOS + 1, 50, (rows, length), generator=drawn)
    found[:, -1], found[0, -2:] = EOS, torch.tensor([EOS, PAD])
    return found


@pytest.fixture(scope="module")
def words():
    """A tokenizer, and some pairs of text."""
    pairs = load_corpus("grammar-en-de", "train").pairs[:400]
    return Tokenizer.train([side for pair in pairs for side in pair], 400), pairs


def model_of(vocab_size: int = 50, **changes) -> Transformer:
    torch.manual_seed(0)
    return Transformer(TransformerConfig(vocab_size, **SIZES | changes)).eval()


def family_model(**changes):
    torch.manual_seed(0)
    settings = family.FamilyConfig(50, **SIZES | changes)
    return family.build_model(settings).eval()


def close(a, b) -> None:
    """The same results, to rounding; and both of them on the CPU, or numbers."""
    if isinstance(a, torch.Tensor):
        assert type(b) is torch.Tensor or not isinstance(b, Elsewhere)
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for name in a.keys() - {"seconds"}:
            close(a[name], b[name])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            close(one, other)
    elif isinstance(a, float):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
    elif hasattr(a, "__dataclass_fields__"):
        close(vars(a), vars(b))
    else:
        assert a == b


def cpu(values):
    """Results of functions that promise to leave them on the model's device."""
    kept = torch.utils._pytree.tree_map(
        lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, values
    )
    return kept


def loss_after_updates(model, *_):
    model.train()
    optimizer = training.build_optimizer(model)
    batch = Batch(ids(), ids(seed=1), ids(seed=2))
    for _ in range(2):
        done = training.update(model, optimizer, [batch, batch], 1e-3, 0.1)
    return done.loss


def fitted(model):
    def loss():
        return pretraining.next_token_loss(model, ids())

    found = pretraining.fit_steps(model, loss, steps=3)
    return found


def sampled(model):
    begin = torch.full((2, 1), BOS)
    return family.sample(model, begin, 5, torch.Generator().manual_seed(1), top_p=0.9)


def climb_steps(model, form):
    steps = speed.Steps(attention="fused", loss=form, optimizer="foreach")
    model.train()
    update = speed.trainer(model, steps)
    return [update(Batch(ids(), ids(seed=1), ids(seed=2))).item() for _ in range(2)]


def drawn():
    chance = torch.Generator().manual_seed(1)
    return {"sample": True, "top_k": 9, "top_p": 0.9, "max_extra": 4} | {
        "generator": chance
    }


def explicitly(model):
    """With the formula of chapter 02 in place of the kernel."""
    with multihead.use_attention(model, attention.scaled_dot_product_attention):
        return model(ids(), ids(seed=1))


def shuffled(model):
    torch.manual_seed(5)
    found = []
    for change in ("zeroed", "uniform", lambda weights, allowed: weights.flip(-1)):
        see = heads.altered("cross", 0, 0, change)
        with looking_inside.watching(model, see):
            found.append(model(ids(), ids(seed=1)))
    return found


def latent():
    torch.manual_seed(0)
    return long_text.LatentAttention(32, 4, 8).eval()


SEARCHES = {  # name -> (makes a model, what is done with it)
    "Transformer forward": (model_of, lambda m: cpu(m(ids(), ids(seed=1)))),
    "encode": (model_of, lambda m: cpu(m.encode(ids()))),
    "decode": (
        model_of,
        lambda m: cpu(m.decode(ids(seed=1), m.encode(ids()).cpu(), ids())),
    ),
    "embed_target": (model_of, lambda m: cpu(m.embed_target(ids(), 3))),
    "project": (model_of, lambda m: cpu(m.project(torch.ones(2, 32)))),
    "learned positions": (
        lambda: model_of(positions="learned", max_length=20),
        lambda m: cpu(m(ids(), ids(seed=1))),
    ),
    "longer than the table": (model_of, lambda m: cpu(m.encode(ids(1, 600)))),
    "torch_twin": (
        model_of,
        lambda m: cpu(transformer.torch_twin(m)(m.encode(ids()), m.encode(ids()))),
    ),
    "update build_optimizer": (model_of, loss_after_updates),
    "greedy_decode": (model_of, lambda m: decoding.greedy_decode(m, ids(), 4)),
    "speculative_decode": (
        model_of,
        lambda m: speculative.speculative_decode(m, m, ids(), 2, max_extra=4),
    ),
    "beam_search": (
        model_of,
        lambda m: decoding.beam_search(m, ids(), 3, max_extra=4, n_best=2),
    ),
    "Constrained": (
        model_of,
        lambda m: decoding.beam_search(
            m, ids(), 2, max_extra=4, min_length=3, prefixes=[[9], [8, 7], []]
        ),
    ),
    "Ensemble require_ensemble": (
        model_of,
        lambda m: decoding.beam_search(m, ids(), 2, max_extra=4, ensemble=[m]),
    ),
    "NoRepeat": (
        model_of,
        lambda m: decoding.beam_search(
            m, ids(), 2, max_extra=6, no_repeat_ngram_size=1
        ),
    ),
    "search, limits on the CPU": (
        model_of,
        lambda m: decoding.search(
            decoding.CachedSteps(m, ids()), decoding.output_limits(ids(), 4), 2
        ),
    ),
    "greedy_search output_limits": (
        model_of,
        lambda m: decoding.greedy_search(
            decoding.FullSteps(m, ids()), decoding.output_limits(ids(), 4)
        ),
    ),
    "FullSteps CachedSteps": (  # with steps from the CPU
        model_of,
        lambda m: [
            cpu(kind(m, ids()).step(torch.full((3, 1), BOS), torch.zeros(3, 1).long()))
            for kind in (decoding.FullSteps, decoding.CachedSteps)
        ],
    ),
    "decode_rows": (
        model_of,
        lambda m: decoding.decode_rows(m, [[5, 6, EOS], [7, EOS]], 2, max_extra=4),
    ),
    "force_score": (
        model_of,
        lambda m: decoding.force_score(m, ids(), [[5, 6], [7], []]),
    ),
    "trace_beam": (
        model_of,
        lambda m: decoding_figures.trace_beam(m, ids()[1:2], 3, max_extra=4),
    ),
    "leaked_target ignored_source forced_and_free batch_dependence not_finite": (
        model_of,
        lambda m: [test(m, batch).right for test, batch in diagnoses()],
    ),
    "hidden_states": (
        model_of,
        lambda m: cpu(training.hidden_states(m, packed())),
    ),
    "mean_loss": (
        model_of,
        lambda m: [
            speed.mean_loss(m, batch, form).item()
            for form in ("all", "real", "chunked")
            for batch in (Batch(ids(), ids(seed=1), ids(seed=2)), packed())
        ],
    ),
    "trainer": (model_of, lambda m: [climb_steps(m, f) for f in ("all", "real")]),
    "attention_weights": (
        model_of,
        lambda m: looking_inside.attention_weights(m, ids(), ids(seed=1)),
    ),
    "token_log_probs": (
        model_of,
        lambda m: cpu(heads.token_log_probs(m, ids(), starts())),
    ),
    "value_lengths": (
        model_of,
        lambda m: heads.value_lengths(m, [(ids(), starts())], "cross"),
    ),
    "loss_and_choices": (
        model_of,
        lambda m: heads.loss_and_choices(m, [(ids(), starts())]),
    ),
    "next_token_loss": (
        lambda: family_model(causal=True, positions="rotary", num_kv_heads=1),
        lambda m: pretraining.next_token_loss(m, ids()).item(),
    ),
    "hidden_loss": (family_model, lambda m: hidden(m)),
    "span_loss": (
        lambda: family_model(cross_attention=True, norm="rms"),
        lambda m: pretraining.span_loss(m, ids(), ids(seed=1)).item(),
    ),
    "fit": (lambda: family_model(causal=True), fitted),
    "sample": (lambda: family_model(causal=True, positions="learned"), sampled),
    "OneStack.read": (family_model, lambda m: cpu(m.read(ids()))),
    "StackSteps": (
        lambda: family_model(causal=True, positions="rotary", num_kv_heads=1),
        lambda m: cpu(family.StackSteps(m).read(ids())),
    ),
    "experts": (lambda: family_model(num_experts=3), lambda m: cpu(m.read(ids()))),
    "relative biases": (
        lambda: family_model(causal=True, positions="relative"),
        lambda m: cpu(family.StackSteps(m).read(ids())),
    ),
    "alibi": (lambda: family_model(positions="alibi"), lambda m: cpu(m.read(ids()))),
    "ImageClassifier": (
        lambda: image_model(),
        lambda m: cpu(m(torch.linspace(0, 1, 128).view(2, 1, 8, 8))),
    ),
    "token_scores": (
        model_of,
        lambda m: common.token_scores(m, [[5, 6], [7]], [[8], [9, 10]]),
    ),
    "generate": (
        model_of,
        lambda m: [m.generate(ids(), 2, max_extra=4), m.generate(ids(), **drawn())],
    ),
    "use_attention": (model_of, lambda m: cpu(explicitly(m))),
    "altered watching": (model_of, lambda m: cpu(shuffled(m))),
    "LatentAttention": (latent, lambda m: cpu(m(*[m.w_down.weight[None]] * 3)[0])),
    "quantized": (model_of, lambda m: cpu(speed.quantized(m))),
    "Labeller": (lambda: labeller(), lambda m: cpu(m(ids(2, 7)))),
    "LabelTask.loss": (
        lambda: labeller(),
        lambda m: labelling.LabelTask.loss(
            SimpleNamespace(table=TRIPLES),
            m,
            Batch(ids(2, 7), ids(2, 4), LABELLED),
            0.1,
        ).item(),
    ),
}
LABELLED = EOS + 1 + torch.tensor([[0, 1, 2, 0], [2, 1, 0, 0]])  # (B, W + 1)
TRIPLES = torch.tensor([[0, 1, 0], [1, 0, 2], [2, 1, 1]])  # (triples, 3)


def labeller() -> labelling.Labeller:
    torch.manual_seed(0)
    settings = {name: SIZES[name] for name in ("num_heads", "num_layers", "d_ff")}
    return labelling.Labeller(50, [3, 2, 3], 32, dropout=0.0, **settings).eval()


def starts() -> torch.Tensor:
    found = ids(seed=1)
    found[:, 0] = BOS
    return found.masked_fill(found == EOS, 9)


def diagnoses():
    """The tests of chapter 16 that take a model and a batch."""
    batch = Batch(ids(), starts(), ids(seed=1))
    tests = (diagnosis.leaked_target, diagnosis.ignored_source)
    tests += (diagnosis.forced_and_free, diagnosis.batch_dependence)
    return [*((test, batch) for test in tests), (diagnosis.not_finite, [batch])]


def packed():
    rows = [([5, 6, 7], [8, 9]), ([10, 11], [12]), ([13], [14, 15, 16])]
    return pack(token_pairs(rows), range(3), 16)


def token_pairs(rows):
    import numpy as np

    from transformer_lib.batches import TokenPairs

    sides = []
    for side in zip(*rows, strict=True):
        ends = np.cumsum([0, *map(len, side)])
        sides += [np.concatenate(side).astype(np.uint16), ends]
    return TokenPairs(*sides)


def hidden(model):
    torch.manual_seed(3)
    return pretraining.hidden_loss(model, ids(8), 49).item()


def image_model():
    torch.manual_seed(0)
    config = family.FamilyConfig(10, **SIZES)
    return family.ImageClassifier(config, 8, 2).eval()


@pytest.mark.parametrize("name", SEARCHES)
def test_inputs_are_brought_to_the_models_device(name):
    """Everything is handed over on the CPU, as a reader would; the result is equal."""
    make, run = SEARCHES[name]
    here = run(make())
    with second_device() as device:
        there = run(make().to(device))
    close(here, there)


# --- what takes tensors and no model --------------------------------------------------


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


QKV = numbers(2, 5, 8), numbers(2, 5, 8, seed=1), numbers(2, 5, 6, seed=2)
ALLOWED = torch.ones(5, 5, dtype=torch.bool).tril()
PARTS = torch.tensor([[1, 1, 2, 2, 0]])
ALONE = {  # name -> (function, what it is given)
    "scaled_dot_product_attention": (
        attention.scaled_dot_product_attention,
        (*QKV, ALLOWED),
    ),
    "fused_attention": (attention.fused_attention, (*QKV, ALLOWED)),
    "online_attention": (
        lambda q, k, v, allowed: [
            long_text.online_attention(q, k, v, allowed, block_size=2),
            long_text.online_attention(q, k, v, causal=True, block_size=2),
        ],
        (*QKV, ALLOWED),
    ),
    "window_attention": (
        lambda q, k, v: long_text.window_attention(q, k, v, window=3),
        QKV,
    ),
    "linear_attention": (
        lambda q, k, v: [
            long_text.linear_attention(q, k, v, causal) for causal in (False, True)
        ],
        QKV,
    ),
    "split_heads merge_heads": (
        lambda x: multihead.merge_heads(multihead.split_heads(x, 2)),
        QKV[:1],
    ),
    "layer_norm": (encoder.layer_norm, (QKV[0], numbers(8), numbers(8, seed=1))),
    "torch_names": (
        lambda x: list(encoder.torch_names({"residual_1.norm.weight": x}).values()),
        (numbers(8),),
    ),
    "rotate": (lambda x: family.rotate(x, 3), QKV[:1]),
    "padding_mask": (lambda x: decoder.padding_mask(x, PAD), (ids(),)),
    "causal_mask": (lambda x: decoder.causal_mask(4, x.device), (ids(),)),
    "filter_logits": (
        lambda x: decoding.filter_logits(x, 0.7, top_k=4, top_p=0.8),
        (numbers(3, 9),),
    ),
    "label_smoothed_cross_entropy": (
        objective.label_smoothed_cross_entropy,
        (numbers(3, 7, 50), ids()),
    ),
    "chunked_cross_entropy": (
        lambda *given: objective.chunked_cross_entropy(*given, rows=4),
        (numbers(7, 8), numbers(50, 8, seed=1), ids()[0]),
    ),
    "segment_mask": (training.segment_mask, (PARTS, PARTS)),
    "mask_tokens": (lambda x: pretraining.mask_tokens(x, 49, 49, share=1.0), (ids(),)),
}


@pytest.mark.parametrize("name", ALONE)
def test_tensors_are_computed_with_where_they_lie(name):
    """Nothing that a function makes on its own lies on another device."""
    function, given = ALONE[name]
    torch.manual_seed(3)
    here = function(*given)
    with second_device() as device:
        torch.manual_seed(3)
        there = function(*(x.to(device) for x in given))
        for x in torch.utils._pytree.tree_leaves(there):
            assert x.device.type == device
        close(cpu(here), cpu(there))


@pytest.mark.parametrize("name", ["online_attention", "chunked_cross_entropy"])
def test_gradients_of_our_own_are_computed_where_the_tensors_lie(name):
    """Two functions bring a backward pass of their own."""
    function, given = ALONE[name]

    def gradients(device):
        leaves = [x.clone().to(device) for x in given]
        leaves = [x.requires_grad_() if x.is_floating_point() else x for x in leaves]
        out = function(*leaves)
        out = sum(x.sum() for x in out) if isinstance(out, list) else out
        out.backward()
        return [x.grad.cpu() for x in leaves if x.requires_grad]

    here = gradients("cpu")
    with second_device() as device:
        close(here, gradients(device))


TEXTS = {  # what takes a model, a tokenizer, and text
    "diagnose": lambda m, t, pairs: [
        (found.test, found.right)
        for found in diagnosis.diagnose(
            Run(Recipe.load("grammar"), m, t, Progress(), {}, {}), None, pairs[:3], 4
        )
    ],
    "n_best stream": lambda m, t, pairs: [
        Translator(m, t).n_best("A dog sees a cat.", 2, max_extra=5),
        list(Translator(m, t).stream(["A dog.", "", "So?"], beam_size=1, max_extra=5)),
    ],
    "Translator": lambda m, t, pairs: Translator(m, t)(
        ["A dog sees a cat.", "So?"], 2, max_extra=5
    ),
    "align word_links": lambda m, t, pairs: Translator(m, t).align(
        "A dog sees a cat.", "Ein Hund sieht eine Katze."
    ),
    "source_gains": lambda m, t, pairs: source_gains(m, t, pairs[:6]),
    "sides_swapped": lambda m, t, pairs: sides_swapped(m, t, pairs[:6]),
    "translate": lambda m, t, pairs: translator.translate(
        m, t, ["A dog."], max_extra=5
    ),
    "evaluate": lambda m, t, pairs: evaluation.evaluate(
        Translator(m, t), pairs[:6], 1, max_extra=5, samples=5
    ),
    "perplexity": lambda m, t, pairs: evaluation.perplexity(
        m, tokenize_pairs(pairs[:9], t)
    ),
    "parse": lambda m, t, pairs: parsing.parse(["a dog ."], m, t, 2, max_extra=5),
    "look": lambda m, t, pairs: looking_inside.look(m, t, "The dog sleeps."),
    "link_weights": lambda m, t, pairs: (
        heads.link_weights(m, t, "Tom saw it.", "Tom", "saw").rows
    ),
    "compare_relations": lambda m, t, pairs: [
        row.trained for row in heads.compare_relations(m, t, count=12)
    ],
    "head_statistics": lambda m, t, pairs: looking_inside.head_statistics(
        m, t, pairs[:5]
    ),
    "most_attended": lambda m, t, pairs: heads.most_attended(
        m, t, "The dog sees a cat."
    ),
    "weigh_heads": lambda m, t, pairs: heads.weigh_heads(
        m, t, pairs[:3], ("zeroed", "uniform")
    ),
    "quick_translate": lambda m, t, pairs: training.quick_translate(m, t, ["A dog."]),
    "validation_loss": lambda m, t, pairs: training.validation_loss(
        m, tokenize_pairs(pairs[:9], t), 200
    ),
    "effect_of_words": lambda m, t, pairs: heads.effect_of_words(
        m, t, "The dog sleeps.", "Der Hund schläft."
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_is_brought_to_the_models_device(name, words):
    tokenizer, pairs = words
    here = TEXTS[name](model_of(400), tokenizer, pairs)
    with second_device() as device:
        there = TEXTS[name](model_of(400).to(device), tokenizer, pairs)
    close(here, there)


WITHOUT = {  # public functions that take a model and need no case, and why
    "save_checkpoint load_checkpoint": "files and a model, no inputs",
    "evaluating": "the model alone",
    "watching attention_as adam training_flops": "the model alone",
    "export_model prove to_int8 to_marian": "made on the CPU",
    "train set_up": "a test of its own, below",
    "save_model fingerprint": "files and a model, no inputs",
    "mean_of_means mean_of_tokens": "update, and its wrong variants",
    "evaluate_parser": "calls parse",
    "checkpoint_layers": "the model alone",
    "validation_bleu": "calls quick_translate",
    "self_attention restricted_attention fused_self_attention": "what complexity times",
    "counted longest_chain gradient measured peaks peak_of": "times and counts these",
    "grow": "weights and files",
    "rows_of_parents continuations among_best slot_search": "parts of searches above",
    "best_tokens speculate verdict surplus": "parts of searches above",
    "first_losses": "trainer, with a model of its own",
    "mean_cosines merge_words quantize_rows": "tensors alone, where they are",
    "ctranslate2_spec rounded_to_8_bits export_onnx": "made on the CPU",
    "export_ctranslate2 export_marian": "made on the CPU",
    "choose_engine proved_export log_probs_apart": "exports, made on the CPU",
    "to_onnx graphs_of marian_places": "parts of exports, which are made on the CPU",
    "progress_text": "numbers of a run, no tensors",
    "load_weights compile_layers initialize normal_weights": "the model alone",
    "fit_steps": "the loss that it is given moves what it takes",
    "batch_groups one_update": "parts of train",
    "require_ids": "refuses, and moves nothing",
    "attention_modules blocks_of": "parts of a model, and what builds them",
    "cut_patches": "a part of ImageClassifier",
    "guess_by_counting before_holes": "tensors alone, of tables and ids",
    "sentence_losses": "loss_and_choices, before it is summed",
    "largest_links row_statistics agreement_of_words": "tensors alone, of a result",
    "link_shares scored_elsewhere rank_correlation": "tensors alone, of a result",
    "outputs_of added_by_keys": "parts of value_lengths",
    "validate_and_save": "a part of train",
}


PARTS = {  # public layers that stay where their model is: a case that goes through it
    "Encoder EncoderLayer FeedForward Residual": "encode",
    "Embeddings SinusoidalPositions": "encode",
    "Decoder DecoderLayer MultiHeadAttention": "decode",
    "LearnedPositions": "learned positions",
    "GroupedAttention": "next_token_loss",
    "MixtureOfExperts": "experts",
    "ScoreBias": "relative biases",
}
ELSEWHERE = {  # public classes that take tensors or models and need no case, and why
    "BatchLoss": "update and validation_loss bring it batches of the model's device",
    "Batch Packed": "their .to, below",
    "Engine": "CTranslate2 computes: in test_engines",
    "OnnxModel OnnxSteps": "ONNX Runtime computes, on the CPU: in test_export",
    "EncoderGraph StepGraph": "parts of exports, which are made on the CPU",
    "Int8Linear": "for a CPU; to_int8, which makes it, refuses what is elsewhere",
    "AttentionMaps Link": "a result, on the CPU",
    "Run State": "train and Run.load, below",
    "Recipe Tokenizer": "settings and ids, no tensors",
    "Cache": "a part of the searches above",
    "FastDropout": "a layer, as torch's",
    "RotaryPlaces": "a part of the family's models",
    "Recurrent Convolutional": "layers of torch's on Embeddings: as build_model's",
}
TAKES = re.compile(r"\b(Tensor|Module|Transformer|Translator|Run|Batch)\b")


def public_names():
    """Each name that a module of the library exports, with its module's name."""
    library = Path(training.__file__).parent
    for path in sorted(library.rglob("[a-z]*.py")):
        place = ".".join(path.relative_to(library).with_suffix("").parts)
        if not place.startswith(("exercises.", "figures.")):
            module = importlib.import_module(f"transformer_lib.{place}")
            for name in module.__all__:
                yield f"{path.stem}.{name}", getattr(module, name)


def takes_tensors(function) -> bool:
    """Whether a function is given a model or tensors, as its signature says."""
    given = inspect.signature(function).parameters
    kinds = " ".join(str(one.annotation) for one in given.values())
    return "model" in given or bool(TAKES.search(kinds))


def class_takes_tensors(kind: type) -> bool:
    """Whether a class is a layer, or one of its public methods takes tensors."""
    methods = [
        getattr(method, "__func__", method)
        for name, method in vars(kind).items()
        if name in ("__init__", "__call__") or not name.startswith("_")
    ]
    methods = filter(inspect.isfunction, methods)
    return issubclass(kind, torch.nn.Module) or any(map(takes_tensors, methods))


def test_every_public_function_that_takes_a_model_or_tensors_is_here():
    """None is forgotten: each has a case above, or a reason why it needs none."""
    cases = " ".join([*SEARCHES, *TEXTS, *ALONE, *WITHOUT])
    functions = [(n, f) for n, f in public_names() if inspect.isfunction(f)]
    taking = [name for name, function in functions if takes_tensors(function)]
    forgotten = [n for n in taking if not re.search(rf"\b{n.split('.')[1]}\b", cases)]
    assert not forgotten and len(taking) > 50


def test_every_public_class_that_takes_a_model_or_tensors_is_here():
    """The same of classes: of layers, the case is one of a model that has them."""
    kinds = {n.split(".")[1]: k for n, k in public_names() if inspect.isclass(k)}
    kinds = {n: k for n, k in kinds.items() if not issubclass(k, BaseException)}
    taking = {name for name, kind in kinds.items() if class_takes_tensors(kind)}
    cases = set(re.findall(r"\w+", " ".join([*SEARCHES, *TEXTS, *ALONE])))
    reasons = set(" ".join([*PARTS, *ELSEWHERE]).split())
    assert len(taking) > 25 and not taking - cases - reasons
    assert not reasons & cases and not reasons - taking, "these need no reason"
    for names, case in PARTS.items():
        parts = list(SEARCHES[case][0]().modules())
        for name in names.split():
            assert any(isinstance(part, kinds[name]) for part in parts), name


def test_words_are_labelled_on_the_models_device():
    trees = load_trees("toy").trees[:60]
    task = labelling.LabelTask(trees, train_tree_tokenizer(trees, 600, "slots"))
    sizes = [len(kind) for kind in task.kinds]
    model = labelling.Labeller(
        task.tokenizer.vocab_size, sizes, 32, num_heads=2, num_layers=1, d_ff=64
    )
    here = task.parse(trees[:3], model)
    with second_device() as device:
        there = task.parse(trees[:3], model.to(device))
    assert [str(one.tree) for one in here] == [str(one.tree) for one in there]


# --- the test itself can fail ---------------------------------------------------------


@pytest.mark.parametrize(
    "name, function, gone",
    [
        ("encode", "Transformer.embed_source", "src_ids = src_ids.to(self.device)"),
        ("force_score", "force_score", ", device=model.device"),
        (
            "search, limits on the CPU",
            "CachedSteps.__init__",
            "src_ids = src_ids.to(model.device)",
        ),
        ("hidden_loss", "hidden_loss", "wanted = wanted.to(model.device)"),
        ("attention_weights", "attention_weights", ".cpu()"),
        ("span_loss", "span_loss", "tgt_ids = tgt_ids.to(model.device)"),
    ],
)
def test_a_missing_move_is_caught(name, function, gone):
    """The same test, with one move taken out of the library, fails."""
    owner, _, method = function.rpartition(".")
    for module in (transformer, decoding, family, pretraining, looking_inside, heads):
        if hasattr(module, owner or method):
            break
    place = getattr(module, owner) if owner else module
    original = getattr(place, method)
    source = inspect.getsource(inspect.unwrap(original))
    lines = [line for line in source.splitlines() if gone in line]
    assert len(lines) == 1, f"{function} has {len(lines)} lines with {gone!r}"
    whole = gone.endswith("device)") and "=" in gone  # a line that is only a move
    changed = lines[0].replace(lines[0].strip() if whole else gone, "pass" * whole)
    code = textwrap.dedent(source.replace(lines[0], changed))
    names = dict(vars(module))
    exec(compile(code, function, "exec"), names)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, method, names[method])
        with pytest.raises((RuntimeError, AssertionError)):
            test_inputs_are_brought_to_the_models_device(name)


# --- training, loading and exporting --------------------------------------------------


def test_one_default_for_all_that_load_and_train(data_dir, tmp_path, monkeypatch):
    """train, Run.load, load_pretrained and Translator: the same device by default."""
    tiny = small_runs.tiny(max_steps=2, model=SIZES)
    shipped = Translator.from_pretrained("tatoeba-en-de", "cpu")
    wanted = shipped(["Thank you."], beam_size=1)
    with second_device() as device:
        monkeypatch.setenv("TRANSFORMER_LIB_DEVICE", device)
        run = train(tiny, tmp_path / "run", data_dir, show=False)
        assert run.model.device.type == device
        assert run.model.output.weight is run.model.src_embedding.weight
        assert Run.load(tmp_path / "run").model.device.type == device
        assert Run.load(tmp_path / "run", "cpu").model.device.type == "cpu"
        assert load_pretrained("tatoeba-en-de")[0].device.type == device
        translator = Translator.from_pretrained("tatoeba-en-de")
        assert translator.model.device.type == device
        assert translator(["Thank you."], beam_size=1) == wanted
        run.save_pretrained(tmp_path / "kept")
    again = load_pretrained(tmp_path / "kept", "cpu")[0]
    wanted = Run.load(tmp_path / "run", "cpu").model
    for a, b in zip(again.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)


def test_a_run_goes_on_on_another_device(data_dir, tmp_path):
    """float16 with its scale, packed rows: begun on the CPU, gone on with elsewhere."""

    def recipe(steps):
        settings = {"precision": "float16", "packed": 32, "max_steps": steps}
        return small_runs.tiny(model=SIZES, **settings)

    whole = train(recipe(6), tmp_path / "whole", data_dir, "cpu", show=False)
    train(recipe(2), tmp_path / "moved", data_dir, "cpu", show=False)
    with second_device() as device:
        run = train(recipe(4), tmp_path / "moved", data_dir, device, show=False)
        assert run.model.device.type == device
    run = train(recipe(6), tmp_path / "moved", data_dir, "cpu", show=False)  # and back
    assert run.progress.steady == whole.progress.steady == 6
    for one, other in zip(whole.history, run.history, strict=True):
        close(one["train_loss"], other["train_loss"])
        close(one["valid_loss"], other["valid_loss"])


def test_the_default_device(monkeypatch):
    monkeypatch.delenv("TRANSFORMER_LIB_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert default_device() == "cuda"
    assert default_device("cpu") == "cpu"
    monkeypatch.setenv("TRANSFORMER_LIB_DEVICE", "cpu")
    assert default_device() == "cpu"
    assert default_device("cuda:0") == "cuda:0"
    with pytest.raises(ValueError, match=r"cuda:1.*finds 1 CUDA"):
        default_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv("TRANSFORMER_LIB_DEVICE")
    assert default_device() == "cpu"
    for wrong in ("cuda", "gpu", "cuda:x"):
        with pytest.raises(ValueError, match="no such device.*give 'cpu'"):
            default_device(wrong)


def test_exports_are_made_on_the_cpu_and_leave_the_model(words):
    """A model elsewhere is exported from a copy; it stays where it is."""
    model = model_of(400)
    with second_device() as device:
        model.to(device)
        copied = common._on_cpu(model)
        assert copied.device.type == "cpu" and model.device.type == device
        assert copied.output.weight is copied.src_embedding.weight
        twin = marian.to_marian(model)
        assert {p.device.type for p in twin.parameters()} == {"cpu"}
        ctranslate2_export.ctranslate2_spec(model, common.piece_names(words[0]))
    assert common._on_cpu(copied) is copied


# --- the notebooks --------------------------------------------------------------------

SAID = {  # lines that say "cpu", and why the default device does not belong there
    # The same bit for bit only where sums have one order.
    'on_cpu = {"device": "cpu", "show": False}  # a GPU adds up in an order of its own',
    # The example of a newcomer, with the flag shown.
    '"transformer-lib train small --data data --run runs/mine --device cpu "',
    '"transformer-lib train grammar --data data --run {run} --device cpu {settings}"',
    # What is exported computes on the CPU.
    'model, tokenizer, about = load_pretrained("tatoeba-en-de", "cpu")',
}
MAKERS = "Transformer|build_model|ImageClassifier"
SHORT = set(  # seconds of work: a GPU would wait more than it computes
    "00_why 01_hello 02_attention 03_multihead 04_positions 05_encoder 06_decoder "
    "07_transformer 11_objective 30_errata 31_bugs".split()
)
COMPARED = {  # compared or counted, with inputs on the CPU
    "ours = build_model(FamilyConfig(50, **sizes, cross_attention=True))",
    "papers = Transformer(TransformerConfig(50, **sizes))",
    "logits = Transformer(config)(src_ids, tgt_ids)  # (B, T, V)",
    "large = ImageClassifier(config, 224, 16, channels=3)",
    "model = build_model(FamilyConfig(20, **small, **MEMBERS[member])).eval()",
    "model = build_model(FamilyConfig(50, **tiny, **changes)).eval()",
    # Two models and three sentences, before anything else.
    "fresh = Transformer(config).eval().requires_grad_(False)",
    "trained = Transformer(config).eval().requires_grad_(False)",
}


def code_of(path):
    cells = json.loads(path.read_text())["cells"]
    return ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]


def test_no_notebook_names_the_cpu_where_the_default_belongs():
    """Cells that are not exported say "cpu" in the stated exceptions only."""
    named = {
        line.strip(): path.stem
        for path in NOTEBOOKS
        for cell in code_of(path)
        if not cell.startswith("#| export")
        for line in cell.splitlines()
        if re.search(r"""device\b.{0,12}["']cpu|["']cpu["']|--device cpu""", line)
    }
    assert {line: stem for line, stem in named.items() if line not in SAID} == {}
    assert not SAID - named.keys(), "no chapter says that any more"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_library_functions_do_not_default_to_the_cpu(path):
    """No exported function has a device of "cpu" by default."""
    cells = [cell for cell in code_of(path) if cell.startswith("#| export")]
    found = [m for cell in cells for m in re.findall(r"device:[^=\n]*= \"cpu\"", cell)]
    # What a record notes, a sum of one number, a 16-bit type; another program's.
    allowed = {"12_training": 2, "13_runs": 1, "22_export": 1}
    assert len(found) <= allowed.get(path.stem, 0), found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_models_that_a_chapter_makes_go_to_the_default_device(path):
    """Where a chapter trains or decodes, a model that it builds is moved."""
    if path.stem in SHORT:
        return
    for cell in code_of(path):
        if cell.startswith("#| export"):
            continue
        for line in cell.splitlines():
            made = re.search(rf"(\w+) = ({MAKERS})\(", line)
            moved = made and (".to(" in line or f"{made[1]}.to(" in cell)
            assert not made or moved or line.strip() in COMPARED, line
        assert "= Labeller(" not in cell or ".to(default_device())" in cell


# One that takes seconds and uses what the book trains.
WHOLE = [path for path in NOTEBOOKS if path.stem == "19_shipped_model"]


def no_network(*_):
    raise OSError("no network in this test")


@contextmanager
def as_it_was():
    """Puts back what the cells of a chapter change for the whole process."""
    threads = torch.get_num_threads()
    with plt.rc_context(), torch.enable_grad():
        yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("path", WHOLE, ids=lambda path: path.stem)
def test_a_chapter_runs_with_its_models_on_another_device(path, tmp_path, monkeypatch):
    """All cells but the exercises, with the text that needs no network."""
    plt.switch_backend("Agg")
    monkeypatch.chdir(tmp_path)
    for name in ("RUNS", "CACHE"):
        monkeypatch.setenv(f"TRANSFORMER_LIB_{name}", str(tmp_path / name))
    monkeypatch.setenv("TRANSFORMER_LIB_MIRROR", "")
    monkeypatch.setattr("transformer_lib.corpora.downloads.open_url", no_network)
    names = {"__name__": "__main__"}
    with second_device() as device, as_it_was():
        monkeypatch.setenv("TRANSFORMER_LIB_DEVICE", device)
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            source = "".join(cell["source"])
            exercise = "exercise" in cell["metadata"].get("tags", [])
            if (
                cell["cell_type"] != "code"
                or exercise
                or re.search(r"%pip|import check_", source)
            ):
                continue
            tree = ast.parse(source)
            last = tree.body[-1] if tree.body else None
            if isinstance(last, ast.Expr):  # what a notebook would show
                shown = ast.Call(ast.Name("repr", ast.Load()), [last.value], [])
                last.value = ast.fix_missing_locations(ast.copy_location(shown, last))
            exec(compile(tree, f"{path.stem}, cell {cell['id']}", "exec"), names)
            plt.close("all")
    used = [getattr(x, "model", x) for x in names.values()]
    used = [x for x in used if isinstance(x, torch.nn.Module)]
    assert used and {x.device.type for x in used} == {device}


def untrained(names: dict) -> dict:
    """What the tests of chapter 16 are run on, after one update."""
    trials = Trials()
    model, _ = trials.train(trials.pairs, 1)
    runs = {"no causal mask": [model]}
    return vars(trials) | {"runs": runs, "healthy": model, "textwrap": textwrap}


def under_the_hood(names: dict) -> dict:
    """A cell of chapter 16's hood that decodes by hand."""
    hood = Path(__file__).parents[1] / "notebooks/under_the_hood/16_diagnosis.ipynb"
    (source,) = (cell for cell in code_of(hood) if "def by_hand(" in cell)
    names |= {"show_text": print}
    exec(compile(source, hood.stem, "exec"), names)
    return {}


BY_HAND = {  # cells, by words in them, that bring tensors to a model themselves
    "14_decoding": (
        decoding,
        [
            "asked = torch.tensor([[*",
            "import plot_beams, plot_table",
            "def source(*texts)",
            "so_far = []",
            "    src_ids = source(sentence)",
            "def cached_greedy",
            "class Prefix",
            "twice = Ensemble(",
            "start = torch.tensor([[BOS]]",
        ],
    ),
    "16_diagnosis": (
        diagnosis,
        [
            untrained,
            "def show_text(",
            'say("no causal mask", forced_and_free(',
            under_the_hood,
        ],
    ),
    "27_looking_inside": (
        looking_inside,
        [
            "L, H = model.config",
            "need_weights=True",
        ],
    ),
}


@pytest.mark.parametrize("stem", BY_HAND)
def test_cells_that_decode_by_hand_run_on_another_device(stem, monkeypatch):
    """Chapters 12, 20 and 28 have none: they call what is tested above."""
    plt.switch_backend("Agg")
    module, marks = BY_HAND[stem]
    (path,) = (path for path in NOTEBOOKS if path.stem == stem)
    code = [cell for cell in code_of(path) if not cell.startswith("#| export")]
    names = dict(vars(module))
    with second_device() as device, as_it_was():
        monkeypatch.setenv("TRANSFORMER_LIB_DEVICE", device)
        for mark in marks:
            if callable(mark):
                names |= mark(names)
                continue
            (source,) = (cell for cell in code if mark in cell)
            exec(compile(source, f"{stem}, {mark}", "exec"), names)
            plt.close("all")


def test_batches_that_travel_are_whole():
    batch = make_batch(token_pairs([([5, 6], [7]), ([8], [9, 10])]), range(2))
    with second_device() as device:
        there = batch.to(device)
        assert {x.device.type for x in (there.src_ids, there.tgt_in)} == {device}
        rows = vars(packed().to(device)).values()
        assert {x.device.type for x in rows if torch.is_tensor(x)} == {device}
        with pytest.raises(RuntimeError, match="two devices"):
            there.src_ids + pad([[1, 2, 3], [4]])[:, :3]
        with pytest.raises(TypeError, match="numpy"):
            there.src_ids.numpy()
