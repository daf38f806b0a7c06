"""Graphs that are computed when they are read: their statistics follow from what they are computed from; nothing is read.

    in-degree    of the table, whatever else a node is
    out-degree   of the popular nodes by their rank r of H: a share (r + 1) / H under the root, less the one before; of all
                 others alike
    parts        ranges of ids, which neighbours do not know of: as if nodes lay at random

Legend: N nodes, E edges, H popular nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from polyhop.forecast.statistics import GraphStatistics
from polyhop.kernels.procedural import Virtual

__all__ = ["statistics_of_virtual"]

_PER_OCTAVE = 2  # cells of degrees


def statistics_of_virtual(graph: Virtual, num_train: int, name: str = "procedural") -> GraphStatistics:
    """Of the whole graph."""
    edges = graph.num_edges
    base = (1 - graph.hot_share) * edges / graph.num_nodes
    into, cells = list(_in_degrees(graph)), list[tuple[float, float, float]]()
    num_hot = min(graph.num_hot, graph.num_nodes)
    for first, last in _octaves(num_hot):
        share = math.sqrt(last / num_hot) - math.sqrt(first / num_hot)
        out = base + graph.hot_share * edges * share / (last - first)
        cells += [((last - first) * part, degree, out) for part, degree in into]
    rest = graph.num_nodes - num_hot
    cells += [(rest * part, degree, base) for part, degree in into if rest]
    return GraphStatistics(
        graph.num_nodes,
        edges,
        graph.num_features,
        graph.num_classes,
        num_train,
        degrees=cells,
        name=name,
        is_computed=True,
    )


def _in_degrees(graph: Virtual) -> Iterator[tuple[float, float]]:
    """(share of the nodes, their mean in-degree), cell by cell."""
    table = graph.degree_table.double()
    cell = (_PER_OCTAVE * torch.log2(table + 1)).long()
    for each in torch.unique(cell):
        found = table[cell == each]
        yield found.numel() / table.numel(), float(found.mean())


def _octaves(count: int) -> Iterator[tuple[int, int]]:
    """0 .. 1, 1 .. 2, 2 .. 4, ... up to count."""
    first, last = 0, 1
    while first < count:
        yield first, min(last, count)
        first, last = last, 2 * last
