"""What moves between ranks: counters of what was sent, and ``Cost``, the one record in which every strategy accounts for it.

Payload bytes and messages, per kind, at the sender; what a rank keeps for itself is no message, and an empty one is not
sent. Each strategy has two pure functions that return a ``Cost`` per rank:

    account(...)   from realised blocks, lists and widths: equal to the counters, to the byte
    estimate(...)  from facts known before the run: within a tenth

Kinds: ``ids`` (requests and neighbour lists), ``features`` (input rows), ``hidden`` (rows between layers), ``gradients``,
``weights``, ``statistics`` (of BatchNorm), ``widths`` (what the widths of quantised messages are chosen by), ``scores``
(evaluation, prediction), ``sizes`` (8-byte lengths of messages whose length only the sender knows).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["KINDS", "Cost", "Traffic"]

KINDS = ("ids", "features", "hidden", "gradients", "weights", "statistics", "widths", "scores", "sizes")


@dataclass(frozen=True)
class Cost:
    """What one rank sends. Whole numbers where they are counted or accounted, expectations where they are estimated."""

    bytes: Mapping[str, float] = field(default_factory=dict)  # kind -> payload bytes
    messages: Mapping[str, float] = field(default_factory=dict)  # kind -> messages that are not empty
    rounds: float = 0  # times that a rank waits for its peers: what latency is paid for

    @property
    def total_bytes(self) -> float:
        return sum(self.bytes.values())

    @property
    def total_messages(self) -> float:
        return sum(self.messages.values())

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            _sum(self.bytes, other.bytes), _sum(self.messages, other.messages), self.rounds + other.rounds
        )

    def __sub__(self, other: Cost) -> Cost:
        return self + other * -1

    def __mul__(self, times: float) -> Cost:
        return Cost(
            {kind: value * times for kind, value in self.bytes.items()},
            {kind: value * times for kind, value in self.messages.items()},
            self.rounds * times,
        )

    def only(self, *kinds: str) -> Cost:
        """The named kinds alone."""
        return Cost(
            {kind: value for kind, value in self.bytes.items() if kind in kinds},
            {kind: value for kind, value in self.messages.items() if kind in kinds},
            self.rounds,
        )

    def to_json(self) -> dict[str, Any]:
        return {"bytes": dict(self.bytes), "messages": dict(self.messages), "rounds": self.rounds}


def _sum(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    added = {kind: a.get(kind, 0) + b.get(kind, 0) for kind in (*a, *b)}
    return {kind: value for kind, value in added.items() if value}


class Traffic:
    """Counters of one rank, shared by all its lines and safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: Counter[str] = Counter()
        self._messages: Counter[str] = Counter()
        self._to: Counter[tuple[str, int, str]] = Counter()  # by (kind, rank, "bytes" | "messages")
        self._rounds = 0

    def sent(self, kind: str, num_bytes: int, to: int | None = None) -> None:
        """One message left, for rank ``to`` of all ranks."""
        if kind not in KINDS:
            raise ValueError(f"unknown kind of traffic {kind!r}: one of {', '.join(KINDS)}")
        with self._lock:
            self._bytes[kind] += num_bytes
            self._messages[kind] += 1
            if to is not None:
                self._to[kind, to, "bytes"] += num_bytes
                self._to[kind, to, "messages"] += 1

    def waited(self) -> None:
        """One more time that this rank depends on its peers' answers."""
        with self._lock:
            self._rounds += 1

    def now(self) -> Cost:
        """All that was counted so far; the difference of two is what happened between them."""
        with self._lock:
            return Cost(dict(self._bytes), dict(self._messages), self._rounds)

    def to(self, ranks: Collection[int]) -> Cost:
        """The same of what went to these ranks alone; rounds are not told apart."""
        found: dict[str, Counter[str]] = {"bytes": Counter(), "messages": Counter()}
        with self._lock:
            for (kind, rank, what), value in self._to.items():
                if rank in ranks:
                    found[what][kind] += value
        return Cost(dict(found["bytes"]), dict(found["messages"]))

    def to_json(self) -> dict[str, Any]:
        return self.now().to_json()
