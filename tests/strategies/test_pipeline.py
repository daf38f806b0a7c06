"""Strategy ``pipeline`` on virtual ranks: the invariants I1 to I6 and I8, I9 of its specification, in double precision."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop import nn
from polyhop.comm import Collective, Cost, run_in_threads
from polyhop.errors import ConfigError, UnsupportedError
from polyhop.graph import Graph, Part
from polyhop.kernels.keys import Key
from polyhop.partition import Partition, share
from polyhop.strategies import Team, WholeGraph, pipeline, pipeline_setup, place, single
from polyhop.strategies.pipeline_history import Meter
from polyhop.train.loss import cross_entropy_sum

MakeGraph = Callable[..., Graph]
SEEDING = threading.Lock()
LAYERS = 4
MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "gcn": lambda f, c, p: nn.GCN(f, 12, num_layers=LAYERS, out_channels=c, dropout=p),
    "sage": lambda f, c, p: nn.GraphSAGE(f, 12, num_layers=LAYERS, out_channels=c, dropout=p),
    "sage-jk": lambda f, c, p: nn.GraphSAGE(
        f, 6, num_layers=LAYERS, out_channels=c, dropout=p, jk="cat", act="elu"
    ),
    "sage-max": lambda f, c, p: nn.GraphSAGE(f, 12, num_layers=LAYERS, out_channels=c, dropout=p, aggr="max"),
    "gat": lambda f, c, p: nn.GAT(f, 8, num_layers=LAYERS, out_channels=c, dropout=p, heads=2),
    "gin": lambda f, c, p: nn.GIN(f, 12, num_layers=LAYERS, out_channels=c, dropout=p),
    "gcnii": lambda f, c, p: nn.GCNII(f, 12, num_layers=LAYERS, out_channels=c, dropout=p),
    "deepgcn": lambda f, c, p: nn.DeepGCN(f, 12, num_layers=LAYERS, out_channels=c, dropout=p),
}


@dataclass
class Stepped:
    """Of some steps on all ranks: losses, gradients of the last one by weight, bytes of the last one by rank."""

    losses: list[float]
    gradients: dict[str, Tensor]
    costs: list[Cost] = field(default_factory=list)
    meters: list[Meter] = field(default_factory=list)
    accounts: list[Cost] = field(default_factory=list)
    estimates: list[Cost] = field(default_factory=list)


def model_of(name: str, graph: Graph, p: float) -> torch.nn.Module:
    with SEEDING:
        torch.manual_seed(7)
        model = MODELS[name](graph.num_features, graph.num_classes, p)
    return model.double().train()


def alone(graph: Graph, name: str, p: float = 0.0, epochs: int = 1) -> Stepped:
    model = model_of(name, graph, p)
    assert graph.split is not None
    assert graph.y is not None
    train = graph.split.train[graph.y[graph.split.train] >= 0]
    whole = WholeGraph(graph, place("cpu", "64-true"))
    step = single.build(model, graph, single.Config(), train_ids=train, whole=whole, loss=cross_entropy_sum)
    losses = [stepped(step, model, epoch) for epoch in range(epochs)]
    return Stepped(losses, gradients_of(model))


def stepped(step: Any, model: torch.nn.Module, epoch: int) -> float:
    model.zero_grad(set_to_none=True)
    return float(step.gradients(next(iter(step.batches(epoch))), Key(3, epoch)))


def gradients_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def build(line: Collective, graph: Graph, model: torch.nn.Module, **options: Any) -> Any:
    owner = (torch.arange(graph.num_nodes) % line.num_ranks).int()
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    config, team, part = pipeline.Config(**options), Team(line), held.part
    whole = pipeline.hold(held, place("cpu", "64-true"), team, config)
    assert held.split is not None
    assert isinstance(part, Part)
    assert part.y is not None
    train = held.split.train[part.y[held.split.train] >= 0]
    return pipeline.build(
        model, held, config, train_ids=train, whole=whole, loss=cross_entropy_sum, team=team
    )


def on_rank(line: Collective, graph: Graph, name: str, p: float, epochs: int, options: dict[str, Any]) -> Any:
    model = model_of(name, graph, p)
    step = build(line, graph, model, **options)
    losses, meters, cost = [], [], Cost()
    for epoch in range(epochs):
        if epoch == epochs - 1 and epochs > 1:
            line.barrier()
        before = line.traffic.now()
        losses.append(stepped(step, model, epoch))
        cost = line.traffic.now() - before
        meters.append(step.meter)
    schedule = step.schedule(epochs - 1)
    accounted = pipeline.account(
        schedule, step.chunks.sizes, step.boundaries, line.rank, 8, step.weights.num_shared, step.between,
        step._num_sweeps,
    )  # fmt: skip
    estimated = pipeline.estimate(step.facts(), line.rank)
    step.close()
    return losses, gradients_of(model), cost, meters, accounted, estimated


def over_stages(
    graph: Graph, name: str, stages: int, p: float = 0.0, epochs: int = 1, **options: Any
) -> Stepped:
    return joined(run_in_threads(stages, on_rank, graph, name, p, epochs, options))


def joined(found: list[Any]) -> Stepped:
    gradients: dict[str, Tensor] = {}
    for losses, own, *_ in found:
        assert losses == found[0][0], "ranks differ in the loss"
        for weight, grad in own.items():
            assert weight not in gradients or torch.equal(gradients[weight], grad), weight
            gradients[weight] = grad
    costs, meters, accounts, estimates = (list(each) for each in list(zip(*found, strict=True))[2:])
    return Stepped(found[0][0], gradients, costs, meters, accounts, estimates)


def far(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max()) / max(float(expected.abs().max()), 1e-30)


def assert_same(found: Stepped, expected: Stepped, bound: float) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=max(bound, 1e-15))
    assert found.gradients.keys() == expected.gradients.keys()
    for name, value in expected.gradients.items():
        assert far(found.gradients[name], value) <= bound, name


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("name", MODELS)
def test_one_chunk_is_the_full_graph(make_graph: MakeGraph, name: str, p: float) -> None:
    """I1: whatever the stages."""
    graph = make_graph(60)
    expected = alone(graph, name, p)
    for stages in (1, 2, 3):
        assert_same(over_stages(graph, name, stages, p, chunks=1), expected, 1e-12)


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("name", MODELS)
def test_layer_by_layer_is_the_full_graph(make_graph: MakeGraph, name: str, p: float) -> None:
    """I2, and for several stages too."""
    graph = make_graph(60)
    expected = alone(graph, name, p, epochs=2)
    for stages in (1, 3):
        found = over_stages(graph, name, stages, p, epochs=2, chunks=5, exact_layers=True)
        assert_same(found, expected, 1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_stage_cuts_do_not_matter(make_graph: MakeGraph, name: str) -> None:
    """I3: the same bits at any number of stages, dropout and history included."""
    graph = make_graph(60)
    options: dict[str, Any] = {"chunks": 5, "history_gamma": 2.0}
    one = over_stages(graph, name, 1, 0.4, epochs=3, **options)
    for stages in (2, 4):
        several = over_stages(graph, name, stages, 0.4, epochs=3, **options)
        assert several.losses == one.losses
        # Rows that several layers carry on get their gradients in another order of sums.
        bound = 1e-13 if name == "sage-jk" else 0.0
        assert_same(several, one, bound)


def test_parts_do_not_matter(make_graph: MakeGraph) -> None:
    """Chunks are those of the graph by the user's ids, however ranks came by their share of it."""
    graph = make_graph(60)
    found = run_in_threads(3, chunk_ids, graph)
    assert found[0] == run_in_threads(1, chunk_ids, graph)[0]
    assert found[0] == found[1] == found[2]


def chunk_ids(line: Collective, graph: Graph) -> list[list[int]]:
    step = build(line, graph, model_of("gcn", graph, 0.0), chunks=5)
    return [step.chunks.ids[chunk.rows].tolist() for chunk in step.chunks.chunks]


def surrogate(
    model: Any, step: Any, x: Tensor, order: list[int], key: Key, y: Tensor, train: Tensor
) -> Tensor:
    """The loss of an epoch as one autograd graph: rows of chunks to come are constants from the tables."""
    chunks, history = step.chunks, step.history
    begun = model.begin(x[chunks.ids], ids=chunks.ids, key=key)
    made: dict[tuple[int, int], Tensor] = {}  # (layer, chunk) -> own rows
    total = x.new_zeros(())
    for chunk in order:
        at = chunks[chunk]
        sources = torch.cat([torch.arange(at.start, at.stop), at.others])
        state = {name: value[sources] for name, value in begun.items()}
        for layer in range(model.num_layers):
            if layer:
                made[layer, chunk] = state["h"]
                others = [
                    made[layer, other][row - chunks[other].start]
                    if (layer, other) in made
                    else history.rows[layer][row].clone()
                    for row, other in zip(at.others.tolist(), at.other_chunks.tolist(), strict=True)
                ]
                rows = torch.cat([state["h"], *(other[None] for other in others)])
                state = model.dropped(layer - 1, state | {"h": rows}, ids=at.block.src_ids, key=key)
            state = model.undropped(layer, at.block, state, key=key)
        ids = at.block.dst_ids()
        state = model.dropped(model.num_layers - 1, state, ids=ids, key=key)
        logits = model.finish(state, ids=ids, key=key)
        wanted = torch.isin(ids, train)
        total = total + cross_entropy_sum(logits[wanted], y[ids[wanted]]) / train.numel()
    return total


@pytest.mark.parametrize("name", ["gcn", "sage", "gat", "gcnii", "deepgcn"])
def test_gradient_is_that_of_what_was_computed(make_graph: MakeGraph, name: str) -> None:
    """I4, in the second epoch, whose history is of the first one's weights."""
    graph = make_graph(60)

    def run(line: Collective) -> None:
        model = model_of(name, graph, 0.3)
        step = build(line, graph, model, chunks=4)
        stepped(step, model, 0)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=-0.5)
        key, order = Key(3, 1), [task.chunk for task in step.schedule(1).tasks(0, "forward")]
        assert graph.x is not None
        assert graph.split is not None
        assert graph.y is not None
        train = graph.split.train[graph.y[graph.split.train] >= 0]
        model.zero_grad(set_to_none=True)
        x = graph.x.all()
        assert isinstance(x, Tensor)
        loss = surrogate(model, step, x.double(), order, key, graph.y, train)
        loss.backward()
        expected = Stepped([float(loss.detach())], gradients_of(model))
        found = Stepped([stepped(step, model, 1)], gradients_of(model))
        assert_same(found, expected, 1e-12)

    run_in_threads(1, run)


def test_nothing_is_kept_of_rows_that_are_summed(make_graph: MakeGraph) -> None:
    """What a chunk's graph saves for its way back has at most as many rows as the chunk; no layer of GCNII maps first."""
    graph, saved = make_graph(60), list[Tensor]()

    def run(line: Collective) -> None:
        model = model_of("gcnii", graph, 0.3)
        step = build(line, graph, model, chunks=4)
        stepped(step, model, 0)
        step.history.begin(1, range(4))
        step._stage.begin(Key(3, 1))
        task = step.schedule(1).tasks(0, "forward")[0]
        with torch.autograd.graph.saved_tensors_hooks(
            lambda each: saved.append(each) or each, lambda each: each
        ):
            step._stage.forward(task)
        chunk = step.chunks[task.chunk]
        assert chunk.others.numel() > 0
        wide = [each.shape for each in saved if each.dim() == 2 and each.shape[0] > chunk.num_rows]
        weights = {tuple(p.shape) for p in model.parameters()} | {
            tuple(p.shape[::-1]) for p in model.parameters()
        }
        assert [shape for shape in wide if tuple(shape) not in weights] == []

    run_in_threads(1, run)


def test_layers_of_another_library(make_graph: MakeGraph, monkeypatch: Any) -> None:
    pyg = pytest.importorskip("torch_geometric.nn")

    def stack(f: int, c: int, p: float) -> torch.nn.Module:
        return nn.Stack([pyg.SAGEConv(f, 8), pyg.GATv2Conv(8, 8), nn.SAGEConv(8, c)], dropout=p)

    monkeypatch.setitem(MODELS, "stack", stack)
    graph = make_graph(60)
    expected = alone(graph, "stack", 0.3)
    for stages in (1, 3):
        found = over_stages(graph, "stack", stages, 0.3, chunks=4, exact_layers=True)
        assert_same(found, expected, 1e-10)
    one, three = (over_stages(graph, "stack", stages, 0.3, epochs=2, chunks=4) for stages in (1, 3))
    assert_same(three, one, 0.0)


@pytest.mark.parametrize("name", ["gcn", "gat", "gcnii", "deepgcn"])
def test_history_is_exact_where_weights_stand_still(make_graph: MakeGraph, name: str) -> None:
    """I5: at once after the exact sweep; from tables of zeros, once every layer has had an epoch."""
    graph = make_graph(60)
    expected = alone(graph, name).losses[0]
    found = over_stages(graph, name, 2, epochs=3, chunks=5)
    assert found.losses == pytest.approx([expected] * 3, rel=1e-12)
    assert all(meter.relative_error < 1e-12 for meters in found.meters for meter in meters)

    def from_zeros(line: Collective) -> list[float]:
        model = model_of(name, graph, 0.0)
        step = build(line, graph, model, chunks=5)
        step.history.is_filled = True
        return [stepped(step, model, epoch) for epoch in range(LAYERS)]

    losses = run_in_threads(2, from_zeros)[0]
    assert losses[0] != pytest.approx(expected, rel=1e-4)
    assert losses[-1] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["gcn", "gat", "gcnii"])
def test_chunks_that_touch_nobody_are_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """I6: a chunk for each connected component, at any order, with dropout, at the first epoch."""
    graph = islands(4, 15)
    monkeypatch.setattr(
        pipeline_setup, "choose_chunks", lambda block, wanted, seed: (torch.arange(60) // 15).int()
    )
    found = over_stages(graph, name, 2, 0.3, epochs=2, chunks=4, history_gamma=2.0)
    assert_same(found, alone(graph, name, 0.3, epochs=2), 1e-12)
    assert all(meter.history_rows == 0 for meters in found.meters for meter in meters)


def islands(count: int, size: int) -> Graph:
    from polyhop.graph import DenseFeatures, Split

    rng = torch.Generator().manual_seed(1)
    num_nodes = count * size
    joined = torch.rand(num_nodes, num_nodes, generator=rng) < 0.3
    group = torch.arange(num_nodes) // size
    joined &= group[:, None] == group[None, :]
    dst, src = joined.nonzero(as_tuple=True)
    indptr = torch.zeros(num_nodes + 1, dtype=torch.int64)
    indptr[1:] = torch.bincount(dst, minlength=num_nodes).cumsum(0)
    ids = torch.arange(num_nodes)
    return Graph(
        indptr,
        src.int(),
        x=DenseFeatures(torch.randn(num_nodes, 8, generator=rng)),
        y=ids % 3,
        split=Split(ids[::2], ids[1::4], ids[3::4]),
        num_classes=3,
    )


def test_doubled_gradients_are_exact_on_average_over_orders(make_graph: MakeGraph, monkeypatch: Any) -> None:
    """I11, over all orders of three chunks instead of some: two layers, so one step from chunk to chunk."""
    from itertools import permutations

    graph = make_graph(60)
    monkeypatch.setitem(MODELS, "two", lambda f, c, p: nn.GCN(f, 12, num_layers=2, out_channels=c))
    orders = list(permutations(range(3)))

    def run(line: Collective) -> list[dict[str, Tensor]]:
        model = model_of("two", graph, 0.0)
        step = build(line, graph, model, chunks=3, history_gamma=2.0)
        found = []
        for epoch in range(len(orders)):
            stepped(step, model, epoch)
            found.append(gradients_of(model))
        return found

    monkeypatch.setattr(pipeline, "chunk_order", lambda chunks, seed, epoch, kind: orders[epoch])
    found = run_in_threads(1, run)[0]
    expected = alone(graph, "two").gradients
    for name, value in expected.items():
        mean = torch.stack([each[name] for each in found]).mean(0)
        assert far(mean, value) < 1e-12, name
    assert far(found[0]["convs.0.lin.weight"], expected["convs.0.lin.weight"]) > 1e-3


@pytest.mark.parametrize("stages", [1, 2])
def test_ledger_of_what_was_read(make_graph: MakeGraph, stages: int) -> None:
    """I8: rows of chunks before are of this epoch, those of chunks after are history; counted."""
    graph = make_graph(60)

    def run(line: Collective) -> tuple[int, int, int, int]:
        model = model_of("gcn", graph, 0.0)
        step = build(line, graph, model, chunks=6)
        stepped(step, model, 0)
        order = [task.chunk for task in step.schedule(0).tasks(0, "forward")]
        reads, before, after = step.chunks.reads(), 0, 0
        for at, chunk in enumerate(order):
            before += int(reads[chunk, order[:at]].sum())
            after += int(reads[chunk, order[at + 1 :]].sum())
        first, stop = step.bounds[line.rank], step.bounds[line.rank + 1]
        layers = stop - max(first, 1)
        return step.meter.current_rows, before * layers, step.meter.history_rows, after * layers

    for current, before, history, after in run_in_threads(stages, run):
        assert current == before > 0
        assert history == after > 0


@pytest.mark.parametrize("period", [1, 3])
def test_history_is_never_older_than_its_period(make_graph: MakeGraph, period: int) -> None:
    """I9."""
    found = over_stages(make_graph(60), "gcnii", 2, epochs=8, chunks=5, history_period=period)
    for meters in found.meters:
        ages = [set(meter.ages) for meter in meters]
        assert ages == [{epoch % period + 1} for epoch in range(8)]


@pytest.mark.parametrize("name", ["gcn", "gcnii", "sage-jk", "gat"])
@pytest.mark.parametrize("exact", [False, True])
def test_bytes_are_those_accounted(make_graph: MakeGraph, name: str, exact: bool) -> None:
    for stages in (2, 3):
        found = over_stages(make_graph(60), name, stages, epochs=2, chunks=5, exact_layers=exact)
        for rank in range(stages):
            counted = found.costs[rank].only("hidden", "gradients")
            for expected in (found.accounts[rank], found.estimates[rank]):
                assert dict(counted.bytes) == dict(expected.bytes), rank
                assert dict(counted.messages) == dict(expected.messages), rank
            assert set(found.costs[rank].bytes) == {"hidden", "gradients"}


def test_bytes_do_not_depend_on_depth_or_chunks(make_graph: MakeGraph, monkeypatch: Any) -> None:
    graph, seen = make_graph(60), set()
    for depth, chunks in ((2, 1), (2, 7), (9, 4)):
        monkeypatch.setitem(MODELS, "deep", lambda f, c, p, depth=depth: nn.GCNII(f, 12, depth, c))
        found = over_stages(graph, "deep", 2, epochs=2, chunks=chunks)
        seen.add(found.costs[0].bytes["hidden"])
    assert seen == {60 * 24 * 8}


def test_every_node_a_chunk_of_its_own(make_graph: MakeGraph) -> None:
    """More chunks than nodes; most have no train node."""
    graph = make_graph(40)
    found = over_stages(graph, "gcn", 2, chunks=1000, exact_layers=True)
    assert_same(found, alone(graph, "gcn"), 1e-10)
    assert len(over_stages(graph, "gcn", 2, epochs=2, chunks=1000).losses) == 2


def test_sparse_and_weighted_inputs(make_graph: MakeGraph) -> None:
    for options in ({"sparse": True}, {"weighted": True}):
        graph = make_graph(60, **options)
        expected = alone(graph, "gcn", 0.3)
        assert_same(over_stages(graph, "gcn", 2, 0.3, chunks=4, exact_layers=True), expected, 1e-7)
        over_stages(graph, "gcnii", 2, 0.3, chunks=4)


def test_a_weight_of_several_stages_is_summed(make_graph: MakeGraph, monkeypatch: Any) -> None:
    def one_slope(f: int, c: int, p: float) -> torch.nn.Module:
        return nn.GCN(f, 12, num_layers=LAYERS, out_channels=c, act=torch.nn.PReLU())

    monkeypatch.setitem(MODELS, "prelu", one_slope)
    graph = make_graph(60)
    found = over_stages(graph, "prelu", 3, chunks=1)
    assert_same(found, alone(graph, "prelu"), 1e-12)
    assert found.costs[0].bytes["gradients"] == (1 + 3) * 2 * 8
    assert dict(found.accounts[0].bytes)["gradients"] == (1 + 3) * 2 * 8


def test_what_cannot_be_spread_is_refused(make_graph: MakeGraph, monkeypatch: Any) -> None:
    graph = make_graph(60)
    with pytest.raises(ConfigError, match="5 ranks, and GCN has 4 layers"):
        over_stages(graph, "gcn", 5)
    monkeypatch.setitem(MODELS, "batch", lambda f, c, p: nn.GCN(f, 12, 2, c, norm="batch"))
    with pytest.raises(UnsupportedError, match="statistics of all rows"):
        over_stages(graph, "batch", 2)
    monkeypatch.setitem(MODELS, "plain", lambda f, c, p: torch.nn.Linear(f, c))
    with pytest.raises(UnsupportedError, match="begin, layer and finish"):
        over_stages(graph, "plain", 2)
    with pytest.raises(ConfigError, match="full graph"):
        over_stages(graph, "gcn", 2, num_neighbors=[3])
    with pytest.raises(ConfigError, match="order of chunks"):
        over_stages(graph, "gcn", 2, chunk_order="random")


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_over_gloo(make_graph: MakeGraph, ranks: Callable[..., list[Any]], stages: int) -> None:
    """The bits of virtual ranks."""
    graph = make_graph(60)
    for name in ("gcnii", "gat"):
        options = {"chunks": 5, "history_gamma": 2.0}
        virtual = over_stages(graph, name, stages, 0.3, epochs=2, **options)
        real = joined(ranks(stages, on_rank, graph, name, 0.3, 2, options))
        assert real.losses == virtual.losses
        assert all(torch.equal(real.gradients[each], grad) for each, grad in virtual.gradients.items())
        assert [cost.bytes for cost in real.costs] == [cost.bytes for cost in virtual.costs]
