"""Beam search, side by side with peers that hold the same weights.

    python benchmarks/decoding.py            # the base model on a CPU: minutes
    python benchmarks/decoding.py --device cuda --batch 64
    python benchmarks/decoding.py --quick    # a tiny model: seconds, shows that it runs

A model of the paper's base size with random weights, 16 sources of up to 30 tokens,
beam 4, 32 output tokens: ours with and without a cache, Hugging Face's generate,
CTranslate2 in float32 and int8. The rounds are interleaved, so that a slow moment of
the machine hits all alike. Writes transformer_lib/evidence/benchmarks/decoding.json (or
decoding-cuda.json, where int8 and the run without a cache are left out).

Ours and Hugging Face's write 32 tokens and then the end symbol, in 33 steps: its
generate forces the end at the limit, as its Marian models ask. (CTranslate2 stops at
the limit without it, in 32.) The last column: how many outputs are among the four beams
that ours ends with. Which of the four is first can differ: ours adds the price of the
forced end, theirs does not.
"""

import argparse
import hashlib
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch
from kept import keep, out_file

from transformer_lib.decoding import CachedSteps, FullSteps, search
from transformer_lib.serving import ctranslate2_spec, to_marian
from transformer_lib.text import BOS, EOS, PAD
from transformer_lib.training import environment_record
from transformer_lib.transformer import Transformer, TransformerConfig

BASE = {"vocab_size": 8000, "dropout": 0.0}
TINY = {"vocab_size": 200, "d_model": 64, "num_heads": 2, "num_layers": 1}


def build(settings: dict) -> Transformer:
    """Random weights; the end symbol gets logit 0, so that no beam ends early.

    Among thousands of logits spread round 0, one of 0 is never among the best. So all
    engines write the same number of tokens.
    """
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(**settings)).eval()
    with torch.no_grad():
        model.output.weight[[PAD, BOS, EOS]] = 0.0
    return model


def sources(vocab_size: int, count: int = 16, longest: int = 30) -> torch.Tensor:
    """Random sources, longest first, (count, longest)."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, vocab_size, (count, longest), generator=generator)
    for i in range(count):
        length = max(longest // 2, longest - i // 2)
        ids[i, length - 1], ids[i, length:] = EOS, PAD
    return ids


def ours(kind, model, src_ids, beam_size, length):
    limits = torch.full((len(src_ids),), length, device=src_ids.device)

    def run():
        with torch.inference_mode():
            steps = kind(model, src_ids)
            found = search(steps, limits, beam_size, alpha=0.0, n_best=beam_size)
        return [[h.ids for h in hypotheses] for hypotheses in found]

    return run


def hugging_face(model, src_ids, beam_size, length):
    twin, mask = to_marian(model).to(src_ids.device), src_ids != PAD

    def run():
        with torch.inference_mode():
            out = twin.generate(
                input_ids=src_ids,
                attention_mask=mask,
                num_beams=beam_size,
                do_sample=False,
                length_penalty=0.0,
                early_stopping=True,
                min_new_tokens=length,
                max_new_tokens=length + 1,
                forced_eos_token_id=EOS,
            )
        assert (out[:, -1] == EOS).all()
        return [[row] for row in out[:, 1:-1].tolist()]  # without start and end

    return run


def token_names(vocab_size: int) -> list[str]:
    """A name for each id; CTranslate2 reads and writes names."""
    return ["<pad>", "<unk>", "<s>", "</s>", *(f"t{i}" for i in range(4, vocab_size))]


def ctranslate2_engine(model, src_ids, beam_size, length, kind, folder, threads):
    import ctranslate2

    path = Path(folder) / kind
    path.mkdir()
    names = token_names(model.config.vocab_size)
    ctranslate2_spec(model, names, kind).save(str(path))
    engine = ctranslate2.Translator(
        str(path), device=src_ids.device.type, compute_type=kind,
        intra_threads=threads, inter_threads=1,
    )  # fmt: skip
    number = {name: i for i, name in enumerate(names)}
    source = [
        [names[i] for i in row if i not in (PAD, EOS)] for row in src_ids.tolist()
    ]

    def run():
        found = engine.translate_batch(
            source,
            beam_size=beam_size,
            length_penalty=0.0,
            min_decoding_length=length,
            max_decoding_length=length,
        )
        return [[[number[name] for name in r.hypotheses[0]]] for r in found]

    return run


def measure(runs: dict, rounds: int, length: int) -> tuple[dict, dict]:
    """Seconds of each implementation in each round, and what it wrote."""
    outputs = {name: run() for name, run in runs.items()}  # the first run warms up
    seconds = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            outputs[name] = run()
            seconds[name].append(time.perf_counter() - start)
    for name, rows in outputs.items():
        assert all(len(ids) == length for (ids, *_) in rows), name
    return seconds, outputs


def report(seconds: dict, outputs: dict, tokens: int) -> dict:
    """Print the table; give its figures."""
    reference = outputs.get("ours, no cache", outputs["ours"])
    peer = seconds["Hugging Face"]
    print(f"{'implementation':22} min s   median s  tokens/s   x HF   in beam")
    table = {}
    for name, times in seconds.items():
        least, median = min(times), statistics.median(times)
        pairs = zip(outputs[name], reference, strict=True)
        same = sum(ids in beams for (ids, *_), beams in pairs)
        table[name] = {
            "seconds": [round(t, 4) for t in times],
            "min_seconds": round(least, 4),
            "median_seconds": round(median, 4),
            "tokens_per_second": round(tokens / least, 1),
            "tokens_per_second_median": round(tokens / median, 1),
            "times_hugging_face": round(min(peer) / least, 3),
            "times_hugging_face_median": round(statistics.median(peer) / median, 3),
            "in_beam_of_uncached": f"{same}/{len(reference)}",
        }
        print(
            f"{name:22} {least:6.2f} {median:9.2f} {tokens / least:10.0f}"
            f" {min(peer) / least:7.2f}   {same}/{len(reference)}"
        )
    return table


def main(arguments=None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, one round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16, help="sentences")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=out_file, help="where the figures are written")
    given = parser.parse_args(arguments)
    settings, length = (TINY, 6) if given.quick else (BASE, 32)
    rounds, beam_size = 1 if given.quick else given.rounds, 4
    torch.set_num_threads(given.threads)
    model = build(settings).to(given.device)
    src_ids = sources(settings["vocab_size"], given.batch).to(given.device)
    with tempfile.TemporaryDirectory() as folder:
        common = (model, src_ids, beam_size, length)
        runs = {
            "ours": ours(CachedSteps, *common),
            "Hugging Face": hugging_face(*common),
            "CTranslate2 float32": ctranslate2_engine(
                *common, "float32", folder, given.threads
            ),
        }
        if given.device == "cpu":
            runs["CTranslate2 int8"] = ctranslate2_engine(
                *common, "int8", folder, given.threads
            )
            runs["ours, no cache"] = ours(FullSteps, *common)
        seconds, outputs = measure(runs, rounds, length)
    table = report(seconds, outputs, tokens=len(src_ids) * length)
    record = {
        "benchmark": f"beam search on {given.device}, same weights",
        "settings": {
            "model": settings,
            "threads": given.threads,
            "rounds": rounds,
            "batch": len(src_ids),
            "beam_size": beam_size,
            "output_tokens": length,
            "source_tokens": (src_ids != PAD).sum(dim=1).tolist(),
        },
        "data_sha256": hashlib.sha256(src_ids.cpu().numpy().tobytes()).hexdigest(),
        "environment": environment_record(given.device),
        "peers": {name: version(name) for name in ("transformers", "ctranslate2")},
        "results": table,
    }
    name = "decoding" if given.device == "cpu" else f"decoding-{given.device}"
    keep(record, f"benchmarks/{name}", given.out, given.quick)
    return record


if __name__ == "__main__":
    main()
