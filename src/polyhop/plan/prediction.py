"""What a way to train is expected to take: one record for all strategies, each of which makes its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Memory", "Prediction"]

_ON_DEVICE = ("weights", "derived", "activations", "moments", "tables", "messages", "freed")


@dataclass(frozen=True)
class Memory:
    """Bytes of the rank that needs most, its process included."""

    training: float
    evaluation: float
    host: float = 0.0  # beside that of a rank's device: input rows that stay in the host's
    start: float = 0.0  # until the first step: the graph is loaded, parts are made
    spread: float = 0.0  # by which runs may need more
    items: Mapping[str, float] = field(default_factory=dict)  # of training, by name

    @property
    def most(self) -> float:
        """Of all phases."""
        return max(self.training, self.evaluation, self.start)

    @property
    def needed(self) -> float:
        """What must be there for a plan to be said to fit."""
        return self.most + self.spread

    @property
    def on_device(self) -> float:
        """Of training, where layers are computed on a device with memory of its own."""
        return sum(self.items.get(name, 0.0) for name in _ON_DEVICE)

    def to_json(self) -> dict[str, Any]:
        told = {name: getattr(self, name) for name in ("training", "evaluation", "host", "start", "spread")}
        return {**told, "items": dict(self.items)}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Memory:
        later = {name: given[name] for name in ("host", "start", "spread", "items") if name in given}
        return cls(given["training"], given["evaluation"], **later)


@dataclass(frozen=True)
class Prediction:
    """One way to train, with the numbers that it would be given."""

    strategy: str
    options: Mapping[str, Any]  # what ``Trainer`` is given for it
    name: str  # for people: the strategy and what sets it apart
    is_exact: bool  # the weights of one process on the same batches
    epoch_s: float  # of training alone
    parts: Mapping[str, float]  # what that is made of; overlapped parts add up to more
    memory: Memory
    sent: Mapping[str, float] = field(
        default_factory=dict
    )  # kind -> bytes an epoch, of the rank that sends most
    evaluate_s: float = 0.0
    dollars: float | None = None  # an epoch
    bound: str = ""  # what sets the pace, in words
    num_ranks: int = 1
    foreseen_s: float | None = None  # ``epoch_s`` before past runs corrected it; None: none did

    @property
    def sent_bytes(self) -> float:
        return sum(self.sent.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "strategy": self.strategy,
            "options": dict(self.options),
            "is_exact": self.is_exact,
            "epoch_s": self.epoch_s,
            "parts": dict(self.parts),
            "evaluate_s": self.evaluate_s,
            "memory_bytes": self.memory.to_json(),
            "bytes": dict(self.sent),
            "dollars": self.dollars,
            "bound": self.bound,
            "num_ranks": self.num_ranks,
            "foreseen_s": self.foreseen_s,
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Prediction:
        return cls(
            strategy=given["strategy"],
            options=given["options"],
            name=given["name"],
            is_exact=given["is_exact"],
            epoch_s=given["epoch_s"],
            parts=given["parts"],
            memory=Memory.from_json(given["memory_bytes"]),
            sent=given["bytes"],
            evaluate_s=given["evaluate_s"],
            dollars=given["dollars"],
            bound=given["bound"],
            num_ranks=given["num_ranks"],
            foreseen_s=given["foreseen_s"],
        )
