"""What belongs to the nodes of an edge file: features, labels, splits, read from .npy files and handed to the parts.

Labels and splits are held in memory, one number a node; feature rows only pass through.

Legend: N nodes, F features, P parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyhop.errors import DatasetError, PartitionError, UnsupportedError
from polyhop.graph import Graph, Split
from polyhop.partition.external.source import NpyRows
from polyhop.partition.files import SETS, ArrayFile, part_name

__all__ = [
    "NodeFiles",
    "about_folder",
    "check_nodes",
    "feature_dtype",
    "feature_rows",
    "find_node_files",
    "hand_out",
    "split_of",
]

_KEPT = ("float32", "float64", "int8", "uint8")  # feature kinds that kernels gather; others become float32
_OPEN = 256  # files written side by side


@dataclass(frozen=True)
class NodeFiles:
    """Where a graph's node data stand: .npy files by name (x, x_scale, y, train, val, test), and what graph.json says."""

    files: Mapping[str, Path]
    about: Mapping[str, Any]

    def num_nodes(self) -> int | None:
        """N as the files have it, None if none says."""
        if "num_nodes" in self.about:
            return int(self.about["num_nodes"])
        return next(
            (int(NpyRows(self.files[name]).shape[0]) for name in ("x", "y") if name in self.files), None
        )


def about_folder(path: Path) -> dict[str, Any]:
    """graph.json of a folder, or nothing."""
    file = path / "graph.json"
    if not file.exists():
        return {}
    try:
        about = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise DatasetError(f"{file}: not readable as JSON ({error})") from error
    return dict(about) if isinstance(about, dict) else {}


def find_node_files(path: Path) -> NodeFiles:
    """The node data of a folder of .npy files."""
    if (path / "x_indices.npy").exists():
        raise UnsupportedError(
            f"{path}: sparse features are not cut out of core; leave out --memory, or give the features as x.npy"
        )
    names = ("x", "x_scale", "y", *SETS)
    return NodeFiles(
        {n: path / f"{n}.npy" for n in names if (path / f"{n}.npy").exists()}, about_folder(path)
    )


def check_nodes(given: NodeFiles, num_nodes: int) -> tuple[Tensor | None, Split | None, int]:
    """(y, split, number of classes), checked as those of any graph."""
    arrays: dict[str, Any] = {}
    for name in ("y", *SETS):
        if name in given.files:
            rows = NpyRows(given.files[name])
            flat = rows.read(0, int(np.prod(rows.shape))).reshape(rows.shape)
            arrays[name] = flat.T if rows.is_fortran else flat
    if "x" in given.files:
        _check_x(NpyRows(given.files["x"]), num_nodes)
    bare = torch.zeros(num_nodes + 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int32)
    graph = Graph.from_lists(*bare, **arrays, num_classes=given.about.get("num_classes"))
    return graph.y, graph.split, graph.num_classes


def _check_x(rows: NpyRows, num_nodes: int) -> None:
    if len(rows.shape) != 2 or rows.is_fortran:
        raise PartitionError(
            f"{rows.path}: expected a matrix [N, F] in C order, got {rows.dtype} {list(rows.shape)}"
            f"{' in Fortran order' if rows.is_fortran else ''}"
        )
    if rows.shape[0] != num_nodes:
        raise PartitionError(
            f"{rows.path}: {rows.shape[0]} rows for {num_nodes} nodes; expected one row per node"
        )


def split_of(codes: Tensor) -> Split:
    """Local rows of each set, where codes (uint8 [n]) are 1 for train, 2 for val, 3 for test."""
    return Split(*((codes == code).nonzero()[:, 0] for code in (1, 2, 3)))


def feature_dtype(rows: NpyRows) -> torch.dtype:
    """How feature rows are stored in parts."""
    kind = rows.dtype.name if rows.dtype.name in _KEPT else "float32"
    return getattr(torch, kind)  # type: ignore[no-any-return]


def feature_rows(rows: NpyRows, step: int) -> Iterator[Tensor]:
    """All feature rows, ``step`` at a time."""
    dtype = feature_dtype(rows)
    for start in range(0, int(rows.shape[0]), step):
        yield torch.from_numpy(rows.rows(start, min(start + step, int(rows.shape[0])))).to(dtype)


def hand_out(
    name: str, pieces: Callable[[], Iterator[Tensor]], dtype: torch.dtype, width: tuple[int, ...], owner: Tensor,
    sizes: list[int], folder: Path, tell: Callable[[int], None],
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Rows in the user's order -> ``name``.npy of every part; the manifest's entries. ``owner`` int32 [N]."""
    entries: dict[str, dict[str, Any]] = {}
    for first in range(0, len(sizes), _OPEN):
        mine = range(first, min(first + _OPEN, len(sizes)))
        with ExitStack() as stack:
            files = {}
            for part in mine:
                (folder / part_name(part)).mkdir(exist_ok=True)
                path = folder / part_name(part) / f"{name}.npy"
                files[part] = stack.enter_context(ArrayFile(path, dtype, (sizes[part], *width)))
            done = 0
            for rows in pieces():
                parts = owner[done : done + rows.shape[0]]
                at = torch.sort(parts, stable=True)
                bounds = torch.searchsorted(
                    at.values, torch.tensor([*mine, mine.stop], dtype=torch.int32)
                ).tolist()
                for k, part in enumerate(mine):
                    if bounds[k + 1] > bounds[k]:
                        files[part].write(rows[at.indices[bounds[k] : bounds[k + 1]]])
                done += rows.shape[0]
                tell(done)
            entries |= {f"{part_name(part)}/{name}.npy": files[part].entry(sync=False) for part in mine}
    return entries
