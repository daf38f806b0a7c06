"""Memory of every rank from epoch to epoch, as its system counted it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyhop.report.traces.tally import RankTally

__all__ = ["memory"]


def memory(tallies: Sequence[RankTally]) -> dict[str, Any] | None:
    """Bytes; None where none were noted."""
    ranks = [
        {"rank": tally.rank, **{name: tally.most.values(name).tolist() for name in tally.most.keys}}
        for tally in tallies
        if tally.most.keys
    ]
    if not ranks:
        return None
    peak = max(max(entry.get("peak") or entry.get("resident") or [0.0]) for entry in ranks)
    return {"ranks": ranks, "epochs": tallies[0].most.last_epochs(), "peak": peak}
