"""GraphSAGE: the neighbours' mean (or sum, or maximum) and the node itself, with weights for each (Hamilton et al., 2017).

    out_i = W_l aggr_j x_j + b + W_r x_i

Two matrix products instead of one over a concatenation: the same numbers without the copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyhop.errors import UnsupportedError
from polyhop.graph.aggregated import FixedAggregate
from polyhop.graph.block import Block
from polyhop.graph.features import SparseRows
from polyhop.graph.halo_block import Sizes
from polyhop.graph.sliced import SlicedMap
from polyhop.kernels import aggregate
from polyhop.kernels.mean_map import counts_edges, mean_map
from polyhop.nn.layer import SLICES, Layer, refuse_changed, refuse_options
from polyhop.nn.rows import Messages, Rows, linear, linear_add, own_rows
from polyhop.nn.scale import Linear, mean_scale, scale_dtype, sum_scale

__all__ = ["SAGEConv"]

_AGGREGATIONS = ("mean", "sum", "add", "max")


class SAGEConv(Layer):
    """PyG's SAGEConv: same arguments, parameters and numbers on a full graph.

    On a sampled block the mean divides by the drawn edges; the sum is scaled by (in-degree / drawn), hence unbiased; the
    maximum is over the drawn edges. ``max`` runs on plain torch and makes one row per edge.
    """

    reads_pooled = True
    gives_own = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        aggr: str = "mean",
        normalize: bool = False,
        root_weight: bool = True,
        project: bool = False,
        bias: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        refuse_options("SAGEConv", kwargs)
        if aggr not in _AGGREGATIONS:
            raise UnsupportedError(
                f"SAGEConv: aggr={aggr!r} is not supported; choose one of {', '.join(_AGGREGATIONS)}"
            )
        self.set_widths(in_channels, out_channels)
        self.aggr = aggr
        self.normalize = normalize
        self.root_weight = root_weight
        self.project = project
        if project:
            self.lin = nn.Linear(in_channels, in_channels)
        self.lin_l = nn.Linear(in_channels, out_channels, bias=bias)
        if root_weight:
            self.lin_r = nn.Linear(in_channels, out_channels, bias=False)
        self.reads_own = root_weight
        self.maps_linearly = not project

    def reset_parameters(self) -> None:
        """torch.nn.Linear's own initialisation, as in PyG."""
        for child in self.children():
            assert isinstance(child, nn.Linear)
            child.reset_parameters()

    def map_first(self, block: Block | Sizes, input_grad: bool) -> bool:
        # A projection is a map of every source already; a maximum does not commute with a product.
        return self.project or (self._commutes and super().map_first(block, input_grad))

    @property
    def _commutes(self) -> bool:
        return self.aggr != "max" and not self.project

    def transform(self, h: Rows, map_first: bool) -> Messages:
        if self.project:
            return linear(h, self.lin.weight, self.lin.bias).relu()
        if map_first and self._commutes:
            return linear(h, self.lin_l.weight)
        if isinstance(h, SparseRows):
            raise UnsupportedError(
                "SAGEConv: aggr='max' needs dense rows; use project=True or a dense feature store"
            )
        return h

    def fixed_aggregate(self) -> FixedAggregate:
        refuse_changed(self, SAGEConv, ("transform", "edge", "aggregate", "forward"))
        if not self._commutes:
            reason = (
                "project=True maps inputs by learnt weights before they are summed"
                if self.project
                else "aggr='max' takes a maximum over the drawn neighbours, which is no sum; use 'mean' or 'sum'"
            )
            raise UnsupportedError(f"SAGEConv: aggregated inputs are not possible: {reason}")
        name = ("mean" if self.aggr == "mean" else "sum") + ("" if self.root_weight else "-alone")
        return FixedAggregate(name, self.root_weight, lambda block, x: self.aggregate(block, x, None))

    def sliced_map(self) -> SlicedMap:
        refuse_changed(self, SAGEConv, ("transform", "edge", "aggregate", "update", "forward"), SLICES)
        if not self._commutes:
            reason = (
                "project=True puts a relu between two products"
                if self.project
                else "aggr='max' takes a maximum, which is no sum over columns; use 'mean' or 'sum'"
            )
            raise UnsupportedError(f"SAGEConv: {SLICES} not possible: {reason}")

        def part(block: Block, x: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
            sums = self.mapped_sum(block, x, weights[0])
            return linear(own_rows(x, block)[1], weights[1]).add_(sums) if self.root_weight else sums

        weights = (self.lin_l.weight, self.lin_r.weight) if self.root_weight else (self.lin_l.weight,)
        return SlicedMap(self.out_channels, True, weights, part)

    def linear(self, block: Block, dtype: torch.dtype) -> Linear | None:
        if self.aggr == "max":
            return None
        make = mean_scale if self.aggr == "mean" else sum_scale
        return Linear(dst=make(block, dtype))

    def aggregate(self, block: Block, m: Messages, e: Any, key: int | None = None) -> Tensor:
        if self.aggr == "max":
            return _maximum(block, m)
        make = mean_scale if self.aggr == "mean" else sum_scale
        return aggregate(block, m, dst_scale=make(block, scale_dtype(m)))

    def at_once(self, block: Block, x: Messages, map_first: bool) -> Tensor | None:
        is_plain = type(self) is SAGEConv and self.aggr == "mean" and self.root_weight
        if not is_plain or self.project or self.normalize:
            return None
        scale = None if counts_edges(block, x) else mean_scale(block, scale_dtype(x))
        weights = (self.lin_l.weight, self.lin_l.bias, self.lin_r.weight)
        return mean_map(block, x, *weights, scale, map_first=map_first)

    def update(self, z: Tensor, h_dst: Rows | None, carried: Tensor | None, map_first: bool) -> Tensor:
        own = h_dst if self.root_weight else None
        if map_first and self._commutes:
            out = self._with_bias(z) if own is None else self._own(own).add_(z)
        else:
            out = linear(z, self.lin_l.weight, self.lin_l.bias)
            if own is not None:
                out = linear_add(out, own, self.lin_r.weight)
        return F.normalize(out, p=2.0, dim=-1) if self.normalize else out

    def _own(self, h_dst: Rows) -> Tensor:
        return linear(h_dst, self.lin_r.weight, self.lin_l.bias)

    def _with_bias(self, z: Tensor) -> Tensor:
        bias: Tensor | None = self.lin_l.bias
        return z if bias is None else z + bias

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, aggr={self.aggr}"


def _maximum(block: Block, m: Messages) -> Tensor:
    """[D, F]: column-wise maximum over each destination's edges, 0 where it has none."""
    sources = block.indices.long() if block.rows is None else block.rows[block.indices.long()]
    messages = m.index_select(0, sources) if isinstance(m, Tensor) else m.gather(sources)
    at = torch.repeat_interleave(torch.arange(block.num_dst, device=m.device), block.drawn)
    out = messages.new_zeros(block.num_dst, m.shape[1])
    return out.scatter_reduce(0, at[:, None].expand_as(messages), messages, "amax", include_self=False)
