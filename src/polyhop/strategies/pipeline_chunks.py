"""Chunks: the pieces of a graph that stream through a pipeline, each a Block of its own rows and those of others it reads.

Every stage computes on all nodes, so every rank gets all edges, once, from the ranks' parts. Chunks are parts of a partition
balanced by what a row costs: its edges and a constant. A chunk's rows are renumbered to be consecutive; sources of its block
are its own rows first, then those of other chunks, ascending. Where several ways share the chunks, a rank keeps those of its
way alone: rows of other ways that they read (its halo) are numbered behind its own.

Legend: N nodes, K chunks, n rows of a chunk, o rows of others that it reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from polyhop.comm import Collective
from polyhop.graph import Block, Graph, Part
from polyhop.partition import default_method, partition

__all__ = ["Chunk", "Chunks", "choose_chunks", "cut_chunks", "gather_block"]

ROW_COST = 32
"""Edges that a row costs as much as, beside its own: the dense products of a layer of about 128 columns."""

_PER_SOURCE = ("in_degree", "in_weight", "loop_weight")


@dataclass(frozen=True, eq=False)
class Chunk:
    """Rows start .. stop - 1 of the renumbered graph, and what they read."""

    start: int
    stop: int
    block: Block  # sources: own rows, then others
    others: Tensor  # int64 [o]: rows of other chunks, ascending
    other_chunks: Tensor  # int64 [o]: whose they are

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    def sources(self) -> Tensor:
        """int64 [n + o]: row of each source."""
        own = torch.arange(self.start, self.stop, device=self.others.device)
        return torch.cat([own, self.others])


@dataclass(frozen=True, eq=False)
class Chunks:
    """All chunks of a graph, or those of one way; numbers of chunks are those among all."""

    chunks: tuple[Chunk, ...]
    ids: Tensor  # int64 [N]: the user's id of each row, of a way's halo too
    first: int = 0  # number of the first of these chunks
    all_sizes: tuple[int, ...] = ()  # rows of the chunks of all ways; () = these are all
    halo_chunks: Tensor | None = None  # int64: whose each row of the halo is, ascending; None = no halo

    def __len__(self) -> int:
        """Chunks of all ways."""
        return len(self.all_sizes) or len(self.chunks)

    def __getitem__(self, chunk: int) -> Chunk:
        return self.chunks[chunk - self.first]

    def on(self, device: torch.device) -> Chunks:
        """The same, with what tables are read by where these are; blocks and ids stay."""
        moved = (
            replace(each, others=each.others.to(device), other_chunks=each.other_chunks.to(device))
            for each in self.chunks
        )
        return replace(self, chunks=tuple(moved))

    @property
    def numbers(self) -> range:
        """Of the chunks that are here."""
        return range(self.first, self.first + len(self.chunks))

    @property
    def num_rows(self) -> int:
        """Of a table: own rows, and the halo's."""
        return self.ids.numel()

    @property
    def num_own(self) -> int:
        """Rows of the chunks that are here."""
        return sum(chunk.num_rows for chunk in self.chunks)

    @property
    def sizes(self) -> list[int]:
        """Of the chunks of all ways."""
        return list(self.all_sizes) or [chunk.num_rows for chunk in self.chunks]

    @property
    def num_nodes(self) -> int:
        """Of the graph."""
        return sum(self.sizes)

    def halo_rows(self, chunk: int) -> slice:
        """Where rows of another way's chunk are that chunks here read."""
        num_own = self.num_own
        if self.halo_chunks is None:
            return slice(num_own, num_own)
        ends = torch.searchsorted(self.halo_chunks, torch.tensor([chunk, chunk + 1])).tolist()
        return slice(num_own + ends[0], num_own + ends[1])

    def table_rows(self, chunk: int) -> slice:
        """Where rows of any chunk are: its own, or those of another way's that chunks here read."""
        return self[chunk].rows if chunk in self.numbers else self.halo_rows(chunk)

    def reads(self) -> Tensor:
        """int64 [K, K]: rows of chunk j that chunk i reads; of chunks that are not here nothing is known (0)."""
        counts = torch.zeros(len(self), len(self), dtype=torch.int64)
        for number, chunk in zip(self.numbers, self.chunks, strict=True):
            counts[number] = torch.bincount(chunk.other_chunks, minlength=len(self))
        return counts


def gather_block(part: Part, line: Collective) -> tuple[Block, Tensor]:
    """All edges of the graph by the user's ids, however it was cut into parts, and int64 [N]: new id of each node.

    On every rank. All ranks call it together.
    """
    n = part.num_nodes
    wide = torch.int64 if int(part.bounds[-1]) >= 1 << 31 else torch.int32

    def everyone(own: Tensor) -> Tensor:
        return torch.cat(line.all_gather(own.to(line.device), kind="ids")).cpu()

    user_ids = everyone(part.user_ids)
    degree = everyone(part.indptr.diff().to(torch.int32))
    sources = everyone(part.src_ids[part.indices.long()].to(wide))
    indptr = torch.zeros(degree.numel() + 1, dtype=torch.int64)
    torch.cumsum(degree, 0, out=indptr[1:])
    new_ids = torch.empty_like(user_ids)
    new_ids[user_ids] = torch.arange(user_ids.numel())
    edges, ordered = _edges_of(indptr, new_ids)
    weight = None if part.edge_weight is None else everyone(part.edge_weight)[edges]
    of_nodes: dict[str, Any] = {
        name: everyone(value[:n])[new_ids]
        for name in _PER_SOURCE
        if (value := getattr(part, name)) is not None
    }
    return Block(ordered, sources[edges], degree.numel(), edge_weight=weight, **of_nodes), new_ids


def choose_chunks(block: Block, num_chunks: int, seed: int, weight: Tensor | None = None) -> Tensor:
    """int32 [N]: chunk of each node, 0 .. at most num_chunks - 1 without gaps; chunks cost about the same.

    ``weight`` int64 [N]: what a row costs; None: what its edges say.
    """
    if num_chunks <= 1 or block.num_dst <= 1:
        return torch.zeros(block.num_dst, dtype=torch.int32)
    num_chunks = min(num_chunks, block.num_dst)
    weight = block.drawn + ROW_COST if weight is None else weight
    graph = Graph(block.indptr, block.indices)
    owner = partition(graph, num_chunks, default_method(), seed=seed, node_weight=weight).owner.long()
    used = torch.bincount(owner, minlength=num_chunks) > 0
    return (used.cumsum(0) - 1)[owner].to(torch.int32)


def cut_chunks(block: Block, owner: Tensor, here: range | None = None) -> Chunks:
    """The chunks of a whole graph by the user's ids; ``owner`` int [N] names the chunk of each node, none is empty.

    ``here``: those of one way, with the halo that they read; None: all.
    """
    order = torch.sort(owner.long(), stable=True).indices
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel())
    counts = torch.bincount(owner.long())
    bounds = [0, *counts.cumsum(0).tolist()]
    chunk_of = owner.long()[order]
    here = range(counts.numel()) if here is None else here
    spans = list(pairwise(bounds))[here.start : here.stop]
    cut = [_chunk(block, order, place, chunk_of, start, stop) for start, stop in spans]
    if len(here) == counts.numel():
        return Chunks(tuple(cut), order)
    first, stop = bounds[here.start], bounds[here.stop]
    outside = [chunk.others[(chunk.others < first) | (chunk.others >= stop)] for chunk in cut]
    halo = torch.unique(torch.cat(outside))
    return Chunks(
        tuple(_renumbered(chunk, first, stop, halo) for chunk in cut),
        torch.cat([order[first:stop], order[halo]]),
        here.start,
        tuple(counts.tolist()),
        chunk_of[halo],
    )


def _renumbered(chunk: Chunk, first: int, stop: int, halo: Tensor) -> Chunk:
    """A chunk of the way that has rows first .. stop - 1, by the numbers that these and the halo have there."""
    others = chunk.others
    is_own = (others >= first) & (others < stop)
    behind = stop - first + torch.searchsorted(halo, others)
    others = torch.where(is_own, others - first, behind)
    return replace(chunk, start=chunk.start - first, stop=chunk.stop - first, others=others)


def _chunk(block: Block, order: Tensor, place: Tensor, chunk_of: Tensor, start: int, stop: int) -> Chunk:
    nodes = order[start:stop]
    edges, indptr = _edges_of(block.indptr, nodes)
    sources = place[block.indices[edges].long()]
    is_own = (sources >= start) & (sources < stop)
    others = torch.unique(sources[~is_own])
    local = torch.empty_like(sources)
    local[is_own] = sources[is_own] - start
    local[~is_own] = stop - start + torch.searchsorted(others, sources[~is_own])
    rows = torch.cat([nodes, order[others]])
    per_source: dict[str, Any] = {
        name: value[rows] for name in _PER_SOURCE if (value := getattr(block, name)) is not None
    }
    made = Block(
        indptr,
        local.to(block.indices.dtype),
        rows.numel(),
        edge_weight=None if block.edge_weight is None else block.edge_weight[edges],
        src_ids=rows,
        **per_source,
    )
    return Chunk(start, stop, made, others, chunk_of[others])


def _edges_of(indptr: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """(int64 [E]: places of the edges of some destinations, one after the other; int64 [n + 1]: where each begins)."""
    counts = indptr[nodes + 1] - indptr[nodes]
    starts = torch.zeros(nodes.numel() + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=starts[1:])
    first = torch.repeat_interleave(indptr[nodes] - starts[:-1], counts)
    return torch.arange(int(starts[-1])) + first, starts
