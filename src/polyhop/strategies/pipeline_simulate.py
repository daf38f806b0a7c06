"""How long an epoch of a pipeline takes: its schedule played through with a time for every task and message.

What is assumed:

    simulate   a rank does one thing at a time; a message leaves when its sender gets to it, one after another on each link;
               with ``overlap`` a sender goes on at once and only receivers wait, without it both ends are held up; ways of a
               stage begin a task together and end it with the slowest
    ticked     all ranks begin a tick together and end it with the slowest: messages first, then tasks (as published)

Times are the caller's: measured task by task, or from a formula. ``bubble``: what equal tasks and free messages leave idle.

Legend: S stages, K chunks of a way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from polyhop.errors import InputError
from polyhop.strategies.pipeline_schedule import Action, Schedule, Task

__all__ = ["Span", "Timeline", "bubble", "simulate", "ticked"]

TaskTime = Callable[[int, Task], float]
"""(stage, task) -> seconds it computes, with nobody to wait for."""

MessageTime = Callable[[int, Task], float]
"""(stage of the sender, task whose result is sent) -> seconds on the link."""


@dataclass(frozen=True)
class Span:
    """One action in time."""

    rank: int
    action: Action
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class Timeline:
    """An epoch that was played through."""

    num_ranks: int
    spans: tuple[Span, ...]
    seconds: float

    def busy_s(self, rank: int) -> float:
        """Seconds in which a rank computes."""
        return sum(
            span.stop_s - span.start_s
            for span in self.spans
            if span.rank == rank and span.action.kind == "compute"
        )

    @property
    def idle_share(self) -> float:
        """Of all ranks' time, what they do not compute in."""
        if not self.seconds:
            return 0.0
        return 1 - sum(self.busy_s(rank) for rank in range(self.num_ranks)) / (self.num_ranks * self.seconds)

    def drawing(self, width: int = 100) -> str:
        """A line of text for each rank: the last digit of a chunk where it computes (forward below, backward above)."""
        scale = width / self.seconds if self.seconds else 0.0
        lines = []
        for rank in range(self.num_ranks):
            cells = [" "] * width
            for span in self.spans:
                if span.rank == rank and span.action.kind == "compute" and span.action.task.chunk is not None:
                    mark = _MARKS[span.action.task.direction][span.action.task.chunk % 10]
                    start = int(span.start_s * scale)
                    for at in range(start, min(width, max(start + 1, int(span.stop_s * scale)))):
                        cells[at] = mark
            lines.append(f"{rank:3} |{''.join(cells)}|")
        return "\n".join(lines)


_MARKS = {"forward": "0123456789", "backward": "abcdefghij"}


def bubble(num_stages: int, num_chunks: int) -> float:
    """Share of time that stages of equal tasks stand idle while the pipeline fills and drains."""
    return (num_stages - 1) / (num_chunks + num_stages - 1)


def simulate(
    schedule: Schedule,
    task_s: TaskTime,
    message_s: MessageTime = lambda stage, task: 0.0,
    *,
    overlap: bool = True,
) -> Timeline:
    """Play a schedule through; InputError if it cannot end."""
    return _Played(schedule, task_s, message_s, overlap).timeline()


class _Played:
    def __init__(self, schedule: Schedule, task_s: TaskTime, message_s: MessageTime, overlap: bool) -> None:
        self.schedule, self.task_s, self.message_s, self.overlap = schedule, task_s, message_s, overlap
        self.at = [0] * schedule.layout.num_ranks
        self.free = [0.0] * schedule.layout.num_ranks  # when a rank can begin its next action
        self.link_free: dict[tuple[int, int], float] = {}
        self.arrives: dict[tuple[int, Action], float] = {}  # of messages that left, by receiver
        self.spans: list[Span] = []

    def timeline(self) -> Timeline:
        """Ranks go as far as they can, in turn; times do not depend on the turns: each only waits for what it needs."""
        num_ranks = self.schedule.layout.num_ranks
        moved = True
        while moved:
            moved = False
            for rank in range(num_ranks):
                while (action := self._now(rank)) is not None and self._does(rank, action):
                    moved = True
        stuck = [f"rank {rank} at {action}" for rank in range(num_ranks) if (action := self._now(rank))]
        if stuck:
            raise InputError(f"the schedule cannot end, these would wait for ever: {'; '.join(stuck[:8])}")
        seconds = max((span.stop_s for span in self.spans), default=0.0)
        return Timeline(
            num_ranks, tuple(sorted(self.spans, key=lambda span: (span.start_s, span.rank))), seconds
        )

    def _now(self, rank: int) -> Action | None:
        lane = self.schedule.lanes[rank]
        return lane[self.at[rank]] if self.at[rank] < len(lane) else None

    def _end(self, rank: int, action: Action, start_s: float, stop_s: float) -> None:
        self.spans.append(Span(rank, action, start_s, stop_s))
        self.free[rank] = stop_s
        self.at[rank] += 1

    def _does(self, rank: int, action: Action) -> bool:
        """Do it, if what it waits for has happened."""
        if action.kind == "compute":
            return self._computes(rank, action)
        assert action.peer is not None, "messages have two ends"
        if not self.overlap:
            return self._meets(rank, action, action.peer)
        if action.kind == "send":
            link = rank, action.peer
            start = max(self.free[rank], self.link_free.get(link, 0.0))
            self.link_free[link] = start + self.message_s(self.schedule.layout.stage(rank), action.task)
            self.arrives[action.peer, Action("receive", action.task, rank)] = self.link_free[link]
            self._end(rank, action, self.free[rank], self.free[rank])
            return True
        arrival = self.arrives.get((rank, action))
        if arrival is None:
            return False
        self._end(rank, action, self.free[rank], max(self.free[rank], arrival))
        return True

    def _computes(self, rank: int, action: Action) -> bool:
        stage = self.schedule.layout.stage(rank)
        team = self.schedule.layout.team(stage)
        nows = [self._now(each) for each in team]
        if any(
            now is None or now.kind != "compute" or _meeting(now.task) != _meeting(action.task)
            for now in nows
        ):
            return False
        start = max(self.free[each] for each in team)
        takes = max(
            self.task_s(stage, now.task) for now in nows if now is not None and now.task.chunk is not None
        )
        for each, now in zip(team, nows, strict=True):
            assert now is not None
            self._end(each, now, start, start + takes)
        return True

    def _meets(self, rank: int, action: Action, peer: int) -> bool:
        """Send and receive at once, both ends held up."""
        kind = "receive" if action.kind == "send" else "send"
        other = Action(kind, action.task, rank)  # type: ignore[arg-type]
        if self._now(peer) != other:
            return False
        sender = rank if action.kind == "send" else peer
        start = max(self.free[rank], self.free[peer])
        stop = start + self.message_s(self.schedule.layout.stage(sender), action.task)
        self._end(rank, action, start, stop)
        self._end(peer, other, start, stop)
        return True


def _meeting(task: Task) -> tuple[object, ...]:
    return task.tick, task.direction, task.first, task.stop


def ticked(schedule: Schedule, task_s: TaskTime, message_s: MessageTime = lambda stage, task: 0.0) -> float:
    """Seconds of a fill-drain epoch in which all ranks keep step: every tick lasts as long as its slowest rank.

    In a tick each rank gets the rows of its next chunk while those of the one before leave, then computes.
    """
    layout, total = schedule.layout, 0.0
    for direction in ("forward", "backward"):
        ticks: dict[int, list[tuple[int, Task]]] = {}
        for rank in range(layout.num_ranks):
            stage = layout.stage(rank)
            depth = stage if direction == "forward" else layout.num_stages - 1 - stage
            for place, task in enumerate(schedule.tasks(rank, direction)):
                ticks.setdefault(place + depth, []).append((stage, task))
        first = 0 if direction == "forward" else layout.num_stages - 1
        back = -1 if direction == "forward" else 1
        for tasks in ticks.values():
            real = [(stage, task) for stage, task in tasks if task.chunk is not None]
            total += max((task_s(stage, task) for stage, task in real), default=0.0)
            total += max(
                (message_s(stage + back, task) for stage, task in real if stage != first), default=0.0
            )
    return total
