"""What follows from a model and the options of strategy ``halo``: alike on all ranks, and known before any has run.

Legend: n own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from polyhop.errors import UnsupportedError
from polyhop.graph import Sizes
from polyhop.strategies.halo_cost import Seen, crossings

__all__ = ["BUCKET_BYTES", "GraphSizes", "Options", "Plan"]

BUCKET_BYTES = 1 << 18
"""Of gradients that leave together: small, so that the first leave while others are computed."""


class Options(Protocol):
    """The options that decide what crosses at each layer."""

    @property
    def halo(self) -> str: ...
    @property
    def halo_sums(self) -> bool: ...
    @property
    def naive_halo(self) -> bool: ...


@dataclass(frozen=True)
class GraphSizes:
    """Of the whole graph."""

    num_nodes: int
    num_edges: int
    num_features: int
    is_sparse: bool  # the input rows


@dataclass(frozen=True)
class Plan:
    """What crosses where."""

    has_batch_norm: bool
    num_plain: int  # layers whose halo is made of input rows alone, which crossed once: 0 or 1
    sizes: Sizes  # that decide the order of map and aggregation
    seen: Sequence[Seen]  # at each layer
    sums: Sequence[bool]  # of each layer, whether sums of rows may cross
    skips: bool  # rows that the loss does not read stay

    @classmethod
    def of(
        cls,
        model: nn.Module,
        options: Options,
        graph: GraphSizes,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Plan:
        """``context``: in which forward passes run, where products have a number format of their own."""
        naive, in_shards = options.naive_halo, options.halo == "sequential"
        has_batch_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
        # Nothing looks at all rows before the first layer sums them: then its halo can be made here.
        is_made_here = bool(getattr(model, "begins_plain", False)) or not has_batch_norm
        # Shards are for memory, so nothing of the halo stays; sparse rows cannot cross between layers.
        num_plain = int(is_made_here and not naive and (graph.is_sparse or not in_shards))
        sizes = Sizes.of_many(graph.num_nodes)
        if naive:
            sizes = Sizes(graph.num_nodes, graph.num_nodes, graph.num_edges)
        with context():
            seen = crossings(model, graph.num_features, sizes, num_plain=num_plain, sends_narrow=not naive)
        if in_shards:
            _refuse_unsummed(model, seen)
        may_sum = options.halo_sums and options.halo not in ("sampled", "sequential") and not naive
        sums = [may_sum and each.is_linear for each in seen]
        return cls(has_batch_norm, num_plain, sizes, seen, sums, not (naive or has_batch_norm))

    @property
    def columns(self) -> list[int]:
        """That cross at each layer; 0: nothing."""
        return [each.columns for each in self.seen]

    def read(self, rows: Tensor, num_own: int) -> Tensor | None:
        """bool [n]: own rows of the last layer that the loss reads; None: all rows of all layers count as read."""
        if not self.skips:
            return None
        is_read = torch.zeros(num_own, dtype=torch.bool)
        is_read[rows] = True
        return is_read


def _refuse_unsummed(model: nn.Module, seen: Sequence[Seen]) -> None:
    for index, each in enumerate(seen):
        if each.columns and not each.is_linear:
            raise UnsupportedError(
                f"layer {index} of {type(model).__name__} needs all its neighbours' rows at once, and halo='sequential' "
                "lets each rank's rows go once they are summed: it needs GCN, SAGE (mean or sum), GIN or GCN2 layers"
            )
