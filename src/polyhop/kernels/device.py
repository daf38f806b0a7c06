"""Whether Triton kernels run a call: the choice for tensors on a CUDA device. Triton is imported only when they do.

``POLYHOP_KERNELS=auto`` takes Triton on CUDA where it is installed; ``triton`` makes it an error where it cannot serve, and
serves tensors in host memory too if Triton interprets (``TRITON_INTERPRET=1``: slow, for tests on machines without a GPU).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from polyhop.errors import KernelError
from polyhop.kernels import native

__all__ = ["FLOATS", "has_kernels", "interprets", "runs_on", "serves"]

FLOATS = (torch.float32, torch.float64, torch.bfloat16)


def interprets() -> bool:
    """Whether Triton's interpreter runs the kernels, on any device."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def serves(*tensors: Tensor | None, dtypes: tuple[torch.dtype, ...] = FLOATS) -> bool:
    """Whether the Triton kernels will run this call: mode, device, dtype of the floating tensors."""
    mode = native.mode()
    if mode in ("reference", "native"):
        return False
    given = [t for t in tensors if t is not None]
    if mode == "auto" and not any(t.is_cuda for t in given):
        return False
    anywhere = mode == "triton" and interprets()
    is_served = all(
        (t.is_cuda or anywhere) and (t.dtype in dtypes or not t.is_floating_point()) for t in given
    )
    reason = _missing()
    if is_served and reason is None:
        _check_current(given)
        return True
    if mode == "triton":
        kinds = ", ".join(f"{t.dtype} on {t.device}" for t in given)
        raise KernelError(f"POLYHOP_KERNELS=triton, but no Triton kernel for {kinds}" + (reason or ""))
    if reason is not None:
        _warn_once(reason)
    return False


def _check_current(given: Iterable[Tensor]) -> None:
    """KernelError unless kernels will be launched where the tensors are."""
    for t in given:
        if t.is_cuda and t.device.index != torch.cuda.current_device():
            raise KernelError(
                f"tensors are on {t.device}, and the current device is cuda:{torch.cuda.current_device()}: call "
                f"torch.cuda.set_device({t.device.index}) first, or compute inside torch.cuda.device({t.device.index})"
            )


def runs_on(tensor: Tensor) -> bool:
    """Which of the two kernels an autograd function runs that one of them serves: Triton's, or else the native one."""
    return tensor.is_cuda or (native.mode() == "triton" and interprets())


def has_kernels() -> bool:
    """Whether tensors on a CUDA device would be served by kernels rather than by plain torch."""
    return native.mode() in ("auto", "triton") and _missing() is None


@cache
def _missing() -> str | None:
    """Why there is no Triton here, or None."""
    return None if find_spec("triton") is not None else ": the package triton is not installed"


@cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"polyhop runs on plain torch kernels, much slower{reason}", RuntimeWarning, stacklevel=3)
