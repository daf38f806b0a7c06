"""Options that set a way of training apart and that forecasts know of: a run that sets another one is not foreseen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyhop.errors import ConfigError

__all__ = ["FORESEEN", "check_foreseen"]

FORESEEN: Mapping[str, frozenset[str]] = {
    "single": frozenset(),
    "data": frozenset({"cache"}),
    "macro": frozenset({"cache", "macro"}),
    "split": frozenset({"cache", "split_depth"}),
    "pushpull": frozenset(),
    "halo": frozenset({"bits", "halo", "halo_sums", "naive_halo", "overlap", "recompute"}),
    "pipeline": frozenset({"chunks", "layer_costs", "stages"}),
    "serverless": frozenset({"functions", "intervals"}),
}


def check_foreseen(strategy: str, given: Mapping[str, Any]) -> None:
    """ConfigError where an option is set that no forecast knows of."""
    unknown = sorted(set(given) - FORESEEN[strategy])
    if unknown:
        raise ConfigError(f"strategy {strategy!r} is not foreseen with {', '.join(unknown)}")
