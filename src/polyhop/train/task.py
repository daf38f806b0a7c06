"""What a graph asks to be learned: the loss, the metric, and the labelled nodes of each split, checked before training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from polyhop.errors import ConfigError, unknown
from polyhop.graph import Graph, Labels, SharedGraph
from polyhop.strategies import Loss

__all__ = ["Metric", "Task", "check_model"]

Metric = Callable[[Tensor, Tensor], float]
"""(logits [n, C], labels of the same rows) -> one number, larger is better."""

Counts = Callable[[Tensor, Tensor], tuple[float, float]]
"""(logits, labels) -> (numerator, denominator) of the metric."""

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Task:
    """Node classification on one graph: single-label (y int64 [N]) or multi-label (y float [N, C])."""

    y: Labels
    loss: Loss  # summed over rows
    terms_per_row: int  # what one row adds to the count that the sum is divided by
    metric: str
    measure: Metric
    ids: dict[str, Tensor]  # split -> its labelled nodes (of a rank: its own, by local row), int64, sorted
    counts: Counts | None = None  # where the metric is a ratio of two counts

    @classmethod
    def of(
        cls,
        graph: Graph | SharedGraph,
        losses: dict[bool, Loss],
        metrics: dict[str, Metric],
        metric: str | None = None,
        counts: Mapping[str, Counts] | None = None,
    ) -> Task:
        """The task of a graph; ``losses`` by is_multilabel, ``metric`` overrides the graph's own."""
        if graph.y is None:
            raise ConfigError(f"graph {graph.name!r} has no labels: training and evaluation need y")
        if graph.split is None:
            raise ConfigError(f"graph {graph.name!r} has no train/val/test split: give masks or index arrays")
        name = metric or graph.metric
        if name not in metrics:
            raise ConfigError(unknown("metric", name, metrics))
        sets = {split: getattr(graph.split, split) for split in SPLITS}
        ids = sets if graph.is_multilabel else {split: ids[graph.y[ids] >= 0] for split, ids in sets.items()}
        terms = graph.y.shape[1] if graph.is_multilabel else 1
        countable = None if counts is None else counts.get(name)
        return cls(graph.y, losses[graph.is_multilabel], terms, name, metrics[name], ids, countable)

    def train_ids(self) -> Tensor:
        """The labelled train nodes; ConfigError if there are none."""
        if self.ids["train"].numel() == 0:
            raise ConfigError(
                "the train set is empty: no node is both in the train split and labelled (label -1 = none)"
            )
        return self.ids["train"]


def check_model(model: nn.Module, graph: Graph | SharedGraph) -> None:
    """ConfigError where the graph has no features or the model's widths cannot fit it."""
    lazy = [
        name for name, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)
    ]
    if lazy:
        raise ConfigError(
            f"{type(model).__name__} has parameters without a shape yet ({lazy[0]}, ...): "
            f"give in_channels={graph.num_features} instead of -1"
        )
    if graph.x is None:
        raise ConfigError(
            f"graph {graph.name!r} has no features: give x [N, F] (for instance degrees or a one-hot id)"
        )
    given = getattr(model, "in_channels", None)
    if isinstance(given, int) and given != graph.num_features:
        raise ConfigError(
            f"the model takes {given} features per node, graph {graph.name!r} has {graph.num_features}"
        )
    out = getattr(model, "out_channels", None)
    if isinstance(out, int) and graph.y is not None and out < graph.num_classes:
        raise ConfigError(
            f"the model gives {out} outputs per node, graph {graph.name!r} has {graph.num_classes} classes"
        )
