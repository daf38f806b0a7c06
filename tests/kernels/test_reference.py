"""The reference is the oracle of the other tests, so it is held against arithmetic that shares nothing with it."""

from __future__ import annotations

import math

import pytest
import torch

from polyhop.graph.block import Block
from polyhop.kernels import reference
from polyhop.kernels.keys import fold

BLOCK = Block(torch.tensor([0, 3, 3, 5]), torch.tensor([1, 1, 4, 2, 0]), 5, dst_start=1)


def test_spmm_equals_a_loop() -> None:
    h = torch.randn(5, 2, dtype=torch.float64)
    weight, src, dst, own = (torch.rand(n, dtype=torch.float64) for n in (5, 5, 3, 3))
    out = reference.spmm(
        BLOCK.indptr,
        BLOCK.indices,
        h,
        dst_start=1,
        edge_weight=weight,
        src_scale=src,
        dst_scale=dst,
        self_scale=own,
    )
    for i in range(3):
        total = torch.zeros(2, dtype=torch.float64)
        for e in range(int(BLOCK.indptr[i]), int(BLOCK.indptr[i + 1])):
            j = int(BLOCK.indices[e])
            total += weight[e] * src[j] * h[j]
        torch.testing.assert_close(out[i], dst[i] * total + own[i] * h[1 + i], rtol=0, atol=1e-14)


def test_attention_equals_a_loop() -> None:
    x, a_src, a_dst = torch.randn(5, 2, 3), torch.randn(5, 2), torch.randn(3, 2)
    out = reference.attention(BLOCK, x, a_src, a_dst, self_loop=True, negative_slope=0.1)
    for i in range(3):
        sources = [
            int(j) for j in BLOCK.indices[BLOCK.indptr[i] : BLOCK.indptr[i + 1]] if int(j) != 1 + i
        ] + [1 + i]
        for head in range(2):
            scores = [float(a_src[j, head] + a_dst[i, head]) for j in sources]
            power = [math.exp(s if s > 0 else 0.1 * s) for s in scores]
            expected = sum(p * x[j, head] for p, j in zip(power, sources)) / sum(power)
            torch.testing.assert_close(out[i, head], expected, rtol=0, atol=1e-5)


def test_attention_mask_follows_the_published_rule() -> None:
    """Head h of the edge src -> dst reads 16-bit lane h % 8 of philox(fold(key, h // 8), dst, src)."""
    heads, p, key = 11, 0.5, 123
    block = Block(torch.tensor([0, 1]), torch.tensor([1]), 2, src_ids=torch.tensor([40, 50]))
    out = reference.attention(
        block, torch.ones(2, heads, 1), torch.zeros(2, heads), torch.zeros(1, heads), self_loop=False, dropout_p=p,
        dropout_key=key,
    )  # fmt: skip
    for h in range(heads):
        word = reference.random_u32(fold(key, h // 8), torch.tensor([40]), 50)[0, h % 8 // 2]
        lane = int(word) >> (16 * (h % 2)) & 0xFFFF
        assert out[0, h, 0].item() == (2.0 if lane >= 32768 else 0.0)


def test_dropout_follows_the_published_rule() -> None:
    """Column c of row id g reads 16-bit lane c % 8 of philox(key, g, c // 8)."""
    out = reference.dropout(torch.ones(1, 20), torch.tensor([77]), 0.25, 5)
    for c in range(20):
        word = reference.random_u32(5, torch.tensor([77]), c // 8)[0, c % 8 // 2]
        lane = int(word) >> (16 * (c % 2)) & 0xFFFF
        assert out[0, c].item() == pytest.approx(4 / 3 if lane >= 16384 else 0.0)


def test_sums_of_small_floats_are_taken_in_float32() -> None:
    assert reference.sum_dtype(torch.bfloat16) == torch.float32
    assert reference.sum_dtype(torch.float64) == torch.float64
    ones = torch.ones(1000, 1, dtype=torch.bfloat16)  # bfloat16 alone would stop at 256
    out = reference.spmm(torch.tensor([0, 1000]), torch.arange(1000), ones)
    assert out.item() == 1000
