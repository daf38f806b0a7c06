"""Block: contiguous ranges of the user's order, cut where nodes, edges and training nodes together are even."""

from __future__ import annotations

import torch
from torch import Tensor

from polyhop.graph import Graph

__all__ = ["block", "block_owner"]

_CHUNK = 1 << 20


def block(graph: Graph, num_parts: int, *, seed: int = 0) -> Tensor:
    """int32 [N]: ascending parts. The seed is not used."""
    return block_owner(graph.in_degree, None if graph.split is None else graph.split.train, num_parts)


def block_owner(in_degree: Tensor, train: Tensor | None, num_parts: int) -> Tensor:
    """The same from in-degrees int32 [N] and the ids of training nodes. Takes 20 bytes a node beside what is given."""
    nodes = in_degree.numel()
    owner = torch.zeros(nodes, dtype=torch.int32)
    if nodes == 0:
        return owner
    weight = torch.full((nodes,), 1.0 / nodes, dtype=torch.float64)
    edges = int(in_degree.sum())
    if edges:
        for piece, degree in zip(*_pieces(weight, in_degree), strict=True):
            piece += degree.double() / edges
    if train is not None and train.numel():
        weight[train] += 1.0 / train.numel()
    scale = num_parts / float(weight.sum())
    reached = weight.cumsum(0)
    for to, piece, own in zip(*_pieces(owner, reached, weight), strict=True):
        middle = piece - own / 2  # a node goes where its middle lies
        to.copy_((middle * scale).long().clamp(0, num_parts - 1))
    return owner


def _pieces(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    return [torch.split(tensor, _CHUNK) for tensor in tensors]
