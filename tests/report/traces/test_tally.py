"""Sums of a trace are those of its lines, however the file is cut, continued, repeated or broken."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polyhop.report.traces import lines
from polyhop.report.traces.tally import RankTally


def tally_of(path: Path, rank: int = 0) -> RankTally:
    tally = RankTally(path, rank)
    tally.read()
    return tally


@pytest.fixture
def trace(tmp_path: Path, made: SimpleNamespace) -> Path:
    path = tmp_path / "trace-rank1.jsonl"
    made.write(path, made.rank_lines(1, epochs=4, num_steps=2))
    return path


def test_seconds_of_an_epoch(trace: Path) -> None:
    sums = tally_of(trace, 1).sums
    assert sums.num_rows == 4
    assert sums.mean(("s",)) == pytest.approx(1.0)
    assert sums.mean(("own", "MainThread", "compute")) == pytest.approx(0.6)
    assert sums.mean(("own", "MainThread", "wait")) == pytest.approx(0.2)
    assert sums.mean(("whole", "MainThread", "compute")) == pytest.approx(0.8)
    assert sums.mean(("own", "MainThread", "evaluate")) == pytest.approx(0.15)
    assert sums.mean(("flight", "communicate")) == pytest.approx(0.4)
    assert tally_of(trace).epochs.train_s() == pytest.approx([0.85] * 4)


def test_bytes_of_an_epoch_and_before_it(trace: Path) -> None:
    tally = tally_of(trace, 1)
    assert tally.setup[("bytes", "hidden")] == 50.0
    assert tally.sums.values(("bytes", "hidden")).tolist() == [407.0] * 4
    assert tally.sums.values(("bytes", "gradients")).tolist() == [10.0] * 4
    assert tally.sums.values(("evaluation", "hidden")).tolist() == [7.0] * 4
    assert tally.sums.values(("layer", "1 forward")).tolist() == [400.0] * 4
    assert tally.most.values("peak").tolist() == [1006.0, 1007.0, 1008.0, 1009.0]


def test_shares_of_time_add_up_to_own_seconds(trace: Path) -> None:
    tracks = tally_of(trace, 1).attempts[0].tracks
    assert set(tracks) == {"MainThread", "in flight"}
    seconds = {name: float(values.sum()) for name, values in tracks["MainThread"].seconds.items()}
    assert seconds == pytest.approx({"compute": 2.4, "wait": 0.8, "evaluate": 0.6})


@pytest.mark.parametrize("size", [60, 700, 5000])
def test_read_as_it_grows(trace: Path, tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is there at each reading, the end is the same."""
    monkeypatch.setattr(lines, "PIECE_BYTES", 400)
    data, path = trace.read_bytes(), tmp_path / "growing.jsonl"
    path.touch()
    growing = RankTally(path, 1)
    for start in range(0, len(data), size):
        with path.open("ab") as file:
            file.write(data[start : start + size])
        growing.read()
    assert not growing.read()
    whole = tally_of(trace, 1)
    assert growing.num_records == whole.num_records
    assert {key: growing.sums.values(key).tolist() for key in growing.sums.keys} == {
        key: whole.sums.values(key).tolist() for key in whole.sums.keys
    }
    assert growing.epochs.number == whole.epochs.number


def test_a_run_that_was_continued(tmp_path: Path, made: SimpleNamespace) -> None:
    """Its second process counts from nothing again, and trains epoch 2 again."""
    path = tmp_path / "t.jsonl"
    again = [made.start(0, made.ORIGIN + 500), *made.marks(1, 3.0, 70.0, 0.0, 1.0)]
    again += [*made.epoch_lines(0, 2, 3.0), *made.marks(2, 4.0, 170.0, 0.0, 1.0)]
    first = list(made.rank_lines(0, epochs=2))
    half = json.dumps(made.span("compute", 5.0, 1.0))[:30]
    text = "".join(json.dumps(line) + "\n" for line in first) + half
    path.write_text(text + "".join(json.dumps(line) + "\n" for line in again))
    tally = tally_of(path)
    assert [attempt.origin for attempt in tally.attempts] == [made.ORIGIN, made.ORIGIN + 500]
    assert list(tally.epochs.number) == [1, 2, 2]
    assert list(tally.epochs.attempt) == [0, 0, 1]
    assert tally.setup[("bytes", "hidden")] == 120.0
    assert tally.sums.means(("bytes", "hidden")).tolist() == [107.0, (107.0 + 100.0) / 2]
    assert tally.num_broken == 0


def bad_records() -> list[dict[str, Any]]:
    return [
        {"kind": "span"},
        {"kind": "span", "name": "compute", "at": "soon", "seconds": 1.0, "thread": "t"},
        {"kind": "span", "name": "compute", "at": -5.0, "seconds": 1.0, "thread": "t"},
        {"kind": "span", "name": "compute", "at": 1e300, "seconds": 1e300, "thread": "t"},
        {"kind": "span", "name": 7, "at": 1.0, "seconds": 1.0, "thread": "t"},
        {"kind": "span", "name": "compute", "at": 1.0, "seconds": None, "thread": "t"},
        {"kind": "counter", "name": "memory", "at": 1.0, "resident": "much"},
        {"kind": "instant", "name": "epoch", "at": 1.0, "epoch": [1]},
        {"name": "compute"},
    ]


def test_records_without_sense_are_counted_and_passed_over(tmp_path: Path, made: SimpleNamespace) -> None:
    path = tmp_path / "t.jsonl"
    good = list(made.rank_lines(0, epochs=2))
    made.write(path, [good[0], *bad_records(), *good[1:]])
    tally = tally_of(path)
    assert tally.num_broken == len(bad_records())
    assert tally.sums.mean(("own", "MainThread", "wait")) == pytest.approx(0.2)


def test_a_file_without_its_first_line(tmp_path: Path, made: SimpleNamespace) -> None:
    path = tmp_path / "t.jsonl"
    made.write(path, list(made.rank_lines(0, epochs=2))[1:])
    tally = tally_of(path)
    assert len(tally.attempts) == 1
    assert len(tally.epochs) == 2


def test_threads_beyond_a_dozen_share_a_track(tmp_path: Path, made: SimpleNamespace) -> None:
    path = tmp_path / "t.jsonl"
    spans = [made.span("load", float(at), 0.5, f"Thread-{at}") for at in range(100)]
    made.write(
        path, [made.start(), *made.marks(0, 0.0, 0.0, 0.0, 1.0), *spans, *made.marks(1, 101.0, 0.0, 0.0, 1.0)]
    )
    tally = tally_of(path)
    assert len(tally.attempts[0].tracks) == 13
    assert sum(tally.sums.mean(key) for key in tally.sums.keys if key[0] == "own") == pytest.approx(50.0)


def test_tasks_of_functions_are_in_flight_from_lease_to_result(tmp_path: Path, made: SimpleNamespace) -> None:
    path = tmp_path / "t.jsonl"

    def instant(name: str, at: float, lease: int) -> dict[str, Any]:
        return {"kind": "instant", "name": name, "at": at, "lease": lease}

    told = [
        instant("lease", 1.0, 1),
        instant("lease", 1.5, 2),
        instant("result", 3.0, 1),
        instant("result", 9.0, 77),
    ]
    made.write(
        path, [made.start(), *made.marks(0, 0.0, 0.0, 0.0, 1.0), *told, *made.marks(1, 4.0, 0.0, 0.0, 1.0)]
    )
    assert tally_of(path).sums.mean(("flight", "task")) == pytest.approx(2.0)
