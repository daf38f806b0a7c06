"""Keyed dropout on the device: the masks of ``csrc/ops/dropout.cpp``.

Legend: n rows, F columns, G groups of 8 columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhop.kernels.triton.philox import key_words, lanes_of_groups, philox_of_ids

__all__ = ["dropout", "dropout_relu_backward"]

_ROWS, _GROUPS = 8, 16  # of a program: 1024 values
_VALUES = 1024


@triton.jit(do_not_specialize=["num_rows", "id_start", "k0", "k1"])
def _dropout(
    h, ids, out, num_rows, width, id_start, k0, k1,
    DROP: tl.constexpr, RELU: tl.constexpr, SUM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    group = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    col = tl.program_id(1) * (BLOCK_G * 8) + tl.arange(0, BLOCK_G * 8)
    row_ok = row < num_rows
    if ids is None:
        name = id_start + row
    else:
        name = tl.load(ids + row, mask=row_ok, other=0)
    zero = tl.zeros([BLOCK_R, BLOCK_G], tl.int64)
    w0, w1, w2, w3 = philox_of_ids(k0, k1, name[:, None] + zero, group[None, :] + zero)
    lanes = lanes_of_groups(w0, w1, w2, w3)
    ok = row_ok[:, None] & (col < width)[None, :]
    at = row[:, None] * width + col[None, :]
    values = tl.load(h + at, mask=ok, other=0.0).to(SUM)
    if RELU:
        values = tl.where(values < 0, 0.0, values)  # NaN stays
    kept = values * tl.full(values.shape, 65536 / (65536 - DROP), SUM)
    tl.store(out + at, tl.where(lanes >= DROP, kept, 0.0).to(out.dtype.element_ty), mask=ok)


@triton.jit
def _relu_backward(grad, kept, out, num_values, DROP: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr):
    """The mask of relu and dropout together is the sign of what they gave."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < num_values
    is_kept = (tl.load(kept + at, mask=ok, other=0.0).to(SUM) <= 0) == 0  # NaN passes
    given = tl.load(grad + at, mask=ok & is_kept, other=0.0).to(SUM)
    scaled = given * tl.full(given.shape, 65536 / (65536 - DROP), SUM)
    tl.store(out + at, tl.where(is_kept, scaled, 0.0).to(out.dtype.element_ty), mask=ok)


def _sum(h: Tensor) -> tl.dtype:
    return tl.float64 if h.dtype == torch.float64 else tl.float32


def dropout(
    h: Tensor, ids: Tensor | None, id_start: int, key: int, threshold: int, relu: bool, out: Tensor
) -> None:
    """Write h [n, F], after a relu if asked, with units whose lane is below ``threshold`` dropped; out may be h."""
    if h.numel():
        grid = (triton.cdiv(h.shape[0], _ROWS), triton.cdiv(h.shape[1], 8 * _GROUPS))
        _dropout[grid](
            h, ids, out, *h.shape, id_start, *key_words(key), DROP=threshold, RELU=relu, SUM=_sum(h), BLOCK_R=_ROWS,
            BLOCK_G=_GROUPS, num_warps=4,
        )  # fmt: skip


def dropout_relu_backward(grad: Tensor, kept: Tensor, threshold: int, out: Tensor) -> None:
    """Write the gradient of h from that of what relu and dropout gave, ``kept``; out may be grad."""
    if grad.numel():
        _relu_backward[(triton.cdiv(grad.numel(), _VALUES),)](
            grad, kept, out, grad.numel(), DROP=threshold, SUM=_sum(grad), BLOCK=_VALUES, num_warps=4
        )
