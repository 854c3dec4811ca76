"""Sphinx extension: the map of the model, "You are here", and the tour of eight stops.

`{tour-map}` draws book/_static/map.svg with links to the stops of its page.
`{tour-stop}` shows one number of the model that ships as the sum that it came from,
with the term that the next stop follows; `{tour}` writes a number of the tour into a
sentence. Each chapter in PLACES ends with the map, its boxes lit, and a link to its
stop. All numbers come from through.py's trace.
"""

from __future__ import annotations

import html
import json
import re
from functools import cache
from pathlib import Path

import through
from docutils import nodes
from sphinx.util.docutils import SphinxDirective, SphinxRole

MAP = Path(__file__).parents[1] / "_static" / "map.svg"
PAGE = "book/through_the_model"
STOPS = {  # anchor -> what the map lights there
    "stop-1-a-probability": ["out"],
    "stop-2-a-logit": ["out"],
    "stop-3-the-last-decoder-layer": ["dec-feed"],
    "stop-4-across-to-the-source": ["dec-across"],
    "stop-5-the-memory": ["enc-feed"],
    "stop-6-the-heads-combined": ["enc-attention"],
    "stop-7-an-attention-weight": ["enc-attention"],
    "stop-8-a-word-and-its-position": ["src-in"],
}
ATTENTION = ["enc-attention", "dec-self", "dec-across", "attention"]
LAYERS = ["enc-attention", "enc-feed", "dec-self", "dec-across", "dec-feed"]
PLACES = {  # chapter -> its boxes, its stops
    "00_why": (["dec-across"], [4]),
    "01_hello": (["enc-attention", "attention"], [7]),
    "02_attention": (ATTENTION, [7]),
    "03_multihead": (ATTENTION, [6]),
    "04_positions": (["src-in", "tgt-in"], [8]),
    "05_encoder": (["enc-attention", "enc-feed"], [5]),
    "06_decoder": (["dec-self", "dec-across", "dec-feed"], [3, 4]),
    "07_transformer": ([*LAYERS, "src-in", "tgt-in", "out", "whole"], [1, 2]),
}
SHOWN = 5  # terms of a sum


# --- the map --------------------------------------------------------------------------


def drawn(lit: list[str], links: dict[str, str], notebooks: str) -> str:
    """The map: boxes lit; where a box leads, if not to its chapter; where those are."""
    svg = MAP.read_text("utf-8").replace('"../notebooks/', f'"{notebooks}')
    svg = svg.replace('class="lt-map"', 'class="lt-map guide"', 1)
    for box in lit:
        svg = svg.replace(f'<a data-box="{box}"', f'<a data-box="{box}" class="lit"')
    for box, to in links.items():
        svg = re.sub(rf'(data-box="{box}"[^>]* href=")[^"]*', rf"\g<1>{to}", svg)
    return svg


def words_of(anchor: str) -> str:
    """The anchor of a stop as its heading: Stop 2: A logit."""
    _, number, *rest = anchor.split("-")
    return f"Stop {number}: {' '.join(rest).capitalize()}"


def here(app, doctree):
    """The map with this chapter's boxes lit, and its stops, at the end of its page."""
    place = PLACES.get(Path(app.env.docname).name)
    if place is None or not re.fullmatch(r"notebooks/\w+", app.env.docname):
        return
    lit, stops = place
    page = "../" + app.builder.get_target_uri(PAGE)
    anchors = [anchor for anchor in STOPS if int(anchor.split("-")[1]) in stops]
    links = " and ".join(
        f'<a href="{page}#{anchor}">{words_of(anchor)}</a>' for anchor in anchors
    )
    text = (
        '<aside class="you-are-here" aria-label="You are here">'
        f"{drawn(lit, {}, '')}<div><p><strong>You are here.</strong> "
        "The lit boxes are what this chapter is about. Each box leads to its chapter."
        "</p>"
        f"<p>See it at work in the trained model: {links}.</p></div></aside>"
    )
    doctree.append(nodes.raw("", text, format="html"))


# --- the chain ------------------------------------------------------------------------


@cache
def chain() -> list[dict]:
    """The eight stops: what is shown of each, from one trace of the book's sentence.

    Each is a number of the model: its name in words (`say`), `value`, `terms` (words,
    value), which of them the next stop follows (`chosen`), and `path`, the numbers from
    the first stop to this one, as through.js opens them. `facts` is for sentences.
    """
    import torch

    with torch.no_grad():
        return stops_of(*through.sentence_trace())


def stops_of(trace, about) -> list[dict]:
    numbers, model, source = trace.numbers, trace.model, about["source"]
    vocabulary = [piece.replace("▁", "") for piece in about["vocabulary"]]
    top = len(model.decoder.layers) - 1
    last, first = f"decoder.layers.{top}", "encoder.layers.0"
    stops, path = [], []

    def stop(say, name, at, terms, chosen, pick=None, **facts):
        value = float(numbers[name][tuple(at)])
        path.append([name, list(at)])
        terms = [(words, float(term)) for words, term in terms]
        stops.append(
            {
                "say": say,
                "value": value,
                "terms": terms,
                "chosen": chosen,
                "path": [list(step) for step in path],
                "facts": {"value": value, **facts},
            }
        )

    def number(d):
        return f"number {d + 1}"

    def parts(way, row, d):
        """Heads, words of the source: what each brings to number d of attention."""
        module = model.get_submodule(way)
        heads = module.num_heads
        weights = numbers[f"{way}.weights"][:, row]  # (H, S)
        values = numbers[f"{way}.w_v"].unflatten(-1, (heads, -1)).transpose(0, 1)
        mixed = module.w_o.weight[d].unflatten(-1, (heads, -1))  # (H, V)
        return weights, weights[:, :, None] * values * mixed[:, None]  # (H, S, V)

    chances = numbers["probabilities"][0]
    word = int(chances.argmax())
    best = chances.topk(SHOWN).indices.tolist()
    stop(
        f"Probability of “{vocabulary[word]}” as the first word",
        "probabilities",
        (0, word),
        [(vocabulary[i], chances[i]) for i in best],
        0,
        word=vocabulary[word],
        second=vocabulary[best[1]],
        entries=len(vocabulary),
    )

    hidden, row = numbers[f"{last}.residual_3.norm"][0], model.output.weight[word]
    products = hidden * row
    d = int(products.argmax())
    stop(
        f"Logit of “{vocabulary[word]}”",
        "logits",
        (0, word),
        [
            (f"{number(i)}: {hidden[i]:.2f} × {row[i]:.3f}", products[i])
            for i in products.abs().argsort(descending=True).tolist()
        ],
        products.abs().argsort(descending=True).tolist().index(d),
        number=d + 1,
        width=len(hidden),
    )

    path.append([f"{last}.residual_3.norm", [0, d]])
    came = numbers[f"{last}.residual_1.norm"][0, d]
    across = numbers[f"{last}.cross_attention.w_o"][0, d]
    added = numbers[f"{last}.feed_forward.w_2"][0, d]
    stop(
        f"Number {d + 1} before the last normalization",
        f"{last}.residual_3.sum",
        (0, d),
        [
            (
                "came in",
                numbers[f"{last}.residual_2.norm"][0, d],
            ),
            ("feed-forward network", added),
        ],
        0,
        normalized=float(hidden[d]),
        came=float(came),
        across=float(across),
    )

    path.append([f"{last}.residual_2.norm", [0, d]])
    path.append([f"{last}.residual_2.sum", [0, d]])
    weights, brought = parts(f"{last}.cross_attention", 0, d)
    by_word = brought.sum((0, 2))
    at = int(by_word.argmax())
    terms = sorted(zip(source, by_word.tolist(), strict=True), key=lambda x: -abs(x[1]))
    head, k = divmod(int(brought[:, at].argmax()), brought.shape[2])
    stop(
        f"What attention to the source adds to {number(d)}",
        f"{last}.cross_attention.w_o",
        (0, d),
        terms,
        [words for words, _ in terms].index(source[at]),
        word=source[at],
        part=float(by_word[at]),
        head=head + 1,
        weight=float(weights[head, at]),
    )

    memory = numbers[f"encoder.layers.{len(model.encoder.layers) - 1}.residual_2.norm"]
    j = head * brought.shape[2] + k
    path.append([f"{last}.cross_attention.blend", [0, j]])
    table = model.get_submodule(f"{last}.cross_attention.w_v").weight[j]
    products = memory[at] * table
    order = products.abs().argsort(descending=True).tolist()
    value = float(numbers[f"{last}.cross_attention.w_v"][at, j])
    e = next(i for i in order if (products[i] > 0) == (value > 0))
    stop(
        f"A number of the value of “{source[at]}”, head {head + 1}",
        f"{last}.cross_attention.w_v",
        (at, j),
        [
            (f"{number(i)}: {memory[at][i]:.2f} × {table[i]:.3f}", products[i])
            for i in order
        ],
        order.index(e),
        word=source[at],
        number=e + 1,
        memory=float(memory[at, e]),
    )

    line = [f"encoder.layers.{i}.residual_2" for i in range(len(model.encoder.layers))]
    for way in reversed(line[1:]):
        path += [[f"{way}.norm", [at, e]], [f"{way}.sum", [at, e]]]
        path.append([f"{way.replace('residual_2', 'residual_1')}.norm", [at, e]])
        path.append([f"{way.replace('residual_2', 'residual_1')}.sum", [at, e]])
    path += [[f"{line[0]}.norm", [at, e]], [f"{line[0]}.sum", [at, e]]]
    path += [[f"{first}.residual_1.{what}", [at, e]] for what in ("norm", "sum")]
    weights, brought = parts(f"{first}.self_attention", at, e)
    by_head = brought.sum((1, 2))
    order = by_head.abs().argsort(descending=True).tolist()
    head = order[0]
    stop(
        f"What attention in layer 1 adds to {number(e)} of “{source[at]}”",
        f"{first}.self_attention.w_o",
        (at, e),
        [(f"head {h + 1}", by_head[h]) for h in order],
        0,
        head=head + 1,
        line=[float(numbers[f"{way}.norm"][at, e]) for way in line],
        bottom=float(numbers["encoder.in"][at, e]),
    )

    row = weights[head]
    looked = row.argsort(descending=True).tolist()
    most = looked[0]
    path.append(
        [
            f"{first}.self_attention.blend",
            [at, head * brought.shape[2] + int(brought[head, most].abs().argmax())],
        ]
    )
    stop(
        f"Weight of “{source[most]}” for “{source[at]}”, head {head + 1}",
        f"{first}.self_attention.weights",
        (head, at, most),
        [(source[i], row[i]) for i in looked],
        0,
        word=source[at],
        looked=source[most],
        score=float(numbers[f"{first}.self_attention.scores"][head, at, most]),
    )

    del path[-2:]
    path.pop()
    root = model.config.d_model**0.5
    entry = float(model.src_embedding.weight[about["ids"]["source"][at], e])
    place = float(numbers["encoder.positions"][at, e])
    stop(
        f"Number {e + 1} of “{source[at]}” as it enters",
        "encoder.in",
        (at, e),
        [
            (
                f"√{model.config.d_model} × {entry:.3f}, from its row of the table",
                root * entry,
            ),
            (f"the position: {number(e)} of place {at}", place),
        ],
        0,
        word=source[at],
    )
    return stops


def written(x) -> str:
    if isinstance(x, list):
        return ", ".join(written(one) for one in x)
    if isinstance(x, float):
        return (
            f"{x:.3f}".replace("-", "−") if abs(x) < 1 else f"{x:.2f}".replace("-", "−")
        )
    return f"{x:,}" if isinstance(x, int) else str(x)


class Number(SphinxRole):
    """A number of the tour: {tour}`4.weight`."""

    def run(self):
        note(self.env)
        stop, _, name = self.text.partition(".")
        found = written(chain()[int(stop) - 1]["facts"][name])
        return [nodes.inline("", found, classes=["tour-number"])], []


class Stop(SphinxDirective):
    """One number as a sum: its largest terms, the rest, the one that is followed."""

    required_arguments = 1

    def run(self):
        note(self.env)
        stop = chain()[int(self.arguments[0]) - 1]
        shown = stop["terms"][:SHOWN]
        most = max(abs(term) for _, term in shown)
        rows = []
        for i, (words, term) in enumerate(shown):
            kind = "below" if term < 0 else "above"
            mark = ' class="followed"' if i == stop["chosen"] else ""
            rows.append(
                f"<li{mark}><span>{html.escape(words.replace('-', '−'))}</span>"
                f'<i class="{kind}" style="--share:{abs(term) / most:.3f}"></i>'
                f"<b>{written(term)}</b></li>"
            )
        rest = stop["terms"][SHOWN:]
        if rest and stop["path"][-1][0] != "probabilities":
            total = written(sum(term for _, term in rest))
            rows.append(
                f'<li class="rest"><span>the other {len(rest)}</span><i></i>'
                f"<b>{total}</b></li>"
            )
        path = html.escape(json.dumps(stop["path"], separators=(",", ":")))
        text = (
            f'<div class="tour-sum"><p><strong>{html.escape(stop["say"])} = '
            f"{written(stop['value'])}</strong></p><ol>{''.join(rows)}</ol>"
            f'<button type="button" hidden data-open="{path}">Open this number</button>'
            "</div>"
        )
        return [nodes.raw("", text, format="html")]


class Map(SphinxDirective):
    """The map, each of whose boxes leads to its stop."""

    def run(self):
        note(self.env)
        links = {boxes[0]: f"#{anchor}" for anchor, boxes in reversed(STOPS.items())}
        svg = drawn([], links, "../notebooks/")
        lit = html.escape(json.dumps({a: boxes for a, boxes in STOPS.items()}))
        text = f'<div class="tour-map" data-stops="{lit}">{svg}</div>'
        return [nodes.raw("", text, format="html")]


def note(env):
    for path in (MAP, Path(__file__), Path(through.__file__)):
        env.note_dependency(str(path))
    shipped = through.ROOT / "transformer_lib" / "pretrained" / through.MODEL
    env.note_dependency(str(shipped / "model.safetensors"))


def setup(app):
    app.add_directive("tour-map", Map)
    app.add_directive("tour-stop", Stop)
    app.add_role("tour", Number())
    app.connect("doctree-read", here)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
