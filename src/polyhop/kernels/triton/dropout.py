"""Keyed dropout on the device: the masks of ``csrc/ops/dropout.cpp``.

Legend: n rows, F columns, G groups of 8 columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhop.kernels.triton.philox import key_words, lanes_of_groups, philox_of_ids

__all__ = ["dropout", "dropout_relu_backward"]

_ROWS, _GROUPS = 8, 16  # of a program: 1024 values


@triton.jit(do_not_specialize=["num_rows", "id_start", "k0", "k1"])
def _dropout(
    h, ids, out, signs, num_rows, width, id_start, k0, k1,
    DROP: tl.constexpr, RELU: tl.constexpr, SUM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    group = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    col = tl.program_id(1) * (BLOCK_G * 8) + tl.arange(0, BLOCK_G * 8)
    row_ok = row < num_rows
    ok = row_ok[:, None] & (col < width)[None, :]
    at = row[:, None] * width + col[None, :]
    values = tl.load(h + at, mask=ok, other=0.0).to(SUM)
    if RELU:
        values = tl.where(values < 0, 0.0, values)  # NaN stays
    if DROP:
        name = id_start + row if ids is None else tl.load(ids + row, mask=row_ok, other=0)
        zero = tl.zeros([BLOCK_R, BLOCK_G], tl.int64)
        w0, w1, w2, w3 = philox_of_ids(k0, k1, name[:, None] + zero, group[None, :] + zero)
        kept = values * tl.full(values.shape, 65536 / (65536 - DROP), SUM)
        values = tl.where(lanes_of_groups(w0, w1, w2, w3) >= DROP, kept, 0.0)
    tl.store(out + at, values.to(out.dtype.element_ty), mask=ok)
    if signs is not None:
        is_kept = tl.reshape((values > 0) | (values != values), (BLOCK_R, BLOCK_G, 8)).to(tl.int32)
        packed = tl.sum(is_kept << tl.arange(0, 8)[None, None, :], 2)
        num_groups = (width + 7) // 8
        to = signs + row[:, None] * num_groups + group[None, :]
        tl.store(to, packed.to(tl.uint8), mask=row_ok[:, None] & (group < num_groups)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _relu_backward(
    grad, signs, out, num_rows, width,
    DROP: tl.constexpr, SUM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    group = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    col = tl.program_id(1) * (BLOCK_G * 8) + tl.arange(0, BLOCK_G * 8)
    row_ok, num_groups = row < num_rows, (width + 7) // 8
    some = row_ok[:, None] & (group < num_groups)[None, :]
    packed = tl.load(signs + row[:, None] * num_groups + group[None, :], mask=some, other=0).to(tl.int32)
    is_kept = (packed[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
    is_kept = tl.reshape(is_kept, (BLOCK_R, BLOCK_G * 8)) == 1
    ok = row_ok[:, None] & (col < width)[None, :]
    at = row[:, None] * width + col[None, :]
    given = tl.load(grad + at, mask=ok, other=0.0).to(SUM)
    scaled = given * tl.full(given.shape, 65536 / (65536 - DROP), SUM)
    tl.store(out + at, tl.where(is_kept, scaled, 0.0).to(out.dtype.element_ty), mask=ok)


def _grid(h: Tensor) -> tuple[int, int]:
    return triton.cdiv(h.shape[0], _ROWS), triton.cdiv(h.shape[1], 8 * _GROUPS)


def _consts(h: Tensor, threshold: int) -> dict[str, Any]:
    total = tl.float64 if h.dtype == torch.float64 else tl.float32
    return {"DROP": threshold, "SUM": total, "BLOCK_R": _ROWS, "BLOCK_G": _GROUPS, "num_warps": 4}


def dropout(
    h: Tensor, ids: Tensor | None, id_start: int, key: int, threshold: int, relu: bool, out: Tensor
) -> Tensor | None:
    """Write h [n, F], after a relu if asked, with units whose lane is below ``threshold`` dropped; out may be h.

    After a relu gives which units were kept, all that its backward pass needs: uint8 [n, G], the first column lowest.
    """
    signs = None
    if relu:
        signs = torch.empty(h.shape[0], (h.shape[1] + 7) // 8, dtype=torch.uint8, device=h.device)
    if h.numel():
        _dropout[_grid(h)](
            h, ids, out, signs, *h.shape, id_start, *key_words(key), RELU=relu, **_consts(h, threshold)
        )
    return signs


def dropout_relu_backward(grad: Tensor, signs: Tensor, threshold: int, out: Tensor) -> None:
    """Write the gradient of h [n, F] from that of what relu and dropout gave; out may be grad."""
    if grad.numel():
        _relu_backward[_grid(grad)](grad, signs, out, *grad.shape, **_consts(grad, threshold))
