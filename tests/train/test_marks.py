"""What ranks note at the end of an epoch: bytes of training and of evaluation, memory, the epoch; nothing without a file."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polyhop.comm import Cost
from polyhop.trace import Trace
from polyhop.train.marks import EpochMarks, memory, sent_by

CPU = torch.device("cpu")


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()][1:]


def test_an_epoch_comes_after_its_counters(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "t.jsonl")
    sent = {"hidden": 0}
    marks = EpochMarks(trace, lambda: dict(sent), CPU)
    marks.epoch(0)
    sent["hidden"] = 10
    with marks.evaluation():
        sent |= {"hidden": 14, "scores": 3, "widths": 5}
    marks.epoch(1)
    trace.close()
    found = records(tmp_path / "t.jsonl")
    assert [record["name"] for record in found] == ["memory", "epoch", "traffic", "evaluation", "epoch"]
    assert (found[2]["hidden"], found[2]["scores"], found[2]["epoch"]) == (14, 3, 1)
    assert found[3]["hidden"] == 4
    assert "widths" not in found[3]  # chosen beside evaluation
    assert found[4]["epoch"] == 1


def test_nothing_is_asked_where_nothing_is_written() -> None:
    def asked() -> dict[str, float]:
        raise AssertionError("nobody reads it")

    marks = EpochMarks(Trace(), asked, CPU)
    marks.epoch(1)
    with marks.evaluation():
        pass


def test_the_first_epoch_is_in_the_file_at_once(tmp_path: Path) -> None:
    """Whoever watches a run sees it begin."""
    trace = Trace(tmp_path / "t.jsonl")
    EpochMarks(trace, dict, CPU).epoch(0)
    assert records(tmp_path / "t.jsonl")[-1]["name"] == "epoch"
    trace.close()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell")
def test_memory_grows_with_what_is_held() -> None:
    before = memory(CPU)
    held = bytearray(b"x" * 60_000_000)
    after = memory(CPU)
    assert after["resident"] - before["resident"] > 40_000_000
    assert after["peak"] >= after["resident"] - 1_000_000
    del held


def test_what_is_sent_beside_the_line_is_counted_too() -> None:
    line: Any = SimpleNamespace(traffic=SimpleNamespace(now=lambda: Cost({"hidden": 5, "gradients": 1})))
    step: Any = SimpleNamespace(counted=lambda: Cost({"hidden": 2, "tasks": 7}))
    assert sent_by(step, line) == {"hidden": 7, "gradients": 1, "tasks": 7}
    assert sent_by(SimpleNamespace(), None) == {}  # type: ignore[arg-type]
