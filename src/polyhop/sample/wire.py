"""What sampling requests and replies look like as bytes: pure functions, used by who sends, who receives and who accounts.

    compact   request: sorted row numbers within the owner, as varint deltas. Reply: neighbours as 4-byte ids (8 for graphs
              of 2^31 nodes and more), edge weights, and a count of 1 byte a row where the fan-out allows it, else 4.
    plain     request: 8-byte ids in any order. Reply: 8-byte neighbours and counts. What a generic remote call would send.

Legend: k rows asked for, E edges of a reply, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyhop.errors import PeerError
from polyhop.kernels import varint

__all__ = ["Lists", "Wire"]

_WIDE_NODES = 1 << 31
_MOST_NARROW = 255


@dataclass(frozen=True, eq=False)
class Lists:
    """Drawn in-edges of k rows, one list after the other."""

    counts: Tensor  # int64 [k]
    neighbours: Tensor  # int64 [E]: new ids
    weights: Tensor | None = None  # float32 [E]


@dataclass(frozen=True)
class Wire:
    """The format of one run's messages."""

    num_nodes: int
    is_weighted: bool = False
    is_plain: bool = False

    @property
    def id_dtype(self) -> torch.dtype:
        return torch.int64 if self.is_plain or self.num_nodes >= _WIDE_NODES else torch.int32

    def count_dtype(self, fanout: int) -> torch.dtype:
        if self.is_plain:
            return torch.int64
        return torch.uint8 if 0 < fanout <= _MOST_NARROW else torch.int32

    def request(self, rows: Tensor) -> Tensor:
        """uint8: rows int64 [k] of one owner (ascending, where compact)."""
        return rows.contiguous().view(torch.uint8) if self.is_plain else varint.encode(rows)

    def request_bytes(self, rows: Tensor) -> int:
        return 8 * rows.numel() if self.is_plain else varint.size(rows)

    def rows(self, data: Tensor) -> Tensor:
        """int64 [k]: what ``request`` was given."""
        if self.is_plain:
            return data.view(torch.int64)
        return varint.decode(data, int((data < 128).sum()))  # every number ends in a byte below 128

    def reply(self, lists: Lists, fanout: int) -> Tensor:
        """uint8: the widest first, so that each piece is aligned."""
        pieces = [lists.neighbours.to(self.id_dtype)]
        if self.is_weighted:
            assert lists.weights is not None, "a weighted graph's lists have weights"
            pieces.append(lists.weights.to(torch.float32))
        pieces.insert(len(pieces) if not self.is_plain else 0, lists.counts.to(self.count_dtype(fanout)))
        return torch.cat([piece.contiguous().view(torch.uint8) for piece in pieces])

    def reply_bytes(self, num_rows: int, num_edges: int, fanout: int) -> int:
        return num_rows * self.count_dtype(fanout).itemsize + num_edges * self.edge_bytes

    @property
    def edge_bytes(self) -> int:
        """Of one neighbour in a reply."""
        return self.id_dtype.itemsize + (4 if self.is_weighted else 0)

    def lists(self, data: Tensor, num_rows: int, fanout: int, sender: int) -> Lists:
        """What ``reply`` was given, for so many rows; PeerError if it cannot be."""
        counted = self.count_dtype(fanout)
        num_edges, rest = divmod(data.numel() - num_rows * counted.itemsize, self.edge_bytes)
        if num_edges < 0 or rest:
            raise PeerError(
                f"rank {sender} sent {data.numel()} bytes of neighbours for {num_rows} rows: not a reply"
            )
        at = 0

        def take(count: int, dtype: torch.dtype) -> Tensor:
            nonlocal at
            piece = data[at : at + count * dtype.itemsize].view(dtype)
            at += count * dtype.itemsize
            return piece

        counts = take(num_rows, counted) if self.is_plain else None
        neighbours = take(num_edges, self.id_dtype)
        weights = take(num_edges, torch.float32) if self.is_weighted else None
        counts = (take(num_rows, counted) if counts is None else counts).long()
        if int(counts.sum()) != num_edges or bool((counts < 0).any()):
            raise PeerError(f"rank {sender} sent {num_edges} neighbours, counted as {int(counts.sum())}")
        if bool(((neighbours < 0) | (neighbours >= self.num_nodes)).any()):
            raise PeerError(
                f"rank {sender} sent neighbours that are no nodes: expected 0 .. {self.num_nodes - 1}"
            )
        return Lists(counts, neighbours.long(), weights)
