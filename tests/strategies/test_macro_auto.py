"""Ranks that choose k by themselves choose alike, however different their parts, pools, cores and measurements are."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop import nn
from polyhop.comm import Collective, run_in_threads
from polyhop.exchange import Loaded
from polyhop.graph import Graph
from polyhop.partition import Partition, share
from polyhop.sample.reuse import Reuse
from polyhop.strategies import Team, macro, place
from polyhop.strategies.macro_auto import SecondThoughts, lowered
from polyhop.strategies.macro_plan import Facts
from polyhop.train.loss import cross_entropy_sum

MakeGraph = Callable[..., Graph]
SEEDING = threading.Lock()


def facts_of(**values: Any) -> Facts:
    reuse = Reuse.of(torch.full((5000,), 0.02, dtype=torch.float64))
    given = {"latency_s": 1e-3, "bytes_per_s": 1e8, "compute_s": 0.01, "memory_bytes": 1e9, "num_epochs": 5}
    return Facts(64, 3, 4, reuse, 520.0, 560.0, **{**given, **values})


def build_with_cores(line: Collective, graph: Graph, owner: Tensor, cores: list[set[int]]) -> dict[str, Any]:
    """The facts that second thoughts begin with, on one rank."""
    _CORES.own = cores[line.rank]
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    config = macro.Config(num_neighbors=[4, 3], batch_size=20, max_epochs=2)
    team = Team(line)
    whole = macro.hold(held, place("cpu", "32-true"), team, config)
    with SEEDING:
        torch.manual_seed(0)
        model = nn.GraphSAGE(graph.num_features, 8, num_layers=2, out_channels=graph.num_classes)
    assert held.split is not None
    train = held.split.train
    step = macro.build(model, held, config, train_ids=train, whole=whole, loss=cross_entropy_sum, team=team)
    loader = step._loader  # type: ignore[attr-defined]
    facts = loader.after_window._facts
    told = {each.name: getattr(facts, each.name) for each in fields(facts) if each.name != "reuse"}
    return {**told, "k": loader.size, "rows": facts.reuse.distinct(3), "capacity": loader.pool.capacity}


_CORES = threading.local()


@pytest.mark.parametrize(
    ("cores", "crowding"),
    [([{0}, {1}, {2}], 1.0), ([{0, 1}] * 3, 1.5), ([{0}, {0}, {1, 2, 3, 4, 5}], 1.0), ([{0}] * 3, 3.0)],
    ids=["pinned", "shared", "uneven", "one core"],
)
def test_facts_are_the_same_on_all_ranks(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch, cores: list[set[int]], crowding: float
) -> None:
    graph = make_graph()
    nodes = torch.arange(graph.num_nodes)
    owner = torch.where(nodes % 10 == 9, nodes % 3, 0).int()  # rank 0 has most: its pool is the smallest
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: _CORES.own)
    found = run_in_threads(3, build_with_cores, graph, owner, cores)
    capacities = {each.pop("capacity") for each in found}
    assert len(capacities) > 1, "the case is no case"
    assert found[1] == found[0]
    assert found[2] == found[0]
    assert found[0]["slots"] == min(capacities)
    assert found[0]["crowding"] == crowding


def think(line: Collective, slots: int, num_windows: int) -> tuple[list[int | None], list[str], bool]:
    """Windows that went differently on every rank; those of more steps go faster."""
    notes: list[str] = []
    seconds = 0.002 * (line.rank + 1)
    sizes = [1]  # of windows so far

    def seconds_of(windows: range) -> float | None:
        trained = sizes[windows.start : windows.stop]
        if len(trained) < len(windows) or windows.stop > len(sizes) - 1:
            return None  # not trained
        if line.rank == 1 and windows.start < 5:
            return None  # a rank that began its epoch elsewhere
        return 0.001 * (line.rank + 1) * (1 + 3 / max(trained))

    thoughts = SecondThoughts(facts_of(slots=slots), 1, line, notes, lambda: seconds, seconds_of)
    told = []
    for window in range(num_windows):
        k = sizes[-1]
        nodes, load = k * (100 + line.rank), k * 0.05 * (line.rank + 1)
        told.append(thoughts(Loaded(window, k, nodes, 50 * line.rank * k, load, 0.004, 10_000)))
        sizes.append(told[-1] or k)
    return told, notes, thoughts.is_settled


def test_second_thoughts_are_shared() -> None:
    found = run_in_threads(4, think, 5000, 40)
    assert all(each == found[0] for each in found)
    answers, notes, is_settled = found[0]
    assert answers[:3] == [None, None, answers[2]]
    assert answers[2] is not None, "loading takes too long for k = 1"
    assert notes[0].startswith("after 3 windows: windows of ")
    assert is_settled
    assert "ms a mini-batch measured" in notes[-1]
    assert [k for k in answers if k] == sorted({k for k in answers if k}), "larger was faster, and was kept"


def test_a_run_that_is_nearly_over_tries_nothing() -> None:
    """64 steps, 5 epochs: at window 2 with k = 1, windows of 16 and more are worth trying; at the end none is."""
    line = run_in_threads(1, lambda line: line)[0]
    thoughts = SecondThoughts(facts_of(), 1, line, [], lambda: 0.0, lambda _: 0.1)
    thoughts._num_steps = 64 * 5 - 40
    assert thoughts._may_try(5)
    assert not thoughts._may_try(6)


def test_a_k_that_does_not_fit_is_lowered_and_says_so() -> None:
    whole = lowered(facts_of(), 16)
    assert (whole.k, whole.reason) == (16, "")
    less = lowered(facts_of(memory_bytes=2.0e6, block_bytes=1e4), 16)
    assert 1 <= less.k < 16
    assert less.memory_bytes <= 2.0e6
    assert "not 16" in less.reason
