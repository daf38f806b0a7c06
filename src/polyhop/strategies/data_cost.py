"""What data-parallel training sends: accounted from realised mini-batches, estimated from inclusion probabilities.

Both give the ``Cost`` of one rank for one step (all ranks' mini-batches of that step are needed: a rank also sends what
others ask of it). ``strategies/data.py`` states the formulas.

Legend: N nodes, P ranks, L layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhop.comm import Cost
from polyhop.comm.collective import slices
from polyhop.exchange import RowFormat
from polyhop.sample import MiniBatch
from polyhop.sample.wire import Wire

__all__ = ["Facts", "account", "account_gradients", "estimate"]


@dataclass(frozen=True, eq=False)
class Facts:
    """What is known before a run, by the user's ids."""

    owner: Tensor  # int64 [N]: rank of each node
    likely: Sequence[
        Sequence[Tensor]
    ]  # [P][L + 1] float64 [N]: is a node known to rank r's mini-batch after each hop?
    in_degree: Tensor  # [N]
    num_neighbors: Sequence[int]
    wire: Wire
    layout: RowFormat  # of dense rows
    bucket_sizes: Sequence[int]  # elements of each gradient message
    value_bytes: int = 4  # of a parameter
    cached: Sequence[Tensor] | None = None  # [P] bool [N]: rows that rank r keeps


class _Sum:
    """Bytes and messages, added up."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()
        self.rounds = 0

    def add(self, kind: str, num_bytes: float, messages: float = 1) -> None:
        if num_bytes > 0:
            self.bytes[kind] += num_bytes  # type: ignore[assignment]
            self.messages[kind] += messages  # type: ignore[assignment]

    def cost(self) -> Cost:
        return Cost(dict(self.bytes), dict(self.messages), self.rounds)


def account(
    batches: Sequence[MiniBatch],
    new_ids: Tensor,
    bounds: Tensor,
    wire: Wire,
    layout: RowFormat,
    num_neighbors: Sequence[int],
    rank: int,
    *,
    cached: Sequence[Tensor] | None = None,
    row_lengths: Tensor | None = None,
) -> Cost:
    """What ``rank`` sends to sample and load one step, to the byte.

    ``batches[r]`` is rank r's mini-batch, by the user's ids, however it was drawn; ``new_ids`` int64 [N] and ``bounds``
    int64 [P + 1] say who owns what. ``cached[r]``: new ids that rank r keeps. ``row_lengths`` int64 [N], by the user's
    ids: values of each sparse row.
    """
    found, peers = _Sum(), [q for q in range(len(batches)) if q != rank]
    wanted = [_wanted(batch, num_neighbors, new_ids) for batch in batches]
    for hop in range(1, len(num_neighbors)):
        _sizes(found, peers, 2)
        for q in peers:
            mine, theirs = wanted[rank][hop], wanted[q][hop]
            asked = _of(mine.ids, bounds, q)
            found.add("ids", wire.request_bytes(mine.ids[asked].sort().values - bounds[q]))
            lent = _of(theirs.ids, bounds, rank)
            edges = int(theirs.drawn[lent].sum())
            count = int(lent.sum())
            found.add("ids", wire.reply_bytes(count, edges, num_neighbors[hop]) if count else 0)
    _sizes(found, peers, 1 if layout.row_bytes is not None else 2)
    for q in peers:
        mine_ids, their_ids = new_ids[batches[rank].input_ids], new_ids[batches[q].input_ids]
        if cached is not None:
            mine_ids = mine_ids[~torch.isin(mine_ids, cached[rank])]
            their_ids = their_ids[~torch.isin(their_ids, cached[q])]
        asked_ids = mine_ids[_of(mine_ids, bounds, q)].sort().values - bounds[q]
        found.add("ids", wire.request_bytes(asked_ids))
        lent = _of(their_ids, bounds, rank)
        found.add("features", _row_bytes(their_ids[lent], layout, new_ids, row_lengths))
    return found.cost()


def _row_bytes(ids: Tensor, layout: RowFormat, new_ids: Tensor, lengths: Tensor | None) -> int:
    if layout.row_bytes is not None:
        return ids.numel() * layout.row_bytes
    assert lengths is not None, "sparse rows need their lengths"
    by_new = torch.empty_like(lengths)
    by_new[new_ids] = lengths
    return ids.numel() * (layout.fact_bytes + 4) + 8 * int(by_new[ids].sum())


@dataclass(frozen=True, eq=False)
class _Hop:
    ids: Tensor  # new ids of the nodes that a hop expands
    drawn: Tensor  # edges drawn for each


def _wanted(batch: MiniBatch, num_neighbors: Sequence[int], new_ids: Tensor) -> list[_Hop]:
    """The nodes each hop expands, hop 0 first."""
    hops = []
    for block in reversed(batch.blocks):
        hops.append(_Hop(new_ids[block.dst_ids()], block.drawn))
    assert len(hops) == len(num_neighbors)
    return hops


def _of(ids: Tensor, bounds: Tensor, part: int) -> Tensor:
    return (ids >= bounds[part]) & (ids < bounds[part + 1])


def _sizes(found: _Sum, peers: Sequence[int], times: int) -> None:
    if peers:
        found.add("sizes", 8 * len(peers) * times, len(peers) * times)


def account_gradients(bucket_sizes: Sequence[int], value_bytes: int, num_ranks: int, rank: int) -> Cost:
    """What ``rank`` sends to sum the gradients of one step: slices to their summers, the own sum to all."""
    found = _Sum()
    for size in bucket_sizes:
        bounds = slices(size, num_ranks)
        mine = bounds[rank + 1] - bounds[rank]
        for q in range(num_ranks):
            if q != rank:
                found.add("gradients", (bounds[q + 1] - bounds[q]) * value_bytes)
                found.add("gradients", mine * value_bytes)
    return found.cost()


def estimate(facts: Facts, rank: int) -> Cost:
    """What ``rank`` is expected to send in one step, from probabilities alone."""
    num_ranks = len(facts.likely)
    peers = [q for q in range(num_ranks) if q != rank]
    found = _Sum()
    is_mine = facts.owner == rank
    for hop in range(1, len(facts.num_neighbors)):
        fanout = facts.num_neighbors[hop]
        degree = facts.in_degree.double()
        drawn = degree if fanout < 0 else degree.clamp(max=fanout)
        _sizes(found, peers, 2)
        for q in peers:
            found.add("ids", _request_bytes(facts.likely[rank][hop], facts.owner == q, facts.wire))
            lent = facts.likely[q][hop] * is_mine
            count, edges = float(lent.sum()), float((lent * drawn).sum())
            found.add("ids", count * facts.wire.count_dtype(fanout).itemsize + edges * facts.wire.edge_bytes)
    _sizes(found, peers, 1)
    row_bytes = facts.layout.row_bytes
    assert row_bytes is not None, "sparse rows have no width to estimate from"
    for q in peers:
        mine, theirs = _fetched(facts, rank), _fetched(facts, q)
        found.add("ids", _request_bytes(mine, facts.owner == q, facts.wire))
        found.add("features", float((theirs * is_mine).sum()) * row_bytes)
    return found.cost() + account_gradients(facts.bucket_sizes, facts.value_bytes, num_ranks, rank)


def _fetched(facts: Facts, rank: int) -> Tensor:
    likely = facts.likely[rank][-1]
    return likely if facts.cached is None else likely * ~facts.cached[rank]


def _request_bytes(likely: Tensor, is_owned: Tensor, wire: Wire) -> float:
    """Ids of one owner: as deltas, a byte for each, one more for each gap of 2^7, 2^14, ... and more."""
    count, size = float((likely * is_owned).sum()), float(is_owned.sum())
    if wire.is_plain:
        return 8 * count
    misses = max(0.0, 1 - count / max(size, 1.0))
    return float(count * (1 + sum(misses ** (1 << 7 * more) for more in (1, 2, 3, 4))))
