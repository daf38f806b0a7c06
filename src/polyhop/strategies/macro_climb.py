"""Windows of other sizes tried while a run trains: the model of ``macro_plan`` says where to begin, the clock where to stay.

From k, four times as many mini-batches are tried, and so on while that is faster; if the first try is not, a quarter, and
so on. What was measured decides, not what was foreseen, and of sizes that are as fast the smallest: smaller windows start
sooner and leave more memory to the pool. Pure: seconds go in, sizes come out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["Climb"]

_STRIDE = 4
_GAIN = 0.98  # times the best so far, at most: faster, not luck
_NEAR = 1.02  # times the best: as fast


class Climb:
    """One search, the same on all ranks if they are told the same.

    ``sizes``: all that may be chosen, ascending, ``k`` among them.
    """

    def __init__(self, k: int, sizes: Sequence[int]) -> None:
        self.k, self._sizes = k, list(sizes)
        self.paces: dict[int, float] = {}  # seconds of a mini-batch in windows of each size
        self.is_settled = False
        self._is_rising = True

    def tell(self, pace: float, may_try: Callable[[int], bool]) -> int:
        """The size to go on with, after so many seconds for each mini-batch in windows of ``k``.

        ``may_try``: whether a size fits, and the run is long enough to find out.
        """
        best = min(self.paces.values(), default=None)
        self.paces[self.k] = pace
        start = next(iter(self.paces))
        is_faster = best is None or pace <= _GAIN * best
        following = self._next(self.k, may_try) if is_faster else None
        if (
            following is None
            and self._is_rising
            and (self.k == start or (not is_faster and len(self.paces) == 2))
        ):
            self._is_rising = False  # nothing larger is there, or is faster: are smaller ones?
            following = self._next(start, may_try)
        if following is None:
            self.is_settled = True
            fastest = min(self.paces.values())
            following = min(k for k, seconds in self.paces.items() if seconds <= _NEAR * fastest)
        self.k = following
        return following

    def _next(self, k: int, may_try: Callable[[int], bool]) -> int | None:
        """The size farthest from ``k`` within a stride, in the direction of the search, that may be tried."""
        if self._is_rising:
            within = [size for size in self._sizes if k < size <= _STRIDE * k]
        else:
            within = [size for size in reversed(self._sizes) if k > size >= k / _STRIDE]
        return next((size for size in reversed(within) if may_try(size)), None)
