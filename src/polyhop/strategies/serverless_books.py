"""The books of a rank of strategy ``serverless``: what its server and its functions ran, on paper, and what it costs.

Local functions cost nothing; their bill says what the run would have cost as so many servers and functions of the prices.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from polyhop.serverless.bill import Bill, ServerTrace, Trace, bill
from polyhop.serverless.crew import Crew
from polyhop.serverless.prices import Prices, load_prices
from polyhop.serverless.records import Key, Records, from_line, read_records, record_file, to_line, traces_of
from polyhop.serverless.timesheets import Timesheets, function_trace

__all__ = ["BillOptions", "Books", "Tariff", "told"]

_NOTES_S = 30.0  # between notes of what still runs
_KIND = "c5n.2xlarge"


class BillOptions(Protocol):
    """What is used of the strategy's options."""

    @property
    def prices(self) -> str | Path | None: ...
    @property
    def server_kind(self) -> str | None: ...
    @property
    def function_launcher(self) -> str: ...


@dataclass(frozen=True)
class Tariff:
    """By which prices a run is billed, and as what: kind of server, memory and longest life of functions."""

    prices: Prices
    server_kind: str
    memory_mb: int
    limit_s: float
    is_local: bool = True

    @classmethod
    def of(cls, options: BillOptions, memory_mb: int, limit_s: float) -> Tariff:
        """ConfigError where the prices do not know the servers, or functions of that memory."""
        prices = load_prices(options.prices)
        kind = options.server_kind or (
            _KIND if _KIND in prices.servers else next(iter(prices.servers), _KIND)
        )
        prices.server(kind)
        memory = prices.functions.checked(memory_mb)
        limit = min(limit_s, prices.functions.limit_s)
        return cls(prices, kind, memory, limit, options.function_launcher == "local")

    def with_memory(self, memory_mb: int) -> Tariff:
        """Of functions as they turned out to be."""
        return replace(self, memory_mb=self.prices.functions.checked(memory_mb))

    @property
    def server_dollars_s(self) -> float:
        return float(self.prices.server(self.server_kind).dollars_per_s)

    @property
    def function_dollars_s(self) -> float:
        return float(self.prices.functions.dollars_per_s(self.memory_mb))


class Books:
    """Of one rank, from when they are opened."""

    def __init__(self, rank: int, crew: Crew, sheets: Timesheets, tariff: Tariff) -> None:
        self.tariff = tariff
        self._rank, self._crew, self._sheets = rank, crew, sheets
        self._start_s = time.time()
        self._end_s: float | None = None
        self._session = round(1000 * self._start_s)
        self._folder: Path | None = None
        self._records: Records | None = None
        self._noted, self._past, self._counted = time.monotonic(), Bill(), 0

    def keep(self, folder: Path) -> None:
        """Write what ran to a run's folder, beside what is there."""
        path = record_file(folder, self._rank)
        self._folder, self._records = folder, Records(path)
        self._past += bill(read_records(path).values(), self.tariff.prices)

    def traces(self) -> dict[Key, Trace]:
        """What ran so far in this session."""
        return self._gone(0) | self._running()

    def _gone(self, first: int) -> dict[Key, Trace]:
        """Functions that have ended, from the ``first`` on."""
        return dict(
            self._function(each.function, each.start_s, each.end_s) for each in self._crew.gone[first:]
        )

    def _running(self) -> dict[Key, Trace]:
        """The server, and functions that are alive."""
        now = self._end_s or time.time()
        start_ms, end_ms = (round(1000 * at, 3) for at in (self._start_s, now))
        server = ServerTrace(self.tariff.server_kind, start_ms, max(end_ms, start_ms))
        alive = dict(self._function(name, start_s, now) for name, start_s in list(self._crew.started.items()))
        return {(self._session, f"server{self._rank}"): server, **alive}

    def _function(self, name: str, start_s: float, end_s: float) -> tuple[Key, Trace]:
        sheet, tariff = self._sheets.of(name), self.tariff
        return (self._session, name), function_trace(sheet, start_s, end_s, tariff.memory_mb, tariff.limit_s)

    def so_far(self) -> Bill:
        """Of this rank alone, earlier sessions and all. Functions that have ended are counted once."""
        new = self._gone(self._counted)
        self._counted += len(new)
        self._past += bill(new.values(), self.tariff.prices)
        return self._past + bill(self._running().values(), self.tariff.prices)

    def note(self) -> None:
        """Write down what runs, if the last note is old."""
        if self._records is not None and time.monotonic() - self._noted >= _NOTES_S:
            self._noted = time.monotonic()
            self._records.add(self.traces())

    def end(self) -> None:
        """The crew has gone: what ran is written as it stays. A second time nothing is done."""
        if self._end_s is None:
            self._end_s = time.time()
            if self._records is not None:
                self._records.add(self.traces())

    def total(self, share: Callable[[str], list[str]]) -> Bill:
        """Of all ranks and sessions, once all have ended; rank 0 also writes it. All ranks call it together.

        ``share``: every rank's text. What ranks on other hosts wrote there is added to rank 0's folder.
        """
        text = "\n".join(to_line(key, trace) for key, trace in self.traces().items())
        each = [dict(map(from_line, lines.splitlines())) for lines in share(text)]
        mine = [trace for traces in each for trace in traces.values()]
        if self._folder is None or self._rank != 0:
            return bill(mine, self.tariff.prices)
        for rank, traces in enumerate(each):
            path = record_file(self._folder, rank)
            known = read_records(path)
            Records(path).add({key: one for key, one in traces.items() if known.get(key) != one})
        found = bill(traces_of(self._folder), self.tariff.prices)
        self._write(found)
        return found

    def _write(self, found: Bill) -> None:
        assert self._folder is not None
        text = json.dumps({**found.to_json(), **self.tariff_facts()}, indent=2) + "\n"
        try:
            (self._folder / "bill.json").write_text(text, encoding="utf-8")
        except OSError as error:
            warnings.warn(
                f"bill.json is not written: {error.strerror or error}", RuntimeWarning, stacklevel=2
            )

    def tariff_facts(self) -> dict[str, Any]:
        prices = self.tariff.prices
        return {
            "prices": prices.name,
            "prices_date": prices.date.isoformat(),
            "server_kind": self.tariff.server_kind,
            "function_mb": self.tariff.memory_mb,
            "is_local": self.tariff.is_local,
        }


def told(found: Bill, tariff: Tariff) -> str:
    """A bill in a sentence."""
    verb = "would have cost" if tariff.is_local else "cost"
    servers = float(sum(found.servers.values()))
    functions = float(found.functions + found.requests)
    spent = " + ".join(
        f"{name} {float(part) / 1000:,.1f}"
        for name, part in (("init", found.init_ms), ("busy", found.busy_ms), ("parked", found.parked_ms))
    )
    where = " (functions ran on this host)" if tariff.is_local else ""
    return (
        f"the run {verb} ${float(found.dollars):.6f}{where}: servers ${servers:.6f} ({found.server_s:,} s of "
        f"{tariff.server_kind}), {found.num_requests:,} functions of {tariff.memory_mb} MB ${functions:.6f} "
        f"({found.billed_ms / 1000:,.1f} s = {spent}); {tariff.prices.name}"
    )
