"""One readable file per way of distributing training; the registry is a dictionary.

A strategy module has ``NAME``, a ``Config`` dataclass with the options it takes, and ``build(model, graph, config, ...)``,
which makes its ``Step``.
"""

from __future__ import annotations

from types import ModuleType

from polyhop.errors import ConfigError, unknown
from polyhop.strategies import single
from polyhop.strategies.step import Loss, Placement, Step, WholeGraph, as_layered, forward_of, place

__all__ = [
    "STRATEGIES",
    "Loss",
    "Placement",
    "Step",
    "WholeGraph",
    "as_layered",
    "find",
    "forward_of",
    "place",
]

STRATEGIES: dict[str, ModuleType] = {module.NAME: module for module in (single,)}


def find(name: str) -> ModuleType:
    """The strategy module of that name."""
    if name not in STRATEGIES:
        raise ConfigError(unknown("strategy", name, STRATEGIES))
    return STRATEGIES[name]
