"""Ranks in groups: as many consecutive ranks in each (a host's), with a line of their own inside the line of all.

``GroupLine`` is some ranks of a line, numbered anew: what passes over it never reaches another rank. It has no order of its
own: its operations are operations of the line it is made of, for these ranks alone. ``TieredLine`` is all ranks again, but
sums go inside groups first, then between ranks that have the same place in theirs: of the bytes that a flat sum sends
between hosts, one part in as many as a group has ranks.

Legend: P ranks, G groups of P / G ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from polyhop.comm.collective import Collective, Pending, is_summed_everywhere, slices, summed
from polyhop.errors import ConfigError

__all__ = ["GroupLine", "TieredLine", "group_size"]


def group_size(num_ranks: int, num_groups: int) -> int:
    """Ranks of each group; ConfigError where groups would not be alike."""
    if not 1 <= num_groups <= num_ranks or num_ranks % num_groups:
        fitting = [count for count in range(1, num_ranks + 1) if num_ranks % count == 0]
        raise ConfigError(
            f"split_groups={num_groups} with {num_ranks} ranks: expected a number of groups that divides the ranks evenly "
            f"({', '.join(map(str, fitting))}): give another --split-groups, or a multiple of it as --workers"
        )
    return num_ranks // num_groups


class GroupLine(Collective):
    """Members of a line, in the order given; ``rank`` and ``num_ranks`` are those among them."""

    def __init__(self, line: Collective, members: Sequence[int]) -> None:
        self._line, self._members = line, tuple(members)
        self.rank, self.num_ranks = self._members.index(line.rank), len(self._members)
        self.traffic, self.device, self.has_tags = line.traffic, line.device, line.has_tags
        self.address = line.address

    @classmethod
    def of(cls, line: Collective, num_groups: int) -> GroupLine:
        """The group of this rank."""
        size = group_size(line.num_ranks, num_groups)
        first = line.rank // size * size
        return cls(line, range(first, first + size))

    @classmethod
    def across(cls, line: Collective, num_groups: int) -> GroupLine:
        """The ranks that have this one's place in their groups."""
        size = group_size(line.num_ranks, num_groups)
        return cls(line, range(line.rank % size, line.num_ranks, size))

    def fork(self) -> GroupLine:
        """All ranks of the line call it, whatever their group."""
        return GroupLine(self._line.fork(), self._members)

    def close(self) -> None:
        self._line.close()

    def _outer(self, rank: int) -> int:
        return self._line._outer(self._members[rank])

    def _post(
        self, send: Sequence[Tensor | None], receive: Sequence[Tensor | None], tag: int = 0
    ) -> Callable[[], None]:
        return self._line._post(self._spread(send), self._spread(receive), tag)

    def _spread(self, pieces: Sequence[Tensor | None]) -> list[Tensor | None]:
        """What each rank of the line gets: others than the members nothing."""
        out: list[Tensor | None] = [None] * self._line.num_ranks
        for member, piece in zip(self._members, pieces, strict=True):
            out[member] = piece
        return out


class TieredLine(GroupLine):
    """All ranks of a line; large sums in two tiers. Every rank gets the same bits, if not those of a sum in rank order."""

    def __init__(self, line: Collective, num_groups: int) -> None:
        super().__init__(line, range(line.num_ranks))
        self._num_groups = num_groups
        self._near, self._far = GroupLine.of(line, num_groups), GroupLine.across(line, num_groups)

    def fork(self) -> TieredLine:
        return TieredLine(self._line.fork(), self._num_groups)

    def start_all_reduce(self, tensor: Tensor, *, kind: str) -> Pending[Tensor]:
        """Slices to their summers in the group, sums of each slice over groups, all slices to the group."""
        near, far = self._near, self._far
        flat = tensor.reshape(-1)
        is_small = is_summed_everywhere(flat.numel() * flat.element_size(), self.num_ranks)
        if is_small or near.num_ranks == 1 or far.num_ranks == 1:
            return super().start_all_reduce(tensor, kind=kind)
        bounds = slices(flat.numel(), near.num_ranks)
        sizes = [stop - start for start, stop in pairwise(bounds)]
        pieces = [flat[start:stop] for start, stop in pairwise(bounds)]
        scattered = near.start_all_to_all(pieces, kind=kind, counts=[sizes[near.rank]] * near.num_ranks)

        def result() -> Tensor:
            total = far.all_reduce(summed(scattered.wait()), kind=kind)
            return torch.cat(near.all_gather(total, kind=kind, counts=sizes)).view(tensor.shape)

        return Pending(result)
