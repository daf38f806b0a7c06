"""A layer as one function gives the bits of its pieces, both ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from polyhop.errors import InputError, KernelError
from polyhop.graph import PooledRows
from polyhop.graph.block import Block
from polyhop.kernels import aggregate
from polyhop.kernels.mean_map import mean_map

MakeBlock = Callable[..., Block]
SHAPES = [(5, 12, 40), (1, 3, 2), (200, 1000, 980), (7, 7, 30), (4, 9, 0), (0, 3, 0)]


def weights(width: int, out: int, dtype: torch.dtype, has_bias: bool = True) -> list[Tensor | None]:
    torch.manual_seed(4)
    bias = torch.randn(out, dtype=dtype) if has_bias else None
    made = [torch.randn(out, width, dtype=dtype), bias, torch.randn(out, width, dtype=dtype)]
    return [None if each is None else each.requires_grad_() for each in made]


def scale_of(block: Block, dtype: torch.dtype) -> Tensor:
    return block.drawn.clamp(min=1).to(dtype).reciprocal()


def pieces(block: Block, h: Tensor | PooledRows, given: list[Tensor | None], own: Tensor) -> Tensor:
    weight, bias, own_weight = given
    assert weight is not None
    assert own_weight is not None
    z = aggregate(block, h, dst_scale=scale_of(block, weight.dtype))
    return F.linear(z, weight, bias).addmm_(own, own_weight.t())


def gradients(out: Tensor, wanted: list[Tensor]) -> tuple[Tensor, ...]:
    rng = torch.Generator().manual_seed(7)
    return torch.autograd.grad(
        out, wanted, torch.randn(out.shape, generator=rng, dtype=torch.float64).to(out.dtype)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("num_dst", "num_src", "num_edges"), SHAPES)
@pytest.mark.parametrize("needs_input", [True, False])
def test_equals_the_pieces(
    make_block: MakeBlock,
    native_only: None,
    dtype: torch.dtype,
    has_bias: bool,
    num_dst: int,
    num_src: int,
    num_edges: int,
    needs_input: bool,
) -> None:
    block = make_block(num_dst, num_src, num_edges)
    block = replace(block, dst_start=num_src - num_dst)
    given = weights(32, 16, dtype, has_bias)
    x = torch.randn(num_src, 32, dtype=dtype).requires_grad_(needs_input)
    wanted = [each for each in (*given, x if needs_input else None) if each is not None]
    one = pieces(block, x, given, x[block.dst_start :])
    weight, bias, own_weight = given
    assert weight is not None
    assert own_weight is not None
    whole = mean_map(block, x, weight, bias, own_weight, scale_of(block, dtype))
    assert whole is not None
    assert torch.equal(whole, one)
    for ours, theirs in zip(gradients(whole, wanted), gradients(one, wanted), strict=True):
        assert torch.equal(ours, theirs)


def test_two_places_equal_one(make_block: MakeBlock, native_only: None) -> None:
    block, given = make_block(20, 50, 300), weights(8, 5, torch.float32)
    pool = torch.randn(90, 8)
    rows = torch.randperm(90)[:50]
    pooled = replace(block, rows=rows)
    weight, bias, own_weight = given
    assert weight is not None
    assert bias is not None
    assert own_weight is not None
    scale = scale_of(block, torch.float32)
    one = mean_map(block, pool[rows], weight, bias, own_weight, scale)
    two = mean_map(pooled, PooledRows(pool[:33], pool[33:]), weight, bias, own_weight, scale)
    assert one is not None
    assert two is not None
    assert torch.equal(one, two)
    wanted = [weight, bias, own_weight]
    for ours, theirs in zip(gradients(two, wanted), gradients(one, wanted), strict=True):
        assert torch.equal(ours, theirs)


def test_frozen_weights_get_nothing(make_block: MakeBlock, native_only: None) -> None:
    block, (weight, bias, own_weight) = make_block(4, 9, 20), weights(3, 2, torch.float32)
    assert weight is not None
    assert bias is not None
    assert own_weight is not None
    x = torch.randn(9, 3, requires_grad=True)
    out = mean_map(block, x, weight.detach(), bias, own_weight, scale_of(block, torch.float32))
    assert out is not None
    out.sum().backward()
    assert weight.grad is None
    assert all(each.grad is not None for each in (x, bias, own_weight))


def test_says_where_it_does_not_serve(make_block: MakeBlock, monkeypatch: pytest.MonkeyPatch) -> None:
    block, (weight, bias, own_weight) = make_block(4, 9, 20), weights(3, 2, torch.float32)
    assert weight is not None
    assert own_weight is not None
    x, scale = torch.randn(9, 3), scale_of(block, torch.float32)
    assert mean_map(block, x.double(), weight, bias, own_weight, scale) is None
    assert mean_map(replace(block, rows=torch.arange(9)), x, weight, bias, own_weight, scale) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert mean_map(block, x, weight, bias, own_weight, scale) is None
    monkeypatch.setenv("POLYHOP_KERNELS", "reference")
    assert mean_map(block, x, weight, bias, own_weight, scale) is None


def test_wrong_arguments_are_refused(
    make_block: MakeBlock, native_only: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, (weight, bias, own_weight) = make_block(4, 9, 20), weights(3, 2, torch.float32)
    assert weight is not None
    assert own_weight is not None
    x, scale = torch.randn(9, 3), scale_of(block, torch.float32)
    with pytest.raises(InputError, match="h must have num_src = 9 rows, got 8"):
        mean_map(block, x[:8], weight, bias, own_weight, scale)
    with pytest.raises(InputError, match=r"dst_scale must have shape \[4\]"):
        mean_map(block, x, weight, bias, own_weight, scale[:3])
    away = replace(block, rows=torch.arange(9) + 5)
    pool = PooledRows(x[:4], x[4:])
    monkeypatch.setenv("POLYHOP_DEBUG", "1")
    with pytest.raises(KernelError, match=r"mean_map: rows\[4\] = 9, outside 0 \.\. 8"):
        mean_map(away, pool, weight, bias, own_weight, scale)
