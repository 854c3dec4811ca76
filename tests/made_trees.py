"""Trees for tests: read from text, or any that can be made."""

from dataclasses import replace

from hypothesis import strategies as st

from transformer_lib.parsing import Tree, load_trees, read_trees

WSJ_FILE = """
( (S
    (NP-SBJ (NNP Mr.) (NNP Vinken) )
    (VP (VBZ is)
      (NP-PRD
        (NP (NN chairman) )
        (PP (IN of)
          (NP (NNP Elsevier) (NNP N.V.) ))))
    (. .) ))
( (S (NP-SBJ-1 (PRP It)) (VP (VBZ seems) (SBAR (-NONE- 0) (S (-NONE- *T*-1)))) (. .)) )
"""


def tree(text):
    (one,) = read_trees(text.splitlines())
    return one


def first_trees(*asked):
    """As load_trees, but of each part its first 700: whole ones take seconds to cut."""
    bank = load_trees(*asked)
    return replace(bank, trees=bank.trees[:700])


LABELS = st.sampled_from(["S", "NP", "VP", "PP", "ADVP", "PRT", "SBAR", "WHNP"])
TAGS = st.sampled_from(["NN", "DT", ",", ".", "VBD", "-LRB-", "PRP$", "``"])
WORDS = st.text(
    st.characters(codec="utf-8", exclude_characters="() \t\r\n"), min_size=1
)
LEAVES = st.builds(lambda label, word: Tree(label, word=word), TAGS, WORDS)
PARTS = st.recursive(
    LEAVES,
    lambda inner: st.builds(
        lambda label, children: Tree(label, tuple(children)),
        LABELS,
        st.lists(inner, min_size=1, max_size=4),
    ),
    max_leaves=12,
)
TREES = st.builds(
    lambda children: Tree("TOP", tuple(children)),
    st.lists(PARTS, min_size=1, max_size=3),
)
