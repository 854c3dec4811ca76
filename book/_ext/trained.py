"""Sphinx extension: the book's sentence inside the trained model, for pages of text.

The directive `{trained-attention}` shows the figure that begins chapter 01: what each
word of a sentence looks at, in every layer and head of the model that ships.
"""

from __future__ import annotations

from pathlib import Path

from docutils import nodes
from sphinx.util.docutils import SphinxDirective


class TrainedAttention(SphinxDirective):
    """The place of the figure."""

    def run(self):
        from transformer_lib.figures import hello

        record = Path(hello.__file__).parents[1] / "evidence" / "sentence.json"
        for path in (hello.__file__, record):
            self.env.note_dependency(str(path))
        page = hello.attention_figure().page
        return [nodes.raw("", page, format="html")]


def setup(app):
    app.add_directive("trained-attention", TrainedAttention)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
