"""Model: a stack of layers that runs in one go in training and one layer at a time in exact inference.

``begin`` and ``finish`` act row by row; ``layer(i, block, state)`` takes the state of the block's source rows and returns
that of its destinations. The state is a dict of per-row tensors: "h", and what the model carries along ("h0", "jk0", ...).
``forward`` is finish(layer(... begin(x))): training and inference are the same three functions.

Legend: S sources, D destinations, F columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from polyhop.errors import GraphError, InputError, UnsupportedError
from polyhop.graph.aggregated import AggregatedRows, FixedAggregate
from polyhop.graph.block import Block
from polyhop.graph.features import SparseRows
from polyhop.graph.pooled import PooledRows
from polyhop.graph.sliced import MappedRows, SlicedMap
from polyhop.kernels import dropout, dropout_values
from polyhop.kernels.keys import Key, Purpose
from polyhop.nn.layer import SLICES, Layer, as_block, draw_key, refuse_changed
from polyhop.nn.rows import Rows, gathered

__all__ = [
    "Model",
    "State",
    "act_and_drop",
    "drop_rows",
    "first_aggregate",
    "first_map",
    "rows_of",
    "slice_destinations",
]

State: TypeAlias = dict[str, Rows | AggregatedRows | MappedRows]


class Model(nn.Module):
    """Base of all models. ``num_layers`` layers; ``out_channels`` columns in the output."""

    num_layers: int
    in_channels: int
    out_channels: int
    begins_plain: ClassVar[bool] = True  # begin() does not touch x
    takes_pool: ClassVar[bool] = False  # layer() hands "h" to its convolution as it is: "h" may be a pool

    def begin(self, x: Rows, *, ids: Tensor | None = None, key: Key | None = None) -> State:
        """State of any input rows [n, in_channels]; ``ids`` (int64 [n], None = 0 .. n-1) key their dropout in training."""
        return {"h": x}

    def layer(self, i: int, block: Block, state: State, *, key: Key | None = None) -> State:
        """State of the block's destinations after layer i, from the state of its sources."""
        raise NotImplementedError

    def undropped(self, i: int, block: Block, state: State, *, key: Key | None = None) -> State:
        """``layer`` up to where it drops units of its output: what a strategy that keeps rows over several steps keeps."""
        return self.layer(i, block, state, key=key)

    def dropped(self, i: int, state: State, *, ids: Tensor | None = None, key: Key | None = None) -> State:
        """The rest of ``layer``, row by row: both together are ``layer``, to the bit. ``ids`` as in ``begin``."""
        return state

    def finish(self, state: State, *, ids: Tensor | None = None, key: Key | None = None) -> Tensor:
        """Output rows [n, out_channels] of any rows that went through all layers."""
        return rows_of(state)

    def fixed_aggregate(self) -> FixedAggregate:
        """What the first layer sums of the inputs, if nothing learnt or random comes before; else UnsupportedError."""
        reason = "it says of no layer that it sums the inputs as they are"
        if not self.begins_plain:
            reason = "it maps its inputs by learnt weights before the first layer sums them"
        raise UnsupportedError(f"{type(self).__name__}: aggregated inputs are not possible: {reason}")

    def sliced_map(self) -> SlicedMap:
        """The first layer's product with the inputs, if nothing else comes before; else UnsupportedError that says what."""
        reason = "it says of no layer that it multiplies the inputs as they are"
        if not self.begins_plain:
            reason = "it drops or maps inputs before the first layer"
        raise UnsupportedError(f"{type(self).__name__}: {SLICES} not possible: {reason}")

    def forward(
        self,
        x: Rows | AggregatedRows | MappedRows,
        blocks: Block | Sequence[Block] | Tensor,
        edge_weight: Tensor | None = None,
        *,
        key: Key | None = None,
    ) -> Tensor:
        """Input rows of the first block's sources -> [D, out_channels] of the last block's destinations.

        ``blocks``: one Block for all layers (the full graph), one per layer (input layer first), or PyG's edge_index [2, E].
        ``key`` names the training step for dropout; without it, in training, one is drawn from torch's generator.
        """
        listed = _per_layer(blocks, x, edge_weight, self.num_layers)
        if self.training:
            key = draw_key(key)
        if isinstance(x, AggregatedRows):
            self.fixed_aggregate()  # nothing comes before the first layer, or this says what does
            state: State = {"h": x}
        elif isinstance(x, MappedRows):
            self.sliced_map()
            state = {"h": x}
        else:
            if not (self.begins_plain and self.takes_pool):
                x, first = gathered(x, listed[0])
                listed = [first, *listed[1:]]
            state = self.begin(x, ids=listed[0].src_ids, key=key)
        for i, block in enumerate(listed):
            state = self.layer(i, block, state, key=key)
        last = listed[-1]
        ids = None if last.src_ids is None and last.dst_start == 0 else last.dst_ids()
        return self.finish(state, ids=ids, key=key)


def first_aggregate(model: Model, base: type[Model], layer: nn.Module) -> FixedAggregate:
    """That of the model's first layer, unless a subclass of ``base`` may have put something before it."""
    refuse_changed(model, base, ("begin", "layer", "forward"))
    assert isinstance(layer, Layer), "models are built of layers"
    return layer.fixed_aggregate()


def first_map(model: Model, base: type[Model], layer: nn.Module) -> SlicedMap:
    """The same of the first layer's product with the inputs."""
    refuse_changed(model, base, ("begin", "layer", "forward"), SLICES)
    assert isinstance(layer, Layer), "models are built of layers"
    return layer.sliced_map()


def _per_layer(
    blocks: Block | Sequence[Block] | Tensor,
    x: Rows | AggregatedRows | MappedRows,
    edge_weight: Tensor | None,
    num_layers: int,
) -> list[Block]:
    """One block for each layer, checked to fit one another."""
    if isinstance(blocks, (Block, Tensor)):
        block = as_block(blocks, x.shape[0], edge_weight)
        if num_layers > 1 and block.num_dst != block.num_src:
            raise GraphError(
                f"one block for {num_layers} layers must have all its {block.num_src} rows as destinations, "
                f"it has {block.num_dst}; pass one block per layer"
            )
        return (
            [block, *[replace(block, rows=None)] * (num_layers - 1)]
            if block.rows is not None
            else [block] * num_layers
        )
    if edge_weight is not None:
        raise InputError("edge_weight: blocks carry their own weights (Block.edge_weight)")
    if len(blocks) != num_layers:
        raise GraphError(f"expected {num_layers} blocks, one per layer, got {len(blocks)}")
    for i, (below, above) in enumerate(pairwise(blocks)):
        if below.num_dst != above.num_src:
            raise GraphError(f"block {i} gives {below.num_dst} rows, block {i + 1} takes {above.num_src}")
    return list(blocks)


def rows_of(state: State, name: str = "h") -> Tensor:
    """A dense entry of the state."""
    value = state[name]
    if not isinstance(value, Tensor):
        raise InputError(f"state {name!r}: expected a dense tensor, got {type(value).__name__}")
    return value


def slice_destinations(block: Block, state: State, names: Sequence[str]) -> State:
    """The named entries for the block's destinations only."""
    start, stop = block.dst_start, block.dst_start + block.num_dst
    return {name: rows_of(state, name)[start:stop] for name in names}


def drop_rows(
    x: Rows, p: float, key: Key | None, site: int, *, ids: Tensor | None = None, id_start: int = 0
) -> Rows:
    """x with units dropped by (key, site, node id, column); the same units whether the rows are sparse or dense."""
    if p <= 0 or key is None:
        return x
    code = key.at(Purpose.DROPOUT, site)
    if isinstance(x, PooledRows):
        raise InputError("rows in two places are read only: gather them before units are dropped")
    if not isinstance(x, SparseRows):
        return dropout(x, ids, p, code, id_start=id_start)
    named = ids if ids is not None else x.ids
    return x.with_values(dropout_values(x.values, x.indptr, x.indices, named, p, code))


def act_and_drop(
    h: Tensor,
    act: Callable[[Tensor], Tensor] | None,
    p: float,
    key: Key | None,
    site: int,
    block: Block | None = None,
    ids: Tensor | None = None,
    *,
    in_place: bool = False,
) -> Tensor:
    """Activation, then dropout keyed by the rows' node ids: the block's destinations, or ``ids``. A relu is fused.

    ``in_place=True`` may write over h (see ``Layer.gives_own``).
    """
    relu = isinstance(act, nn.ReLU) or act in (torch.relu, nn.functional.relu)
    if act is not None and not relu:
        h, in_place = act(h), False
    if key is None:
        p = 0.0
    start = 0
    if block is not None:
        start = block.dst_start
        ids = None if block.src_ids is None else block.dst_ids()
    code = 0 if key is None else key.at(Purpose.DROPOUT, site)
    return dropout(h, ids, p, code, id_start=start, relu=relu, in_place=in_place)
