"""Whether every edge of a partitioned graph has its reverse, told without moving edges.

With A the matrix of edges and a, b random numbers for each node, a^T A b = b^T A a for every symmetric A, and for hardly
any other: modulo 2^64 the two differ but for about one choice in 2^58. Each rank adds up over the in-edges it owns; the sum
over ranks is 8 bytes. Multiple edges count as often as they are there; weights do not count.

Legend: S sources of a part (own nodes, then halo), E edges.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhop.comm import Collective
from polyhop.graph.part import Part
from polyhop.kernels import Key, Purpose, random_u32

__all__ = ["is_symmetric"]

_PIECE = 1 << 20  # edges at a time


def is_symmetric(part: Part, line: Collective) -> bool:
    """The same answer on all ranks, which call it together."""
    a, b = _words(part.src_ids)
    degree = part.indptr.diff()
    total = torch.zeros(1, dtype=torch.int64)
    for start in range(0, part.num_edges, _PIECE):
        stop = min(part.num_edges, start + _PIECE)
        first = int(torch.searchsorted(part.indptr, start, right=True)) - 1
        last = int(torch.searchsorted(part.indptr, stop))
        lengths = degree[first:last].clone()
        lengths[0] -= start - int(part.indptr[first])
        lengths[-1] -= int(part.indptr[last]) - stop
        readers = torch.repeat_interleave(torch.arange(first, last), lengths)
        sources = part.indices[start:stop].long()
        total += (a[sources] * b[readers] - b[sources] * a[readers]).sum()
    return int(line.all_reduce(total, kind="ids")) == 0


def _words(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Two random 64-bit numbers, int64 [S] each, of every node: the same on every rank that knows it."""
    words = random_u32(Key(0).at(Purpose.SHUFFLE), ids)
    return words[:, 0] << 32 | words[:, 1], words[:, 2] << 32 | words[:, 3]
