"""Everything in one process: the full graph each step, or sampled mini-batches. The measure of every other strategy.

    full graph    x [N, F], one Block of all edges -> logits of all nodes -> loss of the train nodes     1 step per epoch
    mini-batch    seeds -> one Block per layer, input rows (sampled and gathered ahead, in threads) -> loss of the seeds

Nothing is sent: 0 bytes per epoch. The loss of a step is the sum over its rows divided by their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyhop.errors import ConfigError, UnsupportedError
from polyhop.graph import DenseFeatures, Graph
from polyhop.graph.aggregated import AggregatedRows
from polyhop.kernels.keys import Key
from polyhop.kernels.sample import has_device_kernel
from polyhop.nn.model import Model
from polyhop.nn.rows import Rows
from polyhop.sample import Loaded, NeighborLoader
from polyhop.strategies.inputs import AggregatedInputs, aggregated_inputs
from polyhop.strategies.placed import Placed, place_graph
from polyhop.strategies.step import Loss, Placement, Step, Team, WholeGraph, as_layered, forward_of
from polyhop.trace import NO_TRACE, Trace

__all__ = ["NAME", "Config", "build"]

NAME = "single"
_SHARE = (
    0.5  # of a device's free memory for the graph and its input rows: the rest is for what a step computes
)


@dataclass(frozen=True)
class Config:
    """The options this strategy takes from the trainer."""

    num_neighbors: Sequence[int] | None = None  # from the seeds outward, -1 = all; None = full graph
    batch_size: int = 1024
    sampler: str = "uniform"
    labor_dependence: int = 1  # steps over which LABOR's draws turn from one to the next
    num_workers: int = 1
    prefetch: int = 2
    seed: int = 0
    aggregate_inputs: bool = False  # sums of the first layer stored once: one hop less
    spill_dir: str | Path | None = None
    device_room: int | None = (
        None  # bytes of a device for input rows, where it draws mini-batches; 0: the CPU does; None: as it fits
    )


def build(
    model: nn.Module,
    graph: Graph,
    config: Config,
    *,
    train_ids: Tensor,
    whole: WholeGraph,
    loss: Loss,
    terms_per_row: int = 1,
    trace: Trace = NO_TRACE,
    team: Team | None = None,
) -> Step:
    """The step for this model and graph: full graph, or mini-batches where fan-outs are given.

    ``train_ids`` int64: labelled train nodes. ``loss`` sums over rows; it is divided by rows x ``terms_per_row``.
    """
    if team is not None:
        raise ConfigError(
            f"strategy 'single' runs in one process, this run has {team.line.num_ranks} ranks: use strategy 'data'"
        )
    if config.num_neighbors is None:
        return _FullGraph(model, graph, train_ids, whole, loss, terms_per_row)
    layered = as_layered(model)
    if layered is None:
        raise UnsupportedError(
            f"{type(model).__name__} has no begin/layer/finish, so it cannot train on sampled neighbours: build it from "
            "polyhop.nn (GCN, GraphSAGE, ..., or Stack for your own layers), or leave num_neighbors out (full graph)"
        )
    if len(config.num_neighbors) != layered.num_layers:
        raise ConfigError(
            f"num_neighbors={list(config.num_neighbors)} has {len(config.num_neighbors)} fan-outs, the model has "
            f"{layered.num_layers} layers: give one per layer, from the seeds outward"
        )
    graph, fan_outs, inputs = whole.graph, config.num_neighbors, None
    if config.aggregate_inputs:
        dtype = whole.placement.dtype
        inputs = aggregated_inputs(model, graph, fan_outs, dtype, spill_dir=config.spill_dir)
        assert isinstance(inputs.graph, Graph)
        graph, fan_outs = inputs.graph, inputs.num_neighbors
    placed, about_place = _placed(graph, fan_outs, train_ids, config, whole.placement)
    if placed is not None:
        graph = placed.graph
    loader = NeighborLoader(
        graph,
        fan_outs,
        train_ids,
        config.batch_size,
        shuffle=True,
        seed=config.seed,
        num_workers=config.num_workers,
        prefetch=config.prefetch,
        in_place=inputs is None and _reads_pool(model, graph, whole.placement),
        method=config.sampler,
        dependence=config.labor_dependence,
        device=None if placed is None else whole.placement.device,
        transposes=placed is not None,
        trace=trace,
    )
    notes = [] if inputs is None else [inputs.note]
    notes += [] if about_place is None else [about_place]
    return _MiniBatch(model, loader, whole, loss, terms_per_row, inputs, notes)


def _placed(
    graph: Graph, fan_outs: Sequence[int], train_ids: Tensor, config: Config, placement: Placement
) -> tuple[Placed | None, str | None]:
    """The graph on the device, which then draws mini-batches, and what a run's first lines say of it.

    Unasked where the graph's lists fit and the device has kernels for such draws; else mini-batches are drawn on the CPU
    and copied.
    """
    room, device = config.device_room, placement.device
    if room == 0 or (room is None and device.type == "cpu"):
        return None, None
    if device.type == "cpu":
        raise ConfigError(
            "device_cache with strategy 'single' on the CPU: rows are read where they are; leave it out, or give "
            "device='cuda'"
        )
    if room is None and not has_device_kernel(fan_outs, config.sampler):
        return None, "mini-batches are drawn on the CPU: the device has no kernel for such draws"
    free, _ = torch.cuda.mem_get_info(device)
    placed = place_graph(
        graph, device, int(_SHARE * free), cache=room, train_ids=train_ids, batch_size=config.batch_size,
        num_neighbors=fan_outs,
    )  # fmt: skip
    if placed is None and room is None:
        return None, (
            f"mini-batches are drawn on the CPU: the graph cannot be on {device} (lists beyond half of the "
            f"{free / 1e9:.1f} GB that are free there, or features that are not in memory)"
        )
    if placed is None:
        raise ConfigError(
            f"device_cache={room:,} bytes: {graph.name!r} cannot be on {device}: its lists need to fit half of the "
            f"{free / 1e9:.1f} GB that are free there, its features to be in memory, sparse ones to fit whole; leave "
            "device_cache out"
        )
    unasked = "; so much fits half of what is free there (device_cache=0: drawn on the CPU)"
    return placed, placed.note + (unasked if room is None else "")


def _reads_pool(model: nn.Module, graph: Graph, placement: Placement) -> bool:
    """Whether input rows can be read where they lie: our models take a pool; another device or dtype needs copies."""
    x = graph.x
    if not isinstance(model, Model) or not isinstance(x, DenseFeatures) or x.values.dtype != placement.dtype:
        return False
    return x.values.device == placement.device


class _Stateless:
    """A step whose batches are pure functions of (seed, epoch, step) has nothing to save."""

    is_stop_agreed = False  # nobody to agree with

    def state(self) -> dict[str, Tensor]:
        return {}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        assert not tensors, "single keeps no buffers"


class _FullGraph(_Stateless):
    num_steps = 1

    def __init__(
        self,
        model: nn.Module,
        graph: Graph,
        train_ids: Tensor,
        whole: WholeGraph,
        loss: Loss,
        terms_per_row: int,
    ) -> None:
        assert graph.y is not None, "the trainer checks that labels are there"
        device = whole.placement.device
        self._forward, self._whole, self._loss = forward_of(model), whole, loss
        self._ids, self._y = train_ids.to(device), graph.y[train_ids].to(device)
        self._count = train_ids.numel() * terms_per_row

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        return iter(range(start, 1))

    def gradients(self, batch: Any, key: Key) -> Tensor:
        with self._whole.placement.context():
            logits = self._forward(self._whole.x, self._whole.block, key)
        if logits.dim() != 2 or logits.shape[0] != self._whole.block.num_dst:
            raise ConfigError(
                f"the model gave outputs of shape {list(logits.shape)}: expected one row for each of "
                f"{self._whole.block.num_dst} nodes"
            )
        loss = self._loss(logits.index_select(0, self._ids), self._y) / self._count
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


class _MiniBatch(_Stateless):
    def __init__(
        self,
        model: nn.Module,
        loader: NeighborLoader,
        whole: WholeGraph,
        loss: Loss,
        terms_per_row: int,
        inputs: AggregatedInputs | None,
        notes: list[str],
    ) -> None:
        self._forward, self._loss = forward_of(model), loss
        self._loader: NeighborLoader | None = loader
        self._inputs, self.notes = inputs, notes
        self._placement, self._terms_per_row = whole.placement, terms_per_row

    @property
    def num_steps(self) -> int:
        return len(self._open)

    @property
    def _open(self) -> NeighborLoader:
        assert self._loader is not None, "the step is closed"
        return self._loader

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        return self._open.batches(epoch, start)

    def close(self) -> None:
        """Let go of the graph, which may fill half of a device, whoever still refers to the step."""
        self._loader = None

    def gradients(self, batch: Loaded, key: Key) -> Tensor:
        assert batch.x is not None, "the trainer checks that features are there"
        assert batch.y is not None, "the trainer checks that labels are there"
        x = self._placement.rows(batch.x)
        blocks = tuple(self._placement.block(block) for block in batch.batch.blocks)
        rows: Rows | AggregatedRows = x
        if self._inputs is not None:
            rows, blocks = self._inputs.first(x, blocks)
        with self._placement.context():
            logits = self._forward(rows, blocks, key)
        y = batch.y.to(self._placement.device)
        loss = self._loss(logits, y) / (y.shape[0] * self._terms_per_row)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()
