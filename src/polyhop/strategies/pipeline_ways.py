"""Ways of a stage: ranks that hold the same layers and share the chunks, each those of one part of the graph.

A tick is one chunk of every way. Before a layer, ways exchange the rows of these chunks that other ways read, into the halo
of their tables: so a chunk finds rows of this epoch of all chunks of its tick and of ticks before, in every way, and history
of later ones, which its way has kept. Backward, a way adds up the gradients of its halo's rows; those of a chunk's rows are
complete when its tick has gone back through the layer, and then return to their owner, as many as came:

    forward    rows of the tick's chunk in table l -> ways that read them -> their halo;    layer l
    backward   layer l;    gradients of the halo's rows of the tick's chunks -> their owners, added in the order of ways

Autograd's graph ends at every exchange, so layers of a task go one by one. Layer 0 exchanges nothing: every way has input
rows of its halo too, and computes what comes before layer 0 for them.

The graph is cut into a part for each way first, then each part into chunks, so that few rows cross between ways.

Legend: N nodes, D ways, K chunks, h halo rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from typing import Any

import torch
from torch import Tensor

from polyhop.comm import Collective, Pending
from polyhop.errors import ConfigError
from polyhop.exchange.crossing import Direction, matrix
from polyhop.graph import Block
from polyhop.strategies.pipeline_chunks import ROW_COST, choose_chunks
from polyhop.strategies.pipeline_history import History
from polyhop.strategies.pipeline_schedule import Layout, Task, split_ways
from polyhop.strategies.pipeline_stage import Stage
from polyhop.trace import NO_TRACE, Trace

__all__ = ["Meeting", "WayStage", "Ways", "check_chunks", "check_counts", "choose_ways", "lay_out"]


def lay_out(num_ranks: int, num_stages: int | None) -> Layout:
    """Ranks as stages, or as so many stages of several ways."""
    stages = num_ranks if num_stages is None else num_stages
    if stages < 1 or num_ranks % stages:
        fitting = [count for count in range(1, num_ranks + 1) if num_ranks % count == 0]
        raise ConfigError(
            f"stages={stages} with {num_ranks} ranks: every stage needs as many ranks, so expected one of "
            f"{', '.join(map(str, fitting))}: give another --stages, or a multiple of it as --workers"
        )
    return Layout(stages, num_ranks // stages)


# Chunks of ways


def check_chunks(num_chunks: int, layout: Layout) -> None:
    """ConfigError unless every way can have a chunk."""
    if num_chunks < layout.num_ways:
        raise ConfigError(
            f"chunks={num_chunks} for {layout.num_ways} ways of a stage ({layout.num_ranks} ranks in {layout.num_stages} "
            "stages): each needs one at least; give more --chunks, more --stages, or fewer --workers"
        )


def check_counts(counts: Sequence[int], num_nodes: int) -> None:
    """ConfigError unless every way has a chunk."""
    if 0 in counts:
        raise ConfigError(
            f"{num_nodes} nodes do not give each of {len(counts)} ways of a stage a part of the graph: use fewer ways "
            "(more --stages, fewer --workers)"
        )


def choose_ways(block: Block, num_chunks: int, num_ways: int, seed: int) -> tuple[Tensor, list[int]]:
    """(int32 [N]: chunk of each node, those of a way one after another; chunks of each way).

    A way without nodes has no chunks: the caller refuses that.
    """
    cost = block.drawn + ROW_COST
    part = choose_chunks(block, num_ways, seed).long()
    owner, counts, first = torch.zeros(block.num_dst, dtype=torch.int32), [], 0
    for way, wanted in enumerate(split_ways(num_chunks, num_ways)):
        nodes = (part == way).nonzero()[:, 0]
        if not nodes.numel():
            counts.append(0)
            continue
        chosen = choose_chunks(_inside(block, nodes), len(wanted), seed, cost[nodes])
        owner[nodes] = first + chosen
        counts.append(int(chosen.max()) + 1)
        first += counts[-1]
    return owner, counts


def _inside(block: Block, nodes: Tensor) -> Block:
    """The edges among some nodes, ascending, numbered anew."""
    place = torch.full((block.num_dst,), -1)
    place[nodes] = torch.arange(nodes.numel())
    dst = torch.repeat_interleave(place, block.drawn)
    src = place[block.indices.long()]
    is_inside = (dst >= 0) & (src >= 0)
    indptr = torch.zeros(nodes.numel() + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(dst[is_inside], minlength=nodes.numel()), 0, out=indptr[1:])
    return Block(indptr, src[is_inside].to(block.indices.dtype), nodes.numel())


@dataclass(frozen=True, eq=False)
class Ways:
    """Who reads how much of whom, of all ways; and which rows, of one. Found in the whole graph, without a message."""

    chunks: tuple[range, ...]  # of each way
    num_read: Tensor  # int64 [K, D]: rows of a chunk that a way reads; of its own chunks 0
    lent: Mapping[
        tuple[int, int], Tensor
    ]  # (chunk here, way): int64, which of its rows; numbers as in a table

    @classmethod
    def of(cls, block: Block, owner: Tensor, counts: Sequence[int], here: int) -> Ways:
        """Of a whole graph by the user's ids, for way ``here``; ``owner``, ``counts``: what ``choose_ways`` gave."""
        starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
        chunks = tuple(range(start, stop) for start, stop in pairwise(starts))
        num_chunks, num_ways, owner = starts[-1], len(counts), owner.long()
        if num_ways == 1:
            return cls(chunks, torch.zeros(num_chunks, 1, dtype=torch.int64), {})
        order = torch.sort(owner, stable=True).indices
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel())
        way = torch.repeat_interleave(torch.arange(num_ways), torch.tensor(counts))[owner]
        reader, source = torch.repeat_interleave(way, block.drawn), block.indices.long()
        crosses = reader != way[source]
        found = torch.unique(reader[crosses] * order.numel() + place[source[crosses]])
        readers, rows = found // order.numel(), found % order.numel()
        pairs = owner[order][rows] * num_ways + readers
        num_read = torch.bincount(pairs, minlength=num_chunks * num_ways).view(num_chunks, num_ways)
        bounds = torch.tensor([0, *torch.bincount(owner, minlength=num_chunks).cumsum(0).tolist()])
        lent = {}
        for to in range(num_ways):
            read = rows[readers == to]
            cuts = torch.searchsorted(read, bounds).tolist()
            for chunk in chunks[here]:
                lent[chunk, to] = read[cuts[chunk] : cuts[chunk + 1]] - bounds[starts[here]]
        return cls(chunks, num_read, lent)

    def __len__(self) -> int:
        return len(self.chunks)

    @property
    def num_ticks(self) -> int:
        return max(len(chunks) for chunks in self.chunks)

    def of_chunks(self) -> Tensor:
        """int64 [K]: the way of each chunk."""
        return torch.repeat_interleave(torch.tensor([len(chunks) for chunks in self.chunks]))


# An exchange


class Meeting:
    """Rows and gradients between the ways of one stage; ``line`` is theirs alone. All of them call everything together."""

    def __init__(self, ways: Ways, history: History, line: Collective, trace: Trace = NO_TRACE) -> None:
        self._history, self._line, self._trace = history, line, trace
        device = next(iter(history.rows.values())).device if history.rows else torch.device("cpu")
        self.lent = {at: rows.to(device) for at, rows in ways.lent.items()}
        self._ticks: list[tuple[int | None, ...]] = []
        self._together = 1

    def begin(self, orders: Sequence[Sequence[int]], together: int = 1) -> None:
        """An epoch begins. ``together``: so many ticks, one after another, go through a layer before any goes on."""
        self._ticks, self._together = list(zip_longest(*orders)), together

    def _due(self, tick: int) -> list[tuple[int | None, ...]]:
        """Of each tick that meets now: the chunk of every way. The first of a group goes up a layer first, and down last."""
        return [] if tick % self._together else self._ticks[tick : tick + self._together]

    def forward(self, layer: int, tick: int) -> None:
        """Rows before a layer, of the chunks of a tick, to the ways that read them."""
        table, history = self._history.rows[layer], self._history
        for chunks, pending in [(chunks, self._lend(table, chunks)) for chunks in self._due(tick)]:
            for chunk, rows in zip(chunks, self._arrived(*pending, layer, "forward"), strict=True):
                if chunk is not None and rows.shape[0]:
                    history.write(layer, chunk, rows.to(table.device).view(-1, *table.shape[1:]))

    def backward(self, layer: int, tick: int) -> None:
        """Gradients of the halo's rows back to the ways that own them."""
        grads, history = self._history.grads[layer], self._history
        for chunks, pending in [(chunks, self._give_back(grads, chunks)) for chunks in self._due(tick)]:
            own = chunks[self._line.rank]
            for way, rows in enumerate(self._arrived(*pending, layer, "backward")):
                if own is not None and way != self._line.rank:
                    history.add(layer, self.lent[own, way], rows.to(grads.device))

    def _lend(self, table: Tensor, chunks: Sequence[int | None]) -> tuple[Pending[list[Tensor]], int]:
        own, flat = chunks[self._line.rank], matrix(table)
        leaving = [flat[:0] if own is None else flat[self.lent[own, way]] for way in range(len(chunks))]
        return self._start(leaving, [stop - start for start, stop in self._kept(chunks)])

    def _give_back(self, grads: Tensor, chunks: Sequence[int | None]) -> tuple[Pending[list[Tensor]], int]:
        own, flat = chunks[self._line.rank], matrix(grads)
        leaving = [flat[start:stop] for start, stop in self._kept(chunks)]
        counts = [0 if own is None else self.lent[own, way].numel() for way in range(len(chunks))]
        return self._start(leaving, counts)

    def _kept(self, chunks: Sequence[int | None]) -> list[tuple[int, int]]:
        """Where the halo has rows of each way's chunk."""
        found = []
        for way, chunk in enumerate(chunks):
            at = slice(0, 0)
            if chunk is not None and way != self._line.rank:
                at = self._history.chunks.halo_rows(chunk)
            found.append((at.start, at.stop))
        return found

    def _start(self, leaving: Sequence[Tensor], counts: Sequence[int]) -> tuple[Pending[list[Tensor]], int]:
        """What comes, and the bytes that leave."""
        num_bytes = sum(piece.nbytes for way, piece in enumerate(leaving) if way != self._line.rank)
        here = [piece.to(self._line.device) for piece in leaving]
        return self._line.start_all_to_all(here, kind="hidden", counts=counts), num_bytes

    def _arrived(
        self, pending: Pending[list[Tensor]], num_bytes: int, layer: int, direction: Direction
    ) -> list[Tensor]:
        with self._trace.span("wait", layer=layer, direction=direction, bytes=num_bytes):
            return pending.wait()


class WayStage(Stage):
    """A stage of several ways: it meets the others at every layer that reads rows of other chunks."""

    has_ways = True

    def __init__(self, *args: Any, meeting: Meeting, **options: Any) -> None:
        super().__init__(*args, **options)
        self._meeting = meeting

    def take_grads(self, chunk: int, grads: dict[str, Tensor]) -> None:
        # As they would lie had they not crossed: products of strided rows may round otherwise.
        super().take_grads(chunk, {name: value.contiguous() for name, value in grads.items()})

    @property
    def parts(self) -> dict[str, Any]:
        held = super().parts
        return held | {"structure": [held["structure"], list(self._meeting.lent.values())]}

    def forward(self, task: Task) -> None:
        for layer in range(task.first, task.stop):
            if layer:
                self._meeting.forward(layer, task.tick)
            if task.chunk is not None:
                super().forward(replace(task, first=layer, stop=layer + 1))

    def backward(self, task: Task) -> None:
        for layer in reversed(range(task.first, task.stop)):
            if task.chunk is not None:
                super().backward(replace(task, first=layer, stop=layer + 1))
            if layer:
                self._meeting.backward(layer, task.tick)
