"""Rows are sent again only when they have moved: readers use what they have until then (after SANCUS).

For each rank that reads, the sender compares its rows with those it sent last: it skips the message while their relative
distance is at most ``drift`` and they are younger than ``max_age`` steps. Gradients always cross. Bound: rows that are used
are within ``drift`` of the true ones, in norm over a message. drift = 0 sends whatever has changed, so it is exact.
Whether a message comes is told by its length: 8 bytes to each rank, and a round, more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhop.comm import Collective
from polyhop.exchange.crossing import Crossing, Messages, matrix, taken

__all__ = ["SkippingCrossing"]


class SkippingCrossing(Crossing):
    """``skipped`` and ``offered`` count messages with rows in them."""

    def __init__(
        self, messages: Messages, line: Collective, *, drift: float, max_age: int, overlaps: bool = True
    ) -> None:
        super().__init__(messages, line, overlaps=overlaps)
        self._drift, self._max_age = drift, max_age
        self._sent: dict[int, Tensor] = {}
        self._age: dict[int, int] = {}
        self._held: dict[int, Tensor] = {}
        self.skipped = self.offered = 0

    def begin_forward(self, rows: Tensor, sums: Tensor | None) -> None:
        self._note_shape(rows)
        flat = matrix(rows)
        packed = self.messages.pack("forward", flat, self.line.rank, sums)
        for rank, (source, ids) in enumerate(self.messages.sources("forward", flat, sums)):
            offered = source if ids is None else taken(source, ids)
            if offered.shape[0] and self._is_skipped(rank, offered):
                packed[rank] = packed[rank][:0]
        self._pending = self.send("forward", packed, None, flat[:0])

    def _is_skipped(self, rank: int, rows: Tensor) -> bool:
        self.offered += 1
        last, age = self._sent.get(rank), self._age.get(rank, 0) + 1
        if last is not None and age < self._max_age:
            far = torch.linalg.vector_norm(rows - last.to(rows))
            if bool(far <= self._drift * torch.linalg.vector_norm(last.to(rows))):
                self._age[rank] = age
                self.skipped += 1
                return True
        self._sent[rank], self._age[rank] = rows, 0
        return False

    def end_forward(self) -> Tensor:
        pieces = self._arrived()
        for rank, piece in enumerate(pieces):
            if piece.shape[0] or rank not in self._held:
                self._held[rank] = piece
        return torch.cat([self._held[rank].to(pieces[0]) for rank in range(len(pieces))]).view(
            self.lists.num_halo, *self.shape
        )

    def state(self) -> dict[str, Tensor]:
        ages = torch.tensor([self._age.get(rank, 0) for rank in range(self.line.num_ranks)])
        kept = {f"sent{rank}": rows for rank, rows in self._sent.items()}
        return kept | {f"held{rank}": rows for rank, rows in self._held.items()} | {"ages": ages}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        ranks = range(self.line.num_ranks)
        self._sent = {rank: tensors[f"sent{rank}"] for rank in ranks if f"sent{rank}" in tensors}
        self._held = {rank: tensors[f"held{rank}"] for rank in ranks if f"held{rank}" in tensors}
        self._age = dict(enumerate(tensors["ages"].tolist())) if "ages" in tensors else {}
