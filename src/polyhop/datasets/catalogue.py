"""Where a data set's name leads: the given folder, then ``$POLYHOP_DATA``, then what ships inside the package."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["EMBEDDED", "find", "names"]

EMBEDDED = Path(__file__).parent / "embedded"


def _folders(data_dir: str | os.PathLike[str] | None) -> list[Path]:
    given = [data_dir, os.environ.get("POLYHOP_DATA")]
    return [Path(folder).expanduser() for folder in given if folder] + [EMBEDDED]


def find(name: str, data_dir: str | os.PathLike[str] | None = None) -> Path | None:
    """The file or folder of a name, or None. ``ogbn-arxiv`` also finds OGB's own folder ``ogbn_arxiv``."""
    for folder in _folders(data_dir):
        candidates = (folder / f"{name}.npz", folder / name, folder / name.replace("-", "_"))
        for path in candidates:
            if path.is_file() or (path.is_dir() and any(path.iterdir())):
                return path
    return None


def names(data_dir: str | os.PathLike[str] | None = None) -> list[str]:
    """Every name that ``find`` knows, sorted."""
    found: set[str] = set()
    for folder in _folders(data_dir):
        if folder.is_dir():
            found.update(path.stem for path in folder.glob("*.npz"))
            found.update(
                path.name
                for path in folder.iterdir()
                if path.is_dir() and not path.name.startswith((".", "_"))
            )
    return sorted(found)
