"""Options of strategy ``pipeline`` where several ways share a stage: they keep what they promise with one way, and bytes are
those accounted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop.comm import Collective, run_in_threads
from polyhop.graph import Graph
from polyhop.kernels.keys import Key
from polyhop.strategies.pipeline_check import check
from polyhop.strategies.pipeline_fallback import EVERY
from polyhop.strategies.pipeline_history import Meter
from polyhop.strategies.pipeline_schedule import Layout, grouped, layer_by_layer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.strategies.test_pipeline import (  # type: ignore[import-not-found]
    LAYERS,
    Stepped,
    alone,
    assert_same,
    build,
    far,
    gradients_of,
    joined,
    model_of,
    on_rank,
    over_stages,
    stepped,
)
from tests.strategies.test_pipeline_training import (  # type: ignore[import-not-found]
    over_stages as trained,
)
from tests.strategies.test_pipeline_ways import (  # type: ignore[import-not-found]
    Shape,
    on_way,
    over_ways,
    surrogate,
)

MakeGraph = Callable[..., Graph]


def assert_accounted(found: Stepped) -> None:
    """What every rank sent is what was accounted and what was estimated, bytes and messages."""
    for rank, cost in enumerate(found.costs):
        counted = cost.only("hidden", "gradients")
        for expected in (found.accounts[rank], found.estimates[rank]):
            assert dict(counted.bytes) == dict(expected.bytes), rank
            assert dict(counted.messages) == dict(expected.messages), rank


# Few bits between stages


@pytest.mark.parametrize("bits", [1, 4, 8, 16])
def test_few_bits_as_with_one_way(make_graph: MakeGraph, bits: int) -> None:
    """Which way a value is rounded depends on the node and not on its way; what ways exchange inside a stage is exact."""
    graph = make_graph(60)
    for name in ("gcn", "gcnii"):
        one = over_stages(graph, name, 2, 0.4, epochs=2, chunks=1, bits=bits)
        for options in ({"chunks": 2}, {"chunks": 5, "exact_layers": True}):
            found = over_ways(graph, name, (2, 2), 0.4, epochs=2, bits=bits, **options)
            assert_same(found, one, 1e-10)
        plain = over_stages(graph, name, 2, 0.4, epochs=2, chunks=1)
        assert plain.losses != pytest.approx(one.losses, rel=1e-6)


@pytest.mark.parametrize("bits", [1, 8, 16, 32])
def test_bytes_of_few_bits_are_accounted(make_graph: MakeGraph, bits: int) -> None:
    graph = make_graph(60)
    for name in ("gat", "gcnii"):
        for shape in ((2, 2), (2, 3)):
            assert_accounted(over_ways(graph, name, shape, 0.3, epochs=2, chunks=7, bits=bits))


def test_few_bits_repeat(make_graph: MakeGraph) -> None:
    """With history too; and over one stage nothing is rounded."""
    graph = make_graph(60)
    options = {"chunks": 5, "history_gamma": 2.0}
    one, again = (over_ways(graph, "gcnii", (2, 2), 0.4, epochs=3, bits=4, **options) for _ in range(2))
    assert_same(again, one, 0.0)
    plain = over_ways(graph, "gcnii", (2, 2), 0.4, epochs=3, **options)
    assert one.losses != plain.losses
    near = over_ways(graph, "gcnii", (2, 2), 0.4, epochs=3, bits=8, **options)
    assert near.losses == pytest.approx(plain.losses, rel=1e-2)
    assert_same(over_ways(graph, "gcnii", (1, 2), 0.4, epochs=3, bits=4, **options), plain, 0.0)


# Sweeps before an epoch


@pytest.mark.parametrize("name", ["gcn", "gcnii"])
@pytest.mark.parametrize("shape", [(1, 2), (2, 2), (1, 3)])
def test_each_sweep_fixes_a_layer(make_graph: MakeGraph, name: str, shape: Shape) -> None:
    """C1, from tables of rubbish: rows that layer l reads are exact after l sweeps, those of other ways too."""
    graph = make_graph(60)
    options = {"stages": shape[0], "chunks": 4 * shape[1] - 1}

    def run(line: Collective, sweeps: int) -> dict[int, Tensor]:
        model = model_of(name, graph, 0.4)
        step = build(line, graph, model, history_sweeps=sweeps, **options)
        for table in step.history.rows.values():
            table.fill_(7.0)
        step.history.is_filled = True
        schedule, key = step.schedule(0), Key(3, 0)
        for _ in range(sweeps):
            step._freshen(schedule, key)
        assert step.chunks.num_rows > step.chunks.chunks[-1].stop
        return {layer: table.clone() for layer, table in step.history.rows.items()}

    def exact(line: Collective) -> dict[int, Tensor]:
        model = model_of(name, graph, 0.4)
        step = build(line, graph, model, exact_layers=True, **options)
        stepped(step, model, 0)
        return {layer: table.clone() for layer, table in step.history.rows.items()}

    num_ranks = shape[0] * shape[1]
    expected = run_in_threads(num_ranks, exact)
    for sweeps in range(1, LAYERS):
        for found, right in zip(run_in_threads(num_ranks, run, sweeps), expected, strict=True):
            for layer, table in found.items():
                assert (far(table, right[layer]) < 1e-12) == (layer <= sweeps), (sweeps, layer)


def moved(
    line: Collective, graph: Graph, name: str, epochs: int, options: dict[str, Any]
) -> tuple[list[float], list[Meter]]:
    """Losses and meters of some epochs; weights move at random in between, alike on all ranks."""
    model = model_of(name, graph, 0.4)
    step, losses, meters = build(line, graph, model, **options), [], []
    for epoch in range(epochs):
        losses.append(stepped(step, model, epoch))
        meters.append(step.meter)
        step.complete_model()
        drawn = torch.Generator().manual_seed(epoch)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape, generator=drawn, dtype=p.dtype), alpha=0.05)
    return losses, meters


@pytest.mark.parametrize("shape", [(1, 2), (2, 2)])
def test_enough_sweeps_give_the_exact_loss(make_graph: MakeGraph, shape: Shape) -> None:
    """With dropout, of weights that have moved. What is read is then of this epoch: age 0."""
    graph, given = make_graph(60), {"stages": shape[0], "chunks": 5}
    num_ranks = shape[0] * shape[1]
    exact, _ = run_in_threads(num_ranks, moved, graph, "gcnii", 3, {"exact_layers": True, **given})[0]
    swept = run_in_threads(num_ranks, moved, graph, "gcnii", 3, {"history_sweeps": LAYERS - 1, **given})
    plain, _ = run_in_threads(num_ranks, moved, graph, "gcnii", 3, given)[0]
    assert swept[0][0] == pytest.approx(exact, rel=1e-12)
    assert plain != pytest.approx(exact, rel=1e-4)
    for _, meters in swept:
        assert all(set(meter.ages) == {0} and meter.relative_error < 1e-12 for meter in meters)


@pytest.mark.parametrize("name", ["gcn", "gat", "gcnii"])
def test_stages_do_not_matter_to_sweeps(make_graph: MakeGraph, name: str) -> None:
    graph, options = make_graph(60), {"chunks": 5, "history_sweeps": 2}
    one = over_ways(graph, name, (1, 2), 0.4, epochs=3, **options)
    for stages in (2, 4):
        assert_same(over_ways(graph, name, (stages, 2), 0.4, epochs=3, **options), one, 0.0)


def test_bytes_of_sweeps_are_accounted(make_graph: MakeGraph) -> None:
    graph = make_graph(60)
    for shape in ((1, 2), (2, 2), (2, 3)):
        for options in ({}, {"bits": 8}, {"exact_layers": True}):
            assert_accounted(
                over_ways(graph, "gcnii", shape, 0.3, epochs=2, chunks=7, history_sweeps=2, **options)
            )


# Chunks of each way that go together


@pytest.mark.parametrize("together", [1, 2, 3, 4, 9])
def test_groups_of_ways_are_a_schedule(together: int) -> None:
    """Ways have 4 and 3 chunks: the last tick is nothing to one of them."""
    orders = [(2, 0, 1, 3), (6, 4, 5)]
    made = grouped(Layout(3, 2), [0, 2, 3, 5], orders, together)
    check(made)
    if together >= 4:
        assert made == layer_by_layer(Layout(3, 2), [0, 2, 3, 5], orders)


@pytest.mark.parametrize("name", ["gcn", "gat", "gcnii", "deepgcn"])
@pytest.mark.parametrize("shape", [(2, 2), (1, 3)])
def test_gradient_of_groups_is_that_of_what_was_computed(
    make_graph: MakeGraph, name: str, shape: Shape
) -> None:
    """I4: a group of ticks reads as one tick would, in every way; gradients come back when the group has gone back."""
    graph, together = make_graph(60), 2
    options = {"stages": shape[0], "chunks": 5 * shape[1] - 1}
    found = run_in_threads(shape[0] * shape[1], on_way, graph, name, options, together)
    gradients: dict[str, Tensor] = {}
    for each in found:
        gradients |= each["gradients"]
    found[0]["model"].zero_grad(set_to_none=True)
    loss, model = surrogate(graph, found, shape[1], Key(3, 1), together)
    loss.backward()
    expected = Stepped([float(loss.detach())], gradients_of(model))
    assert_same(Stepped([found[0]["loss"]], gradients), expected, 1e-12)
    assert all(each["meter"].history_rows for each in found)


def grown(
    line: Collective, graph: Graph, name: str, together: int, options: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor], Meter, tuple[int, int]]:
    """Two epochs; and how many rows of later groups chunks read in the last, by hand."""
    model = model_of(name, graph, 0.4)
    step = build(line, graph, model, **options)
    step.fallback.together = together
    losses = [stepped(step, model, epoch) for epoch in range(2)]
    place = {chunk: at // together for order in step._orders(1) for at, chunk in enumerate(order)}
    reads, stage = step.chunks.reads(), step._layout.stage(line.rank)
    later = sum(int(reads[i, j]) for i in step.chunks.numbers for j in place if place[j] > place[i])
    layers = step.bounds[stage + 1] - max(step.bounds[stage], 1)
    return losses, gradients_of(model), step.meter, (later * layers, int(reads.sum()) * layers)


@pytest.mark.parametrize("name", ["gcn", "gat", "gcnii"])
def test_all_chunks_together_are_exact(make_graph: MakeGraph, name: str) -> None:
    """Before that, the more go together the less is history; what is read is what the order says, at any stage."""
    graph = make_graph(60)
    expected = alone(graph, name, 0.4, epochs=2)
    rows = []
    for together in (1, 2, 4):
        found = run_in_threads(4, grown, graph, name, together, {"stages": 2, "chunks": 7})
        for _, _, meter, (later, read) in found:
            assert (meter.history_rows, meter.current_rows) == (later, read - later)
        rows.append(sum(meter.history_rows for _, _, meter, _ in found))
        one = run_in_threads(2, grown, graph, name, together, {"stages": 1, "chunks": 7})
        assert one[0][0] == found[0][0]
        for _, gradients, _, _ in found:
            assert all(torch.equal(value, one[0][1][weight]) for weight, value in gradients.items())
    assert rows[0] > rows[1] > rows[2] == 0
    assert_same(Stepped(*one[0][:2]), expected, 1e-10)


def test_what_is_decided_by_does_not_depend_on_stages(make_graph: MakeGraph) -> None:
    """Errors of history, summed over ranks, and by hand: what a way's tables were, what they became, how much was read."""
    graph, sums = make_graph(60), []
    for stages in (1, 2):
        found = run_in_threads(2 * stages, on_way, graph, "gcnii", {"stages": stages, "chunks": 7})
        error = 0.0
        for each in found:
            held = each["step"].chunks
            place = {chunk: tick for order in each["orders"] for tick, chunk in enumerate(order)}
            reads = held.reads()
            for j in place:
                at = held.table_rows(j)
                read = sum(int(reads[i, j]) for i in held.numbers if place[i] < place[j])
                for layer in each["before"] if read else []:
                    off = each["after"][layer][at] - each["before"][layer][at]
                    error += read * float(off.square().sum()) / off.shape[0]
        sums.append([sum(getattr(each["meter"], what) for each in found) for what in ("error", "size")])
        assert sums[-1][0] == pytest.approx(error, rel=1e-12)
    assert sums[1] == pytest.approx(sums[0], rel=1e-12)
    assert sums[0][0] > 0


def test_fallback_of_several_ways(make_graph: MakeGraph) -> None:
    """After the first look, and not before; ranks of any stages decide alike, tell it, and end at what is exact."""
    graph, given = make_graph(60), {"chunks": 7, "max_epochs": 3 * EVERY}
    bound = {"history_bound": 0.0}
    plain = trained(graph, 4, stages=2, **given)[1]
    weights, result = trained(graph, 4, stages=2, **given, **bound)
    other, _ = trained(graph, 2, stages=1, **given, **bound)
    losses = [[each["loss"] for each in run.history] for run in (plain, result)]
    assert losses[0][:EVERY] == losses[1][:EVERY]
    assert losses[0][EVERY + 1] != losses[1][EVERY + 1]
    assert all(torch.equal(other[name], value) for name, value in weights.items())

    def noted(line: Collective) -> tuple[list[str], int, int]:
        model = model_of("gcnii", graph, 0.3)
        step = build(line, graph, model, chunks=7, stages=2, history_bound=0.0)
        for epoch in range(2 * EVERY + 1):
            stepped(step, model, epoch)
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.01)
        return step.notes, step.fallback.together, step.meter.history_rows

    for notes, together, history in run_in_threads(4, noted):
        told = [text for text in notes if "go through a layer" in text]
        assert "2 chunks of each way go through a layer together" in told[0]
        assert "all chunks" in told[1]
        assert (together, history) == (4, 0)


@pytest.mark.parametrize("options", [{"history_sweeps": 1}, {"history_bound": 0.0}], ids=str)
def test_resumed_is_undisturbed(make_graph: MakeGraph, tmp_path: Path, options: dict[str, Any]) -> None:
    graph, given = make_graph(60), {"chunks": 7, "eval_every": 4, "stages": 2, **options}
    whole, _ = trained(graph, 4, max_epochs=9, **given)
    folder = {"run_dir": str(tmp_path / "run"), "checkpoint_every": 6}
    trained(graph, 4, max_epochs=6, **given, **folder)
    found, _ = trained(graph, 4, max_epochs=9, resume="auto", **given, **folder)
    assert all(torch.equal(found[name], value) for name, value in whole.items())


# Over processes


@pytest.mark.parametrize("options", [{"bits": 4}, {"history_sweeps": 2}, {"recompute": True}], ids=str)
def test_over_gloo(make_graph: MakeGraph, ranks: Callable[..., list[Any]], options: dict[str, Any]) -> None:
    """The bits of virtual ranks."""
    graph, given = make_graph(60), {"stages": 2, "chunks": 5, **options}
    virtual = joined(run_in_threads(4, on_rank, graph, "gcnii", 0.3, 3, given))
    real = joined(ranks(4, on_rank, graph, "gcnii", 0.3, 3, given))
    assert_same(real, virtual, 0.0)
    assert [cost.bytes for cost in real.costs] == [cost.bytes for cost in virtual.costs]
