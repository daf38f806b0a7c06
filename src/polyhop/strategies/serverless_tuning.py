"""How strategy ``serverless`` watches itself so as to decide on the number of functions (``--functions auto``).

Queues are looked at some times a second, by the crew; at the end of an epoch, or of some where they are short, the tuner is
shown what was seen since. Results do not depend on the number of functions, so that timings may decide on it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Protocol

from polyhop.serverless.function import Order
from polyhop.serverless.post import Post
from polyhop.serverless.tuner import Bounds, Decision, Look, Tuner
from polyhop.strategies.serverless_books import Tariff
from polyhop.trace import NO_TRACE, Trace

__all__ = ["AUTO", "GraphWork", "Tuning", "bounds_of"]

AUTO = "auto"
_LEAST_S = 0.5  # of a look at epochs
_MIDWAY_S = 0.5  # of a look at part of the first epoch
_START_AWAY = 16  # functions to begin with, where they do not run on this host


class GraphWork(Protocol):
    """What a server does besides."""

    @property
    def graph_s(self) -> float: ...
    @property
    def num_ready(self) -> int: ...


def bounds_of(tariff: Tariff, num_intervals: int, num_servers: int, num_here: int) -> Bounds:
    """What the tuner of a rank keeps to; ``num_here``: ranks on its host, whose local functions share its cores."""
    server = tariff.prices.server(tariff.server_kind)
    cores = max(len(os.sched_getaffinity(0)) / num_here, 1.0) if tariff.is_local else inf
    return Bounds(
        start=max(int(cores), 1) if tariff.is_local else _START_AWAY,
        most=max(tariff.prices.functions.concurrency // num_servers, 1),
        intervals=max(num_intervals, 1),
        server_dollars_s=tariff.server_dollars_s,
        function_dollars_s=tariff.function_dollars_s,
        at_a_time=Order.prefetch,
        cores=cores,
        link_bytes=inf if tariff.is_local else float(server.network_gbit_s) * 1e9 / 8,
    )


@dataclass(frozen=True)
class _Mark:
    """Counters at a moment."""

    at: float
    epochs: int
    tasks: int
    leased_s: float
    busy_ms: float
    graph_s: float
    num_bytes: int
    changes: int  # of who is there
    is_midway: bool = False  # in an epoch


class Tuning:
    """``wanted`` is asked by the crew, ``epoch_ended`` is called by whoever trains."""

    def __init__(
        self,
        tuner: Tuner,
        post: Post,
        server: GraphWork,
        tell: Callable[[str], None] = lambda text: None,
        trace: Trace = NO_TRACE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tuner = tuner
        self._post, self._server = post, server
        self._tell, self._trace, self._clock = tell, trace, clock
        self._lock, self._epochs = threading.Lock(), 0
        self._mark = self._marked()
        self._samples, self._waiting, self._ready = 0, 0, 0

    def wanted(self) -> int:
        """Looks at queues, and says how many functions there should be."""
        with self._lock:
            self._samples += 1
            self._waiting += self._post.ledger.num_waiting
            self._ready += self._server.num_ready
            if not self._epochs and self._clock() - self._mark.at >= _MIDWAY_S:
                self._look(is_midway=True)
            return self.tuner.wanted

    def epoch_ended(self) -> None:
        with self._lock:
            self._epochs += 1
            if self._clock() - self._mark.at >= _LEAST_S:
                self._look()

    def _look(self, is_midway: bool = False) -> None:
        before, now = self._mark, self._marked(is_midway)
        samples = max(self._samples, 1)
        look = Look(
            seconds=now.at - before.at,
            num_epochs=now.epochs - before.epochs,
            num_functions=self._post.num_serving,
            num_tasks=now.tasks - before.tasks,
            leased_s=now.leased_s - before.leased_s,
            busy_s=(now.busy_ms - before.busy_ms) / 1000,
            graph_s=now.graph_s - before.graph_s,
            num_bytes=now.num_bytes - before.num_bytes,
            waiting=self._waiting / samples if self._samples else None,
            ready=self._ready / samples,
            is_steady=now.changes == before.changes and not before.is_midway,
        )
        self._mark, self._samples, self._waiting, self._ready = now, 0, 0, 0
        decided = self.tuner.see(look)
        if decided is not None:
            self._say(look, decided)

    def _say(self, look: Look, decided: Decision) -> None:
        self._trace.instant(
            "functions", wanted=decided.num_functions, had=look.num_functions, why=decided.reason
        )
        self._tell(f"{decided.num_functions} functions from now on: {decided.reason}")

    def _marked(self, is_midway: bool = False) -> _Mark:
        post, ledger = self._post, self._post.ledger
        changes = post.messages["Hello"] + post.messages["Bye"] + ledger.counts["expired"]
        moved = post.sent["tasks"] + post.sent["weights"] + post.received["results"]
        return _Mark(
            self._clock(), self._epochs, ledger.counts["ok"], ledger.leased_s, post.sheets.busy_ms,
            self._server.graph_s, moved, changes, is_midway,
        )  # fmt: skip
