"""Sphinx extension: one sentence through the whole model, every number with its sum.

The directive `{through-the-model}` stands where the figure is to be. Its numbers are
PyTorch's: `trace` runs the model that ships with the library on the book's sentence,
keeps what each step gives, and says from what the step made it. book/_static/through.js
shows them, and opens a number as the sum it came from.
"""

from __future__ import annotations

import hashlib
import json
import sys
from functools import cache
from pathlib import Path

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parents[2]
STATIC = ROOT / "book" / "_static"
MODEL = "tatoeba-en-de"
PARTS = ("make.js", "through.js", "through.css", "translator_engine.js")


# --- what the model computes ----------------------------------------------------------


class Trace:
    """Numbers of each step, by name, and how each was made.

    Args:
        model: A Transformer with the paper's post-norm.
        src_ids: Shape (1, S).
        tgt_ids: Shape (1, T), beginning with the start symbol.

    Raises:
        ValueError: If the model has pre-norm, another activation, or a bias at the
            output.
    """

    def __init__(self, model, src_ids, tgt_ids):
        import torch

        config = model.config
        if config.norm_first:
            raise ValueError("the figure goes through the paper's post-norm alone.")
        if config.activation != "relu" or config.output_bias:
            raise ValueError(
                f"activation={config.activation!r}, output_bias={config.output_bias}: "
                "the figure's sums are those of ReLU, without a bias at the output."
            )
        self.model, self.numbers, self.steps, self.seen = model, {}, [], {}
        hooks = [
            module.register_forward_hook(self._note(name))
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear | torch.nn.LayerNorm)
        ]
        with torch.inference_mode():
            self.logits = model(src_ids, tgt_ids)[0]  # (T, V)
        for hook in hooks:
            hook.remove()
        self._bottom("encoder", "English in", "source", src_ids[0], "src")
        memory = self._layers("encoder", "source", "encoder.in")
        self._bottom("decoder", "German in", "target", tgt_ids[0], "tgt")
        hidden = self._layers("decoder", "target", "decoder.in", memory)
        self._top(hidden)

    def _note(self, name):
        def hook(module, given, out):
            self.seen[name] = given[0][0], out[0]

        return hook

    def _step(self, name, numbers, title, kind, **how):
        self.numbers[name] = numbers
        self.steps.append({"name": name, "title": title, "kind": kind, **how})
        return name

    def _bottom(self, side, part, rows, ids, short):
        """From ids to what the first layer reads."""
        table = f"{short}_embedding.weight"
        embedded = self.model.get_submodule(f"{short}_embedding").weight[ids]
        root = self.model.config.d_model**0.5
        places = self.model.get_submodule(f"{short}_positions")(len(ids))
        self.numbers[f"{side}.positions"] = places  # (T, D)
        self._step(
            f"{side}.in",
            root * embedded + places,
            "word + position",
            "embed",
            part=part,
            rows=rows,
            table=table,
            scale=root,
            positions=f"{side}.positions",
        )

    def _linear(self, way, title, x, part, rows, **how):
        module = self.model.get_submodule(way)
        bias = f"{way}.bias" if module.bias is not None else None
        _, out = self.seen[way]
        out = out.clamp(min=0) if how.get("relu") else out
        return self._step(
            way,
            out,
            title,
            "linear",
            part=part,
            rows=rows,
            x=x,
            weight=f"{way}.weight",
            bias=bias,
            **how,
        )

    def _attention(self, way, part, rows, x, keys, of, causal=False):
        """Queries, keys, values, scores, weights, averages, and all heads mixed."""
        module = self.model.get_submodule(way)
        heads, where = module.num_heads, {"part": part, "rows": rows}
        kind = "source " if keys != x else ""
        there = {"part": part, "rows": of}
        q = self._linear(f"{way}.w_q", f"{kind}queries", x, heads=heads, **where)
        k = self._linear(f"{way}.w_k", f"{kind}keys", keys, heads=heads, **there)
        v = self._linear(f"{way}.w_v", f"{kind}values", keys, heads=heads, **there)
        asked, offered = (
            self.numbers[name].unflatten(-1, (heads, -1)).transpose(0, 1)
            for name in (q, k)
        )  # (H, T, K), (H, S, K)
        scores = asked @ offered.mT / asked.shape[-1] ** 0.5  # (H, T, S)
        if causal:
            later = scores.new_ones(scores.shape).triu(1).bool()
            scores = scores.masked_fill(later, -1e9)
        share = {**where, "columns": of, "causal": causal, "heads": heads}
        s = self._step(
            f"{way}.scores", scores, f"{kind}scores", "score", q=q, k=k, **share
        )
        w = self._step(
            f"{way}.weights",
            scores.softmax(-1),
            f"{kind}weights",
            "softmax",
            x=s,
            **share,
        )
        z = self._step(
            f"{way}.blend",
            self.seen[f"{way}.w_o"][0],
            f"{kind}average",
            "blend",
            weights=w,
            v=v,
            causal=causal,
            heads=heads,
            **where,
        )
        return self._linear(f"{way}.w_o", f"{kind}heads mixed", z, **where)

    def _residual(self, way, what, part, rows, x, added):
        norm = self.model.get_submodule(f"{way}.norm")
        total, out = self.seen[f"{way}.norm"]
        s = self._step(
            f"{way}.sum",
            total,
            f"{what} added",
            "add",
            part=part,
            rows=rows,
            x=x,
            y=added,
        )
        mean = total.mean(-1, keepdim=True)
        spread = ((total - mean).square().mean(-1, keepdim=True) + norm.eps).sqrt()
        self.numbers |= {f"{way}.mean": mean, f"{way}.spread": spread}
        return self._step(
            f"{way}.norm",
            out,
            f"{what} normalized",
            "norm",
            part=part,
            rows=rows,
            x=s,
            mean=f"{way}.mean",
            spread=f"{way}.spread",
            eps=norm.eps,
            weight=f"{way}.norm.weight",
            bias=f"{way}.norm.bias",
        )

    def _layers(self, side, rows, x, memory=None):
        """All layers of a stack, from what its first layer reads, by name."""
        for i in range(len(self.model.get_submodule(side).layers)):
            way = f"{side}.layers.{i}"
            where = {"part": f"{side.capitalize()} layer {i + 1}", "rows": rows}
            found = self._attention(
                f"{way}.self_attention",
                x=x,
                keys=x,
                of=rows,
                causal=memory is not None,
                **where,
            )
            x = self._residual(
                f"{way}.residual_1", "attention", x=x, added=found, **where
            )
            if memory:
                found = self._attention(
                    f"{way}.cross_attention", x=x, keys=memory, of="source", **where
                )
                x = self._residual(
                    f"{way}.residual_2", "source", x=x, added=found, **where
                )
            network, last = f"{way}.feed_forward", 3 if memory else 2
            hidden = self._linear(
                f"{network}.w_1", "hidden units", x, relu=True, **where
            )
            found = self._linear(f"{network}.w_2", "feed-forward", hidden, **where)
            x = self._residual(
                f"{way}.residual_{last}", "feed-forward", x=x, added=found, **where
            )
        return x

    def _top(self, hidden):
        where = {"part": "German out", "rows": "target", "columns": "vocabulary"}
        weight = "output.weight"
        self._step(
            "logits",
            self.logits,
            "logits",
            "linear",
            x=hidden,
            bias=None,
            weight=weight,
            **where,
        )
        self._step(
            "probabilities",
            self.logits.softmax(-1),
            "next token",
            "softmax",
            x="logits",
            causal=False,
            **where,
        )


# --- as files -------------------------------------------------------------------------


def write_trace(trace: Trace, about: dict, folder: Path) -> None:
    """Write through.json and through.bin: the numbers, and the learned tables.

    Args:
        trace: Of a sentence.
        about: Pieces of both sides, the vocabulary.
        folder: Where to.
    """
    import torch

    block, numbers, tables, places = bytearray(), {}, {}, {}

    def put(tensor) -> int:
        block.extend(bytes(-len(block) % 4))
        at = len(block)
        block.extend(tensor.contiguous().numpy().tobytes())
        return at

    for name, tensor in trace.numbers.items():
        tensor = tensor.detach().float()
        numbers[name] = {"at": put(tensor), "shape": list(tensor.shape)}
    keys = "weight", "bias", "table"
    asked = {step.get(key) for step in trace.steps for key in keys}
    state = trace.model.state_dict()
    for name in sorted(filter(None, asked)):
        table = state[name].detach()
        if table.data_ptr() not in places:  # a tied table is stored once
            half = table.half()
            exact = half.float().equal(table)
            stored, kind = (half, "f2") if exact else (table.float(), "f4")
            places[table.data_ptr()] = {"at": put(stored), "type": kind}
        tables[name] = {**places[table.data_ptr()], "shape": list(table.shape)}
    content = bytes(block)
    told = {
        **about,
        "numbers": numbers,
        "tables": tables,
        "steps": trace.steps,
        "file": {
            "size": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        },
    }
    assert torch.isfinite(trace.logits).all()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "through.bin").write_bytes(content)
    text = json.dumps(told, ensure_ascii=False, separators=(",", ":"))
    (folder / "through.json").write_text(text, encoding="utf-8")


@cache  # asked for by the files and by the still picture
def sentence_trace(name: str = MODEL):
    """The book's sentence through the model that ships: a Trace, and its pieces."""
    import torch

    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from transformer_lib.figures.hello import pieces_of, read_sentence
    from transformer_lib.runs import load_pretrained

    record = read_sentence()
    model, tokenizer, _ = load_pretrained(name, "cpu")
    ids = [torch.tensor([record[side]["ids"]]) for side in ("source", "target")]
    vocabulary = tokenizer.processor.get_piece_size()
    asks = record["candidates"][record["source"]["text"]]["relations"][-1][0]
    about = {
        "source": pieces_of(record["source"]),
        "target": pieces_of(record["target"]),
        "ids": {side: record[side]["ids"] for side in ("source", "target")},
        "text": {side: record[side]["text"] for side in ("source", "target")},
        "vocabulary": [tokenizer.processor.id_to_piece(i) for i in range(vocabulary)],
        "start": {"source": pieces_of(record["source"]).index(asks), "target": 0},
        "head": record["head"]["head"] - 1,
    }
    return Trace(model.eval(), *ids), about


# --- in the book ----------------------------------------------------------------------


def make_ready(app):
    """Write the numbers where the page finds them."""
    app.config.through_page = {}
    if app.builder.format != "html":
        return
    web = Path(app.srcdir) / "_build" / "web" / "through"
    shipped = sorted((ROOT / "transformer_lib" / "pretrained" / MODEL).iterdir())
    record = ROOT / "transformer_lib" / "evidence" / "sentence.json"
    parts = [*shipped, record, Path(__file__), *(STATIC / name for name in PARTS)]
    content = b"".join(path.read_bytes() for path in parts)
    version = hashlib.sha256(content).hexdigest()[:12]
    folder, note = web / "through-the-model", web.with_name("through-version.txt")
    if not (folder.exists() and note.exists() and note.read_text("utf-8") == version):
        write_trace(*sentence_trace(), folder)
        note.write_text(version, encoding="utf-8")
    if str(web) not in app.config.html_static_path:
        app.config.html_static_path.append(str(web))
    megabytes = round(sum(path.stat().st_size for path in folder.iterdir()) / 1e6)
    app.config.through_page = {"version": version, "megabytes": megabytes}


def poster() -> str:
    """The still picture, for where no scripts run and until they do."""
    from transformer_lib.figures.frame import still_image
    from transformer_lib.figures.transformer import plot_through

    trace, about = sentence_trace()
    row = about["start"]["source"]
    names = [s["name"] for s in trace.steps if s["kind"] in ("embed", "norm")]
    names = [name for name in names if name.startswith("encoder")]
    vectors = [trace.numbers[name][row].tolist() for name in names]
    word = about["source"][row]
    return still_image(
        lambda narrow: plot_through(vectors, word, narrow),
        f"The numbers of “{word}” as colored strips, one above the other, from "
        "the sum of word and position through every sublayer of the encoder.",
    )


class Through(SphinxDirective):
    """The place of the figure, with its poster."""

    def run(self):
        self.env.through_pages = getattr(self.env, "through_pages", {})
        state = self.config.through_page
        self.env.through_pages[self.env.docname] = state
        data = "".join(f' data-{name}="{value}"' for name, value in state.items())
        words = (
            "Here you can open every number, if JavaScript is on and a server sends "
            "the page (make serve starts one)."
        )
        html = f'<div class="through"{data}>{poster()}<p>{words}</p></div>'
        return [nodes.raw("", html, format="html")]


def outdated(app, env, added, changed, removed):
    """Pages that were built with another model, or with older scripts."""
    pages, now = getattr(env, "through_pages", {}), app.config.through_page
    return [
        name for name, state in pages.items() if name in env.found_docs and state != now
    ]


def add_script(app, pagename, templatename, context, doctree):
    """The page of the figure alone loads its script and its styles."""
    if pagename in getattr(app.env, "through_pages", {}):
        app.add_css_file("through.css")
        if app.config.through_page:
            app.add_js_file("through.js", type="module")


def setup(app):
    app.add_config_value("through_page", {}, "")
    app.add_directive("through-the-model", Through)
    app.connect("builder-inited", make_ready)
    app.connect("env-get-outdated", outdated)
    app.connect("html-page-context", add_script)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
