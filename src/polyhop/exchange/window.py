"""Mini-batches loaded by windows: k steps are sampled in the messages of one, and their input rows fetched together.

    window w    seeds of k steps -> hop by hop, all k at once -> union of their input nodes -> pool: fetch what it lacks
    meanwhile   the k steps of window w - 1 train, reading own rows and the pool in place

Windows go on from epoch to epoch: the first of the next is loaded while the last of this one trains. A window whose rows do
not fit the pool is cut short, on all ranks alike, and its other steps, sampled already, come with the next.

Legend: k steps of a window, S input nodes of a mini-batch, U of the window.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from polyhop.comm import Collective
from polyhop.errors import ConfigError
from polyhop.exchange.features import NodeFacts
from polyhop.exchange.loader import PartBatch, Seeds, blocks_of
from polyhop.exchange.pool import Pool
from polyhop.graph import PooledRows
from polyhop.kernels.relabel import Relabel
from polyhop.sample import MiniBatch
from polyhop.sample.ahead import ahead
from polyhop.sample.part import Drawn, PartSampler
from polyhop.trace import NO_TRACE, Trace

__all__ = ["Loaded", "WindowLoader"]

_REMEMBERED = 32  # windows


@dataclass(frozen=True)
class Loaded:
    """How the loading of one window went, on this rank."""

    window: int
    num_steps: int
    num_nodes: int  # distinct input nodes that are not read in place
    num_fetched: int
    seconds: float
    cpu_s: float  # of the loading thread
    block_bytes: int  # of the sampled mini-batches, as they are held


@dataclass(frozen=True, eq=False)
class _Step:
    """A sampled mini-batch that waits for its rows."""

    epoch: int
    step: int
    seeds: Tensor
    drawn: Drawn


class WindowLoader:
    """Loads for one rank; all ranks make and use theirs together. Close it, or its thread waits for the others for good.

    ``size`` is k, and may be changed between windows (on all ranks alike) by ``after_window``, which is called in the
    loading thread. ``in_place``: [n, F], own rows that steps can read where they lie; None: they go through the pool.
    """

    def __init__(
        self,
        line: Collective,
        sampler: PartSampler,
        pool: Pool,
        seeds: Seeds,
        *,
        size: int,
        in_place: Tensor | None,
        is_ahead: bool = True,
        num_epochs: int = 0,
        shares_draws: bool = False,
        after_window: Callable[[Loaded], int | None] = lambda _: None,
        trace: Trace = NO_TRACE,
    ) -> None:
        if size < 1:
            raise ConfigError(f"a window of {size} mini-batches: expected at least 1")
        self.line, self.sampler, self.pool, self.seeds = line, sampler, pool, seeds
        self.size, self.in_place, self.is_ahead, self.trace = size, in_place, is_ahead, trace
        self.num_epochs, self.shares_draws, self.after_window = num_epochs, shares_draws, after_window
        y = sampler.part.y
        assert y is not None, "the trainer checks that labels are there"
        self._y = y
        self._table = Relabel()
        self._window = 0  # the next to load, never reset: the pool knows windows by their numbers
        self._waiting: deque[_Step] = deque()  # sampled, rows not fetched
        self._own: tuple[int, list[Tensor]] = (-1, [])  # seeds of an epoch
        self._stream: Iterator[list[PartBatch] | None] | None = None
        self._ready: deque[PartBatch] = deque()  # of the window at hand
        self._at = (-1, 0)  # epoch and step of the next batch
        self._position, self._last_epoch = [0, 0], 0  # of the next step to sample
        self._delivered = -1  # the window at hand
        self._num_delivered, self._spent_s = 0, 0.0  # its steps, and what was spent on them so far
        self._trained: dict[int, tuple[int, float]] = {}  # window: steps, seconds; the last ones

    def __len__(self) -> int:
        return self.seeds.num_steps

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[PartBatch]:
        """The mini-batches of an epoch from ``start_step`` on, in step order; all ranks take them together."""
        if self._at != (epoch, start_step) or self._stream is None or epoch >= self._last_epoch:
            self.close()
            self._open(epoch, start_step)
        for step in range(start_step, len(self)):
            before = time.perf_counter()
            if not self._ready:
                self._next_window()
            batch = self._ready.popleft()
            self._at = (epoch, step + 1) if step + 1 < len(self) else (epoch + 1, 0)
            yield batch
            self._spend(time.perf_counter() - before)

    def seconds_of(self, windows: range) -> float | None:
        """Of each step of these windows: training it, and waiting for it to be loaded. None if one was not trained, or long
        ago."""
        found = [self._trained.get(window) for window in windows]
        known = [each for each in found if each is not None]
        if not known or len(known) < len(found):
            return None
        return sum(seconds for _, seconds in known) / sum(steps for steps, _ in known)

    def close(self) -> None:
        """End the thread, once all ranks have loaded what they began together."""
        stream, self._stream = self._stream, None
        self._ready.clear()
        self._release()
        if stream is not None and hasattr(stream, "close"):
            stream.close()
        self._waiting.clear()

    def _open(self, epoch: int, step: int) -> None:
        last = max(self.num_epochs, epoch + 1)
        most = (last - epoch) * len(self)  # a window has at least one step
        self._position, self._last_epoch = [epoch, step], last
        self._delivered = self._window - 1  # what was loaded ahead and never asked for is gone
        self._release()
        self._stream = (
            ahead(lambda _: self._load(), range(most), 1, 1, finish_begun=True)
            if self.is_ahead
            else (self._load() for _ in range(most))
        )

    def _next_window(self) -> None:
        self._release()
        assert self._stream is not None
        loaded = next(self._stream)
        assert loaded, "as many steps are loaded as are asked for"
        self._ready.extend(loaded)
        self._delivered += 1
        self._num_delivered, self._spent_s = len(loaded), 0.0

    def _spend(self, seconds: float) -> None:
        self._spent_s += seconds
        if not self._ready:
            self._trained[self._delivered] = (self._num_delivered, self._spent_s)
            self._trained.pop(self._delivered - _REMEMBERED, None)

    def _release(self) -> None:
        """The window at hand is trained."""
        self.pool.release(self._delivered)

    # What follows runs in the loading thread.

    def _load(self) -> list[PartBatch] | None:
        before, cpu, fetched = time.perf_counter(), time.thread_time(), self.pool.num_fetched
        if not self._waiting:
            self._sample()
        if not self._waiting:
            return None  # all epochs are loaded
        window, self._window = self._window, self._window + 1
        first = self._waiting[0]
        with self.trace.span("load", epoch=first.epoch, step=first.step, window=window):
            table = _union(self._table, [each.drawn.ids for each in self._waiting])
            count, in_flight = self._agree(table, window)
            table = table.first(count)
            steps = [self._waiting.popleft() for _ in range(count)]
            rows, facts = self._rows(table.ids, window, in_flight)
            batches = self._batches(steps, rows.index_select(0, table.rows), facts.at(table.rows), table.cuts)
        told = Loaded(
            window,
            count,
            self._num_pooled(table.ids),
            self.pool.num_fetched - fetched,
            time.perf_counter() - before,
            time.thread_time() - cpu,
            sum(_held_bytes(batch) for batch in batches),
        )
        self.size = self.after_window(told) or self.size
        return batches

    def _sample(self) -> None:
        """The next k steps, in the messages of one. Windows end at multiples of k, so they are the same from any start."""
        epoch, step = self._position
        if epoch >= self._last_epoch or len(self) == 0:
            return
        steps = range(step, min((step // self.size + 1) * self.size, len(self)))
        self._position = [epoch, steps.stop] if steps.stop < len(self) else [epoch + 1, 0]
        if self._own[0] != epoch:
            self._own = (epoch, self.seeds.own(epoch))
        seeds = [self._own[1][each] for each in steps]
        with self.trace.span("sample", epoch=epoch, step=step):
            keys = [step] * len(steps) if self.shares_draws else list(steps)
            drawn = self.sampler.sample_window(self.line, seeds, epoch, keys)
        for at, ids, each in zip(steps, seeds, drawn, strict=True):
            self._waiting.append(_Step(epoch, at, ids, each))

    def _agree(self, table: _Union, window: int) -> tuple[int, int]:
        """(steps that fit on every rank, windows still in flight): beside the window that trains, or after it."""
        flights = (1, 0) if self.is_ahead else (0, 0)
        last = self.pool.last_used(table.ids)
        last[self._is_in_place(table.ids)] = window  # they need no slot
        told = [self._fits(table, last, window, in_flight) for in_flight in flights]
        told += [_needs(table, last < window)[0], self.pool.room(window, in_flight=0)]
        counts = [len(told)] * self.line.num_ranks
        everyone = torch.stack(self.line.all_gather(torch.tensor(told), kind="sizes", counts=counts))
        beside, after = everyone[:, :2].min(0).values.tolist()
        if beside:
            return beside, flights[0]
        if after == 0:
            rank = int(everyone[:, 1].argmin())
            need, room = everyone[rank, 2:].tolist()
            raise ConfigError(
                f"rank {rank}: one mini-batch reads {need} rows through the pool, and there is memory for {room}: give "
                f"{-(-need // max(room, 1))} times the memory, a smaller batch_size or smaller fan-outs"
            )
        self.pool.wait_released(window - 1)
        return after, 0

    def _fits(self, table: _Union, last: Tensor, window: int, in_flight: int) -> int:
        """Steps that fit beside so many windows in flight; ``last`` int64 [U]: the last window that used each node."""
        room = self.pool.room(window, in_flight=in_flight)
        return sum(need <= room for need in _needs(table, last < window - in_flight))

    def _is_in_place(self, ids: Tensor) -> Tensor:
        if self.in_place is None:
            return torch.zeros(ids.numel(), dtype=torch.bool)
        start = self.sampler.part.start
        return (ids >= start) & (ids < start + self.sampler.part.num_nodes)

    def _num_pooled(self, ids: Tensor) -> int:
        return ids.numel() - int(self._is_in_place(ids).sum())

    def _rows(self, ids: Tensor, window: int, in_flight: int) -> tuple[Tensor, NodeFacts]:
        """int64 [U]: where the rows of the nodes lie, own ones first, then slots of the pool; and the nodes' facts."""
        here = self._is_in_place(ids)
        own, there = here.nonzero()[:, 0], (~here).nonzero()[:, 0]
        ascending = torch.sort(ids[there])
        slots = self.pool.take(self.line, ascending.values, window, in_flight=in_flight)
        own_rows = ids[own] - self.sampler.part.start
        rows = torch.empty_like(ids)
        rows[own] = own_rows
        rows[there[ascending.indices]] = slots + (0 if self.in_place is None else self.in_place.shape[0])
        pieces, at = [self.pool.fetch.own_facts(own_rows)], [own]
        if slots.numel():
            pieces, at = [*pieces, self.pool.facts(slots)], [*at, there[ascending.indices]]
        back = torch.empty_like(ids)
        back[torch.cat(at)] = torch.arange(ids.numel())
        return rows, NodeFacts.joined(pieces).at(back)

    def _batches(
        self, steps: Sequence[_Step], places: Tensor, facts: NodeFacts, cuts: Sequence[int]
    ) -> list[PartBatch]:
        """The mini-batches, of whose input nodes rows and facts lie one mini-batch after the other."""
        seeds = torch.cat([step.seeds for step in steps]) - self.sampler.part.start
        labels = torch.split(self._y[seeds], [step.seeds.numel() for step in steps])
        x = None if self.pool.is_sparse else self._pooled()
        found = []
        for step, y, (start, stop) in zip(steps, labels, pairwise(cuts), strict=True):
            known, rows = facts.between(start, stop), places[start:stop]
            blocks = blocks_of(step.drawn, known, None if x is None else rows)
            batch = MiniBatch(step.step, known.user_ids[: step.seeds.numel()], blocks)
            inputs = self.pool.sparse(rows) if x is None else x
            found.append(PartBatch(batch, inputs, y, self.seeds.count(step.step)))
        return found

    def _pooled(self) -> PooledRows:
        """Own rows and those of the pool, where they lie."""
        values = self.pool.values
        own = values[:0] if self.in_place is None else self.in_place
        return PooledRows(
            own, values if values.shape[1] == own.shape[1] else own[:0]
        )  # nothing was ever fetched


@dataclass(frozen=True, eq=False)
class _Union:
    """The distinct input nodes of a window, by first appearance."""

    ids: Tensor  # int64 [U]
    rows: Tensor  # int64: the input nodes of each mini-batch among ids, one mini-batch after the other
    cuts: list[int]  # where each mini-batch begins in rows, and the end
    ends: list[int]  # how many are known after each mini-batch

    def first(self, count: int) -> _Union:
        """Of the first ``count`` mini-batches."""
        cuts, ends = self.cuts[: count + 1], self.ends[:count]
        return _Union(self.ids[: ends[-1]], self.rows[: cuts[-1]], cuts, ends)


def _held_bytes(batch: PartBatch) -> int:
    """Of what the mini-batch has to itself: edges, lists, and facts and places of its input nodes."""
    total = 0
    for block in batch.batch.blocks:
        own = (block.indptr, block.indices, block.edge_weight, block.rows)
        total += sum(each.numel() * each.element_size() for each in own if each is not None)
    first = batch.batch.blocks[0]
    facts = (first.src_ids, first.in_degree, first.in_weight, first.loop_weight)
    return total + sum(each.numel() * each.element_size() for each in facts if each is not None)


def _needs(table: _Union, lacks: Tensor) -> list[int]:
    """Slots that the first mini-batch needs, the first two, ...; ``lacks`` bool [U]: nodes without one of their own."""
    total = torch.cat([torch.zeros(1, dtype=torch.int64), lacks.cumsum(0)])
    return [int(need) for need in total[table.ends].tolist()]


def _union(table: Relabel, ids: Sequence[Tensor]) -> _Union:
    everyone, cuts = torch.cat(list(ids)), [0, *accumulate(each.numel() for each in ids)]
    table.start(everyone[:0])
    rows = table.add(everyone).long()
    known = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cummax(rows, 0).values + 1])
    return _Union(table.ids(), rows, cuts, known[cuts[1:]].tolist())
