"""Facts for the estimate of strategy ``halo``: rows that cross at each layer between each two ranks, and their bytes.

    facts_of          from the graph and its parts: rows are counted, as ranks would count them, without any rank
    facts_of_pairs    from a few numbers of each pair of parts: readers are taken to be independent

Widths of bits="adaptive" are a guess: the programme that chooses them is solved for rows that all have the same spread of
what they add to the variance, links being alike; ``mean_bits`` replaces it. It is within a tenth where messages have
several groups of rows (``bits_group``), and can be wrong by a third where they have one, whose width is all or nothing.

Legend: N nodes, E edges, P ranks, L layers, D columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyhop.comm import Cost
from polyhop.exchange.assigner import RANDOM_MEAN, Policy
from polyhop.exchange.batch_norm import account_statistics
from polyhop.exchange.crossing import Direction
from polyhop.exchange.gradients import bucket_sizes
from polyhop.exchange.widths import Channel, random_widths, row_bytes, solve
from polyhop.graph import Graph, SparseRows
from polyhop.kernels.keys import Key
from polyhop.partition import Partition, least_cover
from polyhop.strategies.halo_channels import DELTA_BITS
from polyhop.strategies.halo_cost import Facts, LayerFacts, Seen
from polyhop.strategies.halo_plan import BUCKET_BYTES, GraphSizes, Options, Plan
from polyhop.strategies.step import Placement

__all__ = ["Chosen", "Pairs", "facts_of", "facts_of_pairs", "facts_of_rows"]

_SPREAD = 1.5  # of the logarithm of what rows add to the variance: a guess, see ``_guessed``
_WIDTHS = (1, 2, 4, 8, 16, 32)


class Chosen(Options, Protocol):
    """The options that decide what crosses, and in how many bits; ``halo.Config`` has them."""

    @property
    def bits(self) -> int | str: ...
    @property
    def bits_lambda(self) -> float: ...
    @property
    def bits_group(self) -> int: ...
    @property
    def bits_period(self) -> int: ...
    @property
    def halo_share(self) -> float: ...


@dataclass(frozen=True, eq=False)
class Pairs:
    """What may be known where the graph's edges are not at hand."""

    halo: Tensor  # int64 [P, P]: rows of rank i that rank j reads
    num_nodes: int
    num_edges: int
    num_features: int
    readers: float  # nodes of one other part that read a row which it reads at all, on average
    train_share: float  # of the nodes
    sums_share: float = (
        0.7  # of rows or of their readers, whichever are fewer: left where sums cross (0.4 .. 0.9 measured)
    )
    is_sparse: bool = False  # the input rows


def facts_of(
    graph: Graph,
    partition: Partition,
    model: nn.Module,
    options: Chosen,
    *,
    placement: Placement | None = None,
    mean_bits: float | None = None,
) -> Facts:
    """Counted: O(L E) and, where sums may cross, a largest matching of the cut for each layer.

    ``model`` in the number format in which it trains, ``placement`` where products are in another one. ``mean_bits``: of
    adaptive or random widths, instead of what is expected of them.
    """
    sizes = GraphSizes(graph.num_nodes, graph.num_edges, graph.num_features, _is_sparse(graph))
    plan = Plan.of(model, options, sizes, (placement or Placement(torch.device("cpu"))).context)
    rows = _counted(graph, partition, plan)
    return _facts(model, options, plan, rows, partition.num_parts, mean_bits)


def _is_sparse(graph: Graph) -> bool:
    none = torch.empty(0, dtype=torch.int64)
    return graph.x is not None and isinstance(graph.x.gather(none), SparseRows)


def facts_of_pairs(
    pairs: Pairs,
    model: nn.Module,
    options: Chosen,
    *,
    placement: Placement | None = None,
    mean_bits: float | None = None,
) -> Facts:
    """Rough, and cheap: a row of the last layer crosses if one of its readers is a train node; one of the layer below if a
    reader is such a node or is read by one, and so on. Readers are taken to be independent, and edges to go both ways: as
    many nodes of a part read another one as that one reads of it. Within a quarter where half of the nodes train; where
    few do, which ones decides, and it may be wrong by a factor of three.
    """
    sizes = GraphSizes(pairs.num_nodes, pairs.num_edges, pairs.num_features, pairs.is_sparse)
    plan = Plan.of(model, options, sizes, (placement or Placement(torch.device("cpu"))).context)
    degree = pairs.num_edges / max(pairs.num_nodes, 1)
    needed, rows = pairs.train_share if plan.skips else 1.0, []
    for each, is_summed in zip(reversed(plan.seen), reversed(plan.sums), strict=True):
        crossing = pairs.halo.double() * (1 - (1 - needed) ** pairs.readers)
        if is_summed:
            crossing = pairs.sums_share * torch.minimum(crossing, needed * pairs.halo.T)
        rows.append(crossing * bool(each.columns))
        needed = 1 - (1 - needed) ** (1 + degree)
    return _facts(model, options, plan, rows[::-1], pairs.halo.shape[0], mean_bits)


def _counted(graph: Graph, partition: Partition, plan: Plan) -> list[Tensor]:
    """float64 [P, P] of each layer: rows that rank i sends to rank j; sums count as rows."""
    owner, num_parts = partition.owner.long(), partition.num_parts
    src, dst = graph.indices.long(), torch.repeat_interleave(torch.arange(graph.num_nodes), graph.in_degree)
    is_cut = owner[src] != owner[dst]
    cut_src, cut_dst = src[is_cut], dst[is_cut]
    read = _read(graph) if plan.skips else torch.ones(graph.num_nodes, dtype=torch.bool)
    found: list[Tensor] = []
    known: dict[tuple[bool, int], Tensor] = {}  # reading grows downwards, so as many are the same
    for each, is_summed in zip(reversed(plan.seen), reversed(plan.sums), strict=True):
        name = (is_summed, int(read.sum()))
        if each.columns and name not in known:
            kept = read[cut_dst]
            known[name] = (_covers if is_summed else _rows)(cut_src[kept], cut_dst[kept], owner, num_parts)
        found.append(known[name] if each.columns else torch.zeros(num_parts, num_parts, dtype=torch.float64))
        below = read.clone()
        below[src[read[dst]]] = True
        read = below
    return found[::-1]


def _read(graph: Graph) -> Tensor:
    """bool [N]: nodes that the loss reads."""
    assert graph.split is not None, "training needs a split"
    train = graph.split.train
    if graph.y is not None and not graph.is_multilabel:
        train = train[graph.y[train] >= 0]
    read = torch.zeros(graph.num_nodes, dtype=torch.bool)
    read[train] = True
    return read


def _rows(src: Tensor, dst: Tensor, owner: Tensor, num_parts: int) -> Tensor:
    """Every source once for each part that reads it."""
    read = torch.unique(src * num_parts + owner[dst])
    pair = owner[read // num_parts] * num_parts + read % num_parts
    return torch.bincount(pair, minlength=num_parts**2).view(num_parts, num_parts).double()


def _covers(src: Tensor, dst: Tensor, owner: Tensor, num_parts: int) -> Tensor:
    """Fewest rows and sums, for each pair of parts."""
    pair, order = torch.sort(owner[src] * num_parts + owner[dst])
    counts = torch.bincount(pair, minlength=num_parts**2).tolist()
    pieces = zip(src[order].split(counts), dst[order].split(counts), strict=True)  # type: ignore[no-untyped-call]
    found = [least_cover(*piece).num_messages if piece[0].numel() else 0 for piece in pieces]
    return torch.tensor(found, dtype=torch.float64).view(num_parts, num_parts)


def facts_of_rows(
    model: nn.Module, options: Chosen, plan: Plan, rows: Sequence[Tensor], *, is_alike: bool = False
) -> Facts:
    """From rows that cross at each layer: float64 [P, P], those that rank i sends to rank j, as ranks have laid them out.

    ``is_alike``: all ranks send as many to all others; then facts beside the rows are those of the first.
    """
    return _facts(model, options, plan, rows, rows[0].shape[0], None, is_alike=is_alike)


def _facts(
    model: nn.Module,
    options: Chosen,
    plan: Plan,
    rows: Sequence[Tensor],
    num_ranks: int,
    mean_bits: float | None,
    *,
    is_alike: bool = False,
) -> Facts:
    layers = []
    for at, (each, whole) in enumerate(zip(plan.seen, rows, strict=True)):
        crossing = (options.halo_share * whole).floor() if options.halo == "sampled" else whole
        sizes: dict[Direction, Tensor] = {
            way: _row_bytes(
                each, crossing if way == "forward" else crossing.T, options, mean_bits, is_alike=is_alike
            )
            for way in each.directions
        }
        if each.columns:
            layers.append(LayerFacts(at, crossing, sizes))
    parameters = list(model.parameters())
    return Facts(
        num_ranks,
        layers,
        bucket_sizes([p for p in parameters if p.requires_grad], BUCKET_BYTES),
        parameters[0].element_size(),
        [_others(model, options, layers, num_ranks, rank) for rank in range(1 if is_alike else num_ranks)],
    )


def _row_bytes(
    seen: Seen, rows: Tensor, options: Chosen, mean_bits: float | None, *, is_alike: bool = False
) -> Tensor:
    """float64 [P, P]: of a row from i to j, where so many rows leave."""
    bits = str(options.bits)
    width = {"adaptive": mean_bits, "random": mean_bits, "delta": DELTA_BITS}.get(bits, bits)
    if width is None and is_alike:  # two channels stand for all
        return torch.full_like(rows, float(_chosen(seen.columns, rows[:2, :2], options)[0, -1]))
    if width is None:
        return _chosen(seen.columns, rows, options)
    if bits == "32":
        return torch.full_like(rows, seen.columns * seen.value_bytes)
    sizes = [row_bytes(seen.columns, b) for b in _WIDTHS]
    return torch.full_like(rows, float(np.interp(float(width), _WIDTHS, sizes)))


def _chosen(num_columns: int, rows: Tensor, options: Chosen) -> Tensor:
    """The same by the widths that would be chosen if rows were as ``_guessed`` says."""
    policy, num_ranks = Policy(), rows.shape[0]
    found = torch.zeros_like(rows)
    channels = [
        Channel(i, j, _guessed(max(1, round(float(rows[i, j])))), num_columns)  # 0.3 rows are not free
        for i, j in (rows > 0).nonzero().tolist()
    ]
    if not channels:
        return found
    if options.bits == "random":
        widths: Sequence[Any] = random_widths(channels, RANDOM_MEAN, Key(0), widths=policy.widths)
    else:
        widths = solve(
            channels, options.bits_lambda, num_ranks=num_ranks, group_size=options.bits_group, widths=policy.widths,
            model=policy.model,
        )[0].rows()  # fmt: skip
    for each, given in zip(channels, widths, strict=True):
        counts = np.bincount(given)
        sizes = [row_bytes(num_columns, b) * int(counts[b]) for b in np.flatnonzero(counts).tolist()]
        found[each.src, each.dst] = sum(sizes) / given.size
    return found


def _guessed(count: int) -> Any:
    """float64 [count]: what rows add to the variance, up to a factor: log-normal, as products of unlike things are."""
    at = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return torch.exp(_SPREAD * torch.special.ndtri(at)).numpy()


def _others(
    model: nn.Module, options: Chosen, layers: Sequence[LayerFacts], num_ranks: int, rank: int
) -> Cost:
    """Of one rank in a step: lengths of messages that may be left out, statistics of BatchNorm, and what widths are chosen
    by, which crosses once in a period.
    """
    peers = num_ranks - 1
    cost = account_statistics(_norm_widths(model), num_ranks, rank)
    if options.halo == "skipping" and peers:
        cost += Cost({"sizes": 8 * peers * len(layers)}, {"sizes": peers * len(layers)})
    if options.bits in ("adaptive", "random"):
        sent = messages = 0.0
        for number, (each, way) in enumerate(
            (each, way) for each in layers for way in ("forward", "backward")
        ):
            rows = each.rows if way == "forward" else each.rows.T
            sent += 4 * peers * float(rows[rank].sum())
            messages += peers * bool(rows[rank].sum())
            if number % num_ranks == rank:
                sent += peers * float(rows.sum())
                messages += peers * bool(rows.sum())
        period = options.bits_period
        cost += Cost({"widths": sent / period}, {"widths": messages / period})
    return cost


def _norm_widths(model: nn.Module) -> list[int]:
    """Of each BatchNorm."""
    return [module.num_features for module in model.modules() if isinstance(module, _BatchNorm)]
