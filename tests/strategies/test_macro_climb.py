"""Windows of other sizes are tried while that is faster, and the clock has the last word."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from polyhop.strategies.macro_climb import Climb

SIZES = [1, 2, 4, 8, 16, 32, 50]


def search(
    start: int, pace: Callable[[int], float], may_try: Callable[[int], bool] = lambda _: True
) -> Climb:
    climb = Climb(start, SIZES)
    for _ in range(10):
        if climb.is_settled:
            return climb
        k = climb.k
        assert k == start or may_try(k), f"{k} was tried, and does not fit"
        assert climb.tell(pace(k), may_try) == climb.k
    raise AssertionError("no end")


@pytest.mark.parametrize("start", SIZES)
def test_the_fastest_is_found_wherever_it_begins(start: int) -> None:
    rising = search(start, lambda k: 1 + 4 / k)
    assert rising.k == 50
    falling = search(start, lambda k: 1 + 0.05 * k)
    assert falling.k == 1


@pytest.mark.parametrize("start", SIZES)
def test_within_a_stride_of_a_valley(start: int) -> None:
    found = search(start, lambda k: 1 + 8 / k + k / 8)
    assert 2 <= found.k <= 32
    assert found.paces[found.k] <= 1.02 * min(found.paces.values())


def test_of_equals_the_smallest() -> None:
    assert search(8, lambda _: 1.0).k == 2  # 32 and 2 were tried; neither is faster
    assert search(1, lambda k: 1.0 if k > 1 else 1.01).k == 1


def test_what_does_not_fit_is_not_tried() -> None:
    found = search(2, lambda k: 1 / k, lambda k: k <= 4)
    assert found.k == 4
    assert set(found.paces) == {2, 4}
    assert search(4, lambda k: 1 / k, lambda k: False).k == 4


def test_an_epoch_that_is_no_power_of_two() -> None:
    climb = Climb(3, [1, 2, 3])
    climb.tell(1.0, lambda _: True)
    assert climb.k == 1
    assert climb.tell(2.0, lambda _: True) == 3
    assert climb.is_settled
