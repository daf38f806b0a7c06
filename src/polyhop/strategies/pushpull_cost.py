"""What push-pull sends: accounted from realised mini-batches, estimated from inclusion probabilities.

Both give the ``Cost`` of one rank for one step; ``strategies/pushpull.py`` states the formulas. What is sent once, before
the first step, is ``account_columns``.

Legend: N nodes, P ranks, F features; of rank p's first layer S_p sources, D_p destinations, E_p edges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from polyhop.comm import Cost
from polyhop.comm.collective import slices
from polyhop.errors import UnsupportedError
from polyhop.exchange import RowFormat, bucket_sizes
from polyhop.exchange.columns import MEMORY_BYTES, num_rounds
from polyhop.exchange.pushpull import PushWire
from polyhop.graph.sliced import SlicedMap
from polyhop.nn.layer import SLICES
from polyhop.nn.model import Model
from polyhop.sample import MiniBatch
from polyhop.sample.wire import Wire
from polyhop.strategies.data_cost import Facts, account_gradients, account_hops, estimate_hops

__all__ = ["Facts", "Shape", "account", "account_columns", "estimate", "sliced_map", "summed_parameters"]


def sliced_map(model: nn.Module) -> SlicedMap:
    """The first layer's product with the inputs; UnsupportedError where it cannot be made of slices."""
    name = type(model).__name__
    if not isinstance(model, Model):
        raise UnsupportedError(
            f"{name}: {SLICES} not possible: it is no model of polyhop.nn, so nothing says what its first layer multiplies; "
            "build it from polyhop.nn (GraphSAGE, GCN, GAT, GIN, Stack)"
        )
    found = model.sliced_map()
    uses = [p for _, p in model.named_parameters(remove_duplicate=False) if _is_one_of(p, found.weights)]
    if len(uses) > len(found.weights):
        raise UnsupportedError(
            f"{name}: {SLICES} not possible: the first layer shares its weights with another, and gradients of those are of "
            "all columns"
        )
    return found


def summed_parameters(model: nn.Module, sliced: SlicedMap) -> list[nn.Parameter]:
    """Parameters whose gradients are summed over ranks: all but the sliced weights, unless nothing would be left to sum."""
    learnt = [p for p in model.parameters() if p.requires_grad]
    return [p for p in learnt if not _is_one_of(p, sliced.weights)] or learnt


def _is_one_of(parameter: Tensor, given: Sequence[Tensor]) -> bool:
    return any(parameter is each for each in given)


@dataclass(frozen=True)
class Shape:
    """What bytes depend on besides the mini-batch: the columns of each rank, and the model's first layer."""

    columns: Sequence[int]  # P + 1 bounds
    push: PushWire
    width: int  # of a mapped row
    heights: int  # outputs of all sliced weights that are learnt
    returns: bool  # gradients of mapped rows are sent
    bucket_sizes: Sequence[int]
    value_bytes: int = 4

    @classmethod
    def of(
        cls, model: nn.Module, num_features: int, num_ranks: int, wire: Wire, num_neighbors: Sequence[int]
    ) -> Shape:
        sliced = sliced_map(model)
        push = PushWire(
            wire.num_nodes, wire.count_dtype(num_neighbors[-1]), wire.is_weighted, sliced.reads_edges
        )
        summed = summed_parameters(model, sliced)
        return cls(
            slices(num_features, num_ranks),
            push,
            sliced.width,
            sum(weight.shape[0] for weight in sliced.weights if weight.requires_grad),
            sliced.returns,
            bucket_sizes(summed),
            summed[0].element_size(),
        )

    def num_columns(self, rank: int) -> int:
        return self.columns[rank + 1] - self.columns[rank]

    def num_rows(self, num_src: float, num_dst: float) -> float:
        """Mapped rows of a first layer."""
        return num_dst if self.push.has_edges else num_src


def account(
    batches: Sequence[MiniBatch],
    new_ids: Tensor,
    bounds: Tensor,
    wire: Wire,
    num_neighbors: Sequence[int],
    shape: Shape,
    rank: int,
) -> Cost:
    """What ``rank`` sends in one step, to the byte.

    ``batches[r]`` is rank r's mini-batch, by the user's ids, however it was drawn; ``new_ids`` int64 [N] and ``bounds``
    int64 [P + 1] say who owns what.
    """
    sampled = account_hops([[batch] for batch in batches], new_ids, bounds, wire, num_neighbors, rank)
    first = [batch.blocks[0] for batch in batches]
    layers = [(block.num_src, block.num_dst, block.num_edges) for block in first]
    return sampled + _step([(*layer, shape.push.num_bytes(*layer)) for layer in layers], shape, rank)


def estimate(facts: Facts, shape: Shape, rank: int) -> Cost:
    """What ``rank`` is expected to send in one step, from probabilities alone."""
    degree, fanout = facts.in_degree.double(), facts.num_neighbors[-1]
    drawn = degree if fanout < 0 else degree.clamp(max=fanout)
    layers = []
    for likely in facts.likely:
        num_src, num_dst = float(likely[-1].sum()), float(likely[-2].sum())
        num_edges = float((likely[-2] * drawn).sum())
        size = shape.push.num_bytes(round(num_src), round(num_dst), round(num_edges))
        layers.append((num_src, num_dst, num_edges, size))
    return estimate_hops(facts, rank) + _step(layers, shape, rank)


def _step(layers: Sequence[tuple[float, float, float, int]], shape: Shape, rank: int) -> Cost:
    """Push, pull and gradients, of every rank's first layer (S, D, E, bytes of its message)."""
    sent, count = Counter[str](), Counter[str]()

    def add(kind: str, size: float) -> None:
        if size > 0:
            sent[kind] += size  # type: ignore[assignment]
            count[kind] += 1

    peers = [q for q in range(len(layers)) if q != rank]
    rows = [shape.num_rows(num_src, num_dst) for num_src, num_dst, _, _ in layers]
    row_bytes = shape.width * shape.value_bytes
    for q in peers:
        add("sizes", 24)
        if shape.num_columns(q):
            add("ids", layers[rank][3])
            add("hidden", rows[rank] * row_bytes if shape.returns else 0)
        if shape.num_columns(rank):
            add("hidden", rows[q] * row_bytes)
        add("gradients", shape.heights * shape.num_columns(rank) * shape.value_bytes)
    summed = account_gradients(shape.bucket_sizes, shape.value_bytes, len(layers), rank)
    return Cost(dict(sent), dict(count)) + summed


def account_columns(
    layout: RowFormat,
    dtype: torch.dtype,
    columns: Sequence[int],
    bounds: Tensor,
    rank: int,
    memory_bytes: int = MEMORY_BYTES,
) -> Cost:
    """What ``rank`` sends once, before training: its rows' columns, held as ``dtype``, and what is known of its nodes."""
    sizes = bounds.diff().tolist()
    own, rounds = sizes[rank], num_rounds(max(sizes), columns[-1], dtype, memory_bytes)
    filled = sum(start < stop for start, stop in pairwise(slices(own, rounds)))
    sent = count = 0
    for q, (start, stop) in enumerate(pairwise(columns)):
        if q != rank and own:
            sent += own * ((stop - start) * dtype.itemsize + layout.fact_bytes)
            count += 1 + (filled if start < stop else 0)
    return Cost({"features": sent}, {"features": count}) if sent else Cost()
