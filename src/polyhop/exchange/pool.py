"""A pool of input rows that a rank does not read in place: fetched once, kept from window to window within a budget.

A window is a few mini-batches loaded together. ``take`` gives each of its nodes a slot; rows that a slot holds already are
not fetched again. Room is made by the row that was used least recently, and never by one that a window in flight reads: the
one being trained while this one loads. What is evicted depends on windows alone, not on timing, so what is sent can be
accounted.

Legend: C slots, n nodes of a window, F features.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from polyhop.comm import Collective
from polyhop.errors import PeerError
from polyhop.exchange.features import NodeFacts, RowFetch, RowFormat
from polyhop.exchange.sparse_table import SparseTable
from polyhop.graph import SparseRows

__all__ = ["Pool", "pool_row_bytes"]

_FREE, _FOREVER = -1, 1 << 62
_BOOK_BYTES = 8 + 8 + 8 + 4  # id, slot, last window, windows so far


def pool_row_bytes(layout: RowFormat, num_values: int, value_bytes: int = 4) -> int:
    """Bytes that a slot takes: a row of so many values as floats, the node's facts, and the books."""
    facts = 8 + 4 + (8 if layout.facts.is_weighted else 0) + (4 if layout.facts.has_loops else 0)
    return num_values * value_bytes + facts + _BOOK_BYTES


class Pool:
    """``capacity`` slots. ``take`` serves the thread that loads, ``release`` any other.

    ``keeps`` False: a window begins with nothing, as if there had been none before it.
    """

    def __init__(self, fetch: RowFetch, capacity: int, *, keeps: bool = True) -> None:
        self.fetch, self.capacity, self.keeps = fetch, capacity, keeps
        self.num_fetched = 0  # rows, so far
        self.most_used = 0  # slots that were taken at once, so far
        self._ids = torch.empty(0, dtype=torch.int64)  # what slots hold, ascending
        self._slots = torch.empty(0, dtype=torch.int64)  # and which
        self._top = 0  # slots from here on were never taken: their memory is untouched
        self._last = torch.empty(capacity, dtype=torch.int64)  # window of last use
        self._uses = torch.empty(capacity, dtype=torch.int32)  # windows that used it
        self._dense: Tensor | None = None  # [C, F]
        self._sparse: SparseTable | None = None  # row _place[slot] of it
        self._place = torch.full((capacity if self.is_sparse else 0,), _FREE, dtype=torch.int64)
        self._facts: NodeFacts | None = None  # of each slot
        self._changed = threading.Condition()
        self._released = -1

    @property
    def values(self) -> Tensor:
        """[C, F]: the rows; those of free slots are anything."""
        if self._dense is None:  # nothing was ever fetched
            return torch.empty(0, 0)
        return self._dense

    @property
    def is_sparse(self) -> bool:
        return self.fetch.format.codec is None

    def sparse(self, slots: Tensor) -> SparseRows:
        """The rows of some slots, in order, where rows are sparse."""
        if self._sparse is None:  # nothing was ever fetched, and slots are none
            nothing = self.fetch.own(slots)
            assert isinstance(nothing, SparseRows)
            return nothing
        return self._sparse.gather(self._place[slots])

    def facts(self, slots: Tensor) -> NodeFacts:
        assert self._facts is not None, "asked after something was fetched"
        return self._facts.at(slots)

    def release(self, window: int) -> None:
        """Nobody reads the rows of this window, or of one before it, any more."""
        with self._changed:
            self._released = max(self._released, window)
            self._changed.notify_all()

    def wait_released(self, window: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._released >= window)

    def pin(self, line: Collective, ids: Tensor) -> None:
        """Fetch these nodes (int64, ascending) and keep them for good. Before the first window; at most C of them."""
        slots = self.take(line, ids, 0, in_flight=0)
        self._last[slots] = _FOREVER
        if not self.keeps:
            self._list(ids, slots)

    def last_used(self, ids: Tensor) -> Tensor:
        """int64 [n]: the last window that used each of distinct nodes (int64 [n]); long ago where no slot holds it."""
        last = torch.full_like(ids, -_FOREVER)
        slots, is_held = self._find(ids)
        last[is_held] = self._last[slots[is_held]]
        return last

    def room(self, window: int, *, in_flight: int) -> int:
        """Slots that a window may take besides those that windows in flight read."""
        return self.capacity - int((self._last[: self._top] >= window - in_flight).sum())

    def take(self, line: Collective, ids: Tensor, window: int, *, in_flight: int) -> Tensor:
        """int64 [n]: slots of distinct nodes (int64 [n], ascending), missing ones fetched. All ranks call it together."""
        if not self.keeps:
            self._forget(window - in_flight)
        slots, is_held = self._find(ids)
        found = slots[is_held]
        self._last[found] = torch.maximum(self._last[found], torch.tensor(window))
        missing = (~is_held).nonzero()[:, 0]
        fresh = self._empty_slots(missing.numel(), window, in_flight)
        slots[missing], self._last[fresh], self._uses[fresh] = fresh, window, 0
        if self.is_sparse:
            self._place[fresh] = _FREE
        wanted = ids[missing]
        for piece in self.fetch.pieces(line, wanted):
            self._store(fresh[piece.at], piece.x, piece.facts)
        self.num_fetched += missing.numel()
        self._uses[slots] += 1
        if self.keeps:
            self._list(wanted, fresh)
        return slots

    def _find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(slot int64 [n], is it held bool [n]); slots of others are 0."""
        if not self._ids.numel():
            return torch.zeros_like(ids), torch.zeros(ids.numel(), dtype=torch.bool)
        at = torch.searchsorted(self._ids, ids).clamp_(max=self._ids.numel() - 1)
        is_held = self._ids[at] == ids
        return torch.where(is_held, self._slots[at], 0), is_held

    def _empty_slots(self, count: int, window: int, in_flight: int) -> Tensor:
        """Free slots, after those that were used longest ago, and least often, were freed."""
        last = self._last[: self._top]
        free = (last == _FREE).nonzero()[:, 0]
        lacking = count - free.numel() - (self.capacity - self._top)
        if lacking > 0:
            old = ((last != _FREE) & (last < window - in_flight)).nonzero()[:, 0]
            assert old.numel() >= lacking, "the caller asked how much room there is"
            order = torch.sort((last[old] << 24) + self._uses[old], stable=True).indices
            last[old[order[:lacking]]] = _FREE
            self._leave()
            free = (last == _FREE).nonzero()[:, 0]
        self.most_used = max(self.most_used, self._top - free.numel() + count)
        untouched = torch.arange(self._top, self._top + max(0, count - free.numel()))
        self._top += untouched.numel()
        return torch.cat([free[:count], untouched])

    def _forget(self, oldest: int) -> None:
        last = self._last[: self._top]
        last[last < oldest] = _FREE

    def _leave(self) -> None:
        """Take those that were freed off the list."""
        stays = self._last[self._slots] != _FREE
        self._ids, self._slots = self._ids[stays], self._slots[stays]

    def _list(self, ids: Tensor, slots: Tensor) -> None:
        merged = torch.sort(torch.cat([self._ids, ids]))
        self._ids, self._slots = merged.values, torch.cat([self._slots, slots])[merged.indices]

    def _store(self, slots: Tensor, rows: Tensor | SparseRows, facts: NodeFacts) -> None:
        if rows.shape[0] != slots.numel():
            raise PeerError(f"a peer sent {rows.shape[0]} rows of {slots.numel()} that it was asked for")
        if self._facts is None:
            self._facts = _room_for(facts, self.capacity)
        for name in ("user_ids", "in_degree", "in_weight", "loop_weight"):
            to, given = getattr(self._facts, name), getattr(facts, name)
            if to is not None:
                to.index_copy_(0, slots, given)
        if isinstance(rows, SparseRows):
            self._store_sparse(slots, rows)
            return
        if self._dense is None:
            self._dense = torch.empty(self.capacity, rows.shape[1], dtype=rows.dtype)
        self._dense.index_copy_(0, slots, rows)

    def _store_sparse(self, slots: Tensor, rows: SparseRows) -> None:
        """Rows differ in length: they have places in a table, not in slots."""
        if self._sparse is None:
            self._sparse = SparseTable(rows)
            self._place[slots] = torch.arange(slots.numel())
            return
        self._place[slots] = self._sparse.add(rows)
        is_kept = (self._place[: self._top] != _FREE) & (self._last[: self._top] != _FREE)
        kept = is_kept.nonzero()[:, 0]
        if self._sparse.has_waste(self._place[kept]):
            self._sparse.keep(self._place[kept])
            self._place.fill_(_FREE)
            self._place[kept] = torch.arange(kept.numel())


def _room_for(facts: NodeFacts, count: int) -> NodeFacts:
    def like(given: Tensor | None) -> Tensor | None:
        return None if given is None else torch.empty(count, dtype=given.dtype)

    ids, degree = like(facts.user_ids), like(facts.in_degree)
    assert ids is not None
    assert degree is not None
    return NodeFacts(ids, degree, like(facts.in_weight), like(facts.loop_weight))
