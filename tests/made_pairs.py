"""Pairs of made-up ids, which the tests of batches and of prepared pairs share."""

import numpy as np

from transformer_lib.batches import TokenPairs
from transformer_lib.batches.plan import flatten

V = 50


def token_pairs(rows):
    source, target = zip(*rows, strict=True)
    return TokenPairs(*flatten(source, V), *flatten(target, V))


def some_pairs(n=200, seed=0, longest=30):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest, (n, 2))
    rows = [tuple(rng.integers(4, V, k).tolist() for k in pair) for pair in lengths]
    return token_pairs(rows)
