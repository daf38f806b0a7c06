"""Cover: the fewest messages across a cut. An edge is served by its source's row, or by a partial sum for its destination.

A source with many destinations on the other side is sent once, as it is; a destination with many sources is sent once, as
the sum of what they give it. Which of the two for each edge: a minimum vertex cover of the bipartite graph of the cut, which
has as many nodes as a maximum matching has edges (König). Exact, and fixed before training starts.

Legend: E edges from one part to another, S and D different sources and destinations of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyhop.errors import PartitionError

__all__ = ["Cover", "least_cover"]

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Cover:
    """What crosses, and how each edge is served."""

    sources: Tensor  # int64, ascending: rows to send as they are
    destinations: (
        Tensor  # int64, ascending: rows whose partial sums to send, over edges that no source serves
    )
    is_by_source: Tensor  # bool [E]; an edge with both ends in the cover is served by its source

    @property
    def num_messages(self) -> int:
        return self.sources.numel() + self.destinations.numel()


def least_cover(src: Tensor, dst: Tensor) -> Cover:
    """Of edges src -> dst (int64 [E] each: rows of one part, rows of another; an edge may be there twice).

    Of all smallest covers, the one with the most sources: they need no sums.
    """
    if src.dim() != 1 or src.shape != dst.shape or src.dtype != torch.int64 or dst.dtype != torch.int64:
        raise PartitionError(
            f"least_cover: src and dst must be int64 [E], got {src.dtype} {list(src.shape)} and {dst.dtype} "
            f"{list(dst.shape)}"
        )
    source_ids, source = np.unique(src.numpy(), return_inverse=True)
    destination_ids, destination = np.unique(dst.numpy(), return_inverse=True)
    edges = np.unique(source * max(destination_ids.size, 1) + destination)  # each once, by source
    rows, columns = np.divmod(edges, max(destination_ids.size, 1))
    indptr = np.searchsorted(rows, np.arange(source_ids.size + 1))
    mate = _matching(indptr, columns, destination_ids.size)
    is_reached, is_summed = _reached(indptr, columns, mate, destination_ids.size)
    return Cover(
        torch.from_numpy(source_ids[~is_reached]),
        torch.from_numpy(destination_ids[is_summed]),
        torch.from_numpy(~is_reached[source]),
    )


def _matching(indptr: Ints, columns: Ints, num_columns: int) -> Ints:
    """[S]: the destination that each source is matched with in a largest matching, -1 where it has none."""
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import maximum_bipartite_matching

    ones = np.ones(columns.size, dtype=np.int8)
    graph = csr_matrix((ones, columns, indptr), shape=(indptr.size - 1, num_columns))
    return np.asarray(maximum_bipartite_matching(graph, perm_type="column"), dtype=np.int64)


def _reached(
    indptr: Ints, columns: Ints, mate: Ints, num_columns: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Sources (bool [S]) and destinations (bool [D]) on paths from sources without a mate: along any edge to a
    destination, from there to its mate. The sources that are not reached and the destinations that are cover all edges.
    """
    is_source, is_destination = mate < 0, np.zeros(num_columns, dtype=bool)
    mate_of = np.full(num_columns, -1, dtype=np.int64)
    mate_of[mate[mate >= 0]] = np.flatnonzero(mate >= 0)
    level = np.flatnonzero(is_source)
    while level.size:
        counts = indptr[level + 1] - indptr[level]
        places = np.arange(counts.sum()) + np.repeat(indptr[level] - (np.cumsum(counts) - counts), counts)
        found = np.unique(columns[places])
        found = found[~is_destination[found]]
        is_destination[found] = True
        level = mate_of[
            found
        ]  # none is free, or the matching could grow; none was met before, or its mate was
        is_source[level] = True
    return is_source, is_destination
