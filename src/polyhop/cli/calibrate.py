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

_FEATURES, _HIDDEN, _CLASSES = 128, 256, 40  # of the model that stands for any


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
        tell("timing steps of GraphSAGE, for plans elsewhere")
        save_machine(_for_elsewhere(found), out)
    return found


def _for_elsewhere(machine: Machine) -> Machine:
    """With a law: where the figures are read, no model can be timed on this host."""
    from polyhop.nn import GraphSAGE
    from polyhop.plan.calibrate import measured_law
    from polyhop.planner import ANY_MODEL

    law = measured_law(GraphSAGE(_FEATURES, _HIDDEN, 2, out_channels=_CLASSES), _FEATURES)
    return machine.with_law(ANY_MODEL, law)


def _measure_rank(context: RankContext) -> dict[str, Any]:
    from polyhop.plan.calibrate import measure_messages

    link, message_s, byte_s = measure_messages(context.comm)
    return {
        "link": [link.bytes_per_s, link.latency_s],
        "message_s": message_s,
        "byte_s": byte_s,
    }
