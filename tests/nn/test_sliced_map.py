"""A first layer made of parts, each from some columns of its inputs, gives what it gives on all; what cannot, says why."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from polyhop.errors import InputError, UnsupportedError
from polyhop.graph.sliced import MappedRows
from polyhop.nn import MLP, GATConv, GCN2Conv, GCNConv, GINConv, Layer, SAGEConv

LAYERS: dict[str, Callable[[], Layer]] = {
    "mean": lambda: SAGEConv(7, 4),
    "wide mean": lambda: SAGEConv(7, 40),
    "sum": lambda: SAGEConv(7, 4, aggr="add"),
    "mean alone": lambda: SAGEConv(7, 4, root_weight=False),
    "normalized mean": lambda: SAGEConv(7, 4, normalize=True),
    "mean without bias": lambda: SAGEConv(7, 1, bias=False),
    "gcn": lambda: GCNConv(7, 4),
    "gcn of one column": lambda: GCNConv(7, 1),
    "gcn, improved": lambda: GCNConv(7, 4, improved=True),
    "gcn, plain": lambda: GCNConv(7, 4, normalize=False, bias=False),
    "gin": lambda: GINConv(MLP([7, 5, 4], norm=None), eps=0.3),
    "gin with learnt eps": lambda: GINConv(MLP([7, 5, 4], norm=None), train_eps=True),
    "gin, sequential": lambda: GINConv(
        torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.ReLU(), torch.nn.Linear(5, 4))
    ),
    "gat": lambda: GATConv(7, 4, heads=4),
    "gat, mean of heads": lambda: GATConv(7, 4, heads=2, concat=False),
    "gat, residual": lambda: GATConv(7, 4, heads=2, residual=True, bias=False),
    "gat, residual mean": lambda: GATConv(7, 4, heads=2, concat=False, residual=True),
}


@pytest.mark.parametrize("bounds", [(0, 7), (0, 2, 7), (0, 1, 1, 4, 7)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_parts_add_up_to_the_layer(
    name: str, weighted: bool, bounds: tuple[int, ...], sample: Any, cut_block: Any, tiny_weights: Any
) -> None:
    layer = tiny_weights(LAYERS[name]())
    block = cut_block(sample, torch.tensor([20, 3, 7, 21, 0]), weighted=weighted, first=2)
    x = sample.x[block.src_ids]

    def from_parts() -> Any:
        sliced = layer.sliced_map()
        parts = [
            sliced.apply(block, x[:, start:stop], tuple(weight[:, start:stop] for weight in sliced.weights))
            for start, stop in pairwise(bounds)
        ]
        assert all(
            part.shape == (sliced.num_rows(block.num_src, block.num_dst), sliced.width) for part in parts
        )
        return layer(MappedRows(sum(parts)), block)

    grads, outs = [], []
    for run in (lambda: layer(x, block), from_parts):
        layer.zero_grad()
        out = run()
        (out * torch.linspace(-1, 2, out.numel()).view_as(out)).sum().backward()
        outs.append(out.detach())
        grads.append([parameter.grad.clone() for parameter in layer.parameters()])
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-10, atol=1e-10)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
        assert bool(a.abs().sum() > 0)


def test_mapped_rows_must_fit(plain: Any, cut_block: Any, tiny_weights: Any) -> None:
    block = cut_block(plain, torch.tensor([20, 3, 7]))
    for layer, rows, width in ((SAGEConv(7, 4), 3, 4), (GATConv(7, 4, heads=2), block.num_src, 8)):
        tiny_weights(layer)(MappedRows(torch.zeros(rows, width, dtype=torch.float64)), block)
        for shape in ((rows + 1, width), (rows, width + 1)):
            with pytest.raises(InputError, match="expected mapped rows"):
                layer(MappedRows(torch.zeros(shape, dtype=torch.float64)), block)


class _Squared(GCNConv):
    def transform(self, h: Any, map_first: bool) -> Any:
        return super().transform(h * h, map_first)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (SAGEConv(7, 4, aggr="max"), "aggr='max' takes a maximum"),
        (SAGEConv(7, 4, project=True), "project=True puts a relu"),
        (
            GINConv(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(7, 4))),
            "does not begin with a Linear",
        ),
        (GCN2Conv(7, 0.1), "does not say which product"),
        (_Squared(7, 4), r"transform\(\) of its own"),
    ],
)
def test_what_is_no_sum_over_columns_says_why(layer: Layer, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=f"columns are not possible: .*{reason}"):
        layer.sliced_map()
