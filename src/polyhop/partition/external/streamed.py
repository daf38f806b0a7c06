"""Graphs on disk that streaming partitioners pass over piece by piece: neighbours, sorted both ways, and groups of nodes.

Legend: N nodes, B bins (pieces), M pairs of neighbours (both ways), G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from polyhop.kernels.bins import group_edges, sum_lists, unique_lists
from polyhop.kernels.stream import Stream, stream_parts
from polyhop.partition.external.bins import BinFiles, even_bounds
from polyhop.partition.external.budget import Budget, id_dtype
from polyhop.partition.external.source import EdgeSource
from polyhop.partition.external.work import Work
from polyhop.partition.files import put, take
from polyhop.partition.levels import Level, group_sums

__all__ = ["DiskLevel", "Tell", "level_on_disk"]

Tell = Callable[[str, int, int], None]
"""Told (what is being done, how much of it is done, how much there is; 0 = not known)."""

_PAIR_BYTES, _NODE_BYTES = 24, 64  # of a level in memory, with what contracting it takes
_SMALL_LEVEL = (
    160_000  # bytes of a level that is never left on disk: the smallest one is placed several times over
)


@dataclass(frozen=True, eq=False)
class DiskLevel:
    """A ``levels.Streamable`` whose lists are read piece by piece. Every pass is a stage of the journal."""

    work: Work
    budget: Budget
    tell: Tell
    bounds: Tensor  # int64 [B + 1]: nodes of each piece
    counts: list[int]  # neighbours in each piece
    weight: Tensor | None = None
    second: Tensor | None = None
    depth: int = 0  # 0 = the graph itself
    total: float = 0.0  # weight of all pairs
    _seen: list[Any] = field(default_factory=list)  # the streams that have passed, in order, and how often

    @property
    def num_nodes(self) -> int:
        return int(self.bounds[-1])

    @property
    def num_pairs(self) -> float:
        return self.total

    @cached_property
    def _dtype(self) -> torch.dtype:
        return id_dtype(self.num_nodes)

    def pieces(self, memory: int = 0) -> Iterator[tuple[int, Tensor, Tensor, Tensor | None]]:
        """(first node, indptr int64 [R + 1], neighbours, weights or None) of one bin, or as many as fit ``memory`` bytes.

        The memory of neighbours and weights is used again for the next piece.
        """
        kind = np.int32 if self._dtype == torch.int32 else np.int64
        paths = [self.work.file(f"{name}-{self.depth}.bin") for name in ("lists", "degree", "pull")]
        with paths[0].open("rb") as lists, paths[1].open("rb") as degree, paths[2].open("rb") as pull:
            pieces = list(self._together(memory))
            most = max((sum(self.counts[one.start : one.stop]) for one in pieces), default=0)
            room, pulls = np.empty(most, kind), np.empty(most if self.depth else 0, np.float32)
            for bins in pieces:
                first, stop = int(self.bounds[bins.start]), int(self.bounds[bins.stop])
                count = sum(self.counts[bins.start : bins.stop])
                indptr = torch.zeros(stop - first + 1, dtype=torch.int64)
                torch.cumsum(take(degree, np.int32, stop - first), 0, out=indptr[1:])
                beside = take(lists, kind, count, into=room)
                weight = take(pull, np.float32, count, into=pulls) if self.depth else None
                yield first, indptr, beside, weight

    def _together(self, memory: int) -> Iterator[range]:
        """Neighbouring bins that take up to ``memory`` bytes, one at least."""
        start = spent = 0
        for index, count in enumerate(self.counts):
            rows = int(self.bounds[index + 1] - self.bounds[index])
            cost = count * (8 if self._dtype == torch.int32 else 12) + rows * 16
            if index > start and spent + cost > memory:
                yield range(start, index)
                start, spent = index, 0
            spent += cost
        if self.counts:
            yield range(start, len(self.counts))

    def stream(self, state: Stream, *, order: Tensor | None = None, **options: Any) -> int:
        """One pass of ``stream_parts`` over all nodes; what an earlier run has done is taken from the disk."""
        assert order is None, "a graph on disk is streamed in its own order"
        if not self._seen or self._seen[-1][0]() is not state:
            self._seen.append([ref(state), 0])
        self._seen[-1][1] += 1
        stream, number = len(self._seen), self._seen[-1][1]
        key = f"level {self.depth} stream {stream} pass {number}"
        next_key = f"level {self.depth} stream {stream} pass {number + 1}"
        if self.work.has(key):
            if not self.work.has(next_key):
                self._load(state, stream, number)
            return int(self.work.stage(key, lambda: 0))
        return int(self.work.stage(key, lambda: self._pass(state, stream, number, options)))

    def _pass(self, state: Stream, stream: int, number: int, options: dict[str, Any]) -> int:
        moved = done = 0
        for first, indptr, indices, pull in self.pieces(
            self.budget.for_edges
        ):  # a call costs O(parts): few of them
            mine = slice(first, first + indptr.numel() - 1)
            moved += stream_parts(
                state, indptr, indices, first=first, weight=None if self.weight is None else self.weight[mine],
                second=None if self.second is None else self.second[mine], edge_weight=pull, **options,
            )  # fmt: skip
            done += indices.numel()
            self.tell(self._name(options["rule"], number), done, sum(self.counts))
        for name, values in vars(state).items():
            self.work.save(self._file(name, stream, number), values)
        return moved

    def _name(self, rule: str, number: int) -> str:
        what = "clusters" if rule == "cluster" else rule
        return f"{what}, pass {number}" + (f", level {self.depth}" if self.depth else "")

    def _file(self, name: str, stream: int, number: int) -> str:
        """Two files by turns, so that one is whole at any moment."""
        return f"stream-{self.depth}-{stream}-{name}-{number % 2}"

    def _load(self, state: Stream, stream: int, number: int) -> None:
        for name, values in vars(state).items():
            values.copy_(self.work.load(self._file(name, stream, number)))

    def coarser(self, group: Tensor, num_groups: int) -> Any:
        """The graph of groups (int32 [N]): in memory if it fits, else on disk."""
        loads = group_sums(self, group, num_groups)
        depth = self.depth + 1

        def cut() -> list[int]:
            degree = torch.zeros(num_groups, dtype=torch.int64)
            for first, indptr, _, _ in self.pieces():
                degree.index_add_(0, group[first : first + indptr.numel() - 1].long(), indptr.diff())
            return _bounds(degree, self.budget, edge_bytes=20)

        bounds = torch.tensor(self.work.stage(f"bounds {depth}", cut), dtype=torch.int64)
        bins = BinFiles(self.work.path, f"groups-{depth}", bounds, id_dtype(num_groups))
        bins.counts = torch.tensor(self.work.stage(f"groups {depth}", lambda: self._file_groups(bins, group)))
        summed = self.work.stage(f"sums {depth}", lambda: _merge(self.work, bins, depth, self.tell))
        bins.clear()
        level = DiskLevel(
            self.work, self.budget, self.tell, bounds, summed["counts"], *loads, depth, summed["total"]
        )
        needed = _PAIR_BYTES * sum(level.counts) + _NODE_BYTES * num_groups
        return level.in_memory() if needed <= max(self.budget.for_edges, _SMALL_LEVEL) else level

    def _file_groups(self, bins: BinFiles, group: Tensor) -> list[int]:
        bins.clear()
        done = 0
        for first, indptr, indices, pull in self.pieces():
            rows = torch.arange(first, first + indptr.numel() - 1, dtype=self._dtype)
            bins.file(
                torch.repeat_interleave(rows, indptr.diff()), indices, to=group, weight=pull, apart=True
            )
            done += indices.numel()
            self.tell(f"filing groups, level {self.depth + 1}", done, sum(self.counts))
        counts: list[int] = bins.counts.tolist()
        return counts

    def in_memory(self) -> Level:
        """The whole of it."""
        lists, starts, pulls = [], [torch.zeros(1, dtype=torch.int64)], []
        done = 0
        for _, indptr, indices, pull in self.pieces(self.budget.for_edges):
            lists.append(indices.clone())
            starts.append(indptr[1:] + done)
            pulls.append(None if pull is None else pull.clone())
            done += indices.numel()
        weight = torch.cat([pull for pull in pulls if pull is not None]) if self.depth else None
        return Level(torch.cat(starts), torch.cat(lists), weight, self.weight, self.second)


def level_on_disk(
    work: Work,
    source: EdgeSource,
    degree: Callable[[], Tensor],
    budget: Budget,
    is_train: Tensor | None,
    tell: Tell,
) -> DiskLevel:
    """Neighbours of every node, both ways, each once, ascending, loops left out: as ``kernels.neighbours`` gives them.

    ``degree()`` int32 [N]: edges at each node, in and out. ``is_train`` bool [N], None where there are no training nodes.
    """

    def cut() -> list[int]:
        ends = degree()
        budget.check_heaviest(ends)
        return _bounds(ends, budget, edge_bytes=budget.edge_bytes)

    bounds = torch.tensor(work.stage("bounds 0", cut), dtype=torch.int64)
    bins = BinFiles(work.path, "pairs", bounds, id_dtype(budget.num_nodes))

    def file() -> list[int]:
        bins.clear()
        done = 0
        for chunk in source.chunks(budget.chunk_edges):
            bins.file(chunk.dst, chunk.src)
            bins.file(chunk.src, chunk.dst)
            done += chunk.src.numel()
            tell("filing pairs", done, source.num_edges)
        counts: list[int] = bins.counts.tolist()
        return counts

    bins.counts = torch.tensor(work.stage("pairs", file), dtype=torch.int64)
    merged = work.stage("lists", lambda: _merge(work, bins, 0, tell))
    bins.clear()
    second = None if is_train is None else is_train.double()
    return DiskLevel(work, budget, tell, bounds, merged["counts"], None, second, 0, merged["total"])


def _bounds(degree: Tensor, budget: Budget, *, edge_bytes: int) -> list[int]:
    within = torch.tensor([0, degree.numel()])
    made = even_bounds(
        degree, budget.bin_bytes, per_edge=edge_bytes, per_node=budget.row_bytes, within=within
    )
    return [int(bound) for bound in made]


def _merge(work: Work, bins: BinFiles, depth: int, tell: Tell) -> dict[str, Any]:
    """Each bin's records grouped and merged, behind one another in lists-DEPTH.bin, with lengths and weights beside."""
    counts, pairs = [], 0.0
    done, total = 0, int(bins.counts.sum())
    paths = [work.file(f"{name}-{depth}.bin") for name in ("lists", "degree", "pull")]
    with paths[0].open("wb") as lists, paths[1].open("wb") as degree, paths[2].open("wb") as pull:
        for index in range(len(bins)):
            rows = bins.num_rows(index)
            indptr, values, weight = group_edges(
                bins.keys(index), bins.values(index), rows, bins.weights(index)
            )
            if depth == 0:
                indptr, values = unique_lists(indptr, values, bins.first(index))
            else:
                indptr, values, weight = sum_lists(indptr, values, weight)
                put(pull, weight.numpy())
            put(lists, values.numpy())
            put(degree, indptr.diff().to(torch.int32).numpy())
            counts.append(values.numel())
            pairs += float(values.numel() if weight is None else weight.double().sum())
            done += int(bins.counts[index])
            tell("sorting pairs" if depth == 0 else f"sorting groups, level {depth}", done, total)
    return {"counts": counts, "total": pairs}
