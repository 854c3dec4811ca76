"""The translator's text: what is sealed has no near copy in what is read."""

import unicodedata
from dataclasses import replace

import pytest
import sealed
import torch
import translator_text
import typed_pilot
from fresh_split import isolated
from respell import respelled
from small_runs import without_times
from test_fresh_split import distance, words
from test_queue import whole_and_parts
from translator_text import divided, pairs_of, ready, vocabulary

from transformer_lib.batches import Prepared
from transformer_lib.corpora import hash_pairs, load_corpus
from transformer_lib.export.common import piece_names
from transformer_lib.runs import Recipe, load_pretrained, train
from transformer_lib.storage import read_json
from transformer_lib.tokenizer import fold_text

STRANGERS = [
    (f"“w{i}” x{i} y{i}\u00a0z{i} v{i}", f"„a{i}“ b{i} c{i} d{i} e{i}")
    for i in range(12)
]


@pytest.fixture
def small(monkeypatch):
    """The grammar, whose sentences have near copies, and twelve that have none."""

    def corpus(name, split="train"):
        there = load_corpus(name, split)
        more = STRANGERS if split == "train" else []
        return replace(there, pairs=[*more, *there.pairs[:400]])

    monkeypatch.setattr(translator_text, "load_corpus", corpus)
    monkeypatch.setattr(translator_text, "PAIRS", 8)
    monkeypatch.setattr(translator_text, "by_hash", list)


def test_no_near_copy_of_a_sealed_pair_is_read(small):
    splits = divided("grammar-en-de")
    kept = splits["fresh"]
    assert len(kept) == 8 and len(splits["train"]) == 400 + 12 - 8
    for pair in kept:
        for other in splits["train"] + splits["valid"]:
            for side in (0, 1):
                assert distance(words(pair[side]), words(other[side])) > 2
    assert isolated(kept, splits["train"] + splits["valid"]) == kept
    assert kept[0] == ('"w0" x0 y0 z0 v0', STRANGERS[0][1])


def test_the_prepared_text_is_that_of_the_split(small, tmp_path):
    recipe = Recipe.load("grammar", vocab_size=400)
    folder = ready(recipe, tmp_path / "text")
    data = Prepared.load(folder)
    assert len(data.train) == 404 and len(data.valid) == 400
    assert data.tokenizer.vocab_size == 400
    sources = {data.tokenizer.decode(data.train[i][0].tolist()) for i in range(404)}
    fresh = pairs_of(tmp_path / "text")
    assert len(fresh) == 8 and not {source for source, _ in fresh} & sources
    before = (folder / "data.json").stat().st_mtime_ns
    assert ready(recipe, tmp_path / "text") == folder
    assert (folder / "data.json").stat().st_mtime_ns == before


def test_the_vocabulary_folds_as_the_library_but_keeps_quotation_marks():
    text = [side for pair in load_corpus("grammar-en-de").pairs[:500] for side in pair]
    tokenizer = vocabulary(text + ["0123456789 “”„"], 400)
    model = tokenizer.processor.serialized_model_proto()
    assert b"rules.tsv" in model and b"/" + b"rules.tsv" not in model  # no folder
    assert all(
        len(p.strip("▁")) <= 1
        for p in tokenizer.pieces("2025 and 12,480")
        if any(map(str.isdigit, p))
    )
    for given in (
        "a\u00a0b\u3000c",
        "so\u00adft \u200bx\ufeff",
        "❤️ 👩‍👩‍👧 🇩🇪",
        "u\u0308ber e\u0301",
        "½ ² ™ … ﬁ",
        "{x} <b>y</b> #1 @a",
    ):
        folded = fold_text(given)
        assert tokenizer.decode(tokenizer.encode(given)) == folded, given
        assert unicodedata.is_normalized("NFC", folded)
    for kept in ("„Ja“", "“Hi” ‘x’", "don’t"):
        assert tokenizer.decode(tokenizer.encode(kept)) == kept


def test_the_pilot_gone_on_with_gives_the_same(small, tmp_path, monkeypatch):
    """And stops where it is told to, as the beginning of a longer run."""
    settings = tmp_path / "tiny.toml"
    settings.write_text(
        'name = "tiny"\ncorpus = "grammar-en-de"\nvocab_size = 400\nmax_steps = 90\n'
        "max_tokens = 300\nvalidate_every = 2\nkeep_last = 0\n"
        "[model]\nd_model = 16\nnum_heads = 2\nnum_layers = 1\nd_ff = 16\n"
        "[varied]\nhurry = 0.1\nsigns = 0.1\n"
    )

    def run(name):
        words = (
            f"0.5 --recipe {settings} --text {tmp_path / 'text'} --steps 6 "
            f"--run-dir {tmp_path / name} --out none"
        )
        return typed_pilot.run(typed_pilot.arguments(words.split()))

    whole, parts = whole_and_parts(run, monkeypatch)
    assert without_times(whole) == without_times(parts)
    assert [row["step"] for row in whole["history"]] == [2, 4, 6]
    assert whole["recipe"]["lr_factor"] == 0.5 and str(tmp_path) not in str(
        whole["data"]
    )
    assert run("whole")["history"] == whole["history"]  # and no update more


def test_sealed_pairs_are_looked_at_once_and_at_the_end(small, tmp_path, capsys):
    tiny = {"d_model": 16, "num_heads": 2, "num_layers": 1, "d_ff": 16}
    settings = {"max_steps": 4, "validate_every": 1, "max_tokens": 300}
    recipe = Recipe.load("grammar", vocab_size=400, keep_last=2, model=tiny, **settings)
    text, run, out = tmp_path / "text", tmp_path / "run", tmp_path / "sealed.json"
    words = [str(run), "--text", str(text), "--out", str(out), "--device", "cpu"]
    data = ready(recipe, text)

    def enough(history):
        return history[-1]["step"] >= 3

    train(recipe, run, data, device="cpu", show=False, callbacks=[enough])
    with pytest.raises(SystemExit):
        sealed.main(words)
    assert "not finished" in capsys.readouterr().err and not out.exists()
    train(recipe, run, data, device="cpu", show=False)
    sealed.main(words)
    record = read_json(out)
    with pytest.raises(SystemExit):
        sealed.main(words)
    assert "have been looked at" in capsys.readouterr().err
    assert read_json(out) == record
    assert record["pairs"] == 8 == len(record["outputs"])
    assert record["sha256"] == hash_pairs(pairs_of(text))


def test_a_model_reads_another_vocabulary(small, tmp_path):
    """A piece takes its own row, that in small letters, or the mean of its parts."""
    text = ready(Recipe.load("grammar", vocab_size=700), tmp_path / "text")
    folder = respelled("tatoeba-en-de", text).save_pretrained(tmp_path / "model")
    (old, cuts, _), (new, own, _) = (
        load_pretrained(name, "cpu") for name in ("tatoeba-en-de", folder)
    )
    old_rows, rows = (model.src_embedding.weight for model in (old, new))
    known, pieces = piece_names(cuts), piece_names(own)
    unknown = next(p for p in pieces if p.isalpha() and p.lower() not in known)
    loud = next(p for p in pieces if p not in known and p.lower() in known)
    parts = cuts.encode(unknown.lower())
    for piece, wanted in (
        ("▁the", old_rows[known.index("▁the")]),
        (loud, old_rows[known.index(loud.lower())]),
        (unknown, old_rows[parts].mean(0)),
    ):
        assert torch.allclose(rows[pieces.index(piece)], wanted, atol=1e-3), piece
    assert new.tgt_embedding.weight is new.src_embedding.weight
    others = {n: p for n, p in old.named_parameters() if "embedding" not in n}
    assert all(torch.equal(p, new.get_parameter(name)) for name, p in others.items())
