"""A Chrome trace has every record of every rank, in the form that its viewers read."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polyhop.errors import InputError
from polyhop.report.chrome import write_chrome_trace


def events(path: Path) -> list[dict[str, Any]]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return list(json.loads(data)["traceEvents"])


def test_every_record_is_there(make_run: Any, tmp_path: Path) -> None:
    count = write_chrome_trace(make_run(), tmp_path / "t.json")
    found = events(tmp_path / "t.json")
    assert len(found) == count
    kinds = Counter(event["ph"] for event in found)
    assert kinds == {"M": 6, "X": 2 * 5 * 3, "b": 10, "e": 10, "C": 2 * 6 * 3, "i": 2 * 6}
    names = {(e["pid"], e["args"]["name"]) for e in found if e["name"] == "process_name"}
    assert names == {(0, "rank 0"), (1, "rank 1")}


def test_times_are_of_one_clock(make_run: Any, tmp_path: Path) -> None:
    write_chrome_trace(make_run(), tmp_path / "t.json")
    compute = [e for e in events(tmp_path / "t.json") if e["name"] == "compute"]
    first = {event["pid"]: event for event in reversed(compute)}
    assert (first[0]["ts"], first[0]["dur"]) == pytest.approx((2e6, 0.8e6))
    assert first[1]["ts"] == pytest.approx(3e6)  # it began a second later
    assert first[0]["args"] == {"step": 0}
    assert {event["tid"] for event in compute} == {1}


def test_messages_in_flight_begin_and_end(make_run: Any, tmp_path: Path) -> None:
    write_chrome_trace(make_run(), tmp_path / "t.json")
    flights = [e for e in events(tmp_path / "t.json") if e["ph"] in "be"]
    pairs = Counter((e["cat"], e["id"]) for e in flights)
    assert set(pairs.values()) == {2}
    assert flights[0]["args"]["bytes"] == 100


def test_tasks_begin_and_end_by_their_lease(tmp_path: Path, made: SimpleNamespace) -> None:
    told = [
        {"kind": "instant", "name": name, "at": at, "lease": 4}
        for name, at in (("lease", 1.0), ("result", 2.0))
    ]
    made.write(tmp_path / "trace-rank0.jsonl", [made.start(), *told])
    write_chrome_trace(tmp_path, tmp_path / "t.json")
    begin, end = (event for event in events(tmp_path / "t.json") if event["ph"] in "be")
    assert (begin["name"], begin["ts"], end["ts"], begin["id"]) == ("task", 1e6, 2e6, end["id"])


def test_counters_hold_numbers_only(tmp_path: Path, made: SimpleNamespace) -> None:
    odd = {"kind": "counter", "name": "memory", "at": 1.0, "epoch": 3, "resident": 5, "host": "a"}
    made.write(tmp_path / "trace-rank0.jsonl", [made.start(), odd])
    write_chrome_trace(tmp_path, tmp_path / "t.json")
    (counter,) = (event for event in events(tmp_path / "t.json") if event["ph"] == "C")
    assert counter["args"] == {"resident": 5}


def test_packed_by_its_name(make_run: Any, tmp_path: Path) -> None:
    run = make_run()
    write_chrome_trace(run, tmp_path / "t.json")
    write_chrome_trace(run, tmp_path / "t.json.gz")
    assert events(tmp_path / "t.json") == events(tmp_path / "t.json.gz")
    assert (tmp_path / "t.json.gz").stat().st_size < (tmp_path / "t.json").stat().st_size / 4


def test_a_folder_without_traces(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to export"):
        write_chrome_trace(tmp_path, tmp_path / "t.json")
    assert list(tmp_path.iterdir()) == []


def test_nothing_half_written_stays(make_run: Any, tmp_path: Path) -> None:
    run = make_run()
    with pytest.raises(InputError, match="cannot write"):
        write_chrome_trace(run, Path("/dev/null/t.json"))
    (tmp_path / "t.json").mkdir()
    with pytest.raises(InputError, match="cannot write"):
        write_chrome_trace(run, tmp_path / "t.json")
    assert not (tmp_path / ".tmp-t.json").exists()
