"""Several runs side by side: which options differ, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["compare"]

_RESULTS = {
    "test": ("test", "share"),
    "best_val": ("best validation", "share"),
    "best_epoch": ("at epoch", "count"),
    "epochs": ("epochs", "count"),
    "seconds": ("trained", "s"),
    "epoch_s": ("median epoch, training alone", "s"),
    "wait_share": ("of it waiting", "share"),
    "sent_bytes": ("sent by all ranks in an epoch", "bytes"),
    "peak_bytes": ("memory of a rank, at most", "bytes"),
    "dollars": ("cost", "$"),
}


def compare(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Rows of options that differ and of results, a value for each run; and what to be careful about."""
    graphs = list(dict.fromkeys(str(run["about"]["graph"]) for run in runs))
    names = list(dict.fromkeys(name for run in runs for name in run["options"]))
    differing = [
        {"name": name, "values": [run["options"].get(name) for run in runs]}
        for name in names
        if any(run["options"].get(name) != runs[0]["options"].get(name) for run in runs)
    ]
    results = [
        {"name": told, "unit": unit, "values": [run["numbers"].get(name) for run in runs]}
        for name, (told, unit) in _RESULTS.items()
        if any(run["numbers"].get(name) is not None for run in runs)
    ]
    notes = []
    if len(graphs) > 1:
        notes.append(f"the runs are of different graphs ({', '.join(graphs)}): their numbers do not compare")
    return {"options": differing, "results": results, "notes": notes}
