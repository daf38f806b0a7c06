"""PlacedFeatures: input rows that a device reads by itself, those it needs most from its memory, others from the host's.

Legend: N nodes, K rows on the device, F features.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyhop.graph.features import DenseFeatures
from polyhop.kernels import gather_rows

__all__ = ["PlacedFeatures"]

_FOR_ALL_DEVICES = 1  # cudaHostRegisterPortable
_PIECE_BYTES = 1 << 28  # of hot rows, on their way to the device


@dataclass(frozen=True, eq=False)
class PlacedFeatures:
    """Rows in their stored dtype; ``gather`` takes ids on the device and gives float rows there."""

    place: Tensor  # int64 [N], on the device: of each node, its row of hot, or K + its row of rest
    hot: Tensor  # [K, F], on the device
    rest: Tensor  # [N, F], all rows, in pinned memory of the host
    scale: Tensor | None = None  # float32 [F], on the device: multiplies each column

    held: _Readable | None = None  # keeps memory registered that was not made for a device

    @classmethod
    def of(cls, x: DenseFeatures, device: torch.device, num_hot: int, likely: Tensor) -> PlacedFeatures:
        """The ``num_hot`` rows that are likeliest to be read (``likely`` [N]) on the device; ties by node."""
        best = torch.sort(likely, descending=True, stable=True).indices[:num_hot].sort().values
        place = torch.arange(x.num_rows) + best.numel()
        place[best] = torch.arange(best.numel())
        scale = None if x.scale is None else x.scale.to(device)
        values, held = _readable(x.values.contiguous(), device)
        return cls(place.to(device), _brought(values, best, device), values, scale, held)

    @property
    def num_rows(self) -> int:
        return self.rest.shape[0]

    @property
    def num_features(self) -> int:
        return self.rest.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Of the stored values."""
        return self.rest.dtype

    def gather(self, ids: Tensor) -> Tensor:
        rows = self.place.index_select(0, ids)  # which checks ids
        return gather_rows(self.hot, rows, second=self.rest, scale=self.scale, are_checked=True)

    def all(self) -> Tensor:
        """Every row, in memory of the host."""
        return DenseFeatures(self.rest, None if self.scale is None else self.scale.cpu()).all()


def _brought(values: Tensor, ids: Tensor, device: torch.device) -> Tensor:
    """Those rows on the device, by way of little memory of the host."""
    made = torch.empty(ids.numel(), values.shape[1], dtype=values.dtype, device=device)
    step = max(1, _PIECE_BYTES // max(1, values.element_size() * values.shape[1]))
    for start in range(0, ids.numel(), step):
        made[start : start + step] = values.index_select(0, ids[start : start + step])
    return made


class _Readable:
    """Memory of the host that devices may read, as long as anybody keeps this."""

    def __init__(self, values: Tensor) -> None:
        self.devices: set[torch.device] = set()
        weakref.finalize(self, _unregister, values, self.devices).atexit = False


# By where it begins: rows that two runs read are registered once, and for as long as one of them lasts.
_registered: weakref.WeakValueDictionary[int, _Readable] = weakref.WeakValueDictionary()


def _readable(values: Tensor, device: torch.device) -> tuple[Tensor, _Readable | None]:
    """The same values where a CUDA device reads them: their memory, registered for that, or else a copy."""
    if device.type != "cuda" or not values.numel():
        return values, None
    storage = values.untyped_storage()  # all of it: torch asks where this begins whether a tensor is pinned
    held = _registered.get(storage.data_ptr())
    if held is None:
        if values.is_pinned():
            return values, None
        if int(_runtime().cudaHostRegister(storage.data_ptr(), storage.nbytes(), _FOR_ALL_DEVICES)) != 0:
            _forget_error(device)
            return values.pin_memory(), None
        held = _registered[storage.data_ptr()] = _Readable(values)
    held.devices.add(device)
    return values, held


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _forget_error(device: torch.device) -> None:
    """What the runtime refused is kept by it as the last error, which the next launch would be blamed for."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)


def _unregister(values: Tensor, devices: set[torch.device]) -> None:
    """The memory is the host's alone again, once nothing reads it any more."""
    for device in devices:
        torch.cuda.synchronize(device)
    _runtime().cudaHostUnregister(values.untyped_storage().data_ptr())
