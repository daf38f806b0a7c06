"""What the bytes and the work of a step depend on besides the mini-batch: the model's layers, the graph's rows.

Found by running the model, as it will be trained, on no rows: once split, to see what would cross before each layer, and
once layer by layer, to see what it carries.

Legend: P ranks, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyhop.errors import UnsupportedError
from polyhop.exchange import RowFormat, bucket_sizes
from polyhop.graph import AnyPart, Block, Sizes, SparseFeatures
from polyhop.kernels import quantised_bytes
from polyhop.nn.layer import Layer
from polyhop.sample.wire import Wire
from polyhop.strategies import pushpull_cost
from polyhop.strategies.halo_cost import Seen, crossings, quiet
from polyhop.strategies.step import as_layered

__all__ = ["LayerShape", "Shape"]

MapFirst = Callable[[Sizes], bool]


@dataclass(frozen=True)
class LayerShape:
    """What bytes and work of a layer depend on, whatever the mini-batch."""

    columns: int  # that cross before it where it is split
    value_bytes: int
    returns: bool  # gradients of them do
    crosses_mapped: bool
    in_columns: int
    mapped_columns: int  # of a row that is mapped before it is summed
    movable: float  # multiply-adds of the map that may stand before or after the sum, a row
    fixed: float  # of all other products, a destination
    is_first: bool  # its inputs need no gradient
    map_first: MapFirst  # where it is not split
    maps_split: bool | None  # whether it maps before it sums where it is split; None: as where it is not
    state_bytes: int  # of what the model carries after it, a row
    state_values: int
    carries_gradient: bool

    def row_bytes(self, bits: int) -> int:
        return _row_bytes(self.columns, self.value_bytes, bits)

    def joint_bytes(self, bits: int) -> int:
        return self.state_bytes if bits == 32 else _row_bytes(self.state_values, 4, bits)

    def computed(self, sizes: Sizes, mapped: float | None = None) -> tuple[float, float]:
        """(values aggregated, flops), forward and backward. ``mapped``: rows that are, where the layer is split."""
        is_mapped = self.map_first(sizes) if mapped is None or self.maps_split is None else self.maps_split
        columns = self.mapped_columns if is_mapped else self.in_columns
        values = sizes.num_edges * columns * (1 if self.is_first and not is_mapped else 2)
        rows = (sizes.num_src if mapped is None else mapped) if is_mapped else sizes.num_dst
        products = 2 if self.is_first else 3
        return float(values), 2.0 * products * (rows * self.movable + sizes.num_dst * self.fixed)


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
        layout, width = RowFormat.of(part, num_nodes, feature_dtype), part.x.num_features
        row_bytes = float(layout.row_bytes or 0)
        if isinstance(part.x, SparseFeatures):
            row_bytes = layout.fact_bytes + 4 + 8 * _mean_length(part.x)
        parameters = [p for p in model.parameters() if p.requires_grad]
        try:
            push = pushpull_cost.Shape.of(model, width, num_ranks, wire, num_neighbors)
        except UnsupportedError:
            push = None
        return cls(
            _layers(model, width),
            num_neighbors,
            wire,
            row_bytes,
            layout.row_bytes is not None,
            layout.fact_bytes,
            float(width * parameters[0].element_size()),
            width,
            bucket_sizes(parameters),
            parameters[0].element_size(),
            push,
        )


def _mean_length(x: SparseFeatures) -> float:
    rows = x.all()
    return float(rows.values.numel()) / max(1, x.num_rows)


def _layers(model: nn.Module, num_features: int) -> list[LayerShape]:
    """Input layer first."""
    layered: Any = as_layered(model)
    assert layered is not None, "the strategies over parts ask for layers"
    seen = crossings(model, num_features, Sizes.of_many(1), num_plain=0, returns_inputs=False)
    convs = [module for module in model.modules() if isinstance(module, Layer)]
    if len(convs) != len(seen):  # nothing says which layer is whose
        convs = []
    share = _products(model) / len(seen)
    parameter = next(model.parameters())
    index = torch.empty(0, dtype=torch.int64, device=parameter.device)
    plain = Block(index.new_zeros(1), index.int(), 0, src_ids=index, in_degree=index.int())
    found = []
    with torch.enable_grad(), quiet(model):
        state = layered.begin(parameter.new_empty(0, num_features))
        for at, each in enumerate(seen):
            rows = state["h"]
            state = layered.layer(at, plain, state)
            found.append(_layer(at, each, rows, convs[at] if convs else None, share, list(state.values())))
    return found


def _layer(
    at: int, seen: Seen, rows: Tensor, conv: Layer | None, products: float, carried: Sequence[Tensor]
) -> LayerShape:
    """Of a layer that reads such rows, of which there are none."""
    width = mapped = _columns(rows)
    movable, maps_split, is_fixed = 0.0, False, not rows.requires_grad
    map_first: MapFirst = _never
    if conv is not None:
        products = _products(conv)
        if conv.has_pieces:
            made = conv.transform(rows, True)
            assert isinstance(made, Tensor), "rows between layers are dense"
            mapped = _columns(made)
            movable = min(float(width * mapped), products)
            map_first, maps_split = _asked(conv, at > 0), conv.map_first(Sizes.of_many(1), True)
    crosses_mapped = maps_split and (2 * mapped < width if is_fixed else mapped <= width)
    return LayerShape(
        columns=seen.columns,
        value_bytes=seen.value_bytes,
        returns=seen.has_gradient,
        crosses_mapped=crosses_mapped,
        in_columns=width,
        mapped_columns=mapped,
        movable=movable,
        fixed=products - movable,
        is_first=at == 0,
        map_first=map_first,
        maps_split=None if is_fixed and not crosses_mapped and maps_split else maps_split,
        state_bytes=sum(_columns(each) * each.element_size() for each in carried),
        state_values=sum(map(_columns, carried)),
        carries_gradient=any(each.requires_grad for each in carried),
    )


def _columns(rows: Tensor) -> int:
    return math.prod(rows.shape[1:])


def _products(module: nn.Module) -> float:
    """Multiply-adds of a row that all matrices of a module are multiplied with."""
    return float(sum(p.numel() for p in module.parameters() if p.dim() == 2))


def _never(_: Sizes) -> bool:
    return False


def _asked(conv: Layer, input_grad: bool) -> MapFirst:
    return lambda sizes: conv.map_first(sizes, input_grad)
