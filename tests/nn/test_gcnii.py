"""GCNII against the model of PyG's citation example, built from PyG's layers."""

from __future__ import annotations

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

from polyhop.errors import ConfigError
from polyhop.nn import GCNII


class Example(nn.Module):
    """PyG's examples/gcn2_cora.py, without its log-softmax."""

    def __init__(self, theta: float | None, shared: bool) -> None:
        super().__init__()
        self.lins = nn.ModuleList([nn.Linear(7, 8), nn.Linear(8, 4)])
        self.convs = nn.ModuleList(
            pyg.GCN2Conv(8, 0.1, theta, None if theta is None else i + 1, shared) for i in range(3)
        )

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        x = x_0 = self.lins[0](x).relu()
        for conv in self.convs:
            x = conv(x, x_0, edge_index).relu()
        return self.lins[1](x)


@pytest.mark.parametrize("theta", [0.5, None])
@pytest.mark.parametrize("shared", [True, False])
def test_equals_pyg(sample, same_as_pyg, theta, shared) -> None:
    ours, theirs = GCNII(7, 8, 3, 4, theta=theta, shared_weights=shared), Example(theta, shared)
    same_as_pyg(
        ours, theirs, lambda x: ours(x, sample.edge_index), lambda x: theirs(x, sample.edge_index), [sample.x]
    )


def test_reset_and_refused() -> None:
    model = GCNII(7, 8, 2)
    assert model.out_channels == 8
    before = {name: p.clone() for name, p in model.named_parameters()}
    model.reset_parameters()
    assert all(not torch.equal(before[name], p) for name, p in model.named_parameters())
    assert "num_layers=2" in repr(model)
    with pytest.raises(ConfigError, match="num_layers=0"):
        GCNII(7, 8, 0)
