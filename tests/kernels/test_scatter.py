from __future__ import annotations

import pytest
import torch

from polyhop.errors import InputError, KernelError
from polyhop.kernels import reference, scatter_add_rows


def _in_order(out: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """One addition after the other, each rounded: what every implementation must give, bit for bit."""
    out = out.clone()
    for k, i in enumerate(ids.tolist()):
        out[i] += rows[k]
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 3, 17, 130])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_adds_in_order(
    native_only: None, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, width: int, threads: int
) -> None:
    monkeypatch.setenv("POLYHOP_THREADS", str(threads))
    gen = torch.Generator().manual_seed(width)
    n = max(300, 20_000 // width)  # above the size at which work is shared
    ids = torch.randint(50, (n,), generator=gen) ** 2 // 50  # repeated, some rows never
    rows = torch.randn(n, width, generator=gen).to(dtype)
    start = torch.randn(50, width, generator=gen).to(dtype)
    expected = _in_order(start, ids, rows)
    out = start.clone()
    assert scatter_add_rows(out, ids, rows) is out
    assert torch.equal(out, expected)


def test_reference_agrees() -> None:
    ids, rows = torch.tensor([2, 0, 2, 2]), torch.randn(4, 3, dtype=torch.float64)
    start = torch.randn(5, 3, dtype=torch.float64)
    torch.testing.assert_close(
        reference.scatter_add_rows(start.clone(), ids, rows),
        scatter_add_rows(start.clone(), ids, rows),
        rtol=0,
        atol=1e-12,
    )


@pytest.mark.parametrize(("rows", "n", "width"), [(5, 0, 3), (0, 0, 3), (5, 4, 0)])
def test_nothing_to_add(native_only: None, rows: int, n: int, width: int) -> None:
    out = torch.ones(rows, width)
    assert torch.equal(
        scatter_add_rows(out, torch.zeros(n, dtype=torch.int64), torch.ones(n, width)),
        torch.ones(rows, width),
    )


def test_gradients_reach_rows_through_torch() -> None:
    rows = torch.ones(3, 2, requires_grad=True)
    (
        scatter_add_rows(torch.zeros(4, 2), torch.tensor([1, 1, 3]), rows) * torch.arange(4.0)[:, None]
    ).sum().backward()
    assert rows.grad is not None
    assert rows.grad[:, 0].tolist() == [1.0, 1.0, 3.0]


@pytest.mark.parametrize("mode", ["native", "reference"])
@pytest.mark.parametrize("bad", [-1, 4])
def test_ids_out_of_range(monkeypatch: pytest.MonkeyPatch, mode: str, bad: int) -> None:
    monkeypatch.setenv("POLYHOP_KERNELS", mode)
    out = torch.zeros(4, 2)
    with pytest.raises(KernelError, match=rf"ids\[2\] = {bad}, outside 0 \.\. 3"):
        scatter_add_rows(out, torch.tensor([0, 1, bad]), torch.ones(3, 2))
    assert not out.any()


def test_wrong_shapes_and_dtypes() -> None:
    out, ids = torch.zeros(4, 2), torch.tensor([0, 1])
    with pytest.raises(InputError, match=r"must share F, got \[4, 2\] and \[2, 3\]"):
        scatter_add_rows(out, ids, torch.ones(2, 3))
    with pytest.raises(InputError, match=r"ids must be int64 \[3\]"):
        scatter_add_rows(out, ids, torch.ones(3, 2))
    with pytest.raises(InputError, match="one float dtype"):
        scatter_add_rows(out, ids, torch.ones(2, 2, dtype=torch.float64))
