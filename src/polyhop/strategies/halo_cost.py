"""What strategy ``halo`` sends in a step: accounted from lists and widths, to the byte; estimated before anything is cut up.

Both are made of messages, one for each layer, direction and peer, so both can be looked at that way. ``halo_estimate`` finds
the facts that an estimate needs. What an estimate says of each option:

    exact, stale          what crosses, if the facts are those of the graph
    naive, sequential     the same, input rows included; they have gradients only where the first layer maps them before
    sampled               the same
    skipping              at most: rows that have not moved stay where they are
    bits 1 .. 32, delta   the same
    adaptive, random      of a step once widths were chosen (8 bits before that); adaptive ones are a guess

Legend: P ranks, L layers, D columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from polyhop.comm import Cost
from polyhop.exchange.crossing import DIRECTIONS, Crossing, Direction
from polyhop.exchange.quantised import QuantisedMessages
from polyhop.graph import Block, HaloBlock, Reader, Sizes
from polyhop.kernels import quantised_bytes
from polyhop.nn.counts import quiet
from polyhop.strategies.data_cost import account_gradients
from polyhop.strategies.step import as_layered, forward_of

__all__ = [
    "Crossed",
    "Facts",
    "LayerFacts",
    "Seen",
    "account",
    "crossed",
    "crossings",
    "estimate",
    "expected",
]


@dataclass(frozen=True)
class Crossed:
    """One message of a step. Whole numbers where it is accounted, expectations where it is estimated."""

    layer: int
    direction: Direction
    peer: int
    num_rows: float  # sums included
    num_bytes: float


def crossed(
    channels: Sequence[Crossing], value_bytes: int = 4, seen: Sequence[Seen] | None = None
) -> list[Crossed]:
    """Every message that this rank sends in the next step; columns are known once one step was made.

    ``seen``: of each layer of the model (``crossings``), which says where rows need no gradients; None: nowhere.
    """
    found = []
    for channel in channels:
        assert channel.num_columns is not None, "columns are known once rows have crossed"
        for direction in DIRECTIONS if seen is None else seen[channel.spans.layer].directions:
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
class LayerFacts:
    """What crosses at one layer."""

    layer: int
    rows: Tensor  # float64 [P, P]: that rank i sends to rank j, sums included; their gradients return
    row_bytes: Mapping[
        Direction, Tensor
    ]  # float64 [P, P]: of a row from i to j, on average; no key: none crosses

    def leaving(self, direction: Direction) -> Tensor:
        """float64 [P, P]: rows from i to j."""
        return self.rows if direction == "forward" else self.rows.T


@dataclass(frozen=True, eq=False)
class Facts:
    """Known before the run; see ``halo_estimate.facts_of`` and ``facts_of_pairs``."""

    num_ranks: int
    layers: Sequence[LayerFacts]
    bucket_sizes: Sequence[int] = ()  # elements of each message of gradients of weights
    value_bytes: int = 4  # of a weight
    others: Sequence[Cost] = field(default_factory=tuple)  # of each rank, all other kinds; () = none


def expected(facts: Facts, rank: int) -> list[Crossed]:
    """Every message of rows that ``rank`` is expected to send in a step, as ``crossed`` has them."""
    return [
        Crossed(each.layer, direction, peer, num_rows, num_rows * size)
        for each in facts.layers
        for direction, sizes in each.row_bytes.items()
        for peer, (num_rows, size) in enumerate(
            zip(each.leaving(direction)[rank].tolist(), sizes[rank].tolist(), strict=True)
        )
        if num_rows and peer != rank
    ]


def estimate(facts: Facts, rank: int) -> Cost:
    """What ``rank`` is expected to send in a step: see the module's docstring for what that means for each option."""
    cost = account(expected(facts, rank), facts.bucket_sizes, facts.value_bytes, facts.num_ranks, rank)
    return cost + facts.others[rank] if facts.others else cost


@dataclass(frozen=True)
class Seen:
    """What crosses at a layer, whatever the graph."""

    columns: int = 0  # 0: nothing
    is_linear: bool = False  # sums of rows serve as well as rows
    has_gradient: bool = True  # gradients return
    value_bytes: int = 4

    @property
    def directions(self) -> tuple[Direction, ...]:
        return DIRECTIONS if self.has_gradient else DIRECTIONS[:1]


def crossings(
    model: nn.Module,
    num_features: int,
    sizes: Sizes,
    *,
    num_plain: int = 1,
    sends_narrow: bool = True,
    returns_inputs: bool = True,
) -> list[Seen]:
    """Of each layer; found by running the model, as it will be trained, on a part without rows.

    ``returns_inputs``: gradients return to the first layer's rows as to all others, whether or not they need them.
    """
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
        plain
        if at < num_plain
        else HaloBlock.of(
            plain, 0, channel, sizes, sends_narrow=sends_narrow, returns=at > 0 or returns_inputs
        )
        for at, channel in enumerate(noted)
    ]
    with torch.enable_grad(), quiet(model):
        forward_of(model)(parameter.new_empty(0, num_features), tuple(blocks), None)
    return [channel.seen for channel in noted]


class _Noted:
    """A channel that sends nothing and remembers what it was given."""

    seen = Seen()

    def leave(
        self, rows: Tensor, first: int, reader: Reader | None = None, sums: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
        columns = int(torch.Size(rows.shape[1:]).numel())
        is_linear = reader is not None and reader.is_linear
        self.seen = Seen(columns, is_linear, rows.requires_grad, rows.element_size())
        return rows, rows[first:], lambda: rows[:0]
