"""Open Graph Benchmark node data sets from their raw files, as OGB's own downloads unpack them.

Read here and not through the ogb package: ogb 1.3.6 cannot reload its own processed files with torch 2.6 or newer. Known:
the text form (``raw/edge.csv.gz``, ``node-feat.csv.gz``, ``node-label.csv.gz``, ``num-node-list.csv.gz``) and the binary
form of papers100M (``raw/data.npz``, ``node-label.npz``), with ``split/<kind>/{train,valid,test}.csv.gz`` beside ``raw``.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np

from polyhop.datasets._arrays import Array, Npz, Rows, as_features, read_csv_numbers, reading, rows_of
from polyhop.errors import DatasetError
from polyhop.graph import Graph, dense_features

__all__ = ["is_ogb", "load_ogb", "ogb_counts", "ogb_rows"]

# OGB adds the reverse of every edge to these; the others are used as stored.
_INVERSE = ("ogbn_products", "ogbn_proteins")
_METRICS = {"ogbn_proteins": "roc_auc"}


def is_ogb(path: Path) -> bool:
    """Whether the folder is an OGB data set (with raw/ inside) or its raw folder."""
    return _raw(path) is not None


def _raw(path: Path) -> Path | None:
    for folder in (path / "raw", path):
        if any((folder / name).exists() for name in ("edge.csv.gz", "data.npz", "num-node-dict.csv.gz")):
            return folder
    return None


def load_ogb(path: Path, *, features: str = "auto", duplicates: str = "error") -> Graph:
    """The graph of an OGB folder. Edges run as published: from the citing paper to the cited one in arxiv and papers100M."""
    raw = _raw(path)
    if raw is None:
        raise DatasetError(f"{path}: not an OGB folder: expected raw/edge.csv.gz or raw/data.npz")
    if (raw / "num-node-dict.csv.gz").exists():
        raise DatasetError(f"{path}: typed OGB graphs (such as ogbn-mag) are not supported")
    home = _home(raw)
    edges, x, y, nodes = _binary(raw, features) if (raw / "data.npz").exists() else _text(raw, features)
    if edges.ndim != 2 or edges.shape[0] != 2:
        raise DatasetError(f"{raw}: edges have shape {list(edges.shape)}, expected two numbers per line")
    if home.name in _INVERSE:
        edges = np.concatenate([edges, edges[::-1]], axis=1)
    if y is not None and y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    store = None if x is None else dense_features(x)
    sets = _split(home) if y is not None else {}
    return Graph.from_edges(
        edges, as_features(store, features), y, num_nodes=nodes, duplicates=duplicates,
        name=_name(home), metric=_METRICS.get(home.name, "accuracy"),
        meta={"source": "OGB raw files"}, **sets,
    )  # fmt: skip


def ogb_counts(path: Path) -> tuple[str, int, int, int] | None:
    """(name, nodes, edges, classes) as a load would find them, of the binary form; None: of text, which has no headers."""
    raw = _raw(path) or path
    if not (raw / "data.npz").exists():
        return None
    home = _home(raw)
    with Npz(raw / "data.npz") as file:
        edges, counts = file.look("edge_index"), file.read("num_nodes_list")
    if edges is None or len(edges.shape) != 2:
        raise DatasetError(f"{raw / 'data.npz'}: expected edge_index [2, E]")
    y = _binary_labels(raw)
    classes = 0
    if y is not None and y.size:
        classes = y.shape[1] if y.ndim == 2 and y.shape[1] > 1 else int(np.nan_to_num(y, nan=-1).max()) + 1
    return (
        _name(home),
        _one(raw / "data.npz", counts),
        (1 + (home.name in _INVERSE)) * edges.shape[1],
        classes,
    )


def ogb_rows(path: Path) -> Rows:
    """What the header of the features says, or, where they are text, their first line."""
    raw = _raw(path) or path
    if (raw / "data.npz").exists():
        with Npz(raw / "data.npz") as file:
            return rows_of(lambda name: file.look("node_feat") if name == "x" else None, file.find)
    x_file = raw / "node-feat.csv.gz"
    if not x_file.exists():
        return Rows()

    def read() -> Rows:
        with gzip.open(x_file, "rt") as lines:
            first = next((line for line in lines if line.strip()), None)
        if first is None:
            raise ValueError("it is empty")
        return Rows(len(first.split(",")))

    return reading(x_file, "the first line", read)


def _text(raw: Path, features: str) -> tuple[Array, Array | None, Array | None, int]:
    edges = read_csv_numbers(raw / "edge.csv.gz", np.int64).T
    counts = read_csv_numbers(raw / "num-node-list.csv.gz", np.int64)
    nodes = _one(raw / "num-node-list.csv.gz", counts)
    x_file, y_file = raw / "node-feat.csv.gz", raw / "node-label.csv.gz"
    x = read_csv_numbers(x_file, np.float32) if x_file.exists() and features != "none" else None
    y = read_csv_numbers(y_file, np.float32) if y_file.exists() else None
    return edges, x, y, nodes


def _binary(raw: Path, features: str) -> tuple[Array, Array | None, Array | None, int]:
    with Npz(raw / "data.npz") as file:
        edges, counts = file.read("edge_index"), file.read("num_nodes_list")
        x = file.find("node_feat") if features != "none" else None
    nodes = _one(raw / "data.npz", counts)
    return edges, x, _binary_labels(raw), nodes


def _binary_labels(raw: Path) -> Array | None:
    if not (raw / "node-label.npz").exists():
        return None
    with Npz(raw / "node-label.npz") as file:
        return file.read("node_label")


def _one(file: Path, counts: Array) -> int:
    """Nodes of the only graph."""
    if counts.size != 1:
        raise DatasetError(f"{file}: {counts.size} graphs; expected one large graph (ogbn-*)")
    return int(counts.flat[0])


def _home(raw: Path) -> Path:
    return raw.parent if raw.name == "raw" else raw


def _name(home: Path) -> str:
    return home.name.replace("_", "-")


def _split(home: Path) -> dict[str, Any]:
    """Ids of train, val and test from the only folder under split/."""
    kinds = sorted(folder for folder in (home / "split").glob("*") if folder.is_dir())
    if not kinds:
        return {}
    sets: dict[str, Any] = {}
    for name, file_name in (("train", "train"), ("val", "valid"), ("test", "test")):
        file = kinds[0] / f"{file_name}.csv.gz"
        if not file.exists():
            raise DatasetError(f"{file}: no such file; an OGB split has train, valid and test")
        sets[name] = read_csv_numbers(file, np.int64)[:, 0]
    return sets
