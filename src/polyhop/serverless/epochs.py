"""Epochs of a server: which of them an interval may begin, how old the rows may be that it reads, and what came of each.

``staleness`` None (``pipe``): an epoch is begun when it is due, and reads rows of that epoch alone. S >= 0: an epoch may be
begun while one up to S before it is due, and rows are at most S + 1 epochs old. The first epoch of a run is always run as
``pipe``, since before it there is nothing to read; so are the first and the last ``pipe_epochs``, and nobody goes past one
that is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["Epoch", "Epochs", "Totals", "groups_of"]


@dataclass
class Epoch:
    """What came of an epoch on this server: of all intervals, or of a group."""

    loss: float = 0.0
    gradients: dict[str, Tensor] = field(default_factory=dict)


class Epochs:
    """Of the intervals with these numbers. ``last``: no epoch is begun after it."""

    def __init__(
        self, numbers: Iterable[int], staleness: int | None, pipe_epochs: int = 0, last: int | None = None
    ) -> None:
        self._numbers, self._staleness = tuple(numbers), staleness
        self._pipe_epochs, self._last = pipe_epochs, last
        self._first: int | None = None  # epoch of this run
        self._due, self._limit = -1, -1
        self._begun: dict[int, int] = {}
        self._finished: dict[int, int] = {}
        self.ahead: list[int] = []  # intervals that may begin an epoch that is not due

    def go(self, epoch: int) -> None:
        """An epoch is due. The first that is due is the first begun."""
        if self._first is None:
            self._first = epoch
            self._begun = dict.fromkeys(self._numbers, epoch - 1)
            self._finished = dict(self._begun)
        self._due, self._limit, self.ahead = epoch, self.furthest(epoch), []

    def follow(self, number: int) -> bool:
        """Whether the next epoch of an interval is due. If it is not but may be begun, the interval is ``ahead``."""
        following = self._finished[number] + 1
        if self._begun[number] == following or (self._last is not None and following > self._last):
            return False
        if following == self._due:
            return True
        if following <= self._limit:
            self.ahead.append(number)
        return False

    def begin(self, number: int) -> int:
        """The epoch that an interval begins now."""
        self._begun[number] = self._finished[number] + 1
        return self._begun[number]

    def end(self, number: int) -> int:
        """The epoch that an interval has ended now."""
        self._finished[number] = self._begun[number]
        return self._finished[number]

    def is_ahead(self, epoch: int) -> bool:
        """Whether an epoch that is begun now is not due: its weights are not there yet."""
        return epoch > self._due

    @property
    def ended_by_all(self) -> int:
        """The newest epoch that no interval has left to do."""
        return min(self._finished.values())

    def bound(self, epoch: int) -> int | None:
        """Epochs that rows may be older, less one; None: rows of this epoch alone."""
        is_early = epoch == self._first or epoch < self._pipe_epochs
        is_late = self._last is not None and epoch > self._last - self._pipe_epochs
        return None if is_early or is_late else self._staleness

    def furthest(self, epoch: int) -> int:
        """The epoch that intervals may begin while this one is due. None goes past one that is run as ``pipe``."""
        furthest = epoch
        while (bound := self.bound(furthest)) is not None and furthest < epoch + bound:
            furthest += 1
        return furthest

    def is_readable(self, tag: int, epoch: int) -> bool:
        """Whether rows of an epoch (``tag``) may be read in another."""
        bound = self.bound(epoch)
        return tag == epoch if bound is None else tag >= epoch - bound - 1 and tag >= 0


class Totals:
    """Losses and gradients of weights, summed in the order of intervals, whichever ended first; of each group for itself."""

    def __init__(self, numbers: Sequence[int], num_groups: int = 1) -> None:
        self.groups = dict(zip(numbers, groups_of(len(numbers), num_groups), strict=True))
        self.sizes = Counter(self.groups.values())
        self._ended: dict[tuple[int, int], list[tuple[int, float, Mapping[str, Sequence[Tensor]]]]] = {}

    def add(self, epoch: int, number: int, loss: float, gradients: Mapping[str, Sequence[Tensor]]) -> bool:
        """What an interval gave in an epoch, by weight; True: all of its group have ended that epoch."""
        group = self.groups[number]
        ended = self._ended.setdefault((epoch, group), [])
        ended.append((number, loss, gradients))
        return len(ended) == self.sizes[group]

    def summed(self, epoch: int, group: int) -> Epoch:
        """Of all of a group; the memory of the first gradient of each weight becomes that of the sum."""
        found = Epoch()
        for _, loss, gradients in sorted(self._ended.pop((epoch, group)), key=lambda each: each[0]):
            found.loss += loss
            for name, pieces in gradients.items():
                for tensor in pieces:
                    if name in found.gradients:
                        found.gradients[name].add_(tensor)
                    else:
                        found.gradients[name] = tensor
        return found


def groups_of(num_intervals: int, num_groups: int) -> list[int]:
    """The group of each interval: consecutive ones, as many in each as can be."""
    return [at * num_groups // num_intervals for at in range(num_intervals)]
