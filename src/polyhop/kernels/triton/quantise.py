"""Rows as few bits on the device: the bytes of ``csrc/ops/quantise.cpp``, which says how a message is made.

Widths of rows are counted first, which tells the length of the message; where all rows have one width, a row's place follows
from its number, otherwise from running sums.

Legend: n rows of a matrix, k rows of a message, F columns, Q groups of 8 columns that a program has.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from polyhop.kernels.triton.philox import key_words, lanes_of_words, philox_of_ids

__all__ = ["count_widths", "dequantise_rows", "quantise_rows"]

_VALUES = 1024  # of a program: 8 of each thread
_WIDTHS = 4096  # that a program counts


@triton.jit(do_not_specialize=["num_rows"])
def _count(bits, counts, num_rows, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < num_rows
    b = tl.load(bits + at, mask=ok, other=1).to(tl.int32)
    for power in tl.static_range(6):
        tl.atomic_add(counts + power, tl.sum(((b == (1 << power)) & ok).to(tl.int64), 0), sem="relaxed")
    is_known = (b > 0) & (b <= 32) & ((b & (b - 1)) == 0)
    tl.atomic_min(counts + 6, tl.min(tl.where(is_known, num_rows, at), 0), sem="relaxed")


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
def _ends(least, most, BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr):
    """([Q], [Q]): the smallest and the largest of a row, from those of its groups; NaN is the largest."""
    low = tl.min(tl.reshape(least, (BLOCK_R, BLOCK_G)), 1)
    high = tl.reduce(tl.reshape(most, (BLOCK_R, BLOCK_G)), 1, _larger)
    low = tl.reshape(tl.broadcast_to(low[:, None], (BLOCK_R, BLOCK_G)), (BLOCK_R * BLOCK_G,))
    return low, tl.reshape(tl.broadcast_to(high[:, None], (BLOCK_R, BLOCK_G)), (BLOCK_R * BLOCK_G,))


@triton.jit
def _place(row, codes_at, params_at, row_bytes, ok, UNIFORM: tl.constexpr):
    """(byte of a row's codes, number of its parameters)."""
    if UNIFORM:
        at, params = row.to(tl.int64) * row_bytes, row.to(tl.int64)
    else:
        at, params = tl.load(codes_at + row, mask=ok, other=0), tl.load(params_at + row, mask=ok, other=0)
    return at, params


@triton.jit
def _put(to, words, ok, NUM: tl.constexpr, ALIGN: tl.constexpr):
    """The NUM lowest bytes of words (int32, any shape), the lowest first; at once where addresses are multiples of NUM."""
    if NUM == 4 and ALIGN >= 4:
        tl.store(to.to(tl.pointer_type(tl.int32)), words, mask=ok)
    elif NUM == 2 and ALIGN >= 2:
        tl.store(to.to(tl.pointer_type(tl.int16)), words.to(tl.int16), mask=ok)
    else:
        for b in tl.static_range(NUM):
            tl.store(to + b, ((words >> (8 * b)) & 0xFF).to(tl.uint8), mask=ok)


@triton.jit
def _take(at, ok, NUM: tl.constexpr, ALIGN: tl.constexpr):
    """int32 of NUM bytes, the lowest first."""
    if NUM == 4 and ALIGN >= 4:
        value = tl.load(at.to(tl.pointer_type(tl.int32)), mask=ok, other=0)
    elif NUM == 2 and ALIGN >= 2:
        value = tl.load(at.to(tl.pointer_type(tl.uint16)), mask=ok, other=0).to(tl.int32)
    else:
        value = tl.load(at, mask=ok, other=0).to(tl.int32)
        for b in tl.static_range(1, NUM):
            value |= tl.load(at + b, mask=ok, other=0).to(tl.int32) << (8 * b)
    return value


@triton.jit
def _step_bits(high, zero, TOP: tl.constexpr):
    """uint32: bits of the smallest bfloat16 that is no less than (high - zero) / TOP, taken in float64, and than 2^-110."""
    about = (high - zero) * (1.0 / TOP)
    step_bits = (tl.maximum(about * (1.0 - 2.0**-20), 2.0**-110).to(tl.uint32, bitcast=True) + 0xFFFF) >> 16
    most = (step_bits << 16).to(tl.float32, bitcast=True) * TOP  # exact: 16 bits
    is_less = most.to(tl.float64) < high.to(tl.float64) - zero.to(tl.float64)
    return step_bits + is_less.to(tl.uint32)


@triton.jit
def _codes(x, zero, scale, lanes, W: tl.constexpr):
    """int32 [Q, 4]: (to nearest whole, ties to even, of (x - zero) scale, at most 2^W - 1 levels, + lanes) >> 16."""
    TOP: tl.constexpr = (1 << W) - 1
    level = (x - zero[:, None]) * scale[:, None]
    if W <= 4:
        # Below 2^23 adding that rounds, and leaves the whole number in the float's low bits. Three roundings have put at
        # most 3 x 2^-24 x 15 x 65536 = 0.18 on top of the highest level, which is none after this one.
        codes = (((level + 8388608.0).to(tl.int32, bitcast=True) + lanes) >> 16) & TOP
    else:  # from 2^23 on a float is whole
        level = tl.where(level < 8388608.0, (level + 8388608.0) - 8388608.0, level)
        codes = (tl.minimum(level, (TOP << 16) * 1.0).to(tl.int32) + lanes) >> 16
    return codes


@triton.jit
def _packed(codes, W: tl.constexpr):
    """int32 [Q]: four codes of W bits each, the first lowest."""
    return tl.sum(codes << (W * tl.arange(0, 4))[None, :], 1)


@triton.jit
def _encode_codes(
    x0, x1, lanes0, lanes1, low, high, is_mine, group, message, at, params, zeros_at, steps_at, width,
    W: tl.constexpr, TAIL: tl.constexpr, ALIGN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Rows of W <= 8 bits: codes, zeros and steps. x0 and x1 [Q, 4] are the halves of groups of 8 columns."""
    low_bits = low.to(tl.uint32, bitcast=True)
    zero_bits = tl.where(low < 0, low_bits + 0xFFFF, low_bits) >> 16
    zero = (zero_bits << 16).to(tl.float32, bitcast=True)
    step_bits = _step_bits(high, zero, (1 << W) - 1)
    step = (step_bits << 16).to(tl.float32, bitcast=True)
    is_constant = low == high
    scale = tl.where(is_constant, 0.0, tl.div_rn(step * 0 + 65536.0, step))
    codes0, codes1 = _codes(x0, zero, scale, lanes0, W), _codes(x1, zero, scale, lanes1, W)
    if TAIL:
        left = (width - group * 8)[:, None] - tl.arange(0, 4)[None, :]
        codes0, codes1 = tl.where(left > 0, codes0, 0), tl.where(left > 4, codes1, 0)
    first, second = _packed(codes0, W), _packed(codes1, W)
    first |= tl.where(is_constant & (group == 0), low_bits & 1, 0).to(tl.int32)
    to, some = message + at + group * W, is_mine & (group * 8 < width)
    if TAIL:
        for byte in tl.static_range(W):
            word = first if W == 8 and byte < 4 else second if W == 8 else first | (second << (4 * W))
            ok = some & (group * W + byte < (width * W + 7) // 8)
            tl.store(to + byte, ((word >> (8 * (byte % 4))) & 0xFF).to(tl.uint8), mask=ok)
    elif W == 8:
        _put(to, first, some, 4, ALIGN)
        _put(to + 4, second, some, 4, ALIGN)
    else:
        _put(to, first | (second << (4 * W)), some, W, ALIGN)
    zeros = tl.where(is_constant, low_bits >> 16, zero_bits).to(tl.int32)
    steps = tl.where(is_constant, 0x8000 | ((low_bits & 0xFFFF) >> 1), step_bits).to(tl.int32)
    is_first = is_mine & (group == 0)
    _put(message + zeros_at + 2 * params, zeros, is_first, 2, EVEN)
    _put(message + steps_at + 2 * params, steps, is_first, 2, EVEN)


@triton.jit(do_not_specialize=["num_sent", "num_rows", "zeros_at", "steps_at", "k0", "k1"])
def _encode(
    h, rows, ids, bits, codes_at, params_at, message, ranges, bad, num_sent, num_rows, width, row_bytes,
    zeros_at, steps_at, k0, k1,
    UNIFORM: tl.constexpr, TAIL: tl.constexpr, ALIGN: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """A thread has whole groups, and what is known of their rows; threads of a row meet for its ends alone."""
    q = tl.arange(0, BLOCK_R * BLOCK_G)
    place, group = tl.program_id(0) * BLOCK_R + q // BLOCK_G, q % BLOCK_G
    ok = place < num_sent
    at, params = _place(place, codes_at, params_at, row_bytes, ok, UNIFORM)
    b = tl.load(bits + place, mask=ok, other=1).to(tl.int32)
    row = place.to(tl.int64) if rows is None else tl.load(rows + place, mask=ok, other=0)
    is_there = ok & (row >= 0) & (row < num_rows)
    col = (group * 8)[:, None] + tl.arange(0, 4)[None, :]
    some0 = is_there[:, None] & (col < width)
    some1 = some0 & (col + 4 < width) if TAIL else some0
    from_ = h + (row * width)[:, None] + col
    x0 = tl.load(from_, mask=some0, other=0.0).to(tl.float32)
    x1 = tl.load(from_ + 4, mask=some1, other=0.0).to(tl.float32)
    limit = tl.where(b == 32, float("inf"), 2.0**126)
    if TAIL:
        least = tl.minimum(tl.where(some0, x0, float("inf")), tl.where(some1, x1, float("inf")))
        most = _larger(tl.where(some0, x0, float("-inf")), tl.where(some1, x1, float("-inf")))
    else:
        least, most = tl.minimum(x0, x1), _larger(x0, x1)
    is_read = is_there & (group * 8 < width)
    least = tl.where(is_read, tl.min(least, 1), float("inf"))
    most = tl.where(is_read, tl.reduce(most, 1, _larger), float("-inf"))
    low, high = _ends(least, most, BLOCK_R, BLOCK_G)
    low, high = (
        tl.where(width > 0, low + 0.0, 0.0),
        tl.where(width > 0, high, 0.0),
    )  # the smallest of 0 and -0 is 0
    is_good = is_there & (low > -limit) & (high < limit)  # NaN is neither
    is_first = ok & (group == 0)
    tl.atomic_min(bad + place * 0, place.to(tl.int64), mask=is_first & (is_good == 0), sem="relaxed")
    if ranges is not None:
        tl.store(ranges + place, high - low, mask=is_first & is_good)
    if UNIFORM <= 8:
        name = place.to(tl.int64) if ids is None else tl.load(ids + place, mask=ok, other=0)
        w0, w1, w2, w3 = philox_of_ids(k0, k1, name, group.to(tl.int64))
        lanes0, lanes1 = lanes_of_words(w0, w1), lanes_of_words(w2, w3)
        for power in tl.static_range(4):
            if UNIFORM == 0 or UNIFORM == (1 << power):  # noqa: SIM300
                is_mine = is_good & (b == (1 << power))
                if UNIFORM or tl.max(is_mine.to(tl.int32), 0) > 0:
                    _encode_codes(
                        x0, x1, lanes0, lanes1, low, high, is_mine, group, message, at, params, zeros_at, steps_at,
                        width, 1 << power, TAIL, ALIGN, EVEN,
                    )  # fmt: skip
    for half in tl.static_range(2):
        whole = (x1 if half else x0).to(tl.int32, bitcast=True)
        some = (some1 if half else some0) & is_good[:, None]
        if UNIFORM == 0 or UNIFORM == 16:
            rounded = (whole + 0x7FFF + ((whole >> 16) & 1)) >> 16  # bfloat16, ties to even
            _put(message + at[:, None] + 2 * col + 8 * half, rounded, some & (b == 16)[:, None], 2, ALIGN)
        if UNIFORM == 0 or UNIFORM == 32:
            _put(message + at[:, None] + 4 * col + 16 * half, whole, some & (b == 32)[:, None], 4, ALIGN)


@triton.jit
def _levels(message, at, b, group, ok, some, HALF: tl.constexpr, W: tl.constexpr, ALIGN: tl.constexpr):
    """int32 [Q, 4]: codes of half a group each; W = 0: of b bits [Q], which differ."""
    j = tl.arange(0, 4)[None, :]
    if W == 0:
        bit = (group[:, None] * 8 + j + 4 * HALF) * b[:, None]
        packed = tl.load(message + at[:, None] + (bit >> 3), mask=some, other=0).to(tl.int32)
        codes = (packed >> (bit & 7)) & ((1 << tl.minimum(b, 8)) - 1)[:, None]
    elif W == 8:
        word = _take(message + at + group * 8 + 4 * HALF, ok, 4, ALIGN)
        codes = (word[:, None] >> (8 * j)) & 0xFF
    else:
        word = _take(message + at + group * W, ok, W, ALIGN)
        codes = (word[:, None] >> (W * (j + 4 * HALF))) & ((1 << W) - 1)
    return codes


@triton.jit(do_not_specialize=["num_sent", "zeros_at", "steps_at"])
def _decode(
    message, bits, codes_at, params_at, out, bad, num_sent, width, row_bytes, zeros_at, steps_at,
    UNIFORM: tl.constexpr, TAIL: tl.constexpr, ALIGN: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    q = tl.arange(0, BLOCK_R * BLOCK_G)
    place, group = tl.program_id(0) * BLOCK_R + q // BLOCK_G, q % BLOCK_G
    ok = place < num_sent
    at, params = _place(place, codes_at, params_at, row_bytes, ok, UNIFORM)
    b = tl.load(bits + place, mask=ok, other=1).to(tl.int32)
    is_coded, is_bad = ok & (b <= 8), place < 0
    if UNIFORM <= 8:
        zero_bits = _take(message + zeros_at + 2 * params, is_coded, 2, EVEN)
        step_bits = _take(message + steps_at + 2 * params, is_coded, 2, EVEN)
        zero = (zero_bits << 16).to(tl.float32, bitcast=True)
        step = (step_bits << 16).to(tl.float32, bitcast=True)
        top = ((1 << tl.minimum(b, 8)) - 1).to(tl.float32)
        is_good = (tl.abs(zero) <= 2.0**126) & (step >= 2.0**-110) & (step * top + zero < 2.0**127)
        lowest = tl.load(message + at, mask=is_coded & (width > 0), other=0).to(tl.int32) & 1
        constant = ((zero_bits << 16) | ((step_bits & 0x7FFF) << 1) | lowest).to(tl.float32, bitcast=True)
        is_constant = is_coded & (step_bits >= 0x8000)
        is_bad = is_coded & (tl.where(is_constant, tl.abs(constant) < 2.0**126, is_good) == 0)
        zero, step = tl.where(is_constant, constant, zero), tl.where(is_constant, 0.0, step)
    for half in tl.static_range(2):
        col = (group * 8 + 4 * half)[:, None] + tl.arange(0, 4)[None, :]
        some = ok[:, None] & (col < width)
        values = tl.zeros([BLOCK_R * BLOCK_G, 4], tl.float32)
        if UNIFORM <= 8:
            codes = _levels(
                message, at, b, group, ok & (group * 8 < width), some & is_coded[:, None], half,
                0 if TAIL else UNIFORM, ALIGN,
            )  # fmt: skip
            values = codes.to(tl.float32) * step[:, None] + zero[:, None]
        if UNIFORM == 0 or UNIFORM == 16:
            mine = (b == 16)[:, None]
            halves = _take(message + at[:, None] + 2 * col, some & mine, 2, ALIGN)
            values = tl.where(mine, (halves << 16).to(tl.float32, bitcast=True), values)
        if UNIFORM == 0 or UNIFORM == 32:
            mine = (b == 32)[:, None]
            words = _take(message + at[:, None] + 4 * col, some & mine, 4, ALIGN)
            values = tl.where(mine, words.to(tl.float32, bitcast=True), values)
        tl.store(
            out + (place.to(tl.int64) * width)[:, None] + col, values.to(out.dtype.element_ty), mask=some
        )
        if UNIFORM == 0 or UNIFORM > 8:
            is_finite = tl.min(((tl.abs(values) < float("inf")) | (some == 0)).to(tl.int32), 1) == 1
            is_bad = is_bad | (ok & (b > 8) & (is_finite == 0))
    tl.atomic_min(bad + place * 0, place.to(tl.int64), mask=is_bad, sem="relaxed")


def _layout(
    bits: Tensor, counts: dict[int, int], width: int
) -> tuple[Tensor | None, Tensor | None, int, int, int]:
    """(bytes before each row's codes, parameters before each row's, byte of the zeros, of the steps, the one width or 0)."""
    codes = sum(count * ((width * b + 7) // 8) for b, count in counts.items())
    params = sum(count for b, count in counts.items() if b <= 8)
    uniform = next((b for b, count in counts.items() if count == bits.numel()), 0)
    if uniform:
        return None, None, codes, codes + 2 * params, uniform
    each = (bits.long() * width + 7) // 8
    has_params = (bits <= 8).long()
    return each.cumsum(0) - each, has_params.cumsum(0) - has_params, codes, codes + 2 * params, uniform


def _row_bytes(width: int, uniform: int) -> int:
    """Bytes of a row's codes where all rows have one width; 0 otherwise."""
    return (width * uniform + 7) // 8


def _consts(message: Tensor, width: int, uniform: int, codes: int) -> dict[str, Any]:
    """``ALIGN``: every row begins at a multiple of it; ``EVEN``: so do parameters; ``TAIL``: the last group is not whole."""
    begin = message.data_ptr()
    each = _row_bytes(width, uniform) if uniform else width // 8 if width % 8 == 0 else 1
    groups = max(2, triton.next_power_of_2((width + 7) // 8))
    return {
        "UNIFORM": uniform,
        "TAIL": width % 8 != 0,
        "ALIGN": gcd(begin, each, 4),
        "EVEN": gcd(begin + codes, 2),
        "BLOCK_R": max(1, _VALUES // (8 * groups)),
        "BLOCK_G": groups,
        "num_warps": max(4, min(16, groups // 64)),
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
    *places, zeros_at, steps_at, uniform = _layout(bits, counts, h.shape[1])
    bad = torch.full((1,), bits.numel(), dtype=torch.int64, device=h.device)
    consts = _consts(message, h.shape[1], uniform, zeros_at)
    _encode[(triton.cdiv(bits.numel(), consts["BLOCK_R"]),)](
        h, rows, ids, bits, *places, message, ranges, bad, bits.numel(), *h.shape, _row_bytes(h.shape[1], uniform),
        zeros_at, steps_at, *key_words(key), **consts,
    )  # fmt: skip
    return _place_of(bad, bits.numel())


def dequantise_rows(message: Tensor, bits: Tensor, counts: dict[int, int], out: Tensor) -> int:
    """Write the rows of a message to out [k, F]; gives the first row that no encoder writes, or -1. Waits for the device."""
    if bits.numel() == 0:
        return -1
    *places, zeros_at, steps_at, uniform = _layout(bits, counts, out.shape[1])
    bad = torch.full((1,), bits.numel(), dtype=torch.int64, device=out.device)
    consts = _consts(message, out.shape[1], uniform, zeros_at)
    _decode[(triton.cdiv(bits.numel(), consts["BLOCK_R"]),)](
        message, bits, *places, out, bad, bits.numel(), out.shape[1], _row_bytes(out.shape[1], uniform), zeros_at,
        steps_at, **consts,
    )  # fmt: skip
    return _place_of(bad, bits.numel())


def _place_of(bad: Tensor, num_rows: int) -> int:
    first = int(bad)
    return -1 if first == num_rows else first
