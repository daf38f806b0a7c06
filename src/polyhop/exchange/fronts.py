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
from functools import lru_cache
from itertools import pairwise
from math import comb, sqrt
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from polyhop.errors import ConfigError

__all__ = ["Front", "exact_front", "hull_front", "least_of_round", "least_of_slowest", "noise", "row_bytes"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Count = TypeVar("Count", int, Ints)

_PARAMETER_BYTES = 4  # scale and zero point of a row, bfloat16 each; rows of 16 and 32 bits have none
_MOST_POINTS = 20_000_000  # that the exact front looks at in one channel
_PRICES = 40  # that least_of_slowest tries
_FIRST_PUSH = 16.0  # of its prices; later ones are smaller
_NEAR = 8  # steps back and forth, in each channel, from the points that the best prices choose
_FILLED = 12  # best choices there that it fills up
_SWAPS = 32  # at most, in one choice
_LEAST_GAIN = 1e-9  # of a swap, of the objective
_MOST_PAIRS = 1_000_000  # of channels between which steps are swapped, in one choice; in several, a fifth


def row_bytes(num_columns: Count, width: int) -> Count:
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


@lru_cache(maxsize=64)
def _upgrades(num_columns: int, widths: tuple[int, ...]) -> tuple[NDArray[np.uint8], Floats, Ints, Floats]:
    """Widths on the hull [o]; gain per byte, bytes and gain of the steps between them [o - 1], of a row whose beta is 1."""
    options = _convex(_options(num_columns, widths))
    steps = list(pairwise(options))
    return (
        np.array([each.width for each in options], dtype=np.uint8),
        np.array([_slope(a, b) for a, b in steps]),
        np.array([b.size - a.size for a, b in steps], dtype=np.int64),
        np.array([a.noise - b.noise for a, b in steps]),
    )


def hull_front(beta: Floats, sizes: Ints, num_columns: int, widths: Sequence[int]) -> Front:
    """Of groups with these sums of beta and these numbers of rows [G], in descending order of beta a row."""
    names, slopes, more, less = _upgrades(num_columns, tuple(widths))
    need = beta / sizes  # a row
    need = np.minimum.accumulate(need) if need.size else need  # rounding must not turn the order
    rate = np.outer(slopes, need).ravel()  # first steps of all groups, then second steps
    order = np.argsort(-rate, kind="stable")
    order = order[: np.count_nonzero(rate)]  # an upgrade that gains nothing is none
    step, group = np.divmod(order, max(beta.size, 1))
    least = row_bytes(num_columns, int(names[0])) * int(sizes.sum())
    return Front(
        np.cumsum(np.concatenate([[least], more[step] * sizes[group]])),
        less[step] * beta[group],
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
    that gain more than they cost, and prices of busy sides then rise (multiplicative weights on the dual problem). Near what
    the best prices choose, a few choices are filled up with what fits beside their busiest side, and steps are swapped
    between channels while that helps: where groups are few, the last step of each channel matters more than the prices.
    """
    if not fronts:
        return []
    sought = _Slowest.of(fronts, times, sides, per_variance, per_second)
    if per_variance == 0:
        return [int(at) for at in sought.filled(np.zeros((1, len(fronts)), dtype=np.int64))[0]]
    found = sought.filled(sought.near(*sought.priced()))
    num_pairs = (len(fronts) + 1) ** 2
    if num_pairs <= _MOST_PAIRS:
        order = np.argsort(sought.values(found), kind="stable")
        found = sought.swapped(found[order[: max(1, _MOST_PAIRS // 5 // num_pairs)]])
    return [int(at) for at in sought.filled(sought.best(found)[None])[0]]


@dataclass(frozen=True, eq=False)
class _Slowest:
    """Fronts end to end: point i of channel c is at ``first[c] + i``. A choice has a point of each channel: int64 [C].

    Time and variance are what they add to the objective.
    """

    first: Ints  # [C]
    last: Ints  # [C]
    time: Floats  # of all points
    left: Floats  # of all points: variance to gain above it
    offer: Floats  # of all points: what the next step gains, over its time, negative; ascending in a channel, then infinite
    sides: Ints  # [2, C]
    num_sides: int

    @classmethod
    def of(
        cls, fronts: Sequence[Front], times: Sequence[Floats], sides: Ints, per_variance: float, per_second: float
    ) -> _Slowest:  # fmt: skip
        ends = np.cumsum([time.size for time in times])
        left: list[Floats] = []
        offers: list[Floats] = []
        for front, time in zip(fronts, times, strict=True):
            gain = front.gain * (per_variance or 1.0)  # where it does not count it says what comes first
            more = per_second * (time[1:] - time[:-1])
            worth = np.full(gain.size, np.inf)  # a step that takes no time is worth any price
            with np.errstate(over="ignore"):
                np.divide(gain, more, out=worth, where=more > 0)
            left += [gain[::-1].cumsum()[::-1], np.zeros(1)]
            offers += [-np.minimum.accumulate(worth), np.full(1, np.inf)]
        return cls(
            np.append(0, ends[:-1]), ends - 1, per_second * np.concatenate(times), np.concatenate(left),
            np.concatenate(offers), np.ascontiguousarray(sides.T), int(sides.max()) + 1,
        )  # fmt: skip

    def loads(self, choices: Ints) -> Floats:
        """Seconds of each side, [B, 2 P] of choices [B, C]."""
        start = self.num_sides * np.arange(len(choices))[:, None]
        where = np.concatenate([start + side for side in self.sides], axis=1)
        time = self.time[self.first + choices]
        spent = np.concatenate([time, time], axis=1)
        found = np.bincount(where.ravel(), spent.ravel(), minlength=self.num_sides * len(choices))
        return found.astype(np.float64, copy=False).reshape(len(choices), -1)

    def values(self, choices: Ints) -> Floats:
        """The objective [B] of choices [B, C]."""
        above = self.left[self.first + choices].sum(axis=1)
        return np.asarray(above + self.loads(choices).max(axis=1), dtype=np.float64)

    def best(self, choices: Ints) -> Ints:
        """The choice [C], the first of equals."""
        found: Ints = choices[self.values(choices).argmin()]
        return found

    def priced(self) -> tuple[Floats, Ints]:
        """The best prices [2 P] that were tried (those of the highest lower bound), and what is chosen at them."""
        # An offer's place among all offers, after its channel's number: one search finds the points of all channels.
        order = np.argsort(self.offer, kind="stable")
        place = np.empty(order.size, dtype=np.int64)
        place[order] = np.arange(order.size)
        start = np.arange(self.first.size) * (order.size + 1)
        place += np.repeat(start, self.last - self.first + 1)
        offer, (src, dst), both = self.offer[order], self.sides, self.sides.ravel()
        points = np.empty((_PRICES, self.first.size), dtype=np.int64)
        prices, loads = np.empty((2, _PRICES, self.num_sides))
        lean = np.zeros(self.num_sides)
        for number in range(_PRICES):
            price = _exponential(lean - lean.max())
            price /= price.sum()
            point = place.searchsorted(start + offer.searchsorted(-(price[src] + price[dst])))
            time = self.time[point]
            load = np.bincount(both, np.concatenate((time, time)), minlength=self.num_sides)
            points[number], prices[number], loads[number] = point, price, load
            lean += load / max(load.max(), np.finfo(float).tiny) * (_FIRST_PUSH / sqrt(1 + number))
        best = (self.left[points].sum(axis=1) + (prices * loads).sum(axis=1)).argmax()
        return prices[best], points[best] - self.first

    def near(self, prices: Floats, choice: Ints) -> Ints:
        """Choices [B, C]: as if all prices had been higher or lower, the best of these."""
        at = self.first + choice
        low, high = np.maximum(at - _NEAR, self.first), np.minimum(at + _NEAR, self.last)
        counts = high - low
        home = np.repeat(np.arange(at.size), counts)
        step = np.arange(home.size) + np.repeat(low - (counts.cumsum() - counts), counts)
        src, dst = self.sides
        with np.errstate(divide="ignore", invalid="ignore"):  # where there is no price, any step comes first
            order = np.argsort(self.offer[step] / (prices[src] + prices[dst])[home], kind="stable")
        home, step = home[order], step[order]
        more = self.time[step + 1] - self.time[step]
        loads = np.zeros((home.size + 1, self.num_sides))
        loads[0] = self.loads(low[None] - self.first)
        for side in self.sides:
            loads[np.arange(1, home.size + 1), side[home]] = more
        gain = np.append(0.0, (self.left[step] - self.left[step + 1]).cumsum())
        value = loads.cumsum(axis=0).max(axis=1) - gain
        best = np.argsort(value, kind="stable")[:_FILLED]
        taken = np.array([np.bincount(home[:number], minlength=at.size) for number in best], dtype=np.int64)
        found: Ints = taken + (low - self.first)
        return found

    def filled(self, choices: Ints) -> Ints:
        """Choices [B, C] with more steps, best offer first, where neither side becomes busier than the busiest is."""
        points, loads = self.first + choices, self.loads(choices)
        slacks = loads.max(axis=1, keepdims=True) - loads
        has_next = points < self.last
        more = self.time[points + has_next] - self.time[points]
        fits = has_next & (more <= slacks[:, self.sides].min(axis=1))
        for lane in np.flatnonzero(fits.any(axis=1)).tolist():
            self._fill(points[lane], slacks[lane].tolist(), np.flatnonzero(fits[lane]).tolist())
        return points - self.first

    def _fill(self, points: Ints, slack: list[float], channels: list[int]) -> None:
        """Change the points [C] of these channels."""
        ends, time, offer = self.sides.T.tolist(), self.time, self.offer
        heap = [(offer.item(points.item(c)), c) for c in channels]
        heapq.heapify(heap)
        while heap:
            _, c = heapq.heappop(heap)
            at, (src, dst) = points.item(c), ends[c]
            more = time.item(at + 1) - time.item(at)
            if more > slack[src] or more > slack[dst]:
                continue  # nor will what follows it in this channel
            slack[src] -= more
            slack[dst] -= more
            points[c] += 1
            if at + 1 < self.last[c]:
                heapq.heappush(heap, (offer.item(at + 1), c))

    def swapped(self, choices: Ints) -> Ints:
        """Choices [B, C], each made better while it can be: a step less in a channel, a step more in another, or either."""
        points, going = self.first + choices, np.arange(len(choices))
        for _ in range(_SWAPS):
            is_better, less, more = self._best_swap(points[going])
            going = going[is_better]
            if not going.size:
                break
            for which, change in ((less[is_better], -1), (more[is_better], 1)):
                is_one = which < self.first.size
                points[going[is_one], which[is_one]] += change
        return points - self.first

    def _best_swap(self, points: Ints) -> tuple[NDArray[np.bool_], Ints, Ints]:
        """[B] each: whether it helps, the channel with a step less and that with a step more (C: none)."""
        (src, dst), every, num = self.sides, np.arange(self.first.size), self.first.size
        time, left, load = self.time[points], self.left[points], self.loads(points - self.first)
        above, below = np.minimum(points + 1, self.last), np.maximum(points - 1, self.first)
        gain = np.where(points < self.last, left - self.left[above], -np.inf)
        loss = np.where(points > self.first, self.left[below] - left, np.inf)
        rest = np.repeat(load[:, None], num + 1, axis=1)  # [B, C + 1, 2 P]: loads with a step less
        for side in self.sides:
            rest[:, every, side] -= time - self.time[below]
        busiest = rest.max(axis=2, keepdims=True)
        value = np.empty((len(points), num + 1, num + 1))  # of the swap, above that of all else
        value[:, :, -1:] = busiest
        pairs = np.maximum(rest[:, :, src], rest[:, :, dst], out=value[:, :, :-1])
        pairs += (self.time[above] - time)[:, None]
        np.maximum(pairs, busiest, out=pairs)
        pairs -= gain[:, None]
        value[:, :-1] += loss[:, :, None]
        value[:, every, every] = np.inf  # the same step back and forth
        flat = value.reshape(len(points), -1)
        best, now = flat.min(axis=1), load.max(axis=1)
        less, more = np.divmod(flat.argmin(axis=1), num + 1)
        return now - best > _LEAST_GAIN * (now + left.sum(axis=1)), less, more


def _exponential(x: Floats) -> Floats:
    """exp(x) of x <= 0, nearly, by products alone: machines differ in the last bit of the true one."""
    power = np.maximum(1 + x / 2**10, 0)
    for _ in range(10):
        power *= power
    return power
