from __future__ import annotations

import pytest
import torch

from polyhop.errors import InputError
from polyhop.kernels import gather_rows, reference, scatter_add_rows

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [0, 1, 7, 100, 257])
def test_equals_reference(device: torch.device, poison: None, dtype: torch.dtype, width: int) -> None:
    gen = torch.Generator().manual_seed(width)
    values, second = ((torch.randn(n, width, generator=gen) * 20).to(dtype).to(device) for n in (40, 9))
    ids = torch.randint(49, (23,), generator=gen).to(device)
    scale = torch.rand(width, generator=gen).to(device)
    first = ids.clamp(max=39)
    assert torch.equal(gather_rows(values, first), reference.gather_rows(values, first))
    assert torch.equal(gather_rows(values, first, scale=scale), reference.gather_rows(values, first, scale))
    expected = reference.gather_rows(values, ids, scale, second=second)
    assert torch.equal(gather_rows(values, ids, second=second, scale=scale), expected)


def test_ids_known_to_be_good_are_not_waited_for(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, ids = torch.arange(6.0, device=device).view(3, 2), torch.tensor([2, 0], device=device)
    expected = [values[ids], values[ids], torch.cat([values, values])[ids + 3]]
    with monkeypatch.context() as patch:
        if not values.is_cuda:  # nothing is read back: there is no place for what would be
            patch.setattr(torch, "full", lambda *given, **more: pytest.fail("a place of bad ids is kept"))
        found = [
            gather_rows(values, ids, are_checked=True),
            gather_rows(values, ids, out=torch.empty(2, 2, device=device), are_checked=True),
            gather_rows(values, ids + 3, second=values, are_checked=True),
        ]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    monkeypatch.setenv("POLYHOP_DEBUG", "1")
    with pytest.raises(InputError, match=r"ids\[0\] = 3, outside"):
        gather_rows(values, ids + 1, are_checked=True)


def test_an_id_outside_is_named(device: torch.device) -> None:
    values = torch.ones(3, 2, device=device)
    with pytest.raises(InputError, match=r"ids\[2\] = 3, outside the 3 stored rows"):
        gather_rows(values, torch.tensor([0, 1, 3, -1], device=device))
    with pytest.raises(InputError, match=r"ids\[1\] = -1, outside the 6 stored rows"):
        gather_rows(values, torch.tensor([5, -1], device=device), second=values)


def test_gradient_is_summed_in_one_order(device: torch.device) -> None:
    gen = torch.Generator().manual_seed(3)
    ids = torch.randint(30, (400,), generator=gen).to(device)
    values, grad = (torch.randn(n, 33, generator=gen, dtype=torch.float64).to(device) for n in (50, 400))
    results = []
    for run in (gather_rows, reference.gather_rows, gather_rows):
        leaf = values.clone().requires_grad_()
        run(leaf, ids).backward(grad)
        assert leaf.grad is not None
        results.append(leaf.grad)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-12)
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("num", [0, 1, 700])
def test_scatter_adds_to_what_is_there(device: torch.device, dtype: torch.dtype, num: int) -> None:
    gen = torch.Generator().manual_seed(num)
    ids = torch.randint(5, (num,), generator=gen).to(device)
    out, rows = (torch.randn(n, 17, generator=gen, dtype=torch.float64).to(device, dtype) for n in (9, num))
    expected = out.double().index_add(0, ids, rows.double())
    got = out.clone()
    assert scatter_add_rows(got, ids, rows) is got
    room = {torch.float32: 1e-4, torch.float64: 1e-12, torch.bfloat16: 0.3}[
        dtype
    ]  # of sums of up to 150 rows
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=room)
    assert torch.equal(got[5:], out[5:])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_in_pinned_memory(dtype: torch.dtype) -> None:
    """The device reads rows on the host; some of them, or all, may be cached on the device."""
    gen = torch.Generator().manual_seed(5)
    whole = (torch.randn(1000, 100, generator=gen) * 20).to(dtype)
    ids = torch.randint(1000, (5000,), generator=gen)
    expected = reference.gather_rows(whole, ids).cuda()
    assert torch.equal(gather_rows(whole.pin_memory(), ids.cuda()), expected)
    hot, cold = whole[:300].cuda(), whole[300:].pin_memory()
    assert torch.equal(gather_rows(hot, ids.cuda(), second=cold), expected)
    with pytest.raises(InputError, match="one device"):
        gather_rows(whole, ids.cuda())
    with pytest.raises(InputError, match=r"ids\[0\] = 1000, outside the 1000"):
        gather_rows(hot, torch.tensor([1000], device="cuda"), second=cold)
