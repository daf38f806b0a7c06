"""One mini-batch over all ranks: every node of it is drawn, loaded and computed by its owner, and by nobody else.

    hop     owners draw the in-edges of their frontier -> ids of sources elsewhere go to their owners, once each -> an
            owner's next frontier: its frontier, its own sources, what others asked of it
    layer   the other way round: rows of a frontier to the ranks that asked for them (``crossing``)

Draws are keyed by the user's id of a node, so all frontiers together are those of one process, and no two share a node. A
part knows its halo's ids and degrees, so ids are all that is exchanged.

Ways to send less. ``copies``: input rows of some nodes elsewhere are here from the start, and are not asked for.
``depth`` below the number of layers: hops above are drawn by each rank for its own seeds (as in ``data``: nearly all that is
read twice is read in the last hops), and one frontier of any nodes (``Joint``) asks owners for the rows below it.
``prices``: sums of rows cross in place of the rows where they are fewer bytes (``wanted``).

Legend: F own frontier of a hop, F' the next one, H sources elsewhere, n own nodes of the part, U nodes of a joint, P ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyhop.comm import Collective
from polyhop.errors import ConfigError, unknown
from polyhop.exchange.crossing import Lists
from polyhop.exchange.features import FactFormat, NodeFacts, RowFetch
from polyhop.exchange.hot import HotRows
from polyhop.exchange.loader import Seeds, blocks_of
from polyhop.exchange.wanted import FarEdges, Price, Wanted, told, with_sums
from polyhop.graph import Block, Part, SparseRows, Sums
from polyhop.kernels import Key
from polyhop.kernels.owners import by_owner
from polyhop.kernels.relabel import Relabel
from polyhop.kernels.sample import METHODS, check_fanouts
from polyhop.kernels.variates import check_dependence, sample_key
from polyhop.sample.ahead import ahead
from polyhop.sample.part import Drawn, PartSampler
from polyhop.sample.wire import Wire
from polyhop.trace import NO_TRACE, Trace

__all__ = ["Copies", "Joint", "SharedBatch", "SharedDraw", "SharedLayer", "SharedLoader", "SharedSampler"]


@dataclass(frozen=True, eq=False)
class SharedLayer:
    """This rank's edges of one layer. Sources: own rows (F', its first F are the destinations), then the halo's."""

    block: Block  # edges that are in a sum from elsewhere are not in it
    lists: Lists
    sums: Sums | None = None


@dataclass(frozen=True, eq=False)
class Joint:
    """Where layers that each rank computes for its own seeds read what owners have computed."""

    lists: Lists
    place: Tensor  # int64 [U]: of each node, its row among the own ones (F), then those that arrive
    above: tuple[Block, ...]  # of the layers above, plain


@dataclass(frozen=True, eq=False)
class SharedDraw:
    """What one rank has drawn of a mini-batch."""

    layers: tuple[SharedLayer, ...]  # input layer first
    inputs: Tensor  # int64: own local rows whose features are read: the last F'
    copied: Tensor  # int64: places among the copies whose rows are read; they stand behind the inputs
    joint: Joint | None = None


@dataclass(frozen=True, eq=False)
class SharedBatch:
    """The same with its rows."""

    step: int
    drawn: SharedDraw
    x: (
        Tensor | SparseRows
    )  # [inputs, copied; columns], and those of nodes elsewhere where the loader brings them
    y: Tensor  # labels of the own seeds
    num_global: int  # seeds of all ranks

    @property
    def layers(self) -> tuple[SharedLayer, ...]:
        return self.drawn.layers


@dataclass(frozen=True, eq=False)
class Copies:
    """Input rows of nodes elsewhere that are here from the start."""

    rows: Tensor  # int64 [K], ascending: rows of the part's halo, from n on
    x: Tensor  # [K, columns]


class SharedSampler:
    """Draws one rank's share of mini-batches. Serves one thread; all ranks call it together."""

    def __init__(
        self,
        part: Part,
        num_neighbors: Sequence[int],
        wire: Wire,
        *,
        seed: int = 0,
        method: str = "uniform",
        depth: int | None = None,
        copies: Tensor | None = None,
        prices: Sequence[Price | None] | None = None,
        dependence: int = 1,
    ) -> None:
        """``prices``: of a row at each layer, input layer first; None: where, or if at all, no sums cross."""
        if method not in METHODS:
            raise ConfigError(unknown("sampling method", method, METHODS))
        self.part, self.wire, self.seed, self.method = part, wire, seed, method
        self.dependence = check_dependence(dependence, method)
        self.num_neighbors = check_fanouts(num_neighbors)
        self._num_above = 0 if depth is None else len(num_neighbors) - depth
        self._above = None
        if self._num_above:
            above = self.num_neighbors[: self._num_above]
            self._above = PartSampler(part, above, wire, seed=seed, method=method, dependence=dependence)
        self._copies = torch.empty(0, dtype=torch.int64) if copies is None else copies
        self._prices = [None] * len(num_neighbors) if prices is None else list(prices)
        self._relabel = Relabel()

    def sample(self, line: Collective, seeds: Tensor, epoch: int, step: int) -> SharedDraw:
        """Of own, distinct seeds (int64, local rows)."""
        layers, frontier, joint = list[SharedLayer](), seeds, None
        if self._above is not None:
            drawn = self._above.sample(line, seeds + self.part.start, epoch, step)
            joint, frontier = self._join(line, drawn)
        copied = self._copies[:0]
        for hop in range(self._num_above, len(self.num_neighbors)):
            key = sample_key(Key(self.seed, epoch, step), hop, self.dependence)
            drawn_rows = self.part.drawn_rows(frontier, self.num_neighbors[hop], key, self.method)
            copies = self._copies if hop == len(self.num_neighbors) - 1 else self._copies[:0]
            layer, frontier, copied = self._hop(line, frontier, hop, drawn_rows, copies)
            layers.append(layer)
        return SharedDraw(tuple(reversed(layers)), frontier, copied, joint)

    def _join(self, line: Collective, drawn: Drawn) -> tuple[Joint, Tensor]:
        """(how any nodes get their rows from owners, the own rows that this rank is asked for or needs)."""
        ids, own, part = drawn.ids, line.rank, self.part
        order, rows, counted = by_owner(
            ids, [0, ids.numel()], part.bounds, own, is_sorted=not self.wire.is_plain
        )
        pieces = list(rows.split(counted[:, 0].tolist()))  # type: ignore[no-untyped-call]
        mine, pieces[own] = pieces[own], rows[:0]
        asked = self._exchange(line, pieces)
        self._relabel.start(mine)
        lent = [self._relabel.add(each).long() for each in asked]
        following = self._relabel.ids()
        # In the order of owners, own rows stand in the middle; behind them come all that arrive.
        counts = [piece.numel() for piece in pieces]
        placed, arrived = [], following.numel()
        for q, count in enumerate(counts):
            start, size = (0, mine.numel()) if q == own else (arrived, count)
            placed.append(torch.arange(start, start + size))
            arrived += count
        place = torch.empty_like(order)
        place[order] = torch.cat(placed)
        facts = self._facts(line, asked, counts)
        facts[own] = NodeFacts(*part.facts_of(mine))
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel())
        blocks = blocks_of(drawn, NodeFacts.joined(facts).at(back))
        return Joint(Lists(following.numel(), lent, counts), place, blocks), following

    def _facts(self, line: Collective, asked: Sequence[Tensor], counts: Sequence[int]) -> list[NodeFacts]:
        """Of the nodes that this rank asked each owner for, so many of each; others get those of the rows they asked for."""
        part = self.part
        layout = FactFormat(self.wire.id_dtype, part.in_weight is not None, part.loop_weight is not None)
        leaving = [layout.encode(NodeFacts(*part.facts_of(rows))) for rows in asked]
        sizes = [layout.num_bytes * count for count in counts]
        arriving = line.all_to_all(leaving, kind="ids", counts=sizes)
        return [layout.decode(data, count) for data, count in zip(arriving, counts, strict=True)]

    def _hop(
        self,
        line: Collective,
        frontier: Tensor,
        hop: int,
        drawn: tuple[Tensor, Tensor, Tensor | None],
        copies: Tensor,
    ) -> tuple[SharedLayer, Tensor, Tensor]:
        """(the layer, F', places of the copies that it reads) of what the frontier has drawn."""
        part, price = self.part, self._prices[len(self.num_neighbors) - 1 - hop]
        counts, sources, weights = drawn
        is_far = sources >= part.num_nodes
        far, at = torch.unique(sources[is_far].long(), return_inverse=True)
        is_copied = torch.isin(far, copies, assume_unique=True)
        copied, asked_for = far[is_copied], far[~is_copied]
        # Copies stand before what is asked for.
        place = torch.where(is_copied, is_copied.cumsum(0), copied.numel() + (~is_copied).cumsum(0)) - 1
        edges = FarEdges.of(is_far, place[at] - copied.numel(), counts)
        wanted = self._wanted(asked_for, edges, frontier, price, line)
        asked = self._ask(line, wanted, takes_sums=price is not None)
        self._relabel.start(frontier)
        own = self._relabel.add(sources[~is_far].long())
        lent = [self._relabel.add(each.rows).long() for each in asked]
        following = self._relabel.ids()
        num_own = following.numel() + copied.numel()
        indices = torch.empty(sources.numel(), dtype=torch.int32)
        indices[~is_far] = own
        indices[is_far] = (following.numel() + place[at]).to(torch.int32)
        indptr = torch.zeros(frontier.numel() + 1, dtype=torch.int64)
        torch.cumsum(counts, 0, out=indptr[1:])
        rows = torch.cat([following, copied, asked_for])
        is_sampled = self.num_neighbors[hop] > 0
        block = self._block(indptr, indices, rows, weights, is_sampled=is_sampled)
        layer = SharedLayer(block, Lists(num_own, lent, [each.rows.numel() for each in wanted]))
        if price is not None:
            weights = self._weights(line, block, edges, wanted, asked)
            layer = SharedLayer(*with_sums(block, layer.lists, edges, (wanted, asked), weights))
        return layer, following, torch.searchsorted(copies, copied)

    def _wanted(
        self, far: Tensor, edges: FarEdges, frontier: Tensor, price: Price | None, line: Collective
    ) -> list[Wanted]:
        """What is asked of each rank for halo rows, ascending: they are by owner."""
        part = self.part
        ids = part.halo[far - part.num_nodes]
        cuts = torch.searchsorted(ids, part.bounds).tolist()  # none of the own
        sizes, found = part.bounds.diff().tolist(), []
        for q in range(line.num_ranks):
            rows = ids[cuts[q] : cuts[q + 1]] - part.bounds[q]
            if price is None:
                found.append(Wanted(rows, far[:0], far[:0]))
                continue
            its = edges.between(cuts[q], cuts[q + 1])
            place, to = edges.place[its] - cuts[q], frontier[edges.to[its]]
            each = Wanted.of(rows, place, to, sizes[q], price, self.wire)
            found.append(replace(each, edges=its[each.edges]))
        return found

    def _ask(self, line: Collective, wanted: Sequence[Wanted], *, takes_sums: bool) -> list[Wanted]:
        """What each rank asks of this one."""
        sizes = self.part.bounds.diff().tolist()
        numbers = self._sent(line, [each.numbers(size) for each, size in zip(wanted, sizes, strict=True)])
        return [told(each, sizes[line.rank], q, takes_sums=takes_sums) for q, each in enumerate(numbers)]

    def _weights(
        self,
        line: Collective,
        block: Block,
        edges: FarEdges,
        wanted: Sequence[Wanted],
        asked: Sequence[Wanted],
    ) -> Tensor | None:
        """float [e]: of the entries of all sums that leave: their readers know them."""
        if block.edge_weight is None:
            return None
        sent = [block.edge_weight[edges.at[each.edges]].to(line.device) for each in wanted]
        came = line.all_to_all(sent, kind="ids", counts=[each.entry.numel() for each in asked])
        return torch.cat([piece.cpu() for piece in came])

    def _exchange(self, line: Collective, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Own rows that each rank asks for, where this one asks each for ``pieces`` (int64, ascending rows of the owner)."""
        size = self.part.num_nodes
        numbers = self._sent(line, pieces)
        return [told(each, size, q, takes_sums=False).rows for q, each in enumerate(numbers)]

    def _sent(self, line: Collective, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Ascending numbers for each rank; those that came."""
        arriving = line.all_to_all([self.wire.request(piece) for piece in pieces], kind="ids")
        return [self.wire.rows(data) if data.numel() else pieces[0][:0] for data in arriving]

    def _block(
        self, indptr: Tensor, indices: Tensor, rows: Tensor, weights: Tensor | None, *, is_sampled: bool
    ) -> Block:
        part = self.part
        in_weight, loops = part.in_weight, part.loop_weight
        return Block(
            indptr,
            indices,
            rows.numel(),
            src_ids=part.src_ids.index_select(0, rows),
            edge_weight=weights,
            in_degree=part.in_degree.index_select(0, rows),
            in_weight=None if in_weight is None else in_weight.index_select(0, rows),
            loop_weight=None if loops is None else loops.index_select(0, rows),
            is_sampled=is_sampled,
        )


class SharedLoader:
    """One rank's share of an epoch's mini-batches, drawn and loaded ahead of training.

    ``brings``: input rows of nodes elsewhere come along, as such numbers, so that the first layer has all that it reads.
    ``hot``: own rows that are not read again; rows of a mini-batch are then where those are.
    """

    def __init__(
        self,
        line: Collective,
        sampler: SharedSampler,
        fetch: RowFetch,
        seeds: Seeds,
        *,
        prefetch: int = 2,
        copies: Copies | None = None,
        hot: HotRows | None = None,
        brings: torch.dtype | None = None,
        trace: Trace = NO_TRACE,
    ) -> None:
        self.line, self.sampler, self.seeds = line, sampler, seeds
        self._fetch, self._prefetch, self._copies, self._trace = fetch, prefetch, copies, trace
        self.brings, self.hot = brings, hot
        self.num_loaded = 0  # own feature rows so far
        self.num_hot = 0  # those of them that were kept

    def __len__(self) -> int:
        return self.seeds.num_steps

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[SharedBatch]:
        """From ``start_step`` on, in step order; all ranks take them together."""
        own = self.seeds.own(epoch)

        def load(step: int) -> SharedBatch:
            return self._load(own[step] - self.sampler.part.start, epoch, step)

        steps = range(start_step, len(self))
        if self._prefetch == 0:
            return map(load, steps)
        # What one rank has begun all finish, or the others would wait for it.
        return ahead(load, steps, 1, self._prefetch, finish_begun=True)

    def _load(self, seeds: Tensor, epoch: int, step: int) -> SharedBatch:
        part = self.sampler.part
        assert part.y is not None, "the trainer checks that labels are there"
        with self._trace.span("sample", epoch=epoch, step=step):
            drawn = self.sampler.sample(self.line, seeds, epoch, step)
        with self._trace.span("load", epoch=epoch, step=step):
            x = self._own(drawn.inputs)
            if self._copies is not None and drawn.copied.numel():
                x = x.dense() if isinstance(x, SparseRows) else x
                x = torch.cat([x, self._copies.x.index_select(0, drawn.copied).to(x)])
            if self.brings is not None:
                x = self._joined(
                    x.dense() if isinstance(x, SparseRows) else x, drawn.layers[0].lists, self.brings
                )
        return SharedBatch(step, drawn, x, part.y[seeds], self.seeds.count(step))

    def _own(self, inputs: Tensor) -> Tensor | SparseRows:
        """Features of own nodes (int64, local rows)."""
        self.num_loaded += inputs.numel()
        if self.hot is None:
            return self._fetch.own(inputs)
        x, num_hot = self.hot.rows(inputs, self._fetch.own)
        self.num_hot += num_hot
        return x

    def _joined(self, x: Tensor, lists: Lists, dtype: torch.dtype) -> Tensor:
        """Rows here [num_own, columns] -> these and those of nodes elsewhere, which send theirs."""
        x, away = x.to(dtype), self.line.device
        leaving = [x.index_select(0, rows.to(x.device)).to(away) for rows in lists.lent]
        arriving = self.line.all_to_all(leaving, kind="hidden", counts=lists.wanted)
        return torch.cat([x, *(rows.to(x.device) for rows in arriving)])

    def close(self) -> None:
        """Let go of the line, with the other ranks."""
        self.line.close()
