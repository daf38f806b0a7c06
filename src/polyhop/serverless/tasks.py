"""One task on a function: arrays as they came -> arrays as they go. Numpy only.

    forward            rows -> outputs (and what backward would compute again, where the server keeps it)
    loss               rows and labels -> the loss, gradients of rows, gradients of weights, all at once
    backward           rows, gradients of outputs -> gradients of rows, gradients of weights

Names on the wire: rows and outputs by their own; ``g:`` gradient of a row or an output; ``d:`` gradient of a weight; ``s:``
saved by forward for backward. Sparse rows are three arrays: ``NAME/indptr``, ``NAME/indices``, ``NAME/values``. All arrays
of a task may arrive in blocks of rows (``stream``); the bits of the result are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, tee
from typing import Any, TypeAlias

import numpy as np

from polyhop.errors import InputError
from polyhop.serverless.program import Program
from polyhop.serverless.ragged import Ragged
from polyhop.serverless.tiles import Arriving, backward, forward, loss_and_backward
from polyhop.serverless.wire import Array

__all__ = ["FUSES", "SAVES", "flat", "run_task"]

FUSES, SAVES = "fuses", "saves"
"""Options of a task: the loss and its gradients at once; what forward saves goes with the result."""

_SPARSE = ("indptr", "indices", "values")


def flat(rows: Mapping[str, Any]) -> dict[str, Array]:
    """Rows as arrays: sparse ones in three."""
    found: dict[str, Array] = {}
    for name, value in rows.items():
        if isinstance(value, Ragged):
            found |= {f"{name}/{part}": getattr(value, part) for part in _SPARSE}
        else:
            found[name] = value
    return found


_Task: TypeAlias = Mapping[str, Array] | Iterable[Mapping[str, Array]]
"""Arrays of a task by name; or blocks of them, one after another, as they arrive."""


def _rows(program: Program, arrays: Mapping[str, Array]) -> dict[str, Any]:
    """What a program reads, of the arrays of a task or of a block."""
    found: dict[str, Any] = {}
    for name, row in program.rows.items():
        if row.kind == "sparse":
            missing = [part for part in _SPARSE if f"{name}/{part}" not in arrays]
            if missing:
                raise InputError(f"task: {name}/{missing[0]} is missing")
            indptr, indices, values = (arrays[f"{name}/{part}"] for part in _SPARSE)
            found[name] = Ragged(indptr, indices, values, row.shape[0])
        elif name not in arrays:
            raise InputError(f"task: {name!r} is missing; given: {', '.join(arrays) or 'nothing'}")
        else:
            found[name] = arrays[name]
    return found


def _marked(arrays: Mapping[str, Array], mark: str) -> dict[str, Array]:
    return {name[2:]: value for name, value in arrays.items() if name.startswith(mark)}


class _Given:
    """What a task gives: rows, gradients of outputs and saved arrays, each at once or in blocks of the same rows."""

    def __init__(self, program: Program, arrays: _Task) -> None:
        if isinstance(arrays, Mapping):
            self.rows: Arriving = _rows(program, arrays)
            self.grads: Arriving = _marked(arrays, "g:")
            self.saved: Arriving | None = _marked(arrays, "s:") or None
            self.grad_names = None
            return
        checked = _checked(program, arrays)
        first = next(checked)
        rows, grads, saved = tee(chain([first], checked), 3)
        self.rows = (each["rows"] for each in rows)
        self.grads = (each["grads"] for each in grads) if first["grads"] else {}
        self.saved = (each["saved"] for each in saved) if first["saved"] else None
        self.grad_names = tuple(first["grads"])


def _checked(program: Program, blocks: Iterable[Mapping[str, Array]]) -> Iterator[dict[str, dict[str, Any]]]:
    """Blocks as they come, sorted by what they are; InputError where arrays of one are not of the same rows."""
    for at, block in enumerate(blocks):
        if at:
            block = {n: _with_zero(v) if n.endswith("/indptr") else v for n, v in block.items()}
        found = {"rows": _rows(program, block), "grads": _marked(block, "g:"), "saved": _marked(block, "s:")}
        counts = {array.shape[0] for each in found.values() for array in each.values()}
        if len(counts) != 1:
            raise InputError(
                f"task: the arrays of block {at} have {sorted(counts)} rows, expected one number"
            )
        yield found


def _with_zero(ends: Array) -> Array:
    """Of the sparse rows of a further block, which travel without it."""
    return np.concatenate([np.zeros(1, ends.dtype), ends])


def run_task(
    program: Program,
    is_backward: bool,
    arrays: _Task,
    weights: Mapping[str, Array],
    wants: Sequence[str] = (),
    options: Mapping[str, float] | None = None,
    *,
    num_rows: int | None = None,
) -> tuple[dict[str, Array], dict[str, float]]:
    """(arrays of the result, values of it). ``wants``: rows whose gradients are sent. Of blocks ``num_rows`` is told."""
    asked, given = options or {}, _Given(program, arrays)
    if asked.get(FUSES):
        outputs, row_grads, weight_grads = loss_and_backward(program, given.rows, weights, num_rows=num_rows)
        return _gradients(row_grads, weight_grads, wants), _values(outputs, program)
    if is_backward:
        grads = given.grads
        if program.outputs and program.outputs[0] in program.sums:
            grads = {program.outputs[0]: np.ones(())}
        row_grads, weight_grads = backward(
            program, given.rows, weights, grads, saved=given.saved, num_rows=num_rows, grad_names=given.grad_names
        )  # fmt: skip
        return _gradients(row_grads, weight_grads, wants), {}
    outputs, kept = forward(program, given.rows, weights, keeps=bool(asked.get(SAVES)), num_rows=num_rows)
    values = _values(outputs, program)
    found = {name: value for name, value in outputs.items() if name not in program.sums}
    return found | {f"s:{name}": value for name, value in kept.items()}, values


def _gradients(
    rows: Mapping[str, Array], weights: Mapping[str, Array], wants: Sequence[str]
) -> dict[str, Array]:
    return {f"g:{name}": rows[name] for name in wants} | {
        f"d:{name}": value for name, value in weights.items()
    }


def _values(outputs: Mapping[str, Array], program: Program) -> dict[str, float]:
    return {name: float(outputs[name]) for name in program.outputs if name in program.sums}
