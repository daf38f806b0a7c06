"""What one mini-batch of all ranks moves, whichever strategy trains it: tables between every two ranks, counted from drawn
mini-batches or expected before anything is drawn.

Draws are a function of the node, so the same seeds give the same neighbours everywhere, and two readings of one mini-batch
describe all strategies over parts:

    own      each rank draws for its own seeds (``data``, ``pushpull``, the upper layers of ``split``): nodes overlap
    shared   owners draw for all seeds (``split``): every node once, and what crosses is what one owner reads of another

Expectations come from inclusion probabilities (``sample/inclusion.py``): of every rank's own mini-batch and of the shared
one, hop by hop. Rank i reads row v of rank j at hop h unless all of its nodes w miss it:

    crossing_h[i, j] = sum_{v of j} 1 - prod_{w of i, v -> w} (1 - p_h(w) min(1, f_h / d(w)))

They are those of uniform draws; LABOR draws fewer nodes, of all readings alike.

Legend: N nodes, n own nodes, P ranks, L hops, S sources of a part, H its halo; [P, P] from reader i to owner j.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhop.comm import Collective
from polyhop.exchange import Halo
from polyhop.graph import SharedGraph
from polyhop.sample import MiniBatch
from polyhop.sample.inclusion import to_sources
from polyhop.sample.wire import Wire
from polyhop.strategies.part_step import hottest, included
from polyhop.strategies.split_cost import asked

__all__ = ["Flows", "Pairs", "counted", "expected_pairs", "gather_flows", "gather_flows_of"]


@dataclass(frozen=True, eq=False)
class Pairs:
    """Nodes of rank j that rank i has to do with, and the bytes in which it names them to rank j."""

    rows: Tensor  # float64 [P, P]
    ids: Tensor  # float64 [P, P], 0 for the own


@dataclass(frozen=True, eq=False)
class Flows:
    """Of one mini-batch. Whole numbers where it is counted, expectations where it is expected."""

    own: Sequence[Pairs]  # [L + 1]: nodes that rank i's own mini-batch knows after each hop
    own_edges: Tensor  # float64 [L, P, P]: that rank j draws for it
    fetched: Pairs  # its inputs, less the rows that rank i keeps of others
    shared: Tensor  # float64 [L + 1, P]: nodes of the shared mini-batch after each hop, by owner
    shared_edges: Tensor  # float64 [L, P]
    crossing: Sequence[Pairs]  # [L]: rows that the draws of each hop read elsewhere
    uncopied: Pairs  # those of the last hop of which rank i has no copy
    copied: Tensor  # float64 [P]: copies that each rank reads
    loaded: Tensor  # float64 [P]: inputs that each rank loads, where others have copies
    is_alike: bool = False  # what holds for one rank holds for all

    @property
    def num_ranks(self) -> int:
        return int(self.shared.shape[1])

    @property
    def ranks(self) -> range:
        """Those that must be looked at to know of all."""
        return range(1 if self.is_alike else self.num_ranks)

    @property
    def num_hops(self) -> int:
        return len(self.crossing)


# Counted


def counted(
    whole: MiniBatch,
    batches: Sequence[MiniBatch],
    new_ids: Tensor,
    bounds: Tensor,
    wire: Wire,
    *,
    kept: Sequence[Tensor] | None = None,
    copies: Sequence[Tensor] | None = None,
) -> Flows:
    """Of a mini-batch as one process draws it whole, and for each rank's seeds; by the user's ids.

    ``new_ids`` int64 [N] and ``bounds`` int64 [P + 1] say who owns what. ``kept[r]``: new ids whose rows rank r keeps in
    strategy ``data``; ``copies[r]``: those that it has copies of in ``split``.
    """
    num_ranks, hops = bounds.numel() - 1, len(whole.blocks)
    known = [[new_ids[ids] for ids in _by_hop(batch)] for batch in batches]
    own = [_named([of[hop] for of in known], bounds, wire) for hop in range(hops + 1)]
    own_edges = torch.stack(
        [
            torch.stack([_edges(batch, hop, new_ids, bounds) for batch in batches])
            for hop in range(hops)
        ]
    )  # fmt: skip
    inputs = [of[hops] for of in known]
    if kept is not None:
        inputs = [mine[~torch.isin(mine, held)] for mine, held in zip(inputs, kept, strict=True)]
    crossing = [Pairs(*torch.zeros(2, num_ranks, num_ranks, dtype=torch.float64)) for _ in range(hops)]
    uncopied = Pairs(*torch.zeros(2, num_ranks, num_ranks, dtype=torch.float64))
    copied = torch.zeros(num_ranks, dtype=torch.float64)
    for each in asked(whole, new_ids, bounds):
        at, rows = (each.reader, each.owner), each.rows
        _put(crossing[hops - 1 - each.layer], at, rows, wire)
        if each.layer == 0:
            if copies is not None:
                is_copied = torch.isin(rows + bounds[each.owner], copies[each.reader])
                copied[each.reader] += int(is_copied.sum())
                rows = rows[~is_copied]
            _put(uncopied, at, rows, wire)
    shared = torch.stack([_counts(new_ids[ids], bounds) for ids in _by_hop(whole)])
    shared_edges = torch.stack([_edges(whole, hop, new_ids, bounds) for hop in range(hops)])
    loaded = shared[hops] if copies is None else _loaded(whole, new_ids, bounds, copies)
    return Flows(
        own, own_edges, _named(inputs, bounds, wire), shared, shared_edges, crossing, uncopied, copied, loaded
    )


def _by_hop(batch: MiniBatch) -> list[Tensor]:
    """[L + 1]: the nodes known after each hop, seeds first."""
    found = [batch.blocks[-1].dst_ids()]
    for block in reversed(batch.blocks):
        assert block.src_ids is not None
        found.append(block.src_ids)
    return found


def _counts(ids: Tensor, bounds: Tensor) -> Tensor:
    """float64 [P]: how many of the new ids each part owns."""
    owner = torch.searchsorted(bounds[1:], ids, right=True)
    return torch.bincount(owner, minlength=bounds.numel() - 1).double()


def _edges(batch: MiniBatch, hop: int, new_ids: Tensor, bounds: Tensor) -> Tensor:
    """float64 [P]: drawn in a hop, by owner of the node that draws."""
    block = batch.blocks[len(batch.blocks) - 1 - hop]
    owner = torch.searchsorted(bounds[1:], new_ids[block.dst_ids()], right=True)
    return torch.bincount(owner, weights=block.drawn.double(), minlength=bounds.numel() - 1)


def _named(ids: Sequence[Tensor], bounds: Tensor, wire: Wire) -> Pairs:
    """Of the nodes (new ids) of each rank."""
    found = Pairs(*torch.zeros(2, len(ids), len(ids), dtype=torch.float64))
    for reader, mine in enumerate(ids):
        mine = mine.sort().values
        cuts = torch.searchsorted(mine, bounds).tolist()
        for owner in range(len(ids)):
            rows = mine[cuts[owner] : cuts[owner + 1]] - bounds[owner]
            _put(found, (reader, owner), rows, wire)
    return found


def _put(pairs: Pairs, at: tuple[int, int], rows: Tensor, wire: Wire) -> None:
    pairs.rows[at] = rows.numel()
    pairs.ids[at] = 0 if at[0] == at[1] else wire.request_bytes(rows)


def _loaded(whole: MiniBatch, new_ids: Tensor, bounds: Tensor, copies: Sequence[Tensor]) -> Tensor:
    """float64 [P]: inputs that their owner, or a rank without a copy, reads."""
    block = whole.blocks[0]
    assert block.src_ids is not None
    ids = new_ids[block.src_ids]
    at = torch.repeat_interleave(torch.arange(block.num_dst), block.drawn) + block.dst_start
    source, reader = ids[block.indices.long()], torch.searchsorted(bounds[1:], ids[at], right=True)
    is_read = torch.ones_like(source, dtype=torch.bool)
    for rank, held in enumerate(copies):
        is_read &= ~((reader == rank) & torch.isin(source, held))
    return _counts(torch.unique(torch.cat([source[is_read], new_ids[block.dst_ids()]])), bounds)


# Expected


def gather_flows(
    graph: SharedGraph,
    train_ids: Tensor,
    chance: float,
    fan_outs: Sequence[int],
    line: Collective,
    *,
    cache_bytes: int = 0,
) -> Flows:
    """What a mini-batch is expected to move; the same on all ranks, which call it together.

    ``train_ids``: local rows of own train nodes, each of which is a seed with probability ``chance``. ``cache_bytes``: of
    rows of others that a rank keeps, in ``data`` and in ``split``, each of which picks its own. Sends 16 (P + 1) bytes a
    hop for each node of the halo.
    """
    (found,) = gather_flows_of(graph, train_ids, chance, fan_outs, line, [cache_bytes])
    return found


def gather_flows_of(
    graph: SharedGraph,
    train_ids: Tensor,
    chance: float,
    fan_outs: Sequence[int],
    line: Collective,
    cache_bytes: Sequence[int],
) -> list[Flows]:
    """The same for caches of several sizes, for little more."""
    part = graph.stored("what a mini-batch is expected to move")
    rank, num_ranks, hops = line.rank, line.num_ranks, len(fan_outs)
    start = torch.zeros(part.num_nodes, num_ranks + 1, dtype=torch.float64)
    start[train_ids, rank] = start[train_ids, num_ranks] = chance
    likely = included(part, start, fan_outs, line)
    degree = part.indptr.diff().double()
    draws = [degree if fanout < 0 else degree.clamp(max=fanout) for fanout in fan_outs]
    missed = [
        torch.log1p(-(likely[hop][:, num_ranks] * draws[hop] / degree.clamp(min=1)).clamp(max=1 - 1e-12))
        for hop in range(hops)
    ]
    sums = to_sources(part.block(), torch.stack(missed, dim=1))  # [S, L]
    read = -torch.expm1(sums[part.num_nodes :])
    cuts = torch.searchsorted(part.halo, part.bounds).tolist()
    found = []
    for each in cache_bytes:
        told = _Told(hops, num_ranks)
        for hop in range(hops + 1):
            told.own[hop, :, rank], told.shared[hop, rank] = _cut(likely[hop].sum(0), num_ranks)
            if hop < hops:
                edges = likely[hop].T @ draws[hop]
                told.own_edges[hop, :, rank], told.shared_edges[hop, rank] = _cut(edges, num_ranks)
        most = each // (8 + 4 * max(1, graph.num_features))
        is_copied = torch.zeros(read.shape[0], dtype=torch.bool)
        is_copied[torch.sort(read[:, -1], descending=True, stable=True).indices[:most]] = True
        kept = hottest(likely[-1][:, :num_ranks], part.start, most, line)
        keeper = torch.searchsorted(part.bounds[1:], kept[:, 0].long(), right=True)
        for owner in range(num_ranks):
            piece = slice(cuts[owner], cuts[owner + 1])
            told.crossing[:, rank, owner] = read[piece].sum(0)
            told.uncopied[rank, owner] = read[piece, -1][~is_copied[piece]].sum()
            told.kept[rank, owner] = kept[keeper == owner, 1].sum()
        told.copied[rank] = read[is_copied, -1].sum()
        told.unloaded[rank] = _unloaded(graph, line, likely[-2][:, num_ranks], sums[:, -1], is_copied)
        found.append(told.flows(part.bounds.diff().double(), line))
    return found


def _cut(sums: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
    """(of each rank's own mini-batch, of the shared one)."""
    return sums[:num_ranks], sums[num_ranks]


def _unloaded(
    graph: SharedGraph, line: Collective, known: Tensor, missed: Tensor, is_copied: Tensor
) -> float:
    """Own inputs that only ranks with copies of them read. ``missed`` float64 [S]: logarithms, of one hop."""
    part, halo = graph.stored("copies"), Halo(graph.stored("copies"), line)
    far = missed[part.num_nodes :]
    both = torch.stack([far, far * ~is_copied], dim=1)
    own = missed[: part.num_nodes, None].repeat(1, 2)
    everyone, others = halo.back(both, own, kind="ids").unbind(1)
    return float(((1 - known) * (torch.exp(others) - torch.exp(everyone))).sum())


class _Told:
    """What each rank knows of the tables, all in one vector that ranks add up."""

    def __init__(self, hops: int, num_ranks: int) -> None:
        pair = (num_ranks, num_ranks)
        shapes = [
            (hops + 1, *pair), (hops, *pair), (hops + 1, num_ranks), (hops, num_ranks), (hops, *pair), pair, pair,
            (num_ranks,), (num_ranks,),
        ]  # fmt: skip
        sizes = [torch.Size(shape).numel() for shape in shapes]
        self._all = torch.zeros(sum(sizes), dtype=torch.float64)
        views = [piece.view(shape) for piece, shape in zip(self._all.split(sizes), shapes, strict=True)]  # type: ignore[no-untyped-call]
        self.own, self.own_edges, self.shared, self.shared_edges, self.crossing = views[:5]
        self.uncopied, self.kept, self.copied, self.unloaded = views[5:]

    def flows(self, sizes: Tensor, line: Collective) -> Flows:
        """The tables, once all ranks have told theirs; ``sizes`` float64 [P]: nodes of each part."""
        self._all.copy_(line.all_reduce(self._all, kind="ids"))
        return Flows(
            [expected_pairs(rows, sizes) for rows in self.own],
            self.own_edges,
            expected_pairs((self.own[-1] - self.kept).clamp(min=0), sizes),
            self.shared,
            self.shared_edges,
            [expected_pairs(rows, sizes) for rows in self.crossing],
            expected_pairs(self.uncopied, sizes),
            self.copied,
            self.shared[-1] - self.unloaded,
        )


def expected_pairs(rows: Tensor, sizes: Tensor) -> Pairs:
    """Of expected rows, in parts of such sizes; ids as deltas: a byte for each, one more for gaps of 2^7, 2^14, ..."""
    misses = (1 - rows / sizes.clamp(min=1)).clamp(min=0)
    ids = rows * (1 + sum((misses ** (1 << 7 * more) for more in (1, 2, 3, 4)), torch.zeros_like(rows)))
    return Pairs(rows, ids * (1 - torch.eye(rows.shape[0], dtype=rows.dtype)))
