"""``polyhop train --split-groups``: the scores of one process; what does not fit is told before ranks start."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FAN_OUTS = ["--fanout", "4,3", "--batch-size", "16", "--precision", "64-true"]


@pytest.fixture
def grouped(small: list[str]) -> list[str]:
    return ["train", *small, *FAN_OUTS, "--run-dir", "run", "--strategy", "split"]


@pytest.fixture
def parts(polyhop: Callable[..., Any], tiny_dir: Path) -> Path:
    """A folder of four parts of ``tiny``, in the working directory."""
    given = ["--data-dir", tiny_dir, "--parts", 4, "--method", "hash", "--out", "parts"]
    assert polyhop("partition", "tiny", *given).code == 0
    return Path("parts")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--workers", "4", "--split-groups", "3"],
            r"split_groups=3 with 4 ranks: .*\(1, 2, 4\): give another",
        ),
        (["--workers", "2", "--split-groups", "4"], "split_groups=4 with 2 ranks"),
        (["--workers", "2", "--split-groups", "0"], "--split-groups"),
        (
            ["--workers", "4", "--split-groups", "2", "--strategy", "data"],
            "split_groups=2 with strategy 'data'",
        ),
        (
            ["--workers", "6", "--split-groups", "2", "--parts", "parts"],
            "parts has 4 parts, which 3 ranks of each of 2 groups cannot share evenly: use a number of ranks per group that "
            "divides 4, or partition again with --parts 3",
        ),
        (["--split-groups", "2"], "runs on ranks: give --workers N"),
    ],
)
def test_what_does_not_fit(polyhop, grouped: list[str], parts: Path, more: list[str], message: str) -> None:
    shown = polyhop(*grouped, *more)
    assert shown.code in (1, 2)
    assert "Traceback" not in shown.err
    text = re.sub(r"[\s│]+", " ", re.sub(r"\x1b\[[0-9;]*m", "", shown.err))
    assert re.search(message, text), shown.err
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("workers", "more"),
    [
        (2, []),
        pytest.param(4, [], marks=pytest.mark.slow),
        pytest.param(4, ["--parts", "parts"], marks=pytest.mark.slow),  # two to a rank
        pytest.param(4, ["--parts", "made"], marks=pytest.mark.slow),
    ],
)
def test_scores_of_one_process(
    polyhop, small: list[str], grouped: list[str], parts: Path, workers: int, more: list[str]
) -> None:
    alone = polyhop("train", *small, *FAN_OUTS, "--run-dir", "alone", "--json")
    shown = polyhop(*grouped, "--workers", workers, "--split-groups", 2, *more, "--json")
    assert (alone.code, shown.code) == (0, 0), shown.err
    for name in ("epochs", "test", "best_val", "best_epoch"):
        assert shown.json[name] == pytest.approx(alone.json[name], abs=1e-10), name
    for mine, theirs in zip(lines("run"), lines("alone"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-10)
        assert mine["val_loss"] == pytest.approx(theirs["val_loss"], abs=1e-10)
    assert json.loads(Path("run/config.json").read_text())["split_groups"] == 2
    assert sorted(path.name for path in Path("run").glob("trace-*")) == [
        f"trace-rank{rank}.jsonl" for rank in range(workers)
    ]
    if "made" in more:
        assert len(json.loads(Path("made/manifest.json").read_text())["parts"]) == workers // 2


def lines(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_goes_on_in_other_groups(polyhop, small: list[str], grouped: list[str]) -> None:
    """Groups decide who computes, not what: a checkpoint of two ranks in two groups continues on two that split all."""
    whole = polyhop("train", *small, *FAN_OUTS, "--run-dir", "alone", "--epochs", 6, "--json")
    first = polyhop(*grouped, "--workers", 2, "--split-groups", 2)
    second = polyhop(*grouped, "--workers", 2, "--epochs", 6, "--resume", "auto", "--json")
    assert (whole.code, first.code, second.code) == (0, 0, 0), first.err + second.err
    assert second.json["best_val"] == pytest.approx(whole.json["best_val"], abs=1e-10)
    assert lines("run")[-1]["loss"] == pytest.approx(lines("alone")[-1]["loss"], abs=1e-10)
