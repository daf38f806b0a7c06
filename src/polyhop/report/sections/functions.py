"""Functions of strategy ``serverless``: how many are alive, tasks in flight and waiting, dollars so far, and the bill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polyhop.report.traces.clock import Clock
from polyhop.report.traces.tally import RankTally

__all__ = ["functions"]

_VALUES = ("functions", "in_flight", "waiting", "again", "dollars")


def functions(
    tallies: Sequence[RankTally], clock: Clock, bill: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Of every rank over time, what was decided about their number, and what all cost; None where there are none."""
    ranks = [_of_rank(tally, clock) for tally in tallies if tally.functions.moments]
    if not ranks and bill is None:
        return None
    decided = [
        {
            "rank": tally.rank,
            "at_s": clock.at(record["at"]),
            "wanted": record.get("wanted"),
            "why": str(record.get("why", "")),
        }
        for tally in tallies
        for record in tally.decisions
    ]
    tasks: dict[str, float] = {}
    for tally in tallies:
        tasks = {key: tasks.get(key, 0.0) + tally.tasks.get(key, 0.0) for key in {**tasks, **tally.tasks}}
    return {"ranks": ranks, "decided": decided, "tasks": tasks, "bill": None if bill is None else dict(bill)}


def _of_rank(tally: RankTally, clock: Clock) -> dict[str, Any]:
    moments = tally.functions.moments
    return {
        "rank": tally.rank,
        "at_s": [round(clock.at(at), 3) for at, _ in moments],
        **{name: [values.get(name) for _, values in moments] for name in _VALUES},
    }
