"""Sampling over a partitioned graph: every owner draws the in-edges of its nodes, whoever asks.

    hop 0     seeds are the rank's own: no message
    hop 1 ..  ids to their owners (one request to each), drawn lists back (one reply from each); own rows meanwhile

A draw is keyed by the user's id of the node, so a mini-batch has the same neighbours, in the same rows, as one drawn in a
single process. Ids here are new ids: a part is a range of them.

Legend: B seeds, S nodes of a mini-batch, E edges of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhop.comm import Collective
from polyhop.errors import ConfigError, unknown
from polyhop.graph.part import Part
from polyhop.kernels import Key, Purpose
from polyhop.kernels.draw import draw
from polyhop.kernels.relabel import Relabel
from polyhop.kernels.sample import METHODS, check_fanouts
from polyhop.sample.wire import Lists, Wire

__all__ = ["Drawn", "DrawnLayer", "PartSampler", "grouped"]


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
        part: Part,
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
        self._new_ids = part.new_ids()
        self._relabel = Relabel()

    def sample(self, line: Collective, seeds: Tensor, epoch: int, step: int) -> Drawn:
        """The mini-batch of own, distinct ``seeds`` (int64 [B], new ids). All ranks call it together, if with no seeds."""
        key = Key(self.seed, epoch, step)
        self._relabel.start(seeds)
        ids, layers = seeds, []
        for hop, fanout in enumerate(self.num_neighbors):
            code = key.at(Purpose.SAMPLE, hop)
            if hop == 0:
                lists = self._draw(seeds - self.part.start, fanout, code)
            else:
                lists = self._ask(line, ids, fanout, code)
            indptr = torch.zeros(ids.numel() + 1, dtype=torch.int64)
            torch.cumsum(lists.counts, 0, out=indptr[1:])
            rows = self._relabel.add(lists.neighbours)
            ids = self._relabel.ids()
            layers.append(DrawnLayer(indptr, rows, ids.numel(), lists.weights, fanout > 0))
        return Drawn(ids, tuple(reversed(layers)))

    def _draw(self, rows: Tensor, fanout: int, key: int) -> Lists:
        """What own rows draw."""
        part = self.part
        ends, position = draw(
            part.indptr, part.indices, rows, fanout, key,
            ids=part.user_ids, source_ids=part.src_ids, method=self.method,
        )  # fmt: skip
        weights = None if part.edge_weight is None else part.edge_weight[position].to(torch.float32)
        sources = part.indices.index_select(0, position)
        return Lists(ends.diff(), self._new_ids.index_select(0, sources), weights)

    def _ask(self, line: Collective, ids: Tensor, fanout: int, key: int) -> Lists:
        """The lists of any nodes, in the order of ``ids``, drawn by their owners."""
        order, cuts = grouped(ids, self.part.bounds, is_sorted=not self.wire.is_plain)
        bounds, own = self.part.bounds.tolist(), line.rank
        ids = ids.index_select(0, order)
        asked = [ids[cuts[q] : cuts[q + 1]] - bounds[q] for q in range(line.num_ranks)]
        nothing = ids[:0]
        requests = [self.wire.request(rows if q != own else nothing) for q, rows in enumerate(asked)]
        arriving = line.all_to_all(requests, kind="ids")
        replies = [
            self.wire.reply(self._draw(self.wire.rows(data), fanout, key), fanout) if data.numel() else data
            for data in arriving
        ]
        leaving = line.start_all_to_all(replies, kind="ids")
        mine = self._draw(asked[own], fanout, key)
        got = leaving.wait()
        lists = [
            mine if q == own else self.wire.lists(got[q], asked[q].numel(), fanout, q)
            for q in range(line.num_ranks)
        ]
        return _in_order(lists, order)


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
