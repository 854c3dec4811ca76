"""Beside other toolkits: training, memory, decoding, exports; one command.

    python benchmarks/peers.py            # the base model, 37,000 pieces: an hour
    python benchmarks/peers.py --quick    # tiny models on the embedded grammar

Training: the paper's base model in ours, torch's nn.Transformer, Hugging Face's Marian,
JoeyNMT and x-transformers; the first three hold the same weights, the others models of
the same size. Same text, pieces, optimizer, dropout and threads, as many real tokens an
update. Each run is a process of its own, so that its peak memory is its own, above what
the text and the loaded packages take; the rounds are interleaved, so that a slow moment
of the machine hits all alike. "By length" are our batches; "random" is the usual way, a
fixed number of pairs, padded to the longest.

Decoding: the model that ships, as our Translator runs it and as chapter 21 exports it,
beam 4, on the same sentences of its test set; BLEU of CTranslate2's two exports on all
of it. Exports: their sizes, and the time from nothing loaded to a first translation.

JoeyNMT and x-transformers are installed into _build/peers, without the versions of
other packages that JoeyNMT asks for.
Writes transformer_lib/evidence/benchmarks/peers.json.
"""

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch
import torch.nn.functional as F
from apart import memory
from kept import keep
from training import (
    DROPOUT,
    EPSILON,
    RATE,
    SIZES,
    padded_loss,
    pairs_of,
    plans,
    prepared,
)

from transformer_lib.batches import load_prepared, make_batch
from transformer_lib.objective import build_optimizer
from transformer_lib.text import BOS, EOS, PAD, UNK, CorpusUnavailable, load_corpus
from transformer_lib.training import environment_record
from transformer_lib.transformer import Transformer, TransformerConfig, torch_twin

ROOT = Path(__file__).parents[1]
INSTALLED = ROOT / "_build" / "peers"
PACKAGES = ["joeynmt==2.3.0", "x-transformers==2.31.10", "einops", "einx", "loguru",
            "frozendict", "torch-einops-utils", "importlib-metadata", "zipp",
            "subword-nmt", "tensorboard", "absl-py"]  # fmt: skip
ABSENT = ["fairseq>=0.12", "OpenNMT-py>=3.5", "sockeye>=3", "fairseq2"]


# --- training -------------------------------------------------------------------------


class Peer:
    """One contender: its model, and one update from a batch."""

    plan = "random"

    def __init__(self, config: TransformerConfig):
        torch.manual_seed(0)
        self.model = self.build(config).train()
        self.optimizer = build_optimizer(self.model)
        for group in self.optimizer.param_groups:
            group["lr"] = RATE

    def loss(self, batch) -> torch.Tensor:
        """The usual loss, of padded logits."""
        return padded_loss(self.logits(batch), batch)

    def update(self, batch) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.loss(batch).backward()
        self.optimizer.step()


class Ours(Peer):
    """As the library trains, but for the steps of chapter 14 that are asked for."""

    plan = "by length"
    steps = {"attention": "fused", "loss": "chunked", "optimizer": "fused"}

    def __init__(self, config):
        from transformer_lib.speed import Steps, trainer

        torch.manual_seed(0)
        self.model = self.build(config).train()
        self.update = trainer(self.model, Steps(**self.steps), RATE)

    def build(self, config):
        return Transformer(config)

    def logits(self, batch):
        return self.model(batch.src_ids, batch.tgt_in)


class OursInBfloat16(Ours):
    steps = Ours.steps | {"precision": "bfloat16"}


class Torch(Peer):
    """torch.nn.Transformer between our embeddings, with our weights."""

    def build(self, config):
        ours = Transformer(config)
        self.positions = ours.src_positions
        twin = torch_twin(ours)
        self.table = twin.table = torch.nn.Parameter(ours.output.weight.detach())
        return twin

    def logits(self, batch):
        sides = []
        for ids in (batch.src_ids, batch.tgt_in):
            x = F.embedding(ids, self.table) * self.table.shape[1] ** 0.5
            x = x + self.positions(ids.shape[1])
            sides.append(F.dropout(x, DROPOUT, self.model.training))
        unread, n = batch.src_ids == PAD, batch.tgt_in.shape[1]
        hidden = self.model(
            *sides, tgt_mask=torch.ones(n, n, dtype=torch.bool).triu(1),
            src_key_padding_mask=unread, memory_key_padding_mask=unread,
        )  # fmt: skip
        return hidden @ self.table.T


class HuggingFace(Peer):
    """MarianMTModel with our weights."""

    def build(self, config):
        from transformer_lib.serving import to_marian

        return to_marian(Transformer(config))

    def logits(self, batch):
        return self.model(
            input_ids=batch.src_ids, attention_mask=batch.src_ids != PAD,
            decoder_input_ids=batch.tgt_in, use_cache=False,
        ).logits  # fmt: skip


class HuggingFaceByLength(HuggingFace):
    plan = "by length"


class Words:
    """A vocabulary as JoeyNMT asks for one, with our ids."""

    pad_index, unk_index, bos_index, eos_index, sep_index = PAD, UNK, BOS, EOS, None
    specials, lang_tags = [], []

    def __init__(self, size: int):
        self.size = size

    def __len__(self):
        return self.size


class Joey(Peer):
    """JoeyNMT's model and its own loss; post-norm, as the paper."""

    def build(self, config):
        from joeynmt.model import build_model

        side = {
            "type": "transformer", "num_layers": config.num_layers,
            "num_heads": config.num_heads, "hidden_size": config.d_model,
            "ff_size": config.d_ff, "dropout": DROPOUT, "layer_norm": "post",
            "embeddings": {"embedding_dim": config.d_model, "scale": True},
        }  # fmt: skip
        words = Words(config.vocab_size)
        tied = {"tied_embeddings": True, "tied_softmax": True}
        model = build_model({"encoder": side, "decoder": side} | tied, words, words)
        model.loss_function = "crossentropy", EPSILON
        return model

    def asked(self, batch):
        return {
            "src": batch.src_ids, "trg_input": batch.tgt_in, "trg": batch.tgt_out,
            "src_mask": (batch.src_ids != PAD)[:, None],
            "trg_mask": (batch.tgt_out != PAD)[:, None],
            "src_length": (batch.src_ids != PAD).sum(dim=1),
        }  # fmt: skip

    def logits(self, batch):
        return self.model._encode_decode(**self.asked(batch))[0]

    def loss(self, batch):
        return self.model("loss", **self.asked(batch))[0] / batch.num_tokens


class XTransformers(Peer):
    """x-transformers' encoder and decoder of the same size; pre-norm, its only way."""

    def build(self, config):
        from x_transformers import Decoder, Encoder, TransformerWrapper

        layers = {"dim": config.d_model, "depth": config.num_layers,
                  "heads": config.num_heads, "attn_flash": True,
                  "attn_dim_head": config.d_model // config.num_heads,
                  "ff_mult": config.d_ff / config.d_model,
                  "ff_dropout": DROPOUT}  # fmt: skip
        size = {"num_tokens": config.vocab_size, "max_seq_len": 256,
                "emb_dropout": DROPOUT}  # fmt: skip
        encoder = TransformerWrapper(
            attn_layers=Encoder(**layers), return_only_embed=True, **size
        )
        decoder = TransformerWrapper(
            attn_layers=Decoder(cross_attend=True, **layers), tie_embedding=True, **size
        )
        decoder.token_emb = encoder.token_emb
        return torch.nn.ModuleList([encoder, decoder])

    def logits(self, batch):
        (encoder, decoder), mask = self.model, batch.src_ids != PAD
        read = encoder(batch.src_ids, mask=mask, return_embeddings=True)
        return decoder(batch.tgt_in, context=read, context_mask=mask)


PEERS = {
    "ours": Ours, "ours, bfloat16": OursInBfloat16,
    "Hugging Face": HuggingFace, "Hugging Face, by length": HuggingFaceByLength,
    "torch": Torch, "JoeyNMT": Joey, "x-transformers": XTransformers,
}  # fmt: skip


def one_run(asked) -> dict:
    """What one contender does in a process of its own, in one round."""
    sys.path.append(str(INSTALLED))
    torch.set_num_threads(asked.threads)
    ready = load_prepared(asked.data)
    config = TransformerConfig(
        ready.tokenizer.vocab_size, **SIZES[asked.size], dropout=DROPOUT
    )
    kind = PEERS[asked.one]
    ours, usual = plans(ready.train, asked.max_tokens).values()
    plan = ours if kind.plan == "by length" else usual
    held_out = make_batch(ready.valid, range(min(16, len(ready.valid))))
    kind(TransformerConfig(config.vocab_size, **SIZES["tiny"]))  # loads its packages
    before = memory("VmRSS")
    peer = kind(config)
    parameters = sum(p.numel() for p in peer.model.parameters() if p.requires_grad)
    first = asked.round * asked.updates
    batches = [make_batch(ready.train, i) for i in plan[first : first + asked.updates]]
    losses = [held_out_loss(peer, held_out)]
    peer.update(make_batch(ready.train, plan[-1]))  # warms up
    seconds = []
    for batch in batches:
        start = time.perf_counter()
        peer.update(batch)
        seconds.append(time.perf_counter() - start)
    losses.append(held_out_loss(peer, held_out))
    return {
        "tokens": sum(batch.num_tokens for batch in batches),
        "places": sum(batch.tgt_out.numel() for batch in batches),
        "seconds": sum(seconds), "peak_mb": (memory("VmHWM") - before) / 1e6,
        "losses": losses, "parameters": parameters,
    }  # fmt: skip


@torch.no_grad()
def held_out_loss(peer, batch) -> float:
    """Cross-entropy of a few held-out pairs, without dropout, in nats a token."""
    peer.model.eval()
    logits = peer.logits(batch)[batch.tgt_out != PAD]
    peer.model.train()
    return F.cross_entropy(logits, batch.tgt_out[batch.tgt_out != PAD]).item()


def alone(settings: dict) -> dict:
    """What this file prints in a process of its own."""
    given = [str(part) for setting in settings.items() for part in setting]
    command = [sys.executable, __file__, *given]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(given)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def race(names, folder: Path, asked) -> dict:
    """All rounds of all contenders, interleaved."""
    runs = {name: [] for name in names}
    for turn in range(asked.rounds):
        for name in names:
            settings = {"--one": name, "--data": folder, "--round": turn,
                        "--size": asked.size, "--threads": asked.threads,
                        "--max-tokens": asked.max_tokens,
                        "--updates": asked.updates}  # fmt: skip
            runs[name].append(alone(settings))
            print(f"  round {turn + 1}: {name}", flush=True)
    return runs


def compared(runs: dict, peer: str) -> dict:
    """Medians of the rounds, and how they stand to one contender's."""
    table = {}
    for name, rounds in runs.items():
        table[name] = {
            "tokens_per_second": statistics.median(
                r["tokens"] / r["seconds"] for r in rounds
            ),
            "peak_mb": statistics.median(r["peak_mb"] for r in rounds),
            "parameters": rounds[0]["parameters"],
            "real_share": sum(r["tokens"] for r in rounds)
            / sum(r["places"] for r in rounds),
            "rounds": rounds,
        }
    for row in table.values():
        for figure in ("tokens_per_second", "peak_mb"):
            row[f"{figure}_over_peer"] = row[figure] / table[peer][figure]
    return table


# --- decoding and exports -------------------------------------------------------------


def marian_translator(folder: Path, batch_size: int = 32, sort: bool = False):
    """transformers' own classes, batches of a fixed number of sentences."""
    from transformers import MarianMTModel, MarianTokenizer

    tokenizer = MarianTokenizer.from_pretrained(folder)
    model = MarianMTModel.from_pretrained(folder).eval()

    @torch.inference_mode()
    def translate(texts):
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        order, found = (order if sort else range(len(texts))), {}
        for first in range(0, len(order), batch_size):
            some = order[first : first + batch_size]
            given = tokenizer([texts[i] for i in some], return_tensors="pt",
                              padding=True)  # fmt: skip
            longest = given["input_ids"].shape[1]
            out = model.generate(**given, num_beams=4, length_penalty=0.6,
                                 max_length=longest + 50)  # fmt: skip
            found |= zip(some, tokenizer.batch_decode(out, skip_special_tokens=True),
                         strict=True)  # fmt: skip
        return [found[i] for i in range(len(texts))]

    return translate


def engine(kind: str, folder: Path, threads: int):
    """A function from sentences to translations, loaded from an export."""
    from transformer_lib.evaluation import Translator
    from transformer_lib.serving import CTranslate2Model, OnnxModel

    if kind == "ours":
        return Translator.from_pretrained("tatoeba-en-de")
    if kind.startswith("Hugging Face"):
        return marian_translator(folder / "marian", sort="by length" in kind)
    if kind == "ONNX Runtime":
        model = OnnxModel(folder / "onnx", threads)
        return lambda texts: [model(text) for text in texts]
    end = "-int8" if "int8" in kind else ""
    return CTranslate2Model(folder / f"ctranslate2{end}", threads)


ENGINES = ["ours", "Hugging Face", "Hugging Face, by length", "CTranslate2 float32",
           "CTranslate2 int8", "ONNX Runtime"]  # fmt: skip
FOLDERS = {"Hugging Face": "marian", "CTranslate2 float32": "ctranslate2",
           "CTranslate2 int8": "ctranslate2-int8", "ONNX Runtime": "onnx"}  # fmt: skip


def one_load(asked) -> dict:
    """Seconds from imported packages to a first translation."""
    torch.set_num_threads(asked.threads)
    for name in ("ctranslate2", "onnxruntime",
                 "transformers.models.marian.modeling_marian",
                 "transformers.models.marian.tokenization_marian",
                 "transformer_lib.evaluation", "transformer_lib.serving"):  # fmt: skip
        importlib.import_module(name)
    start = time.perf_counter()
    engine(asked.load, Path(asked.data), asked.threads)(["Good morning."])
    return {"seconds": time.perf_counter() - start}


def decode(folder: Path, asked) -> dict:
    """The exports and the library on the same sentences."""
    from sacrebleu.metrics import BLEU

    from transformer_lib.serving import export
    from transformer_lib.training import load_pretrained

    model, tokenizer, about = load_pretrained("tatoeba-en-de")
    folders = export(model, tokenizer, folder, about)
    try:
        corpus = load_corpus("tatoeba-en-de", "test")
    except CorpusUnavailable:
        corpus = load_corpus("grammar-en-de", "test")
    pairs = corpus.pairs[: 8 if asked.quick else len(corpus)]
    texts = [source for source, _ in pairs[:: max(1, len(pairs) // asked.sentences)]]
    torch.set_num_threads(asked.threads)
    engines = {name: engine(name, folder, asked.threads) for name in ENGINES}
    outputs = {name: run(texts) for name, run in engines.items()}  # warms up
    seconds = {name: [] for name in engines}
    for _ in range(asked.rounds):
        for name, run in engines.items():
            start = time.perf_counter()
            run(texts)
            seconds[name].append(time.perf_counter() - start)
    table = {}
    for name, times in seconds.items():
        tokens = sum(len(ids) + 1 for ids in tokenizer.encode_all(outputs[name]))
        table[name] = {
            "seconds": times, "tokens": tokens,
            "tokens_per_second": tokens / statistics.median(times),
            "as_ours": sum(map(str.__eq__, outputs[name], outputs["ours"])),
        }  # fmt: skip
    for row in table.values():
        peer = table["Hugging Face"]["tokens_per_second"]
        row["over_hugging_face"] = row["tokens_per_second"] / peer
    references = [[target for _, target in pairs]]
    bleu = {}
    for name in ("CTranslate2 float32", "CTranslate2 int8"):
        metric = BLEU()
        said = engines[name]([source for source, _ in pairs])
        score = metric.corpus_score(said, references).score
        bleu[name] = {"value": score, "signature": str(metric.get_signature())}
    files = {name: [f for f in folders[kind].iterdir() if f.is_file()]
             for name, kind in FOLDERS.items()}  # fmt: skip
    shipped = ROOT / "transformer_lib" / "pretrained" / "tatoeba-en-de"
    files["ours"] = list(shipped.iterdir())
    exports = {
        name: {"bytes": sum(file.stat().st_size for file in some),
               "load_seconds": loads(name, folder, asked)}
        for name, some in files.items()
    }  # fmt: skip
    return {"corpus": corpus.name, "sentences": len(texts), "beam_size": 4,
            "engines": table, "bleu": {"sentences": len(pairs), **bleu},
            "exports": exports}  # fmt: skip


def loads(name: str, folder: Path, asked) -> list[float]:
    """Seconds to a first translation, each in a process of its own."""
    settings = {"--load": name, "--data": folder, "--threads": asked.threads}
    return [alone(settings)["seconds"] for _ in range(asked.rounds)]


# --- who is not here ------------------------------------------------------------------


def install() -> str | None:
    """Put the two peers that are on no list of ours into a folder; why not, if not."""
    if (INSTALLED / "joeynmt").is_dir() and (INSTALLED / "x_transformers").is_dir():
        return None
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target",
         str(INSTALLED), *PACKAGES],
        capture_output=True, text=True,
    )  # fmt: skip
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


def why_absent(package: str) -> str:
    """What uv says to a request for this package beside today's torch and numpy."""
    held = f"torch=={version('torch').split('+')[0]}\nnumpy=={version('numpy')}\n"
    done = subprocess.run(
        [sys.executable, "-m", "uv", "pip", "compile", "-q", "--only-binary", ":all:",
         "--no-header", "-", "--python", sys.executable],
        input=f"{package}\n{held}", capture_output=True, text=True,
    )  # fmt: skip
    if not done.returncode:
        return "installs here; not compared"
    said = " ".join(done.stderr.split())
    return said.partition("cause: ")[2].partition(", we can conclude")[0] or said


def main(arguments=None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny models, one round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=2, help="timed, each round")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of our batches")
    parser.add_argument("--vocab-size", type=int, default=37_000)
    parser.add_argument("--size", default="base", choices=SIZES)
    parser.add_argument("--corpus", default="mixed")
    parser.add_argument("--sentences", type=int, default=320, help="to decode")
    parser.add_argument("--work", type=Path, help="keep what is prepared here")
    parser.add_argument("--out", type=Path, help="where the figures are written")
    for name in ("--one", "--load", "--data"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--round", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.one or asked.load:
        answer = one_run(asked) if asked.one else one_load(asked)
        print(json.dumps(answer))
        return answer
    if asked.quick:
        asked.rounds = asked.updates = 1
        asked.size, asked.vocab_size, asked.max_tokens = "tiny", 340, 400
    missing = "a quick run installs nothing" if asked.quick else install()
    names = [n for n in PEERS if not (missing and n in ("JoeyNMT", "x-transformers"))]
    count, name = (1000, "grammar-en-de") if asked.quick else (60_000, asked.corpus)
    pairs = pairs_of(name, count)
    if pairs is None:
        raise SystemExit(f"{name} cannot be had here: name another --corpus.")
    with tempfile.TemporaryDirectory() as aside:
        place = asked.work or Path(aside)
        if (place / "data").is_dir():
            ready = load_prepared(place / "data")
            if ready.data["settings"]["vocab_size"] != asked.vocab_size:
                raise SystemExit(f"{place}: prepared otherwise; name another --work.")
        else:
            place.mkdir(parents=True, exist_ok=True)
            ready = prepared(pairs, str(place), asked.vocab_size)
        runs = race(names, place / "data", asked)
        decoding = decode(place / "exports", asked)
    left_out = {} if asked.quick else {p: why_absent(p) for p in ABSENT}
    if missing:
        left_out |= {"JoeyNMT, x-transformers": missing}
    record = {
        "benchmark": "beside other toolkits: training, memory, decoding, exports",
        "command": "python benchmarks/peers.py",
        "settings": {k: v for k, v in vars(asked).items() if k not in HIDDEN},
        "data": {"corpus": name, "pairs": len(pairs),
                 "sha256": ready.data["train"]["sha256"]},
        "environment": environment_record(),
        "peers": {p: version(p) for p in ("transformers", "ctranslate2", "onnxruntime")}
        | ({} if missing else dict(p.split("==") for p in PACKAGES[:2])),
        "left_out": left_out,
        "training": compared(runs, "Hugging Face"),
        "decoding": decoding,
    }  # fmt: skip
    report(record)
    keep(record, "benchmarks/peers", asked.out, asked.quick)
    return record


HIDDEN = ("one", "load", "data", "round", "out", "work")


def report(record: dict) -> None:
    """Print what was found."""
    for name, row in record["training"].items():
        losses = " ".join(f"{loss:.3f}" for loss in row["rounds"][0]["losses"])
        print(
            f"{name:26}{row['tokens_per_second']:8,.0f} tokens/s "
            f"{row['tokens_per_second_over_peer']:5.2f}x {row['peak_mb']:8,.0f} MB "
            f"{row['peak_mb_over_peer']:5.2f}x  {row['real_share']:.0%} real, "
            f"losses {losses}"
        )
    for name, row in record["decoding"]["engines"].items():
        print(
            f"{name:26}{row['tokens_per_second']:8,.0f} tokens/s "
            f"{row['over_hugging_face']:5.2f}x, {row['as_ours']} as ours"
        )
    for name, row in record["decoding"]["exports"].items():
        seconds = statistics.median(row["load_seconds"])
        print(f"{name:26}{row['bytes']:12,} bytes, translates after {seconds:.2f} s")
    print(record["decoding"]["bleu"], record["left_out"], sep="\n")


if __name__ == "__main__":
    main()
