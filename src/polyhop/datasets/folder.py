"""A graph as a folder of .npy files, the form that need not fit in memory.

edge_index.npy [2, E], or indptr.npy [N + 1] and indices.npy [E] (in-edges). Optional: x.npy [N, F] with x_scale.npy [F],
y.npy [N] or [N, C], train.npy, val.npy and test.npy (masks or ids), edge_weight.npy [E], graph.json (name, metric,
num_nodes, num_classes, meta). ``save`` writes this form. Features are mapped, not read, unless asked otherwise.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polyhop.datasets._arrays import Array, Header, Rows, as_features, as_tensor, look_npy, read_npy, rows_of
from polyhop.errors import DatasetError
from polyhop.graph import DenseFeatures, FeatureStore, Graph, SparseFeatures, SparseRows, Split

__all__ = ["folder_rows", "is_folder", "load_folder", "save"]

_SETS = ("train", "val", "test")
_MAPPABLE = ("float32", "float64", "int8", "uint8")


def is_folder(path: Path) -> bool:
    """Whether the folder holds a graph's .npy files."""
    return (path / "edge_index.npy").exists() or (path / "indices.npy").exists()


def load_folder(
    path: Path, *, features: str = "auto", mmap: bool | None = None, duplicates: str = "error"
) -> Graph:
    """The graph in a folder. ``mmap``: None maps the features, True the edges too, False reads everything."""
    about = _about(path)
    y = _find(path, "y")
    sets: dict[str, Any] = {name: _find(path, name) for name in _SETS}
    common: dict[str, Any] = {
        "name": about.get("name", path.name), "metric": about.get("metric", "accuracy"), "meta": about.get("meta", {}),
    }  # fmt: skip
    x = None if features == "none" else _features(path, mmap)
    x = as_features(x, features)
    given = _find(path, "edge_weight", mmap=bool(mmap))
    weight = None if given is None else as_tensor(given)
    if (path / "edge_index.npy").exists():
        nodes = about.get("num_nodes")
        if nodes is None and y is None:
            nodes = folder_rows(path).num_rows
        return Graph.from_edges(
            read_npy(path / "edge_index.npy", mmap=bool(mmap)), x, y, num_nodes=nodes, edge_weight=weight,
            num_classes=about.get("num_classes"), duplicates=duplicates, **sets, **common,
        )  # fmt: skip
    indptr, indices = (_lists(path, name, mmap=bool(mmap)) for name in ("indptr", "indices"))
    return Graph.from_lists(
        indptr.to(torch.int64), indices, x, y, edge_weight=weight, num_classes=about.get("num_classes"),
        duplicates=duplicates, **sets, **common,
    )  # fmt: skip


def folder_rows(path: Path) -> Rows:
    """What headers say of the features in a folder."""
    is_sparse = (path / "x_indices.npy").exists()

    def look(name: str) -> Header | None:
        return None if is_sparse and name == "x" else look_npy(path / f"{name}.npy")

    rows, x = rows_of(look, lambda name: _find(path, name)), look("x")
    return rows if x is None or x.is_c_order else replace(rows, dtype="float32")


def _about(path: Path) -> dict[str, Any]:
    file = path / "graph.json"
    if not file.exists():
        return {}
    try:
        about = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise DatasetError(f"{file}: not readable as JSON ({error})") from error
    if not isinstance(about, dict):
        raise DatasetError(f"{file}: expected a JSON object, got {type(about).__name__}")
    return about


def _find(path: Path, name: str, *, mmap: bool = False) -> Array | None:
    file = path / f"{name}.npy"
    return read_npy(file, mmap=mmap) if file.exists() else None


def _lists(path: Path, name: str, *, mmap: bool) -> torch.Tensor:
    array = read_npy(path / f"{name}.npy", mmap=mmap)
    if array.dtype not in (np.int32, np.int64) or array.ndim != 1:
        raise DatasetError(
            f"{path / name}.npy: expected int32 or int64 in one dimension, got {array.dtype} {list(array.shape)}"
        )
    return as_tensor(array)


def _features(path: Path, mmap: bool | None) -> FeatureStore | None:
    mapped = mmap is not False
    if (path / "x_indices.npy").exists():
        parts = [
            read_npy(path / f"x_{part}.npy", mmap=mapped) for part in ("indptr", "indices", "values", "shape")
        ]
        indptr, columns, values = (as_tensor(part) for part in parts[:3])
        return SparseFeatures(
            SparseRows(indptr.to(torch.int64), columns, values.to(torch.float32), int(parts[3][1]))
        )
    x = _find(path, "x", mmap=mapped)
    if x is None:
        return None
    if x.ndim != 2 or x.dtype.kind not in "biuf":
        raise DatasetError(
            f"{path / 'x.npy'}: expected a numeric matrix [N, F], got {x.dtype} {list(x.shape)}"
        )
    if not x.flags.c_contiguous or x.dtype.name not in _MAPPABLE:
        if mmap:
            raise DatasetError(
                f"mmap=True: {path / 'x.npy'} holds {x.dtype} in {'C' if x.flags.c_contiguous else 'Fortran'} order; rows "
                f"can be mapped from C order in {', '.join(_MAPPABLE)}"
            )
        x, mapped = np.ascontiguousarray(x, np.float32), False
    scale = _find(path, "x_scale")
    factor = None if scale is None else torch.from_numpy(scale)
    return DenseFeatures(as_tensor(x), factor, mapped, path / "x.npy" if mapped else None)


def save(graph: Graph, folder: str | os.PathLike[str], *, features: bool = True) -> Path:
    """Write a graph as a folder that ``polyhop.load`` opens without reading it. Files already there are replaced.

    ``features=False`` leaves the folder's feature files as they are. graph.json comes last: without it, the rest is not
    complete.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / "graph.json").unlink(missing_ok=True)
    arrays: dict[str, torch.Tensor | None] = {
        "indptr": graph.indptr, "indices": graph.indices, "edge_weight": graph.edge_weight, "y": graph.y,
        "edge_index": None, **(_feature_arrays(graph.x) if features else {}), **_split_arrays(graph.split),
    }  # fmt: skip
    for name, tensor in arrays.items():
        file, partial = path / f"{name}.npy", path / f"{name}.partial.npy"
        if tensor is None:
            file.unlink(missing_ok=True)
            continue
        np.save(partial, tensor.contiguous().numpy())
        partial.replace(file)
    about = {
        "name": graph.name,
        "metric": graph.metric,
        "num_classes": graph.num_classes,
        "meta": dict(graph.meta),
    }
    (path / "graph.json").write_text(json.dumps(about, default=_plain, indent=1))
    return path


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic, torch.Tensor)) else str(value)


def _split_arrays(split: Split | None) -> dict[str, torch.Tensor | None]:
    return {name: None if split is None else getattr(split, name) for name in _SETS}


def _feature_arrays(x: FeatureStore | None) -> dict[str, torch.Tensor | None]:
    out: dict[str, torch.Tensor | None] = dict.fromkeys(
        ("x", "x_scale", "x_indptr", "x_indices", "x_values", "x_shape")
    )
    if isinstance(x, SparseFeatures):
        rows = x.rows
        out.update(
            x_indptr=rows.indptr,
            x_indices=rows.indices,
            x_values=rows.values,
            x_shape=torch.tensor(rows.shape),
        )
    elif isinstance(x, DenseFeatures):
        values = x.values.to(torch.float32) if x.values.dtype == torch.bfloat16 else x.values
        out.update(x=values, x_scale=x.scale)
    elif x is not None:
        raise DatasetError(f"cannot save features of {type(x).__name__}; gather them into memory first")
    return out
