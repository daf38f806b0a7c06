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
from polyhop.strategies.pipeline_history import Meter

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.strategies.test_pipeline import (  # type: ignore[import-not-found]
    LAYERS,
    Stepped,
    assert_same,
    build,
    far,
    joined,
    model_of,
    on_rank,
    over_stages,
    stepped,
)
from tests.strategies.test_pipeline_ways import Shape, over_ways  # type: ignore[import-not-found]

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


# Over processes


@pytest.mark.parametrize("options", [{"bits": 4}, {"history_sweeps": 2}], ids=str)
def test_over_gloo(make_graph: MakeGraph, ranks: Callable[..., list[Any]], options: dict[str, Any]) -> None:
    """The bits of virtual ranks."""
    graph, given = make_graph(60), {"stages": 2, "chunks": 5, **options}
    virtual = joined(run_in_threads(4, on_rank, graph, "gcnii", 0.3, 3, given))
    real = joined(ranks(4, on_rank, graph, "gcnii", 0.3, 3, given))
    assert_same(real, virtual, 0.0)
    assert [cost.bytes for cost in real.costs] == [cost.bytes for cost in virtual.costs]
