"""Rows as bytes: how many columns of a message's rows survive, and at what width.

    auto       as the features are stored: exact, and small where they are stored small
    float32    (float64 where they are stored so)
    bfloat16   2 bytes a value, relative error at most 2^-8
    int8       1 byte a value and one float32 scale a row, error at most half a step of max|row| / 127; deterministic.
               A row too small for a scale (max|row| < 127 / 2^127) arrives as zeros; one with NaN or infinity in it, as NaN

Legend: n rows, F columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyhop.errors import ConfigError, unknown

__all__ = ["DTYPES", "RowCodec"]

DTYPES = ("auto", "float32", "bfloat16", "int8")
_LEVELS = 127.0


@dataclass(frozen=True)
class RowCodec:
    """Encodes and decodes rows of one width. ``dtype`` is of the values on the wire; int8 of floats adds a scale a row."""

    num_columns: int
    dtype: torch.dtype
    is_quantised: bool = False  # int8 with a scale a row, made here; else values as they are stored

    @classmethod
    def of(cls, name: str, num_columns: int, stored: torch.dtype) -> RowCodec:
        """The codec of a ``--feature-dtype`` for rows that are stored in some dtype."""
        if name not in DTYPES:
            raise ConfigError(unknown("feature dtype", name, DTYPES))
        is_small = stored.itemsize < 4
        if name == "auto" or (name == "float32" and not is_small):
            return cls(num_columns, stored)
        if name == "int8" and not (is_small and not stored.is_floating_point):
            return cls(num_columns, torch.int8, is_quantised=True)
        if name == "bfloat16" and not is_small:
            return cls(num_columns, torch.bfloat16)
        return cls(num_columns, torch.float32 if name == "float32" else stored)

    @property
    def row_bytes(self) -> int:
        """Of one row on the wire."""
        return self.num_columns * self.dtype.itemsize + (4 if self.is_quantised else 0)

    @property
    def is_lossy(self) -> bool:
        return self.is_quantised or self.dtype == torch.bfloat16

    def encode(self, rows: Tensor) -> Tensor:
        """uint8 [n * row_bytes] of rows [n, F]: values first, then the scales."""
        if not self.is_quantised:
            return rows.to(self.dtype).contiguous().view(torch.uint8).reshape(-1)
        rows = rows.to(torch.float32)
        scale = rows.abs().amax(dim=1) / _LEVELS if rows.numel() else rows.new_zeros(rows.shape[0])
        # A row of zeros, or one whose scale underflows, is sent as zeros.
        inverse = torch.where(scale > 0, 1 / scale, torch.zeros_like(scale)).nan_to_num_(posinf=0.0)
        levels = (rows * inverse[:, None]).round_().clamp_(-_LEVELS, _LEVELS).to(torch.int8)
        return torch.cat([levels.view(torch.uint8).reshape(-1), scale.view(torch.uint8)])

    def decode(self, data: Tensor, num_rows: int) -> Tensor:
        """Rows [n, F] of what ``encode`` gave: float32 for int8 made here, else the dtype on the wire."""
        if not self.is_quantised:
            return data.view(self.dtype).view(num_rows, self.num_columns)
        values = num_rows * self.num_columns
        levels = data[:values].view(torch.int8).view(num_rows, self.num_columns)
        scale = data[values:].clone().view(torch.float32)  # a copy, because floats must be aligned
        return levels.to(torch.float32) * scale[:, None]

    def rounded(self, rows: Tensor) -> Tensor:
        """Rows as they would arrive: what a rank's own rows must be, for results not to depend on who owns them."""
        return self.decode(self.encode(rows), rows.shape[0]) if self.is_lossy else rows
