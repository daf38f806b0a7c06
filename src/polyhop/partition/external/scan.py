"""One pass over all edges of a file: are the ids right, how many edges has each node, which are loops.

Legend: N nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polyhop.errors import PartitionError
from polyhop.kernels.bins import count_edges
from polyhop.partition.external.source import Chunk, EdgeSource

__all__ = ["Counts", "scan_edges"]


@dataclass(eq=False)
class Counts:
    """What the graph's nodes have, by the user's ids; as ``Graph`` has it."""

    in_degree: Tensor  # int32 [N]
    out_degree: Tensor  # int32 [N]
    loop_weight: Tensor | None  # float32 [N]: None = no loops
    in_weight: Tensor | None  # float64 [N]: None = no weights


def scan_edges(
    source: EdgeSource, chunk_edges: int, num_nodes: int | None, tell: Callable[[int], None]
) -> Counts:
    """The counts; PartitionError names the first edge with a wrong id or weight. num_nodes None = the largest id + 1."""
    size = num_nodes or 0
    counts = Counts(
        torch.zeros(size, dtype=torch.int32),
        torch.zeros(size, dtype=torch.int32),
        None,
        torch.zeros(size, dtype=torch.float64) if source.has_weight else None,
    )
    done = 0
    for chunk in source.chunks(chunk_edges):
        top = _check_ids(source, chunk, done, num_nodes)
        if top >= counts.in_degree.numel():
            _grow(counts, top + 1)
        count_edges(chunk.src, chunk.dst, counts.in_degree, counts.out_degree)
        _add_loops(counts, chunk)
        if chunk.weight is not None and counts.in_weight is not None:
            _check_weights(source, chunk.weight, done)
            # In the edges' order, one by one: the sum of a list is the same to the last bit however it is cut.
            np.add.at(counts.in_weight.numpy(), chunk.dst.numpy(), chunk.weight.double().numpy())
        done += chunk.src.numel()
        tell(done)
    return counts


def _check_ids(source: EdgeSource, chunk: Chunk, first: int, num_nodes: int | None) -> int:
    """The largest id."""
    spans = [torch.aminmax(ids) for ids in (chunk.src, chunk.dst)]
    low, high = min(int(s.min) for s in spans), max(int(s.max) for s in spans)
    if low >= 0 and (num_nodes is None or high < num_nodes):
        return high
    limit = 2**62 if num_nodes is None else num_nodes
    bad = (chunk.src < 0) | (chunk.dst < 0) | (chunk.src >= limit) | (chunk.dst >= limit)
    at = int(bad.nonzero()[0])
    known = (
        "ids start at 0"
        if num_nodes is None
        else f"the graph has nodes 0 .. {num_nodes - 1}; renumber the nodes, or give the right --num-nodes"
    )
    raise PartitionError(
        f"{source.path}: edge {first + at} is {int(chunk.src[at])} -> {int(chunk.dst[at])}, but {known}"
    )


def _check_weights(source: EdgeSource, weight: Tensor, first: int) -> None:
    bad = ~torch.isfinite(weight) | (weight < 0)
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        raise PartitionError(
            f"{source.path}: edge {first + at} has weight {float(weight[at])}; expected finite numbers of at least 0"
        )


def _add_loops(counts: Counts, chunk: Chunk) -> None:
    at = (chunk.src == chunk.dst).nonzero()[:, 0]
    if at.numel() == 0:
        return
    if counts.loop_weight is None:
        counts.loop_weight = torch.zeros(counts.in_degree.numel(), dtype=torch.float32)
    # NumPy keeps the last of several values for one place, which torch does not promise.
    values = 1.0 if chunk.weight is None else chunk.weight[at].numpy()
    counts.loop_weight.numpy()[chunk.dst[at].numpy()] = values


def _grow(counts: Counts, size: int) -> None:
    for name, values in vars(counts).items():
        if values is not None:
            grown = torch.zeros(size, dtype=values.dtype)
            grown[: values.numel()] = values
            setattr(counts, name, grown)
