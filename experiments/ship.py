"""ship.py RUN [--name NAME]: make a trained run the model that ships.

    make evidence QUEUE=translator     trains and scores it; then, with its folder:
    python experiments/ship.py RUN

Takes the record.json that the queue left in the folder of the run, and the weights that
its headline is of; writes transformer_lib/pretrained/NAME, by which the library knows
the model, and transformer_lib/evidence/RECIPE.json, and makes again every record that
is read off this model: the sentence of chapters 01 to 07, the facts of the essay, the
heads of chapter 27, newstest2014 of chapter 24, the parts of the test set and the 200
lines of chapter 19. Minutes to an hour on a CPU. It ends with the commands that need
the built book. Refuses a run that is not finished, and weights of 20 MB or more.

Record: none of its own; it takes what evidence.py wrote, and runs others again
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from evidence import loaded

from transformer_lib.storage import write_json

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "transformer_lib"
LARGEST = 20e6  # bytes of a shipped model, its tokenizer and recipe included
AFTER = [
    [sys.executable, "experiments/sentence.py"],
    [sys.executable, "experiments/essay_record.py"],
    [
        sys.executable,
        "-c",
        "import transformer_lib.looking_inside as h; h.record_heads("
        "'transformer_lib/evidence/attention-heads.json')",
    ],
    [sys.executable, "benchmarks/newstest.py"],
    [sys.executable, "experiments/translator_scores.py"],
    [sys.executable, "experiments/robustness.py", "{name}", "--out", "{typed}"],
]
LATER = "make book && python benchmarks/translator.py && make test"


def ship(run_dir: Path, name: str, library: Path = LIBRARY) -> Path:
    """Write the model and its record into the library.

    Returns:
        The folder of the model.

    Raises:
        ValueError: If the run is not finished or not scored, or is too large.
    """
    if not (run_dir / "record.json").is_file():
        raise ValueError(f"{run_dir} has no record.json: let the queue score the run.")
    record = json.loads((run_dir / "record.json").read_text("utf-8"))
    if not record["finished"]:
        raise ValueError(f"{run_dir}: this run is not finished; train it to its end.")
    run = loaded(run_dir, "cpu", record["weights"])
    folder = library / "pretrained" / name
    sizes = 2 * sum(p.numel() for p in run.model.parameters())
    sizes += (run_dir / "tokenizer.model").stat().st_size
    if sizes >= LARGEST:
        raise ValueError(f"{sizes / 1e6:.1f} MB: a shipped model has less than 20.")
    run.save_pretrained(folder, max_length=record["max_length"])
    write_json(library / "evidence" / f"{run.recipe.name}.json", record)
    return folder


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of the finished run")
    parser.add_argument("--name", default="tatoeba-en-de", help="its name from now on")
    asked = parser.parse_args(arguments)
    try:
        print(f"The model is in {ship(asked.run, asked.name)}.")
    except ValueError as error:
        sys.exit(str(error))
    recipe = json.loads((asked.run / "record.json").read_text("utf-8"))["recipe"]
    typed = f"transformer_lib/evidence/results/robustness/{recipe['name']}.json"
    for command in AFTER:
        command = [part.format(name=asked.name, typed=typed) for part in command]
        subprocess.run(command, cwd=ROOT, check=True)
    print(f"Then: {LATER}")


if __name__ == "__main__":
    main()
