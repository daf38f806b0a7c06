from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop.graph.block import Block
from polyhop.kernels import attention, reference
from polyhop.kernels.keys import Key, Purpose

MakeBlock = Callable[..., Block]
KEY = Key(seed=1).at(Purpose.ATTENTION_DROPOUT)

# Relative to the largest value, at least 1, against the reference in float64 on the same rows. float32: exp is good to 2
# units of the last place, and scores' gradients are small differences of products over up to 130 channels. bfloat16: the
# result is rounded to 2^-9; all between is float32.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 5e-5, torch.bfloat16: 1e-2}


def _inputs(block: Block, heads: int, channels: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    gen = torch.Generator().manual_seed(heads * 100 + channels)
    rows = block.num_src if block.rows is None else int(block.rows.max()) + 2
    sizes = [(rows, heads, channels), (rows, heads), (block.num_dst, heads), (block.num_dst, heads, channels)]
    x, a_src, a_dst, grad = (
        torch.randn(*size, generator=gen, dtype=torch.float64).to(block.device, dtype) for size in sizes
    )
    return x, 2 * a_src, 2 * a_dst, grad


def _run(op: Callable[..., Tensor], block: Block, given: tuple[Tensor, ...], **options: Any) -> list[Tensor]:
    """The output and the three gradients."""
    leaves = [t.clone().requires_grad_() for t in given[:3]]
    out = op(block, *leaves, **options)
    out.backward(given[3])
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _check(block: Block, heads: int, channels: int, dtype: torch.dtype, **options: Any) -> None:
    given = _inputs(block, heads, channels, dtype)
    exact = tuple(t.double() for t in given)
    for ours, theirs in zip(
        _run(attention, block, given, **options), _run(reference.attention, block, exact, **options), strict=True
    ):  # fmt: skip
        assert ours.dtype == dtype
        room = TOLERANCE[dtype] * max(1.0, theirs.abs().max().item() if theirs.numel() else 0)
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=room)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("heads", "channels"), [(1, 1), (3, 7), (9, 5), (1, 130), (8, 32)])
@pytest.mark.parametrize(("self_loop", "dropout_p"), [(False, 0.0), (True, 0.0), (True, 0.4)])
def test_equals_reference(
    make_block: MakeBlock, device: torch.device, poison: None, dtype: torch.dtype, heads: int, channels: int,
    self_loop: bool, dropout_p: float,
) -> None:  # fmt: skip
    block = make_block(20, 30, 110, dst_start=7, has_ids=True).to(device)
    _check(block, heads, channels, dtype, self_loop=self_loop, dropout_p=dropout_p, dropout_key=KEY)


@pytest.mark.parametrize("self_loop", [False, True])
def test_long_lists_are_cut(
    make_block: MakeBlock, device: torch.device, poison: None, self_loop: bool
) -> None:
    block = make_block(3, 5, 2000, hub=True).to(device)
    _check(block, 3, 7, torch.float64, self_loop=self_loop, dropout_p=0.3, dropout_key=KEY)


@pytest.mark.parametrize(("heads", "channels"), [(4, 16), (1, 64), (2, 300), (1, 1100)])
def test_rows_that_fill_a_warp_and_more(
    make_block: MakeBlock, device: torch.device, poison: None, heads: int, channels: int
) -> None:
    block = make_block(6, 9, 40, dst_start=2).to(device)
    _check(block, heads, channels, torch.float32, self_loop=True)


@pytest.mark.parametrize(("num_dst", "num_src", "num_edges"), [(0, 5, 0), (4, 5, 0), (40, 41, 3), (1, 1, 30)])
@pytest.mark.parametrize("self_loop", [False, True])
def test_empty_rows_and_blocks(
    make_block: MakeBlock, device: torch.device, poison: None, num_dst: int, num_src: int, num_edges: int, self_loop: bool
) -> None:  # fmt: skip
    _check(make_block(num_dst, num_src, num_edges).to(device), 2, 5, torch.float64, self_loop=self_loop)


def test_rows_of_a_pool(make_block: MakeBlock, device: torch.device) -> None:
    block = make_block(10, 20, 60, dst_start=3, pool=12).to(device)
    given = _inputs(block, 2, 3, torch.float64)
    got = _run(attention, block, given, self_loop=True)
    leaves = [t.clone().requires_grad_() for t in given[:3]]
    plain = replace(block, rows=None)
    out = reference.attention(plain, leaves[0][block.rows], leaves[1][block.rows], leaves[2], self_loop=True)
    out.backward(given[3])
    for ours, theirs in zip(got, [out.detach(), *(leaf.grad for leaf in leaves)]):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_huge_scores_and_nan(device: torch.device) -> None:
    block = Block(torch.tensor([0, 3, 4]), torch.tensor([0, 1, 2, 2], dtype=torch.int32), 3).to(device)
    x, zero = torch.ones(3, 1, 2, device=device), torch.zeros(2, 1, device=device)
    huge = torch.tensor([[3e4], [-3e4], [2e4]], device=device)
    assert torch.equal(attention(block, x, huge, zero, self_loop=False), x[:2])
    nan = torch.tensor([[0.0], [torch.nan], [0.0]], device=device)
    out = attention(block, x, nan, zero, self_loop=False)
    assert out[0].isnan().all()
    assert out[1].tolist() == [[1.0, 1.0]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_hub_of_a_million_edges() -> None:
    gen = torch.Generator().manual_seed(1)
    degree = torch.randint(0, 9, (20_001,), generator=gen)
    degree[777] = 1_000_003
    indptr = torch.zeros(20_002, dtype=torch.int64)
    indptr[1:] = degree.cumsum(0)
    indices = torch.randint(20_001, (int(indptr[-1]),), generator=gen).to(torch.int32)
    block = Block(indptr, indices, 20_001).to("cuda")
    _check(block, 2, 16, torch.float64, self_loop=True, dropout_p=0.2, dropout_key=KEY)
    given = _inputs(block, 2, 16, torch.float32)
    runs = [_run(attention, block, given, self_loop=True, dropout_p=0.2, dropout_key=KEY) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
