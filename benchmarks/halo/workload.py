"""What ranks are asked to do, as plain values that go to them as JSON: sides, model, turns, shares of waiting."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from polyhop.nn import GCN, GraphSAGE

__all__ = ["EXACT", "OURS", "SEED", "SIDES", "WARM", "Job", "model_of"]

SEED = 0
WARM = 11  # epochs before any is timed: widths are first chosen for the epoch with number 10
LR = 0.01
NUM_LAYERS = 3
EXACT, OURS = "exact", "adaptive"
_SEEDING = threading.Lock()  # ranks may be threads, and torch has one generator
SIDES: dict[str, dict[str, Any]] = {
    "naive": {"naive_halo": True},
    "plain": {"overlap": False},
    EXACT: {},
    OURS: {"bits": "adaptive"},
    "adaptive_plain": {"bits": "adaptive", "overlap": False},
}


@dataclass(frozen=True)
class Job:
    """All sides live in the same ranks and take turns, one epoch each.

    ``shares``: of an epoch of the exact side in which ranks wait for each other; for each the rate of the links is sought.
    """

    parts: str  # folder
    answer: str  # folder
    sides: Mapping[str, Mapping[str, Any]]  # name -> options of the strategy
    model: str = "gcn"
    hidden: int = 128
    dropout: float = 0.5
    norm: str | None = None
    turns: int = 3
    warm: int = WARM
    shares: tuple[float, ...] = ()
    tries: int = 4  # epochs' worth of search for each share
    epochs: int = 0  # above 0: at the first share every side trains so many epochs, judged every ``judged``
    judged: int = 5

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> Job:
        return cls(**{**given, "shares": tuple(given["shares"])})


def model_of(
    name: str, num_features: int, num_classes: int, hidden: int, *, dropout: float = 0.5, norm: str | None = None,
    seed: int = SEED, num_layers: int = NUM_LAYERS,
) -> torch.nn.Module:  # fmt: skip
    """The same weights on every rank and every side."""
    kinds: dict[str, Any] = {"sage": GraphSAGE, "gcn": GCN}
    more = {} if norm is None else {"norm": norm, "norm_kwargs": {"mode": "node"}}
    with _SEEDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made: torch.nn.Module = kinds[name](
            num_features, hidden, num_layers=num_layers, out_channels=num_classes, dropout=dropout, **more
        )
    return made
