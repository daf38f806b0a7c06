"""An epoch in which nothing is lost: quantise + max(communication left, central rows) + dequantise + the rest.

communication   what ranks wait for in the same messages without overlap, for each layer and direction
central rows    from the moment a message has left until it is waited for, with overlap
the rest        an epoch less all of these: marginal rows, dense layers, the optimiser, the sum of the gradients
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.halo.launches import Phase
from benchmarks.halo.workload import OURS

__all__ = ["Ideal", "ideal"]


@dataclass(frozen=True)
class Ideal:
    """Seconds, means over ranks."""

    quantise: float
    dequantise: float
    crossing: float  # max(communication, central), added up over layers and directions
    rest: float
    measured: float
    by_bytes: float  # the ideal if messages took their bytes over the bandwidth of the link alone

    @property
    def seconds(self) -> float:
        return self.quantise + self.crossing + self.dequantise + self.rest

    @property
    def fraction(self) -> float:
        """1: nothing is lost."""
        return self.seconds / self.measured

    def __str__(self) -> str:
        parts = ("quantise", "crossing", "dequantise", "rest")
        each = ", ".join(f"{name} {1000 * getattr(self, name):.0f}" for name in parts)
        strict = self.by_bytes / self.measured
        return f"{self.fraction:.2f} ({each}, measured {1000 * self.measured:.0f} ms; by bytes {strict:.2f})"


def ideal(phase: Phase, ours: str = OURS, without: str = "adaptive_plain") -> Ideal:
    """Of one rate's epochs."""
    alone, window, wait = (
        phase.exchanges(side, name)
        for side, name in ((without, "wait"), (ours, "communicate"), (ours, "wait"))
    )
    central = {where: window[where] - wait.get(where, 0.0) for where in window}
    crossing = sum(max(alone.get(where, 0.0), central[where]) for where in window)
    quantise, dequantise = phase.spent(ours, "quantise"), phase.spent(ours, "dequantise")
    measured = phase.mean_seconds(ours)
    rest = measured - quantise - dequantise - sum(window.values())
    busiest = max(one["bytes"].get("hidden", 0) for one in phase.epochs[ours][-1])
    least = max(busiest / phase.bytes_per_s, sum(central.values()))
    return Ideal(quantise, dequantise, crossing, rest, measured, quantise + least + dequantise + rest)
