"""GINConv against PyG, with networks it can and cannot look into."""

from __future__ import annotations

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

from polyhop.errors import UnsupportedError
from polyhop.graph.features import SparseRows
from polyhop.nn import MLP, GINConv

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


class Opaque(nn.Module):
    """A network with no linear map in sight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.tanh())


NETWORKS = {
    "narrow": lambda: nn.Sequential(nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 4)),
    "wide": lambda: nn.Sequential(nn.Linear(7, 20, bias=False), nn.Tanh(), nn.Linear(20, 4)),
    "pyg linear": lambda: nn.Sequential(pyg.Linear(7, 3), nn.ReLU()),
    "opaque": Opaque,
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("options", [{}, {"eps": 0.3}, {"eps": 0.3, "train_eps": True}])
def test_equals_pyg(sample, same_as_pyg, network, options) -> None:
    ours, theirs = GINConv(NETWORKS[network](), **options), pyg.GINConv(NETWORKS[network](), **options)
    same_as_pyg(
        ours, theirs, lambda x: ours(x, sample.edge_index), lambda x: theirs(x, sample.edge_index), [sample.x]
    )


@pytest.mark.parametrize(
    "options", [{"norm": None}, {"norm": "batch_norm"}, {"norm": "batch_norm", "act_first": True}]
)
def test_mlp_equals_pyg(sample, same_as_pyg, options) -> None:
    ours = GINConv(MLP([7, 3, 4], **options))
    theirs = pyg.GINConv(pyg.MLP([7, 3, 4], **options))
    same_as_pyg(
        ours, theirs, lambda x: ours(x, sample.edge_index), lambda x: theirs(x, sample.edge_index), [sample.x]
    )


@pytest.mark.parametrize("train_eps", [False, True])
def test_sampled_block_by_hand(sample, cut_block, some_edges, tiny_weights, train_eps) -> None:
    conv = tiny_weights(GINConv(NETWORKS["wide"](), eps=0.3, train_eps=train_eps))
    keep = some_edges(sample)
    block = cut_block(sample, torch.tensor([6, 1, 9, 0]), keep=keep, first=2)
    h = sample.x[block.src_ids]
    degree = torch.bincount(sample.edge_index[1], minlength=sample.num_nodes)
    sums = []
    for i in range(4):
        drawn = h[block.indices[block.indptr[i] : block.indptr[i + 1]].long()]
        sums.append(drawn.mean(0) * int(degree[block.src_ids[2 + i]]) + (1 + conv.eps) * h[2 + i])
    torch.testing.assert_close(conv(h, block), conv.nn(torch.stack(sums)), **CLOSE)


def test_widths_are_read_off_the_network() -> None:
    assert (GINConv(NETWORKS["wide"]()).in_channels, GINConv(NETWORKS["wide"]()).out_channels) == (7, 4)
    assert (GINConv(MLP([7, 3, 4])).in_channels, GINConv(MLP([7, 3, 4])).out_channels) == (7, 4)
    assert GINConv(nn.Identity()).out_channels == -1


def test_sparse_rows_need_a_linear_map_first() -> None:
    rows = SparseRows(torch.tensor([0, 1]), torch.tensor([2]), torch.ones(1), 7)
    with pytest.raises(UnsupportedError, match="begins with a Linear"):
        GINConv(Opaque())(rows, torch.tensor([[0], [0]]))


def test_reset_draws_anew() -> None:
    conv = GINConv(NETWORKS["wide"](), eps=0.5, train_eps=True)
    with torch.no_grad():
        conv.eps.fill_(9.0)
    before = conv.nn[0].weight.clone()
    conv.reset_parameters()
    assert float(conv.eps.detach()) == 0.5
    assert not torch.equal(before, conv.nn[0].weight)
    mlp = GINConv(MLP([7, 3, 4]))
    before = mlp.nn.lins[0].weight.clone()
    mlp.reset_parameters()
    assert not torch.equal(before, mlp.nn.lins[0].weight)
