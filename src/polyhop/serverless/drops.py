"""Which units dropout drops of the rows of intervals, and of their gradients.

After a dense piece, of the interval's own rows. Where a sum may read old rows, of the rows that it reads instead: so it is
the units of the reader's epoch. Other units are an error that does not shrink with the steps of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from polyhop.kernels import dropout
from polyhop.kernels.keys import Key, Purpose
from polyhop.serverless.graph_ops import Drop, GraphOp, Sum
from polyhop.serverless.intervals import Interval
from polyhop.serverless.segments import Dense, Segment

__all__ = ["Drops"]


class Drops:
    """``may_be_old``: rows that graph operations read."""

    def __init__(
        self,
        chain: Sequence[Segment],
        ops: Mapping[int, GraphOp],
        seed: int,
        rate: float,
        may_be_old: bool,
    ) -> None:
        self._chain, self._ops = chain, ops
        self._seed, self._rate, self._may_be_old = seed, rate, may_be_old

    def at_read(self, place: int) -> bool:
        """Whether a graph operation drops units of the rows that it reads."""
        before = self._chain[place - 1]
        return (
            self._may_be_old
            and self._rate > 0
            and isinstance(self._ops.get(place), Sum)
            and isinstance(before, Dense)
            and before.drops is not None
        )

    def of_sources(self, interval: Interval, place: int, epoch: int) -> Drop | None:
        """What an interval drops of the rows that a graph operation reads, and of their gradients."""
        before = self._chain[place - 1]
        if not self.at_read(place):
            return None
        assert isinstance(before, Dense)
        assert before.drops is not None
        ids = interval.block.src_ids
        code = Key(self._seed, epoch).at(Purpose.DROPOUT, before.drops)
        return lambda rows: dropout(rows, ids, self._rate, code)

    def after(self, segment: Dense, interval: Interval, epoch: int, rows: Tensor) -> Tensor:
        """Rows, or their gradients, with the units dropped that an epoch drops after a piece."""
        if segment.drops is None or not self._rate:
            return rows
        code = Key(self._seed, epoch).at(Purpose.DROPOUT, segment.drops)
        return dropout(rows, interval.block.dst_ids(), self._rate, code)
