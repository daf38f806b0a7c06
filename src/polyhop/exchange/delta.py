"""Rows across the cut as what they have moved: both ends hold every row as it arrived last, and the difference crosses in
2 bits a value (closed loop), or the row itself where that spans less.

    difference    d = h - held;  message = rounded(d), unbiased;  held <- held + message    the same at both ends, to the bit
    bound         what arrives differs from h by the rounding of one difference: errors do not add up over steps. A row whose
                  difference spans more than it does itself crosses as it is: never worse than 2 bits without this
    frozen rows   the next difference is the last error, which spans less than two of three steps: 2/3 of it is left, at most

Worth it where rows move little from step to step: not where units are dropped before they cross, in other places each time.
A message is that of ``quantised``, and as long. That a row is a difference is said by the sign of its step, which no row has
that spans anything (its largest value has code 2 or 3); of a constant one, whose codes are 0, by its second code.

Legend: k rows of a message, F columns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from polyhop.errors import InputError
from polyhop.exchange.codec import MixedCodec
from polyhop.exchange.crossing import Direction, Lists, Spans, taken
from polyhop.exchange.quantised import QuantisedMessages

__all__ = ["BITS", "DeltaMessages"]

BITS = 2
_SIGN = 0x80  # of a bfloat16, in its second byte
_SECOND = 0x04  # lower bit of the second code of a row, in its first byte
_UPPER = 0xAA  # upper bits of four codes
_BELOW = 2.0**-8  # of a value, to which a bfloat16 below it is as near
_SMALLEST = 2.0**-100  # differences that span less count as none: a step is at least 2^-110


class DeltaMessages(QuantisedMessages):
    """Every message must be opened, once and in order, by the other end: for crossings that neither draw nor skip rows."""

    def __init__(self, lists: Lists, ids: tuple[Tensor, Tensor], spans: Spans | None = None) -> None:
        super().__init__(lists, BITS, ids, spans)
        # Rows as the other end has them, and its rows as they came: float32 [k, F] for each way and rank.
        self._sent: dict[tuple[Direction, int], Tensor] = {}
        self._held: dict[tuple[Direction, int], Tensor] = {}
        self.num_rows = 0  # that left when the other end held them already
        self.num_moved: int | Tensor = 0  # of these, as differences

    @property
    def share_moved(self) -> float:
        """Of the rows that left, those that crossed as differences."""
        return float(self.num_moved) / max(self.num_rows, 1)

    def packed(self, direction: Direction, rows: Tensor, ids: Tensor | None, rank: int, to: int) -> Tensor:
        values = (rows if ids is None else taken(rows, ids)).float()
        held = self._sent.get((direction, to))
        codec = self._made(direction, "leaving", rows.shape[1])[to]
        if held is None or not values.numel():
            message = super().packed(direction, values, None, rank, to)
            self._sent[direction, to] = codec.decode(message)
            return message
        held = held.to(values.device)  # a continued run has it where it was read
        leaves, is_moved = _narrower(values, held)
        self.num_rows, self.num_moved = self.num_rows + len(values), self.num_moved + is_moved.sum()
        message = super().packed(direction, leaves, None, rank, to)
        self._sent[direction, to] = _add(codec.decode(message, out=leaves), is_moved, held)
        _mark(message, codec, is_moved)
        return message

    def opened(self, direction: Direction, piece: Tensor, source: int, like: Tensor) -> Tensor:
        if not piece.numel():
            return like[:0]
        codec = self._made(direction, "arriving", like.shape[1])[source]
        plain = piece.clone()  # ranks that are threads may share it
        is_moved = _unmark(plain, codec)
        arrived, held = codec.decode(plain), self._held.get((direction, source))
        if held is not None:
            _add(arrived, is_moved, held.to(arrived.device))
        elif bool(is_moved.any()):
            raise InputError(
                f"rank {source} sends differences to rows of layer {self.spans.layer} that never came: a message is damaged"
            )
        self._held[direction, source] = arrived
        return arrived.to(like.dtype)

    def opener(self, direction: Direction, like: Tensor) -> Callable[[list[Tensor]], list[Tensor]]:
        is_open = False

        def opened(pieces: list[Tensor]) -> list[Tensor]:
            nonlocal is_open
            if is_open:  # a forward pass that is computed again, in the same step
                return [self._again(direction, piece, source, like) for source, piece in enumerate(pieces)]
            is_open = True
            with self.spans.span("dequantise", direction):
                return [self.opened(direction, piece, source, like) for source, piece in enumerate(pieces)]

        return opened

    def _again(self, direction: Direction, piece: Tensor, source: int, like: Tensor) -> Tensor:
        return self._held[direction, source].to(like.dtype) if piece.numel() else like[:0]

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must keep: all that both ends hold. Nothing may be under way."""
        both = {"sent": self._sent, "held": self._held}
        return {
            f"{name}.{way}.{rank}": rows.clone()  # a stale halo has the same rows, and would save them twice as one
            for name, each in both.items()
            for (way, rank), rows in each.items()
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Put back what ``state`` gave."""
        both: dict[str, dict[tuple[Direction, int], Tensor]] = {"sent": {}, "held": {}}
        for name, rows in tensors.items():
            which, way, rank = name.split(".")
            both[which][way, int(rank)] = rows  # type: ignore[index]
        self._sent, self._held = both["sent"], both["held"]


def _narrower(values: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
    """(rows [k, F], a new matrix: of each the difference to what is held, or itself if that spans less; which: bool [k])."""
    moved = values - held
    span = _spans(moved)
    is_moved = span < _spans(values)  # not so where one is not finite
    is_nothing = span < _SMALLEST
    if bool(is_nothing.any()):
        moved[is_nothing] = 0.0
    return (moved if bool(is_moved.all()) else torch.where(is_moved[:, None], moved, values)), is_moved


def _spans(rows: Tensor) -> Tensor:
    """[k]: what is cut into steps of each row, which begin below its smallest value; 0 of a constant one: it is exact."""
    low = rows.amin(1)
    span = rows.amax(1) - low
    return torch.where(span == 0, span, span + _BELOW * low.abs())


def _add(rows: Tensor, is_moved: Tensor, held: Tensor) -> Tensor:
    """rows [k, F], held [k, F] added to those that are differences, in place: the same bits at both ends."""
    return rows.addcmul_(held, is_moved[:, None].to(rows))


def _mark(message: Tensor, codec: MixedCodec, is_moved: Tensor) -> None:
    """Say in a message which rows are differences (bool [k]); in place."""
    first, signs, _ = _places(message, codec)
    is_constant = signs >= _SIGN
    first.bitwise_or_((is_moved & is_constant).to(torch.uint8) * _SECOND)
    signs.bitwise_or_(is_moved.to(torch.uint8) * _SIGN)


def _unmark(message: Tensor, codec: MixedCodec) -> Tensor:
    """bool [k]: what ``_mark`` said; the message is as it was before, in place."""
    if message.numel() != codec.num_bytes:  # ``decode`` says what is wrong
        return torch.zeros(codec.num_rows, dtype=torch.bool, device=message.device)
    first, signs, is_constant = _places(message, codec)
    has_sign, has_second = signs >= _SIGN, first.bitwise_and(_SECOND) > 0
    is_moved = has_sign & (~is_constant | has_second)
    first.bitwise_and_(~((is_moved & is_constant).to(torch.uint8) * _SECOND))
    signs.bitwise_and_(~((is_moved & ~is_constant).to(torch.uint8) * _SIGN))
    return is_moved


def _places(message: Tensor, codec: MixedCodec) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 [k], to be written to: the first byte of each row's codes, the byte of its step with the sign; bool [k]: whether
    no code is above 1. Codes come first, steps, 2 bytes each, last."""
    k, size = codec.num_rows, -(-codec.num_columns * BITS // 8)
    codes = message[: k * size].view(k, size)
    steps = message[message.numel() - 2 * k :].view(k, 2)
    return codes[:, 0], steps[:, 1], ~(codes.bitwise_and(_UPPER) > 0).any(1)
