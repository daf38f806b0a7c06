"""Statistics of a graph that is at hand: its degrees, what a few partitions of it cut, what parts would do in a training.

Legend: N nodes, P parts, M cells of the histogram.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from polyhop.forecast.alike import totals_of, way_of
from polyhop.forecast.sight import labelled, look_at
from polyhop.forecast.statistics import GraphStatistics, Measured, Seen
from polyhop.forecast.training import Inputs, Training
from polyhop.graph import Graph
from polyhop.partition import Partition, least_cover

__all__ = ["degree_cells", "measured", "survey"]

_PER_OCTAVE = 2  # cells of degrees
_MOST_LOOKED = 8  # parts: ranks look as threads, each with what it knows of all others
_MOST_COVERED = 5_000_000  # cut edges: of more, sums are taken to be as usual


def survey(
    graph: Graph,
    inputs: Inputs,
    parts: Mapping[int, Partition],
    training: Training | None = None,
    *,
    partitioner: str = "",
    tell: Callable[[str], None] = lambda text: None,
) -> GraphStatistics:
    """Of a graph in memory, with partitions into some numbers of parts. Features are not looked at."""
    seen = []
    for each in (one for one in parts if one <= _MOST_LOOKED and training is not None):
        assert training is not None
        tell(f"looking at {each} parts")
        totals = totals_of(look_at(graph, parts[each], training))
        seen.append(Seen(way_of(training), each, totals))
    return GraphStatistics(
        graph.num_nodes,
        graph.num_edges,
        inputs.num_features,
        graph.num_classes,
        labelled(graph).numel(),
        degrees=tuple(degree_cells(graph)),
        halo={each: measured(graph, parts[each]) for each in parts if each > 1},
        row_length=inputs.row_length,
        row_dtype=str(inputs.dtype).removeprefix("torch."),
        seen=tuple(seen),
        name=graph.name,
        partitioner=partitioner,
    )


def degree_cells(graph: Graph) -> list[tuple[float, float, float]]:
    """(nodes, in-degree, out-degree) of each cell; degrees of a cell differ by less than half."""
    into = graph.in_degree.double()
    out = torch.bincount(graph.indices.long(), minlength=graph.num_nodes).double()
    bins = [(_PER_OCTAVE * torch.log2(each + 1)).long() for each in (into, out)]
    cell, at = torch.unique(bins[0] * 1000 + bins[1], return_inverse=True)
    count = torch.bincount(at, minlength=cell.numel()).double()
    means = [torch.bincount(at, weights=each, minlength=cell.numel()) / count for each in (into, out)]
    found: list[tuple[float, float, float]] = [
        (nodes, mean_in, mean_out)
        for nodes, mean_in, mean_out in torch.stack([count, *means], dim=1).tolist()
    ]
    return found


def measured(graph: Graph, partition: Partition) -> Measured:
    """Rows, cut edges and sums of one partition."""
    owner, parts = partition.owner.long(), partition.num_parts
    src = graph.indices.long()
    dst = torch.repeat_interleave(torch.arange(graph.num_nodes), graph.in_degree)
    is_cut = owner[src] != owner[dst]
    src, dst = src[is_cut], dst[is_cut]
    rows = torch.unique(src * parts + owner[dst]).numel()
    share = src.numel() / max(1, graph.num_edges)
    if not rows or src.numel() > _MOST_COVERED:
        return Measured(rows / graph.num_nodes, share)
    readers = torch.unique(dst * parts + owner[src]).numel()
    return Measured(rows / graph.num_nodes, share, _covers(src, dst, owner, parts) / min(rows, readers))


def _covers(src: Tensor, dst: Tensor, owner: Tensor, parts: int) -> float:
    """Fewest rows and sums over all pairs of parts."""
    pair, order = torch.sort(owner[src] * parts + owner[dst])
    counts: Sequence[int] = torch.bincount(pair, minlength=parts**2).tolist()
    pieces = zip(src[order].split(counts), dst[order].split(counts), strict=True)  # type: ignore[no-untyped-call]
    return float(sum(least_cover(*piece).num_messages for piece in pieces if piece[0].numel()))
