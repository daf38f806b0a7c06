"""Rows as few bits, for messages between ranks: stochastic rounding of each row to 2^b levels between its ends.

    zero = bfloat16(min) rounded down                         parameters first: both ends use these
    step = bfloat16((max - zero) / (2^b - 1)) rounded up
    code = floor((h - zero) / step + u)                       u in [0, 1), so that the mean of
    row  = zero + step * code                                 what arrives is h

A message mixes rows of 1, 2, 4 and 8 bits, 16 (bfloat16 to nearest) and 32 (float32, as are the sums: float64 is rounded
first): the rows' codes one after another, ceil(F b / 8) bytes each, code c in bits [c b, (c + 1) b), low end first; then the
zeros of the rows of up to 8 bits, then their steps: 4 bytes a row. Constant rows arrive exactly (csrc/ops/quantise.cpp says
how). u is the 16-bit lane c % 8 of philox(key, ids[r], c // 8): a pure function, the same for any thread count and device.

Bytes to decode come from another machine: whatever they hold, the result is finite rows or an InputError.

Legend: n rows of a matrix, k rows of a message, F columns, B bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhop.errors import InputError
from polyhop.kernels import checks, device, native, reference

__all__ = ["NotFiniteError", "dequantise_rows", "quantise_rows", "quantised_bytes", "quantised_row_bytes"]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


class NotFiniteError(InputError):
    """A row that cannot be quantised. ``row`` is its place in the message, for a caller that knows where it comes from."""

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row


def quantised_bytes(bits: Tensor, num_columns: int) -> int:
    """Bytes of a message of rows with widths ``bits`` (uint8 [k]); InputError naming the first width that there is not."""
    checks.require(
        bits.dim() == 1 and bits.dtype == torch.uint8,
        f"quantise: bits must be uint8 [k], got {bits.dtype} {list(bits.shape)}",
    )
    checks.require(num_columns >= 0, f"quantise: num_columns must be at least 0, got {num_columns}")
    if device.serves(bits):
        counts, bad = _counts(bits)
        total = _total(counts, num_columns) if bad < 0 else -1
    elif not native.serves(bits, op="ph_quantised_bytes"):
        bad = reference.quantise_bad_bits(bits)
        total = int(quantised_row_bytes(bits, num_columns).sum()) if bad < 0 else -1
    else:
        where = torch.zeros(1, dtype=torch.int64)
        total = native.call("ph_quantised_bytes", bits.contiguous(), bits.numel(), num_columns, where)
        bad = int(where)
    if total < 0:
        known = ", ".join(map(str, reference.WIDTHS))
        raise InputError(f"quantise: bits[{bad}] = {int(bits[bad])}, expected one of {known}")
    return total


def _counts(bits: Tensor) -> tuple[dict[int, int], int]:
    from polyhop.kernels.triton.quantise import count_widths

    return count_widths(bits if bits.is_contiguous() else bits.contiguous())


def _total(counts: dict[int, int], num_columns: int) -> int:
    return sum(count * ((num_columns * b + 7) // 8 + 4 * (b <= 8)) for b, count in counts.items())


def quantised_row_bytes(bits: Tensor, num_columns: int) -> Tensor:
    """int64 [k]: what each row with widths ``bits`` (uint8 [k]) adds to a message, parameters included."""
    return reference.quantise_code_bytes(bits, num_columns) + 4 * (bits <= 8)


def quantise_rows(
    h: Tensor,
    bits: Tensor,
    key: int,
    *,
    rows: Tensor | None = None,
    ids: Tensor | None = None,
    ranges: Tensor | None = None,
) -> Tensor:
    """uint8 [B]: rows ``rows`` (int64 [k]; None = all) of h [n, F] in ``bits`` (uint8 [k]) bits a value.

    ``ids`` (int64 [k]; None = 0 .. k-1) name the rows for the random rounding; ``ranges`` (float32 [k]), if given, receives
    max - min of each row. A row with NaN or infinity in it, or with a value of 2^126 or more (2^128 at 32 bits), is a
    NotFiniteError.
    """
    total = _check(h, bits, rows, ids, ranges)
    h = h.detach()
    if device.serves(h, bits, rows, ids, ranges):
        message, bad = _on_device(h.contiguous(), bits.contiguous(), key, total, rows, ids, ranges)
    elif not native.serves(h, bits, rows, ids, ranges, op="ph_quantise_rows"):
        if rows is not None:
            _check_rows(rows, h.shape[0])
        names = torch.arange(bits.numel(), device=h.device) if ids is None else ids
        message, bad = reference.quantise_rows(h, bits, key, rows, names, ranges)
    else:
        h, rows = h.contiguous(), None if rows is None else rows.contiguous()
        message = torch.empty(total, dtype=torch.uint8)
        bad = native.call(
            "ph_quantise_rows", h, native.float_code(h), h.shape[0], h.shape[1], rows,
            None if ids is None else ids.contiguous(), bits.contiguous(), bits.numel(), key, message, ranges,
            native.num_threads(),
        )  # fmt: skip
    if bad >= 0:
        raise _not_encoded(h, bits, rows, bad)
    return message


def _on_device(
    h: Tensor,
    bits: Tensor,
    key: int,
    total: int,
    rows: Tensor | None,
    ids: Tensor | None,
    ranges: Tensor | None,
) -> tuple[Tensor, int]:
    from polyhop.kernels.triton import quantise

    message = torch.empty(total, dtype=torch.uint8, device=h.device)
    counts, _ = quantise.count_widths(bits)
    rows, ids = (None if t is None else t.contiguous() for t in (rows, ids))
    return message, quantise.quantise_rows(h, bits, counts, key, rows, ids, message, ranges)


def dequantise_rows(
    message: Tensor,
    bits: Tensor,
    num_columns: int,
    *,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:
    """[k, F]: the rows of a message (uint8 [B]) of widths ``bits`` (uint8 [k]); written to ``out`` if given.

    InputError if the message has not the length that the widths ask for, or holds what no encoder writes.
    """
    total, num_rows = quantised_bytes(bits, num_columns), bits.numel()
    checks.require(
        message.dim() == 1 and message.dtype == torch.uint8,
        f"dequantise_rows: message must be uint8 [B], got {message.dtype} {list(message.shape)}",
    )
    checks.require(
        message.numel() == total,
        f"dequantise_rows: {message.numel()} bytes, expected {total} for {num_rows} rows of {num_columns} columns in "
        "the given bits; the message is cut or is another",
    )
    dtype = dtype if out is None else out.dtype
    checks.require(dtype in _DTYPES, f"dequantise_rows: dtype must be one of {_names()}, got {dtype}")
    checks.require(
        out is None or (list(out.shape) == [num_rows, num_columns] and out.is_contiguous()),
        f"dequantise_rows: out must be contiguous {[num_rows, num_columns]}, got "
        f"{None if out is None else list(out.shape)}",
    )
    checks.same_device("dequantise_rows", message=message, bits=bits, out=out)
    if device.serves(message, bits, out):
        from polyhop.kernels.triton import quantise

        out = torch.empty(num_rows, num_columns, dtype=dtype, device=message.device) if out is None else out
        counts, _ = quantise.count_widths(bits.contiguous())
        bad = quantise.dequantise_rows(message.contiguous(), bits.contiguous(), counts, out.detach())
    elif not native.serves(message, bits, out, op="ph_dequantise_rows"):
        decoded, bad = reference.dequantise_rows(message, bits, num_columns)
        out = decoded.to(dtype) if out is None else out.copy_(decoded)
    else:
        out = torch.empty(num_rows, num_columns, dtype=dtype) if out is None else out
        bad = native.call(
            "ph_dequantise_rows", message.contiguous(), bits.contiguous(), num_rows, num_columns, out.detach(),
            native.float_code(out), native.num_threads(),
        )  # fmt: skip
    if bad >= 0:
        what = "a value that is not finite" if int(bits[bad]) > 8 else "a zero point or step that no row has"
        raise InputError(f"dequantise_rows: row {bad} of {num_rows} holds {what}; the message is damaged")
    return out


def _check(h: Tensor, bits: Tensor, rows: Tensor | None, ids: Tensor | None, ranges: Tensor | None) -> int:
    """Bytes of the message, or InputError."""
    checks.require(
        h.dim() == 2 and h.dtype in _DTYPES,
        f"quantise_rows: h must be [n, F] of {_names()}, got {h.dtype} {list(h.shape)}",
    )
    total, num_rows = quantised_bytes(bits, h.shape[1]), bits.numel()
    checks.require(
        rows is not None or num_rows == h.shape[0],
        f"quantise_rows: bits must have shape [{h.shape[0]}], one of each row of h, got [{num_rows}]",
    )
    for name, given in (("rows", rows), ("ids", ids), ("ranges", ranges)):
        checks.vector("quantise_rows", name, given, num_rows)
    for name, given in (("rows", rows), ("ids", ids)):
        checks.require(given is None or given.dtype == torch.int64, f"quantise_rows: {name} must be int64")
    checks.require(
        ranges is None or (ranges.dtype == torch.float32 and ranges.is_contiguous()),
        "quantise_rows: ranges must be float32 and contiguous",
    )
    checks.same_device("quantise_rows", h=h, bits=bits, rows=rows, ids=ids, ranges=ranges)
    return total


def _check_rows(rows: Tensor, limit: int) -> None:
    bad = (rows < 0) | (rows >= limit)
    if bool(bad.any()):
        raise _outside(rows, int(bad.nonzero()[0]), limit)


def _outside(rows: Tensor, at: int, limit: int) -> InputError:
    return InputError(f"quantise_rows: rows[{at}] = {int(rows[at])}, outside the {limit} rows of h")


def _not_encoded(h: Tensor, bits: Tensor, rows: Tensor | None, at: int) -> InputError:
    row = at if rows is None else int(rows[at])
    if not 0 <= row < h.shape[0]:
        assert rows is not None
        return _outside(rows, at, h.shape[0])
    limit = reference.quantise_limit(bits[at : at + 1])
    column = int((~(h[row].float().abs() < limit)).nonzero()[0])
    message = (
        f"quantise_rows: h[{row}, {column}] = {float(h[row, column])}, row {at} of the message at {int(bits[at])} bits; "
        f"expected finite values below {float(limit):.3g}"
    )
    return NotFiniteError(message, at)


def _names() -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in _DTYPES)
