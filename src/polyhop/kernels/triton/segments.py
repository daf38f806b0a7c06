"""Long edge lists in pieces of bounded length, so that a hub is the work of many programs and sums keep one order.

A list of more than ``limit`` edges is cut into pieces; each is summed alone, then the pieces in order. How lists are cut
depends on ``indptr`` alone: results are the same run to run. Nothing here waits for the device.

Legend: D lists, E edges.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["Segments", "keep_short", "list_of_piece", "segments"]

_LISTS = 1024  # of a program
_SHORTEST, _LONGEST = 512, 2048
"""Edges of a piece. One warp takes about 1 us for 16 edges: 2048 end within a hundredth of a pass over 124 M edges, and sums
of pieces then take 5 % of the result's memory at most. Smaller graphs have shorter pieces, for their passes are shorter."""


@dataclass(frozen=True, eq=False)
class Segments:
    """How the lists of one ``indptr`` are cut."""

    limit: int  # edges of a piece at most; a list of no more is whole
    ends: Tensor | None  # int64 [D + 1]: pieces of long lists before each list; None: no list is long
    most: int  # at least the number of pieces; 0: no list is long

    def ends_or(self, indptr: Tensor) -> Tensor:
        """``ends``, or what a kernel may be given in its place where it will not read them."""
        return indptr if self.ends is None else self.ends


def _limit(num_edges: int) -> int:
    return min(max(1 << (num_edges // 65536).bit_length(), _SHORTEST), _LONGEST)


def segments(indptr: Tensor, num_edges: int) -> Segments:
    """How lists indptr int64 [D + 1] of E edges are cut; kept as long as the tensor lives."""
    version = None if indptr.is_inference() else indptr._version
    known = _known.get(indptr)
    if known is not None and version is not None and known[0] == version:
        found: Segments = known[1]
        return found
    made = _cut(indptr, num_edges)
    if version is not None:
        _known[indptr] = (version, made)
    return made


_known = WeakTensorKeyDictionary()


def keep_short(indptr: Tensor, longest: int) -> None:
    """Note that no list of ``indptr`` has more than so many edges: if these are few, none will be looked for to be cut."""
    if longest <= _SHORTEST:
        _known[indptr] = (indptr._version, Segments(_SHORTEST, None, 0))


def _cut(indptr: Tensor, num_edges: int) -> Segments:
    limit = _limit(num_edges)
    if num_edges <= limit:
        return Segments(limit, None, 0)
    ends = torch.empty_like(indptr)
    _count_pieces[(triton.cdiv(indptr.numel(), _LISTS),)](
        indptr, ends, indptr.numel(), limit, BLOCK=_LISTS, num_warps=4
    )
    return Segments(limit, ends.cumsum_(0), 2 * num_edges // limit)  # deg / limit + 1 of a long list at most


@triton.jit(do_not_specialize=["num_ends", "limit"])
def _count_pieces(indptr, pieces, num_ends, limit, BLOCK: tl.constexpr):
    """At i + 1 the pieces of list i, 0 if it is not long; at 0 none."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < num_ends
    some = ok & (at > 0)
    degree = tl.load(indptr + at, mask=some, other=0) - tl.load(indptr + at - 1, mask=some, other=0)
    tl.store(pieces + at, tl.where(degree > limit, (degree + limit - 1) // limit, 0), mask=ok)


@triton.jit
def list_of_piece(ends, piece, num_lists):
    """The list that a piece is of: ends[list] <= piece < ends[list + 1]."""
    low, high = piece * 0, piece * 0 + num_lists
    while low + 1 < high:
        middle = (low + high) // 2
        is_before = tl.load(ends + middle) <= piece
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    return low
