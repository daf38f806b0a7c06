"""Streaming partitioning: each node in turn joins the part where it has most neighbours, less what the part's load costs.

Legend: N nodes, R rows of this piece of the stream, E their edges, P parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyhop.errors import ConfigError, unknown
from polyhop.kernels import checks, native

__all__ = ["RULES", "Stream", "stream_parts"]

RULES = ("fennel", "ldg")


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
) -> int:
    """Place rows first .. first + R in turn (``order`` int64 [R] permutes them), changing ``state``; how many moved.

    indptr int64 [R + 1], indices [E] name neighbours in 0 .. N - 1. A row placed before is taken out first. ``weight`` and
    ``second`` float64 [R] (None = 1 and 0) fill parts up to ``capacity`` and ``second_capacity``; where no part has room,
    the row joins the one that is least over.
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
    if not native.serves(indptr, indices, order, weight, second, op="ph_stream_parts"):
        return _reference(
            state, indptr, indices, rule, alpha, capacity, first, order, weight, second, second_capacity
        )
    return native.call(
        "ph_stream_parts", indptr.contiguous(), indices.contiguous(), native.id_code(indices), rows,
        None if order is None else order.contiguous(), first, state.load.numel(),
        None if weight is None else weight.double().contiguous(), None if second is None else second.double().contiguous(),
        float(capacity), float(second_capacity), RULES.index(rule), float(alpha), state.owner, state.load,
        state.second_load,
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
) -> int:
    """The same placements, one row at a time in Python."""
    rows, moved = indptr.numel() - 1, 0
    load, second_load, owner = state.load, state.second_load, state.owner
    for row in range(rows) if order is None else order.tolist():
        v = first + row
        w = 1.0 if weight is None else float(weight[row])
        s = 0.0 if second is None else float(second[row])
        was = int(owner[v])
        if was >= 0:
            load[was] -= w
            second_load[was] -= s
        beside = indices[indptr[row] : indptr[row + 1]].long()
        parts = owner[beside[beside != v]]
        near = torch.bincount(parts[parts >= 0], minlength=load.numel()).double()
        full = (load + w) / capacity
        if s > 0:
            full = torch.maximum(full, (second_load + s) / second_capacity)
        if rule == "fennel":
            score = near - alpha * 1.5 * load.sqrt()
        else:
            score = (near + 1e-9) * (1.0 - load / capacity)
        fits = (full <= 1.0).nonzero()[:, 0].tolist()
        best = max(fits, key=lambda p: (float(score[p]), -float(load[p]), -p)) if fits else int(full.argmin())
        owner[v] = best
        load[best] += w
        second_load[best] += s
        moved += best != was
    return moved
