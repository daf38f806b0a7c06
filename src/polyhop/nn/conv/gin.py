"""GIN: the plain sum over neighbours, then a network (Xu et al., 2019).

    out_i = nn( (1 + eps) x_i + sum_j x_j )

Where the network begins with a linear map, that map may be done before the sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from polyhop.errors import UnsupportedError
from polyhop.graph.aggregated import AggregatedRows, FixedAggregate
from polyhop.graph.block import Block
from polyhop.graph.features import SparseRows
from polyhop.graph.halo_block import Sizes
from polyhop.graph.sliced import SlicedMap
from polyhop.kernels import aggregate
from polyhop.nn.layer import SLICES, Layer, cheaper_to_map_first, refuse_changed, refuse_options
from polyhop.nn.modules import MLP
from polyhop.nn.rows import Messages, Rows, linear, own_rows
from polyhop.nn.scale import Linear, scale_dtype, sum_scale

__all__ = ["GINConv"]


class GINConv(Layer):
    """PyG's GINConv: same arguments, parameters and numbers on a full graph.

    On a sampled block the sum is scaled by (in-degree / drawn), hence unbiased. ``nn`` maps [n, in] to [n, out]; a
    ``torch.nn.Sequential`` or ``polyhop.nn.MLP`` that begins with a linear map allows sparse rows and the cheaper order.
    """

    reads_pooled = True
    eps: Tensor

    def __init__(self, nn: nn.Module, eps: float = 0.0, train_eps: bool = False, **kwargs: Any) -> None:
        super().__init__()
        refuse_options("GINConv", kwargs, {"aggr": ("add", "sum")})
        self.nn = nn
        self.initial_eps = eps
        first = _first_linear(nn)
        self.in_channels = first.weight.shape[1] if first is not None else int(getattr(nn, "in_channels", -1))
        self.out_channels = _last_width(nn)
        start = torch.full((1,), float(eps))
        if train_eps:
            self.eps = torch.nn.Parameter(start)
        else:
            self.register_buffer("eps", start)

    def reset_parameters(self) -> None:
        """The network's own initialisation; eps as given."""
        _reset(self.nn)
        with torch.no_grad():
            self.eps.fill_(self.initial_eps)

    def map_first(self, block: Block | Sizes, input_grad: bool) -> bool:
        first = _first_linear(self.nn)
        if first is None:
            return False
        width_out, width_in = first.weight.shape
        return cheaper_to_map_first(block, int(width_in), int(width_out), input_grad)

    def transform(self, h: Rows, map_first: bool) -> Messages:
        first = _first_linear(self.nn)
        if map_first and first is not None:
            return linear(h, first.weight)
        if isinstance(h, SparseRows):
            raise UnsupportedError(
                "GINConv: sparse rows need a network that begins with a Linear (Sequential or MLP)"
            )
        return h

    def fixed_aggregate(self) -> FixedAggregate:
        refuse_changed(self, GINConv, ("transform", "edge", "aggregate", "update", "forward"))

        def sums(block: Block, x: Tensor) -> Tensor:
            return aggregate(block, x, dst_scale=sum_scale(block, scale_dtype(x)))

        return FixedAggregate("sum", True, sums)

    def update_aggregated(self, rows: AggregatedRows) -> Tensor:
        assert rows.own is not None, "the layer has checked it"
        return _call(self.nn, rows.z + (1 + self.eps).to(rows.dtype) * rows.own)

    def sliced_map(self) -> SlicedMap:
        refuse_changed(self, GINConv, ("transform", "edge", "aggregate", "update", "forward"), SLICES)
        first = _first_linear(self.nn)
        if first is None:
            raise UnsupportedError(
                f"GINConv: {SLICES} not possible: its network does not begin with a Linear (Sequential or MLP)"
            )

        def part(block: Block, x: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
            return self.mapped_sum(block, x, weights[0])

        return SlicedMap(first.weight.shape[0], True, (first.weight,), part, (self.eps,))

    def linear(self, block: Block, dtype: torch.dtype) -> Linear | None:
        return Linear(dst=sum_scale(block, dtype))

    def aggregate(self, block: Block, m: Messages, e: Any, key: int | None = None) -> Tensor:
        dtype = scale_dtype(m)
        scale = sum_scale(block, dtype)
        if self.eps.requires_grad and torch.is_grad_enabled():
            m_all, own = own_rows(m, block)
            assert not isinstance(m_all, SparseRows)
            assert isinstance(own, Tensor)
            return aggregate(block, m_all, dst_scale=scale) + (1 + self.eps).to(own.dtype) * own
        own_scale = (1 + self.eps.detach()).to(dtype).expand(block.num_dst).contiguous()
        return aggregate(block, m, dst_scale=scale, self_scale=own_scale)

    def update(self, z: Tensor, h_dst: Rows | None, carried: Tensor | None, map_first: bool) -> Tensor:
        first = _first_linear(self.nn)
        if not map_first or first is None:
            return _call(self.nn, z)
        bias: Tensor | None = first.bias
        z = z if bias is None else z + bias
        if isinstance(self.nn, MLP):
            return self.nn.after_first(z)
        assert isinstance(self.nn, nn.Sequential)
        for module in list(self.nn)[1:]:
            z = module(z)
        return z

    def extra_repr(self) -> str:
        return ""


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()
        return
    for child in module.children():
        _reset(child)


def _call(module: nn.Module, z: Tensor) -> Tensor:
    out: Tensor = module(z)
    return out


def _first_linear(module: nn.Module) -> Any:
    """The linear map the network begins with (anything with weight [out, in] and bias), or None."""
    if isinstance(module, MLP):
        return module.lins[0]
    if isinstance(module, nn.Sequential) and len(module) and type(module[0]).__name__ == "Linear":
        return module[0]
    return None


def _last_width(module: nn.Module) -> int:
    """Output width of the network: declared, or of its last weight matrix [out, in]; -1 if it has none."""
    declared = getattr(module, "out_channels", None)
    if isinstance(declared, int):
        return declared
    weights = [getattr(m, "weight", None) for m in module.modules()]
    widths = [w.shape[0] for w in weights if isinstance(w, Tensor) and w.dim() == 2]
    return widths[-1] if widths else -1
