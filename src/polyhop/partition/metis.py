"""METIS, k-way (Karypis & Kumar, 1998), through pymetis; loads balanced by a pass of our own.

pymetis reads one weight per node and ignores the rest, and crashes on asymmetric input: it is given the merged neighbours,
and one weight: the one asked for, or one that counts a training node more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhop.errors import UnsupportedError
from polyhop.graph import Graph
from polyhop.partition.streaming import Room, even_out
from polyhop.partition.weights import weigh, whole

__all__ = ["metis"]

# Loads that differ much have more bad cuts: take the best of several. A little room for balance, in thousandths.
_TRIES = {"ncuts": 4, "niter": 20, "ufactor": 25}


def metis(
    graph: Graph, num_parts: int, *, seed: int = 0, slack: float = 0.05, node_weight: Tensor | None = None,
    edge_weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """int32 [N]: the part of each node. Parts hold up to (1 + slack) of the mean number of nodes and of training nodes; or
    of ``node_weight`` [N]. ``edge_weight`` [E] is what it costs to cut an edge. Both are whole numbers >= 0.
    """
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
    level = weigh(graph, node_weight, edge_weight)
    _, parts = pymetis.part_graph(
        num_parts,
        pymetis.CSRAdjacency(adj_starts=level.indptr.numpy(), adjacent=level.indices.long().numpy()),
        vweights=(_weights(graph) if node_weight is None else whole(node_weight)).numpy(),
        eweights=None if level.edge_weight is None else whole(level.edge_weight).numpy(),
        options=pymetis.Options(seed=seed & 0x7FFFFFFF, **(_TRIES if node_weight is not None else {})),
    )
    owner = torch.as_tensor(parts, dtype=torch.int32)
    room, lists = Room.of(graph, num_parts, slack), (level.indptr, level.indices)
    if level.weight is not None:
        room = room.of_one_load(float(level.weight.max()))
    return even_out(owner, room, lists, level.edge_weight, level.weight, level.second)


def _weights(graph: Graph) -> Tensor:
    """int64 [N]: nodes and training nodes count about as much in sum, so that a part with its share of both is balanced."""
    weight = torch.ones(graph.num_nodes, dtype=torch.int64)
    if graph.split is not None and graph.split.train.numel():
        weight[graph.split.train] += max(1, round(graph.num_nodes / graph.split.train.numel()))
    return weight
