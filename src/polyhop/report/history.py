"""What a run wrote down: ``metrics.jsonl`` of a run folder as records and series.

Reads files only, so a run can be looked at while it trains, after it was killed, or on another machine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from polyhop.errors import InputError

__all__ = ["METRICS_FILE", "History", "read_history"]

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class History:
    """One record per epoch, ascending: names ("loss", "val", ...) to numbers; not every epoch has every name."""

    records: tuple[dict[str, Any], ...]

    def series(self, name: str) -> list[tuple[float, float]]:
        """(epoch, value) of every epoch that has a number under this name."""
        return [
            (float(record["epoch"]), float(record[name]))
            for record in self.records
            if isinstance(record.get(name), int | float)
        ]

    @property
    def names(self) -> list[str]:
        """Names that hold numbers, "epoch" left out, in order of first appearance."""
        seen: dict[str, None] = {}
        for record in self.records:
            for name, value in record.items():
                if name != "epoch" and isinstance(value, int | float):
                    seen.setdefault(name)
        return list(seen)


def read_history(run_dir: str | PathLike[str]) -> History:
    """The epochs of a run folder.

    A resumed run writes some epochs again: the later line counts. A last line cut short by a kill is left out; a broken
    line anywhere else is an InputError.
    """
    path = Path(run_dir) / METRICS_FILE
    if not path.is_file():
        raise InputError(
            f"{path} does not exist: expected a run folder made by training (it holds {METRICS_FILE})"
        )
    epochs: dict[int, dict[str, Any]] = {}
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise InputError(f"{path}, line {number} is not JSON: {error}") from error
        if isinstance(record, dict) and isinstance(record.get("epoch"), int):
            epochs[record["epoch"]] = epochs.get(record["epoch"], {}) | record
    return History(tuple(epochs[epoch] for epoch in sorted(epochs)))
