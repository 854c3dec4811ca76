"""Chapter 13: nothing is lost when a machine dies, and processes share a run."""

import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from small_runs import RUN_FILES

from transformer_lib.batches import prepare
from transformer_lib.corpora import grammar_split
from transformer_lib.machine import Team
from transformer_lib.runs import Recipe, Run, set_up, train, trainer
from transformer_lib.runs.checkpoints import load_tensors
from transformer_lib.storage import DamagedFile, write_json, write_manifest
from transformer_lib.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "TRANSFORMER_LIB_MIRROR": "",
}
SMALL = {"d_model": 32, "num_heads": 2, "num_layers": 1, "d_ff": 64}


SIZES = {"vocab_size": 340, "max_tokens": 200, "max_length": 128, "max_steps": 60}
SIZES |= {"validate_every": 4, "warmup": 20, "keep_last": 2}


def recipe_of(corpus, **changes):
    settings = {"name": "tiny", "corpus": corpus} | SIZES
    return Recipe(**settings | {"model": SMALL | {"dropout": 0.1}} | changes)


def recipe_of_full(corpus, **changes):
    """What scale "full" trains, every setting of it, with sizes for seconds."""
    recipe = asdict(Recipe.load("tatoeba-en-de"))
    changes |= {"corpus": corpus, "model": recipe["model"] | SMALL, "dropout_after": 10}
    return Recipe(**recipe | SIZES | changes)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As the processes that are compared have: sums depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """300 and 30 pairs of the embedded grammar, as files of a user's."""
    folder, files = tmp_path_factory.mktemp("text"), {}
    for split, count in ("train", 300), ("valid", 30):
        files[split] = str(folder / f"{split}.tsv")
        lines = [f"{a}\t{b}\n" for a, b in grammar_split("valid")[-count:]]
        Path(files[split]).write_text("".join(lines), encoding="utf-8")
    prepare(files, folder / "data", 340, threads=1)
    return files


@pytest.fixture(scope="module")
def data_dir(corpus):
    return Path(corpus["train"]).parent / "data"


@pytest.fixture(scope="module")
def whole(corpus, data_dir, tmp_path_factory):
    """The run without any accident."""
    folder = tmp_path_factory.mktemp("whole")
    train(recipe_of(corpus, max_steps=24), folder, data_dir, show=False)
    return folder


def state(run_dir):
    """All tensors of the last checkpoint, random state included, and the losses."""
    tensors, record = load_tensors(run_dir / "last.safetensors")
    losses = [(h["step"], h["train_loss"], h["valid_loss"]) for h in record["history"]]
    return tensors, losses


def assert_same_run(one, two):
    (tensors, losses), (others, other_losses) = state(one), state(two)
    assert losses == other_losses
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name]), name
    for name in "best", "average":
        a, b = (Run.load(folder, weights=name) for folder in (one, two))
        for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True):
            assert torch.equal(p, q), name


KILLING = """
import json, os, random, signal, sys, time
import torch._dynamo  # what an optimizer loads takes longer than all updates
from transformer_lib.runs import trainer
from transformer_lib.runs import Recipe
from transformer_lib.runs import train

settings, data, folder, kills = json.loads(sys.argv[1])
recipe = Recipe(**settings)
if recipe.precision == "float16":
    # The scale doubles after 5 good updates, not 2,000: it rises until it is too large.
    assert trainer.DOUBLE_AFTER == 2000
    trainer.DOUBLE_AFTER = 5
    # How fast 16 bits are here is measured at each start, as long as many updates.
    trainer.warn_of_slow_bits = lambda *_: None
one_update = trainer.one_update


def start(run_dir):
    # The number of a process that trains, and a pipe: a byte for each of its updates.
    updates, done = os.pipe()
    if child := os.fork():
        os.close(done)
        return child, updates

    def told(*given):
        made = one_update(*given)
        os.write(done, b".")
        return made

    try:
        trainer.one_update = told
        train(recipe, run_dir, data, show=False)
        os._exit(0)
    finally:
        os._exit(1)


child, updates = start(f"{folder}/whole")
os.read(updates, 1)
began = time.monotonic()
_, status = os.waitpid(child, 0)
assert status == 0, status
each = (time.monotonic() - began) / recipe.max_steps

rng, killed, runs, writing, resumed, reached = random.Random(11), 0, 0, 0, 0, []
while killed < kills:
    runs += 1
    os.mkdir(f"{folder}/{runs}")
    while True:
        resumed += os.path.exists(f"{folder}/{runs}/last.safetensors")
        child, updates = start(f"{folder}/{runs}")
        wanted = rng.randrange(14) if killed < kills else recipe.max_steps + 1
        made = 0
        while made < wanted and os.read(updates, 1):
            made += 1
        if made == wanted:
            time.sleep(rng.uniform(0, each))
            os.kill(child, signal.SIGKILL)
        os.close(updates)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            assert status == 0, status
            break
        killed += 1
        reached.append(made)
        names = " ".join(os.listdir(folder) + os.listdir(f"{folder}/{runs}"))
        writing += ".part" in names or ".new" in names
said = {"killed": killed, "runs": runs, "writing": writing, "resumed": resumed}
print(json.dumps(said | {"reached": reached, "each": each}))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    "kills, made, changes",
    [
        (12, recipe_of, {"dropout_after": 10, "accumulate": 2}),
        (6, recipe_of_full, {"precision": "float16"}),  # as a T4 wants it
    ],
    ids=["float32", "float16"],
)
def test_killed_again_and_again(kills, made, changes, corpus, data_dir, tmp_path):
    """SIGKILL after a few updates, at any moment: the same weights to the bit."""
    settings = asdict(made(corpus, **changes))
    asked = json.dumps([settings, str(data_dir), str(tmp_path), kills])
    done = subprocess.run(
        [sys.executable, "-c", KILLING, asked],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["killed"] == kills and said["resumed"] > kills / 2, said
    assert sum(said["reached"]) > 4 * kills, said  # in the middle of training
    for number in range(1, said["runs"] + 1):
        assert_same_run(tmp_path / "whole", tmp_path / str(number))
        one, two = (
            load_tensors(tmp_path / name / "last.safetensors")[1]
            for name in ("whole", str(number))
        )
        for known in ("scale", "steady", "skipped"):
            assert one[known] == two[known], known
        if "precision" in changes:
            # It began at 2^16 and was halved twice or more: so it was doubled as often.
            assert one["scale"] >= 2**16 and one["skipped"] >= 2


def test_float16_goes_on_with_its_scale(corpus, data_dir, tmp_path, monkeypatch):
    """Stopped and gone on with: weights, scale and counts as without the stop."""
    monkeypatch.setattr(trainer, "warn_of_slow_bits", lambda *_: None)  # it measures
    short, long = (recipe_of(corpus, max_steps=n, precision="float16") for n in (8, 16))
    train(long, tmp_path / "whole", data_dir, show=False)
    train(short, tmp_path / "parts", data_dir, show=False)
    train(long, tmp_path / "parts", data_dir, show=False)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    one, two = (
        load_tensors(tmp_path / name / "last.safetensors")[1]
        for name in ("whole", "parts")
    )
    assert one["steady"] == two["steady"] > 8 and one["scale"] == two["scale"]


def test_packed_rows_go_on_in_the_middle_of_an_epoch(corpus, data_dir, tmp_path):
    """Stopped and gone on with, dropout on: the same run to the bit."""
    settings = {"packed": 40, "max_tokens": 1500}
    short, long = (recipe_of(corpus, max_steps=n, **settings) for n in (12, 24))
    train(long, tmp_path / "whole", data_dir, show=False)
    run = train(short, tmp_path / "parts", data_dir, show=False)
    assert run.progress.epoch and run.progress.batch
    train(long, tmp_path / "parts", data_dir, show=False)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def cut_short(path):
    """A file of which only the first half arrived."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def one_bit(path):
    """A file of which one bit is another."""
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 16
    path.write_bytes(bytes(content))


def emptied(path):
    """What metaseq issue 53 reports: a last checkpoint of zero bytes."""
    path.write_bytes(b"")


DAMAGES = [cut_short, one_bit, emptied]


@pytest.fixture
def half_way(corpus, data_dir, tmp_path):
    """A run that stopped in the middle."""
    train(recipe_of(corpus, max_steps=12), tmp_path / "run", data_dir, show=False)
    return tmp_path / "run"


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_last_checkpoint_is_named_and_the_one_before_it_taken(
    damage, half_way, whole, corpus, data_dir
):
    damage(half_way / "last.safetensors")
    with pytest.warns(UserWarning, match="last.safetensors is damaged.*last.previous"):
        train(recipe_of(corpus, max_steps=24), half_way, data_dir, show=False)
    assert_same_run(whole, half_way)


def test_a_damaged_checkpoint_does_not_push_out_the_good_one_before(
    half_way, whole, corpus, data_dir
):
    last, before = (half_way / f"last{end}.safetensors" for end in ("", ".previous"))
    cut_short(last)
    good = before.read_bytes()
    with pytest.warns(UserWarning, match="last.safetensors is damaged"):
        train(recipe_of(corpus, max_steps=12), half_way, data_dir, show=False)
    assert before.read_bytes() == good  # and the run has a new last one
    cut_short(last)
    with pytest.warns(UserWarning, match="last.safetensors is damaged.*last.previous"):
        train(recipe_of(corpus, max_steps=24), half_way, data_dir, show=False)
    assert_same_run(whole, half_way)


def test_two_damaged_checkpoints_are_named_and_the_best_weights_still_load(
    half_way, corpus, data_dir
):
    for name in "last", "last.previous":
        cut_short(half_way / f"{name}.safetensors")
    with pytest.raises(DamagedFile, match="last.safetensors.*last.previous.safetens"):
        train(recipe_of(corpus, max_steps=24), half_way, data_dir, show=False)
    assert Run.load(half_way).record["step"] == 12
    assert Run.load(half_way, weights="average").record["averaged"] == [8, 12]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_best_weights_are_named_and_others_load(damage, half_way):
    damage(half_way / "best.safetensors")
    with pytest.raises(DamagedFile, match="best.safetensors is damaged"):
        Run.load(half_way)
    assert Run.load(half_way, weights="last").record["step"] == 12


@pytest.mark.parametrize("spare_is_good", [True, False])
def test_a_lost_best_is_written_again(half_way, corpus, data_dir, spare_is_good):
    cut_short(half_way / "best.safetensors")
    if not spare_is_good:
        cut_short(half_way / "step-000012.safetensors")
    recipe = recipe_of(corpus, max_steps=12 if spare_is_good else 16)
    with pytest.warns(UserWarning, match="best.safetensors is damaged"):
        run = train(recipe, half_way, data_dir, show=False)
    assert run.record["step"] == recipe.max_steps


def test_damaged_token_pairs_are_named_and_the_run_is_kept(
    corpus, data_dir, half_way, tmp_path
):
    shutil.copytree(data_dir, tmp_path / "data")
    one_bit(tmp_path / "data/train/src.npy")
    recipe = recipe_of(corpus, max_steps=24)
    with pytest.raises(ValueError, match=r"train/src.npy is damaged"):
        train(recipe, half_way, tmp_path / "data", show=False)
    assert Run.load(half_way).record["step"] == 12


FULL_DISK = """
import json, os, sys
from pathlib import Path
from transformer_lib.runs import Recipe
from transformer_lib.runs import Run
from transformer_lib.runs import train

long, short, data, folder = json.loads(sys.argv[1])
run = Path(folder) / "run"
train(Recipe(**short), run, data, show=False)
ballast = os.open(Path(folder) / "ballast", os.O_CREAT | os.O_WRONLY)
try:
    while True:
        os.write(ballast, bytes(4096))
except OSError:
    os.truncate(ballast, os.stat(ballast).st_size - 80_000)
try:
    train(Recipe(**long), run, data, show=False)
except OSError as error:
    print("said:", error)
steps = [Run.load(run, weights=name).record["step"] for name in ("best", "last")]
print("good:", *steps)
print("left:", [p.name for p in run.iterdir() if p.name.endswith((".part", ".new"))])
os.close(ballast)
os.remove(Path(folder) / "ballast")
train(Recipe(**long), run, data, show=False)
os.system(f"cp -r {run} {sys.argv[2]}")
"""


def test_full_disk(corpus, data_dir, whole, tmp_path):
    """On a small tmpfs: it is said, the last good state stays, and the run goes on."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=5m none {disk}"
    root = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    try:
        able = subprocess.run([*root, "sh", "-c", mount], capture_output=True)
    except OSError:
        able = None
    if able is None or able.returncode:
        pytest.skip("this system lets nobody mount a small tmpfs")
    recipes = [asdict(recipe_of(corpus, max_steps=n)) for n in (24, 8)]
    asked = json.dumps([*recipes, str(data_dir), str(disk)])
    command = f'{mount} && "$0" -c "$1" "$2" "$3"'
    done = subprocess.run(
        [
            *root,
            "sh",
            "-c",
            command,
            sys.executable,
            FULL_DISK,
            asked,
            str(tmp_path / "saved"),
        ],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    assert "could not be written" in done.stdout, done.stdout
    assert "good: 8 8" in done.stdout
    assert "left: []" in done.stdout
    assert_same_run(whole, tmp_path / "saved")


SHARED = """
import json, os, sys
from transformer_lib.runs import trainer
from transformer_lib.runs import Recipe

settings, data, folder = json.loads(sys.argv[1])
recipe = Recipe(**settings)
run = trainer.train(recipe, f"{folder}/shared", data, "cpu", show=False)
assert run.progress.step == recipe.max_steps
print("through")
real, calls = trainer.update, []


def failing(*args):
    calls.append(1)
    if os.environ["RANK"] == "1" and len(calls) == 3:
        raise RuntimeError("a fault of process 1")
    return real(*args)


trainer.update = failing
trainer.train(recipe, f"{folder}/fails", data, "cpu", show=False)
"""


def test_two_processes_are_one_with_accumulation(corpus, data_dir, tmp_path):
    """torchrun on gloo: the losses and weights of one process with accumulation 2.

    Then process 1 fails in the middle of a second run: nobody waits for it for ever.
    """
    recipe = recipe_of(corpus, accumulate=2, max_steps=12, model=SMALL | {"dropout": 0})
    one = train(recipe, tmp_path / "one", data_dir, show=False)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    script = tmp_path / "shared.py"
    script.write_text(SHARED)
    asked = json.dumps([asdict(recipe), str(data_dir), str(tmp_path)])
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            str(port),
            str(script),
            asked,
        ],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.stdout.count("through") == 2, done.stderr
    assert done.returncode != 0 and "a fault of process 1" in done.stderr
    two = Run.load(tmp_path / "shared")
    for a, b in zip(one.history, two.history, strict=True):
        assert a["tokens"] == b["tokens"]
        for key in "train_loss", "valid_loss", "grad_norm":
            assert a[key] == pytest.approx(b[key], rel=1e-6), key
    for p, q in zip(one.model.parameters(), two.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-5, rtol=1e-4)


def test_processes_that_cannot_share_the_batches_are_told(corpus, data_dir, tmp_path):
    recipe = recipe_of(corpus, accumulate=3)
    with pytest.raises(ValueError, match="accumulate=3: 2 processes.*multiple of 2"):
        set_up(recipe, tmp_path, data_dir, Team(0, 2, "cpu"))


@pytest.fixture(scope="module")
def texts(corpus, data_dir, tmp_path_factory):
    """Text prepared again with a change each: of one word, or of the order."""

    def prepared(name, split, change):
        folder = tmp_path_factory.mktemp(name)
        files = {}
        for part, path in corpus.items():
            files[part] = str(folder / f"{part}.tsv")
            lines = Path(path).read_text("utf-8").splitlines()
            lines = change(lines) if part == split else lines
            Path(files[part]).write_text("\n".join(lines) + "\n", encoding="utf-8")
        tokenizer = Tokenizer.load(data_dir / "tokenizer.model")
        prepare(files, folder / "data", 340, tokenizer=tokenizer, threads=1)
        return folder / "data"

    def word(lines):
        source, target = lines[0].split("\t")
        return [f"{source} the\t{target}", *lines[1:]]

    changes = {
        "moved": (None, list),
        "word": ("train", word),
        "turned": ("train", lambda lines: lines[::-1]),
        "valid": ("valid", word),
    }
    return {name: prepared(name, *change) for name, change in changes.items()}


@pytest.mark.parametrize(
    "name, said",
    [
        ("word", "other training pairs"),
        ("turned", "other training pairs"),
        ("valid", "other validation pairs"),
    ],
)
def test_a_run_does_not_go_on_with_another_text(texts, half_way, corpus, name, said):
    """Not with one word more, another order or other validation pairs."""
    before = {path: path.read_bytes() for path in half_way.iterdir()}
    recipe = recipe_of(corpus, max_steps=24)
    with pytest.raises(ValueError, match=f"{said} than the run in .* to go on with"):
        train(recipe, half_way, texts[name], show=False)
    assert {path: path.read_bytes() for path in half_way.iterdir()} == before


def test_a_run_goes_on_with_its_text_from_another_place(texts, half_way, whole, corpus):
    train(recipe_of(corpus, max_steps=24), half_way, texts["moved"], show=False)
    assert_same_run(whole, half_way)


def test_a_run_that_began_before_sources_were_folded(corpus, tmp_path):
    """It goes on with its own text; the text prepared anew has another checksum."""
    files = {}
    for split, path in corpus.items():
        files[split] = str(tmp_path / f"{split}.tsv")
        typed = Path(path).read_text("utf-8").replace(".\t", "\u2019.\t")
        Path(files[split]).write_text(typed, encoding="utf-8")
    run, recipe = tmp_path / "run", recipe_of(files, max_steps=2)
    ready = prepare(files, run / "data", 340, threads=1, fold=False)
    train(recipe, run, show=False)
    tokenizer = Tokenizer(ready.tokenizer.model)
    prepare(files, tmp_path / "new", 340, tokenizer=tokenizer, threads=1)
    longer = recipe_of(files, max_steps=4)
    with pytest.raises(ValueError, match="other training and validation pairs"):
        train(longer, run, tmp_path / "new", show=False)
    assert train(longer, run, show=False).history[-1]["step"] == 4


def test_a_run_of_an_earlier_version_is_known_by_its_texts_checksum(
    texts, half_way, corpus
):
    about = json.loads((half_way / "about.json").read_text("utf-8"))
    for split in "train", "valid":
        del about["data"][f"{split}_sha256"]
    write_json(half_way / "about.json", about)
    write_manifest(half_way, RUN_FILES)
    recipe = recipe_of(corpus, max_steps=16)
    with pytest.raises(ValueError, match="holds other training pairs"):
        train(recipe, half_way, texts["word"], show=False)
    assert train(recipe, half_way, texts["moved"], show=False).progress.step == 16
