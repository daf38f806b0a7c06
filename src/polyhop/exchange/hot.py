"""Own input rows that stay where computing happens: those that mini-batches read most, within a budget.

A rank loads rows of its own nodes only, so what it keeps of them is kept once among all ranks, and a row is either here or
where features are stored: no other rank is asked. On a GPU that saves the copy from the host's memory, on a CPU the read
from disk.

Legend: n own nodes, K rows kept, F features, m nodes asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhop.graph import SparseRows

__all__ = ["HotRows"]

Read = Callable[[Tensor], Tensor | SparseRows]
"""Local rows of own nodes (int64 [m]) -> their features, from where they are stored."""


@dataclass(frozen=True, eq=False)
class HotRows:
    """What a rank keeps of its own rows."""

    place: Tensor  # int64 [n]: of each own node among the rows that are kept; -1: it is not
    x: Tensor  # [K, F], where and as computing wants it

    @classmethod
    def of(
        cls,
        likely: Tensor,
        num_features: int,
        num_bytes: int,
        read: Read,
        device: torch.device,
        dtype: torch.dtype,
    ) -> HotRows:
        """The likeliest rows (``likely`` [n]) that fit into ``num_bytes``; those that are never read are not kept."""
        most = num_bytes // (dtype.itemsize * max(1, num_features))
        best = torch.sort(likely, descending=True, stable=True).indices[:most]
        best = best[likely[best] > 0].sort().values
        place = torch.full((likely.numel(),), -1, dtype=torch.int64)
        place[best] = torch.arange(best.numel())
        return cls(place, _dense(read(best)).to(device, dtype))

    @property
    def num_bytes(self) -> int:
        return self.x.numel() * self.x.element_size()

    def rows(self, ids: Tensor, read: Read) -> tuple[Tensor, int]:
        """([m, F] where computing happens: what is kept from here, what is not by ``read``; how many were here)."""
        place = self.place.index_select(0, ids)
        is_here = place >= 0
        here, missing = is_here.nonzero()[:, 0], (~is_here).nonzero()[:, 0]
        if not missing.numel():
            return self.x.index_select(0, place.to(self.x.device)), here.numel()
        stored = _dense(read(ids[missing])).to(self.x)
        if not here.numel():
            return stored, 0
        found = self.x.new_empty(ids.numel(), self.x.shape[1])
        found[here.to(self.x.device)] = self.x.index_select(0, place[here].to(self.x.device))
        found[missing.to(self.x.device)] = stored
        return found, here.numel()


def _dense(rows: Tensor | SparseRows) -> Tensor:
    return rows.dense() if isinstance(rows, SparseRows) else rows
