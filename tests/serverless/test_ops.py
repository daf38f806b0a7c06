"""Every op against torch, forward and gradient; odd shapes; finite differences; number formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from polyhop.errors import InputError
from polyhop.serverless.ops import OPS
from polyhop.serverless.ragged import Ragged

FORMATS = [(np.float64, 1e-12), (np.float32, 1e-5)]
HEADS, CHANNELS = 3, 2

Case = tuple[list[tuple[int, ...]], Callable[..., Any], dict[str, Any]]


def cases(
    n: int, width: int
) -> dict[str, tuple[str, list[tuple[int, ...]], Callable[..., Any], dict[str, Any]]]:
    """Name -> (op, shapes of the inputs, the same in torch, attrs)."""
    wide = HEADS * CHANNELS

    def layer_norm(x: Tensor, *affine: Tensor) -> Tensor:
        return F.layer_norm(x, (width,), *affine, eps=1e-3)

    def scores(m: Tensor, src: Tensor, dst: Tensor) -> tuple[Tensor, Tensor]:
        split = m.view(-1, HEADS, CHANNELS)
        return (split * src).sum(-1), (split * dst).sum(-1)

    return {
        "linear": ("linear", [(n, width), (4, width)], lambda x, w: F.linear(x, w), {}),
        "linear with bias": ("linear", [(n, width), (4, width), (4,)], F.linear, {}),
        "bias": ("bias", [(n, width), (width,)], lambda x, b: x + b, {}),
        "add": ("add", [(n, width), (n, width)], lambda x, y: x + y, {}),
        "relu": ("relu", [(n, width)], F.relu, {}),
        "leaky_relu": ("leaky_relu", [(n, width)], lambda x: F.leaky_relu(x, 0.3), {"slope": 0.3}),
        "leaky_relu, turned": ("leaky_relu", [(n, width)], lambda x: F.leaky_relu(x, -0.3), {"slope": -0.3}),
        "elu": ("elu", [(n, width)], lambda x: F.elu(x, 1.5), {"alpha": 1.5}),
        "tanh": ("tanh", [(n, width)], torch.tanh, {}),
        "sigmoid": ("sigmoid", [(n, width)], torch.sigmoid, {}),
        "layer_norm": ("layer_norm", [(n, width), (width,), (width,)], layer_norm, {"eps": 1e-3}),
        "layer_norm, plain": ("layer_norm", [(n, width)], layer_norm, {"eps": 1e-3}),
        "normalize": ("normalize", [(n, width)], lambda x: F.normalize(x, dim=-1), {}),
        "mean_heads": (
            "mean_heads",
            [(n, wide)],
            lambda x: x.view(-1, HEADS, CHANNELS).mean(1),
            {"heads": HEADS},
        ),
        "scores": ("scores", [(n, wide), (1, HEADS, CHANNELS), (1, HEADS, CHANNELS)], scores, {}),
    }


NAMES = list(cases(1, 1))


def close(ours: np.ndarray, theirs: Tensor, tolerance: float) -> None:
    """Relative to the largest value; also the number format and the shape."""
    wanted = theirs.detach().numpy()
    assert (ours.dtype, ours.shape) == (wanted.dtype, wanted.shape)
    scale = max(1.0, float(np.abs(wanted).max(initial=0.0)))
    np.testing.assert_allclose(ours, wanted, rtol=tolerance, atol=tolerance * scale)


def compare(name: str, n: int, width: int, dtype: Any, tolerance: float, spread: float = 2.0) -> None:
    op, shapes, function, attrs = cases(n, width)[name]
    rng = np.random.default_rng(n * 31 + width)
    inputs = [(rng.standard_normal(shape) * spread).astype(dtype) for shape in shapes]
    what = OPS[op]
    outputs, saved = what.forward(inputs, {**what.attrs, **attrs})
    leaves = [torch.tensor(array, requires_grad=True) for array in inputs]
    expected = function(*leaves)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for mine, other in zip(outputs, expected, strict=True):
        close(mine, other, tolerance)
    probes = [rng.standard_normal(array.shape).astype(dtype) for array in outputs]
    torch.autograd.backward(expected, [torch.tensor(probe) for probe in probes])
    assert len(saved) == len(what.saves)
    read = [array if at in what.reads or at >= what.num_rows else None for at, array in enumerate(inputs)]
    grads = what.gradient(probes, saved, read, {**what.attrs, **attrs}, [True] * len(inputs))
    for mine, leaf in zip(grads, leaves, strict=True):
        assert mine is not None
        assert leaf.grad is not None
        close(mine, leaf.grad, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), FORMATS, ids=["float64", "float32"])
@pytest.mark.parametrize("name", NAMES)
def test_op_is_torchs(name: str, dtype: Any, tolerance: float) -> None:
    compare(name, 37, 11, dtype, tolerance)


@given(name=st.sampled_from(NAMES), n=st.integers(0, 9), width=st.integers(1, 9), is_double=st.booleans())
@settings(max_examples=150, deadline=None)
def test_odd_shapes(name: str, n: int, width: int, is_double: bool) -> None:
    dtype, tolerance = FORMATS[0 if is_double else 1]
    # A norm of one column is that of rounding: as exact as its terms, not as its result. So numbers are small there.
    compare(name, n, width, dtype, tolerance * (100 if "norm" in name else 1), 0.5)


@pytest.mark.parametrize("name", ["elu", "tanh", "sigmoid", "leaky_relu", "relu"])
@pytest.mark.parametrize(("dtype", "tolerance"), FORMATS, ids=["float64", "float32"])
def test_far_values(name: str, dtype: Any, tolerance: float) -> None:
    """Far from 0 nothing overflows, and each value, however small, is right to its own size."""
    op, _, function, attrs = cases(1, 1)[name]
    x = np.array([[-1e4, -90.0, -30.0, -5.0, -1e-9, 0.0, 1e-9, 5.0, 90.0, 1e4]], dtype=dtype)
    what = OPS[op]
    settings = {**what.attrs, **attrs}
    with np.errstate(all="raise", under="ignore"):
        (out,), saved = what.forward([x], settings)
        (grad,) = what.gradient([np.ones_like(x)], saved, [x], settings, [True])
    leaf = torch.tensor(x, requires_grad=True)
    expected = function(leaf)
    expected.sum().backward()
    assert leaf.grad is not None
    assert grad is not None
    tiny = float(np.finfo(dtype).tiny)
    np.testing.assert_allclose(out, expected.detach().numpy(), rtol=tolerance, atol=tiny)
    floor = (
        tiny if name == "elu" else 1e-7 if dtype is np.float32 else 1e-15
    )  # by the output: 1 - out loses digits
    np.testing.assert_allclose(grad, leaf.grad.numpy(), rtol=tolerance, atol=floor)


def test_short_rows_are_divided_by_eps() -> None:
    x = np.array([[0.0, 0.0], [3e-13, 4e-13], [3.0, 4.0]])
    what = OPS["normalize"]
    (out,), saved = what.forward([x], what.attrs)
    (grad,) = what.gradient([np.ones_like(x)], saved, [x], what.attrs, [True])
    leaf = torch.tensor(x, requires_grad=True)
    F.normalize(leaf).sum().backward()
    np.testing.assert_allclose(out, F.normalize(torch.tensor(x)).numpy(), rtol=1e-12)
    assert leaf.grad is not None
    np.testing.assert_allclose(grad, leaf.grad.numpy(), rtol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), FORMATS, ids=["float64", "float32"])
@pytest.mark.parametrize("n", [0, 1, 23])
def test_cross_entropy(n: int, dtype: Any, tolerance: float) -> None:
    rng = np.random.default_rng(n)
    logits = (rng.standard_normal((n, 5)) * 3).astype(dtype)
    logits[: n // 3] += 500  # a softmax that is not shifted would overflow
    labels = rng.integers(-1, 5, n)
    what, attrs = OPS["cross_entropy"], {"scale": 0.125}
    (loss, count), saved = what.forward([logits, labels], attrs)
    (grad, none) = what.gradient([np.ones(())], saved, [None, labels], attrs, [True, False])
    leaf = torch.tensor(logits, requires_grad=True)
    expected = F.cross_entropy(leaf, torch.tensor(labels), reduction="sum", ignore_index=-1) * 0.125
    expected.backward()
    assert none is None
    assert (loss.dtype, int(count)) == (dtype, int((labels >= 0).sum()))
    assert leaf.grad is not None
    np.testing.assert_allclose(loss, expected.item(), rtol=tolerance, atol=tolerance)
    close(np.asarray(grad), leaf.grad, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), FORMATS, ids=["float64", "float32"])
@pytest.mark.parametrize("marks", [np.uint8, bool, np.float32])
def test_binary_cross_entropy(marks: Any, dtype: Any, tolerance: float) -> None:
    rng = np.random.default_rng(2)
    logits = (rng.standard_normal((19, 4)) * 3).astype(dtype)
    logits[0], logits[1] = 800, -800
    targets, mask = rng.integers(0, 2, (19, 4)).astype(marks), rng.integers(0, 2, 19).astype(np.uint8)
    mask[:2] = 1
    what, attrs = OPS["binary_cross_entropy"], {"scale": 0.5}
    with np.errstate(all="raise", under="ignore"):
        (loss, count), saved = what.forward([logits, targets, mask], attrs)
        grad = what.gradient([np.ones(())], saved, [None, targets, mask], attrs, [True, False, False])[0]
    leaf, kept = torch.tensor(logits, requires_grad=True), torch.tensor(mask).bool()
    wanted = torch.tensor(targets.astype(dtype))[kept]
    expected = F.binary_cross_entropy_with_logits(leaf[kept], wanted, reduction="sum") * 0.5
    expected.backward()
    assert (loss.dtype, int(count)) == (dtype, int(mask.sum()))
    assert leaf.grad is not None
    np.testing.assert_allclose(loss, expected.item(), rtol=tolerance)
    close(np.asarray(grad), leaf.grad, tolerance)


def test_labels_out_of_range_are_named() -> None:
    with pytest.raises(InputError, match=r"labels span 1\.\.7, there are 3 classes"):
        OPS["cross_entropy"].forward([np.zeros((2, 3)), np.array([1, 7])], {"scale": 1.0})


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("n", [0, 1, 21])
def test_sparse_linear_is_linear_of_the_dense_rows(n: int, with_bias: bool) -> None:
    rng = np.random.default_rng(n)
    dense = rng.standard_normal((n, 6)) * (rng.random((n, 6)) < 0.4)
    dense[n // 2 :, 2] = 0  # a column without values
    dense[: n // 3] = 0  # rows without values
    at, column = np.nonzero(dense)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(at, minlength=n))])
    rows = Ragged(indptr, column.astype(np.int32), dense[at, column].astype(np.float64), 6)
    weights = [rng.standard_normal((3, 6)), *([rng.standard_normal(3)] if with_bias else [])]
    (mine,), _ = OPS["sparse_linear"].forward([rows, *weights], {})
    (other,), _ = OPS["linear"].forward([dense, *weights], {})
    np.testing.assert_allclose(mine, other, rtol=1e-12, atol=1e-12)
    probe = rng.standard_normal(mine.shape)
    wanted = [False, *[True] * len(weights)]
    ours = OPS["sparse_linear"].gradient([probe], (), [rows, *weights], {}, wanted)
    theirs = OPS["linear"].gradient([probe], (), [dense, *weights], {}, wanted)
    assert ours[0] is None
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        assert a is not None
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["layer_norm", "scores", "elu"])
def test_finite_differences(name: str) -> None:
    op, shapes, _, attrs = cases(3, 4)[name]
    rng = np.random.default_rng(7)
    inputs = [rng.standard_normal(shape) for shape in shapes]
    what, attrs = OPS[op], {**OPS[op].attrs, **attrs}
    outputs, saved = what.forward(inputs, attrs)
    probes = [rng.standard_normal(array.shape) for array in outputs]
    grads = what.gradient(probes, saved, inputs, attrs, [True] * len(inputs))

    def value() -> float:
        return float(
            sum((array * probe).sum() for array, probe in zip(what.forward(inputs, attrs)[0], probes))
        )

    for array, grad in zip(inputs, grads, strict=True):
        assert grad is not None
        for index in np.ndindex(array.shape):
            kept, step = array[index], 1e-6
            array[index] = kept + step
            up = value()
            array[index] = kept - step
            down = value()
            array[index] = kept
            assert grad[index] == pytest.approx((up - down) / (2 * step), rel=1e-6, abs=1e-8)


def test_gradients_that_nobody_wants_are_not_made() -> None:
    x, w = np.ones((3, 2)), np.ones((4, 2))
    grads = OPS["linear"].gradient([np.ones((3, 4))], (), [x, w], {}, [False, True])
    assert grads[0] is None
    assert grads[1] is not None
    m, att = np.ones((3, 4)), np.ones((1, 2, 2))
    only = OPS["scores"].gradient([None, np.ones((3, 2))], (), [m, att, att], {}, [True, True, True])
    assert np.array_equal(only[1], np.zeros((1, 2, 2)))  # type: ignore[arg-type]
    assert only[0] is not None
    assert only[0].shape == m.shape
