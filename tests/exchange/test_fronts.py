"""What the fronts and their judges find, against integer programmes solved by HiGHS and against each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from polyhop.exchange import fronts
from polyhop.exchange.fronts import exact_front, hull_front
from polyhop.exchange.widths import Channel, cost, row_bytes, same_bytes, solve, uniform

GAIN_4_TO_8 = 1 / 225 - 1 / 65025


def channels_of(
    num_ranks: int,
    most_rows: int,
    seed: int,
    *,
    num_columns: int = 16,
    spread: float = 2.0,
    least_rows: int = 1,
) -> list[Channel]:
    """Between all pairs of ranks: log-normal beta, links of different speed."""
    rng = np.random.default_rng(seed)
    return [
        Channel(
            src, dst, np.exp(spread * rng.normal(size=rng.integers(least_rows, most_rows + 1)) + rng.normal()),
            num_columns, 1e-6 * rng.uniform(0.5, 2), 1e-4 * rng.uniform(),
        )
        for src in range(num_ranks)
        for dst in range(num_ranks)
        if src != dst
    ]  # fmt: skip


def noise(width: int) -> float:
    return 1 / (2**width - 1) ** 2 if width <= 8 else 0.0


def oracle(
    channels: Sequence[Channel],
    lam: float,
    *,
    num_ranks: int,
    group_size: int,
    widths: Sequence[int],
    model: str,
) -> float:
    """The least objective, by HiGHS. Written from the definition; ``cost`` only says what all-narrow and all-wide are."""
    columns = [  # channel, group, bytes, variance of each binary
        (
            c,
            (c, start),
            len(rows) * ((each.num_columns * b + 7) // 8 + (4 if b <= 8 else 0)),
            sum(rows) * noise(b),
        )
        for c, each in enumerate(channels)
        for start in range(0, each.beta.size, group_size)
        for rows in [sorted(each.beta.tolist(), reverse=True)[start : start + group_size]]
        for b in widths
    ]
    low, high = min(widths), max(widths)
    narrow = [
        cost(channels, uniform(channels, b), lam, num_ranks=num_ranks, widths=widths, model=model)
        for b in (low, high)
    ]
    variance, seconds = narrow[0].variance - narrow[1].variance, narrow[1].seconds - narrow[0].seconds
    if model == "rounds":  # one time a round, each at least that of its channels
        limits = [
            ((each.dst - each.src) % num_ranks - 1, [c]) for c, each in enumerate(channels) if each.beta.size
        ]
        num_times = max(num_ranks - 1, 1)
    else:
        by_side = [
            [c for c, e in enumerate(channels) if e.beta.size and getattr(e, side) == r]
            for side in ("src", "dst")
            for r in range(num_ranks)
        ]
        limits, num_times = [(0, members) for members in by_side], 1
    n = len(columns)
    chosen = np.zeros((len({group for _, group, _, _ in columns}), n + num_times))
    place = {group: k for k, group in enumerate(dict.fromkeys(group for _, group, _, _ in columns))}
    over = np.zeros((len(limits), n + num_times))
    for x, (c, group, size, _) in enumerate(columns):
        chosen[place[group], x] = 1
        for row, (_, members) in enumerate(limits):
            over[row, x] = channels[c].theta * size / seconds if c in members else 0
    for row, (number, _) in enumerate(limits):
        over[row, n + number] = -1
    fixed = np.array([-sum(channels[c].gamma for c in members) / seconds for _, members in limits])
    found = milp(
        np.concatenate([[lam * each[3] / variance for each in columns], np.full(num_times, 1 - lam)]),
        integrality=np.append(np.ones(n), np.zeros(num_times)),
        bounds=Bounds(0, np.append(np.ones(n), np.full(num_times, np.inf))),
        constraints=[LinearConstraint(chosen, 1, 1), LinearConstraint(over, -np.inf, fixed)],
        options={"mip_rel_gap": 1e-7},
    )
    assert found.success
    return float(found.fun - lam * narrow[1].variance / variance - (1 - lam) * narrow[0].seconds / seconds)


def instance(seed: int, most_rows: int = 8) -> tuple[list[Channel], dict[str, object]]:
    """Small, and different in every way: ranks, columns, group sizes (the last group is often smaller), widths."""
    rng = np.random.default_rng(1000 + seed)
    num_ranks = int(rng.integers(2, 4))
    channels = channels_of(
        num_ranks, most_rows, seed, num_columns=int(rng.choice([3, 7, 16, 64])), spread=1.5
    )
    if seed % 5 == 0:
        channels[0] = Channel(0, 1, np.zeros(0), 16)
    given: dict[str, object] = {
        "num_ranks": num_ranks,
        "group_size": int(rng.choice([1, 2, 3])),
        "widths": [(2, 4, 8), (1, 2, 4, 8), (2, 4, 8, 16)][seed % 3],
    }
    return channels, given


# Fronts by hand.


def test_hull_takes_upgrades_by_gain_per_byte() -> None:
    """The last group is small: what it needs is told by its rows, not by its sum."""
    front = hull_front(np.array([100.0, 0.9]), np.array([100, 1]), 8, (2, 4, 8))
    assert front.num_bytes.tolist() == [606, 806, 808, 1208, 1212]
    assert [front.pick(at).tolist() for at in range(5)] == [[2, 2], [4, 2], [4, 4], [8, 4], [8, 8]]
    assert np.allclose(
        front.gain, [100 * (1 / 9 - 1 / 225), 0.9 * (1 / 9 - 1 / 225), 100 * GAIN_4_TO_8, 0.9 * GAIN_4_TO_8]
    )
    assert np.all(np.diff(front.rate) <= 0)


def test_exact_knows_points_that_the_hull_jumps_over() -> None:
    given_ = (np.array([9.0, 1.0, 0.5]), np.array([2, 2, 1]), 8, (2, 4, 8))
    hull, exact = hull_front(*given_), exact_front(*given_)
    assert set(hull.num_bytes.tolist()) < set(exact.num_bytes.tolist())
    assert np.all(np.diff(exact.num_bytes) > 0)
    assert np.all(exact.gain > 0)
    assert exact.gain.sum() == pytest.approx(hull.gain.sum())
    at = exact.num_bytes.tolist().index(32)  # 2 bytes above the narrowest
    assert exact.pick(at).tolist() == [2, 2, 4]


def test_options_that_are_no_better_are_left_out() -> None:
    assert hull_front(np.ones(2), np.ones(2, dtype=np.int64), 1, (1, 2, 4, 8)).pick(0).tolist() == [8, 8]
    passing = hull_front(np.ones(1), np.ones(1, dtype=np.int64), 64, (8, 16, 32))
    assert [passing.pick(at).tolist() for at in range(2)] == [[8], [16]]
    assert passing.gain.size == 1


# S1: the exact sweep is the optimum.


@pytest.mark.parametrize("seed", range(60))
def test_exact_equals_the_integer_programme(seed: int) -> None:
    channels, given_ = instance(seed)
    lam = (0.1, 0.5, 0.9)[seed // 3 % 3]
    _, found = solve(channels, lam, method="exact", **given_)  # type: ignore[arg-type]
    assert found.objective == pytest.approx(oracle(channels, lam, model="rounds", **given_), abs=1e-6)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_exact_equals_the_integer_programme_on_larger_ones(seed: int) -> None:
    channels, given_ = instance(seed, most_rows=24)
    for lam in (0.2, 0.5, 0.8):
        _, found = solve(channels, lam, method="exact", **given_)  # type: ignore[arg-type]
        assert found.objective == pytest.approx(oracle(channels, lam, model="rounds", **given_), abs=1e-6)  # type: ignore[arg-type]


# S2: the hull is near it.


@pytest.mark.parametrize("lam", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(
    ("num_ranks", "most_rows", "group_size"), [(4, 30, 1), (4, 620, 10), (8, 300, 10), (3, 1205, 10)]
)
def test_hull_is_within_a_percent_of_exact(
    num_ranks: int, most_rows: int, group_size: int, lam: float
) -> None:
    for seed in range(3):
        channels = channels_of(num_ranks, most_rows, seed, num_columns=64, least_rows=most_rows // 2)
        costs = [
            solve(channels, lam, num_ranks=num_ranks, group_size=group_size, method=method)[1].objective
            for method in ("hull", "exact")
        ]
        assert costs[1] - 1e-12 <= costs[0] <= 1.01 * costs[1]


# The model "slowest".


@pytest.mark.parametrize("seed", range(12))
def test_slowest_is_near_the_integer_programme(seed: int) -> None:
    channels = channels_of(3, 14, seed, num_columns=64, least_rows=8)
    given_ = {"num_ranks": 3, "group_size": 1, "widths": (2, 4, 8), "model": "slowest"}
    for lam in (0.3, 0.7):
        _, found = solve(channels, lam, **given_)  # type: ignore[arg-type]
        least = oracle(channels, lam, **given_)  # type: ignore[arg-type]
        assert least - 1e-6 <= found.objective <= 1.01 * least


def test_slowest_is_near_it_where_groups_are_few() -> None:
    """A few groups in each channel: one step of one channel is a percent of the objective."""
    given_ = {"num_ranks": 3, "group_size": 100, "widths": (2, 4, 8), "model": "slowest"}
    gaps = []
    for seed in range(10):
        channels = channels_of(3, 450, seed, num_columns=128, spread=1.0, least_rows=250)
        _, found = solve(channels, 0.5, **given_)  # type: ignore[arg-type]
        gaps.append(found.objective / oracle(channels, 0.5, **given_) - 1)  # type: ignore[arg-type]
    assert min(gaps) >= -1e-4
    assert max(gaps) <= 0.01
    assert np.mean(gaps) <= 0.001


def test_swaps_of_steps_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them, as with very many ranks, choices are still sensible."""
    given_ = {"num_ranks": 5, "group_size": 50, "model": "slowest"}
    instances = [channels_of(5, 400, seed, num_columns=64, least_rows=100) for seed in range(8)]
    swapped = [solve(channels, 0.5, **given_)[1].objective for channels in instances]  # type: ignore[arg-type]
    monkeypatch.setattr(fronts, "_MOST_PAIRS", 0)
    plain = [solve(channels, 0.5, **given_)[1].objective for channels in instances]  # type: ignore[arg-type]
    assert all(a <= b + 1e-12 for a, b in zip(swapped, plain, strict=True))
    assert sum(swapped) < 0.998 * sum(plain)
    for channels, found in zip(instances, plain, strict=True):
        ends = [
            cost(channels, uniform(channels, b), 0.5, num_ranks=5, model="slowest").objective
            for b in (2, 4, 8)
        ]
        assert found < 0.8 * min(ends)


@pytest.mark.parametrize("lam", [1e-320, 1e-300, 1e-12, 0.5, 1 - 1e-12])
def test_slowest_takes_numbers_of_any_size(lam: float) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        channels = [
            Channel(
                src, dst, np.exp(rng.normal(size=6)) * rng.choice([0.0, 1e-300, 1.0, 1e250]), 16,
                rng.choice([0.0, 1e-9, 1e6]), rng.choice([0.0, 10.0]),
            )
            for src in range(3) for dst in range(3) if src != dst
        ]  # fmt: skip
        _, found = solve(channels, lam, num_ranks=3, group_size=2, model="slowest")
        ends = [
            cost(channels, uniform(channels, b), lam, num_ranks=3, model="slowest").objective
            for b in (2, 4, 8)
        ]
        assert -1e-9 <= found.objective <= min(ends) + 1e-9


# Under a budget of bytes.


def least_variance(channels: Sequence[Channel], budget: int, group_size: int) -> float:
    """By HiGHS."""
    options = [
        (k, sum(rows) * noise(b), len(rows) * row_bytes(each.num_columns, b))
        for k, (each, rows) in enumerate(
            (each, sorted(each.beta.tolist(), reverse=True)[start : start + group_size])
            for each in channels
            for start in range(0, each.beta.size, group_size)
        )
        for b in (2, 4, 8)
    ]
    group, variance, size = (np.array(column) for column in zip(*options))
    one = (group == np.arange(group.max() + 1)[:, None]).astype(float)
    constraints = [LinearConstraint(one, 1, 1), LinearConstraint(size[None, :] / budget, -np.inf, 1)]
    found = milp(
        variance / variance.max(),
        integrality=np.ones(len(options)),
        bounds=Bounds(0, 1),
        constraints=constraints,
    )
    return float(found.fun * variance.max())


@pytest.mark.parametrize("group_size", [1, 3])
def test_same_bytes_is_near_the_least_variance(group_size: int) -> None:
    for seed in range(6):
        channels = channels_of(3, 30, seed, num_columns=32, least_rows=20)
        budget = cost(channels, uniform(channels, 4), 0.5, num_ranks=3).num_bytes
        found = cost(channels, same_bytes(channels, budget, group_size=group_size).rows(), 0.5, num_ranks=3)
        assert found.num_bytes <= budget
        assert found.num_bytes > 0.98 * budget
        assert found.variance <= 1.03 * least_variance(channels, budget, group_size)
