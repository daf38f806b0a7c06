"""How fast ranks reach each other: a short measurement at the start of a run, for whoever has to plan messages.

Both figures are of all ranks exchanging with all at once, as they do in training: the seconds of an all-to-all whose
messages are next to nothing, and the bytes per second that a rank sends, and receives, in a large one. The size of the
large one grows until it takes a few hundredths of a second, so that a link of 100 Mbit/s is measured in half a second and
one of 100 Gbit/s with messages that fill it. What is sent counts as traffic like everything else, under ``sizes``.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from polyhop.comm.collective import Collective

__all__ = ["LinkSpeed", "PairCosts", "measure_link", "measure_pairs"]

_ROUNDS = 9  # for the latency
_REPEATS = 3  # of the size that is measured
_FIRST_BYTES, _MOST_BYTES = 1 << 17, 1 << 24  # that a rank sends to all peers together
_LONG_ENOUGH_S = 0.04  # a large exchange: a scheduler's delays are small beside it
_GROWTH = 4
_PAIR_BYTES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 19)  # of messages between two ranks


@dataclass(frozen=True)
class LinkSpeed:
    """What every rank was told of the links between all."""

    latency_s: float  # of one exchange of small messages
    bytes_per_s: float  # sent by each rank, and received, while all do


def measure_link(line: Collective) -> LinkSpeed:
    """The same figures on all ranks, which call it together: of every exchange the slowest rank's. Of large ones the median
    counts, of small ones the lower quartile: what a thread waits for its turn is no link's.
    """
    peers = line.num_ranks - 1
    if peers == 0:
        return LinkSpeed(0.0, math.inf)
    _seconds(line, 1, 1)  # connections that open with the first message
    latency_s = sorted(_seconds(line, 1, _ROUNDS))[_ROUNDS // 4]  # the others waited for a core
    each = max(1, _FIRST_BYTES // peers)
    while True:
        taken = _seconds(line, each, 1)
        is_largest = each * peers * _GROWTH > _MOST_BYTES
        if is_largest or taken[0] - latency_s >= _LONG_ENOUGH_S:
            taken += _seconds(line, each, _REPEATS - 1)
            if is_largest or statistics.median(taken) - latency_s >= _LONG_ENOUGH_S:
                break  # else it was something else that took long
        each *= _GROWTH
    transfer_s = max(statistics.median(taken) - latency_s, 1e-6)
    return LinkSpeed(latency_s, each * peers / transfer_s)


def _seconds(line: Collective, num_bytes: int, times: int) -> list[float]:
    """How long the slowest rank took, each time, to send so many bytes to each peer and to receive as many."""
    payload = torch.zeros(num_bytes, dtype=torch.uint8, device=line.device)
    own = []
    for _ in range(times):
        line.barrier()
        start = time.perf_counter()
        line.all_gather(payload, kind="sizes", counts=[num_bytes] * line.num_ranks)
        if line.device.type == "cuda":
            torch.cuda.synchronize(line.device)
        own.append(time.perf_counter() - start)
    taken = torch.tensor(own, dtype=torch.float64, device=line.device)
    everyone = line.all_gather(taken, kind="sizes", counts=[times] * line.num_ranks)
    slowest: list[float] = torch.stack(everyone).amax(0).tolist()
    return slowest


@dataclass(frozen=True)
class PairCosts:
    """Seconds of a message from rank i to rank j: ``per_byte[i][j]`` x bytes + ``per_message[i][j]``; alike on all ranks."""

    per_byte: tuple[tuple[float, ...], ...]
    per_message: tuple[tuple[float, ...], ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> PairCosts:
        return cls(*(tuple(tuple(row) for row in given[name]) for name in ("per_byte", "per_message")))


def measure_pairs(line: Collective, sizes: Sequence[int] = _PAIR_BYTES, repeats: int = 3) -> PairCosts:
    """A line through the seconds of messages of several sizes, for every pair of ranks; all ranks call it together.

    In round k every rank sends to the k-th after it and receives from the k-th before it; what a receiver waits, from a
    barrier on, is the time of that pair. Of repeats the median counts.
    """
    num_ranks = line.num_ranks
    taken = torch.zeros(num_ranks, len(sizes), dtype=torch.float64)  # from each rank to this one
    for shift in range(1, num_ranks):
        for at, size in enumerate(sizes):
            taken[(line.rank - shift) % num_ranks, at] = statistics.median(
                _pair_seconds(line, shift, size) for _ in range(repeats)
            )
    everyone = line.all_gather(taken.to(line.device), kind="sizes", counts=[num_ranks] * num_ranks)
    per_byte = [[0.0] * num_ranks for _ in range(num_ranks)]
    per_message = [[0.0] * num_ranks for _ in range(num_ranks)]
    for receiver, table in enumerate(everyone):
        for sender in range(num_ranks):
            if sender != receiver:
                slope, start = _fit(sizes, table[sender].tolist())
                per_byte[sender][receiver], per_message[sender][receiver] = slope, start
    return PairCosts(tuple(map(tuple, per_byte)), tuple(map(tuple, per_message)))


def _pair_seconds(line: Collective, shift: int, num_bytes: int) -> float:
    to, source = (line.rank + shift) % line.num_ranks, (line.rank - shift) % line.num_ranks
    payload = torch.zeros(num_bytes, dtype=torch.uint8, device=line.device)
    line.barrier()
    start = time.perf_counter()
    sending = line.start_send(payload, to, kind="sizes")
    line.receive([num_bytes], torch.uint8, source)
    if line.device.type == "cuda":
        torch.cuda.synchronize(line.device)
    seconds = time.perf_counter() - start
    sending.wait()
    return seconds


def _fit(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Least squares; neither figure is less than next to nothing."""
    mean_x, mean_y = statistics.mean(sizes), statistics.mean(seconds)
    spread = sum((x - mean_x) ** 2 for x in sizes)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(sizes, seconds, strict=True)) / spread
    slope = max(slope, 1e-13)
    return slope, max(mean_y - slope * mean_x, 0.0)
