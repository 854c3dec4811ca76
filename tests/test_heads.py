"""Chapter 27: what heads follow, and whether it matters when they are changed."""

import copy
import hashlib
import random

import looked_inside
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from looked_inside import FEW, PAIRS

from transformer_lib.corpora import Corpus
from transformer_lib.corpora.grammar import ADJECTIVES, NOUNS, PRONOUNS, VERBS
from transformer_lib.decoding import greedy_decode
from transformer_lib.evaluation import Score
from transformer_lib.looking_inside import (
    AttentionMaps,
    altered,
    effect_of_words,
    heads,
    left_out,
    look,
    most_attended,
    watching,
    weigh_heads,
)
from transformer_lib.looking_inside import weights as looking_inside
from transformer_lib.looking_inside.heads import (
    CHANGES,
    agreement_of_words,
    compare_relations,
    link_shares,
    link_weights,
    loss_and_choices,
    mean_gain,
    particle_sentences,
    possessives,
    rank_correlation,
    relation_sentence,
    scored_elsewhere,
    sentence_losses,
    split_verbs,
    token_log_probs,
    value_lengths,
    words_of,
)
from transformer_lib.looking_inside.weights import attention_modules
from transformer_lib.runs import read_evidence
from transformer_lib.runs.folder import find_pretrained
from transformer_lib.tokenizer import BOS, EOS
from transformer_lib.transformer import Transformer, TransformerConfig

small = looked_inside.small
trained = looked_inside.trained


@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
def test_zeroed_head_equals_a_model_without_it(small, kind):
    """Zero weights of a head are zero columns of the last matrix, cache included."""
    without = copy.deepcopy(small)
    columns = slice(2 * 8, 3 * 8)  # head 2 of 4, 8 wide
    with torch.no_grad():
        attention_modules(without, kind)[1].w_o.weight[:, columns] = 0
    src_ids, tgt_ids = torch.tensor([[5, 6, 8, EOS]]), torch.tensor([[BOS, 7, 9]])
    see = altered(kind, 1, 2, "zeroed")
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
    same = CHANGES["uniform"](weights, allowed)
    assert (same[~allowed] == 0).all()
    counts = allowed.sum(-1, keepdim=True)
    torch.testing.assert_close(same[allowed], (1 / counts).expand_as(same)[allowed])
    other = CHANGES["shuffled"](weights, allowed)
    assert (other[~allowed] == 0).all()
    assert torch.equal(other.sort(dim=-1)[0], weights.sort(dim=-1)[0])


def test_shuffled_does_shuffle():
    torch.manual_seed(0)
    weights = torch.rand(1, 1, 200, 6)
    other = CHANGES["shuffled"](weights, torch.ones_like(weights, dtype=torch.bool))
    moved = (other.argmax(-1) != weights.argmax(-1)).float().mean()
    assert 0.75 < moved < 0.92  # 5 in 6 are expected


def test_one_key_is_left_out():
    """The last allowed key, or the first; its weight is lost, or dealt out."""
    allowed = torch.tensor([[True, True, True], [True, True, False]])
    weights = torch.tensor([[0.2, 0.3, 0.5], [0.4, 0.6, 0.0]])
    end = torch.tensor([[0.2, 0.3, 0.0], [0.4, 0.0, 0.0]])
    assert torch.equal(left_out(-1)(weights, allowed), end)
    dealt = torch.tensor([[0.4, 0.6, 0.0], [1.0, 0.0, 0.0]])
    torch.testing.assert_close(left_out(-1, deal=True)(weights, allowed), dealt)
    assert left_out(0)(weights, allowed)[:, 0].tolist() == [0, 0]
    alone = torch.ones(1, 1)
    assert left_out(0, deal=True)(alone, alone.bool()).item() == 0  # nothing is left


def test_value_lengths_by_loops(small):
    """Of one sentence, key by key: the head's values through its part of W^O."""
    src_ids, tgt_ids = torch.tensor([[5, 6, 8, EOS]]), torch.tensor([[BOS, 7, 9]])
    got = value_lengths(small, [(src_ids, tgt_ids)], "cross")
    layers, num_heads = small.config.num_layers, small.config.num_heads
    assert got.shape == (2, layers, num_heads)
    with torch.no_grad():
        memory = small.encode(src_ids)[0]  # (S, D)
    part = attention_modules(small, "cross")[1]
    for h in range(num_heads):
        of_head = slice(8 * h, 8 * h + 8)
        v = memory @ part.w_v.weight[of_head].T  # (S, V)
        sizes = (v @ part.w_o.weight[:, of_head].T).norm(dim=-1)  # (S,)
        assert float(got[0, 1, h]) == pytest.approx(float(sizes[-1].detach()), rel=1e-4)
        mean = float(sizes[:-1].mean().detach())
        assert float(got[1, 1, h]) == pytest.approx(mean, rel=1e-4)


def test_weigh_heads_and_losses(trained):
    model, tokenizer = trained
    batches = list(looking_inside.encode_pairs(tokenizer, PAIRS))
    loss, choices = loss_and_choices(model, batches)
    nll = count = 0
    for source, target in PAIRS:  # the loss by torch, one pair at a time
        tgt = tokenizer.encode(target)
        src_ids = torch.tensor([tokenizer.encode(source) + [EOS]])
        logits = model(src_ids, torch.tensor([[BOS, *tgt]]))[0]
        nll += float(
            torch.nn.functional.cross_entropy(
                logits, torch.tensor([*tgt, EOS]), reduction="sum"
            ).detach()
        )
        count += len(tgt) + 1
    assert loss == pytest.approx(nll / count, rel=1e-4) and len(choices) == count
    before, counts, _ = sentence_losses(model, batches)
    assert len(before) == len(PAIRS) and int(counts.sum()) == count
    table = weigh_heads(model, tokenizer, PAIRS, ["zeroed"])
    L, H = model.config.num_layers, model.config.num_heads
    places = {(row["kind"], row["layer"], row["head"]) for row in table}
    assert len(table) == len(places) == 3 * L * (H + 1)
    groups = [row["rise"] for row in table if row["head"] is None]
    single = [row["rise"] for row in table if row["head"] is not None]
    assert max(groups) > 2 * max(single)  # a layer is worth more than a head
    assert all(r["loss"] - r["rise"] == pytest.approx(loss, abs=1e-6) for r in table)
    # How much more a layer costs at once than head by head, and its standard error by
    # the bootstrap over sentences.
    row = next(r for r in table if r["head"] is None)
    alone = sum(r["rise"] for r in table[: table.index(row)])
    assert row["more"] == pytest.approx(row["rise"] - alone, abs=1e-6)
    more = (H - 1) * before
    for head in (*range(H), None):
        see = altered(row["kind"], row["layer"], head, "zeroed")
        cost = sentence_losses(model, batches, see)[0]
        more += cost if head is None else -cost
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(PAIRS), size=(4000, len(PAIRS)))
    again = more.numpy()[drawn].sum(1) / counts.numpy()[drawn].sum(1)
    n = len(PAIRS)  # few: the bootstrap divides by n
    assert row["error"] * ((n - 1) / n) ** 0.5 == pytest.approx(again.std(), rel=0.2)


def test_any_number_of_layers_and_heads(trained):
    """Nothing here knows how deep the model is that ships, or how many heads it has."""
    tokenizer = trained[1]
    config = TransformerConfig(
        tokenizer.vocab_size, 32, num_heads=8, num_layers=3, d_ff=48
    )
    torch.manual_seed(5)
    other = Transformer(config).eval()
    rows = weigh_heads(other, tokenizer, PAIRS, ["uniform"])
    assert len({(r["kind"], r["layer"], r["head"]) for r in rows}) == 3 * 3 * 9
    assert most_attended(other, tokenizer, PAIRS[0][0]).shape == (3, 8, 5)
    stats = looking_inside.head_statistics(other, tokenizer, PAIRS)
    assert all(x.shape == (3, 8) for part in stats.values() for x in part.values())
    pair = look(other, tokenizer, *PAIRS[0])
    assert len(pair.aligned(2, 7)[1]) == len(pair.aligned(0)[1]) == 5
    moved = effect_of_words(other, tokenizer, *PAIRS[0])
    assert moved.shape[1] == 5


def test_the_record_says_what_the_chapter_says(trained):
    L, H = trained[0].config.num_layers, trained[0].config.num_heads
    record = read_evidence("attention-heads")
    found = {(r["kind"], r["layer"], r["head"], r["change"]): r for r in record["rows"]}
    assert len(found) == len(record["rows"]) == 3 * L * (H + 1) * 3
    assert {"hardware", "commit", "date"} <= record["environment"].keys()
    assert record["command"] == heads.RECORD_COMMAND and record["seconds"] > 0
    weights = find_pretrained("tatoeba-en-de") / "weights.safetensors"
    same = hashlib.sha256(weights.read_bytes()).hexdigest() == record["weights_sha256"]
    assert same, "The record is of another model: make it again."
    assert len(record["data"]["sha256"]) == 64 and record["seed"] == 0
    for row in record["rows"]:
        assert row["rise"] == pytest.approx(row["loss"] - record["loss"], abs=1e-6)
        assert ("bleu" in row) == (row["change"] == "zeroed")
        if row["head"] is None and row["change"] == "zeroed":
            assert row["error"] > 0
            alone = sum(
                found[row["kind"], row["layer"], head, row["change"]]["rise"]
                for head in range(H)
            )
            assert row["more"] == pytest.approx(row["rise"] - alone, abs=1e-6)
    for sharp in record["largest"].values():  # of each head, from equal weights to 1
        assert [len(layer) for layer in sharp] == [H] * L
        assert all(0.1 < x < 1 for layer in sharp for x in layer)
    for scored in record["links"].values():
        assert len(scored) > 5 and all(0 <= i < L * H for i, *_ in scored.values())
        assert all(0 <= x <= 1 for _, *both in scored.values() for x in both)
    # A layer without its heads costs far more than any single head, and so do shuffled
    # weights in their place.
    zeroed = [row for row in record["rows"] if row["change"] == "zeroed"]
    single = [row for row in zeroed if row["head"] is not None]
    worst = max(zeroed, key=lambda row: row["rise"])
    assert worst["head"] is None and worst["bleu"] < min(r["bleu"] for r in single)
    shuffled = found[worst["kind"], worst["layer"], None, "shuffled"]["rise"]
    assert min(worst["rise"], shuffled) > 2 * max(row["rise"] for row in single)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_relations_hold_between_the_right_words(trained, seed):
    text, found = relation_sentence(random.Random(seed))
    words = [word.lower() for word in words_of(trained[1], text)]
    nouns = {noun for row in NOUNS for noun in row[:2]}
    subjects = nouns | {row[0].lower() for row in PRONOUNS}
    adjectives = {row[0] for row in ADJECTIVES}
    articles = {"the", "a", "an"}
    main = {form.split()[0] for verb in VERBS for form in verb.english}
    kinds = {"article": articles, "noun": nouns, "adjective": adjectives}
    kinds |= {"subject": subjects, "verb": main, "object": nouns}
    assert text.endswith((".", "?")) and len(words) == len(text.split()) + 1
    for name, pairs in found.items():
        first, second = name.split(" → ")
        for a, b in pairs:
            assert words[a] in kinds[first], (text, name, words[a])
            assert words[b] in kinds[second], (text, name, words[b])
    verbs = [word for word in words if word in main]
    assert len(found["verb → object"]) == len(verbs) >= 1
    count = sum(word in articles for word in words)
    assert len(found["article → noun"]) == count


def test_most_attended(trained):
    model, tokenizer = trained
    text = "The small girl was reading."
    got = most_attended(model, tokenizer, text)
    whole = look(model, tokenizer, text, "").by_words()
    weights = torch.stack(whole.weights["encoder"])[:, 0, :, :-1, :-1]
    assert torch.equal(got, weights.argmax(-1)) and got.shape[:2] == weights.shape[:2]
    assert got.shape[:2] == (model.config.num_layers, model.config.num_heads)


def test_searches(trained):
    tokenizer = trained[1]
    texts = [
        "Turn the light off.",
        "She put her coat on.",
        "Turn the light off.",
        "He gave it to the man on the bus.",
        "The shirt is on his back.",
        "He came back.",
        "Give me something to write on.",
    ]
    assert split_verbs(tokenizer, texts) == [(texts[0], 3, 0), (texts[1], 4, 1)]
    texts = [
        "Tom forgot his keys.",
        "Tom told John about his keys.",
        "The dog wags its tail.",
        "Mary lost his keys.",
        "His name is Tom.",
        "They sold their house.",
    ]
    wanted = [(texts[0], 2, 0), (texts[2], 3, 1), (texts[5], 2, 0)]
    assert possessives(tokenizer, texts) == wanted


def test_link_shares_by_hand():
    """Two heads, three sentences of four words; the link is from word 3 to word 1."""
    cases = [("a sentence", 3, 1)] * 3
    links, none = [0, 2, 0, 1], [0, 2, 0, 0]  # what each word attends to most
    staring = [1, 1, 1, 1]  # every word looks at word 1: no link at all
    looked = [torch.tensor([[row, staring]]) for row in (links, links, none)]
    found = link_shares(looked, cases, ["turned", "put", "put"])
    assert list(found) == ["turned", "put"]
    assert found["turned"].tolist() == [[1.0, 1.0], [0.0, 1.0]]  # link, control
    assert found["put"].tolist() == [[0.5, 1.0], [0.0, 1.0]]


def test_a_head_is_scored_where_it_was_not_chosen():
    """One head knows each verb a little, the other one verb by heart and no other."""
    known = {"turned": 1.0, "put": 0.0, "threw": 0.0, "took": 0.0}
    shares = {
        verb: torch.tensor([[0.3, link], [0.0, 0.0]]) for verb, link in known.items()
    }
    found = scored_elsewhere(shares)
    assert found["turned"] == (0, pytest.approx(0.3), 0.0)  # not what it knows by heart
    assert [found[verb][0] for verb in ("put", "threw", "took")] == [1, 1, 1]
    assert all(found[verb][1] == 0 for verb in ("put", "threw", "took"))


def _gain_and_error(looked, cases, groups):
    """Mean gain over the groups, and its standard error, by NumPy."""
    scored = scored_elsewhere(link_shares(looked, cases, groups))
    gains = np.array([link - control for _, link, control in scored.values()])
    wanted = gains.mean(), gains.std(ddof=1) / len(gains) ** 0.5
    assert mean_gain(scored) == pytest.approx(wanted, abs=1e-5)
    return wanted


def test_heads_that_know_nothing_rarely_pass():
    """Heads that link some verbs by luck, in all of their sentences or in none.

    Each sentence counted by itself, such heads pass again and again.
    """
    generator, passed, naive = torch.Generator().manual_seed(4), 0, 0
    verbs = [f"verb {i % 8}" for i in range(80)]
    cases = [("a sentence", 5, 2)] * 80
    for _ in range(200):
        by_verb = torch.randint(8, (8, 4, 4, 8), generator=generator)
        looked = [by_verb[i % 8] for i in range(80)]
        gain, error = _gain_and_error(looked, cases, verbs)
        passed += gain > 2 * error
        gain, error = _gain_and_error(looked, cases, [str(i) for i in range(80)])
        naive += gain > 2 * error
    assert passed < 0.1 * 200 < 0.5 * 200 < naive


def test_a_link_in_all_heads(trained):
    link = link_weights(*trained, "Tom saw Mary.", "Mary", "Tom")
    pair = look(*trained, "Tom saw Mary.", "").by_words()
    assert link.words == pair.source and (link.at, link.to) == (2, 0)
    every = torch.stack(pair.weights["encoder"])[:, 0, :, 2].flatten(0, 1)
    assert torch.equal(link.rows, every) and link.row[0] == every[:, 0].max()


def test_verbs_and_particles_are_put_together():
    made = particle_sentences(300)
    assert len(set(made)) == 300 and made == particle_sentences(300)
    assert made != particle_sentences(300, seed=1)
    assert all(
        text.endswith(("off.", "down.", "away.", "back.", "up.")) for text in made
    )


def test_a_fixed_distance_is_a_rival(trained):
    """In the grammar the noun always follows its adjective: nothing to win there."""
    table = {row.name: row for row in compare_relations(*trained, count=80)}
    row = table["adjective → noun"]
    assert (row.distance, row.fixed) == (1, 1.0) and not row.passes
    row = table["article → noun"]
    assert row.passes and row.untrained < row.fixed < row.trained
    assert row.gain == pytest.approx(row.trained - row.fixed, abs=1e-5)
    state = torch.random.get_rng_state()
    compare_relations(*trained, count=40)
    assert torch.equal(state, torch.random.get_rng_state())


def test_figure_5_two_heads_have_two_structures(trained):
    """One head finds the noun also behind an adjective; another the word before."""
    model, tokenizer = trained
    rng, far, near, before = random.Random(7), [], [], []
    for _ in range(60):
        text, found = relation_sentence(rng)
        best = most_attended(model, tokenizer, text).flatten(0, 1)  # (L * H, words)
        for a, b in found["article → noun"]:
            (far if b - a > 1 else near).append(best[:, a] == b)
        before += [best[:, t] == t - 1 for t in range(1, best.shape[-1])]
    assert len(far) > 20
    far, near, before = (
        torch.stack(x).float().mean(dim=0) for x in (far, near, before)
    )
    noun, word_before = int(far.argmax()), int(before.argmax())
    assert far[noun] > 0.9 and near[noun] > 0.9
    assert before[word_before] > 0.4 and noun != word_before


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


@pytest.mark.parametrize("row", ["writes", "reads"])
def test_weights_are_set_beside_the_choice_of_the_same_token(row):
    """Token k comes from source word k, the weights are in one row, or in the other."""
    T = 5  # the start symbol and four tokens; four source words and the end symbol
    moved = torch.rand(T, T - 1) / 10
    weights = torch.rand(T, T) / 10
    for k in range(1, T):
        moved[k - 1, k - 1] = 0.9  # position k - 1 chooses token k
        weights[k if row == "reads" else k - 1, k - 1] = 0.9
    pair = AttentionMaps(
        [*(f"▁s{k}" for k in range(1, T)), "</s>"],
        ["<s>", *(f"▁t{k}" for k in range(1, T))],
        {"cross": [weights[None, None]]},
    )
    rho, first = agreement_of_words(pair, moved, 0, 0, row)
    assert rho.shape == first.shape == (T - 1,) and first.all()
    other = {"writes": "reads", "reads": "writes"}[row]
    assert agreement_of_words(pair, moved, 0, 0, other)[1].sum() <= 1
    # The same weights by a formula that is not ours; its import takes two seconds.
    from scipy.stats import spearmanr

    rows = weights[1:, :-1] if row == "reads" else weights[:-1, :-1]
    wanted = [spearmanr(a, b).statistic for a, b in zip(rows, moved, strict=False)]
    assert rho.tolist() == pytest.approx(wanted)
    with pytest.raises(ValueError, match="must be 'writes' or 'reads'"):
        agreement_of_words(pair, moved, 0, 0, "thinks")


def test_a_record_goes_on_from_one_of_the_same_model(trained, monkeypatch, tmp_path):
    """Of another model all is measured; of the same one only what it lacks."""
    pairs = [
        ("Tom forgot his keys.", "Tom vergaß seine Schlüssel."),
        ("She put her coat on.", "Sie zog ihren Mantel an."),
    ]
    test = Corpus("made", "test", pairs, "none", "nowhere")
    weighed, scored = [], []

    def weigh(model, tokenizer, pairs, changes):
        weighed.append(changes)
        return [
            {"kind": "cross", "layer": 0, "head": 1, "change": name, "rise": 0.1}
            for name in changes
        ]

    def score(*sides):
        scored.append(sides)
        return Score(float(len(scored)), "made")

    monkeypatch.setattr(heads, "load_corpus", lambda *_: test)
    monkeypatch.setattr(heads, "weigh_heads", weigh)
    monkeypatch.setattr(heads, "sacre_bleu", score)
    first = heads.record_heads(tmp_path / "first.json", seed=1)  # the seed is another
    assert weighed == [list(heads.CHANGES)] and len(scored) == 2
    assert first["kept_of"] is None and first["possessives"] == 2
    monkeypatch.setattr(heads, "read_evidence", lambda name: first)
    second = heads.record_heads(tmp_path / "second.json", seed=1)
    assert weighed[1:] == [["zeroed"]] and len(scored) == 2
    assert second["kept_of"] == first["environment"]
    changed = {r["change"]: r for r in second["rows"]}
    assert changed == {r["change"]: r for r in first["rows"]}
    assert second["bleu"] == first["bleu"] == 2 and changed["zeroed"]["bleu"] == 1
