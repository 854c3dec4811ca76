"""Sphinx extension: the whole model in one picture, with numbers of our own model.

The directive `{whole-model}` draws two columns, the encoder and the decoder. Sizes are
counted from the paper's base model, built without memory for its weights; shapes are
those of one sentence that goes through it; the translation and its score come from the
model that ships with the library.
"""

from __future__ import annotations

from functools import cache
from html import escape
from inspect import unwrap

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

VOCABULARY = 41_100  # gives the counts of Table 3, as chapter 07 works out
SENTENCE = "The old man sold his house."
REFERENCE = "Der alte Mann hat sein Haus verkauft."
WIDTH, BOX, EDGE = 300, 276, 8  # the columns touch where their edges end
LINES = "<div></div>" * 28  # for the reader's pen
MIDDLE, GAP = WIDTH / 2, 20


# --- numbers -------------------------------------------------------------------------


def size(count: int) -> str:
    """A count in thousands or millions: 1.05 M."""
    if count >= 10_000_000:
        return f"{count / 1e6:.1f} M"
    return f"{count / 1e6:.2f} M" if count >= 100_000 else f"{count:,}"


def shapes_of(model, src_ids, tgt_ids) -> dict[str, tuple]:
    """What each part of a model gives for one sentence, by its name."""
    shapes = {}

    def note(name):
        def hook(module, given, result):
            first = result[0] if isinstance(result, tuple) else result
            shapes[name] = tuple(first.shape)

        return hook

    hooks = [m.register_forward_hook(note(n)) for n, m in model.named_modules()]
    shapes["logits"] = tuple(model(src_ids, tgt_ids).shape)
    for hook in hooks:
        hook.remove()
    return shapes


def defaults(function) -> dict:
    """What a function's arguments are if nothing is said (autodoc hides it else)."""
    function = unwrap(function)
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    given = function.__defaults__ or ()
    return dict(zip(names[len(names) - len(given) :], given, strict=True))


@cache
def facts() -> dict:
    """All that the picture says and that is not words."""
    import torch

    from transformer_lib import evaluation, objective, transformer, translator
    from transformer_lib.decoding import strategies as decoding
    from transformer_lib.runs import folder as runs

    config = transformer.TransformerConfig.base(VOCABULARY)
    small, tokenizer, _ = runs.load_pretrained("tatoeba-en-de")
    beam = defaults(decoding.beam_search)
    beam_size, alpha = beam["beam_size"], beam["alpha"]
    with torch.no_grad():
        said = translator.translate(
            small, tokenizer, [SENTENCE], beam_size=beam_size, alpha=alpha
        )[0]
    with torch.device("meta"):
        model = transformer.Transformer(config)
        # The encoder reads an end sign too, the decoder a start sign.
        src = torch.zeros(1, len(tokenizer.encode(SENTENCE)) + 1, dtype=torch.int64)
        tgt = torch.zeros(1, len(tokenizer.encode(said)) + 1, dtype=torch.int64)
    shapes = shapes_of(model.eval(), src, tgt)

    def count(part: str) -> int:
        return sum(p.numel() for p in model.get_submodule(part).parameters())

    smoothing = defaults(objective.label_smoothed_cross_entropy)["label_smoothing"]
    return {
        "config": config,
        "pieces": " ".join(tokenizer.pieces(SENTENCE)),
        "said": said,
        "bleu": evaluation.sentence_bleu([said], [REFERENCE])[0],
        "beam": beam_size,
        "alpha": alpha,
        "label_smoothing": smoothing,
        "warmup": defaults(objective.noam_lr)["warmup"],
        "src": tuple(src.shape),
        "tgt": tuple(tgt.shape),
        "shapes": shapes,
        "attention": count("encoder.layers.0.self_attention"),
        "feed_forward": count("encoder.layers.0.feed_forward"),
        "norm": count("encoder.layers.0.residual_1.norm"),
        "parts": config.count_parts(),
        "all": sum(p.numel() for p in model.parameters()),
    }


# --- drawing -------------------------------------------------------------------------


class Column:
    """One column of boxes, drawn from below: y is how high it is so far."""

    def __init__(self, name: str, words: str):
        self.y, self.parts, self.name, self.words = 12, [], name, words
        self.at = {}  # title of a box -> the heights of its foot and its top

    def box(self, kind, chapter, title, *lines, height=None, arrow=True):
        """A box that is a link to the chapter that builds it, and the way into it."""
        height = height or 25 + 17 * len(lines)
        top = -self.y - height
        self.at[title] = (self.y, self.y + height)
        number = chapter.split("_")[0]
        rows = "".join(
            f'<text x="{MIDDLE}" y="{top + 37 + 17 * i}" class="q">'
            f"{escape(line)}</text>"
            for i, line in enumerate(lines)
        )
        self.parts.append(
            f'<a href="../notebooks/{chapter}.html">'
            f'<rect x="{MIDDLE - BOX / 2}" y="{top}" width="{BOX}" height="{height}"'
            f' rx="8" class="{kind}"/>'
            f'<text x="{MIDDLE - BOX / 2 + 10}" y="{top + 19}" class="t">'
            f"{escape(title)}</text> "
            f'<text x="{MIDDLE + BOX / 2 - 9}" y="{top + 19}" class="n">{number}</text>'
            f" {rows}</a>"
        )
        self.y += height
        if arrow:
            self.arrow()

    def arrow(self, words="", length=GAP):
        y = -self.y
        self.parts.append(
            f'<path d="M{MIDDLE} {y}V{y - length + 7}" class="l"/>'
            f'<path d="M{MIDDLE - 5} {y - length + 8}h10l-5 -8z" class="h"/>'
        )
        if words:
            self.parts.append(
                f'<text x="{MIDDLE + 8}" y="{y - 8}" class="s">{escape(words)}</text>'
            )
        self.y += length

    def residual(self, title, words, length):
        """The line past a box, the sum above it, and what is done with the sum."""
        foot, top = self.at[title]
        low, high = -(foot - 6), -(top + 7)
        side = (WIDTH - BOX) / 2 - 4.5
        self.parts.append(
            f'<path d="M{MIDDLE} {low}H{side}V{high}H{MIDDLE - 5}" class="l r"/>'
            f'<circle cx="{MIDDLE}" cy="{high}" r="5" class="l"/>'
            f'<path d="M{MIDDLE - 3} {high}h6" class="l"/>'
        )
        self.arrow(words, length)

    def frame(self, draw):
        """A frame round what one layer holds."""
        bottom = self.y - 11
        draw()
        top = self.y - 10
        self.parts.insert(
            0,
            f'<rect x="3" y="{-top}" width="{WIDTH - 6}"'
            f' height="{top - bottom}" rx="12" class="f"/>',
        )

    def text(self, words, kind="w"):
        self.parts.append(
            f'<text x="{MIDDLE}" y="{-self.y - 6}" class="{kind}">'
            f"{escape(words)}</text>"
        )
        self.y += 20

    def svg(self, height) -> str:
        return (
            f'<svg class="whole-model" viewBox="{-EDGE} {-height} {WIDTH + 2 * EDGE}'
            f' {height}"'
            f' role="group" aria-labelledby="{self.name}-title"'
            f' aria-describedby="{self.name}-words">'
            f'<title id="{self.name}-title">The {self.name}</title>'
            f'<desc id="{self.name}-words">{escape(self.words)}</desc>'
            f"{''.join(self.parts)}</svg>"
        )


def shape(dimensions) -> str:
    return "(" + ", ".join(f"{n:,}" for n in dimensions) + ")"


def embedding(column, known, ids):
    c = known["config"]
    table = known["parts"]["embeddings"]
    column.box(
        "n",
        "04_positions",
        "Embedding and position",
        f"x = √{c.d_model} · E[id] + PE(place)",
        f"E: {c.vocab_size:,} × {c.d_model} = {size(table)}, one for all three",
        arrow=False,
    )
    column.arrow(shape((*ids, c.d_model)), GAP + 14)


def attention(column, kind, chapter, title, known, note):
    c = known["config"]
    width = c.d_model // c.num_heads
    column.box(
        kind,
        chapter,
        title,
        f"softmax(QKᵀ ⁄ √{width}) V, in {c.num_heads} heads",
        note,
        f"4 × {c.d_model} × {c.d_model} = {size(known['attention'])}",
        arrow=False,
    )
    column.residual(title, "LayerNorm(x + sublayer)", GAP + 10)


def feed_forward(column, kind, chapter, known):
    c, title = known["config"], "Feed-forward network"
    column.box(
        kind,
        chapter,
        title,
        "max(0, xW₁ + b₁) W₂ + b₂",
        f"{c.d_model} → {c.d_ff:,} → {c.d_model}: {size(known['feed_forward'])}",
        arrow=False,
    )
    # The frame's edge is above the words.
    column.residual(title, "LayerNorm(x + sublayer)", GAP + 18)


def encoder(known) -> Column:
    c, shapes = known["config"], known["shapes"]
    column = Column(
        "encoder",
        "Read from below: the sentence is cut into tokens, each becomes a vector with "
        f"its place in it, and passes {c.num_layers} layers of self-attention and "
        "feed-forward; what comes out is the memory. Above it: the sum of the "
        "parameters, and training.",
    )
    column.text(SENTENCE)
    column.arrow()
    column.box(
        "n",
        "09_tokenizer",
        "Tokens",
        known["pieces"],
        f"with </s> at the end; ids: {shape(known['src'])}",
    )
    embedding(column, known, known["src"])

    def layer():
        attention(
            column,
            "e",
            "05_encoder",
            "Self-attention",
            known,
            "Q, K, V: all from the words of the source",
        )
        feed_forward(column, "e", "05_encoder", known)

    column.frame(layer)
    memory = shape(shapes["encoder"])
    parts = known["parts"]
    total = size(parts["encoder"])
    column.box(
        "e",
        "05_encoder",
        f"{c.num_layers} such layers: {total}",
        f"output: the memory {memory},",
        "for every layer of the decoder  →",
        arrow=False,
    )
    column.at["memory"] = column.at[f"{c.num_layers} such layers: {total}"]
    column.y += 26
    column.box(
        "n",
        "03_multihead",
        "Attention, step by step",
        "by hand 01 · in matrices 02 · in heads 03",
        arrow=False,
    )
    column.y += 12
    column.box(
        "n",
        "07_transformer",
        f"The whole model: {size(known['all'])}",
        f"E {size(parts['embeddings'])} + encoder {total}",
        f"+ decoder {size(parts['decoder'])}; the paper says 65 M",
        arrow=False,
    )
    column.y += 12
    column.box(
        "n",
        "12_training",
        "Training: all places at once",
        "data 08 · batches 10 · loss 11 · runs 13",
        f"cross-entropy, smoothed by ε = {known['label_smoothing']}",
        f"Adam, rate min(1/√t, t/√{known['warmup']}³) / √{c.d_model}",
        arrow=False,
    )
    return column


def decoder(known) -> Column:
    c, shapes, parts = known["config"], known["shapes"], known["parts"]
    column = Column(
        "decoder",
        "Read from below: the target words so far become vectors the same way and pass "
        f"{c.num_layers} layers of masked self-attention, attention to the memory and "
        "feed-forward; the embedding's table turns them into logits, softmax into "
        "probabilities, beam search into a sentence, and BLEU into a score.",
    )
    column.text("<s> " + known["said"].rsplit(" ", 1)[0] + " …")
    column.arrow()
    column.box(
        "n",
        "09_tokenizer",
        "Tokens, one place later",
        "place t sees what came before t",
        f"with <s> in front; ids: {shape(known['tgt'])}",
    )
    embedding(column, known, known["tgt"])

    def layer():
        attention(
            column,
            "d",
            "06_decoder",
            "Masked self-attention",
            known,
            "Q, K, V: the target; later words hidden",
        )
        attention(
            column,
            "d",
            "06_decoder",
            "Attention to the memory",
            known,
            "→  Q: the target; K, V: the memory",
        )
        feed_forward(column, "d", "06_decoder", known)

    column.frame(layer)
    total = size(parts["decoder"])
    column.box(
        "d",
        "06_decoder",
        f"{c.num_layers} such layers: {total}",
        f"output: hidden states {shape(shapes['decoder'])}",
    )
    column.box(
        "n",
        "07_transformer",
        "Logits, then probabilities",
        f"p = softmax(x Eᵀ): {shape(shapes['logits'])}",
    )
    column.box(
        "n",
        "14_decoding",
        "Search for the sentence",
        f"beam of {known['beam']}, length penalty α = {known['alpha']}",
        arrow=False,
    )
    column.arrow()
    column.text(known["said"])
    column.arrow()
    column.box(
        "n",
        "15_evaluation",
        f"BLEU {known['bleu']:.1f}",
        "against another right translation:",
        REFERENCE,
        arrow=False,
    )
    return column


def join(left: Column, right: Column) -> None:
    """The line on which the memory goes from the encoder to the decoder."""
    start = -sum(left.at["memory"]) / 2
    end = -sum(right.at["Attention to the memory"]) / 2
    side, inside = (WIDTH + BOX) / 2, (WIDTH - BOX) / 2
    left.parts.append(
        f'<path d="M{side} {start}H{WIDTH + EDGE - 2}V{end}h2" class="l m"/>'
    )
    right.parts.append(
        f'<path d="M{-EDGE} {end}H{inside - 7}" class="l m"/>'
        f'<path d="M{inside} {end}l-8 -5v10z" class="h"/>'
    )


class WholeModel(SphinxDirective):
    """The picture, and room beside it that is seen on paper only."""

    def run(self):
        for name in (
            "transformer",
            "runs",
            "decoding",
            "evaluation",
            "objective",
            "translator",
        ):
            self.env.note_dependency(f"{self.env.srcdir}/transformer_lib/{name}.py")
        self.env.note_dependency(__file__)
        left, right = encoder(facts()), decoder(facts())
        join(left, right)
        height = max(left.y, right.y) + 4
        html = (
            f'<div class="whole-model-sheet">{left.svg(height)}{right.svg(height)}'
            f'<div class="own-notes" aria-hidden="true">Notes{LINES}</div></div>'
        )
        return [nodes.raw("", html, format="html")]


def setup(app):
    app.add_directive("whole-model", WholeModel)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
