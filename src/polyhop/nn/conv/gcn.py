"""GCN: the normalised sum over neighbours and self (Kipf & Welling, 2017).

out_i = W ( sum_j w_ij x_j / sqrt(d_i d_j)  +  w_ii x_i / d_i ) + b,      d = full-graph in-weights, own loop included
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from polyhop.errors import ConfigError
from polyhop.graph.aggregated import FixedAggregate
from polyhop.graph.block import Block
from polyhop.graph.features import SparseRows
from polyhop.graph.sliced import SlicedMap
from polyhop.kernels import aggregate
from polyhop.nn.layer import SLICES, Layer, refuse_changed, refuse_options
from polyhop.nn.rows import Messages, Rows, linear
from polyhop.nn.scale import Linear, edge_weight, gcn_scales, scale_dtype, sum_scale

__all__ = ["GCNConv"]


class GCNConv(Layer):
    """PyG's GCNConv: same arguments, parameters and numbers on a full graph.

    On a sampled block degrees are the full graph's, and the sampled sum is scaled by (in-degree / drawn), own loops apart.
    ``cached`` is accepted and does nothing: normalisation is always kept with the Block. ``add_self_loops`` None means
    ``normalize``. Stored loops keep their weight. ``improved`` (added loops weigh 2) acts on weighted edges only, as in PyG.
    """

    reads_pooled = True
    gives_own = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        improved: bool = False,
        cached: bool = False,
        add_self_loops: bool | None = None,
        normalize: bool = True,
        bias: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        refuse_options("GCNConv", kwargs, {"aggr": ("add", "sum")})
        if add_self_loops and not normalize:
            raise ConfigError("GCNConv: add_self_loops=True needs normalize=True")
        self.set_widths(in_channels, out_channels)
        self.improved = improved
        self.cached = cached
        self.add_self_loops = normalize if add_self_loops is None else add_self_loops
        self.normalize = normalize
        self.lin = nn.Linear(self.in_channels, out_channels, bias=False)
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot weights, zero bias."""
        nn.init.xavier_uniform_(self.lin.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def transform(self, h: Rows, map_first: bool) -> Messages:
        if map_first:
            return linear(h, self.lin.weight)
        assert not isinstance(h, SparseRows), "sparse rows are always mapped first"
        return h

    def fixed_aggregate(self) -> FixedAggregate:
        refuse_changed(self, GCNConv, ("transform", "edge", "aggregate", "forward"))
        given = {"plain": not self.normalize, "loopless": not self.add_self_loops, "improved": self.improved}
        name = "-".join(["gcn", *(word for word, is_so in given.items() if is_so)])
        return FixedAggregate(name, False, lambda block, x: self.aggregate(block, x, None))

    def sliced_map(self) -> SlicedMap:
        refuse_changed(self, GCNConv, ("transform", "edge", "aggregate", "update", "forward"), SLICES)

        def part(block: Block, x: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
            return self.mapped_sum(block, x, weights[0])

        return SlicedMap(self.out_channels, True, (self.lin.weight,), part)

    def linear(self, block: Block, dtype: torch.dtype) -> Linear | None:
        weight = edge_weight(block, dtype)
        if not self.normalize:
            return Linear(weight, dst=sum_scale(block, dtype))
        s = gcn_scales(block, dtype, improved=self.improved, add_self_loops=self.add_self_loops)
        return Linear(weight, s.src, s.dst, s.own)

    def aggregate(self, block: Block, m: Messages, e: Any, key: int | None = None) -> Tensor:
        dtype = scale_dtype(m)
        weight = edge_weight(block, dtype)
        if not self.normalize:
            return aggregate(block, m, edge_weight=weight, dst_scale=sum_scale(block, dtype))
        s = gcn_scales(block, dtype, improved=self.improved, add_self_loops=self.add_self_loops)
        return aggregate(block, m, edge_weight=weight, src_scale=s.src, dst_scale=s.dst, self_scale=s.own)

    def update(self, z: Tensor, h_dst: Rows | None, carried: Tensor | None, map_first: bool) -> Tensor:
        if not map_first:
            return linear(z, self.lin.weight, self.bias)
        return z if self.bias is None else z + self.bias
