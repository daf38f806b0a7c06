"""Push and pull: edges of every rank's first layer to those who hold columns of the features, partial sums back.

    push    ids and edges of the own first layer to every rank that has columns, ahead of training (``PushLoader``)
    pull    each rank's part of the product, summed in rank order where the layer is used; backward the gradient of the
            sum goes to all who had a part in it (``Pull``)
    gather  gradients of weights, each rank those of its own columns (``gather_slices``)

An id has as few bytes as the graph's nodes need, an edge as few as the block's sources.

Legend: N nodes, P ranks; of a rank's first layer S sources, D destinations, E edges; c columns of a rank, W columns of a
mapped row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyhop.comm import Collective, Pending
from polyhop.errors import ConfigError, PeerError
from polyhop.exchange.columns import Columns
from polyhop.exchange.loader import Seeds, blocks_of
from polyhop.graph import Block
from polyhop.sample import MiniBatch
from polyhop.sample.ahead import ahead
from polyhop.sample.part import Drawn, DrawnLayer, PartSampler
from polyhop.trace import NO_TRACE, Trace

__all__ = ["Pull", "PushBatch", "PushLoader", "PushWire", "Pushed", "gather_slices"]


@dataclass(frozen=True)
class PushWire:
    """What a pushed layer looks like as bytes: ids of sources, rows of edges, weights, a count for each destination."""

    num_nodes: int
    count_dtype: torch.dtype  # of a destination's edges
    is_weighted: bool = False
    has_edges: bool = True  # else ids alone

    def num_bytes(self, num_src: int, num_dst: int, num_edges: int) -> int:
        """Of a layer's message."""
        ids = num_src * _width(self.num_nodes)
        if not self.has_edges:
            return ids
        edge = _width(num_src) + (4 if self.is_weighted else 0)
        return ids + num_edges * edge + num_dst * self.count_dtype.itemsize

    def encode(self, ids: Tensor, layer: DrawnLayer) -> Tensor:
        """uint8 of a layer and the new ids of its sources (int64 [S])."""
        pieces = [_narrow(ids, _width(self.num_nodes))]
        if self.has_edges:
            pieces.append(_narrow(layer.indices.long(), _width(ids.numel())))
            if self.is_weighted:
                assert layer.edge_weight is not None, "a weighted graph's layers have weights"
                pieces.append(layer.edge_weight.to(torch.float32).contiguous().view(torch.uint8))
            pieces.append(layer.indptr.diff().to(self.count_dtype).contiguous().view(torch.uint8))
        return torch.cat(pieces)

    def decode(
        self, data: Tensor, sizes: Sequence[int], sender: int, *, is_sampled: bool
    ) -> tuple[Tensor, DrawnLayer]:
        """What ``encode`` was given, of a layer of ``sizes`` (S, D, E); PeerError if it cannot be."""
        num_src, num_dst, num_edges = sizes
        reader = _Reader(data)
        ids = reader.wide(num_src, _width(self.num_nodes))
        indptr, indices, weights = torch.zeros(1, dtype=torch.int64), ids[:0].int(), None
        is_whole = num_src == 0 or int(ids.max()) < self.num_nodes
        if self.has_edges:
            indices = reader.wide(num_edges, _width(num_src)).int()
            weights = reader.take(num_edges, torch.float32) if self.is_weighted else None
            counts = reader.take(num_dst, self.count_dtype).long()
            indptr = torch.zeros(num_dst + 1, dtype=torch.int64)
            torch.cumsum(counts, 0, out=indptr[1:])
            is_whole &= int(indptr[-1]) == num_edges and bool((counts >= 0).all())
            is_whole &= num_edges == 0 or int(indices.max()) < num_src
        if not is_whole or num_dst > num_src:
            raise PeerError(f"rank {sender} pushed a layer of (S, D, E) = {list(sizes)} that is none")
        return ids, DrawnLayer(indptr, indices, num_src, weights, is_sampled)


def _width(count: int) -> int:
    """Bytes that hold 0 .. count - 1."""
    return max(1, ((count - 1).bit_length() + 7) // 8)


def _narrow(values: Tensor, width: int) -> Tensor:
    """uint8 [n * width]: the low bytes of int64 [n]."""
    return values.contiguous().view(torch.uint8).view(-1, 8)[:, :width].reshape(-1)


class _Reader:
    """Takes arrays off the front of a buffer."""

    def __init__(self, data: Tensor) -> None:
        self._data, self._at = data, 0

    def _raw(self, num_bytes: int) -> Tensor:
        self._at += num_bytes
        return self._data[self._at - num_bytes : self._at]

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        return self._raw(count * dtype.itemsize).clone().view(dtype)  # a copy, because it must be aligned

    def wide(self, count: int, width: int) -> Tensor:
        """int64 [count] of what ``_narrow`` made."""
        out = torch.zeros(count, 8, dtype=torch.uint8)
        out[:, :width] = self._raw(count * width).view(count, width)
        return out.view(torch.int64).view(count)


@dataclass(frozen=True, eq=False)
class Pushed:
    """What a rank computes of a first layer, its own or another's."""

    block: Block  # without destinations and edges where sources alone are mapped
    x: Tensor  # [S, c]: the rank's columns of the sources


@dataclass(frozen=True, eq=False)
class PushBatch:
    """What one rank trains in one step."""

    batch: MiniBatch  # of the own seeds, by the user's ids; they may be none
    pushed: Sequence[Pushed | None]  # of each rank; None: it has no seeds, or this one no columns
    sizes: Sequence[tuple[int, int]]  # (S, D) of each rank's first layer
    y: Tensor  # labels of the own seeds
    num_global: int  # seeds of all ranks in this step


class PushLoader:
    """The mini-batches of one rank, and the first layers that others push to it, ahead of training."""

    def __init__(
        self,
        line: Collective,
        sampler: PartSampler,
        columns: Columns,
        seeds: Seeds,
        wire: PushWire,
        *,
        prefetch: int = 2,
        trace: Trace = NO_TRACE,
    ) -> None:
        if sampler.part.y is None:
            raise ConfigError("the graph has no labels: training needs y")
        self.line, self.sampler, self.columns, self.seeds = line, sampler, columns, seeds
        self.wire, self.prefetch, self.trace = wire, prefetch, trace
        self._y, self._start = sampler.part.y, sampler.part.start

    def __len__(self) -> int:
        return self.seeds.num_steps

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[PushBatch]:
        """The mini-batches from ``start_step`` on, in step order; all ranks take them together."""
        own = self.seeds.own(epoch)

        def load(step: int) -> PushBatch:
            return self._load(own[step], epoch, step)

        steps = range(start_step, len(self))
        if self.prefetch == 0:
            return map(load, steps)
        # What one rank has begun all finish, or the others would wait for it.
        return ahead(load, steps, 1, self.prefetch, finish_begun=True)

    def _load(self, seeds: Tensor, epoch: int, step: int) -> PushBatch:
        with self.trace.span("sample", epoch=epoch, step=step):
            drawn = self.sampler.sample(self.line, seeds, epoch, step)
            facts = self.columns.facts.at(drawn.ids)
            batch = MiniBatch(step, facts.user_ids[: seeds.numel()], blocks_of(drawn, facts))
        with self.trace.span("load", epoch=epoch, step=step):
            pushed, sizes = self._pushed(drawn)
        return PushBatch(batch, pushed, sizes, self._y[seeds - self._start], self.seeds.count(step))

    def _pushed(self, drawn: Drawn) -> tuple[list[Pushed | None], list[tuple[int, int]]]:
        """(what this rank computes, sizes of the layers) of each rank."""
        line, first, holders = self.line, drawn.layers[0], self.columns.holders
        sizes = _sizes(line, (first.num_src, first.indptr.numel() - 1, first.indices.numel()))
        message = self.wire.encode(drawn.ids, first)
        leaving = [message if q in holders and q != line.rank else message[:0] for q in range(line.num_ranks)]
        is_holder = line.rank in holders
        counts = [
            self.wire.num_bytes(*size) if is_holder and q != line.rank else 0 for q, size in enumerate(sizes)
        ]
        arriving = line.start_all_to_all(leaving, kind="ids", counts=counts)
        found: list[Pushed | None] = [None] * line.num_ranks
        if is_holder and first.num_src:
            found[line.rank] = self._held(drawn.ids, first)
        for q, data in enumerate(arriving.wait()):
            if data.numel() and q != line.rank:
                is_sampled = self.sampler.num_neighbors[-1] > 0
                found[q] = self._held(*self.wire.decode(data.cpu(), sizes[q], q, is_sampled=is_sampled))
        return found, [(num_src, num_dst) for num_src, num_dst, _ in sizes]

    def _held(self, ids: Tensor, layer: DrawnLayer) -> Pushed:
        """A layer with this rank's columns of its sources (int64 [S], new ids)."""
        x = self.columns.x.gather(ids)
        if not self.wire.has_edges:
            nothing = torch.zeros(1, dtype=torch.int64), layer.indices[:0]
            return Pushed(Block(*nothing, layer.num_src), x)
        facts = self.columns.facts.at(ids)
        return Pushed(blocks_of(Drawn(ids, (layer,)), facts)[0], x)

    def close(self) -> None:
        """Let go of the line, with the other ranks."""
        self.line.close()


def _sizes(line: Collective, own: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """(S, D, E) of every rank's first layer."""
    got = line.all_gather(
        torch.tensor(own, device=line.device), kind="sizes", counts=[len(own)] * line.num_ranks
    )
    found = []
    for each in got:
        num_src, num_dst, num_edges = each.tolist()
        found.append((num_src, num_dst, num_edges))
    return found


class Pull:
    """Parts of one step's mapped rows: those of other ranks' layers leave, those of the own one arrive and are added up.

    ``num_rows[p]``: mapped rows of rank p's layer. Parts of other ranks leave before the own one is computed, and backward
    gradients arrive while it is.
    """

    def __init__(
        self, line: Collective, holders: Sequence[int], num_rows: Sequence[int], like: Tensor
    ) -> None:
        self._line, self._holders, self._num_rows, self._like = line, list(holders), list(num_rows), like
        self._pending: Pending[list[Tensor]] | None = None
        self._is_holder = line.rank in self._holders
        self._peers = [p for p in range(line.num_ranks) if p != line.rank]

    def leave(self, parts: Sequence[Tensor], *, returns: bool) -> Tensor:
        """Parts [num_rows[p], W] of the other ranks' rows, in rank order, leave; gives the token that ``arrive`` takes."""
        # A rank without columns has no parts with gradients, and must take part in the backward pass all the same.
        token = torch.zeros((), dtype=self._like.dtype, device=self._like.device, requires_grad=returns)
        tied: Tensor = _Leave.apply(self, token, *parts)  # type: ignore[no-untyped-call]
        return tied

    def arrive(self, token: Tensor, own: Tensor) -> Tensor:
        """[num_rows of this rank, W]: the own part and all others', summed in rank order."""
        z: Tensor = _Arrive.apply(self, token, own)  # type: ignore[no-untyped-call]
        return z

    # What follows runs on detached tensors.

    def begin_forward(self, parts: Sequence[Tensor]) -> None:
        leaving = [self._like] * self._line.num_ranks
        for p, part in zip(self._peers, parts, strict=True):
            leaving[p] = part if self._is_holder else self._like
        own = self._num_rows[self._line.rank]
        self._post(leaving, [own if q in self._holders else 0 for q in range(self._line.num_ranks)])

    def end_forward(self, own: Tensor) -> Tensor:
        pieces = self._arrived()
        pieces[self._line.rank] = own
        first, *others = (pieces[k] for k in self._holders)
        total = first.clone()
        for piece in others:
            total += piece
        return total

    def begin_backward(self, grad: Tensor) -> None:
        is_sent = [q in self._holders and q != self._line.rank for q in range(self._line.num_ranks)]
        rows = self._num_rows if self._is_holder else [0] * self._line.num_ranks
        self._post([grad if sent else self._like for sent in is_sent], rows)

    def end_backward(self) -> list[Tensor | None]:
        """Gradients of the parts that left; None where they were empty."""
        pieces = self._arrived()
        return [pieces[p] if self._is_holder else None for p in self._peers]

    def _post(self, leaving: Sequence[Tensor], counts: Sequence[int]) -> None:
        here = [piece.to(self._line.device) for piece in leaving]
        self._pending = self._line.start_all_to_all(here, kind="hidden", counts=counts)

    def _arrived(self) -> list[Tensor]:
        assert self._pending is not None, "rows leave before they arrive"
        pieces, self._pending = self._pending.wait(), None
        return [piece.to(self._like.device) for piece in pieces]


class _Leave(torch.autograd.Function):
    """Parts of other ranks' rows -> a token that ties the own rows to them."""

    @staticmethod
    def forward(ctx: Any, pull: Pull, token: Tensor, *parts: Tensor) -> Tensor:
        ctx.pull = pull
        pull.begin_forward(parts)
        return token.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.pull.end_backward()


class _Arrive(torch.autograd.Function):
    """Token, own part -> the sum. Made after the own part, so its backward pass runs before that of all parts."""

    @staticmethod
    def forward(ctx: Any, pull: Pull, token: Tensor, own: Tensor) -> Tensor:
        ctx.pull = pull
        return pull.end_forward(own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad.contiguous()
        ctx.pull.begin_backward(grad)
        return None, grad.new_zeros(()), grad if ctx.needs_input_grad[2] else None


def gather_slices(own: Sequence[Tensor], bounds: Sequence[int], line: Collective) -> Pending[list[Tensor]]:
    """Matrices [out, F] of which each rank has the columns bounds[k] .. bounds[k + 1] - 1, as contents of ``own``."""
    heights, like = [each.shape[0] for each in own], own[0]
    widths = [stop - start for start, stop in pairwise(bounds)]
    flat = torch.cat([each.reshape(-1) for each in own]).to(line.device)
    counts = [sum(heights) * width for width in widths]
    pending = line.start_all_to_all([flat] * line.num_ranks, kind="gradients", counts=counts)

    def whole() -> list[Tensor]:
        pieces = pending.wait()
        cut = [
            piece.to(like.device).view(sum(heights), width)
            for piece, width in zip(pieces, widths, strict=True)
        ]
        return list(torch.cat(cut, dim=1).split(heights))  # type: ignore[no-untyped-call]

    return Pending(whole)
