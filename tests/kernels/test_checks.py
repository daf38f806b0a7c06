from __future__ import annotations

import pytest
import torch

from polyhop.errors import InputError, KernelError
from polyhop.kernels import checks


def test_debug_mode_is_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYHOP_DEBUG", raising=False)
    assert not checks.is_debug()
    for value, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("POLYHOP_DEBUG", value)
        assert checks.is_debug() is expected


def test_bounds_name_the_first_bad_position() -> None:
    checks.bounds("op", "ids", torch.tensor([0, 4]), 5)
    checks.bounds("op", "ids", torch.tensor([], dtype=torch.int64), 0)
    with pytest.raises(KernelError, match=r"op: ids\[1\] = -2, outside 0 \.\. 4"):
        checks.bounds("op", "ids", torch.tensor([0, -2, 9]), 5)


def test_csr_shapes() -> None:
    checks.csr("op", torch.tensor([0]), torch.tensor([], dtype=torch.int32), 0)
    for indptr in (torch.tensor([], dtype=torch.int64), torch.tensor([[0]]), torch.tensor([0.0])):
        with pytest.raises(InputError, match=r"op: indptr must be int64 \[D \+ 1\]"):
            checks.csr("op", indptr, torch.tensor([], dtype=torch.int64), 0)
    with pytest.raises(InputError, match="num_src must be at least 0, got -1"):
        checks.csr("op", torch.tensor([0]), torch.tensor([], dtype=torch.int64), -1)


def test_one_device() -> None:
    here, there = torch.ones(1), torch.ones(1, device="meta")
    checks.same_device("op", a=here, b=None)
    with pytest.raises(InputError, match="op: all tensors must be on one device, got a on cpu, b on meta"):
        checks.same_device("op", a=here, b=there)


def test_two_places() -> None:
    first, second = torch.ones(3, 2), torch.ones(0, 2)
    checks.two_places("op", "h", first, second)
    with pytest.raises(
        InputError, match=r"op: second must be torch\.float32 with the 2 columns of h, got .* \[2\]"
    ):
        checks.two_places("op", "h", first, torch.ones(2))
    with pytest.raises(InputError, match="op: rows in two places get no gradient"):
        checks.two_places("op", "h", first, second.requires_grad_())
    with torch.no_grad():
        checks.two_places("op", "h", first, second)
