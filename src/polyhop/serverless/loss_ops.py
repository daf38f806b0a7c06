"""Losses in numpy alone: a sum over the rows that are trained on, and how many they are.

Legend: n rows, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from polyhop.errors import InputError

__all__ = [
    "binary_cross_entropy",
    "binary_cross_entropy_gradient",
    "binary_cross_entropy_shapes",
    "cross_entropy",
    "cross_entropy_gradient",
    "cross_entropy_shapes",
    "sigmoid",
]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Attrs: TypeAlias = Mapping[str, Any]
Inputs: TypeAlias = Sequence[Any]
Shape: TypeAlias = tuple[int, ...]


def cross_entropy_shapes(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    """Of a row: of what is given -> of what is made."""
    if len(shapes[0]) != 1 or shapes[1] != ():
        raise InputError(
            f"expected logits [n, C] and labels [n], got rows of {list(shapes[0])} and {list(shapes[1])}"
        )
    return ((), ())


def binary_cross_entropy_shapes(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    """Of a row: of what is given -> of what is made."""
    if len(shapes[0]) != 1 or shapes[1] != shapes[0] or shapes[2] != ():
        raise InputError(
            "expected logits [n, C], targets [n, C] and a mask [n], got rows of "
            + ", ".join(str(list(shape)) for shape in shapes)
        )
    return ((), ())


def cross_entropy(inputs: Inputs, attrs: Attrs) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Logits [n, C], labels [n] (-1: not trained on) -> the summed loss times ``scale``, the number of rows counted."""
    logits, labels = inputs
    counted = np.flatnonzero(labels != -1)
    chosen = labels[counted]
    if counted.size and not (chosen.min() >= 0 and chosen.max() < logits.shape[1]):
        raise InputError(
            f"cross_entropy: labels span {chosen.min()}..{chosen.max()}, there are {logits.shape[1]} classes "
            "(0 ..; -1 = not trained on)"
        )
    shifted = logits - logits.max(axis=1, keepdims=True)
    p = np.exp(shifted)
    total = p.sum(axis=1, keepdims=True)
    p /= total
    each = np.log(total[counted, 0]) - shifted[counted, chosen]
    scale = logits.dtype.type(attrs["scale"])
    return (np.asarray(each.sum() * scale), np.asarray(counted.size)), (p,)


def cross_entropy_gradient(
    grads: Sequence[Array | None],
    saved: Sequence[Array],
    inputs: Inputs,
    attrs: Attrs,
    wanted: Sequence[bool],
) -> Sequence[Array | None]:
    """[n, C]; none for labels."""
    (p,), labels = saved, inputs[1]
    counted = np.flatnonzero(labels != -1)
    found = np.zeros_like(p)
    found[counted] = p[counted]
    found[counted, labels[counted]] -= 1
    found *= _factor(p, attrs, grads[0])
    return [found, None]


def binary_cross_entropy(inputs: Inputs, attrs: Attrs) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Logits, 0/1 targets [n, C], mask [n] -> the summed loss of the masked rows times ``scale``, their number."""
    logits, targets, mask = inputs
    counted = np.flatnonzero(mask)
    x, y = logits[counted], targets[counted].astype(logits.dtype)
    each = np.maximum(x, 0) - x * y + np.log1p(np.exp(-np.abs(x)))
    scale = logits.dtype.type(attrs["scale"])
    return (np.asarray(each.sum() * scale), np.asarray(counted.size)), (sigmoid(logits),)


def binary_cross_entropy_gradient(
    grads: Sequence[Array | None],
    saved: Sequence[Array],
    inputs: Inputs,
    attrs: Attrs,
    wanted: Sequence[bool],
) -> Sequence[Array | None]:
    """[n, C]; none for targets and mask."""
    (p,), (_, targets, mask) = saved, inputs
    counted = np.flatnonzero(mask)
    found = np.zeros_like(p)
    found[counted] = p[counted] - targets[counted].astype(p.dtype)
    found *= _factor(p, attrs, grads[0])
    return [found, None, None]


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), value by value."""
    power = np.exp(-np.abs(x))  # at most 1: never overflows
    out: Array = np.where(x >= 0, 1, power) / (1 + power)
    return out


def _factor(p: Array, attrs: Attrs, grad: Array | None) -> Any:
    assert grad is not None, "a call is skipped where nothing reads its output"
    return p.dtype.type(attrs["scale"] * float(grad))
