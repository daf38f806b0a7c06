"""What a run was: graph, model, strategy, ranks and options, from its small files, and its course epoch by epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from polyhop.report.run_files import RunFiles
from polyhop.report.traces.tally import RankTally

__all__ = ["about", "course", "options"]

_MOST_POINTS = 1500
_NOT_OPTIONS = frozenset({"identity", "torch", "graph", "num_ranks", "run_dir", "resume", "progress"})
_OF_COMMAND = ("model", "hidden", "layers", "dropout", "split")


def about(files: RunFiles, tallies: Sequence[RankTally]) -> dict[str, Any]:
    """For the head of a report; None where nothing is known."""
    config, identity = files.get("config"), files.get("config").get("identity") or {}
    graph, model = identity.get("graph") or {}, identity.get("model") or {}
    hosts = sorted({attempt.host for tally in tallies for attempt in tally.attempts if attempt.host})
    return {
        "graph": config.get("graph") or files.get("command").get("source"),
        **{name: graph.get(name) for name in ("nodes", "edges", "features", "classes")},
        "model": model.get("class") or files.get("command").get("model"),
        "model_options": model.get("options") or {},
        "strategy": config.get("strategy"),
        "num_ranks": config.get("num_ranks") or len(tallies) or None,
        "hosts": hosts,
        "max_epochs": config.get("max_epochs"),
        "metric": files.get("result").get("metric") or config.get("metric") or "metric",
        "torch": config.get("torch"),
        "began": min((attempt.origin for tally in tallies for attempt in tally.attempts), default=None),
        "num_attempts": max((len(tally.attempts) for tally in tallies), default=0),
    }


def options(files: RunFiles) -> dict[str, Any]:
    """Every option that may differ from run to run."""
    config, command = files.get("config"), files.get("command")
    found = {"graph": config.get("graph") or command.get("source"), "num_ranks": config.get("num_ranks")}
    found |= {name: command[name] for name in _OF_COMMAND if name in command}
    if isinstance(command.get("more"), dict):
        found |= command["more"]
    return found | {name: value for name, value in config.items() if name not in _NOT_OPTIONS}


def course(files: RunFiles) -> dict[str, list[float | None]]:
    """Series of metrics.jsonl, "epoch" first; of a long run every k-th epoch, the best and the last."""
    records = files.history.records
    every = -(-len(records) // _MOST_POINTS) or 1
    best = max(range(len(records)), key=lambda at: _value(records[at], "val") or -math.inf, default=-1)
    last = len(records) - 1
    kept = [record for at, record in enumerate(records) if at % every == 0 or at in (best, last)]
    return {name: [_value(record, name) for record in kept] for name in ("epoch", *files.history.names)}


def _value(record: dict[str, Any], name: str) -> float | None:
    value = record.get(name)
    return value if isinstance(value, int | float) and math.isfinite(value) else None
