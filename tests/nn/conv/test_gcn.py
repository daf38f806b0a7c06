"""GCNConv against PyG, and on blocks against its formula written out."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch_geometric.nn as pyg

from polyhop.errors import ConfigError, GraphError, UnsupportedError
from polyhop.nn import GCNConv, as_block

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"improved": True},
        {"add_self_loops": False},
        {"normalize": False},
        {"bias": False, "cached": True},
    ],
)
def test_equals_pyg(sample, same_as_pyg, options, weighted) -> None:
    ours, theirs = GCNConv(7, 5, **options), pyg.GCNConv(7, 5, **options)
    weight = sample.weight if weighted else None
    same_as_pyg(
        ours,
        theirs,
        lambda x: ours(x, sample.edge_index, weight),
        lambda x: theirs(x, sample.edge_index, weight),
        [sample.x],
    )


def test_repeated_loops_count_once_as_in_pyg(loops, same_as_pyg) -> None:
    again = torch.tensor([[0, 3, 3], [0, 3, 3]])
    edges = torch.cat([loops.edge_index, again], 1)
    ours, theirs = GCNConv(7, 5), pyg.GCNConv(7, 5)
    same_as_pyg(ours, theirs, lambda x: ours(x, edges), lambda x: theirs(x, edges), [loops.x])


def test_weights_get_their_gradient(loops, same_as_pyg) -> None:
    ours, theirs = GCNConv(7, 5), pyg.GCNConv(7, 5)
    same_as_pyg(
        ours,
        theirs,
        lambda x, w: ours(x, loops.edge_index, w),
        lambda x, w: theirs(x, loops.edge_index, w),
        [loops.x, loops.weight],
    )


def test_no_edges_at_all(same_as_pyg) -> None:
    ours, theirs = GCNConv(7, 5), pyg.GCNConv(7, 5)
    edges = torch.empty(2, 0, dtype=torch.int64)
    same_as_pyg(
        ours, theirs, lambda x: ours(x, edges), lambda x: theirs(x, edges), [torch.randn(4, 7).double()]
    )


def _by_hand(sample, block, conv, h, *, weighted: bool, improved: bool = False):
    """The sampled sum of the documentation, one destination and one edge at a time."""
    src, dst = sample.edge_index
    fill = 2.0 if improved and weighted else 1.0
    weight = sample.weight if weighted else torch.ones_like(sample.weight)
    n = sample.num_nodes
    loop = {int(v): float(w) for v, w in zip(dst[src == dst], weight[src == dst], strict=True)}
    total = torch.zeros(n, dtype=torch.float64).index_add(0, dst, weight)
    degree = torch.bincount(dst, minlength=n)
    deg = torch.tensor(
        [float(total[v]) + (0.0 if v in loop else fill) for v in range(n)], dtype=torch.float64
    )
    rows = []
    for i in range(block.num_dst):
        v = int(block.src_ids[block.dst_start + i])
        edges = range(int(block.indptr[i]), int(block.indptr[i + 1]))
        plain = [e for e in edges if int(block.indices[e]) != block.dst_start + i]
        ratio = (int(degree[v]) - (v in loop)) / max(len(plain), 1)
        out = loop.get(v, fill) / deg[v] * h[block.dst_start + i]
        for e in plain:
            j = int(block.indices[e])
            w = float(block.edge_weight[e]) if weighted else 1.0
            out = out + ratio * w / (deg[v] * deg[int(block.src_ids[j])]).sqrt() * h[j]
        rows.append(out)
    return torch.stack(rows) @ conv.lin.weight.t() + conv.bias


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("improved", [False, True])
@pytest.mark.parametrize("first", [0, 2])
def test_sampled_block_by_hand(
    sample, cut_block, some_edges, tiny_weights, weighted, improved, first
) -> None:
    conv = tiny_weights(GCNConv(7, 5, improved=improved))
    keep = some_edges(sample)
    block = cut_block(sample, torch.tensor([6, 1, 9, 0]), keep=keep, weighted=weighted, first=first)
    assert block.dst_start == first
    h = sample.x[block.src_ids]
    expected = _by_hand(sample, block, conv, h, weighted=weighted, improved=improved)
    torch.testing.assert_close(conv(h, block), expected, **CLOSE)


@pytest.mark.parametrize("weighted", [False, True])
def test_sampled_sum_is_unbiased(loops, cut_block, tiny_weights, weighted) -> None:
    """The mean over all pairs of drawn edges is the full sum, for a node with a loop and one without."""
    conv = tiny_weights(GCNConv(7, 5))
    dst = loops.edge_index[1]
    for node in (3, 4):
        mine = (dst == node).nonzero()[:, 0]
        outs = []
        for pair in itertools.combinations(mine.tolist(), 2):
            keep = torch.zeros(dst.numel(), dtype=torch.bool)
            keep[list(pair)] = True
            block = cut_block(loops, torch.tensor([node]), keep=keep, weighted=weighted)
            outs.append(conv(loops.x[block.src_ids], block))
        full = conv(loops.x, loops.edge_index, loops.weight if weighted else None)[node]
        torch.testing.assert_close(torch.stack(outs).mean(0)[0], full, **CLOSE)


def test_factors_are_made_once_per_block(plain) -> None:
    conv = GCNConv(7, 5).double()
    block = as_block(plain.edge_index, plain.num_nodes)
    conv(plain.x, block)
    made = dict(block._cache)
    conv(plain.x, block)
    assert all(block._cache[name] is value for name, value in made.items())
    assert any(name.startswith("gcn.") for name in made)


def test_block_without_degrees_is_refused(plain, cut_block) -> None:
    from dataclasses import replace

    block = replace(cut_block(plain, torch.tensor([1, 2])), in_degree=None)
    with pytest.raises(GraphError, match="in_degree"):
        GCNConv(7, 5).double()(plain.x[block.src_ids], block)


def test_refused_options() -> None:
    with pytest.raises(ConfigError, match="normalize"):
        GCNConv(7, 5, add_self_loops=True, normalize=False)
    with pytest.raises(UnsupportedError, match="aggr='max'"):
        GCNConv(7, 5, aggr="max")
    with pytest.raises(UnsupportedError, match="in_channels=-1"):
        GCNConv(-1, 5)


def test_initialisation_has_pyg_distribution() -> None:
    torch.manual_seed(0)
    ours, theirs = GCNConv(300, 200), pyg.GCNConv(300, 200)
    mine, other = ours.lin.weight.detach(), theirs.lin.weight.detach()
    assert abs(float(mine.std() / other.std()) - 1) < 0.01
    assert float(mine.abs().max()) <= (6 / 500) ** 0.5
    assert not ours.bias.any()
    before = ours.lin.weight.clone()
    ours.reset_parameters()
    assert not torch.equal(before, ours.lin.weight)
