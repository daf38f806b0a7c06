"""What strategy ``halo`` sends in a step: accounted from lists and widths, to the byte; estimated before anything is cut up.

Legend: P ranks, L layers, D columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polyhop.comm import Cost
from polyhop.exchange.crossing import DIRECTIONS, Crossing, Direction
from polyhop.exchange.quantised import QuantisedMessages
from polyhop.graph import Block, HaloBlock, Reader, Sizes
from polyhop.kernels import quantised_bytes
from polyhop.strategies.data_cost import account_gradients
from polyhop.strategies.step import as_layered, forward_of

__all__ = ["Crossed", "Facts", "Seen", "account", "crossed", "crossings", "estimate"]


@dataclass(frozen=True)
class Crossed:
    """One message of a step."""

    layer: int
    direction: Direction
    peer: int
    num_rows: int
    num_bytes: int


def crossed(channels: Sequence[Crossing], value_bytes: int = 4) -> list[Crossed]:
    """Every message that this rank sends in the next step; columns are known once one step was made."""
    found = []
    for channel in channels:
        assert channel.num_columns is not None, "columns are known once rows have crossed"
        for direction in DIRECTIONS:
            for peer, num_rows in enumerate(channel.lists.leaving(direction)):
                size = num_rows * channel.num_columns * value_bytes
                if isinstance(channel.messages, QuantisedMessages):
                    bits = channel.messages.widths[direction].leaving[peer]
                    size = quantised_bytes(bits, channel.num_columns)
                if size:
                    found.append(Crossed(channel.spans.layer, direction, peer, num_rows, size))
    return found


def account(
    messages: Sequence[Crossed], bucket_sizes: Sequence[int], value_bytes: int, num_ranks: int, rank: int
) -> Cost:
    """What ``rank`` sends in a step: rows between layers (see ``crossed``) and gradients of the weights."""
    hidden = Cost(
        {"hidden": sum(each.num_bytes for each in messages)} if messages else {},
        {"hidden": len(messages)} if messages else {},
    )
    return hidden + account_gradients(bucket_sizes, value_bytes, num_ranks, rank)


@dataclass(frozen=True, eq=False)
class Facts:
    """Known before the run."""

    halo: Tensor  # int64 [P, P]: rows of rank i that rank j reads
    readers: float  # nodes of another part that read a boundary row, on average
    degree: float  # in-edges of a node, on average
    train_share: float  # of the nodes; 1 where all rows are needed (BatchNorm)
    columns: Sequence[int]  # that cross at each layer; 0 where nothing does
    bits: float = 32  # of a value, on average
    value_bytes: int = 4
    bucket_sizes: Sequence[int] = ()


def estimate(facts: Facts, rank: int) -> Cost:
    """What ``rank`` is expected to send in a step.

    A row of the last layer crosses if one of its readers is a train node; one of the layer below if a reader is such a
    node or is read by one, and so on: readers are taken to be independent.
    """
    needed, rows = facts.train_share, 0.0
    lent, wanted = float(facts.halo[rank].sum()), float(facts.halo[:, rank].sum())
    for columns in reversed(facts.columns):
        share = 1 - (1 - needed) ** facts.readers
        parameters = 0 if facts.bits >= 16 else 4
        row_bytes = columns * (facts.value_bytes if facts.bits >= 32 else facts.bits / 8) + parameters * bool(
            columns
        )
        rows += share * (lent + wanted) * row_bytes
        needed = 1 - (1 - needed) ** (1 + facts.degree)
    messages = (
        2
        * sum(1 for columns in facts.columns if columns)
        * int(((facts.halo[rank] > 0) | (facts.halo[:, rank] > 0)).sum())
    )
    num_ranks = facts.halo.shape[0]
    gradients = account_gradients(facts.bucket_sizes, facts.value_bytes, num_ranks, rank)
    return Cost({"hidden": rows}, {"hidden": messages}) + gradients


@dataclass(frozen=True)
class Seen:
    """What crosses at a layer, whatever the graph."""

    columns: int = 0  # 0: nothing
    is_linear: bool = False  # sums of rows serve as well as rows


def crossings(
    model: nn.Module, num_features: int, sizes: Sizes, *, num_plain: int = 1, sends_narrow: bool = True
) -> list[Seen]:
    """Of each layer; found by running the model on a part without rows."""
    layered = as_layered(model)
    assert layered is not None, "the strategy asks for layers"
    parameter = next(model.parameters())
    empty = torch.empty(0, dtype=torch.int64, device=parameter.device)
    degrees = torch.empty(0, dtype=torch.int32, device=parameter.device)
    plain = Block(
        torch.zeros(1, dtype=torch.int64, device=parameter.device), degrees, 0, src_ids=empty, in_degree=degrees
    )  # fmt: skip
    noted = [_Noted() for _ in range(layered.num_layers)]
    blocks = [
        plain if at < num_plain else HaloBlock.of(plain, 0, channel, sizes, sends_narrow=sends_narrow)
        for at, channel in enumerate(noted)
    ]
    with torch.no_grad(), _quiet(model):
        forward_of(model)(parameter.new_empty(0, num_features), tuple(blocks), None)
    return [channel.seen for channel in noted]


class _Noted:
    """A channel that sends nothing and remembers what it was given."""

    seen = Seen()

    def leave(
        self, rows: Tensor, first: int, reader: Reader | None = None, sums: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
        columns = int(torch.Size(rows.shape[1:]).numel())
        self.seen = Seen(columns, reader is not None and reader.is_linear)
        return rows, rows[first:], lambda: rows[:0]


@contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """No dropout and no statistics inside."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
