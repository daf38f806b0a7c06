"""The traces of a run as one Chrome trace, which Perfetto and chrome://tracing open: every record, written as it is read.

A process per rank, a thread per thread; messages and tasks in flight as asynchronous events, counters as counters. Times are
microseconds since the first rank began.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from io import BufferedWriter
from pathlib import Path
from typing import IO, Any

from polyhop.errors import InputError
from polyhop.report.run_files import trace_files
from polyhop.report.traces.lines import pieces
from polyhop.report.traces.so_far import IN_FLIGHT
from polyhop.report.whole_file import whole_file

__all__ = ["write_chrome_trace"]

_OWN = frozenset({"kind", "name", "at", "seconds", "thread"})


def write_chrome_trace(run: Path, out: Path) -> int:
    """Events written; compressed where the name ends in .gz. InputError where the run has no trace."""
    files = trace_files(run)
    if not files:
        raise InputError(f"{run} has no trace-rank*.jsonl: nothing to export")
    zero = min(_origin(path) for path in files.values())
    encode, count = _encoder(), 0
    with whole_file(out) as temporary, _opened(temporary, is_packed=out.suffix == ".gz") as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for rank, path in files.items():
            for event in _Events(rank, zero).of(path):
                file.write((b",\n" if count else b"") + encode(event))
                count += 1
        file.write(b"\n]}\n")
    return count


def _opened(path: Path, *, is_packed: bool) -> IO[bytes] | gzip.GzipFile | BufferedWriter:
    return gzip.open(path, "wb", compresslevel=4) if is_packed else path.open("wb")


def _origin(path: Path) -> float:
    """Unix time of a file's first start."""
    for piece in pieces(path):
        for record in piece.records:
            if record.get("kind") == "start" and isinstance(record.get("origin"), int | float):
                return float(record["origin"])
    return 0.0


def _encoder() -> Callable[[Any], bytes]:
    try:
        from msgspec.json import Encoder
    except ImportError:
        return lambda event: json.dumps(event, allow_nan=False, default=str).encode()
    return Encoder().encode  # what is not finite becomes null


class _Events:
    """Of one rank."""

    def __init__(self, rank: int, zero: float) -> None:
        self._rank, self._zero, self._origin, self._attempt = rank, zero, zero, 0
        self._threads: dict[str, int] = {}
        self._num_flights = 0

    def of(self, path: Path) -> Iterator[dict[str, Any]]:
        yield self._named("process_name", 0, f"rank {self._rank}")
        yield {"ph": "M", "name": "process_sort_index", "pid": self._rank, "args": {"sort_index": self._rank}}
        for piece in pieces(path):
            for record in piece.records:
                try:
                    yield from self._taken(record)
                except (KeyError, TypeError, ValueError):
                    continue

    def _taken(self, record: dict[str, Any]) -> Iterator[dict[str, Any]]:
        kind = record["kind"]
        if kind == "start":
            self._origin, self._attempt = float(record["origin"]), self._attempt + 1
            return
        name, at = str(record["name"]), self._micros(float(record["at"]))
        facts = {key: value for key, value in record.items() if key not in _OWN}
        if kind == "counter":
            numbers = {key: v for key, v in facts.items() if isinstance(v, int | float) and key != "epoch"}
            yield {"ph": "C", "name": name, "pid": self._rank, "ts": at, "args": numbers}
        elif kind == "instant" and name in ("lease", "result"):
            begins = name == "lease"
            yield self._flight("task", f"{self._attempt}.{record['lease']}", at, begins=begins, facts=facts)
        elif kind == "instant":
            yield {"ph": "i", "s": "p", "name": name, "pid": self._rank, "tid": 0, "ts": at, "args": facts}
        elif kind == "span" and name in IN_FLIGHT:
            self._num_flights += 1
            end = self._micros(float(record["at"]) + float(record["seconds"]))
            yield self._flight(name, f"m{self._num_flights}", at, begins=True, facts=facts)
            yield self._flight(name, f"m{self._num_flights}", end, begins=False, facts={})
        elif kind == "span":
            yield from self._span(record, name, at, facts)

    def _span(
        self, record: dict[str, Any], name: str, at: float, facts: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        thread = str(record["thread"])
        if thread not in self._threads:
            self._threads[thread] = len(self._threads) + 1
            yield self._named("thread_name", self._threads[thread], thread)
        length = round(float(record["seconds"]) * 1e6, 3)
        where = {"pid": self._rank, "tid": self._threads[thread]}
        yield {"ph": "X", "name": name, **where, "ts": at, "dur": length, "args": facts}

    def _flight(
        self, name: str, number: str, at: float, *, begins: bool, facts: dict[str, Any]
    ) -> dict[str, Any]:
        event = {
            "ph": "b" if begins else "e",
            "cat": "in flight",
            "name": name,
            "id": f"{self._rank}.{number}",
        }
        return event | {"pid": self._rank, "tid": 0, "ts": at, "args": facts}

    def _named(self, what: str, thread: int, name: str) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": self._rank, "tid": thread, "args": {"name": name}}

    def _micros(self, at: float) -> float:
        return round((self._origin - self._zero + at) * 1e6, 3)
