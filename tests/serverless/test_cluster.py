"""The formulas: ceilings, limits, and the published breakdown of an epoch."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhop.errors import ConfigError, InputError
from polyhop.serverless.cluster import (
    Cluster,
    Task,
    bandwidth,
    epoch,
    gpu_epoch,
    link_bytes,
    little,
    outcome,
    rate_ceiling,
    service_s,
    task_rate,
    tasks_of,
)
from polyhop.serverless.prices import load_prices
from polyhop.serverless.rates import PUBLISHED, Rates
from polyhop.serverless.shapes import PAPER

PRICES = load_prices()
AMAZON = Cluster(PRICES.server("c5n.2xlarge"), 8, 192, 90)
TASKS = tasks_of(PAPER["amazon"], AMAZON, PUBLISHED)
FREE = Rates(1e9, 1e9, {192: 1e9}, inf, inf, inf)  # links take no time


def graph(seconds: float) -> Task:
    return Task("A", False, seconds)


def tensor(**given: float) -> Task:
    return Task("D", True, **{"core_s": 0.0, **given})


def test_bandwidth_is_shared_past_the_link() -> None:
    rates = replace(PUBLISHED, function_bytes=1e8, server_bytes=2.5e9)
    assert [bandwidth(n, AMAZON, rates) for n in (1, 25, 50, 100)] == [1e8, 1e8, 5e7, 2.5e7]


def test_link_is_the_slowest_of_three() -> None:
    assert link_bytes(AMAZON, replace(PUBLISHED, server_bytes=1e12)) == 25e9 / 8
    assert link_bytes(AMAZON, replace(PUBLISHED, lease_bytes=1e6)) == 1e6


def test_service_by_hand() -> None:
    rates = Rates(1e9, 1e9, {192: 100.0}, 10.0, inf, inf, latency_s=0.5)
    task = tensor(flops=300.0, in_bytes=20.0, out_bytes=40.0)
    assert service_s(task, 1, AMAZON, rates) == 0.5 + 3 + 4
    assert service_s(task, 1, AMAZON, rates, streams=False) == 0.5 + 2 + 3 + 4


def test_weights_come_once_an_epoch() -> None:
    rates = Rates(1e9, 1e9, {192: inf}, 10.0, inf, inf)
    task = tensor(weight_bytes=900.0)
    assert service_s(task, 30, AMAZON, rates) == pytest.approx(30.0)
    assert service_s(task, 900, AMAZON, rates) == pytest.approx(90.0)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 2000), st.floats(1e6, 1e10), st.floats(1e6, 1e10), st.floats(1e6, 1e10), st.floats(0, 0.1),
    st.booleans(),
)  # fmt: skip
def test_no_number_of_functions_passes_the_ceiling(
    n: int, each: float, total: float, flops: float, latency: float, streams: bool
) -> None:
    cluster = replace(AMAZON, num_intervals=3000)
    rates = replace(
        PUBLISHED, function_bytes=each, server_bytes=total, function_flops={192: flops}, latency_s=latency
    )
    tasks = tasks_of(PAPER["amazon"], cluster, rates)
    assert task_rate(tasks, n, cluster, rates, streams=streams) <= (1 + 1e-9) * rate_ceiling(
        tasks, cluster, rates
    )


def test_more_functions_do_not_help_past_the_ceiling() -> None:
    """With nothing but bytes to wait for, the epoch stops getting shorter at the number that fills the link."""
    rates = replace(PUBLISHED, function_bytes=1e8, server_bytes=1e9, function_flops={192: inf}, latency_s=0.0)
    cluster = replace(AMAZON, num_intervals=2000)
    tasks = [replace(task, weight_bytes=0.0) for task in tasks_of(PAPER["amazon"], cluster, rates)]
    work = [epoch(tasks, cluster, rates, n).tensor_s for n in (5, 10, 20, 100, 1000)]
    assert work[0] == pytest.approx(2 * work[1])
    assert work[1:] == pytest.approx([work[1]] * 4)
    assert work[1] == pytest.approx(2000 * 3 / rate_ceiling(tasks, cluster, rates))


def test_leases_are_a_ceiling_too() -> None:
    rates = replace(FREE, leases=10.0)
    assert task_rate(TASKS, 1000, AMAZON, rates) == 10.0
    assert epoch(TASKS, AMAZON, rates, 1000).tensor_s == pytest.approx(3 * 90 / 10)


@pytest.mark.parametrize("mode", ["none", "pipe", 0, 1])
def test_one_of_everything_is_the_sum(mode: str | int) -> None:
    server = replace(PRICES.server("c5.xlarge"), vcpus=1)
    alone = Cluster(server, 1, 192, 1)
    tasks = [graph(2.0), tensor(flops=3e9, scatter_s=0.5), graph(1.0), tensor(flops=4e9)]
    assert epoch(tasks, alone, FREE, 1, mode="pipe").seconds == pytest.approx(10.5)
    assert epoch(tasks, alone, FREE, 1, mode=mode).seconds <= 10.5 + 1e-9


def test_modes() -> None:
    """Two layers, one bound by cores, one by functions: barriers add both, staleness hides one behind the other."""
    cluster = replace(AMAZON, num_intervals=800)
    tasks = [graph(1.0), tensor(flops=1e8), graph(0.1), tensor(flops=1e9)]
    found = {mode: epoch(tasks, cluster, FREE, 8, mode=mode).seconds for mode in ("none", "pipe", 0)}
    assert found["none"] == pytest.approx(100 + 10 + 10 + 100)
    assert found["pipe"] == pytest.approx(100 + 100, rel=0.01)
    assert found[0] == pytest.approx(110, rel=0.02)


def test_cpu_only_shares_the_cores() -> None:
    tasks = [graph(1.0), Task("D", True, 2.0, flops=1e30)]
    assert epoch(tasks, replace(AMAZON, num_intervals=80), FREE).seconds == pytest.approx(10 * 3.0)
    assert epoch(tasks, replace(AMAZON, num_intervals=80), FREE).tensor_share == pytest.approx(2 / 3)


def test_cpu_only_costs_servers_alone() -> None:
    """Table 4: servers x price x time."""
    found = epoch(TASKS, AMAZON, PUBLISHED)
    made = outcome("CPU only", found, AMAZON, PRICES)
    assert made.dollars == pytest.approx(8 * 0.432 * found.seconds / 3600, rel=1e-12)


def test_cost_of_functions_by_hand() -> None:
    found = epoch(TASKS, AMAZON, PUBLISHED, 30)
    parked = outcome("", found, AMAZON, PRICES, 30)
    hourly = 8 * 0.432 + 8 * 30 * 0.0000166667 * 0.1875 * 3600
    requests = 8 * 30 * found.seconds / 900 * 2e-7
    assert parked.dollars == pytest.approx(hourly * found.seconds / 3600 + requests, rel=1e-9)
    busy = outcome("", found, AMAZON, PRICES, 30, parks=False)
    of_functions = 8 * (found.busy_s * 0.0000166667 * 0.1875 + 3 * 90 * 2e-7)
    assert busy.dollars == pytest.approx(8 * 0.432 * found.seconds / 3600 + of_functions, rel=1e-9)


def test_more_epochs_cost_more() -> None:
    found = epoch(TASKS, AMAZON, PUBLISHED, 30, mode=1)
    exact, stale = (outcome("", found, AMAZON, PRICES, 30, mode=mode) for mode in ("pipe", 1))
    assert stale.seconds == pytest.approx(1.41 * exact.seconds)
    assert stale.dollars == pytest.approx(1.41 * exact.dollars)


def test_weight_servers_are_in_the_bill() -> None:
    found = epoch(TASKS, AMAZON, PUBLISHED)
    beside = replace(AMAZON, weight_servers=(PRICES.server("c5.xlarge"), 4))
    more = outcome("", found, beside, PRICES).dollars - outcome("", found, AMAZON, PRICES).dollars
    assert more == pytest.approx(4 * 0.17 * found.seconds / 3600)


def test_little() -> None:
    cluster = replace(AMAZON, num_intervals=1000)
    tasks = [graph(0.8), tensor(flops=2e9)]  # 10 tasks a second, two seconds each
    assert little(tasks, cluster, FREE, 100) == 20
    assert little(tasks, cluster, FREE, 19) is None


def test_published_breakdown() -> None:
    """Figure 10, Amazon: 10.3 s on CPUs, 14.3 s with functions and no pipeline, tensor work 3.7 and 7.2 s."""
    tasks = tasks_of(replace(PAPER["amazon"], recomputes=False), AMAZON, PUBLISHED)
    cpu = epoch(tasks, AMAZON, PUBLISHED, mode="pipe")
    plain = epoch(tasks, AMAZON, PUBLISHED, 90, mode="none")
    assert cpu.seconds == pytest.approx(10.3, rel=0.05)
    assert cpu.tensor_s == pytest.approx(3.7, rel=0.05)
    assert plain.seconds == pytest.approx(14.3, rel=0.1)
    assert plain.tensor_s == pytest.approx(7.2, rel=0.1)
    assert plain.seconds > epoch(tasks, AMAZON, PUBLISHED, mode="none").seconds  # slower than CPU only
    assert epoch(tasks, AMAZON, PUBLISHED, 90, mode=0).seconds < cpu.seconds  # and faster once tasks overlap


def test_gpus() -> None:
    cluster = replace(AMAZON, server=PRICES.server("p3.2xlarge"))
    found = gpu_epoch(PAPER["amazon"], cluster, PUBLISHED)
    assert found.seconds == pytest.approx(5.6, rel=0.05)
    assert found.tensor_s == pytest.approx(1.5, rel=0.05)
    with pytest.raises(InputError, match="GPUs are not compared"):
        gpu_epoch(PAPER["amazon"], AMAZON, PUBLISHED)


def test_refused() -> None:
    with pytest.raises(ConfigError, match="one at least"):
        replace(AMAZON, num_servers=0)
    with pytest.raises(ConfigError, match="mode 'deep'"):
        epoch(TASKS, AMAZON, PUBLISHED, 1, mode="deep")
    with pytest.raises(ConfigError, match="mode -1"):
        epoch(TASKS, AMAZON, PUBLISHED, 1, mode=-1)
