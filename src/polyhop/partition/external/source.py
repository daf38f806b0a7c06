"""Edge files read a chunk at a time: .npy, a folder of .npy files, CSV and Parquet tables.

Files are read, never mapped: mapped pages would count as memory of the process.

Legend: E edges, k edges of a chunk.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from polyhop.errors import PartitionError
from polyhop.partition.files import take

__all__ = [
    "Chunk",
    "CscEdges",
    "EdgeSource",
    "NpyEdges",
    "NpyRows",
    "identity",
    "open_npy_edges",
]


class Chunk(NamedTuple):
    """Some edges in the user's order: int32 or int64 [k] each, float32 [k] or None."""

    src: Tensor
    dst: Tensor
    weight: Tensor | None


class EdgeSource(Protocol):
    """Edges that can be read again and again, always in the same order."""

    path: Path

    @property
    def num_edges(self) -> int: ...

    @property
    def has_weight(self) -> bool: ...

    def chunks(self, size: int) -> Iterator[Chunk]:
        """All edges, up to ``size`` at a time."""
        ...


def identity(path: Path) -> list[Any]:
    """What changes when a file is written again: name, size, time."""
    try:
        found = path.stat()
    except OSError as error:
        raise PartitionError(f"{path}: {error.strerror or error}") from error
    return [str(path.resolve()), found.st_size, found.st_mtime_ns]


class NpyRows:
    """The rows of one .npy file of numbers, read in pieces. PartitionError if it is no such file, or cut short."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                shape, is_fortran, dtype = _header(file)
                self._offset = file.tell()
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise PartitionError(f"{path}: {error.strerror or error}") from error
        except ValueError as error:
            raise PartitionError(f"{path}: not a readable .npy file ({error})") from error
        if dtype.hasobject or dtype.kind not in "biuf" or not dtype.isnative:
            raise PartitionError(f"{path}: expected plain numbers in this machine's byte order, got {dtype}")
        expected = self._offset + int(np.prod(shape)) * dtype.itemsize
        if size < expected:
            raise PartitionError(
                f"{path}: {size:,} bytes, but its header promises {expected:,} ({dtype} {list(shape)}): the file was cut "
                "short; copy or write it again"
            )
        if is_fortran and len(shape) > 1:
            shape = shape[::-1]
        self.is_fortran = is_fortran and len(shape) > 1
        self.shape, self.dtype = shape, dtype

    def read(self, start: int, count: int) -> np.ndarray[Any, Any]:
        """``count`` values of the file as they lie, from value ``start``."""
        with self.path.open("rb", buffering=0) as file:
            file.seek(self._offset + start * self.dtype.itemsize)
            return take(file, self.dtype, count).numpy()

    def rows(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Rows start .. stop - 1 of a file in C order."""
        width = int(np.prod(self.shape[1:]))
        return self.read(start * width, (stop - start) * width).reshape(stop - start, *self.shape[1:])


def _header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(file)
    return shape, is_fortran, dtype


class NpyEdges:
    """int32 or int64 [2, E] (sources, destinations) or [E, 2], with weights in a second file if there are any."""

    def __init__(self, path: Path, weight: Path | None = None, *, name: Path | None = None) -> None:
        self.path = name or path  # what messages say
        self._rows = NpyRows(path)
        shape = self._rows.shape
        is_pair = len(shape) == 2 and 2 in shape
        if not is_pair or self._rows.dtype not in (np.int32, np.int64):
            raise PartitionError(
                f"{path}: expected int32 or int64 [2, E] (sources, destinations) or [E, 2], got {self._rows.dtype} "
                f"{list(shape)}"
            )
        self._is_rows = shape[0] == 2 and not (
            self._rows.is_fortran and shape == (2, 2)
        )  # one end after the other
        self._num_edges = int(shape[1] if self._is_rows else shape[0])
        self._weight = None if weight is None else NpyRows(weight)
        if self._weight is not None and self._weight.shape not in ((self.num_edges,), (self.num_edges, 1)):
            raise PartitionError(
                f"{weight}: expected [{self.num_edges}], one weight per edge, got {list(self._weight.shape)}"
            )

    @property
    def num_edges(self) -> int:
        return self._num_edges

    @property
    def has_weight(self) -> bool:
        return self._weight is not None

    def chunks(self, size: int) -> Iterator[Chunk]:
        for start in range(0, self.num_edges, size):
            k = min(size, self.num_edges - start)
            if self._is_rows:
                ends = self._rows.read(start, k), self._rows.read(self.num_edges + start, k)
            else:
                pairs = self._rows.read(2 * start, 2 * k).reshape(k, 2)
                ends = pairs[:, 0].copy(), pairs[:, 1].copy()
            src, dst = (torch.from_numpy(end) for end in ends)
            yield Chunk(src, dst, _weights(self._weight, start, k))


class CscEdges:
    """In-edge lists indptr.npy [N + 1], indices.npy [E], as ``polyhop.datasets.save`` writes them."""

    def __init__(self, path: Path, weight: Path | None = None) -> None:
        self.path = path / "indices.npy"
        self._indptr, self._indices = NpyRows(path / "indptr.npy"), NpyRows(self.path)
        for rows in (self._indptr, self._indices):
            if len(rows.shape) != 1 or rows.dtype not in (np.int32, np.int64):
                raise PartitionError(
                    f"{rows.path}: expected int32 or int64 in one dimension, got {rows.dtype}"
                )
        self._weight = None if weight is None else NpyRows(weight)

    @property
    def num_nodes(self) -> int:
        return int(self._indptr.shape[0]) - 1

    @property
    def num_edges(self) -> int:
        return int(self._indices.shape[0])

    @property
    def has_weight(self) -> bool:
        return self._weight is not None

    def chunks(self, size: int) -> Iterator[Chunk]:
        """Destinations are unfolded from as many nodes at a time as there are edges in a chunk."""
        at, edge = 0, 0  # the next node, and its first edge not yet given
        while edge < self.num_edges:
            ends = self._indptr.read(at, min(size, self.num_nodes - at) + 1).astype(np.int64)
            stop = min(int(ends[-1]), edge + size)
            degree = np.clip(ends[1:], edge, stop) - np.clip(ends[:-1], edge, stop)
            if bool((np.diff(ends) < 0).any()) or stop < edge:
                raise PartitionError(f"{self._indptr.path}: falls after node {at}; it must never fall")
            if stop > edge:
                dst = np.repeat(np.arange(at, at + degree.size, dtype=self._indices.dtype), degree)
                src = self._indices.read(edge, stop - edge)
                yield Chunk(
                    torch.from_numpy(src), torch.from_numpy(dst), _weights(self._weight, edge, stop - edge)
                )
            at, edge = at + int(np.searchsorted(ends[1:], stop, side="right")), stop
            if at >= self.num_nodes and edge < self.num_edges:
                raise PartitionError(
                    f"{self._indptr.path}: ends at {edge}, {self.path} has {self.num_edges} edges"
                )


def _weights(rows: NpyRows | None, start: int, count: int) -> Tensor | None:
    if rows is None:
        return None
    return torch.from_numpy(rows.read(start, count)).to(torch.float32)


def open_npy_edges(path: Path) -> EdgeSource:
    """The edges of a .npy file, or of a folder of .npy files."""
    if not path.is_dir():
        return NpyEdges(path)
    weight: Path | None = path / "edge_weight.npy"
    weight = weight if weight is not None and weight.exists() else None
    if (path / "edge_index.npy").exists():
        return NpyEdges(path / "edge_index.npy", weight)
    return CscEdges(path, weight)
