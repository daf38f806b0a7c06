"""What rows were before their chunk had its turn: of those that other chunks read, for a second forward pass.

Chunks go backward when all have gone forward, so what a chunk read of those after it has been overwritten by then. Every
chunk's rows are overwritten once an epoch; what was there goes here first, as far as others read it: one row for each such
row of the graph, however many read it. So it is with the halo of a way, whose rows are overwritten when their chunk's tick
is due.

Legend: N rows, of the halo too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from polyhop.strategies.pipeline_chunks import Chunks

__all__ = ["Past", "Spec"]

Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape of one row, and its dtype."""


class Past:
    """Of one stage; ``layers`` as of its history."""

    def __init__(self, chunks: Chunks, layers: Mapping[int, Spec], device: torch.device) -> None:
        is_read = torch.zeros(chunks.num_rows, dtype=torch.bool)
        for chunk in chunks.chunks:
            is_read[chunk.others.cpu()] = True
        self._at = is_read.cumsum(0) - 1  # int64 [N]: where a row that is read lies
        self._own = {}  # of each chunk, of other ways too: int64, which of its rows in a table, and where they lie
        for number in range(len(chunks)):
            rows = chunks.table_rows(number)
            mine = is_read[rows].nonzero().view(-1)
            self._own[number] = mine.to(device), self._at[rows.start + mine].to(device)
        self._at = self._at.to(device)
        count = int(is_read.sum())
        self.rows = {
            layer: torch.zeros(count, *shape, dtype=dtype, device=device)
            for layer, (shape, dtype) in layers.items()
        }

    @property
    def num_rows(self) -> int:
        """That are read by chunks other than their own."""
        return sum(at.numel() for _, at in self._own.values())

    @property
    def index_bytes(self) -> int:
        """Of where they lie."""
        indices = [self._at, *(each for pair in self._own.values() for each in pair)]
        return sum(each.numel() * each.element_size() for each in indices)

    def keep(self, layer: int, chunk: int, rows: Tensor) -> None:
        """A chunk's rows [n, ...] in a table, about to be overwritten."""
        mine, at = self._own[chunk]
        self.rows[layer][at] = rows[mine]

    def read(self, layer: int, rows: Tensor) -> Tensor:
        """What some rows (int64) were."""
        return self.rows[layer][self._at[rows]]
