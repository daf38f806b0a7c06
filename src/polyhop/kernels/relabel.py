"""Ids to rows, numbered by first appearance: for ids that come piecemeal, as answers of other ranks do.

The sampler relabels inside its native call (``kernels/sample.py``); this is the same numbering with a table of its own.

Legend: B first ids, m ids of one call.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from polyhop.errors import InputError, KernelError
from polyhop.kernels import checks, native, reference

__all__ = ["Joined", "Relabel"]

_NEGATIVE, _TWICE, _MEMORY = -1, -2, -3


@dataclass(frozen=True, eq=False)
class Joined:
    """Lists of several mini-batches, one after the other, each with rows of its own: k mini-batches, E entries."""

    ids: Tensor  # int64: of each mini-batch, nodes by row: those it was given, then neighbours by first appearance
    cuts: list[int]  # k + 1: where each mini-batch begins in ids
    indptr: Tensor  # int64: of each mini-batch, where each list begins, from 0, and one more
    rows: Tensor  # int32 [E]
    edge_cuts: list[int]  # k + 1: where each begins in rows
    weights: Tensor | None  # float32 [E]


class Relabel:
    """Rows 0, 1, 2, ... of distinct ids; owns a native table whose memory follows the largest batch so far.

    Serves one thread at a time. Empty until ``start``, which begins a new batch. Where ``add`` fails for want of memory or
    rows, the batch is gone: start again.
    """

    def __init__(self) -> None:
        self._handle = 0
        self._count = 0
        self._plain: Tensor | None = None  # the ids, where plain torch serves this batch
        self.start(torch.empty(0, dtype=torch.int64))

    def start(self, ids: Tensor) -> None:
        """Forget all rows; ``ids`` (int64 [B], >= 0) become rows 0 .. B-1. InputError if one repeats: no rows then."""
        _check(ids)
        self._count = 0
        if not native.serves(ids, op="ph_relabel_start"):
            self._plain = ids[:0].clone()
            _check_negative(ids)
            _check_distinct(ids)
            self._plain = ids.clone()
            return
        self._plain = None
        where = torch.zeros(1, dtype=torch.int64)
        count = native.call("ph_relabel_start", self._native(), ids.contiguous(), ids.numel(), where)
        if count < 0:
            raise _failure(count, ids, int(where))
        self._count = count

    def add(self, ids: Tensor) -> Tensor:
        """int32 [m]: the row of each of ``ids`` (int64 [m], >= 0); new ones get the next rows by first appearance."""
        self._check_place(ids)
        if self._plain is not None:
            _check_negative(ids)
            self._plain, rows = reference.relabel(self._plain, ids)
            return rows
        rows, where = torch.empty(ids.numel(), dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
        count = native.call("ph_relabel_add", self._handle, ids.contiguous(), ids.numel(), rows, where)
        if count < 0:
            self._count = self._count if count == _NEGATIVE else 0
            raise _failure(count, ids, int(where))
        self._count = count
        return rows

    def join(
        self,
        ids: Tensor,
        cuts: Sequence[int],
        order: Tensor | None,
        counts: Sequence[Tensor],
        lists: Sequence[Tensor],
        weights: Sequence[Tensor] | None = None,
    ) -> Joined:
        """The lists of several mini-batches' nodes (ids[cuts[m] : cuts[m + 1]], int64, distinct), rows instead of ids.

        Lists come in pieces, one after the other: the j-th list of all, counts (int64) long, is that of ids[order[j]]
        (int64 [n]; None: of ids[j]), and has weights (float32) or none. What was added before is forgotten.
        """
        total, num_edges = torch.cat(list(counts)), sum(each.numel() for each in lists)
        checks.require(
            total.numel() == ids.numel() == cuts[-1] and int(total.sum()) == num_edges,
            f"relabel: {total.numel()} lists of {int(total.sum())} entries for {ids.numel()} ids and {num_edges} neighbours",
        )
        if not native.serves(ids, total, *lists, op="ph_relabel_join"):
            return self._join(ids, cuts, order, total, lists, weights)
        k, self._count, self._plain = len(cuts) - 1, 0, None
        found = torch.empty(ids.numel() + num_edges, dtype=torch.int64)
        out_cuts, edge_cuts = (torch.empty(k + 1, dtype=torch.int64) for _ in range(2))
        indptr, rows = (
            torch.empty(ids.numel() + k, dtype=torch.int64),
            torch.empty(num_edges, dtype=torch.int32),
        )
        weight = None if weights is None else torch.empty(num_edges)
        kept, ends = (
            [each.contiguous() for each in lists],
            torch.tensor([each.numel() for each in counts]).cumsum(0),
        )
        weighed = [] if weights is None else [each.contiguous() for each in weights]
        where = torch.zeros(1, dtype=torch.int64)
        status = native.call(
            "ph_relabel_join", self._native(), ids.contiguous(), torch.tensor(cuts), k, order, total, ends,
            torch.tensor([each.data_ptr() for each in kept]),
            torch.tensor([each.data_ptr() for each in weighed]) if weighed else None, len(kept), indptr, rows, weight,
            found, out_cuts, edge_cuts, where,
        )  # fmt: skip
        if status < 0:
            raise _join_failure(status, int(where))
        ends_at = out_cuts.tolist()
        return Joined(found[: ends_at[-1]].clone(), ends_at, indptr, rows, edge_cuts.tolist(), weight)

    def _join(
        self,
        ids: Tensor,
        cuts: Sequence[int],
        order: Tensor | None,
        counts: Tensor,
        lists: Sequence[Tensor],
        weights: Sequence[Tensor] | None,
    ) -> Joined:
        """The same, a mini-batch at a time."""
        order = torch.arange(ids.numel(), device=ids.device) if order is None else order
        begin = torch.empty_like(counts)
        begin[order] = counts.cumsum(0) - counts
        length = torch.empty_like(counts)
        length[order] = counts
        neighbours, weight = torch.cat(list(lists)), None if weights is None else torch.cat(list(weights))
        known, indptrs, rows, taken = [], [], [], []
        for start, stop in pairwise(cuts):
            ends = torch.cat([counts.new_zeros(1), length[start:stop].cumsum(0)])
            offset = torch.repeat_interleave(begin[start:stop] - ends[:-1], length[start:stop])
            at = offset + torch.arange(int(ends[-1]), device=ids.device)
            self.start(ids[start:stop])
            rows.append(self.add(neighbours[at]))
            known.append(self.ids())
            indptrs.append(ends)
            taken.append(at)
        return Joined(
            torch.cat(known), _cuts(known), torch.cat(indptrs), torch.cat(rows), _cuts(rows),
            None if weight is None else weight[torch.cat(taken)],
        )  # fmt: skip

    def find(self, ids: Tensor) -> Tensor:
        """int32 [m]: the row of each of ``ids`` (int64 [m]), -1 where it has none."""
        self._check_place(ids)
        if self._plain is not None:
            return _find(self._plain, ids)
        rows = torch.empty(ids.numel(), dtype=torch.int32)
        native.call("ph_relabel_find", self._handle, ids.contiguous(), ids.numel(), rows)
        return rows

    def ids(self) -> Tensor:
        """int64 [len(self)]: the id of each row."""
        if self._plain is not None:
            return self._plain.clone()
        ids = torch.empty(self._count, dtype=torch.int64)
        native.call("ph_relabel_ids", self._handle, ids)
        return ids

    def __len__(self) -> int:
        return self._count if self._plain is None else self._plain.numel()

    def _native(self) -> int:
        """The native table, made at the first call and freed with this object."""
        if not self._handle:
            self._handle = native.call("ph_relabel_new")
            if not self._handle:
                raise KernelError("relabel: no memory for a table")
            # Not at exit: another thread may still be inside the library then.
            weakref.finalize(self, native.call, "ph_relabel_free", self._handle).atexit = False
        return self._handle

    def _check_place(self, ids: Tensor) -> None:
        _check(ids)
        here = torch.device("cpu") if self._plain is None else self._plain.device
        checks.require(
            ids.device == here, f"relabel: ids on {ids.device}, but this batch was started on {here}"
        )


def _check(ids: Tensor) -> None:
    checks.require(
        ids.dim() == 1 and ids.dtype == torch.int64,
        f"relabel: ids must be int64 [n], got {ids.dtype} {list(ids.shape)}",
    )


def _check_negative(ids: Tensor) -> None:
    bad = (ids < 0).nonzero()
    if bad.numel():
        raise _failure(_NEGATIVE, ids, int(bad[0]))


def _check_distinct(ids: Tensor) -> None:
    order = torch.sort(ids, stable=True).indices
    again = order[1:][ids[order[1:]] == ids[order[:-1]]]
    if again.numel():
        raise _failure(_TWICE, ids, int(again.min()))


def _find(known: Tensor, ids: Tensor) -> Tensor:
    if not known.numel():
        return torch.full(ids.shape, -1, dtype=torch.int32, device=ids.device)
    ascending, order = torch.sort(known)
    at = torch.searchsorted(ascending, ids).clamp(max=known.numel() - 1)
    return torch.where(ascending[at] == ids, order[at], -1).to(torch.int32)


def _cuts(pieces: Sequence[Tensor]) -> list[int]:
    """Where each piece begins, and the end."""
    return [0, *accumulate(piece.numel() for piece in pieces)]


def _join_failure(status: int, batch: int) -> Exception:
    if status == _MEMORY:
        return KernelError("relabel: out of memory for the lists of a window; use smaller batches")
    what = {_NEGATIVE: "an id below 0", _TWICE: "an id twice"}.get(status, "more than 2^31 - 1 rows")
    return InputError(f"relabel: mini-batch {batch} has {what}")


def _failure(status: int, ids: Tensor, at: int) -> Exception:
    if status == _NEGATIVE:
        return InputError(f"relabel: ids[{at}] = {int(ids[at])}, expected ids of at least 0")
    if status == _TWICE:
        return InputError(f"relabel: ids[{at}] = {int(ids[at])} appears before; start with distinct ids")
    if status == _MEMORY:
        return KernelError(f"relabel: out of memory for {ids.numel()} more ids; use smaller batches")
    return InputError("relabel: a batch has at most 2^31 - 1 rows; use fewer ids at once")
