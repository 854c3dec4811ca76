"""Held-back pairs of which nothing similar was trained on.

Half of Tatoeba's sentences have a near copy: the same one with another name or in the
plural. A model that knows a text by heart scores well on near copies of it. Two
sentences are near copies here if they become equal when at most two words are left out
of each: all that differ by two words or fewer do (added, missing or replaced), and some
more. Capitals and punctuation do not count. Sentences of one or two words are near
copies of each other, so a fresh split has none of them, and few of three or four: it is
longer, and harder, than the text that it comes from.

Record: none; other experiments draw their held-back pairs with it
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from itertools import combinations

PAIRS = 3000


def with_gaps(sentence: str, gaps: int = 2) -> set[str]:
    """The words of a sentence, with up to so many of them left out."""
    words = re.findall(r"\w+", sentence.casefold())
    kept = (
        combinations(words, len(words) - n) for n in range(min(gaps, len(words)) + 1)
    )
    return {" ".join(some) for same_number in kept for some in same_number}


def isolated(candidates: Sequence[tuple], others: Iterable[tuple]) -> list[tuple]:
    """The candidates with no near copy among the others, or the other candidates.

    Args:
        candidates: (source, target) pairs.
        others: Such pairs, of which none is a candidate.
    """
    near, others = set(), list(others)
    for side in (0, 1):
        owner: dict[str, int] = {}
        for i, pair in enumerate(candidates):
            for shorter in with_gaps(pair[side]):
                first = owner.setdefault(shorter, i)
                if first != i:
                    near |= {first, i}
        for sentence in {pair[side] for pair in others}:
            near |= {owner[s] for s in with_gaps(sentence) if s in owner}
    return [pair for i, pair in enumerate(candidates) if i not in near]


def by_hash(pairs: Iterable[tuple]) -> list[tuple]:
    """Pairs in an order that depends on nothing but their own text."""
    return sorted(pairs, key=lambda p: hashlib.sha256("\t".join(p).encode()).digest())


def fresh_pairs(pairs: Sequence[tuple], read: Sequence[tuple]) -> list[tuple]:
    """Some of the pairs that were not read, and are no near copy of one that was."""
    known = set(read)
    unread = by_hash({pair for pair in pairs if pair not in known})
    return isolated(unread[: 5 * PAIRS], read)[:PAIRS]
