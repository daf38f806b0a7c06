"""Sparse rows of a server: the products of ``Ragged``, by native kernels; and they never leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from polyhop import nn
from polyhop.graph import Sizes, SparseRows
from polyhop.serverless.ragged import Ragged
from polyhop.serverless.segments import Dense, segments
from polyhop.serverless.server_rows import ServerRows


def some(n: int, columns: int, dtype: torch.dtype) -> SparseRows:
    rng = np.random.default_rng(n)
    counts = rng.integers(0, 6, n)
    indptr = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]))
    indices = torch.from_numpy(rng.integers(0, columns, counts.sum()).astype(np.int32))
    return SparseRows(indptr, indices, torch.from_numpy(rng.standard_normal(counts.sum())).to(dtype), columns)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("n", "columns", "width"), [(0, 3, 2), (1, 1, 1), (50, 7, 5), (300, 40, 33)])
def test_products(n: int, columns: int, width: int, dtype: torch.dtype, bound: float) -> None:
    given = some(n, columns, dtype)
    rows = ServerRows(given)
    plain = Ragged(given.indptr.numpy(), given.indices.numpy(), given.values.numpy(), columns)
    rng = np.random.default_rng(1)
    kind = given.values.numpy().dtype
    weight = rng.standard_normal((width, columns)).astype(kind)
    grad = rng.standard_normal((n, width)).astype(kind)
    for found, expected in (
        (rows.multiply(weight), plain.multiply(weight)),
        (rows.multiply_transposed(grad), plain.multiply_transposed(grad)),
    ):
        assert found.dtype == kind
        np.testing.assert_allclose(found, expected, rtol=bound, atol=bound)
    part = rows[n // 3 : n]
    np.testing.assert_allclose(
        part.multiply(weight), plain.multiply(weight)[n // 3 :], rtol=bound, atol=bound
    )
    assert rows[0:n] is rows


@pytest.mark.parametrize("model", [nn.GCN, nn.GraphSAGE, nn.GAT])
def test_pieces_of_sparse_rows_stay(model: Callable[..., Any]) -> None:
    made = model(20, 8, num_layers=2, out_channels=3)
    for is_sparse in (False, True):
        chain = segments(made, Sizes.of_many(100), is_sparse=is_sparse)
        stays = [each.stays for each in chain if isinstance(each, Dense)]
        assert stays == [is_sparse, *[False] * (len(stays) - 1)] or (not is_sparse and not any(stays))
