"""What one rank holds of a graph, as evaluation wants it: a block whose sources are own rows and halo, all input rows, and a
way to complete a layer's own rows by those of the halo. The counterpart of ``WholeGraph`` for a part.

Legend: n own nodes, H halo nodes, S = n + H sources.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from polyhop.comm import Collective
from polyhop.exchange import Halo, RowFetch
from polyhop.graph import Block, FeatureStore, Part, SharedGraph, SparseFeatures, SparseRows
from polyhop.nn.rows import Rows
from polyhop.strategies.step import Placement

__all__ = ["HeldPart"]


class HeldPart:
    """Made and used by all ranks together: halo lists, and the halo's input rows when first asked for, are exchanged."""

    def __init__(self, graph: SharedGraph, placement: Placement, line: Collective, fetch: RowFetch) -> None:
        self.graph, self.placement, self.line, self._fetch = graph, placement, line, fetch
        self._halo = Halo(graph.part, line) if isinstance(graph.part, Part) else None
        self._features: FeatureStore | None = None

    @property
    def halo(self) -> Halo:
        if self._halo is None:
            self.graph.stored("evaluation")
        assert self._halo is not None
        return self._halo

    @property
    def features(self) -> FeatureStore:
        """Input rows of own nodes and halo [S, F]; the halo's are fetched once."""
        if self._features is None:  # not a cached_property: its lock is the class's, and ranks may be threads
            fetched = self._fetch.fetch(self.line, self.graph.stored("evaluation").halo).x
            self._features = _PartFeatures(self._fetch, self.graph.part.num_nodes, fetched)
        return self._features

    def own_rows(self, ids: Tensor) -> Tensor | SparseRows:
        """Input rows of own nodes, as ``features`` has them, without those of the halo."""
        return self._fetch.own(ids)

    @cached_property
    def host_block(self) -> Block:
        """All in-edges of the own nodes, in memory beside the part."""
        block = self.graph.stored("evaluation").block()
        if block.edge_weight is not None and block.edge_weight.dtype != self.placement.dtype:
            block = replace(block, edge_weight=block.edge_weight.to(self.placement.dtype), _cache={})
        return block

    @cached_property
    def block(self) -> Block:
        """The same, where computing happens."""
        return self.placement.block(self.host_block)

    @property
    def x(self) -> Rows:
        """All S input rows, where computing happens."""
        return self.placement.rows(self.features.all())

    def complete(self, rows: Tensor) -> Tensor:
        """[S, ...]: the own rows [n, ...] with the halo's behind them."""
        return torch.cat([rows, self.halo.forward(rows).to(rows.device)])


@dataclass(frozen=True, eq=False)
class _PartFeatures:
    """Own rows from where they are stored, the halo's from memory."""

    fetch: RowFetch
    num_own: int
    halo: Tensor | SparseRows

    @property
    def num_rows(self) -> int:
        return self.num_own + self.halo.shape[0]

    @property
    def num_features(self) -> int:
        return int(self.halo.shape[1])

    def all(self) -> Tensor | SparseRows:
        return _joined(self.fetch.own(torch.arange(self.num_own)), self.halo)

    def gather(self, ids: Tensor) -> Tensor | SparseRows:
        is_own = ids < self.num_own
        own, halo = ids[is_own], ids[~is_own] - self.num_own
        if isinstance(self.halo, SparseRows):
            both = _joined(self.fetch.own(own), SparseFeatures(self.halo).gather(halo))
            assert isinstance(both, SparseRows)
            back = torch.empty_like(ids)
            back[torch.cat([is_own.nonzero()[:, 0], (~is_own).nonzero()[:, 0]])] = torch.arange(ids.numel())
            return SparseFeatures(both).gather(back)
        rows = self.fetch.own(own)
        assert isinstance(rows, Tensor)
        out = rows.new_empty(ids.numel(), rows.shape[1])
        out[is_own] = rows
        out[~is_own] = self.halo[halo]
        return out


def _joined(a: Tensor | SparseRows, b: Tensor | SparseRows) -> Tensor | SparseRows:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.cat([a, b])
    assert isinstance(a, SparseRows)
    assert isinstance(b, SparseRows)
    indptr = torch.cat([a.indptr, a.indptr[-1] + b.indptr[1:]])
    columns = torch.cat([a.indices.to(torch.int32), b.indices.to(torch.int32)])
    return SparseRows(indptr, columns, torch.cat([a.values, b.values]), a.num_columns)
