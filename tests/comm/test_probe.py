"""Link speeds: agreed by all ranks, and exactly those of a wire whose clock is told how long every byte takes."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor

from polyhop.comm import Collective, ThreadCollective, probe, run_in_threads
from polyhop.comm.probe import LinkSpeed, PairCosts, measure_link, measure_pairs
from polyhop.comm.traffic import Cost

Run = Callable[..., list[Any]]


def measure(line: Collective) -> tuple[LinkSpeed, Cost]:
    before = line.traffic.now()
    return measure_link(line), line.traffic.now() - before


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_all_ranks_are_told_the_same(backend: str, ranks: Run) -> None:
    found = (ranks if backend == "gloo" else run_in_threads)(3, measure)
    assert len({speed for speed, _ in found}) == 1
    speed = found[0][0]
    assert 0 < speed.latency_s < math.inf
    assert 0 < speed.bytes_per_s < math.inf
    assert len({cost.total_bytes for _, cost in found}) == 1
    assert {kind for _, cost in found for kind in cost.bytes} == {"sizes"}


def test_one_rank_needs_no_link() -> None:
    assert run_in_threads(1, measure_link) == [LinkSpeed(0.0, math.inf)]


def test_an_injected_delay_is_found() -> None:
    for speed in run_in_threads(2, measure_link, latency_s=0.02):
        assert speed.latency_s >= 0.02


class Clock(threading.local):
    """Each rank's own, which only its exchanges move on."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def timed(line: ThreadCollective, clock: Clock, latency_s: float, rates: Sequence[float], stall: int) -> Any:
    """Over a wire with that latency, on which rank r sends ``rates[r]`` bytes a second, and stalls once."""
    post, count = line._post, 0

    def slow(send: Sequence[Tensor | None], receive: Sequence[Tensor | None]) -> Callable[[], None]:
        finish = post(send, receive)
        size = sum(piece.numel() * piece.element_size() for piece in send if piece is not None)

        def late() -> None:
            nonlocal count
            finish()
            count += 1
            clock.now += latency_s + size / rates[line.rank] + (1.0 if count == stall else 0.0)

        return late

    line._post = slow  # type: ignore[method-assign]
    speed, cost = measure(line)
    return speed, cost.total_bytes, clock.now


@pytest.mark.parametrize(
    ("num_ranks", "rate", "latency_s", "stall"),
    [(2, 1e6, 1e-5, 0), (4, 12.5e6, 1e-5, 0), (3, 1e9, 0.01, 0), (2, 12.5e9, 1e-5, 0)]
    + [(2, 12.5e6, 0.01, stall) for stall in (8, 23, 26)],
)
def test_latency_and_rate_of_the_slowest_rank(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, rate: float, latency_s: float, stall: int
) -> None:
    """Also if an exchange now and then takes a second longer than it should."""
    clock = Clock()
    monkeypatch.setattr(probe, "time", clock)
    rates = [rate * (1 + rank) for rank in range(num_ranks)]
    for speed, sent, taken in run_in_threads(num_ranks, timed, clock, latency_s, rates, stall):
        assert speed.latency_s == pytest.approx(latency_s, rel=0.01, abs=5e-6)
        assert speed.bytes_per_s == pytest.approx(rate, rel=0.02)
        assert sent < 4 * (1 << 24)
        assert taken - bool(stall) < 0.6 + 40 * latency_s  # seconds of that clock


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_pairs_cost_the_same_to_all(backend: str, ranks: Run) -> None:
    found = (ranks if backend == "gloo" else run_in_threads)(3, measure_pairs, (1000, 100_000), 2)
    assert len(set(found)) == 1
    for i in range(3):
        assert [found[0].per_byte[i][j] > 0 for j in range(3)] == [i != j for j in range(3)]
        assert all(cost >= 0 for cost in found[0].per_message[i])
    assert PairCosts.from_json(found[0].to_json()) == found[0]


def test_a_line_through_seconds() -> None:
    slope, start = probe._fit([100, 200, 400], [1.1, 1.2, 1.4])
    assert slope == pytest.approx(1e-3)
    assert start == pytest.approx(1.0)
    assert probe._fit([100, 200], [1.0, 0.5])[0] > 0  # noise: a longer message cannot take less
