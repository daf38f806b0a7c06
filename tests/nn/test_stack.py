"""Stack: what it takes and what it refuses. What every model must satisfy is in test_model.py."""

from __future__ import annotations

import pytest
import torch
import torch_geometric.nn as pyg

from polyhop.errors import ConfigError, UnsupportedError
from polyhop.nn import GCN2Conv, SAGEConv, Stack


def test_equals_its_layers_one_after_another(loops) -> None:
    torch.manual_seed(0)
    one, two = SAGEConv(7, 8).double(), pyg.SAGEConv(8, 4).double()
    model = Stack([one, two], act="elu")
    expected = two(torch.nn.functional.elu(one(loops.x, loops.edge_index)), loops.edge_index)
    torch.testing.assert_close(model(loops.x, loops.edge_index), expected, rtol=1e-10, atol=1e-10)


def test_refuses_what_it_cannot_run() -> None:
    with pytest.raises(ConfigError, match="at least one layer"):
        Stack([])
    with pytest.raises(UnsupportedError, match="use GCNII"):
        Stack([GCN2Conv(7, 0.1)])


def test_widths() -> None:
    model = Stack([pyg.SAGEConv(7, 8), SAGEConv(8, 4)])
    assert (model.in_channels, model.out_channels, model.num_layers) == (7, 4, 2)
