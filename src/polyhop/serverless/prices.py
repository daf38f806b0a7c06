"""What servers, functions and bytes cost: a dated table, read exactly, that users replace with their own file.

Every price is a ``Fraction``: what the file says, to the last digit. One GB is 2^30 bytes, as clouds bill it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

from polyhop.errors import ConfigError, unknown

__all__ = ["GB", "Egress", "Functions", "Prices", "Server", "load_prices"]

GB = 2**30
SHIPPED = Path(__file__).with_name("prices.json")


@dataclass(frozen=True)
class Server:
    """One kind of server."""

    name: str
    dollars_per_hour: Fraction
    vcpus: int
    memory_gib: Fraction
    network_gbit_s: Fraction
    gpus: int
    source: str

    @property
    def dollars_per_s(self) -> Fraction:
        return self.dollars_per_hour / 3600


@dataclass(frozen=True)
class Functions:
    """What functions cost and what is allowed to them."""

    dollars_per_gb_s: Mapping[str, Fraction]  # by processor: x86, arm
    dollars_per_request: Fraction
    step_ms: int
    least_mb: int
    most_mb: int
    step_mb: int
    mb_per_vcpu: int
    concurrency: int
    limit_s: int
    source: str

    def vcpus(self, memory_mb: int) -> Fraction:
        """The share of a processor that comes with memory."""
        return Fraction(memory_mb, self.mb_per_vcpu)

    def dollars_per_s(self, memory_mb: int, processor: str = "x86") -> Fraction:
        """Of one function that is alive."""
        return self.gb_s_price(processor) * Fraction(self.checked(memory_mb), 1024)

    def gb_s_price(self, processor: str) -> Fraction:
        if processor not in self.dollars_per_gb_s:
            raise ConfigError(unknown("processor of functions", processor, self.dollars_per_gb_s))
        return self.dollars_per_gb_s[processor]

    def checked(self, memory_mb: int) -> int:
        """The same memory, if functions come with it."""
        if not self.least_mb <= memory_mb <= self.most_mb or (memory_mb - self.least_mb) % self.step_mb:
            raise ConfigError(
                f"functions with {memory_mb} MB: expected {self.least_mb} to {self.most_mb} MB in steps of {self.step_mb}"
            )
        return memory_mb


@dataclass(frozen=True)
class Egress:
    """What it costs to send bytes over one kind of border."""

    name: str
    dollars_per_gb: Fraction
    source: str


@dataclass(frozen=True)
class Prices:
    """A table of prices and the day it holds for."""

    name: str
    date: date
    servers: Mapping[str, Server]
    step_s: int  # servers are billed in steps of
    least_s: int
    functions: Functions
    egress: Mapping[str, Egress]
    path: Path

    def server(self, kind: str) -> Server:
        if kind not in self.servers:
            raise ConfigError(f"{unknown('kind of server', kind, self.servers)} Prices: {self.path}")
        return self.servers[kind]

    def border(self, name: str) -> Egress:
        if name not in self.egress:
            raise ConfigError(f"{unknown('border', name, self.egress)} Prices: {self.path}")
        return self.egress[name]


def load_prices(path: str | os.PathLike[str] | None = None) -> Prices:
    """The table in a JSON file; without a path the one that ships with polyhop. ConfigError names a field that is wrong."""
    file = SHIPPED if path is None else Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"prices: {file} cannot be read ({error}); expected a JSON file like {SHIPPED}"
        ) from error
    try:
        found = json.loads(text, parse_float=Decimal, parse_constant=_no_constant)
    except ValueError as error:
        raise ConfigError(f"prices: {file} is not JSON ({error})") from error
    return _Table(found, f"prices: {file}").prices(file)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no price")


class _Table:
    """A JSON object whose fields are taken one by one, by what they must be; what is left over is an error."""

    def __init__(self, found: Any, where: str) -> None:
        if not isinstance(found, dict):
            raise ConfigError(f"{where}: expected an object, got {_told(found)}")
        self.found, self.where = found, where
        self.asked: set[str] = set()

    def prices(self, file: Path) -> Prices:
        text = self.text("date")
        try:
            day = date.fromisoformat(text)
        except ValueError:
            raise ConfigError(f"{self.where}: date is {text!r}; expected a day such as 2021-07-01") from None
        servers, egress = self.table("servers"), self.table("egress")
        self.text("note", "")
        made = Prices(
            name=self.text("name"),
            date=day,
            servers=servers.table("kinds").each(_server),
            step_s=servers.whole("step_s"),
            least_s=servers.whole("least_s", low=0),
            functions=_functions(self.table("functions")),
            egress=egress.each(_egress),
            path=file,
        )
        servers.text("source")
        servers.done()
        self.done()
        return made

    def each(self, make: Callable[[str, _Table], Any]) -> dict[str, Any]:
        """name -> what is made of the object under it."""
        return {str(name): make(str(name), self.table(name)) for name in self.found}

    def take(self, name: str) -> Any:
        self.asked.add(name)
        if name not in self.found:
            raise ConfigError(
                f"{self.where}: no {name}; it has {', '.join(map(str, self.found)) or 'nothing'}"
            )
        return self.found[name]

    def table(self, name: str) -> _Table:
        return _Table(self.take(name), f"{self.where}: {name}")

    def text(self, name: str, default: str | None = None) -> str:
        if default is not None and name not in self.found:
            self.asked.add(name)
            return default
        value = self.take(name)
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{self.where}: {name} is {_told(value)}; expected text")
        return value

    def price(self, name: str, *, is_free: bool = True) -> Fraction:
        """A number that is not negative, exactly as written."""
        value = self.take(name)
        if isinstance(value, bool) or not isinstance(value, int | Decimal):
            raise ConfigError(f"{self.where}: {name} is {_told(value)}; expected a number")
        if value < 0 or (value == 0 and not is_free):
            least = "0 or more" if is_free else "more than 0"
            raise ConfigError(f"{self.where}: {name} is {value}; expected {least}")
        return Fraction(value)

    def whole(self, name: str, *, low: int = 1, default: int | None = None) -> int:
        if default is not None and name not in self.found:
            self.asked.add(name)
            return default
        value = self.take(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ConfigError(
                f"{self.where}: {name} is {_told(value)}; expected a whole number, {low} or more"
            )
        return value

    def done(self) -> None:
        """Nothing else may stand here: a misspelt field would go unseen."""
        for name in self.found:
            if name not in self.asked:
                raise ConfigError(f"{self.where}: {unknown('field', str(name), self.asked)}")


def _told(value: Any) -> str:
    return repr(str(value)) if isinstance(value, str | Decimal) else json.dumps(value, default=str)


def _server(name: str, table: _Table) -> Server:
    made = Server(
        name=name,
        dollars_per_hour=table.price("dollars_per_hour"),
        vcpus=table.whole("vcpus"),
        memory_gib=table.price("memory_gib", is_free=False),
        network_gbit_s=table.price("network_gbit_s", is_free=False),
        gpus=table.whole("gpus", low=0, default=0),
        source=table.text("source"),
    )
    table.done()
    return made


def _functions(table: _Table) -> Functions:
    by_processor, memory = table.table("dollars_per_gb_s"), table.table("memory_mb")
    made = Functions(
        dollars_per_gb_s={str(name): by_processor.price(name) for name in by_processor.found},
        dollars_per_request=table.price("dollars_per_request"),
        step_ms=table.whole("step_ms"),
        least_mb=memory.whole("least"),
        most_mb=memory.whole("most"),
        step_mb=memory.whole("step"),
        mb_per_vcpu=table.whole("mb_per_vcpu"),
        concurrency=table.whole("concurrency"),
        limit_s=table.whole("limit_s"),
        source=table.text("source"),
    )
    if not made.dollars_per_gb_s:
        raise ConfigError(f"{by_processor.where}: expected a price for each processor, such as x86")
    memory.done()
    table.done()
    return made


def _egress(name: str, table: _Table) -> Egress:
    made = Egress(name, table.price("dollars_per_gb"), table.text("source"))
    table.done()
    return made
