"""HaloBlock: a part's rows as a layer's sources and destinations at once; sources elsewhere are asked for by the layer.

Own rows are ordered central first (all their sources are own rows), marginal last (some sources are in the halo). Both are
plain Blocks, so what needs no other rank can be computed while the halo's rows are on their way:

    central     destinations 0 .. c - 1      sources: own rows 0 .. n - 1
    marginal    destinations c .. n - 1      sources: own rows f .. n - 1, then the halo

where f is the first own row that a marginal destination reads or is. To a model it looks like a block of n rows, square on a
full graph; of a mini-batch that ranks share, destinations are the first d of the n own rows (n above stands for d then).

Legend: n own rows, d destinations, c central rows, H halo rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from polyhop.errors import GraphError
from polyhop.graph.block import Block, Transposed
from polyhop.kernels import transpose

__all__ = ["Channel", "HaloBlock", "Reader", "Shard", "Sizes", "Sums"]


@dataclass(frozen=True)
class Sizes:
    """What decides the order of map and aggregation, where it is not a block's own sizes."""

    num_src: int
    num_dst: int
    num_edges: int

    @classmethod
    def of_many(cls, num_nodes: int) -> Sizes:
        """So many edges that products cost nothing beside them: the narrower rows win, on all ranks alike."""
        return cls(num_nodes, num_nodes, 1 << 40)


class Reader(Protocol):
    """The layer that reads what a channel brings."""

    @property
    def is_linear(self) -> bool:
        """Whether it sums what it reads, so that sums of rows serve as well as rows."""
        ...

    def weights(self) -> Tensor:
        """float64 [H]: how much an error in each halo row matters to it."""
        ...

    def sum_weights(self) -> Tensor:
        """float64 [Q]: how much an error in the gradient of each sum that left matters to the rows it was made of."""
        ...

    @property
    def num_summed(self) -> int:
        """n - c: rows that read the halo."""
        ...

    def add_shard(self, sums: Tensor, rank: int, rows: Tensor) -> None:
        """Add what marginal rows sum of the rows [k, F] of one rank to ``sums`` [n - c, F]; only of a block in shards."""
        ...

    def shard_grad(self, grad: Tensor, rank: int) -> Tensor:
        """[k, F]: the gradients of these rows, of those of the sums [n - c, F]."""
        ...


@dataclass(frozen=True, eq=False)
class Sums:
    """Rows that cross as sums: of this rank's rows for destinations elsewhere (leaving), and of theirs (arriving).

    Where a destination reads many rows of a part that nobody else there reads, their sum is one row instead of many.
    """

    indptr: Tensor  # int64 [Q + 1]: sums that leave, those for rank 0 first
    indices: Tensor  # int32 [E]: own row of each edge
    weight: Tensor | None  # float [E]
    num_own: int
    at: Tensor  # int64 [A]: halo row of each sum that arrives
    to: Tensor  # int64 [A]: marginal destination (0 .. n - c - 1) that it belongs to
    _cache: dict[str, Transposed] = field(default_factory=dict, repr=False)

    def transposed(self) -> Transposed:
        """The edges of the sums that leave, grouped by own row; built once and kept."""
        if "t" not in self._cache:
            self._cache["t"] = Transposed(*transpose(self.indptr, self.indices, self.num_own))
        return self._cache["t"]

    def to_device(self, device: torch.device, dtype: torch.dtype) -> Sums:
        """The same where computing happens, weights in its format."""
        weight = None if self.weight is None else self.weight.to(device, dtype)
        moved = [each.to(device) for each in (self.indptr, self.indices, self.at, self.to)]
        return Sums(moved[0], moved[1], weight, self.num_own, moved[2], moved[3])


@dataclass(frozen=True, eq=False)
class Shard:
    """The edges by which marginal rows read the halo rows of one rank."""

    start: int  # its rows among the halo's
    stop: int
    indptr: Tensor  # int64 [k + 1]
    indices: Tensor  # int32 or int64 [E]: its row (0 .. stop - start - 1) of each edge
    to: Tensor  # int64 [k]: marginal row (0 .. n - c - 1) of each destination; those with an edge
    edge: Tensor | None  # int64 [E]: the edge's place in the marginal block; None where edges have no weight
    _cache: dict[str, Transposed] = field(default_factory=dict, repr=False)

    def transposed(self) -> Transposed:
        """The same edges grouped by halo row, their other ends being marginal rows; built once and kept."""
        if "t" not in self._cache:
            found = Transposed(*transpose(self.indptr, self.indices, self.stop - self.start))
            to = self.to[found.indices.long()].to(self.indices.dtype)
            self._cache["t"] = replace(found, indices=to)
        return self._cache["t"]


class Channel(Protocol):
    """Takes rows of one layer to the ranks that read them, and gradients of those rows back."""

    def leave(
        self, rows: Tensor, first: int, reader: Reader | None = None, sums: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
        """Begin to send own rows [n, ...]: (the rows, those from ``first`` on, a call that gives the halo's [H, ...]).

        Use what is returned and not what was given: gradients of all three meet in it. All ranks call it together.
        ``sums`` [Q, ...] leave with them.
        """
        ...


@dataclass(frozen=True, eq=False, kw_only=True)
class HaloBlock(Block):
    """``indptr`` and ``indices`` are those of all in-edges, indices from n on being the halo's rows; ``num_src`` is n."""

    central: Block
    marginal: Block
    first: int  # f
    channel: Channel
    sizes: Sizes  # of the whole graph: every rank must pick the same order of map and aggregation
    sends_narrow: bool = True  # mapped rows cross where they are narrower than the input
    returns: bool = True  # gradients of input rows that crossed return; those of fixed ones do not
    sums: Sums | None = None  # None: all rows cross as they are
    shards: tuple[Shard, ...] | None = (
        None  # of each rank: the channel gives sums over them [n - c, ...] in place of the halo's rows
    )
    own: Block | None = None  # where there are shards: marginal destinations, sources: own rows from f on

    @classmethod
    def of(
        cls,
        complete: Block,
        num_central: int,
        channel: Channel,
        sizes: Sizes,
        *,
        sends_narrow: bool = True,
        returns: bool = True,
        sums: Sums | None = None,
        wanted: Sequence[int] | None = None,
        num_own: int | None = None,
    ) -> HaloBlock:
        """From the block of all in-edges, whose sources are the n own rows, central first, and the halo behind.

        ``wanted``: halo rows of each rank, where they are to be summed in shards. ``num_own``: n; None: all own rows are
        destinations.
        """
        n, cut = num_own or complete.num_dst, int(complete.indptr[num_central])
        if complete.dst_start != 0 or (cut and int(complete.indices[:cut].max()) >= n):
            raise GraphError(
                f"halo block: expected {num_central} central rows first, whose sources are among the {n} own rows"
            )
        read = complete.indices[cut:]
        first = min(num_central, int(read.min()) if read.numel() else num_central)
        central = _slice(complete, 0, num_central, 0, n)
        marginal = _slice(complete, num_central, complete.num_dst, first, complete.num_src)
        return cls(
            indptr=complete.indptr,
            indices=complete.indices,
            num_src=n,
            src_ids=None if complete.src_ids is None else complete.src_ids[:n],
            edge_weight=complete.edge_weight,
            is_sampled=complete.is_sampled,
            central=central,
            marginal=marginal,
            first=first,
            channel=channel,
            sizes=sizes,
            sends_narrow=sends_narrow,
            returns=returns,
            sums=sums,
            shards=None if wanted is None else _shards(marginal, n - first, wanted),
            own=None if wanted is None else _own_edges(marginal, n - first),
        )

    @property
    def complete(self) -> Block:
        """All in-edges, from the n own rows and the halo's."""
        if "complete" not in self._cache:
            halo = self.marginal.num_src - (self.num_src - self.first)
            ids = self.src_ids if self.src_ids is None else _joined(self.src_ids, self.marginal.src_ids, halo)
            self._cache["complete"] = Block(
                self.indptr, self.indices, self.num_src + halo, src_ids=ids, edge_weight=self.edge_weight,
                is_sampled=self.is_sampled,
            )  # fmt: skip
        kept: Block = self._cache["complete"]
        return kept


def _joined(own: Tensor, of_marginal: Tensor | None, num_halo: int) -> Tensor:
    assert of_marginal is not None
    return torch.cat([own, of_marginal[of_marginal.numel() - num_halo :]])


def _slice(complete: Block, start: int, stop: int, first: int, end: int) -> Block:
    """Destinations start .. stop - 1 with the sources first .. end - 1."""
    low, high = int(complete.indptr[start]), int(complete.indptr[stop])
    indices, weight = complete.indices[low:high], complete.edge_weight
    per_source = {
        name: getattr(complete, name)[first:end]
        for name in ("src_ids", "in_degree", "in_weight", "out_degree", "loop_weight")
        if getattr(complete, name) is not None
    }
    return Block(
        complete.indptr[start : stop + 1] - low,
        indices if first == 0 else indices - first,
        end - first,
        dst_start=start - first,
        edge_weight=None if weight is None else weight[low:high],
        is_sampled=complete.is_sampled,
        num_drawn=None if complete.num_drawn is None else complete.num_drawn[start:stop],
        **per_source,
    )


def _shards(marginal: Block, num_own: int, wanted: Sequence[int]) -> tuple[Shard, ...]:
    """The edges from sources num_own .. of a block, cut by rank."""
    at = torch.repeat_interleave(torch.arange(marginal.num_dst, device=marginal.device), marginal.drawn)
    found, start = [], 0
    for count in wanted:
        low, high = num_own + start, num_own + start + count
        edge = ((marginal.indices >= low) & (marginal.indices < high)).nonzero()[:, 0]
        to, counts = torch.unique_consecutive(at[edge], return_counts=True)
        indptr = torch.zeros(to.numel() + 1, dtype=torch.int64, device=marginal.device)
        torch.cumsum(counts, 0, out=indptr[1:])
        kept = None if marginal.edge_weight is None else edge
        found.append(Shard(start, start + count, indptr, marginal.indices[edge] - low, to, kept))
        start += count
    return tuple(found)


def _own_edges(marginal: Block, num_own: int) -> Block:
    """The edges from the first sources of a block alone."""
    is_own = marginal.indices < num_own
    before = torch.zeros(marginal.num_edges + 1, dtype=torch.int64, device=marginal.device)
    torch.cumsum(is_own, 0, out=before[1:])
    per_source = {
        name: getattr(marginal, name)[:num_own]
        for name in ("src_ids", "in_degree", "in_weight", "out_degree", "loop_weight")
        if getattr(marginal, name) is not None
    }
    return Block(
        before[marginal.indptr],
        marginal.indices[is_own],
        num_own,
        dst_start=marginal.dst_start,
        edge_weight=None if marginal.edge_weight is None else marginal.edge_weight[is_own],
        **per_source,
    )
