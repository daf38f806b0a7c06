"""What the strategies over a partitioned graph share: the step of one rank, checks, and which remote rows are hot.

Legend: n own nodes, P ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from polyhop.comm import Collective
from polyhop.errors import ConfigError, UnsupportedError
from polyhop.exchange import GradientSum, Halo, PartBatch, Seeds
from polyhop.exchange.striped import Stripes
from polyhop.graph import Graph, Part, SharedGraph
from polyhop.graph.aggregated import AggregatedRows
from polyhop.kernels.keys import Key
from polyhop.nn.rows import Rows
from polyhop.sample.inclusion import inclusion
from polyhop.sample.part import PartSampler
from polyhop.sample.symmetry import is_symmetric
from polyhop.sample.wire import Wire
from polyhop.strategies.inputs import AggregatedInputs, aggregated_inputs
from polyhop.strategies.step import Loss, Placement, Team, as_layered, forward_of

__all__ = [
    "Loader",
    "Options",
    "PartStep",
    "PartWork",
    "checked_fan_outs",
    "halo_inclusion",
    "hot_rows",
    "hottest",
    "included",
    "own_inclusion",
    "part_inclusion",
    "part_inclusion_by_hop",
    "part_work",
    "stripes_of",
]


class Loader(Protocol):
    """Mini-batches of one rank, loaded together with the other ranks."""

    def __len__(self) -> int:
        """Steps in an epoch."""
        ...

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[PartBatch]: ...


class Options(Protocol):
    """What the strategies over parts are all told."""

    @property
    def num_neighbors(self) -> Sequence[int] | None: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def sampler(self) -> str: ...
    @property
    def labor_dependence(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def feature_dtype(self) -> str: ...
    @property
    def aggregate_inputs(self) -> bool: ...


@dataclass(frozen=True, eq=False)
class PartWork:
    """What a rank samples and loads by; with aggregated inputs, its share has the stored sums as features."""

    graph: SharedGraph
    num_neighbors: Sequence[int]
    inputs: AggregatedInputs | None
    sampler: PartSampler
    seeds: Seeds


def part_work(
    name: str,
    model: nn.Module,
    graph: Graph | SharedGraph,
    config: Options,
    train_ids: Tensor,
    dtype: torch.dtype,
    team: Team | None,
    *,
    is_plain: bool = False,
) -> PartWork:
    """For one rank's build of strategy ``name``; errors for what cannot be trained so. All ranks call it together."""
    if team is None or not isinstance(graph, SharedGraph):
        raise ConfigError(
            f"strategy {name!r} runs on ranks: give --workers N, or start it with torchrun (one process: strategy 'single')"
        )
    fan_outs: Sequence[int] = checked_fan_outs(model, config.num_neighbors, name)
    inputs = None
    if config.aggregate_inputs:
        sent = config.feature_dtype
        inputs = aggregated_inputs(model, graph, fan_outs, dtype, line=team.line, feature_dtype=sent)
        assert isinstance(inputs.graph, SharedGraph)
        graph, fan_outs = inputs.graph, inputs.num_neighbors
    part = graph.part
    wire = Wire(graph.num_nodes, part.edge_weight is not None, is_plain)
    sampler = PartSampler(
        part, fan_outs, wire, seed=config.seed, method=config.sampler, dependence=config.labor_dependence
    )
    seeds = Seeds(
        part.facts_of(train_ids)[0],
        train_ids + part.start,
        team.line,
        seed=config.seed,
        batch_size=config.batch_size,
    )
    if len(seeds) == 0:
        raise ConfigError(
            "the train set is empty: no node is both in the train split and labelled (label -1 = none)"
        )
    return PartWork(graph, fan_outs, inputs, sampler, seeds)


def checked_fan_outs(model: nn.Module, num_neighbors: Sequence[int] | None, strategy: str) -> Sequence[int]:
    """The fan-outs; errors for what cannot be trained so."""
    layered = as_layered(model)
    if layered is None:
        raise UnsupportedError(
            f"{type(model).__name__} has no begin/layer/finish, so it cannot train on sampled neighbours: build it from "
            "polyhop.nn (GCN, GraphSAGE, ..., or Stack for your own layers)"
        )
    if num_neighbors is None:
        raise ConfigError(
            f"strategy {strategy!r} trains on mini-batches: give one fan-out per layer, such as num_neighbors=[15, 10] "
            "(--fanout 15,10; -1 = all neighbours)"
        )
    if len(num_neighbors) != layered.num_layers:
        raise ConfigError(
            f"num_neighbors={list(num_neighbors)} has {len(num_neighbors)} fan-outs, the model has "
            f"{layered.num_layers} layers: give one per layer, from the seeds outward"
        )
    batch_norm = [
        name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    if batch_norm:
        raise UnsupportedError(
            f"{batch_norm[0]} is a BatchNorm: its statistics would be of each rank's rows, so results would depend on the "
            "number of ranks; use norm='layer', or strategy 'single'"
        )
    return num_neighbors


def part_inclusion(
    graph: SharedGraph, train_ids: Tensor, seeds: Seeds, fan_outs: Sequence[int], line: Collective
) -> Tensor:
    """float64 [n, P]: the probability that each own node is an input node of each rank's mini-batch."""
    return part_inclusion_by_hop(graph, train_ids, seeds, fan_outs, line)[-1]


def part_inclusion_by_hop(
    graph: SharedGraph, train_ids: Tensor, seeds: Seeds, fan_outs: Sequence[int], line: Collective
) -> list[Tensor]:
    """The same after each hop, from the seeds themselves to the input nodes."""
    part = graph.stored("what nodes are read most")
    start = torch.zeros(part.num_nodes, line.num_ranks, dtype=torch.float64)
    start[train_ids, line.rank] = min(1.0, seeds.batch_size / len(seeds))
    return included(part, start, fan_outs, line)


def included(part: Part, start: Tensor, fan_outs: Sequence[int], line: Collective) -> list[Tensor]:
    """Of own nodes [n, K], by hop; what sums over own edges say of the halo goes to its owners."""
    halo = Halo(part, line)

    def fold_back(sums: Tensor) -> Tensor:
        own = sums[: part.num_nodes].contiguous()
        return halo.back(sums[part.num_nodes :].contiguous(), own, kind="ids")

    return inclusion(part.block(), start, fan_outs, fold_back, is_symmetric=is_symmetric(part, line))


def own_inclusion(
    graph: SharedGraph, train_ids: Tensor, seeds: Seeds, fan_outs: Sequence[int], line: Collective
) -> Tensor:
    """float64 [n]: the probability that one mini-batch of these ranks knows each own node after its hops."""
    part = graph.stored("what nodes are read most")
    start = torch.zeros(part.num_nodes, 1, dtype=torch.float64)
    start[train_ids] = min(1.0, seeds.batch_size / seeds.num_groups / len(seeds))
    return included(part, start, fan_outs, line)[-1][:, 0]


def halo_inclusion(
    graph: SharedGraph, train_ids: Tensor, seeds: Seeds, fan_outs: Sequence[int], line: Collective
) -> Tensor:
    """float64 [H]: the probability that own nodes of one mini-batch of these ranks draw each halo node in the last hop."""
    part = graph.stored("what nodes are read most")
    *before, last = fan_outs
    known, block = own_inclusion(graph, train_ids, seeds, before, line), part.block()
    degree = block.drawn.double().clamp(min=1)
    draws = known * (degree if last < 0 else degree.clamp(max=last)) / degree
    missed = torch.log1p(-draws.clamp(max=1 - 1e-12))
    sums = missed.new_zeros(block.num_src).index_add(
        0, block.indices.long(), torch.repeat_interleave(missed, block.drawn)
    )
    return -torch.expm1(sums[part.num_nodes :])


def hot_rows(likely: Tensor, graph: SharedGraph, cache_bytes: int, line: Collective) -> Tensor:
    """int64, ascending new ids: the remote nodes that this rank reads most, as many as fit the cache."""
    row_bytes = 8 + 4 * max(1, graph.num_features)  # as kept: floats, and the id to find them by
    return hottest(likely, graph.part.start, cache_bytes // row_bytes, line)[:, 0].long().sort().values


def hottest(likely: Tensor, start: int, most: int, line: Collective) -> Tensor:
    """float64 [k, 2]: new ids of the ``most`` remote nodes that this rank reads most, and how likely it does.

    ``likely`` float64 [n, P] is of own nodes, from ``start`` on, and all ranks. All call it together.
    """
    offered = []
    for rank in range(line.num_ranks):
        column = likely[:, rank] if rank != line.rank else likely[:0, rank]
        best = torch.sort(column, descending=True, stable=True).indices[:most]
        best = best[column[best] > 0]
        ids = (best + start).double()  # exact up to 2^53
        offered.append(torch.stack([ids, column[best]], dim=1))
    found = torch.cat(line.all_to_all(offered, kind="ids"))
    return found[torch.sort(found[:, 1], descending=True, stable=True).indices[:most]]


def stripes_of(likely: Tensor, start: int, most: int, size: int, line: Collective) -> Stripes:
    """The rows that this rank's group of ``size`` neighbouring ranks reads most from elsewhere, ``most`` for each of them.

    ``likely`` and ``start`` as in ``hottest``. From elsewhere: from owners outside of the group; where all ranks are in it,
    from any other one. All ranks call it together.
    """
    offered, own = list[Tensor](), line.rank // size
    for group in range(line.num_ranks // size):
        readers = [r for r in range(group * size, (group + 1) * size) if r != line.rank]
        reads = likely[:, readers].sum(1) if group != own or size == line.num_ranks else likely[:0, 0]
        best = torch.sort(reads, descending=True, stable=True).indices[: most * size]
        best = best[reads[best] > 0]
        found = torch.stack([(best + start).double(), reads[best]], dim=1)  # exact up to 2^53
        offered += [found] * size
    everyone = torch.cat(line.all_to_all(offered, kind="ids"))
    order = torch.sort(everyone[:, 1], descending=True, stable=True).indices[: most * size]
    return Stripes.of(everyone[order, 0].long(), own * size, size)


class PartStep:
    """Every rank trains its mini-batch of a step; gradients are summed over ranks."""

    def __init__(
        self,
        model: nn.Module,
        loader: Loader,
        placement: Placement,
        loss: Loss,
        terms_per_row: int,
        team: Team,
        inputs: AggregatedInputs | None = None,
    ) -> None:
        self._forward, self._loader, self._loss = forward_of(model), loader, loss
        self._placement, self._terms_per_row = placement, terms_per_row
        self._inputs = inputs
        self.notes = [] if inputs is None else [inputs.note]
        parameters = [p for p in model.parameters() if p.requires_grad]
        self._sum = GradientSum(parameters, team.line, asks_to_stop=team.asks_to_stop)
        self._timed, self._timed_s = 0, 0.0  # steps that computed something, and their seconds

    def step_seconds(self) -> float:
        """Mean seconds of computing in a step, gradients' way apart; 0 before the second: the first warms up."""
        return self._timed_s / (self._timed - 1) if self._timed > 1 else 0.0

    @property
    def num_steps(self) -> int:
        return len(self._loader)

    @property
    def is_stop_agreed(self) -> bool:
        return self._sum.is_stop_agreed

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        return self._loader.batches(epoch, start)

    def gradients(self, batch: PartBatch, key: Key) -> Tensor:
        self._sum.begin()
        parameter = self._sum.parameters[0]
        total = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        before = time.perf_counter()
        if batch.batch.seeds.numel():
            first, *others = batch.batch.blocks
            x, first = self._placement.pooled(batch.x, first)
            blocks = tuple(self._placement.block(block) for block in (first, *others))
            rows: Rows | AggregatedRows = x
            if self._inputs is not None:
                rows, blocks = self._inputs.first(x, blocks)
            with self._placement.context():
                logits = self._forward(rows, blocks, key)
            y = batch.y.to(self._placement.device)
            loss = self._loss(logits, y) / (batch.num_global * self._terms_per_row)
            loss.backward()  # type: ignore[no-untyped-call]
            total = loss.detach()
            self._timed_s += time.perf_counter() - before if self._timed else 0.0
            self._timed += 1
        return self._sum.end(total)

    def close(self) -> None:
        """Let go of what the loader holds, with the other ranks."""
        close = getattr(self._loader, "close", None)
        if close is not None:
            close()

    def state(self) -> dict[str, Tensor]:
        return {}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        assert not tensors, "batches are pure functions of (seed, epoch, step): nothing is kept"
