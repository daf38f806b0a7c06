"""PlacedFeatures: input rows that a device reads by itself, those it needs most from its memory, others from the host's.

Legend: N nodes, K rows on the device, F features.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyhop.graph.features import DenseFeatures
from polyhop.kernels import gather_rows

__all__ = ["PlacedFeatures"]


@dataclass(frozen=True, eq=False)
class PlacedFeatures:
    """Rows in their stored dtype; ``gather`` takes ids on the device and gives float rows there."""

    place: Tensor  # int64 [N], on the device: of each node, its row of hot, or K + its row of rest
    hot: Tensor  # [K, F], on the device
    rest: Tensor  # [N, F], all rows, in pinned memory of the host
    scale: Tensor | None = None  # float32 [F], on the device: multiplies each column

    @classmethod
    def of(cls, x: DenseFeatures, device: torch.device, num_hot: int, likely: Tensor) -> PlacedFeatures:
        """The ``num_hot`` rows that are likeliest to be read (``likely`` [N]) on the device; ties by node."""
        best = torch.sort(likely, descending=True, stable=True).indices[:num_hot].sort().values
        place = torch.arange(x.num_rows) + best.numel()
        place[best] = torch.arange(best.numel())
        scale = None if x.scale is None else x.scale.to(device)
        values, is_registered = _readable(x.values.contiguous(), device)
        made = cls(place.to(device), values.index_select(0, best).to(device), values, scale)
        if is_registered:
            weakref.finalize(made, _unregister, values).atexit = False
        return made

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


def _readable(values: Tensor, device: torch.device) -> tuple[Tensor, bool]:
    """The same values where a CUDA device reads them, and whether their memory was registered for that: else, a copy."""
    if device.type != "cuda" or not values.numel() or values.is_pinned():
        return values, False
    size = values.numel() * values.element_size()
    if int(_runtime().cudaHostRegister(values.data_ptr(), size, 0)) == 0 and values.is_pinned():
        return values, True
    return values.pin_memory(), False


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _unregister(values: Tensor) -> None:
    """The memory is the host's alone again, once nothing reads it any more."""
    torch.cuda.synchronize()
    _runtime().cudaHostUnregister(values.data_ptr())
