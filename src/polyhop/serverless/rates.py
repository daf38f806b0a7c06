"""How fast servers, functions and links are: measured elsewhere, or read from a file, or as published."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf, isnan
from pathlib import Path
from typing import Any

from polyhop.errors import ConfigError, InputError, unknown

__all__ = ["PUBLISHED", "Rates", "load_rates"]


@dataclass(frozen=True)
class Rates:
    """``inf`` where something takes no time. An edge-column is one value read along one edge and added up."""

    gather: float  # edge-columns a second that one processor (vCPU) of a server gathers
    server_flops: float  # flop/s of one processor of a server on small matrix products
    function_flops: Mapping[int, float]  # memory MB -> flop/s of a function of that size
    function_bytes: float  # bytes a second to or from one function
    server_bytes: float  # bytes a second between a server and all its functions, both ways together
    scatter_bytes: float  # bytes a second that a server sends to other servers
    leases: float = inf  # leases a second that a server hands out
    lease_bytes: float = inf  # bytes a second that its socket thread moves
    latency_s: float = 0.0  # of a lease and its answer, without bytes
    cold_s: float = 0.0  # until a new function asks for its first lease
    gpu_gather: float = 0.0  # of one GPU; 0 = not known, GPUs are not compared
    gpu_flops: float = 0.0
    source: str = "given"

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if isnan(getattr(self, name)) or getattr(self, name) <= 0:
                raise InputError(f"rates: {name} is {getattr(self, name)}; expected more than 0")
        for name in _NOT_NEGATIVE:
            if isnan(getattr(self, name)) or not 0 <= getattr(self, name) < inf:
                raise InputError(f"rates: {name} is {getattr(self, name)}; expected 0 or more")
        if not self.function_flops or min(self.function_flops.values()) <= 0 or min(self.function_flops) <= 0:
            raise InputError(
                "rates: function_flops needs flop/s above 0 for one size of memory in MB at least"
            )

    def flops_of(self, memory_mb: int) -> float:
        """flop/s of a function: between measured sizes on a straight line, beyond them in proportion to memory."""
        sizes = sorted(self.function_flops)
        if memory_mb in self.function_flops:
            return self.function_flops[memory_mb]
        if memory_mb < sizes[0] or memory_mb > sizes[-1]:
            near = sizes[0] if memory_mb < sizes[0] else sizes[-1]
            return self.function_flops[near] * memory_mb / near
        above = next(size for size in sizes if size > memory_mb)
        below = sizes[sizes.index(above) - 1]
        share = (memory_mb - below) / (above - below)
        return (1 - share) * self.function_flops[below] + share * self.function_flops[above]


_POSITIVE = (
    "gather",
    "server_flops",
    "function_bytes",
    "server_bytes",
    "scatter_bytes",
    "leases",
    "lease_bytes",
)
_NOT_NEGATIVE = ("latency_s", "cold_s", "gpu_gather", "gpu_flops")

PUBLISHED = Rates(
    gather=3.3e8,
    server_flops=3.35e9,
    function_flops={192: 8e8},
    function_bytes=1e8,
    server_bytes=6.5e8,
    scatter_bytes=2.5e9,
    latency_s=0.02,
    cold_s=0.5,
    gpu_gather=2.2e10,
    gpu_flops=6.6e10,
    source="fitted to Dorylus's figure 10 (Amazon, c5n.2xlarge, 192 MB, V100) with nodes at random and its 800 Mbit/s a "
    "function; 20 ms a lease and 0.5 s of cold start are assumed",
)
"""What was fitted, for an epoch without overlap: tensor work (794 Gflop) 3.7 s on 64 vCPUs and 1.5 s on 8 V100; all else
(138 G edge-columns, 33 GB between servers) 6.6 and 4.1 s; on 720 functions tensor work (35 GB) 7.2 s, while table 4 pays for
only 23 functions on a server once tasks overlap. The last two need 5 Gbit/s of a server's link (what AWS lets an instance of
this size send through a gateway; 100 functions at 200 Mbit/s would be 20) and functions that do more than their share of a
processor would. Old software on old hardware: measure your own."""


def load_rates(path: str | os.PathLike[str]) -> Rates:
    """Rates in a JSON object with the names above; those left out are as by default."""
    file = Path(path).expanduser()
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"rates: {file} cannot be read as JSON ({error})") from error
    if not isinstance(found, dict):
        raise ConfigError(f"rates: {file}: expected an object with {', '.join(_NAMES)}")
    for name in found:
        if name not in _NAMES:
            raise ConfigError(f"rates: {file}: {unknown('field', name, _NAMES)}")
    missing = [name for name in (*_POSITIVE[:5], "function_flops") if name not in found]
    if missing:
        raise ConfigError(f"rates: {file}: no {', '.join(missing)}")
    try:
        return Rates(**{name: _read(name, value) for name, value in found.items()})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"rates: {file}: {error}") from error


_NAMES = [each.name for each in fields(Rates)]


def _read(name: str, value: Any) -> Any:
    if name == "source":
        return str(value)
    if name == "function_flops":
        if not isinstance(value, dict):
            raise InputError("function_flops: expected an object, memory in MB -> flop/s")
        return {int(size): float(rate) for size, rate in value.items()}
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{name} is {value!r}; expected a number")
    return float(value)
