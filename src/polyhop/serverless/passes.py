"""The passes of intervals: each goes forward through the chain of a model and back, at its own pace.

    dense piece       offered to functions; what comes back is dropped (by key), kept, passed on (AV, and its gradient);
                      those of sparse rows are computed here
    graph operation   rows are published (SC); once those that the interval reads are there, gathered (GA). Backward:
                      gradients of what was read are given back; once all readers of the interval's rows have given theirs,
                      they are summed (``lending``). Attention weights may be a task between reading and gathering, and
                      their gradient one before giving back (AE)

A place is that of a segment in the chain; steps count the places forward, then back. Nothing here waits, and whatever takes
long is not done at once: tasks are offered, and work of the server's own is said to be ready, to be done by ``run``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyhop.kernels.keys import Key
from polyhop.serverless import wire
from polyhop.serverless.drops import Drops
from polyhop.serverless.edge_tasks import EdgeAttention
from polyhop.serverless.graph_ops import GraphOp
from polyhop.serverless.intervals import Interval, Intervals
from polyhop.serverless.lending import Lending, as_tensor
from polyhop.serverless.mail import Arrived, Done, Work
from polyhop.serverless.segments import Dense, Graph, Segment
from polyhop.serverless.states import State
from polyhop.serverless.stream import cut
from polyhop.serverless.tasks import FUSES, SAVES, flat
from polyhop.serverless.tiles import backward, forward
from polyhop.serverless.versions import Ticket, Versions
from polyhop.serverless.wire import TaskKey

__all__ = ["Calls", "Passes", "Settings"]


@dataclass(frozen=True)
class Settings:
    """How a server works."""

    seed: int
    drop_rate: float = 0.0
    staleness: int | None = None
    last_epoch: int | None = None  # none is begun after it
    fuses: bool = True  # the last piece and its gradient are one task
    remakes: bool = True  # gradients compute again what forward computed, instead of having it kept and sent
    streams: bool = True  # rows of large tasks go in several messages
    edge_functions: bool = False  # attention weights are computed by functions
    dtype: torch.dtype = torch.float32
    pipe_epochs: int = 0  # the first and the last so many are run as ``pipe``, whatever the staleness
    num_groups: int = 1  # of intervals, each with a step of the weights of its own
    extrapolates: bool = False  # old rows, gradients and weights are taken to where they were heading


@dataclass(frozen=True)
class Calls:
    """What passes tell their server."""

    offer: Callable[[TaskKey, Work], None]  # a task for functions
    can_run: Callable[[int, int, int], None]  # (interval, its epoch, step): ``run`` may be called
    ended: Callable[
        [int, float, Mapping[str, Sequence[Tensor]]], None
    ]  # (interval, loss, gradients of weights)


class Passes:
    """``fixed``: rows that no epoch changes, by interval and name: inputs, labels."""

    def __init__(
        self,
        chain: Sequence[Segment],
        ops: Mapping[int, GraphOp],
        intervals: Intervals,
        fixed: Mapping[int, Mapping[str, Any]],
        versions: Versions,
        lending: Lending,
        settings: Settings,
        calls: Calls,
    ) -> None:
        self._chain, self._ops, self._fixed = list(chain), ops, fixed
        self._versions, self._lending, self._settings, self._calls = versions, lending, settings, calls
        self._by_number: dict[int, Interval] = {each.number: each for each in intervals}
        self._states = {number: State() for number in self._by_number}
        is_stale = settings.staleness is not None
        self._drops = Drops(self._chain, ops, settings.seed, settings.drop_rate, is_stale)

    def begin(self, number: int, epoch: int, is_ahead: bool = False) -> None:
        """An interval begins an epoch, whose weights are not there yet where it ``is_ahead``."""
        has_one_step = self._settings.num_groups == 1
        version = Ticket(self._versions, is_ahead=is_ahead and has_one_step and self._settings.extrapolates)
        if has_one_step:
            int(version)  # now: all intervals of an epoch have the same
        self._states[number] = State(epoch, version, dict(self._fixed[number]))
        self._forward(number, 0)

    def at(self, step: int) -> tuple[int, bool]:
        """(place, backward?) of a step."""
        is_backward = step >= len(self._chain)
        return (self._step(step, True) if is_backward else step), is_backward

    def _step(self, place: int, is_backward: bool) -> int:
        return 2 * len(self._chain) - 1 - place if is_backward else place

    def reads(self, number: int, step: int) -> list[int]:
        """Epochs of the rows of others that an interval would read, if a step that can run were run now."""
        place, is_backward = self.at(step)
        if isinstance(self._chain[place], Dense):
            return []
        if is_backward and self._states[number].kept.get(place) is not True:
            return []  # gives back: reads nothing of others
        return self._lending.tags(number, place, is_backward)

    def run(self, number: int, step: int) -> None:
        """Do what was said to be ready."""
        place, is_backward = self.at(step)
        if isinstance(self._chain[place], Dense):
            self._compute(number, place, is_backward)
        elif not is_backward:
            self._gather(number, place)
        elif self._states[number].kept.get(place) is True:
            self._collect(number, place)
        else:
            self._give_back(number, place)

    def _can_run(self, number: int, place: int, is_backward: bool) -> None:
        self._calls.can_run(number, self._states[number].epoch, self._step(place, is_backward))

    def arrived(self, event: Arrived) -> None:
        """Rows or sums from another server."""
        self._lending.take(event.header, event.arrays)
        self._look_all(event.header.table, isinstance(event.header, wire.Sums))

    def _look_all(self, place: int, is_backward: bool) -> None:
        """Something came: intervals that wait for it may go on."""
        for number in self._lending.released(place, is_backward):
            self._can_run(number, place, is_backward)
            if is_backward:
                self._states[number].kept[place] = True  # what it read has been given back

    # Dense pieces

    def _forward(self, number: int, place: int) -> None:
        """Go on at a place of the chain."""
        segment, state = self._chain[place], self._states[number]
        if isinstance(segment, Dense) and not segment.program.calls:  # dropout alone
            for name in segment.program.outputs:
                self._keep(number, place, name, state.values[name])
            self._forward(number, place + 1)
        elif isinstance(segment, Dense) and segment.stays:
            self._can_run(number, place, False)
        elif isinstance(segment, Dense):
            is_last = place == len(self._chain) - 1
            options: dict[str, float] = {}
            wants: tuple[str, ...] = ()
            if is_last and self._settings.fuses:
                options[FUSES], wants = 1, _wants(segment)
            elif not self._settings.remakes:
                options[SAVES] = 1
            self._offer(number, place, False, state.rows(segment), wants, options)
        elif not segment.has_gradient:
            state.values[segment.gives] = self._fixed[number][segment.gives]
            self._forward(number, place + 1)
        else:
            names = self._ops[place].of_sources
            rows = {name: state.undropped.get(name, state.values[name]) for name in names}
            self._lending.publish(number, place, state.epoch, rows)
            self._lending.wait(number, place, state.epoch, is_backward=False)
            self._look_all(place, False)

    def _offer(
        self,
        number: int,
        place: int,
        is_backward: bool,
        rows: Mapping[str, Any],
        wants: tuple[str, ...] = (),
        options: Mapping[str, float] | None = None,
    ) -> None:
        state = self._states[number]
        key = TaskKey(state.epoch, self._step(place, is_backward), number, place, is_backward)
        version = state.version
        assert version is not None
        has_tiles = isinstance(self._chain[place], Dense)  # edges are needed all at once
        first, *more = cut(rows) if has_tiles and self._settings.streams else [flat(rows)]
        num_rows = self._by_number[number].num_rows

        def weights() -> tuple[dict[str, Any], Mapping[str, Any]]:
            return self._versions.of(place, int(version))

        work = Work(version, first, weights, wants, dict(options or {}), num_rows, tuple(more))
        self._calls.offer(key, work)

    def came_back(self, done: Done) -> None:
        """A dense piece was computed, or attention weights, or gradients of either."""
        number, place = done.key.interval, done.key.piece
        state, segment = self._states[number], self._chain[place]
        if isinstance(segment, Graph):
            self._edges_came_back(done)
            return
        for name, value in done.arrays.items():
            if name.startswith("d:"):  # memory of the result it came in, which nobody else has
                state.weights[name[2:]] = [*state.weights.get(name[2:], []), as_tensor(value)]
        is_last = place == len(self._chain) - 1
        if is_last and not done.key.is_backward:
            state.loss = done.values["loss"]
        if done.key.is_backward or (is_last and self._settings.fuses):
            for name in _wants(segment):
                state.add_grad(name, as_tensor(done.arrays[f"g:{name}"]))
            self._backward(number, place - 1)
            return
        state.kept[place] = {name: value for name, value in done.arrays.items() if name.startswith("s:")}
        if is_last:
            self._offer(number, place, True, state.rows(segment) | state.kept[place], _wants(segment))
            return
        for name in segment.program.outputs:
            self._keep(number, place, name, as_tensor(done.arrays[name]))
        self._forward(number, place + 1)

    def _keep(self, number: int, place: int, name: str, rows: Tensor) -> None:
        """Rows that a dense piece gave, and (where their readers drop units) as they were before dropout."""
        state, segment = self._states[number], self._chain[place]
        assert isinstance(segment, Dense)
        state.values[name] = self._drops.after(segment, self._by_number[number], state.epoch, rows)
        if self._drops.at_read(place + 1):
            state.undropped[name] = rows

    def _compute(self, number: int, place: int, is_backward: bool) -> None:
        """A dense piece that is the server's own: as a function would, but all rows of the interval at once."""
        segment, state = self._chain[place], self._states[number]
        assert isinstance(segment, Dense)
        assert state.version is not None
        _, weights = self._versions.of(place, int(state.version))
        rows, tile = state.rows(segment), max(self._by_number[number].num_rows, 1)
        if is_backward:
            grads = {
                name: state.grads.pop(name).numpy() for name in segment.program.outputs if name in state.grads
            }
            of_rows, of_weights = backward(segment.program, rows, weights, grads, tile)
            found = {f"g:{name}": of_rows[name] for name in _wants(segment)}
            found |= {f"d:{name}": value for name, value in of_weights.items()}
        else:
            found, _ = forward(segment.program, rows, weights, tile)
        self.came_back(Done(TaskKey(state.epoch, place, number, place, is_backward), found, {}))

    def _backward(self, number: int, place: int) -> None:
        """Go back over a place of the chain: gradients of what it gave are there."""
        if place < 0:
            self._end(number)
            return
        segment, state = self._chain[place], self._states[number]
        if isinstance(segment, Graph):
            if not segment.has_gradient:
                self._end(number)
                return
            self._can_run(number, place, True)
            return
        grads = {
            name: self._drops.after(segment, self._by_number[number], state.epoch, state.grads.pop(name))
            for name in segment.program.outputs
            if name in state.grads
        }
        for name, grad in state.undropped_grads.items():
            grads[name] = grads[name] + grad if name in grads else grad
        state.undropped_grads.clear()
        if not segment.program.calls:
            state.grads.update(grads)
            self._backward(number, place - 1)
            return
        if segment.stays:
            state.grads.update(grads)
            self._can_run(number, place, True)
            return
        marked = {f"g:{name}": grad.numpy() for name, grad in grads.items()}
        rows = state.rows(segment) | state.kept.get(place, {}) | marked
        self._offer(number, place, True, rows, _wants(segment))

    def _end(self, number: int) -> None:
        """An interval has ended its epoch."""
        state = self._states[number]
        assert state.version is not None
        state.version.leave()
        self._states[number] = State(state.epoch)
        self._calls.ended(number, state.loss, state.weights)

    # Graph operations

    def _gather(self, number: int, place: int) -> None:
        """What the interval's destinations gather (GA)."""
        interval, state, segment = self._by_number[number], self._states[number], self._chain[place]
        assert isinstance(segment, Graph)
        op, key = self._ops[place], Key(self._settings.seed, state.epoch)
        own = {name: state.values[name] for name in op.of_own}
        if not isinstance(op, EdgeAttention):
            reading = self._lending.read(number, place, state.epoch)
            drop = self._drops.of_sources(interval, place, state.epoch)
            more = {} if drop is None else {"drop": drop}
            state.values[segment.gives], state.kept[place] = op.gather(interval, reading, own, key, **more)
        elif place in state.kept:  # the weights have come back
            state.values[segment.gives] = op.gather(interval, state.kept[place], key)
        else:
            state.kept[place] = op.read(self._lending.read(number, place, state.epoch), own)
            self._offer(number, place, False, op.task(interval, state.kept[place]))
            return
        self._forward(number, place + 1)

    def _edges_came_back(self, done: Done) -> None:
        """Attention weights, by which the interval can gather; or gradients of scores, the last that were missing."""
        number, place = done.key.interval, done.key.piece
        state, op = self._states[number], self._ops[place]
        assert isinstance(op, EdgeAttention)
        if done.key.is_backward:
            scores = (as_tensor(done.arrays[f"g:{name}"]) for name in op.wants)
            self._give(number, place, *op.ended(state.kept.pop(place), *scores))
        else:
            state.kept[place].weights = as_tensor(done.arrays[op.gives])
            self._can_run(number, place, False)

    def _give_back(self, number: int, place: int) -> None:
        """Gradients of the rows that the interval read go to their owners."""
        interval, state, segment = self._by_number[number], self._states[number], self._chain[place]
        assert isinstance(segment, Graph)
        op, grad = self._ops[place], state.grads.pop(segment.gives)
        if isinstance(op, EdgeAttention):
            kept = state.kept[place]
            rows = op.back_task(interval, kept, op.give_back(interval, kept, grad), self._settings.remakes)
            self._offer(number, place, True, rows, op.wants)
            return
        self._give(number, place, *op.give_back(interval, state.kept.pop(place), grad))

    def _give(self, number: int, place: int, read: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """Gradients of the rows of sources to their owners; of the interval's own, where it alone reads them, to itself."""
        state = self._states[number]
        drop = self._drops.of_sources(self._by_number[number], place, state.epoch)
        if drop is not None:
            read = {name: drop(grad) for name, grad in read.items()}
        for name, grad in own.items():
            state.add_grad(name, grad)
        self._lending.give(number, place, state.epoch, read)
        self._lending.wait(number, place, state.epoch, is_backward=True)
        self._look_all(place, True)

    def _collect(self, number: int, place: int) -> None:
        """Sum what readers gave for the interval's rows."""
        state = self._states[number]
        grads = self._lending.collected(number, place, state.epoch)
        del state.kept[place]
        for name, grad in grads.items():
            if self._drops.at_read(place):
                state.undropped_grads[name] = grad
            else:
                state.add_grad(name, grad)
        self._backward(number, place - 1)


def _wants(segment: Dense) -> tuple[str, ...]:
    return tuple(name for name, row in segment.program.rows.items() if row.has_gradient)
