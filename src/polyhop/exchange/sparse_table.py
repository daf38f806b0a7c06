"""Sparse rows that come in pieces and are read by their places: added at the end of buffers that grow by half.

Rows that nobody needs any more stay until they are as many values as those that are needed; then the table is written anew.
So a value is copied a few times in all, however many pieces there are.

Legend: n rows, nnz values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhop.graph import SparseFeatures, SparseRows

__all__ = ["SparseTable"]

_LEAST = 1024  # values or rows that a buffer has room for


class SparseTable:
    """``num_columns`` of the rows; values in the dtype of the first that come."""

    def __init__(self, rows: SparseRows) -> None:
        self._num_columns = rows.num_columns
        self._indptr = torch.zeros(1, dtype=torch.int64)
        self._indices = torch.empty(0, dtype=torch.int32)
        self._values = torch.empty(0, dtype=rows.values.dtype)
        self._num_rows = self._num_values = 0
        self.add(rows)

    @property
    def num_rows(self) -> int:
        """Places that were given, those of rows that nobody needs included."""
        return self._num_rows

    @property
    def num_values(self) -> int:
        return self._num_values

    def add(self, rows: SparseRows) -> Tensor:
        """int64 [n]: their places."""
        count, size = rows.shape[0], rows.values.numel()
        at, end = self._num_rows, self._num_values
        self._indptr = _with_room(self._indptr, at + 1, at + 1 + count)
        self._indices = _with_room(self._indices, end, end + size)
        self._values = _with_room(self._values, end, end + size)
        self._indptr[at + 1 : at + 1 + count] = rows.indptr[1:] + (end - int(rows.indptr[0]))
        self._indices[end : end + size] = rows.indices
        self._values[end : end + size] = rows.values
        self._num_rows, self._num_values = at + count, end + size
        return torch.arange(at, at + count)

    def gather(self, places: Tensor) -> SparseRows:
        """Rows of places (int64 [n]), in order, as a matrix of their own."""
        return SparseFeatures(self._rows()).gather(places)

    def has_waste(self, places: Tensor) -> bool:
        """Whether most values belong to rows that are not among these (int64, distinct)."""
        lengths = self._indptr[places + 1] - self._indptr[places]
        return 2 * int(lengths.sum()) < self._num_values

    def keep(self, places: Tensor) -> None:
        """These rows alone (int64 [n], distinct), whose places are then 0 to n - 1."""
        kept = self.gather(places)
        self._num_rows = self._num_values = 0
        self._indptr, self._indices = torch.zeros(1, dtype=torch.int64), self._indices[:0].clone()
        self._values = self._values[:0].clone()
        self.add(kept)

    def _rows(self) -> SparseRows:
        end = self._num_values
        return SparseRows(
            self._indptr[: self._num_rows + 1], self._indices[:end], self._values[:end], self._num_columns
        )


def _with_room(buffer: Tensor, used: int, needed: int) -> Tensor:
    """The buffer, or a larger one that begins with what is used of it."""
    if needed <= buffer.numel():
        return buffer
    larger = torch.empty(max(needed, used + used // 2, _LEAST), dtype=buffer.dtype)
    larger[:used] = buffer[:used]
    return larger
