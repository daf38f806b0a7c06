from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhop.errors import InputError
from polyhop.kernels import dropout, dropout_values, reference
from polyhop.kernels.keys import Key, Purpose

KEY = Key(seed=7, epoch=3, step=11).at(Purpose.DROPOUT, site=2)
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 3, 7, 8, 17, 100, 128, 130, 257])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("has_ids", [False, True])
def test_equals_reference(
    native_only: None, dtype: torch.dtype, width: int, relu: bool, has_ids: bool
) -> None:
    gen = torch.Generator().manual_seed(width)
    h = torch.randn(37, width, generator=gen).to(dtype)
    grad = torch.randn(37, width, generator=gen).to(dtype)
    ids = torch.randint(1 << 45, (37,), generator=gen) if has_ids else None
    same_ids = torch.arange(5, 42) if ids is None else ids
    results = []
    for run in (
        lambda t: dropout(t, ids, 0.3, KEY, id_start=5, relu=relu),
        lambda t: reference.dropout(t, same_ids, 0.3, KEY, relu),
    ):
        leaf = h.clone().requires_grad_()
        out = run(leaf)
        out.backward(grad)
        results.append((out.detach(), leaf.grad))
    for ours, theirs in zip(*results):
        assert torch.equal(ours, theirs)  # one product per unit: the same bits


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 40), width=st.integers(0, 90), p=st.floats(0, 1), key=st.integers(0, 2**64 - 1),
    relu=st.booleans(),
)  # fmt: skip
def test_any_shape_equals_reference(rows: int, width: int, p: float, key: int, relu: bool) -> None:
    h = torch.linspace(-1, 1, rows * width).reshape(rows, width)
    assert torch.equal(
        dropout(h, None, p, key, relu=relu), reference.dropout(h, torch.arange(rows), p, key, relu)
    )


def test_unit_depends_on_key_id_and_column_only() -> None:
    h = torch.ones(50, 40)
    ids = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    whole = dropout(h, torch.arange(50), 0.5, KEY)
    assert torch.equal(dropout(h, ids, 0.5, KEY), whole[ids])  # any order of rows
    assert torch.equal(
        dropout(h[:, :19].contiguous(), None, 0.5, KEY), whole[:, :19]
    )  # any number of columns
    assert torch.equal(dropout(h[10:20].contiguous(), None, 0.5, KEY, id_start=10), whole[10:20])
    assert not torch.equal(dropout(h, None, 0.5, KEY + 1), whole)


def test_mean_and_share_are_kept() -> None:
    out = dropout(torch.ones(2000, 64), None, 0.3, KEY)
    share = (out > 0).double().mean().item()
    assert abs(share - 0.7) < 5 * (0.3 * 0.7 / out.numel()) ** 0.5  # five standard deviations
    assert out.max().item() == pytest.approx(1 / 0.7, rel=1e-4)  # p is rounded to 1 / 65536
    columns = (out > 0).double().mean(0)
    assert ((columns - 0.7).abs() < 5 * (0.3 * 0.7 / 2000) ** 0.5).all()


def test_edges_of_p() -> None:
    h = torch.randn(4, 9)
    assert dropout(h, None, 0.0, KEY) is h
    assert torch.equal(dropout(h, None, 0.0, KEY, relu=True), h.relu())
    assert not dropout(h, None, 1.0, KEY).any()
    assert reference.threshold(1e-9) == 1
    assert reference.threshold(1 - 1e-9) == 65535
    for bad in (-0.1, 1.1):
        with pytest.raises(InputError, match=r"p must be in 0 \.\. 1"):
            dropout(h, None, bad, KEY)


def test_relu_passes_nan_and_drops_infinity_cleanly(native_only: None) -> None:
    h = torch.full((1, 64), torch.inf)
    h[0, 1::2] = torch.nan
    got, expected = (
        dropout(h, None, 0.5, KEY, relu=True),
        reference.dropout(h, torch.arange(1), 0.5, KEY, relu=True),
    )
    assert torch.equal(torch.nan_to_num(got, 7.0), torch.nan_to_num(expected, 7.0))
    assert (got == 0).any()


@pytest.mark.parametrize("relu", [False, True])
def test_gradcheck(native_only: None, relu: bool) -> None:
    h = torch.randn(6, 11, dtype=torch.float64)
    h = (h + h.sign() * 0.1).requires_grad_()  # away from the kink
    assert torch.autograd.gradcheck(lambda t: dropout(t, None, 0.4, KEY, relu=relu), (h,))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_same_for_any_thread_count(native_only: None, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    h = torch.randn(3000, 33, generator=torch.Generator().manual_seed(0))
    monkeypatch.setenv("POLYHOP_THREADS", str(threads))
    assert torch.equal(dropout(h, None, 0.5, KEY), reference.dropout(h, torch.arange(3000), 0.5, KEY))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("has_ids", [False, True])
def test_sparse_rows_drop_the_same_units(
    native_only: None, dtype: torch.dtype, index: torch.dtype, has_ids: bool
) -> None:
    gen = torch.Generator().manual_seed(3)
    dense = torch.randn(30, 77, generator=gen).to(dtype)
    dense[torch.rand(30, 77, generator=gen) < 0.8] = 0
    dense[4] = 0  # an empty row
    ids = torch.randint(1 << 40, (30,), generator=gen) if has_ids else None
    indptr = torch.zeros(31, dtype=torch.int64)
    indptr[1:] = (dense != 0).sum(1).cumsum(0)
    rows, columns = dense.nonzero(as_tuple=True)
    values = dense[rows, columns].requires_grad_()
    out = dropout_values(values, indptr, columns.to(index), ids, 0.5, KEY)
    assert torch.equal(out.detach(), dropout(dense, ids, 0.5, KEY)[rows, columns])
    out.sum().backward()
    mask = dropout(torch.ones_like(dense), ids, 0.5, KEY)[rows, columns]
    assert values.grad is not None
    assert torch.equal(values.grad, mask)


def test_sparse_edges(native_only: None) -> None:
    none = torch.zeros(0)
    assert dropout_values(none, torch.zeros(1, dtype=torch.int64), none.int(), None, 0.5, KEY).numel() == 0
    assert dropout_values(none, torch.zeros(4, dtype=torch.int64), none.long(), None, 0.5, KEY).numel() == 0
    values, indptr = torch.ones(3), torch.tensor([0, 3])
    assert dropout_values(values, indptr, torch.arange(3), None, 0.0, KEY) is values
    assert not dropout_values(values, indptr, torch.arange(3), None, 1.0, KEY).any()
    with pytest.raises(InputError, match=r"values must have shape \[2\], got \[3\]"):
        dropout_values(values, torch.tensor([0, 2]), torch.arange(2), None, 0.5, KEY)


def test_wrong_arguments() -> None:
    with pytest.raises(InputError, match=r"h must be a float matrix, got torch.int64 \[2, 2\]"):
        dropout(torch.ones(2, 2, dtype=torch.int64), None, 0.5, KEY)
    with pytest.raises(InputError, match=r"ids must have shape \[2\], got \[3\]"):
        dropout(torch.ones(2, 2), torch.arange(3), 0.5, KEY)
    with pytest.raises(InputError, match="ids must be int64"):
        dropout(torch.ones(2, 2), torch.arange(2, dtype=torch.int32), 0.5, KEY)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("relu", [False, True])
def test_in_place_gives_the_same_bits_in_the_same_memory(native_only: None, p: float, relu: bool) -> None:
    h = torch.randn(19, 33, generator=torch.Generator().manual_seed(0))
    results = []
    for in_place in (False, True):
        leaf = h.clone().requires_grad_()
        own = leaf * 2
        out = dropout(own, None, p, KEY, relu=relu, in_place=in_place)
        assert (out.data_ptr() == own.data_ptr()) == (in_place or (p == 0 and not relu))
        out.square().sum().backward()
        results.append((out.detach(), leaf.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results))
