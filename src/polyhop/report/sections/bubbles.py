"""Bubbles of a pipeline: the share of a rank's step in which it computes no chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polyhop.report.sections.phases import main_thread
from polyhop.report.traces.tally import RankTally

__all__ = ["bubbles"]


def bubbles(tallies: Sequence[RankTally]) -> dict[str, Any] | None:
    """Idle shares of every rank, over epochs and on average; None where no rank computes chunks."""
    found = [entry for tally in tallies if (entry := _of_rank(tally)) is not None]
    if not found:
        return None
    rows = next(tally.sums for tally in tallies if tally.has_chunks)
    return {"ranks": found, "epochs": rows.last_epochs(), "mean": sum(e["idle"] for e in found) / len(found)}


def _of_rank(tally: RankTally) -> dict[str, Any] | None:
    thread, sums = main_thread(tally), tally.sums
    if not tally.has_chunks or thread is None:
        return None
    busy = sum(sums.means(("own", thread, name)) for name in ("forward", "backward"))
    step = sums.means(("whole", thread, "compute"))
    with np.errstate(invalid="ignore", divide="ignore"):
        idle = np.clip(1.0 - busy / step, 0.0, 1.0)
    known = idle[np.isfinite(idle)]
    if not known.size:
        return None
    shares = [float(f"{value:.4g}") if np.isfinite(value) else None for value in idle.tolist()]
    return {"rank": tally.rank, "idle": float(known.mean()), "over_epochs": shares}
