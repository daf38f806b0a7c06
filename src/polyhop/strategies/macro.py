"""Macrobatches: data parallelism whose mini-batches are sampled and fetched k at a time, and trained one by one.

    each rank   seeds of k steps -> hop by hop, one request and one reply per peer for all k -> union of the input nodes
                -> the rows that the pool lacks, each once -> k steps that read own rows and the pool in place
    all ranks   gradients summed in rank order after each step, as in ``data``

Sampling depends on the graph and random keys, never on weights, and input rows are fixed: so loading k steps ahead changes
nothing. Weights and losses are those of ``data``, bit for bit, for any k. The pool keeps rows from window to window
(``delta``), within ``memory``; the next window loads while this one trains.

Messages a rank sends per epoch (P ranks, L layers, nb steps): 2 L (P - 1) ceil(nb / k) of kinds ids and features, none of
them empty on graphs of a size that needs this; besides, 8-byte ``sizes``. Rows: the distinct remote inputs of each window,
minus what the pool holds. ``macro_cost`` has the formulas to the byte, ``macro_plan`` how k is chosen.

Legend: N nodes, P ranks, k mini-batches of a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from polyhop.comm import Collective
from polyhop.comm.collective import is_summed_everywhere
from polyhop.errors import ConfigError
from polyhop.exchange import Pool, RowFetch, RowFormat, WindowLoader, bucket_sizes, pool_row_bytes
from polyhop.graph import AnyPart, DenseFeatures, Graph, MatrixFeatures, Part, SharedGraph, SparseFeatures
from polyhop.sample.wire import Wire
from polyhop.strategies.data_cost import account_gradients
from polyhop.strategies.held import HeldPart
from polyhop.strategies.macro_auto import SecondThoughts, gather_facts, lowered, most_facts
from polyhop.strategies.macro_cost import account, estimate
from polyhop.strategies.macro_plan import Facts, choose, room
from polyhop.strategies.part_step import PartStep, PartWork, hot_rows, part_inclusion_by_hop, part_work
from polyhop.strategies.step import Loss, Placement, Step, Team, WholeGraph
from polyhop.trace import NO_TRACE, Trace

__all__ = ["NAME", "Config", "account", "build", "estimate", "hold"]

NAME = "macro"
DEFAULT_MEMORY_BYTES = 2 << 30
UNPLANNED = 8  # mini-batches of a window where nothing is known to choose by


@dataclass(frozen=True)
class Config:
    """The options this strategy takes from the trainer."""

    num_neighbors: Sequence[int] | None = None  # from the seeds outward, -1 = all
    batch_size: int = 1024  # of all ranks together
    sampler: str = "uniform"
    labor_dependence: int = 1  # steps over which LABOR's draws turn from one to the next
    prefetch: int = 2  # 0: nothing is loaded while a window trains
    seed: int = 0
    max_epochs: int = 0  # where loading ends
    macro: int | str = "auto"  # k, or "auto"
    delta: bool = True  # keep rows for later windows
    memory_bytes: int | None = None  # of the pool and sampled blocks
    share_variates: bool = False  # LABOR draws with the same variates in all mini-batches of a window
    feature_dtype: str = "auto"  # auto | float32 | bfloat16 | int8
    cache_bytes: int = 0  # of remote rows pinned in the pool, on top of memory
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
    if config.share_variates and (config.sampler != "labor" or config.macro == "auto"):
        raise ConfigError(
            "share_variates: only sampler='labor' has variates that mini-batches can share, and the windows that share "
            "them must be fixed: give sampler='labor' and macro=K"
        )
    if config.share_variates and config.labor_dependence > 1:
        raise ConfigError(
            f"share_variates draws alike all over a window, and labor_dependence={config.labor_dependence} turns draws "
            "from step to step: give one of them"
        )
    work = part_work(NAME, model, graph, config, train_ids, whole.placement.dtype, team)
    assert team is not None, "part_work asks for a team"
    graph, seeds, line = work.graph, work.seeds, team.line
    fetch = _fetch(graph, config)
    in_place = _in_place(graph.part, fetch.format)
    hops = _hops(work, train_ids, config, line)
    hot = torch.empty(0, dtype=torch.int64) if not config.cache_bytes else _hot(hops, graph, config, line)
    plan = _plan(model, work, config, fetch, in_place, hops, hot.numel(), line)
    pool = Pool(fetch, plan.slots + hot.numel(), keeps=config.delta)
    if config.cache_bytes:
        pool.pin(line, hot)
    loading = line.fork()
    loader = WindowLoader(
        loading,
        work.sampler,
        pool,
        seeds,
        size=plan.k,
        in_place=in_place,
        is_ahead=config.prefetch > 0 and plan.is_overlapped,
        num_epochs=config.max_epochs,
        shares_draws=config.share_variates,
        trace=trace,
    )
    step = PartStep(model, loader, whole.placement, loss, terms_per_row, team, work.inputs)
    step.notes += [plan.note] if plan.note else []
    if plan.facts is not None:
        counts = [1] * line.num_ranks  # pools differ with parts; all ranks must choose alike
        sizes = line.all_gather(torch.tensor([pool.capacity]), kind="sizes", counts=counts)
        facts = replace(plan.facts, slots=min(int(size) for size in sizes))
        loader.after_window = SecondThoughts(
            facts, plan.k, loading, step.notes, step.step_seconds, loader.seconds_of
        )
    return step


@dataclass(frozen=True, eq=False)
class _Plan:
    """The window and its pool."""

    k: int
    slots: int
    note: str = ""
    is_overlapped: bool = True
    facts: Facts | None = None  # where k may change


def _plan(
    model: nn.Module,
    work: PartWork,
    config: Config,
    fetch: RowFetch,
    in_place: Tensor | None,
    hops: Sequence[Tensor] | None,
    num_pinned: int,
    line: Collective,
) -> _Plan:
    """k as it was given, or lower where the memory given asks for it, or chosen."""
    graph, num_steps = work.graph, work.seeds.num_steps
    size = num_steps if config.macro == "auto" else min(int(config.macro), num_steps)
    row_bytes, most = _row_bytes(graph, fetch, line), _most_rows(graph, config, in_place)
    memory = DEFAULT_MEMORY_BYTES if config.memory_bytes is None else config.memory_bytes
    if hops is None:
        k = min(UNPLANNED, size) if config.macro == "auto" else size
        if isinstance(graph.part, Part):
            return _Plan(k, min(memory // row_bytes, most))
        known = most_facts(
            graph,
            work.num_neighbors,
            config.batch_size,
            fetch.format,
            line.num_ranks,
            num_steps=num_steps,
            num_epochs=config.max_epochs,
            pool_row_bytes=row_bytes,
            memory_bytes=memory,
            is_delta=config.delta,
            is_overlapped=config.prefetch > 0,
        )
        fit = lowered(known, k)
        return _Plan(fit.k, min(fit.slots, most), fit.reason, fit.is_overlapped)
    weights = [p for p in model.parameters() if p.requires_grad]
    sizes, value_bytes = bucket_sizes(weights), weights[0].element_size()
    is_one_round = is_summed_everywhere(max(sizes) * value_bytes, line.num_ranks)
    facts = gather_facts(
        hops,
        graph,
        work.num_neighbors,
        fetch.format,
        line,
        has_own=in_place is None,
        num_pinned=num_pinned,
        num_steps=num_steps,
        num_epochs=config.max_epochs,
        pool_row_bytes=row_bytes,
        gradient_bytes=account_gradients(sizes, value_bytes, line.num_ranks, rank=0).total_bytes,
        gradient_rounds=1 if is_one_round else 2,
        memory_bytes=memory,
        is_delta=config.delta,
        is_overlapped=config.prefetch > 0,
    )
    is_auto = config.macro == "auto"
    choice = choose(facts) if is_auto else lowered(facts, size)
    given = replace(facts, is_overlapped=choice.is_overlapped)
    num_slots, may_change = min(room(given, choice.k), most), facts if is_auto else None
    return _Plan(choice.k, num_slots, choice.reason, choice.is_overlapped, may_change)


def _hops(work: PartWork, train_ids: Tensor, config: Config, line: Collective) -> list[Tensor] | None:
    """How likely own nodes are inputs of each rank, by hop, where something depends on it and edges are there to ask."""
    is_needed = config.macro == "auto" or config.memory_bytes is not None or config.cache_bytes
    if not is_needed or not isinstance(work.graph.part, Part):
        return None
    return part_inclusion_by_hop(work.graph, train_ids, work.seeds, work.num_neighbors, line)


def _hot(hops: Sequence[Tensor] | None, graph: SharedGraph, config: Config, line: Collective) -> Tensor:
    if hops is None:
        raise ConfigError(
            "cache: a procedural graph has no stored edges to tell hot rows by; leave cache out"
        )
    return hot_rows(hops[-1], graph, config.cache_bytes, line)


def _fetch(graph: SharedGraph, config: Config) -> RowFetch:
    layout = RowFormat.of(graph.part, graph.num_nodes, config.feature_dtype)
    return RowFetch(graph.part, layout, Wire(graph.num_nodes))


def _in_place(part: AnyPart, layout: RowFormat) -> Tensor | None:
    """Own rows, where steps can read them as they lie: floats, and not rounded on their way to others."""
    x = part.x
    if not isinstance(x, DenseFeatures) or layout.codec is None or layout.codec.is_lossy:
        return None
    is_float = x.values.dtype in (torch.float32, torch.float64) and x.scale is None
    return x.values if is_float else None


def _row_bytes(graph: SharedGraph, fetch: RowFetch, line: Collective) -> int:
    """Of a slot of the pool. Sparse rows may each be as long as the longest."""
    x = graph.part.x
    if not isinstance(x, SparseFeatures):
        is_double = isinstance(x, MatrixFeatures) and x.dtype == torch.float64
        return pool_row_bytes(fetch.format, graph.num_features, 8 if is_double else 4)
    longest = x.rows.indptr.diff().max() if x.num_rows else torch.tensor(0)
    counts = [1] * line.num_ranks
    most = max(int(n) for n in line.all_gather(longest.reshape(1), kind="sizes", counts=counts))
    return pool_row_bytes(fetch.format, 2 * most + 2)


def _most_rows(graph: SharedGraph, config: Config, in_place: Tensor | None) -> int:
    """Rows that can ever be in the pool at once: what two windows read is there twice, where neither keeps anything."""
    others = graph.num_nodes - (0 if in_place is None else graph.part.num_nodes)
    return others if config.delta else 2 * others
