"""What a forecast is asked: training on so many ranks of some machine, as far as ranks have seen the graph."""

from __future__ import annotations

from dataclasses import dataclass

from polyhop.forecast.sight import Sight
from polyhop.forecast.training import Training
from polyhop.plan import Law, Link, Machine

__all__ = ["Question"]

# Measured on one AVX-512 core: 0.57 ms for Adam's step on 268,658 parameters; loop, labels and buckets of gradients 1 ms.
_STEP_S, _PARAMETER_S = 1e-3, 2.1e-9


@dataclass(frozen=True, eq=False)
class Question:
    """The same for all strategies."""

    training: Training
    sight: Sight
    num_ranks: int
    machine: Machine
    link: Link  # between the ranks
    law: Law  # of the model's computing on one rank
    crowding: float = 0.0  # ranks to a core

    @property
    def step_s(self) -> float:
        """Of a step beside what the model computes: the loop, the optimiser, the gradients put together."""
        return _STEP_S + _PARAMETER_S * self.training.num_parameters

    @property
    def slowed(self) -> float:
        """How many times as long a second of computing takes where ranks outnumber cores."""
        return max(1.0, self.crowding)
