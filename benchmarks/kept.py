"""Where the figures of a benchmark are kept."""

import argparse
from pathlib import Path

from transformer_lib.storage import ensure_writable, write_json

EVIDENCE = Path(__file__).parents[1] / "transformer_lib" / "evidence"


def out_file(name: str) -> Path:
    """The file of --out, for argparse: where it cannot be written, that is said now."""
    path = Path(name)
    try:
        ensure_writable(path.parent, folder=True)  # it is made if it is not there
        if path.parent.is_dir():
            ensure_writable(path)
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path


def keep(record: dict, name: str, out: Path | None, quick: bool) -> None:
    """Write a record where it was asked for; else a full run goes into the evidence.

    The name is the one that read_evidence knows it by.
    """
    if out is None and not quick:
        out = EVIDENCE / f"{name}.json"
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out, record)
        print(f"written: {out}")
