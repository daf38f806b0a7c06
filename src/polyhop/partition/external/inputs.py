"""What an out-of-core run reads: an edge file and what belongs to its nodes, tables first made into .npy files.

Legend: N nodes, E edges.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polyhop.datasets import folder, tables
from polyhop.errors import ConfigError, DatasetError, PartitionError
from polyhop.partition.external import tabular
from polyhop.partition.external.budget import Budget, show_bytes
from polyhop.partition.external.nodes import NodeFiles, find_node_files
from polyhop.partition.external.owners import METHODS_ON_DISK
from polyhop.partition.external.source import EdgeSource, NpyEdges, identity, open_npy_edges
from polyhop.partition.external.work import Work
from polyhop.partition.files import SETS

__all__ = ["Inputs", "find_inputs", "is_edge_file", "is_out_of_core", "size_of"]

Tell = Callable[[str, int, int], None]
_LARGE = 10**9  # bytes of a file that is read in chunks unasked


def is_edge_file(path: Path) -> bool:
    """Whether edges can be read from there a chunk at a time."""
    if path.is_dir():
        return folder.is_folder(path) or tables.find_tables(path) is not None
    return path.is_file() and (path.suffix == ".npy" or tables.is_table(path))


def is_out_of_core(name: str, method: str, memory: str | None) -> bool:
    """Whether ``name`` is to be read in chunks: --memory is given, or it is a file that only chunks can or should read.

    ConfigError where the method cannot do that.
    """
    path = Path(name).expanduser()
    is_file = is_edge_file(path)
    if memory is not None:
        if not is_file:
            raise ConfigError(
                f"--memory: {name} is no file of edges (.npy, .csv, .tsv, .parquet, or a folder of them); what is "
                "loaded whole takes no --memory"
            )
        return True
    is_npy = is_file and path.suffix == ".npy"
    is_large = is_file and (path.suffix != "" or os.sep in name) and size_of(path) > _LARGE
    if (is_npy or is_large) and method not in ("auto", *METHODS_ON_DISK):
        why = "edges in .npy files" if is_npy else f"a file of more than {show_bytes(_LARGE)}"
        raise ConfigError(f"method {method!r} does not read {why}; use {', '.join(METHODS_ON_DISK)}")
    return is_npy or is_large


def size_of(path: Path) -> int:
    """Bytes of an edge file, or of the edge files in a folder."""
    if not path.is_dir():
        return path.stat().st_size
    found = tables.find_tables(path)
    files = [found[0]] if found else [path / name for name in ("edge_index.npy", "indices.npy")]
    return sum(file.stat().st_size for file in files if file.exists())


@dataclass(frozen=True)
class Inputs:
    """Files as given. ``edges``: a .npy file, a folder of .npy files, or a table; ``nodes``: a table or a folder."""

    edges: Path
    nodes: Path | None
    name: str

    @property
    def is_table(self) -> bool:
        return tables.is_table(self.edges)

    def identity(self) -> list[Any]:
        """What changes when any of the files does."""
        places = [p for p in (self.edges, self.nodes) if p is not None]
        files = [f for p in places for f in (sorted(p.glob("*.npy")) if p.is_dir() else [p])]
        return [identity(file) for file in files]

    def open(self, work: Work, budget: Budget, tell: Tell) -> tuple[EdgeSource, NodeFiles]:
        """The edges and the node data, tables kept as .npy files in the work folder."""
        ids, nodes = None, NodeFiles({}, {})
        if self.nodes is not None and tables.is_table(self.nodes):
            table = self.nodes
            facts = work.stage("node table", lambda: _convert_nodes(table, work, budget, tell))
            names = [*facts["files"]]
            nodes = NodeFiles({n: work.file(f"{n}.npy") for n in names}, facts["about"])
            ids = np.load(work.file("ids.npy")) if facts["has_ids"] else None
        elif self.nodes is not None or self.edges.is_dir():
            nodes = find_node_files(self.nodes or self.edges)
        if not self.is_table:
            if ids is not None:
                raise PartitionError(
                    f"{self.edges}: .npy edges hold node numbers; give ids other than 0 .. N-1 with a table of edges"
                )
            return open_npy_edges(self.edges), nodes
        known = nodes.num_nodes()
        facts = work.stage("edge table", lambda: _convert_edges(self.edges, ids, known, work, budget, tell))
        if known is None and facts["num_nodes"] is not None:
            nodes = NodeFiles(nodes.files, {**nodes.about, "num_nodes": facts["num_nodes"]})
        weight = work.file("edge_weight.npy") if facts["has_weight"] else None
        return NpyEdges(work.file("edges.npy"), weight, name=self.edges), nodes


def find_inputs(edges: Path, nodes: Path | None) -> Inputs:
    """The files that are meant; PartitionError if there is nothing to read."""
    if not is_edge_file(edges):
        raise PartitionError(
            f"{edges}: expected edges in a .npy, .csv, .tsv or .parquet file, or a folder with edge_index.npy, indptr.npy "
            "and indices.npy, or edges.csv or edges.parquet"
        )
    if nodes is not None and not nodes.is_dir() and not tables.is_table(nodes):
        raise PartitionError(
            f"{nodes}: expected a node table (.csv, .tsv, .parquet) or a folder of x.npy, y.npy, ..."
        )
    if nodes is not None and not nodes.exists():
        raise PartitionError(f"{nodes}: no such file or folder")
    if not edges.is_dir():
        return Inputs(edges, nodes, edges.stem)
    found = None if folder.is_folder(edges) else tables.find_tables(edges)
    if found is None:
        return Inputs(edges, nodes, edges.resolve().name)
    return Inputs(found[0], nodes or found[1], edges.resolve().name)


def _convert_nodes(path: Path, work: Work, budget: Budget, tell: Tell) -> dict[str, Any]:
    columns, rows, others = tabular.node_columns(path, memory=budget.for_edges)
    ids = tabular.number_nodes(path, columns.get("id"), rows)
    if ids is not None:
        np.save(work.file("ids.npy"), ids if ids.dtype.kind in "iu" else ids.astype(str))
    y, classes = tables._labels(columns.get("label"))
    codes = tables._codes(path, columns.get("split"))
    arrays = {"y": y} | {s: None if codes is None else codes == k for k, s in enumerate(SETS, start=1)}
    files = [name for name, array in arrays.items() if array is not None]
    for name in files:
        np.save(work.file(f"{name}.npy"), arrays[name])
    if others:
        tabular.features_to_npy(
            path, work.file("x.npy"), memory=budget.for_edges, others=others,
            tell=lambda done: tell("node table", done, rows),
        )  # fmt: skip
        files.append("x")
    about = {"num_nodes": rows, **({"num_classes": len(classes)} if classes else {})}
    return {"files": files, "about": about, "has_ids": ids is not None}


def _convert_edges(
    path: Path, ids: Any, num_nodes: int | None, work: Work, budget: Budget, tell: Tell
) -> dict[str, Any]:
    memory = budget.for_edges
    wide, found = (num_nodes or 0) >= 2**31, num_nodes
    if ids is None and num_nodes is None:
        ids, top = tabular.find_numbering(path, memory=memory, tell=lambda done: tell("reading ids", done, 0))
        wide, found = top >= 2**31, None if ids is None else top + 1
    edges, has_weight = tabular.edges_to_npy(
        path, work.file("edges.npy"), work.file("edge_weight.npy"), tabular.Numbering(ids), memory=memory, wide=wide,
        tell=lambda done: tell("edge table", done, 0),
    )  # fmt: skip
    if edges == 0 and found is None:
        raise DatasetError(f"{path}: no edges")
    return {"edges": edges, "has_weight": has_weight, "num_nodes": found}
