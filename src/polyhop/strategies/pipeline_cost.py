"""What a pipeline sends and holds: accounted from its schedule, to the byte; estimated before anything is cut up.

Bytes an epoch of all ranks together, forward and backward (n nodes, b bytes a value, H columns of a layer, C_s columns that
cross boundary s: the rows themselves and what is carried along, such as GCNII's h0; R(p) rows that p parts read of one
another, per node; W weights):

    pipeline         2 b n sum_s C_s                                               whatever the depth and the chunks
    graph parallel   2 b n R(P) sum_l H_l             + 2 (P - 1) b W              as published: every layer, unmapped rows
    hybrid S x D     2 b n (sum_s C_s + R(D) sum_l H_l) + 2 (D - 1) b W           l from 1: layer 0 exchanges nothing

A pipeline also tells all ranks three numbers a step: the loss, whether to stop, the norm of gradients. What a rank holds
for the layers l of its stage (T > 1 keeps a copy of the history; q values a row and layer for the backward pass):

    b n sum_l H_l (1 + [T > 1] + 1 + q)      + edges of all chunks of its way + input rows on the first stage

With D ways n is what one has: about N / D own rows, and the halo's.

Legend: S stages, D ways, K chunks, L layers, P ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from polyhop.comm import Cost
from polyhop.errors import InputError
from polyhop.strategies.data_cost import account_gradients
from polyhop.strategies.pipeline_schedule import Direction, Layout, Schedule
from polyhop.strategies.pipeline_simulate import bubble

__all__ = [
    "TAIL",
    "Between",
    "Boundary",
    "Facts",
    "Volume",
    "account",
    "account_between",
    "account_boundaries",
    "break_even_depth",
    "estimate",
    "estimate_bubble",
    "graph_parallel_volume",
    "memory_bytes",
    "pipeline_volume",
    "volume_ratio",
]

TAIL = 3
"""Numbers that all ranks tell one another in a step: loss, wish to stop, squared norm of the gradients."""

_DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")


@dataclass(frozen=True)
class Boundary:
    """What crosses between two stages."""

    columns: int  # of a row and what is carried with it
    value_bytes: int = 4
    row_bytes: Mapping[Direction, int] = field(
        default_factory=dict
    )  # where rows are encoded: of one on the wire

    def bytes(self, direction: Direction, num_rows: int) -> int:
        return num_rows * self.row_bytes.get(direction, self.columns * self.value_bytes)


@dataclass(frozen=True)
class Between:
    """What ways of a stage exchange."""

    num_read: Sequence[Sequence[int]]  # [K][D]: rows of a chunk that a way reads; of its own chunks 0
    row_bytes: Sequence[int]  # [L]: of one such row before each layer; 0 = none crosses there
    num_weights: Sequence[int]  # [S]: values whose gradients the ways of a stage sum
    chunks: Sequence[Sequence[int]] = ()  # [D]: chunks of each way; for ``estimate`` alone
    num_rows: Sequence[int] = ()  # [D]: nodes of each way; for ``estimate`` alone


@dataclass(frozen=True)
class Facts:
    """Known before a run."""

    layout: Layout
    num_nodes: int
    num_chunks: int
    boundaries: Sequence[Boundary]  # S - 1
    value_bytes: int = 4  # of a weight
    num_shared: int = 0  # values of weights that several stages use
    between: Between | None = None  # where stages have several ways
    bounds: Sequence[int] = ()  # S + 1 layers, where stages begin and end; for ``between`` alone
    num_sweeps: int = 0  # forward passes before an epoch

    def __post_init__(self) -> None:
        if len(self.boundaries) != self.layout.num_stages - 1:
            raise InputError(
                f"{len(self.boundaries)} boundaries for {self.layout.num_stages} stages: one fewer than stages is expected"
            )


def account_boundaries(
    schedule: Schedule, chunk_rows: Sequence[int], boundaries: Sequence[Boundary]
) -> dict[tuple[int, Direction], int]:
    """(boundary, direction) -> bytes of an epoch, all ways together. ``chunk_rows[c]``: nodes of chunk c."""
    found = {(at, direction): 0 for at in range(len(boundaries)) for direction in _DIRECTIONS}
    for rank in range(schedule.layout.num_ranks):
        for at, direction, num_bytes in _sent(schedule, rank, chunk_rows, boundaries):
            found[at, direction] += num_bytes
    return found


def account(
    schedule: Schedule,
    chunk_rows: Sequence[int],
    boundaries: Sequence[Boundary],
    rank: int,
    value_bytes: int = 4,
    num_shared: int = 0,
    between: Between | None = None,
    num_sweeps: int = 0,
) -> Cost:
    """What ``rank`` sends in a step. ``num_shared``: values of weights that several stages use.

    ``num_sweeps``: forward passes before the epoch, for fresher history.
    """
    sent = _sent(schedule, rank, chunk_rows, boundaries)
    if between is not None:
        sent += account_between(schedule, between, rank)
    sizes = [
        num_bytes
        for _, direction, num_bytes in sent
        for _ in range(1 + (num_sweeps if direction == "forward" else 0))
        if num_bytes
    ]
    hidden = Cost({"hidden": sum(sizes)}, {"hidden": len(sizes)}) if sizes else Cost()
    return hidden + _account_weights(schedule.layout, rank, value_bytes, num_shared, between)


def account_between(schedule: Schedule, between: Between, rank: int) -> Iterator[tuple[int, Direction, int]]:
    """(way it goes to, direction, bytes) of every message of ``rank`` to another way of its stage."""
    layout = schedule.layout
    lanes = [schedule.tasks(each) for each in layout.team(layout.stage(rank))]
    own = layout.way(rank)
    for tasks in zip(*lanes, strict=True):
        direction = tasks[own].direction
        for layer in range(tasks[own].first, tasks[own].stop):
            for way, task in enumerate(tasks):
                # Rows leave their owner forward, and as many gradients come back to it.
                chunk, reader = (tasks[own].chunk, way) if direction == "forward" else (task.chunk, own)
                rows = 0 if chunk is None or way == own else between.num_read[chunk][reader]
                if rows * between.row_bytes[layer]:
                    yield way, direction, rows * between.row_bytes[layer]


def _account_weights(
    layout: Layout, rank: int, value_bytes: int, num_shared: int, between: Between | None
) -> Cost:
    everywhere = account_gradients(_summed(num_shared), value_bytes, layout.num_ranks, rank)
    own = 0 if between is None else between.num_weights[layout.stage(rank)]
    return everywhere + account_gradients(
        [own] if own else [], value_bytes, layout.num_ways, layout.way(rank)
    )


def _summed(num_shared: int) -> list[int]:
    return [num_shared, TAIL] if num_shared else [TAIL]


def _sent(
    schedule: Schedule, rank: int, chunk_rows: Sequence[int], boundaries: Sequence[Boundary]
) -> list[tuple[int, Direction, int]]:
    """(boundary, direction, bytes) of every message of a rank."""
    stage, found = schedule.layout.stage(rank), []
    for action in schedule.lanes[rank]:
        if action.kind == "send" and action.task.chunk is not None:
            direction = action.task.direction
            at = stage if direction == "forward" else stage - 1
            found.append((at, direction, boundaries[at].bytes(direction, chunk_rows[action.task.chunk])))
    return found


def estimate(facts: Facts, rank: int) -> Cost:
    """What ``rank`` will send in a step: what ``account`` finds, if no chunk is empty."""
    stage, way, between = facts.layout.stage(rank), facts.layout.way(rank), facts.between
    num_rows = facts.num_nodes if between is None else between.num_rows[way]
    num_chunks = min(facts.num_chunks, facts.num_nodes) if between is None else len(between.chunks[way])
    crossed: list[int] = []
    if stage < facts.layout.num_stages - 1:
        crossed += (1 + facts.num_sweeps) * [facts.boundaries[stage].bytes("forward", num_rows)]
    if stage > 0:
        crossed.append(facts.boundaries[stage - 1].bytes("backward", num_rows))
    num_bytes, messages = sum(crossed), len(crossed) * num_chunks
    if between is not None:
        # Rows that others read leave, in sweeps too; gradients of those that are read here go back.
        leaving = [count for chunk in between.chunks[way] for count in between.num_read[chunk]]
        leaving *= 1 + facts.num_sweeps
        leaving += [counts[way] for counts in between.num_read]
        here = [each for each in between.row_bytes[facts.bounds[stage] : facts.bounds[stage + 1]] if each]
        num_bytes += sum(leaving) * sum(here)
        messages += sum(count > 0 for count in leaving) * len(here)
    hidden = Cost({"hidden": num_bytes}, {"hidden": messages}) if num_bytes else Cost()
    return hidden + _account_weights(facts.layout, rank, facts.value_bytes, facts.num_shared, between)


def estimate_bubble(facts: Facts) -> float:
    """Share of an epoch in which stages stand idle, if tasks are equal."""
    return bubble(facts.layout.num_stages, -(-facts.num_chunks // facts.layout.num_ways))


@dataclass(frozen=True)
class Volume:
    """Bytes an epoch of all ranks together."""

    boundaries: float = 0.0  # between stages
    halo: float = 0.0  # between parts
    weights: float = 0.0  # gradients, summed in a ring

    @property
    def total(self) -> float:
        return self.boundaries + self.halo + self.weights


def pipeline_volume(
    num_nodes: int,
    boundary_columns: Sequence[int],
    *,
    num_ways: int = 1,
    halo_share: float = 0.0,
    layer_columns: Sequence[int] = (),
    num_weights: int = 0,
    value_bytes: int = 4,
) -> Volume:
    """Of a pipeline, or of a hybrid: then ``halo_share`` is R(D), and ``layer_columns`` are those every layer exchanges."""
    rows = 2 * value_bytes * num_nodes
    return Volume(
        rows * sum(boundary_columns),
        rows * halo_share * sum(layer_columns) if num_ways > 1 else 0.0,
        2 * (num_ways - 1) * value_bytes * num_weights,
    )


def graph_parallel_volume(
    num_nodes: int,
    layer_columns: Sequence[int],
    halo_share: float,
    num_parts: int,
    num_weights: int,
    value_bytes: int = 4,
) -> Volume:
    """Of plain ``halo`` as published: ``halo_share`` is R(P), every layer's rows cross both ways."""
    halo = 2 * value_bytes * num_nodes * halo_share * sum(layer_columns)
    return Volume(halo=halo, weights=2 * (num_parts - 1) * value_bytes * num_weights)


def volume_ratio(layer_columns: Sequence[int], halo_share: float, boundary_columns: Sequence[int]) -> float:
    """How many times as many row bytes graph parallelism sends as the pipeline: R(P) sum_l H_l / sum_s C_s."""
    return halo_share * sum(layer_columns) / sum(boundary_columns)


def break_even_depth(columns: int, halo_share: float, boundary_columns: Sequence[int]) -> float:
    """Layers of so many columns from which on the pipeline sends less."""
    return sum(boundary_columns) / (halo_share * columns)


def memory_bytes(
    num_nodes: int,
    columns: Sequence[int],
    *,
    period: int = 1,
    saved: float = 1.0,
    value_bytes: int = 4,
    num_edges: int = 0,
    index_bytes: int = 4,
    input_columns: int = 0,
) -> int:
    """What a stage holds at most. ``columns[l]``: of the rows that its layer l reads from other chunks (0: none).

    ``saved``: rows of that width kept for the backward pass; ``period``: T. Edges count both ways, forward and transposed;
    the transposed ones also say where each edge was.
    """
    tables = sum(columns) * (1 + (period > 1) + 1 + saved)
    structure = num_edges * 3 * index_bytes + 2 * 8 * (num_nodes + 1) if num_edges else 0
    return int(value_bytes * num_nodes * (tables + input_columns) + structure)
