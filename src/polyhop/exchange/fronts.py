"""Fronts: the sensible choices of widths in one channel, bytes up and variance down, and the best point of several fronts.

Two makers: ``hull_front`` knows the points on the convex hull, where groups are upgraded in order of gain per byte;
``exact_front`` knows all. Two judges, by how channels share time: ``least_of_round`` and ``least_of_slowest``. A judge
minimises ``per_variance`` times the variance above that of the widest choice, plus ``per_second`` times the seconds.

Legend: G groups of rows in a channel, k points of a front, C channels, P ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import comb

import numpy as np
from numpy.typing import NDArray

from polyhop.errors import ConfigError

__all__ = ["Front", "exact_front", "hull_front", "least_of_round", "least_of_slowest", "noise", "row_bytes"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_PARAMETER_BYTES = 4  # scale and zero point of a row, bfloat16 each; rows of 16 and 32 bits have none
_MOST_POINTS = 20_000_000  # that the exact front looks at in one channel
_PRICES = 400  # that least_of_slowest tries
_FILLED = 20  # best choices that it fills up
_FIRST_PUSH = 16.0  # of its prices; later ones are smaller


def row_bytes(num_columns: int, width: int) -> int:
    """Of one row on the wire: packed codes, and the row's parameters if it is quantised."""
    return (num_columns * width + 7) // 8 + (_PARAMETER_BYTES if width <= 8 else 0)


def noise(width: int) -> float:
    """c(b): variance of a row over its squared range, times 6 / D; none where values pass as they are."""
    return 1.0 / (2**width - 1) ** 2 if width <= 8 else 0.0


@dataclass(frozen=True, eq=False)
class Front:
    """Points by bytes, strictly ascending; the first has every group at its narrowest."""

    num_bytes: Ints  # [k]
    gain: Floats  # [k - 1]: variance that each step to the next point takes away, > 0
    pick: Callable[[int], NDArray[np.uint8]]  # widths [G] of a point

    @property
    def rate(self) -> Floats:
        """[k - 1]: gain per byte; falls on a hull."""
        return np.minimum.accumulate(self.gain / np.diff(self.num_bytes)) if self.gain.size else self.gain


@dataclass(frozen=True)
class _Option:
    width: int
    size: int  # bytes of a row
    noise: float


def _options(num_columns: int, widths: Sequence[int]) -> list[_Option]:
    """Widths worth having, narrowest first: wider ones take more bytes and add less variance."""
    kept: list[_Option] = []
    for width in sorted(set(widths)):
        new = _Option(width, row_bytes(num_columns, width), noise(width))
        while kept and kept[-1].size >= new.size:  # rows so short that more bits are free
            kept.pop()
        if not kept or new.noise < kept[-1].noise:
            kept.append(new)
    return kept


def _convex(options: list[_Option]) -> list[_Option]:
    """Those on the lower hull of (bytes, variance)."""
    hull: list[_Option] = []
    for new in options:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], new):
            hull.pop()
        hull.append(new)
    return hull


def _slope(a: _Option, b: _Option) -> float:
    """Gain per byte of the step from a to b."""
    return (a.noise - b.noise) / (b.size - a.size)


def hull_front(beta: Floats, sizes: Ints, num_columns: int, widths: Sequence[int]) -> Front:
    """Of groups with these sums of beta and these numbers of rows [G], in descending order of beta a row."""
    options = _convex(_options(num_columns, widths))
    names = np.array([each.width for each in options], dtype=np.uint8)
    need = beta / sizes  # a row
    need = np.minimum.accumulate(need) if need.size else need  # rounding must not turn the order
    slopes = np.array([_slope(a, b) for a, b in pairwise(options)])
    rate = np.outer(slopes, need).ravel()  # first steps of all groups, then second steps
    order = np.argsort(-rate, kind="stable")
    order = order[: np.count_nonzero(rate)]  # an upgrade that gains nothing is none
    step, group = np.divmod(order, max(beta.size, 1))
    more = np.array([b.size - a.size for a, b in pairwise(options)], dtype=np.int64)[step] * sizes[group]
    less = np.array([a.noise - b.noise for a, b in pairwise(options)])[step] * beta[group]
    return Front(
        np.cumsum(np.concatenate([[options[0].size * sizes.sum()], more])),
        less,
        lambda at: names[np.bincount(group[:at], minlength=beta.size)],
    )


def exact_front(beta: Floats, sizes: Ints, num_columns: int, widths: Sequence[int]) -> Front:
    """As ``hull_front``, with all points. Groups have one size, except the last, which may be smaller.

    Of groups of one size, one with more beta never needs fewer bits, so a choice is how many groups have at least each
    option: O(G^(options - 1)) of them. The last group, if smaller, is tried with each option beside every choice.
    """
    options = _options(num_columns, widths)
    names = np.array([each.width for each in options], dtype=np.uint8)
    num_equal = int(np.count_nonzero(sizes == sizes[:1]))
    if comb(num_equal + len(options) - 1, len(options) - 1) > _MOST_POINTS:
        raise ConfigError(
            f"{beta.size} groups with {len(options)} widths are too many for exact; use the method hull"
        )
    size = int(sizes[0]) if sizes.size else 0
    left = np.append(np.cumsum(beta[:num_equal][::-1])[::-1], 0.0)  # beta of all groups from the m-th on
    counts = np.zeros((1, 0), dtype=np.int64)
    for _ in options[1:]:
        counts = _with_next(counts, num_equal)
    bytes_of = np.full(len(counts), options[0].size * size * num_equal)
    excess = np.zeros(len(counts))
    for (a, b), m in zip(pairwise(options), counts.T, strict=True):
        bytes_of += (b.size - a.size) * size * m
        excess += (a.noise - b.noise) * left[m]
    kept = _lowest(bytes_of, excess)
    bytes_of, excess, counts = bytes_of[kept], excess[kept], counts[kept]
    last = np.zeros(len(kept), dtype=np.int64)
    if num_equal < beta.size:
        last = np.repeat(np.arange(len(options)), len(kept))
        bytes_of = np.concatenate([bytes_of + each.size * int(sizes[-1]) for each in options])
        excess = np.concatenate([excess + (each.noise - options[-1].noise) * beta[-1] for each in options])
        counts = np.tile(counts, (len(options), 1))
        kept = _lowest(bytes_of, excess)
        bytes_of, excess, counts, last = bytes_of[kept], excess[kept], counts[kept], last[kept]

    def pick(at: int) -> NDArray[np.uint8]:
        level = np.append((np.arange(num_equal)[:, None] < counts[at]).sum(axis=1), last[at])
        widths_of: NDArray[np.uint8] = names[level[: beta.size]]
        return widths_of

    return Front(bytes_of, -np.diff(excess), pick)


def _with_next(counts: Ints, most: int) -> Ints:
    """Each row of counts [n, j] followed by every number from 0 to its last one (to ``most`` where it has none)."""
    tops = counts[:, -1] + 1 if counts.shape[1] else np.full(len(counts), most + 1)
    number = np.arange(tops.sum()) - np.repeat(np.cumsum(tops) - tops, tops)
    return np.column_stack([np.repeat(counts, tops, axis=0), number])


def _lowest(num_bytes: Ints, excess: Floats) -> Ints:
    """Points that no other beats, by bytes."""
    order = np.lexsort((excess, num_bytes))
    least = np.minimum.accumulate(excess[order])
    is_lower: NDArray[np.bool_] = np.append(True, least[1:] < least[:-1])
    return order[is_lower]


def least_of_round(
    fronts: Sequence[Front], times: Sequence[Floats], per_variance: float, per_second: float
) -> list[int]:
    """The point of each front where a round takes as long as its slowest channel. times: seconds of each front's points.

    The best time of a round is a point of some front: all are tried at once. Other channels then take what fits.
    """
    if not fronts:
        return []
    time = np.concatenate(times)
    gain = np.concatenate([np.append(0.0, front.gain) for front in fronts])
    order = np.argsort(time, kind="stable")
    order = order[np.searchsorted(time[order], max(each[0] for each in times)) :]  # no round is shorter
    excess = np.append(np.cumsum(gain[order][:0:-1])[::-1], 0.0)  # of steps that do not fit
    best = time[order[np.argmin(per_variance * excess + per_second * time[order])]]
    return [int(np.searchsorted(each, best, side="right")) - 1 for each in times]


def least_of_slowest(
    fronts: Sequence[Front], times: Sequence[Floats], sides: Ints, per_variance: float, per_second: float
) -> list[int]:
    """The point of each hull front where the busiest side decides. sides: int64 [C, 2], of the 2 P sides (a rank's sending,
    a rank's receiving), the two that each channel keeps busy.

    Each side has a price for its seconds; all prices together are ``per_second``. At given prices a channel takes the steps
    that gain more than they cost, and prices of busy sides then rise (multiplicative weights on the dual problem). The best
    of these choices are filled up with what fits beside their busiest side.
    """
    num_sides = int(sides.max()) + 1 if sides.size else 0
    left = [np.append(np.cumsum(front.gain[::-1])[::-1], 0.0) for front in fronts]  # to gain above each point

    def loads(at: Sequence[int]) -> Floats:
        spent = np.array([time[i] for time, i in zip(times, at, strict=True)])
        return np.bincount(sides.ravel(), np.repeat(spent, 2), minlength=num_sides).astype(np.float64)

    with np.errstate(divide="ignore"):  # a step that takes no time is worth any price
        steps = [front.gain / np.diff(time) for front, time in zip(fronts, times, strict=True)]
    offers = [-np.minimum.accumulate(worth) if worth.size else worth for worth in steps]  # ascending

    def value(at: Sequence[int], load: Floats) -> float:
        above = sum(own[i] for own, i in zip(left, at, strict=True))
        return float(per_variance * above + per_second * load.max(initial=0.0))

    tried = {(0,) * len(fronts): np.inf}
    lean = np.zeros(num_sides)
    for number in range(_PRICES if per_variance > 0 and num_sides else 0):
        prices = _exponential(lean - lean.max())
        prices *= per_second / per_variance / prices.sum()
        paid = prices[sides].sum(axis=1)
        at = tuple(int(np.searchsorted(own, -price)) for own, price in zip(offers, paid, strict=True))
        load = loads(at)
        tried[at] = value(at, load)
        lean += _FIRST_PUSH / np.sqrt(1 + number) * load / max(load.max(), np.finfo(float).tiny)
    best = sorted(tried, key=lambda at: tried[at])[:_FILLED]
    filled = [_filled(at, times, offers, sides, loads(at)) for at in best]
    return min(filled, key=lambda at: value(at, loads(at)))


def _exponential(x: Floats) -> Floats:
    """exp(x) of -1000 < x <= 0, nearly, by products alone: machines differ in the last bit of the true one."""
    power = 1 + x / 2**20
    for _ in range(20):
        power = power * power
    return power


def _filled(
    start: Sequence[int], times: Sequence[Floats], offers: Sequence[Floats], sides: Ints, load: Floats
) -> list[int]:
    """Points with more steps, best offer first, where neither side becomes busier than the busiest is."""
    at, slack = list(start), (load.max(initial=0.0) - load).tolist()
    heap = [(own[i], c) for c, (own, i) in enumerate(zip(offers, at, strict=True)) if i < own.size]
    heapq.heapify(heap)
    while heap:
        _, c = heapq.heappop(heap)
        more = times[c][at[c] + 1] - times[c][at[c]]
        if any(more > slack[side] for side in sides[c]):
            continue  # nor will what follows it in this channel
        for side in sides[c]:
            slack[side] -= more
        at[c] += 1
        if at[c] < offers[c].size:
            heapq.heappush(heap, (offers[c][at[c]], c))
    return at
