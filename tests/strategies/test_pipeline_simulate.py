"""Epochs played through: the bubble of equal tasks exactly, bounds for unequal ones, and the authors' 16 logged epochs."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from polyhop.errors import InputError
from polyhop.strategies.pipeline_schedule import (
    Layout,
    Schedule,
    Task,
    fill_drain,
    layer_by_layer,
    split_ways,
)
from polyhop.strategies.pipeline_simulate import bubble, simulate, ticked

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.pipeline import logged


def made(stages: int, chunks: int, ways: int = 1, maker: Any = fill_drain) -> Schedule:
    schedule: Schedule = maker(
        Layout(stages, ways), range(stages + 1), [list(part) for part in split_ways(chunks, ways)]
    )
    return schedule


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("stages", "chunks"), [(1, 4), (2, 2), (4, 1), (3, 9), (8, 32)])
def test_equal_tasks_leave_the_bubble_idle(stages: int, chunks: int, overlap: bool) -> None:
    timeline = simulate(made(stages, chunks), lambda stage, task: 1.0, overlap=overlap)
    assert timeline.seconds == 2 * (chunks + stages - 1)
    assert timeline.idle_share == pytest.approx(bubble(stages, chunks), abs=1e-12)
    assert ticked(made(stages, chunks), lambda stage, task: 1.0) == timeline.seconds


def test_backward_may_take_longer() -> None:
    timeline = simulate(made(3, 5), lambda stage, task: 1.0 if task.direction == "forward" else 2.0)
    assert timeline.seconds == 3 * (5 + 2)


def test_one_after_another_where_exact() -> None:
    timeline = simulate(made(3, 4, maker=layer_by_layer), lambda stage, task: 1.0)
    assert timeline.seconds == 2 * 3 * 4


def drawn_times(seed: int, stages: int, chunks: int) -> Any:
    draw = random.Random(seed)
    table = {
        (stage, chunk, way): draw.uniform(0.5, 2)
        for stage in range(stages)
        for chunk in range(chunks)
        for way in ("forward", "backward")
    }
    return lambda stage, task: table[stage, task.chunk, task.direction]


@pytest.mark.parametrize("seed", range(8))
def test_unequal_tasks_follow_the_longest_path(seed: int) -> None:
    stages, chunks = 4, 6
    times = drawn_times(seed, stages, chunks)
    schedule = made(stages, chunks)
    timeline = simulate(schedule, times)
    assert timeline.seconds == pytest.approx(longest_path(times, stages, chunks))
    busiest = max(timeline.busy_s(rank) for rank in range(stages))
    assert (
        busiest < timeline.seconds <= ticked(schedule, times) + 1e-12
    )  # without a barrier it is never slower


def longest_path(times: Any, stages: int, chunks: int) -> float:
    """By recurrence over (stage, chunk), forward and then backward."""
    done: dict[tuple[int, int], float] = {}
    for chunk in range(chunks):
        for stage in range(stages):
            before = max(done.get((stage - 1, chunk), 0.0), done.get((stage, chunk - 1), 0.0))
            done[stage, chunk] = before + times(stage, Task(chunk, "forward", 0, 1, 0))
    back: dict[tuple[int, int], float] = {}
    for chunk in reversed(range(chunks)):
        for stage in reversed(range(stages)):
            before = max(
                back.get((stage + 1, chunk), 0.0), back.get((stage, chunk + 1), 0.0), done[stage, chunks - 1]
            )
            back[stage, chunk] = before + times(stage, Task(chunk, "backward", 0, 1, 0))
    return back[0, 0]


def test_messages_hide_behind_tasks_where_they_overlap() -> None:
    schedule = made(2, 6)
    free = simulate(schedule, lambda stage, task: 1.0).seconds
    hidden = simulate(schedule, lambda stage, task: 1.0, lambda stage, task: 0.9).seconds
    held = simulate(schedule, lambda stage, task: 1.0, lambda stage, task: 0.9, overlap=False).seconds
    assert hidden == pytest.approx(free + 2 * 0.9)  # the first rows forward and the last gradients
    assert held > hidden + 5 * 0.9


def test_a_slow_link_sets_the_pace() -> None:
    seconds = simulate(made(2, 10), lambda stage, task: 1.0, lambda stage, task: 3.0).seconds
    assert seconds == 2 * (1 + 3 * 10 + 1)


def test_ways_wait_for_the_slowest_of_them() -> None:
    schedule = made(2, 6, ways=2)
    even = simulate(schedule, lambda stage, task: 1.0)
    uneven = simulate(schedule, lambda stage, task: 2.0 if task.chunk == 5 else 1.0)
    assert even.seconds == 2 * (3 + 1)
    assert uneven.seconds == even.seconds + 2 * 2  # chunk 5 is last: both stages wait for it, both ways
    assert even.num_ranks == 4


def test_drawing_shows_who_works_when() -> None:
    lines = simulate(made(2, 2), lambda stage, task: 1.0).drawing(6).splitlines()
    assert lines == ["  0 |01  ba|", "  1 | 01ba |"]


def test_what_cannot_end_is_refused() -> None:
    schedule = made(2, 2)
    cut = Schedule(schedule.layout, schedule.bounds, (schedule.lanes[0], ()))
    for overlap in (True, False):
        with pytest.raises(InputError, match="rank 0"):
            simulate(cut, lambda stage, task: 1.0, overlap=overlap)


def test_the_authors_16_epochs() -> None:
    """Fed with their times for computing, messages and the rest: within 15 %, and as much faster than graph parallel."""
    gains = []
    for case in logged.CASES:
        found = logged.replayed(case)
        assert found == pytest.approx(case.epoch_ms, rel=0.15), case
        gains.append(case.graph_parallel_ms / found)
    assert sum(gain < 1 for gain in gains) == 4  # Physics is slower, as it was
    assert math.exp(sum(map(math.log, gains)) / 16) >= 1.41
