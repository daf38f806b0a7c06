"""Strategy ``serverless`` when functions fail: nothing lost, nothing counted twice, the same bits (I2, I5, I6, I7)."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")
pytest.importorskip("cryptography")

import torch

from polyhop.comm import run_in_threads
from polyhop.graph import Graph
from polyhop.serverless import stream
from polyhop.serverless.ledger import Terms
from polyhop.serverless.server import ServerlessError
from polyhop.strategies import serverless_step

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "serverless"))

from faulty import FAULTS, FaultyLauncher, ThreadLauncher  # type: ignore[import-not-found]
from striking import Faults  # type: ignore[import-not-found]
from test_serverless import on_rank  # type: ignore[import-not-found]

MakeGraph = Callable[..., Graph]
QUICK = Terms(floor_s=0.15, ratio=3.0, cold_s=0.5)


def trained(
    graph: Graph,
    launcher: Callable[..., Any],
    monkeypatch: Any,
    *,
    ranks: int = 1,
    epochs: int = 4,
    name: str = "gcn",
    watch: Callable[[Any], None] = lambda made: None,
    look: Callable[[Any], Any] = lambda step: step.post.ledger,
    **options: Any,
) -> Any:
    made = []

    def launch(order: Any, **more: Any) -> Any:
        made.append(launcher(order))
        watch(made[-1])
        return made[-1]

    monkeypatch.setattr(serverless_step, "LocalLauncher", launch)
    monkeypatch.setattr(serverless_step, "TERMS", QUICK)
    given = {"intervals": 4, "functions": 2, **options}
    found = run_in_threads(ranks, on_rank, graph, name, 0.4, epochs, given, look)
    for _, _, ledger in found:  # every task was done once, and no result counted twice
        assert ledger.counts["ok"] == ledger.counts["offered"] > 0
        assert len(ledger) == 0
    return found[0], made


def assert_bits(found: Any, expected: Any, *, has_same_tasks: bool = True) -> None:
    assert found[0] == expected[0]
    if has_same_tasks:
        assert found[2].counts["offered"] == expected[2].counts["offered"]
    for name, value in expected[1].items():
        assert torch.equal(found[1][name], value), name


@pytest.mark.parametrize("name", ["gcn", "sage", "gat"])
def test_the_same_bits_for_any_number_of_functions(
    make_graph: MakeGraph, monkeypatch: Any, name: str
) -> None:
    graph = make_graph(80)
    expected, _ = trained(graph, ThreadLauncher, monkeypatch, functions=1, name=name)
    for functions in (2, 5):
        found, _ = trained(graph, ThreadLauncher, monkeypatch, functions=functions, name=name)
        assert_bits(found, expected)


@pytest.mark.parametrize("options", [{"fuse_loss": False}, {"rematerialise": False},
                                     {"fuse_loss": False, "rematerialise": False}], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["gcn-3", "sage", "gat"])
def test_fusing_and_computing_again_change_no_bit(
    make_graph: MakeGraph, monkeypatch: Any, name: str, options: dict[str, bool]
) -> None:
    graph = make_graph(80)
    expected, _ = trained(graph, ThreadLauncher, monkeypatch, name=name)
    found, _ = trained(graph, ThreadLauncher, monkeypatch, name=name, **options)
    assert_bits(found, expected, has_same_tasks=False)


@pytest.mark.parametrize("options", [{}, {"fuse_loss": False, "rematerialise": False}], ids=str)
@pytest.mark.parametrize("name", ["sage", "gat"])
def test_large_tasks_in_several_messages_have_the_same_bits(
    make_graph: MakeGraph, monkeypatch: Any, name: str, options: dict[str, bool]
) -> None:
    """Sparse inputs, intervals of 1500 rows in blocks of a tile; also where functions die in the middle."""
    monkeypatch.setattr(stream, "BLOCK_BYTES", 1 << 14)
    graph = make_graph(3000, sparse=True)
    given: dict[str, Any] = {"name": name, "intervals": 2, "epochs": 2, **options}
    expected, _ = trained(graph, ThreadLauncher, monkeypatch, stream=False, **given)
    assert_bits(trained(graph, ThreadLauncher, monkeypatch, **given)[0], expected)

    def faulty(order: Any) -> Any:
        return FaultyLauncher(order, seed=2, rate=0.3, kinds=("die before", "die after"), silent=False)

    found, (launcher,) = trained(graph, faulty, monkeypatch, **given)
    assert sum(launcher.counts[kind] for kind in ("die before", "die after")) > 2
    assert_bits(found, expected)


@pytest.mark.parametrize("kind", FAULTS)
def test_a_kind_of_fault_changes_nothing(make_graph: MakeGraph, monkeypatch: Any, kind: str) -> None:
    graph = make_graph(80)
    expected, _ = trained(graph, ThreadLauncher, monkeypatch, epochs=3)

    def faulty(order: Any) -> Any:
        return FaultyLauncher(order, seed=1, rate=0.3, kinds=(kind,))

    found, (launcher,) = trained(graph, faulty, monkeypatch, epochs=3)
    assert launcher.counts[kind] > 2
    assert_bits(found, expected)


def test_attention_weights_of_functions_have_the_same_bits(make_graph: MakeGraph, monkeypatch: Any) -> None:
    """For any number of functions, with faults of every kind, fused or not, kept or computed again."""
    graph = make_graph(80)
    given: dict[str, Any] = {"name": "gat", "epochs": 3, "edge_functions": True}
    expected, _ = trained(graph, ThreadLauncher, monkeypatch, functions=1, **given)
    assert_bits(trained(graph, ThreadLauncher, monkeypatch, **given, functions=5)[0], expected)
    other = trained(graph, ThreadLauncher, monkeypatch, **given, fuse_loss=False, rematerialise=False)[0]
    assert_bits(other, expected, has_same_tasks=False)

    def faulty(order: Any) -> Any:
        return FaultyLauncher(order, seed=1, rate=0.3)

    found, (launcher,) = trained(graph, faulty, monkeypatch, **given, functions=4)
    assert sum(n for kind, n in launcher.counts.items() if kind != "none") > 10
    assert_bits(found, expected)


@pytest.mark.slow
def test_a_thousand_faults_lose_nothing(make_graph: MakeGraph, monkeypatch: Any) -> None:
    """Two servers, GAT, every kind at once."""
    graph = make_graph(80)
    expected, _ = trained(graph, ThreadLauncher, monkeypatch, ranks=2, epochs=60, name="gat")

    def faulty(order: Any) -> Any:
        return FaultyLauncher(order, seed=hash(order.function) % 1000, rate=0.5, silent=False)

    found, launchers = trained(graph, faulty, monkeypatch, ranks=2, epochs=60, name="gat", functions=8)
    counts = sum((each.counts for each in launchers), Counter[str]())
    print(dict(counts))
    assert sum(counts[kind] for kind in FAULTS) >= 1000
    assert min(counts[kind] for kind in FAULTS) >= 100
    assert_bits(found, expected)


def test_a_first_wave_that_dies_whole_is_replaced(make_graph: MakeGraph, monkeypatch: Any) -> None:
    graph = make_graph(80)
    expected, _ = trained(graph, ThreadLauncher, monkeypatch, epochs=2)
    since = time.monotonic()

    def serve(order: Any, stop: threading.Event) -> None:
        if time.monotonic() - since < 1.0:
            raise RuntimeError("the first wave dies")
        ThreadLauncher._honest(order)

    found, (launcher,) = trained(graph, lambda order: ThreadLauncher(order, serve), monkeypatch, epochs=2)
    assert launcher.num_started > 4
    assert_bits(found, expected)


def test_a_first_wave_of_many_is_replaced_too(make_graph: MakeGraph, monkeypatch: Any) -> None:
    """More deaths in a row than end a run of few functions; but when every wave dies, the run ends and says why."""
    graph = make_graph(80)
    expected, _ = trained(graph, ThreadLauncher, monkeypatch, epochs=2)

    def serve(num_dying: int) -> Callable[[Any, threading.Event], None]:
        def each(order: Any, stop: threading.Event) -> None:
            if int(order.function.rpartition("-")[2]) < num_dying:
                raise RuntimeError("the first wave dies")
            ThreadLauncher._honest(order)

        return each

    found, (launcher,) = trained(
        graph, lambda order: ThreadLauncher(order, serve(30)), monkeypatch, epochs=2, functions=15
    )
    assert launcher.num_started >= 45
    assert_bits(found, expected)
    with pytest.raises(ServerlessError, match="45 functions ended with a failure before any had done a task"):
        trained(graph, lambda order: ThreadLauncher(order, serve(10**6)), monkeypatch, functions=15)


def test_killed_processes_change_nothing(make_graph: MakeGraph, monkeypatch: Any) -> None:
    """Real functions, kill -9 at random times."""
    from polyhop.serverless.local import LocalLauncher

    graph = make_graph(80)
    expected, _ = trained(graph, ThreadLauncher, monkeypatch, epochs=30)
    over, killed = threading.Event(), []

    def reap(launcher: Any) -> None:
        while not over.wait(0.3):
            for pid in list(launcher.pids.values())[:1]:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    def watch(launcher: Any) -> None:
        threading.Thread(target=reap, args=(launcher,), daemon=True).start()

    try:
        found, (launcher,) = trained(graph, LocalLauncher, monkeypatch, epochs=30, watch=watch, functions=3)
    finally:
        over.set()
    assert launcher.alive == []
    assert killed
    assert_bits(found, expected)


def signalled(graph: Graph, monkeypatch: Any, epochs: int, functions: int, **kinds: tuple[float, int]) -> Any:
    """Real functions, signals at the moments that matter: what was trained, and the faults."""
    from polyhop.serverless.local import LocalLauncher

    made: list[Any] = []

    def pids_of(name: str) -> list[int]:
        found = (each.pids.get(name) for each in made)  # asked once: a process may end meanwhile
        return [pid for pid in found if pid is not None]

    faults = Faults(pids_of, 1, **kinds)
    opened = serverless_step.Post

    def watched(*given: Any, **more: Any) -> Any:
        post = opened(*given, **more)
        faults.watch(post)
        return post

    monkeypatch.setattr(serverless_step, "Post", watched)
    found, _ = trained(
        graph, LocalLauncher, monkeypatch, epochs=epochs, watch=made.append, functions=functions
    )
    assert made[0].alive == []
    print(dict(faults.counts), dict(found[2].counts))
    return found, faults.counts


@pytest.mark.slow
def test_functions_that_all_hang_are_replaced(make_graph: MakeGraph, monkeypatch: Any) -> None:
    """Stopped for good when they were given a task; nobody tells."""
    graph = make_graph(80)
    expected, _ = trained(graph, ThreadLauncher, monkeypatch, epochs=3)
    found, counts = signalled(graph, monkeypatch, 3, 2, hang=(1.0, 2))
    assert counts == {"hang": 2}
    assert_bits(found, expected)


@pytest.mark.slow
def test_processes_are_killed_at_the_moments_that_matter(make_graph: MakeGraph, monkeypatch: Any) -> None:
    """kill -9 when they were given a task, and when its result has come."""
    graph = make_graph(80)
    expected, _ = trained(graph, ThreadLauncher, monkeypatch, epochs=25)
    found, counts = signalled(graph, monkeypatch, 25, 4, before=(0.25, 20), after=(0.25, 20))
    assert counts == {"before": 20, "after": 20}
    assert found[2].counts["lost"] >= 20
    assert_bits(found, expected)


def test_labels_of_test_nodes_do_not_matter(make_graph: MakeGraph, monkeypatch: Any) -> None:
    graph = make_graph(80)
    assert graph.y is not None
    assert graph.split is not None
    y = graph.y.clone()
    held_out = torch.cat([graph.split.val, graph.split.test])
    y[held_out] = (y[held_out] + 1) % graph.num_classes
    expected, _ = trained(graph, ThreadLauncher, monkeypatch)
    assert_bits(trained(replace(graph, y=y), ThreadLauncher, monkeypatch)[0], expected)
    y = graph.y.clone()
    y[graph.split.train] = (y[graph.split.train] + 1) % graph.num_classes
    assert trained(replace(graph, y=y), ThreadLauncher, monkeypatch)[0][0] != expected[0]  # the test can fail
