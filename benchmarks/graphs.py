"""Graphs the benches run on, repeatable from a seed: published shapes by name, and skewed graphs of any size."""

from __future__ import annotations

import torch
from torch import Tensor

from polyhop.datasets.synth import generate
from polyhop.graph import DenseFeatures, Graph, Split
from polyhop.kernels.synth import Communities, feature_rows, permutation, synth_edges

__all__ = ["describe", "skewed", "synth"]


def synth(name: str) -> Graph:
    """A generator's graph, e.g. ``synth:products?scale=0.2``."""
    return generate(name)


def skewed(
    num_nodes: int, num_edges: int, *, num_features: int = 0, num_classes: int = 47, num_train: int = 0
) -> Graph:
    """Undirected, degree exponent about 2.5, largest degree about 300 times the mean, most edges inside a class.

    ``num_edges`` counts both directions. Node ids carry no locality.
    """
    start = tuple(c * num_nodes // num_classes for c in range(num_classes + 1))
    recipe = Communities(
        11, num_nodes, start, (1,) * num_classes, in_group=0.0, in_class=0.6, power=3, class_floor=1 / 30
    )
    node_of = permutation(12, num_nodes)
    indptr, indices = synth_edges(recipe, node_of, num_pairs=num_edges // 2)
    y = torch.empty(num_nodes, dtype=torch.int64)
    y[node_of.long()] = torch.repeat_interleave(torch.arange(num_classes), torch.tensor(start).diff())
    x = None
    if num_features:
        centres = 0.2 * feature_rows(13, None, None, num_rows=num_classes, width=num_features)
        x = DenseFeatures(feature_rows(14, y, centres, num_rows=num_nodes, width=num_features))
    order = permutation(15, num_nodes).long()
    split = Split(order[:num_train].sort().values, order[num_train:num_train], order[num_train:num_train])
    return Graph(indptr, indices, x, y, split, num_classes=num_classes, name="skewed")


def describe(graph: Graph) -> str:
    """Counts and skew of a graph, for a bench's first line."""
    degree: Tensor = graph.in_degree
    return (
        f"{graph.name}: {graph.num_nodes:,} nodes, {graph.num_edges:,} edges, {graph.num_features} features, "
        f"in-degree median {int(degree.median())}, largest {int(degree.max())}"
    )
