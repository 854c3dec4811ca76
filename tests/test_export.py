"""Chapter 22: each export against the library, files whole or not at all."""

import copy
import functools
import hashlib
import json
import os
import resource
import shutil
import struct
import unicodedata
import warnings

import numpy as np
import onnx
import pytest
import sentencepiece as spm
import torch
from elsewhere import second_device
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from served_text import ODD, exact_engine, int8_engine, sentences

from transformer_lib import storage
from transformer_lib.batches import pad, prepare
from transformer_lib.corpora import grammar_split
from transformer_lib.decoding import CachedSteps, FullSteps, beam_search, greedy_decode
from transformer_lib.exercises.export import (
    check_in_8_bits,
    check_normalize,
    check_text_of,
)
from transformer_lib.export import (
    CTranslate2Model,
    OnnxModel,
    from_marian,
    to_int8,
    to_marian,
)
from transformer_lib.export import exporter as export_module
from transformer_lib.export import onnx as onnx_export
from transformer_lib.export.common import token_scores
from transformer_lib.export.ctranslate2 import export_ctranslate2
from transformer_lib.export.int8 import Int8Linear
from transformer_lib.export.marian import (
    export_marian,
    marian_config,
    marian_model,
    marian_places,
    marian_scores,
    sines_first,
)
from transformer_lib.export.onnx import (
    OnnxSteps,
    export_onnx,
    in_16_bits,
    pack_weights,
    rounded_to_8_bits,
    tokenizer_data,
)
from transformer_lib.family import FamilyConfig, build_model
from transformer_lib.looking_inside import attention_weights
from transformer_lib.runs import load_pretrained
from transformer_lib.storage import write_manifest
from transformer_lib.tokenizer import (
    BOS,
    EOS,
    NORMALIZATIONS,
    PAD,
    Tokenizer,
    fold_text,
)
from transformer_lib.transformer import Transformer, TransformerConfig, normal_weights
from transformer_lib.translator import Translator

FEW = settings(max_examples=8)
NAMES = {"encoder.onnx", "step.onnx", "weights.bin", "normalizer.bin"}
NAMES |= {"tokenizer.model", "manifest.json"}


def other_model():
    """All that the shipped model is not: pre-norm, learned positions, untied, odd."""
    pairs = grammar_split("train", 300)
    tokenizer = Tokenizer.train((side for pair in pairs for side in pair), 340)
    torch.manual_seed(1)
    config = TransformerConfig(
        tokenizer.vocab_size,
        24,
        num_heads=4,
        num_layers=1,
        d_ff=40,
        norm_first=True,
        positions="learned",
        max_length=256,
        tie_embeddings=False,
        attention_bias=True,
        d_k=5,
        d_v=7,
    )
    model = Transformer(config).eval()
    with torch.no_grad():  # sharper than at the start, so that outputs end
        model.output.weight.mul_(3)
    return model, tokenizer, {}


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Each model once: it, its tokenizer, the folder of its export, and its graphs."""

    @functools.cache
    def export(name):
        loaded = load_pretrained("tatoeba-en-de")
        model, tokenizer, about = loaded if name == "shipped" else other_model()
        folder = tmp_path_factory.mktemp("export") / name
        graphs = onnx_export.graphs_of(model)
        export_onnx(model, tokenizer, folder, about, graphs=graphs)
        return model, tokenizer, folder, graphs

    return export


@pytest.fixture(scope="module", params=["shipped", "other"])
def exported(request, exports):
    """A model, its tokenizer, and the same from its export."""
    model, tokenizer, folder, _ = exports(request.param)
    return model, tokenizer, OnnxModel(folder)


@pytest.fixture
def folder(exports):
    """An export of a small model, to be looked at and broken."""
    return exports("other")[2]


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


@pytest.mark.corpora
@pytest.mark.parametrize("beam_size, n_best, count", [(1, 1, 6), (4, 4, 10), (5, 2, 4)])
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
    if all(p.equal(p.half().float()) for p in model.parameters()):  # the shipped one
        assert files["weights.bin"]["size"] < 2.001 * numbers
        graphs = files["encoder.onnx"]["size"] + files["step.onnx"]["size"]
        assert graphs < 25_000 * model.config.num_layers
    else:  # nothing is rounded: what 16 bits cannot hold stays in 32
        assert 3 * numbers < files["weights.bin"]["size"] < 4 * numbers + 40_000


@given(
    st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False),
        min_size=1,
        max_size=8,
    )
)
def test_sixteen_bits_only_where_nothing_is_lost(numbers):
    values = np.array(numbers, dtype=np.float32)
    fits = all(
        a == struct.unpack("e", struct.pack("e", a))[0]
        for a in numbers
        if abs(a) < 65504
    ) and all(abs(a) <= 65504 for a in numbers)
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
    block = pack_weights({"one": graph(), "other": graph()}, int8=True)
    assert len(block) == 1024 + 32 * 4  # whole numbers, and a scale for each column


@pytest.mark.parametrize("name", ["shipped", "other"])
def test_eight_bits_are_those_of_the_rounded_model(exports, tmp_path, name):
    """Whole numbers times scales: the weights of the rounded model and no others."""
    model, tokenizer, exact, graphs = exports(name)
    folder = export_onnx(model, tokenizer, tmp_path / "small", int8=True, graphs=graphs)
    size, half = ((f / "weights.bin").stat().st_size for f in (folder, exact))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    whole, scales = (sum(f(p) for p in matrices) for f in (torch.numel, len))
    gaps = 64 * 2 * len(list(model.parameters()))  # each begins at a multiple of 64
    others = 4 * sum(p.numel() for p in model.parameters() if p.dim() < 2)
    assert whole + 4 * scales <= size <= whole + 4 * scales + others + gaps
    assert size < 0.8 * half
    rounded, small = rounded_to_8_bits(model), OnnxModel(folder)
    for weight, near in zip(model.parameters(), rounded.parameters(), strict=True):
        if weight.dim() < 2:
            assert torch.equal(weight, near)
            continue
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        assert ((weight - near).abs() <= 0.501 * scale).all()
    for text in TEXTS[:3]:
        ids = torch.tensor([[*tokenizer.encode(text), EOS]])
        ours = beam_search(rounded, ids, beam_size=2)[0][0]
        theirs = small.beam_search(ids, beam_size=2)[0]
        assert ours.ids == theirs.ids
        assert ours.log_prob == pytest.approx(theirs.log_prob, abs=1e-4)


# --- files ----------------------------------------------------------------------------


def test_files_are_valid_and_name_no_place(folder):
    assert {path.name for path in folder.iterdir()} == NAMES
    for name in ("encoder", "step"):
        onnx.checker.check_model(str(folder / f"{name}.onnx"))
    for path in folder.iterdir():
        content = path.read_bytes()
        assert b".py" not in content and b"site-packages" not in content, path.name


def test_any_bit_of_the_manifest_counts(folder, tmp_path):
    """Also those of settings that no file holds, such as alpha."""
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    path, rng = broken / "manifest.json", np.random.default_rng(0)
    whole = path.read_bytes()
    alpha = 8 * whole.index(b"0.6", whole.index(b'"alpha"')) + 18  # 6 becomes 2
    for bit in [alpha, *rng.integers(0, 8 * len(whole), 60)]:
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        with pytest.raises(ValueError, match="manifest|missing"):
            OnnxModel(broken)
    path.write_bytes(whole)
    OnnxModel(broken)


def test_ids_may_come_from_another_device(folder):
    model = OnnxModel(folder)
    src_ids = torch.tensor([[5, 6, 7, EOS]])
    wanted = model.beam_search(src_ids, beam_size=2)
    with second_device() as device:
        assert model.beam_search(src_ids.to(device), beam_size=2) == wanted


def test_manifest_says_what_the_files_are(folder):
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    assert set(manifest["files"]) == NAMES - {"manifest.json"}
    for name, known in manifest["files"].items():
        content = (folder / name).read_bytes()
        assert known["size"] == len(content)
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
    *_, about = load_pretrained("tatoeba-en-de", "cpu")
    untied = not model.config.tie_embeddings  # the other one, of no training
    wanted = 128 if untied else about["max_length"]
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
        if node >= len(units):  # a table without rules
            break
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
    text = ["The dog sleeps.", "Der Hund schläft."]
    table = tokenizer_data(Tokenizer.train(text, 280, normalize="nmt_nfkc"))[1]
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


def test_the_table_of_nfc_is_unicodes():
    """By Python's own unicodedata, all of the basic plane; identity has no rule."""
    text = ["The dog sleeps.", "Der Hund schläft."]
    tables = {
        rule: tokenizer_data(Tokenizer.train(text, 280, normalize=rule))[1]
        for rule in ("nfc", "identity")
    }
    for character in map(chr, [*range(1, 0xD800), *range(0xE000, 0x10000)]):
        for form in character, unicodedata.normalize("NFD", character):
            found, instead = longest_match(tables["nfc"], form.encode())
            wanted = unicodedata.normalize("NFC", form)
            assert (instead if found else form.encode()).decode() == wanted, ascii(form)
        assert longest_match(tables["identity"], character.encode())[0] == 0


@pytest.mark.parametrize("rule", NORMALIZATIONS)
def test_a_rule_for_text_goes_with_the_model(rule, tmp_path):
    from transformers import AutoTokenizer

    odd = ["你好，世界？", "کتاب\u200cها", "cafe\u0301 ﬁ ½", "two  spaces "]
    tokenizer = Tokenizer.train(odd, 290, normalize=rule)
    sizes = {"d_model": 24, "num_heads": 3, "num_layers": 1, "d_ff": 40}
    model = Transformer(TransformerConfig(tokenizer.vocab_size, **sizes)).eval()
    export_marian(model, tokenizer, tmp_path / "it")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "it")
    for line, found in zip(odd, theirs(odd)["input_ids"], strict=True):
        ids = [*tokenizer.encode(line), EOS]
        assert found == [id - 1 for id in ids]  # the padding, first here, is last there
        assert theirs.decode(found, skip_special_tokens=True) == tokenizer.decode(ids)


# --- whole or not at all --------------------------------------------------------------


def content_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_an_export_takes_the_place_of_an_earlier_one(tmp_path):
    place = tmp_path / "deep" / "it"
    onnx_export.write_export(place, {"a": b"1"}, {"format": 1})
    onnx_export.write_export(place, {"b": b"2"}, {"format": 1})
    assert [path.name for path in sorted(place.iterdir())] == ["b", "manifest.json"]
    assert [path.name for path in place.parent.iterdir()] == ["it"]


@pytest.mark.parametrize("moment", [1, 3, "rename 1", "rename 2"])
def test_what_goes_wrong_leaves_what_was_there(tmp_path, monkeypatch, moment):
    """The disk is full at the first or third file, or one of the folders is held."""
    place, calls = tmp_path / "it", []
    onnx_export.write_export(place, {"a": b"1"}, {"format": 1})
    before, replace = content_of(place), os.replace

    def full(file, before=None):
        calls.append(file)
        if len(calls) == moment:
            raise OSError("no space left on device")

    def held(path, target):
        calls.append(path) if os.path.isdir(path) else None
        if f"rename {len(calls)}" == moment:
            raise OSError("in use")
        return replace(path, target)

    if isinstance(moment, int):
        monkeypatch.setattr(storage, "_finish_file", full)
    else:
        monkeypatch.setattr(os, "replace", held)
    with pytest.raises(OSError, match="unchanged"):
        onnx_export.write_export(place, {"a": b"2", "b": b"", "c": b""}, {"format": 1})
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
            with pytest.raises(ValueError, match=f"{name} (has|is damaged)"):
                OnnxModel(folder)
        path.unlink()
        with pytest.raises(ValueError, match=f"{name} is missing"):
            OnnxModel(folder)
    finally:
        path.write_bytes(whole)
    OnnxModel(folder)


def test_no_graph_no_export(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match="give the folder of an export"):
        OnnxModel(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        None,
        *("{", "[]", "{}", '{"files": {}}'),
        '{"files": [], "model": {}, "decoding": {}}',
    ],
)
def test_no_manifest_no_export(tmp_path, text):
    (tmp_path / "step.onnx").write_bytes(b"")
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match="no manifest.json|manifest.json is damaged"):
        OnnxModel(tmp_path)


def test_folders_of_others_stay(tmp_path):
    """A backup beside an export, and a web page's folder with its own manifest."""
    for name in ("it.old/notes", "it.part/notes", "page/manifest.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("{}")
    onnx_export.write_export(tmp_path / "it", {"a": b"1"}, {"format": 1})
    with pytest.raises(ValueError, match="holds something else"):
        export_onnx(*other_model()[:2], tmp_path / "page")
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*")}
    assert found >= {"it.old/notes", "it.part/notes", "page/manifest.json"}


def test_a_source_beyond_the_learned_positions(folder):
    model = OnnxModel(folder)
    assert model("") == model("  ") == ""
    longest = torch.tensor([[7] * 255 + [EOS]])
    assert len(model.beam_search(longest, beam_size=1)[0].ids) <= 255
    with pytest.raises(ValueError, match="257 tokens, and the model only 256"):
        model.beam_search(torch.tensor([[7] * 256 + [EOS]]))
    with pytest.raises(ValueError, match="beam_size=0: must be a whole number"):
        model("dog", beam_size=0)
    with pytest.raises(ValueError, match="there are beam_size"):
        model("dog", beams=2)


def test_text_is_folded_as_translate_folds_it(folder):
    """Curly quotes, a space that does not break, a character that nobody sees."""
    plain, typed = 'It\'s a "dog".', "It’s\u00a0a\u200b “dog”."
    model = OnnxModel(folder)
    encode = model.tokenizer.encode
    assert fold_text(typed) == plain and encode(typed) != encode(plain)
    assert model(typed, beam_size=1) == model(plain, beam_size=1) != ""


@pytest.mark.parametrize("about", ["x", [], 3, {"recipe": "tatoeba"}, {"data": 3}])
def test_a_record_that_is_none_is_refused(tmp_path, about):
    model, tokenizer, _ = other_model()
    for write in (export_module.export_model, export_onnx, export_ctranslate2):
        with pytest.raises(ValueError, match="give the record that load_pretrained"):
            write(model, tokenizer, tmp_path / "it", about=about)
    assert not list(tmp_path.iterdir())


def test_the_model_is_left_as_it_was(monkeypatch):
    model = other_model()[0].train()
    seen = []
    monkeypatch.setattr(
        onnx_export,
        "to_onnx",
        lambda module, *rest: seen.append(module.model.training),
    )
    onnx_export.graphs_of(model)
    assert seen == [False, False] and model.training


# --- engines that know the Transformer ------------------------------------------------

TEXTS = [
    "My brother lives in Boston.",
    "naïve ☕ 😀",
    "x",
    "two  spaces\tand a tab ",
    "Help! He's got 3,000 (three thousand) of them.",
]


def small_model(**changes):
    """A small model with the paper's architecture, but for the changes; odd weights."""
    _, tokenizer, _ = other_model()
    sizes = {"d_model": 24, "num_heads": 3, "num_layers": 2, "d_ff": 40}
    torch.manual_seed(2)
    model = Transformer(TransformerConfig(tokenizer.vocab_size, **sizes | changes))
    with torch.no_grad():  # no number is one by accident
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    return model.eval(), tokenizer


def outputs_for(tokenizer):
    """Ids of some sources, and of outputs that no model would say."""
    src = tokenizer.encode_all(TEXTS)
    return src, [ids[::-1] for ids in src]


def assert_same_scores(found, wanted):
    assert [len(row) for row in found] == [len(row) for row in wanted]
    assert np.abs(np.concatenate(found) - np.concatenate(wanted)).max() < 1e-4


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}])
def test_marian_says_the_same(tmp_path, changes):
    """By transformers' own classes, from the folder alone."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    model, tokenizer = small_model(**changes)
    export_marian(model, tokenizer, tmp_path / "it")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "it")
    src, tgt = outputs_for(tokenizer)
    rows = [[i - 1 for i in [*ids, EOS]] for ids in src]  # the padding is last there
    assert theirs(TEXTS)["input_ids"] == rows
    for ids, row in zip(src, rows, strict=True):
        assert theirs.decode(row, skip_special_tokens=True) == tokenizer.decode(ids)
    wanted = token_scores(model, src, tgt)
    assert_same_scores(marian_scores(tmp_path / "it", src, tgt), wanted)
    twin = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "it")
    given = theirs(TEXTS, return_tensors="pt", padding=True)
    said = twin.generate(**given, num_beams=1, max_new_tokens=9).tolist()
    ours = greedy_decode(model, pad([[*ids, EOS] for ids in src]), max_extra=90)
    for row, ids in zip(said, ours, strict=True):
        said = [(i + 1) % tokenizer.vocab_size for i in row[1:]]
        assert [i for i in said if i not in (PAD, EOS)] == ids[:9]


@pytest.mark.parametrize("changes", [{}, {"activation": "swish", "output_bias": True}])
def test_ctranslate2_converts_our_marian_folder(tmp_path, changes):
    """By its own converter. It leaves out the padding; so does our softmax here."""
    from ctranslate2 import Translator as Engine
    from ctranslate2.converters import TransformersConverter

    model, tokenizer = small_model(**changes)
    if model.output.bias is not None:
        torch.nn.init.normal_(model.output.bias)
    export_marian(model, tokenizer, tmp_path / "it")
    TransformersConverter(str(tmp_path / "it")).convert(str(tmp_path / "other"))
    engine = Engine(str(tmp_path / "other"), intra_threads=1)
    src, tgt = outputs_for(tokenizer)

    def without_padding(src_ids, tgt_ids):
        return model(src_ids, tgt_ids).index_fill(-1, torch.tensor([PAD]), -torch.inf)

    pieces = tokenizer.processor.id_to_piece
    rows = [[[*map(pieces, ids)] for ids in side] for side in (src, tgt)]
    rows[0] = [[*row, "</s>"] for row in rows[0]]
    scores = [row.log_probs for row in engine.score_batch(*rows)]
    assert_same_scores(scores, token_scores(without_padding, src, tgt))
    found = engine.translate_batch(rows[0], beam_size=1, max_decoding_length=9)
    limit = greedy_decode(model, pad([[*ids, EOS] for ids in src]), max_extra=90)
    for row, ids in zip(found, limit, strict=True):
        assert row.hypotheses[0][:9] == [*map(pieces, ids[:9])]


def test_marian_has_the_same_gradients():
    model, _tokenizer = small_model()
    twin = to_marian(model)
    ids = torch.tensor([[5, 6, 7, EOS]])
    model(ids, ids).log_softmax(dim=-1)[0, :, 9].sum().backward()
    twin(ids, decoder_input_ids=ids).logits.log_softmax(-1)[0, :, 9].sum().backward()
    theirs, order = dict(twin.named_parameters()), sines_first(24)
    for name, tensor, axes in marian_places(model):
        grad = tensor.grad
        for axis in axes:
            grad = grad.index_select(axis, order)
        torch.testing.assert_close(theirs[name].grad, grad, atol=1e-4, rtol=1e-4)


def test_marian_begins_with_normal_weights():
    """Held against the deviation that transformers gives each of its tensors."""
    from transformers import MarianMTModel

    config = TransformerConfig(400, d_model=64, num_heads=4, num_layers=2, d_ff=96)
    model = Transformer(config)
    normal_weights(model, 0.02)
    ours, theirs = to_marian(model), MarianMTModel(marian_config(config))
    for name, tensor in theirs.named_parameters():
        mine, its = (t.detach() for t in (ours.get_parameter(name), tensor))
        if its.dim() == 1 or "position" in name:  # biases, norms, sines
            torch.testing.assert_close(mine, its)
        else:
            assert mine.std().item() == pytest.approx(its.std().item(), rel=0.06), name


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_marian_and_back_is_the_same_model(heads, width, layers, bias):
    sizes = {"d_model": 2 * heads * width, "num_heads": heads, "num_layers": layers}
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(50, d_ff=7, attention_bias=bias, **sizes))
    back = marian_model(to_marian(model)).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(back.pop(name), tensor)
    assert not any(tensor.any() for tensor in back.values())  # biases that it lacks


@pytest.mark.parametrize(
    "change, telling",
    [
        ({"activation_function": "gelu_new"}, "activation_function='gelu_new'"),
        ({"decoder_start_token_id": 9}, "decoder_start_token_id=9"),
        ({"pad_token_id": 7}, "pad_token_id=7"),
        ({"decoder_layers": 1}, "decoder_layers=1"),
    ],
)
def test_other_marians_are_refused(change, telling):
    """Another activation than we have, another start than BOS or the padding."""
    from transformers import MarianMTModel

    model, _ = small_model()
    twin = MarianMTModel(marian_config(model.config, **change))
    with pytest.raises(ValueError, match=telling):
        marian_model(twin)


@pytest.mark.parametrize(
    "change",
    [
        {"activation_function": "silu"},
        {"scale_embedding": False},
        {"share_encoder_decoder_embeddings": False},
        {"scale_embedding": False, "decoder_start_token_id": PAD},
    ],
)
def test_marians_of_other_kinds_are_read(change):
    """Another name of swish; embeddings that are not scaled, or not shared."""
    from transformers import MarianMTModel

    model, _ = small_model()
    torch.manual_seed(3)
    twin = MarianMTModel(marian_config(model.config, **change)).eval()
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    ours = marian_model(twin)
    assert ours.config.activation == ("swish" if "silu" in change.values() else "relu")
    assert ours.config.tie_embeddings == ("activation_function" in change)
    src, tgt = torch.randint(4, 200, (2, 3, 6))
    first = [torch.full((3, 1), i) for i in (BOS, twin.config.decoder_start_token_id)]
    read = [torch.cat([one, tgt], dim=1) for one in first]
    said = slice(4, None)
    found, wanted = ours(src, read[0]), twin(src, decoder_input_ids=read[1]).logits
    found, wanted = found[..., said], wanted[..., said]
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("activation", ["relu", "gelu", "swish"])
@pytest.mark.parametrize("start", [BOS, PAD])
def test_a_marian_like_those_of_the_hub(activation, start, tmp_path):
    """Random weights of transformers' own: logits, gradients, and back again."""
    from transformers import MarianMTModel

    sizes = {"d_model": 24, "num_heads": 3, "num_layers": 2, "d_ff": 40, "dropout": 0.0}
    changes = {"activation_function": activation, "decoder_start_token_id": start}
    torch.manual_seed(1)
    config = marian_config(TransformerConfig(50, **sizes), **changes)
    twin = MarianMTModel(config)
    twin.final_logits_bias.normal_()
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    ours = marian_model(twin.eval())
    assert ours.config.activation == activation and ours.config.output_bias
    src, tgt = torch.randint(4, 50, (2, 3, 6))
    src[0, 4:] = PAD
    first = torch.full((3, 1), start)
    theirs = twin(
        src, attention_mask=src != PAD, decoder_input_ids=torch.cat([first, tgt], 1)
    ).logits
    logits = ours(src, torch.cat([torch.full((3, 1), BOS), tgt], 1))
    keep = [i for i in range(50) if i != BOS]  # never said
    torch.testing.assert_close(logits[..., keep], theirs[..., keep])
    for one in (logits, theirs):
        one[..., 5:].log_softmax(-1)[..., 7].sum().backward()
    places, order = dict(twin.named_parameters()), sines_first(24)
    for name, tensor, axes in marian_places(ours):
        grad = tensor.grad
        for axis in axes:
            grad = grad.index_select(axis, order)
        found = places[name].grad
        if name == "model.shared.weight":  # the start stands in another row
            grad, found = grad[4:], found[4:]
        torch.testing.assert_close(grad, found, atol=1e-5, rtol=1e-4)
    again = marian_model(to_marian(ours)).state_dict()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(again[name], tensor), name
    again = to_marian(ours)  # and from files
    again.save_pretrained(tmp_path)
    loaded = MarianMTModel.from_pretrained(tmp_path, local_files_only=True)
    assert torch.equal(loaded.final_logits_bias, twin.final_logits_bias) or start == PAD
    assert torch.equal(loaded.final_logits_bias[0], ours.output.bias)


def test_what_is_no_marian_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no Marian model"):
        from_marian(tmp_path)
    model, tokenizer = small_model()
    folder = export_marian(model, tokenizer, tmp_path / "it")
    whole = (folder / "vocab.json").read_bytes()
    (folder / "vocab.json").write_bytes(whole[:-9])
    with pytest.raises(ValueError, match="vocab.json has .* bytes instead of"):
        from_marian(folder)
    (folder / "manifest.json").unlink()  # as from others, who write none
    with pytest.raises(ValueError, match="holds no Marian model"):
        from_marian(folder)
    (folder / "vocab.json").write_bytes(whole)
    names = json.loads((folder / "vocab.json").read_text("utf-8"))
    last = len(names) - 1
    swapped = {n: last + 2 - i if 2 < i < last else i for n, i in names.items()}
    for content, why in (
        ({name: -i for name, i in names.items()}, r"have the ids \[-\d+, 0, -1, -2\]"),
        (swapped, "vocab.json has other pieces or ids than source.spm"),
        ([1, 2], "holds no Marian model"),
    ):
        (folder / "vocab.json").write_text(json.dumps(content), encoding="utf-8")
        with pytest.raises(ValueError, match=why):
            from_marian(folder)


def test_why_models_of_opus_mt_are_refused(tmp_path):
    """Two SentencePiece models, the end with id 0, padding last: both are named."""
    from transformers import MarianMTModel, MarianTokenizer

    names = {"</s>": 0, "<unk>": 1}  # as Marian numbers them
    sides = zip(*grammar_split("train", 300), strict=True)
    for side, lines in zip(("source", "target"), sides, strict=True):
        prefix = str(tmp_path / side)
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_prefix=prefix,
            vocab_size=120,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        os.replace(f"{prefix}.model", f"{prefix}.spm")
        theirs = spm.SentencePieceProcessor(model_file=f"{prefix}.spm")
        for i in range(3, theirs.vocab_size()):
            names.setdefault(theirs.id_to_piece(i), len(names))
    pad_id = names["<pad>"] = len(names)
    (tmp_path / "vocab.json").write_text(json.dumps(names), encoding="utf-8")
    sizes = {"d_model": 16, "num_heads": 2, "num_layers": 1, "d_ff": 32}
    config = marian_config(
        TransformerConfig(len(names), **sizes),
        activation_function="swish",
        pad_token_id=pad_id,
        decoder_start_token_id=pad_id,
        eos_token_id=0,
        bos_token_id=0,
        forced_eos_token_id=0,
    )
    MarianMTModel(config).save_pretrained(tmp_path)
    files = [str(tmp_path / n) for n in ("source.spm", "target.spm", "vocab.json")]
    ids = MarianTokenizer(*files)("the dog")["input_ids"]  # transformers reads them
    assert ids[-1] == 0 and names["<unk>"] not in ids
    with pytest.raises(ValueError) as refused:
        from_marian(tmp_path, "cpu")
    said = str(refused.value)
    assert "source.spm and target.spm differ, as in models of OPUS-MT" in said
    assert f"<pad> <unk> <s> </s> have the ids [{pad_id}, 1, None, 0] instead" in said
    assert "must share one SentencePiece model" in said
    (tmp_path / "target.spm").write_bytes((tmp_path / "source.spm").read_bytes())
    with pytest.raises(ValueError, match="have the ids") as refused:
        from_marian(tmp_path, "cpu")
    assert "differ" not in str(refused.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_first": True},
        {"tie_embeddings": False},
        {"positions": "learned"},
        {"d_k": 5},
        {"d_v": 9},
    ],
)
def test_marian_has_no_place_for_other_architectures(tmp_path, changes):
    model, tokenizer = small_model(**changes)
    (name, value), *_ = changes.items()
    with pytest.raises(ValueError, match=f"Marian has no place for {name}={value!r}"):
        export_marian(model, tokenizer, tmp_path / "it")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_first": True},
        {"tie_embeddings": False, "attention_bias": True},
        {"positions": "learned", "max_length": 90},
    ],
)
def test_ctranslate2_says_the_same(tmp_path, changes):
    model, tokenizer = small_model(**changes)
    engine = CTranslate2Model(export_ctranslate2(model, tokenizer, tmp_path / "it"))
    src, tgt = outputs_for(tokenizer)
    found, wanted = engine.token_scores(src, tgt), token_scores(model, src, tgt)
    assert_same_scores(found, wanted)
    eighth = export_ctranslate2(model, tokenizer, tmp_path / "8", "int8")
    size = (eighth / "model.bin").stat().st_size
    assert size < (tmp_path / "it" / "model.bin").stat().st_size


def test_ctranslate2_has_no_place_for_odd_heads(tmp_path):
    model, tokenizer, _ = other_model()
    with pytest.raises(ValueError, match="CTranslate2 has no place for d_k=5"):
        export_ctranslate2(model, tokenizer, tmp_path / "it")
    with pytest.raises(ValueError, match="quantization='int4': must be \"float32\""):
        export_ctranslate2(*small_model(), tmp_path / "it", "int4")
    with pytest.raises(ValueError, match="is no export for CTranslate2"):
        CTranslate2Model(tmp_path)


# --- int8 in torch --------------------------------------------------------------------


@given(
    rows=st.integers(1, 9),
    inside=st.integers(1, 70),
    outside=st.integers(1, 40),
    size=st.sampled_from([1e-6, 1.0, 1e6]),
    bias=st.booleans(),
    seed=st.integers(0, 999),
)
def test_int8_products_are_those_of_numpy(rows, inside, outside, size, bias, seed):
    """Exact sums of whole numbers, and no further from float64 than rounding allows."""
    torch.manual_seed(seed)
    linear = torch.nn.Linear(inside, outside, bias=bias)
    x = size * torch.randn(1, rows, inside)
    with torch.inference_mode():
        found = Int8Linear(linear)(x)[0].double().numpy()
    x, w = x[0].double().numpy(), linear.weight.detach().double().numpy()
    b = linear.bias.detach().double().numpy() if bias else 0.0
    x_scale = np.abs(x).max(axis=1, keepdims=True) / 127
    w_scale = np.abs(w).max(axis=1, keepdims=True) / 127
    # Each factor is off by half a scale at most; |xy - uv| <= |x||y - v| + |v||x - u|.
    bound = (
        np.abs(x).sum(1)[:, None] * w_scale.T / 2
        + (np.abs(w).sum(1)[:, None] + inside * w_scale / 2).T * x_scale / 2
    )
    assert (np.abs(found - (x @ w.T + b)) <= 1.001 * bound + 1e-6).all()
    whole = np.rint(w / w_scale).astype(np.int64)
    if size == 1.0:  # where no half is rounded the other way in float32
        exact = np.rint(x / x_scale).astype(np.int64) @ whole.T * x_scale * w_scale.T
        off = np.abs(found - exact - b) > 1e-4 * np.abs(exact).max() + 1e-6
        assert off.mean() < 0.1 or rows * outside < 20


def test_int8_translates_the_same_alone_and_in_company():
    """A scale for each row: neighbours and padding change no translation."""
    model, tokenizer, _ = load_pretrained("tatoeba-en-de", "cpu")
    fast = to_int8(model)
    texts = ["Tom is reading a book.", "Help!", "I don't know what to say about that."]
    rows = [[*tokenizer.encode(text), EOS] for text in texts]
    together, wanted = (
        [best[0].ids for best in beam_search(one, pad(rows), 2)]
        for one in (fast, model)
    )
    alone = [beam_search(fast, pad([row]), 2)[0][0].ids for row in rows]
    assert together == alone == wanted
    src, tgt = outputs_for(tokenizer)
    found, wanted = token_scores(fast, src, tgt), token_scores(model, src, tgt)
    gaps = [
        abs(a - b)
        for x, y in zip(found, wanted, strict=True)
        for a, b in zip(x, y, strict=True)
    ]
    assert 0 < np.mean(gaps) < 0.0065 * np.mean(np.abs(np.concatenate(wanted)))
    said = [Translator(one, tokenizer)(texts, 2) for one in (fast, model)]
    assert said[0] == said[1]


@pytest.mark.parametrize("changes", [{}, {"norm_first": True, "attention_bias": True}])
def test_int8_is_saved_and_read(changes):
    model, tokenizer = small_model(**changes)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    fast = to_int8(model.train())
    assert model.training and not fast.training
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    torch.manual_seed(1)
    other, _ = small_model(**changes)
    for p in other.parameters():
        torch.nn.init.normal_(p, std=0.1)
    other = to_int8(other)
    src, tgt = outputs_for(tokenizer)
    wanted = token_scores(fast, src, tgt)
    assert token_scores(other, src, tgt) != wanted
    other.load_state_dict(fast.state_dict())
    assert token_scores(other, src, tgt) == wanted
    kinds = {type(m) for m in fast.modules()}
    assert Int8Linear in kinds and torch.nn.Linear not in kinds


def test_int8_says_where_it_does_not_work():
    model, _ = small_model()
    with pytest.raises(ValueError, match="the model is on meta; int8 products are for"):
        to_int8(model.to("meta"))
    linear = Int8Linear(torch.nn.Linear(4, 3))
    with pytest.raises(ValueError, match="for a CPU, and x is on meta"):
        linear(torch.zeros(2, 4, device="meta"))
    broken = torch.nn.Linear(4, 3)
    broken.weight.data[1, 2] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        Int8Linear(broken)
    with torch.inference_mode():
        for bad in (torch.nan, torch.inf):  # damage goes on, for the search to refuse
            assert not linear(torch.tensor([[1.0, bad, 0.0, 0.0]])).isfinite().any()
        assert torch.equal(linear(torch.zeros(1, 4))[0], linear.bias)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return int8_engine(tmp_path_factory.mktemp("engine") / "int8")


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    return exact_engine(tmp_path_factory.mktemp("exact") / "it")


def test_one_line_for_each_line(engine):
    """Nothing, spaces, and far more than any position the engine knows."""
    lines = ["Where is the station?", "", "   ", "I am here. " * 300, "🙂"]
    with warnings.catch_warnings(record=True):
        found = engine(lines)
    assert len(found) == len(lines) and engine([]) == []
    assert found[0] == "Wo ist der Bahnhof?" and found[1] == found[2] == ""
    assert found[3] == " ".join(engine(["I am here."]) * 300) and found[4] == "🙂"
    assert found[:1] == engine(lines[:1])


def test_odd_text_goes_the_way_of_the_translator(exact):
    """Split, cut, copied, told: alike, and word for word where both are greedy."""
    engine, translator = exact
    assert engine.max_length == translator.max_length
    told = [], []
    found = engine(ODD, beam_size=1, tell=told[0].append)
    assert found == translator(ODD, beam_size=1, tell=told[1].append)
    assert told[0] == told[1] and len(told[0]) == 2
    for words in "4 is mostly characters", "9 has a sentence that is too long":
        assert any(said.startswith(f"line {words}") for said in told[0])
    assert len(engine.decode([[9, 8, 7]], beam_size=1)) == 1
    text = "\r\n".join(ODD[:6])
    assert engine(text, beam_size=1, tell=told[0].append) == "\n".join(found[:6])
    with pytest.warns(UserWarning, match="line 1 is mostly .* copied"):
        assert engine("😀 😀") == "😀 😀"


@pytest.mark.corpora
def test_scores_of_the_engine_are_log_probabilities(exact):
    engine, translator = exact
    rows = translator.tokenizer.encode_all(sentences(5))
    best = [found[0] for found in engine.decode(rows)]
    wanted = engine.token_scores(rows, [one.ids for one in best])
    for one, scores in zip(best, wanted, strict=True):
        assert one.log_prob == pytest.approx(sum(scores), abs=1e-2)


@pytest.mark.parametrize("beam_size", [0, 100_000])
def test_beams_that_are_none(exact, exported, beam_size):
    for run in (exact[0], exported[2]):
        with pytest.raises(ValueError, match=f"beam_size={beam_size}: must be "):
            run("a dog", beam_size=beam_size)


def test_the_length_of_the_training_is_exported(tmp_path):
    model, tokenizer = small_model()
    for about, wanted in ({}, 128), ({"recipe": {"max_length": 9}}, 9):
        folder = export_ctranslate2(model, tokenizer, tmp_path / "it", about=about)
        assert CTranslate2Model(folder).max_length == wanted
    kinds = ["ctranslate2", "ctranslate2-int8"]
    folders = export_module.export_model(
        model, tokenizer, tmp_path / "all", {"max_length": 11}, formats=kinds
    )
    for kind in kinds:
        assert CTranslate2Model(folders[kind]).max_length == 11


@pytest.mark.parametrize(
    "changes, telling",
    [
        ({"activation": "gelu"}, "activation='gelu'"),
        ({"activation": "swiglu"}, "activation='swiglu'"),
        ({"norm": "rms"}, "norm='rms'"),
        ({"positions": "rotary"}, "rotary positions"),
        ({"num_kv_heads": 1}, "heads that"),
        ({"num_experts": 2}, "mixtures of experts"),
    ],
)
def test_what_chapter_28_changes_is_not_left_out(tmp_path, changes, telling):
    _, tokenizer = small_model()
    sizes = {"d_model": 24, "num_heads": 3, "num_layers": 1, "d_ff": 40} | changes
    config = FamilyConfig(tokenizer.vocab_size, cross_attention=True, **sizes)
    model = build_model(config)
    writers = [export_marian, export_ctranslate2]
    writers += [export_onnx] if changes.keys() & {"positions", "num_kv_heads"} else []
    for write in writers:
        with pytest.raises(ValueError, match=telling):
            write(model, tokenizer, tmp_path / "it")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "write, read",
    [(export_marian, from_marian), (export_ctranslate2, CTranslate2Model)],
)
def test_a_bit_of_any_file_of_an_export_is_noticed(tmp_path, write, read):
    folder = write(*small_model(), tmp_path / "it")
    modes = {path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert len(modes) == 1 and len(list(folder.iterdir())) >= 5
    for path in folder.iterdir():
        whole = path.read_bytes()
        harmed = bytearray(whole)
        harmed[len(whole) // 2] ^= 4
        path.write_bytes(harmed)
        with pytest.raises(ValueError, match=str(folder)):
            read(folder)
        path.write_bytes(whole)
    read(folder)


@pytest.mark.parametrize("write", [export_onnx, export_marian, export_ctranslate2])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_other_numbers_are_refused(tmp_path, write, kind):
    model, tokenizer = small_model()
    with pytest.raises(ValueError, match=r"call model.float\(\) before"):
        write(model.to(kind), tokenizer, tmp_path / "it")


@pytest.mark.parametrize("open_model", [CTranslate2Model, OnnxModel])
@pytest.mark.parametrize("threads", [-1, 0, 257, 100_000])
def test_threads_that_no_machine_has(tmp_path, open_model, threads):
    """CTranslate2 would end the program at 100,000, before a word is said."""
    with pytest.raises(ValueError, match=f"threads={threads}: must be from 1 to 256"):
        open_model(tmp_path, threads=threads)


# --- one command ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def all_exports(tmp_path_factory):
    """A small model, its tokenizer, and the folder of each of its exports.

    Its text, which the exports tell of, lies in their owner's folder.
    """
    owner, pairs = tmp_path_factory.mktemp("all"), grammar_split("train", 60)
    for side, end in enumerate(("en", "de")):
        text = "".join(pair[side] + "\n" for pair in pairs)
        (owner / f"mine.{end}").write_text(text, "utf-8")
    files = [str(owner / f"mine.{end}") for end in ("en", "de")]
    data = prepare({"train": files, "valid": files}, owner / "data", vocab_size=340)
    model, _ = small_model(num_layers=1)
    about = {"data": data.data, "recipe": {"max_length": 60}}
    folders = export_module.export_model(model, data.tokenizer, owner / "out", about)
    return model, data.tokenizer, folders


def test_all_exports_are_proved(all_exports, tmp_path):
    model, tokenizer, folders = all_exports
    (place,) = {folder.parent for folder in folders.values()}
    assert {path.name for path in place.iterdir()} == set(export_module.EXPORTS)
    apart = export_module.prove(model, tokenizer, folders, ["", *TEXTS])
    assert apart.keys() == folders.keys()
    assert all(x < 1e-4 for kind, x in apart.items() if "int8" not in kind)
    assert 1e-4 < apart["ctranslate2-int8"] < 1 and 1e-4 < apart["onnx-int8"] < 1
    again = export_module.export_model(model, tokenizer, place, formats=["marian"])
    assert again == {"marian": place / "marian"}
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.encoder.layers[0].feed_forward.w_2.bias[0] += 1
    for kind in ("onnx", "marian", "ctranslate2"):
        with pytest.raises(RuntimeError, match="off by .*do not use it"):
            export_module.prove(other, tokenizer, {kind: folders[kind]}, TEXTS)
    with pytest.raises(ValueError, match="no sentence has a word"):
        export_module.prove(model, tokenizer, folders, ["", "  "])
    with pytest.raises(ValueError, match="tflite: there are onnx, marian"):
        export_module.export_model(model, tokenizer, tmp_path, formats=["tflite"])


def test_all_exports_or_none(tmp_path):
    """What one has no place for, or where one may not write, is said before any is."""
    model, tokenizer = small_model(norm_first=True)
    with pytest.raises(ValueError, match="Marian has no place for norm_first=True"):
        export_module.export_model(model, tokenizer, tmp_path / "out")
    assert not list(tmp_path.iterdir())
    (tmp_path / "out" / "ctranslate2").mkdir(parents=True)
    (tmp_path / "out" / "ctranslate2" / "model.bin").write_text("another program's")
    with pytest.raises(ValueError, match="ctranslate2 holds something else"):
        export_module.export_model(
            model, tokenizer, tmp_path / "out", formats=["onnx", "ctranslate2"]
        )
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["ctranslate2"]


def test_long_sentences_are_no_proof(tmp_path):
    model, tokenizer = small_model()
    kinds = ["marian", "ctranslate2"]
    folders = export_module.export_model(model, tokenizer, tmp_path, formats=kinds)
    long = "a dog sleeps " * 400
    assert len(tokenizer.encode(long)) > 1024
    found = export_module.prove(model, tokenizer, folders, [long, *TEXTS])
    assert found == export_module.prove(model, tokenizer, folders, TEXTS)
    with pytest.raises(ValueError, match="fewer than 950 tokens"):
        export_module.prove(model, tokenizer, folders, [long])


def test_numbers_that_are_none_are_no_proof(tmp_path, monkeypatch):
    model, tokenizer = small_model()
    folders = export_module.export_model(
        model, tokenizer, tmp_path, formats=["ctranslate2-int8"]
    )
    monkeypatch.setattr(
        CTranslate2Model,
        "token_scores",
        lambda self, src, tgt: [[np.nan] * (len(t) + 1) for t in tgt],
    )
    with pytest.raises(RuntimeError, match="off by nan"):
        export_module.prove(model, tokenizer, folders, TEXTS)


@pytest.mark.parametrize("write", [export_marian, export_ctranslate2])
def test_engines_write_over_nothing_else(tmp_path, write):
    model, tokenizer = small_model()
    write(model, tokenizer, tmp_path / "it")
    write(model, tokenizer, tmp_path / "it")
    assert [path.name for path in tmp_path.iterdir()] == ["it"]
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds something else"):
        write(model, tokenizer, tmp_path)
    with pytest.raises(ValueError, match="give the one it was trained with"):
        write(Transformer(TransformerConfig(9, 8, 2)), tokenizer, tmp_path / "new")


# --- left, full, damaged, and not what it is taken for --------------------------------


def test_what_a_killed_export_left_is_swept_by_the_next(tmp_path):
    """In the folder of the export alone, and nothing of anybody else's."""
    model, tokenizer = small_model()
    out = tmp_path / "out"
    export_module.export_model(model, tokenizer, out, formats=["marian"])
    before = {*out.rglob("*")}
    for part in (out / ".onnx.part", out / ".marian.part", tmp_path / ".out.part"):
        (part / "new").mkdir(parents=True)
        (part / "made-by-transformer-lib").touch()
        (part / "new" / "weights.bin").write_text("half")
    (out / ".ctranslate2.part").mkdir()
    (out / ".ctranslate2.part" / "thesis.txt").write_text("mine")
    for place in (out, tmp_path):
        (place / "probe.0123abcd.part").touch()
    (out / "probe.part").touch()  # no name that we give
    export_module.export_model(model, tokenizer, out, formats=["marian"])
    theirs = {out / ".ctranslate2.part", out / ".ctranslate2.part" / "thesis.txt"}
    assert {*out.rglob("*")} - before == theirs | {out / "probe.part"}
    assert {path.name for path in tmp_path.iterdir()} == {
        "out",
        ".out.part",
        "probe.0123abcd.part",
    }


def test_a_full_disk_is_told_in_a_sentence(tmp_path, monkeypatch):
    """Safetensors hides which error the system gave: once as it comes, once as ours."""
    from transformers import MarianMTModel

    model, tokenizer = small_model()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            export_marian(model, tokenizer, tmp_path / "it")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    def full(self, folder):
        (folder / "config.json").write_text("{}")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(MarianMTModel, "save_pretrained", full)
    with pytest.raises(OSError, match="it could not be .* Free some space on the disk"):
        export_marian(model, tokenizer, tmp_path / "it")
    assert not list(tmp_path.iterdir())


def sealed(manifest):
    """A manifest with the checksum that it should have."""
    return json.dumps(manifest | {"checksum": storage.table_checksum(manifest)})


def test_damage_with_a_right_checksum_is_told_too(folder, tmp_path):
    """As of who writes another file and its checksum, or another shape."""
    place = shutil.copytree(folder, tmp_path / "it")
    whole = json.loads((place / "manifest.json").read_text("utf-8"))
    del whole["checksum"]
    for name, content in (
        ("step.onnx", b"no graph"),
        ("weights.bin", b"short"),
        ("tokenizer.model", b"no pieces"),
    ):
        before = (place / name).read_bytes()
        (place / name).write_bytes(content)
        known = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        changed = whole | {"files": whole["files"] | {name: known}}
        (place / "manifest.json").write_text(sealed(changed), "utf-8")
        with pytest.raises(ValueError, match="no graphs that|no SentencePiece model"):
            OnnxModel(place)
        (place / name).write_bytes(before)
    for changes in (
        {"decoding": {}},
        {"model": {}},
        {"files": {}},
        {"model": 3},
        {"files": {"tokenizer.model": {}}},
    ):
        (place / "manifest.json").write_text(sealed(whole | changes), "utf-8")
        with pytest.raises(ValueError, match=r"manifest.json (lacks|is damaged)"):
            OnnxModel(place)


def test_damaged_marian_models_are_told(tmp_path):
    """Of others, who write no manifest: each library has errors of its own."""
    model, tokenizer = small_model()
    place = export_marian(model, tokenizer, tmp_path / "it")
    (place / "manifest.json").unlink()
    from_marian(place, "cpu")
    weights = load_file(place / "model.safetensors")
    some = dict(list(weights.items())[3:])
    other = {name: tensor[..., :-1].contiguous() for name, tensor in weights.items()}
    for name, content in (
        ("model.safetensors", b""),
        ("model.safetensors", b"\xff" * 100),
        ("model.safetensors", save(some)),
        ("model.safetensors", save(other)),
        ("config.json", b"{"),
        ("config.json", b"[]"),
        ("vocab.json", b"\xff"),
        ("config.json", b'{"d_model": "x"}'),
        ("vocab.json", b"[3]"),
        ("source.spm", b"no pieces"),
    ):
        before = (place / name).read_bytes()
        (place / name).write_bytes(content)
        with pytest.raises(ValueError, match="model, or a damaged one|spm differ"):
            from_marian(place, "cpu")
        (place / name).write_bytes(before)
    from_marian(place, "cpu")


def test_an_engine_that_cannot_be_used_is_told(tmp_path):
    model, tokenizer = small_model()
    place = export_ctranslate2(model, tokenizer, tmp_path / "it")
    (place / "model.bin").write_bytes(b"no model")
    write_manifest(place)
    with pytest.raises(ValueError, match="it cannot be used"):
        CTranslate2Model(place)


def test_an_export_given_as_a_model_says_what_it_is(all_exports):
    folders = all_exports[-1]
    for kind, telling in (
        ("onnx", "ONNX Runtime, which .*OnnxModel runs"),
        ("marian", ".*MarianMTModel"),
        ("ctranslate2", ".*`transformer-lib serve`"),
        ("onnx-int8", "ONNX Runtime"),
        ("ctranslate2-int8", "CTranslate2"),
    ):
        with pytest.raises(ValueError, match=f"{kind} is an export for {telling}"):
            load_pretrained(folders[kind])
    with pytest.raises(ValueError, match="out/ctranslate2 is an export for") as told:
        Translator.from_pretrained(folders["onnx"].parent)
    names = [str(folders[kind]) for kind in ("ctranslate2", "ctranslate2-int8")]
    assert f"`serve` takes {' or '.join(names)}, too." in str(told.value)


def test_an_export_names_no_folder_of_its_owner(all_exports):
    folders = all_exports[-1]
    owner = str(folders["onnx"].parent.parent).encode()
    for folder in folders.values():
        for path in folder.iterdir():
            assert owner not in path.read_bytes(), path
    manifest = json.loads((folders["onnx"] / "manifest.json").read_text("utf-8"))
    assert "mine.en" in json.dumps(manifest["data"])


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
