"""Section ``speed``: how long a plan for a cluster takes with statistics at hand: a graph of 100 M edges, 1,024 devices.

Each plan compares every strategy, once on the full graph and once on mini-batches; the slower of the two counts. Curves over
eleven numbers of devices are timed beside, without an aim.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from benchmarks.harness import Figure
from polyhop.cluster_planner import plan_cluster, scale_cluster
from polyhop.forecast import GraphStatistics
from polyhop.nn import GraphSAGE
from polyhop.plan import Cluster
from polyhop.planner import PlanOptions
from polyhop.train.config import Config

__all__ = ["run"]

GRAPH = GraphStatistics(
    2_449_029,
    123_718_280,
    100,
    47,
    196_615,
    exponent=2.3,
    halo={2: 0.2, 4: 0.45, 8: 0.7, 16: 1.0},
    name="products",
)
CLUSTER = Cluster.from_json({"extends": "p4d.24xlarge", "hosts": 128})
WAYS: tuple[dict[str, Any], ...] = ({}, {"num_neighbors": [15, 10, 5], "batch_size": 8192})


def run(*, is_quick: bool) -> Iterator[Figure]:
    """Medians would hide what the first plan takes, which is the one that people wait for: every plan is of a new model."""
    for name, ranks, most in (("planning_s_100m_edges", 16, 5.0), ("planning_s_1024", 1024, 1.0)):
        taken = [_planned(given, ranks) for given in WAYS]
        told = f"full graph {taken[0]:.3f}, mini-batches {taken[1]:.3f}; {GRAPH.num_edges:,} edges, {ranks} devices"
        yield Figure(name, max(taken), "s", told, at_most=most)
    if not is_quick:
        taken = [_scaled(given) for given in WAYS]
        told = f"full graph {taken[0]:.3f}, mini-batches {taken[1]:.3f}; 1, 2, ... 1,024 devices"
        yield Figure("scaling_s", max(taken), "s", told)


def _model() -> GraphSAGE:
    return GraphSAGE(GRAPH.num_features, 256, 3, out_channels=GRAPH.num_classes)


def _planned(given: dict[str, Any], ranks: int) -> float:
    start = time.perf_counter()
    plan_cluster(_model(), GRAPH, Config(strategy="auto", **given), CLUSTER, ranks, PlanOptions())
    return time.perf_counter() - start


def _scaled(given: dict[str, Any]) -> float:
    config, model = Config(strategy="auto", **given), _model()
    chosen = plan_cluster(model, GRAPH, config, CLUSTER, 16, PlanOptions()).chosen
    start = time.perf_counter()
    scale_cluster(model, GRAPH, config, CLUSTER, PlanOptions(), chosen)
    return time.perf_counter() - start
