"""Keys of the counter-based generator: randomness is a function, not a stream.

A draw is ``philox(key, id, other)``. The 64-bit key folds (seed, purpose, epoch, step, site); ``id`` is the user's global
node id; ``other`` is a column block, a draw block or the other endpoint. The same key gives the same draw in any process, on
any number of threads, on any device.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

__all__ = ["Key", "Purpose", "fold"]

_MASK = (1 << 64) - 1


class Purpose(IntEnum):
    """What a draw decides. Numbers are part of the run format: never reuse one."""

    SHUFFLE = 1
    SAMPLE = 2
    DROPOUT = 3
    ATTENTION_DROPOUT = 4
    ROUND = 5
    SYNTH = 6
    INIT = 7
    PARTITION = 8
    BOUNDARY = 9


def _mix(z: int) -> int:
    """Finaliser of splitmix64: a bijection of 64 bits."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def fold(*parts: int) -> int:
    """Fold integers, in order, into one 64-bit key."""
    key = 0
    for part in parts:
        key = _mix((key + 0x9E3779B97F4A7C15 + (part & _MASK)) & _MASK)
    return key


@dataclass(frozen=True)
class Key:
    """Where training stands: enough to name every random choice of one step."""

    seed: int
    epoch: int = 0
    step: int = 0

    def at(self, purpose: Purpose, site: int = 0) -> int:
        """The 64-bit key of one purpose at one site (a layer's index in the model)."""
        return fold(self.seed, purpose, self.epoch, self.step, site)
