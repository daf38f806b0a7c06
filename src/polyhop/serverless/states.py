"""Where an interval is in its epoch: what it has computed, gathered and been given so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from polyhop.serverless.segments import Dense
from polyhop.serverless.versions import Ticket

__all__ = ["State"]


@dataclass
class State:
    """Of one interval, in one epoch."""

    epoch: int = -1
    version: Ticket | None = None
    values: dict[str, Any] = field(default_factory=dict)  # rows by name, of this epoch
    grads: dict[str, Tensor] = field(default_factory=dict)
    undropped: dict[str, Tensor] = field(default_factory=dict)  # rows that their readers drop units of
    undropped_grads: dict[str, Tensor] = field(default_factory=dict)
    kept: dict[int, Any] = field(default_factory=dict)  # of graph operations and saved arrays, by place
    weights: dict[str, list[Tensor]] = field(default_factory=dict)  # gradients of them, in pieces
    loss: float = 0.0

    def rows(self, segment: Dense) -> dict[str, Any]:
        """What a dense piece takes, as it travels."""
        found = {name: self.values[name] for name in segment.program.rows}
        return {name: value.numpy() if isinstance(value, Tensor) else value for name, value in found.items()}

    def add_grad(self, name: str, grad: Tensor) -> None:
        """A gradient of rows, beside those that are there; nothing is written to."""
        self.grads[name] = self.grads[name] + grad if name in self.grads else grad
