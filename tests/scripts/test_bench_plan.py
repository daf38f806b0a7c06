"""Bench ``plan``: what ranks tell of plans and epochs becomes figures; choices are judged against what was measured."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.plan import ways  # noqa: E402
from benchmarks.plan.cases import CASES, Case  # noqa: E402
from benchmarks.plan.grid import _others, _phase, _wanted, figures  # noqa: E402

from polyhop.plan import Limits, Memory, Prediction, make_plan  # noqa: E402

FULL = next(case for case in CASES if case.fan_outs is None)


def way(name: str, seconds: float, sent: float, **more: Any) -> Prediction:
    return Prediction(
        name.partition(",")[0],
        {},
        name,
        True,
        seconds,
        {"compute": seconds},
        Memory(1e9, 5e8),
        {"hidden": sent},
        **more,
    )


def told(case: Case, epochs: dict[str, list[tuple[float, float]]], *, slower: float = 1.0) -> dict[str, Any]:
    plan = make_plan([way("halo", 2.0, 1e6), way("pipeline", 1.0, 3e6, foreseen_s=1.5)], Limits(), 2)
    turns = {
        name: [{"s": slower * seconds, "bytes": {"hidden": sent}} for seconds, sent in found]
        for name, found in epochs.items()
    }
    return {"mbit": 300.0, "plan": plan.to_json(), "epochs": turns}


def test_a_phase_of_ranks_is_the_slowest_rank_and_the_busiest() -> None:
    epochs = {"halo": [(2.0, 1e6), (4.0, 1e6), (3.0, 1e6)], "pipeline": [(1.0, 2e6)] * 3}
    found = {
        each.name: each for each in _phase(FULL, [told(FULL, epochs), told(FULL, epochs, slower=1.1)], 0.5)
    }
    assert found["halo"].measured_s == pytest.approx(3.3)
    assert found["pipeline"].foreseen_s == 1.5, "as foreseen, before past runs corrected it"
    assert (found["halo"].foreseen_bytes, found["pipeline"].measured_bytes) == (1e6, 2e6)
    assert found["halo"].memory_bytes == 1e9
    assert found["halo"].group == (FULL.name, 2, 300.0)


def test_a_choice_is_judged_by_what_was_measured(tmp_path: Path) -> None:
    epochs = {"halo": [(2.0, 1e6)] * 3, "pipeline": [(3.0, 3e6)] * 3}
    found = list(_phase(FULL, [told(FULL, epochs)] * 2, 0.5))
    named = {each.name: each for each in figures(found)}
    assert named["choice_regret"].value == pytest.approx(1.5), "pipeline was foreseen to be faster"
    assert not named["choice_regret"].is_met
    right = [replace(each, measured_s=each.foreseen_s) for each in found]
    named = {each.name: each for each in figures(right)}
    assert named["choice_regret"].value == 1.0
    assert named["time_error"].value == 0.0
    assert named["choice_regret"].is_met
    ways.write(found, tmp_path / "ways.csv")
    bytes_of = named["bytes_error_full"]
    assert bytes_of.value == 0.0
    assert list(ways.read(tmp_path / "ways.csv")) == found


def test_some_cases_can_be_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    every = _wanted(is_quick=False)
    assert len(every) == 24
    monkeypatch.setenv("POLYHOP_GRID", "full/4")
    some = _wanted(is_quick=False)
    assert {ranks for _, ranks in some} == {4}
    assert [case for case, _ in some] == [
        case for case, ranks in every if ranks == 4 and case.fan_outs is None
    ]
    kept = ways.read()
    again = [each for each in kept if each.num_ranks == 4 and each.case.endswith("full")]
    assert len(_others(again)) + len(again) == len(kept)
    monkeypatch.setenv("POLYHOP_GRID", "nothing")
    with pytest.raises(ValueError, match="no case of"):
        _wanted(is_quick=False)
    monkeypatch.delenv("POLYHOP_GRID")
    assert _others(again) == []
