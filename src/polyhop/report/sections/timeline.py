"""The timeline of a run as a page holds it: tracks, shares of time for the whole run, close-ups of some epochs.

A track is a line of it: a thread of a rank, or what a rank has in flight. Numbers are packed columns: little-endian,
deflated, base64. The whole stays within ``_MOST_SPANS`` spans and ``_MOST_SHARES`` shares, and says what it left out.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from polyhop.report.sections.phases import in_order
from polyhop.report.traces.clock import Clock
from polyhop.report.traces.closeup import Closeup, choose_epochs, read_closeup
from polyhop.report.traces.occupancy import Occupancy
from polyhop.report.traces.so_far import FLIGHT
from polyhop.report.traces.tally import RankTally

__all__ = ["clock_of", "timeline"]

_MOST_SPANS = 100_000
_MOST_SHARES = 1_000_000  # a byte each
_MOST_MARKS = 500
_UNITS = 1 << 30  # in the length of a close-up


def clock_of(tallies: Sequence[RankTally]) -> Clock:
    """The axis of all ranks together."""
    return Clock(
        (attempt.origin, attempt.origin + attempt.last_s)
        for tally in tallies
        for attempt in tally.attempts
        if attempt.origin > 0 or attempt.last_s > 0
    )


def timeline(tallies: Sequence[RankTally], clock: Clock) -> dict[str, Any] | None:
    """None where there are no spans."""
    tracks = _Tracks(tallies)
    if not tracks.listed:
        return None
    closeups = _closeups(tallies, clock, tracks)
    shares = _shares(tallies, clock, tracks)
    return {
        "length_s": clock.length_s,
        "stretches": [clock.at(start) for start in clock.starts],
        "tracks": tracks.listed,
        "names": tracks.names,
        "shares": shares,
        "closeups": closeups,
        "epochs": _epoch_marks(tallies[0], clock),
        "num_records": sum(tally.num_records for tally in tallies),
    }


class _Tracks:
    """Numbers of tracks and of names."""

    def __init__(self, tallies: Sequence[RankTally]) -> None:
        self.listed: list[dict[str, Any]] = []
        self.names: list[str] = []
        self._number: dict[tuple[int, str], int] = {}
        self._name: dict[str, int] = {}
        for tally in tallies:
            known = {track for attempt in tally.attempts for track in attempt.tracks}
            spans = (name for a in tally.attempts for track in a.tracks.values() for name in track.seconds)
            for name in in_order(spans):
                self.name(name)
            for track in sorted(known, key=lambda track: (track != "MainThread", track == FLIGHT, track)):
                self._number[tally.rank, track] = len(self.listed)
                self.listed.append({"rank": tally.rank, "thread": track, "is_flight": track == FLIGHT})

    def number(self, rank: int, track: str) -> int:
        """Of a track; one that only a close-up has is added."""
        if (rank, track) not in self._number:
            self._number[rank, track] = len(self.listed)
            self.listed.append({"rank": rank, "thread": track, "is_flight": track == FLIGHT})
        return self._number[rank, track]

    def name(self, name: str) -> int:
        if name not in self._name:
            self._name[name] = len(self.names)
            self.names.append(name)
        return self._name[name]


def _shares(tallies: Sequence[RankTally], clock: Clock, tracks: _Tracks) -> list[dict[str, Any]]:
    """For every track and attempt: of each name, the share of every slot of time, 0 to 255.

    A thread does one thing at a time; of what is in flight, 255 stands for the most that ever was.
    """
    given = [
        (tally.rank, track, attempt, occupancy)
        for tally in tallies
        for attempt in tally.attempts
        for track, occupancy in attempt.tracks.items()
    ]
    num_rows = sum(len(occupancy.seconds) for *_, occupancy in given)
    fold = 1
    while num_rows * _used(given) // fold > _MOST_SHARES:
        fold *= 2
    found = []
    for rank, track, attempt, occupancy in given:
        num_slots = int(np.ceil(attempt.last_s / occupancy.slot_s)) + 1
        num_slots = min(-(-num_slots // fold) * fold, occupancy.num_slots)
        names = sorted(occupancy.seconds)
        rows = np.stack([occupancy.at_once(name)[:num_slots].reshape(-1, fold).mean(1) for name in names])
        most = max(float(rows.sum(axis=0).max()), 1.0) if track == FLIGHT else 1.0
        found.append(
            {
                "track": tracks.number(rank, track),
                "start_s": clock.at(attempt.origin),
                "slot_s": occupancy.slot_s * fold,
                "num_slots": rows.shape[1],
                "most": most,
                "names": [tracks.name(name) for name in names],
                "data": _packed(np.ceil(np.minimum(rows / most, 1.0) * 255).astype(np.uint8)),
            }
        )
    return found


def _used(given: Sequence[tuple[int, str, Any, Occupancy]]) -> int:
    return max(occupancy.num_slots for *_, occupancy in given)


def _closeups(tallies: Sequence[RankTally], clock: Clock, tracks: _Tracks) -> list[dict[str, Any]]:
    """Epochs of all ranks; each has its part of the spans that are allowed."""
    chosen = choose_epochs(tallies[0])
    most = _MOST_SPANS // max(len(chosen) * len(tallies), 1)
    found = []
    for number, why in chosen.items():
        of_ranks = [(tally, read_closeup(tally, number, most)) for tally in tallies]
        known = [(tally, closeup) for tally, closeup in of_ranks if closeup is not None]
        found.append({"epoch": number, "why": why, **_columns(known, clock, tracks)})
    return found


def _columns(known: Sequence[tuple[RankTally, Closeup]], clock: Clock, tracks: _Tracks) -> dict[str, Any]:
    origins = [clock.at(tally.attempts[closeup.attempt].origin) for tally, closeup in known]
    ranks = {
        tally.rank: (origin + closeup.start, origin + closeup.stop)
        for origin, (tally, closeup) in zip(origins, known, strict=True)
    }
    begin, end = min(start for start, _ in ranks.values()), max(stop for _, stop in ranks.values())
    length = max(end - begin, 1e-9)
    facts: dict[str, int] = {"": 0}
    rows = [
        (
            _unit(origin + span.start - begin, length),
            _unit(span.stop - span.start, length),
            span.step,
            facts.setdefault(span.facts, len(facts)),
            tracks.name(span.name),
            tracks.number(tally.rank, span.track),
            min(span.depth, 255),
        )
        for origin, (tally, closeup) in zip(origins, known, strict=True)
        for span in closeup.spans
    ]
    kinds = ("<i4", "<u4", "<i4", "<u4", "<u2", "<u2", "u1")
    columns = zip(*rows, strict=True) if rows else [()] * len(kinds)
    packed = b"".join(np.array(column, dtype=kind).tobytes() for column, kind in zip(columns, kinds))
    return {
        "start_s": begin,
        "stop_s": end,
        "ranks": {str(rank): list(stretch) for rank, stretch in ranks.items()},
        "unit_s": length / _UNITS,
        "num_spans": len(rows),
        "num_left_out": sum(closeup.num_left_out for _, closeup in known),
        "facts": list(facts),
        "data": _packed(packed),
    }


def _unit(seconds: float, length: float) -> int:
    """A whole number of units; what began before the close-up is below 0."""
    return max(min(round(seconds / length * _UNITS), (1 << 31) - 1), -(1 << 31))


def _epoch_marks(tally: RankTally, clock: Clock) -> list[list[float]]:
    """[epoch, second at which it ended] of rank 0, thinned."""
    index = tally.epochs
    every = -(-len(index) // _MOST_MARKS) or 1
    return [
        [index.number[at], clock.at(tally.attempts[index.attempt[at]].origin) + index.stop[at]]
        for at in range(every - 1, len(index), every)
    ]


def _packed(data: Any) -> str:
    raw = data if isinstance(data, bytes) else data.tobytes()
    return base64.b64encode(zlib.compress(raw, 6)).decode("ascii")
