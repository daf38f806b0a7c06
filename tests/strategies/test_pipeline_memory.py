"""The ledger of strategy ``pipeline``: bytes that were foreseen are those of the tensors that are there, exactly."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop.comm import Collective, run_in_threads
from polyhop.graph import Graph
from polyhop.strategies import pipeline_probe
from polyhop.strategies.pipeline_memory import Ledger
from polyhop.strategies.pipeline_probe import begun_bytes, bytes_of, derived_bytes, kept_bytes
from polyhop.strategies.pipeline_schedule import Task

sys.path.insert(0, str(Path(__file__).parent))

import test_pipeline as running  # type: ignore[import-not-found]

MakeGraph = Callable[..., Graph]


def ones(step: Any, chunk: int, layer: int) -> dict[str, Tensor]:
    num_rows = step.chunks[chunk].num_rows
    specs = step.pieces.crossing(layer)
    return {name: torch.ones(num_rows, *shape, dtype=dtype) for name, (shape, dtype) in specs.items()}


def by_layer(task: Task) -> list[Task]:
    """As ways go about it: what one layer has kept is gone before the next is computed again."""
    return [replace(task, first=at, stop=at + 1) for at in reversed(range(task.first, task.stop))]


def held(step: Any, rank: int) -> Ledger:
    """What a stage really has in an epoch; what comes from other stages is ones."""
    stage, history, schedule = step._stage, step.history, step.schedule(1)
    step._begin(1, step._orders(1), step._together, at_once=step._config.exact_layers)
    inputs, begun_grads = begun_bytes(stage)

    def forward() -> None:
        for task in schedule.tasks(rank, "forward"):
            if task.first == stage.first > 0 and task.chunk is not None:
                stage.take(task.chunk, task.first, ones(step, task.chunk, task.first))
            if task.chunk is not None or stage.has_ways:
                stage.forward(task)
            if task.stop == stage.stop < schedule.num_layers and task.chunk is not None:
                stage.outputs(task.chunk)

    kept, again = kept_bytes(stage, forward), []
    for task in schedule.tasks(rank, "backward"):
        if task.stop == stage.stop < schedule.num_layers and task.chunk is not None:
            stage.take_grads(task.chunk, ones(step, task.chunk, task.stop))
        for one in by_layer(task) if stage.has_ways else [task]:
            again.append(kept_bytes(stage, lambda one=one: stage.backward(one), freed=True))  # type: ignore[misc]
        if task.first == stage.first > 0 and task.chunk is not None:
            stage.input_grads(task.chunk, task.first)
    stage.end()
    derived = sum(derived_bytes(stage, chunk) for chunk in step.chunks.numbers)
    kept_tables = (
        history.kept if history.past is None else [history.past.rows, history.past._at, history.past._own]
    )
    used = step.pieces.of_span(stage.first, stage.stop)
    named = dict(stage.model.named_parameters())
    return Ledger(
        edges=bytes_of(stage.parts["structure"]) + derived,
        inputs=bytes_of(stage.parts["x"]) + inputs,
        tables=bytes_of(history.rows),
        history=bytes_of(kept_tables),
        gradients=bytes_of([history.grads, history.given]) + begun_grads,
        activations=kept + (max(again) if stage.recompute else 0),
        weights=bytes_of(stage.model) + 3 * sum(named[name].numel() * 8 for name in used),
    )


def both(
    line: Collective, graph: Graph, name: str, options: dict[str, Any]
) -> tuple[Ledger, Ledger, list[str]]:
    model = running.model_of(name, graph, 0.4)
    step = running.build(line, graph, model, **options)
    assert all(p.grad is None for p in model.parameters())
    return step.memory, held(step, line.rank), step.notes


MODES: list[dict[str, Any]] = [
    {"chunks": 4},
    {"chunks": 4, "recompute": True},
    {"chunks": 4, "recompute": True, "history_period": 3},
    {"chunks": 4, "exact_layers": True},
    {"chunks": 4, "exact_layers": True, "recompute": True},
    {"chunks": 4, "history_gradients": True},
    {"chunks": 4, "history_gradients": True, "recompute": True},
    {"chunks": 1},
]


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("name", ["gcn", "sage", "gat", "gcnii", "deepgcn"])
def test_foreseen_is_held(make_graph: MakeGraph, name: str, options: dict[str, Any]) -> None:
    for foreseen, found, _ in run_in_threads(2, both, make_graph(120), name, options):
        assert foreseen == found


OF_WAYS: list[dict[str, Any]] = [
    {"chunks": 7},
    {"chunks": 7, "recompute": True},
    {"chunks": 7, "recompute": True, "history_period": 3},
    {"chunks": 7, "exact_layers": True, "recompute": True},
    {"chunks": 2},
]


@pytest.mark.parametrize("options", OF_WAYS, ids=str)
@pytest.mark.parametrize("name", ["gcn", "gat", "gcnii"])
def test_foreseen_is_held_by_ways(make_graph: MakeGraph, name: str, options: dict[str, Any]) -> None:
    """Two stages of two ways, with 4 and 3 chunks."""
    for foreseen, found, notes in run_in_threads(4, both, make_graph(120), name, {"stages": 2, **options}):
        assert foreseen == found
        assert any(text.startswith("needs up to") for text in notes)


@pytest.mark.parametrize("recompute", [False, True])
def test_sparse_inputs_of_ways(make_graph: MakeGraph, recompute: bool) -> None:
    options, graph = {"chunks": 7, "stages": 2, "recompute": recompute}, make_graph(120, sparse=True)
    for name in ("gcn", "gcnii"):
        for foreseen, found, _ in run_in_threads(4, both, graph, name, options):
            assert foreseen == found


def test_ways_hold_less(make_graph: MakeGraph) -> None:
    """One stage: a way's tables are of its own rows and its halo's, and lists of what it lends count to its edges."""
    graph = make_graph(120)
    ((one, _, _),) = run_in_threads(1, both, graph, "gcn", {"chunks": 6, "stages": 1})

    def lists(line: Collective) -> tuple[int, int, int, int]:
        step = running.build(line, graph, running.model_of("gcn", graph, 0.4), chunks=6, stages=1)
        lent = 8 * int(step.ways.num_read[step.ways.chunks[line.rank]].sum())
        stage = step._stage
        without = super(type(stage), stage).parts["structure"]
        return (
            step.memory.tables,
            step.chunks.num_rows,
            lent,
            bytes_of(stage.parts["structure"]) - bytes_of(without),
        )

    found = run_in_threads(2, lists)
    for tables, num_rows, lent, beside in found:
        assert tables / num_rows == one.tables / graph.num_nodes
        assert num_rows < graph.num_nodes
        assert beside == lent > 0


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["gcn", "sage", "gin", "gcnii"])
def test_sparse_inputs(make_graph: MakeGraph, name: str, recompute: bool) -> None:
    options = {"chunks": 4, "recompute": recompute}
    for foreseen, found, _ in run_in_threads(2, both, make_graph(120, sparse=True), name, options):
        assert foreseen == found


def test_what_functions_keep_beside_autograd_counts(make_graph: MakeGraph, monkeypatch: Any) -> None:
    """The sparse rows that a chunk reads are an attribute of the product's context: columns, values and where rows begin."""
    graph = make_graph(120, sparse=True)

    def gathered(line: Collective) -> tuple[int, int]:
        step = running.build(line, graph, running.model_of("gcn", graph, 0.4), chunks=4)
        counts = step._rows.indptr.diff()
        read = [counts[chunk.sources()] for chunk in step.chunks.chunks]
        return step.memory.activations, sum(
            int(each.sum()) * (4 + 8) + 8 * (each.numel() + 1) for each in read
        )

    found, expected = run_in_threads(1, gathered)[0]
    monkeypatch.setattr(pipeline_probe, "_beside", lambda held: iter(()))
    without, _ = run_in_threads(1, gathered)[0]
    assert found - without == expected > 0


def test_what_stages_make_for_themselves_counts(make_graph: MakeGraph) -> None:
    options = {"chunks": 4, "shared_rows": "recompute"}
    for foreseen, found, _ in run_in_threads(2, both, make_graph(120), "gcnii", options):
        assert foreseen == found
        assert foreseen.inputs > 120 * 12 * 8


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("ways", [1, 2])
def test_what_is_made_of_sparse_inputs_counts(make_graph: MakeGraph, ways: int, sparse: bool) -> None:
    """A way of a later stage has input rows of its own alone, without its halo's."""
    graph = make_graph(120, sparse=sparse)
    for recompute in (False, True):
        options = {"chunks": 7, "stages": 2, "shared_rows": "recompute", "recompute": recompute}
        for foreseen, found, _ in run_in_threads(2 * ways, both, graph, "gcnii", options):
            assert foreseen == found


def test_recomputation_keeps_less(make_graph: MakeGraph) -> None:
    graph = make_graph(120)
    plain, again = (
        run_in_threads(2, both, graph, "gcn", {"chunks": 4, "recompute": recompute})
        for recompute in (False, True)
    )
    for (one, _, notes), (other, _, _) in zip(plain, again, strict=True):
        assert other.activations < 0.5 * one.activations
        assert other.history > one.history == 0
        assert replace(other, activations=0, history=0, inputs=0) == replace(
            one, activations=0, history=0, inputs=0
        )
        assert any(text.startswith("needs up to") and "activations" in text for text in notes)
