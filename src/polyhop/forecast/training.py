"""What is to be trained: sizes of the graph, what its input rows are like, the model, and the options of the run.

Feature rows are never read for a forecast: ``Inputs`` says what they are like.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from polyhop.exchange.codec import RowCodec
from polyhop.exchange.features import FactFormat, RowFormat
from polyhop.nn.counts import ModelCounts, count_model
from polyhop.strategies.halo_plan import GraphSizes

__all__ = ["Inputs", "Training"]

_WIDE_NODES = 1 << 31


@dataclass(frozen=True)
class Inputs:
    """Feature rows, unread."""

    num_features: int
    dtype: torch.dtype = torch.float32  # as stored
    row_length: float | None = None  # values of a sparse row, on average; None: dense
    has_scale: bool = False  # stored values are multiplied when they are read
    are_computed: bool = False  # when they are read, and edges too: nothing of them is held

    @property
    def row_bytes(self) -> float:
        """As stored."""
        if self.row_length is not None:
            return 8 + 8 * self.row_length
        return self.num_features * self.dtype.itemsize

    @property
    def are_read_in_place(self) -> bool:
        """Whether steps read own rows where they lie."""
        is_as_read = self.dtype in (torch.float32, torch.float64) and not self.has_scale
        return self.row_length is None and is_as_read and not self.are_computed


@dataclass(frozen=True, eq=False)
class Training:
    """One model on one graph."""

    model: nn.Module
    inputs: Inputs
    num_nodes: int
    num_edges: int
    num_train: int
    num_neighbors: Sequence[int] | None = None  # None: full graph
    batch_size: int = 1024
    feature_dtype: str = "auto"
    num_epochs: int = 100
    prefetch: int = 2
    cache_bytes: int = 0
    pool_bytes: float | None = None  # memory of windows; None: as the trainer has it
    has_weights: bool = False  # edges have
    has_loops: bool = False
    loads_whole: bool = (
        True  # every rank loads the graph and cuts its part out; False: parts come from a folder
    )
    device_cache_bytes: int = 0  # of own input rows that ranks of ``split`` keep where they compute

    @property
    def num_steps(self) -> int:
        return 1 if self.num_neighbors is None else max(1, -(-self.num_train // self.batch_size))

    @property
    def num_batches(self) -> float:
        """Full mini-batches that an epoch amounts to: the last one may be smaller."""
        return 1.0 if self.num_neighbors is None else self.num_train / self.num_seeds

    @property
    def num_seeds(self) -> int:
        """Of a full mini-batch, all ranks together."""
        return max(1, min(self.batch_size, self.num_train))

    @property
    def chance(self) -> float:
        """Of a train node to be a seed of a step."""
        return min(1.0, self.batch_size / max(1, self.num_train))

    @cached_property
    def counts(self) -> ModelCounts:
        return count_model(self.model, self.inputs.num_features, self.inputs.row_length)

    @cached_property
    def layout(self) -> RowFormat:
        """Of input rows on their way between ranks."""
        codec = None
        if self.inputs.row_length is None:
            codec = RowCodec.of(self.feature_dtype, self.inputs.num_features, self.inputs.dtype)
        ids = torch.int64 if self.num_nodes >= _WIDE_NODES else torch.int32
        return RowFormat(codec, FactFormat(ids, self.has_weights, self.has_loops))

    @property
    def graph_sizes(self) -> GraphSizes:
        is_sparse = self.inputs.row_length is not None
        return GraphSizes(self.num_nodes, self.num_edges, self.inputs.num_features, is_sparse)

    @property
    def weights(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.weights)

    @property
    def value_bytes(self) -> int:
        return self.weights[0].element_size()
