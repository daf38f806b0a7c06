"""Losses as sums over rows: dividing by the global count is the strategy's, so ranks can add up.

Legend: n rows, C classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhop.errors import ConfigError

__all__ = ["binary_cross_entropy_sum", "cross_entropy_sum"]


def cross_entropy_sum(logits: Tensor, y: Tensor) -> Tensor:
    """Summed cross entropy of logits [n, C] and labels int64 [n]; label -1 counts nothing. At least float32."""
    _check(logits, y.shape[0])
    return F.cross_entropy(_at_least_float32(logits), y, reduction="sum", ignore_index=-1)


def binary_cross_entropy_sum(logits: Tensor, y: Tensor) -> Tensor:
    """Summed binary cross entropy of logits [n, C] and 0/1 targets float [n, C]. At least float32."""
    _check(logits, y.shape[0])
    if logits.shape[1] != y.shape[1]:
        raise ConfigError(
            f"the model gives {logits.shape[1]} outputs, the graph has {y.shape[1]} labels per node"
        )
    logits = _at_least_float32(logits)
    return F.binary_cross_entropy_with_logits(logits, y.to(logits.dtype), reduction="sum")


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _check(logits: Tensor, rows: int) -> None:
    if logits.dim() != 2 or logits.shape[0] != rows:
        raise ConfigError(
            f"the model gave outputs of shape {list(logits.shape)}: expected one row for each of {rows} nodes"
        )
