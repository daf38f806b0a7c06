"""Input rows whose neighbours were summed once, before training: what a first layer is given where its sum never changes.

A first layer that sums its inputs before it multiplies them (mean, sum, GCN's normalised sum) sums the same rows at every
step. ``FixedAggregate`` says which sum that is; ``AggregatedRows`` are the summed rows of some nodes, in place of the rows
of all their neighbours.

Legend: n rows, F features, W columns of a stored row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhop.errors import GraphError
from polyhop.graph.block import Block

__all__ = ["AggregatedRows", "FixedAggregate"]


@dataclass(frozen=True, eq=False)
class AggregatedRows:
    """Inputs of n nodes for a first layer that has no neighbours left to read."""

    z: Tensor  # [n, F]: what the layer would have summed over all in-edges
    own: Tensor | None = None  # [n, F]: the nodes' own rows, where the layer reads them beside the sum

    def __post_init__(self) -> None:
        if self.z.dim() != 2 or (self.own is not None and self.own.shape != self.z.shape):
            own = None if self.own is None else list(self.own.shape)
            raise GraphError(
                f"aggregated rows: expected z [n, F] and own rows of the same shape, got {list(self.z.shape)} and {own}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        return self.z.shape[0], self.z.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.z.dtype

    @property
    def device(self) -> torch.device:
        return self.z.device


@dataclass(frozen=True, eq=False)
class FixedAggregate:
    """A sum over in-edges that no parameter changes."""

    name: str  # of the sum, its normalisation and what is stored: two of the same name give the same rows
    has_own: bool  # a stored row is [x | z]; else [z]
    apply: Callable[[Block, Tensor], Tensor]  # (block with all in-edges, its source rows or pool) -> z [D, F]

    def width(self, num_features: int) -> int:
        """W of stored rows."""
        return (2 if self.has_own else 1) * num_features

    def stored(self, own: Tensor, z: Tensor) -> Tensor:
        """[n, W] of own rows and sums, both [n, F]."""
        return torch.cat([own, z], dim=1) if self.has_own else z

    def split(self, rows: Tensor) -> AggregatedRows:
        """Stored rows [n, W] as a first layer takes them; views, not copies."""
        if not self.has_own:
            return AggregatedRows(rows)
        num_features = rows.shape[1] // 2
        return AggregatedRows(rows[:, num_features:], rows[:, :num_features])
