"""Training on Lambda as ``cloud`` has it, from boto3 to the handler that dials out: the bits of local functions."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cloud import NAME, Cloud  # type: ignore[import-not-found]
from remains import Remains  # type: ignore[import-not-found]
from striking import Faults  # type: ignore[import-not-found]
from test_serverless import model_of, stepped  # type: ignore[import-not-found]

from polyhop.comm import Collective, run_in_threads
from polyhop.graph import Graph
from polyhop.partition import Partition, share
from polyhop.serverless import aws
from polyhop.serverless.ledger import Terms
from polyhop.strategies import Team, place, serverless, serverless_step
from polyhop.train.loss import cross_entropy_sum

pytest.importorskip("boto3")
pytest.importorskip("cryptography")
MakeGraph = Callable[..., Graph]


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def on_rank(
    line: Collective,
    graph: Graph,
    name: str,
    epochs: int,
    options: dict[str, Any],
    watch: Callable[[Any], None],
) -> Any:
    model = model_of(name, graph, 0.4)
    held = share(graph, Partition(torch.zeros(graph.num_nodes).int(), 1), 0)
    config, team = serverless.Config(max_epochs=epochs, seed=3, intervals=4, **options), Team(line)
    whole = serverless.hold(held, place("cpu", "64-true"), team, config)
    assert held.split is not None
    assert held.part.y is not None
    train = held.split.train[held.part.y[held.split.train] >= 0]
    step: Any = serverless.build(
        model, held, config, train_ids=train, whole=whole, loss=cross_entropy_sum, team=team
    )
    try:
        watch(step)
        losses, weights = stepped(step, model, epochs)
    finally:
        step.close()
    return losses, weights, step


def trained(
    graph: Graph,
    epochs: int,
    name: str = "gcn",
    cloud: Cloud | None = None,
    watch: Callable[[Any], None] = lambda step: None,
    **options: Any,
) -> Any:
    if cloud is not None:
        options |= {"function_launcher": "aws", "function_name": NAME, "function_endpoint": cloud.endpoint}
    return run_in_threads(1, on_rank, graph, name, epochs, options, watch)[0]


def assert_the_same(found: Any, expected: Any) -> None:
    """The bits of all weights, and every task once."""
    assert found[0] == expected[0]
    for name, value in expected[1].items():
        assert torch.equal(found[1][name], value), name
    counts, wanted = found[2].post.ledger.counts, expected[2].post.ledger.counts
    assert counts["ok"] == counts["offered"] == wanted["offered"] == wanted["ok"]
    assert len(found[2].post.ledger) == 0


def test_the_bits_of_local_functions(make_graph: MakeGraph, function_folder: Path, remains: Remains) -> None:
    graph = make_graph(80)
    expected = trained(graph, 3)
    with Cloud(function_folder) as cloud:
        found = trained(graph, 3, cloud=cloud, function_memory=512)
        cloud.settle()  # what a function did is told when it ends, after its server has gone
    assert_the_same(found, expected)
    assert cloud.settings["MaximumRetryAttempts"] == 0
    assert cloud.counts["invoked"] == len(cloud.payloads) >= 2
    done = [said for _, kind, said in cloud.results if kind == "response"]
    assert sum(said["tasks"] for said in done) >= found[2].post.ledger.counts["ok"]
    assert [ended.exit_code for ended in found[2].crew.gone] == [0] * len(found[2].crew.gone)
    order = json.loads(cloud.payloads[0])
    assert (order["memory_mb"], order["limit_s"], order["function"]) == (512, 60.0, "server0-0")
    written = "".join(cloud.logs) + repr(cloud.results) + repr(found[2].crew.gone)
    assert order["secret"] not in written


def faults_of(cloud: Cloud, seed: int, **kinds: tuple[float, int]) -> Faults:
    made = Faults(cloud.pids, seed, **kinds)
    cloud.throttles, cloud.repeats = partial(made.happens, "throttle"), partial(made.happens, "twice")
    return made


QUICK = Terms(floor_s=0.3, ratio=3.0, cold_s=2.0)
KINDS: dict[str, tuple[dict[str, tuple[float, int]], int]] = {  # with their rates and how many; functions
    "before": ({"before": (0.3, 4)}, 2),
    "after": ({"after": (0.3, 4)}, 2),
    "hang": ({"hang": (0.3, 2)}, 2),
    "slow": ({"slow": (0.3, 3)}, 2),
    "wave": ({"wave": (1.0, 4)}, 4),
    "throttle": ({"throttle": (1.0, 4)}, 2),
    "twice": ({"twice": (1.0, 4)}, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_fault_changes_nothing(
    make_graph: MakeGraph, function_folder: Path, remains: Remains, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(serverless_step, "TERMS", QUICK)
    graph, (rates, functions) = make_graph(80), KINDS[kind]
    expected = trained(graph, 5)
    with Cloud(function_folder, limit_s=6.0, concurrency=6) as cloud:
        faults = faults_of(cloud, 1, **rates)
        found = trained(
            graph, 5, cloud=cloud, watch=lambda step: faults.watch(step.post), functions=functions
        )
        cloud.settle()
    assert_the_same(found, expected)
    num_faults = faults.counts[kind]
    assert 2 <= num_faults <= rates[kind][1]
    counts, launcher = found[2].post.ledger.counts, found[2].launcher
    if kind in ("before", "after", "wave"):
        assert cloud.counts["died"] == num_faults
    if kind in ("before", "wave"):
        assert counts["again"] >= num_faults
        assert any(ended.is_failure for ended in found[2].crew.gone)
    if kind == "hang":
        assert cloud.counts["late"] == num_faults
        assert counts["again"] >= num_faults
    if kind == "slow":
        assert counts["late"] + counts["duplicate"] + found[2].post.refused["message"] >= 1
    if kind == "throttle":
        assert launcher.num_throttled == cloud.counts["throttled"] == num_faults
    if kind == "twice":
        assert cloud.counts["delivered"] == cloud.counts["invoked"] + num_faults


@pytest.mark.slow
def test_a_first_wave_that_never_dials_in_is_replaced(
    make_graph: MakeGraph, function_folder: Path, remains: Remains, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while they start: nothing is ever heard of them."""
    monkeypatch.setattr(aws, "AwsLauncher", partial(aws.AwsLauncher, comes_s=3.0))
    graph = make_graph(80)
    expected = trained(graph, 3)
    killed: list[int] = []
    with Cloud(function_folder, is_open=False) as cloud:
        cloud.settings["MaximumRetryAttempts"] = 0

        def kill_the_first(over: threading.Event) -> None:
            while len(killed) < 3 and not over.wait(0.005):
                for pid in set(cloud.pids()) - set(killed):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)

        over = threading.Event()
        killer = threading.Thread(target=kill_the_first, args=(over,), daemon=True)
        killer.start()
        found = trained(graph, 3, cloud=cloud, functions=3)
        over.set()
        killer.join(timeout=10)
        cloud.settle()
    assert_the_same(found, expected)
    assert cloud.counts["died"] == len(killed) == 3
    never = [ended for ended in found[2].crew.gone if "did not dial in within 3 s" in ended.said]
    assert len(never) == 3


@pytest.mark.slow
def test_events_that_the_service_retries_change_nothing(
    make_graph: MakeGraph, function_folder: Path, remains: Remains
) -> None:
    """The launcher may not say that it wants no retries: what was killed comes again under its old name."""
    graph = make_graph(80)
    expected = trained(graph, 4)
    with Cloud(function_folder, limit_s=8.0, is_open=False) as cloud:
        faults = faults_of(cloud, 1, before=(0.3, 2), after=(0.3, 2), throttle=(0.4, 3))
        found = trained(graph, 4, cloud=cloud, watch=lambda step: faults.watch(step.post))
        cloud.settle()
    assert_the_same(found, expected)
    assert faults.counts["before"] == faults.counts["after"] == 2
    assert cloud.counts["retried"] >= 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gcn", "sage", "gat"])
def test_many_faults_change_nothing(
    make_graph: MakeGraph, function_folder: Path, remains: Remains, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """All kinds at once."""
    monkeypatch.setattr(serverless_step, "TERMS", QUICK)
    graph, rng = make_graph(80), random.Random(2)
    expected = trained(graph, 25, name)
    with Cloud(function_folder, limit_s=6.0, concurrency=6) as cloud:
        faults = faults_of(
            cloud,
            2,
            before=(0.1, 12),
            after=(0.1, 12),
            hang=(0.05, 3),
            slow=(0.05, 4),
            throttle=(0.3, 10),
            twice=(0.3, 6),
        )
        cloud.delay_s = lambda: 0.3 * rng.random()
        found = trained(graph, 25, name, cloud, lambda step: faults.watch(step.post), functions=3)
    assert_the_same(found, expected)
    assert sum(faults.counts.values()) >= 15
    assert all(faults.counts[kind] for kind in ("before", "after", "hang", "slow", "throttle", "twice")), (
        faults.counts
    )
    print(f"{name}: {dict(faults.counts)}, {dict(cloud.counts)}, {dict(found[2].post.ledger.counts)}")
