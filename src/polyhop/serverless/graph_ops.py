"""Graph operations of a server on one interval: what its destinations gather, and what goes back for the rows they read.

Sums know their gradient without having kept anything: it is the sum over the transposed edges. Attention keeps the rows
that it read until its gradient is asked for, since rows of a table may be overwritten before. ``EdgeAttention`` leaves its
per-edge part to functions.

Legend: D rows of an interval, S sources of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from polyhop.errors import UnsupportedError
from polyhop.kernels import spmm
from polyhop.kernels.keys import Key
from polyhop.nn.conv import GATConv
from polyhop.nn.layer import Layer
from polyhop.serverless.edge_tasks import EdgeAttention
from polyhop.serverless.intervals import Interval
from polyhop.serverless.segments import Graph
from polyhop.serverless.tables import Reading

__all__ = ["Attention", "Gathered", "GraphOp", "Sum", "graph_op"]

Gathered = tuple[Tensor, Any]
"""What was gathered [D, columns], and what its gradient needs."""


Drop: TypeAlias = Callable[[Tensor], Tensor]
"""Rows of an interval's sources [S, columns], or their gradients, without the units that an epoch drops."""


class Sum:
    """A weighted sum over in-edges: GCN, GraphSAGE."""

    def __init__(self, layer: Layer, segment: Graph) -> None:
        self._layer, self._name = layer, segment.takes[0]
        self._turned: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}

    @property
    def of_sources(self) -> tuple[str, ...]:
        """Rows that are read of all sources."""
        return (self._name,)

    @property
    def of_own(self) -> tuple[str, ...]:
        """Rows that are read of the destinations alone."""
        return ()

    def gather(
        self,
        interval: Interval,
        reading: Reading,
        own: Mapping[str, Tensor],
        key: Key,
        drop: Drop | None = None,
    ) -> Gathered:
        """``drop``: which units of the rows that are read are dropped; None: of which none need be."""
        with torch.no_grad():
            if drop is not None:
                read = drop(reading.copied(self._name))
                return self._layer.aggregate(interval.block, read, None), None
            block = (
                interval.block if reading.sources is None else replace(interval.block, rows=reading.sources)
            )
            return self._layer.aggregate(block, reading.rows[self._name], None), None

    def give_back(
        self, interval: Interval, kept: Any, grad: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Gradients of the rows of sources [S, columns], and of rows of the destinations alone."""
        block, dtype = interval.block, grad.dtype
        weighed = self._layer.linear(block, dtype)
        if weighed is None:
            raise UnsupportedError(f"{type(self._layer).__name__}: its aggregation is no sum")
        if interval.number not in self._turned:
            turned = block.transposed()
            weight = None if weighed.weight is None else weighed.weight[turned.edge.long()]
            self._turned[interval.number] = turned.indptr, turned.indices, weight
        indptr, indices, weight = self._turned[interval.number]
        out = spmm(
            indptr,
            indices,
            grad.contiguous(),
            num_src=block.num_dst,
            edge_weight=weight,
            src_scale=weighed.dst,
            dst_scale=weighed.src,
        )
        if weighed.own is not None:
            out[: block.num_dst].addcmul_(grad, weighed.own[:, None].to(dtype))
        return {self._name: out}, {}


class Attention:
    """GAT: rows weighted by a softmax over the scores of in-edges."""

    def __init__(self, layer: GATConv, index: int, segment: Graph) -> None:
        self._layer, self._index = layer, index
        self._m, self._src, self._dst = segment.takes

    @property
    def of_sources(self) -> tuple[str, ...]:
        return (self._m, self._src)

    @property
    def of_own(self) -> tuple[str, ...]:
        return (self._dst,)

    def gather(self, interval: Interval, reading: Reading, own: Mapping[str, Tensor], key: Key) -> Gathered:
        read = [reading.copied(name) for name in self.of_sources]
        leaves = [each.requires_grad_() for each in (*read, own[self._dst].detach().clone())]
        with torch.enable_grad():
            found = self._layer.aggregate(
                interval.block,
                leaves[0],
                (leaves[1], leaves[2]),
                self._layer._attention_key(key, self._index),
            )
            found = found.flatten(1)
        return found.detach(), (leaves, found)

    def give_back(
        self, interval: Interval, kept: Any, grad: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        leaves, found = kept
        with torch.autograd.set_multithreading_enabled(False):
            m, src, dst = torch.autograd.grad(found, leaves, grad)
        return {self._m: m, self._src: src}, {self._dst: dst}


GraphOp: TypeAlias = Sum | Attention | EdgeAttention


def graph_op(layer: Layer, segment: Graph, edge_functions: bool = False) -> GraphOp:
    """How a server runs a graph operation of the chain. ``edge_functions``: attention weights are tasks of functions."""
    if not isinstance(layer, GATConv):
        return Sum(layer, segment)
    return (EdgeAttention if edge_functions else Attention)(layer, segment.layer, segment)
