"""What the bytes and the work of a step depend on besides the mini-batch: the model's layers, the graph's rows.

Found by running the model, as it will be trained, on no rows: once split, to see what would cross before each layer, and
once layer by layer, to see what it carries.

Legend: P ranks, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polyhop.errors import UnsupportedError
from polyhop.exchange import RowFormat, bucket_sizes
from polyhop.graph import AnyPart, Sizes, SparseFeatures
from polyhop.kernels import quantised_bytes
from polyhop.nn.counts import Counts, LayerCounts, Walked, walk
from polyhop.sample.wire import Wire
from polyhop.strategies import pushpull_cost
from polyhop.strategies.halo_cost import Seen, crossings
from polyhop.strategies.step import as_layered

__all__ = ["LayerShape", "Shape"]


@dataclass(frozen=True)
class LayerShape:
    """What bytes and work of a layer depend on, whatever the mini-batch."""

    columns: int  # that cross before it where it is split
    value_bytes: int
    returns: bool  # gradients of them do
    crosses_mapped: bool
    counts: LayerCounts
    maps_split: bool | None  # whether it maps before it sums where it is split; None: as where it is not
    state_bytes: int  # of what the model carries after it, a row
    state_values: int
    carries_gradient: bool

    def row_bytes(self, bits: int) -> int:
        return _row_bytes(self.columns, self.value_bytes, bits)

    def joint_bytes(self, bits: int) -> int:
        return self.state_bytes if bits == 32 else _row_bytes(self.state_values, 4, bits)

    def computed(self, sizes: Sizes, mapped: float | None = None) -> Counts:
        """Forward and backward. ``mapped``: rows that are, where the layer is split."""
        return self.counts.of(sizes, mapped, None if mapped is None else self.maps_split)


def _row_bytes(columns: int, value_bytes: int, bits: int) -> int:
    if bits == 32:
        return columns * value_bytes
    return quantised_bytes(torch.tensor([bits], dtype=torch.uint8), columns)


@dataclass(frozen=True)
class Shape:
    """What bytes and work depend on besides the mini-batch: the model, the graph's rows, the ranks."""

    layers: Sequence[LayerShape]  # input layer first
    num_neighbors: Sequence[int]
    wire: Wire
    row_bytes: float  # of an input row and its facts in a reply
    is_dense: bool  # replies have a length that is known
    fact_bytes: int
    input_bytes: float  # of an input row as it is computed with
    num_features: int
    bucket_sizes: Sequence[int]
    value_bytes: int  # of a parameter
    push: pushpull_cost.Shape | None  # None: the model's first layer cannot be computed by columns

    @classmethod
    def of(
        cls,
        model: nn.Module,
        part: AnyPart,
        num_nodes: int,
        num_neighbors: Sequence[int],
        num_ranks: int,
        feature_dtype: str = "auto",
    ) -> Shape:
        """Of a model as it will be trained (its device and number format), on a graph of such parts."""
        assert part.x is not None, "a share is checked to have features"
        wire = Wire(num_nodes, part.edge_weight is not None)
        layout = RowFormat.of(part, num_nodes, feature_dtype)
        length = _mean_length(part.x) if isinstance(part.x, SparseFeatures) else None
        return cls.described(model, layout, part.x.num_features, length, wire, num_neighbors, num_ranks)

    @classmethod
    def described(
        cls,
        model: nn.Module,
        layout: RowFormat,
        num_features: int,
        row_length: float | None,
        wire: Wire,
        num_neighbors: Sequence[int],
        num_ranks: int,
    ) -> Shape:
        """The same where rows are not at hand. ``row_length``: values of a sparse input row, on average; None: dense."""
        row_bytes = float(layout.row_bytes or 0)
        if row_length is not None:
            row_bytes = layout.fact_bytes + 4 + 8 * row_length
        parameters = [p for p in model.parameters() if p.requires_grad]
        try:
            push = pushpull_cost.Shape.of(model, num_features, num_ranks, wire, num_neighbors)
        except UnsupportedError:
            push = None
        return cls(
            _layers(model, num_features, row_length),
            num_neighbors,
            wire,
            row_bytes,
            layout.row_bytes is not None,
            layout.fact_bytes,
            float(num_features * parameters[0].element_size()) if row_length is None else 8.0 * row_length,
            num_features,
            bucket_sizes(parameters),
            parameters[0].element_size(),
            push,
        )


def _mean_length(x: SparseFeatures) -> float:
    rows = x.all()
    return float(rows.values.numel()) / max(1, x.num_rows)


def _layers(model: nn.Module, num_features: int, row_length: float | None) -> list[LayerShape]:
    """Input layer first."""
    assert as_layered(model) is not None, "the strategies over parts ask for layers"
    seen = crossings(model, num_features, Sizes.of_many(1), num_plain=0, returns_inputs=False)
    walked = walk(model, num_features, row_length)
    return [_layer(*each) for each in zip(seen, walked, strict=True)]


def _layer(seen: Seen, walked: Walked) -> LayerShape:
    conv, counts, carried = walked.conv, walked.counts, list(walked.state.values())
    maps_split, is_fixed = False, not walked.rows.requires_grad
    if conv is not None and conv.has_pieces:
        maps_split = conv.map_first(Sizes.of_many(1), True)
    width, mapped = counts.in_columns, counts.mapped_columns
    crosses_mapped = maps_split and (2 * mapped < width if is_fixed else mapped <= width)
    return LayerShape(
        columns=seen.columns,
        value_bytes=seen.value_bytes,
        returns=seen.has_gradient,
        crosses_mapped=crosses_mapped,
        counts=counts,
        maps_split=None if is_fixed and not crosses_mapped and maps_split else maps_split,
        state_bytes=sum(_columns(each) * each.element_size() for each in carried),
        state_values=sum(map(_columns, carried)),
        carries_gradient=any(each.requires_grad for each in carried),
    )


def _columns(rows: Tensor) -> int:
    return math.prod(rows.shape[1:])
