"""GAT with the per-edge part of attention on functions (AE, and its gradient), the sums over edges on the server (GA).

    server    copies the rows that an interval reads: messages and scores of one version of each
    function  AE: scores of both ends of every in-edge -> leaky relu, softmax over a destination's in-edges -> weights
    server    drops weights (by key, as the layer does), sums messages by them
    back      server: gradients of messages (the sum over the transposed edges) and of weights (a product for each edge
              and head); function: gradients of scores

Edges travel with every task: functions keep nothing of them. Bytes of an interval, layer and epoch, v being those of a value
and E counting added loops: 2 (8 (D + 1) + 4 E) + 3 v H (S + D) + 2 v H E, and v H E more where weights are not computed
again; so 8 + 8 H for each edge in float32. A server that computes attention by itself (the default) sends nothing, and its
fused kernel goes over the edges once. This is better only where weights (exponentials, divisions) are what a server has no
cores for while its network has nothing to do: where its free cores make fewer of the H weights of an edge in a second than
the link carries bytes in a second / (8 / H + 8).

Legend: D rows of an interval, S sources of it, E edges, H heads, C channels of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhop.kernels import reference, spmm
from polyhop.kernels.keys import Key
from polyhop.nn.conv import GATConv
from polyhop.serverless.intervals import Interval
from polyhop.serverless.program import Call, Program, Row
from polyhop.serverless.segments import Graph
from polyhop.serverless.tables import Reading
from polyhop.serverless.wire import Array

__all__ = ["EdgeAttention", "Edges"]

_AT_ONCE = 1 << 22
"""Values of messages that are multiplied edge by edge at a time."""


@dataclass
class Edges:
    """What an interval keeps of attention, from the read to the end of its gradient."""

    m: Tensor  # [S, H, C]
    src: Tensor  # [S, H]
    dst: Tensor  # [D, H]
    weights: Tensor | None = None  # [E, H], of added loops [D, H] after them: as functions give them
    mask: Tensor | None = None  # of the same shape: what attention dropout multiplies them by
    m_grad: Tensor | None = None

    @property
    def dropped(self) -> Tensor:
        assert self.weights is not None, "they have come back"
        return self.weights if self.mask is None else self.weights * self.mask


class EdgeAttention:
    """A graph operation in three steps: ``read``, a task, ``gather``; and back: ``give_back``, a task, ``ended``."""

    gives = "weights"  # of the task
    wants = ("src", "dst")  # of its gradient

    def __init__(self, layer: GATConv, index: int, segment: Graph) -> None:
        self._layer, self._index = layer, index
        self._m, self._src, self._dst = segment.takes
        rows = {
            "indptr": Row((), "ids"), "indices": Row((), "ids"), "src": Row((layer.heads,)), "dst": Row((layer.heads,)),
        }  # fmt: skip
        attrs = {"slope": float(layer.negative_slope), "self_loop": bool(layer.add_self_loops)}
        self.program = Program(
            rows, {}, (Call("edge_softmax", tuple(rows), ("weights",), attrs),), ("weights",)
        )

    @property
    def of_sources(self) -> tuple[str, ...]:
        return (self._m, self._src)

    @property
    def of_own(self) -> tuple[str, ...]:
        return (self._dst,)

    def read(self, reading: Reading, own: Mapping[str, Tensor]) -> Edges:
        """Copies: rows of a table may be overwritten before the weights are there."""
        m, src = (reading.copied(name) for name in self.of_sources)
        return Edges(m.view(-1, self._layer.heads, self._layer.out_channels), src, own[self._dst])

    def task(self, interval: Interval, kept: Edges) -> dict[str, Array]:
        """What a function needs for the weights."""
        block = interval.block
        return {
            "indptr": block.indptr.numpy(), "indices": block.indices.numpy(), "src": kept.src.numpy(),
            "dst": kept.dst.numpy(),
        }  # fmt: skip

    def gather(self, interval: Interval, kept: Edges, key: Key) -> Tensor:
        """[D, H * C]: sums of messages by the weights that came back."""
        block, layer = interval.block, self._layer
        code = layer._attention_key(key, self._index)
        if code is not None:
            src, dst = self._ends(interval)
            mask = reference.attention_mask(block, src, dst, layer.heads, layer.dropout, code)
            kept.mask = mask.to(kept.m.dtype)
        dropped, num_edges = kept.dropped, block.num_edges
        out = kept.m.new_empty(block.num_dst, layer.heads, layer.out_channels)
        for head in range(layer.heads):
            out[:, head] = spmm(
                block.indptr,
                block.indices,
                kept.m[:, head].contiguous(),
                num_src=block.num_src,
                dst_start=block.dst_start,
                edge_weight=dropped[:num_edges, head],
                self_scale=dropped[num_edges:, head] if layer.add_self_loops else None,
            )
        return out.flatten(1)

    def give_back(self, interval: Interval, kept: Edges, grad: Tensor) -> Tensor:
        """Gradients of the weights, as long as these; those of messages are kept for ``ended``."""
        grad = grad.view(-1, self._layer.heads, self._layer.out_channels)
        kept.m_grad = self._of_messages(interval, kept, grad)
        found = self._of_weights(interval, kept.m, grad)
        return found if kept.mask is None else found * kept.mask

    def back_task(self, interval: Interval, kept: Edges, grad: Tensor, remakes: bool) -> dict[str, Array]:
        """What a function needs for gradients of scores, given those of the weights."""
        assert kept.weights is not None, "they have come back"
        saved = {} if remakes else {"s:weights": kept.weights.numpy()}
        return self.task(interval, kept) | saved | {"g:weights": grad.numpy()}

    def ended(self, kept: Edges, src: Tensor, dst: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Gradients of the rows of sources, and of rows of the destinations alone, given those of scores."""
        assert kept.m_grad is not None, "give_back comes before"
        return {self._m: kept.m_grad, self._src: src}, {self._dst: dst}

    def task_bytes(self, interval: Interval, value_bytes: int, remakes: bool) -> tuple[list[int], list[int]]:
        """What functions are sent of an interval, forward and back, and what they give."""
        block, size = interval.block, value_bytes * self._layer.heads
        scores = size * (block.num_src + block.num_dst)
        given = block.indptr.nbytes + block.indices.nbytes + scores
        weights = size * (block.num_edges + (block.num_dst if self._layer.add_self_loops else 0))
        return [given, given + weights * (1 if remakes else 2)], [weights, scores]

    def _ends(self, interval: Interval) -> tuple[Tensor, Tensor]:
        """Source and destination of every edge, and of every added loop."""
        block = interval.block
        src = block.indices.long()
        dst = torch.repeat_interleave(torch.arange(block.num_dst), block.indptr.diff())
        if self._layer.add_self_loops:
            own = torch.arange(block.num_dst)
            src, dst = torch.cat([src, own + block.dst_start]), torch.cat([dst, own])
        return src, dst

    def _of_messages(self, interval: Interval, kept: Edges, grad: Tensor) -> Tensor:
        """[S, H * C]: the sum over the transposed edges."""
        block, dropped = interval.block, kept.dropped
        turned, start = block.transposed(), block.dst_start
        by_source = dropped[: block.num_edges].index_select(0, turned.edge.long())
        out = torch.empty_like(kept.m)
        for head in range(self._layer.heads):
            out[:, head] = spmm(
                turned.indptr,
                turned.indices,
                grad[:, head].contiguous(),
                num_src=block.num_dst,
                edge_weight=by_source[:, head],
            )
        if self._layer.add_self_loops:
            out[start : start + block.num_dst].addcmul_(grad, dropped[block.num_edges :, :, None])
        return out.flatten(1)

    def _of_weights(self, interval: Interval, m: Tensor, grad: Tensor) -> Tensor:
        """[E, H], of added loops after them: each destination's gradient times the message that came over the edge."""
        src, dst = self._ends(interval)
        out = m.new_empty(src.numel(), self._layer.heads)
        step = max(_AT_ONCE // max(m.shape[1] * m.shape[2], 1), 1)
        for at in range(0, src.numel(), step):
            here = slice(at, at + step)
            out[here] = (grad.index_select(0, dst[here]) * m.index_select(0, src[here])).sum(dim=2)
        return out
