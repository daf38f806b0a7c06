"""What one step asks of a rank in each strategy over parts: bytes, rounds, rows, edges, products. From the tables of a
mini-batch (``flows``): accounted where they were counted, to the byte and the round; estimated where they are expected.

    data        own mini-batches: hops 1 .. L - 1 are asked of owners, then the inputs
    pushpull    the same hops; ids and edges of the first layer to all, mapped rows back
    split       the shared mini-batch: a request a hop, then rows before each layer, and their gradients after it
    split of k  the k layers nearest the inputs of the shared mini-batch, hops above as in ``data``; where they meet, ids
                and facts of the nodes that own mini-batches know, and the rows of all that the model carries

Legend: P ranks, L layers; of a layer S sources, D destinations, E edges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polyhop.comm import Cost
from polyhop.comm.collective import is_summed_everywhere
from polyhop.graph import Sizes
from polyhop.nn.counts import Counts
from polyhop.strategies.data_cost import account_gradients
from polyhop.strategies.flows import Flows
from polyhop.strategies.shape import Shape

__all__ = ["Variant", "Work", "work_of"]


@dataclass(frozen=True)
class Variant:
    """A strategy, and the options that change what it sends."""

    strategy: str  # data | split | pushpull
    depth: int = 0  # of split: layers that are split, from the inputs
    has_cache: bool = False  # rows of others are kept (data) or copied (split), as many as were counted on
    bits: int = 32  # of split: of a value between layers; fewer are approximate

    def __str__(self) -> str:
        if self.strategy != "split":
            return f"{self.strategy}{' with a cache' if self.has_cache else ''}"
        said = f"split of {self.depth}"
        said += " with copies" if self.has_cache else ""
        return said if self.bits == 32 else f"{said} in {self.bits} bits"

    def options(self, cache_bytes: int) -> dict[str, Any]:
        """What the strategy's ``Config`` is given for it."""
        given: dict[str, Any] = {"cache_bytes": cache_bytes} if self.has_cache else {}
        if self.strategy == "split":
            given["split_depth"] = self.depth
            given |= {} if self.bits == 32 else {"bits": self.bits}
        return given


@dataclass(frozen=True)
class Work:
    """Of one rank in one step."""

    ahead: Cost  # what it sends to sample and load, which runs ahead of training
    train: Cost  # what it sends in the step itself
    ahead_to: Sequence[float]  # bytes of the former, for each rank
    train_to: Sequence[float]  # of the latter
    shuffled: Sequence[
        float
    ]  # rows that leave it before each layer that is split, input layer first; then the joint's
    shuffled_bytes: Sequence[float]  # of them and of the gradients that it returns for such rows
    loaded: float  # feature rows that it reads, for itself and for others
    loaded_bytes: float
    nodes: float  # that it draws for, asks for or answers for: what sampling handles
    drawn: float  # edges that it draws or is sent
    edges: float  # that it aggregates, forward, of all layers
    counts: Counts  # what it computes, forward and backward

    @property
    def cost(self) -> Cost:
        return self.ahead + self.train


# A step


def work_of(flows: Flows, shape: Shape, variant: Variant, rank: int) -> Work:
    """What the step asks of ``rank``."""
    made = {"data": _data, "split": _split, "pushpull": _pushpull}
    return made[variant.strategy](flows, shape, variant, rank)


class _Sent:
    """What a rank sends, exchange by exchange, as ``comm`` counts it."""

    def __init__(self, num_ranks: int, rank: int) -> None:
        self._peers = [q for q in range(num_ranks) if q != rank]
        self._bytes: Counter[str] = Counter()
        self._messages: Counter[str] = Counter()
        self._rounds = 0
        self._summed = Cost()
        self.to = [0.0] * num_ranks  # bytes

    def exchange(self, kind: str, sizes: Sequence[float] | Tensor) -> float:
        """So many bytes to each rank; gives their sum."""
        total = 0.0
        each = sizes.tolist() if isinstance(sizes, Tensor) else sizes
        for q in self._peers:
            size = float(each[q])
            if size > 0:
                self._bytes[kind] += size  # type: ignore[assignment]
                self._messages[kind] += 1
                self.to[q] += size
                total += size
        self._rounds += bool(self._peers)
        return total

    def lengths(self, num_bytes: int = 8) -> None:
        """Of messages whose length only the sender knows."""
        self.exchange("sizes", [num_bytes] * (len(self._peers) + 1))

    def summed(self, sizes: Sequence[int], value_bytes: int, rank: int) -> None:
        """Gradients of the weights, which go to all peers alike."""
        num_ranks = len(self.to)
        if num_ranks == 1:
            return
        self._summed = account_gradients(sizes, value_bytes, num_ranks, rank)
        self._rounds += sum(1 if is_summed_everywhere(size * value_bytes, num_ranks) else 2 for size in sizes)
        for q in self._peers:
            self.to[q] += self._summed.total_bytes / len(self._peers)

    def cost(self) -> Cost:
        return Cost(dict(self._bytes), dict(self._messages), self._rounds) + self._summed


def _hops(sent: _Sent, flows: Flows, shape: Shape, rank: int, stop: int) -> None:
    """Hops 1 .. stop - 1 of own mini-batches: requests, then drawn lists."""
    for hop in range(1, stop):
        sent.lengths()
        sent.exchange("ids", flows.own[hop].ids[rank])
        sent.lengths()
        counts, edges = flows.own[hop].rows[:, rank].tolist(), flows.own_edges[hop, :, rank].tolist()
        each = shape.wire.count_dtype(shape.num_neighbors[hop]).itemsize
        sent.exchange(
            "ids", [c * each + e * shape.wire.edge_bytes for c, e in zip(counts, edges, strict=True)]
        )


def _own_sizes(flows: Flows, rank: int, hop: int) -> Sizes:
    """Of the layer that an own mini-batch draws in a hop."""
    return Sizes(
        round(float(flows.own[hop + 1].rows[rank].sum())),
        round(float(flows.own[hop].rows[rank].sum())),
        round(float(flows.own_edges[hop, rank].sum())),
    )


def _handled(flows: Flows, rank: int, stop: int) -> tuple[float, float]:
    """(nodes, edges) that sampling of own mini-batches handles, hops 0 .. stop - 1: what a rank asks for, and answers."""
    nodes = edges = 0.0
    for hop in range(stop):
        rows, drawn = flows.own[hop].rows, flows.own_edges[hop]
        nodes += float(rows[rank].sum() + rows[:, rank].sum() - rows[rank, rank])
        edges += float(drawn[rank].sum() + drawn[:, rank].sum() - drawn[rank, rank])
    return nodes, edges


def _data(flows: Flows, shape: Shape, variant: Variant, rank: int) -> Work:
    hops, num_ranks = flows.num_hops, flows.num_ranks
    sent, train = _Sent(num_ranks, rank), _Sent(num_ranks, rank)
    inputs = flows.fetched if variant.has_cache else flows.own[hops]
    _hops(sent, flows, shape, rank, hops)
    sent.lengths()
    sent.exchange("ids", inputs.ids[rank])
    if not shape.is_dense:
        sent.lengths()
    sent.exchange("features", inputs.rows[:, rank] * shape.row_bytes)
    edges, counts = 0.0, Counts()
    for hop in range(hops):
        sizes = _own_sizes(flows, rank, hop)
        edges += sizes.num_edges
        counts += shape.layers[hops - 1 - hop].computed(sizes)
    nodes, drawn = _handled(flows, rank, hops)
    # Own rows and those that others ask for are read here; those that arrive, and kept ones, are put in order.
    lent = float(inputs.rows[:, rank].sum() - inputs.rows[rank, rank])
    mine = float(flows.own[hops].rows[rank].sum())
    train.summed(shape.bucket_sizes, shape.value_bytes, rank)
    return Work(
        sent.cost(),
        train.cost(),
        sent.to,
        train.to,
        (),
        (),
        lent + float(inputs.rows[rank, rank]),
        (lent + 2 * mine) * shape.input_bytes,
        nodes + mine,
        drawn,
        edges,
        counts,
    )


def _split(flows: Flows, shape: Shape, variant: Variant, rank: int) -> Work:
    hops, num_ranks, bits = flows.num_hops, flows.num_ranks, variant.bits
    above = hops - variant.depth
    crossing = [*flows.crossing[:-1], flows.uncopied if variant.has_cache else flows.crossing[-1]]
    ahead, train = _Sent(num_ranks, rank), _Sent(num_ranks, rank)
    nodes = drawn = edges = 0.0
    counts = Counts()
    if above:
        _hops(ahead, flows, shape, rank, above)
        ahead.lengths()
        ahead.exchange("ids", flows.own[above].ids[rank])
        ahead.exchange("ids", flows.own[above].rows[:, rank] * shape.fact_bytes)
        nodes, drawn = _handled(flows, rank, above)
        nodes += float(flows.own[above].rows[rank].sum())
    for hop in range(above, hops):
        ahead.lengths()
        ahead.exchange("ids", crossing[hop].ids[rank])
        nodes += float(flows.shared[hop, rank] + crossing[hop].rows[rank].sum())
        drawn += float(flows.shared_edges[hop, rank])
    shuffled, moved = [], []
    for layer in range(variant.depth):
        hop, of = hops - 1 - layer, shape.layers[layer]
        pairs, row = crossing[hop], of.row_bytes(bits)
        # Input rows that cross as they are stored cross while they are loaded.
        is_loaded = layer == 0 and bits == 32 and not of.crosses_mapped and not of.returns
        size = (ahead if is_loaded else train).exchange("hidden", pairs.rows[:, rank] * row)
        size += train.exchange("hidden", pairs.rows[rank] * row) if of.returns else 0.0
        shuffled.append(_others(pairs.rows[:, rank], rank))
        moved.append(size)
        arrived = float(crossing[hop].rows[rank].sum())
        here = float(flows.shared[hop + 1, rank]) + (
            float(flows.copied[rank]) if variant.has_cache and layer == 0 else 0.0
        )
        mapped = here if of.crosses_mapped else here + arrived
        num_edges, num_dst = float(flows.shared_edges[hop, rank]), float(flows.shared[hop, rank])
        sizes = Sizes(round(here + arrived), round(num_dst), round(num_edges))
        edges += sizes.num_edges
        counts += of.computed(sizes, mapped)
    if above:
        pairs, below = flows.own[above], shape.layers[variant.depth - 1]
        row = below.joint_bytes(bits)
        size = train.exchange("hidden", pairs.rows[:, rank] * row)
        size += train.exchange("hidden", pairs.rows[rank] * row) if below.carries_gradient else 0.0
        shuffled.append(_others(pairs.rows[:, rank], rank))
        moved.append(size)
    for hop in range(above):
        sizes = _own_sizes(flows, rank, hop)
        edges += sizes.num_edges
        counts += shape.layers[hops - 1 - hop].computed(sizes)
    loaded = float(flows.loaded[rank] if variant.has_cache else flows.shared[hops, rank])
    read = loaded + (float(flows.copied[rank]) if variant.has_cache else 0.0)
    train.summed(shape.bucket_sizes, shape.value_bytes, rank)
    return Work(
        ahead.cost(),
        train.cost(),
        ahead.to,
        train.to,
        shuffled,
        moved,
        loaded,
        read * shape.input_bytes,
        nodes,
        drawn,
        edges,
        counts,
    )


def _others(rows: Tensor, rank: int) -> float:
    return float(rows.sum() - rows[rank])


def _pushpull(flows: Flows, shape: Shape, variant: Variant, rank: int) -> Work:
    push, hops, num_ranks = shape.push, flows.num_hops, flows.num_ranks
    assert push is not None, "a model that cannot be computed by columns has no such variant"
    first = [_own_sizes(flows, p, hops - 1) for p in flows.ranks]
    first = first * num_ranks if flows.is_alike else first
    ahead, train = _Sent(num_ranks, rank), _Sent(num_ranks, rank)
    _hops(ahead, flows, shape, rank, hops)
    ahead.lengths(24)
    own, columns = first[rank], push.num_columns(rank)
    message = push.push.num_bytes(own.num_src, own.num_dst, own.num_edges)
    holds = [push.num_columns(q) > 0 for q in range(num_ranks)]
    ahead.exchange("ids", [message if each else 0 for each in holds])
    rows, row = [push.num_rows(each.num_src, each.num_dst) for each in first], push.width * push.value_bytes
    if num_ranks > 1:
        size = train.exchange("hidden", [r * row if columns else 0.0 for r in rows])
        if push.returns:
            size += train.exchange("hidden", [rows[rank] * row if each else 0.0 for each in holds])
        if push.heights:
            train.exchange("gradients", [push.heights * columns * push.value_bytes] * num_ranks)
    else:
        size = 0.0
    edges, counts = 0.0, Counts()
    share = columns / max(1, shape.num_features)
    lowest = shape.layers[0]
    for sizes in first:  # of every rank, for the own columns
        if columns and push.push.has_edges:
            of_layer = lowest.computed(sizes) * share
            reads = ((min(of_layer.values, sizes.num_edges * columns), 4.0 * sizes.num_src * columns),)
            edges, counts = edges + sizes.num_edges, counts + replace(of_layer, reads=reads, calls=1.0)
        elif columns:
            counts += Counts(flops=4.0 * sizes.num_src * columns * push.width, calls=1.0)
    for hop in range(hops):
        sizes = _own_sizes(flows, rank, hop)
        if hop == hops - 1:
            if not push.push.has_edges:  # attention is made where the seeds are
                edges += sizes.num_edges
                read = (2.0 * sizes.num_edges * push.width, 4.0 * sizes.num_src * push.width)
                counts += Counts((read,), calls=1.0)
            continue
        edges += sizes.num_edges
        counts += shape.layers[hops - 1 - hop].computed(sizes)
    nodes, drawn = _handled(flows, rank, hops)
    loaded = float(sum(each.num_src for each in first))
    train.summed(push.bucket_sizes, push.value_bytes, rank)
    return Work(
        ahead.cost(),
        train.cost(),
        ahead.to,
        train.to,
        (_others(torch.tensor(rows), rank) if columns else 0.0,),
        (size,),
        loaded,
        loaded * shape.input_bytes * share,
        nodes + own.num_src,
        drawn + float(sum(each.num_edges for each in first)),
        edges,
        counts,
    )
