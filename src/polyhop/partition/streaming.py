"""What the streaming partitioners share: several passes over the nodes, loads kept under two capacities.

Legend: N nodes, P parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyhop.graph import Graph
from polyhop.kernels.neighbours import neighbours
from polyhop.kernels.stream import Stream, stream_parts

__all__ = ["even_out", "stream_graph"]


def stream_graph(graph: Graph, num_parts: int, *, rule: str, passes: int, slack: float) -> Tensor:
    """int32 [N]: the part of each node after ``passes`` passes in the user's order, or fewer if none moves any more.

    Each part takes at most (1 + slack) of the mean number of nodes, and of the mean number of training nodes.
    """
    indptr, indices = neighbours(graph.indptr, graph.indices)
    nodes = graph.num_nodes
    state = Stream.empty(nodes, num_parts)
    alpha = (num_parts**0.5) * (indices.numel() / 2) / max(nodes, 1) ** 1.5
    limits = _limits(graph, num_parts, slack)
    for _ in range(passes):
        if not stream_parts(state, indptr, indices, rule=rule, alpha=alpha, **limits):
            break
    return state.owner


def even_out(
    graph: Graph,
    lists: tuple[Tensor, Tensor],
    owner: Tensor,
    num_parts: int,
    *,
    passes: int = 3,
    slack: float,
) -> Tensor:
    """int32 [N]: ``owner``, nodes moved out of parts with too many nodes or training nodes, and where it helps the cut.

    ``lists`` are the graph's neighbours. Nodes that hang least on their part are asked first.
    """
    indptr, indices = lists
    state = Stream(
        owner.clone(), torch.bincount(owner, minlength=num_parts).double(), torch.zeros(num_parts).double()
    )
    limits = _limits(graph, num_parts, slack)
    if limits["second"] is not None:
        state.second_load.index_add_(0, owner.long(), limits["second"])
    for _ in range(passes):
        order = torch.sort(_attachment(indptr, indices, state.owner), stable=True).indices
        if not stream_parts(state, indptr, indices, rule="fennel", alpha=0.0, order=order, **limits):
            break
    return state.owner


def _attachment(indptr: Tensor, indices: Tensor, owner: Tensor) -> Tensor:
    """float32 [N]: share of each node's neighbours that lie in its part; 0 for a node without neighbours."""
    degree = indptr.diff()
    at = torch.repeat_interleave(torch.arange(degree.numel()), degree)
    same = (owner[at] == owner[indices.long()]).to(torch.float32)
    return torch.zeros(degree.numel()).index_add_(0, at, same) / degree.clamp(min=1)


def _limits(graph: Graph, num_parts: int, slack: float) -> dict[str, Any]:
    """How much each part may hold: nodes, and training nodes where there are any."""
    nodes = float(graph.num_nodes)
    train = None if graph.split is None else graph.split.train
    if train is None or train.numel() == 0:
        return {"capacity": _capacity(nodes, num_parts, slack), "second": None}
    second = torch.zeros(graph.num_nodes, dtype=torch.float64)
    second[train] = 1.0
    return {
        "capacity": _capacity(nodes, num_parts, slack),
        "second": second,
        "second_capacity": _capacity(float(train.numel()), num_parts, slack),
    }


def _capacity(total: float, num_parts: int, slack: float) -> float:
    """At least what a part must hold when units cannot be cut."""
    return max((1 + slack) * total / num_parts, -(-total // num_parts), 1.0)
