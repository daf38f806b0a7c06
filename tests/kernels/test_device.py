"""Which kernels serve tensors on a device, and that a machine without one is left alone."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polyhop.errors import KernelError
from polyhop.kernels import device


def test_tensors_in_memory_are_the_native_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    for mode in ("auto", "native", "reference"):
        monkeypatch.setenv("POLYHOP_KERNELS", mode)
        assert not device.serves(torch.ones(1), None)


def test_triton_mode_never_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYHOP_KERNELS", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(KernelError, match=r"no Triton kernel for torch\.float32 on cpu"):
        device.serves(torch.ones(1))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(KernelError, match=r"no Triton kernel for torch\.float16 on cpu"):
        device.serves(torch.ones(1, dtype=torch.float16))
    monkeypatch.setattr(device, "_missing", lambda: ": the package triton is not installed")
    with pytest.raises(KernelError, match="the package triton is not installed"):
        device.serves(torch.ones(1))


def test_kernels_are_launched_where_the_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, whatever it is given."""
    second: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1), dtype=torch.int64)
    second.is_floating_point = lambda: False
    monkeypatch.setenv("POLYHOP_KERNELS", "auto")
    monkeypatch.setattr(device, "_missing", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert device.serves(second, None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(
        KernelError, match=r"on cuda:1, and the current device is cuda:0: call torch\.cuda\.set_device\(1\)"
    ):
        device.serves(second)


def test_work_in_memory_imports_no_triton() -> None:
    """Importing everything and computing on the CPU, forward and backward."""
    code = """
import sys, importlib, pkgutil, torch
had = "triton" in sys.modules  # torch's own doing, then
import polyhop
from polyhop import kernels
from polyhop.graph import Block
block = Block(torch.tensor([0, 2]), torch.tensor([0, 1]), 2)
x = torch.ones(2, 3, requires_grad=True)
kernels.dropout(kernels.aggregate(block, x), None, 0.5, 1).sum().backward()
kernels.gather_rows(x, torch.tensor([1])).sum().backward()
assert ("triton" in sys.modules) == had
"""
    subprocess.run([sys.executable, "-c", code], check=True)
