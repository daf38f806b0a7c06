"""One layer's rows across the cut: own rows to the ranks that read them, the gradients of those rows back, both while
the ranks compute. Ground of all channels, which are made of two things:

    Messages   what a row looks like on the way: here as it is, in ``quantised`` in few bits
    Crossing   what leaves and arrives when: here everything at once, elsewhere later, in part or not at all

Forward:  ``begin_forward`` posts the boundary rows, ``end_forward`` gives the halo's.
Backward: ``begin_backward`` posts the gradients of the halo's rows (partial sums), ``end_backward`` adds what others
found, in rank order, to the gradients of the own rows.

Legend: n own rows, H halo rows, P ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyhop.comm import Collective, Pending
from polyhop.graph.halo_block import Reader
from polyhop.kernels import gather_rows, scatter_add_rows
from polyhop.kernels.keys import Key
from polyhop.trace import NO_TRACE, Trace

__all__ = ["DIRECTIONS", "Crossing", "Direction", "Lists", "Messages", "Spans", "add_rows", "matrix", "taken"]

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")


@dataclass(frozen=True, eq=False)
class Lists:
    """Who reads which rows of whom."""

    num_own: int
    lent: Sequence[Tensor]  # per rank: int64, own rows that it reads
    wanted: Sequence[int]  # per rank: rows that come from it; the halo is in rank order
    lent_sums: Sequence[
        int
    ] = ()  # per rank: sums of own rows that go to it behind the rows; () = none to anyone

    @property
    def num_halo(self) -> int:
        return sum(self.wanted)

    def leaving(self, direction: Direction) -> list[int]:
        """Rows for each rank, sums included."""
        if direction == "backward":
            return list(self.wanted)
        sums = self.sums_by_rank
        return [ids.numel() + sums[rank] for rank, ids in enumerate(self.lent)]

    @property
    def sums_by_rank(self) -> list[int]:
        """Sums for each rank."""
        return list(self.lent_sums) or [0] * len(self.lent)

    def arriving(self, direction: Direction) -> list[int]:
        """Rows from each rank."""
        return self.leaving("backward" if direction == "forward" else "forward")


@dataclass(frozen=True)
class Spans:
    """Where a channel writes how long things took."""

    trace: Trace = NO_TRACE
    layer: int = 0

    def span(self, name: str, direction: str) -> Any:
        return self.trace.span(name, layer=self.layer, direction=direction)

    def crossed(self, began: float, direction: str, num_bytes: int) -> None:
        """A message is here that began to leave at that time; so many bytes left with it."""
        facts = {"layer": self.layer, "direction": direction, "bytes": num_bytes}
        self.trace.record_span("communicate", began, self.trace.clock() - began, facts)


class Messages:
    """Rows as they are, one message for each rank. Forward of own rows [n, F] and sums of them [Q, F] (none: no matrix),
    backward of gradients of halo rows [H, F]."""

    def __init__(self, lists: Lists, spans: Spans | None = None) -> None:
        self.lists, self.spans = lists, spans or Spans()
        self.key = Key(0)  # of the step

    def begin_step(self, key: Key) -> None:
        """A step is about to run: its key names all that is random in it."""
        self.key = key

    def pack(self, direction: Direction, rows: Tensor, rank: int, sums: Tensor | None = None) -> list[Tensor]:
        """What leaves from this rank, for each rank."""
        sources = self.sources(direction, rows, sums)
        return [self.packed(direction, *source, rank, to) for to, source in enumerate(sources)]

    def packed(self, direction: Direction, rows: Tensor, ids: Tensor | None, rank: int, to: int) -> Tensor:
        """What leaves for one rank: rows ``ids`` (None = all) of a matrix."""
        return rows if ids is None else taken(rows, ids)

    def opened(self, direction: Direction, piece: Tensor, source: int, like: Tensor) -> Tensor:
        """Rows [k, F] of what came from one rank; dtype as ``like`` [0, F]."""
        return piece

    def sources(
        self, direction: Direction, rows: Tensor, sums: Tensor | None
    ) -> list[tuple[Tensor, Tensor | None]]:
        """(matrix, which rows of it; None = all) that leave for each rank."""
        if direction == "backward":
            return [(piece, None) for piece in rows.split(list(self.lists.wanted))]  # type: ignore[no-untyped-call]
        if sums is None:
            return [(rows, ids) for ids in self.lists.lent]
        pieces = sums.split(self.lists.sums_by_rank)  # type: ignore[no-untyped-call]
        return [
            (torch.cat([taken(rows, ids), piece]), None) if piece.shape[0] else (rows, ids)
            for ids, piece in zip(self.lists.lent, pieces, strict=True)
        ]

    def counts(self, direction: Direction, num_columns: int) -> list[int]:
        """How long what comes from each rank is: in rows here, in bytes where messages are bytes."""
        return self.lists.arriving(direction)

    def opener(self, direction: Direction, like: Tensor) -> Callable[[list[Tensor]], list[Tensor]]:
        """What makes rows [k, F] of the messages that answer those which leave now; dtype as ``like`` [0, F]."""
        return lambda pieces: pieces


class Crossing:
    """Everything crosses in its own step. ``overlaps=False`` waits for every message as soon as it has left."""

    def __init__(self, messages: Messages, line: Collective, *, overlaps: bool = True) -> None:
        self.messages, self.line, self.overlaps = messages, line, overlaps
        self.lists, self.spans = messages.lists, messages.spans
        self.num_columns: int | None = None  # that cross, once rows have
        self._reader: Reader | None = None
        self._pending: Pending[list[Tensor]] | None = None
        self.keeps = False  # what the forward pass got is kept until the step ends, as it came
        self.is_replaying = False
        self._kept: Callable[[], list[Tensor]] | None = None
        self.shape: tuple[int, ...] = ()  # of one row

    def begin_step(self, key: Key) -> None:
        """A step is about to run: its key names all that is random in it."""
        self.messages.begin_step(key)
        self._pending = self._kept = None  # of a step that was broken off

    def end_step(self) -> None:
        """A step has run, forward and backward."""
        self._kept = None

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, a forward pass is computed again: nothing crosses, it gets what it got before (see ``keeps``)."""
        self.is_replaying = True
        try:
            yield
        finally:
            self.is_replaying = False

    def leave(
        self, rows: Tensor, first: int, reader: Reader | None = None, sums: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
        """See ``graph.halo_block.Channel``."""
        self._reader = reader
        whole, tail, token = _Leave.apply(rows, sums, self, first)  # type: ignore[no-untyped-call]
        return whole, tail, lambda: _Arrive.apply(token, self)  # type: ignore[no-untyped-call]

    def weights(self, direction: Direction = "forward") -> Tensor:
        """float64, of each row that arrives: how much an error in it matters here.

        Forward: to what this rank sums of the halo's rows. Backward: gradients are added as they are, and those of a sum go
        to the rows that it was made of.
        """
        assert self._reader is not None, "the layer that reads rows says what they weigh"
        if direction == "forward":
            return self._reader.weights().cpu()
        sums = self._reader.sum_weights().cpu().split(self.lists.sums_by_rank)  # type: ignore[no-untyped-call]
        ones = [torch.ones(ids.numel(), dtype=torch.float64) for ids in self.lists.lent]
        return torch.cat([piece for pair in zip(ones, sums, strict=True) for piece in pair])

    # What follows runs on detached tensors, in the order of the layers and then against it.

    def begin_forward(self, rows: Tensor, sums: Tensor | None) -> None:
        """Own rows [n, ...] leave, and sums of them [Q, ...]."""
        self._note_shape(rows)
        self._pending = self.post("forward", matrix(rows), sums)

    def _note_shape(self, rows: Tensor) -> None:
        self.shape = tuple(rows.shape[1:])
        self.num_columns = math.prod(self.shape)

    def end_forward(self) -> Tensor:
        """The halo's rows [H, ...]."""
        return torch.cat(self._arrived()).view(self.lists.num_halo, *self.shape)

    def begin_backward(self, halo_grad: Tensor) -> None:
        """Gradients of the halo's rows [H, ...] leave."""
        self._pending = self.post("backward", matrix(halo_grad))

    def end_backward(self, own_grad: Tensor) -> tuple[Tensor, Tensor | None]:
        """(own_grad [n, ...], added to in place; the gradients of the sums that left [Q, F], if any did)."""
        return self.added(own_grad, self._arrived())

    def added(self, own_grad: Tensor, pieces: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """The same, of each rank's gradients of what it was lent."""
        if not self.lists.lent_sums:
            return add_rows(own_grad, self.lists.lent, pieces), None
        counts = [ids.numel() for ids in self.lists.lent]
        rows = [piece[:count] for piece, count in zip(pieces, counts, strict=True)]
        sums = [piece[count:] for piece, count in zip(pieces, counts, strict=True)]
        return add_rows(own_grad, self.lists.lent, rows), torch.cat(sums)

    def post(self, direction: Direction, rows: Tensor, sums: Tensor | None = None) -> Pending[list[Tensor]]:
        """Messages leave; what comes of it are rows [k, F] from each rank."""
        packed = self.messages.pack(direction, rows, self.line.rank, sums)
        return self.send(direction, packed, self.messages.counts(direction, rows.shape[1]), rows[:0])

    def send(
        self, direction: Direction, packed: Sequence[Tensor], counts: Sequence[int] | None, like: Tensor
    ) -> Pending[list[Tensor]]:
        """The same for messages that are packed; ``counts`` None: their lengths are told first."""
        like = like.new_empty(like.shape)  # no view: what is kept would keep the rows
        opened, began = self.messages.opener(direction, like), self.spans.trace.clock()
        keeps = self.keeps and direction == "forward"
        leaving = [piece.to(self.line.device) for piece in packed]
        num_bytes = sum(piece.nbytes for to, piece in enumerate(leaving) if to != self.line.rank)
        pending = self.line.start_all_to_all(leaving, kind="hidden", counts=counts)

        def finish() -> list[Tensor]:
            with self.spans.span("wait", direction):
                pieces = pending.wait()
            self.spans.crossed(began, direction, num_bytes)
            here = [piece.to(like.device) for piece in pieces]
            if keeps:
                self._kept = lambda: opened(here)
            return opened(here)

        posted = Pending(finish)
        if not self.overlaps:
            posted.wait()
        return posted

    def _arrived(self) -> list[Tensor]:
        if self.is_replaying:
            assert self._kept is not None, "a forward pass was made before it is computed again"
            return self._kept()
        assert self._pending is not None, "rows leave before they arrive"
        pieces, self._pending = self._pending.wait(), None
        return pieces

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must keep; nothing here."""
        return {}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        assert not tensors, "nothing is kept from step to step"


class _Leave(torch.autograd.Function):
    """rows, sums of them -> (rows, rows from ``first`` on, a token that ties the halo's rows to them)."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sums: Tensor | None, channel: Crossing, first: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.channel, ctx.first, ctx.shape = channel, first, rows.shape
        ctx.set_materialize_grads(False)
        if not channel.is_replaying:
            channel.begin_forward(rows, sums)
        return rows.view_as(rows), rows[first:], rows.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, g_rows: Tensor | None, g_tail: Tensor | None, g_token: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        given = [g for g in (g_rows, g_tail, g_token) if g is not None]
        if not given:
            return None, None, None, None
        like = given[0]
        # A new matrix: whoever made g_rows may have handed it to someone else too.
        own = like.new_zeros(ctx.shape) if g_rows is None else g_rows.contiguous().clone()
        if g_tail is not None:
            own[ctx.first :] += g_tail
        g_sums = None
        if g_token is not None:
            own, g_sums = ctx.channel.end_backward(own)
        return own, g_sums, None, None


class _Arrive(torch.autograd.Function):
    """token -> the halo's rows. Made after the central rows, so its backward pass runs before theirs."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, channel: Crossing) -> Tensor:
        ctx.channel = channel
        return channel.end_forward()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.channel.begin_backward(grad.contiguous())
        return grad.new_zeros(()), None


def add_rows(own: Tensor, lent: Sequence[Tensor], pieces: Sequence[Tensor]) -> Tensor:
    """own [n, ...] with each rank's pieces [k, F] added at the rows it was lent, in rank order; in place."""
    sums = matrix(own)
    for ids, piece in zip(lent, pieces, strict=True):
        if ids.numel():
            scatter_add_rows(sums, ids.to(sums.device), piece.to(sums))
    return own if sums.data_ptr() == own.data_ptr() else own.copy_(sums.view(own.shape))


def matrix(rows: Tensor) -> Tensor:
    """[n, columns] of [n, ...], also for n = 0."""
    return rows.reshape(rows.shape[0], math.prod(rows.shape[1:]))


def taken(rows: Tensor, ids: Tensor) -> Tensor:
    """rows[ids], bit for bit, whatever the dtype."""
    if rows.dtype in (torch.float32, torch.float64):
        return gather_rows(rows, ids.to(rows.device))
    return rows.index_select(0, ids.to(rows.device))
