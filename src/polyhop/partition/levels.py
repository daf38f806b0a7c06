"""Clusters first, parts of clusters then: what lets a stream find parts that its order does not show.

Nodes are streamed into small clusters, clusters become the nodes of a smaller graph, and so on until the graph is small
enough to try several placements; on the way back every level streams its nodes again, each to the part where most of its
neighbours are (the levels of Karypis & Kumar, 1998, with the streaming kernel in every place, so a level costs few passes).

Legend: N nodes, M pairs of neighbours (both ways), P parts, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from polyhop.kernels import Key, random_u32
from polyhop.kernels.contract import contract
from polyhop.kernels.keys import Purpose
from polyhop.kernels.stream import Stream, stream_parts
from polyhop.partition.streaming import Room, fennel_passes, ldg_passes

__all__ = ["Level", "Streamable", "group_sums", "place"]

_CLUSTER_PASSES = 2
_CLUSTERS = 15  # in a part at least, so that parts can be balanced
_SMALL = 20  # nodes per part of a graph that is small enough to be placed
_FIRST_PASSES = 8
_TRIES = 32
_TRY_PAIRS = 1 << 21  # in all tries: fewer where the smallest graph has stayed large


class Streamable(Protocol):
    """A graph that can be streamed, from memory or piece by piece.

    ``weight`` and ``second`` float64 [N] (None: 1 and 0 each) are what nodes add to a part's loads.
    """

    @property
    def weight(self) -> Tensor | None: ...

    @property
    def second(self) -> Tensor | None: ...

    @property
    def num_nodes(self) -> int: ...

    @property
    def num_pairs(self) -> float:
        """Pairs of neighbours, both ways, or their weight."""

    def stream(self, state: Stream, *, order: Tensor | None = None, **options: Any) -> int:
        """One pass of ``stream_parts`` over all nodes; ``order`` int64 [N] where the graph is in memory."""

    def coarser(self, group: Tensor, num_groups: int) -> Streamable:
        """The graph of groups (int32 [N]): edges and loads summed."""


@dataclass(frozen=True, eq=False)
class Level:
    """A graph in memory: indptr int64 [N + 1], indices [M], float32 [M] (None: 1 each), float64 [N] (None: 1, 0 each)."""

    indptr: Tensor
    indices: Tensor
    edge_weight: Tensor | None = None
    weight: Tensor | None = None
    second: Tensor | None = None

    @property
    def num_nodes(self) -> int:
        return self.indptr.numel() - 1

    @property
    def num_pairs(self) -> float:
        return float(self.indices.numel() if self.edge_weight is None else self.edge_weight.double().sum())

    def stream(self, state: Stream, *, order: Tensor | None = None, **options: Any) -> int:
        """One pass over all nodes."""
        return stream_parts(
            state, self.indptr, self.indices, order=order, weight=self.weight, second=self.second,
            edge_weight=self.edge_weight, **options,
        )  # fmt: skip

    def cut(self, owner: Tensor) -> float:
        """Pairs between parts, both ways, or their weight."""
        parts = int(owner.max()) + 1 if owner.numel() else 0
        return float(
            contract(self.indptr, self.indices, owner, parts, edge_weight=self.edge_weight)[2].double().sum()
        )

    def coarser(self, group: Tensor, num_groups: int) -> Level:
        """The graph of groups: edges and loads summed."""
        lists = contract(self.indptr, self.indices, group, num_groups, edge_weight=self.edge_weight)
        return Level(*lists, *group_sums(self, group, num_groups))


def group_sums(level: Streamable, group: Tensor, num_groups: int) -> tuple[Tensor, Tensor | None]:
    """(float64 [G], float64 [G] or None): what the groups' nodes weigh together."""
    state = Stream.of(group, num_groups, level.weight, level.second)
    return state.load, None if level.second is None else state.second_load


def place(level: Streamable, room: Room, *, passes: int = 4, seed: int = 0) -> Tensor:
    """int32 [N]: the part of each node; ``passes`` passes at each level on the way back."""
    above: list[tuple[Streamable, Tensor]] = []
    while level.num_nodes > _SMALL * room.num_parts:
        group, count = _clusters(level, room)
        if count > 0.9 * level.num_nodes:  # no clusters to be had
            break
        above.append((level, group))
        level = level.coarser(group, count)
    owner = _first(level, room, passes=passes, seed=seed)
    for finer, group in reversed(above):
        owner = _refine(finer, owner[group.long()], room, passes)
    return owner


def _clusters(level: Streamable, room: Room) -> tuple[Tensor, int]:
    """(int32 [N], G): a cluster for each node, numbered without gaps."""
    state = Stream.apart(level.num_nodes, level.weight, level.second)
    share = 1 / (room.num_parts * _CLUSTERS)
    limits: dict[str, Any] = {"capacity": room.nodes * share, "second_capacity": max(room.train * share, 1.0)}
    for _ in range(_CLUSTER_PASSES):
        level.stream(state, rule="cluster", alpha=0.0, **limits)
    used = torch.zeros(level.num_nodes, dtype=torch.bool)
    used[state.owner.long()] = True
    return (used.cumsum(0, dtype=torch.int32) - 1)[state.owner.long()], int(used.sum())


def _first(level: Streamable, room: Room, *, passes: int, seed: int) -> Tensor:
    """The best of several streams of a small graph, the first in its own order and the others shuffled."""
    found: list[tuple[float, Tensor]] = []
    for attempt in range(_tries(level)):
        order = None
        if attempt:
            key = Key(seed).at(Purpose.PARTITION, attempt)
            order = random_u32(key, torch.arange(level.num_nodes))[:, 0].sort(stable=True).indices
        state = Stream.empty(level.num_nodes, room.num_parts)
        for one in ldg_passes(_room_for(level, room), _FIRST_PASSES):
            level.stream(state, order=order, **one)
        owner = _refine(level, state.owner, room, passes)
        found.append((level.cut(owner) if isinstance(level, Level) else 0.0, owner))
    return min(found, key=lambda one: one[0])[1]


def _tries(level: Streamable) -> int:
    if not isinstance(level, Level):  # large, and each look at its cut would cost a pass
        return 1
    return max(1, min(_TRIES, _TRY_PAIRS // max(level.indices.numel(), 1)))


def _refine(level: Streamable, owner: Tensor, room: Room, passes: int) -> Tensor:
    state = Stream.of(owner, room.num_parts, level.weight, level.second)
    for one in fennel_passes(_room_for(level, room), level.num_pairs, passes):
        level.stream(state, **one)
    return state.owner


def _room_for(level: Streamable, room: Room) -> Room:
    """Room enough to balance this level's nodes, which may weigh more than one."""

    def heaviest(values: Tensor | None) -> float:
        return 1.0 if values is None or values.numel() == 0 else max(float(values.max()), 1.0)

    return replace(room, heaviest=heaviest(level.weight), heaviest_train=heaviest(level.second))
