"""Beside other toolkits: training, memory, decoding, exports; one command.

    python benchmarks/peers.py                 # all of it, on a quiet machine
    python benchmarks/peers.py --minutes 10    # as many rounds as fit, and again later
    python benchmarks/peers.py --parts training --sizes base --only "Hugging Face"
    python benchmarks/peers.py --quick         # tiny models on the embedded grammar

Training: ours, torch's nn.Transformer, Hugging Face's Marian, JoeyNMT and
x-transformers; the first three hold the same weights, the others models of the same
size. Twice: a small model with 8,000 pieces and the paper's base model with 37,000.
Every contender gets the same batches (equal pairs by length), the same fused Adam, the
same precision, dropout and threads, and its own best attention. "ours" is what
`transformer-lib train` runs: its set_up, its batches made ahead, its update, the
switches of its recipe as they are by default. "Hugging Face" without "by length" is a
second line: a fixed number of any pairs, padded to the longest, as from a plain
DataLoader. "ours, packed" is a third: as many tokens of any pairs, several in a row.

Each contender is a process of its own, so that its peak memory is its own, above what
the text and the loaded packages take. A round is --updates updates of each, in turn
forwards and backwards, and there are as many rounds as it takes until the 95 % interval
of the ratio of ours to each contender on equal batches is within 5 % of it, or until
--max-rounds or --minutes. All contenders of a size are in memory at once, 2 to 3 GB
each at base size, 6 GB with random batches; --only takes some of them. Each round is
appended to a file in --work when it is done, and the same command goes on from there,
so rounds can be gathered in several quiet hours; rounds of other code or settings are
not mixed with them.

Decoding: the model that ships, as our Translator runs it and as chapter 22 exports it,
beam 4, on the same sentences of its test set; BLEU of CTranslate2's two exports on all
of it. Exports: their sizes, and the time from nothing loaded to a first translation.

JoeyNMT and x-transformers are installed into _build/peers, without the versions of
other packages that JoeyNMT asks for.
Writes transformer_lib/evidence/benchmarks/peers.json once each part is measured.

Record: benchmarks/peers.json
"""

import argparse
import contextlib
import hashlib
import importlib
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
import torch.nn.functional as F
from apart import memory
from kept import keep, out_file
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
from transformer_lib.batches import Prepared, make_batch, pack, plan_batches
from transformer_lib.corpora import CorpusUnavailable, load_corpus
from transformer_lib.machine import Team, environment_record
from transformer_lib.objective import build_optimizer
from transformer_lib.runs import Recipe, set_up, trainer
from transformer_lib.storage import write_json
from transformer_lib.tokenizer import BOS, EOS, PAD, UNK
from transformer_lib.transformer import Transformer, TransformerConfig, torch_twin

ROOT = Path(__file__).parents[1]
INSTALLED, ROUNDS = ROOT / "_build" / "peers", ROOT / "_build" / "peers-rounds"
PACKAGES = [
    "joeynmt==2.3.0",
    "x-transformers==2.31.10",
    "einops",
    "einx",
    "loguru",
    "frozendict",
    "torch-einops-utils",
    "importlib-metadata",
    "zipp",
    "subword-nmt",
    "tensorboard",
    "absl-py",
]
ABSENT = ["fairseq>=0.12", "OpenNMT-py>=3.5", "sockeye>=3", "fairseq2"]


# --- training -------------------------------------------------------------------------


class Peer:
    """One contender: its model, and one update from a batch."""

    feed, precision = "by length", "float32"

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

    def begin(self, ready, plan, asked) -> None:
        """Make ready for the first round, with an update that warms up."""
        self.ready, self.plan = ready, plan
        self.update(self.batch(-1))

    def batch(self, place: int):
        """The batch of a place in the plan."""
        return make_batch(self.ready.train, self.plan[place])

    def timed(self, places: range) -> tuple[float, float]:
        """Seconds by the clock and of the processor for the batches of these places."""
        batches = [self.batch(i) for i in places]
        start, busy = time.perf_counter(), time.process_time()
        for batch in batches:
            self.update(batch)
        return time.perf_counter() - start, time.process_time() - busy


class Ours(Peer):
    """What `transformer-lib train` runs."""

    width = 0  # of a row in which several pairs lie

    def build(self, config):
        self.shared = library.BatchLoss(Transformer(config))
        return self.shared.model

    def logits(self, batch):
        return self.model(batch.src_ids, batch.tgt_in)

    def update(self, batch):
        rest = RATE, EPSILON, 0.0, self.precision
        library.update(self.shared, self.optimizer, [batch], *rest)

    def begin(self, ready, plan, asked):
        """The same batches, by the loop of train: made ahead, used, reported."""
        made = ready.data["settings"]
        data = {
            k: made[k] for k in ("vocab_size", "model_type", "max_length", "max_words")
        }
        recipe = Recipe(
            "peers",
            ready.data["corpus"],
            model=SIZES[asked.size] | {"dropout": DROPOUT},
            max_tokens=asked.max_tokens,
            label_smoothing=EPSILON,
            precision=self.precision,
            packed=self.width,
            max_steps=10**6,
            **data,
        )
        with tempfile.TemporaryDirectory() as run_dir:
            run = Path(run_dir)
            self.data, self.model, self.state = set_up(recipe, run, asked.data, Team())
        self.recipe, self.shared = recipe, self.state.shared
        self.rate = partial(trainer.lr_at, recipe, self.model.train().config.d_model)
        self.optimizer = self.state.optimizer
        super().begin(ready, plan, asked)
        self.state.at.batch = asked.first * asked.updates

    def timed(self, places):
        start, busy = time.perf_counter(), time.process_time()
        for place, batches in itertools.islice(self.coming, len(places)):
            trainer.one_update(
                self.recipe, self.model, self.state, self.rate, place, batches
            )
        spent = time.perf_counter() - start, time.process_time() - busy
        assert self.state.at.batch == places.stop  # equal batches
        assert place[0].indices == list(self.plan[places[-1]])
        return spent


class OursInBfloat16(Ours):
    precision = "bfloat16"


class OursPacked(Ours):
    feed, width = "packed", 64

    def batch(self, place):
        return pack(self.ready.train, self.plan[place], self.width)


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
            *sides,
            tgt_mask=torch.ones(n, n, dtype=torch.bool).triu(1),
            src_key_padding_mask=unread,
            memory_key_padding_mask=unread,
        )
        return hidden @ self.table.T


class HuggingFace(Peer):
    """MarianMTModel with our weights."""

    def build(self, config):
        from transformer_lib.export import to_marian

        return to_marian(Transformer(config))

    def logits(self, batch):
        return self.model(
            input_ids=batch.src_ids,
            attention_mask=batch.src_ids != PAD,
            decoder_input_ids=batch.tgt_in,
            use_cache=False,
        ).logits


class HuggingFaceInBfloat16(HuggingFace):
    precision = "bfloat16"


class HuggingFaceRandom(HuggingFace):
    feed = "random"


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
            "type": "transformer",
            "num_layers": config.num_layers,
            "num_heads": config.num_heads,
            "hidden_size": config.d_model,
            "ff_size": config.d_ff,
            "dropout": DROPOUT,
            "layer_norm": "post",
            "embeddings": {"embedding_dim": config.d_model, "scale": True},
        }
        words = Words(config.vocab_size)
        tied = {"tied_embeddings": True, "tied_softmax": True}
        model = build_model({"encoder": side, "decoder": side} | tied, words, words)
        model.loss_function = "crossentropy", EPSILON
        return model

    def asked(self, batch):
        return {
            "src": batch.src_ids,
            "trg_input": batch.tgt_in,
            "trg": batch.tgt_out,
            "src_mask": (batch.src_ids != PAD)[:, None],
            "trg_mask": (batch.tgt_out != PAD)[:, None],
            "src_length": (batch.src_ids != PAD).sum(dim=1),
        }

    def logits(self, batch):
        return self.model._encode_decode(**self.asked(batch))[0]

    def loss(self, batch):
        return self.model("loss", **self.asked(batch))[0] / batch.num_tokens


class XTransformers(Peer):
    """x-transformers' encoder and decoder of the same size; pre-norm, its only way."""

    def build(self, config):
        from x_transformers import Decoder, Encoder, TransformerWrapper

        layers = {
            "dim": config.d_model,
            "depth": config.num_layers,
            "heads": config.num_heads,
            "attn_flash": True,
            "attn_dim_head": config.d_model // config.num_heads,
            "ff_mult": config.d_ff / config.d_model,
            "ff_dropout": DROPOUT,
        }
        size = {
            "num_tokens": config.vocab_size,
            "max_seq_len": 256,
            "emb_dropout": DROPOUT,
        }
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
    "ours": Ours,
    "Hugging Face, by length": HuggingFace,
    "torch, by length": Torch,
    "JoeyNMT, by length": Joey,
    "x-transformers, by length": XTransformers,
    "ours, bfloat16": OursInBfloat16,
    "Hugging Face, by length, bfloat16": HuggingFaceInBfloat16,
    "Hugging Face": HuggingFaceRandom,  # the second line: random batches, padded
    "ours, packed": OursPacked,  # and a third: several pairs in a row, no padding
}
REFERENCE = "Hugging Face, by length"
INSTALLED_ASIDE = "JoeyNMT, by length", "x-transformers, by length"


def contend(asked) -> None:
    """One contender in a process of its own: a round for each number that it reads."""
    sys.path.append(str(INSTALLED))
    torch.set_num_threads(asked.threads)
    ready = Prepared.load(asked.data)
    config = TransformerConfig(
        ready.tokenizer.vocab_size, **SIZES[asked.size], dropout=DROPOUT
    )
    kind = PEERS[asked.one]
    plan = division(ready, kind.feed, asked.max_tokens)
    held_out = make_batch(ready.valid, range(min(16, len(ready.valid))))
    kind(TransformerConfig(config.vocab_size, **SIZES["tiny"]))  # loads its packages
    before = memory("VmRSS")
    peer = kind(config)
    about = {
        "parameters": sum(p.numel() for p in peer.model.parameters() if p.requires_grad)
    }
    losses = [held_out_loss(peer, held_out)]
    peer.begin(ready, plan, asked)
    with contextlib.ExitStack() as stack:
        if isinstance(peer, Ours):
            groups = trainer.batch_groups(
                peer.recipe, peer.data, peer.model, peer.state
            )
            peer.coming = stack.enter_context(
                trainer.made_ahead(groups, peer.recipe.prefetch)
            )
        for line in sys.stdin:
            places = range(int(line) * asked.updates, (int(line) + 1) * asked.updates)
            seconds, busy = peer.timed(places)
            used = [peer.batch(i) for i in places]
            losses[1:] = [held_out_loss(peer, held_out)]
            run = {
                "tokens": sum(batch.num_tokens for batch in used),
                "places": sum(batch.tgt_out.numel() for batch in used),
                "seconds": seconds,
                "cpu_seconds": busy,
                "peak_mb": (memory("VmHWM") - before) / 1e6,
                "losses": losses,
            } | about
            print(json.dumps(run), flush=True)


def division(ready, feed: str, max_tokens: int) -> list[list[int]]:
    """How the text is divided into batches, in the first epoch."""
    if feed == "by length":
        return plan_batches(ready.train, max_tokens, seed=0, epoch=0)
    if feed == "packed":
        return plan_batches(ready.train, max_tokens, seed=0, epoch=0, packed=True)
    return list(plans(ready.train, max_tokens).values())[1]


@torch.no_grad()
def held_out_loss(peer, batch) -> float:
    """Cross-entropy of a few held-out pairs, without dropout, in nats a token."""
    peer.model.eval()
    logits = peer.logits(batch)[batch.tgt_out != PAD]
    peer.model.train()
    return F.cross_entropy(logits, batch.tgt_out[batch.tgt_out != PAD]).item()


def command(settings: dict) -> list[str]:
    """This file with some settings, as the line of a shell."""
    given = [str(part) for setting in settings.items() for part in setting]
    return [sys.executable, __file__, *given]


def alone(settings: dict) -> dict:
    """What this file prints in a process of its own."""
    line = command(settings)
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(line[2:])} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


class Contender:
    """The process of a contender; it waits until it is its turn."""

    def __init__(self, name: str, folder: Path, first: int, asked):
        settings = {
            "--one": name,
            "--data": folder,
            "--first": first,
            "--size": asked.size,
            "--threads": asked.threads,
            "--max-tokens": asked.max_tokens,
            "--updates": asked.updates,
        }
        self.name = name
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  as long as it
        self.process = subprocess.Popen(
            command(settings),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def run(self, turn: int) -> dict:
        """One round."""
        with contextlib.suppress(BrokenPipeError):  # it says below what happened
            print(turn, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith('{"tokens"'):
                return json.loads(line)
        self.errors.seek(0)
        raise RuntimeError(f"{self.name} failed:\n{self.errors.read()[-2000:]}")

    def end(self) -> None:
        """Let it go."""
        self.process.kill()
        self.process.communicate()
        self.errors.close()


def race(names, folder: Path, rounds: list[dict], log: Path, asked) -> list[dict]:
    """Rounds of all contenders in turn, until each ratio is known well enough.

    Args:
        names: Who takes part, "ours" among them.
        folder: The prepared text.
        rounds: What was measured before.
        log: Where each further round is appended.
        asked: The settings; until is when no further round begins.

    Returns:
        All rounds: what each contender did, by its name.
    """
    plan = division(Prepared.load(folder), "by length", asked.max_tokens)
    most = min(asked.max_rounds, (len(plan) - 1) // asked.updates)
    with contextlib.ExitStack() as stack:
        going = {}
        for turn in range(len(rounds), most):
            if enough(rounds, names, asked) or time.monotonic() > asked.until:
                break
            done = {}
            for name in names if turn % 2 == 0 else names[::-1]:
                if name not in going:
                    going[name] = Contender(name, folder, turn, asked)
                    stack.callback(going[name].end)
                done[name] = going[name].run(turn)
            rounds.append(done)
            with open(log, "a", encoding="utf-8") as file:
                file.write(json.dumps(done) + "\n")
            known = {n: interval(ratios(rounds, n)) for n in names if n != "ours"}
            said = ", ".join(
                f"{name} {middle:.2f} ± {half:.0%}"
                for name, (middle, half) in known.items()
            )
            print(f"  round {turn + 1}, ours to {said}", flush=True)
    return rounds


def enough(rounds: list[dict], names, asked) -> bool:
    """Whether each ratio on equal batches is known to 5 % by the rounds so far."""
    fair = [n for n in names if n != "ours" and PEERS[n].feed == "by length"]
    within = [interval(ratios(rounds, name))[1] for name in fair if rounds]
    return len(rounds) >= asked.rounds and max(within) <= 0.05


def ratios(rounds: list[dict], name: str) -> list[float]:
    """How many times as fast ours of the same precision was, round by round."""
    ours = "ours, bfloat16" if "bfloat16" in name and "ours" not in name else "ours"

    def speed(run):
        return run["tokens"] / run["seconds"]

    both = [done for done in rounds if name in done and ours in done]
    return [speed(done[ours]) / speed(done[name]) for done in both]


def fingerprint(asked, ready) -> str:
    """What rounds must have in common to be put together: code, text and settings."""
    ours = [m for name, m in sys.modules.items() if name.startswith("transformer_lib.")]
    files = sorted(module.__file__ for module in ours)
    parts = [Path(file).read_bytes() for file in (*files, __file__)]
    settings = (
        asked.size,
        asked.threads,
        asked.max_tokens,
        asked.updates,
        ready.data["train"]["sha256"],
        environment_record()["hardware"],
        *(version(name) for name in ("torch", "transformers")),
    )
    parts.append(json.dumps(settings).encode())
    return hashlib.sha256(b"".join(parts)).hexdigest()[:12]


def kept_rounds(log: Path) -> list[dict]:
    """The rounds that were measured before; a line that was cut short is left out."""
    lines = log.read_text(encoding="utf-8").split("\n") if log.exists() else [""]
    log.write_text("".join(line + "\n" for line in lines[:-1]), encoding="utf-8")
    return [json.loads(line) for line in lines[:-1]]


def interval(values: list[float]) -> tuple[float, float]:
    """Geometric mean, and half of its 95 % interval as a share (Student's t)."""
    from scipy.stats import t

    logs = [math.log(value) for value in values]
    if len(logs) < 2:
        return (values or [math.nan])[0], math.inf
    error = statistics.stdev(logs) / len(logs) ** 0.5
    return (
        math.exp(statistics.fmean(logs)),
        math.expm1(error * float(t.ppf(0.975, len(logs) - 1))),
    )


def compared(all_rounds: list[dict], peer: str) -> dict:
    """Medians of the rounds, and how they stand to one contender's."""
    table = {}
    for name in sorted({n for done in all_rounds for n in done}, key=list(PEERS).index):
        rounds = [done[name] for done in all_rounds if name in done]
        middle, half = (
            interval(ratios(all_rounds, name)) if name != "ours" else (1.0, 0.0)
        )
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
            given = tokenizer(
                [texts[i] for i in some], return_tensors="pt", padding=True
            )
            longest = given["input_ids"].shape[1]
            out = model.generate(
                **given, num_beams=4, length_penalty=0.6, max_length=longest + 50
            )
            found |= zip(
                some, tokenizer.batch_decode(out, skip_special_tokens=True), strict=True
            )
        return [found[i] for i in range(len(texts))]

    return translate


def engine(kind: str, folder: Path, threads: int):
    """A function from sentences to translations, loaded from an export."""
    from transformer_lib.export import CTranslate2Model, OnnxModel
    from transformer_lib.translator import Translator

    if kind == "ours":
        return Translator.from_pretrained("tatoeba-en-de")
    if kind.startswith("Hugging Face"):
        return marian_translator(folder / "marian", sort="by length" in kind)
    if kind == "ONNX Runtime":
        model = OnnxModel(folder / "onnx", threads)
        return lambda texts: [model(text) for text in texts]
    end = "-int8" if "int8" in kind else ""
    return CTranslate2Model(folder / f"ctranslate2{end}", threads)


ENGINES = [
    "ours",
    "Hugging Face",
    "Hugging Face, by length",
    "CTranslate2 float32",
    "CTranslate2 int8",
    "ONNX Runtime",
]
FOLDERS = {
    "Hugging Face": "marian",
    "CTranslate2 float32": "ctranslate2",
    "CTranslate2 int8": "ctranslate2-int8",
    "ONNX Runtime": "onnx",
}


def one_load(asked) -> dict:
    """Seconds from imported packages to a first translation."""
    torch.set_num_threads(asked.threads)
    for name in (
        "ctranslate2",
        "onnxruntime",
        "transformers.models.marian.modeling_marian",
        "transformers.models.marian.tokenization_marian",
        "transformer_lib.translator",
        "transformer_lib.export.onnx",
        "transformer_lib.export.ctranslate2",
    ):
        importlib.import_module(name)
    start = time.perf_counter()
    engine(asked.load, Path(asked.data), asked.threads)(["Good morning."])
    return {"seconds": time.perf_counter() - start}


def decode(folder: Path, asked) -> dict:
    """The exports and the library on the same sentences."""
    from sacrebleu.metrics import BLEU

    from transformer_lib.export import export_model
    from transformer_lib.runs import load_pretrained

    model, tokenizer, about = load_pretrained("tatoeba-en-de")
    folders = export_model(model, tokenizer, folder, about)
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
    for _ in range(1 if asked.quick else 3):
        for name, run in engines.items():
            start = time.perf_counter()
            run(texts)
            seconds[name].append(time.perf_counter() - start)
    table = {}
    for name, times in seconds.items():
        tokens = sum(len(ids) + 1 for ids in tokenizer.encode_all(outputs[name]))
        table[name] = {
            "seconds": times,
            "tokens": tokens,
            "tokens_per_second": tokens / statistics.median(times),
            "as_ours": sum(map(str.__eq__, outputs[name], outputs["ours"])),
        }
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
    files = {
        name: [f for f in folders[kind].iterdir() if f.is_file()]
        for name, kind in FOLDERS.items()
    }
    shipped = ROOT / "transformer_lib" / "pretrained" / "tatoeba-en-de"
    files["ours"] = list(shipped.iterdir())
    exports = {
        name: {
            "bytes": sum(file.stat().st_size for file in some),
            "load_seconds": loads(name, folder, asked),
        }
        for name, some in files.items()
    }
    return {
        "corpus": corpus.name,
        "sentences": len(texts),
        "beam_size": 4,
        "engines": table,
        "bleu": {"sentences": len(pairs), **bleu},
        "exports": exports,
    }


def loads(name: str, folder: Path, asked) -> list[float]:
    """Seconds to a first translation, each in a process of its own."""
    settings = {"--load": name, "--data": folder, "--threads": asked.threads}
    return [alone(settings)["seconds"] for _ in range(1 if asked.quick else 3)]


# --- who is not here ------------------------------------------------------------------


def install() -> str | None:
    """Put the two peers that are on no list of ours into a folder; why not, if not."""
    if (INSTALLED / "joeynmt").is_dir() and (INSTALLED / "x_transformers").is_dir():
        return None
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--target",
            str(INSTALLED),
            *PACKAGES,
        ],
        capture_output=True,
        text=True,
    )
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


def why_absent(package: str) -> str:
    """What uv says to a request for this package beside today's torch and numpy."""
    held = f"torch=={version('torch').split('+')[0]}\nnumpy=={version('numpy')}\n"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "uv",
            "pip",
            "compile",
            "-q",
            "--only-binary",
            ":all:",
            "--no-header",
            "-",
            "--python",
            sys.executable,
        ],
        input=f"{package}\n{held}",
        capture_output=True,
        text=True,
    )
    if not done.returncode:
        return "installs here; not compared"
    said = " ".join(done.stderr.split())
    return said.partition("cause: ")[2].partition(", we can conclude")[0] or said


def main(arguments=None) -> dict | None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny models, two rounds")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=6, help="at least")
    parser.add_argument("--max-rounds", type=int, default=60)
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="no round of training begins later",
    )
    parser.add_argument("--updates", type=int, default=2, help="timed, each round")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of our batches")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["base", "small"])
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        help="contenders whose names hold one of these",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=("training", "decoding"),
        default=["training", "decoding"],
        help="what is measured now",
    )
    parser.add_argument("--corpus", default="mixed")
    parser.add_argument("--sentences", type=int, default=320, help="to decode")
    parser.add_argument(
        "--work", type=Path, default=ROUNDS, help="keeps the text and what was measured"
    )
    parser.add_argument("--out", type=out_file, help="where the figures are written")
    for name in ("--one", "--load", "--data", "--size"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.one:
        return contend(asked)
    if asked.load:
        return print(json.dumps(one_load(asked)))
    if asked.quick:
        asked.rounds, asked.max_rounds = 2, 2
        asked.sizes, asked.max_tokens = ["tiny"], 400
    missing = "a quick run installs nothing" if asked.quick else install()
    everyone = [n for n in PEERS if not (missing and n in INSTALLED_ASIDE)]
    names = [
        n
        for n in everyone
        if n[:4] == "ours" or n == REFERENCE or any(part in n for part in asked.only)
    ]
    asked.corpus = "grammar-en-de" if asked.quick else asked.corpus
    began, cases = time.monotonic(), {}
    with tempfile.TemporaryDirectory() as aside:
        place = Path(aside) if asked.quick else asked.work
        for i, size in enumerate(asked.sizes, start=1):
            asked.until = began + 60 * asked.minutes * i / len(asked.sizes)
            asked.size = size
            cases[size] = training(names, place, asked)
        decoding = kept_decoding(place, asked)
    tables = {
        size: compared(rounds, REFERENCE)
        for size, (_, rounds) in cases.items()
        if rounds
    }
    left_out = {} if asked.quick else {p: why_absent(p) for p in ABSENT}
    if missing:
        left_out |= {"JoeyNMT, x-transformers": missing}
    first = asked.size = asked.sizes[0]
    asked.vocab_size = PIECES[first]
    record = {
        "benchmark": "beside other toolkits: training, memory, decoding, exports",
        "command": "python benchmarks/peers.py",
        "settings": {k: v for k, v in vars(asked).items() if k not in HIDDEN},
        "data": {
            "corpus": asked.corpus,
            "pairs": count_of(asked),
            "sha256": cases[first][0].data["train"]["sha256"],
        },
        "environment": environment_record(),
        "peers": {p: version(p) for p in ("transformers", "ctranslate2", "onnxruntime")}
        | ({} if missing else dict(p.split("==") for p in PACKAGES[:2])),
        "left_out": left_out,
        "training": tables.get(first),
        "sizes": {
            size: {"vocab_size": PIECES[size], "training": table}
            for size, table in tables.items()
        },
        "decoding": decoding,
    }
    report(record)
    there = {name for rounds in cases.values() for done in rounds[1] for name in done}
    if decoding and len(tables) == len(asked.sizes) and there == set(everyone):
        keep(record, "benchmarks/peers", asked.out, asked.quick)
    elif asked.out or asked.quick:
        keep(record, "", asked.out, quick=True)
    else:
        print("not all was measured yet: no record is written")
    return record


def count_of(asked) -> int:
    """How many pairs of the corpus are drawn."""
    return 1000 if asked.quick else 60_000


def training(names, place: Path, asked) -> tuple:
    """The prepared text of a size, and all rounds of it; measured now if asked for."""
    folder, pieces = place / asked.size, PIECES[asked.size]
    if (folder / "data").is_dir():
        ready = Prepared.load(folder / "data")
    else:
        pairs = pairs_of(asked.corpus, count_of(asked))
        if pairs is None:
            raise SystemExit(f"{asked.corpus} is unavailable: name another --corpus.")
        folder.mkdir(parents=True, exist_ok=True)
        ready = prepared(pairs, str(folder), pieces)
    log = folder / f"rounds-{fingerprint(asked, ready)}.jsonl"
    rounds = kept_rounds(log)
    if "training" in asked.parts:
        print(f"{asked.size}, {pieces:,} pieces, {len(rounds)} rounds before")
        race(names, folder / "data", rounds, log, asked)
    return ready, rounds


def kept_decoding(place: Path, asked) -> dict | None:
    """What decode found, now or before; None if it was never asked for."""
    files = sorted((ROOT / "transformer_lib").rglob("*.py"))
    code = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    file = place / f"decoding-{asked.sentences}-{asked.threads}-{code[:12]}.json"
    if "decoding" in asked.parts and not file.exists():
        write_json(file, decode(place / "exports", asked))
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


PIECES = {"tiny": 340, "small": 8_000, "base": 37_000}  # by size
HIDDEN = ("one", "load", "data", "first", "out", "work", "until", "parts", "only")


def report(record: dict) -> None:
    """Print what was found."""
    for size, case in record["sizes"].items():
        print(f"{size} model, {case['vocab_size']:,} pieces")
        for name, row in case["training"].items():
            losses = " ".join(f"{loss:.3f}" for loss in row["rounds"][0]["losses"])
            within = row["ours_times_within"]
            name += " (random batches)" if PEERS[name].feed == "random" else ""
            print(
                f"{name:34}{row['tokens_per_second']:8,.0f} tokens/s, ours "
                f"{row['ours_times']:5.2f} times"
                + ("" if within is None else f" ± {within:.0%}")
                + f", {row['peak_mb']:8,.0f} MB, {row['real_share']:.0%} real, "
                f"{len(row['rounds'])} rounds, losses {losses}"
            )
    if record["decoding"] is None:
        return
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
