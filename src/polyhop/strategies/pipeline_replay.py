"""Randomness that is not keyed, drawn twice alike: layers of other libraries drop units by torch's own generators.

polyhop's dropout is keyed by ids and needs none of this. A generator's state is kept only where it was used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["Randomness"]


class Randomness:
    """States of torch's generators before something was computed; none, where it drew nothing."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []

    @classmethod
    @contextmanager
    def noted(cls, device: torch.device) -> Iterator[Randomness]:
        """What is drawn inside can be drawn ``again``."""
        found, before = cls(), _states(device)
        yield found
        if not all(map(torch.equal, before, _states(device))):
            found.states = before

    @staticmethod
    @contextmanager
    def undrawn(device: torch.device) -> Iterator[None]:
        """What is drawn inside is not missed afterwards."""
        with Randomness.noted(device) as found:
            yield
        if found.states:
            _set(device, found.states)

    @contextmanager
    def again(self, device: torch.device) -> Iterator[None]:
        """Inside, the same is drawn; afterwards generators are as before."""
        if not self.states:
            yield
            return
        before = _states(device)
        _set(device, self.states)
        try:
            yield
        finally:
            _set(device, before)


def _states(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _set(device: torch.device, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)
