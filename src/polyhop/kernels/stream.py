"""Streaming partitioning: each node in turn joins the part where it has most neighbours, less what the part's load costs.

Rule ``cluster`` makes groups instead, as many as come about: every node starts alone (``Stream.apart``) and looks only at
the groups of its neighbours.

Legend: N nodes, R rows of this piece of the stream, E their edges, P parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhop.errors import ConfigError, unknown
from polyhop.kernels import checks, native

__all__ = ["RULES", "Stream", "stream_parts"]

RULES = ("fennel", "ldg", "cluster")


@dataclass(eq=False)
class Stream:
    """Where a stream stands: the part of every node so far (int32 [N], -1 = none) and the parts' loads (float64 [P])."""

    owner: Tensor
    load: Tensor
    second_load: Tensor

    @classmethod
    def empty(cls, num_nodes: int, num_parts: int) -> Stream:
        """Nothing placed yet."""
        zeros = torch.zeros(num_parts, dtype=torch.float64)
        return cls(torch.full((num_nodes,), -1, dtype=torch.int32), zeros, zeros.clone())

    @classmethod
    def apart(cls, num_nodes: int, weight: Tensor | None = None, second: Tensor | None = None) -> Stream:
        """Every node in a part of its own: where clusters start. ``weight``, ``second`` as in ``stream_parts``, of all N."""
        load = torch.ones(num_nodes, dtype=torch.float64) if weight is None else weight.clone()
        nodes = torch.arange(num_nodes, dtype=torch.int32)
        return cls(nodes, load, load[:0].clone() if second is None else second.clone())

    @classmethod
    def of(cls, owner: Tensor, num_parts: int, weight: Tensor | None, second: Tensor | None) -> Stream:
        """Placed as ``owner`` int32 [N] says; ``weight``, ``second`` as in ``stream_parts``, of all N."""
        at = owner.long()

        def sums(values: Tensor) -> Tensor:
            return torch.zeros(num_parts, dtype=torch.float64).index_add_(0, at, values)

        load = torch.bincount(at, minlength=num_parts).double() if weight is None else sums(weight)
        none = torch.zeros(num_parts, dtype=torch.float64)
        return cls(owner.clone(), load, none if second is None else sums(second))


def stream_parts(
    state: Stream,
    indptr: Tensor,
    indices: Tensor,
    *,
    rule: str,
    alpha: float,
    capacity: float,
    first: int = 0,
    order: Tensor | None = None,
    weight: Tensor | None = None,
    second: Tensor | None = None,
    second_capacity: float = float("inf"),
    edge_weight: Tensor | None = None,
) -> int:
    """Place rows first .. first + R in turn (``order`` int64 [R] permutes them), changing ``state``; how many moved.

    indptr int64 [R + 1], indices [E] name neighbours in 0 .. N - 1, each counting ``edge_weight`` float32 [E] > 0
    (None = 1). A row placed before is taken out first. ``weight`` and ``second`` float64 [R] (None = 1 and 0) fill parts up
    to ``capacity`` and ``second_capacity``; where no part has room, the row joins the one that is least over.

    ``fennel`` subtracts alpha * 1.5 * sqrt(load) from the neighbours in a part, ``ldg`` multiplies them by
    1 - load / capacity, ``cluster`` divides them by the root of the load and lets a row stay though its part is full;
    alpha is for ``fennel`` only.
    """
    if rule not in RULES:
        raise ConfigError(unknown("rule", rule, RULES))
    checks.csr("stream_parts", indptr, indices, state.owner.numel())
    rows = indptr.numel() - 1
    checks.require(
        0 <= first <= state.owner.numel() - rows,
        f"stream_parts: rows {first} .. {first + rows} exceed the {state.owner.numel()} nodes",
    )
    for name, given in (("order", order), ("weight", weight), ("second", second)):
        checks.vector("stream_parts", name, given, rows)
    checks.vector("stream_parts", "edge_weight", edge_weight, indices.numel())
    checks.require(
        second is None or state.second_load.numel() == state.load.numel(),
        "stream_parts: second is given, but the stream was started without it",
    )
    if rule == "cluster":
        checks.require(
            rows == 0 or int(state.owner[first : first + rows].min()) >= 0,
            "stream_parts: rule 'cluster' moves nodes that are placed: start from Stream.apart",
        )
    if not native.serves(indptr, indices, order, weight, second, edge_weight, op="ph_stream_parts"):
        return _reference(
            state, indptr, indices, rule, alpha, capacity, first, order, weight, second, second_capacity, edge_weight,
        )  # fmt: skip
    return native.call(
        "ph_stream_parts", indptr.contiguous(), indices.contiguous(), native.id_code(indices), rows,
        None if order is None else order.contiguous(), first, state.load.numel(),
        None if weight is None else weight.double().contiguous(), None if second is None else second.double().contiguous(),
        float(capacity), float(second_capacity), RULES.index(rule), float(alpha), state.owner, state.load,
        state.second_load, None if edge_weight is None else edge_weight.float().contiguous(),
    )  # fmt: skip


def _reference(
    state: Stream,
    indptr: Tensor,
    indices: Tensor,
    rule: str,
    alpha: float,
    capacity: float,
    first: int,
    order: Tensor | None,
    weight: Tensor | None,
    second: Tensor | None,
    second_capacity: float,
    edge_weight: Tensor | None,
) -> int:
    """The same placements, one row at a time in Python."""
    starts, everyone, owner = indptr.tolist(), indices.tolist(), state.owner.tolist()
    load, second_load = state.load.tolist(), state.second_load.tolist()
    rows, moved = len(starts) - 1, 0
    weights = [1.0] * rows if weight is None else weight.tolist()
    seconds = [0.0] * rows if second is None else second.tolist()
    pulls = [1.0] * len(everyone) if edge_weight is None else edge_weight.tolist()
    for row in range(rows) if order is None else order.tolist():
        v, w, s = first + row, weights[row], seconds[row]
        was = owner[v]
        if was >= 0:
            load[was] -= w
            if s:
                second_load[was] -= s
        near: dict[int, float] = {}  # by first appearance
        for e in range(starts[row], starts[row + 1]):
            u = everyone[e]
            if u != v and owner[u] >= 0:
                near[owner[u]] = near.get(owner[u], 0.0) + pulls[e]
        if rule == "cluster":
            room = (capacity, second_capacity if s > 0 else math.inf)
            best = _beside(near, was, load, second_load, w, s, room)
        else:
            best = _of_all(near, load, second_load, w, s, rule, alpha, (capacity, second_capacity))
        owner[v] = best
        load[best] += w
        if s:
            second_load[best] += s
        moved += best != was
    for kept, found in ((state.owner, owner), (state.load, load), (state.second_load, second_load)):
        kept.copy_(torch.tensor(found, dtype=kept.dtype))
    return moved


def _of_all(
    near: dict[int, float], load: list[float], second_load: list[float], w: float, s: float, rule: str, alpha: float,
    room: tuple[float, float],
) -> int:  # fmt: skip
    """Highest score, then lowest load, then first, of the parts with room; the least full if there is none."""
    parts = range(len(load))
    full = [max((load[p] + w) / room[0], (second_load[p] + s) / room[1] if s > 0 else 0.0) for p in parts]
    fits = [p for p in parts if load[p] + w <= room[0] and (s <= 0 or second_load[p] + s <= room[1])]
    if rule == "fennel":
        score = [near.get(p, 0.0) - alpha * 1.5 * math.sqrt(max(load[p], 0.0)) for p in parts]
    else:
        score = [(near.get(p, 0.0) + 1e-9) * (1.0 - load[p] / room[0]) for p in parts]
    return min(fits, key=lambda p: (-score[p], load[p])) if fits else min(parts, key=full.__getitem__)


def _beside(
    near: dict[int, float], own: int, load: list[float], second_load: list[float], w: float, s: float,
    room: tuple[float, float],
) -> int:  # fmt: skip
    """The neighbours' part with room, or the own, where neighbours over the root of the load are most; then the lightest."""
    best, top, top_load = own, near.get(own, 0.0) ** 2, load[own] + w
    for p, pull in near.items():
        now = load[p] + w
        if now > room[0] or (s > 0 and second_load[p] + s > room[1]):
            continue
        one, other = pull * pull * top_load, top * now
        if one > other or (one == other and now < top_load):
            best, top, top_load = p, pull * pull, now
    return best
