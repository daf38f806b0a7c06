"""The halo of a part: rows of other parts that its edges read, brought to it, and sums sent back to their owners.

The lists are exchanged once; after that a message is rows alone. The halo is ascending in new ids and a part is a range of
them, so what comes from one owner is one piece of it: received rows need no scatter.

Legend: n own nodes, H halo nodes, P ranks.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from polyhop.comm import Collective, Pending
from polyhop.exchange.crossing import add_rows, matrix, taken
from polyhop.graph import Part

__all__ = ["Halo"]


class Halo:
    """Who needs which rows. Made by all ranks together (ids are exchanged)."""

    def __init__(self, part: Part, line: Collective) -> None:
        self.line, self.num_own = line, part.num_nodes
        cuts = torch.searchsorted(part.halo, part.bounds).tolist()
        self.wanted: list[int] = [stop - start for start, stop in pairwise(cuts)]
        asked = [
            (part.halo[cuts[q] : cuts[q + 1]] - part.bounds[q]).to(torch.int32) for q in range(line.num_ranks)
        ]
        # Rows of this part that each rank reads, int64, ascending.
        self.lent = [ids.long() for ids in line.all_to_all(asked, kind="ids")]

    @property
    def num_halo(self) -> int:
        return sum(self.wanted)

    def forward(self, rows: Tensor, *, kind: str = "hidden") -> Tensor:
        """[H, ...], where the line receives: the halo's rows, of the ranks' own rows [n, ...]."""
        return self.start_forward(rows, kind=kind).wait()

    def start_forward(self, rows: Tensor, *, kind: str = "hidden") -> Pending[Tensor]:
        flat = matrix(rows)
        pieces = [taken(flat, ids).to(self.line.device) for ids in self.lent]
        pending = self.line.start_all_to_all(pieces, kind=kind, counts=self.wanted)
        return Pending(lambda: torch.cat(pending.wait()).view(self.num_halo, *rows.shape[1:]))

    def back(self, halo_rows: Tensor, own: Tensor, *, kind: str = "hidden") -> Tensor:
        """own [n, ...], with every rank's sums for its halo rows [H, ...] added at their owners, in rank order; in place."""
        flat = matrix(halo_rows)
        counts = [ids.numel() for ids in self.lent]
        pieces = self.line.all_to_all(list(flat.split(self.wanted)), kind=kind, counts=counts)  # type: ignore[no-untyped-call]
        return add_rows(own, self.lent, pieces)
