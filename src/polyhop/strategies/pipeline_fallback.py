"""Fewer, larger chunks where history has become too far off: decided while a pipeline trains, by all ranks alike.

Every ``EVERY`` epochs all ranks sum up how far the history was off that was read in the last one, and how large it should
have been. Where the relative error is above the bound, twice as many chunks go through a stage's layers together from then
on: as if there were half as many, each twice as large; at last all of them, which is exact, and stages work one after
another. With several ways a stage, as many chunks of each. What was decided is in the state, so a run that goes on does the
same."""

from __future__ import annotations

import torch

from polyhop.comm import Collective
from polyhop.strategies.pipeline_history import Meter

__all__ = ["EVERY", "Fallback"]

EVERY = 5
"""Epochs between looks."""


class Fallback:
    """``together``: chunks of each way that go through a layer before any goes on. ``bound`` None: never looks.

    ``num_chunks``: of the way that has most.
    """

    def __init__(self, bound: float | None, num_chunks: int, num_ways: int = 1) -> None:
        self._bound, self._num_chunks, self._num_ways = bound, num_chunks, num_ways
        self.together = 1

    def look(self, epoch: int, meter: Meter, line: Collective) -> str | None:
        """After an epoch: what was changed, in words; None: nothing. All ranks call it together."""
        if self._bound is None or (epoch + 1) % EVERY or self.together >= self._num_chunks:
            return None
        own = torch.tensor([meter.error, meter.size], dtype=torch.float64, device=line.device)
        error, size = line.all_reduce(own, kind="sizes").tolist()
        found = (error / size) ** 0.5 if size else 0.0
        if found <= self._bound:
            return None
        self.together = min(2 * self.together, self._num_chunks)
        what = (
            "all chunks go through a layer before any goes on, which is exact"
            if self.together == self._num_chunks
            else f"{self.together} chunks{' of each way' if self._num_ways > 1 else ''} go through a layer together"
        )
        return f"from epoch {epoch + 2} on {what}: history was off by {found:.2f} of its size, above {self._bound:g}"
