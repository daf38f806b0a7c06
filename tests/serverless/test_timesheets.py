"""Time sheets: what a function is paid for, whatever it says and however it ends."""

from __future__ import annotations

from fractions import Fraction

import pytest

from polyhop.serverless.bill import bill
from polyhop.serverless.prices import load_prices
from polyhop.serverless.timesheets import Timesheet, Timesheets, function_trace

START = 1_763_000_000.123456


def test_the_first_hello_counts_and_work_adds_up() -> None:
    now = [10.0]
    sheets = Timesheets(lambda: now[0])
    sheets.came("f")
    now[0] = 20.0
    sheets.came("f")  # started twice under one name
    for busy in (1.5, 2.25, float("nan"), float("inf"), -3.0):
        sheets.worked("f", busy)
    assert sheets.of("f") == Timesheet(10.0, 3.75, 5)
    assert (sheets.busy_ms, sheets.num_tasks) == (3.75, 5)
    assert sheets.of("unknown") == Timesheet()


@pytest.mark.parametrize(
    ("sheet", "ran_s", "expected"),
    [
        (Timesheet(START + 0.5, 300.0, 4), 2.0, (500.0, 1500.0, 300.0)),
        (Timesheet(None), 2.0, (2000.0, 0.0, 0.0)),  # never said Hello: all of it was getting ready
        (Timesheet(START - 1.0, 100.0, 1), 2.0, (0.0, 2000.0, 100.0)),  # clocks that differ
        (Timesheet(START + 9.0, 100.0, 1), 2.0, (2000.0, 0.0, 0.0)),
        (Timesheet(START + 0.5, 9000.0, 1), 2.0, (500.0, 1500.0, 1500.0)),  # says that it worked all its life
        (Timesheet(START + 1.0, 10.0, 1), 2000.0, (1000.0, 600_000.0, 10.0)),  # nothing beyond its limit
        (Timesheet(START + 1.0, 10.0, 1), -1.0, (0.0, 0.0, 0.0)),
    ],
    ids=["usual", "silent", "early", "late", "boasts", "too long", "backwards"],
)  # fmt: skip
def test_what_a_function_is_paid_for(
    sheet: Timesheet, ran_s: float, expected: tuple[float, float, float]
) -> None:
    made = function_trace(sheet, START, START + ran_s, 192, 600.0)
    found = float(made.init_ms), float(made.alive_ms), float(made.busy_ms or 0)
    assert found == pytest.approx(expected, abs=0.002)
    billed = bill([made], load_prices())
    assert billed.billed_ms == pytest.approx(expected[0] + expected[1], abs=1)
    assert billed.init_ms + billed.busy_ms + billed.parked_ms == Fraction(made.init_ms) + made.alive_ms
