"""FeatureStore: where input rows live, so that no code assumes they fit in memory.

Legend: N nodes, F features.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from polyhop.errors import GraphError
from polyhop.kernels import gather_rows, transpose

__all__ = ["DenseFeatures", "FeatureStore", "MatrixFeatures", "SparseFeatures", "SparseRows"]


@runtime_checkable
class FeatureStore(Protocol):
    """Rows of input features by node id."""

    @property
    def num_rows(self) -> int: ...

    @property
    def num_features(self) -> int: ...

    def gather(self, ids: Tensor) -> Tensor | SparseRows:
        """Float rows of the given ids (int64 [n]), in their order."""
        ...

    def all(self) -> Tensor | SparseRows:
        """Every row, in memory."""
        ...


@runtime_checkable
class MatrixFeatures(FeatureStore, Protocol):
    """A store of dense rows, wherever they are: what is stored can be had as it is."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the stored values."""
        ...

    @property
    def scale(self) -> Tensor | None:
        """float32 [F]: multiplies each column where values are stored as small integers."""
        ...

    def stored(self, ids: Tensor) -> Tensor:
        """Rows of the given ids (int64 [n]) in the stored dtype, unscaled."""
        ...


@dataclass(frozen=True, eq=False)
class DenseFeatures:
    """One row-major matrix in memory or memory-mapped; float32, float64, bfloat16, int8 or uint8 [N, F].

    ``scale`` (float32 [F]) multiplies each column where values are stored as small integers.
    """

    values: Tensor
    scale: Tensor | None = None
    is_mapped: bool = False  # backed by a file: pages come in on demand
    path: Path | None = None  # the .npy file that holds the same rows, where it is known

    def __post_init__(self) -> None:
        if self.values.dim() != 2:
            raise GraphError(f"features: expected a matrix [N, F], got shape {list(self.values.shape)}")

    @property
    def num_rows(self) -> int:
        return self.values.shape[0]

    @property
    def num_features(self) -> int:
        return self.values.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def stored(self, ids: Tensor) -> Tensor:
        return self.values.index_select(0, ids)

    def gather(self, ids: Tensor) -> Tensor:
        return gather_rows(self.values, ids, scale=self.scale)

    def all(self) -> Tensor:
        if self.scale is None and self.values.dtype in (torch.float32, torch.float64):
            return self.values
        dense = self.values.to(torch.float32)
        return dense if self.scale is None else dense * self.scale


@dataclass(frozen=True, eq=False)
class SparseRows:
    """Rows of a sparse matrix (CSR) given to a first layer, which multiplies them as they are."""

    indptr: Tensor  # int64 [n + 1]
    indices: Tensor  # int32 or int64 [nnz]: column of each value
    values: Tensor  # float32 [nnz]
    num_columns: int
    ids: Tensor | None = None  # int64 [n]: the user's ids of the rows; None = 0 .. n-1
    _cache: dict[str, Any] = field(
        default_factory=dict, repr=False
    )  # what is derived from indptr and indices

    @property
    def shape(self) -> tuple[int, int]:
        return self.indptr.numel() - 1, self.num_columns

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def dense(self) -> Tensor:
        """All values in a matrix [n, num_columns]."""
        out = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        row = torch.repeat_interleave(torch.arange(self.shape[0], device=self.device), self.indptr.diff())
        return out.index_put_((row, self.indices.long()), self.values, accumulate=True)

    def transposed(self) -> tuple[Tensor, Tensor, Tensor]:
        """(indptr [F + 1], row of each value [nnz], its position [nnz]) grouped by column; built once and kept."""
        if "t" not in self._cache:
            self._cache["t"] = transpose(self.indptr, self.indices, self.num_columns)
        kept: tuple[Tensor, Tensor, Tensor] = self._cache["t"]
        return kept

    def with_values(self, values: Tensor) -> SparseRows:
        """The same rows and columns with other values [nnz]."""
        return replace(self, values=values)

    def slice(self, start: int, stop: int) -> SparseRows:
        """Rows start .. stop-1, without copying values."""
        if (start, stop) == (0, self.shape[0]):
            return self
        first, last = int(self.indptr[start]), int(self.indptr[stop])
        ids = torch.arange(start, stop, device=self.device) if self.ids is None else self.ids[start:stop]
        indptr = self.indptr[start : stop + 1] - first
        return SparseRows(indptr, self.indices[first:last], self.values[first:last], self.num_columns, ids)

    def to(self, device: torch.device | str) -> SparseRows:
        ids = None if self.ids is None else self.ids.to(device)
        return SparseRows(
            self.indptr.to(device), self.indices.to(device), self.values.to(device), self.num_columns, ids
        )


@dataclass(frozen=True, eq=False)
class SparseFeatures:
    """A CSR matrix of features; the first layer multiplies it without making it dense."""

    rows: SparseRows

    @property
    def num_rows(self) -> int:
        return self.rows.shape[0]

    @property
    def num_features(self) -> int:
        return self.rows.num_columns

    def all(self) -> SparseRows:
        return self.rows

    def gather(self, ids: Tensor) -> SparseRows:
        start = self.rows.indptr[ids]
        counts = self.rows.indptr[ids + 1] - start
        indptr = torch.zeros(ids.numel() + 1, dtype=torch.int64, device=ids.device)
        torch.cumsum(counts, 0, out=indptr[1:])
        num = int(indptr[-1])
        shift = torch.repeat_interleave(start - indptr[:-1], counts, output_size=num)
        take = torch.arange(num, device=ids.device) + shift
        return SparseRows(indptr, self.rows.indices[take], self.rows.values[take], self.num_features, ids)
