"""Gradients of the epoch before, for rows whose readers had their turn first (LMC, Shi et al., 2023).

A chunk's gradient is complete when all that read its rows have gone backward. Of those before it in the epoch's order it
gets nothing, because they read history. Here every reader keeps what it would have sent: the gradient of each row that it
read of others. In the next epoch a row starts with what those of its readers gave then that will not give now. So no
gradient is left out or counted twice, some are one epoch old; where weights stand still and no unit is dropped, all are
exact once every layer has had an epoch. Where the row is another way's, it goes to the gradients of the halo, and returns to
its owner with those of this epoch: nothing more is exchanged.

Legend: N rows, of the halo too, K chunks, o rows of others that a chunk reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyhop.kernels import scatter_add_rows
from polyhop.strategies.pipeline_chunks import Chunks

__all__ = ["PastGradients"]


class PastGradients:
    """``layers``: of each layer whose input rows are read of others, shape and dtype of one."""

    def __init__(
        self, chunks: Chunks, layers: dict[int, tuple[tuple[int, ...], torch.dtype]], device: torch.device
    ) -> None:
        self._chunks = chunks
        sizes = [chunk.others.numel() for chunk in chunks.chunks]
        self._starts = [sum(sizes[:at]) for at in range(len(sizes) + 1)]
        self.given = {  # [sum of o, ...]: by reader
            layer: torch.zeros(self._starts[-1], *shape, dtype=dtype, device=device)
            for layer, (shape, dtype) in layers.items()
        }

    def keep(self, layer: int, chunk: int, grads: Tensor) -> None:
        """What a chunk gives to the rows [o, ...] that it read."""
        self._of(layer, chunk).copy_(grads)

    def _of(self, layer: int, chunk: int) -> Tensor:
        at = chunk - self._chunks.first
        return self.given[layer][self._starts[at] : self._starts[at + 1]]

    def begin(self, layer: int, table: Tensor, place: Sequence[int]) -> None:
        """Add to a table [N, ...] of gradients what readers before a row's chunk gave in the epoch before."""
        flat = table.view(table.shape[0], -1)
        places = torch.tensor(place, device=table.device)
        for chunk in self._chunks.numbers:
            at = self._chunks[chunk]
            is_cut = places[at.other_chunks] > place[chunk]
            rows = self._of(layer, chunk)[is_cut]
            if rows.shape[0]:
                scatter_add_rows(flat, at.others[is_cut], rows.reshape(rows.shape[0], -1).contiguous())

    def state(self) -> dict[str, Tensor]:
        """What a continuation needs."""
        return {f"given{layer}": rows for layer, rows in self.given.items()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Put back what ``state`` gave."""
        for layer, rows in self.given.items():
            rows.copy_(tensors[f"given{layer}"])

    @property
    def num_bytes(self) -> int:
        return sum(rows.numel() * rows.element_size() for rows in self.given.values())
