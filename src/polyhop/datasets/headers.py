"""How large a stored graph is, from the headers of its arrays: rows of features are never read."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from polyhop.datasets._arrays import Array, Header, Npz, Rows, look_npy, read_npy, reading, rows_of
from polyhop.errors import DatasetError
from polyhop.graph import Graph

__all__ = ["GraphSizes", "folder_sizes", "npz_sizes", "sizes_of"]


@dataclass(frozen=True)
class GraphSizes:
    """Of a graph that need not be loaded. ``num_edges`` counts stored edges, repeated ones too."""

    name: str
    num_nodes: int
    num_edges: int
    num_features: int
    num_classes: int
    row_dtype: str = "float32"  # of stored feature rows
    row_length: float | None = None  # values of a sparse row, on average; None: dense
    has_scale: bool = False  # stored values are multiplied when they are read


_Shape = Callable[[str], tuple[int, ...] | None]
_Look = Callable[[str], Header | None]
_Find = Callable[[str], Array | None]


def sizes_of(graph: Graph, rows: Rows) -> GraphSizes:
    """Of a graph that was loaded without its features, and these."""
    if rows.num_rows not in (None, graph.num_nodes):
        raise DatasetError(f"x: {rows.num_rows} rows for {graph.num_nodes} nodes; expected one row per node")
    return GraphSizes(
        graph.name, graph.num_nodes, graph.num_edges, rows.num_features, graph.num_classes,
        rows.dtype, rows.length, rows.has_scale,
    )  # fmt: skip


def npz_sizes(path: Path) -> GraphSizes:
    """Of a graph in one .npz file."""
    with reading(path, "the archive", lambda: zipfile.ZipFile(path)), Npz(path) as file:
        return _sizes(path, path.stem, file.look, file.find, rows_of(file.look, file.find))


def folder_sizes(path: Path, rows: Rows) -> GraphSizes:
    """Of a graph in a folder of .npy files."""
    file = path / "graph.json"
    about = reading(file, "the description", lambda: json.loads(file.read_text())) if file.exists() else {}

    def look(name: str) -> Header | None:
        return look_npy(path / f"{name}.npy")

    def find(name: str) -> Array | None:
        if about.get(name) is not None:
            return np.asarray(about[name])
        return read_npy(path / f"{name}.npy") if (path / f"{name}.npy").exists() else None

    return _sizes(path, str(about.get("name", path.name)), look, find, rows)


def _sizes(path: Path, name: str, look: _Look, find: _Find, rows: Rows) -> GraphSizes:
    def shape(name: str) -> tuple[int, ...] | None:
        header = look(name)
        return None if header is None else header.shape

    edges, lists = shape("edge_index"), shape("indices")
    if edges is None and lists is None:
        raise DatasetError(f"{path}: no edges: expected edge_index, or indptr and indices")
    return GraphSizes(
        name,
        _num_nodes(shape, find, rows),
        edges[1] if edges is not None else lists[0] if lists is not None else 0,
        rows.num_features,
        _num_classes(shape, find),
        rows.dtype,
        rows.length,
        rows.has_scale,
    )


def _num_nodes(shape: _Shape, find: _Find, rows: Rows) -> int:
    given, indptr = find("num_nodes"), shape("indptr")
    if given is not None:
        return int(given.reshape(()))
    if indptr is not None:
        return indptr[0] - 1
    labels = shape("y")
    if labels is not None:
        return labels[0]
    if rows.num_rows is not None:
        return rows.num_rows
    edges = find("edge_index")
    return int(edges.max()) + 1 if edges is not None and edges.size else 0


def _num_classes(shape: _Shape, find: _Find) -> int:
    given, rows = find("num_classes"), shape("y")
    if given is not None:
        return int(given.reshape(()))
    if rows is None:
        return 0
    if len(rows) == 2 and rows[1] != 1:
        return rows[1]
    labels = find("y")
    assert labels is not None
    return max(0, int(np.nan_to_num(labels, nan=-1).max()) + 1) if labels.size else 0
