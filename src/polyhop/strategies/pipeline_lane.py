"""A rank's lane of a schedule, done: rows and gradients received ahead of time, sent without waiting.

What crosses is one message a chunk (``pipeline_messages``). Both ends know the sizes of chunks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from torch import Tensor

from polyhop.comm import Collective, Pending
from polyhop.strategies.pipeline_messages import Messages
from polyhop.strategies.pipeline_schedule import Action
from polyhop.strategies.pipeline_stage import Stage
from polyhop.trace import NO_TRACE, Trace

__all__ = ["Lane"]

_AHEAD = 2  # receives under way: the one that is waited for, and the next
_BEHIND = 4  # sends under way before the first is waited for


class Lane:
    """What one rank does with its stage."""

    def __init__(self, stage: Stage, messages: Messages, line: Collective, trace: Trace = NO_TRACE) -> None:
        self._stage, self._messages, self._line, self._trace = stage, messages, line, trace
        self._sent: Counter[str] = Counter()  # bytes by boundary and direction, since they were noted

    def run(self, lane: Sequence[Action]) -> None:
        """Every action of a lane, in order."""
        to_come = deque(action for action in lane if action.kind == "receive")
        coming: deque[Pending[Tensor]] = deque()
        leaving: deque[Pending[None]] = deque()
        for action in lane:
            while to_come and len(coming) < _AHEAD:
                coming.append(self._expect(to_come.popleft()))
            if action.kind == "receive":
                with self._trace.span("wait"):
                    message = coming.popleft().wait()
                self._take(action, message)
            elif action.kind == "send":
                if len(leaving) >= _BEHIND:
                    leaving.popleft().wait()
                assert action.peer is not None
                message = self._packed(action)
                self._sent[f"{self._cut(action)} {action.task.direction}"] += message.nbytes
                leaving.append(self._line.start_send(message, action.peer, kind="hidden"))
            elif action.task.chunk is not None or self._stage.has_ways:
                with self._trace.span(
                    action.task.direction, chunk=action.task.chunk, layer=action.task.first
                ):
                    if action.task.direction == "forward":
                        self._stage.forward(action.task)
                    else:
                        self._stage.backward(action.task)
        for pending in leaving:
            pending.wait()
        if self._sent:
            self._trace.counter("layers", **self._sent)
            self._sent.clear()

    def _cut(self, action: Action) -> int:
        """The layer before which the boundary is that an action's message crosses."""
        is_up = (action.kind == "send") == (action.task.direction == "forward")
        return self._stage.stop if is_up else self._stage.first

    def _expect(self, action: Action) -> Pending[Tensor]:
        assert action.peer is not None
        assert action.task.chunk is not None
        shape, dtype = self._messages.form(action.task.chunk, self._cut(action))
        return self._line.start_receive(shape, dtype, action.peer)

    def _take(self, action: Action, message: Tensor) -> None:
        chunk, layer = action.task.chunk, self._cut(action)
        assert chunk is not None
        rows = self._messages.opened(message.to(self._stage.device), layer)
        if action.task.direction == "forward":
            self._stage.take(chunk, layer, rows)
        else:
            self._stage.take_grads(chunk, rows)

    def _packed(self, action: Action) -> Tensor:
        chunk, layer, direction = action.task.chunk, self._cut(action), action.task.direction
        assert chunk is not None
        rows = self._stage.outputs(chunk) if direction == "forward" else self._stage.input_grads(chunk, layer)
        return self._messages.packed(rows, chunk, layer, direction).to(self._line.device)
