"""Runs on ranks: checkpoints that another number of ranks continues, one folder, one report, ranks that stop together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop import nn
from polyhop.comm import Collective, run_in_threads
from polyhop.errors import CheckpointError, ConfigError, Interrupted
from polyhop.graph import Graph
from polyhop.partition import partition, share
from polyhop.plan import read_plan
from polyhop.train import signals
from polyhop.trainer import Trainer

MakeGraph = Callable[..., Graph]
Weights = dict[str, Tensor]
SEEDING = threading.Lock()


def options(**more: Any) -> dict[str, Any]:
    given = {"batch_size": 20, "num_neighbors": [4, 3], "eval_every": 100, "precision": "64-true", "seed": 3}
    return {**given, "device": "cpu", "progress": "none", **more}


def make_model(graph: Graph) -> torch.nn.Module:
    with SEEDING:
        torch.manual_seed(7)
        return nn.GraphSAGE(graph.num_features, 8, num_layers=2, out_channels=graph.num_classes, dropout=0.5)


def fit(line: Collective, graph: Graph, method: str, given: dict[str, Any]) -> Weights:
    model = make_model(graph)
    held = share(graph, partition(graph, line.num_ranks, method), line.rank)
    Trainer("data", **given).fit(model, held, line=line)
    return model.state_dict()


def assert_close(found: Weights, expected: Weights) -> None:
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) <= 1e-10, name


def test_another_number_of_ranks_continues(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph = make_graph()
    alone = make_model(graph)
    Trainer("single", **options(max_epochs=4)).fit(alone, graph)
    run = {"run_dir": tmp_path / "run", "checkpoint_every": 5}
    run_in_threads(2, fit, graph, "hash", options(max_epochs=1, **run))
    run_in_threads(3, fit, graph, "fennel", options(max_epochs=2, resume="auto", **run))
    run_in_threads(1, fit, graph, "hash", options(max_epochs=3, resume="auto", **run))
    found = run_in_threads(4, fit, graph, "block", options(max_epochs=4, resume="auto", **run))
    for weights in found:
        assert_close(weights, alone.state_dict())
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 4
    assert {path.name for path in (tmp_path / "run").glob("trace-*")} == {
        f"trace-rank{r}.jsonl" for r in range(4)
    }


def test_a_kept_plan_never_stops_a_run_that_goes_on(make_graph: MakeGraph, tmp_path: Path) -> None:
    """It is there to be compared with: damaged, of another version or for other ranks, the run says so and goes on."""
    graph = make_graph()
    run = {"run_dir": tmp_path / "run"}
    run_in_threads(2, fit, graph, "hash", options(max_epochs=1, **run))
    kept = tmp_path / "run" / "plan.json"
    whole = kept.read_text()
    for at, text in enumerate(("", '{"version": 1}', "[]", "null", whole.replace('"others"', '"order"'))):
        kept.write_text(text)
        run_in_threads(2, fit, graph, "hash", options(max_epochs=2 + at, resume="auto", **run))
        assert kept.read_text() == text
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 6
    kept.write_text(whole)
    run_in_threads(3, fit, graph, "hash", options(max_epochs=7, resume="auto", **run))
    assert kept.read_text() == whole, "what it began with"


def test_what_is_wrong_with_a_kept_plan_is_noted(
    make_graph: MakeGraph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, run = make_graph(), {"run_dir": tmp_path / "run"}
    Trainer("single", **options(max_epochs=1, **run)).fit(make_model(graph), graph)
    (tmp_path / "run" / "plan.json").write_text('{"version": 1}')
    more = {"resume": "auto", "max_epochs": 2, "progress": "plain", **run}
    Trainer("single", **{**options(), **more}).fit(make_model(graph), graph)
    said = capsys.readouterr()
    assert "no plan to compare with: " in said.out + said.err
    assert "plan.json: a plan of version 1" in said.out + said.err


def fit_auto(line: Collective, graph: Graph, given: dict[str, Any]) -> str:
    model, held = make_model(graph), share(graph, partition(graph, line.num_ranks, "hash"), line.rank)
    Trainer("auto", **given).fit(model, held, line=line)
    return "trained"


def test_a_plan_that_is_obeyed_on_other_ranks(make_graph: MakeGraph, tmp_path: Path) -> None:
    """Where the way planned cannot be had there, the error names the plan, not an option that nobody gave."""
    graph, run = make_graph(), {"run_dir": tmp_path / "run"}
    given = {**options(), "batch_size": None, "num_neighbors": None}
    staged = {**given, "stages": 2, "max_epochs": 1, **run}
    assert run_in_threads(2, fit_auto, graph, staged) == ["trained"] * 2
    more = {**given, "max_epochs": 2, "resume": "auto", **run}
    with pytest.raises(
        ConfigError, match=r"plan\.json: the run was planned for 2 ranks \(pipeline.* with 3: "
    ):
        run_in_threads(3, fit_auto, graph, more)
    assert run_in_threads(2, fit_auto, graph, more) == ["trained"] * 2


def test_a_plan_that_is_obeyed_and_cannot_be_read_is_made_anew(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph, run = make_graph(), {"run_dir": tmp_path / "run"}
    run_in_threads(2, fit_auto, graph, options(max_epochs=1, **run))
    kept = tmp_path / "run" / "plan.json"
    kept.write_text("{")
    run_in_threads(2, fit_auto, graph, options(max_epochs=2, resume="auto", **run))
    assert read_plan(kept).num_ranks == 2
    run_in_threads(3, fit_auto, graph, options(max_epochs=3, resume="auto", **run))


def test_another_graph_is_refused(make_graph: MakeGraph, tmp_path: Path) -> None:
    run = {"run_dir": tmp_path / "run"}
    run_in_threads(2, fit, make_graph(), "hash", options(max_epochs=1, **run))
    with pytest.raises(CheckpointError, match="made by another run"):
        run_in_threads(2, fit, make_graph(seed=1), "hash", options(max_epochs=2, resume="auto", **run))


def test_ranks_stop_together(make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank is asked to stop after its third step: all leave after the same step, saved; going on gives the same."""
    graph = make_graph()
    given = options(max_epochs=4, run_dir=tmp_path / "run")
    whole = run_in_threads(3, fit, graph, "hash", {**given, "run_dir": None})

    class AskedOnce(signals.StopRequest):
        """Rank 1 alone is asked, after a few looks at it."""

        looks = 0

        @property
        def name(self) -> str | None:
            if threading.current_thread().name != "polyhop-rank-1":
                return None
            self.looks += 1
            return "SIGTERM" if self.looks > 3 else None

        @name.setter
        def name(self, value: str | None) -> None:
            pass

    with monkeypatch.context() as patch:
        patch.setattr("polyhop.trainer.StopRequest", AskedOnce)
        with pytest.raises(Interrupted, match="after step 4"):
            run_in_threads(3, fit, graph, "hash", given)
    found = run_in_threads(3, fit, graph, "hash", {**given, "resume": "auto"})
    for name, value in whole[0].items():
        assert torch.equal(found[0][name], value)


def test_a_callback_of_rank_0_stops_all(make_graph: MakeGraph) -> None:
    graph = make_graph()
    seen: list[int] = []

    def stop(record: dict[str, Any]) -> bool:
        if threading.current_thread().name == "polyhop-rank-0":
            seen.append(record["epoch"])
            return record["epoch"] == 2
        return False

    run_in_threads(3, fit, graph, "hash", options(max_epochs=9, callbacks=[stop]))
    assert seen == [1, 2]
