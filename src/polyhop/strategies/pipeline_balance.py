"""Which layers go to which stage: the slowest stage as fast as can be, exactly, by a dynamic programme over the layers.

Of all cuts with the fastest slowest stage, the one whose boundaries are cheapest to cross is taken, then the most even one.

Legend: S stages, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from polyhop.errors import ConfigError

__all__ = ["balance", "slowest"]

_SLACK = 1e-12  # sums of the same costs in another order


def slowest(costs: Sequence[float], bounds: Sequence[int]) -> float:
    """The cost of the slowest stage."""
    return max(sum(costs[start:stop]) for start, stop in pairwise(bounds))


def balance(
    costs: Sequence[float], num_stages: int, crossing: Sequence[float] | None = None
) -> tuple[int, ...]:
    """S + 1 bounds of stages. ``costs[l]``: of layer l, in any unit; what begins and ends a model counts to its layers.

    ``crossing[l]``: what it costs to cut between layers l - 1 and l (columns that cross, say); None: the same everywhere.
    """
    num_layers = len(costs)
    if num_stages < 1 or num_layers < num_stages:
        raise ConfigError(
            f"{num_layers} layers cannot be cut into {num_stages} stages: use at most {num_layers} stages (fewer ranks, or "
            "several ways to a stage)"
        )
    if any(not 0 <= cost < float("inf") for cost in costs):
        raise ConfigError(f"costs of layers {list(costs)}: expected finite numbers of at least 0")
    least = _least_slowest(costs, num_stages)
    return _cheapest(costs, num_stages, least * (1 + _SLACK), crossing or [0.0] * num_layers)


def _least_slowest(costs: Sequence[float], num_stages: int) -> float:
    sums = [0.0, *accumulate(costs)]
    best = list(sums)  # of the first i layers in as many stages as were looked at
    for stage in range(2, num_stages + 1):
        best = [
            min(
                (max(best[cut], sums[stop] - sums[cut]) for cut in range(stage - 1, stop)),
                default=float("inf"),
            )
            for stop in range(len(sums))
        ]
    return best[-1]


def _cheapest(
    costs: Sequence[float], num_stages: int, most: float, crossing: Sequence[float]
) -> tuple[int, ...]:
    """The cut of least (crossing, sum of squares) in which no stage exceeds ``most``."""
    sums = [0.0, *accumulate(costs)]
    none: tuple[float, float, tuple[int, ...]] = (float("inf"), float("inf"), (0,))
    best = [(0.0, 0.0, (0,)), *[none] * len(costs)]
    for _ in range(num_stages):
        following = [none] * len(sums)
        for stop in range(1, len(sums)):
            for cut in range(stop):
                cost = sums[stop] - sums[cut]
                crossed, squares, bounds = best[cut]
                if cost > most or crossed == float("inf"):
                    continue
                found = (crossed + (crossing[cut] if cut else 0.0), squares + cost * cost, (*bounds, stop))
                following[stop] = min(following[stop], found)
        best = following
    return best[-1][2]
