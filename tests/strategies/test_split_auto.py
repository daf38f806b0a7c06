"""Ranks choose a depth, or a strategy, by themselves and all alike; what was chosen changes no weights."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop.comm import Collective, run_in_threads
from polyhop.errors import ConfigError
from polyhop.graph import Graph
from polyhop.nn import GCNII, GraphSAGE
from polyhop.partition import Partition, partition, share
from polyhop.plan import Law
from polyhop.strategies import Team, find, place, split_auto
from polyhop.strategies.split_auto import Choice, choose, measure_rates
from polyhop.strategies.split_choice import Rates
from polyhop.train.loss import cross_entropy_sum
from polyhop.trainer import Trainer

MakeGraph = Callable[..., Graph]
Run = Callable[..., list[Any]]
FAN_OUTS = [4, 3, 3]
SEEDING = threading.Lock()
RATES = Rates(1e7, 2e-4, 4e9, Law(near_s=1 / 3e9, flop_s=1 / 6e10), 2e-7, 5e-9, 1e-4, 3e-10)


def chosen(
    line: Collective, graph: Graph, owner: Tensor, given: dict[str, Any], kind: str = "sage"
) -> Choice:  # fmt: skip
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    assert held.split is not None
    made = GraphSAGE if kind == "sage" else GCNII
    model = made(graph.num_features, 16, num_layers=3, out_channels=3)
    return choose(
        model,
        held,
        line,
        place("cpu", "32-true"),
        train_ids=held.split.train,
        num_neighbors=FAN_OUTS,
        batch_size=20,
        **given,
    )


def test_all_ranks_choose_alike_over_gloo(make_graph: MakeGraph, ranks: Run) -> None:
    graph = make_graph(num_nodes=400)
    owner = partition(graph, 3, "hash").owner
    found: list[Choice] = ranks(3, chosen, graph, owner, {"cache_bytes": 2000})
    first = found[0]
    assert {(each.strategy, str(each.options), each.reason) for each in found} == {
        (first.strategy, str(first.options), first.reason)
    }
    assert {str(each.variant) for each in first.order} == {
        *("data", "data with a cache", "pushpull"),
        *(f"split of {k}{copies}" for k in (1, 2, 3) for copies in ("", " with copies")),
    }
    assert first.reason.count(" a step expected") == 1
    assert find(first.strategy).Config(num_neighbors=FAN_OUTS, **first.options)


def test_sparse_rows_and_models_without_columns(make_graph: MakeGraph) -> None:
    graph = make_graph(num_nodes=400, sparse=True)
    owner = torch.where(torch.arange(400) < 250, 0, 1).int()
    found = run_in_threads(2, chosen, graph, owner, {"bits": (32, 8), "rates": RATES}, "gcnii")
    assert len({each.reason for each in found}) == 1
    assert len({str([str(one.variant) for one in each.order]) for each in found}) == 1
    names = {str(each.variant) for each in found[0].order}
    assert "pushpull" not in names  # its inputs are mapped before the first layer
    assert "split of 2 in 8 bits" in names


def test_wide_rows_and_slow_links_are_for_split_narrow_rows_for_data(make_graph: MakeGraph) -> None:
    for width, expected in ((400, "split"), (3, "data")):
        graph = make_graph(num_nodes=400, num_features=width)
        owner = partition(graph, 2, "hash").owner
        slow = replace(RATES, bytes_per_s=1e5, latency_s=0.0, message_s=0.0)
        found = run_in_threads(2, chosen, graph, owner, {"rates": slow, "strategies": ("data", "split")})
        assert found[0].strategy == expected
        assert found[0].reason.startswith("split the " if expected == "split" else "data: ")


def test_a_graph_without_train_nodes_is_refused(make_graph: MakeGraph) -> None:
    graph = make_graph(num_nodes=100)
    assert graph.split is not None
    graph = replace(graph, split=replace(graph.split, train=graph.split.train[:0]))
    with pytest.raises(ConfigError, match="no train nodes"):
        run_in_threads(1, chosen, graph, torch.zeros(100).int(), {})


def rates_of(line: Collective) -> Rates:
    return measure_rates(place("cpu", "32-true"), line)


def test_rates_are_agreed_on() -> None:
    found = run_in_threads(3, rates_of)
    assert found[0] == found[1] == found[2]
    assert found[0].bytes_per_s > 0
    assert found[0].crowding > 0
    assert min(found[0].law.near_s, found[0].law.flop_s, found[0].gather_bytes_per_s) > 0
    alone = run_in_threads(1, rates_of)[0]
    assert alone.latency_s == 0


# Inside split


def built(
    line: Collective, graph: Graph, owner: Tensor, restored: int | None
) -> tuple[list[str], dict[str, Any], int]:
    """(notes, state, layers of a mini-batch that are split) of a step that chose its depth, or was given back another."""
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    assert held.split is not None
    strategy, team = find("split"), Team(line)
    config = strategy.Config(num_neighbors=FAN_OUTS, batch_size=20, prefetch=0, split_depth="auto")
    step = strategy.build(
        GraphSAGE(graph.num_features, 16, num_layers=3, out_channels=3),
        held,
        config,
        train_ids=held.split.train,
        whole=strategy.hold(held, place("cpu", "32-true"), team, config),
        loss=cross_entropy_sum,
        team=team,
    )
    if restored is not None:
        step.restore({"split_depth": torch.tensor([restored])})
    return step.notes, step.state(), len(next(step.batches(0)).layers)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_depth_is_chosen_told_and_kept(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    def always(*_: Any, **__: Any) -> Choice:
        return Choice("split", {"split_depth": depth}, f"depth {depth}", [], RATES)

    monkeypatch.setattr("polyhop.strategies.split.choose", always)
    graph = make_graph()
    owner = partition(graph, 2, "hash").owner
    for notes, state, layers in run_in_threads(2, built, graph, owner, None):
        assert notes == [f"depth {depth}"]
        assert state["split_depth"].tolist() == [depth]
        assert layers == depth
    for notes, state, layers in run_in_threads(2, built, graph, owner, 2):
        assert state["split_depth"].tolist() == [2]
        assert layers == 2
        assert len(notes) == (1 if depth == 2 else 2)


def fitted(line: Collective, graph: Graph, owner: Tensor, options: dict[str, Any]) -> dict[str, Tensor]:
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    with SEEDING:  # ranks are threads, and torch's generator is one
        torch.manual_seed(1)
        model = GraphSAGE(graph.num_features, 8, num_layers=3, out_channels=3, dropout=0.5)
    trainer = Trainer(
        "split", max_epochs=2, batch_size=40, num_neighbors=FAN_OUTS, precision="64-true", device="cpu",
        progress="none", seed=3, **options,
    )  # fmt: skip
    trainer.fit(model, held, line=line)
    return model.state_dict()


def test_weights_are_those_of_any_depth(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph = make_graph()
    owner = partition(graph, 3, "hash").owner
    exact = run_in_threads(3, fitted, graph, owner, {"split_depth": 3})[0]
    run_dir = {"split_depth": "auto", "cache": 2000, "run_dir": str(tmp_path / "run")}
    for weights in run_in_threads(3, fitted, graph, owner, run_dir):
        for name, value in exact.items():
            assert float((weights[name] - value).abs().max()) <= 1e-10, name


def test_only_a_number_or_auto() -> None:
    with pytest.raises(
        ConfigError, match="split_depth='deep': expected a whole number of at least 1, or 'auto'"
    ):
        Trainer("split", num_neighbors=[2], split_depth="deep")
    with pytest.raises(ConfigError, match="split_depth=0"):
        Trainer("split", num_neighbors=[2], split_depth=0)


def test_constants_are_no_more_than_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks whose rounds are quick have quick messages, whatever was measured elsewhere."""
    monkeypatch.setattr(split_auto, "_MESSAGE_S", 10.0)
    found = run_in_threads(2, rates_of)[0]
    assert found.message_s < 10.0
    assert found.latency_s == 0.0
