"""Schedules run dry: what cannot end, is left out, or lets a gradient go before it is complete is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polyhop.errors import InputError
from polyhop.strategies.pipeline_check import check, dry_run
from polyhop.strategies.pipeline_schedule import (
    Action,
    Layout,
    Schedule,
    Task,
    chunk_order,
    fill_drain,
    layer_by_layer,
    split_ways,
)

MAKERS = {"fill_drain": fill_drain, "layer_by_layer": layer_by_layer}


def made(maker: str, stages: int, ways: int, chunks: int, layers_each: int = 2, epoch: int = 0) -> Schedule:
    orders = [chunk_order(part, 5, epoch) for part in split_ways(chunks, ways)]
    bounds = [layers_each * stage for stage in range(stages + 1)]
    return MAKERS[maker](Layout(stages, ways), bounds, orders)


SHAPES = [
    (1, 1, 1),
    (1, 1, 5),
    (2, 1, 1),
    (2, 1, 4),
    (3, 1, 2),
    (4, 1, 9),
    (2, 2, 4),
    (3, 2, 5),
    (2, 3, 7),
    (1, 4, 4),
]


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_schedules_end_and_are_legal(maker: str, shape: tuple[int, int, int]) -> None:
    schedule = made(maker, *shape)
    check(schedule)
    assert len(dry_run(schedule)) == sum(len(lane) for lane in schedule.lanes)


def changed(schedule: Schedule, rank: int, lane: list[Action]) -> Schedule:
    lanes = [*schedule.lanes]
    lanes[rank] = tuple(lane)
    return replace(schedule, lanes=tuple(lanes))


def test_a_schedule_that_waits_for_ever_is_found() -> None:
    schedule = made("fill_drain", 2, 1, 3)
    lane = [*schedule.lanes[1]]
    sends = [at for at, action in enumerate(lane) if action.kind == "send"]
    lane[sends[0]], lane[sends[1]] = lane[sends[1]], lane[sends[0]]  # the peer expects the other first
    with pytest.raises(InputError, match=r"rank 0 at .*rank 1 at"):
        dry_run(changed(schedule, 1, lane))
    with pytest.raises(InputError, match="rank 0 at"):
        dry_run(changed(schedule, 1, []))


def test_usual_backward_order_is_refused() -> None:
    """First in, first out, as GPipe does it: chunk 0's gradient would leave before chunk 1 has added to it."""
    task = Task(0, "forward", 0, 2, 0)
    tasks = [replace(task, chunk=chunk, tick=chunk) for chunk in range(2)]
    lane = [*tasks, *(replace(each, direction="backward") for each in tasks)]
    schedule = Schedule(Layout(1), (0, 2), (tuple(Action("compute", each) for each in lane),))
    dry_run(schedule)
    with pytest.raises(InputError, match="not complete"):
        check(schedule)


def test_gradients_that_leave_a_stage_early_are_refused() -> None:
    schedule = layer_by_layer(Layout(2), [0, 1, 2], [[0, 1]])
    check(schedule)
    lane = [*schedule.lanes[1]]
    send = next(at for at, action in enumerate(lane) if action.kind == "send")
    lane.insert(send - 1, lane.pop(send))  # chunk 1's gradient leaves before chunk 0 has gone backward
    with pytest.raises(InputError, match="not complete"):
        check(changed(schedule, 1, lane))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lane: lane[:-1], "goes backward 0 times"),
        (lambda lane: [*lane, lane[-1]], "goes backward 2 times"),
        (
            lambda lane: [replace(each, task=replace(each.task, stop=3)) for each in lane],
            "holds layers 0 to 1",
        ),
        (lambda lane: lane[::-1], "up its layers and down again"),
    ],
)
def test_what_is_left_out_or_done_twice_is_found(change: object, message: str) -> None:
    assert callable(change)
    schedule = made("fill_drain", 1, 1, 2)
    with pytest.raises(InputError, match=message):
        check(changed(schedule, 0, change([*schedule.lanes[0]])))
