"""Chapter 27: weights against torch's, words, alignments, heads, and the clicks."""

import copy
import hashlib
import html
import json
import random
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_lib import looking_inside as module
from transformer_lib.batches import pad
from transformer_lib.decoding import beam_search, greedy_decode
from transformer_lib.exercises.looking_inside import (
    check_between_words,
    check_entropy,
    check_error_rate,
)
from transformer_lib.grammar import ADJECTIVES, NOUNS, PRONOUNS
from transformer_lib.looking_inside import (
    Attention,
    AttentionView,
    aligned,
    alignment_error_rate,
    altered,
    attention_weights,
    attentions,
    by_words,
    effect_of_words,
    head_statistics,
    join_labels,
    link_gains,
    links,
    look,
    loss_and_choices,
    merge_words,
    most_attended,
    pack,
    plot_links,
    possessives,
    rank_correlation,
    read_aligned,
    relation_sentence,
    row_statistics,
    shuffled,
    sign_ids,
    split_verbs,
    token_log_probs,
    uniform,
    watching,
    weigh_heads,
    word_groups,
    words_of,
    zeroed,
)
from transformer_lib.tokenizer import BOS, EOS, PAD
from transformer_lib.training import find_pretrained, load_pretrained, read_evidence
from transformer_lib.transformer import Transformer, TransformerConfig, torch_twin

VOCABULARY = 30
FEW = settings(max_examples=15, deadline=None)
PAIRS = [
    ("Tom forgot his keys.", "Tom vergaß seine Schlüssel."),
    ("It was raining.", "Es regnete."),
    ("She put her coat on.", "Sie zog ihren Mantel an."),
]


@pytest.fixture(scope="module")
def small():
    torch.manual_seed(3)
    config = TransformerConfig(VOCABULARY, 32, num_heads=4, num_layers=2, d_ff=48)
    return Transformer(config).eval()


@pytest.fixture(scope="module")
def trained():
    return load_pretrained("tatoeba-en-de")[:2]


@pytest.fixture(scope="module")
def pair(trained):
    return look(*trained, "The old man sold his house.", "Der Mann verkauft sein Haus.")


rows = st.lists(
    st.lists(st.integers(4, VOCABULARY - 1), min_size=1, max_size=6),
    min_size=1,
    max_size=3,
)


# --- the weights ----------------------------------------------------------------------


@pytest.mark.parametrize("norm_first", [False, True])
def test_weights_equal_torch_s_own(norm_first):
    """Every layer, head and kind, as torch.nn.MultiheadAttention computes them."""
    torch.manual_seed(0)
    config = TransformerConfig(
        VOCABULARY, 32, num_heads=4, num_layers=2, d_ff=48, norm_first=norm_first
    )
    model = Transformer(config).eval()
    twin = torch_twin(model)
    src_ids = torch.tensor([[5, 6, 7, 8, EOS], [9, 4, EOS, PAD, PAD]])
    tgt_ids = torch.tensor([[BOS, 11, 12, 13], [BOS, 14, PAD, PAD]])
    got, compared = attention_weights(model, src_ids, tgt_ids), 0
    for kind in module.KINDS:
        stack = twin.encoder if kind == "encoder" else twin.decoder
        name = "multihead_attn" if kind == "cross" else "self_attn"
        inputs = []
        hooks = [
            attention.register_forward_hook(lambda m, a, r, to=inputs: to.append(a))
            for attention in attentions(model, kind)
        ]
        model(src_ids, tgt_ids)
        for hook in hooks:
            hook.remove()
        for layer, (query, key, value, mask) in enumerate(inputs):
            wide = mask.expand(len(query), 4, query.shape[1], key.shape[1])
            weights = getattr(stack.layers[layer], name)(
                query, key, value, need_weights=True, average_attn_weights=False,
                attn_mask=~wide.flatten(0, 1),
            )[1]  # fmt: skip
            torch.testing.assert_close(got[kind][layer], weights, atol=1e-6, rtol=1e-5)
            compared += 1
    assert compared == 6


@FEW
@given(rows, rows)
def test_rows_sum_to_one_over_what_is_allowed(small, sources, targets):
    size = min(len(sources), len(targets))
    src_ids = pad([[*row, EOS] for row in sources[:size]])
    tgt_ids = pad([[BOS, *row] for row in targets[:size]])
    got = attention_weights(small, src_ids, tgt_ids)
    S, T = src_ids.shape[1], tgt_ids.shape[1]
    for kind, shape in (("encoder", (S, S)), ("decoder", (T, T)), ("cross", (T, S))):
        for w in got[kind]:
            assert w.shape == (size, 4, *shape)
            torch.testing.assert_close(w.sum(-1), torch.ones(w.shape[:-1]))
            if kind == "decoder":
                assert (w.triu(1) == 0).all()
            else:
                hidden = (src_ids == PAD)[:, None, None].expand_as(w)
                assert (w[hidden] == 0).all() and (w[~hidden] > 0).all()


def test_watching_leaves_no_trace(small):
    src_ids, tgt_ids = torch.tensor([[5, 6, EOS]]), torch.tensor([[BOS, 7]])
    before, usual = small(src_ids, tgt_ids), attentions(small, "cross")[0].attention
    with watching(small, lambda *seen: None):
        torch.testing.assert_close(small(src_ids, tgt_ids), before)
        with pytest.raises(ValueError, match="being watched already"):
            with watching(small, lambda *seen: None):
                pass
    with pytest.raises(RuntimeError, match="mine"), watching(small, stop):
        small(src_ids, tgt_ids)
    assert attentions(small, "cross")[0].attention is usual
    assert torch.equal(small(src_ids, tgt_ids), before)
    small.train()
    first, second = (attention_weights(small, src_ids, tgt_ids) for _ in range(2))
    assert torch.equal(first["cross"][1], second["cross"][1])  # dropout was off
    assert small.training
    small.eval()
    with pytest.raises(ValueError, match="kind='self'"):
        attentions(small, "self")


def stop(*seen):
    raise RuntimeError("mine")


# --- changed weights ------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
def test_zeroed_head_equals_a_model_without_it(small, kind):
    """Zero weights of a head are zero columns of the last matrix, cache included."""
    without = copy.deepcopy(small)
    columns = slice(2 * 8, 3 * 8)  # head 2 of 4, 8 wide
    with torch.no_grad():
        attentions(without, kind)[1].w_o.weight[:, columns] = 0
    src_ids, tgt_ids = torch.tensor([[5, 6, 8, EOS]]), torch.tensor([[BOS, 7, 9]])
    see = altered(kind, 1, 2, zeroed)
    got = token_log_probs(small, src_ids, tgt_ids, see)[0]
    wanted = without(src_ids, tgt_ids).log_softmax(-1)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(got, small(src_ids, tgt_ids).log_softmax(-1), atol=1e-4)
    with watching(small, see):
        assert greedy_decode(small, src_ids, 5) == greedy_decode(without, src_ids, 5)


@FEW
@given(st.integers(0, 10**6), st.booleans())
def test_uniform_and_shuffled_stay_within_what_is_allowed(seed, causal):
    torch.manual_seed(seed)
    allowed = torch.ones(2, 3, 5, 5, dtype=torch.bool)
    allowed = allowed.tril() if causal else allowed & (torch.rand(2, 1, 1, 5) < 0.6)
    weights = torch.rand(2, 3, 5, 5) * allowed
    same = uniform(weights, allowed)
    assert (same[~allowed] == 0).all()
    counts = allowed.sum(-1, keepdim=True)
    torch.testing.assert_close(same[allowed], (1 / counts).expand_as(same)[allowed])
    other = shuffled(weights, allowed)
    assert (other[~allowed] == 0).all()
    assert torch.equal(other.sort(dim=-1)[0], weights.sort(dim=-1)[0])


def test_shuffled_does_shuffle():
    torch.manual_seed(0)
    weights = torch.rand(1, 1, 200, 6)
    other = shuffled(weights, torch.ones_like(weights, dtype=torch.bool))
    moved = (other.argmax(-1) != weights.argmax(-1)).float().mean()
    assert 0.75 < moved < 0.92  # 5 in 6 are expected


def test_weigh_heads_and_losses(trained):
    model, tokenizer = trained
    batches = list(module.encode_pairs(tokenizer, PAIRS))
    loss, choices = loss_and_choices(model, batches)
    nll = count = 0
    for source, target in PAIRS:  # the loss by torch, one pair at a time
        tgt = tokenizer.encode(target)
        src_ids = torch.tensor([tokenizer.encode(source) + [EOS]])
        logits = model(src_ids, torch.tensor([[BOS, *tgt]]))[0]
        nll += float(torch.nn.functional.cross_entropy(
            logits, torch.tensor([*tgt, EOS]), reduction="sum"
        ).detach())  # fmt: skip
        count += len(tgt) + 1
    assert loss == pytest.approx(nll / count, rel=1e-4) and len(choices) == count
    table = weigh_heads(model, tokenizer, PAIRS, ["zeroed"])
    assert len(table) == 6 * 5
    by = {(r["kind"], r["layer"], r["head"]): r for r in table}
    assert by["cross", 1, None]["rise"] > 1 > by["encoder", 0, 0]["rise"]
    assert all(r["loss"] - r["rise"] == pytest.approx(loss, abs=1e-6) for r in table)


def test_the_record_says_what_the_chapter_says():
    record = read_evidence("attention-heads")
    found = {(r["kind"], r["layer"], r["head"], r["change"]): r for r in record["rows"]}
    assert len(found) == len(record["rows"]) == 3 * 2 * 5 * 3
    assert {"hardware", "commit", "date"} <= record["environment"].keys()
    assert record["command"] == module.RECORD_COMMAND and record["seconds"] > 0
    weights = find_pretrained("tatoeba-en-de") / "weights.safetensors"
    same = hashlib.sha256(weights.read_bytes()).hexdigest() == record["weights_sha256"]
    assert same, "The record is of another model: make it again."
    assert len(record["data"]["sha256"]) == 64 and record["seed"] == 0
    assert all(found["encoder", 0, h, "zeroed"]["rise"] < 0.05 for h in range(4))
    assert found["cross", 1, None, "shuffled"]["rise"] > 1
    assert found["cross", 1, None, "zeroed"]["bleu"] < record["bleu"] / 4


# --- words ----------------------------------------------------------------------------


def test_words_of_pieces():
    pieces = ["<s>", "▁Tom", "'", "s", "▁rain", "ing", ",", "▁\"", "so", ".", "</s>"]
    groups = word_groups(pieces)
    words = join_labels(pieces, groups)
    assert words == ["<s>", "Tom's", "raining", ",", '"', "so", ".", "</s>"]
    assert sorted(i for group in groups for i in group) == list(range(len(pieces)))


@FEW
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 6))
def test_merged_weights_equal_loops(seed, T, S):
    rng = random.Random(seed)

    def groups(n):
        ends = sorted({n, *(i for i in range(1, n) if rng.random() < 0.5)})
        return [list(range(a, b)) for a, b in zip([0, *ends], ends, strict=False)]

    rows, columns = groups(T), groups(S)
    weights = torch.rand(2, T, S, generator=torch.Generator().manual_seed(seed))
    weights = weights / weights.sum(-1, keepdim=True)
    got = merge_words(weights, rows, columns)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            wanted = sum(weights[:, t, s] for t in row for s in column) / len(row)
            torch.testing.assert_close(got[:, i, j], wanted)
    torch.testing.assert_close(got.sum(-1), torch.ones(2, len(rows)))


def test_look(trained, pair):
    assert pair.source[-1] == "</s>" and pair.target[0] == "<s>"
    for kind, layers in pair.weights.items():
        queries, keys = pair.labels(kind)
        assert all(w.shape == (1, 4, len(queries), len(keys)) for w in layers)
        mean = torch.stack([pair.matrix(kind, 1, h) for h in range(4)]).mean(0)
        torch.testing.assert_close(pair.matrix(kind, 1), mean)
    merged = by_words(pair)
    assert merged.source == ["The", "old", "man", "sold", "his", "house", ".", "</s>"]
    assert merged.target[0] == "<s>" and merged.target[-1] == "."
    own = look(*trained, "Tom forgot his keys.")
    assert len(own.target) > 3
    with pytest.raises(ValueError, match="no tokens"):
        look(*trained, "")


# --- alignment ------------------------------------------------------------------------


def test_alignment_error_rate_by_hand():
    """Och and Ney 2003: 1 - (|A ∩ S| + |A ∩ P|) / (|A| + |S|)."""
    sure, possible = {(0, 0), (1, 1)}, {(2, 1)}
    assert alignment_error_rate([sure], [sure], [possible]) == 0
    assert alignment_error_rate([{(5, 5)}], [sure], [possible]) == 1
    found = {(0, 0), (2, 1), (3, 2)}  # 1 sure, 2 possible, 3 found, 2 sure in all
    rate = alignment_error_rate([found], [sure], [possible])
    assert rate == pytest.approx(1 - 3 / 5)
    both = alignment_error_rate([found, sure], [sure, sure], [possible, set()])
    assert both == pytest.approx(1 - (3 + 4) / (5 + 4))
    with pytest.raises(ValueError, match="no links"):
        alignment_error_rate([], [], [])


def test_gold_alignments_fit_the_words(trained):
    gold = read_aligned()
    assert len(gold) == 20
    for english, german, sure, possible in gold:
        sides = [words_of(trained[1], text) for text in (english, german)]
        assert not sure & possible
        for s, t in sure | possible:
            assert s < len(sides[0]) and t < len(sides[1]), (english, s, t)
        last = {(len(sides[0]) - 1, len(sides[1]) - 1)}
        assert last <= sure  # the full stop, or the question mark


def test_second_layer_writes_and_aligns(trained):
    """The chapter's finding, and that the other row is worse."""
    gold = read_aligned()
    pairs = [look(*trained, *row[:2]) for row in gold]
    sure, possible = zip(*[row[2:] for row in gold], strict=True)
    rate = {}
    for row in ("writes", "reads"):
        found = [links(aligned(pair, 1, None, row)[0]) for pair in pairs]
        rate[row] = alignment_error_rate(found, sure, possible)
    assert rate["writes"] < 0.1 < 0.5 < rate["reads"]
    matrix, target, source = aligned(pairs[0], 1)
    assert matrix.shape == (len(target), len(source))
    assert target[0] == "Der" and source[-1] == "."
    with pytest.raises(ValueError, match="row='x'"):
        aligned(pairs[0], 1, row="x")


# --- statistics -----------------------------------------------------------------------


def test_row_statistics_by_loops(trained):
    signs = torch.tensor([7])
    weights = torch.rand(1, 2, 4, 4).softmax(-1).tril()
    weights = weights / weights.sum(-1, keepdim=True)
    keys = torch.tensor([[9, 7, 8, EOS]])
    got = row_statistics(weights, keys, signs, same_text=True)
    for h in range(2):
        for t in range(4):
            row = weights[0, h, t].tolist()
            entropy = -sum(w * torch.tensor(w).log().item() for w in row if w)
            wanted = {
                "previous": row[t - 1] if t else 0, "itself": row[t],
                "next": row[t + 1] if t < 3 else 0, "first": row[0], "end": row[3],
                "punctuation": row[1], "largest": max(row), "entropy": entropy,
                "distance": sum(w * abs(t - s) for s, w in enumerate(row)),
            }  # fmt: skip
            assert wanted.keys() == got.keys()
            for name, value in wanted.items():
                assert float(got[name][0, h, t]) == pytest.approx(value, abs=1e-5), name
    theirs = torch.distributions.Categorical(probs=weights).entropy()
    torch.testing.assert_close(got["entropy"], theirs, atol=1e-5, rtol=1e-4)
    few = row_statistics(weights, keys, signs, same_text=False)
    assert "distance" not in few and "next" not in few
    pieces = [trained[1].processor.id_to_piece(int(i)) for i in sign_ids(trained[1])]
    assert "." in pieces and "," in pieces and "▁the" not in pieces


def test_head_statistics_do_not_depend_on_the_batch(trained):
    model, tokenizer = trained
    together = head_statistics(model, tokenizer, PAIRS)
    alone = [head_statistics(model, tokenizer, [pair]) for pair in PAIRS]
    counts = {"encoder": [], "decoder": [], "cross": []}
    for source, target in PAIRS:
        counts["encoder"].append(len(tokenizer.encode(source)) + 1)
        counts["decoder"].append(len(tokenizer.encode(target)) + 1)
    counts["cross"] = counts["decoder"]
    for kind, values in together.items():
        for name, value in values.items():
            parts = zip(alone, counts[kind], strict=True)
            total = sum(one[kind][name] * n for one, n in parts)
            torch.testing.assert_close(
                value, total / sum(counts[kind]), atol=1e-5, rtol=1e-4
            )
    equal = head_statistics(model, tokenizer, PAIRS[:1], uniform=True)
    n = len(tokenizer.encode(PAIRS[0][0])) + 1
    torch.testing.assert_close(equal["cross"]["end"], torch.full((2, 4), 1 / n))


# --- grammar and words of the figures -------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_relations_hold_between_the_right_words(trained, seed):
    text, found = relation_sentence(random.Random(seed))
    words = [word.lower() for word in words_of(trained[1], text)]
    nouns = {noun for row in NOUNS for noun in row[:2]}
    subjects = nouns | {row[0].lower() for row in PRONOUNS}
    adjectives = {row[0] for row in ADJECTIVES}
    kinds = {"article": module.ARTICLES, "noun": nouns, "adjective": adjectives}
    kinds |= {"subject": subjects, "verb": module.MAIN_VERBS, "object": nouns}
    assert text.endswith((".", "?")) and len(words) == len(text.split()) + 1
    for name, pairs in found.items():
        first, second = name.split(" → ")
        for a, b in pairs:
            assert words[a] in kinds[first], (text, name, words[a])
            assert words[b] in kinds[second], (text, name, words[b])
    verbs = [word for word in words if word in module.MAIN_VERBS]
    assert len(found["verb → object"]) == len(verbs) >= 1
    articles = sum(word in module.ARTICLES for word in words)
    assert len(found["article → noun"]) == articles


def test_most_attended(trained):
    model, tokenizer = trained
    text = "The small girl was reading."
    got = most_attended(model, tokenizer, text)
    whole = by_words(look(model, tokenizer, text, ""))
    weights = torch.stack(whole.weights["encoder"])[:, 0, :, :-1, :-1]
    assert torch.equal(got, weights.argmax(-1)) and got.shape[:2] == (2, 4)


def test_searches(trained):
    tokenizer = trained[1]
    texts = [
        "Turn the light off.", "She put her coat on.", "Turn the light off.",
        "He gave it to the man on the bus.", "The shirt is on his back.",
        "He came back.", "Give me something to write on.",
    ]  # fmt: skip
    assert split_verbs(tokenizer, texts) == [(texts[0], 3, 0), (texts[1], 4, 1)]
    texts = [
        "Tom forgot his keys.", "Tom told John about his keys.",
        "The dog wags its tail.", "Mary lost his keys.", "His name is Tom.",
        "They sold their house.",
    ]  # fmt: skip
    wanted = [(texts[0], 2, 0), (texts[2], 3, 1), (texts[5], 2, 0)]
    assert possessives(tokenizer, texts) == wanted


# --- the paper's figures: what the chapter says of its best examples -----------------


def encoder_weights(trained, text):
    """Words, and the encoder's attention between them, (L, H, words, words)."""
    pair = by_words(look(*trained, text, ""))
    return pair.source, torch.stack(pair.weights["encoder"])[:, 0]


def test_link_gains_by_hand():
    """Two heads, three sentences of four words; the link is from word 3 to word 1."""
    cases = [("a sentence", 3, 1)] * 3
    links, none = [0, 2, 0, 1], [0, 2, 0, 0]  # what each word attends to most
    staring = [1, 1, 1, 1]  # every word looks at word 1: no link at all
    looked = [torch.tensor([[row, staring]]) for row in (links, links, none)]
    found = link_gains(looked, cases)
    assert {key: tuple(value.shape) for key, value in found.items()} == dict.fromkeys(
        ("link", "control", "gain", "error"), (1, 2)
    )
    assert found["link"].tolist() == [[pytest.approx(2 / 3), 1.0]]
    assert found["control"].tolist() == [[0.0, 1.0]]
    assert found["gain"].tolist() == [[pytest.approx(2 / 3), 0.0]]
    error = np.std([1, 1, 0], ddof=1) / 3**0.5
    assert found["error"].tolist() == [[pytest.approx(error), 0.0]]


def test_a_head_that_knows_nothing_rarely_passes():
    """Weights at random: the gain is above two errors in about one head of forty."""
    generator = torch.Generator().manual_seed(4)
    cases = [("a sentence", 5, 2)] * 60
    looked = [torch.randint(8, (10, 40, 8), generator=generator) for _ in cases]
    found = link_gains(looked, cases)
    passed = (found["gain"] > 2 * found["error"]).float().mean()
    assert 0 < passed < 0.06


def test_figure_5_two_heads_have_two_structures(trained):
    """Head 2.1 finds the noun also behind an adjective; head 2.3 the word before."""
    model, tokenizer = trained
    rng, far, near, before = random.Random(7), [], [], []
    for _ in range(60):
        text, found = relation_sentence(rng)
        best = most_attended(model, tokenizer, text)[1]  # (H, words)
        for a, b in found["article → noun"]:
            (far if b - a > 1 else near).append(int(best[0, a]) == b)
        before += (best[2, 1:] == torch.arange(best.shape[-1] - 1)).tolist()
    assert sum(far) / len(far) > 0.9 and sum(near) / len(near) > 0.9
    assert len(far) > 20 and sum(before) / len(before) > 0.4


@FEW
@given(st.integers(0, 10**6), st.integers(2, 9))
def test_rank_correlation_by_the_formula(seed, n):
    torch.manual_seed(seed)
    a, b = torch.randperm(n), torch.randperm(n)
    wanted = 1 - 6 * float(((a - b) ** 2).sum()) / (n * (n * n - 1))
    got = rank_correlation(a.float().exp(), b.float() * 3)  # only the order counts
    assert float(got) == pytest.approx(wanted, abs=1e-6)


def test_effect_of_words(trained):
    moved = effect_of_words(*trained, "Tom saw Mary.", "Tom sah Maria.")
    assert moved.shape[1] == 4 and (moved >= 0).all() and (moved <= 1).all()
    assert int(moved[0].argmax()) == 0  # who writes "Tom" needs "Tom"


def test_plot_links():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    weights = torch.tensor([[0.9, 0.1], [0.01, 0.99]])
    ax = plot_links(weights, ["a", "b"], ["c", "d"])
    assert len(ax.lines) == 3  # 0.01 is not drawn
    assert [text.get_text() for text in ax.texts] == ["a", "b", "c", "d"]
    assert len(plot_links(weights, ["a", "b"], ["c", "d"], rows=[1]).lines) == 1
    plt.close("all")


def test_the_translator_page_says_what_its_table_shows():
    """The half that the model leaves out was looked at, with as much weight as said."""
    page = Path(__file__).parents[1] / "book" / "translator.md"
    page = page.read_text("utf-8")
    said = re.search(r"\*(\w+)\* gives (\d+) % of its weight to \*(\w+)\*", page)
    model, tokenizer, _ = load_pretrained("tatoeba-en-de", "cpu")
    text = "The old man who lives next door sold his house."
    src_ids = torch.tensor([[*tokenizer.encode(text), EOS]])
    ids = beam_search(model, src_ids)[0][0].ids
    assert "verkauf" not in tokenizer.decode(ids)
    weights = attention_weights(model, src_ids, torch.tensor([[BOS, *ids]]))["cross"]
    last = weights[-1][0].mean(dim=0)  # (T, S): of the last layer, over its heads
    query = [tokenizer.processor.id_to_piece(i) for i in ids].index(f"▁{said[1]}")
    key = tokenizer.pieces(text).index(f"▁{said[3]}")
    assert round(100 * float(last[query, key])) == int(said[2])


# --- the figure to click --------------------------------------------------------------


def data_of(view):
    text = view._repr_html_()
    packed = text.split('data-attention="')[1].split('"')[0]
    return text, json.loads(html.unescape(packed))


def test_view_holds_the_weights(pair):
    text, data = data_of(AttentionView(pair))
    packed = data["weights"]["cross"][1][2]
    values = [int(packed[i : i + 2], 36) / 1000 for i in range(0, len(packed), 2)]
    wanted = pair.matrix("cross", 1, 2).flatten()
    torch.testing.assert_close(torch.tensor(values), wanted, atol=5.1e-4, rtol=0)
    assert pack(torch.tensor([[1.0, 0.0], [0.5, 0.001]])) == "rs00dw01"
    assert len(text.encode()) < 60_000 and len(module.VIEW_SCRIPT) < 10_000
    assert "http" not in text and "<script" in text and " id=" not in text
    svg = text[text.index("<svg") : text.index("</svg>") + 6]
    picture = ET.fromstring(svg)  # well-formed, and said in words
    assert picture.get("role") == "img" and "Heat map" in picture.get("aria-label")
    assert len(picture.findall("text")) == len(pair.source) + len(pair.target)


def test_view_escapes_what_it_is_given():
    odd = ['<b>"&\'</script>', "</s>"]
    weights = {"encoder": [torch.full((1, 1, 2, 2), 0.5)]}
    view = AttentionView(Attention(odd, ["<s>"], weights), "encoder", kinds=["encoder"])
    text, data = data_of(view)
    assert data["source"] == odd and text.count("</script>") == 1


def test_view_refuses(pair, trained):
    with pytest.raises(ValueError, match="kind='self'"):
        AttentionView(pair, "self")
    with pytest.raises(ValueError, match="layer=2: must be from 0 to 1"):
        AttentionView(pair, layer=2)
    with pytest.raises(ValueError, match="head=4"):
        AttentionView(pair, head=4)
    long = look(*trained, "word " * 60, "Wort " * 60)
    with pytest.raises(ValueError, match="60 are allowed"):
        AttentionView(long)


OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
DARK = "body { background: #14181e; color: #ced6dd; }"


def write_page(path, *views, style=""):
    body = "\n".join(view._repr_html_() for view in views)
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>t</title>'
        f"<style>{style}</style><body>{body}</body></html>",
        encoding="utf-8",
    )
    return path.as_uri()


def test_click_and_keys(browser, pair, tmp_path):
    """From file://, twice in one page, on a phone: every button does what it says."""
    merged = by_words(pair)
    first = AttentionView(pair, "cross", layer=1, word=1)
    views = (first, AttentionView(merged, "encoder"), first)
    address = write_page(tmp_path / "page.html", *views)
    page = browser.new_page(viewport={"width": 360, "height": 800})
    troubles = []
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("request", lambda got: troubles.append(got.url))
    page.goto(address)
    assert troubles == [address]  # the page itself, and nothing else
    figure = page.locator(".attention-view").nth(0)

    def pressed(number):
        return figure.locator("fieldset").nth(number).locator("[aria-pressed=true]")

    def percents():
        return figure.locator(".share").all_inner_texts()

    def wanted(kind, layer, head, word):
        row = pair.matrix(kind, layer, head)[word]
        return [f"{int(100 * round(w, 3) + 0.5)}%" for w in row.tolist()]

    def close(got, expected):
        pairs = zip(got, expected, strict=True)
        numbers = [(int(a.strip("%–") or 0), int(b[:-1])) for a, b in pairs]
        return all(abs(a - b) <= 1 for a, b in numbers)

    assert figure.locator("svg").is_hidden()
    assert page.locator("svg:visible").count() == 0
    shown = [pressed(i).inner_text() for i in range(4)]
    assert shown == ["cross", "2", "mean", pair.target[1].removeprefix("▁")]
    assert close(percents(), wanted("cross", 1, None, 1))
    figure.get_by_role("button", name="head 3").click()
    assert close(percents(), wanted("cross", 1, 2, 1))
    figure.get_by_role("button", name="layer 1").click()
    assert close(percents(), wanted("cross", 0, 2, 1))
    said = figure.locator("p")
    before = said.inner_text()
    words = figure.locator(".queries button")
    words.nth(3).click()
    assert close(percents(), wanted("cross", 0, 2, 3)) and said.inner_text() != before
    page.keyboard.press("ArrowRight")
    assert close(percents(), wanted("cross", 0, 2, 4))
    page.keyboard.press("Home")
    assert close(percents(), wanted("cross", 0, 2, 0))
    page.keyboard.press("ArrowLeft")  # round to the last word
    assert close(percents(), wanted("cross", 0, 2, len(pair.target) - 1))
    assert page.evaluate("document.activeElement.textContent") == "."
    assert words.evaluate_all("b => b.filter(x => x.tabIndex == 0).length") == 1
    figure.get_by_role("button", name="encoder").click()
    assert words.count() == len(pair.source) and pressed(0).inner_text() == "encoder"
    figure.get_by_role("button", name="decoder").click()
    words.nth(1).click()
    assert percents()[2:] == ["–"] * (len(pair.target) - 2)  # the future
    other = page.locator(".attention-view").nth(1)  # the second did not move
    assert other.locator("[aria-pressed=true]").nth(0).inner_text() == "encoder"
    assert other.locator(".key").all_inner_texts() == merged.source
    assert other.locator("ul").get_attribute("aria-label") and troubles == [address]
    assert page.evaluate(OVERFLOW) <= 0
    small = page.locator("button").evaluate_all(
        "b => b.filter(x => x.getBoundingClientRect().height < 24).length"
    )
    assert small == 0
    page.close()


LIGHT = "body { background: #fff; color: #222832; }"
LUMINANCES = """() => {
  const luminance = css => {
    const numbers = css.match(/[\\d.]+/g).map(Number).slice(0, 3);
    const parts = numbers.map(c => css.startsWith("color") ? c : c / 255);
    const linear = c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
    const [r, g, b] = parts.map(linear);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const of = (selector, name) =>
    luminance(getComputedStyle(document.querySelector(selector))[name]);
  return [of("body", "backgroundColor"), of(".share", "color"), of("button", "color"),
          of(".bar", "backgroundColor")];
}"""


@pytest.mark.parametrize("style", [LIGHT, DARK], ids=["light", "dark"])
def test_touch_and_contrast_in_both_themes(browser, pair, tmp_path, style):
    address = write_page(tmp_path / "touch.html", AttentionView(pair), style=style)
    phone = {"width": 360, "height": 800}
    context = browser.new_context(has_touch=True, viewport=phone)
    page = context.new_page()
    page.goto(address)
    before = page.locator(".share").all_inner_texts()
    page.locator(".queries button").nth(4).tap()
    assert page.locator(".share").all_inner_texts() != before
    page.get_by_role("button", name="encoder").tap()
    assert page.locator(".key").count() == len(pair.source)
    ground, *others = page.evaluate(LUMINANCES)
    ratios = [(max(ground, x) + 0.05) / (min(ground, x) + 0.05) for x in others]
    assert min(ratios[:2]) >= 4.5 and ratios[2] >= 3, ratios  # WCAG: text, graphics
    context.close()


def test_without_scripts_a_picture_stands_there(browser, pair, tmp_path):
    address = write_page(tmp_path / "still.html", AttentionView(pair), style=DARK)
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.set_viewport_size({"width": 360, "height": 800})
    page.goto(address)
    assert page.locator("svg").is_visible() and page.locator("button").count() == 0
    assert page.locator("svg").bounding_box()["width"] <= 360
    context.close()


# --- exercises ------------------------------------------------------------------------


def pieces_to_words(rows_by, columns_by):
    def between_words(weights, rows, columns):
        one_hot = torch.nn.functional.one_hot
        a, b = one_hot(rows).float(), one_hot(columns).float()
        out = a.T @ weights @ b
        out = out / a.sum(0)[:, None] if rows_by == "mean" else out
        return out / b.sum(0) if columns_by == "mean" else out

    return between_words


def rate(found, sure, possible):
    return (len(found & sure) + len(found & possible)) / (len(found) + len(sure))


@pytest.mark.parametrize(
    "check, right",
    [
        (check_entropy, lambda w: torch.special.entr(w).sum(-1)),
        (check_between_words, pieces_to_words("mean", "sum")),
        (check_error_rate, lambda a, s, p: 1 - rate(a, s, p | s)),
    ],
)
def test_right_answers_pass(check, right):
    assert check(right).passed


@pytest.mark.parametrize(
    "check, wrong, telling",
    [
        (check_entropy, lambda w: -(w * w.log()).sum(-1), "NaN"),
        (check_entropy, lambda w: -torch.special.entr(w).sum(-1), "sign"),
        (check_entropy, lambda w: torch.special.entr(w).sum(-1) / 0.693147, "bits"),
        (check_entropy, lambda w: torch.special.entr(w).sum(), "sum over the keys"),
        (check_between_words, pieces_to_words("sum", "sum"), "who ask|that ask too"),
        (check_between_words, pieces_to_words("mean", "mean"), "a word gets their sum"),
        (check_between_words, lambda w, r, c: w, "shape (2, 3)"),
        (check_error_rate, lambda a, s, p: rate(a, s, p | s), "the agreement"),
        (check_error_rate, lambda a, s, p: 1 - rate(a, s, p), "unite the two"),
        (check_error_rate, lambda a, s, p: 0, "Give a number"),
    ],
)
def test_mistakes_are_named(check, wrong, telling):
    verdict = check(wrong)
    assert not verdict.passed
    assert any(part in verdict.message for part in telling.split("|"))
