"""One readable file per way of distributing training; the registry is a dictionary.

A strategy module has ``NAME``, a ``Config`` dataclass with the options it takes, and ``build(model, graph, config, ...)``,
which makes its ``Step``; one that runs on ranks has ``hold(graph, placement, team, config)``, which makes what evaluation
needs of a rank's part, and ``account`` and ``estimate``, which give the ``Cost`` of a step.
"""

from __future__ import annotations

from types import ModuleType

from polyhop.errors import ConfigError, unknown
from polyhop.strategies import data, halo, macro, pipeline, pushpull, serverless, single, split
from polyhop.strategies.held import HeldPart
from polyhop.strategies.step import Loss, Placement, Step, Team, WholeGraph, as_layered, forward_of, place

__all__ = [
    "STRATEGIES",
    "HeldPart",
    "Loss",
    "Placement",
    "Step",
    "Team",
    "WholeGraph",
    "as_layered",
    "find",
    "forward_of",
    "place",
]

STRATEGIES: dict[str, ModuleType] = {
    module.NAME: module for module in (single, data, macro, halo, pipeline, split, pushpull, serverless)
}


def find(name: str) -> ModuleType:
    """The strategy module of that name."""
    if name not in STRATEGIES:
        raise ConfigError(unknown("strategy", name, ["auto", *STRATEGIES]))
    return STRATEGIES[name]
