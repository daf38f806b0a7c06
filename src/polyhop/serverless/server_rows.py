"""Sparse rows that stay on their server, multiplied by its native kernels.

A product with sparse rows is a sum over rows of the weights that are picked by column: a graph operation in all but name.
On a function it would be numpy's, ten times as slow, and its rows would have to travel; so a dense piece that reads sparse
rows is the server's own (``segments.Dense.stays``).

Legend: n rows, F columns, G columns of the other matrix.
"""

from __future__ import annotations

import torch

from polyhop.graph import SparseRows
from polyhop.kernels import spmm
from polyhop.serverless.ragged import Array, Ragged

__all__ = ["ServerRows"]


class ServerRows(Ragged):
    """``rows`` of one interval; products read all of them at once."""

    def __init__(self, rows: SparseRows) -> None:
        super().__init__(rows.indptr.numpy(), rows.indices.numpy(), rows.values.numpy(), rows.num_columns)
        object.__setattr__(self, "_rows", rows)

    def __getitem__(self, rows: slice) -> Ragged:
        start, stop, _ = rows.indices(self.shape[0])
        return self if (start, stop) == (0, self.shape[0]) else super().__getitem__(rows)

    def multiply(self, weight: Array) -> Array:
        own: SparseRows = self._rows  # type: ignore[attr-defined]
        return _numpy(
            spmm(
                own.indptr,
                own.indices,
                torch.from_numpy(weight).t().contiguous(),
                num_src=own.num_columns,
                edge_weight=own.values,
            )
        )

    def multiply_transposed(self, grad: Array) -> Array:
        own: SparseRows = self._rows  # type: ignore[attr-defined]
        indptr, indices, place = own.transposed()
        found = spmm(
            indptr,
            indices,
            torch.from_numpy(grad).contiguous(),
            num_src=self.shape[0],
            edge_weight=own.values[place.long()],
        )
        return _numpy(found.t())


def _numpy(tensor: torch.Tensor) -> Array:
    found: Array = tensor.numpy()
    return found
