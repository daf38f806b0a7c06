"""``polyhop train --stages``: the scores of one process; what does not fit is told before ranks start."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

DEEP = ["--model", "gcnii", "--layers", "4", "--precision", "64-true"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--workers", "4", "--stages", "3"],
            "stages=3 with 4 ranks: .*expected one of 1, 2, 4: give another",
        ),
        (["--workers", "4", "--stages", "0"], "stages"),
        (["--workers", "4", "--stages", "2", "--chunks", "1"], r"chunks=1 for 2 ways of a stage"),
        (["--workers", "4", "--stages", "2", "--strategy", "halo"], "stages=2 with strategy 'halo'"),
    ],
)
def test_what_does_not_fit(polyhop, small: list[str], more: list[str], message: str) -> None:
    shown = polyhop("train", *small, *DEEP, "--run-dir", "run", "--strategy", "pipeline", *more)
    assert shown.code in (1, 2)
    assert "Traceback" not in shown.err
    text = re.sub(r"[\s│]+", " ", re.sub(r"\x1b\[[0-9;]*m", "", shown.err))
    assert re.search(message, text), shown.err
    assert not Path("run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("more", [["--chunks", "2"], ["--exact-layers"]], ids=str)
def test_scores_of_one_process(polyhop, small: list[str], more: list[str]) -> None:
    alone = polyhop("train", *small, *DEEP, "--run-dir", "alone", "--json")
    given = ["--strategy", "pipeline", "--workers", 4, "--stages", 2, *more]
    shown = polyhop("train", *small, *DEEP, "--run-dir", "run", *given, "--json")
    assert (alone.code, shown.code) == (0, 0), shown.err
    for name in ("epochs", "test", "best_val", "best_epoch"):
        assert shown.json[name] == pytest.approx(alone.json[name], abs=1e-9), name
    assert json.loads(Path("run/config.json").read_text())["stages"] == 2
