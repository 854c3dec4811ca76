"""Chapter 26: treebanks read and written, EVALB's own results, repair, parsers."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from figures import check_figure, said, shown
from hypothesis import given, settings
from made_trees import TREES, WSJ_FILE, first_trees, tree

from transformer_lib.exercises.parsing import check_close, check_f1, check_spans
from transformer_lib.figures.parsing import writing_figure
from transformer_lib.parsing import (
    BracketScore,
    Tree,
    TreeError,
    clean_tree,
    evaluate_parser,
    linearize,
    load_trees,
    parse,
    read_trees,
    repair,
    train_parser,
    train_tree_tokenizer,
)
from transformer_lib.parsing import parser as parsing
from transformer_lib.parsing.parser import prepare_trees
from transformer_lib.parsing.tree_tokens import (
    brackets_of_slots,
    chunks_of,
    form_of,
    tree_pair,
)
from transformer_lib.parsing.trees import DEEPEST, fault_of
from transformer_lib.runs import Recipe
from transformer_lib.tokenizer import UNK
from transformer_lib.transformer import Transformer, TransformerConfig

SOME = settings(max_examples=60, deadline=None)


def test_trees_over_many_lines_and_comments():
    text = "*x*x*x*\n; a comment (\n# and another\n%% third\n" + WSJ_FILE
    one, two = read_trees(text.splitlines())
    assert one.words == "Mr. Vinken is chairman of Elsevier N.V. .".split()
    assert str(clean_tree(two)) == (
        "(TOP (S (NP (PRP It)) (VP (VBZ seems)) (. .)))"
    )  # SBAR and S held traces alone


@pytest.mark.parametrize(
    "text, telling",
    [
        (
            "(S (NN a))\n(S (NN b)",
            "some.mrg, line 2: the tree that begins here is never",
        ),
        ("(S (NN a)))", "some.mrg, line 1: ')' stands outside"),
        ("(S (NN a))\nstray (S (NN b))", "some.mrg, line 2: 'stray' stands outside"),
        ("(S\n (NP ))", "some.mrg, line 2: the bracket (NP) holds nothing"),
        ("(S ((NN a)))", "some.mrg, line 1: a bracket inside a tree has no label"),
        ("(S\n(NP (NN a) b))", "some.mrg, line 2: 'b' stands beside brackets"),
        ("()", "some.mrg, line 1: the bracket () holds nothing"),
        ("(A " * (DEEPEST + 2), "brackets are open"),
    ],
)
def test_damage_is_named(text, telling):
    with pytest.raises(TreeError) as error:
        list(read_trees(text.split("\n"), "some.mrg"))
    assert telling in str(error.value)


@given(TREES)
@SOME
def test_written_trees_are_read_back(made):
    assert list(read_trees([str(made)])) == [made]
    assert list(read_trees([f"( {part} )" for part in made.children])) == [
        Tree("", (part,)) for part in made.children
    ]


# --- sequences ------------------------------------------------------------------------


def test_sequence_of_the_figure():
    """The example of Vinyals et al. 2014, figure 2: "John has a dog ."."""
    text = "(S (NP (NNP John)) (VP (VBZ has) (NP (DT a) (NN dog))) (. .))"
    wanted = "(S (NP XX )NP (VP XX (NP XX XX )NP )VP XX )S"
    assert " ".join(linearize(clean_tree(tree(text)))) == wanted
    assert chunks_of(wanted.split()) == [
        "(S_(NP_XX_)NP",
        "(VP_XX",
        "(NP_XX",
        "XX_)NP_)VP",
        "XX_)S",
    ]


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_the_figure_writes_it_word_by_word(browser, tmp_path, motion):
    text = "(S (NP (NNP John)) (VP (VBZ has) (NP (DT a) (NN dog))) (. .))"
    clean = clean_tree(tree(text))
    one = parsing.Parse(Tree("TOP", (clean,)), linearize(clean), "")
    figure = writing_figure({"a dog": one, "again": one})
    if motion == "reduce":
        check_figure(browser, tmp_path, figure)
    wanted = ["(S (NP XX )NP", "(VP XX", "(NP XX", "XX )NP )VP", "XX )S"]
    unfinished = ["", "S", "S VP", "S VP NP", "S", ""]  # brackets after each word
    how = {"width": 390, "reduced_motion": motion}
    with shown(browser, tmp_path, figure, **how) as page:
        slider = page.get_by_role("slider")
        slider.press("Home")
        for n in range(len(wanted) + 1):
            written = page.locator(".written span").all_text_contents()
            assert [chunk for chunk in written if chunk] == wanted[:n]
            is_open = page.locator(".writing .open text").all_text_contents()
            assert is_open == (["TOP", *unfinished[n].split()] if unfinished[n] else [])
            slider.press("ArrowRight")
        assert said(page).startswith("The tree is complete.")
        page.get_by_role("button", name="play").click()  # from the beginning
        page.wait_for_function("document.querySelector('input').value == '2'")
        running = page.evaluate("document.getAnimations().length")
        assert running == 0 or motion != "reduce"
        page.get_by_role("button", name="pause").click()


@given(TREES)
@SOME
def test_sequences_come_back(made):
    clean, leaves = clean_tree(made), list(made.leaves())
    tokens = linearize(clean)
    assert clean == made and fault_of(tokens, len(leaves)) == ""
    assert repair(tokens, leaves) == made
    pieces = chunks_of(tokens)
    assert len(pieces) == len(leaves)
    assert " ".join(pieces).replace("_", " ").split(" ") == tokens


# --- parsers --------------------------------------------------------------------------


@pytest.fixture
def few_trees(monkeypatch):
    monkeypatch.setattr(parsing, "load_trees", first_trees)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parsing, "load_trees", first_trees)
        return folder, prepare_trees("toy", folder, 400, 60, "chunks", threads=1)


@pytest.mark.usefixtures("few_trees")
def test_prepared_targets_come_back(prepared):
    folder, ready = prepared
    lines = (folder / "valid.tsv").read_text(encoding="utf-8").splitlines()
    trees = load_trees("toy", "valid").trees
    assert form_of(ready.tokenizer) == "chunks" and len(lines) == len(trees) == 150
    for line, one in zip(lines, trees, strict=True):
        target = line.split("\t")[1]
        ids = ready.tokenizer.encode(target)
        assert len(ids) == len(one.words) == len(line.split("\t")[0].split(" "))
        assert ready.tokenizer.decode(ids) == target
        assert repair(target.replace("_", " ").split(" "), list(one.leaves())) == one
    again = prepare_trees("toy", folder, 400, 60, "chunks", threads=1)
    assert again.data == ready.data


@pytest.mark.usefixtures("few_trees")
def test_prepared_slots_stand_side_by_side(tmp_path):
    ready = prepare_trees("toy", tmp_path, 600, 60, "slots", copies=3, threads=1)
    tokenizer, trees = ready.tokenizer, first_trees("toy").trees
    assert form_of(tokenizer) == "slots" and len(ready.train) == 3 * len(trees)
    lines = (tmp_path / "train.tsv").read_text(encoding="utf-8").splitlines()
    cut = 0
    for number in range(0, len(lines), 3):
        source, target = lines[number].split("\t")
        one = trees[number % len(trees)]
        ids = tokenizer.encode_all([source, target])
        assert [len(side) for side in ids] == [2 * len(one.words)] * 2
        assert (
            repair(
                brackets_of_slots(tokenizer.decode(ids[1]).split()), list(one.leaves())
            )
            == one
        )
        cut += source != tree_pair(one, tokenizer)[0]
        assert number >= len(trees) or not cut  # the first copy is whole
    assert cut
    for row in range(0, len(ready.train), 199):
        source, target = ready.train[row]
        assert len(source) == len(target) and UNK not in {*source, *target}
    again = prepare_trees("toy", tmp_path, 600, 60, "slots", copies=3, threads=1)
    assert again.data == ready.data
    with pytest.raises(ValueError, match="vocab_size=300: .* are needed"):
        prepare_trees("toy", tmp_path / "a", 300, 60, "slots")
    with pytest.raises(ValueError, match="only slots"):
        prepare_trees("toy", tmp_path / "b", 400, 60, "chunks", copies=2)


@pytest.mark.parametrize("beam_size", [1, 3])
def test_slots_of_an_untrained_parser_are_trees(beam_size):
    """The search finds a tree for each sentence, and counts probability among trees."""
    trees = load_trees("toy", "test").trees[:12]
    bank = first_trees("toy").trees
    tokenizer = train_tree_tokenizer(bank, 600, "slots")
    torch.manual_seed(1)
    model = Transformer(TransformerConfig(tokenizer.vocab_size, 16, 2, 1, 32))
    parses = parse(trees, model, tokenizer, beam_size)
    assert {p.fault for p in parses} == {""}
    for one, found in zip(trees, parses, strict=True):
        assert found.tree.words == one.words
        assert found.tokens == linearize(found.tree)
    source = tokenizer.encode(tree_pair(trees[0], tokenizer)[0])
    src_ids = torch.tensor([[*source, 3]])
    ((best, *_),) = parsing.slot_search(
        model, src_ids, tokenizer, [len(trees[0].words)], beam_size
    )
    assert len(best.ids) == len(source) and -1000 < best.log_prob < 0
    assert [parse([t], model, tokenizer, beam_size)[0] for t in trees] == parses


@pytest.fixture
def tiny_recipe(tmp_path):
    """The file of a recipe of a tiny parser."""
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(
        'name = "tiny"\ncorpus = "toy+slots"\nvocab_size = 600\ncopies = 2\n'
        "max_length = 40\nmax_tokens = 400\nmax_steps = 8\nwarmup = 4\n"
        "validate_every = 4\nkeep_last = 2\n[model]\nd_model = 16\nnum_heads = 2\n"
        "num_layers = 1\nd_ff = 32\n"
    )
    return recipe


@pytest.mark.usefixtures("few_trees")
def test_the_tool_that_trains_scores_and_records(tmp_path, tiny_recipe, monkeypatch):
    """A tiny parser in two pieces: choices on development trees, test trees once."""
    import parsing as tool

    out = tmp_path / "record.json"
    command = [
        "parsing.py",
        str(tmp_path / "run"),
        "--recipe",
        str(tiny_recipe),
        "--out",
        str(out),
        "--every",
        "40",
        "--some",
        "30",
        "--beams",
        "1",
        "2",
        "--beam",
        "2",
        "--device",
        "cpu",
    ]
    monkeypatch.setattr(sys, "argv", command)
    tool.main()
    record = json.loads(out.read_text("utf-8"))
    assert record["finished"] and record["updates"] == 8
    assert record["recipe"]["copies"] == 2 and record["seed"] == 0
    assert [p["updates"] for p in record["curve"]][-1] == 8
    assert record["tokens"] == record["history"][-1]["tokens"]
    trees = load_trees("toy", "test").trees[::40]
    assert record["test"]["sha256"] == load_trees("toy", "test").sha256
    assert len(record["counts"]) == len(trees) == record["scores"]["all"]["sentences"]
    matched, gold, parsed = map(sum, zip(*record["counts"], strict=True))
    assert record["f1"] == pytest.approx(200 * matched / (gold + parsed))
    words = sum(2 * len(t.words) + 1 for t in first_trees("toy").trees)
    assert record["passes"] == pytest.approx(record["tokens"] / words)
    assert (tmp_path / "averaged" / "weights.safetensors").exists()
    tool.main()
    again = json.loads(out.read_text("utf-8"))
    for one in (record, again):
        for scores in [one["search"], *one["beams"].values()]:
            del scores["seconds"]
    assert again == record


@pytest.mark.usefixtures("few_trees")
def test_the_places_of_a_parser_are_measured_on_its_way(tmp_path, tiny_recipe):
    """A record with as many points as weights were kept; made again, it is the same."""
    import parser_places

    run, out = tmp_path / "run", tmp_path / "record.json"
    arguments = [
        str(tiny_recipe),
        "--run-dir",
        str(run),
        "--out",
        str(out),
        "--device",
        "cpu",
        "--steps",
        "16",
    ]
    parser_places.main(arguments)
    record = json.loads(out.read_text("utf-8"))
    assert [point["updates"] for point in record["curve"]] == list(range(2, 17, 2))
    assert all(len(point["cosines"]) == 2 for point in record["curve"])
    last = train_parser(
        Recipe.load(tiny_recipe, max_steps=16, keep_last=8, validate_every=2),
        run,
        show=False,
    )
    losses = [round(row["valid_loss"], 4) for row in last.history]
    few = record["development"]["pairs"]
    assert few == last.data["valid_pairs"] < parser_places.SENTENCES
    assert [p["loss"] for p in record["curve"]] == pytest.approx(losses, abs=2e-4)
    parser_places.main(arguments)
    assert json.loads(out.read_text("utf-8")) == record
    assert str(tmp_path / "run") not in json.dumps(record)


@pytest.mark.usefixtures("few_trees")
def test_more_trees(tmp_path):
    path = tmp_path / "more.mrg"
    path.write_text(WSJ_FILE)
    ready = prepare_trees("toy", tmp_path / "a", 390, 60, more=[path], threads=1)
    assert ready.data["train"]["read"] == 702 and form_of(ready.tokenizer) == ""
    path.write_text("(S")
    with pytest.raises(TreeError, match=r"more\.mrg, line 1"):
        prepare_trees("toy", tmp_path / "b", 430, 60, more=[path])
    with pytest.raises(ValueError, match="vocab_size=9"):
        prepare_trees("toy", tmp_path / "c", 9, 60)


def test_an_untrained_parser_gives_trees(prepared):
    torch.manual_seed(0)
    tokenizer = prepared[1].tokenizer
    model = Transformer(TransformerConfig(tokenizer.vocab_size, 16, 2, 1, 32))
    trees = load_trees("toy", "test").trees[:12]
    parses = parse(trees, model, tokenizer, beam_size=2, max_extra=5)
    assert [p.tree.words for p in parses] == [t.words for t in trees]
    assert [list(p.tree.leaves()) for p in parses] == [list(t.leaves()) for t in trees]
    one_by_one = [parse([t], model, tokenizer, 2, max_extra=5)[0] for t in trees]
    assert parses == one_by_one
    record = evaluate_parser(model, tokenizer, trees, 25, beam_size=2, max_extra=5)
    assert record["within"]["sentences"] + record["beyond"]["sentences"] == 12
    wanted = sum(
        (BracketScore.of(t, p.tree) for t, p in zip(trees, parses, strict=True)),
        BracketScore(),
    )
    assert record["all"]["f1"] == wanted.f1
    assert sum(record["all"]["faults"].values()) == sum(p.fault != "" for p in parses)
    typed = parse(["She saw it."], model, tokenizer, 1, max_extra=5)[0].tree
    assert typed.words == ["She", "saw", "it", "."]
    with pytest.raises(ValueError, match="sentence 1 has no words"):
        parse(["a", " "], model, tokenizer)
    with pytest.raises(ValueError, match="one string"):
        parse("a b", model, tokenizer)
    for beam_size in (0, 100_000):
        with pytest.raises(ValueError, match=f"beam_size={beam_size}: must be "):
            parse([], model, tokenizer, beam_size)
    with pytest.raises(ValueError, match="no trees"):
        evaluate_parser(model, tokenizer, [])


@pytest.mark.usefixtures("few_trees")
def test_training_and_going_on(tmp_path):
    model = {"d_model": 16, "num_heads": 2, "num_layers": 1, "d_ff": 32}
    recipe = Recipe(
        "tiny",
        "toy+chunks",
        400,
        model,
        max_length=60,
        max_tokens=400,
        max_steps=4,
        warmup=4,
        validate_every=2,
    )
    first = train_parser(recipe, tmp_path / "run", show=False)
    assert form_of(first.tokenizer) == "chunks" and first.progress.step == 4
    longer = dataclasses.replace(recipe, max_steps=6)
    assert train_parser(longer, tmp_path / "run", show=False).progress.step == 6
    other = dataclasses.replace(recipe, corpus="toy+slots", vocab_size=600, copies=2)
    slots = train_parser(other, tmp_path / "slots", show=False)
    assert form_of(slots.tokenizer) == "slots" and slots.recipe.copies == 1
    for corpus in ("tatoeba-en-de", "toy+letters"):
        with pytest.raises(ValueError, match="is no treebank"):
            other = dataclasses.replace(recipe, corpus=corpus)
            train_parser(other, tmp_path / "other", show=False)


def test_recipes_of_section_6_3():
    """Typed from the paper and from Tensor2Tensor; the rest is the base model's."""
    base = Recipe.load("wmt14-en-de-base")
    paper = {"d_model": 1024, "num_layers": 4}
    alone = {"dropout": 0.2, "attention_dropout": 0.2, "tie_embeddings": False}
    for name, vocab_size, warmup, from_t2t in [
        ("wsj-parsing", 16_000, 16_000, alone),
        ("wsj-parsing-semi", 32_000, 4_000, {"dropout": 0.1}),
    ]:
        recipe = Recipe.load(name)
        assert recipe.name == name and recipe.corpus == "wsj"
        assert recipe.vocab_size == vocab_size and recipe.warmup == warmup
        assert recipe.model == base.model | paper | from_t2t
        for setting in ("max_steps", "lr_factor", "label_smoothing"):
            assert getattr(recipe, setting) == getattr(base, setting)
        assert recipe.max_tokens * recipe.accumulate == 25_000
        Transformer(TransformerConfig(100, **recipe.model | {"num_layers": 1}))
    assert parsing.PAPER_SEARCH == {"beam_size": 21, "alpha": 0.3, "max_extra": 300}
    assert Recipe.load("craft-parsing").corpus == "craft+chunks"


def test_chapter_26_tells_of_the_long_runs_once_they_are_there():
    """Its prose on CRAFT is of the record it reads: a new one asks for new prose."""
    root = Path(__file__).resolve().parents[1]
    kept = root / "transformer_lib" / "evidence" / "results"
    text = (root / "notebooks" / "26_parsing.ipynb").read_text("utf-8")
    for name in (
        "parser/craft-medium",
        "parser/craft-pre-norm",
        "parser/craft-large",
        "parser-reference/craft-labels",
    ):
        if (kept / f"{name}.json").exists():
            assert f"results/{name}" in text, f"chapter 26 does not read {name} yet"
            assert "still the small one" not in text


def test_table_4_is_the_papers():
    """Typed from the paper once more, by what the parsers were trained on."""
    wanted = {
        "WSJ only": [88.3, 90.4, 90.4, 91.7, 91.3],
        "semi-supervised": [91.3, 91.3, 92.1, 92.1, 92.7],
        "multi-task": [93.0],
        "generative": [93.3],
    }
    for kind, scores in wanted.items():
        assert [f1 for _, k, f1 in parsing.TABLE_4 if k == kind] == scores
    ours = [row[1:] for row in parsing.TABLE_4 if row[0] == "Transformer, 4 layers"]
    assert ours == [("WSJ only", 91.3), ("semi-supervised", 92.7)]
    assert len(parsing.TABLE_4) == 12


# --- exercises ------------------------------------------------------------------------


def spans(shift=0, last=0, order=None):
    def answer(tokens):
        stack, words, found = [], 0, []
        for token in tokens:
            if token == "XX":
                words += 1
            elif token[0] == "(":
                stack.append((token[1:], words + shift))
            else:
                found.append((*stack.pop(), words + shift + last))
        return sorted(found, key=order) if order else found

    return answer


def f1_of(count):
    def answer(gold, parsed):
        matched = count(gold, parsed)
        return 200 * matched / (len(gold) + len(parsed))

    return answer


def by_sets(gold, parsed):
    gold, parsed = set(gold), set(parsed)
    return 200 * len(gold & parsed) / (len(gold) + len(parsed))


def shared(gold, parsed):
    return len(set(gold) & set(parsed))


def closing(change, reverse=True):
    def answer(tokens):
        stack = []
        for token in tokens:
            if token[0] == "(":
                stack.append(token[1:])
            elif token[0] == ")":
                stack.pop()
        return tokens + [change(x) for x in (reversed(stack) if reverse else stack)]

    return answer


def never_popped(tokens):
    return tokens + [f"){t[1:]}" for t in reversed(tokens) if t[0] == "("]


@pytest.mark.parametrize(
    "check, wrong, telling",
    [
        (check_spans, spans(last=-1), "last words"),
        (check_spans, spans(shift=1), "count from 0"),
        (check_spans, spans(order=lambda s: (s[1], -s[2])), "closing brackets"),
        (check_spans, lambda tokens: [("S", 0, 0)], "is empty"),
        (check_spans, lambda tokens: [], "it is"),
        (check_f1, lambda g, p: shared(g, p) * 2 / (len(g) + len(p)), "percent"),
        (check_f1, lambda g, p: 50 * shared(g, p) * (1 / len(g) + 1 / len(p)), "plain"),
        (check_f1, lambda g, p: 100 * shared(g, p) / len(p), "precision"),
        (check_f1, lambda g, p: 100 * shared(g, p) / len(g), "recall"),
        (check_f1, by_sets, "Sets forget"),
        (check_f1, f1_of(lambda g, p: shared(g, p) + 1), "partner"),
        (check_close, closing(lambda x: f"){x}", reverse=False), "outermost"),
        (check_close, closing(lambda x: ")"), "no labels"),
        (check_close, never_popped, "pop"),
        (check_close, lambda tokens: tokens, "pop"),
        (check_close, lambda tokens: [*tokens, ")NP"], "It ends with"),
    ],
)
def test_mistakes_are_named(check, wrong, telling):
    verdict = check(wrong)
    assert not verdict.passed
    assert telling in verdict.message
