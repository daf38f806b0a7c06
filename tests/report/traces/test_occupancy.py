"""Shares of slots are those of a plain count, also after the slots have become longer."""

from __future__ import annotations

import numpy as np
import pytest

from polyhop.report.traces.occupancy import Occupancy


def plain_count(intervals: list[tuple[float, float, int]], num_slots: int, slot_s: float) -> np.ndarray:
    found = np.zeros(num_slots)
    for start, stop, sign in intervals:
        for slot in range(num_slots):
            found[slot] += sign * max(min(stop, (slot + 1) * slot_s) - max(start, slot * slot_s), 0.0)
    return found


def test_one_interval_over_some_slots() -> None:
    shares = Occupancy(num_slots=8)
    shares.add("a", [0.0015], [0.0042], [1])
    assert shares.slot_s == 0.001
    assert shares.at_once("a") == pytest.approx([0, 0.5, 1, 1, 0.2, 0, 0, 0])


@pytest.mark.parametrize("seed", range(4))
def test_random_intervals_in_any_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shares, told = Occupancy(num_slots=16), []
    for scale in (0.01, 0.5, 3.0):  # slots double again and again
        starts = rng.uniform(0, scale, 20)
        stops = starts + rng.uniform(0, scale / 5, 20)
        signs = rng.choice([1, -1], 20)
        shares.add("a", starts.tolist(), stops.tolist(), signs.tolist())
        told += list(zip(starts, stops, signs, strict=True))
    assert shares.slot_s * 16 > max(stop for _, stop, _ in told)
    assert shares.seconds["a"] == pytest.approx(plain_count(told, 16, shares.slot_s), abs=1e-9)


def test_names_are_apart() -> None:
    shares = Occupancy(num_slots=4)
    shares.add("a", [0.0], [0.001], [1])
    shares.add("b", [0.0, 0.0], [0.002, 0.001], [1, -1])
    assert shares.at_once("a") == pytest.approx([1, 0, 0, 0])
    assert shares.at_once("b") == pytest.approx([0, 1, 0, 0], abs=1e-12)


def test_several_at_once() -> None:
    shares = Occupancy(num_slots=4)
    shares.add("a", [0.0, 0.0], [0.001, 0.002], [1, 1])
    assert shares.at_once("a").tolist() == pytest.approx([2.0, 1.0, 0.0, 0.0])
