"""Launcher ``ray``: functions are tasks of a Ray cluster, on whichever hosts it has room.

An existing cluster is used where the program is connected to one or RAY_ADDRESS names one; else a local one is started, and
shut down when the launcher is closed. Ray never retries a task: the ledger gives again what a lost function had.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from polyhop.errors import LaunchError, UnsupportedError
from polyhop.serverless.function import Order, work
from polyhop.serverless.local import Ended

__all__ = ["RayCluster", "RayLauncher"]

_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_PATIENCE_S = 3.0


class RayCluster:
    """A connection to a cluster; ``close`` ends a local one that was started for it."""

    def __init__(self, num_cpus: int | None = None) -> None:
        try:
            import ray
        except ImportError as error:
            raise UnsupportedError(
                "functions on Ray need Ray: pip install 'polyhop[ray]', on every host of the cluster; or use launcher "
                "'local'"
            ) from error
        self.ray: Any = ray
        self.is_own = not (ray.is_initialized() or os.environ.get("RAY_ADDRESS"))
        if not ray.is_initialized():
            self._join(num_cpus or 1)

    def _join(self, num_cpus: int) -> None:
        try:
            if self.is_own:
                os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
                os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
                cores = max(os.cpu_count() or 1, num_cpus)
                self.ray.init(address="local", num_cpus=cores, include_dashboard=False, logging_level="ERROR",
                         log_to_driver=False)  # fmt: skip
            else:
                self.ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
        except Exception as error:  # Ray has no class of its own for it
            where = "on this host" if self.is_own else f"at RAY_ADDRESS={os.environ['RAY_ADDRESS']}"
            raise LaunchError(f"no Ray cluster {where}: {error}") from error

    @property
    def address(self) -> str:
        """At which its hosts reach this one."""
        found: Callable[[], str] = self.ray.util.get_node_ip_address
        return found()

    def close(self) -> None:
        if self.is_own:
            self.ray.shutdown()


@dataclass
class _Running:
    reference: Any
    start_s: float


class RayLauncher:
    """``order`` is a model of what functions are told; each gets a name of its own. ``cores``: what each reserves."""

    def __init__(self, order: Order, *, cluster: RayCluster | None = None, cores: float = 1.0) -> None:
        self._cluster, self._order = cluster or RayCluster(), order
        self._ray = self._cluster.ray
        self._running: dict[str, _Running] = {}
        self._gone: list[Ended] = []
        self.num_started = 0
        self._function = self._ray.remote(_work).options(
            num_cpus=cores,
            max_retries=0,
            runtime_env={"env_vars": dict.fromkeys(_ONE_THREAD, "1")},
        )

    @property
    def alive(self) -> list[str]:
        """Names of the functions that were started and have not ended; some may wait for room in the cluster."""
        self._sweep()
        return list(self._running)

    def ensure(self, wanted: int) -> list[str]:
        """Start functions until so many are alive; names of the new ones."""
        return [self._start() for _ in range(max(wanted - len(self.alive), 0))]

    def _start(self) -> str:
        name = f"{self._order.function}-{self.num_started}"
        self.num_started += 1
        reference = self._function.remote(replace(self._order, function=name))
        self._running[name] = _Running(reference, time.time())
        return name

    def ended(self) -> list[Ended]:
        """Functions that have ended since the last call."""
        self._sweep()
        found, self._gone = self._gone, []
        return found

    def _sweep(self, within_s: float = 0.0) -> None:
        """Take what has ended from those that run."""
        if not self._running:
            return
        names = {each.reference: name for name, each in self._running.items()}
        done, _ = self._ray.wait(list(names), num_returns=len(names), timeout=within_s)
        for reference in done:
            code, said = 0, ""
            try:
                self._ray.get(reference)
            except Exception as error:  # of the function, or of Ray about it
                code, said = 1, f"{type(error).__name__}: {error}"[-2000:]
            start_s = self._running.pop(names[reference]).start_s
            self._gone.append(Ended(names[reference], code, start_s, time.time(), said))

    def close(self) -> list[Ended]:
        """Wait a while for functions to end, then end them, and the cluster if it is our own."""
        self._sweep(_PATIENCE_S)
        for each in self._running.values():
            with suppress(self._ray.exceptions.RayError, ValueError):
                self._ray.cancel(each.reference, force=True)
        self._sweep(_PATIENCE_S)
        found = self.ended()
        self._cluster.close()
        return found


def _work(order: Order) -> dict[str, Any]:
    """Runs on a host of the cluster."""
    return work(order).to_json()
