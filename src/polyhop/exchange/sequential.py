"""Rows of one rank at a time: each shard of the halo is summed into the marginal rows and let go before the last ones come
(SAR, sequential aggregation). For memory: bytes are those of the exact channel.

    round k    rows come from rank r - k and leave for rank r + k; while they are summed, those of the next round come
    backward   gradients of the sums are brought to the rows of rank r - k and leave for it, those of rank r + k are added

Nothing is kept for the backward pass: of a sum, the gradient needs no rows. So at most (1 + depth) max_j s_j D values of the
halo are here at a time, s_j being rows that rank j lends, in place of sum_j s_j D; and likewise of rows lent. Rows in few
bits need, for a moment, their codes beside them. For layers that sum what they read (GCN, SAGE by mean or sum, GIN, GCN2).

Legend: n own rows, c central rows, H halo rows, P ranks, D columns.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from polyhop.comm import Collective, Pending
from polyhop.exchange.crossing import Crossing, Direction, Messages, add_rows, matrix
from polyhop.kernels.keys import Key

__all__ = ["Held", "SequentialCrossing"]


class Held:
    """Bytes of tensors that are held, and the most there ever were."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def take(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.peak = max(self.peak, self.now)

    def give(self, num_bytes: int) -> None:
        self.now -= num_bytes

    def watch(self, tensor: Tensor) -> None:
        """Counts from now until the tensor is gone, whoever still has it."""
        num_bytes = tensor.numel() * tensor.element_size()
        self.take(num_bytes)
        weakref.finalize(tensor, self.give, num_bytes).atexit = False


class SequentialCrossing(Crossing):
    """``end_forward`` gives sums [n - c, ...] over the halo's rows in place of the rows. ``depth`` rounds are ahead.

    ``halo_held`` counts rows of the halo, or gradients of them; ``lent_held`` those of own rows on their way.
    """

    def __init__(
        self, messages: Messages, line: Collective, *, overlaps: bool = True, depth: int = 1
    ) -> None:
        super().__init__(messages, line, overlaps=overlaps)
        assert not messages.lists.lent_sums, "rows are summed where they are read"
        self.depth = depth
        self.halo_held, self.lent_held = Held(), Held()
        self._under_way: deque[tuple[int, Pending[Tensor]]] = deque()  # (rank it comes from, its rows)
        self._round = 0  # the last that began
        self._source: Tensor | None = (
            None  # what leaves: own rows [n, D], backward gradients of the sums [n - c, D]
        )
        self._sums: Tensor | None = None  # [n - c, D], kept for a forward pass that is computed again

    def begin_step(self, key: Key) -> None:
        super().begin_step(key)
        self._under_way.clear()
        self._source = None

    def end_step(self) -> None:
        super().end_step()
        self._sums = None

    def begin_forward(self, rows: Tensor, sums: Tensor | None) -> None:
        self._note_shape(rows)
        self._begin("forward", matrix(rows))

    def end_forward(self) -> Tensor:
        if self.is_replaying:
            assert self._sums is not None, "a forward pass was made before it is computed again"
            return self._sums.detach()  # autograd marks what it is given
        reader = self._reader
        assert reader is not None, "the layer that reads rows sums them"
        assert self._source is not None, "rows leave before they arrive"
        like = self._source
        dtype = torch.float32 if like.dtype.itemsize < 4 else like.dtype
        sums = torch.zeros(reader.num_summed, like.shape[1], dtype=dtype, device=like.device)
        self._end("forward", lambda rank, rows: reader.add_shard(sums, rank, rows))
        found = sums.to(like.dtype).view(-1, *self.shape)
        self._sums = found.detach() if self.keeps else None
        return found

    def begin_backward(self, halo_grad: Tensor) -> None:
        self._begin("backward", matrix(halo_grad))

    def end_backward(self, own_grad: Tensor) -> tuple[Tensor, Tensor | None]:
        def add(rank: int, rows: Tensor) -> None:
            add_rows(own_grad, [self.lists.lent[rank]], [rows])

        self._end("backward", add)
        return own_grad, None

    def _begin(self, direction: Direction, source: Tensor) -> None:
        self._source, self._round = source, 0
        for _ in range(1 + self.depth):
            self._post_next(direction)

    def _end(self, direction: Direction, use: Callable[[int, Tensor], None]) -> None:
        while self._under_way:
            self._take_next(direction, use)
            self._post_next(direction)
        self._source = None

    def _take_next(self, direction: Direction, use: Callable[[int, Tensor], None]) -> None:
        """Use the rows of the oldest round; they are gone when this returns."""
        rank, pending = self._under_way.popleft()
        rows = pending.wait()
        with self.spans.span("sum", direction):
            use(rank, rows)

    def _post_next(self, direction: Direction) -> None:
        """Begin the next round, if there is one."""
        if self._round + 1 >= self.line.num_ranks:
            return
        self._round += 1
        assert self._source is not None
        up = (self.line.rank + self._round) % self.line.num_ranks
        down = (self.line.rank - self._round) % self.line.num_ranks
        source, to = (down, up) if direction == "forward" else (up, down)
        pending = self._post_round(direction, self._source, source, to)
        if not self.overlaps:
            pending.wait()
        self._under_way.append((source, pending))

    def _post_round(self, direction: Direction, rows: Tensor, source: int, to: int) -> Pending[Tensor]:
        leaving, arriving = (
            (self.lent_held, self.halo_held) if direction == "forward" else (self.halo_held, self.lent_held)
        )
        packed = self._packed(direction, rows, to)
        if packed.numel():
            leaving.watch(packed)
        count = self.messages.counts(direction, rows.shape[1])[source]
        nothing = torch.empty((0, *packed.shape[1:]), dtype=packed.dtype, device=self.line.device)
        pieces = [nothing] * self.line.num_ranks
        pieces[to] = packed.to(self.line.device)
        counts = [count if rank == source else 0 for rank in range(self.line.num_ranks)]
        began, like = self.spans.trace.clock(), rows.new_empty(0, rows.shape[1])
        pending = self.line.start_all_to_all(pieces, kind="hidden", counts=counts)
        coming = count * packed.shape[1:].numel() * packed.element_size()
        arriving.take(coming)

        def finish() -> Tensor:
            with self.spans.span("wait", direction):
                piece = pending.wait()[source].to(like.device)
            self.spans.crossed(began, direction, pieces[to].nbytes)
            arriving.give(coming)
            arriving.watch(piece)
            found = self.messages.opened(direction, piece, source, like)
            if found is not piece:
                arriving.watch(found)
            return found

        return Pending(finish)

    def _packed(self, direction: Direction, rows: Tensor, to: int) -> Tensor:
        """The message for one rank."""
        with self.spans.span("pack", direction):
            if direction == "forward":
                return self.messages.packed(direction, rows, self.lists.lent[to], self.line.rank, to)
            assert self._reader is not None, "rows were read before they have gradients"
            grad = self._reader.shard_grad(rows, to)
            message = self.messages.packed(direction, grad, None, self.line.rank, to)
            if message is not grad:
                self.halo_held.watch(grad)
            return message
