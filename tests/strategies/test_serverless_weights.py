"""Weights that change several times an epoch: each step is of its group's train nodes, each interval keeps one version."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")
pytest.importorskip("cryptography")

import torch

from polyhop.comm import Collective, run_in_threads
from polyhop.errors import ConfigError
from polyhop.graph import Graph
from polyhop.kernels.keys import Key
from polyhop.serverless.epochs import groups_of
from polyhop.serverless.ledger import Terms
from polyhop.strategies import WholeGraph, place, serverless_step, single
from polyhop.train.loss import cross_entropy_sum

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "serverless"))

from faulty import FaultyLauncher, ThreadLauncher  # type: ignore[import-not-found]
from test_serverless import model_of, on_rank  # type: ignore[import-not-found]
from test_serverless_training import fit, owner_of  # type: ignore[import-not-found]

MakeGraph = Callable[..., Graph]
PATIENT = Terms(floor_s=20.0, ratio=3.0, cold_s=20.0)


def gradients_of_the_first_epoch(step: Any, model: Any, steps: int) -> list[tuple[float, dict[str, Any]]]:
    """Without steps of an optimiser: all of them with the first weights."""
    found = []
    for at in range(steps):
        loss = float(step.gradients(at, Key(3, 0, at)))
        found.append((loss, {name: p.grad.clone() for name, p in model.named_parameters()}))
    return found


def on_groups(line: Collective, graph: Graph, steps: int) -> Any:
    options = {"intervals": 5, "functions": 2, "staleness": 0, "weight_steps": steps, "max_epochs": 1}

    def look(step: Any) -> Any:
        return gradients_of_the_first_epoch(step, step._model, steps)

    return on_rank(line, graph, "gcn-3", 0.2, 0, options, look)[2]


@pytest.mark.parametrize("steps", [3, 5])
def test_the_mean_of_an_epochs_steps_is_the_gradient_of_the_whole(
    make_graph: MakeGraph, monkeypatch: Any, steps: int
) -> None:
    """All steps of the first epoch, with the weights that it began with: to rounding the gradient of one process."""
    monkeypatch.setattr(serverless_step, "LocalLauncher", lambda order: ThreadLauncher(order))
    graph = make_graph(80)
    assert graph.split is not None
    assert graph.y is not None
    train = graph.split.train[graph.y[graph.split.train] >= 0]
    model, whole = model_of("gcn-3", graph, 0.2), WholeGraph(graph, place("cpu", "64-true"))
    alone = single.build(model, graph, single.Config(), train_ids=train, whole=whole, loss=cross_entropy_sum)
    loss = float(alone.gradients(0, Key(3, 0)))
    for each in run_in_threads(2, on_groups, graph, steps):
        assert sum(one for one, _ in each) / steps == pytest.approx(loss, rel=1e-10)
        for name, p in model.named_parameters():
            assert p.grad is not None
            mean = sum(gradients[name] for _, gradients in each) / steps
            assert float((mean - p.grad).abs().max()) <= 1e-10, name
            assert float((each[0][1][name] - p.grad).abs().max()) > 1e-6, name  # a part of it alone


def trained(line: Collective, graph: Graph, steps: int, epochs: int, staleness: int) -> Any:
    """(losses, versions of the tasks of each epoch and interval, versions alive at most and at the end, oldest read)."""

    def look(step: Any) -> Any:
        offered: list[Any] = []
        offer = step.post.offer
        step.post.offer = lambda key, work: (offered.append((key, work.version)), offer(key, work))
        optimizer = torch.optim.Adam(step._model.parameters(), lr=0.02)
        losses = []
        for epoch in range(epochs):
            for at in range(steps):
                losses.append(float(step.gradients(at, Key(3, epoch, at))))
                optimizer.step()
        used: dict[tuple[int, int], set[int]] = defaultdict(set)
        for key, version in offered:
            used[key.epoch, key.interval].add(int(version))
        versions = step.server.versions
        return losses, used, versions.most_alive, len(versions.alive), step.server.ages.oldest

    options = {
        "intervals": 6,
        "functions": 3,
        "staleness": staleness,
        "weight_steps": steps,
        "pipe_epochs": 0,
    }
    return on_rank(line, graph, "gcn", 0.2, 0, {**options, "max_epochs": epochs}, look)[2]


@pytest.mark.parametrize("steps", [1, 3])
def test_an_interval_keeps_its_version_while_others_get_newer_ones(
    make_graph: MakeGraph, monkeypatch: Any, steps: int
) -> None:
    """The last interval is slow, so the steps of other groups are taken while it computes with old weights."""

    def slow(key: Any) -> float:
        return 0.4 if key.interval == 5 and key.epoch in (2, 5) and not key.is_backward else 0.0

    monkeypatch.setattr(
        serverless_step, "LocalLauncher", lambda order: FaultyLauncher(order, seed=5, rate=0.0, slow=slow)
    )
    monkeypatch.setattr(serverless_step, "TERMS", PATIENT)
    staleness, epochs = 1, 10
    ((losses, used, most_alive, at_the_end, oldest),) = run_in_threads(
        1, trained, make_graph(80), steps, epochs, staleness
    )
    assert len(used) == 6 * epochs
    assert all(len(versions) == 1 for versions in used.values())
    of_epochs = [{next(iter(used[epoch, k])) for k in range(6)} for epoch in range(epochs)]
    most = max(map(len, of_epochs))
    assert most > 1 if steps > 1 else most <= 2
    assert most_alive <= (staleness + 1) * steps + 1
    assert at_the_end == 1
    assert oldest <= staleness + 1
    assert sum(losses[-steps:]) < 0.9 * sum(losses[:steps])


def test_a_run_that_was_stopped_inside_an_epoch_goes_on(
    make_graph: MakeGraph, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(serverless_step, "LocalLauncher", lambda order: ThreadLauncher(order))
    graph = make_graph(80)
    options = {"staleness": 0, "weight_steps": 3, "run_dir": str(tmp_path / "run")}
    owner = owner_of(graph, 2)
    run_in_threads(2, fit, graph, owner, {**options, "max_epochs": 2, "checkpoint_every": 2})
    for each in sorted((tmp_path / "run" / "checkpoints").glob("step-*")):
        if not each.name.endswith("4"):  # of 6: the first step of the second epoch was taken
            for file in each.iterdir():
                file.unlink()
            each.rmdir()
    losses = run_in_threads(2, fit, graph, owner, {**options, "max_epochs": 4, "resume": "auto"})[0][1]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


def test_groups() -> None:
    assert groups_of(7, 3) == [0, 0, 0, 1, 1, 2, 2]
    assert groups_of(2, 3) == [0, 1]
    assert groups_of(0, 3) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_steps": 2}, "promises the numbers of one process"),
        ({"weight_steps": 5, "staleness": 0}, "no rank has more than 3"),
        ({"weight_steps": 0, "staleness": 0}, "weight_steps=0"),
    ],
    ids=str,
)
def test_what_it_cannot_do_is_said(make_graph: MakeGraph, options: dict[str, Any], message: str) -> None:
    graph = make_graph(40)
    with pytest.raises(ConfigError, match=message):
        run_in_threads(1, fit, graph, owner_of(graph, 1), {"max_epochs": 1, **options})


def test_the_trainer_takes_as_many_steps(make_graph: MakeGraph, monkeypatch: Any) -> None:
    monkeypatch.setattr(serverless_step, "LocalLauncher", lambda order: ThreadLauncher(order))
    graph, steps = make_graph(80), []
    original = serverless_step.ServerlessStep.gradients

    def counted(self: Any, batch: Any, key: Any) -> Any:
        steps.append((key.epoch, batch))
        return original(self, batch, key)

    monkeypatch.setattr(serverless_step.ServerlessStep, "gradients", counted)
    run_in_threads(1, fit, graph, owner_of(graph, 1), {"max_epochs": 3, "staleness": 1, "weight_steps": 3})
    assert steps == [(epoch, at) for epoch in range(3) for at in range(3)]
