"""Where the seconds of one rank went: spans, instants and counters, one JSON line each.

A ``Trace`` without a path keeps only the totals, so callers never ask whether tracing is on. Lines (times in seconds since
``origin``, which the first line gives as Unix time, so that ranks can be laid side by side):

    {"kind": "start", "rank": 0, "pid": 1, "host": "a", "origin": 1763000000.0}
    {"kind": "span", "name": "compute", "at": 0.12, "seconds": 0.034, "thread": "MainThread", "step": 7}
    {"kind": "instant", "name": "best", "at": 0.5, ...}
    {"kind": "counter", "name": "bytes", "at": 0.5, "features": 4096}
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

__all__ = ["NO_TRACE", "Span", "Trace"]

_FLUSH_RECORDS = 256


class Span:
    """One timed piece of work; a context manager made by ``Trace.span``."""

    __slots__ = ("_facts", "_name", "_start", "_trace")

    def __init__(self, trace: Trace, name: str, facts: dict[str, Any]) -> None:
        self._trace, self._name, self._facts = trace, name, facts
        self._start = 0.0

    def __enter__(self) -> Span:
        self._start = self._trace.clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._trace.record_span(self._name, self._start, self._trace.clock() - self._start, self._facts)


class Trace:
    """Collects the records of one rank from any thread; writes them to ``path`` (appending) in batches.

    A disk that refuses a write costs the rest of the trace, with one warning, never the run; no half of a line stays.
    ``clock``: seconds, by which spans begin and end; one that waits for the device makes spans those of its work, not of
    launching it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        rank: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._totals: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._pending: list[dict[str, Any]] = []
        self._origin = clock()
        self._whole_bytes = 0  # of the file, up to the end of a line
        self._file: TextIO | None = None if path is None else self._opened(Path(path))
        if self._file is not None:
            start = {"rank": rank, "pid": os.getpid(), "host": socket.gethostname(), "origin": time.time()}
            self._pending.append({"kind": "start", **start})

    @property
    def is_written(self) -> bool:
        """Whether records go to a file: what is made for them alone need not be made otherwise."""
        return self._file is not None

    def span(self, name: str, **facts: Any) -> Span:
        """Context manager that times its body under ``name``; facts go into the record."""
        return Span(self, name, facts)

    def instant(self, name: str, **facts: Any) -> None:
        """Something that happened, without a length."""
        self._keep({"kind": "instant", "name": name, "at": self.clock() - self._origin, **facts})

    def counter(self, name: str, **values: float) -> None:
        """Values that grow or vary, such as bytes sent per kind."""
        self._keep({"kind": "counter", "name": name, "at": self.clock() - self._origin, **values})

    def record_span(self, name: str, start: float, seconds: float, facts: dict[str, Any]) -> None:
        """Record a span timed by the caller; ``start`` is a value of ``clock``."""
        with self._lock:
            self._totals[name] = self._totals.get(name, 0.0) + seconds
            self._counts[name] = self._counts.get(name, 0) + 1
        if self._file is not None:
            thread = threading.current_thread().name
            span = {
                "kind": "span",
                "name": name,
                "at": start - self._origin,
                "seconds": seconds,
                "thread": thread,
            }
            self._keep(span | facts)

    def totals(self) -> dict[str, float]:
        """Seconds per span name so far, summed over threads."""
        with self._lock:
            return dict(self._totals)

    def counts(self) -> dict[str, int]:
        """Number of spans per name so far."""
        with self._lock:
            return dict(self._counts)

    def flush(self) -> None:
        """Write what is pending."""
        with self._lock:
            self._write()

    def close(self) -> None:
        """Write what is pending and close the file; the totals stay."""
        with self._lock:
            self._write()
            if self._file is not None:
                self._file.close()
                self._file = None

    def _opened(self, path: Path) -> TextIO | None:
        try:
            file = path.open("a", encoding="utf-8")
            self._whole_bytes = file.tell()
            return file
        except OSError as error:
            warnings.warn(f"no trace, cannot open {path}: {error}", RuntimeWarning, stacklevel=4)
            return None

    def _keep(self, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        with self._lock:
            self._pending.append(record)
            if len(self._pending) >= _FLUSH_RECORDS:
                self._write()

    def _write(self) -> None:
        if self._file is None or not self._pending:
            return
        text = "".join(json.dumps(record) + "\n" for record in self._pending)
        self._pending.clear()
        try:
            self._file.write(text)
            self._file.flush()
            self._whole_bytes = self._file.tell()
        except OSError as error:
            told = f"trace stopped, cannot write {self._file.name}: {error}"
            self._drop_file()
            warnings.warn(told, RuntimeWarning, stacklevel=3)

    def _drop_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # the buffered tail cannot be written either
                file.close()
            with suppress(OSError):
                os.truncate(file.name, self._whole_bytes)


NO_TRACE = Trace()
"""Keeps totals nobody reads: the default where a trace is optional."""
