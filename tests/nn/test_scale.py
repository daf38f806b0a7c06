"""Factors per node: what they are on a whole graph, and that they are kept with the block they were made for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from polyhop.errors import GraphError
from polyhop.nn import as_block
from polyhop.nn.scale import edge_weight, gcn_scales, mean_scale, scale_dtype, sum_scale


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("add_self_loops", [False, True])
def test_matrix_equals_gcn_norm(sample, weighted, add_self_loops) -> None:
    n = sample.num_nodes
    weight = sample.weight if weighted else None
    block = as_block(sample.edge_index, n, weight)
    s = gcn_scales(block, torch.float64, add_self_loops=add_self_loops)
    at = torch.repeat_interleave(torch.arange(n), block.drawn)
    factor = 1.0 if block.edge_weight is None else block.edge_weight
    mine = torch.zeros(n, n, dtype=torch.float64)
    mine.index_put_(
        (at, block.indices.long()), s.dst[at] * factor * s.src[block.indices.long()], accumulate=True
    )
    if s.own is not None:
        mine += torch.diag(s.own)
    edges, values = gcn_norm(sample.edge_index, weight, n, False, add_self_loops, dtype=torch.float64)
    expected = torch.zeros(n, n, dtype=torch.float64).index_put_(
        (edges[1], edges[0]), values, accumulate=True
    )
    torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


def test_a_changed_copy_of_a_block_gets_its_own_factors(plain) -> None:
    block = as_block(plain.edge_index, plain.num_nodes, plain.weight)
    one = gcn_scales(block, torch.float64)
    assert gcn_scales(block, torch.float64) is one
    heavier = replace(block, edge_weight=block.edge_weight * 2)
    assert not torch.allclose(gcn_scales(heavier, torch.float64).src, one.src)
    torch.testing.assert_close(gcn_scales(block, torch.float64).src, one.src, rtol=0, atol=0)


def test_factors_of_a_sampled_block(plain, cut_block, some_edges) -> None:
    block = cut_block(plain, torch.tensor([3, 8]), keep=some_edges(plain))
    degree = torch.bincount(plain.edge_index[1])[[3, 8]].double()
    torch.testing.assert_close(sum_scale(block, torch.float64), degree / block.drawn)
    torch.testing.assert_close(mean_scale(block, torch.float64), 1 / block.drawn.double())
    with pytest.raises(GraphError, match="in_degree"):
        sum_scale(replace(block, in_degree=None, _cache={}), torch.float64)


def test_partial_weighted_block_needs_the_sums(plain, cut_block) -> None:
    block = cut_block(plain, torch.tensor([3, 8]), weighted=True)
    with pytest.raises(GraphError, match="in_weight"):
        gcn_scales(replace(block, in_weight=None), torch.float64)


def test_weights_in_the_rows_dtype(plain) -> None:
    block = as_block(plain.edge_index, plain.num_nodes, plain.weight)
    assert edge_weight(block, torch.float64) is block.edge_weight
    half = edge_weight(block, torch.float32)
    assert half is not None
    assert half.dtype == torch.float32
    assert edge_weight(block, torch.float32) is half
    assert edge_weight(as_block(plain.edge_index, plain.num_nodes), torch.float32) is None
    assert scale_dtype(torch.zeros(1, dtype=torch.bfloat16)) == torch.float32
    assert scale_dtype(torch.zeros(1, dtype=torch.float64)) == torch.float64
