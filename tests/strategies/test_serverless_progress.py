"""What is seen of a run with functions while an epoch takes long: figures of its ledger and its crew, everywhere."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

import torch

from polyhop import nn
from polyhop.comm import Collective, run_in_threads
from polyhop.graph import Graph
from polyhop.partition import partition, share
from polyhop.serverless.bill import Bill
from polyhop.serverless.ledger import Ledger, Terms
from polyhop.serverless.wire import TaskKey
from polyhop.strategies import serverless_live, serverless_step
from polyhop.strategies.serverless_live import Live, in_words
from polyhop.trace import Trace
from polyhop.train import progress
from polyhop.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parents[1] / "serverless"))

from faulty import ThreadLauncher  # type: ignore[import-not-found]

MakeGraph = Callable[..., Graph]
LINE = re.compile(
    r"(\d+) functions  (\d+) tasks in flight  (\d+) waiting  (\d+) given again  \$(\d+\.\d+)  \(server 0 of 2\)"
)


def fit(line: Collective, graph: Graph, kind: str) -> None:
    torch.manual_seed(7)
    model = nn.GCN(graph.num_features, 4, num_layers=2, out_channels=graph.num_classes)
    held = share(graph, partition(graph, 2, "hash"), line.rank)
    Trainer("serverless", max_epochs=1, progress=kind, device="cpu", intervals=3, functions=2).fit(
        model, held, line=line
    )


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Facts as ledger and crew had them whenever they were shown; tasks take a while, and the first wave of leases runs
    out, so that some are given again."""
    seen: list[dict[str, Any]] = []
    facts = serverless_live.Live.facts

    def watched(live: Any) -> dict[str, Any]:
        found = facts(live)
        if live._rank == 0:
            seen.append({**found, "text": in_words(found, 0, 2)})
        return found

    monkeypatch.setattr(serverless_live.Live, "facts", watched)
    monkeypatch.setattr(serverless_step, "TERMS", Terms(floor_s=0.3, ratio=5.0, cold_s=0.3))
    monkeypatch.setattr(
        serverless_step, "LocalLauncher", lambda order: ThreadLauncher(replace(order, latency_s=0.35))
    )
    monkeypatch.setattr(serverless_live, "_TELLS_S", 0.05)
    monkeypatch.setattr(progress, "_STEP_LINE_EVERY_S", 0.5)
    monkeypatch.setattr(progress, "_LIVE_EVENT_EVERY_S", 0.5)
    return seen


def test_facts_are_those_of_ledger_and_crew() -> None:
    """Seven tasks: one done, two leased (one of them again), four wait."""
    ledger: Ledger[None] = Ledger(Terms(cold_s=1.0))
    for interval in range(7):
        ledger.offer(TaskKey(0, 0, interval, 0, False), None)
    first, second = (ledger.lease("f", float(at)) for at in (0, 0))
    assert first is not None
    assert second is not None
    ledger.commit(first[0].key, first[0].number, 0.5)
    ledger.expire(2.0)
    assert [ledger.lease("g", 2.0) is not None for _ in range(2)] == [True, True]
    live: Any = Live(
        cast(Any, SimpleNamespace(ledger=ledger)),
        cast(Any, SimpleNamespace(num_alive=3)),
        cast(Any, SimpleNamespace(so_far=lambda: Bill(requests=Fraction(1, 4)), note=lambda: None)),
        0,
        1,
    )
    found = live.facts()
    assert found == {"functions": 3, "in_flight": 2, "waiting": 4, "again": 1, "dollars": 0.25}
    text = "3 functions  2 tasks in flight  4 waiting  1 given again  $0.250000"
    assert in_words(found, 0, 1) == text
    assert in_words(found, 0, 2) == f"{text}  (server 0 of 2)"


def test_the_trace_has_them_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(serverless_live, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    books = SimpleNamespace(so_far=lambda: Bill(requests=Fraction(1, 4)), note=lambda: None)
    trace = Trace(tmp_path / "t.jsonl")
    post: Any = SimpleNamespace(ledger=Ledger(Terms(cold_s=1.0)))
    live = Live(post, cast(Any, SimpleNamespace(num_alive=3)), cast(Any, books), 0, 1, trace)
    for _ in range(30):  # 3 s, with nobody to tell
        live.tick()
        clock[0] += 0.1
    trace.close()
    found = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()][1:]
    assert len(found) == 3
    assert {(each["kind"], each["name"], each["functions"], each["dollars"]) for each in found} == {
        ("counter", "crew", 3, 0.25)
    }


def check(shown: list[str], told: list[dict[str, Any]]) -> None:
    """All that was shown was so; work went on, and leases that had run out were given again."""
    assert len(shown) >= 2
    assert set(shown) <= {each["text"] for each in told}
    figures = [match.groups() for text in shown if (match := LINE.fullmatch(text))]
    assert len(figures) == len(shown)
    assert any(int(in_flight) > 0 for _, in_flight, *_ in figures)
    assert int(figures[-1][3]) > 0
    assert float(figures[-1][4]) >= 60 * 0.432 / 3600  # a server is paid for a minute at least


def test_plain_lines(make_graph: MakeGraph, told: list[dict[str, Any]], capsys: Any) -> None:
    run_in_threads(2, fit, make_graph(80), "plain")
    lines = capsys.readouterr().err.splitlines()
    check([line.removeprefix("now").strip() for line in lines if line.startswith("now")], told)


def test_json_events(make_graph: MakeGraph, told: list[dict[str, Any]], capsys: Any) -> None:
    run_in_threads(2, fit, make_graph(80), "json")
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    live = [{k: v for k, v in each.items() if k != "event"} for each in events if each["event"] == "live"]
    known = [{k: v for k, v in each.items() if k != "text"} for each in told]
    assert len(live) >= 2
    assert all(each in known for each in live)
    assert live[-1]["again"] > 0
    assert [each["event"] for each in events][-2:] == ["note", "result"]  # what it cost
    assert events[-1]["summary"]["bill"]["dollars"] > 0


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Standard error is a terminal of 200 columns; what was written to it."""
    ours, theirs = pty.openpty()
    read = io.BytesIO()

    def drain() -> None:
        try:
            while data := os.read(ours, 4096):
                read.write(data)
        except OSError:
            pass

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    for name, value in (("COLUMNS", "200"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    file = os.fdopen(theirs, "w")
    monkeypatch.setattr(sys, "stderr", file)

    def written() -> str:
        """All that was, once the other end has read it."""
        file.write("\0")
        file.flush()
        stop = time.monotonic() + 60
        while b"\0" not in read.getvalue():
            assert time.monotonic() < stop, "what was written to the terminal does not arrive"
            time.sleep(0.01)
        return read.getvalue().decode()

    yield written
    file.close()
    thread.join(timeout=5)
    os.close(ours)


def test_a_line_under_the_bar_of_a_terminal(
    make_graph: MakeGraph, told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    with terminal(monkeypatch) as written:
        run_in_threads(2, fit, make_graph(80), "auto")
        sys.stderr.flush()
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written())
    assert re.search(r"epochs .* 1/1", plain)
    found = [match.group() for match in LINE.finditer(plain)]
    check(found, told)
