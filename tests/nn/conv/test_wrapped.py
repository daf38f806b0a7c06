"""PyG convolutions as layers: where they run, what is refused, and that they train."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

from polyhop.errors import InputError, UnsupportedError
from polyhop.graph.features import SparseRows
from polyhop.nn import Stack, as_block, wrap
from polyhop.nn.conv.wrapped import Wrapped

CLOSE = {"rtol": 1e-10, "atol": 1e-10}

CONVS = {
    "SAGEConv": lambda: pyg.SAGEConv(7, 5),
    "GATConv": lambda: pyg.GATConv(7, 5, heads=2),
    "GATv2Conv": lambda: pyg.GATv2Conv(7, 5, heads=2),
    "TransformerConv": lambda: pyg.TransformerConv(7, 5),
    "GraphConv": lambda: pyg.GraphConv(7, 5),
    "ResGatedGraphConv": lambda: pyg.ResGatedGraphConv(7, 5),
    "GENConv": lambda: pyg.GENConv(7, 5),
    "GCNConv without norm": lambda: pyg.GCNConv(7, 5, normalize=False),
    "TAGConv one hop": lambda: pyg.TAGConv(7, 5, K=1, normalize=False),
}


@pytest.mark.parametrize("name", CONVS)
@pytest.mark.parametrize("first", [0, 2])
def test_part_with_all_edges_equals_the_slice_of_the_whole(name, first, loops, cut_block) -> None:
    conv = CONVS[name]().double().eval()  # GENConv has a BatchNorm inside
    layer = wrap(conv)
    wanted = torch.tensor([6, 1, 9, 0])
    block = cut_block(loops, wanted, first=first)
    whole = conv(loops.x, loops.edge_index)
    torch.testing.assert_close(layer(loops.x, loops.edge_index), whole, **CLOSE)
    torch.testing.assert_close(layer(loops.x[block.src_ids], block), whole[wanted], **CLOSE)


@pytest.mark.parametrize("name", ["GraphConv", "GCNConv without norm"])
def test_weights_are_passed_on(name, loops, cut_block) -> None:
    conv = CONVS[name]().double()
    layer = wrap(conv)
    wanted = torch.tensor([6, 1, 9, 0])
    whole = conv(loops.x, loops.edge_index, loops.weight)
    block = cut_block(loops, wanted, weighted=True)
    torch.testing.assert_close(layer(loops.x, loops.edge_index, loops.weight), whole, **CLOSE)
    torch.testing.assert_close(layer(loops.x[block.src_ids], block), whole[wanted], **CLOSE)


def test_which_take_pairs() -> None:
    assert wrap(pyg.SAGEConv(7, 5)).bipartite
    assert wrap(pyg.GATv2Conv(7, 5)).bipartite
    assert not wrap(pyg.GCNConv(7, 5)).bipartite
    assert not wrap(pyg.SAGEConv(7, 5), bipartite=False).bipartite


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pyg.GCNConv(7, 5), "GCNConv normalises by the degrees"),
        (lambda: pyg.LGConv(), "LGConv normalises by the degrees"),
        (lambda: pyg.ChebConv(7, 5, K=2), "ChebConv normalises by the degrees"),
        (lambda: pyg.ClusterGCNConv(7, 5), "normalises by the degrees"),
        (lambda: pyg.MFConv(7, 5), "normalises by the degrees"),
        (lambda: pyg.TAGConv(7, 5, K=3, normalize=False), "K=3 hops"),
    ],
)
def test_refused_on_a_sampled_block_but_not_on_the_graph(make, message, loops, cut_block, some_edges) -> None:
    conv = make().double()
    layer = wrap(conv)
    block = cut_block(loops, torch.tensor([6, 1]), keep=some_edges(loops))
    with pytest.raises(UnsupportedError, match=message):
        layer(loops.x[block.src_ids], block)
    torch.testing.assert_close(layer(loops.x, loops.edge_index), conv(loops.x, loops.edge_index), **CLOSE)


def test_what_cannot_be_wrapped() -> None:
    with pytest.raises(InputError, match="expected a PyG MessagePassing layer, got Linear"):
        wrap(nn.Linear(7, 5))
    with pytest.raises(UnsupportedError, match=r"forward takes \(x, x_0, edge_index"):
        wrap(pyg.GCN2Conv(7, 0.1))


def test_has_no_pieces(loops) -> None:
    layer, block = wrap(pyg.SAGEConv(7, 5)), as_block(loops.edge_index, loops.num_nodes)
    assert not layer.has_pieces
    for piece in (
        lambda: layer.map_first(block, True),
        lambda: layer.transform(loops.x, True),
        lambda: layer.edge(block, loops.x),
        lambda: layer.aggregate(block, loops.x, None),
        lambda: layer.update(loops.x, None, None, True),
    ):
        with pytest.raises(UnsupportedError, match="SAGEConv is a wrapped PyG layer"):
            piece()


def test_dropout_inside_warns() -> None:
    with pytest.warns(UserWarning, match="GATv2Conv drops units by torch's own generator"):
        wrap(pyg.GATv2Conv(7, 5, dropout=0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrap(pyg.GATv2Conv(7, 5))


def test_widths_and_reset() -> None:
    layer = wrap(pyg.GATv2Conv(7, 5, heads=3))
    assert (layer.in_channels, layer.out_channels) == (7, 15)
    assert wrap(pyg.GATv2Conv(7, 5, heads=3, concat=False)).out_channels == 5
    before = layer.conv.lin_l.weight.clone()
    layer.reset_parameters()
    assert not torch.equal(before, layer.conv.lin_l.weight)
    assert "bipartite=True" in repr(layer)


def test_sparse_rows_are_made_dense(loops) -> None:
    csr = loops.x.to_sparse_csr()
    rows = SparseRows(csr.crow_indices(), csr.col_indices(), csr.values(), 7)
    layer = wrap(pyg.SAGEConv(7, 5).double())
    torch.testing.assert_close(layer(rows, loops.edge_index), layer(loops.x, loops.edge_index), **CLOSE)


@pytest.mark.parametrize("sampled", [False, True])
def test_wrapped_convolutions_train(sampled, plain, all_hops) -> None:
    torch.manual_seed(0)
    model = Stack([pyg.GATv2Conv(7, 8, heads=2), pyg.SAGEConv(16, 3)]).double()
    assert all(isinstance(layer, Wrapped) for layer in model.layers)
    y = torch.arange(plain.num_nodes) % 3
    seeds = torch.arange(0, plain.num_nodes, 2)
    blocks = all_hops(plain, seeds, 2) if sampled else as_block(plain.edge_index, plain.num_nodes)
    x = plain.x[blocks[0].src_ids] if sampled else plain.x
    wanted = y[seeds] if sampled else y
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(model(x, blocks), wanted)
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]
