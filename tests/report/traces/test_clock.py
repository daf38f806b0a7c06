"""Ranks share one axis; the time between two lives of a run is cut out."""

from __future__ import annotations

import pytest

from polyhop.report.traces.clock import Clock


def test_ranks_that_overlap_share_a_stretch() -> None:
    clock = Clock([(100.0, 110.0), (101.0, 112.0)])
    assert clock.starts == [100.0]
    assert clock.length_s == 12.0
    assert clock.at(105.5) == 5.5


def test_hours_between_are_cut_out() -> None:
    clock = Clock([(100.0, 110.0), (5000.0, 5020.0)])
    assert clock.at(110.0) == 10.0
    assert clock.at(3000.0) == 10.0
    assert clock.at(5000.0) == pytest.approx(10.5)
    assert clock.length_s == pytest.approx(30.5)


def test_without_anything() -> None:
    clock = Clock([])
    assert (clock.length_s, clock.at(5.0)) == (0.0, 0.0)
