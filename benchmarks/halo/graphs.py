"""The graphs of the bench: two synthetic ones with clear communities, one without, and real ones, each cut by metis.

    reddit     dense: 32,768 nodes of degree 100, 41 classes
    products   65,536 nodes of degree 50, 47 classes
    blurred    products with one edge in six between classes: nearly every row is marginal

Pairs fall inside a class (a group of it) or between any two; degrees follow a power law; a fifth of the labels are wrong, so
that there are gradients in every epoch. Inputs are 64 columns wide, of real graphs by a fixed random projection of theirs:
with thousands of columns the sum of the first layer's gradients would be most of what crosses, and no way of sending rows
would matter.

Legend: N nodes, F features.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import polyhop
from benchmarks.harness import ROOT
from polyhop.errors import PolyhopError
from polyhop.graph import DenseFeatures, Graph, Split
from polyhop.kernels.synth import Communities, feature_rows, permutation, synth_edges
from polyhop.partition import Partition, partition

__all__ = ["REAL", "SHAPES", "Cut", "Shape", "cut", "load_real", "make", "narrowed"]

WIDTH = 64
REAL = ("facebook-pages", "amazon-computers")


@dataclass(frozen=True)
class Shape:
    """A synthetic graph. ``inside``: share of the pairs inside one group of a class."""

    num_nodes: int
    degree: int
    num_classes: int
    inside: float
    num_groups: int = 1  # of a class
    train: float = 0.6


SHAPES = {
    "reddit": Shape(32_768, 100, 41, 0.994),
    "products": Shape(65_536, 50, 47, 0.983, num_groups=2),
    "blurred": Shape(16_384, 50, 47, 0.85),
}


@dataclass(frozen=True, eq=False)
class Cut:
    """A graph and who owns its nodes."""

    name: str
    graph: Graph
    partition: Partition
    marginal: float  # share of the nodes that read one of another part
    halo: float  # rows that parts read of others, per node

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.graph.num_nodes:,} nodes, {self.graph.num_edges:,} edges, "
            f"{self.partition.num_parts} parts, {100 * self.marginal:.0f} % marginal, {self.halo:.2f} halo rows a node"
        )


def make(name: str | Shape, *, scale: float = 1.0, seed: int = 1, width: int = WIDTH) -> Graph:
    """A synthetic graph, or a smaller one of the same degree; the same bits for the same arguments."""
    shape = SHAPES[name] if isinstance(name, str) else name
    shape = replace(shape, num_nodes=round(shape.num_nodes * scale))
    n, classes = shape.num_nodes, shape.num_classes
    start = tuple(c * n // classes for c in range(classes + 1))
    groups = (max(1, round(shape.num_groups * min(1.0, scale))),) * classes
    recipe = Communities(
        seed, n, start, groups, in_group=shape.inside, in_class=0.0, power=3, class_floor=1 / 30, group_floor=1 / 30
    )  # fmt: skip
    node_of = permutation(seed + 1, n)
    indptr, indices = synth_edges(recipe, node_of, num_pairs=n * shape.degree // 2, overdraw=1.5)
    y = torch.empty(n, dtype=torch.int64)
    y[node_of.long()] = torch.repeat_interleave(torch.arange(classes), torch.tensor(start).diff())
    centres = 0.2 * feature_rows(seed + 2, None, None, num_rows=classes, width=width)
    x = DenseFeatures(feature_rows(seed + 3, y, centres, num_rows=n, width=width))
    is_wrong, other = permutation(seed + 5, n) < n // 5, permutation(seed + 6, n).long() % classes
    y = torch.where(is_wrong, other, y)
    order, ends = permutation(seed + 4, n).long(), (round(shape.train * n), round((shape.train + 0.2) * n))
    train, val, test = (each.sort().values for each in order.tensor_split(ends))
    return Graph(indptr, indices, x, y, Split(train, val, test), num_classes=classes, name=str(name))


def load_real(name: str) -> Graph | str:
    """A graph of the data folder, or why there is none."""
    os.environ.setdefault("POLYHOP_DATA", str(ROOT.parent / "shared" / "data"))
    try:
        loaded: Graph = polyhop.load(name)
    except PolyhopError as error:
        return str(error)
    return loaded


def narrowed(graph: Graph, width: int = WIDTH) -> Graph:
    """The same with inputs [N, width]: rows times a fixed random matrix, each column scaled to a variance of 1."""
    assert graph.x is not None
    rows = graph.x.gather(torch.arange(graph.num_nodes))
    dense = rows if isinstance(rows, Tensor) else rows.dense()
    matrix = torch.randn(dense.shape[1], width, generator=torch.Generator().manual_seed(1))
    x = dense.float() @ matrix
    return replace(graph, x=DenseFeatures((x - x.mean(0)) / x.std(0).clamp(min=1e-6)))


def cut(name: str, graph: Graph, num_parts: int) -> Cut:
    """By metis."""
    made = partition(graph, num_parts, "metis")
    owner = made.owner.long()
    rows = torch.repeat_interleave(torch.arange(graph.num_nodes), graph.in_degree.long())
    sources = graph.indices.long()
    is_far = owner[rows] != owner[sources]
    marginal = torch.unique(rows[is_far]).numel() / graph.num_nodes
    read = torch.unique(sources[is_far] * num_parts + owner[rows[is_far]]).numel() / graph.num_nodes
    return Cut(name, graph, made, marginal, read)
