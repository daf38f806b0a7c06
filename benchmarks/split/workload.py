"""What the ranks of section ``epochs`` are asked to do, as plain values that go to them as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from polyhop.nn import GraphSAGE

__all__ = ["FAN_OUTS", "SEED", "SIDES", "Job", "Side", "model_of"]

SEED = 0
FAN_OUTS = (10, 10, 10)
TENTH = "tenth"  # of a part's rows, in bytes


@dataclass(frozen=True)
class Side:
    """A strategy and its options; ``TENTH`` stands for the bytes of a tenth of a part's rows."""

    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def given(self, tenth_bytes: int) -> dict[str, Any]:
        return {name: tenth_bytes if value == TENTH else value for name, value in self.options.items()}


# Every way that a user can give, all with the same weights to rounding; ``auto``, chosen on the links as they are, is beside
# them. The rate of the links is sought with the first.
SIDES: dict[str, Side] = {
    "data": Side("data"),
    "cache": Side("data", {"cache_bytes": TENTH}),
    "striped": Side("data", {"cache_bytes": TENTH, "cache_ranks": 4}),
    "split": Side("split"),
    "sums": Side("split", {"split_sums": True}),
    "depth2": Side("split", {"split_depth": 2}),
    "depth1": Side("split", {"split_depth": 1}),
    "copies": Side("split", {"cache_bytes": TENTH}),
    "pushpull": Side("pushpull"),
}


@dataclass(frozen=True)
class Job:
    """All sides live in the same ranks and take turns: one epoch that warms up, then ``turns`` at each rate."""

    parts: str  # folder
    answer: str  # folder
    batch_size: int  # of all ranks
    hidden: Sequence[int]
    tenth_bytes: int
    share: float  # of an epoch that the first side should wait for
    tries: int  # to find the rate where it does
    rates: Sequence[float]  # Mbit/s beside the one that is sought
    turns: int
    sides: Mapping[str, Side]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> Job:
        sides = {name: Side(**side) for name, side in given["sides"].items()}
        return cls(**{**given, "sides": sides})


def model_of(num_features: int, hidden: int, num_classes: int) -> torch.nn.Module:
    """The same weights on every rank and every side."""
    torch.manual_seed(SEED)
    return GraphSAGE(num_features, hidden, num_layers=len(FAN_OUTS), out_channels=num_classes, dropout=0.5)
