"""Messages between stages: a chunk's rows, or their gradients, and what is carried beside them.

    32 bits   side by side, in the widest dtype of them, as they are
    fewer     each of them rounded by itself, at random and without bias (``exchange.codec``): codes and two parameters a row

Both ends know a chunk's rows and their ids, so a message is nothing else. Which way a value is rounded is a function of
(step, layer, direction, what it is of, the user's node id, column). What fills the tables before the first epoch crosses as
it is: no step has begun.

Legend: n rows of a chunk, B bytes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polyhop.errors import InputError
from polyhop.exchange.codec import MixedCodec
from polyhop.kernels import NotFiniteError
from polyhop.kernels.keys import Key, Purpose, fold
from polyhop.kernels.quantise import quantised_bytes
from polyhop.strategies.pipeline_chunks import Chunks
from polyhop.strategies.pipeline_cost import Boundary
from polyhop.strategies.pipeline_pieces import Pieces
from polyhop.strategies.pipeline_schedule import Direction

__all__ = ["WIDTHS", "Messages", "row_bytes"]

WIDTHS = (1, 2, 4, 8, 16, 32)
_PLAIN = 32
_DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")
_ENCODED = (torch.float32, torch.float64, torch.bfloat16)


def row_bytes(columns: int, bits: int, value_bytes: int = 4) -> int:
    """Of one row of one thing on the wire; ``value_bytes``: where it crosses as it is."""
    if bits == _PLAIN:
        return columns * value_bytes
    return quantised_bytes(torch.tensor([bits], dtype=torch.uint8), columns)


class Messages:
    """Of ``bits`` a value. ``begin`` is to be called before every epoch."""

    def __init__(self, pieces: Pieces, chunks: Chunks, bits: int = _PLAIN) -> None:
        self._pieces, self._chunks, self._bits = pieces, chunks, bits
        self._key: Key | None = None
        self._codecs: dict[tuple[int, int], MixedCodec] = {}  # by rows and columns

    def begin(self, key: Key | None) -> None:
        """A step begins; without its key everything crosses as it is."""
        self._key = key

    @property
    def _is_plain(self) -> bool:
        return self._bits == _PLAIN or self._key is None

    def boundary(self, layer: int) -> Boundary:
        """What crosses where stages are cut before a layer, in a step."""
        value_bytes = self._pieces.value_dtype(layer).itemsize
        row = {} if self._bits == _PLAIN else dict.fromkeys(_DIRECTIONS, self._row_bytes(layer))
        return Boundary(self._pieces.columns(layer), value_bytes, row)

    def _row_bytes(self, layer: int) -> int:
        return sum(
            row_bytes(math.prod(shape), self._bits) for shape, _ in self._pieces.crossing(layer).values()
        )

    def form(self, chunk: int, layer: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a message."""
        num_rows = self._chunks[chunk].num_rows
        if self._is_plain:
            return (num_rows, self._pieces.columns(layer)), self._pieces.value_dtype(layer)
        return (num_rows * self._row_bytes(layer),), torch.uint8

    def packed(self, rows: dict[str, Tensor], chunk: int, layer: int, direction: Direction) -> Tensor:
        """The message of what a chunk has before a layer, or of gradients of it."""
        names = self._pieces.crossing(layer)
        flat = {name: rows[name].reshape(rows[name].shape[0], -1) for name in names}
        if not self._is_plain:
            return torch.cat([self._encoded(flat[name], name, chunk, layer, direction) for name in names])
        dtype = self._pieces.value_dtype(layer)
        values = [value.to(dtype) for value in flat.values()]
        return values[0] if len(values) == 1 else torch.cat(values, dim=1)

    def _encoded(self, rows: Tensor, name: str, chunk: int, layer: int, direction: Direction) -> Tensor:
        assert self._key is not None
        ids = self._chunks.ids[self._chunks[chunk].rows]
        of = list(self._pieces.crossing(layer)).index(name)
        key = fold(self._key.at(Purpose.ROUND, layer), _DIRECTIONS.index(direction), of)
        given = rows if rows.dtype in _ENCODED else rows.float()
        try:
            return self._codec(rows.shape[0], rows.shape[1]).encode(given, None, ids, key)
        except NotFiniteError as error:
            what = "rows" if direction == "forward" else "gradients of rows"
            raise InputError(
                f"{what} ({name!r}) that cross before layer {layer} are not finite, first at node "
                f"{int(ids[error.row])}: training has diverged (try a smaller lr, or clip=1.0)"
            ) from error

    def _codec(self, num_rows: int, columns: int) -> MixedCodec:
        if (num_rows, columns) not in self._codecs:
            bits = torch.full((num_rows,), self._bits, dtype=torch.uint8)
            self._codecs[num_rows, columns] = MixedCodec(columns, bits)
        return self._codecs[num_rows, columns]

    def opened(self, message: Tensor, layer: int) -> dict[str, Tensor]:
        """What ``packed`` was given."""
        names = self._pieces.crossing(layer)
        widths = [math.prod(shape) for shape, _ in names.values()]
        pieces = message.split(widths, dim=1) if self._is_plain else self._decoded(message, layer)  # type: ignore[no-untyped-call]
        return {
            name: piece.reshape(piece.shape[0], *shape).to(dtype)
            for piece, (name, (shape, dtype)) in zip(pieces, names.items(), strict=True)
        }

    def _decoded(self, message: Tensor, layer: int) -> list[Tensor]:
        num_rows = message.numel() // self._row_bytes(layer)
        states = list(self._pieces.crossing(layer).values())
        codecs = [self._codec(num_rows, math.prod(shape)) for shape, _ in states]
        pieces = message.split([codec.num_bytes for codec in codecs])  # type: ignore[no-untyped-call]
        return [
            codec.decode(piece, dtype if dtype in _ENCODED else torch.float32)
            for codec, piece, (_, dtype) in zip(codecs, pieces, states, strict=True)
        ]
