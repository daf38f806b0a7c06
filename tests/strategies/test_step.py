"""How models of every kind are called, and where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from polyhop import strategies
from polyhop.errors import ConfigError, UnsupportedError
from polyhop.graph import Block, Graph, PooledRows
from polyhop.kernels.keys import Key
from polyhop.nn import GCN, GCNConv
from polyhop.strategies.step import Placement, WholeGraph, as_layered, forward_of, place

MakeGraph = Callable[..., Graph]


class Plain(nn.Module):
    """Two convolutions, in PyG's way of calling them."""

    def __init__(self, conv: type[nn.Module]) -> None:
        super().__init__()
        self.a, self.b = conv(8, 4), conv(4, 3)
        self.got: list[type] = []

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        self.got.append(type(edge_index))
        more = () if edge_weight is None else (edge_weight,)
        return self.b(self.a(x, edge_index, *more).relu(), edge_index, *more)


def test_our_layers_in_a_plain_module_get_a_block(make_graph: MakeGraph) -> None:
    model, whole = Plain(GCNConv), WholeGraph(make_graph(), place("cpu", "32-true"))
    logits = forward_of(model)(whole.x, whole.block, None)
    assert model.got == [Block]
    torch.testing.assert_close(logits, model(whole.x, whole.graph.edge_index))


@pytest.mark.parametrize("weighted", [False, True])
def test_pyg_layers_get_edges_and_equal_ours(make_graph: MakeGraph, weighted: bool) -> None:
    pyg = pytest.importorskip("torch_geometric.nn")
    graph = make_graph(weighted=weighted)
    whole = WholeGraph(graph, place("cpu", "32-true"))
    theirs, ours = Plain(pyg.GCNConv), Plain(GCNConv)
    ours.load_state_dict(theirs.state_dict())
    call = forward_of(theirs)
    expected = forward_of(ours)(whole.x, whole.block, None)
    for _ in range(2):
        torch.testing.assert_close(call(whole.x, whole.block, None), expected, rtol=1e-5, atol=1e-6)
    assert theirs.got == [Tensor, Tensor]


def test_sparse_features_are_made_dense_once_for_plain_modules(make_graph: MakeGraph) -> None:
    pyg = pytest.importorskip("torch_geometric.nn")
    whole = WholeGraph(make_graph(sparse=True), place("cpu", "32-true"))
    model = Plain(pyg.GCNConv)
    logits = forward_of(model)(whole.x, whole.block, None)
    torch.testing.assert_close(logits, model(whole.x.dense(), whole.graph.edge_index))


def test_our_models_get_blocks_and_the_key(make_graph: MakeGraph) -> None:
    model = GCN(8, 16, num_layers=2, out_channels=3, dropout=0.5)
    whole = WholeGraph(make_graph(), place("cpu", "32-true"))
    call = forward_of(model)
    a, b, c = (call(whole.x, whole.block, Key(0, 0, step)) for step in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert as_layered(model) is model
    assert as_layered(nn.Linear(1, 1)) is None


def test_formats(make_graph: MakeGraph) -> None:
    graph = make_graph(weighted=True)
    double = WholeGraph(graph, place("cpu", "64-true"))
    assert double.x.dtype == torch.float64
    assert double.block.edge_weight.dtype == double.block.in_weight.dtype == torch.float64
    sparse = WholeGraph(make_graph(sparse=True), place("cpu", "64-true"))
    assert sparse.x.dtype == torch.float64
    mixed = place("cpu", "bf16-mixed")
    with mixed.context():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    with place("cpu", "32-true").context():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_rows_in_two_places_stay_where_they_are_or_are_gathered(make_graph: MakeGraph) -> None:
    whole = WholeGraph(make_graph(), place("cpu", "32-true"))
    x, order = whole.x, torch.randperm(whole.x.shape[0])
    pooled, block = PooledRows(x[:5], x[5:]), replace(whole.block, rows=order)
    here = whole.placement
    assert here.rows(pooled) is pooled
    assert here.pooled(pooled, block) == (pooled, block)
    assert here.pooled(x, whole.block) == (x, whole.block)
    for stored in (x, x.to(torch.bfloat16)):
        double = place("cpu", "64-true")
        rows, plain = double.pooled(PooledRows(stored[:5], stored[5:]), block)
        assert torch.equal(rows, stored[order].double())
        assert plain.rows is None
    with pytest.raises(
        UnsupportedError, match=r"float32 on cpu, computing is in torch\.float64 on cpu: gather"
    ):
        double.rows(pooled)
    elsewhere = Placement(torch.device("meta"))
    rows, plain = elsewhere.pooled(pooled, block)
    assert (rows.device.type, tuple(rows.shape), plain.rows) == ("meta", tuple(x.shape), None)


def test_models_of_any_kind_take_rows_in_two_places(make_graph: MakeGraph) -> None:
    class Layered(nn.Module):
        """The three functions, and a forward that does as it likes with its input."""

        num_layers = 1

        def __init__(self) -> None:
            super().__init__()
            self.conv = GCNConv(8, 3)

        def begin(self, x: Tensor) -> dict[str, Tensor]:
            return {"h": x}

        def layer(self, index: int, block: Block, state: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"h": self.conv(state["h"], block)}

        def finish(self, state: dict[str, Tensor]) -> Tensor:
            return state["h"]

        def forward(self, x: Tensor, blocks: Sequence[Block], *, key: Key | None = None) -> Tensor:
            return self.conv(2 * x, blocks[0])

    class Doubled(GCN):
        def forward(self, x: Tensor, blocks: Sequence[Block], *, key: Key | None = None) -> Tensor:
            return super().forward(2 * x, blocks, key=key)

    whole = WholeGraph(make_graph(), place("cpu", "32-true"))
    x, order = whole.x, torch.randperm(whole.x.shape[0])
    pooled, block = PooledRows(x[:5], x[5:]), replace(whole.block, rows=order)
    for model in (GCN(8, 4, 1, 3), Layered(), Doubled(8, 4, 1, 3)):
        assert as_layered(model) is not None
        call = forward_of(model)
        assert torch.equal(call(pooled, (block,), None), call(x[order], (whole.block,), None))
    plain = forward_of(Plain(GCNConv))
    assert torch.equal(plain(pooled, block, None), plain(x[order], whole.block, None))


def test_float32_graphs_are_not_copied(make_graph: MakeGraph) -> None:
    graph = make_graph(weighted=True)
    whole = WholeGraph(graph, place("cpu", "32-true"))
    assert whole.block is whole.host_block
    assert whole.x.data_ptr() == graph.x.values.data_ptr()


def test_what_cannot_be_obeyed(make_graph: MakeGraph) -> None:
    with pytest.raises(ConfigError, match="is not a device"):
        place("gpu", "32-true")
    with pytest.raises(ConfigError, match="Known: 32-true, 64-true, bf16-mixed"):
        place("cpu", "32")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="sees no CUDA device"):
            place("cuda", "32-true")
    with pytest.raises(ConfigError, match="has no features"):
        WholeGraph(replace(make_graph(), x=None), place("cpu", "32-true"))
    with pytest.raises(ConfigError, match=r"unknown strategy 'singel'. Did you mean 'single'"):
        strategies.find("singel")
