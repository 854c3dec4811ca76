"""Chapter 15: BLEU and chrF against sacreBLEU, the bootstrap, perplexity."""

import json
import math
import random
import shutil
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from urllib.error import URLError

import numpy as np
import pytest
import sacrebleu
import torch
from figures import check_figure, said, shown
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sacrebleu.significance import PairedTest

from transformer_lib.batches import make_batch, tokenize_pairs
from transformer_lib.corpora import grammar_split, load_corpus
from transformer_lib.evaluation import (
    bleu,
    bleu_counts,
    bleu_from_counts,
    bootstrap_interval,
    chrf,
    chrf_counts,
    chrf_from_counts,
    evaluate,
    paired_bootstrap,
    perplexity,
    sacre_bleu,
    scores_text,
    sentence_bleu,
    split_at_hyphens,
    tokenized_bleu,
    tokens_of,
)
from transformer_lib.exercises.evaluation import (
    check_brevity,
    check_clipped,
    check_corpus_precision,
    check_f_score,
    check_resampled,
)
from transformer_lib.figures.evaluation import counted_ngrams, ngram_figure
from transformer_lib.runs import read_evidence, recorded_outputs
from transformer_lib.tokenizer import Tokenizer
from transformer_lib.transformer import Transformer, TransformerConfig

TEXT = grammar_split("test", 60)


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


@settings(max_examples=200)
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


def noisy(sentences, seed=0, share=0.3):
    """German text with words lost, doubled and exchanged: wrong in many ways."""
    rng, out = random.Random(seed), []
    vocabulary = [word for sentence in sentences for word in sentence.split()]
    for sentence in sentences:
        words = []
        for word in sentence.split():
            if rng.random() > share / 2:
                words.append(rng.choice(vocabulary) if rng.random() < share else word)
            if rng.random() < share / 4:
                words.append(word.upper() + rng.choice([",", "-x", "", "3.5"]))
        out.append(" ".join(words))
    return out


words = st.lists(st.sampled_from("abcd"), max_size=9)  # empty ones too
odd_corpora = st.lists(st.tuples(words, words), min_size=1, max_size=5)
texts = st.text(st.sampled_from("aBc é.,!?-'\"&3ß„“€\u2028\xa0\t"), max_size=25)
odd_texts = st.lists(st.tuples(texts, texts), min_size=1, max_size=5)


@settings(max_examples=200)
@given(odd_corpora, st.sampled_from(["none", "exp"]), st.booleans())
def test_counts_and_smoothing_are_sacrebleus(corpus, smooth, effective):
    counts = [bleu_counts(*pair) for pair in corpus]
    metric = sacrebleu.BLEU(
        tokenize="none", smooth_method=smooth, effective_order=effective
    )
    sides = zip(*corpus, strict=True)
    hypotheses, references = ([" ".join(tokens) for tokens in side] for side in sides)
    want = metric.corpus_score(hypotheses, [references]).score
    got = bleu_from_counts(np.sum(counts, axis=0), smooth, effective)
    assert got == pytest.approx(want, abs=1e-9)


@settings(max_examples=100)
@given(odd_texts)
def test_text_scores_are_sacrebleus(corpus):
    hypotheses, references = map(list, zip(*corpus, strict=True))
    want = sacrebleu.corpus_bleu(hypotheses, [references]).score
    assert sacre_bleu(hypotheses, references).value == want
    tokens = tokens_of(hypotheses), tokens_of(references)
    assert bleu(*tokens, smooth="exp") == pytest.approx(want, abs=1e-9)
    for got, (hypothesis, reference) in zip(
        sentence_bleu(hypotheses, references), corpus, strict=True
    ):
        want = sacrebleu.sentence_bleu(hypothesis, [reference]).score
        assert got == pytest.approx(want, abs=1e-9)
    counts = [chrf_counts(*pair) for pair in corpus]
    want = sacrebleu.corpus_chrf(hypotheses, [references]).score
    got = chrf_from_counts(np.sum(counts, axis=0))
    assert got == pytest.approx(want, abs=1e-9)


@pytest.mark.parametrize(
    "hypotheses, references, smooth, want",
    [
        ([[]], [["a"]], "exp", 0.0),
        ([["a"]], [[]], "exp", 0.0),
        ([["a", "b", "c"]], [["a", "b", "c"]], "exp", 0.0),  # no 4-gram at all
        ([["a", "b", "c", "d"]], [["a", "b", "c", "d"]], "none", 100.0),
        ([["a", "x", "c", "y"]], [["a", "b", "c", "d"]], "none", 0.0),
        # 2/4, then 1/2 of 3, 1/4 of 2 and 1/8 of 1
        ([list("axcy")], [list("abcd")], "exp", 100 * (0.5 / 6 / 8 / 8) ** 0.25),
        # half as long: exp(1 - 2)
        ([list("abcd")], [list("abcdefgh")], "none", 100 * math.exp(-1)),
    ],
)
def test_corner_cases_by_hand(hypotheses, references, smooth, want):
    assert bleu(hypotheses, references, smooth) == pytest.approx(want, abs=1e-9)
    strings = [[" ".join(s) for s in side] for side in (hypotheses, references)]
    metric = sacrebleu.BLEU(tokenize="none", smooth_method=smooth)
    theirs = metric.corpus_score(strings[0], [strings[1]]).score
    assert theirs == pytest.approx(want, abs=1e-9)


def test_a_real_list_to_the_ninth_digit():
    references = [german for _, german in grammar_split("test")[:200]]
    hypotheses = noisy(references)
    want = sacrebleu.corpus_bleu(hypotheses, [references]).score
    tokens = tokens_of(hypotheses), tokens_of(references)
    assert 5 < want < 95
    assert abs(bleu(*tokens, smooth="exp") - want) < 1e-9
    pairs = zip(hypotheses, references, strict=True)
    counts = sum(np.array(chrf_counts(*pair)) for pair in pairs)
    want = sacrebleu.corpus_chrf(hypotheses, [references]).score
    assert abs(chrf_from_counts(counts) - want) < 1e-9


def test_chrf_has_signatures():
    references = [german for _, german in TEXT]
    hypotheses = noisy(references)
    for order in (0, 2):
        score = chrf(hypotheses, references, word_order=order)
        metric = sacrebleu.CHRF(word_order=order)
        assert score.value == metric.corpus_score(hypotheses, [references]).score
        assert f"nw:{order}" in score.signature


# --- the paper's way -----------------------------------------------------------------


def test_hyphens_are_split_as_by_the_script():
    assert split_at_hyphens("S-Bahn - a -b c-") == ("S ##AT##-##AT## Bahn - a -b c-")
    # matches do not overlap: the letter alone stays
    assert split_at_hyphens("A-B-C") == "A ##AT##-##AT## B-C"
    # the script reads bytes: one letter of two bytes is enough for two matches
    assert split_at_hyphens("A-é-C") == "A ##AT##-##AT## é ##AT##-##AT## C"


@pytest.mark.skipif(not shutil.which("perl"), reason="needs perl")
@settings(max_examples=10)
@given(st.lists(st.text(st.sampled_from("ab--é \xa0\u2028"), max_size=20), min_size=9))
@example(["a-\xa0-a", "é-é-é", "a-a-a-a", "-\u2028-"])
def test_hyphens_against_perl(lines):
    program = r"s{(\S)-(\S)}{$1 ##AT##-##AT## $2}g"
    asked = "\n".join(lines) + "\n"
    done = subprocess.run(
        ["perl", "-ple", program], input=asked.encode(), capture_output=True, check=True
    )
    ours = [split_at_hyphens(line) for line in lines]
    assert done.stdout.decode().split("\n")[:-1] == ours


def test_tokenized_bleu_is_sacrebleu_on_moses_tokens():
    moses = pytest.importorskip("sacremoses").MosesTokenizer("de")
    references = [german for _, german in TEXT]
    references += ['Er sagte: "Das Fiat-Modell fährt z. B. zur S-Bahn, 3.000-mal."'] * 9
    hypotheses = noisy(references)
    plain = [
        [moses.tokenize(t, return_str=True) for t in s]
        for s in (hypotheses, references)
    ]
    split = [[split_at_hyphens(t) for t in side] for side in plain]
    metric = sacrebleu.BLEU(tokenize="none", smooth_method="none", force=True)
    for cut, asked in ((plain, False), (split, True)):
        want = metric.corpus_score(cut[0], [cut[1]]).score
        got = tokenized_bleu(hypotheses, references, split_compounds=asked)
        assert got.value == pytest.approx(want, abs=1e-9)
        again = tokenized_bleu(
            hypotheses, plain[1], split_compounds=asked, references_tokenized=True
        )
        assert again == got
        assert "tok:moses-de" in got.signature and "smooth:none" in got.signature
    assert "&quot;" in split[1][-1] and "z. B." in plain[1][-1]


# --- the figure of n-grams ------------------------------------------------------------


@given(sentences, sentences, st.integers(1, 4))
def test_counted_ngrams_are_sacrebleu_s(hypothesis, reference, n):
    from sacrebleu.metrics.helpers import extract_all_word_ngrams

    got = counted_ngrams(hypothesis, reference, n)
    text = " ".join(hypothesis), " ".join(reference)
    said_grams, meant = (extract_all_word_ngrams(t, n, n)[0] for t in text)
    assert sum(counts for _, counts, _, _ in got) == (said_grams & meant).total()
    for gram, _, in_hypothesis, in_reference in got:
        key = tuple(gram.split())
        assert (in_hypothesis, in_reference) == (said_grams[key], meant[key])


def test_ngram_figure_answers(browser, tmp_path):
    reference = "Der Hund sieht die Katze .".split()
    pairs = {
        "one wrong word": ("Der Hund sieht eine Katze .".split(), reference),
        "shuffled": ("Katze die sieht Hund Der .".split(), reference),
        "babble": ("die die die die die die".split(), reference),
    }
    figure = ngram_figure(pairs)
    marks = [(".grams > div", "borderTopColor"), (".alone", "borderBottomColor")]
    check_figure(browser, tmp_path, figure, marks)
    with shown(browser, tmp_path, figure) as page:
        for name, (hypothesis, _) in pairs.items():
            page.get_by_role("button", name=name).click()
            judge = sacrebleu.BLEU(tokenize="none", smooth_method="none")
            score = judge.corpus_score([" ".join(hypothesis)], [[" ".join(reference)]])
            for n in range(1, 5):
                page.get_by_role("button", name=f"n = {n}").focus()
                page.keyboard.press("Enter")
                hits, total = score.counts[n - 1], score.totals[n - 1]
                assert page.locator(".grams .counts").count() == hits
                assert page.locator(".grams > div").count() == total
                words = f"{hits} of {total} {n}-grams of the hypothesis count"
                share = f"precision {100 * hits / total:.1f}%"
                assert said(page).startswith(f"{words}: {share}")
                assert f"BLEU of this pair alone: {score.score:.2f}" in said(page)
        page.get_by_role("button", name="n = 1").click()
        chips = page.locator(".grams > div")
        chips.nth(0).focus()
        counts = "6 in the hypothesis, 1 in the reference. It counts."
        assert said(page) == f"“die”: {counts}"
        page.keyboard.press("ArrowRight")
        assert "clipped" in said(page)


# --- how sure ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def systems():
    references = [german for _, german in grammar_split("test")[:150]]
    return noisy(references, 1, 0.3), noisy(references, 2, 0.27), references


METRICS = {
    "BLEU": sacrebleu.BLEU,
    "chrF2": sacrebleu.CHRF,
    "chrF++": lambda: sacrebleu.CHRF(word_order=2),
}


@pytest.mark.parametrize("nrefs", [1, 3])
@pytest.mark.parametrize("name", METRICS)
def test_bootstrap_is_sacrebleus(systems, name, nrefs, monkeypatch):
    monkeypatch.setenv("SACREBLEU_SEED", "12345")
    first, second, references = systems
    lists = [references, *(noisy(references, seed, 0.5) for seed in (3, 4))][:nrefs]
    test = PairedTest(
        [("a", first), ("b", second)], {name: METRICS[name]()}, lists, "bs", 300
    )
    references = lists if nrefs > 1 else references
    _, theirs = test()[1][name.replace("++", "2++")]
    found = paired_bootstrap(first, second, references, name, samples=300)
    ours = bootstrap_interval(second, references, name, samples=300)  # they: float32
    assert found.second == ours.value == pytest.approx(theirs.score, abs=1e-9)
    assert ours.scores.mean() == pytest.approx(theirs.mean, abs=1e-4)
    assert (ours.high - ours.low) / 2 == pytest.approx(theirs.ci, abs=1e-4)
    assert found.p_value == pytest.approx(theirs.p_value, abs=0.01)
    assert found.low <= found.second - found.first <= found.high


def test_several_references_are_sacrebleus(systems, tmp_path):
    """Scores and signatures are those of its command, which reads three files."""
    said, *more, references = systems
    lists = [*(noisy(one, 5, 0.2) for one in more), references]
    lists[0][3] = "(Ach so!) " + lists[0][3]
    files = []
    for number, side in enumerate([said, *lists]):
        files.append(tmp_path / f"{number}.de")
        files[-1].write_text("".join(line + "\n" for line in side), "utf-8")
    command = [*map(str, files[1:]), "-i", str(files[0]), "-w", "9", "-f", "json"]
    told = subprocess.run(
        [sys.executable, "-m", "sacrebleu", *command, "-m", "bleu", "chrf"]
        + ["--chrf-word-order", "2"],
        capture_output=True,
        check=True,
    )
    bleu_, letters = json.loads(told.stdout)
    assert "nrefs:2" in bleu_["signature"] and letters["name"] == "chrF2++"
    for score, want in (
        (sacre_bleu(said, lists), bleu_),
        (chrf(said, lists, word_order=2), letters),
    ):
        assert score.value == pytest.approx(want["score"], abs=1e-8)
        assert score.signature == want["signature"]
    assert sacre_bleu(said, lists).value > sacre_bleu(said, references).value
    alone = [
        sacrebleu.sentence_bleu(text, list(some)).score
        for text, *some in zip(said, *lists, strict=True)
    ]
    assert sentence_bleu(said, lists) == pytest.approx(alone)
    pairs = [(text, one) for text, one in zip(said, lists[0], strict=True)]
    record = evaluate(Copies(), pairs, samples=9, references=lists[1:])
    assert record["BLEU"]["signature"] == bleu_["signature"]
    assert record["chrF++"]["value"] == pytest.approx(letters["score"], abs=1e-8)
    lines = scores_text(record | {"tokens": 1}).splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["chrF++", "BLEU", "chrF2"]
    with pytest.raises(ValueError, match="150 hypotheses and 149 references"):
        chrf(said, [lists[0], lists[1][1:]])


class CometLike(ModuleType):
    """Takes what unbabel-comet 2.2.7 takes, and scores by length."""

    __version__ = "2.2.7"

    def __init__(self):
        super().__init__("comet")
        self.asked, self.samples = [], []

    def download_model(self, model, saving_directory=None, local_files_only=False):
        if model != "Unbabel/wmt22-comet-da":
            raise KeyError(f"Model '{model}' not supported by COMET.")
        return "/cache/checkpoints/model.ckpt"

    def load_from_checkpoint(
        self,
        checkpoint_path,
        reload_hparams=False,
        strict=False,
        local_files_only=False,
    ):
        self.asked.append(checkpoint_path)
        if checkpoint_path == "none.ckpt":
            raise Exception(f"Invalid checkpoint path: {checkpoint_path}")
        return SimpleNamespace(predict=self.predict)

    def predict(
        self,
        samples,
        batch_size=16,
        gpus=1,
        devices=None,
        mc_dropout=0,
        progress_bar=True,
        accelerator="auto",
        num_workers=None,
        length_batching=True,
    ):
        assert gpus == 0 and devices is None
        for sample in samples:
            assert {k: type(v) for k, v in sample.items()} == dict.fromkeys(
                ("src", "mt", "ref"), str
            )
        self.samples = samples
        scores = [len(one["mt"]) / (1 + len(one["ref"])) for one in samples]
        return SimpleNamespace(scores=scores, system_score=sum(scores) / len(scores))


def test_comet_reads_source_output_and_first_reference(monkeypatch):
    comet = CometLike()
    monkeypatch.setitem(sys.modules, "comet", comet)
    pairs, name = [("a b", "Ja."), ("c", "Nein.")], "Unbabel/wmt22-comet-da"
    record = evaluate(
        Copies(), pairs, samples=9, references=[["Jawohl.", "Nö."]], comet=name
    )
    assert comet.samples == [
        {"src": "a b", "mt": "a b", "ref": "Ja."},
        {"src": "c", "mt": "c", "ref": "Nein."},
    ]
    signature = f"model:{name}|version:unbabel-comet-2.2.7"
    want = (3 / 4 + 1 / 6) / 2
    assert record["COMET"] == {"value": want, "signature": signature}
    assert json.loads(json.dumps(record)) == record
    lines = scores_text(record | {"tokens": 1}).splitlines()
    assert lines[0].startswith("chrF++") and f"COMET    0.4583  {signature}" in lines
    evaluate(Copies(), pairs, samples=9, comet="mine.ckpt")
    assert comet.asked == ["/cache/checkpoints/model.ckpt", "mine.ckpt"]


class Unasked:
    def __call__(self, sentences, **settings):
        raise AssertionError("translated in vain")


@pytest.mark.parametrize("name", ["none.ckpt", "wmt99"])
def test_a_comet_that_is_not_there_is_said_before_the_work(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "comet", CometLike())
    with pytest.raises(ValueError, match=f"COMET model '{name}' cannot be loaded"):
        evaluate(Unasked(), [("a", "b")], comet=name)
    monkeypatch.setitem(sys.modules, "comet", None)
    with pytest.raises(ValueError, match="not installed .*: pip install unbabel-comet"):
        evaluate(Unasked(), [("a", "b")], comet=name)
    assert "COMET" not in evaluate(Copies(), [("a", "b")], samples=9)


def test_bootstrap_is_seeded_and_knows_equals(systems):
    first, _, references = systems
    one, two, three = (
        bootstrap_interval(first, references, samples=50, seed=seed)
        for seed in (1, 1, 2)
    )
    assert one.low == two.low and (one.scores == two.scores).all()
    assert (one.scores != three.scores).any()
    assert one.low <= one.value <= one.high
    same = paired_bootstrap(first, first, references, samples=50)
    assert same.p_value > 0.01 and same.low == same.high == 0
    better = paired_bootstrap(first, references, references, samples=50)
    assert better.low > 0 and better.p_value < 0.05


def test_bootstrap_refuses():
    with pytest.raises(ValueError, match="must be one of"):
        bootstrap_interval(["a"], ["a"], metric="ROUGE")
    with pytest.raises(ValueError, match="samples=0"):
        bootstrap_interval(["a"], ["a"], samples=0)
    with pytest.raises(ValueError, match="1 hypotheses and 2 references"):
        paired_bootstrap(["a"], ["a", "b"], ["a", "b"])
    with pytest.raises(ValueError, match="smooth='floor'"):
        bleu([["a"]], [["a"]], smooth="floor")
    with pytest.raises(ValueError, match="untokenized"):
        chrf([["a"]], [["a"]])


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


SCRIPTS = {  # sentences of several scripts, and the tokenizer that suits each
    "char": [
        ["今日は雨が降っています。", "駅はどこですか。"],
        ["วันนี้ฝนตกหนัก", "สถานีอยู่ที่ไหน"],
    ],
    "zh": [["今天下雨了。", "请问火车站在哪里？"], ["我用 Python 和 PyTorch 写程序。"]],
    "13a": [
        ["오늘은 비가 많이 와요.", "역이 지금 어디에 있어요?"],
        ["امروز باران می\u200cبارد و هوا سرد است.", "ایستگاه کجا است؟"],
        ["Сегодня идёт сильный дождь.", "Где находится вокзал?"],
        ["Das Wort 東京 heißt Tokio, und es hat zwei Zeichen.", "4 + 4 = 8"],
    ],
}


@pytest.mark.parametrize("suited", SCRIPTS)
def test_the_tokenizer_suits_the_script(suited):
    """A perfect output has 100, and all counts are sacreBLEU's with that tokenizer."""
    for lines in SCRIPTS[suited]:
        perfect = sacre_bleu(lines, lines)
        assert perfect.value == pytest.approx(100)
        assert f"|tok:{suited}|" in perfect.signature
        assert sentence_bleu(lines, lines) == pytest.approx([100] * len(lines))
        outputs = [line[:-3] + line[-1] for line in lines]
        want = sacrebleu.corpus_bleu(outputs, [lines], tokenize=suited).score
        assert 0 < want < 100 and sacre_bleu(outputs, lines).value == want
        found = bootstrap_interval(outputs, lines, samples=9)
        assert found.value == pytest.approx(want)
        both = paired_bootstrap(outputs, lines, lines, samples=9)
        assert (both.first, both.second) == pytest.approx((want, 100))
        alone = [
            sacrebleu.sentence_bleu(out, [line], tokenize=suited).score
            for out, line in zip(outputs, lines, strict=True)
        ]
        assert sentence_bleu(outputs, lines) == pytest.approx(alone)


@pytest.mark.parametrize("name", ["none", "13a", "intl", "char", "zh"])
def test_a_tokenizer_can_be_named(name):
    lines = SCRIPTS["zh"][1] + SCRIPTS["13a"][3]
    outputs = [line[:-4] for line in lines]
    want = sacrebleu.corpus_bleu(outputs, [lines], tokenize=name).score
    assert sacre_bleu(outputs, lines, name).value == want
    found = bootstrap_interval(outputs, lines, samples=9, tokenize=name)
    assert found.value == pytest.approx(want)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ImportError("no MeCab"), "'ja-mecab' needs a package: pip install 'sacrebleu"),
        (
            RuntimeError("no MeCab"),
            "'ja-mecab' needs a package: pip install 'sacrebleu",
        ),
        (URLError("no network"), "fetches from the network, and failed to"),
    ],
)
def test_a_tokenizer_that_is_not_here_is_said(monkeypatch, error, said):
    def broken(self, **settings):
        raise error

    monkeypatch.setattr("sacrebleu.metrics.BLEU.__init__", broken)
    with pytest.raises(ValueError, match=said):
        sacre_bleu(["a"], ["a"], "ja-mecab")


class Copies:
    """A translator that gives what it reads."""

    def __call__(self, sentences, **settings):
        return list(sentences)


def test_a_record_says_what_is_left_out_and_which_tokens_count(tmp_path):
    lines = SCRIPTS["char"][0]
    text = "".join(f"{line}\t{line}\n" for line in ["", *lines]).encode()
    (tmp_path / "text").write_bytes(text + b"\xff\t\xff\nno tab\n")
    with pytest.warns(UserWarning, match="60% of lines"):
        corpus = load_corpus({"test": tmp_path / "text", "bad": "drop"}, "test")
    record = json.loads(json.dumps(evaluate(Copies(), corpus, samples=9)))
    assert record["lines"] == 5 and record["sentences"] == 2
    assert sum(record["left_out"].values()) == 3
    assert sorted(sum(record["first_left_out"].values(), [])) == [1, 4, 5]
    score = record["BLEU"]
    assert score["tokenize"] == "char" and "no spaces" in score["note"]
    assert score["value"] == pytest.approx(100)
    asked = evaluate(Copies(), corpus, samples=9, tokenize="13a")["BLEU"]
    assert asked["value"] == 0 and "char suits them" in asked["note"]
    german = evaluate(Copies(), [(g, g) for _, g in TEXT], samples=9)
    assert german["BLEU"]["tokenize"] == "13a" and not german["BLEU"]["note"]
    assert (german["lines"], german["left_out"]) == (60, {})


NAN = float("nan")
MISUSED = {
    "two strings": lambda: sacre_bleu("Ja, gut.", "Ja, gut."),
    "one string": lambda: chrf(["Ja, gut."], "Ja, gut."),
    "strings, each sentence": lambda: sentence_bleu("abc", "abc"),
    "strings to draw from": lambda: bootstrap_interval("abc", "abc"),
    "strings compared": lambda: paired_bootstrap("abc", "abc", "abc"),
    "strings for tokens": lambda: bleu("abc", "abc"),
    "nothing": lambda: sacre_bleu(None, ["a"]),
    "no lists": lambda: sacre_bleu(iter(["a"]), ["a"]),
    "numbers": lambda: sacre_bleu([1.5], ["a"]),
    "numbers for tokens": lambda: bleu([3], [["a"]]),
    "no such tokenizer": lambda: sacre_bleu(["a"], ["a"], "klingon"),
    "a tokenizer that is a list": lambda: sacre_bleu(["a"], ["a"], []),
    "half an order": lambda: chrf(["a"], ["a"], word_order=1.5),
    "samples that are none": lambda: bootstrap_interval(["a"], ["a"], samples=NAN),
    "samples of truth": lambda: bootstrap_interval(["a"], ["a"], samples=True),
    "a seed below 0": lambda: paired_bootstrap(["a"], ["a"], ["a"], seed=-1),
    "no translator": lambda: evaluate("tatoeba-en-de", [("a", "b")]),
    "no pairs": lambda: evaluate(Copies(), []),
    "a name for a corpus": lambda: evaluate(Copies(), "tatoeba-en-de"),
    "three sides": lambda: evaluate(Copies(), [("a", "b", "c")]),
    "sides of numbers": lambda: evaluate(Copies(), [(1, 2)]),
    "samples of a record": lambda: evaluate(Copies(), [("a", "b")], samples=NAN),
    "tokens of a record": lambda: evaluate(Copies(), [("a", "b")], tokenize=3),
}


@pytest.mark.parametrize("case", MISUSED)
def test_misuse_is_answered_with_a_sentence(case):
    with pytest.raises(ValueError, match=r"[a-z].{20,}"):
        MISUSED[case]()


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


def no_clip(hypothesis, reference):
    return sum(word in reference for word in hypothesis) / len(hypothesis)


def recall(hypothesis, reference):
    from collections import Counter

    hits = Counter(hypothesis) & Counter(reference)
    return sum(hits.values()) / len(reference)


def as_sets(hypothesis, reference):
    return len(set(hypothesis) & set(reference)) / len(hypothesis)


def of_distinct_words(hypothesis, reference):
    return recall(hypothesis, reference) * len(reference) / len(set(hypothesis))


def mean_of_sentences(hypotheses, references):
    both = zip(hypotheses, references, strict=True)
    return sum(no_clip(h, r) for h, r in both) / len(hypotheses)


def sums(rows):
    return [sum(column) for column in zip(*rows, strict=True)]


def means(rows):
    return [total / len(rows) for total in sums(rows)]


def f_score(precision, recall, beta, weight):
    weight = beta**weight
    return (1 + weight) * precision * recall / (weight * precision + recall)


@pytest.mark.parametrize(
    "check, wrong, telling",
    [
        (check_clipped, no_clip, "clip the count"),
        (check_clipped, recall, "recall"),
        (check_clipped, as_sets, "not sets"),
        (check_clipped, of_distinct_words, "distinct words"),
        (check_brevity, lambda c, r: min(1, math.exp(1 - c / r)), "too long"),
        (check_brevity, lambda c, r: min(1, c / r), "ratio of the lengths"),
        (check_brevity, lambda c, r: math.exp(1 - r / c), "no reward"),
        (check_corpus_precision, mean_of_sentences, "sum the counts first"),
        (check_resampled, lambda c, rng: sums(rng.sample(c, 8)), "replacement"),
        (check_resampled, lambda c, rng: means(rng.choices(c, k=8)), "mean"),
        (check_resampled, lambda c, rng: sums(rng.choices(c, k=4)), "size"),
        (check_resampled, lambda c, rng: rng.choices(c, k=8), "each column"),
        (check_resampled, lambda c, rng: sums([c[0], *c[:7]]), "seed"),
        (check_f_score, lambda p, r, beta=2.0: f_score(p, r, beta, 0), "F1"),
        (check_f_score, lambda p, r, beta=2.0: f_score(p, r, beta, 1), "squared"),
        (check_f_score, lambda p, r, beta=2.0: f_score(r, p, beta, 2), "weighs prec"),
    ],
)
def test_mistakes_are_named(check, wrong, telling):
    verdict = check(wrong)
    assert not verdict.passed
    assert telling in verdict.message


@pytest.mark.corpora
def test_what_chapter_15_says_of_the_two_that_were_picked():
    """One is right, one nearly, and neither has more BLEU than the worst by chrF."""
    rows = recorded_outputs(read_evidence("tatoeba-en-de-names"))
    scores = sentence_bleu([row[2] for row in rows], [row[1] for row in rows])
    said = {row[0]: (row[2], score) for row, score in zip(rows, scores, strict=True)}
    right, score = said["We had a good reason for doing that."]
    assert right == "Wir hatten einen guten Grund, das zu tun." and score < 6
    nearly, score = said["When was the last time you visited the dentist?"]
    assert nearly == "Wann hast du das letzte Mal zum Zahnarzt besucht?" and score < 6
    letters = [chrf_from_counts(chrf_counts(row[2], row[1])) for row in rows]
    some = [i for i, row in enumerate(rows) if 6 <= len(row[0].split()) <= 16]
    worst = sorted(some, key=letters.__getitem__)[:3]
    wrong = [rows[i][2] for i in worst]
    assert wrong[0] == "Using umtreibt eine Lampe auf." and "Flak" in wrong[1]
    assert max(scores[i] for i in worst) > 6
