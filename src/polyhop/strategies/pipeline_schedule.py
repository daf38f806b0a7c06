"""The schedule of a pipeline's epoch as a value: who computes, sends and receives what, in which order.

Layers are cut into stages, the graph into chunks. A rank's *lane* is the list of its actions, each done when the one before
it is. Three schedules are made here; ``pipeline_check`` holds any to what dependent chunks need:

    fill_drain       chunk by chunk through all layers of a stage; backward in reverse order of chunks
    layer_by_layer   all chunks through one layer, then the next: every row that is read is of this step (exact)
    grouped          between the two: groups of chunks, each layer by layer inside a stage, as larger chunks would be

A chunk reads rows of chunks before it as they are, and of those after it as they were. So its gradient is complete only when
all chunks that read it have gone backward, and no order of a usual pipeline (1F1B, interleaved) will do.

Several *ways* split the chunks between them: ranks way 0 .. D-1 of a stage work at the same place of their orders, tick by
tick, and exchange rows before every layer. Ranks of a stage are neighbours, so that what they exchange stays on a host.

    rank 0 (stage 0)   F2 F2>1 F0 F0>1 ... 1>B0 B0 1>B2 B2
    rank 1 (stage 1)   0>F2 F2 0>F0 F0 ... B0 B0>0 B2 B2>0

Legend: S stages, D ways, K chunks, L layers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from polyhop.errors import ConfigError, InputError
from polyhop.kernels.keys import Key, Purpose, fold

__all__ = [
    "ORDERS",
    "Action",
    "Direction",
    "Layout",
    "Schedule",
    "Task",
    "chunk_order",
    "fill_drain",
    "grouped",
    "layer_by_layer",
    "split_ways",
]

Direction = Literal["forward", "backward"]

ORDERS = ("shuffled", "paired", "fixed")
"""Of chunks: drawn anew every epoch; drawn every second epoch and reversed in between; as they are numbered."""


@dataclass(frozen=True)
class Layout:
    """Which rank is which stage and way."""

    num_stages: int
    num_ways: int = 1

    def __post_init__(self) -> None:
        if self.num_stages < 1 or self.num_ways < 1:
            raise ConfigError(
                f"{self.num_stages} stages x {self.num_ways} ways: expected at least one of each"
            )

    @classmethod
    def of(cls, num_ranks: int, num_ways: int) -> Layout:
        """So many ranks in stages of ``num_ways``."""
        if num_ways < 1 or num_ranks % num_ways:
            raise ConfigError(
                f"{num_ranks} ranks cannot be laid out in stages of {num_ways} ways: give a divisor of {num_ranks}"
            )
        return cls(num_ranks // num_ways, num_ways)

    @property
    def num_ranks(self) -> int:
        return self.num_stages * self.num_ways

    def rank(self, stage: int, way: int = 0) -> int:
        return self.num_ways * stage + way

    def stage(self, rank: int) -> int:
        return rank // self.num_ways

    def way(self, rank: int) -> int:
        return rank % self.num_ways

    def team(self, stage: int) -> range:
        """Ranks of a stage: they exchange rows, and sum their gradients."""
        return range(self.num_ways * stage, self.num_ways * (stage + 1))


@dataclass(frozen=True)
class Task:
    """Some layers of one chunk, one way. ``chunk`` None: nothing of its own, but it meets the other ways."""

    chunk: int | None
    direction: Direction
    first: int  # layer
    stop: int
    tick: int  # place in the order: ways of a stage do tasks of one tick together

    def __str__(self) -> str:
        chunk = "-" if self.chunk is None else self.chunk
        return f"{self.direction[0].upper()}{chunk}[{self.first}:{self.stop}]@{self.tick}"


@dataclass(frozen=True)
class Action:
    """One thing that a rank does. A message is named by the task whose result it carries, and by the other rank."""

    kind: Literal["compute", "send", "receive"]
    task: Task
    peer: int | None = None

    def __str__(self) -> str:
        if self.kind == "compute":
            return str(self.task)
        return f"{self.task}>{self.peer}" if self.kind == "send" else f"{self.peer}>{self.task}"


@dataclass(frozen=True)
class Schedule:
    """One epoch. ``lanes[r]`` are rank r's actions, ``bounds`` the S + 1 layers where stages begin and end."""

    layout: Layout
    bounds: tuple[int, ...]
    lanes: tuple[tuple[Action, ...], ...]

    @property
    def num_layers(self) -> int:
        return self.bounds[-1]

    def span(self, stage: int) -> tuple[int, int]:
        """First layer of a stage, and the one after its last."""
        return self.bounds[stage], self.bounds[stage + 1]

    def tasks(self, rank: int, direction: Direction | None = None) -> list[Task]:
        """What a rank computes, in order."""
        return [
            action.task
            for action in self.lanes[rank]
            if action.kind == "compute" and direction in (None, action.task.direction)
        ]

    def text(self) -> str:
        """All of it, one line a rank; ``parse`` reads it."""
        head = f"stages {self.layout.num_stages} ways {self.layout.num_ways} layers {' '.join(map(str, self.bounds))}"
        return "\n".join([head, *(" ".join(map(str, lane)) for lane in self.lanes)])

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """What ``text`` gave."""
        head, *lines = text.splitlines()
        found = re.fullmatch(r"stages (\d+) ways (\d+) layers ((?:\d+ ?)+)", head)
        if found is None:
            raise InputError(
                f"schedule: expected 'stages S ways D layers 0 ... L' in the first line, got {head!r}"
            )
        lanes = tuple(tuple(_action(word) for word in line.split()) for line in lines)
        return cls(Layout(int(found[1]), int(found[2])), tuple(map(int, found[3].split())), lanes)


_WORD = re.compile(r"(?:(\d+)>)?([FB])(\d+|-)\[(\d+):(\d+)\]@(\d+)(?:>(\d+))?")


def _action(word: str) -> Action:
    found = _WORD.fullmatch(word)
    if found is None or (found[1] and found[7]):
        raise InputError(
            f"schedule: cannot read {word!r}; expected such as F3[0:4]@1, F3[0:4]@1>2 or 0>F3[0:4]@1"
        )
    chunk = None if found[3] == "-" else int(found[3])
    direction: Direction = "forward" if found[2] == "F" else "backward"
    task = Task(chunk, direction, int(found[4]), int(found[5]), int(found[6]))
    if found[7]:
        return Action("send", task, int(found[7]))
    return Action("receive", task, int(found[1])) if found[1] else Action("compute", task)


def split_ways(num_chunks: int, num_ways: int) -> list[range]:
    """Chunks of each way: runs of consecutive ones, as even as can be."""
    if num_chunks < num_ways:
        raise ConfigError(f"{num_chunks} chunks cannot be shared by {num_ways} ways: give at least one each")
    bounds = [way * num_chunks // num_ways for way in range(num_ways + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def chunk_order(chunks: Sequence[int], seed: int, epoch: int, kind: str = "shuffled") -> tuple[int, ...]:
    """The order of an epoch: a function of the seed, so every rank knows it without a message.

    Every pair of chunks is as likely in one order as in the other; "paired" has each once in two epochs.
    """
    if kind not in ORDERS:
        raise ConfigError(f"order of chunks {kind!r}: expected one of {', '.join(ORDERS)}")
    if kind == "fixed":
        return tuple(chunks)
    drawn = epoch - epoch % 2 if kind == "paired" else epoch
    key = Key(seed, drawn).at(Purpose.SHUFFLE)
    order = tuple(sorted(chunks, key=lambda chunk: fold(key, chunk)))
    return order[::-1] if drawn != epoch else order


def fill_drain(layout: Layout, bounds: Sequence[int], orders: Sequence[Sequence[int]]) -> Schedule:
    """Every chunk forward through all stages, in the order of its way; then backward, in reverse. ``orders[w]``: way w's."""
    _check_bounds(layout, bounds, orders)
    ticks = max(len(order) for order in orders)
    lanes = []
    for rank in range(layout.num_ranks):
        stage, order = layout.stage(rank), orders[layout.way(rank)]
        lane: list[Action] = []
        for tick in range(ticks):
            chunk = order[tick] if tick < len(order) else None
            lane += _through(layout, bounds, rank, stage, Task(chunk, "forward", *_span(bounds, stage), tick))
        for tick in reversed(range(ticks)):
            chunk = order[tick] if tick < len(order) else None
            lane += _through(
                layout, bounds, rank, stage, Task(chunk, "backward", *_span(bounds, stage), tick)
            )
        lanes.append(tuple(lane))
    return Schedule(layout, tuple(bounds), tuple(lanes))


def layer_by_layer(layout: Layout, bounds: Sequence[int], orders: Sequence[Sequence[int]]) -> Schedule:
    """All chunks through a layer, then through the next: exact, and stages work one after another."""
    _check_bounds(layout, bounds, orders)
    return grouped(layout, bounds, orders, max(len(order) for order in orders))


def grouped(
    layout: Layout, bounds: Sequence[int], orders: Sequence[Sequence[int]], together: int
) -> Schedule:
    """Groups of ``together`` chunks, one after another in the order, through all stages: inside one all chunks of a group
    pass a layer before any goes on, so that they read one another's rows of this step. Then backward, in reverse.
    """
    _check_bounds(layout, bounds, orders)
    ticks = max(len(order) for order in orders)
    groups = [range(start, min(start + together, ticks)) for start in range(0, ticks, together)]
    lanes = []
    for rank in range(layout.num_ranks):
        stage, order = layout.stage(rank), orders[layout.way(rank)]
        first, stop = _span(bounds, stage)
        lane: list[Action] = []
        through = [("forward", group) for group in groups] + [("backward", group) for group in groups[::-1]]
        for direction, group in through:
            is_up = direction == "forward"
            listed = [
                [
                    Task(
                        order[t] if t < len(order) else None,
                        "forward" if is_up else "backward",
                        layer,
                        layer + 1,
                        t,
                    )
                    for t in (group if is_up else reversed(group))
                ]
                for layer in (range(first, stop) if is_up else reversed(range(first, stop)))
            ]
            lane += [
                action
                for task in listed[0]
                for action in _received(layout, bounds, rank, stage, task, step=1)
            ]
            lane += [Action("compute", task) for tasks in listed for task in tasks]
            lane += [action for task in listed[-1] for action in _sent(layout, rank, stage, task)]
        lanes.append(tuple(lane))
    return Schedule(layout, tuple(bounds), tuple(lanes))


def _span(bounds: Sequence[int], stage: int) -> tuple[int, int]:
    return bounds[stage], bounds[stage + 1]


def _check_bounds(layout: Layout, bounds: Sequence[int], orders: Sequence[Sequence[int]]) -> None:
    is_cut = len(bounds) == layout.num_stages + 1 and bounds[0] == 0
    if not is_cut or any(stop <= start for start, stop in pairwise(bounds)):
        raise InputError(
            f"layers {list(bounds)} do not cut a model into {layout.num_stages} stages: expected {layout.num_stages + 1} "
            "ascending numbers from 0, at least one layer a stage"
        )
    if len(orders) != layout.num_ways or not all(orders):
        raise InputError(
            f"{len(orders)} orders of chunks for {layout.num_ways} ways: give each at least one chunk"
        )


def _through(layout: Layout, bounds: Sequence[int], rank: int, stage: int, task: Task) -> list[Action]:
    """Receive, compute, send on."""
    received = _received(layout, bounds, rank, stage, task, step=None)
    return [*received, Action("compute", task), *_sent(layout, rank, stage, task)]


def _received(
    layout: Layout, bounds: Sequence[int], rank: int, stage: int, task: Task, step: int | None
) -> list[Action]:
    """What a task needs from the stage before it (behind it, backward). ``step``: layers of that one's last task."""
    source = stage - 1 if task.direction == "forward" else stage + 1
    if task.chunk is None or not 0 <= source < layout.num_stages:
        return []
    first, stop = _span(bounds, source)
    if step is not None:
        first, stop = (stop - step, stop) if task.direction == "forward" else (first, first + step)
    made = Task(task.chunk, task.direction, first, stop, task.tick)
    return [Action("receive", made, layout.rank(source, layout.way(rank)))]


def _sent(layout: Layout, rank: int, stage: int, task: Task) -> list[Action]:
    to = stage + 1 if task.direction == "forward" else stage - 1
    if task.chunk is None or not 0 <= to < layout.num_stages:
        return []
    return [Action("send", task, layout.rank(to, layout.way(rank)))]
