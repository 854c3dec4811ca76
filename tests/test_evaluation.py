"""Chapter 13: BLEU against sacreBLEU, perplexity against torch, order kept."""

import math

import pytest
import sacrebleu
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_lib.batches import make_batch, tokenize_pairs
from transformer_lib.decoding import greedy_decode
from transformer_lib.evaluation import bleu, perplexity, sacre_bleu, translate
from transformer_lib.exercises.evaluation import (
    check_brevity,
    check_clipped,
    check_corpus_precision,
)
from transformer_lib.text import EOS, Tokenizer, grammar_split
from transformer_lib.transformer import Transformer, TransformerConfig

TEXT = grammar_split("test")[:60]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train((side for pair in TEXT for side in pair), 340)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Transformer(TransformerConfig(340, 32, num_heads=2, num_layers=1, d_ff=64))


sentences = st.lists(st.sampled_from("abcd"), min_size=1, max_size=12)
corpora = st.lists(st.tuples(sentences, sentences), min_size=1, max_size=6)


def theirs(hypotheses, references):
    metric = sacrebleu.BLEU(tokenize="none", smooth_method="none")
    references = [[" ".join(tokens) for tokens in references]]
    return metric.corpus_score([" ".join(t) for t in hypotheses], references).score


@settings(max_examples=200, deadline=None)
@given(corpora)
def test_bleu_is_sacrebleus(corpus):
    hypotheses, references = zip(*corpus, strict=True)
    ours = bleu(hypotheses, references)
    assert ours == pytest.approx(theirs(hypotheses, references), abs=1e-9)


def test_bleu_is_sacrebleus_on_real_words():
    references = [german.split() for _, german in TEXT]
    hypotheses = [tokens[:1] + tokens[2:] for tokens in references]
    assert bleu(hypotheses, references) == pytest.approx(
        theirs(hypotheses, references), abs=1e-9
    )
    assert bleu(references, references) == pytest.approx(100.0, abs=1e-9)


def test_sacre_bleu_has_a_signature():
    references = [german for _, german in TEXT]
    score = sacre_bleu([text.upper() for text in references], references)
    assert (
        score.value
        == sacrebleu.corpus_bleu(
            [text.upper() for text in references], [references]
        ).score
    )
    assert f"version:{sacrebleu.__version__}" in score.signature
    assert "tok:13a" in score.signature


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="1 hypotheses and 2 references"):
        bleu([["a"]], [["a"], ["b"]])
    with pytest.raises(ValueError, match="0 hypotheses and 0 references"):
        bleu([], [])
    with pytest.raises(ValueError, match="is a string"):
        bleu(["a b"], [["a", "b"]])
    with pytest.raises(ValueError, match="2 hypotheses and 1 references"):
        sacre_bleu(["a", "b"], ["a"])


def test_perplexity_is_torchs_cross_entropy(model, tokenizer):
    pairs = tokenize_pairs(TEXT, tokenizer)
    batch = make_batch(pairs, range(len(pairs)))
    model.eval()
    with torch.no_grad():
        logits = model(batch.src_ids, batch.tgt_in)
    loss = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), batch.tgt_out, ignore_index=0
    )
    model.train()
    assert perplexity(model, pairs, 300) == pytest.approx(math.exp(loss), rel=1e-5)
    assert model.training


def test_translate_keeps_order_and_empty_lines(model, tokenizer):
    texts = [english for english, _ in TEXT[:9]]
    texts[4] = ""
    got = translate(model, tokenizer, texts, batch_size=2, max_extra=5)
    for text, output in zip(texts, got, strict=True):
        if not text:
            assert output == ""
            continue
        src_ids = torch.tensor([tokenizer.encode(text) + [EOS]])
        assert output == tokenizer.decode(greedy_decode(model, src_ids, 5)[0])
    assert translate(model, tokenizer, []) == []


def no_clip(hypothesis, reference):
    return sum(word in reference for word in hypothesis) / len(hypothesis)


def recall(hypothesis, reference):
    from collections import Counter

    hits = Counter(hypothesis) & Counter(reference)
    return sum(hits.values()) / len(reference)


def as_sets(hypothesis, reference):
    return len(set(hypothesis) & set(reference)) / len(hypothesis)


def mean_of_sentences(hypotheses, references):
    both = zip(hypotheses, references, strict=True)
    return sum(no_clip(h, r) for h, r in both) / len(hypotheses)


@pytest.mark.parametrize(
    "check, wrong, telling",
    [
        (check_clipped, no_clip, "clip the count"),
        (check_clipped, recall, "recall"),
        (check_clipped, as_sets, "not sets"),
        (check_brevity, lambda c, r: min(1, math.exp(1 - c / r)), "too long"),
        (check_brevity, lambda c, r: min(1, c / r), "ratio of the lengths"),
        (check_brevity, lambda c, r: math.exp(1 - r / c), "no reward"),
        (check_corpus_precision, mean_of_sentences, "sum the counts first"),
    ],
)
def test_mistakes_are_named(check, wrong, telling):
    verdict = check(wrong)
    assert not verdict.passed
    assert telling in verdict.message
