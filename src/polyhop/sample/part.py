"""Sampling over a partitioned graph: every owner draws the in-edges of its nodes, whoever asks.

    hop 0     seeds are the rank's own: no message
    hop 1 ..  ids to their owners (one request to each), drawn lists back (one reply from each); own rows meanwhile

A draw is keyed by the user's id of the node, so a mini-batch has the same neighbours, in the same rows, as one drawn in a
single process, alone or with others in a window. A window of k mini-batches asks in the messages of one: row r of mini-batch
m stands in the request as m * (nodes of the owner) + r, still ascending, so boundaries cost nothing. Ids here are new ids:
a part is a range of them.

Legend: B seeds, S nodes of a mini-batch, E edges of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from polyhop.comm import Collective
from polyhop.errors import ConfigError, PeerError, unknown
from polyhop.graph.part import AnyPart
from polyhop.kernels import Key, Purpose
from polyhop.kernels.relabel import Relabel
from polyhop.kernels.sample import METHODS, check_fanouts
from polyhop.sample.wire import Lists, Wire

__all__ = ["Drawn", "DrawnLayer", "PartSampler", "grouped", "window_rows"]


@dataclass(frozen=True, eq=False)
class DrawnLayer:
    """Drawn in-edges of D destinations, which are the first D of its sources."""

    indptr: Tensor  # int64 [D + 1]
    indices: Tensor  # int32 [E]: row of each source
    num_src: int
    edge_weight: Tensor | None
    is_sampled: bool


@dataclass(frozen=True, eq=False)
class Drawn:
    """One mini-batch by new ids: seeds first, then nodes by first appearance."""

    ids: Tensor  # int64 [S]
    layers: tuple[DrawnLayer, ...]  # input layer first


class PartSampler:
    """Draws the mini-batches of one rank, and answers the other ranks' requests. Serves one thread."""

    def __init__(
        self,
        part: AnyPart,
        num_neighbors: Sequence[int],
        wire: Wire,
        *,
        seed: int = 0,
        method: str = "uniform",
    ) -> None:
        if method not in METHODS:
            raise ConfigError(unknown("sampling method", method, METHODS))
        self.part, self.wire, self.seed, self.method = part, wire, seed, method
        self.num_neighbors = check_fanouts(num_neighbors)
        self._relabel = Relabel()

    def sample(self, line: Collective, seeds: Tensor, epoch: int, step: int) -> Drawn:
        """The mini-batch of own, distinct ``seeds`` (int64 [B], new ids). All ranks call it together, if with no seeds."""
        return self.sample_window(line, [seeds], epoch, [step])[0]

    def sample_window(
        self, line: Collective, seeds: Sequence[Tensor], epoch: int, steps: Sequence[int]
    ) -> list[Drawn]:
        """The mini-batches of several steps in the messages of one: each as ``sample`` gives it.

        ``seeds[m]`` are the own, distinct seeds of ``steps[m]``. All ranks call it together, with the same steps.
        """
        ids = list(seeds)
        layers: list[list[DrawnLayer]] = [[] for _ in seeds]
        for hop, fanout in enumerate(self.num_neighbors):
            keys = [Key(self.seed, epoch, step).at(Purpose.SAMPLE, hop) for step in steps]
            if hop == 0:
                start = self.part.start
                lists = [self._draw(each - start, fanout, key) for each, key in zip(seeds, keys, strict=True)]
            else:
                lists = self._ask(line, ids, fanout, keys)
            for m, known in enumerate(ids):
                if hop == 0 or len(ids) > 1:  # one table serves all: it forgets between mini-batches
                    self._relabel.start(known)
                rows = self._relabel.add(lists[m].neighbours)
                ids[m] = self._relabel.ids()
                indptr = torch.zeros(known.numel() + 1, dtype=torch.int64)
                torch.cumsum(lists[m].counts, 0, out=indptr[1:])
                layers[m].append(DrawnLayer(indptr, rows, ids[m].numel(), lists[m].weights, fanout > 0))
                lists[m] = Lists(lists[m].counts[:0], rows[:0])  # let go of it
        return [Drawn(each, tuple(reversed(of))) for each, of in zip(ids, layers, strict=True)]

    def _draw(self, rows: Tensor, fanout: int, key: int) -> Lists:
        """What own rows draw."""
        return Lists(*self.part.drawn(rows, fanout, key, self.method))

    def _ask(self, line: Collective, ids: Sequence[Tensor], fanout: int, keys: Sequence[int]) -> list[Lists]:
        """The lists of any nodes, ids[m] under keys[m], in their order, drawn by their owners."""
        groups = [grouped(each, self.part.bounds, is_sorted=not self.wire.is_plain) for each in ids]
        bounds, own, num_ranks = self.part.bounds.tolist(), line.rank, line.num_ranks
        asked: list[list[Tensor]] = [[] for _ in range(num_ranks)]  # [q][m]: rows of owner q
        for each, (order, cuts) in zip(ids, groups, strict=True):
            placed = each.index_select(0, order)
            for q in range(num_ranks):
                asked[q].append(placed[cuts[q] : cuts[q + 1]] - bounds[q])
        nothing = ids[0][:0]
        requests = [
            self.wire.request(nothing if q == own else window_rows(asked[q], bounds[q + 1] - bounds[q]))
            for q in range(num_ranks)
        ]
        arriving = line.all_to_all(requests, kind="ids")
        replies = [
            self._reply(data, fanout, keys, q) if data.numel() else data for q, data in enumerate(arriving)
        ]
        leaving = line.start_all_to_all(replies, kind="ids")
        mine = [self._draw(rows, fanout, key) for rows, key in zip(asked[own], keys, strict=True)]
        theirs = []
        for q, data in enumerate(leaving.wait()):
            sizes = [rows.numel() for rows in asked[q]]
            theirs.append(mine if q == own else self.wire.lists(data, sum(sizes), fanout, q).split(sizes))
        return [
            _in_order([theirs[q][m] for q in range(num_ranks)], order) for m, (order, _) in enumerate(groups)
        ]

    def _reply(self, data: Tensor, fanout: int, keys: Sequence[int], asker: int) -> Tensor:
        """What the rows of a request draw, each under the key of its mini-batch."""
        rows, size = self.wire.rows(data), max(1, self.part.num_nodes)
        if len(keys) == 1:
            return self.wire.reply(self._draw(rows, fanout, keys[0]), fanout)
        batch = rows // size
        if int(batch.max()) >= len(keys):
            raise PeerError(
                f"rank {asker} asked for rows up to {int(rows.max())}: expected less than {size} in each of "
                f"{len(keys)} mini-batches"
            )
        cuts = torch.searchsorted(batch, torch.arange(len(keys) + 1)).tolist()
        rows -= batch.mul_(size)
        lists = [
            self._draw(rows[start:stop], fanout, key)
            for (start, stop), key in zip(pairwise(cuts), keys, strict=True)
        ]
        return self.wire.reply(Lists.joined(lists), fanout)


def window_rows(rows: Sequence[Tensor], size: int) -> Tensor:
    """int64: rows (each below ``size``, one list per mini-batch) as one ascending list, mini-batch m shifted by m * size."""
    if len(rows) == 1:
        return rows[0]
    return torch.cat([each + m * size for m, each in enumerate(rows)])


def grouped(ids: Tensor, bounds: Tensor, *, is_sorted: bool) -> tuple[Tensor, list[int]]:
    """(order, cuts): ids[order[cuts[q] : cuts[q + 1]]] belong to part q, ascending if ``is_sorted``, else in their order."""
    if is_sorted:
        found = torch.sort(ids)
        return found.indices, torch.searchsorted(found.values, bounds).tolist()
    owners = torch.searchsorted(bounds[1:], ids, right=True)
    placed = torch.sort(owners, stable=True)
    return placed.indices, torch.searchsorted(placed.values, torch.arange(bounds.numel())).tolist()


def _in_order(lists: list[Lists], order: Tensor) -> Lists:
    """Lists of the nodes ids[order], as lists of the nodes ids."""
    counts = torch.cat([each.counts for each in lists])
    in_order = torch.empty_like(counts)
    in_order[order] = counts
    begin = torch.zeros(counts.numel() + 1, dtype=torch.int64)
    torch.cumsum(in_order, 0, out=begin[1:])
    before = torch.zeros_like(begin)
    torch.cumsum(counts, 0, out=before[1:])
    moved = begin.index_select(0, order) - before[:-1]
    target = torch.repeat_interleave(moved, counts).add_(torch.arange(int(before[-1])))
    neighbours = torch.empty(target.numel(), dtype=torch.int64)
    neighbours[target] = torch.cat([each.neighbours for each in lists])
    if lists[0].weights is None:
        return Lists(in_order, neighbours)
    weights = torch.empty(target.numel())
    weights[target] = torch.cat([each.weights for each in lists if each.weights is not None])
    return Lists(in_order, neighbours, weights)
