"""One rank's trace file, read line by line into sums of one size: seconds, bytes and memory of every epoch, and which share
of its time every thread spent on what.

It can be read on as the file grows. Times are seconds since the origin of an *attempt*: one life of the rank's process; a
run that was continued has several in the same file.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from polyhop.report.traces.epochs import EpochTable
from polyhop.report.traces.lines import pieces
from polyhop.report.traces.occupancy import Occupancy
from polyhop.report.traces.series import Series
from polyhop.report.traces.so_far import ASIDE, IN_FLIGHT, SoFar

__all__ = ["Attempt", "EpochIndex", "RankTally"]

_MOST_S = 1e9
_MOST_TOLD = 20_000  # choices of widths, or of functions


@dataclass
class Attempt:
    """One life of the process. ``tracks``: of each thread, and of what is in flight."""

    origin: float = 0.0  # Unix time
    host: str = ""
    last_s: float = 0.0
    tracks: dict[str, Occupancy] = field(default_factory=dict)


@dataclass
class EpochIndex:
    """Of every epoch, in the order of their ends: its number, attempt and times, how much of it was no training, and between
    which bytes of the file it lies."""

    number: array[int] = field(default_factory=lambda: array("q"))
    attempt: array[int] = field(default_factory=lambda: array("q"))
    start: array[float] = field(default_factory=lambda: array("d"))
    stop: array[float] = field(default_factory=lambda: array("d"))
    aside: array[float] = field(default_factory=lambda: array("d"))
    first_byte: array[int] = field(default_factory=lambda: array("q"))
    first_attempt: array[int] = field(default_factory=lambda: array("q"))  # at that byte; -1 = none yet
    last_byte: array[int] = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self.number)

    def train_s(self) -> list[float]:
        """Seconds of every epoch that were training."""
        return [b - a - aside for a, b, aside in zip(self.start, self.stop, self.aside, strict=True)]


class RankTally:
    """``read`` as often as the file may have grown. Keys of ``sums``: ``SoFar.take_epoch``; of ``most``: names of memory."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank = path, rank
        self.attempts: list[Attempt] = []
        self.sums, self.most = EpochTable(), EpochTable(np.maximum)
        self.epochs = EpochIndex()
        self.setup: dict[Any, float] = {}  # sums of what came before the first epoch
        self.functions = Series()  # at Unix times
        self.widths: list[dict[str, Any]] = []
        self.decisions: list[dict[str, Any]] = []  # of how many functions there shall be
        self.tasks: dict[str, float] = {}  # what became of them
        self.has_chunks = False  # as a pipeline has
        self.num_records = self.num_broken = self.offset = 0
        self._piece, self._piece_attempt = (
            (0, 0),
            -1,
        )  # bytes that are being read, and the attempt at the first
        self._so_far = SoFar()
        # Where the epoch that runs began: time, byte, attempt at that byte.
        self._begun: tuple[float, int, int] | None = None

    def read(self) -> bool:
        """Whether anything was new."""
        before = self.offset
        for piece in pieces(self.path, self.offset):
            self._piece, self._piece_attempt = (piece.start, piece.stop), len(self.attempts) - 1
            self.num_broken += piece.num_broken
            for record in piece.records:
                try:
                    self._take(record)
                except (KeyError, TypeError, ValueError, OverflowError):
                    self.num_broken += 1
            self.num_records += len(piece.records)
            self._fill_tracks()
            self.offset = piece.stop
        return self.offset > before

    def _take(self, record: dict[str, Any]) -> None:
        kind = record["kind"]
        if kind == "start":
            self._begin(record)
            return
        name, at = record["name"], record["at"]
        stop = at + record["seconds"] if kind == "span" else at
        if not 0 <= at <= stop < _MOST_S or type(name) is not str:
            raise ValueError(record)
        if not self.attempts:  # a file without its first line
            self.attempts.append(Attempt())
        attempt = self.attempts[-1]
        if stop > attempt.last_s:
            attempt.last_s = stop
        if kind == "span":
            self._take_span(record, name, at, stop)
        elif kind == "instant":
            self._take_instant(record, name, at)
        elif kind == "counter":
            values = {key: value for key, value in record.items() if key not in ("kind", "name", "at")}
            self._take_counter(name, attempt.origin + at, values)

    def _begin(self, record: dict[str, Any]) -> None:
        """A new process: its clock and its counters begin anew."""
        self._fill_tracks()
        self._so_far, self._begun = SoFar(), None
        self.attempts.append(Attempt(float(record["origin"]), str(record.get("host", ""))))

    def _take_span(self, record: dict[str, Any], name: str, start: float, stop: float) -> None:
        if name in IN_FLIGHT:
            self._so_far.end_flight(name, start, stop)
        else:
            self._so_far.end_span(record["thread"], name, start, stop)
            if "chunk" in record:
                self.has_chunks = True
        if "bytes" in record:
            self._so_far.count_bytes(f"{record['layer']} {record['direction']}", record["bytes"])

    def _take_instant(self, record: dict[str, Any], name: str, at: float) -> None:
        if name == "epoch":
            self._end_epoch(int(record["epoch"]), at)
        elif name == "lease":
            self._so_far.lease(record["lease"], at)
        elif name == "result":
            self._so_far.result(record["lease"], at)
        elif name == "functions" and len(self.decisions) < _MOST_TOLD:
            self.decisions.append(record | {"at": self.attempts[-1].origin + at})

    def _take_counter(self, name: str, at: float, values: dict[str, Any]) -> None:
        if name in ("traffic", "evaluation"):
            values.pop("epoch", None)
            self._so_far.count_sent(name, values)
        elif name == "memory":
            values.pop("epoch", None)
            self._so_far.memory = {key: float(value) for key, value in values.items()}
        elif name == "layers":
            for key, value in values.items():
                self._so_far.count_bytes(key, value)
        elif name == "crew":
            self.functions.add(at, {key: float(value) for key, value in values.items()})
        elif name == "widths" and len(self.widths) < _MOST_TOLD:
            self.widths.append(values)
        elif name == "tasks":
            self.tasks = {key: self.tasks.get(key, 0.0) + float(value) for key, value in values.items()}

    def _end_epoch(self, number: int, at: float) -> None:
        """So many epochs are done; its counters came before. The first time, training begins."""
        values = self._so_far.take_epoch()
        if self._begun is None:
            self.setup = {key: self.setup.get(key, 0.0) + value for key, value in values.items()}
        elif number >= 1:
            begun, first_byte, first_attempt = self._begun
            aside = sum(v for key, v in values.items() if key[0] == "whole" and key[2] in ASIDE)
            self.sums.add(number, {("s",): at - begun, **values})
            self.most.add(number, self._so_far.memory)
            index = self.epochs
            index.number.append(number)
            index.attempt.append(len(self.attempts) - 1)
            index.start.append(begun)
            index.stop.append(at)
            index.aside.append(aside)
            index.first_byte.append(first_byte)
            index.first_attempt.append(first_attempt)
            index.last_byte.append(self._piece[1])
        self._begun = at, self._piece[0], self._piece_attempt

    def _fill_tracks(self) -> None:
        """Intervals that were told become shares of time."""
        for track, names in self._so_far.take_intervals().items():
            for name, intervals in names.items():
                known = self.attempts[-1].tracks.setdefault(track, Occupancy())
                known.add(name, *intervals)
