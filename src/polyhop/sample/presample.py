"""Pre-sampling: what a training would touch, counted over mini-batches that its sampler draws before it starts.

After K mini-batches, counts over K are unbiased estimates of what one costs: in-edges drawn at a node (the work of its
owner), draws of an edge (rows that may cross it), times that a node is an input (rows loaded). The mini-batches are drawn as
those of training are, under other keys: none of them comes again.

Legend: N nodes, E edges, L layers, K mini-batches, B seeds, S sources.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polyhop.errors import ConfigError, InputError, unknown
from polyhop.graph.graph import Graph
from polyhop.kernels import Key, Purpose, fold, random_u32
from polyhop.kernels.sample import METHODS, Sampled, Sampler, check_fanouts
from polyhop.sample.ahead import ahead

__all__ = ["Counts", "Trial", "presample"]

_PREFETCH = 2
_DRAWN = 8  # what a draw of an edge weighs beside an edge that was never drawn


@dataclass(frozen=True, eq=False)
class Trial:
    """The global mini-batches of a training that is not run: a pure function of (graph, arguments).

    ``num_neighbors``: fan-outs from the seeds outward, -1 = all. ``site`` tells apart draws that must be independent: those
    that a partition is fitted to from those that it is judged by.
    """

    graph: Graph
    num_neighbors: Sequence[int]
    batch_size: int = 1024
    sampler: str = "uniform"
    seed: int = 0
    site: int = 0
    _train: Tensor = field(init=False, repr=False)
    _idle: deque[Sampler] = field(init=False, repr=False, default_factory=deque)

    def __post_init__(self) -> None:
        check_fanouts(self.num_neighbors)
        if self.sampler not in METHODS:
            raise ConfigError(unknown("sampling method", self.sampler, METHODS))
        if type(self.batch_size) is not int or self.batch_size < 1:
            raise ConfigError(f"batch_size = {self.batch_size!r}: expected a whole number of at least 1")
        object.__setattr__(self, "_train", _labelled_train(self.graph))

    def __len__(self) -> int:
        """Mini-batches of an epoch."""
        return -(-self._train.numel() // self.batch_size)

    @property
    def key_seed(self) -> int:
        """What stands for the seed of the run in the keys of these draws."""
        return fold(self.seed, Purpose.PARTITION, self.site)

    def seeds(self, epoch: int) -> tuple[Tensor, ...]:
        """int64 [B] for each step: the training nodes, shuffled and cut as training does it."""
        words = random_u32(Key(self.key_seed, epoch).at(Purpose.SHUFFLE), self._train)
        order = torch.sort(words[:, 0] << 31 | words[:, 1] >> 1, stable=True).indices
        return torch.split(self._train[order], self.batch_size)

    def sample(self, seeds: Tensor, epoch: int, step: int) -> Sampled:
        """One mini-batch with the position of every edge; the draws of ``NeighbourSampler`` with ``seed=key_seed``."""
        key = Key(self.key_seed, epoch, step)
        keys = [key.at(Purpose.SAMPLE, hop) for hop in range(len(self.num_neighbors))]
        try:
            sampler = self._idle.pop()
        except IndexError:
            sampler = Sampler(self.graph.indptr, self.graph.indices, keep_edges=True)
        drawn = sampler.sample(seeds, self.num_neighbors, keys, method=self.sampler)
        self._idle.append(sampler)
        return drawn

    def batches(self, num_batches: int) -> Iterator[Sampled]:
        """The first so many, over as many epochs as they fill, drawn one ahead of the consumer."""
        for first in range(0, num_batches, len(self)):
            epoch = first // len(self)
            yield from self._epoch(epoch, min(len(self), num_batches - first))

    def _epoch(self, epoch: int, num_steps: int) -> Iterator[Sampled]:
        seeds = self.seeds(epoch)
        return ahead(lambda step: self.sample(seeds[step], epoch, step), range(num_steps), 1, _PREFETCH)


@dataclass(frozen=True, eq=False)
class Counts:
    """What was drawn in K mini-batches."""

    num_batches: int
    dst: Tensor  # int64 [N]: in-edges drawn at each node, over all layers
    edge: Tensor  # int64 [E]: draws of each edge, times the columns that cross at its layer
    inputs: Tensor  # int64 [N]: mini-batches whose first layer reads the node
    least: int = 1  # what one draw of an edge adds at least

    @property
    def load(self) -> Tensor:
        """int64 [N]: weights of nodes for a partition. Nodes that were never drawn weigh little, but not nothing."""
        return 1 + self.dst * max(1, round(self.edge.numel() / max(self.dst.numel(), 1)))

    def costs(self, *, keep_unsampled: bool = True) -> Tensor:
        """int64 [E]: weights of edges for a partition. Those that were never drawn weigh an eighth of a draw, as they may be
        yet, or 0: then they are left out, which takes less memory where few edges are ever drawn.
        """
        return self.edge * _DRAWN + self.least if keep_unsampled else self.edge


def presample(
    trial: Trial, *, epochs: int = 2, num_batches: int | None = None, columns: Sequence[int] | None = None
) -> Counts:
    """Counts over ``epochs`` epochs, or ``num_batches`` mini-batches. Takes 8 bytes an edge and 16 a node.

    ``columns`` (one a layer, input layer first; None: 1 each) is what an edge's row costs at each layer: F for features,
    2 H for hidden rows, whose gradients return.
    """
    num_batches = epochs * len(trial) if num_batches is None else num_batches
    if num_batches < 1:
        raise ConfigError(f"{num_batches} mini-batches to sample: expected at least 1")
    costs = _costs(columns, len(trial.num_neighbors))
    nodes, edges = trial.graph.num_nodes, trial.graph.num_edges
    dst, edge, inputs = (torch.zeros(n, dtype=torch.int64) for n in (nodes, edges, nodes))
    for drawn in trial.batches(num_batches):
        inputs[drawn.src_ids] += 1  # ids, and positions within a layer, are distinct: no two additions meet
        for layer, cost in zip(drawn.layers, costs, strict=True):
            assert layer.edge is not None
            lengths = layer.indptr.diff()
            dst[drawn.src_ids[: lengths.numel()]] += lengths
            edge[layer.edge] += cost
    return Counts(num_batches, dst, edge, inputs, min(costs))


def _costs(columns: Sequence[int] | None, num_layers: int) -> list[int]:
    """Of each hop, from the seeds outward."""
    if columns is None:
        return [1] * num_layers
    if len(columns) != num_layers or any(type(each) is not int or each < 1 for each in columns):
        raise ConfigError(
            f"columns = {list(columns)}: expected {num_layers} whole numbers of at least 1, one a layer, input layer first"
        )
    return list(reversed(columns))


def _labelled_train(graph: Graph) -> Tensor:
    """int64, ascending: what training takes its seeds from."""
    if graph.split is None or graph.split.train.numel() == 0:
        raise InputError(
            f"the graph {graph.name!r} has no train set: pre-sampling follows the mini-batches of training; give train nodes"
        )
    train = graph.split.train
    if graph.y is not None and graph.y.dim() == 1 and not graph.y.is_floating_point():
        train = train[graph.y[train] >= 0]
    if train.numel() == 0:
        raise InputError(
            f"the graph {graph.name!r} has no labelled train nodes: there is nothing to sample from"
        )
    return train
