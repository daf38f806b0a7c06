"""What the tests of launch run on ranks: functions of a module's top level, as other processes must find them by name."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from polyhop.errors import ConfigError, Interrupted
from polyhop.launch import RankContext, is_rank_process


def add_up(context: RankContext, *more: Any) -> dict[str, Any]:
    """A sum over ranks, and what each rank knows of itself."""
    comm = context.comm
    total = comm.all_reduce(torch.tensor([comm.rank + 1.0], dtype=torch.float64), kind="gradients")
    cores = torch.tensor([len(os.sched_getaffinity(0)), torch.get_num_threads(), int(is_rank_process())])
    return {
        "sum": float(total),
        "rank": comm.rank,
        "num_ranks": comm.num_ranks,
        "attempt": context.attempt,
        "engine": context.engine,
        "settings": torch.stack(comm.all_gather(cores, kind="ids")).tolist(),
        "more": more,
    }


def raise_on(context: RankContext, rank: int, kind: str) -> None:
    """One rank raises, the others wait for it in a sum that never ends."""
    if context.comm.rank == rank:
        raise {"config": ConfigError("lr=-1: expected above 0"), "key": KeyError("x"), "own": Odd("odd")}[
            kind
        ]
    context.comm.all_reduce(torch.ones(1), kind="gradients")


def raise_everywhere(context: RankContext) -> None:
    raise ConfigError("lr=-1: expected above 0")


class Odd(Exception):  # noqa: N818
    """An error that only this module knows."""


def loop(context: RankContext, folder: str, num_steps: int) -> list[float]:
    """Sums over ranks, step by step; each rank first writes its pid. The result is a function of the steps alone."""
    comm = context.comm
    (Path(folder) / f"pid-{context.attempt}-{comm.rank}").write_text(str(os.getpid()))
    state = torch.zeros(4, dtype=torch.float64)
    for step in range(num_steps):
        mine = torch.full((4,), (step % 7 + 1.0) * (comm.rank + 1) / 8, dtype=torch.float64)
        state = 0.5 * state + comm.all_reduce(mine, kind="gradients")
        if step % 50 == 0:
            time.sleep(0.01)
    return list(state.tolist())


def expected(num_ranks: int, num_steps: int) -> list[float]:
    """What ``loop`` gives, without ranks."""
    state = 0.0
    for step in range(num_steps):
        state = 0.5 * state + sum((step % 7 + 1.0) * (rank + 1) / 8 for rank in range(num_ranks))
    return [state] * 4


def end_at_once(context: RankContext, folder: str, rank: int, how: str) -> list[float]:
    """A rank ends by its own hand in its first attempt."""
    if context.attempt == 0 and context.comm.rank == rank:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), getattr(signal, how))
    return loop(context, folder, 200)


def end_once(context: RankContext, folder: str) -> list[float]:
    """Rank 1 is killed in its first attempt."""
    return end_at_once(context, folder, 1, "SIGKILL")


def sum_up(context: RankContext) -> float:
    return float(context.comm.all_reduce(torch.tensor([context.comm.rank + 1.0]), kind="gradients"))


def wait_to_be_stopped(context: RankContext, folder: str, save_s: float) -> None:
    """Training that is asked to stop: every rank takes its time to save."""
    rank = context.comm.rank
    (Path(folder) / f"pid-0-{rank}").write_text(str(os.getpid()))
    try:
        time.sleep(600)
    except Interrupted:
        time.sleep(save_s * rank)
        (Path(folder) / f"saved-{rank}").write_text("")
        raise
