"""The scenes of the front page's essay, as frames of marks, and as SVG.

A scene gives its beats, a beat its frames, which play one after the other; a frame is a
list of marks, each with a name ("k"). A stage lays them out, wide or narrow.
"""

from __future__ import annotations

import html
import math
import re
from functools import cache
from itertools import pairwise

from essay_facts import Facts, facts, owned, percent, signed

from transformer_lib.hello import softmax

SHOWN = 32  # numbers of a vector that are drawn
WRITTEN = 4  # products of a score that are written out
LEAST = 0.04  # weights below this have no line


# --- the stage ------------------------------------------------------------------------


def text(k, x, y, words, size, c="", a="middle", o=1.0):
    return {"t": "text", "k": k, "x": x, "y": y, "txt": words, "s": size, "c": c} | (
        {"a": a, "o": o}
    )


def rect(k, x, y, w, h, c="", rx=0, o=1.0):
    return dict(t="rect", k=k, x=x, y=y, w=w, h=h, c=c, rx=rx, o=o)


def arc(k, x1, y1, x2, y2, b1, b2, w, c="", o=1.0):
    return dict(t="arc", k=k, x1=x1, y1=y1, x2=x2, y2=y2, b1=b1, b2=b2, w=w, c=c, o=o)


def strip(k, v, x, y, w, h, c="", o=1.0):
    return dict(t="strip", k=k, v=v, x=x, y=y, w=w, h=h, c=c, o=o)


def clock(k, x, y, r, turn, c="", o=1.0):
    return dict(t="clock", k=k, x=x, y=y, r=r, turn=turn, c=c, o=o)


def dot(k, x, y, r, c="", o=1.0):
    return dict(t="dot", k=k, x=x, y=y, r=r, c=c, o=o)


def path(k, d, c="", part=1.0, o=1.0):
    """A line of which the first part is drawn."""
    return dict(t="path", k=k, d=d, c=c, part=part, o=o)


class Stage:
    """The sentence, and what comes and goes around it; wide or narrow."""

    def __init__(self, wide: bool):
        self.wide, self.f = wide, facts()
        self.W, self.H = (600, 500) if wide else (358, 330)
        self.base = 150 if wide else 84  # the sentence's line
        self.fs, self.sm = (22, 15) if wide else (14.5, 11.5)
        self.n = len(self.f.words)
        self.col = self.W / self.n
        self.top = self.base + (34 if wide else 20)  # below the sentence
        self.low = self.H - (14 if wide else 8)

    def x(self, i) -> float:
        return (i + 0.5) * self.col

    def fit(self, word, room=None, size=None) -> float:
        return min(size or self.fs, (room or self.col) * 1.72 / max(len(word), 1))

    def sentence(self, lit=(), dim=False, y=None, places=None) -> list:
        """All words; some of them lit, with their classes."""
        lit, marks = dict(lit), []
        for i, word in enumerate(self.f.words):
            c = "word" + (" end" if word == "end" else "")
            if i in lit:
                c += f" lit {lit[i]}"
            x = self.x(places[i] if places else i)
            o = 0.35 if dim and i not in lit else 1.0
            size = self.fit(word) * (0.8 if word == "end" else 1)
            marks.append(text(f"w{i}", x, y or self.base, word, size, c, o=o))
        return marks

    def arcs(self, weights, i, c, key="arc", least=LEAST, o=1.0) -> list:
        """Lines above the sentence from a word to those that it looks at."""
        y, marks = self.base - self.fs, []
        for j, w in enumerate(weights):
            if w >= least:
                high = -min(
                    y - 4, (22 + 17 * abs(i - j)) * (1.35 if self.wide else 0.8)
                )
                thick = max(1, (9 if self.wide else 7) * w)
                x1, x2 = self.x(i), self.x(j)
                if i == j:
                    x1, x2 = x1 - self.col / 5, x2 + self.col / 5
                marks.append(
                    arc(f"{key}-{i}-{j}", x1, y, x2, y, high, high, thick, c, o)
                )
        return marks

    def strips(self, kind, c, y=None, h=None, w=0.42, dx=0.0, o=1.0, only=None) -> list:
        y, h = y or self.top, h or self.low - self.top - 2.2 * self.sm
        return [
            strip(
                f"{kind}{i}",
                f"{kind}{i}",
                self.x(i) + dx * self.col,
                y,
                w * self.col,
                h,
                c,
                o if only is None or i in only else 0.12,
            )
            for i in range(self.n)
        ]

    def numbers(self, values, y, c="", key="n", digits=1, o=1.0, only=None) -> list:
        return [
            text(
                f"{key}{i}",
                self.x(i),
                y,
                value if isinstance(value, str) else signed(value, digits),
                self.sm,
                f"number {c}",
                o=o,
            )
            for i, value in enumerate(values)
            if only is None or i in only
        ]

    def bars(self, shares, y0, high, c, key="b", w=0.5) -> list:
        return [
            rect(
                f"{key}{i}",
                self.x(i) - w * self.col / 2,
                y0 - high * share,
                w * self.col,
                max(high * share, 1),
                c,
                2,
            )
            for i, share in enumerate(shares)
        ]

    def label(self, words, x, y, c="note", k=None, a="middle", size=None) -> dict:
        return text(k or f"l-{words}", x, y, words, size or self.sm, c, a)


# --- the scenes -----------------------------------------------------------------------
# Each gives its beats; a beat is a list of frames that play one after the other.


def scene_his(s: Stage):
    f = s.f
    asks = {f.asks: "query"}
    y, up = s.base - s.fs, -(62 if s.wide else 34)
    back, ahead = max(f.asks - 2, 0), f.looks
    down = s.top + s.fs * 2.2
    first = [
        *s.sentence(asks),
        arc("back", s.x(f.asks) - 4, y, s.x(back), y, up, up, 2, "guess"),
        arc("ahead", s.x(f.asks) + 4, y, s.x(ahead), y, up * 0.8, up * 0.8, 2, "guess"),
        arc(
            "else",
            s.x(f.asks),
            s.base + s.fs * 0.6,
            s.x(f.asks),
            down,
            0,
            0,
            2,
            "guess",
        ),
        text(
            "q1", (s.x(f.asks) + s.x(back)) / 2, y + up * 0.95, "whose?", s.sm, "query"
        ),
        text("q2", s.x(ahead), y + up * 0.85, "what?", s.sm, "query", "start"),
        text("q3", s.x(f.asks), down + s.sm * 1.3, "somebody else’s?", s.sm, "query"),
    ]
    frames, rows = [], []
    y, step = s.top + s.fs * 2, s.fs * 2.4
    for n, row in enumerate(f.other["owned"]):
        his, thing = owned(row).split()
        at, mid, big = y + n * step, s.W * 0.44, s.fs * 1.05
        rows = rows + [
            text(
                f"e{n}",
                mid - s.fs * 1.2,
                at,
                f"{f.words[f.asks]} {row['thing']}",
                big,
                "encoder",
                "end",
            ),
            arc(
                f"to{n}",
                mid - s.fs * 0.7,
                at - big * 0.3,
                mid + s.fs * 0.5,
                at - big * 0.3,
                0,
                0,
                1.6,
                "plain",
            ),
            text(f"g{n}", mid + s.fs * 5.0, at, his, big, "decoder strong", "end"),
            text(f"h{n}", mid + s.fs * 5.3, at, thing, big, "decoder", "start"),
        ]
        frames.append(s.sentence(asks) + rows)
    return [[first], frames]


def scene_query(s: Stage):
    f, i = s.f, s.f.asks
    all_words = s.sentence({i: "query"}) + s.strips("in", "vector", w=0.7)
    note = s.low
    everything = [
        *all_words,
        s.label(
            f"{SHOWN} of each word’s {len(f.head['inputs'][0])} numbers", s.W / 2, note
        ),
    ]
    h = s.low - s.top - 2.2 * s.sm
    q = strip("q", f"q{i}", s.x(i), s.top, 0.6 * s.col, h, "query")
    asked = [
        *s.sentence({i: "query"}, dim=True),
        *s.strips("in", "vector", w=0.7, o=0.12),
        q,
        s.label(
            f"query of “{f.words[i]}”: {f.width} numbers", s.W / 2, note, "query", "lq"
        ),
    ]
    keyed = [
        *s.sentence({i: "query"}),
        *s.strips("k", "key", dx=-0.22, w=0.44),
        q | {"x": s.x(i) + 0.22 * s.col, "w": 0.44 * s.col},
        s.label("query", s.W * 0.33, note, "query", "lq"),
        s.label("keys", s.W * 0.62, note, "key", "lk"),
    ]
    return [[everything], [asked], [keyed]]


def scene_scores(s: Stage):
    f, i, j = s.f, s.f.asks, s.f.looks
    h = s.low - s.top - 2.2 * s.sm
    lit = {i: "query", j: "key"}
    # One score, written out.
    table, rows = s.sentence(lit, dim=True), f.products[:WRITTEN]
    wide = s.wide
    left, mid, right = (0.54, 0.78, 0.93) if wide else (0.51, 0.8, 0.97)
    table += [
        strip("q", f"q{i}", s.W * 0.1, s.top, s.W * 0.13, h, "query"),
        strip(f"k{j}", f"k{j}", s.W * 0.27, s.top, s.W * 0.13, h, "key"),
    ]
    y, step = s.top + s.sm * 1.2, s.sm * 1.75
    for n, (a, b, c) in enumerate(rows):
        at = y + n * step
        table += [
            text(f"a{n}", s.W * left, at, signed(a, 3), s.sm, "number query", "end"),
            text(f"x{n}", s.W * (left + 0.035), at, "×", s.sm, "note"),
            text(
                f"d{n}",
                s.W * (left + (0.16 if wide else 0.19)),
                at,
                signed(b, 3),
                s.sm,
                "number key",
                "end",
            ),
            text(f"i{n}", s.W * (mid - 0.02), at, "=", s.sm, "note"),
            text(f"p{n}", s.W * right, at, signed(c), s.sm, "number", "end"),
        ]
    rest = f.scores[i][j] - sum(c for _, _, c in rows)
    at = y + len(rows) * step
    others = f"the other {f.width - len(rows)} products"
    table += [
        text("po", s.W * (mid + 0.0), at, others, s.sm, "note", "end"),
        text("pr", s.W * right, at, signed(rest), s.sm, "number", "end"),
        rect("rule", s.W * 0.42, at + s.sm * 0.6, s.W * (right - 0.42), 1, "ink"),
        text("ps", s.W * mid, at + 2.1 * s.sm, "score", s.sm, "strong", "end"),
        text(
            f"n{j}",
            s.W * right,
            at + 2.1 * s.sm,
            signed(f.scores[i][j], 1),
            s.sm * 1.15,
            "number strong",
            "end",
        ),
    ]
    # The query goes from key to key.
    frames, done = [], []
    for t in range(s.n):
        done.append(t)
        lit = {i: "query", t: "key" if t != i else "query"}
        frames.append(
            [
                *s.sentence(lit),
                *s.strips("k", "key", dx=-0.22, w=0.44),
                strip(
                    "q", f"q{i}", s.x(t) + 0.22 * s.col, s.top, 0.44 * s.col, h, "query"
                ),
                *s.numbers(f.scores[i], s.low, only=done),
            ]
        )
    frames.append(
        [
            *s.sentence({i: "query", j: "key"}),
            *s.strips("k", "key", dx=-0.22, w=0.44, only=[j]),
            strip("q", f"q{i}", s.x(j) + 0.22 * s.col, s.top, 0.44 * s.col, h, "query"),
            *s.numbers(f.scores[i], s.low),
        ]
    )
    return [[table], frames]


def scene_softmax(s: Stage):
    f, i = s.f, s.f.asks
    lit = {i: "query", f.looks: "key"}
    raw, scaled, shares = f.scores[i], [x / f.root for x in f.scores[i]], f.shares[i]
    powers = [math.exp(x) for x in scaled]
    total = f"{sum(powers):,.0f}"
    y1, step = s.top + s.sm * 0.9, s.sm * 2.9
    y2, y3 = y1 + step, y1 + 2 * step

    def between(words, y, k):
        return s.label(words, s.W / 2, y - step / 2 + s.sm * 0.02, "note", k)

    first = [*s.sentence(lit), *s.numbers(raw, y1, key="n")]
    second = [
        *first,
        between(f"÷ {f.root:.2f}", y2, "ldiv"),
        *s.numbers(scaled, y2, key="m", digits=2),
    ]
    third = [
        *second,
        between(f"e to the power of each; together {total}", y3, "lexp"),
        *s.numbers(
            [f"{p:,.0f}" if p > 99 else signed(p, 1) for p in powers], y3, key="e"
        ),
    ]
    base = s.low - s.sm * 1.7
    bars = [
        *third,
        between(f"÷ {total}", y3 + step, "lsum"),
        *s.bars(shares, base, base - y3 - s.sm * 1.5, "weight"),
        *s.numbers([percent(w, 1) for w in shares], s.low, key="s", c="strong"),
    ]
    return [[first, second], [third, bars]]


def written_sum(f: Facts) -> tuple[float, float, float, float]:
    """One number of the output: the found value's part, the rest, the sum, the value.

    Of the large ones the first whose rounded parts add up as they are written.
    """
    weight, values = f.shares[f.asks][f.looks], f.head["values"][f.looks]
    order = sorted(range(f.width), key=lambda d: -abs(f.output[d]))
    sums = []
    for d in order[: f.width // 2]:
        part, whole = weight * values[d], f.output[d]
        sums.append((part, whole - part, whole, values[d]))
    for found in sums:
        part, rest, whole = (round(x, 3) for x in found[:3])
        product = round(round(weight, 3) * round(found[3], 3), 3)
        if rest and product == part and round(part + rest, 3) == whole:
            return found
    return sums[0]


def scene_average(s: Stage):
    f, i = s.f, s.f.asks
    shares = f.shares[i]
    lit = {i: "query", f.looks: "value"}
    h = (s.low - s.top) * 0.42
    y = s.top + s.sm * 0.4
    at = y + h + s.sm * 1.5
    numbers = s.numbers([percent(w, 1) for w in shares], at, key="s")
    values = [*s.sentence(lit), *s.strips("v", "value", y=y, h=h, w=0.6), *numbers]
    parts = s.strips("v", "value", y=y, h=h, w=0.6)
    parts = [
        mark | {"k": f"part{n}", "w": max(0.6 * s.col * w, 0.5)}
        for n, (mark, w) in enumerate(zip(parts, shares, strict=True))
    ]
    pale = s.strips("v", "value", y=y, h=h, w=0.6, o=0.15)
    shrunk = [*s.sentence(lit), *pale, *parts, *numbers]
    y2 = at + s.sm * 0.9
    h2 = s.low - y2 - s.sm * 0.2
    out = strip("out", "out", s.x(i), y2, 0.6 * s.col, h2, "output")
    part, rest, whole, v = written_sum(f)
    left = s.W * (0.5 if s.wide else 0.49)
    line = s.sm * 1.6
    yy = y2 + h2 / 2 - line
    lines = (
        f"{shares[f.looks]:.3f} × {signed(v, 3)} = {signed(part, 3)}",
        f"all others {signed(rest, 3)}",
        f"together {signed(whole, 3)}",
    )
    sums = [
        text(f"t{n}", left, yy + n * line, words, s.sm, f"number {c}", "end")
        for n, (words, c) in enumerate(
            zip(lines, ("value", "value", "output strong"), strict=True)
        )
    ]
    sums.append(
        s.label(
            "output", s.x(i) + 0.42 * s.col, yy + line, "output strong", "lo", "start"
        )
    )
    flown = [
        *s.sentence(lit),
        *pale,
        *(mark | {"x": s.x(i), "y": y2, "h": h2, "o": 0} for mark in parts),
        *numbers,
        out,
        *sums,
    ]
    kept = [
        *s.sentence({i: "output", f.looks: "value"}),
        *s.arcs(shares, i, "weight"),
        *s.strips("v", "value", y=y, h=h, w=0.6, only=[f.looks]),
        *numbers,
        out,
        *sums,
    ]
    return [[values], [shrunk, flown], [kept]]


def scene_root(s: Stage):
    f, i = s.f, s.f.undecided
    lit = {i: "query"}
    with_root, without = f.shares[i], softmax(f.scores[i])
    room = (s.low - s.top) / 2
    y1, y2 = s.top + room - s.sm * 1.9, s.low - s.sm * 1.5
    high = room - s.sm * 4.2

    def half(shares, y, key, words, c):
        return [
            s.label(words, 6, y - high - s.sm * 1.1, "note", f"l{key}", "start"),
            *s.bars(shares, y, high, c, f"b{key}"),
            *s.numbers([percent(w, 1) for w in shares], y + s.sm * 1.25, key=f"s{key}"),
        ]

    name = f.words[i]
    first = [
        *s.sentence(lit),
        *half(
            with_root, y1, "r", f"“{name}” looks at, scores ÷ {f.root:.2f}", "weight"
        ),
    ]
    second = first + half(
        without, y2, "p", "the same scores, undivided", "weight harsh"
    )
    return [[first], [second]]


def scene_heads(s: Stage):
    f = s.f
    layers = len(f.record["attention"]["encoder"])
    per = len(f.heads) // layers
    left = s.W * (0.2 if s.wide else 0.22)
    dx = (s.W - left - 6) / per
    y0 = s.top + s.sm * 2.2
    dy = (s.low - y0 - s.sm) / layers
    biggest = max(abs(row["rise"]) for row in f.rise.values())
    most = min(dx, dy) * 0.44

    def grid(sized=False, chosen=None):
        marks = [
            s.label(
                f"layer {n + 1}",
                left - s.sm * 0.6,
                y0 + (n + 0.5) * dy + s.sm * 0.35,
                "note",
                f"ll{n}",
                "end",
            )
            for n in range(layers)
        ]
        for (layer, head), row in f.rise.items():
            x, y = left + (head + 0.5) * dx, y0 + (layer + 0.5) * dy
            r = most * 0.42
            c = "head"
            if sized:
                r = max(most * math.sqrt(abs(row["rise"]) / biggest), 1.5)
                c += " worse" if row["rise"] > 0 else " better"
            if (layer, head) == chosen:
                c += " chosen"
            marks.append(dot(f"h{layer}-{head}", x, y, r, c))
        if chosen:
            x, y = left + (chosen[1] + 0.5) * dx, y0 + (chosen[0] + 0.5) * dy
            marks.append(dot("ring", x, y, most * 0.8, "ring"))
        return marks

    def show(name, lit, words, least=LEAST * 2):
        marks = s.sentence(lit) + grid(chosen=name)
        for i, row in enumerate(f.heads[name]):
            c = "weight" if i in lit else "weight soft"
            marks += s.arcs(row, i, c, least=least)
        marks.append(s.label(words, s.W / 2, s.top + s.sm * 0.9, "note", "lh"))
        return marks

    def name(head):
        return f"layer {head[0] + 1}, head {head[1] + 1}"

    everything = [
        show(f.favourite, {f.asks: "query"}, name(f.favourite)),
        show(f.previous, {}, name(f.previous)),
        show(f.unreadable, {}, name(f.unreadable), 0.1),
    ]
    sized = [
        *s.sentence(),
        *grid(sized=True, chosen=f.favourite),
        s.label(
            "the larger the dot, the more the head is missed",
            s.W / 2,
            s.top + s.sm * 0.9,
            "note",
            "lh",
        ),
    ]
    return [[everything[0]], [everything[1]], [everything[2]], [sized]]


def scene_order(s: Stage):
    f = s.f
    first, second, _ = f.other["orders"]

    def places(words):
        """Where each word of the sentence is in another order."""
        given = [w.lower() for w in re.findall(r"\w+", words)]
        found = [
            given.index(w.lower()) if w.lower() in given else n
            for n, w in enumerate(f.words)
        ]
        return found if len(set(found)) == len(found) else None

    size = s.fs * (0.95 if s.wide else 1)
    y = s.low - s.sm * 0.5

    def german(row):
        return text(
            f"de{row['text'][:3]}",
            s.W / 2,
            y,
            row["translation"],
            min(size, s.W * 1.9 / len(row["translation"])),
            "decoder",
        )

    mixed = places(second["text"])
    d = f.record["sizes"]["d_model"]
    speeds = [10_000 ** (-2 * n / d) for n in (0, 12, 24, 44)]
    rows, r = (
        len(speeds),
        min(s.col * 0.33, (y - s.top - 3 * s.sm) / len(speeds) / 2.35),
    )
    clocks = [
        clock(f"c{n}-{i}", s.x(i), s.top + r + 2 + n * r * 2.3, r, i * speed, "clock")
        for n, speed in enumerate(speeds)
        for i in range(s.n)
    ]
    note = s.top + rows * r * 2.3 + s.sm * 1.2
    said = s.label(
        "place 0, 1, 2 …: hands that turn at different speeds",
        s.W / 2,
        note,
        "note",
        "lc",
    )
    here = s.sentence(), s.sentence(places=mixed)
    return [
        [here[0] + [german(first)], here[1] + [german(second)]],
        [
            [*here[1], *clocks, said, german(second)],
            [*here[0], *clocks, said, german(first)],
        ],
    ]


def scene_layers(s: Stage):
    f = s.f
    layers = f.record["attention"]["encoder"]
    n = len(layers)
    y0, top = s.H - s.fs * 1.3, s.fs * 1.6
    gap = (y0 - s.fs * 1.3 - top) / n
    height = [y0 - s.fs * 1.2 - gap * row for row in range(n + 1)]
    mean = [
        [
            [sum(h[i][j] for h in heads) / len(heads) for j in range(s.n)]
            for i in range(s.n)
        ]
        for heads in layers
    ]
    frames = []
    for upto in range(n + 1):
        marks = s.sentence({f.asks: "encoder"}, y=y0)
        for row in range(n + 1):
            for i in range(s.n):
                on = row <= upto
                c = "state" + (" mine" if i == f.asks else "")
                marks.append(
                    dot(
                        f"d{row}-{i}",
                        s.x(i),
                        height[row],
                        s.col * 0.11,
                        c,
                        1 if on else 0.25,
                    )
                )
        for row in range(upto):
            for i in range(s.n):
                for j in range(s.n):
                    w = mean[row][i][j]
                    if w < 0.1 and i != f.asks:
                        continue
                    c = "encoder" if i == f.asks else "faint"
                    marks.append(
                        arc(
                            f"m{row}-{i}-{j}",
                            s.x(j),
                            height[row],
                            s.x(i),
                            height[row + 1],
                            -gap * 0.5,
                            gap * 0.5,
                            (14 if i == f.asks else 5) * w,
                            c,
                        )
                    )
            marks.append(
                s.label(
                    f"layer {row + 1}",
                    2,
                    (height[row] + height[row + 1]) / 2 + 4,
                    "note",
                    f"ly{row}",
                    "start",
                    s.sm * 0.92,
                )
            )
        frames.append(marks)
    return [frames]


def german_row(s: Stage):
    """Centres and size of the words of the translation on one line."""
    words = s.f.target
    gap = 1.1
    units = sum(len(w) + gap for w in words)
    size = min(s.fs, (s.W - 8) / units * 1.78)
    scale, x, found = (s.W - 8) / units, 4.0, []
    for word in words:
        width = (len(word) + gap) * scale
        found.append(x + width / 2)
        x += width
    return found, size


def write(s: Stage, upto: int, current: bool, choices=True) -> list:
    """The decoder with its first words written; the next one is looked for."""
    f = s.f
    xs, size = german_row(s)
    top, low = s.fs * 1.5, s.base + (110 if s.wide else 82)
    marks = s.sentence(y=top, lit={})
    for mark in marks:
        mark["c"] += " encoder"
    for i in range(upto):
        word = f.target[i]
        c = "word decoder" + (" lit" if i == upto - 1 and current else "")
        if word == "end":
            c += " end"
        marks.append(text(f"t{i}", xs[i], low, word, size, c))
    if not current:
        return marks
    now = upto - 1
    for j, w in enumerate(f.across[now]):
        if w >= LEAST:
            y1, y2 = top + s.fs * 0.5, low - size
            bend = (y2 - y1) * 0.5
            marks.append(
                arc(
                    f"a-{now}-{j}",
                    xs[now],
                    y2,
                    s.x(j),
                    y1,
                    -bend,
                    bend,
                    max(1, (10 if s.wide else 7) * w),
                    "across",
                )
            )
    if choices:
        marks += options(s, now, low)
    return marks


def options(s: Stage, now: int, low: float, count=4) -> list:
    """The most probable next pieces, as bars."""
    step, y = s.sm * 1.62, low + s.fs * 1.6 + s.sm * 1.6
    words = "its guesses for the next token"
    marks = [s.label(words, s.W * 0.38, y - s.sm * 1.7, "note", "lg", "start")]
    for n, (piece, share) in enumerate(s.f.best[now][:count]):
        at = y + n * step
        c = "decoder" if n == 0 else "note"
        marks += [
            text(
                f"o{n}",
                s.W * 0.36,
                at,
                piece + ("-" if is_part(s.f, now, n) else ""),
                s.sm,
                c + (" strong" if n == 0 else ""),
                "end",
            ),
            rect(
                f"ob{n}",
                s.W * 0.38,
                at - s.sm * 0.8,
                max(s.W * 0.42 * share, 1),
                s.sm,
                "next" + (" first" if n == 0 else ""),
                2,
            ),
            text(
                f"op{n}",
                s.W * 0.395 + s.W * 0.42 * share,
                at,
                percent(share, 1),
                s.sm,
                "number",
                "start",
            ),
        ]
    return marks


def is_part(f: Facts, now: int, n: int) -> bool:
    """Whether the chosen piece only begins its word."""
    return n == 0 and len(f.writing[now]) > 1


def scene_writes(s: Stage):
    f = s.f
    frames = [write(s, n, True) for n in range(1, len(f.target) + 1)]
    begin = write(s, 0, False)
    hard = write(s, f.hesitates + 1, True)
    return [[begin, *frames[:1]], frames[1:], [hard]]


def scene_learning(s: Stage):
    f = s.f
    curve = f.learning
    left, right = s.W * 0.14, s.W * 0.96
    top, low = s.base - (s.fs * 1.2 if s.wide else s.sm), s.low - s.sm * 2.6
    xs, size = german_row(s)
    last = curve[-1][0]
    lo, hi = math.log(1), math.log(curve[0][1] * 1.6)

    def at(step, value):
        x = left + (right - left) * step / last
        return x, low - (low - top) * (math.log(value) - lo) / (hi - lo)

    points = [at(*point) for point in curve]
    lengths = [0.0]
    for a, b in pairwise(points):
        lengths.append(lengths[-1] + math.dist(a, b))
    line = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    marks = []
    for i, word in enumerate(f.target):
        c = "word decoder" + (" end" if word == "end" else "")
        marks.append(text(f"t{i}", xs[i], s.fs * 1.5, word, size, c))
        if s.wide:
            guess, y = percent(f.best[i][0][1]), s.fs * 1.5 + s.sm * 1.5
            marks.append(text(f"tp{i}", xs[i], y, guess, s.sm, "number note"))
    for v in (1, 3, 10, 30, 100, 300, 1000):
        if v < math.exp(hi):
            y, at_y = at(0, v)[1], at(0, v)[1] + s.sm * 0.35
            marks.append(rect(f"gy{v}", left, y, right - left, 1, "grid"))
            marks.append(text(f"gt{v}", left - 5, at_y, str(v), s.sm, "note", "end"))
    under, over = low + s.sm * 1.5, top - s.sm * 0.5
    marks += [
        s.label(f"{last:,} updates", right, under, "note", "lu", "end"),
        s.label("0", left, under, "note", "lz"),
        s.label("tokens it is choosing among", left, over, "note", "lp", "start"),
    ]

    def reached(n):
        (x, y), value = points[n], curve[n][1]
        words = f"{value:.0f}" if value > 10 else f"{value:.1f}"
        away = x + s.sm * 0.7, y - s.sm * 0.6
        return [
            *marks,
            path("curve", line, "curve", lengths[n] / lengths[-1]),
            dot("now", x, y, s.sm * 0.35, "tip"),
            text("ln", min(away[0], right - s.sm * 1.6), away[1], words, s.sm,
                 "strong number", "start"),
        ]  # fmt: skip

    places = [n for n in (0, 1, 3, 7, 15, 30) if n < len(curve) - 1]
    return [[reached(n) for n in [*places, len(curve) - 1]]]


SCENES = {
    "his": scene_his,
    "query": scene_query,
    "scores": scene_scores,
    "softmax": scene_softmax,
    "average": scene_average,
    "root": scene_root,
    "heads": scene_heads,
    "order": scene_order,
    "layers": scene_layers,
    "writes": scene_writes,
    "learning": scene_learning,
}


def said(name: str) -> str:
    """What a scene's picture shows, in words."""
    f = facts()
    i, words = f.asks, f.words
    asks, looks = words[i], words[f.looks]

    def listed(values):
        return ", ".join(f"{w} {v}" for w, v in zip(words, values, strict=True))

    shares = listed(percent(w, 1) for w in f.shares[i])
    plain = [percent(w, 1) for w in softmax(f.scores[f.undecided])]
    across = "; ".join(
        f"{word} looks at {words[max(range(len(row)), key=row.__getitem__)]}"
        for word, row in zip(f.target, f.across, strict=True)
    )
    return {
        "his": "; ".join(f"his {r['thing']}: {owned(r)}" for r in f.other["owned"]),
        "query": f"Under each word its key, {f.width} bars to the left or right of a "
        f"line; beside that of “{asks}” its query.",
        "scores": f"Scores of the query of “{asks}” with each key: "
        + listed(signed(x, 1) for x in f.scores[i]),
        "softmax": f"Shares of “{asks}”: {shares}",
        "average": f"Values, weighted with {shares}, add up to the output of “{asks}”, "
        f"nearly the value of “{looks}”.",
        "root": f"Weights of “{words[f.undecided]}” with the division: "
        + listed(percent(w, 1) for w in f.shares[f.undecided])
        + ". Without it: "
        + listed(plain),
        "heads": "A dot for each head; its size is how much the loss rises without it.",
        "order": "The words in two orders, with their translations; under each place "
        "clock hands that turn at different speeds.",
        "layers": "The sentence, and above it a row of dots for each layer; lines show "
        "from which words each dot takes.",
        "writes": f"Lines from each German word to the English ones: {across}.",
        "learning": "A curve falls from "
        f"{f.learning[0][1]:.0f} to {f.learning[-1][1]:.1f} candidates for the next "
        f"token, over {f.learning[-1][0]:,} updates.",
    }[name]


# --- as SVG ---------------------------------------------------------------------------

STRIPS = {"in": "inputs", "q": "queries", "k": "keys", "v": "values"}


@cache
def strips() -> dict[str, list[float]]:
    """The numbers of each strip, as shares of a large one of its kind."""
    f, found = facts(), {}
    for short, name in STRIPS.items():
        rows = [row[:SHOWN] for row in f.head[name]]
        sizes = sorted(abs(x) for row in rows for x in row)
        full = sizes[int(0.98 * len(sizes))]  # the few that are larger are cut

        def scaled(row, full=full):
            return [round(max(-1, min(1, x / full)), 2) for x in row[:SHOWN]]

        for i, row in enumerate(rows):
            if short != "q" or i == f.asks:
                found[f"{short}{i}"] = scaled(row)
        if short == "v":
            found["out"] = scaled(f.output)
    return found


def bars_of(values, x, y, w, h) -> str:
    """A path: a bar for each number, to the right where it is positive."""
    step = h / len(values)
    axis = min(0.7, w / 20)  # where the numbers are zero
    parts = [f"M{x:.1f} {y:.1f}h{axis:.2f}v{h:.1f}h{-axis:.2f}z"]
    for n, value in enumerate(values):
        reach = value * w / 2
        parts.append(
            f"M{x:.1f} {y + n * step + step * 0.1:.1f}h{reach:.1f}v{step * 0.8:.1f}"
            f"h{-reach:.1f}z"
        )
    return "".join(parts)


def number(value) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


def svg_of(mark: dict) -> str:
    kind, c = mark["t"], mark["c"]
    fade = "" if mark["o"] == 1 else f' opacity="{mark["o"]:.2f}"'
    head = f'class="{c}"{fade}'
    n = {key: number(v) for key, v in mark.items() if isinstance(v, int | float)}
    if kind == "text":
        return (
            f'<text {head} x="{n["x"]}" y="{n["y"]}" font-size="{n["s"]}" '
            f'text-anchor="{mark["a"]}">{html.escape(mark["txt"])}</text>'
        )
    if kind == "rect":
        return (
            f'<rect {head} x="{n["x"]}" y="{n["y"]}" width="{n["w"]}" '
            f'height="{n["h"]}" rx="{n["rx"]}"/>'
        )
    if kind == "arc":
        x1, y1, x2, y2 = (mark[key] for key in ("x1", "y1", "x2", "y2"))
        d = (
            f"M{x1:.1f} {y1:.1f}C{x1:.1f} {y1 + mark['b1']:.1f} {x2:.1f} "
            f"{y2 + mark['b2']:.1f} {x2:.1f} {y2:.1f}"
        )
        return f'<path class="arc {c}"{fade} d="{d}" stroke-width="{n["w"]}"/>'
    if kind == "strip":
        box = (mark[key] for key in ("x", "y", "w", "h"))
        d = bars_of(strips()[mark["v"]], *box)
        return f'<path class="strip {c}"{fade} d="{d}"/>'
    if kind == "clock":
        x, y, r = mark["x"], mark["y"], mark["r"]
        x2, y2 = x + r * math.sin(mark["turn"]), y - r * math.cos(mark["turn"])
        return (
            f'<g {head}><circle cx="{x:.1f}" cy="{y:.1f}" r="{r:.1f}"/>'
            f'<path d="M{x:.1f} {y:.1f}L{x2:.1f} {y2:.1f}"/></g>'
        )
    if kind == "dot":
        return f'<circle {head} cx="{n["x"]}" cy="{n["y"]}" r="{n["r"]}"/>'
    drawn = f'pathLength="1" stroke-dasharray="{mark["part"]:.3f} 2"'
    return f'<path {head} {drawn} d="{mark["d"]}"/>'


ORDER = {"rect": 0, "arc": 1, "path": 2, "clock": 3, "dot": 3, "strip": 4, "text": 5}


def still(name: str, wide: bool) -> str:
    """The last frame of a scene."""
    stage = Stage(wide)
    frame = SCENES[name](stage)[-1][-1]
    marks = "".join(svg_of(m) for m in sorted(frame, key=lambda m: ORDER[m["t"]]))
    return (
        f'<svg class="essay-svg {"wide" if wide else "narrow"}" role="img" '
        f'viewBox="0 0 {stage.W} {stage.H}" aria-label="{html.escape(said(name))}">'
        f"{marks}</svg>"
    )


def shortened(mark: dict) -> dict:
    found = {key: round(v, 2) if isinstance(v, float) else v for key, v in mark.items()}
    if found["o"] == 1:
        del found["o"]
    return found


def all_frames() -> dict:
    """What the script moves."""
    found = {"strips": strips(), "order": ORDER}
    for wide in (True, False):
        stage = Stage(wide)
        scenes = {
            name: [
                [[shortened(m) for m in frame] for frame in beat]
                for beat in draw(stage)
            ]
            for name, draw in SCENES.items()
        }
        found["wide" if wide else "narrow"] = {
            "W": stage.W,
            "H": stage.H,
            "scenes": scenes,
        }
    return found
