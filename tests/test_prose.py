"""What pages say in numbers and quotations, against what their cells show."""

import prose
import pytest
from built import API, HTML, documents, wait_for_the_book
from built import need_the_book as need


def found(text: str, output: str = "", code: str = "") -> list[str]:
    """What is found in a page of one paragraph and one cell."""
    page = f"<article><p>{text}</p><div class=cell><pre>{output}</pre></div></article>"
    return [finding.what for finding in prose.findings("a page", page, code)]


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("It scored 33.1.", "BLEU 33.0912"),
        ("Some 17 % of them.", "share 0.1689"),
        ("It has 9.4 million numbers.", "parameters 9,423,872"),
        ("Its 37,500 pairs.", "37500"),
        ("About 170,000 pairs.", "169813 pairs"),
        ("It gained -0.21 nats.", "0.209"),
        ("See chapter 25, Figure 3.14 and equation 17, of 2017.", ""),
        ("It writes <em>Wenn es morgen regnet</em>.", "Wenn es morgen\n regnet."),
        ("Read <em>Attention Is All You Need</em>.", ""),
        ("Six of the eight do.", "six of the eight: 6"),
        ("The formula has <code>x * 99.5</code> in it.", ""),
        ('They have 45.8 (<a href="https://example.org">source</a>).', ""),
        ("The paper has 28.4.", ""),
    ],
)
def test_what_the_page_shows_is_right(text, output):
    assert not found(text, output)


@pytest.mark.parametrize(
    ("text", "output", "what"),
    [
        ("It scored 33.1.", "BLEU 33.0312", "33.1"),
        ("Some 17 % of them.", "share 0.1612", "17 %"),
        ("About 170,000 pairs.", "175813 pairs", "170,000"),
        ("It scored 5.56 and 5.57.", "6.34 6.32", "5.56 5.57"),
        ("The paper has 28.5.", "", "28.5"),
        ("It takes some three hours.", "4.5 hours", "three hours"),
        ("The two training runs differ.", "3 runs", "two training runs"),
        ("There are two records.", "['a', 'b', 'c']", "two records"),
        ("One seed each.", "seeds: 2", "One seed each"),
        ("Six of the eight get there.", "0.7 0.8 0.2", "Six of the eight"),
        ("In 10 of 12 layers.", "10 layers of 12", "10 of 12"),
        (
            "It writes <em>Wenn morgen regnet</em>.",
            "Wenn es morgen regnet.",
            "Wenn morgen regnet",
        ),
        (
            "It says <code>Mein werden gerne Arzt</code>.",
            "Mein Bruder.",
            "Mein werden gerne Arzt",
        ),
    ],
)
def test_what_nothing_bears_out_is_found(text, output, what):
    assert " ".join(found(text, output)) == what


def test_an_assert_bears_out_its_words():
    code = "assert sum(share > 0.75) == 6  # six of the eight"
    assert not found("Six of the eight do.", code=code)


def test_each_exception_is_needed():
    """An entry of prose.toml that no page needs any more is taken out."""
    need()
    wait_for_the_book()
    for page in set(prose.KNOWN) - {"paper", "everywhere"}:
        said = (HTML / f"{page}.html").read_text("utf-8")
        paragraphs, quoted, _ = prose.parts_of(said)
        said = " ".join([*sum(paragraphs, []), *quoted]).lower().replace("’", "'")
        for text in prose.KNOWN[page]:
            assert text in said, text


PAGES = [n for n in documents() if not n.startswith((API, *prose.GATHERED))]


@pytest.mark.parametrize("name", PAGES)
def test_page(name):
    need()
    wait_for_the_book()
    assert not prose.look_at(name)
