"""Features by columns: from rows that their owners hold to a slice of the columns of all nodes on every rank.

Done once, before training, in rounds of bounded memory. With the columns comes what is known of every node (the user's id,
degrees, weights), so that any rank can make any block's factors by itself.

Legend: N nodes, n own nodes, P ranks, F features, c columns of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhop.comm import Collective
from polyhop.comm.collective import slices
from polyhop.errors import ConfigError
from polyhop.exchange.codec import RowCodec
from polyhop.exchange.features import FactFormat, NodeFacts, RowFormat
from polyhop.graph import AnyPart, DenseFeatures, FeatureStore, MatrixFeatures, SparseRows

__all__ = ["MEMORY_BYTES", "Columns", "num_rounds", "spread_columns"]

MEMORY_BYTES = 1 << 28
"""Of rows on their way, unless told otherwise."""


@dataclass(frozen=True, eq=False)
class Columns:
    """What one rank holds of all nodes, by new id."""

    bounds: Sequence[int]  # P + 1: rank k has columns bounds[k] .. bounds[k + 1] - 1
    rank: int
    x: DenseFeatures  # [N, c]
    facts: NodeFacts  # of N nodes

    @property
    def own(self) -> slice:
        return slice(self.bounds[self.rank], self.bounds[self.rank + 1])

    @property
    def num_own(self) -> int:
        return self.x.num_features

    @property
    def holders(self) -> list[int]:
        """Ranks that have columns: not all where there are fewer columns than ranks."""
        return [k for k in range(len(self.bounds) - 1) if self.bounds[k] < self.bounds[k + 1]]


def spread_columns(
    part: AnyPart, num_nodes: int, line: Collective, dtype: str = "auto", *, memory_bytes: int = MEMORY_BYTES
) -> Columns:
    """This rank's columns of all nodes, as ``dtype`` (a ``--feature-dtype``; sparse rows dense). All ranks call it."""
    assert part.x is not None, "a share is checked to have features"
    source = _Source.of(part.x, dtype)
    bounds = slices(part.x.num_features, line.num_ranks)
    own = slice(bounds[line.rank], bounds[line.rank + 1])
    values = torch.empty(num_nodes, own.stop - own.start, dtype=source.dtype)
    sizes = part.bounds.diff().tolist()
    rounds = num_rounds(max(sizes), part.x.num_features, source.dtype, memory_bytes)
    cuts = [slices(size, rounds) for size in sizes]
    for at in range(rounds):
        rows = source.rows(torch.arange(cuts[line.rank][at], cuts[line.rank][at + 1]))
        leaving = [_flat(rows[:, bounds[q] : bounds[q + 1]]) for q in range(line.num_ranks)]
        counts = [(cut[at + 1] - cut[at]) * values.shape[1] * source.dtype.itemsize for cut in cuts]
        for p, piece in enumerate(line.all_to_all(leaving, kind="features", counts=counts)):
            start = int(part.bounds[p])
            placed = values[start + cuts[p][at] : start + cuts[p][at + 1]]
            placed.copy_(piece.cpu().view(source.dtype).view_as(placed))
    scale = None if source.scale is None else source.scale[own].clone()
    layout = RowFormat.of(part, num_nodes, "auto").facts
    return Columns(bounds, line.rank, DenseFeatures(values, scale), _all_facts(part, layout, line, sizes))


def num_rounds(
    most_rows: int, num_features: int, dtype: torch.dtype, memory_bytes: int = MEMORY_BYTES
) -> int:
    """In which so many rows of a part leave: read, cut into columns and received, three times in memory."""
    return -(-most_rows // max(1, memory_bytes // (3 * max(1, num_features) * dtype.itemsize)))


@dataclass(frozen=True, eq=False)
class _Source:
    """Own rows as they are sent and held."""

    x: FeatureStore
    dtype: torch.dtype
    scale: Tensor | None  # float32 [F]
    is_stored: bool

    @classmethod
    def of(cls, x: FeatureStore, name: str) -> _Source:
        if not isinstance(x, MatrixFeatures):
            return cls(x, torch.float32, None, is_stored=False)
        codec = RowCodec.of(name, x.num_features, x.dtype)
        if codec.is_quantised:
            raise ConfigError(
                "feature_dtype='int8' rounds whole rows by one scale, and ranks would hold slices of them: use 'bfloat16' "
                "or 'auto'"
            )
        is_stored = codec.dtype == x.dtype
        return cls(x, codec.dtype, x.scale if is_stored else None, is_stored)

    def rows(self, ids: Tensor) -> Tensor:
        if self.is_stored:
            assert isinstance(self.x, MatrixFeatures)
            return self.x.stored(ids)
        rows = self.x.gather(ids)
        return (rows.dense() if isinstance(rows, SparseRows) else rows).to(self.dtype)


def _flat(rows: Tensor) -> Tensor:
    """uint8 of any rows."""
    return rows.contiguous().view(-1).view(torch.uint8)


def _all_facts(part: AnyPart, layout: FactFormat, line: Collective, sizes: Sequence[int]) -> NodeFacts:
    own = layout.encode(NodeFacts(*part.facts_of(torch.arange(part.num_nodes))))
    counts = [size * layout.num_bytes for size in sizes]
    pieces = line.all_gather(own, kind="features", counts=counts)
    return NodeFacts.joined(
        [layout.decode(piece.cpu(), size) for piece, size in zip(pieces, sizes, strict=True)]
    )
