"""How likely each node is part of a mini-batch: what tells hot rows from cold ones before anything is sampled.

Hop by hop from the seeds, one pass over the edges each. With fan-out f_i, node w of in-degree d draws a given in-edge in
hop i with probability s_i = min(1, f_i / d), and a node known after hop j draws again in every later hop. So by hop h node
w has drawn v with probability q_h(w) below, where r_j(w) = p_j(w) - p_{j-1}(w) says when w became known; v is missed if it
is no seed and no reader of it draws it:

    q_h(w) = sum_{j < h} r_j(w) (1 - prod_{i = j+1 .. h} (1 - s_i(w)))
    p_h(v) = 1 - (1 - p_0(v)) prod_{w: v -> w} (1 - q_h(w))

Exact but for dependence between readers. The largest part of that is known: where every edge has its reverse, a w that was
reached through v draws v in vain. ``is_symmetric`` takes it back, to first order: of the readers that reached w, v was the
one with probability c(v) / t(w), its share of all log-misses of w.

Legend: n destinations, S sources, K sets of seeds, L hops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from polyhop.graph.block import Block
from polyhop.kernels import scatter_add_rows, spmm

__all__ = ["inclusion", "to_sources"]

_CERTAIN = (
    -64.0
)  # below every logarithm of a miss that is not minus infinity, and finite: infinity times 0 is NaN

_MOST_TURNED = 1 << 24  # edges turned round in memory, 8 bytes each: those of mapped files may be too many
_PIECE = 1 << 20  # edges looked at together where they are


def inclusion(
    block: Block,
    start: Tensor,
    num_neighbors: Sequence[int],
    fold_back: Callable[[Tensor], Tensor] = lambda sums: sums,
    *,
    is_symmetric: bool = False,
) -> list[Tensor]:
    """[p_0, ..., p_L], each float64 [n, K]: the probability that each destination is known after each hop.

    ``block`` has all in-edges of its n destinations, which are its first sources (the full graph, or a part).
    ``start`` float64 [n, K] is p_0 of K sets of seeds at once. ``fold_back`` turns sums over the block's own edges [S, K]
    into sums over all edges of its destinations [n, K]: where sources belong to other parts, it sends theirs home.
    ``is_symmetric``: every edge of the graph has its reverse.
    """
    degree = block.drawn.double().clamp(min=1)
    found = [start.double()]
    # For each hop so far: (became known then [n, K], has missed a given in-edge ever since [n, 1]).
    since: list[tuple[Tensor, Tensor]] = []
    reach, total = torch.zeros_like(found[0]), torch.zeros_like(found[0])  # c and t of the hop before
    for fanout in num_neighbors:
        misses = (1 - (degree if fanout < 0 else degree.clamp(max=fanout)) / degree)[:, None]
        fresh = found[0] if len(found) == 1 else found[-1] - found[-2]
        since = [(known, kept * misses) for known, kept in [*since, (fresh, torch.ones_like(misses))]]
        draws = [known * (1 - kept) for known, kept in since]
        # Sums of logarithms are products. A certain draw is minus infinity, which stays.
        missed = torch.log1p(-torch.stack(draws).sum(0).clamp(max=1))
        in_vain = torch.zeros_like(missed)
        if is_symmetric and len(draws) > 1:
            in_vain = torch.stack(draws[1:]).sum(0) / total.clamp(min=1e-12)
        both = torch.cat([missed, in_vain], dim=1)
        sums, vain = fold_back(to_sources(block, both)).chunk(2, dim=1)
        sums = torch.minimum(sums + reach * vain, torch.zeros_like(sums)) if is_symmetric else sums
        reach, total = -missed.clamp(min=_CERTAIN), -sums
        found.append(torch.maximum(found[-1], 1 - (1 - found[0]) * torch.exp(sums)))
    return found


def to_sources(block: Block, rows: Tensor) -> Tensor:
    """[S, C]: for every source of the block, the sum of the rows [D, C] of its edges' destinations."""
    if block.num_edges <= _MOST_TURNED:
        edges = block.transposed()
        return spmm(edges.indptr, edges.indices, rows, num_src=block.num_dst)
    sums, start = rows.new_zeros(block.num_src, rows.shape[1]), 0
    while start < block.num_dst:
        first = int(block.indptr[start])
        stop = int(torch.searchsorted(block.indptr, first + _PIECE, right=True)) - 1
        stop = min(max(stop, start + 1), block.num_dst)
        lengths = block.indptr[start : stop + 1].diff()
        readers = torch.repeat_interleave(torch.arange(start, stop), lengths)
        sources = block.indices[first : int(block.indptr[stop])].long()
        scatter_add_rows(sums, sources, rows.index_select(0, readers))
        start = stop
    return sums
