"""Layers that sum rows, fed from a table: what a chunk sums of other chunks' rows needs nothing kept for the way back.

A layer's sum is linear, so its gradient needs the edges alone, and dropout is keyed, so its mask can be made again. Rows of
others are read, dropped and summed into the chunk's own rows when the layer runs, and let go; backward the same edges carry
gradients the other way, into the table's. To the layer the chunk looks like a part whose halo comes in one shard.

Which layers can be served so is found by running the model on one node: those that sum rows as they are given.

Legend: n rows of a chunk, o rows of others that it reads, F columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polyhop.graph import Block, HaloBlock, Reader, Sizes
from polyhop.nn.model import Model
from polyhop.strategies.pipeline_pieces import quiet, splits_dropout

__all__ = ["layers_that_sum", "over_table", "with_shard"]

_FIRST_SUM = Sizes(1, 1, 0)  # nothing is cheaper than to sum before mapping


def with_shard(block: Block) -> HaloBlock:
    """A chunk's block, whose own rows come first, as that of a part: others are one shard. ``over_table`` binds it."""
    num_others = block.num_src - block.num_dst
    return HaloBlock.of(block, 0, _Nothing(), _FIRST_SUM, sends_narrow=False, wanted=[num_others])


def over_table(block: HaloBlock, read: Callable[[], Tensor], push: Callable[[Tensor], None]) -> HaloBlock:
    """The same block for one layer: ``read`` gives rows of others [o, F], ``push`` takes their gradients."""
    return replace(block, channel=_Table(read, push))


def layers_that_sum(model: Model, num_features: int) -> frozenset[int]:
    """Layers that sum the rows they are given, and nothing happens to these before."""
    if not (model.takes_pool and splits_dropout(model)):
        return frozenset()
    parameter = next(model.parameters())
    ids = torch.zeros(1, dtype=torch.int64, device=parameter.device)
    none = torch.zeros(0, dtype=torch.int32, device=parameter.device)
    block = Block(ids.new_zeros(2), none, 1, src_ids=ids, in_degree=ids.to(torch.int32))
    found = set()
    with torch.no_grad(), quiet(model):
        state = model.begin(parameter.new_zeros(1, num_features), ids=ids)
        for index in range(model.num_layers):
            if index:
                state = model.dropped(index - 1, state, ids=ids)
            seen = _Noted(state["h"])
            halo = HaloBlock.of(block, 0, seen, _FIRST_SUM, sends_narrow=False)
            state = model.undropped(index, halo if index else block, state)
            if seen.sums_given_rows:
                found.add(index)
    return frozenset(found)


class _Nothing:
    """A channel before it is bound."""

    def leave(self, *args: Any) -> Any:
        raise AssertionError("a chunk's block is bound to a table before a layer runs")


class _Table:
    """Rows of others from a table; their gradients into another."""

    def __init__(self, read: Callable[[], Tensor], push: Callable[[Tensor], None]) -> None:
        self._read, self._push = read, push

    def leave(
        self, rows: Tensor, first: int, reader: Reader | None = None, sums: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
        assert reader is not None, "layers that sum say how"
        tail = rows if first == 0 else rows[first:]

        def arrive() -> Tensor:
            added: Tensor = _Others.apply(rows, reader, self._read, self._push)  # type: ignore[no-untyped-call]
            return added

        return rows, tail, arrive


class _Noted:
    """A channel that sees whether a layer sums what it was given."""

    def __init__(self, given: Any) -> None:
        self._given, self.sums_given_rows = given, False

    def leave(
        self, rows: Tensor, first: int, reader: Reader | None = None, sums: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
        self.sums_given_rows = rows is self._given and reader is not None and reader.is_linear
        return rows, rows[first:], lambda: rows[:0]


class _Others(torch.autograd.Function):
    """[n, F]: what the chunk's rows sum of others. Keeps nothing; own rows are given to have a place in the graph."""

    @staticmethod
    def forward(
        ctx: Any, own: Tensor, reader: Reader, read: Callable[[], Tensor], push: Callable[[Tensor], None]
    ) -> Tensor:
        ctx.reader, ctx.push = reader, push
        sums = own.new_zeros(reader.num_summed, own.shape[1])
        reader.add_shard(sums, 0, read())
        return sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ctx.push(ctx.reader.shard_grad(grad.contiguous(), 0))
        return None, None, None, None
