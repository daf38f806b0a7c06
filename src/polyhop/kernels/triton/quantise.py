"""Rows as few bits on the device: the bytes of ``csrc/ops/quantise.cpp``, which says how a message is made.

Widths of rows are counted first, which tells the length of the message; where all rows have one width, a row's place follows
from its number, otherwise from running sums.

Legend: n rows of a matrix, k rows of a message, F columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from polyhop.kernels.triton.philox import key_words, lanes_of_groups, philox_of_ids

__all__ = ["count_widths", "dequantise_rows", "quantise_rows"]

_VALUES = 1024  # of a program: 8 of each thread
_WIDTHS = 4096  # that a program counts


@triton.jit(do_not_specialize=["num_rows"])
def _count(bits, counts, num_rows, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < num_rows
    b = tl.load(bits + at, mask=ok, other=1).to(tl.int32)
    for power in tl.static_range(6):
        tl.atomic_add(counts + power, tl.sum(((b == (1 << power)) & ok).to(tl.int64), 0))
    is_known = (b > 0) & (b <= 32) & ((b & (b - 1)) == 0)
    tl.atomic_min(counts + 6, tl.min(tl.where(is_known, num_rows, at), 0))


def count_widths(bits: Tensor) -> tuple[dict[int, int], int]:
    """(rows of each width 1 .. 32, the first row whose width is none of these or -1) of bits uint8 [k].

    Waits for the device, once for the same bits: they are kept as long as the tensor lives.
    """
    version = None if bits.is_inference() else bits._version
    known = _known.get(bits)
    if known is not None and version is not None and known[0] == version:
        return known[1], known[2]
    found, bad = _counted(bits)
    if version is not None:
        _known[bits] = (version, found, bad)
    return found, bad


_known = WeakTensorKeyDictionary()


def _counted(bits: Tensor) -> tuple[dict[int, int], int]:
    counts = torch.zeros(7, dtype=torch.int64, device=bits.device)
    counts[6] = bits.numel()
    if bits.numel():
        _count[(triton.cdiv(bits.numel(), _WIDTHS),)](bits, counts, bits.numel(), BLOCK=_WIDTHS, num_warps=4)
    *found, bad = counts.tolist()
    return {1 << power: count for power, count in enumerate(found)}, -1 if bad == bits.numel() else bad


@triton.jit
def _larger(a, b):
    """The larger, or NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _place(row, codes_at, params_at, row_bytes, ok, UNIFORM: tl.constexpr):
    """(byte of a row's codes, number of its parameters)."""
    if UNIFORM:
        at, params = row * row_bytes, row
    else:
        at, params = tl.load(codes_at + row, mask=ok, other=0), tl.load(params_at + row, mask=ok, other=0)
    return at, params


@triton.jit
def _put_bytes(message, at, values, ok, NUM: tl.constexpr):
    """The NUM lowest bytes of values (int32, any shape), the lowest first."""
    for b in tl.static_range(NUM):
        tl.store(message + at + b, ((values >> (8 * b)) & 0xFF).to(tl.uint8), mask=ok)


@triton.jit
def _paired(codes, PER: tl.constexpr, W: tl.constexpr, BLOCK_R: tl.constexpr):
    """[R, n / PER]: PER neighbours of [R, n], of W bits each, as one number, the first lowest."""
    for power in tl.static_range(3):
        if (1 << power) < PER:
            first, second = tl.split(tl.reshape(codes, (BLOCK_R, codes.shape[1] // 2, 2)))
            codes = first | (second << (W << power))
    return codes


@triton.jit
def _step_bits(high, zero, TOP: tl.constexpr):
    """uint32: bits of the smallest bfloat16 that is no less than (high - zero) / TOP, taken in float64, and than 2^-110."""
    about = (high - zero) * (1.0 / TOP)
    least = tl.maximum(about * (1.0 - 2.0**-20), 2.0**-110).to(tl.uint32, bitcast=True)
    most = tl.maximum(about * (1.0 + 2.0**-20), 2.0**-110).to(tl.uint32, bitcast=True)
    step_bits = (least + 0xFFFF) >> 16
    is_close = step_bits != ((most + 0xFFFF) >> 16)
    if tl.max(is_close.to(tl.int32), 0) > 0:  # float32 does not tell; one row in 2,000 of random ones
        wanted = (high.to(tl.float64) - zero.to(tl.float64)) / TOP
        step = wanted.to(tl.float32)
        above = (step.to(tl.uint32, bitcast=True) + 1).to(tl.float32, bitcast=True)
        step = tl.maximum(tl.where(step.to(tl.float64) < wanted, above, step), 2.0**-110)
        step_bits = tl.where(is_close, (step.to(tl.uint32, bitcast=True) + 0xFFFF) >> 16, step_bits)
    return step_bits


@triton.jit
def _round(
    x, low, high, is_mine, col, lanes, message, at, params, zeros_at, steps_at, width,
    W: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Rows of W <= 8 bits: codes, zeros and steps."""
    TOP: tl.constexpr = (1 << W) - 1
    PER: tl.constexpr = 8 // W
    low_bits = low.to(tl.uint32, bitcast=True)
    zero_bits = tl.where(low < 0, low_bits + 0xFFFF, low_bits) >> 16
    zero = (zero_bits << 16).to(tl.float32, bitcast=True)
    step_bits = _step_bits(high, zero, TOP)
    step = (step_bits << 16).to(tl.float32, bitcast=True)
    scale = tl.div_rn(step * 0 + 65536.0, step)
    level = (x - zero[:, None]) * scale[:, None]
    # To nearest, ties to even: from 2^23 on a float is whole.
    level = tl.where(level < 8388608.0, (level + 8388608.0) - 8388608.0, level)
    fixed = tl.minimum(level, (TOP << 16) * 1.0).to(tl.int32)
    is_constant = low == high
    lowest = (low_bits & 1).to(tl.int32)
    codes = tl.where(
        is_constant[:, None], tl.where(col[None, :] == 0, lowest[:, None], 0), (fixed + lanes) >> 16
    )
    codes = tl.where((col < width)[None, :], codes, 0)
    packed = codes
    if W <= 4:
        packed = _paired(packed, 8 // W, W, BLOCK_R)
    byte = tl.arange(0, BLOCK_F // PER)
    ok = is_mine[:, None] & (byte < (width * W + 7) // 8)[None, :]
    tl.store(message + at[:, None] + byte[None, :], packed.to(tl.uint8), mask=ok)
    zeros = tl.where(is_constant, low_bits >> 16, zero_bits).to(tl.int32)
    steps = tl.where(is_constant, 0x8000 | ((low_bits & 0xFFFF) >> 1), step_bits).to(tl.int32)
    _put_bytes(message, zeros_at + 2 * params, zeros, is_mine, 2)
    _put_bytes(message, steps_at + 2 * params, steps, is_mine, 2)


@triton.jit(do_not_specialize=["num_sent", "num_rows", "zeros_at", "steps_at", "k0", "k1"])
def _encode(
    h, rows, ids, bits, codes_at, params_at, message, ranges, bad, num_sent, num_rows, width, row_bytes,
    zeros_at, steps_at, k0, k1,
    UNIFORM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = tl.arange(0, BLOCK_F)
    ok = place < num_sent
    at, params = _place(place, codes_at, params_at, row_bytes, ok, UNIFORM)
    b = tl.load(bits + place, mask=ok, other=1).to(tl.int32)
    row = place if rows is None else tl.load(rows + place, mask=ok, other=0)
    is_there = ok & (row >= 0) & (row < num_rows)
    some = is_there[:, None] & (col < width)[None, :]
    x = tl.load(h + row[:, None] * width + col[None, :], mask=some, other=0.0).to(tl.float32)
    limit = tl.where(b == 32, float("inf"), 2.0**126)
    low = tl.min(tl.where(some, x, float("inf")), 1) + 0.0  # the smallest of 0 and -0 is 0
    high = tl.reduce(tl.where(some, x, float("-inf")), 1, _larger)
    low, high = tl.where(width > 0, low, 0.0), tl.where(width > 0, high, 0.0)
    is_good = is_there & (low > -limit) & (high < limit)  # NaN is neither
    tl.atomic_min(bad + place * 0, place, mask=ok & (is_good == 0))
    if ranges is not None:
        tl.store(ranges + place, high - low, mask=is_good)
    if UNIFORM <= 8:
        name = place if ids is None else tl.load(ids + place, mask=ok, other=0)
        group = tl.arange(0, BLOCK_F // 8).to(tl.int64)
        zero = tl.zeros([BLOCK_R, BLOCK_F // 8], tl.int64)
        w0, w1, w2, w3 = philox_of_ids(k0, k1, name[:, None] + zero, group[None, :] + zero)
        lanes = lanes_of_groups(w0, w1, w2, w3)
    for power in tl.static_range(4):
        if UNIFORM == 0 or UNIFORM == (1 << power):  # noqa: SIM300
            is_mine = is_good & (b == (1 << power))
            if UNIFORM or tl.max(is_mine.to(tl.int32), 0) > 0:
                _round(
                    x, low, high, is_mine, col, lanes, message, at, params, zeros_at, steps_at, width, 1 << power,
                    BLOCK_R, BLOCK_F,
                )  # fmt: skip
    if UNIFORM == 0 or UNIFORM == 16:
        whole = x.to(tl.int32, bitcast=True)
        halves = (whole + 0x7FFF + ((whole >> 16) & 1)) >> 16  # bfloat16, ties to even
        _put_bytes(message, at[:, None] + 2 * col[None, :], halves, some & (is_good & (b == 16))[:, None], 2)
    if UNIFORM == 0 or UNIFORM == 32:
        words = x.to(tl.int32, bitcast=True)
        _put_bytes(message, at[:, None] + 4 * col[None, :], words, some & (is_good & (b == 32))[:, None], 4)


@triton.jit
def _take_bytes(message, at, ok, NUM: tl.constexpr):
    """int32 of NUM bytes, the lowest first."""
    value = tl.load(message + at, mask=ok, other=0).to(tl.int32)
    for b in tl.static_range(1, NUM):
        value |= tl.load(message + at + b, mask=ok, other=0).to(tl.int32) << (8 * b)
    return value


@triton.jit(do_not_specialize=["num_sent", "zeros_at", "steps_at"])
def _decode(
    message, bits, codes_at, params_at, out, bad, num_sent, width, row_bytes, zeros_at, steps_at,
    UNIFORM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = tl.arange(0, BLOCK_F)
    ok = place < num_sent
    at, params = _place(place, codes_at, params_at, row_bytes, ok, UNIFORM)
    some = ok[:, None] & (col < width)[None, :]
    b = tl.load(bits + place, mask=ok, other=1).to(tl.int32)
    values = tl.zeros([BLOCK_R, BLOCK_F], tl.float32)
    is_bad = place < 0
    if UNIFORM <= 8:
        is_coded = ok & (b <= 8)
        if UNIFORM:
            PER: tl.constexpr = 8 // UNIFORM
            byte = tl.arange(0, BLOCK_F // PER)
            held = ok[:, None] & (byte < row_bytes)[None, :]
            packed = tl.load(message + at[:, None] + byte[None, :], mask=held, other=0).to(tl.int32)
            shift = tl.arange(0, PER) * UNIFORM
            codes = (packed[:, :, None] >> shift[None, None, :]) & ((1 << UNIFORM) - 1)
            codes = tl.reshape(codes, (BLOCK_R, BLOCK_F))
        else:
            bit = col[None, :] * b[:, None]
            packed = tl.load(message + at[:, None] + (bit >> 3), mask=some & is_coded[:, None], other=0).to(
                tl.int32
            )
            codes = (packed >> (bit & 7)) & ((1 << tl.minimum(b, 8)) - 1)[:, None]
        zero_bits = _take_bytes(message, zeros_at + 2 * params, is_coded, 2)
        step_bits = _take_bytes(message, steps_at + 2 * params, is_coded, 2)
        zero = (zero_bits << 16).to(tl.float32, bitcast=True)
        step = (step_bits << 16).to(tl.float32, bitcast=True)
        top = ((1 << tl.minimum(b, 8)) - 1).to(tl.float32)
        is_good = (tl.abs(zero) <= 2.0**126) & (step >= 2.0**-110) & (step * top + zero < 2.0**127)
        lowest = tl.load(message + at, mask=is_coded & (width > 0), other=0).to(tl.int32) & 1
        constant = ((zero_bits << 16) | ((step_bits & 0x7FFF) << 1) | lowest).to(tl.float32, bitcast=True)
        is_constant = step_bits >= 0x8000
        is_bad = is_coded & (tl.where(is_constant, tl.abs(constant) < 2.0**126, is_good) == 0)
        levels = codes.to(tl.float32) * step[:, None] + zero[:, None]
        values = tl.where(is_constant[:, None], constant[:, None], levels)
    if UNIFORM == 0 or UNIFORM == 16:
        mine = some & (b == 16)[:, None]
        halves = _take_bytes(message, at[:, None] + 2 * col[None, :], mine, 2)
        values = tl.where((b == 16)[:, None], (halves << 16).to(tl.float32, bitcast=True), values)
    if UNIFORM == 0 or UNIFORM == 32:
        mine = some & (b == 32)[:, None]
        words = _take_bytes(message, at[:, None] + 4 * col[None, :], mine, 4)
        values = tl.where((b == 32)[:, None], words.to(tl.float32, bitcast=True), values)
    if UNIFORM == 0 or UNIFORM > 8:
        is_finite = tl.min(((tl.abs(values) < float("inf")) | (some == 0)).to(tl.int32), 1) == 1
        is_bad = is_bad | (ok & (b > 8) & (is_finite == 0))
    tl.atomic_min(bad + place * 0, place, mask=is_bad)
    tl.store(out + place[:, None] * width + col[None, :], values.to(out.dtype.element_ty), mask=some)


def _layout(
    bits: Tensor, counts: dict[int, int], width: int
) -> tuple[int, Tensor | None, Tensor | None, int, int]:
    """(the one width or 0, bytes before each row's codes, parameters before each row's, byte of the zeros, of the steps)."""
    codes = sum(count * ((width * b + 7) // 8) for b, count in counts.items())
    params = sum(count for b, count in counts.items() if b <= 8)
    uniform = next((b for b, count in counts.items() if count == bits.numel()), 0)
    if uniform:
        return uniform, None, None, codes, codes + 2 * params
    each = (bits.long() * width + 7) // 8
    has_params = (bits <= 8).long()
    return uniform, each.cumsum(0) - each, has_params.cumsum(0) - has_params, codes, codes + 2 * params


def _row_bytes(h: Tensor, uniform: int) -> int:
    """Bytes of a row's codes where all rows have one width; 0 otherwise."""
    return (h.shape[1] * uniform + 7) // 8


def _consts(width: int) -> dict[str, Any]:
    block = max(16, triton.next_power_of_2(width))
    rows = max(1, _VALUES // block)
    return {
        "BLOCK_R": rows,
        "BLOCK_F": block,
        "num_warps": max(4, min(16, block // 512)),
        "enable_fp_fusion": False,
    }


def quantise_rows(
    h: Tensor, bits: Tensor, counts: dict[int, int], key: int, rows: Tensor | None, ids: Tensor | None, message: Tensor,
    ranges: Tensor | None,
) -> int:  # fmt: skip
    """Write the message uint8 of rows int64 [k] of h [n, F] in bits uint8 [k], of which there are ``counts``.

    Gives the first bad row, or -1; waits for the device, to know.
    """
    if bits.numel() == 0:
        return -1
    uniform, codes_at, params_at, zeros_at, steps_at = _layout(bits, counts, h.shape[1])
    bad = torch.full((1,), bits.numel(), dtype=torch.int64, device=h.device)
    consts = _consts(h.shape[1])
    _encode[(triton.cdiv(bits.numel(), consts["BLOCK_R"]),)](
        h, rows, ids, bits, codes_at, params_at, message, ranges, bad, bits.numel(), *h.shape, _row_bytes(h, uniform),
        zeros_at, steps_at, *key_words(key), UNIFORM=uniform, **consts,
    )  # fmt: skip
    return _place_of(bad, bits.numel())


def dequantise_rows(message: Tensor, bits: Tensor, counts: dict[int, int], out: Tensor) -> int:
    """Write the rows of a message to out [k, F]; gives the first row that no encoder writes, or -1. Waits for the device."""
    if bits.numel() == 0:
        return -1
    uniform, codes_at, params_at, zeros_at, steps_at = _layout(bits, counts, out.shape[1])
    bad = torch.full((1,), bits.numel(), dtype=torch.int64, device=out.device)
    consts = _consts(out.shape[1])
    _decode[(triton.cdiv(bits.numel(), consts["BLOCK_R"]),)](
        message, bits, codes_at, params_at, out, bad, bits.numel(), out.shape[1], _row_bytes(out, uniform), zeros_at,
        steps_at, UNIFORM=uniform, **consts,
    )  # fmt: skip
    return _place_of(bad, bits.numel())


def _place_of(bad: Tensor, num_rows: int) -> int:
    first = int(bad)
    return -1 if first == num_rows else first
