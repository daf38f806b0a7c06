"""DiskFeatures: rows that stay in their file and are read when asked for, many at a time, in file order.

For features larger than memory. A mapped file reads one page per row, in the order of the ids, and fills memory with pages
that are not wanted again; here the rows of one request are sorted, each page is read once, neighbours together, past the
page cache. The more rows a request has, the fewer reads it takes for each: ask for those of many mini-batches at once.

Legend: N stored rows, n wanted rows, F features.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyhop.errors import ConfigError, InputError, unknown
from polyhop.graph.features import DenseFeatures, FeatureStore
from polyhop.graph.graph import Graph
from polyhop.graph.part import SharedGraph
from polyhop.graph.row_file import RowFile, measure_disk, open_rows
from polyhop.kernels import gather_rows
from polyhop.kernels.read_rows import Disk, ReadPlan, plan_reads

__all__ = ["FEATURE_STORES", "DiskFeatures", "ReadCounts", "in_feature_store", "kept_in"]

FEATURE_STORES = ("auto", "memory", "mapped", "disk")


@dataclass(frozen=True)
class ReadCounts:
    """What was read since the store was opened."""

    num_rows: int = 0  # delivered; a row asked for twice in one request counts once
    num_reads: int = 0
    num_scans: int = 0  # requests that were answered by reading all pages between the first and the last
    pages_wanted: int = 0  # that hold a row asked for, each once per request
    pages_read: int = 0
    bytes_read: int = 0

    def plus(self, rows: int, plan: ReadPlan) -> ReadCounts:
        added = (rows, plan.num_reads, plan.is_scan, plan.pages_wanted, plan.pages_read, plan.bytes_read)
        return ReadCounts(*(getattr(self, f.name) + int(n) for f, n in zip(fields(self), added, strict=True)))


class DiskFeatures:
    """Rows of a .npy file (C order), or of a raw file whose ``shape`` [N, F], ``dtype`` and ``offset`` are given.

    dtypes: float32, float64, bfloat16 (in .npy as two-byte values, with ``dtype`` given), int8 and uint8 with ``scale``
    (float32 [F]). ``disk``: how fast it is (None: measured once per file system, if the file is large). Any thread may call
    it. The results are those of DenseFeatures on the same file, to the bit.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        scale: Tensor | None = None,
        shape: tuple[int, int] | None = None,
        dtype: torch.dtype | None = None,
        offset: int = 0,
        disk: Disk | None = None,
    ) -> None:
        file, stored, columns = open_rows(Path(path), shape, dtype, offset)
        self._set([file], stored, columns, scale, disk)

    def _set(
        self, files: list[RowFile], dtype: torch.dtype, columns: int, scale: Tensor | None, disk: Disk | None
    ) -> None:
        if scale is not None and list(scale.shape) != [columns]:
            raise InputError(
                f"{files[0].path}: expected a scale of [{columns}], one per feature, got {list(scale.shape)}"
            )
        self._files, self._dtype, self._columns, self._scale, self._disk = files, dtype, columns, scale, disk
        counts = [0, *(file.num_rows for file in files)]
        self._bounds = torch.tensor(counts, dtype=torch.int64).cumsum(0)
        self._lock = threading.Lock()
        self._counts = ReadCounts()

    @classmethod
    def joined(cls, stores: Sequence[DiskFeatures]) -> DiskFeatures:
        """The rows of several stores of the same kind, one after the other, as one store."""
        first = stores[0]
        for store in stores[1:]:
            if (store.dtype, store.num_features) != (first.dtype, first.num_features):
                raise InputError(
                    f"{store._files[0].path}: {store.num_features} features of {store.dtype}, but {first._files[0].path} "
                    f"has {first.num_features} of {first.dtype}: expected the same"
                )
        made = cls.__new__(cls)
        files = [file for store in stores for file in store._files]
        made._set(files, first.dtype, first.num_features, first.scale, first._disk)
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        name = str(self._files[0].path) + (
            f" and {len(self._files) - 1} more" if len(self._files) > 1 else ""
        )
        return f"DiskFeatures({name!r}, rows={self.num_rows:,}, features={self.num_features}, {self.dtype})"

    @property
    def num_rows(self) -> int:
        return int(self._bounds[-1])

    @property
    def num_features(self) -> int:
        return self._columns

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def scale(self) -> Tensor | None:
        return self._scale

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files, in the order of their rows."""
        return tuple(file.path for file in self._files)

    @property
    def disk(self) -> Disk:
        """How fast the rows can be read; measured when first asked for."""
        if self._disk is None:
            largest = max(self._files, key=lambda file: file.end)
            self._disk = measure_disk(largest.path, largest.end)
        return self._disk

    @property
    def counts(self) -> ReadCounts:
        """What was read so far."""
        with self._lock:
            return self._counts

    @property
    def pages_read(self) -> int:
        return self.counts.pages_read

    @property
    def bytes_read(self) -> int:
        return self.counts.bytes_read

    @property
    def num_reads(self) -> int:
        return self.counts.num_reads

    @property
    def num_scans(self) -> int:
        return self.counts.num_scans

    def gather(self, ids: Tensor) -> Tensor:
        """Float rows of ids (int64 [n]) in any order, repeats allowed: sorted, read once each, put in order."""
        return self._floats(self.stored(ids), None)

    def gather_sorted(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Float rows [n, F] of ascending distinct rows (int64 [n]); ``out`` receives them if given (contiguous)."""
        if out is None or not self._is_float:
            return self._floats(self._read(rows, None), out)
        if out.dtype != self._dtype or list(out.shape) != [rows.numel(), self._columns]:
            raise InputError(
                f"gather_sorted: out must be {self._dtype} [{rows.numel()}, {self._columns}], got {out.dtype} "
                f"{list(out.shape)}"
            )
        return self._read(rows, None, out)

    def stored(self, ids: Tensor) -> Tensor:
        """Rows [n, F] of ids in any order, repeats allowed, in the stored dtype."""
        if ids.dim() != 1 or ids.dtype != torch.int64:
            raise InputError(f"features: ids must be int64 [n], got {ids.dtype} {list(ids.shape)}")
        if ids.numel() < 2 or bool((ids[1:] > ids[:-1]).all()):
            return self._read(ids, None)
        ordered, order = torch.sort(ids)
        if bool((ordered[1:] > ordered[:-1]).all()):
            return self._read(ordered, order)
        rows, repeated = torch.unique_consecutive(ordered, return_inverse=True)
        place = torch.empty_like(order)
        place[order] = repeated
        return self._read(rows, None).index_select(0, place)

    def all(self) -> Tensor:
        """Every row. Floats of one file are mapped, not read; what must be converted or joined is held in memory."""
        return self.mapped().all()

    def mapped(self) -> DenseFeatures:
        """The same rows in mapped memory (those of several files are read and joined)."""
        pieces = [file.mapped(self._dtype, self._columns) for file in self._files]
        if len(pieces) > 1:
            return DenseFeatures(torch.cat(pieces), self._scale)
        return DenseFeatures(pieces[0], self._scale, is_mapped=True, path=self._files[0].path)

    @property
    def _is_float(self) -> bool:
        return self._dtype in (torch.float32, torch.float64) and self._scale is None

    def _floats(self, rows: Tensor, out: Tensor | None) -> Tensor:
        """Stored rows as DenseFeatures would give them."""
        if self._is_float and out is None:
            return rows
        return gather_rows(rows, torch.arange(rows.shape[0]), scale=self._scale, out=out)

    def _read(self, rows: Tensor, at: Tensor | None, out: Tensor | None = None) -> Tensor:
        """[n, F] as stored: row k of ``rows`` (ascending, distinct) at place at[k], or k."""
        if out is None:
            out = torch.empty(rows.numel(), self._columns, dtype=self._dtype)
        if rows.numel() == 0:
            return out
        if int(rows[0]) < 0 or int(rows[-1]) >= self.num_rows:
            wrong = int(rows[0]) if int(rows[0]) < 0 else int(rows[-1])
            raise InputError(
                f"{self._files[0].path}: row {wrong} is outside the {self.num_rows} stored rows (0 .. {self.num_rows - 1})"
            )
        if self._columns == 0:
            return out
        cuts = torch.searchsorted(rows, self._bounds).tolist()
        for index, file in enumerate(self._files):
            begin, end = cuts[index], cuts[index + 1]
            if begin == end:
                continue
            some = rows[begin:end] - self._bounds[index]
            plan = plan_reads(some, file.row_bytes, offset=file.offset, disk=self.disk)
            target, place = (out[begin:end], None) if at is None else (out, at[begin:end])
            file.read(plan, some, target, place)
            with self._lock:
                self._counts = self._counts.plus(some.numel(), plan)
        return out


def in_feature_store(graph: Graph | SharedGraph, where: str) -> Graph | SharedGraph:
    """The graph, or the share of one, with its features kept ``where``, as ``kept_in`` says."""
    if graph.x is None or where == "auto":
        return graph
    x = kept_in(graph.x, where)
    if isinstance(graph, SharedGraph):
        return replace(graph, part=replace(graph.stored("feature_store"), x=x))
    return replace(graph, x=x)


def kept_in(x: FeatureStore, where: str) -> FeatureStore:
    """The same rows in "memory", "mapped" from their file or read from "disk"; "auto": as they are.

    ConfigError where they are to stay in a file and there is none, or they are not dense.
    """
    if where not in FEATURE_STORES:
        raise ConfigError(unknown("feature_store", where, FEATURE_STORES))
    if where == "auto" or (where == "disk" and isinstance(x, DiskFeatures)):
        return x
    if where == "memory":
        if isinstance(x, DiskFeatures):
            return DenseFeatures(x.stored(torch.arange(x.num_rows)), x.scale)
        if isinstance(x, DenseFeatures) and x.is_mapped:
            return replace(x, values=x.values.clone(), is_mapped=False)
        return x
    if isinstance(x, DenseFeatures) and x.path is not None:
        if where == "mapped" and x.is_mapped:
            return x
        x = DiskFeatures(x.path, scale=x.scale, dtype=x.dtype)
    if not isinstance(x, DiskFeatures):
        kind = (
            "in memory, of no file that is known"
            if isinstance(x, DenseFeatures)
            else "not rows of equal length"
        )
        raise ConfigError(
            f"feature_store={where!r}: the graph's features are {kind}; open them from a folder of .npy files "
            "(polyhop.datasets.save) or of parts (polyhop partition)"
        )
    return x if where == "disk" else x.mapped()
