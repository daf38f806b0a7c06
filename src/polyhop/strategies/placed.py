"""A graph where a device draws mini-batches by itself: lists in its memory, input rows there too or, where they do not fit,
those that mini-batches read most; the others in pinned memory of the host, from which the device takes just those it wants.

Legend: N nodes, E edges, F features, K rows on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyhop.graph.features import DenseFeatures, SparseFeatures
from polyhop.graph.graph import Graph
from polyhop.graph.placed import PlacedFeatures
from polyhop.sample import full_block
from polyhop.sample.inclusion import inclusion

__all__ = ["Placed", "place_graph"]

# Bytes a node on the device, beside lists and rows.
_OF_A_NODE = 20  # where a draw has seen it, its degree, where its row lies
_OF_WEIGHTS = 12  # sums of its in-edges, its loop


@dataclass(frozen=True, eq=False)
class Placed:
    """A graph on a device."""

    graph: Graph
    num_hot: int  # input rows in the device's memory
    num_bytes: int  # of the device, for lists and rows

    @property
    def is_whole(self) -> bool:
        """Whether all input rows are in the device's memory."""
        return self.graph.x is None or self.num_hot == self.graph.num_nodes

    @property
    def note(self) -> str:
        """What a run's first lines say of it."""
        rows = "no input rows"
        if self.graph.x is not None:
            rows = f"{self.num_hot:,} of {self.graph.num_nodes:,} input rows"
        rest = "" if self.is_whole else "; others are read from the host's memory as they are needed"
        return f"on the device: the graph's lists and {rows}, {self.num_bytes / 1e9:.2f} GB{rest}"


def place_graph(
    graph: Graph,
    device: torch.device,
    room: int,
    *,
    cache: int | None,
    train_ids: Tensor,
    batch_size: int,
    num_neighbors: Sequence[int],
) -> Placed | None:
    """The graph on ``device``, or None where it cannot be: lists larger than ``room`` bytes, features in a file, sparse ones
    that do not fit. ``cache``: bytes for input rows, at most what the lists leave of the room; None = all of that.
    """
    lists = sum(_size(t) for t in (graph.indptr, graph.indices, graph.y, graph.edge_weight))
    weighted = 0 if graph.edge_weight is None else _OF_WEIGHTS
    left = room - lists - (_OF_A_NODE + weighted) * graph.num_nodes
    if left < 0:
        return None
    left = left if cache is None else min(left, cache)
    x = graph.x
    if x is None:
        return Placed(graph.to(device), 0, lists)
    if isinstance(x, SparseFeatures):
        size = sum(map(_size, (x.rows.indptr, x.rows.indices, x.rows.values)))
        if size > left:
            return None
        return Placed(
            replace(graph.to(device), x=SparseFeatures(x.rows.to(device))), graph.num_nodes, lists + size
        )
    if not isinstance(x, DenseFeatures) or x.is_mapped:
        return None
    row = x.values.element_size() * max(1, x.num_features)
    num_hot = min(left // row, graph.num_nodes)
    if num_hot == graph.num_nodes:
        scale = None if x.scale is None else x.scale.to(device)
        rows = DenseFeatures(x.values.to(device), scale)
        return Placed(replace(graph.to(device), x=rows), num_hot, lists + num_hot * row)
    start = torch.zeros(graph.num_nodes, 1, dtype=torch.float64)
    start[train_ids] = min(1.0, batch_size / max(1, train_ids.numel()))
    likely = (inclusion(full_block(graph), start, num_neighbors)[-1] if num_hot else start)[:, 0]
    kept = PlacedFeatures.of(x, device, num_hot, likely)
    return Placed(replace(graph.to(device), x=kept), num_hot, lists + num_hot * row + 8 * graph.num_nodes)


def _size(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()
