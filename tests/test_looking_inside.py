"""Chapter 27: weights against torch's, words, alignments, heads, and the clicks."""

import random
import re
from pathlib import Path

import looked_inside
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from looked_inside import FEW, PAIRS, VOCABULARY, rows

from transformer_lib.batches import pad
from transformer_lib.decoding import beam_search
from transformer_lib.exercises.looking_inside import (
    check_between_words,
    check_entropy,
    check_error_rate,
)
from transformer_lib.looking_inside import (
    alignment_error_rate,
    attention_weights,
    head_statistics,
    look,
    watching,
)
from transformer_lib.looking_inside.heads import (
    effect_of_words,
    most_attended,
    words_of,
)
from transformer_lib.looking_inside.weights import (
    attention_modules,
    encode_pairs,
    join_labels,
    largest_links,
    merge_words,
    read_aligned,
    row_statistics,
    sign_ids,
    word_groups,
)
from transformer_lib.runs import load_pretrained
from transformer_lib.tokenizer import BOS, EOS, PAD
from transformer_lib.transformer import Transformer, TransformerConfig, torch_twin

small = looked_inside.small
trained = looked_inside.trained
pair = looked_inside.pair


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
    for kind in ("encoder", "decoder", "cross"):
        stack = twin.encoder if kind == "encoder" else twin.decoder
        name = "multihead_attn" if kind == "cross" else "self_attn"
        inputs = []
        hooks = [
            attention.register_forward_hook(lambda m, a, r, to=inputs: to.append(a))
            for attention in attention_modules(model, kind)
        ]
        model(src_ids, tgt_ids)
        for hook in hooks:
            hook.remove()
        for layer, (query, key, value, mask) in enumerate(inputs):
            wide = mask.expand(len(query), 4, query.shape[1], key.shape[1])
            weights = getattr(stack.layers[layer], name)(
                query,
                key,
                value,
                need_weights=True,
                average_attn_weights=False,
                attn_mask=~wide.flatten(0, 1),
            )[1]
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
    before, usual = (
        small(src_ids, tgt_ids),
        attention_modules(small, "cross")[0].attention,
    )
    with watching(small, lambda *seen: None):
        torch.testing.assert_close(small(src_ids, tgt_ids), before)
        with pytest.raises(ValueError, match="being watched already"):
            with watching(small, lambda *seen: None):
                pass
    with pytest.raises(RuntimeError, match="mine"), watching(small, stop):
        small(src_ids, tgt_ids)
    assert attention_modules(small, "cross")[0].attention is usual
    assert torch.equal(small(src_ids, tgt_ids), before)
    small.train()
    first, second = (attention_weights(small, src_ids, tgt_ids) for _ in range(2))
    assert torch.equal(first["cross"][1], second["cross"][1])  # dropout was off
    assert small.training
    small.eval()
    with pytest.raises(ValueError, match="kind='self'"):
        attention_modules(small, "self")


def stop(*seen):
    raise RuntimeError("mine")


# --- words ----------------------------------------------------------------------------


def test_words_of_pieces():
    pieces = ["<s>", "▁Tom", "'", "s", "▁rain", "ing", ",", '▁"', "so", ".", "</s>"]
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
    L, H = trained[0].config.num_layers, trained[0].config.num_heads
    for kind, layers in pair.weights.items():
        queries, keys = pair.labels(kind)
        assert len(layers) == L
        assert all(w.shape == (1, H, len(queries), len(keys)) for w in layers)
        mean = torch.stack([pair.matrix(kind, L - 1, h) for h in range(H)]).mean(0)
        torch.testing.assert_close(pair.matrix(kind, L - 1), mean)
    merged = pair.by_words()
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


def test_text_is_read_in_the_form_that_is_trained_on(trained):
    """As `translate` reads it: straight apostrophes, plain spaces."""
    model, tokenizer = trained
    typed, plain = "Tom\u2019s dog\u00a0sleeps now.", "Tom's dog sleeps now."
    ours, wanted = (look(model, tokenizer, text, text) for text in (typed, plain))
    assert (ours.source, ours.target) == (wanted.source, wanted.target)
    assert words_of(tokenizer, typed) == words_of(tokenizer, plain)
    for read in (
        lambda text: most_attended(model, tokenizer, text),
        lambda text: effect_of_words(model, tokenizer, text, text),
        lambda text: torch.cat([*next(encode_pairs(tokenizer, [(text, text)]))], 1),
    ):
        assert torch.equal(read(typed), read(plain))


def test_one_row_of_one_layer_aligns(trained):
    """Some layer's mean over the heads aligns, and there the other row does not."""
    gold = read_aligned()
    pairs = [look(*trained, *row[:2]) for row in gold]
    sure, possible = zip(*[row[2:] for row in gold], strict=True)
    rates = []
    for layer in range(trained[0].config.num_layers):
        both = []
        for row in ("writes", "reads"):
            found = [largest_links(pair.aligned(layer, None, row)[0]) for pair in pairs]
            both.append(alignment_error_rate(found, sure, possible))
        rates.append(sorted(both))
    aligned, other = min(rates)
    assert aligned < 0.15 < 0.5 < other
    matrix, target, source = pairs[0].aligned(1)
    assert matrix.shape == (len(target), len(source))
    assert target[0] == "Der" and source[-1] == "."
    with pytest.raises(ValueError, match="row='x'"):
        pairs[0].aligned(1, row="x")


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
                "previous": row[t - 1] if t else 0,
                "itself": row[t],
                "next": row[t + 1] if t < 3 else 0,
                "first": row[0],
                "end": row[3],
                "punctuation": row[1],
                "largest": max(row),
                "entropy": entropy,
                "distance": sum(w * abs(t - s) for s, w in enumerate(row)),
            }
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
    shape = model.config.num_layers, model.config.num_heads
    equal = head_statistics(model, tokenizer, PAIRS[:1], uniform=True)
    n = len(tokenizer.encode(PAIRS[0][0])) + 1
    torch.testing.assert_close(equal["cross"]["end"], torch.full(shape, 1 / n))


# --- what other pages say -------------------------------------------------------------


def test_the_translator_page_says_what_its_table_shows():
    """The page's two shares, of the row in whose place the word is left out."""
    page = Path(__file__).parents[1] / "book" / "translator.md"
    page = " ".join(page.read_text("utf-8").split())
    said = r"\*(\w+)\* gives (\d+) % of its weight to the four tokens of \*mechanism\* "
    said += r"and (\d+) % to \*attention\*"
    word, *shares = re.search(said, page).groups()
    model, tokenizer, _ = load_pretrained("tatoeba-en-de", "cpu")
    text = "The attention mechanism weighs every word of the sentence."
    src_ids = torch.tensor([[*tokenizer.encode(text), EOS]])
    ids = beam_search(model, src_ids)[0][0].ids
    german = tokenizer.decode(ids)
    assert german.startswith("Die Aufmerksamkeit des Satzes wiegt ")
    assert "echanis" not in german
    weights = attention_weights(model, src_ids, torch.tensor([[BOS, *ids]]))["cross"]
    last = weights[-1][0].mean(dim=0)  # (T, S): of the last layer, over its heads
    written = [tokenizer.processor.id_to_piece(i) for i in ids]
    row = last[written.index(f"▁{word}")]
    pieces = tokenizer.pieces(text)
    assert "".join(pieces[2:6]) == "▁mechanism"
    for share, keys in zip(shares, (slice(2, 6), slice(1, 2)), strict=True):
        assert round(100 * float(row[keys].sum())) == int(share)


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
        (check_between_words, pieces_to_words("sum", "sum"), "the mean of its rows"),
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
