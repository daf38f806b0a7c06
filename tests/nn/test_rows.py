"""Row operations: products of sparse and dense rows, pools, and the destinations' own rows with their gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from polyhop.errors import UnsupportedError
from polyhop.graph.features import SparseRows
from polyhop.graph.pooled import PooledRows
from polyhop.nn import as_block
from polyhop.nn.rows import gathered, linear, linear_add, own_rows

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def sparse(dense: torch.Tensor) -> SparseRows:
    csr = dense.to_sparse_csr()
    return SparseRows(csr.crow_indices(), csr.col_indices().int(), csr.values(), dense.shape[1])


def test_sparse_product_equals_dense_product(loops) -> None:
    dense = torch.where(loops.x > 1.4, loops.x, 0.0)
    assert not dense.any(1).all()  # some rows are empty
    weight = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(5, dtype=torch.float64, requires_grad=True)
    probe = torch.randn(loops.num_nodes, 5, dtype=torch.float64)
    out, expected = linear(sparse(dense), weight, bias), F.linear(dense, weight, bias)
    torch.testing.assert_close(out, expected, **CLOSE)
    mine = torch.autograd.grad((out * probe).sum(), (weight, bias))
    other = torch.autograd.grad((expected * probe).sum(), (weight, bias))
    torch.testing.assert_close(mine, other, **CLOSE)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_product_added(loops, is_sparse) -> None:
    weight = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    start = torch.randn(loops.num_nodes, 5, dtype=torch.float64, requires_grad=True)
    h = sparse(loops.x) if is_sparse else loops.x
    out, expected = linear_add(start * 2, h, weight), start * 2 + loops.x @ weight.t()
    torch.testing.assert_close(out, expected, **CLOSE)
    mine = torch.autograd.grad(out.square().sum(), (start, weight))
    other = torch.autograd.grad(expected.square().sum(), (start, weight))
    torch.testing.assert_close(mine, other, **CLOSE)


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("used", ["both", "all", "own"])
def test_own_rows_and_their_gradient(loops, cut_block, first, used) -> None:
    block = cut_block(loops, torch.tensor([6, 1, 9]), first=first)
    x = loops.x[block.src_ids].requires_grad_()
    mixed, other = torch.randn(7, 7, dtype=torch.float64), torch.randn(7, 7, dtype=torch.float64)

    def value(everyone: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        parts = {"all": (everyone @ mixed).square().sum(), "own": (own @ other).square().sum()}
        return sum(parts.values()) if used == "both" else parts[used]

    everyone, own = own_rows(x, block)
    torch.testing.assert_close(own, x[first : first + 3], rtol=0, atol=0)
    (mine,) = torch.autograd.grad(value(everyone, own), x)
    (expected,) = torch.autograd.grad(value(x, x[first : first + 3]), x)
    torch.testing.assert_close(mine, expected, **CLOSE)


def test_own_rows_of_an_expanded_gradient(loops, cut_block) -> None:
    """sum() hands back one number expanded to all rows, which must not be written to."""
    block = cut_block(loops, torch.tensor([6, 1, 9]))
    x = loops.x[block.src_ids].requires_grad_()
    everyone, own = own_rows(x, block)
    (mine,) = torch.autograd.grad(everyone.sum() + own.sum(), x)
    expected = torch.ones_like(x)
    expected[:3] += 1
    torch.testing.assert_close(mine, expected, rtol=0, atol=0)


def test_own_rows_without_gradient_are_views(loops, cut_block) -> None:
    block = cut_block(loops, torch.tensor([6, 1, 9]), first=2)
    x = loops.x[block.src_ids]
    everyone, own = own_rows(x, block)
    assert everyone is x
    assert own.data_ptr() == x[2:].data_ptr()
    rows = sparse(x)
    _, few = own_rows(rows, block)
    torch.testing.assert_close(few.dense(), x[2:5], rtol=0, atol=0)


def test_gathered(loops) -> None:
    block = as_block(loops.edge_index, loops.num_nodes)
    assert gathered(loops.x, block) == (loops.x, block)
    order = torch.randperm(loops.num_nodes)
    x, plain = gathered(loops.x, replace(block, rows=order))
    torch.testing.assert_close(x, loops.x[order], rtol=0, atol=0)
    assert plain.rows is None
    with pytest.raises(UnsupportedError, match="sparse rows cannot be a pool"):
        gathered(sparse(loops.x), replace(block, rows=order))


@pytest.mark.parametrize("cut", [0, 9, 24])
def test_rows_in_two_places(loops, cut_block, cut) -> None:
    pooled = PooledRows(loops.x[:cut], loops.x[cut:])
    block = cut_block(loops, torch.tensor([6, 1, 9]), first=2)
    in_pool = replace(block, rows=block.src_ids)
    x, plain = gathered(pooled, in_pool)
    assert torch.equal(x, loops.x[block.src_ids])
    assert plain.rows is None
    same, own = own_rows(pooled, in_pool)
    assert same is pooled
    assert torch.equal(own, loops.x[torch.tensor([6, 1, 9])])
    weight = torch.randn(5, 7, dtype=torch.float64)
    assert torch.equal(linear(pooled, weight), linear(loops.x, weight))
    start = torch.ones(loops.num_nodes, 5, dtype=torch.float64)
    assert torch.equal(linear_add(start.clone(), pooled, weight), linear_add(start.clone(), loops.x, weight))


def test_rows_in_two_places_without_a_pool(loops) -> None:
    pooled = PooledRows(loops.x[:9], loops.x[9:])
    block = as_block(loops.edge_index, loops.num_nodes)
    x, plain = gathered(pooled, block)
    assert torch.equal(x, loops.x)
    assert plain is block
    assert torch.equal(own_rows(pooled, block)[1], loops.x)
