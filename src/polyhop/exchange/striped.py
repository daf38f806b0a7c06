"""Hot rows striped over the memory of several ranks (Quiver's clique): one cache of them all, each row in it once.

    ranks      neighbours in rank order, such as those of one host; every such group has a cache of its own
    position   of a row among the group's hot ones, the hottest first: rank (position mod size), place (position // size)
    a fetch    reads own rows at home, asks for hot rows their holder (one in so many is here) and for others their owner

A cache that every rank fills for itself sends nothing for its rows, but all ranks keep the same hottest ones. Striped rows
are as many times more, and most of those are sent. That pays where ranks of a group reach each other faster than the owners,
where rows are on their owner's disk, and where one owner is asked more than others: rows next to each other in heat have
different holders. Kept rows are the very bytes that their owners send.

One message to each rank, as without: rows of its part, and, behind the last of its n, kept rows as n + place.

Legend: K hot rows of a group, k of them held here, S nodes asked for, n nodes of a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhop.comm import Collective, Pending
from polyhop.errors import PeerError, UnsupportedError
from polyhop.exchange.features import NodeFacts, Piece, RowFetch, RowFormat
from polyhop.graph import AnyPart, SparseRows
from polyhop.kernels.owners import by_owner
from polyhop.sample.wire import Wire

__all__ = ["StripedFetch", "Stripes"]


@dataclass(frozen=True, eq=False)
class Stripes:
    """Where the hot rows of a group of ranks lie."""

    ids: Tensor  # int64 [K], ascending new ids
    position: Tensor  # int64 [K]
    first: int  # rank of the group
    size: int  # ranks in it

    @classmethod
    def of(cls, hottest: Tensor, first: int, size: int) -> Stripes:
        """``hottest`` int64 [K]: new ids, the hottest first."""
        order = torch.sort(hottest).indices
        return cls(hottest[order], order, first, size)

    def find(self, ids: Tensor, start: int | Tensor, stop: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the hot ones among nodes (int64 [S], new ids) that are not the reader's own, start .. stop - 1: int64 each,
        (where in ``ids``, holder, place), by holder, then by place."""
        if not self.ids.numel():
            return ids[:0], ids[:0], ids[:0]
        found = torch.searchsorted(self.ids, ids).clamp_(max=self.ids.numel() - 1)
        is_hot = (self.ids.index_select(0, found) == ids) & ((ids < start) | (ids >= stop))
        at = is_hot.nonzero()[:, 0]
        position = self.position[found[at]]
        holder, place = position % self.size, position // self.size
        order = torch.argsort(holder * (self.ids.numel() // self.size + 1) + place)
        return at[order], self.first + holder[order], place[order]

    def held_by(self, rank: int) -> Tensor:
        """int64: new ids of the rows that a rank holds, by place."""
        by_position = torch.empty_like(self.ids)
        by_position[self.position] = self.ids
        return by_position[rank - self.first :: self.size]


@dataclass(frozen=True, eq=False)
class _Held:
    """Rows as they are sent, and their facts, by place."""

    values: Tensor  # uint8 [k, bytes]
    scale: Tensor | None  # uint8 [k, 4], where rows have one
    facts: NodeFacts

    @classmethod
    def empty(cls, layout: RowFormat, facts: NodeFacts) -> _Held:
        assert layout.codec is not None
        scale = 4 if layout.codec.is_quantised else 0
        values = torch.empty(0, layout.codec.row_bytes - scale, dtype=torch.uint8)
        return cls(values, torch.empty(0, scale, dtype=torch.uint8) if scale else None, facts)

    def added(self, data: Tensor, facts: NodeFacts) -> _Held:
        """With the rows of a message behind; as the codec lays them out: values of all rows, then their scales."""
        count, width = facts.user_ids.numel(), self.values.shape[1]
        values = torch.cat([self.values, data[: count * width].view(count, width)])
        scale = self.scale
        if scale is not None:
            scale = torch.cat([scale, data[count * width :].view(count, 4)])
        return _Held(values, scale, NodeFacts.joined([self.facts, facts]))

    def at(self, places: Tensor) -> _Held:
        scale = None if self.scale is None else self.scale.index_select(0, places)
        return _Held(self.values.index_select(0, places), scale, self.facts.at(places))

    def message(self, layout: RowFormat) -> Tensor:
        """uint8: as their owner would send them."""
        pieces = [self.values, *([] if self.scale is None else [self.scale])]
        return torch.cat([*(piece.reshape(-1) for piece in pieces), layout.facts.encode(self.facts)])

    @property
    def num_bytes(self) -> int:
        facts = self.facts
        kept = [self.values, self.scale, facts.user_ids, facts.in_degree, facts.in_weight, facts.loop_weight]
        return sum(each.numel() * each.element_size() for each in kept if each is not None)


class StripedFetch(RowFetch):
    """Fetches for one rank and answers the others, with a cache that it shares with some of them."""

    def __init__(self, part: AnyPart, layout: RowFormat, wire: Wire) -> None:
        super().__init__(part, layout, wire)
        if layout.codec is None:
            raise UnsupportedError(
                "cache_ranks: rows of sparse features differ in length and cannot be striped; use cache alone"
            )
        assert layout.row_bytes is not None
        self._row_bytes = layout.row_bytes
        self._stripes: Stripes | None = None
        self._held: _Held

    def kept_bytes(self, size: int) -> int:
        """Of a row that a rank of a group of that size holds, with what it knows of as many rows of each other rank."""
        return self._row_bytes + (8 - self.format.facts.id_dtype.itemsize) + 16 * size

    @property
    def num_cached(self) -> int:
        return 0 if self._stripes is None else self._held.values.shape[0]

    @property
    def cached_bytes(self) -> int:
        """That the cache takes of this rank's memory."""
        if self._stripes is None:
            return 0
        return self._held.num_bytes + 16 * self._stripes.ids.numel()

    def stripe(self, line: Collective, stripes: Stripes) -> None:
        """Fetch the rows that this rank is to hold, once. All ranks call it together."""
        own, wanted = line.rank, stripes.held_by(line.rank)
        order, rows, counted = by_owner(wanted, [0, wanted.numel()], self.part.bounds, own, is_sorted=True)
        asked = _cut(rows, counted[:, 0].tolist())
        arriving, held = self._ask(line, asked), _Held.empty(self.format, self.own_facts(wanted[:0]))
        for q, data in enumerate(arriving.wait()):
            message = self._encoded(asked[own]) if q == own else data
            held = held.added(*self.format.opened(message, asked[q].numel()))
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel())
        self._stripes, self._held = stripes, held.at(back)

    def pieces(self, line: Collective, ids: Tensor) -> list[Piece]:
        if self._stripes is None:
            return super().pieces(line, ids)
        own, bounds = line.rank, self.part.bounds
        hot, holder, place = self._stripes.find(ids, bounds[own], bounds[own + 1])
        is_cold = torch.ones_like(ids, dtype=torch.bool)
        is_cold[hot] = False
        cold = is_cold.nonzero()[:, 0]
        order, rows, counted = by_owner(ids[cold], [0, cold.numel()], bounds, own, is_sorted=True)
        counts = counted[:, 0].tolist(), torch.bincount(holder, minlength=line.num_ranks).tolist()
        owned_at, asked = _cut(cold[order], counts[0]), _cut(rows, counts[0])
        kept_at, places = _cut(hot, counts[1]), _cut(place, counts[1])
        sizes = bounds.diff().tolist()
        arriving = self._ask(
            line, [torch.cat([asked[q], sizes[q] + places[q]]) for q in range(line.num_ranks)]
        )
        found = [
            Piece(owned_at[own], self.own(asked[own]), self.own_facts(asked[own])),
            Piece(
                kept_at[own], *self._decoded(self._held.at(places[own]).message(self.format), counts[1][own])
            ),
        ]
        for q, data in enumerate(arriving.wait()):
            if q != own:
                cut = counts[0][q] * self._row_bytes
                found.append(Piece(owned_at[q], *self._decoded(data[:cut], counts[0][q])))
                found.append(Piece(kept_at[q], *self._decoded(data[cut:], counts[1][q])))
        return found

    def _ask(self, line: Collective, asked: Sequence[Tensor]) -> Pending[list[Tensor]]:
        """What other ranks have for the numbers that they are asked for: rows of theirs, and behind those, places."""
        own = line.rank
        nothing = asked[own][:0]
        arriving = line.all_to_all(
            [self.wire.request(nothing if q == own else each) for q, each in enumerate(asked)], kind="ids"
        )
        counts = [0 if q == own else self._row_bytes * each.numel() for q, each in enumerate(asked)]
        replies = [self._answer(q, data) for q, data in enumerate(arriving)]
        return line.start_all_to_all(replies, kind="features", counts=counts)

    def _answer(self, reader: int, data: Tensor) -> Tensor:
        if data.numel() == 0:
            return data
        numbers, size = self.wire.rows(data), self.part.num_nodes
        cut = int((numbers < size).sum())
        own, places = numbers[:cut], numbers[cut:] - size
        if not places.numel():
            return self._encoded(own)
        if self._stripes is None or int(places.max()) >= self.num_cached:
            raise PeerError(
                f"rank {reader} asked for the kept row {int(places.max())}: {self.num_cached} are kept here"
            )
        kept = self._held.at(places).message(self.format)
        return torch.cat([self._encoded(own), kept]) if cut else kept

    def _encoded(self, rows: Tensor) -> Tensor:
        """uint8: own rows as they are sent."""
        return self.format.encode(rows, self._x, self.own_facts(rows))

    def _decoded(self, data: Tensor, num_rows: int) -> tuple[Tensor | SparseRows, NodeFacts]:
        aligned = data if data.storage_offset() % 8 == 0 else data.clone()
        return self.format.decode(aligned, num_rows, self._x)


def _cut(values: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """One piece for each rank."""
    return list(torch.split(values, list(counts)))
