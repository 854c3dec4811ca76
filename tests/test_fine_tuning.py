"""Chapter 20: larger vocabularies against SentencePiece, runs that start trained."""

import json
from collections import Counter
from pathlib import Path

import pytest
import sentencepiece as spm
import torch

from transformer_lib.batches import Prepared, make_batch, tokenize_pairs
from transformer_lib.command_line import main
from transformer_lib.corpora import grammar_split
from transformer_lib.fine_tuning import (
    add_pieces,
    fine_tuning_recipe,
    grow,
    mix_pairs,
    next_pieces,
    noise_filter,
    sides_swapped,
    source_gains,
)
from transformer_lib.objective import build_optimizer
from transformer_lib.runs import load_pretrained, train
from transformer_lib.speed import peak_bytes
from transformer_lib.tokenizer import BOS, EOS, PAD, Tokenizer
from transformer_lib.training import BatchLoss, update
from transformer_lib.transformer import Transformer, TransformerConfig

ROOT = Path(__file__).resolve().parents[1]
PAIRS = grammar_split("train", 300)
TEXT = [side for pair in PAIRS for side in pair]
SIZES = {"d_model": 16, "num_heads": 2, "num_layers": 1, "d_ff": 32}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["the dog sees the cat", "der Hund sieht die Katze"], 290)


@pytest.fixture(scope="module")
def larger(tokenizer):
    found = next_pieces(tokenizer, TEXT, 40)
    return add_pieces(tokenizer, found, symbols=["<2de>", "<2fr>"])


def model_of(tokenizer, **changes):
    torch.manual_seed(0)
    return Transformer(TransformerConfig(tokenizer.vocab_size, **SIZES | changes))


# --- pieces ---------------------------------------------------------------------------


def test_new_pieces_are_what_more_merges_would_have_been():
    """SentencePiece with n + 20 entries learns what we add to one with n."""
    base, wanted = (Tokenizer.train(TEXT, size) for size in (330, 350))
    theirs = [wanted.processor.id_to_piece(i) for i in range(350)]
    ours = next_pieces(base, TEXT, 20)
    old = {base.processor.id_to_piece(i) for i in range(330)}
    new = [piece for piece in theirs if piece not in old]
    assert len(ours) == 20
    assert len(set(ours) & set(new)) >= 19  # equally frequent pairs at the end


def test_old_ids_keep_their_places(tokenizer, larger):
    before, after = tokenizer.processor, larger.processor
    assert after.vocab_size() == before.vocab_size() + 42
    for i in range(before.vocab_size()):
        assert after.id_to_piece(i) == before.id_to_piece(i)
        assert after.get_score(i) == before.get_score(i)
    for sentence in ("the cat", "der Hund sieht", "☃", ""):
        if not {after.id_to_piece(i) for i in larger.encode(sentence)} - {
            before.id_to_piece(i) for i in range(before.vocab_size())
        }:
            assert larger.encode(sentence) == tokenizer.encode(sentence)
    for sentence in TEXT[:50]:
        assert larger.decode(larger.encode(sentence)) == sentence
        assert len(larger.encode(sentence)) <= len(tokenizer.encode(sentence))


def test_sentencepiece_itself_reads_the_larger_vocabulary(larger, tmp_path):
    larger.save(tmp_path / "larger.model")
    theirs = spm.SentencePieceProcessor(model_file=str(tmp_path / "larger.model"))
    assert theirs.encode(TEXT[:20]) == larger.encode_all(TEXT[:20])


def test_every_new_piece_is_used(tokenizer, larger):
    """Merged in their order, the pieces cut the text as byte pair encoding would."""
    said = Counter(i for ids in larger.encode_all(TEXT) for i in ids)
    new = range(tokenizer.vocab_size, larger.vocab_size - 2)
    assert sum(said[i] > 0 for i in new) > len(new) / 2  # others are parts of longer
    last = larger.vocab_size - 3
    assert said[last] > 1, larger.processor.id_to_piece(last)


def test_a_tag_stays_whole(tokenizer, larger):
    pair = ("<2fr> the dog", "le chien")
    fr = larger.processor.piece_to_id("<2fr>")
    assert larger.encode(pair[0]).count(fr) == 1
    assert fr not in larger.encode("the dog")


@pytest.mark.parametrize(
    ("pieces", "symbols", "said"),
    [
        (["a"], [], "known already"),
        (["▁dogma"] * 2, [], "given twice"),
        ([], [""], "is empty"),
        (["xy"], ["xy"], "given twice"),
    ],
)
def test_pieces_that_cannot_be_added(tokenizer, pieces, symbols, said):
    with pytest.raises(ValueError, match=said):
        add_pieces(tokenizer, pieces, symbols)


def test_unigram_is_refused():
    unigram = Tokenizer.train(TEXT, 320, "unigram")
    with pytest.raises(ValueError, match="'bpe' only"):
        add_pieces(unigram, ["▁something"])


# --- rows -----------------------------------------------------------------------------


@pytest.mark.parametrize("tie", [True, False])
def test_a_grown_model_says_the_same_of_old_pieces(tokenizer, larger, tie):
    """Logits of old ids are bit-equal, whatever rows stand behind them."""
    model = model_of(tokenizer, tie_embeddings=tie).eval()
    grown = grow(model, tokenizer, larger)
    src, tgt = torch.randint(4, tokenizer.vocab_size, (2, 3, 5))
    old = model(src, tgt)
    torch.testing.assert_close(grown(src, tgt)[..., : old.shape[-1]], old)
    assert not grown.training
    assert (grown.output.weight is grown.src_embedding.weight) is tie
    counts = [sum(p.numel() for p in m.parameters()) for m in (model, grown)]
    assert counts[1] - counts[0] == 42 * 16 * (1 if tie else 3)


def test_new_rows_are_the_means_of_their_spelling(tokenizer, larger):
    model = model_of(tokenizer)
    grown = grow(model, tokenizer, larger)
    table = model.src_embedding.weight
    for i in range(tokenizer.vocab_size, larger.vocab_size):
        piece = larger.processor.id_to_piece(i)
        if piece.startswith("▁"):  # SentencePiece itself can spell a word's beginning
            ids = tokenizer.encode(piece[1:])
            torch.testing.assert_close(grown.output.weight[i], table[ids].mean(0))


def test_another_models_tokenizer_is_refused(tokenizer, larger):
    with pytest.raises(ValueError, match="does not begin"):
        grow(model_of(larger), larger, tokenizer)


# --- pairs ----------------------------------------------------------------------------


def test_a_mixture_has_every_new_pair_and_the_share(tokenizer):
    new = [(f"n{i}", "") for i in range(60)]
    old = [(f"o{i}", "") for i in range(100)]
    mixed = mix_pairs(new, old, share=0.4, seed=3)
    assert len(mixed) == len(set(mixed)) == 100 and set(new) <= set(mixed)
    assert mixed == mix_pairs(new, old, share=0.4, seed=3)
    assert mixed != mix_pairs(new, old, share=0.4, seed=4)
    assert sorted(mix_pairs(new, old, share=0)) == sorted(new)
    with pytest.raises(ValueError, match="lower the share"):
        mix_pairs(new, old, share=0.9)
    with pytest.raises(ValueError, match="below 1"):
        mix_pairs(new, old, share=1)


# --- memory ---------------------------------------------------------------------------


def cell_with(text):
    """What a cell under the chapter's hood defines."""
    page = ROOT / "notebooks/under_the_hood/20_fine_tuning.ipynb"
    cells = json.loads(page.read_text("utf-8"))["cells"]
    (found,) = (c for c in map("".join, (c["source"] for c in cells)) if text in c)
    names = {"torch": torch, "PAD": PAD, "BatchLoss": BatchLoss}
    exec(found, names)
    return names


def an_update(group, kind=torch.float32):
    """A model after one update without dropout, and the memory at the peak of it."""
    torch.manual_seed(0)
    sizes = {"d_model": 64, "num_heads": 4, "num_layers": 2, "d_ff": 256}
    model = Transformer(TransformerConfig(290, dropout=0.0, **sizes)).to(kind)
    optimizer = build_optimizer(model)
    update(model, optimizer, group, 0.0, label_smoothing=0.1)  # Adam's means are made
    peak = peak_bytes(
        lambda: update(model, optimizer, group, 1e-3, label_smoothing=0.1)
    )
    return model, peak


def test_small_batches_added_up_are_the_same_update_in_less_memory(tokenizer):
    """Half of `max_tokens`, twice `accumulate`: gradients, weights, measured peak."""
    kept = cell_with("def kept(")["kept"]
    data = tokenize_pairs(PAIRS[:48], tokenizer)
    whole = [make_batch(data, range(48))]
    parts = [make_batch(data, range(i, i + 12)) for i in range(0, 48, 12)]
    # In 64 bits: in 32 a sum that rounds to the other side of 0 turns a ReLU on or off.
    exact, sums = (an_update(group, torch.float64)[0] for group in (whole, parts))
    for one, other in zip(exact.parameters(), sums.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-9, rtol=1e-7)
    (once, high), (_, low) = map(an_update, (whole, parts))
    gradients = sum(p.numel() * 4 for p in once.parameters())
    most = [max(kept(once, batch) for batch in group) for group in (whole, parts)]
    assert most[1] < most[0] / 2.5 and low < high / 2
    assert most[0] < high < 1.2 * most[0] + gradients  # what is kept explains the peak


# --- runs -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def start(tokenizer, larger, tmp_path_factory):
    """A folder with a small model of a larger vocabulary."""
    folder = tmp_path_factory.mktemp("start") / "grown"
    grown = grow(model_of(tokenizer), tokenizer, larger)
    return grown.save_pretrained(folder, larger, half=False)


def test_training_goes_on_from_a_saved_start(start, larger, tmp_path):
    less = {"max_steps": 2, "validate_every": 2, "warmup": 1}
    recipe = fine_tuning_recipe(start, corpus="grammar-en-de", max_pairs=50, **less)
    assert recipe.vocab_size == larger.vocab_size and recipe.model["d_model"] == 16
    run = train(recipe, tmp_path / "run", show=False, device="cpu")
    assert run.tokenizer.model == larger.model
    before, _, about = load_pretrained(start, "cpu")
    moved = run.model.output.weight - before.output.weight
    assert 0 < moved.abs().max() < 0.1
    assert about["recipe"]["name"] == "grown"


def test_a_start_needs_its_own_tokenizer(tokenizer, larger, tmp_path):
    with pytest.raises(ValueError, match="give the model's own"):
        model_of(tokenizer).save_pretrained(tmp_path / "wrong", larger)


def test_from_on_the_command_line(start, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for side, ending in enumerate(("en", "de")):
        text = "".join(pair[side] + "\n" for pair in PAIRS)
        (tmp_path / f"mine.{ending}").write_text(text, encoding="utf-8")
    files = ["prepare", "--train", "mine.en", "mine.de", "--threads", "1"]
    assert main([*files, "--from", str(start), "--out", "data"]) == 0
    less = [f"--set={word}" for word in "max_steps=2 validate_every=1 warmup=1".split()]
    go = ["train", "--from", str(start), "--data", "data", "--run", "run", *less]
    assert main([*go, "--device", "cpu"]) == 0
    recipe = json.loads((tmp_path / "run" / "recipe.json").read_text("utf-8"))
    assert recipe["start_from"] == str(start) and recipe["model"]["d_model"] == 16
    assert main([*files, "--vocab-size", "340", "--out", "other"]) == 0
    wrong = ["train", "--from", str(start), "--data", "other", "--run", "no", *less]
    capsys.readouterr()
    assert main([*wrong, "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert "another vocabulary" in said and f"prepare --from {start})" in said
    assert main(["train", "--run", "no"]) == 2
    assert "such as small, or a model to fine-tune: --from" in capsys.readouterr().err


def a_marian_of_ours(tokenizer, folder):
    """A Marian folder as this library writes it; its model."""
    from transformer_lib.export import to_marian
    from transformer_lib.export.marian import export_marian

    model = model_of(tokenizer, attention_bias=True).eval()
    export_marian(model, tokenizer, folder)
    return to_marian(model)


def a_marian_like_those_of_the_hub(tokenizer, folder):
    """Swish, biases at the output, a start by padding; transformers' own weights."""
    from transformers import MarianMTModel

    from transformer_lib.export.marian import marian_config

    torch.manual_seed(1)
    config = marian_config(
        TransformerConfig(tokenizer.vocab_size, **SIZES),
        activation_function="swish",
        decoder_start_token_id=PAD,
    )
    twin = MarianMTModel(config).eval()
    twin.final_logits_bias.normal_()
    twin.save_pretrained(folder)
    pieces = map(tokenizer.processor.id_to_piece, range(tokenizer.vocab_size))
    names = json.dumps({piece: i for i, piece in enumerate(pieces)})
    (folder / "vocab.json").write_text(names, encoding="utf-8")
    for side in ("source", "target"):
        (folder / f"{side}.spm").write_bytes(tokenizer.model)
    return twin


@pytest.mark.parametrize(
    ("made", "activation"),
    [(a_marian_of_ours, "relu"), (a_marian_like_those_of_the_hub, "swish")],
)
def test_a_marian_model_is_trained_on(tokenizer, tmp_path, made, activation):
    """A Marian model of transformers goes on here, and back: the same probabilities."""
    pytest.importorskip("transformers")
    from transformer_lib.export import from_marian, to_marian

    source = made(tokenizer, tmp_path / "theirs")
    loaded, same = from_marian(tmp_path / "theirs", "cpu")
    loaded.save_pretrained(tmp_path / "start", same, half=False)
    recipe = fine_tuning_recipe(
        tmp_path / "start",
        corpus="grammar-en-de",
        max_pairs=50,
        max_steps=12,
        validate_every=3,
        warmup=1,
    )
    assert recipe.model["activation"] == activation
    run = train(recipe, tmp_path / "run", show=False, device="cpu")
    losses = [record["valid_loss"] for record in run.history]
    assert len(losses) == 4 and sorted(losses, reverse=True) == losses
    twin = to_marian(run.model)
    src, tgt = torch.randint(4, tokenizer.vocab_size, (2, 3, 5))
    src[:, -1] = EOS
    first = source.config.decoder_start_token_id
    read = [torch.cat([torch.full((3, 1), i), tgt], 1) for i in (BOS, first)]
    said = [i for i in range(tokenizer.vocab_size) if i != BOS]  # a start is never said
    with torch.no_grad():
        found, before = (
            model(src, read[0])[..., said].log_softmax(-1)
            for model in (run.model, loaded)
        )
        theirs, was = (
            model(src, decoder_input_ids=ids).logits[..., said].log_softmax(-1)
            for model, ids in zip((twin, source), read, strict=True)
        )
    torch.testing.assert_close(before, was, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found, theirs, atol=1e-5, rtol=1e-4)
    assert (found - before).abs().max() > 1e-4


# --- noisy pairs ----------------------------------------------------------------------


def test_gains_are_differences_of_log_probabilities_by_transformers(tokenizer):
    """One pair at a time by MarianMTModel; odd pairs are not scored."""
    from transformer_lib.export import to_marian

    model = model_of(tokenizer).eval()
    twin = to_marian(model)
    pairs = [*PAIRS[:5], ("", "der Hund"), ("the dog", " "), ("the dog " * 600, "Hund")]
    found = source_gains(model, tokenizer, pairs)
    assert [gain != gain for gain in found] == [False] * 5 + [True] * 3
    for (source, target), gain in zip(PAIRS[:5], found, strict=False):
        out = torch.tensor([[*tokenizer.encode(target), EOS]])
        read = torch.cat([torch.tensor([[BOS]]), out[:, :-1]], dim=1)
        mean = [
            twin(torch.tensor([[*ids, EOS]]), decoder_input_ids=read)
            .logits.log_softmax(-1)
            .gather(-1, out[..., None])
            .mean()
            .item()
            for ids in (tokenizer.encode(source), [])
        ]
        assert gain == pytest.approx(mean[0] - mean[1], abs=1e-4)
    assert source_gains(model, tokenizer, []) == []


def test_the_direction_of_pairs_is_found():
    """The model that ships translates into German; empty pairs say nothing."""
    shipped = load_pretrained("tatoeba-en-de", "cpu")[:2]
    turned = [(target, source) for source, target in PAIRS[:8]]
    assert not sides_swapped(*shipped, PAIRS[:8])
    assert sides_swapped(*shipped, turned)
    assert not sides_swapped(*shipped, [("", "")]) and not sides_swapped(*shipped, [])
    tokenizer = Tokenizer.train(TEXT, 330)
    untrained = Transformer(TransformerConfig(330, **SIZES)).eval()
    assert not any(
        sides_swapped(untrained, tokenizer, some) for some in (PAIRS, turned)
    )


def test_wrong_translations_are_dropped(tmp_path, capsys):
    """A known share of the pairs is exchanged: nearly all that is dropped is wrong."""
    pairs = list(dict.fromkeys(grammar_split("train", 400)))[::2][:150]
    wrong = range(0, 150, 5)  # 30 of 150; half as many are dropped
    moved = [pairs[i - 45][1] if i in wrong else pairs[i][1] for i in range(150)]
    assert all(moved[i] != pairs[i][1] for i in wrong)
    lines = [f"{pair[0]}\t{side}" for pair, side in zip(pairs, moved, strict=True)]
    (tmp_path / "noisy.tsv").write_text("\n".join(lines), encoding="utf-8")
    valid = tmp_path / "valid.tsv"
    valid.write_text("\n".join(map("\t".join, PAIRS[:40])), encoding="utf-8")
    out = tmp_path / "data"
    asked = ["prepare", "--train", str(tmp_path / "noisy.tsv"), "--valid", str(valid)]
    asked += ["--out", str(out), "--vocab-size", "350", "--score-with"]
    assert main([*asked, "tatoeba-en-de"]) == 0
    said = capsys.readouterr().out
    assert "length ratio           line 61" in said  # found without a model
    assert "15 of 149 training pairs dropped, the worst by tatoeba-en-de" in said
    rows = (out / "dropped.tsv").read_text("utf-8").splitlines()
    dropped = [lines.index(row.split("\t", 2)[2]) for row in rows]
    assert len(dropped) == 15 and sum(i in wrong for i in dropped) > 0.9 * 15
    ready = Prepared.load(out, verify=True)
    assert (len(ready.train), len(ready.valid)) == (134, 40)
    assert main([*asked, "tatoeba-en-de", "--keep", "0.5"]) == 2
    assert "was prepared from something else (noise is" in capsys.readouterr().err
    assert main([*asked, "nobody"]) == 2
    assert "nobody" in capsys.readouterr().err
    with pytest.raises(ValueError, match="keep=1: must be above 0 and below 1"):
        noise_filter("tatoeba-en-de", 1)
