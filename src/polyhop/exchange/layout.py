"""How a part's rows lie for training on the full graph, and which rows each layer has to bring from other ranks.

Rows: those whose sources are all own first (of these, the ones no marginal row reads before the others), marginal ones last.
Layers: the loss reads the train nodes, so the last layer needs no other destinations, the layer below only what those read,
and so on down. Destinations that nothing reads keep their rows but lose their edges, halo rows that nothing reads are not
sent: neither rows forward nor gradients, which would be zero, back. Exact, unless a layer looks at all rows (BatchNorm).
Sums: where a layer sums its sources, a destination's sum over another part's rows may cross instead of the rows, whichever
makes fewest messages (``partition.cover``).

Legend: n own rows, H halo rows, S = n + H, P ranks, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from polyhop.comm import Collective
from polyhop.exchange.crossing import Lists
from polyhop.graph import Block, Part, Sums
from polyhop.partition import least_cover

__all__ = ["LayerEdges", "Layout", "lay_out", "layer_edges"]


@dataclass(frozen=True, eq=False)
class Layout:
    """A part's rows in the order of training."""

    order: Tensor  # int64 [n]: the part's row at each place
    place: Tensor  # int64 [n]: the place of each of the part's rows
    num_central: int
    block: Block  # all in-edges, from the n own rows in this order and the halo as the part has it

    @property
    def num_own(self) -> int:
        return self.order.numel()

    @property
    def marginal_share(self) -> float:
        return 1 - self.num_central / self.num_own if self.num_own else 0.0


@dataclass(frozen=True, eq=False)
class LayerEdges:
    """What one layer computes and what it has to bring."""

    block: Block  # as in Layout, the halo being what ``lists`` bring; edges that are in a sum from elsewhere are not in it
    lists: Lists
    halo: Tensor  # int64: which of the part's halo rows are read, as they are or in a sum
    sums: Sums | None = None


def lay_out(part: Part) -> Layout:
    """Central rows first; within a group in the part's order."""
    block, n = part.block(), part.num_nodes
    at = torch.repeat_interleave(torch.arange(n), block.drawn)
    is_marginal = torch.zeros(n, dtype=torch.bool)
    is_marginal[at[block.indices >= n]] = True
    group = torch.zeros(n, dtype=torch.int64)
    read = block.indices[is_marginal[at]].long()
    group[read[read < n]] = 1
    group[is_marginal] = 2
    order = torch.sort(group, stable=True).indices
    place = torch.empty_like(order)
    place[order] = torch.arange(n)
    return Layout(order, place, n - int(is_marginal.sum()), _reordered(block, order, place))


def _reordered(block: Block, order: Tensor, place: Tensor) -> Block:
    n = order.numel()
    counts = block.drawn[order]
    indptr = torch.zeros(n + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=indptr[1:])
    shift = torch.repeat_interleave(block.indptr[:-1][order] - indptr[:-1], counts)
    edges = torch.arange(indptr[-1].item()) + shift
    moved = torch.cat([place, torch.arange(n, block.num_src)]).to(block.indices.dtype)
    sources = torch.cat([order, torch.arange(n, block.num_src)])
    weight = None if block.edge_weight is None else block.edge_weight[edges]
    return replace(
        block,
        indptr=indptr,
        indices=moved[block.indices[edges].long()],
        edge_weight=weight,
        **_of_sources(block, sources),
        _cache={},
    )


def layer_edges(
    layout: Layout, part: Part, line: Collective, read: Tensor | None, sums: Sequence[bool]
) -> list[LayerEdges]:
    """For each layer, input layer first. ``read`` bool [n]: rows of the last layer that the loss reads; None: all of all.

    ``sums``: of each layer, whether sums may cross. All ranks call it together: lists are exchanged.
    """
    found: list[LayerEdges] = []
    for with_sums in reversed(sums):
        if read is None and found and (found[-1].sums is not None) == with_sums:
            found.append(found[-1])
            continue
        block, halo = layout.block, torch.arange(part.halo.numel())
        if read is not None:
            block, halo = _trimmed(layout.block, read)
        made = _with_sums if with_sums else _with_rows
        found.append(made(layout, part, block, halo, line))
        if read is not None:
            read = _read_below(layout, block, found[-1], read)
    return found[::-1]


def _read_below(layout: Layout, block: Block, layer: LayerEdges, read: Tensor) -> Tensor:
    """bool [n]: rows of the layer below that are read: by destinations here, by other parts, or because they are them."""
    below = read.clone()
    below[block.indices[block.indices < layout.num_own].long()] = True
    for ids in layer.lists.lent:
        below[ids] = True
    if layer.sums is not None:
        below[layer.sums.indices.long()] = True
    return below


def _trimmed(block: Block, read: Tensor) -> tuple[Block, Tensor]:
    """The edges of the destinations that are read, and the halo rows (0 .. H - 1) that these have as sources."""
    n = block.num_dst
    if bool(read.all()):
        return block, torch.arange(block.num_src - n)
    is_kept = torch.repeat_interleave(read, block.drawn)
    halo = torch.unique(block.indices[is_kept & (block.indices >= n)].long()) - n
    sources = torch.cat([torch.arange(n), halo + n])
    place = torch.zeros(block.num_src, dtype=block.indices.dtype)
    place[sources] = torch.arange(sources.numel(), dtype=block.indices.dtype)
    counts = torch.where(read, block.drawn, 0)
    indptr = torch.zeros(n + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=indptr[1:])
    kept = replace(
        block,
        indptr=indptr,
        indices=place[block.indices[is_kept].long()],
        num_src=sources.numel(),
        edge_weight=None if block.edge_weight is None else block.edge_weight[is_kept],
        **_of_sources(block, sources),
        _cache={},
    )
    return kept, halo


def _with_rows(layout: Layout, part: Part, block: Block, halo: Tensor, line: Collective) -> LayerEdges:
    """Every halo row crosses as it is."""
    ids = part.halo[halo]
    cuts = torch.searchsorted(ids, part.bounds).tolist()
    asked = [ids[start:stop] - part.bounds[q] for q, (start, stop) in enumerate(pairwise(cuts))]
    lists = Lists(layout.num_own, _told(asked, layout, line), [piece.numel() for piece in asked])
    return LayerEdges(block, lists, halo)


def _with_sums(layout: Layout, part: Part, block: Block, halo: Tensor, line: Collective) -> LayerEdges:
    """Fewest messages: rows that many read as they are, many rows that one reads as their sum."""
    n = layout.num_own
    at = torch.repeat_interleave(torch.arange(n), block.drawn)
    edges = (block.indices >= n).nonzero()[:, 0]
    src, dst = block.indices[edges].long() - n, at[edges]
    owner = part.owners(part.halo[halo])[src]
    covers = [_Covered.of(edges[owner == q], src[owner == q], dst[owner == q]) for q in range(line.num_ranks)]
    local = [part.halo[halo] - part.bounds[q] for q in range(line.num_ranks)]
    lent = _told([local[q][cover.rows] for q, cover in enumerate(covers)], layout, line)
    counts = line.all_to_all([cover.counts.to(line.device) for cover in covers], kind="ids")
    sources = _told([local[q][cover.sources] for q, cover in enumerate(covers)], layout, line)
    weights = None
    if block.edge_weight is not None:
        given = block.edge_weight
        sent = line.all_to_all([given[cover.edges].to(line.device) for cover in covers], kind="ids")
        weights = torch.cat([piece.cpu() for piece in sent])
    indptr = torch.zeros(1 + sum(piece.numel() for piece in counts), dtype=torch.int64)
    torch.cumsum(torch.cat(counts).cpu(), 0, out=indptr[1:])
    kept, where = _without_summed(block, covers)
    wanted = [cover.rows.numel() + cover.to.numel() for cover in covers]
    lists = Lists(n, lent, wanted, [piece.numel() for piece in counts])
    to = torch.cat([cover.to for cover in covers]) - layout.num_central
    return LayerEdges(
        kept, lists, halo, Sums(indptr, torch.cat(sources).to(torch.int32), weights, n, where, to)
    )


@dataclass(frozen=True, eq=False)
class _Covered:
    """What comes from one rank: halo rows (0 .. H - 1) as they are, then sums for destinations ``to``."""

    rows: Tensor  # int64
    to: Tensor  # int64 [A]
    counts: Tensor  # int64 [A]: edges of each sum
    sources: Tensor  # int64: halo row of each edge of the sums
    edges: Tensor  # int64: those edges in the block

    @classmethod
    def of(cls, edges: Tensor, src: Tensor, dst: Tensor) -> _Covered:
        cover = least_cover(src, dst)
        is_summed = ~cover.is_by_source
        order = torch.sort(dst[is_summed], stable=True).indices
        counts = torch.bincount(
            torch.searchsorted(cover.destinations, dst[is_summed]), minlength=len(cover.destinations)
        )
        return cls(cover.sources, cover.destinations, counts, src[is_summed][order], edges[is_summed][order])


def _without_summed(block: Block, covers: Sequence[_Covered]) -> tuple[Block, Tensor]:
    """The block whose halo is what comes, without the edges of sums; the halo rows that are sums."""
    n = block.num_dst
    is_kept = torch.ones(block.num_edges, dtype=torch.bool)
    is_kept[torch.cat([cover.edges for cover in covers])] = False
    # A sum stands where its row will be; it is nobody's source, so whose degrees it has does not matter: its destination's.
    sources = torch.cat([torch.arange(n), *(torch.cat([n + cover.rows, cover.to]) for cover in covers)])
    is_row = torch.cat([torch.ones(n, dtype=torch.bool), *(_first(cover) for cover in covers)])
    place = torch.zeros(block.num_src, dtype=block.indices.dtype)
    place[sources[is_row]] = is_row.nonzero()[:, 0].to(block.indices.dtype)
    indptr = torch.zeros(n + 1, dtype=torch.int64)
    at = torch.repeat_interleave(torch.arange(n), block.drawn)
    torch.cumsum(torch.bincount(at[is_kept], minlength=n), 0, out=indptr[1:])
    kept = replace(
        block,
        indptr=indptr,
        indices=place[block.indices[is_kept].long()],
        num_src=sources.numel(),
        edge_weight=None if block.edge_weight is None else block.edge_weight[is_kept],
        **_of_sources(block, sources),
        _cache={},
    )
    return kept, (~is_row).nonzero()[:, 0] - n


def _first(cover: _Covered) -> Tensor:
    """bool: of what comes from a rank, whether it is a row."""
    return torch.arange(cover.rows.numel() + cover.to.numel()) < cover.rows.numel()


def _of_sources(block: Block, sources: Tensor) -> dict[str, Any]:
    """What a block says of each source, for other sources."""
    names = ("src_ids", "in_degree", "in_weight", "out_degree", "loop_weight")
    given = {name: getattr(block, name) for name in names}
    return {name: value[sources] for name, value in given.items() if value is not None}


def _told(asked: Sequence[Tensor], layout: Layout, line: Collective) -> list[Tensor]:
    """Tell every owner which of its rows (by its part's numbers) are meant; the places of those that others mean here."""
    sent = line.all_to_all([rows.to(torch.int32).to(line.device) for rows in asked], kind="ids")
    return [layout.place[rows.cpu().long()] for rows in sent]
