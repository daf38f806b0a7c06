"""Spans are summed whatever thread they come from, and land in the file as lines that can be read back."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from polyhop.trace import Trace


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_spans_land_in_the_file_with_their_facts(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    trace = Trace(path, rank=3)
    with trace.span("compute", step=7):
        trace.instant("best", epoch=1)
        trace.counter("bytes", features=12)
    trace.close()
    start, best, count, span = lines(path)
    assert (start["kind"], start["rank"]) == ("start", 3)
    assert (best["kind"], best["name"], best["epoch"]) == ("instant", "best", 1)
    assert (count["kind"], count["features"]) == ("counter", 12)
    assert (span["kind"], span["name"], span["step"], span["thread"]) == ("span", "compute", 7, "MainThread")
    assert 0 <= span["at"] <= best["at"] <= span["at"] + span["seconds"]


def test_a_span_is_recorded_when_its_body_raises() -> None:
    trace = Trace()
    with pytest.raises(KeyError), trace.span("load"):
        raise KeyError
    assert trace.counts() == {"load": 1}


def test_totals_add_up_over_threads(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "t.jsonl")

    def work() -> None:
        for _ in range(500):
            trace.record_span("sample", 0.0, 0.25, {})

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace.close()
    assert trace.totals() == {"sample": 500.0}
    assert trace.counts() == {"sample": 2000}
    assert sum(line["kind"] == "span" for line in lines(tmp_path / "t.jsonl")) == 2000


def test_without_a_path_only_totals_are_kept() -> None:
    trace = Trace()
    for _ in range(1000):
        with trace.span("compute"):
            pass
    trace.instant("x")
    assert trace.counts() == {"compute": 1000}
    assert trace._pending == []


def test_a_second_trace_appends(tmp_path: Path) -> None:
    for _ in range(2):
        trace = Trace(tmp_path / "t.jsonl")
        with trace.span("wait"):
            pass
        trace.close()
    assert [line["kind"] for line in lines(tmp_path / "t.jsonl")] == ["start", "span", "start", "span"]


def test_a_disk_that_fills_up_leaves_whole_lines(small_disk: Path) -> None:
    path = small_disk / "trace.jsonl"
    trace = Trace(path)

    def fill() -> None:
        for step in range(50_000):
            trace.instant("best", step=step)

    with pytest.warns(RuntimeWarning, match=r"trace stopped, cannot write .*trace.jsonl.*No space left"):
        fill()
    trace.close()
    assert lines(path)[-1]["step"] > 1000
    (small_disk / "folder").mkdir()
    with pytest.warns(RuntimeWarning, match="no trace, cannot open .*folder"):
        unwritten = Trace(small_disk / "folder")
    unwritten.instant("best")
    unwritten.close()


def test_a_full_disk_costs_the_trace_not_the_run(tmp_path: Path) -> None:
    trace = Trace("/dev/full")
    with trace.span("compute"):
        pass
    with pytest.warns(RuntimeWarning, match="trace stopped"):
        trace.flush()
    with trace.span("compute"):
        pass
    trace.close()
    assert trace.counts() == {"compute": 2}


def test_a_trace_knows_whether_it_is_written(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "t.jsonl")
    assert trace.is_written
    trace.close()
    assert not trace.is_written
    assert not Trace().is_written


def test_spans_go_by_the_clock_that_is_given() -> None:
    hands = iter(range(10))
    trace = Trace(clock=lambda: float(next(hands)))
    with trace.span("compute"), trace.span("quantise"):
        pass
    assert trace.totals() == {"compute": 3.0, "quantise": 1.0}
