"""Chapter 14: searches against plain loops and all sentences, the cache, mistakes."""

import copy
import inspect
import itertools
import math
import re
import subprocess
import sys
from functools import partial

import pytest
import torch
from figures import check_figure, said, shown
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_lib.batches import pad
from transformer_lib.decoding import (
    CachedSteps,
    FullSteps,
    Hypothesis,
    beam_search,
    filter_logits,
    force_score,
    generate,
    greedy_decode,
    greedy_search,
    length_penalty,
    output_limits,
    search,
)
from transformer_lib.decoding.strategies import (
    NoRepeat,
    best_tokens,
    group_by_length,
)
from transformer_lib.exercises.decoding import (
    check_best_index,
    check_cut,
    check_guesses,
    check_log_probability,
    check_reorder,
    check_temperature,
)
from transformer_lib.figures.decoding import beam_figure, trace_beam
from transformer_lib.runs import load_pretrained, save_model
from transformer_lib.tokenizer import BOS, EOS, PAD
from transformer_lib.transformer import Transformer, TransformerConfig

VOCABULARY = 30
FEW = settings(max_examples=12)


@pytest.fixture(scope="module", params=["post-norm", "pre-norm, learned, untied"])
def model(request):
    torch.manual_seed(1)
    changes = {}
    if request.param != "post-norm":
        changes = {"norm_first": True, "positions": "learned", "tie_embeddings": False}
        changes |= {"attention_bias": True, "d_k": 5, "d_v": 7}
    config = TransformerConfig(
        VOCABULARY, 32, num_heads=4, num_layers=2, d_ff=64, **changes
    )
    model = Transformer(config)
    with torch.no_grad():  # sharper than at the start, so that rows end at all lengths
        model.output.weight.mul_(3)
    return model


@pytest.fixture(scope="module")
def trained():
    return load_pretrained("tatoeba-en-de")[:2]


@pytest.fixture(scope="module")
def sources(trained):
    texts = [
        "Tom is reading a book.",
        "I don't know what to say.",
        "My brother lives in Boston with his wife and two children.",
        "Help!",
        "She closed the door quietly.",
        "It has been raining since this morning, so we stayed at home.",
        "Why didn't you tell me that you were coming?",
        "",
    ]
    return [trained[1].encode(text) + [EOS] for text in texts]


def plainly(model, row, max_extra):
    """The definition: one sentence, the whole model at each step."""
    src_ids, out = torch.tensor([row]), []
    model.eval()
    while len(out) < len(row) - 1 + max_extra:
        logits = model(src_ids, torch.tensor([[BOS, *out]]))[0, -1].clone()
        logits[[PAD, BOS]] = -torch.inf  # never said
        best = int(logits.argmax())
        if best == EOS:
            break
        out.append(best)
    return out


rows = st.lists(st.integers(4, VOCABULARY - 1), min_size=0, max_size=7)


# --- greedy ---------------------------------------------------------------------------


@settings(max_examples=8)
@given(st.lists(rows, min_size=1, max_size=4), st.integers(0, 8))
def test_batch_equals_plain_loop(model, sentences, max_extra):
    sources = [row + [EOS] for row in sentences]
    got = greedy_decode(model, pad(sources), max_extra)
    assert got == [plainly(model, row, max_extra) for row in sources]
    for row, ids in zip(sources, got, strict=True):
        assert len(ids) <= len(row) - 1 + max_extra
        assert not {EOS, PAD, BOS} & set(ids)


@pytest.mark.parametrize("decode", [greedy_decode, beam_search])
def test_model_is_left_as_it_was(model, decode):
    model.train()
    src_ids = torch.tensor([[5, 6, 7, EOS]])
    assert decode(model, src_ids) == decode(model, src_ids)  # dropout is off
    assert model.training
    with pytest.raises(ValueError, match="ids"):  # and after an error
        decode(model, torch.tensor([[VOCABULARY + 5, EOS]]))
    assert model.training


def test_limits(model):
    ids = torch.tensor([[5, 6, EOS], [5, EOS, PAD]])
    assert output_limits(ids, 50).tolist() == [52, 51]
    with pytest.raises(ValueError, match="max_extra=-1"):
        output_limits(ids, -1)
    with pytest.raises(ValueError, match="source 1 has no tokens"):
        output_limits(torch.tensor([[5, EOS], [PAD, PAD]]), 50)
    with pytest.raises(ValueError, match="2 sources and 1 outputs"):
        force_score(model, ids, [[5]])


WRONG = {
    "beam_size=0": (0, 1, 0.6),
    "beam_size=-1": (-1, 1, 0.6),
    "beam_size=100000": (100_000, 1, 0.6),
    "n_best=5": (4, 5, 0.6),
    "n_best=0": (4, 0, 0.6),
    "alpha=-1": (4, 1, -1),
    "alpha=nan": (4, 1, math.nan),
    "alpha=inf": (4, 1, math.inf),
}


@pytest.mark.parametrize("telling", WRONG)
def test_settings_of_every_search(model, telling):
    """Also of one whose steps come from elsewhere, and before a step is made."""
    beam_size, n_best, alpha = WRONG[telling]
    with pytest.raises(ValueError, match=telling):
        beam_search(model, torch.tensor([[5, EOS]]), beam_size, alpha, n_best=n_best)
    with pytest.raises(ValueError, match=telling):
        search(None, torch.tensor([3]), beam_size, alpha, n_best)


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize(
    "decode", [greedy_decode, beam_search, partial(beam_search, beam_size=1)]
)
def test_logits_that_are_no_numbers(model, decode, number):
    """One damaged weight is enough; no token is chosen then."""
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.decoder.layers[-1].feed_forward.w_2.bias[0] = number
    with pytest.raises(FloatingPointError, match="NaN or infinite"):
        decode(broken, torch.tensor([[5, 6, EOS], [5, EOS, PAD]]))


def test_best_tokens_breaks_ties_by_id():
    torch.manual_seed(0)
    for _ in range(50):
        logits = torch.randint(4, (3, 2, 11)).float()  # many ties
        values, ids = best_tokens(logits, 5)
        wanted = logits.sort(dim=-1, descending=True, stable=True)
        assert torch.equal(values, wanted[0][..., :5])
        assert torch.equal(ids, wanted[1][..., :5])
    assert best_tokens(torch.zeros(1, 3), 9)[1].tolist() == [[0, 1, 2]]


# --- the cache ------------------------------------------------------------------------


@FEW
@given(
    st.lists(rows, min_size=1, max_size=4),
    st.lists(st.integers(1, 4), min_size=1, max_size=8),
    st.integers(0, 10**6),
)
def test_cached_steps_equal_full_steps(model, sentences, widths, seed):
    """Random tokens, parents, beam widths, and sentences that leave."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high, *shape):
        return torch.randint(high, shape, generator=generator)

    src_ids, k = pad([row + [EOS] for row in sentences]), 1
    model.eval()
    with torch.inference_mode():
        steps = [FullSteps(model, src_ids), CachedSteps(model, src_ids)]
        steps[1].prune_at = 5  # soon and often
        size = len(src_ids)
        for width in widths:
            parents, tokens = draw(k, size, width), draw(VOCABULARY, size, width)
            k = width
            full, cached = (s.step(tokens, parents) for s in steps)
            torch.testing.assert_close(cached, full, atol=1e-5, rtol=1e-5)
            if size > 1 and draw(3, 1) == 0:
                size -= 1
                for s in steps:
                    s.keep(torch.arange(size) + 1)


def test_cached_equals_uncached_on_a_trained_model(trained, sources):
    model, src_ids = trained[0], pad(sources)
    limits = output_limits(src_ids, 50)
    with torch.inference_mode():
        assert greedy_search(FullSteps(model, src_ids), limits) == greedy_decode(
            model, src_ids
        )
        slow = search(FullSteps(model, src_ids[:5]), limits[:5], n_best=2)
    fast = beam_search(model, src_ids[:5], n_best=2)
    for a, b in zip(slow, fast, strict=True):
        assert [h.ids for h in a] == [h.ids for h in b]
        for x, y in zip(a, b, strict=True):
            assert x.log_prob == pytest.approx(y.log_prob, abs=1e-5, rel=1e-5)


def test_cache_forgets_dead_branches(trained, sources):
    """After many steps of one beam's offspring the tree is little more than a line."""
    src_ids = pad(sources[:2])
    with torch.inference_mode():
        steps = CachedSteps(trained[0], src_ids)
        tokens = torch.full((2, 1), BOS)
        for t in range(200):
            steps.step(tokens, torch.zeros_like(tokens))
            tokens = torch.full((2, 4), 5 + t)
    assert steps.length == 200 and steps.caches[0].length < 500  # of 797 read


# --- beam search on a trained model ---------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_score_is_that_of_a_forced_pass(trained, sources, alpha):
    model, src_ids = trained[0], pad(sources)
    found = beam_search(model, src_ids, alpha=alpha, n_best=3)
    for place in range(3):
        ids = [h[min(place, len(h) - 1)].ids for h in found]
        for h, forced in zip(found, force_score(model, src_ids, ids), strict=True):
            h = h[min(place, len(h) - 1)]
            assert h.log_prob == pytest.approx(forced, abs=1e-5, rel=1e-6)
            penalty = length_penalty(len(h.ids) + 1, alpha)
            assert h.score == pytest.approx(forced / penalty, abs=1e-5)
    for hypotheses in found:
        scores = [h.score for h in hypotheses]
        assert scores == sorted(scores, reverse=True)
        assert len({tuple(h.ids) for h in hypotheses}) == len(hypotheses)


def test_batch_of_one_equals_batch_of_many(trained, sources):
    model = trained[0]
    together = beam_search(model, pad(sources), n_best=2)
    wider = torch.nn.functional.pad(pad(sources), (0, 9), value=PAD)
    order = torch.randperm(len(sources), generator=torch.Generator().manual_seed(0))
    shuffled = beam_search(model, wider[order], n_best=2)
    alone = [beam_search(model, torch.tensor([row]), n_best=2)[0] for row in sources]
    for other in (alone, [shuffled[i] for i in order.argsort().tolist()]):
        for a, b in zip(together, other, strict=True):
            assert [h.ids for h in a] == [h.ids for h in b]
            for x, y in zip(a, b, strict=True):
                assert x.log_prob == pytest.approx(y.log_prob, abs=1e-5, rel=1e-5)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.5])
def test_beam_of_one_is_greedy(trained, sources, alpha):
    src_ids = pad(sources)
    for max_extra in (0, 2, 50):
        found = beam_search(trained[0], src_ids, 1, alpha, max_extra)
        assert [h.ids for (h,) in found] == greedy_decode(
            trained[0], src_ids, max_extra
        )


def test_beam_is_seldom_less_probable_than_greedy(trained, sources):
    model, src_ids = trained[0], pad(sources)
    greedy = force_score(model, src_ids, greedy_decode(model, src_ids))
    beam = [h[0].log_prob for h in beam_search(model, src_ids, alpha=0.0)]
    assert sum(beam) > sum(greedy) - 1e-6


def test_forced_end_is_scored(trained, sources):
    """At the limit the end symbol comes at any price, and the price is in the score."""
    model, src_ids = trained[0], pad(sources)
    found = beam_search(model, src_ids, max_extra=0)
    limits = output_limits(src_ids, 0).tolist()
    best = [h[0] for h in found]
    for h, forced, limit in zip(
        best, force_score(model, src_ids, [h.ids for h in best]), limits, strict=True
    ):
        assert len(h.ids) <= limit
        assert h.log_prob == pytest.approx(forced, abs=1e-5, rel=1e-6)
    only_end = beam_search(model, torch.tensor([[EOS]]), max_extra=0, n_best=4)
    (nothing,) = only_end[0]  # one sentence is possible: the empty one
    assert nothing.ids == [] and nothing.score == pytest.approx(nothing.log_prob)
    assert greedy_decode(model, torch.tensor([[EOS]]), max_extra=0) == [[]]


def test_a_model_that_never_ends(model):
    def forbid(module, inputs, logits):
        return logits.index_fill(-1, torch.tensor([EOS]), -torch.inf)

    hook = model.output.register_forward_hook(forbid)
    src_ids = torch.tensor([[5, 6, EOS], [7, EOS, PAD]])
    found = beam_search(model, src_ids, max_extra=3)
    greedy = greedy_decode(model, src_ids, max_extra=3)
    hook.remove()
    assert [len(h[0].ids) for h in found] == [len(ids) for ids in greedy] == [5, 4]
    assert all(h[0].log_prob == -math.inf for h in found)


@settings(max_examples=10)
@given(st.lists(rows, min_size=1, max_size=4), st.integers(1, 5), st.floats(0, 2))
def test_any_setting_gives_sentences(model, sentences, beam_size, alpha):
    src_ids = pad([row + [EOS] for row in sentences])
    found = beam_search(model, src_ids, beam_size, alpha, 6, n_best=beam_size)
    assert len(found) == len(sentences)
    for hypotheses, limit in zip(
        found, output_limits(src_ids, 6).tolist(), strict=True
    ):
        assert 1 <= len(hypotheses) <= beam_size
        for h in hypotheses:
            assert isinstance(h, Hypothesis) and len(h.ids) <= limit
            assert not {EOS, PAD, BOS} & set(h.ids)
            assert h.log_prob <= 0


# --- tables: every sentence is known --------------------------------------------------


class Table:
    """Next-token probabilities by beginning; steps for some sentences of it."""

    def __init__(self, tables, words):
        self.tables, self.size = tables, 4 + words
        self.past = [[()] for _ in tables]

    def step(self, tokens, parents):
        self.past = [
            [past[p] + (t,) * (t != BOS) for t, p in zip(*pair, strict=True)]
            for past, *pair in zip(
                self.past, tokens.tolist(), parents.tolist(), strict=True
            )
        ]
        return torch.stack(
            [
                torch.stack([row(table, past, self.size) for past in beams])
                for table, beams in zip(self.tables, self.past, strict=True)
            ]
        )

    def keep(self, rows):
        self.past = [self.past[i] for i in rows.tolist()]
        self.tables = [self.tables[i] for i in rows.tolist()]


def row(table, past, size):
    """Log-probabilities after a beginning: from a table, or drawn by its seed."""
    logits = torch.full((size,), -torch.inf)
    if isinstance(table, dict):
        for token, p in table.get(past, {EOS: 1.0}).items():
            logits[token] = math.log(p)
        return logits
    seed, sharpness = table
    generator = torch.Generator().manual_seed(hash((seed, past)) % 2**31)
    logits = torch.randn(size, generator=generator) * sharpness
    logits[[PAD, BOS, 1]] = -torch.inf
    return logits.log_softmax(dim=-1)


def everything(table, words, limit):
    """All sentences of up to so many tokens, with their log-probabilities."""
    for length in range(limit + 1):
        for ids in itertools.product(range(4, 4 + words), repeat=length):
            total = 0.0
            for t, token in enumerate((*ids, EOS)):
                total += float(row(table, ids[:t], 4 + words)[token])
            yield list(ids), total


A, B, C, D = 4, 5, 6, 7
GREEDY_FAILS = {  # the best first word is not that of the best sentence
    (): {A: 0.6, B: 0.4},
    (A,): {C: 0.5, D: 0.5},
    (B,): {C: 0.9, D: 0.1},
}
LONGER_WINS = {  # a short sentence is found first; with the penalty a longer one wins
    (): {A: 0.45, B: 0.55},
    (A,): {EOS: 1.0},
    (B,): {C: 0.9, D: 0.1},
    (B, C): {D: 0.9, A: 0.1},
    (B, C, D): {EOS: 0.9, A: 0.1},
}


def first(table, **kwargs):
    ((best,),) = search(Table([table], 4), torch.tensor([6]), **kwargs)
    return best


@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_beam_finds_what_greedy_misses(alpha):
    limits = torch.tensor([6])
    assert greedy_search(Table([GREEDY_FAILS], 4), limits) == [[A, C]]
    assert first(GREEDY_FAILS, beam_size=1, alpha=alpha).ids == [A, C]
    best = first(GREEDY_FAILS, beam_size=2, alpha=alpha)
    assert best.ids == [B, C] and best.log_prob == pytest.approx(math.log(0.36))
    assert best.score == pytest.approx(math.log(0.36) / (8 / 6) ** alpha)


def test_stopping_waits_for_the_longer_one():
    assert first(LONGER_WINS, beam_size=2, alpha=0.0).ids == [A]
    assert first(LONGER_WINS, beam_size=2, alpha=0.6).ids == [B, C, D]


def test_ties_are_decided_by_id():
    even = {(): {D: 0.25, A: 0.25, C: 0.25, B: 0.25}}
    found = search(Table([even], 4), torch.tensor([3]), 4, 0.6, n_best=4)[0]
    assert [h.ids for h in found] == [[A], [B], [C], [D]]


tables = st.tuples(st.integers(0, 10**6), st.sampled_from([0.5, 1.5, 3.0]))


@FEW
@given(tables, st.sampled_from([0.0, 0.6, 1.0, 2.0]), st.integers(0, 3))
def test_large_beam_is_exhaustive(table, alpha, limit):
    ranked = sorted(
        (-p / length_penalty(len(ids) + 1, alpha), p, ids)
        for ids, p in everything(table, 3, limit)
    )
    found = search(Table([table], 3), torch.tensor([limit]), 200, alpha, n_best=3)[0]
    assert len(found) == min(3, len(ranked))
    for h, (score, log_p, ids) in zip(found, ranked, strict=False):
        assert h.ids == ids
        assert h.log_prob == pytest.approx(log_p, abs=1e-5)
        assert h.score == pytest.approx(-score, abs=1e-5)


def without_stopping(table, words, limit, beam_size, alpha, n_best):
    """The same beam, in plain Python, run to the limit: no bound, nothing dropped."""
    alive, found = [((), 0.0)], []
    for t in range(limit + 1):
        everywhere = []
        for past, p in alive:
            for token, q in enumerate(row(table, past, 4 + words).tolist()):
                if q > -math.inf:
                    everywhere.append((p + min(q, 0.0), past, token))
        everywhere.sort(key=lambda c: -c[0])
        ends = [c for c in everywhere if c[2] == EOS]
        if t < limit:
            ends = [c for c in everywhere[:beam_size] if c[2] == EOS]
        for p, past, _ in ends:
            found.append((p / length_penalty(t + 1, alpha), list(past)))
        goes_on = [c for c in everywhere if c[2] != EOS]
        alive = [((*past, token), p) for p, past, token in goes_on[:beam_size]]
    return sorted(found, key=lambda f: -f[0])[:n_best]


@FEW
@given(
    st.lists(tables, min_size=1, max_size=3),
    st.sampled_from([0.0, 0.6, 1.0]),
    st.integers(2, 4),
    st.integers(1, 2),
    st.integers(0, 7),
)
def test_stopping_early_misses_nothing(few, alpha, beam_size, n_best, limit):
    limits = torch.tensor([max(0, limit - i) for i in range(len(few))])
    found = search(Table(few, 3), limits, beam_size, alpha, n_best)
    for table, hypotheses, end in zip(few, found, limits.tolist(), strict=True):
        wanted = without_stopping(table, 3, end, beam_size, alpha, n_best)
        assert [h.ids for h in hypotheses] == [ids for _, ids in wanted]
        for h, (score, _) in zip(hypotheses, wanted, strict=True):
            assert h.score == pytest.approx(score, abs=1e-5)


@settings(max_examples=100)
@given(st.lists(st.integers(1, 30)), st.integers(1, 90), st.integers(1, 7))
def test_groups_hold_each_once_and_keep_the_budget(lengths, tokens, sentences):
    groups = group_by_length(lengths, tokens, sentences)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        width = max(lengths[i] for i in group)
        assert len(group) == 1 or len(group) * width <= tokens
        assert len(group) <= sentences


# --- drawing, no run twice, one method for all ----------------------------------------


def hugging_face(logits, temperature, top_k, top_p):
    from transformers.generation import (
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    out = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        out = TopKLogitsWarper(top_k)(None, out)
    return TopPLogitsWarper(top_p)(None, out) if top_p < 1 else out


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([0.5, 1.0, 1.7]),
    st.integers(0, 12),
    st.sampled_from([0.1, 0.35, 0.5, 0.9, 0.99, 1.0]),
)
def test_filters_equal_hugging_face(seed, temperature, top_k, top_p):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 9, generator=generator, dtype=torch.float64) * 2
    got = filter_logits(logits, temperature, top_k, top_p)
    torch.testing.assert_close(got, hugging_face(logits, temperature, top_k, top_p))


def test_filters_by_hand():
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    assert filter_logits(logits, top_k=2).isfinite().tolist() == [0, 1, 0, 1]
    assert filter_logits(logits, top_p=0.6).isfinite().tolist() == [0, 1, 0, 1]
    assert filter_logits(logits, top_p=0.4).isfinite().tolist() == [0, 1, 0, 0]
    assert filter_logits(logits, top_p=0.8).isfinite().tolist() == [0, 1, 1, 1]
    tied = filter_logits(torch.tensor([1.0, 1.0, 1.0, 0.0]), top_k=2)
    assert tied.isfinite().tolist() == [1, 1, 1, 0]
    for wrong in ({"temperature": 0.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
            filter_logits(logits, **wrong)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_forbidden_tokens_are_hugging_faces(size):
    """What the wrapper takes away is what transformers takes away, for each beam."""
    from transformers.generation import NoRepeatNGramLogitsProcessor

    theirs = NoRepeatNGramLogitsProcessor(size)
    torch.manual_seed(size)
    said = torch.randint(4, 9, (6, 14))
    logits = torch.randn(6, 9)

    class Fixed:
        def step(self, tokens, parents):
            return logits.view(2, 3, 9)

    steps, parents = NoRepeat(Fixed(), size), torch.arange(3).expand(2, -1)
    for t in range(14):
        ours = steps.step(said[:, t].view(2, 3), parents)
        wanted = theirs(said[:, : t + 1], logits.log_softmax(-1)).isinf()
        got = ours.view(6, 9)
        assert torch.equal(got[:, 1:].isinf(), wanted[:, 1:])
        kept = ~wanted & (torch.arange(9) != PAD)
        gap = (got.log_softmax(-1) - logits.log_softmax(-1))[kept].abs().max()
        assert gap < 1e-5  # what may be said keeps its probability


def runs_of(ids, size):
    return [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]


@pytest.mark.parametrize("size", [1, 2])
def test_no_run_comes_twice(model, size):
    torch.manual_seed(5)
    src_ids = torch.randint(4, VOCABULARY, (4, 8))
    src_ids[:, -1] = EOS
    settings = {"max_extra": 15, "no_repeat_ngram_size": size}
    found = beam_search(model, src_ids, 3, 0.0, n_best=2, **settings)
    outputs = [hypothesis.ids for row in found for hypothesis in row]
    outputs += greedy_decode(model, src_ids, **settings)
    outputs += model.generate(src_ids, sample=True, **settings)
    for ids in outputs:
        assert len(set(runs_of(ids, size))) == len(runs_of(ids, size))
    best = [row[0] for row in found]
    forced = force_score(model, src_ids, [hypothesis.ids for hypothesis in best])
    assert [h.log_prob for h in best] == pytest.approx(forced, abs=1e-3)
    with pytest.raises(ValueError, match="no_repeat_ngram_size=-1"):
        model.generate(src_ids, no_repeat_ngram_size=-1)


def test_generate_is_each_of_the_searches(trained, sources):
    model, src_ids = trained[0], pad(sources[:5])
    greedy = greedy_decode(model, src_ids)
    found = beam_search(model, src_ids)
    assert model.generate(src_ids) == [best.ids for best, *_ in found]
    assert model.generate(src_ids, beam_size=1) == greedy
    assert model.generate(src_ids, sample=True, top_k=1) == greedy
    assert model.generate(src_ids, sample=True, temperature=1e-4) == greedy
    draws = [
        model.generate(src_ids, sample=True, generator=torch.Generator().manual_seed(i))
        for i in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]
    for wrong in ({"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.5}):
        with pytest.raises(ValueError, match="need sample=True"):
            model.generate(src_ids, **wrong)


def test_drawing_follows_the_models_probabilities(model):
    src_ids = torch.tensor([[7, 8, EOS]]).expand(3000, -1)
    generator = torch.Generator().manual_seed(3)
    drawn = model.generate(src_ids, sample=True, max_extra=0, generator=generator)
    first = torch.tensor([(row or [EOS])[0] for row in drawn])
    counts = torch.bincount(first, minlength=VOCABULARY)
    with torch.no_grad():
        model.eval()
        logits = model(src_ids[:1], torch.tensor([[BOS]]))[0, -1]
        model.train()
    logits[[PAD, BOS]] = -torch.inf
    for count, p in zip(counts.tolist(), logits.softmax(-1).tolist(), strict=True):
        assert abs(count - 3000 * p) < 5 * math.sqrt(3000 * p * (1 - p)) + 3


def test_the_class_has_its_methods_when_nothing_else_was_imported():
    """They say what they take and give, and ask later chapters only when called."""
    code = """if True:
        import sys, torch
        from transformer_lib.transformer import Transformer
        assert not {"runs", "decoding"} & {n.split(".")[-1] for n in sys.modules}
        for name in ("from_pretrained", "save_pretrained", "generate"):
            print(getattr(Transformer, name).__annotations__["return"])
        model = Transformer.from_pretrained(device="cpu")
        print(len(model.generate(torch.tensor([[7, 8, 3]]), beam_size=1)))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    wanted = "Transformer\n<class 'pathlib.Path'>\nlist[list[int]]\n1\n"
    assert done.stdout.replace("pathlib._local", "pathlib") == wanted, done.stderr


@pytest.mark.parametrize(
    "method, function",
    [(Transformer.generate, generate), (Transformer.save_pretrained, save_model)],
)
def test_a_method_takes_what_its_function_takes(method, function):
    """Names, order and defaults; only the model is called self."""
    one, other = (inspect.signature(f).parameters for f in (method, function))
    assert [*one][1:] == [*other][1:]
    assert [p.default for p in one.values()] == [p.default for p in other.values()]


# --- the tree -------------------------------------------------------------------------


def ids_of(tree, t, i):
    """The tokens on the way to a candidate."""
    found = []
    while t:
        found.append(tree[t][i].token)
        t, i = t - 1, tree[t][i].parent
    return found[::-1]


def finished(tree):
    """(score, log-probability, ids) of each finished candidate, best first."""
    ends = [
        (c.score, c.log_prob, ids_of(tree, t, i)[:-1])
        for t, level in enumerate(tree)
        for i, c in enumerate(level)
        if c.fate == "finished"
    ]
    return sorted(ends, key=lambda end: -end[0])


@FEW
@given(rows, st.integers(1, 4), st.sampled_from([0.0, 0.6, 1.5]))
def test_tree_is_that_of_the_search(model, row, beam_size, alpha):
    """What stayed in the beam, what won, and the probabilities of whole sentences."""
    src_ids = torch.tensor([[*row, EOS]])
    tree = trace_beam(model, src_ids, beam_size, alpha, max_extra=4)
    ((best,),) = beam_search(model, src_ids, beam_size, alpha, max_extra=4)
    ends = finished(tree)
    assert ends[0][2] == best.ids
    assert ends[0][:2] == pytest.approx((best.score, best.log_prob), abs=1e-4)
    wanted = force_score(model, src_ids.expand(len(ends), -1), [end[2] for end in ends])
    assert [end[1] for end in ends] == pytest.approx(wanted, abs=1e-3)
    for t, level in enumerate(tree[1:], start=1):
        alive = [c for c in level if c.fate == "alive"]
        assert len(alive) <= beam_size and level == sorted(
            level, key=lambda c: -c.log_prob
        )
        for c in level:
            assert tree[t - 1][c.parent].fate == "alive"
            assert c.log_prob <= tree[t - 1][c.parent].log_prob + 1e-9
            penalty = ((5 + t) / 6) ** alpha
            assert c.score == pytest.approx(c.log_prob / penalty)
            assert (c.token == EOS) or c.fate != "finished"


def test_tree_is_for_one_sentence(model):
    with pytest.raises(ValueError, match="src_ids has 2 sentences"):
        trace_beam(model, torch.tensor([[5, EOS], [6, EOS]]))


@pytest.fixture(scope="module")
def beam_view(trained):
    model, tokenizer = trained
    src_ids = torch.tensor([tokenizer.encode("The train was late again.") + [EOS]])
    trees = {size: trace_beam(model, src_ids, size) for size in (1, 2, 3, 4)}
    return trees, beam_figure(trees, tokenizer.processor.id_to_piece), tokenizer


def test_beam_figure_grows(browser, beam_view, tmp_path):
    """Back, next, slider, beam size; each node says its two numbers and its fate."""
    trees, figure, tokenizer = beam_view
    check_figure(browser, tmp_path, figure)
    told = {
        "alive": "stays in the beam",
        "finished": "is finished",
        "hopeless": "could not win",
        "cut": "not among the best",
    }
    with shown(browser, tmp_path, figure, width=1100) as page:
        back, forth = (page.get_by_role("button", name=n) for n in ("back", "next"))

        def check(size, step):
            tree = trees[size]
            nodes = page.locator("svg g").evaluate_all(
                "all => all.map(g => [g.getAttribute('class'), g.dataset.say])"
            )
            wanted = [
                (t, i, c)
                for t, level in enumerate(tree[: step + 1])
                for i, c in enumerate(level)
            ]
            assert len(nodes) == len(wanted)
            lines = page.locator(".stage svg path").count()
            assert lines == len(nodes) - 1  # a tree
            on = {
                (t, i)
                for t, i, c in wanted
                if c.fate == "finished" or (c.fate == "alive" and t == step)
            }
            for t, i in list(on):
                while t:
                    t, i = t - 1, tree[t][i].parent
                    on.add((t, i))
            for (kind, say), (t, i, c) in zip(nodes, wanted, strict=True):
                assert ("pale" in kind.split()) == ((t, i) not in on)
                assert ("finished" in kind.split()) == (c.fate == "finished")
                if t:
                    numbers = [float(x) for x in re.findall(r"-?\d+\.\d\d", say)]
                    assert numbers == pytest.approx([c.log_prob, c.score], abs=6e-3)
                    assert told[c.fate] in say and f"for {t} token" in say
                    assert ("end symbol" in say) == (c.token == EOS)
                    said_text = re.match("“(.*)”", say)[1]
                    ids = [token for token in ids_of(tree, t, i) if token != EOS]
                    pieces = "".join(tokenizer.processor.id_to_piece(x) for x in ids)
                    assert said_text == pieces.replace("▁", " ").strip()

        check(4, 3)
        forth.click()
        check(4, 4)
        back.focus()
        page.keyboard.press("Enter")
        page.keyboard.press("Enter")
        check(4, 2)
        slider = page.get_by_role("slider", name="step")
        slider.focus()
        page.keyboard.press("End")
        last = len(trees[4]) - 1
        check(4, last)
        assert forth.is_disabled() and not back.is_disabled()
        best = tokenizer.decode(finished(trees[4])[0][2])
        assert f"the winner is “{best}”" in said(page)
        winners = page.locator("svg g.wins").count()
        assert winners == len(finished(trees[4])[0][2]) + 2  # start and end symbol
        page.get_by_role("button", name="beam size 1").click()
        check(1, len(trees[1]) - 1)
        assert all(sum(c.fate == "alive" for c in level) <= 1 for level in trees[1])
        page.keyboard.press("Tab")
        slider.focus()
        page.keyboard.press("Home")
        assert back.is_disabled() and "Nothing is written yet" in said(page)


# --- exercises ------------------------------------------------------------------------


def scatter(keys, parents):
    out = keys.clone()
    out[parents] = keys
    return out


def guessed(prefix=True, surplus=None, last=-1):
    """An answer to exercise 14.6, right but for what is said."""

    def keep_guesses(guesses, p, q, chances):
        stays = [
            chances[i] < p[i, token] / q[i, token] for i, token in enumerate(guesses)
        ]
        kept = sum(stays) if all(stays) or not prefix else stays.index(False)
        if kept == len(guesses):
            return kept, p[last]
        if surplus:
            return kept, surplus(p[kept], q[kept])
        more = (p[kept] - q[kept]).clamp(min=0)
        return kept, more / more.sum()

    return keep_guesses


def ranked(key):
    def best_index(log_probs, lengths, alpha):
        scores = [key(p, n, alpha) for p, n in zip(log_probs, lengths, strict=True)]
        return scores.index(max(scores))

    return best_index


@pytest.mark.parametrize(
    "check, wrong, telling",
    [
        (check_cut, lambda ids: [i for i in ids if i != 3], "removed the end symbols"),
        (check_cut, lambda ids: ids[: ids.index(3) + 1], "kept the end symbol"),
        (check_cut, lambda ids: ids[: len(ids) - 1], "last end symbol"),
        (
            check_log_probability,
            lambda logits, target: logits.gather(-1, target[:, None]).sum(),
            "added the logits",
        ),
        (
            check_log_probability,
            lambda logits, y: logits.log_softmax(0).gather(-1, y[:, None]).sum(),
            "over the positions",
        ),
        (
            check_log_probability,
            lambda logits, y: logits.log_softmax(-1).gather(-1, y[:, None]).mean(),
            "the mean",
        ),
        (
            check_log_probability,
            lambda logits, y: logits.softmax(-1).gather(-1, y[:, None]).prod(),
            "gave the probability",
        ),
        (check_temperature, lambda x, t: x.softmax(-1) / t, "before the softmax"),
        (check_temperature, lambda x, t: (x * t).softmax(-1), "multiplied"),
        (check_temperature, lambda x, t: x.softmax(-1), "changed nothing"),
        (check_best_index, ranked(lambda p, n, a: p), "log-probability alone"),
        (check_best_index, ranked(lambda p, n, a: p / n**a), "not the paper's penalty"),
        (
            check_best_index,
            ranked(lambda p, n, a: -p / ((5 + n) / 6) ** a),
            "the lowest score",
        ),
        (check_reorder, lambda keys, parents: keys, "stale"),
        (check_reorder, lambda keys, parents: keys[:, parents], "reordered the heads"),
        (check_reorder, scatter, "wrote rows to their parents' places"),
        (check_guesses, guessed(prefix=False), "guessed for another text"),
        (check_guesses, guessed(surplus=lambda p, q: p), "draw from p"),
        (check_guesses, guessed(surplus=lambda p, q: p - q), "negative"),
        (
            check_guesses,
            guessed(surplus=lambda p, q: (p - q).clamp(min=0)),
            "divide them by their sum",
        ),
        (check_guesses, guessed(last=0), "last row of p"),
    ],
)
def test_mistakes_are_named(check, wrong, telling):
    verdict = check(wrong)
    assert not verdict.passed
    assert telling in verdict.message
