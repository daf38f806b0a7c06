"""Layers computed again where several ways share a stage: the same bits (I10), with nothing exchanged a second time."""

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
from polyhop.strategies.pipeline_fallback import EVERY
from polyhop.strategies.pipeline_history import History
from polyhop.strategies.pipeline_past import Past

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.strategies.test_pipeline import (  # type: ignore[import-not-found]
    MODELS,
    assert_same,
    build,
    model_of,
    stepped,
)
from tests.strategies.test_pipeline_recompute import trained as each_epoch  # type: ignore[import-not-found]
from tests.strategies.test_pipeline_ways import Shape, over_ways  # type: ignore[import-not-found]

MakeGraph = Callable[..., Graph]
AGAIN: list[dict[str, Any]] = [
    {"chunks": 5},
    {"chunks": 8, "history_period": 3, "history_gamma": 2.0},
    {"chunks": 5, "exact_layers": True},
    {"chunks": 2},
]
CASES = [(name, AGAIN[0]) for name in MODELS]
CASES += [(name, options) for name in ("gcn", "gat", "gcnii") for options in AGAIN[1:]]
BESIDE: list[dict[str, Any]] = [
    {"chunks": 7, "history_sweeps": 2},
    {"chunks": 7, "history_bound": 1e-9},
    {"chunks": 7, "history_sweeps": 1, "bits": 8},
]


def assert_same_bits(graph: Graph, name: str, shape: Shape, options: dict[str, Any], epochs: int) -> None:
    """Of losses, gradients, what was read and bytes, of every epoch, with layers computed again and without."""
    given, num_ranks = {"stages": shape[0], **options}, shape[0] * shape[1]
    plain, again = (
        run_in_threads(num_ranks, each_epoch, graph, name, epochs, {**given, "recompute": recompute})
        for recompute in (False, True)
    )
    for (losses, gradients, meters, sent), (others, more, read, resent) in zip(plain, again, strict=True):
        assert losses == others
        assert [each.keys() for each in gradients] == [each.keys() for each in more]
        for epoch, each in enumerate(gradients):
            for weight, grad in each.items():
                assert torch.equal(grad, more[epoch][weight]), (epoch, weight)
        assert meters == read
        assert sent == resent


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_computed_again_to_the_same_bits(make_graph: MakeGraph, name: str, options: dict[str, Any]) -> None:
    """I10, dropout on, weights moving: also where rows of other ways that were read have been overwritten since."""
    assert_same_bits(make_graph(60), name, (2, 2), options, epochs=3)


@pytest.mark.parametrize("options", BESIDE, ids=str)
@pytest.mark.parametrize("name", ["gcn", "gat", "gcnii"])
def test_computed_again_beside_other_options(
    make_graph: MakeGraph, name: str, options: dict[str, Any]
) -> None:
    assert_same_bits(make_graph(60), name, (2, 2), options, epochs=EVERY + 2)


def test_computed_again_in_three_ways(make_graph: MakeGraph) -> None:
    assert_same_bits(make_graph(60, sparse=True), "gcnii", (1, 3), {"chunks": 8}, epochs=3)


@pytest.mark.parametrize("what", ["own", "halo"])
def test_rows_were_read_and_have_been_overwritten(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The tests above can fail: not putting aside a way's own rows, or its halo's, gives other gradients."""
    graph, options = make_graph(60), {"stages": 2, "chunks": 7, "recompute": True}
    right = run_in_threads(4, each_epoch, graph, "gcn", 2, options)[0][1]
    read = Past.read

    def now(self: Past, layer: int, rows: Tensor) -> Tensor:
        stop = min(at.start for at in self.halo)
        found, is_halo = read(self, layer, rows), rows >= stop
        is_wrong = is_halo if what == "halo" else ~is_halo
        found[is_wrong] = self.tables[layer][rows[is_wrong]]
        return found

    def build_with(self: History, *given: Any, **more: Any) -> None:
        made(self, *given, **more)
        if self.past is not None:
            numbers = self.chunks.numbers
            self.past.tables = self.rows
            self.past.halo = [self.chunks.halo_rows(c) for c in range(len(self.chunks)) if c not in numbers]

    made = History.__init__
    monkeypatch.setattr(History, "__init__", build_with)
    monkeypatch.setattr(Past, "read", now)
    wrong = run_in_threads(4, each_epoch, graph, "gcn", 2, options)[0][1]
    assert any(not torch.equal(grad, wrong[1][weight]) for weight, grad in right[1].items())


def test_stages_do_not_matter_to_layers_computed_again(make_graph: MakeGraph) -> None:
    graph, options = make_graph(60), {"chunks": 5, "recompute": True}
    one = over_ways(graph, "gcnii", (1, 2), 0.4, epochs=3, **options)
    for stages in (2, 4):
        assert_same(over_ways(graph, "gcnii", (stages, 2), 0.4, epochs=3, **options), one, 0.0)


@pytest.mark.parametrize("name", ["gcn", "gat", "gcnii"])
def test_nothing_is_kept_until_the_way_back(make_graph: MakeGraph, name: str) -> None:
    """After the forward pass no graph is alive: what a stage holds is in its tables, or carried beside them."""
    graph = make_graph(60)

    def run(line: Collective) -> None:
        model = model_of(name, graph, 0.3)
        step = build(line, graph, model, chunks=5, stages=1, recompute=True)
        stepped(step, model, 0)
        step._begin(1, step._orders(1), 1, at_once=False)
        stage = step._stage
        stage.begin(Key(3, 1))
        for task in step.schedule(1).tasks(line.rank, "forward"):
            stage.forward(task)
        assert not stage._passed
        kept = [value for each in stage._inputs.values() for value in each.values()]
        assert all(value.grad_fn is None for value in kept)
        assert {key for each in stage._inputs.values() for key in each} <= {"h0"}
        assert all(not value.grad_fn for value in stage._begun.values())

    run_in_threads(2, run)
