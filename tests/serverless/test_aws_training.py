"""Training on Lambda as ``cloud`` has it, from boto3 to the handler that dials out: the bits of local functions."""

from __future__ import annotations

import json
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cloud import NAME, Cloud  # type: ignore[import-not-found]
from remains import Remains  # type: ignore[import-not-found]
from test_serverless import model_of, stepped  # type: ignore[import-not-found]

from polyhop.comm import Collective, run_in_threads
from polyhop.graph import Graph
from polyhop.partition import Partition, share
from polyhop.strategies import Team, place, serverless
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


class Faults:
    """Kills sandboxes by pid: once given a task and before its result, after one, or stops them until their limit."""

    def __init__(self, cloud: Cloud, seed: int, rates: dict[str, float], most: dict[str, int]) -> None:
        self.cloud, self.rates, self.most = cloud, rates, most
        self.rng, self.lock = random.Random(seed), threading.Lock()
        self.counts: Counter[str] = Counter()
        self._given: dict[int, str] = {}

    def watch(self, step: Any) -> None:
        """Hear of leases and results; on the thread of the post."""
        ledger = step.post.ledger
        lease, commit = ledger.lease, ledger.commit

        def leased(function: str, now: float) -> Any:
            found = lease(function, now)
            if found is not None:
                self._given[found[0].number] = function
                self._maybe("before", function, signal.SIGKILL)
                self._maybe("hang", function, signal.SIGSTOP)
            return found

        def committed(key: Any, number: int, now: float) -> Any:
            verdict = commit(key, number, now)
            self._maybe("after", self._given.get(number, ""), signal.SIGKILL)
            return verdict

        ledger.lease, ledger.commit = leased, committed

    def _maybe(self, kind: str, function: str, number: int) -> None:
        if self.counts[kind] < self.most[kind] and self.rng.random() < self.rates[kind]:
            self.counts[kind] += self.cloud.kill(function, number)

    def throttles(self) -> bool:
        with self.lock:
            return self.rng.random() < self.rates["throttle"]


@pytest.mark.slow
def test_the_bits_of_local_functions(make_graph: MakeGraph, function_folder: Path, remains: Remains) -> None:
    graph = make_graph(80)
    expected = trained(graph, 3)
    with Cloud(function_folder) as cloud:
        found = trained(graph, 3, cloud=cloud, function_memory=512)
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


@pytest.mark.slow
def test_killed_stopped_and_throttled_change_nothing(
    make_graph: MakeGraph, function_folder: Path, remains: Remains
) -> None:
    graph = make_graph(80)
    expected = trained(graph, 4)
    with Cloud(function_folder, limit_s=8.0, is_open=False) as cloud:  # it may not be told not to retry
        faults = Faults(cloud, 1, {"before": 0.3, "after": 0.3, "hang": 0.2, "throttle": 0.4},
                        {"before": 2, "after": 2, "hang": 1})  # fmt: skip
        cloud.throttles = faults.throttles
        found = trained(graph, 4, cloud=cloud, watch=faults.watch)
    assert_the_same(found, expected)
    assert faults.counts == {"before": 2, "after": 2, "hang": 1}
    assert cloud.counts["died"] >= 4
    assert cloud.counts["retried"] >= 1
    assert cloud.counts["throttled"] >= 1
    assert found[2].launcher.num_throttled == cloud.counts["throttled"]
    assert found[2].post.ledger.counts["again"] >= 1
    assert any(ended.is_failure for ended in found[2].crew.gone)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gcn", "sage", "gat"])
def test_many_faults_change_nothing(
    make_graph: MakeGraph, function_folder: Path, remains: Remains, name: str
) -> None:
    graph = make_graph(80)
    expected = trained(graph, 12, name)
    with Cloud(function_folder, limit_s=6.0) as cloud:
        faults = Faults(cloud, 2, {"before": 0.06, "after": 0.06, "hang": 0.02, "throttle": 0.3},
                        {"before": 12, "after": 12, "hang": 4})  # fmt: skip
        cloud.throttles = faults.throttles
        cloud.delay_s = lambda: 0.3 * faults.rng.random()
        found = trained(graph, 12, name, cloud, faults.watch, functions=3)
    assert_the_same(found, expected)
    assert sum(faults.counts.values()) >= 10
    assert all(faults.counts[kind] for kind in ("before", "after", "hang"))
    assert cloud.counts["throttled"] >= 3
