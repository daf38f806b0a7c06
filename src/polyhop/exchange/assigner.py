"""Widths chosen anew every few epochs, while training goes on, from the ranges that messages had.

One step before a change every rank begins to tell the others what its messages would add to the variance (4 bytes a
message), solves its share of the programmes (``widths``), tells the others the answers (a byte a message), and at the change
uses them: what is chosen depends on the seed and the data alone, never on how long anything took.

Legend: P ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyhop.comm import Collective
from polyhop.comm.probe import PairCosts
from polyhop.exchange.crossing import DIRECTIONS, Crossing, Direction
from polyhop.exchange.quantised import QuantisedMessages, Widths
from polyhop.exchange.widths import Channel, random_widths, solve
from polyhop.kernels.keys import Key

__all__ = ["RANDOM_MEAN", "Assigner", "Policy"]

RANDOM_MEAN = 4.0
"""Bits of a value, on average, of widths by lot."""


@dataclass(frozen=True)
class Policy:
    """How widths are chosen."""

    lam: float = 0.5  # 0: only time counts, 1: only variance
    group_size: int = 100  # messages with one width
    period: int = 50  # epochs between changes, at least 2
    first: int = 10  # epoch of the first one, at least 2
    widths: Sequence[int] = (2, 4, 8)
    model: str = "slowest"
    links: PairCosts | None = None  # None: all pairs alike
    is_random: bool = False  # widths by chance, for comparison

    def is_change(self, epoch: int) -> bool:
        return epoch >= self.first and (epoch - self.first) % self.period == 0


class Assigner:
    """For all channels of a rank; made by all ranks together. ``line`` is its own: it talks while others train."""

    def __init__(self, channels: Sequence[Crossing], line: Collective, policy: Policy) -> None:
        self._channels, self._line, self.policy = channels, line, policy
        self._counts = [_lent_by_all(channel, line) for channel in channels]
        # Of each channel's messages, what an error in them weighs at the other end; told once.
        self._weights: list[dict[Direction, list[Tensor]]] | None = None
        self._thread: threading.Thread | None = None
        self._found: list[dict[Direction, Widths]] = []
        self._is_waiting = False  # an answer of before the run was continued
        self.notes: list[str] = []  # what people may want to know
        self._error: BaseException | None = None
        self._messages = [_quantised(channel) for channel in channels]
        self._is_marked = False  # whether the trace has the present widths
        for messages in self._messages:
            messages.traces = True

    def begin_step(self, key: Key) -> None:
        """Called at the start of every step, before rows leave."""
        if self.policy.is_change(key.epoch) and (self._thread is not None or self._is_waiting):
            self._use()
            self.notes.append(
                f"bits from epoch {key.epoch + 1} on, mean of what rank {self._line.rank} sends: {self._told()}"
            )
        if not self._is_marked:
            self._mark(key.epoch)

    def end_step(self, key: Key) -> None:
        """Called after every step: a choice that is used in the step after the next begins here."""
        if self.policy.is_change(key.epoch + 2):
            self._begin(key)

    def close(self) -> None:
        """Wait for what is under way."""
        if self._thread is not None:
            self._thread.join()
        self._line.close()

    def state(self) -> dict[str, Tensor]:
        """Widths, ranges since they were chosen, and the answer that waits for its step. Waits for what is under way."""
        if self._thread is not None:
            self._thread.join()
        self._raise()
        kept: dict[str, Tensor] = {}
        for at, messages in enumerate(self._messages):
            kept |= _flat(messages.widths, f"{at}.now")
            kept |= {
                f"{at}.squares.{way}.{rank}": each
                for way, squares in messages.squares.items()
                for rank, each in enumerate(squares)
            }
        if self._thread is not None:
            for at, found in enumerate(self._found):
                kept |= _flat(found, f"{at}.next")
        return kept

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Put back what ``state`` gave."""
        ranks = range(self._line.num_ranks)
        for at, messages in enumerate(self._messages):
            for way, widths in _widths_of(tensors, f"{at}.now", len(ranks)).items():
                messages.set_widths(way, widths)
            messages.squares = {
                way: [tensors[f"{at}.squares.{way}.{rank}"] for rank in ranks]
                for way in DIRECTIONS
                if f"{at}.squares.{way}.0" in tensors
            }
        if "0.next.forward.leaving.0" in tensors:
            self._found = [_widths_of(tensors, f"{at}.next", len(ranks)) for at in range(len(self._messages))]
            self._is_waiting = True

    def _begin(self, key: Key) -> None:
        squares = [messages.take_squares() for messages in self._messages]
        weights = None
        if self._weights is None:
            weights = [{way: channel.weights(way) for way in DIRECTIONS} for channel in self._channels]
        self._thread = threading.Thread(
            target=self._choose, args=(squares, weights, key), name="assigner", daemon=True
        )
        self._thread.start()

    def _use(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self._thread, self._is_waiting = None, False
        self._raise()
        self._is_marked = False
        for messages, found in zip(self._messages, self._found, strict=True):
            for direction, widths in found.items():
                messages.set_widths(direction, widths)

    def _raise(self) -> None:
        """What went wrong in the thread."""
        if self._error is not None:
            raise self._error

    def _mark(self, epoch: int) -> None:
        """The trace has how many rows of each width leave from now on."""
        self._is_marked = True
        for messages in self._messages:
            for back, way in enumerate(DIRECTIONS):
                rows = torch.cat(messages.widths[way].leaving).bincount().tolist()
                counts = {f"bits{width}": count for width, count in enumerate(rows) if count}
                where = {"epoch": epoch + 1, "layer": messages.spans.layer, "backward": back}
                messages.spans.trace.counter("widths", **where, **counts)

    def _told(self) -> str:
        """The mean width of each channel's rows, there and back."""
        means = []
        for messages in self._messages:
            both = [torch.cat([each.float() for each in messages.widths[way].leaving]) for way in DIRECTIONS]
            text = " and ".join(f"{float(each.mean()):.1f}" if each.numel() else "-" for each in both)
            means.append(f"layer {messages.spans.layer} {text}")
        return ", ".join(means) + " (forward and backward)"

    def _choose(
        self,
        squares: list[dict[Direction, list[Tensor]]],
        weights: list[dict[Direction, Tensor]] | None,
        key: Key,
    ) -> None:
        try:
            if weights is not None:
                self._weights = [
                    {way: _told_to_senders(channel, way, each[way], self._line) for way in DIRECTIONS}
                    for channel, each in zip(self._channels, weights, strict=True)
                ]
            assert self._weights is not None
            asked = [
                self._asked(at, way, found.get(way), self._weights[at][way])
                for at, found in enumerate(squares)
                for way in DIRECTIONS
            ]
            # Each rank solves some of the programmes and tells the others.
            rank, size = self._line.rank, self._line.num_ranks
            solved = [
                self._chosen(programme, number, key) if number % size == rank else None
                for number, programme in enumerate(asked)
            ]
            told = [self._said(number, asked[number], own) for number, own in enumerate(solved)]
            self._found = [
                dict(zip(DIRECTIONS, told[2 * at : 2 * at + 2], strict=True)) for at in range(len(squares))
            ]
        except BaseException as error:
            self._error = error

    def _asked(
        self, at: int, direction: Direction, squares: list[Tensor] | None, weights: list[Tensor]
    ) -> _Programme:
        """All messages of one layer in one direction, the same on every rank."""
        channel, lent = self._channels[at], self._counts[at]
        counts = lent if direction == "forward" else lent.T  # [P, P]: rows that i sends to j
        assert channel.num_columns is not None
        if squares is None:  # nothing crossed, on no rank: the layer's input needs no gradient
            squares = [torch.zeros(k, dtype=torch.float64) for k in counts[self._line.rank].tolist()]
        own = torch.cat(squares) * torch.cat(weights)
        own = (own * channel.num_columns / 6).float().to(self._line.device)
        everyone = self._line.all_gather(own, kind="widths", counts=counts.sum(1).tolist())
        return _Programme(everyone, counts, channel.num_columns)

    def _said(self, number: int, programme: _Programme, own: Sequence[Any] | None) -> Widths:
        """What the rank that solved a programme found, on every rank: those of its own messages."""
        pairs = programme.pairs()
        sizes = list(pairs.values())
        rank, size, device = self._line.rank, self._line.num_ranks, self._line.device
        if own is None:
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        else:
            flat = torch.cat([torch.empty(0, dtype=torch.uint8), *map(torch.from_numpy, own)]).to(device)
        if sum(sizes):
            flat = self._line.broadcast(flat, kind="widths", source=number % size)
        rows = flat.cpu().split(sizes)  # type: ignore[no-untyped-call]
        of = dict(zip(pairs, rows, strict=True))
        none = torch.empty(0, dtype=torch.uint8)
        return Widths(
            [of.get((rank, q), none) for q in range(size)], [of.get((q, rank), none) for q in range(size)]
        )

    def _chosen(self, programme: _Programme, site: int, key: Key) -> Sequence[Any]:
        policy, size = self.policy, self._line.num_ranks
        channels = programme.channels(policy.links)
        if policy.is_random:
            return random_widths(channels, RANDOM_MEAN, key, site=site, widths=policy.widths)
        chosen, _ = solve(
            channels, policy.lam, num_ranks=size, group_size=policy.group_size, widths=policy.widths,
            model=policy.model,
        )  # fmt: skip
        return chosen.rows()


@dataclass(frozen=True, eq=False)
class _Programme:
    """What is known of all messages of one layer in one direction; only the rank that solves it looks at the numbers."""

    everyone: Sequence[
        Tensor
    ]  # of each rank: float32, beta of the rows that it sends, one receiver after the other
    counts: np.ndarray[Any, Any]  # int64 [P, P]: rows that i sends to j
    num_columns: int

    def pairs(self) -> dict[tuple[int, int], int]:
        """Rows of each message that has some."""
        return {
            (src, dst): count
            for src, row in enumerate(self.counts.tolist())
            for dst, count in enumerate(row)
            if count
        }

    def channels(self, links: PairCosts | None) -> list[Channel]:
        """In the order of ``pairs``."""
        found, starts = [], [0] * len(self.everyone)
        values = [each.cpu().double().numpy() for each in self.everyone]
        for (src, dst), count in self.pairs().items():
            costs = (1.0, 0.0) if links is None else (links.per_byte[src][dst], links.per_message[src][dst])
            beta = values[src][starts[src] : starts[src] + count]
            found.append(Channel(src, dst, beta, self.num_columns, *costs))
            starts[src] += count
        return found


def _flat(widths: dict[Direction, Widths], name: str) -> dict[str, Tensor]:
    return {
        f"{name}.{way}.{which}.{rank}": each
        for way, both in widths.items()
        for which in ("leaving", "arriving")
        for rank, each in enumerate(getattr(both, which))
    }


def _widths_of(tensors: dict[str, Tensor], name: str, num_ranks: int) -> dict[Direction, Widths]:
    return {
        way: Widths(
            *(
                [tensors[f"{name}.{way}.{which}.{rank}"] for rank in range(num_ranks)]
                for which in ("leaving", "arriving")
            )
        )
        for way in DIRECTIONS
        if f"{name}.{way}.leaving.0" in tensors
    }


def _quantised(channel: Crossing) -> QuantisedMessages:
    assert isinstance(channel.messages, QuantisedMessages), "only quantised messages have widths"
    return channel.messages


def _lent_by_all(channel: Crossing, line: Collective) -> np.ndarray[Any, Any]:
    """int64 [P, P]: rows that rank i lends to rank j in a layer."""
    own = torch.tensor(channel.lists.leaving("forward"), device=line.device)
    rows = line.all_gather(own, kind="sizes", counts=[line.num_ranks] * line.num_ranks)
    return torch.stack(rows).cpu().numpy()


def _told_to_senders(
    channel: Crossing, direction: Direction, weights: Tensor, line: Collective
) -> list[Tensor]:
    """float64, for each rank: what the rows that go to it weigh there. Each rank gives the weights of what comes to it."""
    arriving, leaving = channel.lists.arriving(direction), channel.lists.leaving(direction)
    pieces = list(weights.float().to(line.device).split(arriving))  # type: ignore[no-untyped-call]
    return [piece.cpu().double() for piece in line.all_to_all(pieces, kind="widths", counts=leaving)]
