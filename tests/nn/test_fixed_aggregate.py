"""A first layer on rows that were summed before gives what it gives on its neighbours; what cannot be so says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop.errors import InputError, UnsupportedError
from polyhop.graph.aggregated import AggregatedRows, FixedAggregate
from polyhop.graph.block import Block
from polyhop.kernels.keys import Key
from polyhop.nn import (
    GAT,
    GCN,
    GCNII,
    GIN,
    MLP,
    DeepGCN,
    GATConv,
    GCNConv,
    GINConv,
    GraphSAGE,
    Layer,
    Model,
    SAGEConv,
    Stack,
    wrap,
)

LAYERS: dict[str, Callable[[], Layer]] = {
    "mean": lambda: SAGEConv(7, 4),
    "sum": lambda: SAGEConv(7, 4, aggr="add"),
    "mean-alone": lambda: SAGEConv(7, 4, root_weight=False),
    "normalized mean": lambda: SAGEConv(7, 4, normalize=True),
    "gcn": lambda: GCNConv(7, 4),
    "gcn-improved": lambda: GCNConv(7, 4, improved=True),
    "gcn-loopless": lambda: GCNConv(7, 4, add_self_loops=False),
    "gcn-plain-loopless": lambda: GCNConv(7, 4, normalize=False),
    "gin": lambda: GINConv(MLP([7, 5, 4]), eps=0.3),
    "gin with learnt eps": lambda: GINConv(MLP([7, 5, 4]), train_eps=True),
    "gin of any network": lambda: GINConv(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(7, 4))),
}


def without_edges(ids: Tensor) -> Block:
    nothing = torch.zeros(ids.numel() + 1, dtype=torch.int64)
    return Block(nothing, torch.zeros(0, dtype=torch.int32), ids.numel(), src_ids=ids)


def summed(aggregate: FixedAggregate, block: Block, x: Tensor) -> AggregatedRows:
    """Inputs of the block's destinations, of its source rows x."""
    z = aggregate.apply(block, x)
    return AggregatedRows(z, block.dst_rows(x) if aggregate.has_own else None)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layer_equals_itself_on_all_neighbours(
    name: str, weighted: bool, sample: Any, cut_block: Any, tiny_weights: Any
) -> None:
    layer = tiny_weights(LAYERS[name]())
    ids = torch.tensor([20, 3, 7, 21, 0])
    block = cut_block(sample, ids, weighted=weighted, first=2)
    assert block.src_ids is not None
    x = sample.x[block.src_ids]
    grads, outs = [], []
    for run in (
        lambda: layer(x, block),
        lambda: layer(summed(layer.fixed_aggregate(), block, x), without_edges(ids)),
    ):
        layer.zero_grad()
        out = run()
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        outs.append(out.detach())
        grads.append([p.grad.clone() for p in layer.parameters()])
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-10, atol=1e-10)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
        assert bool(a.abs().sum() > 0)


def test_names_tell_sums_apart() -> None:
    names = {name: make().fixed_aggregate().name for name, make in LAYERS.items()}
    same = {
        "normalized mean": "mean",
        "gin": "sum",
        "gin with learnt eps": "sum",
        "gin of any network": "sum",
    }
    assert names == {name: same.get(name, name) for name in LAYERS}


MODELS: dict[str, Callable[..., Model]] = {
    "sage": lambda: GraphSAGE(7, 5, num_layers=3, out_channels=4, dropout=0.4),
    "sage, layer norm, jk": lambda: GraphSAGE(
        7, 5, num_layers=3, out_channels=4, dropout=0.4, norm="layer", norm_kwargs={"mode": "node"}, jk="cat"
    ),
    "sage, batch norm": lambda: GraphSAGE(7, 5, num_layers=3, out_channels=4, norm="batch_norm"),
    "gcn": lambda: GCN(7, 5, num_layers=3, out_channels=4, dropout=0.4, act="elu"),
    "gin": lambda: GIN(7, 5, num_layers=3, out_channels=4, dropout=0.4, train_eps=True),
    "stack": lambda: Stack([SAGEConv(7, 5), GATConv(5, 5), GCNConv(5, 4)], dropout=0.4),
}


@pytest.mark.parametrize("name", MODELS)
def test_model_equals_itself_on_all_neighbours(
    name: str, sample: Any, all_hops: Any, tiny_weights: Any
) -> None:
    """In training: the same units are dropped, the same rows normalised."""
    model = tiny_weights(MODELS[name]()).train()
    blocks = all_hops(sample, torch.tensor([4, 11, 22]), 3)
    x = sample.x[blocks[0].src_ids]
    rows = summed(model.fixed_aggregate(), blocks[0], x)
    key = Key(5, 2, 1)
    expected = model(x, blocks, key=key)
    blocks = [without_edges(blocks[1].src_ids), *blocks[1:]]
    out = model(rows, blocks, key=key)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    if model.dropout.p:
        assert not torch.allclose(out, model(rows, blocks, key=Key(6)))


class _DropsInputs(GraphSAGE):
    def begin(self, x: Any, *, ids: Any = None, key: Any = None) -> Any:
        return {"h": torch.dropout(x, 0.5, self.training)}


class _OwnLayer(GCN):
    def layer(self, i: int, block: Any, state: Any, *, key: Any = None) -> Any:
        return super().layer(i, block, state, key=key)


class _OwnTransform(SAGEConv):
    def transform(self, h: Any, map_first: bool) -> Tensor:
        return super().transform(h, map_first).relu()


def _wrapped() -> Model:
    from torch_geometric.nn import SAGEConv as Theirs

    return Stack([wrap(Theirs(7, 5)), SAGEConv(5, 4)])


REFUSED: dict[str, tuple[Callable[[], Model], str]] = {
    "attention": (lambda: GAT(7, 6, num_layers=2, heads=2), "GATConv: .*weighs neighbours by what it learns"),
    "maximum": (lambda: GraphSAGE(7, 6, num_layers=2, aggr="max"), "SAGEConv: .*'max' .*no sum"),
    "map before": (lambda: GraphSAGE(7, 6, num_layers=2, project=True), "SAGEConv: .*project=True maps"),
    "wrapped": (_wrapped, "Wrapped: .*another library's layer"),
    "gcnii": (lambda: GCNII(7, 6, num_layers=2), "GCNII: .*maps its inputs by learnt weights"),
    "deepgcn": (lambda: DeepGCN(7, 6, num_layers=2), "DeepGCN: .*maps its inputs by learnt weights"),
    "input dropout": (
        lambda: _DropsInputs(7, 6, num_layers=2),
        r"_DropsInputs: .*begin\(\) of its own.*dropout, learnable inputs.*BasicGNN itself has none",
    ),
    "own layer": (lambda: _OwnLayer(7, 6, num_layers=2), r"_OwnLayer: .*layer\(\) of its own"),
    "own transform": (
        lambda: Stack([_OwnTransform(7, 5), SAGEConv(5, 4)]),
        r"_OwnTransform: .*transform\(\) of its own",
    ),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_with_the_reason(make: Callable[[], Model], message: str) -> None:
    model = make()
    with pytest.raises(UnsupportedError, match=message):
        model.fixed_aggregate()
    rows, block = AggregatedRows(torch.randn(3, 7), torch.randn(3, 7)), without_edges(torch.arange(3))
    with pytest.raises(UnsupportedError, match=message):  # nor are they computed by mistake
        model(rows, [block, block])


def test_a_model_that_says_nothing_is_refused() -> None:
    class Plain(Model):
        num_layers = 1

    with pytest.raises(UnsupportedError, match=r"Plain: .*it says of no layer"):
        Plain().fixed_aggregate()
    with pytest.raises(UnsupportedError, match=r"Layer: .*does not say what it sums"):
        Layer().fixed_aggregate()


def test_rows_and_blocks_must_fit_the_layer() -> None:
    layer, z = SAGEConv(7, 4), torch.randn(3, 7)
    block = without_edges(torch.arange(3))
    with pytest.raises(InputError, match="7 columns with own rows, got 7 without"):
        layer(AggregatedRows(z), block)
    with pytest.raises(InputError, match="7 columns with own rows, got 6 with"):
        layer(AggregatedRows(z[:, 1:], z[:, 1:]), block)
    with pytest.raises(InputError, match="7 columns without own rows, got 7 with"):
        GCNConv(7, 4)(AggregatedRows(z, z), block)
    for wrong in (
        without_edges(torch.arange(4)),
        Block(torch.tensor([0, 1, 1, 1]), torch.zeros(1, dtype=torch.int32), 3),
        Block(torch.tensor([0, 0]), torch.zeros(0, dtype=torch.int32), 3),
    ):
        with pytest.raises(InputError, match="3 aggregated rows need a block"):
            layer(AggregatedRows(z, z), wrong)
