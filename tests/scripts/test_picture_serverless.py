"""The picture of an epoch with functions takes leases, results and graph work of that epoch alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.serverless import picture  # noqa: E402


def lease(number: int, at: float, **given: Any) -> dict[str, Any]:
    told = {"function": "server0-0", "interval": 3, "place": 0, "backward": False, "epoch": 1, **given}
    return {"kind": "instant", "name": "lease", "at": at, "lease": number, **told}


def result(number: int, at: float, busy_ms: float) -> dict[str, Any]:
    return {
        "kind": "instant",
        "name": "result",
        "at": at,
        "lease": number,
        "busy_ms": busy_ms,
        "verdict": "ok",
    }


RECORDS = [
    {"kind": "start", "rank": 0, "origin": 5.0},
    lease(1, 0.5, epoch=0),
    result(1, 0.9, 100),
    lease(2, 1.0),
    result(2, 1.5, 200),
    {
        "kind": "span",
        "name": "graph",
        "at": 1.5,
        "seconds": 0.25,
        "interval": 3,
        "place": 1,
        "backward": False,
        "epoch": 1,
    },
    lease(3, 1.75, place=2, function="server0-1"),
    result(3, 2.0, 50),
    lease(4, 2.0, backward=True),
    result(4, 2.5, 300),
]


def written(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, RECORDS)))
    return path


def test_lanes_are_of_one_epoch(tmp_path: Path) -> None:
    row = picture.lanes_of(written(tmp_path), 1, "pipe")
    server, first, second = row.lanes
    assert (server.name, first.name, second.name) == ("server", "function 0", "function 1")
    assert server.bars == (picture.Bar(0.5, 0.25, picture.GA, 3),)
    assert [(bar.start, bar.seconds, bar.kind) for bar in first.bars] == [
        (pytest.approx(0.3), 0.2, picture.AV),
        (pytest.approx(1.2), 0.3, picture.BACK_AV),
    ]
    assert first.leases == ((0.0, 0.5), (1.0, 0.5))
    assert [bar.kind for bar in second.bars] == [picture.TURN]
    assert row.seconds == pytest.approx(1.5)
    with pytest.raises(SystemExit, match="no epoch 7"):
        picture.lanes_of(written(tmp_path), 7)


def test_it_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = picture.lanes_of(written(tmp_path), 1, "pipe")
    picture.draw([row, row], tmp_path / "out.svg")
    assert "<svg" in (tmp_path / "out.svg").read_text()[:1000]
