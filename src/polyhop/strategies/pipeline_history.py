"""History: what a stage keeps of every row from epoch to epoch, and the gradients that chunks add to one another's rows.

For each layer that reads rows of other chunks there is one table of all rows, before dropout; where ways share the chunks,
of a way's own rows and its halo. A chunk overwrites its own rows; so others find those of this epoch if it was before them
or beside them (of another way, in the same tick), and else the history: of the epoch before (period 1), or of the last
refresh, at most ``period`` epochs ago. Tables are filled by an exact sweep before the first epoch.

The meter counts what was read: rows of this epoch and of the history, how old those were, and how far they were off, which
is known once their chunk has its turn: |new - old|^2 / |new|^2 over a chunk, weighted by how much of it was read.

Legend: N rows, F columns, K chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polyhop.kernels import scatter_add_rows
from polyhop.strategies.pipeline_chunks import Chunk, Chunks
from polyhop.strategies.pipeline_given import PastGradients
from polyhop.strategies.pipeline_past import Past, Spec

__all__ = ["History", "Meter", "Spec"]


@dataclass
class Meter:
    """Of one epoch on one stage, all layers together."""

    current_rows: int = 0  # read of chunks that had had their turn
    history_rows: int = 0  # read of those that had not
    ages: dict[int, int] = field(default_factory=dict)  # epochs -> history rows of that age
    error: float = 0.0
    size: float = 0.0

    @property
    def oldest(self) -> int:
        """Epochs; 0 where no history was read."""
        return max(self.ages, default=0)

    @property
    def relative_error(self) -> float:
        """Of the history that was read: root of the mean square of what was off, relative to what it should have been."""
        return (self.error / self.size) ** 0.5 if self.size else 0.0


class History:
    """Tables of one stage. ``layers``: of each layer whose input it keeps, what a row of it is.

    ``replays``: what a chunk read can be read again after chunks behind it have overwritten it (see ``replayed``).
    """

    def __init__(
        self,
        chunks: Chunks,
        layers: dict[int, Spec],
        period: int,
        gamma: float,
        device: torch.device,
        *,
        replays: bool = False,
        compensates: bool = False,
    ) -> None:
        self.chunks, self.period, self.gamma = chunks, period, gamma
        self.layers = sorted(layers)
        num_rows, num_chunks = chunks.num_rows, len(chunks)

        def tables() -> dict[int, Tensor]:
            return {
                layer: torch.zeros(num_rows, *shape, dtype=dtype, device=device)
                for layer, (shape, dtype) in layers.items()
            }

        self.rows = tables()
        self.kept = tables() if period > 1 else {}  # what the history is, while rows are overwritten
        self.grads = tables()
        self.past = Past(chunks, layers, device) if replays and period == 1 else None
        self.is_replayed = False
        self.given = PastGradients(chunks, layers, device) if compensates else None
        self.made = torch.full((num_chunks,), -1)  # epoch of each chunk's rows in the tables
        self.made_kept = self.made.clone()
        self.is_filled = False
        self.meter = Meter()
        self._place: list[int] = []  # of each chunk in this epoch's order; empty: all rows are of this step
        self._epoch = 0
        self._reads = chunks.reads()

    def fill(self, epoch: int) -> None:
        """The tables were swept, with the weights that epoch ``epoch`` begins with."""
        self.made.fill_(epoch - 1)
        self.is_filled = True
        self._keep()

    def freshen(self, epoch: int) -> None:
        """The tables were swept once more before an epoch, with its weights."""
        self.made.fill_(epoch)

    def begin(self, epoch: int, *orders: Sequence[int], together: int = 1) -> None:
        """An epoch begins, with an order of chunks for each way.

        None given: a chunk reads others only once all have their rows of this step. ``together``: so many chunks, one after
        another in the order, go through a layer before any goes on.
        """
        self._epoch, self.meter = epoch, Meter()
        self._place = []
        if orders:
            self._place = [0] * len(self.chunks)
            for order in orders:
                for place, chunk in enumerate(order):
                    self._place[chunk] = place // together
            for layer, kept in self.kept.items():
                self.rows[layer].copy_(kept)
            if self.kept:
                self.made.copy_(self.made_kept)
        for layer, grads in self.grads.items():
            grads.zero_()
            if self.given is not None and self._place:
                self.given.begin(layer, grads, self._place)

    def end(self) -> None:
        """The epoch is done: all rows are of it."""
        self.made.fill_(self._epoch)
        if (self._epoch + 1) % self.period == 0:
            self._keep()

    def _keep(self) -> None:
        for layer, kept in self.kept.items():
            kept.copy_(self.rows[layer])
        self.made_kept.copy_(self.made)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, chunks read what they have read before in this epoch, and what they write is there already."""
        self.is_replayed = True
        try:
            yield
        finally:
            self.is_replayed = False

    def write(self, layer: int, chunk: int, rows: Tensor) -> None:
        """A chunk's rows [n, ...] of this epoch; of another way's chunk those that chunks here read."""
        if self.is_replayed:
            return
        table, at = self.rows[layer], self.chunks.table_rows(chunk)
        if self._place:
            self._measure(chunk, table[at], rows)
            if self.past is not None:
                self.past.keep(layer, chunk, table[at])
        table[at] = rows

    def _measure(self, chunk: int, old: Tensor, new: Tensor) -> None:
        """What earlier chunks read of this one is known to be off by this much, now."""
        mine = self._place[chunk]
        readers = [other for other, place in enumerate(self._place) if place < mine]
        times = float(self._reads[readers, chunk].sum()) / max(new.shape[0], 1)
        if times:
            self.meter.error += times * float((new - old).double().square().sum())
            self.meter.size += times * float(new.double().square().sum())

    def read(self, layer: int, chunk: int) -> Tensor:
        """[o, ...]: rows of other chunks, as they are now."""
        at = self.chunks[chunk]
        found = self.rows[layer].index_select(0, at.others)
        if not self.is_replayed:
            self._count(chunk)
        elif self._place:
            late = (self._later(at, chunk) < 0).nonzero().view(-1)
            rows = at.others[late]
            if rows.numel():
                found[late] = self.kept[layer][rows] if self.past is None else self.past.read(layer, rows)
        return found

    def _count(self, chunk: int) -> None:
        for other, count in enumerate(self._reads[chunk].tolist()):
            if count and (not self._place or self._place[other] <= self._place[chunk]):
                self.meter.current_rows += count
            elif count:
                age = self._epoch - int(self.made[other])
                self.meter.history_rows += count
                self.meter.ages[age] = self.meter.ages.get(age, 0) + count

    def push(self, layer: int, chunk: int, grads: Tensor) -> None:
        """Add gradients [o, ...] of the rows that a chunk read, where their chunks still have to go backward."""
        at = self.chunks[chunk]
        if not self._place:
            _add(self.grads[layer], at.others, grads)
            return
        if self.given is not None:
            self.given.keep(layer, chunk, grads)
        later = self._later(at, chunk)
        is_before, is_beside = later > 0, later == 0
        _add(self.grads[layer], at.others[is_before], grads[is_before] * self.gamma)
        # Chunks of one tick read each other both ways, whatever the order: nothing of it is to be made up for.
        _add(self.grads[layer], at.others[is_beside], grads[is_beside])

    def add(self, layer: int, at: Tensor, grads: Tensor) -> None:
        """Add gradients [o, ...] that another way found for distinct own rows."""
        _add(self.grads[layer], at, grads)

    def _later(self, at: Chunk, chunk: int) -> Tensor:
        """int64 [o]: ticks by which a chunk is later than the chunks of the rows that it reads."""
        place = torch.tensor(self._place, device=at.other_chunks.device)
        return self._place[chunk] - place[at.other_chunks]

    def pulled(self, layer: int, chunk: int) -> Tensor:
        """[n, ...]: what chunks that went backward have added to a chunk's rows."""
        return self.grads[layer][self.chunks[chunk].rows]

    def state(self) -> dict[str, Tensor]:
        """What a continuation needs."""
        if not self.is_filled:
            return {}
        tables = self.kept or self.rows
        made = self.made_kept if self.kept else self.made
        given = {} if self.given is None else self.given.state()
        return {"made": made.clone()} | {f"rows{layer}": table for layer, table in tables.items()} | given

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Put back what ``state`` gave."""
        self.made.copy_(tensors["made"])
        self.made_kept.copy_(self.made)
        for layer in self.layers:
            self.rows[layer].copy_(tensors[f"rows{layer}"])
            if self.kept:
                self.kept[layer].copy_(self.rows[layer])
        if self.given is not None:
            self.given.restore(tensors)
        self.is_filled = True

    @property
    def num_bytes(self) -> int:
        """Of all tables."""
        past = [] if self.past is None else self.past.rows.values()
        tables = [*self.rows.values(), *self.kept.values(), *self.grads.values(), *past]
        given = 0 if self.given is None else self.given.num_bytes
        return given + sum(table.numel() * table.element_size() for table in tables)


def _add(table: Tensor, at: Tensor, rows: Tensor) -> None:
    """Add rows to those of a table, each row of it at most once."""
    if not at.numel():
        return
    flat = table.view(table.shape[0], -1)
    scatter_add_rows(flat, at, rows.reshape(rows.shape[0], -1).to(table.dtype).contiguous())
