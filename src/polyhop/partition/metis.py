"""METIS, k-way (Karypis & Kumar, 1998), through pymetis; training nodes balanced by a pass of our own.

pymetis reads one weight per node and ignores the rest, and crashes on asymmetric input: it is given the merged neighbours,
and one weight that counts a training node more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhop.errors import UnsupportedError
from polyhop.graph import Graph
from polyhop.kernels.neighbours import neighbours
from polyhop.partition.streaming import even_out

__all__ = ["metis"]


def metis(graph: Graph, num_parts: int, *, seed: int = 0, slack: float = 0.05) -> Tensor:
    """int32 [N]: the part of each node. Parts hold up to (1 + slack) of the mean number of nodes and of training nodes."""
    nodes = graph.num_nodes
    if num_parts == 1 or nodes <= num_parts:  # nothing to cut; METIS fails on more parts than nodes
        return (
            torch.arange(nodes, dtype=torch.int32) if num_parts > 1 else torch.zeros(nodes, dtype=torch.int32)
        )
    try:
        import pymetis
    except ImportError as error:
        raise UnsupportedError(
            "partition method 'metis' needs pymetis, which is not installed here (pip install pymetis); "
            "'fennel' needs nothing and cuts nearly as well"
        ) from error
    indptr, indices = neighbours(graph.indptr, graph.indices)
    _, parts = pymetis.part_graph(
        num_parts,
        pymetis.CSRAdjacency(adj_starts=indptr.numpy(), adjacent=indices.long().numpy()),
        vweights=_weights(graph).numpy(),
        options=pymetis.Options(seed=seed & 0x7FFFFFFF),
    )
    owner = torch.as_tensor(parts, dtype=torch.int32)
    return even_out(graph, (indptr, indices), owner, num_parts, slack=slack)


def _weights(graph: Graph) -> Tensor:
    """int64 [N]: nodes and training nodes count about as much in sum, so that a part with its share of both is balanced."""
    weight = torch.ones(graph.num_nodes, dtype=torch.int64)
    if graph.split is not None and graph.split.train.numel():
        weight[graph.split.train] += max(1, round(graph.num_nodes / graph.split.train.numel()))
    return weight
