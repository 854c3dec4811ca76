"""Models to look inside, which the tests of chapter 27 share.

A test file takes a fixture by assignment: ``small = looked_inside.small``.
"""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

from transformer_lib.looking_inside import look
from transformer_lib.runs import load_pretrained
from transformer_lib.transformer import Transformer, TransformerConfig

VOCABULARY = 30
FEW = settings(max_examples=15, deadline=None)
PAIRS = [
    ("Tom forgot his keys.", "Tom vergaß seine Schlüssel."),
    ("It was raining.", "Es regnete."),
    ("She put her coat on.", "Sie zog ihren Mantel an."),
]
rows = st.lists(
    st.lists(st.integers(4, VOCABULARY - 1), min_size=1, max_size=6),
    min_size=1,
    max_size=3,
)


@pytest.fixture(scope="module")
def small():
    torch.manual_seed(3)
    config = TransformerConfig(VOCABULARY, 32, num_heads=4, num_layers=2, d_ff=48)
    return Transformer(config).eval()


@pytest.fixture(scope="module")
def trained():
    return load_pretrained("tatoeba-en-de")[:2]


@pytest.fixture(scope="module")
def pair(trained):
    return look(*trained, "The old man sold his house.", "Der Mann verkauft sein Haus.")
