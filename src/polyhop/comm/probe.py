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
from dataclasses import dataclass

import torch

from polyhop.comm.collective import Collective

__all__ = ["LinkSpeed", "measure_link"]

_ROUNDS = 9  # for the latency
_REPEATS = 3  # of the size that is measured
_FIRST_BYTES, _MOST_BYTES = 1 << 17, 1 << 24  # that a rank sends to all peers together
_LONG_ENOUGH_S = 0.04  # a large exchange: a scheduler's delays are small beside it
_GROWTH = 4


@dataclass(frozen=True)
class LinkSpeed:
    """What every rank was told of the links between all."""

    latency_s: float  # of one exchange of small messages
    bytes_per_s: float  # sent by each rank, and received, while all do


def measure_link(line: Collective) -> LinkSpeed:
    """The same figures on all ranks, which call it together: of every exchange the slowest rank's, of several the median."""
    peers = line.num_ranks - 1
    if peers == 0:
        return LinkSpeed(0.0, math.inf)
    _seconds(line, 1, 1)  # connections that open with the first message
    latency_s = statistics.median(_seconds(line, 1, _ROUNDS))
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
