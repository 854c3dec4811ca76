"""Chapter 26: the parser that gives each word a label."""

import itertools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_trees import TREES, first_trees, tree

from transformer_lib.batches import make_batch
from transformer_lib.parsing import (
    Tree,
    clean_tree,
    labelling,
    linearize,
    load_trees,
    train_tree_tokenizer,
)
from transformer_lib.parsing.labelling import tree_labels, tree_of_labels
from transformer_lib.parsing.trees import fault_of

SOME = settings(max_examples=60, deadline=None)


@given(TREES)
@SOME
def test_labels_come_back(made):
    leaves = list(made.leaves())
    labels = tree_labels(made)
    assert len(labels) == len(leaves)
    assert tree_of_labels(labels, leaves) == made


NAMES = st.sampled_from(["", "S", "NP", "S VP"])


@given(st.lists(st.tuples(st.integers(-9, 9), NAMES, NAMES), min_size=1, max_size=40))
@SOME
def test_any_labels_give_a_tree(labels):
    leaves = [Tree("NN", word=f"w{i}") for i in range(len(labels))]
    made = tree_of_labels(labels, leaves)
    assert list(made.leaves()) == leaves
    assert fault_of(linearize(made), len(leaves)) == ""


def test_labels_of_the_papers_kind():
    """Common ancestors counted from the tree, word by word, not by our walk."""
    one = clean_tree(
        tree(
            "(S (NP (DT The) (NN dog)) (VP (VBD ate) (NP (NP (DT a) "
            "(NN bone)) (PP (IN of) (NP (NN it))))) (. .))"
        )
    )

    def above(node, index, path=()):
        """The constituents over a word that have several children, outermost first."""
        for child in node.children:
            size = len(child.words)
            if index < size:
                if child.word is not None:
                    return path
                joined = path if len(child.children) == 1 else (*path, child)
                return above(child, index, joined)
            index -= size

    paths = [above(one, i) for i in range(len(one.words))]
    common = [
        [a for a, b in zip(*pair, strict=False) if a is b]
        for pair in itertools.pairwise(paths)
    ]
    counts = [0, *map(len, common)]
    wanted = [after - before for before, after in itertools.pairwise(counts)]
    labels = tree_labels(one)
    assert [step for step, _, _ in labels] == [*wanted, 0]
    assert [name for _, name, _ in labels] == [*(c[-1].label for c in common), ""]
    assert [alone for _, _, alone in labels] == ["", "", "", "", "", "", "NP", ""]


def test_the_labeller_reads_every_word(tmp_path):
    trees = load_trees("toy").trees
    tokenizer = train_tree_tokenizer(trees, 600, "slots")
    task = labelling.LabelTask(trees[:200], tokenizer)
    pairs = task.pairs(0, 60)
    assert len(pairs) == 200 and task.pairs(0, 20).src_lengths.max() <= 21
    torch.manual_seed(0)
    sizes = [len(kind) for kind in task.kinds]
    model = labelling.Labeller(
        tokenizer.vocab_size, sizes, 16, num_layers=1, num_heads=2, d_ff=32
    )
    batch = make_batch(pairs, [0, 1, 2])
    loss = task.loss(model.eval(), batch, 0.0)
    by_hand, words = 0.0, 0
    for row in range(3):  # each sentence alone, each kind from tree_labels itself
        ids, _ = pairs[row]
        logits = model(torch.tensor([[*ids.tolist(), 3]]))
        labels = tree_labels(trees[row])
        words += len(labels)
        for i, one in enumerate(labels):
            for kind, label in enumerate(one):
                log_p = logits[kind][0, i].log_softmax(dim=-1)
                by_hand -= log_p[task.kinds[kind].index(label)].item()
    assert loss.item() == pytest.approx(by_hand / words, rel=1e-5)
    parses = task.parse(trees[:40], model)
    assert [p.tree.words for p in parses] == [t.words for t in trees[:40]]
    few = task.parse(trees[:40], model, max_tokens=1)
    assert few == parses


def test_the_tool_of_the_reference_goes_on(tmp_path, monkeypatch):
    """Stopped and gone on with, the same record; the score from its counts."""
    import labelling as tool

    monkeypatch.setattr(tool, "load_trees", first_trees)
    recipe = tmp_path / "tiny.toml"
    text = (
        'name = "tiny"\ncorpus = "toy+slots"\nvocab_size = 600\nmax_length = 40\n'
        "max_tokens = 400\nmax_steps = {}\nwarmup = 10\nvalidate_every = 3\n"
        "keep_last = 2\n[model]\nd_model = 16\nnum_heads = 2\nnum_layers = 1\n"
        "d_ff = 32\n"
    )

    def record(run, steps):
        recipe.write_text(text.format(steps))
        out = tmp_path / f"{run}.json"
        tool.main(
            [
                str(tmp_path / run),
                "--recipe",
                str(recipe),
                "--out",
                str(out),
                "--every",
                "20",
                "--some",
                "30",
                "--device",
                "cpu",
            ]
        )
        found = json.loads(out.read_text("utf-8"))
        del found["seconds"], found["environment"]["date"]
        for one in (found["scores"]["all"], found["development"], *found["history"]):
            del one["seconds"]
        return found

    record("stopped", 3)
    again, whole = record("stopped", 6), record("whole", 6)
    assert again == whole and whole["updates"] == 6
    matched, gold, parsed = map(sum, zip(*whole["counts"], strict=True))
    assert whole["f1"] == pytest.approx(200 * matched / (gold + parsed))
