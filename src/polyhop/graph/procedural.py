"""Procedural graphs: parts, features and labels of a graph that nobody stores, for runs far larger than memory and disk.

What a rank asks of its part is computed when it asks (``kernels/procedural.py``), so 10^9 nodes and a terabyte of feature
rows take no memory but that of mini-batches. Made to prove 64-bit ids, windows and memory bounds. It is synthetic, and says
nothing on reading and writing: no row was ever read from anywhere. A part is a contiguous range of ids, new ids are the
user's ids, and nothing here has the size of the graph or of a part.

Legend: N nodes, n own nodes, P parts, F features, C classes, T train nodes, k rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import torch
from torch import Tensor

from polyhop.errors import ConfigError, UnsupportedError
from polyhop.graph.features import DenseFeatures
from polyhop.graph.graph import Graph, Split
from polyhop.graph.part import GraphFacts, SharedGraph
from polyhop.kernels import random_u32
from polyhop.kernels.procedural import Virtual, virtual_degrees, virtual_draw, virtual_rows

__all__ = [
    "ProceduralFeatures",
    "ProceduralLabels",
    "ProceduralPart",
    "materialise",
    "procedural_share",
    "train_ids",
]

_TRAIN = 24  # site of the key that chooses train nodes
_MOST_TRAIN = 1 << 31
_MOST_MATERIALISED = 1 << 32  # bytes of features


@dataclass(frozen=True, eq=False)
class ProceduralFeatures:
    """Rows of nodes start .. start + num_rows - 1, float32, computed by ``gather``."""

    graph: Virtual
    start: int
    num_rows: int

    @property
    def num_features(self) -> int:
        return self.graph.num_features

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def scale(self) -> Tensor | None:
        return None

    def gather(self, ids: Tensor) -> Tensor:
        """float32 [k, F] of local rows (int64 [k])."""
        return virtual_rows(self.graph, ids + self.start)

    def stored(self, ids: Tensor) -> Tensor:
        return self.gather(ids)

    def all(self) -> Tensor:
        raise UnsupportedError(
            f"procedural features: all {self.num_rows:,} rows would take {4 * self.num_rows * self.num_features:,} bytes; "
            "they are computed when read, some at a time"
        )


@dataclass(frozen=True, eq=False)
class ProceduralLabels:
    """Classes of nodes start .. start + num_rows - 1, computed when indexed: id mod C."""

    num_classes: int
    start: int
    num_rows: int

    def __getitem__(self, rows: Tensor) -> Tensor:
        """int64 [k] of local rows (int64 [k])."""
        return (rows + self.start) % self.num_classes

    def dim(self) -> int:
        return 1

    @property
    def shape(self) -> torch.Size:
        return torch.Size([self.num_rows])


@dataclass(frozen=True, eq=False)
class ProceduralPart:
    """One of P equal ranges of a virtual graph's ids; an ``AnyPart`` that holds nothing but the ids of its train nodes."""

    graph: Virtual
    num_train: int  # T, of all parts
    index: int
    num_parts: int

    def __post_init__(self) -> None:
        if not 0 <= self.num_train <= min(self.graph.num_nodes, _MOST_TRAIN):
            raise ConfigError(
                f"procedural graph: {self.num_train:,} train nodes of {self.graph.num_nodes:,} nodes, expected at most "
                f"all of them and {_MOST_TRAIN:,}"
            )

    @cached_property
    def bounds(self) -> Tensor:
        """int64 [P + 1]."""
        return torch.tensor([p * self.graph.num_nodes // self.num_parts for p in range(self.num_parts + 1)])

    @property
    def start(self) -> int:
        return int(self.bounds[self.index])

    @property
    def num_nodes(self) -> int:
        return int(self.bounds[self.index + 1]) - self.start

    @property
    def x(self) -> ProceduralFeatures:
        return ProceduralFeatures(self.graph, self.start, self.num_nodes)

    @property
    def y(self) -> ProceduralLabels:
        return ProceduralLabels(self.graph.num_classes, self.start, self.num_nodes)

    @cached_property
    def split(self) -> Split:
        """Local rows of the own train nodes; there are no others."""
        train = train_ids(self.graph, self.num_train, self.start, self.start + self.num_nodes)
        return Split(train - self.start, train[:0], train[:0])

    @property
    def edge_weight(self) -> None:
        return None

    @property
    def in_weight(self) -> None:
        return None

    @property
    def loop_weight(self) -> None:
        return None

    def drawn(
        self,
        rows: Tensor,
        fanout: int,
        key: int | Sequence[int],
        method: str,
        cuts: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor, None]:
        """(counts int64 [k], neighbours int64 [E]): what own rows (int64 [k]) draw; several keys as in AnyPart."""
        keys = [key] if isinstance(key, int) else key
        ids = torch.tensor_split(rows + self.start, [] if cuts is None else cuts[1:-1])
        drawn = [
            virtual_draw(self.graph, some, fanout, each, method=method)
            for each, some in zip(keys, ids, strict=True)
        ]
        counts, neighbours = zip(*((ends.diff(), found) for ends, found in drawn), strict=True)
        return torch.cat(counts), torch.cat(neighbours), None

    def facts_of(self, rows: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """(ids int64 [k], in-degrees int32 [k]) of own rows (int64 [k])."""
        ids = rows + self.start
        return ids, virtual_degrees(self.graph, ids), None, None


def train_ids(graph: Virtual, count: int, start: int, stop: int) -> Tensor:
    """int64, ascending: which of ids start .. stop - 1 are train nodes: one in each of ``count`` equal ranges of all ids."""
    if count == 0:
        return torch.empty(0, dtype=torch.int64)
    width, rest = divmod(graph.num_nodes, count)
    first, last = start * count // graph.num_nodes, min(count, stop * count // graph.num_nodes + 1)
    ranges = torch.arange(max(0, first - 1), last + 1)
    begin = ranges * width + ranges * rest // count
    words = random_u32(graph.key(_TRAIN), ranges[:-1])
    ids = begin[:-1] + (words[:, 0] << 31 | words[:, 1] >> 1) % begin.diff()
    return ids[(ids >= start) & (ids < stop)]


def procedural_share(
    graph: Virtual, num_train: int, rank: int, num_ranks: int, *, name: str = "procedural"
) -> SharedGraph:
    """The share of one rank: made there, with nobody's help and nothing on disk."""
    feature_bytes = 4 * graph.num_nodes * graph.num_features
    facts = GraphFacts(
        name,
        graph.num_nodes,
        graph.num_edges,
        graph.num_features,
        graph.num_classes,
        fingerprint={"kind": "procedural", **asdict(graph), "num_train": num_train},
        note=f"procedural: {graph.num_nodes:,} nodes, {_size(feature_bytes)} of virtual features, computed when read; edges "
        "as expected, not counted; synthetic, says nothing on I/O",
    )
    return SharedGraph(ProceduralPart(graph, num_train, rank, num_ranks), facts)


def materialise(graph: Virtual, num_train: int, *, name: str = "procedural") -> Graph:
    """The same graph with everything stored, to compare with; a small one."""
    if 4 * graph.num_nodes * graph.num_features > _MOST_MATERIALISED:
        raise ConfigError(
            f"a graph of {graph.num_nodes:,} nodes and {graph.num_features:,} features is not for storing: "
            f"{_size(4 * graph.num_nodes * graph.num_features)} of features"
        )
    ids = torch.arange(graph.num_nodes)
    indptr, indices = virtual_draw(graph, ids, -1, 0)
    train = train_ids(graph, num_train, 0, graph.num_nodes)
    return Graph(
        indptr,
        indices.to(torch.int32 if graph.num_nodes < 1 << 31 else torch.int64),
        DenseFeatures(virtual_rows(graph, ids)),
        ids % graph.num_classes,
        Split(train, train[:0], train[:0]),
        num_classes=graph.num_classes,
        name=name,
    )


def _size(num_bytes: int) -> str:
    """Such as 1.02 TB."""
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes:,} bytes"
