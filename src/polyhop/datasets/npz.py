"""One graph in one .npz file: the format of the data folder and of the embedded graph.

Arrays: edge_index [2, E]; x [N, F] with optional x_scale [F], or x_indptr, x_indices, x_shape and optional x_data (CSR);
y [N], -1 = no label; train_mask, val_mask, test_mask [N]; split_codes [S, N] (0 none, 1 train, 2 val, 3 test) with
split_names [S]; num_nodes, num_classes; meta (JSON: metric, classes, source, licence). Only edge_index is required.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from polyhop.datasets._arrays import Array, Npz, Rows, as_features, rows_of, sparse_features, split_number
from polyhop.errors import DatasetError
from polyhop.graph import DenseFeatures, FeatureStore, Graph

__all__ = ["load_npz", "npz_rows"]

_METRICS = {
    "roc auc": "roc_auc",
    "roc_auc": "roc_auc",
    "rocauc": "roc_auc",
    "f1": "f1_micro",
    "f1_micro": "f1_micro",
}


def load_npz(
    path: Path,
    *,
    name: str | None = None,
    split: int | str = 0,
    features: str = "auto",
    duplicates: str = "error",
) -> Graph:
    """The graph in a file; ``split`` by number or name; ``features`` as in ``polyhop.load``."""
    with Npz(path) as file:
        if "edge_index" not in file:
            raise DatasetError(
                f"{path}: no array 'edge_index'; it has {', '.join(sorted(file.names)) or 'nothing'} (the format is "
                "described in polyhop.datasets.npz)"
            )
        edges = file.read("edge_index")
        y, meta = file.find("y"), _meta(file)
        nodes = _number(file, "num_nodes")
        if nodes is None:
            nodes = rows_of(file.look, file.find).num_rows if y is None else len(y)
        codes, chosen = _split_codes(file, split)
        if chosen:
            meta["split"] = chosen
        return Graph.from_edges(
            edges,
            as_features(None if features == "none" else _features(file), features),
            None if y is None else _signed(y),
            num_nodes=nodes,
            train=None if codes is None else codes == 1,
            val=None if codes is None else codes == 2,
            test=None if codes is None else codes == 3,
            num_classes=_number(file, "num_classes"),
            duplicates=duplicates,
            name=name or path.stem,
            metric=_METRICS.get(str(meta.get("metric", "")).lower(), "accuracy"),
            meta=meta,
        )


def npz_rows(path: Path) -> Rows:
    """What headers say of the features in a file."""
    with Npz(path) as file:
        return rows_of(file.look, file.find)


def _number(file: Npz, name: str) -> int | None:
    value = file.find(name)
    if value is None:
        return None
    if value.size != 1 or value.dtype.kind not in "iu":
        raise DatasetError(
            f"{file.path}: {name} must be one whole number, got {value.dtype} {list(value.shape)}"
        )
    return int(value.reshape(()))


def _meta(file: Npz) -> dict[str, Any]:
    text = file.find("meta")
    if text is None:
        return {}
    try:
        meta = json.loads(str(text))
    except json.JSONDecodeError as error:
        raise DatasetError(f"{file.path}: 'meta' is not JSON ({error})") from error
    return meta if isinstance(meta, dict) else {"meta": meta}


def _signed(y: Array) -> Array:
    if y.dtype.kind not in "biuf":
        raise DatasetError(f"y: expected class numbers, got {y.dtype}")
    return y if y.ndim == 2 or y.dtype.kind == "f" else y.astype("int64")


def _features(file: Npz) -> FeatureStore | None:
    if "x" in file:
        x, scale = file.read("x"), file.find("x_scale")
        if x.ndim != 2 or x.dtype.kind not in "biuf":
            raise DatasetError(
                f"{file.path}: x must be a numeric matrix [N, F], got {x.dtype} {list(x.shape)}"
            )
        if x.dtype.name not in ("uint8", "int8", "float32", "float64"):
            x = x.astype("float32")
        return DenseFeatures(
            torch.from_numpy(x), None if scale is None else torch.from_numpy(scale.astype("float32"))
        )
    if "x_indices" in file:
        shape = file.read("x_shape")
        if shape.size != 2:
            raise DatasetError(f"{file.path}: x_shape must hold two numbers, got {list(shape.shape)}")
        rows, columns = (int(n) for n in shape)
        return sparse_features(
            file.read("x_indptr"), file.read("x_indices"), file.find("x_data"), (rows, columns)
        )
    return None


def _split_codes(file: Npz, split: int | str) -> tuple[Array | None, str]:
    """(code of each node or None, name of the split)."""
    if "split_codes" in file:
        codes = file.read("split_codes")
        if codes.ndim != 2:
            raise DatasetError(f"{file.path}: split_codes must be [S, N], got {list(codes.shape)}")
        names = file.find("split_names")
        known = [str(k) for k in range(len(codes))] if names is None else [str(n) for n in names]
        k = split_number(split, known, str(file.path))
        return codes[k], known[k]
    masks = [file.find(f"{part}_mask") for part in ("train", "val", "test")]
    if masks[0] is None:
        if split not in (0, "0"):
            raise DatasetError(f"{file.path}: has no splits, so split={split!r} cannot be chosen")
        return None, ""
    split_number(split, ["masks"], str(file.path))
    codes = masks[0].astype("uint8")
    for code, mask in enumerate(masks[1:], start=2):
        if mask is None:
            continue
        if mask.shape != codes.shape:
            raise DatasetError(
                f"{file.path}: masks of different shapes {list(codes.shape)} and {list(mask.shape)}"
            )
        both = (codes > 0) & mask.astype(bool)
        if both.any():
            raise DatasetError(
                f"{file.path}: node {int(both.argmax())} is in two of train, val and test; they must not overlap"
            )
        codes[mask.astype(bool)] = code
    return codes, "masks"
