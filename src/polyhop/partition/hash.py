"""Hash: a part by the node's number alone; no look at the edges. The cut is that of chance, the balance nearly even."""

from __future__ import annotations

import torch
from torch import Tensor

from polyhop.graph import Graph
from polyhop.kernels import Key, random_u32
from polyhop.kernels.keys import Purpose

__all__ = ["hash_parts"]


def hash_parts(graph: Graph, num_parts: int, *, seed: int = 0) -> Tensor:
    """int32 [N]: the part of each node, a function of (seed, node id)."""
    words = random_u32(Key(seed).at(Purpose.PARTITION, 0), torch.arange(graph.num_nodes))[:, 0]
    return ((words * num_parts) >> 32).to(torch.int32)
