"""Rows in two places read as if one matrix followed the other."""

from __future__ import annotations

import pytest
import torch

from polyhop.errors import GraphError, InputError
from polyhop.graph import PooledRows
from polyhop.kernels import gather_rows


def _rows(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(-100, 100, (count, 6), generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("first", "second"), [(5, 4), (0, 9), (9, 0)])
@pytest.mark.parametrize("mode", ["native", "reference"])
def test_gather_equals_that_of_one_matrix(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, first: int, second: int, mode: str
) -> None:
    monkeypatch.setenv("POLYHOP_KERNELS", mode)
    whole = _rows(9, dtype)
    pooled = PooledRows(whole[:first], whole[first:].clone())
    rows = torch.tensor([8, 0, 4, 5, 5, 3])
    got = pooled.gather(rows)
    assert torch.equal(got, gather_rows(whole, rows))
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(pooled.all(), whole)
    assert pooled.gather(rows[:0]).shape == (0, 6)


def test_what_it_says_of_itself() -> None:
    pooled = PooledRows(_rows(5, torch.float64), _rows(4, torch.float64))
    assert (pooled.shape, pooled.num_rows) == ((9, 6), 9)
    assert (pooled.dtype, pooled.device.type, pooled.requires_grad) == (torch.float64, "cpu", False)


def test_nothing_at_all() -> None:
    pooled = PooledRows(torch.empty(0, 6), torch.empty(0, 6))
    assert pooled.gather(torch.empty(0, dtype=torch.int64)).shape == (0, 6)
    with pytest.raises(InputError, match=r"ids\[0\] = 0, outside the 0 stored rows"):
        pooled.gather(torch.tensor([0]))


@pytest.mark.parametrize("mode", ["native", "reference"])
@pytest.mark.parametrize("bad", [-1, 9, 1 << 40])
def test_rows_out_of_range_always_fail(monkeypatch: pytest.MonkeyPatch, mode: str, bad: int) -> None:
    monkeypatch.setenv("POLYHOP_KERNELS", mode)
    with pytest.raises(InputError, match=rf"ids\[2\] = {bad}, outside the 9 stored rows \(0 \.\. 8\)"):
        PooledRows(_rows(5), _rows(4)).gather(torch.tensor([0, 8, bad, -7]))


def test_places_that_do_not_fit() -> None:
    with pytest.raises(GraphError, match=r"second must be a matrix \[rows, F\], got shape \[6\]"):
        PooledRows(_rows(5), torch.ones(6))
    with pytest.raises(GraphError, match="same columns, got 6 in the first and 5 in the second"):
        PooledRows(_rows(5), _rows(4)[:, :5])
    with pytest.raises(GraphError, match=r"same dtype, got torch\.float32 in the first and torch\.float64"):
        PooledRows(_rows(5), _rows(4).double())
    with pytest.raises(GraphError, match="same device, got cpu in the first and meta"):
        PooledRows(_rows(5), _rows(4).to("meta"))
    with pytest.raises(GraphError, match="first requires a gradient, but rows in two places are fixed input"):
        PooledRows(_rows(5).requires_grad_(), _rows(4))
