"""Data parallelism over a partitioned graph: every rank trains the seeds it owns of one global mini-batch.

    each rank   owned seeds -> hop by hop: ids to owners, drawn lists back -> input rows from owners (cached, deduplicated)
                -> Blocks, forward, backward of (sum of its losses / seeds of all ranks)
    all ranks   gradients summed in rank order, in buckets, while the backward pass runs -> the same step everywhere

The weights are those of one process on the same global batches, to rounding: the same seeds, neighbours and dropped units.
Sampling and fetching of the next step overlap this one. ``per_minibatch_rpc`` is the honest baseline: 8-byte ids, rows as
floats, no cache, nothing ahead, as DistDGL does it (and fewer bytes an edge than it sends).

Bytes a rank sends per step (P ranks, L layers, k_hq ids asked of rank q at hop h, E_hr edges drawn for rank r, n_r input
rows sent to rank r, W parameters in T tensors):

    ids        sum_h sum_q varint(k_hq)  +  sum_h sum_r (k_hr + 4 E_hr)  +  sum_q varint(rows asked of q)
    features   sum_r n_r (4 F + 8)
    gradients  about 2 (P - 1) / P * 4 (W + T + 2); (P - 1) * 4 (W + T + 2) where that is little: one round less
    sizes      8 (P - 1) for each message whose length only its sender knows: 2 a hop, 1 for the rows

A cache (``cache_bytes``) keeps, of rows that are elsewhere, those that a rank reads most; with ``cache_ranks`` several ranks
share one, each row of it once (``exchange/striped.py``): kept rows are asked of their holder.

With ``aggregate_inputs`` there is one hop less, and F is the width of stored rows (``strategies/inputs.py``).

Legend: N nodes, P ranks, S input nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from polyhop.errors import ConfigError
from polyhop.exchange import PartLoader, RowFetch, RowFormat
from polyhop.exchange.striped import StripedFetch
from polyhop.graph import Graph, SharedGraph
from polyhop.sample.wire import Wire
from polyhop.strategies.data_cost import account, estimate
from polyhop.strategies.held import HeldPart
from polyhop.strategies.part_step import PartStep, hot_rows, part_inclusion, part_work, stripes_of
from polyhop.strategies.step import Loss, Placement, Step, Team, WholeGraph
from polyhop.trace import NO_TRACE, Trace

__all__ = ["NAME", "Config", "account", "build", "estimate", "hold"]

NAME = "data"


@dataclass(frozen=True)
class Config:
    """The options this strategy takes from the trainer."""

    num_neighbors: Sequence[int] | None = None  # from the seeds outward, -1 = all
    batch_size: int = 1024  # of all ranks together
    sampler: str = "uniform"
    labor_dependence: int = 1  # steps over which LABOR's draws turn from one to the next
    prefetch: int = 2
    seed: int = 0
    feature_dtype: str = "auto"  # auto | float32 | bfloat16 | int8
    cache_bytes: int = 0  # of remote rows kept on each rank
    cache_ranks: int = 1  # neighbouring ranks that share a cache, rows striped over them; 1: each has its own
    per_minibatch_rpc: bool = False
    aggregate_inputs: bool = False  # sums of the first layer stored once: one hop less


def hold(graph: SharedGraph, placement: Placement, team: Team, config: Config) -> HeldPart:
    """What evaluation needs of this rank's part."""
    return HeldPart(graph, placement, team.line, _fetch(graph, config))


def build(
    model: nn.Module,
    graph: Graph | SharedGraph,
    config: Config,
    *,
    train_ids: Tensor,
    whole: WholeGraph | HeldPart,
    loss: Loss,
    terms_per_row: int = 1,
    trace: Trace = NO_TRACE,
    team: Team | None = None,
) -> Step:
    """This rank's step; ``train_ids`` are local rows of its labelled train nodes. All ranks build together."""
    plain, dtype = config.per_minibatch_rpc, whole.placement.dtype
    work = part_work(NAME, model, graph, config, train_ids, dtype, team, is_plain=plain)
    assert team is not None, "part_work asks for a team"
    fetch = _fetch(work.graph, config)
    _check_cache(config, team.line.num_ranks)
    if config.cache_bytes and not plain:
        likely = part_inclusion(work.graph, train_ids, work.seeds, work.num_neighbors, team.line)
        if isinstance(fetch, StripedFetch):
            size = config.cache_ranks
            most = config.cache_bytes // fetch.kept_bytes(size)
            fetch.stripe(team.line, stripes_of(likely, work.graph.part.start, most, size, team.line))
        else:
            fetch.keep(team.line, hot_rows(likely, work.graph, config.cache_bytes, team.line))
    prefetch = 0 if plain else config.prefetch
    loader = PartLoader(team.line.fork(), work.sampler, fetch, work.seeds, prefetch=prefetch, trace=trace)
    return PartStep(model, loader, whole.placement, loss, terms_per_row, team, work.inputs)


def _fetch(graph: SharedGraph, config: Config) -> RowFetch:
    plain = config.per_minibatch_rpc
    dtype = "float32" if plain else config.feature_dtype
    layout = RowFormat.of(graph.part, graph.num_nodes, dtype, is_plain=plain)
    kind = StripedFetch if config.cache_ranks > 1 and not plain else RowFetch
    return kind(graph.part, layout, Wire(graph.num_nodes, is_plain=plain))


def _check_cache(config: Config, num_ranks: int) -> None:
    """ConfigError for a shared cache that nobody has, or that ranks cannot share."""
    size = config.cache_ranks
    if not 1 <= size <= num_ranks or num_ranks % size:
        raise ConfigError(
            f"cache_ranks={size}: {num_ranks} ranks cannot share caches in groups of {size}; give a number that divides "
            f"{num_ranks}"
        )
    if size > 1 and not config.cache_bytes:
        raise ConfigError(
            f"cache_ranks={size}: there is no cache to share; give its size with cache (--cache 500MB)"
        )
