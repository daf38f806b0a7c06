"""What a launch is asked for, and what each rank is handed. Ground of this folder; loads no torch."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from polyhop.errors import ConfigError, unknown

if TYPE_CHECKING:
    from polyhop.comm import Collective

__all__ = ["ENGINES", "Launch", "RankContext", "RankFunction"]

ENGINES = ("auto", "local", "ray", "torchrun")
_BACKENDS = ("gloo", "nccl")
_PLACEMENTS = ("pack", "spread")


def _latency_s() -> float:
    """POLYHOP_LATENCY_S, else none."""
    given = os.environ.get("POLYHOP_LATENCY_S", "") or "0"
    try:
        return float(given)
    except ValueError:
        raise ConfigError(f"POLYHOP_LATENCY_S={given!r}: expected a number of seconds") from None


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How to run a function on several ranks."""

    num_ranks: int | None = None
    """How many; None: as many as torchrun started, else 1."""
    engine: str = "auto"
    """local | torchrun | ray | auto (torchrun where it started this process, else local)."""
    threads: int = 1
    """Threads of each rank."""
    pin: bool = True
    """Keep each rank on cores of its own, where the host has enough of them."""
    backend: str = "gloo"
    """gloo | nccl."""
    start_timeout_s: float = 300.0
    """How long ranks wait for each other at the start."""
    peer_timeout_s: float = 60.0
    """How long a rank may give no sign before it counts as lost."""
    stop_timeout_s: float = 120.0
    """How long ranks may take to save their state when the run is asked to stop (local)."""
    max_restarts: int = 0
    """How often all ranks are started again after one was lost (local, ray; torchrun has its own --max-restarts)."""
    latency_s: float = field(default_factory=_latency_s)
    """Delay added to every message, for experiments."""
    placement: str = "pack"
    """pack | spread: whether Ray puts ranks on few hosts or on many."""
    agreed: Mapping[str, Any] = field(default_factory=dict)
    """What every rank must have been started with alike, by name; checked when they meet."""

    def __post_init__(self) -> None:
        for name, known in (("engine", ENGINES), ("backend", _BACKENDS), ("placement", _PLACEMENTS)):
            if getattr(self, name) not in known:
                raise ConfigError(unknown(name, str(getattr(self, name)), known))
        least = {"threads": 1, "max_restarts": 0} | ({} if self.num_ranks is None else {"num_ranks": 1})
        for name, smallest in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < smallest:
                raise ConfigError(f"{name}={value!r}: expected a whole number of at least {smallest}")
        for name in ("start_timeout_s", "peer_timeout_s", "stop_timeout_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name}={value!r}: expected a number of seconds above 0")
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise ConfigError(f"latency_s={self.latency_s!r}: expected a number of seconds, 0 or more")


def _ignore(last_word: Callable[[], object]) -> None:
    """Where nothing watches, there is nothing to be told of."""


@dataclass(frozen=True)
class RankContext:
    """What a rank's function is handed: its line to the others, and how often the run was started again."""

    comm: Collective
    attempt: int = 0
    engine: str = "local"
    on_loss: Callable[[Callable[[], object]], None] = _ignore
    """Have something called, with a few seconds of time, before the process is ended because another rank was lost."""


class RankFunction(Protocol):
    """A function of a module's top level, so that other processes can find it by name."""

    def __call__(self, context: RankContext, /, *args: Any) -> Any: ...
