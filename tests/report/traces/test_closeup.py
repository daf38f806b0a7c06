"""Close-ups hold every span of their epoch, nested as they were, and of no other life of the process."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from polyhop.report.traces import lines
from polyhop.report.traces.closeup import choose_epochs, read_closeup
from polyhop.report.traces.tally import RankTally


def tally_of(path: Path) -> RankTally:
    tally = RankTally(path, 0)
    tally.read()
    return tally


@pytest.mark.parametrize("size", [300, 1 << 20])
def test_all_spans_of_an_epoch(
    tmp_path: Path, made: SimpleNamespace, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "PIECE_BYTES", size)
    path = tmp_path / "t.jsonl"
    made.write(path, made.rank_lines(0, epochs=6, num_steps=3))
    found = read_closeup(tally_of(path), 4, most=1000)
    assert found is not None
    assert (found.start, found.stop) == pytest.approx((5.0, 6.0))
    inside = [span for span in found.spans if span.start >= 5.0 - 1e-9 and span.stop <= 6.0 + 1e-9]
    names = sorted(span.name for span in inside)
    assert names == ["communicate"] * 3 + ["compute"] * 3 + ["evaluate"] + ["wait"] * 3
    depths = {(span.name, span.depth) for span in inside if span.track == "MainThread"}
    assert depths == {("compute", 0), ("wait", 1), ("evaluate", 0)}
    steps = [span.step for span in inside if span.name == "compute"]
    assert steps == [9, 10, 11]
    (facts,) = {span.facts for span in inside if span.name == "communicate"}
    assert json.loads(facts) == {"layer": 1, "direction": "forward", "bytes": 100}


def test_no_more_than_allowed(tmp_path: Path, made: SimpleNamespace) -> None:
    path = tmp_path / "t.jsonl"
    made.write(path, made.rank_lines(0, epochs=2, num_steps=50))
    found = read_closeup(tally_of(path), 1, most=20)
    assert found is not None
    assert len(found.spans) == 20
    assert found.num_left_out == 131
    assert found.spans == sorted(found.spans, key=lambda span: span.start)


def test_spans_of_an_earlier_life_stay_out(tmp_path: Path, made: SimpleNamespace) -> None:
    """Both lives were at the same seconds, in the same piece of the file."""
    path = tmp_path / "t.jsonl"
    first, second = list(made.rank_lines(0, epochs=2)), list(made.rank_lines(0, epochs=2))
    for line in first:
        line["life"] = 1
    made.write(path, [*first, *second])
    found = read_closeup(tally_of(path), 2, most=1000)
    assert found is not None
    assert found.attempt == 1
    assert found.spans
    assert not any("life" in span.facts for span in found.spans)


def test_messages_in_flight_at_once_have_rows_of_their_own(tmp_path: Path, made: SimpleNamespace) -> None:
    path = tmp_path / "t.jsonl"
    flights = [made.span("communicate", 0.1 * at, 1.0, layer=at, direction="forward") for at in range(12)]
    made.write(path, [made.start(), *made.marks(0, 0.0, 0, 0, 1), *flights, *made.marks(1, 5.0, 0, 0, 1)])
    found = read_closeup(tally_of(path), 1, most=100)
    assert found is not None
    assert [span.depth for span in found.spans] == [0, 1, 2, 3, 4, 5, 6, 7, 7, 7, 0, 1]


def test_which_epochs(tmp_path: Path, made: SimpleNamespace) -> None:
    path = tmp_path / "t.jsonl"
    told, at = [made.start(), *made.marks(0, 1.0, 0, 0, 1)], 1.0
    for epoch, seconds in enumerate((3.0, 1.0, 2.0, 9.0, 1.5), start=1):
        at += seconds
        told += made.marks(epoch, at, 0, 0, 1)
    made.write(path, told)
    assert choose_epochs(tally_of(path)) == {1: "first", 3: "median", 4: "slowest", 5: "last"}
    made.write(path, told[:9])
    assert choose_epochs(tally_of(path)) == {1: "first, median, slowest, last"}
    made.write(path, told[:5])
    assert choose_epochs(tally_of(path)) == {}
    assert read_closeup(tally_of(path), 1, most=10) is None
