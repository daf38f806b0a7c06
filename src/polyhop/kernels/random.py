"""Philox4x32-10 words for many ids at once: shuffles, rounding and whatever else needs a keyed draw.

Legend: n ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhop.kernels import checks, native, reference

__all__ = ["random_u32"]


def random_u32(key: int, ids: Tensor, other: int = 0) -> Tensor:
    """int64 [n, 4]: the four 32-bit words of philox(key, id, other) for each id (int64 [n])."""
    checks.require(
        ids.dim() == 1 and ids.dtype == torch.int64,
        f"random_u32: ids must be int64 [n], got {ids.dtype} {list(ids.shape)}",
    )
    if not native.serves(ids, op="ph_random_u32"):
        return reference.random_u32(key, ids, other)
    out = torch.empty(ids.numel(), 4, dtype=torch.int64)
    native.call("ph_random_u32", key, ids.contiguous(), ids.numel(), other, out, native.num_threads())
    return out
