"""Chapter 24: archives whole and damaged, recipes and tables against the paper."""

import gzip
import inspect
import io
import json
import lzma
import math
import os
import re
import tarfile
import threading
import tracemalloc
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from figures import check_figure, said, shown
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from transformer_lib import wmt
from transformer_lib.corpora import CleaningReport, CorpusUnavailable, grammar_split
from transformer_lib.decoding import beam_search
from transformer_lib.exercises.wmt import (
    check_attention_flops,
    check_cost,
    check_share_out,
)
from transformer_lib.figures.wmt import cost_figure
from transformer_lib.objective import label_smoothed_cross_entropy
from transformer_lib.runs import Recipe, read_evidence
from transformer_lib.transformer import Transformer, TransformerConfig
from transformer_lib.translator import Translator

pytestmark = pytest.mark.corpora  # for real sentences; the rest needs none
VALID = [("The dog is old.", "Der Hund ist alt.")] * 20


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    monkeypatch.setenv("TRANSFORMER_LIB_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture(scope="module")
def real():
    """Real sentences where the mirror has them, else the embedded grammar's."""
    mirror = os.environ["TRANSFORMER_LIB_MIRROR"]
    mixed = Path(mirror, "mixed", "train.en-de.tsv.xz")
    if not (mirror and mixed.is_file()):
        return grammar_split("train")[:3000]
    with lzma.open(mixed, "rt", encoding="utf-8", newline="\n") as lines:
        rows = [next(lines).rstrip("\n").split("\t") for _ in range(200_000)]
    return [tuple(row[1:3]) for row in rows[::67]]


def tar(path, content, mode="w:gz"):
    """A tar archive written by tarfile alone, in the order of content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as archive:
        for name, text in content.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text))
    return path


def lines(*sentences):
    return "".join(f"{s}\n" for s in sentences).encode()


def anything_goes(name):
    """A real archive's name and layout, without its size and hash."""
    archive = wmt.ARCHIVES[name]
    return replace(archive, size=0, source=replace(archive.source, known={}))


# --- names and layout -----------------------------------------------------------------


def test_archives_are_those_that_statmt_publishes():
    wanted = {
        "https://www.statmt.org/wmt13/training-parallel-europarl-v7.tgz": (
            657632379,
            "training/europarl-v7.fr-en.en",
            "training/europarl-v7.fr-en.fr",
        ),
        "https://www.statmt.org/wmt13/training-parallel-commoncrawl.tgz": (
            918311367,
            "commoncrawl.fr-en.en",
            "commoncrawl.fr-en.fr",
        ),
        "https://www.statmt.org/wmt14/training-parallel-nc-v9.tgz": (
            80418416,
            "training/news-commentary-v9.fr-en.en",
            "training/news-commentary-v9.fr-en.fr",
        ),
        "https://www.statmt.org/wmt13/training-parallel-un.tgz": (
            2365634246,
            "un/undoc.2000.fr-en.en",
            "un/undoc.2000.fr-en.fr",
        ),
        "https://www.statmt.org/wmt10/training-giga-fren.tar": (
            2595102720,
            "giga-fren.release2.fixed.en.gz",
            "giga-fren.release2.fixed.fr.gz",
        ),
    }
    found = {a.source.url: (a.size, *a.members["en-fr"]) for a in wmt.ARCHIVES.values()}
    assert found == wanted
    german = [wmt.ARCHIVES[name].members["en-de"] for name in wmt.PAIRS["en-de"]]
    assert german == [
        ("training/europarl-v7.de-en.en", "training/europarl-v7.de-en.de"),
        ("commoncrawl.de-en.en", "commoncrawl.de-en.de"),
        (
            "training/news-commentary-v9.de-en.en",
            "training/news-commentary-v9.de-en.de",
        ),
    ]
    assert list(wmt.PAIRS["en-fr"]) == list(wmt.ARCHIVES)
    for archive in wmt.ARCHIVES.values():
        assert all(re.fullmatch("[0-9a-f]{64}", h) for h in archive.source.known)


# --- fetching -------------------------------------------------------------------------


@pytest.fixture
def server():
    """A server of one file that knows Range, and hangs up after so many bytes.

    Of a file that it has begun it sends no more while `goes_on` is False.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            content, at = self.server.content, 0
            asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            if asked and self.headers.get("If-Range") == '"one"':
                at = int(asked[1])
            self.server.seen.append(at)
            self.send_response(206 if at else 200)
            if at:
                end = len(content) - 1
                self.send_header("Content-Range", f"bytes {at}-{end}/{len(content)}")
            self.send_header("Content-Length", str(len(content) - at))
            self.send_header("ETag", '"one"')
            self.end_headers()
            if self.server.goes_on or not at:
                self.wfile.write(content[at : at + self.server.at_most])

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.seen, server.at_most, server.goes_on = [], 10**9, True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def served(server, archive):
    url = f"http://127.0.0.1:{server.server_port}/{archive.source.filename}"
    server.content = Path(archive.source.url.removeprefix("file://")).read_bytes()
    return replace(archive, source=replace(archive.source, url=url))


def test_a_download_goes_on_where_it_broke_off(server, tmp_path, real):
    made = wmt.miniature(real, tmp_path / "in")["europarl"]
    archive, cache = served(server, made), tmp_path / "there"
    server.at_most = made.size // 3 + 1
    path = wmt.fetch_archive(archive, cache)
    assert path.read_bytes() == server.content
    assert server.seen == [0, server.at_most, 2 * server.at_most]
    assert [p.name for p in cache.iterdir()] == [path.name]
    assert wmt.fetch_archive(archive, cache) == path and len(server.seen) == 3


def test_a_later_call_goes_on(server, tmp_path, real):
    archive = served(server, wmt.miniature(real, tmp_path / "in")["europarl"])
    server.at_most, server.goes_on = 10_000, False
    with pytest.raises(CorpusUnavailable, match="broke off after 10,000 of"):
        wmt.fetch_archive(archive, tmp_path / "there")
    left = sorted(p.name for p in (tmp_path / "there").iterdir())
    assert left == [f"{archive.source.filename}.part{end}" for end in ("", ".json")]
    server.at_most, server.goes_on = 10**9, True
    wmt.fetch_archive(archive, tmp_path / "there")
    assert server.seen == [0, 10_000, 10_000]


def test_a_download_is_never_in_memory(server, tmp_path):
    content = {"a": os.urandom(30_000_000)}
    like = wmt.ARCHIVES["giga-fren"]
    archive = served(server, wmt.pack_archive(like, content, tmp_path / "in"))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    wmt.fetch_archive(archive, tmp_path / "there")
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert peak < 5_000_000


@pytest.mark.parametrize("wrong", ["size", "hash"])
def test_another_file_is_refused_and_not_kept(server, tmp_path, real, wrong):
    archive = served(server, wmt.miniature(real, tmp_path / "in")["commoncrawl"])
    if wrong == "hash":
        flipped = bytearray(server.content)
        flipped[len(flipped) // 2] ^= 1
        server.content = bytes(flipped)
    else:
        server.content += b"more"
    said = "published: it is damaged" if wrong == "hash" else "instead of"
    with pytest.raises(CorpusUnavailable, match=said):
        wmt.fetch_archive(archive, tmp_path / "there")
    assert not list((tmp_path / "there").iterdir())


def test_parts_of_two_editions_are_fetched_once_more(server, tmp_path, real):
    archive = served(server, wmt.miniature(real, tmp_path / "in")["commoncrawl"])
    content, server.content = server.content, server.content[::-1]
    server.at_most, server.goes_on = 15, False
    with pytest.raises(CorpusUnavailable, match="broke off after 15 of"):
        wmt.fetch_archive(archive, tmp_path)
    server.content, server.at_most, server.goes_on = content, 10**9, True
    server.seen.clear()
    path = wmt.fetch_archive(archive, tmp_path)
    assert path.read_bytes() == content and server.seen == [15, 0]


def test_nowhere_to_be_had(tmp_path):
    source = replace(wmt.ARCHIVES["un"].source, url=(tmp_path / "no.tgz").as_uri())
    with pytest.raises(CorpusUnavailable, match="Connect to the network"):
        wmt.fetch_archive(replace(wmt.ARCHIVES["un"], source=source), tmp_path)
    assert not [p for p in tmp_path.iterdir() if "part" in p.name]


def test_the_cache_comes_first(tmp_path, real):
    made = wmt.miniature(real, tmp_path / "cache")["europarl"]
    gone = replace(made, source=replace(made.source, url="http://127.0.0.1:9/x"))
    assert wmt.fetch_archive(gone) == tmp_path / "cache" / made.source.filename


# --- reading --------------------------------------------------------------------------


@pytest.mark.parametrize("pair", ["en-de", "en-fr"])
def test_from_archives_to_token_files(pair, tmp_path, real):
    archives = wmt.miniature(real, tmp_path / "in", pair)
    ready = wmt.prepare_wmt(
        pair,
        tmp_path / "out",
        archives,
        tmp_path / "there",
        VALID,
        False,
        vocab_size=700,
        threads=1,
    )
    names = wmt.PAIRS[pair]
    inside = {tuple(" ".join(s.split()) for s in p) for p in real}
    with gzip.open(tmp_path / "out/text/train.tsv.gz", "rt", encoding="utf-8") as file:
        rows = [tuple(line.rstrip("\n").split("\t")) for line in file]
    assert set(rows) <= inside and len(rows) > 0.95 * len(real)
    cleaning = json.loads((tmp_path / "out/text/cleaning.json").read_text())
    about = cleaning["archives"]
    assert cleaning["pair"] == pair and list(about) == list(names)
    assert sum(one["read"] for one in about.values()) == len(real)
    assert sum(one["pairs"] for one in about.values()) == len(rows)
    assert ready.data["train"]["read"] == len(rows) and ready.data["valid_pairs"] == 20
    decoded = ready.tokenizer.decode(ready.train[0][0].tolist())
    assert decoded == ready.tokenizer.decode(ready.tokenizer.encode(rows[0][0]))
    left = {p.name for p in (tmp_path / "out/text").iterdir()}
    notes = {f"{name}.{pair}.json" for name in names}
    assert left == {"train.tsv.gz", "valid.tsv.gz", "cleaning.json"} | notes
    again = wmt.prepare_wmt(
        pair,
        tmp_path / "out",
        archives,
        tmp_path / "nothing here",
        VALID,
        False,
        vocab_size=700,
        threads=1,
    )
    assert again.data == ready.data


words = st.lists(
    st.sampled_from("ein Haus große Bäume l’été 1.5 “so” ﬁ".split()),
    min_size=3,
    max_size=6,
).map(" ".join)


@settings(max_examples=15, deadline=None)
@given(pairs=st.lists(st.tuples(words, words), min_size=5, max_size=30))
def test_what_goes_in_comes_out(tmp_path_factory, pairs):
    folder = tmp_path_factory.mktemp("round")
    for pair in ("en-de", "en-fr"):
        found = []
        for archive in wmt.miniature(pairs, folder, pair).values():
            path, report = folder / archive.source.filename, CleaningReport()
            found += wmt.archive_pairs(path, archive.members[pair], report)
        assert sorted(found) == sorted(pairs)


def test_members_in_any_order_and_under_dot(tmp_path):
    english, german = wmt.ARCHIVES["commoncrawl"].members["en-de"]
    content = {
        f"./{german}": lines("ein Hund"),
        "x": b"x" * 10**6,
        f"./{english}": lines("a dog"),
    }
    path = tar(tmp_path / "training-parallel-commoncrawl.tgz", content)
    found = list(wmt.archive_pairs(path, (english, german), CleaningReport()))
    assert found == [("a dog", "ein Hund")]


def test_lines_end_at_the_line_feed_alone(tmp_path):
    odd = "a\u2028b\x0bc\x85d\te\r"
    content = {"en": lines("\ufeff" + odd, "two"), "de": lines(odd, "zwei")}
    path = tar(tmp_path / "x.tgz", content)
    found = list(wmt.archive_pairs(path, ("en", "de"), CleaningReport()))
    assert found == [("a b c d e", "a b c d e"), ("two", "zwei")]


def test_bad_lines_are_dropped_and_counted(tmp_path):
    rows = [
        ("a dog", b"ein Hund"),
        ("", b"leer"),
        ("Hi there", b"Gr\xfc\xdf Gott"),
        ("hello", b"viel " * 50),
        ("x", b"lang " * (1 << 19)),
        ("end", b"Ende"),
    ]
    content = {
        "en": lines(*(a for a, _ in rows)),
        "de": b"".join(b + b"\n" for _, b in rows),
    }
    report = CleaningReport()
    path = tar(tmp_path / "x.tgz", content)
    found = list(wmt.archive_pairs(path, ("en", "de"), report))
    assert found == [("a dog", "ein Hund"), ("end", "Ende")]
    assert report.lines == {
        "one side empty": [2],
        "not UTF-8": [3],
        "length ratio": [4],
        "too long": [5],
    }
    assert report.total == 6 and report.kept == 2


# --- damaged archives -----------------------------------------------------------------

ENGLISH, FRENCH = wmt.ARCHIVES["europarl"].members["en-fr"]
GIGA = wmt.ARCHIVES["giga-fren"].members["en-fr"]
TEXT = lines(*(f"Bonjour {i * i}." for i in range(9000)))
SOME = b"Bonjour 0.\nBonjour 1.\n"
WHOLE = {ENGLISH: TEXT, FRENCH: TEXT}


def packed(text):
    return gzip.compress(text)


DAMAGED = {
    "a truncated tgz": ("europarl", WHOLE, -9000, f"{FRENCH} is cut short or damaged"),
    "cut in the first member": ("europarl", WHOLE, -30_000, "cut short or damaged"),
    "a missing member": (
        "europarl",
        {ENGLISH: TEXT, "training/x.de": b"x\n"},
        None,
        f"holds no member {FRENCH}, but {ENGLISH}, training/x.de",
    ),
    "cut before a member": (
        "europarl",
        {ENGLISH: TEXT, "z": os.urandom(2**21)},
        -20_000,
        f"{FRENCH} is cut short or damaged",
    ),
    "uneven line counts": (
        "europarl",
        WHOLE | {FRENCH: TEXT + SOME},
        None,
        f"{ENGLISH} has 9,000 lines and {FRENCH} has 9,002",
    ),
    "shorter other side": (
        "europarl",
        WHOLE | {FRENCH: TEXT.removeprefix(SOME)},
        None,
        f"{FRENCH} has 8,998 lines and {ENGLISH} has 9,000",
    ),
    "a gzip member cut short": (
        "giga-fren",
        {GIGA[0]: packed(TEXT), GIGA[1]: packed(TEXT)[:-5000]},
        None,
        f"{GIGA[1]} is cut short or damaged after line",
    ),
    "a gzip member that is none": (
        "giga-fren",
        {GIGA[0]: TEXT, GIGA[1]: TEXT},
        None,
        f"{GIGA[0]} is cut short or damaged after line 0",
    ),
    "a truncated tar": (
        "giga-fren",
        dict.fromkeys(GIGA, packed(TEXT)),
        -40_000,
        f"{GIGA[1]} is cut short or damaged",
    ),
    "an empty file": ("europarl", WHOLE, 0, "cut short or damaged after line 0"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damage_is_named_and_leaves_nothing(kind, tmp_path):
    name, content, cut, said = DAMAGED[kind]
    like = anything_goes(name)
    mode = "w" if name == "giga-fren" else "w:gz"
    path = tar(tmp_path / "there" / like.source.filename, content, mode)
    path.write_bytes(path.read_bytes()[:cut])
    text = tmp_path / "text"
    with pytest.raises(CorpusUnavailable, match=re.escape(said)) as told:
        wmt.clean_wmt("en-fr", text, {name: like}, tmp_path / "there", VALID, False)
    assert like.source.filename in str(told.value)
    assert {p.name for p in text.iterdir()} == {"valid.tsv.gz"}


def test_a_web_page_is_no_archive(tmp_path):
    like = anything_goes("un")
    path = tmp_path / "there" / like.source.filename
    path.parent.mkdir()
    path.write_text("<!DOCTYPE html><html>not found</html>" * 40)
    with pytest.raises(CorpusUnavailable, match="training-parallel-un.tgz: un/undoc"):
        wmt.clean_wmt("en-fr", tmp_path / "t", {"un": like}, path.parent, VALID, False)


def test_what_is_done_is_not_done_again(tmp_path, real):
    archives = wmt.miniature(real, tmp_path / "in")
    there, text = tmp_path / "in", tmp_path / "text"
    last = there / archives["news-commentary"].source.filename
    whole = last.read_bytes()
    last.write_bytes(whole[:-100])
    with pytest.raises(CorpusUnavailable, match="cut short"):
        wmt.clean_wmt("en-de", text, archives, there, VALID, False)
    done = text / "europarl.en-de.tsv.gz"
    before = done.stat().st_mtime_ns
    (there / archives["europarl"].source.filename).unlink()  # it is not read again
    assert not (text / "train.tsv.gz").exists()
    last.write_bytes(whole)
    first = done.read_bytes()
    assert done.stat().st_mtime_ns == before
    wmt.clean_wmt("en-de", text, archives, there, VALID, False)
    assert (text / "train.tsv.gz").read_bytes().startswith(first)
    assert not done.exists()


def test_a_folder_of_other_text_is_refused(tmp_path, real):
    german = wmt.miniature(real[:30], tmp_path / "de")
    french = wmt.miniature(real[:30], tmp_path / "fr", "en-fr")
    text = tmp_path / "text"
    wmt.clean_wmt("en-de", text, german, tmp_path / "de", VALID, False)
    with pytest.raises(ValueError, match="holds en-de from europarl, .*choose another"):
        wmt.clean_wmt("en-fr", text, french, tmp_path / "fr", VALID, False)


def test_an_unknown_pair(tmp_path):
    with pytest.raises(ValueError, match="must be 'en-de' or 'en-fr'"):
        wmt.clean_wmt("en-cs", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_memory_does_not_grow_with_the_text(tmp_path, monkeypatch):
    small_pieces = partial(wmt.pieces_of, size=300)
    monkeypatch.setattr(wmt, "pieces_of", small_pieces)
    few = [((a + " ") * 20, (b + " ") * 20) for a, b in grammar_split("valid")]
    pairs, peaks = few * math.ceil(3000 / len(few)), []  # more than fills the buffers
    for times in (1, 5):
        folder = tmp_path / str(times)
        archives = wmt.miniature(pairs * times, folder)
        archives = {"europarl": archives["europarl"]}
        tracemalloc.start()
        wmt.clean_wmt("en-de", folder / "text", archives, folder, VALID, False)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0], peaks


# --- recipes --------------------------------------------------------------------------

PAPER = {  # sections 3, 5, 6.1 and Table 3 of the paper, written down here
    "base": {"d_model": 512, "d_ff": 2048, "num_heads": 8, "num_layers": 6},
    "big": {"d_model": 1024, "d_ff": 4096, "num_heads": 16, "num_layers": 6},
}
DROPOUT = {
    ("base", "en-de"): 0.1,
    ("base", "en-fr"): 0.1,
    ("big", "en-de"): 0.3,
    ("big", "en-fr"): 0.1,
}
STEPS, AVERAGED = {"base": 100_000, "big": 300_000}, {"base": 5, "big": 20}
VOCABULARY = {"en-de": 37_000, "en-fr": 32_000}
SECONDS_A_STEP = {"base": 0.4, "big": 1.0}


@pytest.mark.parametrize("size, pair", DROPOUT)
def test_recipes_are_the_papers(size, pair):
    recipe = Recipe.load(f"wmt14-{pair}-{size}")
    assert recipe.model == PAPER[size] | {"dropout": DROPOUT[size, pair]}
    assert recipe.max_steps == STEPS[size] and recipe.keep_last == AVERAGED[size]
    assert recipe.vocab_size == VOCABULARY[pair] == wmt.VOCABULARY[pair]
    assert (
        recipe.warmup == 4000
        and recipe.lr_factor == 1.0
        and recipe.label_smoothing == 0.1
    )
    assert recipe.max_tokens * recipe.accumulate == 25_000
    assert recipe.validate_every * SECONDS_A_STEP[size] == 600  # ten minutes
    assert recipe.model_type == "bpe" and recipe.name == f"wmt14-{pair}-{size}"
    off = ("clip", "cooldown", "dropout_after", "joined", "renamed", "start_from")
    assert not any(getattr(recipe, name) for name in off)
    config = TransformerConfig(recipe.vocab_size, **recipe.model)
    assert (config.d_k or config.d_model // config.num_heads) == 64
    assert not config.norm_first and config.positions == "sinusoidal"
    assert config.tie_embeddings and not config.attention_bias
    assert config.attention_dropout == 0.0


@pytest.mark.parametrize("search", [beam_search, Translator.__call__])
def test_decoding_is_the_papers_by_default(search):
    given_by = inspect.signature(search).parameters
    wanted = {"beam_size": 4, "alpha": 0.6, "max_extra": 50}
    assert {name: given_by[name].default for name in wanted} == wanted


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_recipes_can_be_shared_out(gpus):
    for size, pair in DROPOUT:
        assert Recipe.load(f"wmt14-{pair}-{size}").accumulate % gpus == 0


def test_parameters_and_vocabulary():
    base = {v: TransformerConfig.base(v).num_parameters() for v in (37_000, 41_004)}
    assert round(base[37_000] / 1e6, 2) == 63.05 and round(base[41_004] / 1e6) == 65
    assert round(TransformerConfig.base(41_208).num_parameters() / 1e6) == 65
    big = [TransformerConfig.big(v).num_parameters() / 1e6 for v in (35_400, 36_300)]
    assert [round(n) for n in big] == [213, 213]
    assert round(TransformerConfig.big(37_000).num_parameters() / 1e6) == 214


# --- arithmetic -----------------------------------------------------------------------

CONFIGS = [
    TransformerConfig(300, 64, num_heads=4, num_layers=2, d_ff=128),
    TransformerConfig(500, 48, num_heads=6, num_layers=3, d_ff=100, d_k=5, d_v=11),
    TransformerConfig(
        400,
        32,
        num_heads=1,
        num_layers=1,
        d_ff=256,
        norm_first=True,
        attention_bias=True,
        tie_embeddings=False,
        positions="learned",
    ),
    TransformerConfig(1000, 64, num_heads=16, num_layers=2, d_ff=64, dropout=0.0),
]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("batch, src_len, tgt_len", [(3, 10, 14), (1, 40, 7)])
def test_flops_are_those_that_torch_counts(config, batch, src_len, tgt_len):
    src_ids = torch.randint(4, config.vocab_size, (batch, src_len))
    tgt_ids = torch.randint(4, config.vocab_size, (batch, tgt_len))
    model = Transformer(config)  # a loss in chunks computes its logits twice
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        label_smoothed_cross_entropy(model(src_ids, tgt_ids), tgt_ids, 0.1).backward()
    ours = wmt.flops_per_step(config, batch, src_len, tgt_len)
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_flops_of_the_papers_runs():
    base, big = TransformerConfig.base(37_000), TransformerConfig.big(37_000)
    runs = (base, 100_000, 9.5e17), (big, 300_000, 9.6e18)
    for config, steps, tokens_rule in runs:
        rule = 6 * config.num_parameters() * 25_000 * steps
        assert rule == pytest.approx(tokens_rule, rel=0.01)
        run = wmt.flops_per_step(config, 1000, 25, 25) * steps
        assert 0.9 < run / rule < 1.1


@pytest.mark.parametrize("sizes", [(0, 5, 5), (1, 0, 5), (1, 5, -1)])
def test_flops_of_nothing(sizes):
    with pytest.raises(ValueError, match="must be at least 1"):
        wmt.flops_per_step(CONFIGS[0], *sizes)


# --- Table 2 --------------------------------------------------------------------------

TABLE_2 = """
ByteNet                   | 23.75 |       |        |
Deep-Att + PosUnk         |       | 39.2  |        | 1.0e20
GNMT + RL                 | 24.6  | 39.92 | 2.3e19 | 1.4e20
ConvS2S                   | 25.16 | 40.46 | 9.6e18 | 1.5e20
MoE                       | 26.03 | 40.56 | 2.0e19 | 1.2e20
Deep-Att + PosUnk ensemble|       | 40.4  |        | 8.0e20
GNMT + RL ensemble        | 26.30 | 41.16 | 1.8e20 | 1.1e21
ConvS2S ensemble          | 26.36 | 41.29 | 7.7e19 | 1.2e21
Transformer base          | 27.3  | 38.1  | 3.3e18 | 3.3e18
Transformer big           | 28.4  | 41.8  | 2.3e19 | 2.3e19
"""


def test_table_2_is_the_papers():
    wanted = [
        [cell.strip() for cell in line.split("|")]
        for line in TABLE_2.strip().splitlines()
    ]
    for row, (name, *cells) in zip(wmt.TABLE_2, wanted, strict=True):
        numbers = [float(cell) if cell else None for cell in cells]
        ours = [
            *(row.bleu[p] for p in ("en-de", "en-fr")),
            *(row.cost[p] for p in ("en-de", "en-fr")),
        ]
        assert (row.model, ours) == (name, numbers)
        assert row.ensemble == name.endswith("ensemble")


@pytest.mark.parametrize(
    "model, pair, days, count, kind",
    [
        ("Transformer base", "en-de", 0.5, 8, "P100"),
        ("Transformer big", "en-fr", 3.5, 8, "P100"),
        ("GNMT + RL", "en-de", 1, 96, "K80"),
        ("GNMT + RL", "en-fr", 6, 96, "K80"),
        ("MoE", "en-de", 1, 64, "K40"),
        ("MoE", "en-fr", 6, 64, "K40"),
        ("ConvS2S", "en-de", 18.5, 1, "M40"),
        ("ConvS2S", "en-fr", 37, 8, "M40"),
        ("ConvS2S ensemble", "en-de", 18.5, 8 * 1, "M40"),
        ("ConvS2S ensemble", "en-fr", 37, 8 * 8, "M40"),
    ],
)
def test_costs_come_from_seconds_processors_and_rate(model, pair, days, count, kind):
    (row,) = (row for row in wmt.TABLE_2 if row.model == model)
    assert f"{wmt.training_cost(days, count, kind):.1e}" == f"{row.cost[pair]:.1e}"


def test_cost_on_an_unknown_processor():
    with pytest.raises(ValueError, match="must be one of K80, K40, M40, P100"):
        wmt.training_cost(1, 1, "H100")


def test_the_best_ensemble_cost_three_times_the_big_model():
    rows = {row.model: row for row in wmt.TABLE_2}
    big = rows["Transformer big"].cost["en-de"]
    ensembles = [row for row in wmt.TABLE_2 if row.ensemble and row.bleu["en-de"]]
    best = max(ensembles, key=lambda row: row.bleu["en-de"])
    assert best.model == "ConvS2S ensemble"
    assert round(best.cost["en-de"] / big, 1) == 3.3
    assert round(rows["GNMT + RL ensemble"].cost["en-de"] / big) == 8


def test_what_the_transformer_was_cheaper_than():
    """As book/afterwards.md says it: not than everything that it surpassed."""
    costs = {
        pair: {row.model: row.cost[pair] for row in wmt.TABLE_2 if row.cost[pair]}
        for pair in ("en-de", "en-fr")
    }
    for table in costs.values():
        base, big = table.pop("Transformer base"), table.pop("Transformer big")
        assert all(base < cost for cost in table.values())
        table["big"] = big
    assert all(costs["en-fr"]["big"] <= cost for cost in costs["en-fr"].values())
    german = costs["en-de"]
    assert german["GNMT + RL"] == german["big"]
    cheaper = {name for name, cost in german.items() if cost < german["big"]}
    dearer = {name for name, cost in german.items() if cost > german["big"]}
    assert cheaper == {"ConvS2S", "MoE"}
    assert dearer == {"GNMT + RL ensemble", "ConvS2S ensemble"}
    page = (Path(__file__).parents[1] / "book" / "afterwards.md").read_text("utf-8")
    assert "than what it surpassed" not in page


def test_our_row_is_empty_until_it_is_measured(monkeypatch):
    monkeypatch.setattr(wmt, "read_evidence", lambda name: {"name": name})
    assert wmt.our_result("big", "en-fr") == {"name": "wmt14-en-fr-big"}

    def nothing(name):
        raise ValueError(name)

    monkeypatch.setattr(wmt, "read_evidence", nothing)
    assert wmt.our_result("base", "en-de") is None


def test_records_say_what_was_measured():
    record = read_evidence("newstest2014-tatoeba-model")
    assert record["sentences"] == 3003 and "outputs" not in record
    assert record["decoding"]["beam_size"] == 4 and record["decoding"]["alpha"] == 0.6
    assert "tok:13a" in record["BLEU"]["signature"]
    assert "hyphens" in record["tokenized_BLEU"]["signature"]
    assert record["environment"]["commit"]
    cost = read_evidence("benchmarks/wmt")
    assert cost["quick"] is False and cost["vocab_size"] == 37_000
    for name, more in cost["five_times"].items():
        assert more["peak_mb"] < 1.2 * cost["stages"][name]["peak_mb"] + 5


# --- Table 2 as a figure --------------------------------------------------------------


def test_cost_figure_shows_table_2(browser, tmp_path):
    """Marks where the numbers say, each with its name, numbers and source in words."""
    figure = cost_figure()
    marks = [(".one circle", "fill"), (".ensemble rect", "fill"), (".own path", "fill")]
    check_figure(browser, tmp_path, figure, marks)
    cited = {
        "GNMT + RL": "Wu et al. 2016",
        "ConvS2S": "Gehring et al. 2017",
        "MoE": "Shazeer et al. 2017",
        "Deep-Att + PosUnk": "Zhou et al. 2016",
        "Transformer base": "the paper's own",
        "Transformer big": "the paper's own",
    }
    with shown(browser, tmp_path, figure, width=800) as page:
        for pair, name in (("en-de", "English-German"), ("en-fr", "English-French")):
            page.get_by_role("button", name=name).focus()
            page.keyboard.press("Enter")
            rows = [r for r in wmt.TABLE_2 if r.bleu[pair] and r.cost[pair]]
            points = page.locator("svg [data-say]")
            spoken = points.evaluate_all("all => all.map(p => p.dataset.say)")
            boxes = points.evaluate_all(
                "all => all.map(p => p.firstElementChild.getBoundingClientRect())"
                ".map(b => [b.x + b.width / 2, b.y + b.height / 2])"
            )
            assert len(spoken) == len(rows)
            for say, row in zip(spoken, rows, strict=True):
                assert say.startswith(f"{row.model}, {name}: BLEU {row.bleu[pair]:g}, ")
                digits, power = f"{row.cost[pair]:.1e}".split("e+")
                power = power.translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
                assert f"training cost {digits} × 10{power} floating" in say
                assert ("ensemble of eight" in say) == row.ensemble
                source = cited[row.model.removesuffix(" ensemble")]
                assert f"Table 2 ({source})" in say
            # Places are straight lines of the logarithm of the cost, and of BLEU.
            costs = [math.log10(row.cost[pair]) for row in rows]
            for values, axis in ((costs, 0), ([row.bleu[pair] for row in rows], 1)):
                at = [box[axis] for box in boxes]
                slope, start = np.polyfit(values, at, 1)
                assert np.allclose(np.polyval((slope, start), values), at, atol=1.5)
                assert slope > 0 if axis == 0 else slope < 0
        page.get_by_role("button", name="English-German").click()
        assert "the highest BLEU is 28.4, of Transformer big" in said(page)
        assert "Without a cost in the table: ByteNet (23.75)" in said(page)


# --- exercises ------------------------------------------------------------------------


def greedy_share(room, gpus):
    count = -(-25_000 // room)
    return room, count


@pytest.mark.parametrize(
    "check, wrong, telling",
    [
        (check_cost, lambda h, n, r: h * n * r * 1e12, "3,600 seconds"),
        (check_cost, lambda h, n, r: h * 60 * n * r * 1e12, "took minutes"),
        (check_cost, lambda h, n, r: h * 3600 * r * 1e12, "cost of one processor"),
        (check_cost, lambda h, n, r: h * 3600 * n * r, "1e12 for each"),
        (check_cost, lambda h, n, r: h * 3600 * 8 * 9.5e12, "use all three"),
        (check_cost, lambda h, n, r: "3.3e18", "Give a number"),
        (check_cost, lambda h, n, r: 1.0, "not 1.00e\\+00"),
        (check_share_out, greedy_share, "cannot be shared|above 25,000"),
        (check_share_out, lambda room, gpus: 25_000, "Give two numbers"),
        (check_share_out, lambda room, gpus: (25_000 / gpus, gpus), "whole numbers"),
        (check_share_out, lambda room, gpus: (25_000 // gpus, gpus), "does not fit"),
        (
            check_share_out,
            lambda room, gpus: (25_000 // (-(-25_000 // room)), -(-25_000 // room)),
            "cannot be shared",
        ),
        (
            check_share_out,
            lambda room, gpus: (room, gpus * -(-25_000 // room // gpus)),
            "above 25,000",
        ),
        (check_share_out, lambda room, gpus: (0, gpus), "above 0"),
        (
            check_share_out,
            lambda room, gpus: (25_000 // (80 * gpus), 80 * gpus),
            "more than needed",
        ),
        (
            check_share_out,
            lambda room, gpus: (
                1000,
                math.ceil(math.ceil(25_000 / room) / gpus) * gpus,
            ),
            "update as large",
        ),
        (
            check_attention_flops,
            lambda n, m, d: 2 * (n + m) * d * d + 2 * n * m * d,
            "addition",
        ),
        (
            check_attention_flops,
            lambda n, m, d: 4 * (n + m) * d * d,
            "left out the scores",
        ),
        (
            check_attention_flops,
            lambda n, m, d: 4 * (n + m) * d * d + 2 * n * m * d,
            "weighted sum of values",
        ),
        (
            check_attention_flops,
            lambda n, m, d: 8 * n * d * d + 4 * n * m * d,
            "made at m",
        ),
        (
            check_attention_flops,
            lambda n, m, d: 2 * (n + 2 * m) * d * d + 4 * n * m * d,
            "output projection",
        ),
        (check_attention_flops, lambda n, m, d: 5, "not 5"),
        (check_attention_flops, lambda n, m, d: "many", "Give a number"),
    ],
)
def test_the_checks_name_the_mistake(check, wrong, telling):
    verdict = check(wrong)
    assert not verdict
    assert re.search(telling, verdict.message), verdict.message
