"""Datasets: names, files, other libraries' objects and generators, all through ``load``, all to a checked ``Graph``."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from polyhop.datasets import catalogue, folder, headers, npz, objects, ogb, synth, tables
from polyhop.datasets._arrays import Rows, as_features
from polyhop.datasets.catalogue import names
from polyhop.datasets.description import describe
from polyhop.datasets.folder import save
from polyhop.datasets.headers import GraphSizes
from polyhop.datasets.synth import is_procedural, procedural_recipe
from polyhop.errors import DatasetError, InputError, unknown
from polyhop.graph import Graph

__all__ = [
    "GraphSizes",
    "describe",
    "is_procedural",
    "load",
    "load_unread",
    "names",
    "procedural_recipe",
    "save",
    "sizes",
]


def load(
    source: Any,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    nodes: str | os.PathLike[str] | None = None,
    split: int | str = 0,
    features: str = "auto",
    mmap: bool | None = None,
    duplicates: str = "error",
) -> Graph:
    """A checked ``Graph`` from nearly anything.

    source:
        a name: found under data_dir, ``$POLYHOP_DATA`` or in the package ("debian-packages"); "cora", "ogbn-arxiv", ...
        a generator: "synth:products?scale=0.2&seed=0" (arxiv, products, reddit, papers), "rmat:?scale=20&edge_factor=16",
        "sbm:?nodes=10000&classes=8&p_in=0.01&p_out=0.001";
        a path: an .npz file, a folder of .npy files, an OGB folder, CSV or Parquet edges (a file, or a folder with
        edges.* and nodes.*);
        an object: PyG Data, DGL graph, SciPy sparse matrix (A[i, j] is the edge i -> j), (edge_index, x, y), or a
        mapping of ``Graph.from_edges``'s arguments.
    nodes: the node table that belongs to a file of edges.
    split: which split, by number or name, where a source has several.
    features: "auto" (as stored), "dense", "sparse" or "none".
    mmap: None maps the features of a .npy folder; True maps its edges too, and keeps a generated graph in a folder under
        data_dir; False reads everything into memory.
    duplicates: "error", "keep" or "drop" repeated edges.
    """
    if isinstance(source, Graph):
        return source
    if not isinstance(source, (str, os.PathLike)):
        if mmap:
            raise DatasetError(
                "mmap=True: an object in memory cannot be mapped; polyhop.datasets.save it to a folder first"
            )
        return objects.from_object(source, split=split, features=features, duplicates=duplicates)
    text = os.fspath(source)
    if synth.is_synthetic(text):
        return _generate(text, data_dir, features, mmap)
    path = _locate(text, data_dir)
    try:
        return _load_path(path, nodes, split, features, mmap, duplicates)
    except InputError as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error


def sizes(
    source: str,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    nodes: str | os.PathLike[str] | None = None,
) -> GraphSizes:
    """How large a graph is and how wide its rows are. Features are not read, and graphs of billions of edges not made.

    Arrays say it in their headers, generators in their names; of what has no such thing (text, ``rmat:``, ``sbm:``) edges
    and labels are loaded.
    """
    if is_procedural(source):
        recipe, _ = procedural_recipe(source)
        edges = round(recipe.num_nodes * recipe.mean_degree)
        return GraphSizes(source, recipe.num_nodes, edges, recipe.num_features, recipe.num_classes)
    if source.startswith("synth:"):
        return GraphSizes(source, *synth.published_sizes(source))
    path = None if synth.is_synthetic(source) else _locate(source, data_dir)
    if path is not None and path.suffix == ".npz":
        return headers.npz_sizes(path)
    if path is not None and path.is_dir() and folder.is_folder(path):
        return headers.folder_sizes(path, folder.folder_rows(path))
    if path is not None and path.is_dir() and ogb.is_ogb(path):
        counts, rows = ogb.ogb_counts(path), ogb.ogb_rows(path)
        if counts is not None:
            name, num_nodes, num_edges, num_classes = counts
            return GraphSizes(name, num_nodes, num_edges, rows.num_features, num_classes, rows.dtype)
    return load_unread(source, data_dir=data_dir, nodes=nodes)[1]


def load_unread(
    source: str,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    nodes: str | os.PathLike[str] | None = None,
    split: int | str = 0,
) -> tuple[Graph, GraphSizes]:
    """A graph without its features, loaded once, and its sizes: how wide rows are, and of what kind, says their header."""
    graph = load(source, data_dir=data_dir, nodes=nodes, split=split, features="none")
    if synth.is_synthetic(source):
        return graph, headers.sizes_of(graph, Rows(synth.num_features(source)))
    path = _locate(source, data_dir)
    try:
        return graph, headers.sizes_of(graph, _rows(path, nodes))
    except InputError as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error


def _rows(path: Path, nodes: str | os.PathLike[str] | None) -> Rows:
    """What is said of the features of a graph that was found to be one."""
    if path.is_dir():
        if folder.is_folder(path):
            return folder.folder_rows(path)
        if ogb.is_ogb(path):
            return ogb.ogb_rows(path)
        found = tables.find_tables(path)
        return tables.table_rows(None if found is None else found[1])
    if tables.is_table(path):
        return tables.table_rows(None if nodes is None else Path(nodes))
    return npz.npz_rows(path)


def _locate(text: str, data_dir: str | os.PathLike[str] | None) -> Path:
    """The file or folder of a path or name. A bare name is looked up first; what looks like a path is taken as one."""
    path = Path(text).expanduser()
    is_path = os.sep in text or path.suffix in (".npz", ".csv", ".parquet", ".tsv", ".gz")
    found = None if is_path and path.exists() else catalogue.find(text.removesuffix(".npz"), data_dir)
    if found is not None:
        return found
    if path.exists():
        return path
    if is_path:
        raise DatasetError(f"{path}: no such file or folder")
    known = [
        *names(data_dir),
        *(f"synth:{name}" for name in synth.PRESETS),
        "synth:procedural",
        "rmat:",
        "sbm:",
    ]
    hint = (
        ""
        if data_dir or os.environ.get("POLYHOP_DATA")
        else " Set POLYHOP_DATA or data_dir to a folder of data sets."
    )
    raise DatasetError(unknown("data set", text, known) + hint)


def _load_path(
    path: Path,
    nodes: str | os.PathLike[str] | None,
    split: int | str,
    features: str,
    mmap: bool | None,
    duplicates: str,
) -> Graph:
    if path.is_dir():
        if folder.is_folder(path):
            return folder.load_folder(path, features=features, mmap=mmap, duplicates=duplicates)
        if mmap:
            raise _cannot_map(path)
        if ogb.is_ogb(path):
            return ogb.load_ogb(path, features=features, duplicates=duplicates)
        found = tables.find_tables(path)
        if found is None:
            raise DatasetError(
                f"{path}: no graph here; expected edge_index.npy or indptr.npy and indices.npy, edges.csv or edges.parquet, "
                "or OGB's raw/edge.csv.gz"
            )
        return tables.load_tables(*found, features=features, duplicates=duplicates)
    if mmap:
        raise _cannot_map(path)
    if tables.is_table(path):
        beside = None if nodes is None else Path(nodes)
        return tables.load_tables(path, beside, name=path.stem, features=features, duplicates=duplicates)
    if path.suffix != ".npz":
        raise DatasetError(f"{path}: unknown kind of file; expected .npz, .csv, .tsv, .parquet or a folder")
    return npz.load_npz(path, split=split, features=features, duplicates=duplicates)


def _cannot_map(path: Path) -> DatasetError:
    return DatasetError(
        f"mmap=True: {path} cannot be mapped; load it once and polyhop.datasets.save it to a folder"
    )


def _generate(text: str, data_dir: str | os.PathLike[str] | None, features: str, mmap: bool | None) -> Graph:
    """A generated graph; with ``mmap`` it is kept in a folder under data_dir and opened from there the next time."""
    if not mmap:
        graph = synth.generate(text, has_features=features != "none")
        return replace(graph, x=as_features(graph.x, features))
    if data_dir is None:
        raise DatasetError("mmap=True with a generator needs data_dir, the folder to keep the graph in")
    path = Path(data_dir).expanduser() / "".join(c if c.isalnum() or c in ".-" else "_" for c in text)
    if not (path / "graph.json").exists():
        save(synth.generate(text, features_file=path / "x.npy"), path, features=False)
    return folder.load_folder(path, features=features, mmap=True)
