"""The bill of a real run: every function that a launcher saw is in it, to the millisecond, however it ended (I9)."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

import torch
from torch import Tensor

from polyhop import nn
from polyhop.comm import Collective, run_in_threads
from polyhop.errors import ConfigError
from polyhop.graph import Graph
from polyhop.partition import Partition, partition, share
from polyhop.serverless.bill import FunctionTrace, ServerTrace, bill
from polyhop.serverless.local import LocalLauncher
from polyhop.serverless.prices import load_prices
from polyhop.serverless.records import read_records, record_file, traces_of
from polyhop.strategies import serverless_step
from polyhop.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parents[1] / "serverless"))

from faulty import ThreadLauncher  # type: ignore[import-not-found]

MakeGraph = Callable[..., Graph]
SEEDING = threading.Lock()


def fit(line: Collective, graph: Graph, owner: Tensor, options: dict[str, Any]) -> Any:
    with SEEDING:
        torch.manual_seed(7)
        model = nn.GCN(graph.num_features, 8, num_layers=2, out_channels=graph.num_classes)
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    given = {
        "device": "cpu",
        "progress": "none",
        "intervals": 3,
        "functions": 2,
        "function_memory": 192,
        **options,
    }
    return Trainer("serverless", **given).fit(model, held, line=line)


def trained(graph: Graph, ranks: int, **options: Any) -> Any:
    owner = partition(graph, ranks, "hash").owner
    return run_in_threads(ranks, fit, graph, owner, options)[0]


class Seen:
    """Launchers of real processes whose every ended function is remembered; one is killed after a while."""

    def __init__(self, monkeypatch: Any, *, kills: int = 0) -> None:
        self.ended: list[Any] = []
        self.killed: list[str] = []
        seen = self

        class Watched(LocalLauncher):
            def ended(self) -> list[Any]:
                for name, pid in list(self.pids.items())[: kills - len(seen.killed)]:
                    os.kill(pid, signal.SIGKILL)
                    seen.killed.append(name)
                found = super().ended()
                seen.ended.extend(found)
                return found

        monkeypatch.setattr(serverless_step, "LocalLauncher", Watched)

    @property
    def total_ms(self) -> float:
        return sum(1000 * (each.end_s - each.start_s) for each in self.ended)


def functions_in(folder: Path) -> dict[str, FunctionTrace]:
    return {
        f"{rank}:{key}": trace
        for rank in range(2)
        for key, trace in read_records(record_file(folder, rank)).items()
        if isinstance(trace, FunctionTrace)
    }


def assert_is_bill_of(folder: Path, written: dict[str, Any]) -> None:
    found = bill(traces_of(folder), load_prices())
    assert Fraction(written["dollars_exact"]) == found.dollars > 0
    assert written["billed_ms"] == found.billed_ms
    assert {name: written[name] for name in found.to_json()} == found.to_json()


def test_the_bill_is_of_all_that_ran_also_of_what_was_killed(
    make_graph: MakeGraph, monkeypatch: Any, tmp_path: Path
) -> None:
    """Two ranks; two functions die by kill -9, the others are alive when training ends."""
    seen = Seen(monkeypatch, kills=2)
    result = trained(make_graph(80), 2, max_epochs=4, run_dir=str(tmp_path))
    functions = functions_in(tmp_path)
    assert len(seen.killed) == 2
    assert len(functions) == len(seen.ended) >= 6
    paid = sum(float(Fraction(each.init_ms) + each.alive_ms) for each in functions.values())
    assert paid == pytest.approx(seen.total_ms, abs=0.01)
    done = sum(each.num_tasks for each in functions.values())
    assert done >= 2 * 3 * 3 * 4  # ranks, intervals, tasks of an interval, epochs
    assert all(each.memory_mb == 192 for each in functions.values())
    assert any(each.busy_ms for each in functions.values())
    servers = [each for each in traces_of(tmp_path) if isinstance(each, ServerTrace)]
    assert [each.kind for each in servers] == ["c5n.2xlarge"] * 2
    written = json.loads((tmp_path / "bill.json").read_text())
    assert_is_bill_of(tmp_path, written)
    assert (
        result.summary["bill"]
        == written
        == json.loads((tmp_path / "result.json").read_text())["summary"]["bill"]
    )
    secrets = "".join(path.read_text() for path in tmp_path.glob("functions-*"))
    assert not any(word in secrets for word in ("secret", "public", "job", "tcp://"))


def test_a_run_that_goes_on_adds_to_its_bill(make_graph: MakeGraph, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(serverless_step, "LocalLauncher", lambda order: ThreadLauncher(order))
    graph, options = make_graph(80), {"run_dir": str(tmp_path)}
    first = trained(graph, 2, max_epochs=2, **options).summary["bill"]
    before = record_file(tmp_path, 1).read_text()
    second = trained(graph, 2, max_epochs=4, resume="auto", **options).summary["bill"]
    assert record_file(tmp_path, 1).read_text().startswith(before)
    assert second["num_requests"] == 2 * first["num_requests"] == 8
    assert second["dollars"] > first["dollars"]
    assert second["server_s"] == 4 * 60  # two ranks, two sessions, a minute at least
    assert_is_bill_of(tmp_path, second)


def test_ranks_without_the_folder_are_billed_too(
    make_graph: MakeGraph, monkeypatch: Any, tmp_path: Path
) -> None:
    """As on another host: rank 1 writes nowhere that rank 0 sees."""
    monkeypatch.setattr(serverless_step, "LocalLauncher", lambda order: ThreadLauncher(order))
    keep = serverless_step.ServerlessStep.keep_records
    monkeypatch.setattr(
        serverless_step.ServerlessStep, "keep_records",
        lambda step, folder: keep(step, folder if step._line.rank == 0 else tmp_path / "elsewhere"),
    )  # fmt: skip
    result = trained(make_graph(80), 2, max_epochs=2, run_dir=str(tmp_path / "run"))
    mine, theirs = (read_records(record_file(tmp_path / folder, 1)) for folder in ("run", "elsewhere"))
    assert mine == theirs
    assert len(mine) == 3
    assert_is_bill_of(tmp_path / "run", result.summary["bill"])


def test_prices_of_ones_own(make_graph: MakeGraph, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(serverless_step, "LocalLauncher", lambda order: ThreadLauncher(order))
    table = json.loads(load_prices().path.read_text())
    table["servers"]["kinds"]["c5.xlarge"]["dollars_per_hour"] = 3600
    (tmp_path / "mine.json").write_text(json.dumps(table))
    options = {"max_epochs": 1, "prices": str(tmp_path / "mine.json"), "server_kind": "c5.xlarge"}
    found = trained(make_graph(80), 1, **options).summary["bill"]
    assert found["servers"] == {"graph c5.xlarge": 60.0}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"server_kind": "c9"}, "unknown kind of server 'c9'"),
        ({"prices": "none.json"}, r"none\.json cannot be read"),
    ],
)
def test_prices_that_do_not_fit_are_refused_before_anything_starts(
    make_graph: MakeGraph, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        trained(make_graph(40), 1, max_epochs=1, **options)
