"""The fixed test graphs: hubs and communities in a power law (A, B, D) and a recursive matrix (C), cut in a fixed way.

    comm    community of a node uniform in 0 .. 255; weight (1 - u)^(-1 / 1.4), at most 5000; 14 N pairs (a, b): a by weight
            over all nodes, b by weight inside a's community with probability 0.85, else over all. Part: community mod P
    rmat    quadrants .57 .19 .19 .05, 14 N pairs, ids permuted. Part: uniform

Loops are dropped, both directions kept, duplicates removed. Train nodes are drawn among the nodes that have a neighbour with
a given probability; then as many of them are kept in every part as fill a whole number of mini-batches, the same in all.

Legend: N nodes, P parts, F features.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from polyhop.graph import DenseFeatures, Graph, Split
from polyhop.kernels.synth import Rmat, feature_rows, permutation, synth_edges
from polyhop.partition import Partition

__all__ = ["SHAPES", "Fixed", "Shape", "make"]

COMMUNITY_NODES = 4096  # on average: 256 communities at full size; a smaller graph has fewer, each as it was
PAIRS_PER_NODE = 14
CLASSES = 16
Array = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class Shape:
    """One of the test graphs with the mini-batches that are drawn from it."""

    kind: str  # comm | rmat
    log_nodes: int
    num_parts: int
    batch: int  # seeds of a rank's mini-batch, on average
    fan_outs: tuple[int, ...]  # from the seeds outward
    train: float  # probability
    inside: float = 0.85  # probability that a pair stays inside its community

    @property
    def num_nodes(self) -> int:
        return 1 << self.log_nodes

    @property
    def batch_size(self) -> int:
        """Seeds of all ranks in a step."""
        return self.batch * self.num_parts


SHAPES = {
    "A": Shape("comm", 20, 4, 1000, (15, 10, 5), 0.125),
    "B": Shape("comm", 20, 4, 1000, (10, 25), 0.125),
    "C": Shape("rmat", 20, 4, 1000, (15, 10, 5), 0.13),
    "D": Shape("comm", 20, 8, 16, (15, 10, 5), 0.0085),
}


@dataclass(frozen=True, eq=False)
class Fixed:
    """A graph and who owns its nodes. Every part has the same number of train nodes."""

    shape: Shape
    graph: Graph
    partition: Partition

    @property
    def num_steps(self) -> int:
        assert self.graph.split is not None
        return self.graph.split.train.numel() // self.shape.batch_size


def make(shape: Shape, width: int, *, most_steps: int | None = None, seed: int = 1) -> Fixed:
    """The same bits for the same arguments. ``width``: features of a node; how many rows are read does not depend on it.

    ``most_steps``: of an epoch.
    """
    random = np.random.default_rng([seed, shape.log_nodes, 1])
    community = _communities(shape.log_nodes, seed)
    indptr, indices = _lists(shape.kind, shape.log_nodes, shape.inside, seed)
    owner = community % shape.num_parts
    if shape.kind == "rmat":
        owner = random.integers(0, shape.num_parts, shape.num_nodes)
    is_train = (random.random(shape.num_nodes) < shape.train) & (np.diff(indptr.numpy()) > 0)
    train = _balanced(is_train, owner, shape, most_steps)
    y = torch.from_numpy(community % CLASSES)
    centres = 0.5 * feature_rows(seed + 2, None, None, num_rows=CLASSES, width=width)
    x = feature_rows(seed + 3, y, centres, num_rows=shape.num_nodes, width=width)
    graph = Graph(
        indptr,
        indices,
        DenseFeatures(x),
        y,
        Split(train, train[:0], train[:0]),
        num_classes=CLASSES,
        name=f"{shape.kind}{shape.log_nodes}",
    )
    return Fixed(shape, graph, Partition(torch.from_numpy(owner.astype(np.int32)), shape.num_parts))


def _communities(log_nodes: int, seed: int) -> Array:
    count = max(1, (1 << log_nodes) // COMMUNITY_NODES)
    return np.random.default_rng([seed, log_nodes]).integers(0, count, 1 << log_nodes)


@lru_cache(maxsize=2)
def _lists(kind: str, log_nodes: int, inside: float, seed: int) -> tuple[Tensor, Tensor]:
    """In-edges (indptr int64 [N + 1], indices int32), both directions, sorted, no loops, no duplicates."""
    draws = PAIRS_PER_NODE << log_nodes
    if kind == "rmat":
        recipe, node_of = Rmat(seed, log_nodes, 0.57, 0.19, 0.19), permutation(seed + 1, 1 << log_nodes)
        return synth_edges(recipe, node_of, num_pairs=draws, exact=False)
    a, b = _pairs(_communities(log_nodes, seed), inside, draws, np.random.default_rng([seed, log_nodes, 2]))
    code = np.concatenate([a << log_nodes | b, b << log_nodes | a])
    mask = (1 << log_nodes) - 1
    code = code[(code >> log_nodes) != (code & mask)]
    code.sort()
    code = code[np.append(True, code[1:] != code[:-1])]
    indptr = np.searchsorted(code, np.arange((1 << log_nodes) + 1) << log_nodes)
    return torch.from_numpy(indptr), torch.from_numpy((code & mask).astype(np.int32))


def _pairs(community: Array, inside: float, draws: int, random: np.random.Generator) -> tuple[Array, Array]:
    """(a, b) of all draws, loops and duplicates among them."""
    nodes = np.argsort(community, kind="stable")  # communities side by side
    weight = np.minimum((1 - random.random(community.size)) ** (-1 / 1.4), 5000.0)
    ends = np.cumsum(weight)  # of the nodes in that order
    last = np.searchsorted(community[nodes], np.arange(community.max() + 1), side="right")
    bounds = np.concatenate([[0.0], ends])[np.append(0, last)]  # of the communities
    # In ascending order the searches below run through memory once; the pairs are a set, so their order is free.
    a = _found(ends, np.sort(random.random(draws)) * ends[-1])
    is_inside, of_a = random.random(draws) < inside, community[nodes[a]]
    low = np.where(is_inside, bounds[of_a], 0.0)
    high = np.where(is_inside, bounds[of_a + 1], ends[-1])
    b = _found(ends, low + random.random(draws) * (high - low))
    return nodes[a], nodes[b]


def _found(ends: np.ndarray[tuple[int], np.dtype[np.float64]], at: np.ndarray) -> Array:
    """Positions whose share of the sum holds each value."""
    found = torch.searchsorted(torch.from_numpy(ends), torch.from_numpy(at), right=True).numpy()
    return np.minimum(found, ends.size - 1)


def _balanced(is_train: np.ndarray, owner: Array, shape: Shape, most_steps: int | None) -> Tensor:
    """int64, ascending: train nodes, equally many of every part, a whole number of mini-batches."""
    mine = [np.flatnonzero(is_train & (owner == part)) for part in range(shape.num_parts)]
    steps = min(len(ids) // shape.batch for ids in mine)
    steps = steps if most_steps is None else min(steps, most_steps)
    # Ids say nothing of a node here, so the first of them are as good as any.
    return torch.from_numpy(np.sort(np.concatenate([ids[: steps * shape.batch] for ids in mine])))
