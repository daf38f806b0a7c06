"""What split mini-batches send: accounted from realised ones, estimated from inclusion probabilities.

Both give the ``Cost`` of one rank for one step; ``strategies/split.py`` states the formulas.

Legend: N nodes, P ranks, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhop.comm import Cost
from polyhop.exchange.wanted import Price, Wanted
from polyhop.kernels import quantised_bytes
from polyhop.sample import MiniBatch
from polyhop.sample.wire import Wire
from polyhop.strategies.data_cost import account_gradients

__all__ = ["Asked", "Facts", "Shares", "account", "asked", "estimate", "shares"]


@dataclass(frozen=True, eq=False)
class Asked:
    """What one rank asks of another for one layer: own rows of the other, ascending."""

    layer: int  # input layer first
    reader: int
    owner: int
    rows: Tensor  # int64, within the owner
    wanted: Wanted | None = None  # where sums may cross: which
    size: int = 0  # nodes of the owner

    @property
    def num_crossing(self) -> int:
        """Rows that cross, sums included."""
        return self.rows.numel() if self.wanted is None else self.wanted.num_crossing

    @property
    def told(self) -> Tensor:
        """int64: what the owner is told."""
        return self.rows if self.wanted is None else self.wanted.numbers(self.size)

    @property
    def num_entries(self) -> int:
        """Edges that are in sums."""
        return 0 if self.wanted is None else self.wanted.entry.numel()


def asked(
    batch: MiniBatch,
    new_ids: Tensor,
    bounds: Tensor,
    prices: Sequence[Price | None] | None = None,
    wire: Wire | None = None,
) -> list[Asked]:
    """All that crosses in a step, computed from the whole mini-batch as one process draws it.

    ``new_ids`` int64 [N] and ``bounds`` int64 [P + 1] say who owns what; ``prices``, with the wire: of each layer, where
    sums may cross.
    """
    found, num_ranks = [], bounds.numel() - 1
    for layer, block in enumerate(batch.blocks):
        assert block.src_ids is not None
        sources = new_ids[block.src_ids]
        at = torch.repeat_interleave(torch.arange(block.num_dst), block.drawn) + block.dst_start
        owner = torch.searchsorted(bounds[1:], sources, right=True)
        reader, ids = owner[at], sources[block.indices.long()]
        lender = owner[block.indices.long()]
        for p in range(num_ranks):
            for q in range(num_ranks):
                if p != q:
                    is_theirs = (reader == p) & (lender == q)
                    rows, place = torch.unique(ids[is_theirs], return_inverse=True)
                    rows, price = rows - bounds[q], None if prices is None else prices[layer]
                    wanted, size = None, int(bounds[q + 1] - bounds[q])
                    if price is not None and wire is not None:
                        to = sources[at[is_theirs]] - bounds[p]
                        wanted = Wanted.of(rows, place, to, size, price, wire)
                    found.append(Asked(layer, p, q, rows, wanted, size))
    return found


def account(
    messages: Sequence[Asked],
    columns: Sequence[int],
    wire: Wire,
    bucket_sizes: Sequence[int],
    rank: int,
    num_ranks: int,
    *,
    returns: Sequence[bool],
    value_bytes: int = 4,
    bits: int = 32,
    num_groups: int = 1,
) -> Cost:
    """What ``rank`` sends in one step, to the byte. ``columns`` cross at each layer; ``returns``: gradients of them do.

    In groups, ``rank`` and ``num_ranks`` are of all ranks, ``messages`` of the slice that the rank's group splits.
    """
    gradients = account_gradients(bucket_sizes, value_bytes, num_ranks, rank, num_groups)
    num_ranks //= num_groups
    rank %= num_ranks
    sent = {"ids": 0, "hidden": 0, "sizes": 8 * (num_ranks - 1) * len(columns)}
    count = {"ids": 0, "hidden": 0, "sizes": (num_ranks - 1) * len(columns)}

    def add(kind: str, size: int) -> None:
        sent[kind] += size
        count[kind] += size > 0

    for each in messages:
        size = _row_bytes(each.num_crossing, columns[each.layer], value_bytes, bits)
        if each.reader == rank:
            add("ids", wire.request_bytes(each.told))
            add("ids", 4 * each.num_entries if wire.is_weighted else 0)
            add("hidden", size if returns[each.layer] else 0)
        if each.owner == rank:
            add("hidden", size)
    kinds = [kind for kind in sent if sent[kind]]
    rows = Cost({kind: sent[kind] for kind in kinds}, {kind: count[kind] for kind in kinds})
    return rows + gradients


def _row_bytes(num_rows: int, columns: int, value_bytes: int, bits: int) -> int:
    if bits == 32:
        return num_rows * columns * value_bytes
    return quantised_bytes(torch.full((num_rows,), bits, dtype=torch.uint8), columns)


@dataclass(frozen=True, eq=False)
class Shares:
    """What sums change, of each layer and pair of ranks: float64 [L, P, P], readers first."""

    rows: Tensor  # rows and sums that cross, over rows asked for
    entry_bytes: Tensor  # of entries, for every row asked for


def shares(found: Sequence[Asked], num_layers: int, num_ranks: int, wire: Wire) -> Shares:
    """Of what some mini-batches ask for (``asked``, with prices): drawn as training draws them, but before it."""
    counts = torch.zeros(3, num_layers, num_ranks, num_ranks, dtype=torch.float64)
    for each in found:
        entries = wire.request_bytes(each.told) - wire.request_bytes(each.rows)
        entries += 4 * each.num_entries if wire.is_weighted else 0
        size = torch.tensor([each.rows.numel(), each.num_crossing, entries], dtype=torch.float64)
        counts[:, each.layer, each.reader, each.owner] += size
    asked_for = counts[0].clamp(min=1)
    return Shares(torch.where(counts[0] > 0, counts[1] / asked_for, 1.0), counts[2] / asked_for)


@dataclass(frozen=True, eq=False)
class Facts:
    """What is known before a run, by the user's ids."""

    indptr: Tensor  # int64 [N + 1]: in-edges
    indices: Tensor  # [E]: sources
    owner: Tensor  # int64 [N]: rank of each node, in its group
    likely: Sequence[
        Tensor
    ]  # [L] float64 [N]: is a node in the frontier of the mini-batch (a group's slice of it) before each hop, seeds first
    num_neighbors: Sequence[int]
    columns: Sequence[int]  # that cross at each layer, input layer first
    returns: Sequence[bool]
    wire: Wire
    bucket_sizes: Sequence[int]
    num_ranks: int  # of all groups
    value_bytes: int = 4
    bits: int = 32
    shares: Shares | None = None  # None: no sums cross
    num_groups: int = 1


def estimate(facts: Facts, rank: int) -> Cost:
    """What ``rank`` is expected to send in one step: a source is asked for if one of its readers at a rank draws it."""
    degree = facts.indptr.diff()
    reader = facts.owner[torch.repeat_interleave(torch.arange(degree.numel()), degree)]
    source = facts.indices.long()
    is_far = facts.owner[source] != reader
    ids = hidden = 0.0
    gradients = account_gradients(
        facts.bucket_sizes, facts.value_bytes, facts.num_ranks, rank, facts.num_groups
    )
    num_ranks = facts.num_ranks // facts.num_groups
    rank, peers = rank % num_ranks, num_ranks - 1
    for hop, fanout in enumerate(facts.num_neighbors):
        layer = len(facts.num_neighbors) - 1 - hop
        draws = degree.double() if fanout < 0 else degree.clamp(max=fanout).double()
        chance = facts.likely[hop] * draws / degree.clamp(min=1)
        misses = torch.log1p(-torch.repeat_interleave(chance, degree)[is_far].clamp(max=1 - 1e-12))
        place = source[is_far] * num_ranks + reader[is_far]
        total = torch.zeros(degree.numel() * num_ranks, dtype=torch.float64).index_add(0, place, misses)
        rows = -torch.expm1(total).view(-1, num_ranks)  # [N, P]: does a rank ask for the node?
        row = _row_bytes(1, facts.columns[layer], facts.value_bytes, facts.bits)
        by_owner = rows.new_zeros(num_ranks, num_ranks).index_add(0, facts.owner, rows)
        if facts.shares is not None:
            ids += float((by_owner[:, rank] * facts.shares.entry_bytes[layer, rank]).sum())
            by_owner = by_owner * facts.shares.rows[layer].T
        wanted, lent = float(by_owner[:, rank].sum()), float(by_owner[rank].sum())
        hidden += row * (lent + (wanted if facts.returns[layer] else 0.0))
        ids += sum(
            _request_bytes(float(rows[facts.owner == q, rank].sum()), int((facts.owner == q).sum()))
            for q in range(num_ranks)
            if q != rank
        )
    hops = len(facts.num_neighbors)
    found = Cost(
        {"ids": ids, "hidden": hidden, "sizes": 8.0 * peers * hops},
        {"ids": peers * hops, "hidden": peers * (hops + sum(facts.returns)), "sizes": peers * hops},
    )
    return found + gradients


def _request_bytes(count: float, size: int) -> float:
    """As deltas: a byte for each, one more for each gap of 2^7, 2^14, ... and more."""
    misses = max(0.0, 1 - count / max(size, 1))
    return float(count * (1 + sum(misses ** (1 << 7 * more) for more in (1, 2, 3, 4))))
