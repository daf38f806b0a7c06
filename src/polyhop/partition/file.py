"""File: parts made elsewhere, one whole number per node: .npy, or text with a number a line (METIS's own output)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from polyhop.errors import PartitionError
from polyhop.graph import Graph

__all__ = ["from_file", "read_owner"]


def from_file(graph: Graph, num_parts: int, *, seed: int = 0, path: str | Path) -> Tensor:
    """int32 [N]: the parts that the file gives. The seed is not used."""
    return read_owner(Path(path), graph.num_nodes, num_parts)


def read_owner(path: Path, num_nodes: int, num_parts: int) -> Tensor:
    """The same, from the number of nodes."""
    try:
        with path.open("rb") as file:
            is_npy = file.read(6) == b"\x93NUMPY"
        array = np.load(path, allow_pickle=False) if is_npy else np.loadtxt(path, dtype=np.int64, ndmin=1)
    except OSError as error:
        raise PartitionError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise PartitionError(
            f"{path}: expected a .npy of whole numbers, or text with one part a line: {error}"
        ) from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise PartitionError(f"{path}: expected whole numbers [N], got {array.dtype} {list(array.shape)}")
    if array.shape[0] != num_nodes:
        raise PartitionError(f"{path}: gives {array.shape[0]} nodes a part, the graph has {num_nodes}")
    bad = np.flatnonzero((array < 0) | (array >= num_parts))
    if bad.size:
        raise PartitionError(
            f"{path}: node {bad[0]} is in part {array[bad[0]]}, expected 0 .. {num_parts - 1} for {num_parts} parts"
        )
    return torch.from_numpy(array.astype(np.int32))
