"""Sparse rows: cut and joined; products against dense ones; damaged ones are refused."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhop.errors import InputError
from polyhop.serverless.ragged import Ragged


def some(n: int, columns: int, most: int) -> tuple[Ragged, np.ndarray]:
    """Rows, of which some name a column twice, and the same as a dense matrix."""
    rng = np.random.default_rng(n * 100 + columns)
    counts = rng.integers(0, most + 1, n)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    indices, values = rng.integers(0, columns, counts.sum()), rng.standard_normal(counts.sum())
    dense = np.zeros((n, columns))
    np.add.at(dense, (np.repeat(np.arange(n), counts), indices), values)
    return Ragged(indptr, indices.astype(np.int32), values, columns), dense


@given(n=st.integers(0, 12), columns=st.integers(1, 6), most=st.integers(0, 5), width=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_products(n: int, columns: int, most: int, width: int) -> None:
    rows, dense = some(n, columns, most)
    rng = np.random.default_rng(0)
    weight, grad = rng.standard_normal((width, columns)), rng.standard_normal((n, width))
    np.testing.assert_allclose(rows.multiply(weight), dense @ weight.T, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(rows.multiply_transposed(grad), grad.T @ dense, rtol=1e-12, atol=1e-12)


@given(cuts=st.lists(st.integers(0, 12), min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_cut_and_joined_is_what_it_was(cuts: list[int]) -> None:
    rows, _ = some(12, 5, 4)
    edges = [0, *sorted(cuts), 12]
    joined = Ragged.joined([rows[start:stop] for start, stop in pairwise(edges)])
    for name in ("indptr", "indices", "values"):
        np.testing.assert_array_equal(getattr(joined, name), getattr(rows, name))
    assert joined.shape == (12, 5)


def test_float32_values_take_the_format_of_the_weights() -> None:
    rows = Ragged(np.array([0, 1]), np.array([0]), np.ones(1, np.float32), 1)
    for dtype in (np.float64, np.float32):
        assert rows.multiply(np.ones((2, 1), dtype)).dtype == dtype
        assert rows.multiply_transposed(np.ones((1, 2), dtype)).dtype == dtype


@pytest.mark.parametrize(
    ("indptr", "indices", "message"),
    [
        ([1, 2], [0], "starts with 0"),
        ([0, 2], [0], "ends at 2"),
        ([], [0], "starts with 0"),
        ([0, 2, 1], [0], "never falls"),
    ],
)
def test_damaged_rows_are_refused(indptr: list[int], indices: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Ragged(np.array(indptr), np.array(indices), np.ones(len(indices)), 2)


def test_columns_out_of_range_are_named() -> None:
    with pytest.raises(InputError, match=r"columns span 0\.\.3, expected 0\.\.1"):
        Ragged(np.array([0, 2]), np.array([0, 3]), np.ones(2), 2)
