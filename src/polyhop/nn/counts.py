"""How much the layers of a model compute: counted from widths, by running the model on no rows. What time is foreseen from.

    values   edges times columns that are aggregated, forward and backward
    flops    of matrix products, forward and backward
    rows     values that pass through bias, norm, activation and dropout, or are gradients of rows, forward and backward

A first layer has no gradient for its inputs. Whether a layer maps before it aggregates is its own rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from polyhop.graph.block import Block
from polyhop.graph.halo_block import Sizes
from polyhop.nn.layer import Layer

__all__ = ["Counts", "LayerCounts", "ModelCounts", "Walked", "count_model", "quiet", "walk"]

MapFirst = Callable[[Sizes], bool]

_BYTES = 4.0  # of a value: a cache is filled by float32


@dataclass(frozen=True)
class Counts:
    """Of some training; adds up."""

    reads: tuple[tuple[float, float], ...] = ()  # (values aggregated, bytes of the rows they are read from)
    flops: float = 0.0
    rows: float = 0.0
    calls: float = 0.0  # layers that were run: each costs something, however small

    @property
    def values(self) -> float:
        return sum(values for values, _ in self.reads)

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.reads + other.reads,
            self.flops + other.flops,
            self.rows + other.rows,
            self.calls + other.calls,
        )

    def __mul__(self, times: float) -> Counts:
        """So many times the same."""
        reads = tuple((values * times, table) for values, table in self.reads)
        return Counts(reads, self.flops * times, self.rows * times, self.calls * times)


@dataclass(frozen=True)
class LayerCounts:
    """What the work of a layer depends on, whatever the rows."""

    in_columns: int
    mapped_columns: int  # of a row that is mapped before it is summed
    out_columns: int
    movable: float  # multiply-adds of the map that may stand before or after the sum, a row
    fixed: float  # of all other products, a destination
    is_first: bool  # its inputs need no gradient
    map_first: MapFirst
    input_values: float | None = None  # of a sparse input row, on average, where it is the first; None: dense

    def of(self, sizes: Sizes, mapped: float | None = None, maps: bool | None = None) -> Counts:
        """On so many rows and edges. ``mapped``: rows that are, if not all sources; ``maps``: whether before it sums."""
        is_mapped = self.map_first(sizes) if maps is None else maps
        if self.input_values is not None:
            return self._of_sparse(sizes, self.input_values)
        columns = self.mapped_columns if is_mapped else self.in_columns
        values = sizes.num_edges * columns * (1 if self.is_first and not is_mapped else 2)
        rows = (sizes.num_src if mapped is None else mapped) if is_mapped else sizes.num_dst
        products = 2 if self.is_first else 3
        flops = 2.0 * products * (rows * self.movable + sizes.num_dst * self.fixed)
        passed = 2.0 * sizes.num_dst * self.out_columns
        passed += 0.0 if self.is_first else float(sizes.num_src * self.in_columns)
        return Counts(((float(values), _BYTES * sizes.num_src * columns),), flops, passed, 1.0)

    def _of_sparse(self, sizes: Sizes, input_values: float) -> Counts:
        """Sparse rows are mapped first: sums of rows of the weights, and of gradients into them."""
        columns = self.mapped_columns
        own = self.fixed / max(1.0, self.movable)  # a second map of the same inputs (SAGE's own rows)
        mapped = 2.0 * columns * input_values * (sizes.num_src + own * sizes.num_dst)
        reads = (
            (mapped, _BYTES * self.in_columns * columns),  # of the weights
            (2.0 * columns * sizes.num_edges, _BYTES * sizes.num_src * columns),
        )
        return Counts(reads, 0.0, 2.0 * (sizes.num_dst * self.out_columns + sizes.num_src * columns), 1.0)


@dataclass(frozen=True)
class ModelCounts:
    """Of a whole model: its layers, input layer first, and what comes before and after them."""

    layers: Sequence[LayerCounts]
    begin: float  # multiply-adds of an input row before the first layer
    finish: float  # of an output row after the last
    num_parameters: int = 0
    input_values: float | None = None  # of a sparse input row; None: dense
    num_features: int = 0

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def of(self, sizes: Sequence[Sizes]) -> Counts:
        """Of a training step on blocks of such sizes, input layer first."""
        total = self.around(sizes[0].num_src, sizes[-1].num_dst)
        for layer, size in zip(self.layers, sizes, strict=True):
            total += layer.of(size)
        return total

    def around(self, num_inputs: float, num_outputs: float) -> Counts:
        """What comes before and after the layers, and the loss."""
        return self.before(num_inputs) + self.after(num_outputs)

    def before(self, num_inputs: float) -> Counts:
        """The products of input rows that are no layer's."""
        if self.input_values is None:
            return Counts((), 4.0 * num_inputs * self.begin)
        values = 2.0 * num_inputs * self.begin * self.input_values / max(1, self.num_features)
        return Counts(((values, _BYTES * self.begin),))

    def after(self, num_outputs: float) -> Counts:
        """What output rows become, and the loss."""
        rows = 3.0 * num_outputs * self.layers[-1].out_columns
        return Counts((), 6.0 * num_outputs * self.finish, rows, 1.0)


def count_model(model: nn.Module, num_features: int, input_values: float | None = None) -> ModelCounts:
    """Of a model that has ``begin``, ``layer``, ``finish`` and ``num_layers``; ``input_values``: of a sparse input row."""
    steps = list(walk(model, num_features, input_values))
    inside = {id(p) for each in steps if each.conv is not None for p in each.conv.parameters()}
    around = [p for p in model.parameters() if p.dim() == 2 and id(p) not in inside]
    if any(each.conv is None for each in steps):
        around = []  # all products are shared out over the layers
    begin = sum(p.numel() for p in around if p.shape[1] == num_features)
    finish = sum(p.numel() for p in around if p.shape[1] != num_features)
    layers = [each.counts for each in steps]
    size = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return ModelCounts(layers, float(begin), float(finish), size, input_values, num_features)


@dataclass(frozen=True)
class Walked:
    """One layer, run on no rows."""

    conv: Layer | None  # None: nothing says which convolution is whose
    rows: Tensor  # that it reads
    state: dict[str, Tensor]  # after it
    counts: LayerCounts


def walk(model: nn.Module, num_features: int, input_values: float | None = None) -> Iterator[Walked]:
    """Every layer of a model, the input layer first; ``input_values``: of a sparse input row."""
    layered: Any = model
    convs: list[Layer | None] = [module for module in model.modules() if isinstance(module, Layer)]
    if len(convs) != layered.num_layers:
        convs = [None] * layered.num_layers
    share = _products(model) / layered.num_layers
    parameter = next(model.parameters())
    index = torch.empty(0, dtype=torch.int64, device=parameter.device)
    plain = Block(index.new_zeros(1), index.int(), 0, src_ids=index, in_degree=index.int())
    with torch.enable_grad(), quiet(model):
        state = layered.begin(parameter.new_empty(0, num_features))
        for at, conv in enumerate(convs):
            rows = state["h"]
            state = layered.layer(at, plain, state)
            counts = _counts(at, conv, rows, share, _columns(state["h"]))
            is_sparse = at == 0 and not rows.requires_grad  # the inputs themselves
            yield Walked(conv, rows, state, replace(counts, input_values=input_values if is_sparse else None))


def _counts(at: int, conv: Layer | None, rows: Tensor, products: float, out_columns: int) -> LayerCounts:
    width = mapped = _columns(rows)
    movable = 0.0
    map_first: MapFirst = _never
    if conv is not None:
        products = _products(conv)
        if conv.has_pieces:
            made = conv.transform(rows, True)
            assert isinstance(made, Tensor), "rows between layers are dense"
            mapped = _columns(made)
            movable = min(float(width * mapped), products)
            map_first = _asked(conv, at > 0)
    return LayerCounts(
        width, mapped, out_columns, movable, products - movable, not rows.requires_grad, map_first
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


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """No dropout and no statistics inside."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
