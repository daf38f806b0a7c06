"""Strike a rank of a local launch with a signal at a chosen moment, and see how the launch takes it.

``strike`` works for every function of ranks: a training function is struck as well as a loop of sums.
"""

from __future__ import annotations

import multiprocessing.process
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from polyhop import launch
from polyhop.launch import Launch, RankFunction


@dataclass
class Struck:
    """How a launch ended."""

    result: Any = None
    error: Exception | None = None
    has_landed: bool = False  # the rank was there to be struck
    num_starts: int = 0  # how often the ranks were started
    seconds: float = float("nan")  # from the blow to the end
    whole_s: float = 0.0  # from the call to the end

    @property
    def is_felt(self) -> bool:
        """Whether the launch had to do something about it: a blow after the work was done changes nothing."""
        return self.has_landed and (self.error is not None or self.num_starts > 1)

    pids: dict[int, int] = field(default_factory=dict)  # rank -> process, of the first attempt


def strike(
    fn: RankFunction, args: Sequence[Any], options: Launch, *, rank: int, number: int, after_s: float
) -> Struck:
    """Launch, send the signal to that rank ``after_s`` after all ranks were started, wait for the end."""
    struck = Struck()
    over = threading.Event()
    at: list[float] = []

    def blow() -> None:
        while len(struck.pids) < (options.num_ranks or 1) and not over.wait(0.005):
            struck.pids.update(_rank_pids())
        if over.wait(after_s):
            return
        try:
            os.kill(struck.pids[rank], number)
        except ProcessLookupError:
            return
        at.append(time.monotonic())
        struck.has_landed = True
        seen = {struck.pids[rank]}
        while not over.wait(0.02):
            seen |= {pid for other, pid in _rank_pids().items() if other == rank}
            struck.num_starts = len(seen)

    thread = threading.Thread(target=blow)
    thread.start()
    began = time.monotonic()
    try:
        struck.result = launch.run(fn, args, options)
    except Exception as error:
        struck.error = error
    ended = time.monotonic()
    over.set()
    thread.join()
    struck.whole_s = ended - began
    if at:
        struck.seconds = ended - at[0]
    return struck


def _rank_pids() -> dict[int, int]:
    """rank -> pid of the children that are ranks (without joining any, as active_children would)."""
    children = list(multiprocessing.process._children)  # type: ignore[attr-defined]
    named = {child.name: child.pid for child in children if child.pid is not None}
    return {
        int(name.rsplit("-", 1)[1]): pid for name, pid in named.items() if name.startswith("polyhop-rank-")
    }
