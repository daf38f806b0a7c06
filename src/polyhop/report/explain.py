"""Runs explained: the one document that the page, the terminal and ``--json`` all show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyhop import __version__
from polyhop.report.run import RunReader
from polyhop.report.sections.compare import compare

__all__ = ["Explainer"]


class Explainer:
    """Reads run folders; ``document`` may be asked for again and again while they grow."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.readers = [RunReader(path, name) for path, name in zip(paths, _names(paths), strict=True)]

    def document(self, *, has_timeline: bool = True) -> dict[str, Any]:
        """Everything that is known now, as plain values."""
        runs = []
        for reader in self.readers:
            reader.refresh()
            runs.append(reader.document(has_timeline=has_timeline))
        found = compare(runs) if len(runs) > 1 else None
        return {
            "version": 1,
            "made_by": f"polyhop {__version__}",
            "runs": runs,
            "comparison": found,
            "notes": [],
        }


def _names(paths: Sequence[Path]) -> list[str]:
    """The folders' names; with as much of what is above as tells them apart."""
    whole = [path.resolve().parts for path in paths]
    for depth in range(1, max(map(len, whole), default=1) + 1):
        names = ["/".join(parts[-depth:]) for parts in whole]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(names, start=1)]
