"""Keyed dropout on the device: the masks of ``csrc/ops/dropout.cpp``.

Legend: n rows, F columns, G groups of 8 columns, Q of them that a program has.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhop.kernels.triton.philox import key_words, lanes_of_words, philox_of_ids

__all__ = ["dropout", "dropout_relu_backward"]

_VALUES = 1024  # of a program: 8 of each thread
_GROUPS = 64  # of a row that a program has at most


@triton.jit
def _halves(group, ok, width, TAIL: tl.constexpr):
    """(first four columns [Q, 4] of groups [Q], which of them there are, which of the next four, which groups)."""
    col = (group * 8)[:, None] + tl.arange(0, 4)[None, :]
    whole = ok & (group * 8 < width)
    if TAIL:
        some0, some1 = ok[:, None] & (col < width), ok[:, None] & (col + 4 < width)
    else:
        some0, some1 = whole[:, None], whole[:, None]
    return col, some0, some1, whole


@triton.jit(do_not_specialize=["num_rows", "id_start", "k0", "k1"])
def _dropout(
    h, ids, out, signs, num_rows, width, id_start, k0, k1,
    DROP: tl.constexpr, RELU: tl.constexpr, SUM: tl.constexpr, TAIL: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """A thread has whole groups of 8 columns, whose lanes are of one draw and whose signs are of one byte."""
    q = tl.arange(0, BLOCK_R * BLOCK_G)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + q // BLOCK_G
    group = tl.program_id(1) * BLOCK_G + q % BLOCK_G
    ok = row < num_rows
    col, some0, some1, some = _halves(group, ok, width, TAIL)
    at = (row * width)[:, None] + col
    x0 = tl.load(h + at, mask=some0, other=0.0).to(SUM)
    x1 = tl.load(h + 4 + at, mask=some1, other=0.0).to(SUM)
    if RELU:
        x0, x1 = tl.where(x0 < 0, 0.0, x0), tl.where(x1 < 0, 0.0, x1)  # NaN stays
    if DROP:
        name = id_start + row if ids is None else tl.load(ids + row, mask=ok, other=0)
        w0, w1, w2, w3 = philox_of_ids(k0, k1, name, group.to(tl.int64))
        grown = tl.full([1, 1], 65536 / (65536 - DROP), SUM)
        x0 = tl.where(lanes_of_words(w0, w1) >= DROP, x0 * grown, 0.0)
        x1 = tl.where(lanes_of_words(w2, w3) >= DROP, x1 * grown, 0.0)
    tl.store(out + at, x0.to(out.dtype.element_ty), mask=some0)
    tl.store(out + 4 + at, x1.to(out.dtype.element_ty), mask=some1)
    if signs is not None:
        bit = tl.arange(0, 4)[None, :]
        is_kept0, is_kept1 = (x0 > 0) | (x0 != x0), (x1 > 0) | (x1 != x1)
        packed = tl.sum(is_kept0.to(tl.int32) << bit, 1) | (tl.sum(is_kept1.to(tl.int32) << bit, 1) << 4)
        tl.store(signs + row * ((width + 7) // 8) + group, packed.to(tl.uint8), mask=some)


@triton.jit(do_not_specialize=["num_rows"])
def _relu_backward(
    grad, signs, out, num_rows, width,
    DROP: tl.constexpr, SUM: tl.constexpr, TAIL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    q = tl.arange(0, BLOCK_R * BLOCK_G)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + q // BLOCK_G
    group = tl.program_id(1) * BLOCK_G + q % BLOCK_G
    col, some0, some1, some = _halves(group, row < num_rows, width, TAIL)
    packed = tl.load(signs + row * ((width + 7) // 8) + group, mask=some, other=0).to(tl.int32)
    at, grown = (row * width)[:, None] + col, tl.full([1, 1], 65536 / (65536 - DROP), SUM)
    for half in tl.static_range(2):
        there = some1 if half else some0
        is_kept = (packed[:, None] >> (4 * half + tl.arange(0, 4))[None, :]) & 1
        given = tl.load(grad + 4 * half + at, mask=there, other=0.0).to(SUM)
        kept = tl.where(is_kept == 1, given * grown, 0.0)
        tl.store(out + 4 * half + at, kept.to(out.dtype.element_ty), mask=there)


def _consts(h: Tensor, threshold: int) -> tuple[dict[str, Any], tuple[int, int]]:
    """Constants of the kernels for rows h [n, F], and their grid. ``TAIL``: the last group is not whole."""
    groups = triton.cdiv(h.shape[1], 8)
    block_g = min(triton.next_power_of_2(groups), _GROUPS)
    block_r = _VALUES // (8 * block_g)
    consts = {
        "DROP": threshold, "SUM": tl.float64 if h.dtype == torch.float64 else tl.float32, "TAIL": h.shape[1] % 8 != 0,
        "BLOCK_R": block_r, "BLOCK_G": block_g, "num_warps": 4,
    }  # fmt: skip
    return consts, (triton.cdiv(h.shape[0], block_r), triton.cdiv(groups, block_g))


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
        consts, grid = _consts(h, threshold)
        _dropout[grid](h, ids, out, signs, *h.shape, id_start, *key_words(key), RELU=relu, **consts)
    return signs


def dropout_relu_backward(grad: Tensor, signs: Tensor, threshold: int, out: Tensor) -> None:
    """Write the gradient of h [n, F] from that of what relu and dropout gave; out may be grad."""
    if grad.numel():
        consts, grid = _consts(grad, threshold)
        _relu_backward[grid](grad, signs, out, *grad.shape, **consts)
