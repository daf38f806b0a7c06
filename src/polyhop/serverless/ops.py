"""One table: the name of an op -> how it is computed and how its gradient is, in numpy alone.

A function package holds this file in place of torch. Ops take rows first, then weights; each row is computed by itself, so
rows may come in any grouping. The losses (in ``loss_ops``) add up over rows, ``edge_softmax`` (in ``edge_ops``) reads edges.

Numbers keep their format: float32 rows give float32 results.

Legend: n rows, F columns in, G columns out, H heads, C channels per head or classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from polyhop.errors import InputError
from polyhop.serverless import edge_ops, loss_ops
from polyhop.serverless.ragged import Ragged

__all__ = ["OPS", "Array", "Attrs", "Op", "Shape"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Shape: TypeAlias = tuple[int, ...]
Attrs: TypeAlias = Mapping[str, Any]
Inputs: TypeAlias = Sequence[Any]
Forward: TypeAlias = Callable[[Inputs, Attrs], tuple[tuple[Array, ...], tuple[Array, ...]]]
Gradient: TypeAlias = Callable[
    [Sequence[Array | None], Sequence[Array], Inputs, Attrs, Sequence[bool]], Sequence[Array | None]
]


@dataclass(frozen=True)
class Op:
    """``forward(inputs, attrs)`` -> (outputs, saved); ``gradient(grads, saved, inputs, attrs, wanted)`` -> one an input.

    A gradient of an output is None where nothing reads it; one of an input is None where it is not ``wanted`` or there is
    none. To ``gradient``, rows that are not among ``reads`` may be None.
    """

    forward: Forward
    gradient: Gradient
    shapes: Callable[
        [Sequence[Shape], Attrs], tuple[Shape, ...]
    ]  # of a row's inputs -> of its outputs; or InputError
    num_rows: int = 1  # inputs that are rows; weights follow
    num_weights: tuple[int, ...] = (0,)  # how many may follow
    num_outputs: int = 1
    reads: tuple[int, ...] = ()  # rows that ``gradient`` reads
    saves: Mapping[str, Literal["out", "row", "one"]] = field(default_factory=dict)
    """Name -> what forward saves: its first output, an array as wide as its first input, or one value a row."""
    attrs: Attrs = field(default_factory=dict)  # name -> the value where none is given
    kinds: tuple[str, ...] = ()  # of the rows: float, ids, marks, sparse; () = all float
    gives: Literal["rows", "sums"] = "rows"  # sums are added up over rows
    is_rowwise: bool = True  # False: needs all its rows at once
    flops: Callable[[Sequence[Shape]], float] = lambda shapes: float(math.prod(shapes[0]))  # of a row
    products: bool = False  # as many again for each gradient: of the rows and of the weights


# Shapes of a row


def _require(is_so: bool, message: str) -> None:
    if not is_so:
        raise InputError(message)


def _same(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    _require(len(shapes[0]) == 1, f"expected rows [n, F], got rows of shape {list(shapes[0])}")
    for other in shapes[1:]:
        _require(
            other == shapes[0], f"expected {list(shapes[0])} for all inputs, got {[list(s) for s in shapes]}"
        )
    return (shapes[0],)


def _linear_shapes(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    row, weight = shapes[:2]
    _require(
        len(row) == 1 and len(weight) == 2 and weight[1] == row[0],
        f"a weight {list(weight)} cannot multiply rows of shape {list(row)}: expected [G, F] and [F]",
    )
    _require(
        len(shapes) == 2 or shapes[2] == weight[:1],
        f"expected a bias {[weight[0]]}, got {list(shapes[-1])}",
    )
    return (weight[:1],)


def _mean_heads_shapes(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    heads = attrs["heads"]
    _same(shapes, attrs)
    _require(
        heads >= 1 and shapes[0][0] % heads == 0,
        f"{shapes[0][0]} columns cannot be those of {heads} heads",
    )
    return ((shapes[0][0] // heads,),)


def _scores_shapes(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    row, src, dst = shapes
    _require(
        len(row) == 1 and len(src) == 3 and src == dst and src[0] == 1 and src[1] * src[2] == row[0],
        f"expected two attention vectors [1, H, C] for rows [n, H * C], got {list(src)}, {list(dst)} and {list(row)}",
    )
    return ((src[1],), (src[1],))


# Products


def _linear(inputs: Inputs, attrs: Attrs) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    out = inputs[0] @ inputs[1].T
    if len(inputs) == 3:
        out += inputs[2]
    return (out,), ()


def _linear_gradient(
    grads: Sequence[Array | None],
    saved: Sequence[Array],
    inputs: Inputs,
    attrs: Attrs,
    wanted: Sequence[bool],
) -> Sequence[Array | None]:
    grad = _given(grads[0])
    found = [grad @ inputs[1] if wanted[0] else None, grad.T @ inputs[0] if wanted[1] else None]
    return [*found, grad.sum(axis=0)] if len(inputs) == 3 else found


def _sparse_linear(inputs: Inputs, attrs: Attrs) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    rows: Ragged = inputs[0]
    out = rows.multiply(inputs[1])
    if len(inputs) == 3:
        out += inputs[2]
    return (out,), ()


def _sparse_linear_gradient(
    grads: Sequence[Array | None],
    saved: Sequence[Array],
    inputs: Inputs,
    attrs: Attrs,
    wanted: Sequence[bool],
) -> Sequence[Array | None]:
    grad = _given(grads[0])
    weight = inputs[0].multiply_transposed(grad) if wanted[1] else None
    return [None, weight, grad.sum(axis=0)] if len(inputs) == 3 else [None, weight]


def _scores(inputs: Inputs, attrs: Attrs) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    rows, src, dst = inputs
    heads = src.shape[1]
    both = rows @ np.concatenate([_spread(src), _spread(dst)], axis=1)
    return (both[:, :heads].copy(), both[:, heads:].copy()), ()


def _scores_gradient(
    grads: Sequence[Array | None],
    saved: Sequence[Array],
    inputs: Inputs,
    attrs: Attrs,
    wanted: Sequence[bool],
) -> Sequence[Array | None]:
    rows, src, dst = inputs
    found: list[Array | None] = [None, np.zeros_like(src), np.zeros_like(dst)]
    for at, (grad, att) in enumerate(zip(grads, (src, dst)), start=1):
        if grad is None:
            continue
        heads, channels = att.shape[1:]
        if wanted[0]:
            part = grad @ _spread(att).T
            found[0] = part if found[0] is None else found[0] + part
        own = (grad.T @ rows).reshape(heads, heads, channels)  # of each head with the columns of each
        found[at] = own[np.arange(heads), np.arange(heads)][None]
    return found


def _spread(att: Array) -> Array:
    """[H * C, H]: the attention vectors [1, H, C] as one block-diagonal matrix."""
    heads, channels = att.shape[1:]
    eye = np.eye(heads, dtype=att.dtype)
    spread: Array = (att.reshape(heads, channels, 1) * eye[:, None, :]).reshape(heads * channels, heads)
    return spread


# Sums


def _add_gradient(
    grads: Sequence[Array | None],
    saved: Sequence[Array],
    inputs: Inputs,
    attrs: Attrs,
    wanted: Sequence[bool],
) -> Sequence[Array | None]:
    return [grads[0], grads[0]]


def _bias_gradient(
    grads: Sequence[Array | None],
    saved: Sequence[Array],
    inputs: Inputs,
    attrs: Attrs,
    wanted: Sequence[bool],
) -> Sequence[Array | None]:
    grad = _given(grads[0])
    return [grad, grad.sum(axis=0)]


def _mean_heads(inputs: Inputs, attrs: Attrs) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    rows, heads = inputs[0], attrs["heads"]
    return (rows.reshape(rows.shape[0], heads, rows.shape[1] // heads).mean(axis=1),), ()


def _mean_heads_gradient(
    grads: Sequence[Array | None],
    saved: Sequence[Array],
    inputs: Inputs,
    attrs: Attrs,
    wanted: Sequence[bool],
) -> Sequence[Array | None]:
    return [np.tile(_given(grads[0]) / attrs["heads"], (1, attrs["heads"]))]


# Activations


def _activation(
    function: Callable[[Array, Attrs], Array],
    back: Callable[[Array, Array, Attrs], Array],
    reads: Literal["input", "output"],
    **attrs: float,
) -> Op:
    """Value by value. ``back(grad, value, attrs)``: the gradient, by what the op was given or by what it gave."""

    def forward(inputs: Inputs, attrs: Attrs) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        out = function(inputs[0], attrs)
        return (out,), (out,) if reads == "output" else ()

    def gradient(
        grads: Sequence[Array | None],
        saved: Sequence[Array],
        inputs: Inputs,
        attrs: Attrs,
        wanted: Sequence[bool],
    ) -> Sequence[Array | None]:
        return [back(_given(grads[0]), saved[0] if reads == "output" else inputs[0], attrs)]

    if reads == "output":
        return Op(forward, gradient, _same, saves={"out": "out"}, attrs=attrs)
    return Op(forward, gradient, _same, reads=(0,), attrs=attrs)


def _leaky_relu(x: Array, attrs: Attrs) -> Array:
    return np.where(x > 0, x, x * x.dtype.type(attrs["slope"]))


def _elu(x: Array, attrs: Attrs) -> Array:
    return np.where(x > 0, x, x.dtype.type(attrs["alpha"]) * np.expm1(np.minimum(x, 0)))


def _elu_slope(grad: Array, x: Array, attrs: Attrs) -> Array:
    # Of what was given: alpha + output would lose digits where the output is near -alpha.
    return np.where(x > 0, grad, grad * (x.dtype.type(attrs["alpha"]) * np.exp(np.minimum(x, 0))))


# Norms


def _layer_norm(inputs: Inputs, attrs: Attrs) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    x = inputs[0]
    mean = x.mean(axis=1)
    centred = x - mean[:, None]
    rstd = 1 / np.sqrt((centred * centred).mean(axis=1) + x.dtype.type(attrs["eps"]))
    out = centred * rstd[:, None]
    if len(inputs) == 3:
        out = out * inputs[1] + inputs[2]
    return (out,), (mean, rstd)


def _layer_norm_gradient(
    grads: Sequence[Array | None],
    saved: Sequence[Array],
    inputs: Inputs,
    attrs: Attrs,
    wanted: Sequence[bool],
) -> Sequence[Array | None]:
    grad, x, (mean, rstd) = _given(grads[0]), inputs[0], saved
    normed = (x - mean[:, None]) * rstd[:, None]
    weights = [(grad * normed).sum(axis=0), grad.sum(axis=0)] if len(inputs) == 3 else []
    inner = grad * inputs[1] if len(inputs) == 3 else grad
    along = (inner * normed).mean(axis=1, keepdims=True)
    return [rstd[:, None] * (inner - inner.mean(axis=1, keepdims=True) - normed * along), *weights]


def _normalize(inputs: Inputs, attrs: Attrs) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    x = inputs[0]
    length = np.sqrt((x * x).sum(axis=1))
    return (x / np.maximum(length, x.dtype.type(attrs["eps"]))[:, None],), (length,)


def _normalize_gradient(
    grads: Sequence[Array | None],
    saved: Sequence[Array],
    inputs: Inputs,
    attrs: Attrs,
    wanted: Sequence[bool],
) -> Sequence[Array | None]:
    grad, x, length = _given(grads[0]), inputs[0], saved[0]
    divisor = np.maximum(length, x.dtype.type(attrs["eps"]))[:, None]
    out = x / divisor
    along = (grad * out).sum(axis=1, keepdims=True)
    # Rows shorter than eps are divided by eps, which has no gradient of its own.
    is_long = (length >= attrs["eps"])[:, None]
    return [np.where(is_long, grad - out * along, grad) / divisor]


def _given(grad: Array | None) -> Array:
    assert grad is not None, "a call is skipped where nothing reads its output"
    return grad


def _product_flops(shapes: Sequence[Shape]) -> float:
    return 2.0 * math.prod(shapes[1])


OPS: Mapping[str, Op] = {
    "linear": Op(
        _linear, _linear_gradient, _linear_shapes, num_weights=(1, 2), reads=(0,), flops=_product_flops,
        products=True,
    ),
    "sparse_linear": Op(
        _sparse_linear, _sparse_linear_gradient, _linear_shapes, num_weights=(1, 2), reads=(0,),
        kinds=("sparse",), flops=_product_flops, products=True,
    ),
    "bias": Op(lambda inputs, attrs: ((inputs[0] + inputs[1],), ()), _bias_gradient, _same, num_weights=(1,)),
    "add": Op(lambda inputs, attrs: ((inputs[0] + inputs[1],), ()), _add_gradient, _same, num_rows=2),
    "relu": _activation(
        lambda x, attrs: np.maximum(x, 0), lambda grad, out, attrs: np.where(out > 0, grad, 0), "output"
    ),
    "leaky_relu": _activation(
        _leaky_relu,
        lambda grad, x, attrs: np.where(x > 0, grad, grad * x.dtype.type(attrs["slope"])),
        "input",
        slope=0.01,
    ),
    "elu": _activation(_elu, _elu_slope, "input", alpha=1.0),
    "tanh": _activation(
        lambda x, attrs: np.tanh(x), lambda grad, out, attrs: grad * (1 - out * out), "output"
    ),
    "sigmoid": _activation(
        lambda x, attrs: loss_ops.sigmoid(x), lambda grad, out, attrs: grad * (1 - out) * out, "output"
    ),
    "layer_norm": Op(
        _layer_norm, _layer_norm_gradient, _same, num_weights=(0, 2), reads=(0,),
        saves={"mean": "one", "rstd": "one"}, attrs={"eps": 1e-5}, flops=lambda shapes: 8.0 * shapes[0][0],
    ),
    "normalize": Op(
        _normalize, _normalize_gradient, _same, reads=(0,), saves={"length": "one"}, attrs={"eps": 1e-12},
        flops=lambda shapes: 3.0 * shapes[0][0],
    ),
    "mean_heads": Op(_mean_heads, _mean_heads_gradient, _mean_heads_shapes, attrs={"heads": 1}),
    "scores": Op(
        _scores, _scores_gradient, _scores_shapes, num_weights=(2,), num_outputs=2, reads=(0,),
        flops=lambda shapes: 4.0 * math.prod(shapes[1]), products=True,
    ),
    "cross_entropy": Op(
        loss_ops.cross_entropy, loss_ops.cross_entropy_gradient, loss_ops.cross_entropy_shapes, num_rows=2,
        num_outputs=2, reads=(1,), saves={"p": "row"}, attrs={"scale": 1.0}, kinds=("float", "ids"), gives="sums",
        flops=lambda shapes: 6.0 * shapes[0][0],
    ),
    "binary_cross_entropy": Op(
        loss_ops.binary_cross_entropy, loss_ops.binary_cross_entropy_gradient,
        loss_ops.binary_cross_entropy_shapes, num_rows=3, num_outputs=2, reads=(1, 2), saves={"p": "row"},
        attrs={"scale": 1.0}, kinds=("float", "marks", "marks"), gives="sums", flops=lambda shapes: 8.0 * shapes[0][0],
    ),
    "edge_softmax": Op(
        edge_ops.edge_softmax, edge_ops.edge_softmax_gradient, edge_ops.edge_softmax_shapes, num_rows=4,
        reads=(0, 1, 2, 3), saves={"out": "out"},
        attrs={"slope": 0.2, "self_loop": False, "dst_start": 0}, kinds=("ids", "ids", "float", "float"),
        is_rowwise=False, flops=lambda shapes: 8.0 * math.prod(shapes[2]),
    ),
}  # fmt: skip
"""Every op by name."""
