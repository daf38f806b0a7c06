"""Whether a pipeline's schedule can be run, and computes what dependent chunks need: found by running it dry."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from polyhop.errors import InputError
from polyhop.strategies.pipeline_schedule import Action, Direction, Layout, Schedule, Task

__all__ = ["check", "dry_run"]


def dry_run(schedule: Schedule) -> list[tuple[int, Action]]:
    """Every action with its rank, in an order in which they can happen; InputError where some would wait for ever.

    Nothing is buffered: a send ends when its receiver takes it. Ways of a stage compute a tick together. So what passes
    here passes with any buffers.
    """
    return [one for together in _run(schedule) for one in together]


def _run(schedule: Schedule) -> list[list[tuple[int, Action]]]:
    """What happens together, one after another."""
    lanes = schedule.lanes
    at, done = [0] * len(lanes), list[list[tuple[int, Action]]]()

    def now(rank: int) -> Action | None:
        return lanes[rank][at[rank]] if at[rank] < len(lanes[rank]) else None

    moved = True
    while moved:
        moved = False
        for rank in range(len(lanes)):
            while (together := _ready(schedule.layout, rank, now)) is not None:
                done.append([(each, lanes[each][at[each]]) for each in together])
                for each in together:
                    at[each] += 1
                moved = True
    stuck = [f"rank {rank} at {now(rank)}" for rank in range(len(lanes)) if now(rank) is not None]
    if stuck:
        raise InputError(f"the schedule cannot end, these would wait for ever: {'; '.join(stuck[:8])}")
    return done


def _ready(layout: Layout, rank: int, now: Callable[[int], Action | None]) -> Sequence[int] | None:
    """The ranks whose actions happen together now, this one's among them; None if it must wait."""
    action = now(rank)
    if action is None:
        return None
    if action.kind == "compute":
        team = layout.team(layout.stage(rank))
        met = {None if (each := now(other)) is None else (each.kind, *_meeting(each.task)) for other in team}
        return team if len(met) == 1 else None
    assert action.peer is not None, "messages have two ends"
    wanted = Action("receive" if action.kind == "send" else "send", action.task, rank)
    return (rank, action.peer) if now(action.peer) == wanted else None


def _meeting(task: Task) -> tuple[object, ...]:
    return task.tick, task.direction, task.first, task.stop


def check(schedule: Schedule) -> None:
    """InputError unless the schedule ends, computes everything once and where it belongs, and no gradient leaves early."""
    steps = _run(schedule)
    _check_cover(schedule)
    times = _Times(schedule, steps)
    _check_causes(schedule, times)
    for stage in range(schedule.layout.num_stages):
        for layer in range(*schedule.span(stage)):
            for chunk in times.chunks if layer else []:  # layer 0 reads what does not change in an epoch
                _check_complete(times, stage, layer, chunk, is_first=layer == schedule.bounds[stage])


class _Times:
    """When things happen in a dry run."""

    def __init__(self, schedule: Schedule, steps: Sequence[Sequence[tuple[int, Action]]]) -> None:
        self.computed: dict[tuple[int, int, Direction], int] = {}  # (chunk, layer, direction)
        self.arrived: dict[tuple[int, int], int] = {}  # rows of a chunk, at a stage
        self.left: dict[tuple[int, int], int] = {}  # gradients of a chunk's rows, from a stage
        for time, together in enumerate(steps):
            for rank, action in together:
                self._note(time, schedule.layout.stage(rank), action)
        self.chunks = sorted({chunk for chunk, _, _ in self.computed})

    def _note(self, time: int, stage: int, action: Action) -> None:
        task, chunk = action.task, action.task.chunk
        if chunk is None:
            return
        if action.kind == "compute":
            for layer in range(task.first, task.stop):
                self.computed[chunk, layer, task.direction] = time
        elif action.kind == "receive" and task.direction == "forward":
            self.arrived[chunk, stage] = time
        elif action.kind == "send" and task.direction == "backward":
            self.left[chunk, stage] = time


def _check_complete(times: _Times, stage: int, layer: int, chunk: int, *, is_first: bool) -> None:
    """All chunks that read a chunk's rows at a layer have gone backward there before the gradient of the rows is used."""
    if is_first:
        made, used = times.arrived[chunk, stage], times.left[chunk, stage]
    else:
        made, used = (times.computed[chunk, layer - 1, way] for way in ("forward", "backward"))
    for other in times.chunks:
        has_read = other != chunk and times.computed[other, layer, "forward"] > made
        if has_read and times.computed[other, layer, "backward"] > used:
            raise InputError(
                f"chunk {chunk} goes backward below layer {layer} before chunk {other}, which has read its rows: its "
                "gradient is not complete"
            )


def _check_cover(schedule: Schedule) -> None:
    seen: dict[tuple[int, int, Direction], int] = {}
    for rank in range(schedule.layout.num_ranks):
        first, stop = schedule.span(schedule.layout.stage(rank))
        for task in schedule.tasks(rank):
            if task.first < first or task.stop > stop:
                raise InputError(f"rank {rank} computes {task}, and holds layers {first} to {stop - 1}")
            for layer in range(task.first, task.stop):
                if task.chunk is not None:
                    key = (task.chunk, layer, task.direction)
                    seen[key] = seen.get(key, 0) + 1
    chunks = {chunk for chunk, _, _ in seen}
    for chunk in sorted(chunks):
        for layer in range(schedule.num_layers):
            for direction in ("forward", "backward"):
                count = seen.get((chunk, layer, direction), 0)
                if count != 1:
                    raise InputError(
                        f"layer {layer} of chunk {chunk} goes {direction} {count} times, not once"
                    )


def _check_causes(schedule: Schedule, times: _Times) -> None:
    """Layers of a chunk in order, backward after forward. Between stages the messages see to it."""
    for stage in range(schedule.layout.num_stages):
        first, stop = schedule.span(stage)
        for chunk in times.chunks:
            up = [times.computed[chunk, layer, "forward"] for layer in range(first, stop)]
            down = [times.computed[chunk, layer, "backward"] for layer in reversed(range(first, stop))]
            if sorted(up + down) != up + down or up[-1] == down[0]:
                raise InputError(
                    f"stage {stage} does not take chunk {chunk} up its layers and down again in order"
                )
