"""A GraphSAGE layer as one function on a device: the values of its pieces, and gradients as close as sums of two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from polyhop.graph import Block, PooledRows
from polyhop.kernels import aggregate
from polyhop.kernels.mean_map import mean_map

MakeBlock = Callable[..., Block]
SHAPES = [(5, 12, 40), (7, 7, 30), (4, 9, 0), (1, 3, 2), (6, 8, 300)]


class Given:
    """A layer's rows, weights and scales."""

    def __init__(self, block: Block, device: torch.device, dtype: torch.dtype) -> None:
        gen = torch.Generator().manual_seed(3)

        def made(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=gen, dtype=torch.float64).to(device, dtype).requires_grad_()

        self.h, self.weight, self.own_weight, self.bias = (
            made(block.num_src, 24),
            made(16, 24),
            made(16, 24),
            made(16),
        )
        self.scale = block.drawn.clamp(min=1).to(dtype).reciprocal()
        self.grad = made(block.num_dst, 16).detach()

    def leaves(self) -> list[Tensor]:
        return [self.h, self.weight, self.bias, self.own_weight]

    def whole(self, block: Block, map_first: bool) -> Tensor:
        weights = (self.weight, self.bias, self.own_weight)
        out = mean_map(block, self.h, *weights, self.scale, map_first=map_first)
        assert out is not None
        return out

    def pieces(self, block: Block, map_first: bool) -> Tensor:
        own = self.h[block.dst_start : block.dst_start + block.num_dst]
        if map_first:
            sums = aggregate(block, functional.linear(self.h, self.weight), dst_scale=self.scale)
            return functional.linear(own, self.own_weight, self.bias) + sums
        sums = aggregate(block, self.h, dst_scale=self.scale)
        return functional.linear(sums, self.weight, self.bias).addmm_(own, self.own_weight.t())


def _block(make_block: MakeBlock, shape: tuple[int, int, int], device: torch.device) -> Block:
    block = make_block(*shape)
    return replace(block, dst_start=shape[1] - shape[0]).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("map_first", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_pieces(
    make_block: MakeBlock, device: torch.device, poison: None, dtype: torch.dtype, map_first: bool,
    shape: tuple[int, int, int],
) -> None:  # fmt: skip
    block = _block(make_block, shape, device)
    given = Given(block, device, dtype)
    whole, pieces = given.whole(block, map_first), given.pieces(block, map_first)
    assert torch.equal(whole, pieces)
    ours = torch.autograd.grad(whole, given.leaves(), given.grad)
    for mine, theirs in zip(ours, torch.autograd.grad(pieces, given.leaves(), given.grad), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("map_first", [False, True])
@pytest.mark.parametrize("num_edges", [30, 300])
def test_goes_back_twice(
    make_block: MakeBlock, device: torch.device, num_edges: int, map_first: bool
) -> None:
    """Sums are written over by the last pass alone."""
    block = _block(make_block, (7, 7, num_edges), device)
    given = Given(block, device, torch.float64)
    out = given.whole(block, map_first)
    first = torch.autograd.grad(out, given.leaves(), given.grad, retain_graph=True)
    second = torch.autograd.grad(out, given.leaves(), given.grad, retain_graph=True)
    third = torch.autograd.grad(out, given.leaves(), given.grad)
    for each in zip(first, second, third, strict=True):
        assert torch.equal(each[0], each[1])
        assert torch.equal(each[0], each[2])


@pytest.mark.parametrize("map_first", [False, True])
@pytest.mark.parametrize("frozen", ["h", "weight", "own_weight", "bias"])
def test_what_is_frozen_gets_nothing(
    make_block: MakeBlock, device: torch.device, frozen: str, map_first: bool
) -> None:
    block = _block(make_block, (5, 12, 40), device)
    given = Given(block, device, torch.float64)
    named = {"h": given.h, "weight": given.weight, "own_weight": given.own_weight, "bias": given.bias}
    all_grads = torch.autograd.grad(given.whole(block, map_first), list(named.values()), given.grad)
    expected = dict(zip(named, all_grads, strict=True))
    named[frozen].requires_grad_(False)
    wanted = [name for name in named if name != frozen]
    grads = torch.autograd.grad(given.whole(block, map_first), [named[name] for name in wanted], given.grad)
    for name, grad in zip(wanted, grads, strict=True):
        assert torch.equal(grad, expected[name])


def test_rows_of_a_pool_go_by_pieces(make_block: MakeBlock, device: torch.device) -> None:
    block = replace(_block(make_block, (5, 12, 40), device), rows=torch.arange(12, device=device))
    given = Given(block, device, torch.float32)
    arguments: Any = (given.weight, given.bias, given.own_weight, given.scale)
    assert mean_map(block, given.h, *arguments) is None
    if device.type == "cuda":
        assert mean_map(block, PooledRows(given.h[:5], given.h[5:]), *arguments) is None
