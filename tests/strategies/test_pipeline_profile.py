"""Costs of layers, measured: what is measured, who agrees on it, and that results do not depend on the cut."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from polyhop import nn
from polyhop.comm import Collective, run_in_threads
from polyhop.errors import ConfigError
from polyhop.graph import Block, Graph
from polyhop.partition import partition, share
from polyhop.strategies import pipeline, pipeline_setup, place
from polyhop.strategies.pipeline_balance import balance
from polyhop.strategies.pipeline_chunks import choose_chunks, cut_chunks
from polyhop.strategies.pipeline_pieces import Pieces
from polyhop.strategies.pipeline_profile import cut_matters, is_measured, measured_costs
from polyhop.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parent))

import test_pipeline as running  # type: ignore[import-not-found]

MakeGraph = Callable[..., Graph]


def costs_of(graph: Graph, model: Any, num_chunks: int = 3, **given: Any) -> list[float]:
    degree = graph.indptr.diff().int()
    block = Block(graph.indptr, graph.indices, graph.num_nodes, in_degree=degree)
    chunks = cut_chunks(block, choose_chunks(block, num_chunks, 0))
    pieces = Pieces.of(model, graph.num_features)
    assert graph.x is not None
    x = graph.x
    return measured_costs(
        model,
        pieces,
        lambda n: x.gather(torch.arange(n) % graph.num_nodes),
        chunks,
        place("cpu", "64-true"),
        **given,
    )


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", running.MODELS)
def test_every_layer_is_measured_and_nothing_is_left(make_graph: MakeGraph, name: str, sparse: bool) -> None:
    graph = make_graph(60, sparse=sparse and name != "sage-max")
    model = running.model_of(name, graph, 0.4)
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    found = costs_of(graph, model)
    assert len(found) == running.LAYERS
    assert all(cost > 0 for cost in found)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())


def test_layers_alike_are_measured_once_and_wide_ones_cost_more(make_graph: MakeGraph) -> None:
    graph = make_graph(60)
    torch.manual_seed(0)
    model = nn.GCN(graph.num_features, 16, num_layers=8, out_channels=3).double().train()
    ticks = iter(range(100_000))
    found = costs_of(graph, model, clock=lambda: 0.01 * next(ticks))
    assert found[1:-1] == pytest.approx([0.01] * 6)
    # The first, the inner and the last layers and what ends the model: four times each, two looks at the clock.
    assert next(ticks) == 4 * 4 * 2
    convs = [
        nn.SAGEConv(graph.num_features, 8),
        nn.SAGEConv(8, 2048),
        nn.SAGEConv(2048, 2048),
        nn.SAGEConv(2048, 8),
    ]
    costs = costs_of(graph, nn.Stack(convs).double().train(), 1)
    assert max(costs) == costs[2]
    assert balance(costs, 2) in ((0, 2, 4), (0, 3, 4))


def test_when_it_is_measured() -> None:
    assert is_measured("measured", [1.0] * 4, 8, cut_matters=True)
    assert not is_measured("counted", [1e12] * 4, 8, cut_matters=False)
    assert is_measured("auto", [1e12] * 4, 8, cut_matters=False)
    assert not is_measured("auto", [1e12] * 4, 8, cut_matters=True)
    assert not is_measured("auto", [1e6] * 4, 8, cut_matters=False)
    with pytest.raises(ConfigError, match="layer costs"):
        is_measured("guessed", [1.0], 1, cut_matters=False)


def test_where_the_cut_matters(make_graph: MakeGraph) -> None:
    graph = make_graph(60)
    found = {
        name: cut_matters(Pieces.of(running.model_of(name, graph, 0.3), graph.num_features), 32)
        for name in running.MODELS
    }
    assert [name for name, matters in found.items() if matters] == ["sage-jk"]
    assert cut_matters(Pieces.of(running.model_of("gcn", graph, 0.3), graph.num_features), 8)


@pytest.mark.parametrize("name", ["gcn", "gat", "gcnii", "deepgcn"])
def test_results_do_not_depend_on_the_cut(make_graph: MakeGraph, name: str, monkeypatch: Any) -> None:
    """Rank 0's figures are everybody's; whatever they are, so are the bits."""
    graph, options = make_graph(60), {"chunks": 5, "layer_costs": "measured"}
    expected = running.over_stages(graph, name, 1, 0.4, epochs=3, chunks=5)
    for costs, bounds in (([9.0, 1.0, 1.0, 1.0], (0, 1, 4)), ([1.0, 1.0, 1.0, 9.0], (0, 3, 4))):
        seen: list[Any] = []

        def measured(*given: Any, costs: list[float] = costs, seen: list[Any] = seen) -> list[float]:
            seen.append(costs)
            return costs

        monkeypatch.setattr(pipeline_setup, "measured_costs", measured)
        running.assert_same(running.over_stages(graph, name, 2, 0.4, epochs=3, **options), expected, 0.0)
        assert seen == [costs]  # on rank 0 alone
        assert run_in_threads(2, bounds_of, graph, name, options) == [bounds, bounds]


def bounds_of(line: Collective, graph: Graph, name: str, options: dict[str, Any]) -> Any:
    return running.build(line, graph, running.model_of(name, graph, 0.0), **options).bounds


@pytest.mark.parametrize("name", ["gcn", "gcnii", "deepgcn"])
def test_sparse_inputs_do_not_count_as_dense_ones(name: str) -> None:
    """8 of 20,000 columns are set: what begins a model costs little, and stages get as many layers each."""
    model: Any = {"gcn": nn.GCN, "gcnii": nn.GCNII, "deepgcn": nn.DeepGCN}[name]
    pieces = Pieces.of(model(20_000, 64, num_layers=8, out_channels=5), 20_000)
    sparse, dense = pieces.costs(20_000, 1000, 5000, 8.0), pieces.costs(20_000, 1000, 5000)
    assert balance(sparse, 2) == (0, 4, 8)
    assert balance(dense, 2) == (0, 1, 8)
    assert pieces.costs(20_000, 1000, 5000, 20_000.0)[1:] == dense[1:]


def test_ranks_agree_on_sparse_inputs(make_graph: MakeGraph) -> None:
    """Parts differ in how many values their rows have; rank 0's count."""
    graph = make_graph(60, sparse=True)
    found = run_in_threads(3, bounds_of, graph, "gcnii", {"chunks": 5, "layer_costs": "counted"})
    assert found[0] == found[1] == found[2]


SEEDING = threading.Lock()


def fit(line: Collective, graph: Graph, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    with SEEDING:
        torch.manual_seed(7)
        model = nn.GCNII(graph.num_features, 12, num_layers=4, out_channels=graph.num_classes, dropout=0.3)
    held = share(graph, partition(graph, line.num_ranks, "hash"), line.rank)
    given = {"lr": 0.02, "precision": "64-true", "seed": 5, "layer_costs": "measured", "chunks": 5, **options}
    Trainer("pipeline", device="cpu", progress="none", **given).fit(model, held, line=line)
    return model.state_dict()


def test_a_run_that_goes_on_keeps_its_cut(make_graph: MakeGraph, tmp_path: Path, monkeypatch: Any) -> None:
    """Though costs are measured anew, and would cut elsewhere."""
    graph, folder = make_graph(60), {"run_dir": str(tmp_path / "run")}
    monkeypatch.setattr(pipeline_setup, "measured_costs", lambda *given: [9.0, 1.0, 1.0, 1.0])
    whole = run_in_threads(2, fit, graph, {"max_epochs": 6})[0]
    run_in_threads(2, fit, graph, {"max_epochs": 3, **folder})
    monkeypatch.setattr(pipeline_setup, "measured_costs", lambda *given: [1.0, 1.0, 1.0, 9.0])
    laid: list[tuple[int, ...]] = []
    lay_out = pipeline._PipelineStep._lay_out

    def noted(self: Any, bounds: Any) -> None:
        laid.append(tuple(bounds))
        lay_out(self, bounds)

    monkeypatch.setattr(pipeline._PipelineStep, "_lay_out", noted)
    found = run_in_threads(2, fit, graph, {"max_epochs": 6, "resume": "auto", **folder})[0]
    assert sorted(laid) == [(0, 1, 4), (0, 1, 4), (0, 3, 4), (0, 3, 4)]
    assert all(torch.equal(found[name], value) for name, value in whole.items())
