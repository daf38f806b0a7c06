from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from polyhop.errors import InputError
from polyhop.kernels import gather_rows, reference

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.uint8]


def _stored(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    gen = torch.Generator().manual_seed(width)
    if dtype.is_floating_point:
        return torch.randn(rows, width, generator=gen).to(dtype)
    return torch.randint(-128 if dtype == torch.int8 else 0, 127, (rows, width), generator=gen).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 3, 7, 17, 100, 128, 130, 257])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_equals_reference(native_only: None, dtype: torch.dtype, width: int, is_scaled: bool) -> None:
    values = _stored(40, width, dtype)
    ids = torch.randint(40, (200,), generator=torch.Generator().manual_seed(1))
    scale = torch.rand(width) if is_scaled else None
    got = gather_rows(values, ids, scale=scale)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(
        got, reference.gather_rows(values, ids, scale)
    )  # a copy and one product: no rounding to allow for


@pytest.mark.parametrize(("rows", "n", "width"), [(5, 0, 3), (0, 0, 3), (5, 4, 0)])
def test_nothing_to_gather(native_only: None, rows: int, n: int, width: int) -> None:
    assert gather_rows(torch.ones(rows, width), torch.zeros(n, dtype=torch.int64)).shape == (n, width)


def test_from_a_mapped_file(native_only: None, tmp_path: Path) -> None:
    stored = np.arange(60, dtype=np.float32).reshape(20, 3)
    np.save(tmp_path / "x.npy", stored)
    mapped = torch.from_numpy(np.load(tmp_path / "x.npy", mmap_mode="c"))
    assert gather_rows(mapped, torch.tensor([19, 0, 7])).tolist() == stored[[19, 0, 7]].tolist()


def test_into_a_given_tensor(native_only: None) -> None:
    out = torch.empty(2, 3)
    assert gather_rows(torch.eye(3), torch.tensor([2, 0]), out=out) is out
    assert out.tolist() == [[0, 0, 1], [1, 0, 0]]


@pytest.mark.parametrize("mode", ["native", "reference"])
@pytest.mark.parametrize("bad", [-1, 5, 1 << 40])
def test_ids_out_of_range_always_fail(monkeypatch: pytest.MonkeyPatch, mode: str, bad: int) -> None:
    monkeypatch.setenv("POLYHOP_KERNELS", mode)
    ids = torch.zeros(200_000, dtype=torch.int64)  # long enough to be checked in several ranges
    ids[[150_000, 199_999]] = bad
    with pytest.raises(InputError, match=rf"ids\[150000\] = {bad}, outside the 5 stored rows"):
        gather_rows(torch.ones(5, 2), ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradient_equals_reference(native_only: None, dtype: torch.dtype) -> None:
    ids, scale = torch.tensor([3, 0, 3, 3]), torch.tensor([1.0, 2.0])
    grads = []
    for gather in (
        lambda v: gather_rows(v, ids, scale=scale),
        lambda v: reference.gather_rows(v, ids, scale),
    ):
        values = torch.ones(5, 2, dtype=dtype, requires_grad=True)
        gather(values).pow(2).sum().backward()
        grads.append(values.grad)
    assert grads[0] is not None
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


def test_gradcheck(native_only: None) -> None:
    values = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: gather_rows(v, torch.tensor([4, 1, 1])), (values,))


def test_wrong_arguments() -> None:
    ids = torch.tensor([0])
    with pytest.raises(InputError, match=r"values must be \[N, F\], got \[3\]"):
        gather_rows(torch.ones(3), ids)
    with pytest.raises(
        InputError, match=r"values must be one of float32, float64, bfloat16, int8, uint8, got torch\.int64"
    ):
        gather_rows(torch.ones(3, 2, dtype=torch.int64), ids)
    with pytest.raises(InputError, match=r"ids must be int64 \[n\], got torch.int32"):
        gather_rows(torch.ones(3, 2), ids.int())
    with pytest.raises(InputError, match=r"scale must have shape \[2\], got \[3\]"):
        gather_rows(torch.ones(3, 2), ids, scale=torch.ones(3))
    with pytest.raises(InputError, match=r"out must be contiguous torch.float32 \[1, 2\], got torch.float64"):
        gather_rows(torch.ones(3, 2), ids, out=torch.empty(1, 2, dtype=torch.float64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 17, 128, 257])
@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("mode", ["native", "reference"])
def test_two_places_equal_one(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, width: int, is_scaled: bool, mode: str
) -> None:
    whole = _stored(40, width, dtype)
    ids = torch.randint(40, (200,), generator=torch.Generator().manual_seed(1))
    scale = torch.rand(width) if is_scaled else None
    expected = gather_rows(whole, ids, scale=scale)
    monkeypatch.setenv("POLYHOP_KERNELS", mode)
    for cut in (0, 1, 17, 39, 40):
        got = gather_rows(whole[:cut].clone(), ids, second=whole[cut:].clone(), scale=scale)
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 5])
def test_two_places_for_any_thread_count(
    native_only: None, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    whole = _stored(300, 100, torch.float32)
    ids = torch.randint(300, (5000,), generator=torch.Generator().manual_seed(1))
    monkeypatch.setenv("POLYHOP_THREADS", str(threads))
    out = torch.empty(5000, 100)
    assert gather_rows(whole[:111], ids, second=whole[111:], out=out) is out
    assert torch.equal(out, whole[ids])


@pytest.mark.parametrize("mode", ["native", "reference"])
@pytest.mark.parametrize("bad", [-1, 5, 1 << 40])
def test_ids_outside_two_places_always_fail(monkeypatch: pytest.MonkeyPatch, mode: str, bad: int) -> None:
    monkeypatch.setenv("POLYHOP_KERNELS", mode)
    ids = torch.zeros(200_000, dtype=torch.int64)
    ids[[150_000, 199_999]] = bad
    with pytest.raises(InputError, match=rf"ids\[150000\] = {bad}, outside the 5 stored rows"):
        gather_rows(torch.ones(2, 2), ids, second=torch.ones(3, 2))


def test_two_places_get_no_gradient_but_a_scale_does(native_only: None) -> None:
    first, second, ids = torch.randn(3, 2), torch.randn(4, 2), torch.tensor([6, 0, 3])
    scale = torch.ones(2, requires_grad=True)
    gather_rows(first, ids, second=second, scale=scale).sum().backward()
    torch.testing.assert_close(scale.grad, torch.cat([first, second])[ids].sum(0), rtol=0, atol=0)
    for given in ((first.requires_grad_(), second), (first.detach(), second.clone().requires_grad_())):
        with pytest.raises(InputError, match="rows in two places get no gradient; give one matrix"):
            gather_rows(given[0], ids, second=given[1])
        with torch.no_grad():
            gather_rows(given[0], ids, second=given[1])


def test_second_places_that_do_not_fit() -> None:
    ids = torch.tensor([0])
    with pytest.raises(
        InputError, match=r"second must be torch.float32 with the 2 columns of values, got .*64"
    ):
        gather_rows(torch.ones(3, 2), ids, second=torch.ones(3, 2, dtype=torch.float64))
    with pytest.raises(
        InputError, match=r"second must be .* 2 columns of values, got torch.float32 \[3, 1\]"
    ):
        gather_rows(torch.ones(3, 2), ids, second=torch.ones(3, 1))
    with pytest.raises(
        InputError, match="all tensors must be on one device, got values on cpu, second on meta"
    ):
        gather_rows(torch.ones(3, 2), ids, second=torch.ones(3, 2, device="meta"))
