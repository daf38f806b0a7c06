"""Collective: how ranks exchange tensors. One interface over gloo, nccl and in-process threads; ground of this folder.

Every operation is called by all ranks in the same order (a *line*); ``fork`` opens a second line whose order is its own,
for a thread that works beside. ``start_`` variants return at once; ``wait`` on what they return gives the result. Sums run
in rank order, so they have the same bits on every rank, over every backend.

Legend: P ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Generic, TypeVar

import torch
from torch import Tensor

from polyhop.comm.traffic import Traffic
from polyhop.errors import InputError

__all__ = ["Collective", "Pending", "is_summed_everywhere", "slices", "summed"]

T = TypeVar("T")
_EXPECTED = 1  # tag of messages whose receives were posted ahead
_ROUND_BYTES = 1 << 15  # what a round is worth: a quarter of a millisecond at 1 Gbit/s


class Pending(Generic[T]):
    """A result on its way."""

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._result: T

    def wait(self) -> T:
        """The result, once it is there; the same object however often it is asked for."""
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result


def slices(size: int, num_ranks: int) -> list[int]:
    """P + 1 bounds that cut ``size`` elements into nearly equal slices."""
    return [rank * size // num_ranks for rank in range(num_ranks + 1)]


def is_summed_everywhere(num_bytes: int, num_ranks: int) -> bool:
    """Whether ``all_reduce`` sends a tensor of so many bytes whole to everyone: one round, where slices take two.

    Slices are 2 (P - 1) / P of the bytes, whole tensors P - 1 times as many.
    """
    return num_bytes * (num_ranks - 1) * (num_ranks - 2) <= _ROUND_BYTES * num_ranks


class Collective(ABC):
    """The line of one rank to all others."""

    rank: int
    num_ranks: int
    traffic: Traffic
    device: torch.device  # where received tensors lie
    has_tags: bool = True  # messages of several tags pass one another
    address: str = "127.0.0.1"  # at which the other ranks reach this one's host

    @abstractmethod
    def fork(self) -> Collective:
        """Another line between the same ranks, with an order of its own. All ranks call it, in the same order."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what the line holds. Nothing may be in flight."""

    @abstractmethod
    def _post(
        self, send: Sequence[Tensor | None], receive: Sequence[Tensor | None], tag: int = 0
    ) -> Callable[[], None]:
        """Begin to send to and receive from each rank (None: nothing); the call that is returned ends when all arrived.

        What is sent under a tag meets what is received under it, in order.
        """

    # What follows is the same over every backend.

    def all_to_all(
        self, rows: Sequence[Tensor], *, kind: str, counts: Sequence[int] | None = None
    ) -> list[Tensor]:
        """rows[q] [n_q, ...] goes to rank q; returns what each rank had for this one. See ``start_all_to_all``."""
        return self.start_all_to_all(rows, kind=kind, counts=counts).wait()

    def start_all_to_all(
        self, rows: Sequence[Tensor], *, kind: str, counts: Sequence[int] | None = None
    ) -> Pending[list[Tensor]]:
        """Uneven rows of one dtype and width to every rank. ``counts[q]``: rows that come from rank q, where known.

        Where they are not, they are exchanged first (8 bytes to each peer, kind ``sizes``), which waits. The tensors must
        not change before the result is waited for. The own piece is handed over as it is.
        """
        self._check(rows)
        if counts is None:
            counts = self._sizes([piece.shape[0] for piece in rows])
        like = rows[self.rank]
        receive = [
            None
            if q == self.rank or counts[q] == 0
            else self._empty((counts[q], *like.shape[1:]), like.dtype)
            for q in range(self.num_ranks)
        ]
        finish = self._exchange(rows, receive, kind)

        def result() -> list[Tensor]:
            finish()
            nothing = self._empty((0, *like.shape[1:]), like.dtype)
            got = [nothing if piece is None else piece for piece in receive]
            got[self.rank] = like
            return got

        return Pending(result)

    def all_gather(self, tensor: Tensor, *, kind: str, counts: Sequence[int] | None = None) -> list[Tensor]:
        """Every rank's tensor [n_q, ...], in rank order; ``counts`` as for ``all_to_all``."""
        return self.all_to_all([tensor] * self.num_ranks, kind=kind, counts=counts)

    def all_reduce(self, tensor: Tensor, *, kind: str) -> Tensor:
        """The sum of all ranks' tensors (same shape and dtype), a new tensor."""
        return self.start_all_reduce(tensor, kind=kind).wait()

    def start_all_reduce(self, tensor: Tensor, *, kind: str) -> Pending[Tensor]:
        """An all-to-all of slices, a sum in rank order, an all-gather: the bytes of a ring. A small tensor goes whole."""
        flat = tensor.reshape(-1)
        if self.num_ranks == 1:
            return Pending(tensor.clone)
        if is_summed_everywhere(flat.numel() * flat.element_size(), self.num_ranks):
            everyone = [flat] * self.num_ranks
            whole = self.start_all_to_all(everyone, kind=kind, counts=[flat.numel()] * self.num_ranks)
            return Pending(lambda: summed(whole.wait()).view(tensor.shape))
        bounds = slices(flat.numel(), self.num_ranks)
        sizes = [stop - start for start, stop in pairwise(bounds)]
        mine = sizes[self.rank]
        pieces = [flat[start:stop] for start, stop in pairwise(bounds)]
        scattered = self.start_all_to_all(pieces, kind=kind, counts=[mine] * self.num_ranks)

        def result() -> Tensor:
            total = summed(scattered.wait())
            return torch.cat(self.all_gather(total, kind=kind, counts=sizes)).view(tensor.shape)

        return Pending(result)

    def expect_sum(self, size: int, dtype: torch.dtype, *, kind: str) -> Callable[[Tensor], Pending[Tensor]]:
        """``start_all_reduce`` of a vector whose turn comes later: what is returned takes it, once it is there.

        Receives are posted now, so that no rank's message finds its receiver unprepared: a backend works several times as
        long on one that does. Other operations of the line may come between. At most one sum is expected at a time.
        """
        peers = [q for q in range(self.num_ranks) if q != self.rank]
        is_small = is_summed_everywhere(size * dtype.itemsize, self.num_ranks)
        if not peers or not is_small or not self.has_tags:
            return lambda own: self.start_all_reduce(own, kind=kind)
        arrived = self._empty((self.num_ranks, size), dtype)
        pieces = list(arrived.unbind())
        receive: list[Tensor | None] = list(pieces)
        receive[self.rank] = None
        received = self._post([None] * self.num_ranks, receive, _EXPECTED)

        def give(own: Tensor) -> Pending[Tensor]:
            for q in peers:
                self.traffic.sent(kind, size * dtype.itemsize, self._outer(q))
            self.traffic.waited()
            own = own.contiguous()
            send = [None if q == self.rank else own for q in range(self.num_ranks)]
            sent = self._post(send, [None] * self.num_ranks, _EXPECTED)

            def result() -> Tensor:
                received()
                sent()
                pieces[self.rank] = own
                return summed(pieces)

            return Pending(result)

        return give

    def broadcast(self, tensor: Tensor, *, kind: str, source: int = 0) -> Tensor:
        """The source's tensor, on every rank; the others give one of the same shape and dtype, which is not read."""
        if self.num_ranks == 1:
            return tensor
        is_source = self.rank == source
        send = [tensor if is_source and q != source else None for q in range(self.num_ranks)]
        got = None if is_source else self._empty(tuple(tensor.shape), tensor.dtype)
        receive = [got if q == source else None for q in range(self.num_ranks)]
        self._exchange(send, receive, kind)()
        return tensor if got is None else got

    def send(self, tensor: Tensor, to: int, *, kind: str) -> None:
        """Point to point; the other rank calls ``receive``."""
        self.start_send(tensor, to, kind=kind).wait()

    def start_send(self, tensor: Tensor, to: int, *, kind: str) -> Pending[None]:
        self._check_peer(to)
        send = [tensor if q == to else None for q in range(self.num_ranks)]
        return Pending(self._exchange(send, [None] * self.num_ranks, kind))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """A tensor of that shape and dtype from another rank."""
        return self.start_receive(shape, dtype, source).wait()

    def start_receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Pending[Tensor]:
        self._check_peer(source)
        got = self._empty(tuple(shape), dtype)
        receive = [got if q == source else None for q in range(self.num_ranks)]
        finish = self._exchange([None] * self.num_ranks, receive, "ids")

        def result() -> Tensor:
            finish()
            return got

        return Pending(result)

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        self.all_gather(
            torch.zeros(1, dtype=torch.uint8, device=self.device), kind="sizes", counts=[1] * self.num_ranks
        )

    def _sizes(self, counts: Sequence[int]) -> list[int]:
        """Rows that each rank has for this one."""
        given = torch.tensor(counts, dtype=torch.int64, device=self.device)
        pieces = self.all_to_all(list(given.view(-1, 1)), kind="sizes", counts=[1] * self.num_ranks)
        return [int(size) for size in torch.cat(pieces).tolist()]

    def _exchange(
        self, send: Sequence[Tensor | None], receive: Sequence[Tensor | None], kind: str
    ) -> Callable[[], None]:
        leaving: list[Tensor | None] = []
        for q, piece in enumerate(send):
            is_sent = piece is not None and q != self.rank and piece.numel() > 0
            leaving.append(piece.contiguous() if is_sent and piece is not None else None)
            if is_sent and piece is not None:
                self.traffic.sent(kind, piece.numel() * piece.element_size(), self._outer(q))
        arriving = [piece if piece is not None and piece.numel() else None for piece in receive]
        if self.num_ranks > 1:
            self.traffic.waited()
        return self._post(leaving, arriving)

    def _outer(self, rank: int) -> int:
        """The number by which a rank is counted: where this line is a few of the ranks, that among all."""
        return rank

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _check(self, rows: Sequence[Tensor]) -> None:
        if len(rows) != self.num_ranks:
            raise InputError(f"all_to_all: {len(rows)} pieces for {self.num_ranks} ranks: give one for each")
        like = rows[self.rank]
        for q, piece in enumerate(rows):
            if piece.dtype != like.dtype or piece.shape[1:] != like.shape[1:]:
                raise InputError(
                    f"all_to_all: the piece for rank {q} is {piece.dtype} {list(piece.shape)}, the own one {like.dtype} "
                    f"{list(like.shape)}: all must have one dtype and width"
                )

    def _check_peer(self, rank: int) -> None:
        if not 0 <= rank < self.num_ranks or rank == self.rank:
            raise InputError(f"rank {rank} is no peer of rank {self.rank} among {self.num_ranks} ranks")


def summed(pieces: Sequence[Tensor]) -> Tensor:
    """In rank order, a new tensor."""
    first, second, *others = pieces
    total = first + second
    for piece in others:
        total += piece
    return total
