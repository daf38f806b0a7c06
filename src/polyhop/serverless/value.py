"""Which way of training is worth its money: value = 1 / (time x cost), and what two ways are to each other.

Twice as fast at the same cost, or as fast at half the cost, is twice the value. A way can be dearer and of more value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polyhop.errors import InputError
from polyhop.serverless.prices import Prices, Server

__all__ = [
    "Outcome",
    "Ratios",
    "best",
    "break_even_share",
    "functions_cost",
    "mean_functions",
    "ratios",
    "servers_cost",
]


@dataclass(frozen=True)
class Outcome:
    """One way of training: what it takes and costs, for an epoch or for a whole run."""

    name: str
    seconds: float
    dollars: float

    def __post_init__(self) -> None:
        if self.seconds <= 0 or self.dollars <= 0:
            raise InputError(f"{self.name}: {self.seconds} s and ${self.dollars}; a value needs both above 0")

    @property
    def value(self) -> float:
        """1 / (s x $)."""
        return 1 / (self.seconds * self.dollars)


@dataclass(frozen=True)
class Ratios:
    """How many times faster, cheaper and better in value one way is than another."""

    speed: float
    saving: float
    value: float


def ratios(one: Outcome, other: Outcome) -> Ratios:
    """``one`` against ``other``: above 1 is for ``one``."""
    return Ratios(other.seconds / one.seconds, other.dollars / one.dollars, one.value / other.value)


def best(outcomes: Sequence[Outcome]) -> Outcome:
    """That of the most value; of equals the first."""
    return max(outcomes, key=lambda outcome: outcome.value)


def servers_cost(server: Server, count: int, seconds: float) -> float:
    """Dollars of servers for any time, as published figures count them: not rounded up."""
    return float(count * server.dollars_per_s) * seconds


def functions_cost(
    prices: Prices, memory_mb: int, num_functions: float, seconds: float, processor: str = "x86"
) -> float:
    """Dollars of so many functions that are alive all that time, without the price of their requests."""
    return float(prices.functions.dollars_per_s(memory_mb, processor)) * num_functions * seconds


def mean_functions(
    prices: Prices, memory_mb: int, dollars: float, seconds: float, processor: str = "x86"
) -> float:
    """How many functions were alive on average if they cost so much."""
    return dollars / functions_cost(prices, memory_mb, 1, seconds, processor)


def break_even_share(prices: Prices, server: Server, processor: str = "x86", *, speed: float = 1.0) -> float:
    """The share of an epoch below which functions are the cheaper place for tensor work.

    A server is paid all the time, a function only while it works, but more for each second of a processor: functions pay
    where they are needed for less than this share. ``speed``: tensor work that a processor of a function does, per that of
    one of a server. The network counts nothing here.
    """
    table = prices.functions
    of_function = table.gb_s_price(processor) * table.mb_per_vcpu / 1024
    return float(server.dollars_per_s / server.vcpus / of_function) * speed
