"""Run a function on several ranks: processes of this host, torchrun's, or Ray's. Knows nothing of training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyhop.launch import rank, torchrun
from polyhop.launch.local import run_local
from polyhop.launch.options import Launch, RankContext, RankFunction
from polyhop.launch.ray_engine import run_ray

__all__ = ["Launch", "RankContext", "RankFunction", "is_rank_process", "run"]

_ENGINES = {"local": run_local, "torchrun": torchrun.run_torchrun, "ray": run_ray}


def run(fn: RankFunction, args: Sequence[Any] = (), options: Launch | None = None) -> Any:
    """Call ``fn(context, *args)`` on every rank; returns what it returned on rank 0 (under torchrun: in this process).

    ``fn`` is a function of a module's top level. An error in a rank is raised here with its class and the rank's number; a
    rank that is lost is a PeerError that names it; ranks that cannot meet are a LaunchError.
    """
    options = options or Launch()
    engine = options.engine
    if engine == "auto":
        engine = "torchrun" if torchrun.is_started_by_torchrun() else "local"
    return _ENGINES[engine](fn, args, options)


def is_rank_process() -> bool:
    """Whether this process is one rank of several: it runs a rank's function now, or torchrun started it."""
    return rank.is_rank() or torchrun.is_started_by_torchrun()
