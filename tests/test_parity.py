"""The same weights in torch, Hugging Face Marian and CTranslate2: the same numbers.

The model is the one that ships, trained on real sentences, so that a best token is best
by a margin and not by rounding.
"""

import argparse
import copy
import importlib.util
import json
import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from peers import (
    PEERS,
    compared,
    fingerprint,
    held_out_loss,
    interval,
    kept_rounds,
    race,
)
from training import SIZES, prepared

from transformer_lib.batches import make_batch, pad
from transformer_lib.corpora import grammar_split
from transformer_lib.decoding import beam_search, force_score, greedy_decode
from transformer_lib.export import CTranslate2Model, to_marian
from transformer_lib.export.ctranslate2 import export_ctranslate2
from transformer_lib.machine import fast_precisions
from transformer_lib.runs import load_pretrained
from transformer_lib.tokenizer import BOS, EOS, PAD
from transformer_lib.transformer import TransformerConfig, torch_twin

PAIRS = [
    ("Tom is reading a book.", "Tom liest ein Buch."),
    ("I don't know what to say.", "Ich weiß nicht, was ich sagen soll."),
    ("Where did you buy this?", "Wo hast du das gekauft?"),
    ("She closed the door quietly.", "Sie schloss leise die Tür."),
    ("We have to wait until tomorrow.", "Wir müssen bis morgen warten."),
    ("Help!", "Hilfe!"),
    ("My brother lives in Boston with his wife.", "Mein Bruder lebt in Boston."),
    ("It has been raining since this morning.", "Es regnet seit heute Morgen."),
]


def needs(package):
    """The package, or a skip that says loudly what was not checked."""
    try:
        return pytest.importorskip(package)
    except pytest.skip.Exception:
        warnings.warn(
            f"{package} is not installed: parity with it was NOT checked. "
            "`make test` installs it (extra: test).",
            stacklevel=2,
        )
        raise


@pytest.fixture(scope="module")
def shipped():
    model, tokenizer, _ = load_pretrained("tatoeba-en-de")
    return model.eval(), tokenizer


@pytest.fixture(scope="module")
def batch(shipped):
    """Sources (B, S), what the decoder reads (B, T), and what it should say (B, T)."""
    _, tokenizer = shipped
    src = pad([tokenizer.encode(english) + [EOS] for english, _ in PAIRS])
    targets = [tokenizer.encode(german) for _, german in PAIRS]
    tgt_in = pad([[BOS, *ids] for ids in targets])
    return src, tgt_in, targets


@pytest.fixture(scope="module")
def ours(shipped, batch):
    """Our log-probabilities, (B, T, V)."""
    src, tgt_in, _ = batch
    with torch.inference_mode():
        return shipped[0](src, tgt_in).log_softmax(dim=-1)


def assert_close(got, wanted, targets):
    """Equal to 1e-5 where a target token is read; padding may hold anything."""
    for row, ids in enumerate(targets):
        n = len(ids) + 1
        torch.testing.assert_close(got[row, :n], wanted[row, :n], atol=1e-5, rtol=1e-5)


def test_model_is_trained(shipped, batch):
    scores = force_score(shipped[0], batch[0], batch[2])
    tokens = sum(len(ids) + 1 for ids in batch[2])
    guessing = -math.log(shipped[0].config.vocab_size)
    assert sum(scores) / tokens > guessing / 2


def sinusoids(length, d):
    """The paper's table, written once more: sine even, cosine odd."""
    table = torch.zeros(length, d, dtype=torch.float64)
    for pos in range(length):
        for i in range(d // 2):
            angle = pos / 10000 ** (2 * i / d)
            table[pos, 2 * i], table[pos, 2 * i + 1] = math.sin(angle), math.cos(angle)
    return table.float()


def torch_log_probs(model, twin, src, tgt_in):
    """The model in torch's own modules: nn.Embedding, nn.Transformer, nn.Linear."""
    d = model.config.d_model
    weight = model.src_embedding.weight
    embed = torch.nn.Embedding.from_pretrained(weight)
    x, y = (embed(i) * math.sqrt(d) + sinusoids(i.shape[1], d) for i in (src, tgt_in))
    later = torch.ones(tgt_in.shape[1], tgt_in.shape[1]).triu(1).bool()
    unread = src == PAD  # True is forbidden there
    hidden = twin(
        x,
        y,
        tgt_mask=later,
        src_key_padding_mask=unread,
        memory_key_padding_mask=unread,
    )
    return torch.nn.functional.linear(hidden, weight).log_softmax(dim=-1)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_torch_log_probabilities(shipped, batch, ours):
    src, tgt_in, targets = batch
    twin = torch_twin(shipped[0]).eval()
    assert_close(torch_log_probs(shipped[0], twin, src, tgt_in), ours, targets)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_torch_greedy(shipped, batch):
    """Greedy decoding by a plain loop over torch's own model."""
    src, got = batch[0][:4], greedy_decode(shipped[0], batch[0][:4])
    twin = torch_twin(shipped[0]).eval()
    for row, ids in zip(src, got, strict=True):
        row, out = row[row != PAD][None], []
        while len(out) < row.shape[1] + 49:
            log_p = torch_log_probs(shipped[0], twin, row, torch.tensor([[BOS, *out]]))
            if (best := int(log_p[0, -1].argmax())) == EOS:
                break
            out.append(best)
        assert ids == out


@pytest.fixture(scope="module")
def hugging_face(shipped):
    needs("transformers")
    return to_marian(shipped[0])


@torch.no_grad()
def test_marian_log_probabilities(hugging_face, batch, ours):
    src, tgt_in, targets = batch
    logits = hugging_face(
        input_ids=src, attention_mask=src != PAD, decoder_input_ids=tgt_in
    ).logits
    assert_close(logits.log_softmax(dim=-1), ours, targets)


@torch.no_grad()
def test_marian_greedy(hugging_face, shipped, batch):
    src = batch[0]
    out = hugging_face.generate(
        input_ids=src,
        attention_mask=src != PAD,
        num_beams=1,
        do_sample=False,
        max_new_tokens=60,
        forced_eos_token_id=None,
    )
    theirs = [[i for i in row if i not in (PAD, BOS, EOS)] for row in out.tolist()]
    assert theirs == greedy_decode(shipped[0], src)


@torch.no_grad()
def test_marian_beam_without_penalty(hugging_face, shipped, batch):
    """With alpha 0 the two penalties agree; ours is never the less probable."""
    src = batch[0]
    out = hugging_face.generate(
        input_ids=src,
        attention_mask=src != PAD,
        num_beams=4,
        do_sample=False,
        length_penalty=0.0,
        early_stopping="never",
        max_new_tokens=60,
        forced_eos_token_id=None,
    )
    theirs = [[i for i in row if i not in (PAD, BOS, EOS)] for row in out.tolist()]
    found = beam_search(shipped[0], src, 4, alpha=0.0)
    for hypotheses, score in zip(
        found, force_score(shipped[0], src, theirs), strict=True
    ):
        assert hypotheses[0].log_prob > score - 1e-4
    same = sum(h[0].ids == ids for h, ids in zip(found, theirs, strict=True))
    assert same >= len(src) - 1


def without_special(rows):
    return [[i for i in row if i not in (PAD, BOS, EOS)] for row in rows]


ASKED = {
    "n-best": {},
    "a prefix": {"prefix": "Ich"},
    "a least length": {"min_length": 14},
    "both": {"prefix": "Es ist", "min_length": 12},
}


@torch.no_grad()
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_marian_with_prefix_least_length_and_n_best(
    hugging_face, shipped, batch, asked
):
    """What transformers finds, ours finds or something at least as probable."""
    (model, tokenizer), src = shipped, batch[0]
    first = tokenizer.encode(asked.get("prefix", ""))
    least = asked.get("min_length", 0)
    out = hugging_face.generate(
        input_ids=src,
        attention_mask=src != PAD,
        decoder_input_ids=torch.tensor([[BOS, *first]] * len(src)),
        num_beams=4,
        num_return_sequences=2,
        do_sample=False,
        length_penalty=0.0,
        early_stopping="never",
        max_new_tokens=60,
        min_length=least + 1 if least else 0,  # it counts the start symbol
        forced_eos_token_id=None,
    )
    theirs = without_special(out.tolist())
    found = beam_search(
        model, src, 4, 0.0, n_best=2, min_length=least, prefixes=[first] * len(src)
    )
    same = 0
    for row, two in zip(src, found, strict=True):
        for k, one in enumerate(two):
            ids = theirs.pop(0)
            assert one.ids[: len(first)] == first and len(one.ids) >= least
            forced = force_score(model, row[None], [one.ids])[0]
            assert one.log_prob == pytest.approx(forced, abs=1e-3)
            if not k:
                assert one.log_prob > force_score(model, row[None], [ids])[0] - 1e-4
            same += one.ids == ids
    assert same >= 2 * len(src) - 2


@torch.no_grad()
def test_an_ensemble_is_the_mean_of_marians_probabilities(hugging_face, shipped, batch):
    """Greedy decoding with two models, by a plain loop over those of transformers."""
    torch.manual_seed(0)
    model, other = shipped[0], copy.deepcopy(shipped[0])
    for weight in other.parameters():
        weight.mul_(1 + 0.1 * torch.randn_like(weight))
    twins = hugging_face, to_marian(other)
    src = batch[0][:4]
    found = beam_search(model, src, 1, 0.0, 20, ensemble=[other])
    for row, (best, *_) in zip(src, found, strict=True):
        row, out, log_prob = row[row != PAD][None], [], 0.0
        while EOS not in out and len(out) < row.shape[1] + 20:
            read = torch.tensor([[BOS, *out]])
            said = [
                twin(input_ids=row, decoder_input_ids=read).logits for twin in twins
            ]
            p = sum(logits[0, -1].softmax(dim=-1) for logits in said) / len(said)
            out.append(int(p.argmax()))
            log_prob += p.max().log().item()
        assert best.ids == [i for i in out if i != EOS]
        assert best.log_prob == pytest.approx(log_prob, abs=1e-3)


@pytest.fixture(scope="module")
def engine(shipped, tmp_path_factory):
    needs("ctranslate2")
    folder = tmp_path_factory.mktemp("ct2") / "it"
    return CTranslate2Model(export_ctranslate2(*shipped, folder))


def test_ctranslate2_log_probabilities(engine, batch, ours):
    src, _, targets = batch
    source = [[i for i in row if i not in (PAD, EOS)] for row in src.tolist()]
    found = engine.token_scores(source, targets)
    for row, (got, ids) in enumerate(zip(found, targets, strict=True)):
        wanted = ours[row].gather(-1, torch.tensor([*ids, EOS])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(got), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_ctranslate2_with_prefix_and_least_length(engine, shipped, batch, asked):
    """Greedily where a length is asked for.

    Its search gives what may not be said to all other tokens: another order.
    """
    (model, tokenizer), src = shipped, batch[0]
    first, least = tokenizer.encode(asked.get("prefix", "")), asked.get("min_length", 0)
    beam = 1 if least else 4
    out = engine.engine.translate_batch(
        [[engine.names[i] for i in row] for row in without_special(src.tolist())],
        target_prefix=[[engine.names[i] for i in first]] * len(src),
        beam_size=beam,
        length_penalty=0,
        min_decoding_length=least,
    )
    theirs = [[engine.numbers[name] for name in one.hypotheses[0]] for one in out]
    settings = {"min_length": least, "prefixes": [first] * len(src)}
    ours = [best.ids for best, *_ in beam_search(model, src, beam, 0.0, **settings)]
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    assert same == len(src) if beam == 1 else same >= len(src) - 1


def test_ctranslate2_greedy(engine, shipped, batch):
    model, tokenizer = shipped
    theirs = engine([english for english, _ in PAIRS], beam_size=1)
    assert theirs == [tokenizer.decode(ids) for ids in greedy_decode(model, batch[0])]


@pytest.fixture
def benchmark(monkeypatch):
    """benchmarks/decoding.py as a module."""
    needs("transformers")
    needs("ctranslate2")
    folder = Path(__file__).parents[1] / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    spec = importlib.util.spec_from_file_location("decoding_", folder / "decoding.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)


def test_benchmark_runs(benchmark, tmp_path, capsys):
    """`python benchmarks/decoding.py --quick`: the same outputs; it can be resumed."""
    asked = [
        "--quick",
        "--threads",
        str(torch.get_num_threads()),
        "--rounds",
        str(tmp_path / "rounds.json"),
        "--out",
        str(tmp_path / "a.json"),
    ]
    benchmark.main(asked)
    record = json.loads((tmp_path / "a.json").read_text())
    results = record["results"]
    case = results["shipped, batch 4"]["engines"]
    names = {"Hugging Face, by length", "Hugging Face, as fed", "CTranslate2 float32"}
    for name in names:
        assert case[name]["as_ours"] >= 6, name  # their penalties are others
    ours = {f"ours {kind}" for kind in (*fast_precisions("cpu"), "int8")}
    assert case.keys() == names | ours | {"CTranslate2 int8"}
    lengths = {row["tokens"] for row in results["tiny, batch 2"]["engines"].values()}
    assert lengths == {4 * 7}  # all write as many: 6 and the end
    assert record["data_sha256"] and record["environment"]["versions"]
    assert "tokens/s" in capsys.readouterr().out
    first = json.loads((tmp_path / "rounds.json").read_text())["cases"]
    benchmark.main(asked)
    assert "going on" in capsys.readouterr().out
    second = json.loads((tmp_path / "rounds.json").read_text())["cases"]
    for name, each in first.items():
        assert each["seconds"] == second[name]["seconds"]  # two rounds were enough


def test_benchmark_is_sure_of_its_ratios(benchmark):
    """The interval is Student's, as scipy has it, and narrow enough or not."""
    from scipy import stats

    mine, theirs = [1.0, 1.1, 0.9, 1.0, 1.05], [2.0, 2.1, 1.95, 2.2, 2.0]
    found = benchmark.ratio_of(mine, theirs)
    logs = np.log(np.array(theirs) / mine)
    low, high = stats.t.interval(0.95, 4, logs.mean(), stats.sem(logs))
    wanted = np.exp([logs.mean(), low, high])
    got = [found["ratio"], found["low"], found["high"]]
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    peer = "Hugging Face, by length"
    assert not benchmark.sure({"ours float32": mine, peer: theirs})
    steady = {"ours float32": [1.0] * 4, peer: [2.0, 2.02, 1.98, 2.0]}
    assert benchmark.sure(steady)
    assert not benchmark.sure({name: s[:3] for name, s in steady.items()})


def test_peers_race_on_equal_batches(tmp_path):
    """benchmarks/peers.py: each in a process of its own, the same tokens for both."""
    needs("transformers")
    prepared(grammar_split("train", 400), str(tmp_path), 340)
    settings = {"size": "tiny", "threads": 1, "max_tokens": 200, "updates": 2}
    asked = argparse.Namespace(**settings, rounds=2, max_rounds=2, until=math.inf)
    names, log = ["ours", "Hugging Face, by length"], tmp_path / "rounds.jsonl"
    rounds = race(names, tmp_path / "data", kept_rounds(log), log, asked)
    with open(log, "a") as file:
        file.write('{"ours": {"tok')  # killed while it wrote
    assert kept_rounds(log) == rounds and len(rounds) == 2
    assert race(names, tmp_path / "data", kept_rounds(log), log, asked) == rounds
    table = compared(rounds, names[1])
    ours, theirs = (table[name]["rounds"] for name in names)
    for key in "tokens", "places":
        assert [run[key] for run in ours] == [run[key] for run in theirs]
    assert ours[0]["tokens"] != ours[1]["tokens"]  # other batches in each round
    for a, b in zip(ours, theirs, strict=True):
        assert a["losses"][0] == pytest.approx(b["losses"][0], abs=1e-5)
    assert table[names[1]]["ours_times"] > 0
    assert interval([2.0, 2.0, 2.0]) == (pytest.approx(2.0), 0.0)
    assert interval([1.0, 4.0])[0] == pytest.approx(2.0)


def test_rounds_of_other_code_or_settings_are_not_mixed(tmp_path):
    """benchmarks/peers.py: what was measured before counts for the same run only."""
    ready = prepared(grammar_split("train", 400), str(tmp_path), 340)
    asked = argparse.Namespace(size="tiny", threads=1, max_tokens=200, updates=2)
    known = fingerprint(asked, ready)
    assert fingerprint(asked, ready) == known
    for name in vars(asked):
        other = argparse.Namespace(**vars(asked) | {name: 3})
        assert fingerprint(other, ready) != known


def test_contenders_begin_with_the_same_loss(tmp_path):
    """benchmarks/peers.py: same weights, same held-out loss, and training lowers it."""
    needs("transformers")
    ready = prepared(grammar_split("train", 400), str(tmp_path), 340)
    held_out = make_batch(ready.valid, range(32))
    config = TransformerConfig(ready.tokenizer.vocab_size, **SIZES["tiny"])
    first = {}
    for name in ("ours", "Hugging Face, by length", "torch, by length"):
        contender = PEERS[name](config)
        first[name] = held_out_loss(contender, held_out)
        for _ in range(3):
            contender.update(held_out)
        assert held_out_loss(contender, held_out) < first[name], name
    assert first == pytest.approx(dict.fromkeys(first, first["ours"]), abs=1e-5)
