"""Block: one bipartite layer, the only thing a GNN layer ever sees of a graph.

Legend: D destinations, S sources, E edges.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from polyhop.errors import GraphError
from polyhop.kernels import transpose
from polyhop.kernels.device import runs_on

__all__ = ["Block", "Transposed"]


@dataclass(frozen=True, eq=False)
class Transposed:
    """The same edges grouped by source, for backward passes. Within a source, edges keep ascending edge position."""

    indptr: Tensor  # int64 [S + 1]
    indices: Tensor  # [E] destination (0 .. D-1) of each edge
    places: Tensor | Callable[[], Tensor]  # ``edge``, or what makes it

    @cached_property
    def edge(self) -> Tensor:
        """[E]: position of the edge in the Block."""
        return self.places if isinstance(self.places, Tensor) else self.places()


@dataclass(frozen=True, eq=False)
class Block:
    """Edges from S source rows to D destination rows; destinations are source rows ``dst_start : dst_start + num_dst``.

    The full graph, a part's rows, a pipeline chunk and a sampled layer are all Blocks. Rows of ``h`` given to a layer are
    the S source rows, unless ``rows`` is set: then ``h`` is a pool and source s is pool row ``rows[s]``.
    """

    indptr: Tensor  # int64 [D + 1]
    indices: Tensor  # int32 or int64 [E]: source row of each edge, grouped by destination
    num_src: int
    dst_start: int = 0
    src_ids: Tensor | None = None  # int64 [S]: the user's global ids; None = 0 .. S-1
    edge_weight: Tensor | None = None  # float [E]
    in_degree: Tensor | None = (
        None  # int32 [S]: in-edges in the full graph, loops included; None = this block has all edges
    )
    in_weight: Tensor | None = None  # float [S]: sum of in-edge weights in the full graph; None = unweighted
    out_degree: Tensor | None = None  # int32 [S]: out-edges in the full graph
    loop_weight: Tensor | None = (
        None  # float [S]: weight of the node's own loop, 0 = none; None = the graph has no loops
    )
    rows: Tensor | None = None  # int64 [S]: row of each source in a pool; None = h holds the S rows in order
    is_sampled: bool = False  # some in-edges may be missing
    num_drawn: Tensor | None = (
        None  # int64 [D]: edges drawn for each destination, where some are summed elsewhere; None = all are here
    )
    _cache: dict[str, Any] = field(
        default_factory=dict, repr=False
    )  # what is derived from the edges, by name

    def __post_init__(self) -> None:
        if self.indptr.dim() != 1 or self.indptr.numel() < 1 or self.indptr.dtype != torch.int64:
            raise GraphError(
                f"block indptr: expected int64 [D + 1], got {self.indptr.dtype} {list(self.indptr.shape)}"
            )
        if self.indices.dtype not in (torch.int32, torch.int64):
            raise GraphError(f"block indices: expected int32 or int64, got {self.indices.dtype}")
        if self.dst_start < 0 or self.dst_start + self.num_dst > self.num_src:
            raise GraphError(
                f"block destinations {self.dst_start}..{self.dst_start + self.num_dst} exceed its {self.num_src} source rows"
            )

    @property
    def num_dst(self) -> int:
        return self.indptr.numel() - 1

    @property
    def num_edges(self) -> int:
        return self.indices.numel()

    @property
    def device(self) -> torch.device:
        return self.indices.device

    @property
    def drawn(self) -> Tensor:
        """int64 [D]: edges of each destination in this block."""
        return self.indptr.diff()

    @property
    def counted(self) -> Tensor:
        """int64 [D]: edges drawn for each destination, wherever they are summed."""
        return self.drawn if self.num_drawn is None else self.num_drawn

    def dst_rows(self, h: Tensor) -> Tensor:
        """The destinations' own rows of h [S, ...] (or of the pool, when ``rows`` is set)."""
        if self.rows is not None:
            return h[self.rows[self.dst_start : self.dst_start + self.num_dst]]
        return h[self.dst_start : self.dst_start + self.num_dst]

    def dst_ids(self) -> Tensor:
        """int64 [D]: the user's ids of the destinations."""
        if self.src_ids is None:
            return torch.arange(self.dst_start, self.dst_start + self.num_dst, device=self.device)
        return self.src_ids[self.dst_start : self.dst_start + self.num_dst]

    def transposed(self) -> Transposed:
        """Edges grouped by source; built once and kept.

        On a device, whose memory is short, a graph whose edges all go both ways keeps them once, and positions, which only
        weighted edges need, are made when they are asked for.
        """
        if "t" not in self._cache:
            made = Transposed(*transpose(self.indptr, self.indices, self.num_src))
            self._cache["t"] = self._without_copies(made) if runs_on(self.indices) else made
        kept: Transposed = self._cache["t"]
        return kept

    def _without_copies(self, made: Transposed) -> Transposed:
        indptr, indices, num_src, places = self.indptr, self.indices, self.num_src, made.places
        if self.edge_weight is None:
            places = partial(_places, indptr, indices, num_src)
        if not self.is_sampled and torch.equal(made.indptr, indptr) and torch.equal(made.indices, indices):
            return Transposed(
                indptr, indices, places
            )  # edges that were sampled hardly do; asking waits for the device
        return replace(made, places=places)

    def to(self, device: torch.device | str) -> Block:
        """This block on another device."""
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **moved, _cache={})


def _places(indptr: Tensor, indices: Tensor, num_src: int) -> Tensor:
    return transpose(indptr, indices, num_src)[2]
