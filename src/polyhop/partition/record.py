"""Partition: which part owns each node, and the renumbering that makes every part a contiguous range.

Legend: N nodes, P parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from polyhop.errors import ConfigError, PartitionError

__all__ = ["Partition", "check_num_parts"]


@dataclass(frozen=True, eq=False)
class Partition:
    """The part of every node. New ids run through part 0 first, then part 1, ...; inside a part the user's order stays."""

    owner: Tensor  # int32 [N], by the user's ids
    num_parts: int
    method: str = "file"
    seed: int = 0

    def __post_init__(self) -> None:
        check_num_parts(self.num_parts)
        if self.owner.dtype != torch.int32 or self.owner.dim() != 1:
            raise PartitionError(
                f"owner: expected int32 [N], got {self.owner.dtype} {list(self.owner.shape)}"
            )
        if self.owner.numel() == 0:
            return
        low, high = int(self.owner.min()), int(self.owner.max())
        if low < 0 or high >= self.num_parts:
            raise PartitionError(
                f"owner: parts span {low} .. {high}, expected 0 .. {self.num_parts - 1} for {self.num_parts} parts"
            )

    @property
    def num_nodes(self) -> int:
        return self.owner.numel()

    @cached_property
    def sizes(self) -> Tensor:
        """int64 [P]: nodes of each part."""
        return torch.bincount(self.owner, minlength=self.num_parts)

    @cached_property
    def bounds(self) -> Tensor:
        """int64 [P + 1]: part p owns the new ids bounds[p] .. bounds[p + 1] - 1."""
        bounds = torch.zeros(self.num_parts + 1, dtype=torch.int64)
        torch.cumsum(self.sizes, 0, out=bounds[1:])
        return bounds

    @cached_property
    def user_ids(self) -> Tensor:
        """int64 [N]: the user's id of each new id."""
        return torch.sort(self.owner, stable=True).indices

    @cached_property
    def new_ids(self) -> Tensor:
        """int64 [N]: the new id of each of the user's ids."""
        new = torch.empty(self.num_nodes, dtype=torch.int64)
        new[self.user_ids] = torch.arange(self.num_nodes)
        return new

    def nodes_of(self, part: int) -> Tensor:
        """int64 [n], ascending: the user's ids of a part's nodes."""
        return self.user_ids[self.bounds[part] : self.bounds[part + 1]]


def check_num_parts(num_parts: int) -> None:
    """ConfigError unless it is a whole number of at least 1 (and the parts' numbers fit 31 bits)."""
    if type(num_parts) is not int or not 1 <= num_parts < 2**31:
        raise ConfigError(f"num_parts={num_parts!r}: expected a whole number of at least 1")
