"""Layer: what every convolution here is, so that a strategy can run its pieces apart.

A layer is a function (block, rows of the sources) -> rows of the destinations, made of ``transform`` (dense, per source),
``edge`` (per edge, attention only), ``aggregate`` (the graph operation) and ``update`` (dense, per destination).
``forward`` is their composition. The dense map may stand before or after the aggregation; ``map_first`` picks the cheaper
order from widths and block sizes alone, so that every rank, run and machine picks the same.

Legend: D destinations, S sources, E edges, P pool rows, F columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polyhop.errors import GraphError, InputError, UnsupportedError
from polyhop.graph.aggregated import AggregatedRows, FixedAggregate
from polyhop.graph.block import Block
from polyhop.graph.features import SparseRows
from polyhop.graph.halo_block import HaloBlock, Sizes
from polyhop.graph.pooled import PooledRows
from polyhop.graph.sliced import MappedRows, SlicedMap
from polyhop.kernels.keys import Key, Purpose
from polyhop.nn.halo import over_halo
from polyhop.nn.rows import Messages, Rows, gathered, linear, own_rows
from polyhop.nn.scale import Linear

__all__ = [
    "SLICES",
    "Layer",
    "as_block",
    "cheaper_to_map_first",
    "draw_key",
    "refuse_changed",
    "refuse_options",
]

# An aggregated value costs as much as this many multiply-adds of a matrix product. Measured in float32 on one AVX-512 core,
# 30,000 to 120,000 rows, 5 to 16 edges per destination: 14-24 G multiply-adds/s against 0.9-1.7 G values/s at widths 128 and
# 256 (ratio 13 to 19), 10-16 against 1.3-5.9 at width 64, which partly stays in cache (ratio 3 to 8).
EDGE_COST = 12

SLICES = "inputs in slices of columns are"  # what errors say is not possible


class Layer(nn.Module):
    """Base of all convolutions. Subclasses give the pieces; all are pure in the block and the tensors they are given."""

    in_channels: int
    out_channels: int
    has_pieces: ClassVar[bool] = True  # False for wrapped layers, which have only ``forward``
    reads_own: bool = False  # update needs the destinations' input rows
    reads_pooled: bool = False  # aggregate reads rows in two places; else they are gathered for it
    maps_linearly: bool = (
        True  # transform is a product, so that sums of rows may be mapped in place of the rows
    )
    gives_own: bool = False  # the result is a new tensor that no backward pass reads: it may be overwritten
    takes_carried: ClassVar[bool] = False  # update needs rows carried from earlier (GCNII's h0)

    @property
    def mixes_rows(self) -> bool:
        """Whether ``update`` looks at several rows together in training (a BatchNorm inside)."""
        return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in self.modules())

    def set_widths(self, in_channels: int, out_channels: int) -> None:
        """Keep the two widths, or say why they cannot be used."""
        for name, width in (("in_channels", in_channels), ("out_channels", out_channels)):
            if type(width) is not int or width < 1:
                raise UnsupportedError(
                    f"{type(self).__name__}: {name}={width!r}: expected a whole number of at least 1 "
                    "(no lazy sizes, no pairs: sources and destinations of a block have the same columns)"
                )
        self.in_channels, self.out_channels = in_channels, out_channels

    def map_first(self, block: Block | Sizes, input_grad: bool) -> bool:
        """Whether to multiply before aggregating: a function of widths and block sizes only."""
        return cheaper_to_map_first(block, self.in_channels, self.out_channels, input_grad)

    def transform(self, h: Rows, map_first: bool) -> Messages:
        """Source rows [S or P, in_channels] -> messages [S or P, any width]."""
        raise NotImplementedError

    def edge(self, block: Block, m: Messages) -> Any:
        """What the aggregation needs per edge or per row beside the messages; None for most layers."""
        return None

    def aggregate(self, block: Block, m: Messages, e: Any, key: int | None = None) -> Tensor:
        """Messages [S or P, ...] -> one row per destination [D, ...]. ``key`` decides attention dropout."""
        raise NotImplementedError

    def update(self, z: Tensor, h_dst: Rows | None, carried: Tensor | None, map_first: bool) -> Tensor:
        """Aggregated rows [D, ...], the destinations' input rows, carried rows [D, ...] -> [D, out_channels]."""
        raise NotImplementedError

    def at_once(self, block: Block, x: Messages, map_first: bool) -> Tensor | None:
        """[D, out_channels]: all pieces as one function, on the CPU to the bit; None: one by one."""
        return None

    def linear(self, block: Block, dtype: torch.dtype) -> Linear | None:
        """How neighbours are weighed, where ``aggregate`` is a sum of them and of own rows; None where it is not."""
        return None

    def fixed_aggregate(self) -> FixedAggregate:
        """What this layer sums of its inputs, if no parameter changes it; else UnsupportedError that says why."""
        if not self.has_pieces:
            reason = "what it sums of its inputs is inside another library's layer"
        elif type(self).edge is not Layer.edge:
            reason = "it weighs neighbours by what it learns, so the sum over them changes at every step"
        else:
            reason = "it does not say what it sums of its inputs"
        raise UnsupportedError(f"{type(self).__name__}: aggregated inputs are not possible: {reason}")

    def update_aggregated(self, rows: AggregatedRows) -> Tensor:
        """[n, out_channels]: the layer on rows that were summed before (see ``fixed_aggregate``)."""
        return self.update(rows.z, rows.own, None, map_first=False)

    def sliced_map(self) -> SlicedMap:
        """How the layer's product with its inputs is a sum over their columns; else UnsupportedError that says why not."""
        reason = "it does not say which product it makes of its inputs"
        if not self.has_pieces:
            reason = "its product with the inputs is inside another library's layer"
        raise UnsupportedError(f"{type(self).__name__}: {SLICES} not possible: {reason}")

    def mapped_sum(self, block: Block, x: Tensor, weight: Tensor) -> Tensor:
        """[D, out]: the aggregation of columns x [S, c], times weight [out, c], in the cheaper order."""
        if cheaper_to_map_first(block, x.shape[1], weight.shape[0], False):
            return self.aggregate(block, linear(x, weight), None)
        return linear(self.aggregate(block, x, None), weight)

    def update_mapped(self, rows: MappedRows, block: Block, key: int | None) -> Tensor:
        """[D, out_channels]: the layer on rows that were mapped before (see ``sliced_map``)."""
        return self.update(rows.z, None, None, map_first=True)

    def forward(
        self,
        x: Rows | AggregatedRows | MappedRows,
        edge_index: Block | Tensor,
        edge_weight: Tensor | None = None,
        *,
        carried: Tensor | None = None,
        key: Key | None = None,
        site: int = 0,
    ) -> Tensor:
        """Rows of the block's sources [S, in_channels] (the pool, where ``block.rows`` is set) -> [D, out_channels].

        ``edge_index`` int64 [2, E] (sources, destinations), as in PyG, stands for the full graph on x's rows.
        ``key`` and ``site`` (the layer's place in its model) decide what is dropped inside the layer. Aggregated rows
        come with a block whose sources are its destinations, without edges; mapped rows with the block they were made by.
        """
        block = as_block(edge_index, x.shape[0], edge_weight)
        if isinstance(x, AggregatedRows):
            self._check_aggregated(x, block)
            return self.update_aggregated(x)
        if isinstance(x, MappedRows):
            self._check_mapped(x, block)
            return self.update_mapped(x, block, self._attention_key(key, site))
        self._check(x, block, carried)
        if isinstance(block, HaloBlock):
            rows, _ = gathered(x, block)
            assert isinstance(rows, Tensor), "rows between layers are dense"
            return over_halo(self, rows, block, carried, self._attention_key(key, site))
        map_first = isinstance(x, SparseRows) or self.map_first(block, x.requires_grad)
        if map_first or (isinstance(x, PooledRows) and not self.reads_pooled):
            x, block = gathered(x, block)
        if isinstance(x, (Tensor, PooledRows)) and (whole := self.at_once(block, x, map_first)) is not None:
            return whole
        h_dst: Rows | None = None
        if self.reads_own:
            x, h_dst = own_rows(x, block)
        m = self.transform(x, map_first)
        z = self.aggregate(block, m, self.edge(block, m), self._attention_key(key, site))
        return self.update(z, h_dst, carried, map_first)

    def _attention_key(self, key: Key | None, site: int) -> int | None:
        """The 64-bit key of what is dropped inside the layer; None where nothing is."""
        p = getattr(self, "dropout", 0.0)
        if not self.training or not p:
            return None
        return draw_key(key).at(Purpose.ATTENTION_DROPOUT, site)

    def _check(self, x: Rows, block: Block, carried: Tensor | None) -> None:
        name = type(self).__name__
        if x.shape[1] != self.in_channels > 0:
            raise InputError(f"{name}: expected rows of {self.in_channels} columns, got {x.shape[1]}")
        if block.rows is None and x.shape[0] != block.num_src:
            raise InputError(f"{name}: the block has {block.num_src} source rows, x has {x.shape[0]}")
        if self.takes_carried and carried is None:
            raise InputError(f"{name}: needs the initial rows of the destinations (x_0, carried=...)")

    def _check_aggregated(self, x: AggregatedRows, block: Block) -> None:
        aggregate, name = self.fixed_aggregate(), type(self).__name__
        if x.shape[1] != self.in_channels > 0 or (x.own is None) == aggregate.has_own:
            wanted = "with" if aggregate.has_own else "without"
            raise InputError(
                f"{name}: expected aggregated rows of {self.in_channels} columns {wanted} own rows, got {x.shape[1]} "
                f"{'without' if x.own is None else 'with'}"
            )
        if (block.num_src, block.num_dst, block.num_edges) != (x.shape[0], x.shape[0], 0):
            raise InputError(
                f"{name}: {x.shape[0]} aggregated rows need a block from and to as many rows, without edges; this one has "
                f"{block.num_src} sources, {block.num_dst} destinations, {block.num_edges} edges"
            )

    def _check_mapped(self, x: MappedRows, block: Block) -> None:
        sliced = self.sliced_map()
        expected = sliced.num_rows(block.num_src, block.num_dst), sliced.width
        if x.shape != expected:
            raise InputError(
                f"{type(self).__name__}: expected mapped rows {list(expected)}, got {list(x.shape)}"
            )

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}"


def cheaper_to_map_first(block: Block | Sizes, width_in: int, width_out: int, input_grad: bool) -> bool:
    """Whether multiplying S rows and aggregating ``width_out`` columns costs less than the other way about.

    Costs count a training step in multiply-adds of a matrix product: products forward, for the weights and
    (``input_grad``) for the input; aggregations forward and backward. Aggregating first needs no backward aggregation if
    the input needs no gradient. An aggregated value costs EDGE_COST. Whether the rows lie in a pool is not asked: where rows
    lie must not decide how results are rounded.
    """
    products = (3 if input_grad else 2) * width_in * width_out
    moved = 2 * block.num_edges * width_out
    mapping = products * block.num_src + EDGE_COST * moved
    aggregating = products * block.num_dst + EDGE_COST * (2 if input_grad else 1) * block.num_edges * width_in
    return mapping < aggregating


def as_block(edge_index: Block | Tensor, num_nodes: int, edge_weight: Tensor | None = None) -> Block:
    """The block itself, or the full graph given as edges int64 [2, E] between ``num_nodes`` nodes.

    Sorts the edges: in a training loop, make the block once and pass it.
    """
    if isinstance(edge_index, Block):
        if edge_weight is not None:
            raise InputError(
                "edge_weight: a Block carries its own weights (Block.edge_weight); pass one or the other"
            )
        return edge_index
    _check_edges(edge_index, num_nodes, edge_weight)
    src, dst = edge_index.long()
    order = torch.sort(dst, stable=True).indices
    indptr = torch.zeros(num_nodes + 1, dtype=torch.int64, device=dst.device)
    torch.cumsum(torch.bincount(dst, minlength=num_nodes), 0, out=indptr[1:])
    indices = src[order].to(torch.int32 if num_nodes < 2**31 else torch.int64)
    weight = None if edge_weight is None else edge_weight[order]
    return Block(
        indptr,
        indices,
        num_nodes,
        edge_weight=weight,
        loop_weight=_loop_weight(src, dst, edge_weight, num_nodes),
    )


def _check_edges(edge_index: Any, num_nodes: int, edge_weight: Tensor | None) -> None:
    """GraphError if the edges cannot be those of a graph on ``num_nodes`` rows."""
    shape = list(edge_index.shape) if isinstance(edge_index, Tensor) else type(edge_index).__name__
    if not isinstance(edge_index, Tensor) or edge_index.is_floating_point() or edge_index.is_sparse:
        raise GraphError(f"edge_index: expected a Block or an integer tensor [2, E], got {shape}")
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise GraphError(f"edge_index: expected a Block or an integer tensor [2, E], got {shape}")
    if edge_weight is not None and edge_weight.shape != edge_index.shape[1:]:
        raise GraphError(f"edge_weight: expected [{edge_index.shape[1]}], got {list(edge_weight.shape)}")
    if edge_index.shape[1] == 0:
        return
    low, high = int(edge_index.min()), int(edge_index.max())
    if low < 0 or high >= num_nodes:
        raise GraphError(f"edge_index: ids span {low}..{high}, x has rows 0..{num_nodes - 1}")


def _loop_weight(src: Tensor, dst: Tensor, edge_weight: Tensor | None, num_nodes: int) -> Tensor | None:
    """float [N]: the weight of each node's own loop, 0 where it has none; None if no node has one."""
    is_loop = src == dst
    if not bool(is_loop.any()):
        return None
    given = torch.ones(src.numel(), device=src.device) if edge_weight is None else edge_weight.detach()
    return given.new_zeros(num_nodes).index_put((dst[is_loop],), given[is_loop])


def draw_key(key: Key | None) -> Key:
    """The given key, or one drawn from torch's generator, so that ``torch.manual_seed`` decides."""
    return key if key is not None else Key(int(torch.randint(0, 2**62, ())))


def refuse_changed(
    module: nn.Module, base: type[nn.Module], names: Sequence[str], what: str = "aggregated inputs are"
) -> None:
    """UnsupportedError if a subclass of ``base`` has changed one of the named methods, on which its sums depend."""
    for name in names:
        if getattr(type(module), name) is not getattr(base, name):
            raise UnsupportedError(
                f"{type(module).__name__}: {what} not possible: it has a {name}() of its own, which may "
                f"change rows before they are summed (dropout, learnable inputs); {base.__name__} itself has none"
            )


def refuse_options(
    layer: str, options: Mapping[str, Any], accepted: Mapping[str, Sequence[Any]] | None = None
) -> None:
    """UnsupportedError for any option of PyG's MessagePassing that is not at the value this layer computes."""
    known: dict[str, Sequence[Any]] = {"flow": ("source_to_target",), "node_dim": (-2, 0), **(accepted or {})}
    for name, value in options.items():
        if name not in known or value not in known[name]:
            hint = f"; it computes {name}={known[name][0]!r}" if name in known else ""
            raise UnsupportedError(
                f"{layer}: {name}={value!r} is not supported{hint}. polyhop.nn.wrap takes PyG's own layer."
            )
