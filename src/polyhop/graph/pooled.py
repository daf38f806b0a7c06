"""PooledRows: input rows that lie in two places, so that a step can read them without bringing them together first.

The first place is what a rank holds anyway (its own rows), the second what it fetched (a pool of rows of others). A Block's
``rows`` point into both as if one matrix followed the other.

Legend: A rows in the first place, B rows in the second, F features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyhop.errors import GraphError
from polyhop.kernels import gather_rows

__all__ = ["PooledRows"]


@dataclass(frozen=True, eq=False)
class PooledRows:
    """Row r is ``first[r]`` if r < A, else ``second[r - A]``. Fixed input rows: no gradient reaches them."""

    first: Tensor  # [A, F]
    second: Tensor  # [B, F], of the same dtype and on the same device

    def __post_init__(self) -> None:
        for name, matrix in (("first", self.first), ("second", self.second)):
            if matrix.dim() != 2:
                raise GraphError(
                    f"pooled rows: {name} must be a matrix [rows, F], got shape {list(matrix.shape)}"
                )
            if matrix.requires_grad:
                raise GraphError(
                    f"pooled rows: {name} requires a gradient, but rows in two places are fixed input; "
                    "give .detach() of it, or one matrix (torch.cat) to train the rows"
                )
        for what, one, other in (
            ("columns", self.first.shape[1], self.second.shape[1]),
            ("dtype", self.first.dtype, self.second.dtype),
            ("device", self.first.device, self.second.device),
        ):
            if one != other:
                raise GraphError(
                    f"pooled rows: both places must have the same {what}, got {one} in the first and {other} in the second"
                )

    @property
    def num_rows(self) -> int:
        """A + B."""
        return self.first.shape[0] + self.second.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, self.first.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.first.dtype

    @property
    def device(self) -> torch.device:
        return self.first.device

    @property
    def requires_grad(self) -> bool:
        return False

    def gather(self, rows: Tensor) -> Tensor:
        """[n, F]: rows (int64 [n]) in their order, as ``kernels.gather_rows`` gives them of one matrix."""
        return gather_rows(self.first, rows, second=self.second)

    def all(self) -> Tensor:
        """[A + B, F]: one matrix after the other, copied."""
        return torch.cat([self.first, self.second])
