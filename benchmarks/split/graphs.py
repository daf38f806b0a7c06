"""The graphs of the bench, without files: R-MAT, a scaled ``synth:products``, and communities of known structure.

    rmat      2^17 nodes, 12 edges a node before both directions are kept, skewed; a tenth of the nodes train
    blocks    64 communities, 13 edges a node, 15 % of pairs outside; a tenth of the nodes train
    corner    the same, 8 communities to a field (a further 8 % of pairs inside it); the train nodes lie in one field

Legend: N nodes, F features.
"""

from __future__ import annotations

from dataclasses import replace

import torch

import polyhop
from polyhop.datasets.synth import generate
from polyhop.graph import DenseFeatures, Graph, Split
from polyhop.kernels.synth import Communities, permutation, synth_edges

__all__ = ["blocks", "products", "rmat", "with_features"]


def rmat(levels: int = 17) -> Graph:
    graph = generate(f"rmat:?scale={levels}&edge_factor=12&a=0.57&b=0.19&c=0.19")
    train = permutation(5, graph.num_nodes)[: graph.num_nodes // 10].long()
    return replace(graph, split=Split.of(graph.num_nodes, train), name="rmat")


def products(scale: float = 0.05) -> Graph:
    """``synth:products`` of a share of its size, with its own train set."""
    loaded: Graph = polyhop.load(f"synth:products?scale={scale}")
    return loaded


def blocks(num_nodes: int = 60_000, *, is_corner: bool = False, seed: int = 1) -> Graph:
    fields = 8 if is_corner else 64
    start = tuple(c * num_nodes // fields for c in range(fields + 1))
    recipe = Communities(
        seed, num_nodes, start, (64 // fields,) * fields, in_group=0.85, in_class=0.08 if is_corner else 0.0, power=3,
        class_floor=1 / 30, group_floor=1 / 30,
    )  # fmt: skip
    node_of = permutation(seed + 1, num_nodes)
    indptr, indices = synth_edges(recipe, node_of, num_pairs=num_nodes * 13 // 2)
    y = torch.empty(num_nodes, dtype=torch.int64)
    y[node_of.long()] = torch.repeat_interleave(torch.arange(fields), torch.tensor(start).diff())
    order = permutation(seed + 4, num_nodes).long()
    order = order[y[order] < (1 if is_corner else fields)]
    split, name = Split.of(num_nodes, order[: num_nodes // 10]), "corner" if is_corner else "blocks"
    return Graph(indptr, indices, y=y, split=split, num_classes=fields, name=name)


def with_features(graph: Graph, width: int, num_classes: int = 16) -> Graph:
    """The same with random features [N, width] and labels: what crosses does not depend on them."""
    made = torch.Generator().manual_seed(1)
    x = torch.randn(graph.num_nodes, width, generator=made)
    y = torch.randint(num_classes, (graph.num_nodes,), generator=made)
    return replace(graph, x=DenseFeatures(x), y=y, num_classes=num_classes)
