"""What a way to train is expected to take: one record for all strategies, each of which makes its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Memory", "Prediction"]


@dataclass(frozen=True)
class Memory:
    """Bytes of the rank that needs most, its process included."""

    training: float
    evaluation: float
    host: float = 0.0  # beside that of a rank's device: input rows that stay in the host's

    @property
    def most(self) -> float:
        return max(self.training, self.evaluation)


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
            "memory_bytes": {
                "training": self.memory.training,
                "evaluation": self.memory.evaluation,
                "host": self.memory.host,
            },
            "bytes": dict(self.sent),
            "dollars": self.dollars,
            "bound": self.bound,
            "num_ranks": self.num_ranks,
            "foreseen_s": self.foreseen_s,
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Prediction:
        memory = given["memory_bytes"]
        return cls(
            strategy=given["strategy"],
            options=given["options"],
            name=given["name"],
            is_exact=given["is_exact"],
            epoch_s=given["epoch_s"],
            parts=given["parts"],
            memory=Memory(memory["training"], memory["evaluation"], memory.get("host", 0.0)),
            sent=given["bytes"],
            evaluate_s=given["evaluate_s"],
            dollars=given["dollars"],
            bound=given["bound"],
            num_ranks=given["num_ranks"],
            foreseen_s=given["foreseen_s"],
        )
