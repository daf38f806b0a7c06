"""Softmax over in-edges against the library's attention: weights, and gradients of both halves of the scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhop.errors import InputError
from polyhop.graph import Block
from polyhop.kernels import reference
from polyhop.serverless.ops import OPS

OP = OPS["edge_softmax"]


def edges(rng: np.random.Generator, num_dst: int, num_src: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    counts = rng.integers(0, most + 1, num_dst)
    return np.concatenate([[0], np.cumsum(counts)]), rng.integers(0, num_src, counts.sum())


def compare(
    num_dst: int, extra: int, start: int, heads: int, self_loop: bool, dtype: Any, tolerance: float
) -> None:
    """Weights by a sum over rows that are all 1 in one column a source: attention then gives the weights themselves."""
    rng = np.random.default_rng(num_dst * 7 + extra)
    num_src = num_dst + extra + start
    indptr, indices = edges(rng, num_dst, max(num_src, 1), 0 if num_src == 0 else 4)
    a_src = (rng.standard_normal((num_src, heads)) * 3).astype(dtype)
    a_dst = (rng.standard_normal((num_dst, heads)) * 3).astype(dtype)
    attrs = {"slope": 0.3, "self_loop": self_loop, "dst_start": start}
    inputs = [indptr, indices, a_src, a_dst]
    (out,), saved = OP.forward(inputs, attrs)
    assert out.shape == (indices.size + (num_dst if self_loop else 0), heads)
    assert out.dtype == dtype
    block = Block(torch.tensor(indptr), torch.tensor(indices), num_src, dst_start=start)
    src, dst = torch.tensor(a_src, requires_grad=True), torch.tensor(a_dst, requires_grad=True)
    x = torch.tensor(rng.standard_normal((num_src, heads, 3)).astype(dtype))
    theirs = reference.attention(block, x, src, dst, negative_slope=0.3, self_loop=self_loop)
    sources = np.concatenate([indices, np.arange(num_dst) + start]) if self_loop else indices
    targets = np.repeat(np.arange(num_dst), np.diff(indptr))
    targets = np.concatenate([targets, np.arange(num_dst)]) if self_loop else targets
    rows = x.numpy()[sources]
    mine = np.zeros((num_dst, heads, 3), dtype)
    np.add.at(mine, targets, out[:, :, None] * rows)
    np.testing.assert_allclose(mine, theirs.detach().numpy(), rtol=tolerance, atol=tolerance)
    probe = rng.standard_normal(theirs.shape).astype(dtype)
    theirs.backward(torch.tensor(probe))
    grad = (probe[targets] * rows).sum(axis=2)
    found = OP.gradient([grad], saved, inputs, attrs, [False, False, True, True])
    assert found[0] is None
    assert found[1] is None
    for ours, leaf in zip(found[2:], (src, dst), strict=True):
        assert ours is not None
        assert leaf.grad is not None
        assert ours.dtype == dtype
        np.testing.assert_allclose(ours, leaf.grad.numpy(), rtol=tolerance, atol=10 * tolerance)


@given(
    num_dst=st.integers(0, 7),
    extra=st.integers(0, 5),
    start=st.integers(0, 3),
    heads=st.integers(1, 3),
    self_loop=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_weights_and_gradients_are_attentions(
    num_dst: int, extra: int, start: int, heads: int, self_loop: bool
) -> None:
    compare(num_dst, extra, start, heads, self_loop, np.float64, 1e-12)


def test_float32_stays_float32() -> None:
    compare(9, 4, 2, 2, True, np.float32, 1e-5)


def test_large_scores_do_not_overflow() -> None:
    scores = np.array([[1000.0], [999.0]])
    inputs = [np.array([0, 2]), np.array([0, 1]), scores, np.zeros((1, 1))]
    with np.errstate(all="raise", under="ignore"):
        (out,), _ = OP.forward(inputs, OP.attrs)
    np.testing.assert_allclose(out[:, 0], [1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))], rtol=1e-12)


@pytest.mark.parametrize(
    ("indptr", "indices", "attrs", "message"),
    [
        ([0, 3], [0, 1], {}, "indptr"),
        ([0, 2], [0, 5], {}, r"sources 0\.\.5 of 0\.\.1"),
        ([0, 2], [0, 1], {"self_loop": True, "dst_start": 2}, "exceed 2 sources"),
    ],
)
def test_edges_that_cannot_be_are_refused(
    indptr: list[int], indices: list[int], attrs: dict[str, Any], message: str
) -> None:
    inputs = [np.array(indptr), np.array(indices), np.zeros((2, 1)), np.zeros((1, 1))]
    with pytest.raises(InputError, match=message):
        OP.forward(inputs, {**OP.attrs, **attrs})
