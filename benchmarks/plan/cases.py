"""What is planned and then trained: graphs, models, mini-batches or the full graph; values that go to ranks as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from polyhop.cli.recipe import Recipe
from polyhop.graph import Graph

__all__ = ["CASES", "SEED", "UNSEEN", "Case", "Job"]

SEED = 0


@dataclass(frozen=True)
class Case:
    """One model on one graph."""

    graph: str
    model: str
    layers: int
    hidden: int
    fan_outs: Sequence[int] | None = None
    batch_size: int = 1024
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        way = "full" if self.fan_outs is None else "/".join(map(str, self.fan_outs))
        return f"{self.graph} {self.model} {self.layers}x{self.hidden} {way}"

    def recipe(self) -> Recipe:
        return Recipe(
            self.graph, model=self.model, layers=self.layers, hidden=self.hidden, more=dict(self.more)
        )

    def built(self, graph: Graph) -> nn.Module:
        return self.recipe().of_widths(graph.num_features, graph.num_classes, graph.name).build(SEED)


CASES = (
    Case("debian-packages", "sage", 2, 64, (10, 5)),
    Case("synth:products?scale=0.02", "sage", 3, 128, (10, 5, 5)),
    Case("synth:products?scale=0.02", "gcn", 2, 128, (15, 10)),
    Case("amazon-computers", "gat", 2, 64, (10, 10), 512, {"heads": 2}),
    Case("debian-packages", "gcn", 2, 128),
    Case("amazon-computers", "sage", 3, 128),
    Case("synth:products?scale=0.02", "gcn", 3, 128),
    Case("facebook-pages", "gcnii", 8, 64),
)
"""Constants of the forecasts were set while looking at these."""

UNSEEN = (
    Case("pubmed", "gcn", 2, 128, (10, 10), 512),
    Case("synth:reddit?scale=0.05", "sage", 2, 128, (10, 10)),
    Case("coauthor-physics", "sage", 2, 64),
    Case("tolokers", "gat", 3, 64, more={"heads": 2}),
)
"""Nobody looked at these before the constants were set."""


@dataclass(frozen=True)
class Job:
    """All ways that are foreseen take turns in the same ranks, at one rate of the links after another."""

    case: Case
    answer: str  # folder
    rates: Sequence[float | None]  # Mbit/s; None: no limit
    turns: int
    most_s: float  # a way that is expected to take so many times as long as the best is not timed
    most_of_first_s: float  # ... of every strategy's best way

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> Job:
        return cls(**{**given, "case": Case(**given["case"])})
