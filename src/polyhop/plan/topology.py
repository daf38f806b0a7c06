"""Who is near whom: ranks that follow one another share hosts; hosts share a network.

Bytes to ranks of the same host cross its fast link, the others the host's network, which all of its ranks share, both at
once. Of a group of m ranks that send to one another alike, k of them on a host:

    seconds of a byte   the larger of (k - 1) / (m - 1) / inside and k (m - k) / (m - 1) / network
    of a round          the latency of the farthest

Legend: R ranks of a host.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from polyhop.plan.machine import Link

__all__ = ["Topology"]


@dataclass(frozen=True)
class Topology:
    """Ranks 0 .. R - 1 on the first host, and so on."""

    ranks_per_host: int
    inside: Link  # of a rank to others of its host
    network: Link  # of a host

    def among(self, first: int, num_ranks: int) -> Link:
        """Of a rank that sends to all others of so many that follow one another, while they all do."""
        if num_ranks < 2:
            return self.inside
        last, size = first + num_ranks, self.ranks_per_host
        hosts = {
            min(last, (host + 1) * size) - max(first, host * size)
            for host in _ends(first // size, (last - 1) // size)
        }
        byte_s = max(self._byte_s(here, num_ranks) for here in hosts)
        latency = self.inside.latency_s if hosts == {num_ranks} else self._farthest
        return Link(1 / byte_s if byte_s else math.inf, latency)

    def across(self, pairs: Iterable[tuple[int, int]]) -> Link:
        """Of ranks that send to one other each, all at once: the slowest of them."""
        leaving: dict[int, int] = {}
        is_inside = False
        for sender, receiver in pairs:
            host = sender // self.ranks_per_host
            if host == receiver // self.ranks_per_host:
                is_inside = True
            else:
                leaving[host] = leaving.get(host, 0) + 1
        rates = [self.inside.bytes_per_s] if is_inside else []
        rates += [self.network.bytes_per_s / max(leaving.values())] if leaving else []
        latency = self._farthest if leaving else self.inside.latency_s
        return Link(min(rates, default=math.inf), latency)

    @property
    def _farthest(self) -> float:
        return max(self.inside.latency_s, self.network.latency_s)

    def _byte_s(self, here: int, num_ranks: int) -> float:
        peers = num_ranks - 1
        near = (here - 1) / peers / self.inside.bytes_per_s
        return max(near, here * (num_ranks - here) / peers / self.network.bytes_per_s)


def _ends(first: int, last: int) -> set[int]:
    """Hosts at both ends, and one of those between, which are full."""
    return {first, last, min(first + 1, last)}
