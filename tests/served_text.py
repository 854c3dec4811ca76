"""What the tests of exports and of the server share: engines, and their sentences."""

from transformer_lib.corpora import CorpusUnavailable, load_corpus
from transformer_lib.export import CTranslate2Model
from transformer_lib.export.ctranslate2 import export_ctranslate2
from transformer_lib.runs import load_pretrained
from transformer_lib.translator import Translator


def sentences(count):
    try:
        pairs = load_corpus("tatoeba-en-de", "test").pairs
    except CorpusUnavailable:
        pairs = load_corpus("grammar-en-de", "test").pairs
    return [source for source, _ in pairs[:: len(pairs) // count]][:count]


def int8_engine(folder):
    model, tokenizer, _ = load_pretrained("tatoeba-en-de")
    return CTranslate2Model(export_ctranslate2(model, tokenizer, folder, "int8"))


def exact_engine(folder):
    """The model that ships with float32 weights in CTranslate2, and as it is."""
    shipped = load_pretrained("tatoeba-en-de")
    export_ctranslate2(*shipped[:2], folder, about=shipped[2])
    return CTranslate2Model(folder), Translator(*shipped)


MANY = [f"I have {i} brothers. Where is the station?" for i in range(15)]
ODD = [
    " ".join(MANY),
    "",
    " \t ",
    "😀 😀",
    "日本語の文です。",
    "I love you 😀.",
    "a\u2028b",
    "It rained, so we stayed at home, read books, and slept. " * 10,
    "." * 900,
    "we went out and " * 25,
    "\x00 a bell \a",
    "One. Two! Three? Four",
    "x" * 300,
]
