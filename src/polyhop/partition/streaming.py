"""What the streaming partitioners share: how much parts may hold, and what each pass over the nodes is given.

The schedules serve graphs in memory and graphs that pass piece by piece alike.

Legend: N nodes, M pairs of neighbours (both ways), P parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polyhop.graph import Graph
from polyhop.kernels.stream import Stream, stream_parts

__all__ = ["Room", "even_out", "fennel_passes", "is_train", "ldg_passes"]

_LDG_OVER = 0.5  # how far parts may overfill at first, so that they do not freeze before neighbours have met
_FENNEL_OVER = 0.1  # less after a first placement
_FENNEL_PRICE = 4.0  # of the last pass with a price, in the paper's alpha; twice as much in each pass before


@dataclass(frozen=True)
class Room:
    """How much each part may hold: (1 + slack) of its share, and no less than units that cannot be cut force it to.

    ``nodes`` and ``train`` are totals (train = 0: no second load), ``heaviest`` and ``heaviest_train`` of one node.
    """

    num_parts: int
    nodes: float
    train: float = 0.0
    slack: float = 0.05
    heaviest: float = 1.0
    heaviest_train: float = 1.0

    @classmethod
    def of(cls, graph: Graph, num_parts: int, slack: float) -> Room:
        """Of a graph's nodes and training nodes."""
        train = 0 if graph.split is None else graph.split.train.numel()
        return cls(num_parts, float(graph.num_nodes), float(train), slack)

    def of_one_load(self, heaviest: float = 1.0) -> Room:
        """The same without training nodes: loads have a mean of 1, and the heaviest node this one."""
        return replace(self, train=0.0, heaviest=heaviest)

    def limits(self, over: float = 0.0) -> dict[str, float]:
        """The capacities of ``stream_parts``, stretched by ``over``."""
        found = {"capacity": self._capacity(self.nodes, self.heaviest) * (1 + over)}
        if self.train:
            found["second_capacity"] = self._capacity(self.train, self.heaviest_train) * (1 + over)
        return found

    def _capacity(self, total: float, heaviest: float) -> float:
        share = total / self.num_parts
        return max((1 + self.slack) * share, -(-share // 1) if heaviest <= 1 else share + heaviest, 1.0)


def ldg_passes(room: Room, passes: int) -> Iterator[dict[str, Any]]:
    """What to give ``stream_parts`` in each pass, from an empty stream: capacities tighten down to the room."""
    for i in range(passes):
        left = 1 - i / max(passes - 1, 1)
        yield {"rule": "ldg", "alpha": 0.0, **room.limits((1 + _LDG_OVER) ** left - 1)}


def fennel_passes(room: Room, num_pairs: float, passes: int) -> Iterator[dict[str, Any]]:
    """What to give ``stream_parts`` in each pass after a first placement: the price of load falls by halves, then to none.

    ``num_pairs`` counts (or weighs) every pair of neighbours both ways. A high price first spreads what is crowded; without
    any, the last pass only looks at neighbours and at the room. The last two passes keep to the room.
    """
    alpha = room.num_parts**0.5 * (num_pairs / 2) / max(room.nodes, 1.0) ** 1.5
    for i in range(passes):
        price = _FENNEL_PRICE * 2.0 ** (passes - 2 - i) if i < passes - 1 else 0.0
        over = _FENNEL_OVER * max(1 - i / (passes - 2), 0.0) if passes > 2 else 0.0
        yield {"rule": "fennel", "alpha": price * alpha, **room.limits(over)}


def even_out(
    owner: Tensor,
    room: Room,
    lists: tuple[Tensor, Tensor],
    edge_weight: Tensor | None = None,
    weight: Tensor | None = None,
    second: Tensor | None = None,
    *,
    passes: int = 3,
) -> Tensor:
    """int32 [N]: ``owner``, nodes moved out of parts that hold more than the room, and where it helps the cut.

    ``lists`` are the graph's neighbours; weights as ``stream_parts`` takes them. Nodes that hang least on their part are
    asked first.
    """
    state = Stream.of(owner, room.num_parts, weight, second)
    limits: dict[str, Any] = room.limits()
    for _ in range(passes):
        order = torch.sort(_attachment(*lists, edge_weight, state.owner), stable=True).indices
        moved = stream_parts(
            state, *lists, rule="fennel", alpha=0.0, order=order, weight=weight, second=second,
            edge_weight=edge_weight, **limits,
        )  # fmt: skip
        if not moved:
            break
    return state.owner


def is_train(graph: Graph) -> Tensor | None:
    """float64 [N]: 1 for training nodes, else 0; None where there are none."""
    if graph.split is None or graph.split.train.numel() == 0:
        return None
    second = torch.zeros(graph.num_nodes, dtype=torch.float64)
    second[graph.split.train] = 1.0
    return second


def _attachment(indptr: Tensor, indices: Tensor, edge_weight: Tensor | None, owner: Tensor) -> Tensor:
    """float32 [N]: share of each node's neighbours that lie in its part; 0 for a node without neighbours."""
    degree = indptr.diff()
    at = torch.repeat_interleave(torch.arange(degree.numel()), degree)
    same, sums = (owner[at] == owner[indices.long()]).to(torch.float32), degree.float()
    if edge_weight is not None:
        same, sums = same * edge_weight, torch.zeros(degree.numel()).index_add_(0, at, edge_weight)
    return torch.zeros(degree.numel()).index_add_(0, at, same) / sums.clamp(min=1)
