"""What ranks see of a graph before they train on it, told to one another: sizes of parts, rows that would cross, what
mini-batches would move. The same on all of them, who look together: ranks that are there, or as many threads.

    cut      rows and edges of every part, rows read between every two
    layers   of a full graph: edges that each layer sums and rows that it brings, as strategy ``halo`` would lay them out
    flows    of mini-batches: what one moves (``strategies/flows``), and how often rows come back (``macro_auto``)

Legend: P ranks, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from polyhop.comm import Collective, run_in_threads
from polyhop.comm.collective import is_summed_everywhere
from polyhop.exchange import bucket_sizes, lay_out, layer_edges
from polyhop.exchange.pool import pool_row_bytes
from polyhop.forecast.training import Training
from polyhop.graph import Graph, GraphFacts, Part, SharedGraph
from polyhop.partition import Partition
from polyhop.partition.cut import cut as cut_out
from polyhop.strategies import macro_plan
from polyhop.strategies.data_cost import account_gradients
from polyhop.strategies.flows import Flows, gather_flows_of
from polyhop.strategies.halo import Config
from polyhop.strategies.halo_plan import Plan
from polyhop.strategies.macro_auto import gather_facts
from polyhop.strategies.part_step import included

__all__ = [
    "POOL_BYTES",
    "Cut",
    "InputRows",
    "LayerCut",
    "Sight",
    "caches_to_compare",
    "labelled",
    "look",
    "look_at",
]

POOL_BYTES = 2 << 30  # of windows, unless the user says otherwise
_CACHED = (1 / 16, 1 / 4)  # of the rows of others
_SPREAD = 0.5  # rows that parts read of one another grow with about this power of their number
# Parts made for half the number read so much of what parts joined two and two read (METIS, 9 graphs: 0.79 to 0.98).
_CUT_ANEW = 0.9


@dataclass(frozen=True, eq=False)
class Cut:
    """Float64, of each part."""

    nodes: Tensor  # [P]
    edges: Tensor  # [P]: in-edges of own nodes
    marginal_nodes: Tensor  # [P]: own nodes that read another part
    marginal_edges: Tensor  # [P]: in-edges of those
    halo: Tensor  # [P, P]: rows of part i that part j reads
    known: Callable[[int], float] | None = (
        None  # ``replicas`` of other numbers of parts; None: foreseen from these
    )

    @property
    def num_parts(self) -> int:
        return self.nodes.numel()

    @property
    def replicas(self) -> float:
        """Rows that parts read of one another, per node."""
        return float(self.halo.sum() / self.nodes.sum().clamp(min=1))

    def replicas_of(self, num_parts: int) -> float:
        """The same if there were so many parts."""
        if self.known is not None:
            return self.known(num_parts)
        if num_parts < self.num_parts:
            return self._replicas_joined(num_parts) * math.pow(
                _CUT_ANEW, math.log2(self.num_parts / num_parts)
            )
        by_power = self.replicas * float((num_parts / self.num_parts) ** _SPREAD)
        if num_parts == self.num_parts or self.num_parts == 1:
            return by_power
        most = float(self.edges.sum() / self.nodes.sum().clamp(min=1))  # a row for every edge
        return min(
            most, math.sqrt(by_power * self._replicas_by_chance(num_parts))
        )  # graphs lie between the two

    def _replicas_joined(self, num_groups: int) -> float:
        """Of groups of parts that follow each other, which lie together; what two parts of a group read falls by chance."""
        group = torch.arange(self.num_parts) * num_groups // self.num_parts
        unread = 1 - (self.halo / self.nodes.clamp(min=1)[:, None]).clamp(max=1)
        groups = range(num_groups)
        read = torch.stack([1 - unread[:, group == at].prod(1) for at in groups], 1)  # [P, groups]
        read[torch.arange(self.num_parts), group] = 0
        return float((self.nodes[:, None] * read).sum() / self.nodes.sum().clamp(min=1))

    def _replicas_by_chance(self, num_pieces: int) -> float:
        """Of parts cut smaller, if the edges of a node fell on pieces by chance: where most rows are read by every piece,
        pieces hardly read fewer for being smaller.
        """
        num_nodes, parts = float(self.nodes.sum()), self.num_parts
        others, own = num_nodes * (1 - 1 / parts), num_nodes / parts
        read = min(self.replicas * own / max(others, 1.0), 1 - 1e-9)
        edges = -math.log1p(-read)  # from a part to each node of others
        inside = max(0.0, float(self.edges.sum()) / parts - edges * others) / max(own, 1.0)
        share = parts / num_pieces
        far = others * -math.expm1(-edges * share)
        near = own * (1 - share) * -math.expm1(-inside * share)
        return num_pieces * (far + near) / max(num_nodes, 1.0)


@dataclass(frozen=True, eq=False)
class LayerCut:
    """One layer on the full graph: float64."""

    edges: Tensor  # [P]: that it sums, of central rows
    marginal_edges: Tensor  # [P]: of others, those of sums that leave with them
    rows: Tensor  # [P, P]: that rank i sends to rank j, sums included


@dataclass(frozen=True, eq=False)
class InputRows:
    """How likely a step reads a node's input row: float64, of cells of nodes that are alike."""

    nodes: Tensor  # [M]: of the whole graph
    own: Tensor  # [M]: a rank's own mini-batch, of the rank's nodes
    others: Tensor  # [M]: of others' nodes
    shared: Tensor  # [M]: the shared mini-batch


@dataclass(frozen=True, eq=False)
class Sight:
    """All of it."""

    cut: Cut
    layers: Sequence[LayerCut] = ()  # of a full graph, input layer first
    flows: Flows | None = None  # of mini-batches
    windows: macro_plan.Facts | None = None
    cached: Mapping[int, Flows] = field(
        default_factory=dict
    )  # with caches that nobody asked for: bytes -> flows
    is_alike: bool = False  # all parts are: what holds for one rank holds for all
    inputs: InputRows | None = None  # of mini-batches, where parts are alike
    busiest: float = 1.0  # of parts that are alike: rows that the busiest would move over the mean


def labelled(graph: Graph | SharedGraph) -> Tensor:
    """int64: labelled train nodes; of a rank's share its own, by local row."""
    split, y = graph.split, graph.y
    if split is None or y is None:
        return torch.empty(0, dtype=torch.int64)
    return split.train if y.dim() == 2 else split.train[y[split.train] >= 0]


def look_at(graph: Graph, partition: Partition, training: Training) -> Sight:
    """Of a graph that is in memory, by as many threads as there are parts. Features are not looked at."""
    graph = replace(graph, x=None)
    found: list[Sight] = run_in_threads(partition.num_parts, _look_at, graph, partition, training)
    return found[0]


def _look_at(line: Collective, graph: Graph, partition: Partition, training: Training) -> Sight:
    facts = GraphFacts(
        graph.name,
        graph.num_nodes,
        graph.num_edges,
        training.inputs.num_features,
        graph.num_classes,
        graph.metric,
        {},
    )
    return look(line, SharedGraph(cut_out(graph, partition, line.rank), facts), training)


def look(line: Collective, graph: SharedGraph, training: Training) -> Sight:
    """All ranks call it together."""
    part = graph.stored("a forecast")
    cut, train_ids = _cut(part, line), labelled(graph)
    if training.num_neighbors is None:
        return Sight(cut, _layers(part, train_ids, training, line))
    caches = [training.cache_bytes, *caches_to_compare(training, line.num_ranks)]
    flows, *others = gather_flows_of(graph, train_ids, training.chance, training.num_neighbors, line, caches)
    windows = None if line.num_ranks == 1 else _windows(graph, train_ids, training, line)
    return Sight(cut, (), flows, windows, dict(zip(caches[1:], others, strict=True)))


def caches_to_compare(training: Training, num_ranks: int) -> list[int]:
    """Bytes of some, where the user leaves it open: of shares of the rows of others, dense ones."""
    inputs = training.inputs
    if training.cache_bytes or num_ranks == 1 or inputs.row_length is not None or inputs.are_computed:
        return []
    others = training.num_nodes * (1 - 1 / num_ranks)
    return [round(share * others) * (8 + 4 * inputs.num_features) for share in _CACHED]


def _cut(part: Part, line: Collective) -> Cut:
    ranks, n = line.num_ranks, part.num_nodes
    degree = part.indptr.diff()
    at = torch.repeat_interleave(torch.arange(n), degree)
    is_marginal = torch.zeros(n, dtype=torch.bool)
    is_marginal[at[part.indices >= n]] = True
    read = torch.searchsorted(part.halo, part.bounds).diff()
    own = torch.cat(
        [
            torch.tensor([n, part.indices.numel(), int(is_marginal.sum()), int(degree[is_marginal].sum())]),
            read,
        ]
    ).double()
    told = torch.stack(line.all_gather(own, kind="sizes", counts=[4 + ranks] * ranks))
    return Cut(told[:, 0], told[:, 1], told[:, 2], told[:, 3], told[:, 4:].T.contiguous())


def _layers(part: Part, train_ids: Tensor, training: Training, line: Collective) -> list[LayerCut]:
    layout = lay_out(part)
    plan = Plan.of(training.model, Config(), training.graph_sizes)
    read = plan.read(layout.place[train_ids], layout.num_own)
    found = []
    for layer in layer_edges(layout, part, line, read, plan.sums):
        central = int(layer.block.indptr[layout.num_central])
        summed = 0 if layer.sums is None else layer.sums.indices.numel()
        own = [central, layer.block.num_edges - central + summed, *layer.lists.leaving("forward")]
        told = torch.stack(
            line.all_gather(torch.tensor(own).double(), kind="sizes", counts=[len(own)] * line.num_ranks)
        )
        found.append(LayerCut(told[:, 0], told[:, 1], told[:, 2:]))
    return found


def _windows(graph: SharedGraph, train_ids: Tensor, training: Training, line: Collective) -> macro_plan.Facts:
    fan_outs, inputs = training.num_neighbors, training.inputs
    assert fan_outs is not None, "mini-batches have fan-outs"
    part = graph.stored("a forecast")
    start = torch.zeros(part.num_nodes, line.num_ranks, dtype=torch.float64)
    start[train_ids, line.rank] = training.chance
    sizes = bucket_sizes(training.weights)
    width = inputs.num_features if inputs.row_length is None else 2 * round(inputs.row_length) + 2
    return gather_facts(
        included(part, start, fan_outs, line),
        graph,
        fan_outs,
        training.layout,
        line,
        has_own=not inputs.are_read_in_place,
        num_pinned=0,
        num_steps=training.num_steps,
        num_epochs=training.num_epochs,
        pool_row_bytes=pool_row_bytes(training.layout, width, 4),
        gradient_bytes=account_gradients(sizes, training.value_bytes, line.num_ranks, rank=0).total_bytes,
        gradient_rounds=1 if is_summed_everywhere(max(sizes) * training.value_bytes, line.num_ranks) else 2,
        memory_bytes=training.pool_bytes or POOL_BYTES,
        is_delta=True,
        is_overlapped=training.prefetch > 0,
    )
