"""Plans where the user's cache is of no use: they are made all the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from polyhop import planner
from polyhop.comm import Collective, run_in_threads
from polyhop.datasets.synth import generate
from polyhop.errors import ConfigError
from polyhop.graph import Graph
from polyhop.nn import GCN
from polyhop.partition import partition, share
from polyhop.plan import Law, Plan, calibrate, load_machine, probe, save_machine
from polyhop.plan.apart import ApartError
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


def planned(line: Collective, graph: Graph) -> Plan:
    """As ``Trainer.fit`` plans on ranks."""
    model = GCN(graph.num_features, 8, 2, out_channels=graph.num_classes)
    held = share(graph, partition(graph, line.num_ranks, "hash"), line.rank)
    return Trainer("auto", max_epochs=5, progress="plain")._made_plan(model, held, line)


def test_ranks_that_will_train_time_nothing_themselves(
    make_graph: Callable[..., Graph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the host nor the model: what that takes would be held on top of what the plan foresees."""
    monkeypatch.setenv("POLYHOP_CACHE", str(tmp_path))

    def refuse(*given: object, **named: object) -> None:
        raise AssertionError("timed in a process that will train")

    for module, name in ((probe, "_least_s"), (calibrate, "_best_s"), (calibrate, "others_busy")):
        monkeypatch.setattr(module, name, refuse)  # here alone: another process imports its own
    found = run_in_threads(2, planned, make_graph())
    assert found[0] == found[1]
    kept = load_machine()
    assert kept is not None
    assert len(kept.laws) == 1, "for the next run"
    assert found[0].chosen.epoch_s > 0


def test_where_no_process_can_be_started_ranks_time_and_say_so(
    make_graph: Callable[..., Graph],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    host = load_machine()
    assert host is not None
    monkeypatch.setenv("POLYHOP_CACHE", str(tmp_path))
    save_machine(replace(host, laws={}))

    def refuse(*given: object, **named: object) -> None:
        raise ApartError("no room for it")

    monkeypatch.setattr(planner, "run_apart", refuse)
    monkeypatch.setattr(planner, "measured_law", lambda *given, **named: Law(flop_s=1e-11))
    assert run_in_threads(2, planned, make_graph())[0].chosen.epoch_s > 0
    shown = capsys.readouterr()
    assert "takes memory here: in one of its own, no room for it" in shown.out + shown.err
