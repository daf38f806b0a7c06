"""GAT: neighbours weighted by learned attention (Veličković et al., 2018).

    out_i = sum_j softmax_j( leaky_relu( a_src . W x_j + a_dst . W x_i ) ) W x_j  (+ R x_i) + b

with j over the neighbours and i itself.

Scores need the mapped rows, so the map always comes first. Softmax and weighted sum are one fused kernel.

Legend: D destinations, S sources, H heads, C channels per head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from polyhop.errors import UnsupportedError
from polyhop.graph.block import Block
from polyhop.graph.halo_block import Sizes
from polyhop.graph.sliced import MappedRows, SlicedMap
from polyhop.kernels import attention
from polyhop.nn.layer import SLICES, Layer, refuse_changed, refuse_options
from polyhop.nn.rows import Messages, Rows, linear, linear_add

__all__ = ["GATConv"]


class GATConv(Layer):
    """PyG's GATConv: same arguments, parameters and numbers on a full graph; ``edge_dim`` is not supported.

    On a sampled block the softmax is over the drawn edges (and self). ``fill_value`` only concerns edge features and is
    accepted for compatibility. Attention dropout is keyed by both ends of the edge and the head.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        edge_dim: int | None = None,
        fill_value: float | Tensor | str = "mean",
        bias: bool = True,
        residual: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        refuse_options("GATConv", kwargs, {"aggr": ("add", "sum")})
        if edge_dim is not None:
            raise UnsupportedError(
                f"GATConv: edge_dim={edge_dim} is not supported; polyhop.nn.wrap takes PyG's own GATConv"
            )
        self.set_widths(in_channels, out_channels)
        self.heads = heads
        self.concat = concat
        self.negative_slope = negative_slope
        self.dropout = dropout
        self.add_self_loops = add_self_loops
        self.edge_dim = edge_dim
        self.fill_value = fill_value
        self.residual = residual
        self.reads_own = residual
        # Else the result is the aggregation's own, which its backward pass reads.
        self.gives_own = bias or not concat
        self.lin = nn.Linear(in_channels, heads * out_channels, bias=False)
        self.att_src = nn.Parameter(torch.empty(1, heads, out_channels))
        self.att_dst = nn.Parameter(torch.empty(1, heads, out_channels))
        total = out_channels * (heads if concat else 1)
        self.res = nn.Linear(in_channels, total, bias=False) if residual else None
        self.bias = nn.Parameter(torch.empty(total)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot weights and attention vectors, zero bias."""
        for weight in (self.lin.weight, self.res.weight if self.res is not None else None):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        bound = (6.0 / (self.heads + self.out_channels)) ** 0.5  # PyG's glorot reads the last two dimensions
        nn.init.uniform_(self.att_src, -bound, bound)
        nn.init.uniform_(self.att_dst, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def map_first(self, block: Block | Sizes, input_grad: bool) -> bool:
        return True

    def transform(self, h: Rows, map_first: bool) -> Tensor:
        return linear(h, self.lin.weight)

    def sliced_map(self) -> SlicedMap:
        """Rows of sources are mapped in slices; scores and sums, which are not linear in them, come after."""
        refuse_changed(self, GATConv, ("transform", "edge", "aggregate", "update", "forward"), SLICES)

        def part(block: Block, x: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
            return linear(x, torch.cat(weights))

        weights = (self.lin.weight,) if self.res is None else (self.lin.weight, self.res.weight)
        return SlicedMap(sum(weight.shape[0] for weight in weights), False, weights, part)

    def update_mapped(self, rows: MappedRows, block: Block, key: int | None) -> Tensor:
        m, own = rows.z.split([self.lin.weight.shape[0], rows.shape[1] - self.lin.weight.shape[0]], dim=1)  # type: ignore[no-untyped-call]
        m = m.contiguous()
        out = self.update(self.aggregate(block, m, self.edge(block, m), key), None, None, map_first=True)
        return out if self.res is None else out + block.dst_rows(own)

    def edge(self, block: Block, m: Messages) -> tuple[Tensor, Tensor]:
        """(a_src [S, H], a_dst [D, H]): the two halves of the score, by one thin product over m."""
        assert isinstance(m, Tensor), "rows are always mapped first"
        both = torch.cat([_spread(self.att_src), _spread(self.att_dst)], dim=1).to(m.dtype)
        scores = m @ both
        start = block.dst_start
        return scores[:, : self.heads], scores[start : start + block.num_dst, self.heads :]

    def aggregate(self, block: Block, m: Messages, e: Any, key: int | None = None) -> Tensor:
        assert isinstance(m, Tensor), "rows are always mapped first"
        a_src, a_dst = e
        return attention(
            block,
            m.view(-1, self.heads, self.out_channels),
            a_src,
            a_dst,
            negative_slope=self.negative_slope,
            self_loop=self.add_self_loops,
            dropout_p=0.0 if key is None else self.dropout,
            dropout_key=key or 0,
        )

    def update(self, z: Tensor, h_dst: Rows | None, carried: Tensor | None, map_first: bool) -> Tensor:
        is_one = (
            self.heads == 1 and self.bias is not None
        )  # its mean is itself, and a new tensor is made below
        out = z.flatten(1) if self.concat or is_one else z.mean(dim=1)
        if self.bias is not None:
            out = out + self.bias
        if self.res is None or h_dst is None:
            return out
        return linear_add(
            out if self.bias is not None or not self.concat else out.clone(), h_dst, self.res.weight
        )

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, heads={self.heads}"


def _spread(att: Tensor) -> Tensor:
    """[H * C, H]: the attention vectors [1, H, C] as one block-diagonal matrix."""
    heads, channels = att.shape[1], att.shape[2]
    eye = torch.eye(heads, dtype=att.dtype, device=att.device)
    return (att.reshape(heads, channels, 1) * eye[:, None, :]).reshape(heads * channels, heads)
