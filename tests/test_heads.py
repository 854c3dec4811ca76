"""Chapter 27: what heads follow, and whether it matters when they are changed."""

import copy
import hashlib
import random

import looked_inside
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from looked_inside import FEW, PAIRS

from transformer_lib import heads, looking_inside
from transformer_lib.decoding import greedy_decode
from transformer_lib.grammar import _ADJECTIVES, _NOUNS, _PRONOUNS
from transformer_lib.heads import (
    _link_gains,
    _loss_and_choices,
    _possessives,
    _rank_correlation,
    _relation_sentence,
    _shuffled,
    _split_verbs,
    _token_log_probs,
    _uniform,
    _words_of,
    _zeroed,
    altered,
    effect_of_words,
    most_attended,
    weigh_heads,
)
from transformer_lib.looking_inside import (
    _attentions,
    look,
    watching,
)
from transformer_lib.runs import _find_pretrained, read_evidence
from transformer_lib.tokenizer import BOS, EOS
from transformer_lib.transformer import Transformer, TransformerConfig

small = looked_inside.small
trained = looked_inside.trained


@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
def test_zeroed_head_equals_a_model_without_it(small, kind):
    """Zero weights of a head are zero columns of the last matrix, cache included."""
    without = copy.deepcopy(small)
    columns = slice(2 * 8, 3 * 8)  # head 2 of 4, 8 wide
    with torch.no_grad():
        _attentions(without, kind)[1].w_o.weight[:, columns] = 0
    src_ids, tgt_ids = torch.tensor([[5, 6, 8, EOS]]), torch.tensor([[BOS, 7, 9]])
    see = altered(kind, 1, 2, _zeroed)
    got = _token_log_probs(small, src_ids, tgt_ids, see)[0]
    wanted = without(src_ids, tgt_ids).log_softmax(-1)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(got, small(src_ids, tgt_ids).log_softmax(-1), atol=1e-4)
    with watching(small, see):
        assert greedy_decode(small, src_ids, 5) == greedy_decode(without, src_ids, 5)


@FEW
@given(st.integers(0, 10**6), st.booleans())
def test_uniform_and_shuffled_stay_within_what_is_allowed(seed, causal):
    torch.manual_seed(seed)
    allowed = torch.ones(2, 3, 5, 5, dtype=torch.bool)
    allowed = allowed.tril() if causal else allowed & (torch.rand(2, 1, 1, 5) < 0.6)
    weights = torch.rand(2, 3, 5, 5) * allowed
    same = _uniform(weights, allowed)
    assert (same[~allowed] == 0).all()
    counts = allowed.sum(-1, keepdim=True)
    torch.testing.assert_close(same[allowed], (1 / counts).expand_as(same)[allowed])
    other = _shuffled(weights, allowed)
    assert (other[~allowed] == 0).all()
    assert torch.equal(other.sort(dim=-1)[0], weights.sort(dim=-1)[0])


def test_shuffled_does_shuffle():
    torch.manual_seed(0)
    weights = torch.rand(1, 1, 200, 6)
    other = _shuffled(weights, torch.ones_like(weights, dtype=torch.bool))
    moved = (other.argmax(-1) != weights.argmax(-1)).float().mean()
    assert 0.75 < moved < 0.92  # 5 in 6 are expected


def test_weigh_heads_and_losses(trained):
    model, tokenizer = trained
    batches = list(looking_inside._encode_pairs(tokenizer, PAIRS))
    loss, choices = _loss_and_choices(model, batches)
    nll = count = 0
    for source, target in PAIRS:  # the loss by torch, one pair at a time
        tgt = tokenizer.encode(target)
        src_ids = torch.tensor([tokenizer.encode(source) + [EOS]])
        logits = model(src_ids, torch.tensor([[BOS, *tgt]]))[0]
        nll += float(torch.nn.functional.cross_entropy(
            logits, torch.tensor([*tgt, EOS]), reduction="sum"
        ).detach())  # fmt: skip
        count += len(tgt) + 1
    assert loss == pytest.approx(nll / count, rel=1e-4) and len(choices) == count
    table = weigh_heads(model, tokenizer, PAIRS, ["zeroed"])
    L, H = model.config.num_layers, model.config.num_heads
    places = {(row["kind"], row["layer"], row["head"]) for row in table}
    assert len(table) == len(places) == 3 * L * (H + 1)
    groups = [row["rise"] for row in table if row["head"] is None]
    single = [row["rise"] for row in table if row["head"] is not None]
    assert max(groups) > 2 * max(single)  # a layer is worth more than a head
    assert all(r["loss"] - r["rise"] == pytest.approx(loss, abs=1e-6) for r in table)


def test_any_number_of_layers_and_heads(trained):
    """Nothing here knows how deep the model is that ships, or how many heads it has."""
    tokenizer = trained[1]
    config = TransformerConfig(
        tokenizer.vocab_size, 32, num_heads=8, num_layers=3, d_ff=48
    )
    torch.manual_seed(5)
    other = Transformer(config).eval()
    rows = weigh_heads(other, tokenizer, PAIRS, ["uniform"])
    assert len({(r["kind"], r["layer"], r["head"]) for r in rows}) == 3 * 3 * 9
    assert most_attended(other, tokenizer, PAIRS[0][0]).shape == (3, 8, 5)
    stats = looking_inside.head_statistics(other, tokenizer, PAIRS)
    assert all(x.shape == (3, 8) for part in stats.values() for x in part.values())
    pair = look(other, tokenizer, *PAIRS[0])
    assert len(pair.aligned(2, 7)[1]) == len(pair.aligned(0)[1]) == 5
    moved = effect_of_words(other, tokenizer, *PAIRS[0])
    assert moved.shape[1] == 5


def test_the_record_says_what_the_chapter_says(trained):
    L, H = trained[0].config.num_layers, trained[0].config.num_heads
    record = read_evidence("attention-heads")
    found = {(r["kind"], r["layer"], r["head"], r["change"]): r for r in record["rows"]}
    assert len(found) == len(record["rows"]) == 3 * L * (H + 1) * 3
    assert {"hardware", "commit", "date"} <= record["environment"].keys()
    assert record["command"] == heads._RECORD_COMMAND and record["seconds"] > 0
    weights = _find_pretrained("tatoeba-en-de") / "weights.safetensors"
    same = hashlib.sha256(weights.read_bytes()).hexdigest() == record["weights_sha256"]
    assert same, "The record is of another model: make it again."
    assert len(record["data"]["sha256"]) == 64 and record["seed"] == 0
    for row in record["rows"]:
        assert row["rise"] == pytest.approx(row["loss"] - record["loss"], abs=1e-6)
        assert ("bleu" in row) == (row["change"] == "zeroed")
    # A layer without its heads costs far more than any single head, and so do shuffled
    # weights in their place.
    zeroed = [row for row in record["rows"] if row["change"] == "zeroed"]
    single = [row for row in zeroed if row["head"] is not None]
    worst = max(zeroed, key=lambda row: row["rise"])
    assert worst["head"] is None and worst["bleu"] < min(r["bleu"] for r in single)
    shuffled = found[worst["kind"], worst["layer"], None, "shuffled"]["rise"]
    assert min(worst["rise"], shuffled) > 2 * max(row["rise"] for row in single)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_relations_hold_between_the_right_words(trained, seed):
    text, found = _relation_sentence(random.Random(seed))
    words = [word.lower() for word in _words_of(trained[1], text)]
    nouns = {noun for row in _NOUNS for noun in row[:2]}
    subjects = nouns | {row[0].lower() for row in _PRONOUNS}
    adjectives = {row[0] for row in _ADJECTIVES}
    kinds = {"article": heads._ARTICLES, "noun": nouns, "adjective": adjectives}
    kinds |= {"subject": subjects, "verb": heads._MAIN_VERBS, "object": nouns}
    assert text.endswith((".", "?")) and len(words) == len(text.split()) + 1
    for name, pairs in found.items():
        first, second = name.split(" → ")
        for a, b in pairs:
            assert words[a] in kinds[first], (text, name, words[a])
            assert words[b] in kinds[second], (text, name, words[b])
    verbs = [word for word in words if word in heads._MAIN_VERBS]
    assert len(found["verb → object"]) == len(verbs) >= 1
    articles = sum(word in heads._ARTICLES for word in words)
    assert len(found["article → noun"]) == articles


def test_most_attended(trained):
    model, tokenizer = trained
    text = "The small girl was reading."
    got = most_attended(model, tokenizer, text)
    whole = look(model, tokenizer, text, "").by_words()
    weights = torch.stack(whole.weights["encoder"])[:, 0, :, :-1, :-1]
    assert torch.equal(got, weights.argmax(-1)) and got.shape[:2] == weights.shape[:2]
    assert got.shape[:2] == (model.config.num_layers, model.config.num_heads)


def test_searches(trained):
    tokenizer = trained[1]
    texts = [
        "Turn the light off.", "She put her coat on.", "Turn the light off.",
        "He gave it to the man on the bus.", "The shirt is on his back.",
        "He came back.", "Give me something to write on.",
    ]  # fmt: skip
    assert _split_verbs(tokenizer, texts) == [(texts[0], 3, 0), (texts[1], 4, 1)]
    texts = [
        "Tom forgot his keys.", "Tom told John about his keys.",
        "The dog wags its tail.", "Mary lost his keys.", "His name is Tom.",
        "They sold their house.",
    ]  # fmt: skip
    wanted = [(texts[0], 2, 0), (texts[2], 3, 1), (texts[5], 2, 0)]
    assert _possessives(tokenizer, texts) == wanted


def test_link_gains_by_hand():
    """Two heads, three sentences of four words; the link is from word 3 to word 1."""
    cases = [("a sentence", 3, 1)] * 3
    links, none = [0, 2, 0, 1], [0, 2, 0, 0]  # what each word attends to most
    staring = [1, 1, 1, 1]  # every word looks at word 1: no link at all
    looked = [torch.tensor([[row, staring]]) for row in (links, links, none)]
    found = _link_gains(looked, cases)
    assert {key: tuple(value.shape) for key, value in found.items()} == dict.fromkeys(
        ("link", "control", "gain", "error"), (1, 2)
    )
    assert found["link"].tolist() == [[pytest.approx(2 / 3), 1.0]]
    assert found["control"].tolist() == [[0.0, 1.0]]
    assert found["gain"].tolist() == [[pytest.approx(2 / 3), 0.0]]
    error = np.std([1, 1, 0], ddof=1) / 3**0.5
    assert found["error"].tolist() == [[pytest.approx(error), 0.0]]


def test_a_head_that_knows_nothing_rarely_passes():
    """Weights at random: the gain is above two errors in about one head of forty."""
    generator = torch.Generator().manual_seed(4)
    cases = [("a sentence", 5, 2)] * 60
    looked = [torch.randint(8, (10, 40, 8), generator=generator) for _ in cases]
    found = _link_gains(looked, cases)
    passed = (found["gain"] > 2 * found["error"]).float().mean()
    assert 0 < passed < 0.06


def test_figure_5_two_heads_have_two_structures(trained):
    """One head finds the noun also behind an adjective; another the word before."""
    model, tokenizer = trained
    rng, far, near, before = random.Random(7), [], [], []
    for _ in range(60):
        text, found = _relation_sentence(rng)
        best = most_attended(model, tokenizer, text).flatten(0, 1)  # (L * H, words)
        for a, b in found["article → noun"]:
            (far if b - a > 1 else near).append(best[:, a] == b)
        before += [best[:, t] == t - 1 for t in range(1, best.shape[-1])]
    assert len(far) > 20
    far, near, before = (
        torch.stack(x).float().mean(dim=0) for x in (far, near, before)
    )
    noun, word_before = int(far.argmax()), int(before.argmax())
    assert far[noun] > 0.9 and near[noun] > 0.9
    assert before[word_before] > 0.4 and noun != word_before


@FEW
@given(st.integers(0, 10**6), st.integers(2, 9))
def test_rank_correlation_by_the_formula(seed, n):
    torch.manual_seed(seed)
    a, b = torch.randperm(n), torch.randperm(n)
    wanted = 1 - 6 * float(((a - b) ** 2).sum()) / (n * (n * n - 1))
    got = _rank_correlation(a.float().exp(), b.float() * 3)  # only the order counts
    assert float(got) == pytest.approx(wanted, abs=1e-6)


def test_effect_of_words(trained):
    moved = effect_of_words(*trained, "Tom saw Mary.", "Tom sah Maria.")
    assert moved.shape[1] == 4 and (moved >= 0).all() and (moved <= 1).all()
    assert int(moved[0].argmax()) == 0  # who writes "Tom" needs "Tom"
