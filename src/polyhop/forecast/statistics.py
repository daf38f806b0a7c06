"""A graph in numbers: what forecasts need to know of it where its edges are not at hand. A value, kept in a file.

    degrees   how many nodes have which in- and out-degree: a small histogram
    halo      of some numbers of parts, rows that parts read of one another, per node, and the share of edges that are cut
    seen      of some numbers of parts, what a part would sum, draw and read of others in one way of training: totals

Rows that are read grow with the number of parts P until edges are spread as if nodes lay at random. A node that k others
read is then read by H parts beside its own, and what a partition saves is how few of the edges are spread so, a share s:

    H(s, k, P)   (P - 1) (1 - (1 - s / P)^k)
    replicas     mean over nodes of H(s, k, P)
    log s        a line in log P through what was measured, from where it was measured last; never above 1

Legend: N nodes, P parts, M cells of the histogram.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyhop.errors import ConfigError, unknown
from polyhop.plan.files import replaced_whole

__all__ = ["GraphStatistics", "Measured", "Seen", "read_statistics", "write_statistics"]

_VERSION = 1
_ENDLESS = 1e300
_EXPONENT = 2.5  # of degrees, where nothing is said of them
_CELLS = 48  # of degrees made of an exponent
_LAST = 4  # measured numbers of parts that the line goes through


@dataclass(frozen=True)
class Measured:
    """Of one number of parts."""

    replicas: float  # rows that parts read of one another, per node
    cut: float | None = None  # share of the edges between parts; None: as many as replicas let expect
    sums: float = 0.7  # of such rows, or of their readers: left where sums cross (0.4 .. 0.9 measured)


@dataclass(frozen=True)
class Seen:
    """What parts would do in one way of training, name by name, per part on average."""

    what: str  # the way of training: fan-outs and batch, or what layers read
    num_parts: int
    totals: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class GraphStatistics:
    """Of a whole graph. Only the first five are needed."""

    num_nodes: int
    num_edges: int
    num_features: int
    num_classes: int
    num_train: int
    degrees: Sequence[tuple[float, float, float]] = ()  # (nodes, in-degree, out-degree) of each cell
    exponent: float | None = None  # of degrees, where they are not given
    halo: Mapping[int, float | Measured] = field(default_factory=dict)  # {}: as if nodes lay at random
    row_length: float | None = None  # values of a sparse input row; None: dense
    row_dtype: str = "float32"
    seen: Sequence[Seen] = ()
    name: str = "graph"
    partitioner: str = ""  # that halo was measured with
    is_computed: bool = False  # edges and rows are, when they are read: nothing of them is held

    def __post_init__(self) -> None:
        for name in ("num_nodes", "num_edges", "num_features", "num_classes"):
            _check_whole(name, getattr(self, name), 1)
        _check_whole("num_train", self.num_train, 0)
        if not 0 <= self.num_train <= self.num_nodes:
            raise ConfigError(
                f"statistics: num_train is {self.num_train}; expected 0 to {self.num_nodes:,}, the nodes"
            )
        if self.exponent is not None and not (_is_number(self.exponent) and self.exponent > 1):
            raise ConfigError(f"statistics: exponent is {self.exponent}; expected more than 1, mostly 2 to 3")
        for parts, each in self.halo.items():
            replicas = each.replicas if isinstance(each, Measured) else each
            _check_number(f"halo of {parts} parts", replicas)
            if parts < 2 or not 0 <= replicas <= parts - 1:
                raise ConfigError(
                    f"statistics: halo of {parts} parts is {replicas}; expected 2 parts or more and 0 to "
                    f"{max(1, parts - 1)} rows a node"
                )
            if isinstance(each, Measured):
                _check_number(f"cut of {parts} parts", 0.0 if each.cut is None else each.cut, 1.0)
                _check_number(f"sums of {parts} parts", each.sums)
        if self.row_length is not None:
            _check_number("row_length", self.row_length)
        if not isinstance(getattr(torch, str(self.row_dtype), None), torch.dtype):
            raise ConfigError(
                f"statistics: row_dtype is {self.row_dtype!r}; expected a dtype of torch, such as float32"
            )
        if not isinstance(self.is_computed, bool):
            raise ConfigError(f"statistics: is_computed is {self.is_computed!r}; expected true or false")
        _check_degrees(self.degrees)
        for seen in self.seen:
            _check_whole("num_parts of seen", seen.num_parts, 1)
            for name, total in seen.totals.items():
                _check_number(f"{name} of seen", total)

    @cached_property
    def cells(self) -> Tensor:
        """float64 [M, 3]: nodes, in-degree, out-degree; as many nodes and edges as the graph has."""
        given = torch.tensor(list(self.degrees), dtype=torch.float64).reshape(-1, 3)
        if not self.degrees:
            given = _spread(self.num_edges / self.num_nodes, self.exponent or _EXPONENT)
        given = given * torch.tensor([self.num_nodes / float(given[:, 0].sum()), 1.0, 1.0])
        for side in (1, 2):
            given[:, side] *= self.num_edges / float((given[:, 0] * given[:, side]).sum())
        return given

    def replicas(self, num_parts: int) -> float:
        """Rows that so many parts read of one another, per node."""
        if num_parts < 2:
            return 0.0
        if num_parts in self.halo:
            return _measured(self.halo[num_parts]).replicas
        return self.expected_replicas(self.spread(num_parts), num_parts)

    def spread(self, num_parts: int) -> float:
        """s: the share of edges that lie as if at random."""
        return min(1.0, _line(self._spreads, num_parts)) if num_parts > 1 else 0.0

    def cut(self, num_parts: int) -> float:
        """Share of the edges between parts."""
        if num_parts < 2:
            return 0.0
        given = {
            parts: each.cut * parts / (parts - 1)
            for parts, each in self._measured.items()
            if each.cut is not None
        }
        share = min(1.0, _line(given, num_parts)) if given else self.spread(num_parts)
        least = (
            self.replicas(num_parts) * self.num_nodes / self.num_edges
        )  # every such row is read once at the least
        return min(1.0, max(least, share * (num_parts - 1) / num_parts))

    def sums(self, num_parts: int) -> float:
        """Left of rows where sums may cross: as measured for the nearest number of parts."""
        near = min(self._measured, key=lambda parts: abs(math.log(parts / num_parts)), default=None)
        return Measured(0.0).sums if near is None else self._measured[near].sums

    def expected_replicas(self, spread: float, num_parts: int) -> float:
        nodes, _, readers = self.cells.unbind(1)
        read = (num_parts - 1) * -torch.expm1(readers * math.log1p(-min(spread / num_parts, 1 - 1e-12)))
        return float((nodes * read).sum() / nodes.sum())

    @cached_property
    def _measured(self) -> dict[int, Measured]:
        return {parts: _measured(self.halo[parts]) for parts in sorted(self.halo)}

    @cached_property
    def _spreads(self) -> dict[int, float]:
        return {parts: self._spread_of(each.replicas, parts) for parts, each in self._measured.items()} or {
            2: 1.0
        }

    def _spread_of(self, replicas: float, num_parts: int) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            is_less = self.expected_replicas(middle, num_parts) < replicas
            low, high = (middle, high) if is_less else (low, middle)
        return max(high, 1e-9)

    def to_json(self) -> dict[str, Any]:
        halo = {str(parts): asdict(each) for parts, each in self._measured.items()}
        return asdict(self) | {"version": _VERSION, "halo": halo}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> GraphStatistics:
        """Of the fields of a file, of which the first five are needed."""
        held = {name: value for name, value in given.items() if name != "version"}
        known = [each.name for each in fields(cls)]
        for name in held:
            if name not in known:
                raise ConfigError(f"statistics: {unknown('field', name, known)}")
        halo = {
            int(parts): Measured(**each) if isinstance(each, Mapping) else each
            for parts, each in held.get("halo", {}).items()
        }
        seen = tuple(Seen(**each) for each in held.get("seen", ()))
        degrees = tuple(tuple(cell) for cell in held.get("degrees", ()))
        return cls(**{**held, "halo": halo, "seen": seen, "degrees": degrees})


def _measured(given: float | Measured) -> Measured:
    return given if isinstance(given, Measured) else Measured(float(given))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _ENDLESS


def _check_number(name: str, value: object, most: float = math.inf) -> None:
    if not (_is_number(value) and 0 <= value <= most):  # type: ignore[operator]
        bounds = "0 or more" if math.isinf(most) else f"0 to {most:g}"
        raise ConfigError(f"statistics: {name} is {value!r}; expected a number, {bounds}")


def _check_whole(name: str, value: object, least: int) -> None:
    if not (_is_number(value) and isinstance(value, int) and value >= least):
        raise ConfigError(f"statistics: {name} is {value!r}; expected a whole number, {least} or more")


def _check_degrees(given: Sequence[Sequence[float]]) -> None:
    for cell in given:
        if len(cell) != 3:
            raise ConfigError(
                f"statistics: degrees have {list(cell)}; expected [nodes, in-degree, out-degree]"
            )
        for value in cell:
            if not (_is_number(value) and value >= 0):
                raise ConfigError(f"statistics: degrees have {value!r}; expected a number, 0 or more")
    if given and not all(sum(cell[0] * cell[side] for cell in given) > 0 for side in (1, 2)):
        raise ConfigError("statistics: degrees have no nodes or no edges; expected both, or no degrees")


def _spread(mean: float, exponent: float) -> Tensor:
    """float64 [M, 3]: as many nodes have a degree as its power says, from the least to a thousand times that."""
    edges = torch.logspace(0, 3, _CELLS + 1, dtype=torch.float64)
    below = edges ** (1 - exponent)
    nodes, middle = below[:-1] - below[1:], (edges[:-1] * edges[1:]).sqrt()
    degree = middle * mean * nodes.sum() / (nodes * middle).sum()
    return torch.stack([nodes, degree, degree], dim=1)


def _line(given: Mapping[int, float], num_parts: int) -> float:
    """At so many parts: between two that were measured a line in logarithms; beyond them the line through the last few."""
    known = sorted(given)
    if num_parts in given:
        return given[num_parts]
    if len(known) == 1:
        return given[known[0]]
    if num_parts > known[-1]:
        return given[known[-1]] * math.pow(num_parts / known[-1], _slope(given, known[-_LAST:]))
    at = max(i for i, parts in enumerate(known[:-1]) if parts < num_parts or i == 0)
    slope = _slope(given, known[at : at + 2])
    return given[known[at]] * math.pow(num_parts / known[at], slope)


def _slope(given: Mapping[int, float], among: Sequence[int]) -> float:
    x = [math.log(parts) for parts in among]
    y = [math.log(max(given[parts], 1e-12)) for parts in among]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    found = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return found / sum((a - mean_x) ** 2 for a in x)


def write_statistics(given: GraphStatistics, file: Path) -> None:
    """ConfigError where it cannot be written."""
    try:
        with replaced_whole(file) as beside:
            beside.write_text(json.dumps(given.to_json(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"statistics: {file} cannot be written ({error.strerror or error}); give another file"
        ) from error


def read_statistics(file: Path) -> GraphStatistics:
    """ConfigError if it is no such file."""
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
        if about["version"] != _VERSION:
            raise ConfigError(
                f"statistics: has version {about['version']}, this is {_VERSION}: make it again"
            )
        return GraphStatistics.from_json(about)
    except ConfigError as error:
        raise ConfigError(str(error).replace("statistics:", f"statistics: {file}:", 1)) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"statistics: {file} is not a file of 'polyhop plan NAME --statistics-out FILE' ({error})"
        ) from error
