"""Graphs that other libraries hold in memory: PyG, DGL, SciPy, plain arrays. None of these libraries is imported.

Edges run from source to destination everywhere: ``edge_index[0] -> edge_index[1]``, DGL's ``(u, v)``, and for a SciPy matrix
``A[i, j] != 0`` is the edge i -> j with weight A[i, j] (all ones = unweighted), as in PyG's ``from_scipy_sparse_matrix``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from polyhop.datasets._arrays import as_features, sparse_features, split_number
from polyhop.errors import DatasetError
from polyhop.graph import FeatureStore, Graph, dense_features

__all__ = ["from_object", "is_dgl", "is_pyg", "is_scipy"]

_SETS = ("train", "val", "test")
_ARRAYS = (
    "edge_index",
    "x",
    "y",
    "train",
    "val",
    "test",
    "train_mask",
    "val_mask",
    "test_mask",
    "edge_weight",
)
_FIELDS = frozenset({*_ARRAYS, "num_nodes", "num_classes", "name", "metric", "meta"})


def is_scipy(source: Any) -> bool:
    """A SciPy sparse matrix or array."""
    return hasattr(source, "tocoo") and hasattr(source, "shape") and not hasattr(source, "ndata")


def is_dgl(source: Any) -> bool:
    """A DGL graph, by its methods."""
    return hasattr(source, "ndata") and callable(getattr(source, "edges", None))


def is_pyg(source: Any) -> bool:
    """A PyG Data, by its attributes."""
    return hasattr(source, "edge_index") or hasattr(source, "adj_t") or hasattr(source, "edge_types")


def from_object(
    source: Any, *, split: int | str = 0, features: str = "auto", duplicates: str = "error"
) -> Graph:
    """A checked graph from any of the objects above, a mapping of ``Graph.from_edges``'s arguments, or a sequence
    (edge_index, x, y) of arrays; the first may be a SciPy matrix. None stands for what is absent.
    """
    if is_scipy(source):
        fields = _scipy(source)
    elif is_dgl(source):
        fields = _dgl(source, split)
    elif isinstance(source, Mapping):
        fields = _mapping(source, split)
    elif isinstance(source, Sequence) and not isinstance(source, (str, bytes)):
        fields = _sequence(source)
    elif is_pyg(source):
        fields = _pyg(source, split)
    else:
        raise DatasetError(
            f"cannot make a graph of {type(source).__name__}; expected a name or path, a PyG Data, a DGL graph, "
            "a SciPy sparse matrix, a mapping with 'edge_index', or (edge_index, x, y)"
        )
    x = fields.get("x")
    if features == "none" and x is not None:
        if fields.get("num_nodes") is None:
            fields["num_nodes"] = _num_rows(x)
        x = None
    fields["x"] = as_features(_store(x), features)
    return Graph.from_edges(fields.pop("edge_index"), duplicates=duplicates, **fields)


def _num_rows(x: Any) -> int:
    """Of features of any array kind, which stay where they are."""
    if hasattr(x, "shape"):
        return int(x.shape[0])
    return x.num_rows if isinstance(x, FeatureStore) else len(x)


def _store(x: Any) -> FeatureStore | None:
    """Features of any array kind; SciPy and torch sparse matrices stay sparse."""
    if x is None or isinstance(x, FeatureStore):
        return x
    if is_scipy(x):
        csr = x.tocsr()
        return sparse_features(csr.indptr, csr.indices, csr.data, csr.shape)
    if isinstance(x, torch.Tensor) and x.layout is not torch.strided:
        coo = x.detach().cpu().to_sparse(layout=torch.sparse_coo).coalesce()  # sorted by row
        row, column = coo.indices()
        indptr = np.zeros(coo.shape[0] + 1, np.int64)
        np.cumsum(torch.bincount(row, minlength=coo.shape[0]).numpy(), out=indptr[1:])
        return sparse_features(
            indptr, column.numpy(), coo.values().float().numpy(), (coo.shape[0], coo.shape[1])
        )
    return dense_features(x)


def _scipy(matrix: Any) -> dict[str, Any]:
    if matrix.shape[0] != matrix.shape[1]:
        raise DatasetError(
            f"adjacency matrix: expected a square matrix, got {matrix.shape[0]} x {matrix.shape[1]}"
        )
    coo = matrix.tocoo()
    weight = np.asarray(coo.data)
    is_plain = weight.dtype == bool or bool((weight == 1).all())
    return {
        "edge_index": np.stack([coo.row, coo.col]).astype(np.int64),
        "num_nodes": matrix.shape[0],
        "edge_weight": None if is_plain else weight,
        "name": "scipy",
    }


def _sequence(source: Sequence[Any]) -> dict[str, Any]:
    if not 1 <= len(source) <= 3:
        raise DatasetError(f"expected (edge_index, x, y), got a sequence of {len(source)}")
    first, x, y = (*source, None, None)[:3]
    fields = _scipy(first) if is_scipy(first) else {"edge_index": first, "name": "arrays"}
    return {**fields, "x": x, "y": y}


def _mapping(source: Mapping[str, Any], split: int | str) -> dict[str, Any]:
    extra = sorted(set(source) - _FIELDS)
    if "edge_index" not in source or extra:
        wrong = f"has unknown keys {extra}" if extra else "has no 'edge_index'"
        raise DatasetError(f"the mapping {wrong}; it may have {', '.join(sorted(_FIELDS))}")
    fields = {key: value for key, value in source.items() if not key.endswith("_mask")}
    fields.update(_masks(source.get, split))
    return fields


def _masks(get: Any, split: int | str) -> dict[str, Any]:
    """train, val and test from *_mask entries; of masks [N, S] the chosen column."""
    found: dict[str, Any] = {}
    for name in _SETS:
        mask = get(f"{name}_mask")
        if mask is None:
            continue
        if getattr(mask, "ndim", 1) == 2:
            columns = [str(k) for k in range(mask.shape[1])]
            mask = mask[:, split_number(split, columns, f"{name}_mask")]
        found[name] = torch.as_tensor(mask).cpu().bool()
    return found


def _pyg(data: Any, split: int | str) -> dict[str, Any]:
    if getattr(data, "edge_types", None) is not None:
        kinds = data.edge_types
        raise DatasetError(
            f"a graph with typed edges ({len(kinds)} kinds) is not supported; give one kind, e.g. "
            "polyhop.load((data[edge_type].edge_index, data[node_type].x, data[node_type].y))"
        )
    edges, weight = getattr(data, "edge_index", None), getattr(data, "edge_weight", None)
    if edges is None:
        adj_t = getattr(data, "adj_t", None)
        if adj_t is None:
            raise DatasetError("the PyG Data has neither edge_index nor adj_t")
        row, col, value = adj_t.coo() if hasattr(adj_t, "coo") else _torch_coo(adj_t)
        edges, weight = torch.stack([col, row]), value if weight is None else weight
    fields = {
        "edge_index": edges, "x": getattr(data, "x", None), "y": getattr(data, "y", None), "edge_weight": weight,
        "num_nodes": getattr(data, "num_nodes", None), "name": getattr(data, "name", None) or "pyg",
    }  # fmt: skip
    fields.update(_masks(lambda key: getattr(data, key, None), split))
    return fields


def _torch_coo(adj_t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    coo = adj_t.to_sparse(layout=torch.sparse_coo).coalesce()
    value = coo.values()
    return coo.indices()[0], coo.indices()[1], None if bool((value == 1).all()) else value


def _dgl(graph: Any, split: int | str) -> dict[str, Any]:
    kinds = getattr(graph, "canonical_etypes", None)
    if kinds is not None and len(kinds) != 1:
        raise DatasetError(
            f"a DGL graph with {len(kinds)} kinds of edges is not supported; give graph[etype]"
        )
    source, destination = graph.edges()
    ndata, edata = graph.ndata, getattr(graph, "edata", {})
    first = {
        key: next((ndata[n] for n in options if n in ndata), None) for key, options in _DGL_NAMES.items()
    }
    weight = next((edata[n] for n in ("edge_weight", "weight", "w") if n in edata), None)
    fields = {
        "edge_index": torch.stack([torch.as_tensor(source), torch.as_tensor(destination)]),
        "num_nodes": int(graph.num_nodes()), "edge_weight": weight, "name": "dgl", **first,
    }  # fmt: skip
    fields.update(_masks(ndata.get, split))
    return fields


_DGL_NAMES = {"x": ("feat", "features", "x"), "y": ("label", "labels", "y")}
