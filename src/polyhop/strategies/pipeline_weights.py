"""Whose weights are whose in a pipeline: every rank trains those of its stage, and has the others only when somebody asks.

Gradients are summed over the ways of a stage, so that all of them have the same weights; the first counts as their owner.
Weights that several stages use are summed over all ranks in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from polyhop.comm import Collective
from polyhop.exchange.gathered import gather_tensors
from polyhop.strategies.pipeline_pieces import Pieces

__all__ = ["StageWeights"]


class StageWeights:
    """``owner``: name of a parameter -> rank that trains it; ``shared``: names of those that several stages do.

    ``ways``: the line to the ranks of this stage.
    """

    def __init__(
        self, model: nn.Module, pieces: Pieces, bounds: Sequence[int], line: Collective, ways: Collective
    ) -> None:
        self._line, self._ways = line, ways
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        stages = [pieces.of_span(first, stop) for first, stop in pairwise(bounds)]
        users = {name: [stage for stage, used in enumerate(stages) if name in used] for name in self._named}
        self.owner = {name: each[0] * ways.num_ranks for name, each in users.items() if each}
        self.shared = [name for name, each in users.items() if len(each) > 1]
        self._own = [
            [name for name, each in users.items() if each == [stage]] for stage in range(len(stages))
        ]
        self._norm = 0.0

    def names(self, rank: int) -> list[str]:
        """Of the parameters that a rank counts as its own."""
        return [name for name, owner in self.owner.items() if owner == rank]

    @property
    def num_shared(self) -> int:
        """Values that are summed over ranks in every step."""
        return sum(self._named[name].numel() for name in self.shared)

    @property
    def num_own(self) -> list[int]:
        """Of each stage: values of weights that it alone uses, summed over its ways."""
        return [sum(self._named[name].numel() for name in names) for names in self._own]

    def end(self, loss: Tensor, wants_stop: bool) -> tuple[Tensor, bool]:
        """After a backward pass: (the loss of all ranks, whether one wants to stop). Shared weights get summed gradients."""
        if self._ways.num_ranks > 1:
            self._sum(self._own[self._line.rank // self._ways.num_ranks], self._ways)
        self._sum(self.shared, self._line)
        mine = [grad for name in self.names(self._line.rank) if (grad := self._named[name].grad) is not None]
        squared = torch.stack([grad.square().sum() for grad in mine]).sum() if mine else loss.new_zeros(())
        tail = torch.stack([loss, squared.to(loss), loss.new_tensor(float(wants_stop))])
        found = self._line.all_reduce(tail.to(self._line.device), kind="gradients").to(loss.device)
        self._norm = float(found[1]) ** 0.5
        return found[0].clone(), bool(found[2] > 0)

    def _sum(self, names: Sequence[str], line: Collective) -> None:
        """Gradients of these weights, over the ranks of a line; one that has none has zeros."""
        if not names:
            return
        grads = [
            torch.zeros_like(p) if p.grad is None else p.grad for p in (self._named[name] for name in names)
        ]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        total = line.all_reduce(flat.to(line.device), kind="gradients").to(flat.device)
        pieces = total.split([grad.numel() for grad in grads])  # type: ignore[no-untyped-call]
        for name, piece in zip(names, pieces, strict=True):
            self._named[name].grad = piece.view_as(self._named[name])

    def clip(self, max_norm: float) -> None:
        """As torch.nn.utils.clip_grad_norm_, with the norm over all ranks."""
        factor = min(1.0, max_norm / (self._norm + 1e-6))
        for p in self._named.values():
            if p.grad is not None:
                p.grad.mul_(factor)

    def share(self) -> None:
        """Every rank's own weights to all. All ranks call it together."""
        with torch.no_grad():
            for rank in range(self._line.num_ranks):
                own = [self._named[name] for name in self.names(rank)]
                if not own:
                    continue
                flat = torch.cat([p.reshape(-1) for p in own]).to(self._line.device)
                got = self._line.broadcast(flat, kind="weights", source=rank).to(own[0].device)
                if rank != self._line.rank:
                    for p, piece in zip(own, got.split([p.numel() for p in own]), strict=True):  # type: ignore[no-untyped-call]
                        p.copy_(piece.view_as(p))

    def gather_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Rank 0's optimiser gets the state of all weights. All ranks call it together."""
        own = {
            f"{name}/{slot}": torch.as_tensor(value).detach().cpu().contiguous()
            for name in self.names(self._line.rank)
            for slot, value in optimizer.state.get(self._named[name], {}).items()
            if value is not None
        }
        for key, value in gather_tensors(own, self._line).items():
            rank, _, rest = key.partition(".")
            name, _, slot = rest.rpartition("/")
            if rank != "rank0":
                p = self._named[name]
                optimizer.state[p][slot] = value if slot == "step" else value.to(p.device)
