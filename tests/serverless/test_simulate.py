"""Epochs played through: sums where nothing overlaps, the formulas where nothing is shared, barriers and staleness kept."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from polyhop.errors import InputError
from polyhop.serverless.bill import FunctionTrace, bill
from polyhop.serverless.cluster import Cluster, Task, epoch, service_s, tasks_of
from polyhop.serverless.prices import load_prices
from polyhop.serverless.rates import PUBLISHED, Rates
from polyhop.serverless.shapes import PAPER
from polyhop.serverless.simulate import simulate

PRICES = load_prices()
ONE_CORE = replace(PRICES.server("c5.xlarge"), vcpus=1)
ALONE = Cluster(ONE_CORE, 1, 192, 1)
AMAZON = Cluster(PRICES.server("c5n.2xlarge"), 8, 192, 90)
FREE = Rates(1e9, 1e9, {192: 1e9}, inf, inf, inf)


def graph(seconds: float) -> Task:
    return Task("A", False, seconds)


def tensor(flops: float = 0.0, **given: float) -> Task:
    return Task("D", True, given.pop("core_s", 0.0), flops, **given)


CHAIN = [graph(2.0), tensor(3e9, scatter_s=0.5), graph(1.0), tensor(4e9), graph(0.25), tensor(1e9)]


@pytest.mark.parametrize("mode", ["none", "pipe", 0, 3])
def test_one_function_without_latency_is_the_sum_of_tasks(mode: str | int) -> None:
    played = simulate(CHAIN, ALONE, FREE, 1, mode=mode)
    assert played.seconds == pytest.approx(2 + 3 + 0.5 + 1 + 4 + 0.25 + 1)
    assert played.core_s == pytest.approx(3.25)
    assert played.busy_s == (pytest.approx(8.0),)
    assert simulate(CHAIN, ALONE, FREE, 1, mode=mode, num_epochs=5).epoch_s == pytest.approx(11.75)


def test_one_function_and_many_intervals_is_the_sum_of_its_tasks() -> None:
    """The only function is never idle once it has begun."""
    cluster = Cluster(replace(ONE_CORE, vcpus=8), 1, 192, 40)
    played = simulate([graph(0.1), tensor(1e9)], cluster, FREE, 1)
    assert played.seconds == pytest.approx(0.1 + 40 * 1.0)


@pytest.mark.parametrize("streams", [True, False])
def test_bytes_and_latency_are_those_of_the_formula(streams: bool) -> None:
    rates = Rates(1e9, 1e9, {192: 1e9}, 100.0, inf, inf, latency_s=0.25)
    task = tensor(2e9, in_bytes=300.0, out_bytes=50.0, weight_bytes=40.0)
    played = simulate([task], ALONE, rates, 1, streams=streams)
    assert played.seconds == pytest.approx(service_s(task, 1, ALONE, rates, streams=streams))
    assert played.seconds == pytest.approx(0.25 + (3.4 if streams else 5.4) + 0.5)


@pytest.mark.parametrize("mode", ["none", "pipe"])
@pytest.mark.parametrize(("flops", "cores"), [(4e9, 4), (1e9, 4), (2e9, 8)])
def test_where_nothing_is_shared_it_is_the_formula(mode: str, flops: float, cores: int) -> None:
    """Links with room for all, whole waves on cores and functions; where functions are behind, the last of them begins after
    as many waves of cores as feed them all, of which the formula counts one."""
    cluster = Cluster(replace(ONE_CORE, vcpus=cores), 3, 192, 64)
    rates = Rates(1e9, 1e9, {192: 1e9}, 1e6, 1e9, inf, latency_s=0.1)
    tasks = [graph(0.5), tensor(flops, in_bytes=1e5, out_bytes=1e5)]
    found = epoch(tasks, cluster, rates, 16, mode=mode)
    is_fed_late = mode == "pipe" and found.tensor_s > found.graph_s
    late = (16 / cores - 1) * 0.5 if is_fed_late else 0.0
    assert simulate(tasks, cluster, rates, 16, mode=mode).seconds == pytest.approx(found.seconds + late)


def test_cores_bound_it_exactly() -> None:
    cluster = Cluster(replace(ONE_CORE, vcpus=4), 2, 192, 64)
    tasks = [graph(1.0), tensor(1e8), graph(1.0), tensor(1e8)]
    assert simulate(tasks, cluster, FREE, 16).seconds == pytest.approx(
        epoch(tasks, cluster, FREE, 16).seconds
    )
    assert simulate(tasks, cluster, FREE, 16).seconds == pytest.approx(2 * (16 + 0.1))


def test_link_is_shared_evenly() -> None:
    """Four send at once over a link for two: twice the time; a fifth that comes late takes its share from then on."""
    rates = Rates(1e9, 1e9, {192: inf}, 100.0, 200.0, inf)
    cluster = Cluster(replace(ONE_CORE, vcpus=4), 1, 192, 4)
    assert simulate([tensor(in_bytes=100.0)], cluster, rates, 4).seconds == pytest.approx(2.0)
    assert simulate([tensor(in_bytes=100.0)], cluster, rates, 2).seconds == pytest.approx(2.0)
    assert simulate([tensor(in_bytes=100.0)], cluster, rates, 1).seconds == pytest.approx(4.0)
    late = Cluster(ONE_CORE, 1, 192, 2)  # one core: the second is ready a second after the first
    rates = replace(rates, function_bytes=100.0, server_bytes=100.0)
    # first alone for 1 s (100 bytes), then both at 50 bytes/s: first ends at 1 + 1 + 2, second has 50 bytes left
    assert simulate([graph(1.0), tensor(in_bytes=200.0)], late, rates, 2).seconds == pytest.approx(5.0)


def test_past_the_ceiling_more_functions_do_not_help() -> None:
    rates = Rates(1e9, 1e9, {192: inf}, 100.0, 1000.0, inf)
    cluster = Cluster(ONE_CORE, 1, 192, 240)
    seconds = [
        simulate([tensor(in_bytes=50.0, out_bytes=50.0)], cluster, rates, n).seconds
        for n in (5, 10, 20, 60, 240)
    ]
    assert seconds == pytest.approx([48.0, 24.0, 24.0, 24.0, 24.0])


def test_leases_are_handed_out_in_turn() -> None:
    rates = replace(FREE, leases=4.0)
    assert simulate([tensor()], Cluster(ONE_CORE, 1, 192, 20), rates, 20).seconds == pytest.approx(5.0)


def test_cold_start_delays_and_is_billed() -> None:
    rates = replace(FREE, cold_s=1.5)
    assert simulate(CHAIN, ALONE, rates, 1, is_cold=True).seconds == pytest.approx(
        11.75
    )  # behind the first graph task
    played = simulate([tensor(3e9)], ALONE, rates, 1, is_cold=True)
    assert played.seconds == pytest.approx(4.5)
    assert bill(played.traces(ALONE, PRICES), PRICES).billed_ms == 4500


def test_cores_do_tensor_work_without_functions() -> None:
    cluster = Cluster(replace(ONE_CORE, vcpus=4), 2, 192, 8)
    tasks = [graph(1.0), tensor(1e30, core_s=0.5, scatter_s=0.01)]
    played = simulate(tasks, cluster, FREE)
    assert played.seconds == pytest.approx(2 * 1.5 + 4 * 0.01)
    assert played.num_leases == 0
    assert simulate(tasks[:1], cluster, FREE).seconds == pytest.approx(
        epoch(tasks[:1], cluster, FREE).seconds
    )


def test_barriers_cost_time_and_staleness_wins_it_back() -> None:
    tasks = tasks_of(replace(PAPER["amazon"], recomputes=False), AMAZON, PUBLISHED)
    none, pipe, stale = (
        simulate(tasks, AMAZON, PUBLISHED, 90, mode=mode, num_epochs=2).epoch_s
        for mode in ("none", "pipe", 0)
    )
    cpu = simulate(tasks, AMAZON, PUBLISHED, num_epochs=2).epoch_s
    assert none > cpu > pipe > stale  # figure 10: functions are slower without the pipeline, faster with it
    assert none == pytest.approx(14.3, rel=0.1)


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
def test_intervals_are_never_further_ahead(staleness: int) -> None:
    """Two of three intervals could run ahead for ever: a core each, the third waits for both."""
    cluster = Cluster(replace(ONE_CORE, vcpus=2), 2, 192, 3)
    tasks = [graph(1.0), tensor(7e9)]
    played = simulate(tasks, cluster, FREE, 1, mode=staleness, num_epochs=12)
    assert played.spread <= staleness
    assert played.num_leases == 2 * 3 * 12


def test_staleness_is_used() -> None:
    cluster = Cluster(ONE_CORE, 1, 192, 2)
    assert simulate([graph(1.0), tensor(1e9)], cluster, FREE, 2, mode=2, num_epochs=12).spread > 0
    assert simulate([graph(1.0), tensor(1e9)], cluster, FREE, 2, mode="pipe", num_epochs=12).spread == 0


def test_pipe_waits_for_every_server() -> None:
    """The second graph task of the first interval waits for the last tensor task anywhere."""
    cluster = Cluster(replace(ONE_CORE, vcpus=4), 2, 192, 4)
    tasks = [graph(1.0), tensor(1e9), graph(1.0)]
    assert simulate(tasks, cluster, FREE, 1, mode="pipe").seconds == pytest.approx(1 + 4 + 1)
    assert simulate(tasks, cluster, FREE, 1, mode=0).seconds == pytest.approx(1 + 4 + 1)
    longer = [graph(1.0), tensor(1e9), graph(3.0)]
    stale = simulate(longer, Cluster(ONE_CORE, 2, 192, 4), FREE, 1, mode=0).seconds
    assert stale < simulate(longer, Cluster(ONE_CORE, 2, 192, 4), FREE, 1, mode="pipe").seconds


def test_a_billion_edges_and_a_thousand_functions() -> None:
    cluster = Cluster(PRICES.server("c5n.4xlarge"), 32, 192, 93)
    tasks = tasks_of(PAPER["friendster"], cluster, PUBLISHED)
    played = simulate(tasks, cluster, PUBLISHED, 31, is_cold=True)
    assert len(played.busy_s) == 992
    assert played.num_leases == 32 * 93 * 3
    found = epoch(tasks, cluster, PUBLISHED, 31).seconds
    assert played.seconds == pytest.approx(found + played.cold_s, rel=0.2)


def test_traces_are_billed_to_the_end() -> None:
    played = simulate(CHAIN, ALONE, FREE, 1, num_epochs=100)  # 1175 s: longer than a function may live
    traces = list(played.traces(ALONE, PRICES))
    functions = [trace for trace in traces if isinstance(trace, FunctionTrace)]
    assert len(functions) == 2
    assert sum(trace.alive_ms for trace in functions) == 1000 * played.seconds
    made = bill(traces, PRICES)
    assert float(made.busy_ms) == pytest.approx(800_000)
    assert made.server_s == 1175
    beside = replace(ALONE, weight_servers=(PRICES.server("c5.2xlarge"), 2))
    assert "weights c5.2xlarge" in bill(played.traces(beside, PRICES), PRICES).servers


def test_the_same_every_time() -> None:
    tasks = tasks_of(PAPER["amazon"], AMAZON, PUBLISHED)
    assert simulate(tasks, AMAZON, PUBLISHED, 20, mode=1) == simulate(tasks, AMAZON, PUBLISHED, 20, mode=1)


def test_refused() -> None:
    with pytest.raises(InputError, match="an epoch at least"):
        simulate(CHAIN, ALONE, FREE, 1, num_epochs=0)
