"""The shared library built from ``csrc/``, loaded through its C ABI. Nothing here falls back silently.

``POLYHOP_KERNELS`` chooses: ``auto`` (native where it can serve, Triton on CUDA; said by ``polyhop env``), ``native`` (an
error where it cannot), ``triton`` (an error where ``device.py`` has no Triton kernel; ops without one are served as by
``auto``) or ``reference`` (plain torch everywhere). ``POLYHOP_THREADS`` bounds the kernels' threads (default: torch's).
"""

from __future__ import annotations

import ctypes
import os
import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch

from polyhop.errors import ConfigError, KernelError, unknown

__all__ = ["call", "float_code", "id_code", "library", "mode", "num_threads", "serves", "status"]

_ABI = 1
_MODES = ("auto", "native", "triton", "reference")


@cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None and the reason why there is none."""
    folder = Path(__file__).parent
    found = sorted(folder.glob("*polyhop_native.*"))
    if not found:
        return None, f"no native library beside {folder.name}/ (build it: pip install -e .)"
    try:
        lib = ctypes.CDLL(str(found[0]))
    except OSError as error:
        return None, f"{found[0].name} does not load: {error}"
    lib.ph_isa.restype = ctypes.c_char_p
    if lib.ph_abi() != _ABI:
        return None, f"{found[0].name} has ABI {lib.ph_abi()}, this code needs {_ABI}: reinstall polyhop"
    return lib, f"{found[0].name}, instruction set {lib.ph_isa().decode()}"


def mode() -> str:
    """What ``POLYHOP_KERNELS`` asks for."""
    wanted = os.environ.get("POLYHOP_KERNELS", "auto")
    if wanted not in _MODES:
        raise ConfigError(unknown("POLYHOP_KERNELS", wanted, _MODES))
    return wanted


@cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"polyhop runs on plain torch kernels, much slower: {reason}", RuntimeWarning, stacklevel=3)


def library() -> ctypes.CDLL:
    """The loaded library; raises KernelError with the reason if there is none."""
    lib, reason = _load()
    if lib is None:
        raise KernelError(reason)
    return lib


def serves(
    *tensors: torch.Tensor | None,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64, torch.bfloat16),
    op: str | None = None,
) -> bool:
    """Whether the native library will run this call: mode, device, dtype of the floating tensors, the op's symbol.

    Warns once if the library is missing or has no such op.
    """
    wanted = mode()
    if wanted == "reference":
        return False
    is_served = True
    for t in tensors:
        if t is not None and not (t.is_cpu and (t.dtype in dtypes or not t.is_floating_point())):
            is_served = False
    if not is_served:
        if wanted == "native":
            given = ", ".join(f"{t.dtype} on {t.device}" for t in tensors if t is not None)
            raise KernelError(f"POLYHOP_KERNELS=native, but no native kernel for {given}")
        return False
    lib, reason = _load()
    if lib is not None and op is not None and not _has(op):
        lib, reason = None, f"the native library has no {op}: reinstall polyhop"
    if lib is None:
        if wanted == "native":
            raise KernelError(reason)
        _warn_once(reason)
        return False
    return True


@cache
def _has(op: str) -> bool:
    lib, _ = _load()
    return lib is not None and hasattr(lib, op)


@cache
def _function(op: str) -> Any:
    function = getattr(library(), op, None)
    if function is None:
        raise KernelError(f"the native library has no {op}: reinstall polyhop")
    function.restype = ctypes.c_int64
    return function


def call(op: str, *args: torch.Tensor | int | float | None) -> int:
    """Call one C function: tensors as addresses, whole numbers as int64 (keys as their 64 bits), floats as double."""
    function = _function(op)
    given: list[int | float | None] = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            assert arg.is_contiguous(), "native kernels take contiguous tensors"
            given.append(arg.data_ptr())
        else:
            given.append(arg)
    if function.argtypes is None:  # every call has the same kind of argument in each place
        function.argtypes = [_c_type(arg) for arg in args]
    return cast(int, function(*given))


def _c_type(arg: torch.Tensor | int | float | None) -> Any:
    if arg is None or isinstance(arg, torch.Tensor):
        return ctypes.c_void_p
    return ctypes.c_double if isinstance(arg, float) else ctypes.c_int64


_FLOAT_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.int8: 3, torch.uint8: 4}


def float_code(tensor: torch.Tensor) -> int:
    """Code of a row dtype in the C ABI."""
    return _FLOAT_CODES[tensor.dtype]


def id_code(tensor: torch.Tensor) -> int:
    """Code of an id dtype in the C ABI: 0 = int32, 1 = int64."""
    return int(tensor.dtype == torch.int64)


def status() -> dict[str, str]:
    """What is active and why, for ``polyhop env``."""
    lib, reason = _load()
    active = "native" if lib is not None and mode() != "reference" else "reference"
    return {
        "mode": mode(),
        "cpu": active,
        "cuda": _on_cuda(),
        "library": reason,
        "threads": str(num_threads()),
    }


def _on_cuda() -> str:
    has_triton = torch.cuda.is_available() and find_spec("triton") is not None
    return "triton" if has_triton and mode() in ("auto", "triton") else "reference"


def num_threads() -> int:
    """Threads a kernel call may use: POLYHOP_THREADS, else torch's setting."""
    given = os.environ.get("POLYHOP_THREADS")
    if given is None:
        return torch.get_num_threads()
    if not given.isdigit() or int(given) < 1:
        raise ConfigError(f"POLYHOP_THREADS={given!r}: expected a whole number of at least 1")
    return int(given)
