"""Row gather on the device: rows from its memory, from pinned host memory, or from both at once.

Pinned memory has an address on the device, so the kernel reads just the wanted rows over the bus; rows of a hot cache
(``values``) and the rest (``second``) are one call.

Legend: N stored rows, M rows stored in a second place, n wanted rows, F columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["gather_rows"]

_BYTES = 512  # of a row that a program reads: 16 for each thread of a warp
_ROWS = 8  # wanted rows of a program at a time
_FROM_HOST = 256  # programs that read the host's memory: enough to fill the bus, and the device's other work finds room


@triton.jit(do_not_specialize=["num_wanted", "num_values", "num_rows"])
def _gather(
    values, second, ids, scale, out, bad, num_wanted, num_values, num_rows, units,
    UNIT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Rows that there are not are not read; the first of them is noted, where ``bad`` takes it."""
    col = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    col_ok = col < units * UNIT
    for block in range(tl.program_id(0), tl.cdiv(num_wanted, BLOCK_R), tl.num_programs(0)):
        place = (tl.zeros([BLOCK_R], tl.int64) + block) * BLOCK_R + tl.arange(0, BLOCK_R)
        wanted = place < num_wanted
        row = tl.load(ids + place, mask=wanted, other=0)
        is_good = (row >= 0) & (row < num_rows)
        if bad is not None:
            tl.atomic_min(bad + place * 0, place, mask=wanted & (is_good == 0), sem="relaxed")
        ok = (wanted & is_good)[:, None] & col_ok[None, :]
        at = row[:, None] * (units * UNIT) + col[None, :]
        if second is None:
            rows = tl.load(values + at, mask=ok, other=0)
        else:
            is_first = (row < num_values)[:, None]
            rows = tl.load(values + at, mask=ok & is_first, other=0)
            past = (row - num_values)[:, None] * (units * UNIT) + col[None, :]
            rows = tl.where(is_first, rows, tl.load(second + past, mask=ok & (is_first == 0), other=0))
        rows = rows.to(out.dtype.element_ty)
        if scale is not None:
            rows *= tl.load(scale + col, mask=col_ok, other=0.0)[None, :]
        tl.store(out + place[:, None] * (units * UNIT) + col[None, :], rows, mask=ok)


def gather_rows(
    values: Tensor,
    second: Tensor | None,
    ids: Tensor,
    scale: Tensor | None,
    out: Tensor,
    *,
    are_checked: bool = False,
) -> int:
    """Write rows ids int64 [n] of values [N, F] and second [M, F], times scale [F], to out [n, F].

    Gives the first place with an id outside them, or -1; waits for the device, to know. ``are_checked``: there is none.
    """
    num, width = ids.numel(), values.shape[1]
    if num == 0:
        return -1
    num_rows = values.shape[0] + (0 if second is None else second.shape[0])
    bad = None if are_checked else torch.full((1,), num, dtype=torch.int64, device=ids.device)
    unit = next(u for u in (16, 8, 4, 2, 1) if width % u == 0) if width else 1
    block = min(triton.next_power_of_2(max(width, 1)), _BYTES // values.element_size())
    blocks = max(triton.cdiv(width, block), 1)
    programs = triton.cdiv(num, _ROWS)
    if ids.is_cuda and any(t is not None and t.is_cpu for t in (values, second)):
        programs = min(programs, triton.cdiv(_FROM_HOST, blocks))
    _gather[(programs, blocks)](
        values, second, ids, scale, out, bad, num, values.shape[0], num_rows, width // unit, UNIT=unit,
        BLOCK_R=_ROWS, BLOCK_F=block, num_warps=1,
    )  # fmt: skip
    if bad is None:
        return -1
    first = int(bad)
    return -1 if first == num else first
