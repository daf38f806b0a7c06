"""Where an epoch's seconds went: by name of span, by thread, by rank, and from epoch to epoch.

Own seconds: without those of spans inside. What the main thread did outside of every span is "rest".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

import numpy as np

from polyhop.report.traces.so_far import ASIDE
from polyhop.report.traces.tally import RankTally

__all__ = ["epoch_lengths", "in_order", "main_thread", "phases"]

ORDER = (
    *("compute", "forward", "backward", "graph", "sample", "load", "pack", "quantise", "dequantise", "sum"),
    *("wait", "evaluate", "checkpoint"),
)
REST = "rest"


def in_order(names: Iterable[str]) -> list[str]:
    """As people read them: work, then waiting, then what is no training, then the rest."""
    place = {name: at for at, name in enumerate(ORDER)}
    return sorted(set(names), key=lambda name: (name == REST, place.get(name, len(ORDER)), name))


def main_thread(tally: RankTally) -> str | None:
    """The thread that trains: the one with the most seconds of "compute"."""
    seconds = {
        key[1]: tally.sums.mean(key) for key in tally.sums.keys if key[0] == "whole" and key[2] == "compute"
    }
    return max(seconds, key=lambda thread: seconds[thread]) if seconds else None


def epoch_lengths(tallies: Sequence[RankTally]) -> dict[str, Any] | None:
    """Median seconds of an epoch: training alone, and what was beside it; None where no epoch has ended."""
    index = tallies[0].epochs if tallies else None
    if index is None or not len(index):
        return None
    whole = [stop - start for start, stop in zip(index.start, index.stop, strict=True)]
    train = index.train_s()
    return {
        "count": len(index),
        "train_s": median(train),
        "whole_s": median(whole),
        "slowest_s": max(train),
        "fastest_s": min(train),
    }


def phases(tallies: Sequence[RankTally]) -> dict[str, Any] | None:
    """Seconds of a mean epoch by thread and name; the same over epochs, as a mean of the ranks' main threads."""
    threads = [entry for tally in tallies for entry in _threads(tally)]
    if not threads:
        return None
    rows = tallies[0].sums
    return {
        "names": in_order(name for entry in threads for name in entry["seconds"]),
        "threads": threads,
        "epochs": rows.last_epochs(),
        "width": rows.width,
        "over_epochs": _over_epochs(tallies, rows.num_rows),
        "train_s": _told(_train_rows(tallies[0])),
    }


def _threads(tally: RankTally) -> list[dict[str, Any]]:
    sums, main = tally.sums, main_thread(tally)
    known = dict.fromkeys(key[1] for key in sums.keys if key[0] == "own")
    found = []
    for thread in sorted(known, key=lambda thread: (thread != main, thread)):
        seconds = {key[2]: sums.mean(key) for key in sums.keys if key[:2] == ("own", thread)}
        if thread == main:
            seconds[REST] = max(sums.mean(("s",)) - sum(seconds.values()), 0.0)
        found.append({"rank": tally.rank, "thread": thread, "is_main": thread == main, "seconds": seconds})
    flights = {key[1]: sums.mean(key) for key in sums.keys if key[0] == "flight"}
    if flights and found:
        found[0]["flight_s"] = flights
    return found


def _over_epochs(tallies: Sequence[RankTally], num_rows: int) -> dict[str, list[float | None]]:
    of_ranks: dict[str, list[Any]] = {}
    for tally in tallies:
        main, sums = main_thread(tally), tally.sums
        own = {key[2]: sums.means(key) for key in sums.keys if key[:2] == ("own", main)}
        if sums.width != tallies[0].sums.width or not own:
            continue  # a rank that is far behind: its rows are of other epochs
        own[REST] = np.maximum(sums.means(("s",)) - np.sum(list(own.values()), axis=0), 0.0)
        for name, values in own.items():
            of_ranks.setdefault(name, []).append(_fitted(values, num_rows))
    return {
        name: _told(np.sum(np.nan_to_num(of_ranks[name]), axis=0) / len(of_ranks[REST]))
        for name in in_order(of_ranks)
    }


def _train_rows(tally: RankTally) -> Any:
    sums = tally.sums
    aside = [sums.means(key) for key in sums.keys if key[0] == "whole" and key[2] in ASIDE]
    return sums.means(("s",)) - (np.sum(aside, axis=0) if aside else 0.0)


def _fitted(values: Any, num_rows: int) -> Any:
    """As many rows as rank 0 has."""
    return np.concatenate([values[:num_rows], np.full(max(num_rows - len(values), 0), np.nan)])


def _told(values: Any) -> list[float | None]:
    """Six digits; None where nothing is known."""
    return [None if not np.isfinite(value) else float(f"{value:.6g}") for value in values.tolist()]
