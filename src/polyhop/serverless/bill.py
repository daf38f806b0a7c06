"""The bill of a run, from what ran: exact, so that it is the same in any order and in any pieces.

    servers     hours of each kind, by the second          ceil_s(stop - start), 60 s at least, x price
    requests    one for each start of a function           x price
    functions   sum of ceil_ms(init + busy + parked)       x GB x price
    egress      bytes over each border                     x price

Times are milliseconds of any clock, whole or not; dollars are ``Fraction``. The prices say how large the steps are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from math import ceil, isfinite
from typing import Any

from polyhop.errors import InputError
from polyhop.serverless.prices import GB, Prices

__all__ = ["Bill", "EgressTrace", "FunctionTrace", "Milliseconds", "ServerTrace", "Trace", "bill"]

Milliseconds = int | float | Fraction
"""A float stands for exactly the number it holds."""


@dataclass(frozen=True)
class FunctionTrace:
    """One start of a function: it got ready in ``init_ms``, then answered from ``start_ms`` to ``end_ms``.

    ``busy_ms`` of that it worked, the rest it was parked: waiting for a lease and paid all the same.
    """

    start_ms: Milliseconds
    end_ms: Milliseconds
    init_ms: Milliseconds
    memory_mb: int
    busy_ms: Milliseconds | None = None  # None = all of it
    processor: str = "x86"
    num_tasks: int = 0

    def __post_init__(self) -> None:
        _ordered("function", self.start_ms, self.end_ms)
        if not isfinite(self.init_ms) or self.init_ms < 0:
            raise InputError(f"function: init_ms is {self.init_ms}; expected 0 or more")
        if self.busy_ms is not None and not 0 <= self.busy_ms <= self.alive_ms:
            raise InputError(
                f"function: busy_ms is {self.busy_ms} of {float(self.alive_ms):g} ms; expected a part of them"
            )

    @property
    def alive_ms(self) -> Fraction:
        return Fraction(self.end_ms) - Fraction(self.start_ms)

    @property
    def parked_ms(self) -> Fraction:
        return Fraction(0) if self.busy_ms is None else self.alive_ms - Fraction(self.busy_ms)


@dataclass(frozen=True)
class ServerTrace:
    """``count`` servers of one kind that ran for the same time; ``role`` tells graph servers from those of weights."""

    kind: str
    start_ms: Milliseconds
    end_ms: Milliseconds
    count: int = 1
    role: str = "graph"

    def __post_init__(self) -> None:
        _ordered(f"server {self.kind}", self.start_ms, self.end_ms)
        if self.count < 0:
            raise InputError(f"server {self.kind}: count is {self.count}; expected 0 or more")


@dataclass(frozen=True)
class EgressTrace:
    """Bytes that crossed a border that costs money."""

    border: str
    num_bytes: int

    def __post_init__(self) -> None:
        if self.num_bytes < 0:
            raise InputError(f"egress {self.border}: {self.num_bytes} bytes; expected 0 or more")


Trace = FunctionTrace | ServerTrace | EgressTrace


@dataclass(frozen=True)
class Bill:
    """What a run cost, in parts; bills add up."""

    servers: Mapping[str, Fraction] = field(default_factory=dict)  # "role kind" -> dollars
    server_s: int = 0  # billed, of all servers together
    requests: Fraction = Fraction(0)
    num_requests: int = 0
    functions: Fraction = Fraction(0)
    billed_ms: int = 0  # of all functions together
    init_ms: Fraction = Fraction(0)  # what the billed time was spent on, before rounding up
    busy_ms: Fraction = Fraction(0)
    parked_ms: Fraction = Fraction(0)
    egress: Mapping[str, Fraction] = field(default_factory=dict)  # border -> dollars
    egress_bytes: int = 0

    @property
    def dollars(self) -> Fraction:
        return (
            sum(self.servers.values(), Fraction(0))
            + self.requests
            + self.functions
            + sum(self.egress.values(), Fraction(0))
        )

    def __add__(self, other: Bill) -> Bill:
        mine, theirs = (
            {each.name: getattr(one, each.name) for each in fields(Bill)} for one in (self, other)
        )
        return Bill(**{name: _sum(mine[name], theirs[name]) for name in mine})

    def to_json(self) -> dict[str, Any]:
        """Plain values; dollars as decimal numbers, the total also exactly."""
        return {
            "dollars": float(self.dollars),
            "dollars_exact": str(self.dollars),
            "servers": {name: float(part) for name, part in sorted(self.servers.items())},
            "server_s": self.server_s,
            "requests": float(self.requests),
            "num_requests": self.num_requests,
            "functions": float(self.functions),
            "billed_ms": self.billed_ms,
            "init_ms": float(self.init_ms),
            "busy_ms": float(self.busy_ms),
            "parked_ms": float(self.parked_ms),
            "egress": {name: float(part) for name, part in sorted(self.egress.items())},
            "egress_bytes": self.egress_bytes,
        }

    def __str__(self) -> str:
        """A line for each part."""
        rows = [(f"servers {name}", part, "") for name, part in sorted(self.servers.items())]
        rows.append(("requests", self.requests, f"{self.num_requests:,}"))
        spent = ", ".join(
            f"{name} {float(part) / 1000:,.1f} s"
            for name, part in (("init", self.init_ms), ("busy", self.busy_ms), ("parked", self.parked_ms))
        )
        rows.append(("functions", self.functions, f"{self.billed_ms / 1000:,.3f} s billed ({spent})"))
        rows += [(f"egress {name}", part, "") for name, part in sorted(self.egress.items())]
        rows.append(("total", self.dollars, ""))
        margin = max(len(name) for name, _, _ in rows)
        return "\n".join(
            f"{name:<{margin}}  ${float(part):.6f}  {told}".rstrip() for name, part, told in rows
        )


def bill(traces: Iterable[Trace], prices: Prices) -> Bill:
    """What the traces cost together."""
    parts: dict[type, list[Any]] = {FunctionTrace: [], ServerTrace: [], EgressTrace: []}
    for trace in traces:
        parts[type(trace)].append(trace)
    return (
        _servers(parts[ServerTrace], prices)
        + _functions(parts[FunctionTrace], prices)
        + _egress(parts[EgressTrace], prices)
    )


def _servers(traces: list[ServerTrace], prices: Prices) -> Bill:
    seconds: dict[tuple[str, str], int] = {}
    for trace in traces:
        ran = Fraction(trace.end_ms) - Fraction(trace.start_ms)
        billed = max(ceil(ran / (1000 * prices.step_s)) * prices.step_s, prices.least_s)
        key = trace.role, trace.kind
        seconds[key] = seconds.get(key, 0) + trace.count * billed
    dollars = {
        f"{role} {kind}": count * prices.server(kind).dollars_per_s for (role, kind), count in seconds.items()
    }
    return Bill(servers=dollars, server_s=sum(seconds.values()))


def _functions(traces: list[FunctionTrace], prices: Prices) -> Bill:
    table = prices.functions
    billed: dict[tuple[int, str], int] = {}
    init, busy, parked = Fraction(0), Fraction(0), Fraction(0)
    for trace in traces:
        total = Fraction(trace.init_ms) + trace.alive_ms
        if trace.alive_ms > 1000 * table.limit_s:
            raise InputError(
                f"function: it answered for {float(trace.alive_ms) / 1000:g} s; the prices allow {table.limit_s} s"
            )
        key = table.checked(trace.memory_mb), trace.processor
        billed[key] = billed.get(key, 0) + ceil(total / table.step_ms) * table.step_ms
        init += Fraction(trace.init_ms)
        parked += trace.parked_ms
        busy += trace.alive_ms - trace.parked_ms
    dollars = sum(
        (ms * table.dollars_per_s(memory, processor) / 1000 for (memory, processor), ms in billed.items()),
        Fraction(0),
    )
    return Bill(
        requests=len(traces) * table.dollars_per_request,
        num_requests=len(traces),
        functions=dollars,
        billed_ms=sum(billed.values()),
        init_ms=init,
        busy_ms=busy,
        parked_ms=parked,
    )


def _egress(traces: list[EgressTrace], prices: Prices) -> Bill:
    sent: dict[str, int] = {}
    for trace in traces:
        sent[trace.border] = sent.get(trace.border, 0) + trace.num_bytes
    dollars = {name: Fraction(count, GB) * prices.border(name).dollars_per_gb for name, count in sent.items()}
    return Bill(egress=dollars, egress_bytes=sum(sent.values()))


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, Mapping):
        return {name: one.get(name, Fraction(0)) + other.get(name, Fraction(0)) for name in {**one, **other}}
    return one + other


def _ordered(what: str, start_ms: Milliseconds, end_ms: Milliseconds) -> None:
    if not (isfinite(start_ms) and isfinite(end_ms)):
        raise InputError(f"{what}: from {start_ms} to {end_ms} ms; expected numbers")
    if Fraction(end_ms) < Fraction(start_ms):
        raise InputError(f"{what}: ended at {end_ms} ms, before its start at {start_ms} ms")
