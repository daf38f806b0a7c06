"""Another rate for the links of the host that this process runs in, while the lab goes on.

A lab is made with one rate. Ranks that take turns at several rates, and look for one, change their own links between epochs.
Connections that are open keep the segment size they began with, so a lab that will be changed begins with a slow rate.
"""

from __future__ import annotations

import os

from benchmarks.lab.network import (
    BUCKET_S,
    LARGEST_BURST_BYTES,
    LEAST_BURST_BYTES,
    LEAST_QUEUE_BYTES,
    NAME,
    QUEUE_S,
    LabError,
    _tool,
    ip,
)

__all__ = ["bucket", "relimit"]

UNLIMITED_BITS = 100e9


def relimit(mbit: float | None) -> None:
    """Both directions of this host's link. None: as good as no limit. Raises LabError outside of a lab."""
    names = [name for name in ip("netns", "identify", str(os.getpid())).split() if NAME.fullmatch(name)]
    if not names:
        raise LabError("this process is not in a host of a lab")
    match = NAME.fullmatch(names[0])
    assert match is not None
    run, host = match[1], match[4]
    rate = UNLIMITED_BITS if mbit is None else mbit * 1e6
    for namespace, device in ((names[0], "eth0"), (f"{run}-switch", f"port{host}")):
        _tool("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *bucket(rate))


def bucket(rate: float) -> list[str]:
    """The token bucket of a rate in bits per second, as the lab makes it."""
    per_s = rate / 8
    burst = round(min(LARGEST_BURST_BYTES, max(LEAST_BURST_BYTES, per_s * BUCKET_S)))
    queue = max(LEAST_QUEUE_BYTES, round(per_s * QUEUE_S))
    return ["rate", f"{round(rate)}bit", "burst", str(burst), "limit", str(queue)]
