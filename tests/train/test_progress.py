"""Each way of showing progress says what happened, where it should."""

from __future__ import annotations

import json
import math
import sys

import pytest

from polyhop.errors import ConfigError
from polyhop.train import progress
from polyhop.train.progress import build_progress

FACTS = {"data": "cora  2,708 nodes", "machine": "2 cores", "run": "runs/[a]"}
RESULT = {
    "metric": "accuracy",
    "best_val": 0.8,
    "test": 0.75,
    "best_epoch": 2,
    "epochs": 3,
    "seconds": 1.0,
    "is_early_stopped": True,
}


def play(kind: str) -> None:
    shown = build_progress(kind)
    shown.start(FACTS, 3)
    for epoch in (1, 2, 3):
        shown.step(epoch, 1, 5)
        shown.epoch(
            {
                "epoch": epoch,
                "step": epoch,
                "loss": 0.5 / epoch,
                "val": 0.8 if epoch > 1 else math.nan,
                "test": 0.75,
            }
        )
    shown.note("a word")
    shown.finish(RESULT)
    shown.close()


def test_none_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    play("none")
    assert capsys.readouterr() == ("", "")


def test_plain_lines_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    play("plain")
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert lines[:3] == ["data      cora  2,708 nodes", "machine   2 cores", "run       runs/[a]"]
    assert "epoch 1/3  loss 0.5000" in lines[3]
    assert lines[-2] == "epoch 3/3  loss 0.1667  val 0.8000  test 0.7500"  # the last epoch is always there
    assert (
        lines[-1]
        == "result    accuracy  val 0.8000  test 0.7500 at epoch 2  (3 epochs, 1.0 s, stopped early)"
    )
    assert "epoch 2/3" not in err  # fast epochs are thinned out


def test_long_epochs_show_their_steps(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    shown = build_progress("plain")
    shown.start({}, 2)
    shown.epoch({"epoch": 1, "loss": 1.0})
    for step in range(1, 31):
        now[0] += 1
        shown.step(2, step, 30)
    assert [line for line in capsys.readouterr().err.splitlines() if "step" in line] == [
        "epoch 2/2  step 10/30",
        "epoch 2/2  step 20/30",
        "epoch 2/2  step 30/30",
    ]


def test_json_lines_go_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    play("json")
    out, err = capsys.readouterr()
    records = [json.loads(line, parse_constant=pytest.fail) for line in out.splitlines()]
    assert err == ""
    assert [record["event"] for record in records] == ["start", "epoch", "epoch", "epoch", "note", "result"]
    assert records[0]["data"] == FACTS["data"]
    assert records[1]["val"] is None
    assert records[-1]["test"] == 0.75


def test_rich_shows_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    play("rich")
    err = capsys.readouterr().err
    assert "cora" in err
    assert "runs/[a]" in err
    assert "test 0.7500" in err


def test_auto_is_plain_without_a_terminal_and_rich_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    assert type(build_progress("auto")).__name__ == "_Plain"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert type(build_progress("auto")).__name__ == "_Rich"
    with pytest.raises(ConfigError, match="Did you mean 'plain'"):
        build_progress("plane")
