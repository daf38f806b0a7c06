"""What ranks sent: by kind, by layer and direction, by rank, from epoch to epoch; training and evaluation apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polyhop.report.traces.tally import RankTally

__all__ = ["traffic"]


def traffic(tallies: Sequence[RankTally]) -> dict[str, Any] | None:
    """Bytes of a mean epoch; None where nothing was sent."""
    ranks = [_of_rank(tally) for tally in tallies]
    layers = _layers(tallies)
    if not layers and not any(entry["training"] or entry["evaluation"] for entry in ranks):
        return None
    busiest = max(ranks, key=lambda entry: sum(entry["training"].values()))
    return {
        "kinds": sorted(
            {kind for entry in ranks for name in ("training", "evaluation", "setup") for kind in entry[name]}
        ),
        "ranks": ranks,
        "busiest": busiest["rank"],
        "layers": layers,
        "epochs": tallies[0].sums.last_epochs(),
        "over_epochs": _over_epochs(tallies),
    }


def _of_rank(tally: RankTally) -> dict[str, Any]:
    sums = tally.sums
    both = {key[1]: sums.mean(key) for key in sums.keys if key[0] == "bytes"}
    evaluation = {key[1]: sums.mean(key) for key in sums.keys if key[0] == "evaluation"}
    training = {kind: max(value - evaluation.get(kind, 0.0), 0.0) for kind, value in both.items()}
    setup = {key[1]: value for key, value in tally.setup.items() if key[0] == "bytes"}
    return {
        "rank": tally.rank,
        "training": _some(training),
        "evaluation": _some(evaluation),
        "setup": _some(setup),
    }


def _some(values: dict[str, float]) -> dict[str, float]:
    return {kind: round(value, 1) for kind, value in values.items() if value >= 0.05}


def _layers(tallies: Sequence[RankTally]) -> list[dict[str, Any]]:
    """Of all ranks together, in a mean epoch."""
    found: dict[tuple[int, str], float] = {}
    for tally in tallies:
        for key in tally.sums.keys:
            layer, _, direction = str(key[1]).partition(" ") if key[0] == "layer" else ("", "", "")
            if layer.isdigit():
                at = int(layer), direction
                found[at] = found.get(at, 0.0) + tally.sums.mean(key)
    return [
        {"layer": layer, "direction": direction, "bytes": round(value, 1)}
        for (layer, direction), value in sorted(
            found.items(), key=lambda item: (item[0][0], item[0][1] != "forward")
        )
    ]


def _over_epochs(tallies: Sequence[RankTally]) -> dict[str, list[float]]:
    """Bytes of all ranks, training and evaluation, by kind."""
    rows, found = tallies[0].sums, {}
    for kind in sorted({key[1] for tally in tallies for key in tally.sums.keys if key[0] == "bytes"}):
        columns = [
            tally.sums.means(("bytes", kind))
            for tally in tallies
            if (tally.sums.width, tally.sums.num_rows) == (rows.width, rows.num_rows)
        ]
        total = np.sum(np.nan_to_num(columns), axis=0)
        if total.max(initial=0.0) > 0:
            found[kind] = [float(f"{value:.6g}") for value in total.tolist()]
    return found
