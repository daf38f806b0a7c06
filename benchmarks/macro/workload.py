"""What ranks are asked to do, as plain values that go to them as JSON: sides, models, turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from polyhop.nn import GAT, GCN, GraphSAGE

__all__ = ["MODELS", "SEED", "Job", "Side", "model_of"]

SEED = 0
MODELS = ("sage", "gcn", "gat")


@dataclass(frozen=True)
class Side:
    """How mini-batches are loaded. ``k`` 0: the strategy chooses."""

    k: int = 1
    delta: bool = False  # rows stay in the pool
    room: int | None = None  # slots of the pool; None: what the strategy takes
    memory: int | None = None  # bytes given to the strategy
    rpc: bool = False  # strategy data, a call per mini-batch and hop
    aggregated: bool = False  # the first layer's sums are stored
    fan_outs: tuple[int, ...] | None = None  # other than the job's
    epochs: tuple[int, ...] | None = None  # other than the job's: (untimed ..., timed)
    models: tuple[str, ...] = MODELS  # that it trains, of the job's


@dataclass(frozen=True)
class Job:
    """All sides live in the same ranks and take turns. A turn is one epoch that fills the pipeline and ``timed`` others."""

    parts: str  # folder
    answer: str  # folder
    batch_size: int  # of all ranks
    fan_outs: tuple[int, ...]
    sides: Mapping[str, Side]
    models: tuple[str, ...] = ("sage",)
    hidden: int = 64
    turns: int = 1
    timed: int = 1
    trains: bool = True  # False: mini-batches are loaded and dropped
    predicts: tuple[str, ...] = ()  # sides whose rows are predicted, from inclusion probabilities

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> Job:
        def frozen(value: Any) -> Any:
            return tuple(value) if isinstance(value, list) else value

        sides = {
            name: Side(**{k: frozen(v) for k, v in side.items()}) for name, side in given["sides"].items()
        }
        return cls(**{key: frozen(value) for key, value in given.items() if key != "sides"}, sides=sides)


def model_of(name: str, num_features: int, num_classes: int, job: Job, num_layers: int) -> torch.nn.Module:
    """The same weights on every rank and every side."""
    torch.manual_seed(SEED)
    kinds: dict[str, Any] = {"sage": GraphSAGE, "gcn": GCN, "gat": GAT}
    more = {"heads": 4} if name == "gat" else {}
    return kinds[name](
        num_features, job.hidden, num_layers=num_layers, out_channels=num_classes, dropout=0.5, **more
    )
