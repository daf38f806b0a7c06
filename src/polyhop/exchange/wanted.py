"""What a rank asks of an owner for one layer of a shared mini-batch: rows, or sums of them where those are fewer bytes.

A destination that reads many rows of another part, which nobody else there reads, can be sent their sum: one row there, one
gradient back. The reader knows the edges, so it decides, alone, by the bytes of all that crosses for it:

    rows     ids of the rows                             + each of them, and its gradient
    sums     the same ids, then the entries of the sums  + rows that are in no sum, and the sums

Which rows are summed is a smallest vertex cover (``partition.cover``). In it all edges of a row are served alike, so an
owner that reads the entries knows which rows cross as they are. One ascending list of numbers says all: rows of the owner
(below its size n), then n + j k + i for the i-th of the k rows as an entry of sum j. Without sums it is the list of rows.

Legend: n nodes of the owner, k rows asked for, E edges to them, A sums, e entries of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyhop.errors import PeerError
from polyhop.exchange.crossing import Lists
from polyhop.graph import Block, Sums
from polyhop.kernels import quantised_bytes
from polyhop.partition import least_cover
from polyhop.sample.wire import Wire

__all__ = ["FarEdges", "Price", "Wanted", "told", "with_sums"]


@dataclass(frozen=True)
class Price:
    """What a row costs at one layer, there and back."""

    columns: int
    value_bytes: int = 4
    bits: int = 32
    returns: bool = True  # so does its gradient
    entry_bytes: int = 0  # of an entry of a sum besides its number: the edge's weight, where edges have one

    @property
    def row_bytes(self) -> int:
        size = self.columns * self.value_bytes
        if self.bits < 32:
            size = quantised_bytes(torch.tensor([self.bits], dtype=torch.uint8), self.columns)
        return size * (2 if self.returns else 1)


@dataclass(frozen=True, eq=False)
class Wanted:
    """What is asked of one owner. All rows without sums, or with them."""

    rows: Tensor  # int64 [k], ascending: rows of the owner
    entry: Tensor  # int64 [e], ascending: j k + i
    edges: Tensor  # int64 [e]: the edge that each entry is

    @classmethod
    def of(
        cls, rows: Tensor, place: Tensor, to: Tensor, size: int, price: Price | None, wire: Wire
    ) -> Wanted:
        """Of edges from rows[place] to destinations ``to`` (int64 [E] each), whichever is fewer bytes; price None: rows."""
        nothing = rows[:0]
        plain = cls(rows, nothing, nothing)
        if price is None or rows.numel() < 2:
            return plain
        summed = cls._summed(rows, place, to)
        return summed if summed.num_bytes(size, price, wire) < plain.num_bytes(size, price, wire) else plain

    @classmethod
    def _summed(cls, rows: Tensor, place: Tensor, to: Tensor) -> Wanted:
        cover = least_cover(place, to)
        edges = (~cover.is_by_source).nonzero()[:, 0]
        entry = torch.searchsorted(cover.destinations, to[edges]) * rows.numel() + place[edges]
        order = torch.sort(entry, stable=True)
        return cls(rows, order.values, edges[order.indices])

    @property
    def counts(self) -> Tensor:
        """int64 [A]: entries of each sum."""
        counts: Tensor = torch.unique_consecutive(self._sum, return_counts=True)[1]
        return counts

    @property
    def _sum(self) -> Tensor:
        """int64 [e]: the sum of each entry, 0 .. A - 1."""
        return self.entry // max(1, self.rows.numel())

    @property
    def place(self) -> Tensor:
        """int64 [e]: the row of each entry."""
        return self.entry % max(1, self.rows.numel())

    @property
    def num_sums(self) -> int:
        return int(self._sum[-1]) + 1 if self.entry.numel() else 0

    @property
    def is_row(self) -> Tensor:
        """bool [k]: whether a row crosses as it is."""
        found = torch.ones(self.rows.numel(), dtype=torch.bool)
        found[self.place] = False
        return found

    @property
    def num_crossing(self) -> int:
        """Rows that cross, sums included."""
        return int(self.is_row.sum()) + self.num_sums

    @property
    def to(self) -> Tensor:
        """int64 [A]: an edge of each sum."""
        return self.edges[self.counts.cumsum(0) - 1]

    def numbers(self, size: int) -> Tensor:
        """int64: what the owner is told; it has ``size`` nodes."""
        return torch.cat([self.rows, self.entry + size]) if self.entry.numel() else self.rows

    def num_bytes(self, size: int, price: Price, wire: Wire) -> int:
        """Of all that crosses for this."""
        told = wire.request_bytes(self.numbers(size)) + price.entry_bytes * self.entry.numel()
        return told + price.row_bytes * self.num_crossing


def told(numbers: Tensor, size: int, reader: int, *, takes_sums: bool) -> Wanted:
    """What ``reader`` asks of this owner of ``size`` nodes, of the numbers it sent; PeerError if they cannot be."""
    nothing = numbers[:0]
    rows = numbers[numbers < size]
    asked = Wanted(rows, numbers[rows.numel() :] - size, nothing)
    if numbers.numel() and int(numbers[0]) < 0:
        raise _refused(numbers, size, reader, "")
    if asked.entry.numel() and not (takes_sums and rows.numel()):
        raise _refused(numbers, size, reader, "")
    if asked.entry.numel():
        steps = torch.unique_consecutive(asked._sum).diff(prepend=nothing.new_full((1,), -1))
        if bool((steps != 1).any()):
            raise _refused(numbers, size, reader, ", and sums of none of them")
    return asked


def _refused(numbers: Tensor, size: int, reader: int, more: str) -> PeerError:
    return PeerError(
        f"rank {reader} asked for rows {int(numbers.min())} .. {int(numbers.max())}{more}: this rank owns {size}"
    )


@dataclass(frozen=True, eq=False)
class FarEdges:
    """Edges of a hop from sources elsewhere."""

    at: Tensor  # int64: which of all edges
    place: Tensor  # int64: of its source among those asked for; below 0: it need not be
    to: Tensor  # int64: its destination, 0 .. F - 1

    @classmethod
    def of(cls, is_far: Tensor, place: Tensor, counts: Tensor) -> FarEdges:
        """Of a frontier whose nodes have so many edges (int64 [F])."""
        to = torch.repeat_interleave(torch.arange(counts.numel()), counts)
        return cls(is_far.nonzero()[:, 0], place, to[is_far])

    def between(self, start: int, stop: int) -> Tensor:
        """int64: those from sources start .. stop - 1."""
        return ((self.place >= start) & (self.place < stop)).nonzero()[:, 0]


def with_sums(
    block: Block,
    lists: Lists,
    edges: FarEdges,
    both: tuple[Sequence[Wanted], Sequence[Wanted]],
    weights: Tensor | None,
) -> tuple[Block, Lists, Sums | None]:
    """A layer whose halo are all rows asked for -> one whose halo is what crosses: of each rank rows, then sums.

    ``both``: what this rank asks of each, whose ``edges`` are places in ``edges``, and what each asks of it. ``weights``
    float: of the entries of all sums that leave.
    """
    wanted, asked = both
    if not any(each.entry.numel() for each in (*wanted, *asked)):
        return block, lists, None
    n, start = lists.num_own, lists.num_own
    place, end = torch.arange(block.num_src, dtype=torch.int32), n
    is_kept = torch.ones(block.num_edges, dtype=torch.bool)
    sources, at, to = [torch.arange(n)], list[Tensor](), list[Tensor]()
    for each in wanted:
        rows = start + each.is_row.nonzero()[:, 0]
        place[rows] = torch.arange(end, end + rows.numel(), dtype=torch.int32)
        # A sum stands where its row will be; it is nobody's source, so whose degrees it has does not matter.
        to.append(edges.to[each.to])
        sources += [rows, to[-1]]
        at.append(torch.arange(end + rows.numel(), end + each.num_crossing) - n)
        is_kept[edges.at[each.edges]] = False
        start, end = start + each.rows.numel(), end + each.num_crossing
    lent = [rows[each.is_row] for rows, each in zip(lists.lent, asked, strict=True)]
    entries = [rows[each.place] for rows, each in zip(lists.lent, asked, strict=True)]
    counts = torch.cat([each.counts for each in asked])
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return (
        _kept_edges(block, is_kept, place, torch.cat(sources)),
        Lists(n, lent, [each.num_crossing for each in wanted], [each.num_sums for each in asked]),
        Sums(indptr, torch.cat(entries).to(torch.int32), weights, n, torch.cat(at), torch.cat(to)),
    )


def _kept_edges(block: Block, is_kept: Tensor, place: Tensor, sources: Tensor) -> Block:
    """Only these edges, from other sources; what destinations have drawn stays."""
    before = torch.zeros(block.num_edges + 1, dtype=torch.int64)
    torch.cumsum(is_kept, 0, out=before[1:])
    names = ("src_ids", "in_degree", "in_weight", "loop_weight")
    given = {name: getattr(block, name) for name in names}
    return replace(
        block,
        indptr=before[block.indptr],
        indices=place[block.indices[is_kept].long()],
        num_src=sources.numel(),
        edge_weight=None if block.edge_weight is None else block.edge_weight[is_kept],
        num_drawn=block.drawn,
        **{name: value[sources] for name, value in given.items() if value is not None},
        _cache={},
    )
