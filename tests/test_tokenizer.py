"""Chapter 09: BPE equal to SentencePiece's, and the tokenizer."""

import io
import itertools
import random
import re
import unicodedata

import pytest
import sentencepiece as spm
from fetched import leftovers
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_lib.corpora import grammar_split, load_corpus
from transformer_lib.exercises.tokenizer import (
    check_count_pairs,
    check_cut,
    check_spell,
    check_unknown_share,
)
from transformer_lib.tokenizer import (
    BOS,
    EOS,
    PAD,
    UNK,
    Tokenizer,
    apply_bpe,
    count_words,
    fold_text,
    merge_pair,
    pairs_in,
    train_bpe,
)

EASY = settings(max_examples=25)
SPLITS = "train", "valid", "test"


# --- byte pair encoding --------------------------------------------------------------


def sentencepiece_bpe(sentences, num_merges):
    letters = {letter for word in count_words(sentences) for letter in word}
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


THRICE = re.compile(r"(\S+)\1\1")  # SentencePiece counts "aa" twice in "aaa"


@given(st.integers(0, 10**9))
@EASY
def test_bpe_learns_and_cuts_as_sentencepiece_on_anything(seed):
    rng = random.Random(seed)

    def sentence():
        sizes = [rng.randint(1, 7) for _ in range(rng.randint(1, 9))]
        return " ".join("".join(rng.choice("abcdé") for _ in range(n)) for n in sizes)

    sentences = [sentence() for _ in range(rng.randint(1, 30))]
    sentences = [s for s in sentences if not THRICE.search(s)] or ["ab"]
    merges = train_bpe(sentences, 15)
    model = sentencepiece_bpe(sentences, len(merges))
    pieces = [model.id_to_piece(i) for i in range(3, 3 + len(merges))]
    assert ["".join(pair) for pair in merges] == pieces
    letters = set("".join(sentences)) | {" "}
    for other in (s for s in (sentence() for _ in range(9)) if set(s) <= letters):
        assert apply_bpe(other, merges) == model.encode(other, out_type=str)


@pytest.mark.corpora
def test_bpe_learns_and_cuts_as_sentencepiece_on_real_text():
    pairs = load_corpus("tatoeba-en-de").pairs[::150]
    sentences = [re.sub("[\u00a0\u202f]", " ", s) for pair in pairs for s in pair]
    sentences = [s for s in sentences if not THRICE.search(s)]
    merges = train_bpe(sentences, 500)
    model = sentencepiece_bpe(sentences, 500)
    pieces = [model.id_to_piece(i) for i in range(3, 503)]
    assert ["".join(pair) for pair in merges] == pieces
    letters = set("".join(sentences))
    unseen = [s for pair in load_corpus("tatoeba-en-de", "test").pairs for s in pair]
    for sentence in (s for s in unseen[:600] if set(s) <= letters):
        assert apply_bpe(sentence, merges) == model.encode(sentence, out_type=str)


def recount(sentences, num_merges):
    """BPE as in the paper's listing: everything counted anew for each merge."""
    words = {tuple(w): n for w, n in count_words(sentences).items()}
    merges = []
    for _ in range(num_merges):
        counts = {}
        for symbols, n in words.items():
            for pair, times in pairs_in(symbols).items():
                counts[pair] = counts.get(pair, 0) + n * times
        if not counts:
            break
        keys = {p: (-n, len("".join(p)), "".join(p), p) for p, n in counts.items()}
        merges.append(min(keys, key=keys.get))
        words = {tuple(merge_pair(w, merges[-1])): n for w, n in words.items()}
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
    assert pairs_in("aaa") == {("a", "a"): 1}
    assert pairs_in("aaaa") == {("a", "a"): 2}
    assert pairs_in("aaab") == {("a", "a"): 1, ("a", "b"): 1}


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


@given(st.text(max_size=40), st.sampled_from([0.0, 0.1, 1.0]))
@settings(max_examples=80)
def test_any_text_is_cut_and_comes_back(tokenizer, sentence, sample):
    ids = tokenizer.encode(sentence, subword_sampling=sample)
    assert not {PAD, UNK, BOS, EOS} & set(ids)
    once = tokenizer.decode(tokenizer.encode(sentence))
    assert tokenizer.decode(ids) == once
    assert tokenizer.decode(tokenizer.encode(once)) == once


@pytest.mark.parametrize("odd", ["a\ud800b", "\udcff", "a\0b", "", " ", "a" * 10**5])
def test_odd_text_is_cut(tokenizer, odd):
    ids = tokenizer.encode_all([odd, "Das Haus."])
    assert ids[1] == tokenizer.encode("Das Haus.")
    tokenizer.decode(ids[0])


@given(st.lists(st.integers(0, 499), max_size=20))
@EASY
def test_any_ids_are_decoded(tokenizer, ids):
    assert isinstance(tokenizer.decode(ids), str)


def test_threads_change_nothing(tokenizer):
    sentences = [pair[0] for pair in grammar_split("test", 200)]
    once = tokenizer.encode_all(sentences)
    assert tokenizer.encode_all(sentences, threads=2) == once


def test_sampled_cuts_vary_and_a_seed_repeats_them(tokenizer):
    def draw():
        return [
            tokenizer.encode("Der alte Mann.", subword_sampling=0.3) for _ in range(20)
        ]

    spm.set_random_generator_seed(5)
    first, second = draw(), draw()
    assert len(set(map(tuple, first))) > 5 and first != second
    spm.set_random_generator_seed(5)
    assert draw() == first
    assert {tokenizer.decode(ids) for ids in first} == {"Der alte Mann."}


def test_encode_refuses(tokenizer):
    with pytest.raises(ValueError, match="one string"):
        tokenizer.encode_all("abc")
    with pytest.raises(ValueError, match="subword_sampling=2"):
        tokenizer.encode("abc", subword_sampling=2)


def test_damaged_or_foreign_models_are_refused(tokenizer):
    foreign = sentencepiece_bpe(["a b c"], 0).serialized_model_proto()
    half = tokenizer.model[: len(tokenizer.model) // 2]
    for model in (b"", b"garbage", half, foreign):
        with pytest.raises(ValueError, match="no SentencePiece model of this library"):
            Tokenizer(model)


def test_training_on_odd_text():
    odd = [
        "a\0b",
        "\u2028",
        "<s> </s> <pad>",
        "",
        "▁",
        "\ufeffx",
        "x" * 9000,
        "📖\t\x85",
    ]
    pairs = grammar_split("train", 300)
    one = Tokenizer.train(odd + [s for pair in pairs for s in pair], 400)
    assert one.decode(one.encode("Das Haus 📖")) == "Das Haus 📖"


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
        (["a b"], 500, "word", "model_type='word'"),
        ("one string", 500, "bpe", "one string"),
        (["a b"] * 20, 5000, "bpe", r"vocab_size=5000: .* no more than \d+ pieces"),
        (["a b"] * 20, 100, "bpe", r"vocab_size=100: the characters .* need \d+"),
        ([], 300, "bpe", "no line has a word in it"),
        (["", " "], 300, "unigram", "no line has a word in it"),
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
        for pair in itertools.pairwise(symbols):
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


# --- one way to write -----------------------------------------------------------------


FOLDED = {
    "“I’m tired,” she said.": '"I\'m tired," she said.',
    "‚Ja‘, „nein‟ ´ʼ‛": "'Ja', \"nein\" '''",
    "a\u00a0b\u2009c\u3000d\u2028e\u202ff": "a b c d e f",
    "e\u200b\u0301 A\u030a": "é Å",  # what goes lets the accent to its letter
    "می\u200c خ\u200d": "می خ",
    "Auf\u200clage x\u200dy": "Auflage xy",
    "😀\u200d x\u200d": "😀 x",
    "\ufeffTwo\tlines\n\u202eof\u2069 it\x00": "Two\tlines\nof it\x00",
    "half \ud83d”": 'half \ud83d"',
}
UNFOLDED = [
    "",
    "ﬁne ½ Ⅷ ｆｕｌｌ…",  # NFC, not NFKC
    "他说：“好。” ‘是’",
    "「そう」と“言”う",
    "«Oui», dit-il – 5′ 3″",
    "می\u200cخواهم",
    "ক\u09cd\u200dষ",
    "👩\u200d👩\u200d👧 ❤\ufe0f 1\ufe0f\u20e3 👍🏽",
]


def test_folded_text():
    assert {text: fold_text(text) for text in FOLDED} == FOLDED
    assert [fold_text(text) for text in UNFOLDED] == UNFOLDED


def test_every_character_is_folded_by_its_kind():
    """Between two letters: gone, a plain space, straight, or composed; nothing else."""
    codes = []
    for start in range(0, 0x110000, 256):  # most have no character: whole lines of them
        some = range(start, start + 256)
        line = "".join(f"x{chr(code)}y" for code in some)
        unknown = all(unicodedata.category(char) in ("Cn", "Co") for char in line[1::3])
        codes += [] if unknown and fold_text(line) == line else some
    assert len(codes) > 150_000
    for code in codes:
        text = f"x{chr(code)}y"
        kind, got = unicodedata.category(chr(code)), fold_text(text)
        if kind in ("Zs", "Zl", "Zp"):
            assert got == "x y", hex(code)
        elif got != unicodedata.normalize("NFC", text):
            straight = got in ("x'y", 'x"y') and kind[0] in "PSL"
            gone = got == "xy" and kind in ("Cf", "Mn", "Cn", "Lo")
            assert straight or gone, hex(code)
        elif kind == "Cf":  # those that one sees, such as Arabic signs of numbers
            assert not (0x2000 <= code < 0x2100 or 0xFE00 <= code < 0xFF00), hex(code)


@EASY
@given(st.text(st.characters() | st.sampled_from("“’\u200d\u200c\ufe0f👩می e\u0301")))
def test_folding_twice_is_folding_once(text):
    once = fold_text(text)
    assert fold_text(once) == once
    assert once.isascii() or unicodedata.is_normalized("NFC", once)
