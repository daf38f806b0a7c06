"""One task on a function: arrays as they came -> arrays as they go. Numpy only.

    forward            rows -> outputs (and what backward would compute again, where the server keeps it)
    loss               rows and labels -> the loss, gradients of rows, gradients of weights, all at once
    backward           rows, gradients of outputs -> gradients of rows, gradients of weights

Names on the wire: rows and outputs by their own; ``g:`` gradient of a row or an output; ``d:`` gradient of a weight; ``s:``
saved by forward for backward. Sparse rows are three arrays: ``NAME/indptr``, ``NAME/indices``, ``NAME/values``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polyhop.errors import InputError
from polyhop.serverless.program import Program
from polyhop.serverless.ragged import Ragged
from polyhop.serverless.tiles import backward, forward, loss_and_backward
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


def _rows(program: Program, arrays: Mapping[str, Array]) -> dict[str, Any]:
    """What a program reads, of the arrays of a task."""
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


def run_task(
    program: Program,
    is_backward: bool,
    arrays: Mapping[str, Array],
    weights: Mapping[str, Array],
    wants: Sequence[str] = (),
    options: Mapping[str, float] | None = None,
) -> tuple[dict[str, Array], dict[str, float]]:
    """(arrays of the result, values of it). ``wants``: rows whose gradients are sent."""
    asked = options or {}
    rows = _rows(program, arrays)
    if asked.get(FUSES):
        outputs, row_grads, weight_grads = loss_and_backward(program, rows, weights)
        return _gradients(row_grads, weight_grads, wants), _values(outputs, program)
    if is_backward:
        saved = _marked(arrays, "s:") or None
        grads: dict[str, Any] = _marked(arrays, "g:")
        if program.outputs and program.outputs[0] in program.sums:
            grads = {program.outputs[0]: np.ones(())}
        row_grads, weight_grads = backward(program, rows, weights, grads, saved=saved)
        return _gradients(row_grads, weight_grads, wants), {}
    outputs, kept = forward(program, rows, weights, keeps=bool(asked.get(SAVES)))
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
