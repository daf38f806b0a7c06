"""The graph server: takes every interval of its part through the chain of a model, forward and back, epoch after epoch.

Intervals are at different places at the same time (``passes``), so that functions compute while the server gathers.
``staleness`` None (``pipe``): an interval gathers when all rows that it reads are of its epoch: the numbers of one process.
S >= 0: it gathers what is there as soon as functions lack work (at once where the server has no time to spare:
``agenda``), but begins epoch e only when no interval anywhere is more than S epochs behind (``epochs``); then rows are at
most S + 1 epochs old (checked at every read: ``lending``). At first weights move too fast for old rows, and what old rows
did wrong is put right in the last epochs: ``pipe_epochs``.

The engine is one thread: it alone touches tables and intervals. The training thread says how far it may go (``go``) and
waits for epochs (``wait``). Gradients of weights are summed in the order of intervals, of all of them or (``num_groups``)
of consecutive ones: weights then change several times an epoch, while intervals of other groups are on their way.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from polyhop.errors import PolyhopError
from polyhop.nn.layer import Layer
from polyhop.serverless.agenda import Agenda
from polyhop.serverless.edge_tasks import EdgeAttention
from polyhop.serverless.epochs import Epoch, Epochs, Totals
from polyhop.serverless.graph_ops import GraphOp, Sum, graph_op
from polyhop.serverless.intervals import Intervals
from polyhop.serverless.lending import Lending
from polyhop.serverless.mail import Arrived, Broken, Done, Work
from polyhop.serverless.passes import Calls, Passes, Settings
from polyhop.serverless.post import Post
from polyhop.serverless.segments import Dense, Graph, Segment
from polyhop.serverless.tables import Table
from polyhop.serverless.versions import Versions
from polyhop.serverless.wire import TaskKey
from polyhop.trace import NO_TRACE, Trace

__all__ = ["Server", "ServerlessError"]

_LOOKS_S = 0.01


class ServerlessError(PolyhopError):
    """Training with functions cannot go on."""


@dataclass(frozen=True)
class _Go:
    epoch: int  # that is trained now


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
        self.settings, self.post, self.intervals, self._trace = settings, post, intervals, trace
        self.ops: dict[int, GraphOp] = {
            at: graph_op(layers[each.layer], each, settings.edge_functions)
            for at, each in enumerate(chain)
            if isinstance(each, Graph)
        }
        edge_pieces = {at: Dense(op.program) for at, op in self.ops.items() if isinstance(op, EdgeAttention)}
        self.versions = Versions(
            {at: each for at, each in enumerate(chain) if isinstance(each, Dense)} | edge_pieces
        )
        is_stale = settings.staleness is not None
        tables = {
            at: Table(
                num_rows,
                intervals.num_all,
                _widths(chain[at - 1], self.ops[at]),
                settings.dtype,
                extrapolates=settings.extrapolates and is_stale and isinstance(self.ops[at], Sum),
            )
            for at, each in enumerate(chain)
            if isinstance(each, Graph) and each.has_gradient
        }
        self._numbers = [each.number for each in intervals]
        self._epochs = Epochs(self._numbers, settings.staleness, settings.pipe_epochs, settings.last_epoch)
        self._totals = Totals(self._numbers, settings.num_groups)
        lending = Lending(intervals, tables, self._epochs, post.send)
        calls = Calls(self._offer, self._can_run, self._end)
        self.ages = lending.ages
        self.passes = Passes(chain, self.ops, intervals, fixed, self.versions, lending, settings, calls)
        self._agenda = Agenda(self._numbers, is_stale, self.passes.reads, time.perf_counter())
        self._done: dict[tuple[int, int], Epoch] = {}  # by epoch and group
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self.graph_s = 0.0  # seconds in graph operations
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
        if not self._totals.sizes[group]:
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
        return len(self._agenda)

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
                    waits = bool(len(self._agenda) or self._epochs.ahead)
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
        lacks_work = self.post.has_wishes or not len(self.post.ledger)
        chosen, ahead = self._agenda.chosen(lacks_work), self._epochs.ahead
        if chosen is not None:
            self._agenda.remove(chosen)
            self._gather_or_collect(chosen.epoch, chosen.step, chosen.number)
        elif ahead and self.post.has_wishes:
            self._begin(ahead.pop(0))
        else:
            return False
        return True

    def _take(self, event: Any) -> None:
        if isinstance(event, Done):
            self.passes.came_back(event)
        elif isinstance(event, Arrived):
            self.passes.arrived(event)
        elif isinstance(event, _Go):
            self._agenda.look_back(time.perf_counter(), self.graph_s)
            self._epochs.go(event.epoch)
            for number in self._numbers:
                self._follow(number)
        elif isinstance(event, Broken):
            raise ServerlessError(event.reason)

    def _follow(self, number: int) -> None:
        """Begin the next epoch of an interval, if it is due; if it is not but may be begun, when functions lack work: the
        longer it waits, the newer are its weights."""
        if self._epochs.follow(number):
            self._begin(number)

    def _begin(self, number: int) -> None:
        epoch = self._epochs.begin(number)
        self.passes.begin(number, epoch, is_ahead=self._epochs.is_ahead(epoch))

    def _offer(self, key: TaskKey, work: Work) -> None:
        self.post.offer(key, work)

    def _can_run(self, number: int, epoch: int, step: int) -> None:
        self._agenda.add(number, epoch, step)

    def _gather_or_collect(self, epoch: int, step: int, number: int) -> None:
        """Run a graph operation, or a dense piece that is the server's own."""
        place, is_backward = self.passes.at(step)
        start = time.perf_counter()
        with self._trace.span("graph", interval=number, place=place, backward=is_backward, epoch=epoch):
            self.passes.run(number, step)
        self.graph_s += time.perf_counter() - start

    def _end(self, number: int, loss: float, gradients: Mapping[str, Sequence[Tensor]]) -> None:
        """An interval has ended its epoch."""
        epoch = self._epochs.end(number)
        if self._totals.add(epoch, number, loss, gradients):
            self._summed(epoch, self._totals.groups[number])
        if self._epochs.ended_by_all == epoch:
            self.post.forget(epoch)
        self._follow(number)

    def _summed(self, epoch: int, group: int) -> None:
        found = self._totals.summed(epoch, group)
        with self._changed:
            self._done[epoch, group] = found
            self._changed.notify_all()


def _widths(before: Segment, op: GraphOp) -> dict[str, int]:
    """Columns of the rows that a graph operation reads of all sources; ``before``: the piece that gives them."""
    assert isinstance(before, Dense)
    return {name: before.program.shapes[name][0] for name in op.of_sources}
