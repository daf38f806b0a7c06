"""What every kernel's front checks before memory is touched, worded once.

Shapes and dtypes are always checked; ids are checked one by one with ``POLYHOP_DEBUG=1`` only, because that costs a pass.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import torch
from torch import Tensor

from polyhop.errors import InputError, KernelError

__all__ = ["bounds", "csr", "is_debug", "require", "same_device", "two_places", "vector"]


def is_debug() -> bool:
    """Whether ids are checked one by one: POLYHOP_DEBUG=1."""
    return os.environ.get("POLYHOP_DEBUG", "0") not in ("", "0")


def require(ok: bool, message: str | Callable[[], str]) -> None:
    """InputError with the message unless ok; a function makes it only then, where every call counts."""
    if not ok:
        raise InputError(message if isinstance(message, str) else message())


def bounds(op: str, name: str, ids: Tensor, limit: int) -> None:
    """KernelError naming the first position of ids that is outside 0 .. limit-1."""
    bad = (ids < 0) | (ids.long() >= limit)  # int32 ids: a limit beyond 2**31 must not wrap
    if bool(bad.any()):
        at = int(bad.reshape(-1).nonzero()[0])
        value = int(ids.reshape(-1)[at])
        raise KernelError(f"{op}: {name}[{at}] = {value}, outside 0 .. {limit - 1}")


def csr(op: str, indptr: Tensor, indices: Tensor, num_src: int) -> None:
    """indptr int64 [D + 1] and indices int32 or int64 [E], E = indptr[-1]; in debug mode also their contents."""
    require(
        indptr.dim() == 1 and indptr.numel() >= 1 and indptr.dtype == torch.int64,
        lambda: f"{op}: indptr must be int64 [D + 1], got {indptr.dtype} {list(indptr.shape)}",
    )
    require(
        indices.dim() == 1 and indices.dtype in (torch.int32, torch.int64),
        lambda: f"{op}: indices must be int32 or int64 [E], got {indices.dtype} {list(indices.shape)}",
    )
    require(num_src >= 0, lambda: f"{op}: num_src must be at least 0, got {num_src}")
    if indptr.is_cpu:  # reading one number from a GPU would wait for it
        first, last = _ends(indptr)
        require(
            first == 0 and last == indices.numel(),
            lambda: f"{op}: indptr must run from 0 to the {indices.numel()} indices, got {first} .. {last}",
        )
    if is_debug():
        falls = (indptr[1:] < indptr[:-1]).nonzero()
        if falls.numel():
            at = int(falls[0]) + 1
            raise KernelError(
                f"{op}: indptr[{at}] = {int(indptr[at])} is below indptr[{at - 1}] = {int(indptr[at - 1])}"
            )
        bounds(op, "indices", indices, num_src)


def _ends(values: Tensor) -> tuple[int, int]:
    """The first and the last of int64 values in memory. A tensor's own way to one number takes three calls of torch."""
    if type(values) is not Tensor:  # a subclass may keep its values elsewhere
        return int(values[0]), int(values[-1])
    at, stride = values.data_ptr(), 8 * values.stride(0)
    last = at + (values.numel() - 1) * stride
    return ctypes.c_int64.from_address(at).value, ctypes.c_int64.from_address(last).value


def vector(op: str, name: str, tensor: Tensor | None, length: int) -> None:
    """A vector of the given length, or None."""
    require(
        tensor is None or (tensor.dim() == 1 and tensor.numel() == length),
        lambda: (
            f"{op}: {name} must have shape [{length}], got {None if tensor is None else list(tensor.shape)}"
        ),
    )


def same_device(op: str, **tensors: Tensor | None) -> None:
    """All given tensors on one device."""
    given = [t.device for t in tensors.values() if t is not None]
    require(
        all(device == given[0] for device in given),
        lambda: (
            f"{op}: all tensors must be on one device, got "
            + ", ".join(f"{name} on {t.device}" for name, t in tensors.items() if t is not None)
        ),
    )


def two_places(op: str, name: str, first: Tensor, second: Tensor, *, from_host: bool = False) -> None:
    """Two matrices that can be read as one: the same columns, dtype and device, and none that wants a gradient.

    ``from_host``: either may be in pinned host memory instead, where the device reads it.
    """
    require(
        second.dim() == 2 and second.shape[1] == first.shape[1] and second.dtype == first.dtype,
        lambda: (
            f"{op}: second must be {first.dtype} with the {first.shape[1]} columns of {name}, got {second.dtype} "
            f"{list(second.shape)}"
        ),
    )
    on_host = first if first.is_cpu else second
    if not (from_host and first.device != second.device and on_host.is_pinned()):
        same_device(op, **{name: first, "second": second})
    wants = torch.is_grad_enabled() and (first.requires_grad or second.requires_grad)
    require(
        not wants,
        lambda: (
            f"{op}: rows in two places get no gradient; give one matrix (torch.cat) to train the rows, or .detach() both"
        ),
    )
