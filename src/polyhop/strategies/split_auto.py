"""Choosing by itself: how deep ``split`` splits, and which strategy trains the same mini-batches in least time.

Before training, ranks find out together what a mini-batch is expected to move (``flows``), how fast the links are
(``comm/probe``) and how fast they compute, and take the first of the order that follows (``split_choice``). All of it is
agreed on, so all ranks choose alike. It takes a few hundredths of a second besides measuring the links.

What is measured differs a little from run to run, and with it, where two ways are nearly as good, the choice. Weights are
the same to rounding whichever is taken; a run that is continued keeps the depth that it began with.

Legend: P ranks, L layers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from polyhop.comm import Collective
from polyhop.comm.probe import measure_link
from polyhop.errors import ConfigError
from polyhop.graph import SharedGraph
from polyhop.kernels import gather_rows, spmm
from polyhop.plan import Law
from polyhop.strategies.flows import gather_flows
from polyhop.strategies.macro_auto import ranks_to_a_core
from polyhop.strategies.shape import Shape
from polyhop.strategies.split_choice import Ranked, Rates, rank_strategies, reason
from polyhop.strategies.step import Placement

__all__ = ["Choice", "choose", "measure_rates"]

# CPU of what is not measured at the start: 4 ranks over gloo on 2 AVX-512 cores that others used too, GraphSAGE of 2 and 3
# layers, 64 to 512 inputs, 32 to 256 hidden columns, 7 variants, 49 runs of which CPU-seconds a step were fitted by what
# ``work`` says of them. Fitted: 0.2 us a node, 0.4 to 0.6 ms a message, 0.37 ns a byte, 0.3 to 0.6 ns an aggregated value,
# 15 ps a flop; median error 9 %, nine of ten within 20 %.
_NODE_S, _EDGE_S = 0.18e-6, 5e-9
_MESSAGE_S, _BYTE_S = 0.5e-3, 0.37e-9
# What is timed at the start, and the share of it that steps reach: they also scale, drop, copy and join rows. There 10 G
# values aggregated, 11 GB of rows read and 70 Gflop a second, fitted 1.7 to 3.3 G, 2.7 to 7.7 GB and 65 Gflop.
_ROWS, _COLUMNS, _EDGES = 1 << 15, 128, 1 << 16
_GATHERED, _AGGREGATED, _MULTIPLIED = 0.4, 0.25, 0.9
_REPEATS = 10  # the best of so many short ones: other processes only add


@dataclass(frozen=True)
class Choice:
    """A strategy with its options, for ``strategies.find(strategy).Config(..., **options)``."""

    strategy: str
    options: dict[str, Any]
    reason: str  # one line for the user
    order: Sequence[Ranked]  # all that were looked at, the fastest first
    rates: Rates


def choose(
    model: nn.Module,
    graph: SharedGraph,
    line: Collective,
    placement: Placement,
    *,
    train_ids: Tensor,
    num_neighbors: Sequence[int],
    batch_size: int,
    prefetch: int = 2,
    cache_bytes: int = 0,
    must_copy: bool = False,
    feature_dtype: str = "auto",
    bits: int | Iterable[int] = 32,
    strategies: Sequence[str] = ("data", "split", "pushpull"),
    rates: Rates | None = None,
) -> Choice:
    """The way to train that is expected to be fastest. All ranks call it together, before they build a strategy.

    ``train_ids``: local rows of this rank's train nodes. ``cache_bytes``: of rows of others that a rank may keep;
    ``must_copy``: ``split`` does in any case. ``bits``: of values between layers of ``split``, the widths to choose from
    (fewer than 32 are approximate). ``rates``: in place of measured ones, the same on all ranks.
    """
    counts = [1] * line.num_ranks
    total = int(sum(line.all_gather(torch.tensor([train_ids.numel()]), kind="sizes", counts=counts)))
    if total == 0:
        raise ConfigError("there are no train nodes to choose a strategy for")
    chance = min(1.0, batch_size / total)
    flows = gather_flows(graph, train_ids, chance, num_neighbors, line, cache_bytes=cache_bytes)
    with placement.context():
        shape = Shape.of(model, graph.part, graph.num_nodes, num_neighbors, line.num_ranks, feature_dtype)
    shape = replace(shape, row_bytes=_agreed(shape, graph, line))
    if rates is None:
        rates = measure_rates(placement, line, is_overlapped=prefetch > 0)
    widths = (bits,) if isinstance(bits, int) else bits
    order = rank_strategies(
        flows,
        shape,
        rates,
        has_cache=cache_bytes > 0,
        must_copy=must_copy,
        bits=widths,
        strategies=strategies,
    )
    best = order[0].variant
    return Choice(best.strategy, best.options(cache_bytes), reason(order), order, rates)


def _agreed(shape: Shape, graph: SharedGraph, line: Collective) -> float:
    """Bytes of an input row, where parts have sparse rows of other lengths: the mean over the whole graph."""
    rows = graph.part.num_nodes
    total, count = line.all_reduce(
        torch.tensor([shape.row_bytes * rows, rows], dtype=torch.float64), kind="sizes"
    ).tolist()
    return float(total / max(1.0, count))


def measure_rates(placement: Placement, line: Collective, *, is_overlapped: bool = True) -> Rates:
    """The same on all ranks, which call it together: of computing the median rank's best of a few."""
    link = measure_link(line)
    own = torch.tensor(_speeds(placement), dtype=torch.float64)
    everyone = torch.stack(line.all_gather(own, kind="sizes", counts=[own.numel()] * line.num_ranks))
    gather, values, flops = (statistics.median(column) for column in everyone.T.tolist())
    # A round that was measured had the work of its messages in it.
    latency_s = max(0.0, link.latency_s - (line.num_ranks - 1) * _MESSAGE_S)
    return Rates(
        bytes_per_s=link.bytes_per_s,
        latency_s=latency_s,
        gather_bytes_per_s=gather,
        law=Law(near_s=1 / values, flop_s=1 / flops),
        node_s=_NODE_S,
        edge_s=_EDGE_S,
        message_s=min(_MESSAGE_S, link.latency_s / max(1, line.num_ranks - 1)),
        byte_s=_BYTE_S,
        crowding=ranks_to_a_core(line),
        is_overlapped=is_overlapped,
    )


def _speeds(placement: Placement) -> tuple[float, float, float]:
    """(bytes of rows read, values aggregated, flops) a second, as steps reach them."""
    made = torch.Generator().manual_seed(0)
    stored = torch.full((_ROWS, _COLUMNS), 0.5)
    rows = torch.randint(_ROWS, (_ROWS // 4,), generator=made)
    x = stored.to(placement.device, placement.dtype)
    weight = x[:_COLUMNS].clone()
    indptr = torch.arange(0, _EDGES + 1, 8, device=placement.device)
    indices = torch.randint(_ROWS, (_EDGES,), generator=made).int().to(placement.device)

    def multiplied() -> None:
        with placement.context():
            x[: _ROWS // 8] @ weight

    gathered_s = _seconds(lambda: gather_rows(stored, rows), placement.device)
    aggregated_s = _seconds(lambda: spmm(indptr, indices, x, num_src=_ROWS), placement.device)
    multiplied_s = _seconds(multiplied, placement.device)
    return (
        _GATHERED * 4 * rows.numel() * _COLUMNS / gathered_s,
        _AGGREGATED * _EDGES * _COLUMNS / aggregated_s,
        _MULTIPLIED * 2 * (_ROWS // 8) * _COLUMNS**2 / multiplied_s,
    )


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """The best of some."""
    taken = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return max(min(taken), 1e-9)
