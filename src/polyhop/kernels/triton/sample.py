"""Uniform neighbour draws on the device: Floyd's algorithm over each row's Philox words, as in ``csrc/sample_draw.h``.

Legend: k rows that draw, E edges, P the fan-out's power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhop.kernels.triton.philox import key_words, philox_of_ids

__all__ = ["MOST", "draw"]

MOST = 32  # fan-out of a kernel at most: its steps are unrolled
_ROWS = 32  # that draw, of a program
_NARROW: tl.constexpr = tl.constexpr(65536)  # largest degree served by 32-bit draws


@triton.jit
def _scaled(w0, w1, w2, w3, WHICH: tl.constexpr, count):
    """int64: word WHICH times count, shifted down by 32."""
    if WHICH == 0:
        word = w0
    elif WHICH == 1:
        word = w1
    elif WHICH == 2:
        word = w2
    else:
        word = w3
    return (word.to(tl.int64) * count) >> 32


@triton.jit(do_not_specialize=["num_rows", "k0", "k1"])
def _draw(
    indptr, rows, ids, ends, position, num_rows, k0, k1, FANOUT: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < num_rows
    row = tl.load(rows + at, mask=ok, other=0)
    begin = tl.load(indptr + row, mask=ok, other=0)
    degree = tl.load(indptr + row + 1, mask=ok, other=0) - begin
    name = tl.load(ids + at, mask=ok, other=0)
    col = tl.arange(0, P)
    picks = col[None, :] + tl.zeros([BLOCK, P], tl.int32)  # of rows that take all
    if tl.max(degree, 0) > FANOUT:
        chosen = tl.full([BLOCK, P], 2147483647, tl.int32)  # what is not drawn is sorted to the end
        is_wide = degree > _NARROW
        has_wide = tl.max(is_wide.to(tl.int32), 0) > 0
        w0, w1, w2, w3 = philox_of_ids(k0, k1, name, name * 0)
        for i in tl.static_range(FANOUT):
            if i % 4 == 0 and i > 0:
                w0, w1, w2, w3 = philox_of_ids(k0, k1, name, name * 0 + i // 4)
            last = degree - FANOUT + i
            t = _scaled(w0, w1, w2, w3, i % 4, last + 1)
            if has_wide:
                p0, p1, p2, p3 = philox_of_ids(k0, k1, name, name * 0 + i // 2)
                low = _scaled(p0, p1, p2, p3, i % 2 * 2, last + 1)
                high = (p1 if i % 2 == 0 else p3).to(tl.int64) * (last + 1)
                t = tl.where(is_wide, (high + low) >> 32, t)
            is_taken = tl.max((chosen == t.to(tl.int32)[:, None]).to(tl.int32), 1) > 0
            pick = tl.where(is_taken, last, t).to(tl.int32)
            chosen = tl.where(col[None, :] == i, pick[:, None], chosen)
        picks = tl.where((degree > FANOUT)[:, None], tl.sort(chosen, 1), picks)
    taken = tl.minimum(degree, FANOUT)
    to = tl.load(ends + at, mask=ok, other=0)
    some = ok[:, None] & (col[None, :] < taken[:, None])
    tl.store(position + to[:, None] + col[None, :], begin[:, None] + picks, mask=some)


def draw(indptr: Tensor, rows: Tensor, fanout: int, key: int, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(int64 [k + 1], positions): what ``rows`` int64 [k] draw under ``ids`` int64 [k], ascending in a row.

    The fan-out is 1 .. MOST. Waits for the device, to know how many edges there are.
    """
    ends = torch.zeros(rows.numel() + 1, dtype=torch.int64, device=rows.device)
    torch.cumsum((indptr[rows + 1] - indptr[rows]).clamp(max=fanout), 0, out=ends[1:])
    position = torch.empty(int(ends[-1]), dtype=torch.int64, device=rows.device)
    if rows.numel():
        _draw[(triton.cdiv(rows.numel(), _ROWS),)](
            indptr, rows, ids, ends, position, rows.numel(), *key_words(key), FANOUT=fanout,
            P=triton.next_power_of_2(fanout), BLOCK=_ROWS, num_warps=2,
        )  # fmt: skip
    return ends, position
