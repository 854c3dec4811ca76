"""Chapter 21: the exported graphs against the library, files whole or not at all."""

import functools
import hashlib
import json
import struct

import numpy as np
import onnx
import pytest
import sentencepiece as spm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_lib import serving
from transformer_lib.decoding import CachedSteps, FullSteps, beam_search
from transformer_lib.exercises.serving import (
    check_in_8_bits,
    check_normalize,
    check_text_of,
)
from transformer_lib.looking_inside import attention_weights
from transformer_lib.serving import (
    OnnxModel,
    OnnxSteps,
    export_onnx,
    in_16_bits,
    pack_weights,
    tokenizer_data,
)
from transformer_lib.text import (
    BOS,
    EOS,
    PAD,
    CorpusUnavailable,
    Tokenizer,
    grammar_split,
    load_corpus,
)
from transformer_lib.training import load_pretrained
from transformer_lib.transformer import Transformer, TransformerConfig

FEW = settings(max_examples=15)
NAMES = {"encoder.onnx", "step.onnx", "weights.bin", "normalizer.bin"}
NAMES |= {"tokenizer.model", "manifest.json"}


def other_model():
    """All that the shipped model is not: pre-norm, learned positions, untied, odd."""
    pairs = grammar_split("train", 300)
    tokenizer = Tokenizer.train((side for pair in pairs for side in pair), 340)
    torch.manual_seed(1)
    config = TransformerConfig(
        tokenizer.vocab_size, 24, num_heads=4, num_layers=1, d_ff=40, norm_first=True,
        positions="learned", max_length=256, tie_embeddings=False, attention_bias=True,
        d_k=5, d_v=7,
    )  # fmt: skip
    model = Transformer(config).eval()
    with torch.no_grad():  # sharper than at the start, so that outputs end
        model.output.weight.mul_(3)
    return model, tokenizer, {}


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Each model once: it, its tokenizer, and the folder of its export."""

    @functools.cache
    def export(name):
        loaded = load_pretrained("tatoeba-en-de")
        model, tokenizer, about = loaded if name == "shipped" else other_model()
        folder = tmp_path_factory.mktemp("export") / name
        return model, tokenizer, export_onnx(model, tokenizer, folder, about)

    return export


@pytest.fixture(scope="module", params=["shipped", "other"])
def exported(request, exports):
    """A model, its tokenizer, and the same from its export."""
    model, tokenizer, folder = exports(request.param)
    return model, tokenizer, OnnxModel(folder)


@pytest.fixture
def folder(exports):
    """An export of a small model, to be looked at and broken."""
    return exports("other")[2]


def sentences(count):
    try:
        pairs = load_corpus("tatoeba-en-de", "test").pairs
    except CorpusUnavailable:
        pairs = load_corpus("grammar-en-de", "test").pairs
    return [source for source, _ in pairs[:: len(pairs) // count]][:count]


def ids_of(tokenizer, text):
    return torch.tensor([[*tokenizer.encode(text), EOS]])


# --- the same numbers -----------------------------------------------------------------


@FEW
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 9))
@torch.inference_mode()
def test_log_probabilities_whatever_the_beams_do(exported, seed, length, steps):
    """Any beams may go on from any: against the decoder that reads all again."""
    model, _, onnx_model = exported
    draw = torch.Generator().manual_seed(seed)
    some = torch.randint(4, model.config.vocab_size, (1, length), generator=draw)
    src_ids = torch.cat([some, torch.tensor([[EOS]])], dim=1)
    ours, theirs = FullSteps(model, src_ids), onnx_model.steps(src_ids)
    tokens, parents = torch.tensor([[BOS]]), torch.tensor([[0]])
    for _ in range(steps):
        wanted = ours.step(tokens, parents).log_softmax(dim=-1)
        got = theirs.step(tokens, parents).log_softmax(dim=-1)
        assert got.shape == wanted.shape
        assert (got - wanted).abs().max() < 1e-4
        before, now = tokens.shape[1], int(torch.randint(1, 6, (), generator=draw))
        parents = torch.randint(0, before, (1, now), generator=draw)
        tokens = torch.randint(4, model.config.vocab_size, (1, now), generator=draw)


@pytest.mark.parametrize("beam_size, n_best, count", [(1, 1, 9), (4, 4, 20), (5, 2, 6)])
def test_the_same_translations(exported, beam_size, n_best, count):
    model, tokenizer, onnx_model = exported
    if model.config.vocab_size < 4000:
        count = 3  # its outputs rarely end before the limit
    for text in sentences(count):
        src_ids = ids_of(tokenizer, text)
        ours = beam_search(model, src_ids, beam_size, n_best=n_best)[0]
        theirs = onnx_model.beam_search(src_ids, n_best, beam_size=beam_size)
        assert [h.ids for h in theirs] == [h.ids for h in ours], text
        for a, b in zip(theirs, ours, strict=True):
            assert a.log_prob == pytest.approx(b.log_prob, abs=1e-4)
    said = onnx_model(text, beam_size=beam_size)
    assert said == tokenizer.decode(ours[0].ids)


@torch.inference_mode()
def test_weights_are_those_of_the_library(exported):
    model, tokenizer, onnx_model = exported
    src_ids = ids_of(tokenizer, "The old man sees a small dog.")
    tgt_ids = torch.tensor([[BOS, *tokenizer.encode("Der alte Mann sieht ihn.")]])
    wanted = attention_weights(model, src_ids, tgt_ids)["cross"]
    steps = onnx_model.steps(src_ids)
    for t, token in enumerate(tgt_ids[0]):
        steps.step(token.view(1, 1), torch.tensor([[0]]))
        for layer, weights in enumerate(wanted):
            ours = weights[0, :, t].numpy()  # (H, S)
            assert np.abs(steps.weights[layer, :, 0] - ours).max() < 1e-5


def test_longer_than_any_table(exported):
    """Sinusoidal positions are computed: beyond the library's first 512, too."""
    model, _, onnx_model = exported
    length = 600 if model.config.positions == "sinusoidal" else 80
    src_ids = torch.tensor([[4 + i % 50 for i in range(length)] + [EOS]])
    with torch.inference_mode():
        wanted = CachedSteps(model, src_ids).step(*torch.tensor([[[BOS]], [[0]]]))
    got = onnx_model.steps(src_ids).step(*torch.tensor([[[BOS]], [[0]]]))
    assert (got.log_softmax(-1) - wanted.log_softmax(-1)).abs().max() < 1e-4


def test_one_sentence_without_padding(exported):
    model = exported[2]
    for src_ids in (torch.tensor([[5, EOS], [6, EOS]]), torch.tensor([[5, EOS, PAD]])):
        with pytest.raises(ValueError, match="one sentence"):
            OnnxSteps(model.encoder, model.session, src_ids)


# --- weights --------------------------------------------------------------------------


def test_download_is_no_larger_than_the_weights(exported):
    model, _, onnx_model = exported
    files = onnx_model.manifest["files"]
    numbers = sum(p.numel() for p in model.parameters())
    if model.config.vocab_size == 4000:  # the shipped one, in 16 bits
        assert files["weights.bin"]["bytes"] < 2.001 * numbers
        assert files["encoder.onnx"]["bytes"] + files["step.onnx"]["bytes"] < 50_000
    else:  # nothing is rounded: what 16 bits cannot hold stays in 32
        assert 3 * numbers < files["weights.bin"]["bytes"] < 4 * numbers + 40_000


@given(
    st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False),
        min_size=1,
        max_size=8,
    )
)
def test_sixteen_bits_only_where_nothing_is_lost(numbers):
    values = np.array(numbers, dtype=np.float32)
    fits = all(a == struct.unpack("e", struct.pack("e", a))[0] for a in numbers
               if abs(a) < 65504) and all(abs(a) <= 65504 for a in numbers)  # fmt: skip
    half = in_16_bits(values)
    assert (half is not None) == fits
    assert half is None or np.array_equal(half.astype(np.float32), values)
    assert in_16_bits(values.astype(np.float64)) is None


def test_what_is_twice_is_stored_once():
    def graph():
        weight = np.arange(1024, dtype=np.float32).reshape(32, 32)
        node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
        tensor = onnx.numpy_helper.from_array(weight, "w")
        floats = [onnx.helper.make_tensor_value_info(n, 1, [32, 32]) for n in "xy"]
        inner = onnx.helper.make_graph([node], "g", floats[:1], floats[1:], [tensor])
        return onnx.helper.make_model(inner)

    block = pack_weights({"one": graph(), "other": graph()})
    assert len(block) == 2 * 1024


# --- files ----------------------------------------------------------------------------


def test_files_are_valid_and_name_no_place(folder):
    assert {path.name for path in folder.iterdir()} == NAMES
    for name in ("encoder", "step"):
        onnx.checker.check_model(str(folder / f"{name}.onnx"))
    for path in folder.iterdir():
        content = path.read_bytes()
        assert b".py" not in content and b"site-packages" not in content, path.name


def test_manifest_says_what_the_files_are(folder):
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    assert set(manifest["files"]) == NAMES - {"manifest.json"}
    for name, known in manifest["files"].items():
        content = (folder / name).read_bytes()
        assert known["bytes"] == len(content)
        assert known["sha256"] == hashlib.sha256(content).hexdigest()
    processor = spm.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    text = manifest["tokenizer"]
    for i, (piece, score) in enumerate(
        zip(text["pieces"], text["scores"], strict=True)
    ):
        assert piece == processor.id_to_piece(i)
        assert score == processor.get_score(i)
    assert manifest["ids"] == {"pad": 0, "unknown": 1, "start": 2, "end": 3}


def test_max_length_is_the_trainings(exported):
    model, _, onnx_model = exported
    wanted = 60 if model.config.vocab_size == 4000 else 128
    assert onnx_model.manifest["decoding"]["max_length"] == wanted


@functools.cache
def trie(table: bytes) -> tuple[list[int], bytes]:
    size = struct.unpack("<I", table[:4])[0]
    return np.frombuffer(table[4 : 4 + size], dtype="<u4").tolist(), table[4 + size :]


def longest_match(table: bytes, text: bytes) -> tuple[int, bytes]:
    """How much of a text the table has a rule for, and what takes its place."""
    (units, texts), found = trie(table), (0, b"")

    def offset(unit):
        return (unit >> 10) << ((unit & (1 << 9)) >> 6)

    node = offset(units[0])
    for length, byte in enumerate(text, 1):
        node ^= byte
        unit = units[node]
        if unit & ((1 << 31) | 0xFF) != byte:
            break
        node ^= offset(unit)
        if (unit >> 8) & 1:
            start = units[node] & ((1 << 31) - 1)
            found = length, texts[start : texts.index(b"\0", start)]
    return found


def test_the_table_is_sentencepieces_normalization():
    """Character by character, all of the basic plane."""
    table = tokenizer_data(load_pretrained("tatoeba-en-de")[1])[1]
    oracle = spm.SentencePieceNormalizer(
        rule_name="nmt_nfkc",
        escape_whitespaces=False,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
    )
    codes = [*range(1, 0xD800), *range(0xE000, 0x10000)]
    for character in map(chr, codes):
        text = character.encode()
        length, instead = longest_match(table, text)
        assert length in (0, len(text))
        wanted = oracle.normalize(character)
        assert (instead if length else text).decode() == wanted, hex(ord(character))


# --- whole or not at all --------------------------------------------------------------


def content_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_an_export_takes_the_place_of_an_earlier_one(tmp_path):
    place = tmp_path / "deep" / "it"
    serving.write_folder(place, {"a": b"1"}, {"files": {}})
    serving.write_folder(place, {"b": b"2"}, {"files": {}})
    assert [path.name for path in sorted(place.iterdir())] == ["b", "manifest.json"]
    assert [path.name for path in place.parent.iterdir()] == ["it"]


@pytest.mark.parametrize("moment", [1, 3, "rename 1", "rename 2"])
def test_what_goes_wrong_leaves_what_was_there(tmp_path, monkeypatch, moment):
    """The disk is full at the first or third file, or one of the folders is held."""
    place, calls = tmp_path / "it", []
    serving.write_folder(place, {"a": b"1"}, {"files": {}})
    before, rename = content_of(place), type(place).rename

    def full(file):
        calls.append(file)
        if len(calls) == moment:
            raise OSError("no space left on device")

    def held(path, target):
        calls.append(path)
        if f"rename {len(calls)}" == moment:
            raise OSError("in use")
        return rename(path, target)

    if isinstance(moment, int):
        monkeypatch.setattr(serving, "to_disk", full)
    else:
        monkeypatch.setattr(type(place), "rename", held)
    with pytest.raises(OSError, match="unchanged"):
        serving.write_folder(place, {"a": b"2", "b": b"", "c": b""}, {"files": {}})
    monkeypatch.undo()
    assert content_of(place) == before
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_nothing_else_is_written_over(tmp_path):
    model, tokenizer, _ = other_model()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="something else than an export"):
        export_onnx(model, tokenizer, tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        export_onnx(model, tokenizer, tmp_path / "notes.txt")
    strange = load_pretrained("tatoeba-en-de")[1]
    with pytest.raises(ValueError, match="the one it was trained with"):
        export_onnx(model, strange, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("name", sorted(NAMES - {"manifest.json"}))
def test_damage_is_found(folder, name):
    path = folder / name
    whole = path.read_bytes()
    try:
        for content in (whole[:-1], bytes([whole[0] ^ 1]) + whole[1:]):
            path.write_bytes(content)
            with pytest.raises(ValueError, match=f"{name} is damaged or missing"):
                OnnxModel(folder)
        path.unlink()
        with pytest.raises(ValueError, match=f"{name} is damaged or missing"):
            OnnxModel(folder)
    finally:
        path.write_bytes(whole)
    OnnxModel(folder)


@pytest.mark.parametrize("text", [None, "{", "[]", "{}"])
def test_no_manifest_no_export(tmp_path, text):
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match="give the folder of an export"):
        OnnxModel(tmp_path)


def test_the_model_is_left_as_it_was(monkeypatch):
    model = other_model()[0].train()
    seen = []
    monkeypatch.setattr(
        serving, "to_onnx", lambda module, *rest: seen.append(module.model.training)
    )
    serving.graphs_of(model)
    assert seen == [False, False] and model.training


# --- exercises ------------------------------------------------------------------------


def replaced(text, rules):
    for old, new in sorted(rules.items(), key=lambda rule: -len(rule[0])):
        text = text.replace(old, new)
    return text


def shortest(text, rules):
    return "".join(rules.get(c, c) for c in text)


def never_deletes(text, rules):
    out, at = "", 0
    while at < len(text):
        found = [n for n in (3, 2, 1) if rules.get(text[at : at + n])]
        out += rules[text[at : at + found[0]]] if found else text[at]
        at += found[0] if found else 1
    return out


def one_scale(weight):
    scale = weight.abs().max() / 127
    return (weight / scale).round().to(torch.int8), scale


def rows(rounding, shape=(-1, 1)):
    def in_8_bits(weight):
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        return rounding(weight / scale).to(torch.int8), scale.reshape(shape)

    return in_8_bits


@pytest.mark.parametrize(
    "check, wrong, telling",
    [
        (check_normalize, shortest, "take the longest"),
        (check_normalize, replaced, "was changed again"),
        (check_normalize, never_deletes, "may delete"),
        (check_normalize, lambda text, rules: text, "gives 'y'"),
        (check_text_of, lambda n, c: bytes(n).decode("latin-1"), "of each byte"),
        (check_text_of, lambda n, c: bytes(n).decode("utf-8", "replace"), "each byte"),
        (check_text_of, lambda n, c: bytes(n).decode("utf-8", "ignore"), "vanished"),
        (check_in_8_bits, one_scale, "whole matrix"),
        (check_in_8_bits, rows(torch.trunc), "cut off"),
        (check_in_8_bits, rows(torch.round, (-1,)), "One scale for each"),
        (check_in_8_bits, lambda w: (w.round(), w[:, :1]), "Give int8"),
        (
            check_in_8_bits,
            lambda w: (rows(torch.round)(w)[0], 1 / rows(torch.round)(w)[1]),
            "times scale",
        ),
    ],
)
def test_mistakes_are_named(check, wrong, telling):
    verdict = check(wrong)
    assert not verdict.passed
    assert telling in verdict.message
