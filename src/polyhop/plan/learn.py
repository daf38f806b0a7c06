"""What past runs teach: how many times as long as foreseen an epoch of each strategy took on this host.

Of every strategy the last few ratios are kept; their median, drawn towards 1 while they are few, multiplies what is foreseen
next. A ratio is of what the model itself foresaw, never of what was already corrected, so that corrections do not pile up.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from polyhop.plan.machine import Machine
from polyhop.plan.prediction import Prediction

__all__ = ["corrected", "factor_of", "learn"]

KEPT = 12  # runs of a strategy
_DOUBT = 1.0  # as much as so many runs that went as foreseen
_LEAST, _MOST = 0.2, 5.0  # what lies outside is another machine's, or a run that was disturbed


def factor_of(ratios: Sequence[float]) -> float:
    """By which to multiply; 1 where nothing is known."""
    if not ratios:
        return 1.0
    trust = len(ratios) / (len(ratios) + _DOUBT)
    return float(statistics.median(ratios) ** trust)


def corrected(given: Prediction, past: Mapping[str, Sequence[float]]) -> Prediction:
    """A prediction with what past runs of its strategy have taught; where there are none, those of all others: what one
    strategy was found to be slower than foreseen must not speak for one that was never tried.
    """
    factor = factor_of(past.get(given.strategy) or [ratio for each in past.values() for ratio in each])
    parts = {name: value * factor for name, value in given.parts.items()}
    return replace(given, epoch_s=given.epoch_s * factor, parts=parts, foreseen_s=given.epoch_s)


def learn(machine: Machine, given: Prediction, measured_s: float) -> Machine:
    """The machine with one more run. Ratios that cannot be of this machine are left out."""
    foreseen = given.foreseen_s or given.epoch_s
    ratio = measured_s / foreseen if foreseen > 0 else 0.0
    if not _LEAST <= ratio <= _MOST:
        return machine
    kept = [*machine.past.get(given.strategy, ()), ratio][-KEPT:]
    return replace(machine, past={**machine.past, given.strategy: tuple(kept)})
