"""How large a stored graph is, from the headers of its arrays: rows of features are never read."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from polyhop.datasets._arrays import Array, Npz, read_npy, reading
from polyhop.errors import DatasetError

__all__ = ["GraphSizes", "folder_sizes", "npz_sizes"]


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


@dataclass(frozen=True)
class _Stored:
    """What the header of an array says."""

    shape: tuple[int, ...]
    dtype: str


_Shape = Callable[[str], tuple[int, ...] | None]
_Look = Callable[[str], _Stored | None]
_Find = Callable[[str], Array | None]


def npz_sizes(path: Path) -> GraphSizes:
    """Of a graph in one .npz file."""
    with reading(path, "the archive", lambda: zipfile.ZipFile(path)) as archive, Npz(path) as file:

        def look(name: str) -> _Stored | None:
            if name not in file:
                return None

            def read() -> _Stored:
                with archive.open(f"{name}.npy") as member:
                    return _header(member)

            return reading(path, name, read)

        return _sizes(path, path.stem, look, file.find)


def folder_sizes(path: Path) -> GraphSizes:
    """Of a graph in a folder of .npy files."""
    file = path / "graph.json"
    about = reading(file, "the description", lambda: json.loads(file.read_text())) if file.exists() else {}

    def look(name: str) -> _Stored | None:
        array = path / f"{name}.npy"
        if not array.exists():
            return None

        def read() -> _Stored:
            with array.open("rb") as opened:
                return _header(opened)

        return reading(array, name, read)

    def find(name: str) -> Array | None:
        if about.get(name) is not None:
            return np.asarray(about[name])
        return read_npy(path / f"{name}.npy") if (path / f"{name}.npy").exists() else None

    return _sizes(path, str(about.get("name", path.name)), look, find)


def _header(opened: IO[bytes]) -> _Stored:
    """What a .npy file says it has."""
    version = np.lib.format.read_magic(opened)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(opened)
    return _Stored(shape, dtype.name)


def _sizes(path: Path, name: str, look: _Look, find: _Find) -> GraphSizes:
    def shape(name: str) -> tuple[int, ...] | None:
        stored = look(name)
        return None if stored is None else stored.shape

    edges, lists = shape("edge_index"), shape("indices")
    if edges is None and lists is None:
        raise DatasetError(f"{path}: no edges: expected edge_index, or indptr and indices")
    x, sparse = look("x"), find("x_shape")
    columns = (
        x.shape[1] if x is not None and len(x.shape) == 2 else int(sparse[1]) if sparse is not None else 0
    )
    num_nodes, values = _num_nodes(shape, find), shape("x_indices") or shape("x_columns")
    return GraphSizes(
        name,
        num_nodes,
        edges[1] if edges is not None else lists[0] if lists is not None else 0,
        columns,
        _num_classes(shape, find),
        _dtype_as_loaded(x.dtype) if x is not None else "float32",
        None if x is not None or values is None else values[0] / max(1, num_nodes),
        look("x_scale") is not None,
    )


def _dtype_as_loaded(stored: str) -> str:
    """Of rows in memory: what is neither small nor a float of 32 or 64 bits becomes one."""
    return stored if stored in ("uint8", "int8", "float32", "float64") else "float32"


def _num_nodes(shape: _Shape, find: _Find) -> int:
    given, indptr = find("num_nodes"), shape("indptr")
    if given is not None:
        return int(given.reshape(()))
    if indptr is not None:
        return indptr[0] - 1
    for name in ("y", "x"):
        rows = shape(name)
        if rows is not None:
            return rows[0]
    sparse, edges = find("x_shape"), find("edge_index")
    if sparse is not None:
        return int(sparse[0])
    return int(edges.max()) + 1 if edges is not None and edges.size else 0


def _num_classes(shape: _Shape, find: _Find) -> int:
    given, rows = find("num_classes"), shape("y")
    if given is not None:
        return int(given.reshape(()))
    if rows is None:
        return 0
    if len(rows) == 2:
        return rows[1]
    labels = find("y")
    assert labels is not None
    return max(0, int(np.nan_to_num(labels, nan=-1).max()) + 1) if labels.size else 0
