"""Chapter 08: text from anywhere, checked; BPE equal to SentencePiece's."""

import gzip
import http.client
import io
import lzma
import os
import random
import re
import socket
import urllib.error
import zipfile

import pytest
import sentencepiece as spm
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_lib import text
from transformer_lib.exercises.text import (
    check_count_pairs,
    check_cut,
    check_spell,
    check_unknown_share,
)
from transformer_lib.text import (
    BOS,
    EOS,
    PAD,
    SOURCES,
    UNK,
    Corpus,
    CorpusUnavailable,
    Tokenizer,
    apply_bpe,
    grammar_pair,
    grammar_split,
    held_out,
    load_corpus,
    train_bpe,
    unpack,
    write_aside,
)

EASY = settings(max_examples=25, deadline=None)


# --- the grammar ---------------------------------------------------------------------


def test_one_english_sentence_has_one_german_one():
    rng, seen = random.Random(1), {}
    for english, german in (grammar_pair(rng) for _ in range(20_000)):
        assert seen.setdefault(english, german) == german
    assert len(seen) > 18_000


def test_grammar_splits_are_disjoint_and_always_the_same():
    splits = {s: grammar_split(s, 800) for s in ("train", "valid", "test")}
    english = [{pair[0] for pair in pairs} for pairs in splits.values()]
    assert not (english[0] & english[1] or english[0] & english[2])
    assert not english[1] & english[2]
    assert splits["train"] == grammar_split("train", 800)
    assert len(grammar_split("valid")) == 500


def test_a_larger_split_starts_with_the_smaller_one():
    assert grammar_split("train", 900)[:300] == grammar_split("train", 300)


NEVER = {  # wrong German, as a pattern that must not occur
    "a masculine object in the nominative": r"^Ich \w+ (?:der|ein) (?:Mann|Hund)\b",
    "nicht before an indefinite object": r"\bnicht ein",
    "a dative plural without n": r"\bden \w+en (?:Männer|Kinder|Hunde|Vögel|Pferde)\b",
    "a verb second after weil": r"weil (?:ich|du|er) (?:sehe|siehst|sieht) \w",
    "a prefix before weil's end": r"weil [^.]* an\.",
    "an adjective without ending": r"(?:der|die|das|den|dem|ein\w*|kein\w*) "
    r"(?:alt|klein|groß|schön|gut|jung|neu|rot) [A-ZÄÖÜ]",
    "two spaces": r"  ",
}


@pytest.mark.parametrize("name", NEVER)
def test_german_never(name):
    rng = random.Random(2)
    german = [grammar_pair(rng)[1] for _ in range(4000)]
    assert not [s for s in german if re.search(NEVER[name], s)][:3]


def found(cache=[]):  # noqa: B006
    if not cache:
        rng = random.Random(3)
        cache += [grammar_pair(rng) for _ in range(40_000)]
    return cache


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        # English pattern, German pattern: each English match must match in German
        (r"^Today (he|she|it) ", r"^Heute \w+ (er|sie) "),
        (r"saw the dog\b", r"\bden Hund (\w+ )?gesehen"),
        (r"^Yesterday I ", r"^Gestern habe ich "),
        (r"can help the dogs\b", r"\bden Hunden (\w+ )?helfen"),
        (r"^(He|She) helps a woman\b", r"^(Er|Sie) hilft (\w+ )?einer Frau\b"),
        (r"^You call [^.]* \w+\.$", r"^Du rufst .* an(, weil .*)?\.$"),
        (r"because you call ", r", weil du .* anrufst\.$"),
        (r"not (see|find|buy|draw|look for) a house\b", r"\bkein Haus\b"),
        (r"not \w+ (old|small|big) (dogs|cats)\b", r"\bkeinen? \w+en (Hund|Katz)en?\b"),
        (r"^We did not see the ", r"^Wir haben .* nicht gesehen(,.*)?\.$"),
        (r"that he cannot see ", r", dass er .* sehen kann\.$"),
        (r"^Do they have to ", r"^Müssen sie .*\?$"),
        (r"^Why does she want to ", r"^Warum will sie .*\?$"),
        (r"^The house is not red\.$", r"^Das Haus ist nicht rot\.$"),
        (r"^He does not have to carry the ", r"^Er muss .* nicht tragen(,.*)?\.$"),
    ],
)
def test_german_word_order_and_agreement(pattern, wanted):
    both = [pair for pair in found() if re.search(pattern, pair[0])]
    assert both, "the grammar makes no such sentence any more"
    wrong = [pair for pair in both if not re.search(wanted, pair[1])]
    assert not wrong, wrong[:3]


# --- finding files -------------------------------------------------------------------

TWO = "Go.\tGeh.\nHi.\tHallo!\nHi.\tGrüß Gott!\n"
THREE = "Go.\tGeh.\tCC-BY 2.0\r\nHi.\tHallo!\tCC-BY 2.0\r\nHi.\tGrüß Gott!\tCC\r\n"
PAIRS = [("Go.", "Geh."), ("Hi.", "Hallo!"), ("Hi.", "Grüß Gott!")]


def archive(content=TWO, name="deu.txt"):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("_about.txt", "About.\tNot a pair.")
        file.writestr(name, content)
    return out.getvalue()


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """An empty cache, no mirror, no network; counts the calls to the network."""
    monkeypatch.setenv("TRANSFORMER_LIB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TRANSFORMER_LIB_MIRROR", raising=False)
    calls = []

    def refuse(request, timeout=None):
        assert timeout and timeout <= 30, "a call without a short timeout"
        calls.append(request.full_url)
        raise urllib.error.URLError(socket.gaierror(-2, "Name or service not known"))

    monkeypatch.setattr(text.urllib.request, "urlopen", refuse)
    return calls


class Answer(io.BytesIO):
    """What urlopen gives."""

    def __init__(self, content, size=None):
        super().__init__(content)
        self.headers = {"Content-Length": str(len(content) if size is None else size)}


def serve(monkeypatch, content, size=None):
    asked = []

    def urlopen(request, timeout=None):
        asked.append(request)
        return Answer(content, size)

    monkeypatch.setattr(text.urllib.request, "urlopen", urlopen)
    return asked


def everything(name="tatoeba-en-de"):
    pairs = load_corpus(name).pairs + load_corpus(name, "valid").pairs
    return sorted(pairs)


def leftovers(tmp_path):
    return [p.name for p in tmp_path.rglob("*") if p.is_file()]


@pytest.mark.parametrize("content", [TWO, THREE], ids=["two columns", "three"])
def test_mirror_searched_in_depth(content, tmp_path, monkeypatch, places):
    (tmp_path / "mirror" / "deep").mkdir(parents=True)
    (tmp_path / "mirror" / "deep" / "deu-eng.zip").write_bytes(archive(content))
    monkeypatch.setenv("TRANSFORMER_LIB_MIRROR", str(tmp_path / "mirror"))
    assert everything() == sorted(PAIRS)
    corpus = load_corpus("tatoeba-en-de")
    assert "offline mirror" in repr(corpus) and "CC-BY 2.0 FR" in repr(corpus)
    assert "Tatoeba" in corpus.licence and not places
    assert str(tmp_path) not in corpus.origin


def test_cache_comes_before_the_mirror(tmp_path, monkeypatch):
    for folder, content in (("cache", TWO), ("mirror", "No.\tNein.\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "deu-eng.zip").write_bytes(archive(content))
    monkeypatch.setenv("TRANSFORMER_LIB_MIRROR", str(tmp_path / "mirror"))
    assert everything() == sorted(PAIRS)


def test_download_is_kept(tmp_path, monkeypatch, capsys):
    asked = serve(monkeypatch, archive())
    assert everything() == sorted(PAIRS)
    assert len(asked) == 1 and asked[0].full_url == SOURCES["tatoeba-en-de"].url
    assert leftovers(tmp_path) == ["deu-eng.zip"]
    assert "CC-BY 2.0 FR" in capsys.readouterr().out


def test_french(monkeypatch):
    serve(monkeypatch, archive("Go.\tVa !\n", "fra.txt"))
    assert everything("tatoeba-en-fr") == [("Go.", "Va !")]


LONG = "".join(f"{random.Random(i).random()}\t{i}\n" for i in range(900))
HALF = archive(LONG)[:-600]
FLIPPED = bytearray(archive(LONG))
FLIPPED[200] ^= 0x55


@pytest.mark.parametrize(
    ("content", "size", "said"),
    [
        (b"<!DOCTYPE html><html><body>Log in</body></html>", None, "web page"),
        (b"  <HTML><head>", None, "web page"),
        (HALF, None, "cut short or damaged"),
        (bytes(FLIPPED), None, "cut short or damaged"),
        (archive()[:100], len(archive()), "broke off after 100 of"),
        (b"", None, "no sentence pairs"),
        (archive(name="readme.md"), None, "holds no file like deu.txt"),
        (archive(b"\xff\xfeG"), None, "not UTF-8"),
        (archive("no tab here\n"), None, "no sentence pairs"),
    ],
    ids="html capitals half flipped broken empty noname latin notab".split(),
)
def test_a_bad_download_is_named_and_leaves_nothing(
    content, size, said, tmp_path, monkeypatch
):
    serve(monkeypatch, content, size)
    with pytest.raises(CorpusUnavailable, match=said):
        load_corpus("tatoeba-en-de")
    if said != "no sentence pairs":
        assert leftovers(tmp_path) == []


@pytest.mark.parametrize("place", ["cache", "mirror"])
def test_a_damaged_copy_is_named_with_its_path(place, tmp_path, monkeypatch):
    (tmp_path / place).mkdir()
    path = tmp_path / place / "deu-eng.zip"
    path.write_bytes(HALF)
    monkeypatch.setenv("TRANSFORMER_LIB_MIRROR", str(tmp_path / "mirror"))
    with pytest.raises(CorpusUnavailable, match="cut short or damaged") as error:
        load_corpus("tatoeba-en-de")
    assert str(path) in str(error.value) and "Delete it" in str(error.value)


@pytest.mark.parametrize(
    "failure",
    [
        urllib.error.URLError("no route"),
        urllib.error.HTTPError("u", 404, "Not Found", {}, None),
        TimeoutError("timed out"),
        ConnectionResetError("reset"),
        http.client.BadStatusLine("x"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_no_network_says_what_to_do(failure, tmp_path, monkeypatch):
    def urlopen(request, timeout=None):
        raise failure

    monkeypatch.setattr(text.urllib.request, "urlopen", urlopen)
    with pytest.raises(CorpusUnavailable) as error:
        load_corpus("tatoeba-en-de")
    for part in ("deu-eng.zip", "TRANSFORMER_LIB_MIRROR", "manythings.org", "put the"):
        assert part in str(error.value)
    assert leftovers(tmp_path) == []


def test_network_that_breaks_off_in_the_middle(tmp_path, monkeypatch):
    class Broken(Answer):
        def read(self, n):
            if self.tell():
                raise ConnectionResetError("reset by peer")
            return super().read(10)

    monkeypatch.setattr(
        text.urllib.request, "urlopen", lambda request, timeout: Broken(archive())
    )
    with pytest.raises(CorpusUnavailable, match="reset by peer"):
        load_corpus("tatoeba-en-de")
    assert leftovers(tmp_path) == []


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root writes anywhere")
def test_an_unwritable_cache_is_a_warning(tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir(mode=0o500)
    serve(monkeypatch, archive())
    with pytest.warns(UserWarning, match="not kept"):
        assert everything()


def test_a_full_disk_is_a_warning_and_leaves_nothing(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    serve(monkeypatch, archive())
    monkeypatch.setattr(text, "write_aside", full)
    with pytest.warns(UserWarning, match="not kept: .*No space"):
        assert everything() == sorted(PAIRS)


def test_write_aside_leaves_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "x"
    write_aside(path, b"old")

    def fail(*names):
        raise OSError("no")

    monkeypatch.setattr(text.os, "replace", fail)
    with pytest.raises(OSError):
        write_aside(path, b"new")
    assert path.read_bytes() == b"old" and leftovers(tmp_path) == ["x"]


def test_public_test_set_without_what_training_has_seen(tmp_path, monkeypatch):
    rows = ["deu\teng\tGeh.\tLeave.", "deu\teng\tAch!\tHi.", "deu\teng\tKomm!\tCome!"]
    (tmp_path / "mirror").mkdir()
    (tmp_path / "mirror" / "deu-eng.zip").write_bytes(archive())
    name = SOURCES["tatoeba-test-en-de"].filename
    content = gzip.compress("\n".join(rows).encode())
    (tmp_path / "mirror" / name).write_bytes(content)
    monkeypatch.setenv("TRANSFORMER_LIB_MIRROR", str(tmp_path / "mirror"))
    corpus = load_corpus("tatoeba-en-de", "test")
    assert corpus.pairs == [("Come!", "Komm!")]
    assert "2 pairs seen in training were dropped" in corpus.origin


def test_prepared_test_set_and_the_other_order_of_languages(tmp_path, monkeypatch):
    (tmp_path / "mirror").mkdir()
    (tmp_path / "mirror" / "fra-eng.zip").write_bytes(archive("Go.\tVa !\n", "fra.txt"))
    prepared = lzma.compress(b"Come!\tViens !\n")
    (tmp_path / "mirror" / "test.en-fr.tsv.xz").write_bytes(prepared)
    monkeypatch.setenv("TRANSFORMER_LIB_MIRROR", str(tmp_path / "mirror"))
    assert load_corpus("tatoeba-en-fr", "test").pairs == [("Come!", "Viens !")]
    name = SOURCES["tatoeba-test-en-fr"].filename
    (tmp_path / "mirror" / name).write_bytes(gzip.compress(b"eng\tfra\tStop!\tArr\n"))
    assert load_corpus("tatoeba-en-fr", "test").pairs == [("Stop!", "Arr")]


def test_a_line_separator_inside_a_sentence_shifts_nothing():
    content = "A\u2028b.\tC\x0bd.\nHi.\tHallo!\n"
    pairs = text.read_pairs(content, "x")
    assert pairs == [("A\u2028b.", "C\x0bd."), ("Hi.", "Hallo!")]


@pytest.mark.parametrize(
    ("name", "split", "said"),
    [("tatoeba", "train", "'tatoeba' is unknown"), ("grammar-en-de", "dev", "'dev'")],
)
def test_wrong_names(name, split, said):
    with pytest.raises(ValueError, match=said):
        load_corpus(name, split)


def test_all_translations_of_a_sentence_are_held_out_together():
    pairs = [(f"Sentence {i}.", str(k)) for i in range(3000) for k in range(2)]
    valid = {english for english, _ in pairs if held_out(english)}
    assert 10 < len(valid) < 60  # about 1%
    assert held_out("Hi.") is False


def test_the_hash_is_of_the_text():
    a = Corpus("a", "train", [("Hi.", "Hallo!")], "mine", "here")
    b = Corpus("b", "valid", [("Hi.", "Hallo!")], "yours", "there")
    c = Corpus("a", "train", [("Hi.", "Hallo.")], "mine", "here")
    assert a.sha256 == b.sha256 != c.sha256


@given(st.binary(max_size=300))
@EASY
def test_unpack_of_anything_is_text_or_a_sentence(content):
    for start in (b"", b"PK\x03\x04", b"\x1f\x8b\x08", b"\xfd7zXZ\x00"):
        try:
            assert isinstance(unpack(start + content, "file"), str)
        except CorpusUnavailable as error:
            assert str(error).startswith("file ")


# --- byte pair encoding --------------------------------------------------------------


def sentencepiece_bpe(sentences, num_merges):
    letters = {letter for word in text.count_words(sentences) for letter in word}
    out = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=out,
        model_type="bpe",
        vocab_size=3 + num_merges + len(letters),
        character_coverage=1.0,
        normalization_rule_name="identity",
        split_by_unicode_script=False,
        split_by_number=False,
        max_sentencepiece_length=64,
        minloglevel=2,
    )
    return spm.SentencePieceProcessor(model_proto=out.getvalue())


@pytest.mark.parametrize("language", [0, 1])
def test_bpe_learns_and_cuts_as_sentencepiece(language):
    sentences = [pair[language] for pair in grammar_split("train", 2000)]
    merges = train_bpe(sentences, 300)
    model = sentencepiece_bpe(sentences, 300)
    pieces = [model.id_to_piece(i) for i in range(3, 303)]
    assert ["".join(pair) for pair in merges] == pieces
    for sentence in (pair[language] for pair in grammar_split("test", 200)):
        assert apply_bpe(sentence, merges) == model.encode(sentence, out_type=str)


def recount(sentences, num_merges):
    """BPE as in the paper's listing: everything counted anew for each merge."""
    words = {tuple(w): n for w, n in text.count_words(sentences).items()}
    merges = []
    for _ in range(num_merges):
        counts = {}
        for symbols, n in words.items():
            for pair, times in text.pairs_in(symbols).items():
                counts[pair] = counts.get(pair, 0) + n * times
        if not counts:
            break
        keys = {p: (-n, len("".join(p)), "".join(p), p) for p, n in counts.items()}
        merges.append(min(keys, key=keys.get))
        words = {tuple(text.merge_pair(w, merges[-1])): n for w, n in words.items()}
    return merges


WORDS = st.lists(st.text("aab ", max_size=12), min_size=1, max_size=6)


@given(WORDS)
@EASY
def test_fast_bpe_equals_recounting(sentences):
    assert train_bpe(sentences, 12) == recount(sentences, 12)


@given(WORDS, st.text("abc ", max_size=15))
@EASY
def test_pieces_join_to_the_sentence(sentences, sentence):
    pieces = apply_bpe(sentence, train_bpe(sentences, 9))
    assert "".join(pieces).replace("▁", " ").split() == sentence.split()


def test_overlapping_pairs_count_once():
    assert text.pairs_in("aaa") == {("a", "a"): 1}
    assert text.pairs_in("aaaa") == {("a", "a"): 2}
    assert text.pairs_in("aaab") == {("a", "a"): 1, ("a", "b"): 1}


@pytest.mark.parametrize("bad", [("one string", 3), (["a"], -1)])
def test_train_bpe_refuses(bad):
    with pytest.raises(ValueError):
        train_bpe(*bad)


# --- the tokenizer -------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    pairs = grammar_split("train", 3000)
    return Tokenizer.train((side for pair in pairs for side in pair), 500)


def test_special_ids(tokenizer):
    model = tokenizer.processor
    assert [model.pad_id(), model.unk_id(), model.bos_id()] == [0, 1, 2]
    assert model.eos_id() == 3
    assert (PAD, UNK, BOS, EOS) == (0, 1, 2, 3)
    assert [model.id_to_piece(i) for i in (4, 259)] == ["<0x00>", "<0xFF>"]
    assert tokenizer.vocab_size == 500


def test_special_ids_vanish_in_decoding(tokenizer):
    ids = tokenizer.encode("Das Haus ist alt.")
    assert tokenizer.decode([BOS, *ids, EOS, PAD, PAD]) == "Das Haus ist alt."


LETTERS = st.characters(codec="utf-8", categories=["L", "N", "P", "S"])


@given(st.text(LETTERS, max_size=30))
@EASY
def test_no_text_is_lost_but_by_normalization(tokenizer, sentence):
    ids = tokenizer.encode(sentence)
    assert not {PAD, UNK, BOS, EOS} & set(ids)
    normal = spm.SentencePieceNormalizer(rule_name="nmt_nfkc").normalize(sentence)
    assert tokenizer.decode(ids) == " ".join(normal.replace("▁", " ").split())


@pytest.mark.parametrize("sentence", ["📖👍🏽", "Ωμέγα", "東京へ", "</s><pad> <0x41>"])
def test_round_trip(tokenizer, sentence):
    assert tokenizer.decode(tokenizer.encode(sentence)) == sentence


def test_encode_all_is_encode(tokenizer):
    sentences = [pair[1] for pair in grammar_split("test", 50)] + ["", "📖"]
    assert tokenizer.encode_all(sentences) == [tokenizer.encode(s) for s in sentences]


def test_save_and_load(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "t.model")
    again = Tokenizer.load(tmp_path / "t.model")
    assert again.encode("Der Hund.") == tokenizer.encode("Der Hund.")
    assert leftovers(tmp_path) == ["t.model"]


@pytest.mark.parametrize("ids", [[500], [-1, 5], [5, 10**9]])
def test_decode_refuses_ids_out_of_range(tokenizer, ids):
    with pytest.raises(ValueError, match="the vocabulary has 0 to 499"):
        tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("sentences", "size", "kind", "said"),
    [
        (["a b"], 500, "word", "kind='word'"),
        ("one string", 500, "bpe", "one string"),
        (["a b"] * 20, 5000, "bpe", "vocab_size=5000"),
        (["a b"] * 20, 100, "bpe", "vocab_size=100"),
    ],
)
def test_train_refuses(sentences, size, kind, said):
    with pytest.raises(ValueError, match=said):
        Tokenizer.train(sentences, size, kind)


def test_unigram_too():
    sentences = [pair[1] for pair in grammar_split("train", 1000)]
    model = Tokenizer.train(sentences, 400, "unigram")
    assert model.decode(model.encode("Ein Hund 📖")) == "Ein Hund 📖"


# --- the exercises' checks name the mistakes -----------------------------------------


def counts(words, times=True, overlap=True):
    out = {}
    for symbols, n in words.items():
        for pair in zip(symbols, symbols[1:], strict=False):
            out[pair] = out.get(pair, 0) + (n if times else 1)
    return out


def counts_across(words):
    row = [s for symbols, n in words.items() for _ in range(n) for s in symbols]
    return counts({tuple(row): 1})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda words: counts(words), "overlapping"),
        (lambda words: counts(words, times=False), "each word once"),
        (counts_across, "across a word boundary"),
        (lambda words: {"".join(p): n for p, n in counts(words).items()}, "tuples"),
        (lambda words: 7, "dict"),
    ],
)
def test_check_count_pairs_names(wrong, said):
    verdict = check_count_pairs(wrong)
    assert not verdict.passed and said in verdict.message


def cut_with(word, merges, most=99):
    pieces = list(word)
    for pair in merges:
        i, left = 0, most
        while i < len(pieces) - 1:
            if (pieces[i], pieces[i + 1]) == pair and left:
                pieces[i : i + 2] = ["".join(pair)]
                left -= 1
            i += 1
    return pieces


def cut_leftmost(word, merges):
    pieces, i = list(word), 0
    while i < len(pieces) - 1:
        if (pieces[i], pieces[i + 1]) in set(merges):
            pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
            i = -1
        i += 1
    return pieces


def cut_longest(word, merges):
    known, pieces = {"".join(pair) for pair in merges}, []
    while word:
        n = max(n for n in range(1, len(word) + 1) if n == 1 or word[:n] in known)
        pieces.append(word[:n])
        word = word[n:]
    return pieces


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (cut_leftmost, "order of the merges is ignored"),
        (cut_longest, "longest"),
        (lambda word, merges: cut_with(word, merges[::-1]), "backwards"),
        (lambda word, merges: cut_with(word, merges, most=1), "only the first place"),
        (lambda word, merges: list(word), "cut wrongly"),
    ],
)
def test_check_cut_names(wrong, said):
    verdict = check_cut(wrong)
    assert not verdict.passed and said in verdict.message


def speller(write):
    return lambda text, known: [
        p for c in text for p in ([c] if c in known else write(c))
    ]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (speller(lambda c: [f"<0x{ord(c):02X}>"]), "code point"),
        (speller(lambda c: [f"<0x{b:02x}>" for b in c.encode()]), "capitals"),
        (speller(lambda c: [f"<0x{b}>" for b in c.encode()]), "decimal"),
        (speller(lambda c: []), "are gone"),
        (speller(lambda c: [f"<0x{b:X}>" for b in c.encode()]), "leading zero"),
        (lambda text, known: [f"<0x{b:02X}>" for b in text.encode()], "all characters"),
    ],
)
def test_check_spell_names(wrong, said):
    verdict = check_spell(wrong)
    assert not verdict.passed and said in verdict.message


def share(train, test, entries=False):
    known = {word for sentence in train for word in sentence.split()}
    words = [word for sentence in test for word in sentence.split()]
    words = set(words) if entries else words
    return sum(word not in known for word in words) / len(words)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda train, test: share(train + test, test), "test set in it"),
        (lambda train, test: share(train, test, entries=True), "running words"),
        (lambda train, test: 1 - share(train, test), "is known"),
        (lambda train, test: share(test, train), "wrong way round"),
        (lambda train, test: 100 * share(train, test), "percent"),
    ],
)
def test_check_unknown_share_names(wrong, said):
    verdict = check_unknown_share(wrong)
    assert not verdict.passed and said in verdict.message
