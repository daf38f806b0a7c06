"""What there is to know about a graph before training on it: the record behind ``polyhop data NAME``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyhop.graph import DenseFeatures, DiskFeatures, FeatureStore, Graph, SparseFeatures
from polyhop.kernels import transpose

__all__ = ["describe"]

_CHUNK = 1 << 18  # nodes looked at together, to bound scratch memory


def describe(graph: Graph) -> dict[str, Any]:
    """Plain numbers, lists and dicts (JSON-ready): sizes, degrees, components, homophily, classes, split, bytes.

    Components ignore the direction of edges. Homophily is the share of edges between labelled nodes that join equal
    labels; None for multi-label or unlabelled graphs.
    """
    symmetric = _is_symmetric(graph)
    return {
        "name": graph.name,
        "num_nodes": graph.num_nodes,
        "num_edges": graph.num_edges,
        "num_features": graph.num_features,
        "num_classes": graph.num_classes,
        "metric": graph.metric,
        "is_multilabel": graph.is_multilabel,
        "has_weights": graph.edge_weight is not None,
        "features": _kind(graph.x),
        "num_loops": 0 if graph.loop_weight is None else int((graph.loop_weight != 0).sum()),
        "is_symmetric": symmetric,
        "in_degree": _degrees(graph.in_degree),
        "out_degree": _degrees(graph.out_degree),
        "isolated": int(((graph.in_degree == 0) & (graph.out_degree == 0)).sum()),
        "components": _components(graph, symmetric),
        "homophily": _homophily(graph),
        "classes": _classes(graph),
        "split": _split(graph),
        "bytes": _bytes(graph),
    }


def _kind(x: FeatureStore | None) -> str:
    if x is None:
        return "none"
    if isinstance(x, SparseFeatures):
        return f"sparse, {x.rows.values.numel() / max(x.num_rows, 1):.1f} stored per node"
    if isinstance(x, DenseFeatures):
        return f"{str(x.values.dtype).removeprefix('torch.')}{', mapped' if x.is_mapped else ''}"
    if isinstance(x, DiskFeatures):
        return f"{str(x.dtype).removeprefix('torch.')}, on disk"
    return type(x).__name__


def _degrees(degree: Tensor) -> dict[str, Any]:
    """min, median, mean, max, and counts by powers of two: bin 0 is degree 0, bin k is 2^(k-1) .. 2^k - 1."""
    if degree.numel() == 0:
        return {"min": 0, "median": 0, "mean": 0.0, "max": 0, "histogram": []}
    bins = torch.bucketize(degree, torch.tensor([2**power for power in range(31)]), right=True)
    return {
        "min": int(degree.min()),
        "median": int(degree.median()),
        "mean": float(degree.double().mean()),
        "max": int(degree.max()),
        "histogram": torch.bincount(bins).tolist(),
    }


def _components(graph: Graph, symmetric: bool) -> dict[str, int]:
    """Strong components are cheaper to find; in a symmetric graph they are the same."""
    if graph.num_nodes == 0:
        return {"count": 0, "largest": 0}
    import numpy as np
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import connected_components

    ones = np.ones(graph.num_edges, np.int8)
    matrix = csr_matrix(
        (ones, graph.indices.numpy(), graph.indptr.numpy()), (graph.num_nodes, graph.num_nodes)
    )
    count, label = connected_components(matrix, connection="strong" if symmetric else "weak")
    return {"count": int(count), "largest": int(np.bincount(label).max())}


def _is_symmetric(graph: Graph) -> bool:
    """Whether every edge has its reverse. Lists that differ only in order count as equal."""
    if not torch.equal(graph.in_degree, graph.out_degree):
        return False
    _, back, _ = transpose(graph.indptr, graph.indices, graph.num_nodes)  # sorted within each list
    if torch.equal(back, graph.indices):
        return True
    for begin in range(0, graph.num_nodes, _CHUNK):
        lists, edges = _chunk(graph, begin)
        code, order = lists * graph.num_nodes + graph.indices[edges], lists * graph.num_nodes + back[edges]
        if not torch.equal(code.sort().values, order):
            return False
    return True


def _chunk(graph: Graph, begin: int) -> tuple[Tensor, slice]:
    """(destination of each edge, the edges) of nodes begin .. begin + _CHUNK."""
    end = min(begin + _CHUNK, graph.num_nodes)
    edges = slice(int(graph.indptr[begin]), int(graph.indptr[end]))
    return torch.repeat_interleave(torch.arange(begin, end), graph.in_degree[begin:end].long()), edges


def _homophily(graph: Graph) -> float | None:
    if graph.y is None or graph.is_multilabel:
        return None
    equal = known = 0
    for begin in range(0, graph.num_nodes, _CHUNK):
        lists, edges = _chunk(graph, begin)
        source, target = graph.y[graph.indices[edges].long()], graph.y[lists]
        labelled = (source >= 0) & (target >= 0)
        known += int(labelled.sum())
        equal += int((labelled & (source == target)).sum())
    return equal / known if known else None


def _classes(graph: Graph) -> dict[str, Any] | None:
    """Nodes per class, and nodes without a label."""
    if graph.y is None:
        return None
    if graph.is_multilabel:
        return {"counts": graph.y.sum(0).long().tolist(), "unlabelled": 0}
    counts = torch.bincount(graph.y[graph.y >= 0], minlength=graph.num_classes)
    return {"counts": counts.tolist(), "unlabelled": int((graph.y < 0).sum())}


def _split(graph: Graph) -> dict[str, int] | None:
    if graph.split is None:
        return None
    return {name: getattr(graph.split, name).numel() for name in ("train", "val", "test")}


def _bytes(graph: Graph) -> dict[str, int]:
    """Bytes of the arrays; those mapped or on disk count as file, not as memory."""
    edges = sum(t.nbytes for t in (graph.indptr, graph.indices, graph.edge_weight) if t is not None)
    features, mapped = 0, 0
    if isinstance(graph.x, DenseFeatures):
        features, mapped = (0, graph.x.values.nbytes) if graph.x.is_mapped else (graph.x.values.nbytes, 0)
    elif isinstance(graph.x, DiskFeatures):
        mapped = graph.x.num_rows * graph.x.num_features * graph.x.dtype.itemsize
    elif isinstance(graph.x, SparseFeatures):
        features = sum(t.nbytes for t in (graph.x.rows.indptr, graph.x.rows.indices, graph.x.rows.values))
    return {
        "edges": edges,
        "features": features,
        "mapped": mapped,
        "labels": 0 if graph.y is None else graph.y.nbytes,
    }
