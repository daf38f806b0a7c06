"""This process as a rank that torchrun (or anything that sets the same variables) has started.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say who and where; LOCAL_RANK and LOCAL_WORLD_SIZE which cores are its own;
TORCHELASTIC_RESTART_COUNT how often all ranks were started before. The store is torchrun's own where it keeps one
(TORCHELASTIC_USE_AGENT_STORE), else rank 0 opens it: a new one for every run, at the same address.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from polyhop.errors import ConfigError, LaunchError
from polyhop.launch.options import Launch, RankFunction
from polyhop.launch.rank import Seat, run_rank

__all__ = ["is_started_by_torchrun", "run_torchrun", "seat_from_environment"]

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_runs = 0


def is_started_by_torchrun() -> bool:
    """Whether the environment says which rank this process is."""
    return all(os.environ.get(name) for name in _NEEDED)


def run_torchrun(fn: RankFunction, args: Sequence[Any], options: Launch) -> Any:
    """Run ``fn`` in this process as the rank that the environment names; what it returns here."""
    global _runs
    if options.max_restarts:
        raise ConfigError(
            "under torchrun, torchrun starts ranks again: give max_restarts to it (torchrun --max-restarts)"
        )
    seat = seat_from_environment(options.num_ranks, _runs)
    _runs += 1  # the same in every rank: a program that runs twice meets twice
    return run_rank(seat, options, fn, args)


def seat_from_environment(num_ranks: int | None, run: int = 0) -> Seat:
    """Read and check the variables; ``num_ranks``: how many were asked for, if that was said."""
    missing = [name for name in _NEEDED if not os.environ.get(name)]
    if missing:
        raise LaunchError(
            f"{', '.join(missing)} not set: torchrun sets {', '.join(_NEEDED)} for every rank; start with "
            "torchrun --nproc-per-node N -m polyhop ..., or set them yourself"
        )
    rank, started = _number("RANK"), _number("WORLD_SIZE")
    if num_ranks is not None and num_ranks != started:
        raise LaunchError(
            f"{num_ranks} ranks were asked for, but torchrun started {started} (WORLD_SIZE): leave the number out, or make "
            "--nnodes times --nproc-per-node equal to it"
        )
    if rank >= started:
        raise LaunchError(f"RANK={rank} with WORLD_SIZE={started}: ranks are 0 to {started - 1}")
    attempt = _number("TORCHELASTIC_RESTART_COUNT", 0)
    has_own_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return Seat(
        rank,
        started,
        local_rank=_number("LOCAL_RANK", 0),
        num_local=_number("LOCAL_WORLD_SIZE", 1),
        host=os.environ["MASTER_ADDR"],
        port=_number("MASTER_PORT"),
        is_host=rank == 0 and has_own_store,
        has_own_store=has_own_store,
        attempt=attempt,
        name=f"{attempt}/{run}",
        engine="torchrun",
    )


def _number(name: str, otherwise: int | None = None) -> int:
    given = os.environ.get(name) or str(otherwise)
    if not given.isdigit():
        raise LaunchError(f"{name}={given!r}: expected a whole number")
    return int(given)
