"""Past runs correct what is foreseen, and cannot run away with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polyhop.plan import Memory, Prediction, load_machine
from polyhop.plan.learn import KEPT, corrected, factor_of, learn

GIVEN = Prediction("halo", {}, "halo", True, 2.0, {"compute": 1.5, "wait": 0.5}, Memory(1, 1))


def machine():
    found = load_machine()
    assert found is not None, "conftest puts one into the cache"
    return replace(found, past={})


def test_nothing_learnt_changes_nothing() -> None:
    assert corrected(GIVEN, {}).epoch_s == 2.0


def test_many_runs_are_believed_few_are_doubted() -> None:
    assert factor_of([2.0]) == pytest.approx(2**0.5)
    assert factor_of([2.0] * 9) == pytest.approx(2**0.9)
    assert factor_of([1.5, 1.5, 40.0]) == pytest.approx(1.5**0.75), "one that was disturbed does not count"


def test_corrections_do_not_pile_up() -> None:
    host = machine()
    for _ in range(30):  # always twice as long as the model foresees
        host = learn(host, corrected(GIVEN, host.past), 4.0)
    assert corrected(GIVEN, host.past).epoch_s == pytest.approx(4.0, rel=0.06)
    assert len(host.past["halo"]) == KEPT


def test_parts_go_with_the_whole() -> None:
    found = corrected(GIVEN, {"halo": [2.0] * 12})
    assert sum(found.parts.values()) == pytest.approx(found.epoch_s)
    assert found.foreseen_s == 2.0


def test_a_strategy_without_a_past_has_that_of_all() -> None:
    """Else the one that was tried, and found slower than foreseen, would lose to one that was never tried."""
    other = replace(GIVEN, strategy="pipeline")
    past = {"halo": [2.0] * 6}
    assert corrected(other, past).epoch_s == corrected(GIVEN, past).epoch_s


@pytest.mark.parametrize("measured", [0.0, 0.01, 1000.0])
def test_what_cannot_be_of_this_machine_is_left_out(measured: float) -> None:
    assert learn(machine(), GIVEN, measured).past == {}
