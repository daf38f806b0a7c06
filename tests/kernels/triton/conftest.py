"""The Triton kernels on whatever there is: a CUDA device, or Triton's interpreter on small shapes."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined: before any of them is imported

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]


def _teach_interpreter() -> None:
    """Loop bounds are arrays of one element there, which numpy turns into an index no more from 2.4 on."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if not HAS_CUDA and importlib.util.find_spec("triton"):
    _teach_interpreter()


@pytest.fixture(autouse=True)
def uncovered() -> Iterator[None]:
    """Coverage traces every step of the interpreter: 2.5 times the time. Its own pause is not enough under pytest-xdist."""
    tracer = sys.gettrace()
    if HAS_CUDA or not type(tracer).__module__.startswith("coverage"):
        yield
        return
    sys.settrace(None)
    yield
    sys.settrace(tracer)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where the interpreter takes seconds for each, one dtype of three (float32) waits for scripts/test --all."""
    for item in items:
        given = getattr(getattr(item, "callspec", None), "params", {})
        is_long = (
            getattr(item, "originalname", "") == "test_equals_reference"
            and given.get("dtype") == torch.float32
        )
        if is_long and not HAS_CUDA and item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if HAS_CUDA else "cpu")


@pytest.fixture(autouse=True)
def triton_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that the Triton kernels cannot serve fail instead of falling back."""
    monkeypatch.setenv("POLYHOP_KERNELS", "triton")


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN, or the largest number: what a kernel leaves unwritten is seen."""
    plain, like = torch.empty, torch.empty_like

    def spoilt(made: torch.Tensor) -> torch.Tensor:
        return made.fill_(torch.nan if made.is_floating_point() else torch.iinfo(made.dtype).max)

    monkeypatch.setattr(torch, "empty", lambda *size, **options: spoilt(plain(*size, **options)))
    monkeypatch.setattr(torch, "empty_like", lambda given, **options: spoilt(like(given, **options)))
