"""Sides timed in turn, each in a process of its own, so that no side inherits another's heap or memory policy."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.harness import Timing

__all__ = ["Build", "alternate_processes"]


@dataclass(frozen=True)
class Build:
    """How a process makes its side: ``make(*arguments)`` (a module's function) gives what is timed.

    ``keeps_memory`` sets polyhop's memory policy (``kernels.kept_memory``, on for the whole of ``Trainer.fit``) before
    anything is allocated; otherwise the C library's defaults hold, as they do for the peers' users.
    """

    make: Callable[..., Callable[[], object]]
    arguments: tuple[Any, ...] = ()
    keeps_memory: bool = False


def alternate_processes(
    sides: Mapping[str, Build], *, repeats: int, counts_cpu: bool
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Timings of each side, and what its last run returned, in words. Only one side works at any time."""
    context = get_context("spawn")
    ends: dict[str, Connection] = {}
    processes = []
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    outcomes: dict[str, str] = {}
    try:
        for name, build in sides.items():
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, build), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            ends[name] = ours
            _answer(name, ours)
        names = list(sides)
        for turn in range(repeats):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                ends[name].send(True)
                wall, cpu, outcomes[name] = _answer(name, ends[name])
                seconds[name].append((wall, cpu))
    finally:
        for end in ends.values():
            end.close()
        for process in processes:
            process.join(10)
            process.kill()
    times = {name: Timing(*zip(*pairs, strict=True), counts_cpu) for name, pairs in seconds.items()}
    return times, outcomes


def _answer(name: str, end: Connection) -> Any:
    try:
        return end.recv()
    except EOFError:
        raise RuntimeError(f"the process of {name!r} ended early: see its message above") from None


def _serve(end: Connection, build: Build) -> None:
    """In the side's process: build, run once to warm up, then once per request."""
    import torch

    from polyhop.kernels import native

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if build.keeps_memory:
        native.call("ph_keep_memory", 1)
    side = build.make(*build.arguments)
    side()
    end.send(None)
    while _is_asked(end):
        gc.collect()
        wall, cpu = time.perf_counter(), time.process_time()
        outcome = side()
        end.send((time.perf_counter() - wall, time.process_time() - cpu, str(outcome)))


def _is_asked(end: Connection) -> bool:
    try:
        return bool(end.recv())
    except EOFError:
        return False
