"""GCN2Conv against PyG, called both ways."""

from __future__ import annotations

import pytest
import torch
import torch_geometric.nn as pyg

from polyhop.errors import ConfigError, InputError
from polyhop.graph.features import SparseRows
from polyhop.nn import GCN2Conv, as_block


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"theta": 0.5, "layer": 3},
        {"theta": 0.5, "layer": 3, "shared_weights": False},
        {"add_self_loops": False},
        {"normalize": False, "cached": True},
    ],
)
def test_equals_pyg(sample, same_as_pyg, options, weighted) -> None:
    ours, theirs = GCN2Conv(7, alpha=0.2, **options), pyg.GCN2Conv(7, alpha=0.2, **options)
    weight = sample.weight if weighted else None
    same_as_pyg(
        ours,
        theirs,
        lambda x, x_0: ours(x, x_0, sample.edge_index, weight),
        lambda x, x_0: theirs(x, x_0, sample.edge_index, weight),
        [sample.x, sample.x.flip(0)],
    )


def test_called_as_any_layer(loops, tiny_weights) -> None:
    conv = tiny_weights(GCN2Conv(7, 0.2, 0.5, 1))
    x_0 = loops.x.flip(0)
    block = as_block(loops.edge_index, loops.num_nodes)
    expected = conv(loops.x, x_0, loops.edge_index)
    torch.testing.assert_close(conv(loops.x, block, carried=x_0), expected)
    torch.testing.assert_close(conv(loops.x, loops.edge_index, carried=x_0), expected)
    torch.testing.assert_close(conv(loops.x, edge_index=block, carried=x_0), expected)


def test_part_of_the_graph_equals_the_slice(loops, cut_block, tiny_weights) -> None:
    conv = tiny_weights(GCN2Conv(7, 0.2, 0.5, 1))
    x_0 = loops.x.flip(0)
    wanted = torch.tensor([6, 1, 9, 0])
    block = cut_block(loops, wanted, first=2)
    out = conv(loops.x[block.src_ids], block, carried=x_0[wanted])
    torch.testing.assert_close(out, conv(loops.x, x_0, loops.edge_index)[wanted], rtol=1e-10, atol=1e-10)


def test_refused(loops) -> None:
    with pytest.raises(ConfigError, match="go together"):
        GCN2Conv(7, 0.2, theta=0.5)
    conv = GCN2Conv(7, 0.2).double()
    with pytest.raises(InputError, match="initial rows"):
        conv(loops.x, loops.edge_index)
    with pytest.raises(InputError, match="no edges given"):
        conv(loops.x, loops.x)
    rows = SparseRows(torch.tensor([0, 1]), torch.tensor([2]), torch.ones(1), 7)
    with pytest.raises(InputError, match="dense rows"):
        conv(rows, torch.tensor([[0], [0]]), carried=torch.zeros(1, 7))
    assert "alpha=0.2" in repr(conv)
