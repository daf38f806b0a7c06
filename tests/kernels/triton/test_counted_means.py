"""A GraphSAGE layer of a sampled block on the device: the kernel counts edges and copies own rows by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from polyhop.graph.block import Block
from polyhop.kernels import reference
from polyhop.kernels.mean_map import counts_edges, mean_map
from polyhop.kernels.triton import segments

MakeBlock = Callable[..., Block]


def plain(block: Block, h: Tensor, weight: Tensor, bias: Tensor, own_weight: Tensor) -> Tensor:
    scale = block.drawn.clamp(min=1).to(h.dtype).reciprocal()
    z = reference.spmm(
        block.indptr, block.indices, h, dst_start=block.dst_start, rows=block.rows, dst_scale=scale
    )
    start = torch.arange(block.dst_start, block.dst_start + block.num_dst, device=h.device)
    own = h[start] if block.rows is None else h[block.rows[start]]
    return F.linear(z, weight, bias) + own @ own_weight.t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("limit", [4, 512])
@pytest.mark.parametrize(
    ("num_dst", "num_src", "num_edges", "dst_start"), [(6, 20, 70, 0), (3, 9, 4, 6), (4, 4, 0, 0)]
)
@pytest.mark.parametrize(("is_pool", "map_first"), [(False, False), (False, True), (True, False)])
def test_equals_the_pieces(
    make_block: MakeBlock, device: torch.device, poison: None, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype,
    limit: int, num_dst: int, num_src: int, num_edges: int, dst_start: int, is_pool: bool, map_first: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(segments, "_SHORTEST", limit)  # 4: lists are cut into pieces
    monkeypatch.setattr(segments, "_LONGEST", limit)
    block = replace(make_block(num_dst, num_src, num_edges), dst_start=dst_start, is_sampled=True).to(device)
    gen = torch.Generator().manual_seed(3)
    made = [torch.randn(*size, generator=gen, dtype=dtype) for size in ((9, 13), (9,), (9, 13), (40, 13))]
    weight, bias, own_weight, pool = (each.to(device) for each in made)
    if is_pool:
        block = replace(block, rows=torch.randperm(40, generator=gen)[:num_src].to(device))
    h = pool if is_pool else pool[:num_src].clone()
    found = []
    for run in (mean_map, plain):
        leaves = [each.detach().clone().requires_grad_() for each in (weight, bias, own_weight)]
        rows = h.detach().clone().requires_grad_(not is_pool)
        assert counts_edges(block, rows)
        out = plain(block, rows, *leaves)
        if run is mean_map:
            out = mean_map(block, rows, *leaves, None, map_first=map_first)
        assert isinstance(out, Tensor)
        grad = torch.randn(out.shape, generator=gen.manual_seed(5), dtype=dtype).to(device)
        wanted = leaves if is_pool else [*leaves, rows]
        found.append((out, *torch.autograd.grad(out, wanted, grad)))
    room = 2e-5 if dtype == torch.float32 else 1e-12
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=room, atol=room)


def test_a_learnt_pool_and_other_blocks_take_their_scale(make_block: MakeBlock, device: torch.device) -> None:
    block = replace(make_block(4, 9, 20), is_sampled=True).to(device)
    rows = torch.ones(9, 2, device=device)
    assert counts_edges(block, rows)
    assert not counts_edges(replace(block, is_sampled=False), rows)
    assert not counts_edges(replace(block, num_drawn=torch.ones(4, dtype=torch.int64)), rows)
    learned = replace(block, rows=torch.arange(9, device=device))
    assert counts_edges(learned, rows)
    assert not counts_edges(learned, rows.clone().requires_grad_())
