"""Which prediction is taken: the fastest that keeps the limits; where none does, the nearest, with what would help."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyhop.errors import ConfigError
from polyhop.plan import (
    Limits,
    Memory,
    Plan,
    Prediction,
    Purpose,
    duration,
    make_plan,
    money,
    rank,
    read_plan,
    size,
)
from polyhop.train.config import parse_bytes


def predicted(name: str, seconds: float, **more: Any) -> Prediction:
    strategy, _, _ = name.partition(",")
    memory = Memory(more.pop("memory", 1e9), more.pop("evaluation", 5e8))
    given = {
        "options": {},
        "is_exact": True,
        "parts": {"compute": seconds},
        "memory": memory,
        "bound": "the cores are busy",
    }
    return Prediction(strategy=strategy, name=name, epoch_s=seconds, **{**given, **more})


HALO = predicted("halo", 2.0, sent={"hidden": 1e6})
BITS = predicted("halo, 8 bits", 1.0, is_exact=False, options={"bits": 8})
PIPE = predicted("pipeline", 3.0, memory=4e8, evaluation=3e8)
ALL = [PIPE, BITS, HALO]
PURPOSE = Purpose("tiny", 80, 600, "GraphSAGE", 2, 16, (15, 10), 1024)


def names(plan: Plan) -> list[str]:
    return [each.prediction.name for each in plan.ranked]


def test_the_fastest_exact_one_is_taken() -> None:
    plan = make_plan(ALL, Limits(), 4)
    assert names(plan) == ["halo", "pipeline", "halo, 8 bits"]
    assert plan.fits
    assert plan.ranked[2].why_not == ("approximate",)


def test_approximate_ones_only_where_they_are_allowed() -> None:
    assert make_plan(ALL, Limits(allows_approximate=True), 4).chosen is BITS


def test_an_exact_one_that_is_as_fast_is_preferred() -> None:
    near = predicted("split", 1.01)
    assert make_plan([BITS, near], Limits(allows_approximate=True), 4).chosen is near


def test_of_equals_the_one_that_needs_less_memory() -> None:
    lean = predicted("data", 2.01, memory=1e8, evaluation=1e8)
    assert make_plan([HALO, lean], Limits(), 4).chosen is lean


def test_memory_is_kept() -> None:
    plan = make_plan(ALL, Limits(memory_bytes=5e8), 4)
    assert plan.chosen is PIPE
    assert "needs 1.0 GB a rank, 500 MB given" in plan.ranked[1].why_not[0]


def test_evaluation_counts_as_memory_too() -> None:
    assert not make_plan(
        [predicted("halo", 1.0, memory=1.0, evaluation=2e9)], Limits(memory_bytes=1e9), 2
    ).fits


def test_nothing_fits() -> None:
    plan = make_plan(ALL, Limits(memory_bytes=1e8), 4)
    assert not plan.fits
    assert plan.chosen is PIPE, "the least over"
    assert "nothing fits: the nearest is pipeline" in plan.advice[0]
    assert any("--memory 400MB" in line for line in plan.advice)


def test_advice_is_what_can_be_done() -> None:
    """The full graph has no mini-batches to make smaller; ranks that share a host have less, the more they are."""
    whole = replace(PURPOSE, num_neighbors=None, batch_size=None)
    for purpose, has_batches in ((PURPOSE, True), (whole, False), (None, True)):
        for limits in (
            Limits(memory_bytes=1e8),
            Limits(device_bytes=1e8),
            Limits(device_bytes=1e8, shares_host=True),
        ):
            plan = make_plan(ALL, limits, 4, purpose=purpose)
            said = " ".join(plan.advice)
            assert ("--batch-size" in said) == has_batches
            assert ("fewer --workers on a host" in said) == limits.shares_host
            assert ("more ranks" in said) == (not limits.shares_host)
            assert Plan.from_json(plan.to_json()) == plan


def test_one_process_that_would_do_is_said() -> None:
    limits = Limits(seconds=100, num_epochs=100)
    fast, slow = predicted("single", 0.9), predicted("single", 1.1)
    assert (
        "leave out --workers: one process takes 900 ms an epoch"
        in make_plan([HALO], limits, 4, alone=fast).advice
    )
    assert not any("--workers" in line for line in make_plan([HALO], limits, 4, alone=slow).advice)


@pytest.mark.parametrize(
    ("asked", "ranks", "fan_outs", "told"),
    [
        ("data", 2, None, "on 2 ranks: it trains on mini-batches, give --fanout, such as 15,10; these can: halo, pipeline"),
        ("serverless", 2, (15, 10), "on 2 ranks: it trains on the full graph, leave --fanout out; these can"),
        ("split", 1, (15, 10), "on 1 rank: give --workers 2 or more; these can"),
        ("data", 2, (15, 10), "on 2 ranks; these can"),
    ],
)  # fmt: skip
def test_what_a_strategy_would_need(
    asked: str, ranks: int, fan_outs: tuple[int, ...] | None, told: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        make_plan(ALL, Limits(), ranks, asked=asked, purpose=replace(PURPOSE, num_neighbors=fan_outs))


@pytest.mark.parametrize(
    ("dollars", "shown"),
    [(0.0, "0.0000"), (12.3, "12.3000"), (0.0371, "0.0371"), (1.2345e-5, "0.0000123"), (2e-7, "0.000000200")],
)
def test_small_amounts_can_be_compared(dollars: float, shown: str) -> None:
    assert money(dollars) == shown


def test_what_would_fit_if_it_were_allowed_is_said() -> None:
    tight = [predicted("halo", 9.0), predicted("halo, 8 bits", 1.0, is_exact=False)]
    plan = make_plan(tight, Limits(seconds=200, num_epochs=100), 4)
    assert not plan.fits
    assert plan.chosen.name == "halo"
    assert any("--allow-approximate: halo, 8 bits would fit" in line for line in plan.advice)


def test_dollars_and_time_of_the_whole_run() -> None:
    dear = predicted("halo", 1.0, dollars=0.2)
    assert make_plan([dear], Limits(dollars=10, num_epochs=50), 2).fits
    assert not make_plan([dear], Limits(dollars=9.9, num_epochs=50), 2).fits
    assert not make_plan([dear], Limits(seconds=49, num_epochs=50), 2).fits
    assert any(
        "--budget 10, " in line for line in make_plan([dear], Limits(dollars=1, num_epochs=50), 2).advice
    )


@pytest.mark.parametrize("value", [0, -1, math.nan, "1", True, None])
@pytest.mark.parametrize("name", ["memory_bytes", "device_bytes", "host_bytes", "dollars", "seconds"])
def test_limits_are_numbers_above_0(name: str, value: Any) -> None:
    option = {"memory_bytes": "--memory", "dollars": "--budget", "seconds": "--deadline"}.get(name, name)
    with pytest.raises(ConfigError, match=rf"^{option}.*expected a number above 0"):
        Limits(**{name: value})


def test_a_budget_needs_prices() -> None:
    """What nobody knows the cost of does not fit one."""
    for found in ([HALO], [predicted("split", 1.0, dollars=0.1), HALO]):
        with pytest.raises(ConfigError, match="--budget needs prices"):
            make_plan(found, Limits(dollars=1e-6), 2)
        assert make_plan(found, Limits(dollars=math.inf), 2).fits


positive = st.floats(1e-9, 1e12)


@given(positive, positive, positive, st.floats(0.01, 0.999999999), st.integers(1, 1000))
def test_advice_is_enough(seconds: float, memory: float, dollars: float, share: float, epochs: int) -> None:
    """What is said to be given, pasted, lets the plan fit; it is never less than what was given."""
    way = predicted("halo", seconds, memory=1e6 + memory, evaluation=0.0, dollars=dollars)
    limits = Limits(
        memory_bytes=share * way.memory.needed,
        dollars=share * dollars * epochs,
        seconds=share * seconds * epochs,
        num_epochs=epochs,
    )
    plan = make_plan([way], limits, 2)
    told = dict(re.findall(r"--(memory|budget|deadline) ([\d.]+[GM]?B?)", "\n".join(plan.advice)))
    enough = Limits(
        memory_bytes=parse_bytes(told["memory"]),
        dollars=float(told["budget"]),
        seconds=float(told["deadline"]),
        num_epochs=epochs,
    )
    assert make_plan([way], enough, 2).fits
    assert enough.dollars > limits.dollars
    assert enough.dollars <= 1.011 * dollars * epochs, "and hardly more"
    for note in plan.ranked[0].why_not:
        needed, given = re.fullmatch(r"\w+ (.*?)(?: a rank)?, (.*) given", note).groups()  # type: ignore[union-attr]
        assert needed != given


def test_numbers_of_a_comparison_differ() -> None:
    way = predicted("halo", 25.31, memory=1.04e9, dollars=0.002049)
    plan = make_plan([way], Limits(memory_bytes=1e9, dollars=0.0205, seconds=253, num_epochs=10), 2)
    assert plan.ranked[0].why_not == (
        "needs 1.04 GB a rank, 1.00 GB given",
        "takes 253.1 s, 253.0 s given",
    )
    assert "give --memory 1.04GB" in plan.advice
    assert "give --deadline 254 for 10 epochs, or fewer epochs" in plan.advice
    low = make_plan([way], Limits(dollars=0.0204, num_epochs=10), 2)
    assert low.ranked[0].why_not == ("costs $0.0205, $0.0204 given",)
    assert "give --budget 0.0205, or fewer epochs" in low.advice


def test_a_strategy_that_was_asked_for_comes_first() -> None:
    plan = make_plan(ALL, Limits(), 4, asked="pipeline")
    assert names(plan) == ["pipeline", "halo", "halo, 8 bits"]
    with pytest.raises(ConfigError, match=r"'split' cannot train .* these can: halo, pipeline"):
        make_plan(ALL, Limits(), 4, asked="split")


def test_no_predictions() -> None:
    with pytest.raises(ConfigError, match="no strategy can train"):
        rank([], Limits())


def test_two_lines_say_why() -> None:
    plan = make_plan(ALL, Limits(), 4, alone=predicted("single", 1.5))
    assert plan.why == (
        "halo: 2.0 s an epoch expected, the cores are busy; 1.0 GB a rank, 1.0 MB sent by a rank",
        "next pipeline 3.0 s (1.5 x); one process with all cores 1.5 s",
    )
    assert plan.advice == ["one process would be faster here (1.5 s an epoch): leave out --workers"]


times = st.floats(1e-6, 1e6)


@given(st.lists(st.tuples(times, times, st.booleans()), min_size=1, max_size=12), times)
def test_the_order_for_any_predictions(drawn: list[tuple[float, float, bool]], most: float) -> None:
    found = [predicted(f"way, {at}", s, memory=m, is_exact=e) for at, (s, m, e) in enumerate(drawn)]
    order = rank(found, Limits(memory_bytes=most))
    assert {each.prediction.name for each in order} == {each.name for each in found}, "none is lost"
    fits = [each.fits for each in order]
    assert fits == sorted(fits, reverse=True), "those that fit come first"
    for each in order:
        assert each.fits == (each.prediction.is_exact and each.prediction.memory.most <= most)
    best = min((each.prediction.epoch_s for each in order if each.fits), default=math.inf)
    assert not order[0].fits or order[0].prediction.epoch_s <= 1.02 * best


def test_json_and_back(tmp_path: Path) -> None:
    plan = make_plan(
        ALL, Limits(memory_bytes=5e8), 4, assumed=[("host", "mine")], alone=HALO, purpose=PURPOSE
    )
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan.to_json()))
    again = read_plan(path)
    assert again == plan
    assert again.why == plan.why


@pytest.mark.parametrize(
    "text", ["", "[]", "3", "null", "{}", '{"version": 99}', '{"version": 3, "chosen": 3}']
)
def test_files_that_are_no_plan(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"plan\.json"):
        read_plan(path)
    with pytest.raises(ConfigError, match="none"):
        read_plan(tmp_path / "none")


@pytest.mark.parametrize(
    "damage",
    [
        {"limits": []},
        {"limits": {"speed": 1}},
        {"limits": {"dollars": -1}},
        {"others": 3},
        {"chosen": None},
        {"chosen": []},
        {"workers": "four"},
        {"workers": 0},
        {"assumed": [1]},
        {"purpose": {}},
        {"purpose": 3},
        {"partitioner": 5},
        *({"purpose": PURPOSE.to_json() | {name: value}} for name in ("graph", "model", "num_nodes", "num_layers")
          for value in (["x"], None, 2.5)),
        {"alone": []},
        *({"chosen": {name: value}} for name in ("epoch_s", "options", "memory_bytes", "dollars", "bytes")
          for value in ("much", [1])),
    ],
    ids=str,
)  # fmt: skip
def test_damaged_plans(tmp_path: Path, damage: dict[str, Any]) -> None:
    whole = make_plan(ALL, Limits(seconds=1e9), 4, alone=HALO, purpose=PURPOSE).to_json()
    for name, value in damage.items():
        whole[name] = {**whole[name], **value} if name == "chosen" and isinstance(value, dict) else value
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(whole))
    with pytest.raises(ConfigError, match=r"plan\.json: not a plan of 'polyhop plan --out'"):
        read_plan(path)


def test_what_is_chosen_is_written_once() -> None:
    whole = make_plan(ALL, Limits(), 4).to_json()
    assert not {"strategy", "options", "ranked"} & whole.keys()
    names = [each["name"] for each in (whole["chosen"], *whole["others"])]
    assert names == ["halo", "pipeline", "halo, 8 bits"]


def test_words_for_sizes_and_times() -> None:
    assert [size(n) for n in (5, 1500, 2e6, 3.25e9, 4e12)] == ["5 B", "1.5 kB", "2.0 MB", "3.2 GB", "4.0 TB"]
    assert [duration(s) for s in (0.0123, 1.5, 42, 300, 7500)] == [
        "12.3 ms",
        "1.5 s",
        "42 s",
        "5.0 min",
        "2 h 5 min",
    ]
