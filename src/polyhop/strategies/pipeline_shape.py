"""Which shape suits a deep model on some ranks: parts alone (``halo``), stages alone (``pipeline``), or stages of parts.

Every way to lay the ranks out as S stages of D ways is timed ahead: computing by what it takes on whole parts, longer where
it is done in chunks; rows between parts and weights by their bytes on a link; chunks by playing the schedule through.

    one stage        computing / P + (halo rows + weights) / (P rate)
    several stages   a schedule whose tasks are a chunk's computing and halo rows, whose messages are its rows between stages

Legend: S stages, D ways, P = S D ranks, K chunks, L layers; R(D): rows that D parts read of one another, per node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from polyhop.errors import InputError
from polyhop.strategies.pipeline_cost import graph_parallel_volume, pipeline_volume
from polyhop.strategies.pipeline_schedule import Layout, fill_drain, split_ways
from polyhop.strategies.pipeline_simulate import simulate, ticked

__all__ = ["Links", "Shape", "Work", "choose_shape", "epoch_s"]


@dataclass(frozen=True)
class Work:
    """An epoch of a model on a graph."""

    num_nodes: int
    layer_columns: Sequence[int]  # of the rows that each layer reads
    boundary_columns: int  # that cross between two stages
    compute_s: float  # of all ranks together, on whole parts
    replicas: Mapping[int, float] = field(default_factory=dict)  # D -> R(D)
    num_weights: int = 0
    num_chunks: int = 1  # K, all ways together
    chunked: float = 1.0  # how many times as long the same takes in chunks
    slowest: float = 1.0  # the slowest stage over the mean
    value_bytes: int = 4


@dataclass(frozen=True)
class Links:
    """Bytes a second that a rank sends."""

    parts: float  # to all parts, when these are on several hosts
    stages: float  # to the next stage
    near_parts: float | None = None  # to parts on its own host; None: as to others
    ranks_per_host: int = 1

    def between_parts(self, num_ways: int) -> float:
        return self.near_parts if self.near_parts and num_ways <= self.ranks_per_host else self.parts


@dataclass(frozen=True)
class Shape:
    """A layout and how long its epoch should take."""

    layout: Layout
    seconds: float

    @property
    def name(self) -> str:
        if self.layout.num_stages == 1:
            return "halo"
        return "pipeline" if self.layout.num_ways == 1 else f"hybrid of {self.layout.num_ways} ways"


def choose_shape(
    num_ranks: int, work: Work, links: Links, *, ways: Iterable[int] | None = None, keeps_step: bool = False
) -> tuple[Shape, ...]:
    """All shapes, the one that should be fastest first. ``ways``: D to look at; None: all for which R(D) is known.

    ``keeps_step``: ranks wait for one another in every tick (as published), and messages are not hidden.
    """
    wanted = [1, *sorted(work.replicas)] if ways is None else list(ways)
    fit = [
        Layout(num_ranks // count, count)
        for count in dict.fromkeys(wanted)
        if num_ranks % count == 0
        and num_ranks // count <= len(work.layer_columns)
        and work.num_chunks >= count
    ]
    if not fit:
        raise InputError(
            f"no way to lay {num_ranks} ranks out in stages of {wanted} ways with {len(work.layer_columns)} layers and "
            f"{work.num_chunks} chunks: give divisors of {num_ranks}"
        )
    made = [Shape(layout, epoch_s(layout, work, links, keeps_step=keeps_step)) for layout in fit]
    return tuple(sorted(made, key=lambda shape: shape.seconds))


def epoch_s(layout: Layout, work: Work, links: Links, *, keeps_step: bool = False) -> float:
    """Seconds of an epoch, foreseen."""
    ways, ranks = layout.num_ways, layout.num_ranks
    share = 0.0 if ways == 1 else _replicas(work, ways)
    exchanged = graph_parallel_volume(
        work.num_nodes, work.layer_columns, share, ways, work.num_weights, work.value_bytes
    )
    rate = links.between_parts(ways)
    halo_s = exchanged.halo / ranks / rate
    # Every stage sums its own weights, over its ways.
    weights_s = exchanged.weights / ranks / rate
    if layout.num_stages == 1:
        return work.compute_s / ranks + halo_s + weights_s
    orders = split_ways(work.num_chunks, ways)
    ticks = max(len(order) for order in orders)
    layers = len(work.layer_columns)
    bounds = [at * layers // layout.num_stages for at in range(layout.num_stages + 1)]
    each = work.chunked * work.compute_s / ranks
    others = (layout.num_stages - work.slowest) / (layout.num_stages - 1)
    factors = [work.slowest, *[others] * (layout.num_stages - 1)]
    boundary = pipeline_volume(work.num_nodes, [work.boundary_columns], value_bytes=work.value_bytes).total
    message = boundary / (2 * work.num_chunks) / links.stages
    schedule = fill_drain(layout, bounds, orders)

    def task(stage: int, _: object) -> float:
        return (each * factors[stage] + halo_s) / (2 * ticks)

    if keeps_step:
        return weights_s + ticked(schedule, task, lambda stage, _: message)
    return weights_s + simulate(schedule, task, lambda stage, _: message).seconds


def _replicas(work: Work, ways: int) -> float:
    if ways not in work.replicas:
        raise InputError(
            f"rows that {ways} parts read of one another are not known: give replicas[{ways}], from a partition"
        )
    return work.replicas[ways]
