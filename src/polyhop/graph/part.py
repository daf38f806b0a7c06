"""Part: what one rank holds of a partitioned graph: its nodes, their in-edges, and who the sources elsewhere are.

Nodes have new ids here: a part owns the contiguous range bounds[p] .. bounds[p + 1] - 1. The sources of its edges are rows
of one list, own nodes first and the halo behind, so ``block`` is a Block like any other. Keys and people get the user's ids.

Legend: n own nodes, H halo nodes, S = n + H sources, E edges of the part, P parts, F features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from polyhop.errors import PartitionError, UnsupportedError
from polyhop.graph.block import Block
from polyhop.graph.features import FeatureStore
from polyhop.graph.graph import Split
from polyhop.kernels import draw

__all__ = ["AnyPart", "GraphFacts", "Labels", "Part", "SharedGraph"]


class Labels(Protocol):
    """Labels by local row: a tensor, or what computes them."""

    def __getitem__(self, rows: Tensor) -> Tensor: ...

    def dim(self) -> int: ...

    @property
    def shape(self) -> torch.Size: ...


class AnyPart(Protocol):
    """What sampling, fetching and training need of a part, whether its contents are stored or computed."""

    @property
    def index(self) -> int: ...

    @property
    def bounds(self) -> Tensor:
        """int64 [P + 1], new ids."""
        ...

    @property
    def num_parts(self) -> int: ...

    @property
    def start(self) -> int:
        """New id of the first own node."""
        ...

    @property
    def num_nodes(self) -> int: ...

    @property
    def x(self) -> FeatureStore | None: ...

    @property
    def y(self) -> Labels | None: ...

    @property
    def split(self) -> Split | None: ...

    @property
    def edge_weight(self) -> Tensor | None: ...

    @property
    def in_weight(self) -> Tensor | None: ...

    @property
    def loop_weight(self) -> Tensor | None: ...

    def drawn(
        self,
        rows: Tensor,
        fanout: int,
        key: int | Sequence[int],
        method: str,
        cuts: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(counts int64 [k], neighbours int64 [E] by new id, weights float32 [E] or None): what own rows draw.

        With several keys, rows cuts[m] .. cuts[m + 1] - 1 draw under key[m].
        """
        ...

    def facts_of(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """(the user's id int64 [k], in-degree int32 [k], in-weight float64 [k], loop weight float32 [k]) of own rows."""
        ...


@dataclass(frozen=True, eq=False)
class Part:
    """One part of a graph. Feature rows, labels and splits are those of its own nodes, by local row 0 .. n - 1."""

    index: int
    bounds: Tensor  # int64 [P + 1], new ids
    indptr: Tensor  # int64 [n + 1]
    indices: Tensor  # int32 [E]: source row of each edge, in the user's order within a destination
    halo: Tensor  # int64 [H]: new ids of the sources owned elsewhere, ascending
    src_ids: Tensor  # int64 [S]: the user's ids
    in_degree: Tensor  # int32 [S]: in the whole graph
    out_degree: Tensor  # int32 [S]: in the whole graph
    x: FeatureStore | None = None  # [n, F]
    y: Tensor | None = None  # [n] or [n, C]
    split: Split | None = None  # local rows
    edge_weight: Tensor | None = None  # float32 [E]
    in_weight: Tensor | None = None  # float64 [S]: sum of in-edge weights in the whole graph
    loop_weight: Tensor | None = None  # float32 [S]: None = the whole graph has no loops

    def __post_init__(self) -> None:
        n, sources = self.num_nodes, self.num_nodes + self.halo.numel()
        wrong = [
            f"{name} has {given.numel()} entries, expected {expected}"
            for name, given, expected in (
                ("indptr", self.indptr, n + 1),
                ("src_ids", self.src_ids, sources),
                ("in_degree", self.in_degree, sources),
                ("out_degree", self.out_degree, sources),
            )
            if given.numel() != expected
        ]
        if wrong:
            raise PartitionError(
                f"part {self.index} with {n} nodes and {sources - n} in its halo: {'; '.join(wrong)}"
            )

    @property
    def num_parts(self) -> int:
        return self.bounds.numel() - 1

    @cached_property
    def start(self) -> int:
        """New id of the first own node."""
        return int(self.bounds[self.index])

    @cached_property
    def num_nodes(self) -> int:
        return int(self.bounds[self.index + 1]) - self.start

    @property
    def num_edges(self) -> int:
        return self.indices.numel()

    @property
    def user_ids(self) -> Tensor:
        """int64 [n]: the user's ids of the own nodes."""
        return self.src_ids[: self.num_nodes]

    def new_ids(self) -> Tensor:
        """int64 [S]: new ids of all sources, own nodes first."""
        return torch.cat([torch.arange(self.start, self.start + self.num_nodes), self.halo])

    @cached_property
    def _new_ids(self) -> Tensor:
        return self.new_ids()

    def drawn(
        self,
        rows: Tensor,
        fanout: int,
        key: int | Sequence[int],
        method: str,
        cuts: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """What own rows (int64 [k]) draw: see AnyPart."""
        counts, sources, weights = self.drawn_rows(rows, fanout, key, method, cuts)
        return counts, self._new_ids.index_select(0, sources), weights

    def drawn_rows(
        self,
        rows: Tensor,
        fanout: int,
        key: int | Sequence[int],
        method: str,
        cuts: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The same with source rows of this part, int32 [E], for ids: own nodes first, from n on the halo's."""
        ends, position = draw(
            self.indptr, self.indices, rows, fanout, key,
            ids=self.user_ids, source_ids=self.src_ids, method=method, cuts=cuts,
        )  # fmt: skip
        weights = None if self.edge_weight is None else self.edge_weight[position].to(torch.float32)
        return ends.diff(), self.indices.index_select(0, position), weights

    def facts_of(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """What is known of own rows (int64 [k]) besides features: see AnyPart."""
        n, in_weight, loops = self.num_nodes, self.in_weight, self.loop_weight
        return (
            self.src_ids[:n].index_select(0, rows),
            self.in_degree[:n].index_select(0, rows),
            None if in_weight is None else in_weight[:n].index_select(0, rows),
            None if loops is None else loops[:n].index_select(0, rows),
        )

    def owners(self, new_ids: Tensor) -> Tensor:
        """int64 [k]: the part that owns each of the new ids."""
        return torch.searchsorted(self.bounds[1:], new_ids, right=True)

    def block(self) -> Block:
        """All in-edges of the own nodes: one full layer of this part, to be given the rows of own nodes and halo."""
        return Block(
            self.indptr,
            self.indices,
            self.src_ids.numel(),
            src_ids=self.src_ids,
            edge_weight=self.edge_weight,
            in_degree=self.in_degree,
            in_weight=self.in_weight,
            out_degree=self.out_degree,
            loop_weight=self.loop_weight,
        )


@dataclass(frozen=True)
class GraphFacts:
    """What every rank knows of the whole graph."""

    name: str
    num_nodes: int
    num_edges: int
    num_features: int
    num_classes: int
    metric: str = "accuracy"
    fingerprint: Mapping[str, Any] = field(default_factory=dict)  # how a checkpoint recognises the graph
    note: str = ""  # what people must be told of it wherever it is shown


@dataclass(frozen=True, eq=False)
class SharedGraph:
    """A graph that several ranks hold together, as one of them sees it: the sizes of the whole, the contents of its part."""

    part: AnyPart
    facts: GraphFacts
    folder: Path | None = (
        None  # of the parts, where they came from one: what is made of them may be kept there
    )

    def stored(self, what: str) -> Part:
        """The part with its lists of edges; UnsupportedError, naming ``what`` needs them, where they are not stored."""
        if isinstance(self.part, Part):
            return self.part
        raise UnsupportedError(
            f"{what} needs the lists of all nodes of a part, and graph {self.name!r} stores none ({self.facts.note}): it "
            "can be trained on sampled mini-batches (strategies 'data' and 'macro'), nothing else"
        )

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def metric(self) -> str:
        return self.facts.metric

    @property
    def num_nodes(self) -> int:
        """Of the whole graph."""
        return self.facts.num_nodes

    @property
    def num_edges(self) -> int:
        """Of the whole graph."""
        return self.facts.num_edges

    @property
    def num_features(self) -> int:
        return self.facts.num_features

    @property
    def num_classes(self) -> int:
        return self.facts.num_classes

    @property
    def x(self) -> FeatureStore | None:
        """Of the own nodes."""
        return self.part.x

    @property
    def y(self) -> Labels | None:
        """Of the own nodes."""
        return self.part.y

    @property
    def split(self) -> Split | None:
        """Local rows of the own nodes."""
        return self.part.split

    @property
    def is_multilabel(self) -> bool:
        return self.part.y is not None and self.part.y.dim() == 2
