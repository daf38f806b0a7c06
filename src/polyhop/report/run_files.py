"""The small files of a run folder, read leniently: one that is missing or damaged costs its section only."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyhop.errors import InputError
from polyhop.report.history import METRICS_FILE, History, read_history

__all__ = ["RunFiles", "check_run", "read_files", "trace_files"]

_NAMES = ("config", "command", "result", "partition", "bill", "plan")
_TRACE = re.compile(r"trace-rank(\d+)\.jsonl")
_FRESH_S = 60.0  # a run that wrote within this time is believed to be running


@dataclass(frozen=True)
class RunFiles:
    """``found``: the JSON documents that are there, by name without ending. ``notes``: what is wrong with others."""

    path: Path
    history: History
    found: dict[str, dict[str, Any]]
    notes: list[str] = field(default_factory=list)

    def get(self, name: str) -> dict[str, Any]:
        return self.found.get(name, {})

    @property
    def state(self) -> str:
        """finished | running | ended early."""
        epochs, last = self.get("result").get("epochs"), self.history.records[-1:]
        if isinstance(epochs, int) and (not last or last[0]["epoch"] <= epochs):
            return "finished"
        newest = max((path.stat().st_mtime for path in self._growing()), default=0.0)
        return "running" if time.time() - newest < _FRESH_S else "ended early"

    def _growing(self) -> list[Path]:
        metrics = self.path / METRICS_FILE
        return [*trace_files(self.path).values(), *([metrics] if metrics.is_file() else [])]


def trace_files(path: Path) -> dict[int, Path]:
    """Trace file of each rank, in rank order."""
    found = {}
    for each in path.glob("trace-rank*.jsonl"):
        match = _TRACE.fullmatch(each.name)
        if match:
            found[int(match[1])] = each
    return dict(sorted(found.items()))


def check_run(path: Path) -> None:
    """InputError unless the folder looks like one of a run."""
    if not path.is_dir():
        raise InputError(
            f"no folder {path}: give the folder of a run, as 'polyhop train' names it at its end"
        )
    if not any((path / name).is_file() for name in ("config.json", METRICS_FILE)) and not trace_files(path):
        raise InputError(
            f"{path} is not a run folder: it has no config.json, {METRICS_FILE} or trace-rank0.jsonl"
        )


def read_files(path: Path) -> RunFiles:
    """What is there now."""
    found, notes = {}, []
    for name in _NAMES:
        try:
            value = json.loads((path / f"{name}.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            notes.append(f"{name}.json cannot be read: {error}")
            continue
        if isinstance(value, dict):
            found[name] = value
        else:
            notes.append(f"{name}.json is no record")
    history = History(())
    if (path / METRICS_FILE).is_file():
        try:
            history = read_history(path)
        except (OSError, ValueError) as error:
            notes.append(str(error))
    return RunFiles(path, history, found, notes)
