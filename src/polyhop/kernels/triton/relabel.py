"""Rows by first appearance on the device: every id's first place, by atomic minima in a table, then a running count.

Minima do not depend on the order in which they are taken: the numbering is that of the host.

Legend: N nodes, B first ids, m more ids.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Table"]

_IDS = 1024  # of a program
_FREE = 2**31 - 1


@triton.jit(do_not_specialize=["num_ids"])
def _place(ids, table, num_ids, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < num_ids
    tl.atomic_min(table + tl.load(ids + at, mask=ok, other=0), at.to(tl.int32), mask=ok, sem="relaxed")


class Table:
    """4 bytes for each of N nodes; ``first`` int32 [N] is 2^31 - 1 between calls."""

    def __init__(self, num_nodes: int, device: torch.device) -> None:
        self.first = torch.full((num_nodes,), _FREE, dtype=torch.int32, device=device)

    def relabel(self, ids: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
        """Distinct ids int64 [B], then the new ones of ``more`` [m] by first appearance; and the int32 rows of more."""
        everyone = torch.cat([ids, more])
        if not everyone.numel():
            return everyone, everyone.to(torch.int32)
        grid = (triton.cdiv(everyone.numel(), _IDS),)
        _place[grid](everyone, self.first, everyone.numel(), BLOCK=_IDS, num_warps=4)
        first = self.first[everyone]
        is_first = first == torch.arange(everyone.numel(), dtype=torch.int32, device=ids.device)
        row = is_first.cumsum(0, dtype=torch.int32) - 1
        self.first.index_fill_(0, everyone, _FREE)
        return everyone[is_first], row[first[ids.numel() :].long()]
