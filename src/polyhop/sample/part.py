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
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from polyhop.comm import Collective
from polyhop.errors import ConfigError, PeerError, unknown
from polyhop.graph.part import AnyPart
from polyhop.kernels import Key
from polyhop.kernels.owners import by_owner
from polyhop.kernels.relabel import Joined, Relabel
from polyhop.kernels.sample import METHODS, check_fanouts
from polyhop.kernels.variates import check_dependence, sample_key
from polyhop.sample.wire import Lists, Wire

__all__ = ["Drawn", "DrawnLayer", "PartSampler", "window_rows"]


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
        dependence: int = 1,
    ) -> None:
        """``dependence``: as for ``NeighbourSampler``."""
        if method not in METHODS:
            raise ConfigError(unknown("sampling method", method, METHODS))
        self.part, self.wire, self.seed, self.method = part, wire, seed, method
        self.dependence = check_dependence(dependence, method)
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
        ids, cuts = torch.cat(list(seeds)), [0, *accumulate(each.numel() for each in seeds)]
        layers: list[list[DrawnLayer]] = [[] for _ in seeds]
        for hop, fanout in enumerate(self.num_neighbors):
            keys = [sample_key(Key(self.seed, epoch, step), hop, self.dependence) for step in steps]
            order: Tensor | None = None
            if hop == 0:
                lists = [self._draw(ids - self.part.start, fanout, keys, cuts)]
            else:
                lists, order = self._ask(line, ids, cuts, fanout, keys)
            weights = [each.weights for each in lists if each.weights is not None]
            counts, neighbours = [each.counts for each in lists], [each.neighbours for each in lists]
            joined = self._relabel.join(ids, cuts, order, counts, neighbours, weights or None)
            for m, of in enumerate(layers):
                of.append(_layer(joined, m, cuts, is_sampled=fanout > 0))
            ids, cuts = joined.ids, joined.cuts
        found = [ids[start:stop] for start, stop in pairwise(cuts)]
        return [Drawn(each, tuple(reversed(of))) for each, of in zip(found, layers, strict=True)]

    def _draw(self, rows: Tensor, fanout: int, keys: Sequence[int], cuts: Sequence[int]) -> Lists:
        """What own rows draw, those from cuts[m] on under keys[m]."""
        return Lists(*self.part.drawn(rows, fanout, keys, self.method, cuts))

    def _ask(
        self, line: Collective, ids: Tensor, cuts: Sequence[int], fanout: int, keys: Sequence[int]
    ) -> tuple[list[Lists], Tensor]:
        """The lists of any nodes, drawn by their owners: (those of each owner, whose they are: ids[order])."""
        own, is_sorted = line.rank, not self.wire.is_plain
        order, rows, counts = by_owner(ids, cuts, self.part.bounds, own, is_sorted=is_sorted)
        asked = torch.split(rows, counts.sum(1).tolist())
        nothing = ids[:0]
        requests = [self.wire.request(nothing if q == own else some) for q, some in enumerate(asked)]
        arriving = line.all_to_all(requests, kind="ids")
        replies = [
            self._reply(data, fanout, keys, q) if data.numel() else data for q, data in enumerate(arriving)
        ]
        leaving = line.start_all_to_all(replies, kind="ids")
        mine = self._draw(asked[own], fanout, keys, [0, *accumulate(counts[own].tolist())])
        lists = [
            mine if q == own else self.wire.lists(data, asked[q].numel(), fanout, q)
            for q, data in enumerate(leaving.wait())
        ]
        return lists, order

    def _reply(self, data: Tensor, fanout: int, keys: Sequence[int], asker: int) -> Tensor:
        """What the rows of a request draw, each under the key of its mini-batch."""
        rows, size = self.wire.rows(data), max(1, self.part.num_nodes)
        if len(keys) == 1:
            return self.wire.reply(self._draw(rows, fanout, keys, [0, rows.numel()]), fanout)
        batch = rows // size
        if int(batch.max()) >= len(keys):
            raise PeerError(
                f"rank {asker} asked for rows up to {int(rows.max())}: expected less than {size} in each of "
                f"{len(keys)} mini-batches"
            )
        cuts = torch.searchsorted(batch, torch.arange(len(keys) + 1)).tolist()
        return self.wire.reply(self._draw(rows - batch * size, fanout, keys, cuts), fanout)


def _layer(joined: Joined, m: int, cuts: Sequence[int], *, is_sampled: bool) -> DrawnLayer:
    """Of mini-batch m, whose nodes were cuts[m] .. cuts[m + 1] before."""
    edges = slice(joined.edge_cuts[m], joined.edge_cuts[m + 1])
    return DrawnLayer(
        joined.indptr[cuts[m] + m : cuts[m + 1] + m + 1],
        joined.rows[edges],
        joined.cuts[m + 1] - joined.cuts[m],
        None if joined.weights is None else joined.weights[edges],
        is_sampled,
    )


def window_rows(rows: Sequence[Tensor], size: int) -> Tensor:
    """int64: rows (each below ``size``, one list per mini-batch) as one ascending list, mini-batch m shifted by m * size."""
    if len(rows) == 1:
        return rows[0]
    return torch.cat([each + m * size for m, each in enumerate(rows)])
