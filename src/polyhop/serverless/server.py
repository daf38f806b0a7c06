"""The graph server: takes every interval of its part through the chain of a model, forward and back, epoch after epoch.

    dense piece       offered to functions; what comes back is dropped (by key), kept, passed on (AV, and its gradient);
                      those of sparse rows are computed here
    graph operation   rows published here and sent to servers that read them (SC); once those that the interval reads are
                      there, gathered (GA). Backward: gradients of what was read go to whoever owns it; once all readers of
                      the interval's rows have given theirs, they are summed. Attention weights may be a task between
                      reading and gathering, and their gradient one before giving back (AE)

Intervals are at different places at the same time, so that functions compute while the server gathers. ``staleness`` None
(``pipe``): an interval gathers when all rows that it reads are of its epoch: the numbers of one process. S >= 0: it
gathers what is there as soon as functions lack work (at once where the server has no time to spare), but begins epoch e
only when no interval anywhere is more than S epochs behind; then rows are at most S + 1 epochs old (checked at every read).
The first epoch of a run is always run as ``pipe``, since before it there is nothing to read; so are the first and the last
``pipe_epochs``: at first weights move too fast for old rows, and what old rows did wrong is put right in the last.

The engine is one thread: it alone touches tables and intervals. The training thread says how far it may go (``go``) and
waits for epochs (``wait``). Gradients of weights are summed in the order of intervals, of all of them or (``num_groups``)
of consecutive ones: weights then change several times an epoch, while intervals of other groups are on their way.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyhop.errors import PolyhopError
from polyhop.kernels import dropout
from polyhop.kernels.keys import Key, Purpose
from polyhop.nn.layer import Layer
from polyhop.serverless import wire
from polyhop.serverless.edge_tasks import EdgeAttention
from polyhop.serverless.graph_ops import Drop, GraphOp, Sum, graph_op
from polyhop.serverless.intervals import Interval, Intervals
from polyhop.serverless.post import Arrived, Broken, Done, Post, Work
from polyhop.serverless.segments import Dense, Graph, Segment
from polyhop.serverless.stream import cut
from polyhop.serverless.tables import Ages, Table
from polyhop.serverless.tasks import FUSES, SAVES, flat
from polyhop.serverless.tiles import backward, forward
from polyhop.serverless.versions import Ticket, Versions
from polyhop.serverless.wire import TaskKey
from polyhop.trace import NO_TRACE, Trace

__all__ = ["Epoch", "Server", "ServerlessError", "Settings", "groups_of"]


_LOOKS_S = 0.01
_PRESSED = 0.5  # share of an epoch in graph operations above which a server does not wait for newer rows
_Ready = tuple[int, int, int, int]
"""(epoch, wave, place, interval) of a graph operation that can run."""


class ServerlessError(PolyhopError):
    """Training with functions cannot go on."""


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
    extrapolates: bool = True  # old rows, gradients and weights are taken to where they were heading


@dataclass
class Epoch:
    """What came of an epoch on this server: of all intervals, or of a group."""

    loss: float = 0.0
    gradients: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class _Go:
    epoch: int  # that is trained now


@dataclass
class _State:
    """Where an interval is."""

    epoch: int = -1
    version: Ticket | None = None
    values: dict[str, Any] = field(default_factory=dict)  # rows by name, of this epoch
    grads: dict[str, Tensor] = field(default_factory=dict)
    undropped: dict[str, Tensor] = field(default_factory=dict)  # rows that their readers drop units of
    undropped_grads: dict[str, Tensor] = field(default_factory=dict)
    kept: dict[int, Any] = field(default_factory=dict)  # of graph operations and saved arrays, by place
    weights: dict[str, list[Any]] = field(default_factory=dict)
    loss: float = 0.0
    waits: tuple[int, bool] | None = None  # (place of a graph operation, backward?)


class Server:
    """``fixed``: rows that no epoch changes, by interval and name: inputs, labels."""

    def __init__(
        self,
        chain: Sequence[Segment],
        layers: Sequence[Layer],
        intervals: Intervals,
        num_rows: int,
        fixed: Mapping[int, Mapping[str, Any]],
        post: Post,
        settings: Settings,
        trace: Trace = NO_TRACE,
    ) -> None:
        self.settings, self.post, self.intervals, self.ages = settings, post, intervals, Ages()
        self._chain, self._trace = list(chain), trace
        self.ops: dict[int, GraphOp] = {
            at: graph_op(layers[each.layer], each, settings.edge_functions)
            for at, each in enumerate(chain)
            if isinstance(each, Graph)
        }
        edge_pieces = {at: Dense(op.program) for at, op in self.ops.items() if isinstance(op, EdgeAttention)}
        self.versions = Versions(
            {at: each for at, each in enumerate(chain) if isinstance(each, Dense)} | edge_pieces
        )
        self._fixed = fixed
        self._tables = {
            at: Table(
                num_rows,
                intervals.num_all,
                self._widths(at),
                settings.dtype,
                extrapolates=settings.extrapolates
                and settings.staleness is not None
                and isinstance(self.ops[at], Sum),
            )
            for at, each in enumerate(chain)
            if isinstance(each, Graph) and each.has_gradient
        }
        self._by_number: dict[int, Interval] = {each.number: each for each in intervals}
        self._states = {number: _State() for number in self._by_number}
        self._groups = dict(zip(self._by_number, groups_of(len(intervals), settings.num_groups), strict=True))
        self._sizes = Counter(self._groups.values())
        self._ready: list[_Ready] = []
        self._first: int | None = None  # epoch of this run
        self._due, self._limit, self._finished = -1, -1, dict[int, int]()
        self._ahead: list[int] = []  # intervals that may begin an epoch that is not due
        self._ended: dict[tuple[int, int], list[tuple[int, float, dict[str, Any]]]] = {}  # by epoch and group
        self._done: dict[tuple[int, int], Epoch] = {}
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self.graph_s = 0.0  # seconds in graph operations
        self._looked, self._is_pressed = (time.perf_counter(), 0.0), False
        self._thread = threading.Thread(target=self._run, name="graph-server", daemon=True)
        self._thread.start()

    # For the training thread

    def publish(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Weights for epochs that begin from now on."""
        self.versions.publish(version, weights)

    def go(self, epoch: int) -> None:
        """An epoch is due: all intervals anywhere have ended the one before. The first that is due is the first begun."""
        self.post.inbox.put(_Go(epoch))

    def wait(
        self, epoch: int, group: int = 0, alive: Callable[[], None] = lambda: None, every_s: float = 0.5
    ) -> Epoch:
        """What came of an epoch, once all own intervals of a group have ended it. ``alive`` is called now and then."""
        if not self._sizes[group]:
            return Epoch()
        with self._changed:
            while (epoch, group) not in self._done:
                if self._error is not None:
                    raise ServerlessError(f"the graph server broke: {self._error}") from self._error
                if not self._changed.wait(every_s):
                    alive()
            for passed in [each for each in self._done if each < (epoch, group)]:
                del self._done[passed]  # of a run that went on after them
            return self._done.pop((epoch, group))

    @property
    def num_ready(self) -> int:
        """Graph operations that wait for this server."""
        return len(self._ready)

    def close(self) -> None:
        self.post.inbox.put(None)
        self._thread.join(timeout=10)

    # The engine

    def _run(self) -> None:
        try:
            while True:
                while self.post.inbox.empty() and self._work():
                    pass
                try:
                    waits = bool(self._ready or self._ahead)
                    event = self.post.inbox.get(timeout=_LOOKS_S if waits else None)
                except queue.Empty:
                    continue  # functions may lack work by now
                if event is None:
                    return
                self._take(event)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _work(self) -> bool:
        """Run the next graph operation; or, where functions lack work, begin an epoch that is not due. False: neither."""
        chosen = self._chosen()
        if chosen is not None:
            self._ready.remove(chosen)
            epoch, _, step, number = chosen
            self._gather_or_collect(epoch, step, number)
        elif self._ahead and self.post.has_wishes:
            self._begin(self._ahead.pop(0))
        else:
            return False
        return True

    def _chosen(self) -> _Ready | None:
        """The graph operation to run now: the least advanced, of one wave before the other. A server with time to spare runs
        only what reads no older rows than it would if it waited, while functions have work: there is nothing to gain."""
        hurries = self._is_pressed or self.post.has_wishes or not len(self.post.ledger)
        return min((each for each in self._ready if hurries or self._is_fresh(each)), default=None)

    def _look_back(self) -> None:
        """Whether graph operations took most of the time since the last call."""
        now, before = (time.perf_counter(), self.graph_s), self._looked
        self._looked = now
        self._is_pressed = now[1] - before[1] > _PRESSED * (now[0] - before[0])

    def _is_fresh(self, ready: _Ready) -> bool:
        epoch, _, step, number = ready
        is_backward = step >= len(self._chain)
        place = 2 * len(self._chain) - 1 - step if is_backward else step
        if isinstance(self._chain[place], Dense):
            return True
        if is_backward and self._states[number].kept.get(place) is not True:
            return True  # gives back: reads nothing of others
        return all(tag >= epoch for tag in self._tags(number, place, is_backward))

    def _take(self, event: Any) -> None:
        if isinstance(event, Done):
            self._came_back(event)
        elif isinstance(event, Arrived):
            self._arrived(event)
        elif isinstance(event, _Go):
            self._look_back()
            if self._first is None:
                self._first = event.epoch
                self._finished = dict.fromkeys(self._by_number, event.epoch - 1)
            self._due, self._limit, self._ahead = event.epoch, self._furthest(event.epoch), []
            for number in self._by_number:
                self._follow(number)
        elif isinstance(event, Broken):
            raise ServerlessError(event.reason)

    def _follow(self, number: int) -> None:
        """Begin the next epoch of an interval, if it is due; if it is not but may be begun, when functions lack work: the
        longer it waits, the newer are its weights."""
        last, following = self.settings.last_epoch, self._finished[number] + 1
        if self._states[number].epoch == following or (last is not None and following > last):
            return
        if following == self._due:
            self._begin(number)
        elif following <= self._limit:
            self._ahead.append(number)

    def _begin(self, number: int) -> None:
        following = self._finished[number] + 1
        has_one = self.settings.num_groups == 1
        version = Ticket(
            self.versions, is_ahead=following > self._due and has_one and self.settings.extrapolates
        )
        if has_one:
            int(version)  # now: all intervals of an epoch have the same
        self._states[number] = _State(following, version, dict(self._fixed[number]))
        self._forward(number, 0)

    def _forward(self, number: int, place: int) -> None:
        """Go on at a place of the chain."""
        segment, state = self._chain[place], self._states[number]
        if isinstance(segment, Dense) and not segment.program.calls:  # dropout alone
            for name in segment.program.outputs:
                self._keep(number, place, name, state.values[name])
            self._forward(number, place + 1)
        elif isinstance(segment, Dense) and segment.stays:
            self._can_run(number, place)
        elif isinstance(segment, Dense):
            is_last = place == len(self._chain) - 1
            options: dict[str, float] = {}
            wants: tuple[str, ...] = ()
            if is_last and self.settings.fuses:
                options[FUSES], wants = 1, self._wants(segment)
            elif not self.settings.remakes:
                options[SAVES] = 1
            self._offer(number, place, False, self._rows(segment, state), wants, options)
        elif not segment.has_gradient:
            state.values[segment.gives] = self._fixed[number][segment.gives]
            self._forward(number, place + 1)
        else:
            self._publish(number, place)
            state.waits = place, False
            self._look(number)

    def _rows(self, segment: Dense, state: _State) -> dict[str, Any]:
        return {name: _as_array(state.values[name]) for name in segment.program.rows}

    def _wants(self, segment: Dense) -> tuple[str, ...]:
        return tuple(name for name, row in segment.program.rows.items() if row.has_gradient)

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
        step = 2 * len(self._chain) - 1 - place if is_backward else place
        key, version = TaskKey(state.epoch, step, number, place, is_backward), state.version
        assert version is not None
        has_tiles = isinstance(self._chain[place], Dense)  # edges are needed all at once
        first, *more = cut(rows) if has_tiles and self.settings.streams else [flat(rows)]
        num_rows = self._by_number[number].num_rows

        def weights() -> tuple[dict[str, Any], Mapping[str, Any]]:
            return self.versions.of(place, int(version))

        work = Work(version, first, weights, wants, dict(options or {}), num_rows, tuple(more))
        self.post.offer(key, work)

    def _came_back(self, done: Done) -> None:
        """A dense piece was computed, or attention weights, or gradients of either."""
        number, place = done.key.interval, done.key.piece
        state, segment = self._states[number], self._chain[place]
        if isinstance(segment, Graph):
            self._edges_came_back(done)
            return
        for name, value in done.arrays.items():
            if name.startswith("d:"):
                state.weights[name[2:]] = [*state.weights.get(name[2:], []), value]
        is_last = place == len(self._chain) - 1
        if is_last and not done.key.is_backward:
            state.loss = done.values["loss"]
        if done.key.is_backward or (is_last and self.settings.fuses):
            for name in self._wants(segment):
                self._add_grad(state, name, _as_tensor(done.arrays[f"g:{name}"]))
            self._backward(number, place - 1)
            return
        state.kept[place] = {name: value for name, value in done.arrays.items() if name.startswith("s:")}
        if is_last:
            self._offer(
                number, place, True, self._rows(segment, state) | state.kept[place], self._wants(segment)
            )
            return
        for name in segment.program.outputs:
            self._keep(number, place, name, _as_tensor(done.arrays[name]))
        self._forward(number, place + 1)

    def _keep(self, number: int, place: int, name: str, rows: Tensor) -> None:
        """Rows that a dense piece gave, and (where their readers drop units) as they were before dropout."""
        state, segment = self._states[number], self._chain[place]
        assert isinstance(segment, Dense)
        state.values[name] = self._dropped(number, segment, rows)
        if self._drops_at_read(place + 1):
            state.undropped[name] = rows

    def _drops_at_read(self, place: int) -> bool:
        """Whether a graph operation drops units of the rows that it reads: where these may be old, so that it is the units
        of this epoch. Other units are an error that does not shrink with the steps of the weights."""
        before = self._chain[place - 1]
        return (
            self.settings.staleness is not None
            and self.settings.drop_rate > 0
            and isinstance(self.ops.get(place), Sum)
            and isinstance(before, Dense)
            and before.drops is not None
        )

    def _drop(self, number: int, place: int) -> Drop | None:
        """What an interval drops of the rows that a graph operation reads, and of their gradients."""
        before = self._chain[place - 1]
        if not self._drops_at_read(place):
            return None
        assert isinstance(before, Dense)
        assert before.drops is not None
        ids = self._by_number[number].block.src_ids
        code = Key(self.settings.seed, self._states[number].epoch).at(Purpose.DROPOUT, before.drops)
        return lambda rows: dropout(rows, ids, self.settings.drop_rate, code)

    def _dropped(self, number: int, segment: Dense, rows: Tensor) -> Tensor:
        """Rows, or their gradients, with the units dropped that this epoch drops after a piece."""
        if segment.drops is None or not self.settings.drop_rate:
            return rows
        interval, epoch = self._by_number[number], self._states[number].epoch
        code = Key(self.settings.seed, epoch).at(Purpose.DROPOUT, segment.drops)
        return dropout(rows, interval.block.dst_ids(), self.settings.drop_rate, code)

    @staticmethod
    def _add_grad(state: _State, name: str, grad: Tensor) -> None:
        state.grads[name] = state.grads[name] + grad if name in state.grads else grad

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
            self._can_run(number, 2 * len(self._chain) - 1 - place)
            return
        grads = {
            name: self._dropped(number, segment, state.grads.pop(name))
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
            self._can_run(number, 2 * len(self._chain) - 1 - place)
            return
        marked = {f"g:{name}": grad.numpy() for name, grad in grads.items()}
        rows = self._rows(segment, state) | state.kept.get(place, {}) | marked
        self._offer(number, place, True, rows, self._wants(segment))

    # Graph operations

    def _widths(self, place: int) -> dict[str, int]:
        """Columns of the rows that a graph operation reads of all sources."""
        before = self._chain[place - 1]
        assert isinstance(before, Dense)
        return {name: before.program.shapes[name][0] for name in self.ops[place].of_sources}

    def _publish(self, number: int, place: int) -> None:
        """Rows for all who read them (SC)."""
        interval, state, op = self._by_number[number], self._states[number], self.ops[place]
        rows = {name: state.undropped.get(name, state.values[name]) for name in op.of_sources}
        self._tables[place].put(number, interval.rows, state.epoch, rows)
        for server, lent in interval.lent.items():
            sent = {name: value.index_select(0, lent).numpy() for name, value in rows.items()}
            self.post.send(server, wire.Rows(place, number, state.epoch, ()), sent)
        self._look_all(place, False, number)

    def _arrived(self, event: Arrived) -> None:
        header = event.header
        table = self._tables[header.table]
        rows = {name: _as_tensor(value) for name, value in event.arrays.items()}
        if isinstance(header, wire.Rows):
            table.put(header.interval, self.intervals.halo[header.interval], header.epoch, rows)
        else:
            table.give(header.interval, header.epoch, {name: value.clone() for name, value in rows.items()})
        self._look_all(header.table, isinstance(header, wire.Sums), header.interval)

    def _look_all(self, place: int, is_backward: bool, number: int) -> None:
        """Something came: intervals that wait for it may go on."""
        for each, state in self._states.items():
            if state.waits == (place, is_backward):
                self._look(each)

    def _look(self, number: int) -> None:
        """Whether an interval that waits may go on."""
        state = self._states[number]
        assert state.waits is not None
        place, is_backward = state.waits
        if all(self._is_readable(tag, state.epoch) for tag in self._tags(number, place, is_backward)):
            state.waits = None
            step = 2 * len(self._chain) - place - 1 if is_backward else place
            self._can_run(number, step)
            if is_backward:
                state.kept[place] = True  # what it read has been given back

    def _can_run(self, number: int, step: int) -> None:
        self._ready.append((self._states[number].epoch, self._wave(number), step, number))

    def _wave(self, number: int) -> int:
        """Backward takes functions three times as long as forward, and the server as long: where intervals need not wait
        for each other, half of them go ahead, so that gradients of the one half are computed while the other gathers."""
        if self.settings.staleness is None:
            return 0
        return int(2 * (number - self.intervals.own[0].number) >= len(self.intervals))

    def _tags(self, number: int, place: int, is_backward: bool) -> list[int]:
        interval, table = self._by_number[number], self._tables[place]
        if is_backward:
            return [table.given_epoch(reader.number) for reader in interval.readers]
        return [table.tags[read] for read in interval.reads]

    def _bound(self, epoch: int) -> int | None:
        """Epochs that rows may be older, less one; None: rows of this epoch alone."""
        settings = self.settings
        is_early = epoch == self._first or epoch < settings.pipe_epochs
        is_late = settings.last_epoch is not None and epoch > settings.last_epoch - settings.pipe_epochs
        return None if is_early or is_late else settings.staleness

    def _furthest(self, epoch: int) -> int:
        """The epoch that intervals may begin while this one is due. None goes past one that is run as ``pipe``."""
        furthest = epoch
        while (bound := self._bound(furthest)) is not None and furthest < epoch + bound:
            furthest += 1
        return furthest

    def _is_readable(self, tag: int, epoch: int) -> bool:
        bound = self._bound(epoch)
        return tag == epoch if bound is None else tag >= epoch - bound - 1 and tag >= 0

    def _gather_or_collect(self, epoch: int, step: int, number: int) -> None:
        place = step if step < len(self._chain) else 2 * len(self._chain) - 1 - step
        start = time.perf_counter()
        with self._trace.span(
            "graph", interval=number, place=place, backward=step >= len(self._chain), epoch=epoch
        ):
            if isinstance(self._chain[place], Dense):
                self._compute(number, place, step >= len(self._chain))
            elif step < len(self._chain):
                self._gather(number, place)
            elif self._states[number].kept.get(place) is True:
                self._collect(number, place)
            else:
                self._give_back(number, place)
        self.graph_s += time.perf_counter() - start

    def _compute(self, number: int, place: int, is_backward: bool) -> None:
        """A dense piece that is the server's own: as a function would, but all rows of the interval at once."""
        segment, state = self._chain[place], self._states[number]
        assert isinstance(segment, Dense)
        assert state.version is not None
        _, weights = self.versions.of(place, int(state.version))
        rows, tile = self._rows(segment, state), max(self._by_number[number].num_rows, 1)
        if is_backward:
            grads = {
                name: state.grads.pop(name).numpy() for name in segment.program.outputs if name in state.grads
            }
            of_rows, of_weights = backward(segment.program, rows, weights, grads, tile)
            found = {f"g:{name}": of_rows[name] for name in self._wants(segment)}
            found |= {f"d:{name}": value for name, value in of_weights.items()}
        else:
            found, _ = forward(segment.program, rows, weights, tile)
        self._came_back(Done(TaskKey(state.epoch, place, number, place, is_backward), found, {}))

    def _gather(self, number: int, place: int) -> None:
        """What the interval's destinations gather (GA)."""
        interval, state, segment = self._by_number[number], self._states[number], self._chain[place]
        assert isinstance(segment, Graph)
        op, key = self.ops[place], Key(self.settings.seed, state.epoch)
        own = {name: state.values[name] for name in op.of_own}
        if not isinstance(op, EdgeAttention):
            self._check_ages(number, place)
            reading, drop = self._tables[place].reading(interval, state.epoch), self._drop(number, place)
            more = {} if drop is None else {"drop": drop}
            state.values[segment.gives], state.kept[place] = op.gather(interval, reading, own, key, **more)
        elif place in state.kept:  # the weights have come back
            state.values[segment.gives] = op.gather(interval, state.kept[place], key)
        else:
            self._check_ages(number, place)
            state.kept[place] = op.read(self._tables[place].reading(interval, state.epoch), own)
            self._offer(number, place, False, op.task(interval, state.kept[place]))
            return
        self._forward(number, place + 1)

    def _check_ages(self, number: int, place: int, is_backward: bool = False) -> None:
        epoch = self._states[number].epoch
        self.ages.check(epoch, self._tags(number, place, is_backward), self._bound(epoch))

    def _give_back(self, number: int, place: int) -> None:
        """Gradients of the rows that the interval read go to their owners."""
        interval, state, segment = self._by_number[number], self._states[number], self._chain[place]
        assert isinstance(segment, Graph)
        op, grad = self.ops[place], state.grads.pop(segment.gives)
        if isinstance(op, EdgeAttention):
            kept = state.kept[place]
            rows = op.back_task(interval, kept, op.give_back(interval, kept, grad), self.settings.remakes)
            self._offer(number, place, True, rows, op.wants)
            return
        self._give(number, place, *op.give_back(interval, state.kept.pop(place), grad))

    def _edges_came_back(self, done: Done) -> None:
        """Attention weights, by which the interval can gather; or gradients of scores, the last that were missing."""
        number, place = done.key.interval, done.key.piece
        state, op = self._states[number], self.ops[place]
        assert isinstance(op, EdgeAttention)
        if done.key.is_backward:
            scores = (_as_tensor(done.arrays[f"g:{name}"]) for name in op.wants)
            self._give(number, place, *op.ended(state.kept.pop(place), *scores))
        else:
            state.kept[place].weights = _as_tensor(done.arrays[op.gives])
            self._can_run(number, place)

    def _give(self, number: int, place: int, read: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """Gradients of the rows of sources to their owners; of the interval's own, where it alone reads them, to itself."""
        interval, state, drop = self._by_number[number], self._states[number], self._drop(number, place)
        if drop is not None:
            read = {name: drop(grad) for name, grad in read.items()}
        for name, grad in own.items():
            self._add_grad(state, name, grad)
        for server, positions in interval.back.items():
            sent = {name: grad.index_select(0, positions).numpy() for name, grad in read.items()}
            self.post.send(server, wire.Sums(place, number, state.epoch, ()), sent)
        self._tables[place].give(number, state.epoch, read)
        state.waits = place, True
        self._look_all(place, True, number)

    def _collect(self, number: int, place: int) -> None:
        """Sum what readers gave for the interval's rows."""
        interval, state = self._by_number[number], self._states[number]
        self._check_ages(number, place, is_backward=True)
        del state.kept[place]
        for name, grad in self._tables[place].collect(interval, state.epoch).items():
            if self._drops_at_read(place):
                state.undropped_grads[name] = grad
            else:
                self._add_grad(state, name, grad)
        self._backward(number, place - 1)

    # Ends

    def _end(self, number: int) -> None:
        """An interval has ended its epoch."""
        state, group = self._states[number], self._groups[number]
        assert state.version is not None
        state.version.leave()
        epoch = state.epoch
        ended = self._ended.setdefault((epoch, group), [])
        ended.append((number, state.loss, state.weights))
        self._finished[number] = epoch
        self._states[number] = _State(epoch)
        if len(ended) == self._sizes[group]:
            self._summed(epoch, group)
        if min(self._finished.values()) == epoch:
            self.post.forget(epoch)
        self._follow(number)

    def _summed(self, epoch: int, group: int) -> None:
        found = Epoch()
        for _, loss, weights in sorted(self._ended.pop((epoch, group)), key=lambda each: each[0]):
            found.loss += loss
            for name, pieces in weights.items():
                for value in pieces:
                    tensor = _as_tensor(value)  # memory of the result it came in, which nobody else has
                    if name in found.gradients:
                        found.gradients[name].add_(tensor)
                    else:
                        found.gradients[name] = tensor
        with self._changed:
            self._done[epoch, group] = found
            self._changed.notify_all()


def groups_of(num_intervals: int, num_groups: int) -> list[int]:
    """The group of each interval: consecutive ones, as many in each as can be."""
    return [at * num_groups // num_intervals for at in range(num_intervals)]


def _as_array(value: Any) -> Any:
    return value.numpy() if isinstance(value, Tensor) else value


def _as_tensor(value: Any) -> Tensor:
    """Shares memory with the message it came in; nothing writes to it."""
    array = np.asarray(value)
    return torch.from_numpy(array if array.flags.writeable else array.copy())
