"""A layer over a part whose other sources are on other ranks: its pieces in the order that hides the exchange.

    map own rows -> rows leave -> aggregate and update central rows -> rows arrive -> aggregate and update marginal rows

Backward the same in reverse: gradients of the halo's rows leave after the marginal rows, central rows are next, then the
gradients that others send are added. autograd runs later pieces first, so this order needs nothing but the forward one.

Legend: n own rows, d destinations (the first of them; n on a full graph), c central rows, H halo rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyhop.graph.halo_block import HaloBlock, Shard, Sums
from polyhop.kernels import scatter_add_rows, spmm
from polyhop.nn.scale import Linear, mean_scale, scale_dtype

__all__ = ["complete_rows", "over_halo"]


def over_halo(layer: Any, x: Tensor, block: HaloBlock, carried: Tensor | None, key: int | None) -> Tensor:
    """Own rows [n, in_channels] -> [d, out_channels]; ``layer`` has pieces (see ``Layer``). All ranks call it together."""
    map_first = layer.map_first(block.sizes, True)
    own, none = x if block.num_dst == x.shape[0] else x[: block.num_dst], x[:0]
    like = layer.transform(none, map_first)
    # Mapped rows cross twice, their gradients too, fixed ones once: these are mapped where they are read if that is even.
    width, is_fixed = math.prod(like.shape[1:]), not (block.returns or x.requires_grad)
    is_narrow = block.sends_narrow and (2 * width < x.shape[1] if is_fixed else width <= x.shape[1])
    crosses_mapped = like is none or is_narrow or block.shards is not None
    reader = _Reader(layer, block, crosses_mapped)
    if crosses_mapped:
        m = layer.transform(x, map_first)
        m, tail, arrive = block.channel.leave(m, block.first, reader, _sums(layer, block, m))
    else:
        # Sums are mapped as rows are, where it makes no difference which comes first.
        x, _, arrive = block.channel.leave(x, block.first, reader, _sums(layer, block, x))
        if is_fixed:  # what crosses does not depend on it, so a rank does what is cheaper for its own block
            map_first = layer.map_first(block.complete, False)
        m = layer.transform(x, map_first)
        tail = m[block.first :]
    pieces = _Pieces(layer, map_first, own, carried, block.central.num_dst, key)
    central = pieces.central(block, m)
    halo = arrive()
    if not crosses_mapped:
        halo = layer.transform(halo, map_first)
    return pieces.joined(central, pieces.marginal(block, tail, halo))


def complete_rows(layer: Any, x: Tensor, block: HaloBlock) -> Tensor:
    """[n + H, ...]: own rows with the halo's behind them, for a layer that cannot be run in pieces."""
    x, _, arrive = block.channel.leave(x, block.first, _Reader(layer, block))
    return torch.cat([x, arrive()])


@dataclass(frozen=True)
class _Reader:
    """What a channel may ask of the layer that it works for."""

    layer: Any
    block: HaloBlock
    is_mapped: bool = True  # what crosses

    @property
    def is_linear(self) -> bool:
        if not (self.is_mapped or self.layer.maps_linearly):
            return False
        return self.layer.linear(self.block.central, torch.float32) is not None

    def weights(self) -> Tensor:
        """float64 [H]; where weights are learnt, a plain mean is assumed."""
        marginal, sums = self.block.marginal, self.block.sums
        linear = self.layer.linear(marginal, torch.float64) or Linear(dst=mean_scale(marginal, torch.float64))
        found: Tensor = linear.squared(marginal)[self.block.num_src - self.block.first :]
        if sums is not None:
            scale = torch.ones_like(found[:1]) if linear.dst is None else linear.dst.double()[sums.to]
            found[sums.at] = (scale**2).expand(sums.at.numel())
        return found

    def sum_weights(self) -> Tensor:
        """float64 [Q]: of the sums that left."""
        sums = self.block.sums
        if sums is None:
            return torch.empty(0, dtype=torch.float64)
        return _squared_sums(sums, self.layer.linear(self.block.central, torch.float64))

    @property
    def num_summed(self) -> int:
        return self.block.marginal.num_dst

    def add_shard(self, sums: Tensor, rank: int, rows: Tensor) -> None:
        shard, linear, weight = self._shard(rank, rows)
        added = spmm(
            shard.indptr,
            shard.indices,
            rows,
            num_src=shard.stop - shard.start,
            edge_weight=weight,
            src_scale=self._of_shard(linear.src, shard),
            dst_scale=None if linear.dst is None else linear.dst[shard.to],
        )
        scatter_add_rows(sums, shard.to, added.to(sums.dtype))

    def shard_grad(self, grad: Tensor, rank: int) -> Tensor:
        shard, linear, weight = self._shard(rank, grad)
        edges = shard.transposed()
        return spmm(
            edges.indptr,
            edges.indices,
            grad,
            num_src=grad.shape[0],
            edge_weight=None if weight is None else weight[edges.edge.long()],
            src_scale=linear.dst,
            dst_scale=self._of_shard(linear.src, shard),
        )

    def _shard(self, rank: int, like: Tensor) -> tuple[Shard, Linear, Tensor | None]:
        """(edges from the rank's rows, the factors of the marginal block, the edges' weights)."""
        assert self.block.shards is not None
        shard = self.block.shards[rank]
        linear: Linear = self.layer.linear(self.block.marginal, scale_dtype(like))
        weight = None if linear.weight is None else linear.weight.detach()[shard.edge]
        return shard, linear, weight

    def _of_shard(self, scale: Tensor | None, shard: Shard) -> Tensor | None:
        before = self.block.num_src - self.block.first
        return None if scale is None else scale[before + shard.start : before + shard.stop]


def _squared_sums(sums: Sums, linear: Linear) -> Tensor:
    """float64 [Q]: of each sum that leaves, the squared weights of its rows, added up."""
    each = torch.ones(sums.indices.numel(), dtype=torch.float64, device=sums.indices.device)
    if linear.weight is not None and sums.weight is not None:
        each = each * sums.weight.double() ** 2
    if linear.src is not None:
        each = each * (linear.src.double() ** 2)[sums.indices.long()]
    at = torch.repeat_interleave(
        torch.arange(sums.indptr.numel() - 1, device=each.device), sums.indptr.diff()
    )
    return each.new_zeros(sums.indptr.numel() - 1).index_add(0, at, each)


def _sums(layer: Any, block: HaloBlock, m: Tensor) -> Tensor | None:
    """[Q, F]: what own rows add to destinations elsewhere, where it crosses as one row."""
    sums = block.sums
    if sums is None:
        return None
    linear = layer.linear(block.central, scale_dtype(m))
    return spmm(
        sums.indptr,
        sums.indices,
        m,
        num_src=sums.num_own,
        edge_weight=None if linear.weight is None else sums.weight,
        src_scale=linear.src,
        transposed=sums.transposed,
    )


class _Pieces:
    """Aggregation and update of the two groups of rows: each by itself, or the update of all at once where it mixes rows."""

    def __init__(
        self, layer: Any, map_first: bool, own: Tensor, carried: Tensor | None, cut: int, key: int | None
    ) -> None:
        self._layer, self._map_first, self._key = layer, map_first, key
        self._mixes = layer.mixes_rows
        self._own, self._carried, self._cut = own, carried, cut
        parts = [cut, own.shape[0] - cut]
        self._owns = own.split(parts) if layer.reads_own and not self._mixes else (None, None)  # type: ignore[no-untyped-call]

    def central(self, block: HaloBlock, m: Tensor) -> Tensor:
        return self._updated(self._sum(block.central, m), 0, slice(0, self._cut))

    def marginal(self, block: HaloBlock, tail: Tensor, halo: Tensor) -> Tensor:
        if block.own is not None:  # what arrived are sums
            return self._updated(self._sum(block.own, tail) + halo, 1, slice(self._cut, None))
        z = self._sum(block.marginal, torch.cat([tail, halo]))
        if block.sums is not None:
            z = self._with_sums(z, block, halo)
        return self._updated(z, 1, slice(self._cut, None))

    def _sum(self, block: Any, m: Tensor) -> Tensor:
        z: Tensor = self._layer.aggregate(block, m, self._layer.edge(block, m), self._key)
        return z

    def _with_sums(self, z: Tensor, block: HaloBlock, halo: Tensor) -> Tensor:
        """z with the sums that arrived added to their destinations, in the order of ranks."""
        sums = block.sums
        assert sums is not None
        added = halo.index_select(0, sums.at)
        scale = self._layer.linear(block.marginal, scale_dtype(z)).dst
        if scale is not None:
            added = added * scale[sums.to].to(added.dtype)[:, None]
        return z.index_add(0, sums.to, added)

    def _updated(self, z: Tensor, which: int, rows: slice) -> Tensor:
        if self._mixes:
            return z
        carried = None if self._carried is None else self._carried[rows]
        out: Tensor = self._layer.update(z, self._owns[which], carried, self._map_first)
        return out

    def joined(self, central: Tensor, marginal: Tensor) -> Tensor:
        rows = torch.cat([central, marginal])
        if not self._mixes:
            return rows
        own = self._own if self._layer.reads_own else None
        out: Tensor = self._layer.update(rows, own, self._carried, self._map_first)
        return out
