"""Chapter 13: recipes, and what is refused of them."""

import json
import math
from dataclasses import asdict, fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_lib.runs import Recipe
from transformer_lib.transformer import Transformer, TransformerConfig


def test_recipes(tmp_path):
    for name in ("grammar", "tatoeba-en-de", "tatoeba-en-de-short"):
        recipe = Recipe.load(name)
        assert recipe.name == name
        Transformer(TransformerConfig(recipe.vocab_size, **recipe.model))
        assert json.loads(json.dumps(asdict(recipe))) == asdict(recipe)
    with pytest.raises(ValueError, match="no recipe 'grammer'.*'grammar'"):
        Recipe.load("grammer")
    mine = tmp_path / "mine.toml"
    mine.write_text('name = "mine"\ncorpus = "x"\nvocab_size = 9\nstepz = 3\n')
    with pytest.raises(ValueError, match=r"mine.toml has unknown settings \['stepz'\]"):
        Recipe.load(mine)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"vocab_size": "many"}, "vocab_size='many': must be a whole number"),
        ({"vocab_size": 10**30}, "vocab_size="),
        ({"max_steps": 0}, "max_steps=0: must be a whole number, at least 1"),
        ({"max_steps": True}, "max_steps=True"),
        ({"lr_factor": math.nan}, "lr_factor=nan: must be a number above 0"),
        ({"label_smoothing": 1.0}, "label_smoothing=1.0: .*below 1"),
        ({"clip": -1}, "clip=-1"),
        ({"initial_std": -0.02}, "initial_std=-0.02: must be a number, 0 or more"),
        ({"cooldown": -1}, "cooldown=-1: must be a whole number"),
        ({"renamed": -1}, "renamed=-1: must be a number from 0 to 100"),
        ({"model_type": "word"}, "model_type='word': must be 'bpe' or 'unigram'"),
        ({"precision": ["float16"]}, "precision=.*'float32' or 'bfloat16'"),
        ({"max_tokens": 128}, "max_tokens=128: a batch must hold the longest pair"),
        ({"model": {"width": 3}}, r"\[model\] has unknown settings \['width'\]"),
        ({"model": {"dropout": "0.1"}}, r"\[model\] dropout='0.1': must be a number"),
        ({"model": {"d_model": 100, "num_heads": 8}}, "equal heads"),
        ({"model": {"norm_first": 1}}, "true or false"),
        ({"corpus": {"valid": "a.tsv"}}, "must be the name of a corpus, a file, or"),
        ({"corpus": {"train": ["a", "b", "c"]}}, r"\[corpus\] train=.*one file"),
    ],
)
def test_recipe_refuses_nonsense(changes, said):
    with pytest.raises(ValueError, match=said):
        Recipe.load("grammar", **changes)


NAMES = [setting.name for setting in fields(Recipe)]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["bpe", "float32", 700, 4096]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["train", "d_model", "dropout"]), inner)
    ),
    max_leaves=4,
)


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from([*NAMES, "else"]), VALUES, max_size=4))
def test_any_settings_are_a_recipe_or_a_sentence(changes):
    given_settings = {"name": "x", "corpus": "y", "vocab_size": 700} | changes
    try:
        recipe = Recipe.of(given_settings)
    except ValueError as error:
        assert str(error).startswith("the recipe")
    else:
        assert Recipe.of(asdict(recipe)) == recipe


@settings(max_examples=200)
@given(
    content=st.binary(max_size=60)
    | st.text(max_size=60).map(str.encode)
    | st.just(b"a = " + b"[" * 5000)
)
def test_any_file_is_a_recipe_or_a_sentence(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("toml", numbered=True) / "mine.toml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="mine.toml"):
        Recipe.load(path)


def test_table_of_files_counts_from_the_recipes_folder(tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text(
        'name = "mine"\nvocab_size = 340\n[corpus]\ntrain = ["a.en", "a.de"]\n'
        'valid = "b.tsv"\nbad = "refuse"\n'
    )
    corpus = Recipe.load(mine).corpus
    assert corpus["train"] == [str(tmp_path / "a.en"), str(tmp_path / "a.de")]
    assert corpus["valid"] == str(tmp_path / "b.tsv")
    assert corpus["bad"] == "refuse"


@pytest.mark.parametrize(
    "model",
    [
        {"num_layers": 10**6, "d_model": 8},
        {"d_model": 2**20},
        {"d_ff": 10**9},
        {"d_k": 10**8},
        {"max_length": 10**9},
    ],
)
def test_models_beyond_reason_are_refused_at_once(model):
    with pytest.raises(ValueError, match="parameters; at most.*mistyped"):
        Recipe.load("grammar", model=model)
    Recipe.load("grammar", model={"num_layers": 48, "d_model": 2048, "d_ff": 8192})
