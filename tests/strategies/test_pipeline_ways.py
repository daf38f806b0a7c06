"""Strategy ``pipeline`` with several ways a stage: the full graph where no history is read (I7), the same bits at any number
of stages (I3), the gradient of what was computed (I4), what is read (I8, I9), bytes by boundary, direction and way."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop import nn
from polyhop.comm import Collective, run_in_threads
from polyhop.errors import ConfigError, UnsupportedError
from polyhop.graph import Graph
from polyhop.kernels.keys import Key
from polyhop.sample import full_block
from polyhop.strategies import pipeline
from polyhop.strategies.pipeline_chunks import choose_chunks, cut_chunks
from polyhop.strategies.pipeline_cost import (
    TAIL,
    account_between,
    account_boundaries,
    memory_bytes,
    pipeline_volume,
)
from polyhop.strategies.pipeline_ways import Ways, choose_ways, lay_out
from polyhop.train.loss import cross_entropy_sum

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.strategies.test_pipeline import (  # type: ignore[import-not-found]
    MODELS,
    Stepped,
    alone,
    assert_same,
    build,
    far,
    gradients_of,
    islands,
    joined,
    model_of,
    on_rank,
    stepped,
)

MakeGraph = Callable[..., Graph]
Shape = tuple[int, int]  # stages, ways


def over_ways(
    graph: Graph, name: str, shape: Shape, p: float = 0.0, epochs: int = 1, **options: Any
) -> Stepped:
    stages, ways = shape
    given = {"stages": stages, **options}
    found: Stepped = joined(run_in_threads(stages * ways, on_rank, graph, name, p, epochs, given))
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", [(1, 2), (2, 2), (1, 3)])
def test_one_chunk_a_way_is_the_full_graph(make_graph: MakeGraph, name: str, shape: Shape) -> None:
    """I7: chunks of one tick see each other's rows of this step, and their gradients count once, whatever gamma."""
    graph = make_graph(60)
    expected = alone(graph, name, 0.4, epochs=2)
    found = over_ways(graph, name, shape, 0.4, epochs=2, chunks=shape[1], history_gamma=2.0)
    assert_same(found, expected, 1e-10)
    assert all(meter.history_rows == 0 for meters in found.meters for meter in meters)
    assert any(meter.current_rows for meters in found.meters for meter in meters)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", [(2, 2), (1, 3)])
def test_layer_by_layer_is_the_full_graph(make_graph: MakeGraph, name: str, shape: Shape) -> None:
    """I2, at any number of ways; these have different numbers of chunks."""
    graph = make_graph(60)
    found = over_ways(graph, name, shape, 0.4, epochs=2, chunks=7, exact_layers=True)
    assert_same(found, alone(graph, name, 0.4, epochs=2), 1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_stage_cuts_do_not_matter(make_graph: MakeGraph, name: str) -> None:
    """I3: the same bits at any number of stages of as many ways, dropout, history and uneven ways included."""
    graph = make_graph(60)
    options: dict[str, Any] = {"chunks": 5, "history_gamma": 2.0}
    one = over_ways(graph, name, (1, 2), 0.4, epochs=3, **options)
    for stages in (2, 4):
        assert_same(over_ways(graph, name, (stages, 2), 0.4, epochs=3, **options), one, 0.0)
    assert any(meter.history_rows for meters in one.meters for meter in meters)


def test_three_ways_have_the_same_bits_too(make_graph: MakeGraph) -> None:
    graph = make_graph(60)
    one, two = (over_ways(graph, "gcnii", (stages, 3), 0.4, epochs=3, chunks=8) for stages in (1, 2))
    assert_same(two, one, 0.0)


# What is computed, and what is read


def on_way(
    line: Collective, graph: Graph, name: str, options: dict[str, Any], together: int = 1
) -> dict[str, Any]:
    """A rank's tables before its second epoch, and what came out of that. ``together``: ticks."""
    model = model_of(name, graph, 0.3)
    step = build(line, graph, model, **options)
    step.fallback.together = together
    stepped(step, model, 0)
    step.weights.share()
    with torch.no_grad():
        for weight, p in model.named_parameters():
            if step.weights.owner[weight] // len(step.ways) == step._layout.stage(line.rank):
                p.add_(p.grad, alpha=-0.5)
    step.weights.share()
    before = {layer: table.clone() for layer, table in step.history.rows.items()}
    loss = stepped(step, model, 1)
    return {
        "step": step,
        "model": model,
        "before": before,
        "loss": loss,
        "orders": step._orders(1),
        "gradients": gradients_of(model),
        "after": {layer: table.clone() for layer, table in step.history.rows.items()},
        "meter": step.meter,
    }


def surrogate(
    graph: Graph, found: list[dict[str, Any]], ways: int, key: Key, together: int = 1
) -> tuple[Tensor, Any]:
    """The loss of the epoch as one autograd graph on the whole graph: rows of ticks to come are constants.

    ``together``: ticks that count as one.
    """
    model, orders = found[0]["model"], found[0]["orders"]
    assert graph.x is not None
    assert graph.y is not None
    assert graph.split is not None
    x, y = graph.x.all(), graph.y
    assert isinstance(x, Tensor)
    train = graph.split.train[y[graph.split.train] >= 0]
    begun = model.begin(x.double(), key=key)
    place = {chunk: tick // together for order in orders for tick, chunk in enumerate(order)}
    chunks = {c: found[way]["step"].chunks for way in range(ways) for c in found[way]["step"].chunks.numbers}
    chunk_of = torch.empty(graph.num_nodes, dtype=torch.int64)
    for c, held in chunks.items():
        chunk_of[held.ids[held[c].rows]] = c
    old: dict[int, Tensor] = {}  # by layer and the user's ids
    for each in found:
        for layer, table in each["before"].items():
            held = each["step"].chunks
            num_own = held.chunks[-1].stop
            whole = old.setdefault(layer, table.new_full((graph.num_nodes, *table.shape[1:]), float("nan")))
            whole[held.ids[:num_own]] = table[:num_own]
    now: dict[int, dict[int, Tensor]] = {}  # layer -> id -> row of this epoch
    total = x.new_zeros((), dtype=torch.float64)
    for tick in range(1 + max(place.values())):
        here = [chunk for order in orders for chunk in order if place[chunk] == tick]
        states: dict[int, Any] = {}
        for layer in range(model.num_layers):
            for c in here if layer else []:  # before any of the tick goes on
                ids = chunks[c][c].block.dst_ids()
                now.setdefault(layer, {}).update(zip(ids.tolist(), states[c]["h"], strict=True))
            for c in here:
                block = chunks[c][c].block
                ids, own = block.src_ids, block.dst_ids()
                if layer == 0:
                    states[c] = {n: v[ids] if n == "h" else v[own] for n, v in begun.items()}
                else:
                    rows = [
                        now[layer][i] if place[int(chunk_of[i])] <= tick else old[layer][i]
                        for i in ids.tolist()
                    ]
                    mixed = states[c] | {"h": torch.stack(rows)}
                    states[c] = model.dropped(layer - 1, mixed, ids=ids, key=key)
                states[c] = dict(model.undropped(layer, block, states[c], key=key))
        for c in here:
            ids = chunks[c][c].block.dst_ids()
            last = model.dropped(model.num_layers - 1, states[c], ids=ids, key=key)
            logits, wanted = model.finish(last, ids=ids, key=key), torch.isin(ids, train)
            total = total + cross_entropy_sum(logits[wanted], y[ids[wanted]]) / train.numel()
    return total, model


@pytest.mark.parametrize("name", ["gcn", "sage", "gat", "gcnii", "deepgcn"])
@pytest.mark.parametrize("shape", [(1, 2), (2, 2), (1, 3)])
def test_gradient_is_that_of_what_was_computed(make_graph: MakeGraph, name: str, shape: Shape) -> None:
    """I4, and with it that every row which is read is the one that the order says, of this epoch or of the last."""
    graph = make_graph(60)
    options = {"stages": shape[0], "chunks": 3 * shape[1] - 1}
    found = run_in_threads(shape[0] * shape[1], on_way, graph, name, options)
    losses = {each["loss"] for each in found}
    assert len(losses) == 1
    gradients: dict[str, Tensor] = {}
    for each in found:
        gradients |= each["gradients"]
    model = found[0]["model"]
    model.zero_grad(set_to_none=True)
    loss, model = surrogate(graph, found, shape[1], Key(3, 1))
    loss.backward()
    expected = Stepped([float(loss.detach())], gradients_of(model))
    assert_same(Stepped(list(losses), gradients), expected, 1e-12)


@pytest.mark.parametrize("shape", [(1, 2), (2, 2), (2, 3)])
def test_ledger_of_what_was_read(make_graph: MakeGraph, shape: Shape) -> None:
    """I8: rows of ticks up to the own one are of this epoch, in every way; those of later ticks are history; counted."""
    graph = make_graph(60)
    options = {"stages": shape[0], "chunks": 4 * shape[1] - 1}
    found = run_in_threads(shape[0] * shape[1], on_way, graph, "gcn", options)
    seen = 0
    for rank, each in enumerate(found):
        step, orders = each["step"], each["orders"]
        place = {chunk: tick for order in orders for tick, chunk in enumerate(order)}
        reads, current, history = step.chunks.reads(), 0, 0
        for mine in orders[rank % shape[1]]:
            for other, tick in place.items():
                if tick <= place[mine]:
                    current += int(reads[mine, other])
                    seen += int(reads[mine, other]) * (tick == place[mine])
                else:
                    history += int(reads[mine, other])
        stage = rank // shape[1]
        layers = step.bounds[stage + 1] - max(step.bounds[stage], 1)
        assert (each["meter"].current_rows, each["meter"].history_rows) == (
            current * layers,
            history * layers,
        )
        assert current > 0 < history
    assert seen > 0, "no chunk read another of its tick"


def test_halo_is_what_its_owner_has(make_graph: MakeGraph) -> None:
    """After an epoch, every row that a way keeps of another is that way's own, bit for bit."""
    graph = make_graph(60)
    found = run_in_threads(4, on_way, graph, "gat", {"stages": 2, "chunks": 7})
    compared = 0
    for stage in (0, 1):
        own: dict[tuple[int, int], Tensor] = {}
        ways = found[2 * stage : 2 * stage + 2]
        for each in ways:
            held = each["step"].chunks
            for layer, table in each["after"].items():
                own |= {
                    (layer, i): table[at] for at, i in enumerate(held.ids[: held.chunks[-1].stop].tolist())
                }
        for each in ways:
            held = each["step"].chunks
            for layer, table in each["after"].items():
                for at in range(held.chunks[-1].stop, held.num_rows):
                    assert torch.equal(table[at], own[layer, int(held.ids[at])])
                    compared += 1
    assert compared > 50


@pytest.mark.parametrize("period", [1, 3])
def test_history_is_never_older_than_its_period(make_graph: MakeGraph, period: int) -> None:
    """I9."""
    found = over_ways(make_graph(60), "gcnii", (2, 2), epochs=7, chunks=7, history_period=period)
    for meters in found.meters:
        assert [set(meter.ages) for meter in meters] == [{epoch % period + 1} for epoch in range(7)]


def test_history_is_exact_where_weights_stand_still(make_graph: MakeGraph) -> None:
    """I5: at once after the exact sweep, which fills the halo too."""
    graph = make_graph(60)
    expected = alone(graph, "gcnii").losses[0]
    found = over_ways(graph, "gcnii", (2, 2), epochs=3, chunks=6)
    assert found.losses == pytest.approx([expected] * 3, rel=1e-12)
    assert all(meter.relative_error < 1e-12 for meters in found.meters for meter in meters)


def test_doubled_gradients_are_exact_on_average_over_orders(make_graph: MakeGraph, monkeypatch: Any) -> None:
    """I11, over all pairs of orders of two chunks a way: pairs of one tick count once, others twice or not at all."""
    graph = make_graph(60)
    monkeypatch.setitem(MODELS, "two", lambda f, c, p: nn.GCN(f, 12, num_layers=2, out_channels=c))
    orders = list(product(permutations((0, 1)), permutations((2, 3))))

    def run(line: Collective) -> list[dict[str, Tensor]]:
        model = model_of("two", graph, 0.0)
        step = build(line, graph, model, chunks=4, stages=1, history_gamma=2.0)
        found = []
        for epoch in range(len(orders)):
            stepped(step, model, epoch)
            found.append(gradients_of(model))
        return found

    def drawn(chunks: range, seed: int, epoch: int, kind: str) -> tuple[int, ...]:
        return orders[epoch][chunks.start // 2]

    monkeypatch.setattr(pipeline, "chunk_order", drawn)
    found = run_in_threads(2, run)[0]
    expected = alone(graph, "two").gradients
    for name, value in expected.items():
        assert far(torch.stack([each[name] for each in found]).mean(0), value) < 1e-12, name
    assert far(found[0]["convs.0.lin.weight"], expected["convs.0.lin.weight"]) > 1e-3


# What is held, and what is sent


def held(line: Collective, graph: Graph) -> dict[str, int]:
    step = build(line, graph, model_of("gcn", graph, 0.0), chunks=6, stages=1)
    own = sum(chunk.num_rows for chunk in step.chunks.chunks)
    return {
        "own": own,
        "halo": step.chunks.num_rows - own,
        "read": int(step.ways.num_read[:, line.rank].sum()),
        "edges": sum(chunk.block.num_edges for chunk in step.chunks.chunks),
        "table": step.history.rows[1].shape[0],
        "x": step._stage._x.shape[0],
        "bytes": step.history.num_bytes,
    }


def test_a_way_keeps_its_own_rows_and_its_halo_alone() -> None:
    graph = islands(6, 20)
    found = run_in_threads(3, held, graph)
    assert sum(each["own"] for each in found) == graph.num_nodes
    assert sum(each["edges"] for each in found) == graph.num_edges
    for each in found:
        assert each["halo"] == each["read"]
        assert each["table"] == each["x"] == each["own"] + each["halo"]
        assert each["own"] < 0.45 * graph.num_nodes
        tables = memory_bytes(each["own"] + each["halo"], [12] * 3, saved=0, value_bytes=8)
        assert each["bytes"] == tables


def test_ways_are_parts_of_a_direct_cut(make_graph: MakeGraph) -> None:
    """As few rows cross as if there were no chunks; chunks of K parts dealt out in turn would let more cross."""
    block = full_block(make_graph(400))
    owner, counts = choose_ways(block, 12, 3, seed=1)
    assert counts == [4, 4, 4]
    assert torch.bincount(owner.long()).min() > 0
    parts = choose_chunks(block, 3, 1)
    assert torch.equal(owner // 4, parts)
    chosen = int(Ways.of(block, owner, counts, 0).num_read.sum())
    assert chosen == int(Ways.of(block, parts, [1, 1, 1], 0).num_read.sum())
    dealt = choose_chunks(block, 12, 1)
    assert chosen < int(Ways.of(block, dealt, [4, 4, 4], 0).num_read.sum())


def test_lists_of_ways_fit_one_another(make_graph: MakeGraph) -> None:
    block = full_block(make_graph(120))
    owner, counts = choose_ways(block, 7, 3, seed=2)
    ways = [Ways.of(block, owner, counts, way) for way in range(3)]
    chunks = [cut_chunks(block, owner, ways[way].chunks[way]) for way in range(3)]
    for here, reader in product(range(3), range(3)):
        for chunk in ways[here].chunks[here]:
            lent = ways[here].lent[chunk, reader]
            at = chunks[reader].halo_rows(chunk) if here != reader else slice(0, 0)
            assert torch.equal(chunks[here].ids[lent], chunks[reader].ids[at])
            assert lent.numel() == ways[0].num_read[chunk, reader]


@pytest.mark.parametrize("name", ["gcn", "gcnii", "sage-jk", "gat"])
@pytest.mark.parametrize("exact", [False, True])
def test_bytes_are_those_accounted(make_graph: MakeGraph, name: str, exact: bool) -> None:
    for shape in ((1, 2), (2, 2), (2, 3)):
        found = over_ways(make_graph(60), name, shape, epochs=2, chunks=7, exact_layers=exact)
        for rank in range(shape[0] * shape[1]):
            counted = found.costs[rank].only("hidden", "gradients")
            for expected in (found.accounts[rank], found.estimates[rank]):
                assert dict(counted.bytes) == dict(expected.bytes), rank
                assert dict(counted.messages) == dict(expected.messages), rank
            assert set(found.costs[rank].bytes) == {"hidden", "gradients"}


def sent_by_rank(line: Collective, graph: Graph, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Bytes that a rank sends to each other in its second epoch, beside what is accounted."""
    model = model_of(name, graph, 0.0)
    step = build(line, graph, model, **options)
    stepped(step, model, 0)
    line.barrier()

    def now() -> list[dict[str, float]]:
        return [dict(line.traffic.to([q]).bytes) for q in range(line.num_ranks)]

    before = now()
    stepped(step, model, 1)
    sent = [
        {kind: to.get(kind, 0) - was.get(kind, 0) for kind in ("hidden", "gradients")}
        for to, was in zip(now(), before, strict=True)
    ]
    schedule = step.schedule(1)
    boundaries = account_boundaries(schedule, step.chunks.sizes, step.boundaries)
    between = list(account_between(schedule, step.between, line.rank))
    columns = [each["h"][0][0] for each in step.pieces.states[1:-1]]
    return {
        "sent": sent,
        "boundaries": boundaries,
        "between": between,
        "columns": columns,
        "crossing": [each.columns for each in step.boundaries],
        "share": int(step.ways.num_read.sum()) / graph.num_nodes,
        "weights": step.weights.num_own,
    }


@pytest.mark.parametrize("name", ["gcn", "gcnii"])
def test_bytes_by_boundary_direction_and_way(make_graph: MakeGraph, name: str) -> None:
    """Counted towards each rank; all together the formula of the hybrid, 2 b n (sum C + R(D) sum H) + 2 (D - 1) b W."""
    graph, (stages, ways) = make_graph(60), (2, 2)
    found = run_in_threads(4, sent_by_rank, graph, name, {"stages": stages, "chunks": 6})
    up = sum(found[way]["sent"][ways + way]["hidden"] for way in range(ways))
    down = sum(found[ways + way]["sent"][way]["hidden"] for way in range(ways))
    assert {(0, "forward"): up, (0, "backward"): down} == found[0]["boundaries"]
    halo = 0.0
    for rank, each in enumerate(found):
        for to in range(4):
            if to // ways == rank // ways and to != rank:
                expected = sum(size for way, _, size in each["between"] if way == to % ways)
                assert each["sent"][to]["hidden"] == expected > 0
                halo += expected
            elif to % ways != rank % ways:
                assert each["sent"][to]["hidden"] == 0
    forward = sum(size for each in found for _, direction, size in each["between"] if direction == "forward")
    assert 2 * forward == halo
    one = found[0]
    formula = pipeline_volume(
        graph.num_nodes,
        one["crossing"],
        num_ways=ways,
        halo_share=one["share"],
        layer_columns=one["columns"],
        num_weights=sum(one["weights"]),
        value_bytes=8,
    )
    assert up + down == formula.boundaries
    assert halo == pytest.approx(formula.halo, rel=1e-12)
    gradients = sum(to["gradients"] for each in found for to in each["sent"])
    assert gradients - 4 * 3 * TAIL * 8 == formula.weights
    num_weights = sum(p.numel() for p in model_of(name, graph, 0.0).parameters())
    assert sum(one["weights"]) == num_weights


def test_a_weight_of_several_stages_is_summed(make_graph: MakeGraph, monkeypatch: Any) -> None:
    def one_slope(f: int, c: int, p: float) -> torch.nn.Module:
        return nn.GCN(f, 12, num_layers=4, out_channels=c, act=torch.nn.PReLU())

    monkeypatch.setitem(MODELS, "prelu", one_slope)
    graph = make_graph(60)
    found = over_ways(graph, "prelu", (2, 2), epochs=2, chunks=2)
    assert_same(found, alone(graph, "prelu", epochs=2), 1e-12)
    for rank in range(4):
        assert (
            dict(found.costs[rank].bytes)
            == dict(found.accounts[rank].bytes)
            == dict(found.estimates[rank].bytes)
        )


def test_layers_of_another_library(make_graph: MakeGraph, monkeypatch: Any) -> None:
    pyg = pytest.importorskip("torch_geometric.nn")

    def stack(f: int, c: int, p: float) -> torch.nn.Module:
        return nn.Stack([pyg.SAGEConv(f, 8), pyg.GATv2Conv(8, 8), nn.SAGEConv(8, c)], dropout=p)

    monkeypatch.setitem(MODELS, "stack", stack)
    graph = make_graph(60)
    expected = alone(graph, "stack", 0.3)
    assert_same(over_ways(graph, "stack", (2, 2), 0.3, chunks=2), expected, 1e-10)
    assert_same(over_ways(graph, "stack", (2, 2), 0.3, chunks=5, exact_layers=True), expected, 1e-10)


def test_sparse_and_weighted_inputs(make_graph: MakeGraph) -> None:
    for options in ({"sparse": True}, {"weighted": True}):
        graph = make_graph(60, **options)
        found = over_ways(graph, "gcn", (2, 2), 0.3, chunks=2)
        assert_same(found, alone(graph, "gcn", 0.3), 1e-7)
        over_ways(graph, "gcnii", (2, 2), 0.3, chunks=5)


def test_every_node_a_chunk_of_its_own(make_graph: MakeGraph) -> None:
    """More chunks than nodes; most have no train node."""
    graph = make_graph(40)
    found = over_ways(graph, "gcn", (2, 2), chunks=1000, exact_layers=True)
    assert_same(found, alone(graph, "gcn"), 1e-10)
    one, two = (over_ways(graph, "gcn", (stages, 2), epochs=2, chunks=1000) for stages in (1, 2))
    assert_same(two, one, 0.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("history_gradients", True),
    ],
)
def test_what_several_ways_do_not_have_is_refused(make_graph: MakeGraph, name: str, value: object) -> None:
    with pytest.raises(UnsupportedError, match=rf"{name} with 2 ranks a stage \(stages=2\)"):
        over_ways(make_graph(60), "gcn", (2, 2), **{name: value})


def test_what_cannot_be_laid_out_is_refused(make_graph: MakeGraph) -> None:
    graph = make_graph(60)
    with pytest.raises(ConfigError, match=r"stages=3 with 4 ranks.*expected one of 1, 2, 4"):
        over_ways(graph, "gcn", (2, 2), stages=3)
    with pytest.raises(ConfigError, match=r"chunks=1 for 2 ways of a stage \(4 ranks in 2 stages\)"):
        over_ways(graph, "gcn", (2, 2), chunks=1)
    with pytest.raises(ConfigError, match="5 stages, and GCN has 4 layers"):
        over_ways(graph, "gcn", (5, 2))
    with pytest.raises(ConfigError, match="2 nodes do not give each of 3 ways"):
        over_ways(islands(2, 1), "gcn", (1, 3), chunks=3)
    assert (lay_out(6, None).num_stages, lay_out(6, 2).num_ways) == (6, 3)


@pytest.mark.parametrize("shape", [(2, 2), (1, 3)])
def test_over_gloo(make_graph: MakeGraph, ranks: Callable[..., list[Any]], shape: Shape) -> None:
    """The bits of virtual ranks."""
    graph, num_ranks = make_graph(60), shape[0] * shape[1]
    for name in ("gcnii", "gat"):
        options = {"stages": shape[0], "chunks": 3 * shape[1] - 1, "history_gamma": 2.0}
        virtual = joined(run_in_threads(num_ranks, on_rank, graph, name, 0.3, 2, options))
        real = joined(ranks(num_ranks, on_rank, graph, name, 0.3, 2, options))
        assert_same(real, virtual, 0.0)
        assert [cost.bytes for cost in real.costs] == [cost.bytes for cost in virtual.costs]
