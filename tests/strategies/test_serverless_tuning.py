"""``--functions auto``: the same bits whatever it decides, decisions that are told, functions that come and leave."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

import torch

from polyhop.comm import run_in_threads
from polyhop.errors import ConfigError
from polyhop.graph import Graph
from polyhop.serverless.prices import load_prices
from polyhop.strategies import serverless_step, serverless_tuning
from polyhop.strategies.serverless_books import Tariff
from polyhop.strategies.serverless_tuning import bounds_of
from polyhop.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "serverless"))

from faulty import ThreadLauncher  # type: ignore[import-not-found]
from test_serverless import on_rank  # type: ignore[import-not-found]
from test_serverless_bill import trained  # type: ignore[import-not-found]

MakeGraph = Callable[..., Graph]


def looked(step: Any) -> Any:
    tuner = step.tuning.tuner
    return [each.num_functions for each in tuner.decisions], list(step.notes)


def test_it_takes_more_functions_where_tasks_wait_and_changes_no_bit(
    make_graph: MakeGraph, monkeypatch: Any
) -> None:
    graph = make_graph(80)
    monkeypatch.setattr(serverless_step, "LocalLauncher", lambda order: ThreadLauncher(order))
    options = {"intervals": 12, "function_memory": 192}
    expected = run_in_threads(1, on_rank, graph, "gcn", 0.4, 8, {**options, "functions": 1})[0]
    monkeypatch.setattr(
        serverless_step, "LocalLauncher", lambda order: ThreadLauncher(replace(order, latency_s=0.05))
    )
    monkeypatch.setattr(serverless_tuning, "_LEAST_S", 0.1)
    monkeypatch.setattr(serverless_tuning.os, "sched_getaffinity", lambda _: {0, 1})
    losses, weights, (numbers, notes) = run_in_threads(
        1, on_rank, graph, "gcn", 0.4, 8, {**options, "functions": "auto"}, looked
    )[0]
    assert losses == expected[0]
    assert all(torch.equal(weights[name], value) for name, value in expected[1].items())
    assert max(numbers) > numbers[0]
    assert [note for note in notes if note.startswith(f"{numbers[1]} functions from now on: ")]


def test_a_first_wave_that_dies_whole_is_no_reason_for_anything(
    make_graph: MakeGraph, monkeypatch: Any
) -> None:
    since = time.monotonic()

    def serve(order: Any, stop: Any) -> None:
        if time.monotonic() - since < 0.3:
            raise RuntimeError("the first wave dies")
        ThreadLauncher._honest(order)

    monkeypatch.setattr(serverless_step, "LocalLauncher", lambda order: ThreadLauncher(order, serve))
    graph = make_graph(80)
    _, _, (numbers, _) = run_in_threads(
        1, on_rank, graph, "gcn", 0.4, 3, {"intervals": 4, "functions": "auto"}, looked
    )[0]
    assert all(1 <= each <= 4 for each in numbers)


def test_what_was_decided_is_in_the_trace(make_graph: MakeGraph, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(
        serverless_step, "LocalLauncher", lambda order: ThreadLauncher(replace(order, latency_s=0.05))
    )
    monkeypatch.setattr(serverless_tuning, "_LEAST_S", 0.1)
    trained(make_graph(80), 1, max_epochs=10, functions="auto", intervals=12, run_dir=str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "trace-rank0.jsonl").read_text().splitlines()]
    told = [each for each in lines if each.get("name") == "functions"]
    assert told
    assert all(each["wanted"] >= 1 and each["why"] for each in told)


def test_bounds_are_those_of_prices_and_host() -> None:
    local = Tariff(load_prices(), "c5n.2xlarge", 192, 600.0)
    here = bounds_of(local, 24, 2, 1000)
    assert (here.start, here.cores, here.intervals, here.link_bytes) == (1, 1.0, 24, inf)
    away = bounds_of(replace(local, is_local=False), 24, 4, 1)
    assert (away.start, away.cores, away.most) == (16, inf, 250)
    assert away.link_bytes == pytest.approx(25e9 / 8)
    assert away.function_dollars_s == pytest.approx(0.01125 / 3600, rel=1e-4)
    assert away.server_dollars_s == pytest.approx(0.432 / 3600)


@pytest.mark.parametrize("given", ["many", 0, 1.5])
def test_what_is_no_number_of_functions_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"functions=.*at least 1, or 'auto'"):
        Trainer("serverless", functions=given)
