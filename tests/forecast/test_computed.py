"""Graphs that nobody stores: what is foreseen of them without a look is what a look at the stored one finds."""

from __future__ import annotations

import pytest
import torch

from polyhop.cluster_planner import plan_cluster, plan_virtual
from polyhop.errors import ConfigError
from polyhop.forecast import GraphStatistics, Inputs, Training, alike_sight, look_at, statistics_of_virtual
from polyhop.forecast.alike import totals_of
from polyhop.graph import materialise
from polyhop.kernels.procedural import Virtual
from polyhop.nn import GraphSAGE
from polyhop.partition import partition
from polyhop.plan import Cluster, Law, Link, Machine
from polyhop.planner import PlanOptions
from polyhop.strategies import macro_plan
from polyhop.train.config import Config

SMALL = Virtual(7, 60_000, 8, num_classes=6, mean_degree=12, num_hot=300)
NUM_TRAIN = 3000
MACHINE = Machine(
    "test", 4, 64e9, 3e7, 5e9, 1e10, 1e-7, 2e-8, 1e-4, 1e-10, 1e-9, 3e8, 1e9, 2.0, Link(1e9, 1e-4)
)  # fmt: skip
LAW = Law(1e-10, 4e-10, 1e-11, 1e-10, 1e-4, 3e7)


def training_of(graph: Virtual, num_train: int, batch_size: int = 512, num_epochs: int = 3) -> Training:
    model = GraphSAGE(graph.num_features, 8, 2, graph.num_classes)
    inputs = Inputs(graph.num_features, are_computed=True)
    sizes = (graph.num_nodes, graph.num_edges, num_train)
    return Training(model, inputs, *sizes, [10, 5], batch_size, num_epochs=num_epochs)


def test_statistics_add_up() -> None:
    found = statistics_of_virtual(SMALL, NUM_TRAIN)
    nodes, into, out = found.cells.unbind(1)
    assert float(nodes.sum()) == pytest.approx(SMALL.num_nodes)
    assert float((nodes * into).sum()) == pytest.approx(SMALL.num_edges)
    assert float((nodes * out).sum()) == pytest.approx(SMALL.num_edges)
    stored = materialise(SMALL, NUM_TRAIN)
    readers = torch.bincount(stored.indices.long(), minlength=stored.num_nodes).double()
    # Squares say how uneven they are: popular nodes have most of them; of others the spread of a Poisson law is left out.
    ours = float((nodes * out**2).sum()) + float((nodes * out).sum())
    assert ours == pytest.approx(float((readers**2).sum()), rel=0.05)
    assert GraphStatistics.from_json(found.to_json()).is_computed


@pytest.mark.parametrize("parts", [2, 4])
def test_foreseen_as_if_it_were_stored_and_looked_at(parts: int) -> None:
    training = training_of(SMALL, NUM_TRAIN)
    stored = materialise(SMALL, NUM_TRAIN)
    seen = totals_of(look_at(stored, partition(stored, parts, "block"), training))
    foreseen = totals_of(alike_sight(statistics_of_virtual(SMALL, NUM_TRAIN), training, parts))
    for name in seen:
        assert foreseen[name] == pytest.approx(seen[name], rel=0.03, abs=1e-9), name


def test_windows_come_back_to_what_train_nodes_reach() -> None:
    """Of few train nodes every epoch draws around the same ones: rows come back though the graph is large."""
    few = 300
    training, stored = training_of(SMALL, few, batch_size=100), materialise(SMALL, few)
    seen = look_at(stored, partition(stored, 2, "block"), training).windows
    foreseen = alike_sight(statistics_of_virtual(SMALL, few), training, 2).windows
    assert seen is not None
    assert foreseen is not None
    for batches in (1, 3, 9):
        rows = [
            macro_plan.sent_share(each, batches) * each.reuse.distinct(batches) for each in (foreseen, seen)
        ]
        assert rows[0] == pytest.approx(rows[1], rel=0.1), batches


def test_own_rows_do_not_cross() -> None:
    """They go through the pool of windows, and on no link."""
    facts = alike_sight(statistics_of_virtual(SMALL, NUM_TRAIN), training_of(SMALL, NUM_TRAIN), 2).windows
    assert facts is not None
    assert 0.4 < macro_plan.sent_share(facts, 1) < 0.5  # of two parts, seeds being one's own
    assert macro_plan.sent_share(macro_plan.revise(facts, macro_plan.Measured(2, distinct_rows=9e3)), 1) == (
        pytest.approx(macro_plan.sent_share(facts, 1))
    )


def options() -> PlanOptions:
    from polyhop.planner import ANY_MODEL

    return PlanOptions(machine=MACHINE.with_law(ANY_MODEL, LAW))


def planned(graph: Virtual, config: Config, ranks: int = 2) -> list[str]:
    statistics = statistics_of_virtual(graph, NUM_TRAIN)
    model = GraphSAGE(graph.num_features, 8, 2, graph.num_classes)
    made = plan_virtual(model, graph, statistics, config, ranks, options())
    return [each.prediction.strategy for each in made.ranked]


def test_plans_name_only_what_can_train_so() -> None:
    config = Config("auto", num_neighbors=[10, 5], batch_size=512)
    assert set(planned(SMALL, config)) == {"data", "macro"}
    assert planned(SMALL, config, ranks=1) == ["data"]


def test_memory_is_that_of_mini_batches_whatever_the_size() -> None:
    config = Config("auto", num_neighbors=[10, 5], batch_size=512)
    found = []
    for nodes in (10**6, 10**12):
        graph = Virtual(7, nodes, 8, num_classes=6, mean_degree=12, num_hot=300)
        made = plan_virtual(
            GraphSAGE(8, 8, 2, 6), graph, statistics_of_virtual(graph, NUM_TRAIN), config, 2,
            PlanOptions(machine=options().machine),
        )  # fmt: skip
        found.append(min(each.prediction.memory.needed for each in made.ranked))
    assert found[1] < 1.5 * found[0] < 3e9


def test_the_full_graph_is_refused() -> None:
    with pytest.raises(ConfigError, match="--fanout"):
        planned(SMALL, Config("auto"))


def test_a_cache_of_hot_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="leave cache out"):
        planned(SMALL, Config("auto", num_neighbors=[10, 5], cache="1MB"))


def test_on_a_cluster_too() -> None:
    config = Config("auto", num_neighbors=[10, 5], batch_size=512)
    cluster = Cluster.from_json({"extends": "p4d.24xlarge"})
    made = plan_cluster(
        GraphSAGE(8, 8, 2, 6), statistics_of_virtual(SMALL, NUM_TRAIN), config, cluster, 8, PlanOptions()
    )
    assert {each.prediction.strategy for each in made.ranked} == {"data", "macro"}
