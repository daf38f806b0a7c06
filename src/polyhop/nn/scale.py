"""Factors per node that turn a plain neighbour sum into a mean, a GCN sum or an unbiased sampled sum.

All depend on the block alone, so they are made once per block and kept with it. On a sampled block they use full-graph
degrees: the sampled sum is scaled by (in-degree / drawn edges), which makes it unbiased and independent of who else is in
the block.

Legend: D destinations, S sources, E edges.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from polyhop.errors import GraphError
from polyhop.graph.block import Block
from polyhop.graph.pooled import PooledRows

__all__ = [
    "GcnScales",
    "Linear",
    "edge_weight",
    "gcn_scales",
    "mean_scale",
    "scale_dtype",
    "sum_scale",
]

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class GcnScales:
    """out[i] = dst[i] * sum_j w_ij src[j] h[j] + own[i] h[i]."""

    src: Tensor  # [S]: deg^-1/2
    dst: Tensor  # [D]: deg^-1/2, times degree / drawn on a sampled block
    own: Tensor | None  # [D]: weight of the destination's own row; None = no loop is added


@dataclass(frozen=True, eq=False)
class Linear:
    """How an aggregation weighs its neighbours, where it is a sum: dst[i] * sum_j weight[e] * src[j] * m[j] + own[i] * m[i].

    Factors left out are 1, but without ``own`` there is no such term. They belong to a block: weight [E], src [S], dst [D].
    """

    weight: Tensor | None = None
    src: Tensor | None = None
    dst: Tensor | None = None
    own: Tensor | None = None

    def squared(self, block: Block) -> Tensor:
        """float64 [S]: of each source, the sum over its edges of the squared weight with which it is read."""
        each = torch.ones(block.num_edges, dtype=torch.float64, device=block.device)
        if self.weight is not None:
            each = each * self.weight.detach().double() ** 2
        if self.dst is not None:
            each = each * (self.dst.double() ** 2)[_edge_destinations(block)]
        total = each.new_zeros(block.num_src).index_add(0, block.indices.long(), each)
        return total if self.src is None else total * self.src.double() ** 2


def scale_dtype(m: Tensor | PooledRows) -> torch.dtype:
    """The dtype in which rows like m are summed: float32 for 16-bit rows."""
    return torch.float32 if m.dtype in (torch.bfloat16, torch.float16) else m.dtype


def mean_scale(block: Block, dtype: torch.dtype) -> Tensor:
    """[D]: 1 / drawn edges, on a block that is not sampled 1 / in-degree (1 where there are none)."""

    def make() -> Tensor:
        known = None if block.is_sampled else block.in_degree
        counts = block.counted.clamp(min=1) if known is None else _destinations(block, known).clamp(min=1)
        return counts.to(dtype).reciprocal_()

    return _kept(block, f"mean.{dtype}", make)


def sum_scale(block: Block, dtype: torch.dtype) -> Tensor | None:
    """[D]: full in-degree / drawn edges on a sampled block; None where every in-edge is present."""
    if not block.is_sampled:
        return None

    def make() -> Tensor:
        degree = _destinations(block, _required(block.in_degree, "in_degree")).to(dtype)
        return degree / block.counted.clamp(min=1).to(dtype)

    return _kept(block, f"sum.{dtype}", make)


def edge_weight(block: Block, dtype: torch.dtype) -> Tensor | None:
    """[E]: the block's weights in the given dtype, or None."""
    weight = block.edge_weight
    if weight is None or weight.dtype == dtype:
        return weight
    return _kept(block, f"weight.{dtype}", lambda: weight.to(dtype), keep=not weight.requires_grad)


def gcn_scales(
    block: Block, dtype: torch.dtype, *, improved: bool = False, add_self_loops: bool = True
) -> GcnScales:
    """Symmetric normalisation with full-graph degrees; PyG's gcn_norm exactly where the block is the full graph.

    With d = sum of in-weights, a loop of weight 1 counted where the node has none of its own: w_ij / sqrt(d_i d_j). A
    stored loop keeps its weight and is never scaled by sampling. ``improved`` makes added loops weigh 2, on weighted
    edges only: PyG's edge_index path ignores it without weights, and its numbers are the reference.
    """
    name = f"gcn.{improved}.{add_self_loops}.{dtype}"
    fill = 2.0 if improved and block.edge_weight is not None else 1.0
    weighted = block.edge_weight is not None and block.edge_weight.requires_grad
    make = _with_loops if add_self_loops else _without_loops
    return _kept(block, name, lambda: make(block, dtype, fill), keep=not weighted)


def _kept(block: Block, name: str, make: Callable[[], T], keep: bool = True) -> T:
    """The block's value of that name, made on first use. Never one made from other tensors (see dataclasses.replace)."""
    source = (
        block.indptr, block.indices, block.edge_weight, block.in_degree, block.in_weight, block.loop_weight,
        block.num_src, block.dst_start, block.is_sampled, block.num_drawn,
    )  # fmt: skip
    if name in block._cache:
        made_from, value = block._cache[name]
        if all(a is b for a, b in zip(made_from, source, strict=True)):
            found: T = value
            return found
    made = make()
    if keep:
        block._cache[name] = (source, made)
    return made


def _required(value: Tensor | None, name: str) -> Tensor:
    if value is None:
        raise GraphError(
            f"block.{name}: needed on a block that is not the whole graph (normalisation uses full-graph degrees); "
            "blocks made by polyhop.sample carry it"
        )
    return value


def _destinations(block: Block, per_source: Tensor) -> Tensor:
    return per_source[block.dst_start : block.dst_start + block.num_dst]


def _is_whole(block: Block) -> bool:
    """Whether every edge of the graph between these rows is here, so that degrees can be read off the edges."""
    if block.is_sampled or block.num_dst != block.num_src:
        return False
    return block.in_degree is None or int(block.in_degree.sum()) == block.num_edges


def _inverse_root(degree: Tensor) -> Tensor:
    root = degree.pow(-0.5)
    return root.masked_fill(root == float("inf"), 0.0)


def _total(block: Block, dtype: torch.dtype) -> Tensor:
    """[S]: sum of all in-weights in the full graph."""
    if _is_whole(block):
        weight = edge_weight(block, dtype)
        if weight is None:
            return block.drawn.to(dtype)
        return weight.new_zeros(block.num_src).index_add(0, _edge_destinations(block), weight)
    if block.edge_weight is not None:
        return _required(block.in_weight, "in_weight").to(dtype)
    return _required(block.in_degree, "in_degree").to(dtype)


def _edge_destinations(block: Block) -> Tensor:
    """int64 [E]: destination 0 .. D-1 of each edge."""
    return torch.repeat_interleave(
        torch.arange(block.num_dst, device=block.device), block.drawn, output_size=block.num_edges
    )


def _without_loops(block: Block, dtype: torch.dtype, fill: float) -> GcnScales:
    src = _inverse_root(_total(block, dtype))
    dst = _destinations(block, src)
    ratio = sum_scale(block, dtype)
    return GcnScales(src, dst if ratio is None else dst * ratio, None)


def _with_loops(block: Block, dtype: torch.dtype, fill: float) -> GcnScales:
    total = _total(block, dtype)
    if block.loop_weight is None:
        src = _inverse_root(total + fill)
        dst = _destinations(block, src)
        ratio = sum_scale(block, dtype)
        return GcnScales(src, dst if ratio is None else dst * ratio, fill * dst * dst)
    return _with_stored_loops(block, dtype, fill, total)


def _with_stored_loops(block: Block, dtype: torch.dtype, fill: float, total: Tensor) -> GcnScales:
    """Loops of the data are ordinary edges of the sum; ``own`` adds what is missing and takes back what is too much."""
    own_edge, at = _own_edges(block)
    weight = edge_weight(block, dtype)
    weight = (
        torch.ones(own_edge.numel(), dtype=dtype, device=block.device) if weight is None else weight[own_edge]
    )
    drawn_loops = torch.bincount(at, minlength=block.num_dst)
    drawn_sum = weight.new_zeros(block.num_dst).index_add(0, at, weight)
    if _is_whole(block):
        loop = weight.new_zeros(block.num_dst).index_put(
            (at,), weight
        )  # of repeated loops the last counts, as in PyG
        plain, has_loop = total - drawn_sum, drawn_loops > 0
    else:
        loop = _required(block.loop_weight, "loop_weight").to(dtype)
        plain, has_loop = total - loop, loop != 0
    wanted = torch.where(has_loop, loop, fill)
    src = _inverse_root(plain + wanted)
    dst, wanted = _destinations(block, src), _destinations(block, wanted)
    if not block.is_sampled:
        return GcnScales(src, dst, dst * dst * (wanted - drawn_sum))
    degree = _destinations(block, _required(block.in_degree, "in_degree") - has_loop.int())
    drawn = block.counted - drawn_loops
    ratio = torch.where(drawn > 0, degree.to(dtype) / drawn.clamp(min=1).to(dtype), 1.0)
    return GcnScales(src, dst * ratio, dst * dst * (wanted - ratio * drawn_sum))


def _own_edges(block: Block) -> tuple[Tensor, Tensor]:
    """(positions of the edges from a destination to itself, those destinations 0 .. D-1)."""
    destinations = _edge_destinations(block)
    own = (block.indices == destinations + block.dst_start).nonzero()[:, 0]
    return own, destinations[own]
