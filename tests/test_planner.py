"""Plans where the user's cache is of no use: they are made all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from polyhop import planner
from polyhop.datasets.synth import generate
from polyhop.errors import ConfigError
from polyhop.graph import Graph
from polyhop.nn import GCN
from polyhop.partition import partition
from polyhop.plan import Law, Plan, load_machine
from polyhop.trainer import Trainer


def test_a_cache_that_cannot_be_written_costs_no_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = load_machine()
    assert host is not None
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("POLYHOP_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(planner, "measure_cores", lambda: host)
    monkeypatch.setattr(planner, "measured_law", lambda *given, **named: Law(flop_s=1e-11))
    told: list[str] = []
    graph = generate("sbm:?nodes=300&classes=3&p_in=0.05&p_out=0.005&features=8&seed=1")
    plan = Trainer("auto").plan(
        GCN(8, 8, 2, out_channels=3),
        graph,
        2,
        partition=partition(graph, 2, "hash"),
        options=planner.PlanOptions(tell=told.append),
    )
    assert plan.chosen.epoch_s > 0
    assert any("not kept" in line and "POLYHOP_CACHE" in line for line in told), told
    planner.learn_from(plan, [1.0] * 6)  # nothing to teach, and nothing is raised


def test_a_plan_answers_what_fit_would_ask(
    make_graph: Callable[..., Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same limits; and a trainer that names no strategy plans with all of them where there are ranks."""
    graph = make_graph()
    model = GCN(graph.num_features, 8, 2, out_channels=graph.num_classes)
    given = {"max_epochs": 50, "allow_approximate": True}
    plan = Trainer(**given).plan(model, graph, num_ranks=2)
    assert (plan.asked, plan.num_ranks) == ("auto", 2)
    assert (plan.limits.num_epochs, plan.limits.allows_approximate) == (50, True)
    fitted: list[Plan] = []
    monkeypatch.setattr(Trainer, "_fit", lambda self, model, graph, line, plan: fitted.append(plan))
    Trainer("auto", progress="none", **given).fit(model, graph)
    assert fitted[0].limits == Trainer("auto", **given).plan(model, graph).limits
    with pytest.raises(ConfigError, match="'halo' cannot train"):
        Trainer("halo").plan(model, graph)
