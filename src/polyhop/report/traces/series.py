"""Values that vary over time, in one size of memory: when there are too many moments, every second one goes."""

from __future__ import annotations

__all__ = ["Series"]

_MOMENTS = 2048


class Series:
    """``moments``: (seconds, values), ascending; the last one told is always among them."""

    def __init__(self, max_moments: int = _MOMENTS) -> None:
        self._max, self._apart_s = max_moments, 0.0
        self.moments: list[tuple[float, dict[str, float]]] = []

    def add(self, at: float, values: dict[str, float]) -> None:
        """A newer moment."""
        if len(self.moments) > 1 and at - self.moments[-2][0] < self._apart_s:
            self.moments.pop()  # too near to the one before: this one is newer
        self.moments.append((at, values))
        if len(self.moments) > self._max:
            self.moments = [*self.moments[:-1:2], self.moments[-1]]
            self._apart_s = 2 * (at - self.moments[0][0]) / self._max
