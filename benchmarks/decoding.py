"""Beam search, side by side with peers that hold the same weights.

    python benchmarks/decoding.py                  # 11 minutes on a quiet machine
    python benchmarks/decoding.py --minutes 5      # the same rounds go on
    python benchmarks/decoding.py --quick          # tiny, seconds, shows that it runs
    python benchmarks/decoding.py --device cuda    # without int8

Two models: the one that ships, on sentences of Tatoeba's test set, and one of the
paper's base size with random weights, where no output ends before 24 tokens. Two ways:
32 sentences at once, fed by length, and one by one. Beam 4. From ids to ids: no text.

Each round runs every engine once, the order turning. The figure of interest is the
ratio of two engines in the same round; over the rounds it has a mean (of its logarithm)
and a 95 % interval. Rounds go on until each interval of our lines against the peers is
within 5 %, or the minutes are over. After each round all is written to --rounds, and
the next call goes on from there, if code, versions and settings are the same.

Hugging Face's `generate` keeps a finished sentence in its batch, and its length penalty
is the length to the power alpha. "as fed" is the order of the file, as most people feed
it; "by length" sorts first, as ours and CTranslate2 do. Writes
transformer_lib/evidence/benchmarks/decoding.json (or decoding-cuda.json).

Record: benchmarks/decoding*.json
"""

import argparse
import contextlib
import hashlib
import importlib.util
import json
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch
from kept import keep, out_file
from peers import interval

from transformer_lib.batches import pad
from transformer_lib.corpora import load_corpus
from transformer_lib.decoding import CachedSteps, beam_search, search
from transformer_lib.export import to_int8, to_marian
from transformer_lib.export.common import piece_names
from transformer_lib.export.ctranslate2 import ctranslate2_spec
from transformer_lib.machine import PRECISIONS, environment_record, fast_precisions
from transformer_lib.runs import load_pretrained
from transformer_lib.storage import write_json
from transformer_lib.tokenizer import BOS, EOS, PAD
from transformer_lib.transformer import Transformer, TransformerConfig, evaluating
from transformer_lib.translator import Translator

ROOT = Path(__file__).parents[1]
BASE = {"vocab_size": 8000, "dropout": 0.0}
TINY = {"vocab_size": 200, "d_model": 64, "num_heads": 2, "num_layers": 1}
BEAM, ALPHA, EXTRA = 4, 0.6, 50


# --- what is decoded ------------------------------------------------------------------


class Case:
    """A model, its sources, and how they are fed.

    Args:
        model: The model.
        rows: Source ids of each sentence, ended by the end symbol, in a file's order.
        batch: Sentences at once.
        length: Tokens of each output; as the model likes if None.
        names: A name for each id: CTranslate2 reads and writes names.
    """

    def __init__(self, model, rows, batch, length, names):
        self.model, self.rows, self.batch = model, rows, batch
        self.length, self.names = length, names

    def groups(self, by_length: bool = True) -> list[list[int]]:
        """Indices of the sentences that are decoded together."""
        order = list(range(len(self.rows)))
        if by_length:
            order.sort(key=lambda i: -len(self.rows[i]))
        return [order[i : i + self.batch] for i in range(0, len(order), self.batch)]


def shipped(batch: int, count: int, quick: bool = False) -> Case:
    """The shipped model and sentences from all over the test set."""
    model, tokenizer, about = load_pretrained("tatoeba-en-de", "cpu")
    longest = about["recipe"]["max_length"]  # of what it was trained on
    ids = tokenizer.encode_all([source for source, _ in test_pairs(quick)])
    ids = [row for row in ids if len(row) < longest]
    rows = [[*row, EOS] for row in ids[:: max(1, len(ids) // count)][:count]]
    return Case(model, rows, batch, None, piece_names(tokenizer))


def test_pairs(quick: bool) -> list[tuple[str, str]]:
    """Tatoeba's test set; where all is tiny, short sentences of the grammar will do."""
    pairs = load_corpus("grammar-en-de" if quick else "tatoeba-en-de", "test").pairs
    return [pair for pair in pairs if len(pair[0]) < 28] if quick else pairs


def forced(settings: dict, batch: int, count: int, length: int) -> Case:
    """Random weights and sources of up to 30 tokens; the end symbol gets logit 0.

    Among thousands of logits spread round 0, one of 0 is never among the best. So no
    beam ends early, and all engines write the same number of tokens.
    """
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(**settings)).eval()
    with torch.no_grad():
        model.output.weight[[PAD, BOS, EOS]] = 0.0
    drawn = torch.Generator().manual_seed(1)
    ids = torch.randint(4, settings["vocab_size"], (count, 29), generator=drawn)
    rows = [[*row[: 29 - i % 15], EOS] for i, row in enumerate(ids.tolist())]
    names = ["<pad>", "<unk>", "<s>", "</s>"]
    names += [f"t{i}" for i in range(4, settings["vocab_size"])]
    return Case(model, rows, batch, length, names)


# --- engines: functions that give the ids of each sentence ----------------------------


def ours(case: Case, model: Transformer, precision=None):
    @torch.inference_mode()
    def run():
        found = {}
        for some in case.groups():
            src_ids = pad([case.rows[i] for i in some]).to(model.device)
            with contextlib.ExitStack() as stack:
                if precision is not None:
                    kind = model.device.type
                    stack.enter_context(torch.autocast(kind, precision))
                if case.length is None:
                    best = beam_search(model, src_ids, BEAM, ALPHA, EXTRA)
                else:
                    best = to_length(model, src_ids, case.length)
            found |= zip(some, (hypotheses[0].ids for hypotheses in best), strict=True)
        return [found[i] for i in range(len(case.rows))]

    return run


def to_length(model: Transformer, src_ids, length: int):
    """Ours with outputs of a given length."""
    limits = torch.full((len(src_ids),), length, device=src_ids.device)
    with evaluating(model):
        return search(CachedSteps(model, src_ids), limits, BEAM, 0.0)


def hugging_face(case: Case, by_length: bool, kind=torch.float32):
    twin = to_marian(case.model).to(case.model.device, kind).eval()

    @torch.inference_mode()
    def run():
        found = {}
        for some in case.groups(by_length):
            src_ids = pad([case.rows[i] for i in some]).to(case.model.device)
            how = {
                "max_new_tokens": src_ids.shape[1] - 1 + EXTRA,
                "length_penalty": ALPHA,
            }
            if case.length is not None:
                how = {
                    "min_new_tokens": case.length,
                    "length_penalty": 0.0,
                    "max_new_tokens": case.length + 1,
                    "early_stopping": True,
                    "forced_eos_token_id": EOS,
                }
            out = twin.generate(
                input_ids=src_ids,
                attention_mask=src_ids != PAD,
                num_beams=BEAM,
                do_sample=False,
                **how,
            )
            rows = [
                [i for i in row if i not in (PAD, BOS, EOS)] for row in out.tolist()
            ]
            found |= zip(some, rows, strict=True)
        return [found[i] for i in range(len(case.rows))]

    return run


def ctranslate2_engine(case: Case, kind: str, folder: Path, threads: int):
    import ctranslate2

    path = folder / kind
    path.mkdir(parents=True)
    ctranslate2_spec(case.model, case.names, kind).save(str(path))
    engine = ctranslate2.Translator(
        str(path),
        device=case.model.device.type,
        compute_type=kind,
        intra_threads=threads,
        inter_threads=1,
    )
    number = {name: i for i, name in enumerate(case.names)}
    source = [[case.names[i] for i in row[:-1]] for row in case.rows]  # it adds the end
    longest = max(map(len, source))
    how = {"max_decoding_length": longest + EXTRA, "length_penalty": ALPHA}
    if case.length is not None:
        how = {
            "max_decoding_length": case.length,
            "min_decoding_length": case.length,
            "length_penalty": 0.0,
        }

    def run():
        found = {}
        for some in case.groups():
            out = engine.translate_batch(
                [source[i] for i in some], beam_size=BEAM, **how
            )
            ids = [[number[name] for name in one.hypotheses[0]] for one in out]
            found |= zip(some, ids, strict=True)
        return [found[i] for i in range(len(case.rows))]

    return run


def engines(case: Case, folder: Path, given) -> dict:
    """What runs in a case, by name."""
    bits = fast_precisions(case.model.device.type)[1:]
    runs = {
        "ours float32": ours(case, case.model),
        **{f"ours {kind}": ours(case, case.model, PRECISIONS[kind]) for kind in bits},
        "Hugging Face, by length": hugging_face(case, by_length=True),
    }
    if given.device == "cuda":
        runs |= {
            f"Hugging Face {kind}, by length": hugging_face(
                case, True, PRECISIONS[kind]
            )
            for kind in bits
        }
    if given.ctranslate2:
        runs["CTranslate2 float32"] = ctranslate2_engine(
            case, "float32", folder, given.threads
        )
    if case.length is None and case.batch > 1:
        runs["Hugging Face, as fed"] = hugging_face(case, by_length=False)
    if given.device == "cpu":
        runs["ours int8"] = ours(case, to_int8(case.model))
    if given.device == "cpu" and given.ctranslate2:
        runs["CTranslate2 int8"] = ctranslate2_engine(
            case, "int8", folder, given.threads
        )
    return runs


# --- rounds ---------------------------------------------------------------------------


def ratio_of(mine: list[float], theirs: list[float]) -> dict:
    """How many times faster, from the seconds of the same rounds, two or more."""
    ratio, half = interval([b / a for a, b in zip(mine, theirs, strict=True)])
    return {
        "ratio": ratio,
        "low": ratio / (1 + half),
        "high": ratio * (1 + half),
        "rounds": len(mine),
    }


def sure(seconds: dict) -> bool:
    """Whether each interval of our lines against the peers is within 5 %."""
    if len(seconds["ours float32"]) < 4:
        return False
    lines = [name for name in seconds if name in ("ours float32", "ours int8")]
    peers = [name for name in seconds if not name.startswith("ours")]
    found = [ratio_of(seconds[a], seconds[b]) for a in lines for b in peers]
    return all(r["high"] < 1.05 * r["ratio"] for r in found)


def enough(seconds: dict, quick: bool) -> bool:
    """Whether no further round is wanted; where all is tiny, two will do."""
    return len(seconds["ours float32"]) >= 2 if quick else sure(seconds)


def one_round(runs: dict, seconds: dict) -> None:
    """Run every engine once, beginning with another one than last time."""
    names = list(runs)
    start = len(seconds[names[0]]) % len(names)
    for name in names[start:] + names[:start]:
        begin = time.perf_counter()
        runs[name]()
        seconds[name].append(time.perf_counter() - begin)


def table_of(outputs: dict, seconds: dict) -> dict:
    """The figures of a case."""
    table, reference = {}, outputs["ours float32"]
    for name, times in seconds.items():
        tokens = sum(len(ids) + 1 for ids in outputs[name])
        table[name] = {
            "seconds": [round(t, 4) for t in times],
            "tokens": tokens,
            "tokens_per_second": tokens / statistics.median(times),
            "as_ours": sum(map(list.__eq__, outputs[name], reference)),
        }
    result = {"engines": table, "sentences": len(reference)}
    for line in ("ours float32", "ours bfloat16", "ours float16", "ours int8"):
        if line in seconds:
            result[f"{line} over"] = {
                peer: ratio_of(seconds[line], seconds[peer])
                for peer in seconds
                if peer != line
            }
    return result


def show(says: str, result: dict) -> None:
    print(f"\n{says}\n{'':26} tokens/s  as ours  int8 is  float32 is ... times it")
    for name, row in result["engines"].items():
        ratios = ""
        for line in ("ours int8", "ours float32"):
            r = result.get(f"{line} over", {}).get(name)
            words = f"{r['ratio']:.2f} ({r['low']:.2f}-{r['high']:.2f})" if r else ""
            ratios += f"  {words:18}"
        print(
            f"  {name:24} {row['tokens_per_second']:8,.0f} "
            f"{row['as_ours']:4}/{result['sentences']:<4}{ratios}"
        )


def quality(quick: bool) -> dict:
    """BLEU of the shipped model in float32 and in int8."""
    from sacrebleu.metrics import BLEU

    model, tokenizer, about = load_pretrained("tatoeba-en-de", "cpu")
    pairs, metric, scores = test_pairs(quick)[: 2 if quick else None], BLEU(), {}
    texts, references = [s for s, _ in pairs], [[t for _, t in pairs]]
    for name, one in (("float32", model), ("int8", to_int8(model))):
        said = Translator(one, tokenizer, about)(texts, tell=lambda note: None)
        scores[name] = metric.corpus_score(said, references).score
    return {
        "sentences": len(pairs),
        "engines": scores,
        "signature": str(metric.get_signature()),
    }


def cases_of(given) -> dict:
    """Name -> what it is, and a function that makes it."""
    if given.quick:
        return {
            "shipped, batch 4": ("quick", lambda: shipped(4, 8, quick=True)),
            "tiny, batch 2": ("quick", lambda: forced(TINY, 2, 4, 6)),
        }
    model, base = "The shipped model", "Base size, V 8,000, random weights, 24 tokens"
    many = given.batch
    return {
        f"base, batch {many}": (
            f"{base}, {many} at once",
            lambda: forced(BASE, many, many, 24),
        ),
        f"shipped, batch {many}": (
            f"{model}, {many} sentences at once",
            lambda: shipped(many, 4 * many),
        ),
        "shipped, batch 1": (f"{model}, one by one", lambda: shipped(1, 12)),
        "base, batch 1": (f"{base}, one by one", lambda: forced(BASE, 1, 2, 24)),
    }


def code() -> str:
    """What the rounds ran: SHA-256 of the library and of this script."""
    files = sorted((ROOT / "transformer_lib").rglob("*.py"))
    parts = [file.read_bytes() for file in (*files, Path(__file__))]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def go_on(given, cases: dict, fingerprint: dict) -> dict:
    """Rounds of all cases until they are sure, or the minutes are over."""
    state = {"fingerprint": fingerprint, "cases": {}}
    if given.rounds.is_file():
        before = json.loads(given.rounds.read_text("utf-8"))
        if before["fingerprint"] == fingerprint:
            state = before
            print(f"going on from {given.rounds}")
        else:
            print(f"{given.rounds} is of other code or settings: all begins again")
    end = time.monotonic() + 60 * given.minutes
    if given.device == "cpu" and "bleu" not in state:
        state["bleu"] = quality(given.quick)
        write_json(given.rounds, state)
    for number, (name, (says, make)) in enumerate(cases.items()):
        kept = state["cases"].setdefault(name, {"says": says})
        seconds = kept.setdefault("seconds", {})
        if seconds and enough(seconds, given.quick):
            continue
        # An equal share of what is left, for the rounds.
        share = (end - time.monotonic()) / (len(cases) - number)
        case = make()
        case.model.to(given.device)
        with tempfile.TemporaryDirectory() as folder:
            runs = engines(case, Path(folder), given)
            outputs = {each: run() for each, run in runs.items()}  # warms up
            kept["outputs"], stop = outputs, time.monotonic() + share
            for each in runs:
                seconds.setdefault(each, [])
            rows = json.dumps(case.rows).encode()
            kept["data_sha256"] = hashlib.sha256(rows).hexdigest()
            while len(seconds["ours float32"]) < 2 or (
                not enough(seconds, given.quick) and time.monotonic() < stop
            ):
                one_round(runs, seconds)
                write_json(given.rounds, state)
        print(
            f"{name}: {len(seconds['ours float32'])} rounds, "
            f"{'sure' if sure(seconds) else 'not within 5 % yet'}"
        )
    return state


def main(arguments=None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny, one round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32, help="sentences at once")
    parser.add_argument("--cases", nargs="+", help="the names of some of them")
    parser.add_argument("--minutes", type=float, default=11.0)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=Path, help="where rounds are kept")
    parser.add_argument("--out", type=out_file, help="where the figures are written")
    given = parser.parse_args(arguments)
    name = "decoding" if given.device == "cpu" else f"decoding-{given.device}"
    place = tempfile.TemporaryDirectory() if given.quick else contextlib.nullcontext()
    torch.set_num_threads(given.threads)
    given.ctranslate2 = importlib.util.find_spec("ctranslate2") is not None
    names = ("transformers", "ctranslate2")[: 1 + given.ctranslate2]
    peers = {each: version(each) for each in names}
    environment = environment_record(given.device)
    fingerprint = {
        "threads": given.threads,
        "device": given.device,
        "batch": given.batch,
        "peers": peers,
        "versions": environment["versions"],
        "code": code(),
        "hardware": environment["hardware"],
    }
    cases = cases_of(given)
    if given.cases:
        cases = {each: cases[each] for each in given.cases}
    with place as folder:
        given.rounds = (
            given.rounds
            or (Path(folder) if given.quick else ROOT / "_build" / "benchmarks")
            / f"{name}-rounds.json"
        )
        given.rounds.parent.mkdir(parents=True, exist_ok=True)
        state = go_on(given, cases, fingerprint)
    results = {}
    for each, case in state["cases"].items():
        results[each] = {
            "says": case["says"],
            "data_sha256": case["data_sha256"],
            **table_of(case["outputs"], case["seconds"]),
        }
        show(case["says"], results[each])
    data = "".join(case["data_sha256"] for case in results.values())
    record = {
        "benchmark": f"beam search on {given.device}, same weights",
        "settings": {
            "threads": given.threads,
            "beam_size": BEAM,
            "alpha": ALPHA,
            "base": BASE,
        },
        "data_sha256": hashlib.sha256(data.encode()).hexdigest(),
        "environment": environment,
        "peers": peers,
        "bleu": state.get("bleu"),
        "results": results,
    }
    print(f"\nBLEU {record['bleu']}")
    keep(record, f"benchmarks/{name}", given.out, given.quick)
    return record


if __name__ == "__main__":
    main()
