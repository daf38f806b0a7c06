"""What can be wrong with a graph's arrays, each said with the place and the remedy. All functions raise GraphError.

Legend: N nodes, E edges, F features, C classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhop.errors import GraphError, unknown
from polyhop.graph.features import DenseFeatures, FeatureStore, MatrixFeatures, SparseFeatures
from polyhop.kernels.edges import first_of_each, num_repeated

__all__ = [
    "DUPLICATES",
    "check_duplicates",
    "check_features",
    "check_ids",
    "check_labels",
    "check_lists",
    "check_split",
    "check_weight",
]

DUPLICATES = ("error", "keep", "drop")
_CHUNK = 1 << 16  # rows looked at together


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def check_lists(indptr: Tensor, indices: Tensor) -> None:
    """indptr int64 [N + 1] rises from 0 to E; indices int32 or int64 [E] name nodes 0 .. N-1."""
    if indptr.dtype != torch.int64 or indptr.dim() != 1 or indptr.numel() < 1:
        raise GraphError(f"indptr: expected int64 [N + 1], got {_shape(indptr)}")
    if indices.dtype not in (torch.int32, torch.int64) or indices.dim() != 1:
        raise GraphError(f"indices: expected int32 or int64 [E], got {_shape(indices)}")
    nodes, edges = indptr.numel() - 1, indices.numel()
    if int(indptr[0]) != 0 or int(indptr[-1]) != edges:
        raise GraphError(
            f"indptr: expected to run from 0 to {edges} (the number of edges), got {int(indptr[0])} to {int(indptr[-1])}"
        )
    falls = indptr[1:] < indptr[:-1]
    if bool(falls.any()):
        at = int(falls.nonzero()[0])
        raise GraphError(
            f"indptr: falls from {int(indptr[at])} to {int(indptr[at + 1])} at node {at}; it must never fall"
        )
    check_ids("indices", indices, nodes)


def check_ids(what: str, ids: Tensor, nodes: int) -> None:
    """Ids within 0 .. nodes-1."""
    if ids.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low >= 0 and high < nodes:
        return
    at = int(((ids < 0) | (ids >= nodes)).nonzero()[0])
    raise GraphError(
        f"{what}[{at}] = {int(ids[at])}, but the graph has nodes 0 .. {nodes - 1}; "
        "renumber the nodes or give the right num_nodes"
    )


def check_duplicates(indptr: Tensor, indices: Tensor, mode: str) -> Tensor | None:
    """None if nothing is to be dropped, else bool [E]: edges to keep (the first of each)."""
    if mode not in DUPLICATES:
        raise GraphError(unknown("duplicates", mode, DUPLICATES))
    if mode == "keep":
        return None
    repeated = num_repeated(indptr, indices)
    if repeated == 0:
        return None
    keep = first_of_each(indptr, indices)
    if mode == "drop":
        return keep
    edge = int((~keep).nonzero()[0])
    target = int(torch.searchsorted(indptr, edge, right=True)) - 1
    raise GraphError(
        f"{repeated:,} duplicate edges, the first {int(indices[edge])} -> {target}; pass duplicates='drop' to keep the "
        "first of each, or duplicates='keep' for a multigraph (each copy sends its own message)"
    )


def check_weight(weight: Tensor, edges: int) -> None:
    """Float [E], finite, not negative."""
    if not weight.is_floating_point() or weight.dim() != 1 or weight.numel() != edges:
        raise GraphError(f"edge_weight: expected float [{edges}], one per edge, got {_shape(weight)}")
    bad = ~torch.isfinite(weight) | (weight < 0)
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        raise GraphError(
            f"edge_weight: edge {at} has weight {float(weight[at])}; expected finite numbers of at least 0"
        )


def check_features(x: FeatureStore, nodes: int) -> None:
    """One row per node, all finite. A mapped file is not read: its rows are checked when they are used, if at all."""
    if x.num_rows != nodes:
        raise GraphError(f"x: {x.num_rows} rows for {nodes} nodes; expected one row per node")
    if isinstance(x, MatrixFeatures) and x.scale is not None and list(x.scale.shape) != [x.num_features]:
        raise GraphError(f"x scale: expected [{x.num_features}], one per feature, got {_shape(x.scale)}")
    if isinstance(x, DenseFeatures) and not x.is_mapped and x.values.is_floating_point():
        _check_finite(x.values)
    elif isinstance(x, SparseFeatures):
        _check_sparse(x)


def _check_finite(values: Tensor) -> None:
    for begin in range(0, values.shape[0], _CHUNK):
        rows = values[begin : begin + _CHUNK]
        if bool(torch.isfinite(rows.sum(dtype=torch.float64))):  # a NaN or inf anywhere shows in the sum
            continue
        bad = (~torch.isfinite(rows)).nonzero()
        if bad.numel():
            row, column = (int(i) for i in bad[0])
            raise GraphError(
                f"x: node {begin + row}, feature {column} is {float(rows[row, column])}; "
                "expected finite numbers: fill or remove such values first"
            )


def _check_sparse(x: SparseFeatures) -> None:
    rows = x.rows
    if rows.indices.numel() != rows.values.numel() or int(rows.indptr[-1]) != rows.values.numel():
        raise GraphError(
            f"sparse x: {rows.indices.numel()} columns, {rows.values.numel()} values, indptr ends at "
            f"{int(rows.indptr[-1])}; expected equal numbers"
        )
    if bool((rows.indptr[1:] < rows.indptr[:-1]).any()) or int(rows.indptr[0]) != 0:
        raise GraphError("sparse x: indptr must start at 0 and never fall")
    if rows.indices.numel():
        low, high = (int(bound) for bound in torch.aminmax(rows.indices))
        if low < 0 or high >= x.num_features:
            raise GraphError(
                f"sparse x: columns run from {low} to {high}, but there are {x.num_features} features"
            )
    bad = ~torch.isfinite(rows.values)
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        node = int(torch.searchsorted(rows.indptr, at, right=True)) - 1
        raise GraphError(
            f"x: node {node}, feature {int(rows.indices[at])} is {float(rows.values[at])}; expected finite numbers"
        )


def check_labels(y: Tensor, nodes: int, classes: int) -> None:
    """int64 [N] in -1 .. C-1 (-1 = no label), or float32 [N, C] of 0 and 1."""
    if y.dim() == 2:
        if list(y.shape) != [nodes, classes] or y.dtype != torch.float32:
            raise GraphError(
                f"y: expected float32 [{nodes}, {classes}] of 0 and 1 for multi-label, got {_shape(y)}"
            )
        bad = ((y != 0) & (y != 1)).nonzero()
        if bad.numel():
            node, column = (int(i) for i in bad[0])
            raise GraphError(
                f"y: node {node}, class {column} is {float(y[node, column])}; multi-label targets are 0 or 1"
            )
        return
    if y.dim() != 1 or y.numel() != nodes or y.dtype != torch.int64:
        raise GraphError(f"y: expected int64 [{nodes}], one class per node (-1 = no label), got {_shape(y)}")
    bad = ((y < -1) | (y >= classes)).nonzero()
    if bad.numel():
        node = int(bad[0])
        raise GraphError(
            f"y: node {node} has label {int(y[node])}; expected 0 .. {classes - 1}, or -1 for no label"
        )


def check_split(parts: dict[str, Tensor], y: Tensor | None, nodes: int) -> None:
    """Sorted, disjoint int64 index sets; train is not empty; every node in them has a label."""
    seen = torch.zeros(nodes, dtype=torch.uint8)
    names = list(parts)
    for code, (name, ids) in enumerate(parts.items(), start=1):
        if ids.dtype != torch.int64 or ids.dim() != 1:
            raise GraphError(f"split {name}: expected int64 [n], got {_shape(ids)}")
        check_ids(f"split {name}", ids, nodes)
        if bool((ids[1:] <= ids[:-1]).any()):
            raise GraphError(f"split {name}: ids must rise without repeats")
        both = seen[ids].nonzero()
        if both.numel():
            node = int(ids[both[0, 0]])
            raise GraphError(
                f"node {node} is in both {names[int(seen[node]) - 1]} and {name} ({both.shape[0]} such nodes); "
                "the sets must not overlap"
            )
        seen[ids] = code
        if y is not None and y.dim() == 1:
            unlabelled = (y[ids] < 0).nonzero()
            if unlabelled.numel():
                raise GraphError(
                    f"split {name}: node {int(ids[unlabelled[0, 0]])} has no label ({unlabelled.shape[0]} such nodes); "
                    "leave unlabelled nodes out of the split"
                )
    if "train" in parts and parts["train"].numel() == 0:
        raise GraphError("the train set is empty; give at least one labelled train node")
