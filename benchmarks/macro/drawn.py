"""What windows read, by brute force: every mini-batch drawn again from the whole graph by one process, sets counted.

Nothing here is shared with the strategy but the sampler of single processes. ``fetched`` is the rule of the row pool written
once more, over arrays of all nodes: what the ranks must have sent to each other follows from it, row by row.

Legend: N nodes, P ranks, k mini-batches of a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from benchmarks.macro.graphs import Fixed
from polyhop.sample import NeighborLoader, NeighbourSampler

__all__ = ["Drawn", "Ids", "Rows", "draw", "fetched", "two_windows", "union", "windows"]

SEED = 0
Ids = np.ndarray[tuple[int], np.dtype[np.int64]]
Rows = list[list[list[Ids]]]  # [epoch][rank][step]: remote nodes, by their new ids


@dataclass(frozen=True)
class Drawn:
    """Remote nodes that mini-batches read. All ids are new ids: a rank owns a range of them."""

    inputs: Rows  # rows of the first layer
    before: Rows  # rows where the innermost hop is not drawn: its destinations
    num_inputs: float  # of a mini-batch, own rows too, on average


def draw(fixed: Fixed, fan_outs: Sequence[int], epochs: Sequence[int]) -> Drawn:
    """Every mini-batch of every rank."""
    graph, shape, made = fixed.graph, fixed.shape, fixed.partition
    assert graph.split is not None
    loader = NeighborLoader(graph, fan_outs, graph.split.train, shape.batch_size, seed=SEED)
    sampler = NeighbourSampler(graph, fan_outs, seed=SEED)
    new_ids, owner = made.new_ids.numpy(), made.owner.numpy()
    inputs: Rows = [[[] for _ in range(shape.num_parts)] for _ in epochs]
    before: Rows = [[[] for _ in range(shape.num_parts)] for _ in epochs]
    sizes = []
    for at, epoch in enumerate(epochs):
        order = loader.order(epoch)
        for step in range(fixed.num_steps):
            seeds = order[step * shape.batch_size : (step + 1) * shape.batch_size]
            for rank in range(shape.num_parts):
                own = torch.from_numpy(owner[seeds.numpy()] == rank)
                batch = sampler.sample(seeds[own], epoch, step)
                for rows, ids in ((inputs, batch.input_ids), (before, batch.blocks[0].dst_ids())):
                    known = ids.numpy()
                    rows[at][rank].append(new_ids[known[owner[known] != rank]])
                sizes.append(batch.input_ids.numel())
    return Drawn(inputs, before, float(np.mean(sizes)))


def windows(steps: Sequence[Ids], k: int) -> list[Ids]:
    """The distinct nodes of every k steps, ascending."""
    return [union(steps[start : start + k]) for start in range(0, len(steps), k)]


def union(lists: Sequence[Ids]) -> Ids:
    """Distinct ids, ascending."""
    is_in = np.zeros(1 + max((int(ids.max()) for ids in lists if ids.size), default=0), bool)
    for ids in lists:
        is_in[ids] = True
    return np.flatnonzero(is_in)


def two_windows(rows: Rows, k: int) -> int:
    """Slots that hold any two windows of k that follow each other, on every rank."""
    ranks = [[w for epoch in rows for w in windows(epoch[rank], k)] for rank in range(len(rows[0]))]
    return max(union(both).size for each in ranks for both in pairwise(each))


def fetched(epochs: Sequence[Sequence[Ids]], k: int, num_nodes: int, room: int | None) -> list[list[Ids]]:
    """[epoch][window]: the nodes whose rows are fetched by one rank that begins with nothing.

    ``room``: None: all that a window reads. Otherwise rows stay in so many slots. A missing row takes the lowest free slot;
    where there is none, rows make room that were last read longest ago, then by fewest windows, then by lowest slot; never
    those of the window before, which still trains. Every window must fit.
    """
    if room is None:
        return [windows(steps, k) for steps in epochs]
    pool = _Pool(num_nodes, room)
    return [[pool.read(ids) for ids in windows(steps, k)] for steps in epochs]


class _Pool:
    def __init__(self, num_nodes: int, room: int) -> None:
        self.holds = np.full(room, -1)  # node of each slot
        self.slot = np.full(num_nodes, -1)
        self.last = np.full(num_nodes, -1)  # window of last use
        self.uses = np.zeros(num_nodes, np.int64)
        self.now = -1

    def read(self, ids: Ids) -> Ids:
        """What must be fetched for the next window, which reads ``ids``."""
        self.now += 1
        missing = ids[self.slot[ids] < 0]
        self.last[ids] = self.now
        self.uses[missing] = 0
        lacking = missing.size - int((self.holds < 0).sum())
        if lacking > 0:
            kept = self.holds[self.holds >= 0]
            old = kept[self.last[kept] < self.now - 1]
            assert old.size >= lacking, "two windows must fit"
            rank = (self.last[old] << 42) + (self.uses[old] << 21) + self.slot[old]  # no two are alike
            gone = old[np.argpartition(rank, lacking - 1)[:lacking]]
            self.holds[self.slot[gone]], self.slot[gone] = -1, -1
        free = np.flatnonzero(self.holds < 0)[: missing.size]
        self.holds[free], self.slot[missing] = missing, free
        self.uses[ids] += 1
        return missing
