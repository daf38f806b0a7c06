"""DeepGCN against the same model built from PyG's DeepGCNLayer."""

from __future__ import annotations

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

from polyhop.errors import ConfigError
from polyhop.nn import DeepGCN


class Example(nn.Module):
    def __init__(self, norm: str, **kwargs: object) -> None:
        super().__init__()
        make = nn.LayerNorm if norm == "layer" else pyg.BatchNorm
        self.node_encoder = nn.Linear(7, 8)
        self.layers = nn.ModuleList(
            pyg.DeepGCNLayer(pyg.SAGEConv(8, 8, **kwargs), make(8), nn.ReLU(), block="res+") for _ in range(3)
        )
        self.norm = make(8)
        self.lin = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        h = self.node_encoder(x)
        for layer in self.layers:
            h = layer(h, edge_index)
        return self.lin(self.norm(h).relu())


@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize("options", [{}, {"aggr": "max"}])
def test_equals_pyg(sample, same_as_pyg, norm, options) -> None:
    ours, theirs = DeepGCN(7, 8, 3, 4, norm=norm, **options), Example(norm, **options)
    same_as_pyg(
        ours, theirs, lambda x: ours(x, sample.edge_index), lambda x: theirs(x, sample.edge_index), [sample.x]
    )


def test_reset_and_refused() -> None:
    model = DeepGCN(7, 8, 2)
    assert model.out_channels == 8
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    model.reset_parameters()
    assert not any(bool((parameter == 7.0).any()) for parameter in model.parameters())
    assert "num_layers=2" in repr(model)
    with pytest.raises(ConfigError, match="num_layers=0"):
        DeepGCN(7, 8, 0)
    with pytest.raises(ConfigError, match="norm='graph'"):
        DeepGCN(7, 8, 2, norm="graph")
