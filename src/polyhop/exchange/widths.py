"""Widths of quantised messages: which rows deserve more bits, at what variance and what time. Mathematics alone.

A channel is what one rank sends another in one exchange (a layer, a direction). Rows are sorted by the variance they would
add and cut into groups; a group has one width. Each choice is judged by

    variance    sum over rows of beta * c(b), c(b) = 1 / (2^b - 1)^2
    seconds     a channel takes theta * bytes + gamma, or nothing if it has no rows. "rounds": rank i sends to i + k in round
                k, a round takes as long as its slowest channel, rounds add up. "slowest": all is sent at once, a rank takes
                the sum of what it sends or of what it receives, and the slowest rank decides
    objective   lam * (V - V_widest) / (V_narrowest - V_widest) + (1 - lam) * (T - T_narrowest) / (T_widest - T_narrowest)

A channel's sensible choices are a *front*: bytes up, variance down. "hull" knows those on its convex hull, found by taking
upgrades in order of gain per byte; "exact" knows them all. One sweep over the fronts of a round finds its best time. Equal
numbers give equal answers in every process: ties go by position.

Legend: s rows of a channel, G groups of them, K widths, k points of a front, C channels, P ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from polyhop.errors import ConfigError, InputError, unknown
from polyhop.exchange.fronts import (
    exact_front,
    hull_front,
    least_of_round,
    least_of_slowest,
    noise,
    row_bytes,
)
from polyhop.kernels import Key, Purpose, fold, random_u32

__all__ = [
    "METHODS",
    "MODELS",
    "WIDTHS",
    "Assignment",
    "Channel",
    "Cost",
    "Groups",
    "cost",
    "groups",
    "random_widths",
    "row_bytes",
    "same_bytes",
    "solve",
    "uniform",
]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bytes = NDArray[np.uint8]

WIDTHS = (2, 4, 8)
MODELS = ("rounds", "slowest")
METHODS = ("hull", "exact")
_KNOWN = (1, 2, 4, 8, 16, 32)
_NOTHING = 1e-290  # or less: one over it would not be a number


@dataclass(frozen=True, eq=False)
class Channel:
    """Rows that rank ``src`` sends to rank ``dst`` in one exchange."""

    src: int
    dst: int
    beta: Floats  # [s]: (sum of alpha^2) * D / 6 * (sum of range^2) of each row
    num_columns: int  # D
    theta: float = 1.0  # seconds per byte
    gamma: float = 0.0  # seconds per message

    def __post_init__(self) -> None:
        object.__setattr__(self, "beta", np.asarray(self.beta, dtype=np.float64))
        if self.beta.ndim != 1 or not np.all(np.isfinite(self.beta)) or np.any(self.beta < 0):
            raise InputError(f"channel {self.src} -> {self.dst}: beta must be finite numbers >= 0, one a row")
        if self.src == self.dst or min(self.src, self.dst) < 0:
            raise InputError(f"channel {self.src} -> {self.dst}: two different ranks are needed")
        if self.num_columns < 1 or not (0 <= self.theta < np.inf and 0 <= self.gamma < np.inf):
            raise InputError(
                f"channel {self.src} -> {self.dst}: needs columns >= 1 and finite theta and gamma >= 0, got "
                f"{self.num_columns}, {self.theta} and {self.gamma}"
            )

    def seconds(self, num_bytes: Ints) -> Floats:
        """Of messages of so many bytes, as float64 of the same shape."""
        per_message = self.gamma if self.beta.size else 0.0
        return np.asarray(self.theta * num_bytes + per_message, dtype=np.float64)


@dataclass(frozen=True, eq=False)
class Groups:
    """Rows of a channel, largest beta first, in groups of one size; the last may be smaller."""

    order: Ints  # [s]: rows
    beta: Floats  # [G]: sum over the group
    sizes: Ints  # [G]

    def of_rows(self, widths: Bytes) -> Bytes:
        """[s], in the channel's order of rows, of groups' widths [G]."""
        out = np.empty(self.order.size, dtype=np.uint8)
        out[self.order] = np.repeat(widths, self.sizes)
        return out


@dataclass(frozen=True, eq=False)
class Assignment:
    """A width for every group of every channel, in the order of channels."""

    groups: tuple[Groups, ...]
    widths: tuple[Bytes, ...]  # [G] each

    def rows(self) -> tuple[Bytes, ...]:
        """[s] each, in the channels' own order of rows."""
        return tuple(each.of_rows(widths) for each, widths in zip(self.groups, self.widths, strict=True))


@dataclass(frozen=True)
class Cost:
    """What an assignment costs: the objective is between 0 and 1."""

    objective: float
    variance: float
    seconds: float
    num_bytes: int


def groups(beta: Floats, group_size: int = 1) -> Groups:
    """Sorted by beta, descending, equal ones by position; then cut."""
    if group_size < 1:
        raise ConfigError(f"a group has at least one row, got group_size={group_size}")
    order = np.argsort(-beta, kind="stable").astype(np.int64)
    starts = np.arange(0, beta.size, group_size)
    if not beta.size:
        return Groups(order, np.zeros(0), starts)
    return Groups(order, np.add.reduceat(beta[order], starts), np.diff(starts, append=beta.size))


def cost(
    channels: Sequence[Channel], rows: Sequence[Bytes], lam: float, *, num_ranks: int,
    widths: Sequence[int] = WIDTHS, model: str = "rounds",
) -> Cost:  # fmt: skip
    """Of rows' widths (uint8 [s] for each channel), whoever chose them. widths: what the objective is scaled by."""
    judge = _Judge.of(channels, lam, num_ranks, model)
    return _Scale.of(judge, lam, widths).cost(*judge.of_rows(rows))


def uniform(channels: Sequence[Channel], width: int) -> tuple[Bytes, ...]:
    """uint8 [s] for each channel: one width for all rows."""
    return tuple(np.full(each.beta.size, width, dtype=np.uint8) for each in channels)


def random_widths(
    channels: Sequence[Channel], mean_bits: float, key: Key, *, site: int = 0, widths: Sequence[int] = WIDTHS
) -> tuple[Bytes, ...]:
    """uint8 [s] for each channel: widths mixed to a mean (to within the rounding of counts), dealt to rows by chance.

    Width b has a share that grows as exp(t b), t such that the mean is right: the most even mix that there is.
    """
    kinds = _ascending(widths)
    if not kinds[0] <= mean_bits <= kinds[-1]:
        raise ConfigError(f"widths {kinds} cannot have a mean of {mean_bits} bits")
    bounds = np.round(np.cumsum(_shares(kinds, mean_bits))[:-1], 9)  # no machine's last bits
    out = []
    for each in channels:
        s = each.beta.size
        words = random_u32(fold(key.at(Purpose.ROUND, site), each.src, each.dst), torch.arange(s)).numpy()
        dealt = np.empty(s, dtype=np.uint8)
        order = np.lexsort((words[:, 1], words[:, 0]))
        dealt[order] = np.array(kinds, dtype=np.uint8)[
            np.searchsorted(bounds, (np.arange(s) + 0.5) / max(s, 1))
        ]
        out.append(dealt)
    return tuple(out)


def same_bytes(
    channels: Sequence[Channel], budget: int, *, group_size: int = 1, widths: Sequence[int] = WIDTHS
) -> Assignment:
    """Least variance with at most ``budget`` bytes over all channels together, to within one upgrade of one group."""
    kinds, grouped = _ascending(widths), [groups(each.beta, group_size) for each in channels]
    fronts = [
        hull_front(own.beta, own.sizes, each.num_columns, kinds) for each, own in zip(channels, grouped)
    ]
    slack = budget - sum(int(front.num_bytes[0]) for front in fronts)
    if slack < 0:
        raise ConfigError(
            f"{budget} bytes are too few: rows of {kinds[0]} bits take {budget - slack}; allow these, or narrower widths"
        )
    rate = np.concatenate([np.zeros(0), *(front.rate for front in fronts)])
    size = np.concatenate([np.zeros(0, dtype=np.int64), *(np.diff(front.num_bytes) for front in fronts)])
    home = np.repeat(np.arange(len(fronts)), [front.gain.size for front in fronts])
    rest, taken = np.argsort(-rate, kind="stable"), np.zeros(len(fronts), dtype=np.int64)
    while rest.size:
        num_fit = int(np.searchsorted(np.cumsum(size[rest]), slack, side="right"))
        taken += np.bincount(home[rest[:num_fit]], minlength=len(fronts))
        slack -= int(size[rest[:num_fit]].sum())
        rest = rest[num_fit:]
        if rest.size:  # the next one is too large: its channel is done, others may go on
            rest = rest[home[rest] != home[rest[0]]]
    return Assignment(
        tuple(grouped), tuple(front.pick(int(at)) for front, at in zip(fronts, taken, strict=True))
    )


def solve(
    channels: Sequence[Channel], lam: float, *, num_ranks: int, group_size: int = 1, widths: Sequence[int] = WIDTHS,
    model: str = "rounds", method: str = "hull",
) -> tuple[Assignment, Cost]:  # fmt: skip
    """Widths with the least objective (module docstring). lam: 0 only time counts, 1 only variance.

    "exact" is the optimum of the model "rounds", in O(G^(K - 1)) a channel; "hull" takes O(G log G) and is, in each channel,
    within one upgrade of one group of it. Channels that wait for a slower one are upgraded for nothing.
    """
    if method not in METHODS:
        raise ConfigError(unknown("method", method, METHODS))
    if (model, method) == ("slowest", "exact"):
        raise ConfigError('model "slowest" has no exact method; use method "hull"')
    judge = _Judge.of(channels, lam, num_ranks, model)
    scale = _Scale.of(judge, lam, widths)
    make, kinds = (hull_front if method == "hull" else exact_front), _ascending(widths)
    grouped = [groups(each.beta, group_size) for each in channels]
    fronts = [make(own.beta, own.sizes, each.num_columns, kinds) for each, own in zip(channels, grouped)]
    times = [each.seconds(front.num_bytes) for each, front in zip(channels, fronts)]
    weights = (scale.per_variance, scale.per_second)
    if model == "slowest":
        sides = np.array([(each.src, num_ranks + each.dst) for each in channels], dtype=np.int64).reshape(
            -1, 2
        )
        points = least_of_slowest(fronts, times, sides, *weights)
    else:
        points = [0] * len(channels)
        for number in range(1, num_ranks):
            members = [c for c, each in enumerate(channels) if (each.dst - each.src) % num_ranks == number]
            found = least_of_round([fronts[c] for c in members], [times[c] for c in members], *weights)
            for c, point in zip(members, found, strict=True):
                points[c] = point
    chosen = Assignment(
        tuple(grouped), tuple(front.pick(at) for front, at in zip(fronts, points, strict=True))
    )
    return chosen, scale.cost(*judge.of_rows(chosen.rows()))


@dataclass(frozen=True)
class _Scale:
    """The objective's units: all rows at the narrowest and at the widest width."""

    least_variance: float
    least_seconds: float
    per_variance: float  # objective for one unit of variance
    per_second: float

    @classmethod
    def of(cls, judge: _Judge, lam: float, widths: Sequence[int]) -> _Scale:
        kinds = _ascending(widths)
        most_variance, least_seconds, _ = judge.of_uniform(kinds[0])
        least_variance, most_seconds, _ = judge.of_uniform(kinds[-1])
        variance, seconds = most_variance - least_variance, most_seconds - least_seconds
        return cls(
            least_variance, least_seconds,
            lam / variance if variance > _NOTHING else 0.0,  # where the width makes no difference it does not count
            (1 - lam) / seconds if seconds > _NOTHING else 0.0,
        )  # fmt: skip

    def cost(self, variance: float, seconds: float, num_bytes: int) -> Cost:
        above = self.per_variance * (variance - self.least_variance)
        return Cost(above + self.per_second * (seconds - self.least_seconds), variance, seconds, num_bytes)


@dataclass(frozen=True, eq=False)
class _Judge:
    """Says variance, seconds and bytes of rows' widths in some channels."""

    channels: Sequence[Channel]
    home: Ints  # of all rows, one channel after the other: the channel
    beta: Floats  # of all rows
    num_ranks: int
    model: str

    @classmethod
    def of(cls, channels: Sequence[Channel], lam: float, num_ranks: int, model: str) -> _Judge:
        _check(channels, lam, num_ranks, model)
        home = np.repeat(np.arange(len(channels)), [each.beta.size for each in channels])
        return cls(
            channels, home, np.concatenate([np.zeros(0), *(each.beta for each in channels)]), num_ranks, model
        )

    def of_uniform(self, width: int) -> tuple[float, float, int]:
        return self._judged([width], self.home)

    def of_rows(self, rows: Sequence[Bytes]) -> tuple[float, float, int]:
        """rows: uint8 [s] for each channel."""
        own = np.concatenate([np.zeros(0, dtype=np.uint8), *rows])
        kinds = np.flatnonzero(np.bincount(own))
        place = np.zeros(256, dtype=np.int64)
        place[kinds] = len(self.channels) * np.arange(kinds.size)
        return self._judged(kinds.tolist(), place[own] + self.home)

    def _judged(self, kinds: Sequence[int], where: Ints) -> tuple[float, float, int]:
        """where: of all rows, the place of their width among these times C, and the channel."""
        shape = (len(kinds), len(self.channels))
        counts = np.bincount(where, minlength=shape[0] * shape[1]).reshape(shape)
        beta = np.bincount(where, self.beta, minlength=shape[0] * shape[1]).reshape(shape)
        columns = np.array([each.num_columns for each in self.channels], dtype=np.int64)
        variance, sizes = 0.0, np.zeros(len(self.channels), dtype=np.int64)
        for width, num_rows, total in zip(kinds, counts, beta, strict=True):
            sizes += row_bytes(columns, width) * num_rows
            variance += noise(width) * float(total.sum())
        return variance, self._seconds(sizes), int(sizes.sum())

    def _seconds(self, sizes: Ints) -> float:
        """Of messages of so many bytes in each channel."""
        src = np.array([each.src for each in self.channels], dtype=np.int64)
        dst = np.array([each.dst for each in self.channels], dtype=np.int64)
        time = np.array([each.seconds(sizes[c]) for c, each in enumerate(self.channels)], dtype=np.float64)
        if self.model == "rounds":
            slowest = np.zeros(self.num_ranks)
            np.maximum.at(slowest, (dst - src) % self.num_ranks, time)
            return float(slowest.sum())
        busy = (np.bincount(ranks, time, minlength=self.num_ranks) for ranks in (src, dst))
        return float(max(each.max(initial=0.0) for each in busy))


def _ascending(widths: Sequence[int]) -> tuple[int, ...]:
    if not widths or not set(widths) <= set(_KNOWN):
        raise ConfigError(f"widths are some of {_KNOWN}, got {tuple(widths)}")
    return tuple(sorted(set(widths)))


def _check(channels: Sequence[Channel], lam: float, num_ranks: int, model: str) -> None:
    if model not in MODELS:
        raise ConfigError(unknown("time model", model, MODELS))
    if not 0 <= lam <= 1:
        raise ConfigError(f"lam lies between 0 (only time) and 1 (only variance), got {lam}")
    pairs = [(each.src, each.dst) for each in channels]
    if len(set(pairs)) < len(pairs) or any(max(pair) >= num_ranks for pair in pairs):
        raise InputError(f"channels must be different pairs of {num_ranks} ranks, got {pairs}")


def _shares(kinds: Sequence[int], mean: float) -> Floats:
    """[K] that add to 1: the share of b grows as exp(t b), t by bisection."""
    values = np.array(kinds, dtype=np.float64)
    low, high = -40.0, 40.0
    for _ in range(100):
        middle = (low + high) / 2
        logs = middle * values
        shares = np.exp(logs - logs.max())
        shares /= shares.sum()
        low, high = (middle, high) if shares @ values < mean else (low, middle)
    return np.asarray(shares, dtype=np.float64)
