"""Graph: an immutable record of one data graph, its features, labels and splits.

Legend: N nodes, E edges, F features, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyhop.errors import GraphError
from polyhop.graph import checks
from polyhop.graph.features import DenseFeatures, FeatureStore
from polyhop.kernels import transpose
from polyhop.kernels.edges import loop_weights

__all__ = ["ArrayLike", "Graph", "Split", "dense_features"]

ArrayLike = Any  # a torch tensor, a NumPy array, or nested sequences of numbers
_SETS = ("train", "val", "test")
_FEATURE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.uint8)


@dataclass(frozen=True, eq=False)
class Split:
    """Disjoint node index sets, each int64 and sorted."""

    train: Tensor
    val: Tensor
    test: Tensor

    @classmethod
    def of(cls, nodes: int, train: ArrayLike, val: ArrayLike = None, test: ArrayLike = None) -> Split:
        """From masks (bool [N]) or index sets in any order; None = empty. Contents are checked by ``Graph.check``."""
        return cls(
            *(_index_set(name, ids, nodes) for name, ids in zip(_SETS, (train, val, test), strict=True))
        )


@dataclass(frozen=True, eq=False)
class Graph:
    """In-edges in CSC: for node v, the sources u of its messages u -> v, in the user's order.

    Self-loops are never added here: layers that want them add the destination's own row. Construction trusts the arrays'
    contents; ``check`` (called by every loader) does not.
    """

    indptr: Tensor  # int64 [N + 1]
    indices: Tensor  # int32 or int64 [E]: sources
    x: FeatureStore | None = None  # [N, F]
    y: Tensor | None = None  # int64 [N], -1 = no label; or float32 [N, C] of 0/1 for multi-label
    split: Split | None = None
    edge_weight: Tensor | None = None  # float32 [E]
    num_classes: int = 0
    name: str = "graph"
    metric: str = "accuracy"  # accuracy | roc_auc | f1_micro
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_nodes(self) -> int:
        return self.indptr.numel() - 1

    @property
    def num_edges(self) -> int:
        return self.indices.numel()

    @property
    def num_features(self) -> int:
        return 0 if self.x is None else self.x.num_features

    @property
    def is_multilabel(self) -> bool:
        return self.y is not None and self.y.dim() == 2

    @cached_property
    def in_degree(self) -> Tensor:
        """int32 [N]: in-edges of each node, loops included."""
        return (self.indptr[1:] - self.indptr[:-1]).to(torch.int32)

    @cached_property
    def out_degree(self) -> Tensor:
        """int32 [N]: out-edges of each node, loops included."""
        return torch.bincount(self.indices, minlength=self.num_nodes).to(torch.int32)

    @property
    def destinations(self) -> Tensor:
        """int64 [E]: destination of each edge; made anew on every call."""
        return torch.repeat_interleave(torch.arange(self.num_nodes), self.in_degree.long())

    @cached_property
    def in_weight(self) -> Tensor | None:
        """float64 [N]: sum of in-edge weights, None for an unweighted graph.

        In double, so that a part or a sample, which must be told it, normalises as the full graph in any precision.
        """
        if self.edge_weight is None:
            return None
        return torch.segment_reduce(self.edge_weight.double(), "sum", offsets=self.indptr, initial=0.0)

    @cached_property
    def loop_weight(self) -> Tensor | None:
        """float32 [N]: weight of each node's own loop (1 if unweighted), 0 where it has none; None if no node has one."""
        return loop_weights(self.indptr, self.indices, self.edge_weight)

    @property
    def edge_index(self) -> Tensor:
        """int64 [2, E]: sources and destinations, as PyG has them, grouped by destination."""
        return torch.stack([self.indices.long(), self.destinations])

    def to(self, device: torch.device | str) -> Graph:
        """Edges, labels and what follows from them on another device; features and splits stay where they are."""
        names = ("indptr", "indices", "y", "edge_weight")
        moved: dict[str, Any] = {name: _moved(getattr(self, name), device) for name in names}
        made = replace(self, **moved)
        for name in ("in_weight", "loop_weight"):  # as they are summed here
            vars(made)[name] = _moved(getattr(self, name), device)
        return made

    def __repr__(self) -> str:
        return (
            f"Graph({self.name!r}, nodes={self.num_nodes:,}, edges={self.num_edges:,}, "
            f"features={self.num_features}, classes={self.num_classes})"
        )

    def check(self, *, duplicates: str = "error") -> Graph:
        """This graph, or GraphError saying which array is wrong, where, and what to do.

        ``duplicates``: "error", "keep" (a multigraph), or "drop" (returns a graph with the first of each).
        """
        checks.check_lists(self.indptr, self.indices)
        if self.edge_weight is not None:
            checks.check_weight(self.edge_weight, self.num_edges)
        if self.x is not None:
            checks.check_features(self.x, self.num_nodes)
        if self.y is not None:
            checks.check_labels(self.y, self.num_nodes, self.num_classes)
        if self.split is not None:
            if self.y is None:
                raise GraphError("a split, but no labels: give y, or leave the split out")
            parts = {name: getattr(self.split, name) for name in _SETS}
            checks.check_split(parts, self.y, self.num_nodes)
        keep = checks.check_duplicates(self.indptr, self.indices, duplicates)
        return self if keep is None else self._only_edges(keep)

    def _only_edges(self, keep: Tensor) -> Graph:
        """This graph with the edges marked in bool [E]."""
        kept = torch.zeros(self.num_edges + 1, dtype=torch.int64)
        torch.cumsum(keep, 0, out=kept[1:])
        weight = None if self.edge_weight is None else self.edge_weight[keep]
        return replace(self, indptr=kept[self.indptr], indices=self.indices[keep], edge_weight=weight)

    @classmethod
    def from_edges(
        cls,
        edge_index: ArrayLike,
        x: FeatureStore | ArrayLike = None,
        y: ArrayLike = None,
        *,
        num_nodes: int | None = None,
        train: ArrayLike = None,
        val: ArrayLike = None,
        test: ArrayLike = None,
        edge_weight: ArrayLike = None,
        num_classes: int | None = None,
        duplicates: str = "error",
        name: str = "graph",
        metric: str = "accuracy",
        meta: Mapping[str, Any] | None = None,
    ) -> Graph:
        """A checked graph from edges [2, E] (sources, destinations) in any order; each node's in-edges keep that order.

        x: matrix [N, F] or a FeatureStore. y: classes [N] (-1 = no label), or 0/1 [N, C] for multi-label. train, val,
        test: masks (bool [N]) or index sets. ``num_nodes`` defaults to the rows of x or y, else to the largest id + 1.
        """
        edges = _tensor("edge_index", edge_index)
        if edges.dim() != 2 or edges.shape[0] != 2:
            raise GraphError(f"edge_index: expected [2, E] (sources, destinations), got {list(edges.shape)}")
        if edges.is_floating_point() or edges.dtype == torch.bool:
            raise GraphError(f"edge_index: expected whole numbers, got {edges.dtype}")
        store = x if x is None or isinstance(x, FeatureStore) else dense_features(x)
        nodes = num_nodes if num_nodes is not None else _count_nodes(edges, store, y)
        indptr, indices, order = _group(edges, nodes)
        weight = None if edge_weight is None else _weights(edge_weight, edges.shape[1])
        if weight is not None and order is not None:
            weight = weight.index_select(0, order)
        return cls.from_lists(
            indptr, indices, store, y, train=train, val=val, test=test, edge_weight=weight, num_classes=num_classes,
            duplicates=duplicates, name=name, metric=metric, meta=meta,
        )  # fmt: skip

    @classmethod
    def from_lists(
        cls,
        indptr: Tensor,
        indices: Tensor,
        x: FeatureStore | ArrayLike = None,
        y: ArrayLike = None,
        *,
        train: ArrayLike = None,
        val: ArrayLike = None,
        test: ArrayLike = None,
        edge_weight: ArrayLike = None,
        num_classes: int | None = None,
        duplicates: str = "error",
        name: str = "graph",
        metric: str = "accuracy",
        meta: Mapping[str, Any] | None = None,
    ) -> Graph:
        """A checked graph from in-edge lists that are already grouped; otherwise as ``from_edges``. Memory is shared."""
        store = x if x is None or isinstance(x, FeatureStore) else dense_features(x)
        labels, classes = (None, num_classes or 0) if y is None else _labels(y, num_classes)
        weight = None if edge_weight is None else _weights(edge_weight, indices.numel())
        split = None
        if train is not None or val is not None or test is not None:
            split = Split.of(indptr.numel() - 1, train, val, test)
        graph = cls(indptr, indices, store, labels, split, weight, classes, name, metric, dict(meta or {}))
        return graph.check(duplicates=duplicates)


def _moved(tensor: Tensor | None, device: torch.device | str) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


def _tensor(name: str, given: ArrayLike) -> Tensor:
    """A CPU tensor of the given numbers, sharing memory where it can."""
    if isinstance(given, Tensor):
        return given.detach().cpu()
    array = np.asarray(given)
    if array.dtype.kind not in "biuf":
        raise GraphError(f"{name}: expected numbers, got an array of {array.dtype}")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.flags.writeable or min(array.strides, default=0) < 0:
        array = array.copy()
    return torch.from_numpy(array)


def dense_features(given: ArrayLike) -> DenseFeatures:
    """A matrix [N, F] of any numeric kind as a store; kinds that kernels cannot gather become float32."""
    values = _tensor("x", given)
    if values.dim() != 2:
        raise GraphError(f"x: expected a matrix [N, F], got {list(values.shape)}")
    if values.dtype not in _FEATURE_DTYPES:
        values = values.to(torch.float32)
    return DenseFeatures(values.contiguous())


def _labels(given: ArrayLike, num_classes: int | None) -> tuple[Tensor, int]:
    """Labels in the record's dtype, and the number of classes."""
    y = _tensor("y", given)
    if y.dim() == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.dim() == 2:
        return y.to(torch.float32), y.shape[1]
    if y.is_floating_point():
        y = torch.where(torch.isnan(y), -1.0, y)  # how OGB marks nodes without a label
        if bool((y != y.round()).any()):
            raise GraphError(f"y: expected whole class numbers, got {float(y[y != y.round()][0])}")
    y = y.to(torch.int64)
    found = int(y.max()) + 1 if y.numel() else 0
    return y, found if num_classes is None else num_classes


def _weights(given: ArrayLike, edges: int) -> Tensor:
    weight = _tensor("edge_weight", given).to(torch.float32)
    if weight.dim() == 2 and weight.shape[1] == 1:
        weight = weight[:, 0]
    if weight.dim() != 1 or weight.numel() != edges:
        raise GraphError(f"edge_weight: expected [{edges}], one per edge, got {list(weight.shape)}")
    return weight


def _count_nodes(edges: Tensor, x: FeatureStore | None, y: ArrayLike) -> int:
    if x is not None:
        return x.num_rows
    if y is not None:
        return len(y)
    return int(edges.max()) + 1 if edges.numel() else 0


def _group(edges: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """(indptr, sources grouped by destination, position of each in the given edges or None if unmoved)."""
    for row, name in enumerate(("edge_index[0]", "edge_index[1]")):
        checks.check_ids(name, edges[row], nodes)
    wide = nodes > 2**31 - 1 or edges.shape[1] > 2**31 - 1
    sources, destinations = edges.to(torch.int64 if wide else torch.int32)
    whole = torch.tensor([0, edges.shape[1]])
    if bool((destinations[1:] >= destinations[:-1]).all()):
        indptr = torch.zeros(nodes + 1, dtype=torch.int64)
        torch.cumsum(torch.bincount(destinations, minlength=nodes), 0, out=indptr[1:])
        return indptr, sources.contiguous(), None
    indptr, _, order = transpose(whole, destinations.contiguous(), nodes)
    return indptr, sources.index_select(0, order), order


def _index_set(name: str, given: ArrayLike, nodes: int) -> Tensor:
    """Sorted int64 ids of a mask or of ids in any order."""
    if given is None:
        return torch.zeros(0, dtype=torch.int64)
    ids = _tensor(name, given)
    if ids.dtype == torch.bool:
        if list(ids.shape) != [nodes]:
            raise GraphError(f"{name} mask: expected bool [{nodes}], one per node, got {list(ids.shape)}")
        return ids.nonzero()[:, 0]
    if ids.is_floating_point() and ids.numel():
        raise GraphError(f"{name}: expected a bool mask or whole ids, got {ids.dtype}")
    ids, _ = ids.flatten().to(torch.int64).sort()
    repeated = ids[1:][ids[1:] == ids[:-1]]
    if repeated.numel():
        hint = "; a 0/1 mask must be bool" if ids.numel() == nodes else ""
        raise GraphError(f"{name}: node {int(repeated[0])} is listed twice{hint}")
    return ids
