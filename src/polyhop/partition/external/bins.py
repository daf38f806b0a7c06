"""Bins on disk: edges filed by a range of ids, each range small enough to be sorted in memory. The disk half of a sort.

Legend: B bins, n edges of a chunk or bin.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyhop.kernels.bins import Bins, bin_edges
from polyhop.partition.files import put, take

__all__ = ["BinFiles", "even_bounds"]

_KINDS = ("key", "value", "weight")


class BinFiles:
    """Files NAME-00000.key, .value and .weight of every bin; keys are places in the bin."""

    def __init__(self, folder: Path, name: str, bounds: Tensor, dtype: torch.dtype) -> None:
        self.bins, self.dtype = Bins.of(bounds), dtype
        self._folder, self._name = folder, name
        self.counts = torch.zeros(len(self.bins), dtype=torch.int64)

    def clear(self) -> None:
        """Remove what an earlier attempt left."""
        for path in self._folder.glob(f"{self._name}-*"):
            path.unlink()
        self.counts.zero_()

    def file(
        self, key: Tensor, value: Tensor, *, to: Tensor | None = None, weight: Tensor | None = None, apart: bool = False
    ) -> None:  # fmt: skip
        """Append a chunk of records (key, value): each to the bin of its key; ``to`` and ``apart`` as in ``bin_edges``."""
        keys, values, weights, counts = bin_edges(
            key, value, self.bins, to=to, weight=weight, dtype=self.dtype, apart=apart
        )
        start = 0
        for index, count in enumerate(counts.tolist()):
            if count == 0:
                continue
            mine = slice(start, start + count)
            for kind, tensor in zip(_KINDS, (keys, values, weights), strict=True):
                if tensor is not None:
                    with self._path(index, kind).open("ab", buffering=0) as file:
                        put(file, tensor[mine].numpy())
            start += count
        self.counts += counts

    def keys(self, index: int) -> Tensor:
        """int32 [n]: place in the bin."""
        return self._read(index, "key", np.int32)

    def values(self, index: int) -> Tensor:
        """[n], of the files' dtype."""
        return self._read(index, "value", np.int64 if self.dtype == torch.int64 else np.int32)

    def weights(self, index: int) -> Tensor | None:
        """float32 [n], or None."""
        has_weight = self._path(index, "weight").exists()
        return self._read(index, "weight", np.float32) if has_weight else None

    def remove(self, index: int) -> None:
        """Delete the files of one bin."""
        for kind in _KINDS:
            self._path(index, kind).unlink(missing_ok=True)

    def first(self, index: int) -> int:
        """The first id of a bin."""
        return int(self.bins.bounds[index])

    def num_rows(self, index: int) -> int:
        """How many ids a bin spans."""
        return int(self.bins.bounds[index + 1]) - self.first(index)

    def __len__(self) -> int:
        return len(self.bins)

    def _path(self, index: int, kind: str) -> Path:
        return self._folder / f"{self._name}-{index:05d}.{kind}"

    def _read(self, index: int, kind: str, dtype: Any) -> Tensor:
        count = int(self.counts[index])
        if count == 0:
            return torch.from_numpy(np.zeros(0, dtype))
        with self._path(index, kind).open("rb", buffering=0) as file:
            return take(file, dtype, count)


def even_bounds(degree: Tensor, limit: int, *, per_edge: int, per_node: int, within: Tensor) -> Tensor:
    """int64 [B + 1]: ranges of ids whose edges and nodes take at most ``limit`` bytes, none across a bound of ``within``.

    ``degree`` int32 [N]: edges of each id. A range of one id may take more.
    """
    bounds = [0]
    for start, stop in zip(within[:-1].tolist(), within[1:].tolist(), strict=True):
        reached = degree[start:stop].long().mul_(per_edge).add_(per_node).cumsum_(0)
        at, spent = 0, 0
        while at < stop - start:
            at = max(at + 1, int(torch.searchsorted(reached, spent + limit, right=True)))
            spent = int(reached[at - 1])
            bounds.append(start + at)
    return torch.tensor(bounds, dtype=torch.int64)
