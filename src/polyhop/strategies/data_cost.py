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
from polyhop.comm.collective import is_summed_everywhere, slices
from polyhop.exchange import RowFormat
from polyhop.exchange.striped import Stripes
from polyhop.sample import MiniBatch
from polyhop.sample.part import window_rows
from polyhop.sample.wire import Wire

__all__ = [
    "Facts",
    "account",
    "account_gradients",
    "account_hops",
    "account_leaving",
    "account_rows",
    "estimate",
    "estimate_hops",
    "estimate_rows",
]


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
    served: Sequence[Tensor] | None = None  # [P] int64 [N]: who has a node's row for rank r; None: its owner


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
    stripes: Sequence[Stripes] | None = None,
    row_lengths: Tensor | None = None,
) -> Cost:
    """What ``rank`` sends to sample and load one step, to the byte.

    ``batches[r]`` is rank r's mini-batch, by the user's ids, however it was drawn; ``new_ids`` int64 [N] and ``bounds``
    int64 [P + 1] say who owns what. ``cached[r]``: new ids that rank r keeps; ``stripes[r]``: those that its group does.
    ``row_lengths`` int64 [N], by the user's ids: values of each sparse row.
    """
    windows = [[batch] for batch in batches]
    ids = [new_ids[batch.input_ids] for batch in batches]
    if cached is not None:
        ids = [mine[~torch.isin(mine, kept)] for mine, kept in zip(ids, cached, strict=True)]
    sampled = account_hops(windows, new_ids, bounds, wire, num_neighbors, rank)
    rows = account_rows(ids, new_ids, bounds, wire, layout, rank, stripes=stripes, row_lengths=row_lengths)
    return sampled + rows


def account_hops(
    windows: Sequence[Sequence[MiniBatch]],
    new_ids: Tensor,
    bounds: Tensor,
    wire: Wire,
    num_neighbors: Sequence[int],
    rank: int,
) -> Cost:
    """What ``rank`` sends to sample a window, ``windows[r]`` being rank r's mini-batches: of one step, or of several."""
    found, peers = _Sum(), [q for q in range(len(windows)) if q != rank]
    wanted = [[_wanted(batch, num_neighbors, new_ids) for batch in window] for window in windows]
    for hop in range(1, len(num_neighbors)):
        _sizes(found, peers, 2)
        for q in peers:
            asked = [
                of[hop].ids[_of(of[hop].ids, bounds, q)].sort().values - bounds[q] for of in wanted[rank]
            ]
            found.add("ids", wire.request_bytes(window_rows(asked, int(bounds[q + 1] - bounds[q]))))
            count = edges = 0
            for of in wanted[q]:
                lent = _of(of[hop].ids, bounds, rank)
                count, edges = count + int(lent.sum()), edges + int(of[hop].drawn[lent].sum())
            found.add("ids", wire.reply_bytes(count, edges, num_neighbors[hop]) if count else 0)
    return found.cost()


def account_rows(
    ids: Sequence[Tensor],
    new_ids: Tensor,
    bounds: Tensor,
    wire: Wire,
    layout: RowFormat,
    rank: int,
    *,
    stripes: Sequence[Stripes] | None = None,
    row_lengths: Tensor | None = None,
) -> Cost:
    """What ``rank`` sends when every rank r fetches the distinct nodes ``ids[r]`` (int64, new ids)."""
    found, peers = _Sum(), [q for q in range(len(ids)) if q != rank]
    _sizes(found, peers, 1 if layout.row_bytes is not None else 2)
    for q in peers:
        asked, places = _asked(ids[rank], bounds, rank, q, stripes)
        found.add("ids", wire.request_bytes(torch.cat([asked - bounds[q], places])))
        lent, places = _asked(ids[q], bounds, q, rank, stripes)
        kept = places.numel() * layout.row_bytes if layout.row_bytes is not None else 0
        found.add("features", kept + _row_bytes(lent, layout, new_ids, row_lengths))
    return found.cost()


def _asked(
    ids: Tensor, bounds: Tensor, reader: int, q: int, stripes: Sequence[Stripes] | None
) -> tuple[Tensor, Tensor]:
    """Of nodes that a rank fetches, those that it asks rank q for: (nodes of q's part; numbers of rows that q keeps)."""
    owned = ids[_of(ids, bounds, q)].sort().values
    if stripes is None:
        return owned, owned[:0]
    hot, holder, place = stripes[reader].find(ids, bounds[reader], bounds[reader + 1])
    return owned[~torch.isin(owned, ids[hot])], place[holder == q] + (bounds[q + 1] - bounds[q])


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


def account_gradients(
    bucket_sizes: Sequence[int], value_bytes: int, num_ranks: int, rank: int, num_groups: int = 1
) -> Cost:
    """What ``rank`` sends to sum the gradients of one step: slices to their summers, the own sum to all; or all at once.

    In groups, slices are summed inside first (``comm.TieredLine``).
    """
    if num_groups > 1:
        return _account_inside(bucket_sizes, value_bytes, num_ranks, rank, num_groups) + account_leaving(
            bucket_sizes, value_bytes, num_ranks, rank, num_groups
        )
    found = _Sum()
    for size in bucket_sizes:
        if is_summed_everywhere(size * value_bytes, num_ranks):
            for _ in range(num_ranks - 1):
                found.add("gradients", size * value_bytes)
            continue
        bounds = slices(size, num_ranks)
        mine = bounds[rank + 1] - bounds[rank]
        for q in range(num_ranks):
            if q != rank:
                found.add("gradients", (bounds[q + 1] - bounds[q]) * value_bytes)
                found.add("gradients", mine * value_bytes)
    return found.cost()


def account_leaving(
    bucket_sizes: Sequence[int], value_bytes: int, num_ranks: int, rank: int, num_groups: int
) -> Cost:
    """Of what ``rank`` sends to sum the gradients of one step, what goes to ranks of other groups."""
    near, found = num_ranks // num_groups, Cost()
    for size in bucket_sizes:
        if is_summed_everywhere(size * value_bytes, num_ranks):
            others = num_ranks - near
            found += Cost({"gradients": others * size * value_bytes}, {"gradients": others})
        else:
            bounds = slices(size, near)
            mine = bounds[rank % near + 1] - bounds[rank % near]
            found += account_gradients([mine], value_bytes, num_groups, rank // near)
    return found


def _account_inside(
    bucket_sizes: Sequence[int], value_bytes: int, num_ranks: int, rank: int, num_groups: int
) -> Cost:
    """The same of what goes to ranks of the own group."""
    near, found = num_ranks // num_groups, _Sum()
    for size in bucket_sizes:
        is_whole, bounds = is_summed_everywhere(size * value_bytes, num_ranks), slices(size, near)
        mine = bounds[rank % near + 1] - bounds[rank % near]
        for q in range(near):
            if q != rank % near and is_whole:
                found.add("gradients", size * value_bytes)
            elif q != rank % near:
                found.add("gradients", (bounds[q + 1] - bounds[q]) * value_bytes)
                found.add("gradients", mine * value_bytes)
    return found.cost()


def estimate(facts: Facts, rank: int) -> Cost:
    """What ``rank`` is expected to send in one step, from probabilities alone."""
    gradients = account_gradients(facts.bucket_sizes, facts.value_bytes, len(facts.likely), rank)
    rows = [_fetched(facts, q) for q in range(len(facts.likely))]
    return estimate_hops(facts, rank) + estimate_rows(facts, rows, rank) + gradients


def estimate_hops(facts: Facts, rank: int, num_batches: int = 1) -> Cost:
    """To sample a window of so many mini-batches."""
    peers = [q for q in range(len(facts.likely)) if q != rank]
    found = _Sum()
    is_mine = facts.owner == rank
    for hop in range(1, len(facts.num_neighbors)):
        fanout = facts.num_neighbors[hop]
        degree = facts.in_degree.double()
        drawn = degree if fanout < 0 else degree.clamp(max=fanout)
        _sizes(found, peers, 2)
        for q in peers:
            asked = _request_bytes(facts.likely[rank][hop], facts.owner == q, facts.wire)
            found.add("ids", num_batches * asked)
            lent = facts.likely[q][hop] * is_mine
            count, edges = float(lent.sum()), float((lent * drawn).sum())
            reply = count * facts.wire.count_dtype(fanout).itemsize + edges * facts.wire.edge_bytes
            found.add("ids", num_batches * reply)
    return found.cost()


def estimate_rows(facts: Facts, fetched: Sequence[Tensor], rank: int) -> Cost:
    """To fetch the nodes that rank q fetches with probability ``fetched[q]`` (float64 [N])."""
    peers = [q for q in range(len(facts.likely)) if q != rank]
    found = _Sum()
    _sizes(found, peers, 1)
    row_bytes = facts.layout.row_bytes
    assert row_bytes is not None, "sparse rows have no width to estimate from"
    served = [facts.owner] * len(facts.likely) if facts.served is None else facts.served
    for q in peers:
        found.add("ids", _request_bytes(fetched[rank], served[rank] == q, facts.wire))
        found.add("features", float((fetched[q] * (served[q] == rank)).sum()) * row_bytes)
    return found.cost()


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
