"""How many distinct input rows several mini-batches need together, and how many of them a pool of recent rows lacks.

Mini-batches are drawn alike and (but for their seeds) independently. If one needs node v with probability p(v), then

    U(m) = sum_v 1 - (1 - p(v))^m                 distinct rows of m mini-batches
    U(m + k) - U(m)                               rows of k mini-batches that the m before them did not need

so everything follows from the one curve U, and U from how many nodes have which p: a histogram, the same size for every
graph, in which ranks can add up what only owners know. A pool of C rows with least-recently-used replacement holds the rows
of the last m mini-batches, where U(m) = C (Che's approximation, exact for many rows of little weight each).

Checked against sampling (graphs, fan-outs and errors in the tests): within a tenth, mostly 3 %. The one thing that is not
modelled is that an epoch takes each seed once; with few hops and k near a whole epoch it makes U a few percent larger.

Legend: n nodes, P ranks, K numbers of mini-batches, M bins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhop.comm import Collective

__all__ = ["Reuse", "expected_rows", "reuse_of_ranks"]

_PER_OCTAVE = 8  # bins: neighbours differ by 9 %, and means inside a bin make the rest of it second order
_LEAST, _MOST = -40, 6  # octaves of -log(1 - p): rarer is never, likelier is always
_NUM_BINS = (_MOST - _LEAST) * _PER_OCTAVE + 1


@dataclass(frozen=True, eq=False)
class Reuse:
    """How many nodes are how likely inputs of one mini-batch."""

    hazard: Tensor  # float64 [M]: -log(1 - p)
    count: Tensor  # float64 [M]: nodes

    @classmethod
    def of(cls, likely: Tensor) -> Reuse:
        """Of nodes that are each an input with probability ``likely`` float64 [n]."""
        return cls._of_sums(_sums(likely))

    @classmethod
    def _of_sums(cls, sums: Tensor) -> Reuse:
        is_met = sums[:, 0] > 0
        count, total = sums[is_met].unbind(1)
        return cls(total / count, count)

    def scaled(self, ratio: float) -> Reuse:
        """As many times the rows, for any number of mini-batches."""
        return Reuse(self.hazard, self.count * ratio)

    def without(self, num_rows: float) -> Reuse:
        """Less the most likely ``num_rows`` rows, which are kept elsewhere for good."""
        order = torch.sort(self.hazard, descending=True).indices
        count = self.count[order]
        before = count.cumsum(0) - count
        return Reuse(self.hazard[order], (count - (num_rows - before).clamp(min=0)).clamp(min=0))

    @property
    def num_rows(self) -> float:
        """Rows that any number of mini-batches can need."""
        return float(self.count.sum())

    def distinct(self, num_batches: float) -> float:
        """U: the expected number of distinct rows of so many mini-batches."""
        return float(-(self.count * torch.expm1(-num_batches * self.hazard)).sum())

    def fresh(self, num_batches: float, after: float) -> float:
        """Rows of ``num_batches`` mini-batches that the ``after`` ones before them did not need."""
        missed = torch.exp(-after * self.hazard) * self.count
        return float(-(missed * torch.expm1(-num_batches * self.hazard)).sum())

    def horizon(self, num_rows: float) -> float:
        """How many mini-batches have so many distinct rows together; infinity if all of them have fewer."""
        if num_rows >= self.num_rows:
            return math.inf
        low, high = 0.0, 1.0
        while self.distinct(high) < num_rows:
            low, high = high, 2 * high
            if high > 1e15:
                return math.inf
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if self.distinct(middle) < num_rows else (low, middle)
        return high


def expected_rows(
    likely: Tensor, ks: Sequence[int], *, pool_rows: float | None = None
) -> tuple[Tensor, Tensor]:
    """(distinct, new) rows float64 [K] of a window of each of ``ks`` mini-batches, windows being equally long.

    ``likely`` float64 [n]: the probability that each node is an input of one mini-batch. New are the rows that a window has
    to fetch: those that the window before did not need; with ``pool_rows``, those that a pool of so many rows, the least
    recently used making room, does not hold.
    """
    reuse = Reuse.of(likely)
    kept = None if pool_rows is None else reuse.horizon(pool_rows)
    distinct = [reuse.distinct(k) for k in ks]
    new = [reuse.fresh(k, k if kept is None else kept) for k in ks]
    return torch.tensor(distinct, dtype=torch.float64), torch.tensor(new, dtype=torch.float64)


def reuse_of_ranks(likely: Tensor, line: Collective, *, has_own: bool = False) -> list[Reuse]:
    """For every rank, the same list on all: how likely it needs rows that it does not own.

    ``likely`` float64 [n, P]: the probability that each own node is an input of each rank's mini-batch. ``has_own``: a
    rank's own rows count too (where they lie on disk and go the same way). All ranks call it together: 6 kB for each rank.
    """
    sums = torch.zeros(line.num_ranks, _NUM_BINS, 2, dtype=torch.float64)
    for rank in range(line.num_ranks):
        if rank != line.rank or has_own:
            sums[rank] = _sums(likely[:, rank])
    return [Reuse._of_sums(each) for each in line.all_reduce(sums, kind="ids")]


def _sums(likely: Tensor) -> Tensor:
    """float64 [M, 2]: nodes in each bin, and the sum of their hazards."""
    likely = likely[likely > 2.0**_LEAST].double()
    hazard = -torch.log1p(-likely)
    hazard.clamp_(max=2.0**_MOST)
    at = ((torch.log2(hazard) - _LEAST) * _PER_OCTAVE).long().clamp_(0, _NUM_BINS - 1)
    sums = torch.zeros(_NUM_BINS, 2, dtype=torch.float64)
    sums[:, 0] = torch.bincount(at, minlength=_NUM_BINS)
    sums[:, 1] = torch.bincount(at, weights=hazard, minlength=_NUM_BINS)
    return sums
