"""Ascending ids as few bytes, for messages between ranks: the first id, then differences, each as a LEB128 varint.

A varint has 7 bits a byte, the lowest first; the high bit says that more follow. Ids are below 2^63: at most 9 bytes each.
Bytes to decode come from another machine: whatever they hold, the result is the ids that encode to exactly them, or an
InputError.

Legend: n ids, B bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhop.errors import InputError
from polyhop.kernels import checks, native

__all__ = ["decode", "encode", "size"]

_ENDS_EARLY, _NOT_MINIMAL, _TOO_LARGE = -2, -3, -4
_MOST_BYTES = 9


def size(ids: Tensor) -> int:
    """Bytes that ``encode(ids)`` has; InputError unless ids (int64 [n]) are ascending, ties allowed, and at least 0."""
    checks.require(
        ids.dim() == 1 and ids.dtype == torch.int64,
        f"varint: ids must be int64 [n], got {ids.dtype} {list(ids.shape)}",
    )
    if not native.serves(ids, op="ph_varint_size"):
        return int(_lengths(_steps(ids)).sum())
    where = torch.zeros(1, dtype=torch.int64)
    total = native.call("ph_varint_size", ids.contiguous(), ids.numel(), where)
    if total < 0:
        raise _falls(ids, int(where))
    return total


def encode(ids: Tensor) -> Tensor:
    """uint8 [B]: ids (int64 [n], ascending, ties allowed, at least 0) as varints of their differences."""
    total = size(ids)
    if not native.serves(ids, op="ph_varint_encode"):
        return _encode_reference(_steps(ids))
    out = torch.empty(total, dtype=torch.uint8)
    native.call("ph_varint_encode", ids.contiguous(), ids.numel(), out)
    return out


def decode(data: Tensor, count: int) -> Tensor:
    """int64 [count]: the ids that ``encode`` turned into data (uint8 [B]); InputError if there are no such ids."""
    checks.require(
        data.dim() == 1 and data.dtype == torch.uint8,
        f"varint: data must be uint8 [B], got {data.dtype} {list(data.shape)}",
    )
    # Before there is memory for the ids: a wrong count may be anything.
    checks.require(
        0 <= count <= data.numel(),
        f"varint: {count} ids cannot be in {data.numel()} bytes, at least one each",
    )
    if not native.serves(data, op="ph_varint_decode"):
        return _decode_reference(data, count)
    ids, where = torch.empty(count, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    used = native.call("ph_varint_decode", data.contiguous(), data.numel(), count, ids, where)
    if used < 0:
        raise _broken(used, data, int(where), count)
    if used < data.numel():
        raise _left_over(data, used, count)
    return ids


def _falls(ids: Tensor, at: int) -> InputError:
    if at == 0:
        return InputError(f"varint: ids[0] = {int(ids[0])}, expected ids of at least 0")
    return InputError(
        f"varint: ids[{at}] = {int(ids[at])} after {int(ids[at - 1])}, expected ascending ids; sort them"
    )


def _broken(status: int, data: Tensor, at: int, count: int) -> InputError:
    what = {
        _ENDS_EARLY: "the bytes end before it does",
        _NOT_MINIMAL: "a zero byte at its end that encoding does not write",
        _TOO_LARGE: "beyond 2^63 - 1",
    }[status]
    return InputError(f"varint: no {count} ids in these {data.numel()} bytes: id {at}: {what}")


def _left_over(data: Tensor, used: int, count: int) -> InputError:
    return InputError(f"varint: {count} ids end after {used} of {data.numel()} bytes, expected no others")


def _steps(ids: Tensor) -> Tensor:
    """int64 [n]: differences from the id before, the first from 0."""
    before = torch.cat([ids.new_zeros(1), ids])[: ids.numel()]
    bad = (ids < before).nonzero()
    if bad.numel():
        raise _falls(ids, int(bad[0]))
    return ids - before


def _lengths(steps: Tensor) -> Tensor:
    """int64 [n]: bytes of each varint."""
    limits = torch.tensor([1 << 7 * k for k in range(1, _MOST_BYTES)], device=steps.device)
    return 1 + (steps[:, None] >= limits).sum(1)


def _encode_reference(steps: Tensor) -> Tensor:
    lengths = _lengths(steps)
    value = torch.repeat_interleave(steps, lengths)
    place = torch.arange(value.numel(), device=steps.device) - torch.repeat_interleave(
        lengths.cumsum(0) - lengths, lengths
    )
    is_last = place == torch.repeat_interleave(lengths, lengths) - 1
    return (((value >> 7 * place) & 0x7F) | torch.where(is_last, 0, 0x80)).to(torch.uint8)


def _decode_reference(data: Tensor, count: int) -> Tensor:
    bits = data.long()
    is_last = bits < 0x80
    ends = is_last.nonzero()[:count, 0] + 1  # one past the last byte of each id
    begins = torch.cat([ends.new_zeros(1), ends])[: ends.numel()]
    lengths = ends - begins
    too_long = lengths > _MOST_BYTES
    not_minimal = (lengths > 1) & (bits[ends - 1] == 0)
    used = int(lengths.sum())
    which = torch.repeat_interleave(torch.arange(ends.numel(), device=data.device), lengths)
    shift = 7 * (torch.arange(used, device=data.device) - begins[which])
    part = (bits[:used] & 0x7F) << shift.clamp(max=7 * (_MOST_BYTES - 1))
    ids = torch.zeros_like(ends).index_add(0, which, part).cumsum(0)
    for status, bad in ((_TOO_LARGE, too_long), (_NOT_MINIMAL, not_minimal), (_TOO_LARGE, ids < 0)):
        if bool(bad.any()):
            raise _broken(status, data, int(bad.nonzero()[0]), count)
    if ends.numel() < count:
        raise _broken(_ENDS_EARLY, data, ends.numel(), count)
    if used < data.numel():
        raise _left_over(data, used, count)
    return ids
