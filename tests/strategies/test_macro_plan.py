"""The choice of k: its limits by hand, its directions for any facts, its memory bound, and what it tells the user.

The epoch's time is also held against a run simulated window by window, with a pool that really replaces rows.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhop.comm import Collective, run_in_threads
from polyhop.errors import ConfigError
from polyhop.sample.reuse import Reuse
from polyhop.strategies.macro_plan import (
    Facts,
    Measured,
    candidates,
    choose,
    memory,
    revise,
    rows,
    seconds,
    slots,
)

LIKELY = torch.exp(-8 * torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
REUSE = Reuse.of(LIKELY)  # 2500 rows of a mini-batch
NOTHING = Reuse.of(torch.zeros(1, dtype=torch.float64))


def facts_of(**given: Any) -> Facts:
    usual: dict[str, Any] = {
        "num_steps": 64,
        "num_layers": 3,
        "num_ranks": 4,
        "reuse": REUSE,
        "row_bytes": 520.0,
        "pool_row_bytes": 560.0,
        "structure_bytes": 2e4,
        "block_bytes": 1e5,
        "gradient_bytes": 5e4,
        "latency_s": 1e-4,
        "bytes_per_s": 25e6,
        "compute_s": 0.01,
        "batch_cpu_s": 0.002,
        "row_cpu_s": 1e-6,
    }
    return Facts(**(usual | given))


@pytest.mark.parametrize(
    ("num_steps", "expected"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (20, [1, 2, 4, 8, 16, 20]),
        (32, [1, 2, 4, 8, 16, 32]),
    ],
)
def test_candidates(num_steps: int, expected: list[int]) -> None:
    assert candidates(num_steps) == expected


# Limits


def test_bound_by_computing_the_smallest_window_that_hides_loading() -> None:
    """12 rounds of 10 ms behind steps of 12 ms and two rounds for gradients: 4 steps hide them."""
    facts = facts_of(reuse=NOTHING, structure_bytes=0.0, gradient_bytes=0.0, batch_cpu_s=0.0)
    facts = replace(facts, latency_s=0.01, num_rounds=12, compute_s=0.012, num_epochs=1000)
    found = choose(facts)
    assert found.k == 4
    assert found.seconds == pytest.approx(64 * 0.032, rel=0.001)


@pytest.mark.parametrize("step_s", [0.005, 0.02, 0.08])
def test_bound_by_communication_one_epoch_balances_rounds_and_drain(step_s: float) -> None:
    """nb (2 L alpha / k + t) + k T is least at k = sqrt(nb 2 L alpha / T)."""
    facts = facts_of(num_steps=1024, reuse=NOTHING, gradient_bytes=0.0, batch_cpu_s=0.0, latency_s=1e-3)
    facts = replace(facts, bytes_per_s=1e7, structure_bytes=1e6, compute_s=step_s - 2e-3)
    for k in (1, 16, 1024):
        assert seconds(facts, k) == pytest.approx(1024 * (6e-3 / k + 0.1) + k * step_s)
    fastest = min(candidates(1024), key=lambda k: seconds(facts, k))
    assert 1 / math.sqrt(2) <= fastest / math.sqrt(1024 * 6e-3 / step_s) <= math.sqrt(2)
    assert choose(facts).k <= fastest


def test_a_long_run_has_no_drain_to_fear() -> None:
    """In one epoch large windows wait for their first load; over many epochs that is nothing."""
    facts = facts_of(latency_s=0.01, is_delta=False)
    once, often = choose(facts), choose(replace(facts, num_epochs=1000))
    assert once.k <= often.k
    assert often.seconds < once.seconds


def test_nothing_to_fetch_and_no_peers_is_one_at_a_time() -> None:
    found = choose(facts_of(num_ranks=1, reuse=NOTHING, structure_bytes=0.0))
    assert found.k == 1
    assert (found.rows, found.slots) == (0, 0)


def test_a_slow_link_asks_for_larger_windows_without_a_pool_that_keeps() -> None:
    found = [
        choose(facts_of(is_delta=False, bytes_per_s=rate, num_epochs=50)).k for rate in (1e10, 50e6, 5e6)
    ]
    assert found == sorted(found)
    assert found[0] == 1
    assert found[-1] == 64


def test_a_pool_for_everything_makes_rows_no_reason() -> None:
    """Every row is fetched once in the whole run, whatever k is."""
    facts = facts_of(num_epochs=20)
    total = REUSE.distinct(64 * 20)
    for k in candidates(64):
        assert rows(facts, k) == pytest.approx(total / 20, rel=1e-6)


def test_rows_without_a_pool_that_keeps() -> None:
    facts = facts_of(num_steps=20, is_delta=False, num_epochs=3)
    assert rows(facts, 8) == pytest.approx((2 * REUSE.distinct(8) + REUSE.distinct(4)), rel=0.02)
    assert rows(facts, 20) == pytest.approx(REUSE.distinct(20), rel=1e-9)


# Against a run played window by window


def played(facts: Facts, k: int) -> tuple[float, float]:
    """(seconds, rows) of an epoch: rows drawn at random, the least recently used replaced, one window loaded ahead."""
    rng = torch.Generator().manual_seed(3)
    pool, nb = slots(facts, k), facts.num_steps
    sizes = [min(k, nb - start) for start in range(0, nb, k)] * facts.num_epochs
    last = torch.full_like(LIKELY, -math.inf)
    loads, trains, fetched = [], [], 0
    for window, size in enumerate(sizes):
        needed = (torch.rand(size, LIKELY.numel(), dtype=torch.float64, generator=rng) < LIKELY).any(0)
        new = int((needed & torch.isinf(last)).sum()) if facts.is_delta else int(needed.sum())
        last[needed] = window + 0.5 * torch.rand(int(needed.sum()), dtype=torch.float64, generator=rng)
        last[torch.argsort(last, descending=True)[pool:]] = -math.inf
        fetched += new
        sent_s = (size * facts.structure_bytes + new * facts.row_bytes) / facts.bytes_per_s
        cpu_s = size * facts.batch_cpu_s + new * facts.row_cpu_s
        loads.append(6 * facts.latency_s + sent_s + cpu_s)
        step_s = facts.compute_s + 2 * facts.latency_s + facts.gradient_bytes / facts.bytes_per_s
        trains.append(size * step_s)
    clock = loads[0]
    for load_s, train_s in zip([*loads[1:], 0.0], trains, strict=True):
        clock += max(load_s, train_s) if facts.is_overlapped else load_s + train_s
    return clock / facts.num_epochs, fetched / facts.num_epochs


@pytest.mark.parametrize("is_overlapped", [True, False])
@pytest.mark.parametrize(
    "given",
    [
        {"memory_bytes": 12e6},
        {"memory_bytes": 30e6},
        {"is_delta": False},
        {"num_steps": 20},
        {"bytes_per_s": 5e6},
        {"latency_s": 0.01, "compute_s": 0.0},
    ],
    ids=str,
)
def test_a_run_played_window_by_window(given: dict[str, Any], is_overlapped: bool) -> None:
    facts = facts_of(**({"num_steps": 32, "num_epochs": 3, "is_overlapped": is_overlapped} | given))
    for k in (1, 3, 8, facts.num_steps):
        if memory(facts, k) <= facts.memory_bytes:
            expected_s, expected_rows = played(facts, k)
            assert rows(facts, k) == pytest.approx(expected_rows, rel=0.05)
            # Both bytes of rows and of gradients may not be on the link at once, which the play does not know.
            assert seconds(facts, k) == pytest.approx(expected_s, rel=0.08)


# Directions, for any facts

FACTS = st.builds(
    lambda **values: facts_of(**values),
    num_steps=st.integers(1, 300),
    num_epochs=st.integers(1, 50),
    latency_s=st.floats(0, 0.1),
    bytes_per_s=st.floats(1e5, 1e11),
    compute_s=st.floats(0, 1),
    batch_cpu_s=st.floats(0, 0.1),
    memory_bytes=st.one_of(st.just(math.inf), st.floats(1e7, 1e9)),
    is_overlapped=st.booleans(),
    is_delta=st.booleans(),
    is_sharing=st.booleans(),
)


@given(FACTS, st.integers(0, 8), st.floats(1, 10))
@settings(max_examples=150, deadline=None)
def test_slower_parts_never_make_it_faster(facts: Facts, power: int, more: float) -> None:
    k = min(1 << power, facts.num_steps)
    slower = [
        replace(facts, latency_s=facts.latency_s * more),
        replace(facts, bytes_per_s=facts.bytes_per_s / more),
        replace(facts, compute_s=facts.compute_s * more),
        replace(facts, batch_cpu_s=facts.batch_cpu_s * more),
        replace(facts, is_sharing=True),
        replace(facts, is_overlapped=False, slots=slots(facts, k)),
    ]
    for other in slower:
        assert seconds(other, k) >= seconds(replace(facts, slots=slots(facts, k)), k) * (1 - 1e-9)


@given(FACTS)
@settings(max_examples=100, deadline=None)
def test_memory_grows_with_k_and_is_respected(facts: Facts) -> None:
    needed = [memory(facts, k) for k in candidates(facts.num_steps)]
    assert needed == sorted(needed)
    try:
        found = choose(facts)
    except ConfigError:
        assert memory(replace(facts, is_overlapped=False), 1) > facts.memory_bytes
        return
    assert found.k in candidates(facts.num_steps)
    assert found.memory_bytes <= facts.memory_bytes
    assert found.slots * facts.pool_row_bytes <= facts.memory_bytes
    assert "\n" not in found.reason
    assert found.rows <= facts.num_steps * REUSE.distinct(1) * (1 + 1e-9)


@given(FACTS)
@settings(max_examples=60, deadline=None)
def test_nothing_that_fits_is_much_faster_and_nothing_smaller_as_fast(facts: Facts) -> None:
    try:
        found = choose(facts)
    except ConfigError:
        return
    if memory(facts, 1) > facts.memory_bytes:
        return  # nothing is loaded ahead then
    fitting = [k for k in candidates(facts.num_steps) if memory(facts, k) <= facts.memory_bytes]
    best = min(seconds(facts, k) for k in fitting)
    assert found.seconds <= 1.03 * best
    assert all(seconds(facts, k) > 1.03 * best for k in fitting if k < found.k)


@given(st.floats(2e7, 2e8), st.floats(1, 4), st.integers(1, 8))
@settings(max_examples=40, deadline=None)
def test_more_memory_never_fetches_more(memory_bytes: float, more: float, k: int) -> None:
    facts = facts_of(memory_bytes=memory_bytes, num_epochs=5)
    larger = replace(facts, memory_bytes=memory_bytes * more)
    assert slots(larger, k) >= slots(facts, k)
    assert rows(larger, k) <= rows(facts, k) * (1 + 1e-9)


# What is said


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"is_delta": False, "bytes_per_s": 5e6, "num_epochs": 50},
            r"^windows of 64 mini-batches: \d.* s an epoch expected \(1 at a time: \d+ s\), \d+\.\d times fewer rows, "
            r"\d+ MB; that is the whole epoch$",
        ),
        (
            {"is_delta": False, "bytes_per_s": 5e6, "memory_bytes": 2e7},
            r"^windows of 8 mini-batches: .* of 20 MB; more would not fit the 20 MB given$",
        ),
        (
            {"latency_s": 0.02, "bytes_per_s": 1e9, "num_epochs": 50, "memory_bytes": 2e9},
            r"^windows of \d+ mini-batches: .* of 2\.0 GB; (\d+ would save [12] % more|more would not be faster)$",
        ),
        ({"bytes_per_s": 1e10, "compute_s": 1.0}, r"^mini-batches one at a time: 6\d s an epoch expected"),
        (
            {"memory_bytes": 4.5e6, "num_copies": 0.0, "block_bytes": 1.5e6},
            r"nothing loaded ahead; more would not fit the 4\.5 MB given$",
        ),
    ],
)
def test_reasons(given: dict[str, Any], expected: str) -> None:
    found = choose(facts_of(**given)).reason
    assert re.search(expected, found), found


def test_a_mini_batch_that_does_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"one mini-batch needs .* MB .*memory is 1\.0 MB: give at least"):
        choose(facts_of(memory_bytes=1e6))


# Measured


def test_what_was_measured_takes_the_place_of_estimates() -> None:
    facts = facts_of()
    distinct = REUSE.distinct(8)
    new = revise(
        facts, Measured(8, distinct_rows=1.2 * distinct, compute_s=0.5, structure_bytes=7.0, block_bytes=9.0)
    )
    assert new.reuse.distinct(8) == pytest.approx(1.2 * distinct)
    assert new.reuse.distinct(1) == pytest.approx(1.2 * REUSE.distinct(1))
    assert (new.compute_s, new.structure_bytes, new.block_bytes) == (0.5, 7.0, 9.0)
    assert (new.latency_s, new.bytes_per_s, new.batch_cpu_s) == (
        facts.latency_s,
        facts.bytes_per_s,
        facts.batch_cpu_s,
    )


def test_a_load_as_expected_changes_nothing() -> None:
    facts = facts_of()
    cpu_s = 8 * facts.batch_cpu_s + 3000 * facts.row_cpu_s
    sent_s = (8 * facts.structure_bytes + 3000 * facts.row_bytes) / facts.bytes_per_s
    taken = Measured(8, fetched_rows=3000, load_s=cpu_s + sent_s + 6 * facts.latency_s, load_cpu_s=cpu_s)
    new = revise(facts, taken)
    for name in ("latency_s", "bytes_per_s", "batch_cpu_s", "row_cpu_s"):
        assert getattr(new, name) == pytest.approx(getattr(facts, name))


@pytest.mark.parametrize("slower", [2.0, 0.8, 30.0, 1e6])
@pytest.mark.parametrize("is_latency", [False, True])
def test_a_slower_link_is_believed_within_bounds(slower: float, is_latency: bool) -> None:
    """What differs goes to the larger of bytes and rounds, up to a bound; the other stays."""
    facts = facts_of(batch_cpu_s=0.0, row_cpu_s=0.0, **({"latency_s": 1.0} if is_latency else {}))
    bytes_s = (8 * facts.structure_bytes + 3000 * facts.row_bytes) / facts.bytes_per_s
    rounds_s = 6 * facts.latency_s
    assert (rounds_s > bytes_s) == is_latency
    new = revise(facts, Measured(8, fetched_rows=3000, load_s=slower * (bytes_s + rounds_s)))
    larger, smaller = max(bytes_s, rounds_s), min(bytes_s, rounds_s)
    times = min((slower * (bytes_s + rounds_s) - smaller) / larger, 64.0)
    assert new.bytes_per_s == pytest.approx(facts.bytes_per_s / (1.0 if is_latency else times))
    assert new.latency_s == pytest.approx(facts.latency_s * (times if is_latency else 1.0))


def test_computing_that_nobody_expected_is_each_batchs() -> None:
    new = revise(facts_of(batch_cpu_s=0.0, row_cpu_s=0.0), Measured(4, load_s=10.0, load_cpu_s=2.0))
    assert new.batch_cpu_s == pytest.approx(0.5)


def test_a_pool_that_is_there_bounds_a_second_choice() -> None:
    facts = facts_of(is_delta=False, bytes_per_s=5e6, num_epochs=50)
    small = choose(replace(facts, slots=int(2 * 1.1 * REUSE.distinct(4)) + 1))
    assert small.k == 4
    assert small.reason.endswith("more would not fit the pool")


def worst_on(line: Collective) -> Measured:
    return Measured(4, distinct_rows=10.0 * line.rank, compute_s=3.0 - line.rank).worst(line)


def test_ranks_agree_on_the_worst() -> None:
    found = run_in_threads(3, worst_on)
    assert found == [Measured(4, distinct_rows=20.0, compute_s=3.0)] * 3
