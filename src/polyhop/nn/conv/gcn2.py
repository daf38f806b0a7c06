"""GCNII's layer: GCN with an initial residual and an identity mapping (Chen et al., 2020).

s = (1 - alpha) P x + alpha x_0,      out = (1 - beta) s + beta s W,      beta = log(theta / layer + 1)
"""

from __future__ import annotations

from math import log
from typing import Any

import torch
from torch import Tensor, nn

from polyhop.errors import ConfigError, InputError
from polyhop.graph.block import Block
from polyhop.graph.features import SparseRows
from polyhop.graph.halo_block import Sizes
from polyhop.kernels import aggregate
from polyhop.kernels.keys import Key
from polyhop.nn.layer import Layer, refuse_options
from polyhop.nn.rows import Messages, Rows
from polyhop.nn.scale import Linear, edge_weight, gcn_scales, scale_dtype, sum_scale

__all__ = ["GCN2Conv"]


class GCN2Conv(Layer):
    """PyG's GCN2Conv: same arguments, parameters and numbers on a full graph. ``cached`` does nothing (see GCNConv).

    Called as PyG's ``conv(x, x_0, edge_index)`` or as any layer here: ``conv(x, block, carried=x_0)``, x_0 [D, channels]
    being the destinations' initial rows. ``shared_weights=False`` is GCNII*, with ``weight2`` for the initial rows.
    """

    takes_carried = True
    reads_pooled = True

    def __init__(
        self,
        channels: int,
        alpha: float,
        theta: float | None = None,
        layer: int | None = None,
        shared_weights: bool = True,
        cached: bool = False,
        add_self_loops: bool = True,
        normalize: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        refuse_options("GCN2Conv", kwargs, {"aggr": ("add", "sum")})
        if (theta is None) != (layer is None):
            raise ConfigError(f"GCN2Conv: theta={theta} and layer={layer} go together; give both or neither")
        self.set_widths(channels, channels)
        self.channels = channels
        self.alpha = alpha
        self.beta = 1.0 if theta is None or layer is None else log(theta / layer + 1)
        self.cached = cached
        self.normalize = normalize
        self.add_self_loops = add_self_loops
        self.weight1 = nn.Parameter(torch.empty(channels, channels))
        self.weight2 = None if shared_weights else nn.Parameter(torch.empty(channels, channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot weights."""
        nn.init.xavier_uniform_(self.weight1)
        if self.weight2 is not None:
            nn.init.xavier_uniform_(self.weight2)

    def forward(  # type: ignore[override]  # PyG puts x_0 second; both orders are taken
        self,
        x: Rows,
        x_0: Tensor | Block | None = None,
        edge_index: Block | Tensor | None = None,
        edge_weight: Tensor | None = None,
        *,
        carried: Tensor | None = None,
        key: Key | None = None,
        site: int = 0,
    ) -> Tensor:
        if isinstance(x_0, Block) or (isinstance(x_0, Tensor) and not x_0.is_floating_point()):
            x_0, edge_index = carried, x_0
        elif x_0 is None:
            x_0 = carried
        if edge_index is None:
            raise InputError(
                "GCN2Conv: no edges given; call conv(x, x_0, edge_index) or conv(x, block, carried=x_0)"
            )
        return super().forward(x, edge_index, edge_weight, carried=x_0, key=key, site=site)

    def map_first(self, block: Block | Sizes, input_grad: bool) -> bool:
        return False  # square map, and the identity part needs the aggregated rows as they are

    def transform(self, h: Rows, map_first: bool) -> Messages:
        if isinstance(h, SparseRows):
            raise InputError("GCN2Conv: needs dense rows; GCNII maps sparse features by a linear layer first")
        return h

    def linear(self, block: Block, dtype: torch.dtype) -> Linear | None:
        weight = edge_weight(block, dtype)
        if not self.normalize:
            return Linear(weight, dst=sum_scale(block, dtype))
        s = gcn_scales(block, dtype, add_self_loops=self.add_self_loops)
        return Linear(weight, s.src, s.dst)

    def aggregate(self, block: Block, m: Messages, e: Any, key: int | None = None) -> Tensor:
        dtype = scale_dtype(m)
        weight = edge_weight(block, dtype)
        if not self.normalize:
            return aggregate(block, m, edge_weight=weight, dst_scale=sum_scale(block, dtype))
        s = gcn_scales(block, dtype, add_self_loops=self.add_self_loops)
        return aggregate(block, m, edge_weight=weight, src_scale=s.src, dst_scale=s.dst, self_scale=s.own)

    def update(self, z: Tensor, h_dst: Rows | None, carried: Tensor | None, map_first: bool) -> Tensor:
        assert carried is not None
        x_0 = carried[: z.shape[0]]
        if self.weight2 is None:
            return self._mapped(torch.lerp(z, x_0.to(z.dtype), self.alpha), self.weight1)
        return self._mapped((1 - self.alpha) * z, self.weight1) + self._mapped(self.alpha * x_0, self.weight2)

    def _mapped(self, s: Tensor, weight: Tensor) -> Tensor:
        """(1 - beta) s + beta s W."""
        return torch.addmm(s, s, weight, beta=1.0 - self.beta, alpha=self.beta)

    def extra_repr(self) -> str:
        return f"{self.channels}, alpha={self.alpha}, beta={self.beta}"
