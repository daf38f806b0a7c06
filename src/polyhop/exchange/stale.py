"""Rows of the epoch before: what leaves in a step is used in the next one, so nothing is ever waited for (PipeGCN).

Bytes are those of the exact channel; in the first step the halo is zero and no gradient arrives. With frozen weights and
without dropout the forward pass of an L-layer model is exact from step L on, its gradients from step 2 L on.
``smoothing`` g replaces what arrived by a running mean: mean <- g mean + (1 - g) arrived.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhop.comm import Collective, Pending
from polyhop.exchange.crossing import Crossing, Messages, matrix
from polyhop.kernels.keys import Key

__all__ = ["StaleCrossing"]


class StaleCrossing(Crossing):
    """Two messages are under way from one step to the next: rows and gradients."""

    def __init__(
        self, messages: Messages, line: Collective, *, overlaps: bool = True, smoothing: float = 0.0
    ) -> None:
        super().__init__(messages, line, overlaps=overlaps)
        self._smoothing = smoothing
        self._going: Pending[list[Tensor]] | None = None
        self._returning: Pending[list[Tensor]] | None = None
        self._halo: Tensor | None = None  # [H, F], as of the last step; None before the second
        self._used: Tensor | None = None  # what this step takes for it
        self._found: list[Tensor] | None = None  # gradients of each rank [k, F], to be added in this step

    def begin_step(self, key: Key) -> None:
        self.messages.begin_step(key)
        self.keeps = False  # the halo is here until the next step in any case

    def begin_forward(self, rows: Tensor, sums: Tensor | None) -> None:
        self._note_shape(rows)
        flat = matrix(rows)
        self._take_halo()
        self._going = self.post("forward", flat, sums)
        # A continued run has it where it was read.
        self._used = self._zeros(flat) if self._halo is None else self._halo.to(flat)

    def _zeros(self, like: Tensor) -> Tensor:
        return like.new_zeros(self.lists.num_halo, like.shape[1])

    def _take_halo(self) -> None:
        if self._going is not None:
            new = torch.cat(self._going.wait())
            self._halo = new if self._halo is None else self._mixed(self._halo, new)
            self._going = None

    def end_forward(self) -> Tensor:
        assert self._used is not None, "rows leave before they arrive"
        return self._used.clone().view(self.lists.num_halo, *self.shape)

    def begin_backward(self, halo_grad: Tensor) -> None:
        self._take_found()
        self._returning = self.post("backward", matrix(halo_grad))

    def _take_found(self) -> None:
        if self._returning is not None:
            new = self._returning.wait()
            old = new if self._found is None else self._found
            self._found = [self._mixed(*pair) for pair in zip(old, new, strict=True)]
            self._returning = None

    def end_backward(self, own_grad: Tensor) -> tuple[Tensor, Tensor | None]:
        if self._found is not None:
            return self.added(own_grad, self._found)
        nothing = own_grad.new_zeros(sum(self.lists.lent_sums), matrix(own_grad).shape[1])
        return own_grad, nothing if self.lists.lent_sums else None

    def _mixed(self, old: Tensor, new: Tensor) -> Tensor:
        return torch.lerp(new, old.to(new), self._smoothing) if self._smoothing else new

    def state(self) -> dict[str, Tensor]:
        """What the next step will use. Waits for what is under way; the next step finds it here."""
        self._take_halo()
        self._take_found()
        kept = {} if self._halo is None else {"halo": self._halo}
        return kept | {f"found{rank}": each for rank, each in enumerate(self._found or [])}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self._halo = tensors.get("halo")
        found = [tensors[f"found{rank}"] for rank in range(self.line.num_ranks) if f"found{rank}" in tensors]
        self._found = found or None
