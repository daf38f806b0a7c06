"""Ways to make messages small that training does not have, as stand-ins: ranks pass what the other end would decode, and
the bytes that it would have taken are counted. Section ``additions`` compares them.

    Direct    rows as they are, in so many bits
    Delta     what a row has moved since the values that both ends hold of it, or the row itself where that is narrower
    Kept      only columns that dropout kept: the other end knows which, because dropout is keyed by node ids
    Undropped rows before dropout, which the other end applies itself, as deltas; gradients as Kept

Legend: k rows of a message, F columns, b bits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import polyhop.nn.model as models
from polyhop.comm import Collective
from polyhop.exchange.crossing import Crossing, Direction, Messages, taken
from polyhop.graph import HaloBlock
from polyhop.kernels import dequantise_rows, dropout, quantise_rows
from polyhop.kernels.keys import Purpose, fold

__all__ = ["Delta", "Direct", "Kept", "Seen", "Undropped", "dropouts_noted", "install"]

_PARAMETERS = 4  # bytes of a row: zero point and step


@dataclass(frozen=True)
class Dropped:
    """A dropout of this step: rows before it [n, F] (after a relu), the user's ids [n], how much, by which key."""

    rows: Tensor
    ids: Tensor
    p: float
    key: int

    def mask(self, ids: Tensor) -> Tensor:
        """bool [k, F] of any rows of the graph: what is kept."""
        return dropout(torch.ones(ids.numel(), self.rows.shape[1]), ids, self.p, self.key) != 0


_HERE = threading.local()  # ranks are threads


@contextmanager
def dropouts_noted() -> Iterator[None]:
    """Inside, every model's dropouts between layers are seen by the coders of the same thread."""
    plain = models.dropout

    def noted(h: Tensor, ids: Tensor | None, p: float, key: int, **more: Any) -> Tensor:
        before = torch.relu(h.detach()) if more.get("relu") else h.detach().clone()
        out = plain(h, ids, p, key, **more)
        if ids is not None and p > 0:
            _HERE.last = (Dropped(before, ids, p, key), out.data_ptr())
        return out

    setattr(models, "dropout", noted)  # noqa: B010
    try:
        yield
    finally:
        setattr(models, "dropout", plain)  # noqa: B010


@dataclass
class Seen:
    """What crossed one way at one layer since the last look."""

    num_bytes: float = 0.0
    error: float = 0.0  # squared, summed
    size: float = 0.0  # squared, summed
    num_rows: int = 0
    deltas: int = 0  # rows that crossed as such

    @property
    def relative(self) -> float:
        return (self.error / self.size) ** 0.5 if self.size else 0.0


@dataclass
class _Told:
    """What both ends of a layer's messages know."""

    line: Collective
    halo_ids: list[Tensor]  # of the rows that come from each rank; sums: -1
    own_ids: list[Tensor]  # of those that go
    dropped: Dropped | None = None  # rows are the output of this
    seen: dict[Direction, Seen] = field(default_factory=dict)


class Direct(Messages):
    """b bits a value."""

    def __init__(self, channel: Crossing, told: _Told, bits: int) -> None:
        super().__init__(channel.lists, channel.spans)
        self.bits, self.told = bits, told

    def pack(self, direction: Direction, rows: Tensor, rank: int, sums: Tensor | None = None) -> list[Tensor]:
        if direction == "forward":
            last = getattr(_HERE, "last", None)
            self.told.dropped = last[0] if last is not None and last[1] == rows.data_ptr() else None
        return super().pack(direction, rows, rank, sums)

    def packed(self, direction: Direction, rows: Tensor, ids: Tensor | None, rank: int, to: int) -> Tensor:
        values = rows if ids is None else taken(rows, ids)
        if not values.shape[0]:
            return values
        key = fold(self.key.at(Purpose.ROUND, self.spans.layer), direction == "forward", rank, to)
        named = (self.told.own_ids if direction == "forward" else self.told.halo_ids)[to]
        seen = self.told.seen.setdefault(direction, Seen())
        true, arrives, size = self.coded(direction, values, named, to, key, seen)
        seen.num_bytes += size
        seen.num_rows += len(values)
        seen.error += float((arrives.double() - true.double()).square().sum())
        seen.size += float(true.double().square().sum())
        return arrives.to(values)

    def coded(
        self, direction: Direction, values: Tensor, ids: Tensor, to: int, key: int, seen: Seen
    ) -> tuple[Tensor, Tensor, float]:
        """(what should arrive [k, F], what does, bytes)."""
        return values, rounded(values, self.bits, key), _bytes(values, self.bits)


class Delta(Direct):
    """Both ends hold the rows as they arrived last, [k, F] for each rank and way. The first
    time in 8 bits; then every ``refresh`` epochs, unless 0, each row once."""

    def __init__(self, channel: Crossing, told: _Told, bits: int, refresh: int = 0) -> None:
        super().__init__(channel, told, bits)
        self.refresh = refresh
        self.held: dict[tuple[Direction, int], Tensor] = {}

    def coded(
        self, direction: Direction, values: Tensor, ids: Tensor, to: int, key: int, seen: Seen
    ) -> tuple[Tensor, Tensor, float]:
        arrives, size = self.moved(direction, values, to, key, seen)
        return values, arrives, size

    def moved(
        self, direction: Direction, values: Tensor, to: int, key: int, seen: Seen
    ) -> tuple[Tensor, float]:
        held = self.held.get((direction, to))
        if held is None:
            arrives, size = rounded(values, 8, key), _bytes(values, 8)
        else:
            moved = values - held
            is_delta = _range(moved) < _range(values)
            source = torch.where(is_delta[:, None], moved, values)
            arrives = rounded(source, self.bits, key) + held * is_delta[:, None]
            size = _bytes(values, self.bits)  # where a row is a difference is said in bits that are free
            seen.deltas += int(is_delta.sum())
            if self.refresh:
                again = (torch.arange(len(values)) + self.key.epoch) % self.refresh == 0
                arrives[again] = rounded(values[again], 8, key)
                size += _bytes(values[again], 8) - _bytes(values[again], self.bits)
        self.held[direction, to] = arrives
        return arrives, size


class Kept(Direct):
    """Values of kept columns alone, one after another. Sums of rows, and rows that no dropout made, cross as they are.

    A gradient is needed only where the row was kept: the rest is lost in the owner's dropout.
    """

    def coded(
        self, direction: Direction, values: Tensor, ids: Tensor, to: int, key: int, seen: Seen
    ) -> tuple[Tensor, Tensor, float]:
        dropped = self.told.dropped
        if dropped is None:
            return super().coded(direction, values, ids, to, key, seen)
        is_row = ids >= 0
        mask = torch.ones_like(values, dtype=torch.bool)
        mask[is_row] = dropped.mask(ids[is_row])
        true = values * mask
        arrives = _rounded_where(true, mask, self.bits, key)
        sizes = (mask.sum(1) * self.bits + 7) // 8 + (_PARAMETERS if self.bits < 16 else 0)
        return true, arrives, float(sizes.sum())


class Undropped(Kept, Delta):
    """Forward: the rows before dropout as ``Delta``, dropped where they arrive; for rows alone, not for sums."""

    def __init__(self, channel: Crossing, told: _Told, bits: int, refresh: int = 0) -> None:
        Delta.__init__(self, channel, told, bits, refresh)

    def coded(
        self, direction: Direction, values: Tensor, ids: Tensor, to: int, key: int, seen: Seen
    ) -> tuple[Tensor, Tensor, float]:
        dropped = self.told.dropped
        if dropped is None or direction == "backward":
            return Kept.coded(self, direction, values, ids, to, key, seen)
        before = taken(dropped.rows, self.lists.lent[to])
        arrives, size = self.moved(direction, before, to, key, seen)
        return values, dropout(arrives, ids, dropped.p, dropped.key), size


def install(step: Any, line: Collective, kind: type[Direct], *given: Any) -> list[_Told]:
    """Every channel of a step sends by these from now on. All ranks call it together."""
    found = []
    blocks = [block for block in step._blocks if isinstance(block, HaloBlock)]
    for channel, block in zip(step._channels.channels, blocks, strict=True):
        sums = channel.lists.sums_by_rank
        own = [
            torch.cat([block.src_ids[ids], torch.full((more,), -1)])
            for ids, more in zip(channel.lists.lent, sums, strict=True)
        ]
        halo = line.all_to_all(own, kind="ids", counts=channel.lists.wanted)
        told = _Told(line, list(halo), own)
        channel.messages = kind(channel, told, *given)
        found.append(told)
    return found


def rounded(values: Tensor, bits: int, key: int) -> Tensor:
    """As they arrive in b bits."""
    if bits == 32 or not values.shape[0]:
        return values
    widths = torch.full((len(values),), bits, dtype=torch.uint8)
    values = values.contiguous()
    return dequantise_rows(quantise_rows(values, widths, key), widths, values.shape[1])


def _rounded_where(values: Tensor, mask: Tensor, bits: int, key: int) -> Tensor:
    """As they arrive in b bits; ends of a row are those of its kept values."""
    if bits == 32:
        return values
    low = torch.where(mask, values, torch.inf).amin(1, keepdim=True)
    low = torch.where(low.isfinite(), low, 0.0)
    return rounded(torch.where(mask, values, low), bits, key) * mask


def _range(values: Tensor) -> Tensor:
    return values.amax(1) - values.amin(1)


def _bytes(values: Tensor, bits: int) -> float:
    rows, columns = values.shape
    return float(rows * (-(-columns * bits // 8) + (_PARAMETERS if bits < 16 else 0)))
