"""The halo of a part, found a chunk of sources at a time: one bit per node instead of a table of rows.

Legend: N nodes, n own nodes, H halo nodes, k ids of this chunk. Ids are new ids: the part owns start .. stop - 1.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from polyhop.kernels import checks, native

__all__ = ["Halo"]


class Halo:
    """First ``mark`` every source of the part, then ``close``, then ask for ``rows``."""

    def __init__(self, num_nodes: int, start: int, stop: int) -> None:
        self._start, self._stop = start, stop
        self._bits = torch.zeros((num_nodes + 63) // 64, dtype=torch.int64)
        self._rank = torch.zeros_like(self._bits)

    def mark(self, ids: Tensor) -> int:
        """Note sources (int32 or int64 [k], in 0 .. N - 1); how many of them are owned elsewhere, repeats counted."""
        if native.serves(ids, op="ph_halo_mark"):
            given = (ids.contiguous(), native.id_code(ids), ids.numel())
            return native.call("ph_halo_mark", *given, self._start, self._stop, self._bits)
        remote = ids[(ids < self._start) | (ids >= self._stop)].long()
        flags = self._flags()
        flags[remote] = True
        packed = np.packbits(flags.numpy(), bitorder="little")
        self._bits = torch.from_numpy(packed.view(np.int64))
        return remote.numel()

    def close(self) -> int:
        """H: how many different ids were marked. From now on rows are known."""
        if native.serves(self._bits, op="ph_halo_rank"):
            return native.call("ph_halo_rank", self._bits, self._bits.numel(), self._rank)
        each = self._flags().view(-1, 64).sum(1)
        self._rank = each.cumsum(0) - each
        return int(each.sum())

    def ids(self, step: int = 1 << 20) -> Iterator[Tensor]:
        """int64, ascending: all that were marked, from ``step`` nodes at a time."""
        words = max(step // 64, 1)
        for first in range(0, self._bits.numel(), words):
            bits = self._bits[first : first + words]
            if native.serves(bits, op="ph_halo_list"):
                found = torch.empty(64 * bits.numel(), dtype=torch.int64)
                found = found[: native.call("ph_halo_list", bits, bits.numel(), found)]
            else:
                found = self._flags()[64 * first : 64 * (first + words)].nonzero()[:, 0]
            if found.numel():
                yield found + 64 * first

    def rows(self, ids: Tensor, *, out: Tensor | None = None) -> Tensor:
        """int32 [k]: row of each marked or own id among own nodes, then halo. ``out`` may be int32 ids' own memory."""
        made = torch.empty(ids.numel(), dtype=torch.int32) if out is None else out
        checks.vector("halo rows", "out", made, ids.numel())
        if native.serves(ids, op="ph_halo_rows"):
            given = (ids.contiguous(), native.id_code(ids), ids.numel())
            native.call("ph_halo_rows", *given, self._start, self._stop, self._bits, self._rank, made)
            return made
        position = self._flags().long().cumsum(0) - 1 + self._stop - self._start
        ids = ids.long()
        is_own = (ids >= self._start) & (ids < self._stop)
        made.copy_(torch.where(is_own, ids - self._start, position[ids]))
        return made

    def _flags(self) -> Tensor:
        """bool [64 x words]: which ids are marked."""
        octets = self._bits.numpy().view(np.uint8)
        return torch.from_numpy(np.unpackbits(octets, bitorder="little").astype(bool))
