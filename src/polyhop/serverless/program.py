"""Program: a straight line of ops that a function runs over rows, forward and backward, without knowing of what model.

Programs are values: they travel as plain dicts and lists, and are checked when they are made. ``tiles`` runs them.

Legend: n rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from polyhop.errors import InputError, unknown
from polyhop.serverless.ops import OPS, Attrs, Op, Shape

__all__ = ["Call", "Program", "Row", "Traffic"]

_KINDS = {"float": None, "ids": 8, "marks": 1, "sparse": None}  # bytes of a value, where the kind says it


@dataclass(frozen=True)
class Row:
    """What a program is given of each row: a shape, () for one value, and what the values are.

    ``float``; ``ids`` (int64: labels, edges); ``marks`` (uint8 or bool); ``sparse`` (``Ragged`` rows of so many columns).
    """

    shape: Shape
    kind: str = "float"
    is_fixed: bool = False  # nothing learnt comes before: no gradient is made

    @property
    def has_gradient(self) -> bool:
        return self.kind == "float" and not self.is_fixed


@dataclass(frozen=True)
class Call:
    """One op: values by name, rows first, then weights."""

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Attrs = field(default_factory=dict)

    @cached_property
    def what(self) -> Op:
        return OPS[self.op]

    @cached_property
    def settings(self) -> Attrs:
        """All attrs, with those that were not given."""
        return {**self.what.attrs, **self.attrs}

    def saved_name(self, name: str) -> str:
        """Under which the op's saved array is kept: the output's own name, where it is the output."""
        return self.outputs[0] if self.what.saves[name] == "out" else f"{self.outputs[0]}.{name}"


@dataclass(frozen=True)
class Traffic:
    """Bytes of a program's arrays; what crosses is up to the task."""

    rows: float
    weights: int
    outputs: int
    saved: int  # beside rows and outputs
    row_grads: int
    weight_grads: int


@dataclass(frozen=True)
class Program:
    """Rows and weights by name -> calls, one after another -> the named outputs. InputError if it makes no sense."""

    rows: Mapping[str, Row]
    weights: Mapping[str, Shape]
    calls: tuple[Call, ...]
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        for name, row in self.rows.items():
            if row.kind not in _KINDS:
                raise InputError(f"program, row {name!r}: " + unknown("kind", row.kind, _KINDS))
        both = sorted(self.rows.keys() & self.weights.keys())
        if both:
            raise InputError(f"program: {both[0]!r} is given twice, as a row and as a weight")
        _ = self.shapes  # says what is wrong with the calls
        for name in self.outputs:
            if name not in self.shapes or name in self.weights:
                raise InputError("program, outputs: " + unknown("value", name, self.shapes))
        if len(set(self.outputs)) != len(self.outputs):
            raise InputError(f"program: outputs {list(self.outputs)} name a value twice")

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Of every row and value, of a weight as a whole."""
        found = {name: row.shape for name, row in self.rows.items()} | dict(self.weights)
        added: set[str] = set()  # sums over rows
        for index, call in enumerate(self.calls):
            where = f"program, call {index} ({call.op})"
            if call.op not in OPS:
                raise InputError(f"{where}: " + unknown("op", call.op, OPS))
            _check_call(call, found, self, where)
            if summed := added.intersection(call.inputs):
                raise InputError(f"{where}: {min(summed)!r} is a sum over rows, which no op reads")
            try:
                shapes = call.what.shapes([found[name] for name in call.inputs], call.settings)
            except InputError as error:
                raise InputError(f"{where}: {error}") from None
            for name, shape in zip(call.outputs, shapes, strict=True):
                if name in found:
                    raise InputError(f"{where}: {name!r} is given twice")
                found[name] = shape
            if call.what.gives == "sums":
                added.update(call.outputs)
        return found

    @cached_property
    def is_whole(self) -> bool:
        """Whether an op needs all rows at once: then they cannot be taken in tiles."""
        return any(not call.what.is_rowwise for call in self.calls)

    @cached_property
    def sums(self) -> frozenset[str]:
        """Values that add up over rows."""
        return frozenset(name for call in self.calls if call.what.gives == "sums" for name in call.outputs)

    @cached_property
    def moving(self) -> frozenset[str]:
        """Values and rows and weights that have a gradient."""
        found = {name for name, row in self.rows.items() if row.has_gradient} | self.weights.keys()
        for call in self.calls:
            if any(name in found for name in call.inputs):
                found.update(call.outputs)
        return frozenset(found)

    @cached_property
    def saved_names(self) -> tuple[str, ...]:
        """What gradients read beside rows and weights: what forward may save, or backward computes again."""
        found: dict[str, None] = {}
        for call in self.calls:
            if not self.moving.isdisjoint(call.inputs):
                read = [call.inputs[at] for at in call.what.reads]
                found |= dict.fromkeys([*read, *map(call.saved_name, call.what.saves)])
        return tuple(name for name in found if name not in self.rows)

    @cached_property
    def recomputed(self) -> tuple[Call, ...]:
        """The calls that backward makes again where nothing was saved."""
        wanted, found = set(self.saved_names), list[Call]()
        for call in reversed(self.calls):
            made = {*call.outputs, *map(call.saved_name, call.what.saves)}
            if made & wanted:
                wanted.update(call.inputs)
                found.insert(0, call)
        return tuple(found)

    @cached_property
    def saved_widths(self) -> dict[str, Shape]:
        """Of each of ``saved_names``, the shape of a row."""
        widths = {
            call.saved_name(name): self.shapes[call.inputs[0]] if kind == "row" else ()
            for call in self.calls
            for name, kind in call.what.saves.items()
            if kind != "out"
        } | self.shapes
        return {name: widths[name] for name in self.saved_names}

    def saved_shapes(self, num_rows: int, dtype: Any = np.float32) -> dict[str, tuple[Shape, np.dtype[Any]]]:
        """Name -> shape and number format of what forward saves. Those that are outputs too need to leave once only."""
        if self.is_whole:
            raise InputError("program: what ops on edges save depends on the edges, not on a number of rows")
        return {name: ((num_rows, *width), np.dtype(dtype)) for name, width in self.saved_widths.items()}

    def flops(self, num_rows: int, num_set: float | None = None) -> float:
        """Of forward. ``num_set``: values in a sparse row, on average; None: all."""
        return num_rows * sum(self._flops(call, num_set) for call in self.calls)

    def backward_flops(
        self, num_rows: int, num_set: float | None = None, *, recomputes: bool = True
    ) -> float:
        """Of backward, with what it computes again."""
        total = sum(self._flops(call, num_set) for call in self.recomputed) if recomputes else 0.0
        for call in self.calls:
            moving = [name for name in call.inputs if name in self.moving]
            has_both = any(name in self.weights for name in moving) and any(
                name not in self.weights for name in moving
            )
            if moving:
                total += self._flops(call, num_set) * (2 if call.what.products and has_both else 1)
        return num_rows * total

    def traffic(self, num_rows: int, dtype: Any = np.float32, num_set: float | None = None) -> Traffic:
        """Bytes of all arrays; a value of a sparse row comes with its column (4 bytes), a row with its end (8)."""
        size: int = np.dtype(dtype).itemsize

        def row_bytes(name: str) -> float:
            row = self.rows.get(name)
            count = math.prod(self.shapes[name])
            if row is not None and row.kind == "sparse":
                return (size + 4.0) * (count if num_set is None else num_set) + 8
            return float((size if row is None else _KINDS[row.kind] or size) * count)

        counts = {call.outputs[1] for call in self.calls if call.what.gives == "sums"}
        outputs = sum(
            (8 if name in counts else size) if name in self.sums else int(num_rows * row_bytes(name))
            for name in self.outputs
        )
        kept = self.saved_shapes(num_rows, dtype).items()
        weights = size * sum(math.prod(shape) for shape in self.weights.values())
        return Traffic(
            rows=num_rows * sum(map(row_bytes, self.rows)),
            weights=weights,
            outputs=outputs,
            saved=sum(size * math.prod(shape) for name, (shape, _) in kept if name not in self.outputs),
            row_grads=int(
                sum(num_rows * row_bytes(name) for name, row in self.rows.items() if row.has_gradient)
            ),
            weight_grads=weights,
        )

    def _flops(self, call: Call, num_set: float | None) -> float:
        """Of one row."""
        flops: float = call.what.flops([self.shapes[name] for name in call.inputs])
        if "sparse" in call.what.kinds and num_set is not None:
            flops *= num_set / math.prod(self.shapes[call.inputs[0]])
        return flops

    def to_plain(self) -> dict[str, Any]:
        """Dicts, lists, strings and numbers."""
        return {
            "rows": {name: [list(row.shape), row.kind, row.is_fixed] for name, row in self.rows.items()},
            "weights": {name: list(shape) for name, shape in self.weights.items()},
            "calls": [
                [call.op, list(call.inputs), list(call.outputs), dict(call.attrs)] for call in self.calls
            ],
            "outputs": list(self.outputs),
        }

    @classmethod
    def from_plain(cls, given: Any) -> Program:
        """Back from ``to_plain``; InputError that says what is wrong where it came from elsewhere."""
        parts = _fields(given, ("rows", "weights", "calls", "outputs"))
        rows = {}
        for name, row in _of(dict, parts["rows"], "rows").items():
            shape, kind, is_fixed = _listed(row, 3, f"row {name!r}")
            rows[_of(str, name, "name of a row")] = Row(
                _shape(shape, name),
                _of(str, kind, f"kind of row {name!r}"),
                _of(bool, is_fixed, f"row {name!r}"),
            )
        weights = {
            _of(str, name, "name of a weight"): _shape(shape, name)
            for name, shape in _of(dict, parts["weights"], "weights").items()
        }
        calls = []
        for index, call in enumerate(_of(list, parts["calls"], "calls")):
            op, inputs, outputs, attrs = _listed(call, 4, f"call {index}")
            calls.append(
                Call(
                    _of(str, op, f"op of call {index}"),
                    _names(inputs, f"inputs of call {index}"),
                    _names(outputs, f"outputs of call {index}"),
                    _of(dict, attrs, f"attrs of call {index}"),
                )
            )
        return cls(rows, weights, tuple(calls), _names(parts["outputs"], "outputs"))


def _check_call(call: Call, known: Mapping[str, Shape], program: Program, where: str) -> None:
    """InputError where names, their number or the attrs do not fit the op."""
    op = call.what
    num_weights = len(call.inputs) - op.num_rows
    if num_weights not in op.num_weights:
        expected = " or ".join(str(op.num_rows + count) for count in op.num_weights)
        raise InputError(f"{where}: expected {expected} inputs, got {len(call.inputs)}: {list(call.inputs)}")
    if len(call.outputs) != op.num_outputs:
        raise InputError(f"{where}: expected {op.num_outputs} outputs, got {len(call.outputs)}")
    for at, name in enumerate(call.inputs):
        if name not in known:
            raise InputError(f"{where}: " + unknown("value", name, known))
        if (name in program.weights) == (at < op.num_rows):
            expected = "rows" if at < op.num_rows else "a weight"
            raise InputError(f"{where}: input {at} ({name!r}) must be {expected}")
        kind = program.rows[name].kind if name in program.rows else "float"
        wanted = op.kinds[at] if op.kinds and at < op.num_rows else "float"
        if kind != wanted:
            raise InputError(f"{where}: input {at} ({name!r}) must be of kind {wanted!r}, it is {kind!r}")
    for name, value in call.attrs.items():
        if name not in op.attrs:
            raise InputError(f"{where}: " + unknown("attr", name, op.attrs))
        default = op.attrs[name]
        is_number = type(value) in (int, float) and math.isfinite(value)
        if type(value) is not type(default) and not (type(default) is float and is_number):
            raise InputError(f"{where}: {name}={value!r}: expected a {type(default).__name__}")
        if type(value) is float and not math.isfinite(value):
            raise InputError(f"{where}: {name}={value!r}: expected a finite number")


def _of(kind: type, value: Any, what: str) -> Any:
    if type(value) is not kind:
        raise InputError(f"program, {what}: expected a {kind.__name__}, got {value!r}")
    return value


def _fields(given: Any, names: Sequence[str]) -> dict[str, Any]:
    _of(dict, given, "as it came")
    if given.keys() != set(names):
        raise InputError(f"program: expected the fields {', '.join(names)}, got {sorted(map(str, given))}")
    fields: dict[str, Any] = given
    return fields


def _listed(given: Any, length: int, what: str) -> list[Any]:
    found: list[Any] = _of(list, given, what)
    if len(found) != length:
        raise InputError(f"program, {what}: expected a list of {length}, got {found!r}")
    return found


def _names(given: Any, what: str) -> tuple[str, ...]:
    return tuple(_of(str, name, what) for name in _of(list, given, what))


def _shape(given: Any, name: Any) -> Shape:
    sizes: Iterable[Any] = _of(list, given, f"shape of {name!r}")
    if any(type(size) is not int or size < 0 for size in sizes):
        raise InputError(f"program, shape of {name!r}: expected whole numbers, got {given!r}")
    return tuple(sizes)
