"""SAGEConv against PyG, and on sampled blocks against its formula written out."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch_geometric.nn as pyg

from polyhop.errors import UnsupportedError
from polyhop.graph.features import SparseRows
from polyhop.nn import SAGEConv

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"aggr": "sum"},
        {"aggr": "max"},
        {"normalize": True},
        {"root_weight": False},
        {"project": True},
        {"project": True, "aggr": "max"},
        {"bias": False},
        {"root_weight": False, "bias": False},
    ],
)
@pytest.mark.parametrize("out", [3, 11])
def test_equals_pyg(sample, same_as_pyg, options, out) -> None:
    ours, theirs = SAGEConv(7, out, **options), pyg.SAGEConv(7, out, **options)
    same_as_pyg(
        ours, theirs, lambda x: ours(x, sample.edge_index), lambda x: theirs(x, sample.edge_index), [sample.x]
    )


@pytest.mark.parametrize("aggr", ["mean", "sum", "max"])
@pytest.mark.parametrize("first", [0, 2])
def test_sampled_block_by_hand(sample, cut_block, some_edges, tiny_weights, aggr, first) -> None:
    conv = tiny_weights(SAGEConv(7, 5, aggr=aggr))
    keep = some_edges(sample)
    block = cut_block(sample, torch.tensor([6, 1, 9, 0]), keep=keep, first=first)
    h = sample.x[block.src_ids]
    degree = torch.bincount(sample.edge_index[1], minlength=sample.num_nodes)
    rows = []
    for i in range(4):
        drawn = h[block.indices[block.indptr[i] : block.indptr[i + 1]].long()]
        assert len(drawn)
        full = int(degree[block.src_ids[first + i]])
        rows.append(
            {"mean": drawn.mean(0), "sum": drawn.sum(0) * full / len(drawn), "max": drawn.amax(0)}[aggr]
        )
    own = h[first : first + 4]
    expected = torch.stack(rows) @ conv.lin_l.weight.t() + conv.lin_l.bias + own @ conv.lin_r.weight.t()
    torch.testing.assert_close(conv(h, block), expected, **CLOSE)


def test_sampled_sum_is_unbiased(loops, cut_block, tiny_weights) -> None:
    conv = tiny_weights(SAGEConv(7, 5, aggr="sum"))
    dst = loops.edge_index[1]
    mine = (dst == 3).nonzero()[:, 0]
    outs = []
    for pair in itertools.combinations(mine.tolist(), 2):
        keep = torch.zeros(dst.numel(), dtype=torch.bool)
        keep[list(pair)] = True
        block = cut_block(loops, torch.tensor([3]), keep=keep)
        outs.append(conv(loops.x[block.src_ids], block))
    torch.testing.assert_close(torch.stack(outs).mean(0)[0], conv(loops.x, loops.edge_index)[3], **CLOSE)


def test_refused() -> None:
    with pytest.raises(UnsupportedError, match="aggr='lstm'"):
        SAGEConv(7, 5, aggr="lstm")
    with pytest.raises(UnsupportedError, match=r"in_channels=\(7, 7\)"):
        SAGEConv((7, 7), 5)
    rows = SparseRows(torch.tensor([0, 1]), torch.tensor([2]), torch.ones(1), 7)
    with pytest.raises(UnsupportedError, match="aggr='max'"):
        SAGEConv(7, 5, aggr="max")(rows, torch.tensor([[0], [0]]))


def test_reset_draws_anew() -> None:
    conv = SAGEConv(7, 5, project=True)
    before = {name: p.clone() for name, p in conv.named_parameters()}
    conv.reset_parameters()
    assert all(not torch.equal(before[name], p) for name, p in conv.named_parameters())
    assert "aggr=mean" in repr(conv)
