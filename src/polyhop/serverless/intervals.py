"""How a server's part is cut into intervals, and who reads whose rows: all that stays the same over epochs.

An interval is a run of consecutive own nodes, so that with consecutive new ids an interval of any server is a range of them.
Runs are cut so that each has about as many edges and rows to work on. Intervals are numbered through all servers.

Legend: n own nodes, H halo nodes, S = n + H sources, M intervals here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from polyhop.comm import Collective
from polyhop.graph import Block, Part

__all__ = ["Interval", "Intervals", "Reader", "cut_intervals"]

ROW_COST = 16
"""Edges that a row costs as much as, beside its own."""

_PER_SOURCE = ("src_ids", "in_degree", "in_weight", "out_degree", "loop_weight")


@dataclass(frozen=True, eq=False)
class Reader:
    """An interval that reads rows of one: where these are in what it gives back, and which rows of the interval they are."""

    number: int
    positions: Tensor  # int64
    rows: Tensor  # int64, without repeats


@dataclass(frozen=True, eq=False)
class Interval:
    """Rows start .. stop - 1 of the part."""

    number: int  # among all servers'
    start: int
    stop: int
    block: Block  # from its own rows, then those of others, to its own rows
    sources: Tensor  # int64: row of each source among the part's S
    source_intervals: Tensor  # int64: number of the interval that each source is of
    reads: tuple[int, ...]  # intervals whose rows it reads, its own among them
    readers: tuple[Reader, ...]  # intervals that read its rows, by number
    lent: dict[int, Tensor]  # server -> int64: own rows (0 = start) that it reads
    back: dict[int, Tensor]  # server -> int64: positions among the sources that are its rows

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True, eq=False)
class Intervals:
    """Of one server."""

    own: tuple[Interval, ...]
    halo: dict[int, slice]  # interval of another server -> where its rows are among the part's S
    num_all: int

    def __len__(self) -> int:
        return len(self.own)

    def __iter__(self) -> Any:
        return iter(self.own)


def cut_intervals(part: Part, block: Block, wanted: int, line: Collective) -> Intervals:
    """At most ``wanted``, none empty. ``block``: the part's edges. All ranks call it together."""
    bounds = _bounds(block, wanted)
    mine = torch.tensor([part.start + at for at in bounds[:-1]], dtype=torch.int64)
    starts = [each.cpu() for each in line.all_gather(mine.to(line.device), kind="ids")]
    first = sum(each.numel() for each in starts[: line.rank])
    all_starts = torch.cat(starts)
    halo_numbers = torch.searchsorted(all_starts, part.halo, right=True) - 1
    n, owners = part.num_nodes, part.owners(part.halo)
    lent = [each.cpu() - part.start for each in line.all_to_all(
        [part.halo[owners == q].to(line.device) for q in range(line.num_ranks)], kind="ids"
    )]  # fmt: skip
    found = []
    for at, (start, stop) in enumerate(pairwise(bounds)):
        inside, sources = _own_block(block, start, stop)
        others = sources[sources >= n] - n
        far = torch.nonzero(sources >= n)[:, 0]
        numbers = torch.empty_like(sources)
        numbers[sources < n] = _interval_of(sources[sources < n], bounds) + first
        numbers[far] = halo_numbers[others]
        back = {q: far[owners[others] == q] for q in range(line.num_ranks) if q != line.rank}
        found.append(
            Interval(
                first + at, start, stop, inside, sources, numbers, tuple(torch.unique(numbers).tolist()), (),
                {q: rows[(rows >= start) & (rows < stop)] - start for q, rows in enumerate(lent) if q != line.rank},
                back,
            )
        )  # fmt: skip
    readers = _readers(found, bounds, part, line)
    own = tuple(replace(each, readers=tuple(readers[k])) for k, each in enumerate(found))
    own = tuple(_without_empty(each) for each in own)
    ends = torch.searchsorted(halo_numbers, torch.arange(all_starts.numel() + 1)).tolist()
    halo = {k: slice(n + a, n + b) for k, (a, b) in enumerate(pairwise(ends)) if b > a}
    return Intervals(own, halo, all_starts.numel())


def _without_empty(interval: Interval) -> Interval:
    kept: dict[str, Any] = {
        name: {q: rows for q, rows in getattr(interval, name).items() if rows.numel()}
        for name in ("lent", "back")
    }
    return replace(interval, **kept)


def _bounds(block: Block, wanted: int) -> list[int]:
    """Starts of the intervals, and n: equal shares of edges and rows."""
    n = block.num_dst
    if n == 0:
        return [0]
    cost = (block.drawn + ROW_COST).cumsum(0)
    goals = torch.arange(1, max(wanted, 1), dtype=torch.float64) * float(cost[-1]) / max(wanted, 1)
    cuts = torch.searchsorted(cost.double(), goals).clamp(1, max(n - 1, 1))
    return sorted({0, n, *(int(at) for at in cuts if 0 < int(at) < n)})


def _interval_of(rows: Tensor, bounds: Sequence[int]) -> Tensor:
    return torch.searchsorted(torch.tensor(bounds[1:]), rows, right=True)


def _own_block(block: Block, start: int, stop: int) -> tuple[Block, Tensor]:
    """(edges of some destinations, from these rows first and then from the others they read; the row of each source)."""
    first, last = int(block.indptr[start]), int(block.indptr[stop])
    read = block.indices[first:last].long()
    others = torch.unique(read[(read < start) | (read >= stop)])
    sources = torch.cat([torch.arange(start, stop), others])
    place = torch.where(
        (read >= start) & (read < stop), read - start, stop - start + torch.searchsorted(others, read)
    )
    given = {name: value[sources] for name in _PER_SOURCE if (value := getattr(block, name)) is not None}
    weight = None if block.edge_weight is None else block.edge_weight[first:last]
    made = Block(
        block.indptr[start : stop + 1] - first,
        place.to(torch.int32),
        sources.numel(),
        edge_weight=weight,
        **given,
    )
    return made, sources


def _readers(
    found: Sequence[Interval], bounds: Sequence[int], part: Part, line: Collective
) -> list[list[Reader]]:
    """Of each own interval, those that read it, ascending; the others' lists are exchanged."""
    made: list[list[Reader]] = [[] for _ in found]

    def add(number: int, rows: Tensor, positions: Tensor) -> None:
        """``rows``: own rows that a reader reads, at these positions of what it gives back."""
        at = _interval_of(rows, bounds)
        for k in torch.unique(at).tolist():
            here = at == k
            made[k].append(Reader(number, positions[here], rows[here] - bounds[k]))

    n = part.num_nodes
    for each in found:
        near = torch.nonzero(each.sources < n)[:, 0]
        add(each.number, each.sources[near], near)
    peers = range(line.num_ranks)
    counts = [torch.tensor([[i.number, i.back[q].numel()] for i in found], dtype=torch.int64).view(-1, 2)
              if q != line.rank else torch.empty(0, 2, dtype=torch.int64) for q in peers]  # fmt: skip
    ids = [torch.cat([part.halo[i.sources[i.back[q]] - n] for i in found])
           if q != line.rank and found else torch.empty(0, dtype=torch.int64) for q in peers]  # fmt: skip
    got_counts = line.all_to_all([each.to(line.device) for each in counts], kind="ids")
    got_ids = line.all_to_all([each.to(line.device) for each in ids], kind="ids")
    for q in peers:
        if q == line.rank:
            continue
        rows = got_ids[q].cpu() - part.start
        for number, count in got_counts[q].tolist():
            add(number, rows[:count], torch.arange(count))
            rows = rows[count:]
    return [sorted(each, key=lambda reader: reader.number) for each in made]
