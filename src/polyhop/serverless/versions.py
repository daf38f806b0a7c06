"""Weights by version. An interval takes one for an epoch and keeps it to the end of its backward pass; a version is let go
of once a newer one exists and nobody uses it.

Where weights change once an epoch an interval takes the newest when its epoch begins. Where they change more often it takes
the newest when the first of its tasks is given out (``Ticket``): what waits for a function need not grow old meanwhile.

An epoch that begins before its weights are there can take a guess at them: the newest, one more step like the last. Such a
guess at what follows version v has the number ~v.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from polyhop.serverless.segments import Dense
from polyhop.serverless.wire import Array

__all__ = ["Ticket", "Versions"]


class Versions:
    """``pieces``: dense pieces by their place in the chain."""

    def __init__(self, pieces: Mapping[int, Dense]) -> None:
        self._pieces = dict(pieces)
        self._plain = {at: piece.program.to_plain() for at, piece in pieces.items()}
        self._kept: dict[int, dict[str, Array]] = {}
        self._used: Counter[int] = Counter()
        self._step: dict[str, Array] | None = None  # from the version before to the newest
        self._lock = threading.Lock()
        self.newest = -1
        self.most_alive = 0

    @property
    def alive(self) -> Sequence[int]:
        return sorted(self._kept)

    def publish(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """A new version; what is given is copied."""
        if version <= self.newest:
            raise ValueError(f"version {version} after {self.newest}")
        names = {name for piece in self._pieces.values() for name in piece.weight_names}
        copied = {name: np.array(weights[name].detach().cpu().numpy()) for name in sorted(names)}
        with self._lock:
            before = self._kept.get(self.newest)
            self._step = before and {name: value - before[name] for name, value in copied.items()}
            self._kept[version], self.newest = copied, version
            self._let_go()
            self.most_alive = max(self.most_alive, len(self._kept))

    def take(self, is_ahead: bool = False) -> int:
        """The newest version, or (``is_ahead``) a guess at the next; it stays until ``leave``."""
        with self._lock:
            number = self.newest
            if is_ahead and self._step is not None:
                number, newest = ~self.newest, self._kept[self.newest]
                if number not in self._kept:
                    self._kept[number] = {name: newest[name] + step for name, step in self._step.items()}
                    self.most_alive = max(self.most_alive, len(self._kept))
            self._used[number] += 1
            return number

    def leave(self, version: int) -> None:
        with self._lock:
            self._used[version] -= 1
            self._let_go()

    def of(self, piece: int, version: int) -> tuple[dict[str, Any], dict[str, Array]]:
        """(program, weights) of a piece, as they travel."""
        kept = self._kept[version]
        return self._plain[piece], {name: kept[name] for name in self._pieces[piece].weight_names}

    def _let_go(self) -> None:
        for version in [v for v in self._kept if v != self.newest and self._used[v] <= 0]:
            del self._kept[version]
            del self._used[version]


class Ticket:
    """Of one interval and epoch: the version that was the newest when it was first asked for, until ``leave``; or
    (``is_ahead``) a guess at the one after it."""

    def __init__(self, versions: Versions, *, is_ahead: bool = False) -> None:
        self._versions, self._is_ahead = versions, is_ahead
        self._taken: int | None = None
        self._lock = threading.Lock()

    def __int__(self) -> int:
        with self._lock:
            if self._taken is None:
                self._taken = self._versions.take(self._is_ahead)
            return self._taken

    def leave(self) -> None:
        """The interval has ended its epoch."""
        self._versions.leave(int(self))
