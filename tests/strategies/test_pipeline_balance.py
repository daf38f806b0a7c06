"""Stages by dynamic programme, against all cuts there are."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as draws

from polyhop.errors import ConfigError
from polyhop.strategies.pipeline_balance import balance, slowest


def all_cuts(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    return [(0, *inner, num_layers) for inner in combinations(range(1, num_layers), num_stages - 1)]


@settings(max_examples=150, deadline=None)
@given(draws.lists(draws.integers(0, 30), min_size=1, max_size=9), draws.integers(1, 5))
def test_slowest_stage_is_as_fast_as_any_cut_makes_it(costs: list[int], num_stages: int) -> None:
    num_stages = min(num_stages, len(costs))
    bounds = balance(costs, num_stages)
    cuts = all_cuts(len(costs), num_stages)
    least = min(slowest(costs, cut) for cut in cuts)
    assert bounds in cuts
    assert slowest(costs, bounds) == least
    squares = min(_squares(costs, cut) for cut in cuts if slowest(costs, cut) == least)
    assert _squares(costs, bounds) == squares


@settings(max_examples=80, deadline=None)
@given(draws.data())
def test_among_the_fastest_the_cheapest_crossing_wins(data: draws.DataObject) -> None:
    costs = data.draw(draws.lists(draws.integers(0, 5), min_size=2, max_size=8))
    crossing = data.draw(draws.lists(draws.integers(1, 4), min_size=len(costs), max_size=len(costs)))
    num_stages = data.draw(draws.integers(1, len(costs)))
    bounds = balance(costs, num_stages, crossing)
    cuts = all_cuts(len(costs), num_stages)
    least = min(slowest(costs, cut) for cut in cuts)
    assert slowest(costs, bounds) == least
    cheapest = min(_crossed(crossing, cut) for cut in cuts if slowest(costs, cut) == least)
    assert _crossed(crossing, bounds) == cheapest


def test_33_units_over_8_stages_are_5_and_seven_times_4() -> None:
    sizes = [stop - start for start, stop in pairwise(balance([1.0] * 33, 8))]
    assert sorted(sizes) == [4] * 7 + [5]


def test_a_wide_input_gets_a_stage_to_itself() -> None:
    assert balance([9.0, 1.0, 1.0, 1.0], 2) == (0, 1, 4)


def test_fractions_that_round_differently_in_sums_are_still_cut() -> None:
    assert len(balance([0.1] * 30, 7)) == 8


@pytest.mark.parametrize(("costs", "stages"), [([1.0, 2.0], 3), ([1.0], 0), ([1.0, float("nan")], 1)])
def test_what_cannot_be_cut_is_refused(costs: list[float], stages: int) -> None:
    with pytest.raises(ConfigError, match=r"stages|costs"):
        balance(costs, stages)


def _squares(costs: list[int], bounds: tuple[int, ...]) -> int:
    return sum(sum(costs[start:stop]) ** 2 for start, stop in pairwise(bounds))


def _crossed(crossing: list[int], bounds: tuple[int, ...]) -> int:
    return sum(crossing[cut] for cut in bounds[1:-1])
