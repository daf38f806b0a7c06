"""Rows as bytes: how many columns of a message's rows survive, and at what width.

    auto       as the features are stored: exact, and small where they are stored small
    float32    (float64 where they are stored so)
    bfloat16   2 bytes a value, relative error at most 2^-8
    int8       1 byte a value and one float32 scale a row, error at most half a step of max|row| / 127; deterministic.
               A row too small for a scale (max|row| < 127 / 2^127) arrives as zeros; one with NaN or infinity in it, as NaN

These are of features, a fixed width a row and the same bytes every time (``RowCodec``). ``MixedCodec`` is of what changes in
training: each row has its own width and is rounded at random, without bias.

Legend: n rows, k rows of a message, F columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyhop.errors import ConfigError, InputError, unknown
from polyhop.kernels.quantise import dequantise_rows, quantise_rows, quantised_bytes

__all__ = ["DTYPES", "MixedCodec", "RowCodec"]

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


class MixedCodec:
    """One message of rows of mixed widths, from one rank to another: 1, 2, 4 or 8 bits a value, 16 or 32 passed through.

    Both ends have one for each direction of a channel, with the same widths; ``polyhop.kernels.quantise`` says what the
    bytes are and what is promised of them.
    """

    def __init__(self, num_columns: int, bits: Tensor) -> None:
        self.num_columns = num_columns
        self.bits = bits.contiguous()  # uint8 [k]
        self.num_bytes = quantised_bytes(self.bits, num_columns)  # of the message
        self._bits: dict[torch.device, Tensor] = {}  # where rows are

    @property
    def num_rows(self) -> int:
        return self.bits.numel()

    def encode(
        self, source: Tensor, rows: Tensor | None, ids: Tensor | None, key: int, ranges: Tensor | None = None
    ) -> Tensor:
        """uint8 [num_bytes]: rows ``rows`` (int64 [k]; None = all) of source [n, F], rounded by (key, ids int64 [k]).

        ``ranges`` (float32 [k]) receives max - min of each row. NotFiniteError, with the place of the row, if one is not
        finite: the caller knows of which layer and rank.
        """
        if source.dim() != 2 or source.shape[1] != self.num_columns:
            raise InputError(
                f"rows of {self.num_columns} columns expected, got {list(source.shape)}: the channel is of another layer"
            )
        here = source.device
        rows, ids = (None if given is None else given.to(here) for given in (rows, ids))
        return quantise_rows(source, self._bits_on(here), key, rows=rows, ids=ids, ranges=ranges)

    def _bits_on(self, device: torch.device) -> Tensor:
        if device not in self._bits:
            self._bits[device] = self.bits.to(device)
        return self._bits[device]

    def decode(
        self, message: Tensor, dtype: torch.dtype = torch.float32, *, out: Tensor | None = None
    ) -> Tensor:
        """Rows [k, F] of a message, into ``out`` if given; InputError if it is cut or damaged."""
        bits = self._bits_on(message.device)
        return dequantise_rows(message, bits, self.num_columns, dtype=dtype, out=out)
