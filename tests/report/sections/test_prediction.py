"""What a plan predicted stands beside what was measured; a plan may say as little as it likes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polyhop.report.run import RunReader
from polyhop.report.sections.prediction import prediction

CHOSEN = {
    "name": "halo, exact",
    "strategy": "halo",
    "epoch_s": 1.7,
    "parts": {"compute": 1.2, "wait": 0.1},
    "evaluate_s": 0.15,
    "memory_bytes": {"training": 505.0, "evaluation": 2020.0},
    "bytes": {"hidden": 100.0, "gradients": 10.0},
    "dollars": None,
}


def test_every_measure_has_its_counterpart(make_run: Any) -> None:
    run = make_run()
    plan = {
        "version": 1,
        "chosen": CHOSEN,
        "others": [CHOSEN],
        "why": ["fewest bytes"],
        "assumed": [["links", "alike"]],
    }
    (run / "plan.json").write_text(json.dumps(plan))
    found = RunReader(run).document()["prediction"]
    rows = {row["what"]: (row["predicted"], row["measured"], row["ratio"]) for row in found["rows"]}
    assert rows["epoch, training alone"] == pytest.approx((1.7, 0.85, 0.5))
    assert rows["of it: compute"] == pytest.approx((1.2, 0.6, 0.5))
    assert rows["of it: wait"] == pytest.approx((0.1, 0.2, 2.0))
    assert rows["evaluation"] == pytest.approx((0.15, 0.15, 1.0))
    assert rows["memory, at most"] == pytest.approx((2020.0, 1010.0, 0.5))
    assert rows["sent by the busiest rank: hidden"] == pytest.approx((100.0, 200.0, 2.0))
    assert rows["sent by the busiest rank: gradients"] == pytest.approx((10.0, 10.0, 1.0))
    assert (found["name"], found["why"]) == ("halo, exact", ["fewest bytes"])
    assert found["ranked"][0]["epoch_s"] == 1.7
    assert found["assumed"] == [["links", "alike"]]


@pytest.mark.parametrize(
    ("given", "told"),
    [(None, None), ("too slow", "too slow"), ([], None), (["too slow", "too large"], "too slow; too large")],
)
def test_why_another_way_was_not_chosen(given: Any, told: str | None) -> None:
    found = prediction({"chosen": {}, "others": [{"name": "data", "why_not": given}]}, {})
    assert found is not None
    assert found["ranked"][1]["why_not"] == told


@pytest.mark.parametrize("plan", [None, {}, {"chosen": None}, {"chosen": "halo"}])
def test_no_plan_no_section(plan: Any) -> None:
    assert prediction(plan, {}) is None


@pytest.mark.parametrize(
    "chosen",
    [{}, {"epoch_s": "long", "parts": [1], "memory_bytes": None, "bytes": 5}, {"epoch_s": 0, "dollars": 0.1}],
    ids=["empty", "odd", "zero"],
)
def test_a_plan_that_says_little(chosen: dict[str, Any]) -> None:
    found = prediction({"chosen": chosen, "why": "because", "others": [3], "assumed": {"a": 1}}, {})
    assert found is not None
    assert all(row["ratio"] is None for row in found["rows"])
    assert (found["why"], found["ranked"], found["assumed"]) == ([], [], [])


def test_dollars_of_an_epoch() -> None:
    measured = {"functions": {"bill": {"dollars": 1.0}}, "lengths": {"count": 4, "train_s": 1.0}}
    found = prediction({"chosen": {"dollars": 0.5}}, measured)
    assert found is not None
    assert found["rows"][-1]["ratio"] == 0.5
