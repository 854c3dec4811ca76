"""The notebooks: the chapters, and what is under their hoods."""

from pathlib import Path

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def name_of(path: Path) -> str:
    """A notebook's name below notebooks/, such as under_the_hood/02_attention."""
    parts = path.with_suffix("").parts
    return "/".join(parts[-2:] if "under_the_hood" in parts else parts[-1:])


def all_notebooks(folder: Path = NOTEBOOKS) -> dict[str, Path]:
    """Each notebook's name and file; chapters first."""
    paths = [*sorted(folder.glob("*.ipynb")), *sorted(folder.glob("*/*.ipynb"))]
    return {name_of(path): path for path in paths}
