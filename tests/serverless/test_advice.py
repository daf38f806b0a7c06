"""Plans: the number of functions of most value, and plain words when none pays."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from polyhop.errors import ConfigError
from polyhop.serverless.advice import Plan, make_plan, says, server_bytes
from polyhop.serverless.cluster import Cluster, epoch, tasks_of
from polyhop.serverless.prices import Prices, load_prices
from polyhop.serverless.rates import PUBLISHED, Rates
from polyhop.serverless.shapes import PAPER

PRICES = load_prices()
CLUSTER = Cluster(PRICES.server("c5n.2xlarge"), 8)
V100 = PRICES.server("p3.2xlarge")
# Functions that are fast and well connected, and servers that are slow at tensor work: what makes functions pay.
KIND = replace(PUBLISHED, function_flops={192: 4e9}, function_bytes=1e9, server_bytes=2e10, server_flops=1e9)
WIDE = replace(CLUSTER, server=replace(CLUSTER.server, network_gbit_s=400))


def amazon(
    rates: Rates = PUBLISHED, cluster: Cluster = CLUSTER, prices: Prices = PRICES, **given: object
) -> Plan:
    return make_plan(PAPER["amazon"], cluster, rates, prices, **given)  # type: ignore[arg-type]


def test_best_has_the_most_value() -> None:
    plan = amazon()
    assert len(plan.choices) == 1000 // 8
    assert plan.best.outcome.value == max(choice.outcome.value for choice in plan.choices)
    at = plan.best.num_functions
    assert plan.best is plan.choices[at - 1]
    assert plan.best in plan.around()


def test_climbing_finds_it_too() -> None:
    """Value has one hill here: steps from Little's number, while it grows, end at the same place."""
    plan = amazon(KIND, WIDE)
    assert plan.little is not None
    at = plan.little - 1
    while at + 1 < len(plan.choices) and plan.choices[at + 1].outcome.value > plan.choices[at].outcome.value:
        at += 1
    while at > 0 and plan.choices[at - 1].outcome.value > plan.choices[at].outcome.value:
        at -= 1
    assert plan.choices[at].outcome.value == pytest.approx(plan.best.outcome.value, rel=0.02)


def test_every_choice_is_the_formula() -> None:
    plan = amazon()
    choice = plan.choices[9]
    tasks = tasks_of(PAPER["amazon"], choice.cluster, PUBLISHED)
    assert choice.epoch == epoch(tasks, choice.cluster, PUBLISHED, 10)
    assert choice.cluster.num_intervals >= 3 * 10


def test_says_when_functions_do_not_pay() -> None:
    plan = amazon(gpu=V100)
    assert not plan.pays
    told = says(plan)
    assert "Functions do not pay here" in told
    assert "CPU only on the same 8 c5n.2xlarge" in told
    assert "below 52 %" in told


def test_says_when_functions_pay() -> None:
    plan = amazon(KIND, WIDE)
    assert plan.pays
    assert plan.best.outcome.value > plan.cpu.outcome.value
    assert "Functions pay: 8 c5n.2xlarge with" in says(plan)
    assert "do not pay" not in says(plan)


def test_says_what_share_is_too_much() -> None:
    """A graph of few edges is nearly all tensor work."""
    plan = make_plan(replace(PAPER["amazon"], num_edges=10**7), CLUSTER, PUBLISHED, PRICES)
    assert plan.tensor_share > plan.break_even
    assert "so they should not pay" in says(plan)


def test_says_that_a_gpu_is_better() -> None:
    plan = make_plan(PAPER["reddit-small"], replace(CLUSTER, num_servers=2), PUBLISHED, PRICES, gpu=V100)
    assert "2 p3.2xlarge" in says(plan)
    assert plan.gpu is not None
    assert plan.gpu.outcome.value > plan.cpu.outcome.value


def test_says_that_the_link_is_full() -> None:
    assert "more functions do not help" in says(
        amazon(replace(PUBLISHED, server_bytes=1e8, function_flops={192: 1e12}))
    )
    assert "more functions do not help" not in says(amazon(KIND, WIDE))


def test_says_that_servers_wait_for_each_other() -> None:
    assert "a better cut would help" in says(amazon(replace(PUBLISHED, scatter_bytes=1e7)))
    assert "a better cut would help" not in says(amazon(replace(PUBLISHED, scatter_bytes=1e7), ghosts=0.0))


def test_as_many_servers_as_are_as_fast() -> None:
    plan = amazon(KIND, WIDE)
    assert plan.equal is not None
    assert plan.equal.outcome.seconds <= plan.best.outcome.seconds
    assert plan.equal.cluster.num_servers > 8
    assert plan.equal.num_functions == 0


def test_deadline_and_budget() -> None:
    plan = amazon()
    fastest = min(choice.outcome.seconds for choice in plan.choices)
    hurried = amazon(deadline_s=1.02 * fastest)
    assert hurried.best.outcome.seconds <= 1.02 * fastest
    assert all(
        choice.outcome.dollars >= hurried.best.outcome.dollars
        for choice in plan.choices
        if choice.outcome.seconds <= 1.02 * fastest
    )
    cheap = 1.1 * min(choice.outcome.dollars for choice in plan.choices)
    frugal = amazon(budget=cheap)
    assert frugal.best.outcome.dollars <= cheap
    assert all(
        choice.outcome.seconds >= frugal.best.outcome.seconds
        for choice in plan.choices
        if choice.outcome.dollars <= cheap
    )
    with pytest.raises(ConfigError, match=r"within 0\.1 s and"):
        amazon(deadline_s=0.1, budget=1.0)


def test_intervals_fit_into_functions() -> None:
    wide = replace(PAPER["reddit-small"], widths=(60_000, 128, 41), num_nodes=10**6)
    small = make_plan(wide, CLUSTER, PUBLISHED, PRICES)
    large = make_plan(wide, replace(CLUSTER, memory_mb=10240), PUBLISHED, PRICES)
    assert small.choices[0].cluster.num_intervals > large.choices[0].cluster.num_intervals
    rows = 10**6 / 8 / small.choices[0].cluster.num_intervals
    assert 4 * 60_000 * rows < 192 * 2**20
    assert amazon(num_intervals=77).best.cluster.num_intervals == 77


def test_staleness_is_not_held_against_cpu_only() -> None:
    assert amazon(mode=1).cpu.outcome.seconds <= amazon().cpu.outcome.seconds


def test_json() -> None:
    plan = amazon(gpu=V100)
    told = json.loads(json.dumps(plan.to_json()))
    assert told["functions"]["num_functions"] == plan.best.num_functions
    assert told["pays"] is False
    assert told["cpu"]["dollars"] == pytest.approx(8 * 0.432 / 3600 * told["cpu"]["seconds"])
    assert amazon().to_json()["gpu"] is None


def test_memory_of_a_server() -> None:
    held = server_bytes(PAPER["amazon"], CLUSTER, 0.0)
    assert held == pytest.approx(4 * 9.2e6 / 8 * (300 + 2 * 89) + 16 * 313.9e6 / 8)


def test_refused() -> None:
    with pytest.raises(ConfigError, match="no server would have one"):
        amazon(cluster=replace(CLUSTER, num_servers=1001))
    with pytest.raises(ConfigError, match="64 MB"):
        amazon(cluster=replace(CLUSTER, memory_mb=64))
