"""A random share of the boundary crosses in each step, scaled up, so that sums are right on average (BNS-GCN).

Of the s rows that one rank reads of another, floor(share * s) are drawn, all layers drawing by the same numbers; both ends
draw alike, so no ids are sent. Rows and returned gradients grow by s / drawn; rows not drawn count as zero. Unbiased
for sums and means, whose divisor is the full degree. share = 1 is exact, share = 0 leaves the parts to themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from polyhop.comm import Collective
from polyhop.exchange.crossing import Crossing, Lists, Messages, add_rows, matrix
from polyhop.kernels import random_u32
from polyhop.kernels.keys import Key, Purpose, fold

__all__ = ["MakeMessages", "SampledCrossing"]

MakeMessages = Callable[[Lists, Tensor], Messages]
"""(who reads which rows, the positions among the halo's rows [k]) -> messages of these."""


class SampledCrossing(Crossing):
    """``ids``: the user's, of own rows and of the halo; ``make`` gives the messages of the rows that were drawn."""

    def __init__(
        self,
        messages: Messages,
        line: Collective,
        *,
        share: float,
        ids: tuple[Tensor, Tensor],
        make: MakeMessages,
        overlaps: bool = True,
    ) -> None:
        super().__init__(messages, line, overlaps=overlaps)
        self._share, self._make, self._all = share, make, messages.lists
        own, halo = ids
        self._lent_ids = [own[rows] for rows in self._all.lent]
        self._halo_ids = list(halo.split(list(self._all.wanted)))  # type: ignore[no-untyped-call]
        self._growth_back: list[float] = []
        self._at = torch.empty(0, dtype=torch.int64)  # of the halo's rows that were drawn
        self._growth = torch.empty(0, 1)

    def begin_step(self, key: Key) -> None:
        rank, ranks = self.line.rank, range(self.line.num_ranks)
        code = key.at(Purpose.BOUNDARY)
        lent = [self._drawn(fold(code, rank, q), self._lent_ids[q]) for q in ranks]
        here = [self._drawn(fold(code, q, rank), self._halo_ids[q]) for q in ranks]
        lists = Lists(
            self._all.num_own,
            [rows[at] for rows, at in zip(self._all.lent, lent, strict=True)],
            [at.numel() for at in here],
        )
        starts = torch.tensor([0, *self._all.wanted]).cumsum(0)
        self._at = torch.cat([at + starts[q] for q, at in enumerate(here)])
        growth = [_growth(at, ids) for at, ids in zip(here, self._halo_ids, strict=True)]
        self._growth = torch.repeat_interleave(
            torch.tensor(growth, dtype=torch.float64), torch.tensor(lists.wanted)
        )[:, None]
        self._growth_back = [_growth(at, ids) for at, ids in zip(lent, self._lent_ids, strict=True)]
        self.messages, self.lists = self._make(lists, self._at), lists
        super().begin_step(key)

    def _drawn(self, key: int, ids: Tensor) -> Tensor:
        """Positions, ascending."""
        count = int(self._share * ids.numel())
        words = random_u32(key, ids.cpu())
        order = torch.argsort(words[:, 0] * 2**31 + (words[:, 1] >> 1), stable=True)
        return order[:count].sort().values

    def end_forward(self) -> Tensor:
        rows = torch.cat(self._arrived())
        halo = rows.new_zeros(self._all.num_halo, rows.shape[1])
        halo[self._at.to(rows.device)] = rows * self._growth.to(rows)
        return halo.view(self._all.num_halo, *self.shape)

    def begin_backward(self, halo_grad: Tensor) -> None:
        drawn = matrix(halo_grad).index_select(0, self._at.to(halo_grad.device))
        self._pending = self.post("backward", drawn)

    def end_backward(self, own_grad: Tensor) -> tuple[Tensor, Tensor | None]:
        pieces: Sequence[Tensor] = self._arrived()
        grown = [piece * growth for piece, growth in zip(pieces, self._growth_back, strict=True)]
        return add_rows(own_grad, self.lists.lent, grown), None


def _growth(drawn: Tensor, ids: Tensor) -> float:
    return ids.numel() / drawn.numel() if drawn.numel() else 0.0
