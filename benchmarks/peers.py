"""Beside other toolkits: training, memory, decoding, exports; one command.

    python benchmarks/peers.py            # small and base models: hours, quiet machine
    python benchmarks/peers.py --quick    # tiny models on the embedded grammar

Training: ours, torch's nn.Transformer, Hugging Face's Marian, JoeyNMT and
x-transformers; the first three hold the same weights, the others models of the same
size. Twice: a small model with 8,000 pieces and the paper's base model with 37,000.
Every contender gets the same batches (equal pairs by length), the same fused Adam, the
same precision, dropout and threads, and its own best attention. "ours" is what
`transformer-lib train` runs: its set_up, its batches made ahead, its update, the
switches of its recipe as they are by default. "Hugging Face" without "by length" is a
second line: a fixed number of any pairs, padded to the longest, as from a plain
DataLoader.

Each run is a process of its own, so that its peak memory is its own, above what the
text and the loaded packages take. The rounds are interleaved, in turn forwards and
backwards, and there are as many as it takes until the 95 % interval of the ratio of
ours to each contender on equal batches is within 5 % of it, or --max-rounds.

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
import math
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

from transformer_lib import training as library
from transformer_lib.batches import load_prepared, make_batch, plan_batches
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

    plan, precision = "by length", "float32"

    def __init__(self, config: TransformerConfig):
        torch.manual_seed(0)
        self.model = self.build(config).train()
        self.optimizer = build_optimizer(self.model, fused=True)
        for group in self.optimizer.param_groups:
            group["lr"] = RATE

    def loss(self, batch) -> torch.Tensor:
        """The usual loss, of padded logits."""
        return padded_loss(self.logits(batch).float(), batch)

    def update(self, batch) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        low = self.precision == "bfloat16"
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()

    def timed(self, ready, plan, first: int, asked) -> list[float]:
        """Seconds of each update, from one before the first, which warms up."""
        batches = [make_batch(ready.train, i) for i in plan[first:][: asked.updates]]
        seconds = []
        for batch in (make_batch(ready.train, plan[-1]), *batches):
            start = time.perf_counter()
            self.update(batch)
            seconds.append(time.perf_counter() - start)
        return seconds[1:]


class Ours(Peer):
    """What `transformer-lib train` runs."""

    def build(self, config):
        self.shared = library.BatchLoss(Transformer(config))
        return self.shared.model

    def logits(self, batch):
        return self.model(batch.src_ids, batch.tgt_in)

    def update(self, batch):
        rest = RATE, EPSILON, 0.0, self.precision
        library.update(self.shared, self.optimizer, [batch], *rest)

    def timed(self, ready, plan, first, asked):
        """The same batches, by the loop of train: made ahead, used, reported."""
        made = ready.data["settings"]
        data = {k: made[k] for k in ("vocab_size", "kind", "max_length", "max_words")}
        recipe = library.Recipe(
            "peers", ready.data["corpus"], model=SIZES[asked.size] | {
                "dropout": DROPOUT}, max_tokens=asked.max_tokens, epsilon=EPSILON,
            precision=self.precision, max_steps=10**6, **data,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as run_dir:
            run = Path(run_dir)
            trainer = library.set_up(recipe, run, asked.data, "cpu", 0, 1)
        self.model, self.shared = trainer.model.train(), trainer.shared
        self.optimizer, seconds = trainer.optimizer, []
        self.update(make_batch(ready.train, plan[-1]))  # warms up
        trainer.at.batch = first
        with library.made_ahead(library.groups(trainer), recipe.prefetch) as coming:
            for _ in range(asked.updates):
                start = time.perf_counter()
                (place,), batches = next(coming)
                library.one_update(trainer, [place], batches)
                seconds.append(time.perf_counter() - start)
                assert place.indices == plan[trainer.at.batch - 1]  # equal batches
        return seconds


class OursInBfloat16(Ours):
    precision = "bfloat16"


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


class HuggingFaceInBfloat16(HuggingFace):
    precision = "bfloat16"


class HuggingFaceRandom(HuggingFace):
    plan = "random"


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
    "ours": Ours, "Hugging Face, by length": HuggingFace, "torch, by length": Torch,
    "JoeyNMT, by length": Joey, "x-transformers, by length": XTransformers,
    "ours, bfloat16": OursInBfloat16,
    "Hugging Face, by length, bfloat16": HuggingFaceInBfloat16,
    "Hugging Face": HuggingFaceRandom,  # the second line: random batches, padded
}  # fmt: skip
INSTALLED_ASIDE = "JoeyNMT, by length", "x-transformers, by length"


def one_run(asked) -> dict:
    """What one contender does in a process of its own, in one round."""
    sys.path.append(str(INSTALLED))
    torch.set_num_threads(asked.threads)
    ready = load_prepared(asked.data)
    config = TransformerConfig(
        ready.tokenizer.vocab_size, **SIZES[asked.size], dropout=DROPOUT
    )
    kind = PEERS[asked.one]
    plan = plan_batches(ready.train, asked.max_tokens, seed=0, epoch=0)
    if kind.plan == "random":
        plan = list(plans(ready.train, asked.max_tokens).values())[1]
    held_out = make_batch(ready.valid, range(min(16, len(ready.valid))))
    kind(TransformerConfig(config.vocab_size, **SIZES["tiny"]))  # loads its packages
    before = memory("VmRSS")
    peer = kind(config)
    parameters = sum(p.numel() for p in peer.model.parameters() if p.requires_grad)
    first = asked.round * asked.updates % max(1, len(plan) - asked.updates)
    losses = [held_out_loss(peer, held_out)]
    seconds = peer.timed(ready, plan, first, asked)
    losses.append(held_out_loss(peer, held_out))
    used = [make_batch(ready.train, i) for i in plan[first : first + asked.updates]]
    return {
        "tokens": sum(batch.num_tokens for batch in used),
        "places": sum(batch.tgt_out.numel() for batch in used),
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
    """Rounds of all contenders in turn, until each ratio is known well enough."""
    runs = {name: [] for name in names}
    for turn in range(asked.max_rounds):
        for name in names if turn % 2 == 0 else names[::-1]:
            settings = {"--one": name, "--data": folder, "--round": turn,
                        "--size": asked.size, "--threads": asked.threads,
                        "--max-tokens": asked.max_tokens,
                        "--updates": asked.updates}  # fmt: skip
            runs[name].append(alone(settings))
        known = {name: interval(ratios(runs, name)) for name in names if name != "ours"}
        said = ", ".join(f"{name} {middle:.2f} ± {100 * half:.0f} %"
                         for name, (middle, half) in known.items())  # fmt: skip
        print(f"  round {turn + 1}, ours to {said}", flush=True)
        fair = [half for name, (_, half) in known.items()
                if PEERS[name].plan == "by length"]  # fmt: skip
        if turn + 1 >= asked.rounds and max(fair) <= 0.05:
            break
    return runs


def ratios(runs: dict, name: str) -> list[float]:
    """How many times as fast ours of the same precision was, round by round."""
    ours = "ours, bfloat16" if "bfloat16" in name and "ours" not in name else "ours"

    def speed(run):
        return run["tokens"] / run["seconds"]

    return [speed(a) / speed(b) for a, b in zip(runs[ours], runs[name], strict=True)]


def interval(values: list[float]) -> tuple[float, float]:
    """Geometric mean, and half of its 95 % interval as a share (Student's t)."""
    from scipy.stats import t

    logs = [math.log(value) for value in values]
    if len(logs) < 2:
        return values[0], math.inf
    error = statistics.stdev(logs) / len(logs) ** 0.5
    return (math.exp(statistics.fmean(logs)),
            math.expm1(error * float(t.ppf(0.975, len(logs) - 1))))  # fmt: skip


def compared(runs: dict, peer: str) -> dict:
    """Medians of the rounds, and how they stand to one contender's."""
    table = {}
    for name, rounds in runs.items():
        middle, half = interval(ratios(runs, name)) if name != "ours" else (1.0, 0.0)
        table[name] = {
            "tokens_per_second": statistics.median(
                r["tokens"] / r["seconds"] for r in rounds
            ),
            "peak_mb": statistics.median(r["peak_mb"] for r in rounds),
            "ours_times": middle,
            "ours_times_within": half if math.isfinite(half) else None,
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
    parser.add_argument("--rounds", type=int, default=3, help="at least")
    parser.add_argument("--max-rounds", type=int, default=20)
    parser.add_argument("--updates", type=int, default=3, help="timed, each round")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of our batches")
    parser.add_argument("--size", choices=SIZES, help="this one only")
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
        asked.rounds, asked.max_rounds, asked.updates = 2, 2, 2
        asked.size, asked.max_tokens = "tiny", 400
    missing = "a quick run installs nothing" if asked.quick else install()
    names = [n for n in PEERS if not (missing and n in INSTALLED_ASIDE)]
    count, name = (1000, "grammar-en-de") if asked.quick else (60_000, asked.corpus)
    pairs = pairs_of(name, count)
    if pairs is None:
        raise SystemExit(f"{name} cannot be had here: name another --corpus.")
    with tempfile.TemporaryDirectory() as aside:
        place, tables, text = asked.work or Path(aside), {}, {}
        sizes = [asked.size] if asked.size else ["base", "small"]
        for asked.size in sizes:
            folder, pieces = place / asked.size, PIECES[asked.size]
            if (folder / "data").is_dir():
                ready = load_prepared(folder / "data")
            else:
                folder.mkdir(parents=True, exist_ok=True)
                ready = prepared(pairs, str(folder), pieces)
            print(f"{asked.size}, {pieces:,} pieces")
            runs = race(names, folder / "data", asked)
            tables[asked.size] = compared(runs, "Hugging Face, by length")
            text[asked.size] = ready.data["train"]["sha256"]
        asked.vocab_size, asked.size = PIECES[sizes[0]], sizes[0]
        decoding = decode(place / "exports", asked)
    left_out = {} if asked.quick else {p: why_absent(p) for p in ABSENT}
    if missing:
        left_out |= {"JoeyNMT, x-transformers": missing}
    record = {
        "benchmark": "beside other toolkits: training, memory, decoding, exports",
        "command": "python benchmarks/peers.py",
        "settings": {k: v for k, v in vars(asked).items() if k not in HIDDEN},
        "data": {"corpus": name, "pairs": len(pairs),
                 "sha256": text[sizes[0]]},
        "environment": environment_record(),
        "peers": {p: version(p) for p in ("transformers", "ctranslate2", "onnxruntime")}
        | ({} if missing else dict(p.split("==") for p in PACKAGES[:2])),
        "left_out": left_out,
        "training": tables[sizes[0]],
        "sizes": {size: {"vocab_size": PIECES[size], "training": table}
                  for size, table in tables.items()},
        "decoding": decoding,
    }  # fmt: skip
    report(record)
    keep(record, "benchmarks/peers", asked.out, asked.quick)
    return record


PIECES = {"tiny": 340, "small": 8_000, "base": 37_000}  # by size
HIDDEN = ("one", "load", "data", "round", "out", "work")


def report(record: dict) -> None:
    """Print what was found."""
    for size, case in record["sizes"].items():
        print(f"{size} model, {case['vocab_size']:,} pieces")
        for name, row in case["training"].items():
            losses = " ".join(f"{loss:.3f}" for loss in row["rounds"][0]["losses"])
            within = row["ours_times_within"]
            name += "" if PEERS[name].plan == "by length" else " (random batches)"
            print(
                f"{name:34}{row['tokens_per_second']:8,.0f} tokens/s, ours "
                f"{row['ours_times']:5.2f} times"
                + ("" if within is None else f" ± {within:.0%}")
                + f", {row['peak_mb']:8,.0f} MB, {row['real_share']:.0%} real, "
                f"{len(row['rounds'])} rounds, losses {losses}"
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
