"""How long computing takes, from what is computed: a line in its counts, fitted to measured steps.

    seconds = near_s * values read from the cache + far_s * others + flop_s * flops + row_s * rows + call_s * calls

Rows that do not fit the cache are read from memory in proportion. Coefficients are of one model on one kind of processor;
none is negative: more work is never faster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from polyhop.errors import InputError
from polyhop.nn.counts import Counts

__all__ = ["Law", "fit_law"]


@dataclass(frozen=True)
class Law:
    """Seconds of each thing that is counted."""

    near_s: float = 0.0
    far_s: float = 0.0
    flop_s: float = 0.0
    row_s: float = 0.0
    call_s: float = 0.0
    cache_bytes: float = math.inf  # of the rank: its share, where several have one cache
    host: str = ""  # that it was timed on

    def seconds(self, counts: Counts) -> float:
        near, far, flops, rows, calls = _features(counts, self.cache_bytes)
        read = self.near_s * near + self.far_s * far
        return read + self.flop_s * flops + self.row_s * rows + self.call_s * calls

    def __mul__(self, times: float) -> Law:
        """Of a processor that takes so many times as long."""
        each = {name: getattr(self, name) * times for name in _SECONDS}
        return replace(self, **each)

    def to_json(self) -> dict[str, float | str | None]:
        found: dict[str, float | str | None] = asdict(self)
        return found | {"cache_bytes": None if math.isinf(self.cache_bytes) else self.cache_bytes}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Law:
        rates = {name: value for name, value in given.items() if name != "host"}
        found = {name: math.inf if value is None else float(value) for name, value in rates.items()}
        return cls(**found, host=str(given.get("host", "")))


_SECONDS = ("near_s", "far_s", "flop_s", "row_s", "call_s")


def fit_law(counts: Sequence[Counts], seconds: Sequence[float], cache_bytes: float = math.inf) -> Law:
    """Least squares of relative errors."""
    from scipy.optimize import nnls

    if len(counts) != len(seconds) or not counts:
        raise InputError(f"{len(counts)} counts and {len(seconds)} times: as many of both are needed")
    taken = np.asarray(seconds, dtype=np.float64)
    if not (taken > 0).all():
        raise InputError(f"times must be above 0, the least is {taken.min()}")
    table = np.array([_features(each, cache_bytes) for each in counts], dtype=np.float64)
    scale = np.maximum(table.max(0), 1e-300)  # flops are a billion times as many as calls
    found, _ = nnls(table / scale / taken[:, None], np.ones_like(taken))
    near, far, flop, row, call = (float(each) for each in found / scale)
    return Law(near, far, flop, row, call, cache_bytes)


def _features(counts: Counts, cache_bytes: float) -> tuple[float, ...]:
    far = sum(values * max(0.0, 1 - cache_bytes / max(table, 1.0)) for values, table in counts.reads)
    return counts.values - far, far, counts.flops, counts.rows, counts.calls
