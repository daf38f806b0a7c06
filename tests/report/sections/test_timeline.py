"""The packed timeline says what the trace says: unpacked, its spans and shares are those of the lines."""

from __future__ import annotations

import base64
import json
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polyhop.report.sections.timeline import clock_of, timeline
from polyhop.report.traces.tally import RankTally


def read(folder: Path) -> list[RankTally]:
    tallies = [RankTally(folder / f"trace-rank{rank}.jsonl", rank) for rank in range(2)]
    for tally in tallies:
        tally.read()
    return tallies


def unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def columns(closeup: dict[str, Any]) -> dict[str, np.ndarray]:
    data, count, at, found = unpacked(closeup["data"]), closeup["num_spans"], 0, {}
    kinds = {
        "start": "<i4",
        "length": "<u4",
        "step": "<i4",
        "fact": "<u4",
        "name": "<u2",
        "track": "<u2",
        "depth": "u1",
    }
    for name, kind in kinds.items():
        found[name] = np.frombuffer(data, kind, count, at)
        at += found[name].nbytes
    assert at == len(data)
    return found


@pytest.fixture
def made_timeline(make_run: Any) -> dict[str, Any]:
    tallies = read(make_run(num_steps=4))
    found = timeline(tallies, clock_of(tallies))
    assert found is not None
    return found


def test_tracks_of_every_rank(made_timeline: dict[str, Any]) -> None:
    tracks = [(track["rank"], track["thread"]) for track in made_timeline["tracks"]]
    assert tracks == [(0, "MainThread"), (0, "in flight"), (1, "MainThread"), (1, "in flight")]
    assert made_timeline["length_s"] == pytest.approx(8.0)  # rank 1 began a second later


def test_shares_are_those_of_the_spans(made_timeline: dict[str, Any]) -> None:
    entry = next(each for each in made_timeline["shares"] if each["track"] == 2)
    assert entry["start_s"] == pytest.approx(1.0)
    rows = np.frombuffer(unpacked(entry["data"]), np.uint8).reshape(len(entry["names"]), entry["num_slots"])
    names = [made_timeline["names"][number] for number in entry["names"]]
    seconds = dict(zip(names, rows.sum(axis=1) / 255 * entry["slot_s"], strict=True))
    assert seconds == pytest.approx({"compute": 3.0, "wait": 1.0, "evaluate": 0.75}, rel=0.01)
    assert np.flatnonzero(rows.sum(axis=0))[0] * entry["slot_s"] == pytest.approx(2.0, abs=entry["slot_s"])


def test_spans_of_close_ups(made_timeline: dict[str, Any]) -> None:
    closeup = made_timeline["closeups"][0]
    assert (closeup["epoch"], closeup["num_left_out"]) == (1, 0)
    found = columns(closeup)
    names = [made_timeline["names"][number] for number in found["name"]]
    at = closeup["start_s"] + found["start"] * closeup["unit_s"]
    long = found["length"] * closeup["unit_s"]
    computed = [(t, s, k) for name, t, s, k in zip(names, at, long, found["step"]) if name == "compute"]
    expected = [(2.0 + 0.2 * k, 0.2, k) for k in range(4)] + [(3.0 + 0.2 * k, 0.2, k) for k in range(4)]
    for one, other in zip(computed, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-6)
    told = {closeup["facts"][number] for number, name in zip(found["fact"], names) if name == "communicate"}
    assert sorted(json.loads(text)["bytes"] for text in told) == [100, 200]


def test_bounds_are_kept_and_told(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["polyhop.report.sections.timeline"]  # the package has the function of that name
    monkeypatch.setattr(module, "_MOST_SPANS", 40)
    monkeypatch.setattr(module, "_MOST_SHARES", 4000)
    tallies = read(make_run(num_steps=20))
    found = timeline(tallies, clock_of(tallies))
    assert found is not None
    assert sum(closeup["num_spans"] for closeup in found["closeups"]) <= 40
    assert all(closeup["num_left_out"] > 0 for closeup in found["closeups"])
    assert sum(len(unpacked(entry["data"])) for entry in found["shares"]) <= 4000


def test_without_spans_there_is_none(tmp_path: Path, made: SimpleNamespace) -> None:
    made.write(tmp_path / "trace-rank0.jsonl", [made.start()])
    tally = RankTally(tmp_path / "trace-rank0.jsonl", 0)
    tally.read()
    assert timeline([tally], clock_of([tally])) is None
