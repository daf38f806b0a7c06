"""Models as chains: dense programs in numpy and the layers' own aggregation give the loss and gradients of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyhop.graph import Block, Sizes
from polyhop.graph.features import SparseRows
from polyhop.kernels import dropout
from polyhop.kernels.keys import Key, Purpose
from polyhop.nn import (
    GAT,
    GCN,
    GATConv,
    GCNConv,
    GraphSAGE,
    SAGEConv,
    Stack,
    as_block,
)
from polyhop.serverless.program import Program
from polyhop.serverless.ragged import Ragged
from polyhop.serverless.segments import Dense, Graph, Segment, segments
from polyhop.serverless.tiles import backward, forward, loss_and_backward

NODES, WIDTH, CLASSES = 24, 7, 4
KEY = Key(3, epoch=1, step=2)
TILE = 5


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def graph(is_weighted: bool = False) -> Block:
    """Loops on some nodes, others without any edge, ids that are not positions."""
    generator = torch.Generator().manual_seed(1)
    chance = torch.rand(NODES - 3, NODES - 3, generator=generator)
    chance.diagonal()[::4] = 0.0
    edges = (chance < 0.15).nonzero().t().contiguous()
    weight = torch.rand(edges.shape[1], generator=generator, dtype=torch.float64) + 0.1
    block = as_block(edges, NODES, weight if is_weighted else None)
    return replace(block, src_ids=torch.randperm(NODES, generator=generator) * 3 + 100)


def inputs() -> Tensor:
    x = torch.randn(NODES, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return x * (torch.rand(NODES, WIDTH, generator=torch.Generator().manual_seed(3)) < 0.5)


def labels() -> Tensor:
    return torch.randint(-1, CLASSES, (NODES,), generator=torch.Generator().manual_seed(4))


def sparse(x: Tensor) -> SparseRows:
    row, column = x.nonzero(as_tuple=True)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(row, minlength=NODES).cumsum(0)])
    return SparseRows(indptr, column, x[row, column], x.shape[1])


def filled(model: nn.Module) -> nn.Module:
    """Seeded noise, so that zero biases count too."""
    generator = torch.Generator().manual_seed(5)
    model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator) * 0.4)
    return model


def layer_of(model: Any, index: int) -> Any:
    return (model.layers if isinstance(model, Stack) else model.convs)[index]


class Server:
    """Runs a chain as a graph server and its functions do, in one process: forward, then back."""

    def __init__(self, model: Any, block: Block, given: Mapping[str, Any]) -> None:
        self.model, self.block, self.values = model, block, dict(given)
        self.weights = {name: value.detach().numpy() for name, value in model.state_dict().items()}
        self.grads: dict[str, np.ndarray] = {}
        self.weight_grads: dict[str, np.ndarray] = {}
        self.outputs: dict[str, np.ndarray] = {}

    def train(self, chain: list[Segment]) -> float:
        undone = []
        for item in chain[:-1]:
            undone.append(self.dense(item) if isinstance(item, Dense) else self.graph(item))
        last = chain[-1]
        assert isinstance(last, Dense)
        self.outputs, rows, weights = loss_and_backward(
            last.program, self.rows(last.program), self.weights, TILE
        )
        self.add(rows, weights)
        for undo in reversed(undone):
            undo()
        return float(self.outputs["loss"])

    def rows(self, program: Program) -> dict[str, Any]:
        return {name: self.values[name] for name in program.rows}

    def add(self, rows: Mapping[str, np.ndarray], weights: Mapping[str, np.ndarray]) -> None:
        for name, grad in rows.items():
            self.grads[name] = self.grads[name] + grad if name in self.grads else grad
        for name, grad in weights.items():
            assert name not in self.weight_grads, f"{name} is in two pieces"
            self.weight_grads[name] = grad

    def dropped(self, values: np.ndarray, site: int) -> np.ndarray:
        code = KEY.at(Purpose.DROPOUT, site)
        return dropout(torch.tensor(values), self.block.dst_ids(), self.model.dropout.p, code).numpy()

    def dense(self, item: Dense) -> Callable[[], None]:
        program, rows = item.program, self.rows(item.program)
        made, _ = forward(program, rows, self.weights, TILE)
        assert not program.sums
        if item.drops is not None:
            (name,) = program.outputs
            made = {name: self.dropped(made[name], item.drops)}
        self.values.update(made)

        def undo() -> None:
            grads = {name: self.grads.pop(name) for name in program.outputs if name in self.grads}
            if item.drops is not None:
                grads = {name: self.dropped(grad, item.drops) for name, grad in grads.items()}
            self.add(*backward(program, rows, self.weights, grads, TILE))

        return undo

    def graph(self, item: Graph) -> Callable[[], None]:
        layer = layer_of(self.model, item.layer)
        leaves = [torch.tensor(self.values[name]).requires_grad_(item.has_gradient) for name in item.takes]
        edge = tuple(leaves[1:]) or None
        z = layer.aggregate(self.block, leaves[0], edge, layer._attention_key(KEY, item.layer))
        z = z.reshape(NODES, -1)
        self.values[item.gives] = z.detach().numpy()

        def undo() -> None:
            grad = self.grads.pop(item.gives, None)
            assert (grad is not None) == item.has_gradient
            if grad is not None:
                z.backward(torch.tensor(grad))
                self.add({name: leaf.grad.numpy() for name, leaf in zip(item.takes, leaves)}, {})  # type: ignore[union-attr]

        return undo


def same_as_model(model: Any, *, is_weighted: bool = False, is_sparse: bool = False) -> list[Segment]:
    """Loss and every gradient to 1e-10; the chain."""
    block, x, y = graph(is_weighted), inputs(), labels()
    filled(model).train()
    count = int((y >= 0).sum())
    sizes = Sizes(block.num_src, block.num_dst, block.num_edges)
    chain = segments(model, sizes, is_sparse=is_sparse, scale=1 / count)
    rows: Any = x.numpy()
    if is_sparse:
        kept = sparse(x)
        rows = Ragged(kept.indptr.numpy(), kept.indices.numpy(), kept.values.numpy(), WIDTH)
    server = Server(model, block, {"h0": rows, "labels": y.numpy()})
    loss = server.train(chain)
    out = model(sparse(x) if is_sparse else x, block, key=KEY)
    expected = F.cross_entropy(out, y, reduction="sum", ignore_index=-1) / count
    expected.backward()
    assert int(server.outputs["count"]) == count
    assert loss == pytest.approx(expected.item(), rel=1e-10)
    named = dict(model.named_parameters())
    assert server.weight_grads.keys() == named.keys()
    for name, parameter in named.items():
        assert parameter.grad is not None
        np.testing.assert_allclose(
            server.weight_grads[name], parameter.grad.numpy(), rtol=1e-10, atol=1e-10, err_msg=name
        )
    assert server.grads == {}  # every gradient found its way to weights
    return chain


GRAPHS = {
    "gcn": lambda **more: GCN(WIDTH, **more),
    "gcn, no bias": lambda **more: GCN(WIDTH, bias=False, **more),
    "gcn, plain sums": lambda **more: GCN(WIDTH, normalize=False, **more),
    "gcn, improved": lambda **more: GCN(WIDTH, improved=True, **more),
    "sage": lambda **more: GraphSAGE(WIDTH, **more),
    "sage, sums": lambda **more: GraphSAGE(WIDTH, aggr="sum", **more),
    "sage, normalize": lambda **more: GraphSAGE(WIDTH, normalize=True, **more),
    "sage, no root": lambda **more: GraphSAGE(WIDTH, root_weight=False, **more),
    "sage, no root, no bias": lambda **more: GraphSAGE(WIDTH, root_weight=False, bias=False, **more),
    "sage, project": lambda **more: GraphSAGE(WIDTH, project=True, **more),
    "sage, project, no root": lambda **more: GraphSAGE(WIDTH, project=True, root_weight=False, **more),
    "sage, no bias": lambda **more: GraphSAGE(WIDTH, bias=False, **more),
    "gat": lambda **more: GAT(WIDTH, **more),
    "gat, heads": lambda **more: GAT(WIDTH, heads=2, **more),
    "gat, mean of heads": lambda **more: GAT(WIDTH, heads=2, concat=False, **more),
    "gat, residual": lambda **more: GAT(WIDTH, heads=2, residual=True, **more),
    "gat, residual, no bias": lambda **more: GAT(WIDTH, heads=2, residual=True, bias=False, **more),
    "gat, no loops": lambda **more: GAT(WIDTH, heads=2, add_self_loops=False, negative_slope=0.4, **more),
}


@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_chain_is_the_model(name: str, num_layers: int, p: float) -> None:
    model = GRAPHS[name](hidden_channels=6, num_layers=num_layers, out_channels=CLASSES, dropout=p)
    chain = same_as_model(model)
    sites = [item.drops for item in chain if isinstance(item, Dense) and item.drops is not None]
    assert sites == (list(range(num_layers - 1)) if p else [])
    assert [item.layer for item in chain if isinstance(item, Graph)] == list(range(num_layers))
    for before, after in pairwise(chain):
        if isinstance(before, Dense) and isinstance(after, Dense):
            assert before.drops is not None  # else they would be one piece


@pytest.mark.parametrize("name", ["gcn", "gcn, improved", "sage", "sage, sums", "gat, heads"])
@pytest.mark.parametrize("hidden", [2, 40])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_weighted_graphs_and_both_orders(name: str, hidden: int, p: float) -> None:
    """Inputs are aggregated first, and once; of other rows those that become fewer columns are mapped first."""
    model = GRAPHS[name](hidden_channels=hidden, num_layers=2, out_channels=CLASSES, dropout=p)
    chain = same_as_model(model, is_weighted=True)
    orders = [item.map_first for item in chain if isinstance(item, Graph)]
    assert orders == ([True, True] if "gat" in name else [False, False] if hidden == 2 else [False, True])
    late = [
        item.map_first
        for item in segments(model, Sizes(NODES, NODES, 50), maps_late=True)
        if isinstance(item, Graph)
    ]
    assert late == ([True, True] if "gat" in name else [False, False])
    first = chain[0]
    assert isinstance(first, Dense) == orders[0]
    if not orders[0]:  # what is summed of the inputs never changes
        assert isinstance(first, Graph)
        assert not first.has_gradient


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("num_layers", [1, 2])
def test_sparse_inputs(name: str, num_layers: int) -> None:
    model = GRAPHS[name](hidden_channels=40, num_layers=num_layers, out_channels=CLASSES, dropout=0.3)
    chain = same_as_model(model, is_sparse=True)
    assert isinstance(chain[0], Dense)
    assert {call.op for call in chain[0].program.calls} & {"linear", "sparse_linear"} == {"sparse_linear"}


@pytest.mark.parametrize(
    "act",
    ["relu", "leaky_relu", "elu", "tanh", "sigmoid", None, torch.tanh, F.elu, F.leaky_relu, nn.Identity()],
)
@pytest.mark.parametrize("name", ["gcn", "gat, heads"])
def test_activations(act: Any, name: str) -> None:
    same_as_model(GRAPHS[name](hidden_channels=6, num_layers=2, out_channels=CLASSES, dropout=0.2, act=act))


def test_arguments_of_activations_count() -> None:
    for act, kwargs in (("leaky_relu", {"negative_slope": 0.4}), ("elu", {"alpha": 0.6})):
        same_as_model(GCN(WIDTH, 6, 2, CLASSES, act=act, act_kwargs=kwargs))


@pytest.mark.parametrize("act_first", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("name", ["gcn", "sage", "gat, heads"])
def test_layer_norm(name: str, affine: bool, act_first: bool) -> None:
    norm = {"mode": "node", "affine": affine, "eps": 0.1}
    model = GRAPHS[name](
        hidden_channels=6, num_layers=3, out_channels=CLASSES, dropout=0.2, norm="layer_norm", norm_kwargs=norm,
        act_first=act_first,
    )  # fmt: skip
    same_as_model(model)


def test_torchs_layer_norm() -> None:
    same_as_model(GCN(WIDTH, 6, 2, CLASSES, norm=nn.LayerNorm(6)))


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_stack_of_different_layers(p: float) -> None:
    layers = [SAGEConv(WIDTH, 6), GATConv(6, 3, heads=2, residual=True), GCNConv(6, CLASSES)]
    same_as_model(Stack(layers, dropout=p, act="elu"))


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_layers_that_leave_rows_as_they_are(p: float) -> None:
    """Without bias and activation there is nothing dense between two aggregations."""
    layers = [GCNConv(WIDTH, 2, bias=False), GCNConv(2, 9, bias=False), GCNConv(9, CLASSES, bias=False)]
    chain = same_as_model(Stack(layers, dropout=p, act=None), is_sparse=True)
    kinds = [type(item).__name__ for item in chain]
    assert kinds[: 4 if p else 3] == ["Dense", "Graph", *(["Dense"] if p else []), "Graph"]
    assert not p or not chain[2].program.calls  # type: ignore[union-attr]


def test_multi_label_loss() -> None:
    model: Any = filled(GCN(WIDTH, 6, 2, CLASSES)).train()
    block, x = graph(), inputs()
    targets = torch.randint(0, 2, (NODES, CLASSES), generator=torch.Generator().manual_seed(1))
    mask = labels() >= 0
    sizes = Sizes(NODES, NODES, block.num_edges)
    chain = segments(model, sizes, loss="binary_cross_entropy", scale=0.01)
    given = {"h0": x.numpy(), "labels": targets.numpy().astype(np.uint8), "mask": mask.numpy()}
    server = Server(model, block, given)
    loss = server.train(chain)
    out = model(x, block, key=KEY)
    expected = F.binary_cross_entropy_with_logits(out[mask], targets[mask].double(), reduction="sum") * 0.01
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(server.weight_grads[name], parameter.grad.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True])
def test_without_a_loss_the_chain_gives_the_models_output(bias: bool) -> None:
    model: Any = filled(GCN(WIDTH, 6, 2, CLASSES, bias=bias, dropout=0.5)).eval()
    block = graph()
    chain = segments(model, Sizes(NODES, NODES, block.num_edges), loss=None)
    server = Server(model, block, {"h0": inputs().numpy()})
    for item in chain:
        # Nothing is dropped where nothing is trained.
        _ = server.dense(replace(item, drops=None)) if isinstance(item, Dense) else server.graph(item)
    last = chain[-1]
    assert isinstance(last, Dense)
    with torch.no_grad():
        expected = model(inputs(), block).numpy()
    np.testing.assert_allclose(server.values[last.program.outputs[0]], expected, rtol=1e-10, atol=1e-12)


def test_names_of_a_chain() -> None:
    """GraphSAGE, aggregated first and then mapped first, with dropout between: own rows as they are, then mapped."""
    model = GraphSAGE(WIDTH, 40, 2, CLASSES, dropout=0.5)
    chain = segments(model, Sizes(NODES, NODES, 50))
    first, hidden, mapped, second, last = chain
    assert first == Graph(0, False, ("h0",), "z0", "h0", has_gradient=False)
    assert isinstance(hidden, Dense)
    assert set(hidden.program.rows) == {"z0", "h0"}
    assert (hidden.program.outputs, hidden.drops) == (("h1",), 0)
    assert set(hidden.weight_names) == {"convs.0.lin_l.weight", "convs.0.lin_l.bias", "convs.0.lin_r.weight"}
    assert isinstance(mapped, Dense)
    assert (tuple(mapped.program.rows), mapped.program.outputs, mapped.drops) == (
        ("h1",),
        ("m1", "own1"),
        None,
    )
    assert second == Graph(1, True, ("m1",), "z1", "own1")
    assert second.needs_own
    assert isinstance(last, Dense)
    assert set(last.program.rows) == {"z1", "own1", "labels"}
    assert not any(row.has_gradient for row in hidden.program.rows.values())
    for item in chain:
        if isinstance(item, Dense):
            assert Program.from_plain(item.program.to_plain()) == item.program


def test_without_dropout_update_and_map_are_one_piece() -> None:
    chain = segments(GAT(WIDTH, 6, 3, CLASSES, heads=2), Sizes(NODES, NODES, 50))
    assert [type(item).__name__ for item in chain] == ["Dense", "Graph"] * 3 + ["Dense"]
    fused = chain[2]
    assert isinstance(fused, Dense)
    assert [call.op for call in fused.program.calls] == ["bias", "relu", "linear", "scores"]
    assert fused.program.outputs == ("m1", "src1", "dst1")
