"""Measuring this host whole: cores in this process, messages between ranks that are started for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyhop.launch import RankContext
    from polyhop.plan import Machine

__all__ = ["calibrate", "known_machine"]


def known_machine(tell: Callable[[str], None]) -> Machine:
    """As measured before, or now."""
    from polyhop.plan import load_machine

    return load_machine() or calibrate(tell)


def calibrate(tell: Callable[[str], None], out: Path | None = None) -> Machine:
    """Measured now, and kept for all that plan on this host; what past runs have taught is forgotten with it."""
    from polyhop.launch import Launch, run
    from polyhop.plan import Link, save_machine
    from polyhop.plan.calibrate import measure_cores

    tell("measuring this host (about ten seconds; kept for the next time)")
    found = measure_cores()
    told = run(_measure_rank, (), Launch(num_ranks=max(2, os.cpu_count() or 2)))
    found = replace(found, link=Link(*told["link"]), message_s=told["message_s"], byte_s=told["byte_s"])
    save_machine(found)
    if out is not None:
        save_machine(found, out)
    return found


def _measure_rank(context: RankContext) -> dict[str, Any]:
    from polyhop.plan.calibrate import measure_messages

    link, message_s, byte_s = measure_messages(context.comm)
    return {
        "link": [link.bytes_per_s, link.latency_s],
        "message_s": message_s,
        "byte_s": byte_s,
    }
