"""Splitting: owners for nodes such that ranks which share every mini-batch have even work and send few rows.

A partition is fitted to counts of pre-sampled mini-batches, and judged by fresh ones: by the sampled edges that join
two owners, by the work of the busiest rank, and by the rows that cross, beside those of owners drawn by lot.

Legend: N nodes, P ranks, L layers, K mini-batches, S sources, D destinations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyhop.errors import ConfigError, PartitionError, unknown
from polyhop.graph.graph import Graph
from polyhop.kernels.sample import Sampled
from polyhop.partition import Partition, default_method, partition
from polyhop.sample.presample import Counts, Trial, presample

__all__ = ["METHODS", "Presampled", "Redundancy", "SplitQuality", "judge", "presampled", "redundancy"]

METHODS = ("metis", "fennel")
_FIT, _JUDGE = 0, 1  # sites of the draws
_PASSES = 8  # of fennel: loads that differ much take longer to settle
_MOST_JUDGED = 64  # mini-batches; the standard error of a share of sampled edges is far below 0.01 by then


@dataclass(frozen=True)
class SplitQuality:
    """What a mini-batch costs where every node of it belongs to one rank: means over ``num_batches``.

    Balances are the busiest rank over the mean (1 = even). Layers are listed input layer first.
    """

    num_batches: int
    cut: float  # share of sampled edges whose ends have different owners
    load_balance: float  # of the sampled edges of each rank, over all mini-batches: of the expectation
    batch_balance: float  # mean over mini-batches of the same within one
    input_balance: float  # of the input nodes of each rank, over all mini-batches
    rows: tuple[float, ...]  # [L]: rows that ranks send to others before each layer
    chance_cut: float  # the same of owners drawn by lot, on the same mini-batches
    chance_rows: tuple[float, ...]
    num_idle: int  # ranks that own no sampled edge

    @property
    def row_share(self) -> float:
        """Rows sent in all layers, over those of owners drawn by lot."""
        return sum(self.rows) / sum(self.chance_rows) if sum(self.chance_rows) else 0.0

    def table(self) -> list[tuple[str, str]]:
        """For people: names and values, with what is normal; what is not is marked."""
        is_chance = self.cut > 0.9 * self.chance_cut and self.cut > 0
        who = "1 rank has" if self.num_idle == 1 else f"{self.num_idle} ranks have"
        idle = f"; {who} NOTHING to do" if self.num_idle else ""
        each = ", ".join(f"{rows:,.0f}" for rows in self.rows)
        return [
            (
                "fresh cut",
                f"{100 * self.cut:.1f} % of sampled edges join two owners (by lot: {100 * self.chance_cut:.1f} %; usual: "
                f"5 to 20 %{'; HIGH: no better than chance' if is_chance else ''}), over {self.num_batches} fresh "
                "mini-batches",
            ),
            (
                "fresh load",
                f"sampled edges {_marked(self.load_balance, 1.1)} over all, {_marked(self.batch_balance, 1.25)} within a "
                f"mini-batch, input rows {_marked(self.input_balance, 1.3)} (busiest rank over the mean; usual: up to 1.1, "
                f"1.25 and 1.3{idle})",
            ),
            (
                "fresh rows",
                f"{each} sent to other ranks a mini-batch, input layer first: {100 * self.row_share:.0f} % of those by lot",
            ),
        ]


@dataclass(frozen=True)
class Presampled:
    """A partition, what it was fitted to and what fresh mini-batches say of it."""

    partition: Partition
    counts: Counts
    quality: SplitQuality


def presampled(
    graph: Graph, num_parts: int, num_neighbors: Sequence[int], batch_size: int = 1024, *, epochs: int = 2,
    num_batches: int | None = None, method: str = "auto", sampler: str = "uniform", columns: Sequence[int] | None = None,
    keep_unsampled: bool = True, seed: int = 0, judged: int | None = None, **options: Any,
) -> Presampled:  # fmt: skip
    """Owners by a weighted minimum cut: nodes weigh their sampled in-edges, edges how often they were sampled.

    ``num_neighbors``, ``batch_size`` (of all ranks together) and ``sampler`` as in training; ``epochs`` or ``num_batches``
    of them are sampled. ``method``: metis, or fennel, which takes a few passes and little memory; auto as ``partition``.
    ``columns`` as in ``presample``: weigh edges by what crosses; ``keep_unsampled`` as in ``Counts.costs``. ``judged``:
    fresh mini-batches (None: an epoch, up to 64). ``options`` are the method's own (slack, passes). A pure function of its
    arguments.
    """
    method = default_method() if method == "auto" else method
    if method not in METHODS:
        raise ConfigError(
            f"a pre-sampled partition is cut by {' or '.join(METHODS)}: {unknown('method', method, METHODS)}"
        )
    trial = Trial(graph, num_neighbors, batch_size, sampler, seed, _FIT)
    counts = presample(trial, epochs=epochs, num_batches=num_batches, columns=columns)
    if method == "fennel":
        options = {"passes": _PASSES, **options}
    cost = counts.costs(keep_unsampled=keep_unsampled)
    made = partition(
        graph, num_parts, method, seed=seed, node_weight=counts.load, edge_weight=cost, **options
    )
    fresh = Trial(graph, num_neighbors, batch_size, sampler, seed, _JUDGE)
    return Presampled(made, counts, judge(fresh, made, judged))


def judge(trial: Trial, made: Partition, num_batches: int | None = None) -> SplitQuality:
    """What the trial's first ``num_batches`` mini-batches (None: an epoch, up to 64) cost with these owners."""
    if made.num_nodes != trial.graph.num_nodes:
        raise PartitionError(
            f"the partition is of {made.num_nodes} nodes, the graph {trial.graph.name!r} has {trial.graph.num_nodes}"
        )
    num_batches = min(len(trial), _MOST_JUDGED) if num_batches is None else num_batches
    if num_batches < 1:
        raise ConfigError(f"{num_batches} fresh mini-batches: expected at least 1")
    lot = partition(trial.graph, made.num_parts, "hash", seed=trial.key_seed)
    num_layers = len(trial.num_neighbors)
    ours, by_lot = (_Tally(one.owner, made.num_parts, num_layers) for one in (made, lot))
    for drawn in trial.batches(num_batches):
        ours.add(drawn)
        by_lot.add(drawn)
    return SplitQuality(
        num_batches=num_batches,
        cut=ours.cut,
        load_balance=_balance(ours.load),
        batch_balance=ours.batch_balance / num_batches,
        input_balance=_balance(ours.inputs),
        rows=tuple(count / num_batches for count in ours.rows),
        chance_cut=by_lot.cut,
        chance_rows=tuple(count / num_batches for count in by_lot.rows),
        num_idle=int((ours.load == 0).sum()),
    )


@dataclass(eq=False)
class _Tally:
    """Sums over mini-batches with given owners."""

    owner: Tensor  # int32 [N]
    num_parts: int
    num_layers: int
    num_edges: int = 0
    num_far: int = 0
    batch_balance: float = 0.0
    rows: list[int] = field(init=False)  # [L]
    load: Tensor = field(init=False)  # int64 [P]: sampled edges
    inputs: Tensor = field(init=False)  # int64 [P]

    def __post_init__(self) -> None:
        self.rows = [0] * self.num_layers
        self.load, self.inputs = (torch.zeros(self.num_parts, dtype=torch.int64) for _ in range(2))

    @property
    def cut(self) -> float:
        return self.num_far / self.num_edges if self.num_edges else 0.0

    def add(self, drawn: Sampled) -> None:
        owner = self.owner[drawn.src_ids].long()
        load = torch.zeros_like(self.load)
        for hop, layer in enumerate(drawn.layers):
            lengths = layer.indptr.diff()
            readers = owner[: lengths.numel()]
            load.index_add_(0, readers, lengths)
            reader, source = torch.repeat_interleave(readers, lengths), layer.indices.long()
            is_far = reader != owner[source]
            asked = torch.zeros(layer.num_src * self.num_parts, dtype=torch.bool)
            asked[(source * self.num_parts + reader)[is_far]] = (
                True  # a row crosses once to a rank, whoever reads it there
            )
            self.rows[self.num_layers - 1 - hop] += int(asked.sum())
            self.num_far += int(is_far.sum())
            self.num_edges += source.numel()
        self.load += load
        self.batch_balance += _balance(load)
        self.inputs += torch.bincount(owner, minlength=self.num_parts)


@dataclass(frozen=True)
class Redundancy:
    """What P ranks do that sample each its own seeds' neighbourhoods, over what is to do: 1 = nothing twice, P at most."""

    rows: float  # input rows loaded
    edges: float  # sampled edges of all layers


def redundancy(trial: Trial, num_ranks: int, num_batches: int) -> Redundancy:
    """Of data parallelism on the trial's first mini-batches, seeds cut evenly; ranks draw the same neighbours of a node."""
    if num_ranks < 1 or not 1 <= num_batches <= len(trial):
        raise ConfigError(
            f"{num_ranks} ranks, {num_batches} mini-batches: expected at least 1 rank, and 1 .. {len(trial)} mini-batches"
        )
    done, needed = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    for step, seeds in enumerate(trial.seeds(0)[:num_batches]):
        needed += _work(trial.sample(seeds, 0, step))
        for own in seeds.tensor_split(num_ranks):
            done += _work(trial.sample(own, 0, step))
    rows, edges = (done.double() / needed.clamp(min=1)).tolist()
    return Redundancy(rows, edges)


def _work(drawn: Sampled) -> Tensor:
    return torch.tensor([drawn.src_ids.numel(), sum(layer.indices.numel() for layer in drawn.layers)])


def _balance(counts: Tensor) -> float:
    mean = float(counts.double().mean())
    return float(counts.max()) / mean if mean > 0 else 1.0


def _marked(balance: float, usual: float) -> str:
    return f"{balance:.2f}" + (" HIGH" if balance > usual else "")
