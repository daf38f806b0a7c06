"""The tuner: numbers of functions from what was seen, on clusters that are formulas and on events. No clock anywhere."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, inf

import pytest

from polyhop.serverless.cluster import Cluster, tasks_of
from polyhop.serverless.prices import load_prices
from polyhop.serverless.rates import PUBLISHED
from polyhop.serverless.shapes import PAPER
from polyhop.serverless.simulate import simulate
from polyhop.serverless.tuner import UNSTEADY, Bounds, Look, Tuner

BOUNDS = Bounds(start=2, most=100, intervals=24, server_dollars_s=0.432 / 3600, function_dollars_s=0.01125 / 3600,
                at_a_time=2)  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """Epochs of 3 tasks for each interval, which take ``leased_s`` each; graph work that they hide, or not."""

    bounds: Bounds = BOUNDS
    leased_s: float = 0.05
    graph_s: float = 0.0
    hides: bool = True
    rest_s: float = 0.02
    noise: float = 0.0

    def epoch_s(self, number: int) -> float:
        rounds = ceil(self.bounds.intervals / (self.bounds.at_a_time * number))
        work = 3 * rounds * self.leased_s
        return self.rest_s + (max(work, self.graph_s) if self.hides else work + self.graph_s)

    def value(self, number: int) -> float:
        cost = self.bounds.server_dollars_s + number * self.bounds.function_dollars_s
        return 1 / (self.epoch_s(number) ** 2 * cost)

    @property
    def best(self) -> int:
        return max(range(1, self.bounds.intervals + 1), key=self.value)

    def look(self, number: int, rng: random.Random) -> Look:
        tasks = 3 * self.bounds.intervals
        free = self.bounds.intervals - self.bounds.at_a_time * number
        seconds = self.epoch_s(number) * (1 + self.noise * rng.random())
        return Look(
            seconds, 1, number, tasks, tasks * self.leased_s, 0.0, self.graph_s, waiting=max(free / 2, 0.0)
        )


def played(tuner: Tuner, machine: Machine, epochs: int = 60, seed: int = 0) -> list[int]:
    """Functions of every epoch; one in which their number changed is not steady."""
    rng, numbers = random.Random(seed), list[int]()
    for _ in range(epochs):
        numbers.append(tuner.wanted)
        is_steady = len(numbers) > 1 and numbers[-1] == numbers[-2]
        tuner.see(replace(machine.look(tuner.wanted, rng), is_steady=is_steady))
    return numbers


MACHINES: dict[str, Callable[[], Machine]] = {
    "latency": Machine,
    "dear": lambda: Machine(replace(BOUNDS, function_dollars_s=0.1037 / 3600)),
    "graph work hidden": lambda: Machine(replace(BOUNDS, function_dollars_s=0.1037 / 3600), graph_s=0.5),
    "graph work in turns": lambda: Machine(graph_s=0.5, hides=False),
    "graph work alone": lambda: Machine(leased_s=0.001, graph_s=2.0),
    "something else": lambda: Machine(replace(BOUNDS, start=16), rest_s=3.0),
    "too many to begin with": lambda: Machine(replace(BOUNDS, start=24), leased_s=0.005, graph_s=0.2),
    "many": lambda: Machine(replace(BOUNDS, intervals=200, start=1)),
}


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("name", MACHINES)
def test_it_ends_near_the_number_that_is_worth_most(name: str, noise: float) -> None:
    machine = replace(MACHINES[name](), noise=noise)
    numbers = played(Tuner(machine.bounds), machine)
    assert machine.value(numbers[-1]) >= 0.9 * machine.value(machine.best), (numbers, machine.best)
    assert sum(a != b for a, b in pairwise(numbers)) <= 12


def test_numbers_stay_within_what_may_be() -> None:
    bounds = replace(BOUNDS, most=5, start=50)
    assert set(played(Tuner(bounds), Machine(bounds))) <= set(range(1, 6))
    assert Tuner(replace(BOUNDS, intervals=1, start=8)).wanted == 1
    assert Tuner(replace(BOUNDS, start=0, most=0)).wanted == 1


def test_what_costs_nothing_is_judged_by_its_time() -> None:
    free = replace(BOUNDS, server_dollars_s=0.0, function_dollars_s=0.0)
    assert played(Tuner(free), Machine(free))[-1] == 12  # all intervals at once


def test_no_more_functions_where_no_task_waits() -> None:
    """Whatever the formula hopes."""
    machine = Machine()
    for waiting, grows in ((0.0, False), (5.0, True), (None, True)):
        tuner = Tuner(BOUNDS)
        for _ in range(5):
            tuner.see(replace(machine.look(tuner.wanted, random.Random(0)), waiting=waiting))
        assert (tuner.wanted > 2) == grows


def test_cores_that_functions_share_and_a_full_link_are_a_ceiling() -> None:
    """Tasks that only compute: more functions than cores do not help, nor do any once the link is full."""
    look = Look(4.0, 1, 2, 72, 72 * 0.2, 72 * 0.1, 0.1, num_bytes=10**9, waiting=10.0)
    bounds = replace(BOUNDS, function_dollars_s=0.01 / 3600)
    for limited, expected in (
        (replace(bounds, cores=2.0), 2),
        (replace(bounds, link_bytes=0.25e9), 2),
        (bounds, 8),
    ):
        tuner = Tuner(limited)
        for _ in range(3):
            tuner.see(replace(look, num_functions=tuner.wanted))
        assert (tuner.wanted > 2) == (expected > 2), limited


def test_a_first_wave_that_dies_whole_decides_nothing() -> None:
    """No task was done, functions came and went: then all goes on as if it had not been."""
    machine, tuner = Machine(), Tuner(BOUNDS)
    for _ in range(20):
        assert tuner.see(Look(5.0, 0, 0, 0, 0.0, 0.0, 0.0, waiting=24.0, is_steady=False)) is None
    assert tuner.wanted == 2
    assert played(tuner, machine)[-1] == played(Tuner(BOUNDS), machine)[-1]


def test_epochs_in_which_functions_come_and_go_count_only_if_there_are_no_others() -> None:
    machine, tuner = Machine(), Tuner(BOUNDS)
    restless = replace(machine.look(2, random.Random(0)), is_steady=False, seconds=100.0, waiting=0.0)
    for _ in range(UNSTEADY - 1):
        assert tuner.see(restless) is None
    assert not tuner._tried
    tuner.see(restless)
    assert list(tuner._tried) == [2]


def test_a_pile_of_tasks_in_the_first_epoch_asks_for_more() -> None:
    look = Look(0.5, 0, 2, 10, 0.5, 0.001, 0.0, waiting=18.0, ready=0.0)
    assert Tuner(BOUNDS).see(look) is not None
    for calm in (
        replace(look, waiting=2.0),
        replace(look, ready=9.0),  # the server does not keep up as it is
        replace(look, num_functions=1),  # those that are wanted have not come yet
    ):
        assert Tuner(BOUNDS).see(calm) is None
    computing = replace(look, busy_s=0.25)
    assert Tuner(replace(BOUNDS, cores=2.0)).see(computing) is None
    assert Tuner(replace(BOUNDS, cores=4.0)).see(computing) is not None


def test_a_measurement_that_was_disturbed_is_forgotten() -> None:
    """Once, 12 functions were slow for reasons of their own; they are tried again."""
    machine, tuner, rng = Machine(), Tuner(BOUNDS), random.Random(0)
    numbers = list[int]()
    for _ in range(80):
        numbers.append(tuner.wanted)
        look = machine.look(tuner.wanted, rng)
        is_disturbed = tuner.wanted > 6 and len(numbers) <= 10
        tuner.see(replace(look, seconds=10 * look.seconds) if is_disturbed else look)
    assert machine.best == 12
    assert 12 in numbers[:10]
    assert numbers[-1] == 12


@pytest.mark.parametrize("name", PAPER)
def test_on_events_it_is_near_the_best_of_all_numbers(name: str) -> None:
    """After the search, for the shapes of the paper's graphs with their clusters."""
    prices = load_prices()
    kind, count = {"reddit-small": ("c5.2xlarge", 2), "reddit-large": ("c5n.2xlarge", 12),
                   "amazon": ("c5n.2xlarge", 8), "friendster": ("c5n.4xlarge", 32)}[name]  # fmt: skip
    whole = Cluster(prices.server(kind), count, 192, 64)
    tasks, one = tasks_of(PAPER[name], whole, PUBLISHED), replace(whole, num_servers=1)
    server, function = float(whole.server.dollars_per_s), float(prices.functions.dollars_per_s(192))
    epochs = {n: simulate(tasks, one, PUBLISHED, n) for n in range(1, 32)}
    values = {n: 1 / (each.seconds**2 * (server + n * function)) for n, each in epochs.items()}
    tuner = Tuner(Bounds(16, 31, 64, server, function, link_bytes=inf))
    for _ in range(25):
        found = epochs[tuner.wanted]
        graph_s = found.core_s / one.cores
        tuner.see(Look(found.seconds, 1, tuner.wanted, found.num_leases, sum(found.busy_s), 0.0, graph_s))
    assert values[tuner.wanted] >= 0.9 * max(values.values()), tuner.decisions
