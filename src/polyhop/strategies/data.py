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
    gradients  about 2 (P - 1) / P * 4 (W + T + 2)
    sizes      8 (P - 1) for each message whose length only its sender knows: 2 a hop, 1 for the rows

Legend: N nodes, P ranks, S input nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyhop.comm import Collective
from polyhop.errors import ConfigError, UnsupportedError
from polyhop.exchange import GradientSum, Halo, PartBatch, PartLoader, RowFetch, RowFormat, Seeds
from polyhop.graph import Graph, SharedGraph
from polyhop.kernels.keys import Key
from polyhop.sample.inclusion import inclusion
from polyhop.sample.part import PartSampler
from polyhop.sample.wire import Wire
from polyhop.strategies.data_cost import account, estimate
from polyhop.strategies.held import HeldPart
from polyhop.strategies.step import Loss, Placement, Step, Team, WholeGraph, as_layered, forward_of
from polyhop.trace import NO_TRACE, Trace

__all__ = ["NAME", "Config", "account", "build", "estimate", "hold", "hot_rows", "part_inclusion"]

NAME = "data"


@dataclass(frozen=True)
class Config:
    """The options this strategy takes from the trainer."""

    num_neighbors: Sequence[int] | None = None  # from the seeds outward, -1 = all
    batch_size: int = 1024  # of all ranks together
    sampler: str = "uniform"
    prefetch: int = 2
    seed: int = 0
    feature_dtype: str = "auto"  # auto | float32 | bfloat16 | int8
    cache_bytes: int = 0  # of remote rows kept on each rank
    per_minibatch_rpc: bool = False


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
    if team is None or not isinstance(graph, SharedGraph):
        raise ConfigError(
            "strategy 'data' runs on ranks: give --workers N, or start it with torchrun (one process: strategy 'single')"
        )
    fan_outs = _checked(model, config)
    part = graph.part
    wire = Wire(graph.num_nodes, part.edge_weight is not None, config.per_minibatch_rpc)
    sampler = PartSampler(part, fan_outs, wire, seed=config.seed, method=config.sampler)
    seeds = Seeds(
        part.user_ids[train_ids],
        train_ids + part.start,
        team.line,
        seed=config.seed,
        batch_size=config.batch_size,
    )
    if len(seeds) == 0:
        raise ConfigError(
            "the train set is empty: no node is both in the train split and labelled (label -1 = none)"
        )
    fetch = _fetch(graph, config)
    if config.cache_bytes and not config.per_minibatch_rpc:
        hot = hot_rows(
            part_inclusion(graph, train_ids, seeds, fan_outs, team.line), graph, fetch, config, team.line
        )
        fetch.keep(team.line, hot)
    loading = team.line.fork()
    loader = PartLoader(
        loading,
        sampler,
        fetch,
        seeds,
        prefetch=0 if config.per_minibatch_rpc else config.prefetch,
        trace=trace,
    )
    return _Data(model, loader, whole.placement, loss, terms_per_row, team)


def _fetch(graph: SharedGraph, config: Config) -> RowFetch:
    plain = config.per_minibatch_rpc
    dtype = "float32" if plain else config.feature_dtype
    layout = RowFormat.of(graph.part, graph.num_nodes, dtype, is_plain=plain)
    return RowFetch(graph.part, layout, Wire(graph.num_nodes, is_plain=plain))


def _checked(model: nn.Module, config: Config) -> Sequence[int]:
    """The fan-outs; errors for what cannot be trained so."""
    layered = as_layered(model)
    if layered is None:
        raise UnsupportedError(
            f"{type(model).__name__} has no begin/layer/finish, so it cannot train on sampled neighbours: build it from "
            "polyhop.nn (GCN, GraphSAGE, ..., or Stack for your own layers)"
        )
    if config.num_neighbors is None:
        raise ConfigError(
            "strategy 'data' trains on mini-batches: give one fan-out per layer, such as num_neighbors=[15, 10] "
            "(--fanout 15,10; -1 = all neighbours)"
        )
    if len(config.num_neighbors) != layered.num_layers:
        raise ConfigError(
            f"num_neighbors={list(config.num_neighbors)} has {len(config.num_neighbors)} fan-outs, the model has "
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
    return config.num_neighbors


def part_inclusion(
    graph: SharedGraph, train_ids: Tensor, seeds: Seeds, fan_outs: Sequence[int], line: Collective
) -> Tensor:
    """float64 [n, P]: the probability that each own node is an input node of each rank's mini-batch."""
    part = graph.part
    halo = Halo(part, line)
    start = torch.zeros(part.num_nodes, line.num_ranks, dtype=torch.float64)
    start[train_ids, line.rank] = min(1.0, seeds.batch_size / len(seeds))

    def fold_back(sums: Tensor) -> Tensor:
        own = sums[: part.num_nodes].contiguous()
        return halo.back(sums[part.num_nodes :].contiguous(), own, kind="ids")

    return inclusion(part.block(), start, fan_outs, fold_back)[-1]


def hot_rows(likely: Tensor, graph: SharedGraph, fetch: RowFetch, config: Config, line: Collective) -> Tensor:
    """int64, ascending new ids: the remote nodes that this rank reads most, as many as fit the cache."""
    row_bytes = 8 + 4 * max(1, graph.num_features)  # as kept: floats, and the id to find them by
    most = config.cache_bytes // row_bytes
    offered = []
    for rank in range(line.num_ranks):
        column = likely[:, rank] if rank != line.rank else likely[:0, rank]
        best = torch.sort(column, descending=True, stable=True).indices[:most]
        best = best[column[best] > 0]
        ids = (best + graph.part.start).double()  # exact up to 2^53
        offered.append(torch.stack([ids, column[best]], dim=1))
    found = torch.cat(line.all_to_all(offered, kind="ids"))
    order = torch.sort(found[:, 1], descending=True, stable=True).indices[:most]
    return found[order, 0].long().sort().values


class _Data:
    def __init__(
        self,
        model: nn.Module,
        loader: PartLoader,
        placement: Placement,
        loss: Loss,
        terms_per_row: int,
        team: Team,
    ) -> None:
        self._forward, self._loader, self._loss = forward_of(model), loader, loss
        self._placement, self._terms_per_row = placement, terms_per_row
        parameters = [p for p in model.parameters() if p.requires_grad]
        self._sum = GradientSum(parameters, team.line, asks_to_stop=team.asks_to_stop)

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
        if batch.batch.seeds.numel():
            x = self._placement.rows(batch.x)
            blocks = tuple(self._placement.block(block) for block in batch.batch.blocks)
            with self._placement.context():
                logits = self._forward(x, blocks, key)
            y = batch.y.to(self._placement.device)
            loss = self._loss(logits, y) / (batch.num_global * self._terms_per_row)
            loss.backward()  # type: ignore[no-untyped-call]
            total = loss.detach()
        return self._sum.end(total)

    def state(self) -> dict[str, Tensor]:
        return {}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        assert not tensors, "data keeps no buffers"
