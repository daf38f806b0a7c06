"""Sparse rows as three arrays, and products with them, in numpy alone.

Products add up in the order of the stored values, in float64.

Legend: n rows, F columns, V stored values, G columns of the other matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from polyhop.errors import InputError

__all__ = ["Array", "Ragged"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class Ragged:
    """n rows of a sparse matrix, with the values of row i at indptr[i] .. indptr[i + 1] - 1."""

    indptr: Array  # int [n + 1]
    indices: Array  # int [V]: column of each value
    values: Array  # float [V]
    num_columns: int

    def __post_init__(self) -> None:
        if (
            self.indptr.ndim != 1
            or self.indptr.size < 1
            or self.indptr[0] != 0
            or np.diff(self.indptr).min(initial=0) < 0
        ):
            raise InputError("sparse rows: expected indptr [n + 1] that starts with 0 and never falls")
        if self.indices.shape != self.values.shape or self.indptr[-1] != self.values.size:
            raise InputError(
                f"sparse rows: indptr ends at {self.indptr[-1]}, there are {self.indices.size} columns and "
                f"{self.values.size} values"
            )
        if self.indices.size and not (self.indices.min() >= 0 and self.indices.max() < self.num_columns):
            raise InputError(
                f"sparse rows: columns span {self.indices.min()}..{self.indices.max()}, expected 0..{self.num_columns - 1}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        return self.indptr.size - 1, self.num_columns

    def __getitem__(self, rows: slice) -> Ragged:
        """Rows start .. stop - 1, without copying values."""
        start, stop, _ = rows.indices(self.shape[0])
        first, last = int(self.indptr[start]), int(self.indptr[stop])
        indptr = self.indptr[start : stop + 1] - first
        return Ragged(indptr, self.indices[first:last], self.values[first:last], self.num_columns)

    @classmethod
    def joined(cls, parts: Sequence[Ragged]) -> Ragged:
        """Rows of all parts, one after another."""
        starts = np.cumsum([0, *(part.values.size for part in parts)])
        indptr = [part.indptr[1:] + start for part, start in zip(parts, starts)]
        return cls(
            np.concatenate([parts[0].indptr[:1], *indptr]),
            np.concatenate([part.indices for part in parts]),
            np.concatenate([part.values for part in parts]),
            parts[0].num_columns,
        )

    def multiply(self, weight: Array) -> Array:
        """[n, G]: the rows times weight^T, weight [G, F], in its number format."""
        at = np.repeat(np.arange(self.shape[0]), np.diff(self.indptr))
        out = np.empty((self.shape[0], weight.shape[0]), weight.dtype)
        for column, line in enumerate(weight):
            # Column by column: no array of size V * G, and no column or row, however full, is slower than others.
            out[:, column] = np.bincount(at, self.values * line[self.indices], self.shape[0])
        return out

    def multiply_transposed(self, grad: Array) -> Array:
        """[G, F]: grad^T, grad [n, G], times the rows."""
        at = np.repeat(np.arange(self.shape[0]), np.diff(self.indptr))
        out = np.empty((grad.shape[1], self.num_columns), grad.dtype)
        for column, line in enumerate(np.ascontiguousarray(grad.T)):
            out[column] = np.bincount(self.indices, self.values * line[at], self.num_columns)
        return out
