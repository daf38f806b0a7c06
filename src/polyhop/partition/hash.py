"""Hash: a part by the node's number alone; no look at the edges. The cut is that of chance, the balance nearly even."""

from __future__ import annotations

import torch
from torch import Tensor

from polyhop.graph import Graph
from polyhop.kernels import Key, random_u32
from polyhop.kernels.keys import Purpose

__all__ = ["hash_owner", "hash_parts"]

_CHUNK = 1 << 20


def hash_parts(graph: Graph, num_parts: int, *, seed: int = 0) -> Tensor:
    """int32 [N]: the part of each node, a function of (seed, node id)."""
    return hash_owner(graph.num_nodes, num_parts, seed=seed)


def hash_owner(num_nodes: int, num_parts: int, *, seed: int = 0) -> Tensor:
    """The same from the number of nodes."""
    owner = torch.empty(num_nodes, dtype=torch.int32)
    key = Key(seed).at(Purpose.PARTITION, 0)
    for start in range(0, num_nodes, _CHUNK):
        ids = torch.arange(start, min(start + _CHUNK, num_nodes))
        owner[start : start + ids.numel()] = (random_u32(key, ids)[:, 0] * num_parts) >> 32
    return owner
